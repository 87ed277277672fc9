"""One run of a whole cluster: controllers, brokers with their logs, clients. Seed in, verdict out.

    n1..n3        controllers, or combined nodes: a controller and a broker in one process
    b11..b14      brokers of their own, where controllers stand apart; beside combined nodes perhaps one more
    c101, c102    clients (`broker_workload.Client`), each with producers and readers of every partition
    c103          an operator: makes, moves and removes topics

Each seed draws which of these a run has besides (`broker_shape`): compacted topics, whose cleaner is busy;
consumer groups, whose members (m201..m204) read the topics `grouped`; spare controllers (n4, n5), with which voters
come and go.

Faults first (`broker_faults`), then everything is healed and must go on: every partition is led with all of its
replicas in sync, every write is acknowledged, readers have read to the end, and all replicas are equal.
"""

from collections.abc import Collection, Sequence
from random import Random
from typing import Any, Protocol, TypeVar
from uuid import UUID

from simulation.broker_checker import ClusterChecker, KnownPartition, KnownTopic, ReplicaChecker, sound_batches
from simulation.broker_coverage import count_acts, register_features
from simulation.broker_faults import (
    CONTROLLER_FAULTS,
    FAULTS,
    OPENING_FAULTS,
    BrokerNemesis,
    draw_broker_plan,
    draw_membership_plan,
    draw_opening_plan,
    draw_product_plan,
)
from simulation.broker_node import BrokerApp, BrokerStack, is_alive
from simulation.broker_operator import Operator
from simulation.broker_shape import BEGIN_S, BrokerShape, draw_broker_shape, draw_product_shape
from simulation.broker_verification import ReplicaVerifier
from simulation.broker_workload import ACKS_ALL, ACKS_LEADER, Client
from simulation.checkers import RaftChecker
from simulation.cluster import Cluster, Station
from simulation.consumer_groups import ConsumerGroups
from simulation.groups_faults import GROUP_FAULTS, draw_group_steps
from simulation.invariants import Invariants
from simulation.kafka_faults import KAFKA_FAULTS, draw_kafka_plan
from simulation.kafka_workload import KafkaClients
from simulation.metadata_sim import MetadataSimulation
from simulation.nemesis import PlanStep
from simulation.product_checker import ProductChecker
from simulation.product_operator import ProductOperator
from simulation.product_workload import Pipeliner
from simulation.raft_sim import LEADER_S, run_simulation
from simulation.run_result import Result
from tidelog.metadata.image import Partition
from tidelog.model.errors import CorruptBatchError, DamagedLogError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.raft.membership import Member, Membership
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.world.simulated import SimNode, SimulationError, SimWorld

C = TypeVar("C", bound=Client)


class StoppableWriter(Protocol):
    busy: int
    """What it has sent, and has no answer to."""
    is_stopping: bool


CLIENTS = (NodeId(101), NodeId(102))
OPERATOR, PRODUCT_OPERATOR, PIPELINER = NodeId(103), NodeId(104), NodeId(105)
CONVERGE_S = 40.0
"""Keep-alive finds a silent stream after six seconds, and a broker may need two of them, one after the other."""
REREADS_MAX = 10
SCRUBS_MAX = 10
ANY_START = -1
FASTEST_CLOCK = 4.0
"""Of `clock_rate`."""


class BrokerSimulation(MetadataSimulation):
    """See the module's docstring. What the nemesis needs is the bases'."""

    shape: BrokerShape
    stack: BrokerStack
    metadata: ClusterChecker
    processing_s = CONVERGE_S
    """After the healing, until groups have processed everything."""

    def __init__(self, world: SimWorld, seed: int, shape: BrokerShape, *, only: Collection[int] | None = None) -> None:
        self.world = world
        self.seed = seed
        self.shape = shape
        draw = world.random("metadata-shape")
        self.snapshot_bytes = draw.choice((10_000, 1 << 20))
        self.tail_snapshot_bytes = draw.choice((5_000, 1 << 20))
        self.decision_bytes_max = 1 << 20
        self.checker = RaftChecker(self.fail, world.scheduler.trace)
        self.metadata = ClusterChecker(self.checker.history, self.fail, self._elected_uncleanly)
        self.replica_checker = ReplicaChecker(self.fail, self._committed_partition)
        self.replica_checker.now_s = lambda: world.scheduler.now_ns / 1e9
        if shape.product is not None:
            self.replica_checker.expiry_s = shape.product.expiry_ms / 1000 / FASTEST_CLOCK
        self.product_checker = None if shape.product is None else ProductChecker(self, self.fail)
        self.product_operator: ProductOperator | None = None
        self.pipeliner: Pipeliner | None = None
        self.invariants = Invariants(self.fail, lambda name, log: self._is_rotten(name, log.log_id))
        self.replica_checker.shadows.is_rotten = self._is_rotten
        self.metadata.on_unassigned = self.replica_checker.shadows.unassigned
        self.groups = None if shape.groups is None else ConsumerGroups(self, shape.groups)
        self.stack = BrokerStack(self)
        self.cluster = Cluster(world)
        self.apps: dict[str, BrokerApp] = {}
        self.rotten: dict[PartitionId, Station] = {}
        """On which broker the files of a partition have rotted."""
        self.deletes_gone = 0
        """Replicas that have removed a tombstone by the end."""
        self.observers: list[Station] = []
        self._ids = world.random("ids")
        self._make_nodes()
        self.broker_nodes = [station.node_id for station in self.brokers]
        self.users: list[Client] = []
        self._make_clients()
        self.kafka = None if shape.kafka is None else KafkaClients(self, shape.kafka)
        if self.kafka is not None:
            self.kafka.add_machines()
        self.cluster.network.latency = shape.latency
        plan = self._draw_plan(world.random("faults"))
        if self.kafka is not None:
            plan += draw_kafka_plan(world.random("kafka-faults"), from_s=BEGIN_S, until_s=shape.fault_s)
        self.plan = [step for step in plan if only is None or step.number in only]
        more = (*FAULTS, *OPENING_FAULTS, *GROUP_FAULTS, *CONTROLLER_FAULTS, *KAFKA_FAULTS)
        self.nemesis = BrokerNemesis(self, self.plan, more)
        register_features(self)

    # -- what a cluster with other clients has of its own

    def _make_client(self, kind: type[C], node: NodeId, at: int) -> C:
        """One that is in the rack of a broker."""
        return kind(
            self.replica_checker,
            self.broker_nodes,
            self.world.random(f"client/{node}"),
            self.fail,
            pause_s=self.shape.client_pause_s,
            rack=f"rack-{int(self.broker_nodes[at]) % 10}",
            deletes=self.shape.deletes,
            keys=0 if self.shape.compaction is None else self.shape.compaction.keys,
            is_leader=self._is_leader,
            on_rot=self._rot_was_served,
        )

    def _make_clients(self) -> None:
        for at, node in enumerate(CLIENTS):
            client = self._make_client(Client, node, at)
            self.users.append(client)
            self.cluster.add(f"c{node}", node, client.run)
        self.operator = Operator(self, self.world.random("operator"), self.fail)
        self.operator.verifier = ReplicaVerifier(self, self.world.random("verify"), self.fail)
        self.operator_station = self.cluster.add(f"c{OPERATOR}", OPERATOR, self.operator.run)
        if self.shape.product is not None:
            self.product_operator = ProductOperator(self, self.world.random("product"), self.fail)
            self.cluster.add(f"c{PRODUCT_OPERATOR}", PRODUCT_OPERATOR, self.product_operator.run)
            if self.shape.product.producers:
                self.pipeliner = self._make_client(Pipeliner, PIPELINER, 0)
                self.pipeliner.producers = self.shape.product.producers
                self.pipeliner.idle_s = self.shape.product.expiry_ms / 1000 or 1.0
                self.cluster.add(f"c{PIPELINER}", PIPELINER, self.pipeliner.run)
        if self.groups is not None:
            self.groups.add_members()

    def _clients(self) -> Sequence[StoppableWriter]:
        """Those that write."""
        return self.users if self.pipeliner is None else [*self.users, self.pipeliner]

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        span = {"from_s": BEGIN_S, "until_s": self.shape.fault_s}
        plan = [*draw_broker_plan(draw, **span), *draw_opening_plan(self.world.random("opening"), **span)]
        if self.groups is not None:
            plan += draw_group_steps(self.world.random("group-faults"), **span)
        if self.shape.product is not None and self.shape.product.has_page_cache:
            plan += draw_product_plan(self.world.random("product-faults"), **span)
        if self.shape.spares:
            plan += draw_membership_plan(self.world.random("membership"), **span)
        return plan

    def _make_nodes(self) -> None:
        shape, stack = self.shape, self.stack
        controller = stack.program(self)
        program = stack.combined_program(self) if shape.is_combined else controller
        founders = [self.cluster.add(f"n{number}", NodeId(number), program) for number in (1, 2, 3)]
        spares = [self.cluster.add(f"n{number}", NodeId(number), controller) for number in range(4, 4 + shape.spares)]
        self._quorum = [*founders, *spares]
        for station in self._quorum:
            self.new_directory(station)
            stack.attach(station)
        self.founding = Membership(tuple(Member(s.node_id, s.durable["directory"]) for s in founders))
        for station in founders:
            station.durable["founding"] = self.founding
        self.controllers = [station.node_id for station in self._quorum]
        self.brokers = founders[:] if shape.is_combined else []
        for number in range(len(self.brokers), shape.brokers):
            self.brokers.append(self.cluster.add(f"b{11 + number}", NodeId(11 + number), stack.broker_program()))
        for station in self.brokers:
            stack.attach_broker(station, shape.disk_latency)
        self.stations = [*founders, *(station for station in self.brokers if station not in founders), *spares]

    @property
    def quorum(self) -> list[Station]:
        return self._quorum

    def wipe(self, station: Station) -> None:
        assert station not in self.brokers, "a broker's logs are not destroyed with its controller's"
        super().wipe(station)

    def looked_at(self, app: BrokerApp) -> None:
        """After each event of a broker, for further checks."""

    # -- what others ask

    def broker(self, station: Station) -> BrokerApp | None:
        """The broker's process on this machine, if it runs."""
        app = self.apps.get(station.name)
        return app if is_alive(app) else None

    def crashed(self, who: str, error: BaseException) -> None:
        if not self.world.scheduler.failures:
            self.world.scheduler.fail(who, "an error of our own in the background", error)

    def made(self, topic: KnownTopic, *, first: int = 0) -> None:
        """A topic, or partitions of it from `first` on, are there: clients begin to work on them."""
        self.world.scheduler.trace("operator", f"{topic.name} is {topic.topic_id}, with {topic.partitions} partitions")
        for number, known in enumerate(self.replica_checker.add(topic, first=first), first):
            one, other = self.users if number % 2 == 0 else self.users[::-1]
            one.add(known, ACKS_ALL)
            other.add(known, self._ids.choice((ACKS_ALL, ACKS_LEADER, ACKS_LEADER, None)))
            if self.pipeliner is not None and topic.name.startswith("piped"):
                self.pipeliner.add(known, ACKS_ALL)
        if self.groups is not None and topic.is_grouped:
            self.groups.made(topic)

    def _elected_uncleanly(self, topic_id: UUID, number: int) -> None:
        """An operator asked for it: from now on the partition promises what an unclean topic does."""
        known = self.replica_checker.partitions.get(PartitionId(TopicId(topic_id), number))
        if known is not None:
            known.is_forgiven = True

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

    def _is_rotten(self, name: str, partition_id: PartitionId) -> bool:
        station = self.rotten.get(partition_id)
        return station is not None and station.name == name

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
        app.replicas.report_corruption(replica, offset)

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

    @property
    def counts(self) -> dict[str, int]:
        tables = [view.table for client in self.users for view in client.views() if view.table is not None]
        return {
            "compacted_away": self.replica_checker.compacted_away,
            "deletes_gone": self.deletes_gone,
            "replicas_verified": 0 if self.operator.verifier is None else self.operator.verifier.agreed,
            "tables_read": sum(table.completed for table in tables),
            "membership_changes": self.membership_changes,
            "given_to_groups": 0 if self.groups is None else self.groups.checker.given_out,
            "group_logs_cleaned": 0 if self.groups is None else self.groups.cleaned,
        }

    def run(self) -> None:
        self._run_faults()
        if self.groups is not None:
            self.groups.steady()
            self._await_groups()
        writers = [*self._clients(), *(() if self.kafka is None else self.kafka.producers)]
        for client in writers:
            client.is_stopping = True
        self._demand("writes are not answered", lambda: not any(client.busy for client in writers), CONVERGE_S)
        verifier = self.operator.verifier
        if verifier is not None:
            verifier.check_rot()
        self._scrub()
        self._demand("replicas do not converge", self._has_converged, CONVERGE_S)
        if verifier is not None:
            verifier.check_all()
        if self.product_checker is not None:
            self._demand("retention does not act", self.product_checker.has_acted, CONVERGE_S)
        if self.groups is not None:
            self._demand("groups have not processed everything", self.groups.is_all_processed, self.processing_s)
            self.groups.finish()
            self._demand("groups lag", self.groups.is_lag_zero, CONVERGE_S)
        self.metadata.advance()
        self._check_logs()
        self.invariants.finish([app for station in self.brokers if (app := self.broker(station)) is not None])
        count_acts(self)
        if self.groups is not None:
            self.groups.check_end()
            self.world.check()

    def _are_groups_stable(self) -> bool:
        return self.groups is None or self.groups.are_stable()

    def _await_groups(self) -> None:
        self._demand("groups are not stable", self._are_groups_stable, CONVERGE_S)

    def _run_faults(self) -> None:
        """Until they have ended, and every partition is whole."""
        for station in self.cluster.stations.values():
            station.start()
        self.world.run_for(self.shape.fault_s)
        self.world.scheduler.trace("nemesis", "all faults end")
        self.nemesis.stop()
        self.operator.is_stopping = True
        if self.product_operator is not None:
            self.product_operator.is_stopping = True
        for station in self.brokers:
            for label in self.stack.labels:
                station.machine.disk(label).crash_at_operation = station.machine.store(label).crash_at_commit = None
            app = self.broker(station)
            if app is not None and (app.is_stopping or app.has_failed_directory()):
                station.kill()
        self.cluster.heal()
        repair = self.world.loop.create_task(self._repair()) if self.shape.spares else None
        self._demand("nobody leads", self._is_led, LEADER_S)
        if repair is not None:
            self._demand("the membership is not whole", self._is_repaired, CONVERGE_S)
            repair.cancel()
        self._demand("topics are not made", self._are_topics_made, CONVERGE_S)
        self._demand("partitions are not whole", self._are_whole, CONVERGE_S)

    def _are_topics_made(self) -> bool:
        product = self.product_operator
        is_undone = product is None or product.is_undone
        return is_undone and len(self.operator.topics) >= len(self.shape.topics)

    def _committed_partition(self, partition_id: PartitionId) -> Partition | None:
        self.metadata.advance()
        return self.metadata.image.partition(partition_id.topic_id, partition_id.partition)

    def known_partitions(self) -> list[tuple[KnownPartition, Any]]:
        """Those that exist."""
        image = self.metadata.image
        found = []
        for known in self.replica_checker.partitions.values():
            partition = image.partition(known.partition_id.topic_id, known.partition_id.partition)
            if partition is not None:
                found.append((known, partition))
        return found

    def _are_whole(self) -> bool:
        return self.are_all_in_sync() and all(
            self._is_led_here(known, found) for known, found in self.known_partitions()
        )

    def _is_led_here(self, known: KnownPartition, partition: Any) -> bool:
        app = self.broker(self.cluster.station(NodeId(partition.leader)))
        leading = None if app is None else app.replicas.leader_of(known.partition_id)
        return leading is not None and leading.leader_epoch == partition.leader_epoch

    def _has_converged(self) -> bool:
        if not self._are_whole():
            return False
        for known, partition in self.known_partitions():
            states = {self._position(broker, known) for broker in partition.replicas}
            if len(states) != 1 or None in states:
                return False
            (state,) = states
            assert state is not None
            if state[1] not in (partition.start_offset, ANY_START):
                return False
            if not known.topic.delete_asked and not all(c.has_read(known, state[0]) for c in self.users):
                return False
            if self.kafka is not None and not known.topic.delete_asked and not self.kafka.has_read(known, state[0]):
                return False
        apps = [self.broker(station) for station in self.brokers]
        hosted: dict[int, set[PartitionId]] = {int(node): set() for node in self.broker_nodes}
        for topic in self.metadata.image.topics.values():
            for number, partition in topic.partitions.items():
                for broker in partition.replicas:
                    hosted[broker].add(PartitionId(TopicId(topic.topic_id), number))
        return all(app is not None and set(app.logs.known()) == hosted[app.agent.broker] for app in apps)

    def _position(self, broker: int, known: KnownPartition) -> tuple[int, ...] | None:
        """As `state_of`; where retention deletes, each replica begins somewhere else."""
        state = self.state_of(broker, known.partition_id, is_cached=known.topic.is_cached)
        return state if state is None or not known.topic.is_retained else (state[0], ANY_START)

    def state_of(self, broker: int, partition_id: PartitionId, *, is_cached: bool = False) -> tuple[int, ...] | None:
        """Where a replica stands, if it stands still: all that it has is synced (or `is_cached`) and known as
        committed."""
        app = self.broker(self.cluster.station(NodeId(broker)))
        replica = None if app is None else app.replicas.get(partition_id)
        if replica is None or replica.log is None or replica.role is None or replica.log.damaged is not None:
            return None
        log, role = replica.log, replica.role
        if isinstance(role, LeaderReplica) and not role.state.is_confirmed:
            return None
        is_still = log.end_offset == role.high_watermark and (is_cached or log.end_offset == log.durable_end)
        return (log.start_offset, log.end_offset)[::-1] if is_still else None

    def read_log(self, app: BrokerApp, partition_id: PartitionId) -> bytes | int:
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

        return self.world.run(app.context.node, read, timeout=CONVERGE_S)

    def _scrub(self) -> None:
        """Rot that nobody has met so far is found, and mended from the other replicas."""
        for _ in range(SCRUBS_MAX):
            bad = 0
            for partition_id, station in self.rotten.items():
                app = self.broker(station)
                replica = None if app is None else app.replicas.get(partition_id)
                if app is None or replica is None or replica.log is None or replica.log.damaged is not None:
                    continue
                found = self.read_log(app, partition_id)
                if isinstance(found, int):
                    self.world.scheduler.trace("nemesis", f"{station.name}: rot is found at {found} of {partition_id}")
                    app.context.node.loop.call_soon(self._scrub_one, app, replica, found)
                    bad += 1
            if not bad:
                return
            self.world.run_for(0.2)
            self._demand("partitions are not whole after a scrub", self._are_whole, CONVERGE_S)
        raise SimulationError(f"rot is still found after {SCRUBS_MAX} scrubs")

    def _bounds(self, known: KnownPartition, partition: Any) -> set[tuple[int, int] | None]:
        apps = [self.broker(self.cluster.station(NodeId(broker))) for broker in partition.replicas]
        replicas = [None if app is None else app.replicas.get(known.partition_id) for app in apps]
        logs = [None if replica is None else replica.log for replica in replicas]
        is_retained = known.topic.is_retained
        return {
            None if log is None else (ANY_START if is_retained else int(log.start_offset), int(log.end_offset))
            for log in logs
        }

    def _are_alike(self) -> bool:
        return all(len(self._bounds(known, partition)) == 1 for known, partition in self.known_partitions())

    def _check_logs(self) -> None:
        for known, partition in self.known_partitions():
            for _ in range(REREADS_MAX):
                # A write that was on its way when all was whole may reach its leader now, or while the logs are read.
                self._demand("the logs of replicas do not begin and end alike", self._are_alike, CONVERGE_S)
                bounds, logs = self._bounds(known, partition), {}
                for broker in partition.replicas:
                    app = self.broker(self.cluster.station(NodeId(broker)))
                    assert app is not None, "all run"
                    found = self.read_log(app, known.partition_id)
                    if isinstance(found, int):
                        self.fail(app.name, f"{known} cannot be read at {found}")
                    else:
                        logs[app.name] = found
                if self._bounds(known, partition) == bounds:
                    break
            start = self._start_of(known, partition)
            self.replica_checker.check_end(known, logs, start=start)
            self._check_epochs(known, partition, start)
        self.world.check()

    def _start_of(self, known: KnownPartition, partition: Partition) -> int:
        """The first offset that all replicas have."""
        apps = [self.broker(self.cluster.station(NodeId(broker))) for broker in partition.replicas]
        logs = [None if app is None else app.logs.get(known.partition_id) for app in apps]
        return max(int(log.start_offset) for log in logs if log is not None)

    def _check_epochs(self, known: KnownPartition, partition: Partition, start: int) -> None:
        epochs = set()
        for broker in partition.replicas:
            app = self.broker(self.cluster.station(NodeId(broker)))
            log = None if app is None else app.logs.get(known.partition_id)
            assert log is not None, "all run, and have it"
            self.deletes_gone += log.lineage.deletes_end > 0
            epochs.add(tuple(log.epochs.epoch_for(offset) for offset in range(start, log.end_offset)))
        if len(epochs) > 1:
            self.fail("end", f"{known}: its replicas name other epochs: {sorted(epochs)}")

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
                    f"hw {replica.high_watermark} {replica.partition} offline {replica.open_error} "
                    f"damaged {None if log is None else log.damaged}"
                )
            if len(image.topics) != len(self.metadata.image.topics):
                parts.append(f"  knows {len(image.topics)} topics of {len(self.metadata.image.topics)}")
        if self.groups is not None and station is self.stations[0]:
            parts.append(f"groups: {self.groups.trouble()}; {self.groups.lag()}")
        return "\n".join(parts)


def run_broker_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_broker_shape(seed)
    return run_simulation(seed, shape, lambda world: BrokerSimulation(world, seed, shape, only=only))


def run_product_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_product_shape(seed)
    return run_simulation(seed, shape, lambda world: BrokerSimulation(world, seed, shape, only=only))
