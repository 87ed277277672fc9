"""`tidelog.Consumer`: reads records, for one thread.

    with tidelog.Consumer("localhost:9292", group="billing", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["orders"])
        for record in consumer:
            handle(record.key, record.value, record.offset)
            consumer.commit()

Heartbeats, prefetching and commits run on the IO thread of the process: a slow handler does not cost the membership. A
member that does not poll for `max_poll_interval_ms` (5 minutes) leaves the group and logs the reason; its next poll
calls `on_lost` and joins again.

Callbacks of rebalances and of commits run on your thread, inside of `poll` and of the iteration. A partition is revoked
only after its `on_revoked` has returned.

Delivery is at least once: records that you received and did not commit are delivered again after a crash. Automatic
commits (`enable_auto_commit`, every 5 s, on close and before a revocation) take only what you have processed: you ask
for the next record, or poll again, after you processed the former ones. `close` marks them as processed too; a `with`
block that ends with an exception does not.

One thread at a time uses a consumer; only `wakeup` and `metrics` are thread-safe. A forked process cannot use a
consumer of its parent: it gets a `ForkedError`, since both would be one member.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from tidelog.client.arrow import Part, table_of
from tidelog.client.consumer.arguments import CLOSE_S, read_count, read_timeout
from tidelog.client.consumer.core import ConsumerCore
from tidelog.client.consumer.errors import ConcurrentUseError, SubscriptionError
from tidelog.client.consumer.frontend import Call, ConsumerFrontend
from tidelog.client.consumer.typed_options import TypedConsumer
from tidelog.client.operations import blocking
from tidelog.client.record import (
    ConsumerRecord,
    K,
    V,
)

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


class Consumer(TypedConsumer[K, V]):
    """Options are keywords (`max_poll_records=100`), or a dict of Kafka's names (`{"group.id": "billing"}`). The types
    of keys and values are those that the deserializers return, and `bytes | None` without one. Annotate a consumer
    whose deserializer is a name, or in a dict: `consumer: Consumer[str, Any] = Consumer(...)`."""

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._frontend = ConsumerFrontend(self.options, at_exit=self._at_exit)

    # What to read.

    subscribe = blocking(ConsumerCore.subscribe)
    assign = blocking(ConsumerCore.assign)
    unsubscribe = blocking(ConsumerCore.unsubscribe)
    assignment = blocking(ConsumerCore.assignment)

    # Records.

    def poll(self, timeout: float = 1.0, max_records: int | None = None) -> list[ConsumerRecord[K, V]]:
        """Return up to `max_records` records (`max_poll_records`) as soon as there are any; after `timeout` seconds
        perhaps none. Callbacks run in here. Calling `poll` marks the records of the previous call as processed.

        Raises `WakeupError`; `LogTruncatedError`, `NoOffsetForPartitionError`, `DeserializationError` for a partition
        that cannot go on, again in each call until `seek`; and non-retriable errors of the group
        (`GroupFullError`, `FencedInstanceIdError`, ...).
        """
        count = read_count(max_records, self.options.max_poll_records)
        return self._poll(timeout, lambda: self._frontend.buffer.take(count)) or []

    def __iter__(self) -> Iterator[ConsumerRecord[K, V]]:
        """Yield records one by one, without an end. Asking for the next record marks the last one as processed."""
        buffer = self._frontend.buffer
        while True:
            self._poll(None, buffer.load)
            position = buffer.position
            for record in buffer.rows:
                position.record = record
                yield record
                if buffer.attention:
                    break

    def poll_arrow(self, timeout: float = 1.0, max_records: int | None = None) -> pyarrow.Table:
        """Poll, and return columns: topic, partition, offset, timestamp, key, value, headers. Key and value are
        bytes; deserializers are not called. Needs pyarrow."""
        return table_of(self._poll_parts(timeout, max_records))

    def _poll_parts(self, timeout: float = 1.0, max_records: int | None = None) -> list[Part]:
        """Return the batches of `poll_arrow`, without pyarrow."""
        count = read_count(max_records, 1 << 62)
        return self._poll(timeout, lambda: self._frontend.buffer.take_columns(count), is_arrow=True) or []

    def _poll(self, timeout: float | None, take: Callable[[], T], *, is_arrow: bool = False) -> T | None:
        frontend = self._frontend
        end_s = None if timeout is None else time.monotonic() + read_timeout(timeout, 0)
        with self._exclusively():
            frontend.begin_poll()
            try:
                taken = frontend.take_now(take)
                left_s = timeout
                while not taken:
                    frontend.run(frontend.fill(left_s, is_arrow=is_arrow))
                    taken = take()
                    if end_s is not None:
                        left_s = max(0.0, end_s - time.monotonic())
                        if not left_s:
                            break
                return taken
            finally:
                frontend.is_polling = False

    def wakeup(self) -> None:
        """Make the poll in progress, or else the next one, raise `WakeupError`. From any thread."""
        self._frontend.wakeup()

    # Positions.

    position = blocking(ConsumerCore.position)
    seek = blocking(ConsumerCore.seek)
    seek_to_beginning = blocking(ConsumerCore.seek_to_beginning)
    seek_to_end = blocking(ConsumerCore.seek_to_end)
    seek_to_time = blocking(ConsumerCore.seek_to_time)
    pause = blocking(ConsumerCore.pause)
    resume = blocking(ConsumerCore.resume)
    paused = blocking(ConsumerCore.paused)

    # Commits.

    commit = blocking(ConsumerCore.commit)
    commit_async = blocking(ConsumerCore.commit_async)
    committed = blocking(ConsumerCore.committed)

    # The cluster.

    beginning_offsets = blocking(ConsumerCore.beginning_offsets)
    end_offsets = blocking(ConsumerCore.end_offsets)
    offsets_for_times = blocking(ConsumerCore.offsets_for_times)
    partitions_for = blocking(ConsumerCore.partitions_for)
    group_metadata = blocking(ConsumerCore.group_metadata)

    # The end.

    def close(self, timeout: float | None = None) -> None:
        """Commit what you received (with automatic commits), call `on_revoked` and leave the group, so that others take
        over at once. `timeout` is in seconds (30). A second call does nothing."""
        self._close(timeout, is_processed=True)

    def _close(self, timeout: float | None, *, is_processed: bool) -> None:
        frontend = self._frontend
        if not frontend.is_open:
            return
        if frontend.is_in_callback:
            raise SubscriptionError("a rebalance callback cannot close its consumer: return from it first")
        timeout = read_timeout(timeout, CLOSE_S)
        end_s = time.monotonic() + timeout
        with self._exclusively("another thread uses this consumer: call `wakeup`, and close it there"):
            if is_processed:
                frontend.buffer.acknowledge()
            try:
                if frontend.host.core is not None:
                    self._run(lambda core: core.leave(timeout))
            finally:
                try:
                    frontend.host.close(max(0.0, end_s - time.monotonic()))
                finally:
                    frontend.close_interceptors()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the last records may not be processed: they are not committed.
        self._close(None, is_processed=error is None)

    def _at_exit(self, timeout: float) -> None:
        """The interpreter ends: leave the group."""
        try:
            self._close(timeout, is_processed=False)
        except ConcurrentUseError:  # by a thread that is about to end
            self._frontend.host.close(timeout)

    # Calls.

    def _run(self, call: Call[T]) -> T:
        with self._exclusively():
            return self._frontend.run(call)

    @contextmanager
    def _exclusively(
        self, message: str = "another thread uses this consumer; it may only call wakeup and metrics"
    ) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError(message)
        try:
            yield
        finally:
            self._lock.release()
