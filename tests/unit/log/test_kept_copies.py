"""Records that a log gives up are kept beside it; crashes at any point lose none."""

import errno
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.logs.node_logs import Host, SimSite, create, log_id, write

from tidelog.log.batch import read_header
from tidelog.log.directories import list_logs
from tidelog.log.kept_copies import KEPT_MAX, NOTE, KeptRecords, covers, decode_note, encode_note
from tidelog.log.log import Damage
from tidelog.log.logs import Logs
from tidelog.log.stored_state import key_prefix
from tidelog.model.errors import CorruptStateError, DiskFullError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.disk import Disk
from tidelog.world.simulated import Loss, NodeDiedError, SimWorld
from tidelog.world.simulated.disk import SimDevice

COUNT = 60


@pytest.fixture
def sim() -> Iterator[SimSite]:
    with SimWorld(21) as world:
        yield SimSite(world, directories=1)


def offsets_in(disk: Disk, name: str, *, epoch: int | None = None) -> set[int]:
    """Of its batches, or of those of this epoch."""
    found: set[int] = set()
    for file_name in disk.list(name):
        if not file_name.endswith(".log"):
            continue
        file = disk.open(f"{name}/{file_name}")
        data, position = file.read(0, file.size), 0
        file.close()
        while position < len(data):
            header = read_header(data, position)
            if epoch in (None, header.leader_epoch):
                found.add(int(header.base_offset))
            position += header.size
    return found


def kept_names(disk: Disk) -> list[str]:
    return [name for _, name in list_logs(disk).kept]


async def fill(host: Host) -> None:
    logs = await host.open()
    await write(await create(logs, 1), COUNT)
    await logs.checkpoint()


async def cut(logs: Logs, good_end: int) -> None:
    log = logs.get(log_id(1))
    assert log is not None
    await log.mark_damaged(Damage(Offset(good_end), "rot"))
    await logs.keep_tail(log_id(1), good_end, "rot")
    await log.repair()
    assert log.end_offset == good_end


def test_a_log_that_is_given_up_is_kept_whole_and_can_be_created_again(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        await logs.give_up(log_id(1), "it cannot be opened")
        assert logs.known() == []
        assert host.places[0][1].keys(key_prefix(log_id(1))) == []
        (name,) = kept_names(disk)
        assert offsets_in(disk, name) == set(range(COUNT))
        assert disk.exists(f"{name}/{NOTE}")
        assert (await create(logs, 1)).end_offset == 0
        assert len(logs.kept) == 1

    async def again(host: Host) -> None:
        logs = await host.open()
        assert [log.end_offset for log in logs.all()] == [0]
        assert len(logs.kept) == 1
        await logs.kept.drop(log_id(1))
        assert kept_names(host.places[0][0]) == []

    sim.run(fill)
    sim.run(main)
    sim.run(again)


def test_truncated_records_are_kept_until_the_log_has_them_again(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        assert len(log.sealed_segments()) > 2, "some segments are moved, one is copied"
        data = b"".join([bytes((await log.read(at, bytes_max=1)).data) for at in range(7, COUNT)])
        await cut(logs, 7)
        (name,) = kept_names(disk)
        assert set(range(7, COUNT)) <= offsets_in(disk, name)
        await logs.kept.drop_covered(log, high_watermark=7)
        assert kept_names(disk) == [name]
        log.append_replicated(data)
        await log.flush()
        await logs.kept.drop_covered(log, high_watermark=COUNT - 1)
        assert kept_names(disk) == [name], "not all of it is committed"
        await logs.kept.drop_covered(log, high_watermark=COUNT)
        assert kept_names(disk) == []

    sim.run(fill)
    sim.run(main)


def test_a_kept_copy_is_not_dropped_before_the_truncation(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        await logs.keep_tail(log_id(1), COUNT - 1, "its leader does not have them")
        await logs.kept.drop_covered(log, high_watermark=COUNT)
        await log.truncate(COUNT - 1)
        (name,) = kept_names(disk)
        assert COUNT - 1 in offsets_in(disk, name)

    sim.run(fill)
    sim.run(main)


def test_a_kept_copy_is_not_dropped_for_other_records_at_the_same_offsets(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        await cut(logs, 7)
        log = logs.get(log_id(1))
        assert log is not None
        log.assign_epoch(5)
        await write(log, 2 * COUNT)
        await logs.kept.drop_covered(log, high_watermark=log.end_offset)
        assert len(kept_names(host.places[0][0])) == 1

    sim.run(fill)
    sim.run(main)


def crash_in_a_cut(number: int, loss: Loss) -> bool:
    """Lose power at this operation of a truncation and truncate again. Returns whether it had that many operations."""
    everything = set(range(COUNT))
    with SimWorld(number) as world:
        sim = SimSite(world, directories=1)
        sim.run(fill)
        device = sim.machine.disk("disk-0")
        sim.machine.crash_loss = loss

        async def main(host: Host) -> None:
            logs = await host.open()
            device.crash_at_operation = device.operations + number
            await cut(logs, 7)

        async def look(host: Host) -> None:
            disk = host.places[0][0]
            names = [name for name in disk.list("") if name.startswith("orders")]
            found = set().union(*(offsets_in(disk, name) for name in names))
            assert found >= everything, f"lost {everything - found} at operation {number}"
            logs = await host.open()
            log = logs.get(log_id(1))
            assert log is not None
            if log.end_offset > 7:
                await cut(logs, 7)
            found = set().union(*(offsets_in(disk, name) for name in [log.path, *kept_names(disk)]))
            assert found >= everything, f"lost {everything - found} after operation {number}"

        has_crashed = False
        try:
            sim.run(main)
        except NodeDiedError:
            has_crashed = True
        device.crash_at_operation = None
        sim.run(look)
    return has_crashed


@pytest.mark.parametrize("loss", [Loss.ALL, Loss.SOME])
def test_a_crash_at_any_point_of_a_kept_truncation_loses_no_record(loss: Loss) -> None:
    points = next(number for number in range(1, 200) if not crash_in_a_cut(number, loss))
    assert points > 5


async def lose_middle(host: Host) -> None:
    """Records acknowledged after the last recovery point, and a missing segment below it."""
    logs = await host.open()
    log = await create(logs, 1)
    await write(log, COUNT)
    await logs.checkpoint()
    await write(log, 20)
    host.places[0][0].remove(log.segments.file_path(log.sealed_segments()[1].base_offset))


@pytest.mark.parametrize("way", ["cut", "given up"])
def test_a_copy_with_records_past_the_recovery_point_is_not_covered_without_them(sim: SimSite, way: str) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        assert log.damaged is not None
        if way == "cut":
            await logs.keep_tail(log_id(1), log.damaged.good_end, "rot")
            await log.repair()
        else:
            await logs.give_up(log_id(1), "rot")
            log = await create(logs, 1)
        await write(log, COUNT - log.end_offset)
        assert log.end_offset == COUNT, "what was past the recovery point is lost"
        await logs.kept.drop_covered(log, high_watermark=COUNT)
        (name,) = kept_names(disk)
        assert COUNT + 19 in offsets_in(disk, name)
        await write(log, 20)
        await logs.kept.drop_covered(log, high_watermark=COUNT + 20)
        assert kept_names(disk) == []

    sim.run(lose_middle)
    sim.run(main)


def test_a_second_log_truncated_at_the_same_offset_is_kept_too(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        await cut(logs, 7)
        await logs.give_up(log_id(1), "it cannot be opened")
        log = await create(logs, 1)
        log.assign_epoch(5)
        await write(log, COUNT)
        await cut(logs, 7)
        assert len(kept_names(disk)) == 3
        assert all(
            set(range(7, COUNT)) <= offsets_in(disk, name) for name in (f"{log.path}.0.kept", f"{log.path}.2.kept")
        )

    sim.run(fill)
    sim.run(main)


def test_a_later_attempt_does_not_overwrite_segments_of_an_interrupted_one() -> None:
    """The records past the recovery point are in the copy only, after a crash at any point of the truncation."""
    for number in range(1, 200):
        with SimWorld(number) as world:
            sim = SimSite(world, directories=1)
            device = sim.machine.disk("disk-0")

            async def main(host: Host, device: SimDevice = device, number: int = number) -> None:
                logs = await host.open()
                log = await create(logs, 1)
                await write(log, COUNT)
                device.crash_at_operation = device.operations + number
                await logs.keep_tail(log_id(1), 7, "its leader does not have them")
                await log.truncate(7)

            async def look(host: Host, number: int = number) -> None:
                disk = host.places[0][0]
                logs = await host.open()
                log = logs.get(log_id(1))
                assert log is not None
                await logs.keep_tail(log_id(1), 7, "again")
                await log.truncate(7)
                log.assign_epoch(5)
                await write(log, COUNT)
                await logs.keep_tail(log_id(1), 7, "and again")
                found = set().union(*(offsets_in(disk, name, epoch=0) for name in [log.path, *kept_names(disk)]))
                assert found == set(range(COUNT)), f"lost after operation {number}"
                await logs.kept.drop_covered(log, high_watermark=log.end_offset)
                found = set().union(*(offsets_in(disk, name, epoch=0) for name in [log.path, *kept_names(disk)]))
                assert found == set(range(COUNT)), f"removed after operation {number}"

            has_crashed = False
            try:
                sim.run(main)
            except NodeDiedError:
                has_crashed = True
            device.crash_at_operation = None
            sim.run(look)
        if not has_crashed:
            break
    assert number > 5


@pytest.mark.parametrize("operation", ["rename", "append"])
def test_a_log_whose_segments_were_moved_without_a_truncation_is_damaged(sim: SimSite, operation: str) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        sim.machine.disk("disk-0").fail(operation, number=errno.EIO, times=1)
        with pytest.raises(StorageError):
            await logs.keep_tail(log_id(1), 7, "its leader does not have them")
        is_whole = offsets_in(disk, log.path) == set(range(COUNT))
        assert is_whole or log.damaged is not None
        await logs.keep_tail(log_id(1), 7, "its leader does not have them")
        await log.truncate(7)
        (name,) = kept_names(disk)
        assert set(range(7, COUNT)) <= offsets_in(disk, name)

    sim.run(fill)
    sim.run(main)


@pytest.mark.parametrize("place", ["", "/", ".0.kept"])
def test_a_failed_directory_sync_loses_no_record_when_the_truncation_is_retried(sim: SimSite, place: str) -> None:
    """Another sync would report the names as durable, and the truncation would remove the last copy."""
    device = sim.machine.disk("disk-0")

    async def main(host: Host) -> None:
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        path = "" if place == "/" else log.path + place  # the directory itself, the log's, or the copy's
        device.fail("sync", number=errno.EIO, path=path)
        for _ in range(2):
            with suppress(StorageError):
                await logs.keep_tail(log_id(1), 7, "its leader does not have them")
                if logs.get(log_id(1)) is not None:
                    await log.truncate(7)

    async def look(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        found = set().union(*(offsets_in(disk, name) for name in [log.path, *kept_names(disk)]))
        assert found >= set(range(COUNT))

    sim.run(fill)
    sim.run(main)
    device.heal()
    sim.lose_power(Loss.ALL)
    sim.run(look)


@pytest.mark.parametrize("free_bytes", [30, 100_000])
def test_a_copy_that_does_not_fit_the_disk_is_not_begun(sim: SimSite, free_bytes: int) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        sim.machine.disk("disk-0").fill(free_bytes=free_bytes)
        with pytest.raises(DiskFullError):
            await logs.keep_tail(log_id(1), 7, "its leader does not have them")
        assert all(disk.list(name) == [] for name in kept_names(disk))
        sim.machine.disk("disk-0").heal()
        await cut(logs, 7)

    sim.run(fill)
    sim.run(main)


def crash_in_giving_up(number: int) -> bool:
    """The first batch of the log is wrong. The power fails at this operation while the log is given up."""
    with SimWorld(number) as world:
        sim = SimSite(world, directories=1)
        sim.run(fill)
        device = sim.machine.disk("disk-0")
        sim.machine.crash_loss = Loss.ALL

        async def main(host: Host) -> None:
            logs = await host.open()
            log = logs.get(log_id(1))
            assert log is not None
            device.flip_bit(log.segments.file_path(0), 70)
            device.crash_at_operation = device.operations + number
            await logs.give_up(log_id(1), "it cannot be opened")

        async def look(host: Host) -> None:
            disk = host.places[0][0]
            logs = await host.open()
            log = logs.get(log_id(1)) or await create(logs, 1)
            if log.damaged is not None:
                await logs.keep_tail(log_id(1), log.damaged.good_end, log.damaged.reason)
                await log.repair()
            names = [log.path, *kept_names(disk)]
            found = set().union(*(offsets_in(disk, name) for name in names))
            assert found >= set(range(COUNT)), f"lost at operation {number}"
            await write(log, 3)

        has_crashed = False
        try:
            sim.run(main)
        except NodeDiedError:
            has_crashed = True
        device.crash_at_operation = None
        sim.run(look)
    return has_crashed


def test_a_crash_while_a_log_is_given_up_loses_no_record() -> None:
    points = next(number for number in range(1, 200) if not crash_in_giving_up(number))
    assert points > 2


def test_kept_copies_over_the_limit_are_rejected_and_nothing_is_removed(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        for number in range(KEPT_MAX):
            await cut(logs, COUNT - 1 - number)
        with pytest.raises(StorageError, match="limit"):
            await cut(logs, 2)
        log = logs.get(log_id(1))
        assert log is not None
        assert log.damaged is not None
        assert len(kept_names(host.places[0][0])) == KEPT_MAX
        with pytest.raises(StorageError, match="limit"):
            await logs.give_up(log_id(1), "too many")
        assert log_id(1) in logs.known()

    sim.run(fill)
    sim.run(main)


def test_a_copy_with_an_unreadable_note_is_not_removed() -> None:
    kept = KeptRecords(7, 20, ((0, 0), (3, 9), (4, 30)))
    assert decode_note(encode_note(kept, reason="rot", now_ms=1)) == kept
    assert kept.ends() == [(0, 9), (3, 20)]
    for data in (b"", b"{}", b'{"first": 1, "end": 2, "epochs": [1]}'):
        with pytest.raises(CorruptStateError):
            decode_note(data)


def test_a_copy_whose_end_or_epochs_are_not_known_is_never_covered(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        assert covers(log, COUNT, KeptRecords(0, COUNT, ((0, 0),)))
        assert not covers(log, COUNT, KeptRecords(0, -1, ((0, 0),)))
        assert not covers(log, COUNT, KeptRecords(0, COUNT, ()))
        assert not covers(log, COUNT, KeptRecords(0, COUNT, ((7, 0),)))

    sim.run(fill)
    sim.run(main)
