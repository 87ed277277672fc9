"""A broker's process as in production: agent, tail, logs, replicas, service, and the public API over the transport.

Its logs lie on the disk "logs-0", or on that and "logs-1", its copy of the metadata and the mark of a clean stop on
"broker". A combined node runs a controller (disk "data") in the same process: whatever kills one kills both. Faults of
disks strike one of those with logs.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from simulation.cluster import Context, Program, Station
from simulation.driver_node import CLUSTER_ID
from simulation.metadata_sim import MetadataStack
from simulation.nemesis import STORE_REFUSALS, Undo
from simulation.raft_sim import RaftSimulation
from tidelog.log.batch import read_header
from tidelog.log.config import LogConfig
from tidelog.log.logs import Logs, LogsConfig
from tidelog.log.scan import scan_log
from tidelog.metadata import configs
from tidelog.metadata.broker_side import BrokerAgent, BrokerConfig, with_clean_stop
from tidelog.metadata.brokers import Register
from tidelog.metadata.features import supported
from tidelog.metadata.tail import MetadataTail
from tidelog.model.errors import TidelogError
from tidelog.model.ids import DirectoryId, NodeId, PartitionId
from tidelog.replication.announcing import announce, close_logs, working_directories
from tidelog.replication.replica import Replica
from tidelog.replication.replicas import Replicas
from tidelog.replication.service import PartitionService
from tidelog.rpc.door import METHODS, Caller, Kind, Method
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.log_door import LogDoor
from tidelog.world.simulated import Latency, Loss, SimLoop
from tidelog.world.work import Work

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation

T = TypeVar("T")

LOGS = ("logs-0", "logs-1")
BROKER = "broker"
COVERED_FROM = 16
"""Base offset, length and leader epoch of a batch are not covered by its CRC, only by that of a sealed segment."""


class BrokerApp:
    """One process: what checks, clients and the nemesis see of it."""

    def __init__(
        self, context: Context, tail: MetadataTail, agent: BrokerAgent, logs: Logs, replicas: Replicas
    ) -> None:
        self.context = context
        self.tail = tail
        self.agent = agent
        self.logs = logs
        self.replicas = replicas
        self.grace_ms = 0
        self.service = PartitionService(replicas)
        self.is_stopping = False
        self.is_stopped = False
        self.looked: dict[Replica, tuple[object, int]] = {}
        """What `ReplicaChecker` has looked at: the role, and its high watermark."""

    @property
    def name(self) -> str:
        return self.context.station.name

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.tail.run())
                group.create_task(self._register())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _register(self) -> None:
        await announce(self.agent, self.logs, grace_ms=self.grace_ms)
        await self.agent.run()

    async def stop(self) -> None:
        """Controlled shutdown, as a node does it."""
        self.is_stopping = True
        epoch = await self.agent.shut_down()
        await self.replicas.close()
        await close_logs(self.logs, self.context.node.store(BROKER), epoch)
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


def serve_log(context: Context, app: BrokerApp) -> None:
    """The service `Log` of the public API, as clients of the simulator call it."""
    door = LogDoor(app.service, lambda: app.tail.image, DoorLimits())
    for method in METHODS.values():
        if method.service == "Log" and method.kind is Kind.UNARY:
            context.transport.serve(method.wire_name, _handler(door, method))


def _handler(door: LogDoor, method: Method) -> Callable[[NodeId, bytes], Awaitable[bytes]]:
    async def answer(node: NodeId, data: bytes) -> bytes:
        response = await getattr(door, method.handler)(method.parse(data), Caller(peer=f"node {node}"))
        encoded: bytes = response.SerializeToString()
        return encoded

    return answer


class BrokerStack(MetadataStack):
    """Builds controllers, brokers and combined nodes, and harms the devices under them."""

    def __init__(self, simulation: "BrokerSimulation") -> None:
        super().__init__()
        self._simulation = simulation
        self._brokers: dict[SimLoop, BrokerApp] = {}
        self._is_broker: set[NodeId] = set()
        self._broker_latency = Latency(0.0002, 0.001)
        self.labels = LOGS[: simulation.shape.directories]
        self._which = simulation.world.random("directories")

    def broker_program(self) -> Program:
        async def run(context: Context) -> None:
            await self._run_broker(context)

        return run

    def combined_program(self, simulation: RaftSimulation) -> Program:
        controller = self.program(simulation)

        async def run(context: Context) -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(controller(context))
                    group.create_task(self._run_broker(context))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors

        return run

    async def _run_broker(self, context: Context) -> None:
        node, simulation = context.node, self._simulation
        tail = MetadataTail(
            disk=node.disk(BROKER),
            path="metadata",
            transport=context.transport,
            sources=lambda: simulation.controllers,
            work=node.work,
            random=node.random,
            snapshot_bytes=simulation.tail_snapshot_bytes,
        )
        await tail.open()
        simulation.metadata.seen(context.station.name, tail.offset, tail.image)
        broker = int(context.node_id)

        def config_of(partition: PartitionId) -> LogConfig:
            topic = tail.image.topics.get(partition.topic_id)
            return configs.log_config(tail.image, "" if topic is None else topic.name)

        logs = await Logs.open(
            [
                (node.disk(label), node.store(label), DirectoryId(UUID(int=broker + number * 1_000)))
                for number, label in enumerate(self.labels)
            ],
            work=SlowRecovery(node.work, simulation.shape.recovery, simulation.world.random(f"recovery/{broker}")),
            clock=node.clock,
            config_of=config_of,
            config=LogsConfig(checkpoint_interval_ms=simulation.shape.checkpoint_ms),
        )
        registration = Register(
            cluster_id=CLUSTER_ID,
            broker=broker,
            incarnation=UUID(int=node.random.getrandbits(128), version=4),
            endpoints=(("CLIENT", "PLAINTEXT", context.station.name, 9092),),
            rack=f"rack-{broker % 10}",
            directories=working_directories(logs),
            features=supported(),
        )
        agent = BrokerAgent(
            with_clean_stop(registration, node.store(BROKER)),
            context.transport,
            tail,
            lambda: simulation.controllers,
            BrokerConfig(heartbeat_ms=300, silence_ms=1_000, call_timeout_ms=1_000),
            node.random,
        )
        replicas = Replicas(
            me=context.node_id,
            transport=context.transport,
            logs=logs,
            tail=tail,
            agent=agent,
            clock=node.clock,
            config=simulation.shape.replica,
            random=node.random,
        )
        replicas.on_crash = lambda error: simulation.crashed(context.station.name, error)
        app = self._new_app(context, tail, agent, logs, replicas)
        app.grace_ms = simulation.shape.opening_grace_ms
        await replicas.start()
        self._serve(context, app)
        simulation.apps[context.station.name] = app
        self._brokers[node.loop] = app
        if context.app is None and context.station.name.startswith("b"):
            context.app = app
        await app.run()

    def _new_app(
        self, context: Context, tail: MetadataTail, agent: BrokerAgent, logs: Logs, replicas: Replicas
    ) -> BrokerApp:
        """Before the replicas start."""
        return BrokerApp(context, tail, agent, logs, replicas)

    def _serve(self, context: Context, app: BrokerApp) -> None:
        serve_log(context, app)

    def _stepped(self, loop: SimLoop) -> None:
        super()._stepped(loop)
        app = self._brokers.get(loop)
        if app is not None and not loop.is_dead:
            self._simulation.replica_checker.look(app)

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
