"""Transactions in the simulator: a whole cluster, and an owner that calls the services of its brokers.

with TransactionCluster(seed=1, orders=3) as cluster:
    app = cluster.owner("app")
    app.send(("orders", 0), b"one")
    app.end()                                            # committed; returns when the decision is durable
    assert cluster.committed_values(("orders", 0)) == [b"one"]
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from support.brokers import data_requests
from support.brokers.cluster import RunningBroker, values_of
from support.brokers.transactions import transactional
from support.groups.cluster import BROKERS, GroupCluster
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.loading import Progress, load
from tidelog.coordinator.transactions.invariants import validate
from tidelog.coordinator.transactions.records import Transaction
from tidelog.coordinator.transactions.requests import EndReply, InitReply
from tidelog.coordinator.transactions.shard import TRANSACTIONS, TransactionShard
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.services.context import INTERNAL
from tidelog.services.fetch import READ_COMMITTED, FetchItem
from tidelog.services.produce import ProduceItem
from tidelog.services.transaction_requests import EndTransaction, InitTransactions
from tidelog.services.transactions import TransactionService

T = TypeVar("T")

TRANSACTIONS_TOPIC = "__transaction_state"


class TransactionCluster(GroupCluster):
    """Three controllers, three brokers; `__transaction_state` has few partitions."""

    def __init__(self, seed: int, *, transaction_partitions: int = 1, **more: Any) -> None:
        super().__init__(seed, **more)
        self._transaction_partitions = transaction_partitions

    def __enter__(self) -> TransactionCluster:
        super().__enter__()
        self.set_cluster("transaction.state.log.num.partitions", str(self._transaction_partitions))
        return self

    def __exit__(self, *details: Any) -> None:
        if details[0] is None:
            for broker in self.brokers.values():
                for shard in broker.broker.transactions.shards.values():
                    shard.validate()
                    validate(shard.state)
        super().__exit__(*details)

    # Coordinators.

    def ask_owner(
        self,
        transactional_id: str,
        job: Callable[[TransactionService], Coroutine[Any, Any, T]],
        *,
        timeout: float = 60,
    ) -> T:
        """Call the service of the id's coordinator, again while its error is retriable."""
        end_s = self.now_s() + timeout
        last: TidelogError | None = None
        while self.now_s() < end_s:
            try:
                return self.call(self.coordinator_of(transactional_id), job)
            except TidelogError as error:
                if not error.retriable:
                    raise
                last = error
            self.world.run_for(0.05)
        raise AssertionError(f"no answer in {timeout} s: {last!r}")

    def call(self, broker: int, job: Callable[[TransactionService], Coroutine[Any, Any, T]]) -> T:
        async def work(found: RunningBroker) -> T:
            return await job(found.broker.api.transactions)

        return self.on_broker(broker, work)

    def coordinator_of(self, transactional_id: str, timeout: float = 30) -> int:
        end_s = self.now_s() + timeout
        last: object = None
        while self.now_s() < end_s:
            try:
                (found,) = self.call(
                    next(iter(self.brokers)), lambda service: service.find_coordinators(INTERNAL, [transactional_id])
                )
            except TidelogError as error:
                found = error
            if isinstance(found, int) and NodeId(found) in self.brokers:
                return found
            last = found
            self.world.run_for(0.05)
        raise AssertionError(f"{transactional_id} has no coordinator: {last!r}")

    def shards_of(self, transactional_id: str) -> list[TransactionShard]:
        """That lead."""
        number = partition_for(transactional_id, self._transaction_partitions)
        return [
            shard
            for broker in self.brokers.values()
            for shard in broker.broker.transactions.leading_shards()
            if shard.number == number
        ]

    def shard_of(self, transactional_id: str) -> TransactionShard:
        """Of the coordinator, once it leads."""
        self.coordinator_of(transactional_id)
        self.until(lambda: len(self.shards_of(transactional_id)) == 1, timeout=30)
        return self.shards_of(transactional_id)[0]

    def states_of(self, transactional_id: str) -> list[Transaction]:
        """What the coordinator has committed; empty while none leads, or if it is unknown there."""
        known = [shard.state.get(transactional_id) for shard in self.shards_of(transactional_id)]
        return [each for each in known if each is not None]

    def state_of(self, transactional_id: str) -> Transaction:
        self.until(lambda: len(self.states_of(transactional_id)) == 1, timeout=30)
        return self.states_of(transactional_id)[0]

    def until_idle(self, transactional_id: str, timeout: float = 30) -> Transaction:
        """Until no transaction of the id is open or ending."""

        def is_idle() -> bool:
            states = self.states_of(transactional_id)
            return len(states) == 1 and not (states[0].is_open or states[0].is_ending)

        self.until(is_idle, timeout=timeout)
        return self.state_of(transactional_id)

    def replayed_state(self, shard: TransactionShard) -> TransactionsState:
        """The state that a new coordinator would load."""

        async def read(_: RunningBroker) -> TransactionsState:
            return (await load(shard.leader, Progress(), TRANSACTIONS))[0]

        return self.on_broker(shard.leader.replica.partition.leader, read)

    def state_partition(self, transactional_id: str) -> PartitionId:
        return self.partition_id(TRANSACTIONS_TOPIC, partition_for(transactional_id, self._transaction_partitions))

    # Data.

    def partition_id(self, topic: str, number: int) -> PartitionId:
        return PartitionId(self.image().topic_ids[topic], number)  # type: ignore[arg-type]

    def committed_values(self, where: tuple[str, int]) -> list[bytes]:
        """What a reader of committed data gets."""
        partition = self.partition_id(*where)

        async def read(found: RunningBroker) -> list[bytes]:
            (result,) = await data_requests.fetch(
                found.service, [FetchItem(partition, 0, bytes_max=1 << 20)], isolation=READ_COMMITTED
            )
            assert result.error is None, result.error
            return values_of(result.data) if not result.aborted else ["aborted"]  # type: ignore[list-item]

        return self.on_broker(self.leader(partition), read)

    def last_stable(self, where: tuple[str, int]) -> tuple[int, int]:
        """(last stable offset, high watermark) of the leader."""
        leading = self.leading(self.partition_id(*where))
        return leading.log.last_stable_offset(leading.high_watermark), leading.high_watermark

    def owner(self, transactional_id: str, **more: Any) -> Owner:
        made = Owner(self, transactional_id, **more)
        made.init()
        return made

    def others_than(self, broker: int) -> list[int]:
        return [other for other in BROKERS if other != broker]


class Owner:
    """The simplest transactional producer, of protocol version 2."""

    def __init__(self, cluster: TransactionCluster, transactional_id: str, *, timeout_ms: int = 60_000) -> None:
        self.cluster = cluster
        self.transactional_id = transactional_id
        self.timeout_ms = timeout_ms
        self.producer_id = -1
        self.epoch = -1
        self._sequences: dict[tuple[str, int], int] = {}

    def init(self, **more: Any) -> InitReply:
        request = InitTransactions(transactional_id=self.transactional_id, timeout_ms=self.timeout_ms, **more)
        reply = self.cluster.ask_owner(self.transactional_id, lambda service: service.init(INTERNAL, request))
        self._uses(reply.producer_id, reply.epoch)
        return reply

    def _uses(self, producer_id: int, epoch: int) -> None:
        self.producer_id, self.epoch = producer_id, epoch
        self._sequences.clear()

    def send(self, where: tuple[str, int], value: bytes, *, timeout: float = 30) -> None:
        """One record, acknowledged; again while its error is retriable."""
        cluster, end_s = self.cluster, self.cluster.now_s() + timeout
        data = transactional(value, self.producer_id, self.epoch, self._sequences.get(where, 0))
        partition = cluster.partition_id(*where)

        async def work(found: RunningBroker) -> TidelogError | None:
            (result,) = await data_requests.produce(
                found.service, [ProduceItem(partition, data)], transactional_id=self.transactional_id
            )
            return result.error

        while True:
            error = cluster.on_broker(cluster.leader(partition), work)
            if error is None:
                self._sequences[where] = self._sequences.get(where, 0) + 1
                return
            if not error.retriable or cluster.now_s() > end_s:
                raise error
            cluster.world.run_for(0.05)

    def end(self, *, is_commit: bool = True, **more: Any) -> EndReply:
        request = EndTransaction(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            epoch=self.epoch,
            is_commit=is_commit,
            **more,
        )
        reply = self.cluster.ask_owner(self.transactional_id, lambda service: service.end(INTERNAL, request))
        self._uses(reply.producer_id, reply.epoch)
        return reply
