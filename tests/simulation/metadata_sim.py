"""One run of a metadata quorum: controllers and brokers, seed in, verdict out.

    n1...       controllers as in production: `metadata.controller_node` on driver, storage and log, under the nemesis
    b11..b15    brokers: `metadata.broker_lifecycle` with a toy leader that shrinks and grows its ISRs; they are killed,
                paused, stopped and started all the time, and their disks fill up, stall, fail and lose data
    c101..c103  admin clients; the last one only asks

Faults first, then healing and progress: clients are answered, all brokers are unfenced, and all images end equal.
"""

import asyncio
import errno
from collections.abc import Callable, Collection
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

from simulation.checkers import RaftChecker
from simulation.cluster import Cluster, Context, Program, Station
from simulation.driver_node import CLUSTER_ID, DriverStack
from simulation.invariants import Invariants
from simulation.metadata_checker import MetadataChecker
from simulation.metadata_workload import BROKERS, Admin, AdminChecker
from simulation.more_faults import MORE_FAULTS, draw_more_steps
from simulation.nemesis import STORE_REFUSALS, Nemesis, draw_plan
from simulation.raft_sim import CONVERGE_S, LEADER_S, RaftSimulation, run_simulation
from simulation.run_result import Result, Shape, draw_shape
from tidelog.metadata import brokers
from tidelog.metadata.broker_lifecycle import store_clean_stop
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.metadata.partitions import AlteredPartition, AlterPartition
from tidelog.model.errors import RemoteError, TransportError, first_error
from tidelog.model.ids import DirectoryId, NodeId, Offset
from tidelog.raft.core import RaftCore
from tidelog.raft.driver import DriverConfig
from tidelog.raft.membership import Member, Membership
from tidelog.server.controller import ControllerRole, format_if_new
from tidelog.server.membership import BrokerMembership
from tidelog.server.role_config import broker_config, controller_config
from tidelog.testing.simulated_world import simulated_world
from tidelog.world.simulated import Loss, SimWorld
from tidelog.world.simulated.loop import SimFuture

METADATA = "data"
"""The disk with the metadata."""
ADMINS = (NodeId(101), NodeId(102), NodeId(103))
READER = NodeId(103)
FAULT_S = {8.0: 4.0, 12.0: 6.0, 20.0: 10.0}
"""Shorter than for Raft alone: a second costs more here, and many short runs find more than few long ones."""
BROKER_FAULTS = {
    "kill": 4, "power": 3, "pause": 2, "stop": 3, "damage": 2, "full": 1, "stall": 1, "fail": 1, "crash": 2,
}  # fmt: skip
"""How often each strikes a broker."""
ANSWERS_AFTER = 2
"""Operations of each client that must be answered once faults have ended."""


class ControllerApp:
    """What checks and the nemesis see of a controller's process."""

    def __init__(self, node: ControllerNode, failure: SimFuture) -> None:
        self.node = node
        self.driver = node.driver
        self.machine = node.machine
        self.failure = failure

    @property
    def core(self) -> RaftCore:
        return self.driver.core

    async def change_membership(self, *, add: Member | None = None, remove: NodeId | None = None) -> Offset:
        return await self.driver.change_membership(add=add, remove=remove)

    def transfer(self, target: NodeId | None) -> None:
        self.driver.transfer(target)

    def take_snapshot(self) -> None:
        if self.machine.offset > self.core.log.snapshot.offset:
            self.driver._take_snapshot()


class Failure:
    """Ends the program of a process with the first error that a role reports (`NodeWorld.on_failure`)."""

    def __init__(self, context: Context) -> None:
        self.future = context.node.loop.create_future()

    def __call__(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class MetadataStack(DriverStack):
    """Builds controllers."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata: MetadataChecker | None = None

    def program(self, simulation: RaftSimulation) -> Program:
        assert isinstance(simulation, MetadataSimulation)
        self._watch(simulation)

        async def run(context: Context) -> None:
            failure = Failure(context)
            role = await self._open_controller(simulation, context, failure)
            await self._start_controller(simulation, context, role, failure)
            await failure.future

        return run

    def _watch(self, simulation: "MetadataSimulation") -> None:
        """Has the checkers inspect every controller that starts, after each of its events."""
        self._checker = simulation.checker
        self._metadata = simulation.metadata
        self._invariants = simulation.invariants
        self._latency = simulation.shape.disk_latency

    async def _open_controller(
        self, simulation: "MetadataSimulation", context: Context, failure: Failure, *, is_combined: bool = False
    ) -> ControllerRole:
        """Opens the controller of a node, as `server.node` does; formats its directory if the disk is new."""
        shape = simulation.shape
        defaults = controller_config()
        config = replace(
            defaults,
            controller=replace(
                defaults.controller,
                driver=DriverConfig(raft=shape.raft, snapshot_bytes=simulation.snapshot_bytes),
                decision_bytes_max=simulation.decision_bytes_max,
            ),
            segment_bytes=shape.segment_bytes,
            is_combined=is_combined,
        )
        world = simulated_world(
            context.node,
            context.transport,
            cluster_id=CLUSTER_ID,
            controllers=lambda: simulation.controllers,
            metadata=METADATA,
            logs={},
            on_failure=failure,
        )
        durable = context.station.durable
        membership = durable.get("founding", Membership())
        await format_if_new(world, config, directory=durable["directory"], membership=membership)
        return await ControllerRole.open(world, config)

    async def _start_controller(
        self, simulation: "MetadataSimulation", context: Context, role: ControllerRole, failure: Failure
    ) -> None:
        audit = self._watch_messages(role.node.driver)
        await role.start()
        app = context.app = ControllerApp(role.node, failure.future)
        look = self._watch_node(context, role.node.driver, audit)
        context.node.loop.watch(self._check(app, context.station.name, look))

    def _check(self, app: ControllerApp, name: str, look: Callable[[], None]) -> Callable[[], None]:
        """Called after every event: the cheap questions first."""
        assert self._metadata is not None
        metadata, invariants, machine = self._metadata, self._invariants, app.machine
        looked_offset, looked_image = -1, None

        def check() -> None:
            nonlocal looked_offset, looked_image
            look()
            invariants.runtime(name, machine)
            if looked_offset != machine.offset or looked_image is not machine.image:
                looked_offset, looked_image = machine.offset, machine.image
                metadata.look(name, machine.offset, machine.image, is_open=machine.is_torn)
                invariants.controller(name, machine)

        return check


class BrokerNode:
    """A broker's process without logs: its membership, and a toy leader of the partitions that it leads."""

    def __init__(self, simulation: "MetadataSimulation", context: Context, membership: BrokerMembership) -> None:
        self.membership = membership
        self.tail = membership.tail
        self.agent = membership.agent
        self.is_stopping = False
        self.is_stopped = False
        self._context = context
        self._simulation = simulation
        self._name = context.station.name
        self._random = context.node.random
        self._last: ClusterImage | None = None
        self._epochs: dict[int, int] = {}

    def handed(self, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
        metadata = self._simulation.metadata
        if self._last is not None and older is not self._last:
            self._simulation.fail(self._name, "a delta does not continue the one before")
        self._last = newer
        metadata.handed(self._name, delta, older, newer)
        metadata.seen(self._name, self.tail.offset, newer)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.tail.run())
                group.create_task(self.membership.run())
                group.create_task(self._lead())
                group.create_task(self._lose())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _lead(self) -> None:
        """As the leader of its partitions would: followers fall behind and catch up."""
        known: int | None = None
        while True:
            await asyncio.sleep(self._random.uniform(0.02, 1.2))
            epoch = self.agent.broker_epoch
            if epoch is None:
                continue
            if epoch != known:
                known = epoch
                self._simulation.metadata.registered(self._name, self.agent.broker, epoch)
            items = self._changes(self.tail.image)
            if not items:
                continue
            request = AlterPartition(broker=self.agent.broker, broker_epoch=epoch, partitions=tuple(items))
            try:
                async with asyncio.timeout(3):
                    reply = await self.agent.ask(request)
            except (TransportError, RemoteError, TimeoutError):
                continue
            for item, state in zip(items, reply.partitions, strict=True):
                self._simulation.metadata.altered(self._name, item, state)

    async def _lose(self) -> None:
        """Now and then some replicas are found damaged; once that is reported, nothing from before may count."""
        while True:
            await asyncio.sleep(self._random.expovariate(1 / 2.0))
            epoch, image = self.agent.broker_epoch, self.tail.image
            held = [(topic_id, number) for topic_id, number, _ in image.partitions_on(self.agent.broker)]
            if epoch is None or not held:
                continue
            lost = tuple(self._random.sample(held, min(len(held), self._random.choice((1, 1, 3)))))
            request = ReplicasLost(broker=self.agent.broker, broker_epoch=epoch, replicas=lost)
            try:
                async with asyncio.timeout(3):
                    reply = await self.agent.ask(request)
            except (TransportError, RemoteError, TimeoutError):
                continue
            for place, outcome, reported in zip(lost, reply.items, reply.partition_epochs, strict=True):
                if outcome.error is None:
                    before = image.partition(*place)
                    assert before is not None, "it is held"
                    self._simulation.metadata.lost(self._name, self.agent.broker, place, before, reported)

    def _changes(self, image: ClusterImage) -> list[AlteredPartition]:
        items = []
        for topic_id, number, partition in image.partitions_on(self.agent.broker):
            if partition.leader != self.agent.broker or len(partition.replicas) < 2 or self._random.random() < 0.5:
                continue
            others = [member for member in partition.replicas if member != self.agent.broker]
            if self._random.random() < 0.6:
                isr = [member for member in partition.replicas if image.brokers[member].is_live]
            else:
                isr = [self.agent.broker, *self._random.sample(others, self._random.randrange(len(others)))]
            # A leader knows its followers from when they last connected; that may be a former life of theirs.
            for member in isr:
                if member not in self._epochs or self._random.random() < 0.3:
                    self._epochs[member] = image.brokers[member].broker_epoch
            if set(isr) != set(partition.isr) and self.agent.broker in isr:
                items.append(
                    AlteredPartition(
                        topic_id=topic_id,
                        partition=number,
                        leader_epoch=partition.leader_epoch,
                        partition_epoch=partition.partition_epoch,
                        isr=tuple((member, self._epochs[member]) for member in isr),
                    )
                )
        return items

    async def stop(self) -> None:
        """Controlled shutdown."""
        self.is_stopping = True
        epoch = await self.agent.shut_down()
        await store_clean_stop(self._context.node.store(), epoch)
        self.is_stopped = True


class MetadataSimulation(RaftSimulation):
    """See the module's docstring. What the nemesis needs is the base's."""

    look_every_s = 0.005  # these conditions look at every broker

    def __init__(self, world: SimWorld, seed: int, shape: Shape, *, only: Collection[int] | None = None) -> None:
        self.world = world
        self.seed = seed
        self.shape = shape
        self.stack = MetadataStack()
        draw = world.random("metadata-shape")
        self.snapshot_bytes = draw.choice((1_000, 10_000, 1 << 20))
        self.tail_snapshot_bytes = draw.choice((500, 5_000, 1 << 20))
        self.decision_bytes_max = draw.choice((300, 1_000, 1 << 20))
        self.departures_max = draw.choice((1, 3, 2_500))
        self.checker = RaftChecker(self.fail, world.scheduler.trace)
        self.metadata = MetadataChecker(self.checker.history, self.fail)
        self.invariants = Invariants(self.fail)
        self.cluster = Cluster(world)
        self._ids = world.random("ids")
        program = self.stack.program(self)
        nodes = [NodeId(number) for number in range(1, shape.voters + shape.spares + 1)]
        self.stations = [self.cluster.add(f"n{node}", node, program) for node in nodes]
        for station in self.stations:
            self.new_directory(station)
            self.stack.attach(station)
        founders = self.stations[: shape.voters]
        self.founding = Membership(tuple(Member(s.node_id, s.durable["directory"]) for s in founders))
        for station in founders:
            station.durable["founding"] = self.founding
        self.brokers = [self.cluster.add(f"b{node}", node, self._broker) for node in map(NodeId, BROKERS)]
        for station in self.brokers:
            _lose_power_at_crash_point(station)
        self.observers: list[Station] = []
        """The brokers are; the nemesis leaves them to `_harm_brokers`."""
        self.controllers = nodes
        self._harms: list[asyncio.Task[None]] = []
        self.broker_faults: dict[str, int] = {}
        self.admin_checker = AdminChecker(self.metadata, self.fail)
        self.admins = [
            Admin(
                self.admin_checker,
                nodes,
                world.random(f"admin/{node}"),
                pause_s=shape.client_pause_s,
                only_reads=node == READER,
            )
            for node in ADMINS
        ]
        for node, admin in zip(ADMINS, self.admins, strict=True):
            self.cluster.add(f"c{node}", node, admin.run)
        self.cluster.network.latency = shape.latency
        plan = draw_plan(world.random("faults"), until_s=shape.fault_s)
        plan += draw_more_steps(world.random("more-faults"), plan, until_s=shape.fault_s, observers=0)
        self.plan = [step for step in plan if only is None or step.number in only]
        self.nemesis = Nemesis(self, self.plan, MORE_FAULTS)

    async def _broker(self, context: Context) -> None:
        broker = int(context.node_id)
        failure = Failure(context)
        world = simulated_world(
            context.node,
            context.transport,
            cluster_id=CLUSTER_ID,
            controllers=lambda: self.controllers,
            metadata=METADATA,
            logs={},
            on_failure=failure,
        )
        endpoint = ("CLIENT", "PLAINTEXT", context.station.name, 9092)
        config = broker_config(endpoints=(endpoint,), rack=f"rack-{broker % 3}")
        config = replace(config, metadata_snapshot_bytes=self.tail_snapshot_bytes)
        membership = await BrokerMembership.open(world, config)
        self.metadata.seen(context.station.name, membership.tail.offset, membership.tail.image)
        membership.prepare_registration((DirectoryId(UUID(int=broker)),))
        app = context.app = BrokerNode(self, context, membership)
        membership.tail.subscribe(app.handed)
        await app.run()

    # -- the brokers' own faults

    async def _harm_brokers(self, draw: Random) -> None:
        while True:
            await asyncio.sleep(draw.expovariate(1 / 1.0))
            station = draw.choice(self.brokers)
            if station.is_held_down or station.context is None or station.context.node.loop.is_held:
                continue
            kind = draw.choices(tuple(BROKER_FAULTS), tuple(BROKER_FAULTS.values()))[0]
            self.broker_faults[kind] = self.broker_faults.get(kind, 0) + 1
            self.world.scheduler.trace("nemesis", f"{kind} {station.name}")
            harm = self.world.loop.create_task(self._harm(station, kind, draw.uniform(0.05, 4.0), draw))
            self._harms.append(harm)

    async def _harm(self, station: Station, kind: str, duration_s: float, draw: Random) -> None:
        if kind in ("full", "stall", "fail", "crash"):
            await self._harm_disk(station, kind, duration_s, draw)
            return
        if kind == "pause":
            station.pause()
            await asyncio.sleep(duration_s)
            station.resume()
            return
        if kind == "stop":
            context, app = station.context, station.app
            if context is None or app is None:
                return
            context.node.spawn(app.stop())
            for _ in range(40):
                await asyncio.sleep(0.1)
                if app.is_stopped or station.app is not app:
                    break
        if kind == "power":
            station.lose_power(draw.choice(list(Loss)))
        elif station.is_up:
            station.kill()
        if kind == "damage":
            self.world.scheduler.trace("nemesis", f"{station.name}: {self._damage_broker(station, draw)}")
        await asyncio.sleep(duration_s)
        station.start()

    async def _harm_disk(self, station: Station, kind: str, duration_s: float, draw: Random) -> None:
        """Its disk does not do what it is asked for; the broker may go on, or give up and be started again."""
        device, store = station.machine.disk(), station.machine.store()
        if kind == "full":
            device.fill(draw.choice((0, 100, 1000)))
            store.fill(draw.choice(STORE_REFUSALS))
        elif kind == "stall":
            device.begin_stall(everything=draw.random() < 0.3)
            store.begin_stall()
        elif kind == "fail":
            device.fail(draw.choice(("sync", "append", "read")), number=errno.EIO)
        else:
            station.machine.crash_loss = draw.choice(list(Loss))
            device.crash_at_operation = device.operations + draw.randrange(1, 30)
        await asyncio.sleep(duration_s)
        device.crash_at_operation = None
        device.heal()
        store.heal()
        station.start()

    def _damage_broker(self, station: Station, draw: Random) -> str:
        """What a broker has stored of the metadata is a copy: any of it, or all of it, may be lost."""
        device, store = station.machine.disk(), station.machine.store()
        if draw.random() < 0.1:
            device.wipe()
            return "its copy of the metadata is gone"
        if store.stored and draw.random() < 0.2:
            key = draw.choice(sorted(store.stored))
            store.flip_bit(key, draw.randrange(len(store.stored[key])), draw.randrange(8))
            return f"a bit of {key!r} in the state store is flipped"
        files = [(path, size) for path, size in device.files() if size]
        if not files:
            return "nothing to damage"
        path, size = draw.choice(files)
        position = draw.randrange(size)
        if draw.random() < 0.2:
            device.cut(path, position)
            return f"{path} of {size} bytes is cut to {position}"
        device.flip_bit(path, position, draw.randrange(8))
        return f"a bit of {path} is flipped at {position} of {size}"

    async def _strand_leader(self, draw: Random) -> None:
        """Now and then the leader is cut off from the other controllers, not from brokers and clients, and takes long
        to find out: its answers must not be of the time before."""
        await asyncio.sleep(draw.uniform(2.0, max(3.0, self.shape.fault_s - 5.0)))
        leader = self.checker.leader_now()
        if leader is None or draw.random() < 0.5:
            return
        station, network = self.cluster.station(leader[0]), self.cluster.network
        self.world.scheduler.trace("nemesis", f"strand {station.name}")
        others = [other.node_id for other in self.stations if other is not station]
        links = [link for other in others for link in ((other, leader[0]), (leader[0], other))]
        mine = [link for link in links if not network.is_blocked(*link)]
        for link in mine:
            network.block(*link)
        station.machine.set_clock_rate(0.1)
        await asyncio.sleep(draw.uniform(2.0, 5.0))
        for link in mine:
            network.unblock(*link)
        station.machine.set_clock_rate(1.0)

    # -- the run

    @property
    def acknowledged(self) -> int:
        return self.admin_checker.acknowledged

    @property
    def reads(self) -> int:
        return self.admin_checker.reads

    @property
    def faults(self) -> dict[str, int]:
        return {**self.nemesis.counts, **{f"b-{name}": count for name, count in self.broker_faults.items()}}

    def run(self) -> None:
        with patch.object(brokers, "DEPARTURES_MAX", self.departures_max):
            self._run()

    def _run(self) -> None:
        for station in self.cluster.stations.values():
            station.start()
        harm = self.world.loop.create_task(self._harm_brokers(self.world.random("brokers")))
        strand = self.world.loop.create_task(self._strand_leader(self.world.random("strand")))
        self.world.run_for(self.shape.fault_s)
        self.world.scheduler.trace("nemesis", "all faults end")
        for task in (harm, strand, *self._harms):
            task.cancel()
        self.nemesis.stop()
        for station in self.brokers:
            station.machine.disk().crash_at_operation = None
            if station.app is not None and station.app.is_stopping:
                station.kill()
        self._restart_rotten()
        self.cluster.heal()
        repair = self.world.loop.create_task(self._repair())
        self._demand("nobody leads", self._is_led, LEADER_S)
        self._demand_fencing()
        self._demand_answers()
        self._demand("the membership is not whole", self._is_repaired, CONVERGE_S)
        self._demand("not all brokers are let in", self._are_brokers_live, CONVERGE_S)
        for admin in self.admins:
            admin.is_stopping = True
        self._demand_answers()
        self._demand("images are not equal", self._has_converged, CONVERGE_S)
        repair.cancel()
        self.metadata.advance()
        self.admin_checker.check_end()

    def _demand_fencing(self) -> None:
        """A broker dies at a moment of its own choosing and stays dead: it is fenced, and leads nothing."""
        station = self.world.random("last-death").choice(self.brokers)
        self.world.run_for(self.world.random("last-death-time").choice((0.0, 0.01, 0.3, 2.0)))
        station.kill()
        number = int(station.node_id)

        def is_fenced() -> bool:
            found = self.metadata.image.brokers.get(number)
            return found is None or found.fenced

        self._demand(f"broker {number} is dead, and not fenced", is_fenced, CONVERGE_S)
        station.start()

    def _demand_answers(self) -> None:
        for admin in self.admins:
            admin.must_do = ANSWERS_AFTER
        answered = lambda: all(admin.must_do <= 0 for admin in self.admins)  # noqa: E731
        self._demand("operations are not answered", answered, CONVERGE_S)

    def _are_brokers_live(self) -> bool:
        return all(
            (found := self.metadata.image.brokers.get(int(s.node_id))) is not None
            and found.is_live
            and s.app is not None
            and not s.app.agent.is_fenced
            for s in self.brokers
        )

    def _has_converged(self) -> bool:
        """At one moment all have the same image: NoOps and ISR changes go on, so offsets may differ."""
        leader = self.checker.leader_now()
        if leader is None or not self._are_brokers_live():
            return False
        image = self.metadata.image
        members = (*leader[1].log.membership.voters, *leader[1].log.membership.learners)
        apps: list[Any] = [self.cluster.station(member.node).app for member in members]
        return all(app is not None and app.machine.image == image for app in apps) and all(
            s.app is not None and s.app.tail.image == image for s in self.brokers
        )


def _lose_power_at_crash_point(station: Station) -> None:
    def crash() -> None:
        station.lose_power(station.machine.crash_loss)

    station.machine.disk().on_crash_point = crash


def draw_metadata_shape(seed: int) -> Shape:
    shape = draw_shape(seed, "metadata")
    return replace(
        shape,
        voters=3,
        spares=min(shape.spares, 1),
        fault_s=FAULT_S[shape.fault_s],
        raft=replace(shape.raft, uncommitted_bytes_max=64 << 20),
        segment_bytes=max(shape.segment_bytes, 2000),
    )


def run_metadata_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_metadata_shape(seed)
    return run_simulation(seed, shape, lambda world: MetadataSimulation(world, seed, shape, only=only))
