"""`Presence`: how long a consumer's user has been away. Pure: time is an argument.

    in a call of the consumer (a poll, a commit that takes long)    he is there, however long it takes
    between two calls                                               he is away; the time counts until he polls
    before the first poll                                           nothing counts

What counts is the program's own time, not the consumer's: a commit that waits for a coordinator does not use up
`max_poll_interval_ms`. Nor is it given anew by calls other than `poll`: a program that only commits does not read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Presence:
    _calls: int = 0
    """Under way: several, if tasks share a consumer, or a callback calls it."""
    _away_s: float = 0.0
    """Of the time since the last poll, what lies behind."""
    _left_s: float | None = None
    """Since when he is away, if he is."""

    def came(self, now_s: float) -> None:
        if not self._calls and self._left_s is not None:
            self._away_s += now_s - self._left_s
        self._calls += 1

    def went(self, now_s: float) -> None:
        assert self._calls > 0, "who goes has come"
        self._calls -= 1
        if self._left_s is not None:
            self._left_s = now_s

    def polled(self, now_s: float) -> None:
        """He asks for records: the time begins anew."""
        self._away_s, self._left_s = 0.0, now_s

    def away_s(self, now_s: float) -> float:
        """0 while he is there."""
        if self._calls or self._left_s is None:
            return 0.0
        return self._away_s + now_s - self._left_s
