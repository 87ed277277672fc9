"""The state store on LMDB. The contract is in `world.store`, the stored form of a value in `world.sealing`.

One thread writes. When it is free, it takes all pending commits into one transaction and one sync, in the order of the
calls. The event loop only reads, in read transactions that end at once.

    idle --commit--> writing --done, none pending--> idle
                     writing --done, some pending--> writing (the next transaction takes all of them)
                     writing --no space------------> as done: the transaction was aborted, its commits fail
                     writing --error---------------> failed (final: all pending and all later commits raise)

Space: the map is as large as the blocks that the file system has allocated to the file (`posix_fallocate`), so LMDB
reports a full map before a write could meet a full disk; LMDB would report such a short write as a device error. The
map grows when a transaction does not fit, and when less than a quarter of it, the reserve, is free. So only growth
meets a full disk: before a transaction starts. What fits into the reserve still commits. LMDB forbids a resize while a
transaction is open: readers and the resize share a lock.

Where blocks cannot be allocated in advance, or are not overwritten in place (copy on write), LMDB itself may meet the
full disk. It then aborts the transaction: its pages count as free, the meta page is unchanged. If LMDB could not write
the meta page, the outcome is unknown; LMDB then rejects everything, and so does this store. Known gap: LMDB reports a
short write on such a file system as EIO, which is final here.
"""

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import lmdb

from tidelog.model.errors import DiskFullError, StorageError
from tidelog.world.sealing import seal, unseal
from tidelog.world.storage_errors import NO_SPACE, storage_error

LOGGER = logging.getLogger(__name__)

MAP_BYTES = 4 << 20
"""Initial size; allocated on the disk at once."""
MAP_GROWTH_BYTES_MAX = 64 << 20
"""The map doubles until its growth reaches this, then grows by it."""
MAP_BYTES_MAX = 64 << 30
RESERVE_PART = 4
"""A map grows when less than 1/RESERVE_PART of it is free."""
PAGE_BYTES_MAX = 64 << 10
NOT_IN_ADVANCE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
READERS_MAX = 64

Writes = Mapping[bytes, bytes | None]


class LmdbStore:
    """Implements `world.store.StateStore` in the directory `path`, which is created if missing."""

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
        self._is_low = False
        self.transactions = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="state-store")
        data = os.path.join(self._path, "data.mdb")
        try:
            fresh = not read_only and not os.path.exists(data)
            if fresh:
                os.makedirs(self._path, exist_ok=True)
            # The present size; LMDB uses more if the data needs it.
            size = map_bytes if fresh or read_only else max(os.path.getsize(data), PAGE_BYTES_MAX)
            self._environment = lmdb.open(
                self._path, map_size=size, max_readers=READERS_MAX, readonly=read_only, create=not read_only
            )
        except (lmdb.Error, OSError) as error:
            raise self._error("open", error) from error
        self._map_bytes = self._environment.info()["map_size"]
        self._page_bytes = self._environment.stat()["psize"]
        try:
            if not read_only:
                self._allocate_initial(data, map_bytes, must=fresh)
            if fresh:
                _sync_directory(self._path)
                _sync_directory(os.path.dirname(self._path))
        except (lmdb.Error, OSError) as error:
            self._environment.close()
            raise self._error("open", error) from error

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
            raise self._error(f"get {key!r} of", error) from error
        return None if stored is None else unseal(key, stored, path=self._path)

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return [(key, unseal(key, stored, path=self._path)) for key, stored in self._stored(prefix)]

    def keys(self, prefix: bytes) -> list[bytes]:
        return [key for key, _ in self._stored(prefix)]

    def _stored(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        assert not self._closed, "the store is closed"
        pairs: list[tuple[bytes, bytes]] = []
        try:
            with self._map_lock, self._environment.begin() as transaction, transaction.cursor() as cursor:
                if cursor.set_range(prefix) if prefix else cursor.first():
                    for key, stored in cursor:
                        if not key.startswith(prefix):
                            break
                        pairs.append((key, stored))
        except lmdb.Error as error:
            raise self._error(f"scan {prefix!r} of", error) from error
        return pairs

    async def commit(self, writes: Writes) -> None:
        assert not self._closed, "the store is closed"
        assert not self._read_only, "the store is read-only"
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
        """Runs on the event loop when a transaction has ended."""
        self._writing = False
        error = StorageError(f"state store {self._path}: closed") if ended.cancelled() else ended.exception()
        if error is None:
            self.transactions += 1
            _resolve(batch, None)
            if self._waiting and not self._closed:
                self._start_transaction()
            return
        if not isinstance(error, StorageError):
            error = self._error("commit to", error)
        _resolve(batch, error)
        if not isinstance(error, DiskFullError):
            self._failed = error
            self._fail_waiting(error)
        elif self._waiting and not self._closed:
            self._start_transaction()

    def _fail_waiting(self, error: StorageError) -> None:
        waiting, self._waiting = self._waiting, []
        _resolve([done for _, done in waiting], error)

    def _write(self, batch: list[dict[bytes, bytes | None]]) -> None:
        """Runs on the writer thread: one transaction for all, repeated with a larger map if it does not fit."""
        self._keep_reserve()
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
                raise self._commit_error(error) from error

    def _commit_error(self, error: Exception) -> StorageError:
        failure = self._error("commit to", error)
        if isinstance(failure, DiskFullError):
            try:
                self._environment.begin().abort()
            except lmdb.Error as panic:
                # The meta page was not written: only the next start can tell whether the transaction committed.
                return StorageError(f"{failure} ({panic})", path=self._path)
        return failure

    def _allocate_initial(self, data: str, map_bytes: int, *, must: bool) -> None:
        """An existing store opens on a full disk, too, with the space that it has."""
        target_bytes = max(map_bytes, self._map_bytes)
        try:
            # Written through a memory map: a page without space would raise SIGBUS.
            self._allocate(os.path.join(self._path, "lock.mdb"), None)
            self._allocate(data, target_bytes)
        except OSError as error:
            if must or error.errno not in NO_SPACE:
                raise
            LOGGER.warning("%s; there is no reserve for now", self._error("reserve space for", error))
            return
        if target_bytes > self._map_bytes:
            self._map_bytes = target_bytes
            self._environment.set_mapsize(target_bytes)

    def _allocate(self, path: str, size: int | None) -> None:
        """Allocates all blocks of the file up to `size` (None: its size). Raises `OSError` if there is no space."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size if size is None else size)
        except OSError as error:
            # LMDB then allocates blocks when it needs them.
            if error.errno not in NOT_IN_ADVANCE:
                raise
        finally:
            os.close(descriptor)

    def _keep_reserve(self) -> None:
        """Grows the map before it is full. Without space, the reserve is what is left."""
        used_bytes = (self._environment.info()["last_pgno"] + 1) * self._page_bytes
        if self._map_bytes - used_bytes >= self._map_bytes // RESERVE_PART or self._map_bytes >= self._map_bytes_max:
            return
        try:
            self._grow()
            self._is_low = False
        except DiskFullError as error:
            if not self._is_low:
                LOGGER.warning("%s; %d bytes of the reserve are left", error, self._map_bytes - used_bytes)
            self._is_low = True

    def _grow(self) -> None:
        if self._map_bytes >= self._map_bytes_max:
            raise DiskFullError(f"state store {self._path}: full at {self._map_bytes} bytes", path=self._path)
        target_bytes = min(self._map_bytes + min(self._map_bytes, MAP_GROWTH_BYTES_MAX), self._map_bytes_max)
        try:
            self._allocate(os.path.join(self._path, "data.mdb"), target_bytes)
        except OSError as error:
            raise self._error("enlarge", error) from error
        with self._map_lock:
            self._environment.set_mapsize(target_bytes)
        self._map_bytes = target_bytes

    def close(self) -> None:
        """Waits for the running transaction; pending commits fail."""
        if self._closed:
            return
        self._closed = True
        self._fail_waiting(StorageError(f"state store {self._path}: closed", path=self._path))
        self._writer.shutdown()
        self._environment.close()

    def _error(self, action: str, error: BaseException) -> StorageError:
        if isinstance(error, OSError):
            return storage_error(f"{action} state store", self._path, error)
        for number in NO_SPACE:
            # LMDB reports system errors only in its text.
            if os.strerror(number) in str(error):
                return storage_error(f"{action} state store", self._path, OSError(number, str(error)))
        return StorageError(f"{action} state store {self._path}: {error}", path=self._path)


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
