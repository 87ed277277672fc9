"""Transactions of producers: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn.

A client of `transaction.version` 2 sends EndTxn from version 5, TxnOffsetCommit from version 5 and Produce from version
12 on, and adds nothing itself: the leaders and the group's coordinator do (decision 32). Older clients send
AddPartitionsToTxn up to version 3 and AddOffsetsToTxn.

Error codes depend on the version: a client that does not know PRODUCER_FENCED gets INVALID_PRODUCER_EPOCH, one that
does not know TRANSACTION_ABORTABLE gets INVALID_TXN_STATE. As in Kafka, InitProducerId does not wait for the end of the
transaction before: clients retry after CONCURRENT_TRANSACTIONS. The others wait for it, for a short time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.group_errors import FencedMemberEpochError, StaleMemberEpochError
from tidelog.model.transaction_errors import TransactionAbortableError
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import NONE, code, transaction_code_of
from tidelog.rpc.kafka.messages import transactions as messages
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.services.groups import MissingGroupError, OffsetToCommit
from tidelog.services.offsets import InitProducerId
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE, PartitionRef
from tidelog.services.transaction_requests import (
    AddOffsetsToTransaction,
    AddPartitionsToTransaction,
    CommitOffsetsInTransaction,
    EndTransaction,
    InitTransactions,
)
from tidelog.world.slicing import sliced

BATCHED_SINCE = 4
"""AddPartitionsToTxn: of brokers, for several transactional ids."""
ENDS_VERSION_2_SINCE = 5
"""EndTxn and TxnOffsetCommit."""
IDS_SINCE = 6
"""TxnOffsetCommit: topics have ids, and clients know the errors of consumer groups."""
LOADING_SINCE = 2
"""TxnOffsetCommit: clients know COORDINATOR_LOAD_IN_PROGRESS."""
_FENCED_SINCE = {22: 4, 24: 2, 25: 2, 26: 2}
"""By key, the version from which on clients know PRODUCER_FENCED."""
_ABORTABLE_SINCE = {22: 5, 24: 5, 25: 4, 26: 4, 28: 4}
"""TRANSACTION_ABORTABLE."""
_NEVER = 1 << 15


def _code(error: TidelogError | None, key: int, version: int) -> int:
    return transaction_code_of(
        error,
        knows_fenced=version >= _FENCED_SINCE.get(key, _NEVER),
        knows_abortable=version >= _ABORTABLE_SINCE[key],
    )


# Producer ids.


async def init_producer_id(request: messages.InitProducerIdRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _init_producer_id(request, context))


async def _init_producer_id(
    request: messages.InitProducerIdRequest, context: Context
) -> messages.InitProducerIdResponse:
    try:
        producer_id, epoch = await _new_identity(request, context)
    except TidelogError as error:
        error_code = _code(error, apis.INIT_PRODUCER_ID.key, context.version)
        if request.transactional_id is None and error.retriable:
            error_code = code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)  # there is no coordinator to look for
        return messages.InitProducerIdResponse(error_code=error_code, producer_epoch=-1)
    return messages.InitProducerIdResponse(producer_id=producer_id, producer_epoch=epoch)


async def _new_identity(request: messages.InitProducerIdRequest, context: Context) -> tuple[int, int]:
    if request.transactional_id is None:
        init = InitProducerId(producer_id=request.producer_id, producer_epoch=request.producer_epoch)
        return await context.services.data.offsets.init_producer_id(context.request, init)
    reply = await context.services.transactions.init(
        context.request,
        InitTransactions(
            transactional_id=request.transactional_id,
            timeout_ms=request.transaction_timeout_ms,
            producer_id=request.producer_id,
            epoch=request.producer_epoch,
            waits=False,
        ),
    )
    return reply.producer_id, reply.epoch


# Partitions and groups of a transaction.


async def add_partitions(request: messages.AddPartitionsToTxnRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _add_partitions(request, context))


async def _add_partitions(
    request: messages.AddPartitionsToTxnRequest, context: Context
) -> messages.AddPartitionsToTxnResponse:
    if context.version >= BATCHED_SINCE:
        return await _add_batched(request, context)
    refs = await _refs(request.v3_and_below_topics)
    added = AddPartitionsToTransaction(
        transactional_id=request.v3_and_below_transactional_id,
        producer_id=request.v3_and_below_producer_id,
        epoch=request.v3_and_below_producer_epoch,
        partitions=refs,
    )
    errors = await _added(added, context)
    rows = await _topic_results(request.v3_and_below_topics, errors, context.version)
    return messages.AddPartitionsToTxnResponse(results_by_topic_v3_and_below=rows)


async def _add_batched(
    request: messages.AddPartitionsToTxnRequest, context: Context
) -> messages.AddPartitionsToTxnResponse:
    """Of a broker: a leader verifies the partition of an old client, or adds that of a new one."""
    response = messages.AddPartitionsToTxnResponse()
    for transaction in request.transactions:
        added = AddPartitionsToTransaction(
            transactional_id=transaction.transactional_id,
            producer_id=transaction.producer_id,
            epoch=transaction.producer_epoch,
            partitions=await _refs(transaction.topics),
            verify_only=transaction.verify_only,
            version=1 if transaction.verify_only else 2,
            is_broker=True,
        )
        errors = await _added(added, context)
        if any(error is not None and error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED for error in errors):
            return messages.AddPartitionsToTxnResponse(error_code=code(ErrorCode.CLUSTER_AUTHORIZATION_FAILED))
        rows = await _topic_results(transaction.topics, errors, context.version)
        response.results_by_transaction.append(
            messages.AddPartitionsToTxnResult(transactional_id=transaction.transactional_id, topic_results=rows)
        )
    return response


async def _refs(topics: Iterable[messages.AddPartitionsToTxnTopic]) -> list[PartitionRef]:
    pairs = ((topic.name, number) for topic in topics for number in topic.partitions)
    return [pair async for pair in sliced(pairs, PARTITIONS_PER_SLICE)]


async def _added(request: AddPartitionsToTransaction, context: Context) -> Sequence[TidelogError | None]:
    if not request.partitions:
        return ()
    try:
        return await context.services.transactions.add_partitions(context.request, request)
    except TidelogError as error:
        return [error] * len(request.partitions)


async def _topic_results(
    topics: Iterable[messages.AddPartitionsToTxnTopic], errors: Sequence[TidelogError | None], version: int
) -> list[messages.AddPartitionsToTxnTopicResult]:
    remaining = iter(errors)
    rows = []
    for topic in topics:
        row = messages.AddPartitionsToTxnTopicResult(name=topic.name)
        async for number in sliced(topic.partitions, PARTITIONS_PER_SLICE):
            error_code = _code(next(remaining), apis.ADD_PARTITIONS_TO_TXN.key, version)
            row.results_by_partition.append(
                messages.AddPartitionsToTxnPartitionResult(partition_index=number, partition_error_code=error_code)
            )
        rows.append(row)
    return rows


async def add_offsets(request: messages.AddOffsetsToTxnRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _add_offsets(request, context))


async def _add_offsets(request: messages.AddOffsetsToTxnRequest, context: Context) -> messages.AddOffsetsToTxnResponse:
    added = AddOffsetsToTransaction(
        transactional_id=request.transactional_id,
        producer_id=request.producer_id,
        epoch=request.producer_epoch,
        group=request.group_id,
    )
    try:
        await context.services.transactions.add_offsets(context.request, added)
    except TidelogError as error:
        error_code = _code(error, apis.ADD_OFFSETS_TO_TXN.key, context.version)
        return messages.AddOffsetsToTxnResponse(error_code=error_code)
    return messages.AddOffsetsToTxnResponse()


# Offsets.


async def commit_offsets(request: messages.TxnOffsetCommitRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _commit_offsets(request, context))


async def _commit_offsets(
    request: messages.TxnOffsetCommitRequest, context: Context
) -> messages.TxnOffsetCommitResponse:
    offsets: dict[PartitionRef, OffsetToCommit] = {}
    refs: list[PartitionRef] = []
    pairs = ((topic, row) for topic in request.topics for row in topic.partitions)
    async for topic, row in sliced(pairs, PARTITIONS_PER_SLICE):
        ref: PartitionRef = (topic.topic_id if context.version >= IDS_SINCE else topic.name, row.partition_index)
        refs.append(ref)
        offsets[ref] = OffsetToCommit(row.committed_offset, row.committed_leader_epoch, row.committed_metadata or "")
    errors = await _committed(request, context, offsets) if offsets else {}
    response = messages.TxnOffsetCommitResponse()
    remaining = iter(refs)
    for topic in request.topics:
        result = messages.TxnOffsetCommitResponseTopic(name=topic.name, topic_id=topic.topic_id)
        response.topics.append(result)
        numbered = zip(topic.partitions, islice(remaining, len(topic.partitions)), strict=True)
        async for row, ref in sliced(numbered, PARTITIONS_PER_SLICE):
            error_code = _commit_code(errors[ref], request, context.version)
            result.partitions.append(
                messages.TxnOffsetCommitResponsePartition(partition_index=row.partition_index, error_code=error_code)
            )
    return response


async def _committed(
    request: messages.TxnOffsetCommitRequest, context: Context, offsets: Mapping[PartitionRef, OffsetToCommit]
) -> Mapping[PartitionRef, TidelogError | None]:
    commit = CommitOffsetsInTransaction(
        transactional_id=request.transactional_id,
        producer_id=request.producer_id,
        epoch=request.producer_epoch,
        group=request.group_id,
        offsets=offsets,
        member_id=request.member_id,
        member_epoch=request.generation_id_or_member_epoch,
        instance_id=request.group_instance_id or "",
        version=2 if context.version >= ENDS_VERSION_2_SINCE else 1,
    )
    try:
        return await context.services.transactions.commit_offsets(context.request, commit)
    except TidelogError as error:
        return dict.fromkeys(offsets, error)


def _commit_code(error: TidelogError | None, request: messages.TxnOffsetCommitRequest, version: int) -> int:
    """Before version 6 a member that is not current has ILLEGAL_GENERATION, whatever the protocol of its group is. A
    transaction that has timed out has the code of a Produce request (`produce.code_of_failure`)."""
    if isinstance(error, MissingGroupError) and request.generation_id_or_member_epoch >= 0:
        return code(ErrorCode.GROUP_ID_NOT_FOUND if version >= IDS_SINCE else ErrorCode.ILLEGAL_GENERATION)
    if isinstance(error, StaleMemberEpochError | FencedMemberEpochError) and version < IDS_SINCE:
        return code(ErrorCode.ILLEGAL_GENERATION)
    error_code = _code(error, apis.TXN_OFFSET_COMMIT.key, version)
    if error_code == code(ErrorCode.TRANSACTION_ABORTABLE) and version >= ENDS_VERSION_2_SINCE:
        return code(ErrorCode.INVALID_PRODUCER_EPOCH)
    if error_code == code(ErrorCode.UNKNOWN_TOPIC_ID) and version < IDS_SINCE:
        return code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    if error_code == code(ErrorCode.CONCURRENT_TRANSACTIONS) and version < ENDS_VERSION_2_SINCE:
        error_code = code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    if error_code == code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) and version < LOADING_SINCE:
        return code(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return error_code


# The end.


async def end(request: messages.EndTxnRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _end(request, context))


async def _end(request: messages.EndTxnRequest, context: Context) -> messages.EndTxnResponse:
    ended = EndTransaction(
        transactional_id=request.transactional_id,
        producer_id=request.producer_id,
        epoch=request.producer_epoch,
        is_commit=request.committed,
        version=2 if context.version >= ENDS_VERSION_2_SINCE else 1,
    )
    try:
        reply = await context.services.transactions.end(context.request, ended)
    except TransactionAbortableError:
        # The coordinator has aborted it. As in Kafka: Streams creates another producer after this code, and shuts down
        # after TRANSACTION_ABORTABLE.
        return messages.EndTxnResponse(error_code=code(ErrorCode.PRODUCER_FENCED))
    except TidelogError as error:
        return messages.EndTxnResponse(error_code=_code(error, apis.END_TXN.key, context.version))
    return messages.EndTxnResponse(error_code=NONE, producer_id=reply.producer_id, producer_epoch=reply.epoch)


HANDLERS: dict[int, Entry] = {
    apis.INIT_PRODUCER_ID.key: Entry(init_producer_id),
    apis.ADD_PARTITIONS_TO_TXN.key: Entry(add_partitions),
    apis.ADD_OFFSETS_TO_TXN.key: Entry(add_offsets),
    apis.TXN_OFFSET_COMMIT.key: Entry(commit_offsets),
    apis.END_TXN.key: Entry(end),
}
