"""The sink in a real Spark, against a real cluster of three nodes."""

from __future__ import annotations

import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidelog
from tidelog.spark import foreach_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

Make = Callable[..., str]


def rows_of(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """Everything in the topic, by partition and offset."""
    table = tidelog.read_arrow(topic, bootstrap=bootstrap)
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def values_of(bootstrap: str, topic: str) -> list[str]:
    return [row["value"].decode() for row in rows_of(bootstrap, topic)]


def write(frame: DataFrame, bootstrap: str, **options: str) -> None:
    frame.write.format("tidelog").options(**{"bootstrap.servers": bootstrap, **options}).mode("append").save()


def files(spark: SparkSession, path: Path, batches: Iterable[Iterable[str]]) -> DataFrame:
    """A stream whose micro-batches are these: a text file for each, taken by their times."""
    path.mkdir()
    for number, lines in enumerate(batches):
        file = path / f"{number:04}.txt"
        file.write_text("\n".join(lines) + "\n")
        os.utime(file, (1_700_000_000 + 60 * number,) * 2)
    return spark.readStream.format("text").option("maxFilesPerTrigger", "1").load(str(path))


def run(frame: DataFrame, bootstrap: str, topic: str, checkpoint: Path, mode: str = "append") -> Any:
    query = (
        frame.writeStream.format("tidelog")
        .options(**{"kafka.bootstrap.servers": bootstrap, "topic": topic, "checkpointLocation": str(checkpoint)})
        .outputMode(mode)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


# In batches.


def test_a_batch_has_all_columns(spark: SparkSession, bootstrap: str, topic: Make) -> None:
    first, second = topic("sink-a", 3), topic("sink-b", 3)
    moment = datetime(2024, 5, 6, 7, 8, 9, 123_000, tzinfo=UTC)
    kind = (
        "topic string, key string, value binary, partition int, timestamp timestamp, "
        "headers array<struct<key: string, value: binary>>"
    )
    given = [
        (first, "k", bytearray(b"1"), 2, moment, [("trace", bytearray(b"x")), ("none", None)]),
        (first, None, None, 1, moment, None),
        (second, "k", bytearray(b"2"), None, None, []),
    ]
    write(spark.createDataFrame(given, kind).coalesce(1), bootstrap)
    one, two = rows_of(bootstrap, first)
    assert (one["partition"], one["key"], one["value"], one["timestamp"]) == (1, None, None, moment)
    assert (two["partition"], two["key"], two["value"], two["timestamp"]) == (2, b"k", b"1", moment)
    assert [(header["name"], header["value"]) for header in two["headers"]] == [("trace", b"x"), ("none", None)]
    (other,) = rows_of(bootstrap, second)
    assert (other["key"], other["value"], other["headers"]) == (b"k", b"2", [])
    assert abs((other["timestamp"] - datetime.now(UTC)).total_seconds()) < 300


def test_many_rows_arrive_once_and_in_order_per_key(spark: SparkSession, bootstrap: str, topic: Make) -> None:
    name = topic("sink-many", 4)
    frame = spark.range(0, 50_000, 1, 2).selectExpr("CAST(id DIV 2500 AS STRING) AS key", "CAST(id AS STRING) AS value")
    write(frame, bootstrap, topic=name, **{"compression.type": "zstd"})
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for row in rows_of(bootstrap, name):
        by_key[row["key"]].append(int(row["value"]))
    assert sorted(by_key) == sorted(b"%d" % key for key in range(20))
    for key, found in by_key.items():
        assert found == list(range(int(key) * 2500, int(key) * 2500 + 2500))


@pytest.mark.parametrize(
    ("columns", "options", "reported"),
    [
        (["CAST(id AS STRING) AS key"], {}, "there is no column 'value'"),
        (["id AS value"], {}, "column 'value' is bigint, not binary or string"),
        (["'1' AS value", "id AS partition"], {}, "column 'partition' is bigint, not int"),
        (["'1' AS value", "id"], {}, "column 'id' is not a column of the sink"),
        (["'1' AS value"], {"topic": "no-such-topic"}, "topic=no-such-topic: there is no topic 'no-such-topic'"),
        (
            ["'1' AS value"],
            {"bootstrap.servers": "localhost:1", "bootstrap.wait.ms": "0"},
            "no cluster at localhost:1",
        ),
        (["'1' AS value"], {"linger.ms": "soon"}, "linger.ms='soon': must be a number"),
        (
            ["'1' AS value"],
            {"delivery": "exactly-once"},
            "delivery=exactly-once: the sink does not write in transactions yet",
        ),
    ],
)
def test_what_is_wrong_is_one_line_before_any_job(
    spark: SparkSession, bootstrap: str, columns: list[str], options: dict[str, str], reported: str
) -> None:
    from pyspark.errors import AnalysisException

    group = f"wrong {columns} {options}"
    spark.sparkContext.setJobGroup(group, group)
    with pytest.raises(AnalysisException) as caught:
        write(spark.range(3).selectExpr(*columns), bootstrap, **{"topic": "t", **options})
    text = str(caught.value)
    assert reported in text
    assert "Traceback" not in text
    assert len([line for line in text.splitlines() if reported in line]) == 1
    assert not spark.sparkContext.statusTracker().getJobIdsForGroup(group)


def test_a_log_is_not_overwritten(spark: SparkSession, bootstrap: str, topic: Make) -> None:
    from pyspark.errors import AnalysisException

    options = {"bootstrap.servers": bootstrap, "topic": topic("sink-over")}
    frame = spark.range(1).selectExpr("'1' AS value")
    with pytest.raises(AnalysisException, match=r"mode\('overwrite'\): a log is append-only"):
        frame.write.format("tidelog").options(**options).mode("overwrite").save()


# Streams.


def test_append_mode_writes_each_row_once_over_a_restart(
    spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path
) -> None:
    name = topic("sink-append", 2)
    frame = files(spark, tmp_path / "in", [[f"{batch}-{row}" for row in range(20)] for batch in range(3)])
    rows = frame.selectExpr("split(value, '-')[0] AS key", "value")
    run(rows, bootstrap, name, tmp_path / "checkpoint")
    (tmp_path / "in" / "0003.txt").write_text("3-0\n")
    run(rows, bootstrap, name, tmp_path / "checkpoint")
    assert sorted(values_of(bootstrap, name)) == sorted([f"{b}-{r}" for b in range(3) for r in range(20)] + ["3-0"])


def test_complete_mode_appends_the_whole_result_each_time(
    spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path
) -> None:
    name = topic("sink-complete")
    counts = files(spark, tmp_path / "in", [["a", "b", "a"], ["a"]]).groupBy("value").count()
    rows = counts.selectExpr("value AS key", "CAST(count AS STRING) AS value")
    run(rows, bootstrap, name, tmp_path / "checkpoint", mode="complete")
    found = [(row["key"], row["value"]) for row in rows_of(bootstrap, name)]
    assert sorted(found[:2]) == [(b"a", b"2"), (b"b", b"1")]
    assert sorted(found[2:]) == [(b"a", b"3"), (b"b", b"1")]


def test_update_mode_goes_through_a_function(spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path) -> None:
    name = topic("sink-update")
    counts = files(spark, tmp_path / "in", [["a", "b", "a"], ["a"]]).groupBy("value").count()
    rows = counts.selectExpr("value AS key", "CAST(count AS STRING) AS value")
    query = (
        rows.writeStream.outputMode("update")
        .foreachBatch(foreach_batch({"bootstrap.servers": bootstrap}, topic=name))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = [(row["key"], row["value"]) for row in rows_of(bootstrap, name)]
    assert sorted(found[:2]) == [(b"a", b"2"), (b"b", b"1")]
    assert found[2:] == [(b"a", b"3")], "what did not change is not written again"


def test_a_wrong_column_ends_a_stream_in_one_line(
    spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    frame = files(spark, tmp_path / "in", [["a"]]).selectExpr("length(value) AS value")
    with pytest.raises(StreamingQueryException) as caught:
        run(frame, bootstrap, topic("sink-wrong"), tmp_path / "checkpoint")
    assert "column 'value' is int, not binary or string" in str(caught.value)
    assert "Traceback" not in str(caught.value)


# Failures.


def failing(marks: Path, every: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Rows as they are; but a task that meets a row whose number is a multiple of `every` dies of it, once."""

    def through(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column("value").to_pylist():
                mark = marks / f"failed-{number}"
                if int(number) % every == every - 1 and not mark.exists():
                    mark.touch()
                    # What is before it has gone to the sink already.
                    yield batch.slice(0, batch.column("value").to_pylist().index(number))
                    raise RuntimeError(f"no luck with row {number}")
            yield batch

    return through


def replays(found: list[int], wanted: list[int]) -> bool:
    """Whether these are `wanted` in order, but for going back any number of times to go on from an earlier row."""
    reached = 0
    for number in found:
        place = wanted.index(number)
        if place > reached:
            return False
        reached = place + 1 if place == reached else reached
    # After each step back the rows follow each other again.
    follow = all(
        wanted.index(b) == wanted.index(a) + 1 or wanted.index(b) <= wanted.index(a) for a, b in pairwise(found)
    )
    return follow and reached == len(wanted)


def test_tasks_that_fail_lose_nothing_and_repeat_only_what_is_replayed(
    spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path
) -> None:
    name = topic("sink-failing", 3)
    marks = tmp_path / "marks"
    marks.mkdir()
    batches = [[str(row) for row in range(batch * 400, batch * 400 + 400)] for batch in range(3)]
    frame = files(spark, tmp_path / "in", batches).mapInArrow(failing(marks, 350), "value string")
    # Long rows in small batches, or all of them would still be in Spark's buffers when the failure comes.
    rows = frame.selectExpr("CAST(CAST(value AS INT) % 5 AS STRING) AS key", "rpad(value, 4000, ' ') AS value")
    small = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(small, "50")
    try:
        run(rows, bootstrap, name, tmp_path / "checkpoint")
    finally:
        spark.conf.unset(small)
    assert len(list(marks.iterdir())) >= 3, "tasks did fail"
    by_key: dict[bytes, list[int]] = defaultdict(list)
    total = 0
    for row in rows_of(bootstrap, name):
        by_key[row["key"]].append(int(row["value"]))
        total += 1
    assert sorted({number for found in by_key.values() for number in found}) == list(range(1200))
    assert total > 1200, "what the failed attempts had stored is there twice"
    for key, found in by_key.items():
        assert replays(found, list(range(int(key), 1200, 5))), found


def test_repeated_and_lost_rows_are_distinguished() -> None:
    assert replays([0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3])
    assert not replays([0, 2, 3], [0, 1, 2, 3])
    assert not replays([0, 1, 2], [0, 1, 2, 3])
    assert not replays([0, 1, 2, 3, 1, 3], [0, 1, 2, 3])


def test_a_batch_that_is_replayed_is_written_again_and_nothing_else(
    spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path
) -> None:
    name = topic("sink-replay")
    frame = files(spark, tmp_path / "in", [["0", "1"], ["2", "3"]])
    run(frame, bootstrap, name, tmp_path / "checkpoint")
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    newest.unlink()  # as a driver leaves it that dies between the rows and the note of them
    for note in (tmp_path / "checkpoint" / "commits").glob(".*.crc"):
        note.unlink()
    run(frame, bootstrap, name, tmp_path / "checkpoint")
    assert values_of(bootstrap, name) == ["0", "1", "2", "3", "2", "3"]


# The seam.


def test_a_task_knows_its_query_its_batch_and_its_attempt(
    spark: SparkSession, bootstrap: str, topic: Make, tmp_path: Path
) -> None:
    """The names of Spark's local properties are no promise of Spark's."""
    name = topic("sink-attempt")

    def who(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        from tidelog.spark.worker import attempt

        for batch in batches:
            me = attempt()
            reported = json.dumps([me.owner, me.batch_id, me.task, me.attempt])
            yield pyarrow.RecordBatch.from_pydict({"value": [reported] * batch.num_rows})

    frame = files(spark, tmp_path / "in", [["a"], ["b"]]).mapInArrow(who, "value string")
    query = run(frame, bootstrap, name, tmp_path / "checkpoint")
    found = [json.loads(value) for value in values_of(bootstrap, name)]
    assert [row[:3] for row in found] == [[query.id, 0, 0], [query.id, 1, 0]]
    assert found[0][3] != found[1][3]
    outside = spark.createDataFrame([("a",)], "value string").mapInArrow(who, "value string").collect()
    assert json.loads(outside[0]["value"])[:2] == ["", -1]


def test_writers_and_their_messages_travel(spark: SparkSession) -> None:
    from tidelog.spark.sink import BatchSink, Stored, StreamSink
    from tidelog.spark.sink_options import read_sink_options
    from tidelog.spark.worker import Attempt

    options = read_sink_options({"bootstrap.servers": "localhost:9292", "topic": "t"})
    for kind in (BatchSink, StreamSink):
        assert pickle.loads(pickle.dumps(kind(options))).options == options
    message = Stored(Attempt("query", 7, 1, 9), 100)
    assert pickle.loads(pickle.dumps(message)) == message
    StreamSink(options).commit([message, None], 7)
    StreamSink(options).abort([None], 7)
