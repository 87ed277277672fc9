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

from support.clients.aio_consumer import SameLoopConsumer

from simulation.broker_checker import Fail, KnownPartition
from simulation.broker_operator import Operator
from simulation.cluster import Context
from simulation.groups_checker import GroupsChecker, Life, topic_partition
from simulation.groups_node import Connections
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.consumer.errors import WakeupError
from tidelog.client.errors import DeliveryTimeoutError
from tidelog.client.producer import writer
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.log.batch import encode_columns
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import AddPartitions, NewPartitions
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.grpc.methods import Method, method_named

if TYPE_CHECKING:
    from simulation.consumer_groups import ConsumerGroups
    from simulation.groups_sim import GroupsSimulation

T = TypeVar("T")

COMMIT, FETCH = method_named("Groups", "CommitOffsets"), method_named("Groups", "FetchOffsets")
PARTITIONS_MAX = 6
LATE = 0.5
COMMIT_MS = 3_000
CLOSE_S = 2.0
WAKE_S = 1.0
PASSING = frozenset({ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.INVALID_SESSION_TIMEOUT})
"""Why a consumer may give up, so that its program makes another one: its former process is not out of the group yet, or
a broker has not heard of the settings."""


class CheckedConnections(Connections):
    """Notes which offsets are committed and which are reported."""

    def __init__(self, transport: Any, checker: GroupsChecker, life: Life) -> None:
        super().__init__(transport)
        self.last_commit: Any = None
        self.last_address = ""
        """Where the last commit was sent to."""
        self._checker = checker
        self._life = life

    async def call(self, address: str, method: Method, request: Any, *, timeout_ms: int) -> Any:
        checker, life = self._checker, self._life
        if method is COMMIT:
            offsets = {topic_partition(row.topic_id, row.partition): row.offset for row in request.offsets}
            checker.commits_offsets(life, offsets)
            self.last_commit, self.last_address = request, address
            answer = await super().call(address, method, request, timeout_ms=timeout_ms)
            rows = zip(offsets.items(), answer.offsets, strict=True)
            checker.acked_offsets(life, {item[0]: item[1] for item, row in rows if not row.HasField("error")})
            return answer
        if method is FETCH:
            asked = [topic_partition(row.topic_id, row.partition) for row in request.partitions]
            least = checker.asks_offsets(life, asked)
            answer = await super().call(address, method, request, timeout_ms=timeout_ms)
            reported = {
                partition: row.offset
                for partition, row in zip(asked, answer.offsets, strict=True)
                if not row.HasField("error")
            }
            checker.check_reported_offsets(life, least, reported)
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
    def __init__(self, groups: ConsumerGroups, number: int, plan: MemberPlan, draw: Random) -> None:
        self.plan = plan
        self.life: Life | None = None
        self.is_steady = False
        """From now on it stays, and does its work at once."""
        self._groups = groups
        self._checker = groups.checker
        self._number = number
        self._random = draw
        self._lives = 0
        self._connections: CheckedConnections | None = None

    async def run(self, context: Context) -> None:
        context.app = self
        self.life = None
        await self._groups.are_topics_made()
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
        connections = self._connections
        last = None if connections is None else connections.last_commit
        if connections is not None and last is not None and self._random.random() < LATE:
            late = type(last)()
            late.CopyFrom(last)
            del late.offsets[:]
            late.offsets.extend(
                row for row in last.offsets if topic_partition(row.topic_id, row.partition) in partitions
            )
            if late.offsets:
                late_commit = LateCommit(late, last, connections.last_address, connections)
                self._groups.commit_late(late_commit, self._random.uniform(0.1, 3.0))

    def _options(self) -> dict[str, Any]:
        plan, groups = self.plan, self._groups.plan
        return {
            "group": plan.group,
            "group_instance_id": f"{plan.group}-{self._number}" if plan.is_static else None,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": plan.is_auto,
            "auto_commit_interval_ms": groups.auto_commit_ms,
            "session_timeout_ms": groups.member_session_ms,
            "heartbeat_interval_ms": groups.heartbeat_ms,
            "max_poll_interval_ms": groups.poll_interval_ms,
            "fetch_max_wait_ms": 400,
            "request_timeout_ms": 2_000,
            "max_partition_fetch_bytes": self._random.choice((300, 1 << 20)),
            "client_id": f"m{self._number}",
        }

    async def _live(self, context: Context) -> None:
        """One consumer, from its making to its end."""
        self._lives += 1
        plan = self.plan
        life = self.life = Life(f"m{self._number}.{self._lives}", plan.group, plan.is_static)
        self._checker.lives.append(life)
        connections = self._connections = CheckedConnections(context.transport, self._checker, life)
        cluster = new_cluster(context, self._groups.bootstrap, connections)
        consumer = life.consumer = SameLoopConsumer(cluster, **self._options())

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
                None if plan.pattern else self._groups.topic_names,
                pattern=plan.pattern or None,
                on_assigned=lambda names: self._checker.assigned(life, names),
                on_revoked=revoked,
                on_lost=lost,
            )
            work = self._iterate(life, consumer) if plan.is_iterating else self._poll(life, consumer)
            await work
        except TidelogError as error:
            if error.code not in PASSING:
                self._groups.fail(life.name, f"the consumer gives up: {error.code.name}: {error}")
            context.trace(f"{life.name} gives up: {error}")
        life.is_closing = True
        await consumer.close(timeout=CLOSE_S)
        self._checker.ended(life)
        context.trace(f"{life.name} has left")

    def _wants_to_leave(self) -> bool:
        return not self.is_steady and self._random.random() < self.plan.restless

    async def _handle(self, life: Life, records: Sequence[ConsumerRecord]) -> None:
        self._checker.gave(life, records)
        if self.is_steady:
            await asyncio.sleep(0.005)
        elif self._random.random() < self.plan.slow:
            most_s = self._groups.plan.poll_interval_ms / 1000
            await asyncio.sleep(self._random.choice((0.3, 0.5, 1.5)) * most_s)
        else:
            await asyncio.sleep(self._random.uniform(0.002, 0.05))
        if not life.is_over:
            self._checker.done(life, records)

    async def _poll(self, life: Life, consumer: SameLoopConsumer) -> None:
        while not self._wants_to_leave():
            records = await consumer.poll(timeout=0.3, max_records=self._random.choice((1, 5, 500)))
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
                await consumer.commit(offsets, timeout=COMMIT_MS / 1000)
            else:
                await consumer.commit_async(offsets)
        except TidelogError as error:
            # Others have the partitions, or the coordinator was not found in time: it is read again.
            self._groups.trace(consumer.options.client_id, f"a commit failed: {error}")


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
        await self._simulation.groups.are_topics_made()
        cluster = new_cluster(context, self._simulation.groups.bootstrap, Connections(context.transport))
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
            leader_epoch=simulation.leader_epoch(known.partition_id),  # or an older one: that is not reported
        )


@dataclass(frozen=True, slots=True)
class LateCommit:
    """A copy of the commit `original`, which was sent to `address`, and the connections of its member."""

    request: Any
    original: Any
    address: str
    connections: CheckedConnections

    @property
    def is_overtaken(self) -> bool:
        """Whether the member has sent another commit since."""
        return self.connections.last_commit is not self.original


class GroupsOperator(Operator):
    """Makes topics with several partitions and lets them grow; moves partitions, those of the groups too."""

    simulation: GroupsSimulation
    pause_s: float = 1.2
    operations: tuple[str, ...] = ("grow", "move", "move_groups", "elect", "nothing")

    async def _create(self, client: ControllerClient, kind: str) -> None:
        await super()._create(client, kind)
        more = NewPartitions(name=self.topics[-1].name, total=self.draw.choice((2, 3, 4)))
        await self._try(client, AddPartitions(topics=(more,)))

    async def _one(self, client: ControllerClient) -> None:
        kind = self.draw.choices(self.operations, self.simulation.shape.operations)[0]
        if kind == "grow":
            topic = self.draw.choice(self.topics)
            found = self.image.topic_named(topic.name)
            total = 0 if found is None else len(found.partitions) + self.draw.choice((1, 1, 2))
            if found is not None and total <= PARTITIONS_MAX:
                await self._try(client, AddPartitions(topics=(NewPartitions(name=topic.name, total=total),)))
        elif kind == "move":
            await self._move(client, self.draw.choice(self.topics))
        elif kind == "move_groups":
            await self._move_groups(client)
        elif kind == "elect":
            await self._try(client, ElectLeaders(kind="preferred"))
        self.simulation.groups.note_partitions()

    async def _move_groups(self, client: ControllerClient) -> None:
        topic = self.image.topic_named(OFFSETS_TOPIC)
        if topic is None:
            return
        number = self.draw.randrange(len(topic.partitions))
        brokers = [int(node) for node in self.simulation.broker_nodes]
        replicas = tuple(self.draw.sample(brokers, len(topic.partitions[number].original_replicas)))
        item = ReassignmentTarget(topic=OFFSETS_TOPIC, partition=number, replicas=replicas)
        await self._try(client, AlterReassignments(partitions=(item,)))
        await asyncio.sleep(self.draw.uniform(0.1, 0.6))
        await self._try(client, ElectLeaders(kind="preferred"))
