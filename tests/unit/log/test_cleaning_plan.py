"""Decides which logs are cleaned and how; the key map of a cleaning. Pure."""

import pytest

from tidelog.log.compaction import Checkpoint, CleaningPlan, CleaningReason, dirtiest, plan_cleaning
from tidelog.log.config import LogConfig
from tidelog.log.key_map import ENTRY_COST_BYTES, KeyMap
from tidelog.log.segment import SegmentInfo
from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset

DAY_MS = 24 * 60 * 60 * 1000


def segment(
    base: int, *, size: int = 100, end: int | None = None, first_ms: int = 0, newest_ms: int = 0
) -> SegmentInfo:
    return SegmentInfo(
        base_offset=Offset(base),
        next_offset=Offset(base + 10 if end is None else end),
        size=size,
        largest_timestamp=newest_ms,
        largest_offset=base,
        first_timestamp=first_ms,
        modified_ms=newest_ms,
        crc=None,
    )


def planned(
    segments: list[SegmentInfo],
    config: LogConfig,
    *,
    checkpoint: Checkpoint | None = None,
    now_ms: int = 0,
    log_start: int = 0,
    bound: int = 1 << 40,
) -> CleaningPlan | None:
    return plan_cleaning(
        segments,
        checkpoint=checkpoint,
        config=config,
        now_ms=now_ms,
        log_start=Offset(log_start),
        bound=Offset(bound),
    )


def bases(plan: CleaningPlan | None) -> list[list[int]]:
    assert plan is not None
    return [[segment.base_offset for segment in group] for group in plan.groups]


TEN = [segment(10 * n) for n in range(10)]
DEFAULT = LogConfig(cleanup_compact=True, cleanup_delete=False)


# When a log is due


@pytest.mark.requirement("a:A-93", "a:A-95")
def test_a_log_is_due_when_more_than_half_of_it_is_dirty() -> None:
    assert DEFAULT.min_cleanable_dirty_ratio == 0.5
    assert planned(TEN, DEFAULT, checkpoint=Checkpoint(Offset(50))) is None
    plan = planned(TEN, DEFAULT, checkpoint=Checkpoint(Offset(40)))
    assert plan is not None
    assert (plan.dirty_ratio, plan.reason) == (0.6, CleaningReason.DIRTY)
    assert (plan.first_dirty_offset, plan.end_offset) == (40, 100)


def test_a_log_that_was_never_cleaned_is_dirty_from_its_start() -> None:
    plan = planned(TEN, DEFAULT)
    assert plan is not None
    assert (plan.dirty_ratio, plan.first_dirty_offset) == (1.0, 0)


def test_only_a_compacted_topic_is_cleaned() -> None:
    assert planned(TEN, LogConfig()) is None
    assert planned([], DEFAULT) is None
    assert planned(TEN, LogConfig(cleanup_compact=True, cleanup_delete=True)) is not None


@pytest.mark.requirement("a:A-97", "a:A-101", "b:B-62")
def test_the_active_segment_is_never_planned() -> None:
    """The plan has sealed segments only and ends where the last of them ends."""
    plan = planned(TEN[:3], DEFAULT)
    assert plan is not None
    assert plan.end_offset == 30


@pytest.mark.parametrize(("bound", "end"), [(9, None), (10, 10), (19, 10), (20, 20), (100, 100), (1000, 100)])
def test_nothing_at_or_past_the_bound_is_cleaned(bound: int, end: int | None) -> None:
    plan = planned(TEN, DEFAULT, bound=bound)
    assert (None if plan is None else plan.end_offset) == end


@pytest.mark.requirement("a:A-96", "b:B-66")
def test_records_younger_than_min_compaction_lag_and_later_ones_wait() -> None:
    config = LogConfig(cleanup_compact=True, min_compaction_lag_ms=100)
    segments = [segment(0, newest_ms=10), segment(10, newest_ms=50), segment(20, newest_ms=20)]
    assert planned(segments, config, now_ms=109) is None
    assert bases(planned(segments, config, now_ms=110)) == [[0]]
    assert bases(planned(segments, config, now_ms=149)) == [[0]]
    assert bases(planned(segments, config, now_ms=150)) == [[0, 10, 20]]


@pytest.mark.requirement("a:A-96")
def test_a_log_dirty_for_longer_than_max_compaction_lag_is_due() -> None:
    config = LogConfig(cleanup_compact=True, max_compaction_lag_ms=100)
    segments = [segment(0, first_ms=0), segment(10, size=1, first_ms=50)]
    checkpoint = Checkpoint(Offset(10))
    assert planned(segments, config, checkpoint=checkpoint, now_ms=150) is None
    plan = planned(segments, config, checkpoint=checkpoint, now_ms=151)
    assert plan is not None
    assert plan.reason is CleaningReason.OVERDUE
    assert plan.dirty_ratio < 0.01


def test_a_clean_log_is_due_once_more_when_its_last_tombstone_may_go() -> None:
    checkpoint = Checkpoint(Offset(100), waiting_until_ms=500)
    assert planned(TEN, DEFAULT, checkpoint=checkpoint, now_ms=499) is None
    plan = planned(TEN, DEFAULT, checkpoint=checkpoint, now_ms=500)
    assert plan is not None
    assert plan.reason is CleaningReason.DELETE_HORIZON
    assert planned(TEN, DEFAULT, checkpoint=Checkpoint(Offset(100)), now_ms=500) is None


def test_a_checkpoint_outside_of_the_log_is_ignored() -> None:
    for first_dirty in (101, 5):
        plan = planned(TEN, DEFAULT, checkpoint=Checkpoint(Offset(first_dirty)), log_start=10)
        assert plan is not None
        assert plan.first_dirty_offset == 10


def test_a_bound_inside_the_clean_part_waits() -> None:
    checkpoint = Checkpoint(Offset(50), waiting_until_ms=0)
    assert planned(TEN, DEFAULT, checkpoint=checkpoint, bound=49) is None
    plan = planned(TEN, DEFAULT, checkpoint=checkpoint, bound=50)
    assert plan is not None
    assert (plan.first_dirty_offset, plan.end_offset) == (50, 50)


def test_segments_below_the_log_start_are_left_to_retention() -> None:
    assert bases(planned(TEN, DEFAULT, log_start=75))[0][0] == 70


def test_adjacent_segments_are_merged_while_they_fit_one_segment() -> None:
    config = LogConfig(cleanup_compact=True, segment_bytes=300)
    sizes = [100, 100, 100, 1, 299, 400, 10, 10]
    segments = [segment(10 * n, size=size) for n, size in enumerate(sizes)]
    assert bases(planned(segments, config)) == [[0, 10, 20], [30, 40], [50], [60, 70]]


def test_adjacent_segments_are_merged_while_offsets_fit_31_bits() -> None:
    far = 1 << 31
    assert bases(planned([segment(0), segment(far - 10)], DEFAULT)) == [[0, far - 10]]
    assert bases(planned([segment(0), segment(far - 9)], DEFAULT)) == [[0], [far - 9]]
    assert bases(planned([segment(0, end=3 * far), segment(3 * far)], DEFAULT)) == [[0], [3 * far]]


@pytest.mark.requirement("a:A-94", "b:B-68")
def test_the_dirtiest_log_is_cleaned_next_and_an_overdue_one_before_it() -> None:
    def at(first_dirty: int, config: LogConfig = DEFAULT) -> CleaningPlan:
        plan = planned(TEN, config, checkpoint=Checkpoint(Offset(first_dirty)), now_ms=1000)
        assert plan is not None
        return plan

    plans = [("a", at(40)), ("b", at(20)), ("c", at(30)), ("d", at(20))]
    assert dirtiest(plans) == "b"
    overdue = at(90, LogConfig(cleanup_compact=True, max_compaction_lag_ms=1))
    assert dirtiest([*plans, ("late", overdue)]) == "late"
    assert dirtiest([]) is None


# The key map


def test_the_key_map_ends_before_the_batch_that_does_not_fit_but_takes_the_first_whole() -> None:
    keys = KeyMap(bytes_max=2 * ENTRY_COST_BYTES, end=Offset(100))
    assert keys.add_batch(Offset(0), [b"a", b"b", b"c"], [0, 1, 2])
    assert keys.add_batch(Offset(3), [b"a", None], [3, 4])
    assert not keys.add_batch(Offset(5), [b"b", b"d"], [5, 6])
    assert (keys.end, keys.is_full) == (5, True)
    assert not keys.is_newest(b"a", 2)
    assert keys.is_newest(b"a", 3)


def test_long_keys_collide_neither_with_each_other_nor_with_short_ones() -> None:
    from hashlib import blake2b

    keys = KeyMap(bytes_max=1 << 20, end=Offset(10))
    long = b"k" * 100
    keys.add_batch(Offset(0), [long, b"k" * 101, b"k" * 15], [0, 1, 2])
    assert len(keys) == 3
    assert keys.is_newest(blake2b(long, digest_size=15).digest(), 0)


def test_the_key_map_is_restored_from_its_file_and_a_flipped_bit_is_detected() -> None:
    keys = KeyMap(bytes_max=1 << 20, end=Offset(77))
    keys.add_batch(Offset(0), [b"", b"a", b"a\0", b"x" * 40], [0, 1, 2, 3])
    data = b"".join(keys.to_chunks())
    read = KeyMap.from_bytes(data)
    assert (read.end, len(read)) == (77, 4)
    for key, offset in ((b"", 0), (b"a", 1), (b"a\0", 2), (b"x" * 40, 3)):
        assert read.is_newest(key, offset)
        assert not read.is_newest(key, offset - 1)
    for position in range(len(data)):
        bad = bytearray(data)
        bad[position] ^= 1
        with pytest.raises(CorruptStateError):
            KeyMap.from_bytes(bytes(bad))
    with pytest.raises(CorruptStateError):
        KeyMap.from_bytes(data[:-1])
