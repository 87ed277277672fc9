"""Keeps the core of one client on the IO thread: starts it with the first call, closes it once.

    state      calls                            becomes
    idle       start the core                   running
    running    run on the core                  closed, by `close`; forked or idle in a child process
    closed     raise the client's closed error
    forked     raise ForkedError                (clients that a child process cannot use: `survives_fork`)

The threaded API calls `run`, the asyncio API `run_async`, with the same arguments:

    def end_offsets(self, partitions, timeout=None):
        return self._host.run(lambda core: core.end_offsets(partitions), timeout=timeout)

A client that was not closed is closed when the interpreter ends. One that is dropped without `close` is closed on the
IO thread, with a ResourceWarning; so a core must not refer to its host or its client.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from tidelog.client import io_thread
from tidelog.client.errors import ClientClosedError, ForkedError, as_timeout
from tidelog.model.errors import CallTimeoutError, TidelogError


class Core(Protocol):
    """The asyncio half of a client."""

    async def close(self, timeout: float | None = None) -> None:
        """Finish open work for up to `timeout` seconds, then end. Runs to its end although its caller is cancelled."""
        ...


C = TypeVar("C", bound=Core)
T = TypeVar("T")
Call = Callable[[C], Coroutine[Any, Any, T]]


class CoreHost(Generic[C]):
    """Implements `io_thread.Owner`. `new_core` runs on the IO loop; `name` is the client's in errors."""

    def __init__(
        self,
        new_core: Callable[[io_thread.IoThread], C],
        *,
        name: str,
        closed_error: Callable[[str], TidelogError],
        survives_fork: Callable[[C | None], bool] = lambda _: True,
        on_fork: Callable[[], None] | None = None,
        at_exit: Callable[[float], None] | None = None,
        acquire: Callable[[io_thread.Owner], Any] = io_thread.acquire,
    ) -> None:
        """`on_fork` runs in a child process before the next call. `at_exit` replaces `close` at the interpreter's end;
        it gets the seconds that are left."""
        self._new_core = new_core
        self._name = name
        self._closed_error = closed_error
        self._survives_fork = survives_fork
        self._on_fork = on_fork
        self._at_exit = at_exit
        self._acquire = acquire
        self._lock = threading.Lock()
        self.io: Any = None
        """The IO thread while the client is running."""
        self.core: C | None = None
        self.is_closed = False
        self._has_ended = threading.Event()
        self.warns_unclosed = True
        self._is_forked = False

    # Calls.

    def run(self, call: Call[C, T], *, timeout: float | None = None) -> T:
        """The result of the core's coroutine, for a plain thread."""
        io = self.start()
        try:
            result: T = io.run(self._call(io, call), timeout=timeout)
        except ClientClosedError:
            self.check_open()
            raise
        except CallTimeoutError as error:
            raise as_timeout(error) from error.__cause__
        return result

    async def run_async(self, call: Call[C, T], *, timeout: float | None = None) -> T:
        """The same for a coroutine on any loop."""
        io = self.start()
        try:
            result: T = await io.run_async(self._call(io, call), timeout=timeout)
        except ClientClosedError:
            self.check_open()
            raise
        except CallTimeoutError as error:
            raise as_timeout(error) from error.__cause__
        return result

    def start(self) -> Any:
        """The IO thread, which runs from now on."""
        with self._lock:
            self.check_open()
            if self.io is None:
                self.io = self._acquire(self)
            return self.io

    async def _call(self, io: Any, call: Call[C, T]) -> T:
        if self.core is None:
            self.check_open()
            self.core = self._new_core(io)
        return await call(self.core)

    def check_open(self) -> None:
        if self._is_forked:
            raise ForkedError(f"this {self._name} belongs to the parent process: create another one")
        if self.is_closed:
            raise self._closed_error(f"this {self._name} is closed")

    # The end.

    def close(self, timeout: float | None = None, *, call: Call[C, None] | None = None) -> None:
        """Close the core, by `call` instead of its `close(timeout)` if there is one, and release the IO thread. Further
        calls wait for the first one; one in a callback does not, as the first one waits for callbacks."""
        io = self._end()
        if io is not None:
            try:
                io.run(self._close_core(timeout, call))
            finally:
                self.io = None
                self._has_ended.set()
                io.release(self)
        elif (io := self.io) is not None and not io.is_client_thread:
            self._has_ended.wait(timeout)

    async def close_async(self, timeout: float | None = None) -> None:
        io = self._end()
        if io is not None:
            try:
                await io.run_async(self._close_core(timeout))
            finally:
                self.io = None
                io.release(self, is_awaited=False)

    def _end(self) -> Any:
        with self._lock:
            io = None if self.is_closed else self.io
            self.is_closed = True
            return io

    async def _close_core(self, timeout: float | None, call: Call[C, None] | None = None) -> None:
        if self.core is not None:
            await (self.core.close(timeout) if call is None else call(self.core))

    def __del__(self) -> None:
        if isinstance(self.io, io_thread.IoThread) and not self.is_closed:
            self.io.close_dropped(self.core)  # first: the warning may be an error
            if self.warns_unclosed:
                warnings.warn(f"unclosed {self._name}", ResourceWarning, source=self, stacklevel=2)

    # The process.

    def at_exit(self, deadline_s: float) -> None:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not self.is_closed:
            (self._at_exit or self.close)(left_s)

    def forked(self) -> None:
        io_thread.keep_alive_in_child(self.io, self.core)
        self._is_forked = not self._survives_fork(self.core)
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self.io = self.core = None
        if self._on_fork is not None:
            self._on_fork()
