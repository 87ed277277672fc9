"""Who waits for a partition: producers for an offset to be replicated, readers for anything new.

Nothing is held for a partition that nobody waits for. Whoever is gone (cancelled, timed out) is passed over, and taken
out at the next chance.
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

    Invariant: ordered by end. Who was forgotten stays, cancelled, until half of them are: to give up costs little,
    however many do at once.
    """

    __slots__ = ("_forgotten", "_number", "_waiters")

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._number = 0
        self._forgotten = 0
        """Since those that are done were last taken out."""

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
        """Its producer has given up."""
        future.cancel()
        self._forgotten += 1
        if 2 * self._forgotten >= len(self._waiters):
            self._waiters = [waiter for waiter in self._waiters if not waiter.future.done()]
            self._forgotten = 0

    def fail(self, error: TidelogError) -> None:
        waiters, self._waiters = self._waiters, []
        self._forgotten = 0
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
                waiter.future.exception()  # whoever waited may be gone


class Waker:
    """One reader that waits for any of several partitions. `take` says which ones have news."""

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
        """Those with news since the last call, each once."""
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
