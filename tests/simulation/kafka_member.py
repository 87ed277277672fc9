"""Members of groups by the Kafka API: programs as those of Java and librdkafka.

KafkaMember       a machine that runs one consumer after the other, each of the classic or the consumer protocol
_Consumer         what both have: fetches, a buffer, a program that takes its time, commits
ClassicConsumer   JoinGroup, SyncGroup, Heartbeat, LeaveGroup, with an eager assignor: before it joins it gives up all
ServerConsumer    ConsumerGroupHeartbeat: gives up only what the coordinator takes
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.broker_checker import KnownPartition, records_of
from simulation.cluster import Context
from simulation.kafka_client import CODES, KafkaClient
from simulation.kafka_fetcher import KafkaFetcher, Position
from simulation.kafka_groups_checker import KafkaLife
from tidelog.model.errors import ErrorCode, TransportError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages import groups as messages

if TYPE_CHECKING:
    from simulation.kafka_groups import KafkaGroups

LATE = 0.5
"""How often the last commit of a consumer that has ended comes again."""
GROUPS_SINCE, COMMIT_IDS_SINCE = 8, 10
REJOIN = frozenset({ErrorCode.REBALANCE_IN_PROGRESS})
LOST = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaMemberPlan:
    group: str
    protocols: tuple[str, ...]
    """Each consumer speaks one of them."""
    is_static: bool
    restless: float
    """How often it leaves and joins again."""
    slow: float
    """How often its program takes long."""


@dataclass(frozen=True, slots=True)
class FetchedRecord:
    topic: str
    partition: int
    offset: int
    value: bytes


class ConsumerEnded(Exception):  # noqa: N818 - no error: the program makes another consumer
    """This consumer cannot go on."""


class KafkaMember:
    def __init__(self, groups: KafkaGroups, number: int, plan: KafkaMemberPlan, draw: Random) -> None:
        self.plan = plan
        self.life: KafkaLife | None = None
        self.is_steady = False
        """From now on it stays, and does its work at once."""
        self.groups = groups
        self.random = draw
        self.client: KafkaClient | None = None
        self._number = number
        self._lives = 0
        self._consumer: Consumer | None = None

    async def run(self, context: Context) -> None:
        context.app = self
        self.life = self._consumer = None
        await self.groups.consumer_groups.are_topics_made()
        while True:
            await self._live(context)
            await asyncio.sleep(0.05 if self.is_steady else min(2.0, self.random.expovariate(1 / 0.5)))

    def died(self) -> None:
        """With its machine."""
        if self.life is not None and not self.life.is_over:
            self._leave_late_commit()
            self.groups.checker.ended(self.life)

    def _leave_late_commit(self) -> None:
        """What it has committed last is still on its way."""
        if self.life is not None and self._consumer is not None and self.random.random() < LATE:
            self.groups.admin.add_late(self.life, self._consumer.last_commit)

    async def _live(self, context: Context) -> None:
        self._lives += 1
        plan, groups = self.plan, self.groups
        life = self.life = KafkaLife(
            f"g{self._number}.{self._lives}",
            plan.group,
            plan.is_static,
            protocol=self.random.choice(plan.protocols),
            instance_id=f"{plan.group}-{self._number}" if plan.is_static else "",
        )
        groups.checker.lives.append(life)
        client = self.client = KafkaClient(
            context, groups.simulation.broker_nodes, self.random, groups.fail, client_id=life.name
        )
        groups.clients.append(client)
        consumer = self._consumer = groups.new_consumer(self, life, client)
        fetching = context.node.spawn(consumer.fetcher.run([int(node) for node in groups.simulation.broker_nodes]))
        working = context.node.spawn(consumer.work())
        try:
            await consumer.run()
        except ConsumerEnded as reason:
            context.trace(f"{life.name} ends: {reason}")
        finally:
            life.is_closing = True
            for task in (fetching, working):
                task.cancel()
        await asyncio.wait([fetching, working])
        self._leave_late_commit()
        await consumer.close()
        groups.checker.ended(life)
        client.disconnect()

    def wants_to_leave(self) -> bool:
        return not self.is_steady and self.random.random() < self.plan.restless


class Consumer:
    def __init__(self, member: KafkaMember, life: KafkaLife, client: KafkaClient) -> None:
        groups = member.groups
        self.life = life
        self.last_commit: dict[PartitionId, int] = {}
        self.wants_to_join = False
        """A response has said so."""
        self.is_lost = False
        """It is no member any more, or not in this generation."""
        self.is_fenced = False
        """Another process has its instance id."""
        self._member = member
        self._groups = groups
        self._checker = groups.checker
        self._client = client
        self._random = member.random
        self._buffer: deque[tuple[Position, list[FetchedRecord]]] = deque()
        self._committing = asyncio.Lock()
        self.fetcher = KafkaFetcher(
            client,
            member.random,
            groups.fail,
            on_data=self._fetched,
            on_rot=groups.simulation._rot_was_served,
            counts=groups.counts,
            isolation=0,
        )

    async def run(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    # The program.

    def _fetched(self, position: Position, data: bytes, _high_watermark: int) -> None:
        known = position.known
        rows = [row for row in records_of(data) if row[0] >= position.offset]
        records = [
            FetchedRecord(known.topic.name, known.partition_id.partition, offset, value) for offset, value, _ in rows
        ]
        if rows:
            self._buffer.append((position, records))
            position.offset, position.last_epoch = rows[-1][0] + 1, rows[-1][2]

    async def work(self) -> None:
        """Takes records from the buffer, processes and commits them."""
        while True:
            if not self._buffer:
                if self._member.is_steady:
                    await self.commit()
                await asyncio.sleep(0.02)
                continue
            position, records = self._buffer.popleft()
            if self.fetcher.positions.get(position.known) is not position:
                continue
            self._checker.gave(self.life, records)
            if self._member.is_steady:
                await asyncio.sleep(0.005)
            elif self._random.random() < self._member.plan.slow:
                await asyncio.sleep(self._random.choice((0.5, 1.5)) * self._groups.plan.session_ms / 1000)
            else:
                await asyncio.sleep(self._random.uniform(0.002, 0.05))
            if self.life.is_over or self.fetcher.positions.get(position.known) is not position:
                continue
            self._checker.done(self.life, records)
            if self._member.is_steady or self._random.random() < 0.4:
                await self.commit()

    def _hold(self, partitions: Sequence[PartitionId], offsets: dict[PartitionId, int]) -> None:
        for partition in partitions:
            known = self._known(partition)
            self.fetcher.positions[known] = Position(known, max(0, offsets[partition]))

    def _release(self, partitions: Sequence[PartitionId]) -> None:
        for partition in partitions:
            self.fetcher.positions.pop(self._known(partition), None)
            self.life.committed.pop(partition, None)

    def _known(self, partition: PartitionId) -> KnownPartition:
        return self._groups.simulation.replica_checker.partitions[partition]

    # Offsets.

    async def commit(self) -> None:
        async with self._committing:
            life = self.life
            reached = {partition: life.reached.get(partition, 0) for partition in life.holdings}
            offsets = {
                partition: offset
                for partition, offset in reached.items()
                if offset > life.committed.get(partition, life.fetched.get(partition, 0))
            }
            if not offsets or life.generation < 0:
                return
            sent = self._groups.kafka_checker.sends(life, offsets)
            self.last_commit = offsets
            try:
                response = await self._client.ask_coordinator(life.group, offset_commit(self._groups, life, offsets))
            except TransportError:
                return  # what became of it is not known
            codes = codes_of_commit(self._groups, self._client, response)
            self._groups.kafka_checker.answered(sent, codes)
            for partition, code in codes.items():
                if code is None:
                    life.committed[partition] = offsets[partition]
                else:
                    self._commit_failed(code)

    def _commit_failed(self, code: ErrorCode) -> None:
        self._client.check_code(self.life.group, code.value.code)
        self.wants_to_join = self.wants_to_join or code in REJOIN
        self.is_lost = self.is_lost or code in LOST
        self.is_fenced = self.is_fenced or code is ErrorCode.FENCED_INSTANCE_ID
        if code is ErrorCode.UNKNOWN_SERVER_ERROR:
            self._groups.fail(self.life.name, f"a commit: {code.name}")

    async def _committed(self, partitions: Sequence[PartitionId]) -> dict[PartitionId, int]:
        """Until the coordinator reports them, or the member has to join again (then some are missing)."""
        life, client = self.life, self._client
        while partitions and not self.is_lost and not self.wants_to_join:
            least = self._checker.asks_offsets(life, partitions)
            try:
                response = await client.ask_coordinator(
                    life.group, offset_fetch(self._groups, client, life.group, partitions)
                )
            except TransportError:
                await client.pause()
                continue
            offsets = offsets_of_fetch(self._groups, client, life.group, response)
            if isinstance(offsets, dict):
                if set(offsets) != set(partitions):
                    self._groups.fail(life.name, f"offsets of {sorted(offsets)} come, not of {sorted(partitions)}")
                self._checker.check_reported_offsets(life, least, offsets)
                return offsets
            self.is_lost = self.is_lost or offsets in LOST
            self.wants_to_join = self.wants_to_join or offsets is ErrorCode.STALE_MEMBER_EPOCH
            await client.pause()
        return {}


def offset_commit(
    groups: KafkaGroups, life: KafkaLife, offsets: dict[PartitionId, int]
) -> messages.OffsetCommitRequest:
    topics: dict[str, messages.OffsetCommitRequestTopic] = {}
    for partition, offset in offsets.items():
        topic_of = groups.simulation.replica_checker.partitions[partition].topic
        topic = topics.setdefault(
            topic_of.name, messages.OffsetCommitRequestTopic(name=topic_of.name, topic_id=topic_of.topic_id.bytes)
        )
        topic.partitions.append(
            messages.OffsetCommitRequestPartition(partition_index=partition.partition, committed_offset=offset)
        )
    return messages.OffsetCommitRequest(
        group_id=life.group,
        generation_id_or_member_epoch=life.generation,
        member_id=life.member_id,
        group_instance_id=life.instance_id or None,
        topics=list(topics.values()),
    )


def codes_of_commit(
    groups: KafkaGroups, client: KafkaClient, response: messages.OffsetCommitResponse
) -> dict[PartitionId, ErrorCode | None]:
    has_ids = client.version_of(apis.OFFSET_COMMIT) >= COMMIT_IDS_SINCE
    return {
        groups.partition(topic.topic_id if has_ids else topic.name, row.partition_index): (
            CODES[row.error_code] if row.error_code else None
        )
        for topic in response.topics
        for row in topic.partitions
    }


def offset_fetch(
    groups: KafkaGroups, client: KafkaClient, group: str, partitions: Sequence[PartitionId]
) -> messages.OffsetFetchRequest:
    numbers: dict[str, list[int]] = {}
    for partition in partitions:
        topic_of = groups.simulation.replica_checker.partitions[partition].topic
        numbers.setdefault(topic_of.name, []).append(partition.partition)
    topics = [
        messages.OffsetFetchRequestTopics(name=name, topic_id=groups.topic_id(name), partition_indexes=found)
        for name, found in numbers.items()
    ]
    named = [messages.OffsetFetchRequestTopic(name=t.name, partition_indexes=t.partition_indexes) for t in topics]
    if client.version_of(apis.OFFSET_FETCH) < GROUPS_SINCE:
        return messages.OffsetFetchRequest(group_id=group, topics=named)
    return messages.OffsetFetchRequest(groups=[messages.OffsetFetchRequestGroup(group_id=group, topics=topics)])


def offsets_of_fetch(
    groups: KafkaGroups, client: KafkaClient, group: str, response: messages.OffsetFetchResponse
) -> dict[PartitionId, int] | ErrorCode | None:
    """The offsets; the error of the group; None if a partition has an error."""
    row: Any = response.groups[0] if response.groups else response
    error = client.check_code(group, row.error_code)
    if error is not None:
        return error
    has_ids = client.version_of(apis.OFFSET_FETCH) >= COMMIT_IDS_SINCE
    found = {
        groups.partition(topic.topic_id if has_ids else topic.name, one.partition_index): one
        for topic in row.topics
        for one in topic.partitions
    }
    if any(one.error_code for one in found.values()):
        return None
    return {partition: one.committed_offset for partition, one in found.items()}
