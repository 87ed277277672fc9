"""Moves a log to another directory of its node: copies it while it is in use, then swaps.

    <name>.moving     in the target directory: an incomplete copy; removed at the next start
    leaving           in the source's store: the number of the attempt, odd; the next even one when it is withdrawn
    moved             in the target's store: the number of the attempt; the copy is complete and synced

    copying --the owner holds appends, the rest is copied and synced--> complete
    complete --`leaving` is stored, then `moved` with the same number--> decided
    complete --`moved` may be stored or not--> `leaving` is withdrawn, and the source stays in use
    decided --> the source is renamed as a deleted log --> the copy takes its name --> `moved` is deleted

A crash before the decision leaves the source as it was; after it, the next start finishes the move (`finish_moves`). At
no time are there two logs of the name (`duplicate_logs`), and at no time none.

Invariant: a log whose source was appended to after an attempt never continues with the copy of that attempt. `moved`
counts only while `leaving` of the source has its number.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tidelog.log.directories import DELETED, LogDirectory, forget_log, parse_directory_name, retry_resource_errors
from tidelog.log.log import Log
from tidelog.log.stored_state import decode_number, encode_number, key_prefix
from tidelog.model.errors import DiskFullError, InvalidRequestError, OffsetOutOfRangeError, StorageError
from tidelog.model.ids import Offset, PartitionId

LOGGER = logging.getLogger(__name__)

MOVING = ".moving"
MOVED = b"moved"
LEAVING = b"leaving"
PIECE_BYTES = 1 << 20

OnMoved = Callable[[PartitionId, LogDirectory, LogDirectory, str | None], Awaitable[Log]]
"""Opens the log in its new directory: (log, old directory, new directory, name of the deleted source)."""


class LogMove:
    """One move: `copy` while the log is in use, then `finish` while nobody appends; or `abandon`."""

    def __init__(self, on_moved: OnMoved, source: Log, home: LogDirectory, target: LogDirectory) -> None:
        self._on_moved = on_moved
        self._source = source
        self._home = home
        self.target = target
        self._name = source.path
        self._copy: Log | None = None
        self._generation = -1
        self._deletes_end = Offset(0)
        """The source's, when the copy began."""
        self.is_decided = False

    @property
    def has_home_failed(self) -> bool:
        return self._home.failed is not None

    @property
    def copied_end(self) -> Offset:
        """Everything below is copied."""
        return self._source.start_offset if self._copy is None else self._copy.end_offset

    @property
    def copied_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.size

    @property
    def lag(self) -> int:
        """Offsets that the copy lacks."""
        return max(0, self._source.end_offset - self.copied_end)

    async def copy(self) -> None:
        """Return when little is left to copy."""
        source = self._source
        while self._copy is None or source.size - self._copy.size > PIECE_BYTES:
            if not await self._copy_piece():
                return

    async def _copy_piece(self) -> bool:
        """Returns False if there is nothing to copy now."""
        source = self._source
        if source.is_closed or source.damaged is not None:
            raise InvalidRequestError(f"{source.path} was closed or found damaged during the move")
        copy = self._copy
        if copy is None or self._has_missed(copy) or copy.end_offset < source.start_offset:
            copy = await self._begin()
        if copy.end_offset >= source.end_offset:
            return False
        try:
            # The first batch of an empty copy may begin below the log start.
            offset = source.start_offset if copy.end_offset == copy.start_offset else copy.end_offset
            piece = await source.read(offset, bytes_max=PIECE_BYTES)
        except OffsetOutOfRangeError:
            return True  # retention has deleted it: begin again
        if not piece.data or self._has_missed(copy):
            return bool(piece.data)
        # The first batch may begin past the log start, where compaction removed records: the copy begins as the source.
        first = min(piece.base_offset, offset)
        if copy.end_offset == copy.start_offset != first:
            await copy.reset_to(first)
        copy.append_replicated(piece.data)
        await copy.flush()
        return True

    def _has_missed(self, copy: Log) -> bool:
        """Whether the source was truncated, or its cleaner removed deletes that were not copied yet: the copy may hold
        records that they deleted."""
        if self._source.durability.generation != self._generation:
            return True
        deletes_end = self._source.lineage.deletes_end
        return deletes_end > self._deletes_end and copy.end_offset < deletes_end

    async def _begin(self) -> Log:
        await self._clear()
        source, target = self._source, self.target
        copy = await Log.open(
            disk=target.disk,
            store=target.store,
            work=source.work,
            group_commit=target.group_commit,
            clock=source.clock,
            files=target.files,
            path=self._name + MOVING,
            log_id=source.log_id,
            config=source.config,
        )
        await copy.allow_gaps()
        self._generation = source.durability.generation
        self._deletes_end = source.lineage.deletes_end
        self._copy = copy
        return copy

    async def finish(self) -> Log:
        """Copy the rest, swap and return the log in its new directory. Nobody appends to or truncates the source
        meanwhile."""
        source = self._source
        async with source.lock:
            pass  # wait for a change of files that has begun
        await source.flush()
        more = True
        while more:
            more = await self._copy_piece()
        copy = self._copy
        assert copy is not None, "copied before it is finished"
        if copy.end_offset < source.end_offset:
            await copy.reset_to(source.end_offset)  # an empty log, or one whose last records were compacted away
        assert copy.end_offset == source.end_offset, "the copy is whole"
        await copy.advance_start(source.start_offset)
        await copy.copy_state_of(source)
        await copy.close()
        await self._decide()
        try:
            await source.retire()
            deleted = await _take_over(source.log_id, self._home, self.target, self._name)
        except StorageError as error:
            self._home.fail(error)  # the next start finishes the move
            raise
        return await self._on_moved(source.log_id, self._home, self.target, deleted)

    async def _decide(self) -> None:
        prefix = self._source.prefix
        attempt = _next_attempt(self._home.store.get(prefix + LEAVING))
        await self._home.store.commit({prefix + LEAVING: encode_number("leaving", attempt)})
        withdrawn = encode_number("leaving", attempt + 1)
        self.is_decided = True  # as long as `moved` may be stored
        try:
            # The copy continues the numbers: an attempt has its own, wherever the log was.
            await self.target.store.commit(
                {prefix + MOVED: encode_number("moved", attempt), prefix + LEAVING: withdrawn}
            )
        except DiskFullError:
            self.is_decided = False  # nothing is stored
            raise
        except BaseException:
            try:
                await self._home.store.commit({prefix + LEAVING: withdrawn})
            except StorageError as error:
                self._home.fail(error)  # the next start decides which of both counts: none is used until then
            else:
                self.is_decided = False
            raise

    async def abandon(self) -> None:
        """Keep the source and remove the copy. If the target's store does not take it, the next start does."""
        if self.is_decided:
            return
        try:
            await self._clear()
        except DiskFullError as error:
            LOGGER.warning("log=%s the copy is removed later: %s", self._name, error)
            self.target.unforgotten.add(self._source.log_id)
        except StorageError as error:
            self.target.fail(error)

    async def _clear(self) -> None:
        if self._copy is not None:
            await self._copy.retire()
            self._copy = None
        await _discard(self.target, self._source.log_id, self._name + MOVING)


async def _discard(directory: LogDirectory, log_id: PartitionId, path: str) -> None:
    await forget_log(directory.store, log_id)
    directory.disk.remove_directory(path)


async def _take_over(log_id: PartitionId, source: LogDirectory | None, target: LogDirectory, name: str) -> str | None:
    """Carry out the decision; each step may have been done before. Returns the name of the deleted source."""
    deleted = None
    if source is not None:
        deleted = source.free_name(name, DELETED)
        source.disk.rename(name, deleted)
        await source.disk.sync_many([], [""])
    if not target.disk.exists(name + MOVING):
        # The name may be in memory only, if its sync failed: the next sync writes only what changes from now on.
        target.disk.rename(name, name + MOVING)
    target.disk.rename(name + MOVING, name)
    await target.disk.sync_many([], [""])
    try:
        await target.store.commit({key_prefix(log_id) + MOVED: None})
    except DiskFullError as error:
        # The move is complete. The next start finds the field and deletes it.
        LOGGER.warning(
            "directory=%s log=%s the move is complete, its field is deleted later: %s", target.disk.label, name, error
        )
    if source is not None:
        await source.forget(log_id)
    return deleted


def _next_attempt(leaving: bytes | None) -> int:
    last = 0 if leaving is None else decode_number("leaving", leaving)
    return last + 1 + last % 2


def _is_in_force(moved: bytes, source: LogDirectory | None, log_id: PartitionId) -> bool:
    """Whether the source still leaves by this attempt. Versions before stored no `leaving`."""
    leaving = None if source is None else source.store.get(key_prefix(log_id) + LEAVING)
    return leaving is None or decode_number("leaving", leaving) == decode_number("moved", moved)


async def finish_moves(directories: Sequence[LogDirectory]) -> None:
    """At the start, before logs are listed: finish the moves that were decided, discard the others."""
    for target in directories:
        try:
            await retry_resource_errors(target.disk.label, partial(_finish_target, directories, target))
        except StorageError as error:
            target.fail(error)


async def _finish_target(directories: Sequence[LogDirectory], target: LogDirectory) -> None:
    for name in target.disk.list(""):
        await _finish_name(directories, target, name)


async def _finish_name(directories: Sequence[LogDirectory], target: LogDirectory, name: str) -> None:
    path = name.removesuffix(MOVING)
    parsed = parse_directory_name(path)
    if parsed is None:
        return
    log_id = parsed[0]
    moved = target.store.get(key_prefix(log_id) + MOVED)
    source = next((other for other in directories if other is not target and other.disk.exists(path)), None)
    if moved is not None and _is_in_force(moved, source, log_id):
        LOGGER.info("directory=%s log=%s a decided move is finished", target.disk.label, path)
        await _take_over(log_id, source, target, path)
    elif name != path:
        LOGGER.info("directory=%s log=%s an incomplete copy is removed", target.disk.label, name)
        if target.disk.exists(path):
            target.disk.remove_directory(name)  # the stored state belongs to the real log
        elif await target.forget(log_id):
            target.disk.remove_directory(name)
