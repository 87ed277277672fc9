"""One run of a whole cluster: controllers, brokers with their logs, clients. Seed in, verdict out.

    n1..n3        controllers, or combined nodes: a controller and a broker in one process
    b11..b14      brokers of their own, where controllers stand apart; beside combined nodes perhaps one more
    c101, c102    clients (`broker_workload.Client`), each with producers and readers of every partition
    c103          an operator: makes, moves and removes topics

Faults first (`broker_faults`), then everything is healed and must go on: every partition is led with all of its
replicas in sync, every write is acknowledged, readers have read to the end, and all replicas are equal.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from simulation.broker_checker import ClusterChecker, KnownPartition, KnownTopic, ReplicaChecker, sound_batches
from simulation.broker_faults import FAULTS, OPENING_FAULTS, BrokerNemesis, draw_broker_plan, draw_opening_plan
from simulation.broker_node import BrokerApp, BrokerStack, is_alive
from simulation.broker_workload import ACKS_ALL, ACKS_LEADER, Client, Operator
from simulation.checkers import RaftChecker
from simulation.cluster import Cluster, Station
from simulation.metadata_sim import MetadataSimulation, draw_metadata_shape
from simulation.nemesis import PlanStep
from simulation.raft_sim import LEADER_S, Result, Shape, run_simulation
from tidelog.metadata.image import Partition
from tidelog.model.errors import CorruptBatchError, DamagedLogError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.raft.membership import Member, Membership
from tidelog.replication.leading import Leading
from tidelog.replication.replicas import ReplicaConfig
from tidelog.world.simulated import Latency, SimNode, SimulationError, SimWorld

CLIENTS = (NodeId(101), NodeId(102))
OPERATOR = NodeId(103)
BEGIN_S = 2.0
"""Faults begin when there is something to harm."""
SETTLE_S = 40.0
"""Keep-alive finds a silent stream after six seconds, and a broker may need two of them, one after the other."""
REREADS_MAX = 10
SCRUBS_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerShape(Shape):
    """What a seed decides about a run, beside what it decides about its controllers."""

    is_combined: bool
    brokers: int
    topics: tuple[str, ...]
    """`plain` (3 replicas, two in sync to write), `weak` (one is enough), `unclean` (may lose data)."""
    operations: tuple[int, ...]
    """How often a topic is made, deleted, moved, its preferred leader elected, nothing."""
    lag_ms: int
    session_ms: int
    stall_ms: int
    checkpoint_ms: int
    replica: ReplicaConfig
    opening_grace_ms: int
    """A broker that starts registers after so long, whether its logs are open or not."""
    recovery: Latency
    """How long a log that has to be read takes, beside the work itself."""
    directories: int = 1
    """Of logs, on each broker. With two of them an operator moves replicas from one to the other."""
    deletes: float = 0.0
    """How often a reader of a partition deletes some of its oldest records."""


def draw_broker_shape(seed: int) -> BrokerShape:
    base = draw_metadata_shape(seed)
    draw, of_start, of_logs = (Random(f"{seed}/brokers{more}") for more in ("", "/start", "/logs"))
    fast = Latency(0.0002, 0.001, 0.01, 0.01)
    values = {field.name: getattr(base, field.name) for field in fields(Shape)}
    values.update(
        stack="brokers",
        spares=0,
        fault_s=BEGIN_S + draw.choice((3.0, 5.0, 8.0)),
        client_pause_s=draw.choice((0.05, 0.1, 0.2)),
        segment_bytes=draw.choice((700, 2_000, 1 << 20)),
        latency=draw.choice((fast, fast, Latency(0.001, 0.02))),
        disk_latency=draw.choice((Latency(0.0002, 0.001), Latency(0.0002, 0.001), Latency(0.001, 0.02, 0.02, 0.1))),
    )
    is_small = draw.random() < 0.4
    return BrokerShape(
        **values,
        is_combined=draw.random() < 0.5,
        brokers=draw.choice((3, 3, 4)),
        topics=draw.choice((("plain",), ("plain",), ("plain", "weak"), ("plain", "weak"), ("plain", "unclean"))),
        operations=draw.choice(((0, 0, 0, 1, 5), (2, 2, 2, 1, 0), (0, 0, 4, 1, 1))),
        lag_ms=draw.choice((500, 1_000, 2_000)),
        session_ms=draw.choice((1_000, 1_500)),
        stall_ms=draw.choice((400, 1_000)),
        checkpoint_ms=draw.choice((100, 800)),
        replica=ReplicaConfig(
            fetch_message_bytes=400 if is_small else 1 << 20,
            inflight_bytes_max=1_000 if is_small else 8 << 20,
            partition_inflight_bytes_max=600 if is_small else 4 << 20,
            repair_retry_ms=200,
            scrub_delay_ms=500,
            partitions_per_slice=draw.choice((1, 2, 200)),
            settlers_max=of_start.choice((1, 32)),
        ),
        opening_grace_ms=of_start.choice((0, 0, 500)),
        recovery=of_start.choice((Latency(0.0, 0.0), Latency(0.0, 0.5), Latency(0.0, 0.05, 0.3, 2.5))),
        directories=of_logs.choice((1, 1, 2)),
        deletes=of_logs.choice((0.0, 0.0, 0.05)),
    )


class BrokerSimulation(MetadataSimulation):
    """See the module's docstring. What the nemesis needs is the bases'."""

    shape: BrokerShape
    stack: BrokerStack

    def __init__(self, world: SimWorld, seed: int, shape: BrokerShape, *, only: Collection[int] | None = None) -> None:
        self.world = world
        self.seed = seed
        self.shape = shape
        draw = world.random("metadata-shape")
        self.snapshot_bytes = draw.choice((10_000, 1 << 20))
        self.tail_snapshot_bytes = draw.choice((5_000, 1 << 20))
        self.decision_bytes_max = 1 << 20
        self.checker = RaftChecker(self.fail, world.scheduler.trace)
        self.metadata = ClusterChecker(self.checker.history, self.fail)
        self.replica_checker = ReplicaChecker(self.fail, self._committed_partition)
        self.stack = self._new_stack()
        self.cluster = Cluster(world)
        self.apps: dict[str, BrokerApp] = {}
        self.rotten: dict[PartitionId, Station] = {}
        """On which broker the files of a partition have rotted."""
        self.observers: list[Station] = []
        self._ids = world.random("ids")
        self._make_nodes()
        self.broker_nodes = [station.node_id for station in self.brokers]
        self.users: list[Client] = []
        self._make_clients()
        self.cluster.network.latency = shape.latency
        self.plan = [step for step in self._draw_plan(world.random("faults")) if only is None or step.number in only]
        self.nemesis = self._new_nemesis()

    # -- what a cluster with other clients has of its own

    def _new_stack(self) -> BrokerStack:
        return BrokerStack(self)

    def _make_clients(self) -> None:
        for at, node in enumerate(CLIENTS):
            client = Client(
                self.replica_checker,
                self.broker_nodes,
                self.world.random(f"client/{node}"),
                self.fail,
                pause_s=self.shape.client_pause_s,
                rack=f"rack-{int(self.broker_nodes[at]) % 10}",
                deletes=self.shape.deletes,
                is_leader=self._is_leader,
                on_rot=self._rot_was_served,
            )
            self.users.append(client)
            self.cluster.add(f"c{node}", node, client.run)
        self.operator = Operator(self, self.world.random("operator"), self.fail)
        self.cluster.add(f"c{OPERATOR}", OPERATOR, self.operator.run)

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        span = {"from_s": BEGIN_S, "until_s": self.shape.fault_s}
        return [*draw_broker_plan(draw, **span), *draw_opening_plan(self.world.random("opening"), **span)]

    def _new_nemesis(self) -> BrokerNemesis:
        return BrokerNemesis(self, self.plan, (*FAULTS, *OPENING_FAULTS))

    def _make_nodes(self) -> None:
        shape, stack = self.shape, self.stack
        program = stack.combined_program(self) if shape.is_combined else stack.program(self)
        founders = [self.cluster.add(f"n{number}", NodeId(number), program) for number in (1, 2, 3)]
        for station in founders:
            self.new_directory(station)
            stack.attach(station)
        self.founding = Membership(tuple(Member(s.node_id, s.durable["directory"]) for s in founders))
        for station in founders:
            station.durable["founding"] = self.founding
        self.controllers = [station.node_id for station in founders]
        self.quorum = founders
        self.brokers = founders[:] if shape.is_combined else []
        for number in range(len(self.brokers), shape.brokers):
            self.brokers.append(self.cluster.add(f"b{11 + number}", NodeId(11 + number), stack.broker_program()))
        for station in self.brokers:
            stack.attach_broker(station, shape.disk_latency)
        self.stations = [*founders, *(station for station in self.brokers if station not in founders)]

    # -- what others ask

    def broker(self, station: Station) -> BrokerApp | None:
        """The broker's process on this machine, if it runs."""
        app = self.apps.get(station.name)
        return app if is_alive(app) else None

    def crashed(self, who: str, error: BaseException) -> None:
        if not self.world.scheduler.failures:
            self.world.scheduler.fail(who, "an error of our own in the background", error)

    def made(self, topic: KnownTopic) -> None:
        """A topic is there: clients begin to work on it."""
        self.world.scheduler.trace("operator", f"{topic.name} is {topic.topic_id}")
        for number, known in enumerate(self.replica_checker.add(topic)):
            first, second = self.users if number % 2 == 0 else self.users[::-1]
            first.add(known, ACKS_ALL)
            second.add(known, self._ids.choice((ACKS_ALL, ACKS_LEADER, ACKS_LEADER, None)))

    def _is_leader(self, broker: int, known: KnownPartition) -> bool:
        """In the newest epoch, as the quorum has it and the broker itself."""
        self.metadata.advance()
        partition = self.metadata.image.partition(known.partition_id.topic_id, known.partition_id.partition)
        return partition is not None and partition.leader == broker and self._is_led_here(known, partition)

    def leader_stations(self) -> list[Station]:
        leaders = {
            partition.leader
            for topic in self.metadata.image.topics.values()
            for partition in topic.partitions.values()
            if partition.leader >= 0
        }
        return [station for station in self.brokers if int(station.node_id) in leaders]

    def are_all_in_sync(self) -> bool:
        """Every partition has all of its replicas in sync, on disks of which no error is to come."""
        for station in self.brokers:
            for label in self.stack.labels:
                if station.machine.disk(label).faults._armed or station.machine.store(label).faults._armed:
                    return False
        return bool(self.metadata.image.topics) and all(
            partition.leader >= 0 and set(partition.isr) == set(partition.replicas) and not partition.is_reassigning
            for topic in self.metadata.image.topics.values()
            for partition in topic.partitions.values()
        )

    def _rot_was_served(self, broker: int, known: KnownPartition, offset: int) -> None:
        """An operator who hears of it has the log checked."""
        station = self.cluster.station(NodeId(broker))
        app = self.broker(station)
        if self.rotten.get(known.partition_id) is not station:
            self.fail(station.name, f"{known}: serves from {offset} on what is not sound, and no bit of it has changed")
        replica = None if app is None else app.replicas.get(known.partition_id)
        if app is not None and replica is not None and not app.context.node.loop.is_held:
            self.world.scheduler.trace("operator", f"{station.name}: rot in {known} at {offset} or later")
            app.context.node.loop.call_soon(self._scrub_one, app, replica, offset)

    def _scrub_one(self, app: BrokerApp, replica: Any, offset: int) -> None:
        app.replicas.found_rot(replica, offset)

    # -- the run

    @property
    def acknowledged(self) -> int:
        return self.replica_checker.acknowledged

    @property
    def reads(self) -> int:
        return self.replica_checker.reads

    @property
    def faults(self) -> dict[str, int]:
        return self.nemesis.counts

    def run(self) -> None:
        self._run_faults()
        for client in self.users:
            client.is_stopping = True
        self._demand("writes are not answered", lambda: not any(client.busy for client in self.users), SETTLE_S)
        self._scrub()
        self._demand("replicas do not converge", self._has_converged, SETTLE_S)
        self.metadata.advance()
        self._check_logs()

    def _run_faults(self) -> None:
        """Until they have ended, and every partition is whole."""
        for station in self.cluster.stations.values():
            station.start()
        self.world.run_for(self.shape.fault_s)
        self.world.scheduler.trace("nemesis", "all faults end")
        self.nemesis.stop()
        self.operator.is_stopping = True
        for station in self.brokers:
            for label in self.stack.labels:
                station.machine.disk(label).crash_at_operation = station.machine.store(label).crash_at_commit = None
            app = self.broker(station)
            if app is not None and (app.is_stopping or app.has_failed_directory()):
                station.kill()
        self.cluster.heal()
        self._demand("nobody leads", self._is_led, LEADER_S)
        self._demand("topics are not made", lambda: len(self.operator.topics) >= len(self.shape.topics), SETTLE_S)
        self._demand("partitions are not whole", self._are_whole, SETTLE_S)

    def _committed_partition(self, partition_id: PartitionId) -> Partition | None:
        self.metadata.advance()
        return self.metadata.image.partition(partition_id.topic_id, partition_id.partition)

    def _partitions(self) -> list[tuple[KnownPartition, Any]]:
        """Those that exist."""
        image = self.metadata.image
        found = []
        for known in self.replica_checker.partitions.values():
            partition = image.partition(known.partition_id.topic_id, known.partition_id.partition)
            if partition is not None:
                found.append((known, partition))
        return found

    def _are_whole(self) -> bool:
        return self.are_all_in_sync() and all(self._is_led_here(known, found) for known, found in self._partitions())

    def _is_led_here(self, known: KnownPartition, partition: Any) -> bool:
        app = self.broker(self.cluster.station(NodeId(partition.leader)))
        leading = None if app is None else app.replicas.leading(known.partition_id)
        return leading is not None and leading.leader_epoch == partition.leader_epoch

    def _has_converged(self) -> bool:
        if not self._are_whole():
            return False
        for known, partition in self._partitions():
            states = {self._state(broker, known.partition_id) for broker in partition.replicas}
            if len(states) != 1 or None in states:
                return False
            (state,) = states
            assert state is not None
            if state[1] != partition.start_offset:
                return False
            if not known.topic.delete_asked and not all(c.has_read(known, state[0]) for c in self.users):
                return False
        apps = [self.broker(station) for station in self.brokers]
        hosted: dict[int, set[PartitionId]] = {int(node): set() for node in self.broker_nodes}
        for topic in self.metadata.image.topics.values():
            for number, partition in topic.partitions.items():
                for broker in partition.replicas:
                    hosted[broker].add(PartitionId(TopicId(topic.topic_id), number))
        return all(app is not None and set(app.logs.known()) == hosted[app.agent.broker] for app in apps)

    def _state(self, broker: int, partition_id: PartitionId) -> tuple[int, ...] | None:
        """Where a replica stands, if it stands still: all that it has is synced and known as committed."""
        app = self.broker(self.cluster.station(NodeId(broker)))
        replica = None if app is None else app.replicas.get(partition_id)
        if replica is None or replica.log is None or replica.role is None or replica.log.damaged is not None:
            return None
        log, role = replica.log, replica.role
        if isinstance(role, Leading) and not role.state.is_confirmed:
            return None
        is_still = log.end_offset == log.durable_end == role.high_watermark
        return (log.start_offset, log.end_offset)[::-1] if is_still else None

    def _read(self, app: BrokerApp, partition_id: PartitionId) -> bytes | int:
        """The whole log of a replica; the offset at which it cannot be read."""

        async def read(_node: SimNode) -> bytes | int:
            log = app.logs.get(partition_id)
            assert log is not None, f"{app.name} has a log of {partition_id}"
            data, offset = b"", int(log.start_offset)
            while offset < log.end_offset:
                try:
                    found = await log.read(offset, bytes_max=1 << 24)
                except (CorruptBatchError, DamagedLogError):
                    return offset
                before = offset
                for _, following, batch in sound_batches(found.data):
                    data, offset = data + batch, following
                if offset == before:
                    return offset
            return data

        return self.world.run(app.context.node, read, timeout=SETTLE_S)

    def _scrub(self) -> None:
        """Rot that nobody has met so far is found, and mended from the other replicas."""
        for _ in range(SCRUBS_MAX):
            bad = 0
            for partition_id, station in self.rotten.items():
                app = self.broker(station)
                replica = None if app is None else app.replicas.get(partition_id)
                if app is None or replica is None or replica.log is None or replica.log.damaged is not None:
                    continue
                found = self._read(app, partition_id)
                if isinstance(found, int):
                    self.world.scheduler.trace("nemesis", f"{station.name}: rot is found at {found} of {partition_id}")
                    app.context.node.loop.call_soon(self._scrub_one, app, replica, found)
                    bad += 1
            if not bad:
                return
            self.world.run_for(0.2)
            self._demand("partitions are not whole after a scrub", self._are_whole, SETTLE_S)
        raise SimulationError(f"rot is still found after {SCRUBS_MAX} scrubs")

    def _bounds(self, known: KnownPartition, partition: Any) -> set[tuple[int, int] | None]:
        apps = [self.broker(self.cluster.station(NodeId(broker))) for broker in partition.replicas]
        replicas = [None if app is None else app.replicas.get(known.partition_id) for app in apps]
        logs = [None if replica is None else replica.log for replica in replicas]
        return {None if log is None else (int(log.start_offset), int(log.end_offset)) for log in logs}

    def _are_alike(self) -> bool:
        return all(len(self._bounds(known, partition)) == 1 for known, partition in self._partitions())

    def _check_logs(self) -> None:
        for known, partition in self._partitions():
            for _ in range(REREADS_MAX):
                # A write that was on its way when all was whole may reach its leader now, or while the logs are read.
                self._demand("the logs of replicas do not begin and end alike", self._are_alike, SETTLE_S)
                bounds, logs = self._bounds(known, partition), {}
                for broker in partition.replicas:
                    app = self.broker(self.cluster.station(NodeId(broker)))
                    assert app is not None, "all run"
                    found = self._read(app, known.partition_id)
                    if isinstance(found, int):
                        self.fail(app.name, f"{known} cannot be read at {found}")
                    else:
                        logs[app.name] = found
                if self._bounds(known, partition) == bounds:
                    break
            (bound,) = bounds
            self.replica_checker.check_end(known, logs, start=0 if bound is None else bound[0])
        self.world.check()

    def _describe(self, station: Station) -> str:
        parts = []
        if station in self.quorum:
            parts.append(super()._describe(station))
        app = self.broker(station)
        if station in self.brokers and app is None:
            parts.append(f"{station.name} has no broker")
        if app is not None:
            image = app.tail.image
            parts.append(f"{station.name} broker epoch {app.agent.broker_epoch} fenced {app.agent.is_fenced}")
            for replica in app.replicas.all():
                role, log = replica.role, replica.log
                ends = "no log" if log is None else f"{log.start_offset}..{log.durable_end}..{log.end_offset}"
                parts.append(
                    f"  {replica.topic}-{replica.partition_id.partition} {type(role).__name__} {ends} "
                    f"hw {replica.high_watermark} {replica.partition} offline {replica.offline} "
                    f"damaged {None if log is None else log.damaged}"
                )
            if len(image.topics) != len(self.metadata.image.topics):
                parts.append(f"  knows {len(image.topics)} topics of {len(self.metadata.image.topics)}")
        return "\n".join(parts)


def run_broker_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_broker_shape(seed)
    return run_simulation(seed, shape, lambda world: BrokerSimulation(world, seed, shape, only=only))
