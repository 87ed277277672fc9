"""Log lines that strangers can cause: one of each kind in a while, with how many there were."""

from __future__ import annotations

import asyncio
import logging

EVERY_S = 10.0
LENGTH_MAX = 1_000
"""Of a line."""


class Seldom:
    """Used on one event loop. Kinds are few and fixed."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told_s: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        """How often each kind has been told or passed over."""

    def warn(self, kind: str, message: str, *values: object) -> None:
        self.counts[kind] = count = self.counts.get(kind, 0) + 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._told_s.get(kind, -EVERY_S) >= EVERY_S:
            self._told_s[kind] = now_s
            # What strangers call things stays within its line.
            text = "".join(one if one.isprintable() else "?" for one in (message % values)[:LENGTH_MAX])
            self._logger.warning("%s (%d so far)", text, count)
