"""What a consumer tells of itself in numbers."""

from __future__ import annotations

from tidelog.client.group_offsets import GroupOffsets
from tidelog.client.membership import Membership
from tidelog.client.positions import Positions
from tidelog.client.reader import Reader


def figures_of(
    positions: Positions, reader: Reader, offsets: GroupOffsets | None, membership: Membership | None
) -> dict[str, float]:
    """Counts since the start, and the state of now. Lag is as of the last fetch of each partition."""
    lags = {
        held.name: max(0, end - held.offset)
        for held in positions
        if held.offset >= 0 and (end := reader.high_watermark(held.partition)) >= 0
    }
    found: dict[str, float] = {
        "assigned_partitions": len(positions.held),
        "prefetched_bytes": reader.buffered_bytes,
        "records_lag_max": max(lags.values(), default=0),
    }
    if offsets is not None:
        found |= {"commits": offsets.commits, "commit_failures": offsets.failures}
    if membership is not None:
        found |= {"heartbeats": membership.heartbeats, "joins": membership.joins}
    return found | {f"records_lag.{name}": lag for name, lag in lags.items()}
