"""Consumers as processes of their own against a real cluster: shared work, kills, slow handlers, and all the calls."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from consuming import Process, fill, is_shared, make_topic, trickle
from support.clusters.waiting import until

import tidelog
from tidelog.client.consumer.errors import CommitFailedError, ConcurrentUseError, ConsumerClosedError, WakeupError
from tidelog.client.record import OffsetAndMetadata, TopicPartition
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

GRACE_S, SESSION_S = 2.0, 45.0
"""Of a member whose stream breaks, and of one that is silent, as they are without settings."""


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for process in made:
        process.end()


@pytest.mark.requirement("a:F-01", "a:F-07", "a:F-32", "a:T-09", "a:X3-29")
@pytest.mark.requirement("b:D-10", "b:D-11", "b:EX-13", "b:EX-18", "b:H-06")
def test_a_killed_consumers_partitions_flow_elsewhere_after_the_grace_and_not_after_the_session(
    cluster: LocalCluster, processes: list[Process]
) -> None:
    """How soon, `bench/rebalance.py` measures."""
    make_topic(cluster, "killed", 6)
    processes += [Process(cluster, "killed", "killed", commits=True, enable_auto_commit=False) for _ in range(3)]
    until(lambda: is_shared(processes, 6) and all(len(one.held) == 2 for one in processes), "each has two")
    victim, *others = processes
    with trickle(cluster, "killed", 6, every_s=0.1):
        until(lambda: {number for one in processes for number, _ in one.records} == set(range(6)), "all flow")
        lost = victim.held
        at_s = time.monotonic()
        victim.kill()

        def flowing() -> dict[int, float]:
            """When each partition was first read by another one."""
            found: dict[int, float] = {}
            for when, what, details in [line for one in others for line in list(one.lines)]:
                if what == "record" and details[0] in lost and when > at_s:
                    found[details[0]] = min(when, found.get(details[0], when))
            return found

        until(lambda: flowing().keys() == lost, "the others read what it had", timeout_s=SESSION_S)
    took_s = max(flowing().values()) - at_s
    print(f"kill -9 of a consumer: its partitions flowed elsewhere after {took_s:.2f} s")
    assert GRACE_S < took_s < SESSION_S - 15, "not before the grace, and not by the session"
    with tidelog.Consumer(cluster.bootstrap) as asker:
        ends = asker.end_offsets(*asker.partitions_for("killed"))
    stored = {(place.partition, offset) for place, end in ends.items() for offset in range(end)}
    until(lambda: stored == {record for one in processes for record in one.records}, "nothing is left out")
    # A goodbye needs no grace: the group knows of it when the program ends.
    last, keeper = others
    last.close()
    with tidelog.Admin(cluster.bootstrap) as admin:
        assert len(admin.describe_group("killed").members) == 1
    until(lambda: keeper.held == set(range(6)), "the last one has all")
    assert last.said("woken") == ["MainThread"]
    assert last.said("closed") == [None]
    assert len(last.said("revoked")[-1]) == 3
    assert not [1 for one in processes if one.said("lost")]


@pytest.mark.requirement("a:E-50", "a:X3-9", "b:EX-14", "b:EX-17")
def test_consumers_that_are_restarted_one_by_one_lose_nothing_and_repeat_little(
    cluster: LocalCluster, processes: list[Process]
) -> None:
    make_topic(cluster, "rolling", 4)
    fill(cluster, "rolling", 200)
    options: dict[str, Any] = {"commits": True, "enable_auto_commit": False, "handler_s": 0.005}
    processes += [Process(cluster, "rolling", "rolling", **options) for _ in range(3)]
    until(lambda: is_shared(processes, 4), "all are assigned")
    alive = list(processes)
    for round_ in range(3):
        fill(cluster, "rolling", 100, first=200 + 100 * round_)
        alive.pop(0).close() if round_ % 2 else alive.pop(0).kill()
        fresh = Process(cluster, "rolling", "rolling", **options)
        processes.append(fresh)
        alive.append(fresh)
        until(lambda: bool(alive[-1].said("assigned")) and is_shared(alive, 4), "all are assigned again")
    until(lambda: len({record for one in processes for record in one.records}) == 500, "all are read")
    total = sum(len(one.records) for one in processes)
    assert total <= 500 + 8  # at most what was in hand when one was killed
    for one in processes:
        for partition in range(4):
            offsets = [offset for number, offset in one.records if number == partition]
            assert offsets == sorted(set(offsets))


@pytest.mark.requirement("a:F-05", "a:F-31", "a:X3-32")
def test_partitions_that_do_not_move_keep_flowing_while_others_do(
    cluster: LocalCluster, processes: list[Process]
) -> None:
    make_topic(cluster, "coop", 6)
    first = Process(cluster, "coop", "coop")
    processes.append(first)
    until(lambda: first.held == set(range(6)), "one has all")
    with trickle(cluster, "coop", 6, every_s=0.02):
        until(lambda: len(first.records) > 100, "records flow")
        second = Process(cluster, "coop", "coop")
        processes.append(second)
        until(lambda: len(second.held) == 3 and is_shared([first, second], 6), "they share")
        count = len(second.records)
        until(lambda: len(second.records) > count + 60, "records flow at both")
    stayed = first.held
    assert len(stayed) == 3
    assert first.said("revoked") == [sorted(set(range(6)) - stayed)]
    assert first.said("assigned")[0] == list(range(6))
    assert all(not set(names) for names in first.said("assigned")[1:])  # nothing was taken away and given back
    moved_s = next(when for when, what, _ in first.lines if what == "revoked")
    for partition in stayed:
        times = [when for when, what, row in first.lines if what == "record" and row[0] == partition]
        around = [when for when in times if moved_s - 2 < when < moved_s + 2]
        assert max(after - before for before, after in pairwise(around)) < 1.5
    every = first.records + second.records
    for partition in range(6):
        assert len({offset for number, offset in every if number == partition}) > 10


@pytest.mark.requirement("a:F-08", "a:X3-30", "a:T-09")
def test_a_static_member_that_is_restarted_keeps_its_partitions_and_a_twin_is_refused(
    cluster: LocalCluster, processes: list[Process]
) -> None:
    make_topic(cluster, "static", 4)
    options: dict[str, Any] = {
        "group_instance_id": "a",
        "session_timeout_ms": 8_000,
        "heartbeat_interval_ms": 1_000,
    }
    one = Process(cluster, "static", "static", **options)
    other = Process(cluster, "static", "static", **{**options, "group_instance_id": "b"})
    processes += [one, other]
    until(lambda: is_shared([one, other], 4) and len(one.held) == 2, "they share")
    had, reported = one.held, len(other.said("assigned"))
    one.close()
    again = Process(cluster, "static", "static", **options)
    processes.append(again)
    until(lambda: again.held == had, "it has what it had")
    assert len(other.said("assigned")) == reported
    with tidelog.Consumer(cluster.bootstrap, group="static", **options) as twin:
        twin.subscribe("static")
        with pytest.raises(TidelogError, match="instance id") as refused:
            twin.poll(30)
    assert refused.value.code is ErrorCode.UNRELEASED_INSTANCE_ID
    assert again.held == had
    # Longer than its session away: it is gone, and others take over.
    again.kill()
    until(lambda: other.held == set(range(4)), "the other has all", timeout_s=30)


@pytest.mark.requirement("a:F-33", "a:X3-31", "b:EX-22", "a:T-10")
def test_a_consumer_that_hangs_is_evicted_though_it_heartbeats_and_cannot_commit(cluster: LocalCluster) -> None:
    make_topic(cluster, "hung", 2)
    fill(cluster, "hung", 20)
    lost: list[TopicPartition] = []
    options: dict[str, Any] = {
        "group": "hung",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with (
        tidelog.Consumer(cluster.bootstrap, max_poll_interval_ms=4_000, **options) as hung,
        tidelog.Consumer(cluster.bootstrap, **options) as other,
    ):
        hung.subscribe("hung", on_lost=lost.extend)
        assert until(lambda: hung.poll(1.0), "records")
        other.subscribe("hung")
        found: set[tuple[int, int]] = set()

        def all_of_it() -> bool:
            found.update((record.partition, record.offset) for record in other.poll(0.5))
            return len(found) == 20

        until(all_of_it, "the other one reads all", timeout_s=30)
        with pytest.raises(CommitFailedError, match="max_poll_interval_ms is 4000"):
            hung.commit()
        assert lost == []
        until(lambda: bool(hung.poll(0.1)) or bool(hung.assignment()) or other.poll(0.1), "it is back", timeout_s=30)
        assert sorted(lost) == [TopicPartition("hung", 0), TopicPartition("hung", 1)]
        assert hung.metrics()["poll_interval_exceeded"] == 1


@pytest.mark.requirement("b:EX-05", "b:EX-11", "a:U-07")
def test_countries_are_counted(cluster: LocalCluster) -> None:
    make_topic(cluster, "customerCountries", 3)
    countries = ["France", "USA", "France", "Peru", "USA", "France"] * 5
    with tidelog.Producer(cluster.bootstrap) as producer:
        sent = [producer.send("customerCountries", country, key=country) for country in countries]
        stored = [delivery.result() for delivery in sent]
    where: dict[str, set[int]] = {}
    for country, metadata in zip(countries, stored, strict=True):
        where.setdefault(country, set()).add(metadata.partition)
    assert all(len(partitions) == 1 for partitions in where.values())  # a key has one place
    counts: dict[str, int] = {}
    with tidelog.Consumer(
        cluster.bootstrap,
        group="CountryCounter",
        auto_offset_reset="earliest",
        value_deserializer=tidelog.serializers.string,
    ) as consumer:
        consumer.subscribe(["customerCountries"])
        for record in consumer:
            counts[record.value] = counts.get(record.value, 0) + 1
            if sum(counts.values()) == len(countries):
                break
    assert json.loads(json.dumps(counts)) == {"France": 15, "USA": 10, "Peru": 5}


def test_every_call_of_a_consumer_works_on_a_real_cluster(cluster: LocalCluster) -> None:
    make_topic(cluster, "calls", 2)
    fill(cluster, "calls", 40)
    places = [TopicPartition("calls", number) for number in range(2)]
    reported: list[Any] = []
    with tidelog.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "calls", "auto.offset.reset": "earliest"},
        value_deserializer=tidelog.serializers.string,
        key_deserializer=bytes.decode,
    ) as consumer:
        consumer.subscribe(["calls"], on_assigned=lambda names: reported.append(sorted(names)))
        counts: dict[str, int] = {}
        records = iter(consumer)
        for _ in range(40):
            record = next(records)
            counts[record.value] = counts.get(record.value, 0) + 1
            assert record.key == f"key{record.value}"
        assert counts == {str(number): 1 for number in range(40)}
        assert reported == [places]
        assert consumer.assignment() == set(places)
        consumer.commit()
        ends = consumer.end_offsets(*places)
        assert {name: offset.offset for name, offset in consumer.committed(*places).items() if offset} == ends
        assert consumer.beginning_offsets(*places) == dict.fromkeys(places, 0)
        consumer.commit_async({places[0]: OffsetAndMetadata(1, "one")}, lambda *what: reported.append(what))
        assert consumer.poll(0.2) == []
        until(lambda: len(reported) == 2 or consumer.poll(0.05), "the commit is reported")
        assert reported[-1] == (None, {places[0]: OffsetAndMetadata(1, "one")})
        assert consumer.committed(places[0])[places[0]] == OffsetAndMetadata(1, "one")
        consumer.seek_to_beginning()
        consumer.pause(places[1])
        assert {record.partition for record in consumer.poll(5.0)} == {0}
        assert consumer.paused() == {places[1]}
        consumer.resume(places[1])
        assert {record.partition for record in consumer.poll(5.0)} == {1}
        consumer.seek_to_time("1h")
        assert consumer.position(places[0]) == 0
        assert len(consumer.poll_arrow(5.0, 3)) == 3
        consumer.seek_to_end()
        assert consumer.position(places[0]) == ends[places[0]]
        me = consumer.group_metadata()
        assert me.group == "calls"
        assert me.member_epoch >= 1
        assert consumer.partitions_for("calls") == places
        figures = consumer.metrics()
        assert figures["records_consumed"] >= 40
        assert figures["heartbeats"] >= 1
        assert figures["records_lag.calls-0"] == 0
    with pytest.raises(ConsumerClosedError):
        consumer.poll()
    consumer.close()


@pytest.mark.requirement("a:E-11", "a:E-15", "b:G-07", "b:G-08")
def test_one_thread_uses_a_consumer_and_another_may_only_wake_it(cluster: LocalCluster) -> None:
    make_topic(cluster, "threads", 1)
    with tidelog.Consumer(cluster.bootstrap) as consumer:
        consumer.assign([("threads", 0)])
        errors: list[BaseException] = []
        is_polling = threading.Event()

        def poll() -> None:
            is_polling.set()
            try:
                consumer.poll(60)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=poll)
        thread.start()
        is_polling.wait(5)

        def is_refused() -> bool:
            try:
                consumer.assignment()
            except ConcurrentUseError:
                return True
            return False

        until(is_refused, "a second thread is refused")
        began_s = time.monotonic()
        consumer.wakeup()
        thread.join(10)
        assert isinstance(errors[0], WakeupError)
        assert time.monotonic() - began_s < 5
        assert consumer.poll(0.1) == []


def test_a_forked_child_cannot_use_the_consumer_of_its_parent(cluster: LocalCluster) -> None:
    make_topic(cluster, "forked", 1)
    fill(cluster, "forked", 5)
    with tidelog.Consumer(cluster.bootstrap, group="forked", auto_offset_reset="earliest") as consumer:
        consumer.subscribe("forked")
        assert len(until(lambda: consumer.poll(1.0), "records")) == 5
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                consumer.poll(1.0)
            except BaseException as error:
                os.write(writing, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"ForkedError"
        os.waitpid(child, 0)
        # The parent goes on: its stream was closed for the fork, and is opened again within the grace.
        member = consumer.group_metadata()
        fill(cluster, "forked", 5, first=5)
        assert len(until(lambda: consumer.poll(1.0), "records")) == 5
        time.sleep(2.5)  # longer than the grace
        assert consumer.poll(0.1) == []
        assert consumer.group_metadata() == member


def test_the_asyncio_consumer_reads_and_calls_back_on_the_programs_loop(cluster: LocalCluster) -> None:
    make_topic(cluster, "looped", 3)
    fill(cluster, "looped", 30)
    reported: list[Any] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()

        async def assigned(names: list[TopicPartition]) -> None:
            assert asyncio.get_running_loop() is loop
            reported.append(sorted(names))

        async with tidelog.aio.Consumer(
            cluster.bootstrap, group="looped", auto_offset_reset="earliest", value_deserializer=tidelog.serializers.json
        ) as consumer:
            await consumer.subscribe(["looped"], on_assigned=assigned)
            found: set[int] = set()
            async for record in consumer:
                found.add(record.value)
                if len(found) == 30:
                    break
            assert found == set(range(30))
            await consumer.commit()
            # Cut short again and again, nothing is lost.
            await consumer.seek_to_beginning()
            again: list[int] = []
            while len(again) < 30:
                try:
                    async with asyncio.timeout(0.003):
                        again += [record.value for record in await consumer.poll(1.0, 4)]
                except TimeoutError:
                    continue
            assert sorted(again) == list(range(30))

    asyncio.run(work())
    assert reported == [[TopicPartition("looped", number) for number in range(3)]]


def test_a_topic_is_read_as_a_table(cluster: LocalCluster) -> None:
    pytest.importorskip("pyarrow")
    make_topic(cluster, "tabled", 3)
    fill(cluster, "tabled", 300)
    table = tidelog.read_arrow("tabled", since="1h", bootstrap=cluster.bootstrap)
    assert table.num_rows == 300
    assert sorted(int(value) for value in table["value"].to_pylist()) == list(range(300))
    rows = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert rows == sorted(rows)
    assert table.schema.names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    only = tidelog.read_arrow("tabled", partitions=[1], columns=["offset", "value"], bootstrap=cluster.bootstrap)
    assert only.schema.names == ["offset", "value"]
    assert only["offset"].to_pylist() == [offset for partition, offset in rows if partition == 1]
    assert tidelog.read_arrow("tabled", until="1h", bootstrap=cluster.bootstrap).num_rows == 0
    assert tidelog.read_arrow("tabled", since=2**42, columns=["key"], bootstrap=cluster.bootstrap).num_rows == 0
