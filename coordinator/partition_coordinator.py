"""A coordinator of a broker: a shard for each partition of its topic that the broker leads.

    replicas: led, left --> shards are created and ended        one timer heap; what all kinds of coordinators share

A partition with an empty log costs only its shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import PartitionShard
from tidelog.coordinator.timers import Timers
from tidelog.metadata import configs
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.queries import FindTopics, FoundTopics
from tidelog.metadata.tail import MetadataTail
from tidelog.model.group_errors import CoordinatorNotAvailableError, NotCoordinatorError
from tidelog.model.ids import NodeId, TopicId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replicas import Replicas
from tidelog.replication.tasks import ReplicaTasks
from tidelog.world.clock import Clock

LOGGER = logging.getLogger(__name__)

LOADS_MAX = 4
"""Partitions loaded concurrently."""
TOPICS_PER_REQUEST = 10_000

ShardT = TypeVar("ShardT", bound=PartitionShard[Any])


@dataclass(slots=True)
class CoordinatorCounts:
    """For metrics."""

    loads: int = 0
    load_seconds: float = 0.0
    loaded_records: int = 0
    longest_load_seconds: float = 0.0


class PartitionCoordinator(Generic[ShardT]):
    """See the module. Created before `Replicas.start`, since it observes leaderships; `close` at the end. Implements
    `PartitionHost` and `LeadershipObserver`."""

    TOPIC: ClassVar[str]
    SUBJECT: ClassVar[str]
    """What a shard coordinates, in messages."""

    def __init__(self, replicas: Replicas, tail: MetadataTail, clock: Clock, *, waiting_max: int = 10_000) -> None:
        self.me: NodeId = replicas.me
        self.timers = Timers()
        self.waiting_max = waiting_max
        self.load_slots = asyncio.Semaphore(LOADS_MAX)
        self.counts = CoordinatorCounts()
        self.shards: dict[int, ShardT] = {}
        """By partition."""
        self.tasks = ReplicaTasks(self.me, replicas.tasks.on_crash)
        self._replicas = replicas
        self._tail = tail
        self._clock = clock
        self._began = clock.now_ms(), asyncio.get_running_loop().time()
        self._is_closed = False
        replicas.observe(self)

    def _new_shard(self, leader: LeaderReplica) -> ShardT:
        raise NotImplementedError

    # Lifecycle.

    def stop(self) -> None:
        """End all shards, before the API servers close: streams that end because this broker stops remove no member,
        and its requests get NOT_COORDINATOR."""
        self._is_closed = True
        for shard in list(self.shards.values()):
            shard.end()
        self.shards.clear()

    async def close(self) -> None:
        self.stop()
        self.timers.close()
        await self.tasks.cancel()

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that `close` cancels; an unexpected error in it stops the node."""
        return self.tasks.spawn(work, name=name)

    def failed(self, error: BaseException) -> None:
        """Handle an unexpected error: the node stops."""
        self.tasks.crash(f"the coordinator of {self.TOPIC}", error)

    # For shards.

    @property
    def image(self) -> ClusterImage:
        return self._tail.image

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def steady_ms(self) -> int:
        began_ms, began_s = self._began
        return began_ms + int((asyncio.get_running_loop().time() - began_s) * 1000)

    def setting(self, name: str) -> int:
        return configs.cluster_int(self._tail.image, name)

    def report_corruption(self, leader: LeaderReplica, offset: int) -> None:
        self._replicas.report_corruption(leader.replica, offset)

    async def deleted_topics(self, topics: Sequence[TopicId]) -> list[TopicId]:
        """Return the deleted ones of these topics, by the active controller; wait until one answers."""
        deleted: list[TopicId] = []
        for first in range(0, len(topics), TOPICS_PER_REQUEST):
            chunk = topics[first : first + TOPICS_PER_REQUEST]
            reply = await self._replicas.agent.client.call(FindTopics(topic_ids=tuple(chunk)), is_repeatable=True)
            assert isinstance(reply, FoundTopics), "FindTopics returns FoundTopics"
            existing = set(reply.topic_ids)
            deleted += [topic for topic in chunk if topic not in existing]
        return deleted

    def loaded(self, shard: PartitionShard[Any], seconds: float, records: int) -> None:
        counts = self.counts
        counts.loads += 1
        counts.load_seconds += seconds
        counts.loaded_records += records
        counts.longest_load_seconds = max(counts.longest_load_seconds, seconds)
        LOGGER.info(
            "broker=%d coordinates the %s of partition=%d epoch=%d count=%d: read %d records in %d ms",
            self.me,
            shard.CONTENTS,
            shard.number,
            shard.leader.leader_epoch,
            shard.size,
            records,
            seconds * 1000,
        )

    # Leadership.

    def led(self, leader: LeaderReplica) -> None:
        if leader.replica.topic == self.TOPIC and not self._is_closed:
            number = leader.replica.partition_id.partition
            former = self.shards.pop(number, None)
            if former is not None:
                former.end()
            self.shards[number] = shard = self._new_shard(leader)
            shard.start()

    def left(self, leader: LeaderReplica) -> None:
        number = leader.replica.partition_id.partition
        shard = self.shards.get(number)
        if shard is not None and shard.leader is leader:
            del self.shards[number]
            shard.end()

    def shard_of(self, name: str) -> ShardT:
        """Return the shard that can answer for this group or transactional id. Raises NOT_COORDINATOR with the broker
        that coordinates it, COORDINATOR_LOAD_IN_PROGRESS or COORDINATOR_NOT_AVAILABLE."""
        subject, topic = self.SUBJECT, self._tail.image.topic_named(self.TOPIC)
        if topic is None:
            raise NotCoordinatorError(f"{self.TOPIC} does not exist yet: find the coordinator of the {subject} first")
        number = partition_for(name, len(topic.partitions))
        shard = self.shards.get(number)
        if shard is None:
            leader = topic.partitions[number].leader
            if leader == self.me or leader < 0:
                raise CoordinatorNotAvailableError(f"partition {number} of {self.TOPIC} has no leader yet")
            raise NotCoordinatorError(f"broker {leader} coordinates {subject} {name!r}", coordinator=leader)
        shard.check()
        return shard

    def leading_shards(self) -> Iterator[ShardT]:
        """Yield the loaded shards, by partition."""
        for _, shard in sorted(self.shards.items()):
            if shard.is_leading:
                yield shard

    @property
    def loading(self) -> int:
        return sum(not shard.is_leading for shard in self.shards.values())
