"""Offsets and producers: ListOffsets, OffsetForLeaderEpoch, DeleteRecords, DescribeProducers, InitProducerId.

Each partition has its row, with its error if it failed; a partition that is named twice is refused each time. A request
is a consumer's, whatever replica id it carries: the latest offset is the high watermark, never the log's end.

ListOffsets knows these timestamps, from a version on: the latest offset (-1), the earliest (-2), the record with the
largest timestamp (-3, version 7), the earliest on this broker's disks (-4, version 8: all there is), the latest that
was tiered (-5, version 9) and the earliest that waits to be (-6, version 11): nothing is tiered here, so both are -1.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from tidelog.log.producer_snapshot import ProducerRow
from tidelog.model.errors import (
    ErrorCode,
    InvalidRequestError,
    OffsetNotAvailableError,
    RequestTimedOutError,
    TidelogError,
    UnknownTopicIdError,
    UnsupportedVersionError,
)
from tidelog.model.ids import PartitionId
from tidelog.replication.fetching import READ_COMMITTED, READ_UNCOMMITTED
from tidelog.rpc.kafka import messages
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, code_of, message_of
from tidelog.rpc.kafka.finding import NAMES_PER_SLICE, find, rest
from tidelog.rpc.kafka.messages.data import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
    DescribeProducersPartitionResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeProducersTopicResponse,
    EpochEndOffset,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
    ProducerState,
)
from tidelog.rpc.kafka.services import Context, Later

AT_ONCE = 16
"""Partitions of a request that are worked on at the same time, where that means to wait."""
PRODUCERS_MAX = 100_000
"""In one answer of DescribeProducers."""
LATEST_TIERED, EARLIEST_PENDING_UPLOAD = -5, -6
_SINCE = {-1: 1, -2: 1, -3: 7, -4: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}
"""Timestamps that stand for something else, and the version from which on they do."""
_OFFSET_NOT_AVAILABLE_SINCE = 5

T = TypeVar("T")
Fill = Callable[[Any, PartitionId, T], Awaitable[None]]
"""(what is asked, where, the row to fill)."""


async def _each(
    context: Context,
    topics: Iterable[tuple[str, Sequence[tuple[int, Any, T]]]],
    fill: Fill[T],
    fail: Callable[[T, TidelogError], None],
) -> None:
    """Fill the row of each partition (number, what is asked, row) of each topic, or fail it."""
    named = [(topic, *one) for topic, partitions in topics for one in partitions]
    await rest(len(named))
    times = Counter((topic, number) for topic, number, _, _ in named)
    await rest(len(named))
    waiting = iter(named)

    async def work() -> None:
        for done, (topic, number, asked, row) in enumerate(waiting, start=1):
            try:
                if times[topic, number] > 1:
                    raise InvalidRequestError("the partition is named twice in one request")
                where = find(context.services.image, topic, number)
                if not isinstance(where, PartitionId):
                    raise where
                await fill(asked, where, row)
            except TidelogError as error:
                fail(row, error)
            if done % (NAMES_PER_SLICE // AT_ONCE) == 0:
                await asyncio.sleep(0)

    if len(named) == 1:
        await work()
        return
    async with asyncio.TaskGroup() as group:
        for _ in range(min(AT_ONCE, len(named))):
            group.create_task(work())


def _named_code(error: TidelogError) -> int:
    """To who asks by name: a topic that has just gone is one that is not there."""
    return code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) if isinstance(error, UnknownTopicIdError) else code_of(error)


# ListOffsets.


async def list_offsets(request: ListOffsetsRequest, context: Context) -> Later:
    return Later(lambda: _list_offsets(request, context))


async def _list_offsets(request: ListOffsetsRequest, context: Context) -> ListOffsetsResponse:
    response = ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    ListOffsetsPartitionResponse(partition_index=one.partition_index) for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )

    await rest(sum(len(topic.partitions) for topic in request.topics))

    async def fill(asked: ListOffsetsPartition, where: PartitionId, row: ListOffsetsPartitionResponse) -> None:
        row.offset, row.timestamp, row.leader_epoch = await _offset_of(request, asked, where, context)

    def fail(row: ListOffsetsPartitionResponse, error: TidelogError) -> None:
        row.error_code = _named_code(error)
        if isinstance(error, OffsetNotAvailableError) and context.version < _OFFSET_NOT_AVAILABLE_SINCE:
            row.error_code = code(ErrorCode.LEADER_NOT_AVAILABLE)

    rows = [
        (
            made.name,
            [(one.partition_index, one, row) for one, row in zip(topic.partitions, made.partitions, strict=True)],
        )
        for topic, made in zip(request.topics, response.topics, strict=True)
    ]
    await _refusing(context, rows, fill, fail, lambda: _check_list(request))
    return response


async def _refusing(
    context: Context,
    topics: Sequence[tuple[str, Sequence[tuple[int, Any, T]]]],
    fill: Fill[T],
    fail: Callable[[T, TidelogError], None],
    check: Callable[[], None],
) -> None:
    """As `_each`; what is wrong with the whole request is said of every partition, having no other place."""
    try:
        check()
        await rest(sum(len(partitions) for _, partitions in topics))
        await _each(context, topics, fill, fail)
    except TidelogError as error:
        for _, partitions in topics:
            for _, _, row in partitions:
                fail(row, error)


def _check_list(request: ListOffsetsRequest) -> None:
    if request.isolation_level not in (READ_UNCOMMITTED, READ_COMMITTED):
        raise InvalidRequestError(f"isolation level {request.isolation_level}: 0 or 1")


async def _offset_of(
    request: ListOffsetsRequest, asked: ListOffsetsPartition, where: PartitionId, context: Context
) -> tuple[int, int, int]:
    partitions = context.services.partitions
    if asked.timestamp < 0 and context.version < _SINCE.get(asked.timestamp, context.version + 1):
        raise UnsupportedVersionError(f"timestamp {asked.timestamp} means nothing in version {context.version}")
    if asked.timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        partitions.leading(where, asked.current_leader_epoch)
        return -1, -1, -1
    return await partitions.list_offsets(
        where, asked.timestamp, leader_epoch=asked.current_leader_epoch, isolation=request.isolation_level
    )


# OffsetForLeaderEpoch.


async def offset_for_leader_epoch(
    request: OffsetForLeaderEpochRequest, context: Context
) -> OffsetForLeaderEpochResponse:
    response = OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic=topic.topic, partitions=[EpochEndOffset(partition=one.partition) for one in topic.partitions]
            )
            for topic in request.topics
        ]
    )

    await rest(sum(len(topic.partitions) for topic in request.topics))

    async def fill(asked: OffsetForLeaderPartition, where: PartitionId, row: EpochEndOffset) -> None:
        row.leader_epoch, row.end_offset = context.services.partitions.offset_for_leader_epoch(
            where, asked.leader_epoch, leader_epoch=asked.current_leader_epoch
        )

    def fail(row: EpochEndOffset, error: TidelogError) -> None:
        row.error_code = _named_code(error)

    rows = [
        (made.topic, [(one.partition, one, row) for one, row in zip(topic.partitions, made.partitions, strict=True)])
        for topic, made in zip(request.topics, response.topics, strict=True)
    ]
    await _refusing(context, rows, fill, fail, lambda: None)
    return response


# DeleteRecords.


async def delete_records(request: DeleteRecordsRequest, context: Context) -> DeleteRecordsResponse:
    timeout_ms = context.services.limits.admin_timeout(request.timeout_ms)
    deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
    response = DeleteRecordsResponse(
        topics=[
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[
                    DeleteRecordsPartitionResult(partition_index=one.partition_index, low_watermark=-1)
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )

    async def fill(asked: DeleteRecordsPartition, where: PartitionId, row: DeleteRecordsPartitionResult) -> None:
        try:
            async with asyncio.timeout_at(deadline_s):
                row.low_watermark = await context.services.partitions.delete_records(where, asked.offset)
        except TimeoutError:
            raise RequestTimedOutError(f"not done in {timeout_ms} ms; it may be yet") from None

    def fail(row: DeleteRecordsPartitionResult, error: TidelogError) -> None:
        row.error_code = _named_code(error)

    rows = [
        (
            made.name,
            [(one.partition_index, one, row) for one, row in zip(topic.partitions, made.partitions, strict=True)],
        )
        for topic, made in zip(request.topics, response.topics, strict=True)
    ]
    await _refusing(context, rows, fill, fail, lambda: None)
    return response


# Producers.


async def describe_producers(request: DescribeProducersRequest, context: Context) -> DescribeProducersResponse:
    response = DescribeProducersResponse(
        topics=[
            DescribeProducersTopicResponse(
                name=topic.name,
                partitions=[
                    DescribeProducersPartitionResponse(partition_index=number) for number in topic.partition_indexes
                ],
            )
            for topic in request.topics
        ]
    )
    told = 0

    async def fill(_: None, where: PartitionId, row: DescribeProducersPartitionResponse) -> None:
        nonlocal told
        found = await context.services.partitions.producers(where)
        if told + len(found) > PRODUCERS_MAX:
            raise InvalidRequestError(f"more than {PRODUCERS_MAX} producers in one answer; ask for fewer partitions")
        told += len(found)
        row.active_producers = [_producer(one) for one in found]

    def fail(row: DescribeProducersPartitionResponse, error: TidelogError) -> None:
        row.error_code, row.error_message = _named_code(error), message_of(error)

    rows = [(made.name, [(row.partition_index, None, row) for row in made.partitions]) for made in response.topics]
    await _refusing(context, rows, fill, fail, lambda: None)
    return response


def _producer(row: ProducerRow) -> ProducerState:
    """-1 for what is not known: a producer that has only ended transactions here has no sequence."""
    return ProducerState(
        producer_id=row.producer_id,
        producer_epoch=row.epoch,
        last_sequence=row.last_sequence,
        last_timestamp=row.batches[-1][3] if row.batches else -1,
        coordinator_epoch=row.coordinator_epoch,
        current_txn_start_offset=-1 if row.open_offset is None else row.open_offset,
    )


async def init_producer_id(request: InitProducerIdRequest, context: Context) -> Later | InitProducerIdResponse:
    if request.transactional_id:
        # Fatal to every client: one that tries again would do so for ever.
        return InitProducerIdResponse(error_code=code(ErrorCode.UNSUPPORTED_VERSION), producer_epoch=-1)
    if request.transactional_id is not None or (request.producer_id < 0) != (request.producer_epoch < 0):
        return InitProducerIdResponse(error_code=code(ErrorCode.INVALID_REQUEST), producer_epoch=-1)
    return Later(lambda: _new_producer(context))


async def _new_producer(context: Context) -> InitProducerIdResponse:
    """An id that nobody else has, also for who had one: without transactions nothing hangs on the old one."""
    try:
        async with asyncio.timeout(context.services.limits.admin_timeout_ms / 1000):
            producer_id, epoch = await context.services.partitions.init_producer_id()
    except TimeoutError:
        refusal = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    except TidelogError as error:
        # The code that clients try again at; they know no controllers.
        refusal = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if error.retriable else error.code
    else:
        return InitProducerIdResponse(producer_id=producer_id, producer_epoch=epoch)
    return InitProducerIdResponse(error_code=code(refusal), producer_epoch=-1)


HANDLERS: dict[int, Entry] = {
    messages.LIST_OFFSETS.key: Entry(list_offsets),
    messages.OFFSET_FOR_LEADER_EPOCH.key: Entry(offset_for_leader_epoch),
    messages.DELETE_RECORDS.key: Entry(delete_records),
    messages.DESCRIBE_PRODUCERS.key: Entry(describe_producers),
    messages.INIT_PRODUCER_ID.key: Entry(init_producer_id),
}
