"""Is the event loop on time? A timer that should come every 50 ms, and how late it came.

A loop that is held up makes leaders look dead. So the longest delay is measured, told in the log above a bound, and the
service manager's watchdog is fed from the loop itself: one that hangs for good is restarted.
"""

from __future__ import annotations

import asyncio
import logging

from tidelog.server.notify import ServiceManager

LOGGER = logging.getLogger(__name__)

PERIOD_S = 0.05


class LoopWatchdog:
    """`run` is its task."""

    def __init__(self, manager: ServiceManager, *, warn_ms: int) -> None:
        self._manager = manager
        self._warn_ms = warn_ms
        self._worst_s = 0.0
        self.late = 0
        """How often it was over the bound."""
        self.total_s = 0.0
        """All delays together."""

    def take_worst_s(self) -> float:
        """The longest delay since this was last asked."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        fed = 0.0
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            now = loop.time()
            self._note(now - due)
            if self._manager.watchdog_s is not None and now - fed >= self._manager.watchdog_s / 4:
                self._manager.alive()
                fed = now

    def _note(self, delay_s: float) -> None:
        self.total_s += max(0.0, delay_s)
        self._worst_s = max(self._worst_s, delay_s)
        if delay_s * 1000 >= self._warn_ms:
            self.late += 1
            LOGGER.warning("the event loop was held up for %.0f ms", delay_s * 1000)
