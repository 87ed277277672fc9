"""How long a client may take: to send a request, to take its answers, to say anything at all. Pure.

    a request is not whole      after `read_timeout_ms`, and a second for each `BYTES_PER_SECOND_MIN` of it: too slow
    answers are not taken       nothing of them for `answer_stall_ms`: too slow
    silence                     for `connections.max.idle.ms`, with nothing to answer: idle

Nobody is late while we do not read: then it is we who take long.
"""

from __future__ import annotations

from tidelog.rpc.kafka.shared import SocketLimits
from tidelog.rpc.limits import DoorLimits

BYTES_PER_SECOND_MIN = 256 << 10


class Patience:
    """With one connection; times are those of its event loop."""

    __slots__ = ("_incomplete_s", "_limits", "_sockets", "_stall", "active_s")

    def __init__(self, limits: DoorLimits, sockets: SocketLimits, now_s: float) -> None:
        self._limits = limits
        self._sockets = sockets
        self._incomplete_s: float | None = None
        """Since when a request has begun to arrive, while we read."""
        self._stall: tuple[int, float] = (0, 0.0)
        """Bytes of answers that are not taken, and since when they are so many."""
        self.active_s = now_s
        """When something came or went last."""

    def forget(self) -> None:
        """No request is arriving, or another one begins to."""
        self._incomplete_s = None

    def expect(self, now_s: float) -> None:
        """We read, and a request is not whole."""
        if self._incomplete_s is None:
            self._incomplete_s = now_s

    def rate(self, arrived: int, now_s: float) -> float | None:
        """Bytes a second of the request that is arriving; None if it is too early to tell."""
        since_s = self._incomplete_s
        if since_s is None or (now_s - since_s) * 1000 < self._limits.slow_read_ms:
            return None
        return arrived / (now_s - since_s)

    def too_slow(self, now_s: float, *, arriving: int, written: int) -> str | None:
        """Why the client is; called from time to time. `arriving` is the size of the request that arrives, `written`
        what is not taken of the answers."""
        if written != self._stall[0] or written == 0:
            self._stall = (written, now_s)
        stall_ms = self._sockets.answer_stall_ms
        if now_s - self._stall[1] >= stall_ms / 1000:
            return f"has taken nothing of {written} bytes of answers for {stall_ms} ms"
        late_s = self._limits.read_timeout_ms / 1000 + arriving / BYTES_PER_SECOND_MIN
        if self._incomplete_s is not None and now_s - self._incomplete_s >= late_s:
            return f"has not sent the rest of a request in {late_s:.0f} s"
        return None

    def is_idle(self, now_s: float) -> bool:
        return now_s - self.active_s >= self._sockets.idle_ms / 1000
