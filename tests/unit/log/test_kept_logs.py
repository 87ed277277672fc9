"""Records that a log gives up are kept beside it, whatever crashes on the way."""

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from logs_world import Host, SimSite, create, log_id, write

from tidelog.log.batch import read_header
from tidelog.log.checkpoint import key_prefix
from tidelog.log.directories import parse_kept_name
from tidelog.log.keeping import KEPT_MAX, NOTE, KeptRecords, covers, decode_note, encode_note
from tidelog.log.log import Damage
from tidelog.log.logs import Logs
from tidelog.model.errors import CorruptStateError, DiskFullError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.disk import Disk
from tidelog.world.simulated import Loss, NodeDiedError, SimWorld

COUNT = 60


@pytest.fixture
def sim() -> Iterator[SimSite]:
    with SimWorld(21) as world:
        yield SimSite(world, directories=1)


def offsets_in(disk: Disk, name: str) -> set[int]:
    found: set[int] = set()
    for file_name in disk.list(name):
        if not file_name.endswith(".log"):
            continue
        file = disk.open(f"{name}/{file_name}")
        data, position = file.read(0, file.size), 0
        file.close()
        while position < len(data):
            header = read_header(data, position)
            found.add(int(header.base_offset))
            position += header.size
    return found


def kept_names(disk: Disk) -> list[str]:
    return [name for name in disk.list("") if parse_kept_name(name) is not None]


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


def test_a_log_that_is_given_up_is_kept_whole_and_another_takes_its_place(sim: SimSite) -> None:
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


def test_what_a_cut_takes_away_is_kept_and_dropped_when_the_log_has_it_again(sim: SimSite) -> None:
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


def test_a_copy_is_not_dropped_for_other_records_at_the_same_offsets(sim: SimSite) -> None:
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


async def reset(logs: Logs, _: int) -> None:
    log = logs.get(log_id(1))
    assert log is not None
    await logs.keep_all(log_id(1), 0, "it is copied")
    await log.reset_to(0)
    assert log.end_offset == 0


def crash_in_a_cut(number: int, loss: Loss, cut: Callable[[Logs, int], Coroutine[Any, Any, None]]) -> bool:
    """The machine loses its power at this operation of a cut, and then cuts again; whether the cut had so many."""
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
            if log.damaged is not None:
                await logs.keep_tail(log_id(1), log.damaged.good_end, "damaged")
                await log.repair()
            if log.end_offset > 7:
                await cut(logs, 7)
            found = set().union(*(offsets_in(disk, name) for name in [log.path, *kept_names(disk)]))
            assert found >= everything, f"lost {everything - found} after operation {number}"
            noted = [name for name in kept_names(disk) if disk.exists(f"{name}/{NOTE}")]
            assert noted == kept_names(disk), "a copy without a note is overwritten by the next one"

        has_crashed = False
        try:
            sim.run(main)
        except NodeDiedError:
            has_crashed = True
        device.crash_at_operation = None
        sim.run(look)
    return has_crashed


@pytest.mark.parametrize("loss", [Loss.ALL, Loss.SOME])
@pytest.mark.parametrize("change", [cut, reset])
def test_a_crash_at_any_point_of_a_cut_loses_no_record(
    change: Callable[[Logs, int], Coroutine[Any, Any, None]], loss: Loss
) -> None:
    points = next(number for number in range(1, 200) if not crash_in_a_cut(number, loss, change))
    assert points > 5


def test_a_whole_log_is_kept_on_a_disk_that_has_no_space_for_a_second_copy(sim: SimSite) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        data = b"".join([bytes((await log.read(at, bytes_max=1)).data) for at in range(COUNT)])
        sim.machine.disk("disk-0").fill(free_bytes=500)
        await reset(logs, 0)
        (name,) = kept_names(disk)
        assert offsets_in(disk, name) == set(range(COUNT))
        sim.machine.disk("disk-0").heal()
        log.append_replicated(data)
        await log.flush()
        await logs.kept.drop_covered(log, high_watermark=COUNT - 1)
        assert kept_names(disk) == [name], "not all of it is committed"
        await logs.kept.drop_covered(log, high_watermark=COUNT)
        assert kept_names(disk) == []

    sim.run(fill)
    sim.run(main)


@pytest.mark.parametrize("device", ["disk", "store"])
def test_a_log_whose_segments_are_kept_counts_as_damaged_if_the_reset_fails(sim: SimSite, device: str) -> None:
    async def main(host: Host) -> None:
        disk = host.places[0][0]
        logs = await host.open()
        log = logs.get(log_id(1))
        assert log is not None
        if device == "disk":
            sim.machine.disk("disk-0").fill()
        else:
            sim.machine.store("disk-0").fill()
        with pytest.raises(DiskFullError):
            await reset(logs, 0)
        damage = log.damaged
        assert damage is not None, "it does not claim what it no longer has"
        sim.machine.disk("disk-0").heal()
        sim.machine.store("disk-0").heal()
        await logs.keep_tail(log_id(1), damage.good_end, damage.reason)
        await log.repair()
        assert log.damaged is None
        assert log.end_offset == 0
        (name,) = kept_names(disk)
        assert offsets_in(disk, name) == set(range(COUNT))
        assert len(logs.kept) == 1
        await write(log, 3)

    sim.run(fill)
    sim.run(main)


def test_more_copies_than_the_limit_are_refused_and_nothing_is_removed(sim: SimSite) -> None:
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


def test_a_note_says_what_is_kept_and_one_that_cannot_be_read_is_no_reason_to_remove() -> None:
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
