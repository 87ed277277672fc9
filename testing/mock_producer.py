"""`MockProducer`: `tidelog.Producer` without a cluster. It checks and serializes records as the real one, keeps them in
`history`, and ends each as it is told: at once, or by hand.

    producer = MockProducer()                              # every record is stored at once
    producer = MockProducer(is_automatic=False)            # ... when the test says so
    producer.complete_next(); producer.fail_next(error)

Callbacks run on the thread that ends the record. A topic has `partitions` partitions, whatever its name.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tidelog.client.accumulator import TopicPlace
from tidelog.client.bulk import BulkDelivery, columns_of
from tidelog.client.errors import WriterClosedError
from tidelog.client.hot import Delivery, Headers, Parcel, Row, Told
from tidelog.client.producer_core import tell_all
from tidelog.client.producer_front import ProducerFront
from tidelog.model.errors import UnknownTopicOrPartitionError

HISTORY_MAX = 1_000_000


@dataclass(frozen=True)
class SentRecord:
    """One of `history`: as it would have gone out. `offset` is where it was stored, None while it is under way or if
    it failed."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    delivery: Delivery = field(repr=False, compare=False)

    @property
    def offset(self) -> int | None:
        done = self.delivery.done() and self.delivery.exception() is None
        return self.delivery.result().offset if done else None


class MockProducer(ProducerFront):
    """See the module's docstring. Options are those of `tidelog.Producer`."""

    def __init__(
        self, bootstrap: object = "mock:9292", /, *, is_automatic: bool = True, partitions: int = 1, **options: Any
    ) -> None:
        if partitions < 1:
            raise ValueError(f"partitions={partitions}: one at least")
        super().__init__(bootstrap, options)
        self.is_automatic = is_automatic
        self.history: list[SentRecord] = []
        self.flushes = 0
        self._partitions = partitions
        self._waiting: deque[Parcel] = deque()
        self._ends: dict[tuple[str, int], int] = {}
        self._topics: dict[str, TopicPlace] = {}
        self._send_errors: deque[Exception] = deque()
        self._delivery_errors: deque[Exception] = deque()
        self._lock = threading.RLock()
        told = (getattr(one, "on_acknowledgement", None) for one in self._options.interceptors)
        self._acknowledged: list[Callable[..., object]] = [one for one in told if one is not None]
        self._stored = self._failed = 0

    # What a test does with it.

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def waiting(self) -> int:
        """Records that have not ended."""
        with self._lock:
            return len(self._waiting)

    def complete_next(self) -> bool:
        """The oldest record that waits is stored. False: none waits."""
        return self._end_next(None)

    def fail_next(self, error: Exception) -> bool:
        """The oldest record that waits fails with this error. False: none waits."""
        return self._end_next(error)

    def complete_all(self) -> int:
        """How many there were."""
        count = 0
        while self.complete_next():
            count += 1
        return count

    def raise_in_send(self, error: Exception, *, times: int = 1) -> None:
        """The next calls of `send` or `send_many` raise it, and take nothing."""
        self._send_errors.extend([error] * times)

    def fail_delivery(self, error: Exception, *, times: int = 1) -> None:
        """The next records that would be stored at once fail instead."""
        self._delivery_errors.extend([error] * times)

    def clear(self) -> None:
        """Forget the history, and errors that were to come; records that wait still do, offsets go on."""
        with self._lock:
            self.history.clear()
            self._send_errors.clear()
            self._delivery_errors.clear()

    # As the real one.

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Any = None,
        timestamp_ms: int | None = None,
        on_delivery: Told | None = None,
    ) -> Delivery:
        """Take one record: into `history`."""
        self._raise_if_told()
        topic, partition, row, _, told = self._entry(topic, value, key, partition, headers, timestamp_ms, on_delivery)
        return self._record(topic, self._placed(topic, partition, row[1], row[2]), row, told)

    def send_many(
        self,
        topic: str,
        records: Any = None,
        *,
        values: Any = None,
        keys: Any = None,
        headers: Any = None,
        timestamps_ms: Any = None,
        partition: Any = None,
    ) -> BulkDelivery:
        """Take many, each with a place of its own in `history`."""
        columns = columns_of(records, values, keys, headers, timestamps_ms, partition)
        self._check_open()
        self._raise_if_told()
        columns = self._serialized(topic, columns)
        count = len(columns)
        none: list[Any] = [None] * count
        rows = columns.values if isinstance(columns.values, list) else columns.values.to_list()
        one = partition if isinstance(partition, int) else None
        stamp = self._stamp()
        placed = [
            (
                self._placed(topic, one if wanted is None else wanted, key, value),
                (stamp if when is None else when, key, value, pairs),
            )
            for value, key, pairs, when, wanted in zip(
                rows,
                columns.keys or none,
                columns.headers or none,
                columns.stamps or none,
                columns.partitions or none,
                strict=True,
            )
        ]
        delivery = BulkDelivery(topic)
        for where, row in placed:
            delivery.add(self._record(topic, where, row, self._options.on_delivery)._parcel)
        return delivery

    def partitions_for(self, topic: str) -> list[int]:
        self._check_open()
        return list(range(self._partitions))

    def flush(self, timeout: float | None = None) -> None:
        """The part of the cluster is played: everything that waits is stored."""
        self.flushes += 1
        self.complete_all()

    def close(self, timeout: float | None = None) -> None:
        """Flush, then end; with `timeout=0` what waits fails instead, as it does with the real one."""
        if self._is_closed:
            return
        if timeout is None or timeout > 0:
            self.flush(timeout)
        while self.fail_next(WriterClosedError("this producer was closed", was_sent=True)):
            pass
        self._is_closed = True
        self._close_interceptors()

    def metrics(self) -> dict[str, Any]:
        with self._lock:
            return {
                "client_id": self.client_id,
                "records_stored": self._stored,
                "records_failed": self._failed,
                "records_waiting": len(self._waiting),
                "batches": self._stored + self._failed,
                "retries": 0,
            }

    def at_exit(self, deadline_s: float) -> None:
        """Nothing is under way anywhere."""

    def forked(self) -> None:
        """It belongs to nobody."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<tidelog.testing.MockProducer {self.client_id}, {len(self.history)} records, {state}>"

    # Within.

    def _raise_if_told(self) -> None:
        self._check_open()
        if self._send_errors:
            raise self._send_errors.popleft()

    def _placed(self, topic: str, partition: int | None, key: bytes | None, value: bytes | None) -> int:
        with self._lock:
            place = self._topics.get(topic)
            if place is None:
                place = self._topics[topic] = TopicPlace(topic, self._partitions, tuple(range(self._partitions)))
        where = self._partitioner.partition(place, key, value) if partition is None else partition
        if not 0 <= where < place.count:
            raise UnknownTopicOrPartitionError(
                f"'{topic}' has {place.count} partitions from 0 on, there is no {where}; give MockProducer more "
                "partitions"
            )
        return where

    def _record(self, topic: str, partition: int, row: Row, told: Told | None) -> Delivery:
        timestamp_ms, key, value, headers = row
        parcel = Parcel(topic, partition, 0, time.monotonic())
        parcel.lock = self._lock
        parcel.timestamps = [timestamp_ms]
        parcel.count = 1
        parcel.is_sealed = True
        if told is not None:
            parcel.callbacks = [(0, told, None)]
        delivery = Delivery(parcel, 0)
        with self._lock:
            assert len(self.history) < HISTORY_MAX, f"{HISTORY_MAX:,} records in a mock's history: clear() it"
            self.history.append(SentRecord(topic, partition, key, value, headers or (), timestamp_ms, delivery))
            self._waiting.append(parcel)
            is_now = self.is_automatic
            error = self._delivery_errors.popleft() if is_now and self._delivery_errors else None
        if is_now:
            self._end_next(error)
        return delivery

    def _end_next(self, error: Exception | None) -> bool:
        with self._lock:
            if not self._waiting:
                return False
            parcel = self._waiting.popleft()
            if error is None:
                where = (parcel.topic, parcel.partition)
                parcel.base_offset = -1 if self._options.acks == 0 else self._ends.get(where, 0)
                self._ends[where] = self._ends.get(where, 0) + 1
                self._stored += 1
            else:
                parcel.error = error
                self._failed += 1
            parcel.is_done = True
            waiters, parcel.waiters = parcel.waiters or [], None
        for waiter in waiters:
            waiter()
        tell_all(parcel, self._acknowledged)
        return True
