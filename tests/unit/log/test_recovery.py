"""Opening a log: its cost, truncation of torn tails, and damage."""

from dataclasses import replace

import pytest
from support.logs.single_log import (
    PATH,
    PREFIX,
    SMALL,
    Lab,
    batch,
    fill,
    open_log,
    read_all,
    segment,
    split,
    stamped,
    synced,
)

from tidelog.log import stored_state as stored
from tidelog.log.batch import read_header
from tidelog.log.config import FlushMode
from tidelog.log.log import Log
from tidelog.log.segment import INDEX, LOG, TIME_INDEX
from tidelog.model.errors import DamagedLogError
from tidelog.world.simulated import Loss, SimNode


class TestAfterACleanStop:
    @pytest.mark.requirement("b:B-10")
    def test_opening_after_a_clean_stop_reads_no_segment(self, lab: Lab) -> None:
        async def write(node: SimNode) -> list[bytes]:
            log = await open_log(node)
            expected = fill(log, 60)
            await log.close()
            return expected

        async def read(node: SimNode) -> tuple[Log, list[bytes]]:
            log = await open_log(node)
            assert log.report.clean
            assert log.report.bytes_read == 0
            assert log.context.files.open_count == 0
            assert len(log.sealed_segments()) > 3
            return log, await read_all(log)

        expected = lab.run(write)
        lab.crash(Loss.ALL)
        log, found = lab.run(read)
        assert found == expected
        assert log.durable_end == log.end_offset == log.recovery_point == 60

    def test_the_mark_of_the_clean_stop_is_gone_before_the_first_write(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            fill(log, 5)
            await log.close()

        async def reopen(node: SimNode) -> None:
            await open_log(node)
            assert node.store().get(PREFIX + stored.CLEAN) is None

        lab.run(write)
        lab.kill()
        lab.run(reopen)
        lab.kill()

        async def again(node: SimNode) -> bool:
            return (await open_log(node)).report.clean

        assert not lab.run(again)

    @pytest.mark.requirement("a:A-73", "a:T-21", "a:X3-40")
    @pytest.mark.parametrize("is_deleted", [True, False])
    def test_index_files_may_be_deleted_or_overwritten_while_it_is_stopped(self, lab: Lab, is_deleted: bool) -> None:
        async def write(node: SimNode) -> list[bytes]:
            log = await open_log(node)
            expected = fill(log, 60)
            await log.close()
            return expected

        expected = lab.run(write)
        lab.kill()
        device = lab.machine.disk()
        indexes = [name for name, _ in device.files() if name.endswith((INDEX, TIME_INDEX))]
        assert len(indexes) > 6
        for name in indexes:
            if is_deleted:
                device.cut(name, 0)
            else:
                device.overwrite(name, 0, b"\x00\x00\x00\x03\x00\x00\x00\x11" * 8)

        async def read(node: SimNode) -> None:
            log = await open_log(node)
            assert await read_all(log) == expected
            for offset in range(59, -1, -1):
                found = await log.read(offset, bytes_max=1)
                assert split(found.data) == [expected[offset]]
                at = await log.offset_for_timestamp(1_000 + offset)
                assert at is not None
                assert at.offset == offset
            log.validate()

        lab.run(read)

    def test_an_index_that_was_removed_while_it_was_stopped_is_there_again(self, lab: Lab) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            fill(log, 60)
            await log.close()

        async def remove(node: SimNode) -> None:
            for name in node.disk().list(PATH):
                if name.endswith((INDEX, TIME_INDEX)):
                    node.disk().remove(f"{PATH}/{name}")

        async def read(node: SimNode) -> None:
            log = await open_log(node)
            await read_all(log)
            for info in log.sealed_segments():
                await log.read(info.next_offset - 1, bytes_max=1)
                assert node.disk().exists(segment(info.base_offset, INDEX))
            assert log.report.rebuilt == (f"index {log.segments.active.base_offset}",)

        lab.run(write)
        lab.again(remove)
        lab.kill()
        lab.run(read)


class TestAfterACrash:
    @pytest.mark.requirement("a:T-22", "a:X3-41", "b:B-09", "b:D-23")
    def test_recovery_reads_only_past_the_recovery_point(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 50, then=3))
        lab.crash(Loss.ALL)

        async def read(node: SimNode) -> Log:
            log = await open_log(node)
            assert await read_all(log) == expected
            return log

        log = lab.run(read)
        assert log.report.recovery_point == 50
        assert log.report.batches_scanned == 3
        assert log.report.bytes_read == sum(map(len, expected[50:]))
        assert log.report.bytes_truncated == 0
        assert log.durable_end == log.recovery_point == 53

    def test_several_segments_past_the_recovery_point_are_recovered_with_their_indexes(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 5, then=40))
        lab.kill()

        async def read(node: SimNode) -> None:
            log = await open_log(node)
            assert await read_all(log) == expected
            assert len(log.sealed_segments()) >= 4
            for info in log.sealed_segments():
                result = await log.scrub(info.base_offset)
                assert result.fault is None
                assert result.crc == info.crc
            found = await log.offset_for_timestamp(1_033)
            assert found is not None
            assert found.offset == 33

        lab.run(read)

    @pytest.mark.parametrize("cut", [1, 30, 61, 100])
    def test_a_torn_tail_is_truncated_to_the_last_good_batch_and_reported(self, lab: Lab, cut: int) -> None:
        expected = lab.run(lambda node: synced(node, 3, then=4))
        lab.kill()
        device = lab.machine.disk()
        size = len(device.raw(segment(0)))
        device.cut(segment(0), size - cut)

        async def read(node: SimNode) -> Log:
            log = await open_log(node)
            assert log.damaged is None
            assert await read_all(log) == expected[:-1]
            return log

        log = lab.run(read)
        assert log.report.bytes_truncated == len(expected[-1]) - cut
        assert log.report.fault is not None
        assert log.end_offset == log.durable_end == 6

    def test_a_corrupt_batch_past_the_recovery_point_truncates_everything_after_it(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 3, then=40))
        lab.kill()
        position = sum(map(len, expected[:4])) + 80
        lab.machine.disk().flip_bit(segment(0), position)

        async def read(node: SimNode) -> Log:
            log = await open_log(node)
            assert await read_all(log) == expected[:4]
            return log

        log = lab.run(read)
        assert log.report.bytes_truncated == sum(map(len, expected[4:]))
        assert "CRC" in (log.report.fault or "")
        assert log.sealed_segments() == []

    def test_zeros_at_the_end_of_the_file_are_truncated(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 3, then=1))

        async def extend(node: SimNode) -> None:
            node.disk().open(segment(0)).append(bytes(5000))

        lab.kill()
        lab.run(extend)
        lab.kill()

        async def read(node: SimNode) -> Log:
            log = await open_log(node)
            assert await read_all(log) == expected
            return log

        assert lab.run(read).report.bytes_truncated == 5000

    def test_a_batch_of_an_older_epoch_after_a_newer_one_is_truncated(self, lab: Lab) -> None:
        async def write(node: SimNode) -> list[bytes]:
            log = await open_log(node)
            expected = fill(log, 3, epoch=5)
            await log.flush()
            remnant = stamped(batch(1), base_offset=3, leader_epoch=4)
            node.disk().open(segment(0)).append(remnant)
            return expected

        expected = lab.run(write)
        lab.kill()

        async def read(node: SimNode) -> None:
            log = await open_log(node)
            assert await read_all(log) == expected
            assert "epoch 4 after epoch 5" in (log.report.fault or "")

        lab.run(read)

    def test_the_durable_end_starts_at_what_recovery_has_synced(self, lab: Lab) -> None:
        """A killed process leaves unsynced bytes in the page cache: recovery keeps them and must sync them."""

        async def write(node: SimNode) -> None:
            log = await open_log(node, replace(SMALL, flush_mode=FlushMode.PAGE_CACHE))
            fill(log, 4)
            assert log.durable_end == 0

        async def reopen(node: SimNode) -> None:
            log = await open_log(node)
            assert log.end_offset == log.durable_end == 4

        lab.run(write)
        lab.kill()
        lab.run(reopen)
        lab.crash(Loss.ALL)
        lab.run(reopen)

    def test_recovery_itself_may_crash_at_any_point(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 5, then=30))
        lab.kill()
        device = lab.machine.disk()

        async def read(node: SimNode) -> list[bytes]:
            return await read_all(await open_log(node))

        for operation in range(1, 200):
            lab.machine.crash_loss = Loss.SOME
            device.crash_at_operation = device.operations + operation
            node = lab.machine.boot()
            task = node.spawn(read(node))
            lab.world.run_until(lambda task=task, node=node: task.done() or not node.is_alive)  # type: ignore[misc]
            if node.is_alive:
                device.crash_at_operation = None
                assert task.result() == expected
                break
        else:
            raise AssertionError("recovery never ended")


class TestDamage:
    """Records below the recovery point are never truncated silently."""

    def check_damaged(self, lab: Lab, expected: list[bytes], good_end: int, *, verify: bool = False) -> None:
        device = lab.machine.disk()
        before = {name: device.raw(name) for name, _ in device.files() if name.endswith(LOG)}

        async def look(node: SimNode) -> None:
            log = await open_log(node, verify=verify)
            assert log.damaged is not None
            assert log.damaged.good_end == log.end_offset == good_end
            assert await read_all(log) == expected[:good_end]
            with pytest.raises(DamagedLogError) as refused:
                log.append(batch(1), leader_epoch=9)
            assert refused.value.good_end == good_end
            await log.checkpoint()
            await log.close()

        for _ in range(2):
            lab.run(look)
            lab.kill()
        assert {name: device.raw(name) for name, _ in device.files() if name.endswith(LOG)} == before

        async def repair(node: SimNode) -> None:
            log = await open_log(node, verify=verify)
            await log.repair()
            log.validate()
            assert log.damaged is None
            assert log.end_offset == log.recovery_point == good_end
            assert await read_all(log) == expected[:good_end]
            fill(log, 5, epoch=9)
            await log.flush()

        lab.run(repair)
        lab.crash(Loss.ALL)

        async def after(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is None
            found = await read_all(log)
            assert found[:good_end] == expected[:good_end]
            assert len(found) == good_end + 5

        lab.run(after)

    def test_a_log_that_ends_below_its_recovery_point_is_damaged(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 7))
        lab.kill()
        device = lab.machine.disk()
        device.cut(segment(0), sum(map(len, expected[:5])) + 17)
        self.check_damaged(lab, expected, 5)

    def test_a_log_that_ends_below_its_recovery_point_after_a_clean_stop_is_damaged(self, lab: Lab) -> None:
        async def write(node: SimNode) -> list[bytes]:
            log = await open_log(node)
            expected = fill(log, 6)
            await log.close()
            return expected

        expected = lab.run(write)
        lab.kill()
        lab.machine.disk().cut(segment(0), sum(map(len, expected[:2])))
        self.check_damaged(lab, expected, 2)

    def test_a_sealed_segment_of_another_size_damages_the_log(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 40))
        lab.kill()
        device = lab.machine.disk()
        second = read_header(device.raw(sorted(n for n, _ in device.files() if n.endswith(LOG))[1])).base_offset
        name = segment(second)
        device.cut(name, len(device.raw(name)) - 10)
        end = second + len(device.raw(name)) // len(expected[second])
        self.check_damaged(lab, expected, end)

    def test_a_missing_sealed_segment_damages_the_log(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 40))
        names = sorted(name for name, _ in lab.machine.disk().files() if name.endswith(LOG))
        base = int(names[2][-24:-4])

        async def remove(node: SimNode) -> None:
            node.disk().remove(names[2])

        lab.again(remove)
        lab.kill()
        self.check_damaged(lab, expected, base)

    def test_a_missing_first_segment_damages_the_log(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 40))

        async def remove(node: SimNode) -> None:
            node.disk().remove(segment(0))

        lab.again(remove)
        lab.kill()
        self.check_damaged(lab, expected, 0)

    @pytest.mark.parametrize("at", [3, 30])
    def test_rot_below_the_recovery_point_is_found_by_a_verifying_open(self, lab: Lab, at: int) -> None:
        """One in a sealed segment, one in the active one."""
        expected = lab.run(lambda node: synced(node, 36))
        lab.kill()
        device = lab.machine.disk()
        names = sorted(name for name, _ in device.files() if name.endswith(LOG))
        base = max(int(name[-24:-4]) for name in names if int(name[-24:-4]) <= at)
        device.flip_bit(segment(base), (at - base) * len(expected[at]) + 90)
        self.check_damaged(lab, expected, at, verify=True)

    @pytest.mark.requirement("a:A-73")
    def test_rot_in_a_sealed_segment_is_found_by_the_scrub_also_outside_of_batch_crcs(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 40))
        base = int(sorted(n for n, _ in lab.machine.disk().files() if n.endswith(LOG))[1][-24:-4])
        # The leader epoch of a batch in the middle is not under its CRC. A higher one makes the next look misplaced.
        lab.machine.disk().flip_bit(segment(base), len(expected[base]) * 2 + 15, bit=6)
        lab.kill()

        async def scrub(node: SimNode) -> None:
            log = await open_log(node)
            before = log.damaged
            assert before is None
            for info in log.sealed_segments():
                result = await log.scrub(info.base_offset)
                assert (result.fault is not None) == (info.base_offset == base)
            assert log.damaged is not None
            assert log.damaged.good_end == base
            with pytest.raises(DamagedLogError):
                await log.read(base + 3, bytes_max=100)
            assert split((await log.read(base - 1, bytes_max=1)).data) == [expected[base - 1]]

        lab.run(scrub)
        lab.kill()
        self.check_damaged(lab, expected, base)

    def test_a_lost_recovery_point_makes_the_log_damaged_at_its_end(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 20))
        lab.kill()
        lab.machine.store().flip_bit(PREFIX + stored.MARK, 9)
        self.check_damaged(lab, expected, 20)


@pytest.mark.parametrize("loss", list(Loss))
def test_a_new_log_whose_directory_was_never_synced_is_created_again(lab: Lab, loss: Loss) -> None:
    async def write(node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, flush_mode=FlushMode.PAGE_CACHE))
        fill(log, 3)

    async def look(node: SimNode) -> None:
        log = await open_log(node)
        assert log.damaged is None
        assert log.start_offset == 0
        fill(log, 2)
        await log.flush()

    lab.run(write)
    lab.crash(loss)
    lab.run(look)


def test_files_of_a_change_that_was_not_decided_are_removed(lab: Lab) -> None:
    expected = lab.run(lambda node: synced(node, 20))

    async def litter(node: SimNode) -> None:
        for name in (
            "00000000000000000000.log.cleaned",
            "00000000000000000000.index.swap",
            "00000000000000000000.log.deleted",
            "keys.cleaned",
            "00000000000000009999.index",
        ):
            node.disk().open(f"{PATH}/{name}", create=True).append(b"rubbish")

    lab.again(litter)
    lab.kill()

    async def look(node: SimNode) -> None:
        log = await open_log(node)
        assert await read_all(log) == expected
        assert log.report.files_removed == 5
        assert all(name.endswith((LOG, INDEX, TIME_INDEX)) for name in node.disk().list(PATH))

    lab.run(look)
