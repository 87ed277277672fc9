"""What a nemesis can do to a simulated disk or store beside cutting the power: errors, slowness, stalls."""

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
    """The next `times` operations of this kind fail (on this path, if one is given)."""

    operation: str
    number: int
    times: int
    path: str | None


class Faults:
    """Errors that wait for their operation."""

    __slots__ = ("_armed",)

    def __init__(self) -> None:
        self._armed: list[Fault] = []

    def arm(self, operation: str, *, number: int = errno.EIO, times: int = 1, path: str | None = None) -> None:
        assert times >= 1, "a fault that happens"
        self._armed.append(Fault(operation, number, times, path))

    def clear(self) -> None:
        self._armed.clear()

    def take(self, operation: str, paths: tuple[str, ...]) -> OSError | None:
        """The error that this operation meets, if one is armed for it."""
        for fault in self._armed:
            if fault.operation == operation and (fault.path is None or fault.path in paths):
                fault.times -= 1
                if fault.times == 0:
                    self._armed.remove(fault)
                return OSError(fault.number, "simulated")
        return None


class Stall:
    """A device that answers nothing until it is healed.

    What has been handed to the device waits in line. With `everything`, a node that touches the device stands still
    as a whole, as a process does in an uninterruptible write.
    """

    __slots__ = ("_held_loops", "_line", "_reason", "is_everything", "is_stalled")

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._line: list[Callable[[], None]] = []
        self._held_loops: list[SimLoop] = []
        self.is_stalled = False
        self.is_everything = False

    def begin(self, *, everything: bool) -> None:
        self.is_stalled = True
        self.is_everything = everything

    def end(self) -> None:
        self.is_stalled = self.is_everything = False
        line, self._line = self._line, []
        loops, self._held_loops = self._held_loops, []
        for complete in line:
            complete()
        for loop in loops:
            loop.resume(self._reason)

    def touch(self, loop: SimLoop) -> None:
        """A node called the device: it stands still if everything is stalled."""
        if self.is_everything:
            loop.pause(self._reason)
            self._held_loops.append(loop)

    def wait(self, complete: Callable[[], None]) -> bool:
        """True if the completion was taken into the line; False if the device answers."""
        if self.is_stalled:
            self._line.append(complete)
        return self.is_stalled

    def drop_line(self) -> None:
        """The power is gone, and with it what waited."""
        self._line.clear()
        self._held_loops.clear()


def answer(done: SimFuture, value: object, error: StorageError | None) -> None:
    """On the node's loop: what it asked of a device has ended. The one who waited may be gone."""
    if done.done():
        return
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)
