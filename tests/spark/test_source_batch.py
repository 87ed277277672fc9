"""Batch reads of the log in a real Spark against a real cluster of three nodes: columns, bounds, tasks, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from support.spark.metrics import requests
from support.spark.streams import message_of

import tidelog
from tidelog.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

STAMP_MS = 1_700_000_000_000

MakeTopic = Callable[..., str]


@pytest.fixture(scope="module")
def table(admin: tidelog.Admin, producer: tidelog.Producer) -> str:
    # Times of long ago, which retention must not see.
    admin.create_topic("table", partitions=2, configs={"retention.ms": "-1"})
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
            .schema("value binary, timestampType int not null")
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

    @pytest.mark.parametrize(
        ("options", "first", "second"),
        [
            ({"startingOffsets": '{"table": {"0": 1, "1": 95}}'}, (1, 2), (95, 100)),
            ({"STARTINGoffsets": '{"table": {"0": -1}}', "kafka.EndingOffsets": '{"table": {"1": 3}}'}, (), (0, 3)),
            (
                {"startingTimestamp": "2023-11-14T22:14:50Z", "startingOffsetsByTimestampStrategy": "latest"},
                (),
                (90, 100),
            ),
            ({"startingOffsets": "earliest", "endingTimestamp": str(STAMP_MS + 4_000)}, (0, 2), (0, 4)),
            (
                {
                    "startingOffsetsByTimestamp": json.dumps({"table": {"1": STAMP_MS + 50_000}}),
                    "endingOffsetsByTimestamp": json.dumps({"table": {"0": STAMP_MS + 1, "1": STAMP_MS + 60_000}}),
                },
                (0, 1),
                (50, 60),
            ),
            ({"Isolation.Level": "read_committed", "kafka.Client.Id": "reader"}, (0, 2), (0, 100)),
        ],
    )
    def test_what_is_read_lies_between_bounds(
        self,
        spark: SparkSession,
        bootstrap: str,
        table: str,
        options: dict[str, str],
        first: tuple[int, ...],
        second: tuple[int, ...],
    ) -> None:
        """Of partition 0 and of partition 1, in one task: they are small."""
        frame = self.read(spark, bootstrap, subscribe=table, **options)
        assert frame.rdd.getNumPartitions() == 1
        found = [(row.partition, row.offset) for row in frame.collect()]
        assert sorted(found) == [
            *((0, offset) for offset in range(*first or (0, 0))),
            *((1, n) for n in range(*second)),
        ]

    @pytest.mark.parametrize(
        ("options", "tasks"),
        [({"minPartitions": "4"}, 4), ({"maxRecordsPerPartition": "30"}, 4), ({"targetBytesPerTask": "600"}, 3)],
    )
    def test_tasks_are_split_as_the_user_wants_it(
        self, spark: SparkSession, bootstrap: str, table: str, options: dict[str, str], tasks: int
    ) -> None:
        frame = self.read(spark, bootstrap, subscribe=table, **options)
        assert frame.rdd.getNumPartitions() >= tasks
        assert frame.count() == 102

    def test_a_reader_with_a_rack_goes_to_the_replica_there(
        self, spark: SparkSession, bootstrap: str, table: str, admin: tidelog.Admin, cluster: LocalCluster
    ) -> None:
        leader = admin.describe_topic(table).partitions[1].leader
        near = next(node for node in (1, 2, 3) if node != leader)
        before = requests(cluster, [near])["Fetch"]
        frame = self.read(spark, bootstrap, assign='{"table": [1]}', client__rack=f"rack-{near}")
        assert frame.count() == 100
        assert requests(cluster, [near])["Fetch"] > before

    def test_an_empty_topic_is_an_empty_table(self, spark: SparkSession, bootstrap: str, topic: MakeTopic) -> None:
        assert self.read(spark, bootstrap, subscribe=topic("empty")).collect() == []

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"subscribe": "table", "minPartitions": "few"}, "minPartitions='few': an integer, 1 or more"),
            ({"subscribe": "table", "startingOffset": "latest"}, "did you mean 'startingOffsets'?"),
            ({"subscribe": "nowhere"}, "subscribe: there is no topic 'nowhere'"),
            ({"subscribe": "table", "kafka__linger__ms": "5"}, "linger.ms belongs to a producer, not to a consumer"),
            (
                {"subscribe": "table", "bootstrap__servers": "localhost:1", "kafka__bootstrap__wait__ms": "0"},
                "no cluster at localhost:1",
            ),
        ],
    )
    def test_errors_are_reported_in_one_line_before_a_job_starts(
        self, spark: SparkSession, bootstrap: str, table: str, options: dict[str, str], words: str
    ) -> None:
        given = {"bootstrap.servers": bootstrap} | {k.replace("__", "."): v for k, v in options.items()}
        with pytest.raises(Exception) as error:
            spark.read.format("tidelog").options(**given).load().collect()
        lines = [line for line in message_of(error.value).splitlines() if words in line]
        assert len(lines) == 1, str(error.value)

    def test_a_column_of_another_type_is_refused(self, spark: SparkSession, bootstrap: str, table: str) -> None:
        reader = spark.read.format("tidelog").options(**{"bootstrap.servers": bootstrap, "subscribe": table})
        with pytest.raises(Exception) as error:
            reader.schema("value string").load().collect()
        assert "schema: column 'value' is binary, not string; cast it in the query" in message_of(error.value)
        with pytest.raises(Exception) as error:
            reader.schema("wert binary").load().collect()
        assert "schema: there is no column 'wert'" in message_of(error.value)
