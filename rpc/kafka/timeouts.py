"""Limits the time of a client to send a request, to read responses and to be idle.

    a request is incomplete     after `read_timeout_ms`, and a second for each `BYTES_PER_SECOND_MIN` of it: too slow
    responses are not read      no byte for `response_stall_ms`: too slow
    idle                        for `connections.max.idle.ms`, without an unanswered request

No client is late while the node does not read from it.
"""

from __future__ import annotations

from tidelog.rpc.kafka.shared import SocketLimits
from tidelog.services.limits import RequestLimits

BYTES_PER_SECOND_MIN = 256 << 10


class Timeouts:
    """Of one connection; times are those of its event loop."""

    __slots__ = ("_incomplete_s", "_limits", "_sockets", "_stall", "active_s")

    def __init__(self, limits: RequestLimits, sockets: SocketLimits, now_s: float) -> None:
        self._limits = limits
        self._sockets = sockets
        self._incomplete_s: float | None = None
        """When a request began to arrive, while the node reads."""
        self._stall: tuple[int, float] = (0, 0.0)
        """Unread bytes of responses, and since when there are so many."""
        self.active_s = now_s
        """Time of the last byte in or out."""

    def forget(self) -> None:
        """Called when no request is arriving, or when another one begins."""
        self._incomplete_s = None

    def expect(self, now_s: float) -> None:
        """The node reads, and a request is incomplete."""
        if self._incomplete_s is None:
            self._incomplete_s = now_s

    def rate(self, arrived: int, now_s: float) -> float | None:
        """Bytes per second of the request that is arriving; None if it is too early to say."""
        since_s = self._incomplete_s
        if since_s is None or (now_s - since_s) * 1000 < self._limits.slow_read_ms:
            return None
        return arrived / (now_s - since_s)

    def too_slow(self, now_s: float, *, arriving: int, written: int) -> str | None:
        """Returns why the client is too slow. `arriving` is the size of the arriving request, `written` the unread
        bytes of responses."""
        if written != self._stall[0] or written == 0:
            self._stall = (written, now_s)
        stall_ms = self._sockets.response_stall_ms
        if now_s - self._stall[1] >= stall_ms / 1000:
            return f"has read nothing of {written} bytes of responses for {stall_ms} ms"
        late_s = self._limits.read_timeout_ms / 1000 + arriving / BYTES_PER_SECOND_MIN
        if self._incomplete_s is not None and now_s - self._incomplete_s >= late_s:
            return f"has not sent the rest of a request in {late_s:.0f} s"
        return None

    def is_idle(self, now_s: float) -> bool:
        return now_s - self.active_s >= self._sockets.idle_ms / 1000
