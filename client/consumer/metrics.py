"""The metrics of a consumer."""

from __future__ import annotations

from tidelog.client.consumer.membership import Membership
from tidelog.client.consumer.reader import Reader
from tidelog.client.consumer.subscription_state import SubscriptionState
from tidelog.client.group_offsets import GroupOffsets

NAMES = (
    "records_consumed",
    "bytes_consumed",
    "polls",
    "rebalances",
    "poll_interval_exceeded",
    "assigned_partitions",
    "prefetched_bytes",
    "records_lag_max",
)
GROUP_NAMES = ("commits", "commit_failures", "heartbeats", "joins")
"""In addition, if there is a group. And `records_lag.<partition>` of each partition that was fetched."""


def core_metrics(
    subscription: SubscriptionState, reader: Reader, offsets: GroupOffsets | None, membership: Membership | None
) -> dict[str, float]:
    """Counters since the start, and gauges. The lag of a partition is as of its last fetch."""
    lags = {
        state.name: max(0, state.high_watermark - state.position.consumed[0])
        for state in list(subscription)  # at once: the IO thread may change it
        if state.position is not None and state.high_watermark >= 0
    }
    metrics: dict[str, float] = {
        "assigned_partitions": len(subscription.partitions),
        "prefetched_bytes": reader.buffered_bytes,
        "records_lag_max": max(lags.values(), default=0),
    }
    if offsets is not None:
        metrics |= {"commits": offsets.commits, "commit_failures": offsets.failures}
    if membership is not None:
        metrics |= {"heartbeats": membership.heartbeats, "joins": membership.joins}
    return metrics | {f"records_lag.{name}": lag for name, lag in lags.items()}
