"""A copy of a damaged segment is installed only if its segment is still there; what a crash leaves is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from crc32c import crc32c
from support.logs.single_log import PATH, Lab, batch, open_log, read_all

from tidelog.log import segment_restore
from tidelog.log.log import Log
from tidelog.log.segment import LOG, RESTORED, file_path
from tidelog.log.segment_restore import RUNS_MAX, combine, replace_file, write_piece
from tidelog.model.errors import StorageError, WorkFailedError
from tidelog.world.simulated import SimNode

T = TypeVar("T")


def fill(log: Log, count: int) -> None:
    for _ in range(count):
        log.append(batch(1, value=b"v" * 100), leader_epoch=1)


def is_damaged(log: Log) -> bool:
    return log.damaged is not None


def test_a_copy_that_a_crash_left_behind_is_removed_when_the_log_opens(lab: Lab) -> None:
    path = file_path(PATH, 0, LOG) + RESTORED

    async def leave(node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 40)
        await log.checkpoint()
        log.disk.open(path, create=True).append(b"half of a copy")

    async def again(node: SimNode) -> int:
        log = await open_log(node)
        assert not log.disk.exists(path)
        return len(await read_all(log))

    lab.run(leave)
    lab.kill()
    assert lab.run(again) == 40


async def test_a_segment_that_was_dropped_meanwhile_is_not_restored(node: SimNode) -> None:
    log = await open_log(node)
    fill(log, 40)
    await log.checkpoint()
    info = log.segments.sealed[0]
    copy = file_path(PATH, info.base_offset, LOG) + RESTORED
    log.disk.open(copy, create=True).append(b"x" * info.size)
    await log.advance_start(info.next_offset)
    assert not await log.restore_segment(info, copy)
    assert info not in log.segments.sealed


async def test_readers_get_the_restored_bytes(lab: Lab, node: SimNode) -> None:
    log = await open_log(node)
    fill(log, 40)
    await log.checkpoint()
    info = log.segments.sealed[0]
    path = file_path(PATH, info.base_offset, LOG)
    sound = log.disk.open(path).read(0, info.size)
    lab.machine.disk().flip_bit(path, 100, 3)
    assert (await log.scrub(info.base_offset)).fault is not None
    assert is_damaged(log)
    log.disk.open(path + RESTORED, create=True).append(sound)
    assert await log.restore_segment(info, path + RESTORED)
    assert not is_damaged(log)
    log.validate()
    assert bytes((await log.read(0, bytes_max=info.size)).data) == sound[: info.size]
    fill(log, 1)
    await log.close()


async def test_a_restored_segment_does_not_end_the_damage_of_segments_that_were_moved_away(node: SimNode) -> None:
    log = await open_log(node)
    fill(log, 40)
    await log.checkpoint()
    info = log.segments.sealed[0]
    path = file_path(PATH, info.base_offset, LOG)
    sound = log.disk.open(path).read(0, info.size)
    node.machine.disk().flip_bit(path, 100, 3)
    assert (await log.scrub(info.base_offset)).fault is not None
    log.mark_missing(info.next_offset)
    log.disk.open(path + RESTORED, create=True).append(sound)
    assert await log.restore_segment(info, path + RESTORED)
    assert log.damaged is not None


def test_a_start_after_a_restore_finds_the_log_sound_by_its_checksum(lab: Lab) -> None:
    """The power fails when the restored file has its name, and before the damage is deleted."""
    path = file_path(PATH, 0, LOG)

    async def restore(node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 40)
        await log.checkpoint()
        info = log.segments.sealed[0]
        sound = log.disk.open(path).read(0, info.size)
        node.machine.disk().flip_bit(path, 100, 3)
        assert (await log.scrub(0)).fault is not None
        log.disk.open(path + RESTORED, create=True).append(sound)
        node.machine.store().faults.arm("commit", times=2)
        with pytest.raises(StorageError):
            await log.restore_segment(info, path + RESTORED)
        assert is_damaged(log)

    async def again(node: SimNode) -> tuple[bool, int]:
        log = await open_log(node)
        return is_damaged(log), log.end_offset

    lab.run(restore)
    lab.kill()
    lab.machine.store().faults.clear()
    assert lab.run(again) == (False, 40)


def test_a_start_keeps_damage_of_a_segment_that_still_fails_its_checksum(lab: Lab) -> None:
    async def rot(node: SimNode) -> None:
        log = await open_log(node)
        fill(log, 40)
        await log.checkpoint()
        node.machine.disk().flip_bit(file_path(PATH, 0, LOG), 100, 3)
        assert (await log.scrub(0)).fault is not None

    async def again(node: SimNode) -> bool:
        return is_damaged(await open_log(node))

    lab.run(rot)
    lab.kill()
    assert lab.run(again)


async def test_a_replaced_file_is_removed_off_the_event_loop(node: SimNode) -> None:
    """A helper that dies for ever: the damaged file stays, and so does the damage."""
    log = await open_log(node)
    fill(log, 40)
    await log.checkpoint()
    info = log.segments.sealed[0]
    path = file_path(PATH, 0, LOG)
    sound = log.disk.open(path).read(0, info.size)
    node.machine.disk().flip_bit(path, 100, 3)
    assert (await log.scrub(0)).fault is not None
    log.disk.open(path + RESTORED, create=True).append(sound)
    node.work.dying.add("replace_file")
    with pytest.raises(WorkFailedError):
        await log.restore_segment(info, path + RESTORED)
    assert is_damaged(log)
    node.work.dying.clear()
    assert await log.restore_segment(info, path + RESTORED)
    assert not is_damaged(log)


async def test_a_copy_that_is_gone_ends_no_damage(node: SimNode) -> None:
    disk = node.disk()
    disk.open("copy", create=True).append(b"new")
    disk.open("target", create=True).append(b"old")
    assert replace_file(disk, "copy", "target")
    assert not replace_file(disk, "copy", "target"), "a helper that died after the rename"
    assert disk.open("target").read(0, 3) == b"new"


async def test_copies_are_combined_in_calls_of_bounded_size(node: SimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one helper of a node is free in between. Runs that cross the border of two calls are one."""
    monkeypatch.setattr(segment_restore, "CALL_BYTES", 4096)
    disk = node.disk()
    sound = bytes(range(250)) * 40
    for name, damage in (("own", range(4000, 4200)), ("other", range(9000, 9002))):
        data = bytearray(sound)
        for at in damage:
            data[at] ^= 0x41
        disk.open(name, create=True).append(bytes(data))
    calls: list[tuple[int, int]] = []

    class Counting:
        async def run(self, fn: Callable[..., T], *values: Any) -> T:
            start = 4 if fn.__name__ == "write_combined" else 3
            calls.append((values[start], values[start + 1]))
            return await node.work.run(fn, *values)

    assert await combine(Counting(), disk, "own", "other", "made", len(sound), crc32c(sound))
    assert disk.open("made").read(0, 20_000) == sound
    assert max(end - start for start, end in calls) <= 4096
    assert not await combine(Counting(), disk, "own", "other", "again", len(sound), 1)


async def test_a_piece_that_is_written_twice_is_there_once(node: SimNode) -> None:
    disk = node.disk()
    for position, data in ((0, b"abc"), (0, b"abc"), (3, b"de"), (3, b"de")):
        write_piece(disk, "copy", position, data)
    assert disk.open("copy").read(0, 100) == b"abcde"


@pytest.mark.parametrize("places", [(0,), (0, 999), (5, 6, 700), tuple(range(0, 4 * 30, 30))])
async def test_two_damaged_copies_give_a_sound_one(node: SimNode, places: tuple[int, ...]) -> None:
    disk = node.disk()
    sound = bytes(range(250)) * 4
    for number, name in enumerate(("own", "other")):
        data = bytearray(sound)
        for at in places[number::2]:
            data[at] ^= 0x41
        disk.open(name, create=True).append(bytes(data))
    assert await combine(node.work, disk, "own", "other", "made", len(sound), crc32c(sound))
    assert disk.open("made").read(0, 2_000) == sound


async def test_copies_that_differ_in_too_many_blocks_or_at_one_place_give_none(node: SimNode) -> None:
    disk = node.disk()
    sound = bytes(4096 * 12)
    mine, theirs = bytearray(sound), bytearray(sound)
    for block in range(0, 2 * (RUNS_MAX + 1), 2):
        mine[block * 4096] = 1
    disk.open("mine", create=True).append(bytes(mine))
    disk.open("sound", create=True).append(sound)
    assert not await combine(node.work, disk, "mine", "sound", "made", len(sound), 1)
    theirs[0], mine = 2, bytearray(sound)
    mine[0] = 1
    disk.open("one", create=True).append(bytes(mine))
    disk.open("two", create=True).append(bytes(theirs))
    assert not await combine(node.work, disk, "one", "two", "made", len(sound), 1)
    assert not disk.exists("made")
