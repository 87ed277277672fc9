"""Mutes a connection while quotas throttle its client.

A muted connection is not read: its client's next requests stay with the client. A request that is arriving is read to
its end, and requests that have arrived are served: so a muted connection holds no memory for long. The response that
reports the throttle (`throttle_time_ms`) is sent at once, as Kafka does: clients wait on their own, or in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Mute:
    """Of one connection. Calls `changed` when the connection is to be read, or not read, from now on."""

    __slots__ = ("_changed", "_loop", "_timer", "is_on")

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self.is_on = False

    def begin(self, response: Any, throttle_ms: int) -> None:
        """Mute the connection for this long from now on, unless it is muted for longer. The response reports it."""
        if hasattr(response, "throttle_time_ms"):
            response.throttle_time_ms = throttle_ms
        end_s = self._loop.time() + throttle_ms / 1000
        if self._timer is None or self._timer.when() < end_s:
            self.end()
            self._timer, self.is_on = self._loop.call_at(end_s, self._time_is_up), True
            self._changed()

    def _time_is_up(self) -> None:
        self.end()
        self._changed()

    def end(self) -> None:
        """Does not call `changed`. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.is_on = None, False
