"""One log: appends, replicated appends and reads."""

import asyncio
import errno
from dataclasses import replace

import pytest
from support.logs.single_log import (
    ONE_SEGMENT,
    PATH,
    SMALL,
    Lab,
    batch,
    idempotent,
    marker,
    open_log,
    read_all,
    split,
    stamped,
)

from tidelog.log.batch import (
    Codec,
    ControlKind,
    Record,
    TimestampType,
    check_batch,
    decode,
    encode,
    read_header,
)
from tidelog.log.log import Log
from tidelog.log.segment import INDEX, LOG, TIME_INDEX
from tidelog.model.errors import (
    CorruptBatchError,
    DiskFullError,
    DuplicateSequenceError,
    FencedLeaderEpochError,
    InvalidRecordError,
    InvalidTimestampError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    RecordTooLargeError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Offset
from tidelog.world.simulated import Loss, SimNode


class TestAppend:
    @pytest.mark.requirement("a:A-08", "a:A-11", "a:A-65", "b:A-09", "b:A-10")
    async def test_a_batch_is_stored_byte_for_byte_but_for_offset_and_epoch(self, node: SimNode) -> None:
        log = await open_log(node)
        first = log.append(batch(3, value=b"one"), leader_epoch=4)
        second = log.append(batch(2, value=b"two"), leader_epoch=4)
        assert (first.base_offset, first.last_offset) == (0, 2)
        assert (second.base_offset, second.last_offset) == (3, 4)
        assert not second.duplicate
        expected = [
            stamped(batch(3, value=b"one"), base_offset=0, leader_epoch=4),
            stamped(batch(2, value=b"two"), base_offset=3, leader_epoch=4),
        ]
        assert await read_all(log) == expected
        assert node.disk().open(f"{PATH}/00000000000000000000.log").read(0, 10_000) == b"".join(expected)
        assert all(check_batch(data, size_max=10_000).leader_epoch == 4 for data in expected)

    async def test_several_batches_are_one_write(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(1), leader_epoch=0)
        before = lab.machine.disk().operations
        appended = log.append(batch(2) + batch(3) + batch(1), leader_epoch=0)
        assert lab.machine.disk().operations == before + 1
        assert (appended.base_offset, appended.last_offset) == (1, 6)
        assert [read_header(data).base_offset for data in await read_all(log)] == [0, 1, 3, 6]

    async def test_invalid_batches_are_rejected_and_nothing_is_written(self, node: SimNode) -> None:
        good = batch(2)
        wrong = bytearray(good)
        wrong[-1] ^= 1
        old_magic = bytearray(good)
        old_magic[16] = 1
        cases: list[tuple[bytes, type[Exception]]] = [
            (bytes(wrong), CorruptBatchError),
            (good[:-1], CorruptBatchError),
            (good + bytes(wrong), CorruptBatchError),
            (good + b"x", CorruptBatchError),
            (bytes(old_magic), UnsupportedMagicError),
            (b"", InvalidRecordError),
            (batch(2, last_offset_delta=5), InvalidRecordError),
            (batch(1, is_control=True), InvalidRecordError),
            (batch(1, is_transactional=True), InvalidRecordError),
        ]
        log = await open_log(node)
        for data, error in cases:
            with pytest.raises(error):
                log.append(data, leader_epoch=0)
        assert log.end_offset == 0
        assert node.disk().list(PATH) == []

    async def test_a_batch_over_the_limit_of_the_topic_or_a_segment_is_rejected(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, message_bytes_max=500))
        with pytest.raises(RecordTooLargeError):
            log.append(batch(1, value=b"x" * 500), leader_epoch=0)
        await log.configure(SMALL)
        with pytest.raises(RecordTooLargeError):
            log.append(batch(1, value=b"x" * 1500), leader_epoch=0)
        log.append(batch(1, value=b"x" * 1000), leader_epoch=0)

    async def test_an_older_leader_epoch_is_fenced_and_a_newer_one_begins_with_its_first_append(
        self, node: SimNode
    ) -> None:
        log = await open_log(node)
        log.append(batch(2), leader_epoch=3)
        log.append(batch(2), leader_epoch=3)
        log.append(batch(1), leader_epoch=5)
        with pytest.raises(FencedLeaderEpochError):
            log.append(batch(1), leader_epoch=4)
        assert list(log.epochs) == [(3, 0), (5, 4)]
        assert log.end_offset_for_epoch(3) == (3, 4)
        assert log.end_offset_for_epoch(4) == (3, 4)
        assert log.end_offset_for_epoch(5) == (5, 5)
        assert log.end_offset_for_epoch(6) == (-1, -1)

    @pytest.mark.requirement("a:A-68", "b:A-06")
    async def test_log_append_time_is_stamped_if_the_topic_uses_it(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, timestamp_type=TimestampType.LOG_APPEND))
        appended = log.append(batch(3, timestamp=17), leader_epoch=0)
        now = node.clock.now_ms()
        assert appended.append_time == now
        (stored,) = await read_all(log)
        assert check_batch(stored, size_max=10_000).timestamp_type is TimestampType.LOG_APPEND
        assert {record.timestamp for record in decode(stored, decompressed_bytes_max=10_000)} == {now}

    async def test_create_times_outside_of_the_topics_bounds_are_rejected(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, timestamp_before_max_ms=1000, timestamp_after_max_ms=2000))
        now = node.clock.now_ms()
        for timestamp in (now - 1001, now + 2001):
            with pytest.raises(InvalidTimestampError):
                log.append(batch(1, timestamp=timestamp), leader_epoch=0)
        for timestamp in (now - 1000, now + 2000):
            assert log.append(batch(1, timestamp=timestamp), leader_epoch=0).append_time == -1
        with pytest.raises(InvalidTimestampError):
            log.append(batch(1, timestamp=now, timestamp_type=TimestampType.LOG_APPEND), leader_epoch=0)

    async def test_records_of_a_coordinator_are_stored_although_the_clock_has_jumped_back(self, node: SimNode) -> None:
        """Seed 8 of the lab: a commit of offsets was rejected, and its consumer gave up."""
        log = await open_log(node, replace(SMALL, timestamp_before_max_ms=1000, timestamp_after_max_ms=2000))
        now = node.clock.now_ms()
        for timestamp in (now - 365 * 86_400_000, now + 365 * 86_400_000):
            assert log.append(batch(1, timestamp=timestamp), leader_epoch=0, is_coordinator=True).append_time == -1

    @pytest.mark.requirement("a:A-91")
    async def test_a_compacted_topic_takes_no_null_keys(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, cleanup_compact=True))
        with pytest.raises(InvalidRecordError, match="key"):
            log.append(batch(2, key=None), leader_epoch=0)
        log.append(batch(2, key=b""), leader_epoch=0)

    async def test_a_codec_other_than_the_topics_is_changed(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, compression=Codec.ZSTD))
        sent = batch(5, value=b"abc" * 100, codec=Codec.GZIP)
        log.append(sent, leader_epoch=0)
        (stored,) = await read_all(log)
        assert check_batch(stored, size_max=10_000).codec is Codec.ZSTD
        assert [record.value for record in decode(stored, decompressed_bytes_max=10_000)] == [b"abc" * 100] * 5

    async def test_a_full_disk_rejects_the_append_and_a_later_append_succeeds(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(1), leader_epoch=0)
        lab.machine.disk().fill(10)
        with pytest.raises(DiskFullError):
            log.append(batch(1, value=b"x" * 300), leader_epoch=1)
        log.validate()
        assert log.end_offset == 1
        lab.machine.disk().heal()
        assert log.append(batch(1), leader_epoch=0).base_offset == 1
        await log.flush()
        assert len(await read_all(log)) == 2

    async def test_a_full_disk_in_the_middle_of_a_roll_changes_nothing(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        while log.active_bytes < 1200:
            log.append(batch(1, value=b"x" * 80), leader_epoch=0)
        end = log.end_offset
        lab.machine.disk().fail("append", number=errno.ENOSPC, path=f"{PATH}/{0:020d}{TIME_INDEX}")
        with pytest.raises(DiskFullError):
            log.append(batch(1, value=b"x" * 300), leader_epoch=0)
        log.validate()
        assert log.end_offset == end
        log.append(batch(1, value=b"x" * 300), leader_epoch=0)
        log.validate()
        assert len(log.sealed_segments()) == 1
        assert len(await read_all(log)) == end + 1


class TestProducers:
    @pytest.mark.requirement("a:T-15")
    async def test_a_duplicate_batch_returns_the_original_offsets(self, node: SimNode) -> None:
        log = await open_log(node)
        original = log.append(idempotent(0, count=3), leader_epoch=0)
        log.append(idempotent(3), leader_epoch=0)
        again = log.append(idempotent(0, count=3), leader_epoch=0)
        assert again.duplicate
        assert (again.base_offset, again.last_offset) == (original.base_offset, original.last_offset)
        assert log.end_offset == 4
        with pytest.raises(OutOfOrderSequenceError):
            log.append(idempotent(9), leader_epoch=0)

    async def test_two_batches_of_one_producer_in_one_append_are_rejected(self, node: SimNode) -> None:
        log = await open_log(node)
        with pytest.raises(InvalidRecordError):
            log.append(idempotent(0) + idempotent(1), leader_epoch=0)
        both = log.append(idempotent(0) + idempotent(0, producer=8), leader_epoch=0)
        assert (both.base_offset, both.last_offset) == (0, 1)
        mixed = log.append(idempotent(0) + idempotent(1, producer=8), leader_epoch=0)
        assert not mixed.duplicate
        assert (mixed.base_offset, mixed.last_offset) == (-1, 2), "they do not lie one behind another"
        behind = log.append(idempotent(1, producer=8) + idempotent(1), leader_epoch=0)
        assert (behind.base_offset, behind.last_offset, behind.duplicate) == (2, 3, False), "they do"
        crossed = log.append(idempotent(1) + idempotent(1, producer=8), leader_epoch=0)
        assert (crossed.base_offset, crossed.last_offset, crossed.duplicate) == (-1, 3, True), "the highest of all"

    async def test_an_old_duplicate_is_accepted_only_alone(self, node: SimNode) -> None:
        log = await open_log(node)
        for sequence in range(8):
            log.append(idempotent(sequence), leader_epoch=0)
        old = idempotent(0)
        for several in (old + batch(1), batch(1) + old, idempotent(0, producer=8) + old):
            with pytest.raises(InvalidRecordError, match="none is stored: producer 7: sequence 0 is older"):
                log.append(several, leader_epoch=0)
        with pytest.raises(DuplicateSequenceError):
            log.append(idempotent(0), leader_epoch=0)
        assert log.end_offset == 8

    async def test_append_time_is_returned_only_if_all_batches_have_it(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, timestamp_type=TimestampType.LOG_APPEND))
        first = log.append(idempotent(0), leader_epoch=0)
        assert first.append_time >= 0
        again = log.append(idempotent(0), leader_epoch=0)
        assert (again.duplicate, again.append_time) == (True, first.append_time)
        await asyncio.sleep(1)
        mixed = log.append(idempotent(0) + idempotent(0, producer=8), leader_epoch=0)
        assert (mixed.base_offset, mixed.append_time) == (0, -1), "one behind the other, of two times"

    @pytest.mark.requirement("a:D-73", "a:T-17")
    def test_producer_state_survives_stops_rolls_and_crashes(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            for sequence in range(30):
                log.append(idempotent(sequence, value=b"x" * 100), leader_epoch=0)
            await log.flush()

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            for sequence in range(25, 30):
                again = log.append(idempotent(sequence, value=b"x" * 100), leader_epoch=0)
                assert (again.duplicate, again.base_offset) == (True, sequence)
            await log.close()

        lab.run(write)
        lab.crash(Loss.ALL)
        for _ in range(2):
            lab.run(check)
            lab.kill()

    @pytest.mark.requirement("a:H-05", "a:H-21")
    async def test_transactions_hold_back_the_last_stable_offset_and_aborted_ones_are_listed(
        self, node: SimNode
    ) -> None:
        log = await open_log(node)
        log.append(batch(1), leader_epoch=0)
        log.append(idempotent(0, is_transactional=True, count=2), leader_epoch=0)
        log.append(idempotent(0, producer=8, is_transactional=True), leader_epoch=0)
        assert log.last_stable_offset(Offset(4)) == 1
        with pytest.raises(InvalidRecordError):
            log.append(marker(7, ControlKind.ABORT), leader_epoch=0)
        log.append(marker(7, ControlKind.ABORT), leader_epoch=0, is_coordinator=True)
        assert log.last_stable_offset(Offset(5)) == 3
        log.append(marker(8, ControlKind.COMMIT), leader_epoch=0, is_coordinator=True)
        assert log.last_stable_offset(Offset(6)) == 6
        (aborted,) = await log.aborted_transactions(0, 6)
        assert (aborted.producer_id, aborted.first_offset, aborted.last_offset) == (7, 1, 4)
        assert await log.aborted_transactions(5, 6) == []
        assert [read_header(data).base_offset for data in await read_all(log)] == [0, 1, 3, 4, 5], "aborted or not"

    async def test_a_coordinators_batch_is_stored_whatever_the_limits_of_its_topic_are(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, segment_bytes=200, message_bytes_max=100, cleanup_compact=True))
        data = batch(1, value=b"x" * 500)
        with pytest.raises(RecordTooLargeError):
            log.append(data, leader_epoch=0)
        assert log.append(data, leader_epoch=0, is_coordinator=True).last_offset == 0
        log.append(batch(1, value=b"y" * 500), leader_epoch=0, is_coordinator=True)
        await log.flush()
        log.validate()
        assert [len(stored) > 500 for stored in await read_all(log)] == [True, True]
        with pytest.raises(RecordTooLargeError):
            log.append(batch(1, value=b"x" * (1 << 20)), leader_epoch=0, is_coordinator=True)

    async def test_the_last_stable_offset_is_not_below_the_start(self, node: SimNode) -> None:
        log = await open_log(node)
        log.append(idempotent(0, is_transactional=True, count=3), leader_epoch=0)
        assert log.last_stable_offset(Offset(3)) == 0
        await log.advance_start(Offset(2))
        assert log.last_stable_offset(Offset(3)) == 2
        assert log.last_stable_offset(Offset(1)) == 1, "nor above the high watermark"
        log.append(marker(7, ControlKind.COMMIT), leader_epoch=0, is_coordinator=True)
        assert log.last_stable_offset(Offset(4)) == 4

    def test_a_lost_transaction_index_is_rebuilt(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            for at in range(20):
                log.append(idempotent(at, is_transactional=True, value=b"x" * 150), leader_epoch=0)
                kind = ControlKind.ABORT if at % 2 else ControlKind.COMMIT
                log.append(marker(7, kind), leader_epoch=0, is_coordinator=True)
            assert len(log.sealed_segments()) > 2
            await log.close()

        async def remove(node: SimNode) -> None:
            for name in node.disk().list(PATH):
                if name.endswith(".txnindex"):
                    node.disk().remove(f"{PATH}/{name}")

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            aborted = await log.aborted_transactions(0, log.end_offset)
            assert [entry.first_offset for entry in aborted] == list(range(2, 40, 4))

        lab.run(write)
        lab.again(remove)
        lab.kill()
        lab.run(check)


class TestReplicated:
    async def test_the_leaders_bytes_are_kept_as_they_are(self, node: SimNode) -> None:
        first = stamped(batch(2), base_offset=0, leader_epoch=3)
        second = stamped(batch(3), base_offset=2, leader_epoch=5)
        log = await open_log(node)
        appended = log.append_replicated(first + second)
        assert (appended.base_offset, appended.last_offset) == (0, 4)
        assert await read_all(log) == [first, second]
        assert list(log.epochs) == [(3, 0), (5, 2)]
        await log.wait_durable(4)

    @pytest.mark.case("T16")
    async def test_a_replicated_batch_that_does_not_begin_at_the_log_end_is_rejected(self, node: SimNode) -> None:
        log = await open_log(node)
        log.append_replicated(stamped(batch(2), base_offset=0, leader_epoch=3))
        for offset, epoch in ((0, 3), (1, 3), (3, 3), (2, 2)):
            with pytest.raises(InvalidRecordError):
                log.append_replicated(stamped(batch(2), base_offset=offset, leader_epoch=epoch))
        wrong = bytearray(stamped(batch(2), base_offset=2, leader_epoch=3))
        wrong[70] ^= 1
        with pytest.raises(CorruptBatchError):
            log.append_replicated(bytes(wrong))
        assert log.end_offset == 2

    def test_a_log_that_allows_gaps_takes_what_compaction_left_and_recovers_it(self, lab: Lab) -> None:
        sent = [
            stamped(batch(1), base_offset=0, leader_epoch=1),
            stamped(batch(2, last_offset_delta=6), base_offset=10, leader_epoch=1),
            stamped(batch(1), base_offset=40, leader_epoch=2),
        ]

        async def write(node: SimNode) -> None:
            log = await open_log(node)
            await log.allow_gaps()
            log.append_replicated(b"".join(sent))
            await log.wait_durable(40)

        async def check(node: SimNode) -> None:
            log = await open_log(node)
            assert log.end_offset == 41
            assert await read_all(log) == sent
            for offset, base in ((0, 0), (1, 10), (9, 10), (16, 10), (17, 40), (40, 40)):
                assert (await log.read(offset, bytes_max=1)).base_offset == base
            await log.truncate(20)
            log.validate()
            assert log.end_offset == 17
            assert await read_all(log) == sent[:2]

        lab.run(write)
        lab.crash(Loss.ALL)
        lab.run(check)


class TestRead:
    def test_a_read_gives_whole_batches_within_the_limit_but_at_least_one(self, lab: Lab) -> None:
        async def main(node: SimNode) -> None:
            log = await open_log(node, ONE_SEGMENT)
            for at in range(20):
                log.append(batch(2, value=bytes([at]) * 50), leader_epoch=0)
            size = len(await read_one(log, 0))
            assert len(split((await log.read(0, bytes_max=size)).data)) == 1
            assert len(split((await log.read(0, bytes_max=2 * size - 1)).data)) == 1
            assert len(split((await log.read(0, bytes_max=2 * size)).data)) == 2
            assert len(split((await log.read(0, bytes_max=1)).data)) == 1
            everything = await log.read(0, bytes_max=1 << 20)
            assert len(split(everything.data)) == 20
            assert everything.next_offset == 40

        async def read_one(log: Log, offset: int) -> bytes | memoryview:
            return (await log.read(offset, bytes_max=1)).data

        lab.run(main)

    async def test_a_read_from_inside_of_a_batch_begins_with_that_batch(self, node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(30):
            log.append(batch(3), leader_epoch=0)
        for offset in range(90):
            found = await log.read(offset, bytes_max=1)
            assert found.base_offset == offset - offset % 3
            assert found.next_offset == found.base_offset + 3

    async def test_a_read_ends_below_the_bound(self, node: SimNode) -> None:
        log = await open_log(node, ONE_SEGMENT)
        for _ in range(10):
            log.append(batch(3), leader_epoch=0)
        for end in range(0, 30, 3):
            found = await log.read(0, bytes_max=1 << 20, end=end)
            assert found.next_offset == end
            assert len(split(found.data)) == end // 3
        # A bound inside of a batch never shows the batch.
        assert (await log.read(0, bytes_max=1 << 20, end=7)).next_offset == 6
        assert (await log.read(6, bytes_max=1 << 20, end=7)).data == b""

    async def test_reads_outside_of_the_log_report_its_range(self, node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(5), leader_epoch=0)
        await log.advance_start(2)
        for offset in (-1, 1, 6):
            with pytest.raises(OffsetOutOfRangeError) as error:
                await log.read(offset, bytes_max=100)
            assert (error.value.start, error.value.end) == (2, 5)
        assert (await log.read(5, bytes_max=100)).data == b""
        assert (await log.read(2, bytes_max=100)).base_offset == 0

    async def test_cold_reads_return_the_same_batches(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        expected = []
        for at in range(60):
            data = batch(1, timestamp=1_000 + at, value=b"x" * 90)
            expected.append(stamped(data, base_offset=at, leader_epoch=0))
            log.append(data, leader_epoch=0)
        await log.checkpoint()
        lab.machine.disk().cold_read_probability = 0.7
        assert await read_all(log) == expected
        readers = [log.read(at, bytes_max=1) for at in range(60)]
        found = await asyncio.gather(*readers)
        assert [split(one.data) for one in found] == [[data] for data in expected]
        assert (await log.offset_for_timestamp(1_033)).offset == 33  # type: ignore[union-attr]
        assert log.context.files.open_count <= log.context.files.open_max
        log.context.files.validate()

    @pytest.mark.case("T15")
    def test_reads_across_a_restart_skip_nothing(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            for _ in range(25):
                log.append(batch(1, value=b"x" * 100), leader_epoch=0)
            await log.flush()

        async def more(node: SimNode) -> list[int]:
            log = await open_log(node)
            for _ in range(25):
                log.append(batch(1, value=b"x" * 100), leader_epoch=0)
            return [read_header(data).base_offset for data in await read_all(log)]

        lab.run(write)
        lab.kill()
        assert lab.run(more) == list(range(50))

    @pytest.mark.requirement("a:A-72", "a:E-19")
    async def test_the_first_record_at_or_after_a_timestamp_is_found_by_record(self, node: SimNode) -> None:
        log = await open_log(node)
        timestamps: list[int] = []
        for at in range(40):
            # Ascending overall, but neither within a batch nor from batch to batch.
            some = [10_000 + 100 * at, 10_000 + 100 * at - 250, 10_000 + 100 * at + 40]
            data = encode([Record(n, t, b"k", b"v" * 20, ()) for n, t in enumerate(some)])
            log.append(data, leader_epoch=0)
            timestamps += some
        for sought in range(9_000, 14_200, 33):
            found = await log.offset_for_timestamp(sought)
            expected = next((n for n, t in enumerate(timestamps) if t >= sought), None)
            assert (found.offset if found else None) == expected
            if found and expected is not None:
                assert found.timestamp == timestamps[expected]
        largest = await log.offset_of_largest_timestamp()
        assert largest is not None
        assert (largest.offset, largest.timestamp) == (119, max(timestamps))
        assert await log.offset_for_timestamp(13_900, end=100) is None
        await log.advance_start(61)
        first = await log.offset_for_timestamp(0)
        assert first is not None
        assert first.offset == 61


class TestSegments:
    @pytest.mark.requirement("a:A-60", "a:A-61", "a:A-62", "a:A-74", "b:B-22", "b:B-25")
    async def test_a_log_is_a_row_of_segments_each_with_its_files(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(40):
            log.append(batch(1, value=b"x" * 100), leader_epoch=0)
        await log.checkpoint()
        sealed = log.sealed_segments()
        assert len(sealed) >= 3
        names = set(node.disk().list(PATH))
        for info in sealed:
            assert info.size <= 1500
            assert {f"{info.base_offset:020d}{suffix}" for suffix in (LOG, INDEX, TIME_INDEX)} <= names
            assert node.disk().size(f"{PATH}/{info.base_offset:020d}.log") == info.size
        assert log.size == sum(size for name, size in lab.machine.disk().files() if name.endswith(LOG))
        assert node.disk().list("") == [PATH], "nothing of it is elsewhere"

    async def test_a_segment_rolls_by_time_without_an_append_too(self, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, segment_ms=5_000))
        log.append(batch(1, timestamp=node.clock.now_ms()), leader_epoch=0)
        assert not log.roll_if_due()
        await asyncio.sleep(6)
        assert log.roll_if_due()
        assert [info.next_offset for info in log.sealed_segments()] == [1]
        assert not log.roll_if_due()

    @pytest.mark.requirement("a:A-71")
    async def test_the_written_indexes_point_at_the_batches_that_they_name(self, lab: Lab, node: SimNode) -> None:
        from tidelog.log.index import decode_offset_entries, decode_time_entries

        log = await open_log(node)
        for at in range(40):
            log.append(batch(1, timestamp=1_000 + at, value=b"x" * 100), leader_epoch=0)
        await log.close()
        device = lab.machine.disk()
        entries = 0
        for info in log.sealed_segments():
            data = device.raw(f"{PATH}/{info.base_offset:020d}.log")
            index = device.raw(f"{PATH}/{info.base_offset:020d}.index")
            for entry in decode_offset_entries(index, base_offset=info.base_offset):
                assert read_header(data, entry.position).last_offset == entry.last_offset
                entries += 1
            times = decode_time_entries(
                device.raw(f"{PATH}/{info.base_offset:020d}.timeindex"), base_offset=info.base_offset
            )
            assert times[-1].timestamp == info.largest_timestamp
            assert all(time.timestamp == 1_000 + time.last_offset for time in times)
        assert entries > 6
