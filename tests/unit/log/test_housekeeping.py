"""Retention and compaction of the logs of a node, with their bounds, on a simulated machine."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from log_world import batch, stamped
from logs_world import Host, RealSite, SimSite, Written, check_compacted, log_id, records_of, write

from tidelog.log import housekeeping
from tidelog.log.batch import ControlKind, Record, encode, encode_control
from tidelog.log.checkpoint import CLEANER
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.compaction import CleaningReason
from tidelog.log.config import LogConfig
from tidelog.log.log import Log
from tidelog.log.logs import Logs, LogsConfig
from tidelog.log.retention import ExpiryReason
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
def world() -> Iterator[SimWorld]:
    with SimWorld(11) as world:
        yield world


@pytest.fixture
def sim(world: SimWorld) -> SimSite:
    return SimSite(world, directories=1)


async def create(logs: Logs, topic: int = 1, config: LogConfig = COMPACT) -> Log:
    return await logs.create(log_id(topic), label="t", config=config)


async def put(log: Log, written: Written, count: int, *, keys: int = KEYS, epoch: int = 0, **fields: Any) -> None:
    """Append `count` records with keys in turn; each value is its own."""
    for _ in range(count):
        offset = int(log.end_offset)
        key, value = b"k%d" % (offset % keys), b"v%d-%d" % (epoch, offset)
        data = encode([Record(0, log.clock.now_ms(), key, value, ())], **fields)
        appended = log.append(data, leader_epoch=epoch)
        written[offset] = (key, value)
    await log.wait_durable(appended.last_offset)


def all_of(logs: Logs, *numbers: int) -> None:
    """Everything is replicated."""
    for topic in numbers or (1,):
        log = logs.get(log_id(topic))
        assert log is not None
        logs.note_high_watermark(log_id(topic), log.end_offset)


def later(sim: SimSite, milliseconds: int) -> None:
    sim.machine.clock.jump(milliseconds)


def names(host: Host, log: Log) -> list[str]:
    return host.places[0][0].list(log.path)


# Retention


@pytest.mark.source("a:A-90", "a:A-62", "a:A-64")
def test_old_segments_go_and_their_files_some_time_later(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, config=DELETE)
        await write(log, 40)
        segments = log.sealed_segments()
        assert len(segments) > 4
        all_of(logs)
        assert await logs.expire() == {}
        later(sim, HOUR_MS + 1)
        await write(log, 1)
        expired = await logs.expire()
        assert [gone.base_offset for gone in expired[log_id(1)]] == [info.base_offset for info in segments]
        assert {gone.reason for gone in expired[log_id(1)]} == {ExpiryReason.TIME}
        assert log.start_offset == segments[-1].next_offset
        assert [record.offset for record in await records_of(log)] == list(range(log.start_offset, 41))
        assert sum(name.endswith(".deleted") for name in names(host, log)) >= 2 * len(segments)
        later(sim, DELETE.file_delete_delay_ms)
        assert await logs.expire() == {}
        assert not [name for name in names(host, log) if name.endswith(".deleted")]
        assert log.sealed_segments() == []
        await logs.close()

    sim.run(main)


def test_an_idle_log_rolls_when_it_is_due_and_then_expires_too(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, config=replace(DELETE, segment_ms=HOUR_MS))
        await write(log, 2)
        all_of(logs)
        later(sim, HOUR_MS + 1)
        assert list(await logs.expire()) == [log_id(1)]
        assert log.start_offset == log.end_offset == 2
        assert await write(log) == 3
        await logs.close()

    sim.run(main)


def test_retention_stops_at_the_high_watermark_and_at_the_first_open_transaction(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log, other = await create(logs, 1, DELETE), await create(logs, 2, DELETE)
        await write(log, 40)
        await write(other, 12)
        await write(other, producer_id=4, producer_epoch=0, base_sequence=0, is_transactional=True)
        await write(other, 40)
        bound = log.sealed_segments()[2].next_offset - 1
        logs.note_high_watermark(log_id(1), Offset(bound))
        logs.note_high_watermark(log_id(2), other.end_offset)
        later(sim, HOUR_MS + 1)
        await logs.expire()
        assert log.start_offset == log.sealed_segments()[0].base_offset <= bound
        assert log.sealed_segments()[0].next_offset == bound + 1
        assert 0 < other.start_offset <= 12
        # An owner that forgets the transaction does no harm.
        await logs.expire(lambda _: Offset(1 << 40))
        assert other.start_offset <= 12
        assert log.start_offset == log.segments.active.base_offset
        await logs.close()

    sim.run(main)


@pytest.mark.source("a:A-46")
def test_retention_by_bytes_keeps_at_least_that_much(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, config=replace(DELETE, retention_ms=-1, retention_bytes=1200))
        await write(log, 60)
        all_of(logs)
        expired = await logs.expire()
        assert {gone.reason for gone in expired[log_id(1)]} == {ExpiryReason.BYTES}
        assert 1200 <= log.size < 1200 + DELETE.segment_bytes
        await logs.close()

    sim.run(main)


def test_one_log_whose_retention_fails_holds_up_no_other(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        for topic in (1, 2):
            await write(await create(logs, topic, DELETE), 40)
        all_of(logs, 1, 2)
        later(sim, HOUR_MS + 1)
        sim.machine.disk("disk-0").fail("rename")
        assert list(await logs.expire()) == [log_id(2)]

    sim.run(main)


# Compaction


@pytest.mark.source("a:A-91", "a:A-93", "a:A-95", "a:A-97", "a:A-99", "a:A-100", "a:X3-47")
def test_a_cleaning_keeps_the_latest_value_of_each_key_at_its_offset(sim: SimSite) -> None:
    written: Written = {}

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        await put(log, written, 40)
        all_of(logs)
        sealed_end = log.segments.active.base_offset
        size = log.size
        report = await logs.clean_one()
        assert report is not None
        assert report.plan.reason is CleaningReason.DIRTY
        assert report.checkpoint.first_dirty_offset == sealed_end
        assert log.size < size
        assert report.records_kept < report.records_read
        await check_compacted(log, written, untouched_from=sealed_end)
        below = [record.key for record in await records_of(log) if record.offset < sealed_end]
        assert len(below) == len(set(below)) == KEYS
        assert await logs.clean_one() is None
        assert not [name for name in names(host, log) if name.endswith((".cleaned", ".swap"))]
        await logs.close()

    async def look(host: Host) -> None:
        logs = await host.open(COMPACT)
        log = logs.all()[0]
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        assert await logs.clean_one() is None, "the checkpoint was kept"
        await put(log, written, 40)
        all_of(logs)
        assert await logs.clean_one() is not None
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)

    sim.run(main)
    sim.run(look)


@pytest.mark.source("a:A-94")
def test_the_dirtiest_log_is_cleaned_first(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        cleaned = []
        for topic in (1, 2, 3):
            await put(await create(logs, topic), {}, 40)
        all_of(logs, 1, 2, 3)
        while await logs.clean_one() is not None:
            pass
        for topic, more in ((1, 30), (2, 90), (3, 60)):
            await put(await create(logs, topic), {}, more)
        all_of(logs, 1, 2, 3)
        ends = {topic: log.segments.active.base_offset for topic, log in zip((1, 2, 3), logs.all(), strict=True)}
        while (report := await logs.clean_one()) is not None:
            cleaned += [topic for topic, end in ends.items() if end == report.plan.end_offset]
        assert cleaned == [2, 3, 1]

    sim.run(main)


def test_nothing_at_or_past_the_bound_is_touched(sim: SimSite) -> None:
    async def main(host: Host) -> None:
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
            await logs.clean_one()
            await check_compacted(log, written, untouched_from=bound)
            assert all(info in log.segments.sealed for info in before if info.next_offset > bound)
        await logs.clean_one(lambda _: Offset(1 << 40))
        await check_compacted(log, written, untouched_from=25)

    sim.run(main)


@pytest.mark.source("a:A-92")
def test_compact_and_delete_together(sim: SimSite) -> None:
    config = replace(COMPACT, cleanup_delete=True, retention_ms=HOUR_MS, min_cleanable_dirty_ratio=0.0)

    async def main(host: Host) -> None:
        written: Written = {}
        logs = await host.open()
        log = await create(logs, config=config)
        await put(log, written, 40)
        all_of(logs)
        assert await logs.clean_one() is not None
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        later(sim, HOUR_MS + 1)
        await put(log, written, 30)
        all_of(logs)
        gone = await logs.expire()
        assert gone[log_id(1)], "old segments go, although they hold the latest value of a key"
        assert log.start_offset > 0
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        assert await logs.clean_one() is not None
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        assert await logs.expire() == {}
        await logs.close()

    sim.run(main)


@pytest.mark.source("a:A-98")
def test_tombstones_stay_for_their_time_and_go_although_the_log_is_idle(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        for value in (b"a", b"b", None):
            log.append(encode([Record(0, log.clock.now_ms(), b"gone", value, ())]), leader_epoch=0)
        await put(log, {}, 30)
        log.roll()
        all_of(logs)
        assert await logs.clean_one() is not None
        assert [(r.offset, r.value) for r in await records_of(log) if r.key == b"gone"] == [(2, None)]
        assert await logs.clean_one() is None
        later(sim, COMPACT.delete_retention_ms // 2)
        assert await logs.clean_one() is None
        later(sim, COMPACT.delete_retention_ms)
        report = await logs.clean_one()
        assert report is not None
        assert report.plan.reason is CleaningReason.SETTLE
        assert not [record for record in await records_of(log) if record.key == b"gone"]
        assert await logs.clean_one() is None

    sim.run(main)


@pytest.mark.source("a:A-96")
def test_a_log_that_is_dirty_for_too_long_is_cleaned_whatever_its_ratio(sim: SimSite) -> None:
    config = replace(COMPACT, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=HOUR_MS)

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, config=config)
        await put(log, {}, 3, keys=1)
        all_of(logs)
        assert await logs.clean_one() is None
        later(sim, HOUR_MS + 1000)
        await logs.expire()
        report = await logs.clean_one()
        assert report is not None, "the active segment is rolled for it"
        assert report.plan.reason is CleaningReason.OVERDUE
        assert [record.offset for record in await records_of(log)] == [2]

    sim.run(main)


def test_aborted_records_go_and_the_transaction_index_stays_right(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        for producer, kind in ((7, ControlKind.ABORT), (8, ControlKind.COMMIT)):
            fields: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
            value = b"of %d" % producer
            data = encode(
                [Record(0, log.clock.now_ms(), b"t%d" % producer, value, ())], is_transactional=True, **fields
            )
            log.append(data, leader_epoch=0)
            marker = encode_control(kind, coordinator_epoch=1, timestamp=1, producer_id=producer, producer_epoch=0)
            log.append(marker, leader_epoch=0, is_coordinator=True)
        await put(log, {}, 30)
        all_of(logs)
        before = await log.aborted_transactions(0, log.end_offset)
        assert len(before) == 1
        assert await logs.clean_one() is not None
        assert {record.value for record in await records_of(log) if record.key in (b"t7", b"t8")} == {b"of 8"}
        log.validate()

    sim.run(main)


# The checkpoint


def stored_checkpoint(log: Log) -> bytes | None:
    return log.store.get(log.prefix + CLEANER)


async def cleaned_log(logs: Logs, written: Written) -> tuple[Log, int]:
    log = await create(logs)
    await put(log, written, 40)
    all_of(logs)
    report = await logs.clean_one()
    assert report is not None
    return log, report.checkpoint.first_dirty_offset


def test_the_checkpoint_survives_a_crash_and_lies_below_the_recovery_point(sim: SimSite) -> None:
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


def test_a_cut_below_the_checkpoint_makes_it_void_even_in_the_same_epoch(sim: SimSite) -> None:
    """What is fetched again is dirty: a tombstone in it must not go while the records that it deletes stay."""
    written: Written = {}

    async def main(host: Host) -> None:
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
        all_of(logs)
        assert housekeeping.cleaner_checkpoint(log) is None
        report = await logs.clean_one()
        assert report is not None
        assert report.plan.first_dirty_offset == 0
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        below = [record.key for record in await records_of(log) if record.offset < log.segments.active.base_offset]
        assert len(below) == len(set(below))

    sim.run(main)


def test_a_cut_above_the_checkpoint_keeps_it(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        written: Written = {}
        logs = await host.open()
        log, end = await cleaned_log(logs, written)
        await put(log, written, 3)
        await log.truncate(log.end_offset - 2)
        assert log.end_offset >= end
        checkpoint = housekeeping.cleaner_checkpoint(log)
        assert checkpoint is not None
        assert checkpoint.first_dirty_offset == end

    sim.run(main)


def test_a_checkpoint_of_another_history_or_that_cannot_be_read_counts_for_nothing(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log, end = await cleaned_log(logs, {})
        stored = stored_checkpoint(log)
        assert stored is not None
        await log.reset_to(0)
        assert stored_checkpoint(log) is None
        # As if it had come back from the dead, over a log that another leader wrote.
        for epoch, count in ((0, 3), (4, 40)):
            await put(log, {}, count, epoch=epoch)
        await log.store.commit({log.prefix + CLEANER: stored})
        assert log.end_offset > end
        assert housekeeping.cleaner_checkpoint(log) is None
        await logs.checkpoint()
        sim.machine.store("disk-0").flip_bit(log.prefix + CLEANER, 6)
        assert housekeeping.cleaner_checkpoint(log) is None
        all_of(logs)
        assert await logs.clean_one() is not None
        assert housekeeping.cleaner_checkpoint(log) is not None

    sim.run(main)


# What happens meanwhile


@pytest.mark.parametrize("overtaken_by", ["truncate", "reset", "advance_start", "remove", "close", "append", "expire"])
@pytest.mark.parametrize("turns", [0, 1, 3, 6, 10, 15, 21, 28, 40])
def test_a_cleaning_that_is_overtaken_ends_without_harm(sim: SimSite, overtaken_by: str, turns: int) -> None:
    written: Written = {}

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, config=replace(COMPACT, cleanup_delete=True, retention_bytes=900))
        await put(log, written, 40)
        all_of(logs)
        cleaning = asyncio.ensure_future(logs.clean_one())
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
                await logs.expire()
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
            all_of(logs)
            while await logs.clean_one() is not None:
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


def test_one_cleaning_runs_at_a_time_and_a_caller_that_leaves_does_not_end_it(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        await put(log, {}, 40)
        all_of(logs)
        one = asyncio.ensure_future(logs.clean_one())
        await asyncio.sleep(0.001)
        two = asyncio.ensure_future(logs.clean_one())
        await asyncio.sleep(0.001)
        one.cancel()
        report = await two
        assert report is not None
        assert report.records_kept < report.records_read
        assert await logs.clean_one() is None

    sim.run(main)


@pytest.mark.parametrize("position", [0, 7, 10, 15, 16, 40, 70, 300])
def test_rot_that_the_cleaner_meets_makes_the_log_damaged_and_the_next_log_is_cleaned(
    sim: SimSite, position: int
) -> None:
    """Also where no CRC of a batch covers it: base offset, length, leader epoch."""

    async def main(host: Host) -> None:
        logs = await host.open()
        rotten, sound = await create(logs, 1), await create(logs, 2)
        await put(rotten, {}, 80)
        await put(sound, {}, 40)
        all_of(logs, 1, 2)
        third = rotten.sealed_segments()[2]
        sim.machine.disk("disk-0").flip_bit(f"{rotten.path}/{third.base_offset:020d}.log", position)
        report = await logs.clean_one()
        assert report is not None
        assert report.plan.end_offset == sound.segments.active.base_offset
        assert isinstance(logs.uncleanable[log_id(1)], CorruptBatchError | UnsupportedMagicError)
        assert rotten.damaged is not None
        assert third.base_offset <= rotten.damaged.good_end < third.next_offset
        assert rotten.sealed_segments()[2] == third, "nothing was swapped"
        assert await logs.clean_one() is None
        good_end = rotten.damaged.good_end
        assert (await rotten.read(good_end - 1, bytes_max=1)).next_offset == good_end
        with pytest.raises(DamagedLogError):
            await rotten.read(good_end, bytes_max=1)

    sim.run(main)


# Throttling


def test_a_cleaning_is_no_faster_than_its_limit(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        limits = CleanerLimits(io_bytes_per_second=1000)
        logs = await host.open(logs_config=LogsConfig(cleaner=limits))
        log = await create(logs)
        await put(log, {}, 60)
        all_of(logs)
        began = asyncio.get_running_loop().time()
        report = await logs.clean_one()
        assert report is not None
        took = asyncio.get_running_loop().time() - began
        dirty = sum(segment.size for segment in report.plan.segments)
        assert took >= (dirty + report.bytes_read + report.bytes_kept) / 1000 > 5
        assert took < 2 * (dirty + report.bytes_read + report.bytes_kept) / 1000

    sim.run(main)


SLEPT: list[float] = []


def note_sleep(seconds: float) -> None:
    """In place of `time.sleep`: a module-level function, as a helper process needs it."""
    SLEPT.append(seconds)


def test_with_something_to_sleep_with_the_helper_throttles_itself(tmp_path: Path) -> None:
    async def main(host: Host) -> None:
        limits = CleanerLimits(io_bytes_per_second=1000)
        logs = await Logs.open(
            host.places,
            work=host.work,
            clock=host.clock,
            config_of=lambda _: COMPACT,
            config=LogsConfig(cleaner=limits),
            sleep=note_sleep,
        )
        log = await create(logs)
        await put(log, {}, 60)
        all_of(logs)
        report = await logs.clean_one()
        assert report is not None
        dirty = sum(segment.size for segment in report.plan.segments)
        assert sum(SLEPT) == pytest.approx((dirty + report.bytes_read + report.bytes_kept) / 1000)
        await logs.close()

    SLEPT.clear()
    RealSite(tmp_path, directories=1).run(main)


def test_everything_works_with_a_real_helper_process(tmp_path: Path) -> None:
    site = RealSite(tmp_path, directories=1)
    written: Written = {}

    async def fill(host: Host) -> None:
        host.work = work = ProcessWork()
        logs = await host.open()
        log = await create(logs, config=replace(COMPACT, cleanup_delete=True, retention_bytes=600))
        await put(log, written, 60)
        all_of(logs)
        assert await logs.clean_one() is not None
        await check_compacted(log, written, untouched_from=log.segments.active.base_offset)
        await put(log, written, 60)
        all_of(logs)
        assert await logs.expire()
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


def test_a_batch_of_the_log_that_a_cleaning_keeps_is_byte_for_byte_what_it_was(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs)
        await put(log, {}, 40)
        data = batch(1, key=b"only", timestamp=log.clock.now_ms())
        appended = log.append(data, leader_epoch=0)
        log.roll()
        all_of(logs)
        assert await logs.clean_one() is not None
        kept = bytes((await log.read(appended.last_offset, bytes_max=1)).data)
        assert kept == stamped(data, base_offset=appended.base_offset, leader_epoch=0)

    sim.run(main)
