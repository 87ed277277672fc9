"""Admin operations on transactional ids. Each id is asked of its coordinator; all brokers are asked for lists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from tidelog.client.admin import conversions
from tidelog.client.admin.arguments import TopicsOrPartitions, read_names
from tidelog.client.admin.calls import ATTEMPT_MS, change, for_each, query
from tidelog.client.admin.groups import GroupOperations
from tidelog.client.admin.values import (
    HangingTransaction,
    Outcomes,
    TransactionDescription,
    TransactionList,
    TransactionListing,
)
from tidelog.client.cluster import error_in
from tidelog.client.coordinators import is_retriable
from tidelog.client.durations import duration_ms
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, InvalidRequestError
from tidelog.model.group_errors import CoordinatorLoadingError
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import log_pb2
from tidelog.rpc.v1 import transactions_pb2 as pb

STATES = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort")
OPEN_FOR = "15m"
"""The default of transaction.max.timeout.ms: a coordinator ends every transaction before."""
_LIST = method_named("Transactions", "List")
_IDS_PER_REQUEST = 1_000

Duration = str | int | timedelta


class TransactionOperations(GroupOperations):
    @query
    async def list_transactions(
        self,
        *,
        states: Iterable[str] = (),
        producer_ids: Iterable[int] = (),
        open_for: Duration | None = None,
        partial: bool = False,
        timeout: float | None = None,
    ) -> TransactionList:
        """List the transactional ids of all brokers, or those in these states ("Ongoing", "CompleteCommit", ...), of
        these producer ids, or open for longer than a duration ("15m", a timedelta, or ms). Retries until all brokers
        have answered. With `partial` asks each once; `errors` has those that did not answer, `loading` those that load
        ids."""
        request = pb.ListTransactionsRequest(states=_read_states(states), producer_ids=_read_ids(producer_ids))
        if open_for is not None:
            request.longer_than_ms = _read_duration(open_for)
        backoff = self.cluster.backoff()
        while True:
            listed = await self._list_transactions(request)
            if partial or not (listed.errors or listed.loading):
                return listed
            pause_s = backoff.next_s()
            first = next(iter(listed.errors.values()), None)
            if (first is not None and not is_retriable(first)) or pause_s * 1000 >= self._remaining_ms():
                if first is not None:
                    raise first
                raise CoordinatorLoadingError(f"brokers {', '.join(map(str, listed.loading))} load transactional ids")
            await asyncio.sleep(pause_s)

    async def _list_transactions(self, request: pb.ListTransactionsRequest) -> TransactionList:
        await self.cluster.refresh()
        brokers = sorted(self.cluster.view.brokers)
        timeout_ms = min(self._remaining_ms(), ATTEMPT_MS)
        answers = await for_each(
            brokers, lambda broker: self.cluster.call_node(broker, _LIST, request, timeout_ms=timeout_ms)
        )
        responses = conversions.outcomes(zip(brokers, answers, strict=True))
        # A coordinator that has just moved may be in two responses; the id is listed once.
        rows = {
            row.transactional_id: TransactionListing(row.transactional_id, row.producer_id, row.state, broker)
            for broker, response in responses.succeeded.items()
            for row in response.transactions
        }
        loading = {broker: response.loading for broker, response in responses.succeeded.items() if response.loading}
        return TransactionList(tuple(rows[name] for name in sorted(rows)), responses.errors, loading)

    @query
    async def describe_transaction(
        self, transactional_id: str, *, timeout: float | None = None
    ) -> TransactionDescription:
        """Return state, producer, partitions, members and last token. TransactionalIdNotFoundError if nobody has used
        the id, or it has expired."""
        _, response = await self._ask_coordinator(
            transactional_id,
            "Describe",
            pb.DescribeTransactionsRequest(transactional_ids=[transactional_id]),
            service="Transactions",
        )
        (row,) = response.transactions
        if (error := error_in(row)) is not None:
            raise error
        return conversions.transaction_description(row)

    @query
    async def describe_transactions(
        self, transactional_ids: Iterable[str], *, partial: bool = False, timeout: float | None = None
    ) -> Outcomes[str, TransactionDescription]:
        """Describe several transactional ids."""
        names = read_names(transactional_ids, "transactional_ids")
        rows = await for_each(names, self.describe_transaction)
        return conversions.whole(conversions.outcomes(zip(names, rows, strict=True)), partial=partial)

    @change
    async def abort_transaction(self, transactional_id: str, *, timeout: float | None = None) -> bool:
        """Abort the open transaction of a transactional id. Its owner's commit fails then, and it may begin another
        one. Returns whether a transaction was open. It is idempotent."""
        _, response = await self._ask_coordinator(
            transactional_id,
            "Abort",
            pb.AbortTransactionRequest(transactional_id=transactional_id),
            service="Transactions",
        )
        return bool(response.was_open)

    @query
    async def find_hanging_transactions(
        self, topics: TopicsOrPartitions = None, *, open_for: Duration = OPEN_FOR, timeout: float | None = None
    ) -> list[HangingTransaction]:
        """Find transactions that are open in the log of a partition, whose last record is older than `open_for`, and
        that no coordinator knows as open. The default is all topics."""
        limit_ms = _read_duration(open_for)
        names = topics if topics is not None else [topic.name for topic in await self.cluster.all_topics()]
        partitions = await self._partitions_of(names)
        candidates = await self._open_in_logs(partitions, limit_ms)
        known = await self._known_to_coordinators({one.producer_id for one in candidates})
        suspects = [one for one in candidates if (one.producer_id, one.partition) not in known]
        # One that ended meanwhile was open in the log, and not at its coordinator.
        again = await self._open_in_logs(sorted({one.partition for one in suspects}), limit_ms)
        return [one for one in suspects if one in again]

    async def _open_in_logs(self, partitions: Sequence[TopicPartition], limit_ms: int) -> list[HangingTransaction]:
        latest_ms = self.cluster.clock.now_ms() - limit_ms
        found: list[HangingTransaction] = []
        for place, row in (await self._describe_producers(partitions)).items():
            if (error := error_in(row)) is not None:
                raise error
            found += [
                HangingTransaction(
                    partition=place,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    start_offset=producer.transaction_start_offset,
                    last_timestamp_ms=producer.last_timestamp,
                    coordinator_epoch=producer.coordinator_epoch,
                )
                for producer in row.producers
                if producer.transaction_start_offset >= 0 and producer.last_timestamp <= latest_ms
            ]
        return found

    async def _describe_producers(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Any]:
        """Of each partition's leader."""
        named: dict[PartitionId, TopicPartition] = {}
        for place in partitions:
            topic = await self.cluster.topic(place.topic)
            named[topic.partitions[place.partition]] = place
        if not named:
            return {}
        rows = await self.cluster.ask_leaders(
            "DescribeProducers",
            {
                partition: common.TopicPartition(
                    topic=place.topic, topic_id=partition.topic_id.bytes, partition=place.partition
                )
                for partition, place in named.items()
            },
            lambda asked: log_pb2.DescribeProducersRequest(partitions=asked),
            topics=sorted({place.topic for place in partitions}),
            timeout_ms=self._remaining_ms(),
        )
        return {place: rows[partition] for partition, place in named.items()}

    async def _known_to_coordinators(self, producer_ids: set[int]) -> set[tuple[int, TopicPartition]]:
        """Producer and partition of every transaction of these that a coordinator has open, or is ending."""
        known: set[tuple[int, TopicPartition]] = set()
        wanted = sorted(producer_ids)
        for start in range(0, len(wanted), _IDS_PER_REQUEST):
            part = wanted[start : start + _IDS_PER_REQUEST]
            listed = await self.list_transactions(producer_ids=part)
            names = [
                row.transactional_id for row in listed if row.state in ("Ongoing", "PrepareCommit", "PrepareAbort")
            ]
            described = await self.describe_transactions(names, partial=True)
            for error in described.errors.values():
                if error.code is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                    raise error
            for row in described.succeeded.values():
                known |= {(row.producer_id, place) for place in row.partitions}
                known |= {(member.producer_id, place) for member in row.members for place in member.partitions}
        return known


def _read_states(states: Iterable[str]) -> list[str]:
    by_name = {state.lower(): state for state in STATES}
    names = read_names(states, "states")
    unknown = [name for name in names if name.lower() not in by_name]
    if unknown:
        raise InvalidRequestError(f"no state {unknown[0]!r}: use {', '.join(STATES)}")
    return [by_name[name.lower()] for name in names]


def _read_ids(producer_ids: Iterable[int]) -> list[int]:
    checked = list(producer_ids)
    if not all(type(one) is int for one in checked):
        raise InvalidRequestError("producer ids are integers")
    return checked


def _read_duration(duration: Duration) -> int:
    """In ms."""
    ms: int | None = None
    if isinstance(duration, timedelta):
        ms = round(duration.total_seconds() * 1000)
    elif isinstance(duration, str):
        ms = duration_ms(duration)
    elif type(duration) is int:
        ms = duration
    if ms is None or ms < 0:
        raise InvalidRequestError(f"{duration!r} is no duration: use text like 15m, a timedelta, or ms")
    return ms
