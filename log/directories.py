"""A log directory: the names in it, its id, and what its logs share.

    <label>.<topic id: 32 hex>-<partition>               a log; the label is the topic's name, for people
    <label>.<topic id: 32 hex>-<partition>.<n>.deleted   a log that is being removed; `n` makes the name unique
    <label>.<topic id: 32 hex>-<partition>.<n>.aside     a copy that was set aside (`duplicate_logs`)
    <label>.<topic id: 32 hex>-<partition>.<n>.kept      records that a replica gave up (`kept_copies`)
    anything else                                        not ours, left alone

One directory is one device and one failure domain: after a failed sync or a failed state store all of its logs are
offline, and no others. A full disk is no failure: operations that find no space are rejected and retried, and reads go
on.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from tidelog.log.file_pool import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.log.stored_state import decode, encode, key_prefix
from tidelog.model.errors import PROCESS_ERRNOS, CorruptStateError, DiskFullError, StorageError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_MIN_S, RETRY_MAX_S = 0.1, 10.0
DIRECTORY_ID = b"directory/id"
DELETED = ".deleted"
ASIDE = ".aside"
KEPT = ".kept"
LABEL_LENGTH_MAX = 200
"""Keeps the name of a deleted log within 255 bytes."""
PARTITION_MAX = (1 << 31) - 1

_LABEL = re.compile(r"[A-Za-z0-9._-]*")
_NAME = re.compile(r"(?P<label>[A-Za-z0-9._-]*)\.(?P<topic>[0-9a-f]{32})-(?P<partition>0|[1-9]\d{0,9})")
_FORMER_NAME = re.compile(rf"(?P<name>.*)\.\d+(?P<suffix>{'|'.join(map(re.escape, (DELETED, ASIDE, KEPT)))})")


def directory_name(log_id: PartitionId, label: str) -> str:
    """The name of a log's directory."""
    assert _LABEL.fullmatch(label), f"{label!r} cannot be part of a file name"
    return f"{label[:LABEL_LENGTH_MAX]}.{log_id.topic_id.hex}-{log_id.partition}"


def parse_directory_name(name: str) -> tuple[PartitionId, str] | None:
    """(log, label) of a log's directory; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["partition"]) > PARTITION_MAX:
        return None
    return PartitionId(TopicId(UUID(match["topic"])), int(match["partition"])), match["label"]


def parse_former_name(name: str) -> tuple[PartitionId, str] | None:
    """(log, suffix) of a directory with a log that was deleted or set aside, or with its kept records; None for any
    other name."""
    match = _FORMER_NAME.fullmatch(name)
    parsed = parse_directory_name(match["name"]) if match is not None else None
    return None if match is None or parsed is None else (parsed[0], match["suffix"])


@dataclass(frozen=True, slots=True)
class Listing:
    """The contents of a directory: names of logs, deleted logs, copies set aside and kept records."""

    logs: list[tuple[PartitionId, str]]
    deleted: list[tuple[PartitionId, str]]
    aside: list[tuple[PartitionId, str]]
    kept: list[tuple[PartitionId, str]]


def list_logs(disk: Disk) -> Listing:
    listing = Listing([], [], [], [])
    former = {DELETED: listing.deleted, ASIDE: listing.aside, KEPT: listing.kept}
    for name in disk.list(""):
        if (parsed := parse_former_name(name)) is not None:
            former[parsed[1]].append((parsed[0], name))
        elif (parsed := parse_directory_name(name)) is not None:
            listing.logs.append((parsed[0], name))
    return listing


def log_order(log_id: PartitionId) -> tuple[int, int]:
    """Sort key for logs: the order of the ids, ten times cheaper."""
    return log_id.topic_id.int, log_id.partition


async def retry_resource_errors(label: str, action: Callable[[], Awaitable[T]]) -> T:
    """Run the action and retry it while the process lacks open files or memory. Such an error says nothing about the
    directory; failing the directory would count all of its replicas as lost."""
    wait_s = RETRY_MIN_S
    while True:
        try:
            return await action()
        except StorageError as error:
            if error.number not in PROCESS_ERRNOS:
                raise
            LOGGER.error("directory=%s cannot be read now, retried in %.1f s: %s", label, wait_s, error)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, RETRY_MAX_S)


async def read_directory_id(store: StateStore, fresh: DirectoryId) -> DirectoryId:
    """The id of a directory; stores `fresh` if it has none yet."""
    data = store.get(DIRECTORY_ID)
    if data is None:
        try:
            await store.commit({DIRECTORY_ID: encode("directory", {"id": fresh.bytes})})
        except StorageError as error:
            # Without its number: this process cannot retry it (`retry_resource_errors`), since the store has failed.
            raise StorageError(str(error), path=error.path) from error
        return fresh
    stored = decode("directory", data).get("id")
    if not isinstance(stored, bytes) or len(stored) != 16:
        raise CorruptStateError("the stored directory id is not 16 bytes")
    return DirectoryId(UUID(bytes=stored))


async def forget_log(store: StateStore, log_id: PartitionId) -> None:
    """Delete the stored state of a log."""
    keys = store.keys(key_prefix(log_id))
    if keys:
        await store.commit(dict.fromkeys(keys))


class _DirectoryStore:
    """The state store of a directory. A commit that fails leaves the state on disk unknown: the directory fails with
    it, before anything else is acknowledged."""

    def __init__(self, store: StateStore, on_failure: Callable[[StorageError], None]) -> None:
        self._store = store
        self._on_failure = on_failure
        self.get, self.scan, self.keys, self.close = store.get, store.scan, store.keys, store.close

    async def commit(self, writes: Mapping[bytes, bytes | None]) -> None:
        try:
            await self._store.commit(writes)
        except DiskFullError:
            raise
        except StorageError as error:
            self._on_failure(error)
            raise


class LogDirectory:
    """One directory: what its logs share, which logs it has, and whether it works.

    `directory_id` is the one passed at the start if it could not be read (then `failed` has the error). `paths` has
    every log in it, open or not; `unforgotten` the deleted logs whose stored state waits for disk space to be deleted,
    which comes before a log of that id is created here again.
    """

    __slots__ = ("directory_id", "disk", "failed", "files", "group_commit", "paths", "store", "unforgotten")

    def __init__(
        self,
        disk: Disk,
        store: StateStore,
        *,
        open_files_max: int,
        on_failure: Callable[["LogDirectory", StorageError], None],
    ) -> None:
        self.disk = disk
        self.store: StateStore = _DirectoryStore(store, self.fail)
        self.directory_id: DirectoryId | None = None
        self.files = FilePool(disk, open_max=open_files_max)
        self.failed: StorageError | None = None
        self.paths: dict[PartitionId, str] = {}
        self.unforgotten: set[PartitionId] = set()

        def failed(error: StorageError) -> None:
            self.failed = error
            on_failure(self, error)

        self.group_commit = GroupCommit(disk, on_failure=failed)

    def fail(self, error: StorageError) -> None:
        """Fail the directory, once: its logs take no more appends, and waiting syncs fail."""
        self.group_commit.fail(error)

    async def sync_names(self, *paths: str) -> None:
        """Sync the names in these directories. A failure is final: the next sync would not write what this one lost,
        and would not report it."""
        try:
            await self.disk.sync_many([], paths)
        except StorageError as error:
            self.fail(error)
            raise

    def has_failed(self) -> bool:
        return self.failed is not None

    async def forget(self, log_id: PartitionId) -> bool:
        """Delete the stored state of a log that is gone. Returns False if that is not possible now, as on a full disk;
        the log is then in `unforgotten`. Until it is done, a name (deleted, aside, moving) must show the next start
        that it is to be done.
        """
        try:
            await forget_log(self.store, log_id)
        except StorageError as error:
            if self.failed is not None:
                raise
            LOGGER.warning("directory=%s the stored state of %s is deleted later: %s", self.disk.label, log_id, error)
            self.unforgotten.add(log_id)
            return False
        self.unforgotten.discard(log_id)
        return True

    def free_name(self, path: str, suffix: str) -> str:
        """Return an unused name with this suffix for the log at `path`, or for a copy of it."""
        number = 0
        while self.disk.exists(f"{path}.{number}{suffix}"):
            number += 1
        return f"{path}.{number}{suffix}"


def empty_directory(disk: Disk, path: str) -> None:
    """Runs in a helper process: removes the files, keeps the directory."""
    for name in disk.list(path):
        disk.remove(f"{path}/{name}")


def remove_directory(disk: Disk, path: str) -> None:
    """Runs in a helper process: removing large files takes a while."""
    disk.remove_directory(path)
