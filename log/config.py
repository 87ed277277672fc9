"""The settings of one log. Logs with the same settings share one frozen value. Pure.

Names follow the topic configs of Kafka, with the unit last; -1 is "no limit" where Kafka says so.
"""

from dataclasses import dataclass
from enum import Enum

from tidelog.log.batch import Codec, TimestampType

DAY_MS = 24 * 60 * 60 * 1000
FOREVER_MS = (1 << 63) - 1
NO_LIMIT = -1

INSPECTED_RATIO = 16
INSPECTED_BYTES_MIN, INSPECTED_BYTES_MAX = 1 << 20, 64 << 20


class FlushMode(Enum):
    """When an append counts as safe: on the device, or in the page cache (as in Kafka)."""

    SYNC = "sync"
    PAGE_CACHE = "page-cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """A configuration layer calls `problems`, which validates all settings, before it uses the value."""

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * DAY_MS
    segment_jitter_ms: int = 0
    """Up to this much is subtracted from `segment_ms`, by log and segment, so that quiet logs do not roll at once."""
    index_interval_bytes: int = 4096
    index_bytes_max: int = 10 << 20
    message_bytes_max: int = 1_048_588
    decompressed_bytes_max: int = 256 << 20
    """Limit on the decompressed size of a stored batch that the log decodes."""

    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = NO_LIMIT
    cleanup_delete: bool = True
    cleanup_compact: bool = False
    delete_retention_ms: int = DAY_MS
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = FOREVER_MS
    min_cleanable_dirty_ratio: float = 0.5
    file_delete_delay_ms: int = 60_000

    timestamp_type: TimestampType = TimestampType.CREATE
    timestamp_before_max_ms: int = FOREVER_MS
    timestamp_after_max_ms: int = 60 * 60 * 1000
    compression: Codec | None = None
    """The codec that batches are stored with; None keeps the producer's."""
    compression_level: int | None = None
    """The level at which the log compresses; None is the codec's default."""

    flush_mode: FlushMode = FlushMode.SYNC
    flush_messages: int | None = None
    """With page-cache only: sync after this many records. None leaves it to the system."""
    flush_ms: int | None = None
    """With page-cache only: sync when the oldest unsynced record is this old."""
    producer_expiry_ms: int = DAY_MS

    @property
    def needs_decoding(self) -> bool:
        """Whether appended records are decoded: for their keys, or for another codec."""
        return self.cleanup_compact or self.compression is not None

    @property
    def inspected_bytes_max(self) -> int:
        """Limit on the decompressed size of an appended batch that is decoded: `INSPECTED_RATIO` times
        `message_bytes_max`, within bounds."""
        tied = min(max(INSPECTED_RATIO * self.message_bytes_max, INSPECTED_BYTES_MIN), INSPECTED_BYTES_MAX)
        return min(max(tied, self.message_bytes_max), self.decompressed_bytes_max)

    def problems(self) -> list[str]:
        """All errors in these settings; an empty list if there are none."""
        minimum = {
            "segment_bytes": 1,
            "segment_ms": 1,
            "segment_jitter_ms": 0,
            "index_interval_bytes": 0,
            "index_bytes_max": 4,
            "message_bytes_max": 0,
            "decompressed_bytes_max": 1,
            "retention_ms": -1,
            "retention_bytes": -1,
            "delete_retention_ms": 0,
            "min_compaction_lag_ms": 0,
            "max_compaction_lag_ms": 1,
            "file_delete_delay_ms": 0,
            "timestamp_before_max_ms": 0,
            "timestamp_after_max_ms": 0,
            "producer_expiry_ms": 1,
        }
        problems = [
            f"{name}={getattr(self, name)}: at least {bound}"
            for name, bound in minimum.items()
            if getattr(self, name) < bound
        ]
        problems += [
            f"{name}={value}: at least {bound}"
            for name, value, bound in (("flush_messages", self.flush_messages, 1), ("flush_ms", self.flush_ms, 0))
            if value is not None and value < bound
        ]
        if self.segment_bytes > (1 << 31) - 1:
            problems.append(f"segment_bytes={self.segment_bytes}: at most 2147483647, index positions are 32 bits")
        if self.segment_jitter_ms > self.segment_ms:
            problems.append(f"segment_jitter_ms={self.segment_jitter_ms}: at most segment_ms={self.segment_ms}")
        if not 0 <= self.min_cleanable_dirty_ratio <= 1:
            problems.append(f"min_cleanable_dirty_ratio={self.min_cleanable_dirty_ratio}: from 0 to 1")
        if not (self.cleanup_delete or self.cleanup_compact):
            problems.append("cleanup_delete and cleanup_compact are both off: choose at least one")
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            problems.append("min_compaction_lag_ms is above max_compaction_lag_ms")
        return problems
