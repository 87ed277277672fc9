"""The state machine of the Raft runs: a list of everything that was proposed, kept as one number.

`chain` is a running checksum over all applied entries, so that two machines that have applied the same entries in the
same order, and only those, agree in (offset, chain), and a snapshot is a few bytes. `Applied` is notified.
"""

import zlib
from collections.abc import Sequence
from struct import Struct
from typing import Protocol

from tidelog.model.ids import Offset
from tidelog.raft.effects import RoleChange
from tidelog.raft.messages import Entry, EntryKind, SnapshotId

_SNAPSHOT = Struct(">QI")
FILLER_BYTES = 600
"""A snapshot is larger than one piece of a transfer where pieces are small."""


class Applied(Protocol):
    def applied(self, machine: "ChainMachine", first: Offset, entries: Sequence[Entry]) -> None: ...

    def loaded(self, machine: "ChainMachine", snapshot: SnapshotId) -> None: ...

    def misplaced(self, machine: "ChainMachine", first: Offset) -> None:
        """Entries from `first` on do not continue its state."""
        ...


def link(chain: int, entry: Entry) -> int:
    """The chain after one more entry; only data counts."""
    if entry.kind != EntryKind.DATA:
        return chain
    return zlib.crc32(entry.data, chain)


class ChainMachine:
    """Implements `raft.state_machine.StateMachine`."""

    def __init__(self, name: str, listener: Applied) -> None:
        self.name = name
        self.offset = Offset(0)
        self.chain = 0
        self.role: RoleChange | None = None
        self._listener = listener

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        if first != self.offset:
            self._listener.misplaced(self, first)
        assert first == self.offset, f"{self.name}: entries from {first} on a state at {self.offset}"
        for entry in entries:
            self.chain = link(self.chain, entry)
        self.offset = Offset(first + len(entries))
        self._listener.applied(self, first, entries)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        offset, self.chain = _SNAPSHOT.unpack_from(data)
        assert offset == snapshot.offset, f"{self.name}: a snapshot of {offset} under the name {snapshot}"
        self.offset = Offset(offset)
        self._listener.loaded(self, snapshot)

    def take_snapshot(self) -> bytes:
        return _SNAPSHOT.pack(self.offset, self.chain) + bytes(FILLER_BYTES)

    def role_changed(self, change: RoleChange) -> None:
        self.role = change


EMPTY_SNAPSHOT = _SNAPSHOT.pack(0, 0)
