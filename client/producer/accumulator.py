"""The accumulator: the open end of all partition queues, within `buffer_memory`. No IO, no thread of its own.

Threads of the program append records; the core, on the IO thread, takes sealed batches. One lock guards everything, and
is held for a few steps only.

    open      `buffers.open[partition]`, at most one for each partition; `limit` bytes are reserved
    sealed    in `sealed`, in order; its size is reserved. By the thread that fills it, or by the core: its linger is
              over, a flush, or the memory is short
    done      its callbacks have run, and its bytes are free

`reserved` never exceeds `buffer_memory`, but for one record that is larger than all of it. A caller without memory
registers a signal (`on_free`), which is called when bytes become free.

After a change that concerns the core, `wake_core` is called outside of the lock; it wakes the core once until it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from tidelog.client.errors import fresh
from tidelog.client.producer.fast_path import (
    BatchAppender,
    Delivery,
    DeliveryCallback,
    ProducerBatch,
    Row,
    TopicBuffers,
    append_row,
)
from tidelog.client.producer.partitioners import DIRECT, Partitioner
from tidelog.model.errors import TidelogError, UnknownTopicOrPartitionError

SHARE = 16
"""An open batch reserves at most this part of the memory, so that a few partitions do not take all of it."""


class TopicState(TopicBuffers):
    """`TopicBuffers`, and which of its partitions have a leader."""

    def __init__(self, topic: str, count: int, available: tuple[int, ...]) -> None:
        super().__init__(topic, count)
        self.available = available
        self.turn = 0
        """For round robin."""


class Accumulator(BatchAppender):
    def __init__(
        self,
        *,
        lock: Any,
        random: Random,
        now_s: Callable[[], float],
        wake: Callable[[], None],
        batch_size: int,
        buffer_memory: int,
        row_bytes_max: int,
        partitioner: Partitioner,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(lock, row_bytes_max, clock_ms)
        self.is_default_partitioner = partitioner is DIRECT
        self.partitioner = partitioner
        self.random = random
        self.now_s = now_s
        self.batch_size = min(batch_size, max(1, buffer_memory // SHARE))
        self.buffer_memory = buffer_memory
        self.reserved = 0
        self.opened: deque[ProducerBatch] = deque()
        """In the order of opening; some may be sealed."""
        self.sealed: deque[ProducerBatch] = deque()
        self.unfinished: dict[ProducerBatch, None] = {}
        self.is_memory_short = False
        """A caller has found no memory: open batches are to be sealed, whatever their linger."""
        self.is_closed = False
        self.rejection: TidelogError | None = None
        """Why records are rejected now: no transaction is open, or it has failed. There are no open batches then."""
        self.is_woken = False
        self.wake = wake
        self._waiters: dict[Callable[[], object], None] = {}

    # For the program's threads.

    def put(
        self, state: TopicState, partition: int | None, row: Row, size: int, on_delivery: DeliveryCallback | None
    ) -> Delivery | None:
        """Append a record, and open a batch if necessary. None: there is no memory now. Without a partition the
        partitioner chooses one."""
        with self.lock:
            if self.rejection is not None:
                raise fresh(self.rejection)
            index = self.partitioner.partition(state, row[1], row[2]) if partition is None else partition
            if not 0 <= index < state.count:
                raise UnknownTopicOrPartitionError(
                    f"topic '{state.topic}' has {state.count} partitions; there is no partition {index}"
                )
            batch = state.open[index]
            if batch is not None and batch.size + size > batch.limit:
                self.seal(batch)
                if partition is None and self.partitioner.is_sticky(row[1]):
                    index = state.sticky  # sealing has moved it
                batch = state.open[index]
                if batch is not None and batch.size + size > batch.limit:
                    self.seal(batch)
                    batch = None
            if batch is None:
                batch = self._open(state, index, size)
            delivery = None if batch is None else append_row(batch, row, batch.size + size, on_delivery)
        self.wake_core()
        return delivery

    def _open(self, state: TopicState, index: int, size: int) -> ProducerBatch | None:
        limit = max(self.batch_size, size)
        if self.is_closed or not self._fits(limit):
            # Open batches have more reserved than they may need: the core seals them all.
            self.is_memory_short = True
            return None
        batch = ProducerBatch(state.topic, index, limit, self.now_s())
        batch.lock = self.lock
        state.open[index] = batch
        self.reserved += limit
        self.opened.append(batch)
        self.unfinished[batch] = None
        return batch

    def _fits(self, size: int) -> bool:
        return not self.reserved or self.reserved + size <= self.buffer_memory

    def add_encoded(self, batch: ProducerBatch, state: TopicState) -> bool:
        """Add an encoded batch of `send_many` behind its partition's open batch. False: there is no memory now. The
        core is woken only then; otherwise the caller wakes it, once for many."""
        with self.lock:
            if self.rejection is not None:
                raise fresh(self.rejection)
            if self.is_closed or not self._fits(batch.size):
                self.is_memory_short = has_failed = True
            else:
                has_failed = False
                before = state.open[batch.partition] if batch.partition < state.count else None
                if before is not None:
                    self.seal(before)
                elif batch.partition == state.sticky:
                    self.move_sticky(state)
                batch.lock = self.lock
                batch.limit = batch.size
                batch.is_sealed = True
                self.reserved += batch.size
                self.unfinished[batch] = None
                self.sealed.append(batch)
        if has_failed:
            self.wake_core()
        return not has_failed

    def on_free(self, signal: Callable[[], object], size: int) -> bool:
        """Call it when bytes have become free. False: there is memory for `size` bytes, and it is not called."""
        with self.lock:
            if self.is_closed or self._fits(size):
                return False
            self._waiters[signal] = None
            self.is_memory_short = True
        self.wake_core()
        return True

    def off_free(self, signal: Callable[[], object]) -> None:
        with self.lock:
            self._waiters.pop(signal, None)

    # Under the lock.

    def seal(self, batch: ProducerBatch) -> None:
        """It takes no more records, and belongs to the core."""
        state = self.topics.get(batch.topic)
        assert not batch.is_sealed, "it is sealed once"
        batch.is_sealed = True
        batch.count = len(batch.rows)
        self.reserved -= batch.limit - batch.size
        batch.limit = batch.size
        self.sealed.append(batch)
        if state is not None and batch.partition < len(state.open) and state.open[batch.partition] is batch:
            state.open[batch.partition] = None
            if batch.partition == state.sticky:
                self.move_sticky(state)

    def move_sticky(self, state: TopicBuffers) -> None:
        """Choose another partition for records without a key: one that has a leader, if any has."""
        assert isinstance(state, TopicState)
        choices = state.available or range(state.count)
        if len(choices) > 1:
            state.sticky = self.random.choice([index for index in choices if index != state.sticky])
        else:
            state.sticky = choices[0]

    def seal_all(self) -> None:
        """In the order of opening."""
        for batch in list(self.unfinished):
            if not batch.is_sealed:
                self.seal(batch)
        self.opened.clear()

    def reject(self, error: TidelogError | None) -> None:
        """Reject records from now on, and seal what is open; None: take records."""
        with self.lock:
            self.rejection = error
            if error is not None:
                self.seal_all()

    # For the core.

    def wake_core(self) -> None:
        if (self.sealed or self.opened or self.is_memory_short) and not self.is_woken:
            self.is_woken = True
            self.wake()

    def state_of(self, topic: str) -> TopicState | None:
        state = self.topics.get(topic)
        assert state is None or isinstance(state, TopicState)
        return state

    def set_topic(self, topic: str, count: int, available: tuple[int, ...]) -> None:
        """A topic is new, has more partitions, or was created again with fewer."""
        with self.lock:
            state = self.state_of(topic)
            if state is None:
                self.topics[topic] = state = TopicState(topic, count, available)
                self.move_sticky(state)
                return
            for batch in state.open[count:]:
                if batch is not None:
                    self.seal(batch)
            state.open = state.open[:count] + [None] * (count - len(state.open))
            state.count, state.available = count, available
            if state.sticky >= count or (available and state.sticky not in available):
                self.move_sticky(state)

    def forget_topic(self, topic: str) -> bool:
        """Forget a deleted topic. False: it has unfinished batches."""
        with self.lock:
            if any(batch.topic == topic for batch in self.unfinished):
                return False
            self.topics.pop(topic, None)
            return True

    def finish(self, batch: ProducerBatch) -> list[Callable[[], object]]:
        """Its outcome is set and can be read from now on. Returns what to call, outside of the lock."""
        with self.lock:
            batch.is_done = True
            self.unfinished.pop(batch, None)
            waiters, batch.waiters = batch.waiters, None
        return waiters or []

    def free(self, size: int) -> None:
        """Free the bytes of a batch that is done."""
        with self.lock:
            self.reserved -= size
            assert self.reserved >= 0, "no more is freed than was reserved"
        self.notify_free()

    def notify_free(self) -> None:
        with self.lock:
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            waiter()

    def count_unfinished(self) -> int:
        """Records that are neither stored nor failed."""
        with self.lock:
            return sum(max(batch.count, len(batch.rows)) for batch in self.unfinished)

    def close(self) -> None:
        """Take no more records; callers that wait for memory try again."""
        with self.lock:
            self.is_closed = True
            self.topics.clear()
        self.notify_free()

    def validate(self) -> None:
        with self.lock:
            held = sum(batch.limit for batch in self.unfinished)
            assert self.reserved >= held, "unfinished batches are reserved"
            for state in self.topics.values():
                assert len(state.open) == state.count, "an entry for each partition"
                for index, batch in enumerate(state.open):
                    if batch is not None:
                        assert not batch.is_sealed, "an open batch is not sealed"
                        assert batch.partition == index, "each at its index"
