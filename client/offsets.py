"""Asks partition leaders for offsets: log start and end, by timestamp, by epoch, and range sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.client.metadata import TopicInfo
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId
from tidelog.rpc.v1 import log_pb2 as pb

LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3


@dataclass(frozen=True, slots=True)
class FoundOffset:
    """`offset` is -1 if there is no such record; `error` is set if the lookup failed."""

    offset: int
    timestamp: int
    leader_epoch: int
    error: TidelogError | None = None


def _named(partition: PartitionId) -> dict[str, Any]:
    return {"topic_id": partition.topic_id.bytes, "partition": partition.partition}


async def list_offsets(
    cluster: ClusterClient,
    topic: TopicInfo,
    timestamp: int,
    *,
    partitions: Sequence[PartitionId] | None = None,
    timeout_ms: int | None = None,
) -> dict[PartitionId, FoundOffset]:
    """Look up `timestamp` (ms since 1970, or LATEST, EARLIEST, MAX_TIMESTAMP) in all partitions, or in `partitions`."""
    places = topic.partitions if partitions is None else partitions
    items = {place: pb.ListOffsetsPartition(timestamp=timestamp, **_named(place)) for place in places}
    rows = await cluster.ask_leaders(
        "ListOffsets",
        items,
        lambda asked: pb.ListOffsetsRequest(partitions=asked),
        topics=[topic.name],
        timeout_ms=timeout_ms,
    )
    return {
        place: FoundOffset(row.offset, row.timestamp, row.leader_epoch, error_in(row))
        for place, row in ((place, rows[place]) for place in places)
    }


async def epoch_end(
    cluster: ClusterClient, topic: TopicInfo, partition: PartitionId, epoch: int, *, timeout_ms: int | None = None
) -> tuple[int, int]:
    """Return (the largest epoch of the log up to `epoch`, its end offset); (-1, -1) if there is none."""
    items = {partition: pb.EpochPartition(epoch=epoch, **_named(partition))}
    rows = await cluster.ask_leaders(
        "OffsetForLeaderEpoch",
        items,
        lambda asked: pb.OffsetForLeaderEpochRequest(partitions=asked),
        topics=[topic.name],
        timeout_ms=timeout_ms,
    )
    row = rows[partition]
    if (error := error_in(row)) is not None:
        raise error
    return row.epoch, row.end_offset


async def delete_records(
    cluster: ClusterClient,
    topics: Sequence[TopicInfo],
    before: Mapping[PartitionId, int],
    *,
    timeout_ms: int | None = None,
) -> dict[PartitionId, int | TidelogError]:
    """Delete the records before each offset (-1: all readable ones). Returns the new log starts, or errors. It is
    idempotent."""
    items = {
        place: pb.DeleteRecordsPartition(before_offset=offset, **_named(place)) for place, offset in before.items()
    }
    rows = await cluster.ask_leaders(
        "DeleteRecords",
        items,
        lambda asked: pb.DeleteRecordsRequest(partitions=asked),
        topics=[topic.name for topic in topics],
        timeout_ms=timeout_ms,
    )
    return {place: error_in(row) or int(row.start_offset) for place, row in rows.items()}


async def range_bytes(
    cluster: ClusterClient,
    topic: TopicInfo,
    ranges: Mapping[PartitionId, tuple[int, int]],
    *,
    timeout_ms: int | None = None,
) -> dict[PartitionId, int | TidelogError]:
    """Return the stored bytes between two offsets of each partition."""
    items = {
        place: pb.OffsetRange(start_offset=start, end_offset=end, **_named(place))
        for place, (start, end) in ranges.items()
    }
    rows = await cluster.ask_leaders(
        "RangeBytes",
        items,
        lambda asked: pb.RangeBytesRequest(partitions=asked),
        topics=[topic.name],
        timeout_ms=timeout_ms,
    )
    return {place: error_in(row) or int(row.bytes) for place, row in rows.items()}
