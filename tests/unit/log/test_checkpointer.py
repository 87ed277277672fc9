"""Checkpoints of the logs of a node: high watermarks, recovery points, failing directories, and bounds."""

import asyncio
import errno
import logging
from typing import Any

import pytest
from support.logs.node_logs import Host, SimSite, Site, create, directory_id, log_id, write
from support.logs.single_log import batch, read_all

from tidelog.log.checkpointer import LogCheckpointer
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.directories import LogDirectory
from tidelog.log.logs import Logs, LogsConfig
from tidelog.log.stored_state import HIGH_WATERMARK, MARK, decode, decode_mark, encode, key_prefix
from tidelog.model.errors import StorageError
from tidelog.model.ids import Offset, PartitionId
from tidelog.world.simulated import Latency, SimWorld

PAGE_CACHE = LogConfig(flush_mode=FlushMode.PAGE_CACHE)


def stored_point(host: Host, place: int, log: PartitionId) -> int:
    """The stored recovery point."""
    data = host.places[place][1].get(key_prefix(log) + MARK)
    assert data is not None
    return decode_mark(data).offset


async def test_a_crash_of_the_checkpoints_of_one_directory_is_reported_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = ZeroDivisionError("a bug")
    store = LogCheckpointer.store

    async def store_or_crash(self: LogCheckpointer, directory: LogDirectory) -> None:
        if directory.directory_id == directory_id(1):
            raise bug
        await store(self, directory)

    monkeypatch.setattr(LogCheckpointer, "store", store_or_crash)
    logs = await host.open()
    assert len(logs.directories) > 1
    await asyncio.sleep(5)
    assert host.crashes == [bug]
    monkeypatch.setattr(LogCheckpointer, "store", store)
    with pytest.raises(ZeroDivisionError):
        await logs.close()


# High watermarks


def test_high_watermarks_are_stored_and_read_back(site: Site) -> None:
    async def note(host: Host) -> None:
        logs = await host.open()
        for topic in (1, 2, 3):
            await write(await create(logs, topic), 10)
        logs.note_high_watermark(log_id(1), Offset(4))
        logs.note_high_watermark(log_id(2), Offset(7))
        logs.note_high_watermark(log_id(77), Offset(7))
        await logs.checkpoint()
        logs.note_high_watermark(log_id(2), Offset(9))
        await logs.close()

    async def look(host: Host) -> None:
        logs = await host.open()
        assert [logs.high_watermark(log_id(topic)) for topic in (1, 2, 3, 77)] == [4, 9, 0, 0]
        await logs.close()

    site.run(note)
    site.run(look)


def test_a_high_watermark_is_never_past_the_end_of_the_log(sim: SimSite) -> None:
    async def note(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1, config=LogConfig(flush_mode=FlushMode.PAGE_CACHE))
        await write(log, 10)
        await log.flush()
        await write(log, 10)
        logs.note_high_watermark(log_id(1), Offset(25))
        await logs.checkpoint()
        data = host.places[0][1].get(key_prefix(log_id(1)) + HIGH_WATERMARK)
        assert data is not None
        assert decode("high-watermark", data) == {"offset": 20}

    async def look(host: Host) -> None:
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        assert logs.high_watermark(log_id(1)) == log.end_offset == 10

    sim.run(note)
    sim.lose_power()
    sim.run(look)


def test_a_high_watermark_that_cannot_be_read_is_zero_and_the_log_opens(sim: SimSite) -> None:
    async def note(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 10)
        logs.note_high_watermark(log_id(1), Offset(8))
        await logs.close()

    async def look(host: Host) -> None:
        logs = await host.open()
        assert len(logs) == 1
        assert logs.high_watermark(log_id(1)) == 0
        await logs.close()

    sim.run(note)
    key = key_prefix(log_id(1)) + HIGH_WATERMARK
    sim.machine.store("disk-0").flip_bit(key, 9)
    sim.run(look)
    for value in (
        encode("high-watermark", {"offset": -4}),
        encode("high-watermark", {}),
        encode("mark", {"offset": 3}),
    ):

        async def put(host: Host, value: bytes = value) -> None:
            await host.places[0][1].commit({key: value})

        sim.run(put)
        sim.run(look)


async def test_the_bound_of_housekeeping_is_the_high_watermark_or_the_first_open_transaction(host: Host) -> None:
    logs = await host.open()
    log = await create(logs, 1)
    await write(log, 3)
    fields: dict[str, Any] = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0, "is_transactional": True}
    await write(log, 1, **fields)
    await write(log, 3)
    assert logs.bound(log_id(1)) == 0
    logs.note_high_watermark(log_id(1), Offset(2))
    assert logs.bound(log_id(1)) == 2
    logs.note_high_watermark(log_id(1), Offset(7))
    assert logs.bound(log_id(1)) == 3


# Checkpoints


def test_recovery_points_are_stored_at_least_every_second_under_traffic(sim: SimSite, world: SimWorld) -> None:
    """At every moment the stored recovery point covers what was durable a second ago, in both directories."""
    for label in sim.labels:
        sim.machine.disk(label).sync_latency = Latency(0.02, 0.1)

    async def main(host: Host) -> None:
        logs = await host.open()
        opened = [await create(logs, topic) for topic in range(1, 13)]
        clock = asyncio.get_running_loop()
        history: list[tuple[float, list[int]]] = []
        while clock.time() - (history[0][0] if history else clock.time()) < 20:
            await asyncio.gather(*(write(log) for log in opened))
            history.append((clock.time(), [log.end_offset for log in opened]))
            before = [ends for at, ends in history if at <= clock.time() - 1.0]
            if before:
                stored = [stored_point(host, at % 2, log.log_id) for at, log in enumerate(opened)]
                assert all(point >= end for point, end in zip(stored, before[-1], strict=True)), clock.time()
        assert opened[0].end_offset > 50
        assert sum(world.machine("node").store(label).transactions for label in sim.labels) < 150, "one for all logs"

    sim.run(main)


def test_a_quiet_node_stores_nothing(sim: SimSite, world: SimWorld) -> None:
    async def fill(host: Host) -> Logs:
        logs = await host.open()
        for topic in range(1, 5):
            await write(await create(logs, topic))
        await asyncio.sleep(5)
        return logs

    logs = sim.run(fill)
    devices = [world.machine("node").store(label) for label in sim.labels]
    before = [device.transactions for device in devices]
    operations = [world.machine("node").disk(label).operations for label in sim.labels]
    world.run_for(60)
    assert [device.transactions for device in devices] == before
    assert [world.machine("node").disk(label).operations for label in sim.labels] == operations
    assert all(not log.has_news for log in logs.all())


def test_a_page_cache_log_is_checkpointed_once_it_has_been_quiet(sim: SimSite, world: SimWorld) -> None:
    async def fill(host: Host) -> Logs:
        logs = await host.open()
        await write(await create(logs, 1, config=LogConfig(flush_mode=FlushMode.PAGE_CACHE)), 5)
        return logs

    logs = sim.run(fill)
    log = logs.all()[0]
    world.run_for(10)
    assert log.recovery_point == 0
    world.run_for(30)
    assert log.recovery_point == 5
    assert log.durability.is_clean

    async def more(_: Host) -> None:
        await write(log, 2)

    sim.again(more)
    world.run_for(40)
    assert log.recovery_point == 7


def test_an_epoch_without_records_is_stored_by_the_next_checkpoint(sim: SimSite) -> None:
    async def assign(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 3)
        await asyncio.sleep(3)
        log.assign_epoch(9)
        await asyncio.sleep(2)

    async def look(host: Host) -> None:
        logs = await host.open()
        assert list(logs.all()[0].epochs) == [(0, 0), (9, 3)]

    sim.run(assign)
    sim.lose_power()
    sim.run(look)


# A directory that fails


def test_a_failed_sync_takes_only_the_logs_of_its_directory_offline(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        for topic in range(1, 5):
            await write(await create(logs, topic), 3)
        assert logs.directories[1].paths.keys() == {log_id(2), log_id(4)}
        sim.machine.disk("disk-1").fail("sync")
        log = logs.get(log_id(2))
        other = logs.get(log_id(4))
        assert log is not None
        assert other is not None
        with pytest.raises(StorageError):
            await write(log)
        assert [directory.directory_id for directory, _ in host.failed] == [directory_id(1)]
        assert [one.log_id for one in logs.all()] == [log_id(1), log_id(3)]
        assert set(logs.failures) == {log_id(2), log_id(4)}
        assert logs.get(log_id(4)) is None
        with pytest.raises(StorageError):
            other.append(batch(), leader_epoch=0)
        with pytest.raises(StorageError):
            await create(logs, 4)
        with pytest.raises(StorageError):
            await logs.remove(log_id(4))
        for topic in (1, 3):
            log = logs.get(log_id(topic))
            assert log is not None
            assert await write(log) == 4
        await create(logs, 5)
        assert logs.directories[0].paths.keys() == {log_id(1), log_id(3), log_id(5)}
        await asyncio.sleep(3)
        assert not await logs.close(), "a directory has failed"
        assert not await logs.close(), "and that stays so"

    async def look(host: Host) -> None:
        logs = await host.open()
        ends = [log.end_offset for log in logs.all()]
        assert ends == [4, 3, 4, 3, 0], "what was past the last good sync is cut"

    sim.run(main)
    sim.run(look)


def test_close_reports_a_clean_stop_only_if_every_log_was_synced(sim: SimSite) -> None:
    async def clean(host: Host) -> None:
        logs = await host.open(PAGE_CACHE)
        await write(await create(logs, 1, config=PAGE_CACHE), 3, wait=False)
        assert await logs.close()

    async def unsynced(host: Host) -> None:
        logs = await host.open(PAGE_CACHE)
        log = logs.get(log_id(1))
        assert log is not None
        await write(log, wait=False)
        sim.machine.disk("disk-0").fail("sync")
        assert not await logs.close()

    async def unmarked(host: Host) -> None:
        logs = await host.open(PAGE_CACHE)
        sim.machine.store("disk-0").fail("commit", times=100)
        assert not await logs.close(), "the mark of the clean stop was not stored"

    sim.run(clean)
    sim.run(unsynced)
    sim.run(unmarked)


def test_a_store_that_fails_takes_only_its_directory_offline(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        for topic in range(1, 5):
            await write(await create(logs, topic), 3)
        await logs.checkpoint()
        log, other = logs.get(log_id(1)), logs.get(log_id(2))
        assert log is not None
        assert other is not None
        await write(log)
        await write(other)
        sim.machine.store("disk-0").fail("commit")
        await asyncio.sleep(2)
        assert [directory.directory_id for directory, _ in host.failed] == [directory_id(0)]
        assert set(logs.failures) == {log_id(1), log_id(3)}
        with pytest.raises(StorageError):
            log.append(batch(), leader_epoch=0)
        assert await write(other) == 5
        await logs.close()

    async def look(host: Host) -> None:
        logs = await host.open()
        assert [log.end_offset for log in logs.all()] == [4, 5, 3, 3]

    sim.run(main)
    sim.run(look)


def test_a_directory_that_cannot_be_read_at_the_start_fails_alone(sim: SimSite) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open()
        for topic in range(1, 5):
            await write(await create(logs, topic), 3)
        await logs.close()

    async def half(host: Host) -> None:
        sim.machine.disk("disk-0").fail("list")
        logs = await host.open()
        assert [directory.directory_id for directory, _ in host.failed] == [directory_id(0)]
        assert logs.known() == [log_id(2), log_id(4)]
        assert len(logs) == 2
        await logs.close()

    async def none(host: Host) -> None:
        for label in sim.labels:
            sim.machine.disk(label).fail("list")
        with pytest.raises(StorageError, match="all log directories have failed"):
            await host.open()

    sim.run(fill)
    sim.run(half)
    sim.run(none)
    sim.machine.heal()
    sim.machine.store("disk-1").flip_bit(b"directory/id", 7)

    async def unknown(host: Host) -> None:
        logs = await host.open()
        assert [(directory.directory_id, directory.failed is None) for directory in logs.directories] == [
            (directory_id(0), True),
            (directory_id(1), False),
        ]

    sim.run(unknown)


async def test_a_full_disk_stops_appends_but_not_the_directory(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    log = await create(logs, 1)
    await write(log, 30)
    sim.machine.disk("disk-0").fill()
    with pytest.raises(StorageError):
        await write(log, 30)
    await asyncio.sleep(3)
    assert host.failed == []
    sim.machine.disk("disk-0").heal()
    end = await write(log)
    await asyncio.sleep(2)
    assert log.recovery_point == end
    await logs.close()


# Bounds


async def test_the_number_of_open_files_is_bounded(site: Site, host: Host) -> None:
    logs = await host.open(logs_config=LogsConfig(open_files_max=5))
    for topic in range(1, 31):
        await write(await create(logs, topic), 12)
    await logs.checkpoint()
    for log in logs.all():
        assert len(await read_all(log)) == 12
        for directory in logs.directories:
            assert directory.files.open_count <= 5
            directory.files.validate()
    await logs.close()
    assert [directory.files.open_count for directory in logs.directories] == [0, 0]


def test_a_bug_in_a_background_task_is_raised_to_waiting_callers(sim: SimSite) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open()
        await create(logs, 1)
        await logs.close()

    def broken(_: PartitionId) -> LogConfig:
        raise AssertionError("a topic without settings")

    async def main(host: Host) -> None:
        logs = await host.open(broken, wait=False)
        with pytest.raises(AssertionError, match="without settings"):
            await logs.wait_open(log_id(1))
        with pytest.raises(AssertionError, match="without settings"):
            await logs.wait_all_open()
        with pytest.raises(AssertionError, match="without settings"):
            await logs.close()

    sim.run(fill)
    logging.getLogger("tidelog.log.logs").disabled = True
    try:
        sim.run(main)
    finally:
        logging.getLogger("tidelog.log.logs").disabled = False


async def test_closing_twice_is_closing_once(site: Site, host: Host) -> None:
    logs = await host.open()
    await write(await create(logs, 1))
    await logs.close()
    await logs.close()
    with pytest.raises(AssertionError, match="closed"):
        await create(logs, 2)


async def test_the_errno_of_a_broken_device_reaches_the_caller(sim: SimSite, host: Host) -> None:
    logs = await host.open()
    sim.machine.disk("disk-0").fail("make directory", number=errno.EROFS)
    with pytest.raises(StorageError, match=r"(?i)read-only"):
        await create(logs, 1)
    assert logs.known() == []
    assert logs.failures == {}
    assert (await create(logs, 1)).end_offset == 0
