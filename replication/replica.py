"""One replica of this broker: its partition in the metadata, its log and its role; and the config of all replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from tidelog.log.config import FlushMode
from tidelog.log.log import Log
from tidelog.metadata.image import Partition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.partition import FollowerState, LeaderState


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Limits and intervals that are no cluster configs (`replica.lag.time.max.ms` and the throttles are)."""

    fetch_message_bytes: int = 1 << 20
    """Bytes of batches gathered into one message."""
    inflight_bytes_max: int = 8 << 20
    """Bytes pushed on one stream and not yet received by the follower."""
    partition_inflight_bytes_max: int = 4 << 20
    """Bytes pushed of one partition and not yet durable at the follower."""
    high_watermark_linger_ms: int = 5
    cold_reads_max: int = 4
    """Concurrent reads from disk per stream."""
    retry_min_ms: int = 20
    retry_max_ms: int = 500
    idle_stream_ms: int = 1_000
    reconcilers_max: int = 32
    partitions_per_slice: int = 200
    """Replicas handled in one turn of the event loop when the metadata changes: about 5 ms."""
    stall_check_ms: int = 200
    cleaner_backoff_ms: int = 15_000
    repair_retry_ms: int = 500
    scrub_delay_ms: int = 60_000
    """Delay of the first scrub after the start, when the node reads other files."""


def ackable_end(log: Log) -> Offset:
    """Return the end that may be acknowledged: the durable end, or the log end with `flush.mode=page-cache`."""
    return log.end_offset if log.config.flush_mode is FlushMode.PAGE_CACHE else log.durable_end


def now_ms() -> int:
    """Return monotonic time, for lags."""
    return int(asyncio.get_running_loop().time() * 1000)


class Role(Protocol):
    """A `LeaderReplica` or a `FollowerReplica`: one leader epoch of a replica."""

    log: Log

    @property
    def state(self) -> LeaderState | FollowerState: ...

    @property
    def leader_epoch(self) -> int: ...

    @property
    def high_watermark(self) -> Offset: ...

    def durable(self) -> None: ...

    def deletes_bound(self) -> Offset: ...

    def validate(self, *, thorough: bool = True) -> None: ...

    def end(self) -> None: ...


class Replica:
    """See the module. `metadata_changes` sets what the metadata says of it, `reconciler` its log and role."""

    __slots__ = (
        "high_watermark",
        "is_dropped",
        "is_follower_throttled",
        "is_leader_throttled",
        "is_removed",
        "led_epoch",
        "log",
        "open_error",
        "partition",
        "partition_id",
        "role",
        "topic",
    )

    def __init__(self, partition_id: PartitionId, topic: str, partition: Partition) -> None:
        self.partition_id = partition_id
        self.topic = topic
        self.partition = partition
        self.role: Role | None = None
        self.log: Log | None = None
        self.high_watermark = Offset(0)
        self.open_error: TidelogError | None = None
        """Why the replica has no log; None if it has one or needs none."""
        self.led_epoch = -1
        """The last epoch that this broker led: no epoch is led twice."""
        self.is_dropped = False
        self.is_removed = False
        """Dropped, and its log removed: the partition may be back as another `Replica`."""
        self.is_leader_throttled = False
        self.is_follower_throttled = False

    def validate(self, *, thorough: bool = True) -> None:
        """Assert that a role is that of this log, in no newer epoch than the metadata, and what it asserts."""
        role = self.role
        if role is None:
            return
        assert not self.is_removed, "a removed replica has a role"
        assert role.log is self.log, "the role of another log"
        assert role.log.log_id == self.partition_id, f"the log of {role.log.log_id}"
        assert role.leader_epoch <= self.partition.leader_epoch, f"in epoch {role.leader_epoch} of {self.partition}"
        role.validate(thorough=thorough)

    def end_role(self) -> None:
        """End the role of the replica, if it has one."""
        role, self.role = self.role, None
        if role is not None:
            role.end()

    def is_start_behind(self) -> bool:
        """Return whether the high watermark lets the log start advance to the one in the metadata."""
        log = self.log
        return log is not None and log.start_offset < min(self.partition.start_offset, self.high_watermark)
