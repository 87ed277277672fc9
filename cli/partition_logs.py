"""Offsets and sizes of partitions, as `topics describe` shows them.

Each leader is asked by itself and for a short time: a leader that does not answer costs its own figures, which are then
not known, and not those of the others.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.offsets import EARLIEST, LATEST
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import log_pb2 as log

ASK_MS = 2_000
STALE_ASK_MS = 200
"""Without a quorum: the command answers within a second."""


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """None: not known."""

    start_offset: int | None
    end_offset: int | None
    """The high watermark: the offset of the next record that can be read."""
    bytes: int | None
    """Of the leader's replica."""


def partition_id(topic: pb.TopicDescription, row: pb.PartitionDescription) -> PartitionId:
    return PartitionId(TopicId(UUID(bytes=topic.topic_id)), row.partition)


UNKNOWN = PartitionLog(None, None, None)


async def partition_logs(
    cluster: ClusterClient,
    topics: Sequence[tuple[pb.TopicDescription, Sequence[pb.PartitionDescription]]],
    *,
    ask_ms: int = ASK_MS,
) -> dict[PartitionId, PartitionLog]:
    """Of all these partitions that have a leader. Each question has `ask_ms`."""
    by_leader: dict[int, dict[PartitionId, str]] = {}
    for topic, rows in topics:
        for row in rows:
            if row.leader >= 0:
                partition = partition_id(topic, row)
                by_leader.setdefault(row.leader, {})[partition] = topic.name
    if not by_leader:
        return {}
    with suppress(TimeoutError):
        async with asyncio.timeout(ask_ms / 1000):
            await cluster.refresh_quietly(*{name for names in by_leader.values() for name in names.values()})
    answers = await asyncio.gather(
        *(_of_leader(cluster, leader, names, ask_ms) for leader, names in sorted(by_leader.items()))
    )
    return {partition: found for answer in answers for partition, found in answer.items()}


async def _of_leader(
    cluster: ClusterClient, leader: int, names: Mapping[PartitionId, str], ask_ms: int
) -> dict[PartitionId, PartitionLog]:
    starts, ends, sizes = await asyncio.gather(
        _offsets(cluster, names, EARLIEST, ask_ms),
        _offsets(cluster, names, LATEST, ask_ms),
        _sizes(cluster, leader, names, ask_ms),
    )
    return {
        partition: PartitionLog(starts.get(partition), ends.get(partition), sizes.get((name, partition.partition)))
        for partition, name in names.items()
    }


async def _offsets(
    cluster: ClusterClient, names: Mapping[PartitionId, str], which: int, ask_ms: int
) -> dict[PartitionId, int]:
    items = {
        place: log.ListOffsetsPartition(topic_id=place.topic_id.bytes, partition=place.partition, timestamp=which)
        for place in names
    }
    try:
        rows = await cluster.ask_leaders(
            "ListOffsets",
            items,
            lambda asked: log.ListOffsetsRequest(partitions=asked),
            topics=sorted(set(names.values())),
            timeout_ms=ask_ms,
        )
    except TidelogError:
        return {}
    return {place: row.offset for place, row in rows.items() if error_in(row) is None and row.offset >= 0}


async def _sizes(
    cluster: ClusterClient, broker: int, names: Mapping[PartitionId, str], ask_ms: int
) -> dict[tuple[str, int], int]:
    try:
        answers = await AdminClient(cluster, timeout_ms=ask_ms).describe_log_dirs(
            [broker], topics=sorted(set(names.values()))
        )
    except TidelogError:
        return {}
    return {
        (row.topic, row.partition): row.bytes
        for answer in answers
        for directory in answer.directories
        for row in directory.replicas
    }
