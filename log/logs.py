"""All the logs of a node: several directories, each with its disk, its store and its group commit (`directories`).

Start: `Logs.open` lists the directories and returns; logs open in the background, `parallel_per_directory` at a time in
each directory. `wait_open` waits for one of them; `hurry` brings its turn forward; the owner is told of each that is
done (`observe`), so that it serves what it can while the rest is recovered (`replication.recovering`). A log that
cannot be opened is told in `failures` and holds up no other. A directory that cannot be read is given up like one that
fails later. A log that stands in two places is not opened until the owner says which one counts (`doubles`, `keep`).

    found --its turn, recovery--> open --remove--> gone               recovering | open | failed (`failures`)
          --an error that may pass--> found, retried (`opening`)      removed: `<name>.<n>.deleted`, then nothing
          --proof of damage--> failed                                 kept: `<name>.<n>.kept` (`keeping`)
                                  open --its directory fails--> failed

Nothing is held per idle log but the `Log` itself: no task, no timer, no open file. A task checkpoints what was written
to (`checkpoints`); one cleaning runs at a time, on request of the owner.

Our own errors in the background (`crashed`) are raised to whoever waits, and the node stops.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tidelog.log import moving, rounds
from tidelog.log.checkpoints import Checkpoints, side_by_side
from tidelog.log.cleaner import CleanerLimits, Sleep
from tidelog.log.config import LogConfig
from tidelog.log.directories import (
    Listing,
    LogDirectory,
    directory_name,
    empty_directory,
    in_order,
    list_logs,
    outlast_want,
    read_directory_id,
    remove_directory,
)
from tidelog.log.doubles import LogCopy, choose, set_aside, take_away, undecided
from tidelog.log.group_commit import Dirty
from tidelog.log.housekeeping import BoundOf, CleaningReport
from tidelog.log.keeping import KeptLogs
from tidelog.log.log import Log
from tidelog.log.opening import LogOpener, OpenRetry
from tidelog.log.retention import Expired
from tidelog.log.rounds import slices
from tidelog.model.errors import FULL_ADVICE, DiskFullError, StorageError, TidelogError
from tidelog.model.ids import DirectoryId, Offset, PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_WAIT_S = 1.0
"""What found no room is tried again after so long."""

Directories = Iterable[tuple[Disk, StateStore, DirectoryId]]
OnDirectoryFailure = Callable[[LogDirectory, StorageError], None]


@dataclass(frozen=True, slots=True)
class LogsConfig:
    checkpoint_interval_ms: int = 800
    """From the beginning of one checkpoint to the next: with the time that it takes, well within a second."""
    open_files_max: int = 512
    """In each directory, beside those that are being written or read at the moment."""
    parallel_per_directory: int = 32
    """Logs that are opened at a time. How many are read at a time after a crash is the number of helper processes."""
    cleaner: CleanerLimits = field(default_factory=CleanerLimits)


class Logs:
    """See the module. Used on one event loop; made by `open`, ends with `close` or the process."""

    def __init__(
        self,
        *,
        work: Work,
        clock: Clock,
        config: LogsConfig,
        config_of: Callable[[PartitionId], LogConfig],
        on_directory_failure: OnDirectoryFailure | None = None,
        sleep: Sleep | None = None,
    ) -> None:
        self.directories: list[LogDirectory] = []
        self._opener = LogOpener(
            open_log=lambda directory, log_id: self._open_one(directory, log_id, config_of(log_id)),
            spawn=self._spawn,
            parallel=config.parallel_per_directory,
        )
        self.failures: dict[PartitionId, TidelogError] = self._opener.failures
        """Logs that are proved to be damaged and cannot be opened, or whose directory has failed, and why."""
        self.open_retries: Mapping[PartitionId, OpenRetry] = self._opener.retries
        """Logs that could not be opened, for a reason that may pass."""
        self.doubles: dict[PartitionId, list[LogCopy]] = {}
        """Logs that stand in more than one place: not opened until `keep`."""
        self.kept = KeptLogs(work, clock)
        """Records that replicas had to give up, until they have them again."""
        self.uncleanable: dict[PartitionId, TidelogError] = {}
        """Logs whose cleaning found damage, and where: left alone until the next start."""
        self.deletes_bound_of: BoundOf | None = None  # see `housekeeping.clean`
        self.crashed: Exception | None = None
        self._config = config
        self._work = work
        self._clock = clock
        self._sleep = sleep
        self._on_directory_failure = on_directory_failure
        self._open: dict[PartitionId, Log] = {}
        self._offline: list[Log] = []
        self._home: dict[PartitionId, LogDirectory] = {}
        self._removals: dict[PartitionId, asyncio.Task[None]] = {}
        self._checkpoints = Checkpoints(logs=self._open, homes=self._home, interval_ms=config.checkpoint_interval_ms)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checkpointer: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[CleaningReport | None] | None = None
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
        on_directory_failure: OnDirectoryFailure | None = None,
        sleep: Sleep | None = None,
    ) -> "Logs":
        """Find the logs of these directories and begin to open them. The id is for a directory that has none yet.

        `sleep` is what a helper process throttles itself with (see `housekeeping`); it must be picklable.
        """
        logs = cls(
            work=work,
            clock=clock,
            config=config or LogsConfig(),
            config_of=config_of,
            on_directory_failure=on_directory_failure,
            sleep=sleep,
        )
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
                directory.directory_id = await outlast_want(disk.label, read)
            except StorageError as error:
                directory.fail(error)
        await moving.settle_moves([directory for directory in logs.directories if directory.failed is None])
        for directory in logs.directories:
            deleted += await logs._find(directory, found)
        logs._take_in(found)
        if all(directory.failed is not None for directory in logs.directories):
            reasons = "; ".join(str(directory.failed) for directory in logs.directories)
            raise StorageError(f"no log directory works: {reasons}" if reasons else "there is no log directory")
        for directory, name, log_id in deleted:
            logs._remove_later(directory, name, log_id)
        for directory in logs.directories:
            for log_id in sorted(directory.paths, key=in_order):
                logs._opener.add(directory, log_id)
        logs._checkpointer = logs._spawn(logs._checkpoint_regularly())
        return logs

    async def _find(
        self, directory: LogDirectory, found: dict[PartitionId, list[LogCopy]]
    ) -> list[tuple[LogDirectory, str, PartitionId]]:
        """Note what stands in a directory; returns the deleted logs, whose stored state is gone by then."""
        if directory.failed is not None:
            return []
        try:
            listing = await outlast_want(directory.disk.label, partial(self._list, directory))
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

    def _take_in(self, found: dict[PartitionId, list[LogCopy]]) -> None:
        for log_id, copies in found.items():
            if len(copies) > 1:
                self.doubles[log_id] = copies
                LOGGER.error("%s (unless the metadata tells which one counts)", undecided(log_id, copies))
            else:
                self._settle_in(log_id, copies[0])

    def _settle_in(self, log_id: PartitionId, copy: LogCopy) -> None:
        copy.directory.paths[log_id] = copy.name
        self._home[log_id] = copy.directory

    def observe(
        self,
        *,
        on_synced: Callable[[list[Dirty]], None],
        on_directory_failure: OnDirectoryFailure,
        on_opened: Callable[[PartitionId], None] | None = None,
    ) -> None:
        """From now on the owner is told of every group of syncs that has ended well, with its logs, of every directory
        that fails, and of every log that is not recovering any more: it is open, or in `failures`."""
        self._on_directory_failure = on_directory_failure
        self._opener.on_done = on_opened
        for directory in self.directories:
            directory.group_commit.on_synced = on_synced

    # Which there are.

    def __len__(self) -> int:
        return len(self._open)

    def get(self, log_id: PartitionId) -> Log | None:
        """The log, if it is open and its directory works."""
        return self._open.get(log_id)

    def all(self) -> list[Log]:
        """The open logs, in the order of their ids."""
        return [self._open[log_id] for log_id in sorted(self._open, key=in_order)]

    def known(self) -> list[PartitionId]:
        """Every log that a directory holds, open or not."""
        return sorted([*self._home, *self.doubles], key=in_order)

    def directory_of(self, log_id: PartitionId) -> LogDirectory | None:
        return self._home.get(log_id)

    async def wait_open(self, log_id: PartitionId) -> Log | None:
        """The log once it has been opened; None if there is none or it could not be opened (`failures`).

        One that waits for its turn is the next.
        """
        self.hurry(log_id)
        await self._opener.wait(log_id)
        self._raise_crash()
        return self._open.get(log_id)

    def hurry(self, log_id: PartitionId) -> None:
        """If it waits for its turn to be opened, it is the next."""
        home = self._home.get(log_id)
        if home is not None and log_id in home.unopened:
            home.unopened.move_to_end(log_id, last=False)

    def is_recovering(self, log_id: PartitionId) -> bool:
        """Whether it was found and is neither open nor in `failures` yet."""
        return log_id in self._opener.recovering

    @property
    def recovering(self) -> int:
        """How many are not open yet; those in several places, of which none can be, with them."""
        return len(self._opener.recovering) + len(self.doubles)

    async def wait_all_open(self, timeout_ms: int | None = None) -> None:
        """Returns when every log that was found at the start is open, or has failed, or the time is up."""
        await self._opener.wait_all(None if timeout_ms is None else timeout_ms / 1000)
        self._raise_crash()

    # Opening and making.

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
        """The log, made if it is not there: in the given directory, or in the one with the fewest logs."""
        assert not self._is_closed, "the logs are closed"
        while log_id in self._removals:
            await asyncio.wait([self._removals[log_id]])
        existing = await self.wait_open(log_id)
        if existing is not None:
            return existing
        if log_id in self.doubles:
            raise undecided(log_id, self.doubles[log_id])
        if log_id in self._home:
            raise self.failures.get(log_id) or StorageError(f"{self._home[log_id].paths[log_id]} is not open")
        home = self._choose(directory)
        home.paths[log_id] = directory_name(log_id, label)
        self._home[log_id] = home
        self._opener.pending[log_id] = None
        return await asyncio.shield(self._spawn(self._make(home, log_id, config)))

    async def _make(self, home: LogDirectory, log_id: PartitionId, config: LogConfig) -> Log:
        try:
            if log_id in home.unforgotten and not await home.forget(log_id):
                path = home.paths[log_id]
                raise DiskFullError(
                    f"make {path}: what was stored of a former one is not deleted; {FULL_ADVICE}", path=path
                )
            return await self._open_one(home, log_id, config)
        except TidelogError:
            del home.paths[log_id], self._home[log_id]
            self.failures.pop(log_id, None)
            raise
        finally:
            self._opener.finish(log_id)

    def _choose(self, wanted: DirectoryId | None) -> LogDirectory:
        working = [directory for directory in self.directories if directory.failed is None]
        if wanted is not None:
            working = [directory for directory in working if directory.directory_id == wanted]
        if not working:
            raise StorageError("no log directory works" if wanted is None else f"directory {wanted} does not work")
        return min(working, key=lambda directory: len(directory.paths))

    async def keep(self, log_id: PartitionId, directory: DirectoryId) -> None:
        """Of a log in several places, the copy in this directory is the log: the others are set aside, and it is opened
        (`wait_open`). `StorageError` if that does not decide it: then all stay as they are."""
        copies = self.doubles[log_id]
        chosen = choose(copies, directory)
        if chosen is None:
            raise undecided(log_id, copies)
        for copy in [copy for copy in copies if copy is not chosen]:
            if copy.directory.failed is None:  # else it stays, and the next start finds it again
                await set_aside(log_id, copy)
            copies.remove(copy)
        del self.doubles[log_id]
        self._settle_in(log_id, chosen)
        self._opener.add(chosen.directory, log_id)

    # Removing.

    async def remove(self, log_id: PartitionId) -> None:
        """Delete a log. Its name is gone when this returns, after a crash too; its files go later."""
        if log_id not in self._removals:
            self._removals[log_id] = self._spawn(self._remove(log_id))
        await asyncio.shield(self._removals[log_id])

    async def give_up(self, log_id: PartitionId, reason: str) -> None:
        """Take a log that cannot be opened out of the way, so that it can be created again. Its files are kept."""
        if log_id not in self._removals:
            self._removals[log_id] = self._spawn(self._remove(log_id, kept_for=reason))
        await asyncio.shield(self._removals[log_id])

    async def keep_tail(self, log_id: PartitionId, offset: int, reason: str, *, is_reset: bool = False) -> bool:
        """Keep what an open log holds at or past `offset`, before its owner cuts it there, or resets it. Whether that
        moved segments away (`keeping.misses_segments`)."""
        log, home = self._open.get(log_id), self._home.get(log_id)
        if log is None or home is None:
            return False
        return await self.kept.keep_tail(home, log, offset, reason, is_reset=is_reset)

    async def _remove(self, log_id: PartitionId, kept_for: str | None = None) -> None:
        try:
            self._opener.give_up(log_id)  # it may wait for room, which its removal makes
            await self.wait_open(log_id)
            for copy in list(self.doubles.get(log_id, ())):
                await self._delete(log_id, copy)
                self.doubles[log_id].remove(copy)
            self.doubles.pop(log_id, None)
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
            self.failures.pop(log_id, None)
            self.uncleanable.pop(log_id, None)
        finally:
            del self._removals[log_id]

    async def _delete(self, log_id: PartitionId, copy: LogCopy) -> None:
        name = copy.directory.free_deleted_name(copy.name)
        await take_away(log_id, copy, name)
        self._remove_later(copy.directory, name, log_id)

    def _remove_later(self, directory: LogDirectory, path: str, log_id: PartitionId) -> None:
        async def remove() -> None:
            try:
                if log_id in directory.unforgotten:
                    # The files make room. The name stays until the store has forgotten the log.
                    await self._work.run(empty_directory, directory.disk, path)
                while log_id in directory.unforgotten and not await directory.forget(log_id):
                    if self._is_closed or directory.failed is not None:
                        return
                    await asyncio.sleep(ROOM_WAIT_S)
                await self._work.run(remove_directory, directory.disk, path)
            except TidelogError as error:
                # The next start finds the directory and tries again.
                LOGGER.warning("directory=%s log=%s is not removed yet: %s", directory.disk.label, path, error)

        self._spawn(remove())

    # Moving.

    def move(self, log_id: PartitionId, directory: DirectoryId) -> moving.LogMove:
        """A move of an open log to another directory; see `moving` for what to do with it."""
        log, home = self._open.get(log_id), self._home.get(log_id)
        if log is None or home is None or log.damaged is not None:
            raise StorageError(f"the log of {log_id} is not open, or damaged")
        return moving.LogMove(self, log, home, self._choose(directory))

    async def moved(self, log_id: PartitionId, home: LogDirectory, target: LogDirectory, deleted: str | None) -> Log:
        """The files stand in their new place (`moving`): open the log there."""
        high_watermark = self.high_watermark(log_id)
        # Its former directory may have failed meanwhile, and the log with it.
        self._open.pop(log_id, None)
        self.failures.pop(log_id, None)
        target.paths[log_id] = home.paths.pop(log_id)
        self._home[log_id] = target
        if deleted is not None:
            self._remove_later(home, deleted, log_id)
        self._opener.add(target, log_id, is_moved=True)
        self.hurry(log_id)
        log = await self.wait_open(log_id)
        if log is None:
            raise self.failures.get(log_id) or StorageError(f"{target.paths[log_id]} is closed before it was opened")
        self.note_high_watermark(log_id, high_watermark)
        return log

    def _directory_failed(self, directory: LogDirectory, error: StorageError) -> None:
        """Its logs are offline; their data is what is on the device, and a restart finds out how much that is."""
        LOGGER.error("directory=%s failed: %s", directory.disk.label, error)
        for log_id in directory.paths:
            log = self._open.pop(log_id, None)
            if log is not None:
                self._offline.append(log)
            self.failures[log_id] = error
        self._opener.directory_failed(directory)
        if self._on_directory_failure is not None:
            self._on_directory_failure(directory, error)

    # High watermarks and checkpoints.

    def note_high_watermark(self, log_id: PartitionId, offset: Offset) -> None:
        """Stored with the next checkpoint."""
        self._checkpoints.note(log_id, offset)

    def high_watermark(self, log_id: PartitionId) -> Offset:
        """The last one noted, or stored before the start; 0 if there is none."""
        return self._checkpoints.high_watermark(log_id)

    def bound(self, log_id: PartitionId) -> Offset:
        """The smaller of the high watermark and the first open transaction: the bound of retention and compaction."""
        high_watermark = self.high_watermark(log_id)
        log = self._open.get(log_id)
        return high_watermark if log is None else log.last_stable_offset(high_watermark)

    async def checkpoint(self) -> None:
        """Store the recovery points of all logs that were written to, and the high watermarks that changed."""
        await side_by_side([self._checkpoints.store(directory) for directory in self.directories])

    async def _checkpoint_regularly(self) -> None:
        # Each at its own pace: a directory that hangs does not hold up the recovery points of the others.
        await side_by_side([self._checkpoints.store_regularly(directory) for directory in self.directories])

    # Retention and compaction.

    async def expire(
        self, bound_of: BoundOf | None = None, *, directory: LogDirectory | None = None
    ) -> dict[PartitionId, list[Expired]]:
        """Retention of every log, and removal of files that were dropped a while ago. Returns what expired.

        With a `directory` only its logs, and dropped files are removed at once: it is full.
        """
        expired: dict[PartitionId, list[Expired]] = {}
        for some in slices([log for log in self.all() if directory is None or log.log_id in directory.paths]):
            expired.update(
                await rounds.expire(some, bound_of or self.bound, self._clock, is_full=directory is not None)
            )
            await asyncio.sleep(0)
        return expired

    async def clean_one(self, bound_of: BoundOf | None = None) -> CleaningReport | None:
        """Compact the log that needs it most; None if none does. Call it again until it says so.

        One at a time: while one runs, a second call waits for that one and has its result.
        """
        assert not self._is_closed, "the logs are closed"
        if self._cleaning is None:
            self._cleaning = self._spawn(self._clean_one(bound_of or self.bound))
        return await asyncio.shield(self._cleaning)

    async def _clean_one(self, bound_of: BoundOf) -> CleaningReport | None:
        try:
            return await rounds.clean_dirtiest(
                self.all, self.uncleanable, bound_of, self._config.cleaner, self._sleep, self.deletes_bound_of
            )
        finally:
            self._cleaning = None

    # The end.

    async def close(self) -> bool:
        """A clean stop: every open log is synced and says so, and the next start reads none of them.

        Whether it was one: False if a log was not closed cleanly, a directory has failed, or logs were not open yet
        (they stay as they are). Disks and stores are the caller's to close.
        """
        if self._is_closed:
            return self._was_clean
        self._is_closed = True
        is_clean = not self._opener.pending
        await self._opener.close()
        for task in (self._checkpointer, self._cleaning):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self.checkpoint()
        for some in slices([*self.all(), *self._offline]):
            is_clean &= all(await side_by_side([_close(log) for log in some]))
        for directory in self.directories:
            await directory.group_commit.close()
            directory.files.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._raise_crash()
        self._was_clean = is_clean and all(directory.failed is None for directory in self.directories)
        return self._was_clean

    # Tasks.

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
        # Errors of the world were told to the one who asked; any other is our own.
        if isinstance(error, Exception) and not isinstance(error, TidelogError):
            LOGGER.critical("the logs have crashed: %r", error, exc_info=error)
            self.crashed = self.crashed or error
            for log_id in list(self._opener.pending):
                self._opener.finish(log_id)

    def _raise_crash(self) -> None:
        if self.crashed is not None:
            raise self.crashed


async def _close(log: Log) -> bool:
    try:
        await log.close()
    except TidelogError as error:
        LOGGER.error("log=%s was not closed cleanly: %s", log.path, error)
        return False
    return True
