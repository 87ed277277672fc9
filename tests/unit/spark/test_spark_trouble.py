"""Streaming queries, and runs with `Trigger.AvailableNow`, while brokers die, fall silent and are cut off: the whole
source, on a cluster in this process."""

# ruff: noqa: E402 - Spark may not be there

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.clusters.waiting import until
from support.spark.availability import need

need("pyspark", by=__name__)

from pyspark.sql.types import BinaryType, StructField, StructType

import tidelog
from tidelog.model.errors import TidelogError
from tidelog.spark import driver as driver_module
from tidelog.spark.errors import TopicDeletedError, TruncationError
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


@pytest.fixture
def admin(memory: MemoryCluster) -> Iterator[tidelog.Admin]:
    with tidelog.Admin(memory.bootstrap) as made:
        yield made


class Query:
    """The calls that Spark makes. Documents pass through JSON, as in a checkpoint."""

    def __init__(self, memory: MemoryCluster, start: Any = None, /, **options: str) -> None:
        # A client of its own, as a process of its own would have.
        given = {"bootstrap.servers": memory.bootstrap, "client.id": f"query-{next(_names)}"}
        given["startingOffsets"] = "earliest"
        given |= {key.replace("__", "."): one for key, one in options.items()}
        self.source = StreamSource(source_options(given, is_streaming=True, now_ms=1_700_000_000_000), VALUE)
        self.start = start

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.stop()
        self.source._driver().client.close()

    def step(self) -> bool:
        """Whether there was a batch: if not, Spark ends a run."""
        if self.start is None:
            self.start = self.source.initialOffset()
        found = json.loads(json.dumps(self.source.latestOffset(self.start, self.source.getDefaultReadLimit())))
        is_new = found != self.start
        self.start = found
        return bool(is_new)

    def freeze(self) -> None:
        """Make it a run that ends at what is there now."""
        self.source.prepareForTriggerAvailableNow()

    def to_its_end(self) -> Ends:
        while self.step():
            pass
        return self.ends()

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
    return query.source._driver().failing_for()


def committed(admin: tidelog.Admin, group: str) -> Ends:
    return {(one.topic, one.partition): found.committed.offset for one, found in admin.group_offsets(group).items()}


def test_a_query_lives_on_when_a_broker_is_lost(memory: MemoryCluster) -> None:
    make(memory, "a", partitions=2, records=5)
    with Query(memory, subscribe="a", metadata__max__age__ms="200") as query:
        query.until_at({("a", 0): 5, ("a", 1): 5})
        memory.kill_leader("a")
        until(lambda: failing(query) is not None, "the watch notices")
        assert not query.step()
        send(memory, "a", 3)
        query.until_at({("a", 0): 8, ("a", 1): 5})


def test_a_partition_that_nobody_leads_ends_the_query_when_its_patience_does(memory: MemoryCluster) -> None:
    make(memory, "a", partitions=1, records=5, copies=1)
    options = {"subscribe": "a", "brokerTimeoutMs": "500"}
    with Query(memory, **options, metadata__max__age__ms="200") as query:
        query.until_at({("a", 0): 5})
        memory.kill_leader("a")
        with pytest.raises(TidelogError) as error:
            query.until_at({("a", 0): 6})
        assert error.value.retriable


def test_a_look_in_vain_is_forgotten_when_the_next_one_is_not(memory: MemoryCluster) -> None:
    """An idle query hears nothing of its partitions meanwhile."""
    make(memory, "a", records=5)
    options = {"subscribe": "a", "client__request__timeout__ms": "300"}
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
    options = {"subscribe": "a", "failOnDataLoss": fails}
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
    with Query(memory, subscribe="a", metadata__max__age__ms="200") as query:
        query.until_at({("a", 0): 5})
        old = memory.leader("a")
        assert old is not None
        memory.isolate(old)
        until(lambda: memory.leader("a") not in (old, None), "another leads")
        others = ",".join(one for one in memory.bootstrap.split(",") if not one.startswith(f"broker-{old}."))
        send(memory, "a", 3, bootstrap=others)
        query.until_at({("a", 0): 8})


def test_streams_are_few_however_often_new_topics_are_found(memory: MemoryCluster) -> None:
    make(memory, "p-0", records=1)
    with Query(memory, subscribePattern="p-.*", metadata__max__age__ms="100") as query:
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
    """It is asked when the other one does not answer, and does not know what that one has reported."""
    with MemoryCluster(2, seed=11) as memory:
        ahead, behind = memory.brokers
        memory.isolate(behind)
        first = memory.bootstrap.split(",")[0]
        with tidelog.Admin(first) as admin:
            until(lambda: admin.describe_cluster().brokers[1].is_fenced, "the one that is cut off gets no replicas")
        make(memory, "p-1", records=2, copies=1)
        options = {"subscribePattern": "p-.*", "client__request__timeout__ms": "500"}
        with Query(memory, **options, metadata__max__age__ms="100") as query:
            query.until_at({("p-1", 0): 2})
            memory.pause(ahead)
            query.ask_until(lambda: failing(query) is not None, "a look in vain")
            memory.heal()
            send(memory, "p-1", 1)
            query.until_at({("p-1", 0): 3})


# Runs with an end.


class TestTheEndOfARun:
    def test_is_reached_over_a_leader_that_dies(self, memory: MemoryCluster) -> None:
        make(memory, "a", partitions=2, records=100)
        with Query(memory, subscribe="a", maxOffsetsPerTrigger="40", maxBytesPerTrigger="10m") as run:
            run.freeze()
            assert run.step()
            memory.kill_leader("a")
            assert run.to_its_end() == {("a", 0): 100, ("a", 1): 100}

    def test_is_waited_for_while_nobody_leads_a_partition(
        self, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver_module, "READY_S", 0.2)
        make(memory, "a", partitions=3, records=10, copies=1)
        with Query(memory, subscribe="a", metadata__max__age__ms="200") as run:
            run.freeze()
            run.start = run.source.initialOffset()
            killed = memory.kill_leader("a")
            back = threading.Timer(0.4, memory.restart, [killed])
            back.start()
            assert run.to_its_end() == {("a", number): 10 for number in range(3)}
            back.join()

    def test_that_is_not_reached_in_time_is_an_error(
        self, memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver_module, "READY_S", 0.2)
        make(memory, "a", partitions=3, records=10, copies=1)
        with Query(memory, subscribe="a", brokerTimeoutMs="700", metadata__max__age__ms="200") as run:
            run.freeze()
            run.start = run.source.initialOffset()
            memory.kill_leader("a")
            with pytest.raises(TidelogError, match=r"Trigger\.AvailableNow: a-0 is at offset 0 of 10"):
                run.to_its_end()

    def test_is_waited_for_over_an_error_that_passes(self, memory: MemoryCluster) -> None:
        make(memory, "a", records=100)
        with Query(
            memory,
            subscribe="a",
            maxOffsetsPerTrigger="40",
            maxBytesPerTrigger="10m",
            client__request__timeout__ms="500",
        ) as run:
            run.freeze()
            assert run.step()
            for broker in memory.brokers:
                memory.pause(broker)
            back = threading.Timer(1.0, memory.heal)
            back.start()
            assert run.to_its_end() == {("a", 0): 100}
            back.join()

    @pytest.mark.parametrize("fails", ["true", "false"])
    def test_data_gone_with_its_topic_is_reported_or_passed_over(
        self, memory: MemoryCluster, admin: tidelog.Admin, fails: str
    ) -> None:
        make(memory, "a", records=10)
        make(memory, "b", records=10)
        options = {"subscribe": "a,b", "failOnDataLoss": fails, "groupId": "g", "metadata__max__age__ms": "100"}
        with Query(memory, maxOffsetsPerTrigger="4", **options) as run:
            run.freeze()
            assert run.step()
            admin.delete_topic("b")
            watch = run.source._driver()._watch
            assert watch is not None
            until(lambda: "b" not in watch.topics, "the query hears of it")
            if fails == "true":
                with pytest.raises(TopicDeletedError):
                    run.to_its_end()
                return
            assert run.to_its_end() == {("a", 0): 10}
            assert committed(admin, "g")["a", 0] == 10  # the last commit is waited for all the same

    def test_data_that_the_log_has_lost_is_reported_or_passed_over(self, memory: MemoryCluster) -> None:
        make(memory, "a", records=10)
        for choice in ("true", "false"):
            with Query(memory, subscribe="a", failOnDataLoss=choice) as run:
                run.freeze()
                target = run.source._driver()._target
                assert target is not None
                # As an unclean election would have it: the epoch of the run's end has fewer records now.
                target["a", 0] = type(target["a", 0])(15, target["a", 0].epoch)
                if choice == "true":
                    with pytest.raises(TruncationError):
                        run.to_its_end()
                else:
                    assert run.to_its_end() == {("a", 0): 10}

    def test_leaves_out_what_came_later_but_does_not_take_it_for_deleted(
        self, memory: MemoryCluster, admin: tidelog.Admin
    ) -> None:
        make(memory, "p-1", records=3)
        with Query(memory, subscribePattern="p-.*") as run:
            run.freeze()
            make(memory, "p-2", records=3)
            admin.add_partitions({"p-1": 2})
            until(lambda: len(admin.describe_topic("p-1").partitions) == 2, "two partitions")
            until(lambda: "p-2" in run.source._driver().initial().topics, "the query hears of it")
            assert run.to_its_end() == {("p-1", 0): 3, ("p-1", 1): 0, ("p-2", 0): 0}


class TestTheBeginning:
    @pytest.mark.parametrize("call", ["initialOffset", "prepareForTriggerAvailableNow"])
    def test_is_waited_for(self, memory: MemoryCluster, call: str) -> None:
        make(memory, "a", records=3, copies=1)
        with Query(memory, subscribe="a", client__request__timeout__ms="300") as run:
            run.source._driver().initial()  # a cluster has answered
            killed = memory.kill_leader("a")
            back = threading.Timer(0.4, memory.restart, [killed])
            back.start()
            getattr(run.source, call)()
            back.join()
            run.freeze()
            assert run.to_its_end() == {("a", 0): 3}

    def test_is_not_waited_for_longer_than_the_query_has_patience(self, memory: MemoryCluster) -> None:
        make(memory, "a", records=3, copies=1)
        with Query(memory, subscribe="a", client__request__timeout__ms="200", brokerTimeoutMs="500") as run:
            run.source._driver().initial()
            memory.kill_leader("a")
            with pytest.raises(TidelogError):
                run.source.initialOffset()


class TestTheGroup:
    def test_a_commit_that_failed_is_made_again_though_the_query_is_idle(
        self, memory: MemoryCluster, admin: tidelog.Admin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver_module, "COMMIT_MS", 200)
        monkeypatch.setattr(driver_module, "COMMIT_AGAIN_S", 0.2)
        make(memory, "a", records=3)
        with Query(memory, subscribe="a", groupId="g") as run:
            assert run.step()
            for broker in memory.brokers:
                memory.pause(broker)
            assert not run.step()  # it commits
            until(lambda: run.source._driver()._commit._failed is not None, "the commit fails")
            memory.heal()
            until(lambda: not run.step() and committed(admin, "g") == {("a", 0): 3}, "it is made again")

    def test_of_another_application_is_left_alone(self, memory: MemoryCluster, admin: tidelog.Admin) -> None:
        make(memory, "a", records=3)
        with Query(memory, subscribe="a", kafka__group__id="billing") as run:
            run.freeze()
            assert run.to_its_end() == {("a", 0): 3}
        assert "billing" not in {one.group for one in admin.list_groups()}


def test_a_topic_that_is_not_subscribed_any_more_was_not_deleted(memory: MemoryCluster) -> None:
    make(memory, "a", records=3)
    make(memory, "b", records=3)
    with Query(memory, subscribe="a,b") as run:
        assert run.step()
    with (
        Query(memory, run.start, subscribe="a") as fewer,
        pytest.raises(TidelogError, match=r"'b'.* not subscribed any"),
    ):
        fewer.step()
    with Query(memory, run.start, subscribe="a", failOnDataLoss="false") as fewer:
        assert fewer.step()
        assert fewer.ends() == {("a", 0): 3}


def test_partitions_without_a_time_begin_at_the_streams_default(memory: MemoryCluster) -> None:
    make(memory, "a", partitions=2, records=3)
    times = '{"a": {"0": 1000}}'
    with Query(memory, subscribe="a", startingOffsetsByTimestamp=times) as run:
        run.start = run.source.initialOffset()
        assert run.ends() == {("a", 0): 0, ("a", 1): 3}
