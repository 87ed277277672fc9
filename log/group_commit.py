"""Group commit: one sync covers everything that was written before it began.

One `GroupCommit` for each log directory. Logs request syncs; one group at a time takes all of them.

    idle --request--> gathering --next turn of the loop--> syncing --done, none waits--> idle
                                                           syncing --done, some wait---> syncing (the next group)
                                                           syncing --error-------------> failed, for ever

- A group covers everything that was requested before it began. A request during a group belongs to the next one: the
  bytes may have been written after the sync began.
- A failed sync is never retried: the kernel may have dropped the pages and report success for the next sync. Every log
  of the group and every waiting log gets `fail_sync`, `on_failure` is called once, and `request` raises from then on.
- There is a task only while something is dirty.
- `take_touched` returns the logs that were written to, for checkpoints, so that idle logs cost nothing.

The logs own the futures of appends (`Log.wait_durable`); this class only calls `end_sync` and `fail_sync`.
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

    `end` and `generation` belong to the log: the durable end after the sync, and whether it was truncated meanwhile.
    """

    files: list[File] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    end: int = 0
    generation: int = 0


class Syncable(Protocol):
    """A log, as group commit sees it. None of these methods may raise an error of the environment."""

    def begin_sync(self) -> SyncTicket: ...

    def end_sync(self, ticket: SyncTicket) -> None: ...

    def fail_sync(self, error: StorageError) -> None: ...


class _Group:
    """One group: its logs, in order, and a future for callers of `flush`."""

    __slots__ = ("done", "logs")

    def __init__(self) -> None:
        self.logs: dict[Syncable, None] = {}
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
            # The caller of `flush` may be cancelled; `on_failure` has reported the error.
            self.done.exception()


class GroupCommit:
    """See the module. Used on one event loop."""

    def __init__(self, disk: Disk, *, on_failure: Callable[[StorageError], None]) -> None:
        self._disk = disk
        self._on_failure = on_failure
        self._next = _Group()
        self._current: _Group | None = None
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False
        self._touched: dict[Syncable, None] = {}
        self.failed: StorageError | None = None
        self.on_synced: Callable[[list[Syncable]], None] | None = None
        """Called after each group that succeeded, with its logs: their durable ends may have advanced."""
        self.groups = 0
        self.files_synced = 0
        self.logs_synced = 0
        # Loop time at which the running group began: a watchdog detects a stalled disk by it.
        self.group_began: float | None = None

    def request(self, log: Syncable) -> None:
        """Sync this log. A group begins with the next turn of the loop, or when the running one ends."""
        if self.failed is not None:
            raise self.failed
        assert not self._is_closed, "group commit is closed"
        self._next.logs[log] = None
        self._touched[log] = None
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="group-commit")

    def touch(self, log: Syncable) -> None:
        """This log has something for the next checkpoint, but nothing to sync now."""
        self._touched[log] = None

    def take_touched(self) -> list[Syncable]:
        """The logs that were touched since the last call, in the order of their first write."""
        touched, self._touched = self._touched, {}
        return list(touched)

    async def flush(self, log: Syncable) -> None:
        """Return when everything that was written to this log before the call is on the device."""
        self.request(log)
        await asyncio.shield(self._next.wait())

    async def release(self, log: Syncable) -> None:
        """Release a log that is closed or deleted: it is in no group when this returns."""
        self._next.logs.pop(log, None)
        self._touched.pop(log, None)
        if self._current is not None and log in self._current.logs:
            await asyncio.shield(self._current.wait())

    def fail(self, error: StorageError) -> None:
        """Another part of the directory (its state store) has failed: act as after a failed sync."""
        self._fail(error)

    async def close(self) -> None:
        """Reject requests; return when everything is synced or a sync has failed. Cancelling it stops the wait, not the
        sync."""
        self._is_closed = True
        if self._runner is not None:
            await asyncio.wait([self._runner])

    def validate(self) -> None:
        """Assert the invariants: a task runs exactly while something is dirty; after a failure nothing waits."""
        waits = bool(self._next.logs) or self._current is not None
        assert self.failed is None or not waits, "a log waits for a sync after one has failed"
        assert self._runner is not None or not waits, "a log waits for a sync, and no task runs"
        assert self.failed is not None or (self.group_began is None) == (self._current is None), (
            "a group without a time"
        )

    async def _run(self) -> None:
        """Sync groups, one after the other, until nothing is dirty."""
        try:
            while self._next.logs and self.failed is None:
                self._current, self._next = self._next, _Group()
                await self._sync(self._current)
        except BaseException as error:
            # A bug, or a loop that stops: no caller may wait for ever, and nothing may count as synced.
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
