"""A consumer's options as its parts take them."""

from __future__ import annotations

from tidelog.client.membership import MemberSettings
from tidelog.client.names import ConsumerOptions
from tidelog.client.reader import ReaderConfig
from tidelog.rpc.v1 import log_pb2

_FOREVER_MS = 1 << 40
_SLACK_MS = 2_000


def isolation_of(options: ConsumerOptions) -> int:
    return log_pb2.READ_COMMITTED if options.isolation == "read_committed" else log_pb2.READ_UNCOMMITTED


def reader_config(options: ConsumerOptions) -> ReaderConfig:
    """A leader that cannot be found is looked for as long as the partition is assigned."""
    return ReaderConfig(
        min_bytes=options.fetch_min_bytes,
        max_bytes=options.fetch_max_bytes,
        partition_bytes=options.max_partition_fetch_bytes,
        max_wait_ms=options.fetch_max_wait_ms,
        isolation=isolation_of(options),
        rack=options.client_rack,
        buffer_bytes_max=options.prefetch_bytes,
        request_timeout_ms=options.request_timeout_ms,
        patience_ms=_FOREVER_MS,
    )


def member_settings(options: ConsumerOptions) -> MemberSettings | None:
    """None without a group. A member that has to give something up has as long as one between two polls, and a little
    more: who does not poll finds that out himself, and says so, before the coordinator puts him out."""
    if options.group is None:
        return None
    return MemberSettings(
        group=options.group,
        instance_id=options.group_instance_id or "",
        rack=options.client_rack,
        client_id=options.client_id,
        assignor=options.assignor,
        session_timeout_ms=options.session_timeout_ms,
        rebalance_timeout_ms=min(options.max_poll_interval_ms + _SLACK_MS, 2**31 - 1),
        heartbeat_interval_ms=options.heartbeat_interval_ms,
    )
