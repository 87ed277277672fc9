"""What `world.disk` promises, for the real disk and the simulated one alike."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tidelog.model.errors import StorageError
from tidelog.world.disk import Disk
from tidelog.world.real.disk import PARALLEL_SYNCS_MAX, RealDisk
from tidelog.world.simulated import SimWorld

T = TypeVar("T")


@dataclass
class Side:
    """One of the two worlds: its disk, and how to run a coroutine there."""

    disk: Disk
    run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(params=["real", "simulated"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Side]:
    if request.param == "real":
        disk = RealDisk(tmp_path)
        yield Side(disk, lambda main: asyncio.run(main()))
        disk.close()
    else:
        with SimWorld(seed=1) as world:
            node = world.machine("a").boot()
            yield Side(node.disk(), lambda main: world.run(node, lambda _: main()))


def test_appends_return_their_positions_and_read_back(side: Side) -> None:
    file = side.disk.open("log", create=True)
    assert file.append(b"abc") == 0
    assert file.append(b"de", bytearray(b"fg"), memoryview(b"hi")) == 3
    assert file.size == 9 == side.disk.size("log")
    assert file.read(0, 9) == b"abcdefghi"
    assert file.read(4, 3) == b"efg"
    assert file.path == "log"


def test_an_append_of_nothing_changes_nothing(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"abc")
    assert file.append(b"") == 3
    assert file.append() == 3
    assert file.size == 3


def test_an_append_of_more_buffers_than_one_call_takes_is_one_append(side: Side) -> None:
    file = side.disk.open("log", create=True)
    parts = [bytes([number % 251]) * 3 for number in range(3_000)]
    assert file.append(*parts) == 0
    assert file.read(0, 10_000) == b"".join(parts)


def test_a_read_is_short_only_at_the_end_of_the_file(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(bytes(100_000))
    assert len(file.read(0, 100_000)) == 100_000
    assert len(file.read(99_990, 100)) == 10
    assert file.read(100_000, 10) == b""
    assert file.read(200_000, 10) == b""


def test_read_nowait_gives_what_was_just_written_and_nothing_past_the_end(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"0123456789" * 1_000)
    assert file.read_nowait(5, 10) == b"5678901234"
    assert file.read_nowait(9_995, 100) == b"56789"
    assert file.read_nowait(10_000, 1) == b""
    assert file.read_nowait(20_000, 1) == b""


def test_read_async_reads_the_same(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"0123456789" * 1_000)

    async def main() -> list[bytes]:
        return list(await asyncio.gather(*(file.read_async(position, 4) for position in range(0, 40, 7))))

    assert side.run(main) == [file.read(position, 4) for position in range(0, 40, 7)]


def test_a_file_is_cut_and_goes_on_from_there(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"0123456789")
    file.truncate(4)
    assert file.size == 4 == side.disk.size("log")
    assert file.append(b"xy") == 4
    assert file.read(0, 100) == b"0123xy"


def test_a_file_cannot_be_cut_to_more_than_it_has(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"0123456789")
    with pytest.raises(AssertionError):
        file.truncate(11)


def test_a_second_handle_sees_what_the_first_wrote(side: Side) -> None:
    writer = side.disk.open("log", create=True)
    writer.append(b"abc")
    reader = side.disk.open("log")
    assert reader.size == 3
    writer.append(b"def")
    assert reader.read(0, 10) == b"abcdef"


def test_closing_twice_is_fine_and_a_closed_file_is_not_used(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"abc")
    file.close()
    file.close()
    with pytest.raises(AssertionError):
        file.append(b"d")
    with pytest.raises(AssertionError):
        file.read(0, 1)
    assert side.disk.open("log").read(0, 10) == b"abc"


def test_a_missing_file_is_an_error_that_names_it(side: Side) -> None:
    with pytest.raises(StorageError, match=r"open nowhere/log: No such file or directory \(ENOENT\)") as caught:
        side.disk.open("nowhere/log")
    assert caught.value.path == "nowhere/log"
    with pytest.raises(StorageError):
        side.disk.open("nowhere/log", create=True)
    with pytest.raises(StorageError):
        side.disk.size("log")
    with pytest.raises(StorageError):
        side.disk.list("nowhere")
    with pytest.raises(StorageError):
        side.disk.rename("log", "other")


def test_a_directory_is_not_a_file_and_a_file_not_a_directory(side: Side) -> None:
    side.disk.make_directory("topic")
    side.disk.open("file", create=True)
    with pytest.raises(StorageError, match="EISDIR"):
        side.disk.open("topic")
    with pytest.raises(StorageError, match="EISDIR"):
        side.disk.size("topic")
    with pytest.raises(StorageError, match="ENOTDIR"):
        side.disk.list("file")
    with pytest.raises(StorageError, match="EISDIR"):
        side.disk.rename("file", "topic")
    with pytest.raises(StorageError, match="EEXIST"):
        side.disk.make_directory("file")


@pytest.mark.parametrize("path", ["../log", "topic/../../log", "/etc/log", "a\0b"])
def test_no_path_leads_out_of_the_directory(side: Side, path: str) -> None:
    with pytest.raises(AssertionError):
        side.disk.open(path, create=True)
    with pytest.raises(AssertionError):
        side.disk.exists(path)


def test_names_are_listed_in_order(side: Side) -> None:
    side.disk.make_directory("a/b/c")
    side.disk.make_directory("a/b/c")
    for name in ("z", "m", "10", "9"):
        side.disk.open(f"a/{name}", create=True)
    assert side.disk.list("a") == ["10", "9", "b", "m", "z"]
    assert side.disk.list("a/b") == ["c"]
    assert side.disk.list("") == ["a"]
    assert side.disk.exists("a/b/c")
    assert side.disk.exists("")
    assert not side.disk.exists("a/b/d")


def test_a_rename_replaces_its_target_and_the_open_handle_stays(side: Side) -> None:
    side.disk.make_directory("a")
    side.disk.make_directory("b")
    file = side.disk.open("a/new", create=True)
    file.append(b"new")
    side.disk.open("b/old", create=True).append(b"old, and longer")
    side.disk.rename("a/new", "b/old")
    assert side.disk.list("a") == []
    assert side.disk.size("b/old") == 3
    file.append(b"er")
    assert side.disk.open("b/old").read(0, 100) == b"newer"


def test_a_directory_is_renamed_with_what_is_in_it(side: Side) -> None:
    side.disk.make_directory("topic-0/deep")
    side.disk.open("topic-0/deep/log", create=True).append(b"abc")
    side.disk.rename("topic-0", "topic-0.deleted")
    assert side.disk.list("") == ["topic-0.deleted"]
    assert side.disk.size("topic-0.deleted/deep/log") == 3
    side.disk.make_directory("topic-0")
    with pytest.raises(StorageError, match="ENOTEMPTY"):
        side.disk.rename("topic-0", "topic-0.deleted")


def test_removing_is_idempotent_and_an_open_file_stays_readable(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"abc")
    side.disk.remove("log")
    side.disk.remove("log")
    assert not side.disk.exists("log")
    assert file.read(0, 3) == b"abc"


def test_a_directory_is_removed_with_everything_below(side: Side) -> None:
    side.disk.make_directory("topic/deep")
    side.disk.open("topic/log", create=True)
    side.disk.open("topic/deep/log", create=True)
    side.disk.remove_directory("topic")
    side.disk.remove_directory("topic")
    assert side.disk.list("") == []


def test_there_is_free_space(side: Side) -> None:
    assert 0 < side.disk.free_bytes() <= side.disk.total_bytes()


@pytest.mark.parametrize("count", [0, 1, 3, PARALLEL_SYNCS_MAX, PARALLEL_SYNCS_MAX + 1, 100])
def test_any_number_of_files_and_directories_is_synced(side: Side, count: int) -> None:
    side.disk.make_directory("topic")
    files = [side.disk.open(f"topic/{number}", create=True) for number in range(count)]
    for file in files:
        file.append(b"abc")

    async def main() -> None:
        await side.disk.sync_many(files, ["topic", ""])
        await side.disk.sync_many(files)
        await side.disk.sync_many([])

    side.run(main)
    side.disk.sync(files, ["topic"])
    assert [file.read(0, 10) for file in files] == [b"abc"] * count


def test_syncing_a_missing_directory_is_an_error(side: Side) -> None:
    async def main() -> None:
        await side.disk.sync_many([], ["nowhere"])

    with pytest.raises(StorageError, match="ENOENT"):
        side.run(main)
    with pytest.raises(StorageError, match="ENOENT"):
        side.disk.sync([], ["nowhere"])


def test_appends_go_on_while_a_sync_runs(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"abc")

    async def main() -> None:
        sync = asyncio.ensure_future(side.disk.sync_many([file]))
        await asyncio.sleep(0)
        assert file.append(b"def") == 3
        await sync

    side.run(main)
    assert file.read(0, 10) == b"abcdef"


def test_a_file_may_be_closed_while_it_is_synced_or_read(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"abc")

    async def main() -> bytes:
        sync = asyncio.ensure_future(side.disk.sync_many([file]))
        read = asyncio.ensure_future(file.read_async(0, 3))
        await asyncio.sleep(0)
        file.close()
        await sync
        return await read

    assert side.run(main) == b"abc"


def test_a_cancelled_sync_or_read_harms_nobody(side: Side) -> None:
    file = side.disk.open("log", create=True)
    file.append(b"abc")

    async def main() -> None:
        waiting = [asyncio.ensure_future(side.disk.sync_many([file])), asyncio.ensure_future(file.read_async(0, 3))]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await side.disk.sync_many([file])

    side.run(main)
    assert file.read(0, 3) == b"abc"
