"""Restores damaged sealed segments from the bytes of other replicas (decision 31).

    find_source     a replica with the stored CRC in this range: it is sound there, whatever its role
    restore         fetch its bytes into a file beside the damaged one, check them, swap them in
    combine         without such a replica: of this copy and each other one, by the differing bytes
    is_sound_elsewhere   another replica proves its log from there on: this one may be truncated and fetched again

Nothing here removes a record: a file is replaced only by one with its checksum.
"""

from __future__ import annotations

import asyncio
import logging

import msgpack

from tidelog.log.kept_copies import ROOM_BYTES_MIN
from tidelog.log.log import Log
from tidelog.log.log_scan import file_crc
from tidelog.log.segment import RESTORED, SegmentInfo
from tidelog.log.segment_changes import remove_files
from tidelog.log.segment_restore import combine, write_piece
from tidelog.model.errors import DISK_FULL_ADVICE, DiskFullError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.replication.broker_context import BrokerContext
from tidelog.replication.replica import Replica
from tidelog.replication.segment_copies import CHECK_SEGMENT, PIECE_BYTES, RANGE_BYTES, RANGE_CRC, encode_call
from tidelog.world.transport import Transport

LOGGER = logging.getLogger(__name__)

CRC_TIMEOUT_MS = 60_000
READ_TIMEOUT_MS = 15_000


class SegmentRepair:
    """See the module."""

    def __init__(self, context: BrokerContext, transport: Transport) -> None:
        self.restored = 0
        """Segments restored since the start."""
        self._context = context
        self._transport = transport
        self._lock = asyncio.Lock()
        """One segment at a time: a copy takes the space of a segment."""

    def _peers(self, replica: Replica) -> list[int]:
        partition, me = replica.partition, self._context.metadata.me
        first = [partition.leader] if partition.leader >= 0 else []
        return [broker for broker in dict.fromkeys([*first, *partition.replicas]) if broker != me]

    async def find_source(self, replica: Replica, info: SegmentInfo) -> int | None:
        """Return a broker whose replica has the bytes of this segment as they were when it was sealed."""
        for broker in self._peers(replica):
            try:
                request = encode_call(replica.partition_id, info.base_offset, info.size)
                reply = await self._transport.call(NodeId(broker), RANGE_CRC, request, timeout_ms=CRC_TIMEOUT_MS)
                if msgpack.unpackb(reply) == info.crc:
                    return broker
            except TidelogError as error:
                _log_unavailable(replica, info, broker, error)
        return None

    async def restore(self, replica: Replica, log: Log, info: SegmentInfo, source: int) -> bool:
        """Restore the segment from this broker; return whether it is restored."""
        path = log.segments.file_path(info.base_offset) + RESTORED
        async with self._lock:
            try:
                await self._fetch(replica, log, info, source, path)
                if await log.work.run(file_crc, log.disk, path, info.size) != info.crc:
                    return False
                return await self._install(log, info, path)
            except TidelogError as error:
                _log_unavailable(replica, info, source, error)
                return False
            finally:
                await _remove(log, path)

    async def combine(self, replica: Replica, log: Log, info: SegmentInfo) -> bool:
        """Restore the segment from two damaged copies of it; return whether it is restored."""
        assert info.crc is not None, "only a segment with a stored checksum is checked"
        own = log.segments.file_path(info.base_offset)
        other, target = own + ".copy" + RESTORED, own + RESTORED
        async with self._lock:
            try:
                for broker in self._peers(replica):
                    try:
                        await self._fetch(replica, log, info, broker, other)
                    except TidelogError as error:
                        _log_unavailable(replica, info, broker, error)
                        continue
                    if await combine(log.work, log.disk, own, other, target, info.size, info.crc):
                        return await self._install(log, info, target)
                return False
            except TidelogError as error:
                LOGGER.error("log=%s segment=%d is not combined: %s", log.path, info.base_offset, error)
                return False
            finally:
                await _remove(log, other, target)

    async def is_sound_elsewhere(self, replica: Replica, offset: int) -> bool:
        """Return whether the leader, or another replica in sync, has proved all of its sealed segments from this offset
        on. For a segment that cannot be restored byte by byte, since others have cleaned it differently or no longer
        have it. Another replica may have a former leader's records: who truncates this one would not get them again."""
        for broker in self._peers(replica):
            if broker != replica.partition.leader and broker not in replica.partition.isr:
                continue
            at, is_sound, is_end, end = offset, True, False, -1
            try:
                while is_sound and not is_end:
                    request = encode_call(replica.partition_id, at)
                    reply = await self._transport.call(
                        NodeId(broker), CHECK_SEGMENT, request, timeout_ms=CRC_TIMEOUT_MS
                    )
                    at, is_sound, is_end, end = msgpack.unpackb(reply)
                if is_sound and end >= replica.high_watermark:
                    return True
            except TidelogError as error:
                LOGGER.warning("%s: broker %d does not prove its log: %s", replica.partition_id, broker, error)
        return False

    async def _fetch(self, replica: Replica, log: Log, info: SegmentInfo, broker: int, path: str) -> None:
        await log.work.run(remove_files, log.disk, [path])
        if log.disk.free_bytes() < 2 * info.size + ROOM_BYTES_MIN:  # `combine` makes a second file
            raise DiskFullError(f"copy {path}: it does not fit; {DISK_FULL_ADVICE}", path=path)
        for skip in range(0, info.size, PIECE_BYTES):
            length = min(PIECE_BYTES, info.size - skip)
            request = encode_call(replica.partition_id, info.base_offset, skip, length)
            data = await self._transport.call(NodeId(broker), RANGE_BYTES, request, timeout_ms=READ_TIMEOUT_MS)
            await log.work.run(write_piece, log.disk, path, skip, data)

    async def _install(self, log: Log, info: SegmentInfo, path: str) -> bool:
        is_installed = await log.restore_segment(info, path)
        self.restored += is_installed
        return is_installed


def _log_unavailable(replica: Replica, info: SegmentInfo, broker: int, error: TidelogError) -> None:
    LOGGER.warning("%s segment=%d: no copy from broker %d: %s", replica.partition_id, info.base_offset, broker, error)


async def _remove(log: Log, *paths: str) -> None:
    """The next opening of the log removes them, too."""
    try:
        if not log.is_closed:
            await log.work.run(remove_files, log.disk, paths)
    except TidelogError as error:
        LOGGER.warning("copies=%s are not removed: %s", ", ".join(paths), error)
