"""Logs whose disk is full, and whose state store refuses commits: nothing that was acknowledged is lost, reads go on,
nobody gives up a directory, and with room everything goes on without a restart."""

import asyncio
import errno
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from support.logs.node_logs import Host, SimSite, create, log_id, records_of, write
from support.logs.single_log import SMALL, batch, read_all

from tidelog.log.log import Damage, Log
from tidelog.log.logs import Logs
from tidelog.log.stored_state import HIGH_WATERMARK, decode, key_prefix
from tidelog.model.errors import DiskFullError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.simulated import Loss

COMPACTED = replace(SMALL, cleanup_compact=True, min_cleanable_dirty_ratio=0.0)


def set_full(sim: SimSite, is_full: bool = True) -> None:
    for label in sim.labels:
        sim.machine.store(label).fill(1.0 if is_full else 0.0)
        if is_full:
            sim.machine.disk(label).fill()
        else:
            sim.machine.disk(label).heal()


def fill_store(sim: SimSite, is_full: bool = True) -> None:
    for label in sim.labels:
        sim.machine.store(label).fill(1.0 if is_full else 0.0)


def test_a_full_state_store_delays_only_recovery_points(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 10)
        await asyncio.sleep(2)
        assert log.recovery_point == 10
        fill_store(sim)
        end = await write(log, 30)
        logs.note_high_watermark(log_id(1), Offset(end))
        log.assign_epoch(7)
        await asyncio.sleep(5)
        assert host.failed == []
        assert log.recovery_point == 10
        assert len(await read_all(log)) == 40
        fill_store(sim, False)
        await asyncio.sleep(2)
        assert log.recovery_point == end

    sim.run(main)
    sim.lose_power()

    async def look(host: Host) -> None:
        logs = await host.open()
        log = await logs.wait_open(log_id(1))
        assert log is not None
        assert (log.end_offset, log.epochs.latest) == (40, 7)
        assert logs.high_watermark(log_id(1)) == 40

    sim.run(look)


async def test_rejected_high_watermarks_are_stored_when_there_is_space(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log = await create(logs, 1)
    await write(log, 10)
    await asyncio.sleep(2)
    fill_store(sim)
    logs.note_high_watermark(log_id(1), Offset(7))
    await asyncio.sleep(3)
    fill_store(sim, False)
    await asyncio.sleep(2)
    found = [store.get(key_prefix(log_id(1)) + HIGH_WATERMARK) for _, store, _ in host.places]
    assert [decode("high-watermark", one)["offset"] for one in found if one is not None] == [7]


def test_a_log_that_finds_no_space_is_opened_later_and_delays_no_other(sim: SimSite) -> None:
    async def before(host: Host) -> None:
        logs = await host.open()
        for topic in (1, 2):
            await write(await create(logs, topic), 20)
        await asyncio.sleep(2)

    async def after(host: Host) -> None:
        sim.machine.store("disk-0").fill()
        logs = await host.open(wait=False)
        other = await logs.wait_open(log_id(2))
        assert other is not None
        assert len(await read_all(other)) == 20
        await asyncio.sleep(3)
        assert (logs.get(log_id(1)), logs.failures, host.failed) == (None, {}, [])
        sim.machine.store("disk-0").fill(0.0)
        log = await logs.wait_open(log_id(1))
        assert log is not None
        assert len(await read_all(log)) == 20
        assert await logs.close()

    sim.run(before)
    sim.lose_power()
    sim.run(after)


def test_a_stop_does_not_wait_for_disk_space(sim: SimSite) -> None:
    async def before(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 20)

    async def stop(host: Host) -> None:
        fill_store(sim)
        logs = await host.open(wait=False)
        await asyncio.sleep(0.5)
        async with asyncio.timeout(5):
            assert not await logs.close()

    sim.run(before)
    sim.run(stop)
    fill_store(sim, False)

    async def look(host: Host) -> None:
        log = await (await host.open()).wait_open(log_id(1))
        assert log is not None
        assert len(await read_all(log)) == 20

    sim.run(look)


@pytest.mark.parametrize("ending", ["room", "crash"])
def test_a_topic_is_deleted_on_a_full_disk_and_frees_its_space(sim: SimSite, ending: str) -> None:
    """Its stored state is deleted when there is space, before a log of the same id is created; also after a crash."""

    async def delete(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 20)
        await logs.checkpoint()
        set_full(sim)
        await logs.remove(log_id(1))
        await asyncio.sleep(0.5)
        files = [path for label in sim.labels for path, _ in sim.machine.disk(label).files()]
        assert not [path for path in files if path.endswith(".log")]
        with pytest.raises(DiskFullError, match="free space"):
            await create(logs, 1)
        if ending == "room":
            set_full(sim, False)
            await create_again(logs)

    async def create_again(logs: Logs) -> None:
        log = await create(logs, 1)
        assert (log.damaged, log.end_offset) == (None, 0)
        assert await write(log, 3) == 3
        await asyncio.sleep(3)

    async def start(host: Host) -> None:
        logs = await host.open()
        await asyncio.sleep(0.1)
        assert host.failed == []
        with pytest.raises(DiskFullError):
            await create(logs, 1)
        set_full(sim, False)
        await create_again(logs)

    sim.run(delete)
    sim.lose_power()
    if ending == "crash":
        sim.run(start)
        sim.lose_power()

    async def look(host: Host) -> None:
        logs = await host.open()
        log = await logs.wait_open(log_id(1))
        assert log is not None
        assert (log.damaged, log.end_offset) == (None, 3)

    sim.run(look)
    assert not any(name.endswith(".deleted") for label in sim.labels for name in sim.machine.disk(label).root.entries)


def test_a_log_that_waits_for_space_to_open_can_be_deleted(sim: SimSite) -> None:
    async def before(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 20)

    async def after(host: Host) -> None:
        fill_store(sim)
        logs = await host.open(wait=False)
        await asyncio.sleep(2.5)
        async with asyncio.timeout(5):
            await logs.remove(log_id(1))
        assert logs.known() == []

    sim.run(before)
    sim.run(after)


Change = Callable[[Log], Coroutine[Any, Any, object]]


CHANGES: dict[str, tuple[Change, int, int]] = {
    "cut": (lambda log: log.truncate(17), 0, 17),
    "reset": (lambda log: log.reset_to(100), 100, 100),
    "cut below the start": (lambda log: log.truncate(3), 3, 3),
    "drop": (lambda log: log.advance_start(12), 12, 40),
    "gaps": (lambda log: log.allow_gaps(), 5, 40),
}


@pytest.mark.parametrize("refused", range(6))
@pytest.mark.parametrize("skipped", range(3))
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_files_that_finds_no_space_succeeds_later(
    sim: SimSite, kind: str, refused: int, skipped: int
) -> None:
    """The first or a later commit is rejected; what is written afterwards survives a power loss."""
    change, start, end = CHANGES[kind]
    device = sim.machine.store("disk-0")

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 40)
        await log.checkpoint()
        await log.advance_start(5)
        passed = 0

        def refuse() -> bool:
            nonlocal passed
            passed += 1
            return skipped < passed <= skipped + refused

        device._is_refused = refuse  # type: ignore[method-assign]
        try:
            while True:
                try:
                    await change(log)
                    break
                except DiskFullError:
                    log.validate()
        finally:
            del device._is_refused
        assert await write(log, 2) == end + 2

    sim.run(main)
    sim.lose_power(Loss.ALL)

    async def look(host: Host) -> None:
        log = await (await host.open()).wait_open(log_id(1))
        assert log is not None
        log.validate()
        found = (log.damaged, log.start_offset, log.end_offset)
        assert found == (None, start if kind != "cut" else 5, end + 2)

    sim.run(look)


def test_a_log_whose_reset_a_crash_would_repeat_rejects_appends(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 40)
        await asyncio.sleep(2)
        store = sim.machine.store("disk-0")
        commits = 0

        def refuse() -> bool:
            nonlocal commits
            commits += 1
            return commits > 1

        store._is_refused = refuse  # type: ignore[method-assign]
        with pytest.raises(DiskFullError):
            await log.reset_to(100)
        assert log.end_offset == 100
        for _ in range(2):
            with pytest.raises(DiskFullError, match="free space"):
                log.append(batch(), leader_epoch=1)
            await asyncio.sleep(2)
        assert host.failed == []
        del store._is_refused
        await asyncio.sleep(2)
        assert await write(log, 3) == 103

    sim.run(main)
    sim.lose_power()

    async def look(host: Host) -> None:
        log = await (await host.open()).wait_open(log_id(1))
        assert log is not None
        assert (log.start_offset, log.end_offset) == (100, 103)

    sim.run(look)


@pytest.mark.parametrize("refused", range(1, 8))
def test_a_cleaning_that_finds_no_space_changes_no_record(sim: SimSite, refused: int) -> None:
    async def main(host: Host) -> None:
        logs = await host.open(COMPACTED)
        log = await create(logs, 1, config=COMPACTED)
        for number in range(60):
            await write(log, key=b"%d" % (number % 3), value=b"%d" % number)
        log.roll()
        await logs.checkpoint()
        logs.note_high_watermark(log_id(1), log.end_offset)
        commits = 0

        def refuse() -> bool:
            nonlocal commits
            commits += 1
            return commits == refused

        store = sim.machine.store("disk-0")
        store._is_refused = refuse  # type: ignore[method-assign]
        while await logs.housekeeping.clean_one() is not None:
            pass
        del store._is_refused
        assert host.failed == []
        assert logs.housekeeping.uncleanable == {}
        while await logs.housekeeping.clean_one() is not None:
            pass
        latest = {record.key: record.value for record in await records_of(log)}
        assert latest == {b"0": b"57", b"1": b"58", b"2": b"59"}

    sim.run(main)
    sim.lose_power()

    async def look(host: Host) -> None:
        log = await (await host.open(COMPACTED)).wait_open(log_id(1))
        assert log is not None
        assert log.damaged is None
        latest = {record.key: record.value for record in await records_of(log)}
        assert latest == {b"0": b"57", b"1": b"58", b"2": b"59"}

    sim.run(look)


async def test_damage_that_cannot_be_stored_still_closes_the_log(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log = await create(logs, 1)
    await write(log, 20)
    fill_store(sim)
    await log.mark_damaged(Damage(Offset(7), "rot"))
    with pytest.raises(StorageError, match="damaged"):
        log.append(batch(), leader_epoch=1)
    assert host.failed == []


def test_a_failed_sync_on_a_full_disk_is_stored_when_there_is_space(sim: SimSite) -> None:
    """The suspect field waits for space; a sync that fails is never a matter of space."""

    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 20)
        await logs.checkpoint()
        fill_store(sim)
        sim.machine.disk("disk-0").fail("sync", number=errno.ENOSPC)
        with pytest.raises(StorageError) as caught:
            await write(log, 5)
        assert not isinstance(caught.value, DiskFullError)
        assert len(host.failed) == 1
        await asyncio.sleep(2)
        fill_store(sim, False)
        await asyncio.sleep(2)

    sim.run(main)

    async def look(host: Host) -> None:
        log = await (await host.open()).wait_open(log_id(1))
        assert log is not None
        assert log.end_offset == 20

    sim.run(look)


def test_a_log_moves_although_the_target_store_is_sometimes_full(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 40)
        home = logs.directory_of(log_id(1))
        target = next(one for one in logs.directories if one is not home)
        assert target.directory_id is not None
        for label in sim.labels:
            sim.machine.store(label).fill(0.4)
        while True:
            move = logs.move(log_id(1), target.directory_id)
            try:
                await move.copy()
                moved = await move.finish()
                break
            except DiskFullError:
                await move.abandon()
        fill_store(sim, False)
        assert host.failed == []
        assert len(await read_all(moved)) == 40
        assert await write(moved, 2) == 42
        await asyncio.sleep(5)

    sim.run(main)
    sim.lose_power()

    async def look(host: Host) -> None:
        logs = await host.open()
        log = await logs.wait_open(log_id(1))
        assert log is not None
        assert (log.damaged, log.end_offset, logs.duplicates) == (None, 42, {})

    sim.run(look)
