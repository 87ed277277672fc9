"""The status of a member: counters, a description, and why there is no leader. Pure."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import Role
from tidelog.raft.messages import SnapshotId


@dataclass(slots=True)
class RaftMetrics:
    """Counters since the process started; times are of the event loop."""

    elections: int = 0
    """Elections that this node started."""
    leader_changes: int = 0
    without_leader_ms: int = 0
    """Time without a known leader, excluding a current outage."""
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
    snapshots_rejected: int = 0
    """Received snapshots that failed their CRC."""
    snapshots_failed: int = 0
    """Times a helper process died while it took or checked a snapshot; the work is retried."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    node: NodeId
    directory: bytes
    endpoints: tuple[tuple[str, str], ...]
    is_voter: bool
    is_connected: bool
    error: str | None
    """Why it is not connected."""
    match: Offset | None = None
    """End of its durable log (Raft's match index). Only the leader knows this field and the following ones."""
    lag: int | None = None
    """Entries of the leader's log that it has not synced."""
    silent_ms: int | None = None
    counts: bool = True
    """False while it recovers from a loss of synced data."""
    stuck_ms: int | None = None
    """Time it has lagged without progress; 0 if it is caught up or advances."""


@dataclass(frozen=True, slots=True)
class RaftStatus:
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
    """Time without a known leader or, on a node that may not campaign, without contact; 0 if there is a leader."""
    members: tuple[MemberStatus, ...] = field(default=())
    observers: tuple[tuple[NodeId, Offset], ...] = ()
    """Observers that tail the log here, and the offset sent to each."""
    rejecting_voters: tuple[NodeId, ...] = ()
    """Voters that rejected this node's last vote request, while no leader is known."""


def explain_missing_leader(report: RaftStatus, endpoint: Callable[[tuple[tuple[str, str], ...]], str]) -> str:
    """Explains why there is no leader, as far as this node knows. `endpoint` selects the address of a member."""
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
        return (
            f"{text}: it was removed, or was never added. Add it with `tidelog quorum add`, or stop it if it was to go"
        )
    if report.recovering_until is not None and len(voters) - 1 < quorum:
        others = ", ".join(f"node {member.node}" for member in voters if member.node != report.node)
        return (
            f"{text}; {others} cannot be elected without the vote of this node ({quorum} of {len(voters)} are needed): "
            "an operator has to decide, see docs/operations.md, 'A recovering voter'"
        )
    if present >= quorum:
        text = f"{text}; {present} of {len(voters)} voters are connected"
        if not report.rejecting_voters:
            return f"{text}, an election is under way"
        rejecting_voters = ", ".join(f"node {node}" for node in report.rejecting_voters)
        return (
            f"{text}; votes are refused by {rejecting_voters}: they have a leader or a newer log, or they recover. "
            "If they have a leader, this node may have been removed from the quorum: `tidelog quorum describe` at one "
            "of them shows the voters, and docs/operations.md, 'Controllers', what to do with a removed node"
        )
    missing = []
    for member in absent:
        where = f"node {member.node} at {endpoint(member.endpoints) or 'no address'}"
        # The error may name another address of the node, such as the one that it sent itself.
        reason = re.sub(rf"^node {member.node} at \S+: ", "", member.error or "")
        missing.append(f"{where} ({reason})")
    more = f"waits for {quorum - present} more of {len(voters)} voters ({quorum} are needed)"
    return f"{text}; {more}: {', '.join(missing)}"
