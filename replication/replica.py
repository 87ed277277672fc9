"""One partition on this broker, as the metadata has it and as it is; and what can be set for all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tidelog.log.log import Log
from tidelog.log.moving import LogMove
from tidelog.metadata.image import Partition
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.following import Following
from tidelog.replication.leading import Leading

Role = Leading | Following


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """What is not a setting of the cluster's metadata (`replica.lag.time.max.ms` and the throttles are)."""

    fetch_message_bytes: int = 1 << 20
    """Of what is pending, so much goes out in one message."""
    inflight_bytes_max: int = 8 << 20
    """Pushed on one stream and not yet taken by the follower."""
    partition_inflight_bytes_max: int = 4 << 20
    """Pushed of one partition and not yet durable at the follower."""
    high_watermark_linger_ms: int = 5
    cold_reads_max: int = 4
    """Reads from the device at a time, for one stream."""
    retry_min_ms: int = 20
    retry_max_ms: int = 500
    idle_stream_ms: int = 1_000
    settlers_max: int = 32
    partitions_per_slice: int = 200
    """Replicas that are looked at in one turn of the event loop when the metadata changes: some 5 ms."""
    stall_check_ms: int = 200
    cleaner_backoff_ms: int = 15_000
    repair_retry_ms: int = 500
    scrub_delay_ms: int = 60_000
    """From the start to the first scrub: a node that starts has other things to read."""


class Replica:
    """One partition on this broker, as the metadata has it and as it is."""

    __slots__ = (
        "high_watermark",
        "is_again",
        "is_dropped",
        "is_follower_throttled",
        "is_leader_throttled",
        "is_moving",
        "is_settling",
        "led_epoch",
        "log",
        "move",
        "offline",
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
        self.offline: TidelogError | None = None
        """Why there is no log, if it should be there."""
        self.move: tuple[LogMove, asyncio.Future[None]] | None = None
        """Copied to another directory, to be finished."""
        self.is_moving = False
        self.led_epoch = -1
        """The last that was led here: none is led twice."""
        self.is_dropped = False
        self.is_settling = False
        self.is_again = False
        """Something has come while it was being settled."""
        self.is_leader_throttled = False
        self.is_follower_throttled = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Counts, for metrics."""

    leaders: int
    followers: int
    offline: int
    cut_off: int
    """Followed here, while their leader cannot be reached."""
    under_replicated: int
    under_min_isr: int
    at_min_isr: int
    unsettled: int
    isr_shrinks: int
    isr_expands: int
