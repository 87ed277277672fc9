"""`PollTimer`: how long the user has not polled. Pure: time is an argument.

    in a call of the consumer (a poll, a slow commit)    the timer stands still
    between two calls                                    the timer runs; `poll` resets it
    before the first poll                                the timer does not run

Only the user's own time counts towards `max_poll_interval_ms`: a commit that waits for a coordinator does not. Calls
other than `poll` do not reset the timer: a program that only commits does not make progress.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PollTimer:
    _calls: int = 0
    """In progress: several if tasks share a consumer, or a callback calls it."""
    _idle_s: float = 0.0
    """Between former calls since the last poll."""
    _idle_since_s: float | None = None

    def enter(self, now_s: float) -> None:
        """A call begins."""
        if not self._calls and self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
        self._calls += 1

    def leave(self, now_s: float) -> None:
        assert self._calls > 0, "`enter` comes first"
        self._calls -= 1
        if self._idle_since_s is not None:
            self._idle_since_s = now_s

    def reset(self, now_s: float) -> None:
        """The user polls."""
        self._idle_s, self._idle_since_s = 0.0, now_s

    def idle_s(self, now_s: float) -> float:
        """0 during a call."""
        if self._calls or self._idle_since_s is None:
            return 0.0
        return self._idle_s + now_s - self._idle_since_s
