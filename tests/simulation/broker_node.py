"""A broker's process (`server.broker`) in the simulator, and its APIs over the simulated network: gRPC over the
transport; in runs with clients of the Kafka API, its server over byte connections.

Its logs lie on the disk "logs-0", or on that and "logs-1", its copy of the metadata and the mark of a clean stop on
"broker". A combined node runs a controller (disk "data") in the same process: whatever kills one kills both. Faults of
disks strike one of those with logs.
"""

import asyncio
import errno
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from simulation.cluster import Context, Program, Station
from simulation.driver_node import CLUSTER_ID
from simulation.kafka_client import LISTENER as KAFKA_LISTENER
from simulation.kafka_client import PORT as KAFKA_PORT
from simulation.metadata_sim import Failure, MetadataSimulation, MetadataStack
from simulation.nemesis import STORE_REFUSALS, Undo
from simulation.raft_sim import RaftSimulation
from tidelog.log.batch import read_header
from tidelog.log.log_scan import scan_log
from tidelog.log.logs import LogsConfig
from tidelog.metadata.controller_client import ControllerClientConfig
from tidelog.metadata.controller_node import ControllerNode
from tidelog.model.errors import TidelogError
from tidelog.model.ids import DirectoryId, NodeId, PartitionId
from tidelog.replication.replica import Replica
from tidelog.rpc.grpc.dispatch import serve
from tidelog.rpc.kafka.listener import KafkaServer, Listener
from tidelog.rpc.kafka.shared import SocketLimits
from tidelog.server.api_servers import kafka_server
from tidelog.server.broker import Broker
from tidelog.server.role_config import broker_config
from tidelog.services.limits import RequestMemory
from tidelog.testing.simulated_world import simulated_world
from tidelog.world.simulated import Latency, Loss
from tidelog.world.simulated.byte_streams import StreamAcceptor
from tidelog.world.simulated.disk import SimDevice
from tidelog.world.simulated.store import SimStoreDevice
from tidelog.world.work import Work

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation

T = TypeVar("T")

LOGS = ("logs-0", "logs-1")
BROKER = "broker"
LISTENER = "CLIENT"
COVERED_FROM = 16
"""Base offset, length and leader epoch of a batch are not covered by its CRC, only by that of a sealed segment."""


class BrokerApp:
    """One process: what checks, clients and the nemesis see of it."""

    def __init__(self, context: Context, broker: Broker) -> None:
        self.context = context
        self.name = context.station.name
        self.broker = broker
        self.tail = broker.tail
        self.agent = broker.agent
        self.logs = broker.logs
        self.replicas = broker.replicas
        self.coordinator = broker.coordinator
        self.service = broker.data
        self.groups = broker.groups
        self.kafka: KafkaServer | None = None
        """In runs with clients of the Kafka API."""
        self.is_stopping = False
        self.is_stopped = False
        self.looked: dict[Replica, tuple[object, int, int]] = {}
        """What `ReplicaChecker` has inspected: the role, its high watermark and durable end."""

    async def stop(self) -> None:
        """Stops as a node process does."""
        self.is_stopping = True
        await self.broker.shut_down()
        if self.kafka is not None:
            self.coordinator.stop()
            await self.kafka.close()
        await self.broker.close()
        self.is_stopped = True

    def has_failed_directory(self) -> bool:
        return any(directory.failed is not None for directory in self.logs.directories)


class SlowRecovery:
    """Implements `world.work.Work`: reading a log after a crash takes a while, and longer for some than for others."""

    def __init__(self, work: Work, latency: Latency, draw: Random) -> None:
        self._work = work
        self._latency = latency
        self._draw = draw

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        if fn is scan_log:
            await asyncio.sleep(self._latency.draw(self._draw))
        return await self._work.run(fn, *values)


class BrokerStack(MetadataStack):
    """Builds controllers, brokers and combined nodes, and harms the devices under them."""

    def __init__(self, simulation: "BrokerSimulation") -> None:
        super().__init__()
        self._simulation = simulation
        self._is_broker: set[NodeId] = set()
        self._broker_latency = Latency(0.0002, 0.001)
        self.labels = LOGS[: simulation.shape.directories]
        self._which = simulation.world.random("directories")

    def broker_program(self) -> Program:
        async def run(context: Context) -> None:
            failure = Failure(context)
            broker = await self._open_broker(context, failure, None)
            app = await self._start_broker(context, broker)
            context.app = app
            await failure.future

        return run

    def combined_program(self, simulation: RaftSimulation) -> Program:
        assert isinstance(simulation, MetadataSimulation)
        self._watch(simulation)

        async def run(context: Context) -> None:
            failure = Failure(context)
            role = await self._open_controller(simulation, context, failure, is_combined=True)
            broker = await self._open_broker(context, failure, role.node)
            await self._start_controller(simulation, context, role, failure)
            await self._start_broker(context, broker)
            await failure.future

        return run

    async def _open_broker(self, context: Context, failure: Failure, controller: ControllerNode | None) -> Broker:
        node, simulation, number = context.node, self._simulation, int(context.node_id)
        shape = simulation.shape
        world = simulated_world(
            node,
            context.transport,
            cluster_id=CLUSTER_ID,
            controllers=lambda: simulation.controllers,
            metadata=BROKER,
            logs={
                label: DirectoryId(
                    UUID(int=number + at * 1_000 + 1_000_000 * context.station.durable.get(f"disks/{label}", 0))
                )
                for at, label in enumerate(self.labels)
            },
            on_failure=failure,
            work=SlowRecovery(node.work, shape.recovery, simulation.world.random(f"recovery/{number}")),
        )
        endpoints = [(LISTENER, "PLAINTEXT", context.station.name, 9092)]
        if shape.kafka is not None:
            endpoints.append((KAFKA_LISTENER, "PLAINTEXT", context.station.name, KAFKA_PORT))
        config = replace(
            broker_config(endpoints=tuple(endpoints), rack=f"rack-{number % 10}"),
            lifecycle=ControllerClientConfig(heartbeat_ms=300, silence_ms=1_000, call_timeout_ms=1_000),
            logs=LogsConfig(checkpoint_interval_ms=shape.checkpoint_ms),
            replicas=shape.replica,
            metadata_snapshot_bytes=simulation.tail_snapshot_bytes,
            registration_delay_ms=shape.opening_grace_ms,
        )
        broker = await Broker.open(world, config, controller=controller)
        simulation.metadata.seen(context.station.name, broker.tail.offset, broker.tail.image)
        # An internal error fails the run. A node process would stop, and a supervisor would restart it.
        broker.replicas.tasks.on_crash = broker.coordinator.tasks.on_crash = lambda error: simulation.crashed(
            context.station.name, error
        )
        serve(context.transport, broker.services.handlers, listener=LISTENER)
        return broker

    async def _start_broker(self, context: Context, broker: Broker) -> BrokerApp:
        self._simulation.replica_checker.shadows.begin_process(broker.agent.broker, broker.replicas)
        await broker.start()
        app = self._simulation.apps[context.station.name] = BrokerApp(context, broker)
        if self._simulation.shape.kafka is not None:
            app.kafka = await self._serve_kafka(context, broker)
        self._simulation.replica_checker.shadows.attach(app)
        context.node.loop.watch(self._check_broker(app))
        return app

    async def _serve_kafka(self, context: Context, broker: Broker) -> KafkaServer:
        draw = self._simulation.world.random(f"kafka/{context.station.name}")
        server = kafka_server(
            broker.services,
            [Listener(name=KAFKA_LISTENER, host="", port=KAFKA_PORT)],
            StreamAcceptor(context.transport, draw),
            requests=RequestMemory(broker.services.limits),
            sockets=SocketLimits(),
            other_ports={},
        )
        await server.start()
        return server

    def _check_broker(self, app: BrokerApp) -> Callable[[], None]:
        """Called after every event of this process."""
        simulation, loop = self._simulation, app.context.node.loop
        look, check_invariants = simulation.replica_checker.look, simulation.invariants.watcher(app)
        product, groups, looked_at = simulation.product_checker, simulation.groups, simulation.looked_at

        def check() -> None:
            if loop.is_dead:
                return
            look(app)
            if product is not None:
                product.look(app)
            check_invariants()
            looked_at(app)
            if groups is not None:
                groups.checker.look(app)

        return check

    # -- devices

    def attach_broker(self, station: Station, latency: Latency) -> None:
        """Crash points and the pace of the disk with the logs."""
        self._is_broker.add(station.node_id)
        self._broker_latency = latency

        def crash() -> None:
            station.lose_power(station.machine.crash_loss)

        for label in (*self.labels, BROKER):
            station.machine.disk(label).on_crash_point = crash
            station.machine.store(label).on_crash_point = crash
        for label in self.labels:
            station.machine.disk(label).sync_latency = station.machine.store(label).commit_latency = latency

    def _label(self, station: Station) -> str:
        """The disk that a fault strikes."""
        return self._which.choice(self.labels) if station.node_id in self._is_broker else "data"

    def devices(self, station: Station, draw: Random) -> tuple[SimDevice, SimStoreDevice]:
        label = draw.choice(self.labels) if station.node_id in self._is_broker else "data"
        return station.machine.disk(label), station.machine.store(label)

    def stall_disk(self, station: Station, *, everything: bool) -> Undo:
        label = self._label(station)
        device, store = station.machine.disk(label), station.machine.store(label)
        device.begin_stall(everything=everything)
        store.begin_stall()

        def undo() -> None:
            device.stall.end()
            store.stall.end()

        return undo

    def slow_disk(self, station: Station, latency: Latency) -> Undo:
        label = self._label(station)
        usual = self._broker_latency if label in LOGS else self._latency
        device, store = station.machine.disk(label), station.machine.store(label)
        device.sync_latency = store.commit_latency = latency

        def undo() -> None:
            device.sync_latency = store.commit_latency = usual

        return undo

    def fill_disk(self, station: Station, draw: Random) -> Undo:
        label = self._label(station)
        device, store = station.machine.disk(label), station.machine.store(label)
        device.fill(draw.choice((0, 100, 1000)))
        store.fill(draw.choice(STORE_REFUSALS))

        def undo() -> None:
            device.capacity_bytes = None
            store.fill(0.0)

        return undo

    def fail_logs(self, station: Station, draw: Random) -> Undo:
        """The next operation of a kind fails; a directory that was given up for it works after a restart."""
        label = self._label(station)
        device, store = station.machine.disk(label), station.machine.store(label)
        if draw.random() < 0.2:
            store.fail()
        else:
            device.fail(draw.choice(("sync", "sync", "sync", "append", "read")), number=errno.EIO)

        def undo() -> None:
            device.faults.clear()
            store.faults.clear()
            app = self._simulation.broker(station)
            if app is not None and app.has_failed_directory():
                station.kill()
                station.start()

        return undo

    def crash_at(self, station: Station, draw: Random, *, is_vote: bool) -> Undo:
        if station.node_id not in self._is_broker:
            return super().crash_at(station, draw, is_vote=is_vote)
        label = self._label(station)
        device, store = station.machine.disk(label), station.machine.store(label)
        station.machine.crash_loss = draw.choice(list(Loss))
        if draw.random() < 0.7:
            device.crash_at_operation = device.operations + draw.randrange(1, 40)
        else:
            store.crash_at_commit = draw.randrange(1, 6)

        def undo() -> None:
            device.crash_at_operation = store.crash_at_commit = None
            station.start()

        return undo

    def flip_in_log(self, station: Station, partition: PartitionId, draw: Random) -> str | None:
        """A bit of a stored batch changes: one below the recovery point, since past that a batch that does not read is
        what a loss of power leaves (design, rule of safety 4). None if there is no such batch."""
        app = self._simulation.broker(station)
        log = None if app is None else app.logs.get(partition)
        home = None if app is None else app.logs.directory_of(partition)
        if app is None or log is None or home is None:
            return None
        device, found = station.machine.disk(self.labels[app.logs.directories.index(home)]), []
        for path, _ in device.files():
            if not path.startswith(f"{log.path}/") or not path.endswith(".log"):
                continue
            data, position = device.durable(path), 0
            while position + 61 <= len(data):
                try:
                    header = read_header(data, position)
                except TidelogError:
                    break
                if header.next_offset <= log.recovery_point:
                    found.append((path, position, header.size))
                position += header.size
        if not found:
            return None
        path, position, size = draw.choice(found)
        at = position + draw.randrange(COVERED_FROM, size)
        device.flip_bit(path, at, draw.randrange(8))
        return f"a bit of {path} is flipped at {at}"


def is_alive(app: Any) -> bool:
    return app is not None and app.context.station.context is app.context
