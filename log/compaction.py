"""Decides when and what to compact. Pure; `cleaner` runs the plan on the files.

The log of a compacted topic has a clean part up to the checkpoint, where each key is once, and a dirty part after it. A
cleaning reads the keys of the dirty part, then copies every segment up to the end of the dirty part without the records
that have a later record of the same key.

        log start          first dirty offset        end             active segment
            |  clean part          |   dirty part     |  not yet         |
            +----------+-----------+--------+---------+--------+---------+-------->

- The end is the first segment that reaches to or past `bound` (the smaller of the high watermark and the first unstable
  transaction), or that has a record younger than `min_compaction_lag_ms`, or the active one. Whole segments only, so
  nothing at or past the bound is rewritten.
- A log is due when dirty / (clean + dirty) bytes is over `min_cleanable_dirty_ratio`; or when its oldest dirty record
  is older than `max_compaction_lag_ms`; or when its last waiting tombstone may go (`Checkpoint.waiting_until_ms`: Kafka
  keeps the tombstones of an idle log for ever, here one more cleaning removes them).
- A tombstone or marker goes when its time is over *and* it is below `deletes_bound`: no replica needs it any more
  (`replication.deletes`).
- Adjacent segments are merged while they fit one segment and 31-bit offsets, so that segments do not become tiny.
  Retention (`compact,delete`) is decided separately and first.

The owner stores the checkpoint, runs one cleaning of a log at a time, deletes no segment of it meanwhile, and lowers
the checkpoint with a truncation below it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TypeVar

from tidelog.log.config import LogConfig
from tidelog.log.retention import newest_ms
from tidelog.log.segment import SegmentInfo
from tidelog.model.ids import Offset

OFFSET_RANGE_MAX = 1 << 31
"""An index entry has 31 bits for an offset relative to the segment's base."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The result of the last cleaning: where the dirty part begins, and when its last tombstone or marker may go."""

    first_dirty_offset: Offset
    waiting_until_ms: int | None = None
    waiting_from: int = 0
    """The first waiting delete (tombstone or transaction marker) may be removed once `deletes_bound` reaches this."""


class CleaningReason(Enum):
    DIRTY = "dirty ratio over min.cleanable.dirty.ratio"
    OVERDUE = "dirty for longer than max.compaction.lag.ms"
    DELETE_HORIZON = "tombstones past delete.retention.ms"


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """Each group becomes one segment, named after the base of its first one. `end_offset` is exclusive."""

    groups: tuple[tuple[SegmentInfo, ...], ...]
    first_dirty_offset: Offset
    end_offset: Offset
    dirty_ratio: float
    reason: CleaningReason
    now_ms: int
    delete_retention_ms: int
    deletes_bound: Offset
    """Tombstones and markers at or past it stay, whatever their time."""

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        return tuple(segment for group in self.groups for segment in group)

    def groups_below(self, end: Offset) -> tuple[tuple[SegmentInfo, ...], ...]:
        """The groups to clean when the key map reached only to `end`."""
        return tuple(group for group in self.groups if group[0].base_offset < end)


def plan_cleaning(
    segments: Sequence[SegmentInfo],
    *,
    checkpoint: Checkpoint | None,
    config: LogConfig,
    now_ms: int,
    log_start: Offset,
    bound: Offset,
    deletes_bound: Offset | None = None,
) -> CleaningPlan | None:
    """The cleaning that is due now in a log with these sealed segments (all, in order), or None.

    A replica still needs tombstones and markers at or past `deletes_bound`; None if there is no other replica. A
    checkpoint outside of the sealed part (the log was reset or truncated below it) is ignored.
    """
    assert all(a.next_offset <= b.base_offset for a, b in pairwise(segments)), "not in order"
    live = [segment for segment in segments if segment.next_offset > log_start]
    if not config.cleanup_compact or not live:
        return None
    first_dirty = _first_dirty(live, checkpoint, log_start)
    cleanable = _cleanable(live, first_dirty, config=config, now_ms=now_ms, bound=bound)
    dirty = [segment for segment in cleanable if segment.next_offset > first_dirty]
    total_bytes = sum(segment.size for segment in cleanable)
    if not total_bytes or cleanable[-1].next_offset < first_dirty:
        # Nothing to clean yet; or the bound is in the clean part after a restart, and will soon be past it.
        return None
    ratio = sum(segment.size for segment in dirty) / total_bytes
    waiting_until = checkpoint.waiting_until_ms if checkpoint is not None else None
    if dirty and ratio > config.min_cleanable_dirty_ratio:
        reason = CleaningReason.DIRTY
    elif dirty and _is_overdue(dirty, config=config, now_ms=now_ms):
        reason = CleaningReason.OVERDUE
    elif waiting_until is not None and now_ms >= waiting_until and _may_go(checkpoint, deletes_bound):
        reason = CleaningReason.DELETE_HORIZON
    else:
        return None
    end = cleanable[-1].next_offset
    return CleaningPlan(
        groups=_groups(cleanable, segment_bytes=config.segment_bytes),
        first_dirty_offset=first_dirty,
        end_offset=end,
        dirty_ratio=ratio,
        reason=reason,
        now_ms=now_ms,
        delete_retention_ms=config.delete_retention_ms,
        deletes_bound=end if deletes_bound is None else deletes_bound,
    )


def dirtiest(plans: Iterable[tuple[T, CleaningPlan]]) -> T | None:
    """The log to clean next: an overdue one, else the one with the highest dirty ratio; the first among equals."""
    best: tuple[tuple[bool, float], T] | None = None
    for log, plan in plans:
        urgency = (plan.reason is CleaningReason.OVERDUE, plan.dirty_ratio)
        if best is None or urgency > best[0]:
            best = (urgency, log)
    return None if best is None else best[1]


def _may_go(checkpoint: Checkpoint | None, deletes_bound: Offset | None) -> bool:
    """Whether a cleaning would remove at least one waiting delete; otherwise it would be repeated for ever."""
    return checkpoint is None or deletes_bound is None or checkpoint.waiting_from <= deletes_bound


def _first_dirty(live: Sequence[SegmentInfo], checkpoint: Checkpoint | None, log_start: Offset) -> Offset:
    start = max(log_start, live[0].base_offset)
    if checkpoint is None or not start <= checkpoint.first_dirty_offset <= live[-1].next_offset:
        return start
    return checkpoint.first_dirty_offset


def _cleanable(
    live: Sequence[SegmentInfo], first_dirty: Offset, *, config: LogConfig, now_ms: int, bound: Offset
) -> list[SegmentInfo]:
    cleanable: list[SegmentInfo] = []
    for segment in live:
        if segment.next_offset > bound:
            break
        is_dirty = segment.next_offset > first_dirty
        if is_dirty and config.min_compaction_lag_ms > 0 and newest_ms(segment) > now_ms - config.min_compaction_lag_ms:
            break
        cleanable.append(segment)
    return cleanable


def _is_overdue(dirty: Sequence[SegmentInfo], *, config: LogConfig, now_ms: int) -> bool:
    timestamps = [segment.first_timestamp for segment in dirty if segment.first_timestamp >= 0]
    return bool(timestamps) and min(timestamps) < now_ms - config.max_compaction_lag_ms


def _groups(segments: Sequence[SegmentInfo], *, segment_bytes: int) -> tuple[tuple[SegmentInfo, ...], ...]:
    groups: list[list[SegmentInfo]] = []
    size = 0
    for segment in segments:
        size += segment.size
        fits = size <= segment_bytes
        if groups and fits and segment.next_offset - groups[-1][0].base_offset <= OFFSET_RANGE_MAX:
            groups[-1].append(segment)
        else:
            groups.append([segment])
            size = segment.size
    return tuple(tuple(group) for group in groups)
