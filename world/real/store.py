"""The state store on LMDB. The contract is in `world.store`, the stored form of a value in `world.sealing`.

One writer thread. A commit joins those that wait; when the thread is free it takes all of them into one transaction
and one sync, in the order of the calls. The loop only reads, in read transactions that end at once.

    idle --commit--> writing --done, none waits--> idle
                     writing --done, some wait---> writing (the next transaction takes all of them)
                     writing --error-------------> failed (for ever: all that wait and all later commits raise)

The map grows by doubling when a transaction does not fit, up to a bound; LMDB forbids that while a transaction is
open, so readers and the resize share a lock.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import lmdb

from tidelog.model.errors import DiskFullError, StorageError
from tidelog.world.sealing import seal, unseal

MAP_BYTES = 64 << 20
MAP_BYTES_MAX = 64 << 30
READERS_MAX = 64

Writes = Mapping[bytes, bytes | None]


class LmdbStore:
    """Implements `world.store.StateStore` in the directory `path`, which is made if it is missing."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        map_bytes: int = MAP_BYTES,
        map_bytes_max: int = MAP_BYTES_MAX,
        read_only: bool = False,
    ) -> None:
        self._path = os.path.abspath(path)
        self._map_bytes = map_bytes
        self._map_bytes_max = map_bytes_max
        self._map_lock = threading.Lock()
        self._waiting: list[tuple[dict[bytes, bytes | None], asyncio.Future[None]]] = []
        self._writing = False
        self._failed: StorageError | None = None
        self._closed = False
        self._read_only = read_only
        self.transactions = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="state-store")
        try:
            fresh = not read_only and not os.path.exists(os.path.join(self._path, "data.mdb"))
            if fresh:
                os.makedirs(self._path, exist_ok=True)
            self._environment = lmdb.open(
                self._path, map_size=map_bytes, max_readers=READERS_MAX, readonly=read_only, create=not read_only
            )
            if fresh:
                _sync_directory(self._path)
                _sync_directory(os.path.dirname(self._path))
        except (lmdb.Error, OSError) as error:
            raise self._error("open", error) from error
        # A file that outgrew the first size was made by a store that grew; LMDB opens it with the size it has.
        self._map_bytes = max(map_bytes, self._environment.info()["map_size"])

    def __enter__(self) -> "LmdbStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, key: bytes) -> bytes | None:
        assert not self._closed, "the store is closed"
        try:
            with self._map_lock, self._environment.begin() as transaction:
                stored = transaction.get(key)
        except lmdb.Error as error:
            raise self._error(f"get {key!r}", error) from error
        return None if stored is None else unseal(key, stored, path=self._path)

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return [(key, unseal(key, stored, path=self._path)) for key, stored in self._stored(prefix)]

    def keys(self, prefix: bytes) -> list[bytes]:
        return [key for key, _ in self._stored(prefix)]

    def _stored(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        assert not self._closed, "the store is closed"
        found: list[tuple[bytes, bytes]] = []
        try:
            with self._map_lock, self._environment.begin() as transaction, transaction.cursor() as cursor:
                if cursor.set_range(prefix) if prefix else cursor.first():
                    for key, stored in cursor:
                        if not key.startswith(prefix):
                            break
                        found.append((key, stored))
        except lmdb.Error as error:
            raise self._error(f"scan {prefix!r}", error) from error
        return found

    async def commit(self, writes: Writes) -> None:
        assert not self._closed, "the store is closed"
        assert not self._read_only, "the store was opened to read"
        if self._failed is not None:
            raise self._failed
        sealed = {key: None if value is None else seal(key, value) for key, value in writes.items()}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((sealed, done))
        if not self._writing:
            self._start_transaction()
        await done

    def _start_transaction(self) -> None:
        batch, self._waiting = self._waiting, []
        self._writing = True
        running = asyncio.wrap_future(self._writer.submit(self._write, [writes for writes, _ in batch]))
        running.add_done_callback(lambda ended: self._finish([done for _, done in batch], ended))

    def _finish(self, batch: list[asyncio.Future[None]], ended: "asyncio.Future[None]") -> None:
        """On the loop, when a transaction has ended."""
        self._writing = False
        error = StorageError(f"state store {self._path}: closed") if ended.cancelled() else ended.exception()
        if error is None:
            self.transactions += 1
            _resolve(batch, None)
            if self._waiting and not self._closed:
                self._start_transaction()
            return
        if not isinstance(error, StorageError):
            error = self._error("commit", error)
        self._failed = error
        _resolve(batch, error)
        self._fail_waiting(error)

    def _fail_waiting(self, error: StorageError) -> None:
        waiting, self._waiting = self._waiting, []
        _resolve([done for _, done in waiting], error)

    def _write(self, batch: list[dict[bytes, bytes | None]]) -> None:
        """On the writer thread: one transaction for all, again with a larger map if it does not fit."""
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for writes in batch:
                        for key, stored in writes.items():
                            if stored is None:
                                transaction.delete(key)
                            else:
                                transaction.put(key, stored)
                return
            except lmdb.MapFullError:
                self._grow()
            except (lmdb.Error, OSError) as error:
                raise self._error("commit", error) from error

    def _grow(self) -> None:
        if self._map_bytes >= self._map_bytes_max:
            raise DiskFullError(f"state store {self._path}: full at {self._map_bytes} bytes", path=self._path)
        self._map_bytes = min(self._map_bytes * 2, self._map_bytes_max)
        with self._map_lock:
            self._environment.set_mapsize(self._map_bytes)

    def close(self) -> None:
        """A transaction under way is waited for; commits that still wait for one fail."""
        if self._closed:
            return
        self._closed = True
        self._fail_waiting(StorageError(f"state store {self._path}: closed", path=self._path))
        self._writer.shutdown()
        self._environment.close()

    def _error(self, action: str, error: BaseException) -> StorageError:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        # LMDB hands the system's errors on in its text only.
        full = full or os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EDQUOT) in str(error)
        kind = DiskFullError if full else StorageError
        return kind(f"state store {self._path}: {action}: {error}", path=self._path)


def _resolve(waiters: list[asyncio.Future[None]], error: StorageError | None) -> None:
    for done in waiters:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
