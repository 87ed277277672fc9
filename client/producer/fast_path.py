# cython: language_level=3, annotation_typing=False
"""Code that runs once for each record that is sent: appending to a batch, and the `Delivery` that reports its outcome.

    BatchAppender.try_append(...)  ->  Delivery(batch, index)   appended to the open batch of a partition
                                   ->  None                     the slow path: topic unknown, no open batch, or full

A `ProducerBatch` holds the records of one partition that are sent together (`partition_queue.py` has its states). A
`Delivery` has no state of its own: it is an index into a batch, which knows its outcome. One record is appended as one
tuple, so that an interruption of `try_append` (Ctrl-C) leaves whole records; `size` may then be short of one record,
which no rule depends on.

One source, two forms, as `log/kernel.py`: compiled with the types of `fast_path.pxd` where a compiler is present, else
interpreted. `lock` guards every batch that is not sealed, and the topics; completing a batch holds it, too.
"""

from array import array
from collections.abc import Callable, Generator, Sequence
from time import time
from typing import Any, NamedTuple

from tidelog.client.bridge import run_logged, wait, wait_async
from tidelog.client.errors import fresh
from tidelog.log.kernel import murmur2

try:
    import cython

    COMPILED: bool = cython.compiled
except ImportError:
    COMPILED = False

Headers = tuple[tuple[str, bytes | None], ...]
Row = tuple[int, bytes | None, bytes | None, Headers | None]
"""Timestamp, key, value, headers."""
DeliveryCallback = Callable[[Exception | None, "RecordMetadata"], object]

ROW_BYTES = 24
"""What a record takes beside key, value and headers, at most."""
EMPTY = bytearray()
"""The data of a batch that is not encoded."""


class RecordMetadata(NamedTuple):
    """Where a record is stored. `offset` is -1 where it is unknown: acks=0, or a failure."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since 1970: the record's, or the leader's if the topic is configured so."""


class ProducerBatch:
    """Open (records are appended), sealed, done (`error`, or an offset), in this order; see `partition_queue.py`."""

    def __init__(self, topic: str, partition: int, limit: int, opened_s: float) -> None:
        self.topic = topic
        self.partition = partition
        self.limit = limit
        """Bytes that it may hold; they are reserved for it while it is open."""
        self.opened_s = opened_s
        self.rows: list[Row] = []
        """Empty once it is encoded; `timestamps` stay."""
        self.size = 0
        self.count = 0
        """Records of a sealed batch."""
        self.is_sealed = False
        self.is_done = False
        self.base_offset = -1
        self.append_time_ms = -1
        self.error: Exception | None = None
        self.timestamps: Sequence[int] | None = None
        self.data = EMPTY
        """The encoded batch."""
        self.condition: Any = None
        """A `conditions.Condition` that the broker checks."""
        self.callbacks: list[tuple[int, DeliveryCallback | None, Callable[[Any], object] | None]] | None = None
        """Index, and a function to call: as on_delivery, or with the `Delivery`."""
        self.waiters: list[Callable[[], object]] | None = None
        """Called once when it is done."""
        self.lock: Any = None
        # The rest belongs to the partition's queue.
        self.deadline_s = 0.0
        self.sequence = -1
        """-1: no producer id and sequence yet."""
        self.is_in_flight = False
        self.was_sent = False
        self.may_be_stored = False
        """An attempt went unanswered, or was answered by an error that may come after the append."""
        self.leader_epoch = -1
        """Of the leader that it was last sent to."""
        self.last_error: Any = None
        self.outcome: Any = None
        """How it ended."""

    def metadata(self, index: int) -> RecordMetadata:
        offset = -1 if self.base_offset < 0 else self.base_offset + index
        stamps = self.timestamps
        stamp = self.append_time_ms
        if stamp < 0 and stamps is not None:
            stamp = stamps[index]
        return RecordMetadata(self.topic, self.partition, offset, stamp)

    def on_done(self, waiter: Callable[[], object]) -> bool:
        """Call it when the batch is done. False: the batch is done, and the waiter is not called."""
        with self.lock:
            if self.is_done:
                return False
            if self.waiters is None:
                self.waiters = [waiter]
            else:
                self.waiters.append(waiter)
            return True

    def off_done(self, waiter: Callable[[], object]) -> None:
        with self.lock:
            if self.waiters is not None and waiter in self.waiters:
                self.waiters.remove(waiter)

    def wait(self, timeout: float | None) -> bool:
        """Block until it is done. False after `timeout` seconds."""
        return self.is_done or wait(self.on_done, self.off_done, timeout)

    async def wait_async(self) -> None:
        if not self.is_done:
            await wait_async(self.on_done, self.off_done)


class Delivery:
    """The outcome of one record, as `send` returns it.

    Like a `concurrent.futures.Future` (`result`, `exception`, `done`, `add_done_callback`), and it can be awaited.
    """

    def __init__(self, batch: ProducerBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        return bool(self._batch.is_done)

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record is stored. Raises its error if it failed, and TimeoutError after `timeout` seconds."""
        self._wait(timeout)
        error = self._batch.error
        if error is not None:
            raise fresh(error)  # all records of the batch have the same one
        return self._batch.metadata(self._index)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The error of a record that failed, else None. TimeoutError after `timeout` seconds."""
        self._wait(timeout)
        return self._batch.error

    def add_done_callback(self, callback: Callable[["Delivery"], object]) -> None:
        """Call it with this object when the record is stored or failed, on the callback thread; at once if it is. Its
        errors are logged."""
        batch = self._batch
        with batch.lock:
            if not batch.is_done:
                if batch.callbacks is None:
                    batch.callbacks = []
                batch.callbacks.append((self._index, None, callback))
                return
        run_logged(callback, self)

    def _wait(self, timeout: float | None) -> None:
        if not self._batch.wait(timeout):
            raise TimeoutError(f"no response for {self._batch.topic}-{self._batch.partition} in {timeout} s")

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        if not self._batch.is_done:
            yield from self._batch.wait_async().__await__()
        return self.result()

    def __repr__(self) -> str:
        batch = self._batch
        if not batch.is_done:
            return f"<Delivery to {batch.topic}-{batch.partition}: pending>"
        outcome = f"offset {batch.metadata(self._index).offset}" if batch.error is None else repr(batch.error)
        return f"<Delivery to {batch.topic}-{batch.partition}: {outcome}>"


class TopicBuffers:
    """The open batches of one topic."""

    def __init__(self, topic: str, count: int) -> None:
        self.topic = topic
        self.count = count
        self.open: list[ProducerBatch | None] = [None] * count
        """By partition."""
        self.sticky = 0
        """The partition of records without a key."""


class BatchAppender:
    """The state that `try_append` needs; `accumulator.py` has the rest."""

    def __init__(self, lock: Any, row_bytes_max: int, clock_ms: Callable[[], int] | None = None) -> None:
        self.lock = lock
        self.topics: dict[str, TopicBuffers] = {}
        self.row_bytes_max = row_bytes_max
        self.clock_ms = clock_ms
        """None: the system's clock."""
        self.is_default_partitioner = True
        """False: records without a partition take the slow path."""

    def try_append(
        self,
        topic: Any,
        value: Any,
        key: Any,
        partition: Any = None,
        headers: Headers | None = None,
        timestamp_ms: Any = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> Delivery | None:
        """Append a record to an open batch; None if that is not possible now. Takes bytes, str and None."""
        buffers = self.topics.get(topic)
        if buffers is None:
            return None
        size = ROW_BYTES
        if value is not None:
            if type(value) is str:
                value = value.encode()
            elif type(value) is not bytes:
                return None
            size += len(value)
        if key is not None:
            if type(key) is str:
                key = key.encode()
            elif type(key) is not bytes:
                return None
            size += len(key)
        if headers is not None:
            size += headers_bytes(headers)
        if size > self.row_bytes_max:
            return None
        if timestamp_ms is None:
            stamp = int(time() * 1000) if self.clock_ms is None else self.clock_ms()
        elif type(timestamp_ms) is int and 0 <= timestamp_ms < 1 << 62:
            stamp = timestamp_ms
        else:
            return None
        with self.lock:
            if partition is not None:
                if type(partition) is not int or not 0 <= partition < buffers.count:
                    return None
                index = partition
            elif not self.is_default_partitioner:
                return None
            elif key is None:
                index = buffers.sticky
            else:
                index = (murmur2(key) & 0x7FFFFFFF) % buffers.count
            batch = buffers.open[index]
            if batch is None:
                return None
            size += batch.size
            if size > batch.limit:
                return None
            return append_row(batch, (stamp, key, value, headers), size, on_delivery)


def append_row(batch: ProducerBatch, row: Row, size: int, on_delivery: DeliveryCallback | None) -> Delivery:
    """Append under the lock; the batch has `size` bytes then."""
    rows = batch.rows
    index = len(rows)
    rows.append(row)
    batch.size = size
    if on_delivery is not None:
        if batch.callbacks is None:
            batch.callbacks = []
        batch.callbacks.append((index, on_delivery, None))
    return Delivery(batch, index)


def headers_bytes(headers: Headers) -> int:
    """What headers take in a record, at most."""
    size = 0
    for name, value in headers:
        size += 4 * len(name) + 10
        if value is not None:
            size += len(value)
    return size


def are_bytes(column: list[Any]) -> bool:
    """Whether every row is bytes or None."""
    for item in column:  # noqa: SIM110 - a loop is what the compiler wants
        if item is not None and type(item) is not bytes:
            return False
    return True


def sizes_of(values: list[bytes | None], keys: list[bytes | None] | None) -> "array[int]":
    """What each row takes at most, without headers."""
    count = len(values)
    if keys is not None and len(keys) != count:
        raise ValueError(f"columns of {len(keys)} and {count} rows")
    sizes = array("q", bytes(8 * count))
    out = sizes
    for i in range(count):
        size = ROW_BYTES
        value = values[i]
        if value is not None:
            size += len(value)
        if keys is not None:
            key = keys[i]
            if key is not None:
                size += len(key)
        out[i] = size
    return sizes


def cuts_of(sizes: "array[int]", bytes_max: int) -> list[int]:
    """Where to cut rows so that each piece has at most `bytes_max` bytes, or one row: the ends of the pieces."""
    held = sizes
    cuts: list[int] = []
    filled = 0
    for i in range(len(sizes)):
        size = held[i]
        if filled and filled + size > bytes_max:
            cuts.append(i)
            filled = 0
        filled += size
    if filled:
        cuts.append(len(sizes))
    return cuts


def cut_rows(ends: "array[int]", data: bytes) -> list[bytes | None]:
    """The rows of a column that stand one behind the other: row i is data[ends[i]:ends[i + 1]]. 64-bit `ends`."""
    if not 0 <= ends[0] <= ends[len(ends) - 1] <= len(data):
        raise ValueError(f"rows from {ends[0]} to {ends[len(ends) - 1]} of {len(data)} bytes")
    bounds, whole = ends, data
    rows: list[bytes | None] = []
    start = bounds[0]
    for i in range(1, len(ends)):
        end = bounds[i]
        if end < start:
            raise ValueError(f"row {i - 1} ends before it begins")
        rows.append(whole[start:end])
        start = end
    return rows


def sizes_between(ends: "array[int]") -> "array[int]":
    """As `sizes_of`, for values that stand one behind the other."""
    count = len(ends) - 1
    sizes = array("q", bytes(8 * count))
    bounds, out = ends, sizes
    for i in range(count):
        out[i] = ROW_BYTES + bounds[i + 1] - bounds[i]
    return sizes


def split_rows(rows: list[Row]) -> tuple[list[int], list[bytes | None], list[bytes | None], list[Headers] | None]:
    """Rows as columns: timestamps, keys, values, and headers if any row has them."""
    stamps: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    headers: list[Headers] = []
    has_headers = False
    for row in rows:
        stamps.append(row[0])
        keys.append(row[1])
        values.append(row[2])
        block = row[3]
        if block is not None:
            has_headers = True
            headers.append(block)
        else:
            headers.append(())
    return stamps, keys, values, headers if has_headers else None


def scatter(partitions: "array[int]", column: list[Any], count: int) -> list[list[Any]]:
    """A column by partition: row i goes to partition partitions[i], which is below `count`."""
    if len(partitions) != len(column):
        raise ValueError(f"columns of {len(partitions)} and {len(column)} rows")
    targets: list[list[Any]] = [[] for _ in range(count)]
    where = partitions
    for i in range(len(column)):
        target = targets[where[i]]
        target.append(column[i])
    return targets


def check_packed(ends: "array[int]", data: bytes, present: bytes, count: int) -> None:
    """ValueError for what is no packed column of `count` rows, as `log/kernel.py` says what that is."""
    if not len(ends):
        return
    if len(ends) != count + 1 or len(present) not in (0, count):
        raise ValueError(f"a column of {len(ends) - 1} rows, {len(present)} of them marked, where there are {count}")
    bounds = ends
    before = 0
    for i in range(count + 1):
        if bounds[i] < before:
            raise ValueError(f"row {i - 1} ends before it begins")
        before = bounds[i]
    if before > len(data):
        raise ValueError(f"rows up to {before} of {len(data)} bytes")


def packed_sizes(rows: "array[int]", key_ends: "array[int]", value_ends: "array[int]") -> "array[int]":
    """As `sizes_of`, for these rows of packed columns."""
    sizes = array("q", bytes(8 * len(rows)))
    order, keys, values, out = rows, key_ends, value_ends, sizes
    has_keys, has_values = len(key_ends) > 0, len(value_ends) > 0
    for i in range(len(rows)):
        row = order[i]
        size = ROW_BYTES
        if has_keys:
            size += keys[row + 1] - keys[row]
        if has_values:
            size += values[row + 1] - values[row]
        out[i] = size
    return sizes


def rows_by_partition(partitions: "array[int]", count: int) -> list["array[int]"]:
    """The numbers of the rows of each partition below `count`, in order; `partitions` has that of each row."""
    where = partitions
    ends = array("q", bytes(8 * (count + 1)))
    bounds = ends
    for i in range(len(partitions)):
        number = where[i]
        if not 0 <= number < count:
            raise ValueError(f"row {i} goes to partition {number} of {count}")
        bounds[number + 1] += 1
    for number in range(count):
        bounds[number + 1] += bounds[number]
    starts = ends[:count]
    nexts = starts
    ordered = array("i", bytes(4 * len(partitions)))
    out = ordered
    for i in range(len(partitions)):
        number = where[i]
        out[nexts[number]] = i
        nexts[number] += 1
    return [ordered[ends[number] : ends[number + 1]] for number in range(count)]
