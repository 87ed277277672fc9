"""Opens the logs that a node finds at its start, and retries those that fail with a transient error.

    waiting --> being opened --> open
                    |--transient error--> backing off --after 0.1 s, doubling to 10 s--> waiting
                    |--proof of damage, or its directory has failed--> failed (`failures`)

An error proves damage only if bytes were read and are wrong (`proves_damage`). All other errors are transient: a helper
process that died, too many open files, no memory, no disk space, no permission, an error of the device or of the state
store. Such a log is retried as long as the node runs. Meanwhile it is neither open nor failed: it is not reported as
lost, and its files are not touched.

Limits: `parallel` logs of a directory are opened at a time; one retry of a log in `RETRY_MAX_S`; one log line for each
directory in `REPORT_INTERVAL_S`.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidelog.log.directories import LogDirectory
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    DamagedLogError,
    InvalidRecordError,
    RecordTooLargeError,
    TidelogError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
    UnsyncedError,
)
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.1, 10.0
REPORT_INTERVAL_S = 60.0

_PROOF = (
    CorruptBatchError,
    CorruptStateError,
    DamagedLogError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)


def proves_damage(error: TidelogError) -> bool:
    """Whether the error proves corruption, so that a retry is useless."""
    return isinstance(error, _PROOF)


@dataclass(slots=True)
class OpenRetry:
    """A log whose opening has failed `attempts` times with transient errors; `error` is the last one."""

    directory: LogDirectory
    error: TidelogError
    attempts: int = 0
    timer: asyncio.TimerHandle | None = None
    """Runs while the log backs off."""


@dataclass(slots=True)
class _DirectoryQueue:
    """The logs of a directory that wait to be opened, in order, and the tasks that open them. While logs wait, a worker
    runs: it leaves `workers` in the turn of the event loop in which it finds nothing, not when its task is done."""

    waiting: OrderedDict[PartitionId, None] = field(default_factory=OrderedDict)
    workers: set[asyncio.Task[None] | None] = field(default_factory=set)


class OpenLog(Protocol):
    def __call__(self, directory: LogDirectory, log_id: PartitionId) -> Coroutine[Any, Any, object]: ...


class LogOpener:
    """See the module. `open_log` opens one log and registers it; `spawn` starts a task of the owner."""

    def __init__(
        self,
        *,
        open_log: OpenLog,
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        parallel: int,
    ) -> None:
        self.failures: dict[PartitionId, TidelogError] = {}
        self.retries: dict[PartitionId, OpenRetry] = {}
        self.on_done: Callable[[PartitionId], None] | None = None
        """Called for each log that is open now or will not be opened."""
        # Logs that are not open yet, with a future if a caller waits.
        self.pending: dict[PartitionId, asyncio.Future[None] | None] = {}
        # Those that were found at the start, without those that are being created.
        self.recovering: dict[PartitionId, None] = {}
        self._open_log = open_log
        self._spawn = spawn
        self._parallel = parallel
        self._queues: dict[LogDirectory, _DirectoryQueue] = {}
        self._cancelled: set[PartitionId] = set()
        self._reported_s: dict[LogDirectory, float] = {}
        self._idle: asyncio.Future[None] | None = None
        self._is_closed = False

    def add(self, directory: LogDirectory, log_id: PartitionId, *, is_moved: bool = False) -> None:
        """Enqueue this log. A log that was moved here is in use already and does not count as recovering."""
        self.pending.setdefault(log_id, None)
        if not is_moved:
            self.recovering[log_id] = None
        self._enqueue(directory, log_id)

    def begin_create(self, log_id: PartitionId) -> None:
        """The owner creates this log: callers wait for it until `finish`."""
        self.pending[log_id] = None

    def hurry(self, log_id: PartitionId) -> None:
        """Open this log next, if it waits to be opened."""
        for queue in self._queues.values():
            if log_id in queue.waiting:
                queue.waiting.move_to_end(log_id, last=False)

    def _enqueue(self, directory: LogDirectory, log_id: PartitionId) -> None:
        queue = self._queues.setdefault(directory, _DirectoryQueue())
        queue.waiting[log_id] = None
        if len(queue.workers) < self._parallel:
            queue.workers.add(self._spawn(self._work(directory, queue)))

    async def wait(self, log_id: PartitionId) -> None:
        """Return when the log is open or has failed."""
        if log_id in self.pending:
            waiter = self.pending[log_id]
            if waiter is None:
                waiter = self.pending[log_id] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiter)

    async def wait_all(self, timeout_s: float | None) -> None:
        """Return when every log that was found is open or has failed, or after the timeout."""
        if not self.recovering:
            return
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._idle], timeout=timeout_s)

    async def _work(self, directory: LogDirectory, queue: _DirectoryQueue) -> None:
        try:
            while queue.waiting:
                log_id, _ = queue.waiting.popitem(last=False)
                try:
                    await self._open_log(directory, log_id)
                except TidelogError as error:
                    if self._may_retry(directory, log_id, error):
                        self._retry_later(directory, log_id, error)
                        continue
                    # A log that cannot be opened does not delay others.
                    LOGGER.error("log=%s cannot be opened: %s", directory.paths.get(log_id, log_id), error)
                    self.failures[log_id] = error
                self.finish(log_id)
        finally:
            queue.workers.discard(asyncio.current_task())

    def _may_retry(self, directory: LogDirectory, log_id: PartitionId, error: TidelogError) -> bool:
        if isinstance(error, UnsyncedError):
            directory.fail(error)  # a retry would trust the page cache, which the device does not have
        if self._is_closed or directory.failed is not None or log_id in self._cancelled:
            return False
        return not proves_damage(error)

    def _retry_later(self, directory: LogDirectory, log_id: PartitionId, error: TidelogError) -> None:
        retry = self.retries.setdefault(log_id, OpenRetry(directory, error))
        retry.error = error
        delay_s = min(RETRY_MIN_S * 2 ** min(retry.attempts, 16), RETRY_MAX_S)
        retry.attempts += 1
        retry.timer = asyncio.get_running_loop().call_later(delay_s, self._retry, log_id)
        self._report(directory, log_id, retry)

    def _retry(self, log_id: PartitionId) -> None:
        retry = self.retries[log_id]
        retry.timer = None
        self._enqueue(retry.directory, log_id)

    def _report(self, directory: LogDirectory, log_id: PartitionId, retry: OpenRetry) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._reported_s.get(directory, -REPORT_INTERVAL_S) < REPORT_INTERVAL_S:
            return
        self._reported_s[directory] = now_s
        LOGGER.error(
            "directory=%s logs_not_open=%d log=%s attempts=%d cannot be opened now, is retried: %s",
            directory.disk.label,
            sum(other.directory is directory for other in self.retries.values()),
            directory.paths.get(log_id, log_id),
            retry.attempts,
            retry.error,
        )

    def directory_failed(self, directory: LogDirectory, error: TidelogError) -> None:
        """Fail its logs; those that back off now, instead of at their next retry."""
        self.failures.update(dict.fromkeys(directory.paths, error))
        for log_id, retry in list(self.retries.items()):
            if retry.directory is directory and retry.timer is not None:
                retry.timer.cancel()
                self._retry(log_id)

    def give_up(self, log_id: PartitionId) -> None:
        """Do not open this log: it is about to be removed. One that is being opened is not retried."""
        retry = self.retries.get(log_id)
        if retry is not None and retry.timer is not None:
            retry.timer.cancel()
            self.finish(log_id)
        for queue in self._queues.values():
            if log_id in queue.waiting:
                del queue.waiting[log_id]
                self.finish(log_id)
        if log_id in self.pending:
            self._cancelled.add(log_id)

    def forget(self, log_id: PartitionId) -> None:
        """The log is gone, or in another directory: why it failed here does not count any more."""
        self.failures.pop(log_id, None)

    def finish(self, log_id: PartitionId) -> None:
        """The log is open, or will not be opened: wake the waiting callers."""
        retry = self.retries.pop(log_id, None)
        if retry is not None and log_id not in self.failures and not self._is_closed:
            LOGGER.info("log=%s is no longer retried after %d attempts", log_id, retry.attempts)
        self._cancelled.discard(log_id)
        waiter = self.pending.pop(log_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if log_id in self.recovering:
            del self.recovering[log_id]
            if not self.recovering and self._idle is not None:
                self._idle.set_result(None)
                self._idle = None
            if self.on_done is not None:
                self.on_done(log_id)

    async def close(self) -> None:
        """Return when no log is being opened. Logs that are not open stay as they are."""
        self._is_closed = True
        for retry in self.retries.values():
            if retry.timer is not None:
                retry.timer.cancel()
        for queue in self._queues.values():
            queue.waiting.clear()
        running = [task for queue in self._queues.values() for task in queue.workers if task is not None]
        if running:
            await asyncio.wait(running)
        self.finish_all()

    def finish_all(self) -> None:
        for log_id in list(self.pending):
            self.finish(log_id)
