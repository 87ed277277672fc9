"""The producer of programs that run on an event loop. `tidelog.aio.Producer`.

    async with tidelog.aio.Producer("localhost:9292") as producer:
        delivery = await producer.send("orders", b"...", key="42")     # taken: there was room
        print(await delivery)                                          # stored

`send` suspends only while there is no metadata or no room. Callbacks run on the loop that the producer was first used
on; gRPC is on the IO thread as for `tidelog.Producer`, so that any loop will do, a notebook's too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from tidelog.client.accumulator import TopicPlace
from tidelog.client.bulk import BulkDelivery
from tidelog.client.errors import FlushTimeoutError
from tidelog.client.hot import Delivery, RecordMetadata, Told
from tidelog.client.producer_core import ProducerCore, place_of
from tidelog.client.producer_front import Entry, ProducerFront
from tidelog.client.waiting import wait_in_loop
from tidelog.model.errors import CallTimeoutError, TidelogError

LOGGER = logging.getLogger(__name__)


class Producer(ProducerFront):
    """Sends records. Options as of `tidelog.Producer`."""

    def __init__(self, bootstrap: object = None, /, **options: Any) -> None:
        """`bootstrap` is "host:port,host:port", a list of addresses, or a dict of options. Connects to nothing yet."""
        super().__init__(bootstrap, options)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _begin(self) -> None:
        super()._begin()
        self._starting: asyncio.Task[ProducerCore] | None = None
        self._closing = asyncio.Lock()

    def _tell(self, work: Callable[[], None]) -> None:
        try:
            assert self._loop is not None, "it was started on a loop"
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # that loop is closed; callbacks are owed all the same
            super()._tell(work)

    # Sending.

    async def send(
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
        """Take one record, as `tidelog.Producer.send` does; await what it gives to know where it is stored."""
        if headers is None:
            taken = self._take(topic, value, key, partition, None, timestamp_ms, on_delivery)
            if taken is not None:
                return taken
        return await self._send(self._entry(topic, value, key, partition, headers, timestamp_ms, on_delivery))

    async def send_and_wait(self, topic: str, value: Any = None, key: Any = None, **more: Any) -> RecordMetadata:
        """`send`, and where the record is stored."""
        return await (await self.send(topic, value, key, **more))

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
    ) -> BulkDelivery:
        """Take many records at once, as `tidelog.Producer.send_many` does."""
        columns, one, highest = self._columns(topic, records, values, keys, headers, timestamps_ms, partition)
        delivery = BulkDelivery(topic)
        if not len(columns):
            return delivery
        place = await self._place(topic, highest, self._deadline_s())
        left = len(columns)
        try:
            for chunk in self._chunks(columns, place, one):
                parcel = self._parcel(topic, chunk, place)
                try:
                    await self._until_entered(
                        partial(self._enter, delivery, parcel, place), topic, parcel.size, self._deadline_s()
                    )
                except TidelogError as error:
                    if left == len(columns):
                        raise
                    delivery.leave_out(left, error)
                    return delivery
                left -= parcel.count
                await asyncio.sleep(0)
        finally:
            self._in.wake_core()
        return delivery

    async def _send(self, entry: Entry) -> Delivery:
        topic, partition, _, size, _ = entry
        deadline_s = self._deadline_s()
        found: list[Delivery] = []

        def enter() -> bool:
            made = self._put(entry)
            if made is not None:
                found.append(made)
            return made is not None

        while not found:
            await self._place(topic, partition, deadline_s)
            await self._until_entered(enter, topic, size, deadline_s)
        return found[0]

    async def _until_entered(self, enter: Callable[[], bool], topic: str, size: int, deadline_s: float) -> None:
        """Try, and again whenever there may be room; or until the topic has no place any more."""
        is_in = enter()

        def try_again(call: Callable[[], object]) -> bool:
            nonlocal is_in
            self._in.on_room(call)  # first: room that comes now is not missed
            is_in = enter()
            if not is_in:
                self._check_open()
            return not is_in

        while not is_in and topic in self._in.places:
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self._now_s())):
                    await wait_in_loop(try_again, self._in.off_room)
            except TimeoutError:
                raise self._no_room(topic, size) from None
            is_in = is_in or enter()
        self._check_open()

    def _deadline_s(self) -> float:
        return self._now_s() + self._options.max_block_ms / 1000

    async def _place(self, topic: str, partition: int | None, deadline_s: float) -> TopicPlace:
        """The topic's, waiting for metadata if it is not known, or has too few partitions."""
        place = place_of(self._in, topic)
        if place is None:
            await self._on_loop(lambda core: core.locate(topic), topic, deadline_s)
            place = place_of(self._in, topic)
            if place is None:
                self._check_open()
                raise CallTimeoutError(f"no metadata of '{topic}'")
        if partition is not None and partition >= place.count:
            await self._on_loop(lambda core: core.grow(topic, partition), topic, deadline_s)
        return place

    async def _on_loop(self, job: Callable[[ProducerCore], Any], topic: str, deadline_s: float) -> None:
        core = await self._started()
        try:
            async with asyncio.timeout(max(0.001, deadline_s - self._now_s())):
                await self._host.do(job(core))
        except TidelogError:
            self._check_open()  # closed by another task: nothing else is wrong
            raise
        except TimeoutError:
            raise self._no_metadata(topic, core) from None

    async def _started(self) -> ProducerCore:
        self._check_open()
        if self._core is not None:
            return self._core
        if self._starting is None:
            # Who waits for it may be cancelled: then it is there for the next.
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(_looked_at)
        return await asyncio.shield(self._starting)

    async def _start(self) -> ProducerCore:
        try:
            self._loop = asyncio.get_running_loop()
            host = self._host = self._acquire_host()
            try:
                core: ProducerCore = await host.do(self._new_core())
                self._core = core
                return core
            except BaseException:
                host.release(self, is_awaited=False)
                self._host = None
                raise
        finally:
            self._starting = None

    # Asking.

    async def partitions_for(self, topic: str) -> list[int]:
        """The numbers of the topic's partitions. Waits up to `max_block_ms`."""
        self._check_open()
        return list(range((await self._place(topic, None, self._deadline_s())).count))

    # The end.

    async def flush(self, timeout: float | None = None) -> None:
        """Until everything sent so far has ended, well or not, and its callbacks have run; FlushTimeoutError after
        `timeout` seconds."""
        unfinished = self._unfinished()
        try:
            async with asyncio.timeout(timeout):
                for parcel in unfinished:
                    await parcel.waited()
                if self._host is not None:
                    await wait_in_loop(self._after_callbacks)
        except TimeoutError:
            left = self._left()
            raise FlushTimeoutError(f"{left} records are neither stored nor failed yet", left=left) from None

    def _after_callbacks(self, then: Callable[[], object]) -> bool:
        def work() -> None:
            then()

        # By way of the core's loop: what it is about to tell comes first.
        self._host.call_soon(self._tell, work)
        return True

    async def close(self, timeout: float | None = None) -> None:
        """Flush for up to `timeout` seconds, then end; what is not acknowledged then fails. More than once does no
        harm."""
        async with self._closing:
            if self._is_closed:
                return
            try:
                await self.flush(timeout)
            except FlushTimeoutError as error:
                if error.left:
                    LOGGER.warning("closed with %d records on their way", error.left)
            finally:
                self._is_closed = True
                self._in.close()
                # To its end, though who waits for it may be cancelled: every record has to end.
                ending = asyncio.get_running_loop().create_task(self._end())
                ending.add_done_callback(_looked_at)
                await asyncio.shield(ending)

    async def _end(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])
        host = self._host
        try:
            if host is not None:
                await host.do(self._end_core())
        finally:
            if host is not None:
                host.release(self, is_awaited=False)
                self._host = None
            self._close_interceptors()

    def at_exit(self, deadline_s: float) -> None:
        """The interpreter ends and nobody has closed it; its loop may be gone."""
        if self._is_closed:
            return
        self._is_closed = True
        left = self._left()
        if left:
            LOGGER.warning("%s was not closed; %d records are flushed now", self.client_id, left)
        host = self._host
        if host is None:
            return
        with contextlib.suppress(CallTimeoutError):
            host.run(self._drained(), timeout_s=max(0.01, deadline_s - time.monotonic()))
        if left := self._left():
            LOGGER.error("%s: %d records were neither stored nor failed when the program ended", self.client_id, left)
        host.run(self._end_core(), timeout_s=1.0)
        host.release(self, is_awaited=True)

    async def _drained(self) -> None:
        for parcel in self._unfinished():
            await parcel.waited()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<tidelog.aio.Producer {self.client_id} to {','.join(self._options.bootstrap)}, {state}>"


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Whoever waited may be gone."""
    if not task.cancelled():
        task.exception()
