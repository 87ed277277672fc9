"""Which segments have outlived their topic's retention. A pure decision; the owner deletes what it names.

Rules, all of them as Kafka's:

- Only sealed segments, oldest first: what goes is always a prefix of the log, and the active segment stays. So with
  a retention of 1 day and segments that fill in 5, 5 days are kept.
- A segment goes as a whole, when its newest record may go: 100 MB a day in segments of 1 GB with a retention of 7
  days keeps up to 17 days. Retention promises a minimum of data, not a maximum.
- Nothing at or past `bound` goes: the smaller of the high watermark and the first open transaction.
- By time: the segment's largest record timestamp is more than `retention_ms` ago. A segment whose records carry no
  timestamps is as old as its last write. A timestamp in the future therefore keeps its segment, and everything after
  it, until that time has come and passed: the limit on timestamps from clients (`timestamp_after_max_ms`) is what
  prevents it, not retention.
- By bytes: the oldest segments go as long as the rest, the active one included, still has `retention_bytes`. Bytes
  are per partition. Either rule is enough.
- Below the log start offset (delete-records): the whole segment is unreadable, so it goes whatever the policy. This
  one alone acts on topics that are only compacted.

Who has read what plays no part.
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
class Expired:
    """A segment to delete, and why."""

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
) -> list[Expired]:
    """The prefix of `segments` (all sealed ones, in order) that may be deleted now, with the reason of each.

    After deleting, the log start offset is at least the last one's `next_offset`.
    """
    assert all(a.next_offset <= b.base_offset for a, b in pairwise(segments)), "not in order"
    expired: list[Expired] = []
    bytes_left = sum(segment.size for segment in segments) + active_bytes
    for segment in segments:
        if segment.next_offset > bound:
            break
        bytes_left -= segment.size
        reason = _reason(segment, config=config, now_ms=now_ms, log_start=log_start, bytes_left=bytes_left)
        if reason is None:
            break
        expired.append(Expired(segment.base_offset, segment.next_offset, reason))
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
