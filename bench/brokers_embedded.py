"""Three nodes in one process, on one event loop, without a network: the cost of replication alone.

The parts are those of a node (`server.node`), on real directories, connected by a `LocalTransport`. Writers call the
leader's `ProduceService` directly. Not a benchmark: it has no `run()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.brokers_load import LIMIT_S, ROOT
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.server.broker import Broker
from tidelog.server.config import NodeConfig, load
from tidelog.server.controller import ControllerRole
from tidelog.server.directories import NodeDirectories
from tidelog.server.local_nodes import Layout, LocalNodes, Ports
from tidelog.server.node import broker_role_config, controller_role_config
from tidelog.server.world import NodeWorld
from tidelog.services.context import INTERNAL
from tidelog.services.data import DataServices
from tidelog.services.produce import ProduceItem, ProduceRequest
from tidelog.world.local_transport import LocalNetwork
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.work import InlineWork

NODES = (NodeId(1), NodeId(2), NodeId(3))
POLL_S = 0.02


class EmbeddedNode:
    def __init__(self, config: NodeConfig, network: LocalNetwork) -> None:
        self.config = config
        self.failure: BaseException | None = None
        self._transport = network.join(config.node)
        self._directories = NodeDirectories(config)
        self.controller: ControllerRole
        self.broker: Broker
        self.service: DataServices

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    async def start(self) -> None:
        world = NodeWorld(
            node=self.config.node,
            cluster_id=self._directories.cluster_id,
            metadata=self._directories.metadata.as_world(),
            log_directories=self._directories.log_directories,
            controllers=lambda: NODES,
            to_controllers=self._transport,
            to_brokers=self._transport,
            clock=SystemClock(),
            random=Random(int(self.config.node)),
            work=InlineWork(),
            metadata_work=InlineWork(),
            on_failure=self._fail,
        )
        self.controller = await ControllerRole.open(world, controller_role_config(self.config))
        self.broker = await Broker.open(world, broker_role_config(self.config), controller=self.controller.node)
        await self._transport.start()
        await self.controller.start()
        await self.broker.start()
        self.service = self.broker.data

    async def close(self) -> None:
        await self.broker.close()
        await self.controller.close(is_orderly=False)
        await self._transport.close()
        self._directories.close()


class EmbeddedCluster:
    """`write_all` writes to a topic, as `brokers_load.write_all` does through a client."""

    def __init__(self, nodes: Sequence[EmbeddedNode]) -> None:
        self.nodes = nodes

    async def make_topic(self, name: str, partitions: int) -> list[PartitionId]:
        """Create a topic; return when every partition has a leader."""
        wanted = NewTopic(name=name, partitions=partitions, replication_factor=len(NODES))
        (made,) = (await self.nodes[0].broker.agent.ask(CreateTopics(topics=(wanted,)))).topics
        assert made.error is None, made.message
        found = [PartitionId(TopicId(made.topic_id), number) for number in range(partitions)]
        await until(lambda: all(self._leaders(one) for one in found))
        return found

    def _leaders(self, partition: PartitionId) -> list[EmbeddedNode]:
        return [node for node in self.nodes if node.broker.replicas.leader_of(partition) is not None]

    async def write_all(
        self, partitions: Sequence[PartitionId], batch: bytes, count: int, *, in_flight_max: int
    ) -> None:
        """Write `count` batches with `in_flight_max` per partition."""
        shares = [len(range(at, count, len(partitions))) for at in range(len(partitions))]
        async with asyncio.TaskGroup() as group:
            for partition, share in zip(partitions, shares, strict=True):
                (leader,) = self._leaders(partition)
                left = iter(range(share))
                for _ in range(in_flight_max):
                    group.create_task(self._write_some(leader, partition, batch, left))

    async def _write_some(self, leader: EmbeddedNode, partition: PartitionId, batch: bytes, left: Any) -> None:
        request = ProduceRequest(items=[ProduceItem(partition, batch)], timeout_ms=30_000)
        for _ in left:
            (result,) = await leader.service.produce.produce(INTERNAL, request)
            if result.error is not None:
                raise result.error


@contextlib.contextmanager
def node_configs() -> Iterator[list[NodeConfig]]:
    """Yield formatted directories of three nodes; call it outside of any loop."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-embedded-") as path:
        # The files need ports, but nothing listens on them.
        made = LocalNodes(Path(path), Layout.fresh([Ports.usual(number, 0) for number in NODES]))
        made.prepare()
        yield [load(str(made.path(number) / "node.toml"), {}) for number in NODES]


@contextlib.asynccontextmanager
async def embedded_cluster(configs: Sequence[NodeConfig]) -> AsyncIterator[EmbeddedCluster]:
    network = LocalNetwork()
    nodes = [EmbeddedNode(config, network) for config in configs]
    try:
        for node in nodes:
            await node.start()
        await until(lambda: all(node.broker.is_ready for node in nodes))
        yield EmbeddedCluster(nodes)
        for node in nodes:
            if node.failure is not None:
                raise node.failure
    finally:
        for node in nodes:
            await node.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Poll until the condition holds: it has no event to wait for."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
