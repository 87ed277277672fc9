"""Stored offsets after a truncation: high watermark and start offset are never past the log end."""

import asyncio
import functools

from support.logs.node_logs import Host, SimSite, create, log_id, write
from support.logs.single_log import Lab, fill, open_log

from tidelog.log import stored_state as stored
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.damage import Damage
from tidelog.model.ids import Offset
from tidelog.world.simulated import Latency, SimNode, SimWorld

PAGE_CACHE = LogConfig(flush_mode=FlushMode.PAGE_CACHE)


def stored_high_watermark(host: Host, topic: int = 1) -> int | None:
    data = host.places[0][1].get(stored.key_prefix(log_id(topic)) + stored.HIGH_WATERMARK)
    if data is None:
        return None
    offset = stored.decode("high-watermark", data)["offset"]
    assert isinstance(offset, int)
    return offset


async def look(host: Host) -> tuple[int, int]:
    logs = await host.open(PAGE_CACHE)
    log = logs.get(log_id(1))
    assert log is not None
    return log.end_offset, logs.high_watermark(log_id(1))


async def write_and_note(host: Host) -> None:
    """10 synced records and 10 more that are only in the page cache; all of them are committed."""
    logs = await host.open(PAGE_CACHE)
    log = await create(logs, 1, config=PAGE_CACHE)
    await write(log, 10)
    await log.flush()
    await write(log, 10)
    logs.note_high_watermark(log_id(1), Offset(20))
    await logs.checkpoint()
    assert stored_high_watermark(host) == 20


def test_recovery_stores_the_high_watermark_that_it_lowers(sim: SimSite) -> None:
    async def append_over_the_loss(host: Host) -> None:
        assert await look(host) == (10, 10)
        assert stored_high_watermark(host) == 10, "before anything is appended"
        logs = await host.open(PAGE_CACHE)
        log = logs.get(log_id(1))
        assert log is not None
        await write(log, 10)
        await log.flush()

    sim.run(write_and_note)
    sim.lose_power()
    sim.run(append_over_the_loss)
    assert sim.run(look) == (20, 10)


def test_truncation_stores_the_high_watermark_that_it_lowers(sim: SimSite) -> None:
    """No checkpoint runs between the truncation, the appends over it and the crash."""

    async def cut(host: Host) -> None:
        logs = await host.open(PAGE_CACHE)
        log = logs.get(log_id(1))
        assert log is not None
        await log.truncate(4)
        assert (stored_high_watermark(host), logs.high_watermark(log_id(1))) == (4, 4)
        await write(log, 10)
        await log.flush()

    sim.run(write_and_note)
    sim.run(cut)
    sim.lose_power()
    assert sim.run(look) == (14, 4)


def test_reset_stores_the_high_watermark_that_it_lowers(sim: SimSite) -> None:
    async def reset(host: Host) -> None:
        logs = await host.open(PAGE_CACHE)
        log = logs.get(log_id(1))
        assert log is not None
        await log.reset_to(7)
        await write(log, 10)
        await log.flush()

    sim.run(write_and_note)
    sim.run(reset)
    sim.lose_power()
    assert sim.run(look) == (17, 7)


def test_checkpoint_that_overlaps_a_truncation_does_not_restore_the_high_watermark(sim: SimSite) -> None:
    """The checkpoint begins at every step of a truncation, on a slow device."""

    async def race(host: Host, delay_s: float) -> int:
        logs = await host.open(PAGE_CACHE)
        log = logs.get(log_id(1)) or await create(logs, 1, config=PAGE_CACHE)
        await write(log, 30 - log.end_offset)
        await log.flush()
        logs.note_high_watermark(log_id(1), Offset(20))
        await logs.checkpoint()
        logs.note_high_watermark(log_id(1), Offset(25))
        cut = asyncio.get_running_loop().create_task(log.truncate(4))
        await asyncio.sleep(delay_s)
        await logs.checkpoint()
        await cut
        found = stored_high_watermark(host)
        assert found is not None
        return found

    for label in sim.labels:
        sim.machine.disk(label).sync_latency = Latency(0.005, 0.005)
    for step in range(40):
        delay_s = step / 1000
        found = sim.run(functools.partial(race, delay_s=delay_s))
        assert found <= 4, f"after {delay_s} s"


def test_repair_stores_the_start_offset_that_it_lowers(world: SimWorld) -> None:
    """Damage below the start offset: the log is truncated there, and new records take the offsets up to the old
    start."""
    lab = Lab(world)

    async def make(node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 20)
        await log.flush()
        await log.advance_start(15)
        await log.mark_damaged(Damage(Offset(5), "found by a test"))

    async def repair(node: SimNode) -> None:
        log = await open_log(node)
        assert log.damaged is not None
        await log.repair()
        start = log.start_offset
        assert start <= log.end_offset
        fill(log, 20 - log.end_offset, epoch=2)
        await log.flush()

    async def check(node: SimNode) -> None:
        log = await open_log(node)
        assert log.start_offset <= 5, "records that were appended over the cut are still there"
        assert log.end_offset == 20

    lab.run(make)
    lab.kill()
    lab.run(repair)
    lab.crash()
    lab.run(check)
