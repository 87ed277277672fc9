"""The state store on LMDB. The contract is in `world.store`, the stored form of a value in `world.sealing`.

One writer thread. A commit joins those that wait; when the thread is free it takes all of them into one transaction
and one sync, in the order of the calls. The loop only reads, in read transactions that end at once.

    idle --commit--> writing --done, none waits--> idle
                     writing --done, some wait---> writing (the next transaction takes all of them)
                     writing --no room-----------> as done: this transaction was aborted, its commits are told
                     writing --error-------------> failed (for ever: all that wait and all later commits raise)

Room: the map is as large as the blocks that the file system has given to the file (`posix_fallocate`), so LMDB says
that its map is full before it would meet a full disk in the middle of a write; there it would take a short write for an
error of the device. The map grows when a transaction does not fit, and when a quarter of it is left, which is the
reserve. So a full disk is met by the growth alone: nothing was begun then, and what fits into the reserve is committed
as before. LMDB forbids a resize while a transaction is open: readers and the resize share a lock.

Where blocks cannot be given in advance, or are not overwritten in place (copy on write), LMDB itself may meet the full
disk. It then aborts the transaction: its pages count as free, the meta page was not touched. Only if the meta page
could not be written the outcome is unknown, LMDB refuses everything from then on, and so does this store. A known gap:
a short write on such a file system is told by LMDB as EIO, and is final here.
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
"""At first; all of it is taken from the disk at once."""
MAP_GROWTH_BYTES_MAX = 64 << 20
"""The map doubles up to this, and grows by this from there on."""
MAP_BYTES_MAX = 64 << 30
RESERVE_PART = 4
"""A map of which less than such a part is left grows."""
PAGE_BYTES_MAX = 64 << 10
NOT_IN_ADVANCE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
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
        self._is_low = False
        self.transactions = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="state-store")
        data = os.path.join(self._path, "data.mdb")
        try:
            fresh = not read_only and not os.path.exists(data)
            if fresh:
                os.makedirs(self._path, exist_ok=True)
            # Of the size that it has; LMDB takes more if what is stored needs it.
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
                self._take_first_room(data, map_bytes, must=fresh)
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
        found: list[tuple[bytes, bytes]] = []
        try:
            with self._map_lock, self._environment.begin() as transaction, transaction.cursor() as cursor:
                if cursor.set_range(prefix) if prefix else cursor.first():
                    for key, stored in cursor:
                        if not key.startswith(prefix):
                            break
                        found.append((key, stored))
        except lmdb.Error as error:
            raise self._error(f"scan {prefix!r} of", error) from error
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
        """On the writer thread: one transaction for all, again with a larger map if it does not fit."""
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
        found = self._error("commit to", error)
        if isinstance(found, DiskFullError):
            try:
                self._environment.begin().abort()
            except lmdb.Error as panic:
                # The meta page was not written: whether the transaction has happened only the next start can tell.
                return StorageError(f"{found} ({panic})", path=self._path)
        return found

    def _take_first_room(self, data: str, map_bytes: int, *, must: bool) -> None:
        """A store that is there opens on a full disk too, with the room that it has."""
        wanted = max(map_bytes, self._map_bytes)
        try:
            # Written through a map: a page of it that finds no room would be a SIGBUS.
            self._allocate(os.path.join(self._path, "lock.mdb"), None)
            self._allocate(data, wanted)
        except OSError as error:
            if must or error.errno not in NO_SPACE:
                raise
            LOGGER.warning("%s; there is no reserve for now", self._error("reserve room for", error))
            return
        if wanted > self._map_bytes:
            self._map_bytes = wanted
            self._environment.set_mapsize(wanted)

    def _allocate(self, path: str, size: int | None) -> None:
        """The file has all of its blocks up to `size` (None: its size). `OSError` if there is no room for them."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size if size is None else size)
        except OSError as error:
            # LMDB then takes blocks when it needs them.
            if error.errno not in NOT_IN_ADVANCE:
                raise
        finally:
            os.close(descriptor)

    def _keep_reserve(self) -> None:
        """Grow before it is needed. If there is no room, the reserve is what is left."""
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
        wanted = min(self._map_bytes + min(self._map_bytes, MAP_GROWTH_BYTES_MAX), self._map_bytes_max)
        try:
            self._allocate(os.path.join(self._path, "data.mdb"), wanted)
        except OSError as error:
            raise self._error("enlarge", error) from error
        with self._map_lock:
            self._environment.set_mapsize(wanted)
        self._map_bytes = wanted

    def close(self) -> None:
        """A transaction under way is waited for; commits that still wait for one fail."""
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
            # LMDB hands the system's errors on in its text only.
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
