"""Many records at once: columns in, whole batches out, and one object that tells how all of them ended.

Rows are encoded a batch at a time on the caller's thread, so that no object is made for each record. A table of pyarrow
is read from its buffers.
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

from tidelog.client.errors import BulkError
from tidelog.client.hot import (
    COMPILED,
    ROW_BYTES,
    Headers,
    Parcel,
    cut_rows,
    cuts_of,
    headers_bytes,
    scatter,
    sizes_between,
    sizes_of,
)
from tidelog.client.partitioners import DIRECT, Partitioner, partitions_of
from tidelog.client.records import headers_of
from tidelog.model.errors import RecordTooLargeError, UnknownTopicOrPartitionError

Column = list[bytes | None]

NAMES = ("value", "key", "headers", "timestamp_ms", "partition")
"""Of columns, and of a record that is a mapping."""


@dataclass(frozen=True, slots=True)
class Range:
    """Records that stand one behind the other."""

    topic: str
    partition: int
    first_offset: int
    """-1 where nobody knows: acks=0."""
    count: int


@dataclass(frozen=True, slots=True)
class BulkMetadata:
    count: int
    ranges: tuple[Range, ...]
    """One for each batch."""


class BulkDelivery:
    """What `send_many` gives; like `Delivery`, for all its records together."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._parcels: list[Parcel] = []
        self._left_out: list[tuple[int, int, Exception]] = []
        """Partition (-1: not chosen), how many, why."""

    @property
    def count(self) -> int:
        """Batches that were taken."""
        return len(self._parcels)

    def add(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)

    def leave_out(self, count: int, error: Exception) -> None:
        """Records that were not taken any more."""
        self._left_out.append((-1, count, error))

    def done(self) -> bool:
        return all(parcel.is_done for parcel in self._parcels)

    def result(self, timeout: float | None = None) -> BulkMetadata:
        """Where the records are stored; BulkError if some are not, TimeoutError after `timeout` seconds."""
        self._wait(timeout)
        ranges = tuple(
            Range(parcel.topic, parcel.partition, parcel.base_offset, parcel.count)
            for parcel in self._parcels
            if parcel.error is None
        )
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
        """Called once when all of it is done, on the thread of the callbacks; at once if it is done already."""
        lock = Lock()
        left = [len(self._parcels) + 1]

        def one_less(_: object = None) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            callback(self)

        for parcel in self._parcels:
            with parcel.lock:
                if not parcel.is_done:
                    if parcel.callbacks is None:
                        parcel.callbacks = []
                    parcel.callbacks.append((0, None, one_less))
                    continue
            one_less()
        one_less()

    def _error(self, ranges: tuple[Range, ...]) -> BulkError | None:
        failed = [(one.partition, one.count, one.error) for one in self._parcels if one.error is not None]
        failed += self._left_out
        if not failed:
            return None
        count = sum(one[1] for one in failed)
        total = count + sum(one.count for one in ranges)
        what = f"{count} of {total} records to '{self._topic}' have failed"
        return BulkError(f"{what}, the first with: {failed[0][2]}", errors=failed, stored=ranges)

    def _wait(self, timeout: float | None) -> None:
        end_s = None if timeout is None else monotonic() + timeout
        for parcel in self._parcels:
            if not parcel.wait(None if end_s is None else max(0.0, end_s - monotonic())):
                raise TimeoutError(f"not all records to '{self._topic}' were answered in {timeout} s")

    def __await__(self) -> Generator[Any, None, BulkMetadata]:
        for parcel in self._parcels:
            if not parcel.is_done:
                yield from parcel.waited().__await__()
        return self.result()


# Columns.


@dataclass(slots=True)
class Columns:
    """Rows as lists of the same length."""

    values: list[Any] | Packed
    keys: list[Any] | None = None
    headers: list[Headers | None] | None = None
    stamps: list[int] | None = None
    partitions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)


def columns_of(records: Any, values: Any, keys: Any, headers: Any, timestamps_ms: Any, partition: Any) -> Columns:
    """What `send_many` was given, as columns. TypeError or ValueError if it cannot be that."""
    if (records is None) == (values is None):
        raise TypeError("send_many takes records, or values= (and keys= and so on), one of both")
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
        raise ValueError("timestamps are milliseconds since 1970, as whole numbers")
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
    """Mappings with the names of `NAMES`, or pairs of key and value."""
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
    """A table or record batch of pyarrow."""
    names = list(table.column_names)
    if "value" not in names:
        raise TypeError(f"the table needs a column 'value'; it has {', '.join(names)}")
    if unknown := set(names) - {*NAMES, "timestamp"}:
        raise TypeError(f"columns are {', '.join(NAMES)}; not {', '.join(sorted(unknown))}")
    found = {name: table.column(name) for name in names}
    stamps = found.get("timestamp_ms", found.get("timestamp"))
    headers = found.get("headers")
    partitions = found.get("partition")
    return Columns(
        _packed(found["value"]),
        None if "key" not in found else _of_arrow(found["key"]),
        None if headers is None else _headers([_pairs(one) for one in headers.to_pylist()]),
        None if stamps is None else _stamps(stamps),
        None if partitions is None else partitions.to_pylist(),
    )


def _pairs(row: Any) -> Any:
    """Headers as Arrow has them: a list of structs of key (or name) and value, or a map."""
    if row is None:
        return None
    return [(*one.values(),) if isinstance(one, Mapping) else one for one in row]


def _stamps(column: Any) -> list[int]:
    kind = str(column.type)
    if kind.startswith("timestamp"):
        column = column.cast("timestamp[ms, tz=UTC]" if "tz" in kind else "timestamp[ms]")
    return list(column.cast("int64").to_pylist())


class Packed:
    """A column of bytes as Arrow has it. Rows are made a slice at a time: a million objects at once cost more."""

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
    """Binary and text as bytes; anything else as Python objects, for a serializer."""
    if str(column.type) in ("binary", "string", "large_binary", "large_string"):
        column = column.cast("large_binary")
    return list(column.to_pylist())


def _packed(column: Any) -> list[Any] | Packed:
    """The same, or the buffers as they are if every row is there."""
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
    """Rows that will be one batch. `partition` None: where keyless records go now."""

    partition: int | None
    values: Column
    keys: Column | None
    headers: list[Headers | None] | None
    stamps: list[int] | None


def chunks_of(
    columns: Columns, *, place: Any, partition: int | None, partitioner: Partitioner, bytes_max: int, row_bytes_max: int
) -> Iterator[Chunk]:
    """The rows by partition, in order, in pieces of at most `bytes_max` bytes. Keys and values are bytes already.

    Raises RecordTooLargeError or UnknownTopicOrPartitionError before the first piece.
    """
    wanted = _places(columns, place, partition, partitioner)
    parts = [(partition, columns)] if wanted is None else _scattered(columns, wanted, place.count)
    sizes = [_sizes(part) for _, part in parts]
    for largest in (max(one, default=0) for one in sizes):
        if largest > row_bytes_max:
            row = _sizes(columns).index(largest)
            raise RecordTooLargeError(f"record {row} takes {largest} bytes, more than max_request_size={row_bytes_max}")
    return chain.from_iterable(
        _cut(part, part_sizes, number, bytes_max) for (number, part), part_sizes in zip(parts, sizes, strict=True)
    )


def _scattered(columns: Columns, wanted: array[int], count: int) -> list[tuple[int | None, Columns]]:
    """The rows of each partition that has any."""
    values = columns.values.to_list() if isinstance(columns.values, Packed) else columns.values
    all_columns: tuple[list[Any] | None, ...] = (values, columns.keys, columns.headers, columns.stamps)
    parts = [[None] * count if column is None else scatter(wanted, column, count) for column in all_columns]
    rows = enumerate(zip(*parts, strict=True))
    return [(number, Columns(*row)) for number, row in rows if row[0]]


def _places(columns: Columns, place: Any, partition: int | None, partitioner: Partitioner) -> array[int] | None:
    """The partition of each row; None if one is given for all, or all stick."""
    keys = columns.keys
    if columns.partitions is not None:
        found = array("i", columns.partitions)
    elif partition is not None or (keys is None and partitioner.is_sticky(None)) or partitioner.is_sticky(b"any"):
        return None
    elif partitioner is DIRECT:
        assert keys is not None
        found = partitions_of(keys, place.count)
        return found if None not in keys else array("i", [place.sticky if one < 0 else one for one in found])
    else:
        if isinstance(columns.values, Packed):
            columns.values = columns.values.to_list()
        rows = zip(keys or [None] * len(columns), columns.values, strict=True)
        found = array("i", [partitioner.partition(place, key, value) for key, value in rows])
    if found and not 0 <= min(found) <= max(found) < place.count:
        wrong = min(found) if min(found) < 0 else max(found)
        raise UnknownTopicOrPartitionError(
            f"'{place.topic}' has {place.count} partitions from 0 on, there is no {wrong}"
        )
    return found


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
    """As `sizes_of`, for the interpreter."""

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
    """As `cuts_of`, for the interpreter."""
    ends = list(accumulate(sizes))
    cuts: list[int] = []
    start = before = 0
    while start < len(ends):
        start = max(start + 1, bisect_right(ends, before + bytes_max, start))
        before = ends[start - 1]
        cuts.append(start)
    return cuts
