"""`Lookups`: topics, partitions and offsets, whether they are assigned or not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.offset_reset import OffsetReset
from tidelog.client.consumer.reconciler import topic_of
from tidelog.client.consumer.subscription_state import PartitionState
from tidelog.client.offsets import FoundOffset
from tidelog.client.record import OffsetAndTimestamp, TopicPartition
from tidelog.model.errors import TidelogError, UnknownTopicOrPartitionError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)


def unknown_partition(name: TopicPartition, count: int) -> UnknownTopicOrPartitionError:
    return UnknownTopicOrPartitionError(f"{name}: '{name.topic}' has partitions 0 to {count - 1}")


class Lookups:
    def __init__(self, cluster: ClusterClient, offset_reset: OffsetReset) -> None:
        self._cluster = cluster
        self._offset_reset = offset_reset

    async def partition(self, name: TopicPartition) -> PartitionId:
        topic = await self._cluster.topic(name.topic)
        if not 0 <= name.partition < len(topic.partitions):
            await self._cluster.refresh(name.topic)
            topic = await self._cluster.topic(name.topic)
        if not 0 <= name.partition < len(topic.partitions):
            raise unknown_partition(name, len(topic.partitions))
        return topic.partitions[name.partition]

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """From fresh metadata."""
        await self._cluster.refresh(topic)
        partitions = (await self._cluster.topic(topic)).partitions
        return [TopicPartition(topic, partition.partition) for partition in partitions]

    async def check_topics(self, topics: Sequence[str], *, may_create: bool) -> None:
        """Of a subscription: logs the names that do not exist. A topic that is created later is read then."""
        if may_create:
            await self.create(topics)
        if await self._cluster.refresh_quietly(*topics) is None:
            for name in topics:
                if name not in self._cluster.view.topics:
                    LOGGER.warning("topic '%s' does not exist yet", name)

    async def create(self, topics: Iterable[str]) -> None:
        """Where the cluster allows it."""
        for name in dict.fromkeys(topics):
            try:
                await self._cluster.topic(name, may_create=True)
            except TidelogError as error:
                LOGGER.warning("topic '%s' could not be created: %s", name, error)

    async def offsets(self, names: Iterable[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        """`timestamp` is EARLIEST or LATEST."""
        return {name: row.offset for name, row in (await self._list(dict.fromkeys(names, timestamp))).items()}

    async def times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        rows = await self._list(times)
        return {
            name: OffsetAndTimestamp(row.offset, row.timestamp) if row.offset >= 0 else None
            for name, row in rows.items()
        }

    async def _list(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, FoundOffset]:
        by_time: dict[int, list[PartitionState]] = {}
        for name, timestamp in times.items():
            partition = await self.partition(name)
            by_time.setdefault(timestamp, []).append(PartitionState(topic_of(name.topic, partition), partition))
        offsets: dict[TopicPartition, FoundOffset] = {}
        for timestamp, states in by_time.items():
            for state, row in (await self._offset_reset.list_offsets(states, timestamp)).items():
                if row.error is not None:
                    raise row.error
                offsets[state.name] = row
        return offsets
