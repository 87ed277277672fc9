"""Tables that go into batches as they are: the same bytes as row by row, and nothing that is no column gets through."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.logs.record_codecs import KERNELS

from tidelog.client.producer import packed
from tidelog.client.producer.bulk import chunks_of, columns_of
from tidelog.client.producer.fast_path import check_packed, packed_sizes, rows_by_partition, sizes_of
from tidelog.client.producer.packed import PackedChunk, packed_chunks, packed_rows
from tidelog.client.producer.partitioners import DIRECT
from tidelog.log.batch import decode, encode_columns_unsealed
from tidelog.log.batch_header import Codec
from tidelog.model.errors import RecordTooLargeError, UnknownTopicOrPartitionError
from tidelog.testing import MockProducer

PLACE: Any = SimpleNamespace(topic="t", count=3, sticky=1)
NOW_MS = 1_700_000_000_000
STAMPS = st.integers(0, 2**45)
needs_the_compiler = pytest.mark.skipif(not packed.IS_HERE, reason="the loops are not compiled")


@st.composite
def tables(draw: st.DrawFn) -> pa.RecordBatch:
    rows = draw(st.integers(1, 30))

    def column(one: st.SearchStrategy[Any], kind: Any) -> pa.Array:
        # A slice of a longer one: its buffers do not begin with its first row.
        before = draw(st.integers(0, 3))
        return pa.array(draw(st.lists(one, min_size=rows + before, max_size=rows + before)), kind)[before:]

    cells = st.none() | st.binary(max_size=12) if draw(st.booleans()) else st.binary(max_size=12)
    columns = {"value": column(cells, pa.binary())}
    if draw(st.booleans()):
        columns["key"] = column(
            st.none() | st.text(max_size=6), draw(st.sampled_from([pa.string(), pa.large_string()]))
        )
    if draw(st.booleans()):
        columns["timestamp_ms"] = column(STAMPS, pa.int64())
    if draw(st.booleans()):
        columns["partition"] = column(st.integers(0, 2), pa.int32())
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def row_by_row(table: pa.RecordBatch, bytes_max: int) -> list[tuple[int | None, bytearray]]:
    columns = columns_of(table, None, None, None, None, None)
    columns.values = list(table.column("value").to_pylist())
    chunks = chunks_of(
        columns, state=PLACE, partition=None, partitioner=DIRECT, bytes_max=bytes_max, row_bytes_max=1 << 20
    )
    return [
        (
            chunk.partition,
            encode_columns_unsealed(
                chunk.stamps or [NOW_MS] * len(chunk.values), chunk.keys or [None] * len(chunk.values), chunk.values
            ),
        )
        for chunk in chunks
    ]


@needs_the_compiler
@given(tables(), st.integers(30, 400))
def test_a_packed_table_gives_the_batches_of_its_rows(table: pa.RecordBatch, bytes_max: int) -> None:
    found = packed_rows(table)
    assert found is not None
    chunks = packed_chunks(found, state=PLACE, partition=None, bytes_max=bytes_max, row_bytes_max=1 << 20)
    made = [(chunk.partition, chunk.encode(NOW_MS, Codec.NONE, None)) for chunk in chunks]
    assert [(partition, data) for partition, (data, _) in made] == row_by_row(table, bytes_max)
    for _, (data, stamps) in made:
        assert list(stamps) == [one.timestamp for one in decode(data, decompressed_bytes_max=1 << 20)]


@given(tables())
def test_the_loops_do_the_same_interpreted(table: pa.RecordBatch) -> None:
    layouts = [packed._layout(table.column(name)) for name in ("value", "key") if name in table.schema.names]
    values, keys = layouts[0], layouts[1] if len(layouts) > 1 else packed.NOTHING
    stamps = array("q", range(5, 5 + table.num_rows))
    rows = array("i", reversed(range(table.num_rows)))
    encoded = {bytes(one.encode_packed(rows, stamps, *keys, *values, 7)) for one in KERNELS}
    assert len(encoded) == 1
    if keys[0]:
        placed = {tuple(one.packed_partitions(*keys, 3)) for one in KERNELS}
        assert placed == {tuple(KERNELS[-1].partitions_of(_bytes(table.column("key")), 3))}
    sizes = sizes_of(_bytes(table.column("value")), _bytes(table.column("key")) if keys[0] else None)
    assert list(packed_sizes(rows, keys[0], values[0])) == list(reversed(sizes))


def _bytes(column: pa.Array) -> list[bytes | None]:
    return list(column.cast(pa.large_binary()).to_pylist())


@given(st.lists(st.integers(0, 4), max_size=50))
def test_rows_go_to_their_partitions_in_order(places: list[int]) -> None:
    found = rows_by_partition(array("i", places), 5)
    assert [list(one) for one in found] == [
        [row for row, place in enumerate(places) if place == number] for number in range(5)
    ]


def test_a_place_that_is_not_there_is_refused() -> None:
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"row 1 goes to partition {wrong} of 3"):
            rows_by_partition(array("i", [0, wrong]), 3)


@pytest.mark.parametrize(
    ("ends", "data", "present", "count", "reported"),
    [
        ([0, 2, 1], b"abc", b"", 2, "row 1 ends before it begins"),
        ([-1, 2], b"abc", b"", 1, "ends before it begins"),
        ([0, 4], b"abc", b"", 1, "rows up to 4 of 3 bytes"),
        ([0, 1, 2], b"abc", b"", 3, "a column of 2 rows"),
        ([0, 1, 2], b"abc", b"\1", 2, "1 of them marked"),
    ],
)
def test_what_is_no_column_is_refused(ends: list[int], data: bytes, present: bytes, count: int, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        check_packed(array("q", ends), data, present, count)


@pytest.mark.parametrize(
    "columns",
    [
        {"value": pa.array([1, 2])},
        {"key": pa.array([b"k", b"k"])},
        {"value": pa.array([b"1", b"2"]), "headers": pa.array([[], []], pa.list_(pa.string()))},
        {"value": pa.array([b"1", b"2"]), "partition": pa.array([1, None], pa.int32())},
        {"value": pa.array([b"1", b"2"]), "timestamp_ms": pa.array([1, None], pa.int64())},
        {"value": pa.array([], pa.binary())},
    ],
)
def test_other_tables_go_the_other_way(columns: dict[str, pa.Array]) -> None:
    assert packed_rows(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))) is None


@needs_the_compiler
def test_errors_are_reported_before_the_first_piece() -> None:
    def chunks(table: pa.Table, partition: int | None = None) -> list[PackedChunk]:
        found = packed_rows(table)
        assert found is not None
        return list(packed_chunks(found, state=PLACE, partition=partition, bytes_max=1000, row_bytes_max=100))

    large = pa.table({"value": pa.array([b"1", b"x" * 200]), "key": pa.array(["a", "b"])})
    with pytest.raises(RecordTooLargeError, match="record 1 takes 225 bytes, more than max_request_size=100"):
        chunks(large)
    away = pa.table({"value": pa.array([b"1"]), "partition": pa.array([3], pa.int32())})
    with pytest.raises(UnknownTopicOrPartitionError, match="'t' has 3 partitions; there is no partition 3"):
        chunks(away)
    with pytest.raises(ValueError, match="milliseconds since 1970"):
        packed_rows(pa.table({"value": pa.array([b"1"]), "timestamp_ms": pa.array([-1])}))
    (one,) = chunks(pa.table({"value": pa.array([b"1", b"2"])}), partition=2)
    assert (one.partition, list(one.rows)) == (2, [0, 1])


@needs_the_compiler
def test_a_producer_with_work_of_its_own_for_each_record_takes_rows() -> None:
    table = pa.table({"value": pa.array([b"1"])})

    def kind(producer: MockProducer) -> str:
        return type(producer._columns("t", table, None, None, None, None, None)[0]).__name__

    assert kind(MockProducer()) == "PackedRows"
    assert kind(MockProducer(partitioner="round_robin")) == "Columns"
    assert kind(MockProducer(value_serializer=lambda one: one)) == "Columns"
