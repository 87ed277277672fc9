"""Threads for blocking calls whose caller awaits the result on an event loop.

An executor of the standard library takes a dozen locks per call, some while the loop wants to run: 0.25 ms for a single
small sync, 0.12 ms here. This class has one queue, and a future of the loop for each call.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LOGGER = logging.getLogger(__name__)


class CallThreads:
    """At most `count_max` threads, started when first needed. Used on one event loop at a time.

    A call that has started runs to its end even if its caller is gone. Threads end with `close`, or with this object.
    """

    def __init__(self, count_max: int, *, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._under_way = 0

    def run(self, fn: Callable[..., T], *values: object) -> asyncio.Future[T]:
        """Returns a future for `fn(*values)`. Cancelling the future does not stop the call."""
        if self._under_way >= len(self._threads) < self._count_max:
            self._start_thread()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._under_way += 1
        self._calls.put(_Call(self, loop, result, fn, values))
        return result

    def _start_thread(self) -> None:
        # The thread references only the queue, so that this object can be collected. It is a daemon: no caller waits
        # for a sync that the end of the process interrupts.
        thread = Thread(target=_work, args=(self._calls,), name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def has_ended(self) -> None:
        self._under_way -= 1

    def close(self) -> None:
        """Waits for running calls, then ends the threads."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join()

    def __del__(self) -> None:
        for _ in self._threads:
            self._calls.put(None)


@dataclass(slots=True, eq=False)
class _Call(Generic[T]):
    _owner: CallThreads
    _loop: asyncio.AbstractEventLoop
    _result: asyncio.Future[T]
    _fn: Callable[..., T]
    _values: tuple[object, ...]

    def run(self) -> None:
        """Runs on a thread."""
        try:
            value = self._fn(*self._values)
        except BaseException as error:
            self._post(self._failed, error)
        else:
            self._post(self._done, value)

    def _post(self, how: Callable[..., None], outcome: object) -> None:
        try:
            self._loop.call_soon_threadsafe(how, outcome)
        except RuntimeError as error:  # the loop is closed, and its tasks with it
            LOGGER.debug("the result of a call is dropped: %s", error)

    def _done(self, value: T) -> None:
        self._owner.has_ended()
        if not self._result.done():
            self._result.set_result(value)

    def _failed(self, error: BaseException) -> None:
        self._owner.has_ended()
        if not self._result.done():
            self._result.set_exception(error)


def _work(calls: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # no reference while it waits for the next call
