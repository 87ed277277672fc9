"""Delays the clients of calls that quotas throttle.

    a unary call           its response waits, and the trailing metadata `tidelog-throttle-ms` report for how long
    a stream of requests   the next request is not read
    a stream of responses  the next response is not made

Streams hold nothing meanwhile. Delayed responses hold at most `delayed_bytes_max` bytes together: a response over that
is sent at once, with its throttle. A delay takes at most half of the time that is left until the deadline of the call:
the client gets its response.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tidelog.rpc.interruption import InterruptedWaitError, Interruption
from tidelog.services.context import RequestContext
from tidelog.services.limits import RequestLimits

THROTTLE_KEY = "tidelog-throttle-ms"


def throttle_metadata(caller: RequestContext | None) -> tuple[tuple[str, str], ...]:
    if caller is None or caller.throttle_ms == 0:
        return ()
    return ((THROTTLE_KEY, str(caller.throttle_ms)),)


class DelayedCalls:
    """Of one server. Delays end when the node stops."""

    def __init__(self, limits: RequestLimits, stopping: Interruption) -> None:
        self.count = 0
        self.bytes = 0
        """Of responses that wait."""
        self._bytes_max = limits.delayed_bytes_max
        self._stopping = stopping

    async def respond_later(self, caller: RequestContext, size: int) -> None:
        """Wait before a response of this size is sent."""
        if self.bytes + size > self._bytes_max:
            return
        self.bytes += size
        try:
            await self._wait(caller, caller.throttle_ms / 1000)
        finally:
            self.bytes -= size

    async def hold_stream(self, caller: RequestContext) -> None:
        """Wait before the next message of a stream; what was charged for the last one is paid then."""
        throttle_ms, caller.throttle_ms = caller.throttle_ms, 0
        await self._wait(caller, throttle_ms / 1000)

    async def _wait(self, caller: RequestContext, delay_s: float) -> None:
        if caller.deadline_s is not None:
            delay_s = min(delay_s, (caller.deadline_s - asyncio.get_running_loop().time()) / 2)
        if delay_s <= 0:
            return
        self.count += 1
        try:
            with suppress(InterruptedWaitError):
                await self._stopping.guard(asyncio.sleep, delay_s)
        finally:
            self.count -= 1
