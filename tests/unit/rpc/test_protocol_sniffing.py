"""Who speaks is known by the first bytes; what stands at a wrong address is said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from support.async_tests import asyncio_test

from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.protocol_probe import ProtocolProbe, sentence
from tidelog.model.errors import UnreachableError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.http import server as http_module
from tidelog.rpc.http.server import HttpServer, Page
from tidelog.rpc.protocol_sniffing import (
    EMPTY_SETTINGS,
    KNOWN_BYTES,
    PREFACE,
    WireProtocol,
    hint_in,
    http2_response,
    of_client,
    of_server,
    wrong_protocol,
)
from tidelog.rpc.v1 import cluster_pb2
from tidelog.server.listeners import Address, Listener, ListenerKind, listener_hints
from tidelog.server.local_nodes import free_ports
from tidelog.services.context import RequestContext

CLUSTER = method_named("Cluster", "DescribeCluster")
PRODUCE = method_named("Log", "ProduceStream")
# ApiVersions (18) version 3 of a client called "rdkafka": the size, key, version, correlation id, client id.
API_VERSIONS = bytes.fromhex("0000001c 0012 0003 00000001 0007") + b"rdkafka" + bytes(11)
CLIENT_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(32)
ALERT = bytes.fromhex("15030100020246")
LISTENERS = (
    Listener("GRPC", Address("", 9292), Address("host", 9292), ListenerKind.GRPC),
    Listener("PLAINTEXT", Address("", 9092), Address("host", 9092), ListenerKind.KAFKA),
)


@pytest.mark.parametrize(
    ("data", "speech"),
    [
        (PREFACE, WireProtocol.GRPC),
        (b"GET /metrics HTTP/1.1\r\n", WireProtocol.HTTP),
        (b"OPTIONS * HTTP/1.1\r\n", WireProtocol.HTTP),
        (b"POST / HTTP/1.1\r\n", WireProtocol.HTTP),
        (CLIENT_HELLO, WireProtocol.TLS),
        (API_VERSIONS, WireProtocol.KAFKA),
        (bytes.fromhex("00000040 0003 000c"), WireProtocol.KAFKA),
        (bytes(8), WireProtocol.UNKNOWN),
        (b"SSH-2.0-OpenSSH", WireProtocol.UNKNOWN),
        (b"\xff" * 8, WireProtocol.UNKNOWN),
        (b"", WireProtocol.UNKNOWN),
    ],
)
def test_a_client_is_known_by_its_first_bytes(data: bytes, speech: WireProtocol) -> None:
    assert of_client(data) is speech
    assert of_client(data[:KNOWN_BYTES]) is speech


@pytest.mark.parametrize(
    ("data", "speech"),
    [
        (EMPTY_SETTINGS, WireProtocol.GRPC),
        (bytes.fromhex("00001e040000000000"), WireProtocol.GRPC),
        (b"HTTP/1.1 400 Bad Request\r\n", WireProtocol.HTTP),
        (ALERT, WireProtocol.TLS),
        (b"220 mail ESMTP", WireProtocol.UNKNOWN),
        (b"", WireProtocol.UNKNOWN),
    ],
)
def test_a_server_is_known_by_its_first_bytes(data: bytes, speech: WireProtocol) -> None:
    assert of_server(data) is speech


def test_no_byte_string_of_a_few_is_too_short_to_be_looked_at() -> None:
    for data in (PREFACE, CLIENT_HELLO, API_VERSIONS, b"GET / HTTP/1.1", ALERT):
        for size in range(len(data)):
            of_client(data[:size])
            of_server(data[:size])
    assert sentence(EMPTY_SETTINGS) is None, "gRPC after all"


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def standing(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that does so with every connection: its address, and a number for each of them."""
    connected: list[int] = []

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(len(connected))
        try:
            with contextlib.suppress(ConnectionError):
                await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(counted, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", connected
    finally:
        server.close()


async def answered(handler: Handler, context: ssl.SSLContext | None = None) -> str:
    """What our client says of such a server, at its second call."""
    connections = GrpcConnections()
    async with standing(handler, context) as (address, _):
        try:
            for _ in range(2):
                with pytest.raises(UnreachableError) as caught:
                    await connections.call(address, CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000)
            assert str(caught.value).startswith(address)
            return str(caught.value)
        finally:
            await connections.close()


async def hang_up(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read(100)


async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(ALERT)
    await writer.drain()


async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("handler", "words"),
    [(hang_up, "closes gRPC connections without a response"), (alert, "speaks TLS"), (greet, "speaks HTTP, not gRPC")],
)
def test_our_client_names_the_listener_it_reached(handler: Handler, words: str) -> None:
    output = asyncio.run(answered(handler))
    assert words in output
    assert "9292 is the usual gRPC port" in output


def test_a_real_tls_port_is_known(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    output = asyncio.run(answered(hang_up, context))
    # A server may send its alert or only hang up; either way the client names TLS and the port to use.
    assert "TLS" in output
    assert "9292" in output


@asyncio_test
async def test_an_address_is_looked_at_once_in_a_while() -> None:
    look = ProtocolProbe()
    async with standing(alert) as (address, connected):
        first = await look.probe(address)
        assert first is not None
        assert "speaks TLS" in first
        assert await look.probe(address) == first
        assert len(connected) == 1
    port = free_ports(1)[0]
    assert await look.probe(f"127.0.0.1:{port}") is None, "nobody is there: gRPC has said that"
    assert await look.probe("nonsense") is None


class _Http:
    """The HTTP server of a node, and what it has said and logged."""

    async def __aenter__(self) -> _Http:
        async def good(_context: RequestContext) -> Page:
            return Page("good\n")

        self.server = HttpServer(Address("127.0.0.1", free_ports(1)[0]), {"/good": good}, listener_hints(LISTENERS))
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def say(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(data)
            async with asyncio.timeout(10):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


def test_the_http_port_logs_a_client_of_another_protocol_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> dict[WireProtocol, int]:
        async with _Http() as node:
            for _ in range(3):
                assert await node.say(API_VERSIONS) == b""
                assert await node.say(CLIENT_HELLO) == b""
                reported = await node.say(PREFACE + EMPTY_SETTINGS)
                assert reported.startswith(EMPTY_SETTINGS), "in HTTP/2, which is what it speaks"
                assert b"this port is for HTTP, /metrics and /healthz: gRPC is on port 9292" in reported
            assert b"good" in await node.say(b"GET /good HTTP/1.1\r\nConnection: close\r\n\r\n")
            return node.server.other_protocols

    with caplog.at_level(logging.WARNING, logger=http_module.__name__):
        assert asyncio.run(run()) == {WireProtocol.KAFKA: 3, WireProtocol.TLS: 3, WireProtocol.GRPC: 3}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, "one of each kind, however many come"
    assert any("Kafka's protocol" in line and "belong on port 9092" in line for line in lines)
    assert any("speaks TLS" in line and "without TLS" in line for line in lines)
    assert any("speaks gRPC" in line and "gRPC is on port 9292" in line for line in lines)


def test_our_client_on_the_http_port_of_a_node_says_so() -> None:
    async def run() -> str:
        async with _Http() as node:
            connections = GrpcConnections()
            with pytest.raises(UnreachableError) as caught:
                await connections.call(
                    f"127.0.0.1:{node.server.port}", CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000
                )
            await connections.close()
            return str(caught.value)

    assert asyncio.run(run()).endswith(" is for HTTP, /metrics and /healthz: gRPC is on port 9292")


async def echo_kafka(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(http2_response(wrong_protocol("Kafka clients", "gRPC is on port 9293")))
    writer.write_eof()
    while await reader.read(1_000):
        pass


@asyncio_test
async def test_every_call_shows_what_another_listener_says_of_itself() -> None:
    connections = GrpcConnections()
    async with standing(echo_kafka) as (address, _):
        for _ in range(50):
            with pytest.raises(UnreachableError) as caught:
                await connections.call(address, CLUSTER, cluster_pb2.DescribeClusterRequest(), timeout_ms=5_000)
            assert str(caught.value) == f"{address} is for Kafka clients: gRPC is on port 9293"
        assert await ProtocolProbe().probe(address) == "is for Kafka clients: gRPC is on port 9293"
        with pytest.raises(UnreachableError, match="is for Kafka clients: gRPC is on port 9293"):
            await (await connections.open(address, PRODUCE)).receive()
        await connections.close()


def test_only_a_listeners_own_words_are_repeated() -> None:
    assert hint_in("x: this port is for Kafka clients: gRPC is on port 9292)]") == (
        "for Kafka clients: gRPC is on port 9292"
    )
    assert hint_in("this port is for \x1b[31mred") is None
    assert hint_in("this port is closed") is None
    assert len(hint_in(f"this port is for {'x' * 5_000}") or "") < 250
