"""Transactions on brokers: decisions that outlive their coordinator, markers that reach every partition, timeouts."""

from __future__ import annotations

import asyncio
import re

import pytest
from support.brokers.cluster import RunningBroker
from support.transactions.cluster import TransactionCluster

from tidelog.services.context import INTERNAL


@pytest.mark.requirement("a:H-30")
@pytest.mark.requirement("a:U-06")
def test_a_commit_makes_records_of_all_partitions_visible_and_an_abort_none() -> None:
    with TransactionCluster(seed=1, orders=3) as cluster:
        app = cluster.owner("app")
        for number in range(3):
            app.send(("orders", number), b"one")
        assert cluster.committed_values(("orders", 0)) == []
        before = app.epoch
        app.end()
        assert app.epoch == before + 1
        cluster.until_idle("app")
        assert [cluster.committed_values(("orders", number)) for number in range(3)] == [[b"one"]] * 3
        app.send(("orders", 0), b"two")
        app.end(is_commit=False)
        cluster.until_idle("app")
        assert cluster.last_stable(("orders", 0)) == (4, 4)
        shard = cluster.shard_of("app")
        assert cluster.replayed_state(shard) == shard.state


def test_the_log_says_who_has_aborted_a_transaction_that_its_owner_has_not_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="tidelog.coordinator.transactions.shard")
    with TransactionCluster(seed=4, orders=1) as cluster:
        app = cluster.owner("app", timeout_ms=2_000)
        app.send(("orders", 0), b"of no interest")
        app.end(is_commit=False)
        cluster.until_idle("app")
        app.send(("orders", 0), b"slow")
        cluster.world.run_for(3)
        cluster.until_idle("app")
        app.init()
        app.send(("orders", 0), b"left open")
        cluster.owner("app")
        cluster.until_idle("app")
        app.init()
        app.send(("orders", 0), b"aborted")
        assert cluster.call(cluster.coordinator_of("app"), lambda service: service.abort(INTERNAL, "app"))
        cluster.until_idle("app")
    found = [re.sub(r"\d+\.\d", "N", record.getMessage()) for record in caplog.records]
    assert found == [
        "transactional_id=app number=2 is aborted after N s: its timeout",
        "transactional_id=app number=3 is aborted after N s: another instance has initialized the id",
        "transactional_id=app number=4 is aborted after N s: an operator",
    ]


def test_a_transaction_that_follows_at_once_begins_in_the_append_that_completes_the_one_before() -> None:
    with TransactionCluster(seed=2, orders=1) as cluster:
        app = cluster.owner("app")
        app.send(("orders", 0), b"one")
        shard = cluster.shard_of("app")
        before = shard.runtime.appends
        for number in range(5):
            app.end()
            app.send(("orders", 0), b"%d" % number)  # its leader asks while the markers are on their way
        assert shard.runtime.appends - before <= 10, "one for each decision, one for each end with the next begin"
        app.end()
        cluster.until_idle("app")
        assert cluster.last_stable(("orders", 0)) == (12, 12)
        assert cluster.replayed_state(shard) == shard.state


def test_nothing_is_left_of_a_wait_for_an_end_that_is_over() -> None:
    with TransactionCluster(seed=3, orders=1) as cluster:
        app = cluster.owner("app")
        app.send(("orders", 0), b"one")
        shard, leader = cluster.shard_of("app"), cluster.leading(cluster.partition_id("orders", 0))
        leader.is_paused = True  # it takes no marker
        app.end()

        async def job(_: RunningBroker) -> list[object]:
            loop = asyncio.get_running_loop()
            late = asyncio.ensure_future(shard.wait_for_end("app", loop.time() + 60))
            cancelled = asyncio.ensure_future(shard.wait_for_end("app", loop.time() + 60))
            timed_out = await shard.wait_for_end("app", loop.time() + 0.1)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            leader.is_paused = False
            return [timed_out, cancelled.cancelled(), await late, len(shard._waiting)]

        assert cluster.on_broker(cluster.coordinator_of("app"), job) == [False, True, True, 0]
        cluster.until_idle("app")
