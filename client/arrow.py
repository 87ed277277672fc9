"""Converts records to a pyarrow table: batches become columns without an object per record, mostly without a copy.

    topic string | partition int32 | offset int64 | timestamp timestamp[ms, UTC] | key binary | value binary |
    headers list<struct<name: string, value: binary>>

pyarrow is an optional dependency, imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidelog.log.columns import BinaryColumn, Columns
from tidelog.model.errors import InvalidRequestError

if TYPE_CHECKING:
    import pyarrow

NAMES = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")

Part = tuple[str, int, Columns, int, int]
"""Topic, partition, the columns of a batch, first row, end row (exclusive)."""


class MissingExtraError(ImportError):
    """A package that only some calls need is not installed."""


def arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError("this needs pyarrow: pip install 'tidelog[arrow]'") from None
    return pyarrow


def schema_of(columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """Return the schema of these columns, in this order; None: all."""
    pa = arrow()
    types = {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("ms", "UTC"),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())])),
    }
    chosen = NAMES if columns is None else tuple(columns)
    if unknown := [name for name in chosen if name not in types]:
        raise InvalidRequestError(f"no column '{unknown[0]}': there are {', '.join(NAMES)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise InvalidRequestError("each column once, and one at least")
    return pa.schema([(name, types[name]) for name in chosen])


def table_of(parts: Sequence[Part], columns: Sequence[str] | None = None) -> pyarrow.Table:
    pa = arrow()
    schema = schema_of(columns)
    makers = [(field.name, field.type) for field in schema]
    batches = []
    for topic, partition, found, start, end in parts:
        arrays = [_array(pa, name, kind, topic, partition, found) for name, kind in makers]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        batches.append(batch if end - start == len(found) else batch.slice(start, end - start))
    return pa.Table.from_batches(batches, schema=schema)


def _array(pa: Any, name: str, kind: Any, topic: str, partition: int, columns: Columns) -> Any:
    count = len(columns)
    if name == "topic":
        return pa.repeat(pa.scalar(topic, kind), count)
    if name == "partition":
        return pa.repeat(pa.scalar(partition, kind), count)
    if name == "offset":
        return _numbers(pa, kind, columns.offsets, count)
    if name == "timestamp":
        if columns.batch.max_timestamp < 0:  # records without a time
            return pa.nulls(count, kind)
        return _numbers(pa, kind, columns.timestamps, count)
    if name == "headers":
        headers = columns.headers()
        if headers is None:
            return pa.ListArray.from_arrays(
                pa.repeat(pa.scalar(0, pa.int32()), count + 1), pa.array([], kind.value_type)
            )
        return pa.array([[{"name": one, "value": value} for one, value in row] for row in headers], kind)
    return _binary(pa, kind, columns.keys if name == "key" else columns.values)


def _numbers(pa: Any, kind: Any, numbers: Any, count: int) -> Any:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(numbers)], null_count=0)


def _binary(pa: Any, kind: Any, column: BinaryColumn) -> Any:
    validity, ends, data = column.arrow_buffers()
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(column), buffers)
