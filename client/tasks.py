"""Background tasks of a client: started, watched for bugs, cancelled together; and a close that runs once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

LOGGER = logging.getLogger(__name__)


class Tasks:
    """Used on one event loop. `on_error` gets the error of a task that failed, not of one that was cancelled."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(job)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def end(self, *others: asyncio.Task[Any]) -> None:
        """Cancel all tasks and `others`; all have ended when this returns."""
        tasks: list[asyncio.Task[Any]] = [*self._running, *others]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Ending:
    """A close that starts once and runs to its end although its callers are cancelled."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def run(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the first caller's `job`; later callers wait for it."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(job())
            self._task.add_done_callback(_log_error)
        await asyncio.shield(self._task)


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        LOGGER.warning("a client was not closed cleanly: %r", error)
