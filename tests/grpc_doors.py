"""Nodes on a real loop behind real gRPC doors: disks and LMDB in a directory of the test, all in one process.

async with GrpcCluster(tmp_path) as cluster:
    await cluster.start_controllers(1, 2, 3)
    await cluster.start_broker(11)
    answer = await cluster.call(11, "Log", "Fetch", request)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import Message
from grpc import aio

from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.service import GroupService
from tidelog.log.logs import Logs
from tidelog.metadata import configs
from tidelog.metadata.broker_side import BrokerAgent, BrokerConfig, ControllerClient
from tidelog.metadata.brokers import Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.features import supported
from tidelog.metadata.shell import ControllerConfig, ControllerNode
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import RemoteError
from tidelog.model.ids import DirectoryId, NodeId, PartitionId
from tidelog.raft.belonging import FORMAT_KEY
from tidelog.raft.membership import Member, Membership
from tidelog.raft.storage import RaftStorage
from tidelog.replication.replicas import ReplicaConfig, Replicas
from tidelog.replication.service import PartitionService
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door import Doors, method_named, serve_forwarded
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.errors import ERROR_KEY
from tidelog.rpc.groups_door import GroupsDoor
from tidelog.rpc.grpc_server import GrpcServer, Listener
from tidelog.rpc.limits import DoorLimits, ResponseMemory
from tidelog.rpc.log_door import LogDoor
from tidelog.rpc.transport import GrpcTransport
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork
from tidelog.world.transport import decode_error

CLUSTER_ID = "cluster-of-the-tests"
WAIT_S = 20.0


class Node:
    """One node's parts, and the stack that closes them."""

    def __init__(self, node: int, transport: GrpcTransport) -> None:
        self.node = NodeId(node)
        self.transport = transport
        self.stack = AsyncExitStack()
        self.controller: ControllerNode | None = None
        self.service: PartitionService | None = None
        self.groups: GroupService | None = None
        self.tail: MetadataTail | None = None
        self.server: GrpcServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.transport.port}"

    @property
    def door(self) -> GrpcServer:
        assert self.server is not None, "started"
        return self.server

    def port(self, listener: str = "GRPC") -> int:
        return self.door.ports[listener]


class GrpcCluster:
    def __init__(self, path: Path, *, limits: DoorLimits | None = None) -> None:
        self._path = path
        self.limits = limits or DoorLimits()
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

    async def _run_controller(self, node: Node, *, directory: bytes | None = None) -> None:
        disk = RealDisk(self._path / f"n{node.node}", create=True)
        node.stack.callback(disk.close)
        store = LmdbStore(self._path / f"n{node.node}" / "state")
        node.stack.callback(store.close)
        storage = RaftStorage(
            disk=disk, store=store, work=InlineWork(), clock=SystemClock(), cluster_id=CLUSTER_ID, node=node.node
        )
        if store.get(FORMAT_KEY) is None:
            founders = Membership(tuple(self.members[number] for number in sorted(self.members)))
            await storage.format(directory=directory or self.members[node.node].directory, membership=founders)
        controller = ControllerNode(
            storage,
            await storage.open(),
            node.transport,
            Controller(CLUSTER_ID),
            ControllerConfig(),
            Random(node.node),
            clock=SystemClock(),
            work=InlineWork(),
        )
        await controller.start()
        node.controller = controller
        node.stack.push_async_callback(controller.close)
        client = ControllerClient(node.transport, self._controllers, BrokerConfig(), Random(node.node))
        await self._open_door(node, client, controller=controller)

    def _controllers(self) -> list[NodeId]:
        return [NodeId(number) for number in self.members]

    async def start_broker(self, number: int, *, listeners: tuple[str, ...] = ("GRPC",)) -> Node:
        node = await self._node(number)
        self.introduce()
        path = self._path / f"n{number}"
        disk, logs_disk = RealDisk(path, create=True), RealDisk(path / "logs", create=True)
        store = LmdbStore(path / "logs" / "state")
        for part in (disk, logs_disk, store):
            node.stack.callback(part.close)
        random = Random(number)
        tail = node.tail = MetadataTail(
            disk=disk,
            path="metadata",
            transport=node.transport,
            sources=self._controllers,
            work=InlineWork(),
            random=random,
        )
        await tail.open()
        node.stack.callback(tail.close)

        def config_of(partition: PartitionId) -> Any:
            topic = tail.image.topics.get(partition.topic_id)
            return configs.log_config(tail.image, "" if topic is None else topic.name)

        directory = DirectoryId(UUID(int=number))
        logs = await Logs.open(
            [(logs_disk, store, directory)], work=InlineWork(), clock=SystemClock(), config_of=config_of
        )
        node.stack.push_async_callback(logs.close)
        registration = Register(
            cluster_id=CLUSTER_ID,
            broker=number,
            incarnation=UUID(int=random.getrandbits(128), version=4),
            # The door is opened after this, so that what it would advertise is not known yet: a name is enough here.
            endpoints=tuple((name, "PLAINTEXT", name.lower(), number) for name in listeners),
            directories=(directory,),
            features=supported(),
        )
        agent = BrokerAgent(registration, node.transport, tail, self._controllers, BrokerConfig(), random)
        replicas = Replicas(
            me=NodeId(number),
            transport=node.transport,
            logs=logs,
            tail=tail,
            agent=agent,
            clock=SystemClock(),
            config=ReplicaConfig(),
            random=random,
        )
        coordinator = GroupCoordinator(replicas, tail, SystemClock())
        coordinator.start()
        node.groups = GroupService(coordinator, tail, agent.client)
        await replicas.start()
        node.stack.push_async_callback(replicas.close)
        node.stack.push_async_callback(coordinator.close)
        for job in (tail.run(), agent.run()):
            node.stack.push_async_callback(_ended, asyncio.create_task(job))
        node.service = PartitionService(replicas)
        await self._open_door(node, agent.client, tail=tail, listeners=listeners)
        await until(lambda: not agent.is_fenced)
        return node

    async def _open_door(
        self, node: Node, client: ControllerClient, *, listeners: tuple[str, ...] = ("GRPC",), **parts: Any
    ) -> None:
        link = QuorumLink(cluster_id=CLUSTER_ID, transport=node.transport, client=client, **parts)
        responses = ResponseMemory(self.limits)
        service = node.service
        doors = Doors(
            cluster=ClusterDoor(link, InlineWork(), self.limits, version="test"),
            admin=AdminDoor(link, self.limits, None if service is None else LogDirs(service)),
            log=None if service is None else LogDoor(service, lambda: link.image, self.limits, responses),
            groups=None if node.groups is None else GroupsDoor(node.groups, lambda: link.image, self.limits),
        )
        serve_forwarded(node.transport, doors)
        addresses = [Listener(name=name, address="127.0.0.1:0") for name in listeners]
        node.server = GrpcServer(doors, addresses, self.limits, responses)
        await node.server.start()
        node.stack.push_async_callback(node.server.close, grace_s=0.2)

    async def stop(self, number: int) -> None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            await channel.close()
        await self.nodes.pop(number).stack.aclose()

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


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is not None:
        raise AssertionError("a task of a node failed") from task.exception()


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
