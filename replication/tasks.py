"""The tasks and timers of a broker's replicas, and of its group coordinator: `close` ends all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tidelog.model.ids import NodeId

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicaTasks:
    """Tasks handle I/O and network errors themselves. Any other error of one stops the node: `on_crash` is called with
    the first."""

    def __init__(self, broker: NodeId, on_crash: Callable[[BaseException], None]) -> None:
        self.on_crash = on_crash
        self.is_closed = False
        """Nothing is begun any more."""
        self._broker = broker
        self._has_crashed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task that `cancel` ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that `cancel` ends; its owner handles its errors."""
        self._tasks.add(task)

        def ended(_task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.check(task)

    def check(self, task: asyncio.Task[Any]) -> None:
        """Stop the node if the task failed."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.crash(task.get_name(), error)

    def crash(self, where: str, error: BaseException) -> None:
        LOGGER.critical("broker=%d %s has crashed: %r", self._broker, where, error, exc_info=error)
        if not self._has_crashed:
            self._has_crashed = True
            self.on_crash(error)

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Call back after the delay, unless `is_closed` by then."""

        def call() -> None:
            if not self.is_closed:
                callback(*arguments)

        asyncio.get_running_loop().call_later(delay_s, call)

    def begin_close(self) -> None:
        self.is_closed = True

    async def cancel(self) -> None:
        """Return when all tasks have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
