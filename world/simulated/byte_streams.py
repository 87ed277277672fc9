"""Byte connections over streams of the simulated network: servers see them as asyncio's transports.

    client --open_stream(server, service_of(port))--> StreamTransport --buffer_updated--> protocol
    protocol --write--> buffer --pieces--> stream --receive--> client

A connection is ordered, delayed, cut with its suffix lost, silent or paused, as `network` says of its stream. Each
write travels in pieces of random sizes, so that messages arrive in parts. A paused reader takes nothing from its
stream, so that the peer's window fills. The client side uses the stream itself.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Protocol

from tidelog.model.errors import StreamBrokenError, StreamClosedError, UnreachableError
from tidelog.world.transport import Stream, Transport

PIECE_BYTES_MAX = 64 << 10
SPLIT = 0.3
"""Probability that a piece ends anywhere."""
HIGH_BYTES = 64 << 10


class HasPort(Protocol):
    @property
    def port(self) -> int: ...


def service_of(port: int) -> str:
    """The service of `Transport.open_stream` that connects to this port."""
    return f"bytes/{port}"


def piece_bytes(draw: Random, length: int) -> int:
    """Draws how much of a write of `length` bytes travels next."""
    most = min(length, PIECE_BYTES_MAX)
    return draw.randint(1, most) if draw.random() < SPLIT else most


async def send_in_pieces(stream: Stream, data: bytes, draw: Random) -> None:
    while data:
        size = piece_bytes(draw, len(data))
        piece, data = data[:size], data[size:]
        await stream.send(piece)


class StreamAcceptor:
    """Connects accepted streams to protocols. Implements `rpc.kafka.listener.Acceptor`."""

    def __init__(self, transport: Transport, draw: Random) -> None:
        self._transport = transport
        self._draw = draw
        self._is_closed = False
        self._accepted = 0

    async def listen(self, listener: HasPort, new_protocol: Callable[[], asyncio.BufferedProtocol]) -> int:
        async def handle(stream: Stream) -> None:
            if self._is_closed:
                raise UnreachableError(f"node {self._transport.me} accepts no connections", is_refused=True)
            self._accepted += 1
            address = f"10.0.{stream.peer >> 8}.{stream.peer & 255}"
            transport = StreamTransport(stream, new_protocol(), (address, 30_000 + self._accepted), self._draw)
            transport.start()
            try:
                error = await transport.ended
            finally:
                transport.abort()
            if error is not None:
                raise error

        self._transport.serve_stream(service_of(listener.port), handle)
        return listener.port

    def close(self) -> None:
        self._is_closed = True


class StreamTransport(asyncio.Transport):
    """The server's end of a connection. `start` calls `connection_made`; `ended` is done after `connection_lost`."""

    def __init__(self, stream: Stream, protocol: asyncio.BufferedProtocol, peer: tuple[str, int], draw: Random) -> None:
        super().__init__({"peername": peer})
        self._stream = stream
        self._protocol = protocol
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._high = HIGH_BYTES
        self._is_write_paused = False
        self._is_closing = False
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._may_write = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[StreamBrokenError | None] = self._loop.create_future()
        """Has the error if the connection did not end in order."""

    def start(self) -> None:
        self._protocol.connection_made(self)
        if not self.ended.done():
            self._tasks = [self._loop.create_task(self._read()), self._loop.create_task(self._write())]

    # Reading.

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                data = await self._stream.receive()
                await self._may_read.wait()  # the protocol may have paused meanwhile
                self._deliver(data)
        except StreamClosedError:
            if not self._protocol.eof_received():
                self.close()
        except StreamBrokenError as error:
            self._end(error)

    def _deliver(self, data: bytes) -> None:
        while data and not self.ended.done():
            buffer = memoryview(self._protocol.get_buffer(len(data)))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self._protocol.buffer_updated(size)

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_reading(self) -> bool:
        return self._may_read.is_set()

    # Writing.

    async def _write(self) -> None:
        try:
            while self._buffer or not self._is_closing:
                if not self._buffer:
                    self._may_write.clear()
                    await self._may_write.wait()
                    continue
                size = piece_bytes(self._draw, len(self._buffer))
                piece = bytes(self._buffer[:size])
                del self._buffer[:size]
                await self._stream.send(piece)
                if self._is_write_paused and len(self._buffer) <= self._high // 4:
                    self._is_write_paused = False
                    self._protocol.resume_writing()
        except StreamBrokenError as error:
            self._end(error)
        else:
            self._stream.close()
            self._end(None)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        self._buffer += data
        self._may_write.set()
        if len(self._buffer) > self._high and not self._is_write_paused:
            self._is_write_paused = True
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    # Closing.

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Sends what was written, then ends the connection."""
        self._is_closing = True
        self._may_write.set()

    def abort(self) -> None:
        self._is_closing = True
        self._buffer.clear()
        error = StreamBrokenError(f"the connection with node {self._stream.peer} was aborted", node=self._stream.peer)
        self._loop.call_soon(self._end, error)

    def _end(self, error: StreamBrokenError | None) -> None:
        if self.ended.done():
            return
        self._is_closing = True
        self.ended.set_result(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._protocol.connection_lost(error)
