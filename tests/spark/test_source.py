"""Streams of the log in a real Spark against a real cluster of three nodes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.clusters.waiting import until
from support.spark.metrics import lag, requests
from support.spark.streams import Producing, Stream, Sunk, message_of, send, wait_for

import tidelog
from tidelog.cli.main import main as command
from tidelog.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

MakeTopic = Callable[..., str]
MakeStream = Callable[..., Stream]


@pytest.fixture
def stream(spark: SparkSession, bootstrap: str, tmp_path: Path) -> MakeStream:
    def make(**options: str) -> Stream:
        return Stream(spark, tmp_path / "checkpoint", **({"bootstrap__servers": bootstrap} | options))

    return make


@pytest.fixture(autouse=True)
def no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def leader_of(admin: tidelog.Admin, topic: str) -> int:
    return until(lambda: admin.describe_topic(topic).partitions[0].leader or 0, "somebody leads it")


@pytest.mark.requirement("a:H-20", "b:J-08", "a:X3-39")
def test_batches_and_streams_of_committed_data_have_no_aborted_and_no_open_transaction(
    spark: SparkSession, stream: MakeStream, topic: MakeTopic, bootstrap: str
) -> None:
    name = topic("transactional", partitions=2)
    options = {"subscribe": name, "startingOffsets": "earliest", "isolation.level": "read_committed"}
    with tidelog.Producer(bootstrap, transactional_id=name) as producer:
        for number in range(10):
            with contextlib.suppress(KeyError), producer.transaction():
                for partition in (0, 1):
                    producer.send(name, str(number), partition=partition).result(30)
                if number % 2:
                    raise KeyError
        producer.begin_transaction()
        producer.send(name, "open", partition=0).result(30)
        sink = Sunk()
        stream(**{key.replace(".", "__"): value for key, value in options.items()}).run(sink)
        frame = spark.read.format("tidelog").options(**{"bootstrap.servers": bootstrap, **options}).load()
        read = [int(bytes(row.value)) for row in frame.collect()]
        producer.abort_transaction()
    assert sorted(sink.values) == sorted(read) == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]


def test_micro_batches_are_bounded_and_a_restart_goes_on_from_the_checkpoint(
    stream: MakeStream,
    topic: MakeTopic,
    producer: tidelog.Producer,
    bootstrap: str,
    cluster: LocalCluster,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = topic("bounded", partitions=3)
    for number in range(3):
        send(producer, name, range(100 * number, 100 * number + 100), partition=number)
    sink = Sunk()
    # As a query of Spark's Kafka source may have them.
    reading = stream(
        subscribe=name,
        STARTINGOFFSETS="earliest",
        kafka__MaxOffsetsPerTrigger="120",
        groupId="bounded",
        Isolation__Level="read_committed",
    )
    query = reading.run(sink)
    assert sink.sizes == [120, 120, 60]
    assert sink.values == list(range(300))
    for number in range(3):
        assert sink.offsets(number) == list(range(100))
    # What a listener gets: how far the query has come, and how far the logs reach.
    (source,) = query.recentProgress[0].sources
    reached = [json.loads(text)["t"][name]["p"] for text in (source.endOffset, source.latestOffset)]
    assert sum(offset for offset, _ in reached[0].values()) == 120
    assert {number: offset for number, (offset, _) in reached[1].items()} == {"0": 100, "1": 100, "2": 100}

    def behind() -> dict[int, int]:
        """As `tidelog groups describe` shows it."""
        assert command(["groups", "describe", "bounded", "--bootstrap", bootstrap, "--output", "json"]) == 0
        (group,) = json.loads(capsys.readouterr().out)["groups"]
        return {row["partition"]: row["lag"] for row in group["partitions"]}

    assert behind() == {0: 0, 1: 0, 2: 0}
    send(producer, name, range(300, 350), partition=1)
    assert behind() == {0: 0, 1: 50, 2: 0}
    assert lag(cluster, "bounded", name) == 50
    reading.run(sink)
    assert sink.values == list(range(350))
    assert behind() == {0: 0, 1: 0, 2: 0}
    assert lag(cluster, "bounded", name) == 0


def test_a_query_from_the_end_misses_nothing_between_its_first_stop_and_its_restart(
    stream: MakeStream, topic: MakeTopic, producer: tidelog.Producer
) -> None:
    name = topic("latest")
    send(producer, name, range(100))
    sink = Sunk()
    reading = stream(subscribe=name)
    query = reading.running(sink)
    wait_for(query, lambda: query.lastProgress is not None, "the empty batch that says where it began")
    query.stop()
    assert query.exception() is None
    assert sink.rows == []
    send(producer, name, range(100, 107))
    # Too few to begin with, so that the next ones come together with them.
    query = reading.running(sink, minOffsetsPerTrigger="10", maxTriggerDelay="15m")
    send(producer, name, range(107, 110))
    wait_for(query, lambda: len(sink.rows) >= 10, "all rows")
    query.stop()
    assert [size for size in sink.sizes if size] == [10]
    assert sink.values == list(range(100, 110))


def test_the_losses_of_a_query_are_reported_by_name(
    stream: MakeStream,
    topic: MakeTopic,
    producer: tidelog.Producer,
    admin: tidelog.Admin,
    bootstrap: str,
) -> None:
    """Retention that overtakes a slow query, a topic that was deleted, one that was created again."""
    name = topic("lossy", configs={"retention.bytes": "100000", "segment.bytes": "20000"})
    send(producer, name, range(20))
    sink = Sunk()
    cluster = tidelog.ConfigResource("cluster")

    def slow(frame: DataFrame, number: int) -> None:
        sink(frame, number)
        for part in range(30):  # 10 KB each
            send(producer, name, range(20 + 10 * part, 30 + 10 * part), size=1000)
        until(lambda: start_of(bootstrap, name) > 20, "retention is faster than the query")

    reading = stream(subscribe=name, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    admin.alter_config(cluster, sets={"log.retention.check.interval.ms": "200"})
    try:
        with pytest.raises(Exception, match=f"{name}-0: offsets 10 to 19 expired before the query read them"):
            reading.run(slow)
    finally:
        admin.alter_config(cluster, deletes=["log.retention.check.interval.ms"])
    assert sink.values == list(range(10))
    start = start_of(bootstrap, name)
    reading.run(sink, failOnDataLoss="false", maxOffsetsPerTrigger="1000")
    assert sink.values == [*range(10), *range(start, 320)]
    admin.delete_topic(name)
    until(lambda: name not in [one.name for one in admin.list_topics()], "it is gone")
    with pytest.raises(Exception) as error:
        reading.run(sink)
    assert f"topic '{name}', which the query has read, was deleted" in message_of(error.value)
    admin.create_topic(name, partitions=1)
    with tidelog.Producer(bootstrap) as fresh:
        send(fresh, name, range(1000, 1400))  # past the old end: only the id tells
    with pytest.raises(Exception) as error:
        reading.run(sink)
    assert f"topic '{name}' was deleted and created again" in message_of(error.value)
    reading.run(sink, failOnDataLoss="false", maxOffsetsPerTrigger="1000")
    assert sink.values == [*range(10), *range(start, 320), *range(1000, 1400)]


def start_of(bootstrap: str, topic: str) -> int:
    """Where the log begins."""
    with tidelog.Consumer(bootstrap) as consumer:
        (offset,) = consumer.beginning_offsets((topic, 0)).values()
        return offset


def test_a_query_lives_through_a_killed_leader_and_takes_in_what_is_new(
    stream: MakeStream,
    topic: MakeTopic,
    admin: tidelog.Admin,
    cluster: LocalCluster,
    bootstrap: str,
) -> None:
    name = topic("lively", partitions=2)
    sink = Sunk()
    query = stream(subscribePattern="lively-.*", startingOffsets="earliest", metadata__max__age__ms="500").running(sink)
    with Producing(bootstrap, name, 2) as producing:
        wait_for(query, lambda: len(sink.rows) >= 200, "the first rows")
        leader = leader_of(admin, name)
        cluster.kill(leader)
        try:
            seen = producing.sent
            until(lambda: producing.sent > seen + 500, "records go on being stored")
            wait_for(query, lambda: len(sink.rows) > seen + 300, "rows go on coming")
        finally:
            cluster.start(leader)
    admin.add_partitions({name: 3})
    until(lambda: len(admin.describe_topic(name).partitions) == 3, "three partitions")
    other = topic("lively")
    last = producing.sent
    with tidelog.Producer(bootstrap) as fresh:
        send(fresh, name, range(last, last + 10), partition=2)
        send(fresh, other, range(last + 10, last + 20))
    wait_for(query, lambda: len(sink.rows) >= last + 20, "all rows")
    # Spark goes on asking the source 75 times a second. Of that the brokers hear only: are there new topics?
    wait_for(query, lambda: query.status["message"] == "Waiting for data to arrive", "it has nothing to do")
    before, began_s = requests(cluster), time.monotonic()
    time.sleep(2.0)
    heard, seconds = requests(cluster) - before, time.monotonic() - began_s
    assert query.isActive
    query.stop()
    assert set(heard) <= {"Metadata", "DescribeCluster", "DescribeTopics"}, heard
    assert heard.total() <= 2 * (seconds / 0.5 + 1), heard
    assert sink.values == list(range(last + 20))
    for number in range(2):
        assert sink.offsets(number)[: last // 2] == sorted(sink.offsets(number)[: last // 2])


def test_a_leader_killed_while_tasks_read(
    stream: MakeStream,
    topic: MakeTopic,
    producer: tidelog.Producer,
    admin: tidelog.Admin,
    cluster: LocalCluster,
) -> None:
    name = topic("killed", partitions=2)
    for part in range(20):
        send(producer, name, range(1000 * part, 1000 * part + 1000), partition=part % 2, size=500)
    killed: list[int] = []
    sink = Sunk()

    def kill_first(frame: DataFrame, number: int) -> None:
        if not killed:  # planned, and not read yet
            killed.append(leader_of(admin, name))
            cluster.kill(killed[0])
        sink(frame, number)

    try:
        stream(
            subscribe=name,
            startingOffsets="earliest",
            maxBytesPerTrigger="6m",
            client__max__partition__fetch__bytes="100000",
        ).run(kill_first)
    finally:
        if killed:
            cluster.start(killed[0])
    assert len(sink.sizes) >= 2
    assert sink.values == list(range(20_000))


def test_a_broker_that_stays_away_ends_the_query_after_its_own_time(
    stream: MakeStream,
    topic: MakeTopic,
    producer: tidelog.Producer,
    admin: tidelog.Admin,
    cluster: LocalCluster,
) -> None:
    name = topic("alone", replication_factor=1)
    send(producer, name, range(100))
    leader = leader_of(admin, name)
    sink = Sunk()
    reading = stream(subscribe=name, startingOffsets="earliest", brokerTimeoutMs="2000")
    query = reading.running(sink)
    wait_for(query, lambda: len(sink.rows) == 100, "the first rows")
    cluster.kill(leader)
    try:
        until(lambda: not query.isActive, "it does not wait for ever")
        error = query.exception()
    finally:
        cluster.start(leader)
    assert error is not None
    assert "partition 0" in message_of(error) or f"{name}-0" in message_of(error)
    send(producer, name, range(100, 150))
    reading.run(sink)
    assert sink.values == list(range(150)), "nothing is missing, nothing comes twice"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "nowhere"}, "subscribe: there is no topic 'nowhere'"),
        ({"subscribe": "x", "endingOffsets": "latest"}, "endingOffsets='latest': a streaming query has no end"),
    ],
)
def test_a_query_that_cannot_begin_says_why_in_one_line(
    stream: MakeStream, options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception) as error:
        stream(**options).run(Sunk())
    assert [line for line in message_of(error.value).splitlines() if words in line]
