"""Virtual time: one queue of events for all nodes of a run, in an order that the seed decides.

State
    now_ns    the true time of the run; each node sees it through its own clock (`SimLoop`)
    ready     handles that run at `now_ns`, first in first out
    timers    a heap of (due_ns, sequence, handle); the sequence makes the order total, so handles are never compared

Transitions
    a step    takes the first ready handle. Its node is alive: the callback runs with that node's loop as the running
              loop. Paused: the handle joins the node's backlog. Dead: it is dropped.
    time      moves only when nothing is ready, to the next timer, and all timers of that instant become ready in the
              order in which they were created

Invariants
    - time never moves back; at one instant at most `INSTANT_EVENTS_MAX` events run (more is a livelock, and an error)
    - one callback runs at a time, and nothing else decides an order: no thread, no address, no hash of a string
    - two runs with the same seed and the same program have the same `digest`

Randomness comes from named streams, each with a seed derived from the run's: a component that draws more does not
change what another one draws. Checks draw from none.
"""

import asyncio
import hashlib
import heapq
import math
import random
import zlib
from asyncio import events as asyncio_events
from asyncio.futures import _set_result_unless_cancelled  # type: ignore[attr-defined]
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any

NS_PER_SECOND = 1_000_000_000
INSTANT_EVENTS_MAX = 1_000_000
TRACE_LINES_MAX = 4_000
COMPACT_CANCELLED_MIN = 256
_MASK = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005


class SimulationError(Exception):
    """The run failed: a livelock, no events left, or a failure in a task or callback of a node."""


class NodeDiedError(SimulationError):
    """The node died before it was done: often what a test expects."""


class MachineDied(BaseException):
    """Raised by every handle of a killed node. Not an `Exception`: no handler may act for a dead node."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that nothing on the node handled."""

    now_ns: int
    node: str
    message: str
    error: BaseException | None

    def __str__(self) -> str:
        return f"t={self.now_ns / NS_PER_SECOND:.6f} {self.node}: {self.message}: {self.error!r}"


class NodeLoop(asyncio.AbstractEventLoop):
    """What the scheduler needs of the event loop of a node (`SimLoop`)."""

    scheduler: "Scheduler"
    name: str
    number: int
    """Identifies the loop in the digest."""
    is_held: bool
    """Paused or dead: callbacks do not run."""
    is_dead: bool
    backlog: deque["SimHandle"]
    on_event: Callable[[], object] | None
    """Called after each callback of this loop, but for timers that only end a `sleep`."""

    def true_ns(self, when: float) -> int:
        raise NotImplementedError

    def callback_failed(self, callback: Callable[..., object], error: BaseException) -> None:
        raise NotImplementedError

    def report_untaken_errors(self) -> None:
        raise NotImplementedError

    def die(self) -> None:
        raise NotImplementedError

    def bury(self) -> None:
        raise NotImplementedError


class SimHandle(asyncio.TimerHandle):
    """A scheduled callback. Sets the slots of its base directly: there is one for every event."""

    __slots__ = ()
    _callback: Callable[..., object] | None
    _args: tuple[Any, ...] | None  # type: ignore[assignment]
    _context: Context
    _loop: NodeLoop
    _scheduled: bool

    def __init__(
        self,
        loop: NodeLoop,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context,
        when: float,
        is_timer: bool,
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = context
        self._when = when
        self._cancelled = False
        self._scheduled = is_timer

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = None
            self._args = None
            if self._scheduled:
                self._loop.scheduler.note_cancelled_timer()

    def __repr__(self) -> str:
        return f"<SimHandle {self._loop.name} when={self._when} {self._callback!r}>"


class Scheduler:
    """Drives the loops of all nodes; see the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = 0
        self.events_run = 0
        self.failures: list[Failure] = []
        self.trace_lines: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self.ready: deque[SimHandle] = deque()
        self.loops: list[NodeLoop] = []
        self.closed = False
        self.object_sequence = 0
        """The number that the newest task or future hashes by."""
        self._timers: list[tuple[int, int, SimHandle]] = []
        self._timer_sequence = 0
        self._cancelled_timers = 0
        self._event_digest = seed & _MASK
        self._trace_digest = 0
        self._stopping = False
        self._streams: dict[str, random.Random] = {}

    # -- randomness and trace

    def random(self, name: str) -> random.Random:
        """Returns the stream of this name; the same object for the whole run."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            stream = self._streams[name] = random.Random(int.from_bytes(digest[:16], "big"))
        return stream

    def trace(self, node: str, text: str) -> None:
        line = f"{self.now_ns / NS_PER_SECOND:13.6f} {node:<10} {text}"
        self.trace_lines.append(line)
        self._trace_digest = zlib.crc32(line.encode(), self._trace_digest)

    @property
    def digest(self) -> str:
        """Digest of all events and trace lines so far."""
        return f"{self._event_digest:016x}{self._trace_digest:08x}"

    # -- timers

    def add_timer(self, due_ns: int, handle: SimHandle) -> None:
        self._timer_sequence += 1
        heapq.heappush(self._timers, (due_ns, self._timer_sequence, handle))

    @property
    def next_due_ns(self) -> int | None:
        """Time of the next event; None if there is none. For callers that pace a run by a real clock."""
        if self.ready:
            return self.now_ns
        return self._timers[0][0] if self._timers else None

    def note_cancelled_timer(self) -> None:
        """Timeouts are mostly cancelled: when they are half of the heap, it is rebuilt without them."""
        self._cancelled_timers += 1
        if self._cancelled_timers > COMPACT_CANCELLED_MIN and self._cancelled_timers * 2 > len(self._timers):
            self._timers[:] = [timer for timer in self._timers if timer[2]._callback is not None]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def retime(self, loop: NodeLoop) -> None:
        """Recomputes the due times of a node's timers after a change of its clock rate."""
        self._timers[:] = [
            (loop.true_ns(handle._when) if handle._loop is loop else due_ns, sequence, handle)
            for due_ns, sequence, handle in self._timers
        ]
        heapq.heapify(self._timers)

    # -- running

    def fail(self, node: str, message: str, error: BaseException | None) -> None:
        """Records an unhandled error and stops the run."""
        self.failures.append(Failure(self.now_ns, node, message, error))
        self.trace(node, f"FAILURE {message}: {error!r}")
        self._stopping = True

    def stop(self) -> None:
        """Ends the current `run_*` after this step."""
        self._stopping = True

    def run_for(self, seconds: float) -> None:
        """Run until this much virtual time has passed."""
        limit_ns = self.now_ns + math.ceil(seconds * NS_PER_SECOND)
        self._drive(limit_ns, None)
        self.raise_failures()
        if not self._stopping:
            self.now_ns = limit_ns

    def run_until(self, condition: Callable[[], bool], *, timeout: float) -> None:
        """Run until the condition holds after a step; `SimulationError` if it does not in `timeout` virtual seconds."""
        if not condition():
            limit_ns = self.now_ns + math.ceil(timeout * NS_PER_SECOND)
            self._drive(limit_ns, condition)
            self.raise_failures()
            if not condition():
                self._raise_late("the condition does not hold", limit_ns)

    def _raise_late(self, what: str, limit_ns: int) -> None:
        why = "time is up" if self.now_ns >= limit_ns else "no events are left"
        raise SimulationError(f"{what} at t={self.now_ns / NS_PER_SECOND:.6f}: {why}")

    def raise_failures(self) -> None:
        if self.failures:
            first = self.failures[0]
            raise SimulationError("\n".join(map(str, self.failures))) from first.error

    def clear(self) -> None:
        """Drops all events at the end of a run."""
        self.ready.clear()
        self._timers.clear()

    def _drive(self, limit_ns: int, until: Callable[[], bool] | None) -> None:
        """Run events up to and at `limit_ns`; ends early when `until` holds, on `stop`, or when nothing is left."""
        assert asyncio_events._get_running_loop() is None, "a run inside of a run"
        assert not self.closed, "the run is over"
        self._stopping = False
        ready, set_running = self.ready, asyncio_events._set_running_loop
        current: NodeLoop | None = None
        digest, now_ns, count = self._event_digest, self.now_ns, 0
        before = 0  # of them, those that ran before this instant
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    callback = handle._callback
                    if callback is None:
                        continue
                    loop = handle._loop
                    if loop.is_held:
                        if not loop.is_dead:
                            loop.backlog.append(handle)
                        continue
                    if loop is not current:
                        current = loop
                        set_running(loop)
                    count += 1
                    # The task is part of the digest: two that swap places at one instant are another run.
                    task = getattr(getattr(callback, "__self__", None), "sequence", 0)
                    digest = ((digest ^ now_ns) * _MULTIPLIER + (task << 16) + loop.number) & _MASK
                    try:
                        handle._context.run(callback, *handle._args)  # type: ignore[misc]
                    except (KeyboardInterrupt, SystemExit):
                        raise
                    except BaseException as error:
                        loop.callback_failed(callback, error)
                    on_event = loop.on_event
                    if on_event is not None and callback is not _set_result_unless_cancelled:
                        on_event()
                    if self._stopping or (until is not None and until()):
                        return
                    if count - before > INSTANT_EVENTS_MAX:
                        raise SimulationError(
                            f"livelock at t={now_ns / NS_PER_SECOND:.6f} on {loop.name}: {callback!r}"
                        )
                if not self._move_time(limit_ns):
                    return
                now_ns, before = self.now_ns, count
        finally:
            asyncio_events._set_running_loop(None)
            self._event_digest = digest
            self.events_run += count

    def _move_time(self, limit_ns: int) -> bool:
        """Moves time to the next timer, or to the limit: then returns False. All timers of the instant become ready."""
        timers, ready = self._timers, self.ready
        while timers and timers[0][2]._callback is None:
            heapq.heappop(timers)
            self._cancelled_timers = max(0, self._cancelled_timers - 1)
        if not timers:
            return False
        due_ns = timers[0][0]
        if due_ns > limit_ns:
            self.now_ns = max(self.now_ns, limit_ns)
            return False
        self.now_ns = due_ns
        while timers and timers[0][0] == due_ns:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False
            ready.append(handle)
        return True
