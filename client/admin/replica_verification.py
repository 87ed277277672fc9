"""`Admin.verify_replicas`: compares the replicas of partitions, a few partitions at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tidelog.client.admin.arguments import TopicsOrPartitions, read_scope
from tidelog.client.admin.calls import deadline_of_call
from tidelog.client.admin.replica_comparison import Comparison, Layout
from tidelog.client.admin.topics import TopicOperations
from tidelog.client.admin.values import PartitionDescription, TopicDescription
from tidelog.client.admin.verification import PartitionVerification, VerificationProgress
from tidelog.client.record import TopicPartition
from tidelog.log.range_digests import DigestQuery, ReplicaDigest
from tidelog.model.errors import InvalidRequestError
from tidelog.rpc.v1 import admin_pb2 as pb

PARTITIONS_AT_ONCE = 8
ATTEMPT_S = 15.0
TIMEOUT_S = 30 * 24 * 3600.0


class ReplicaVerification(TopicOperations):
    async def verify_replicas(
        self,
        scope: TopicsOrPartitions = None,
        *,
        on_progress: Callable[[VerificationProgress], None] | None = None,
        timeout: float | None = None,
    ) -> list[PartitionVerification]:
        """Compare the replicas of these topics and partitions, or of all, up to the high watermark. Nothing is stopped
        or changed. Brokers read at `replica.verify.bytes.per.second`, so it may take long: by default without a
        timeout. `on_progress` is called on the client's thread."""
        work = self._verify(scope, on_progress)
        return await self._run("verify_replicas", work, TIMEOUT_S if timeout is None else timeout, is_change=False)

    async def _verify(
        self, scope: TopicsOrPartitions, on_progress: Callable[[VerificationProgress], None] | None
    ) -> list[PartitionVerification]:
        named = read_scope(scope)
        topics = (
            None if named is None else list(dict.fromkeys(item if isinstance(item, str) else item[0] for item in named))
        )
        described = await self._describe(topics)
        partitions = list(_partitions(described.values(), named))
        done = offsets = 0

        def advanced(count: int) -> None:
            nonlocal offsets
            offsets += count
            if on_progress is not None:
                on_progress(VerificationProgress(done, len(partitions), offsets))

        left = iter(enumerate(partitions))
        results: dict[int, PartitionVerification] = {}

        async def verify_next() -> None:
            nonlocal done
            for number, (topic, partition) in left:
                source = _Source(self, topic, partition)
                results[number] = await Comparison(topic.name, partition.partition, source, advanced).run()
                done += 1
                advanced(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(PARTITIONS_AT_ONCE, len(partitions))):
                group.create_task(verify_next())
        return [results[number] for number in sorted(results)]

    async def _describe(self, topics: list[str] | None) -> dict[str, TopicDescription]:
        with deadline_of_call(ATTEMPT_S):
            return (await self.describe_topics(topics)).all()

    async def _digest(self, topic: TopicDescription, partition: int, broker: int, query: DigestQuery) -> ReplicaDigest:
        request = pb.DigestReplicaRequest(
            broker=broker,
            topic_id=topic.topic_id.bytes,
            partition=partition,
            start=query.start if query.start >= 0 else None,
            end=query.end if query.end >= 0 else None,
            by_record=query.by_record,
            lists_units=query.lists_units,
            is_suspect=query.is_suspect,
        )
        with deadline_of_call(ATTEMPT_S):
            response = await self._ask("Admin", "DigestReplica", request)
        return ReplicaDigest(
            broker=broker,
            leader=response.leader,
            leader_epoch=response.leader_epoch,
            follows=response.follows,
            start_offset=response.start_offset,
            high_watermark=response.high_watermark,
            generation=response.generation,
            has_gaps=response.has_gaps,
            damage=response.damage,
            reached=response.reached,
            epoch=response.epoch,
            count=response.count,
            size=response.bytes,
            digest=response.digest,
            fault=response.fault,
            units=(response.units,),
        )


class _Source:
    """The replicas of one partition of a cluster."""

    def __init__(self, admin: ReplicaVerification, topic: TopicDescription, partition: PartitionDescription) -> None:
        self._admin = admin
        self._topic = topic
        self._number = partition.partition
        self._first: PartitionDescription | None = partition
        """What is known since the beginning. Later attempts ask again."""

    async def layout(self) -> Layout:
        partition, self._first = self._first, None
        if partition is None:
            topic = (await self._admin._describe([self._topic.name]))[self._topic.name]
            if topic.topic_id != self._topic.topic_id:
                raise InvalidRequestError(f"topic '{topic.name}' was deleted and created again meanwhile")
            partition = next(row for row in topic.partitions if row.partition == self._number)
        return Layout(partition.leader, partition.leader_epoch, partition.replicas)

    async def digest(self, broker: int, query: DigestQuery) -> ReplicaDigest:
        return await self._admin._digest(self._topic, self._number, broker, query)


def _partitions(
    topics: Iterable[TopicDescription], scope: list[str | TopicPartition] | None
) -> Iterable[tuple[TopicDescription, PartitionDescription]]:
    """The partitions that the scope names, in order of topic and number; all without one."""
    named = None if scope is None else set(scope)
    for topic in sorted(topics, key=lambda topic: topic.name):
        numbers = {partition.partition for partition in topic.partitions}
        if named is not None and topic.name not in named:
            wanted = {item[1] for item in named if not isinstance(item, str) and item[0] == topic.name}
            if missing := sorted(wanted - numbers):
                raise InvalidRequestError(f"topic '{topic.name}' has {len(numbers)} partitions; {missing[0]} is none")
            numbers &= wanted
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition):
            if partition.partition in numbers:
                yield topic, partition
