"""Three controller processes on loopback, brokers that follow them over gRPC, and an admin. For tests and benchmarks.

The brokers live in this process, each with a transport, a disk and an incarnation of its own: what is real between them
and the controllers is the network, the controllers' disks and their deaths.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any
from uuid import UUID

from metadata_node import LOOK, digest
from raft_cluster import CALL_TIMEOUT_MS, NODES, RETRY_S, RaftCluster
from raft_node import CLUSTER_ID, make_storage

from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.metadata.controller_node import METHOD
from tidelog.metadata.requests import decode_reply, encode_request
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreatedTopic, CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, TransportError
from tidelog.model.ids import DirectoryId, Epoch, NodeId, Offset
from tidelog.raft.messages import SnapshotId
from tidelog.rpc.grpc.transport import GrpcTransport
from tidelog.server.membership import BrokerMembership
from tidelog.server.role_config import broker_config
from tidelog.server.world import Directory, NodeWorld
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

LOGGER = logging.getLogger(__name__)

FIRST = SnapshotId(Offset(1000), Epoch(1))
_NOT_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED, ErrorCode.REQUEST_TIMED_OUT})


class MetadataCluster(RaftCluster):
    """`async with`, then `start`; brokers that were started are stopped at the end."""

    program = Path(__file__).with_name("metadata_node.py")

    def __init__(self, path: Path, *, first: bytes | None = None) -> None:
        """`first`: the state that the controllers begin with, as `metadata.snapshot` writes it."""
        super().__init__(path)
        self._first = first
        self.brokers: dict[int, RunningBroker] = {}

    async def __aenter__(self) -> MetadataCluster:
        await super().__aenter__()
        for node in NODES if self._first is not None else ():
            disk, store = RealDisk(self.data(node)), LmdbStore(self.data(node) / "state")
            storage = make_storage(node, disk, store)
            boot = await storage.open()
            await storage.write_snapshot(FIRST, boot.membership, self._first or b"")
            await storage.close()
            store.close()
            disk.close()
        return self

    async def __aexit__(self, *details: object) -> None:
        for broker in self.brokers.values():
            await broker.close()
        await super().__aexit__(*details)

    async def start_broker(self, broker: int, *, timeout_s: float) -> RunningBroker:
        """Returns when it is registered and let in."""
        running = self.brokers[broker] = RunningBroker(broker, self.path / f"broker{broker}")
        await running.start(self.addresses)
        async with asyncio.timeout(timeout_s):
            await running.tail.until(lambda _: not running.agent.is_fenced)
        return running

    async def change(
        self,
        request: object,
        *,
        timeout_s: float,
        without: NodeId | None = None,
        call_timeout_ms: int = CALL_TIMEOUT_MS,
    ) -> tuple[Any, float]:
        """Returns the reply of the active controller, and when it came (`time.monotonic`). A request whose fate is not
        known is repeated: use one that may be."""
        order = itertools.cycle([node for node in NODES if node != without])
        target = self.leader if self.leader not in (None, without) else next(order)
        data = encode_request(request)
        async with asyncio.timeout(timeout_s):
            while True:
                assert target is not None
                try:
                    reply = await self.client.call(target, METHOD, data, timeout_ms=call_timeout_ms)
                except RemoteError as error:
                    if error.code not in _NOT_DONE:
                        raise
                    reported = error.facts.get("leader")
                    target = NodeId(reported) if isinstance(reported, int) and reported != without else next(order)
                except TransportError:
                    target = next(order)
                else:
                    self.leader = target
                    return decode_reply(reply), time.monotonic()
                await asyncio.sleep(RETRY_S)

    async def create(self, topic: NewTopic, *, timeout_s: float, without: NodeId | None = None) -> CreatedTopic:
        """The topic; one that exists is the trace of an attempt whose answer was lost."""
        reply, _ = await self.change(CreateTopics(topics=(topic,)), timeout_s=timeout_s, without=without)
        (created,) = reply.topics
        assert isinstance(created, CreatedTopic)
        assert created.error in (None, ErrorCode.TOPIC_ALREADY_EXISTS), created.message
        return created

    async def look(self, node: NodeId) -> dict[str, Any]:
        found = await self.ask(node, LOOK)
        assert isinstance(found, dict)
        return found

    async def until_all_agree(self, *nodes: NodeId, timeout_s: float) -> None:
        """These controllers (all, if none are named) and the brokers that run have the same image."""

        async def agree() -> bool:
            digests = {(await self.look(node))["digest"] for node in nodes or NODES}
            digests |= {digest(broker.tail.image) for broker in self.brokers.values()}
            return len(digests) == 1

        await self.until(agree, timeout_s=timeout_s)


class RunningBroker:
    """A broker as far as the controllers know one: registration, heartbeats, a tail with its files."""

    def __init__(self, broker: int, path: Path) -> None:
        self.broker = broker
        self.incarnation = UUID(int=SystemRandom().getrandbits(128), version=4)
        self.directory = UUID(int=broker + 1)
        self.transport = GrpcTransport(NodeId(broker), CLUSTER_ID, "127.0.0.1:0")
        self._path = path
        self._work = InlineWork()
        self._disk: RealDisk | None = None
        self._store: LmdbStore | None = None
        self._membership: BrokerMembership | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def membership(self) -> BrokerMembership:
        assert self._membership is not None, "started"
        return self._membership

    @property
    def tail(self) -> MetadataTail:
        return self.membership.tail

    @property
    def agent(self) -> BrokerLifecycle:
        return self.membership.agent

    @property
    def endpoints(self) -> tuple[tuple[str, str, str, int], ...]:
        """Once its transport is started."""
        return (("CONTROLLER", "PLAINTEXT", "127.0.0.1", self.transport.port),)

    async def start(self, controllers: dict[NodeId, str]) -> None:
        if self.transport.port == 0:
            await self.transport.start()
        for node, address in controllers.items():
            self.transport.set_address(node, address)
        self._disk, self._store = RealDisk(self._path, create=True), LmdbStore(self._path / "state")
        world = NodeWorld(
            node=NodeId(self.broker),
            cluster_id=CLUSTER_ID,
            metadata=Directory(self._disk, self._store),
            controllers=lambda: NODES,
            to_controllers=self.transport,
            to_brokers=self.transport,
            clock=SystemClock(),
            random=SystemRandom(),
            work=self._work,
            metadata_work=self._work,
            on_failure=lambda error: LOGGER.error("broker=%d has failed: %r", self.broker, error),
        )
        membership = await BrokerMembership.open(world, broker_config(endpoints=self.endpoints))
        membership.prepare_registration((DirectoryId(self.directory),))
        membership.agent.registration = replace(membership.agent.registration, incarnation=self.incarnation)
        self._membership = membership
        self._tasks = [asyncio.ensure_future(membership.tail.run()), asyncio.ensure_future(membership.run())]

    async def die(self) -> None:
        """As a process does that is killed: its connections end, nothing is said, nobody listens any more."""
        await self.transport.close()
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transport.close()
        if self._membership is not None:
            self._membership.close()
        for storage in (self._store, self._disk):
            if storage is not None:
                storage.close()
        await self._work.close()
