"""Controllers, and brokers without logs, in a simulated world, for tests of the metadata. Controllers serve the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from tidelog.metadata.broker_lifecycle import BrokerLifecycle
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.controller_node import ControllerConfig, ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import decode_records
from tidelog.metadata.replay import Replay
from tidelog.metadata.tail import MetadataTail
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.ids import DirectoryId, NodeId
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import EntryKind
from tidelog.rpc.grpc.dispatch import serve
from tidelog.server.controller import ControllerRole, format_if_new
from tidelog.server.membership import BrokerMembership
from tidelog.server.role_config import ServiceOptions, broker_config, controller_config, service_options
from tidelog.server.world import NodeWorld
from tidelog.services.limits import RequestLimits
from tidelog.testing.simulated_world import simulated_world
from tidelog.world.simulated import SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork

CLUSTER = "cluster"
CONTROLLERS = (NodeId(1), NodeId(2), NodeId(3))
ADMIN = NodeId(99)
LISTENER = "CLIENT"
BROKER_DIRECTORY = UUID(int=77)


class RunningBroker:
    def __init__(self, node: SimNode, tail: MetadataTail, agent: BrokerLifecycle) -> None:
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
        limits: RequestLimits | None = None,
    ) -> None:
        self.world = SimWorld(seed)
        self.network = SimNetwork(self.world)
        self.network.silent_death_probability = 0.0
        self.config = config or ControllerConfig()
        self.tail_bytes = tail_bytes
        self.limits = limits or RequestLimits()
        self.service_options: ServiceOptions = replace(service_options(), limits=self.limits)
        self.founders = Membership(tuple(Member(node, bytes([node]) * 16) for node in founders))
        self.controllers: dict[NodeId, tuple[SimNode, ControllerNode]] = {}
        self.brokers: dict[NodeId, RunningBroker] = {}
        self.failures: list[BaseException] = []

    def __enter__(self) -> Quorum:
        self.world.__enter__()
        self.admin = self.world.machine("admin").boot()
        transport = self.network.join(self.admin, ADMIN)
        self.client = ControllerClient(transport, lambda: CONTROLLERS, ControllerClientConfig(), self.admin.random)
        self.admin_transport = transport
        return self

    def __exit__(self, *details: Any) -> None:
        self.world.__exit__(*details)

    # Controllers.

    def start(self, *nodes: NodeId) -> None:
        for node in nodes or CONTROLLERS:
            process = self.world.machine(f"n{node}").boot()
            self.world.run(process, partial(self._boot, node))

    def world_of(self, process: SimNode, node: NodeId, **more: Any) -> NodeWorld:
        return simulated_world(
            process,
            self.network.join(process, node),
            cluster_id=CLUSTER,
            controllers=lambda: CONTROLLERS,
            metadata="data",
            on_failure=self.failures.append,
            **{"logs": {}, **more},
        )

    async def _boot(self, node: NodeId, process: SimNode) -> None:
        world = self.world_of(process, node)
        config = replace(controller_config(), controller=self.config, services=self.service_options)
        await format_if_new(world, config, directory=bytes([node]) * 16, membership=self.founders)
        role = await ControllerRole.open(world, config)
        assert role.services is not None, "it is no broker"
        serve(world.to_controllers, role.services.handlers, listener=LISTENER)
        self.controllers[node] = (process, role.node)
        await world.to_controllers.start()
        await role.start()

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
        config = replace(
            broker_config(endpoints=((LISTENER, "PLAINTEXT", f"host-{broker}", 9092),)),
            metadata_snapshot_bytes=self.tail_bytes,
        )
        membership = await BrokerMembership.open(self.world_of(process, NodeId(broker)), config)
        membership.prepare_registration((DirectoryId(BROKER_DIRECTORY),))
        membership.agent.registration = replace(membership.agent.registration, **more)
        running = self.brokers[NodeId(broker)] = RunningBroker(process, membership.tail, membership.agent)
        process.spawn(membership.tail.run())
        running.main = process.spawn(membership.run())

    def until_live(self, *brokers: int, timeout: float = 20) -> None:
        def live() -> bool:
            return all(not self.brokers[NodeId(broker)].agent.is_fenced for broker in brokers)

        self.world.run_until(live, timeout=timeout)

    def now_s(self) -> float:
        return self.world.scheduler.now_ns / 1e9
