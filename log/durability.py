"""What of a log is on the device, and who waits for it.

    write --> dirty --begin (a group takes the files)--> in flight --end--> durable
                                                                   --fail-> the log is done with, for ever

`durable_end` is the exclusive end of what a sync has confirmed. It moves up with the syncs of group commit, and down
only when the log is cut. A cut starts a new generation: a sync that began before it says nothing about bytes that were
written after it at the same offsets, so a ticket of an older generation confirms nothing; the cut itself ends with a
sync of its own.

Dirty files are pinned open from the first unsynced write to the end of the sync that covers it: an error of the device
is only sure to reach a file that was open when it was written.
"""

import asyncio
from bisect import insort
from dataclasses import dataclass

from tidelog.log.files import FilePool
from tidelog.log.group_commit import SyncTicket
from tidelog.model.errors import RecordsTruncatedError, StorageError
from tidelog.world.disk import File


@dataclass(slots=True, order=True)
class _Waiter:
    offset: int
    number: int
    future: "asyncio.Future[None]"


class Durability:
    """Invariants (`validate`): every dirty file is pinned; waiters are ordered by offset and wait at or past the
    durable end; at most one ticket is in flight."""

    __slots__ = (
        "_directories",
        "_dirty",
        "_in_flight",
        "_pool",
        "_waiter_number",
        "_waiters",
        "durable_end",
        "failed",
        "generation",
        "oldest_dirty_ms",
        "records_dirty",
    )

    def __init__(self, pool: FilePool, durable_end: int) -> None:
        self._pool = pool
        self.durable_end = durable_end
        self.generation = 0
        self.failed: StorageError | None = None
        self._dirty: dict[str, File] = {}
        self._directories: dict[str, None] = {}
        self._in_flight: SyncTicket | None = None
        self._waiters: list[_Waiter] = []
        self._waiter_number = 0
        self.records_dirty = 0
        self.oldest_dirty_ms: int | None = None

    @property
    def is_dirty(self) -> bool:
        """Whether something was written that no group has taken yet."""
        return bool(self._dirty or self._directories)

    @property
    def has_only_names(self) -> bool:
        """Whether nothing but directories waits for a sync."""
        return not self._dirty and self._in_flight is None

    @property
    def is_settled(self) -> bool:
        """Whether everything written is on the device."""
        return not self.is_dirty and self._in_flight is None

    def writable(self, path: str, *, create: bool = False) -> File:
        """The file at `path`, to be written to now: it is dirty from here on."""
        file = self._dirty.get(path)
        if file is None:
            file = self._pool.pin(path, create=create)
            self._dirty[path] = file
        return file

    def touch_directory(self, path: str) -> None:
        """A name in this directory was made, changed or removed."""
        self._directories[path] = None

    def forget(self, path: str) -> None:
        """The file at `path` is about to be renamed or removed: no sync of it is wanted any more."""
        file = self._dirty.pop(path, None)
        if file is not None:
            self._pool.unpin(file)
        self._pool.discard(path)

    # Group commit

    def begin(self, end: int) -> SyncTicket:
        assert self._in_flight is None, "two groups at a time"
        ticket = SyncTicket(list(self._dirty.values()), list(self._directories), end, self.generation)
        self._dirty = {}
        self._directories = {}
        self.records_dirty = 0
        self.oldest_dirty_ms = None
        self._in_flight = ticket
        return ticket

    def end(self, ticket: SyncTicket) -> None:
        self._release(ticket)
        if ticket.generation == self.generation and ticket.end > self.durable_end:
            self.durable_end = ticket.end
            self._resolve()

    def fail(self, error: StorageError) -> None:
        """Nothing past the durable end can be trusted any more, and nothing more will be."""
        self.failed = error
        if self._in_flight is not None:
            self._release(self._in_flight)
        self._fail_waiters(0, error)

    def cut(self, end: int) -> None:
        """The log ends at `end` now. Who waits for a record past it is told."""
        self.generation += 1
        self.durable_end = min(self.durable_end, end)
        self._fail_waiters(end, RecordsTruncatedError(f"the log was cut to offset {end}"))

    def reset(self, end: int) -> None:
        """The log is empty now and starts at `end`: nothing is there, so all of it is durable."""
        self.generation += 1
        self.durable_end = end
        self._fail_waiters(0, RecordsTruncatedError(f"the log was reset to offset {end}"))

    def release_all(self) -> None:
        """The log is closed or deleted: nobody waits in vain, no file stays pinned."""
        for file in self._dirty.values():
            self._pool.unpin(file)
        self._dirty = {}
        self._directories = {}
        self._fail_waiters(0, StorageError("the log was closed"))

    def _release(self, ticket: SyncTicket) -> None:
        assert ticket is self._in_flight, "a ticket of another group"
        self._in_flight = None
        for file in ticket.files:
            self._pool.unpin(file)

    # Waiting

    def wait(self, offset: int) -> "asyncio.Future[None]":
        """Resolves when the record at `offset` is on the device."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failed is not None:
            future.set_exception(self.failed)
            future.exception()  # a caller that is gone must not make the loop complain
        elif offset < self.durable_end:
            future.set_result(None)
        else:
            self._waiter_number += 1
            insort(self._waiters, _Waiter(offset, self._waiter_number, future))
        return future

    def _resolve(self) -> None:
        done = 0
        for waiter in self._waiters:
            if waiter.offset >= self.durable_end:
                break
            done += 1
            if not waiter.future.done():
                waiter.future.set_result(None)
        del self._waiters[:done]

    def _fail_waiters(self, offset: int, error: Exception) -> None:
        kept = 0
        for waiter in self._waiters:
            if waiter.offset < offset:
                kept += 1
            elif not waiter.future.done():
                waiter.future.set_exception(error)
                waiter.future.exception()
        del self._waiters[kept:]

    def validate(self) -> None:
        offsets = [waiter.offset for waiter in self._waiters]
        assert offsets == sorted(offsets), "waiters out of order"
        assert not offsets or offsets[0] >= self.durable_end, "somebody waits for what is durable"
