"""What a simulated disk loses, keeps, refuses and delays."""

import asyncio
import errno
import random
from collections.abc import Iterator

import pytest

from tidelog.model.errors import DiskFullError, StorageError
from tidelog.world.simulated import Latency, Loss, MachineDied, NodeDiedError, SimMachine, SimNode, SimWorld
from tidelog.world.simulated.device import PAGE_BYTES


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(seed=5) as world:
        yield world


@pytest.fixture
def machine(world: SimWorld) -> SimMachine:
    return world.machine("a")


def reboot(machine: SimMachine, loss: Loss | None) -> SimNode:
    if loss is None:
        machine.kill()
    else:
        machine.lose_power(loss)
    return machine.boot()


def test_a_killed_process_loses_nothing_and_its_handles_answer_no_more(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"abc")
    node = reboot(machine, None)
    assert node.disk().open("log").read(0, 10) == b"abc"
    for call in (lambda: file.append(b"d"), lambda: file.read(0, 1), lambda: disk.open("log"), disk.free_bytes):
        with pytest.raises(MachineDied):
            call()
    assert machine.disk().raw("log") == b"abc"


def test_unsynced_bytes_are_lost_with_the_power(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"synced")
    disk.sync([file], [""])
    file.append(b"not synced")
    disk = reboot(machine, Loss.ALL).disk()
    assert disk.open("log").read(0, 100) == b"synced"


def test_an_unsynced_truncation_is_lost_with_the_power(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"0123456789")
    disk.sync([file], [""])
    file.truncate(3)
    file.append(b"x")
    assert machine.disk().durable("log") == b"0123456789"
    disk = reboot(machine, Loss.ALL).disk()
    assert disk.open("log").read(0, 100) == b"0123456789"


def test_a_name_survives_only_a_sync_of_its_directory(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    disk.make_directory("topic")
    disk.sync([], [""])
    file = disk.open("topic/new", create=True)
    file.append(b"abc")
    disk.sync([file])
    disk = reboot(machine, Loss.ALL).disk()
    assert disk.list("topic") == []

    file = disk.open("topic/new", create=True)
    file.append(b"abc")
    disk.sync([file], ["topic"])
    disk.rename("topic/new", "topic/newer")
    disk = reboot(machine, Loss.ALL).disk()
    assert disk.list("topic") == ["new"]

    disk.remove("topic/new")
    disk = reboot(machine, Loss.ALL).disk()
    assert disk.open("topic/new").read(0, 10) == b"abc"
    disk.remove("topic/new")
    disk.sync([], ["topic"])
    assert reboot(machine, Loss.ALL).disk().list("topic") == []


def test_a_directory_whose_own_name_was_not_synced_is_lost_with_all_in_it(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    disk.make_directory("a/b")
    file = disk.open("a/b/log", create=True)
    file.append(b"abc")
    disk.sync([file], ["a/b", "a"])
    assert reboot(machine, Loss.ALL).disk().list("") == []


def test_a_replaced_file_comes_back_when_the_rename_was_not_synced(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    old, new = disk.open("old", create=True), disk.open("new", create=True)
    old.append(b"old")
    new.append(b"new")
    disk.sync([old, new], [""])
    disk.rename("new", "old")
    assert disk.open("old").read(0, 10) == b"new"
    disk = reboot(machine, Loss.ALL).disk()
    assert {name: disk.open(name).read(0, 10) for name in disk.list("")} == {"old": b"old", "new": b"new"}


def test_a_move_between_directories_is_one_step_whichever_of_them_is_synced(machine: SimMachine) -> None:
    for synced in ("a", "b"):
        disk = (machine.boot() if machine.node is None else reboot(machine, Loss.ALL)).disk()
        disk.remove_directory("a")
        disk.remove_directory("b")
        disk.make_directory("a")
        disk.make_directory("b")
        disk.sync([], [""])
        disk.open("a/file", create=True)
        disk.rename("a/file", "b/file")
        disk.sync([], [synced])
        disk = reboot(machine, Loss.ALL).disk()
        assert (disk.list("a"), disk.list("b")) == ([], ["file"])


def test_a_lost_power_tears_the_last_write_only(machine: SimMachine) -> None:
    sizes = set()
    for _ in range(50):
        disk = (machine.boot() if machine.node is None else reboot(machine, Loss.ALL)).disk()
        file = disk.open("log", create=True)
        file.truncate(0)
        file.append(b"0123456789")
        file.append(b"abcdefghij")
        data = reboot(machine, Loss.TORN).disk().open("log").read(0, 100)
        assert b"0123456789abcdefghij".startswith(data)
        sizes.add(len(data))
    assert min(sizes) >= 10
    assert max(sizes) < 20
    assert len(sizes) > 5


def test_any_part_of_what_was_not_synced_may_survive_and_all_of_what_was(machine: SimMachine) -> None:
    """Prefixes, torn writes, holes of zeros, old and new names: all occur, and never less than what was synced."""
    draw = random.Random(3)
    seen: set[str] = set()
    for _ in range(300):
        if machine.node is not None:
            machine.lose_power(Loss.ALL)
        machine.disk().wipe()
        disk = machine.boot().disk()
        file = disk.open("log", create=True)
        synced = draw.randbytes(draw.randrange(3 * PAGE_BYTES))
        file.append(synced)
        disk.sync([file], [""])
        writes = [bytes([1 + number]) * draw.randrange(1, 2 * PAGE_BYTES) for number in range(4)]
        for write in writes:
            file.append(write)
        disk.open("new", create=True)
        disk = reboot(machine, Loss.SOME).disk()
        data, whole = disk.open("log").read(0, 1 << 20), synced + b"".join(writes)
        assert data.startswith(synced)
        assert len(data) <= len(whole)
        assert all(
            found in (0, wanted) for found, wanted in zip(data[len(synced) :], whole[len(synced) :], strict=False)
        )
        ends = [len(synced) + sum(map(len, writes[:count])) for count in range(5)]
        if len(data) == len(whole):
            seen.add("everything" if data == whole else "a hole of zeros")
        else:
            seen.add("nothing" if data == synced else "whole writes" if len(data) in ends else "a torn write")
        seen.add("name kept" if disk.exists("new") else "name lost")
    assert seen == {
        "everything",
        "a hole of zeros",
        "nothing",
        "whole writes",
        "a torn write",
        "name kept",
        "name lost",
    }


def test_old_bytes_do_not_shine_through_a_file_that_was_cut(machine: SimMachine) -> None:
    for _ in range(200):
        if machine.node is not None:
            machine.lose_power(Loss.ALL)
        machine.disk().wipe()
        disk = machine.boot().disk()
        file = disk.open("log", create=True)
        file.append(b"o" * (3 * PAGE_BYTES))
        disk.sync([file], [""])
        file.truncate(PAGE_BYTES // 2)
        file.append(b"n" * (4 * PAGE_BYTES))
        data = reboot(machine, Loss.SOME).disk().open("log").read(0, 1 << 20)
        assert data.startswith(b"o" * (PAGE_BYTES // 2))
        if b"n" in data:
            assert b"o" not in data[PAGE_BYTES // 2 :]


def test_a_sync_covers_what_was_written_before_it_and_takes_time(world: SimWorld, machine: SimMachine) -> None:
    async def main(node: SimNode) -> None:
        disk = node.disk()
        file = disk.open("log", create=True)
        file.append(b"before")
        began = node.loop.time()
        sync = asyncio.ensure_future(disk.sync_many([file], [""]))
        await asyncio.sleep(0)
        file.append(b", during")
        assert machine.disk().durable("log") == b""
        await sync
        assert node.loop.time() > began

    world.run(machine.boot(), main)
    assert machine.disk().durable("log") == b"before"
    machine.disk().validate()
    assert reboot(machine, Loss.ALL).disk().open("log").read(0, 100) == b"before"


def test_a_sync_that_the_power_interrupts_never_ends(world: SimWorld, machine: SimMachine) -> None:
    machine.disk().sync_latency = Latency(1.0, 1.0)
    node = machine.boot()
    file = node.disk().open("log", create=True)
    node.disk().sync([], [""])
    file.append(b"abc")
    done: list[str] = []

    async def sync() -> None:
        try:
            await node.disk().sync_many([file])
        finally:
            done.append("acted for the dead")

    node.spawn(sync())
    world.run_for(0.5)
    disk = reboot(machine, Loss.ALL).disk()
    world.run_for(10)
    assert disk.open("log").read(0, 10) == b""
    assert done == []


def test_a_sync_that_was_handed_to_the_device_ends_though_the_process_is_killed(
    world: SimWorld, machine: SimMachine
) -> None:
    machine.disk().sync_latency = Latency(1.0, 1.0)
    node = machine.boot()
    file = node.disk().open("log", create=True)
    file.append(b"abc")
    node.spawn(node.disk().sync_many([file], [""]))
    world.run_for(0.5)
    machine.kill()
    world.run_for(1)
    assert machine.disk().durable("log") == b"abc"


def test_after_a_failed_sync_the_bytes_read_well_until_the_power_goes(world: SimWorld, machine: SimMachine) -> None:
    node = machine.boot()

    async def main(node: SimNode) -> None:
        disk = node.disk()
        file = disk.open("log", create=True)
        await disk.sync_many([file], [""])
        file.append(b"lost")
        machine.disk().fail("sync")
        with pytest.raises(StorageError, match=r"sync log: Input/output error \(EIO\)"):
            await disk.sync_many([file])
        file.append(b"kept")
        await disk.sync_many([file])
        assert file.read(0, 100) == b"lostkept"

    world.run(node, main)
    assert reboot(machine, None).disk().open("log").read(0, 100) == b"lostkept"
    assert reboot(machine, Loss.ALL).disk().open("log").read(0, 100) == b"\0\0\0\0kept"


def test_pages_of_a_failed_sync_may_leave_the_cache_early(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"abc")
    disk.sync([file], [""])
    file.append(b"lost")
    machine.disk().fail("sync")
    with pytest.raises(StorageError):
        disk.sync([file])
    machine.disk().evict()
    assert disk.open("log").read(0, 100) == b"abc"


def test_a_failed_sync_of_a_group_loses_at_least_one_file_and_the_names(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    files = [disk.open(str(number), create=True) for number in range(5)]
    disk.sync(files, [""])
    for file in files:
        file.append(b"abc")
    disk.open("new", create=True)
    machine.disk().fail("sync", path="3")
    with pytest.raises(StorageError):
        disk.sync(files, [""])
    disk.sync(files, [""])
    disk = reboot(machine, Loss.ALL).disk()
    assert b"" in [disk.open(str(number)).read(0, 3) for number in range(5)]
    assert not disk.exists("new")


def test_a_full_disk_keeps_all_of_an_append_or_nothing(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"abc")
    machine.disk().fill(free_bytes=5)
    with pytest.raises(DiskFullError, match="ENOSPC"):
        file.append(b"123", b"456")
    assert file.size == 3
    assert disk.free_bytes() == 5
    file.append(b"12345")
    other = disk.open("other", create=True)
    with pytest.raises(DiskFullError):
        other.append(b"x")
    file.truncate(4)
    other.append(b"1234")
    disk.remove("log")
    assert disk.free_bytes() == 4
    machine.disk().validate()
    machine.disk().heal()
    other.append(bytes(1000))


def test_errors_come_when_they_are_armed_for_the_operation_and_the_path(world: SimWorld, machine: SimMachine) -> None:
    async def main(node: SimNode) -> None:
        disk = node.disk()
        one, two = disk.open("one", create=True), disk.open("two", create=True)
        machine.disk().fail("append", path="two", times=2)
        one.append(b"abc")
        for _ in range(2):
            with pytest.raises(StorageError, match="append two"):
                two.append(b"abc")
        two.append(b"abc")
        machine.disk().fail("read", times=2)
        with pytest.raises(StorageError, match="read one"):
            one.read(0, 1)
        with pytest.raises(StorageError, match="read one"):
            await one.read_async(0, 1)
        assert await one.read_async(0, 1) == b"a"
        machine.disk().fail("rename", number=errno.EACCES)
        with pytest.raises(StorageError, match="EACCES"):
            disk.rename("one", "three")

    world.run(machine.boot(), main)


def test_a_disk_that_turns_read_only_is_still_read(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"abc")
    machine.disk().is_read_only = True
    for call in (lambda: file.append(b"x"), lambda: disk.sync([file]), lambda: disk.open("new", create=True)):
        with pytest.raises(StorageError, match="EROFS"):
            call()
    assert file.read(0, 3) == b"abc"


def test_a_flipped_bit_and_a_shorter_file_survive_everything(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    file = disk.open("log", create=True)
    file.append(b"abcdef")
    disk.sync([file], [""])
    machine.disk().flip_bit("log", 1, bit=0)
    assert reboot(machine, Loss.ALL).disk().open("log").read(0, 10) == b"accdef"
    machine.disk().cut("log", 2)
    assert reboot(machine, Loss.ALL).disk().open("log").read(0, 10) == b"ac"


def test_a_cold_read_sends_the_reader_the_slow_way(world: SimWorld, machine: SimMachine) -> None:
    machine.disk().cold_read_probability = 1.0

    async def main(node: SimNode) -> None:
        file = node.disk().open("log", create=True)
        file.append(b"abc")
        assert file.read_nowait(0, 3) is None
        assert await file.read_async(0, 3) == b"abc"

    world.run(machine.boot(), main)


def test_stalled_syncs_wait_until_the_disk_is_healed(world: SimWorld, machine: SimMachine) -> None:
    node = machine.boot()
    file = node.disk().open("log", create=True)
    file.append(b"abc")
    machine.disk().begin_stall()
    task = node.spawn(node.disk().sync_many([file], [""]))
    world.run_for(100)
    assert not task.done()
    file.append(b"the loop goes on")
    machine.disk().heal()
    world.run_until(task.done, timeout=1)
    assert machine.disk().durable("log") == b"abc"


def test_a_disk_that_stalls_with_everything_holds_the_node_that_touches_it(
    world: SimWorld, machine: SimMachine
) -> None:
    node = machine.boot()
    ticks: list[float] = []

    async def tick() -> None:
        file = node.disk().open("log", create=True)
        while True:
            await asyncio.sleep(1)
            ticks.append(world.scheduler.now_ns)
            file.append(b"x")

    node.spawn(tick())
    world.run_for(3.5)
    assert len(ticks) == 3
    machine.disk().begin_stall(everything=True)
    world.run_for(100)
    assert len(ticks) == 4
    machine.disk().heal()
    world.run_for(3.5)
    assert len(ticks) > 6


def test_the_power_can_go_before_any_chosen_operation(world: SimWorld, machine: SimMachine) -> None:
    """The same program, cut at every operation in turn: each run leaves the state of just before it."""

    async def main(node: SimNode) -> None:
        disk = node.disk()
        file = disk.open("log", create=True)
        for number in range(3):
            file.append(b"%d" % number)
            await disk.sync_many([file], [""])

    left = []
    for operation in range(1, 8):
        machine.disk().wipe()
        machine.disk().operations = 0
        machine.disk().crash_at_operation = operation
        machine.crash_loss = Loss.ALL
        node = machine.boot()
        with pytest.raises(NodeDiedError, match="died"):
            world.run(node, main)
        disk = machine.boot().disk()
        left.append(disk.open("log").read(0, 10) if disk.exists("log") else None)
        machine.kill()
    assert left == [None, None, None, b"0", b"0", b"01", b"01"]
    machine.disk().crash_at_operation = None
    world.run(machine.boot(), main)


def test_two_writers_of_one_file_are_noticed(machine: SimMachine) -> None:
    disk = machine.boot().disk()
    one, two = disk.open("log", create=True), disk.open("log")
    one.append(b"abc")
    with pytest.raises(AssertionError, match="another writer"):
        two.append(b"def")
