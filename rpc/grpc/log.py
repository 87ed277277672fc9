"""Translates the gRPC service `Log` to produce, fetch and offset services. Only brokers serve it.

Batches pass through unchanged. A fetch response is built around its data (`RawFetchResponse`), so that the data is
copied once between log and connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError, first_error
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import OffsetMismatchError, StaleFencingTokenError
from tidelog.rpc.grpc import raw_protobuf
from tidelog.rpc.grpc.errors import as_message, coded
from tidelog.rpc.grpc.methods import Receive, Send
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.services.context import RequestContext
from tidelog.services.data import DataServices
from tidelog.services.fetch import FetchItem, FetchRequest, FetchResult
from tidelog.services.fetch_stream import FetchStream
from tidelog.services.limits import RequestLimits, ResponseMemory
from tidelog.services.offsets import (
    EpochQuery,
    InitProducerId,
    OffsetQuery,
    OffsetRange,
    PartitionQuery,
    RecordDeletion,
    WatchedOffset,
)
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE, PartitionRef, topic_ref
from tidelog.services.produce import ACKS_ALL, PendingProduce, ProduceItem, ProduceRequest, ProduceResult
from tidelog.world.slicing import sliced

R = TypeVar("R")
T = TypeVar("T")


class LogHandlers:
    def __init__(self, services: DataServices, limits: RequestLimits, responses: ResponseMemory | None = None) -> None:
        """`responses` is shared with the server that sends them."""
        self._services = services
        self._limits = limits
        self._responses = responses or ResponseMemory(limits)

    # Produce.

    async def produce(self, request: pb.ProduceRequest, context: RequestContext) -> pb.ProduceResponse:
        return await (await self._start_produce(request, context)).response()

    async def _start_produce(self, request: pb.ProduceRequest, context: RequestContext) -> _Produce:
        items = await _each(
            request.partitions,
            lambda item: ProduceItem(
                _ref(item),
                item.batches,
                item.leader_epoch if item.HasField("leader_epoch") else -1,
                _condition(item) if item.HasField("expected_offset") or item.HasField("fencing_token") else None,
            ),
        )
        acks = request.acks if request.HasField("acks") else ACKS_ALL
        produce = ProduceRequest(
            items=items,
            acks=acks,
            timeout_ms=request.timeout_ms,
            transactional_id=request.transactional_id or None,
        )
        pending = await self._services.produce.start(context, produce)
        return _Produce(request, pending, context.throttle_ms)

    async def produce_stream(self, receive: Receive, context: RequestContext, send: Send) -> None:
        """Appends each request when it arrives, while earlier ones wait; responses go out in order."""
        queue: asyncio.Queue[_Produce | None] = asyncio.Queue(self._limits.produce_stream_requests_max)
        unanswered: deque[_Produce] = deque()

        async def respond() -> None:
            while (produce := await queue.get()) is not None:
                await send(await produce.response())
                unanswered.popleft()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(respond())
                while (request := await receive()) is not None:
                    started = await self._start_produce(request, context)
                    unanswered.append(started)
                    await queue.put(started)
                await queue.put(None)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            for produce in unanswered:
                produce.pending.abandon()

    # Fetch.

    async def fetch(self, request: pb.FetchRequest, context: RequestContext) -> RawFetchResponse:
        results = await self._services.fetch.fetch(context, await _fetch_request(request), self._responses)
        return await fetch_response(list(zip(request.partitions, results, strict=True)), context.throttle_ms)

    async def fetch_stream(self, request: pb.FetchRequest, context: RequestContext, send: Send) -> None:
        stream = FetchStream(self._services.fetch, context, await _fetch_request(request), self._responses)
        while (rows := await stream.next()) is not None:
            named = [(request.partitions[at], result) for at, result in rows]
            await send(await fetch_response(named, context.throttle_ms))
            del rows, named  # a stream that waits holds no data

    # Offsets.

    async def list_offsets(self, request: pb.ListOffsetsRequest, context: RequestContext) -> pb.ListOffsetsResponse:
        queries = await _each(
            request.partitions,
            lambda named: OffsetQuery(
                _ref(named), named.timestamp, named.leader_epoch if named.HasField("leader_epoch") else -1
            ),
        )
        results = await self._services.offsets.list_offsets(context, queries, isolation=request.isolation)
        response = pb.ListOffsetsResponse()
        async for named, result in _rows(request.partitions, results):
            if isinstance(result, TidelogError):
                response.partitions.add(**_name(named), offset=-1, error=as_message(result))
            else:
                offset, timestamp, leader_epoch = result.offset, result.timestamp, result.leader_epoch
                response.partitions.add(**_name(named), offset=offset, timestamp=timestamp, leader_epoch=leader_epoch)
        return response

    async def offset_for_leader_epoch(
        self, request: pb.OffsetForLeaderEpochRequest, context: RequestContext
    ) -> pb.OffsetForLeaderEpochResponse:
        queries = await _each(
            request.partitions,
            lambda named: EpochQuery(
                _ref(named), named.epoch, named.leader_epoch if named.HasField("leader_epoch") else -1
            ),
        )
        response = pb.OffsetForLeaderEpochResponse()
        results = await self._services.offsets.offset_for_leader_epoch(context, queries)
        async for named, result in _rows(request.partitions, results):
            if isinstance(result, TidelogError):
                response.partitions.add(**_name(named), epoch=-1, end_offset=-1, error=as_message(result))
            else:
                response.partitions.add(**_name(named), epoch=result.epoch, end_offset=result.end_offset)
        return response

    async def delete_records(
        self, request: pb.DeleteRecordsRequest, context: RequestContext
    ) -> pb.DeleteRecordsResponse:
        deletions = await _each(request.partitions, lambda named: RecordDeletion(_ref(named), named.before_offset))
        response = pb.DeleteRecordsResponse()
        results = await self._services.offsets.delete_records(context, deletions)
        async for named, result in _rows(request.partitions, results):
            if isinstance(result, TidelogError):
                response.partitions.add(**_name(named), start_offset=-1, error=as_message(result))
            else:
                response.partitions.add(**_name(named), start_offset=result)
        return response

    async def range_bytes(self, request: pb.RangeBytesRequest, context: RequestContext) -> pb.RangeBytesResponse:
        ranges = await _each(
            request.partitions, lambda named: OffsetRange(_ref(named), named.start_offset, named.end_offset)
        )
        response = pb.RangeBytesResponse()
        results = await self._services.offsets.range_bytes(context, ranges)
        async for named, result in _rows(request.partitions, results):
            if isinstance(result, TidelogError):
                response.partitions.add(**_name(named), error=as_message(result))
            else:
                response.partitions.add(**_name(named), bytes=result)
        return response

    async def init_producer_id(
        self, _request: pb.InitProducerIdRequest, context: RequestContext
    ) -> pb.InitProducerIdResponse:
        producer_id, epoch = await self._services.offsets.init_producer_id(context, InitProducerId())
        return pb.InitProducerIdResponse(producer_id=producer_id, producer_epoch=epoch)

    async def describe_producers(
        self, request: pb.DescribeProducersRequest, context: RequestContext
    ) -> pb.DescribeProducersResponse:
        queries = await _each(request.partitions, lambda named: PartitionQuery(_ref(named)))
        response = pb.DescribeProducersResponse()
        results = await self._services.offsets.describe_producers(context, queries)
        async for named, result in _rows(request.partitions, results):
            if isinstance(result, TidelogError):
                response.partitions.add(**_name(named), error=as_message(result))
                continue
            row = response.partitions.add(**_name(named))
            async for state in sliced(result, PARTITIONS_PER_SLICE):
                row.producers.add(
                    producer_id=state.producer_id,
                    producer_epoch=state.epoch,
                    last_sequence=state.last_sequence,
                    last_timestamp=state.last_timestamp,
                    coordinator_epoch=state.coordinator_epoch,
                    transaction_start_offset=state.transaction_start_offset,
                )
        return response

    async def watch_offsets(self, request: pb.WatchOffsetsRequest, context: RequestContext, send: Send) -> None:
        """Ends when this broker leads none of the partitions any more."""
        found, watch = await self._services.offsets.watch(context, map(_ref, request.partitions))
        with closing(watch):
            named: dict[PartitionId, Any] = {}
            failed = pb.WatchOffsetsResponse()
            async for item, partition in _rows(request.partitions, found):
                if isinstance(partition, PartitionId):
                    named[partition] = item
                else:
                    failed.partitions.add(**_name(item), error=as_message(partition), high_watermark=-1)
            if failed.partitions:
                await send(failed)
            while named:
                response = await _watched(named, await anext(watch))
                if response.partitions:
                    await send(response)


async def _each(rows: Sequence[R], convert: Callable[[R], T]) -> list[T]:
    """Converts many rows in slices, few at once."""
    if len(rows) <= PARTITIONS_PER_SLICE:
        return [convert(row) for row in rows]
    return [convert(row) async for row in sliced(rows, PARTITIONS_PER_SLICE)]


def _rows(named: Sequence[R], results: Sequence[T]) -> sliced[tuple[R, T]]:
    return sliced(zip(named, results, strict=True), PARTITIONS_PER_SLICE)


async def _watched(named: dict[PartitionId, Any], changes: Iterable[WatchedOffset]) -> pb.WatchOffsetsResponse:
    """Removes the partitions that this broker does not lead from `named`."""
    response = pb.WatchOffsetsResponse()
    async for change in sliced(changes, PARTITIONS_PER_SLICE):
        item = named.get(change.partition)
        if item is None:
            continue
        row = response.partitions.add(
            **_name(item), high_watermark=change.high_watermark, last_stable_offset=change.last_stable
        )
        if change.high_watermark < 0:
            del named[change.partition]
            message = f"{item.topic or change.partition.topic_id}-{item.partition} is not led here"
            row.error.CopyFrom(coded(ErrorCode.NOT_LEADER_OR_FOLLOWER, message))
    return response


def _ref(named: Any) -> PartitionRef:
    return topic_ref(named.topic, named.topic_id), named.partition


def _name(named: Any) -> dict[str, Any]:
    return {"topic": named.topic, "topic_id": named.topic_id, "partition": named.partition}


def _condition(item: pb.ProducePartition) -> AppendCondition:
    values = {name: getattr(item, name) for name in ("expected_offset", "fencing_token") if item.HasField(name)}
    if min(values.values()) < 0:
        raise InvalidRequestError(f"{values}: an offset is not negative; leave out what you do not expect")
    return AppendCondition(**values)


@dataclass(slots=True, eq=False)
class _Produce:
    """A request whose batches are appended."""

    request: pb.ProduceRequest
    pending: PendingProduce
    throttle_ms: int

    async def response(self) -> pb.ProduceResponse:
        response = pb.ProduceResponse(tag=self.request.tag, throttle_ms=self.throttle_ms)

        def add(row: tuple[pb.ProducePartition, ProduceResult]) -> None:
            item, result = row
            response.partitions.add(
                topic=item.topic,
                topic_id=item.topic_id,
                partition=item.partition,
                error=None if result.error is None else as_message(result.error),
                base_offset=result.base_offset,
                append_time_ms=result.append_time_ms,
                start_offset=result.start_offset,
                leader=result.leader,
                leader_epoch=result.leader_epoch,
                end_offset=result.error.end_offset if isinstance(result.error, OffsetMismatchError) else 0,
                claim=result.error.claim if isinstance(result.error, StaleFencingTokenError) else 0,
            )

        await _each(list(zip(self.request.partitions, await self.pending.finish(), strict=True)), add)
        return response


async def _fetch_request(request: pb.FetchRequest) -> FetchRequest:
    return FetchRequest(
        items=await _each(
            request.partitions,
            lambda named: FetchItem(
                _ref(named),
                named.offset,
                named.max_bytes,
                named.leader_epoch if named.HasField("leader_epoch") else -1,
                named.last_epoch if named.HasField("last_epoch") else -1,
            ),
        ),
        min_bytes=request.min_bytes,
        max_bytes=request.max_bytes,
        max_wait_ms=request.max_wait_ms,
        isolation=request.isolation,
        rack=request.rack,
    )


class RawFetchResponse:
    """A `FetchResponse` that serializes without a copy of the data into a message (`rpc.grpc.raw_protobuf`)."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[raw_protobuf.Payload]) -> None:
        self._parts = parts

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name in protobuf messages
        return b"".join(self._parts)


async def fetch_response(
    rows: Sequence[tuple[pb.FetchPartition, FetchResult]], throttle_ms: int = 0
) -> RawFetchResponse:
    parts: list[raw_protobuf.Payload] = []

    def add(row: tuple[pb.FetchPartition, FetchResult]) -> None:
        message = _row(*row)
        if throttle_ms:
            message.throttle_ms = throttle_ms
        parts.extend(raw_protobuf.row(_ROW_TAG, message.SerializeToString(), _DATA_TAG, row[1].data))

    await _each(rows, add)
    return RawFetchResponse(parts)


_ROW_TAG = raw_protobuf.tag(pb.FetchResponse.PARTITIONS_FIELD_NUMBER)
_DATA_TAG = raw_protobuf.tag(pb.FetchedPartition.DATA_FIELD_NUMBER)


def _row(named: pb.FetchPartition, result: FetchResult) -> pb.FetchedPartition:
    """The row without its data."""
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
