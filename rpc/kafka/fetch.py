"""Fetch: whole stored batches, as they lie in the log; sessions (`fetch_sessions`) say what is asked and what is told.

A request is read in its turn, so that sessions go on in the order of requests, and answered later: it may wait for
records. Its data is neither decoded nor copied; while it is read it counts in the memory of its connection.

What clients are told of a partition's failure are codes that all of them know beside fetched data. Kafka's own consumer
stops at any other, so what has no such code is UNKNOWN_SERVER_ERROR, which it tries again.

Every request is a consumer's, whatever replica id it carries: brokers follow each other on the internal listener, so
nobody reads past the high watermark here and no fetch counts for the in-sync replicas. Some clients leave the replica
id at 0. A client without a place among those that wait is answered at once with what there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.replication.fetching import READ_COMMITTED, READ_UNCOMMITTED
from tidelog.replication.service import FetchItem, FetchResult
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, code_of
from tidelog.rpc.kafka.fetch_sessions import FetchSessionError, Key, News, Topic, Turn, Wanted
from tidelog.rpc.kafka.finding import NAMES_PER_SLICE, Leaders, find, is_moved, rest
from tidelog.rpc.kafka.messages import FETCH
from tidelog.rpc.kafka.messages.data import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchEpochEndOffset,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from tidelog.rpc.kafka.services import AnswerMemory, Context, Later

_STORAGE_ERROR_SINCE = 6
_SESSIONS_SINCE = 7
_IDS_SINCE = 13
_KNOWN = frozenset(
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
    }
)
_SAID = {
    # A partition without a leader is not led here; who cannot read now should look for the leader again.
    ErrorCode.LEADER_NOT_AVAILABLE: ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED: ErrorCode.REPLICA_NOT_AVAILABLE,
}


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


class _Held:
    """Data of an answer: it counts from when it was read until the connection counts it, without a gap."""

    __slots__ = ("_memory", "_size")

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._size = 0

    def count(self, size: int) -> None:
        self._memory.give_back(-size)
        self._size += size

    def leave(self) -> None:
        self._memory.give_back(self._size)
        self._size = 0


async def handle(request: FetchRequest, context: Context) -> Later | FetchResponse:
    try:
        turn = await _begin(request, context)
    except FetchSessionError as error:
        return FetchResponse(error_code=code_of(error))
    except TidelogError as error:
        return _refused(request, context, error)
    held = _Held(context.memory)
    return Later(lambda: _answer(request, context, turn, held), held.leave)


async def _begin(request: FetchRequest, context: Context) -> Turn:
    version = context.version
    if request.isolation_level not in (READ_UNCOMMITTED, READ_COMMITTED):
        raise InvalidRequestError(f"isolation level {request.isolation_level}: 0 or 1")
    has_ids = version >= _IDS_SINCE
    named: list[Wanted] = []
    for topic in request.topics:
        place = topic.topic_id if has_ids else topic.topic
        for one in topic.partitions:
            named.append(
                Wanted(
                    place,
                    one.partition,
                    one.fetch_offset,
                    one.partition_max_bytes,
                    one.current_leader_epoch,
                    one.last_fetched_epoch,
                )
            )
            if len(named) % NAMES_PER_SLICE == 0:
                await asyncio.sleep(0)
    await rest(len(named))
    forgotten: list[Key] = [
        (topic.topic_id if has_ids else topic.topic, partition)
        for topic in request.forgotten_topics_data
        for partition in topic.partitions
    ]
    return context.services.fetch_sessions.begin(
        request.session_id, request.session_epoch, named, forgotten, has_ids=has_ids, now_ms=_now_ms()
    )


def _refused(request: FetchRequest, context: Context, error: TidelogError) -> FetchResponse:
    """The whole of it; before version 7 that is said of each partition."""
    response = FetchResponse(error_code=code_of(error))
    if context.version < _SESSIONS_SINCE:
        for topic in request.topics:
            rows = [_row(one.partition, FetchResult(error), context.version) for one in topic.partitions]
            response.responses.append(FetchableTopicResponse(topic=topic.topic, partitions=rows))
    return response


async def _answer(request: FetchRequest, context: Context, turn: Turn, held: _Held) -> FetchResponse:
    found = await _find(context, turn)
    items = [
        FetchItem(where, one.offset, one.bytes_max, one.leader_epoch, one.last_epoch)
        for one, where in zip(turn.wanted, found, strict=True)
        if isinstance(where, PartitionId)
    ]
    await rest(len(found))
    limits = context.services.limits
    results: list[FetchResult] = []
    if items:
        results = await context.services.partitions.fetch(
            items,
            # An answer that is known already does not wait for data of the others.
            min_bytes=max(0, request.min_bytes) if len(items) == len(found) else 0,
            max_bytes=max(1, min(request.max_bytes, limits.fetch_bytes_max)),
            max_wait_ms=min(max(0, request.max_wait_ms), limits.fetch_wait_max_ms),
            isolation=request.isolation_level,
            rack=_rack(request.rack_id, context),
            memory=context.memory,
        )
    done = iter(results)
    rows = [next(done) if isinstance(where, PartitionId) else FetchResult(where) for where in found]
    held.count(sum(len(result.data) for result in results))
    await rest(len(found))
    return await _tell(request, context, turn, found, rows)


def _rack(rack: str, context: Context) -> str:
    """The reader's, or none if a broker there has no such listener: whoever is sent to that one, without data, comes
    back to be sent there again."""
    if not rack:
        return ""
    near = (broker for broker in context.services.image.brokers.values() if broker.rack == rack and not broker.fenced)
    can_be_reached = all(any(name == context.listener for name, *_ in broker.endpoints) for broker in near)
    return rack if can_be_reached else ""


async def _tell(
    request: FetchRequest,
    context: Context,
    turn: Turn,
    found: Sequence[PartitionId | TidelogError],
    rows: Sequence[FetchResult],
) -> FetchResponse:
    """What the session has to tell of it."""
    news = [_news(row) for row in rows]
    await rest(len(rows))
    try:
        session_id, told = context.services.fetch_sessions.end(turn, news, now_ms=_now_ms())
    except FetchSessionError as error:
        return FetchResponse(error_code=code_of(error))
    response = FetchResponse(session_id=session_id)
    topics: dict[Topic, FetchableTopicResponse] = {}
    leaders = Leaders(context.services.image, context.listener)
    for number, (one, where, result, is_told) in enumerate(zip(turn.wanted, found, rows, told, strict=True), start=1):
        if number % NAMES_PER_SLICE == 0:
            await asyncio.sleep(0)
        if not is_told:
            continue
        row = _row(one.partition, result, context.version)
        if request.isolation_level == READ_UNCOMMITTED:
            row.aborted_transactions = None
        if is_moved(result.error) and isinstance(where, PartitionId):
            row.current_leader = leaders.of(where)
        topic = topics.get(one.topic)
        if topic is None:
            topic = topics[one.topic] = _topic(one.topic)
            response.responses.append(topic)
        topic.partitions.append(row)
    response.node_endpoints = leaders.endpoints()
    return response


async def _find(context: Context, turn: Turn) -> list[PartitionId | TidelogError]:
    found: list[PartitionId | TidelogError] = []
    for one in turn.wanted:
        found.append(find(context.services.image, one.topic, one.partition))
        if len(found) % NAMES_PER_SLICE == 0:
            await asyncio.sleep(0)
    return found


def _topic(topic: Topic) -> FetchableTopicResponse:
    if isinstance(topic, bytes):
        return FetchableTopicResponse(topic_id=topic)
    return FetchableTopicResponse(topic=topic)


def _news(result: FetchResult) -> News:
    return News(
        (result.high_watermark, result.last_stable, result.start_offset),
        bool(result.data),
        result.error is not None,
        result.is_news,
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
        row.error_code = _said(result.error, version)
    if result.diverging is not None:
        row.diverging_epoch = FetchEpochEndOffset(epoch=result.diverging[0], end_offset=result.diverging[1])
    if result.aborted:
        row.aborted_transactions = [
            AbortedTransaction(producer_id=producer_id, first_offset=first) for producer_id, first in result.aborted
        ]
    return row


def _said(error: TidelogError, version: int) -> int:
    row = _SAID.get(error.code, error.code)
    if row is ErrorCode.STORAGE_ERROR and version < _STORAGE_ERROR_SINCE:
        row = ErrorCode.NOT_LEADER_OR_FOLLOWER
    elif row is ErrorCode.UNKNOWN_TOPIC_ID and version < _IDS_SINCE:
        row = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return code(row if row in _KNOWN else ErrorCode.UNKNOWN_SERVER_ERROR)


HANDLERS: dict[int, Entry] = {FETCH.key: Entry(handle, on_stop=ErrorCode.NOT_LEADER_OR_FOLLOWER, is_single=True)}
