"""Encodes a pyarrow table into batches from its buffers, without an object per record.

Handles tables of value, key, partition and timestamp without a user's serializer, interceptor or partitioner, if the
kernel is compiled. `bulk.py` handles the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidelog.client.producer.fast_path import COMPILED, check_packed, cuts_of, packed_sizes, rows_by_partition
from tidelog.log import kernel
from tidelog.log.batch import encode_packed_unsealed
from tidelog.log.batch_header import Codec
from tidelog.model.errors import RecordTooLargeError, UnknownTopicOrPartitionError

IS_HERE = COMPILED and kernel.COMPILED

Layout = tuple["array[int]", bytes, bytes]
"""Ends, data and validity of a packed column: see `log/kernel.py`."""
NOTHING: Layout = (array("q"), b"", b"")
_BYTES = ("binary", "string", "large_binary", "large_string")
_NAMES = {"value", "key", "partition", "timestamp_ms"}


@dataclass(slots=True)
class PackedRows:
    """The columns of a table."""

    count: int
    values: Layout
    keys: Layout
    partitions: array[int] | None
    stamps: array[int] | None
    taken: array[int] | None = None
    """Timestamps for a table without any: the time of its first batch, for every row."""

    def __len__(self) -> int:
        return self.count


@dataclass(slots=True)
class PackedChunk:
    """Rows of one batch. `partition` None: the current sticky partition."""

    partition: int | None
    table: PackedRows
    rows: array[int]

    def encode(self, now_ms: int, codec: Codec, level: int | None) -> tuple[bytearray, array[int]]:
        """Return the batch, and the timestamp of each record."""
        table, count = self.table, len(self.rows)
        if table.stamps is None:
            if table.taken is None:  # once per table: it has thousands of batches
                table.taken = array("q", [now_ms]) * table.count
            stamps = table.taken
            own = stamps[:count]
            newest = stamps[0]
        else:
            stamps = table.stamps
            own = array("q", map(stamps.__getitem__, self.rows))
            newest = max(own)
        data = encode_packed_unsealed(
            self.rows, stamps, table.keys, table.values, codec=codec, level=level, max_timestamp=newest
        )
        return data, own


def packed_rows(table: Any) -> PackedRows | None:
    """Pack the table; None if this module does not handle it. `bulk.columns_of` then accepts or rejects it."""
    names = getattr(table, "column_names", None)
    if not IS_HERE or names is None or "value" not in names or not _NAMES.issuperset(names) or not table.num_rows:
        return None
    columns = {name: _whole(table.column(name)) for name in names}
    if any(column is None for column in columns.values()):
        return None
    if any(str(columns[name].type) not in _BYTES for name in ("value", "key") if name in columns):
        return None
    partitions, stamps = columns.get("partition"), columns.get("timestamp_ms")
    if partitions is not None and (partitions.null_count or str(partitions.type) != "int32"):
        return None
    if stamps is not None and (stamps.null_count or str(stamps.type) != "int64"):
        return None
    made = PackedRows(
        table.num_rows,
        _layout(columns["value"]),
        _layout(columns["key"]) if "key" in columns else NOTHING,
        None if partitions is None else _numbers(partitions, "i"),
        None if stamps is None else _numbers(stamps, "q"),
    )
    if made.stamps is not None and not 0 <= min(made.stamps) <= max(made.stamps) < 1 << 62:
        raise ValueError("timestamps are milliseconds since 1970, as integers")
    return made


def packed_chunks(
    table: PackedRows, *, state: Any, partition: int | None, bytes_max: int, row_bytes_max: int
) -> Iterator[PackedChunk]:
    """Like `bulk.chunks_of`. Raises RecordTooLargeError or UnknownTopicOrPartitionError before the first chunk."""
    parts: list[tuple[int | None, array[int]]]
    places = _row_partitions(table, state, partition)
    if places is None:
        parts = [(partition, array("i", range(table.count)))]
    else:
        groups = enumerate(rows_by_partition(places, state.count))
        parts = [(number, rows) for number, rows in groups if rows]
    key_ends, value_ends = table.keys[0], table.values[0]
    sized = [(number, rows, packed_sizes(rows, key_ends, value_ends)) for number, rows in parts]
    for _, rows, sizes in sized:
        largest = max(sizes)
        if largest > row_bytes_max:
            row = rows[sizes.index(largest)]
            raise RecordTooLargeError(f"record {row} takes {largest} bytes, more than max_request_size={row_bytes_max}")
    return _cut(table, sized, bytes_max)


def _cut(
    table: PackedRows, sized: list[tuple[int | None, array[int], array[int]]], bytes_max: int
) -> Iterator[PackedChunk]:
    for number, rows, sizes in sized:
        start = 0
        for end in cuts_of(sizes, bytes_max):
            yield PackedChunk(number, table, rows[start:end])
            start = end


def _row_partitions(table: PackedRows, state: Any, partition: int | None) -> array[int] | None:
    """Return the partition of each row; None if one applies to all rows."""
    if table.partitions is not None:
        low, high = min(table.partitions), max(table.partitions)
        if not 0 <= low <= high < state.count:
            raise UnknownTopicOrPartitionError(
                f"topic '{state.topic}' has {state.count} partitions; there is no partition {low if low < 0 else high}"
            )
        return table.partitions
    if partition is not None or not table.keys[0]:
        return None
    places = kernel.packed_partitions(*table.keys, state.count)
    if not table.keys[2]:
        return places
    sticky = state.sticky
    return array("i", [sticky if one < 0 else one for one in places])


def _whole(column: Any) -> Any:
    """Return the column as one chunk; None if it cannot be combined."""
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if not hasattr(column, "chunks"):
        return column
    return column.chunks[0] if len(column.chunks) == 1 else None


def _layout(column: Any) -> Layout:
    count = len(column)
    present = b""
    if column.null_count:
        marks = column.is_valid().cast("uint8")
        present = bytes(marks.buffers()[1])[marks.offset : marks.offset + count]
    whole = column.cast("large_binary")
    _, ends_buffer, data = whole.buffers()
    ends = array("q")
    ends.frombytes(memoryview(ends_buffer).cast("B")[8 * whole.offset : 8 * (whole.offset + count + 1)])
    made = (ends, b"" if data is None else bytes(data), present)
    check_packed(*made, count)
    return made


def _numbers(column: Any, code: str) -> array[int]:
    numbers = array(code)
    width = numbers.itemsize
    buffer = memoryview(column.buffers()[1]).cast("B")
    numbers.frombytes(buffer[width * column.offset : width * (column.offset + len(column))])
    return numbers
