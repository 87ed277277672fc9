"""`tidelog.aio.Consumer`: the consumer for event loops. Same methods and guarantees as `tidelog.Consumer`.

    async with tidelog.aio.Consumer("localhost:9292", group="billing") as consumer:
        await consumer.subscribe(["orders"])
        async for record in consumer:
            await handle(record)

Callbacks may be coroutine functions. A cancelled call loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from tidelog.client.arrow import Part, table_of
from tidelog.client.consumer.arguments import CLOSE_S, read_count, read_timeout
from tidelog.client.consumer.core import ConsumerCore
from tidelog.client.consumer.errors import SubscriptionError
from tidelog.client.consumer.frontend import ConsumerFrontend
from tidelog.client.consumer.typed_options import TypedConsumer
from tidelog.client.operations import awaited
from tidelog.client.record import (
    ConsumerRecord,
    K,
    V,
)

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


class Consumer(TypedConsumer[K, V]):
    """Used on one loop, by one task at a time. Methods are those of `tidelog.Consumer`."""

    def _start(self) -> None:
        self._frontend = self._new_frontend()
        self._run = self._frontend.run_async
        self._closing = asyncio.Lock()

    def _new_frontend(self) -> ConsumerFrontend:
        # At the interpreter's end no loop is left for callbacks: the session timeout removes the member.
        return ConsumerFrontend(self.options, at_exit=lambda _timeout: None)

    # What to read.

    subscribe = awaited(ConsumerCore.subscribe)
    assign = awaited(ConsumerCore.assign)
    unsubscribe = awaited(ConsumerCore.unsubscribe)
    assignment = awaited(ConsumerCore.assignment)

    # Records.

    async def poll(self, timeout: float = 1.0, max_records: int | None = None) -> list[ConsumerRecord[K, V]]:
        count = read_count(max_records, self.options.max_poll_records)
        return await self._poll(timeout, lambda: self._frontend.buffer.take(count)) or []

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord[K, V]]:
        buffer = self._frontend.buffer
        while True:
            await self._poll(None, buffer.load)
            position = buffer.position
            for record in buffer.rows:
                position.record = record
                yield record
                if buffer.attention:
                    break

    async def poll_arrow(self, timeout: float = 1.0, max_records: int | None = None) -> pyarrow.Table:
        return table_of(await self._poll_parts(timeout, max_records))

    async def _poll_parts(self, timeout: float = 1.0, max_records: int | None = None) -> list[Part]:
        count = read_count(max_records, 1 << 62)
        return await self._poll(timeout, lambda: self._frontend.buffer.take_columns(count), is_arrow=True) or []

    async def _poll(self, timeout: float | None, take: Callable[[], T], *, is_arrow: bool = False) -> T | None:
        frontend = self._frontend
        loop = asyncio.get_running_loop()
        end_s = None if timeout is None else loop.time() + read_timeout(timeout, 0)
        frontend.begin_poll()
        try:
            taken = frontend.take_now(take)
            left_s = timeout
            while not taken:
                await frontend.run_async(frontend.fill(left_s, is_arrow=is_arrow))
                taken = take()
                if end_s is not None:
                    left_s = max(0.0, end_s - loop.time())
                    if not left_s:
                        break
            return taken
        finally:
            frontend.is_polling = False

    def wakeup(self) -> None:
        """From any thread or task."""
        self._frontend.wakeup()

    # Positions.

    position = awaited(ConsumerCore.position)
    seek = awaited(ConsumerCore.seek)
    seek_to_beginning = awaited(ConsumerCore.seek_to_beginning)
    seek_to_end = awaited(ConsumerCore.seek_to_end)
    seek_to_time = awaited(ConsumerCore.seek_to_time)
    pause = awaited(ConsumerCore.pause)
    resume = awaited(ConsumerCore.resume)
    paused = awaited(ConsumerCore.paused)

    # Commits.

    commit = awaited(ConsumerCore.commit)
    commit_async = awaited(ConsumerCore.commit_async)
    committed = awaited(ConsumerCore.committed)

    # The cluster.

    beginning_offsets = awaited(ConsumerCore.beginning_offsets)
    end_offsets = awaited(ConsumerCore.end_offsets)
    offsets_for_times = awaited(ConsumerCore.offsets_for_times)
    partitions_for = awaited(ConsumerCore.partitions_for)
    group_metadata = awaited(ConsumerCore.group_metadata)

    # The end.

    async def close(self, timeout: float | None = None) -> None:
        await self._close(timeout, is_processed=True)

    async def _close(self, timeout: float | None, *, is_processed: bool) -> None:
        frontend = self._frontend
        core = frontend.host.core
        if core is not None and core.reconciler.callback_task is asyncio.current_task() is not None:
            raise SubscriptionError("a rebalance callback cannot close its consumer: return from it first")
        loop = asyncio.get_running_loop()
        timeout = read_timeout(timeout, CLOSE_S)
        end_s = loop.time() + timeout
        async with self._closing:
            if not frontend.is_open:
                return
            if is_processed:
                frontend.buffer.acknowledge()
            try:
                if frontend.host.core is not None:
                    await self._run(lambda core: core.leave(timeout))
            finally:
                try:
                    await frontend.host.close_async(max(0.0, end_s - loop.time()))
                finally:
                    frontend.close_interceptors()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(None, is_processed=error is None)
