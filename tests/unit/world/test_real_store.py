"""What only LMDB can show: its map grows, it has room in reserve, and a device that fails is the end of it."""

import asyncio
import errno
import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import lmdb
import pytest
from support.async_tests import asyncio_test
from support.clusters.fault_devices import cannot

from tidelog.model.errors import DiskFullError, StorageError
from tidelog.world.real.store import LmdbStore


def test_the_map_grows_when_a_transaction_does_not_fit(tmp_path: Path) -> None:
    async def main() -> None:
        with LmdbStore(tmp_path, map_bytes=1 << 20) as store:
            writes = [{b"%d" % number: bytes([number]) * 100_000} for number in range(100)]
            await asyncio.gather(*(store.commit(write) for write in writes))
            assert len(store.scan(b"")) == 100
            assert store._map_bytes == 16 << 20

    asyncio.run(main())
    with LmdbStore(tmp_path, map_bytes=1 << 20) as store:
        assert store.get(b"99") == b"c" * 100_000


@asyncio_test
async def test_what_is_too_much_for_the_largest_map_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, map_bytes=1 << 20, map_bytes_max=1 << 20) as store:
        await store.commit({b"epoch": b"1"})
        with pytest.raises(DiskFullError, match="full at 1048576 bytes"):
            await store.commit({b"large": bytes(2 << 20)})
        await store.commit({b"small": b""})
        assert store.scan(b"") == [(b"epoch", b"1"), (b"small", b"")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    with ExitStack() as stack:
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            cannot(f"a file system cannot be mounted here: {error}")
        stack.callback(lambda: subprocess.run(["umount", path], check=True))
        yield path


def fill(path: Path) -> None:
    with (path / "ballast").open("wb", buffering=0) as file:
        block = 1 << 20
        while block:
            try:
                while file.write(bytes(block)) == block:
                    pass
            except OSError:
                block //= 2


def test_small_state_changes_on_a_full_disk_and_what_does_not_fit_is_refused(small_disk: Path) -> None:
    """What a broker and a voter store all the time has its room, a thousand times over; also after a restart there."""
    (small_disk / "state").mkdir()

    async def main() -> None:
        for life in range(2):
            with LmdbStore(small_disk / "state") as store:
                if life == 0:
                    await store.commit({b"point/%d" % number: bytes(300) for number in range(1_000)})
                    fill(small_disk)
                for number in range(500):
                    await store.commit({b"vote": b"%d" % number, b"point/%d" % (number * 7 % 1_000): bytes(300)})
                for _ in range(3):
                    with pytest.raises(DiskFullError, match=r"No space left on device \(ENOSPC\); .* free space"):
                        await store.commit({b"large": bytes(6 << 20)})
                assert store.get(b"vote") == b"499"
                assert store.get(b"large") is None
                await store.commit({b"vote": b"500"})
        (small_disk / "ballast").unlink()
        with LmdbStore(small_disk / "state") as store:
            assert len(store.scan(b"point/")) == 1_000
            await store.commit({b"large": bytes(2 << 20), b"vote": b"501"})

    asyncio.run(main())


def test_a_store_without_reserve_goes_on_when_there_is_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that gives no blocks in advance: LMDB itself meets the full disk."""

    def unsupported(descriptor: int, position: int, length: int) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "a test says so")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)

    async def main() -> None:
        with LmdbStore(small_disk / "state") as store:
            await store.commit({b"epoch": b"1"})
            fill(small_disk)
            for _ in range(3):
                with pytest.raises(DiskFullError, match=r"No space left on device \(ENOSPC\); .* free space"):
                    await store.commit({b"epoch": b"2", b"more": bytes(3_000)})
                assert store.scan(b"") == [(b"epoch", b"1")]
            (small_disk / "ballast").unlink()
            await store.commit({b"epoch": b"2", b"more": bytes(3_000)})
            assert store.get(b"epoch") == b"2"
        with LmdbStore(small_disk / "state") as store:
            assert store.get(b"more") == bytes(3_000)

    asyncio.run(main())


def test_a_store_that_has_no_reserve_any_more_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with LmdbStore(tmp_path, map_bytes=1 << 20) as store:
            monkeypatch.setattr(os, "posix_fallocate", full)
            for number in range(230):
                await store.commit({b"%d" % number: bytes(3_000)})

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [record.message.count("bytes of the reserve are left") for record in caplog.records] == [1]


def full(descriptor: int, position: int, length: int) -> NoReturn:
    raise OSError(errno.ENOSPC, "a test says so")


def test_a_full_disk_that_left_the_outcome_open_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta page was not written: LMDB refuses everything from then on."""

    class Broken:
        def __init__(self, environment: lmdb.Environment) -> None:
            self._environment = environment

        def begin(self, write: bool = False) -> NoReturn:
            raise lmdb.DiskError("No space left on device") if write else lmdb.PanicError("MDB_PANIC")

        def __getattr__(self, name: str) -> object:
            return getattr(self._environment, name)

    async def main() -> None:
        with LmdbStore(tmp_path) as store:
            monkeypatch.setattr(store, "_environment", Broken(store._environment))
            for _ in range(2):
                with pytest.raises(StorageError, match="MDB_PANIC") as caught:
                    await store.commit({b"epoch": b"1"})
                assert not isinstance(caught.value, DiskFullError)

    asyncio.run(main())


def test_a_disk_without_room_for_the_first_state_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(DiskFullError, match=f"open state store {tmp_path}.*ENOSPC"):
            LmdbStore(tmp_path / "new")
        (tmp_path / "new" / "data.mdb").unlink()


def test_an_error_of_the_device_is_remembered(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        with LmdbStore(tmp_path) as store:
            await store.commit({b"epoch": b"1"})
            resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
            try:
                with pytest.raises(StorageError, match="commit"):
                    await store.commit({b"large": bytes(1 << 20)})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            with pytest.raises(StorageError, match="commit"):
                await store.commit({b"epoch": b"2"})
            assert store.get(b"epoch") == b"1"

    asyncio.run(main())
    with LmdbStore(tmp_path) as store:
        assert store.scan(b"") == [(b"epoch", b"1")]


def test_a_store_that_cannot_be_opened_says_where(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not an LMDB file" * 1000)
    with pytest.raises(StorageError, match=str(tmp_path)):
        LmdbStore(tmp_path)


def test_a_store_can_be_opened_to_read_only(tmp_path: Path) -> None:
    async def main() -> None:
        with LmdbStore(tmp_path) as store:
            await store.commit({b"epoch": b"1"})

    asyncio.run(main())
    with LmdbStore(tmp_path, read_only=True) as store:
        assert store.get(b"epoch") == b"1"
        with pytest.raises(AssertionError, match="read-only"):
            asyncio.run(store.commit({b"epoch": b"2"}))
