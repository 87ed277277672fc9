"""The event loop of one incarnation of one simulated node. The scheduler drives it.

    running --pause(reason)--> paused --resume(reason), no reason left--> running      (events wait in the backlog)
    running or paused --die()--> dead                                                  (events are dropped, for ever)

- `time()` is the node's monotonic clock: it starts anywhere and runs at its own rate.
- Tasks and futures hash by a sequence number: a set of them (`TaskGroup`, `asyncio.wait`) has the same order in every
  run, whatever the addresses are.
- A dead node's tasks are kept, not closed, so that no `finally` of a dead node runs; `bury` closes them at the end of
  the run, when they have no effect.
- A task whose error nobody retrieves, or a callback that raises, fails the run.

There is no executor, socket, signal or subprocess: using one raises.
"""

import asyncio
import math
from asyncio import events as asyncio_events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, NoReturn, TypeVar

from tidelog.world.simulated.scheduler import NS_PER_SECOND, MachineDied, NodeLoop, Scheduler, SimHandle

T = TypeVar("T")

SWEEP_TASKS_MIN = 512
# A `finally` that awaits is closed repeatedly; one that never ends is left to the collector.
CLOSE_ATTEMPTS_MAX = 16


class SimFuture(asyncio.Future[Any]):
    """A future that hashes by its sequence number."""

    __slots__ = ("sequence",)  # no dictionary for each of them
    sequence: int

    def __hash__(self) -> int:
        return self.sequence

    def __eq__(self, other: object) -> bool:
        return self is other


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its sequence number, which is set first: the base registers itself in a set."""

    __slots__ = ("sequence",)
    sequence: int

    def __init__(
        self,
        coroutine: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        loop: "SimLoop",
        name: str,
        context: Context | None,
        sequence: int,
    ) -> None:
        self.sequence = sequence
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.sequence

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(NodeLoop):
    """See the module's docstring."""

    def __init__(self, scheduler: Scheduler, name: str, *, start_s: float = 0.0, rate: float = 1.0) -> None:
        assert rate > 0, "a clock runs forward"
        self.scheduler = scheduler
        self.name = name
        self.number = len(scheduler.loops)
        self.is_held = False
        self.is_dead = False
        self.backlog: deque[SimHandle] = deque()
        self.on_event: Callable[[], object] | None = None
        self._pauses: set[str] = set()
        self._tasks: list[SimTask] = []
        self._sweep_at = SWEEP_TASKS_MIN
        self._ready = scheduler.ready
        self._base_ns = scheduler.now_ns
        self._base_s = start_s
        self._rate = rate
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        scheduler.loops.append(self)

    # -- time

    def time(self) -> float:
        return self._base_s + (self.scheduler.now_ns - self._base_ns) * self._rate / NS_PER_SECOND

    def true_ns(self, when: float) -> int:
        """Returns the true time at which this node's clock shows `when`: in the future if `when` is, else now."""
        now_ns = self.scheduler.now_ns
        due_ns = self._base_ns + math.ceil((when - self._base_s) * NS_PER_SECOND / self._rate)
        if due_ns > now_ns:
            return due_ns
        # Rounding must not turn a wait of a fraction of a nanosecond into no wait: that would never end.
        return now_ns + 1 if when > self.time() else now_ns

    def set_rate(self, rate: float) -> None:
        """Changes the rate of the node's clock; its timers follow."""
        assert rate > 0, "a clock runs forward"
        self._base_s, self._base_ns = self.time(), self.scheduler.now_ns
        self._rate = rate
        self.scheduler.retime(self)

    # -- callbacks

    def watch(self, check: Callable[[], object]) -> None:
        """Adds what is called after each event of this loop; see `on_event`."""
        first = self.on_event
        if first is None:
            self.on_event = check
            return

        def both() -> None:
            first()
            check()

        self.on_event = both

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        if context is None:
            context = copy_context()
        handle = SimHandle(self, callback, args, context, 0.0, False)
        if not self.is_dead:
            self._ready.append(handle)
        return handle

    # Only the one thread of the run calls it.
    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self._schedule(self.time() + delay, callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self._schedule(when, callback, args, context)

    def _schedule(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> SimHandle:
        if context is None:
            context = copy_context()
        handle = SimHandle(self, callback, args, context, when, True)
        if not self.is_dead:
            self.scheduler.add_timer(self.true_ns(when), handle)
        return handle

    # -- futures and tasks

    def create_future(self) -> SimFuture:
        scheduler = self.scheduler
        future = SimFuture(loop=self)
        future.sequence = scheduler.object_sequence = scheduler.object_sequence + 1
        return future

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> SimTask:
        scheduler = self.scheduler
        sequence = scheduler.object_sequence = scheduler.object_sequence + 1
        if name is None:
            name = f"{self.name}-{sequence}"
        task = SimTask(coro, loop=self, name=name, context=context, sequence=sequence)
        self._tasks.append(task)
        if len(self._tasks) >= self._sweep_at:
            self._sweep()
        return task

    def _sweep(self) -> None:
        """Drops tasks that ended well or whose error was retrieved; the rest may be pending, or a failure."""
        self._tasks = [task for task in self._tasks if not task.done() or _is_error_untaken(task)]
        self._sweep_at = max(SWEEP_TASKS_MIN, 2 * len(self._tasks))

    def report_untaken_errors(self) -> None:
        """At the end of a run: a task whose error nobody retrieved is a failure."""
        self._sweep()
        if self.is_dead:
            return
        for task in self._tasks:
            if task.done() and _is_error_untaken(task):
                self.scheduler.fail(
                    self.name, f"nobody retrieved the error of task {task.get_name()}", task.exception()
                )

    def get_task_factory(self) -> None:
        return None

    # -- errors

    def callback_failed(self, callback: Callable[..., object], error: BaseException) -> None:
        if isinstance(error, MachineDied) and self.is_dead:
            return
        self.call_exception_handler({"message": f"callback {callback!r} raised", "exception": error})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.is_dead or self.scheduler.closed:
            return
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.scheduler.fail(self.name, str(context.get("message")), context.get("exception"))

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._exception_handler

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._exception_handler = handler

    # -- life and death

    def pause(self, reason: str = "stopped") -> None:
        """Like SIGSTOP: nothing of this node runs until every reason to pause is gone. The rest of the simulation
        continues."""
        if not self.is_dead:
            self._pauses.add(reason)
            self.is_held = True

    def resume(self, reason: str = "stopped") -> None:
        self._pauses.discard(reason)
        if self.is_held and not self._pauses and not self.is_dead:
            self.is_held = False
            self._ready.extend(self.backlog)
            self.backlog.clear()

    def die(self) -> None:
        """Like kill -9. The caller has killed the node's disk, store and transport handles before."""
        self.is_dead = True
        self.is_held = True
        self.backlog.clear()

    def bury(self) -> None:
        """Closes the tasks of a dead node. The caller disables warnings."""
        assert self.is_dead, "only a dead loop is buried"
        asyncio_events._set_running_loop(self)
        try:
            # A `finally` may create more tasks; they are closed, too.
            while self._tasks:
                task = self._tasks.pop()
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if task.done():
                    _is_error_untaken(task, take=True)
                    continue
                coroutine = task.get_coro()
                for _ in range(CLOSE_ATTEMPTS_MAX):
                    with suppress(BaseException):
                        coroutine.close()
                        break
        finally:
            asyncio_events._set_running_loop(None)

    # -- what a loop must answer

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        assert not enabled, "debug mode reads real clocks"

    def is_running(self) -> bool:
        return asyncio_events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self.is_dead

    def close(self) -> None:
        raise NotImplementedError("a node ends by die()")

    def run_forever(self) -> NoReturn:
        raise NotImplementedError("the scheduler runs the loops")

    def run_until_complete(self, future: Any) -> NoReturn:
        raise NotImplementedError("the scheduler runs the loops")

    def stop(self) -> None:
        self.scheduler.stop()

    async def shutdown_asyncgens(self) -> None:
        return None

    async def shutdown_default_executor(self) -> None:
        return None

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> NoReturn:
        raise NotImplementedError("no threads in a simulation: use world.Work or world.Disk")

    def __repr__(self) -> str:
        return f"<SimLoop {self.name} #{self.number}>"


def _is_error_untaken(task: SimTask, *, take: bool = False) -> bool:
    untaken: bool = task._log_traceback
    if untaken and take:
        task._log_traceback = False
    return untaken


def make_loop(scheduler: Scheduler, name: str, *, start_s: float = 0.0, rate: float = 1.0) -> SimLoop:
    """The only place that creates a `SimLoop`: the base class declares abstract what a simulated node must not have."""
    return SimLoop(scheduler, name, start_s=start_s, rate=rate)  # type: ignore[abstract]
