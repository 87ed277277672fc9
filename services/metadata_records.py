"""Reads the metadata log for tools: entries from an offset on, or a snapshot where the log begins later.

This node reads its own log if it is a controller; otherwise it relays the stream of a controller. A frame between nodes
is msgpack: `[0, stale_ms]`, `[1, high_watermark, [[offset, epoch, kind, data], ...]]`, `[2, end_offset, epoch, data,
is_last]`, or `[3, error]`, after which the stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgpack

from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.model.errors import (
    CallTimeoutError,
    CorruptStateError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    TransportError,
)
from tidelog.model.ids import Offset
from tidelog.raft.messages import EntryKind
from tidelog.raft.state_machine import SnapshotJob
from tidelog.raft.tail import TailEntries
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.deadline import ends_at_deadline
from tidelog.services.forwarding import STALE_AFTER_S, ServiceCall
from tidelog.services.node import NodeAccess
from tidelog.world.transport import Stream, decode_error, encode_error
from tidelog.world.work import Work

SNAPSHOT_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRecords:
    from_offset: int = 0
    follow: bool = False
    """Go on with new entries as they are committed."""
    allow_stale: bool = False


@dataclass(frozen=True, slots=True)
class Stale:
    """Marks that the following records come from this node's copy: no active controller answered."""

    stale_ms: int


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    offset: int
    epoch: int
    kind: EntryKind
    data: bytes


@dataclass(frozen=True, slots=True)
class MetadataEntries:
    high_watermark: int
    entries: tuple[MetadataEntry, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    end_offset: int
    epoch: int
    data: bytes
    is_last: bool


Part = Stale | MetadataEntries | SnapshotPiece
STREAM = ServiceCall("metadata-records", Operation.DESCRIBE, MetadataRecords, MetadataEntries)
"""Its reply is a stream of frames."""
SendPart = Callable[[Part], Awaitable[None]]


class MetadataRecordService:
    def __init__(self, node: NodeAccess, work: Work) -> None:
        self._node = node
        self._work = work
        if node.cache.controller is not None:
            node.forwarder.serve_stream(STREAM, self._serve)

    @ends_at_deadline
    async def read(self, context: RequestContext, request: MetadataRecords, send: SendPart) -> None:
        """Send the parts of the log in order. With `follow` it ends only by cancellation, an error or its deadline."""
        self._node.guard.admit_query(context)
        _check(request)
        cache = self._node.cache
        if cache.controller is not None:
            await self._read_own(cache.controller, request, send)
            return
        may_read_cache = request.allow_stale and cache.stale_ms() is not None
        timeout_ms = int(STALE_AFTER_S * 1000) if may_read_cache else self._node.limits.admin_timeout_ms
        try:
            stream = await self._node.forwarder.open_stream(context, STREAM, request, timeout_ms=timeout_ms)
        except CallTimeoutError:
            if not may_read_cache:
                raise
            await self._read_cache(send)
        else:
            await _relay(stream, send)

    async def _read_own(self, controller: ControllerNode, request: MetadataRecords, send: SendPart) -> None:
        stale_ms = self._node.cache.stale_ms()
        if stale_ms is not None:
            await send(Stale(stale_ms))
        await _Reader(controller, self._work, send).run(Offset(request.from_offset), follow=request.follow)

    async def _read_cache(self, send: SendPart) -> None:
        """Send this broker's copy as a snapshot."""
        cache = self._node.cache
        image, offset, epoch = cache.image, cache.metadata_offset, cache.metadata_epoch
        await send(Stale(cache.stale_ms() or 0))
        await _send_snapshot(send, offset, epoch, await self._work.run(snapshot_bytes, image, None))

    async def _serve(self, stream: Stream) -> None:
        """Answer a stream that another node relays to its client."""

        async def send(part: Part) -> None:
            await stream.send(_encode(part))

        reading: asyncio.Task[None] | None = None
        watching: asyncio.Task[None] | None = None
        try:
            _, request = self._node.forwarder.accept(STREAM, stream.peer, await stream.receive())
            _check(request)
            controller = self._node.cache.controller
            assert controller is not None, "only controllers serve it"
            loop = asyncio.get_running_loop()
            reading = loop.create_task(self._read_own(controller, request, send))
            watching = loop.create_task(_cancel_at_end(stream, reading))
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.result()
        except (StreamBrokenError, StreamClosedError):
            return
        except TidelogError as error:
            try:
                await stream.send(bytes(msgpack.packb([3, encode_error(error)])))
            except StreamBrokenError:
                return
        finally:
            if reading is not None:
                reading.cancel()
            if watching is not None:
                stream.close()  # also ends `watching`; a cancellation would break the stream


async def _cancel_at_end(stream: Stream, reading: asyncio.Task[None]) -> None:
    """Cancel a reader whose peer is gone: it may have nothing to send for a long time."""
    try:
        while True:
            await stream.receive()
    except (StreamBrokenError, StreamClosedError):
        reading.cancel()


async def _relay(stream: Stream, send: SendPart) -> None:
    """Pass on a controller's stream; raises `TransportError` if it breaks."""
    try:
        while True:
            try:
                frame = await stream.receive()
            except StreamClosedError:
                return
            except StreamBrokenError as error:
                raise TransportError(f"the controller is gone: {error}", node=stream.peer) from error
            await send(_decode(frame))
    finally:
        stream.close()


def _check(request: MetadataRecords) -> None:
    if request.from_offset < 0:
        raise InvalidRequestError(f"from_offset {request.from_offset}: offsets begin at 0")


def _encode(part: Part) -> bytes:
    match part:
        case Stale(stale_ms):
            row: list[object] = [0, stale_ms]
        case MetadataEntries(high_watermark, entries):
            rows = [[entry.offset, entry.epoch, entry.kind.value, entry.data] for entry in entries]
            row = [1, high_watermark, rows]
        case SnapshotPiece(end_offset, epoch, data, is_last):
            row = [2, end_offset, epoch, data, is_last]
    return bytes(msgpack.packb(row))


def _decode(frame: bytes) -> Part:
    """Raises the error that the frame holds, or `CorruptStateError`."""
    try:
        match msgpack.unpackb(frame):
            case [0, int(stale_ms)]:
                return Stale(stale_ms)
            case [1, int(high_watermark), [*rows]]:
                entries = [MetadataEntry(offset, epoch, EntryKind(kind), data) for offset, epoch, kind, data in rows]
                return MetadataEntries(high_watermark, tuple(entries))
            case [2, int(end_offset), int(epoch), bytes(data), bool(is_last)]:
                return SnapshotPiece(end_offset, epoch, data, is_last)
            case [3, bytes(data)]:
                failure = decode_error(data)
            case _:
                raise CorruptStateError("a frame of the metadata log cannot be decoded")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStateError(f"a frame of the metadata log cannot be decoded: {error}") from error
    raise failure


class _Reader:
    """One reader of the metadata log of this controller."""

    def __init__(self, controller: ControllerNode, work: Work, send: SendPart) -> None:
        self._controller = controller
        self._work = work
        self._send = send

    async def run(self, offset: Offset, *, follow: bool) -> None:
        driver = self._controller.driver
        end = driver.core.commit
        if offset > end:
            raise OffsetOutOfRangeError(
                f"the committed log ends at {end}", offset=offset, start=driver.core.log.start, end=end
            )
        while follow or offset < end:
            if offset < driver.core.log.start:
                offset = await self._send_snapshot()
                continue
            epoch = driver.core.log.epoch_before(offset)
            assert epoch is not None, "a committed entry at or past the start is in the log"
            tail = driver.tail(offset, epoch)
            try:
                while follow or offset < end:
                    batch = await tail.next()
                    if not isinstance(batch, TailEntries):
                        break  # a snapshot has replaced the next entries meanwhile
                    await self._send_entries(batch)
                    offset = tail.offset
            finally:
                tail.close()

    async def _send_entries(self, batch: TailEntries) -> None:
        entries = tuple(
            MetadataEntry(batch.first + number, entry.epoch, entry.kind, entry.data)
            for number, entry in enumerate(batch.entries)
        )
        await self._send(MetadataEntries(self._controller.driver.core.commit, entries))

    async def _send_snapshot(self) -> Offset:
        """Send what is applied now: newer than the snapshot on disk, and without a read."""
        machine = self._controller.machine
        offset, job = machine.offset, machine.take_snapshot()
        epoch = self._controller.driver.core.log.epoch_before(offset)
        assert epoch is not None, "an applied entry is in the log, or in its snapshot"
        assert isinstance(job, SnapshotJob), "a helper encodes the image"
        await _send_snapshot(self._send, offset, epoch, await self._work.run(job.encode, *job.values))
        return offset


async def _send_snapshot(send: SendPart, offset: int, epoch: int, data: bytes) -> None:
    for position in range(0, len(data), SNAPSHOT_PIECE_BYTES):
        piece = data[position : position + SNAPSHOT_PIECE_BYTES]
        await send(SnapshotPiece(offset, epoch, piece, position + len(piece) == len(data)))
