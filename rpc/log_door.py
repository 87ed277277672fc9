"""The service `Log`: produce, fetch, offsets. Only brokers have it.

The door finds topics by name or id in the broker's own image, and hands everything else to `PartitionService`, which
the Kafka door calls as well. Batches pass through untouched. A fetch response is joined by hand around its data, so
that the data is copied once between the log and the connection (`JoinedFetch`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tidelog.log.batch_header import HEADER, HEADER_BYTES, LENGTH_PREFIX_BYTES
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.service import FetchItem, FetchResult, PartitionService, ProduceItem, ProduceResult, Producing
from tidelog.rpc import joined
from tidelog.rpc.door import Caller, Receive, Send
from tidelog.rpc.door_topics import NamesPartition, partition_of
from tidelog.rpc.errors import as_message, coded
from tidelog.rpc.limits import DoorLimits, ResponseMemory
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import log_pb2 as pb

STREAM_WAIT_MIN_MS = 100
STREAM_WAIT_MS = 1_000
"""Of a FetchStream that does not say."""
STREAM_PAUSE_MS = 1_000
"""Between two looks of a FetchStream that finds no place to wait."""
NAMES_PER_SLICE = 500
"""Partitions of a request that are looked up in one turn of the event loop."""
_ISOLATIONS = (pb.READ_UNCOMMITTED, pb.READ_COMMITTED)

T = TypeVar("T")


class LogDoor:
    def __init__(
        self,
        service: PartitionService,
        image: Callable[[], ClusterImage],
        limits: DoorLimits,
        responses: ResponseMemory | None = None,
    ) -> None:
        """`image` gives the broker's own copy of the metadata; `responses` is shared with what carries them."""
        self._service = service
        self._image = image
        self._limits = limits
        self._responses = responses or ResponseMemory(limits)

    def _check_count(self, partitions: Sequence[object]) -> None:
        if not partitions:
            raise InvalidRequestError("no partition is named")

    def _find(self, named: NamesPartition) -> PartitionId | TidelogError:
        try:
            return partition_of(self._image(), named)
        except TidelogError as error:
            return error

    async def _find_all(self, partitions: Sequence[NamesPartition]) -> list[PartitionId | TidelogError]:
        found: list[PartitionId | TidelogError] = []
        for named in partitions:
            found.append(self._find(named))
            if len(found) % NAMES_PER_SLICE == 0:
                await asyncio.sleep(0)
        return found

    # Produce.

    async def produce(self, request: pb.ProduceRequest, _caller: Caller) -> pb.ProduceResponse:
        return await (await self._start_produce(request)).answer()

    async def _start_produce(self, request: pb.ProduceRequest) -> _Produce:
        """Checked and appended when it returns."""
        self._check_count(request.partitions)
        acks = request.acks if request.HasField("acks") else -1
        if acks not in (-1, 0, 1):
            raise InvalidRequestError(f"acks={acks}: -1 (all in-sync replicas), 0 or 1")
        found = await self._find_all(request.partitions)
        items = [
            ProduceItem(where, item.batches, item.leader_epoch if item.HasField("leader_epoch") else -1)
            for item, where in zip(request.partitions, found, strict=True)
            if isinstance(where, PartitionId)
        ]
        if len({item.partition for item in items}) != len(items):
            raise InvalidRequestError("a partition is named twice in one request; join its batches")
        timeout_ms = self._limits.produce_timeout(request.timeout_ms)
        return _Produce(request, found, await self._service.start_produce(items, acks=acks, timeout_ms=timeout_ms))

    async def produce_stream(self, receive: Receive, _caller: Caller, send: Send) -> None:
        """A request is appended as it comes, while earlier ones wait; answers go out in order."""
        under_way: asyncio.Queue[_Produce | None] = asyncio.Queue(self._limits.produce_stream_requests_max)
        unanswered: deque[_Produce] = deque()

        async def answer() -> None:
            while (first := await under_way.get()) is not None:
                await send(await first.answer())
                unanswered.popleft()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(answer())
                while (request := await receive()) is not None:
                    started = await self._start_produce(request)
                    unanswered.append(started)
                    await under_way.put(started)
                await under_way.put(None)
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            for one in unanswered:
                one.leave()

    # Fetch.

    async def fetch(self, request: pb.FetchRequest, _caller: Caller) -> JoinedFetch:
        found = await self._fetch_items(request)
        items = [item for item in found if isinstance(item, FetchItem)]
        results: Iterable[FetchResult] = ()
        if items:
            results = await self._service.fetch(
                items,
                # An answer that is known already does not wait for data of the others.
                min_bytes=max(0, request.min_bytes) if len(items) == len(found) else 0,
                max_bytes=self._limits.fetch_bytes(request.max_bytes),
                max_wait_ms=min(max(0, request.max_wait_ms), self._limits.fetch_wait_max_ms),
                isolation=request.isolation,
                rack=request.rack,
                memory=self._responses,
            )
        return _joined(request.partitions, found, results)

    async def _fetch_items(self, request: pb.FetchRequest) -> list[FetchItem | TidelogError]:
        self._check_count(request.partitions)
        _check_isolation(request.isolation)
        found: list[FetchItem | TidelogError] = []
        for named, where in zip(request.partitions, await self._find_all(request.partitions), strict=True):
            if isinstance(where, PartitionId):
                found.append(
                    FetchItem(
                        where,
                        named.offset,
                        named.max_bytes if named.max_bytes > 0 else self._limits.partition_fetch_bytes,
                        named.leader_epoch if named.HasField("leader_epoch") else -1,
                        named.last_epoch if named.HasField("last_epoch") else -1,
                    )
                )
            else:
                found.append(where)
        places = [item.partition for item in found if isinstance(item, FetchItem)]
        if len(set(places)) != len(places):
            raise InvalidRequestError("a partition is named twice in one request")
        return found

    async def fetch_stream(self, request: pb.FetchRequest, _caller: Caller, send: Send) -> None:
        found = await self._fetch_items(request)
        failed = [
            (named, FetchResult(error=item))
            for named, item in zip(request.partitions, found, strict=True)
            if isinstance(item, TidelogError)
        ]
        if failed:
            await send(JoinedFetch(failed))
        turns = deque(
            _Followed(named, item)
            for named, item in zip(request.partitions, found, strict=True)
            if isinstance(item, FetchItem)
        )
        wait_ms = max(STREAM_WAIT_MIN_MS, request.max_wait_ms or STREAM_WAIT_MS)
        wait_ms = min(wait_ms, self._limits.fetch_wait_max_ms)
        while turns:
            results = await self._next_results(request, [turn.item for turn in turns], wait_ms)
            rows = [(turn, result) for turn, result in zip(turns, results, strict=True) if turn.takes(result)]
            await send(JoinedFetch([(turn.named, result) for turn, result in rows]))
            del results, rows  # sent: what waits for the next ones holds no data
            turns = deque(turn for turn in turns if not turn.is_over)
            turns.rotate(-1)  # a busy partition does not starve the others

    async def _next_results(
        self, request: pb.FetchRequest, items: Sequence[FetchItem], wait_ms: int
    ) -> list[FetchResult]:
        """With data or news, or after `wait_ms`. When too many fetches wait the service answers at once, with nothing:
        then this one looks again from time to time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        while True:
            results = await self._service.fetch(
                items,
                min_bytes=max(1, request.min_bytes),
                max_bytes=self._limits.fetch_bytes(request.max_bytes),
                max_wait_ms=max(0, round((deadline_s - loop.time()) * 1000)),
                isolation=request.isolation,
                rack=request.rack,
                memory=self._responses,
            )
            left_s = deadline_s - loop.time()
            if left_s <= 0.001 or any(result.data or result.is_news for result in results):
                return results
            await asyncio.sleep(min(left_s, STREAM_PAUSE_MS / 1000))

    # Offsets.

    async def _each(
        self, partitions: Sequence[Any], row: Callable[[Any], T], work: Callable[[Any, PartitionId, T], Awaitable[None]]
    ) -> list[T]:
        """One row for each partition, filled by `work` or with its error."""
        self._check_count(partitions)

        async def one(named: Any) -> T:
            made: Any = row(named)
            try:
                await work(named, partition_of(self._image(), named), made)
            except TidelogError as error:
                made.error.CopyFrom(as_message(error))
            filled: T = made
            return filled

        return list(await asyncio.gather(*map(one, partitions)))

    async def list_offsets(self, request: pb.ListOffsetsRequest, _caller: Caller) -> pb.ListOffsetsResponse:
        _check_isolation(request.isolation)

        async def work(named: pb.ListOffsetsPartition, where: PartitionId, row: pb.ListedOffset) -> None:
            epoch = named.leader_epoch if named.HasField("leader_epoch") else -1
            isolation = request.isolation
            found = await self._service.list_offsets(where, named.timestamp, leader_epoch=epoch, isolation=isolation)
            row.offset, row.timestamp, row.leader_epoch = found

        rows = await self._each(request.partitions, lambda named: _row(pb.ListedOffset, named, offset=-1), work)
        return pb.ListOffsetsResponse(partitions=rows)

    async def offset_for_leader_epoch(
        self, request: pb.OffsetForLeaderEpochRequest, _caller: Caller
    ) -> pb.OffsetForLeaderEpochResponse:
        async def work(named: pb.EpochPartition, where: PartitionId, row: pb.EpochEndOffset) -> None:
            epoch = named.leader_epoch if named.HasField("leader_epoch") else -1
            row.epoch, row.end_offset = self._service.offset_for_leader_epoch(where, named.epoch, leader_epoch=epoch)

        rows = await self._each(
            request.partitions, lambda named: _row(pb.EpochEndOffset, named, epoch=-1, end_offset=-1), work
        )
        return pb.OffsetForLeaderEpochResponse(partitions=rows)

    async def delete_records(self, request: pb.DeleteRecordsRequest, _caller: Caller) -> pb.DeleteRecordsResponse:
        async def work(named: pb.DeleteRecordsPartition, where: PartitionId, row: pb.DeletedRecords) -> None:
            row.start_offset = await self._service.delete_records(where, named.before_offset)

        rows = await self._each(request.partitions, lambda named: _row(pb.DeletedRecords, named, start_offset=-1), work)
        return pb.DeleteRecordsResponse(partitions=rows)

    async def range_bytes(self, request: pb.RangeBytesRequest, _caller: Caller) -> pb.RangeBytesResponse:
        async def work(named: pb.OffsetRange, where: PartitionId, row: pb.RangeSize) -> None:
            if not 0 <= named.start_offset <= named.end_offset:
                raise InvalidRequestError(f"offsets {named.start_offset} to {named.end_offset} are no range")
            row.bytes = await self._service.range_bytes(where, Offset(named.start_offset), Offset(named.end_offset))

        rows = await self._each(request.partitions, lambda named: _row(pb.RangeSize, named), work)
        return pb.RangeBytesResponse(partitions=rows)

    async def init_producer_id(self, _request: pb.InitProducerIdRequest, _caller: Caller) -> pb.InitProducerIdResponse:
        producer_id, epoch = await self._service.init_producer_id()
        return pb.InitProducerIdResponse(producer_id=producer_id, producer_epoch=epoch)

    async def watch_offsets(self, request: pb.WatchOffsetsRequest, _caller: Caller, send: Send) -> None:
        self._check_count(request.partitions)
        named = {}
        first = pb.WatchOffsetsResponse()
        for item in request.partitions:
            where = self._find(item)
            if isinstance(where, PartitionId):
                named[where] = item
            else:
                first.partitions.append(_row(pb.WatchedOffset, item, error=as_message(where), high_watermark=-1))
        if first.partitions:
            await send(first)
        if not named:
            return
        with closing(self._service.watch(list(named))) as changes:
            async for rows in changes:
                response = pb.WatchOffsetsResponse()
                for where, high_watermark, last_stable in rows:
                    if where not in named:
                        continue
                    marks = {"high_watermark": high_watermark, "last_stable_offset": last_stable}
                    row = _row(pb.WatchedOffset, named[where], **marks)
                    if high_watermark < 0:
                        row.error.CopyFrom(_not_here(where, named.pop(where)))
                    response.partitions.append(row)
                await send(response)
                if not named:
                    return


def _check_isolation(isolation: int) -> None:
    if isolation not in _ISOLATIONS:
        raise InvalidRequestError(f"isolation {isolation}: 0 or 1")


def _first(error: BaseException) -> BaseException:
    """The error that came first in a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _row(made: Callable[..., T], named: Any, **more: Any) -> T:
    return made(topic=named.topic, topic_id=named.topic_id, partition=named.partition, **more)


def _not_here(where: PartitionId, named: NamesPartition) -> common.Error:
    message = f"{named.topic or where.topic_id}-{named.partition} is not led here"
    return coded(ErrorCode.NOT_LEADER_OR_FOLLOWER, message)


@dataclass(slots=True, eq=False)
class _Produce:
    """A request that is appended, and will be answered or left."""

    request: pb.ProduceRequest
    found: Sequence[PartitionId | TidelogError]
    producing: Producing

    async def answer(self) -> pb.ProduceResponse:
        results = iter(await self.producing.finish())
        response = pb.ProduceResponse(tag=self.request.tag)
        for item, where in zip(self.request.partitions, self.found, strict=True):
            done = next(results) if isinstance(where, PartitionId) else ProduceResult(error=where)
            response.partitions.add(
                topic=item.topic,
                topic_id=item.topic_id,
                partition=item.partition,
                error=None if done.error is None else as_message(done.error),
                base_offset=done.base_offset,
                append_time_ms=done.append_time_ms,
                start_offset=done.start_offset,
                leader=done.leader,
                leader_epoch=done.leader_epoch,
            )
        return response

    def leave(self) -> None:
        self.producing.leave()


# Fetch responses.


@dataclass(slots=True)
class _Followed:
    """One partition of a FetchStream: where it goes on."""

    named: pb.FetchPartition
    item: FetchItem
    is_over: bool = False
    told: tuple[int, int] = (-1, -1)

    def takes(self, result: FetchResult) -> bool:
        """Whether there is anything to tell; the next fetch goes on behind what is told."""
        if result.error is not None or result.diverging is not None or result.preferred_replica >= 0:
            self.is_over = True
            return True
        marks = (result.high_watermark, result.last_stable)
        has_news, self.told = bool(result.data) or marks != self.told, marks
        if result.data:
            end, epoch = end_of(result.data)
            self.item = replace(self.item, offset=end, last_epoch=epoch)
        return has_news


def end_of(data: bytes | memoryview) -> tuple[int, int]:
    """The offset behind the last batch, and that batch's leader epoch. The batches are whole."""
    position = last = 0
    while position + HEADER_BYTES <= len(data):
        last = position
        position += LENGTH_PREFIX_BYTES + int.from_bytes(data[position + 8 : position + 12], "big")
    assert position == len(data), "whole batches"
    base_offset, _length, epoch, _magic, _crc, _attributes, last_delta, *_rest = HEADER.unpack_from(data, last)
    return base_offset + last_delta + 1, epoch


def _joined(
    named: Sequence[pb.FetchPartition], found: Sequence[FetchItem | TidelogError], results: Iterable[FetchResult]
) -> JoinedFetch:
    done = iter(results)
    rows = [next(done) if isinstance(item, FetchItem) else FetchResult(error=item) for item in found]
    return JoinedFetch(list(zip(named, rows, strict=True)))


class JoinedFetch:
    """A `FetchResponse` whose bytes are made without a copy of the data into a message (`rpc.joined`)."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Sequence[tuple[pb.FetchPartition, FetchResult]]) -> None:
        self._rows = rows

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages have it
        parts: list[joined.Payload] = []
        for named, result in self._rows:
            parts += joined.row(_ROW_TAG, _fetched(named, result).SerializeToString(), _DATA_TAG, result.data)
        return b"".join(parts)


_ROW_TAG = joined.tag(pb.FetchResponse.PARTITIONS_FIELD_NUMBER)
_DATA_TAG = joined.tag(pb.FetchedPartition.DATA_FIELD_NUMBER)


def _fetched(named: pb.FetchPartition, result: FetchResult) -> pb.FetchedPartition:
    row = pb.FetchedPartition(
        topic=named.topic,
        topic_id=named.topic_id,
        partition=named.partition,
        error=None if result.error is None else as_message(result.error),
        high_watermark=result.high_watermark,
        last_stable_offset=result.last_stable,
        start_offset=result.start_offset,
        leader=result.leader,
        leader_epoch=result.leader_epoch,
        preferred_replica=result.preferred_replica,
    )
    if result.diverging is not None:
        row.diverging.epoch, row.diverging.end_offset = result.diverging
    for producer_id, first_offset in result.aborted:
        row.aborted.add(producer_id=producer_id, first_offset=first_offset)
    return row
