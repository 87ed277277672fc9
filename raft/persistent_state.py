"""The values of a Raft member in the state store, and several persist effects merged into one. Pure.

Values are msgpack `[kind, version, [fields]]`; the store adds a CRC to each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.membership import Membership, VoterKey
from tidelog.raft.messages import Entry, EntryKind, SnapshotId

NO_LOSS = Epoch(0)


@dataclass(frozen=True, slots=True)
class Identity:
    """The cluster and node that own a directory."""

    cluster_id: str
    directory: bytes
    node: NodeId

    def text(self) -> str:
        return f"cluster.id={self.cluster_id}\ndirectory.id={self.directory.hex()}\nnode.id={self.node}\n"


@dataclass(frozen=True, slots=True)
class PersistentState:
    """The value of `raft/state`."""

    hard_state: HardState
    synced_end: Offset
    recovering_until: Offset | None = None
    loss_epoch: Epoch = NO_LOSS


class MergedPersist(NamedTuple):
    """Several persist effects as one. `entries` begin at `first`: the log's end after the truncation."""

    hard_state: HardState
    reset_to: Offset | None
    truncate_to: Offset | None
    first: Offset
    entries: tuple[Entry, ...]
    recovered: bool


def merge(persists: Sequence[Persist]) -> MergedPersist:
    """Merges persist effects; the result equals executing them in order."""
    assert persists, "nothing to persist"
    reset_to: Offset | None = None
    truncate_to: Offset | None = None
    first, entries = persists[0].first, list[Entry]()
    for index, persist in enumerate(persists):
        if persist.reset_to is not None:
            reset_to, truncate_to, first = persist.reset_to, None, persist.reset_to
            entries.clear()
        if persist.truncate_to is not None and index == 0:
            truncate_to = persist.truncate_to  # of the stored log, which extends past it
        elif persist.truncate_to is not None and persist.truncate_to >= first:
            del entries[persist.truncate_to - first :]
        elif persist.truncate_to is not None:
            assert reset_to is None, "what a snapshot covers is not truncated"
            truncate_to = first = persist.truncate_to
            entries.clear()
        assert persist.first == first + len(entries), "persist effects continue each other"
        entries.extend(persist.entries)
    last = persists[-1]
    recovered = any(persist.recovered for persist in persists)
    return MergedPersist(last.hard_state, reset_to, truncate_to, first, tuple(entries), recovered)


# The stored form of the values.


def pack(kind: str, fields: list[Any]) -> bytes:
    return bytes(msgpack.packb([kind, 1, fields]))


def unpack(kind: str, data: bytes) -> list[Any]:
    try:
        stored, version, fields = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"the stored {kind} is unreadable: {error}") from error
    if stored != kind or version != 1 or not isinstance(fields, list):
        raise CorruptStateError(f"the stored {kind} is a {stored} of version {version}")
    return fields


def pack_state(state: PersistentState) -> bytes:
    vote = state.hard_state.voted_for
    return pack(
        "state",
        [
            state.hard_state.epoch,
            None if vote is None else [vote.node, vote.directory],
            state.synced_end,
            state.recovering_until,
            state.loss_epoch,
        ],
    )


def unpack_state(data: bytes) -> PersistentState:
    try:
        epoch, vote, synced_end, until, loss_epoch = unpack("state", data)
        voted_for = None if vote is None else VoterKey(NodeId(int(vote[0])), bytes(vote[1]))
        return PersistentState(
            HardState(Epoch(int(epoch)), voted_for),
            Offset(int(synced_end)),
            None if until is None else Offset(int(until)),
            Epoch(int(loss_epoch)),
        )
    except (ValueError, TypeError, IndexError) as error:
        raise CorruptStateError(f"the stored epoch and vote are unreadable: {error}") from error


def pack_catalogue(snapshots: dict[SnapshotId, Membership]) -> bytes:
    rows = [[known.offset, known.epoch, membership.encode()] for known, membership in sorted(snapshots.items())]
    return pack("catalogue", rows)


def unpack_catalogue(data: bytes) -> dict[SnapshotId, Membership]:
    rows = unpack("catalogue", data)
    return {SnapshotId(Offset(offset), Epoch(epoch)): Membership.decode(raw) for offset, epoch, raw in rows}


def pack_tail(first: Offset, entries: Sequence[Entry]) -> bytes:
    return pack("tail", [first, [[entry.epoch, int(entry.kind), entry.data] for entry in entries]])


def unpack_tail(data: bytes) -> tuple[Offset, list[Entry]]:
    first, rows = unpack("tail", data)
    return Offset(first), [Entry(Epoch(epoch), EntryKind(kind), value) for epoch, kind, value in rows]
