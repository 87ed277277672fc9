"""Record batches of the log as Arrow batches of Spark: columns are handed on, no object is made for a record.

    key binary | value binary | topic string | partition int32 | offset int64 | timestamp timestamp[us, UTC] |
    timestampType int32 (0: set by the producer, 1: by the broker) | headers list<struct<key string, value binary>>

Any of them, in any order: the schema that is asked for says so, to the flag of each field, as Spark takes no other.
Small batches of the log are joined up to `ROWS` or `BYTES`, so that the fixed cost of an Arrow batch is shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tidelog.client.arrow import arrow
from tidelog.log.columns import BinaryColumn, Columns, Headers

if TYPE_CHECKING:
    import pyarrow

ROWS = 10_000
BYTES = 4 << 20


class ArrowBatches:
    """Collects rows; `add` and `rest` give batches that are full, and what is left."""

    def __init__(self, schema: pyarrow.Schema, *, rows: int = ROWS, size: int = BYTES) -> None:
        self._pa: Any = arrow()
        self._schema = schema
        self._makers: list[tuple[Callable[..., Any], Any]] = [(_MAKERS[one.name], one.type) for one in schema]
        self._rows_max = rows
        self._bytes_max = size
        self._waiting: list[Any] = []
        self._rows = self._bytes = 0

    def add(self, topic: str, partition: int, found: Columns, start: int, end: int) -> Iterator[Any]:
        """Rows [start, end) of a batch of the log."""
        if start >= end:
            return
        pa = self._pa
        arrays = [make(pa, kind, topic, partition, found) for make, kind in self._makers]
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if end - start < len(found):
            made = made.slice(start, end - start)
        size = found.values.ends[end] - found.values.ends[start] + found.keys.ends[end] - found.keys.ends[start]
        if self._waiting and self._bytes + size > self._bytes_max:
            yield from self.rest()
        self._waiting.append(made)
        self._rows += end - start
        self._bytes += size
        if self._rows >= self._rows_max or self._bytes >= self._bytes_max:
            yield from self.rest()

    def rest(self) -> Iterator[Any]:
        waiting, self._waiting = self._waiting, []
        self._rows = self._bytes = 0
        if len(waiting) == 1:
            yield waiting[0]
        elif waiting:
            yield from self._pa.Table.from_batches(waiting, schema=self._schema).combine_chunks().to_batches()


def _binary(pa: Any, kind: Any, column: BinaryColumn) -> Any:
    validity, ends, data = column.arrow_buffers()
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(column), buffers)


def _key(pa: Any, kind: Any, _topic: str, _partition: int, found: Columns) -> Any:
    return _binary(pa, kind, found.keys)


def _value(pa: Any, kind: Any, _topic: str, _partition: int, found: Columns) -> Any:
    return _binary(pa, kind, found.values)


def _topic(pa: Any, kind: Any, topic: str, _partition: int, found: Columns) -> Any:
    return pa.repeat(pa.scalar(topic, kind), len(found))


def _partition(pa: Any, kind: Any, _topic: str, partition: int, found: Columns) -> Any:
    return pa.repeat(pa.scalar(partition, kind), len(found))


def _offset(pa: Any, kind: Any, _topic: str, _partition: int, found: Columns) -> Any:
    return pa.Array.from_buffers(kind, len(found), [None, pa.py_buffer(found.offsets)], null_count=0)


def _timestamp(pa: Any, kind: Any, _topic: str, _partition: int, found: Columns) -> Any:
    if found.batch.max_timestamp < 0:  # records without a time
        return pa.nulls(len(found), kind)
    stored = pa.timestamp("ms", "UTC")
    return pa.Array.from_buffers(stored, len(found), [None, pa.py_buffer(found.timestamps)], null_count=0).cast(kind)


def _timestamp_type(pa: Any, kind: Any, _topic: str, _partition: int, found: Columns) -> Any:
    return pa.repeat(pa.scalar(int(found.batch.timestamp_type), kind), len(found))


def _headers(pa: Any, kind: Any, _topic: str, _partition: int, found: Columns) -> Any:
    """Null for a record without headers, as Spark's Kafka source has it."""
    decoded = found.headers() if found.header_blocks is not None else None
    if decoded is None:
        return pa.nulls(len(found), kind)
    names: list[str] = []
    values: list[bytes | None] = []
    ends = array("i", [0])
    for row in decoded:
        _append(row, names, values)
        ends.append(len(names))
    present = bytearray(1 if row else 0 for row in decoded)
    inner = kind.value_type
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, inner[0].type), pa.array(values, inner[1].type)], fields=[inner[0], inner[1]]
    )
    validity = BinaryColumn(ends, b"", present).validity()
    return pa.Array.from_buffers(kind, len(found), [pa.py_buffer(validity), pa.py_buffer(ends)], children=[pairs])


def _append(row: Headers, names: list[str], values: list[bytes | None]) -> None:
    for name, value in row:
        # What is not UTF-8 cannot be a string of Spark: a mark stands in its place.
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
