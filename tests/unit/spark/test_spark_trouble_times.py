"""Times before 1970, and options of Spark's Kafka source that would do harm or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

import tidelog
from tidelog.client.errors import OptionError
from tidelog.spark.batch_plan import plan_batch
from tidelog.spark.options import SourceOptions, source_options
from tidelog.spark.pushdown import Narrowing
from tidelog.testing import MemoryCluster

EARLY = [
    datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),  # -1 ms: "the end" to a broker
    datetime(1969, 12, 31, 23, 59, 59, 998_000, tzinfo=UTC),  # -2 ms: "the beginning"
    datetime(1969, 12, 31, 23, 59, 59, 999_900, tzinfo=UTC),
    datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=1))),
    datetime(1900, 1, 1, tzinfo=UTC),
    datetime(1, 1, 1, tzinfo=UTC),
]


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryCluster]:
    with MemoryCluster(seed=11) as cluster, tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("a", partitions=1)
        with tidelog.Producer(cluster.bootstrap) as producer:
            producer.send_many("a", values=["x"] * 10).result(30)
        yield cluster


def batch(memory: MemoryCluster, **options: str) -> SourceOptions:
    given = {"bootstrap.servers": memory.bootstrap, "subscribe": "a", **options}
    return source_options(given, is_streaming=False, now_ms=1_700_000_000_000)


@pytest.mark.parametrize("when", EARLY)
def test_a_filter_by_a_time_before_1970_reads_all(memory: MemoryCluster, when: datetime) -> None:
    narrowing = Narrowing()
    narrowing.take("timestamp", ">", when)
    ((one,),) = plan_batch(batch(memory), narrowing)
    assert (one.start, one.end) == (0, 10)


@pytest.mark.parametrize("when", EARLY)
def test_a_read_from_a_time_before_1970_on_reads_all(memory: MemoryCluster, when: datetime) -> None:
    ((one,),) = plan_batch(batch(memory, startingTimestamp=when.isoformat()), Narrowing())
    assert (one.start, one.end) == (0, 10)


@pytest.mark.parametrize(("micros", "millis"), [(0, 0), (999, 0), (1_000, 1), (1_999, 1)])
def test_a_filter_by_time_is_rounded_down(micros: int, millis: int) -> None:
    """To a later millisecond rows would be lost that Spark wants to see."""
    narrowing = Narrowing()
    narrowing.take("timestamp", ">=", datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros))
    assert narrowing.since_ms == 1_767_225_600_000 + millis


def test_a_member_of_a_group_is_refused_for_what_it_is(memory: MemoryCluster) -> None:
    with pytest.raises(OptionError, match=r"group\.instance\.id='i': a query does not join a group"):
        batch(memory, **{"kafka.group.instance.id": "i"})
