"""`tidelog.Producer`: sends records to a cluster, from plain threads.

    with tidelog.Producer("localhost:9292") as producer:
        delivery = producer.send("orders", b"...", key="42", headers={"trace": b"1"})
        print(delivery.result())          # RecordMetadata(topic, partition, offset, timestamp)

One producer serves all threads of a process. It connects with the first record. After a fork the child's producer is
empty and connects again; records queued before the fork are delivered by the parent only.
"""

from __future__ import annotations

from typing import Any, Unpack

from tidelog.client.closing import Closing
from tidelog.client.durations import check_timeout
from tidelog.client.errors import BufferFullError
from tidelog.client.options import Bootstrap, ProducerOptions
from tidelog.client.producer.accumulator import TopicState
from tidelog.client.producer.bulk import BulkDelivery
from tidelog.client.producer.fast_path import Delivery, DeliveryCallback
from tidelog.client.producer.frontend import ProducerFrontend
from tidelog.client.producer.records import check_callback
from tidelog.client.producer.transactional import TransactionMethods
from tidelog.client.record import TopicPartition
from tidelog.model.errors import CallTimeoutError, TidelogError


class Producer(TransactionMethods, ProducerFrontend, Closing):
    """Sends records. Options are keywords (`linger_ms=5`), or a dict of Kafka's names (`{"linger.ms": 5}`); see
    `tidelog.client.option_table`. Many threads may call its methods."""

    def __init__(self, bootstrap: Bootstrap = None, /, **options: Unpack[ProducerOptions]) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. It does not connect yet."""
        super().__init__(bootstrap, {**options})

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
        """Queue one record for sending. Returns a `Delivery`, the future of its result.

        `value` and `key` are bytes, str (as UTF-8) or None, or what the serializers take. `headers` is a dict, or pairs
        of name and value; a name may occur again. `on_delivery(error, metadata)` is called when the record is stored or
        failed, for one partition in the order of `send`, on the callback thread, which it must not block.

        Waits up to `max_block_ms` for metadata and for memory; then raises `BufferFullError`, `CallTimeoutError` or
        `NoClusterError`. Raises at once: TypeError, SerializationError, RecordTooLargeError,
        UnknownTopicOrPartitionError.

        `expected_offset`: store the record only if it gets this offset; else the delivery fails with
        `OffsetMismatchError`, whose `end_offset` is where the partition ends. `claim` marks the record as a claim of
        the partition, and `fencing_token` is the offset of one: the record is stored only if no newer claim is there;
        else `StaleFencingTokenError`. All three need `partition` and acks="all"; such a record is a batch of its own.
        """
        if on_delivery is not None:
            check_callback(on_delivery)
        is_plain = expected_offset is None and fencing_token is None and not claim
        if headers is None and is_plain:
            delivery = self._try_append(topic, value, key, partition, None, timestamp_ms, on_delivery)
            if delivery is not None:
                return delivery
        entry = self._entry(topic, value, key, partition, headers, timestamp_ms, on_delivery)
        deadline_s = self._deadline_s()
        if not is_plain:
            condition = self._condition(expected_offset, fencing_token, claim, entry[1])
            batch, delivery = self._conditional(entry, condition)
            while not self._enter_conditional(batch):
                self._wait(entry[0], entry[1], batch.size, deadline_s)
            return delivery
        while (delivery := self._append(entry)) is None:
            self._wait(entry[0], entry[1], max(entry[3], self._accumulator.batch_size), deadline_s)
        return delivery

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
        """Queue many records; several times faster than `send` for each. Returns one `BulkDelivery` for all of them.

        Either `records`: mappings with value, key, headers, timestamp_ms and partition, pairs (key, value), or a table
        of pyarrow with columns of these names. Or columns: `values`, and optionally `keys`, `headers`, `timestamps_ms`,
        each a list or a pyarrow array. `partition` is one for all, or a column.

        Records of one partition keep their order, also with those of `send` before and after. If the memory is full for
        `max_block_ms` after some were taken, the delivery's error has the rest.

        With `expected_offset` the records are one batch of one partition, stored only if its first record gets this
        offset (see `send`).
        """
        condition = None if expected_offset is None else self._condition(expected_offset, None, False, partition)
        columns, shared, highest = self._columns(topic, records, values, keys, headers, timestamps_ms, partition)
        delivery = BulkDelivery(topic)
        if not len(columns):
            return delivery
        state = self._state(topic, highest)
        left = len(columns)
        try:
            for chunk in self._chunks(columns, state, shared, condition):
                batch = self._encoded(topic, chunk, state, condition)
                deadline_s = self._deadline_s()
                try:
                    while not self._enter(delivery, batch, state):
                        self._wait(topic, None, batch.size, deadline_s)
                except TidelogError as error:
                    if left == len(columns):
                        raise
                    delivery.reject(left, error)
                    return delivery
                left -= batch.count
        finally:
            self._accumulator.wake_core()
        return delivery

    def _state(self, topic: str, highest: int | None) -> TopicState:
        deadline_s = self._deadline_s()
        while (state := self._accumulator.state_of(topic)) is None or (highest or 0) >= state.count:
            self._wait(topic, highest, 0, deadline_s)
        return state

    def _wait(self, topic: str, partition: int | None, size: int, deadline_s: float) -> None:
        """Until the topic is known and there may be memory."""
        io, state = self._host.io, self._accumulator.state_of(topic)
        if io is not None and state is not None and (partition or 0) < state.count and io.is_client_thread:
            raise BufferFullError(f"no memory for {size} bytes to '{topic}', and a callback cannot wait for it")
        self._host.run(self._ready(topic, partition, size, deadline_s))

    def partitions_for(self, topic: str, timeout: float | None = None) -> list[TopicPartition]:
        """Return the partitions of the topic. Waits for `timeout` seconds, by default `max_block_ms`."""
        seconds = self._timeout_for_metadata(timeout)
        while (partitions := self._known_partitions(topic)) is None:
            self._host.run(lambda core: core.locate(topic), timeout=seconds)
        return partitions

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is stored or failed, and its callbacks have run. Raises
        FlushTimeoutError after `timeout` seconds; its `left` is the number of pending records."""
        core = self._host.core
        check_timeout(timeout)
        if core is None or self._host.io is None or core.is_idle:
            return
        waits = self._may_wait_for_callbacks()
        try:
            self._host.run(lambda core: core.flush(waits_for_callbacks=waits), timeout=timeout)
        except CallTimeoutError:
            raise core.flush_timed_out() from None

    def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds (None: until everything has ended; `delivery_timeout_ms` bounds it), then
        end; records that are not acknowledged then fail with ProducerClosedError. Further calls wait for the first
        one."""
        check_timeout(timeout)
        waits = self._may_wait_for_callbacks()
        try:
            self._host.close(timeout, call=lambda core: core.close(timeout, waits_for_callbacks=waits))
        finally:
            self._close_interceptors()

    def _may_wait_for_callbacks(self) -> bool:
        """Not a callback, which would wait for itself. Of the caller: jobs run on the IO thread."""
        io = self._host.io
        return io is None or not io.is_client_thread
