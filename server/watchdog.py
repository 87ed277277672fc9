"""Measures the delay of the event loop with a timer every 50 ms.

A blocked loop makes a leader look dead. Delays above a limit are logged. The loop also sends the keep-alives of
systemd's watchdog, which restarts a process whose loop hangs.
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
        """Delays above the limit."""
        self.total_s = 0.0
        """Sum of all delays."""

    def take_worst_s(self) -> float:
        """Returns the longest delay since the last call."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        notified_s = 0.0
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            now = loop.time()
            self._note(now - due)
            if self._manager.watchdog_s is not None and now - notified_s >= self._manager.watchdog_s / 4:
                self._manager.alive()
                notified_s = now

    def _note(self, delay_s: float) -> None:
        self.total_s += max(0.0, delay_s)
        self._worst_s = max(self._worst_s, delay_s)
        if delay_s * 1000 >= self._warn_ms:
            self.late += 1
            LOGGER.warning("the event loop was blocked for %.0f ms", delay_s * 1000)
