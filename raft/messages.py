"""What Raft nodes say to each other, and what happens to one of them.

Messages are named tuples (built in the hot path, some 100,000 a second). Every message carries the sender's epoch and
id. Offsets are exclusive ends: `end` is the next offset to be written, `prev_offset` the offset of the first entry that
an append carries, and `prev_epoch` the epoch of the entry before it.

    PreVoteRequest    would you vote for me?          changes nothing at the receiver, not even its timer
    VoteRequest       vote for me in this epoch       leaves only when epoch and own vote are durable
    AppendRequest     entries, or a heartbeat         leaves at once: the leader counts itself only when it has synced
    AppendResponse    what I have *synced*, or where we differ
    SnapshotChunk     a piece of a snapshot           answered with the position that is wanted next
    TimeoutNow        start an election at once       leadership transfer

Events are what the world does to a core: a tick of time, a proposal, a disk completion, a broken stream.
"""

from __future__ import annotations

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
    """The round of leadership confirmation that an answer confirms (read index)."""


class AppendResponse(NamedTuple):
    epoch: Epoch
    sender: NodeId
    directory: bytes
    match: Offset
    """Everything below is synced here and equal to the leader's log. On a rejection: the refused `prev_offset`."""
    rejected: bool
    hint_epoch: Epoch
    hint_end: Offset
    """On a rejection: the largest epoch of this log that is at most the refused one, and where it ends here."""
    probe: int
    counts: bool
    """False while this voter recovers from a loss of synced data: it is not part of any majority."""


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
    """The next position, or `SNAPSHOT_HELD` when the snapshot, or more than it, is here."""


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
    """Time has passed; the core looks at its deadlines."""


class Propose(NamedTuple):
    """Append `data` if this node leads; `token` comes back in `Effects.accepted` or `Effects.refused`."""

    token: int
    data: bytes
    at: Offset | None = None
    epoch: Epoch | None = None
    """Only at this offset and in this epoch, if given: what was decided on a state must follow that state."""


class ChangeMembership(NamedTuple):
    """Add a learner (it is promoted by itself once it has caught up), remove a member, or change its endpoints."""

    token: int
    add: Member | None = None
    remove: NodeId | None = None
    update: Member | None = None
    """New endpoints of a member with this node and directory."""


class ReadIndex(NamedTuple):
    """Answered in `Effects.reads` with an offset: a state that has applied it is linearizable."""

    token: int


class Transfer(NamedTuple):
    """Hand leadership to a voter (None: the most advanced one)."""

    target: NodeId | None = None


class Persisted(NamedTuple):
    """The persist effect with this number, and all before it, are durable."""

    number: int


class SnapshotTaken(NamedTuple):
    """The owner's state up to `snapshot.offset` is durable in a snapshot; entries before it may go."""

    snapshot: SnapshotId


class SnapshotRead(NamedTuple):
    """A piece that `Effects.snapshot_reads` asked for."""

    peer: NodeId
    snapshot: SnapshotId
    position: int
    data: bytes
    total_bytes: int


class SnapshotWritten(NamedTuple):
    """A received piece is stored; `wanted` is the next position."""

    snapshot: SnapshotId
    wanted: int


class SnapshotInstalled(NamedTuple):
    """A received snapshot is whole, checked and durable, with this membership. The core says whether to load it."""

    snapshot: SnapshotId
    membership: Membership


class SnapshotFailed(NamedTuple):
    """A received snapshot was not what its CRC says; it starts again from the beginning."""

    snapshot: SnapshotId


class Disconnected(NamedTuple):
    """The stream with this peer broke: what was in flight may be lost, and a leader's contact ends."""

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
