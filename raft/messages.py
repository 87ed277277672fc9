"""The messages between Raft nodes, and the events of one node. Pure.

Messages are named tuples (created on the hot path, some 100,000 a second). Every message carries the sender's epoch and
id. Offsets are exclusive ends: `end` is the next offset to be written, `prev_offset` the offset of the first entry that
an append carries, and `prev_epoch` the epoch of the entry before it.

    PreVoteRequest    would you vote for me?          changes nothing at the receiver, not even its timer
    VoteRequest       vote for me in this epoch       sent only when epoch and own vote are durable
    AppendRequest     entries, or a heartbeat         sent at once: the leader counts itself only when it has synced
    AppendResponse    what is *synced*, or where the logs differ
    SnapshotChunk     a chunk of a snapshot           the response names the next position
    TimeoutNow        start an election at once       leadership transfer

Events are the inputs of a core beside messages: a tick, a proposal, a disk completion, a broken stream.
"""

from enum import IntEnum
from typing import NamedTuple

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.membership import Member, Membership


class EntryKind(IntEnum):
    DATA = 0
    NO_OP = 1
    """The first entry of an epoch: once it commits, everything before it has."""
    MEMBERSHIP = 2


class Entry(NamedTuple):
    """One offset of the log."""

    epoch: Epoch
    kind: EntryKind
    data: bytes


ENTRY_OVERHEAD_BYTES = 32


def entry_bytes(entry: Entry) -> int:
    return len(entry.data) + ENTRY_OVERHEAD_BYTES


class SnapshotId(NamedTuple):
    """A snapshot holds the effect of every entry below `offset`; `epoch` is that of the last of them."""

    offset: Offset
    epoch: Epoch


SNAPSHOT_HELD = -1


class PreVoteRequest(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    to_directory: bytes
    end: Offset
    last_epoch: Epoch


class PreVoteResponse(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    granted: bool


class VoteRequest(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    to_directory: bytes
    end: Offset
    last_epoch: Epoch


class VoteResponse(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    granted: bool


class AppendRequest(NamedTuple):
    epoch: Epoch
    sender: NodeId
    prev_offset: Offset
    prev_epoch: Epoch
    entries: tuple[Entry, ...]
    commit: Offset
    probe: int
    """The round of leadership confirmation that the response confirms (read index)."""


class AppendResponse(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    match: Offset
    """Everything below is synced here and equal to the leader's log. On a rejection: the rejected `prev_offset`."""
    rejected: bool
    hint_epoch: Epoch
    hint_end: Offset
    """On a rejection: the largest epoch of this log that is at most the rejected one, and where it ends here."""
    probe: int
    counts: bool
    """False while this voter recovers from a loss of synced data: it is in no majority."""


class SnapshotChunk(NamedTuple):
    epoch: Epoch
    sender: NodeId
    snapshot: SnapshotId
    position: int
    data: bytes
    total_bytes: int


class SnapshotAck(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    snapshot: SnapshotId
    wanted: int
    """The next position, or `SNAPSHOT_HELD` if the node has the snapshot or more."""


class TimeoutNow(NamedTuple):
    epoch: Epoch
    sender: NodeId


Message = (
    PreVoteRequest
    | PreVoteResponse
    | VoteRequest
    | VoteResponse
    | AppendRequest
    | AppendResponse
    | SnapshotChunk
    | SnapshotAck
    | TimeoutNow
)


# Events.


class Tick(NamedTuple):
    """Time has passed; the core checks its deadlines."""


class Propose(NamedTuple):
    """Appends `data` if this node leads; `token` is in `Effects.accepted` or `Effects.rejected`."""

    token: int
    data: bytes
    at: Offset | None = None
    epoch: Epoch | None = None
    """If set: only at this offset and in this epoch. A decision must follow the state that it was made on."""


class ChangeMembership(NamedTuple):
    """Adds a learner (promoted once it has caught up), removes a member, or changes its endpoints."""

    token: int
    add: Member | None = None
    remove: NodeId | None = None
    update: Member | None = None
    """New endpoints of a member with this node and directory."""


class ReadIndex(NamedTuple):
    """`Effects.reads` returns an offset: a state that has applied it is linearizable."""

    token: int


class Transfer(NamedTuple):
    """Transfers leadership to a voter (None: the most advanced one)."""

    target: NodeId | None = None


class Persisted(NamedTuple):
    """The persist effect with this number, and all before it, are durable."""

    number: int


class SnapshotTaken(NamedTuple):
    """The state up to `snapshot.offset` is durable in a snapshot; entries before it may be dropped."""

    snapshot: SnapshotId


class SnapshotRead(NamedTuple):
    """A chunk that `Effects.snapshot_reads` requested."""

    peer: NodeId
    snapshot: SnapshotId
    position: int
    data: bytes
    total_bytes: int


class SnapshotWritten(NamedTuple):
    """A received chunk is stored; `wanted` is the next position."""

    snapshot: SnapshotId
    wanted: int


class SnapshotInstalled(NamedTuple):
    """A received snapshot is complete, checked and durable, with this membership. The core decides whether to load
    it."""

    snapshot: SnapshotId
    membership: Membership


class SnapshotFailed(NamedTuple):
    """A received snapshot fails its CRC; the transfer restarts from the beginning."""

    snapshot: SnapshotId


class Disconnected(NamedTuple):
    """The stream with this peer broke: what was in flight may be lost, and contact to a leader ends."""

    peer: NodeId


Event = (
    Tick
    | Propose
    | ChangeMembership
    | ReadIndex
    | Transfer
    | Persisted
    | SnapshotTaken
    | SnapshotRead
    | SnapshotWritten
    | SnapshotInstalled
    | SnapshotFailed
    | Disconnected
)
