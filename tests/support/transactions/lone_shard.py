"""A shard of transactional ids on a leader without replicas: what it appends is committed at once.

shard, host = lone_shard()
lead(shard, state)                    # as if it had loaded this state
await shard._begin(state)             # what the coordinator does next
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.timers import Timers
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.marker_sender import EndingTransaction
from tidelog.coordinator.transactions.records import Transaction, TransactionRecord
from tidelog.coordinator.transactions.shard import TransactionCounts, TransactionShard
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState, apply
from tidelog.log.batch_header import read_header
from tidelog.model.ids import Epoch, NodeId, Offset, PartitionId, TopicId
from tidelog.replication.tasks import ReplicaTasks
from tidelog.replication.transaction_messages import Marker
from tidelog.replication.waiters import AckWaiters

ME = NodeId(11)


class InstantLeader:
    """A `LeaderReplica` without followers or a disk."""

    def __init__(self) -> None:
        self.appends = 0
        self.leader_epoch = 1
        self.high_watermark = Offset(0)
        self.acks = AckWaiters()
        self.log = SimpleNamespace(path="__transaction_state-0", start_offset=Offset(0), end_offset=Offset(0))
        self.state = SimpleNamespace(is_superseded=False, is_confirmed=True, check_acks=lambda _acks: None)
        self.replica = SimpleNamespace(
            partition_id=PartitionId(TopicId(UUID(int=5)), 0),
            partition=SimpleNamespace(leader=int(ME), leader_epoch=1),
            role=self,
        )

    def append(self, data: bytes, *, is_coordinator: bool) -> Any:
        assert is_coordinator, "only coordinators write here"
        self.appends += 1
        last = Offset(self.log.end_offset + read_header(data).last_offset_delta)
        self.log.end_offset = self.high_watermark = Offset(last + 1)
        return SimpleNamespace(last_offset=last)


class InstantSender:
    """Every marker is written at once."""

    def __init__(self) -> None:
        self.begun: list[EndingTransaction] = []

    def begin(self, ending: EndingTransaction, markers: Iterable[Marker], count: int) -> None:
        self.begun.append(ending)
        ending.on_written(ending)

    def end(self, ending: EndingTransaction) -> None:
        ending.is_over = True


class LoneHost:
    """Implements `TransactionHost`."""

    def __init__(self, *, waiting_max: int = 10_000) -> None:
        self.me = ME
        self.timers = Timers()
        self.waiting_max = waiting_max
        self.load_slots = asyncio.Semaphore(1)
        self.limits = TransactionLimits()
        self.sender: Any = InstantSender()
        self.transactions = TransactionCounts()
        self.expiration_ms = 1_000
        self.crashes: list[BaseException] = []
        self.tasks = ReplicaTasks(ME, self.crashes.append)
        self.most_tasks = 0
        self.clock_ms: Callable[[], int] = lambda: 1_000_000
        self._ids = 1_000_000

    def now_ms(self) -> int:
        return self.clock_ms()

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = self.tasks.spawn(work, name=name)
        self.most_tasks = max(self.most_tasks, len(self.tasks))
        return task

    def failed(self, error: BaseException) -> None:
        self.crashes.append(error)

    def report_corruption(self, leader: Any, offset: int) -> None:
        raise AssertionError(f"no disk, and corruption at {offset}")

    def loaded(self, shard: Any, seconds: float, records: int) -> None: ...

    async def new_producer_id(self) -> int:
        self._ids += 1
        return self._ids


def lone_shard(**host: Any) -> tuple[TransactionShard, LoneHost]:
    made = LoneHost(**host)
    return TransactionShard(made, InstantLeader()), made  # type: ignore[arg-type]


def lead(shard: TransactionShard, state: TransactionsState) -> None:
    shard.runtime.load(state, Offset(0))
    shard.runtime.lead(Epoch(1), ME)
    shard.phase = Phase.LEADING


def state_of(count: int, **fields: Any) -> TransactionsState:
    """That many transactional ids."""
    return apply(
        EMPTY,
        (
            TransactionRecord(f"id-{number:06}", Transaction(producer_id=number, timeout_ms=60_000, **fields))
            for number in range(count)
        ),
    )


async def longest_turn_s(work: Coroutine[Any, Any, None], clock: Callable[[], float]) -> float:
    """Run it, one turn of the event loop after another; return the longest."""
    longest = 0.0
    while True:
        began = clock()
        try:
            waited = work.send(None)
        except StopIteration:
            return max(longest, clock() - began)
        longest = max(longest, clock() - began)
        if waited is None:
            await asyncio.sleep(0)
        else:
            waited._asyncio_future_blocking = False
            await asyncio.wait([waited])
