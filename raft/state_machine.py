"""What a Raft group is for: the state machine that its committed entries are applied to. Given by the owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tidelog.model.ids import Offset
from tidelog.raft.effects import RoleChange
from tidelog.raft.messages import Entry, SnapshotId


class SnapshotJob(NamedTuple):
    """A state that no later `apply` changes, and how to turn it into bytes elsewhere: `encode(*values)`.

    `encode` is a module-level function and the values can be pickled, as `world.work` asks for.
    """

    encode: Callable[..., bytes]
    values: tuple[Any, ...]


class Follower(Protocol):
    """Takes committed entries. What an observer has; a member of the group is told of roles as well."""

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        """Committed entries from offset `first` on: in order, each once, without gaps. Only DATA entries mean something
        to the owner; the others are there so that offsets can be counted. An exception stops the node."""
        ...

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        """Replace the whole state; the next `apply` begins at `snapshot.offset`."""
        ...


@runtime_checkable
class PreparesEntries(Protocol):
    """A follower whose entries may be so large that applying some on the spot would hold up the event loop."""

    async def prepare(self, first: Offset, entries: Sequence[Entry]) -> None:
        """Called before `apply` with the same entries: do the long part, in slices, and change nothing yet."""
        ...


@runtime_checkable
class PreparesSnapshots(Protocol):
    """A follower whose snapshots may be so large that loading one on the spot would hold up the event loop."""

    async def prepare_snapshot(self, data: bytes) -> None:
        """Called before `load_snapshot` with the same bytes: do the long part, in slices, and change nothing yet."""
        ...


async def apply_entries(machine: Follower, first: Offset, entries: Sequence[Entry]) -> None:
    """Prepare and apply. The state changes in the last step, in which the caller goes on at once."""
    if isinstance(machine, PreparesEntries):
        await machine.prepare(first, entries)
    machine.apply(first, entries)


async def load_snapshot(machine: Follower, snapshot: SnapshotId, data: bytes) -> None:
    """Prepare and load. The state changes in the last step, in which the caller goes on at once."""
    if isinstance(machine, PreparesSnapshots):
        await machine.prepare_snapshot(data)
    machine.load_snapshot(snapshot, data)


class StateMachine(Follower, Protocol):
    def take_snapshot(self) -> bytes | SnapshotJob:
        """The state after everything that was applied, captured now."""
        ...

    def role_changed(self, change: RoleChange) -> None:
        """In order with `apply`: whoever hears that it leads has applied all that was known as committed by then."""
        ...
