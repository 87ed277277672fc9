"""Finds the transactional id whose open transaction has a producer's partition, by asking every broker.

    asked      each live broker, this one included
    answers    the partitions of `__transaction_state` that it leads, with their leader epochs, and the id if it has it
    complete   each partition of the topic is in an answer, in the leader epoch of this broker's metadata or a later one

An incomplete search is COORDINATOR_NOT_AVAILABLE: retry. Without the topic there is no transaction.

Limits: the time of all answers (`SEARCH_S`). A broker scans its ids in slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tidelog.coordinator.transactions.peers import TRANSACTIONS_TOPIC
from tidelog.coordinator.transactions.queries import has_open
from tidelog.coordinator.transactions.shard import TransactionShard
from tidelog.coordinator.transactions.wire import (
    FIND_OPEN,
    FindOpen,
    FoundOpen,
    decode_find_open,
    decode_found_open,
    encode_find_open,
    encode_found_open,
)
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import RequestTimedOutError, TidelogError
from tidelog.model.group_errors import CoordinatorNotAvailableError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.model.maps import sorted_items
from tidelog.world.slicing import sliced
from tidelog.world.transport import Transport

SEARCH_S = 5.0
IDS_PER_SLICE = 500


class OpenTransactionSearch:
    """`leading` returns the shards that this broker leads now."""

    def __init__(
        self, leading: Callable[[], Iterable[TransactionShard]], tail: MetadataTail, transport: Transport
    ) -> None:
        self._leading = leading
        self._tail = tail
        self._transport = transport

    def start(self) -> None:
        self._transport.serve(FIND_OPEN, self._serve)

    async def find(self, producer_id: int, partition: PartitionId) -> str | None:
        """Return the id whose open or ending transaction has the partition for this producer; None if no coordinator
        has one."""
        topic = self._tail.image.topic_named(TRANSACTIONS_TOPIC)
        if topic is None:
            return None
        request = FindOpen(producer_id=producer_id, topic_id=partition.topic_id, partition=partition.partition)
        brokers = [NodeId(number) for number, broker in sorted_items(self._tail.image.brokers) if not broker.fenced]
        replies = await asyncio.gather(*(self._ask(broker, request) for broker in brokers))
        answers = [reply for reply in replies if isinstance(reply, FoundOpen)]
        holders = [answer.transactional_id for answer in answers if answer.transactional_id]
        if holders:
            return holders[0]
        epochs: dict[int, int] = {}
        for number, epoch in (shard for answer in answers for shard in answer.shards):
            epochs[number] = max(epoch, epochs.get(number, epoch))
        missing = [
            number
            for number, state in sorted_items(topic.partitions)
            if number not in epochs or epochs[number] < state.leader_epoch
        ]
        if missing:
            reasons = [str(reply) for reply in replies if not isinstance(reply, FoundOpen)]
            raise CoordinatorNotAvailableError(
                f"partition {missing[0]} of {TRANSACTIONS_TOPIC} has no coordinator that answers: whether producer"
                f" {producer_id} has a transaction is not known: {reasons[0] if reasons else 'retry'}"
            )
        return None

    async def _ask(self, broker: NodeId, request: FindOpen) -> FoundOpen | TidelogError:
        try:
            async with asyncio.timeout(SEARCH_S):
                if broker == self._transport.me:
                    return await self._find_here(request)
                timeout_ms = int(SEARCH_S * 1000)
                data = await self._transport.call(broker, FIND_OPEN, encode_find_open(request), timeout_ms=timeout_ms)
                return decode_found_open(data)
        except TimeoutError:
            return RequestTimedOutError(f"broker {broker} has not answered in {SEARCH_S:g} s")
        except TidelogError as error:
            return error

    async def _serve(self, _broker: NodeId, data: bytes) -> bytes:
        return encode_found_open(await self._find_here(decode_find_open(data)))

    async def _find_here(self, request: FindOpen) -> FoundOpen:
        partition = PartitionId(TopicId(request.topic_id), request.partition)
        shards: list[tuple[int, int]] = []
        for shard in list(self._leading()):
            async for transactional_id, transaction in sliced(shard.state.ids.items(), IDS_PER_SLICE):
                if has_open(transaction, request.producer_id, partition):
                    return FoundOpen(transactional_id=transactional_id)
            if shard.is_leading:
                shards.append((shard.number, shard.leader.leader_epoch))
        return FoundOpen(shards=tuple(shards))
