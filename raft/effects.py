"""What the core requests of its driver. Field order is the order of execution. Pure.

The driver's duties:
1. Execute `persist` in order, number by number: truncate the log to `truncate_to`, append `entries`, sync; then store
   epoch, vote and the synced end in one commit. Before a truncation, store epoch and vote with the lowered synced end.
   When all is durable, step `Persisted(number)`. It may merge several.
2. Send only messages that the core has put into `messages`: the core holds those that depend on a persist until
   `Persisted`.
3. Pass `committed` to the state machine in order; offsets are contiguous.
4. Read and write snapshots as `snapshot_*` say, and step the matching event.
5. Step `Tick` at `core.deadline_ms`, at the latest.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.membership import VoterKey
from tidelog.raft.messages import Entry, Message, SnapshotChunk, SnapshotId

NO_COMMIT = Offset(0)


class Role(Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class HardState(NamedTuple):
    """The epoch, and the vote in it: must survive a restart."""

    epoch: Epoch
    voted_for: VoterKey | None


class Persist(NamedTuple):
    number: int
    hard_state: HardState
    reset_to: Offset | None
    """An installed snapshot replaces the stored log: drop all of it, it starts over at this offset."""
    truncate_to: Offset | None
    """Truncate the stored log to this end before appending (None: append at its end)."""
    first: Offset
    entries: tuple[Entry, ...]
    recovered: bool
    """Ends the recovery of lost data: a leader has replicated past it."""


class Rejection(Enum):
    """Why the core rejected a proposal, a membership change or a read."""

    NOT_LEADER = "not the leader"
    TRANSFERRING = "a leadership transfer is in progress"
    OVERLOADED = "too many uncommitted bytes"
    UNKNOWN = "leadership ended with the learner in the log: the next leader may promote it or not"
    MOVED = "the log does not end where the proposal expects"
    CHANGE_IN_PROGRESS = "another membership change is in progress"
    NOT_READY = "the leader has not committed an entry of its own epoch yet"
    UNKNOWN_MEMBER = "no such member"
    ALREADY_MEMBER = "the node is already a voter"
    TOO_MANY_MEMBERS = "the quorum has the maximum number of voters and learners"
    LAST_VOTER = "the last voter cannot be removed"
    NO_QUORUM_LEFT = "too few of the remaining voters are up and sound"


class SnapshotPiece(NamedTuple):
    """Read this chunk of the snapshot for a peer and step `SnapshotRead`."""

    peer: NodeId
    snapshot: SnapshotId
    position: int


class RoleChange(NamedTuple):
    role: Role
    epoch: Epoch
    leader: NodeId | None


@dataclass(slots=True, init=False)
class Effects:
    persist: Persist | None
    snapshot_writes: list[SnapshotChunk]
    """Store this received chunk (the last one: check, install, load) and step the outcome."""
    messages: list[tuple[NodeId, Message]]
    load_snapshot: SnapshotId | None
    """Load this snapshot into the state machine, before `committed`."""
    drop_before: Offset | None
    """Entries below may be dropped from storage: a snapshot covers them."""
    committed_from: Offset
    committed: tuple[Entry, ...]
    role: RoleChange | None
    accepted: list[tuple[int, Offset, Epoch]]
    """(token, offset, epoch): appended by this leader; committed when that offset commits in that epoch."""
    rejected: list[tuple[int, Rejection]]
    reads: list[tuple[int, Offset]]
    snapshot_reads: list[SnapshotPiece]

    def __init__(self) -> None:
        # Written out: created for every step, and seven default factories take twice the time.
        self.persist = None
        self.snapshot_writes = []
        self.messages = []
        self.load_snapshot = None
        self.drop_before = None
        self.committed_from = NO_COMMIT
        self.committed = ()
        self.role = None
        self.accepted = []
        self.rejected = []
        self.reads = []
        self.snapshot_reads = []
