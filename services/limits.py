"""Limits of requests: the bytes of one message, and the bytes of all requests and responses at once.

`RequestMemory` implements `queued.max.request.bytes`. gRPC shows the size of a message only when it has been read, so
two things are limited: the bytes that are read and not answered, and the messages that are being read.

    a call      enters while used < bytes_max, reading < reading_max and its connection reads fewer than
                `peer_reading_max` messages; otherwise it waits, and fails after `wait_ms`
                (THROTTLING_QUOTA_EXCEEDED): nothing was read or done. Connections take turns, however many calls wait
    reading     ends with the message, or after `read_timeout_ms` (REQUEST_TIMED_OUT). A reader that takes longer than
                `slow_read_ms` while others wait is evicted (THROTTLING_QUOTA_EXCEEDED). That time shrinks as more
                connections wait, down to `slow_read_min_ms`, so that waiting calls always proceed
    a stream    reads its next message while used < bytes_max. It may wait for long, so it holds no slot meanwhile
    Kafka       sends the size first: it counts before the message is read (`take`), while used < bytes_max; otherwise
                the connection is not read until there is memory again (`on_room`), in the order of arrival

The flow control of HTTP/2 keeps unread data with its sender. The total is at most `bytes_max`, plus `reading_max`
messages, plus one message of each produce stream.

`ResponseMemory` counts the data of fetches from before it is read until their calls end, however slowly clients read,
and all other responses from when they are encoded. It never waits: the fuller it is, the less a fetch returns, down to
`fetch_bytes_min`. A larger batch is counted when it has been read. `ResponseSize` limits one response.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tidelog.model.errors import CallTimeoutError, InvalidRequestError, OverloadedError, RecordTooLargeError

T = TypeVar("T")

RESPONSE_BYTES_MAX = 128 << 20
"""Bytes of a response that describes topics, configs or groups, or has their offsets. Kafka has no such limit, but its
clients read no larger response (`receive.message.max.bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    message_bytes_max: int = 32 << 20
    """Bytes of one request (`socket.request.max.bytes`); a batch is limited by its topic as well."""
    request_bytes_max: int = 256 << 20
    """Bytes of all requests in progress (`queued.max.request.bytes`)."""
    request_wait_ms: int = 5_000
    reading_max: int = 16
    peer_reading_max: int = 4
    """Concurrent reads of one connection: its calls without a message do not block other connections."""
    read_timeout_ms: int = 30_000
    slow_read_ms: int = 500
    slow_read_min_ms: int = 50
    response_bytes_max: int = 256 << 20
    """Bytes of all fetched data that clients have not read yet."""
    fetch_bytes_max: int = 55 << 20
    """Bytes of one response (`fetch.max.bytes`)."""
    fetch_bytes_min: int = 64 << 10
    """A fetch may return this much however full the memory is."""
    partition_fetch_bytes: int = 1 << 20
    fetch_wait_max_ms: int = 60_000
    waiting_fetches_max: int = 10_000
    """Fetches that wait for records; one more returns at once."""
    produce_timeout_ms: int = 30_000
    produce_timeout_max_ms: int = 300_000
    produce_stream_requests_max: int = 64
    """Requests of one ProduceStream that wait for their acknowledgement."""
    admin_items_max: int = 100
    """Topics or resources in one request to the controller, which decides on all of them in one turn. A larger request
    is split."""
    admin_timeout_ms: int = 30_000
    admin_timeout_max_ms: int = 300_000
    delayed_bytes_max: int = 64 << 20
    """Bytes of responses whose clients are throttled; one more is not delayed."""
    calls_max: int = 20_000
    """Concurrent calls over all connections of a listener."""

    def fetch_bytes(self, asked: int) -> int:
        return _clamped(asked, self.fetch_bytes_max, self.fetch_bytes_max)

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
    """Used on one event loop. `enter` or `enter_stream`, read, `Slot.count`, and `Slot.leave` on every way out."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._waiting_calls: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting calls by connection; the next connection is first."""
        self._readers: dict[Slot, None] = {}
        """Active readers, the oldest first."""
        self._of_peer: dict[str, int] = {}
        """Slots of each connection that has any, including promised ones."""
        self._promised = 0
        """Slots granted to waiting calls that have not resumed yet."""
        self._room = asyncio.Event()
        self._on_room: dict[Callable[[], None], None] = {}
        self.used = 0
        self.rejected = 0
        """Requests that waited and were rejected."""

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting_calls.values())) + len(self._on_room)

    @property
    def reading(self) -> int:
        return len(self._readers) + self._promised

    @property
    def has_room(self) -> bool:
        return self.used < self._limits.request_bytes_max

    async def enter(self, peer: str = "") -> Slot:
        """Get a slot to read one message of this connection; raises `OverloadedError`."""
        # While slots are free, only calls of connections at their limit wait.
        if self._may_enter and not self._is_full(peer):
            self._acquire_slot(peer)
        else:
            await self._wait(peer)
            self._promised -= 1
        held = Slot(self, peer)
        self._readers[held] = None
        return held

    @property
    def _may_enter(self) -> bool:
        return self.has_room and self.reading < self._limits.reading_max

    def _is_full(self, peer: str) -> bool:
        return self._of_peer.get(peer, 0) >= self._limits.peer_reading_max

    def _acquire_slot(self, peer: str) -> None:
        self._of_peer[peer] = self._of_peer.get(peer, 0) + 1

    def _release_slot(self, peer: str) -> None:
        left = self._of_peer[peer] - 1
        if left:
            self._of_peer[peer] = left
        else:
            del self._of_peer[peer]

    async def enter_stream(self) -> Slot:
        """Wait until the next message of a stream may be read."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()
        return Slot(self, "")

    def take(self, size: int) -> bool:
        """Count a message of this size if there is memory, until `give_back`; return whether there is."""
        if self.used >= self._limits.request_bytes_max:
            return False
        self.used += size
        return True

    def add(self, size: int) -> int:
        """Count bytes that have been read already; return the size."""
        self.used += size
        return size

    def give_back(self, size: int) -> None:
        self.used -= size
        if self._waiting_calls or self._on_room or not self._room.is_set():
            self.admit()

    def on_room(self, call: Callable[[], None]) -> None:
        """Call this once, when there is memory again."""
        self._on_room[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        self._on_room.pop(call, None)

    async def _wait(self, peer: str) -> None:
        """Return with a slot promised."""
        loop, limits = asyncio.get_running_loop(), self._limits
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting_calls.setdefault(peer, deque()).append(turn)
        deadline = loop.time() + limits.request_wait_ms / 1000
        try:
            while not turn.done():
                now = loop.time()
                if now >= deadline:
                    self.rejected += 1
                    raise OverloadedError(
                        f"{self.used} bytes of requests are being worked on and {self.reading} are being read "
                        f"(queued.max.request.bytes is {limits.request_bytes_max}); "
                        f"there was no room for {limits.request_wait_ms} ms"
                    )
                await asyncio.wait([turn], timeout=min(deadline - now, self._slow_s))
                if not turn.done():
                    self._evict(loop.time(), peer)
        except BaseException:
            if turn.done():
                self._promised -= 1
                self._release_slot(peer)
                self.admit()
            else:
                self._waiting_calls[peer].remove(turn)
                if not self._waiting_calls[peer]:
                    del self._waiting_calls[peer]
            raise

    @property
    def _slow_s(self) -> float:
        """The time that a message may take while others wait."""
        limits = self._limits
        return max(limits.slow_read_min_ms, limits.slow_read_ms / max(1, len(self._waiting_calls))) / 1000

    def _evict(self, now: float, peer: str) -> None:
        """A call waits: evict the slowest reader, of the same connection if that is at its limit."""
        if not self.has_room:
            return
        of_peer = self._is_full(peer)
        oldest = next(
            (held for held in self._readers if not held.is_evicted and (held.peer == peer or not of_peer)), None
        )
        if oldest is not None:
            oldest.evict(now, self._slow_s)

    def _end_reading(self, held: Slot) -> None:
        if held in self._readers:
            del self._readers[held]
            self._release_slot(held.peer)

    def has_read(self, held: Slot, size: int) -> None:
        self._end_reading(held)
        self.used += size
        self.admit()

    def has_left(self, held: Slot) -> None:
        self._end_reading(held)
        self.used -= held.size
        self.admit()

    def admit(self) -> None:
        while self._may_enter:
            # Few are skipped: few connections can be at their limit.
            peer = next((peer for peer in self._waiting_calls if not self._is_full(peer)), None)
            if peer is None:
                break
            turns = self._waiting_calls[peer]
            turns.popleft().set_result(None)
            if turns:
                self._waiting_calls.move_to_end(peer)
            else:
                del self._waiting_calls[peer]
            self._promised += 1
            self._acquire_slot(peer)
        while self._on_room and self.has_room:
            call = next(iter(self._on_room))
            del self._on_room[call]
            call()
        if self.has_room:
            self._room.set()


class Slot:
    """The memory of one request."""

    __slots__ = ("_began", "_memory", "_scope", "is_evicted", "peer", "size")

    def __init__(self, memory: RequestMemory, peer: str) -> None:
        self._memory = memory
        self.peer = peer
        self._began = asyncio.get_running_loop().time()
        self._scope: asyncio.Timeout | None = None
        self.is_evicted = False
        self.size = 0

    async def read(self, reading: Awaitable[T], timeout_ms: int) -> T:
        """Return the message of a call; raises `OverloadedError` or `CallTimeoutError` if it does not arrive."""
        try:
            async with asyncio.timeout(timeout_ms / 1000) as scope:
                self._scope = scope
                return await reading
        except TimeoutError:
            if self.is_evicted:
                raise OverloadedError("the request arrived too slowly while other requests waited") from None
            raise CallTimeoutError(f"the request did not arrive in {timeout_ms} ms") from None
        finally:
            self._scope = None

    def evict(self, now: float, slow_s: float) -> None:
        scope = self._scope
        if scope is None or scope.expired():
            return  # the read has ended, or is ending: such a timeout cannot be rescheduled
        if not self.is_evicted and now - self._began >= slow_s:
            self.is_evicted = True
            scope.reschedule(now)

    def count(self, size: int) -> None:
        """Count a message that has been read."""
        self.size += size
        self._memory.has_read(self, size)

    def leave(self) -> None:
        """Idempotent."""
        self._memory.has_left(self)
        self.size = 0


class ResponseSize:
    """Limits the bytes of a response. The first row always fits."""

    def __init__(self, rows: str) -> None:
        """`rows`: what the response has a row for, such as `topics`."""
        self._rows = rows
        self._bytes = 0

    def check(self) -> None:
        """Call it before each row; raises `InvalidRequestError`."""
        if self._bytes >= RESPONSE_BYTES_MAX:
            raise InvalidRequestError(f"the response would be too large: ask for fewer {self._rows} at once")

    def add(self, size: int) -> None:
        self._bytes += size


class ResponseMemory:
    """Counts responses that clients have not read yet."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.used = 0

    def take(self, asked: int) -> int:
        """Return how many of these bytes a fetch may return now; they count until `give_back`."""
        limits = self._limits
        taken = min(asked, max(limits.fetch_bytes_min, limits.response_bytes_max - self.used))
        self.used += taken
        return taken

    def give_back(self, size: int) -> None:
        """A negative size counts more."""
        self.used -= size
