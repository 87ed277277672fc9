"""What the front doors may take in: bytes of one message, and bytes of all requests and responses at once.

`RequestMemory` is behind `queued.max.request.bytes`. The size of a message is known only when it has been read, so two
things are limited: the bytes of what has been read and is not answered, and how many are being read at once.

    a call      enters while used < bytes_max and reading < reading_max; else it waits in line, and after `wait_ms` it
                is refused (THROTTLING_QUOTA_EXCEEDED): nothing was read, nothing was done
    reading     ends with the message, and after `read_timeout_ms` in any case (REQUEST_TIMED_OUT). Who has read for
                longer than `slow_read_ms` while others wait for its place gives it up (THROTTLING_QUOTA_EXCEEDED)
    a stream    reads its next message while used < bytes_max, and waits as long as it takes: nobody knows when that
                message will come, so it holds no place meanwhile

What is not read stays with its sender, by the flow control of HTTP/2. In all that is at most `bytes_max`, and beyond it
`reading_max` messages, and one message of each stream that produces.

`ResponseMemory` counts the data of fetches until their calls have ended, however slowly their clients read. It never
waits: the fuller it is, the less a fetch may bring, down to `fetch_bytes_min`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from tidelog.model.errors import CallTimeoutError, OverloadedError, RecordTooLargeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    message_bytes_max: int = 32 << 20
    """Of one request (`socket.request.max.bytes`); a batch is limited by its topic as well."""
    request_bytes_max: int = 256 << 20
    """Of all requests that are being answered (`queued.max.request.bytes`)."""
    request_wait_ms: int = 5_000
    reading_max: int = 16
    read_timeout_ms: int = 30_000
    slow_read_ms: int = 500
    response_bytes_max: int = 256 << 20
    """Of all fetched data that clients have not taken yet."""
    fetch_bytes_max: int = 55 << 20
    """Of one response (`fetch.max.bytes`)."""
    fetch_bytes_min: int = 64 << 10
    """What a fetch may bring however full the memory is."""
    partition_fetch_bytes: int = 1 << 20
    fetch_wait_max_ms: int = 60_000
    produce_timeout_ms: int = 30_000
    produce_timeout_max_ms: int = 300_000
    produce_stream_requests_max: int = 64
    """Requests of one ProduceStream that wait for their acknowledgement."""
    partitions_max: int = 10_000
    """In one request."""
    admin_timeout_ms: int = 30_000
    admin_timeout_max_ms: int = 300_000
    calls_max: int = 20_000
    """At once, over all connections of a listener."""

    def admin_timeout(self, asked_ms: int) -> int:
        return _clamped(asked_ms, self.admin_timeout_ms, self.admin_timeout_max_ms)

    def produce_timeout(self, asked_ms: int) -> int:
        return _clamped(asked_ms, self.produce_timeout_ms, self.produce_timeout_max_ms)

    def check_message(self, size: int) -> None:
        if size > self.message_bytes_max:
            raise RecordTooLargeError(
                f"a request of {size} bytes is over this node's limit of {self.message_bytes_max} bytes for one message"
            )


def _clamped(asked: int, default: int, most: int) -> int:
    return default if asked <= 0 else min(asked, most)


class RequestMemory:
    """Used on one event loop. `enter` or `enter_stream`, read, `Held.count`, and `Held.leave` on every way out."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._line: deque[asyncio.Future[None]] = deque()
        self._readers: dict[Held, None] = {}
        """Who is reading, the longest first."""
        self._promised = 0
        """Places that were given to whoever waited, and are not taken yet."""
        self._room = asyncio.Event()
        self.used = 0
        self.refused = 0
        """How often a request waited in vain."""

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def reading(self) -> int:
        return len(self._readers) + self._promised

    @property
    def _has_room(self) -> bool:
        return self.used < self._limits.request_bytes_max

    async def enter(self) -> Held:
        """A place to read one message; raises `OverloadedError`."""
        if self._line or not self._has_room or self.reading >= self._limits.reading_max:
            await self._wait()
            self._promised -= 1
        held = Held(self)
        self._readers[held] = None
        return held

    async def enter_stream(self) -> Held:
        """Room to read the next message of a stream, however long that takes."""
        while not self._has_room:
            self._room.clear()
            await self._room.wait()
        return Held(self)

    async def _wait(self) -> None:
        """Returns with a place promised."""
        loop, limits = asyncio.get_running_loop(), self._limits
        turn: asyncio.Future[None] = loop.create_future()
        self._line.append(turn)
        deadline = loop.time() + limits.request_wait_ms / 1000
        try:
            while not turn.done():
                now = loop.time()
                if now >= deadline:
                    self.refused += 1
                    raise OverloadedError(
                        f"{self.used} bytes of requests are being worked on and {self.reading} are being read "
                        f"(queued.max.request.bytes is {limits.request_bytes_max}); "
                        f"there was no room for {limits.request_wait_ms} ms"
                    )
                await asyncio.wait([turn], timeout=min(deadline - now, limits.slow_read_ms / 1000))
                if not turn.done():
                    self._evict(loop.time())
        except BaseException:
            if turn.done():
                self._promised -= 1
                self.let_in()
            else:
                self._line.remove(turn)
            raise

    def _evict(self, now: float) -> None:
        """Somebody waits: whoever takes very long to send gives up its place."""
        oldest = next(iter(self._readers), None)
        if self._has_room and oldest is not None:
            oldest.evict(now, self._limits.slow_read_ms / 1000)

    def has_read(self, held: Held, size: int) -> None:
        self._readers.pop(held, None)
        self.used += size
        self.let_in()

    def has_left(self, held: Held) -> None:
        self._readers.pop(held, None)
        self.used -= held.size
        self.let_in()

    def let_in(self) -> None:
        while self._line and self._has_room and self.reading < self._limits.reading_max:
            self._promised += 1
            self._line.popleft().set_result(None)
        if self._has_room:
            self._room.set()


class Held:
    """The part of the memory that one request has."""

    __slots__ = ("_began", "_evicted", "_memory", "_scope", "size")

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._began = asyncio.get_running_loop().time()
        self._scope: asyncio.Timeout | None = None
        self._evicted = False
        self.size = 0

    async def read(self, reading: Awaitable[T], timeout_ms: int) -> T:
        """The message of a call; raises `OverloadedError` or `CallTimeoutError` if it does not come."""
        try:
            async with asyncio.timeout(timeout_ms / 1000) as scope:
                self._scope = scope
                return await reading
        except TimeoutError:
            if self._evicted:
                raise OverloadedError("the request came too slowly while others waited for their turn") from None
            raise CallTimeoutError(f"the request did not arrive in {timeout_ms} ms") from None
        finally:
            self._scope = None

    def evict(self, now: float, slow_s: float) -> None:
        if self._scope is not None and not self._evicted and now - self._began >= slow_s:
            self._evicted = True
            self._scope.reschedule(now)

    def count(self, size: int) -> None:
        """The message has been read."""
        self.size += size
        self._memory.has_read(self, size)

    def leave(self) -> None:
        """Idempotent."""
        self._memory.has_left(self)
        self.size = 0


class ResponseMemory:
    """Counts what was fetched and not yet taken by its clients."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self.used = 0

    def allowed(self, asked: int) -> int:
        """How many bytes a fetch may bring now."""
        limits = self._limits
        wanted = limits.fetch_bytes_max if asked <= 0 else min(asked, limits.fetch_bytes_max)
        return min(wanted, max(limits.fetch_bytes_min, limits.response_bytes_max - self.used))
