"""What a log knows against itself: the end of what a failed sync vouched for, and rot in a segment.

    a sync fails    everything past the durable end is suspect: stored, so that a restart believes no byte of it
    rot is found    the log is damaged at `good_end`: closed to appends, durably, until its owner repairs it

The doubt counts in memory at once. On a full disk it is stored late (suspect) or not at all (damage: a reader or a
scrub finds it again after a restart); a store that is gone with its device has nothing left to say.
"""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tidelog.log import checkpoint as stored
from tidelog.log import scan
from tidelog.log.recovered import Damage
from tidelog.log.scan import ScrubResult
from tidelog.model.errors import DiskFullError, StorageError
from tidelog.model.ids import Offset

if TYPE_CHECKING:
    from tidelog.log.log import Log

LOGGER = logging.getLogger(__name__)

SUSPECT_RETRY_S = 1.0


async def store_suspect(log: "Log") -> None:
    """Best effort: the store lies on the same device, and may be gone with it. A full disk may get room."""
    suspect = {log.prefix + stored.SUSPECT: stored.encode_number("suspect", log.durable_end)}
    is_told = False
    while True:
        try:
            await log.store.commit(suspect)
            return
        except StorageError as error:
            if not is_told:
                LOGGER.error(
                    "log=%s the end %d of what is durable was not stored: %s", log.path, log.durable_end, error
                )
            is_told = True
            if log.is_closed or not isinstance(error, DiskFullError):
                return
        await asyncio.sleep(SUSPECT_RETRY_S)


async def scrub(log: "Log", base_offset: int) -> ScrubResult:
    """Check a sealed segment against the CRC of its file. A segment that fails makes the log damaged.

    One that was dropped, replaced or cut while it was read has no fault: what was read says nothing of the log.
    """
    info, version = log.segments.info(base_offset), log.segments.version
    result = await log.work.run(scan.scrub, log.disk, log.path, info, log.gaps)
    if result.fault is None:
        return result
    async with log.lock:
        if log.is_closed or log.segments.version != version or info not in log.segments.sealed:
            return replace(result, fault=None)
        await mark_damaged(log, Damage(Offset(result.good_end), result.fault))
    return result


async def mark_damaged(log: "Log", damage: Damage) -> None:
    """Of two, the one that leaves less counts."""
    if log.damaged is None or damage.good_end < log.damaged.good_end:
        log.damaged = damage
    LOGGER.error("log=%s damaged good_end=%d reason=%s", log.path, damage.good_end, damage.reason)
    try:
        await log.store.commit(
            {log.prefix + stored.DAMAGE: stored.encode_damage(log.damaged.good_end, log.damaged.reason)}
        )
    except DiskFullError as error:
        LOGGER.error("log=%s its damage is not stored: %s", log.path, error)
