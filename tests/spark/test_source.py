"""The source in a real Spark against a real cluster of three nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from patience import until

import tidelog
from tidelog.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RUN_S = 300.0
ATTEMPTS = 5
TOO_SLOW = "Python worker failed to connect back"
"""Spark gives the process of a source ten seconds to start, which is not enough on a machine that is busy; nothing was
read then."""
STAMP_MS = 1_700_000_000_000

MakeTopic = Callable[..., str]


class Sunk:
    """What a query has given out, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int, str]]] = []

    def __call__(self, frame: DataFrame, _number: int) -> None:
        rows = frame.selectExpr("partition", "offset", "cast(value as string)").collect()
        self.batches.append([tuple(row) for row in rows])

    @property
    def rows(self) -> list[tuple[int, int, str]]:
        return [row for batch in self.batches for row in batch]

    @property
    def values(self) -> list[int]:
        return sorted(int(value) for *_, value in self.rows)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


def wait_for_progress(query: StreamingQuery) -> None:
    until(lambda: query.lastProgress is not None or not query.isActive, "a first batch", timeout_s=RUN_S)


class Stream:
    """Queries of one checkpoint."""

    def __init__(self, spark: SparkSession, checkpoint: Path, **options: str) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._options = options

    def start(self, sink: Any, more: dict[str, str], *, now: bool) -> StreamingQuery:
        options = {key.replace("__", "."): value for key, value in (self._options | more).items()}
        frame = self._spark.readStream.format("tidelog").options(**options).load()
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(self._checkpoint))
        return (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")).start()

    def run(self, sink: Any, **more: str) -> None:
        """To the end of what is there."""
        for _ in range(ATTEMPTS):
            query = self.start(sink, more, now=True)
            try:
                assert query.awaitTermination(RUN_S), "it has not ended"
                return
            except Exception as error:
                if TOO_SLOW not in str(error):
                    raise
            finally:
                query.stop()
        pytest.fail(f"{ATTEMPTS} times: {TOO_SLOW}")

    def running(self, sink: Any, **more: str) -> StreamingQuery:
        """Without an end, once its process is up."""
        for _ in range(ATTEMPTS):
            query = self.start(sink, more, now=False)
            wait_for_progress(query)
            error = query.exception()
            if error is None or TOO_SLOW not in str(error):
                return query
        pytest.fail(f"{ATTEMPTS} times: {TOO_SLOW}")


@pytest.fixture
def stream(spark: SparkSession, bootstrap: str, tmp_path: Path) -> Callable[..., Stream]:
    def make(**options: str) -> Stream:
        return Stream(spark, tmp_path / "checkpoint", **({"bootstrap__servers": bootstrap} | options))

    return make


def send(producer: tidelog.Producer, topic: str, numbers: range, *, partition: int = 0, size: int = 0) -> None:
    values = [str(number).ljust(size) for number in numbers]
    producer.send_many(topic, values=values, partition=partition).result(60)


def told(error: Exception) -> str:
    """The line that says what is wrong, of what Spark makes of an error."""
    text = str(error)
    assert "Traceback" not in text, text
    return text


# ---- Batch reads


@pytest.fixture(scope="module")
def table(admin: tidelog.Admin, producer: tidelog.Producer) -> str:
    admin.create_topic("table", partitions=2)
    admin.create_topic("table-stamped", partitions=1, configs={"message.timestamp.type": "LogAppendTime"})
    producer.send(
        "table", b"first", key=b"k", partition=0, timestamp_ms=STAMP_MS, headers=[("a", b"1"), ("b", None)]
    ).result(30)
    producer.send("table", None, partition=0, timestamp_ms=STAMP_MS + 5).result(30)
    times = [STAMP_MS + 1000 * number for number in range(100)]
    producer.send_many(
        "table", values=[f"v{number}" for number in range(100)], timestamps_ms=times, partition=1
    ).result(30)
    producer.send("table-stamped", b"now").result(30)
    return "table"


class TestBatch:
    def read(self, spark: SparkSession, bootstrap: str, **options: str) -> DataFrame:
        given = {"kafka.bootstrap.servers": bootstrap} | {k.replace("__", "."): v for k, v in options.items()}
        return spark.read.format("tidelog").options(**given).load()

    def test_the_columns_are_those_of_sparks_kafka_source(
        self, spark: SparkSession, bootstrap: str, table: str
    ) -> None:
        frame = self.read(spark, bootstrap, subscribe=table, includeHeaders="true")
        assert frame.schema.simpleString() == (
            "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
            "timestampType:int,headers:array<struct<key:string,value:binary>>>"
        )
        rows = frame.orderBy("partition", "offset").collect()
        assert len(rows) == 102
        first, second = rows[0], rows[1]
        assert (bytes(first.key), bytes(first.value), first.topic) == (b"k", b"first", "table")
        assert (first.partition, first.offset, first.timestampType) == (0, 0, 0)
        assert [(one.key, one.value) for one in first.headers] == [("a", b"1"), ("b", None)]
        assert first.timestamp.replace(tzinfo=UTC) == datetime.fromtimestamp(STAMP_MS / 1000, UTC)
        assert (second.key, second.value, second.headers) == (None, None, None)
        assert [bytes(row.value).decode() for row in rows[2:]] == [f"v{number}" for number in range(100)]
        stamped = self.read(spark, bootstrap, subscribePattern="table-st.*").collect()
        assert [(bytes(row.value), row.timestampType) for row in stamped] == [(b"now", 1)]

    def test_a_part_of_the_columns_by_schema_or_by_option(
        self, spark: SparkSession, bootstrap: str, table: str
    ) -> None:
        by_option = self.read(spark, bootstrap, assign='{"table": [0]}', columns="offset, key")
        assert [tuple(row) for row in by_option.orderBy("offset").collect()] == [(0, b"k"), (1, None)]
        by_schema = (
            spark.read.format("tidelog")
            .schema("value binary, timestampType int")
            .options(**{"bootstrap.servers": bootstrap, "assign": '{"table": [0]}'})
            .load()
        )
        values = [None if row.value is None else bytes(row.value) for row in by_schema.collect()]
        assert sorted(values, key=str) == [None, b"first"]

    def test_filters_are_pushed_down_where_the_user_wants_it(
        self, spark: SparkSession, bootstrap: str, table: str
    ) -> None:
        conf = "spark.sql.python.filterPushdown.enabled"
        spark.conf.set(conf, "true")
        try:
            frame = self.read(spark, bootstrap, subscribe=table, pushFilters="true")
            chosen = frame.where("partition = 1 and offset >= 90 and offset < 95")
            assert sorted(row.offset for row in chosen.collect()) == [90, 91, 92, 93, 94]
            plan = chosen._jdf.queryExecution().executedPlan().toString()
            filters = [line for line in plan.splitlines() if "Filter" in line.partition("(")[0]]
            assert not any("90" in line for line in filters), plan
            young = frame.where("partition = 1 and timestamp >= timestamp '2023-11-14 22:14:50 UTC'")
            assert sorted(row.offset for row in young.collect()) == list(range(90, 100))
        finally:
            spark.conf.set(conf, "false")

    def test_bounds_in_time_and_few_tasks(self, spark: SparkSession, bootstrap: str, table: str) -> None:
        frame = self.read(
            spark,
            bootstrap,
            subscribe=table,
            startingOffsetsByTimestamp=json.dumps({"table": {"1": STAMP_MS + 50_000}}),
            endingOffsets='{"table": {"0": 1, "1": 60}}',
        )
        assert frame.rdd.getNumPartitions() == 1
        found = sorted((row.partition, row.offset) for row in frame.collect())
        assert found == [(0, 0), *((1, offset) for offset in range(50, 60))]
        split = self.read(spark, bootstrap, subscribe=table, minPartitions="4")
        assert split.rdd.getNumPartitions() == 4
        assert split.count() == 102

    def test_an_empty_topic_is_an_empty_table(self, spark: SparkSession, bootstrap: str, topic: MakeTopic) -> None:
        assert self.read(spark, bootstrap, subscribe=topic("empty")).collect() == []

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"subscribe": "table", "minPartitions": "few"}, "minPartitions='few': a whole number, 1 or more"),
            ({"subscribe": "table", "startingOffset": "latest"}, "did you mean 'startingOffsets'?"),
            ({"subscribe": "nowhere"}, "subscribe: there is no topic 'nowhere'"),
            ({"subscribe": "table", "kafka__linger__ms": "5"}, "linger.ms is no option of a consumer"),
            ({"subscribe": "table", "bootstrap__servers": "localhost:1"}, "no cluster at localhost:1"),
        ],
    )
    def test_what_is_wrong_is_told_in_one_line_before_a_job_starts(
        self, spark: SparkSession, bootstrap: str, table: str, options: dict[str, str], words: str
    ) -> None:
        given = {"bootstrap.servers": bootstrap} | {k.replace("__", "."): v for k, v in options.items()}
        with pytest.raises(Exception) as error:
            spark.read.format("tidelog").options(**given).load().collect()
        lines = [line for line in told(error.value).splitlines() if words in line]
        assert len(lines) == 1, str(error.value)

    def test_a_column_of_another_type_is_refused(self, spark: SparkSession, bootstrap: str, table: str) -> None:
        reader = spark.read.format("tidelog").options(**{"bootstrap.servers": bootstrap, "subscribe": table})
        with pytest.raises(Exception) as error:
            reader.schema("value string").load().collect()
        assert "schema: column 'value' is binary, not string; cast it in the query" in told(error.value)
        with pytest.raises(Exception) as error:
            reader.schema("wert binary").load().collect()
        assert "schema: there is no column 'wert'" in told(error.value)


# ---- Streams


def test_micro_batches_are_bounded_and_a_restart_goes_on_from_the_checkpoint(
    stream: Callable[..., Stream], topic: MakeTopic, producer: tidelog.Producer, admin: tidelog.Admin
) -> None:
    name = topic("bounded", partitions=3)
    for number in range(3):
        send(producer, name, range(100 * number, 100 * number + 100), partition=number)
    sink = Sunk()
    reading = stream(subscribe=name, startingOffsets="earliest", maxOffsetsPerTrigger="120", groupId="bounded")
    reading.run(sink)
    assert sink.sizes == [120, 120, 60]
    assert sink.values == list(range(300))
    for number in range(3):
        offsets = [offset for partition, offset, _ in sink.rows if partition == number]
        assert offsets == sorted(offsets)
    lag = {one.partition.partition: one.lag for one in admin.group_lag("bounded")}
    assert lag == {0: 0, 1: 0, 2: 0}
    send(producer, name, range(300, 350), partition=1)
    reading.run(sink)
    assert sink.values == list(range(350))
    reading.run(sink)
    assert len(sink.rows) == 350


def test_a_query_from_the_end_misses_nothing_between_its_first_stop_and_its_restart(
    stream: Callable[..., Stream], topic: MakeTopic, producer: tidelog.Producer
) -> None:
    name = topic("latest")
    send(producer, name, range(100))
    sink = Sunk()
    reading = stream(subscribe=name)
    query = reading.running(sink)
    query.stop()
    assert query.exception() is None
    assert sink.rows == []
    send(producer, name, range(100, 107))
    reading.run(sink)
    assert sink.values == list(range(100, 107))


def test_a_topic_made_anew_and_an_expired_range_are_told_apart(
    stream: Callable[..., Stream],
    topic: MakeTopic,
    producer: tidelog.Producer,
    admin: tidelog.Admin,
    bootstrap: str,
) -> None:
    name = topic("lossy")
    send(producer, name, range(10))
    sink = Sunk()
    reading = stream(subscribe=name, startingOffsets="earliest")
    reading.run(sink)
    send(producer, name, range(10, 20))
    send(producer, name, range(20, 30))
    admin.delete_records({(name, 0): 20})  # type: ignore[dict-item]
    with pytest.raises(Exception) as error:
        reading.run(sink)
    assert f"{name}-0: offsets 10 to 19 expired before the query read them" in told(error.value)
    reading.run(sink, failOnDataLoss="false")
    assert sink.values == [*range(10), *range(20, 30)]
    admin.delete_topic(name)
    until(lambda: name not in [one.name for one in admin.list_topics()], "it is gone")
    admin.create_topic(name, partitions=1)
    with tidelog.Producer(bootstrap) as fresh:
        send(fresh, name, range(100, 140))  # past the old end: only the id tells
    with pytest.raises(Exception) as error:
        reading.run(sink)
    assert f"topic '{name}' was deleted and made anew" in told(error.value)
    reading.run(sink, failOnDataLoss="false")
    assert sink.values == [*range(10), *range(20, 30), *range(100, 140)]


def leader_of(admin: tidelog.Admin, topic: str) -> int:
    return until(lambda: admin.describe_topic(topic).partitions[0].leader or 0, "somebody leads it")


class Producing:
    """Numbers to partitions in turn, until it is told to stop."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._is_over = threading.Event()
        self.sent = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with tidelog.Producer(self._bootstrap) as producer:
            while not self._is_over.wait(0.05):
                numbers = range(self.sent, self.sent + 50)
                send(producer, self._topic, numbers, partition=self.sent // 50 % self._partitions, size=200)
                self.sent += 50

    def __enter__(self) -> Producing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_a_leader_killed_while_a_query_runs_and_new_partitions(
    stream: Callable[..., Stream],
    topic: MakeTopic,
    producer: tidelog.Producer,
    admin: tidelog.Admin,
    cluster: LocalCluster,
    bootstrap: str,
) -> None:
    name = topic("lively", partitions=2)
    sink = Sunk()
    query = stream(subscribe=name, startingOffsets="earliest", metadata__max__age__ms="500").running(sink)
    try:
        with Producing(bootstrap, name, 2) as producing:
            until(lambda: len(sink.rows) >= 200, "the first rows", timeout_s=RUN_S)
            leader = leader_of(admin, name)
            cluster.kill(leader)
            try:
                seen = producing.sent
                until(lambda: producing.sent > seen + 500, "records go on being stored")
                until(lambda: len(sink.rows) > seen + 300, "rows go on coming", timeout_s=RUN_S)
            finally:
                cluster.start(leader)
            assert query.exception() is None
        admin.add_partitions({name: 3})
        until(lambda: len(admin.describe_topic(name).partitions) == 3, "three partitions")
        with tidelog.Producer(bootstrap) as fresh:
            send(fresh, name, range(producing.sent, producing.sent + 10), partition=2)
        until(lambda: len(sink.rows) >= producing.sent + 10, "all rows", timeout_s=RUN_S)
        assert query.exception() is None
    finally:
        query.stop()
    assert sink.values == list(range(producing.sent + 10))
    for number in range(3):
        offsets = [offset for partition, offset, _ in sink.rows if partition == number]
        assert offsets == list(range(len(offsets)))


def test_a_leader_killed_while_tasks_read(
    stream: Callable[..., Stream],
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "nowhere"}, "subscribe: there is no topic 'nowhere'"),
        ({"subscribe": "x", "bootstrap__servers": "localhost:1"}, "no cluster at localhost:1"),
        ({"subscribe": "x", "endingOffsets": "latest"}, "endingOffsets='latest': a streaming query has no end"),
    ],
)
def test_a_query_that_cannot_begin_says_why_in_one_line(
    stream: Callable[..., Stream], options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception) as error:
        stream(**options).run(Sunk())
    assert [line for line in told(error.value).splitlines() if words in line]


@pytest.fixture(autouse=True)
def no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()
