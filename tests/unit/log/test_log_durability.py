"""When a log reports records as durable, what an idle log holds, and what deletion leaves."""

import asyncio
import gc
import tracemalloc
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from support.logs.single_log import ONE_SEGMENT, PAGE_CACHE, PATH, Lab, batch, open_log, read_all, segment

from tidelog.log.config import LogConfig
from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.log import Log
from tidelog.model.errors import (
    StorageError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork
from tidelog.world.simulated import Latency, Loss, SimNode


async def whole_end(node: SimNode) -> int:
    """The end of a sound log."""
    log = await open_log(node)
    assert log.damaged is None
    return log.end_offset


class TestDurability:
    async def test_a_waiter_resolves_when_its_record_is_on_the_device(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        device = lab.machine.disk()
        device.sync_latency = Latency(1.0, 1.0)
        first = log.append(batch(2), leader_epoch=0)
        waiter = log.wait_durable(first.last_offset)
        await asyncio.sleep(0.5)
        late = log.wait_durable(log.append(batch(1), leader_epoch=0).last_offset)
        await waiter
        assert log.durable_end == 2
        assert not late.done()
        await late
        assert log.durable_end == 3
        assert log.wait_durable(1).done()

    @pytest.mark.parametrize("is_reset", [False, True])
    async def test_a_sync_from_before_a_truncation_confirms_no_later_write(
        self, lab: Lab, node: SimNode, is_reset: bool
    ) -> None:
        """The sync covers offsets 0 to 9 of the old records; the new ones take the same offsets."""
        log = await open_log(node)
        lab.machine.disk().sync_latency = Latency(1.0, 1.0)
        for _ in range(10):
            log.append(batch(1), leader_epoch=0)
        await asyncio.sleep(0.2)
        assert log.group_commit.group_began is not None, "a sync is under way"
        await (log.reset_to(0) if is_reset else log.truncate(5))
        kept = log.end_offset
        assert kept == (0 if is_reset else 5)
        assert log.durable_end == kept
        last = [log.append(batch(1), leader_epoch=1).last_offset for _ in range(5)][-1]
        late = log.wait_durable(last)
        assert not late.done(), "no sync has begun since"
        log.validate()
        await late
        assert log.durable_end == kept + 5

    def test_a_blank_log_needs_no_sync_and_survives_the_loss_of_its_name(self, lab: Lab) -> None:
        async def begin(node: SimNode) -> None:
            log = await open_log(node)
            log.assign_epoch(3)
            await log.checkpoint()
            assert not log.has_news
            assert log.group_commit.groups == lab.machine.disk().syncs == 0

        lab.run(begin)
        lab.crash()

        async def go_on(node: SimNode) -> int:
            assert not node.disk().exists(PATH)
            log = await open_log(node)
            assert log.damaged is None
            assert log.epochs.latest == 3
            last = log.append(batch(2), leader_epoch=3).last_offset
            await log.wait_durable(last)
            return last + 1

        end = lab.run(go_on)
        lab.crash()

        assert lab.run(whole_end) == end

    @pytest.mark.parametrize("is_closed", [True, False])
    def test_the_name_of_a_blank_log_that_was_opened_again_is_synced_with_its_first_records(
        self, lab: Lab, is_closed: bool
    ) -> None:
        """The directory entry of the previous process was never synced, although it is visible."""

        async def begin(node: SimNode) -> None:
            log = await open_log(node)
            if is_closed:
                await log.close()

        async def go_on(node: SimNode) -> int:
            assert node.disk().exists(PATH)
            log = await open_log(node)
            last = log.append(batch(2), leader_epoch=0).last_offset
            await log.wait_durable(last)
            return last + 1

        lab.run(begin)
        lab.kill()
        end = lab.run(go_on)
        lab.crash()

        assert lab.run(whole_end) == end

    def test_the_directory_of_a_log_whose_first_sync_failed_is_created_again(self, lab: Lab) -> None:
        """What a failed sync should have written is never written later, although it is visible; names too."""

        async def begin(node: SimNode) -> None:
            log = await open_log(node)
            log.append(batch(1), leader_epoch=0)
            lab.machine.disk().fail("sync")
            with pytest.raises(StorageError):
                await log.flush()
            assert log.damage_state.suspect_task is not None
            await log.damage_state.suspect_task

        async def go_on(node: SimNode) -> int:
            log = await open_log(node)
            assert log.end_offset == 0
            last = log.append(batch(2), leader_epoch=0).last_offset
            await log.wait_durable(last)
            return last + 1

        lab.run(begin)
        lab.kill()
        lab.machine.disk().heal()
        end = lab.run(go_on)
        lab.crash()

        assert lab.run(whole_end) == end

    async def test_all_waiting_appends_share_a_sync(self, node: SimNode) -> None:
        log = await open_log(node, ONE_SEGMENT)
        waiters = [log.wait_durable(log.append(batch(1), leader_epoch=0).last_offset) for _ in range(64)]
        await asyncio.gather(*waiters)
        assert log.group_commit.groups <= 2

    @pytest.mark.parametrize("loss", list(Loss))
    def test_confirmed_records_survive_a_power_loss_across_a_roll(self, lab: Lab, loss: Loss) -> None:
        async def write(node: SimNode) -> int:
            log = await open_log(node)
            for _ in range(30):
                last = log.append(batch(1, value=b"x" * 100), leader_epoch=0).last_offset
            await log.wait_durable(last)
            return last + 1

        end = lab.run(write)
        lab.crash(loss)

        async def check(node: SimNode) -> int:
            log = await open_log(node)
            return len(await read_all(log))

        assert lab.run(check) == end

    @pytest.mark.requirement("a:A-75", "b:B-13")
    async def test_a_page_cache_append_is_durable_once_written(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node, replace(PAGE_CACHE, segment_bytes=100_000))
        assert log.wait_durable(log.append(batch(3), leader_epoch=0).last_offset).done()
        assert node.disk().size(segment(0)) == log.size > 0, "in the file, not in a cache of ours"
        await asyncio.sleep(5)
        await log.checkpoint()
        assert log.durable_end == 0
        assert lab.machine.disk().syncs == 0
        await asyncio.sleep(40)
        await log.checkpoint()
        assert log.durable_end == log.recovery_point == 3

    @pytest.mark.requirement("a:A-76", "a:A-77")
    async def test_flush_messages_and_flush_ms_sync_the_page_cache(self, node: SimNode) -> None:
        log = await open_log(node, replace(PAGE_CACHE, flush_messages=5, segment_bytes=100_000))
        log.append(batch(4), leader_epoch=0)
        await asyncio.sleep(1)
        assert log.durable_end == 0
        log.append(batch(1), leader_epoch=0)
        await asyncio.sleep(1)
        assert log.durable_end == 5
        await log.configure(replace(PAGE_CACHE, flush_ms=3_000, segment_bytes=100_000))
        log.append(batch(1), leader_epoch=0)
        await asyncio.sleep(4)
        assert log.durable_end == 5
        log.append(batch(1), leader_epoch=0)
        await asyncio.sleep(1)
        assert log.durable_end == 7

    @pytest.mark.case("S4")
    async def test_a_failed_sync_of_the_directory_fails_the_append(self, lab: Lab, node: SimNode) -> None:
        log = await open_log(node)
        lab.machine.disk().fail("sync")
        waiter = log.wait_durable(log.append(batch(1), leader_epoch=0).last_offset)
        with pytest.raises(StorageError):
            await waiter
        assert log.durable_end == 0
        with pytest.raises(StorageError):
            await log.wait_durable(0)
        with pytest.raises(StorageError):
            log.append(batch(1), leader_epoch=0)

    async def test_a_read_that_fails_lets_go_of_its_file_although_somebody_holds_the_error(self, node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(1), leader_epoch=0)
        await log.flush()
        node.machine.disk().faults.arm("read")
        with pytest.raises(StorageError) as held:
            await log.read(0, bytes_max=1_000)
        assert held.value.__traceback__ is not None
        assert not log.segments.files._pins
        assert (await log.read(0, bytes_max=1_000)).data

    async def test_an_idle_log_holds_no_open_file(self, node: SimNode) -> None:
        log = await open_log(node)
        log.append(batch(1), leader_epoch=0)
        await log.checkpoint()
        log.context.files.validate()
        log.context.files.discard_directory(PATH)
        assert log.context.files.open_count == 0
        assert log.durability.is_clean


async def test_delete_leaves_nothing_behind(node: SimNode) -> None:
    log = await open_log(node)
    for _ in range(30):
        log.append(batch(1, value=b"x" * 100), leader_epoch=0)
    await log.checkpoint()
    await log.delete()
    assert not node.disk().exists(PATH)
    assert node.store().scan(b"log/") == []


async def test_deletion_of_a_dirty_log_closes_its_files_and_fails_who_waits(node: SimNode) -> None:
    log = await open_log(node, PAGE_CACHE)
    log.append(batch(1), leader_epoch=0)
    waiter = log.durability.wait(0)
    assert log.durability.is_dirty
    await log.delete()
    assert log.context.files.open_count == 0
    assert log.durability.is_clean
    with pytest.raises(StorageError, match="the log was closed"):
        await waiter


def test_an_idle_log_is_small_and_many_share_few_open_files(tmp_path: Any) -> None:
    async def main() -> None:
        disk, store = RealDisk(tmp_path), LmdbStore(tmp_path / "state")
        group_commit = GroupCommit(disk, on_failure=lambda error: None)
        files, config, clock, work = FilePool(disk, open_max=16), LogConfig(), SystemClock(), InlineWork()

        async def opened(at: int) -> Log:
            return await Log.open(
                disk=disk,
                store=store,
                work=work,
                group_commit=group_commit,
                clock=clock,
                files=files,
                path=f"topic.{at:032x}-0",
                log_id=PartitionId(TopicId(UUID(int=at)), 0),
                config=config,
            )

        async def write(at: int) -> None:
            log = await opened(at)
            log.append(batch(3), leader_epoch=1)
            await log.close()

        count = 200
        await asyncio.gather(*(write(at) for at in range(count)))
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        logs = await asyncio.gather(*(opened(at) for at in range(count)))
        for log in logs:
            assert (await log.read(0, bytes_max=1_000)).next_offset == 3
            await log.checkpoint()
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert used / count < 16 * 1024
        assert files.open_count <= 16
        assert all(log.report.clean for log in logs)
        await asyncio.gather(*(log.close() for log in logs))
        await group_commit.close()
        files.close()
        store.close()
        disk.close()

    asyncio.run(main())
