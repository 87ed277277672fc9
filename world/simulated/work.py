"""CPU work in the simulator: runs inline after a virtual delay."""

import random
from collections.abc import Callable
from typing import TypeVar

from tidelog.model.errors import WorkFailedError
from tidelog.world.simulated.faults import Latency
from tidelog.world.simulated.loop import SimLoop
from tidelog.world.work import ATTEMPTS_MAX

T = TypeVar("T")


class SimWork:
    """Implements `world.work.Work`. A `SimDisk` among the values is passed on: the helper uses the node's own."""

    __slots__ = ("_loop", "_stream", "deaths", "dying", "latency")

    def __init__(self, loop: SimLoop, stream: random.Random) -> None:
        self.latency = Latency(0.001, 0.02)
        self.dying: set[str] = set()
        """Functions that kill their helper process, as one that runs out of memory does."""
        self.deaths: dict[str, int] = {}
        """Functions that kill this many helpers, and then none."""
        self._loop = loop
        self._stream = stream

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        assert "<" not in fn.__qualname__, f"{fn.__qualname__} cannot be pickled for a helper process"
        for _ in range(ATTEMPTS_MAX):
            await self._delay()
            if not self._kills_helper(fn.__qualname__):
                return fn(*values)
        raise WorkFailedError(f"a helper process died while it ran {fn.__module__}.{fn.__qualname__}")

    async def _delay(self) -> None:
        turn = self._loop.create_future()
        handle = self._loop.call_later(self.latency.draw(self._stream), turn.set_result, None)
        try:
            await turn
        finally:
            handle.cancel()

    def _kills_helper(self, name: str) -> bool:
        left = self.deaths.get(name, 0)
        if left:
            self.deaths[name] = left - 1
        return left > 0 or name in self.dying
