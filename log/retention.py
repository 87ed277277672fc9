"""Decides which segments have outlived their topic's retention. Pure; the caller deletes them.

Rules, as in Kafka:

- Only sealed segments, oldest first: a prefix of the log expires, and the active segment stays. So with a retention of
  1 day and segments that fill in 5, 5 days are kept.
- A segment expires as a whole, when its newest record does: 100 MB a day in segments of 1 GB with a retention of 7 days
  keeps up to 17 days. Retention promises a minimum of data, not a maximum.
- Nothing at or past `bound` expires: the smaller of the high watermark and the first open transaction.
- By time: the segment's largest record timestamp is more than `retention_ms` ago. A segment whose records have no
  timestamps is as old as its last write. A timestamp in the future therefore keeps its segment and everything after it:
  the limit on timestamps from clients (`timestamp_after_max_ms`) prevents that, not retention.
- By bytes: the oldest segments expire as long as the rest, with the active one, still has `retention_bytes`. Bytes are
  per partition. Either rule is enough.
- Below the log start offset (delete-records): the whole segment is unreadable, so it expires under every policy. Only
  this rule applies to topics that are only compacted.

Consumer positions play no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from tidelog.log.config import LogConfig
from tidelog.log.segment import SegmentInfo
from tidelog.model.ids import Offset


class ExpiryReason(Enum):
    BELOW_START = "below the log start offset"
    TIME = "older than retention.ms"
    BYTES = "over retention.bytes"


@dataclass(frozen=True, slots=True)
class ExpiredSegment:
    """A segment to delete, and the reason."""

    base_offset: Offset
    next_offset: Offset
    reason: ExpiryReason


def newest_ms(segment: SegmentInfo) -> int:
    """The age of a segment: its largest record timestamp, or its last write if no record has one."""
    return segment.largest_timestamp if segment.largest_timestamp >= 0 else segment.modified_ms


def expired_segments(
    segments: Sequence[SegmentInfo],
    *,
    config: LogConfig,
    now_ms: int,
    log_start: Offset,
    bound: Offset,
    active_bytes: int,
) -> list[ExpiredSegment]:
    """The prefix of `segments` (all sealed ones, in order) that may be deleted now, with the reasons.

    After the deletion the log start offset is at least the last one's `next_offset`.
    """
    assert all(a.next_offset <= b.base_offset for a, b in pairwise(segments)), "not in order"
    expired: list[ExpiredSegment] = []
    bytes_left = sum(segment.size for segment in segments) + active_bytes
    for segment in segments:
        if segment.next_offset > bound:
            break
        bytes_left -= segment.size
        reason = _reason(segment, config=config, now_ms=now_ms, log_start=log_start, bytes_left=bytes_left)
        if reason is None:
            break
        expired.append(ExpiredSegment(segment.base_offset, segment.next_offset, reason))
    return expired


def _reason(
    segment: SegmentInfo, *, config: LogConfig, now_ms: int, log_start: Offset, bytes_left: int
) -> ExpiryReason | None:
    if segment.next_offset <= log_start:
        return ExpiryReason.BELOW_START
    if not config.cleanup_delete:
        return None
    if config.retention_ms >= 0 and now_ms - newest_ms(segment) > config.retention_ms:
        return ExpiryReason.TIME
    if 0 <= config.retention_bytes <= bytes_left:
        return ExpiryReason.BYTES
    return None
