"""Sends many records at once: takes columns, builds whole batches, and returns one object for the outcome of all.

Rows are encoded one batch at a time on the caller's thread, without an object per record. A pyarrow table is read from
its buffers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add
from threading import Lock
from time import monotonic
from typing import Any

from tidelog.client.bridge import run_logged
from tidelog.client.errors import BulkError
from tidelog.client.producer.fast_path import (
    COMPILED,
    ROW_BYTES,
    Headers,
    ProducerBatch,
    cut_rows,
    cuts_of,
    headers_bytes,
    scatter,
    sizes_between,
    sizes_of,
)
from tidelog.client.producer.partitioners import DIRECT, Partitioner, partitions_of
from tidelog.client.producer.records import headers_of
from tidelog.model.errors import RecordTooLargeError, UnknownTopicOrPartitionError

Column = list[bytes | None]

NAMES = ("value", "key", "headers", "timestamp_ms", "partition")
"""Names of columns, and of a record that is a mapping."""


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive records of one partition."""

    topic: str
    partition: int
    first_offset: int
    """-1 if unknown: acks=0."""
    count: int


@dataclass(frozen=True, slots=True)
class BulkMetadata:
    count: int
    ranges: tuple[Range, ...]
    """Batches of a partition with consecutive offsets are one range."""


class BulkDelivery:
    """The result of `send_many`: like `Delivery`, for all its records."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._batches: list[ProducerBatch] = []
        self._rejected: list[tuple[int, int, Exception]] = []
        """Partition (-1: not chosen), number of records, error."""

    @property
    def count(self) -> int:
        """Accepted records."""
        return sum(batch.count for batch in self._batches)

    @property
    def batches(self) -> int:
        """Accepted batches."""
        return len(self._batches)

    def add(self, batch: ProducerBatch) -> None:
        self._batches.append(batch)

    def reject(self, count: int, error: Exception) -> None:
        """Count records that were not accepted."""
        self._rejected.append((-1, count, error))

    def done(self) -> bool:
        return all(batch.is_done for batch in self._batches)

    def result(self, timeout: float | None = None) -> BulkMetadata:
        """Wait and return where the records are stored. Raises BulkError if some are not stored, TimeoutError after
        `timeout` seconds."""
        self._wait(timeout)
        ranges = _ranges(batch for batch in self._batches if batch.error is None)
        error = self._error(ranges)
        if error is not None:
            raise error
        return BulkMetadata(sum(one.count for one in ranges), ranges)

    def exception(self, timeout: float | None = None) -> Exception | None:
        try:
            self.result(timeout)
        except BulkError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[BulkDelivery], object]) -> None:
        """Call `callback` once, when all batches are done, on the callback thread; immediately if they are done
        already."""
        lock = Lock()
        left = [len(self._batches) + 1]

        def batch_done(_: object = None) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            run_logged(callback, self)

        for batch in self._batches:
            with batch.lock:
                if not batch.is_done:
                    if batch.callbacks is None:
                        batch.callbacks = []
                    batch.callbacks.append((0, None, batch_done))
                    continue
            batch_done()
        batch_done()

    def _error(self, ranges: tuple[Range, ...]) -> BulkError | None:
        failed = [(one.partition, one.count, one.error) for one in self._batches if one.error is not None]
        failed += self._rejected
        if not failed:
            return None
        count = sum(one[1] for one in failed)
        total = count + sum(one.count for one in ranges)
        what = f"{count} of {total} records to '{self._topic}' have failed"
        return BulkError(f"{what}, the first with: {failed[0][2]}", errors=failed, stored=ranges)

    def _wait(self, timeout: float | None) -> None:
        end_s = None if timeout is None else monotonic() + timeout
        for batch in self._batches:
            if not batch.wait(None if end_s is None else max(0.0, end_s - monotonic())):
                raise TimeoutError(f"not all records to '{self._topic}' were answered in {timeout} s")

    def __await__(self) -> Generator[Any, None, BulkMetadata]:
        for batch in self._batches:
            if not batch.is_done:
                yield from batch.wait_async().__await__()
        return self.result()


def _ranges(batches: Iterable[ProducerBatch]) -> tuple[Range, ...]:
    ranges: dict[tuple[int, int], Range] = {}
    """By partition and next offset; offsets are -1 with acks=0."""
    for batch in batches:
        first, count = batch.base_offset, batch.count
        before = ranges.pop((batch.partition, first), None)
        if before is not None:
            first, count = before.first_offset, before.count + count
        following = -1 if first < 0 else first + count
        ranges[batch.partition, following] = Range(batch.topic, batch.partition, first, count)
    return tuple(ranges.values())


# Columns.


@dataclass(slots=True)
class Columns:
    """Rows as lists of equal length."""

    values: list[Any] | Packed
    keys: list[Any] | None = None
    headers: list[Headers | None] | None = None
    stamps: list[int] | None = None
    partitions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)


def columns_of(records: Any, values: Any, keys: Any, headers: Any, timestamps_ms: Any, partition: Any) -> Columns:
    """Convert the arguments of `send_many` to columns. Raises TypeError or ValueError for wrong arguments."""
    if (records is None) == (values is None):
        raise TypeError("send_many takes either records or values (with keys=, headers=, timestamps_ms=), not both")
    if records is not None:
        if not (keys is None and headers is None and timestamps_ms is None):
            raise TypeError("keys, headers and timestamps_ms go with values=; records have their own")
        made = _of_table(records) if hasattr(records, "column_names") else _of_records(records)
    else:
        rows = _packed(values) if _is_arrow(values) else _list(values)
        made = Columns(rows, _list_or_none(keys), _headers(headers), _list_or_none(timestamps_ms))
    if partition is not None:
        if made.partitions is not None:
            raise TypeError("partition= for all records, or one in each of them, not both")
        if not isinstance(partition, int):
            made.partitions = _list(partition)
    for name in ("keys", "headers", "stamps", "partitions"):
        column = getattr(made, name)
        if column is not None and len(column) != len(made):
            raise ValueError(f"{len(made)} values, but {len(column)} {name}")
    if made.stamps is not None and not all(type(one) is int and 0 <= one < 1 << 62 for one in made.stamps):
        raise ValueError("timestamps are milliseconds since 1970, as integers")
    return made


def _list(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    if isinstance(column, (str, bytes, bytearray)):
        raise TypeError(f"a column is a list, not {type(column).__name__}")
    return _of_arrow(column) if _is_arrow(column) else list(column)


def _is_arrow(column: Any) -> bool:
    return hasattr(column, "buffers") or hasattr(column, "combine_chunks")


def _list_or_none(column: Any) -> list[Any] | None:
    return None if column is None else _list(column)


def _headers(column: Any) -> list[Headers | None] | None:
    return None if column is None else [headers_of(one) for one in column]


def _of_records(records: Iterable[Any]) -> Columns:
    """Convert mappings with the keys `NAMES`, or (key, value) pairs."""
    rows = []
    for record in records:
        if isinstance(record, Mapping):
            if unknown := set(record) - set(NAMES):
                raise TypeError(f"a record has {', '.join(NAMES)}; not {', '.join(sorted(map(str, unknown)))}")
            rows.append(tuple(record.get(name) for name in NAMES))
        elif isinstance(record, tuple) and len(record) == 2:
            rows.append((record[1], record[0], None, None, None))
        else:
            raise TypeError(
                f"a record is a mapping of {', '.join(NAMES)}, or a pair (key, value), not {type(record).__name__}; "
                "bare values go as values="
            )
    if not rows:
        return Columns([])
    values, keys, headers, stamps, partitions = (list(column) for column in zip(*rows, strict=True))
    for name, column in (("timestamp_ms", stamps), ("partition", partitions)):
        if 0 < column.count(None) < len(column):
            raise TypeError(f"{name} in all records, or in none")
    return Columns(
        values,
        keys if any(key is not None for key in keys) else None,
        _headers(headers) if any(headers) else None,
        stamps if stamps[0] is not None else None,
        partitions if partitions[0] is not None else None,
    )


def _of_table(table: Any) -> Columns:
    """Convert a pyarrow table or record batch."""
    names = list(table.column_names)
    if "value" not in names:
        raise TypeError(f"the table needs a column 'value'; it has {', '.join(names)}")
    if unknown := set(names) - {*NAMES, "timestamp"}:
        raise TypeError(f"columns are {', '.join(NAMES)}; not {', '.join(sorted(unknown))}")
    columns = {name: table.column(name) for name in names}
    stamps = columns.get("timestamp_ms", columns.get("timestamp"))
    headers = columns.get("headers")
    partitions = columns.get("partition")
    return Columns(
        _packed(columns["value"]),
        None if "key" not in columns else _of_arrow(columns["key"]),
        None if headers is None else _headers([_pairs(one) for one in headers.to_pylist()]),
        None if stamps is None else _stamps(stamps),
        None if partitions is None else partitions.to_pylist(),
    )


def _pairs(row: Any) -> Any:
    """Convert Arrow headers: a list of structs of key (or name) and value, or a map."""
    if row is None:
        return None
    return [(*one.values(),) if isinstance(one, Mapping) else one for one in row]


def _stamps(column: Any) -> list[int]:
    kind = str(column.type)
    if kind.startswith("timestamp"):
        column = column.cast("timestamp[ms, tz=UTC]" if "tz" in kind else "timestamp[ms]")
    return list(column.cast("int64").to_pylist())


class Packed:
    """A column of bytes in Arrow's layout. Rows are created one slice at a time: a million objects at once cost
    more."""

    __slots__ = ("_data", "ends")

    def __init__(self, ends: array[int], data: bytes) -> None:
        self.ends = ends
        self._data = data

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, rows: slice) -> Column:
        return cut_rows(self.ends[rows.start : rows.stop + 1], self._data)

    def to_list(self) -> Column:
        return cut_rows(self.ends, self._data)


def _of_arrow(column: Any) -> list[Any]:
    """Convert binary and text to bytes, anything else to Python objects for a serializer."""
    if str(column.type) in ("binary", "string", "large_binary", "large_string"):
        column = column.cast("large_binary")
    return list(column.to_pylist())


def _packed(column: Any) -> list[Any] | Packed:
    """Like `_of_arrow`, but keep the buffers if no row is null."""
    is_bytes = str(column.type) in ("binary", "string", "large_binary", "large_string")
    if not COMPILED or not is_bytes or column.null_count or not len(column):
        return _of_arrow(column)
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    parts = column.chunks if hasattr(column, "chunks") else [column]
    if len(parts) != 1:
        return _of_arrow(column)
    whole = parts[0].cast("large_binary")
    _, ends_buffer, data = whole.buffers()
    ends = array("q")
    ends.frombytes(ends_buffer)
    return Packed(ends[whole.offset : whole.offset + len(whole) + 1], b"" if data is None else bytes(data))


# Batches.


@dataclass(slots=True)
class Chunk:
    """Rows of one batch. `partition` None: the current sticky partition."""

    partition: int | None
    values: Column
    keys: Column | None
    headers: list[Headers | None] | None
    stamps: list[int] | None


def chunks_of(
    columns: Columns, *, state: Any, partition: int | None, partitioner: Partitioner, bytes_max: int, row_bytes_max: int
) -> Iterator[Chunk]:
    """Split the rows by partition, in order, into chunks of at most `bytes_max` bytes. Keys and values are bytes
    already.

    Raises RecordTooLargeError or UnknownTopicOrPartitionError before the first chunk.
    """
    partitions = _row_partitions(columns, state, partition, partitioner)
    parts = [(partition, columns)] if partitions is None else _scattered(columns, partitions, state.count)
    sizes = [_sizes(part) for _, part in parts]
    for largest in (max(one, default=0) for one in sizes):
        if largest > row_bytes_max:
            row = _sizes(columns).index(largest)
            raise RecordTooLargeError(f"record {row} takes {largest} bytes, more than max_request_size={row_bytes_max}")
    return chain.from_iterable(
        _cut(part, part_sizes, number, bytes_max) for (number, part), part_sizes in zip(parts, sizes, strict=True)
    )


def _scattered(columns: Columns, partitions: array[int], count: int) -> list[tuple[int | None, Columns]]:
    """Group the rows by partition."""
    values = columns.values.to_list() if isinstance(columns.values, Packed) else columns.values
    all_columns: tuple[list[Any] | None, ...] = (values, columns.keys, columns.headers, columns.stamps)
    parts = [[None] * count if column is None else scatter(partitions, column, count) for column in all_columns]
    rows = enumerate(zip(*parts, strict=True))
    return [(number, Columns(*row)) for number, row in rows if row[0]]


def _row_partitions(columns: Columns, state: Any, partition: int | None, partitioner: Partitioner) -> array[int] | None:
    """Return the partition of each row; None if one applies to all rows, or all are sticky."""
    keys = columns.keys
    if columns.partitions is not None:
        partitions = array("i", columns.partitions)
    elif partition is not None or (keys is None and partitioner.is_sticky(None)) or partitioner.is_sticky(b"any"):
        return None
    elif partitioner is DIRECT:
        assert keys is not None
        partitions = partitions_of(keys, state.count)
        return partitions if None not in keys else array("i", [state.sticky if one < 0 else one for one in partitions])
    else:
        if isinstance(columns.values, Packed):
            columns.values = columns.values.to_list()
        rows = zip(keys or [None] * len(columns), columns.values, strict=True)
        partitions = array("i", [partitioner.partition(state, key, value) for key, value in rows])
    if partitions and not 0 <= min(partitions) <= max(partitions) < state.count:
        wrong = min(partitions) if min(partitions) < 0 else max(partitions)
        raise UnknownTopicOrPartitionError(
            f"topic '{state.topic}' has {state.count} partitions; there is no partition {wrong}"
        )
    return partitions


def _sizes(columns: Columns) -> array[int]:
    if isinstance(columns.values, Packed):
        sizes = sizes_between(columns.values.ends)
        if columns.keys is not None:
            sizes = array("q", map(add, sizes, (0 if one is None else len(one) for one in columns.keys)))
    else:
        sizes = sizes_of(columns.values, columns.keys) if COMPILED else _sizes_bulk(columns.values, columns.keys)
    if columns.headers is not None:
        sizes = array("q", map(add, sizes, (0 if one is None else headers_bytes(one) for one in columns.headers)))
    return sizes


def _sizes_bulk(values: Column, keys: Column | None) -> array[int]:
    """Like `sizes_of`, vectorized for the interpreter."""

    def of(column: Column) -> list[int]:
        try:
            return list(map(len, column))  # type: ignore[arg-type]  # null has no length
        except TypeError:
            return [0 if one is None else len(one) for one in column]

    sizes = [size + ROW_BYTES for size in of(values)]
    return array("q", sizes if keys is None else map(add, sizes, of(keys)))


def _cut(columns: Columns, sizes: array[int], partition: int | None, bytes_max: int) -> Iterator[Chunk]:
    start = 0
    for end in cuts_of(sizes, bytes_max) if COMPILED else _cuts_bulk(sizes, bytes_max):
        yield Chunk(
            partition,
            columns.values[start:end],
            None if columns.keys is None else columns.keys[start:end],
            None if columns.headers is None else columns.headers[start:end],
            None if columns.stamps is None else columns.stamps[start:end],
        )
        start = end


def _cuts_bulk(sizes: array[int], bytes_max: int) -> list[int]:
    """Like `cuts_of`, vectorized for the interpreter."""
    ends = list(accumulate(sizes))
    cuts: list[int] = []
    start = before = 0
    while start < len(ends):
        start = max(start + 1, bisect_right(ends, before + bytes_max, start))
        before = ends[start - 1]
        cuts.append(start)
    return cuts
