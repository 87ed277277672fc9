"""Runs a simulated world in real time on its own thread.

    starting    as fast as possible: virtual seconds of elections and handshakes take milliseconds
    paced       virtual time follows real time; the thread catches up after a delay by at most `CATCH_UP_MS`: a debugger
                or a suspended laptop is no outage of the cluster
    hurrying    as while starting, for waits in which no client is connected
    ended       by `close`, or by an unhandled failure in the world

Only this thread touches the world. Other threads pass work to it: `post`, or `do`, which waits for the result.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from tidelog.model.errors import UnreachableError
from tidelog.world.simulated import SimulationError, SimWorld

T = TypeVar("T")

CATCH_UP_MS = 50
IDLE_S = 1.0
START_TIMEOUT_S = 120.0
"""Of virtual time, in seconds."""
DO_TIMEOUT_S = 60.0
POSTED_MAX = 100_000


class WorldThread:
    """Call `start`, use it, then call `close`."""

    def __init__(self, world: SimWorld, *, on_end: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self._world = world
        self._on_end = on_end
        self._process = os.getpid()
        self._posted: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._awaited: set[Future[Any]] = set()
        self._hurry: tuple[Callable[[], bool], float, Future[None]] | None = None
        self._is_ending = False
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, begin: Callable[[], None], is_ready: Callable[[], bool]) -> None:
        """Run `begin` in the world, with time as fast as possible until `is_ready`. Raises errors of the world."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(begin, is_ready, started), name="tidelog-memory", daemon=True
        )
        self._thread.start()
        started.result()

    def post(self, work: Callable[[], None]) -> None:
        """Run the work in the world, in order; from any thread. Raises UnreachableError if the world has ended or
        belongs to another process."""
        if os.getpid() != self._process:
            raise UnreachableError("this cluster in memory belongs to the process that this one was forked from")
        with self._changed:
            if self._is_over or self._is_ending:
                raise UnreachableError("this cluster in memory was closed", is_refused=True)
            if len(self._posted) >= POSTED_MAX:
                raise UnreachableError(f"{POSTED_MAX:,} calls wait for this cluster in memory already")
            self._posted.append(work)
            self._changed.notify()

    def do(self, work: Callable[[], T]) -> T:
        """Like `post`, and return the result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        return self._result(run, done)

    def _result(self, work: Callable[[], None], done: Future[T]) -> T:
        """Wait for the result of posted work; the end of the world sets it too."""
        self._awaited.add(done)
        try:
            self.post(work)
            return done.result(DO_TIMEOUT_S)
        finally:
            self._awaited.discard(done)

    def hurry(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Run time as fast as possible until the condition holds; SimulationError after `timeout_s` of virtual time.
        Posted work waits meanwhile."""
        done: Future[None] = Future()

        def begin() -> None:
            self._hurry = (condition, timeout_s, done)

        self._result(begin, done)

    def close(self) -> None:
        """Idempotent."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(DO_TIMEOUT_S)

    # On the thread.

    def _live(self, begin: Callable[[], None], is_ready: Callable[[], bool], started: Future[None]) -> None:
        try:
            self._world.loop.call_soon(begin)
            self._world.run_until(is_ready, timeout=START_TIMEOUT_S)
        except BaseException as error:
            self._end()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._follow_the_clock()
        except Exception as error:
            self.failure = error
        finally:
            self._end()

    def _follow_the_clock(self) -> None:
        scheduler = self._world.scheduler
        last_ns = time.monotonic_ns()
        while True:
            with self._changed:
                if not self._posted and not self._is_ending:
                    due_ns = scheduler.next_due_ns
                    passed_ns = time.monotonic_ns() - last_ns
                    wait_s = IDLE_S if due_ns is None else (due_ns - scheduler.now_ns - passed_ns) / 1e9
                    if wait_s > 0:
                        self._changed.wait(min(wait_s, IDLE_S))
                if self._is_ending:
                    return
                while self._posted:
                    self._world.loop.call_soon(self._posted.popleft())
            now_ns = time.monotonic_ns()
            step_ns = min(now_ns - last_ns, CATCH_UP_MS * 1_000_000)
            last_ns = now_ns
            scheduler.run_for(step_ns / 1e9)
            if self._hurry is not None:
                (condition, timeout_s, done), self._hurry = self._hurry, None
                self._run_ahead(condition, timeout_s, done)
                last_ns = time.monotonic_ns()

    def _run_ahead(self, condition: Callable[[], bool], timeout_s: float, done: Future[None]) -> None:
        try:
            self._world.run_until(condition, timeout=timeout_s)
        except SimulationError as error:
            done.set_exception(error)
            self._world.scheduler.raise_failures()
        else:
            done.set_result(None)

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._posted.clear()
        for done in list(self._awaited):
            if not done.done():
                done.set_exception(UnreachableError(f"the cluster in memory has ended: {self.failure or 'closed'}"))
        self._on_end()
        with _unheard():
            self._world.close()


@contextmanager
def _unheard() -> Iterator[None]:
    """Suppress log messages of coroutines that are closed with a dead node."""
    here = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != here

    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("tidelog.")]
    for logger in loggers:
        logger.addFilter(is_heard)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_heard)
