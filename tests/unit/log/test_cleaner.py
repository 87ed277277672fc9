"""The cleaner writes cleaned segments: what stays, what goes, and what happens on errors."""

import asyncio
import pickle
from pathlib import Path

import aiokafka.record.default_records as peer
import pytest
from support.logs.cleaning import BYTES_MAX, COMPACT, CleanableLog, clean

from tidelog.log.batch import Codec, ControlMarker, Record, TimestampType, decode, encode, parse_control, read_header
from tidelog.log.batch_filter import empty_batch
from tidelog.log.cleaner import (
    KEY_MAP_NAME,
    CleanedGroup,
    CleanerLimits,
    checkpoint_after,
    clean_group,
    discard_cleaned,
    map_keys,
)
from tidelog.log.compaction import Checkpoint
from tidelog.log.config import LogConfig
from tidelog.log.key_map import ENTRY_COST_BYTES
from tidelog.log.producers import ProducerState
from tidelog.log.segment import LOG, file_path
from tidelog.model.errors import CorruptBatchError, RecordTooLargeError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.work import ProcessWork
from tidelog.world.simulated import SimWorld

DAY_MS = 24 * 60 * 60 * 1000


# Records


@pytest.fixture
def log(tmp_path: Path) -> CleanableLog:
    return CleanableLog(RealDisk(tmp_path))


@pytest.mark.requirement("a:A-91", "a:A-99", "a:X3-47", "b:B-60", "b:B-61", "b:B-63", "b:B-64", "b:EX-24")
@pytest.mark.parametrize("codec", list(Codec))
def test_the_latest_value_of_every_key_keeps_its_offset_and_order(log: CleanableLog, codec: Codec) -> None:
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


@pytest.mark.requirement("b:EX-24", "b:B-62")
def test_the_cleaner_does_not_compact_the_head(log: CleanableLog) -> None:
    log.put((b"a", b"1"))
    log.roll()
    log.put((b"a", b"2"))
    log.put((b"a", b"3"))
    log.clean(100)
    assert log.pairs() == [(0, b"a", b"1"), (1, b"a", b"2"), (2, b"a", b"3")]


@pytest.mark.requirement("a:A-100", "b:B-63")
def test_a_cleaned_batch_keeps_its_offsets(log: CleanableLog) -> None:
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


def test_the_cleaner_removes_records_without_a_key(log: CleanableLog) -> None:
    """They are from before the topic was compacted: a compacted topic rejects them."""
    log.put((None, b"1"), (b"a", b"1"))
    log.roll()
    cleaned = log.clean(100)
    assert cleaned is not None
    assert cleaned.groups[0].keyless == 1
    assert log.offsets() == [1]


@pytest.mark.requirement("a:A-98", "a:X3-47", "b:B-65", "b:EX-24")
def test_a_tombstone_stays_for_delete_retention_from_its_first_cleaning(log: CleanableLog) -> None:
    log.put((b"a", b"1"), (b"b", b"1"), timestamp=1)
    log.put((b"a", None), (b"c", b"1"), timestamp=2)
    log.roll()
    cleaned = log.clean(10_000)
    assert cleaned is not None
    assert cleaned.checkpoint.waiting_until_ms == 11_000
    assert log.pairs() == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
    assert [record.timestamp for record in log.records()] == [1, 2, 2]
    assert [batch.header.delete_horizon_ms for batch in log.batches()] == [None, 11_000]
    assert log.plan(10_999) is None
    assert log.clean(10_999, force=True) is not None
    assert log.pairs() == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
    cleaned = log.clean(11_000)
    assert cleaned is not None
    assert cleaned.checkpoint.waiting_until_ms is None
    assert log.pairs() == [(1, b"b", b"1"), (3, b"c", b"1")]
    assert [record.timestamp for record in log.records()] == [1, 2]
    log.validate()


def test_by_default_a_tombstone_is_kept_for_a_day() -> None:
    assert LogConfig().delete_retention_ms == DAY_MS


def test_a_tombstone_past_the_end_of_the_key_map_gets_no_horizon_yet(log: CleanableLog) -> None:
    """Its older values are still there: a reader must find it for the whole time after they are removed."""
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


def test_a_small_key_map_needs_several_cleanings_with_the_same_result(tmp_path: Path) -> None:
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


@pytest.mark.requirement("b:B-69")
def test_groups_are_cleaned_and_swapped_one_by_one_as_a_helper_process_does(log: CleanableLog) -> None:
    """Each group is swapped in before the next is written: the disk has one extra segment at a time."""
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


def test_the_last_batch_of_a_segment_stays_and_shows_its_end(log: CleanableLog) -> None:
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


def test_a_bare_header_keeps_the_fields_of_its_batch() -> None:
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


def test_aborted_data_is_removed_at_once_and_hides_no_earlier_record(log: CleanableLog) -> None:
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


def test_a_marker_is_removed_after_its_data_and_its_time(log: CleanableLog) -> None:
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
    assert cleaned.checkpoint.waiting_until_ms is None
    cleaned = log.clean(50, force=True)
    assert cleaned is not None
    assert [offset for offset, _ in markers()] == [1, 3], "now they wait for their horizon"
    assert cleaned.checkpoint.waiting_until_ms == 1050
    assert all(marker is not None and marker.ends_transaction for _, marker in markers())
    log.clean(1049, force=True)
    assert [offset for offset, _ in markers()] == [1, 3]
    log.clean(1050)
    assert markers() == []
    log.validate()


def test_the_transaction_index_of_a_cleaned_segment_lists_remaining_transactions(log: CleanableLog) -> None:
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


def test_a_transaction_whose_marker_is_past_the_bound_counts_as_aborted(log: CleanableLog) -> None:
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


# Errors


def test_a_corrupt_batch_fails_the_cleaning_and_leaves_no_file(log: CleanableLog) -> None:
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


def test_a_segment_of_unexpected_size_is_not_cleaned(log: CleanableLog) -> None:
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


def test_a_helper_process_runs_the_cleaner(tmp_path: Path) -> None:
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


@pytest.mark.requirement("b:EX-24")
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


def test_decoding_a_cleaned_batch_twice_gives_the_same_records(log: CleanableLog) -> None:
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
