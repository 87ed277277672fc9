"""Produce: batches go to the log as they came, and are answered when they are acknowledged as asked.

Appended in the order of a connection's requests, answered later (`Later`). What a partition's records must be, before
the log looks at them; the first that fails refuses this partition, the others go on:

    there are records, of one batch       INVALID_RECORD         as Kafka has it since version 3
    of magic 2                            INVALID_RECORD         older message sets: no client since 2017 sends them
    no zstd before version 7              UNSUPPORTED_COMPRESSION_TYPE
    not of a transaction                  INVALID_TXN_STATE      until there are transactions

With acks=0 there is no answer. If a record was refused, the connection is closed: all that the protocol allows to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from tidelog.log.batch import Codec
from tidelog.log.batch_header import CODEC_MASK, HEADER_BYTES, LENGTH_PREFIX_BYTES, TRANSACTIONAL_BIT
from tidelog.metadata.topics import NAME_LENGTH_MAX
from tidelog.model.errors import (
    ErrorCode,
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidRequiredAcksError,
    InvalidTransactionStateError,
    RemoteError,
    TidelogError,
    UnknownTopicIdError,
    UnsupportedCompressionError,
)
from tidelog.model.ids import PartitionId
from tidelog.replication.service import ACKS_ALL, ACKS_LEADER, ACKS_NONE, ProduceItem, ProduceResult
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, data_code_of, message_of
from tidelog.rpc.kafka.finding import NAMES_PER_SLICE, Leaders, find, is_moved
from tidelog.rpc.kafka.messages import PRODUCE
from tidelog.rpc.kafka.messages.data import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from tidelog.rpc.kafka.services import Context, Later, Soon
from tidelog.rpc.kafka.wire import Buffer

_IDS_SINCE = 13
_ZSTD_SINCE = 7
_MAGIC_AT = 16
_LENGTH_AT = 8
_ATTRIBUTES_AT = 22
"""The low byte of them: codec and flags."""
_MAGIC = 2

Found = list[PartitionId | TidelogError]
"""Of each partition of a request, in its order: where it is, or why it is refused."""


async def handle(request: ProduceRequest, context: Context) -> Later | ProduceResponse | None:
    found: Found = []
    try:
        _check(request)
        items = await _items(request, context, found)
        timeout_ms = context.services.limits.produce_timeout(request.timeout_ms)
        producing = await context.services.partitions.start_produce(items, acks=request.acks, timeout_ms=timeout_ms)
    except TidelogError as error:
        if request.acks == ACKS_NONE:
            raise
        return await _answer(request, context, _all(request, error), ())
    if request.acks == ACKS_NONE:
        _check_stored(request, found, await producing.finish())
        return None
    if producing.is_done:
        return await _answer(request, context, found, producing.results())

    async def answer() -> ProduceResponse:
        return await _answer(request, context, found, await producing.finish())

    if len(found) > NAMES_PER_SLICE:
        return Later(answer, producing.leave)
    soon = Soon(producing.on_done, lambda: _answer_now(request, context, found, producing.results()))
    return Later(answer, producing.leave, soon)


def _check(request: ProduceRequest) -> None:
    if request.acks not in (ACKS_NONE, ACKS_LEADER, ACKS_ALL):
        raise InvalidRequiredAcksError(f"acks={request.acks}: 0, 1 or -1 (all)")
    if request.transactional_id is not None:
        raise InvalidTransactionStateError("this version has no transactions; produce without a transactional id")


def _count(request: ProduceRequest) -> int:
    return sum(len(topic.partition_data) for topic in request.topic_data)


def _all(request: ProduceRequest, error: TidelogError) -> Found:
    return [error] * _count(request)


async def _items(request: ProduceRequest, context: Context, found: Found) -> list[ProduceItem]:
    """What can be appended; fills `found`."""
    version, image = context.version, context.services.image
    items: list[ProduceItem] = []
    seen: set[PartitionId] = set()
    is_alone = _count(request) == 1
    for topic in request.topic_data:
        named = topic.topic_id if version >= _IDS_SINCE else topic.name
        for asked in topic.partition_data:
            where = find(image, named, asked.index)
            refusal = _refusal(asked.records, version) if isinstance(where, PartitionId) else None
            if seen and where in seen:
                refusal = InvalidRequestError("the partition is named twice in one request")
            if refusal is not None:
                found.append(refusal)
            else:
                found.append(where)
                if isinstance(where, PartitionId):
                    assert asked.records is not None, "checked before"
                    if not is_alone:
                        seen.add(where)
                    items.append(ProduceItem(where, asked.records))
            if len(found) % NAMES_PER_SLICE == 0:
                await asyncio.sleep(0)
    return items


def _refusal(records: Buffer | None, version: int) -> TidelogError | None:
    """What can be said by the first bytes; a batch that is cut off or broken is the log's to refuse."""
    if not records:
        return InvalidRecordError("a partition without a record batch")
    if len(records) > _MAGIC_AT and records[_MAGIC_AT] < _MAGIC:
        return InvalidRecordError(
            f"a message set of magic {records[_MAGIC_AT]}; this version of the request carries record batches (magic 2)"
        )
    if len(records) < HEADER_BYTES:
        return None
    size = int.from_bytes(records[_LENGTH_AT:LENGTH_PREFIX_BYTES], "big") + LENGTH_PREFIX_BYTES
    if HEADER_BYTES <= size < len(records):
        return InvalidRecordError(f"{len(records) - size} bytes behind a record batch: a partition has exactly one")
    flags = records[_ATTRIBUTES_AT]
    if flags & CODEC_MASK == Codec.ZSTD and version < _ZSTD_SINCE:
        return UnsupportedCompressionError(f"zstd needs version {_ZSTD_SINCE} of the request, this one is {version}")
    if flags & TRANSACTIONAL_BIT:
        return InvalidTransactionStateError("this version has no transactions; the batch says that it is part of one")
    return None


def _outcomes(found: Found, results: Iterable[ProduceResult]) -> Iterator[ProduceResult]:
    done = iter(results)
    for where in found:
        yield next(done) if isinstance(where, PartitionId) else ProduceResult(where)


def _check_stored(request: ProduceRequest, found: Found, results: list[ProduceResult]) -> None:
    """Raises the first refusal: whoever gets no answer learns of it by a closed connection."""
    outcomes = _outcomes(found, results)
    for topic in request.topic_data:
        for asked, done in zip(topic.partition_data, outcomes, strict=False):
            if done.error is not None:
                name = topic.name or topic.topic_id.hex()
                message = f"{name[:NAME_LENGTH_MAX]}-{asked.index} (acks=0): {done.error}"
                raise RemoteError(message, code=done.error.code)


def code_of_failure(error: TidelogError, version: int) -> int:
    """What clients know beside a produce: by name a topic that has just gone is one that is not there, and who leads no
    more, or has had the records cut, does not lead; for any other code librdkafka gives the record up."""
    if isinstance(error, UnknownTopicIdError) and version < _IDS_SINCE:
        return code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if isinstance(error, FencedLeaderEpochError):
        return code(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    return data_code_of(error)


async def _answer(
    request: ProduceRequest, context: Context, found: Found, results: Iterable[ProduceResult]
) -> ProduceResponse:
    response = ProduceResponse()
    for _ in _rows(request, context, found, results, response):
        await asyncio.sleep(0)
    return response


def _answer_now(
    request: ProduceRequest, context: Context, found: Found, results: Iterable[ProduceResult]
) -> ProduceResponse:
    response = ProduceResponse()
    for _ in _rows(request, context, found, results, response):
        pass
    return response


def _rows(
    request: ProduceRequest,
    context: Context,
    found: Found,
    results: Iterable[ProduceResult],
    response: ProduceResponse,
) -> Iterator[None]:
    """Fills the response; stops after every `NAMES_PER_SLICE` rows, for others to have their turn."""
    leaders: Leaders | None = None
    outcomes = _outcomes(found, results)
    number = 0
    for topic in request.topic_data:
        rows = []
        for asked, done in zip(topic.partition_data, outcomes, strict=False):
            number += 1
            if done.error is None:
                row = PartitionProduceResponse(
                    index=asked.index,
                    base_offset=done.base_offset,
                    log_append_time_ms=done.append_time_ms,
                    log_start_offset=done.start_offset,
                )
            else:
                row = PartitionProduceResponse(
                    index=asked.index,
                    error_code=code_of_failure(done.error, context.version),
                    base_offset=-1,
                    error_message=message_of(done.error),
                )
                where = found[number - 1]
                if is_moved(done.error) and isinstance(where, PartitionId):
                    leaders = leaders or Leaders(context.services.image, context.listener)
                    row.current_leader = leaders.of(where)
            rows.append(row)
            if number % NAMES_PER_SLICE == 0:
                yield
        response.responses.append(
            TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=rows)
        )
    if leaders is not None:
        response.node_endpoints = leaders.endpoints()


HANDLERS: dict[int, Entry] = {PRODUCE.key: Entry(handle, told_low=0)}
