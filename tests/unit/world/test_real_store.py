"""What only LMDB can show: its map grows, and a commit that fails is the last."""

import asyncio
import resource
from pathlib import Path

import pytest

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


def test_a_full_map_fails_the_commit_and_every_later_one(tmp_path: Path) -> None:
    async def main() -> None:
        with LmdbStore(tmp_path, map_bytes=1 << 20, map_bytes_max=1 << 20) as store:
            await store.commit({b"epoch": b"1"})
            results = await asyncio.gather(
                store.commit({b"large": bytes(2 << 20)}), store.commit({b"small": b""}), return_exceptions=True
            )
            assert [type(result) for result in results] == [DiskFullError, DiskFullError]
            with pytest.raises(DiskFullError, match="full at 1048576 bytes"):
                await store.commit({b"small": b""})
            assert store.scan(b"") == [(b"epoch", b"1")]

    asyncio.run(main())


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
        with pytest.raises(AssertionError, match="to read"):
            asyncio.run(store.commit({b"epoch": b"2"}))
