"""Changes of files that failed in the middle, each found by `make crashes`."""

import asyncio
import errno
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.logs.node_logs import Host, SimSite, create, directory_id, log_id, records_of, replicate_all, write
from support.logs.single_log import SMALL

from tidelog.log.log_move import MOVING
from tidelog.log.logs import Logs
from tidelog.log.segment import INDEX
from tidelog.model.errors import StorageError
from tidelog.world.simulated import Loss, SimWorld

COMPACT = replace(SMALL, cleanup_delete=False, cleanup_compact=True, min_cleanable_dirty_ratio=0.0)


@pytest.fixture
def sim() -> Iterator[SimSite]:
    with SimWorld(3) as world:
        yield SimSite(world, directories=2)


def test_retention_that_cannot_rename_a_file_drops_no_segment_that_has_not_expired(sim: SimSite) -> None:
    config = replace(SMALL, retention_bytes=3_000)

    async def main(host: Host) -> None:
        logs = await host.open(config)
        log = await create(logs, 1, config=config)
        await write(log, 60)
        await logs.checkpoint()
        replicate_all(logs)
        device = sim.machine.disk("disk-0")
        device.fail("rename", number=errno.ENOSPC)
        expired = (await logs.housekeeping.expire())[log_id(1)]
        assert log.start_offset == expired[-1].next_offset
        assert log.size >= config.retention_bytes
        assert await logs.housekeeping.expire() == {}

    sim.run(main)


async def _compacted(host: Host) -> Logs:
    logs = await host.open(COMPACT)
    log = await create(logs, 1, config=COMPACT)
    if not log.end_offset:
        await write(log, 60)
        await logs.checkpoint()
        replicate_all(logs)
    return logs


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_swap_of_segments_that_fails_in_the_middle_serves_all_records_or_fails_its_directory(
    sim: SimSite, number: int
) -> None:
    async def main(host: Host) -> None:
        logs = await _compacted(host)
        log = logs.get(log_id(1))
        assert log is not None
        path = log.segments.file_path(log.sealed_segments()[0].base_offset, INDEX)
        sim.machine.disk("disk-0").fail("rename", number=number, path=path)
        await logs.housekeeping.clean_one()
        assert (logs.directories[0].failed is not None) == (number == errno.EIO)
        if number == errno.ENOSPC:
            assert len(await records_of(log)) > 0

    async def again(host: Host) -> None:
        logs = await host.open(COMPACT)
        log = logs.get(log_id(1))
        assert log is not None
        assert log.damaged is None
        assert (await records_of(log))[-1].offset == 59

    sim.run(main)
    sim.run(again)


def test_a_swap_whose_names_were_not_synced_is_whole_after_a_restart_and_a_loss_of_power(sim: SimSite) -> None:
    """The restart sees the new names, and the device does not have them."""
    device = sim.machine.disk("disk-0")

    async def main(host: Host) -> None:
        logs = await _compacted(host)
        store = sim.machine.store("disk-0")

        def fail_after_decision(operation: str, _paths: tuple[str, ...]) -> None:
            if operation == "sync" and any(b"intent" in key for key in store.stored):
                device.on_call = None
                device.fail("sync")

        device.on_call = fail_after_decision
        await logs.housekeeping.clean_one()
        assert logs.directories[0].failed is not None
        await asyncio.sleep(1)  # what failed is stored

    async def look(host: Host) -> None:
        logs = await host.open(COMPACT)
        log = logs.get(log_id(1))
        assert log is not None
        assert log.damaged is None
        assert (await records_of(log))[-1].offset == 59
        for info in log.sealed_segments():
            assert (await log.scrub(info.base_offset)).fault is None

    sim.run(main)
    sim.run(look)
    sim.lose_power(Loss.ALL)
    sim.run(look)


def test_a_moved_log_whose_name_was_not_synced_survives_a_restart_and_a_loss_of_power(sim: SimSite) -> None:
    device = sim.machine.disk("disk-1")

    async def main(host: Host) -> None:
        logs = await host.open()
        await write(await logs.create(log_id(1), label="orders", config=SMALL, directory=directory_id(0)), 20)
        move = logs.move(log_id(1), directory_id(1))
        await move.copy()

        def fail_after_rename(operation: str, paths: tuple[str, ...]) -> None:
            if operation == "rename" and paths[0].endswith(MOVING):
                device.on_call = None
                device.fail("sync", path="")

        device.on_call = fail_after_rename
        with pytest.raises(StorageError):
            await move.finish()

    async def look(host: Host) -> None:
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None, "the only copy is there"
        assert len(await records_of(log)) == 20

    sim.run(main)
    sim.run(look)
    sim.lose_power(Loss.ALL)
    sim.run(look)


def test_a_truncation_that_fails_in_the_middle_can_be_done_again(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1, config=replace(SMALL, index_interval_bytes=50, segment_bytes=100_000))
        await write(log, 40)
        await logs.checkpoint()
        index = log.segments.file_path(log.segments.active.base_offset, INDEX)
        sim.machine.disk("disk-0").fail("truncate", number=errno.EIO, path=index)
        with pytest.raises(StorageError):
            await log.truncate(20)
        assert len(await records_of(log)) == 40
        await log.truncate(20)
        assert len(await records_of(log)) == 20

    sim.run(main)


def test_a_log_whose_stored_state_cannot_be_read_is_removed_all_the_same(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = await create(logs, 1)
        await write(log, 3)
        home = logs.directory_of(log_id(1))
        assert home is not None
        sim.machine.store(home.disk.label.rpartition(":")[2]).fail("get", number=errno.EIO)
        await logs.remove(log_id(1))
        assert logs.known() == []
        assert (await create(logs, 1)).end_offset == 0

    sim.run(main)


def test_a_state_store_that_cannot_be_read_does_not_stop_the_cleaning_of_other_logs(sim: SimSite) -> None:
    """Seed 16 (lab): the task ended, and the node with it."""

    async def main(host: Host) -> None:
        logs = await _compacted(host)
        other = await create(logs, 2, config=COMPACT)
        await write(other, 60)
        await logs.checkpoint()
        replicate_all(logs, 1, 2)
        home = logs.directory_of(log_id(1))
        assert home is not logs.directory_of(log_id(2))
        assert home is not None
        sim.machine.store(home.disk.label.rpartition(":")[2]).fail("get", number=errno.EIO)
        report = await logs.housekeeping.clean_one()
        assert report is not None
        assert report.records_kept < report.records_read
        assert await logs.housekeeping.clean_one() is not None, "the other one is cleaned later"

    sim.run(main)


def test_a_new_directory_whose_store_fails_is_given_up_and_works_after_a_restart(sim: SimSite) -> None:
    """A store that has failed fails for the rest of the process: to wait for memory was to wait for ever."""

    async def fail_to_start(host: Host) -> None:
        sim.machine.store("disk-0").fail(number=errno.ENOMEM)
        logs = await host.open(SMALL)
        assert logs.directories[0].failed is not None
        assert logs.directories[1].failed is None

    async def start(host: Host) -> None:
        logs = await host.open(SMALL)
        assert [directory.failed for directory in logs.directories] == [None, None]

    sim.run(fail_to_start)
    sim.run(start)
