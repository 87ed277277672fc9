"""Rounds over many logs: retention of each, the cleaning of the one that needs it most. Long ones go in turns of the
event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TypeVar

from tidelog.log import housekeeping
from tidelog.log.cleaner import CleanerLimits, Sleep
from tidelog.log.compaction import CleaningPlan, dirtiest
from tidelog.log.housekeeping import BoundOf, CleaningReport
from tidelog.log.log import Log
from tidelog.log.opening import proves_damage
from tidelog.log.retention import Expired
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.world.clock import Clock

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

LOGS_AT_ONCE = 128
"""So many logs are looked at, checkpointed or closed in one turn of the loop: a turn stays far below 20 ms."""


def slices(logs: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(logs), LOGS_AT_ONCE):
        yield logs[at : at + LOGS_AT_ONCE]


async def expire(
    logs: Sequence[Log], bound_of: BoundOf, clock: Clock, *, is_full: bool = False
) -> dict[PartitionId, list[Expired]]:
    """Retention of these, and removal of files that were dropped a while ago; of all dropped files if `is_full`."""
    expired: dict[PartitionId, list[Expired]] = {}
    for log in logs:
        try:
            gone = await housekeeping.expire(log, bound=bound_of(log.log_id))
            await log.reap(clock.now_ms() + (log.config.file_delete_delay_ms if is_full else 0))
        except TidelogError as error:
            LOGGER.error("log=%s retention failed: %s", log.path, error)
            continue
        if gone:
            expired[log.log_id] = gone
        log.expire_producers()
    return expired


async def clean_dirtiest(
    logs: Callable[[], Sequence[Log]],
    uncleanable: MutableMapping[PartitionId, TidelogError],
    bound_of: BoundOf,
    limits: CleanerLimits,
    sleep: Sleep | None,
    deletes_bound_of: BoundOf | None = None,
) -> CleaningReport | None:
    """None if none needs it. One whose cleaning fails is passed over this time, or for good (`uncleanable`) if that
    proves damage; the next one has its turn."""
    skipped: set[PartitionId] = set()
    while True:
        found = await _plans(logs(), uncleanable, bound_of, deletes_bound_of)
        plans = [row for row in found if row[0].log_id not in skipped]
        chosen = dirtiest([((log, plan), plan) for log, plan in plans])
        if chosen is None:
            return None
        log, plan = chosen
        try:
            report = await housekeeping.clean(log, plan, limits, sleep, deletes_bound_of)
        except TidelogError as error:
            # It would be the dirtiest again, and the others would never be cleaned.
            if proves_damage(error):
                LOGGER.error("log=%s cannot be cleaned: %s", log.path, error)
                uncleanable[log.log_id] = error
            else:
                LOGGER.warning("log=%s is cleaned another time: %s", log.path, error)
                skipped.add(log.log_id)
            continue
        if report is not None:
            return report


async def _plans(
    logs: Sequence[Log],
    uncleanable: MutableMapping[PartitionId, TidelogError],
    bound_of: BoundOf,
    deletes_bound_of: BoundOf | None,
) -> list[tuple[Log, CleaningPlan]]:
    plans = []
    for some in slices([log for log in logs if log.config.cleanup_compact]):
        for log in some:
            if log.log_id not in uncleanable:
                deletes_bound = None if deletes_bound_of is None else deletes_bound_of(log.log_id)
                plan = housekeeping.plan(log, bound=bound_of(log.log_id), deletes_bound=deletes_bound)
                if plan is not None:
                    plans.append((log, plan))
        await asyncio.sleep(0)
    return plans
