"""Waiting for something that may never come, until it is interrupted: without a task for each wait.

    outcome = await interruption.guard(read)     raises `InterruptedWaitError` once `interrupt` was called

A task and two callbacks for each message of a stream cost as much as the message does. Here the one who waits is
cancelled, and the cancellation is taken back, as `asyncio.timeout` does it. Three cancellations are told apart:

    ours                                  InterruptedWaitError
    of the task, by anybody else          CancelledError, also if both come at once
    of what it waits for, by itself       OperationCancelledError (a gRPC call that was cancelled raises CancelledError
                                          in whoever reads from it)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class InterruptedWaitError(Exception):
    """For the one who guards; it goes no further."""


class OperationCancelledError(Exception):
    """For the one who guards; it goes no further."""


class Interruption:
    """Used on one event loop. `interrupt` is for good."""

    __slots__ = ("_waiting", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: dict[asyncio.Task[Any], None] = {}

    async def guard(self, operation: Callable[..., Awaitable[T]], *values: object) -> T:
        """The outcome of `operation(*values)`, which is not begun if it is too late."""
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
        """Whoever waits is told, and whoever begins to."""
        self.is_set = True
        waiting, self._waiting = self._waiting, {}
        for task in waiting:
            task.cancel()
