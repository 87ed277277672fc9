"""The nodes of a `MemoryCluster`: whole controllers and brokers on the simulated machine room, as `server/` builds them
of the real one.

Disks, stores, network and time are simulated; everything above them is what runs in production. Timestamps are the
real wall clock's: clients beside the cluster use it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from uuid import UUID

from tidelog import __version__
from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.service import GroupService
from tidelog.log.config import LogConfig
from tidelog.log.logs import Logs
from tidelog.metadata import configs
from tidelog.metadata.broker_side import BrokerAgent, BrokerConfig, ControllerClient, with_clean_stop
from tidelog.metadata.brokers import Register
from tidelog.metadata.controller import Controller
from tidelog.metadata.features import supported
from tidelog.metadata.shell import ControllerConfig, ControllerNode
from tidelog.metadata.tail import MetadataTail
from tidelog.model.ids import DirectoryId, NodeId, PartitionId
from tidelog.raft.belonging import FORMAT_KEY
from tidelog.raft.membership import Member, Membership
from tidelog.raft.storage import RaftStorage
from tidelog.replication.announcing import announce, close_logs, working_directories
from tidelog.replication.replicas import ReplicaConfig, Replicas
from tidelog.replication.service import PartitionService
from tidelog.rpc.admin_door import AdminDoor
from tidelog.rpc.cluster_door import ClusterDoor
from tidelog.rpc.door import Doors, serve, serve_forwarded
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.groups_door import GroupsDoor
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.log_door import LogDoor
from tidelog.world.real.clock import SystemClock
from tidelog.world.simulated import Latency, SimMachine, SimNode, SimWorld
from tidelog.world.simulated.network import SimNetwork, SimTransport

LISTENER = "CLIENT"
PORT = 9292
LOGS = "logs"
DATA = "data"
WIRE = Latency(0.00002, 0.0001)
DEVICE = Latency(0.00005, 0.0002)
HELPER = Latency(0.0001, 0.0005)
NOTICE = Latency(0.0005, 0.005)


class Broker:
    """One life of a broker's process."""

    def __init__(
        self,
        node: SimNode,
        tail: MetadataTail,
        agent: BrokerAgent,
        logs: Logs,
        replicas: Replicas,
        coordinator: GroupCoordinator,
    ) -> None:
        self.node = node
        self.tail = tail
        self.agent = agent
        self.logs = logs
        self.replicas = replicas
        self.coordinator = coordinator

    @property
    def is_let_in(self) -> bool:
        return not self.agent.is_fenced

    async def stop(self) -> None:
        """Controlled shutdown: leaderships move, logs are synced and say so."""
        epoch = await self.agent.shut_down()
        await self.coordinator.close()
        await self.replicas.close()
        await close_logs(self.logs, self.node.store(DATA), epoch)


class Room:
    """Machines by node id: controllers, brokers, and one for all clients. Used on the world's thread only."""

    def __init__(
        self,
        seed: int,
        *,
        controllers: tuple[NodeId, ...],
        brokers: tuple[NodeId, ...],
        host_of: Callable[[NodeId], str],
        racks: dict[NodeId, str],
        disk_bytes: int,
        on_failure: Callable[[NodeId, BaseException], None],
    ) -> None:
        """`on_failure`: a node's process has failed by itself, and ends."""
        self.world = SimWorld(seed)
        self.network = SimNetwork(self.world)
        self.network.latency = WIRE
        self.network.notice_latency = NOTICE
        self.network.silent_death_probability = 0.0
        self.controllers = controllers
        self.cluster_id = f"memory-{seed}"
        self.running: dict[NodeId, Broker] = {}
        self._active: dict[NodeId, ControllerNode] = {}
        self._host_of = host_of
        self._racks = racks
        self._on_failure = on_failure
        self._limits = DoorLimits()
        self._clock = SystemClock()
        self._founders = Membership(tuple(Member(node, _directory(node).bytes) for node in controllers))
        for node in (*controllers, *brokers):
            machine = self.machine(node)
            for label in (DATA, LOGS):
                machine.disk(label).sync_latency = machine.disk(label).read_latency = DEVICE
                machine.disk(label).capacity_bytes = disk_bytes
                machine.store(label).commit_latency = DEVICE
        self.clients = self.world.machine("clients").boot()

    def machine(self, node: NodeId) -> SimMachine:
        return self.world.machine(f"node-{node}")

    def boot(self, node: NodeId) -> None:
        """Its process starts; what it becomes shows in `running`."""
        process = self.machine(node).boot()
        process.work.latency = HELPER
        program = self._run_controller if node in self.controllers else self._run_broker
        self._spawn(node, process, program(node, process), f"node-{node}")

    def _spawn(self, node: NodeId, process: SimNode, work: Coroutine[Any, Any, None], name: str) -> None:
        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(node, error)

        process.spawn(work, name=name).add_done_callback(ended)

    def _fail(self, node: NodeId, error: BaseException) -> None:
        """As a process does whose part has failed: it ends."""
        if self.machine(node).node is not None:
            self._on_failure(node, error)
            self.world.loop.call_soon(self.kill, node)

    def kill(self, node: NodeId) -> None:
        self.running.pop(node, None)
        self.machine(node).kill()

    @property
    def active(self) -> ControllerNode | None:
        return next((one for one in self._active.values() if one.is_active), None)

    # A controller.

    async def _run_controller(self, node: NodeId, process: SimNode) -> None:
        transport = self.network.join(process, node)
        on_failure = partial(self._fail, node)
        storage = RaftStorage(
            disk=process.disk(DATA),
            store=process.store(DATA),
            work=process.work,
            clock=self._clock,
            cluster_id=self.cluster_id,
            node=node,
            on_failure=on_failure,
        )
        if process.store(DATA).get(FORMAT_KEY) is None:
            await storage.format(directory=_directory(node).bytes, membership=self._founders)
        controller = ControllerNode(
            storage,
            await storage.open(),
            transport,
            Controller(self.cluster_id),
            ControllerConfig(broker_listener=LISTENER),
            process.random,
            clock=self._clock,
            work=process.work,
            on_failure=on_failure,
        )
        client = ControllerClient(transport, lambda: self.controllers, BrokerConfig(), process.random)
        link = QuorumLink(cluster_id=self.cluster_id, transport=transport, client=client, controller=controller)
        self._open_doors(
            transport,
            Doors(
                cluster=ClusterDoor(link, process.work, self._limits, version=__version__),
                admin=AdminDoor(link, self._limits, None),
            ),
        )
        self._active[node] = controller
        await transport.start()
        await controller.start()

    # A broker.

    async def _run_broker(self, node: NodeId, process: SimNode) -> None:
        transport = self.network.join(process, node)
        tail = MetadataTail(
            disk=process.disk(DATA),
            path="metadata",
            transport=transport,
            sources=lambda: self.controllers,
            work=process.work,
            random=process.random,
        )
        await tail.open()

        def config_of(partition: PartitionId) -> LogConfig:
            topic = tail.image.topics.get(partition.topic_id)
            return LogConfig() if topic is None else configs.log_config(tail.image, topic.name)

        logs = await Logs.open(
            [(process.disk(LOGS), process.store(LOGS), DirectoryId(_directory(node)))],
            work=process.work,
            clock=self._clock,
            config_of=config_of,
        )
        wanted = Register(
            cluster_id=self.cluster_id,
            broker=node,
            incarnation=UUID(int=process.random.getrandbits(128), version=4),
            endpoints=((LISTENER, "PLAINTEXT", self._host_of(node), PORT),),
            rack=self._racks.get(node),
            directories=working_directories(logs),
            features=supported(),
        )
        agent = BrokerAgent(
            with_clean_stop(wanted, process.store(DATA)),
            transport,
            tail,
            lambda: self.controllers,
            BrokerConfig(),
            process.random,
        )
        replicas = Replicas(
            me=node,
            transport=transport,
            logs=logs,
            tail=tail,
            agent=agent,
            clock=self._clock,
            config=ReplicaConfig(),
            random=process.random,
        )
        coordinator = GroupCoordinator(replicas, tail, self._clock)
        replicas.on_crash = coordinator.on_failure = partial(self._fail, node)
        coordinator.start()
        await replicas.start()
        link = QuorumLink(cluster_id=self.cluster_id, transport=transport, client=agent.client, tail=tail)
        service = PartitionService(replicas)
        groups = GroupService(coordinator, tail, agent.client)
        self._open_doors(
            transport,
            Doors(
                cluster=ClusterDoor(link, process.work, self._limits, version=__version__),
                admin=AdminDoor(link, self._limits, LogDirs(service)),
                log=LogDoor(service, lambda: link.image, self._limits),
                groups=GroupsDoor(groups, lambda: link.image, self._limits),
            ),
        )
        self.running[node] = Broker(process, tail, agent, logs, replicas, coordinator)
        self._spawn(node, process, tail.run(), "metadata")
        await announce(agent, logs)
        await agent.run()

    def _open_doors(self, transport: SimTransport, doors: Doors) -> None:
        serve(transport, doors, listener=LISTENER)
        serve_forwarded(transport, doors)


def _directory(node: NodeId) -> UUID:
    return UUID(int=(0x7D << 120) | (4 << 76) | (2 << 62) | node)
