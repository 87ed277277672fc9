"""Group commit: the price of a sync is shared by everything that was written before it began.

One `GroupCommit` per log directory. Logs say that they have bytes to sync; one group at a time takes all of them.

    idle --request--> gathering --next turn of the loop--> syncing --done, none waits--> idle
                                                           syncing --done, some wait---> syncing (the next group)
                                                           syncing --error-------------> failed, for ever

- A group covers everything that was requested before it began. A request during a group belongs to the next one: the
  bytes may have come after the device was asked.
- A failed sync is never retried: the kernel may have dropped the pages and call the next sync a success. Every log of
  the group and every one that waits is told, `on_failure` is called once, and `request` raises from then on.
- There is a task only while something is dirty.
- Whoever checkpoints the logs of the directory learns here which ones were written to (`take_touched`), so that idle
  logs cost nothing.

Futures of appends are the logs' own (`Log.wait_durable`); this class only tells them `end_sync` and `fail_sync`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tidelog.model.errors import StorageError
from tidelog.world.disk import Disk, File


@dataclass(slots=True)
class SyncTicket:
    """What must reach the device for one log, captured when its group begins.

    `end` and `generation` are the log's own: what it may call durable when the ticket comes back, and whether it was
    truncated meanwhile.
    """

    files: list[File] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    end: int = 0
    generation: int = 0


class Dirty(Protocol):
    """A log, as group commit sees it. None of these may raise for reasons of the world."""

    def begin_sync(self) -> SyncTicket: ...

    def end_sync(self, ticket: SyncTicket) -> None: ...

    def fail_sync(self, error: StorageError) -> None: ...


class _Group:
    """One group: the logs in it (ordered; a dict for its order), and a future for those who flush."""

    __slots__ = ("done", "logs")

    def __init__(self) -> None:
        self.logs: dict[Dirty, None] = {}
        self.done: asyncio.Future[None] | None = None

    def wait(self) -> "asyncio.Future[None]":
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        return self.done

    def finish(self, error: StorageError | None) -> None:
        if self.done is None or self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            # Whoever flushed may have been cancelled; the error was reported by `on_failure`.
            self.done.exception()


class GroupCommit:
    """See the module's docstring. Used on one event loop."""

    def __init__(self, disk: Disk, *, on_failure: Callable[[StorageError], None]) -> None:
        self._disk = disk
        self._on_failure = on_failure
        self._next = _Group()
        self._current: _Group | None = None
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False
        self._touched: dict[Dirty, None] = {}
        self.failed: StorageError | None = None
        self.on_synced: Callable[[list[Dirty]], None] | None = None
        """Called after every group that has ended well, with its logs: their durable ends may have advanced."""
        self.groups = 0
        self.files_synced = 0
        self.logs_synced = 0
        # The loop's time at which the running group began: a watchdog tells a stalled disk by it.
        self.group_began: float | None = None

    def request(self, log: Dirty) -> None:
        """This log has bytes to sync. A group begins with the next turn of the loop, or when the running one ends."""
        if self.failed is not None:
            raise self.failed
        assert not self._is_closed, "group commit is closed"
        self._next.logs[log] = None
        self._touched[log] = None
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="group-commit")

    def touch(self, log: Dirty) -> None:
        """This log has something for the next checkpoint, though nothing that must be synced now."""
        self._touched[log] = None

    def take_touched(self) -> list[Dirty]:
        """The logs that were written to since the last call, in the order of their first write."""
        touched, self._touched = self._touched, {}
        return list(touched)

    async def flush(self, log: Dirty) -> None:
        """Everything that was written to this log before the call is on the device when it returns."""
        self.request(log)
        await asyncio.shield(self._next.wait())

    async def flush_all(self) -> None:
        """The same for everything that was requested before the call."""
        if self.failed is not None:
            raise self.failed
        if self._next.logs:
            await asyncio.shield(self._next.wait())
        elif self._current is not None:
            await asyncio.shield(self._current.wait())

    async def release(self, log: Dirty) -> None:
        """Let go of a log that is closed or deleted: it is in no group when this returns."""
        self._next.logs.pop(log, None)
        self._touched.pop(log, None)
        if self._current is not None and log in self._current.logs:
            await asyncio.shield(self._current.wait())

    def fail(self, error: StorageError) -> None:
        """Something else of the directory has failed (its state store): from here on as after a failed sync."""
        self._fail(error)

    async def close(self) -> None:
        """Takes no more requests; returns when all dirt is synced, or the sync has failed. Cancelling it stops the
        waiting, never the sync."""
        self._is_closed = True
        if self._runner is not None:
            await asyncio.wait([self._runner])

    async def _run(self) -> None:
        """Groups, one after the other, until nothing is dirty."""
        try:
            while self._next.logs and self.failed is None:
                self._current, self._next = self._next, _Group()
                await self._sync(self._current)
        except BaseException as error:
            # Our own error, or a loop that is going down: nobody may wait for ever, and nothing may count as synced.
            self._fail(StorageError(f"group commit of {self._disk.label} ended: {error!r}", path=self._disk.label))
            raise
        finally:
            self._runner = None

    async def _sync(self, group: _Group) -> None:
        self.group_began = asyncio.get_running_loop().time()
        tickets = [(log, log.begin_sync()) for log in group.logs]
        files = [file for _, ticket in tickets for file in ticket.files]
        directories = list(dict.fromkeys(path for _, ticket in tickets for path in ticket.directories))
        try:
            if files or directories:
                await self._disk.sync_many(files, directories)
        except StorageError as error:
            self._fail(error)
            return
        if self.failed is not None:
            return
        self.groups += 1
        self.files_synced += len(files)
        self.logs_synced += len(tickets)
        for log, ticket in tickets:
            log.end_sync(ticket)
        self._current = None
        self.group_began = None
        group.finish(None)
        if self.on_synced is not None:
            self.on_synced(list(group.logs))

    def _fail(self, error: StorageError) -> None:
        if self.failed is not None:
            return
        self.failed = error
        self.group_began = None
        broken = [group for group in (self._current, self._next) if group is not None]
        self._current, self._next = None, _Group()
        logs = {log: None for group in broken for log in group.logs}
        for log in logs:
            log.fail_sync(error)
        for group in broken:
            group.finish(error)
        self._on_failure(error)
