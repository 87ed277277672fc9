"""`tidelog.Producer`: records into a cluster, from plain threads.

    with tidelog.Producer("localhost:9292") as producer:
        delivery = producer.send("orders", b"...", key="42", headers={"trace": b"1"})
        print(delivery.result())          # RecordMetadata(topic, partition, offset, timestamp)

One producer serves all threads of a process. It connects at the first record. After a fork the child's producer is
empty and connects anew; what the parent had sent is delivered, and told, in the parent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from tidelog.client.accumulator import TopicPlace
from tidelog.client.bulk import BulkDelivery
from tidelog.client.errors import BufferFullError, FlushTimeoutError
from tidelog.client.hot import Delivery, Parcel, Told
from tidelog.client.producer_core import ProducerCore, place_of
from tidelog.client.producer_front import Entry, ProducerFront
from tidelog.client.waiting import Waiter, check_may_wait
from tidelog.model.errors import CallTimeoutError, TidelogError

LOGGER = logging.getLogger(__name__)


class Producer(ProducerFront):
    """Sends records. Options are keywords (`linger_ms=5`), or a dict of Kafka's names (`{"linger.ms": 5}`); see
    `tidelog.client.names`. Its methods may be called by many threads."""

    def __init__(self, bootstrap: object = None, /, **options: Any) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. Connects to nothing yet."""
        super().__init__(bootstrap, options)

    # Sending.

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
        """Take one record; it goes out with others of its partition. The `Delivery` tells how it ended.

        `value` and `key` are bytes, str (as UTF-8) or None, or what the serializers take. `headers` is a dict, or pairs
        of name and value; names may come again. `on_delivery(error, metadata)` is called when the record has ended,
        for one partition in the order of `send`, on a thread of its own; be quick there.

        Waits up to `max_block_ms` for metadata and for room; then raises `BufferFullError` or why there is no metadata.
        Raises at once: TypeError, SerializationError, RecordTooLargeError, UnknownTopicOrPartitionError.
        """
        if headers is None:
            taken = self._take(topic, value, key, partition, None, timestamp_ms, on_delivery)
            if taken is not None:
                return taken
        return self._send(self._entry(topic, value, key, partition, headers, timestamp_ms, on_delivery))

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
        """Take many records at once, several times faster than one by one; one object tells how all of them ended.

        Either `records`: mappings with value, key, headers, timestamp_ms and partition, pairs (key, value), or a table
        of pyarrow with columns of these names. Or columns: `values`, and if wanted `keys`, `headers`, `timestamps_ms`,
        each a list or a pyarrow array. `partition` is one for all, or a column.

        Records of one partition keep their order, also with those of `send` before and after. If the room runs out
        (`max_block_ms`) after some were taken, the rest is in the delivery's error.
        """
        columns, one, highest = self._columns(topic, records, values, keys, headers, timestamps_ms, partition)
        delivery = BulkDelivery(topic)
        if not len(columns):
            return delivery
        place = self._place(topic, highest, self._deadline_s())
        left = len(columns)
        try:
            for chunk in self._chunks(columns, place, one):
                parcel = self._parcel(topic, chunk, place)
                try:
                    self._until_entered(partial(self._enter, delivery, parcel, place), topic, parcel.size)
                except TidelogError as error:
                    if left == len(columns):
                        raise
                    delivery.leave_out(left, error)
                    return delivery
                left -= parcel.count
        finally:
            self._in.wake_core()
        return delivery

    def _send(self, entry: Entry) -> Delivery:
        topic, partition, _, size, _ = entry
        deadline_s = self._deadline_s()
        self._place(topic, partition, deadline_s)
        found: list[Delivery] = []

        def enter() -> bool:
            made = self._put(entry)
            if made is None:
                self._place(topic, partition, deadline_s)  # it may have been closed, or made anew
                return False
            found.append(made)
            return True

        self._until_entered(enter, topic, size, deadline_s)
        return found[0]

    def _until_entered(self, enter: Callable[[], bool], topic: str, size: int, deadline_s: float | None = None) -> None:
        """Try, and again whenever there may be room."""
        end_s = self._deadline_s() if deadline_s is None else deadline_s
        while not enter():
            if self._host is not None and (self._host.is_here or self._host.is_telling):
                raise BufferFullError(f"no room for {size} bytes to '{topic}', and no waiting for it in a callback")
            room = Waiter()
            self._in.on_room(room.set)
            try:
                if enter():
                    return
                self._check_open()
                if not room.wait(max(0.0, end_s - time.monotonic())) and time.monotonic() >= end_s:
                    raise self._no_room(topic, size)
            finally:
                self._in.off_room(room.set)
            self._check_open()

    def _deadline_s(self) -> float:
        return time.monotonic() + self._options.max_block_ms / 1000

    def _place(self, topic: str, partition: int | None, deadline_s: float) -> TopicPlace:
        """The topic's, waiting for metadata if it is not known, or has too few partitions."""
        place = place_of(self._in, topic)
        if place is None:
            self._on_loop(lambda core: core.locate(topic), topic, deadline_s)
            place = place_of(self._in, topic)
            if place is None:
                self._check_open()
                raise CallTimeoutError(f"no metadata of '{topic}'")
        if partition is not None and partition >= place.count:
            self._on_loop(lambda core: core.grow(topic, partition), topic, deadline_s)
        return place

    def _on_loop(self, job: Callable[[ProducerCore], Any], topic: str, deadline_s: float) -> None:
        core, host = self._started()
        try:
            host.run(job(core), timeout_s=max(0.001, deadline_s - time.monotonic()))
        except CallTimeoutError as error:
            self._check_open()
            if time.monotonic() < deadline_s:
                raise
            raise self._no_metadata(topic, core) from error
        except TidelogError:
            self._check_open()  # closed by another thread: nothing else is wrong
            raise

    def _started(self) -> tuple[ProducerCore, Any]:
        check_may_wait()
        with self._start_lock:
            self._check_open()
            if self._core is None:
                host = self._acquire_host()
                self._host = host
                try:
                    self._core = host.run(self._new_core())
                except BaseException:
                    host.release(self)
                    self._host = None
                    raise
            return self._core, self._host

    # Asking.

    def partitions_for(self, topic: str) -> list[int]:
        """The numbers of the topic's partitions. Waits up to `max_block_ms`."""
        self._check_open()
        return list(range(self._place(topic, None, self._deadline_s()).count))

    # The end.

    def flush(self, timeout: float | None = None) -> None:
        """Until everything sent so far has ended, well or not, and its callbacks have run. FlushTimeoutError after
        `timeout` seconds, with the number of records that are still on their way."""
        end_s = None if timeout is None else time.monotonic() + timeout
        for parcel in self._unfinished():
            self._await_parcel(parcel, end_s)
        host = self._host
        if host is not None and not host.is_telling:
            told = Waiter()
            try:
                host.after_callbacks(told.set)
            except RuntimeError:
                return  # another thread has closed it: all callbacks were run then
            if not told.wait(None if end_s is None else max(0.0, end_s - time.monotonic())):
                raise FlushTimeoutError(f"callbacks were not done in {timeout} s", left=0)

    def _await_parcel(self, parcel: Parcel, end_s: float | None) -> None:
        if not parcel.wait(None if end_s is None else max(0.0, end_s - time.monotonic())):
            left = self._left()
            raise FlushTimeoutError(f"{left} records are neither stored nor failed yet", left=left)

    def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds (None: until everything has ended; `delivery_timeout_ms` bounds it), then
        end; what is not acknowledged then fails with WriterClosedError. More than once does no harm."""
        if self._is_closed:
            return
        try:
            self.flush(timeout)
        except FlushTimeoutError as error:
            if error.left:
                LOGGER.warning("closed with %d records on their way", error.left)
        finally:
            self._is_closed = True
            self._in.close()
            self._stop()

    def _stop(self) -> None:
        with self._start_lock:
            host = self._host
            try:
                if host is not None:
                    host.run(self._end_core())
            finally:
                if host is not None:
                    host.release(self)
                    self._host = None
                self._close_interceptors()

    def at_exit(self, deadline_s: float) -> None:
        """The interpreter ends and nobody has closed it."""
        if self._is_closed:
            return
        left = self._left()
        if left:
            LOGGER.warning("%s was not closed; %d records are flushed now", self.client_id, left)
        self.close(max(0.0, deadline_s - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<tidelog.Producer {self.client_id} to {','.join(self._options.bootstrap)}, {state}>"
