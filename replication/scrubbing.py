"""Scrubs sealed segments: reads each one periodically and compares it with the CRC of its whole file.

    a cycle begins --> one replica after the other, from a random one on --> one sealed segment after the other
        --> pieces of it in a worker process, a pause after each: `log.scrub.bytes.per.second`, 0 disables scrubbing
        --> the CRC differs --> a follower, or the only replica in sync: the segment is restored from one that has the
                                CRC in this range, or from two damaged copies (`segment_repair`)
                            --> a leader: the log is damaged; it gives up leading, then is restored (`repair`)
                            --> no sound copy: logged only; removing one of the copies would repair nothing
        --> the CRC is right --> index files are compared with the batches, and rebuilt if they are wrong
    the next cycle begins `log.scrub.interval.ms` after this one began, or when this one has ended

A CRC mismatch here is only a suspicion: the segment may have been cleaned, truncated or dropped meanwhile. `Log.check`
reads it again and knows of such changes. The progress of a cycle does not survive a restart; its random start lets a
node that restarts often still reach every log.

Limits: pages in the page cache are read from there, not from the disk. A file that cannot be read (a device error) is
logged and counted only: writes and syncs decide whether the directory has failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from tidelog.log.damage import Damage
from tidelog.log.directories import log_order
from tidelog.log.log import Log
from tidelog.log.log_scan import crc_of_piece
from tidelog.log.segment import LOG, SegmentInfo
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.replica import Replica
from tidelog.replication.segment_repair import SegmentRepair
from tidelog.world.slicing import sliced

LOGGER = logging.getLogger(__name__)

INTERVAL = "log.scrub.interval.ms"
RATE = "log.scrub.bytes.per.second"
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 4 << 10, 4 << 20
SETTING_CHECK_S = 1.0
RECHECK_S = 5.0
RESTORE_RETRY_S = 60.0
"""Until the only in-sync replica tries again to restore a segment."""
_REPLICAS_PER_SLICE = 128
"""Replicas checked in one turn of the event loop if they have no sealed segment."""


class Scrubbing:
    """See the module."""

    def __init__(self, context: BrokerContext, random: Random, repair: SegmentRepair) -> None:
        self.segments = 0
        """Segments read completely since the start."""
        self.bytes = 0
        self.faults = 0
        """Segments that do not match their CRC."""
        self.index_faults = 0
        """Segments with index files that did not fit their batches, and were rebuilt."""
        self.unrepairable = 0
        """Corrupt segments of which no sound copy was found, each time that they were read."""
        self.errors = 0
        """Segments that could not be read."""
        self.cycles = 0
        self._context = context
        self._setting = context.metadata.setting
        self._random = random
        self._repair = repair
        self._urgent: dict[PartitionId, None] = {}
        """Replicas that are scrubbed before the next ones of the cycle."""

    def check_soon(self, partition_id: PartitionId) -> None:
        """Scrub this replica next: somebody has found a fault in it, or another replica that differs."""
        self._urgent[partition_id] = None

    async def run(self) -> None:
        """Scrub until cancelled."""
        loop = asyncio.get_running_loop()
        delay_ms = self._context.config.scrub_delay_ms
        await self._wait(loop.time(), lambda: delay_ms)
        while True:
            began_s = loop.time()
            await self._cycle()
            self.cycles += 1
            await self._wait(began_s, lambda: self._setting(INTERVAL))

    async def _wait(self, began_s: float, wait_ms: Callable[[], int]) -> None:
        """Sleep in small steps: the interval may become shorter meanwhile, and a log may be urgent."""
        loop = asyncio.get_running_loop()
        while (left_s := began_s + wait_ms() / 1000 - loop.time()) > 0:
            await asyncio.sleep(min(left_s, SETTING_CHECK_S))
            await self._check_urgent()

    async def _rate(self) -> int:
        """Return the rate in bytes per second; wait while scrubbing is disabled."""
        while True:
            rate = self._setting(RATE)
            if rate > 0:
                return rate
            await asyncio.sleep(SETTING_CHECK_S)

    async def _cycle(self) -> None:
        await self._rate()
        partition_ids = sorted(self._context.replicas, key=log_order)
        first = self._random.randrange(len(partition_ids)) if partition_ids else 0
        async for partition_id in sliced([*partition_ids[first:], *partition_ids[:first]], _REPLICAS_PER_SLICE):
            await self._check_urgent()
            await self._check_replica(partition_id)

    async def _check_urgent(self) -> None:
        while self._urgent:
            partition_id = next(iter(self._urgent))
            await self._rate()
            del self._urgent[partition_id]  # what is found in it from now on is checked again
            await self._check_replica(partition_id)

    async def _check_replica(self, partition_id: PartitionId) -> None:
        """Check the sealed segments of a replica. They may change meanwhile: the next one is found by its offset."""
        base = -1
        while True:
            replica = self._context.replicas.get(partition_id)
            log = None if replica is None else replica.log
            if replica is None or log is None or log.is_closed or log.damaged is not None:
                return
            info = next((info for info in log.segments.sealed if info.base_offset > base), None)
            if info is None:
                return
            base = info.base_offset
            try:
                await self._check(replica, log, info)
            except TidelogError as error:
                if _is_there(log, info):
                    self.errors += 1
                    LOGGER.error("log=%s segment=%d is not scrubbed: %s", log.path, base, error)

    async def _check(self, replica: Replica, log: Log, info: SegmentInfo) -> None:
        if info.crc is None:
            return  # no checkpoint has stored its CRC yet
        path = log.segments.file_path(info.base_offset, LOG)
        crc, position, size = 0, 0, info.size
        while position < info.size:
            rate = await self._rate()
            length = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, rate), info.size - position)
            if not _is_there(log, info):
                return
            crc, read, size = await log.work.run(crc_of_piece, log.disk, path, position, length, crc)
            position += read
            self.bytes += read
            if read < length or size != info.size:
                break
            await asyncio.sleep(read / rate)
        if not _is_there(log, info):
            return
        self.segments += 1
        if position != info.size or crc != info.crc or size != info.size:
            await self._suspect(replica, log, info)
            return
        fault = await log.check_indexes(info)
        if fault is not None:
            self.index_faults += 1
            LOGGER.error("log=%s segment=%d has a wrong index, which is rebuilt: %s", log.path, info.base_offset, fault)
            await log.rebuild_index(info.base_offset)

    async def _suspect(self, replica: Replica, log: Log, info: SegmentInfo) -> None:
        result = await log.check(info.base_offset)
        if result.fault is None or replica.is_removed or replica.log is not log:
            return
        self.faults += 1
        where = f"log={log.path} segment={info.base_offset}"
        LOGGER.error("%s is corrupt: %s", where, result.fault)
        source = await self._repair.find_source(replica, info)
        if source is None and await self._repair.combine(replica, log, info):
            return
        is_leader = replica.partition.leader == self._context.metadata.me
        if source is not None and (self._is_alone(replica) or not is_leader):
            if await self._repair.restore(replica, log, info, source):
                return
        elif source is None and not await self._repair.is_sound_elsewhere(replica, info.base_offset):
            self._report_unrepairable(replica, info, where)
            return
        if self._is_alone(replica):
            # Whatever others have, no other one is in sync: what only this replica has would be lost with its place.
            self._report_unrepairable(replica, info, where)
            if source is not None:
                self._context.tasks.call_later(RESTORE_RETRY_S, self.check_soon, replica.partition_id)
            return
        if replica.log is log and _is_there(log, info):
            # A leader gives up leading first; what cannot be restored is truncated and fetched again (`repair`).
            await log.mark_damaged(Damage(Offset(result.good_end), result.fault, info.base_offset))
            self._context.queue.report_damage(replica)
            self._context.tasks.call_later(RECHECK_S, self._recheck, replica)

    def _is_alone(self, replica: Replica) -> bool:
        return not any(broker != self._context.metadata.me for broker in replica.partition.isr)

    def _recheck(self, replica: Replica) -> None:
        """Check the rest of a log that was damaged, when it is repaired: other segments may be rotten, too."""
        if replica.is_removed or replica.log is None:
            return
        if replica.log.damaged is not None:
            self._context.tasks.call_later(RECHECK_S, self._recheck, replica)
        else:
            self.check_soon(replica.partition_id)

    def _report_unrepairable(self, replica: Replica, info: SegmentInfo, where: str) -> None:
        self.unrepairable += 1
        LOGGER.error(
            "%s is corrupt, and no other replica has proved a sound copy of offsets %d to %d (replicas: %s). Nothing is"
            " removed. Keep all copies; start replicas that are offline, or see docs/operations.md",
            *(where, info.base_offset, info.next_offset - 1, ", ".join(map(str, replica.partition.replicas))),
        )


def _is_there(log: Log, info: SegmentInfo) -> bool:
    return not log.is_closed and log.damaged is None and any(known is info for known in log.segments.sealed)
