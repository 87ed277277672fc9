"""Where CPU work runs in production: spawned helper processes; a thread or the spot for tools and tests.

A helper ignores Ctrl-C (its parent decides) and ends when its parent has died, however that died. Whatever the
function raises comes back as it is if it can be pickled both ways, else as `WorkFailedError` with its text. A helper
that dies fails what was running, by name, and the next call starts new helpers.
"""

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, cast

from tidelog.model.errors import WorkFailedError

T = TypeVar("T")


class ProcessWork:
    """Implements `world.work.Work` with at most `processes` helpers, started when first needed."""

    def __init__(self, processes: int = 1) -> None:
        assert processes >= 1, "at least one helper process"
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._closed = False

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        assert not self._closed, "the helper processes were closed"
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_helper
            )
        pool = self._pool
        name = f"{fn.__module__}.{fn.__qualname__}"
        try:
            failed, value = await asyncio.wrap_future(pool.submit(_call, fn, values))
        except BrokenProcessPool as error:
            if self._pool is pool:
                self._pool = None
                pool.shutdown(wait=False)
            raise WorkFailedError(f"a helper process died while it ran {name}") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkFailedError(f"{name}: its values or its result cannot be sent: {error}") from error
        if failed:
            raise cast(BaseException, value)
        return cast(T, value)

    async def close(self) -> None:
        """Waits for what runs; what has not begun is cancelled."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            ended = asyncio.get_running_loop().run_in_executor(None, lambda: pool.shutdown(cancel_futures=True))
            await asyncio.shield(ended)


class ThreadWork:
    """The same on threads, for functions that release the GIL."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="work")

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        return await asyncio.wrap_future(self._pool.submit(fn, *values))

    async def close(self) -> None:
        self._pool.shutdown()


class InlineWork:
    """The same on the spot, for commands that have nothing else to do meanwhile."""

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
    """In the helper: (False, result) or (True, error). An error that does not unpickle would break the whole pool."""
    try:
        return False, fn(*values)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return True, WorkFailedError(f"{fn.__module__}.{fn.__qualname__}: {type(error).__name__}: {error}")
        return True, error
