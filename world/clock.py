"""Wall-clock time, for timestamps that outlive the process. Deadlines use the event loop's time."""

from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        ...
