"""Tracks which part of a log is on the device, and who waits for it.

    write --> dirty --begin (a group takes the files)--> in flight --end--> durable
                                                                   --fail-> no more appends, for ever

`durable_end` is the exclusive end of what a sync has confirmed. Syncs raise it; only a truncation lowers it. A
truncation starts a new generation: a sync that began before it says nothing about bytes that were written after it at
the same offsets. So a ticket of an older generation confirms nothing, and a truncation ends with a sync of its own.

Dirty files stay pinned from the first unsynced write to the end of the sync that covers it: the kernel reports a device
error only to a file that was open when the bytes were written.
"""

import asyncio
from bisect import insort
from dataclasses import dataclass, field

from tidelog.log.config import LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit, Syncable, SyncTicket
from tidelog.model.errors import RecordsTruncatedError, StorageError
from tidelog.world.disk import File


@dataclass(slots=True, order=True)
class _Waiter:
    offset: int
    number: int
    future: "asyncio.Future[None]"


@dataclass(slots=True, eq=False)
class Durability:
    """Owns the durable end, the dirty files and the waiters; requests syncs from group commit.

    Invariants (`validate`): waiters are ordered by offset and wait at or past the durable end; at most one ticket is in
    flight, and it does not reach past the log end unless the log was truncated since.
    """

    _pool: FilePool
    _group_commit: GroupCommit
    _log: Syncable
    durable_end: int
    generation: int = 0
    failed: StorageError | None = None
    _dirty: dict[str, File] = field(default_factory=dict)
    _directories: dict[str, None] = field(default_factory=dict)
    _in_flight: SyncTicket | None = None
    _waiters: list[_Waiter] = field(default_factory=list)
    _waiter_number: int = 0
    _records_dirty: int = 0
    _oldest_dirty_ms: int | None = None

    @property
    def is_dirty(self) -> bool:
        """Whether something was written that no group has taken yet."""
        return bool(self._dirty or self._directories)

    @property
    def has_only_names(self) -> bool:
        """Whether only directories wait for a sync."""
        return not self._dirty and self._in_flight is None

    @property
    def is_clean(self) -> bool:
        """Whether everything written is on the device."""
        return not self.is_dirty and self._in_flight is None

    def writable(self, path: str, *, create: bool = False) -> File:
        """The file at `path`, for writing: it is dirty from here on."""
        file = self._dirty.get(path)
        if file is None:
            file = self._pool.pin(path, create=create)
            self._dirty[path] = file
        return file

    def touch_directory(self, path: str) -> None:
        """A name in this directory was created, changed or removed."""
        self._directories[path] = None

    def forget(self, path: str) -> None:
        """The file at `path` is about to be renamed or removed: do not sync it."""
        file = self._dirty.pop(path, None)
        if file is not None:
            self._pool.unpin(file)
        self._pool.discard(path)

    def note_written(self, records: int, now_ms: int) -> None:
        """With page-cache: records were appended that no sync was requested for."""
        self._records_dirty += records
        if self._oldest_dirty_ms is None:
            self._oldest_dirty_ms = now_ms

    def is_flush_due(self, config: LogConfig, now_ms: int) -> bool:
        """With page-cache: whether `flush.messages` or `flush.ms` of the topic requires a sync now."""
        if config.flush_messages is not None and self._records_dirty >= config.flush_messages:
            return True
        if config.flush_ms is None or self._oldest_dirty_ms is None:
            return False
        return now_ms - self._oldest_dirty_ms >= config.flush_ms

    # Group commit

    @property
    def failure(self) -> StorageError | None:
        """The sync that failed, of this log or of its directory."""
        return self.failed or self._group_commit.failed

    def request_sync(self) -> None:
        self._group_commit.request(self._log)

    def touch(self) -> None:
        """The next checkpoint has something to store for this log."""
        self._group_commit.touch(self._log)

    def fail_directory(self, error: StorageError) -> None:
        """Files and memory no longer agree, and only a restart can mend that."""
        self._group_commit.fail(error)

    async def flush(self) -> None:
        """Return when everything that was written before the call is on the device."""
        await self._group_commit.flush(self._log)

    async def flush_names(self, directory: str) -> None:
        """Return when the names in this directory are on the device. By group commit, where a failure is final."""
        self.touch_directory(directory)
        await self.flush()

    async def release(self) -> None:
        """Release a closed or deleted log: leave its group, unpin its files and fail its waiters."""
        await self._group_commit.release(self._log)
        for file in self._dirty.values():
            self._pool.unpin(file)
        self._dirty = {}
        self._directories = {}
        self._fail_waiters(0, StorageError("the log was closed"))

    def begin(self, end: int) -> SyncTicket:
        assert self._in_flight is None, "two groups at a time"
        ticket = SyncTicket(list(self._dirty.values()), list(self._directories), end, self.generation)
        self._dirty = {}
        self._directories = {}
        self._records_dirty = 0
        self._oldest_dirty_ms = None
        self._in_flight = ticket
        return ticket

    def end(self, ticket: SyncTicket) -> None:
        self._release(ticket)
        if ticket.generation == self.generation and ticket.end > self.durable_end:
            self.durable_end = ticket.end
            self._resolve()

    def fail(self, error: StorageError) -> None:
        """Handle a failed sync: everything past the durable end is suspect, and appends are rejected from now on."""
        self.failed = error
        if self._in_flight is not None:
            self._release(self._in_flight)
        self._fail_waiters(0, error)

    def cut(self, end: int) -> None:
        """The log was truncated to `end`. Waiters for later records fail."""
        self.generation += 1
        self.durable_end = min(self.durable_end, end)
        self._fail_waiters(end, RecordsTruncatedError(f"the log was truncated to offset {end}"))

    def reset(self, end: int) -> None:
        """The log is empty and starts at `end`, so all of it is durable."""
        self.generation += 1
        self.durable_end = end
        self._fail_waiters(0, RecordsTruncatedError(f"the log was reset to offset {end}"))

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
            future.exception()  # a caller may be gone; the loop must not log it
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

    def validate(self, *, log_end: int, thorough: bool = True) -> None:
        """Assert the invariants in a log that ends at `log_end`; without `thorough` not the order of all waiters."""
        ticket = self._in_flight
        if ticket is not None and ticket.generation == self.generation:
            assert ticket.end <= log_end, f"a sync up to {ticket.end} of a log that ends at {log_end}"
        offsets = [waiter.offset for waiter in (self._waiters if thorough else self._waiters[:1])]
        assert offsets == sorted(offsets), "waiters out of order"
        assert not offsets or offsets[0] >= self.durable_end, "a waiter for a durable offset"
