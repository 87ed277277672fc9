"""Records of whole topics and of consumers, for tests that look at all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from support.clients.consumers import SimConsumer
from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.reader import Reader
from tidelog.client.offsets import EARLIEST, LATEST, list_offsets
from tidelog.client.record import ConsumerRecord
from tidelog.log.batch import Record


async def make_topic(client: ClusterClient, name: str, *, partitions: int = 1, **more: str) -> None:
    """On three replicas; `more` are settings, with underscores for the dots."""
    configs = {key.replace("_", "."): value for key, value in more.items()}
    await AdminCore(client).create_topic(name, partitions=partitions, replication_factor=3, configs=configs)


async def create(client: ClusterClient, name: str, *assignment: tuple[int, ...]) -> None:
    """Partitions with these replicas, led by the first of them."""
    await AdminCore(client).create_topic(name, assignment=assignment)


async def stored(client: ClusterClient, name: str) -> dict[int, list[Record]]:
    """Records of each partition, from start to end."""
    topic = await client.topic(name)
    starts = await list_offsets(client, topic, EARLIEST)
    ends = await list_offsets(client, topic, LATEST)
    reader = Reader(client)
    reader.assign_topic(topic, {place: row.offset for place, row in starts.items()})
    found: dict[int, list[Record]] = {place.partition: [] for place in topic.partitions}
    try:
        while any(reader.position(place) < row.offset for place, row in ends.items()):
            for piece in await reader.poll(1000):
                found[piece.partition.partition] += piece.records()
    finally:
        await reader.close()
    return found


async def values(client: ClusterClient, name: str, partition: int = 0) -> list[bytes | None]:
    return [record.value for record in (await stored(client, name))[partition]]


async def some(consumer: SimConsumer, count: int, *, max_records: int = 500) -> list[ConsumerRecord[Any, Any]]:
    found: list[ConsumerRecord[Any, Any]] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll(1.0, max_records)
    return found


async def each(consumer: SimConsumer, topic: str) -> AsyncIterator[ConsumerRecord[Any, Any]]:
    await consumer.subscribe(topic)
    async for record in consumer:
        yield record
