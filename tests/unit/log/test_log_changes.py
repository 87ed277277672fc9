"""Changes of the files of an open log: truncation, dropped segments, swapped-in cleaned segments."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.logs.cleaning import clean
from support.logs.single_log import ONE_SEGMENT, PATH, SMALL, Lab, batch, idempotent, open_log, read_all, split, stamped

from tidelog.log.batch import (
    decode,
    read_header,
)
from tidelog.log.cleaner import CleanedSegment, CleanerLimits, CleaningTask
from tidelog.log.compaction import plan_cleaning
from tidelog.log.log import Log, Slice
from tidelog.log.segment import DELETED, INDEX, LOG, TIME_INDEX
from tidelog.model.errors import (
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    RecordsTruncatedError,
)
from tidelog.world.simulated import Latency, Loss, SimNode, SimWorld


class TestTruncate:
    async def test_a_batch_that_spans_the_offset_is_truncated_whole(self, node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(10):
            log.append(batch(3), leader_epoch=0)
        await log.truncate(17)
        log.validate()
        assert log.end_offset == log.durable_end == log.recovery_point == 15
        assert log.append(batch(1), leader_epoch=0).base_offset == 15

    async def test_truncation_restores_epochs_and_producers(self, node: SimNode) -> None:
        log = await open_log(node)
        for sequence in range(30):
            log.append(idempotent(sequence, value=b"x" * 100), leader_epoch=sequence // 10)
        await log.checkpoint()
        await log.truncate(12)
        log.validate()
        assert list(log.epochs) == [(0, 0), (1, 10)]
        with pytest.raises(OutOfOrderSequenceError):
            log.append(idempotent(13), leader_epoch=1)
        assert log.append(idempotent(11, value=b"x" * 100), leader_epoch=1).duplicate
        assert log.append(idempotent(12), leader_epoch=1).base_offset == 12
        await log.truncate(10)
        assert log.epochs.latest == 0

    @pytest.mark.case("T14")
    def test_the_recovery_point_is_lowered_before_a_file_is_truncated(self, lab: Lab) -> None:
        """A power loss at any operation of the truncation leaves the log whole and not damaged, with its producer."""

        def numbered(at: int) -> bytes:
            return batch(1, value=bytes([at]) * 100, producer_id=5, producer_epoch=0, base_sequence=at)

        for operation in range(1, 40):
            with SimWorld(seed=operation) as world:
                other = Lab(world)
                device = other.machine.disk()

                async def write(node: SimNode, device: Any = device, operation: int = operation) -> None:
                    log = await open_log(node)
                    for at in range(40):
                        log.append(numbered(at), leader_epoch=0)
                    await log.checkpoint()
                    device.crash_at_operation = device.operations + operation
                    await log.truncate(11)
                    device.crash_at_operation = None

                async def check(node: SimNode) -> None:
                    log = await open_log(node)
                    assert log.damaged is None
                    assert log.end_offset >= 11
                    found = await read_all(log)
                    assert [read_header(data).base_offset for data in found] == list(range(log.end_offset))
                    assert "producers" not in log.report.rebuilt, "they are stored with the lower recovery point"
                    assert log.append(numbered(log.end_offset - 1), leader_epoch=0).duplicate

                node = other.machine.boot()
                task = node.spawn(write(node))
                world.run_until(lambda task=task, node=node: task.done() or not node.is_alive)  # type: ignore[misc]
                finished = node.is_alive
                other.crash(Loss.SOME)
                other.run(check)
                if finished:
                    assert operation > 5
                    return
        raise AssertionError("the truncation never came to its end")

    async def test_a_waiter_for_a_truncated_record_gets_an_error(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        lab.machine.disk().sync_latency = Latency(0.5, 0.5)
        log.append(batch(1), leader_epoch=0)
        kept = log.wait_durable(0)
        await asyncio.sleep(0.1)  # a sync is under way now
        log.append(batch(1), leader_epoch=0)
        gone = log.wait_durable(1)
        await log.truncate(1)
        assert isinstance(gone.exception(), RecordsTruncatedError)
        await kept
        # The sync that began before the truncation does not confirm what is written after it at the same offset.
        log.append(batch(1, value=b"other"), leader_epoch=1)
        assert log.durable_end == 1
        await log.wait_durable(1)
        assert log.durable_end == 2

    @pytest.mark.parametrize("start", [0, 7])
    async def test_waiters_for_records_that_a_reset_removes_get_an_error(
        self, lab: Lab, node: SimNode, start: int
    ) -> None:
        """Also the one for the first offset."""
        log = await open_log(node)
        lab.machine.disk().sync_latency = Latency(0.5, 0.5)
        log.append(batch(2), leader_epoch=0)
        waiters = [log.wait_durable(0), log.wait_durable(1)]
        await log.reset_to(start)
        assert all(isinstance(waiter.exception(), RecordsTruncatedError) for waiter in waiters)
        assert log.durable_end == log.end_offset == start

    async def test_a_segment_truncated_and_sealed_has_the_crc_of_its_file(self, node: SimNode) -> None:
        log = await open_log(node)
        for at in range(8):
            log.append(batch(1, value=bytes([at]) * 100), leader_epoch=0)
        await log.truncate(4)
        for at in range(20):
            log.append(batch(1, value=bytes([at]) * 100), leader_epoch=1)
        await log.checkpoint()
        assert len(log.sealed_segments()) >= 2
        for info in log.sealed_segments():
            assert info.crc is not None
            assert (await log.scrub(info.base_offset)).fault is None

    async def test_reads_that_were_under_way_see_the_old_log_or_the_new_one(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node, ONE_SEGMENT)
        old = []
        for at in range(30):
            data = batch(1, value=bytes([at]) * 100)
            old.append(stamped(data, base_offset=at, leader_epoch=0))
            log.append(data, leader_epoch=0)
        await log.checkpoint()
        lab.machine.disk().cold_read_probability = 1.0
        reading = [asyncio.ensure_future(log.read(at, bytes_max=500)) for at in range(10, 30)]
        await log.truncate(20)
        new = old[:20]
        for at in range(20, 30):
            data = batch(1, value=b"y" * 90)
            new.append(stamped(data, base_offset=at, leader_epoch=1))
            log.append(data, leader_epoch=1)
        for at, future in zip(range(10, 30), reading, strict=True):
            try:
                found = await future
            except OffsetOutOfRangeError:
                assert at > 20
                continue
            batches = split(found.data)
            assert batches == old[at : at + len(batches)] or batches == new[at : at + len(batches)]


class TestStart:
    def test_the_start_offset_survives_a_crash_and_segments_below_it_are_dropped(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            for _ in range(40):
                log.append(batch(1, value=b"x" * 100), leader_epoch=0)
            await log.advance_start(25)
            log.validate()
            assert all(info.next_offset > 25 for info in log.sealed_segments())
            deleted = [name for name in node.disk().list(PATH) if name.endswith(DELETED)]
            assert deleted
            assert await log.remove_deleted(node.clock.now_ms()) == 0
            assert await log.remove_deleted(node.clock.now_ms() + 60_000) == len(deleted)
            assert not [name for name in node.disk().list(PATH) if name.endswith(DELETED)]
            with pytest.raises(OffsetOutOfRangeError):
                await log.advance_start(41)
            await log.advance_start(3)
            assert log.start_offset == 25

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is None
            assert log.start_offset == 25
            assert log.end_offset == 40

        lab.run(write)
        lab.crash(Loss.ALL)
        lab.run(check)

    async def test_readers_go_on_while_segments_are_deleted(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(40):
            log.append(batch(1, value=b"x" * 100), leader_epoch=0)
        await log.checkpoint()
        lab.machine.disk().cold_read_probability = 1.0
        reading = [asyncio.ensure_future(log.read(at, bytes_max=1)) for at in range(16)]
        await asyncio.sleep(0)
        await log.advance_start(log.sealed_segments()[1].next_offset)
        log.validate()
        found = await asyncio.gather(*reading, return_exceptions=True)
        assert all(
            one.base_offset == at if isinstance(one, Slice) else isinstance(one, OffsetOutOfRangeError)
            for at, one in enumerate(found)
        )

    @pytest.mark.case("T9")
    def test_a_follower_too_far_behind_is_reset_to_another_offset(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            for sequence in range(20):
                log.append(idempotent(sequence, value=b"x" * 100), leader_epoch=0)
            await log.reset_to(1000)
            log.validate()
            assert (log.start_offset, log.end_offset, log.durable_end) == (1000, 1000, 1000)
            assert len(log.epochs) == len(log.producers) == 0
            log.append_replicated(stamped(batch(2), base_offset=1000, leader_epoch=8))
            await log.wait_durable(1001)

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            assert (log.start_offset, log.end_offset) == (1000, 1002)
            assert list(log.epochs) == [(8, 1000)]

        lab.run(write)
        lab.crash(Loss.ALL)
        lab.run(check)

    def test_an_epoch_led_without_records_does_not_end_an_older_one_after_a_crash(self, lab: Lab) -> None:
        """Seed 301411 of the brokers: followers truncated acknowledged records."""

        async def write(node: SimNode) -> None:
            log = await open_log(node)
            log.append(batch(13), leader_epoch=0)
            log.assign_epoch(1)
            await log.checkpoint()
            assert list(log.epochs) == [(0, 0), (1, 13)]
            log.append_replicated(stamped(batch(2), base_offset=13, leader_epoch=0))
            await log.flush()
            assert list(log.epochs) == [(0, 0)]

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            assert log.end_offset == 15
            assert list(log.epochs) == [(0, 0)]

        lab.run(write)
        lab.crash(Loss.ALL)
        lab.run(check)

    @pytest.mark.case("T6")
    def test_an_epoch_without_records_survives_a_restart(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            log.append(batch(2), leader_epoch=3)
            log.assign_epoch(4)
            log.assign_epoch(7)
            await log.checkpoint()

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            assert list(log.epochs) == [(3, 0), (4, 2), (7, 2)]
            assert log.end_offset_for_epoch(4) == (4, 2)
            assert log.end_offset_for_epoch(7) == (7, 2)
            await log.close()

        lab.run(write)
        lab.crash(Loss.ALL)
        for _ in range(2):
            lab.run(check)
            lab.kill()


COMPACTED = replace(SMALL, cleanup_compact=True, min_cleanable_dirty_ratio=0.1)


async def write_keys(node: SimNode) -> tuple[Log, list[CleanedSegment]]:
    """A log of 40 records of five keys, and its cleaned segments, not yet swapped in."""
    log = await open_log(node, COMPACTED)
    for at in range(40):
        log.append(batch(1, key=b"k%d" % (at % 5), value=bytes([at]) * 100, timestamp=at), leader_epoch=0)
    await log.checkpoint()
    plan = plan_cleaning(
        log.sealed_segments(),
        checkpoint=None,
        config=COMPACTED,
        now_ms=node.clock.now_ms(),
        log_start=log.start_offset,
        bound=log.end_offset,
    )
    assert plan is not None
    task = CleaningTask(PATH, plan, (), log.producers.last_batches(), -1, CleanerLimits(index_interval_bytes=200))
    cleaned = await log.work.run(clean, log.disk, task)
    assert cleaned.segments
    return log, list(cleaned.segments)


def latest(batches: list[bytes]) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for data in batches for record in decode(data, decompressed_bytes_max=1 << 20)}


def offsets(batches: list[bytes]) -> list[int]:
    return [record.offset for data in batches for record in decode(data, decompressed_bytes_max=1 << 20)]


class TestReplaceSegments:
    @pytest.mark.requirement("b:B-69")
    def test_cleaned_segments_replace_the_old_ones(self, lab: Lab) -> None:
        async def main(node: SimNode) -> None:
            log, cleaned = await write_keys(node)
            before = await read_all(log)
            assert await log.replace_segments(cleaned)
            log.validate()
            after = await read_all(log)
            assert sum(map(len, after)) < sum(map(len, before))
            assert latest(after) == latest(before)
            assert set(offsets(after)) < set(offsets(before))
            for info in log.sealed_segments():
                assert (await log.scrub(info.base_offset)).fault is None
            for data in before:
                await log.read(read_header(data).base_offset, bytes_max=1)
            assert await log.remove_deleted(node.clock.now_ms() + 60_000) > 0
            await log.close()

        async def again(node: SimNode) -> None:
            log = await open_log(node, COMPACTED)
            assert log.report.clean
            assert len(latest(await read_all(log))) == 5

        lab.run(main)
        lab.crash(Loss.ALL)
        lab.run(again)

    def test_a_crash_at_any_point_leaves_all_of_the_old_or_all_of_the_new(self) -> None:
        outcomes = set()
        for store_commits, operation in [(None, n) for n in range(1, 60)] + [(n, None) for n in range(1, 4)]:
            with SimWorld(seed=operation or 0) as world:
                lab = Lab(world)
                expected: dict[str, list[bytes]] = {}
                device, store = lab.machine.disk(), lab.machine.store()

                async def swap(
                    node: SimNode,
                    device: Any = device,
                    store: Any = store,
                    commits: int | None = store_commits,
                    operation: int | None = operation,
                    expected: dict[str, list[bytes]] = expected,
                ) -> None:
                    log, cleaned = await write_keys(node)
                    expected["old"] = await read_all(log)
                    device.crash_at_operation = operation and device.operations + operation
                    store.crash_at_commit = commits and store.transactions + commits
                    await log.replace_segments(cleaned)
                    device.crash_at_operation = store.crash_at_commit = None

                node = lab.machine.boot()
                task = node.spawn(swap(node))
                world.run_until(lambda task=task, node=node: task.done() or not node.is_alive)  # type: ignore[misc]
                finished = node.is_alive
                lab.crash(Loss.SOME)
                device.crash_at_operation = store.crash_at_commit = None

                async def look(node: SimNode) -> list[bytes]:
                    log = await open_log(node, COMPACTED)
                    assert log.damaged is None
                    found = await read_all(log)
                    for info in log.sealed_segments():
                        assert (await log.scrub(info.base_offset)).fault is None
                    assert not [name for name in node.disk().list(PATH) if not name.endswith((LOG, INDEX, TIME_INDEX))]
                    return found

                found = lab.run(look)
                assert latest(found) == latest(expected["old"])
                outcomes.add("old" if found == expected["old"] else tuple(offsets(found)))
                if finished and operation is not None:
                    assert found != expected["old"]
        assert len(outcomes) == 2, f"all or nothing: {outcomes}"

    async def test_a_log_truncated_meanwhile_rejects_cleaned_segments(self, node: SimNode) -> None:
        log, cleaned = await write_keys(node)
        generation = log.durability.generation
        await log.truncate(3)
        assert not await log.replace_segments(cleaned, generation=generation)
        log.validate()
        assert log.end_offset == 3
