"""Logs changes of in-sync sets: a line for each of the first changes of a burst, one line with a count for the others.

A broker that stops changes thousands of partitions at once. A line for each would delay the failover that it reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

LOGGER = logging.getLogger(__name__)

LINES_MAX = 10
WINDOW_S = 10.0

CallLater = Callable[[float, Callable[[], None]], object]


class IsrLog:
    """Belongs to one event loop. `call_later` schedules the end of a window."""

    def __init__(self, call_later: CallLater) -> None:
        self._call_later = call_later
        self._lines = 0
        self._shrunk = 0
        """Partitions of this window whose in-sync set shrank without a line of their own."""

    def changed(self, log_path: str, leader_epoch: int, before: frozenset[int], after: frozenset[int]) -> None:
        """Log a change. A lost member is a WARNING: the next failure may take the partition offline."""
        if after == before:
            return
        removed, added = before - after, after - before
        if self._lines >= LINES_MAX:
            self._shrunk += bool(removed)
            return
        if not self._lines:
            self._call_later(WINDOW_S, self._end_window)
        self._lines += 1
        what = [f"{word} {_brokers(who)}" for word, who in (("lost", removed), ("gained", added)) if who]
        LOGGER.log(
            logging.WARNING if removed else logging.INFO,
            "log=%s epoch=%d isr=%s: the in-sync set %s",
            *(log_path, leader_epoch, ",".join(map(str, sorted(after))), " and ".join(what)),
        )

    def _end_window(self) -> None:
        if self._shrunk:
            LOGGER.warning("the in-sync sets of %d more partitions became smaller in %d s", self._shrunk, WINDOW_S)
        self._lines = self._shrunk = 0


def _brokers(members: frozenset[int]) -> str:
    return f"broker {', '.join(map(str, sorted(members)))}"
