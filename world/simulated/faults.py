"""Faults that a nemesis injects into a simulated disk or store beside power loss: errors, slowness, stalls."""

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass

from tidelog.model.errors import StorageError
from tidelog.world.simulated.loop import SimFuture, SimLoop


@dataclass(frozen=True, slots=True)
class Latency:
    """Uniform between `low_s` and `high_s`, and with `spike_probability` up to `spike_s`."""

    low_s: float
    high_s: float
    spike_probability: float = 0.0
    spike_s: float = 0.0

    def draw(self, stream: random.Random) -> float:
        if self.spike_probability and stream.random() < self.spike_probability:
            return stream.uniform(self.high_s, max(self.high_s, self.spike_s))
        return stream.uniform(self.low_s, self.high_s)


@dataclass(slots=True)
class Fault:
    """The next `times` operations of this kind fail (on this path, if set)."""

    operation: str
    number: int
    times: int
    path: str | None


class Faults:
    """Armed errors, each for an operation."""

    __slots__ = ("_armed",)

    def __init__(self) -> None:
        self._armed: list[Fault] = []

    def arm(self, operation: str, *, number: int = errno.EIO, times: int = 1, path: str | None = None) -> None:
        assert times >= 1, "a fault occurs at least once"
        self._armed.append(Fault(operation, number, times, path))

    def clear(self) -> None:
        self._armed.clear()

    def take(self, operation: str, paths: tuple[str, ...]) -> OSError | None:
        """Returns the error of this operation, if one is armed for it."""
        for fault in self._armed:
            if fault.operation == operation and (fault.path is None or fault.path in paths):
                fault.times -= 1
                if fault.times == 0:
                    self._armed.remove(fault)
                return OSError(fault.number, "simulated")
        return None


class Stall:
    """A device that completes nothing until it is healed.

    Submitted operations wait. With `everything`, a node that calls the device stands still as a whole, like a process
    in an uninterruptible write.
    """

    __slots__ = ("_held_loops", "_queue", "_reason", "is_everything", "is_stalled")

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._queue: list[Callable[[], None]] = []
        self._held_loops: list[SimLoop] = []
        self.is_stalled = False
        self.is_everything = False

    def begin(self, *, everything: bool) -> None:
        self.is_stalled = True
        self.is_everything = everything

    def end(self) -> None:
        self.is_stalled = self.is_everything = False
        queue, self._queue = self._queue, []
        loops, self._held_loops = self._held_loops, []
        for complete in queue:
            complete()
        for loop in loops:
            loop.resume(self._reason)

    def touch(self, loop: SimLoop) -> None:
        """A node called the device: pauses the node if everything is stalled."""
        if self.is_everything:
            loop.pause(self._reason)
            self._held_loops.append(loop)

    def wait(self, complete: Callable[[], None]) -> bool:
        """Returns True if the completion has to wait, False if the device works."""
        if self.is_stalled:
            self._queue.append(complete)
        return self.is_stalled

    def drop_queue(self) -> None:
        """Drops the waiting operations after a power loss."""
        self._queue.clear()
        self._held_loops.clear()


def resolve(done: SimFuture, value: object, error: StorageError | None) -> None:
    """Runs on the node's loop: a device operation has ended. The waiting task may be gone."""
    if done.done():
        return
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)
