"""Wall-clock time. Deadlines use the event loop's own time; this is only for timestamps that outlive the process."""

from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        ...
