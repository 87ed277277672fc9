"""Whole controllers and brokers on the simulated machine room, for tests of the metadata shell and tail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from tidelog.metadata.broker_side import BrokerAgent, BrokerConfig, ControllerClient, with_clean_stop
from tidelog.metadata.brokers import Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.features import supported
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import decode_records
from tidelog.metadata.replay import Replay
from tidelog.metadata.shell import ControllerConfig, ControllerNode
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.ids import NodeId
from tidelog.raft.belonging import FORMAT_KEY
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import EntryKind
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork

CLUSTER = "cluster"
CONTROLLERS = (NodeId(1), NodeId(2), NodeId(3))
ADMIN = NodeId(99)
BROKER_DIRECTORY = UUID(int=77)


class RunningBroker:
    def __init__(self, node: SimNode, tail: MetadataTail, agent: BrokerAgent) -> None:
        self.node = node
        self.tail = tail
        self.agent = agent
        self.main: asyncio.Task[None] | None = None


class Quorum:
    """Controllers by node id, brokers by node id; a machine for each, and one for an admin."""

    def __init__(
        self,
        seed: int,
        config: ControllerConfig | None = None,
        *,
        tail_bytes: int = 1 << 20,
        founders: Sequence[NodeId] = CONTROLLERS,
    ) -> None:
        self.world = SimWorld(seed)
        self.network = SimNetwork(self.world)
        self.network.silent_death_probability = 0.0
        self.config = config or ControllerConfig()
        self.tail_bytes = tail_bytes
        self.founders = Membership(tuple(Member(node, bytes([node]) * 16) for node in founders))
        self.controllers: dict[NodeId, tuple[SimNode, ControllerNode]] = {}
        self.brokers: dict[NodeId, RunningBroker] = {}
        self.failures: list[BaseException] = []

    def __enter__(self) -> Quorum:
        self.world.__enter__()
        self.admin = self.world.machine("admin").boot()
        transport = self.network.join(self.admin, ADMIN)
        self.client = ControllerClient(transport, lambda: CONTROLLERS, BrokerConfig(), self.admin.random)
        self.admin_transport = transport
        return self

    def __exit__(self, *details: Any) -> None:
        self.world.__exit__(*details)

    # Controllers.

    def start(self, *nodes: NodeId) -> None:
        for node in nodes or CONTROLLERS:
            process = self.world.machine(f"n{node}").boot()
            self.world.run(process, partial(self._boot, node))

    async def _boot(self, node: NodeId, process: SimNode) -> None:
        transport = self.network.join(process, node)
        storage = RaftStorage(
            disk=process.disk(),
            store=process.store(),
            work=process.work,
            clock=process.clock,
            cluster_id=CLUSTER,
            node=node,
        )
        if process.store().get(FORMAT_KEY) is None:
            await storage.format(directory=bytes([node]) * 16, membership=self.founders)
        controller = ControllerNode(
            storage,
            await storage.open(),
            transport,
            Controller(CLUSTER),
            self.config,
            process.random,
            clock=process.clock,
            work=process.work,
            on_failure=self.failures.append,
        )
        self.controllers[node] = (process, controller)
        await transport.start()
        await controller.start()

    def kill(self, node: NodeId) -> None:
        if node in self.controllers:
            del self.controllers[node]
            self.world.machine(f"n{node}").kill()
        else:
            del self.brokers[node]
            self.world.machine(f"b{node}").kill()

    def active(self, *, among: Sequence[NodeId] | None = None, timeout: float = 20) -> NodeId:
        found: list[NodeId] = []

        def look() -> bool:
            active = [
                (controller.driver.core.epoch, node)
                for node, (_, controller) in self.controllers.items()
                if controller.is_active and (among is None or node in among)
            ]
            found[:] = [max(active)[1]] if active else []
            return bool(found)

        self.world.run_until(look, timeout=timeout)
        return found[0]

    def controller(self, node: NodeId) -> ControllerNode:
        return self.controllers[node][1]

    def on(self, node: NodeId, job: Callable[[ControllerNode], Coroutine[Any, Any, Any]], timeout: float = 60) -> Any:
        process, controller = self.controllers[node]
        return self.world.run(process, lambda _: job(controller), timeout=timeout)

    def replayed(self, node: NodeId) -> ClusterImage:
        """What the log of this controller makes, from its beginning (there must be no snapshot)."""
        core = self.controller(node).driver.core
        assert core.log.start == 0, "the whole log"
        replay = Replay(ClusterImage())
        for entry in core.log.entries[: self.controller(node).machine.offset]:
            if entry.kind is EntryKind.DATA:
                replay.apply(decode_records(entry.data))
        return replay.image

    # Requests.

    def ask(self, request: object, *, is_repeatable: bool = False, timeout: float = 60) -> Any:
        return self.world.run(
            self.admin, lambda _: self.client.call(request, is_repeatable=is_repeatable), timeout=timeout
        )

    def create(self, name: str, partitions: int = 1, replication_factor: int = 3) -> Any:
        topic = NewTopic(name=name, partitions=partitions, replication_factor=replication_factor)
        (made,) = self.ask(CreateTopics(topics=(topic,))).topics
        assert made.error is None, made.message
        return made

    # Brokers.

    def start_brokers(self, *brokers: int, wait: bool = True, **more: Any) -> None:
        for broker in brokers:
            process = self.world.machine(f"b{broker}").boot()
            self.world.run(process, partial(self._boot_broker, broker, more))
        if wait:
            self.until_live(*brokers)

    async def _boot_broker(self, broker: int, more: dict[str, Any], process: SimNode) -> None:
        transport = self.network.join(process, NodeId(broker))
        tail = MetadataTail(
            disk=process.disk(),
            path="metadata",
            transport=transport,
            sources=lambda: CONTROLLERS,
            work=process.work,
            random=process.random,
            snapshot_bytes=self.tail_bytes,
        )
        await tail.open()
        registration = Register(
            cluster_id=CLUSTER,
            broker=broker,
            incarnation=UUID(int=process.random.getrandbits(128), version=4),
            endpoints=(("CLIENT", "PLAINTEXT", f"host-{broker}", 9092),),
            directories=(BROKER_DIRECTORY,),
            features=supported(),
        )
        registration = replace(with_clean_stop(registration, process.store()), **more)
        agent = BrokerAgent(registration, transport, tail, lambda: CONTROLLERS, BrokerConfig(), process.random)
        found = self.brokers[NodeId(broker)] = RunningBroker(process, tail, agent)
        process.spawn(tail.run())
        found.main = process.spawn(agent.run())

    def until_live(self, *brokers: int, timeout: float = 20) -> None:
        def live() -> bool:
            return all(not self.brokers[NodeId(broker)].agent.is_fenced for broker in brokers)

        self.world.run_until(live, timeout=timeout)

    def now_s(self) -> float:
        return self.world.scheduler.now_ns / 1e9
