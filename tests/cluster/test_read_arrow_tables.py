"""What `tidelog.read_arrow` gives goes to pandas and to DuckDB as it is."""

from __future__ import annotations

from typing import Any

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster

pytest.importorskip("pyarrow")
START_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def orders(cluster: LocalCluster) -> Any:
    with tidelog.Admin(cluster.bootstrap) as admin, tidelog.Producer(cluster.bootstrap) as producer:
        admin.create_topic("arrow-orders", partitions=2, replication_factor=1, configs={"retention.ms": -1})
        for number in range(100):
            producer.send(
                "arrow-orders",
                None if number == 99 else b"%d" % number,
                key=b"even" if number % 2 == 0 else b"odd",
                partition=number % 2,
                headers={"n": b"%d" % number},
                timestamp_ms=START_MS + number,
            )
    return tidelog.read_arrow("arrow-orders", bootstrap=cluster.bootstrap)


def test_pandas_takes_it(orders: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = orders.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    assert frame.groupby("key").size().to_dict() == {b"even": 50, b"odd": 50}
    last = frame[frame["value"].isna()].iloc[0]
    assert (last["partition"], last["offset"], last["key"]) == (1, 49, b"odd")
    assert frame["timestamp"].max() == pandas.Timestamp(START_MS + 99, unit="ms", tz="UTC")


def test_duckdb_takes_it(orders: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as database:
        database.register("orders", orders)
        rows = database.execute(
            'select "partition", count(*), count(value), max("offset"), sum(cast(decode(value) as int)) '
            "from orders group by all order by all"
        ).fetchall()
        assert rows == [(0, 50, 50, 49, sum(range(0, 100, 2))), (1, 50, 49, 49, sum(range(1, 99, 2)))]
        asked = "select epoch_ms(min(timestamp)), count(distinct key) from orders"
        assert database.execute(asked).fetchone() == (START_MS, 2)
