"""What the front doors may take in: bytes of one message, and bytes of all requests and responses at once.

`RequestMemory` is behind `queued.max.request.bytes`. The size of a message is known only when it has been read, so two
things are limited: the bytes of what has been read and is not answered, and how many are being read at once.

    a call      enters while used < bytes_max, reading < reading_max and its connection reads fewer than
                `peer_reading_max`; else it waits in line, and after `wait_ms` it is refused
                (THROTTLING_QUOTA_EXCEEDED): nothing was read, nothing was done. Connections take turns, however many
                calls of each wait
    reading     ends with the message, and after `read_timeout_ms` in any case (REQUEST_TIMED_OUT). Who has read for
                longer than `slow_read_ms` while others wait for its place gives it up (THROTTLING_QUOTA_EXCEEDED). That
                time shrinks as more connections wait, down to `slow_read_min_ms`: the line moves on whatever they do
    a stream    reads its next message while used < bytes_max, and waits as long as it takes: nobody knows when that
                message will come, so it holds no place meanwhile
    Kafka       says the size first: it counts before it is read (`take`), while used < bytes_max; else its connection
                is not read, and hears when there is room (`on_room`), in the order in which they asked

What is not read stays with its sender, by the flow control of HTTP/2. In all that is at most `bytes_max`, and beyond it
`reading_max` messages, and one message of each stream that produces.

`ResponseMemory` counts the data of fetches from before it is read until their calls have ended, however slowly their
clients read. It never waits: the fuller it is, the less a fetch may bring, down to `fetch_bytes_min`. A batch that is
larger than that is counted when it has been read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
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
    peer_reading_max: int = 4
    """Of one connection: calls whose message does not come keep out no other."""
    read_timeout_ms: int = 30_000
    slow_read_ms: int = 500
    slow_read_min_ms: int = 50
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
    admin_items_max: int = 100
    """Topics, resources or partitions that the controller is asked to change at once, since it decides on all of them
    in one turn. A larger request is split."""
    admin_timeout_ms: int = 30_000
    admin_timeout_max_ms: int = 300_000
    calls_max: int = 20_000
    """At once, over all connections of a listener."""

    def admin_timeout(self, asked_ms: int) -> int:
        return _clamped(asked_ms, self.admin_timeout_ms, self.admin_timeout_max_ms)

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
    """Used on one event loop. `enter` or `enter_stream`, read, `Held.count`, and `Held.leave` on every way out."""

    def __init__(self, limits: DoorLimits) -> None:
        self._limits = limits
        self._line: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By connection; whose turn it is stands first."""
        self._readers: dict[Held, None] = {}
        """Who is reading, the longest first."""
        self._of_peer: dict[str, int] = {}
        """Places of each connection that has any, promised ones too."""
        self._promised = 0
        """Places that were given to whoever waited, and are not taken yet."""
        self._room = asyncio.Event()
        self._on_room: dict[Callable[[], None], None] = {}
        self.used = 0
        self.refused = 0
        """How often a request waited in vain."""

    @property
    def waiting(self) -> int:
        return sum(map(len, self._line.values())) + len(self._on_room)

    @property
    def reading(self) -> int:
        return len(self._readers) + self._promised

    @property
    def has_room(self) -> bool:
        return self.used < self._limits.request_bytes_max

    async def enter(self, peer: str = "") -> Held:
        """A place to read one message of this connection; raises `OverloadedError`."""
        # While there are places, whoever stands in line has as many as its connection may have.
        if self._may_enter and not self._is_full(peer):
            self._take_place(peer)
        else:
            await self._wait(peer)
            self._promised -= 1
        held = Held(self, peer)
        self._readers[held] = None
        return held

    @property
    def _may_enter(self) -> bool:
        return self.has_room and self.reading < self._limits.reading_max

    def _is_full(self, peer: str) -> bool:
        return self._of_peer.get(peer, 0) >= self._limits.peer_reading_max

    def _take_place(self, peer: str) -> None:
        self._of_peer[peer] = self._of_peer.get(peer, 0) + 1

    def _give_place(self, peer: str) -> None:
        left = self._of_peer[peer] - 1
        if left:
            self._of_peer[peer] = left
        else:
            del self._of_peer[peer]

    async def enter_stream(self) -> Held:
        """Room to read the next message of a stream, however long that takes."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()
        return Held(self, "")

    def take(self, size: int) -> bool:
        """Whether there is room for a message of this size, which counts from now on; `give_back` ends that."""
        if self.used >= self._limits.request_bytes_max:
            return False
        self.used += size
        return True

    def add(self, size: int) -> int:
        """Count what has been read already; returns the size."""
        self.used += size
        return size

    def give_back(self, size: int) -> None:
        self.used -= size
        if self._line or self._on_room or not self._room.is_set():
            self.let_in()

    def on_room(self, call: Callable[[], None]) -> None:
        """Called once, when there is room again."""
        self._on_room[call] = None

    def forget(self, call: Callable[[], None]) -> None:
        self._on_room.pop(call, None)

    async def _wait(self, peer: str) -> None:
        """Returns with a place promised."""
        loop, limits = asyncio.get_running_loop(), self._limits
        turn: asyncio.Future[None] = loop.create_future()
        self._line.setdefault(peer, deque()).append(turn)
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
                await asyncio.wait([turn], timeout=min(deadline - now, self._slow_s))
                if not turn.done():
                    self._evict(loop.time(), peer)
        except BaseException:
            if turn.done():
                self._promised -= 1
                self._give_place(peer)
                self.let_in()
            else:
                self._line[peer].remove(turn)
                if not self._line[peer]:
                    del self._line[peer]
            raise

    @property
    def _slow_s(self) -> float:
        """How long a message may take while others wait."""
        limits = self._limits
        return max(limits.slow_read_min_ms, limits.slow_read_ms / max(1, len(self._line))) / 1000

    def _evict(self, now: float, peer: str) -> None:
        """Somebody waits: whoever takes very long to send gives up its place; of the same connection, if that has all
        that it may have."""
        if not self.has_room:
            return
        of_peer = self._is_full(peer)
        oldest = next(
            (held for held in self._readers if not held.is_evicted and (held.peer == peer or not of_peer)), None
        )
        if oldest is not None:
            oldest.evict(now, self._slow_s)

    def _end_reading(self, held: Held) -> None:
        if held in self._readers:
            del self._readers[held]
            self._give_place(held.peer)

    def has_read(self, held: Held, size: int) -> None:
        self._end_reading(held)
        self.used += size
        self.let_in()

    def has_left(self, held: Held) -> None:
        self._end_reading(held)
        self.used -= held.size
        self.let_in()

    def let_in(self) -> None:
        while self._may_enter:
            # Few are passed over: only so many connections can have all their places.
            peer = next((peer for peer in self._line if not self._is_full(peer)), None)
            if peer is None:
                break
            turns = self._line[peer]
            turns.popleft().set_result(None)
            if turns:
                self._line.move_to_end(peer)
            else:
                del self._line[peer]
            self._promised += 1
            self._take_place(peer)
        while self._on_room and self.has_room:
            call = next(iter(self._on_room))
            del self._on_room[call]
            call()
        if self.has_room:
            self._room.set()


class Held:
    """The part of the memory that one request has."""

    __slots__ = ("_began", "_memory", "_scope", "is_evicted", "peer", "size")

    def __init__(self, memory: RequestMemory, peer: str) -> None:
        self._memory = memory
        self.peer = peer
        self._began = asyncio.get_running_loop().time()
        self._scope: asyncio.Timeout | None = None
        self.is_evicted = False
        self.size = 0

    async def read(self, reading: Awaitable[T], timeout_ms: int) -> T:
        """The message of a call; raises `OverloadedError` or `CallTimeoutError` if it does not come."""
        try:
            async with asyncio.timeout(timeout_ms / 1000) as scope:
                self._scope = scope
                return await reading
        except TimeoutError:
            if self.is_evicted:
                raise OverloadedError("the request came too slowly while others waited for their turn") from None
            raise CallTimeoutError(f"the request did not arrive in {timeout_ms} ms") from None
        finally:
            self._scope = None

    def evict(self, now: float, slow_s: float) -> None:
        if self._scope is not None and not self.is_evicted and now - self._began >= slow_s:
            self.is_evicted = True
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

    def take(self, asked: int) -> int:
        """How many of these bytes a fetch may bring now; they count until they are given back."""
        limits = self._limits
        taken = min(asked, max(limits.fetch_bytes_min, limits.response_bytes_max - self.used))
        self.used += taken
        return taken

    def give_back(self, size: int) -> None:
        """Negative for what has become more."""
        self.used -= size
