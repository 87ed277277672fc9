"""A streaming query while brokers die, fall silent and are cut off: the whole source, on a cluster in this process."""

# ruff: noqa: E402 - Spark may not be there

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import until
from spark_there import need

need("pyspark", by=__name__)

from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructField, StructType

import tidelog
from tidelog.model.errors import TidelogError
from tidelog.spark import driver as driver_module
from tidelog.spark.options import source_options
from tidelog.spark.source import StreamSource
from tidelog.testing import MemoryCluster

VALUE = StructType([StructField("value", BinaryType())])
_names = itertools.count(1)

Ends = dict[tuple[str, int], int]


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    """One for each test: they break it."""
    with MemoryCluster(seed=11) as cluster:
        yield cluster


class Query:
    """The calls that Spark makes. Documents pass through JSON, as in a checkpoint."""

    def __init__(self, memory: MemoryCluster, start: Any = None, /, **options: str) -> None:
        # A client of its own, as a process of its own would have.
        given = {"bootstrap.servers": memory.bootstrap, "client.id": f"query-{next(_names)}"}
        given |= {key.replace("__", "."): one for key, one in options.items()}
        self.source = StreamSource(source_options(given, is_streaming=True, now_ms=1_700_000_000_000), VALUE)
        self.start = start

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.stop()
        self.source._driver().access.close()

    def step(self) -> bool:
        """Whether there was a batch."""
        if self.start is None:
            self.start = self.source.initialOffset()
        found = json.loads(json.dumps(self.source.latestOffset(self.start, ReadAllAvailable())))
        is_new = found != self.start
        self.start = found
        return bool(is_new)

    def ends(self) -> Ends:
        return {
            (topic, int(number)): mark[0]
            for topic, rows in self.start["t"].items()
            for number, mark in rows["p"].items()
        }

    def until_at(self, wanted: Ends) -> None:
        self.ask_until(lambda: self.ends() == wanted, f"the query is at {wanted}")

    def ask_until(self, condition: Callable[[], bool], what: str) -> None:
        """As Spark asks: an error ends the query."""
        errors: list[BaseException] = []

        def there() -> bool:
            try:
                self.step()
            except BaseException as error:
                errors.append(error)
            return bool(errors) or condition()

        until(there, what)
        if errors:
            raise errors[0]


def make(memory: MemoryCluster, topic: str, *, partitions: int = 1, records: int = 0, copies: int = 3) -> None:
    with tidelog.Admin(memory.bootstrap) as admin:
        admin.create_topic(topic, partitions=partitions, replication_factor=copies)
    for partition in range(partitions):
        memory.wait_in_sync(topic, partition)
        send(memory, topic, records, partition=partition)


def send(memory: MemoryCluster, topic: str, count: int, *, partition: int = 0, bootstrap: str = "") -> None:
    if count:
        with tidelog.Producer(bootstrap or memory.bootstrap) as producer:
            producer.send_many(topic, values=["x"] * count, partition=partition).result(30)


def failing(query: Query) -> object:
    return query.source._driver().failing_s()


def test_a_query_lives_on_when_a_broker_is_lost(memory: MemoryCluster) -> None:
    make(memory, "a", partitions=2, records=5)
    with Query(memory, subscribe="a", startingOffsets="earliest", metadata__max__age__ms="200") as query:
        query.until_at({("a", 0): 5, ("a", 1): 5})
        memory.kill_leader("a")
        until(lambda: failing(query) is not None, "the watch notices")
        assert not query.step()
        send(memory, "a", 3)
        query.until_at({("a", 0): 8, ("a", 1): 5})


def test_a_partition_that_nobody_leads_ends_the_query_when_its_patience_does(memory: MemoryCluster) -> None:
    make(memory, "a", partitions=1, records=5, copies=1)
    options = {"subscribe": "a", "startingOffsets": "earliest", "brokerTimeoutMs": "500"}
    with Query(memory, **options, metadata__max__age__ms="200") as query:
        query.until_at({("a", 0): 5})
        memory.kill_leader("a")
        with pytest.raises(TidelogError) as error:
            query.until_at({("a", 0): 6})
        assert error.value.retriable


def test_a_look_in_vain_is_forgotten_when_the_next_one_is_not(memory: MemoryCluster) -> None:
    """An idle query hears nothing of its partitions meanwhile."""
    make(memory, "a", records=5)
    options = {"subscribe": "a", "startingOffsets": "earliest", "client__request__timeout__ms": "300"}
    with Query(memory, **options, metadata__max__age__ms="100") as query:
        query.until_at({("a", 0): 5})
        paused = [memory.pause(broker) for broker in memory.brokers]
        until(lambda: failing(query) is not None, "a look fails")
        for broker in paused:
            memory.resume(broker)
        query.ask_until(lambda: failing(query) is None, "nothing is left of it")


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_cluster_that_is_silent_at_a_restart_has_deleted_nothing(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(driver_module, "READY_S", 0.2)
    make(memory, "a", records=5)
    options = {"subscribe": "a", "startingOffsets": "earliest", "failOnDataLoss": fails}
    with Query(memory, **options) as query:
        query.until_at({("a", 0): 5})
    for broker in memory.brokers:
        memory.pause(broker)
    with Query(memory, query.start, **options) as again:
        for _ in range(3):
            assert not again.step()  # it waits
        memory.heal()
        send(memory, "a", 2)
        again.until_at({("a", 0): 7})
        assert "origin" not in again.start  # and goes on where it was


def test_a_leader_that_is_cut_off_is_left_for_the_new_one(memory: MemoryCluster) -> None:
    """It does not know that it leads no more: its stream stays open and tells nothing. It may also be the one that is
    asked for metadata."""
    make(memory, "a", records=5)
    with Query(memory, subscribe="a", startingOffsets="earliest", metadata__max__age__ms="200") as query:
        query.until_at({("a", 0): 5})
        old = memory.leader("a")
        assert old is not None
        memory.partition(old)
        until(lambda: memory.leader("a") not in (old, None), "another leads")
        others = ",".join(one for one in memory.bootstrap.split(",") if not one.startswith(f"broker-{old}."))
        send(memory, "a", 3, bootstrap=others)
        query.until_at({("a", 0): 8})


def test_streams_are_few_however_often_new_topics_are_found(memory: MemoryCluster) -> None:
    make(memory, "p-0", records=1)
    with Query(memory, subscribePattern="p-.*", startingOffsets="earliest", metadata__max__age__ms="100") as query:
        wanted = {("p-0", 0): 1}
        query.until_at(wanted)
        for number in range(1, 13):
            make(memory, f"p-{number}", records=1)
            wanted[f"p-{number}", 0] = 1
            query.until_at(wanted)
        watch = query.source._driver()._watch
        assert watch is not None
        assert len(watch._tasks._running) - 1 <= 3 * 3  # by powers of two at each broker


def test_a_broker_that_is_behind_deletes_nothing() -> None:
    """It is asked when the other one does not answer, and has not heard of what that one has told."""
    with MemoryCluster(2, seed=11) as memory:
        ahead, behind = memory.brokers
        memory.partition(behind)
        first = memory.bootstrap.split(",")[0]
        with tidelog.Admin(first) as admin:
            until(lambda: admin.describe_cluster().brokers[1].is_fenced, "the one that is cut off gets no replicas")
        make(memory, "p-1", records=2, copies=1)
        options = {"subscribePattern": "p-.*", "startingOffsets": "earliest", "client__request__timeout__ms": "500"}
        with Query(memory, **options, metadata__max__age__ms="100") as query:
            query.until_at({("p-1", 0): 2})
            memory.pause(ahead)
            query.ask_until(lambda: failing(query) is not None, "a look in vain")
            memory.heal()
            send(memory, "p-1", 1)
            query.until_at({("p-1", 0): 3})
