"""The system's wall clock."""

import time


class SystemClock:
    """Implements `world.clock.Clock`."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000
