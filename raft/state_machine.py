"""The interface of the state machine that the owner of a Raft group implements. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tidelog.model.ids import Offset
from tidelog.raft.effects import RoleChange
from tidelog.raft.messages import Entry, SnapshotId


class SnapshotJob(NamedTuple):
    """An immutable state, and a function that encodes it elsewhere: `encode(*values)`.

    `encode` is a module-level function and the values are picklable, as `world.work` requires.
    """

    encode: Callable[..., bytes]
    values: tuple[Any, ...]


class CommitListener(Protocol):
    """Receives committed entries. An observer has one; a member of the group also receives role changes."""

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        """Applies committed entries from offset `first` on: in order, each once, without gaps. Only DATA entries are
        the owner's; the others keep offsets contiguous. An exception stops the node."""
        ...

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        """Replaces the whole state; the next `apply` begins at `snapshot.offset`."""
        ...


@runtime_checkable
class EntryPreparer(Protocol):
    """A listener whose entries may be too large to apply in one turn of the event loop."""

    async def prepare(self, first: Offset, entries: Sequence[Entry]) -> None:
        """Called before `apply` with the same entries: does the long part in slices, and changes no visible state."""
        ...


@runtime_checkable
class SnapshotPreparer(Protocol):
    """A listener whose snapshots may be too large to load in one turn of the event loop."""

    async def prepare_snapshot(self, data: bytes) -> None:
        """Called before `load_snapshot` with the same bytes: does the long part in slices, and changes no visible
        state."""
        ...


async def apply_entries(machine: CommitListener, first: Offset, entries: Sequence[Entry]) -> None:
    """Prepares and applies. The state changes in the last step."""
    if isinstance(machine, EntryPreparer):
        await machine.prepare(first, entries)
    machine.apply(first, entries)


async def load_snapshot(machine: CommitListener, snapshot: SnapshotId, data: bytes) -> None:
    """Prepares and loads. The state changes in the last step."""
    if isinstance(machine, SnapshotPreparer):
        await machine.prepare_snapshot(data)
    machine.load_snapshot(snapshot, data)


class StateMachine(CommitListener, Protocol):
    def take_snapshot(self) -> bytes | SnapshotJob:
        """Returns the present state: everything that was applied."""
        ...

    def role_changed(self, change: RoleChange) -> None:
        """Called in order with `apply`: a new leader has applied everything that was known as committed by then."""
        ...
