"""Byte connections of the simulated network, as a server's protocol sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from tidelog.model.errors import StreamBrokenError, StreamClosedError, UnreachableError
from tidelog.model.ids import NodeId
from tidelog.rpc.kafka.listener import Listener
from tidelog.world.simulated import SimNode, SimWorld
from tidelog.world.simulated.byte_streams import HIGH_BYTES, StreamAcceptor, send_in_pieces, service_of
from tidelog.world.simulated.network import SimNetwork, SimTransport
from tidelog.world.simulated.streams import SimStream

CLIENT, SERVER = NodeId(300), NodeId(2)
PORT = 9094


class Echo(asyncio.BufferedProtocol):
    """Returns what it gets, unless `keeps`; notes what happens to it."""

    def __init__(self) -> None:
        self.space = bytearray(7)
        self.received = b""
        self.events: list[str] = []
        self.error: Exception | None = None
        self.keeps = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.events.append("made")

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.events.append("lost")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.space

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self.space[:nbytes]
        if not self.keeps:
            self.transport.write(bytes(self.space[:nbytes]))

    def eof_received(self) -> bool:
        self.events.append("eof")
        return False

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


class Served:
    """A client, and a server with an `Echo` for each connection."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.network = SimNetwork(world)
        self.network.silent_death_probability = 0.0
        self.echoes: list[Echo] = []
        self.client, self.server = world.machine("client").boot(), world.machine("server").boot()
        self.transport = self.network.join(self.client, CLIENT)
        self.acceptor = self._serve(self.network.join(self.server, SERVER))

    def _serve(self, transport: SimTransport) -> StreamAcceptor:
        def connect() -> Echo:
            self.echoes.append(Echo())
            return self.echoes[-1]

        async def listen(_: SimNode) -> int:
            return await acceptor.listen(Listener(name="KAFKA", host="", port=PORT), connect)

        acceptor = StreamAcceptor(transport, self.world.random("pieces"))
        assert self.world.run(self.server, listen) == PORT
        return acceptor

    def open(self) -> SimStream:
        stream = self.world.run(self.client, lambda _: self.transport.open_stream(SERVER, service_of(PORT)))
        self.world.run_until(lambda: bool(self.echoes) and "made" in self.echoes[-1].events, timeout=5)
        return stream

    def send(self, stream: SimStream, data: bytes) -> None:
        self.world.run(self.client, lambda _: send_in_pieces(stream, data, self.world.random("client")))

    def read(self, stream: SimStream, size: int) -> bytes:
        async def read(_: SimNode) -> bytes:
            data = b""
            while len(data) < size:
                data += await stream.receive()
            return data

        return self.world.run(self.client, read, timeout=30)

    def until_lost(self) -> None:
        self.world.run_until(lambda: "lost" in self.echoes[-1].events, timeout=30)


@pytest.fixture
def served() -> Iterator[Served]:
    with SimWorld(5) as world:
        yield Served(world)


def test_bytes_arrive_in_order_however_they_are_split(served: Served) -> None:
    data = bytes(range(256)) * 40
    stream = served.open()
    served.send(stream, data)
    assert served.read(stream, len(data)) == data
    assert served.echoes[0].received == data
    assert served.network.messages > 2, "one write travels in several pieces"
    assert served.echoes[0].transport.get_extra_info("peername") == ("10.0.1.44", 30_001)


def test_a_client_that_closes_ends_its_connection_in_order(served: Served) -> None:
    stream = served.open()
    stream.close()
    served.until_lost()
    assert served.echoes[0].events == ["made", "eof", "lost"]
    assert served.echoes[0].error is None


def test_a_server_that_closes_delivers_what_it_has_written(served: Served) -> None:
    stream = served.open()
    transport = served.echoes[0].transport
    transport.write(b"last words")
    transport.close()
    transport.write(b"too late")
    assert served.read(stream, 10) == b"last words"
    with pytest.raises(StreamClosedError):
        served.read(stream, 1)
    assert served.echoes[0].error is None


def test_an_aborted_connection_breaks_for_its_client(served: Served) -> None:
    stream = served.open()
    served.echoes[0].transport.abort()
    with pytest.raises(StreamBrokenError):
        served.read(stream, 1)
    assert served.echoes[0].events == ["made", "lost"]


@pytest.mark.parametrize("side", ["cut", "kill the client"])
def test_a_cut_or_the_death_of_the_client_loses_the_connection(served: Served, side: str) -> None:
    served.open()
    if side == "cut":
        served.network.cut_streams(CLIENT, SERVER)
    else:
        served.world.machine("client").kill()
    served.until_lost()
    assert isinstance(served.echoes[0].error, StreamBrokenError)


def test_the_death_of_the_server_breaks_the_stream_of_the_client(served: Served) -> None:
    stream = served.open()
    served.world.machine("server").kill()
    with pytest.raises(StreamBrokenError):
        served.read(stream, 1)
    assert served.echoes[0].events == ["made"], "a dead process hears nothing"


def test_a_reader_that_pauses_stops_its_peer(served: Served) -> None:
    served.network.window_bytes = 1_000
    stream = served.open()
    echo = served.echoes[0]
    echo.keeps = True
    echo.transport.pause_reading()
    assert not echo.transport.is_reading()
    sending = served.client.spawn(send_in_pieces(stream, bytes(500_000), served.world.random("client")))
    served.world.run_for(2.0)
    assert not sending.done()
    assert not echo.received
    echo.transport.resume_reading()
    served.world.run_until(sending.done, timeout=30)
    served.world.run_until(lambda: len(echo.received) == 500_000, timeout=30)


def test_a_client_that_reads_nothing_pauses_the_writer(served: Served) -> None:
    served.network.window_bytes = 1_000
    stream = served.open()
    echo = served.echoes[0]
    echo.transport.write(bytes(3 * HIGH_BYTES))
    served.world.run_for(1.0)
    assert echo.events == ["made", "pause"]
    assert echo.transport.get_write_buffer_size() > HIGH_BYTES
    assert len(served.read(stream, 3 * HIGH_BYTES)) == 3 * HIGH_BYTES
    assert echo.events == ["made", "pause", "resume"]


def test_a_listener_that_is_closed_refuses_connections(served: Served) -> None:
    stream = served.open()
    served.acceptor.close()
    with pytest.raises((StreamBrokenError, UnreachableError)):
        served.read(served.world.run(served.client, lambda _: served.transport.open_stream(SERVER, "bytes/9094")), 1)
    served.send(stream, b"open ones stay")
    assert served.read(stream, 14) == b"open ones stay"
