"""What a core asks of its shell. Field order is the order of execution.

The shell's duties:
1. Carry out `persist` in order, number by number: cut the log to `truncate_to`, append `entries`, sync; then store
   epoch, vote and the synced end in one commit. Before a cut epoch and vote are stored with the lowered synced end.
   When all is durable, step `Persisted(number)`. It may merge several.
2. Never send a message that the core has not put into `messages`: those that depend on a persist are held back by the
   core until `Persisted`.
3. Hand `committed` to the state machine in order; offsets are contiguous from the one before.
4. Read and write snapshots as `snapshot_*` say, and step the matching event.
5. Step `Tick` at `core.deadline_ms`, at the latest.
"""

from __future__ import annotations

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
    """What must survive: the epoch, and the vote in it."""

    epoch: Epoch
    voted_for: VoterKey | None


class Persist(NamedTuple):
    number: int
    hard_state: HardState
    reset_to: Offset | None
    """An installed snapshot replaces the stored log: drop all of it, it begins anew at this offset."""
    truncate_to: Offset | None
    """Cut the stored log to this end before appending (None: it continues where it ends)."""
    first: Offset
    entries: tuple[Entry, ...]
    recovered: bool
    """Clear the mark that synced data was lost: a leader has brought this voter past it."""


class Refusal(Enum):
    """Why a proposal, a membership change or a read was not taken."""

    NOT_LEADER = "not the leader"
    TRANSFERRING = "leadership is being handed over"
    OVERLOADED = "too many uncommitted bytes"
    UNKNOWN = "leadership ended with the learner in the log: the next leader may promote it, or not"
    MOVED = "the log does not end where the proposal belongs"
    CHANGE_IN_PROGRESS = "another membership change is in progress"
    NOT_READY = "the leader has not committed an entry of its own epoch yet"
    UNKNOWN_MEMBER = "no such member"
    ALREADY_MEMBER = "it is a voter already"
    TOO_MANY_MEMBERS = "as many voters and learners as there may be"
    LAST_VOTER = "the last voter cannot be removed"
    NO_QUORUM_LEFT = "too few of the voters that would remain are up and sound"


class SnapshotPiece(NamedTuple):
    """Read this piece of our snapshot for a peer and step `SnapshotRead`."""

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
    """Store this received piece (its last one: check, install, load) and step the outcome."""
    messages: list[tuple[NodeId, Message]]
    load_snapshot: SnapshotId | None
    """Replace the state machine's state by this snapshot, before `committed`."""
    drop_before: Offset | None
    """Entries below may be removed from storage: a snapshot covers them."""
    committed_from: Offset
    committed: tuple[Entry, ...]
    role: RoleChange | None
    accepted: list[tuple[int, Offset, Epoch]]
    """(token, offset, epoch): in the log of this leader; it is committed when that offset commits in that epoch."""
    refused: list[tuple[int, Refusal]]
    reads: list[tuple[int, Offset]]
    snapshot_reads: list[SnapshotPiece]

    def __init__(self) -> None:
        # Written out: one is made for every step, and seven default factories take twice the time.
        self.persist = None
        self.snapshot_writes = []
        self.messages = []
        self.load_snapshot = None
        self.drop_before = None
        self.committed_from = NO_COMMIT
        self.committed = ()
        self.role = None
        self.accepted = []
        self.refused = []
        self.reads = []
        self.snapshot_reads = []
