"""What a member tells of itself: metrics that are counted, a description that is asked for, and why nobody leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import Role
from tidelog.raft.messages import SnapshotId


@dataclass(slots=True)
class RaftMetrics:
    """Counters since the process began; times are of the event loop."""

    elections: int = 0
    """How often this node asked for votes."""
    leader_changes: int = 0
    without_leader_ms: int = 0
    """Time that no leader was known here, without the spell that lasts."""
    proposals: int = 0
    proposals_committed: int = 0
    entries_applied: int = 0
    persist_rounds: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    queue_overflows: int = 0
    rounds: int = 0
    snapshots_taken: int = 0
    snapshots_installed: int = 0
    snapshots_refused: int = 0
    """Received snapshots that were not what their CRC says."""
    snapshots_failed: int = 0
    """How often a helper process died while it took or checked a snapshot; it is done again later."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    node: NodeId
    directory: bytes
    endpoints: tuple[tuple[str, str], ...]
    is_voter: bool
    is_connected: bool
    error: str | None
    """Why it is not connected."""
    match: Offset | None = None
    """What it has synced; known to the leader only, as is what follows."""
    lag: int | None = None
    """Entries of the leader's log that it has not synced."""
    silent_ms: int | None = None
    counts: bool = True
    """False while it recovers from a loss of synced data."""
    stuck_ms: int | None = None
    """How long it has lagged behind without a step forward; 0 if it has everything, or moves on."""


@dataclass(frozen=True, slots=True)
class RaftReport:
    node: NodeId
    directory: bytes
    epoch: Epoch
    role: Role
    leader: NodeId | None
    commit: Offset
    applied: Offset
    log_start: Offset
    log_end: Offset
    durable_end: Offset
    snapshot: SnapshotId
    recovering_until: Offset | None
    without_leader_ms: int
    """How long no leader has been known or, by a node that may not campaign, heard; 0 if one is."""
    members: tuple[MemberReport, ...] = field(default=())
    observers: tuple[tuple[NodeId, Offset], ...] = ()
    """Who tails the log here, and what it was sent."""
    refusers: tuple[NodeId, ...] = ()
    """Voters that refused this node's last request for votes, while no leader is known."""


def waits_for(report: RaftReport, endpoint: Callable[[tuple[tuple[str, str], ...]], str]) -> str:
    """Why there is no leader, as far as this node can see. `endpoint` chooses where a member is reached."""
    voters = [member for member in report.members if member.is_voter]
    absent = [member for member in voters if not member.is_connected]
    present, quorum = len(voters) - len(absent), len(voters) // 2 + 1
    text = f"no leader for {report.without_leader_ms / 1000:.1f} s"
    if report.recovering_until is not None:
        text += f"; synced data was lost here: no vote until a leader brings it to {report.recovering_until}"
    me, names = (report.node, report.directory), ", ".join(str(member.node) for member in voters) or "none"
    if me not in [(member.node, member.directory) for member in voters]:
        text = f"{text}; not among the voters that it knows of ({names})"
        if me in [(member.node, member.directory) for member in report.members]:
            return f"{text}: it learns, and a leader must find it"
        return f"{text}: it was removed, or was never added. A leader must add it; or stop it, if it was to go"
    if report.recovering_until is not None and len(voters) - 1 < quorum:
        others = ", ".join(f"node {member.node}" for member in voters if member.node != report.node)
        return (
            f"{text}; {others} cannot be elected without the vote of this node ({quorum} of {len(voters)} are needed): "
            "an operator has to decide, see docs/operations.md, 'A recovering voter'"
        )
    if present >= quorum:
        text = f"{text}; {present} of {len(voters)} voters are connected"
        if not report.refusers:
            return f"{text}, an election is under way"
        refusers = ", ".join(f"node {node}" for node in report.refusers)
        return (
            f"{text}; votes are refused by {refusers}: they have a leader or a newer log, or they recover. If they "
            "have a leader, this node may have been removed from the quorum: `tidelog quorum describe` at one of them "
            "shows the voters, and docs/operations.md, 'Controllers', what to do with a removed node"
        )
    wanted = []
    for member in absent:
        where = f"node {member.node} at {endpoint(member.endpoints) or 'no address'}"
        wanted.append(f"{where} ({(member.error or '').removeprefix(f'{where}: ')})")
    more = f"waits for {quorum - present} more of {len(voters)} voters ({quorum} are needed)"
    return f"{text}; {more}: {', '.join(wanted)}"
