"""The Kafka server with handlers of a test behind it, on a real socket, and a client that speaks bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from tidelog.rpc.kafka import dispatch
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.rpc.kafka.headers import read_response_header, request_frame
from tidelog.rpc.kafka.listener import KafkaServer, Listener
from tidelog.rpc.kafka.messages import API_VERSIONS, HEARTBEAT, PRODUCE
from tidelog.rpc.kafka.messages.data import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from tidelog.rpc.kafka.messages.groups import HeartbeatRequest, HeartbeatResponse
from tidelog.rpc.kafka.messages.versions import ApiVersionsRequest
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.rpc.kafka.shared import Counts, Shared, SocketLimits
from tidelog.rpc.kafka.sockets import Sockets
from tidelog.rpc.protocol_sniffing import WireProtocol
from tidelog.services.limits import RequestLimits, RequestMemory, ResponseMemory
from tidelog.services.services import BrokerServices

OTHER_PORTS = {
    WireProtocol.HTTP: "HTTP is on port 9392",
    WireProtocol.GRPC: "gRPC is on port 9292",
    WireProtocol.TLS: "it is plain text",
}
WAIT_S = 10.0

NO_SESSIONS = FetchSessions(Random(1), slots_max=0)


@dataclass
class RunningKafkaServer:
    server: KafkaServer
    shared: Shared
    clients: list[KafkaClient] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.ports["KAFKA"]

    @property
    def counts(self) -> Counts:
        return self.shared.counts

    async def client(self, **options: Any) -> KafkaClient:
        client = KafkaClient(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self.clients.append(client)
        return client

    def holds_nothing(self) -> bool:
        """No connection, no byte that is counted."""
        shared = self.shared
        return (len(self.server), shared.requests.used, shared.responses.used, shared.objects.used) == (0, 0, 0, 0)


@dataclass
class KafkaClient:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, api: Api[Any, Any], version: int, number: int, request: object, client_id: str | None = "t") -> None:
        self.writer.write(frame(api, version, number, request, client_id))

    async def answer(self) -> bytes:
        """The next one, without its size."""
        async with asyncio.timeout(WAIT_S):
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return await self.reader.readexactly(size)

    async def response(self, api: Api[Any, Any], version: int) -> tuple[int, Any]:
        data = await self.answer()
        number, body = read_response_header(api, version, data)
        return number, api.decode_response(version, data, body)

    async def rest(self) -> bytes:
        """All that comes until the other side closes."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


def frame(api: Api[Any, Any], version: int, number: int, request: object, client_id: str | None = "t") -> bytes:
    return b"".join(request_frame(api, version, number, client_id, api.encode_request(version, request)))


def heartbeat(number: int, *, group: str = "g") -> bytes:
    return frame(HEARTBEAT, 4, number, HeartbeatRequest(group_id=group, member_id=str(number)))


def api_versions(number: int, version: int = 3) -> bytes:
    request = ApiVersionsRequest(client_software_name="test", client_software_version="1.0")
    return frame(API_VERSIONS, version, number, request)


def produce(number: int, size: int = 10, *, acks: int = -1) -> bytes:
    partition = PartitionProduceData(index=number, records=bytes(size))
    request = ProduceRequest(acks=acks, topic_data=[TopicProduceData(name="t", partition_data=[partition])])
    return frame(PRODUCE, 9, number, request)


def number_of(request: ProduceRequest) -> int:
    return request.topic_data[0].partition_data[0].index


def nothing_produced() -> ProduceResponse:
    return ProduceResponse()


@asynccontextmanager
async def kafka_server(
    entries: Mapping[int, Entry] | None,
    *,
    services: BrokerServices | None = None,
    limits: RequestLimits | None = None,
    sockets: SocketLimits | None = None,
) -> AsyncIterator[RunningKafkaServer]:
    """`services` None: none, the entries need none."""
    limits = limits or RequestLimits()
    cache = SimpleNamespace(metadata_offset=7, image=SimpleNamespace(features={"metadata.version": 1}))
    shared = Shared(
        services=services or cast(BrokerServices, SimpleNamespace(cache=cache, limits=limits)),
        fetch_sessions=NO_SESSIONS,
        table=dispatch.build(entries),
        requests=RequestMemory(limits),
        responses=ResponseMemory(limits),
        limits=limits,
        sockets=sockets or SocketLimits(),
        counts=Counts(),
        other_ports=OTHER_PORTS,
    )
    server = KafkaServer(shared, [Listener(name="KAFKA", host="127.0.0.1", port=0)], Sockets(shared.sockets))
    await server.start()
    running = RunningKafkaServer(server, shared)
    try:
        yield running
    finally:
        for client in running.clients:
            client.writer.close()
        await server.close(grace_s=0.1)
        await soon(running.holds_nothing, "the server holds nothing after its end")


async def soon(condition: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


def on_uvloop(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(job())


def returns(made: Callable[[], object]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(_request: object, _context: Context) -> object:
        return made()

    return handle


HEARTBEATS = {HEARTBEAT.key: Entry(returns(HeartbeatResponse))}


class Held:
    """Writes that are acknowledged when a test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.go = asyncio.Event()

    async def handle(self, request: ProduceRequest, _context: Context) -> DeferredResponse:
        self.begun.append(number_of(request))

        async def answer() -> object:
            await self.go.wait()
            assert request.topic_data, "what it waits for is in memory"
            return nothing_produced()

        return DeferredResponse(answer)

    @property
    def entries(self) -> dict[int, Entry]:
        return {PRODUCE.key: Entry(self.handle), **HEARTBEATS}
