"""Encodes and caches the topic rows of Metadata responses.

A row costs some microseconds for each partition, and many clients ask for the same row: all at once when a leader has
changed. An image shares unchanged objects with the image before it, so a row is valid as long as the `Topic` and the
brokers are the same objects.

The event loop gets a turn after every `PARTITIONS_AT_A_TIME` partitions, also within one topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast
from uuid import UUID
from weakref import WeakKeyDictionary

from tidelog.metadata.image import Broker, ClusterImage, Topic
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.maps import Map
from tidelog.rpc.kafka.brokers_view import BrokersView
from tidelog.rpc.kafka.messages import METADATA
from tidelog.rpc.kafka.messages.metadata import NO_OPERATIONS, MetadataResponsePartition, MetadataResponseTopic
from tidelog.rpc.kafka.wire import EncodedRows
from tidelog.services.metadata_cache import MetadataCache

PARTITIONS_AT_A_TIME = 500
TOPIC_COST = 4
"""A topic takes as long as this many partitions, besides its own."""
BYTES_MAX = 32 << 20
"""Of cached rows for one listener; the cache is emptied when it would exceed this."""
LISTENERS_MAX = 16
LISTENERS_SINCE = 6
"""Clients of older versions do not know LISTENER_NOT_FOUND."""


class TopicRows:
    """The rows for one listener of one broker."""

    def __init__(self, brokers: Map[int, Broker], listener: str) -> None:
        self.brokers = brokers
        self.view = BrokersView(brokers, listener)
        self._rows: dict[tuple[int, int, UUID], tuple[Topic, bytes]] = {}
        self._bytes = 0

    async def encode(
        self,
        version: int,
        topics: Iterable[Topic | MetadataResponseTopic],
        on_topic: Callable[[str], int] | None = None,
    ) -> EncodedRows:
        """Encode rows of topics, and rows with errors. `on_topic` returns the authorized operations, if the client asks
        for them."""
        rows = EncodedRows()
        some: list[bytes] = []
        done = 0
        for topic in topics:
            operations = NO_OPERATIONS if on_topic is None else on_topic(topic.name or "")
            if isinstance(topic, MetadataResponseTopic):
                topic.topic_authorized_operations = operations
                some.append(METADATA.encode_rows(version, MetadataResponseTopic, [topic]))
                done += TOPIC_COST
            else:
                known = self._rows.get((version, operations, topic.topic_id))
                if known is not None and known[0] is topic:
                    some.append(known[1])
                    done += 1
                else:
                    some.append(await self._encoded(version, topic, operations))
                    # Only its last slice is since the last turn of the loop.
                    done += TOPIC_COST + (len(topic.partitions) - 1) % PARTITIONS_AT_A_TIME + 1
            if done >= PARTITIONS_AT_A_TIME:
                rows.add(len(some), b"".join(some))
                some.clear()
                done = 0
                await asyncio.sleep(0)
        rows.add(len(some), b"".join(some))
        return rows

    async def _encoded(self, version: int, topic: Topic, operations: int) -> bytes:
        count = len(topic.partitions)
        if count <= PARTITIONS_AT_A_TIME:
            partitions = self._partitions(version, topic, range(count))
        else:
            encoded = EncodedRows()
            for first in range(0, count, PARTITIONS_AT_A_TIME):
                if first:
                    await asyncio.sleep(0)
                numbers = range(first, min(first + PARTITIONS_AT_A_TIME, count))
                rows = self._partitions(version, topic, numbers)
                encoded.add(len(rows), METADATA.encode_rows(version, MetadataResponsePartition, rows))
            partitions = cast("list[MetadataResponsePartition]", encoded)
        row = MetadataResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id.bytes,
            is_internal=topic.name in INTERNAL_TOPICS,
            partitions=partitions,
            topic_authorized_operations=operations,
        )
        data = METADATA.encode_rows(version, MetadataResponseTopic, [row])
        self._cache_row((version, operations, topic.topic_id), topic, data)
        return data

    def _partitions(self, version: int, topic: Topic, numbers: range) -> list[MetadataResponsePartition]:
        view, tells_listeners = self.view, version >= LISTENERS_SINCE
        rows = []
        for number in numbers:
            partition = topic.partitions[number]
            leader, error = view.leader(partition, tells_listeners=tells_listeners)
            rows.append(
                MetadataResponsePartition(
                    error_code=error,
                    partition_index=number,
                    leader_id=leader,
                    leader_epoch=partition.leader_epoch,
                    replica_nodes=list(partition.replicas),
                    isr_nodes=list(partition.isr),
                    offline_replicas=view.offline(partition),
                )
            )
        return rows

    def _cache_row(self, key: tuple[int, int, UUID], topic: Topic, data: bytes) -> None:
        before = self._rows.pop(key, None)
        self._bytes -= 0 if before is None else len(before[1])
        if self._bytes + len(data) > BYTES_MAX:
            self._rows.clear()
            self._bytes = 0
        if len(data) <= BYTES_MAX:
            self._rows[key] = (topic, data)
            self._bytes += len(data)


_CACHES: WeakKeyDictionary[MetadataCache, dict[str, TopicRows]] = WeakKeyDictionary()
"""By node (a test has several in one process) and listener."""


def rows_of(cache: MetadataCache, image: ClusterImage, listener: str) -> TopicRows:
    """Return the rows that are valid for the brokers of this image."""
    known = _CACHES.setdefault(cache, {})
    rows = known.get(listener)
    if rows is None or rows.brokers is not image.brokers:
        if rows is None and len(known) >= LISTENERS_MAX:
            known.clear()
        rows = known[listener] = TopicRows(image.brokers, listener)
    return rows
