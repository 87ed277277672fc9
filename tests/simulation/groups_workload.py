"""Programs around consumer groups: members, writers, and an operator whose topics grow.

A `Member` is a machine that runs one consumer after the other (`tidelog.aio.Consumer`, whose two sides share the
machine's loop here): it polls or iterates, takes its time, commits by hand or leaves that to the consumer, leaves and
joins again. A `Writer` machine writes numbered records with the idempotent writer of the client. Both tell
`groups_checker` and `broker_checker` what they do and see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from same_loop import SameLoopConsumer

from simulation.broker_checker import Fail, KnownPartition
from simulation.broker_workload import Operator
from simulation.cluster import Context
from simulation.groups_checker import GroupsChecker, Life, topic_partition
from simulation.groups_node import Connections
from tidelog.client import writer
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.consumer_errors import WakeupError
from tidelog.client.errors import DeliveryTimeoutError
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.service import partition_for
from tidelog.log.batch import encode_columns
from tidelog.metadata.broker_side import BrokerConfig, ControllerClient
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, Reassigned
from tidelog.metadata.settings import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.topics import AddPartitions, MoreOfTopic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.rpc.door import Method, method_named

if TYPE_CHECKING:
    from simulation.groups_sim import GroupsShape, GroupsSimulation

T = TypeVar("T")

COMMIT, FETCH = method_named("Groups", "CommitOffsets"), method_named("Groups", "FetchOffsets")
PARTITIONS_MAX = 6
LATE = 0.5
COMMIT_MS = 3_000
CLOSE_MS = 2_000
WAKE_S = 1.0
PASSING = frozenset({ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.INVALID_SESSION_TIMEOUT})
"""Why a consumer may give up, so that its program makes another one: its former process is not out of the group yet, or
a broker has not heard of the settings."""


class CheckedConnections(Connections):
    """Notes what is committed and what is told of it."""

    def __init__(self, transport: Any, checker: GroupsChecker, life: Life) -> None:
        super().__init__(transport)
        self.last_commit: Any = None
        self._checker = checker
        self._life = life

    async def call(self, address: str, method: Method, request: Any, *, timeout_ms: int) -> Any:
        checker, life = self._checker, self._life
        if method is COMMIT:
            offsets = {topic_partition(row.topic_id, row.partition): row.offset for row in request.offsets}
            checker.commits_offsets(life, offsets)
            self.last_commit = request
            answer = await super().call(address, method, request, timeout_ms=timeout_ms)
            rows = zip(offsets.items(), answer.offsets, strict=True)
            checker.acked_offsets(life, {item[0]: item[1] for item, row in rows if not row.HasField("error")})
            return answer
        if method is FETCH:
            asked = [topic_partition(row.topic_id, row.partition) for row in request.partitions]
            least = checker.asks_offsets(life, asked)
            answer = await super().call(address, method, request, timeout_ms=timeout_ms)
            told = {
                partition: row.offset
                for partition, row in zip(asked, answer.offsets, strict=True)
                if not row.HasField("error")
            }
            checker.told_offsets(life, least, told)
            return answer
        return await super().call(address, method, request, timeout_ms=timeout_ms)


def new_cluster(context: Context, bootstrap: Sequence[str], connections: Connections) -> ClusterClient:
    return ClusterClient(
        bootstrap,
        connections,
        random=context.node.random,
        clock=context.node.clock,
        config=ClientConfig(
            request_timeout_ms=5_000, attempt_timeout_ms=700, retry_backoff_max_ms=300, bootstrap_wait_ms=60_000
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlan:
    """How the programs of one machine behave."""

    group: str
    is_static: bool
    is_auto: bool
    """Commits are automatic."""
    is_iterating: bool
    pattern: str
    """Instead of the names of topics."""
    restless: float
    """How often it leaves and joins again."""
    slow: float
    """How often a handler takes long."""


class Member:
    def __init__(self, simulation: GroupsSimulation, number: int, plan: MemberPlan, draw: Random) -> None:
        self.plan = plan
        self.life: Life | None = None
        self.is_steady = False
        """From now on it stays, and does its work at once."""
        self._simulation = simulation
        self._checker = simulation.groups_checker
        self._number = number
        self._random = draw
        self._lives = 0
        self._connections: CheckedConnections | None = None

    async def run(self, context: Context) -> None:
        context.app = self
        self.life = None
        await self._simulation.are_topics_made(context)
        while True:
            await self._live(context)
            pause_s = self._random.expovariate(1 / 0.5)
            await asyncio.sleep(0.05 if self.is_steady else min(2.0, pause_s))

    def died(self) -> None:
        """With its machine."""
        life = self.life
        if life is not None and not life.is_over:
            self._commit_late(life, list(life.holdings))
            self._checker.ended(life)

    def _commit_late(self, life: Life, partitions: Sequence[PartitionId]) -> None:
        """A commit of what the member does not hold any more is still on its way."""
        last = None if self._connections is None else self._connections.last_commit
        if last is not None and self._random.random() < LATE:
            late = type(last)()
            late.CopyFrom(last)
            del late.offsets[:]
            late.offsets.extend(
                row for row in last.offsets if topic_partition(row.topic_id, row.partition) in partitions
            )
            if late.offsets:
                self._simulation.operator.commit_late(late, self._random.uniform(0.1, 3.0))

    def _options(self, shape: GroupsShape) -> dict[str, Any]:
        plan = self.plan
        return {
            "group": plan.group,
            "group_instance_id": f"{plan.group}-{self._number}" if plan.is_static else None,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": plan.is_auto,
            "auto_commit_interval_ms": shape.auto_commit_ms,
            "session_timeout_ms": shape.member_session_ms,
            "heartbeat_interval_ms": shape.heartbeat_ms,
            "max_poll_interval_ms": shape.poll_interval_ms,
            "fetch_max_wait_ms": 400,
            "request_timeout_ms": 2_000,
            "max_partition_fetch_bytes": self._random.choice((300, 1 << 20)),
            "client_id": f"m{self._number}",
        }

    async def _live(self, context: Context) -> None:
        """One consumer, from its making to its end."""
        self._lives += 1
        shape, plan = self._simulation.shape, self.plan
        life = self.life = Life(f"m{self._number}.{self._lives}", plan.group, plan.is_static)
        self._checker.lives.append(life)
        connections = self._connections = CheckedConnections(context.transport, self._checker, life)
        cluster = new_cluster(context, self._simulation.bootstrap, connections)
        consumer = life.consumer = SameLoopConsumer(cluster, **self._options(shape))

        async def revoked(names: list[TopicPartition]) -> None:
            if not self.is_steady and self._random.random() < 0.3:
                await asyncio.sleep(self._random.uniform(0.01, 0.3))
            if not plan.is_auto and not life.is_closing and self._random.random() < 0.7:
                await self._commit(consumer)
            self._checker.revoked(life, names)
            self._commit_late(life, self._checker.partitions(names))

        def lost(names: list[TopicPartition]) -> None:
            self._checker.lost(life, names)
            self._commit_late(life, self._checker.partitions(names))

        try:
            await consumer.subscribe(
                None if plan.pattern else self._simulation.topic_names,
                pattern=plan.pattern or None,
                on_assigned=lambda names: self._checker.assigned(life, names),
                on_revoked=revoked,
                on_lost=lost,
            )
            work = self._iterate(life, consumer) if plan.is_iterating else self._poll(life, consumer)
            await work
        except TidelogError as error:
            if error.code not in PASSING:
                self._simulation.fail(life.name, f"the consumer gives up: {error.code.name}: {error}")
            context.trace(f"{life.name} gives up: {error}")
        life.is_closing = True
        await consumer.close(timeout_ms=CLOSE_MS)
        self._checker.ended(life)
        context.trace(f"{life.name} has left")

    def _wants_to_leave(self) -> bool:
        return not self.is_steady and self._random.random() < self.plan.restless

    async def _handle(self, life: Life, records: Sequence[ConsumerRecord]) -> None:
        self._checker.gave(life, records)
        if self.is_steady:
            await asyncio.sleep(0.005)
        elif self._random.random() < self.plan.slow:
            most_s = self._simulation.shape.poll_interval_ms / 1000
            await asyncio.sleep(self._random.choice((0.3, 0.5, 1.5)) * most_s)
        else:
            await asyncio.sleep(self._random.uniform(0.002, 0.05))
        if not life.is_over:
            self._checker.done(life, records)

    async def _poll(self, life: Life, consumer: SameLoopConsumer) -> None:
        while not self._wants_to_leave():
            records = await consumer.poll(timeout_ms=300, max_records=self._random.choice((1, 5, 500)))
            await self._handle(life, records)
            if not self.plan.is_auto and self._random.random() < 0.5:
                await self._commit_somehow(consumer, records)

    def finish(self, context: Context) -> None:
        """No more records come: who iterates and commits by hand every so many of them commits what is left."""
        life = self.life
        if life is not None and self.plan.is_iterating and not self.plan.is_auto:
            context.node.loop.call_soon(life.consumer.wakeup)

    async def _iterate(self, life: Life, consumer: SameLoopConsumer) -> None:
        while True:
            try:
                return await self._iterate_on(life, consumer)
            except WakeupError:
                await self._commit(consumer)
                asyncio.get_running_loop().call_later(WAKE_S, consumer.wakeup)  # others may have them by now

    async def _iterate_on(self, life: Life, consumer: SameLoopConsumer) -> None:
        since = 0
        async for record in consumer:
            await self._handle(life, [record])
            since += 1
            if not self.plan.is_auto and (self.is_steady or since >= 4):
                since = 0
                await self._commit_somehow(consumer, [record])
            if self._wants_to_leave():
                return

    async def _commit_somehow(self, consumer: SameLoopConsumer, records: Sequence[ConsumerRecord]) -> None:
        if self.is_steady or self._random.random() < 0.5:
            await self._commit(consumer)
        elif self._random.random() < 0.5 and records:
            last = records[-1]
            await self._commit(consumer, {TopicPartition(last.topic, last.partition): last.offset + 1})
        else:
            await self._commit(consumer, is_waited_for=False)

    async def _commit(self, consumer: SameLoopConsumer, offsets: Any = None, *, is_waited_for: bool = True) -> None:
        try:
            if is_waited_for:
                await consumer.commit(offsets, timeout_ms=COMMIT_MS)
            else:
                await consumer.commit_async(offsets)
        except TidelogError as error:
            # Others have the partitions, or the coordinator was not found in time: it is read again.
            self._simulation.world.scheduler.trace(consumer.options.client_id, f"a commit failed: {error}")


class GroupWriter:
    """A machine that writes numbered records to every partition."""

    def __init__(self, simulation: GroupsSimulation, number: int, draw: Random, fail: Fail, *, pause_s: float) -> None:
        self.busy = 0
        """Batches without an answer."""
        self.is_stopping = False
        self.timeouts = 0
        self._simulation = simulation
        self._number = number
        self._random = draw
        self._fail = fail
        self._pause_s = pause_s
        self._lives = 0

    async def run(self, context: Context) -> None:
        context.app = self
        self.busy = 0
        self._lives += 1
        await self._simulation.are_topics_made(context)
        cluster = new_cluster(context, self._simulation.bootstrap, Connections(context.transport))
        sender = writer.Writer(
            cluster,
            writer.WriterConfig(delivery_timeout_ms=15_000, request_timeout_ms=1_500, in_flight_max=3),
        )
        numbers: dict[KnownPartition, int] = {}
        tasks: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            if self.is_stopping or self.busy >= 8:
                continue
            known = self._random.choice(list(self._simulation.replica_checker.partitions.values()))
            count = self._random.choice((1, 1, 2, 4))
            first = numbers.get(known, 0)
            numbers[known] = first + count
            name = f"w{self._number}.{self._lives}.{known.partition_id.partition}"
            values = [b"%s/%d" % (name.encode(), first + at) for at in range(count)]
            self.busy += 1
            task = context.node.spawn(self._send(sender, known, values))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _send(self, sender: writer.Writer, known: KnownPartition, values: list[bytes]) -> None:
        batch = encode_columns([1_000] * len(values), [None] * len(values), list(values))
        try:
            found = await (await sender.send(known.topic.name, known.partition_id.partition, batch))
        except DeliveryTimeoutError:
            self.timeouts += 1
            return
        except TidelogError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:  # a broker may not have heard of it yet
                self._fail(f"w{self._number}", f"{known}: {error.code.name}: {error}")
            return
        finally:
            self.busy -= 1
        assert found.partition == known.partition_id, "written where it was sent"
        simulation = self._simulation
        simulation.replica_checker.acked(
            f"w{self._number}",
            known,
            values,
            base_offset=found.base_offset,
            leader_epoch=simulation.leader_epoch(known.partition_id),  # or an older one: that is not told
        )


class GroupsOperator(Operator):
    """Makes topics with several partitions and lets them grow; moves partitions, those of the groups too."""

    simulation: GroupsSimulation
    context: Context | None = None

    def commit_late(self, request: Any, after_s: float) -> None:
        """Somebody's commit, which the network has held back, arrives at the coordinator."""
        if self.context is not None and not self.is_stopping:
            self.context.node.spawn(self._commit_late(request, after_s))

    async def _commit_late(self, request: Any, after_s: float) -> None:
        assert self.context is not None, "spawned by its machine"
        await asyncio.sleep(after_s)
        topic = self.image.topic_named(OFFSETS_TOPIC)
        leader = -1 if topic is None else topic.partitions[partition_for(request.group, len(topic.partitions))].leader
        if leader < 0:
            return
        try:
            await self.context.transport.call(
                NodeId(leader), COMMIT.wire_name, request.SerializeToString(), timeout_ms=COMMIT_MS
            )
        except TidelogError as error:
            self.context.trace(f"a late commit is refused: {error}")

    async def run(self, context: Context) -> None:
        context.app = self
        self.context = context
        client = ControllerClient(
            context.transport, lambda: self.simulation.controllers, BrokerConfig(call_timeout_ms=1_500), self.draw
        )
        settings = self.simulation.shape.settings()
        changes = tuple(ConfigChange(key=key, operation="set", value=str(value)) for key, value in settings.items())
        request = AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=changes),))
        await self._ask(client, request)
        for kind in self.simulation.shape.topics:
            await self._create(client, kind)
            more = MoreOfTopic(name=self.topics[-1].name, total=self.draw.choice((2, 3, 4)))
            await self._try(client, AddPartitions(topics=(more,)))
        while True:
            await asyncio.sleep(self.draw.expovariate(1 / 1.2))
            if not self.is_stopping:  # a program that ends is started again
                await self._one(client)

    async def _one(self, client: ControllerClient) -> None:
        kind = self.draw.choices(("grow", "move", "move_groups", "elect", "nothing"), self.simulation.shape.operations)[
            0
        ]
        if kind == "grow":
            topic = self.draw.choice(self.topics)
            found = self.image.topic_named(topic.name)
            total = 0 if found is None else len(found.partitions) + self.draw.choice((1, 1, 2))
            if found is not None and total <= PARTITIONS_MAX:
                await self._try(client, AddPartitions(topics=(MoreOfTopic(name=topic.name, total=total),)))
        elif kind == "move":
            await self._move(client, self.draw.choice(self.topics))
        elif kind == "move_groups":
            await self._move_groups(client)
        elif kind == "elect":
            await self._try(client, ElectLeaders(kind="preferred"))
        self.simulation.note_partitions()

    async def _move_groups(self, client: ControllerClient) -> None:
        topic = self.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            return
        number = self.draw.randrange(len(topic.partitions))
        brokers = [int(node) for node in self.simulation.broker_nodes]
        replicas = tuple(self.draw.sample(brokers, len(topic.partitions[number].settled)))
        item = Reassigned(topic=OFFSETS_TOPIC, partition=number, replicas=replicas)
        await self._try(client, AlterReassignments(partitions=(item,)))
        await asyncio.sleep(self.draw.uniform(0.1, 0.6))
        await self._try(client, ElectLeaders(kind="preferred"))
