"""The wall clock of a simulated machine: it can be wrong, drift, and jump. `loop.time()` is another clock."""

from tidelog.world.simulated.scheduler import Scheduler

# 2025-01-01, in every run.
START_MS = 1_735_689_600_000
NS_PER_MS = 1_000_000


class SimClock:
    """Implements `world.clock.Clock`; belongs to the machine and outlives its processes."""

    __slots__ = ("_base_ms", "_base_ns", "_rate", "_scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._base_ms = START_MS
        self._base_ns = 0
        self._rate = 1.0

    def now_ms(self) -> int:
        return self._base_ms + int((self._scheduler.now_ns - self._base_ns) * self._rate) // NS_PER_MS

    def jump(self, milliseconds: int) -> None:
        """Moves the clock forward or back, as a time server or an operator does."""
        self._base_ms += milliseconds

    def set_rate(self, rate: float) -> None:
        assert rate > 0, "a clock runs forward"
        self._base_ms, self._base_ns = self.now_ms(), self._scheduler.now_ns
        self._rate = rate
