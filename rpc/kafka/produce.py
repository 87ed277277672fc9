"""Produce: appends in the order of a connection's requests, responds when the records are acknowledged.

With acks=0 there is no response. If a record is rejected, the connection is closed: the protocol has no other way to
report it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from tidelog.metadata.topics import NAME_LENGTH_MAX
from tidelog.model.errors import ErrorCode, FencedLeaderEpochError, RemoteError, TidelogError, UnknownTopicIdError
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, data_code_of, message_of
from tidelog.rpc.kafka.leader_hints import LeaderHints, is_moved
from tidelog.rpc.kafka.messages import PRODUCE
from tidelog.rpc.kafka.messages.data import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from tidelog.rpc.kafka.services import Context, DeferredResponse, TasklessResponse
from tidelog.services import produce as service
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE
from tidelog.services.produce import ACKS_NONE, ProduceItem, ProduceResult

_IDS_SINCE = 13
_ZSTD_SINCE = 7
_TRANSACTIONS_V2_SINCE = 12
"""Clients that send it let the leader add the partition to the transaction (KIP-890)."""
_ABORTABLE_SINCE = 11
"""Clients know TRANSACTION_ABORTABLE."""
_NOT_VERIFIED = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NETWORK_EXCEPTION,
    }
)


async def handle(request: ProduceRequest, context: Context) -> DeferredResponse | ProduceResponse | None:
    produce = _produce_request(request, context.version)
    if len(produce.items) > PARTITIONS_PER_SLICE:
        await asyncio.sleep(0)
    try:
        pending = await context.services.data.produce.start(context.request, produce)
    except TidelogError as error:
        if request.acks == ACKS_NONE and produce.items:
            raise
        return await _respond(request, context, [ProduceResult(error)] * len(produce.items))
    if request.acks == ACKS_NONE:
        _check_stored(request, await pending.finish())
        return None
    if pending.is_done:
        return await _respond(request, context, pending.results())

    async def respond() -> ProduceResponse:
        return await _respond(request, context, await pending.finish())

    if len(produce.items) > PARTITIONS_PER_SLICE:
        return DeferredResponse(respond, pending.abandon)
    taskless = TasklessResponse(pending.on_done, lambda: _respond_now(request, context, pending.results()))
    return DeferredResponse(respond, pending.abandon, taskless)


def _produce_request(request: ProduceRequest, version: int) -> service.ProduceRequest:
    has_ids = version >= _IDS_SINCE
    return service.ProduceRequest(
        items=[
            ProduceItem((topic.topic_id if has_ids else topic.name, partition.index), partition.records or b"")
            for topic in request.topic_data
            for partition in topic.partition_data
        ],
        acks=request.acks,
        timeout_ms=request.timeout_ms,
        transactional_id=request.transactional_id,
        transaction_version=2 if version >= _TRANSACTIONS_V2_SINCE else 1,
        is_single_batch=True,
        allows_zstd=version >= _ZSTD_SINCE,
    )


def _check_stored(request: ProduceRequest, results: Sequence[ProduceResult]) -> None:
    """Raises the first error of a partition: it closes the connection of a client that gets no response."""
    outcomes = iter(results)
    for topic in request.topic_data:
        for partition, result in zip(topic.partition_data, outcomes, strict=False):
            if result.error is not None:
                name = topic.name or topic.topic_id.hex()
                message = f"{name[:NAME_LENGTH_MAX]}-{partition.index} (acks=0): {result.error}"
                raise RemoteError(message, code=result.error.code)


def code_of_failure(error: TidelogError, version: int) -> int:
    """Returns a code that clients handle in a Produce response; after any other code librdkafka drops the record.

    A request by name has UNKNOWN_TOPIC_OR_PARTITION for a topic that was just deleted. A leader of an older epoch is
    no leader. As Kafka, a broker that cannot ask the transaction coordinator has too few replicas: that is retried
    without a look for another leader. A fenced producer has INVALID_PRODUCER_EPOCH: it hears from its coordinator why,
    when it ends the transaction. So has one whose transaction has timed out: Kafka Streams goes on after this code, and
    ends after TRANSACTION_ABORTABLE, which version 11 has for a partition that was not added.
    """
    if isinstance(error, UnknownTopicIdError) and version < _IDS_SINCE:
        return code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if isinstance(error, FencedLeaderEpochError):
        return code(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    is_old = version < _TRANSACTIONS_V2_SINCE
    is_abortable = error.code is ErrorCode.TRANSACTION_ABORTABLE
    if error.code is ErrorCode.PRODUCER_FENCED or (is_abortable and not is_old):
        return code(ErrorCode.INVALID_PRODUCER_EPOCH)
    if is_abortable and version < _ABORTABLE_SINCE:
        return code(ErrorCode.INVALID_TXN_STATE)
    if error.code in _NOT_VERIFIED or (is_old and error.code is ErrorCode.CONCURRENT_TRANSACTIONS):
        return code(ErrorCode.NOT_ENOUGH_REPLICAS)
    return data_code_of(error)


async def _respond(request: ProduceRequest, context: Context, results: Iterable[ProduceResult]) -> ProduceResponse:
    response = ProduceResponse()
    for _ in _add_rows(request, context, results, response):
        await asyncio.sleep(0)
    return response


def _respond_now(request: ProduceRequest, context: Context, results: Iterable[ProduceResult]) -> ProduceResponse:
    response = ProduceResponse()
    for _ in _add_rows(request, context, results, response):
        pass
    return response


def _add_rows(
    request: ProduceRequest, context: Context, results: Iterable[ProduceResult], response: ProduceResponse
) -> Iterator[None]:
    """Adds the rows to the response; yields after every `PARTITIONS_PER_SLICE`."""
    leaders: LeaderHints | None = None
    outcomes = iter(results)
    number = 0
    for topic in request.topic_data:
        rows = []
        for partition, result in zip(topic.partition_data, outcomes, strict=False):
            number += 1
            if result.error is None:
                row = PartitionProduceResponse(
                    index=partition.index,
                    base_offset=result.base_offset,
                    log_append_time_ms=result.append_time_ms,
                    log_start_offset=result.start_offset,
                )
            else:
                row = PartitionProduceResponse(
                    index=partition.index,
                    error_code=code_of_failure(result.error, context.version),
                    base_offset=-1,
                    error_message=message_of(result.error),
                )
                if is_moved(result.error):
                    leaders = leaders or LeaderHints(context.services.image, context.listener)
                    row.current_leader = leaders.add(result.leader, result.leader_epoch)
            rows.append(row)
            if number % PARTITIONS_PER_SLICE == 0:
                yield
        response.responses.append(
            TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=rows)
        )
    if leaders is not None:
        response.node_endpoints = leaders.endpoints()


HANDLERS: dict[int, Entry] = {PRODUCE.key: Entry(handle, advertised_low=0)}
