"""Streams of the simulated network: two ordered directions, which are silent, cut or closed as `network` says.

Connection        a stream as a whole; the unit of fault
SimStream         one end of it, which learns of a cut at its own time
StreamDirection   one direction: what is in flight, what is stopped, the sender's window
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tidelog.model.errors import StreamBrokenError, StreamClosedError
from tidelog.model.ids import NodeId
from tidelog.world.simulated.faults import Latency
from tidelog.world.simulated.loop import SimFuture, SimLoop
from tidelog.world.simulated.scheduler import NS_PER_SECOND, Scheduler


class StreamNetwork(Protocol):
    """What a stream needs of the network: `network.SimNetwork`."""

    scheduler: Scheduler
    random: Random
    messages: int
    on_send: Callable[[NodeId, NodeId, bytes], None] | None
    window_bytes: int
    notice_latency: Latency
    repeat_probability: float

    def is_blocked(self, source: NodeId, target: NodeId) -> bool: ...

    def delay_s(self, source: NodeId, target: NodeId) -> float: ...

    def later(self, delay_s: float, callback: Callable[..., object], *args: object) -> None: ...

    def draw(self) -> float: ...

    def draw_count(self, most: int) -> int: ...

    def forget(self, number: int) -> None: ...


class StreamTransport(Protocol):
    """What one end of a stream needs of its node: `network.SimTransport`."""

    me: NodeId
    loop: SimLoop
    is_dead: bool

    @property
    def network(self) -> StreamNetwork: ...

    def check_alive(self, action: str) -> None: ...


@dataclass(slots=True, eq=False)
class StreamDirection:
    """One direction of a stream: what is in flight, in order, and the sender's window."""

    _network: StreamNetwork
    sender: "SimStream"
    receiver: "SimStream"
    used: int = 0
    """Bytes that the receiver has not read; bounded by the window."""
    owed: int = 0
    """Bytes that it has read, of which the sender cannot learn because the reverse link is blocked."""
    # In order: what was stopped on a silent link, what is in flight, what was not sent because the link is silent.
    # None is the end of the stream.
    _stopped: deque[bytes | None] = field(default_factory=deque)
    _in_flight: deque[bytes | None] = field(default_factory=deque)
    _held: deque[bytes | None] = field(default_factory=deque)
    _due_ns: int = 0
    _waiting: deque[SimFuture] = field(default_factory=deque)

    def is_stopped(self) -> bool:
        connection = self.sender.connection
        return connection.is_silenced or self._network.is_blocked(self.sender.me, self.receiver.me)

    def push(self, data: bytes | None) -> None:
        network = self._network
        if data is not None:
            self.used += len(data)
            network.messages += 1
            if network.on_send is not None:
                network.on_send(self.sender.me, self.receiver.me, data)
        if self._held or self.is_stopped():
            self._held.append(data)
        else:
            self._send(data)

    @property
    def is_held_up(self) -> bool:
        return bool(self._stopped or self._held)

    def _send(self, data: bytes | None) -> None:
        network = self._network
        now_ns = network.scheduler.now_ns
        delay_ns = int(network.delay_s(self.sender.me, self.receiver.me) * NS_PER_SECOND)
        # Never overtakes what was sent before.
        self._due_ns = max(self._due_ns, now_ns + delay_ns)
        self._in_flight.append(data)
        network.later((self._due_ns - now_ns) / NS_PER_SECOND, self._arrive)

    def _arrive(self) -> None:
        if not self._in_flight:
            return  # lost with its stream
        data = self._in_flight.popleft()
        if self._stopped or self.is_stopped():
            self._stopped.append(data)
        else:
            self.receiver.arrived(data)

    def go_on(self) -> None:
        """Sends what was stopped again: the link works."""
        again = [*self._stopped, *self._in_flight, *self._held]
        for some in (self._stopped, self._in_flight, self._held):
            some.clear()
        for data in again:
            self._send(data)
        self.read(0)

    def lose_suffix(self) -> None:
        """Only a prefix of what is in flight arrives; nothing, if what was sent before is stopped."""
        survivors = self._network.draw_count(len(self._in_flight))
        while len(self._in_flight) > (0 if self._stopped else survivors):
            self._in_flight.pop()
        self._stopped.clear()
        self._held.clear()

    def last_arrival_s(self) -> float:
        """Seconds until the last message in flight arrives."""
        if not self._in_flight:
            return 0.0
        return max(0.0, (self._due_ns - self._network.scheduler.now_ns) / NS_PER_SECOND)

    def read(self, length: int) -> None:
        """The receiver has read bytes: the sender may continue, once it learns of it."""
        self.owed += length
        if self._network.is_blocked(self.receiver.me, self.sender.me):
            return
        self.used -= self.owed
        self.owed = 0
        if self.used < self._network.window_bytes:
            self.wake()

    async def wait_for_room(self) -> None:
        while self.used >= self._network.window_bytes and not self.sender.is_over:
            room = self.sender.transport.loop.create_future()
            self._waiting.append(room)
            await room

    def wake(self) -> None:
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)


class Connection:
    """A stream with its two ends; the first one opened it."""

    __slots__ = ("_network", "_number", "ends", "is_cut", "is_silenced")

    def __init__(self, network: StreamNetwork, number: int, opener: StreamTransport, acceptor: StreamTransport) -> None:
        self._network = network
        self._number = number
        self.is_silenced = False
        self.is_cut = False
        first, second = SimStream(self, opener, acceptor.me), SimStream(self, acceptor, opener.me)
        self.ends = (first, second)
        first.outgoing = second.incoming = StreamDirection(network, first, second)
        second.outgoing = first.incoming = StreamDirection(network, second, first)

    def lose_suffix(self) -> None:
        for end in self.ends:
            end.outgoing.lose_suffix()

    def cut(self) -> None:
        """Cuts the stream: each end gets a prefix of what is in flight, then learns that the stream is broken."""
        if self.is_cut:
            return
        self.is_cut = True
        self.lose_suffix()
        for end in self.ends:
            noticed_s = self._network.notice_latency.draw(self._network.random)
            self._network.later(max(noticed_s, end.incoming.last_arrival_s()), end.broke)

    def unblocked(self) -> None:
        if self.is_silenced or self.is_cut:
            return
        if self._network.draw() < self._network.repeat_probability:
            for end in self.ends:
                end.outgoing.go_on()
        elif any(end.outgoing.is_held_up for end in self.ends):
            self.cut()

    def forget_if_over(self) -> None:
        if self.ends[0].is_over and self.ends[1].is_over:
            self._network.forget(self._number)


@dataclass(slots=True, eq=False)
class SimStream:
    """One end of a stream. Implements `world.transport.Stream`."""

    connection: Connection
    transport: StreamTransport
    peer: NodeId
    incoming: StreamDirection = field(init=False)
    outgoing: StreamDirection = field(init=False)
    _inbox: deque[bytes] = field(default_factory=deque)
    _reader: SimFuture | None = None
    _is_broken: bool = False
    _is_closed: bool = False
    _peer_closed: bool = False
    _sinking: int = 0
    _sink: tuple[Callable[[bytes], object], Callable[[], object]] | None = None

    @property
    def me(self) -> NodeId:
        return self.transport.me

    @property
    def is_over(self) -> bool:
        return self._is_broken or self._is_closed

    async def send(self, data: bytes) -> None:
        self._check_writable()
        if self.outgoing.used >= self.transport.network.window_bytes:
            try:
                await self.outgoing.wait_for_room()
            except asyncio.CancelledError:
                self.connection.cut()
                raise
            self._check_writable()
        self.outgoing.push(data)

    def send_nowait(self, data: bytes) -> bool:
        """Like `send` for code without tasks: returns False if the window is full."""
        self._check_writable()
        if self.outgoing.used >= self.transport.network.window_bytes:
            return False
        self.outgoing.push(data)
        return True

    def _check_writable(self) -> None:
        self.transport.check_alive("send")
        if self.is_over or self._peer_closed:
            raise self._broken()

    def _broken(self) -> StreamBrokenError:
        why = "was closed here" if self._is_closed else "is broken"
        return StreamBrokenError(f"the stream with node {self.peer} {why}", node=self.peer)

    async def receive(self) -> bytes:
        self.transport.check_alive("receive")
        assert self._reader is None, "a stream has one reader at a time"
        assert self._sink is None, "a stream has one reader at a time"
        while not self._inbox or self._is_closed:
            if self.is_over:
                raise self._broken()
            if self._peer_closed:
                raise StreamClosedError(f"node {self.peer} has closed the stream", node=self.peer)
            self._reader = self.transport.loop.create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.connection.cut()
                raise
            finally:
                self._reader = None
        data = self._inbox.popleft()
        self.incoming.read(len(data))
        return data

    def drain_to(self, on_message: Callable[[bytes], object], on_end: Callable[[], object]) -> None:
        """Passes messages to a callback without a task; `on_end` is called once. Another loop may be the running one:
        callbacks name the node's loop."""
        self._sink = (on_message, on_end)
        while self._inbox:
            self._sinking += 1
            self.transport.loop.call_soon(self._sink_one, self._inbox.popleft())
        if self.is_over or self._peer_closed:
            self.transport.loop.call_soon(on_end)

    def close(self) -> None:
        if self.is_over or self.transport.is_dead:
            return
        self._is_closed = True
        if not self._peer_closed:
            self.outgoing.push(None)
        self._ended()

    # -- from the network

    def arrived(self, data: bytes | None) -> None:
        if self._is_broken:
            self.connection.cut()  # the sender learns of it now
        if self.is_over:
            return
        if data is None:
            self._peer_closed = True
            if self._sink is not None:
                self.transport.loop.call_soon(self._sink[1])
            self._wake_reader()
            self.outgoing.wake()
        elif self._sink is not None:
            # Inline where that is equivalent: no message of this stream waits, and the node runs.
            if self._sinking == 0 and not self.transport.loop.is_held:
                self.incoming.read(len(data))
                self._sink[0](data)
            else:
                self._sinking += 1
                self.transport.loop.call_soon(self._sink_one, data)
        else:
            self._inbox.append(data)
            self._wake_reader()

    def _sink_one(self, data: bytes) -> None:
        self._sinking -= 1
        if not self.is_over:
            assert self._sink is not None
            self.incoming.read(len(data))
            self._sink[0](data)

    def broke(self) -> None:
        """This end learns that the stream is broken. Received but unread messages may be lost, too."""
        if self.is_over:
            return
        self._is_broken = True
        if self._inbox and self.transport.network.draw() < 0.5:
            self._inbox.clear()
        if self._sink is not None:
            self.transport.loop.call_soon(self._sink[1])
        self._ended()

    def _ended(self) -> None:
        self._wake_reader()
        self.outgoing.wake()
        self.connection.forget_if_over()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
