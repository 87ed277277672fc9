# cython: language_level=3, annotation_typing=False
"""What runs once for each record that is sent: the way into a batch, and the object that tells how it ended.

    Entrance.take(...)  ->  Delivery(parcel, index)      appended to the open parcel of a partition
                        ->  None                         the slow way: no such topic yet, no open parcel, no room in it

A `Parcel` is the records of one partition that will be one batch. A `Delivery` has no state of its own: it is a place
in a parcel, and the parcel knows how it ended. One row is appended as one tuple, so that whatever interrupts `take`
(Ctrl-C between two steps) leaves whole rows; sizes may then be short of a row, which no rule depends on.

One source, two ways to run, as `log/kernel.py`: compiled with the types of `hot.pxd` where a compiler was at hand, else
interpreted. `lock` guards every parcel that is not sealed, and the places; who completes a parcel holds it too.
"""

from array import array
from collections.abc import Callable, Generator, Sequence
from time import time
from typing import Any, NamedTuple

from tidelog.client.waiting import Waiter, wait_in_loop
from tidelog.log.kernel import murmur2

try:
    import cython

    COMPILED: bool = cython.compiled
except ImportError:
    COMPILED = False

Headers = tuple[tuple[str, bytes | None], ...]
Row = tuple[int, bytes | None, bytes | None, Headers | None]
"""Timestamp, key, value, headers."""
Told = Callable[[Exception | None, "RecordMetadata"], object]

ROW_BYTES = 24
"""What a record takes beside key, value and headers, at most."""


class RecordMetadata(NamedTuple):
    """Where a record was stored. `offset` is -1 where nobody knows it: acks=0, or a failure."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since 1970: the record's, or the leader's where the topic wants that."""


class Parcel:
    """Open (rows are appended), sealed (no more), done (`error`, or an offset); in this order."""

    def __init__(self, topic: str, partition: int, limit: int, opened_s: float) -> None:
        self.topic = topic
        self.partition = partition
        self.limit = limit
        """Bytes that it may hold; so many are reserved for it while it is open."""
        self.opened_s = opened_s
        self.rows: list[Row] = []
        """Empty once it is encoded; `timestamps` stay."""
        self.size = 0
        self.count = 0
        """Of a sealed parcel."""
        self.is_sealed = False
        self.is_done = False
        self.base_offset = -1
        self.append_time_ms = -1
        self.error: Exception | None = None
        self.timestamps: Sequence[int] | None = None
        self.data: bytes | None = None
        """Encoded already, of bulk."""
        self.callbacks: list[tuple[int, Told | None, Callable[[Any], object] | None]] | None = None
        """Index, and what to call: as on_delivery, or with the `Delivery`."""
        self.waiters: list[Callable[[], object]] | None = None
        """Called once when it is done."""
        self.lock: Any = None
        self.outcome: Any = None
        """Of the core: how it ended, while an earlier parcel of the partition has not."""

    def metadata(self, index: int) -> RecordMetadata:
        offset = -1 if self.base_offset < 0 else self.base_offset + index
        stamps = self.timestamps
        stamp = self.append_time_ms
        if stamp < 0 and stamps is not None:
            stamp = stamps[index]
        return RecordMetadata(self.topic, self.partition, offset, stamp)

    def on_done(self, waiter: Callable[[], object]) -> bool:
        """Call it when the parcel is done. False: it is done, and the waiter is not called."""
        with self.lock:
            if self.is_done:
                return False
            if self.waiters is None:
                self.waiters = [waiter]
            else:
                self.waiters.append(waiter)
            return True

    def off_done(self, waiter: Callable[[], object]) -> None:
        """It waits no longer."""
        with self.lock:
            if self.waiters is not None and waiter in self.waiters:
                self.waiters.remove(waiter)

    def wait(self, timeout: float | None) -> bool:
        """Until it is done, on a plain thread; False after `timeout` seconds."""
        if self.is_done:
            return True
        done = Waiter()
        if not self.on_done(done.set):
            return True
        try:
            return done.wait(timeout)
        finally:
            if not self.is_done:
                self.off_done(done.set)

    async def waited(self) -> None:
        """The same on a loop."""
        if not self.is_done:
            await wait_in_loop(self.on_done, self.off_done)


class Delivery:
    """What `send` gives: how a record ended, once it has.

    Like a `concurrent.futures.Future` (`result`, `exception`, `done`, `add_done_callback`), and it can be awaited.
    """

    def __init__(self, parcel: Parcel, index: int) -> None:
        self._parcel = parcel
        self._index = index

    def done(self) -> bool:
        return bool(self._parcel.is_done)

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record is stored; raises why it is not, and TimeoutError after `timeout` seconds."""
        self._wait(timeout)
        error = self._parcel.error
        if error is not None:
            raise error
        return self._parcel.metadata(self._index)

    def exception(self, timeout: float | None = None) -> Exception | None:
        self._wait(timeout)
        return self._parcel.error

    def add_done_callback(self, callback: Callable[["Delivery"], object]) -> None:
        """Called with this object when it is done, on the thread of the callbacks; at once if it is done already."""
        parcel = self._parcel
        with parcel.lock:
            if not parcel.is_done:
                if parcel.callbacks is None:
                    parcel.callbacks = []
                parcel.callbacks.append((self._index, None, callback))
                return
        callback(self)

    def _wait(self, timeout: float | None) -> None:
        if not self._parcel.wait(timeout):
            raise TimeoutError(f"no answer for {self._parcel.topic}-{self._parcel.partition} in {timeout} s")

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        if not self._parcel.is_done:
            yield from self._parcel.waited().__await__()
        return self.result()

    def __repr__(self) -> str:
        parcel = self._parcel
        if not parcel.is_done:
            return f"<Delivery to {parcel.topic}-{parcel.partition}: on its way>"
        how = f"offset {parcel.metadata(self._index).offset}" if parcel.error is None else repr(parcel.error)
        return f"<Delivery to {parcel.topic}-{parcel.partition}: {how}>"


class Place:
    """Where records of one topic go now."""

    def __init__(self, topic: str, count: int) -> None:
        self.topic = topic
        self.count = count
        self.open: list[Parcel | None] = [None] * count
        """By partition."""
        self.sticky = 0
        """The partition of records without a key."""


class Entrance:
    """The state that `take` needs; `accumulator.py` has the rest."""

    def __init__(self, lock: Any, row_bytes_max: int, clock_ms: Callable[[], int] | None = None) -> None:
        self.lock = lock
        self.places: dict[str, Place] = {}
        self.row_bytes_max = row_bytes_max
        self.clock_ms = clock_ms
        """None: the system's clock."""
        self.is_direct = True
        """Whether keys are placed by murmur2 and the rest sticks: other partitioners go the slow way."""

    def take(
        self,
        topic: Any,
        value: Any,
        key: Any,
        partition: Any = None,
        headers: Headers | None = None,
        timestamp_ms: Any = None,
        told: Told | None = None,
    ) -> Delivery | None:
        """Append a record to an open parcel; None if it cannot be done right now. Takes bytes, str and None."""
        place = self.places.get(topic)
        if place is None:
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
                if type(partition) is not int or not 0 <= partition < place.count:
                    return None
                where = partition
            elif not self.is_direct:
                return None
            elif key is None:
                where = place.sticky
            else:
                where = (murmur2(key) & 0x7FFFFFFF) % place.count
            parcel = place.open[where]
            if parcel is None:
                return None
            filled = parcel.size + size
            if filled > parcel.limit:
                return None
            return append(parcel, (stamp, key, value, headers), filled, told)


def append(parcel: Parcel, row: Row, filled: int, told: Told | None) -> Delivery:
    """One row more, under the lock; the parcel has `filled` bytes then."""
    rows = parcel.rows
    index = len(rows)
    rows.append(row)
    parcel.size = filled
    if told is not None:
        if parcel.callbacks is None:
            parcel.callbacks = []
        parcel.callbacks.append((index, told, None))
    return Delivery(parcel, index)


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


def scatter(places: "array[int]", column: list[Any], count: int) -> list[list[Any]]:
    """A column by partition: row i goes to partition places[i], which is below `count`."""
    if len(places) != len(column):
        raise ValueError(f"columns of {len(places)} and {len(column)} rows")
    targets: list[list[Any]] = [[] for _ in range(count)]
    where = places
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


def rows_by_partition(places: "array[int]", count: int) -> list["array[int]"]:
    """The numbers of the rows of each partition below `count`, in order; `places` has the partition of each row."""
    where = places
    ends = array("q", bytes(8 * (count + 1)))
    bounds = ends
    for i in range(len(places)):
        number = where[i]
        if not 0 <= number < count:
            raise ValueError(f"row {i} goes to partition {number} of {count}")
        bounds[number + 1] += 1
    for number in range(count):
        bounds[number + 1] += bounds[number]
    starts = ends[:count]
    nexts = starts
    ordered = array("i", bytes(4 * len(places)))
    out = ordered
    for i in range(len(places)):
        number = where[i]
        out[nexts[number]] = i
        nexts[number] += 1
    return [ordered[ends[number] : ends[number + 1]] for number in range(count)]
