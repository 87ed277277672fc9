"""The sink's columns: what is refused before a job starts, and what becomes of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from tidelog.client.errors import BulkError, OptionError
from tidelog.model.errors import InvalidRecordError, RecordTooLargeError, TransportError
from tidelog.spark import sink_task
from tidelog.spark.sink_columns import check_columns, tables_of
from tidelog.spark.sink_options import SinkOptions, read_sink_options
from tidelog.spark.sink_task import write_rows
from tidelog.testing import MockProducer

NOW_MS = 1_700_000_000_000
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@dataclass
class Kind:
    text: str

    def simpleString(self) -> str:
        return self.text


@dataclass
class Field:
    name: str
    dataType: Kind  # noqa: N815 - Spark's name


@dataclass
class Schema:
    """As much of Spark's StructType as is looked at."""

    fields: list[Field]


def schema(**columns: str) -> Schema:
    return Schema([Field(name, Kind(kind)) for name, kind in columns.items()])


GOOD = {
    "topic": "string",
    "key": "string",
    "value": "binary",
    "partition": "int",
    "headers": "array<struct<key:string,value:binary>>",
    "timestamp": "timestamp",
}


@pytest.mark.parametrize(
    ("columns", "topic"),
    [
        (GOOD, None),
        ({"value": "string"}, "orders"),
        ({"value": "binary", "topic": "string"}, "orders"),
        (GOOD | {"offset": "bigint", "timestampType": "int"}, None),
    ],
)
def test_what_the_source_gives_and_less_is_taken(columns: dict[str, str], topic: str | None) -> None:
    check_columns(schema(**columns), topic=topic)


@pytest.mark.parametrize(
    ("columns", "topic", "reported"),
    [
        ({"key": "string"}, "orders", "there is no column 'value'"),
        ({"value": "int"}, "orders", "column 'value' is int, not binary or string"),
        ({"value": "string", "key": "bigint"}, "orders", "column 'key' is bigint, not binary or string"),
        ({"value": "string", "partition": "bigint"}, "orders", "column 'partition' is bigint, not int"),
        ({"value": "string", "timestamp": "timestamp_ntz"}, "orders", "is timestamp_ntz, not timestamp"),
        ({"value": "string", "headers": "map<string,binary>"}, "orders", "not array<struct<key:string,value:binary>>"),
        ({"value": "string", "topic": "int"}, "orders", "column 'topic' is int, not string"),
        ({"value": "string"}, None, "there is neither a column 'topic' nor the option 'topic'"),
        ({"value": "string", "count": "bigint"}, "orders", "column 'count' is not a column of the sink"),
    ],
)
def test_a_wrong_column_is_named_with_its_type(columns: dict[str, str], topic: str | None, reported: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_columns(schema(**columns), topic=topic)
    assert reported in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        check_columns(schema(key="int", colour="string"), topic=None)
    assert str(caught.value).count(";") == 3


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def test_rows_go_by_topic_and_keep_their_order() -> None:
    rows = batch(topic=pa.array(["a", "b", "a", "a"]), value=pa.array([b"1", b"2", b"3", b"4"]))
    found = [(topic, part.column("value").to_pylist()) for topic, part in tables_of(rows, topic=None, now_ms=NOW_MS)]
    assert found == [("a", [b"1", b"3", b"4"]), ("b", [b"2"])]
    found = [(topic, part.num_rows) for topic, part in tables_of(rows, topic="all", now_ms=NOW_MS)]
    assert found == [("all", 4)], "the option wins over the column"


def test_a_row_without_a_topic_is_an_error() -> None:
    rows = batch(topic=pa.array(["a", None]), value=pa.array([b"1", b"2"]))
    with pytest.raises(InvalidRecordError, match="1 rows have no topic"):
        list(tables_of(rows, topic=None, now_ms=NOW_MS))


def test_a_partition_may_be_named_in_some_rows_only() -> None:
    rows = batch(value=pa.array([b"1", b"2", b"3"]), partition=pa.array([1, None, 0], pa.int32()))
    parts = [part for _, part in tables_of(rows, topic="t", now_ms=NOW_MS)]
    assert [part.to_pydict() for part in parts] == [{"value": [b"1", b"3"], "partition": [1, 0]}, {"value": [b"2"]}]


def test_times_are_milliseconds_and_a_missing_one_is_now() -> None:
    moment = datetime(2024, 5, 6, 7, 8, 9, 987_654, tzinfo=UTC)
    stamps = pa.array([moment, None], pa.timestamp("us", "UTC"))
    ((_, part),) = tables_of(batch(value=pa.array([b"1", b"2"]), timestamp=stamps), topic="t", now_ms=NOW_MS)
    assert part.column("timestamp_ms").to_pylist() == [int(moment.timestamp() * 1000), NOW_MS]
    early = pa.array([datetime(1969, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    with pytest.raises(InvalidRecordError, match="before 1970"):
        list(tables_of(batch(value=pa.array([b"1"]), timestamp=early), topic="t", now_ms=NOW_MS))


def test_an_empty_batch_gives_nothing() -> None:
    assert list(tables_of(batch(value=pa.array([], pa.binary())), topic="t", now_ms=NOW_MS)) == []


OPTIONS = read_sink_options({"bootstrap.servers": "localhost:9292", "topic": "t"})


def test_a_task_writes_every_row_as_it_is() -> None:
    producer = MockProducer(partitions=3)
    headers = pa.array([[{"key": "trace", "value": b"1"}], None, []], HEADERS)
    rows = batch(
        key=pa.array(["k", None, "k"]),
        value=pa.array([b"1", None, b"3"]),
        headers=headers,
        partition=pa.array([2, 1, 2], pa.int32()),
        offset=pa.array([7, 8, 9]),
    )
    assert write_rows(OPTIONS, [rows, rows.slice(0, 0), rows], producer_of=lambda _: producer) == 6
    found = [(one.partition, one.key, one.value, one.headers) for one in producer.history]
    once = [(1, None, None, ()), (2, b"k", b"1", (("trace", b"1"),)), (2, b"k", b"3", ())]
    assert sorted(found, key=repr) == sorted(once * 2, key=repr)
    assert [value for where, _, value, _ in found if where == 2] == [b"1", b"3"] * 2


def test_headers_are_left_out_if_that_is_asked_for() -> None:
    producer = MockProducer()
    options = SinkOptions("t", has_headers=False, producer=OPTIONS.producer)
    rows = batch(value=pa.array([b"1"]), headers=pa.array([[{"key": "trace", "value": b"1"}]], HEADERS))
    assert write_rows(options, [rows], producer_of=lambda _: producer) == 1
    assert [one.headers for one in producer.history] == [()]


class Slow:
    """A delivery that is done when somebody waits for it."""

    def __init__(self, order: list[int], number: int, error: Exception | None) -> None:
        self._order, self._number, self._error = order, number, error

    def done(self) -> bool:
        return False

    def result(self) -> None:
        self._order.append(self._number)
        if self._error is not None:
            raise self._error


class SlowProducer:
    def __init__(self, fails_at: int = -1, refuses_at: int = -1) -> None:
        self.sent = 0
        self.waited: list[int] = []
        self.closed: list[float] = []
        self._fails_at, self._refuses_at = fails_at, refuses_at

    def send_many(self, topic: str, table: pa.RecordBatch) -> Slow:
        if self.sent == self._refuses_at:
            raise RecordTooLargeError("too large")
        error = BulkError("lost", errors=[(0, 1, TransportError("gone"))], stored=())
        made = Slow(self.waited, self.sent, error if self.sent == self._fails_at else None)
        self.sent += 1
        assert self.sent - len(self.waited) <= sink_task.DELIVERIES_MAX
        return made

    def abandon(self, timeout: float) -> None:
        self.closed.append(timeout)


def test_what_is_under_way_is_bounded_and_waited_for_in_order() -> None:
    producer = SlowProducer()
    rows = batch(value=pa.array([b"1"]))
    assert write_rows(OPTIONS, [rows] * 200, producer_of=lambda _: producer) == 200
    assert producer.waited == list(range(200))
    assert producer.closed == []


def test_a_task_of_nothing_writes_nothing() -> None:
    """Spark runs one for a batch without any."""
    producer = SlowProducer()
    assert write_rows(OPTIONS, [], producer_of=lambda _: producer) == 0
    assert (producer.sent, producer.closed) == (0, [])


@pytest.mark.parametrize("producer", [SlowProducer(fails_at=3), SlowProducer(refuses_at=70)])
def test_a_task_that_fails_ends_its_producer_first(producer: SlowProducer) -> None:
    rows = batch(value=pa.array([b"1"]))
    with pytest.raises((BulkError, RecordTooLargeError)):
        write_rows(OPTIONS, [rows] * 100, producer_of=lambda _: producer)
    assert producer.closed == [sink_task.GIVE_UP_S]


def test_a_failure_of_the_query_itself_ends_the_producer_at_once() -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield batch(value=pa.array([b"1"]))
        raise RuntimeError("a UDF failed")

    producer = SlowProducer()
    with pytest.raises(RuntimeError, match="a UDF failed"):
        write_rows(OPTIONS, rows(), producer_of=lambda _: producer)
    assert producer.closed == [0.0], "Spark does not wait for it"


def test_a_worker_keeps_few_producers_and_closes_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Kept:
        def __init__(self, options: dict[str, str]) -> None:
            self.options, self.is_closed = options, False
            made.append(self)

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr("tidelog.spark.sink_producer.TaskProducer", Kept)
    monkeypatch.setattr(sink_task, "_producers", {})

    def options(number: int) -> SinkOptions:
        return read_sink_options({"bootstrap.servers": f"host{number}:9292", "topic": "t"})

    first = sink_task._producer(options(0))
    assert sink_task._producer(options(0)) is first
    for number in range(1, sink_task.PRODUCERS_MAX + 1):
        sink_task._producer(options(0 if number == 1 else number))  # the first one is used again
    assert [one.is_closed for one in made] == [False] * sink_task.PRODUCERS_MAX  # type: ignore[attr-defined]
    sink_task._producer(options(9))
    assert [one.is_closed for one in made].count(True) == 1  # type: ignore[attr-defined]
