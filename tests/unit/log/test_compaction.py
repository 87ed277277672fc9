"""Compaction: when a log is due and what is cleaned (pure), and what the cleaner makes of the files."""

import asyncio
import pickle
from pathlib import Path

import aiokafka.record.default_records as peer
import pytest
from cleaning_harness import BYTES_MAX, COMPACT, CleanableLog

from tidelog.log.batch import Codec, ControlMarker, Record, TimestampType, decode, encode, parse_control, read_header
from tidelog.log.batch_filter import empty_batch
from tidelog.log.cleaner import (
    KEY_MAP_NAME,
    CleanedGroup,
    CleanerLimits,
    checkpoint_after,
    clean,
    clean_group,
    discard_cleaned,
    map_keys,
)
from tidelog.log.compaction import Checkpoint, CleaningPlan, CleaningReason, dirtiest, plan_cleaning
from tidelog.log.config import LogConfig
from tidelog.log.key_map import ENTRY_COST_BYTES, KeyMap
from tidelog.log.producers import ProducerState
from tidelog.log.segment import LOG, SegmentInfo, file_path
from tidelog.model.errors import CorruptBatchError, CorruptStateError, RecordTooLargeError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.work import ProcessWork
from tidelog.world.simulated import SimWorld

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


@pytest.mark.source("a:A-93")
@pytest.mark.source("a:A-95")
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


@pytest.mark.source("a:A-97")
@pytest.mark.source("b:B-62")
def test_the_active_segment_is_not_even_looked_at() -> None:
    """The plan is made of sealed segments, and ends where the last of them ends."""
    plan = planned(TEN[:3], DEFAULT)
    assert plan is not None
    assert plan.end_offset == 30


@pytest.mark.parametrize(("bound", "end"), [(9, None), (10, 10), (19, 10), (20, 20), (100, 100), (1000, 100)])
def test_nothing_at_or_past_the_bound_is_cleaned(bound: int, end: int | None) -> None:
    plan = planned(TEN, DEFAULT, bound=bound)
    assert (None if plan is None else plan.end_offset) == end


@pytest.mark.source("a:A-96")
@pytest.mark.source("b:B-66")
def test_records_younger_than_the_least_lag_wait_and_all_after_them() -> None:
    config = LogConfig(cleanup_compact=True, min_compaction_lag_ms=100)
    segments = [segment(0, newest_ms=10), segment(10, newest_ms=50), segment(20, newest_ms=20)]
    assert planned(segments, config, now_ms=109) is None
    assert bases(planned(segments, config, now_ms=110)) == [[0]]
    assert bases(planned(segments, config, now_ms=149)) == [[0]]
    assert bases(planned(segments, config, now_ms=150)) == [[0, 10, 20]]


@pytest.mark.source("a:A-96")
def test_a_log_with_a_record_dirty_for_longer_than_the_most_lag_is_due_whatever_its_ratio() -> None:
    config = LogConfig(cleanup_compact=True, max_compaction_lag_ms=100)
    segments = [segment(0, first_ms=0), segment(10, size=1, first_ms=50)]
    checkpoint = Checkpoint(Offset(10))
    assert planned(segments, config, checkpoint=checkpoint, now_ms=150) is None
    plan = planned(segments, config, checkpoint=checkpoint, now_ms=151)
    assert plan is not None
    assert plan.reason is CleaningReason.OVERDUE
    assert plan.dirty_ratio < 0.01


def test_a_clean_log_is_due_once_more_when_its_last_tombstone_may_go() -> None:
    checkpoint = Checkpoint(Offset(100), settle_at_ms=500)
    assert planned(TEN, DEFAULT, checkpoint=checkpoint, now_ms=499) is None
    plan = planned(TEN, DEFAULT, checkpoint=checkpoint, now_ms=500)
    assert plan is not None
    assert plan.reason is CleaningReason.SETTLE
    assert planned(TEN, DEFAULT, checkpoint=Checkpoint(Offset(100)), now_ms=500) is None


def test_a_checkpoint_outside_of_the_log_counts_for_nothing() -> None:
    for first_dirty in (101, 5):
        plan = planned(TEN, DEFAULT, checkpoint=Checkpoint(Offset(first_dirty)), log_start=10)
        assert plan is not None
        assert plan.first_dirty_offset == 10


def test_a_bound_inside_the_clean_part_waits() -> None:
    checkpoint = Checkpoint(Offset(50), settle_at_ms=0)
    assert planned(TEN, DEFAULT, checkpoint=checkpoint, bound=49) is None
    plan = planned(TEN, DEFAULT, checkpoint=checkpoint, bound=50)
    assert plan is not None
    assert (plan.first_dirty_offset, plan.end_offset) == (50, 50)


def test_segments_below_the_log_start_are_left_to_retention() -> None:
    assert bases(planned(TEN, DEFAULT, log_start=75))[0][0] == 70


def test_neighbours_are_merged_while_they_fit_one_segment() -> None:
    config = LogConfig(cleanup_compact=True, segment_bytes=300)
    sizes = [100, 100, 100, 1, 299, 400, 10, 10]
    segments = [segment(10 * n, size=size) for n, size in enumerate(sizes)]
    assert bases(planned(segments, config)) == [[0, 10, 20], [30, 40], [50], [60, 70]]


def test_neighbours_are_merged_while_their_offsets_fit_31_bits() -> None:
    far = 1 << 31
    assert bases(planned([segment(0), segment(far - 10)], DEFAULT)) == [[0, far - 10]]
    assert bases(planned([segment(0), segment(far - 9)], DEFAULT)) == [[0], [far - 9]]
    assert bases(planned([segment(0, end=3 * far), segment(3 * far)], DEFAULT)) == [[0], [3 * far]]


@pytest.mark.source("a:A-94")
@pytest.mark.source("b:B-68")
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


def test_long_keys_are_told_apart_and_never_taken_for_short_ones() -> None:
    from hashlib import blake2b

    keys = KeyMap(bytes_max=1 << 20, end=Offset(10))
    long = b"k" * 100
    keys.add_batch(Offset(0), [long, b"k" * 101, b"k" * 15], [0, 1, 2])
    assert len(keys) == 3
    assert keys.is_newest(blake2b(long, digest_size=15).digest(), 0)


def test_the_key_map_survives_its_file_and_a_flipped_bit_does_not() -> None:
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


# What the cleaner leaves


@pytest.fixture
def log(tmp_path: Path) -> CleanableLog:
    return CleanableLog(RealDisk(tmp_path))


@pytest.mark.source("a:A-91")
@pytest.mark.source("a:A-99")
@pytest.mark.source("a:X3-47")
@pytest.mark.source("b:B-60")
@pytest.mark.source("b:B-61")
@pytest.mark.source("b:B-63")
@pytest.mark.source("b:B-64")
@pytest.mark.source("b:EX-24")
@pytest.mark.parametrize("codec", list(Codec))
def test_the_latest_value_of_every_key_stays_in_place_and_in_order(log: CleanableLog, codec: Codec) -> None:
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"), timestamp=5, codec=codec)
    log.put((b"a", b"2"), (b"d", b"1"), timestamp=6, codec=codec)
    log.roll()
    log.put((b"c", b"2"), (b"a", b"3"), timestamp=7, codec=codec)
    log.roll()
    before = {record.offset: record for record in log.records()}
    cleaned = log.clean(100)
    assert cleaned is not None
    assert log.pairs() == [(1, b"b", b"1"), (4, b"d", b"1"), (5, b"c", b"2"), (6, b"a", b"3")]
    assert all(before[record.offset] == record for record in log.records()), "timestamps and headers are kept"
    assert cleaned.checkpoint == Checkpoint(Offset(7), None)
    (group,) = cleaned.groups
    assert (group.records_read, group.records_kept) == (7, 4)
    assert [info.base_offset for info in log.sealed] == [0]
    log.validate()


@pytest.mark.source("b:EX-24")
@pytest.mark.source("b:B-62")
def test_the_head_is_not_compacted(log: CleanableLog) -> None:
    log.put((b"a", b"1"))
    log.roll()
    log.put((b"a", b"2"))
    log.put((b"a", b"3"))
    log.clean(100)
    assert log.pairs() == [(0, b"a", b"1"), (1, b"a", b"2"), (2, b"a", b"3")]


@pytest.mark.source("a:A-100")
@pytest.mark.source("b:B-63")
def test_a_batch_keeps_its_offsets_so_a_reader_goes_on_at_the_next_record(log: CleanableLog) -> None:
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"), producer=5)
    log.put((b"a", b"2"), (b"c", b"2"), producer=6)
    log.roll()
    before = [batch.header for batch in log.batches()]
    log.clean(100)
    after = [batch.header for batch in log.batches()]
    for old, new in zip(before, after, strict=True):
        assert (new.base_offset, new.last_offset, new.leader_epoch) == (old.base_offset, old.last_offset, 3)
        assert (new.producer_id, new.producer_epoch) == (old.producer_id, old.producer_epoch)
        assert (new.base_sequence, new.last_sequence) == (old.base_sequence, old.last_sequence)
    assert log.offsets() == [1, 3, 4]


def test_a_batch_that_loses_nothing_is_kept_byte_for_byte_and_a_clean_segment_is_not_written_again(
    log: CleanableLog,
) -> None:
    log.put((b"a", b"1"), codec=Codec.ZSTD)
    log.roll()
    before = log.read(0, LOG)
    cleaned = log.clean(100)
    assert cleaned is not None
    assert cleaned.segments == ()
    assert cleaned.checkpoint == Checkpoint(Offset(1), None)
    assert log.read(0, LOG) == before
    log.validate()


def test_log_append_time_is_kept(log: CleanableLog) -> None:
    log.put((b"a", b"1"), (b"b", b"1"), timestamp=123, timestamp_type=TimestampType.LOG_APPEND)
    log.put((b"a", b"2"), timestamp=200)
    log.roll()
    log.clean(1000)
    assert [(record.offset, record.timestamp) for record in log.records()] == [(1, 123), (2, 200)]
    assert next(log.batches()).header.timestamp_type is TimestampType.LOG_APPEND


def test_records_without_a_key_go(log: CleanableLog) -> None:
    """They are from before the topic was compacted: produced to a compacted one, they are refused."""
    log.put((None, b"1"), (b"a", b"1"))
    log.roll()
    cleaned = log.clean(100)
    assert cleaned is not None
    assert cleaned.groups[0].keyless == 1
    assert log.offsets() == [1]


@pytest.mark.source("a:A-98")
@pytest.mark.source("a:X3-47")
@pytest.mark.source("b:B-65")
@pytest.mark.source("b:EX-24")
def test_a_tombstone_is_seen_for_delete_retention_from_its_first_cleaning_and_then_gone(log: CleanableLog) -> None:
    log.put((b"a", b"1"), (b"b", b"1"), timestamp=1)
    log.put((b"a", None), (b"c", b"1"), timestamp=2)
    log.roll()
    cleaned = log.clean(10_000)
    assert cleaned is not None
    assert cleaned.checkpoint.settle_at_ms == 11_000
    assert log.pairs() == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
    assert [record.timestamp for record in log.records()] == [1, 2, 2]
    assert [batch.header.delete_horizon_ms for batch in log.batches()] == [None, 11_000]
    assert log.plan(10_999) is None
    assert log.clean(10_999, force=True) is not None
    assert log.pairs() == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
    cleaned = log.clean(11_000)
    assert cleaned is not None
    assert cleaned.checkpoint.settle_at_ms is None
    assert log.pairs() == [(1, b"b", b"1"), (3, b"c", b"1")]
    assert [record.timestamp for record in log.records()] == [1, 2]
    log.validate()


def test_by_default_a_tombstone_is_kept_for_a_day() -> None:
    assert LogConfig().delete_retention_ms == DAY_MS


def test_a_tombstone_past_the_end_of_the_key_map_gets_no_horizon_yet(log: CleanableLog) -> None:
    """Its older values are still there: a reader must find it for the whole time after they have gone."""
    log.put((b"a", b"1"), (b"b", b"1"))
    log.put((b"c", b"1"), (b"a", None))
    log.roll()
    cleaned = log.clean(0, limits=CleanerLimits(key_map_bytes_max=2 * ENTRY_COST_BYTES))
    assert cleaned is not None
    assert cleaned.checkpoint == Checkpoint(Offset(2), None)
    assert log.offsets() == [0, 1, 2, 3]
    cleaned = log.clean(5000)
    assert cleaned is not None
    assert cleaned.checkpoint == Checkpoint(Offset(4), 6000, waiting_from=4)
    assert log.offsets() == [1, 2, 3]


def test_a_small_key_map_cleans_in_several_rounds_and_ends_with_the_same(tmp_path: Path) -> None:
    logs = [CleanableLog(RealDisk(tmp_path), path) for path in ("small", "large")]
    for log in logs:
        for n in range(60):
            log.put(*((b"key %d" % (n * step % 23), b"value %d" % n) for step in (1, 2, 3)))
            if n % 7 == 0:
                log.roll()
        log.roll()
    small, large = logs
    large.clean(0)
    rounds = 0
    limits = CleanerLimits(key_map_bytes_max=5 * ENTRY_COST_BYTES)
    while small.clean(0, limits=limits) is not None:
        rounds += 1
        small.validate()
    assert rounds > 3
    assert len(large.records()) == 23
    assert {(r.key, r.value) for r in small.records()} == {(r.key, r.value) for r in large.records()}


@pytest.mark.source("b:B-67")
def test_the_cleaner_never_runs_faster_than_its_limit(log: CleanableLog) -> None:
    for n in range(50):
        log.put((b"%d" % (n % 3), b"x" * 100))
    log.roll()
    plan = log.plan(0)
    assert plan is not None
    slept: list[float] = []
    limits = CleanerLimits(io_bytes_per_second=1000, chunk_bytes=512)
    cleaned = clean(log.disk, log.task(plan, limits), slept.append)
    handled = 2 * cleaned.groups[0].bytes_read + cleaned.groups[0].bytes_kept
    assert sum(slept) >= handled / 1000
    assert max(slept) < 2, "in small pieces"


@pytest.mark.source("b:B-69")
def test_groups_are_cleaned_and_swapped_one_by_one_as_a_helper_process_does(log: CleanableLog) -> None:
    """One extra segment on the disk at any time: each group is swapped in before the next is written."""
    log.config = LogConfig(cleanup_compact=True, min_cleanable_dirty_ratio=0.0, segment_bytes=300)
    for n in range(30):
        log.put((b"%d" % (n % 7), b"%d" % n), producer=1, transactional=True)
        log.roll()
    log.end(1, is_abort=False)
    log.put((b"x", b"y"))
    log.roll()
    newest = {record.key: record.value for record in log.records()}
    plan = log.plan(0)
    assert plan is not None
    assert len(plan.groups) > 5
    task = pickle.loads(pickle.dumps(log.task(plan)))
    mapped = map_keys(log.disk, task)
    assert (mapped.end_offset, mapped.keys) == (log.end_offset, 8)
    groups: list[CleanedGroup] = []
    unfinished: frozenset[int] = frozenset()
    for group in plan.groups_below(mapped.end_offset):
        groups.append(pickle.loads(pickle.dumps(clean_group(log.disk, task, group, unfinished))))
        unfinished = groups[-1].unfinished
        written = groups[-1].segment
        if written is not None:
            assert len([n for n in log.disk.list(log.path) if n.endswith(".log.cleaned")]) == 1
            log.swap([written])
    log.checkpoint = checkpoint_after(mapped.end_offset, groups)
    assert log.disk.exists(f"{log.path}/{KEY_MAP_NAME}")
    discard_cleaned(log.disk, log.path)
    log.validate()
    assert unfinished == frozenset()
    assert {record.key: record.value for record in log.records()} == newest
    assert len(log.records()) == 8


# Producers


def test_the_last_batch_of_an_active_producer_stays_as_a_bare_header(log: CleanableLog) -> None:
    log.put((b"a", b"1"), producer=1)
    log.put((b"a", b"2"), producer=1)
    log.put((b"a", b"3"), producer=2)
    log.put((b"b", b"3"), producer=2)
    log.roll()
    log.clean(0)
    assert next((b.header.base_offset, b.header.count, len(b.data)) for b in log.batches()) == (1, 0, 61)
    assert log.offsets() == [2, 3]
    replayed = ProducerState()
    for batch in log.batches():
        replayed.apply(batch.header, now_ms=0)
    assert [(row.producer_id, row.epoch, row.last_sequence) for row in replayed.rows()] == [(1, 0, 1), (2, 0, 1)]
    log.producers.expire(DAY_MS, 1)
    log.put((b"a", b"4"))
    log.roll()
    log.clean(0)
    assert log.offsets() == [3, 4]
    assert [batch.header.count for batch in log.batches()] == [1, 1], "the producer is gone, and so is its batch"


def test_the_last_batch_of_a_segment_stays_so_that_the_file_tells_where_it_ends(log: CleanableLog) -> None:
    log.config = LogConfig(cleanup_compact=True, min_cleanable_dirty_ratio=0.0, segment_bytes=1)
    log.put((b"a", b"1"), (b"a", b"2"))
    log.roll()
    log.put((b"a", b"3"))
    log.roll()
    log.clean(0)
    assert [(b.header.base_offset, b.header.last_offset, b.header.count) for b in log.batches()] == [
        (0, 1, 0),
        (2, 2, 1),
    ]
    log.validate()


def test_a_bare_header_says_what_the_batch_said() -> None:
    batch = encode(
        [Record(10, 5, b"k", b"v"), Record(11, 9, b"k", b"v")],
        base_offset=10,
        codec=Codec.GZIP,
        leader_epoch=4,
        producer_id=7,
        producer_epoch=2,
        base_sequence=30,
        is_transactional=True,
    )
    old, new = read_header(batch), read_header(empty_batch(read_header(batch)))
    assert (new.count, new.size, new.codec) == (0, 61, Codec.NONE)
    for name in ("base_offset", "last_offset", "max_timestamp", "leader_epoch", "producer_id", "producer_epoch"):
        assert getattr(new, name) == getattr(old, name)
    assert (new.base_sequence, new.last_sequence, new.is_transactional) == (30, 31, True)


# Transactions


def test_aborted_data_goes_at_once_and_does_not_hide_what_came_before(log: CleanableLog) -> None:
    log.put((b"a", b"committed"))
    log.put((b"a", b"aborted"), (b"b", b"aborted"), producer=1, transactional=True)
    log.end(1, is_abort=True)
    log.put((b"c", b"committed"), producer=2, transactional=True)
    log.end(2, is_abort=False)
    log.roll()
    assert log.clean(0) is not None
    assert log.pairs() == [(0, b"a", b"committed"), (4, b"c", b"committed")]
    assert log.committed() == log.records()
    log.validate()


def test_a_marker_goes_when_its_data_has_gone_and_its_time_is_over(log: CleanableLog) -> None:
    log.put((b"a", b"1"), producer=1, transactional=True)
    log.end(1, is_abort=False)
    log.put((b"b", b"1"), producer=1, transactional=True)
    log.end(1, is_abort=True)
    log.put((b"a", b"2"))
    log.roll()
    log.producers.expire(DAY_MS, 1)

    def markers() -> list[tuple[int, ControlMarker | None]]:
        return [(b.header.base_offset, parse_control(b.data)) for b in log.batches() if b.header.is_control]

    cleaned = log.clean(0)
    assert cleaned is not None
    assert [offset for offset, _ in markers()] == [1, 3], "their data was there when the cleaning came by"
    assert log.offsets() == [4]
    assert cleaned.checkpoint.settle_at_ms is None
    cleaned = log.clean(50, force=True)
    assert cleaned is not None
    assert [offset for offset, _ in markers()] == [1, 3], "now they wait for their horizon"
    assert cleaned.checkpoint.settle_at_ms == 1050
    assert all(marker is not None and marker.ends_transaction for _, marker in markers())
    log.clean(1049, force=True)
    assert [offset for offset, _ in markers()] == [1, 3]
    log.clean(1050)
    assert markers() == []
    log.validate()


def test_the_transaction_index_of_a_cleaned_segment_lists_what_is_still_there(log: CleanableLog) -> None:
    log.put((b"a", b"1"), producer=1, transactional=True)
    log.end(1, is_abort=True)
    log.roll()
    log.put((b"b", b"1"))
    log.roll()
    cleaned = log.clean(0)
    assert cleaned is not None
    (segment,) = cleaned.segments
    assert segment.info.aborted == 1
    assert [entry.last_offset for entry in log.transaction_entries(segment.info)] == [1]
    replayed = ProducerState()
    for batch in log.batches():
        replayed.apply(batch.header, control=parse_control(batch.data) if batch.header.is_control else None, now_ms=0)
    assert replayed.first_open_offset is None


def test_a_transaction_whose_marker_lies_behind_the_bound_is_known_to_be_aborted(log: CleanableLog) -> None:
    log.put((b"a", b"0"))
    log.put((b"a", b"aborted"), producer=1, transactional=True)
    log.roll()
    log.put((b"b", b"open"), producer=2, transactional=True)
    log.end(1, is_abort=True)
    assert log.bound == 2
    log.clean(0)
    assert log.pairs() == [(0, b"a", b"0"), (2, b"b", b"open")]


def test_an_open_transaction_stops_the_cleaning_before_its_segment(log: CleanableLog) -> None:
    log.put((b"a", b"1"))
    log.roll()
    log.put((b"a", b"2"), producer=1, transactional=True)
    log.roll()
    log.put((b"a", b"3"))
    log.roll()
    log.clean(0)
    assert log.offsets() == [0, 1, 2]
    log.end(1, is_abort=False)
    log.clean(0)
    assert log.offsets() == [2]


# What goes wrong


def test_a_corrupt_batch_is_named_and_nothing_is_left_behind(log: CleanableLog) -> None:
    log.put((b"a", b"1"))
    second = log.put((b"a", b"2"))
    log.roll()
    plan = log.plan(0)
    assert plan is not None
    data = bytearray(log.read(0, LOG))
    position = len(data) // 2
    for at, expected in ((len(data) - 1, position), (position + 7, position), (8, 0), (16, 0)):
        bad = bytearray(data)
        bad[at] ^= 0x40
        name = file_path(log.path, 0, LOG)
        log.disk.remove(name)
        file = log.disk.open(name, create=True)
        file.append(bad)
        file.close()
        with pytest.raises(Exception, match=f"{name} at position {expected}: ") as caught:
            clean(log.disk, log.task(plan))
        assert caught.type.__name__ in ("CorruptBatchError", "UnsupportedMagicError", "RecordTooLargeError")
        assert [n for n in log.disk.list(log.path) if n.endswith(".cleaned")] == []
        assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    assert second == 1


def test_a_file_of_another_size_than_the_plan_says_is_not_touched(log: CleanableLog) -> None:
    log.put((b"a", b"1"))
    log.roll()
    plan = log.plan(0)
    assert plan is not None
    file = log.disk.open(file_path(log.path, 0, LOG))
    file.append(b"more")
    file.close()
    with pytest.raises(CorruptBatchError, match="bytes, not"):
        clean(log.disk, log.task(plan))


def test_a_batch_that_would_decompress_past_the_limit_stops_the_cleaning(log: CleanableLog) -> None:
    log.put((b"a", b"\0" * 100_000), codec=Codec.ZSTD)
    log.roll()
    plan = log.plan(0)
    assert plan is not None
    with pytest.raises(RecordTooLargeError, match="at position 0"):
        clean(log.disk, log.task(plan, CleanerLimits(decompressed_bytes_max=50_000)))
    with pytest.raises(RecordTooLargeError, match="at position 0"):
        clean(log.disk, log.task(plan, CleanerLimits(batch_bytes_max=70, chunk_bytes=64)))


@pytest.mark.parametrize("operation", ["read", "append", "sync", "open", "create"])
def test_a_failing_disk_fails_the_cleaning_and_leaves_the_log_as_it_was(operation: str) -> None:
    world = SimWorld(0)
    machine = world.machine("node")
    log = CleanableLog(machine.boot().disk())
    log.put((b"a", b"1"), (b"a", b"2"))
    log.roll()
    plan = log.plan(0)
    assert plan is not None
    machine.disk().fail(operation)
    with pytest.raises(StorageError):
        clean(log.disk, log.task(plan))
    log.validate()
    assert log.offsets() == [0, 1]
    assert log.clean(0) is not None
    assert log.offsets() == [1]
    world.close()


def test_a_helper_process_cleans(tmp_path: Path) -> None:
    log = CleanableLog(RealDisk(tmp_path))
    for n in range(20):
        log.put((b"%d" % (n % 3), b"%d" % n), producer=1)
    log.roll()
    plan = log.plan(0)
    assert plan is not None
    task = log.task(plan)

    async def run() -> CleanedGroup:
        work = ProcessWork()
        try:
            mapped = await work.run(map_keys, log.disk, task)
            assert (mapped.end_offset, mapped.keys) == (20, 3)
            return await work.run(clean_group, log.disk, task, plan.groups[0], frozenset())
        finally:
            await work.close()

    group = asyncio.run(run())
    assert group.segment is not None
    log.swap([group.segment])
    discard_cleaned(log.disk, log.path)
    log.validate()
    assert log.offsets() == [17, 18, 19]


def test_leftovers_of_a_cleaning_that_died_are_overwritten(log: CleanableLog) -> None:
    log.put((b"a", b"1"), (b"a", b"2"))
    log.roll()
    file = log.disk.open(file_path(log.path, 0, LOG, ".cleaned"), create=True)
    file.append(b"half a segment")
    file.close()
    log.clean(0)
    assert log.offsets() == [1]
    log.validate()


# Independent readers


@pytest.mark.source("b:EX-24")
@pytest.mark.parametrize("codec", list(Codec))
def test_aiokafka_reads_what_the_cleaner_wrote(log: CleanableLog, codec: Codec) -> None:
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"), timestamp=50, codec=codec, producer=1)
    log.put((b"a", None), (b"c", b"2"), timestamp=60, codec=codec, producer=1)
    log.put((b"d", b"1"), (b"d", b"2"), timestamp=70, codec=codec, producer=2)
    log.put((b"d", b"3"), timestamp=80, codec=codec)
    log.roll()
    log.clean(100_000)
    ours = [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in log.records()]
    assert [row[0] for row in ours] == [1, 3, 4, 7]
    theirs = []
    for batch in log.batches():
        reader = peer.DefaultRecordBatch(batch.data)
        assert reader.validate_crc()
        assert reader.next_offset == batch.header.next_offset
        theirs += [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in reader]
    assert theirs == ours
    assert [read_header(batch.data).count for batch in log.batches()] == [1, 2, 0, 1]


def test_decoding_a_cleaned_batch_twice_over_is_the_same(log: CleanableLog) -> None:
    log.put((b"a", None), timestamp=1)
    log.roll()
    log.clean(10)
    (batch,) = log.batches()
    again = encode(
        decode(batch.data, decompressed_bytes_max=BYTES_MAX),
        leader_epoch=3,
        delete_horizon_ms=batch.header.delete_horizon_ms,
    )
    assert again == batch.data
    assert COMPACT.delete_retention_ms == 1000
