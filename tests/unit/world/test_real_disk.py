"""What only the real disk can show: short writes, cold reads, descriptors, threads."""

import asyncio
import errno
import os
import pickle
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidelog.model.errors import DiskFullError, StorageError
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import SMALL_READ_BYTES_MAX, RealDisk


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """The kernel writes up to the limit and then says EFBIG: a write that fails in the middle, on any file system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_in_the_middle_is_cut_back(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).open("log", create=True)
    file.append(b"x" * 10_000)
    with file_size_limit(16_384), pytest.raises(StorageError, match=r"append log: .*EFBIG"):
        file.append(b"y" * 5_000, b"z" * 5_000)
    assert file.size == 10_000 == os.path.getsize(tmp_path / "log")
    assert file.append(b"more") == 10_000
    assert file.read(9_999, 100) == b"xmore"


def test_no_space_is_its_own_error_and_a_file_that_cannot_be_cut_back_takes_no_more(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    file = RealDisk(tmp_path).open("full")
    with pytest.raises(DiskFullError, match="ENOSPC") as caught:
        file.append(b"abc")
    assert caught.value.path == "full"
    assert caught.value.retriable
    with pytest.raises(StorageError, match="could not be cut back"):
        file.append(b"abc")


def test_a_cold_read_does_not_wait_and_the_slow_way_has_the_bytes(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.open("log", create=True)
    data = bytes(range(256)) * 4096
    file.append(data)
    disk.sync([file])
    descriptor = os.open(tmp_path / "log", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    # Some file systems keep the pages; what must not happen is other bytes.
    assert file.read_nowait(0, len(data)) in (None, data)
    assert asyncio.run(file.read_async(0, len(data))) == data
    assert file.read_nowait(0, len(data)) == data
    disk.close()


def test_without_nowait_small_reads_are_direct_and_large_ones_go_to_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    disk = RealDisk(tmp_path)
    file = disk.open("log", create=True)
    file.append(bytes(SMALL_READ_BYTES_MAX * 2))
    disk.give_up_nowait(OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)))
    assert "RWF_NOWAIT" in caplog.text
    assert file.read_nowait(0, SMALL_READ_BYTES_MAX) == bytes(SMALL_READ_BYTES_MAX)
    assert file.read_nowait(0, SMALL_READ_BYTES_MAX + 1) is None
    assert file.read_nowait(SMALL_READ_BYTES_MAX * 2 - 1, 1 << 20) == b"\0"


def test_reads_on_several_threads_do_not_share_a_buffer(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.open("log", create=True)
    size = 1 << 18
    for number in range(8):
        file.append(bytes([number]) * size)
    with ThreadPoolExecutor(4) as pool:
        reads = list(pool.map(lambda number: file.read_nowait(number * size, size), [*range(8)] * 8))
    assert reads == [bytes([number]) * size for number in range(8)] * 8


def test_a_large_group_is_synced_without_syncfs_too(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk._has_syncfs = False
    files = [disk.open(str(number), create=True) for number in range(40)]
    for file in files:
        file.append(b"abc")
    disk.sync(files, [""])
    assert disk._syncs is not None, "it used its threads"
    disk.close()


def test_one_failed_file_fails_the_group_and_none_is_left_running(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    files = [disk.open(str(number), create=True) for number in range(4)]
    os.close(files[2]._descriptor)
    # A pipe cannot be synced: the kernel says EINVAL, as a device would say EIO.
    files[2]._descriptor, writer = os.pipe()
    with pytest.raises(StorageError, match=r"sync 2: .*EINVAL"):
        disk.sync(files)
    assert [file._pins for file in files] == [0] * 4
    os.close(writer)
    disk.close()


def test_the_descriptor_of_a_closed_file_lives_until_its_thread_has_ended(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.open("log", create=True)
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert leave.wait(30)
        os.fdatasync(file._descriptor)

    async def main() -> None:
        pool = ThreadPoolExecutor(1)
        running = asyncio.ensure_future(disk.run_pinned(pool, [file], slow))
        await asyncio.sleep(0)
        assert entered.wait(30)
        file.close()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        os.fstat(file._descriptor)
        leave.set()
        pool.shutdown()

    asyncio.run(main())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._descriptor)


def test_a_disk_travels_to_another_process_as_its_root(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.open("log", create=True).append(b"abc")
    disk.sync([disk.open("log")])
    copy: RealDisk = pickle.loads(pickle.dumps(disk))
    assert copy.label == disk.label == str(tmp_path)
    assert copy.open("log").read(0, 3) == b"abc"


def test_a_missing_root_is_an_error_unless_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="ENOENT"):
        RealDisk(tmp_path / "missing")
    assert RealDisk(tmp_path / "missing", create=True).list("") == []


def test_the_clock_shows_milliseconds_of_this_century() -> None:
    assert 1_700_000_000_000 < SystemClock().now_ms() < 4_000_000_000_000
