"""Nodes on a real loop behind real gRPC servers: disks and LMDB in a directory of the test, all in one process.

async with GrpcCluster(tmp_path) as cluster:
    await cluster.start_controllers(1, 2, 3)
    await cluster.start_broker(11)
    answer = await cluster.call(11, "Log", "Fetch", request)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import Message
from grpc import aio

from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import RemoteError
from tidelog.model.ids import DirectoryId, NodeId
from tidelog.raft.membership import Member, Membership
from tidelog.rpc.grpc.errors import ERROR_KEY
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.grpc.server import GrpcServer, Listener
from tidelog.rpc.grpc.transport import GrpcTransport
from tidelog.server.broker import Broker
from tidelog.server.controller import ControllerRole, format_if_new
from tidelog.server.role_config import broker_config, controller_config, service_options
from tidelog.server.services import NodeServices
from tidelog.server.world import Directory, NodeWorld
from tidelog.services.data import DataServices
from tidelog.services.groups import GroupService
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork
from tidelog.world.transport import decode_error

CLUSTER_ID = "cluster-of-the-tests"
WAIT_S = 20.0


class Node:
    """One node: its roles, its gRPC server, and the stack that closes them."""

    def __init__(self, node: int, transport: GrpcTransport) -> None:
        self.node = NodeId(node)
        self.transport = transport
        self.stack = AsyncExitStack()
        self.controller: ControllerNode | None = None
        self.broker: Broker | None = None
        self.failures: list[BaseException] = []
        self.server: GrpcServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.transport.port}"

    @property
    def grpc_server(self) -> GrpcServer:
        assert self.server is not None, "started"
        return self.server

    @property
    def service(self) -> DataServices | None:
        return None if self.broker is None else self.broker.data

    @property
    def groups(self) -> GroupService | None:
        return None if self.broker is None else self.broker.groups

    @property
    def tail(self) -> MetadataTail | None:
        return None if self.broker is None else self.broker.tail

    def port(self, listener: str = "GRPC") -> int:
        return self.grpc_server.ports[listener]


class GrpcCluster:
    def __init__(self, path: Path, *, limits: RequestLimits | None = None, guard: Guard | None = None) -> None:
        self._path = path
        self._services = replace(service_options(), limits=limits or RequestLimits(), guard=guard or Guard())
        self.nodes: dict[int, Node] = {}
        self.members: dict[int, Member] = {}
        self._channels: dict[int, aio.Channel] = {}

    async def __aenter__(self) -> GrpcCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()
        # Brokers first: they say goodbye to nobody, but their controllers need not probe them.
        for node in sorted(self.nodes, reverse=True):
            await self.stop(node)

    # Nodes.

    async def _node(self, number: int) -> Node:
        node = self.nodes[number] = Node(number, GrpcTransport(NodeId(number), CLUSTER_ID, "127.0.0.1:0"))
        await node.transport.start()
        node.stack.push_async_callback(node.transport.close)
        return node

    def introduce(self) -> None:
        """Everybody knows where controllers and brokers are now; voters learn of each other by the log alone."""
        for node in self.nodes.values():
            for other in self.nodes.values():
                if other is not node and not (node.controller and other.controller):
                    node.transport.set_address(other.node, other.address)

    async def start_controllers(self, *numbers: int) -> None:
        """The first voters, formatted with the addresses that they have now."""
        made = [await self._node(number) for number in numbers]
        for node in made:
            address = (("CONTROLLER", node.address),)
            self.members[node.node] = Member(node.node, bytes([node.node]) * 16, address)
        for node in made:
            await self._run_controller(node)

    async def restart_controller(self, number: int) -> Node:
        """On its old directory, at a new address that nobody knows."""
        node = await self._node(number)
        await self._run_controller(node)
        return node

    async def start_new_controller(self, number: int) -> Node:
        """A controller that is not among the voters: it waits until a leader finds it."""
        node = await self._node(number)
        await self._run_controller(node, directory=bytes([number]) * 16)
        return node

    def _world(self, node: Node, logs: Directory | None = None) -> NodeWorld:
        path = self._path / f"n{node.node}"
        metadata = self._directory(node, path)
        return NodeWorld(
            node=node.node,
            cluster_id=CLUSTER_ID,
            metadata=metadata,
            log_directories=() if logs is None else (logs,),
            controllers=self._controllers,
            to_controllers=node.transport,
            to_brokers=node.transport,
            clock=SystemClock(),
            random=Random(node.node),
            work=InlineWork(),
            metadata_work=InlineWork(),
            on_failure=node.failures.append,
        )

    def _directory(self, node: Node, path: Path, directory_id: DirectoryId | None = None) -> Directory:
        disk = RealDisk(path, create=True)
        node.stack.callback(disk.close)
        store = LmdbStore(path / "state")
        node.stack.callback(store.close)
        return Directory(disk, store, directory_id)

    async def _run_controller(self, node: Node, *, directory: bytes | None = None) -> None:
        world = self._world(node)
        config = replace(controller_config(), services=self._services)
        voters = Membership(tuple(self.members[number] for number in sorted(self.members)))
        directory = directory or self.members[node.node].directory
        await format_if_new(world, config, directory=directory, membership=voters)
        role = await ControllerRole.open(world, config)
        assert role.services is not None, "it is no broker"
        node.controller = role.node
        node.stack.push_async_callback(role.close, is_orderly=False)
        await role.start()
        await self._listen(node, role.services)

    def _controllers(self) -> list[NodeId]:
        return [NodeId(number) for number in self.members]

    async def start_broker(self, number: int, *, listeners: tuple[str, ...] = ("GRPC",)) -> Node:
        node = await self._node(number)
        self.introduce()
        logs = self._directory(node, self._path / f"n{number}" / "logs", DirectoryId(UUID(int=number)))
        # The server starts after the registration is prepared, so its port is not known: a name is enough here.
        endpoints = tuple((name, "PLAINTEXT", name.lower(), number) for name in listeners)
        config = replace(broker_config(endpoints=endpoints), services=self._services)
        broker = node.broker = await Broker.open(self._world(node, logs), config)
        node.stack.push_async_callback(broker.close)
        await broker.start()
        await self._listen(node, broker.services, listeners=listeners)
        await until(lambda: bool(node.failures) or broker.is_ready)
        return node

    async def _listen(self, node: Node, services: NodeServices, *, listeners: tuple[str, ...] = ("GRPC",)) -> None:
        addresses = [Listener(name=name, address="127.0.0.1:0") for name in listeners]
        node.server = GrpcServer(services.handlers, addresses, services.limits, services.responses)
        await node.server.start()
        node.stack.push_async_callback(node.server.close, grace_s=0.2)

    async def stop(self, number: int) -> None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            await channel.close()
        node = self.nodes.pop(number)
        await node.stack.aclose()
        if node.failures:
            raise AssertionError(f"node {number} has failed") from node.failures[0]

    # Controllers.

    async def active(self) -> Node:
        found: list[Node] = []

        def look() -> bool:
            found[:] = [n for n in self.nodes.values() if n.controller is not None and n.controller.is_active]
            return len(found) == 1

        await until(look)
        return found[0]

    # Calls.

    def channel(self, number: int) -> aio.Channel:
        if number not in self._channels:
            options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            address = f"127.0.0.1:{self.nodes[number].port()}"
            self._channels[number] = aio.insecure_channel(address, options=options)
        return self._channels[number]

    async def call(self, number: int, service: str, name: str, request: Message, *, timeout_s: float = WAIT_S) -> Any:
        """The response; raises `grpc.aio.AioRpcError`."""
        method = method_named(service, name)
        callable_ = self.channel(number).unary_unary(
            method.path, request_serializer=_bytes_of, response_deserializer=method.response.FromString
        )
        return await callable_(request, timeout=timeout_s)

    def stream(self, number: int, service: str, name: str, requests: Any) -> Any:
        """A call that streams; `requests` is one message, or an iterator of messages."""
        method = method_named(service, name)
        how = {"request_serializer": _bytes_of, "response_deserializer": method.response.FromString}
        channel = self.channel(number)
        if isinstance(requests, Message):
            return channel.unary_stream(method.path, **how)(requests)
        if isinstance(requests, AsyncIterator | Iterator | list):
            return channel.stream_stream(method.path, **how)(requests)
        return channel.stream_stream(method.path, **how)()


def _bytes_of(message: Message) -> bytes:
    return message.SerializeToString()


async def until(condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - of parts that tell nobody
            await asyncio.sleep(0.01)


def error_of(error: aio.AioRpcError) -> RemoteError:
    """The error of the catalogue in the trailing metadata."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return decode_error(value)
    raise AssertionError(f"no error of the catalogue came with {error.code()}: {error.details()}")


STATUS = grpc.StatusCode
