"""A shard with as many transactional ids as it may have: it holds up neither the event loop nor itself."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.async_tests import asyncio_test
from support.transactions.lone_shard import lead, lone_shard, longest_turn_s, state_of

from tidelog.coordinator import timers
from tidelog.coordinator.transactions import shard as shards
from tidelog.coordinator.transactions.records import Status
from tidelog.coordinator.transactions.requests import Prepare

COUNT = 80_000
TURN_S = 0.025
"""CPU seconds. A turn takes a tenth of that; one that sorts or scans all ids takes several times that."""


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
