"""CPU work in production: spawned helper processes; inline execution for tools and tests.

A helper ignores Ctrl-C (its parent decides) and ends when its parent dies. An exception of the function is raised as it
is if it can be pickled both ways, else as `WorkFailedError` with its text.

When a helper dies, the pool fails all of its calls and does not tell which one the helper ran. So the pool holds at
most as many calls as it has helpers; the others wait here. Each call that the pool fails runs again in a helper of its
own: a second death is then its own fault and fails no other call (`world.work`).
"""

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TypeVar, cast

from tidelog.model.errors import WorkFailedError
from tidelog.world.work import ATTEMPTS_MAX

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")


class ProcessWork:
    """Implements `world.work.Work` with at most `processes` helpers, started when first needed."""

    def __init__(self, processes: int = 1) -> None:
        assert processes >= 1, "at least one helper process"
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._alone: set[ProcessPoolExecutor] = set()
        self._slots = asyncio.Semaphore(processes)
        self._closed = False

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        assert not self._closed, "the helper processes were closed"
        name = f"{fn.__module__}.{fn.__qualname__}"
        async with self._slots:
            for attempt in range(ATTEMPTS_MAX):
                if self._closed:
                    raise WorkFailedError(f"{name} did not run: the helper processes are closed")
                try:
                    failed, value = await self._try(fn, values, is_alone=attempt > 0)
                    break
                except BrokenProcessPool as error:
                    LOGGER.warning("a helper process died while it ran %s, or beside it: %s", name, error)
                    death = error
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise WorkFailedError(f"{name}: its arguments or its result cannot be pickled: {error}") from error
            else:
                raise WorkFailedError(f"a helper process died while it ran {name}, {ATTEMPTS_MAX} times") from death
        if failed:
            raise cast(BaseException, value)
        return cast(T, value)

    async def _try(self, fn: Callable[..., T], values: tuple[object, ...], *, is_alone: bool) -> tuple[bool, object]:
        """Raises `BrokenProcessPool` if a helper died or could not be started."""
        pool = self._take_pool(is_alone=is_alone)
        try:
            try:
                submitted = pool.submit(_call, fn, values)
            except (OSError, MemoryError) as error:
                self._drop(pool)
                raise BrokenProcessPool(f"a helper process cannot be started: {error}") from error
            return await asyncio.wrap_future(submitted)
        except BrokenProcessPool:
            self._drop(pool)
            raise
        finally:
            if is_alone:
                self._drop(pool)

    def _take_pool(self, *, is_alone: bool) -> ProcessPoolExecutor:
        if self._pool is not None and not is_alone:
            return self._pool
        pool = ProcessPoolExecutor(
            1 if is_alone else self._processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_helper,
        )
        if is_alone:
            self._alone.add(pool)
        else:
            self._pool = pool
        return pool

    def _drop(self, pool: ProcessPoolExecutor) -> None:
        """Shuts the pool down; its helpers end when they are done."""
        self._alone.discard(pool)
        if self._pool is pool:
            self._pool = None
        pool.shutdown(wait=False)

    async def close(self) -> None:
        """Waits for running calls; cancels those that have not started."""
        self._closed = True
        pools = [*self._alone] if self._pool is None else [self._pool, *self._alone]
        self._pool = None
        for pool in pools:
            ended = asyncio.get_running_loop().run_in_executor(None, partial(pool.shutdown, cancel_futures=True))
            await asyncio.shield(ended)


class InlineWork:
    """Runs the function inline; for commands that have nothing else to do meanwhile."""

    __slots__ = ()

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        return fn(*values)

    async def close(self) -> None:
        return None


def _begin_helper() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a helper has a parent"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()


def _call(fn: Callable[..., T], values: tuple[object, ...]) -> tuple[bool, object]:
    """Runs in the helper; returns (False, result) or (True, error). An error that does not unpickle would break the
    whole pool."""
    try:
        return False, fn(*values)
    except (MemoryError, OSError) as error:
        # An error of this process, not of the values: a disk error is a `StorageError`.
        return True, WorkFailedError(f"{fn.__module__}.{fn.__qualname__}: {type(error).__name__}: {error}")
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return True, WorkFailedError(f"{fn.__module__}.{fn.__qualname__}: {type(error).__name__}: {error}")
        return True, error
