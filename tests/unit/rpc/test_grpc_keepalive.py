"""Keep-alive of the public gRPC server, seen from the wire: peers that are silent are let go with what they hold, peers
that only have nothing to say are kept, and pinging is no offence unless it is a flood."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from support.async_tests import inside
from support.grpc_api.nodes import until

from tidelog.client import grpc_connections
from tidelog.rpc.grpc import server
from tidelog.rpc.grpc.dispatch import Handlers
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.grpc.server import GrpcServer, Listener
from tidelog.services.limits import RequestLimits

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, PING, GOAWAY = 1, 4, 6, 7
ACK, END_HEADERS = 1, 4
ENHANCE_YOUR_CALM = 11
KEEPALIVE_MS, TIMEOUT_MS, PING_MIN_MS = 200, 300, 40


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field of HPACK that is in no table."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


@dataclass
class Peer:
    """The other end of an HTTP/2 connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answers_pings: bool
    pings: int = 0
    acks: int = 0
    goaway: tuple[int, bytes] | None = None
    ended_s: float | None = None
    began_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    async def read(self) -> None:
        """Until the server closes."""
        try:
            while True:
                head = await self.reader.readexactly(9)
                kind, flags = head[3], head[4]
                payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
                if kind == SETTINGS and not flags & ACK:
                    self.writer.write(frame(SETTINGS, flags=ACK))
                elif kind == PING and flags & ACK:
                    self.acks += 1
                elif kind == PING:
                    self.pings += 1
                    if self.answers_pings:
                        self.writer.write(frame(PING, payload, flags=ACK))
                elif kind == GOAWAY:
                    self.goaway = int.from_bytes(payload[4:8], "big"), payload[8:]
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended_s = asyncio.get_running_loop().time() - self.began_s

    def begin_call(self, path: str) -> None:
        """A call whose request never comes."""
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"test")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        block = b"".join(literal(name, value) for name, value in fields)
        self.writer.write(frame(HEADERS, block, flags=END_HEADERS, stream=1))


@asynccontextmanager
async def connected(server: GrpcServer, *, answers_pings: bool) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports["GRPC"])
    peer = Peer(reader, writer, answers_pings)
    writer.write(PREFACE + frame(SETTINGS))
    reading = asyncio.ensure_future(peer.read())
    try:
        yield peer
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        writer.close()


class NoCluster:
    async def metadata(self, *_: object) -> None:
        raise AssertionError("the request never comes")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_MS", KEEPALIVE_MS)
    monkeypatch.setattr(server, "KEEPALIVE_TIMEOUT_MS", TIMEOUT_MS)
    monkeypatch.setattr(server, "PING_INTERVAL_MIN_MS", PING_MIN_MS)


def serve(job: Callable[[GrpcServer], Awaitable[None]]) -> None:
    async def main() -> None:
        handlers = Handlers(cluster=cast("Any", NoCluster()), admin=cast("Any", NoCluster()))
        server = GrpcServer(handlers, [Listener(name="GRPC", address="127.0.0.1:0")], RequestLimits())
        await server.start()
        try:
            await job(server)
        finally:
            await server.close(grace_s=0)

    asyncio.run(main())


@pytest.mark.parametrize("has_call", [False, True])
def test_a_peer_that_answers_no_ping_is_let_go_with_what_it_holds(has_call: bool) -> None:
    async def job(server: GrpcServer) -> None:
        async with connected(server, answers_pings=False) as peer:
            if has_call:
                peer.begin_call(method_named("Cluster", "Metadata").path)
                await until(lambda: server.memory.reading == 1)
            await until(lambda: peer.ended_s is not None)
            assert peer.pings >= 1, "it was asked first"
            assert peer.ended_s is not None
            assert peer.ended_s >= TIMEOUT_MS / 1000, "and had its time to answer"
            await until(lambda: server.memory.reading == 0)

    serve(job)


@inside(serve)
async def test_a_peer_that_answers_pings_is_kept_though_it_asks_nothing(server: GrpcServer) -> None:
    async with connected(server, answers_pings=True) as peer:
        await until(lambda: peer.pings >= 5)
        assert (peer.ended_s, peer.goaway) == (None, None)


@inside(serve)
async def test_a_peer_that_pings_is_answered_and_not_punished_unless_it_floods(server: GrpcServer) -> None:
    async with connected(server, answers_pings=True) as peer:
        for number in range(12):
            peer.writer.write(frame(PING, struct.pack(">Q", number)))
            await until(lambda wanted=number: peer.acks > wanted)  # type: ignore[misc]
            await asyncio.sleep(2 * PING_MIN_MS / 1000)
        assert (peer.ended_s, peer.goaway) == (None, None), "without a call, too"
        peer.writer.write(b"".join(frame(PING, struct.pack(">Q", number)) for number in range(100)))
        await until(lambda: peer.ended_s is not None)
        assert peer.goaway == (ENHANCE_YOUR_CALM, b"too_many_pings")


def test_our_own_client_pings_less_often_than_the_server_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    options = dict(grpc_connections._OPTIONS)
    assert options["grpc.keepalive_time_ms"] >= 2 * server.PING_INTERVAL_MIN_MS
    assert options["grpc.http2.max_pings_without_data"] == 0
