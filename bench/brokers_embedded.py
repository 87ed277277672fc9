"""Three nodes in one process, on one event loop, without a network: what replication costs by itself.

The parts are those of a node (`server.node`), on real directories; between them is a `LocalTransport`, before them
nothing: whoever writes calls the leader's `PartitionService`. Not a benchmark: it has no `run()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

from bench.brokers_load import LIMIT_S, ROOT
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication.service import PartitionService, ProduceItem
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.broker_part import BrokerPart
from tidelog.server.config import NodeConfig, load
from tidelog.server.controller_part import ControllerPart
from tidelog.server.directories import NodeDirectories
from tidelog.server.local_nodes import Layout, LocalNodes, Ports
from tidelog.world.local_transport import LocalNetwork
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.work import InlineWork

NODES = (NodeId(1), NodeId(2), NodeId(3))
LOOK_S = 0.02


class EmbeddedNode:
    def __init__(self, config: NodeConfig, network: LocalNetwork) -> None:
        self.config = config
        self.failure: BaseException | None = None
        # Only its contract is used; addresses mean nothing here.
        self._transport = cast(GrpcTransport, network.join(config.node))
        self._directories = NodeDirectories(config)
        self._tasks: list[asyncio.Task[None]] = []
        self.controller: ControllerPart
        self.broker: BrokerPart
        self.service: PartitionService

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    async def start(self) -> None:
        clock, random, work = SystemClock(), Random(int(self.config.node)), InlineWork()
        self.controller = await ControllerPart.open(
            self.config,
            self._directories,
            self._transport,
            work=work,
            clock=clock,
            random=random,
            on_failure=self._fail,
        )
        self.broker = await BrokerPart.open(
            self.config,
            self._directories,
            self._transport,
            lambda: NODES,
            start_work=work,
            work=work,
            between_brokers=self._transport,
            clock=clock,
            random=random,
        )
        await self._transport.start()
        await self.controller.start()
        await self.broker.start(self._fail)
        self._spawn(self.controller.initial.run())
        self._spawn(self.broker.tail.run())
        self._spawn(self.broker.register())
        self.service = PartitionService(self.broker.replicas)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.broker.close()
        await self.controller.close(is_orderly=False)
        await self._transport.close()
        self._directories.close()


class EmbeddedCluster:
    """A topic of it is written to by `write_all`, as `brokers_load.write_all` does it through a client."""

    def __init__(self, nodes: Sequence[EmbeddedNode]) -> None:
        self.nodes = nodes

    async def make_topic(self, name: str, partitions: int) -> list[PartitionId]:
        """Returns when every partition is led."""
        wanted = NewTopic(name=name, partitions=partitions, replication_factor=len(NODES))
        (made,) = (await self.nodes[0].broker.agent.ask(CreateTopics(topics=(wanted,)))).topics
        assert made.error is None, made.message
        found = [PartitionId(TopicId(made.topic_id), number) for number in range(partitions)]
        await until(lambda: all(self._leaders(one) for one in found))
        return found

    def _leaders(self, partition: PartitionId) -> list[EmbeddedNode]:
        return [node for node in self.nodes if node.broker.replicas.leading(partition) is not None]

    async def write_all(
        self, partitions: Sequence[PartitionId], batch: bytes, count: int, *, in_flight_max: int
    ) -> None:
        """`in_flight_max` of each partition."""
        shares = [len(range(at, count, len(partitions))) for at in range(len(partitions))]
        async with asyncio.TaskGroup() as group:
            for partition, share in zip(partitions, shares, strict=True):
                (leader,) = self._leaders(partition)
                left = iter(range(share))
                for _ in range(in_flight_max):
                    group.create_task(self._write_some(leader, partition, batch, left))

    async def _write_some(self, leader: EmbeddedNode, partition: PartitionId, batch: bytes, left: Any) -> None:
        for _ in left:
            (result,) = await leader.service.produce([ProduceItem(partition, batch)], acks=-1, timeout_ms=30_000)
            if result.error is not None:
                raise result.error


@contextlib.contextmanager
def node_configs() -> Iterator[list[NodeConfig]]:
    """Formatted directories of three nodes, outside of any loop."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-embedded-") as path:
        # Ports stand in the files, and nobody listens on them.
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
    """What it waits for tells nobody."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
