"""`Lookups`: what a consumer may ask about any partition, its own or not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from tidelog.client.cluster import ClusterClient
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import EARLIEST, LATEST, FoundOffset
from tidelog.client.placing import Placing
from tidelog.client.positions import Held
from tidelog.client.record import OffsetAndTimestamp, TopicPartition
from tidelog.model.errors import TidelogError, UnknownTopicOrPartitionError
from tidelog.model.ids import PartitionId

LOGGER = logging.getLogger(__name__)


def topic_of(name: str, partition: PartitionId) -> TopicInfo:
    """The same for all partitions of a topic."""
    return TopicInfo(name, partition.topic_id, False, ())


class Lookups:
    def __init__(self, cluster: ClusterClient, placing: Placing) -> None:
        self._cluster = cluster
        self._placing = placing

    async def partition(self, name: TopicPartition) -> PartitionId:
        topic = await self._cluster.topic(name.topic)
        if not 0 <= name.partition < len(topic.partitions):
            await self._cluster.refresh(name.topic)
            topic = await self._cluster.topic(name.topic)
        if not 0 <= name.partition < len(topic.partitions):
            last = len(topic.partitions) - 1
            raise UnknownTopicOrPartitionError(f"{name}: '{name.topic}' has partitions 0 to {last}")
        return topic.partitions[name.partition]

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """As the cluster has them now."""
        await self._cluster.refresh(topic)
        found = await self._cluster.topic(topic)
        return [TopicPartition(topic, place.partition) for place in found.partitions]

    async def look_for(self, topics: Sequence[str], *, may_create: bool) -> None:
        """Of a subscription: a topic that is not there is read as soon as it is; a name that was misspelt never is."""
        if may_create:
            await self.make(topics)
        if await self._cluster.refresh_quietly(*topics) is None:
            for name in topics:
                if name not in self._cluster.view.topics:
                    LOGGER.warning("there is no topic '%s' yet", name)

    async def make(self, topics: Iterable[str]) -> None:
        """By asking for them, where the cluster allows it."""
        for name in dict.fromkeys(topics):
            try:
                await self._cluster.topic(name, may_create=True)
            except TidelogError as error:
                LOGGER.warning("topic '%s' could not be made: %s", name, error)

    async def ends(self, names: Iterable[TopicPartition], *, is_start: bool) -> dict[TopicPartition, int]:
        timestamp = EARLIEST if is_start else LATEST
        return {name: row.offset for name, row in (await self._ask(dict.fromkeys(names, timestamp))).items()}

    async def times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        rows = await self._ask(times)
        return {
            name: OffsetAndTimestamp(row.offset, row.timestamp) if row.offset >= 0 else None
            for name, row in rows.items()
        }

    async def _ask(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, FoundOffset]:
        by_time: dict[int, list[Held]] = {}
        for name, timestamp in times.items():
            partition = await self.partition(TopicPartition(*name))
            by_time.setdefault(timestamp, []).append(Held(topic_of(name[0], partition), partition))
        found: dict[TopicPartition, FoundOffset] = {}
        for timestamp, places in by_time.items():
            for held, row in (await self._placing.ask(places, timestamp)).items():
                if row.error is not None:
                    raise row.error
                found[held.name] = row
        return found
