"""The configuration of a consumer's parts."""

from __future__ import annotations

from tidelog.client.consumer.membership import MemberSettings
from tidelog.client.consumer.reader import ReaderConfig
from tidelog.client.option_table import ConsumerConfig
from tidelog.rpc.v1 import log_pb2

_FOREVER_MS = 1 << 40
_SLACK_MS = 2_000


def isolation_of(config: ConsumerConfig) -> int:
    return log_pb2.READ_COMMITTED if config.isolation == "read_committed" else log_pb2.READ_UNCOMMITTED


def reader_config(config: ConsumerConfig) -> ReaderConfig:
    """A leaderless partition is retried as long as it is assigned."""
    return ReaderConfig(
        min_bytes=config.fetch_min_bytes,
        max_bytes=config.fetch_max_bytes,
        partition_bytes=config.max_partition_fetch_bytes,
        max_wait_ms=config.fetch_max_wait_ms,
        isolation=isolation_of(config),
        rack=config.client_rack,
        buffer_bytes_max=config.prefetch_bytes,
        request_timeout_ms=config.request_timeout_ms,
        leaderless_timeout_ms=_FOREVER_MS,
    )


def member_settings(config: ConsumerConfig) -> MemberSettings | None:
    """None without a group. The rebalance timeout is a little longer than `max_poll_interval_ms`, so that a member that
    does not poll leaves and logs the reason before the coordinator fences it."""
    if config.group is None:
        return None
    return MemberSettings(
        group=config.group,
        instance_id=config.group_instance_id or "",
        rack=config.client_rack,
        client_id=config.client_id,
        assignor=config.assignor,
        session_timeout_ms=config.session_timeout_ms,
        rebalance_timeout_ms=min(config.max_poll_interval_ms + _SLACK_MS, 2**31 - 1),
        heartbeat_interval_ms=config.heartbeat_interval_ms,
    )
