"""Consumers of the Kafka API, one for each protocol of groups.

ClassicConsumer   JoinGroup, SyncGroup, Heartbeat, LeaveGroup, with an eager assignor: it gives up everything before
                  it joins
ServerConsumer    ConsumerGroupHeartbeat: it gives up only what the coordinator takes
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from simulation.kafka_member import LOST, REJOIN, Consumer, ConsumerEnded
from tidelog.client.record import TopicPartition
from tidelog.coordinator.consumer_protocol import encode_assignment, parse_assignment
from tidelog.model.errors import ErrorCode, TransportError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages import groups as messages

JOIN, LEAVE, STATIC_LEAVE = 0, -1, -2
FENCED = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})
FATAL = frozenset(
    {
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.UNRELEASED_INSTANCE_ID,
        ErrorCode.INVALID_SESSION_TIMEOUT,
        ErrorCode.GROUP_ID_NOT_FOUND,
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
    }
)
"""Its program makes another consumer: another process has its place, a broker has not heard of the settings yet, or the
group is of the other protocol."""


class ClassicConsumer(Consumer):
    """Joins, syncs, sends heartbeats until a response says that it has to join again."""

    async def run(self) -> None:
        self._is_leader = False
        self._protocols = self._random.choice((("range",), ("range", "roundrobin"), ("roundrobin", "range")))
        self._subscription_version = self._random.choice((0, 1, 3))
        while True:
            self._give_up()
            if not await self._join():
                await self._client.pause()
                continue
            await self._stay()
            if not self.is_lost and self._random.random() < 0.7:
                await self.commit()

    def _give_up(self) -> None:
        """All that it holds: a rebalance begins, or is over without it."""
        self.fetcher.positions.clear()
        self._buffer.clear()
        self._groups.kafka_checker.revoked(self.life)
        self.life.committed.clear()
        if self.is_lost:
            self.life.generation = -1
        self.wants_to_join = self.is_lost = False

    async def _join(self) -> bool:
        life, client, plan = self.life, self._client, self._groups.plan
        await client.ready(self._groups.topic_names)
        subscription = encode_subscription(self._groups.topic_names, self._subscription_version)
        request = messages.JoinGroupRequest(
            group_id=life.group,
            session_timeout_ms=plan.session_ms,
            rebalance_timeout_ms=plan.rebalance_ms,
            member_id=life.own_id,
            group_instance_id=life.instance_id or None,
            protocol_type="consumer",
            protocols=[messages.JoinGroupRequestProtocol(name=one, metadata=subscription) for one in self._protocols],
        )
        wait_s = plan.rebalance_ms / 1000 + 2.0
        try:
            joined = await client.ask_coordinator(life.group, request, timeout_s=wait_s)
        except TransportError:
            return False
        error = client.check_code(life.group, joined.error_code)
        if error is ErrorCode.MEMBER_ID_REQUIRED:
            life.own_id = joined.member_id
            return False
        if error is not None:
            return self._refused(error)
        life.own_id, generation = joined.member_id, joined.generation_id
        self._is_leader = False
        assignments = []
        if joined.leader == joined.member_id and not joined.skip_assignment:
            assignments = await self._deal(joined)
        sync = messages.SyncGroupRequest(
            group_id=life.group,
            generation_id=generation,
            member_id=life.own_id,
            group_instance_id=life.instance_id or None,
            protocol_type="consumer",
            protocol_name=joined.protocol_name,
            assignments=assignments,
        )
        try:
            synced = await client.ask_coordinator(life.group, sync, timeout_s=wait_s)
        except TransportError:
            return False
        error = client.check_code(life.group, synced.error_code)
        if error is not None:
            return self._refused(error)
        return await self._take(generation, synced.assignment)

    async def _take(self, generation: int, data: bytes) -> bool:
        life = self.life
        life.generation = generation
        names = [(topic, number) for topic, numbers in parse_assignment(data).partitions for number in numbers]
        partitions = self._checker.partitions([TopicPartition(*name) for name in names])
        self._groups.kafka_checker.joined(life, partitions, names)
        beating = asyncio.get_running_loop().create_task(self._beat())
        offsets = await self._committed(partitions)
        beating.cancel()
        await asyncio.wait([beating])
        if partitions and not offsets:
            return True  # the heartbeats of `_stay` end at once
        self._hold(partitions, offsets)
        return True

    def _refused(self, error: ErrorCode) -> bool:
        if error in FATAL:
            raise ConsumerEnded(error.name)
        if error is ErrorCode.UNKNOWN_MEMBER_ID:
            self.life.own_id = ""
        return False

    async def _deal(self, joined: messages.JoinGroupResponse) -> list[messages.SyncGroupRequestAssignment]:
        """The assignment of all members, by the assignor that the coordinator has chosen."""
        members = sorted(one.member_id for one in joined.members)
        await self._client.refresh(self._groups.topic_names)
        dealt: dict[str, dict[str, list[int]]] = {member: {} for member in members}
        turn = 0
        for name in self._groups.topic_names:
            topic = self._client.topics.get(name)
            numbers = sorted(() if topic is None else topic.partitions)
            each, more = divmod(len(numbers), len(members))
            for at, number in enumerate(numbers):
                if joined.protocol_name == "range":
                    first = more * (each + 1)
                    to = at // (each + 1) if at < first else more + (at - first) // each
                else:
                    to, turn = turn, (turn + 1) % len(members)
                dealt[members[to]].setdefault(name, []).append(number)
        self._dealt = {name: len(t.partitions) for name, t in self._client.topics.items()}
        self._is_leader = True
        return [
            messages.SyncGroupRequestAssignment(member_id=member, assignment=encode_assignment(found))
            for member, found in dealt.items()
        ]

    async def _stay(self) -> None:
        """Until it has to join again."""
        while not self.is_lost and not self.wants_to_join:
            await self._beat_once()
            await asyncio.sleep(self._groups.plan.heartbeat_ms / 1000)
            if self.is_fenced:
                raise ConsumerEnded("its instance id is another one's")
            if self._member.wants_to_leave():
                raise ConsumerEnded("the program closes it")
            await self._look_for_partitions()

    async def _beat(self) -> None:
        while not self.is_lost and not self.wants_to_join and not self.is_fenced:
            await self._beat_once()
            await asyncio.sleep(self._groups.plan.heartbeat_ms / 1000)

    async def _beat_once(self) -> None:
        life = self.life
        request = messages.HeartbeatRequest(
            group_id=life.group,
            generation_id=life.generation,
            member_id=life.own_id,
            group_instance_id=life.instance_id or None,
        )
        try:
            response = await self._client.ask_coordinator(life.group, request)
        except TransportError:
            return
        error = self._client.check_code(life.group, response.error_code)
        self.is_fenced = self.is_fenced or error is ErrorCode.FENCED_INSTANCE_ID
        self.wants_to_join = self.wants_to_join or error in REJOIN
        self.is_lost = self.is_lost or error in LOST
        if error is ErrorCode.UNKNOWN_MEMBER_ID:
            life.own_id = ""

    async def _look_for_partitions(self) -> None:
        """The leader of a group joins again when its topics have got partitions."""
        if not self._is_leader:
            return
        await self._client.refresh(self._groups.topic_names)
        now = {name: len(topic.partitions) for name, topic in self._client.topics.items()}
        if now != self._dealt:
            self.wants_to_join, self._is_leader = True, False

    async def close(self) -> None:
        """A static member comes back: it does not leave."""
        life = self.life
        if life.own_id and life.generation >= 0:
            await self.commit()
            if not life.instance_id:
                one = messages.MemberIdentity(member_id=life.own_id)
                with suppress(TransportError):
                    await self._client.ask_coordinator(
                        life.group, messages.LeaveGroupRequest(group_id=life.group, members=[one])
                    )
        self._give_up()


class ServerConsumer(Consumer):
    """The coordinator assigns; each heartbeat reports what the member holds."""

    async def run(self) -> None:
        life = self.life
        if self._client.version_of(apis.CONSUMER_GROUP_HEARTBEAT) >= 1:
            life.own_id = str(UUID(int=self._random.getrandbits(128), version=4))
        self._target: frozenset[PartitionId] | None = None
        self._has_joined = False
        while True:
            answer = await self._heartbeat()
            if answer is not None:
                self._answered(answer)
                await self._reconcile()
            await asyncio.sleep(self._groups.plan.heartbeat_ms / 1000)
            if self.is_fenced:
                raise ConsumerEnded("its instance id is another one's")
            if self._member.wants_to_leave():
                raise ConsumerEnded("the program closes it")
            if self.is_lost:
                self._lose()

    async def _heartbeat(self) -> messages.ConsumerGroupHeartbeatResponse | None:
        life = self.life
        request = messages.ConsumerGroupHeartbeatRequest(
            group_id=life.group,
            member_id=life.own_id,
            member_epoch=life.generation if self._has_joined else JOIN,
            instance_id=life.instance_id or None,
            rebalance_timeout_ms=self._groups.plan.rebalance_ms,
            subscribed_topic_names=None if self._has_joined else self._groups.topic_names,
            topic_partitions=self._owned(),
        )
        try:
            response = await self._client.ask_coordinator(life.group, request)
        except TransportError:
            return None
        error = self._client.check_code(life.group, response.error_code)
        if error is None:
            assert isinstance(response, messages.ConsumerGroupHeartbeatResponse)
            return response
        if error in FATAL:
            raise ConsumerEnded(error.name)
        self.is_lost = self.is_lost or error in FENCED
        return None

    def _owned(self) -> list[messages.ConsumerGroupHeartbeatTopicPartitions]:
        numbers: dict[bytes, list[int]] = {}
        for partition in self.life.holdings:
            numbers.setdefault(partition.topic_id.bytes, []).append(partition.partition)
        return [
            messages.ConsumerGroupHeartbeatTopicPartitions(topic_id=topic_id, partitions=sorted(found))
            for topic_id, found in sorted(numbers.items())
        ]

    def _answered(self, answer: messages.ConsumerGroupHeartbeatResponse) -> None:
        life = self.life
        self._has_joined = True
        life.own_id, life.generation = answer.member_id or life.own_id, answer.member_epoch
        if answer.assignment is not None:
            self._target = frozenset(
                self._groups.partition(topic.topic_id, number)
                for topic in answer.assignment.topic_partitions
                for number in topic.partitions
            )

    async def _reconcile(self) -> None:
        life, target = self.life, self._target
        if target is None:
            return
        gone = sorted(set(life.holdings) - target)
        if gone:
            if self._random.random() < 0.7:
                await self.commit()
            self._release(gone)
            self._checker.revoked(life, self._names(gone))
            answer = await self._heartbeat()  # what it has given up, at once
            if answer is not None:
                self._answered(answer)
        new = sorted((self._target or frozenset()) - set(life.holdings))
        if new and not self.is_lost:
            self._checker.assigned(life, self._names(new))
            self.wants_to_join = False
            offsets = await self._committed(new)
            if len(offsets) == len(new):
                self._hold(new, offsets)
            else:
                self._checker.lost(life, self._names(new))

    def _names(self, partitions: Sequence[PartitionId]) -> list[TopicPartition]:
        return [TopicPartition(self._known(one).topic.name, one.partition) for one in partitions]

    def _lose(self) -> None:
        """It was put out: it holds nothing, and joins again."""
        held = sorted(self.life.holdings)
        self._release(held)
        self._checker.lost(self.life, self._names(held))
        self._buffer.clear()
        self._target, self._has_joined, self.is_lost = None, False, False
        self.life.generation = -1

    async def close(self) -> None:
        life = self.life
        if self._has_joined and not self.is_lost:
            await self.commit()
            self.fetcher.positions.clear()
            life.holdings.clear()
            request = messages.ConsumerGroupHeartbeatRequest(
                group_id=life.group,
                member_id=life.own_id,
                member_epoch=STATIC_LEAVE if life.instance_id else LEAVE,
                instance_id=life.instance_id or None,
            )
            with suppress(TransportError):
                await self._client.ask_coordinator(life.group, request)


def encode_subscription(topics: Sequence[str], version: int) -> bytes:
    """Of the consumer protocol (`coordinator.consumer_protocol`), of a member that owns nothing."""
    parts = [struct.pack(">hi", version, len(topics))]
    for name in topics:
        parts += (struct.pack(">h", len(name)), name.encode())
    parts.append(struct.pack(">i", -1))
    if version >= 1:
        parts.append(struct.pack(">i", 0))
    if version >= 3:
        parts.append(struct.pack(">ih", -1, -1))
    return b"".join(parts)
