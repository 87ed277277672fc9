"""`tidelog.aio.Consumer`: the same for a program on an event loop. See `client.consumer` for what holds for both.

    async with tidelog.aio.Consumer("localhost:9292", group="billing") as consumer:
        await consumer.subscribe(["orders"])
        async for record in consumer:
            await handle(record)

Callbacks may be coroutine functions. A call that is cancelled loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from re import Pattern
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tidelog.client import io_thread
from tidelog.client.arrow import table_of
from tidelog.client.commits import Offsets, Told
from tidelog.client.consumer_errors import ConsumerClosedError, SubscriptionError
from tidelog.client.consumer_front import (
    CLOSE_MS,
    Partitions,
    Topics,
    When,
    new_core,
    read_offset,
    read_offsets,
    read_partition,
    read_partitions,
    read_times,
    read_topics,
)
from tidelog.client.errors import ForkedError
from tidelog.client.names import ConsumerOptions, read_options
from tidelog.client.rebalance import Listener
from tidelog.client.record import (
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from tidelog.client.user_side import UserSide

if TYPE_CHECKING:
    import pyarrow

Callback = Callable[[list[TopicPartition]], object | Awaitable[object]]


class Consumer:
    """Used on one loop, by one task at a time. Methods are those of `tidelog.Consumer`."""

    def __init__(self, bootstrap: object = None, /, **options: Any) -> None:
        self.options = read_options(ConsumerOptions, bootstrap, options)
        self._is_closed = self._is_forked = False
        self._host: Any = self._acquire_host()
        self._my_side = self._new_side()
        self._closing = asyncio.Lock()

    # The host: the IO thread, or what a test has instead.

    def _acquire_host(self) -> Any:
        return io_thread.acquire(self)

    def _new_side(self) -> UserSide:
        return UserSide(
            new_core(self._host, self.options),
            self.options,
            self._host.do,
            lambda: asyncio.get_running_loop().time(),
        )

    @property
    def _side(self) -> UserSide:
        if self._is_forked:
            raise ForkedError("this consumer belongs to the process that this one was forked from: make another")
        if self._is_closed:
            raise ConsumerClosedError("this consumer was closed")
        return self._my_side

    # What to read.

    async def subscribe(
        self,
        topics: Topics = None,
        *,
        pattern: str | Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        names, text = read_topics(topics, pattern)
        await self._side.subscribe(names, text, Listener(on_assigned, on_revoked, on_lost))

    async def assign(self, partitions: Iterable[Partitions]) -> None:
        await self._side.assign(read_partitions(partitions))

    async def unsubscribe(self) -> None:
        await self._side.unsubscribe()

    async def assignment(self) -> set[TopicPartition]:
        return await self._side.assignment()

    # Records.

    async def poll(self, timeout_ms: float = 1_000, max_records: int | None = None) -> list[ConsumerRecord]:
        return await self._side.poll(timeout_ms, max_records)

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        hand = self._side.hand
        while True:
            await self._side.fill()
            for record in hand.rows:
                hand.last = record
                yield record
                if hand.attention:
                    break

    async def poll_arrow(self, timeout_ms: float = 1_000, max_records: int | None = None) -> pyarrow.Table:
        return table_of(await self._side.poll_columns(timeout_ms, max_records))

    def wakeup(self) -> None:
        """From any thread or task."""
        if not self._is_closed and not self._is_forked:
            self._host.call_soon(self._my_side.core.wakeup)

    # Positions.

    async def position(self, partition: Partitions) -> int:
        return await self._side.position(read_partition(partition))

    async def seek(self, partition: Partitions, offset: int, *, leader_epoch: int = -1) -> None:
        name = read_partition(partition)
        await self._side.seek(name, read_offset(name, offset), leader_epoch)

    async def seek_to_beginning(self, *partitions: Partitions) -> None:
        await self._side.seek_to(read_partitions(partitions), "earliest")

    async def seek_to_end(self, *partitions: Partitions) -> None:
        await self._side.seek_to(read_partitions(partitions), "latest")

    async def seek_to_time(self, when: When | Mapping[TopicPartition, When], *partitions: Partitions) -> None:
        chosen = partitions or tuple(await self.assignment())
        await self._side.seek_to_times(read_times(when, chosen, self._side.now_ms()))

    async def pause(self, *partitions: Partitions) -> None:
        await self._side.pause(read_partitions(partitions))

    async def resume(self, *partitions: Partitions) -> None:
        await self._side.resume(read_partitions(partitions))

    async def paused(self) -> set[TopicPartition]:
        return await self._side.paused()

    # Commits.

    async def commit(self, offsets: Offsets | None = None, *, timeout_ms: int | None = None) -> None:
        await self._side.commit(read_offsets(offsets), timeout_ms)

    async def commit_async(self, offsets: Offsets | None = None, on_commit: Told | None = None) -> None:
        """Sent, not waited for: see `tidelog.Consumer.commit_async`."""
        await self._side.commit_once(read_offsets(offsets), on_commit)

    async def committed(self, *partitions: Partitions) -> dict[TopicPartition, OffsetAndMetadata | None]:
        return await self._side.committed(read_partitions(partitions))  # type: ignore[no-any-return]

    # Questions.

    async def beginning_offsets(self, *partitions: Partitions) -> dict[TopicPartition, int]:
        return await self._side.ends(read_partitions(partitions), is_start=True)

    async def end_offsets(self, *partitions: Partitions) -> dict[TopicPartition, int]:
        return await self._side.ends(read_partitions(partitions), is_start=False)

    async def offsets_for_times(
        self, times: Mapping[TopicPartition, When]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        return await self._side.times(read_times(times, (), self._side.now_ms()))

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        return await self._side.partitions_for(topic)

    async def group_metadata(self) -> GroupMetadata:
        return await self._side.group_metadata()

    async def metrics(self) -> dict[str, float]:
        """As of `tidelog.Consumer`. Awaited, where a producer's and an admin's are not: positions and lag change on the
        thread that fetches, and only there can they be looked at together."""
        return await self._side.metrics()

    # The end.

    async def close(self, *, timeout_ms: int = CLOSE_MS) -> None:
        await self._close(timeout_ms, is_done=True)

    async def _close(self, timeout_ms: int, *, is_done: bool) -> None:
        if self._my_side.is_in_callback and self._my_side.callback_task is asyncio.current_task():
            raise SubscriptionError("a rebalance callback cannot close its consumer: return from it first")
        async with self._closing:
            if self._is_closed or self._is_forked:
                return
            try:
                await self._my_side.close(timeout_ms, is_done=is_done)
            finally:
                self._is_closed = True
                self._host.release(self, is_awaited=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(CLOSE_MS, is_done=error is None)

    def at_exit(self, deadline_s: float) -> None:
        """The interpreter ends without `close`: there is no loop to run callbacks on. The session's end tells the
        group."""

    def forked(self) -> None:
        self._is_forked = True
        io_thread.leave_behind(self._my_side, self._host)
        self._host = None
