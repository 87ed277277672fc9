"""The group coordinator of a broker: the shards of `__consumer_offsets` (`partition_coordinator`).

metadata --> groups with changed topics are reassigned, offsets of deleted topics expire, configs apply
one sweep for expired offsets
"""

from __future__ import annotations

import asyncio
from random import Random

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.partition_coordinator import PartitionCoordinator
from tidelog.coordinator.requests import EndPendingOffsets
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.topics_view import ImageTopics, reshaped_topics
from tidelog.metadata import configs
from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.model.group_errors import CoordinatorNotAvailableError
from tidelog.model.ids import TopicId
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replicas import Replicas
from tidelog.replication.transaction_messages import Marker
from tidelog.world.clock import Clock

OFFSETS_TOPIC = "__consumer_offsets"
MINUTE_MS = 60_000
SWEEP_CHECK_S = 1.0


class GroupCoordinator(PartitionCoordinator[Shard]):
    """See the module. `start`, then `close`. Implements `ShardHost`."""

    TOPIC = OFFSETS_TOPIC
    SUBJECT = Shard.SUBJECT

    def __init__(self, replicas: Replicas, tail: MetadataTail, clock: Clock, *, waiting_max: int = 10_000) -> None:
        super().__init__(replicas, tail, clock, waiting_max=waiting_max)
        self.limits = GroupLimits()
        self.commit_timeout_ms = 0
        self.random: Random = replicas.random
        self._view = ImageTopics(tail.image)

    def start(self) -> None:
        """Start; called before `Replicas.start`, so that shards find the configs."""
        self._settings_changed(self._tail.image)
        self._tail.subscribe(self._metadata_changed)
        self.spawn(self._sweep(), name="expire-offsets")

    def _new_shard(self, leader: LeaderReplica) -> Shard:
        return Shard(self, leader)

    # `ShardHost`.

    @property
    def view(self) -> ImageTopics:
        """The topics of the current image."""
        if self._view.image is not self._tail.image:
            self._view = ImageTopics(self._tail.image, self._view)
        return self._view

    @property
    def grace_ms(self) -> int:
        return self.setting("group.consumer.stream.grace.ms")

    @property
    def reconnect_ms(self) -> int:
        return self.setting("group.consumer.stream.reconnect.ms")

    @property
    def offsets_retention_ms(self) -> int:
        return self.setting("offsets.retention.minutes") * MINUTE_MS

    @property
    def fences_retention_ms(self) -> int:
        return self.setting("producer.id.expiration.ms")

    # Transactions.

    async def write_marker(self, leader: LeaderReplica, marker: Marker) -> None:
        """End the producer's pending offsets in the partition that `leader` leads; return when that is replicated.
        A repeat changes nothing. Raise an error of the catalogue: the transaction's coordinator repeats the marker."""
        shard = self.shards.get(leader.replica.partition_id.partition)
        if shard is None or shard.leader is not leader:
            raise CoordinatorNotAvailableError(f"{leader.log.path}: its groups are not coordinated here yet")
        request = EndPendingOffsets(
            producer_id=marker.producer_id,
            epoch=marker.epoch,
            number=marker.number,
            coordinator_epoch=marker.coordinator_epoch,
            is_commit=marker.is_commit,
            is_strict=marker.is_strict,
            now_ms=self.now_ms(),
        )
        await shard.submit(request, is_own=True)

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
