"""Record batches of the log as Arrow batches of Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from tidelog.log.batch import decode_columns, encode
from tidelog.log.batch_header import Codec, TimestampType
from tidelog.log.columns import Columns, Record
from tidelog.spark.columns import ArrowBatches

HEADERS = pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]), True))
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)
STAMP_MS = 1_700_000_000_123


def columns(*records: Record, base_offset: int = 0, **fields: Any) -> Columns:
    return decode_columns(encode(records, base_offset=base_offset, **fields), decompressed_bytes_max=1 << 20)


def some(count: int, first: int = 0, size: int = 1) -> Columns:
    return columns(
        *(Record(first + n, STAMP_MS + n, None, str(n).encode().ljust(size)) for n in range(count)), base_offset=first
    )


def batches(schema: pa.Schema, *parts: tuple[Columns, int, int], **limits: int) -> list[Any]:
    maker = ArrowBatches(schema, **limits)
    found = [one for part in parts for one in maker.add("t", 3, *part)]
    found += maker.rest()
    assert all(one.schema.equals(schema) for one in found)
    for one in found:
        one.validate(full=True)
    return found


def test_every_column_is_as_it_was_written() -> None:
    found = columns(
        Record(7, STAMP_MS, b"k", b"v", (("a", b"1"), ("a", None), ("ü", b""))),
        Record(8, STAMP_MS + 1, None, None),
        Record(9, STAMP_MS + 2, b"", b""),
        base_offset=7,
    )
    (batch,) = batches(SCHEMA, (found, 0, 3))
    rows = batch.to_pylist()
    assert rows[0] == {
        "key": b"k",
        "value": b"v",
        "topic": "t",
        "partition": 3,
        "offset": 7,
        "timestamp": datetime.fromtimestamp(STAMP_MS // 1000, UTC).replace(microsecond=123_000),
        "timestampType": 0,
        "headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "ü", "value": b""}],
    }
    assert [(row["key"], row["value"], row["headers"]) for row in rows[1:]] == [(None, None, None), (b"", b"", None)]


def test_a_batch_without_headers_has_nulls() -> None:
    (batch,) = batches(SCHEMA, (some(3), 0, 3))
    assert batch["headers"].null_count == 3


def test_a_header_name_that_is_not_utf8_is_marked() -> None:
    found = columns(Record(0, STAMP_MS, None, b"v", (("a\udcff", b"1"),)))
    (batch,) = batches(SCHEMA, (found, 0, 1))
    assert batch["headers"].to_pylist() == [[{"key": "a\ufffd", "value": b"1"}]]


@pytest.mark.parametrize("codec", list(Codec))
def test_columns_in_any_order_and_of_any_codec(codec: Codec) -> None:
    schema = pa.schema([("offset", pa.int64()), ("value", pa.binary())])
    found = columns(*(Record(n, STAMP_MS, b"key", b"x" * n) for n in range(20)), codec=codec)
    (batch,) = batches(schema, (found, 5, 8))
    assert batch.to_pylist() == [{"offset": n, "value": b"x" * n} for n in (5, 6, 7)]


def test_the_brokers_time_is_that_of_all_records() -> None:
    found = columns(
        *(Record(n, STAMP_MS + n, None, b"v") for n in range(3)),
        timestamp_type=TimestampType.LOG_APPEND,
        max_timestamp=STAMP_MS + 50,
    )
    (batch,) = batches(SCHEMA, (found, 0, 3))
    assert set(batch["timestampType"].to_pylist()) == {1}
    assert len(set(batch["timestamp"].to_pylist())) == 1


def test_small_batches_are_joined_and_rows_keep_their_order() -> None:
    parts = [(some(10, 10 * n), 0, 10) for n in range(25)]
    found = batches(SCHEMA, *parts, rows=100)
    assert [len(one) for one in found] == [100, 100, 50]
    assert [offset for one in found for offset in one["offset"].to_pylist()] == list(range(250))


def test_a_batch_is_bounded_in_bytes() -> None:
    parts = [(some(10, 10 * n, 100), 0, 10) for n in range(10)]
    assert [len(one) for one in batches(SCHEMA, *parts, size=3000)] == [30, 30, 30, 10]


def test_parts_of_batches_are_joined_without_what_was_not_asked_for() -> None:
    found = batches(SCHEMA, (some(10), 7, 10), (some(10, 10), 0, 2), (some(10, 20), 5, 5))
    assert [one["offset"].to_pylist() for one in found] == [[7, 8, 9, 10, 11]]
