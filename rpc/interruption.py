"""Interrupts waits without a task for each wait.

    outcome = await interruption.guard(read)     raises `InterruptedWaitError` once `interrupt` was called

A task and two callbacks for each message of a stream cost as much as the message. Here `interrupt` cancels the waiting
task and `guard` uncancels it, as `asyncio.timeout` does. It distinguishes three cancellations:

    by `interrupt`                        InterruptedWaitError
    of the task, by another caller        CancelledError, also if both come at once
    of the operation itself               OperationCancelledError (a cancelled gRPC call raises CancelledError in its
                                          reader)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class InterruptedWaitError(Exception):
    """The caller of `guard` handles it."""


class OperationCancelledError(Exception):
    """The caller of `guard` handles it."""


class Interruption:
    """Used on one event loop. `interrupt` is final."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: dict[asyncio.Task[Any], None] = {}

    async def guard(self, operation: Callable[..., Awaitable[T]], *values: object) -> T:
        """Returns the result of `operation(*values)`; does not start it after `interrupt`."""
        if self.is_set:
            raise InterruptedWaitError
        task = asyncio.current_task()
        assert task is not None, "only a task waits"
        assert task not in self._waiting, "a task waits for one thing at a time"
        before = task.cancelling()
        self._waiting[task] = None
        try:
            return await operation(*values)
        except asyncio.CancelledError:
            is_ours = task not in self._waiting
            if task.cancelling() - is_ours > before:
                raise
            raise (InterruptedWaitError if is_ours else OperationCancelledError) from None
        finally:
            if task in self._waiting:
                del self._waiting[task]
            else:
                task.uncancel()

    def interrupt(self) -> None:
        """Ends all present and future waits."""
        self.is_set = True
        waiting, self._waiting = self._waiting, {}
        for task in waiting:
            task.cancel()
