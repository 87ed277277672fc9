"""A log directory: the names in it, its id, and what its logs share.

    <label>.<topic id: 32 hex>-<partition>               a log; the label is the topic's name, for people
    <label>.<topic id: 32 hex>-<partition>.<n>.deleted   a log that is being removed; `n` makes the name its own
    <label>.<topic id: 32 hex>-<partition>.<n>.aside     a copy that does not count (`doubles`), kept for the operator
    <label>.<topic id: 32 hex>-<partition>.<n>.kept      records that a replica had to give up (`keeping`)
    anything else                                        not ours, left alone

One directory is one device with one fate: after a failed sync or a failed state store all of its logs are offline, and
no others. A full disk is no failure: what finds no room is refused and tried again, and the logs are read as before.
"""

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from tidelog.log.checkpoint import decode, encode, key_prefix
from tidelog.log.files import FilePool
from tidelog.log.group_commit import GroupCommit
from tidelog.model.errors import OF_THE_PROCESS, CorruptStateError, DiskFullError, StorageError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.disk import Disk
from tidelog.world.store import StateStore

LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

WANT_WAIT_MIN_S, WANT_WAIT_MAX_S = 0.1, 10.0
DIRECTORY_ID = b"directory/id"
DELETED = ".deleted"
ASIDE = ".aside"
KEPT = ".kept"
LABEL_LENGTH_MAX = 200
"""So that the name of a deleted log still fits a file name of 255 bytes."""
PARTITION_MAX = (1 << 31) - 1

_LABEL = re.compile(r"[A-Za-z0-9._-]*")
_NAME = re.compile(r"(?P<label>[A-Za-z0-9._-]*)\.(?P<topic>[0-9a-f]{32})-(?P<partition>0|[1-9]\d{0,9})")
_DELETED_NAME = re.compile(r"(?P<name>.*)\.\d+" + re.escape(DELETED))
_KEPT_NAME = re.compile(r"(?P<name>.*)\.\d+" + re.escape(KEPT))
_ASIDE_NAME = re.compile(r"(?P<name>.*)\.\d+" + re.escape(ASIDE))


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


def parse_deleted_name(name: str) -> PartitionId | None:
    """The log that was here before it was deleted; None for any other name."""
    return _parse_former_name(_DELETED_NAME, name)


def parse_aside_name(name: str) -> PartitionId | None:
    """The log that was here before it was set aside; None for any other name."""
    return _parse_former_name(_ASIDE_NAME, name)


def parse_kept_name(name: str) -> PartitionId | None:
    """The log whose records are kept here; None for any other name."""
    return _parse_former_name(_KEPT_NAME, name)


def _parse_former_name(pattern: re.Pattern[str], name: str) -> PartitionId | None:
    match = pattern.fullmatch(name)
    found = parse_directory_name(match["name"]) if match is not None else None
    return None if found is None else found[0]


@dataclass(frozen=True, slots=True)
class Listing:
    """What stands in a directory: the names of logs, of deleted ones, of those that were set aside, and of records that
    replicas gave up."""

    logs: list[tuple[PartitionId, str]]
    deleted: list[tuple[PartitionId, str]]
    aside: list[tuple[PartitionId, str]]
    kept: list[tuple[PartitionId, str]]


def list_logs(disk: Disk) -> Listing:
    listing = Listing([], [], [], [])
    for name in disk.list(""):
        deleted, aside, kept = parse_deleted_name(name), parse_aside_name(name), parse_kept_name(name)
        if deleted is not None:
            listing.deleted.append((deleted, name))
            continue
        if aside is not None:
            listing.aside.append((aside, name))
            continue
        if kept is not None:
            listing.kept.append((kept, name))
            continue
        found = parse_directory_name(name)
        if found is not None:
            listing.logs.append((found[0], name))
    return listing


def in_order(log_id: PartitionId) -> tuple[int, int]:
    """Key to sort logs by: the same order as that of the ids, at a tenth of the price."""
    return log_id.topic_id.int, log_id.partition


async def outlast_want(label: str, action: Callable[[], Awaitable[T]]) -> T:
    """What the action returns. While the process lacks open files or memory it is tried again: that says nothing about
    the directory, and to give the directory up would count all of its replicas as lost."""
    wait_s = WANT_WAIT_MIN_S
    while True:
        try:
            return await action()
        except StorageError as error:
            if error.number not in OF_THE_PROCESS:
                raise
            LOGGER.error("directory=%s cannot be read now, tried again in %.1f s: %s", label, wait_s, error)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, WANT_WAIT_MAX_S)


async def read_directory_id(store: StateStore, fresh: DirectoryId) -> DirectoryId:
    """The id of a directory; `fresh` becomes it if it has none yet."""
    data = store.get(DIRECTORY_ID)
    if data is None:
        await store.commit({DIRECTORY_ID: encode("directory", {"id": fresh.bytes})})
        return fresh
    stored = decode("directory", data).get("id")
    if not isinstance(stored, bytes) or len(stored) != 16:
        raise CorruptStateError("the stored id of a directory is not an id")
    return DirectoryId(UUID(bytes=stored))


async def forget_log(store: StateStore, log_id: PartitionId) -> None:
    """Delete all that the store has of a log."""
    keys = store.keys(key_prefix(log_id))
    if keys:
        await store.commit(dict.fromkeys(keys))


class LogDirectory:
    """One directory: what its logs share, which ones there are, and whether it still works.

    `directory_id` is what it was given if it could not be read (then `failed` says why). `paths` has every log that is
    here, open or not; `unopened` those whose turn has not come yet, in the order of their turns; `unforgotten` those
    that are gone, and whose stored state waits for room to be deleted: before a log of that id is made here again.
    """

    __slots__ = ("directory_id", "disk", "failed", "files", "group_commit", "paths", "store", "unforgotten", "unopened")

    def __init__(
        self,
        disk: Disk,
        store: StateStore,
        *,
        open_files_max: int,
        on_failure: Callable[["LogDirectory", StorageError], None],
    ) -> None:
        self.disk = disk
        self.store = store
        self.directory_id: DirectoryId | None = None
        self.files = FilePool(disk, open_max=open_files_max)
        self.failed: StorageError | None = None
        self.paths: dict[PartitionId, str] = {}
        self.unopened: OrderedDict[PartitionId, None] = OrderedDict()
        self.unforgotten: set[PartitionId] = set()

        def failed(error: StorageError) -> None:
            self.failed = error
            on_failure(self, error)

        self.group_commit = GroupCommit(disk, on_failure=failed)

    def fail(self, error: StorageError) -> None:
        """Give the directory up, once: its logs take no more appends, and who waits for a sync is told."""
        self.group_commit.fail(error)

    async def sync_names(self, *paths: str) -> None:
        """The names in these directories of it are on the device. A failure is final: another sync would not write
        what this one has not written, and would not say so."""
        try:
            await self.disk.sync_many([], paths)
        except StorageError as error:
            self.fail(error)
            raise

    def has_failed(self) -> bool:
        return self.failed is not None

    async def forget(self, log_id: PartitionId) -> bool:
        """Delete all that the store has of a log that is gone. False: there is no room for that now, it is among the
        `unforgotten`. Until it is done a name (deleted, aside, moving) must tell the next start."""
        try:
            await forget_log(self.store, log_id)
        except DiskFullError as error:
            LOGGER.warning("directory=%s what is stored of %s is deleted later: %s", self.disk.label, log_id, error)
            self.unforgotten.add(log_id)
            return False
        self.unforgotten.discard(log_id)
        return True

    def free_deleted_name(self, path: str) -> str:
        """A name for the log at `path` while it is removed. An earlier one of the same name may still be there."""
        return self._free_name(path, DELETED)

    def free_aside_name(self, path: str) -> str:
        """A name for a copy that does not count, which stands at `path`."""
        return self._free_name(path, ASIDE)

    def _free_name(self, path: str, suffix: str) -> str:
        number = 0
        while self.disk.exists(f"{path}.{number}{suffix}"):
            number += 1
        return f"{path}.{number}{suffix}"


def empty_directory(disk: Disk, path: str) -> None:
    """In a helper process: its files go, its name stays."""
    for name in disk.list(path):
        disk.remove(f"{path}/{name}")


def remove_directory(disk: Disk, path: str) -> None:
    """In a helper process: removing large files takes a while."""
    disk.remove_directory(path)
