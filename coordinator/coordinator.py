"""The group coordinator of a broker: a shard for each partition of `__consumer_offsets` that it leads.

    replicas: led, left --> shards are created and ended    metadata --> groups with changed topics are reassigned,
    one timer heap, one sweep for expired offsets                        offsets of deleted topics expire, configs apply

A partition without groups costs only its shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.shard import Phase, Shard
from tidelog.coordinator.timers import Timers
from tidelog.coordinator.topics_view import ImageTopics, reshaped_topics
from tidelog.metadata import configs
from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.queries import FindTopics, FoundTopics
from tidelog.metadata.tail import MetadataTail
from tidelog.model.ids import NodeId, TopicId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replicas import Replicas
from tidelog.replication.tasks import ReplicaTasks
from tidelog.world.clock import Clock

LOGGER = logging.getLogger(__name__)

OFFSETS_TOPIC = "__consumer_offsets"
MINUTE_MS = 60_000
SWEEP_CHECK_S = 1.0
LOADS_MAX = 4
"""Partitions loaded concurrently."""
TOPICS_PER_REQUEST = 10_000


@dataclass(slots=True)
class CoordinatorCounts:
    """For metrics."""

    loads: int = 0
    load_seconds: float = 0.0
    loaded_records: int = 0
    longest_load_seconds: float = 0.0


class GroupCoordinator:
    """See the module. Created before `Replicas.start`; `start`, then `close`. Implements `ShardHost` and
    `LeadershipObserver`."""

    def __init__(self, replicas: Replicas, tail: MetadataTail, clock: Clock, *, waiting_max: int = 10_000) -> None:
        self.me: NodeId = replicas.me
        self.timers = Timers()
        self.limits = GroupLimits()
        self.waiting_max = waiting_max
        self.commit_timeout_ms = 0
        self.load_slots = asyncio.Semaphore(LOADS_MAX)
        self.random: Random = replicas.random
        self.counts = CoordinatorCounts()
        self.shards: dict[int, Shard] = {}
        """By partition."""
        self.tasks = ReplicaTasks(self.me, replicas.tasks.on_crash)
        self._replicas = replicas
        self._tail = tail
        self._clock = clock
        self._began = clock.now_ms(), asyncio.get_running_loop().time()
        self._view = ImageTopics(tail.image)
        self._is_closed = False
        replicas.observe(self)

    # Lifecycle.

    def start(self) -> None:
        """Start; called before `Replicas.start`, so that shards find the configs."""
        self._settings_changed(self._tail.image)
        self._tail.subscribe(self._metadata_changed)
        self.spawn(self._sweep(), name="expire-offsets")

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
        self.tasks.crash("the group coordinator", error)

    # `ShardHost`.

    @property
    def image(self) -> ClusterImage:
        return self._tail.image

    @property
    def view(self) -> ImageTopics:
        """The topics of the current image."""
        if self._view.image is not self._tail.image:
            self._view = ImageTopics(self._tail.image, self._view)
        return self._view

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def steady_ms(self) -> int:
        began_ms, began_s = self._began
        return began_ms + int((asyncio.get_running_loop().time() - began_s) * 1000)

    def setting(self, name: str) -> int:
        return configs.cluster_int(self._tail.image, name)

    @property
    def grace_ms(self) -> int:
        return self.setting("group.consumer.stream.grace.ms")

    @property
    def reconnect_ms(self) -> int:
        return self.setting("group.consumer.stream.reconnect.ms")

    @property
    def offsets_retention_ms(self) -> int:
        return self.setting("offsets.retention.minutes") * MINUTE_MS

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

    def loaded(self, shard: Shard, seconds: float, records: int) -> None:
        counts = self.counts
        counts.loads += 1
        counts.load_seconds += seconds
        counts.loaded_records += records
        counts.longest_load_seconds = max(counts.longest_load_seconds, seconds)
        groups = len(shard.state.groups)
        LOGGER.info(
            "broker=%d coordinates partition=%d epoch=%d groups=%d: read %d records in %d ms",
            self.me,
            shard.number,
            shard.leader.leader_epoch,
            groups,
            records,
            seconds * 1000,
        )

    # Leadership.

    def led(self, leader: LeaderReplica) -> None:
        if leader.replica.topic == OFFSETS_TOPIC and not self._is_closed:
            number = leader.replica.partition_id.partition
            former = self.shards.pop(number, None)
            if former is not None:
                former.end()
            self.shards[number] = Shard(self, leader)

    def left(self, leader: LeaderReplica) -> None:
        number = leader.replica.partition_id.partition
        shard = self.shards.get(number)
        if shard is not None and shard.leader is leader:
            del self.shards[number]
            shard.end()

    def leading_shards(self) -> Iterator[Shard]:
        """Yield the loaded shards, by partition."""
        for _, shard in sorted(self.shards.items()):
            if shard.phase is Phase.LEADING:
                yield shard

    @property
    def loading(self) -> int:
        return sum(shard.phase is not Phase.LEADING for shard in self.shards.values())

    # Metadata.

    def _metadata_changed(self, delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
        if any(kind == "cluster" for kind, _ in delta.configs):
            self._settings_changed(newer)
        names = reshaped_topics(delta, older, newer)
        if delta.brokers and _racks(older) != _racks(newer):
            names.update(newer.topic_ids)
        if not names:
            return
        gone = [TopicId(topic_id) for topic_id in delta.removed_topics]
        for shard in self.leading_shards():
            shard.background.topics_changed(shard.subscriptions.concerned(sorted(names)), gone)

    def _settings_changed(self, image: ClusterImage) -> None:
        self.limits = limits_of(image)
        self.commit_timeout_ms = configs.cluster_int(image, "offsets.commit.timeout.ms")
        for shard in self.shards.values():
            shard.machine.limits = self.limits
            shard.rounds.limits_changed()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            # Read each time: a shorter interval applies before the longer one has passed.
            await asyncio.sleep(SWEEP_CHECK_S)
            if loop.time() - last_s >= self.setting("offsets.retention.check.interval.ms") / 1000:
                last_s = loop.time()
                for shard in self.leading_shards():
                    shard.background.expire_offsets()


def _racks(image: ClusterImage) -> dict[int, str]:
    return {number: broker.rack for number, broker in image.brokers.items() if broker.rack}


def limits_of(image: ClusterImage) -> GroupLimits:
    def setting(name: str) -> int:
        return configs.cluster_int(image, name)

    return GroupLimits(
        session_timeout_ms=setting("group.consumer.session.timeout.ms"),
        session_timeout_min_ms=setting("group.min.session.timeout.ms"),
        session_timeout_max_ms=setting("group.max.session.timeout.ms"),
        heartbeat_interval_ms=setting("group.consumer.heartbeat.interval.ms"),
        members_max=setting("group.consumer.max.size"),
        offset_metadata_bytes_max=setting("offset.metadata.max.bytes"),
        initial_rebalance_delay_ms=setting("group.initial.rebalance.delay.ms"),
        migration_policy=configs.cluster_choice(image, "group.consumer.migration.policy"),
    )
