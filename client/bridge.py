"""Runs coroutines of a client's core for callers elsewhere: plain threads and other event loops.

A core lives on one event loop, that of the IO thread. Each API method is a coroutine of the core; the threaded and the
asyncio API call it through the bridge and add nothing.

    bridge.run(job, timeout=1.0)               from a plain thread; blocks, Ctrl-C interrupts it
    await bridge.run_async(job, timeout=1.0)   from any event loop; on the bridge's own loop it awaits `job` directly
    await call_user(function, *arguments)      inside of such a job: runs user code (a callback) where the caller waits,
                                               on its thread or in its task, and returns the result

`timeout` is in seconds and covers the whole job; then the job is cancelled and the call raises CallTimeoutError. Ctrl-C
and the cancellation of the caller cancel the job, too. A job that fails raises its error in the caller. `end` cancels
all jobs; their callers get ClientClosedError, so that nobody waits for a loop that has stopped.

User code may call the client again: calls nest. An `Exception` that user code raises goes through the job to the
caller. Any other exception (KeyboardInterrupt, SystemExit, CancelledError) cancels the job and is raised in the caller.

`wait` and `wait_async` wait for a callback from any thread, without a job.

A wait on the IO thread itself would never end: `forbid_waiting` marks that thread, and `run` and `wait` raise there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from tidelog.client.errors import CallTimeoutError, ClientClosedError

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
Job = Coroutine[Any, Any, T]
Signal = Callable[[], object]
Register = Callable[[Signal], bool]
"""Keeps a signal to call later. False: there is nothing to wait for, and the signal is not called."""
Unregister = Callable[[Signal], object]

_threads = threading.local()


def forbid_waiting() -> None:
    """No call may block this thread from now on."""
    _threads.is_io = True


def check_may_wait() -> None:
    if getattr(_threads, "is_io", False):
        raise RuntimeError("blocking the IO thread would block the call itself: use another thread, or tidelog.aio")


class Bridge:
    """Brings jobs to `loop`. Any thread may use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._jobs: set[Future[Any]] = set()
        self._ended = threading.Event()

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def start(self, job: Job[T]) -> Future[T]:
        """Start the job; the future has its result."""
        if self._ended.is_set():
            job.close()
            raise _ended()
        try:
            future = asyncio.run_coroutine_threadsafe(job, self.loop)
        except RuntimeError as error:  # the loop is closed
            job.close()
            raise _ended() from error
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        if self._ended.is_set():
            future.cancel()
        return future

    def run(self, job: Job[T], *, timeout: float | None = None) -> T:
        """The job's result, for a plain thread."""
        try:
            check_may_wait()
        except RuntimeError:
            job.close()
            raise
        end_s = None if timeout is None else time.monotonic() + timeout
        caller = _WaitingThread()
        try:
            future = self._start_for(caller, job)
            while (user_call := caller.next_call(end_s)) is not None:
                user_call.run()
        except _OutOfTimeError:
            raise _timed_out(timeout) from None
        finally:
            caller.leave(self.loop)
        return _result(future)

    async def run_async(self, job: Job[T], *, timeout: float | None = None) -> T:
        """The job's result, for a coroutine on any loop."""
        end = asyncio.timeout(timeout)
        try:
            async with end:
                if asyncio.get_running_loop() is not self.loop:
                    return await self._run_elsewhere(job)
                token = _caller.set(None)
                try:
                    return await job
                finally:
                    _caller.reset(token)
        except TimeoutError:
            if not end.expired():
                raise
            raise _timed_out(timeout) from None

    async def _run_elsewhere(self, job: Job[T]) -> T:
        caller = _WaitingTask()
        try:
            future = self._start_for(caller, job)
            while (user_call := await caller.calls.get()) is not None:
                await user_call.run_async()
        finally:
            caller.leave(self.loop)
        return _result(future)

    def _start_for(self, caller: _Caller, job: Job[T]) -> Future[T]:
        token = _caller.set(caller)  # the job's task copies this context
        try:
            future = self.start(_run_for(caller, job))
        except ClientClosedError:
            job.close()
            raise
        finally:
            _caller.reset(token)
        future.add_done_callback(lambda _: caller.put(None))
        return future

    def end(self) -> None:
        """Cancel all jobs, and those that start later. Call it when the loop does not run any more."""
        self._ended.set()  # first: a job that is not in the set now sees it in `start`
        for future in list(self._jobs):
            future.cancel()


async def _run_for(caller: _Caller, job: Job[T]) -> T:
    caller.task = asyncio.current_task()
    if caller.is_gone:  # Ctrl-C came before the job
        job.close()
        raise asyncio.CancelledError
    return await job


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise _ended() from None


def _ended() -> ClientClosedError:
    return ClientClosedError("the client was closed, or has failed, during the call")


def _timed_out(timeout: float | None) -> CallTimeoutError:
    return CallTimeoutError(f"not done in {timeout} s")


# User code.


class _UserCall:
    """A call of user code. `result` belongs to the loop of the job."""

    __slots__ = ("_call", "_loop", "_result")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self._result: asyncio.Future[Any] = loop.create_future()

    @property
    def result(self) -> Awaitable[Any]:
        return self._result

    def run(self) -> None:
        try:
            value = self._call()
        except Exception as error:
            self._finish(None, error)
        else:
            self._finish(value, None)

    async def run_async(self) -> None:
        try:
            value = self._call()
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            self._finish(None, error)
        else:
            self._finish(value, None)

    def _finish(self, value: Any, error: Exception | None) -> None:
        def set_result() -> None:
            if self._result.done():
                return  # the job was cancelled
            if error is not None:
                self._result.set_exception(error)
            else:
                self._result.set_result(value)

        self._loop.call_soon_threadsafe(set_result)


class _Caller:
    """Waits for a job."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        """The job's, once it has started."""
        self.is_gone = False

    def put(self, call: _UserCall | None) -> None:
        """User code to run; None: the job is done."""
        raise NotImplementedError

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop waiting; a job that still runs is cancelled. Not by its future: Ctrl-C may come before there is one."""
        self.is_gone = True
        if self.task is None or not self.task.done():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _OutOfTimeError(Exception):
    """The caller's timeout is over."""


class _WaitingThread(_Caller):
    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[_UserCall | None] = queue.SimpleQueue()

    def put(self, call: _UserCall | None) -> None:
        self._calls.put(call)

    def next_call(self, end_s: float | None) -> _UserCall | None:
        try:
            return self._calls.get(timeout=None if end_s is None else max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            raise _OutOfTimeError from None


class _WaitingTask(_Caller):
    def __init__(self) -> None:
        super().__init__()
        self.calls: asyncio.Queue[_UserCall | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, call: _UserCall | None) -> None:
        with suppress(RuntimeError):  # its loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self.calls.put_nowait, call)


_caller: ContextVar[_Caller | None] = ContextVar("_caller", default=None)


async def call_user(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run user code where the caller of this job waits. An awaitable that it returns is awaited there, if the caller is
    on an event loop. Tasks that outlive the job cannot use it."""
    caller = _caller.get()
    if caller is None:  # the caller is on this loop
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value
    if caller.is_gone:
        raise RuntimeError("the call that this job belongs to has ended")
    call = _UserCall(lambda: function(*arguments), asyncio.get_running_loop())
    caller.put(call)
    return await call.result


def run_logged(callback: Callable[..., object], *arguments: Any) -> None:
    """Run a callback whose errors concern no caller; sys.exit in one must not skip the others."""
    try:
        callback(*arguments)
    except BaseException:
        LOGGER.exception("a callback failed: %r", callback)


# Signals.


def wait(register: Register, unregister: Unregister, timeout: float | None) -> bool:
    """Block until the signal is called. False after `timeout` seconds."""
    check_may_wait()
    event = threading.Event()
    if not register(event.set):
        return True
    try:
        return event.wait(timeout)
    finally:
        if not event.is_set():
            unregister(event.set)


async def wait_async(register: Register, unregister: Unregister) -> None:
    """Wait until the signal is called, from any thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def signal() -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    if not register(signal):
        return
    try:
        await done
    finally:
        if done.cancelled() or not done.done():
            unregister(signal)
