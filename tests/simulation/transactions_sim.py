"""One run of a whole cluster with transactions. Seed in, verdict out.

    n1..n3, b11..b14    controllers and brokers, as in `broker_sim`; every broker has coordinators of groups and
                        transactions
    i111, i112          writers of the input, with the idempotent producer
    t201..t203          pipelines: consume, transform, produce, in transactions
    t206                in some runs, a pipeline that reads what the others write
    j211                an owner of joint transactions
    k221, k222          its workers
    r231                a reader of committed data
    c103                an operator: makes topics, moves partitions, those of coordinators too

Faults first (`transactions_faults`), then everything is healed and must go on: every input is processed once, no
transaction is open, readers of committed data reach the end of every partition. See `transactions_checker` and
`transactions_watch`.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random

from simulation.broker_checker import KnownPartition, KnownTopic
from simulation.broker_coverage import on_coordinator
from simulation.broker_node import BrokerApp
from simulation.broker_shape import BrokerShape, draw_broker_shape
from simulation.broker_sim import CONVERGE_S, OPERATOR, BrokerSimulation
from simulation.cluster import Station
from simulation.coverage import COORDINATOR
from simulation.groups_node import bootstrap_of
from simulation.nemesis import PlanStep
from simulation.raft_sim import run_simulation
from simulation.run_result import Result
from simulation.transactions_checker import TransactionHistory
from simulation.transactions_clients import place_of
from simulation.transactions_faults import TRANSACTION_FAULTS, draw_transactions_plan
from simulation.transactions_joint import ROWS, Owner, Worker, batch_place
from simulation.transactions_operator import STATE_TOPIC, TransactionsOperator
from simulation.transactions_plan import TransactionsPlan, draw_transactions
from simulation.transactions_postman import NAMES, Postman
from simulation.transactions_trials import run_trials
from simulation.transactions_watch import TransactionsWatch
from simulation.transactions_workload import GROUP, SECOND_GROUP, InputWriter, Pipeline, Reader
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.shard import Shard
from tidelog.log.housekeeping import cleaner_checkpoint
from tidelog.metadata.image import Topic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication.transaction_messages import Marker
from tidelog.world.simulated import SimWorld

BEGIN_S = 2.5
SECOND = 206
FENCED = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING})
DELAYING = ("delay", "reorder", "silence_streams")
"""Faults by which the request of a former life may start an instance that nobody knows."""


def draw_transactions_shape(seed: int) -> BrokerShape:
    draw = Random(f"{seed}/transactions")
    plan = draw_transactions(draw)
    base = draw_broker_shape(seed, has_more=False)
    return replace(
        base,
        stack="transactions",
        fault_s=BEGIN_S + draw.choice((2.0, 3.5, 5.0)),
        client_pause_s=draw.choice((0.1, 0.2)),
        topics=("plain", "plain", draw.choice(("plain", "weak"))),
        operations=draw.choice(((0, 0, 0, 1, 4), (2, 2, 2, 1, 1), (0, 0, 4, 1, 1), (0, 4, 0, 1, 1))),
        deletes=0.0,
        replica=replace(base.replica, cleaner_backoff_ms=200) if plan.is_compacted else base.replica,
        transactions=plan,
    )


class TransactionsSimulation(BrokerSimulation):
    def __init__(self, world: SimWorld, seed: int, shape: BrokerShape, *, only: Collection[int] | None = None) -> None:
        super().__init__(world, seed, shape, only=only)
        self.nemesis.add(TRANSACTION_FAULTS)
        self._register_features()

    def _make_clients(self) -> None:
        self.history = TransactionHistory(self.fail)
        self.watch = TransactionsWatch(self.fail, may_forget=bool(self.transactions.expiration_ms))
        self.replica_checker.on_committed = self.watch.marked
        self.postman = Postman(
            self.cluster.network, self.world.random("postman"), self.transactions.lateness, self._has_next
        )
        self.is_steady = False
        self.fenced = 0
        """Lives of programs that another instance has ended."""
        self.trials: Counter[str] = Counter()
        """See `transactions_trials`."""
        self.cleaned = 0
        """Logs of coordinators that the cleaner has cleaned, at the end."""
        self.bootstrap = bootstrap_of(self)
        draw, plan, pause_s = self.world.random, self.transactions, self.shape.client_pause_s
        self.writers = [InputWriter(self, at, draw(f"i{at}"), pause_s, self._stored) for at in (111, 112)]
        numbers = range(201, 201 + plan.pipelines)
        self.pipelines = [Pipeline(self, at, draw(f"t{at}"), may_rest=at >= 201 + plan.ids) for at in numbers]
        if plan.is_chained:
            self.pipelines.append(Pipeline(self, SECOND, draw("t206"), is_second=True))
        self.owners = [Owner(self, 211, draw("j211"))] if plan.workers else []
        workers = [Worker(self, 221 + at, draw(f"k{221 + at}"), self.owners) for at in range(plan.workers)]
        self.reader = Reader(self, 231)
        self.struck: list[Station] = []
        """Machines of clients that the nemesis strikes."""
        for prefix, programs in (("i", self.writers), ("t", self.pipelines), ("j", self.owners), ("k", workers)):
            for program in programs:
                node = NodeId(program.number)
                self.struck.append(self.cluster.add(f"{prefix}{node}", node, program.run))
        self.cluster.add("r231", NodeId(231), self.reader.run)
        self.operator = TransactionsOperator(self, self.world.random("operator"), self.fail)
        self.operator_station = self.cluster.add(f"c{OPERATOR}", OPERATOR, self.operator.run)
        for station in (*self.brokers, *self.struck):
            self.postman.attach(station)

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        return draw_transactions_plan(draw, from_s=BEGIN_S, until_s=self.shape.fault_s)

    def _clients(self) -> Sequence[InputWriter | Owner]:
        return [*self.writers, *self.owners]

    def made(self, topic: KnownTopic, *, first: int = 0) -> None:
        self.world.scheduler.trace("operator", f"{topic.name} is {topic.topic_id}, with {topic.partitions} partitions")
        self.replica_checker.add(topic, first=first)

    def looked_at(self, app: BrokerApp) -> None:
        self.watch.look(app)

    # What programs need.

    async def are_topics_made(self) -> None:
        assert isinstance(self.operator, TransactionsOperator), "the one of this run"
        while not self.operator.is_aged:  # noqa: ASYNC110 - on another machine
            await asyncio.sleep(0.05)

    def life_ended(self, name: str, owner: str, error: TidelogError) -> None:
        """Only a newer instance is fatal for a producer (decision 32)."""
        if error.code not in FENCED:
            return
        self.fenced += 1
        plan, sharing = self.transactions, [one for one in self.pipelines if one.owner == owner]
        is_late = plan.lateness > 0 or any(self.nemesis.counts.get(fault) for fault in DELAYING)
        if len(sharing) < 2 and not (is_late or plan.expiration_ms):
            self.fail("history", f"{name} was fenced, and {owner!r} has no other instance: {error}")

    @property
    def transactions(self) -> TransactionsPlan:
        assert self.shape.transactions is not None, "the shape has a plan"
        return self.shape.transactions

    @property
    def input(self) -> KnownTopic:
        return self.operator.topics[0]

    @property
    def outputs(self) -> Sequence[KnownTopic]:
        return self.operator.topics[1 : len(self.shape.topics)]

    def _has_next(self, node: NodeId, marker: Marker) -> bool:
        """Whether the broker leads a partition of the marker in which a transaction is open that it would end late."""
        app = self.broker(self.cluster.station(node))
        if app is None:
            return False
        for marked in marker.partitions:
            leader = app.replicas.leader_of(PartitionId(TopicId(marked.topic_id), marked.partition))
            if leader is None or leader.log.producers.open_offset(marker.producer_id) is None:
                continue
            if leader.log.producers.epoch_of(marker.producer_id) >= marker.epoch:
                return True
        return False

    def _stored(self, who: str, partition: int, value: bytes, offset: int) -> None:
        known = self._known(self.input, partition)
        found = self.metadata.image.partition(known.partition_id.topic_id, partition)
        epoch = -1 if found is None else found.leader_epoch
        self.replica_checker.acked(who, known, [value], base_offset=offset, leader_epoch=epoch)

    def _known(self, topic: KnownTopic, partition: int) -> KnownPartition:
        return self.replica_checker.partitions[PartitionId(TopicId(topic.topic_id), partition)]

    def draw_processed(self, draw: Random) -> tuple[KnownTopic, int, int]:
        """A partition, and an offset below which every program has read it."""
        topic = draw.choice((self.input, *self.outputs))
        number = draw.randrange(topic.partitions)
        place = place_of(topic.name, number)
        ends = [] if topic is self.input else [self.reader.positions.get(place, 0)]
        if topic is self.input:
            ends.append(self._group_offsets(GROUP).get(place, 0))
        elif topic is self.outputs[0] and self.transactions.is_chained:
            ends.append(self._group_offsets(SECOND_GROUP).get(place, 0))
        return topic, number, min(ends)

    # What the nemesis asks.

    def coordinators(self) -> list[Station]:
        """Of transactions, and of the groups."""
        image, found = self.metadata.image, []
        for name in (STATE_TOPIC, OFFSETS_TOPIC):
            topic = image.topic_named(name)
            leaders = () if topic is None else (partition.leader for partition in topic.partitions.values())
            found += [self.cluster.station(NodeId(leader)) for leader in leaders if leader >= 0]
        return found

    # The run.

    def run(self) -> None:
        self._run_faults()
        run_trials(self)
        self.is_steady = self.postman.is_over = True
        for writer in self._clients():
            writer.is_stopping = True
        self._demand("writes are not answered", lambda: not any(one.busy for one in self._clients()), CONVERGE_S)
        self._scrub()
        self._demand("inputs are not processed", self._is_processed, CONVERGE_S)
        self._demand("transactions stay open", self._are_all_over, CONVERGE_S)
        self._demand("replicas do not converge", self._has_converged, CONVERGE_S)
        self._demand("readers do not reach the end", self._is_read, CONVERGE_S)
        self._demand("the second pipeline does not reach the end", self._is_processed_again, CONVERGE_S)
        self._demand("readers do not reach the end", lambda: self._are_all_over() and self._is_read(), CONVERGE_S)
        self.metadata.advance()
        self._check_logs()
        self.invariants.finish([app for station in self.brokers if (app := self.broker(station)) is not None])
        self._finish()
        self._count_acts()
        self.world.check()

    def _ends(self, topics: Sequence[KnownTopic]) -> dict[str, int]:
        ends = {}
        for topic in topics:
            for number in range(topic.partitions):
                partition_id = PartitionId(TopicId(topic.topic_id), number)
                partition = self._committed_partition(partition_id)
                state = None if partition is None else self.state_of(partition.leader, partition_id)
                ends[place_of(topic.name, number)] = -1 if state is None else state[0]
        return ends

    def _group_shard(self, name: str) -> Shard | None:
        topic: Topic | None = self.metadata.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            return None
        number = partition_for(name, len(topic.partitions))
        if topic.partitions[number].leader < 0:
            return None
        app = self.broker(self.cluster.station(NodeId(topic.partitions[number].leader)))
        shard = None if app is None else app.coordinator.shards.get(number)
        return None if shard is None or shard.phase is not Phase.LEADING else shard

    def _group_offsets(self, name: str) -> dict[str, int]:
        shard = self._group_shard(name)
        group = None if shard is None else shard.state.group(name)
        topics = {topic.topic_id: topic.name for topic in self.operator.topics}
        return {
            place_of(topics[partition.topic_id], partition.partition): value.offset
            for partition, value in ({} if group is None else group.offsets).items()
            if partition.topic_id in topics
        }

    def _is_processed(self) -> bool:
        self.metadata.advance()
        offsets = self._group_offsets(GROUP)
        return all(end >= 0 and offsets.get(place, 0) == end for place, end in self._ends([self.input]).items())

    def _is_processed_again(self) -> bool:
        """The end of a place may be that of a marker: the group has read the last record."""
        self.metadata.advance()
        if not self.transactions.is_chained:
            return True
        offsets = self._group_offsets(SECOND_GROUP)
        places = self._ends(self.outputs[:1])
        return all(offsets.get(place, 0) == self.reader.last.get(place, -1) + 1 for place in places)

    def _is_read(self) -> bool:
        ends = self._ends(self.outputs)
        return all(end >= 0 and self.reader.positions.get(place, 0) == end for place, end in ends.items())

    def _are_all_over(self) -> bool:
        """No coordinator, no partition and no group has anything open."""
        return not self._open()

    def _open(self) -> list[str]:
        found, topic = [], self.metadata.image.topic_named(STATE_TOPIC)
        apps = [app for station in self.brokers if (app := self.broker(station)) is not None]
        shards = [shard for app in apps for shard in app.broker.transactions.shards.values() if shard.is_leading]
        if topic is not None and len(shards) != len(topic.partitions):
            found.append(f"{len(shards)} partitions of {STATE_TOPIC} are led")
        for shard in shards:
            found += [who for who, one in sorted(shard.state.ids.items()) if one.is_open or one.is_ending]
        for name in (GROUP, SECOND_GROUP):
            group = self._group_shard(name)
            if group is None:
                found.append(f"nobody coordinates {name}")
            elif group.state.open:
                found.append(f"pending offsets of {sorted(group.state.open)}")
        for known, partition in self.known_partitions():
            app = self.broker(self.cluster.station(NodeId(partition.leader)))
            leader = None if app is None else app.replicas.leader_of(known.partition_id)
            rows = [] if leader is None else leader.log.producers.open_rows()
            found += [f"{known}: producer {row.producer_id}, epoch {row.epoch}" for row in rows]
        return found

    def _finish(self) -> None:
        outputs, inputs = self._ends(self.outputs), self._ends([self.input])
        offsets = {}
        for group in (GROUP, SECOND_GROUP):
            offsets.update({(group, place): offset for place, offset in self._group_offsets(group).items()})
        for owner in self.owners:
            inputs[batch_place(owner.owner)] = ROWS * owner.committed_batches
        if self.transactions.is_chained:
            inputs.update(self._ends(self.outputs[:1]))
        self.history.finish(outputs, inputs, offsets)

    def _describe(self, station: Station) -> str:
        described = super()._describe(station)
        return f"open: {self._open()}; {described}" if station is self.stations[0] else described

    # Coverage.

    @property
    def counts(self) -> dict[str, int]:
        history, watch, plan = self.history, self.watch.counts, self.transactions
        names = sorted(set(NAMES.values()))
        owned = {
            "joint": history.joint,
            "tokens found": history.tokens_found,
            "batches repeated": sum(owner.repeated for owner in self.owners),
        }
        assert isinstance(self.operator, TransactionsOperator), "the one of this run"
        return {
            "committed": history.committed,
            "aborted": history.aborted,
            "unknown": history.unknown,
            "instances fenced": self.fenced,
            "timeouts": watch["timeouts"],
            "aborts by a new instance": watch["aborts by a new instance"],
            "coordinator moves": watch["coordinator moves"],
            **{trial.value: self.trials[trial.value] for trial in plan.trials},
            **(owned if plan.workers else {}),
            **({"prepared taken over": sum(one.taken_over for one in self.owners)} if plan.prepares else {}),
            **({"epochs exhausted": watch["epochs exhausted"]} if plan.first_epoch else {}),
            **({"ids forgotten": watch["ids forgotten"]} if plan.expiration_ms else {}),
            **({"aborts by an operator": watch["aborts by an operator"]} if plan.has_operator else {}),
            **({"records deleted": self.operator.deleted} if plan.deletes else {}),
            **({"logs of coordinators cleaned": self.cleaned} if plan.is_compacted else {}),
            **({"reads inside": self.history.inside} if plan.probes else {}),
            **({f"late {name}": self.postman.late[name] for name in names} if plan.lateness else {}),
            **({f"late {name} refused": self.postman.refused[name] for name in names} if plan.lateness else {}),
        }

    def _count_cleaned(self) -> None:
        for station in self.brokers:
            app = self.broker(station)
            for replica in () if app is None else app.replicas.all():
                if replica.topic in (STATE_TOPIC, OFFSETS_TOPIC) and replica.log is not None:
                    self.cleaned += cleaner_checkpoint(replica.log) is not None

    def _register_features(self) -> None:
        for name in self.counts:
            self.nemesis.coverage.feature(f"transactions: {name}", (COORDINATOR,), on_coordinator(self))

    def _count_acts(self) -> None:
        self._count_cleaned()
        for name, times in self.counts.items():
            self.nemesis.coverage.acted(f"transactions: {name}", times)


def run_transactions_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_transactions_shape(seed)
    return run_simulation(seed, shape, lambda world: TransactionsSimulation(world, seed, shape, only=only))
