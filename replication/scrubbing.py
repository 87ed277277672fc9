"""Scrub: every sealed segment of this broker is read from time to time, and compared with the CRC of its whole file.

    begin of a cycle --> one replica after the other, from a random one on --> one sealed segment after the other
        --> pieces of it in a helper process, a pause after each: `log.scrub.bytes.per.second`, 0 for no scrub at all
        --> the CRC differs --> others are in sync: `Log.scrub` says where, the log is damaged, `repair` mends it
                            --> nobody else is: told, left as it is; taking away the only copy would mend nothing
    the next cycle begins `log.scrub.interval.ms` after this one did, or when it has ended

The CRC that is summed up here only raises the suspicion: the segment may have been cleaned, cut or dropped under it.
`Log.scrub` reads it again and knows of such changes. How far a cycle has come does not survive a restart; where it
begins is random, so that a node that restarts often still reaches every log.

What it cannot see: the pages of a file that are in memory are read from there, not from the device. A file that cannot
be read at all (an error of the device) is told and counted, no more: whether the directory is given up is decided by
writes and syncs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from crc32c import crc32c

from tidelog.log.log import Log
from tidelog.log.segment import LOG, SegmentInfo
from tidelog.metadata import configs
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.world.disk import Disk

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas

LOGGER = logging.getLogger(__name__)

INTERVAL = "log.scrub.interval.ms"
RATE = "log.scrub.bytes.per.second"
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 4 << 10, 4 << 20
SETTING_CHECK_S = 1.0
_REPLICAS_AT_ONCE = 128
"""Replicas without a sealed segment that are passed in one turn of the loop."""


def crc_of_piece(disk: Disk, path: str, position: int, length: int, crc: int) -> tuple[int, int, int]:
    """In a helper process: (the CRC carried on over this piece, the bytes of it, the size of the file)."""
    size = disk.size(path)
    file = disk.open(path)
    try:
        data = file.read(position, length)
    finally:
        file.close()
    return crc32c(data, crc), len(data), size


class Scrubbing:
    """See the module."""

    def __init__(self, host: Replicas) -> None:
        self.segments = 0
        """Read to their end since the start; so the bytes."""
        self.bytes = 0
        self.faults = 0
        """Segments that were not what was sealed."""
        self.errors = 0
        """Segments that could not be read."""
        self.cycles = 0
        self._host = host

    async def run(self) -> None:
        """For ever; the owner's task."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._host.config.scrub_delay_ms / 1000)
        while True:
            began_s = loop.time()
            await self._cycle()
            self.cycles += 1
            while True:
                left_s = began_s + self._setting(INTERVAL) / 1000 - loop.time()
                if left_s <= 0:
                    break
                # In small steps: the interval may become shorter meanwhile.
                await asyncio.sleep(min(left_s, SETTING_CHECK_S))

    def _setting(self, name: str) -> int:
        value = configs.broker_config(self._host.image, name, self._host.me).value
        assert isinstance(value, int), f"{name} is an integer"
        return value

    async def _rate(self) -> int:
        """Bytes a second; waits while there is to be no scrub."""
        while True:
            rate = self._setting(RATE)
            if rate > 0:
                return rate
            await asyncio.sleep(SETTING_CHECK_S)

    async def _cycle(self) -> None:
        await self._rate()
        places = sorted((replica.partition_id for replica in self._host.all()), key=_in_order)
        first = self._host.random.randrange(len(places)) if places else 0
        for number, place in enumerate([*places[first:], *places[:first]], 1):
            await self._check_replica(place)
            if number % _REPLICAS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _check_replica(self, place: PartitionId) -> None:
        """Segments come and go meanwhile: the next one is looked for by its offset."""
        base = -1
        while True:
            replica = self._host.get(place)
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
            return  # its checkpoint has not come yet
        path = log.segments.file_path(info.base_offset, LOG)
        crc = position = 0
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

    async def _suspect(self, replica: Replica, log: Log, info: SegmentInfo) -> None:
        where = f"log={log.path} segment={info.base_offset}"
        if not any(broker != self._host.me for broker in replica.partition.isr):
            self.faults += 1
            LOGGER.error("%s is not what was written, and no other replica is in sync to mend it from", where)
            return
        result = await log.scrub(info.base_offset)
        if result.fault is not None:
            self.faults += 1
            LOGGER.error("%s has rotted; it is mended from another replica: %s", where, result.fault)
            if self._host.get(replica.partition_id) is replica and replica.log is log:
                self._host.found_damage(replica)


def _in_order(partition_id: PartitionId) -> tuple[int, int]:
    return partition_id.topic_id.int, partition_id.partition


def _is_there(log: Log, info: SegmentInfo) -> bool:
    return not log.is_closed and log.damaged is None and any(known is info for known in log.segments.sealed)
