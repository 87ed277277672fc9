"""Which segments expire: the worked examples of the sources, and the bounds."""

import pytest

from tidelog.log.config import LogConfig
from tidelog.log.retention import ExpiryReason, expired_segments
from tidelog.log.segment import SegmentInfo
from tidelog.model.ids import Offset

DAY_MS = 24 * 60 * 60 * 1000
MB = 1_000_000
GB = 1_000_000_000
EVERYTHING = Offset(1 << 62)


def segment(base: int, *, end: int, size: int = GB, newest_ms: int = 0, modified_ms: int = 0) -> SegmentInfo:
    return SegmentInfo(
        base_offset=Offset(base),
        next_offset=Offset(end),
        size=size,
        largest_timestamp=newest_ms,
        largest_offset=end - 1,
        first_timestamp=newest_ms,
        modified_ms=modified_ms,
        crc=None,
    )


def expired(
    segments: list[SegmentInfo],
    config: LogConfig,
    *,
    now_ms: int = 0,
    log_start: int = 0,
    bound: int = EVERYTHING,
    active_bytes: int = 0,
) -> list[tuple[int, ExpiryReason]]:
    found = expired_segments(
        segments,
        config=config,
        now_ms=now_ms,
        log_start=Offset(log_start),
        bound=Offset(bound),
        active_bytes=active_bytes,
    )
    return [(entry.base_offset, entry.reason) for entry in found]


@pytest.mark.requirement("a:A-49", "a:A-64", "a:A-102", "a:X3-46", "b:B-34", "b:EX-23")
def test_100_mb_a_day_in_segments_of_1_gb_with_a_week_of_retention_keeps_17_days() -> None:
    """The first segment fills from day 0 to day 10; its first record goes when its last one is 7 days old."""
    full = segment(0, end=1000, size=10 * 100 * MB, newest_ms=10 * DAY_MS)
    config = LogConfig(retention_ms=604_800_000)
    assert expired([full], config, now_ms=17 * DAY_MS) == []
    assert expired([full], config, now_ms=17 * DAY_MS + 1) == [(0, ExpiryReason.TIME)]


@pytest.mark.requirement("a:A-62", "a:X3-46", "b:EX-23")
def test_with_a_retention_of_1_day_and_5_day_segments_the_active_one_keeps_5_days() -> None:
    """Only sealed segments expire: what was written since day 5 stays until its segment is sealed and old."""
    config = LogConfig(retention_ms=DAY_MS)
    sealed = [segment(0, end=100, newest_ms=5 * DAY_MS)]
    assert expired(sealed, config, now_ms=10 * DAY_MS) == [(0, ExpiryReason.TIME)]
    assert expired([], config, now_ms=10 * DAY_MS, active_bytes=GB) == []


@pytest.mark.requirement("a:A-46", "b:B-32", "a:X3-46")
def test_bytes_are_counted_for_each_partition_so_8_partitions_of_1_gb_keep_8_gb() -> None:
    config = LogConfig(retention_ms=-1, retention_bytes=GB)
    quarter = GB // 4
    partition = [segment(n * 100, end=(n + 1) * 100, size=quarter) for n in range(8)]
    kept_bytes = 0
    for _ in range(8):
        gone = expired(partition, config, active_bytes=quarter)
        assert gone == [(n * 100, ExpiryReason.BYTES) for n in range(5)]
        kept_bytes += (len(partition) - len(gone)) * quarter + quarter
    assert kept_bytes == 8 * GB


@pytest.mark.requirement("a:A-47", "b:B-35")
def test_retention_by_bytes_leaves_at_least_that_much() -> None:
    config = LogConfig(retention_ms=-1, retention_bytes=250)
    segments = [segment(n, end=n + 1, size=100) for n in range(5)]
    assert expired(segments, config, active_bytes=49) == [(0, ExpiryReason.BYTES), (1, ExpiryReason.BYTES)]
    assert expired(segments, config, active_bytes=50) == [(n, ExpiryReason.BYTES) for n in range(3)]


@pytest.mark.requirement("b:B-33", "a:A-47", "b:EX-23")
def test_either_criterion_is_enough() -> None:
    config = LogConfig(retention_ms=86_400_000, retention_bytes=GB)
    old = segment(0, end=10, size=1, newest_ms=0)
    assert expired([old], config, now_ms=DAY_MS + 1) == [(0, ExpiryReason.TIME)]
    young = [segment(n, end=n + 1, newest_ms=DAY_MS) for n in range(3)]
    assert expired(young, config, now_ms=DAY_MS, active_bytes=0) == [(0, ExpiryReason.BYTES), (1, ExpiryReason.BYTES)]


@pytest.mark.requirement("a:A-90", "b:B-30")
def test_the_default_is_a_week_and_no_limit_on_bytes() -> None:
    config = LogConfig()
    assert config.retention_ms == 168 * 60 * 60 * 1000
    segments = [segment(n, end=n + 1, newest_ms=n * DAY_MS) for n in range(20)]
    gone = expired(segments, config, now_ms=20 * DAY_MS)
    assert gone == [(n, ExpiryReason.TIME) for n in range(13)]


def test_a_retention_of_minus_one_keeps_for_ever() -> None:
    config = LogConfig(retention_ms=-1, retention_bytes=-1)
    assert expired([segment(0, end=1)], config, now_ms=10_000 * DAY_MS, active_bytes=100 * GB) == []


@pytest.mark.requirement("a:A-63")
def test_consumer_positions_do_not_affect_retention() -> None:
    """`expired_segments` takes nothing about consumers: age alone decides."""
    config = LogConfig(retention_ms=DAY_MS)
    assert expired([segment(0, end=1)], config, now_ms=2 * DAY_MS) == [(0, ExpiryReason.TIME)]


@pytest.mark.requirement("b:B-31")
def test_a_segment_without_timestamps_is_as_old_as_its_last_write() -> None:
    config = LogConfig(retention_ms=DAY_MS)
    bare = segment(0, end=1, newest_ms=-1, modified_ms=5 * DAY_MS)
    assert expired([bare], config, now_ms=6 * DAY_MS) == []
    assert expired([bare], config, now_ms=6 * DAY_MS + 1) == [(0, ExpiryReason.TIME)]


def test_a_moved_replica_expires_by_its_records_not_by_when_it_was_copied() -> None:
    config = LogConfig(retention_ms=DAY_MS)
    copied = segment(0, end=1, newest_ms=1, modified_ms=50 * DAY_MS)
    assert expired([copied], config, now_ms=50 * DAY_MS) == [(0, ExpiryReason.TIME)]


def test_a_future_timestamp_keeps_its_segment_and_later_ones() -> None:
    config = LogConfig(retention_ms=DAY_MS)
    segments = [segment(0, end=1, newest_ms=100 * DAY_MS), segment(1, end=2, newest_ms=0)]
    assert expired(segments, config, now_ms=101 * DAY_MS) == []
    assert len(expired(segments, config, now_ms=101 * DAY_MS + 1)) == 2


@pytest.mark.parametrize(("bound", "gone"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (100, 3)])
def test_nothing_at_or_past_the_bound_expires(bound: int, gone: int) -> None:
    config = LogConfig(retention_ms=0, retention_bytes=0)
    segments = [segment(n * 10, end=n * 10 + 10) for n in range(3)]
    assert len(expired(segments, config, now_ms=DAY_MS, bound=bound, log_start=30)) == gone


def test_segments_below_the_log_start_expire_under_every_policy() -> None:
    config = LogConfig(cleanup_delete=False, cleanup_compact=True, retention_ms=0, retention_bytes=0)
    segments = [segment(n * 10, end=n * 10 + 10) for n in range(3)]
    assert expired(segments, config, now_ms=DAY_MS, log_start=20) == [
        (0, ExpiryReason.BELOW_START),
        (10, ExpiryReason.BELOW_START),
    ]
    assert len(expired(segments, config, now_ms=DAY_MS, log_start=19)) == 1


@pytest.mark.requirement("a:A-92")
def test_both_policies_together_expire_the_latest_value_of_a_key() -> None:
    config = LogConfig(cleanup_delete=True, cleanup_compact=True, retention_ms=DAY_MS)
    assert expired([segment(0, end=1)], config, now_ms=2 * DAY_MS) == [(0, ExpiryReason.TIME)]
