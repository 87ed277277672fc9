"""Background tasks of a role: an error of one is reported, `cancel` ends all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tidelog.model.errors import first_error


class Tasks:
    """`on_failure` is called with the first error inside of exception groups."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], None] = {}

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(first_error(error))

    async def cancel(self) -> None:
        """Returns when all tasks have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def close_all(*steps: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Runs every step in order, also after an error of an earlier one; then raises the first error."""
    errors: list[Exception] = []
    for step in steps:
        try:
            await step()
        except Exception as error:
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and then: {other!r}")
        raise errors[0]
