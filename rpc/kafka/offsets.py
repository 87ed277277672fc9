"""Offsets and producers: ListOffsets, OffsetForLeaderEpoch, DeleteRecords, DescribeProducers.

Each partition has its row, with its error if it failed. A request is a consumer's, whatever replica id it carries: the
latest offset is the high watermark, never the log end.

ListOffsets knows these timestamps, each from a version on: the latest offset (-1), the earliest (-2), the record with
the largest timestamp (-3, version 7), the earliest local (-4, version 8), the latest tiered (-5, version 9) and the
earliest that waits for its upload (-6, version 11).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tidelog.model.errors import (
    ErrorCode,
    OffsetNotAvailableError,
    TidelogError,
    UnknownTopicIdError,
    UnsupportedVersionError,
)
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, code_of, message_of
from tidelog.rpc.kafka.messages import data as messages
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.services import offsets as service
from tidelog.services.offsets import (
    EARLIEST,
    EARLIEST_LOCAL,
    EARLIEST_PENDING_UPLOAD,
    LATEST,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    EpochQuery,
    OffsetQuery,
    PartitionQuery,
    RecordDeletion,
)
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE
from tidelog.world.slicing import sliced

_TIMESTAMP_SINCE = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
"""Version from which on a timestamp has its meaning. The service rejects unknown ones with the same code."""
_OFFSET_NOT_AVAILABLE_SINCE = 5

Query = TypeVar("Query")
Result = TypeVar("Result")


async def _results(
    call: Callable[[Sequence[Query]], Awaitable[list[Result | TidelogError]]], queries: Sequence[Query]
) -> list[Result | TidelogError]:
    """Results of the service. The protocol has no error of the whole request: each partition has it."""
    if not queries:
        return []
    try:
        return await call(queries)
    except TidelogError as error:
        return [error] * len(queries)


def _code_by_name(error: TidelogError) -> int:
    """A client that names topics sees UNKNOWN_TOPIC_OR_PARTITION for a topic that was just deleted."""
    return code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) if isinstance(error, UnknownTopicIdError) else code_of(error)


async def list_offsets(request: messages.ListOffsetsRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _list_offsets(request, context))


async def _list_offsets(request: messages.ListOffsetsRequest, context: Context) -> messages.ListOffsetsResponse:
    response = messages.ListOffsetsResponse()
    rows: list[messages.ListOffsetsPartitionResponse] = []
    queries: list[OffsetQuery] = []
    for topic in request.topics:
        topic_row = messages.ListOffsetsTopicResponse(name=topic.name)
        response.topics.append(topic_row)
        async for partition in sliced(topic.partitions, PARTITIONS_PER_SLICE):
            row = messages.ListOffsetsPartitionResponse(partition_index=partition.partition_index)
            topic_row.partitions.append(row)
            timestamp = partition.timestamp
            if context.version < _TIMESTAMP_SINCE.get(timestamp, 0):
                row.error_code = code(UnsupportedVersionError.code)
                continue
            rows.append(row)
            name = (topic.name, partition.partition_index)
            queries.append(OffsetQuery(name, timestamp, partition.current_leader_epoch))
    offsets, isolation = context.services.data.offsets, request.isolation_level
    results = await _results(lambda asked: offsets.list_offsets(context.request, asked, isolation=isolation), queries)
    async for row, result in sliced(zip(rows, results, strict=True), PARTITIONS_PER_SLICE):
        if not isinstance(result, TidelogError):
            row.offset, row.timestamp, row.leader_epoch = result.offset, result.timestamp, result.leader_epoch
        elif isinstance(result, OffsetNotAvailableError) and context.version < _OFFSET_NOT_AVAILABLE_SINCE:
            row.error_code = code(ErrorCode.LEADER_NOT_AVAILABLE)
        else:
            row.error_code = _code_by_name(result)
    return response


async def offset_for_leader_epoch(
    request: messages.OffsetForLeaderEpochRequest, context: Context
) -> messages.OffsetForLeaderEpochResponse:
    response = messages.OffsetForLeaderEpochResponse()
    queries: list[EpochQuery] = []
    for topic in request.topics:
        topic_row = messages.OffsetForLeaderTopicResult(topic=topic.topic)
        response.topics.append(topic_row)
        async for partition in sliced(topic.partitions, PARTITIONS_PER_SLICE):
            topic_row.partitions.append(messages.EpochEndOffset(partition=partition.partition))
            name = (topic.topic, partition.partition)
            queries.append(EpochQuery(name, partition.leader_epoch, partition.current_leader_epoch))
    offsets = context.services.data.offsets
    results = await _results(lambda asked: offsets.offset_for_leader_epoch(context.request, asked), queries)
    rows = (row for topic in response.topics for row in topic.partitions)
    async for row, result in sliced(zip(rows, results, strict=True), PARTITIONS_PER_SLICE):
        if isinstance(result, TidelogError):
            row.error_code = _code_by_name(result)
        else:
            row.leader_epoch, row.end_offset = result.epoch, result.end_offset
    return response


async def delete_records(request: messages.DeleteRecordsRequest, context: Context) -> messages.DeleteRecordsResponse:
    response = messages.DeleteRecordsResponse()
    deletions: list[RecordDeletion] = []
    for topic in request.topics:
        partitions = [
            messages.DeleteRecordsPartitionResult(partition_index=partition.partition_index, low_watermark=-1)
            for partition in topic.partitions
        ]
        response.topics.append(messages.DeleteRecordsTopicResult(name=topic.name, partitions=partitions))
        deletions += [
            RecordDeletion((topic.name, partition.partition_index), partition.offset) for partition in topic.partitions
        ]
    offsets = context.services.data.offsets
    results = await _results(lambda asked: offsets.delete_records(context.request, asked), deletions)
    rows = (row for topic in response.topics for row in topic.partitions)
    async for row, result in sliced(zip(rows, results, strict=True), PARTITIONS_PER_SLICE):
        if isinstance(result, TidelogError):
            row.error_code = _code_by_name(result)
        else:
            row.low_watermark = result
    return response


async def describe_producers(
    request: messages.DescribeProducersRequest, context: Context
) -> messages.DescribeProducersResponse:
    response = messages.DescribeProducersResponse()
    queries: list[PartitionQuery] = []
    for topic in request.topics:
        partitions = [
            messages.DescribeProducersPartitionResponse(partition_index=number) for number in topic.partition_indexes
        ]
        response.topics.append(messages.DescribeProducersTopicResponse(name=topic.name, partitions=partitions))
        queries += [PartitionQuery((topic.name, number)) for number in topic.partition_indexes]
    offsets = context.services.data.offsets
    results = await _results(lambda asked: offsets.describe_producers(context.request, asked), queries)
    rows = (row for topic in response.topics for row in topic.partitions)
    async for row, result in sliced(zip(rows, results, strict=True), PARTITIONS_PER_SLICE):
        if isinstance(result, TidelogError):
            row.error_code, row.error_message = _code_by_name(result), message_of(result)
        else:
            row.active_producers = list(map(_producer, result))
    return response


def _producer(state: service.ProducerState) -> messages.ProducerState:
    return messages.ProducerState(
        producer_id=state.producer_id,
        producer_epoch=state.epoch,
        last_sequence=state.last_sequence,
        last_timestamp=state.last_timestamp,
        coordinator_epoch=state.coordinator_epoch,
        current_txn_start_offset=state.transaction_start_offset,
    )


HANDLERS: dict[int, Entry] = {
    apis.LIST_OFFSETS.key: Entry(list_offsets),
    apis.OFFSET_FOR_LEADER_EPOCH.key: Entry(offset_for_leader_epoch),
    apis.DELETE_RECORDS.key: Entry(delete_records),
    apis.DESCRIBE_PRODUCERS.key: Entry(describe_producers),
}
