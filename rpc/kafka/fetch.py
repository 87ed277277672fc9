"""Fetch: whole stored batches. Fetch sessions (`fetch_sessions`) say which partitions to read and which rows to send.

A session continues in the order of requests, so a request begins in its turn; it is answered later, since it may wait
for records. The data is neither decoded nor copied and counts in the memory of its connection.

A partition's error becomes a code that all clients handle in a Fetch response. Kafka's own consumer stops at any other,
so other errors are UNKNOWN_SERVER_ERROR, which it retries.

Every request is a consumer's, whatever replica id it carries: brokers replicate on the internal listener, so nobody
reads past the high watermark here and no fetch counts for the in-sync replicas. Some clients leave the replica id at 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, code_of
from tidelog.rpc.kafka.fetch_sessions import (
    FetchSessionError,
    Key,
    PartitionChange,
    SessionFetch,
    SessionPartition,
    Topic,
)
from tidelog.rpc.kafka.leader_hints import LeaderHints, is_moved
from tidelog.rpc.kafka.messages import FETCH
from tidelog.rpc.kafka.messages.data import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchEpochEndOffset,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from tidelog.rpc.kafka.services import ConnectionMemory, Context, DeferredResponse
from tidelog.services import fetch as service
from tidelog.services.fetch import READ_UNCOMMITTED, FetchItem, FetchResult, check_isolation
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE
from tidelog.world.slicing import sliced

_STORAGE_ERROR_SINCE = 6
_SESSIONS_SINCE = 7
_IDS_SINCE = 13
_HANDLED_CODES = frozenset(
    {
        ErrorCode.OFFSET_OUT_OF_RANGE,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.STORAGE_ERROR,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    }
)
_REPLACED_CODES = {
    # A partition without a leader is not led here; a client that cannot read now looks for the leader again.
    ErrorCode.LEADER_NOT_AVAILABLE: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: ErrorCode.REPLICA_NOT_AVAILABLE,
}


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


async def _pause_after(count: int) -> None:
    """Other tasks run between two steps over many partitions."""
    if count > PARTITIONS_PER_SLICE:
        await asyncio.sleep(0)


class _ResponseData:
    """Counts the data of a response from the read until the connection counts it, without a gap."""

    __slots__ = ("_memory", "_size")

    def __init__(self, memory: ConnectionMemory) -> None:
        self._memory = memory
        self._size = 0

    def count(self, size: int) -> None:
        self._memory.give_back(-size)
        self._size += size

    def release(self) -> None:
        self._memory.give_back(self._size)
        self._size = 0


async def handle(request: FetchRequest, context: Context) -> DeferredResponse | FetchResponse:
    try:
        fetch = await _begin(request, context)
    except FetchSessionError as error:
        return FetchResponse(error_code=code_of(error))
    except TidelogError as error:
        return _rejected(request, context, error)
    data = _ResponseData(context.memory)
    return DeferredResponse(lambda: _respond(request, context, fetch, data), data.release)


async def _begin(request: FetchRequest, context: Context) -> SessionFetch:
    check_isolation(request.isolation_level)  # before the session continues
    has_ids = context.version >= _IDS_SINCE
    named = (
        SessionPartition(
            topic.topic_id if has_ids else topic.topic,
            partition.partition,
            partition.fetch_offset,
            partition.partition_max_bytes,
            partition.current_leader_epoch,
            partition.last_fetched_epoch,
        )
        for topic in request.topics
        for partition in topic.partitions
    )
    partitions = [partition async for partition in sliced(named, PARTITIONS_PER_SLICE)]
    await _pause_after(len(partitions))
    forgotten: list[Key] = [
        (topic.topic_id if has_ids else topic.topic, partition)
        for topic in request.forgotten_topics_data
        for partition in topic.partitions
    ]
    return context.connection.fetch_sessions.begin(
        request.session_id, request.session_epoch, partitions, forgotten, has_ids=has_ids, now_ms=_now_ms()
    )


def _rejected(request: FetchRequest, context: Context, error: TidelogError) -> FetchResponse:
    """Rejects the whole request; before version 7 each partition has the error."""
    response = FetchResponse(error_code=code_of(error))
    if context.version < _SESSIONS_SINCE:
        for topic in request.topics:
            rows = [_row(named.partition, FetchResult(error), context.version) for named in topic.partitions]
            response.responses.append(FetchableTopicResponse(topic=topic.topic, partitions=rows))
    return response


async def _respond(request: FetchRequest, context: Context, fetch: SessionFetch, data: _ResponseData) -> FetchResponse:
    items = [
        FetchItem(
            (named.topic, named.partition), named.offset, max(1, named.bytes_max), named.leader_epoch, named.last_epoch
        )
        for named in fetch.partitions
    ]
    await _pause_after(len(items))
    results: list[FetchResult] = []
    if items:
        fetch_request = service.FetchRequest(
            items=items,
            min_bytes=request.min_bytes,
            max_bytes=max(1, request.max_bytes),
            max_wait_ms=request.max_wait_ms,
            isolation=request.isolation_level,
            rack=_rack(request.rack_id, context),
        )
        results = await context.services.data.fetch.fetch(context.request, fetch_request, context.memory)
    data.count(sum(len(result.data) for result in results))
    await _pause_after(len(results))
    return await _session_response(request, context, fetch, results)


def _rack(rack: str, context: Context) -> str:
    """Returns no rack if a broker there lacks this listener: the client could not reach it and would come back."""
    if not rack:
        return ""
    near = (broker for broker in context.services.image.brokers.values() if broker.rack == rack and not broker.fenced)
    can_be_reached = all(any(name == context.listener for name, *_ in broker.endpoints) for broker in near)
    return rack if can_be_reached else ""


async def _session_response(
    request: FetchRequest, context: Context, fetch: SessionFetch, results: Sequence[FetchResult]
) -> FetchResponse:
    """Has the rows that the session sends."""
    changes = [_change(result) for result in results]
    await _pause_after(len(results))
    try:
        session_id, sends = context.connection.fetch_sessions.end(fetch, changes, now_ms=_now_ms())
    except FetchSessionError as error:
        return FetchResponse(error_code=code_of(error))
    response = FetchResponse(session_id=session_id)
    topics: dict[Topic, FetchableTopicResponse] = {}
    leaders = LeaderHints(context.services.image, context.listener)
    rows = zip(fetch.partitions, results, sends, strict=True)
    async for named, result, is_sent in sliced(rows, PARTITIONS_PER_SLICE):
        if not is_sent:
            continue
        row = _row(named.partition, result, context.version)
        if request.isolation_level == READ_UNCOMMITTED:
            row.aborted_transactions = None
        if is_moved(result.error):
            row.current_leader = leaders.add(result.leader, result.leader_epoch)
        topic = topics.get(named.topic)
        if topic is None:
            topic = topics[named.topic] = _topic(named.topic)
            response.responses.append(topic)
        topic.partitions.append(row)
    response.node_endpoints = leaders.endpoints()
    return response


def _topic(topic: Topic) -> FetchableTopicResponse:
    if isinstance(topic, bytes):
        return FetchableTopicResponse(topic_id=topic)
    return FetchableTopicResponse(topic=topic)


def _change(result: FetchResult) -> PartitionChange:
    return PartitionChange(
        (result.high_watermark, result.last_stable, result.start_offset),
        bool(result.data),
        result.error is not None,
        result.ends_wait,
    )


def _row(partition: int, result: FetchResult, version: int) -> PartitionData:
    row = PartitionData(
        partition_index=partition,
        high_watermark=result.high_watermark,
        last_stable_offset=result.last_stable,
        log_start_offset=result.start_offset,
        preferred_read_replica=result.preferred_replica,
        records=result.data,
    )
    if result.error is not None:
        row.error_code = _code_of_failure(result.error, version)
    if result.diverging is not None:
        row.diverging_epoch = FetchEpochEndOffset(epoch=result.diverging[0], end_offset=result.diverging[1])
    if result.aborted:
        row.aborted_transactions = [
            AbortedTransaction(producer_id=producer_id, first_offset=first) for producer_id, first in result.aborted
        ]
    return row


def _code_of_failure(error: TidelogError, version: int) -> int:
    error_code = _REPLACED_CODES.get(error.code, error.code)
    if error_code is ErrorCode.STORAGE_ERROR and version < _STORAGE_ERROR_SINCE:
        error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
    elif error_code is ErrorCode.UNKNOWN_TOPIC_ID and version < _IDS_SINCE:
        error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return code(error_code if error_code in _HANDLED_CODES else ErrorCode.UNKNOWN_SERVER_ERROR)


HANDLERS: dict[int, Entry] = {FETCH.key: Entry(handle, on_stop=ErrorCode.NOT_LEADER_OR_FOLLOWER, is_single=True)}
