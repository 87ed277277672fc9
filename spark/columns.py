"""Converts record batches of the log to Arrow batches for Spark, column by column, without an object per record.

    key binary | value binary | topic string | partition int32 | offset int64 | timestamp timestamp[us, UTC] |
    timestampType int32 (0: set by the producer, 1: by the broker) | headers list<struct<key string, value binary>>

The requested schema selects the columns and their order; Spark requires it to match exactly, nullability included.
Small batches are merged up to `ROWS` or `BYTES` and each column is built once for all of them: one pyarrow call costs
more than the few hundred rows of such a batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.client.arrow import arrow
from tidelog.log.columns import BinaryColumn, Columns, Headers

if TYPE_CHECKING:
    import pyarrow

ROWS = 10_000
BYTES = 4 << 20


class Part(NamedTuple):
    """Rows [start, end) of a record batch."""

    topic: str
    partition: int
    found: Columns
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


class ArrowBatches:
    """Collects rows. `add` yields full Arrow batches, `rest` the remainder."""

    def __init__(self, schema: pyarrow.Schema, *, rows: int = ROWS, size: int = BYTES) -> None:
        self._pa: Any = arrow()
        self._schema = schema
        self._makers: list[tuple[Callable[..., Any], Any]] = [(_MAKERS[one.name], one.type) for one in schema]
        self._has_headers = "headers" in schema.names
        self._rows_max = rows
        self._bytes_max = size
        self._waiting: list[Part] = []
        self._rows = self._bytes = 0

    def add(self, topic: str, partition: int, columns: Columns, start: int, end: int) -> Iterator[Any]:
        """Add rows [start, end) of a record batch; yield each full Arrow batch."""
        if start >= end:
            return
        size = columns.values.ends[end] - columns.values.ends[start] + columns.keys.ends[end] - columns.keys.ends[start]
        if self._has_headers and columns.header_blocks is not None:
            size += columns.header_blocks.ends[end] - columns.header_blocks.ends[start]
        if self._waiting and self._bytes + size > self._bytes_max:
            yield from self.rest()
        self._waiting.append(Part(topic, partition, columns, start, end))
        self._rows += end - start
        self._bytes += size
        if self._rows >= self._rows_max or self._bytes >= self._bytes_max:
            yield from self.rest()

    def rest(self) -> Iterator[Any]:
        waiting, self._waiting = self._waiting, []
        self._rows = self._bytes = 0
        if waiting:
            arrays = [make(self._pa, kind, waiting) for make, kind in self._makers]
            yield self._pa.RecordBatch.from_arrays(arrays, schema=self._schema)


# One column for all parts.


def _joined(pa: Any, arrays: Sequence[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _repeated(pa: Any, kind: Any, runs: Iterable[tuple[Any, int]]) -> Any:
    """Repeat each value the given number of times."""
    merged = [(value, sum(count for _, count in run)) for value, run in groupby(runs, key=lambda one: one[0])]
    return _joined(pa, [pa.repeat(pa.scalar(value, kind), count) for value, count in merged])


def _numbers(pa: Any, kind: Any, columns: Sequence[array[int]], parts: Sequence[Part]) -> Any:
    """Return a 64-bit column, one piece per part."""
    if len(parts) == 1:
        buffers, start = [None, pa.py_buffer(columns[0])], parts[0].start
    else:
        pieces = [memoryview(column)[part.start : part.end] for column, part in zip(columns, parts, strict=True)]
        buffers, start = [None, pa.py_buffer(b"".join(pieces))], 0
    return pa.Array.from_buffers(kind, sum(part.rows for part in parts), buffers, null_count=0, offset=start)


def _binary(pa: Any, kind: Any, column: BinaryColumn, part: Part) -> Any:
    validity, ends, data = column.arrow_buffers()
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, part.rows, buffers, offset=part.start)


def _key(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    return _joined(pa, [_binary(pa, kind, part.found.keys, part) for part in parts])


def _value(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    return _joined(pa, [_binary(pa, kind, part.found.values, part) for part in parts])


def _topic(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    return _repeated(pa, kind, ((part.topic, part.rows) for part in parts))


def _partition(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    return _repeated(pa, kind, ((part.partition, part.rows) for part in parts))


def _offset(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    return _numbers(pa, kind, [part.found.offsets for part in parts], parts)


def _timestamp(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    """Return timestamps; null for records without one."""
    made = []
    for has_time, run in groupby(parts, key=lambda part: part.found.batch.max_timestamp >= 0):
        some = list(run)
        if has_time:
            stamps = [part.found.timestamps for part in some]
            made.append(_numbers(pa, pa.timestamp("ms", "UTC"), stamps, some).cast(kind))
        else:
            made.append(pa.nulls(sum(part.rows for part in some), kind))
    return _joined(pa, made)


def _timestamp_type(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    return _repeated(pa, kind, ((int(part.found.batch.timestamp_type), part.rows) for part in parts))


def _headers(pa: Any, kind: Any, parts: Sequence[Part]) -> Any:
    """Return headers; null for a record without headers, as in Spark's Kafka source."""
    return _joined(pa, [_headers_of(pa, kind, part) for part in parts])


def _headers_of(pa: Any, kind: Any, part: Part) -> Any:
    decoded = part.found.headers()
    if decoded is None:
        return pa.nulls(part.rows, kind)
    rows = decoded[part.start : part.end]
    names: list[str] = []
    values: list[bytes | None] = []
    ends = array("i", [0])
    for row in rows:
        _append(row, names, values)
        ends.append(len(names))
    present = bytearray(1 if row else 0 for row in rows)
    inner = kind.value_type
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, inner[0].type), pa.array(values, inner[1].type)], fields=[inner[0], inner[1]]
    )
    validity = BinaryColumn(ends, b"", present).validity()
    return pa.Array.from_buffers(kind, part.rows, [pa.py_buffer(validity), pa.py_buffer(ends)], children=[pairs])


def _append(row: Headers, names: list[str], values: list[bytes | None]) -> None:
    for name, value in row:
        # Spark strings are UTF-8; invalid bytes become the replacement character.
        is_plain = name.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in name)
        names.append(name if is_plain else name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        values.append(value)


_MAKERS: dict[str, Callable[..., Any]] = {
    "key": _key,
    "value": _value,
    "topic": _topic,
    "partition": _partition,
    "offset": _offset,
    "timestamp": _timestamp,
    "timestampType": _timestamp_type,
    "headers": _headers,
}
