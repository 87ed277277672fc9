"""Requests of operators about transactions: ListTransactions, DescribeTransactions, WriteTxnMarkers.

A joint transaction has members with producer ids of their own. Kafka's tools know one producer of a transactional id
and take the transaction of any other for hanging. So a listing that is filtered by producer ids has a row for each of
them, and a description has the partitions of owner and members.

WriteTxnMarkers is what `kafka-transactions abort` sends for a hanging transaction: only aborts of transactions that no
coordinator knows are accepted (`services.hanging_transactions`). Brokers write markers on their own listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, code_of, transaction_code_of
from tidelog.rpc.kafka.messages import transactions as messages
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.rpc.kafka.wire import EncodedRows
from tidelog.services.limits import ResponseSize
from tidelog.services.transaction_requests import (
    STATES,
    HangingTransaction,
    TransactionDetails,
    TransactionFilter,
    TransactionSummary,
)

ROWS_AT_A_TIME = 1_000
_STATES_OF_KAFKA = frozenset({"Dead", "PrepareEpochFence"})
"""States that no transaction has here."""


# Listing.


async def list_transactions(
    request: messages.ListTransactionsRequest, context: Context
) -> messages.ListTransactionsResponse:
    """List those of this broker. While it loads some of them, the response has the known ones and an error."""
    statuses = [name for name in request.state_filters if name in STATES]
    unknown = [name for name in request.state_filters if name not in STATES and name not in _STATES_OF_KAFKA]
    summaries: Sequence[TransactionSummary] = ()
    loading = 0
    if statuses or not request.state_filters:
        wanted = TransactionFilter(
            statuses=statuses,
            producer_ids=frozenset(request.producer_id_filters),
            longer_than_ms=request.duration_filter,
            pattern=request.transactional_id_pattern or "",
        )
        summaries, loading = await context.services.transactions.list(context.request, wanted)
    encoded = EncodedRows()
    size = ResponseSize("transactional ids")
    wanted_ids = frozenset(request.producer_id_filters)
    for first in range(0, len(summaries), ROWS_AT_A_TIME):
        rows = [row for each in summaries[first : first + ROWS_AT_A_TIME] for row in _listed(each, wanted_ids)]
        size.check()
        data = apis.LIST_TRANSACTIONS.encode_rows(context.version, messages.ListedTransaction, rows)
        size.add(len(data))
        encoded.add(len(rows), data)
        await asyncio.sleep(0)
    return messages.ListTransactionsResponse(
        error_code=code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if loading else None),
        unknown_state_filters=unknown,
        transaction_states=cast("list[messages.ListedTransaction]", encoded),
    )


def _listed(summary: TransactionSummary, producer_ids: frozenset[int]) -> list[messages.ListedTransaction]:
    found = [each for each in (summary.producer_id, *summary.members) if each in producer_ids]
    return [
        messages.ListedTransaction(
            transactional_id=summary.transactional_id, producer_id=producer_id, transaction_state=summary.status
        )
        for producer_id in found or [summary.producer_id]
    ]


# Descriptions.


async def describe_transactions(
    request: messages.DescribeTransactionsRequest, context: Context
) -> messages.DescribeTransactionsResponse:
    size = ResponseSize("transactional ids")
    rows = EncodedRows()
    for name in request.transactional_ids:
        try:
            size.check()
            row = _described(await context.services.transactions.describe(context.request, name))
        except TidelogError as error:
            row = messages.DescribedTransaction(
                error_code=transaction_code_of(error), transactional_id=name, producer_id=-1, producer_epoch=-1
            )
        data = apis.DESCRIBE_TRANSACTIONS.encode_rows(context.version, messages.DescribedTransaction, [row])
        size.add(len(data))
        rows.add(1, data)
        await asyncio.sleep(0)
    return messages.DescribeTransactionsResponse(transaction_states=cast("list[messages.DescribedTransaction]", rows))


def _described(details: TransactionDetails) -> messages.DescribedTransaction:
    partitions = set(details.partitions).union(*(member.partitions for member in details.members))
    topics: dict[str, messages.TopicData] = {}
    for name, number in sorted(partitions):
        topics.setdefault(name, messages.TopicData(topic=name)).partitions.append(number)
    return messages.DescribedTransaction(
        transactional_id=details.transactional_id,
        transaction_state=details.status,
        transaction_timeout_ms=details.timeout_ms,
        transaction_start_time_ms=details.started_ms,
        producer_id=details.producer_id,
        producer_epoch=details.epoch,
        topics=list(topics.values()),
    )


# Hanging transactions.


async def write_markers(request: messages.WriteTxnMarkersRequest, context: Context) -> DeferredResponse:
    return DeferredResponse(lambda: _write_markers(request, context))


async def _write_markers(
    request: messages.WriteTxnMarkersRequest, context: Context
) -> messages.WriteTxnMarkersResponse:
    transactions = [
        HangingTransaction(
            partition=(topic.name, number),
            producer_id=marker.producer_id,
            epoch=marker.producer_epoch,
            coordinator_epoch=marker.coordinator_epoch,
            is_commit=marker.transaction_result,
        )
        for marker in request.markers
        for topic in marker.topics
        for number in topic.partition_indexes
    ]
    errors: Sequence[TidelogError | None]
    try:
        errors = await context.services.transactions.abort_hanging(context.request, transactions)
    except TidelogError as error:
        errors = [error] * len(transactions)
    remaining = iter(errors)
    response = messages.WriteTxnMarkersResponse()
    for marker in request.markers:
        result = messages.WritableTxnMarkerResult(producer_id=marker.producer_id)
        response.markers.append(result)
        for topic in marker.topics:
            rows = [
                messages.WritableTxnMarkerPartitionResult(partition_index=number, error_code=code_of(next(remaining)))
                for number in topic.partition_indexes
            ]
            result.topics.append(messages.WritableTxnMarkerTopicResult(name=topic.name, partitions=rows))
    return response


HANDLERS: dict[int, Entry] = {
    apis.LIST_TRANSACTIONS.key: Entry(list_transactions),
    apis.DESCRIBE_TRANSACTIONS.key: Entry(describe_transactions),
    apis.WRITE_TXN_MARKERS.key: Entry(write_markers),
}
