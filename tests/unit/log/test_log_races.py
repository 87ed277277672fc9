"""Concurrent and stale state around changes of files: scrubs, reads, suspect offsets, corrupt snapshots."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from support.logs.single_log import LOG_ID, ONE_SEGMENT, PATH, SMALL, Lab, batch, open_log, read_all

from tidelog.log import housekeeping
from tidelog.log import stored_state as stored
from tidelog.log.batch import ControlKind, encode_control
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.config import LogConfig
from tidelog.log.damage import Damage
from tidelog.log.log import Log, Slice
from tidelog.log.read_plans import read_steps
from tidelog.log.segment import DELETED, LOG, TRANSACTION_INDEX, file_path
from tidelog.log.stored_state import key_prefix, producers_key
from tidelog.model.errors import CorruptBatchError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.simulated import Latency, SimNode

PREFIX = key_prefix(LOG_ID)
COMPACTED = LogConfig(
    segment_bytes=3_000, index_interval_bytes=200, cleanup_compact=True, min_cleanable_dirty_ratio=0.0
)


def fill(log: Log, count: int, *, epoch: int = 1) -> None:
    for _ in range(count):
        log.append(batch(1, value=b"v" * 100), leader_epoch=epoch)


async def drop_first(log: Log) -> None:
    await log.advance_start(log.sealed_segments()[0].next_offset)


async def cut_into_first(log: Log) -> None:
    await log.truncate(1)
    fill(log, 40, epoch=2)
    await log.checkpoint()


async def swap(log: Log) -> None:
    plan = housekeeping.plan(log, bound=log.end_offset)
    assert plan is not None
    assert await housekeeping.clean(log, plan, CleanerLimits()) is not None


class TestScrub:
    @pytest.mark.parametrize("change", [drop_first, cut_into_first, swap])
    def test_a_segment_that_changes_while_it_is_checked_does_not_damage_the_log(
        self, lab: Lab, change: Callable[[Log], Awaitable[None]]
    ) -> None:
        async def main(node: SimNode) -> None:
            log = await open_log(node, COMPACTED if change is swap else SMALL)
            fill(log, 40)
            await log.checkpoint()
            before, brief = log.segments.sealed[0], node.work.latency
            node.work.latency = Latency(60.0, 60.0)
            checking = asyncio.create_task(log.scrub(0))
            await asyncio.sleep(0)
            node.work.latency = brief
            await change(log)
            assert not checking.done()
            assert before not in log.segments.sealed
            assert (await checking).fault is None
            assert log.damaged is None
            log.validate()
            fill(log, 1, epoch=2)
            await log.close()

        async def again(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is None
            assert log.report.clean

        lab.run(main)
        lab.kill()
        lab.run(again)

    async def test_rot_in_a_remaining_segment_damages_the_log(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 40)
        await log.checkpoint()
        rotten, brief = log.segments.sealed[1], node.work.latency
        lab.machine.disk().flip_bit(file_path(PATH, rotten.base_offset, LOG), rotten.size - 5)
        node.work.latency = Latency(60.0, 60.0)
        checking = asyncio.create_task(log.scrub(rotten.base_offset))
        await asyncio.sleep(0)
        node.work.latency = brief
        await drop_first(log)
        assert (await checking).fault is not None
        assert log.damaged is not None

    async def test_rot_before_the_good_end_does_not_prevent_a_repair(self, lab: Lab, node: SimNode) -> None:
        """Seed 301073 of the brokers: a reader found rot past the batch whose header was unreadable."""
        log = await open_log(node, replace(ONE_SEGMENT, index_interval_bytes=1 << 20))
        fill(log, 10)
        await log.checkpoint()
        size = log.segments.active.size // 10
        lab.machine.disk().flip_bit(file_path(PATH, 0, LOG), 4 * size + 23)  # the last offset of the fifth batch
        await log.mark_damaged(Damage(Offset(9), "a batch cannot be read"))
        await log.repair()
        assert log.damaged is None
        assert log.end_offset == 4
        fill(log, 3)
        await log.flush()
        assert len(await read_all(log)) == 7


class TestRepairedDamage:
    """A repair clears what made a log suspect; it must not truncate records acknowledged later."""

    @staticmethod
    def _write_with(lab: Lab, name: bytes, value: bytes, damage: int | None) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            fill(log, 10)
            await log.checkpoint()
            writes: stored.Writes = {PREFIX + name: value}
            if damage is not None:
                writes[PREFIX + stored.DAMAGE] = stored.encode_damage(damage, "rot")
            await log.store.commit(writes)

        lab.run(write)
        lab.kill()

    @pytest.mark.parametrize("is_reset", [False, True])
    def test_a_suspect_offset_does_not_outlive_the_repair(self, lab: Lab, is_reset: bool) -> None:
        self._write_with(lab, stored.SUSPECT, stored.encode_number("suspect", 10), damage=5)

        async def repair(node: SimNode) -> int:
            log = await open_log(node)
            assert log.damaged is not None
            await (log.reset_to(5) if is_reset else log.repair())
            assert log.end_offset == 5
            fill(log, 20, epoch=2)
            await log.checkpoint()
            fill(log, 1, epoch=2)
            await log.wait_durable(log.end_offset - 1)
            return log.end_offset

        async def look(node: SimNode) -> tuple[int, bool]:
            log = await open_log(node)
            return log.end_offset, log.damaged is None

        end = lab.run(repair)
        lab.crash()
        assert lab.run(look) == (end, True)

    @pytest.mark.parametrize("name", [stored.SUSPECT, stored.INTENT])
    def test_an_unreadable_suspect_field_damages_the_log_once(self, lab: Lab, name: bytes) -> None:
        self._write_with(lab, name, b"rot", damage=None)

        async def repair(node: SimNode) -> int:
            log = await open_log(node)
            assert log.damaged is not None
            await log.repair()
            fill(log, 12, epoch=2)
            await log.wait_durable(log.end_offset - 1)
            return log.end_offset

        async def look(node: SimNode) -> tuple[int, bool, int]:
            log = await open_log(node)
            return log.end_offset, log.damaged is None, len(await read_all(log))

        end = lab.run(repair)
        lab.crash()
        assert lab.run(look) == (end, True, end)

    def test_a_truncation_after_a_failed_sync_keeps_the_suspect_offset(self, lab: Lab) -> None:
        async def main(node: SimNode) -> None:
            log = await open_log(node)
            fill(log, 10)
            await log.checkpoint()
            fill(log, 2)
            lab.machine.disk().fail("sync")
            with pytest.raises(StorageError):
                await log.flush()
            assert log.damage_state.suspect_task is not None
            await log.damage_state.suspect_task
            with pytest.raises(StorageError):
                await log.truncate(8)
            assert log.store.get(PREFIX + stored.SUSPECT) == stored.encode_number("suspect", 10)

        async def look(node: SimNode) -> None:
            log = await open_log(node)
            assert (log.end_offset, log.damaged) == (8, None)
            assert log.store.get(PREFIX + stored.SUSPECT) is None

        lab.run(main)
        lab.kill()
        lab.run(look)


class TestHints:
    async def test_a_read_during_a_truncation_leaves_no_hint(self, node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(6):
            log.append(batch(), leader_epoch=1)
        await log.flush()
        first = await log.read(0, bytes_max=1)
        await self._read_across(log, 0, 3 * len(first.data), log.truncate(1))
        for at in range(8):
            log.append(batch(value=b"a longer value %d" % at), leader_epoch=2)
        for offset in reversed(range(log.end_offset)):  # forwards, each read would use the hint of the one before
            assert (await log.read(offset, bytes_max=1)).base_offset == offset

    async def test_a_read_during_a_swap_leaves_no_hint(self, node: SimNode) -> None:
        log = await open_log(node, COMPACTED)
        keys = [b"dup", b"dup", b"dup", *(b"k%02d" % at for at in range(9))]
        for key in keys:
            log.append(batch(key=key), leader_epoch=1)
        log.roll()
        log.append(batch(key=b"dup"), leader_epoch=1)
        log.roll()
        log.append(batch(key=b"zzz"), leader_epoch=1)
        await log.checkpoint()
        size = len((await log.read(0, bytes_max=1)).data)
        log.segments.forget_hints()
        await self._read_across(log, 0, 6 * size, swap(log))
        for offset in reversed(range(3, 12)):
            assert (await log.read(offset, bytes_max=1)).base_offset == offset

    async def test_a_wrong_hint_is_used_once(self, node: SimNode) -> None:
        log = await open_log(node)
        for _ in range(6):
            log.append(batch(), leader_epoch=1)
        log.segments.remember(3, 0, 7, log.segments.version)
        with pytest.raises(CorruptBatchError):
            await log.read(3, bytes_max=1)
        assert (await log.read(3, bytes_max=1)).base_offset == 3

    @staticmethod
    async def _read_across(log: Log, offset: int, bytes_max: int, change: Awaitable[None]) -> None:
        """A read whose bytes arrive after the change."""
        steps = read_steps(log.segments, log.config, offset, bytes_max, log.end_offset)
        file, position, length = next(steps)
        data = file.read(position, length)
        await change
        with pytest.raises(StopIteration) as done:
            steps.send(data)
        found: Slice = done.value.value
        assert found.next_offset > offset


class TestRottenSnapshots:
    @pytest.mark.parametrize("is_sealed", [False, True])
    @pytest.mark.parametrize("passes_crc", [False, True])
    async def test_a_truncation_replays_from_an_older_snapshot(
        self, lab: Lab, node: SimNode, is_sealed: bool, passes_crc: bool
    ) -> None:
        log = await open_log(node)

        def produce(sequence: int) -> None:
            data = batch(1, producer_id=9, producer_epoch=0, base_sequence=sequence, value=b"v" * 100)
            log.append(data, leader_epoch=1)

        for sequence in range(43):
            produce(sequence)
        await log.checkpoint()
        at = log.segments.sealed[-1].base_offset if is_sealed else log.mark.offset
        assert at in log.snapshots
        if passes_crc:
            await log.store.commit({producers_key(log.prefix, at): b"rotten"})
        else:
            lab.machine.store().flip_bit(producers_key(log.prefix, at), 3)
        if not is_sealed:
            produce(43)
            assert log.segments.active.base_offset == log.mark.base_offset
        end = at + 1 if is_sealed else at
        await log.truncate(end)
        log.validate()
        assert log.end_offset == end
        assert log.append(
            batch(1, producer_id=9, producer_epoch=0, base_sequence=end - 1, value=b"v" * 100), leader_epoch=1
        ).duplicate
        produce(end)
        assert log.end_offset == end + 1

    async def test_a_transaction_index_is_rebuilt_from_an_older_snapshot(self, node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 20)
        log.roll()
        data = batch(1, producer_id=9, producer_epoch=0, base_sequence=0, is_transactional=True)
        log.append(data, leader_epoch=1)
        abort = encode_control(ControlKind.ABORT, coordinator_epoch=1, timestamp=1_000, producer_id=9, producer_epoch=0)
        log.append(abort, leader_epoch=1, is_coordinator=True)
        log.roll()
        await log.checkpoint()
        base = log.segments.sealed[-1].base_offset
        expected = await log.aborted_transactions(0, log.end_offset)
        assert len(expected) == 1
        await log.store.commit({producers_key(log.prefix, base): b"rotten"})
        log.context.files.discard(file_path(PATH, base, TRANSACTION_INDEX))
        log.disk.remove(file_path(PATH, base, TRANSACTION_INDEX))
        assert await log.aborted_transactions(0, log.end_offset) == expected


class TestReap:
    async def test_files_that_could_not_be_removed_are_removed_the_next_time(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node, replace(SMALL, file_delete_delay_ms=0))
        fill(log, 40)
        await log.checkpoint()
        await drop_first(log)
        late = node.clock.now_ms() + 1
        lab.machine.disk().fail("remove")
        with pytest.raises(StorageError):
            await log.remove_deleted(late)
        assert await log.remove_deleted(late) > 0
        assert not [name for name in node.disk().list(PATH) if name.endswith(DELETED)]
        assert await log.remove_deleted(late) == 0
