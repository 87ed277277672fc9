"""A shard with as many transactional ids as it may have: it holds up neither the event loop nor itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from support.async_tests import asyncio_test
from support.transactions.lone_shard import lead, lone_shard, longest_turn_s, state_of
from support.transactions.machine import partition

from tidelog.coordinator import timers
from tidelog.coordinator.background_work import BackgroundWork
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.loading import Progress, load
from tidelog.coordinator.machine import GroupMachine
from tidelog.coordinator.records import FenceValue, GroupRecord, encode_batch, fence_key, pack_partitions
from tidelog.coordinator.requests import EndPendingOffsets
from tidelog.coordinator.state import EMPTY as NO_GROUPS
from tidelog.coordinator.state import apply as apply_groups
from tidelog.coordinator.transactions import records
from tidelog.coordinator.transactions import shard as shards
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.records import Member, Status, Transaction, TransactionRecord, decision
from tidelog.coordinator.transactions.requests import Join, Prepare
from tidelog.coordinator.transactions.shard import TRANSACTIONS
from tidelog.coordinator.transactions.state import EMPTY, apply
from tidelog.log.batch_header import read_header
from tidelog.model.ids import Offset, PartitionId

COUNT = 80_000
TURN_S = 0.025
"""CPU seconds. A turn takes a tenth of that; one that sorts or scans all ids takes several times that."""


class LoadableLeader:
    """With one batch in its log."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.high_watermark = read_header(data).next_offset
        self.log = SimpleNamespace(start_offset=0, end_offset=self.high_watermark, read=self._read)

    async def _read(self, _offset: int, **_limits: int) -> Any:
        return SimpleNamespace(data=self._data)


@asyncio_test
async def test_a_shard_begins_to_lead_in_short_turns() -> None:
    shard, _ = lone_shard()
    state = state_of(COUNT, updated_ms=1_000_000)
    lead(shard, state)
    assert await longest_turn_s(shard._begin(state), time.thread_time) < TURN_S


@asyncio_test
async def test_ids_are_forgotten_in_short_turns() -> None:
    shard, host = lone_shard()
    lead(shard, state_of(COUNT, updated_ms=1_000_000))
    assert await longest_turn_s(shard._forget_idle(), time.thread_time) < TURN_S
    assert len(shard.state.ids) == COUNT
    lead_again = state_of(3_000, updated_ms=1_000_000 - host.expiration_ms)
    shard.runtime.follow(None)
    lead(shard, lead_again)
    assert await longest_turn_s(shard._forget_idle(), time.thread_time) < TURN_S
    assert len(shard.state.ids) == 0


@asyncio_test
async def test_transactions_that_are_due_at_the_same_time_are_aborted_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards, "TIMEOUTS_MAX", 10)
    monkeypatch.setattr(timers, "DUE_MAX", 20)
    shard, host = lone_shard()
    state = state_of(500, status=int(Status.ONGOING), started_ms=1_000_000 - 60_000, number=1)
    lead(shard, state)
    await shard._begin(state)
    async with asyncio.timeout(20):
        while host.transactions.timeouts < 500 or len(host.tasks):
            await asyncio.wait(host.tasks._tasks or [asyncio.ensure_future(asyncio.sleep(0.01))])
    assert host.crashes == []
    assert host.most_tasks <= 10 + shards.COMPLETIONS_MAX
    assert {transaction.status for transaction in shard.state.ids.values()} == {Status.COMPLETE_ABORT}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@asyncio_test
async def test_a_transaction_that_is_prepared_while_its_abort_waits_is_not_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "TIMEOUTS_MAX", 0)
    shard, host = lone_shard()
    state = state_of(2, status=int(Status.ONGOING), started_ms=1_000_000 - 60_000, number=1)
    lead(shard, state)
    await shard._begin(state)
    await asyncio.sleep(0.01)
    await shard.submit(Prepare(transactional_id="id-000001", producer_id=1, epoch=0, now_ms=1_000_000))
    monkeypatch.setattr(shards, "TIMEOUTS_MAX", 10)
    shard._time_out_overdue()
    await asyncio.wait(host.tasks._tasks)
    assert [shard.state.ids[name].is_open for name in ("id-000000", "id-000001")] == [False, True]
    assert host.crashes == []


def one_large_id(**fields: Any) -> Transaction:
    return Transaction(
        producer_id=1, status=int(Status.ONGOING), timeout_ms=60_000, started_ms=1, updated_ms=1, number=1, **fields
    )


@asyncio_test
async def test_records_with_many_partitions_are_loaded_in_short_turns() -> None:
    """Each partition that a transaction adds writes a record with all of them."""
    partitions = frozenset(partition(number) for number in range(10_000))
    made = decision([TransactionRecord("app", one_large_id(partitions=partitions))])
    data = encode_batch([made] * 60)
    leader = LoadableLeader(data)
    longest = await longest_turn_s(load(leader, Progress(), TRANSACTIONS), time.thread_time)  # type: ignore[arg-type]
    assert longest < 4 * TURN_S, "a few records; all of them take 20 times that"


def test_a_member_joins_10_000_others_and_only_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Iterable[PartitionId]] = []
    pack = pack_partitions

    def pack_and_count(partitions: Iterable[PartitionId]) -> list[Any]:
        packed.append(partitions)
        return pack(partitions)

    monkeypatch.setattr(records, "pack_partitions", pack_and_count)
    members = tuple(Member(100 + number, f"task-{number}", frozenset([partition(number)])) for number in range(9_990))
    state = apply(EMPTY, [TransactionRecord("app", one_large_id(members=members))])
    machine = TransactionMachine()
    for number in range(5):
        join = Join(transactional_id="app", now_ms=2, new_producer_id=50_000 + number)
        decisions, _reply = machine.decide(state, join, offset=Offset(0))
        state = machine.apply(state, decisions)
        assert machine.replay(EMPTY, machine.encode(decisions)[0]) == state
        assert len(packed) < 10 or number == 0, "all of them take 40 ms"
        packed.clear()


class FencedShard:
    """A shard of groups with fences only, whose changes commit at once."""

    def __init__(self, count: int) -> None:
        self.machine = GroupMachine(GroupLimits(fences_max=count))
        fence = FenceValue(epoch=1, number=1, coordinator_epoch=1, updated_ms=0)
        self.state = apply_groups(NO_GROUPS, (GroupRecord(fence_key(number), fence) for number in range(count)))
        self.decided: dict[str, None] = {}
        self.is_leading = True
        self.number = 0

    async def submit(self, request: Any, *, is_own: bool = False) -> Any:
        decisions, reply = self.machine.decide(self.state, request, offset=Offset(0))
        self.state = self.machine.apply(self.state, decisions)
        await asyncio.sleep(0)
        return reply


@asyncio_test
async def test_fences_of_producers_are_forgotten_in_short_turns() -> None:
    for count, now_ms, left in ((COUNT, 999, COUNT), (5_000, 1_000, 0)):
        works: list[Any] = []
        shard = FencedShard(count)
        host: Any = SimpleNamespace(me=11, fences_retention_ms=1_000, offsets_retention_ms=1_000)
        host.now_ms, host.spawn = (lambda now_ms=now_ms: now_ms), (lambda work, name, works=works: works.append(work))
        background = BackgroundWork(shard, host)  # type: ignore[arg-type]
        background.expire_offsets()
        assert await longest_turn_s(works.pop(), time.thread_time) < TURN_S
        assert len(shard.state.fences) == left


@asyncio_test
async def test_a_marker_with_a_full_table_of_fences_takes_a_short_turn() -> None:
    shard = FencedShard(COUNT)
    marker = EndPendingOffsets(
        producer_id=COUNT, epoch=1, number=1, coordinator_epoch=1, is_commit=True, is_strict=True, now_ms=1
    )
    assert await longest_turn_s(shard.submit(marker), time.thread_time) < TURN_S
    assert COUNT - 100 < len(shard.state.fences) < COUNT
    assert COUNT in shard.state.fences
