"""Manages all logs of a node: several directories, each with its disk, state store and group commit.

Start: `Logs.open` lists the directories and returns. Logs open in the background, `parallel_per_directory` at a time in
each directory. `wait_open` waits for one log and opens it next. `observe` reports each log that is opened, so that the
owner serves some logs while others recover (`replication.recovery_reports`). A log that cannot be opened is in
`failures` and does not delay others. A directory that cannot be read counts as failed. A log that is in two directories
is not opened until the owner chooses a copy (`duplicate_logs`, `keep`).

    found --recovery--> open --remove--> gone                     recovering | open | failed (`failures`)
          --transient error--> found, retried (`log_opener`)      removed: `<name>.<n>.deleted`, then nothing
          --proof of damage--> failed                             kept: `<name>.<n>.kept` (`kept_copies`)
                               open --its directory fails--> failed

An idle log costs only its `Log`: no task, no timer, no open file. One task checkpoints the logs that were written to
(`checkpointer`). One cleaning runs at a time, when the owner requests it.

A bug in a background task is raised to every waiting caller, and `on_crash` stops the node.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tidelog.log import log_move
from tidelog.log.checkpointer import LogCheckpointer, side_by_side
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.config import LogConfig
from tidelog.log.directories import (
    DELETED,
    Listing,
    LogDirectory,
    directory_name,
    empty_directory,
    list_logs,
    log_order,
    read_directory_id,
    remove_directory,
    retry_resource_errors,
)
from tidelog.log.duplicate_logs import LogCopy, choose, rename_copy, set_aside, undecided
from tidelog.log.group_commit import Syncable
from tidelog.log.housekeeping_scheduler import HousekeepingScheduler, slices
from tidelog.log.kept_copies import KeptLogs
from tidelog.log.log import Log
from tidelog.log.log_opener import LogOpener, OpenRetry
from tidelog.model.errors import DISK_FULL_ADVICE, DiskFullError, StorageError, TidelogError
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.model.uuids import to_text
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_WAIT_S = 1.0
"""Retry interval for an operation that found no disk space."""

Directories = Iterable[tuple[Disk, StateStore, DirectoryId]]
OnDirectoryFailure = Callable[[LogDirectory, StorageError], None]


@dataclass(frozen=True, slots=True)
class LogsConfig:
    checkpoint_interval_ms: int = 800
    """From the start of one checkpoint to the start of the next: with its duration, well within a second."""
    open_files_max: int = 512
    """For each directory, without the files that are being written or read."""
    parallel_per_directory: int = 32
    """Logs opened at a time. The number of helper processes limits how many are scanned at a time after a crash."""
    cleaner: CleanerLimits = field(default_factory=CleanerLimits)


class Logs:
    """See the module. Used on one event loop; `open` creates it, `close` or the process ends it."""

    def __init__(
        self,
        *,
        work: Work,
        clock: Clock,
        config: LogsConfig,
        config_of: Callable[[PartitionId], LogConfig],
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.directories: list[LogDirectory] = []
        self._opener = LogOpener(
            open_log=lambda directory, log_id: self._open_one(directory, log_id, config_of(log_id)),
            spawn=self._spawn,
            parallel=config.parallel_per_directory,
        )
        self.failures: Mapping[PartitionId, TidelogError] = self._opener.failures
        """Logs that are proved damaged and cannot be opened, or whose directory has failed, with the error."""
        self.open_retries: Mapping[PartitionId, OpenRetry] = self._opener.retries
        """Logs that could not be opened because of a transient error."""
        self.duplicates: dict[PartitionId, list[LogCopy]] = {}
        """Logs that are in more than one place: not opened until `keep`."""
        self.kept = KeptLogs(work, clock)
        """Records that replicas gave up, until they have them again."""
        self.housekeeping = HousekeepingScheduler(
            logs=self.all,
            bound_of=self.bound,
            clock=clock,
            limits=config.cleaner,
            spawn=self._spawn,
        )
        self._crashed: Exception | None = None
        self._on_crash = on_crash
        self._config = config
        self._work = work
        self._clock = clock
        self._on_directory_failure: OnDirectoryFailure | None = None
        self._open: dict[PartitionId, Log] = {}
        self._offline: list[Log] = []
        self._home: dict[PartitionId, LogDirectory] = {}
        self._removals: dict[PartitionId, asyncio.Task[None]] = {}
        self._checkpoints = LogCheckpointer(
            logs=self._open, homes=self._home, interval_ms=config.checkpoint_interval_ms
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checkpointers: list[asyncio.Task[None]] = []
        """One for each directory: one that hangs does not delay the recovery points of the others."""
        self._is_closed = False
        self._was_clean = False

    @classmethod
    async def open(
        cls,
        directories: Directories,
        *,
        work: Work,
        clock: Clock,
        config_of: Callable[[PartitionId], LogConfig],
        config: LogsConfig | None = None,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> "Logs":
        """Find the logs of these directories and begin to open them. A directory without an id gets the one passed.
        `on_crash` is called once, with the error of a background task that is a bug."""
        logs = cls(work=work, clock=clock, config=config or LogsConfig(), config_of=config_of, on_crash=on_crash)
        deleted: list[tuple[LogDirectory, str, PartitionId]] = []
        found: dict[PartitionId, list[LogCopy]] = {}
        for disk, store, fresh in directories:
            directory = LogDirectory(
                disk, store, open_files_max=logs._config.open_files_max, on_failure=logs._directory_failed
            )
            logs.directories.append(directory)
            directory.directory_id = fresh
            try:
                read = partial(read_directory_id, directory.store, fresh)
                directory.directory_id = await retry_resource_errors(disk.label, read)
            except StorageError as error:
                directory.fail(error)
        await log_move.finish_moves([directory for directory in logs.directories if directory.failed is None])
        for directory in logs.directories:
            deleted += await logs._find(directory, found)
        logs._register(found)
        if all(directory.failed is not None for directory in logs.directories):
            reasons = "; ".join(str(directory.failed) for directory in logs.directories)
            raise StorageError(
                f"all log directories have failed: {reasons}" if reasons else "no log directory is configured"
            )
        for directory, name, log_id in deleted:
            logs._remove_later(directory, name, log_id)
        for directory in logs.directories:
            for log_id in sorted(directory.paths, key=log_order):
                logs._opener.add(directory, log_id)
        logs._checkpointers = [logs._spawn(logs._checkpoints.store_regularly(each)) for each in logs.directories]
        return logs

    async def _find(
        self, directory: LogDirectory, found: dict[PartitionId, list[LogCopy]]
    ) -> list[tuple[LogDirectory, str, PartitionId]]:
        """Add the logs of a directory to `found`; returns its deleted logs, whose stored state is removed."""
        if directory.failed is not None:
            return []
        try:
            listing = await retry_resource_errors(directory.disk.label, partial(self._list, directory))
        except StorageError as error:
            directory.fail(error)
            return []
        for log_id, name in listing.logs:
            found.setdefault(log_id, []).append(LogCopy(directory, name))
        return [(directory, name, log_id) for log_id, name in listing.deleted]

    async def _list(self, directory: LogDirectory) -> Listing:
        listing = list_logs(directory.disk)
        there = {log_id for log_id, _ in listing.logs}
        for log_id, _ in (*listing.deleted, *listing.aside):
            if log_id not in there:
                await directory.forget(log_id)
        self.kept.found(directory, listing.kept)
        return listing

    def _register(self, found: dict[PartitionId, list[LogCopy]]) -> None:
        for log_id, copies in found.items():
            if len(copies) > 1:
                self.duplicates[log_id] = copies
                LOGGER.error("%s (unless the metadata names one of them)", undecided(log_id, copies))
            else:
                self._set_home(log_id, copies[0])

    def _set_home(self, log_id: PartitionId, copy: LogCopy) -> None:
        copy.directory.paths[log_id] = copy.name
        self._home[log_id] = copy.directory

    def observe(
        self,
        *,
        on_synced: Callable[[list[Syncable]], None],
        on_directory_failure: OnDirectoryFailure,
        on_opened: Callable[[PartitionId], None],
    ) -> None:
        """Report to the owner: each group of syncs that succeeded, with its logs; each directory that fails; each log
        that is no longer recovering, because it is open or in `failures`."""
        self._on_directory_failure = on_directory_failure
        self._opener.on_done = on_opened
        for directory in self.directories:
            directory.group_commit.on_synced = on_synced

    # Lookup

    def __len__(self) -> int:
        return len(self._open)

    def get(self, log_id: PartitionId) -> Log | None:
        """The log, if it is open and its directory works."""
        return self._open.get(log_id)

    def all(self) -> list[Log]:
        """The open logs, in the order of their ids."""
        return [self._open[log_id] for log_id in sorted(self._open, key=log_order)]

    def known(self) -> list[PartitionId]:
        """All logs in the directories, open or not."""
        return sorted([*self._home, *self.duplicates], key=log_order)

    def directory_of(self, log_id: PartitionId) -> LogDirectory | None:
        return self._home.get(log_id)

    def validate(self) -> None:
        """Assert that a log is in one state and in one place: an open one neither recovers nor has failed, and lies
        where its directory says. Not the logs themselves."""
        for log_id, log in self._open.items():
            home = self._home.get(log_id)
            assert home is not None, f"{log.path} is open and has no directory"
            assert home.paths.get(log_id) == log.path, f"{log.path} is open, its directory has {home.paths.get(log_id)}"
            assert log.log_id == log_id, f"{log.path} is open as {log_id}"
            assert log.group_commit is home.group_commit, f"{log.path} is synced by another directory"
            assert log_id not in self.failures, f"{log.path} is open and has failed"
            assert log_id not in self._opener.recovering, f"{log.path} is open and recovers"
        assert not self.duplicates.keys() & self._home.keys(), "a duplicate log has a directory"

    async def wait_open(self, log_id: PartitionId) -> Log | None:
        """Return the log once it is opened; None if there is none or it could not be opened (`failures`). A waiting log
        is opened next."""
        self.hurry(log_id)
        await self._opener.wait(log_id)
        self._raise_crash()
        return self._open.get(log_id)

    def hurry(self, log_id: PartitionId) -> None:
        """Open this log next, if it waits to be opened."""
        self._opener.hurry(log_id)

    def is_recovering(self, log_id: PartitionId) -> bool:
        """Whether it was found and is neither open nor in `failures` yet."""
        return log_id in self._opener.recovering

    @property
    def recovering(self) -> int:
        """Number of logs that are not open yet, with the duplicates, of which none can be."""
        return len(self._opener.recovering) + len(self.duplicates)

    async def wait_all_open(self, timeout_ms: int | None = None) -> None:
        """Return when all logs that were found at the start are open or failed, or after the timeout."""
        await self._opener.wait_all(None if timeout_ms is None else timeout_ms / 1000)
        self._raise_crash()

    # Open and create

    async def _open_one(self, directory: LogDirectory, log_id: PartitionId, config: LogConfig) -> Log:
        if directory.failed is not None:
            raise directory.failed
        log = await Log.open(
            disk=directory.disk,
            store=directory.store,
            work=self._work,
            group_commit=directory.group_commit,
            clock=self._clock,
            files=directory.files,
            path=directory.paths[log_id],
            log_id=log_id,
            config=config,
        )
        if directory.has_failed():
            self._offline.append(log)
            raise StorageError(f"{log.path}: its directory has failed: {directory.failed}", path=log.path)
        if "high-watermark" in log.report.lost:
            LOGGER.warning("log=%s the stored high watermark cannot be read: 0 is used", log.path)
        self._open[log_id] = log
        return log

    async def create(
        self, log_id: PartitionId, *, label: str, config: LogConfig, directory: DirectoryId | None = None
    ) -> Log:
        """Return the log; create it if it does not exist, in the given directory or the one with the fewest logs."""
        assert not self._is_closed, "the logs are closed"
        while log_id in self._removals:
            await asyncio.wait([self._removals[log_id]])
        existing = await self.wait_open(log_id)
        if existing is not None:
            return existing
        if log_id in self.duplicates:
            raise undecided(log_id, self.duplicates[log_id])
        if log_id in self._home:
            raise self.failures.get(log_id) or StorageError(f"{self._home[log_id].paths[log_id]} is not open")
        home = self._choose(directory)
        home.paths[log_id] = directory_name(log_id, label)
        self._home[log_id] = home
        self._opener.begin_create(log_id)
        return await asyncio.shield(self._spawn(self._create(home, log_id, config)))

    async def _create(self, home: LogDirectory, log_id: PartitionId, config: LogConfig) -> Log:
        try:
            if log_id in home.unforgotten and not await home.forget(log_id):
                path = home.paths[log_id]
                raise DiskFullError(
                    f"create {path}: the state of a deleted log of this name cannot be deleted; {DISK_FULL_ADVICE}",
                    path=path,
                )
            return await self._open_one(home, log_id, config)
        except TidelogError:
            del home.paths[log_id], self._home[log_id]
            self._opener.forget(log_id)
            raise
        finally:
            self._opener.finish(log_id)

    def _choose(self, directory_id: DirectoryId | None) -> LogDirectory:
        working = [directory for directory in self.directories if directory.failed is None]
        if directory_id is not None:
            working = [directory for directory in working if directory.directory_id == directory_id]
        if not working:
            raise StorageError(
                "all log directories have failed"
                if directory_id is None
                else f"log directory {to_text(directory_id)} has failed or is unknown"
            )
        return min(working, key=lambda directory: len(directory.paths))

    async def keep(self, log_id: PartitionId, directory: DirectoryId) -> None:
        """Use the copy in this directory: set the others aside and open it (`wait_open`). Raises `StorageError` and
        changes nothing if the directory does not have exactly one copy."""
        copies = self.duplicates[log_id]
        chosen = choose(copies, directory)
        if chosen is None:
            raise undecided(log_id, copies)
        for copy in [copy for copy in copies if copy is not chosen]:
            if copy.directory.failed is None:  # else it stays, and the next start finds it again
                await set_aside(log_id, copy)
            copies.remove(copy)
        del self.duplicates[log_id]
        self._set_home(log_id, chosen)
        self._opener.add(chosen.directory, log_id)

    # Remove

    async def remove(self, log_id: PartitionId) -> None:
        """Delete a log. Its name is gone when this returns, also after a crash; its files are removed later."""
        if log_id not in self._removals:
            self._removals[log_id] = self._spawn(self._remove(log_id))
        await asyncio.shield(self._removals[log_id])

    async def give_up(self, log_id: PartitionId, reason: str) -> None:
        """Move a log that cannot be opened out of the way, so that it can be created again. Its files are kept."""
        if log_id not in self._removals:
            self._removals[log_id] = self._spawn(self._remove(log_id, kept_for=reason))
        await asyncio.shield(self._removals[log_id])

    async def keep_tail(self, log_id: PartitionId, offset: int, reason: str, *, is_reset: bool = False) -> bool:
        """Keep the records of an open log at or past `offset`, before its owner truncates or resets it. Returns whether
        segments were moved away (`Log.mark_missing`)."""
        log, home = self._open.get(log_id), self._home.get(log_id)
        if log is None or home is None:
            return False
        return await self.kept.keep_tail(home, log, offset, reason, is_reset=is_reset)

    async def _remove(self, log_id: PartitionId, kept_for: str | None = None) -> None:
        try:
            self._opener.give_up(log_id)  # it may wait for disk space, which its removal frees
            await self.wait_open(log_id)
            for copy in list(self.duplicates.get(log_id, ())):
                await self._delete(log_id, copy)
                self.duplicates[log_id].remove(copy)
            self.duplicates.pop(log_id, None)
            home = self._home.get(log_id)
            if home is None:
                return
            if home.failed is not None:
                raise home.failed
            log = self._open.pop(log_id, None)
            if log is not None:
                await log.retire()
            if kept_for is None:
                await self._delete(log_id, LogCopy(home, home.paths[log_id]))
            else:
                await self.kept.keep_log(log_id, LogCopy(home, home.paths[log_id]), kept_for)
            del home.paths[log_id], self._home[log_id]
            self._checkpoints.forget(log_id)
            self._opener.forget(log_id)
            self.housekeeping.forget(log_id)
        finally:
            del self._removals[log_id]

    async def _delete(self, log_id: PartitionId, copy: LogCopy) -> None:
        name = copy.directory.free_name(copy.name, DELETED)
        await rename_copy(log_id, copy, name)
        self._remove_later(copy.directory, name, log_id)

    def _remove_later(self, directory: LogDirectory, path: str, log_id: PartitionId) -> None:
        async def remove() -> None:
            try:
                if log_id in directory.unforgotten:
                    # Removing the files frees space. The name stays until the log's stored state is deleted.
                    await self._work.run(empty_directory, directory.disk, path)
                while log_id in directory.unforgotten and not await directory.forget(log_id):
                    if self._is_closed or directory.failed is not None:
                        return
                    await asyncio.sleep(ROOM_WAIT_S)
                await self._work.run(remove_directory, directory.disk, path)
            except TidelogError as error:
                # The next start finds the directory and retries.
                LOGGER.warning("directory=%s log=%s is not removed yet: %s", directory.disk.label, path, error)

        self._spawn(remove())

    # Move

    def move(self, log_id: PartitionId, directory: DirectoryId) -> log_move.LogMove:
        """Begin a move of an open log to another directory; see `log_move`."""
        log, home = self._open.get(log_id), self._home.get(log_id)
        if log is None or home is None or log.damaged is not None:
            raise StorageError(f"the log of {log_id} is not open, or damaged")
        return log_move.LogMove(self.moved, log, home, self._choose(directory))

    async def moved(self, log_id: PartitionId, home: LogDirectory, target: LogDirectory, deleted: str | None) -> Log:
        """The files are in the new directory (`log_move`): open the log there."""
        high_watermark = self.high_watermark(log_id)
        # Its old directory, and the log with it, may have failed meanwhile.
        self._open.pop(log_id, None)
        self._opener.forget(log_id)
        target.paths[log_id] = home.paths.pop(log_id)
        self._home[log_id] = target
        if deleted is not None:
            self._remove_later(home, deleted, log_id)
        self._opener.add(target, log_id, is_moved=True)
        log = await self.wait_open(log_id)
        if log is None:
            raise self.failures.get(log_id) or StorageError(f"{target.paths[log_id]} is closed before it was opened")
        self.note_high_watermark(log_id, high_watermark)
        return log

    def _directory_failed(self, directory: LogDirectory, error: StorageError) -> None:
        """Take the logs of the directory offline. A restart finds out how much of their data is on the device."""
        LOGGER.error("directory=%s failed: %s", directory.disk.label, error)
        for log_id in directory.paths:
            log = self._open.pop(log_id, None)
            if log is not None:
                self._offline.append(log)
        self._opener.directory_failed(directory, error)
        if self._on_directory_failure is not None:
            self._on_directory_failure(directory, error)

    # High watermarks and checkpoints

    def note_high_watermark(self, log_id: PartitionId, offset: Offset) -> None:
        """The next checkpoint stores it."""
        self._checkpoints.note(log_id, offset)

    def high_watermark(self, log_id: PartitionId) -> Offset:
        """The high watermark that was noted last, or stored before the start; 0 if there is none."""
        return self._checkpoints.high_watermark(log_id)

    def bound(self, log_id: PartitionId) -> Offset:
        """The smaller of the high watermark and the first open transaction: the bound of retention and compaction."""
        high_watermark = self.high_watermark(log_id)
        log = self._open.get(log_id)
        return high_watermark if log is None else log.last_stable_offset(high_watermark)

    async def checkpoint(self) -> None:
        """Store the recovery points of all logs that were written to, and the high watermarks that changed."""
        await side_by_side([self._checkpoints.store(directory) for directory in self.directories])

    # Close

    async def close(self) -> bool:
        """Stop cleanly: sync every open log and store that, so that the next start reads no segment.

        Returns False if a log was not closed cleanly, a directory has failed, or logs were not open yet. The caller
        closes disks and stores.
        """
        if self._is_closed:
            return self._was_clean
        self._is_closed = True
        is_clean = not self._opener.pending
        await self._opener.close()
        for task in self._checkpointers:
            task.cancel()
        if self._checkpointers:
            await asyncio.wait(self._checkpointers)
        await self.housekeeping.close()
        await self.checkpoint()
        for chunk in slices([*self.all(), *self._offline]):
            is_clean &= all(await side_by_side([_close(log) for log in chunk]))
        for directory in self.directories:
            await directory.group_commit.close()
            directory.files.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._raise_crash()
        self._was_clean = is_clean and all(directory.failed is None for directory in self.directories)
        return self._was_clean

    # Tasks

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        # The caller got the error of the catalogue; any other exception is a bug.
        if isinstance(error, Exception) and not isinstance(error, TidelogError):
            LOGGER.critical("a background task of the logs has crashed: %r", error, exc_info=error)
            self._opener.finish_all()
            if self._crashed is None:
                self._crashed = error
                if self._on_crash is not None:
                    self._on_crash(error)

    def _raise_crash(self) -> None:
        if self._crashed is not None:
            raise self._crashed


async def _close(log: Log) -> bool:
    try:
        await log.close()
    except TidelogError as error:
        LOGGER.error("log=%s was not closed cleanly: %s", log.path, error)
        return False
    return True
