"""Rows of topics in Metadata answers, encoded bit by bit and remembered.

A row of a topic costs some microseconds a partition, and the same row is asked for again and again: by each client of
the topic, and by all of them at once when a leader has changed. An image shares what did not change with the one
before it, so a row holds as long as the `Topic` and the brokers are the same objects.

No more than `PARTITIONS_AT_A_TIME` are encoded before the event loop has a turn, also of one topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast
from uuid import UUID
from weakref import WeakKeyDictionary

from tidelog.metadata.image import Broker, ClusterImage, Topic
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.maps import Map
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.kafka.brokers_view import BrokersView
from tidelog.rpc.kafka.messages import METADATA
from tidelog.rpc.kafka.messages.metadata import NO_OPERATIONS, MetadataResponsePartition, MetadataResponseTopic
from tidelog.rpc.kafka.wire import EncodedRows

PARTITIONS_AT_A_TIME = 500
TOPIC_COST = 4
"""A topic takes the time of so many partitions beside its own."""
BYTES_MAX = 32 << 20
"""Of rows that are remembered for one listener; past that all are forgotten."""
LISTENERS_MAX = 16
LISTENERS_SINCE = 6
"""Clients of older versions do not know LISTENER_NOT_FOUND."""


class TopicRows:
    """Of one listener of one broker."""

    def __init__(self, brokers: Map[int, Broker], listener: str) -> None:
        self.brokers = brokers
        self.view = BrokersView(brokers, listener)
        self._rows: dict[tuple[int, int, UUID], tuple[Topic, bytes]] = {}
        self._bytes = 0

    async def encode(
        self, version: int, topics: Iterable[Topic | MetadataResponseTopic], operations: int = NO_OPERATIONS
    ) -> EncodedRows:
        """The rows of topics, and those that say what is wrong with a name. `operations`: what the client may do with
        each of them, if it asks."""
        rows = EncodedRows()
        some: list[bytes] = []
        done = 0
        for topic in topics:
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
                    # Since the last turn: its last slice.
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
        self._remember((version, operations, topic.topic_id), topic, data)
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

    def _remember(self, key: tuple[int, int, UUID], topic: Topic, data: bytes) -> None:
        before = self._rows.pop(key, None)
        self._bytes -= 0 if before is None else len(before[1])
        if self._bytes + len(data) > BYTES_MAX:
            self._rows.clear()
            self._bytes = 0
        if len(data) <= BYTES_MAX:
            self._rows[key] = (topic, data)
            self._bytes += len(data)


_REMEMBERED: WeakKeyDictionary[QuorumLink, dict[str, TopicRows]] = WeakKeyDictionary()
"""By node (there are several in a test's process) and listener."""


def rows_of(link: QuorumLink, image: ClusterImage, listener: str) -> TopicRows:
    """Those that hold for the brokers of this image."""
    known = _REMEMBERED.setdefault(link, {})
    rows = known.get(listener)
    if rows is None or rows.brokers is not image.brokers:
        if rows is None and len(known) >= LISTENERS_MAX:
            known.clear()
        rows = known[listener] = TopicRows(image.brokers, listener)
    return rows
