"""What is stored of many logs now and then, so that the next start reads little: recovery points and high watermarks.

A log that was written to is touched at its directory's group commit until a checkpoint has stored its recovery point;
one that finds no room stays touched. High watermarks are the owner's (replication's) and are kept here so that they
survive: `note` is cheap, and the next checkpoint stores those that changed. A stored one may be old; it is never past
the log's end, and 0 if it was lost. Whatever shortens a log (recovery, a truncation, a reset) lowers the stored high
watermark in the commit that records the new end: otherwise a later start would take records that were appended since
for committed ones.

Rounds of a directory begin `interval_ms` after each other, or at once if the last one took longer. A directory that
hangs does not hold up the others; one whose store fails is given up.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tidelog.log.checkpoint import HIGH_WATERMARK, Writes, encode_high_watermark, key_prefix
from tidelog.log.directories import LogDirectory
from tidelog.log.log import Log
from tidelog.log.rounds import slices
from tidelog.model.errors import OF_THE_PROCESS, DiskFullError, StorageError, TidelogError, WorkFailedError
from tidelog.model.ids import Offset, PartitionId

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class Checkpoints:
    """Of the logs that are open; both tables are the owner's, who keeps them true."""

    def __init__(
        self, *, logs: Mapping[PartitionId, Log], homes: Mapping[PartitionId, LogDirectory], interval_ms: int
    ) -> None:
        self._logs = logs
        self._homes = homes
        self._interval_ms = interval_ms
        self._noted: dict[PartitionId, None] = {}

    # High watermarks.

    def note(self, log_id: PartitionId, offset: Offset) -> None:
        """Stored with the next round."""
        log = self._logs.get(log_id)
        if log is not None and log.high_watermark != offset:
            log.high_watermark = offset
            self._noted[log_id] = None

    def high_watermark(self, log_id: PartitionId) -> Offset:
        """The last one noted, or stored before the start; 0 if there is none."""
        log = self._logs.get(log_id)
        return Offset(0) if log is None else log.high_watermark

    def forget(self, log_id: PartitionId) -> None:
        self._noted.pop(log_id, None)

    # Rounds.

    async def store(self, directory: LogDirectory) -> None:
        """One round: what was written to since the last one, and the high watermarks that changed."""
        if directory.failed is None:
            try:
                await self._store(directory)
            except StorageError as error:
                directory.fail(error)
            except TidelogError as error:
                # The task that checkpoints regularly must outlive this; the next round tries again.
                LOGGER.error("directory=%s no checkpoint this time: %s", directory.disk.label, error)

    async def store_regularly(self, directory: LogDirectory) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._interval_ms / 1000, loop.time())
            await asyncio.sleep(due - loop.time())
            await self.store(directory)

    async def _store(self, directory: LogDirectory) -> None:
        touched = [log for log in directory.group_commit.take_touched() if isinstance(log, Log)]
        noted = [log_id for log_id in self._noted if self._homes.get(log_id) is directory]
        commit = [self._store_high_watermarks(directory, noted)] if noted else []
        for some in slices(touched):
            # Together: they share one group of syncs and one transaction of the store.
            await side_by_side([*(self._store_one(directory, log) for log in some), *commit])
            commit = []
        await side_by_side(commit)

    async def _store_high_watermarks(self, directory: LogDirectory, noted: list[PartitionId]) -> None:
        # Nothing is awaited between reading the offsets and the commit: a truncation that commits later comes after.
        writes: Writes = {}
        for log_id in noted:
            log = self._logs.get(log_id)
            if log is not None and log.is_changing:
                continue  # its end is about to be lowered; the next round stores it
            self._noted.pop(log_id, None)
            if log is not None:
                offset = min(log.high_watermark, log.end_offset)
                writes[key_prefix(log_id) + HIGH_WATERMARK] = encode_high_watermark(offset)
        if not writes:
            return
        try:
            await directory.store.commit(writes)
        except DiskFullError as error:
            LOGGER.warning("directory=%s no high watermarks are stored: %s", directory.disk.label, error)
            self._noted.update(dict.fromkeys(log_id for log_id in noted if self._homes.get(log_id) is directory))

    async def _store_one(self, directory: LogDirectory, log: Log) -> None:
        try:
            await log.checkpoint()
        except (WorkFailedError, DiskFullError) as error:
            # The next round stores it. Retention may make room, or the operator.
            LOGGER.warning("log=%s no checkpoint: %s", log.path, error)
        except StorageError as error:
            if error.number not in OF_THE_PROCESS:
                raise
            LOGGER.warning("log=%s no checkpoint, for want of open files or memory: %s", log.path, error)
        if log.has_news and not log.is_closed and log.damaged is None:
            directory.group_commit.touch(log)


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Carry out all of them, to the end; then raise the first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
