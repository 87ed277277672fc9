"""Tasks of the source and of the sink when something is wrong: ranges that end nowhere, rows that are refused."""

# ruff: noqa: E402 - Spark may not be there

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from support.spark.availability import need

need("pyspark", by=__name__)

from pyspark.sql.types import BinaryType, StructField, StructType

import tidelog
from tidelog.client.errors import BulkError, OptionError
from tidelog.client.producer.packed import IS_HERE, packed_chunks, packed_rows
from tidelog.log.batch import decode, decode_columns, encode_columns
from tidelog.log.batch_header import Codec
from tidelog.model.errors import TidelogError
from tidelog.spark import sink, sink_task
from tidelog.spark.client_cache import cached_client
from tidelog.spark.columns import ArrowBatches
from tidelog.spark.errors import TruncationError
from tidelog.spark.offsets import ReadRange
from tidelog.spark.options import source_options
from tidelog.spark.reading import read_ranges
from tidelog.spark.sink_options import read_sink_options
from tidelog.spark.sink_task import write_rows
from tidelog.testing import MemoryCluster

SCHEMA = pa.schema([("offset", pa.int64())])
VALUE = StructType([StructField("value", BinaryType())])


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryCluster]:
    with MemoryCluster(seed=11) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sink, "_checked", {})
    monkeypatch.setattr(sink_task, "_producers", {})
    yield
    for producer in sink_task._producers.values():
        producer.close()


def rows(tag: str, count: int, size: int = 10) -> pa.RecordBatch:
    values = [f"{tag}{number}".encode().ljust(size, b".") for number in range(count)]
    return pa.RecordBatch.from_arrays([pa.array(values)], names=["value"])


def stored(memory: MemoryCluster, topic: str) -> list[str]:
    table = tidelog.read_arrow(topic, bootstrap=memory.bootstrap)
    return [value.rstrip(b".").decode() for value in table.column("value").to_pylist()]


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_range_that_the_log_does_not_have_is_not_waited_for(memory: MemoryCluster, fails: str) -> None:
    """However long the query would wait for a broker."""
    topic = f"short-{fails}"
    with tidelog.Admin(memory.bootstrap) as admin:
        topic_id = admin.create_topic(topic, partitions=1).topic_id
        assert topic_id is not None
    with tidelog.Producer(memory.bootstrap) as producer:
        producer.send_many(topic, values=["x"] * 5).result(30)
    given = {"bootstrap.servers": memory.bootstrap, "subscribe": topic}
    options = source_options(
        given | {"brokerTimeoutMs": "0", "failOnDataLoss": fails}, is_streaming=True, now_ms=1_700_000_000_000
    )
    read = read_ranges(cached_client(options), options, [ReadRange(topic, topic_id.hex, 0, 0, 9, -1)], SCHEMA)
    if fails == "true":
        with pytest.raises(TruncationError, match="up to offset 9"):
            list(read)
    else:
        assert [number for batch in read for number in batch["offset"].to_pylist()] == list(range(5))


def test_nothing_is_stored_behind_rows_that_were_refused(memory: MemoryCluster) -> None:
    """What a task had stored when it failed is a beginning of its rows."""
    with tidelog.Admin(memory.bootstrap) as admin:
        admin.create_topic("refusing", partitions=1, configs={"max.message.bytes": 20_000})
    options = read_sink_options({"bootstrap.servers": memory.bootstrap, "topic": "refusing"})
    given = [rows("A", 3), rows("B", 1, 50_000), rows("C", 3), rows("D", 3)]
    with pytest.raises(BulkError, match="over the limit of 20000"):
        write_rows(options, given)
    assert stored(memory, "refusing") == ["A0", "A1", "A2"]
    assert sink_task._producers == {}
    assert write_rows(options, [rows("E", 2)]) == 2  # the next attempt has a producer of its own
    assert stored(memory, "refusing") == ["A0", "A1", "A2", "E0", "E1"]


def test_a_task_that_fails_does_not_wait_for_room_that_will_not_come(memory: MemoryCluster) -> None:
    with tidelog.Admin(memory.bootstrap) as admin:
        admin.create_topic("full", partitions=1, configs={"max.message.bytes": 20_000})
    given = {"bootstrap.servers": memory.bootstrap, "topic": "full", "batch.size": "10000"}
    given |= {"buffer.memory": "200000", "max.request.size": "100000"}
    many = [rows("A", 3), rows("B", 1, 50_000), *(rows("C", 100, 500) for _ in range(50))]
    with pytest.raises(TidelogError, match="over the limit of 20000"):
        write_rows(read_sink_options(given), many)
    assert stored(memory, "full") == ["A0", "A1", "A2"]


def test_the_sink_is_checked_once_and_lives_on_when_its_address_does_not(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tidelog.Admin(memory.bootstrap) as admin:
        admin.create_topic("checked", partitions=1)
    checks: list[object] = []
    plain = sink.check_cluster

    def check(options: Any) -> None:
        checks.append(options)
        plain(options)

    monkeypatch.setattr(sink, "check_cluster", check)
    first = {"bootstrap.servers": memory.bootstrap.split(",")[0], "topic": "checked"}
    second = {**first, "linger.ms": "7"}
    for given in (first, second):
        sink.make_stream_writer(given, VALUE, False)
    options = read_sink_options(first)
    assert write_rows(options, [rows("A", 1)]) == 1
    killed = memory.kill(memory.brokers[0])
    try:
        for given in (first, second):
            sink.make_stream_writer(given, VALUE, False)  # a micro-batch of either query
        assert write_rows(options, [rows("B", 1)]) == 1
    finally:
        memory.restart(killed)
    assert len(checks) == 2


def test_a_path_is_refused_as_in_the_source() -> None:
    with pytest.raises(OptionError, match=r"path: save\(\) takes no path"):
        read_sink_options({"bootstrap.servers": "a:1", "topic": "t", "path": "/somewhere"})


def test_headers_count_in_the_size_of_an_arrow_batch() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    data = encode_columns([1] * 10, [None] * 10, [b"v"] * 10, [[("h", b"x" * 1_000)]] * 10)
    found = decode_columns(data, 0, decompressed_bytes_max=1 << 20)

    def sizes(schema: pa.Schema) -> list[int]:
        batches = ArrowBatches(schema, size=25_000)
        made = [batch.num_rows for _ in range(5) for batch in batches.add("t", 0, found, 0, 10)]
        return made + [batch.num_rows for batch in batches.rest()]

    assert sizes(pa.schema([("value", pa.binary()), ("headers", kind)])) == [20, 20, 10]
    assert sizes(pa.schema([("value", pa.binary())])) == [50]  # what is not asked for does not count


@pytest.mark.skipif(not IS_HERE, reason="the kernel is not compiled")
def test_rows_without_a_time_are_given_theirs_once() -> None:
    """An array of the whole table for each batch of it would be work without bounds."""

    class Place:
        topic, count, sticky = "t", 1, 0

    found = packed_rows(pa.table({"value": pa.array([b"x" * 100] * 1_000)}))
    assert found is not None
    chunks = list(packed_chunks(found, state=Place, partition=0, bytes_max=10_000, row_bytes_max=1 << 20))
    assert len(chunks) > 5
    times = []
    for number, chunk in enumerate(chunks):
        data, own = chunk.encode(1_000 + number, Codec.NONE, None)
        times += [record.timestamp for record in decode(data, 0, decompressed_bytes_max=1 << 20)]
        assert list(own) == times[-len(own) :]
    assert times == [1_000] * 1_000
