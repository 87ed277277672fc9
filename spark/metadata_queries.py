"""Asks the cluster for topics, log start and end offsets, epoch ends and range sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any
from uuid import UUID

from google.protobuf.message import Message

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.errors import OptionError, UnknownTopicError
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import FoundOffset
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.v1 import log_pb2 as pb
from tidelog.spark.offsets import ReadRange
from tidelog.spark.options import Subscription

Place = tuple[str, int]
"""Topic and partition."""
AT_ONCE = 5_000
"""Partitions per request."""


def partition_id(topic_id: str, partition: int) -> PartitionId:
    return PartitionId(TopicId(UUID(topic_id)), partition)


class MetadataQueries:
    """Used on the IO loop. Every query raises the first error that does not pass before its timeout."""

    def __init__(self, cluster: ClusterClient, subscription: Subscription, *, is_committed_only: bool) -> None:
        self.cluster = cluster
        self._subscription = subscription
        self._isolation = pb.READ_COMMITTED if is_committed_only else pb.READ_UNCOMMITTED

    async def topics(self) -> dict[str, TopicInfo]:
        """Return the subscribed topics that exist now."""
        if self._subscription.pattern:
            listed = await self.cluster.all_topics()
            return {one.name: one for one in listed if not one.is_internal and self._subscription.takes(one.name)}
        await self.cluster.refresh(*self._subscription.names)
        topics: dict[str, TopicInfo] = {}
        for name in self._subscription.names:
            try:
                topics[name] = await self.cluster.topic(name)
            except UnknownTopicError:
                continue
        return topics

    def places(self, topics: Mapping[str, TopicInfo]) -> dict[Place, PartitionId]:
        """Return the subscribed partitions. Raises OptionError for an assigned partition that does not exist."""
        partitions: dict[Place, PartitionId] = {}
        for name, topic in sorted(topics.items()):
            for number in self._subscription.numbers(name, len(topic.partitions)):
                if number >= len(topic.partitions):
                    raise OptionError(
                        f"assign: topic '{name}' has {len(topic.partitions)} partitions; there is no partition {number}"
                    )
                partitions[name, number] = topic.partitions[number]
        return partitions

    async def _ask(
        self,
        name: str,
        items: Mapping[PartitionId, Any],
        request_of: Callable[[list[Any]], Message],
        topics: Sequence[str],
        timeout_ms: int | None,
    ) -> dict[PartitionId, Any]:
        rows: dict[PartitionId, Any] = {}
        left = iter(items.items())
        while part := dict(islice(left, AT_ONCE)):
            rows |= await self.cluster.ask_leaders(name, part, request_of, topics=topics, timeout_ms=timeout_ms)
        return rows

    async def offsets(
        self,
        places: Mapping[Place, PartitionId],
        timestamp: int | Mapping[Place, int],
        *,
        timeout_ms: int | None = None,
    ) -> dict[Place, FoundOffset]:
        """Look up offsets by timestamp, EARLIEST or LATEST: one for all partitions, or one for each. LATEST is the
        readable end under the isolation level."""
        items = {
            where: pb.ListOffsetsPartition(
                topic_id=where.topic_id.bytes,
                partition=where.partition,
                timestamp=timestamp if isinstance(timestamp, int) else timestamp[place],
            )
            for place, where in places.items()
        }
        rows = await self._ask(
            "ListOffsets",
            items,
            lambda asked: pb.ListOffsetsRequest(partitions=asked, isolation=self._isolation),
            sorted({name for name, _ in places}),
            timeout_ms,
        )
        offsets = {}
        for place, where in places.items():
            row = rows[where]
            if (error := error_in(row)) is not None:
                raise error
            offsets[place] = FoundOffset(row.offset, row.timestamp, row.leader_epoch)
        return offsets

    async def epoch_ends(
        self, places: Mapping[Place, PartitionId], epochs: Mapping[Place, int], *, timeout_ms: int | None = None
    ) -> dict[Place, int | None]:
        """Return where each epoch ends; None if the leader does not know the epoch."""
        items = {
            where: pb.EpochPartition(topic_id=where.topic_id.bytes, partition=where.partition, epoch=epochs[place])
            for place, where in places.items()
        }
        rows = await self._ask(
            "OffsetForLeaderEpoch",
            items,
            lambda asked: pb.OffsetForLeaderEpochRequest(partitions=asked),
            sorted({name for name, _ in places}),
            timeout_ms,
        )
        ends: dict[Place, int | None] = {}
        for place, where in places.items():
            if (error := error_in(rows[where])) is not None:
                raise error
            ends[place] = rows[where].end_offset if rows[where].epoch >= 0 else None
        return ends

    async def sizes(self, ranges: Sequence[ReadRange], *, timeout_ms: int | None = None) -> dict[Place, int]:
        """Return stored bytes. Ranges whose leader does not answer are missing: sizes serve planning only."""
        places = {partition_id(one.topic_id, one.partition): (one.topic, one.partition) for one in ranges}
        items = {
            where: pb.OffsetRange(
                topic_id=where.topic_id.bytes, partition=where.partition, start_offset=one.start, end_offset=one.end
            )
            for where, one in zip(places, ranges, strict=True)
        }
        try:
            rows = await self._ask(
                "RangeBytes",
                items,
                lambda asked: pb.RangeBytesRequest(partitions=asked),
                sorted({one.topic for one in ranges}),
                timeout_ms,
            )
        except TidelogError as error:
            if not error.retriable:
                raise
            return {}
        return {places[where]: int(row.bytes) for where, row in rows.items() if error_in(row) is None}

    def leaders(self, ranges: Sequence[ReadRange]) -> dict[Place, int]:
        """Return the leaders that are known."""
        leaders = {}
        for one in ranges:
            leader = self.cluster.leader(partition_id(one.topic_id, one.partition))
            if leader is not None:
                leaders[one.topic, one.partition] = leader.node
        return leaders
