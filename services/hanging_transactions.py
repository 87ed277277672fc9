"""Aborts hanging transactions: open in the log of a partition, and unknown to every coordinator.

An operator has seen it (DescribeProducers) and names the producer and its epoch. The request may be late: the producer
may have another transaction by then. So the leader of the partition checks, for each one:

    nothing is open for the producer in this epoch      success: it was aborted before
    another epoch is open, or was written               INVALID_PRODUCER_EPOCH
    a coordinator has it open, or is ending it          INVALID_TXN_STATE, with the transactional id to abort instead
    not every coordinator has answered                  COORDINATOR_NOT_AVAILABLE
    the producer has written since the question         CONCURRENT_TRANSACTIONS: it is not hanging
    otherwise                                           the abort marker is appended, and replicated

Nothing is appended between the last check and the marker. Only aborts: whether a transaction commits is the decision of
its coordinator alone. Offsets of groups are not covered: their partition has no control batches.

Limits: `TRANSACTIONS_MAX` of one request, one after the other; `REPLICATED_S` for the replication of a marker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tidelog.log.producer_snapshot import ProducerRow
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.errors import (
    InvalidProducerEpochError,
    InvalidRequestError,
    InvalidTopicError,
    InvalidTransactionStateError,
    RequestTimedOutError,
    TidelogError,
)
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import ConcurrentTransactionsError, InvalidProducerIdMappingError
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replicas import Replicas
from tidelog.replication.transaction_messages import MarkedPartition, Marker
from tidelog.services.authorization import Operation
from tidelog.services.context import RequestContext
from tidelog.services.deadline import ends_at_deadline
from tidelog.services.guard import Guard
from tidelog.services.partition_lookup import PartitionLookup, find_leader
from tidelog.services.transaction_requests import HangingTransaction

TRANSACTIONS_MAX = 100
REPLICATED_S = 10.0


class CoordinatorSearch(Protocol):
    async def find(self, producer_id: int, partition: PartitionId) -> str | None:
        """Return the transactional id whose open or ending transaction has the partition for this producer, or None.
        Raise if a coordinator does not answer."""
        ...


class HangingTransactions:
    def __init__(self, replicas: Replicas, search: CoordinatorSearch, guard: Guard) -> None:
        self._replicas = replicas
        self._search = search
        self._guard = guard
        self._lookup = PartitionLookup(lambda: replicas.image, guard.authorizer)

    @ends_at_deadline
    async def abort(
        self, context: RequestContext, transactions: Sequence[HangingTransaction]
    ) -> list[TidelogError | None]:
        """Return an error or None for each one, in order. Needs the right to alter the cluster."""
        self._guard.admit_change(context, len(transactions))
        if not 1 <= len(transactions) <= TRANSACTIONS_MAX:
            raise InvalidRequestError(f"the request names {len(transactions)} transactions: 1 to {TRANSACTIONS_MAX}")
        errors: list[TidelogError | None] = []
        for transaction in transactions:
            try:
                await self._abort(context, transaction)
                errors.append(None)
            except TidelogError as error:
                errors.append(error)
        return errors

    async def _abort(self, context: RequestContext, transaction: HangingTransaction) -> None:
        if transaction.is_commit:
            raise InvalidRequestError(f"producer {transaction.producer_id}: only its coordinator commits a transaction")
        partition = self._lookup.find_or_error(context, Operation.DESCRIBE, transaction.partition)
        if isinstance(partition, TidelogError):
            raise partition
        leader = find_leader(self._replicas, partition)
        if leader.replica.topic in INTERNAL_TOPICS:
            raise InvalidTopicError(f"{leader.replica.topic} has no markers of transactions")
        seen = _open_row(leader, transaction)
        if seen is not None:
            holder = await self._search.find(transaction.producer_id, partition)
            if holder is not None:
                raise InvalidTransactionStateError(
                    f"the transaction of producer {transaction.producer_id} is not hanging: abort that of transactional"
                    f" id {holder!r}"
                )
            leader = find_leader(self._replicas, partition)  # it may have changed meanwhile
            if _open_row(leader, transaction) != seen:
                raise ConcurrentTransactionsError(
                    f"producer {transaction.producer_id} has written since: its transaction is not hanging"
                )
        await _write(leader, _marker(leader, transaction))


def _open_row(leader: LeaderReplica, transaction: HangingTransaction) -> ProducerRow | None:
    """Return the producer's row with the transaction; None if nothing is open in this epoch. Raise for others."""
    row = leader.log.producers.row(transaction.producer_id)
    if row is None:
        raise InvalidProducerIdMappingError(f"producer {transaction.producer_id} is unknown in this partition")
    if row.epoch != transaction.epoch:
        raise InvalidProducerEpochError(
            f"producer {transaction.producer_id} has epoch {row.epoch} here, not {transaction.epoch}"
        )
    return None if row.open_offset is None else row


def _marker(leader: LeaderReplica, transaction: HangingTransaction) -> Marker:
    """Its number is the one that this leader knows, if it knows one: what it identifies is checked already. It does
    not raise the coordinator epoch: the markers of the producer's coordinator would be rejected for ever."""
    known = {row.producer_id: row.number for row in leader.transactions.open_transactions()}
    written = max(0, leader.log.producers.coordinator_epoch_of(transaction.producer_id))
    partition = leader.replica.partition_id
    return Marker(
        transactional_id="",
        producer_id=transaction.producer_id,
        epoch=transaction.epoch,
        coordinator_epoch=min(transaction.coordinator_epoch, written),
        is_commit=False,
        is_strict=False,
        number=known.get(transaction.producer_id, -1),
        partitions=(MarkedPartition(partition.topic_id, partition.partition, leader.leader_epoch),),
    )


async def _write(leader: LeaderReplica, marker: Marker) -> None:
    end = leader.append_marker(marker)
    if leader.high_watermark >= end:
        return
    wait = leader.acks.wait(end)
    try:
        async with asyncio.timeout(REPLICATED_S):
            await asyncio.shield(wait)
    except TimeoutError:
        raise RequestTimedOutError(f"the marker is not replicated in {REPLICATED_S:g} s; it may be yet") from None
    finally:
        if not wait.done():
            leader.acks.forget(wait)
