"""`MockProducer`: `tidelog.Producer` without a cluster. It checks and serializes records as the real one and keeps them
in `history`.

    producer = MockProducer()                              # every record is stored at once
    producer = MockProducer(auto_complete=False)           # ... or when the test completes it
    producer.complete_next(); producer.fail_next(error)
    producer = MockProducer(transactional_id="t")          # `committed`, `aborted` and `offsets` have what a block ends

Callbacks run on the thread that completes the record. Every topic has `partitions` partitions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Unpack

from tidelog.client.closing import Closing
from tidelog.client.durations import check_timeout
from tidelog.client.errors import ProducerClosedError
from tidelog.client.options import Bootstrap, ProducerOptions
from tidelog.client.producer.accumulator import TopicState
from tidelog.client.producer.bulk import BulkDelivery, columns_of
from tidelog.client.producer.conditions import Condition
from tidelog.client.producer.core import acknowledgement_interceptors, run_delivery_callbacks
from tidelog.client.producer.fast_path import Delivery, DeliveryCallback, ProducerBatch, Row
from tidelog.client.producer.frontend import ProducerFrontend
from tidelog.client.record import TopicPartition
from tidelog.model.append_condition import AppendCondition
from tidelog.model.errors import InvalidRecordError, TidelogError, UnknownTopicOrPartitionError
from tidelog.testing.mock_transactions import MockTransactions, SentRecord

HISTORY_MAX = 1_000_000


class MockProducer(MockTransactions, ProducerFrontend, Closing):
    """See the module's docstring. Options are those of `tidelog.Producer`."""

    def __init__(
        self,
        bootstrap: Bootstrap = "mock:9292",
        /,
        *,
        auto_complete: bool = True,
        partitions: int = 1,
        **options: Unpack[ProducerOptions],
    ) -> None:
        if partitions < 1:
            raise ValueError(f"partitions={partitions}: use 1 or more")
        super().__init__(bootstrap, {**options})
        self.auto_complete = auto_complete
        self.history: list[SentRecord] = []
        self.flushes = 0
        self._partitions = partitions
        self._waiting: deque[ProducerBatch] = deque()
        self._ends: dict[tuple[str, int], int] = {}
        self._claims: dict[tuple[str, int], int] = {}
        self._topics: dict[str, TopicState] = {}
        self._send_errors: deque[Exception] = deque()
        self._delivery_errors: deque[Exception] = deque()
        self._lock = threading.RLock()
        self._interceptors = acknowledgement_interceptors(self._config)
        self._stored = self._failed = 0
        self._new_transactions()

    # For tests.

    @property
    def is_closed(self) -> bool:
        return self._host.is_closed

    @property
    def waiting(self) -> int:
        """Records that are neither stored nor failed."""
        with self._lock:
            return len(self._waiting)

    def complete_next(self) -> bool:
        """Store the oldest pending record. False: none is pending."""
        return self._end_next(None)

    def fail_next(self, error: Exception) -> bool:
        """Fail the oldest pending record with this error. False: none is pending."""
        return self._end_next(error)

    def complete_all(self) -> int:
        """Store all pending records; returns their number."""
        count = 0
        while self.complete_next():
            count += 1
        return count

    def raise_in_send(self, error: Exception, *, times: int = 1) -> None:
        """Make the next calls of `send` or `send_many` raise `error` and queue nothing."""
        self._send_errors.extend([error] * times)

    def fail_delivery(self, error: Exception, *, times: int = 1) -> None:
        """Make the next records fail instead of being stored at once."""
        self._delivery_errors.extend([error] * times)

    def clear(self) -> None:
        """Clear the history and the scripted errors. Pending records stay pending, offsets continue."""
        with self._lock:
            self.history.clear()
            self._send_errors.clear()
            self._delivery_errors.clear()

    # As `tidelog.Producer`.

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: Any = None,
        timestamp_ms: int | None = None,
        on_delivery: DeliveryCallback | None = None,
        expected_offset: int | None = None,
        fencing_token: int | None = None,
        claim: bool = False,
    ) -> Delivery:
        """Add one record to `history`. Conditions are checked when it is stored."""
        self._raise_next_error()
        topic, partition, row, _, callback = self._entry(
            topic, value, key, partition, headers, timestamp_ms, on_delivery
        )
        condition = None
        if expected_offset is not None or fencing_token is not None or claim:
            condition = self._condition(expected_offset, fencing_token, claim, partition)
        return self._record(topic, self._partition(topic, partition, row[1], row[2]), row, callback, condition)

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
        expected_offset: int | None = None,
    ) -> BulkDelivery:
        """Add many records to `history`, each as one."""
        if expected_offset is not None:
            self._condition(expected_offset, None, False, partition)
        columns = columns_of(records, values, keys, headers, timestamps_ms, partition)
        self._host.check_open()
        self._raise_next_error()
        columns = self._serialized(topic, columns)
        count = len(columns)
        none: list[Any] = [None] * count
        rows = columns.values if isinstance(columns.values, list) else columns.values.to_list()
        shared = partition if isinstance(partition, int) else None
        stamp = self._stamp()
        partitioned = [
            (
                self._partition(topic, shared if own is None else own, key, value),
                (stamp if timestamp_ms is None else timestamp_ms, key, value, pairs),
            )
            for value, key, pairs, timestamp_ms, own in zip(
                rows,
                columns.keys or none,
                columns.headers or none,
                columns.stamps or none,
                columns.partitions or none,
                strict=True,
            )
        ]
        delivery = BulkDelivery(topic)
        for at, (index, row) in enumerate(partitioned):
            condition = None if expected_offset is None else Condition(expected_offset=expected_offset + at)
            delivery.add(self._record(topic, index, row, self._config.on_delivery, condition)._batch)
        return delivery

    def partitions_for(self, topic: str, timeout: float | None = None) -> list[TopicPartition]:
        self._timeout_for_metadata(timeout)
        return [TopicPartition(topic, number) for number in range(self._partitions)]

    def flush(self, timeout: float | None = None) -> None:
        """Store all pending records, as a cluster would."""
        check_timeout(timeout)
        self.flushes += 1
        self.complete_all()

    def close(self, timeout: float | None = None) -> None:
        """Flush, then end; with `timeout=0` pending records fail instead, as those of the real producer."""
        check_timeout(timeout)
        if self._host.is_closed:
            return
        self._close_transaction()
        if timeout is None or timeout > 0:
            self.flush(timeout)
        while self.fail_next(ProducerClosedError("this producer was closed", was_sent=True)):
            pass
        self._host.close()
        self._close_interceptors()

    def metrics(self) -> dict[str, float]:
        with self._lock:
            return super().metrics() | {
                "records_stored": self._stored,
                "records_failed": self._failed,
                "records_buffered": len(self._waiting),
                "batches": self._stored + self._failed,
            }

    def __repr__(self) -> str:
        state = "closed" if self._host.is_closed else "open"
        return f"<tidelog.testing.MockProducer {self.client_id}, {len(self.history)} records, {state}>"

    def _complete_all(self) -> None:
        self.complete_all()

    def _fail_pending(self, error: Exception) -> bool:
        return self.fail_next(error)

    def _raise_next_error(self) -> None:
        self._host.check_open()
        self._check_takes_records()
        if self._send_errors:
            raise self._send_errors.popleft()

    def _partition(self, topic: str, partition: int | None, key: bytes | None, value: bytes | None) -> int:
        with self._lock:
            state = self._topics.get(topic)
            if state is None:
                state = self._topics[topic] = TopicState(topic, self._partitions, tuple(range(self._partitions)))
        index = self._partitioner.partition(state, key, value) if partition is None else partition
        if not 0 <= index < state.count:
            raise UnknownTopicOrPartitionError(
                f"topic '{topic}' has {state.count} partitions; there is no partition {index}: pass partitions= to "
                "MockProducer"
            )
        return index

    def _record(
        self,
        topic: str,
        partition: int,
        row: Row,
        on_delivery: DeliveryCallback | None,
        condition: Condition | None = None,
    ) -> Delivery:
        timestamp_ms, key, value, headers = row
        batch = ProducerBatch(topic, partition, 0, time.monotonic())
        batch.lock = self._lock
        batch.timestamps = [timestamp_ms]
        batch.count = 1
        batch.is_sealed = True
        batch.condition = condition
        if on_delivery is not None:
            batch.callbacks = [(0, on_delivery, None)]
        delivery = Delivery(batch, 0)
        with self._lock:
            assert len(self.history) < HISTORY_MAX, f"{HISTORY_MAX:,} records in a mock's history: clear() it"
            record = SentRecord(topic, partition, key, value, headers or (), timestamp_ms, delivery)
            self.history.append(record)
            self._keep(record)
            self._waiting.append(batch)
            is_completed = self.auto_complete
            error = self._delivery_errors.popleft() if is_completed and self._delivery_errors else None
        if is_completed:
            self._end_next(error)
        return delivery

    def _unmet(self, key: tuple[str, int], condition: Condition | None) -> TidelogError | None:
        """What a broker would reject the record with."""
        if condition is None:
            return None
        if condition.is_claim and self._is_in_transaction:
            return InvalidRecordError("a claim is one record of an idempotent producer, and no part of a transaction")
        end, claim = self._ends.get(key, 0), self._claims.get(key, -1)
        asked = AppendCondition(
            expected_offset=-1 if condition.expected_offset is None else condition.expected_offset,
            fencing_token=-1 if condition.fencing_token is None else condition.fencing_token,
        )
        try:
            asked.check(end_offset=end, claim=claim)
        except TidelogError as error:
            return error
        return None

    def _end_next(self, error: Exception | None) -> bool:
        with self._lock:
            if not self._waiting:
                return False
            batch = self._waiting.popleft()
            key = (batch.topic, batch.partition)
            error = error or self._unmet(key, batch.condition)
            if error is None:
                if batch.condition is not None and batch.condition.is_claim:
                    self._claims[key] = self._ends.get(key, 0)
                batch.base_offset = -1 if self._config.acks == 0 else self._ends.get(key, 0)
                self._ends[key] = self._ends.get(key, 0) + 1
                self._stored += 1
            else:
                batch.error = error
                self._failed += 1
                self._record_failed(error)
            batch.is_done = True
            waiters, batch.waiters = batch.waiters or [], None
        for waiter in waiters:
            waiter()
        run_delivery_callbacks(batch, self._interceptors)
        return True
