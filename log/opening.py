"""Opens the logs that a node finds at its start, and retries those whose opening fails for a reason that may pass.

    waiting --its turn--> being opened --> open
                              |--a reason that may pass--> backing off --after 0.1 s, doubling to 10 s--> waiting
                              |--proof of damage, or its directory has failed--> failed (`failures`)

An error proves damage only if it speaks of bytes that were read and are wrong (`proves_damage`). Everything else may
pass: a helper process that died, too many open files, no memory, no room, no permission, an error of the device or of
the state store. Such a log is retried for as long as the node runs. Meanwhile it is neither open nor failed, so nobody
reports it as lost and nobody touches its files.

Limits: `parallel` logs of a directory are opened at a time; one retry of a log in `RETRY_MAX_S`; one line in the log
for each directory in `REPORT_INTERVAL_S`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
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
    """Whether bytes were read and are not what was written: another attempt would find the same."""
    return isinstance(error, _PROOF)


@dataclass(slots=True)
class OpenRetry:
    """A log whose opening has failed `attempts` times, for reasons that may pass; `error` is the last one."""

    directory: LogDirectory
    error: TidelogError
    attempts: int = 0
    timer: asyncio.TimerHandle | None = None
    """Runs while the log backs off."""


class OpenLog(Protocol):
    def __call__(self, directory: LogDirectory, log_id: PartitionId) -> Coroutine[Any, Any, object]: ...


class LogOpener:
    """See the module. `open_log` opens one log and keeps it; `spawn` runs a task of the owner."""

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
        """Called for each log that is open now, or will not be opened any more."""
        # Logs that are not open yet, with a future where somebody waits.
        self.pending: dict[PartitionId, asyncio.Future[None] | None] = {}
        # Those of them that were found, and not created just now.
        self.recovering: dict[PartitionId, None] = {}
        self._open_log = open_log
        self._spawn = spawn
        self._parallel = parallel
        self._workers: dict[LogDirectory, set[asyncio.Task[None]]] = {}
        self._unwanted: set[PartitionId] = set()
        self._reported_s: dict[LogDirectory, float] = {}
        self._idle: asyncio.Future[None] | None = None
        self._is_closed = False

    def add(self, directory: LogDirectory, log_id: PartitionId, *, is_moved: bool = False) -> None:
        """Open this log when its turn comes. One that was moved here is used already, and is not being recovered."""
        self.pending.setdefault(log_id, None)
        if not is_moved:
            self.recovering[log_id] = None
        self._enqueue(directory, log_id)

    def _enqueue(self, directory: LogDirectory, log_id: PartitionId) -> None:
        directory.unopened[log_id] = None
        workers = self._workers.setdefault(directory, set())
        if len(workers) < self._parallel:
            task = self._spawn(self._work(directory))
            workers.add(task)
            task.add_done_callback(workers.discard)

    async def wait(self, log_id: PartitionId) -> None:
        """Returns when the log is open or has failed. If it waits for its turn, it is the next."""
        if log_id in self.pending:
            waiter = self.pending[log_id]
            if waiter is None:
                waiter = self.pending[log_id] = asyncio.get_running_loop().create_future()
            await asyncio.shield(waiter)

    async def wait_all(self, timeout_s: float | None) -> None:
        """Returns when every log that was found is open or has failed, or the time is up."""
        if not self.recovering:
            return
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._idle], timeout=timeout_s)

    async def _work(self, directory: LogDirectory) -> None:
        while directory.unopened:
            log_id, _ = directory.unopened.popitem(last=False)
            try:
                await self._open_log(directory, log_id)
            except TidelogError as error:
                if self._may_retry(directory, log_id, error):
                    self._retry_later(directory, log_id, error)
                    continue
                # One log that cannot be opened holds up no other.
                LOGGER.error("log=%s cannot be opened: %s", directory.paths.get(log_id, log_id), error)
                self.failures[log_id] = error
            self.finish(log_id)

    def _may_retry(self, directory: LogDirectory, log_id: PartitionId, error: TidelogError) -> bool:
        if isinstance(error, UnsyncedError):
            directory.fail(error)  # another attempt would take what the page cache shows for what the device has
        if self._is_closed or directory.failed is not None or log_id in self._unwanted:
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
            "directory=%s logs_not_open=%d log=%s attempts=%d cannot be opened now, and is retried until it can: %s",
            directory.disk.label,
            sum(other.directory is directory for other in self.retries.values()),
            directory.paths.get(log_id, log_id),
            retry.attempts,
            retry.error,
        )

    def directory_failed(self, directory: LogDirectory) -> None:
        """Logs of it that back off fail now, and not at their next retry."""
        for log_id, retry in list(self.retries.items()):
            if retry.directory is directory and retry.timer is not None:
                retry.timer.cancel()
                self._retry(log_id)

    def give_up(self, log_id: PartitionId) -> None:
        """The log is about to be removed: do not open it. One that is being opened is not retried."""
        retry = self.retries.get(log_id)
        if retry is not None and retry.timer is not None:
            retry.timer.cancel()
            self.finish(log_id)
        for directory in self._workers:
            if log_id in directory.unopened:
                del directory.unopened[log_id]
                self.finish(log_id)
        if log_id in self.pending:
            self._unwanted.add(log_id)

    def finish(self, log_id: PartitionId) -> None:
        """The log is open, or will not be: those who wait may look."""
        retry = self.retries.pop(log_id, None)
        if retry is not None and log_id not in self.failures and not self._is_closed:
            LOGGER.info("log=%s is not retried any more after %d attempts", log_id, retry.attempts)
        self._unwanted.discard(log_id)
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
        """Returns when nothing is being opened. Logs that are not open stay as they are."""
        self._is_closed = True
        for retry in self.retries.values():
            if retry.timer is not None:
                retry.timer.cancel()
        for directory in self._workers:
            directory.unopened.clear()
        running = [task for workers in self._workers.values() for task in workers]
        if running:
            await asyncio.wait(running)
        for log_id in list(self.pending):
            self.finish(log_id)
