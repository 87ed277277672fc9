"""What a member tells of itself: metrics that are counted, and a description that is asked for."""

from __future__ import annotations

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
    """How long no leader has been known, 0 if one is."""
    members: tuple[MemberReport, ...] = field(default=())
    observers: tuple[tuple[NodeId, Offset], ...] = ()
    """Who tails the log here, and what it was sent."""
