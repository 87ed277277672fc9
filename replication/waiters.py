"""Waiters of a partition: producers wait for an offset to be replicated, readers for new records.

A partition without waiters holds nothing. Waiters that were cancelled or timed out are skipped, and removed later.
"""

import asyncio
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId


@dataclass(slots=True, order=True)
class _Waiter:
    end: int
    number: int
    future: "asyncio.Future[None]"


class AckWaiters:
    """Producers of one partition in one leader epoch, by the end that the high watermark must reach.

    Invariant: ordered by end. Forgotten waiters stay in the list, cancelled, until they are half of it: forgetting is
    cheap for any number at once.
    """

    __slots__ = ("_forgotten", "_number", "_waiters")

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._number = 0
        self._forgotten = 0
        """Number of cancelled waiters that may still be in the list."""

    def __len__(self) -> int:
        return sum(not waiter.future.done() for waiter in self._waiters)

    def wait(self, end: int) -> "asyncio.Future[None]":
        """Resolves when the high watermark has reached `end`; fails when the epoch ends first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number += 1
        waiter = _Waiter(end, self._number, future)
        if not self._waiters or self._waiters[-1].end <= end:
            self._waiters.append(waiter)
        else:
            insort(self._waiters, waiter)
        return future

    def advance(self, high_watermark: int) -> None:
        done = 0
        for waiter in self._waiters:
            if waiter.end > high_watermark:
                break
            done += 1
            if not waiter.future.done():
                waiter.future.set_result(None)
        if done:
            del self._waiters[:done]

    def forget(self, future: "asyncio.Future[None]") -> None:
        """Cancel a waiter whose producer has given up."""
        future.cancel()
        self._forgotten += 1
        if 2 * self._forgotten >= len(self._waiters):
            self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]
            self._forgotten = 0

    def validate(self, high_watermark: int, *, thorough: bool = True) -> None:
        """Assert that they are in order, and that nobody waits for what has been reached."""
        ends = [waiter.end for waiter in (self._waiters if thorough else self._waiters[:1])]
        assert not ends or ends[0] > high_watermark, f"waits for {ends[0]}; the high watermark is {high_watermark}"
        assert ends == sorted(ends), "waiters are not in the order of their ends"

    def fail(self, error: TidelogError) -> None:
        waiters, self._waiters = self._waiters, []
        self._forgotten = 0
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
                waiter.future.exception()  # the producer may be gone


class Waker:
    """One reader that waits for any of several partitions. `take` returns those that changed."""

    __slots__ = ("_event", "_woken")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._woken: dict[PartitionId, None] = {}

    def wake(self, partition: PartitionId) -> None:
        self._woken[partition] = None
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> list[PartitionId]:
        """Return the partitions that changed since the last call, each once."""
        woken, self._woken = self._woken, {}
        self._event.clear()
        return list(woken)


class Wakers:
    """The readers of all partitions, by partition."""

    __slots__ = ("_by_partition",)

    def __init__(self) -> None:
        self._by_partition: dict[PartitionId, dict[Waker, None]] = {}

    def __len__(self) -> int:
        return len(self._by_partition)

    def add(self, waker: Waker, partitions: Iterable[PartitionId]) -> None:
        for partition in partitions:
            self._by_partition.setdefault(partition, {})[waker] = None

    def remove(self, waker: Waker, partitions: Iterable[PartitionId]) -> None:
        for partition in partitions:
            wakers = self._by_partition.get(partition)
            if wakers is not None:
                wakers.pop(waker, None)
                if not wakers:
                    del self._by_partition[partition]

    def wake(self, partition: PartitionId) -> None:
        wakers = self._by_partition.get(partition)
        if wakers is not None:
            for waker in wakers:
                waker.wake(partition)
