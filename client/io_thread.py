"""The IO thread: one thread with one loop, which owns all gRPC of the process. gRPC's asyncio wants no second loop.

    acquire(owner) -> IoThread      starts it at the first use; each owner releases it once, the last one ends it
    thread.run(job)                 from a plain thread: waits for a coroutine, Ctrl-C gets through
    await thread.do(job)            from a loop of the program
                                    both raise EndedError if the thread ends before the job does: nobody waits for what
                                    will not come
    thread.tell(work)               user's code (callbacks) on a thread of its own, in order: it holds up no heartbeat
    thread.connections(bootstrap)   gRPC connections that survive a fork of the process

Nothing starts at import. At the end of the interpreter owners are asked to finish (`at_exit`) for `EXIT_S` together.

Fork. gRPC's threads do not exist in a child, and a child of a process whose channels are open hangs or dies in its
first call. So before a fork every channel is closed and the loop stands still until it is done; what was in flight is
sent again by whoever sent it. The child has no thread, no channels, and its owners have heard `forked()`: they start
anew when they are used. If the loop did not come to rest in `FORK_S` the child gets `ForkedError` from `acquire`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import gc
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import uvloop

from tidelog.client.connections import Connections
from tidelog.client.errors import EndedError, ForkedError
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.waiting import check_may_wait, forbid_here
from tidelog.model.errors import CallTimeoutError

LOGGER = logging.getLogger(__name__)

EXIT_S = 5.0
FORK_S = 2.0
STANDSTILL_S = 60.0
"""No fork takes so long: the loop goes on then, whatever has become of it."""
JOIN_S = 2.0
REST_S = 0.1
"""For gRPC to come to rest when the thread ends; longer only if somebody else uses gRPC in this process."""

IN_PROCESS: dict[str, Callable[[], Connections]] = {}
"""Clusters of this process, by the addresses of their brokers: they are reached without gRPC (`tidelog.testing`)."""

T = TypeVar("T")


class Owner(Protocol):
    """Who uses the IO thread. Both are called at most once, and raise nothing."""

    def at_exit(self, deadline_s: float) -> None:
        """The interpreter ends: finish by `deadline_s` (of `time.monotonic`). On the main thread."""
        ...

    def forked(self) -> None:
        """This is a child now: nothing of the parent's may be used or closed here."""
        ...


class IoThread:
    """Made by `acquire`. Its methods may be called from any thread, unless they say otherwise."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self.users = 0
        self._jobs: set[Future[Any]] = set()
        self._is_over = self._has_grpc = False
        self._connections: weakref.WeakSet[GrpcConnections] = weakref.WeakSet()
        self._tellers: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._teller: threading.Thread | None = None
        self._teller_lock = threading.Lock()
        self._thread = threading.Thread(target=self._live, name="tidelog-io", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        forbid_here()
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            with suppress(Exception):
                self.loop.run_until_complete(self._wind_up())
            asyncio.set_event_loop(None)
            self.loop.close()
            # In this order: a job that is not among them now finds that it is over.
            self._is_over = True
            for future in list(self._jobs):
                future.cancel()

    async def _wind_up(self) -> None:
        for connections in list(self._connections):
            await connections.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=JOIN_S)
        if self._has_grpc:
            # What gRPC still has for this loop would meet the next one, and hold up what belongs there.
            for attempt in range(int(REST_S * 500)):
                if not _is_grpc_running():
                    break
                await asyncio.sleep(0.002)
                if attempt == 5:
                    gc.collect()
        await self.loop.shutdown_asyncgens()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread itself, where nobody may wait for it."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_telling(self) -> bool:
        """Whether this is the thread of the callbacks."""
        return self._teller is not None and threading.get_ident() == self._teller.ident

    # Work.

    def call_soon(self, work: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(work, *arguments)

    def start(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        """A `concurrent.futures.Future` of the coroutine, which runs on the loop."""
        try:
            future = asyncio.run_coroutine_threadsafe(job, self.loop)
        except RuntimeError as error:  # the loop is closed
            job.close()
            raise _ended() from error
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        if self._is_over:
            future.cancel()
        return future

    def run(self, job: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """The coroutine's result. Ctrl-C and the timeout cancel it; the timeout is a CallTimeoutError."""
        try:
            check_may_wait()
        except RuntimeError:
            job.close()
            raise
        future = self.start(job)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise CallTimeoutError(f"not done in {timeout_s} s") from None
        except concurrent.futures.CancelledError:
            raise _ended() from None
        except BaseException:
            future.cancel()
            raise

    async def do(self, job: Coroutine[Any, Any, T]) -> T:
        """The same for a caller on a loop, its own or this one; if the caller is cancelled, so is the job."""
        if self.is_here:
            return await job
        future = self.start(job)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not future.cancelled() or task is None or task.cancelling():
                raise
            raise _ended() from None  # nobody has cancelled who waits here

    def connections(self, bootstrap: Sequence[str] = ()) -> Connections:
        """For one client of the cluster at these addresses; it closes them when it is done."""
        for address in bootstrap:
            if (connect := IN_PROCESS.get(address)) is not None:
                return connect()
        self._has_grpc = True
        made = GrpcConnections()
        self._connections.add(made)
        return made

    # Callbacks.

    def tell(self, work: Callable[[], None]) -> None:
        """Run user's code on its thread; work of one caller keeps its order. What it raises is logged."""
        if self._tellers is None:
            with self._teller_lock:  # not the other one, which a fork holds while it waits for this loop
                if self._tellers is None:
                    self._tellers = queue.SimpleQueue()
                    self._teller = threading.Thread(
                        target=_tell_all, args=(self._tellers,), name="tidelog-callbacks", daemon=True
                    )
                    self._teller.start()
        self._tellers.put(work)

    def after_callbacks(self, work: Callable[[], None]) -> None:
        """Run it behind all that was told up to now. By way of the loop: what it is about to tell comes first, too."""

        def on_loop() -> None:
            if self._tellers is None:
                work()
            else:
                self._tellers.put(work)

        self.call_soon(on_loop)

    # The end.

    def release(self, owner: Owner, *, is_awaited: bool = True) -> None:
        """The owner is done with it. `is_awaited=False` where nobody may block: the thread ends by itself."""
        with _LOCK:
            if owner not in self.owners:
                return  # it was released before
            self.owners.discard(owner)
            self.users -= 1
            if self.users > 0:
                return
            global _current
            if _current is self:
                _current = None
        self._end(JOIN_S if is_awaited else 0)

    def _end(self, join_s: float) -> None:
        if self._tellers is not None:
            self._tellers.put(None)
        with suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        if join_s > 0 and not self.is_here and not self.is_telling:
            self._thread.join(join_s)
            if self._teller is not None:
                self._teller.join(join_s)

    # Fork.

    def rest(self, is_over: threading.Event) -> bool:
        """Close all channels and stand still until `is_over`. Whether it rests."""
        if self.is_here or not self._thread.is_alive():
            return not self._thread.is_alive()
        is_resting = threading.Event()

        async def stand_still() -> None:
            held = list(self._connections)
            for connections in held:
                connections.hold()
            try:
                for connections in held:
                    await connections.disconnect()
                for attempt in range(int(FORK_S * 500)):
                    if is_over.is_set():
                        return
                    if not _is_grpc_running():
                        is_resting.set()
                        is_over.wait(STANDSTILL_S)
                        return
                    # Those who waited on a channel hear of its end, and let go of it; some only in a cycle.
                    await asyncio.sleep(0.002)
                    if attempt % 10 == 4:
                        gc.collect()
            finally:
                for connections in held:
                    connections.let_go()

        job = self.start(stand_still())
        if is_resting.wait(FORK_S):
            return True
        job.cancel()
        return False

    def leave_behind(self) -> list[object]:
        """What a child must never destroy: it would act on what is the parent's."""
        return [self, self.loop, *asyncio.all_tasks(self.loop), *self._connections]


def _ended() -> EndedError:
    return EndedError("this client was closed, or has failed, while the call was under way")


def _is_grpc_running() -> bool:
    """Whether the thread that polls for gRPC's asyncio lives; it ends with the last channel and call."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _tell_all(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        job = work.get()
        if job is None:
            return
        try:
            job()
        except BaseException:  # sys.exit in a callback ends nothing: others wait for theirs
            LOGGER.exception("a callback failed")


# The one of this process.

_LOCK = threading.Lock()
_current: IoThread | None = None
_is_spoilt = False
"""A child of a process whose gRPC did not come to rest."""
_left_behind: list[object] = []
_fork_over: threading.Event | None = None
_fork_rested = True
_is_ending = False


def acquire(owner: Owner) -> IoThread:
    """The thread, started if need be, for an owner that will release it. Raises ForkedError in a child that a fork
    has left without a usable gRPC."""
    global _current, _is_ending
    with _LOCK:
        if _is_spoilt:
            raise ForkedError(
                "this process was forked while gRPC of its parent was busy and could not be stopped; start it by "
                "spawn, or make clients only after the fork"
            )
        if _current is None:
            _current = IoThread()
            if not _is_ending:
                atexit.register(_at_exit)
                _is_ending = True
            processes = sys.modules.get("multiprocessing.util")
            if processes is not None:
                # A child that multiprocessing has made ends without atexit.
                processes.Finalize(None, _at_exit, exitpriority=1)
        _current.users += 1
        _current.owners.add(owner)
        return _current


def leave_behind(*things: object) -> None:
    """In a child: never destroy these, which belong to the parent."""
    _left_behind.extend(things)


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
    global _fork_over, _fork_rested
    _LOCK.acquire()
    _fork_over = threading.Event()
    _fork_rested = _current is None or _current.rest(_fork_over)


def _after_in_parent() -> None:
    assert _fork_over is not None, "before comes first"
    _fork_over.set()
    _LOCK.release()


def _after_in_child() -> None:
    global _LOCK, _current, _is_spoilt
    _LOCK = threading.Lock()
    thread, _current = _current, None
    if thread is None:
        return
    _is_spoilt = not _fork_rested
    _left_behind.extend(thread.leave_behind())
    for owner in list(thread.owners):
        try:
            owner.forked()
        except Exception:
            LOGGER.exception("after a fork")


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
