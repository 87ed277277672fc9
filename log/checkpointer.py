"""Checkpoints the logs of a node: stores recovery points and high watermarks, so that the next start reads little.

A log that was written to is touched at its directory's group commit until a checkpoint has stored its recovery point; a
log that finds no disk space stays touched. High watermarks belong to replication and are stored here so that they
survive: `note` is cheap, and the next checkpoint stores those that changed. A stored one may be old; it is never past
the log end, and 0 if it was lost. Everything that shortens a log (recovery, truncation, reset) lowers the stored high
watermark in the commit that records the new end: otherwise a later start would take records that were appended since
for committed ones.

Checkpoints of a directory start every `interval_ms`, or at once if the last one took longer. A directory that hangs
does not delay others; one whose store fails is failed.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tidelog.log.directories import LogDirectory
from tidelog.log.housekeeping_scheduler import slices
from tidelog.log.log import Log
from tidelog.log.stored_state import HIGH_WATERMARK, Writes, encode_high_watermark, key_prefix
from tidelog.model.errors import PROCESS_ERRNOS, DiskFullError, StorageError, TidelogError, WorkFailedError
from tidelog.model.ids import Offset, PartitionId

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class LogCheckpointer:
    """Checkpoints the open logs. The owner maintains both tables."""

    def __init__(
        self, *, logs: Mapping[PartitionId, Log], homes: Mapping[PartitionId, LogDirectory], interval_ms: int
    ) -> None:
        self._logs = logs
        self._homes = homes
        self._interval_ms = interval_ms
        self._noted: dict[PartitionId, None] = {}

    # High watermarks

    def note(self, log_id: PartitionId, offset: Offset) -> None:
        """The next checkpoint stores it."""
        log = self._logs.get(log_id)
        if log is not None and log.high_watermark != offset:
            log.set_high_watermark(offset)
            self._noted[log_id] = None

    def high_watermark(self, log_id: PartitionId) -> Offset:
        """The high watermark that was noted last, or stored before the start; 0 if there is none."""
        log = self._logs.get(log_id)
        return Offset(0) if log is None else log.high_watermark

    def forget(self, log_id: PartitionId) -> None:
        self._noted.pop(log_id, None)

    # Checkpoints

    async def store(self, directory: LogDirectory) -> None:
        """One checkpoint: the logs that were written to since the last one, and the high watermarks that changed."""
        if directory.failed is None:
            try:
                await self._store(directory)
            except StorageError as error:
                directory.fail(error)
            except TidelogError as error:
                # The periodic task must survive this; the next checkpoint retries.
                LOGGER.error("directory=%s the checkpoint failed: %s", directory.disk.label, error)

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
        for chunk in slices(touched):
            # In parallel: they share one group of syncs and one transaction of the store.
            await side_by_side([*(self._store_one(directory, log) for log in chunk), *commit])
            commit = []
        await side_by_side(commit)

    async def _store_high_watermarks(self, directory: LogDirectory, noted: list[PartitionId]) -> None:
        # No await between reading the offsets and the commit: a truncation that commits later is ordered after it.
        writes: Writes = {}
        for log_id in noted:
            log = self._logs.get(log_id)
            if log is not None and log.is_changing:
                continue  # its end is about to be lowered; the next checkpoint stores it
            self._noted.pop(log_id, None)
            if log is not None:
                offset = min(log.high_watermark, log.end_offset)
                writes[key_prefix(log_id) + HIGH_WATERMARK] = encode_high_watermark(offset)
        if not writes:
            return
        try:
            await directory.store.commit(writes)
        except DiskFullError as error:
            LOGGER.warning("directory=%s high watermarks are not stored: %s", directory.disk.label, error)
            self._noted.update(dict.fromkeys(log_id for log_id in noted if self._homes.get(log_id) is directory))

    async def _store_one(self, directory: LogDirectory, log: Log) -> None:
        try:
            await log.checkpoint()
        except (WorkFailedError, DiskFullError) as error:
            # The next checkpoint retries. Retention or the operator may free space.
            LOGGER.warning("log=%s no checkpoint: %s", log.path, error)
        except StorageError as error:
            if error.number not in PROCESS_ERRNOS:
                raise
            LOGGER.warning("log=%s no checkpoint, the process lacks open files or memory: %s", log.path, error)
        if log.has_news and not log.is_closed and log.damaged is None:
            directory.group_commit.touch(log)


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of them to their end; then raise the first error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
