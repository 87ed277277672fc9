"""A log whose housekeeping is cancelled or overlaps another change of the same files."""

import asyncio
from dataclasses import replace

import pytest
from support.logs.single_log import SMALL, Lab, batch, open_log, read_all

from tidelog.log import housekeeping
from tidelog.log.batch import decode, read_header
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.config import FlushMode, LogConfig
from tidelog.world.simulated import SimNode

DAY_MS = 86_400_000


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, flush_mode=FlushMode.PAGE_CACHE)])
def test_a_stop_in_the_middle_of_a_checkpoint_keeps_the_epoch_history(lab: Lab, turns: int, config: LogConfig) -> None:
    async def before(node: SimNode) -> None:
        log = await open_log(node, config)
        log.append(batch(), leader_epoch=1)
        await log.checkpoint()
        log.append(batch(), leader_epoch=2)
        checkpoint = asyncio.get_running_loop().create_task(log.checkpoint())
        for _ in range(turns):
            await asyncio.sleep(0)
        checkpoint.cancel()
        await asyncio.wait([checkpoint])
        await log.close()

    async def after(node: SimNode) -> None:
        log = await open_log(node, config)
        assert log.report.clean
        assert list(log.epochs) == [(1, 0), (2, 1)]

    lab.run(before)
    lab.kill()
    lab.run(after)


@pytest.mark.parametrize("after_ms", range(60))
async def test_retention_during_a_compaction_deletes_only_expired_segments(node: SimNode, after_ms: int) -> None:
    config = replace(
        SMALL,
        segment_bytes=20_000,
        cleanup_compact=True,
        retention_ms=DAY_MS,
        min_cleanable_dirty_ratio=0.0,
    )
    log = await open_log(node, config)
    now_ms = node.clock.now_ms()
    for number in range(16):
        timestamp = now_ms - 2 * DAY_MS if number < 4 else now_ms
        log.append(batch(key=b"key %d" % (number % 15), timestamp=timestamp), leader_epoch=0)
        if number % 4 == 3:
            log.roll()
    plan = housekeeping.plan(log, bound=log.end_offset)
    assert plan is not None
    cleaning = asyncio.get_running_loop().create_task(housekeeping.clean(log, plan, CleanerLimits()))
    await asyncio.sleep(after_ms / 5000)
    await log.expire(bound=log.end_offset)
    await cleaning
    log.validate()
    assert log.start_offset <= 4, "only the first four records are old"
    found = {r.offset for data in await read_all(log) for r in decode(data, decompressed_bytes_max=1 << 20)}
    assert found >= set(range(4, 16)), "nothing that is young has gone"


@pytest.mark.parametrize("turns", range(0, 30, 2))
async def test_retention_during_a_truncation_waits_for_it(node: SimNode, turns: int) -> None:
    config = replace(SMALL, segment_ms=1000)
    log = await open_log(node, config)
    for _ in range(20):
        log.append(batch(timestamp=node.clock.now_ms()), leader_epoch=0)
    await log.flush()
    await asyncio.sleep(5)
    cutting = asyncio.get_running_loop().create_task(log.truncate(7))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert await log.expire(bound=log.start_offset) == []
    await cutting
    log.validate()
    assert log.end_offset == 7
    assert [read_header(data).base_offset for data in await read_all(log)] == list(range(7))


@pytest.mark.parametrize("turns", range(8))
def test_a_reset_whose_caller_is_cancelled_is_finished(lab: Lab, turns: int) -> None:
    async def before(node: SimNode) -> int:
        log = await open_log(node)
        for _ in range(5):
            log.append(batch(), leader_epoch=0)
        await log.flush()
        resetting = asyncio.get_running_loop().create_task(log.reset_to(30))
        for _ in range(turns):
            await asyncio.sleep(0)
        resetting.cancel()
        await asyncio.wait([resetting])
        async with log.lock:  # wait for the change that has begun
            end = log.end_offset
        assert end in (5, 30), "all of it or none"
        log.append(batch(), leader_epoch=1)
        await log.close()
        return end

    async def after(node: SimNode) -> None:
        log = await open_log(node)
        assert log.damaged is None
        assert log.end_offset == end + 1

    end = lab.run(before)
    lab.kill()
    lab.run(after)
