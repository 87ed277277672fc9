"""Compaction of the logs of a node, with its bounds, on a simulated machine."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.logs.node_logs import (
    Host,
    RealSite,
    SimSite,
    Written,
    check_compacted,
    log_id,
    pass_time,
    put,
    records_of,
    replicate_all,
    write,
)
from support.logs.single_log import batch, stamped

from tidelog.log import housekeeping
from tidelog.log.batch import ControlKind, Record, encode, encode_control
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.compaction import CleaningReason
from tidelog.log.config import LogConfig
from tidelog.log.log import Log
from tidelog.log.logs import Logs, LogsConfig
from tidelog.log.segment import TRANSACTION_INDEX, file_path
from tidelog.log.stored_state import CLEANER, decode_segment, segment_key
from tidelog.log.transactions import AbortedTransaction, encode_entry
from tidelog.model.errors import CorruptBatchError, DamagedLogError, UnsupportedMagicError
from tidelog.model.ids import Offset
from tidelog.world.real.work import ProcessWork
from tidelog.world.simulated import Loss, SimWorld

HOUR_MS = 3_600_000
DELETE = LogConfig(segment_bytes=500, index_interval_bytes=100, retention_ms=HOUR_MS)
COMPACT = LogConfig(
    segment_bytes=500,
    index_interval_bytes=100,
    cleanup_delete=False,
    cleanup_compact=True,
    min_cleanable_dirty_ratio=0.3,
    delete_retention_ms=HOUR_MS,
)
KEYS = 5


@pytest.fixture
def sim(world: SimWorld) -> SimSite:
    return SimSite(world, directories=1)


async def create(logs: Logs, topic: int = 1, config: LogConfig = COMPACT) -> Log:
    return await logs.create(log_id(topic), label="t", config=config)


def names(host: Host, log: Log) -> list[str]:
    return host.places[0][0].list(log.path)


# Compaction


@pytest.mark.requirement("a:A-91", "a:A-93", "a:A-95", "a:A-97", "a:A-99", "a:A-100", "a:X3-47")
def test_a_cleaning_keeps_the_latest_value_of_each_key_at_its_offset(sim: SimSite) -> None:
    written: Written = {}

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        await put(log, written, 40)
        replicate_all(logs)
        sealed_end = log.segments.active.base_offset
        size = log.size
        report = await logs.housekeeping.clean_one()
        assert report is not None
        assert report.plan.reason is CleaningReason.DIRTY
        assert report.checkpoint.first_dirty_offset == sealed_end
        assert log.size < size
        assert report.records_kept < report.records_read
        await check_compacted(log, written, untouched_from=sealed_end)
        below = [record.key for record in await records_of(log) if record.offset < sealed_end]
        assert len(below) == len(set(below)) == KEYS
        assert await logs.housekeeping.clean_one() is None
        assert not [name for name in names(host, log) if name.endswith((".cleaned", ".swap"))]
        await logs.close()

    async def look(host: Host) -> None:
        logs = await host.open(COMPACT)
        log = logs.all()[0]
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        assert await logs.housekeeping.clean_one() is None, "the checkpoint was kept"
        await put(log, written, 40)
        replicate_all(logs)
        assert await logs.housekeeping.clean_one() is not None
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)

    sim.run(main)
    sim.run(look)


@pytest.mark.requirement("a:A-94")
async def test_the_dirtiest_log_is_cleaned_first(host: Host) -> None:
    logs = await host.open()
    cleaned = []
    for topic in (1, 2, 3):
        await put(await create(logs, topic), {}, 40)
    replicate_all(logs, 1, 2, 3)
    while await logs.housekeeping.clean_one() is not None:
        pass
    for topic, more in ((1, 30), (2, 90), (3, 60)):
        await put(await create(logs, topic), {}, more)
    replicate_all(logs, 1, 2, 3)
    ends = {topic: log.segments.active.base_offset for topic, log in zip((1, 2, 3), logs.all(), strict=True)}
    while (report := await logs.housekeeping.clean_one()) is not None:
        cleaned += [topic for topic, end in ends.items() if end == report.plan.end_offset]
    assert cleaned == [2, 3, 1]


async def test_a_cleaning_changes_nothing_at_or_past_the_bound(host: Host) -> None:
    written: Written = {}
    logs = await host.open()
    log = await create(logs)
    await put(log, written, 25)
    await put(log, written, 1, producer_id=9, producer_epoch=0, base_sequence=0, is_transactional=True)
    await put(log, written, 40)
    for bound in (0, 13, 21):
        before = {
            info: host.places[0][0].size(f"{log.path}/{info.base_offset:020d}.log") for info in log.segments.sealed
        }
        logs.note_high_watermark(log_id(1), Offset(bound))
        await logs.housekeeping.clean_one()
        await check_compacted(log, written, untouched_from=bound)
        assert all(info in log.segments.sealed for info in before if info.next_offset > bound)
    logs.housekeeping._bound_of = lambda _: Offset(1 << 40)
    await logs.housekeeping.clean_one()
    await check_compacted(log, written, untouched_from=25)


@pytest.mark.requirement("a:A-92")
async def test_a_log_is_compacted_and_expired_with_both_policies(sim: SimSite, host: Host) -> None:
    config = replace(COMPACT, cleanup_delete=True, retention_ms=HOUR_MS, min_cleanable_dirty_ratio=0.0)
    written: Written = {}
    logs = await host.open()
    log = await create(logs, config=config)
    await put(log, written, 40)
    replicate_all(logs)
    assert await logs.housekeeping.clean_one() is not None
    await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
    pass_time(sim, HOUR_MS + 1)
    await put(log, written, 30)
    replicate_all(logs)
    gone = await logs.housekeeping.expire()
    assert gone[log_id(1)], "old segments go, although they hold the latest value of a key"
    assert log.start_offset > 0
    await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
    assert await logs.housekeeping.clean_one() is not None
    await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
    assert await logs.housekeeping.expire() == {}
    await logs.close()


@pytest.mark.requirement("a:A-98")
async def test_tombstones_of_an_idle_log_are_removed_after_delete_retention(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log = await create(logs)
    for value in (b"a", b"b", None):
        log.append(encode([Record(0, log.clock.now_ms(), b"gone", value, ())]), leader_epoch=0)
    await put(log, {}, 30)
    log.roll()
    replicate_all(logs)
    assert await logs.housekeeping.clean_one() is not None
    assert [(r.offset, r.value) for r in await records_of(log) if r.key == b"gone"] == [(2, None)]
    assert await logs.housekeeping.clean_one() is None
    pass_time(sim, COMPACT.delete_retention_ms // 2)
    assert await logs.housekeeping.clean_one() is None
    pass_time(sim, COMPACT.delete_retention_ms)
    report = await logs.housekeeping.clean_one()
    assert report is not None
    assert report.plan.reason is CleaningReason.DELETE_HORIZON
    assert not [record for record in await records_of(log) if record.key == b"gone"]
    assert await logs.housekeeping.clean_one() is None


@pytest.mark.requirement("a:A-96")
async def test_a_log_dirty_for_too_long_is_cleaned_at_any_ratio(sim: SimSite, host: Host) -> None:
    config = replace(COMPACT, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=HOUR_MS)
    logs = await host.open()
    log = await create(logs, config=config)
    await put(log, {}, 3, keys=1)
    replicate_all(logs)
    assert await logs.housekeeping.clean_one() is None
    pass_time(sim, HOUR_MS + 1000)
    await logs.housekeeping.expire()
    report = await logs.housekeeping.clean_one()
    assert report is not None, "the active segment is rolled for it"
    assert report.plan.reason is CleaningReason.OVERDUE
    assert [record.offset for record in await records_of(log)] == [2]


async def test_a_cleaning_removes_aborted_records_and_updates_the_transaction_index(host: Host) -> None:
    logs = await host.open()
    log = await create(logs)
    for producer, kind in ((7, ControlKind.ABORT), (8, ControlKind.COMMIT)):
        fields: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
        value = b"of %d" % producer
        data = encode([Record(0, log.clock.now_ms(), b"t%d" % producer, value, ())], is_transactional=True, **fields)
        log.append(data, leader_epoch=0)
        marker = encode_control(kind, coordinator_epoch=1, timestamp=1, producer_id=producer, producer_epoch=0)
        log.append(marker, leader_epoch=0, is_coordinator=True)
    await put(log, {}, 30)
    replicate_all(logs)
    before = await log.aborted_transactions(0, log.end_offset)
    assert len(before) == 1
    assert await logs.housekeeping.clean_one() is not None
    assert {record.value for record in await records_of(log) if record.key in (b"t7", b"t8")} == {b"of 8"}
    log.validate()


def append_aborted(log: Log, *, producer: int, rolls: bool = False) -> None:
    """Append a transaction of version 2: its marker has a higher epoch, so nothing of its batch has to stay."""
    data = encode(
        [Record(0, log.clock.now_ms(), b"t%d" % producer, b"aborted", ())],
        is_transactional=True,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
    )
    log.append(data, leader_epoch=0)
    if rolls:
        log.roll()
    marker = encode_control(ControlKind.ABORT, coordinator_epoch=1, timestamp=1, producer_id=producer, producer_epoch=1)
    log.append(marker, leader_epoch=0, is_coordinator=True)


async def check_aborted_index(log: Log, host: Host, expected: list[AbortedTransaction]) -> None:
    """The index of the first segment passes its check; a lost one is rebuilt without what the log has lost."""
    info = log.sealed_segments()[0]
    assert info.aborted == 1
    assert await log.aborted_transactions(log.start_offset, log.end_offset) == expected
    assert await log.check_indexes(info) is None
    path = file_path(log.path, info.base_offset, TRANSACTION_INDEX)
    log.context.files.discard(path)
    log.disk.remove(path)
    assert await log.check_indexes(info) is not None
    assert await log.aborted_transactions(log.start_offset, log.end_offset) == []
    assert log.sealed_segments()[0].aborted == 0
    assert await log.check_indexes(log.sealed_segments()[0]) is None
    await log.checkpoint()
    stored = log.store.get(segment_key(log.prefix, info.base_offset))
    assert stored is not None
    assert decode_segment(stored).aborted == 0


async def test_a_transaction_index_may_have_entries_of_records_that_a_cleaning_has_removed(host: Host) -> None:
    logs = await host.open()
    log = await create(logs)
    append_aborted(log, producer=7)
    await put(log, {}, 30)
    replicate_all(logs)
    before = await log.aborted_transactions(0, log.end_offset)
    assert await logs.housekeeping.clean_one() is not None
    await check_aborted_index(log, host, before)


async def test_a_transaction_index_may_have_entries_of_records_that_retention_has_removed(host: Host) -> None:
    logs = await host.open()
    log = await create(logs, config=DELETE)
    append_aborted(log, producer=7, rolls=True)
    await put(log, {}, 60)
    (aborted,) = await log.aborted_transactions(0, log.end_offset)
    await log.checkpoint()
    await log.advance_start(log.sealed_segments()[1].base_offset)
    await put(log, {}, 1)
    await log.checkpoint()
    assert log.start_offset == aborted.last_offset == log.segments.first_offset
    await check_aborted_index(log, host, [aborted])


@pytest.mark.parametrize("name", ["first_offset", "producer_id", "last_stable_offset"])
async def test_a_wrong_entry_of_a_transaction_index_is_found(host: Host, name: str) -> None:
    logs = await host.open()
    log = await create(logs, config=DELETE)
    await put(log, {}, 2)
    append_aborted(log, producer=7)
    log.roll()
    info = log.sealed_segments()[0]
    assert await log.check_indexes(info) is None
    (right,) = await log.aborted_transactions(0, log.end_offset)
    path = file_path(log.path, info.base_offset, TRANSACTION_INDEX)
    log.context.files.discard(path)
    log.disk.remove(path)
    wrong = replace(right, **{name: getattr(right, name) + (-1 if name == "first_offset" else 1)})
    with closing(log.disk.open(path, create=True)) as file:
        file.append(encode_entry(wrong))
    assert "says" in (await log.check_indexes(info) or "")
    await log.rebuild_index(info.base_offset)
    assert await log.aborted_transactions(0, log.end_offset) == [right]


# The checkpoint


def stored_checkpoint(log: Log) -> bytes | None:
    return log.store.get(log.prefix + CLEANER)


async def cleaned_log(logs: Logs, written: Written) -> tuple[Log, int]:
    log = await create(logs)
    await put(log, written, 40)
    replicate_all(logs)
    report = await logs.housekeeping.clean_one()
    assert report is not None
    return log, report.checkpoint.first_dirty_offset


def test_the_cleaner_checkpoint_survives_a_crash_and_is_below_the_recovery_point(sim: SimSite) -> None:
    ends = []

    async def main(host: Host) -> None:
        logs = await host.open(logs_config=LogsConfig(checkpoint_interval_ms=HOUR_MS))
        log, end = await cleaned_log(logs, {})
        assert log.recovery_point >= end
        ends.append(end)

    async def look(host: Host) -> None:
        logs = await host.open(COMPACT)
        checkpoint = housekeeping.cleaner_checkpoint(logs.all()[0])
        assert checkpoint is not None
        assert checkpoint.first_dirty_offset == ends[0]

    sim.run(main)
    sim.lose_power()
    sim.run(look)


async def test_a_truncation_below_the_cleaner_checkpoint_deletes_it(host: Host) -> None:
    """What is fetched again is dirty: a tombstone in it must not be removed before the records that it deletes."""
    written: Written = {}
    logs = await host.open()
    log, end = await cleaned_log(logs, written)
    await log.truncate(end - 8)
    assert stored_checkpoint(log) is None
    assert housekeeping.cleaner_checkpoint(log) is None
    for offset in range(log.end_offset, end + 20):
        key, value = written.get(offset, (b"k%d" % (offset % KEYS), b"later"))
        written[offset] = (key, value)
        data = encode([Record(0, log.clock.now_ms(), key, value, ())])
        log.append_replicated(stamped(data, base_offset=offset, leader_epoch=0))
    replicate_all(logs)
    assert housekeeping.cleaner_checkpoint(log) is None
    report = await logs.housekeeping.clean_one()
    assert report is not None
    assert report.plan.first_dirty_offset == 0
    await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
    below = [record.key for record in await records_of(log) if record.offset < log.segments.active.base_offset]
    assert len(below) == len(set(below))


async def test_a_truncation_above_the_cleaner_checkpoint_keeps_it(host: Host) -> None:
    written: Written = {}
    logs = await host.open()
    log, end = await cleaned_log(logs, written)
    await put(log, written, 3)
    await log.truncate(log.end_offset - 2)
    assert log.end_offset >= end
    checkpoint = housekeeping.cleaner_checkpoint(log)
    assert checkpoint is not None
    assert checkpoint.first_dirty_offset == end


async def test_an_unreadable_cleaner_checkpoint_or_one_of_another_history_is_ignored(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log, end = await cleaned_log(logs, {})
    stored = stored_checkpoint(log)
    assert stored is not None
    await log.reset_to(0)
    assert stored_checkpoint(log) is None
    # A stale checkpoint over a log that another leader wrote.
    for epoch, count in ((0, 3), (4, 40)):
        await put(log, {}, count, epoch=epoch)
    await log.store.commit({log.prefix + CLEANER: stored})
    assert log.end_offset > end
    assert housekeeping.cleaner_checkpoint(log) is None
    await logs.checkpoint()
    sim.machine.store("disk-0").flip_bit(log.prefix + CLEANER, 6)
    assert housekeeping.cleaner_checkpoint(log) is None
    replicate_all(logs)
    assert await logs.housekeeping.clean_one() is not None
    assert housekeeping.cleaner_checkpoint(log) is not None


# Concurrent changes


@pytest.mark.parametrize("overtaken_by", ["truncate", "reset", "advance_start", "remove", "close", "append", "expire"])
@pytest.mark.parametrize("turns", [0, 1, 3, 6, 10, 15, 21, 28, 40])
def test_a_cleaning_overtaken_by_another_change_is_abandoned(sim: SimSite, overtaken_by: str, turns: int) -> None:
    written: Written = {}

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, config=replace(COMPACT, cleanup_delete=True, retention_bytes=900))
        await put(log, written, 40)
        replicate_all(logs)
        cleaning = asyncio.ensure_future(logs.housekeeping.clean_one())
        for _ in range(turns):
            await asyncio.sleep(0.0007)
        match overtaken_by:
            case "truncate":
                await log.truncate(11)
            case "reset":
                await log.reset_to(500)
            case "advance_start":
                await log.advance_start(17)
            case "remove":
                await logs.remove(log_id(1))
            case "close":
                await logs.close()
            case "append":
                await put(log, written, 20)
            case _:
                await logs.housekeeping.expire()
        await asyncio.wait([cleaning])
        if overtaken_by == "close":
            return
        await cleaning
        if overtaken_by != "remove":
            for offset in [offset for offset in written if offset >= log.end_offset]:
                del written[offset]
            await check_compacted(log, written, untouched_from=40)
            assert not [name for name in names(host, log) if name.endswith((".cleaned", ".swap"))]
            await put(log, written, 30)
            replicate_all(logs)
            while await logs.housekeeping.clean_one() is not None:
                await check_compacted(log, written, untouched_from=log.segments.active.base_offset)

    async def look(host: Host) -> None:
        logs = await host.open(COMPACT)
        assert len(logs) == (0 if overtaken_by == "remove" else 1)
        for log in logs.all():
            await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
            assert not [name for name in names(host, log) if name.endswith((".cleaned", ".swap", ".deleted"))]
        await logs.close()

    sim.run(main)
    sim.lose_power(Loss.SOME)
    sim.run(look)


async def test_one_cleaning_runs_at_a_time_and_survives_a_cancelled_caller(host: Host) -> None:
    logs = await host.open()
    log = await create(logs)
    await put(log, {}, 40)
    replicate_all(logs)
    one = asyncio.ensure_future(logs.housekeeping.clean_one())
    await asyncio.sleep(0.001)
    two = asyncio.ensure_future(logs.housekeeping.clean_one())
    await asyncio.sleep(0.001)
    one.cancel()
    report = await two
    assert report is not None
    assert report.records_kept < report.records_read
    assert await logs.housekeeping.clean_one() is None


@pytest.mark.parametrize("position", [0, 7, 10, 15, 16, 40, 70, 300])
async def test_rot_found_by_the_cleaner_damages_the_log_and_the_next_log_is_cleaned(
    sim: SimSite, host: Host, position: int
) -> None:
    """Also where no CRC of a batch covers it: base offset, length, leader epoch."""
    logs = await host.open()
    rotten, sound = await create(logs, 1), await create(logs, 2)
    await put(rotten, {}, 80)
    await put(sound, {}, 40)
    replicate_all(logs, 1, 2)
    third = rotten.sealed_segments()[2]
    sim.machine.disk("disk-0").flip_bit(f"{rotten.path}/{third.base_offset:020d}.log", position)
    report = await logs.housekeeping.clean_one()
    assert report is not None
    assert report.plan.end_offset == sound.segments.active.base_offset
    assert isinstance(logs.housekeeping.uncleanable[log_id(1)], CorruptBatchError | UnsupportedMagicError)
    assert rotten.damaged is not None
    assert third.base_offset <= rotten.damaged.good_end < third.next_offset
    assert rotten.sealed_segments()[2] == third, "nothing was swapped"
    assert await logs.housekeeping.clean_one() is None
    good_end = rotten.damaged.good_end
    assert (await rotten.read(good_end - 1, bytes_max=1)).next_offset == good_end
    with pytest.raises(DamagedLogError):
        await rotten.read(good_end, bytes_max=1)


# Throttling


@pytest.mark.requirement("b:B-67", "b:N-04")
async def test_a_cleaning_is_no_faster_than_its_limit(host: Host) -> None:
    limits = CleanerLimits(io_bytes_per_second=1000)
    logs = await host.open(logs_config=LogsConfig(cleaner=limits))
    log = await create(logs)
    await put(log, {}, 60)
    replicate_all(logs)
    began = asyncio.get_running_loop().time()
    report = await logs.housekeeping.clean_one()
    assert report is not None
    took = asyncio.get_running_loop().time() - began
    dirty = sum(segment.size for segment in report.plan.segments)
    assert took >= (dirty + report.bytes_read + report.bytes_kept) / 1000 > 5
    assert took < 2 * (dirty + report.bytes_read + report.bytes_kept) / 1000


def test_retention_and_cleaning_work_with_a_real_helper_process(tmp_path: Path) -> None:
    site = RealSite(tmp_path, directories=1)
    written: Written = {}

    async def fill(host: Host) -> None:
        host.work = work = ProcessWork()
        logs = await host.open()
        log = await create(logs, config=replace(COMPACT, cleanup_delete=True, retention_bytes=600))
        await put(log, written, 60)
        replicate_all(logs)
        assert await logs.housekeeping.clean_one() is not None
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        await put(log, written, 60)
        replicate_all(logs)
        assert await logs.housekeeping.expire()
        await write(await create(logs, 2), 30)
        await logs.remove(log_id(2))
        await put(log, written, 5)
        await work.close()

    async def look(host: Host) -> None:
        host.work = work = ProcessWork()
        logs = await host.open(COMPACT)
        assert logs.known() == [log_id(1)]
        log = logs.all()[0]
        assert not log.report.clean
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        assert log.end_offset == 125
        await logs.close()
        await work.close()

    site.run(fill)
    site.run(look)


async def test_a_batch_that_a_cleaning_keeps_is_unchanged(host: Host) -> None:
    logs = await host.open()
    log = await create(logs)
    await put(log, {}, 40)
    data = batch(1, key=b"only", timestamp=log.clock.now_ms())
    appended = log.append(data, leader_epoch=0)
    log.roll()
    replicate_all(logs)
    assert await logs.housekeeping.clean_one() is not None
    kept = bytes((await log.read(appended.last_offset, bytes_max=1)).data)
    assert kept == stamped(data, base_offset=appended.base_offset, leader_epoch=0)
