"""The client in the simulator: connections over the simulated transport, and a whole cluster to talk to.

with ClientWorld(seed=1) as world:
    world.run(lambda client: client.topic("orders"))     # on the client's own machine
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from support.grpc_api.simulated_nodes import ApiCluster
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.connections import Encodable, Exchange
from tidelog.log.batch import encode_columns
from tidelog.model.errors import UnreachableError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import END_OF_REQUESTS, Kind, Method, decode_response_frame, encode_message
from tidelog.world.simulated import SimNode
from tidelog.world.transport import Stream, Transport

T = TypeVar("T")

BROKERS = (11, 12, 13)
BOOTSTRAP = tuple(f"host-{broker}:9092" for broker in BROKERS)
CLIENT = NodeId(98)


class SimConnections:
    """Implements `Connections`; addresses are those of the simulated brokers, host-<node>:<port>."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._open: set[_SimExchange] = set()

    def _node(self, address: str) -> NodeId:
        host = address.partition(":")[0]
        if not host.startswith("host-"):
            raise UnreachableError(f"{address}: no such host")
        return NodeId(int(host.removeprefix("host-")))

    async def call(self, address: str, method: Method, request: Message, *, timeout_ms: int) -> Any:
        assert method.kind is Kind.UNARY
        data = await self._transport.call(
            self._node(address), method.wire_name, request.SerializeToString(), timeout_ms=timeout_ms
        )
        return method.response.FromString(data)

    async def open(self, address: str, method: Method, request: Message | None = None) -> Exchange:
        stream = await self._transport.open_stream(self._node(address), method.wire_name)
        exchange = _SimExchange(stream, method, self._open)
        self._open.add(exchange)
        if request is not None:
            await stream.send(encode_message(request))
            await stream.send(END_OF_REQUESTS)
        return exchange

    async def close(self) -> None:
        for exchange in sorted(self._open, key=lambda one: one.number):
            exchange.close()


class _SimExchange:
    opened = 0

    def __init__(self, stream: Stream, method: Method, all_open: set[_SimExchange]) -> None:
        self._stream = stream
        self._method = method
        self._all = all_open
        _SimExchange.opened += 1
        self.number = _SimExchange.opened

    async def send(self, request: Encodable) -> None:
        await self._stream.send(encode_message(request))  # type: ignore[arg-type]  # it has the bytes of one

    async def receive(self) -> Any:
        return decode_response_frame(self._method, await self._stream.receive())

    def close(self) -> None:
        self._all.discard(self)
        self._stream.close()


class ClientWorld(ApiCluster):
    """Three controllers, three brokers, and a machine for a client."""

    def __enter__(self) -> ClientWorld:
        super().__enter__()
        self.start()
        self.start_brokers(*BROKERS)
        self.machine = self.world.machine("client").boot()
        self.transport = self.network.join(self.machine, CLIENT)
        return self

    def new_client(self, bootstrap: tuple[str, ...] = BOOTSTRAP, **settings: Any) -> ClusterClient:
        return ClusterClient(
            bootstrap,
            SimConnections(self.transport),
            random=self.machine.random,
            clock=self.machine.clock,
            config=ClientConfig(**settings),
        )

    def cut_off(self) -> None:
        """The client reaches nobody, and nobody it; `network.heal` ends it."""
        for broker in BROKERS:
            self.network.block(CLIENT, NodeId(broker))
            self.network.block(NodeId(broker), CLIENT)

    def begin(self, job: Callable[[ClusterClient], Awaitable[None]], **settings: Any) -> asyncio.Task[None]:
        """A job that runs while the test does things to the cluster; `finish` awaits it."""

        async def whole() -> None:
            client = self.new_client(**settings)
            try:
                await job(client)
            finally:
                await client.close()

        return self.machine.spawn(whole())

    def finish(self, task: asyncio.Task[None], *, timeout: float = 120) -> None:
        self.until(task.done, timeout=timeout)
        task.result()

    def run(self, job: Callable[[ClusterClient], Awaitable[T]], *, timeout: float = 120, **settings: Any) -> T:
        """A client for the length of a job."""

        async def whole(_: SimNode) -> T:
            client = self.new_client(**settings)
            try:
                return await job(client)
            finally:
                await client.close()

        found: T = self.world.run(self.machine, whole, timeout=timeout)
        return found


def batch_of(*values: bytes, timestamp: int = 1_000) -> bytes:
    """As a program hands it to the writer."""
    return encode_columns([timestamp + at for at in range(len(values))], [None] * len(values), list(values))
