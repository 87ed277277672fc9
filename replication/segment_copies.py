"""Serves bytes of this broker's logs to other brokers that restore a damaged segment (`segment_repair`).

    replication/range-crc        CRC-32C of `size` bytes from a batch on      in pieces, in a helper process
    replication/range-bytes      `length` of these bytes, `skip` from there on
    replication/check-segment    whether the sealed segment at an offset has its checksum, where it and the log end

Any replica with an open log answers, whatever its role and although its log is damaged elsewhere: who asks proves the
bytes by the checksum of its own segment.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import msgpack

from tidelog.log.file_pool import run_async
from tidelog.log.log import Log
from tidelog.log.log_scan import crc_of_piece
from tidelog.log.read_plans import IndexFaultError, locate_steps
from tidelog.model.errors import InvalidRequestError, ReplicaNotAvailableError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication.replica import Replica
from tidelog.world.transport import Transport

RANGE_CRC = "replication/range-crc"
RANGE_BYTES = "replication/range-bytes"
CHECK_SEGMENT = "replication/check-segment"
PIECE_BYTES = 1 << 20
CRC_PIECE_BYTES = 4 << 20

Extent = tuple[str, int, int]
"""(path, position, length) of a part of a file."""


def encode_call(partition_id: PartitionId, *numbers: int) -> bytes:
    return bytes(msgpack.packb([partition_id.topic_id.bytes, partition_id.partition, *numbers]))


def decode_call(data: bytes, count: int) -> tuple[PartitionId, tuple[int, ...]]:
    try:
        topic, partition, *numbers = msgpack.unpackb(data)
        found = PartitionId(TopicId(UUID(bytes=topic)), int(partition))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidRequestError(f"a request for a part of a log cannot be read: {error}") from error
    if len(numbers) != count or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise InvalidRequestError(f"a request for a part of a log has the numbers {numbers}")
    return found, tuple(numbers)


class SegmentCopies:
    """See the module."""

    def __init__(self, transport: Transport, find: Callable[[PartitionId], Replica | None]) -> None:
        self._transport = transport
        self._find = find

    def start(self) -> None:
        self._transport.serve(RANGE_CRC, self._range_crc)
        self._transport.serve(RANGE_BYTES, self._range_bytes)
        self._transport.serve(CHECK_SEGMENT, self._check_segment)

    def _open(self, partition_id: PartitionId) -> Log:
        replica = self._find(partition_id)
        log = None if replica is None else replica.log
        if log is None or log.is_closed:
            raise ReplicaNotAvailableError(f"broker {self._transport.me} has no open replica of {partition_id}")
        return log

    async def _range_crc(self, _node: NodeId, data: bytes) -> bytes:
        partition_id, (start, size) = decode_call(data, 2)
        log = self._open(partition_id)
        crc = 0
        for path, position, length in await _extents(log, start, 0, size):
            end = position + length
            while position < end:
                piece = min(CRC_PIECE_BYTES, end - position)
                crc, read, _ = await log.work.run(crc_of_piece, log.disk, path, position, piece, crc)
                if read < piece:
                    raise ReplicaNotAvailableError(f"{path} ends at {position + read}")
                position += read
        return bytes(msgpack.packb(crc))

    async def _range_bytes(self, _node: NodeId, data: bytes) -> bytes:
        partition_id, (start, skip, length) = decode_call(data, 3)
        log = self._open(partition_id)
        parts = []
        for path, position, part_length in await _extents(log, start, skip, min(length, PIECE_BYTES)):
            file = log.segments.files.pin(path)
            try:
                parts.append(await file.read_async(position, part_length))
            finally:
                log.segments.files.unpin(file)
        return b"".join(parts)

    async def _check_segment(self, _node: NodeId, data: bytes) -> bytes:
        partition_id, (offset,) = decode_call(data, 1)
        log = self._open(partition_id)
        offset = max(offset, log.start_offset)
        view = log.segments.find(offset)
        is_sound = log.damaged is None
        if not view.is_active and is_sound:
            # Without a checksum, which the next checkpoint stores, nothing is proved.
            has_crc = log.segments.info(view.base_offset).crc is not None
            is_sound = has_crc and (await log.check(view.base_offset)).fault is None
        return bytes(msgpack.packb([int(view.next_offset), is_sound, view.is_active, int(log.end_offset)]))


async def _extents(log: Log, start: int, skip: int, length: int) -> list[Extent]:
    """Where the bytes are that begin `skip` behind the batch at offset `start`. Segments may begin elsewhere than those
    of who asks. Raises `ReplicaNotAvailableError` if the log does not have all of them."""
    segments = log.segments
    if start < segments.first_offset:
        raise ReplicaNotAvailableError(f"{log.path} begins at {segments.first_offset}")
    try:
        base, at, _ = await run_async(locate_steps(segments, log.config, start))
    except IndexFaultError as fault:
        await log.rebuild_index(fault.base_offset)
        base, at, _ = await run_async(locate_steps(segments, log.config, start))
    skip += at
    extents: list[Extent] = []
    for view in segments.from_offset(base):
        taken = min(max(view.size - skip, 0), length)
        if taken:
            extents.append((segments.file_path(view.base_offset), skip, taken))
        skip = max(skip - view.size, 0)
        length -= taken
        if length == 0:
            return extents
    raise ReplicaNotAvailableError(f"{log.path} lacks {length} bytes of those from offset {start} on")
