"""How a caller waits for the IO thread: a plain thread on an event, a coroutine on a future of its own loop.

A wait on a thread that the answer depends on would never end; `forbid_here` marks such threads, and waiting there
raises.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

_marks = threading.local()


def forbid_here() -> None:
    """Nobody may wait on this thread from now on."""
    _marks.is_io = True


def check_may_wait() -> None:
    if getattr(_marks, "is_io", False):
        raise RuntimeError("a wait on the thread that does the work would not end: wait elsewhere, or use tidelog.aio")


class Waiter:
    """One event for one wait. Ctrl-C gets through."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        check_may_wait()
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._event.wait(timeout_s)


Register = Callable[[Callable[[], object]], bool]


async def wait_in_loop(register: Register, unregister: Callable[[Callable[[], object]], object] | None = None) -> None:
    """Until what `register` was given is called, from any thread. `register` gives False if there is nothing to wait
    for; `unregister` hears of a wait that was given up."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def call() -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            return  # that loop is closed: nobody waits any more

    if not register(call):
        return
    try:
        await done
    finally:
        if unregister is not None and (done.cancelled() or not done.done()):
            unregister(call)
