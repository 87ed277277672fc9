"""One run of a whole cluster with transactions. Seed in, verdict out.

    n1..n3, b11..b14    controllers and brokers, as in `broker_sim`; every broker has coordinators of groups and
                        transactions
    i111, i112          writers of the input, with the idempotent producer
    t201..t203          pipelines: consume, transform, produce, in transactions
    j211                an owner of joint transactions
    k221, k222          its workers
    r231                a reader of committed data
    c103                an operator: makes topics, moves partitions, those of coordinators too

Faults first (`transactions_faults`), then everything is healed and must go on: every input is processed once, no
transaction is open, readers of committed data reach the end of every partition. See `transactions_checker`.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random

from simulation.broker_checker import KnownPartition, KnownTopic
from simulation.broker_shape import BrokerShape, draw_broker_shape
from simulation.broker_sim import CONVERGE_S, OPERATOR, BrokerSimulation
from simulation.cluster import Station
from simulation.groups_node import bootstrap_of
from simulation.nemesis import PlanStep
from simulation.raft_sim import run_simulation
from simulation.run_result import Result
from simulation.transactions_checker import TransactionHistory
from simulation.transactions_faults import draw_transactions_plan
from simulation.transactions_operator import TransactionsOperator
from simulation.transactions_plan import TransactionsPlan
from simulation.transactions_workload import (
    GROUP,
    InputWriter,
    Owner,
    Pipeline,
    Reader,
    Worker,
    batch_place,
    place_of,
)
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.metadata.image import Topic
from tidelog.model.ids import NodeId, PartitionId, TopicId

BEGIN_S = 2.5
STATE_TOPIC = "__transaction_state"
ROWS_OF_BATCH = 9


def draw_transactions_shape(seed: int) -> BrokerShape:
    draw = Random(f"{seed}/transactions")
    plan = TransactionsPlan(
        pipelines=draw.choice((1, 2, 2, 3)),
        ids=draw.choice((1, 2, 3)),
        workers=draw.choice((0, 2, 2)),
        timeout_ms=draw.choice((1_000, 2_000, 4_000)),
        aborts=draw.choice((0.0, 0.1, 0.3)),
        restless=draw.choice((0.0, 0.02, 0.1)),
        partitions=draw.choice((1, 2)),
    )
    return replace(
        draw_broker_shape(seed, has_more=False),
        stack="transactions",
        fault_s=BEGIN_S + draw.choice((3.0, 5.0, 8.0)),
        client_pause_s=draw.choice((0.05, 0.1, 0.2)),
        topics=("plain", "plain", draw.choice(("plain", "weak"))),
        operations=draw.choice(((0, 0, 0, 1, 4), (2, 2, 2, 1, 1), (0, 0, 4, 1, 1))),
        deletes=0.0,
        transactions=plan,
    )


class TransactionsSimulation(BrokerSimulation):
    def _make_clients(self) -> None:
        self.history = TransactionHistory(self.fail)
        self.is_steady = False
        self.bootstrap = bootstrap_of(self)
        draw = self.world.random
        pause_s = self.shape.client_pause_s
        writers = [InputWriter(self, number, draw(f"i{number}"), pause_s, self._stored) for number in (111, 112)]
        pipelines = [Pipeline(self, 201 + at, draw(f"t{201 + at}")) for at in range(self.transactions.pipelines)]
        self.owners = [Owner(self, 211, draw("j211"))] if self.transactions.workers else []
        workers = [Worker(self, 221 + at, draw(f"k{221 + at}"), self.owners) for at in range(self.transactions.workers)]
        self.reader = Reader(self, 231)
        self.writers = writers
        self.struck: list[Station] = []
        """Machines of clients that the nemesis strikes."""
        for prefix, programs in (("i", writers), ("t", pipelines), ("j", self.owners), ("k", workers)):
            for program in programs:
                node = NodeId(program.number)
                self.struck.append(self.cluster.add(f"{prefix}{node}", node, program.run))
        self.cluster.add("r231", NodeId(231), self.reader.run)
        self.operator = TransactionsOperator(self, self.world.random("operator"), self.fail)
        self.operator_station = self.cluster.add(f"c{OPERATOR}", OPERATOR, self.operator.run)

    def _draw_plan(self, draw: Random) -> list[PlanStep]:
        return draw_transactions_plan(draw, from_s=BEGIN_S, until_s=self.shape.fault_s)

    def _clients(self) -> Sequence[InputWriter | Owner]:
        return [*self.writers, *self.owners]

    def made(self, topic: KnownTopic, *, first: int = 0) -> None:
        self.world.scheduler.trace("operator", f"{topic.name} is {topic.topic_id}, with {topic.partitions} partitions")
        self.replica_checker.add(topic, first=first)

    # What programs need.

    async def are_topics_made(self) -> None:
        while len(self.operator.topics) < len(self.shape.topics):  # noqa: ASYNC110 - on another machine
            await asyncio.sleep(0.05)

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

    def _stored(self, who: str, partition: int, value: bytes, offset: int) -> None:
        known = self._known(self.input, partition)
        found = self.metadata.image.partition(known.partition_id.topic_id, partition)
        epoch = -1 if found is None else found.leader_epoch
        self.replica_checker.acked(who, known, [value], base_offset=offset, leader_epoch=epoch)

    def _known(self, topic: KnownTopic, partition: int) -> KnownPartition:
        return self.replica_checker.partitions[PartitionId(TopicId(topic.topic_id), partition)]

    # What the nemesis asks.

    def coordinators(self) -> list[Station]:
        """Of transactions, and of the group."""
        image, found = self.metadata.image, []
        for name in (STATE_TOPIC, OFFSETS_TOPIC):
            topic = image.topic_named(name)
            leaders = () if topic is None else (partition.leader for partition in topic.partitions.values())
            found += [self.cluster.station(NodeId(leader)) for leader in leaders if leader >= 0]
        return found

    # The run.

    def run(self) -> None:
        self._run_faults()
        self.is_steady = True
        for writer in self._clients():
            writer.is_stopping = True
        self._demand("writes are not answered", lambda: not any(one.busy for one in self._clients()), CONVERGE_S)
        self._scrub()
        self._demand("inputs are not processed", self._is_processed, CONVERGE_S)
        self._demand("replicas do not converge", self._has_converged, CONVERGE_S)
        self._demand("readers do not reach the end", self._is_read, CONVERGE_S)
        self.metadata.advance()
        self._check_logs()
        self.invariants.finish([app for station in self.brokers if (app := self.broker(station)) is not None])
        self._finish()
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

    def _group_offsets(self) -> dict[str, int]:
        topic: Topic | None = self.metadata.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            return {}
        number = partition_for(GROUP, len(topic.partitions))
        app = self.broker(self.cluster.station(NodeId(topic.partitions[number].leader)))
        shard = None if app is None else app.coordinator.shards.get(number)
        group = None if shard is None or shard.phase is not Phase.LEADING else shard.state.group(GROUP)
        if group is None:
            return {}
        return {
            place_of(self.input.name, partition.partition): value.offset
            for partition, value in group.offsets.items()
            if partition.topic_id == self.input.topic_id
        }

    def _is_processed(self) -> bool:
        self.metadata.advance()
        offsets = self._group_offsets()
        return all(end >= 0 and offsets.get(place, 0) == end for place, end in self._ends([self.input]).items())

    def _is_read(self) -> bool:
        ends = self._ends(self.outputs)
        return all(end >= 0 and self.reader.positions.get(place, 0) == end for place, end in ends.items())

    def _finish(self) -> None:
        outputs, inputs = self._ends(self.outputs), self._ends([self.input])
        offsets = {(GROUP, place): offset for place, offset in self._group_offsets().items()}
        for owner in self.owners:
            inputs[batch_place(owner.owner)] = ROWS_OF_BATCH * owner.committed_batches
        self.history.finish(outputs, inputs, offsets)

    @property
    def counts(self) -> dict[str, int]:
        history = self.history
        return {
            "committed": history.committed,
            "aborted": history.aborted,
            "unknown": history.unknown,
            "joint": history.joint,
            "tokens_found": history.tokens_found,
        }


def run_transactions_seed(seed: int, *, only: Collection[int] | None = None) -> Result:
    shape = draw_transactions_shape(seed)
    return run_simulation(seed, shape, lambda world: TransactionsSimulation(world, seed, shape, only=only))
