"""Transactions on brokers: decisions that outlive their coordinator, markers that reach every partition, timeouts."""

from __future__ import annotations

import pytest
from support.transactions.cluster import TransactionCluster


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
