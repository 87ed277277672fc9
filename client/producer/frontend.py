"""Code shared by the threaded and the asyncio producer; they differ only in how they wait.

    send -> interceptors -> serializers -> headers, size -> partitioner -> an open batch of the accumulator

`send` raises what is wrong with a record before it is taken; its `Delivery` has what happens to it afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from random import Random
from typing import Any

from tidelog.client import io_thread
from tidelog.client.cluster import ClusterClient
from tidelog.client.core_host import CoreHost
from tidelog.client.durations import check_timeout
from tidelog.client.errors import ForkedError, ProducerClosedError
from tidelog.client.new_cluster import new_cluster
from tidelog.client.option_table import ProducerConfig, read_options
from tidelog.client.producer.accumulator import Accumulator, TopicState
from tidelog.client.producer.bulk import BulkDelivery, Chunk, Columns, Packed, chunks_of, columns_of
from tidelog.client.producer.conditions import Condition, condition_of
from tidelog.client.producer.core import METRICS, ProducerCore, RunCallbacks
from tidelog.client.producer.fast_path import (
    COMPILED,
    ROW_BYTES,
    Delivery,
    DeliveryCallback,
    ProducerBatch,
    Row,
    are_bytes,
    headers_bytes,
)
from tidelog.client.producer.packed import PackedChunk, PackedRows, packed_chunks, packed_rows
from tidelog.client.producer.partitioners import DIRECT, create_partitioner
from tidelog.client.producer.records import ProducerRecord, check_callback, headers_of
from tidelog.client.record import TopicPartition
from tidelog.client.serializers import as_bytes, dumper
from tidelog.log.batch import HEADER_BYTES, encode_columns_unsealed
from tidelog.model.errors import InvalidTransactionStateError, RecordTooLargeError

LOGGER = logging.getLogger(__name__)

BATCHES_PER_WAKE = 128
"""Batches of `send_many` before the core is woken: each time it takes the interpreter from the thread that encodes."""
Entry = tuple[str, int | None, Row, int, DeliveryCallback | None]
"""Topic, partition, row, its size, its callback."""


_numbers = count(1)


class ProducerFrontend:
    """Options, state, and the path of a record up to the accumulator."""

    _now_s: Callable[[], float] = staticmethod(time.monotonic)
    _clock_ms: Callable[[], int] | None = None

    def __init__(self, bootstrap: object, options: dict[str, object]) -> None:
        self._config = read_options(ProducerConfig, bootstrap, options)
        self.client_id = self._config.client_id or f"tidelog-producer-{next(_numbers)}"
        if self._config.on_delivery is not None:
            check_callback(self._config.on_delivery)
        self._partitioner = create_partitioner(self._config.partitioner)
        self._dump_key = dumper(self._config.key_serializer)
        self._dump_value = dumper(self._config.value_serializer)
        on_send = (getattr(interceptor, "on_send", None) for interceptor in self._config.interceptors)
        self._on_send: list[Callable[[ProducerRecord], Any]] = [method for method in on_send if method is not None]
        self._is_plain = not (self._on_send or self._dump_key or self._dump_value or self._config.on_delivery)
        # Bytes of a table may go into batches as they are.
        self._is_raw = self._partitioner is DIRECT and not (self._on_send or self._dump_key or self._dump_value)
        self._are_interceptors_closed = False
        has_id = self._config.transactional_id is not None
        self._host: CoreHost[ProducerCore] = CoreHost(
            self._new_core,
            name="producer",
            closed_error=ProducerClosedError,
            # A child would fence its parent, and what it sends would be part of no transaction.
            survives_fork=lambda core: not (has_id or (core is not None and core.transactions.is_used)),
            on_fork=self._forked,
            at_exit=self._at_exit,
            acquire=self._acquire,
        )
        self._new_accumulator()

    def _new_accumulator(self) -> None:
        config = self._config
        self._accumulator = Accumulator(
            lock=threading.Lock(),
            random=self._new_random(),
            now_s=self._now_s,
            wake=_do_nothing,
            batch_size=config.batch_size,
            buffer_memory=config.buffer_memory,
            row_bytes_max=max(1, config.max_request_size - HEADER_BYTES),
            partitioner=self._partitioner,
            clock_ms=self._clock_ms,
        )
        if config.transactional_id is not None:
            self._accumulator.reject(
                InvalidTransactionStateError("the record was not taken: call init_transactions first, or use a block")
            )
        self._try_append = self._accumulator.try_append if self._is_plain else _do_nothing

    # A test replaces these.

    def _acquire(self, owner: io_thread.Owner) -> Any:
        return io_thread.acquire(owner)

    def _new_random(self) -> Random:
        return Random()

    def _new_cluster(self, io: Any) -> ClusterClient:
        return new_cluster(io, self._config)

    # The core.

    def _new_core(self, io: Any) -> ProducerCore:
        """It does not refer to this object: a producer that is dropped is closed."""
        core = ProducerCore(self._new_cluster(io), self._config, self._accumulator, self._callback_runner(io))
        self._accumulator.wake = partial(_wake, io, core)
        return core

    def _callback_runner(self, io: Any) -> RunCallbacks:
        runner: RunCallbacks = io.run_callback
        return runner

    def _deadline_s(self) -> float:
        return self._now_s() + self._config.max_block_ms / 1000

    def _ready(self, topic: str, partition: int | None, size: int, deadline_s: float) -> Callable[[ProducerCore], Any]:
        """The call of the core that waits until `_append` may succeed."""
        timeout = deadline_s - self._now_s()
        return lambda core: core.ready(topic, partition, size, timeout)

    def _timeout_for_metadata(self, timeout: float | None) -> float:
        self._host.check_open()
        check_timeout(timeout)
        return self._config.max_block_ms / 1000 if timeout is None else timeout

    def _known_partitions(self, topic: str) -> list[TopicPartition] | None:
        """None: the topic is not known yet."""
        buffers = self._accumulator.topics.get(topic)
        return None if buffers is None else [TopicPartition(topic, number) for number in range(buffers.count)]

    # Records.

    def _entry(
        self, topic: str, value: Any, key: Any, partition: Any, headers: Any, timestamp_ms: Any, on_delivery: Any
    ) -> Entry:
        """A record, checked and serialized."""
        self._host.check_open()
        if self._on_send:
            record = self._intercepted(ProducerRecord(topic, value, key, partition, headers, timestamp_ms))
            topic, value, key = record.topic, record.value, record.key
            partition, headers, timestamp_ms = record.partition, record.headers, record.timestamp_ms
        if not isinstance(topic, str) or not topic:
            raise TypeError(f"a topic is a str that is not empty, not {topic!r}")
        if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int)):
            raise TypeError(f"a partition is an int, not {partition!r}")
        key_bytes = as_bytes(key, "key") if self._dump_key is None else self._dump_key(topic, key, "key")
        value_bytes = as_bytes(value, "value") if self._dump_value is None else self._dump_value(topic, value, "value")
        pairs = headers_of(headers)
        if timestamp_ms is None:
            timestamp_ms = self._stamp()
        elif isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms < 1 << 62:
            raise ValueError(f"timestamp_ms={timestamp_ms!r}: milliseconds since 1970, as an int")
        size = ROW_BYTES + len(key_bytes or b"") + len(value_bytes or b"")
        if pairs is not None:
            size += headers_bytes(pairs)
        if size > self._accumulator.row_bytes_max:
            raise RecordTooLargeError(
                f"a record of {size} bytes to '{topic}': more than max_request_size={self._config.max_request_size}"
            )
        if on_delivery is not None:
            check_callback(on_delivery)
        row = (timestamp_ms, key_bytes, value_bytes, pairs)
        return topic, partition, row, size, on_delivery or self._config.on_delivery

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

    def _append(self, entry: Entry) -> Delivery | None:
        """Append it to a batch. None: wait until the core is `_ready`, and append again."""
        topic, partition, row, size, on_delivery = entry
        state = self._accumulator.state_of(topic)
        if state is None or (partition is not None and partition >= state.count):
            return None
        if partition is None and self._partitioner.is_users:
            partition = self._partitioner.partition(state, row[1], row[2])
        return self._accumulator.put(state, partition, row, size, on_delivery)

    # Conditions.

    def _condition(self, expected_offset: Any, fencing_token: Any, claim: Any, partition: Any) -> Condition:
        return condition_of(
            expected_offset,
            fencing_token,
            claim,
            partition=partition,
            acks=self._config.acks,
            is_transactional=self._config.transactional_id is not None,
        )

    def _conditional(self, entry: Entry, condition: Condition) -> tuple[ProducerBatch, Delivery]:
        """A batch of one record, for `_enter`."""
        topic, partition, row, _, on_delivery = entry
        timestamp_ms, key, value, headers = row
        assert partition is not None, "`condition_of` has checked it"
        data = encode_columns_unsealed(
            [timestamp_ms],
            [key],
            [value],
            None if headers is None else [headers],
            codec=self._config.compression,
            level=self._config.compression_level,
            is_claim=condition.is_claim,
        )
        batch = self._batch_of(topic, partition, data, [timestamp_ms])
        batch.condition = condition
        if on_delivery is not None:
            batch.callbacks = [(0, on_delivery, None)]
        return batch, Delivery(batch, 0)

    def _batch_of(self, topic: str, partition: int, data: bytearray, stamps: Sequence[int]) -> ProducerBatch:
        batch = ProducerBatch(topic, partition, len(data), self._now_s())
        batch.data = data
        batch.size, batch.count = len(data), len(stamps)
        batch.timestamps = stamps
        batch.lock = self._accumulator.lock
        return batch

    # Bulk.

    def _columns(
        self, topic: str, records: Any, values: Any, keys: Any, headers: Any, timestamps_ms: Any, partition: Any
    ) -> tuple[Columns | PackedRows, int | None, int | None]:
        """Records of `send_many`, checked and serialized; their partition, if all have the same; the highest one."""
        has_more = not (values is None and keys is None and headers is None and timestamps_ms is None)
        if self._is_raw and not has_more and (partition is None or type(partition) is int):
            packed = packed_rows(records)
            if packed is not None and (partition is None or packed.partitions is None):
                self._host.check_open()
                return packed, partition, partition if packed.partitions is None else max(packed.partitions)
        columns = columns_of(records, values, keys, headers, timestamps_ms, partition)
        self._host.check_open()
        columns = self._serialized(topic, columns)
        shared = partition if isinstance(partition, int) else None
        return columns, shared, shared if columns.partitions is None else max(columns.partitions, default=None)

    def _chunks(
        self, columns: Columns | PackedRows, state: TopicState, partition: int | None, condition: Condition | None
    ) -> Iterator[Chunk] | Iterator[PackedChunk]:
        if condition is None:
            return self._cut(columns, state, partition, self._accumulator.batch_size)
        chunks = list(islice(self._cut(columns, state, partition, self._accumulator.row_bytes_max), 2))
        if len(chunks) > 1:
            raise RecordTooLargeError(
                f"{len(columns)} records to '{state.topic}' with expected_offset are one batch: they are more than "
                f"max_request_size={self._config.max_request_size}"
            )
        return iter(chunks)  # type: ignore[return-value]

    def _cut(
        self, columns: Columns | PackedRows, state: TopicState, partition: int | None, bytes_max: int
    ) -> Iterator[Chunk] | Iterator[PackedChunk]:
        if isinstance(columns, PackedRows):
            return packed_chunks(
                columns,
                state=state,
                partition=partition,
                bytes_max=bytes_max,
                row_bytes_max=self._accumulator.row_bytes_max,
            )
        return chunks_of(
            columns,
            state=state,
            partition=partition,
            partitioner=self._partitioner,
            bytes_max=bytes_max,
            row_bytes_max=self._accumulator.row_bytes_max,
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
                setattr(columns, name, [dump(topic, row, what) for row in column])
            elif not (are_bytes(column) if COMPILED else _BYTES.issuperset(map(type, column))):
                setattr(columns, name, [as_bytes(row, what) for row in column])
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
        records = [self._intercepted(ProducerRecord(topic, *row)) for row in rows]
        if any(record.topic != topic for record in records):
            raise ValueError("an interceptor of send_many cannot change the topic")
        stamps = [self._stamp() if record.timestamp_ms is None else record.timestamp_ms for record in records]
        partitions = [record.partition for record in records]
        if any(partition is None for partition in partitions) and any(
            partition is not None for partition in partitions
        ):
            raise ValueError("an interceptor of send_many sets the partition of all records, or of none")
        return Columns(
            [record.value for record in records],
            [record.key for record in records],
            [headers_of(record.headers) for record in records],
            stamps,
            partitions if records and partitions[0] is not None else None,  # type: ignore[arg-type]
        )

    def _encoded(
        self, topic: str, chunk: Chunk | PackedChunk, state: TopicState, condition: Condition | None = None
    ) -> ProducerBatch:
        """A batch for `_enter`."""
        codec, level = self._config.compression, self._config.compression_level
        stamps: Sequence[int]
        if isinstance(chunk, PackedChunk):
            data, stamps = chunk.encode(self._stamp(), codec, level)
            count = len(stamps)
        else:
            count = len(chunk.values)
            stamps = chunk.stamps or [self._stamp()] * count
            data = encode_columns_unsealed(
                stamps,
                chunk.keys or [None] * count,
                chunk.values,
                None if chunk.headers is None else [headers or () for headers in chunk.headers],
                codec=codec,
                level=level,
            )
        partition = state.sticky if chunk.partition is None else chunk.partition
        batch = self._batch_of(topic, partition, data, stamps)
        batch.condition = condition
        if self._config.on_delivery is not None:
            batch.callbacks = [(row, self._config.on_delivery, None) for row in range(count)]
        return batch

    def _enter_conditional(self, batch: ProducerBatch) -> bool:
        """False: wait until the core is `_ready`, and enter it again."""
        state = self._accumulator.state_of(batch.topic)
        if state is None or batch.partition >= state.count or not self._accumulator.add_encoded(batch, state):
            return False
        self._accumulator.wake_core()
        return True

    def _enter(self, delivery: BulkDelivery, batch: ProducerBatch, state: TopicState) -> bool:
        """False: wait until the core is `_ready`, and enter it again."""
        if not self._accumulator.add_encoded(batch, state):
            return False
        delivery.add(batch)
        if delivery.batches % BATCHES_PER_WAKE == 0:
            self._accumulator.wake_core()
        return True

    # The end.

    def _at_exit(self, left_s: float) -> None:
        if left := self._accumulator.count_unfinished():
            LOGGER.warning("%s was not closed; %d records are flushed now", self.client_id, left)
        self._host.close(left_s)
        self._close_interceptors()

    def _close_interceptors(self) -> None:
        if self._are_interceptors_closed:
            return
        self._are_interceptors_closed = True
        for interceptor in self._config.interceptors:
            close = getattr(interceptor, "close", None)
            if close is not None:
                try:
                    close()
                except Exception:
                    LOGGER.exception("an interceptor failed: close")

    def _forked(self) -> None:
        """In a child process: the parent delivers what it has sent; this object starts empty."""
        before = self._accumulator
        lock = threading.Lock()
        for batch in list(before.unfinished):
            batch.lock = lock
            batch.error = ForkedError("this process was forked; its parent sends this record and gets the outcome")
            batch.rows = []
            batch.is_done = True
        io_thread.keep_alive_in_child(before)
        self._new_accumulator()

    def metrics(self) -> dict[str, float]:
        """Return counters since creation: records, batches, retries, memory."""
        core = self._host.core
        return dict.fromkeys(METRICS, 0.0) if core is None else core.metrics()

    def __repr__(self) -> str:
        state = "closed" if self._host.is_closed else "open"
        name = f"{type(self).__module__.partition('.client')[0]}.{type(self).__name__}"
        return f"<{name} {self.client_id} to {','.join(self._config.bootstrap)}, {state}>"


def _wake(io: Any, core: ProducerCore) -> None:
    try:
        io.call_soon(core.run)
    except RuntimeError:  # the loop has ended: so has the producer, or the interpreter
        raise ProducerClosedError("this producer is closed") from None


_BYTES = frozenset({bytes, type(None)})


def _do_nothing(*_: object) -> None:
    """Instead of `try_append`: every record takes the slow path."""
