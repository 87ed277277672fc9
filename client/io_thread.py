"""The IO thread: one thread with one event loop, which owns all gRPC of the process. gRPC's asyncio supports one loop.

    acquire(owner) -> IoThread      starts it with the first owner; each owner releases it once, the last one ends it
    thread.run, thread.run_async    run coroutines on its loop (`bridge.py`)
    thread.run_callback(work)       runs user code on the callback thread, in order, so that it delays no heartbeat
    thread.connections(bootstrap)   gRPC connections that survive a fork of the process

An import starts nothing. When the interpreter ends, the owners finish (`at_exit`) within `EXIT_S` together.

Fork. gRPC's threads do not exist in a child, and a child of a process with open channels hangs or dies in its first
call. So before a fork every channel is closed and the loop pauses until the fork is over; requests in flight are sent
again. The child has no thread and no channels; `forked()` resets its owners, which start again when they are used. If
gRPC does not stop in `FORK_S`, `acquire` raises ForkedError in the child.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import glob
import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import uvloop

from tidelog.client.bridge import Bridge, forbid_waiting, run_logged
from tidelog.client.connections import Connections
from tidelog.client.errors import ClientClosedError, ForkedError
from tidelog.client.grpc_connections import GrpcConnections

LOGGER = logging.getLogger(__name__)

EXIT_S = 5.0
FORK_S = 2.0
CORE_S = 1.0
"""For the threads of gRPC's core to end before a fork; they stay if other code of this process uses gRPC."""
PAUSE_S = 60.0
"""The loop continues then, even if the fork has not reported its end."""
JOIN_S = 2.0
STOP_S = 0.1
"""For gRPC to stop when the thread ends; it does not if other code of this process uses gRPC."""

_CORE_NAMES = frozenset({"event_engine", "grpc_global_tim", "grpc_shutdown", "lifeguard"})

IN_PROCESS: dict[str, Callable[[], Connections]] = {}
"""Connections to clusters inside of this process, by broker address, without gRPC (`tidelog.testing`)."""


class Owner(Protocol):
    """A user of the IO thread. Both methods are called at most once, and raise nothing."""

    def at_exit(self, deadline_s: float) -> None:
        """Finish by `deadline_s` (of `time.monotonic`), as the interpreter ends. Runs on the main thread."""
        ...

    def forked(self) -> None:
        """Reset in a child process: it must neither use nor close what the parent has."""
        ...


class Closable(Protocol):
    async def close(self) -> None: ...


class IoThread(Bridge):
    """Created by `acquire`. Any thread may call its methods."""

    def __init__(self) -> None:
        super().__init__(uvloop.new_event_loop())
        self.owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self.users = 0
        self._has_grpc = False
        self._connections: weakref.WeakSet[GrpcConnections] = weakref.WeakSet()
        self._callbacks: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._callback_thread: threading.Thread | None = None
        self._callback_lock = threading.Lock()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run_loop, name="tidelog-io", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        # The main thread handles signals: one that is delivered here would not interrupt its reads, such as a prompt.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        forbid_waiting()
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            with suppress(Exception):
                self.loop.run_until_complete(self._shut_down())
            asyncio.set_event_loop(None)
            self.loop.close()
            self.end()

    async def _shut_down(self) -> None:
        for connections in list(self._connections):
            await connections.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=JOIN_S)
        if self._has_grpc:
            # Events that gRPC still has for this loop would reach the next one.
            for attempt in range(int(STOP_S * 500)):
                if not _is_grpc_running():
                    break
                await asyncio.sleep(0.002)
                if attempt == 5:
                    gc.collect()
        await self.loop.shutdown_asyncgens()

    @property
    def is_io_thread(self) -> bool:
        """Whether the caller is on the IO thread, which cannot wait for itself."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_callback_thread(self) -> bool:
        """Whether the caller is on the callback thread."""
        return self._callback_thread is not None and threading.get_ident() == self._callback_thread.ident

    @property
    def is_client_thread(self) -> bool:
        """Whether this is the IO thread or the callback thread, which cannot wait for memory or callbacks."""
        return self.is_io_thread or self.is_callback_thread

    # Connections.

    def connections(self, bootstrap: Sequence[str] = ()) -> Connections:
        """Connections for one client of the cluster at these addresses; the client closes them."""
        global _has_used_grpc
        for address in bootstrap:
            if (connect := IN_PROCESS.get(address)) is not None:
                return connect()
        self._has_grpc = _has_used_grpc = True
        made = GrpcConnections()
        self._connections.add(made)
        return made

    # Callbacks.

    def run_callback(self, work: Callable[[], None]) -> None:
        """Run user code on the callback thread, in order, or here if that thread has ended. Its errors are logged."""
        with self._callback_lock:  # not `_LOCK`: a fork holds it while it waits for this loop
            if self._callbacks is None and not self._is_ending:
                self._callbacks = queue.SimpleQueue()
                self._callback_thread = threading.Thread(
                    target=_run_callbacks, args=(self._callbacks,), name="tidelog-callbacks", daemon=True
                )
                self._callback_thread.start()
            if self._callbacks is not None and not self._is_ending:
                self._callbacks.put(work)
                return
        run_logged(work)

    # The end.

    def release(self, owner: Owner, *, is_awaited: bool = True) -> None:
        """The owner needs it no more. `is_awaited=False` does not block until the thread has ended."""
        with _LOCK:
            if owner not in self.owners:
                return  # already released
            self.owners.discard(owner)
            is_last = self._remove_user()
        if is_last:
            self._end(JOIN_S if is_awaited else 0)

    def _remove_user(self) -> bool:
        """Whether it was the last one. Under `_LOCK`."""
        global _current
        self.users -= 1
        if self.users <= 0 and _current is self:
            _current = None
        return self.users <= 0

    def close_dropped(self, core: Closable | None) -> None:
        """Close the core of an owner that was dropped without `close`, and release the thread. The garbage collector
        calls it, on any thread and inside of any call: it takes no lock and waits for nothing."""
        with suppress(ClientClosedError):
            self.start(self._close_dropped(core))

    async def _close_dropped(self, core: Closable | None) -> None:
        try:
            if core is not None:
                await core.close()
        finally:
            while not _LOCK.acquire(blocking=False):  # noqa: ASYNC110 - a fork holds it while it waits for this loop
                await asyncio.sleep(0.01)
            try:
                is_last = self._remove_user()
            finally:
                _LOCK.release()
            if is_last:
                self._end(0)

    def _end(self, join_s: float) -> None:
        with self._callback_lock:
            self._is_ending = True
            if self._callbacks is not None:
                self._callbacks.put(None)
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        if join_s > 0 and not self.is_io_thread and not self.is_callback_thread:
            self._thread.join(join_s)
            if self._callback_thread is not None:
                self._callback_thread.join(join_s)

    # Fork.

    def pause(self, is_over: threading.Event) -> bool:
        """Close all channels and stop the loop until `is_over`. False: gRPC does not stop."""
        if self.is_io_thread or not self._thread.is_alive():
            return not self._thread.is_alive()
        is_paused = threading.Event()

        async def hold_loop() -> None:
            connections_held = list(self._connections)
            for connections in connections_held:
                connections.pause()
            try:
                for connections in connections_held:
                    await connections.disconnect()
                for attempt in range(int(FORK_S * 500)):
                    if is_over.is_set():
                        return
                    if not _is_grpc_running():
                        is_paused.set()
                        is_over.wait(PAUSE_S)
                        return
                    # Waiters release a closed channel when they run; some are in reference cycles.
                    await asyncio.sleep(0.002)
                    if attempt % 10 == 4:
                        gc.collect()
            finally:
                for connections in connections_held:
                    connections.release()

        job = self.start(hold_loop())
        if is_paused.wait(FORK_S):
            return True
        job.cancel()
        return False

    def objects_of_parent(self) -> list[object]:
        """Objects that a child must never destroy: destructors would act on the parent's connections."""
        return [self, self.loop, *asyncio.all_tasks(self.loop), *self._connections]


def _is_grpc_running() -> bool:
    """Whether the polling thread of gRPC's asyncio runs; it ends with the last channel and call."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _await_core_end() -> None:
    """Wait for the threads of gRPC's core. They end after the polling thread; a child that is forked before their end
    waits in its first call for ever."""
    deadline_s = time.monotonic() + CORE_S
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline_s:
        quiet = 0 if _core_threads() else quiet + 1  # twice: a new thread has its name only after its start
        time.sleep(0.003)


def _core_threads() -> int:
    """Counts the threads of gRPC's core, by their names in Linux; elsewhere 0."""
    found = 0
    for path in glob.iglob("/proc/self/task/*/comm"):
        with suppress(OSError), open(path) as file:  # it may have ended
            found += file.read().strip() in _CORE_NAMES
    return found


def _run_callbacks(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while True:
        job = work.get()
        if job is None:
            return
        run_logged(job)


# The IO thread of this process.

_LOCK = threading.Lock()
_current: IoThread | None = None
_is_unusable = False
"""This is a child of a process whose gRPC did not stop."""
_kept_alive: list[object] = []
_fork_over: threading.Event | None = None
_fork_paused = True
_has_used_grpc = False
"""Whether gRPC ran here since the last fork, and may not have ended yet."""
_exit_hooks: set[str] = set()
"""Where `_at_exit` is registered: each place once, whatever number of IO threads the process has."""


def acquire(owner: Owner) -> IoThread:
    """The IO thread, for an owner that will release it. Raises ForkedError in a child process in which gRPC is not
    usable."""
    global _current
    with _LOCK:
        if _is_unusable:
            raise ForkedError(
                "this process was forked while its parent's gRPC could not be stopped; start it by spawn, or create "
                "clients only after the fork"
            )
        if _current is None:
            _current = IoThread()
            _register_at_exit()
        _current.users += 1
        _current.owners.add(owner)
        return _current


def _register_at_exit() -> None:
    if "atexit" not in _exit_hooks:
        _exit_hooks.add("atexit")
        atexit.register(_at_exit)
    processes = sys.modules.get("multiprocessing.util")
    if processes is not None and "multiprocessing" not in _exit_hooks:
        _exit_hooks.add("multiprocessing")
        # A child process of multiprocessing ends without atexit.
        processes.Finalize(None, _at_exit, exitpriority=1)


def keep_alive_in_child(*things: object) -> None:
    """In a child process: never destroy these, which belong to the parent."""
    _kept_alive.extend(things)


def _at_exit() -> None:
    thread = _current
    if thread is None:
        return
    deadline_s = time.monotonic() + EXIT_S
    for owner in list(thread.owners):
        try:
            owner.at_exit(deadline_s)
        except Exception:
            LOGGER.exception("at the end of the program")
    if _current is thread:
        thread._end(JOIN_S)


def _before_fork() -> None:
    global _fork_over, _fork_paused, _has_used_grpc
    _LOCK.acquire()
    _fork_over = threading.Event()
    _fork_paused = _current is None or _current.pause(_fork_over)
    if _has_used_grpc and _fork_paused:
        _await_core_end()
        _has_used_grpc = _current is not None


def _after_in_parent() -> None:
    assert _fork_over is not None, "_before_fork runs first"
    _fork_over.set()
    _LOCK.release()


def _after_in_child() -> None:
    global _LOCK, _current, _is_unusable
    _LOCK = threading.Lock()
    _exit_hooks.discard("multiprocessing")  # a child of multiprocessing clears them
    thread, _current = _current, None
    if thread is None:
        return
    _is_unusable = not _fork_paused
    _kept_alive.extend(thread.objects_of_parent())
    for owner in list(thread.owners):
        try:
            owner.forked()
        except Exception:
            LOGGER.exception("after a fork")


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
