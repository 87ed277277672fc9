"""Long loops in slices: other tasks run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from tidelog.model.steps import Steps

T = TypeVar("T")


class sliced(Generic[T]):  # noqa: N801 - used like `enumerate`
    """`async for item in sliced(items, 500)`: yields to the event loop after every 500 items.

    No async generator: a loop that ends early leaves nothing behind to close.
    """

    __slots__ = ("_every", "_items", "_left")

    def __init__(self, items: Iterable[T], every: int) -> None:
        self._items: Iterator[T] = iter(items)
        self._every = self._left = every

    def __aiter__(self) -> sliced[T]:
        return self

    async def __anext__(self) -> T:
        if self._left == 0:
            self._left = self._every
            await asyncio.sleep(0)
        self._left -= 1
        for item in self._items:
            return item
        raise StopAsyncIteration


async def run_in_turns(steps: Steps[T]) -> T:
    """Run one step per turn of the event loop; return the result. The last step returns without another turn."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
