"""Applies retention to many logs and cleans the log that needs it most. Long loops yield to the event loop."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from tidelog.log import housekeeping
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.compaction import CleaningPlan, dirtiest
from tidelog.log.config import LogConfig
from tidelog.log.directories import LogDirectory
from tidelog.log.housekeeping import BoundOf, CleaningReport
from tidelog.log.log import Log
from tidelog.log.log_opener import proves_damage
from tidelog.log.retention import ExpiredSegment
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.world.clock import Clock

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

LOGS_AT_ONCE = 128
"""Logs processed in one turn of the event loop: a turn stays far below 20 ms."""


def slices(logs: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(logs), LOGS_AT_ONCE):
        yield logs[at : at + LOGS_AT_ONCE]


class HousekeepingScheduler:
    """Applies retention and compaction to the open logs of a node. `bound_of` is the bound of both, for each log."""

    def __init__(
        self,
        *,
        logs: Callable[[], Sequence[Log]],
        bound_of: BoundOf,
        clock: Clock,
        limits: CleanerLimits,
        spawn: Callable[[Coroutine[Any, Any, CleaningReport | None]], asyncio.Task[CleaningReport | None]],
    ) -> None:
        """`spawn` starts a task of the owner."""
        self.uncleanable: dict[PartitionId, TidelogError] = {}
        """Logs whose cleaning found damage, with the error: not cleaned until the next start."""
        self.config_of: Callable[[Log], LogConfig | None] = lambda log: log.config
        """The config of a log's topic, None while the owner does not know it: then nothing is deleted. Retention goes
        by it although the log does not have it yet: on a full disk it cannot be stored. Compaction waits for that."""
        self._logs = logs
        self._bound_of = bound_of
        self._clock = clock
        self._limits = limits
        self._spawn = spawn
        self._cleaning: asyncio.Task[CleaningReport | None] | None = None
        self._is_closed = False

    def forget(self, log_id: PartitionId) -> None:
        self.uncleanable.pop(log_id, None)

    async def close(self) -> None:
        """End the cleaning that runs, and begin no other."""
        self._is_closed = True
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.wait([self._cleaning])

    # Retention

    async def expire(self, *, directory: LogDirectory | None = None) -> dict[PartitionId, list[ExpiredSegment]]:
        """Apply retention to every log, and remove files that were dropped a while ago. Returns the expired segments.

        With a `directory` only its logs, and dropped files are removed at once: it is full.
        """
        expired: dict[PartitionId, list[ExpiredSegment]] = {}
        for chunk in slices([log for log in self._logs() if directory is None or log.log_id in directory.paths]):
            for log in chunk:
                config = self.config_of(log)
                if config is None:
                    continue
                segments = await self._expire(log, config, is_full=directory is not None)
                if segments:
                    expired[log.log_id] = segments
            await asyncio.sleep(0)
        return expired

    async def _expire(self, log: Log, config: LogConfig, *, is_full: bool) -> list[ExpiredSegment]:
        try:
            segments = await log.expire(bound=self._bound_of(log.log_id), config=config)
            await log.remove_deleted(self._clock.now_ms() + (log.config.file_delete_delay_ms if is_full else 0))
        except TidelogError as error:
            LOGGER.error("log=%s retention failed: %s", log.path, error)
            return []
        log.expire_producers()
        return segments

    # Compaction

    async def clean_one(self, deletes_bound_of: BoundOf | None = None) -> CleaningReport | None:
        """Compact the log that needs it most; None if no log does. Call it again until it returns None. Tombstones and
        markers are kept from `deletes_bound_of` on (`housekeeping.clean`).

        One cleaning runs at a time: a second call waits for the first and returns its result.
        """
        assert not self._is_closed, "the logs are closed"
        if self._cleaning is None:
            self._cleaning = self._spawn(self._clean_one(deletes_bound_of))
        return await asyncio.shield(self._cleaning)

    async def _clean_one(self, deletes_bound_of: BoundOf | None) -> CleaningReport | None:
        try:
            return await self._clean_dirtiest(deletes_bound_of)
        finally:
            self._cleaning = None

    async def _clean_dirtiest(self, deletes_bound_of: BoundOf | None) -> CleaningReport | None:
        """Clean the dirtiest log. A log whose cleaning fails is skipped in this round, or until the next start
        (`uncleanable`) if the error proves damage, and the next one is cleaned."""
        skipped: set[PartitionId] = set()
        while True:
            all_plans = await self._plans(deletes_bound_of)
            plans = [row for row in all_plans if row[0].log_id not in skipped]
            chosen = dirtiest([((log, plan), plan) for log, plan in plans])
            if chosen is None:
                return None
            log, plan = chosen
            try:
                report = await housekeeping.clean(log, plan, self._limits, deletes_bound_of)
            except TidelogError as error:
                # Skip it: it would be the dirtiest again, and the others would never be cleaned.
                if proves_damage(error):
                    LOGGER.error("log=%s cannot be cleaned: %s", log.path, error)
                    self.uncleanable[log.log_id] = error
                else:
                    LOGGER.warning("log=%s cleaning is retried later: %s", log.path, error)
                    skipped.add(log.log_id)
                continue
            if report is not None:
                return report

    async def _plans(self, deletes_bound_of: BoundOf | None) -> list[tuple[Log, CleaningPlan]]:
        plans = []
        for chunk in slices([log for log in self._logs() if log.config.cleanup_compact]):
            for log in chunk:
                if log.log_id not in self.uncleanable and log.config == self.config_of(log):
                    deletes_bound = None if deletes_bound_of is None else deletes_bound_of(log.log_id)
                    try:
                        plan = housekeeping.plan(log, bound=self._bound_of(log.log_id), deletes_bound=deletes_bound)
                    except TidelogError as error:
                        # The state store of one directory must not stop the cleaning of the others.
                        LOGGER.warning("log=%s cleaning cannot be planned: %s", log.path, error)
                        continue
                    if plan is not None:
                        plans.append((log, plan))
            await asyncio.sleep(0)
        return plans
