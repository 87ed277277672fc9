"""What both producers have in common, the one that waits and the one that awaits: everything but the waiting.

    send -> interceptors -> serializers -> headers, size -> partitioner -> a parcel of the accumulator

What is wrong with a record before it is taken is raised by `send`; what happens to it afterwards is in its `Delivery`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tidelog.client import io_thread
from tidelog.client.accumulator import Accumulator, TopicPlace
from tidelog.client.bulk import BulkDelivery, Chunk, Columns, Packed, chunks_of, columns_of
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import BufferFullError, ForkedError, WriterClosedError
from tidelog.client.hot import COMPILED, ROW_BYTES, Delivery, Parcel, Row, Told, are_bytes, headers_bytes
from tidelog.client.names import ProducerOptions, read_options
from tidelog.client.new_cluster import new_cluster
from tidelog.client.packed import PackedChunk, PackedRows, packed_chunks, packed_rows
from tidelog.client.partitioners import DIRECT, made_from
from tidelog.client.producer_core import METRICS, ProducerCore, place_of
from tidelog.client.records import ProducerRecord, headers_of
from tidelog.client.serializers import as_bytes, dumper
from tidelog.log.batch import HEADER_BYTES, encode_columns
from tidelog.model.errors import CallTimeoutError, RecordTooLargeError

LOGGER = logging.getLogger(__name__)

WAKE_PARCELS = 128
"""Of bulk, before the core hears of them: each time it does, it takes the interpreter from who is still encoding."""
Entry = tuple[str, int | None, Row, int, Told | None]
"""Topic, partition, row, its size, its callback."""


class ProducerFront:
    """Options, state, and the way of a record up to the accumulator."""

    _made = 0
    _now_s: Callable[[], float] = staticmethod(time.monotonic)
    _clock_ms: Callable[[], int] | None = None

    def __init__(self, first: object, keywords: dict[str, object]) -> None:
        self._is_closed = True  # until it is made
        self._options = read_options(ProducerOptions, first, keywords)
        type(self)._made += 1
        self.client_id = self._options.client_id or f"tidelog-producer-{type(self)._made}"
        self._partitioner = made_from(self._options.partitioner)
        self._dump_key = dumper(self._options.key_serializer)
        self._dump_value = dumper(self._options.value_serializer)
        on_send = (getattr(one, "on_send", None) for one in self._options.interceptors)
        self._on_send: list[Callable[[ProducerRecord], Any]] = [one for one in on_send if one is not None]
        self._is_plain = not (self._on_send or self._dump_key or self._dump_value or self._options.on_delivery)
        # Bytes of a table may go into batches as they are.
        self._is_raw = self._partitioner is DIRECT and not (self._on_send or self._dump_key or self._dump_value)
        self._is_closed = self._are_interceptors_closed = False
        self._begin()

    def _begin(self) -> None:
        """Empty, and connected to nothing: at first, and in a child after a fork."""
        options = self._options
        self._start_lock = threading.Lock()
        self._host: Any = None
        self._core: ProducerCore | None = None
        self._last_metrics: dict[str, Any] = dict.fromkeys(METRICS, 0)
        self._in = Accumulator(
            lock=threading.Lock(),
            random=self._new_random(),
            now_s=self._now_s,
            wake=self._wake,
            batch_size=options.batch_size,
            buffer_memory=options.buffer_memory,
            row_bytes_max=max(1, options.max_request_size - HEADER_BYTES),
            partitioner=self._partitioner,
            clock_ms=self._clock_ms,
        )
        self._take = self._in.take if self._is_plain else _never

    def at_exit(self, deadline_s: float) -> None:
        raise NotImplementedError

    # The host: the IO thread, or what a test has instead.

    def _acquire_host(self) -> Any:
        return io_thread.acquire(self)

    def _new_random(self) -> Random:
        return Random()

    def _new_cluster(self, host: Any) -> ClusterClient:
        return new_cluster(host, self._options)

    def _tell(self, work: Callable[[], None]) -> None:
        """Run user's callbacks."""
        host = self._host
        if host is None:
            work()  # it has just been closed, and they are owed all the same
        else:
            host.tell(work)

    async def _new_core(self) -> ProducerCore:
        return ProducerCore(self._new_cluster(self._host), self._options, self._in, self._tell)

    def _wake(self) -> None:
        host, core = self._host, self._core
        if core is not None:
            try:
                host.call_soon(core.look)
            except RuntimeError:
                self._check_open()  # the loop has ended: so has the producer, or the interpreter
                raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise WriterClosedError("this producer is closed")

    # The way in.

    def _entry(
        self, topic: str, value: Any, key: Any, partition: Any, headers: Any, timestamp_ms: Any, told: Any
    ) -> Entry:
        """A record, checked and serialized."""
        self._check_open()
        if self._on_send:
            record = self._intercepted(ProducerRecord(topic, value, key, partition, headers, timestamp_ms))
            topic, value, key = record.topic, record.value, record.key
            partition, headers, timestamp_ms = record.partition, record.headers, record.timestamp_ms
        if not isinstance(topic, str) or not topic:
            raise TypeError(f"a topic is a name, not {topic!r}")
        if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int)):
            raise TypeError(f"a partition is a number, not {partition!r}")
        key_bytes = as_bytes(key, "key") if self._dump_key is None else self._dump_key(topic, key, "key")
        value_bytes = as_bytes(value, "value") if self._dump_value is None else self._dump_value(topic, value, "value")
        pairs = headers_of(headers)
        if timestamp_ms is None:
            timestamp_ms = self._stamp()
        elif isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms < 1 << 62:
            raise ValueError(f"timestamp_ms={timestamp_ms!r}: milliseconds since 1970, as a whole number")
        size = ROW_BYTES + len(key_bytes or b"") + len(value_bytes or b"")
        if pairs is not None:
            size += headers_bytes(pairs)
        if size > self._in.row_bytes_max:
            raise RecordTooLargeError(
                f"a record of {size} bytes to '{topic}': more than max_request_size={self._options.max_request_size}"
            )
        if told is not None and not callable(told):
            raise TypeError(f"on_delivery is a function of (error, metadata), not {told!r}")
        row = (timestamp_ms, key_bytes, value_bytes, pairs)
        return topic, partition, row, size, told or self._options.on_delivery

    def _stamp(self) -> int:
        return int(time.time() * 1000) if self._clock_ms is None else self._clock_ms()

    def _intercepted(self, record: ProducerRecord) -> ProducerRecord:
        for on_send in self._on_send:
            try:
                changed = on_send(record)
            except Exception:
                LOGGER.exception("an interceptor failed: on_send to %s", record.topic)
                continue
            if isinstance(changed, ProducerRecord):
                record = changed
        return record

    def _put(self, entry: Entry) -> Delivery | None:
        """Into a parcel, if its topic is known and there is room."""
        topic, partition, row, size, told = entry
        place = place_of(self._in, topic)
        if place is None:
            return None
        if partition is None and self._partitioner.is_users:
            partition = self._partitioner.partition(place, row[1], row[2])
        return self._in.put(place, partition, row, size, told)

    def _no_room(self, topic: str, size: int) -> BufferFullError:
        return BufferFullError(
            f"no room for {size} bytes to '{topic}' in {self._options.max_block_ms} ms: {self._in.reserved} of "
            f"buffer_memory={self._in.buffer_memory} bytes are not answered yet"
        )

    def _no_metadata(self, topic: str, core: ProducerCore) -> CallTimeoutError:
        because = f": {core.locate_error}" if core.locate_error is not None else ""
        return CallTimeoutError(f"no metadata of '{topic}' in {self._options.max_block_ms} ms (max_block_ms){because}")

    # Bulk.

    def _columns(
        self, topic: str, records: Any, values: Any, keys: Any, headers: Any, timestamps_ms: Any, partition: Any
    ) -> tuple[Columns | PackedRows, int | None, int | None]:
        """What `send_many` was given, checked and serialized; the partition of all, if it is one; the highest named."""
        has_more = not (values is None and keys is None and headers is None and timestamps_ms is None)
        if self._is_raw and not has_more and (partition is None or type(partition) is int):
            packed = packed_rows(records)
            if packed is not None and (partition is None or packed.partitions is None):
                self._check_open()
                return packed, partition, partition if packed.partitions is None else max(packed.partitions)
        columns = columns_of(records, values, keys, headers, timestamps_ms, partition)
        self._check_open()
        columns = self._serialized(topic, columns)
        one = partition if isinstance(partition, int) else None
        return columns, one, one if columns.partitions is None else max(columns.partitions, default=None)

    def _chunks(
        self, columns: Columns | PackedRows, place: TopicPlace, partition: int | None
    ) -> Iterator[Chunk] | Iterator[PackedChunk]:
        if isinstance(columns, PackedRows):
            return packed_chunks(
                columns,
                place=place,
                partition=partition,
                bytes_max=self._in.batch_size,
                row_bytes_max=self._in.row_bytes_max,
            )
        return chunks_of(
            columns,
            place=place,
            partition=partition,
            partitioner=self._partitioner,
            bytes_max=self._in.batch_size,
            row_bytes_max=self._in.row_bytes_max,
        )

    def _serialized(self, topic: str, columns: Columns) -> Columns:
        """Keys and values as bytes."""
        if self._on_send:
            columns = self._intercept_all(topic, columns)
        for name, dump in (("values", self._dump_value), ("keys", self._dump_key)):
            column = getattr(columns, name)
            if column is None or (dump is None and isinstance(column, Packed)):
                continue
            what = name[:-1]
            if isinstance(column, Packed):
                column = column.to_list()
            if dump is not None:
                setattr(columns, name, [dump(topic, one, what) for one in column])
            elif not (are_bytes(column) if COMPILED else _BYTES.issuperset(map(type, column))):
                setattr(columns, name, [as_bytes(one, what) for one in column])
        return columns

    def _intercept_all(self, topic: str, columns: Columns) -> Columns:
        count = len(columns)
        none = [None] * count
        if isinstance(columns.values, Packed):
            columns.values = columns.values.to_list()
        rows = zip(
            columns.values,
            columns.keys or none,
            columns.partitions or none,
            columns.headers or none,
            columns.stamps or none,
            strict=True,
        )
        made = [self._intercepted(ProducerRecord(topic, *row)) for row in rows]
        if any(one.topic != topic for one in made):
            raise ValueError("an interceptor of send_many cannot change the topic")
        stamps = [self._stamp() if one.timestamp_ms is None else one.timestamp_ms for one in made]
        partitions = [one.partition for one in made]
        if any(one is None for one in partitions) and any(one is not None for one in partitions):
            raise ValueError("an interceptor of send_many sets the partition of all records, or of none")
        return Columns(
            [one.value for one in made],
            [one.key for one in made],
            [headers_of(one.headers) for one in made],
            stamps,
            partitions if made and partitions[0] is not None else None,  # type: ignore[arg-type]
        )

    def _parcel(self, topic: str, chunk: Chunk | PackedChunk, place: TopicPlace) -> Parcel:
        """Encoded, and not yet anywhere."""
        codec, level = self._options.compression, self._options.compression_level
        stamps: Sequence[int]
        if isinstance(chunk, PackedChunk):
            data, stamps = chunk.encode(self._stamp(), codec, level)
            count = len(stamps)
        else:
            count = len(chunk.values)
            stamps = chunk.stamps or [self._stamp()] * count
            data = encode_columns(
                stamps,
                chunk.keys or [None] * count,
                chunk.values,
                None if chunk.headers is None else [one or () for one in chunk.headers],
                codec=codec,
                level=level,
            )
        parcel = Parcel(topic, place.sticky if chunk.partition is None else chunk.partition, len(data), self._now_s())
        parcel.data = data
        parcel.size, parcel.count = len(data), count
        parcel.timestamps = stamps
        if self._options.on_delivery is not None:
            parcel.callbacks = [(row, self._options.on_delivery, None) for row in range(count)]
        return parcel

    def _enter(self, delivery: BulkDelivery, parcel: Parcel, place: TopicPlace) -> bool:
        if not self._in.add_sealed(parcel, place):
            return False
        delivery.add(parcel)
        if delivery.count % WAKE_PARCELS == 0:
            self._in.wake_core()
        return True

    # The end.

    def _unfinished(self) -> list[Parcel]:
        """Everything that has entered and has not ended, sealed."""
        accumulator = self._in
        with accumulator.lock:
            accumulator.seal_all()
            found = list(accumulator.unfinished)
        accumulator.wake_core()
        return found

    def _left(self) -> int:
        with self._in.lock:
            return sum(max(one.count, len(one.rows)) for one in self._in.unfinished)

    async def _end_core(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            await core.close()
            self._last_metrics = core.metrics()

    def _close_interceptors(self) -> None:
        """Once, whoever closes it first."""
        if self._are_interceptors_closed:
            return
        self._are_interceptors_closed = True
        for interceptor in self._options.interceptors:
            close = getattr(interceptor, "close", None)
            if close is not None:
                try:
                    close()
                except Exception:
                    LOGGER.exception("an interceptor failed: close")

    def forked(self) -> None:
        """In a child: what the parent has sent is the parent's; this object starts anew when it is used."""
        before = self._in
        lock = threading.Lock()
        for parcel in list(before.unfinished):
            parcel.lock = lock
            parcel.error = ForkedError(
                "sent by the process that this one was forked from: it is delivered there, and told there"
            )
            parcel.rows = []
            parcel.is_done = True
        io_thread.leave_behind(before, self._core, self._host)
        self._begin()

    def metrics(self) -> dict[str, Any]:
        """Figures since it was made: records, batches, retries, memory."""
        core = self._core
        found: dict[str, Any] = {"client_id": self.client_id}
        if core is not None:
            return found | core.metrics()
        return found | self._last_metrics


_BYTES = frozenset({bytes, type(None)})


def _never(*_: object) -> None:
    """The fast way of a producer that has none."""
