"""Three controller processes on loopback, brokers that follow them over gRPC, and an admin. For tests and benchmarks.

The brokers live in this process, each with a transport, a disk and an incarnation of its own: what is real between them
and the controllers is the network, the controllers' disks and their deaths.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from random import SystemRandom
from typing import Any
from uuid import UUID

from metadata_node import LOOK, digest
from raft_cluster import CALL_TIMEOUT_MS, NODES, RETRY_S, RaftCluster
from raft_node import CLUSTER_ID, make_storage

from tidelog.metadata.broker_side import BrokerAgent, BrokerConfig
from tidelog.metadata.brokers import Register
from tidelog.metadata.features import supported
from tidelog.metadata.requests import decode_reply, encode_request
from tidelog.metadata.shell import METHOD
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreatedTopic, CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, TransportError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.messages import SnapshotId
from tidelog.rpc.transport import GrpcTransport
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import ThreadWork

PROGRAM = Path(__file__).with_name("metadata_node.py")
FIRST = SnapshotId(Offset(1000), Epoch(1))
_NOT_DONE = frozenset({ErrorCode.NOT_CONTROLLER, ErrorCode.THROTTLING_QUOTA_EXCEEDED, ErrorCode.REQUEST_TIMED_OUT})


class MetadataCluster(RaftCluster):
    """`async with`, then `start`; brokers that were started are stopped at the end."""

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

    def start(self, *nodes: NodeId) -> None:
        for node in nodes or NODES:
            with (self.path / f"{node}.log").open("ab") as log:
                self.processes[node] = subprocess.Popen(
                    [sys.executable, str(PROGRAM), str(node), str(self.data(node)), self.addresses[node]],
                    # It has a neighbour to import, and `make` keeps a program's own folder off the path.
                    env={**os.environ, "PYTHONPATH": str(PROGRAM.parent)},
                    stderr=log,
                    stdout=log,
                )

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
        """The reply of whoever is active, and when it came (`time.monotonic`). A request whose fate is not known is
        repeated: use one that may be."""
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
                    told = error.facts.get("leader")
                    target = NodeId(told) if isinstance(told, int) and told != without else next(order)
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
        self._work = ThreadWork()
        self.tail = MetadataTail(
            disk=RealDisk(path, create=True),
            path="metadata",
            transport=self.transport,
            sources=lambda: NODES,
            work=self._work,
            random=SystemRandom(),
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def endpoints(self) -> tuple[tuple[str, str, str, int], ...]:
        """Once its transport is started."""
        return (("CONTROLLER", "PLAINTEXT", "127.0.0.1", self.transport.port),)

    async def start(self, controllers: dict[NodeId, str]) -> None:
        if self.transport.port == 0:
            await self.transport.start()
        for node, address in controllers.items():
            self.transport.set_address(node, address)
        registration = Register(
            cluster_id=CLUSTER_ID,
            broker=self.broker,
            incarnation=self.incarnation,
            endpoints=self.endpoints,
            directories=(self.directory,),
            features=supported(),
        )
        self.agent = BrokerAgent(registration, self.transport, self.tail, lambda: NODES, BrokerConfig(), SystemRandom())
        await self.tail.open()
        self._tasks = [asyncio.ensure_future(self.tail.run()), asyncio.ensure_future(self.agent.run())]

    async def die(self) -> None:
        """As a process does that is killed: its connections end, nothing is said, nobody listens any more."""
        await self.transport.close()
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transport.close()
        self.tail.close()
        await self._work.close()
