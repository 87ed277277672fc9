"""The nodes of a `MemoryCluster`: controllers and brokers of `server/` in a simulated world.

Disks, stores, network and time are simulated; everything above them is what runs in production. Timestamps come from
the real clock, as those of the clients do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from tidelog.metadata.controller_node import ControllerNode
from tidelog.model.ids import DirectoryId, NodeId
from tidelog.raft.membership import Member, Membership
from tidelog.rpc.grpc.dispatch import serve
from tidelog.server.broker import Broker
from tidelog.server.controller import ControllerRole, format_if_new
from tidelog.server.role_config import broker_config, controller_config
from tidelog.server.settings_table import DEFAULTS, Value
from tidelog.server.world import NodeWorld
from tidelog.testing.simulated_world import simulated_world
from tidelog.world.real.clock import SystemClock
from tidelog.world.simulated import Latency, SimMachine, SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork

LISTENER = "CLIENT"
PORT = 9292
LOGS = "logs"
DATA = "data"
NETWORK_LATENCY = Latency(0.00002, 0.0001)
DISK_LATENCY = Latency(0.00005, 0.0002)
WORK_LATENCY = Latency(0.0001, 0.0005)
NOTICE_LATENCY = Latency(0.0005, 0.005)


class MemoryNodes:
    """Machines by node id: controllers, brokers, and one for all clients. Used only on the thread of the world."""

    def __init__(
        self,
        seed: int,
        *,
        controllers: tuple[NodeId, ...],
        brokers: tuple[NodeId, ...],
        host_of: Callable[[NodeId], str],
        racks: dict[NodeId, str],
        disk_bytes: int,
        settings: Mapping[str, Value],
        on_failure: Callable[[NodeId, BaseException], None],
    ) -> None:
        """`on_failure` is called when a node fails although no fault was injected; the node then ends."""
        self.world = SimWorld(seed)
        self.network = SimNetwork(self.world)
        self.network.latency = NETWORK_LATENCY
        self.network.notice_latency = NOTICE_LATENCY
        self.network.silent_death_probability = 0.0
        self.controllers = controllers
        self.cluster_id = f"memory-{seed}"
        self.running: dict[NodeId, Broker] = {}
        self._controller_roles: dict[NodeId, ControllerRole] = {}
        self._host_of = host_of
        self._racks = racks
        self._values = {**DEFAULTS, **settings}
        self._on_failure = on_failure
        self._clock = SystemClock()
        self._voters = Membership(tuple(Member(node, _directory(node).bytes) for node in controllers))
        for node in (*controllers, *brokers):
            machine = self.machine(node)
            for label in (DATA, LOGS):
                machine.disk(label).sync_latency = machine.disk(label).read_latency = DISK_LATENCY
                machine.disk(label).capacity_bytes = disk_bytes
                machine.store(label).commit_latency = DISK_LATENCY
        self.clients = self.world.machine("clients").boot()

    def machine(self, node: NodeId) -> SimMachine:
        return self.world.machine(f"node-{node}")

    def boot(self, node: NodeId) -> None:
        """Starts the process of a node. A broker is in `running` once it has started."""
        process = self.machine(node).boot()
        process.work.latency = WORK_LATENCY
        program = self._run_controller if node in self.controllers else self._run_broker
        self.spawn(node, program(self._world_of(node, process)), f"node-{node}")

    def spawn(self, node: NodeId, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[Any]:
        """Runs work in the process of a node, which must be up; an error ends the process."""
        process = self.machine(node).node
        assert process is not None, f"node {node} runs"

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(node, error)

        task = process.spawn(work, name=name)
        task.add_done_callback(ended)
        return task

    def _fail(self, node: NodeId, error: BaseException) -> None:
        """Ends the process, as a node process does after a failure."""
        if self.machine(node).node is not None:
            self._on_failure(node, error)
            self.world.loop.call_soon(self.kill, node)

    def kill(self, node: NodeId) -> None:
        self.running.pop(node, None)
        self.machine(node).kill()

    @property
    def active_controller(self) -> ControllerNode | None:
        return next((role.node for role in self._controller_roles.values() if role.node.is_active), None)

    def _world_of(self, node: NodeId, process: SimNode) -> NodeWorld:
        world = simulated_world(
            process,
            self.network.join(process, node),
            cluster_id=self.cluster_id,
            controllers=lambda: self.controllers,
            metadata=DATA,
            logs={} if node in self.controllers else {LOGS: DirectoryId(_directory(node))},
            on_failure=partial(self._fail, node),
        )
        return replace(world, clock=self._clock)

    async def _run_controller(self, world: NodeWorld) -> None:
        config = controller_config(self._values, listener=LISTENER)
        await format_if_new(world, config, directory=_directory(world.node).bytes, membership=self._voters)
        role = self._controller_roles[world.node] = await ControllerRole.open(world, config)
        assert role.services is not None, "it is no broker"
        serve(world.to_controllers, role.services.handlers, listener=LISTENER)
        await world.to_controllers.start()
        await role.start()

    async def _run_broker(self, world: NodeWorld) -> None:
        endpoint = (LISTENER, "PLAINTEXT", self._host_of(world.node), PORT)
        config = broker_config(self._values, endpoints=(endpoint,), rack=self._racks.get(world.node))
        broker = await Broker.open(world, config)
        serve(world.to_controllers, broker.services.handlers, listener=LISTENER)
        await world.to_controllers.start()
        await broker.start()
        self.running[world.node] = broker


def _directory(node: NodeId) -> UUID:
    return UUID(int=(0x7D << 120) | (4 << 76) | (2 << 62) | node)
