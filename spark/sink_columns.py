"""The sink's columns, and the conversion of its Arrow batches to what the producer takes.

    value       binary or string                              required; null deletes the key in a compacted topic
    key         binary or string                              selects the partition unless `partition` does
    topic       string                                        required without the option `topic`
    partition   int                                           null: selected by key
    headers     array<struct<key: string, value: binary>>
    timestamp   timestamp                                     null: now

The source's columns `offset` and `timestampType` are ignored: the log assigns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidelog.client.errors import OptionError
from tidelog.model.errors import InvalidRecordError

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

TYPES = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "timestamp": ("timestamp",),
}
LEFT_OUT = ("offset", "timestampType")


def check_columns(schema: StructType, *, topic: str | None) -> None:
    """Raise OptionError with all errors in one line."""
    wrong: list[str] = []
    seen: set[str] = set()
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name in seen:
            wrong.append(f"there are two columns '{field.name}'")
        elif field.name in TYPES:
            if kind not in TYPES[field.name]:
                wrong.append(f"column '{field.name}' is {kind}, not {' or '.join(TYPES[field.name])}")
        elif field.name not in LEFT_OUT:
            wrong.append(f"column '{field.name}' is not a column of the sink ({', '.join(TYPES)}): drop it")
        seen.add(field.name)
    if "value" not in seen:
        wrong.append("there is no column 'value'")
    if topic is None and "topic" not in seen:
        wrong.append("there is neither a column 'topic' nor the option 'topic'")
    if wrong:
        raise OptionError("; ".join(wrong))


def tables_of(
    batch: pyarrow.RecordBatch, *, topic: str | None, now_ms: int, has_headers: bool = True
) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
    """Yield the rows by topic, as tables for `Producer.send_many`. Rows of one topic and key keep their order, unless
    only some of them name a partition."""
    if topic is not None:
        yield from ((topic, part) for part in _parts(batch, now_ms, has_headers))
        return
    import pyarrow.compute as pc

    names = batch.column("topic")
    if names.null_count:
        raise InvalidRecordError(
            f"{names.null_count} rows have no topic: the column `topic` is null and the option `topic` is not set"
        )
    for name in pc.unique(names).to_pylist():
        rows = batch.filter(pc.equal(names, name))
        yield from ((name, part) for part in _parts(rows, now_ms, has_headers))


def _parts(batch: pyarrow.RecordBatch, now_ms: int, has_headers: bool) -> Iterator[pyarrow.RecordBatch]:
    """Split the rows for the producer: all rows of a part have a partition or none has, and all have a timestamp."""
    import pyarrow.compute as pc

    if not batch.num_rows:
        return
    columns = {name: batch.column(name) for name in batch.schema.names}
    kept: dict[str, Any] = {"value": columns["value"]}
    if "key" in columns:
        kept["key"] = columns["key"]
    if has_headers and "headers" in columns:
        kept["headers"] = columns["headers"]
    if "timestamp" in columns:
        kept["timestamp_ms"] = _milliseconds(columns["timestamp"], now_ms)
    partition = columns.get("partition")
    if partition is None or partition.null_count == batch.num_rows:
        yield _batch(kept)
        return
    if not partition.null_count:
        yield _batch({**kept, "partition": partition})
        return
    named = pc.is_valid(partition)
    yield _batch({**kept, "partition": partition}).filter(named)
    yield _batch(kept).filter(pc.invert(named))


def _batch(columns: dict[str, Any]) -> pyarrow.RecordBatch:
    import pyarrow

    return pyarrow.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _milliseconds(column: Any, now_ms: int) -> Any:
    """Convert Spark's microseconds to the log's milliseconds since 1970."""
    import pyarrow
    import pyarrow.compute as pc

    micros = column.cast(pyarrow.timestamp("us", column.type.tz)).cast(pyarrow.int64())
    millis = pc.divide(micros, pyarrow.scalar(1000, pyarrow.int64()))
    if millis.null_count:
        millis = pc.fill_null(millis, pyarrow.scalar(now_ms, pyarrow.int64()))
    earliest = pc.min(millis).as_py()
    if earliest < 0:
        raise InvalidRecordError(f"a timestamp lies before 1970: {earliest} ms")
    return millis
