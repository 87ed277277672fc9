"""`tidelog.aio.Producer`: the producer for programs on an event loop.

    async with tidelog.aio.Producer("localhost:9292") as producer:
        delivery = await producer.send("orders", b"...", key="42")     # queued
        print(await delivery)                                          # stored

`send` suspends only while there is no metadata or no memory. Callbacks are plain functions; they run on the loop that
used the producer last. gRPC runs on the IO thread as for `tidelog.Producer`, so that any loop will do. A
producer may be used on one loop after the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from tidelog.client.closing import AsyncClosing
from tidelog.client.durations import check_timeout
from tidelog.client.options import Bootstrap, ProducerOptions
from tidelog.client.producer.accumulator import TopicState
from tidelog.client.producer.bulk import BulkDelivery
from tidelog.client.producer.core import RunCallbacks
from tidelog.client.producer.fast_path import Delivery, DeliveryCallback, RecordMetadata
from tidelog.client.producer.frontend import ProducerFrontend
from tidelog.client.producer.records import check_callback
from tidelog.client.producer.transactional import AsyncTransactionMethods
from tidelog.client.record import TopicPartition
from tidelog.client.tasks import Ending
from tidelog.model.errors import CallTimeoutError, TidelogError


class Producer(AsyncTransactionMethods, ProducerFrontend, AsyncClosing):
    """Sends records. Options and methods are those of `tidelog.Producer`."""

    def __init__(self, bootstrap: Bootstrap = None, /, **options: Unpack[ProducerOptions]) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. It does not connect yet."""
        super().__init__(bootstrap, {**options})
        self._callbacks = _LoopCallbacks()
        self._ending = Ending()

    def _callback_runner(self, io: Any) -> RunCallbacks:
        return partial(self._callbacks.run, io)

    def _forked(self) -> None:
        super()._forked()
        self._callbacks, self._ending = _LoopCallbacks(), Ending()

    async def send(
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
        """Queue one record, as `tidelog.Producer.send` does; await the `Delivery` to know where it is stored."""
        if on_delivery is not None:
            check_callback(on_delivery)
            self._callbacks.use_this_loop()
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
                await self._wait(entry[0], entry[1], batch.size, deadline_s)
            return delivery
        while (delivery := self._append(entry)) is None:
            await self._wait(entry[0], entry[1], max(entry[3], self._accumulator.batch_size), deadline_s)
        return delivery

    async def send_and_wait(
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
    ) -> RecordMetadata:
        """Send a record, and wait until it is stored."""
        delivery = await self.send(
            topic,
            value,
            key,
            partition=partition,
            headers=headers,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
            expected_offset=expected_offset,
            fencing_token=fencing_token,
            claim=claim,
        )
        return await delivery

    async def send_many(
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
        """Queue many records, as `tidelog.Producer.send_many` does."""
        self._callbacks.use_this_loop()
        condition = None if expected_offset is None else self._condition(expected_offset, None, False, partition)
        columns, shared, highest = self._columns(topic, records, values, keys, headers, timestamps_ms, partition)
        delivery = BulkDelivery(topic)
        if not len(columns):
            return delivery
        state = await self._state(topic, highest)
        left = len(columns)
        try:
            for chunk in self._chunks(columns, state, shared, condition):
                batch = self._encoded(topic, chunk, state, condition)
                deadline_s = self._deadline_s()
                try:
                    while not self._enter(delivery, batch, state):
                        await self._wait(topic, None, batch.size, deadline_s)
                except TidelogError as error:
                    if left == len(columns):
                        raise
                    delivery.reject(left, error)
                    return delivery
                left -= batch.count
                await asyncio.sleep(0)
        finally:
            self._accumulator.wake_core()
        return delivery

    async def _state(self, topic: str, highest: int | None) -> TopicState:
        deadline_s = self._deadline_s()
        while (state := self._accumulator.state_of(topic)) is None or (highest or 0) >= state.count:
            await self._wait(topic, highest, 0, deadline_s)
        return state

    async def _wait(self, topic: str, partition: int | None, size: int, deadline_s: float) -> None:
        """Until the topic is known and there may be memory."""
        self._callbacks.use_this_loop()
        await self._host.run_async(self._ready(topic, partition, size, deadline_s))

    async def partitions_for(self, topic: str, timeout: float | None = None) -> list[TopicPartition]:
        """Return the partitions of the topic. Waits for `timeout` seconds, by default `max_block_ms`."""
        self._callbacks.use_this_loop()
        seconds = self._timeout_for_metadata(timeout)
        while (partitions := self._known_partitions(topic)) is None:
            await self._host.run_async(lambda core: core.locate(topic), timeout=seconds)
        return partitions

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent so far is stored or failed, and its callbacks have run. Raises
        FlushTimeoutError after `timeout` seconds; its `left` is the number of pending records."""
        core = self._host.core
        check_timeout(timeout)
        self._callbacks.use_this_loop()
        if core is None or self._host.io is None or core.is_idle:
            return
        try:
            await self._host.run_async(lambda core: core.flush(), timeout=timeout)
        except CallTimeoutError:
            raise core.flush_timed_out() from None

    async def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds, then end; records that are not acknowledged then fail. Further calls wait
        for the first one."""
        check_timeout(timeout)
        await self._ending.run(lambda: self._close(timeout))

    async def _close(self, timeout: float | None) -> None:
        self._callbacks.use_this_loop()
        try:
            await self._host.close_async(timeout)
        finally:
            self._close_interceptors()


class _LoopCallbacks:
    """Runs callbacks in order, on the event loop that used the producer last; on the callback thread if that loop is
    closed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Callable[[], None]] = deque()

    def use_this_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for _ in range(len(self._waiting)):  # the former loop has stopped
                loop.call_soon(self._run_next)

    def run(self, io: Any, work: Callable[[], None]) -> None:
        assert self._loop is not None, "the first call sets it"
        self._waiting.append(work)
        try:
            self._loop.call_soon_threadsafe(self._run_next)
        except RuntimeError:  # the loop is closed
            io.run_callback(self._run_next)

    def _run_next(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
