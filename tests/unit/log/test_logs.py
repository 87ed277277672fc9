"""The logs of a node: names, start, stop and removal; simulated and on real files and LMDB."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pytest
from support.logs.node_logs import Host, SimSite, Site, create, directory_id, log_id, write
from support.logs.single_log import SMALL, batch, read_all

from tidelog.log.directories import (
    LABEL_LENGTH_MAX,
    directory_name,
    parse_directory_name,
    parse_former_name,
)
from tidelog.log.logs import LogsConfig
from tidelog.log.stored_state import key_prefix
from tidelog.model.errors import StorageError
from tidelog.model.ids import Offset
from tidelog.world.simulated import Loss, NodeDiedError, SimWorld

T = TypeVar("T")

NO_CHECKPOINTS = LogsConfig(checkpoint_interval_ms=3_600_000)


# Names


def test_a_directory_name_has_topic_id_and_partition() -> None:
    some = log_id(0xABC, 17)
    assert parse_directory_name(directory_name(some, "orders.eu-1")) == (some, "orders.eu-1")
    assert parse_directory_name(directory_name(some, "")) == (some, "")
    assert parse_former_name(directory_name(some, "orders") + ".3.deleted") == (some, ".deleted")
    hexes = some.topic_id.hex
    for other in [
        "state",
        "lost+found",
        "orders-3",
        f"orders.{hexes}",
        f"orders.{hexes}-",
        f"orders.{hexes}--1",
        f"orders.{hexes}-07",
        f"orders.{hexes}-2147483648",
        f"orders.{hexes.upper()}-1",
        f"orders.{hexes[1:]}-1",
        f"or ders.{hexes}-1",
        f"orders.{hexes}-1.deleted",
        f"orders.{hexes}-1.x.deleted",
        "notes.0.deleted",
    ]:
        assert parse_directory_name(other) is None, other
        assert parse_former_name(other) is None, other


def test_a_long_topic_name_still_gives_a_file_name_that_can_be_deleted() -> None:
    name = directory_name(log_id(1, 2**31 - 1), "t" * 249)
    assert parse_directory_name(name) == (log_id(1, 2**31 - 1), "t" * LABEL_LENGTH_MAX)
    assert len(f"{name}.99.deleted") <= 255


# Several directories


@pytest.mark.requirement("a:A-25", "b:B-07")
async def test_a_new_log_goes_to_the_directory_with_the_fewest_logs(site: Site, host: Host) -> None:
    logs = await host.open()
    homes = []
    for topic in range(1, 6):
        await create(logs, topic)
        home = logs.directory_of(log_id(topic))
        assert home is not None
        homes.append(home.directory_id)
    assert homes == [directory_id(0), directory_id(1)] * 2 + [directory_id(0)]
    await logs.create(log_id(6), label="x", config=SMALL, directory=directory_id(0))
    assert [len(directory.paths) for directory in logs.directories] == [4, 2]
    with pytest.raises(StorageError, match="has failed or is unknown"):
        await logs.create(log_id(7), label="x", config=SMALL, directory=directory_id(9))
    await logs.close()


async def test_create_returns_an_existing_log(site: Site, host: Host) -> None:
    logs = await host.open()
    one, two = await asyncio.gather(create(logs, 1), create(logs, 1))
    assert one is two
    assert await create(logs, 1) is one
    assert logs.known() == [log_id(1)]
    await logs.close()


def test_the_same_topic_name_with_another_topic_id_is_another_log(site: Site) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        old = await create(logs, 1, label="orders")
        new = await create(logs, 2, label="orders")
        await write(old, value=b"old")
        await write(new, value=b"new")
        await logs.remove(log_id(1))
        assert logs.get(log_id(1)) is None
        assert b"new" in (await read_all(new))[0]
        await logs.close()

    async def later(host: Host) -> None:
        logs = await host.open()
        assert logs.known() == [log_id(2)]
        assert b"new" in (await read_all(logs.all()[0]))[0]
        await logs.close()

    site.run(main)
    site.run(later)


def test_a_directory_keeps_the_id_that_it_was_given_first(site: Site) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        assert [directory.directory_id for directory in logs.directories] == [directory_id(0), directory_id(1)]
        await logs.close()

    async def swapped(host: Host) -> None:
        (disk, store, one), (other_disk, other_store, two) = host.places
        host.places = [(disk, store, two), (other_disk, other_store, one)]
        await main(host)

    site.run(main)
    site.run(swapped)


async def test_directories_that_are_no_logs_are_left_alone(site: Site, host: Host) -> None:
    names = ["lost+found", "notes.deleted", f"orders.{log_id(1).topic_id.hex}-07", "x.1.deleted"]
    disk = host.places[0][0]
    for name in names:
        disk.make_directory(name)
    logs = await host.open()
    assert logs.known() == []
    await logs.close()
    assert set(names) <= set(disk.list(""))


# Stop, crash, restart


def test_after_a_clean_stop_nothing_is_read_and_everything_is_there(site: Site) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open()
        for topic in range(1, 8):
            await write(await create(logs, topic), 20, value=b"%d" % topic)
        await logs.close()

    async def look(host: Host) -> None:
        logs = await host.open()
        assert logs.known() == [log_id(topic) for topic in range(1, 8)]
        assert [log.log_id for log in logs.all()] == logs.known()
        for topic in range(1, 8):
            log = logs.get(log_id(topic))
            assert log is not None
            assert log.report.clean
            assert log.report.bytes_read == 0
            assert log.durable_end == log.end_offset == 20
            assert all(b"%d" % topic in data for data in await read_all(log))
        await logs.close()

    site.run(fill)
    site.run(look)


@pytest.mark.requirement("a:T-22", "a:X3-41")
@pytest.mark.parametrize("loss", list(Loss))
def test_after_a_loss_of_power_every_log_has_what_was_acknowledged(sim: SimSite, loss: Loss) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open(logs_config=NO_CHECKPOINTS)
        for topic in range(1, 8):
            log = await create(logs, topic)
            await write(log, 10 + topic)
            await write(log, 5, wait=False)

    async def look(host: Host) -> None:
        logs = await host.open()
        assert logs.failures == {}
        for topic in range(1, 8):
            log = logs.get(log_id(topic))
            assert log is not None
            assert not log.report.clean
            assert log.damaged is None
            assert 10 + topic <= log.end_offset <= 15 + topic
            assert log.durable_end == log.recovery_point == log.end_offset
            assert len(await read_all(log)) == log.end_offset
        await logs.close()

    sim.run(fill)
    sim.lose_power(loss)
    sim.run(look)


def test_a_killed_process_loses_nothing(site: Site) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open(logs_config=NO_CHECKPOINTS)
        for topic in range(1, 4):
            await write(await create(logs, topic), 7)

    async def look(host: Host) -> None:
        logs = await host.open()
        assert [log.end_offset for log in logs.all()] == [7, 7, 7]
        await logs.close()

    site.run(fill)
    site.run(look)


class CountingWork:
    """Counts the work of the host: how much runs at a time, and the order in which it began."""

    def __init__(self, host: Host) -> None:
        self.inner = host.work
        self.running = 0
        self.most = 0

    async def run(self, fn: Callable[..., T], *values: object) -> T:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.inner.run(fn, *values)
        finally:
            self.running -= 1


def test_recovery_runs_in_parallel_up_to_the_limit_of_a_directory(sim: SimSite) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open(logs_config=NO_CHECKPOINTS)
        for topic in range(1, 31):
            await write(await create(logs, topic), 3)

    async def recover(host: Host) -> tuple[int, float]:
        host.work = counting = CountingWork(host)
        began = asyncio.get_running_loop().time()
        logs = await host.open(logs_config=LogsConfig(parallel_per_directory=parallel))
        assert len(logs) == 30
        return counting.most, asyncio.get_running_loop().time() - began

    sim.run(fill)
    sim.machine.kill()
    took = {}
    for parallel in (1, 3):
        most, took[parallel] = sim.run(recover)
        sim.lose_power()
        assert most == 2 * parallel, "two directories"
    assert took[3] < took[1] / 2


def test_one_log_can_be_used_while_others_are_still_recovered(sim: SimSite) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open(logs_config=NO_CHECKPOINTS)
        for topic in range(1, 41):
            await write(await create(logs, topic), 3)

    async def recover(host: Host) -> None:
        logs = await host.open(logs_config=LogsConfig(parallel_per_directory=1), wait=False)
        assert len(logs) == 0
        assert len(logs.known()) == 40
        last = await logs.wait_open(log_id(40))
        assert last is not None
        assert len(logs) <= 6, "its turn comes next, not at the end"
        assert await write(last) == 4
        assert await logs.wait_open(log_id(99)) is None
        await logs.wait_all_open()
        assert len(logs) == 40
        await logs.close()

    sim.run(fill)
    sim.machine.kill()
    sim.run(recover)


def test_a_stop_during_recovery_leaves_the_rest_for_the_next_start(sim: SimSite) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open(logs_config=NO_CHECKPOINTS)
        for topic in range(1, 21):
            await write(await create(logs, topic), 3)

    async def stop_early(host: Host) -> None:
        logs = await host.open(logs_config=LogsConfig(parallel_per_directory=1), wait=False)
        waiting = asyncio.ensure_future(logs.wait_open(log_id(20)))
        await asyncio.sleep(0)
        await logs.wait_open(log_id(1))
        await logs.close()
        assert len(logs) < 20
        await waiting

    async def look(host: Host) -> None:
        logs = await host.open()
        assert [log.end_offset for log in logs.all()] == [3] * 20
        assert 0 < sum(log.report.clean for log in logs.all()) < 20

    sim.run(fill)
    sim.machine.kill()
    sim.run(stop_early)
    sim.run(look)


def test_a_log_that_cannot_be_opened_delays_no_other(site: Site) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open()
        for topic in range(1, 5):
            await write(await create(logs, topic))
        await logs.close()
        # A file where a directory must be.
        disk = host.places[0][0]
        disk.open(directory_name(log_id(9), "orders"), create=True).close()

    async def look(host: Host) -> None:
        logs = await host.open(wait=False)
        for topic in range(1, 5):
            assert await logs.wait_open(log_id(topic)) is not None
        async with asyncio.timeout(30):
            while log_id(9) not in logs.open_retries:  # noqa: ASYNC110 - a condition, with a deadline
                await asyncio.sleep(0.01)
        assert logs.failures == {}, "that is no proof of damage"
        assert logs.get(log_id(9)) is None
        assert not await logs.close(), "it was never open"

    site.run(fill)
    site.run(look)


# Removal


def test_a_removed_log_is_gone_at_once_and_its_files_soon(site: Site) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 30)
        kept = await create(logs, 2)
        await write(kept, 3)
        await asyncio.gather(logs.remove(log_id(1)), logs.remove(log_id(1)))
        await logs.remove(log_id(99))
        assert logs.known() == [log_id(2)]
        disk, store, _ = host.places[0]
        assert not [name for name in disk.list("") if parse_directory_name(name)]
        assert store.scan(key_prefix(log_id(1))) == []
        await logs.close()
        assert not [name for name in disk.list("") if name.endswith(".deleted")]

    async def look(host: Host) -> None:
        logs = await host.open()
        assert logs.known() == [log_id(2)]
        await logs.close()

    site.run(main)
    site.run(look)


async def test_a_log_can_be_created_while_the_old_one_is_removed(site: Site, host: Host) -> None:
    logs = await host.open()
    for value in (b"first", b"second", b"third"):
        log = await create(logs, 1)
        assert log.end_offset == 0
        await write(log, 20, value=value)
        removal = asyncio.ensure_future(logs.remove(log_id(1)))
        await asyncio.sleep(0)
        again = await create(logs, 1)
        assert removal.done()
        assert again is not log
        assert again.end_offset == 0
        await removal
        await logs.remove(log_id(1))
    await logs.close()
    assert all(not name.endswith(".deleted") for disk, _, _ in host.places for name in disk.list(""))


def test_a_removal_interrupted_by_a_crash_is_finished_by_the_next_start(sim: SimSite, world: SimWorld) -> None:
    """The power fails at every operation of a removal, of disk and store. Afterwards the log is complete or gone,
    and if it is gone nothing of it is left, also not in the store: the same log can be created again."""

    async def fill(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 30)
        logs.note_high_watermark(log_id(1), Offset(20))
        await logs.close()

    async def remove(host: Host) -> None:
        logs = await host.open()
        await logs.remove(log_id(1))
        await logs.close()

    async def look(host: Host) -> int:
        logs = await host.open()
        assert logs.failures == {}
        outcome = 0
        for log in logs.all():
            assert log.damaged is None
            assert log.end_offset == 30
            outcome = 1
        if not outcome:
            log = await create(logs, 1)
            assert (log.end_offset, log.recovery_point, logs.high_watermark(log_id(1))) == (0, 0, 0)
            assert log.damaged is None
            await logs.remove(log_id(1))
        await logs.close()
        for disk, store, _ in host.places:
            assert not [name for name in disk.list("") if name.endswith(".deleted")]
            assert bool(store.scan(key_prefix(log_id(1)))) == bool(outcome and disk is host.places[0][0])
        return outcome

    outcomes = {0: 0, 1: 0}
    for loss in (Loss.ALL, Loss.SOME):
        for kind in ("disk", "store"):
            for at in range(1, 40):
                sim.machine.lose_power(Loss.ALL)
                for label in sim.labels:
                    sim.machine.disk(label).wipe()
                    sim.machine.store(label).wipe()
                sim.run(fill)
                sim.machine.crash_loss = loss
                device, store = sim.machine.disk("disk-0"), sim.machine.store("disk-0")
                if kind == "disk":
                    device.crash_at_operation = device.operations + at
                else:
                    store.crash_at_commit = at
                with suppress(NodeDiedError):
                    sim.run(remove)
                was_reached = (device.crash_at_operation, store.crash_at_commit) == (None, None)
                device.crash_at_operation = store.crash_at_commit = None
                outcomes[sim.run(look)] += 1
                if not was_reached:
                    break
            else:
                raise AssertionError("a removal has fewer operations than this")
    assert outcomes[0] > 4
    assert outcomes[1] > 4


def test_a_removed_log_with_corrupt_state_leaves_nothing_behind(sim: SimSite) -> None:
    async def fill(host: Host) -> None:
        logs = await host.open()
        await write(await create(logs, 1), 30)
        await logs.close()

    async def remove(host: Host) -> None:
        logs = await host.open()
        store = host.places[0][1]
        assert len(store.keys(key_prefix(log_id(1)))) > 3
        await logs.remove(log_id(1))
        assert store.scan(key_prefix(log_id(1))) == []
        await logs.close()

    sim.run(fill)
    device = sim.machine.store("disk-0")
    keys = [key for key in device.stored if key.startswith(key_prefix(log_id(1)))]
    for key in keys:
        device.flip_bit(key, 2)
    sim.run(remove)


async def test_a_waiter_for_a_removed_log_is_notified(host: Host) -> None:
    logs = await host.open()
    log = await create(logs, 1)
    first = log.wait_durable(log.append(batch(), leader_epoch=0).last_offset)
    await asyncio.sleep(0)
    second = log.wait_durable(log.append(batch(), leader_epoch=0).last_offset)
    await logs.remove(log_id(1))
    await first  # wait for its group
    with pytest.raises(StorageError, match="closed"):
        await second


def test_a_directory_fails_with_its_store_before_anything_else_is_acknowledged(sim: SimSite) -> None:
    """The next start may find the intent of a reset: records that were acknowledged after it would be gone."""

    async def main(host: Host) -> None:
        logs = await host.open(logs_config=NO_CHECKPOINTS)
        log = await create(logs, 1)
        await write(log, 3)
        home = logs.directory_of(log_id(1))
        assert home is not None
        sim.machine.store(sim.labels[logs.directories.index(home)]).faults.arm("commit")
        with pytest.raises(StorageError):
            await log.reset_to(Offset(10))
        assert home.failed is not None
        with pytest.raises(StorageError):
            await write(log, 1)

    sim.run(main)
