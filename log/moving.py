"""A log moves to another directory of its node: copied while it is used, then swapped, whatever crashes on the way.

    <name>.moving     in the target directory: a copy that does not count; removed at the next start
    moved             in the target's store: the copy is whole and synced, it is the one that counts from here on

    copying --the owner holds appends, the rest is copied and synced--> whole --`moved` is stored--> decided
    decided --> the source is renamed as a deleted log --> the copy takes its name --> `moved` is forgotten

Before the decision a crash leaves the source as it was, after it the next start ends what was begun (`settle_moves`).
At no time do two logs stand under the name (`doubles`), and at no time does none count.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidelog.log import lineage
from tidelog.log.checkpoint import encode_number, key_prefix
from tidelog.log.directories import LogDirectory, forget_log, outlast_want, parse_directory_name
from tidelog.log.epochs import EpochHistory
from tidelog.log.log import Log
from tidelog.log.producers import ProducerState
from tidelog.model.errors import DiskFullError, InvalidRequestError, OffsetOutOfRangeError, StorageError
from tidelog.model.ids import Offset, PartitionId

if TYPE_CHECKING:
    from tidelog.log.logs import Logs

LOGGER = logging.getLogger(__name__)

MOVING = ".moving"
MOVED = b"moved"
PIECE_BYTES = 1 << 20


class LogMove:
    """One move. `copy` while the log is used, `finish` while nobody appends; or `abandon`."""

    def __init__(self, logs: "Logs", source: Log, home: LogDirectory, target: LogDirectory) -> None:
        self._logs = logs
        self._source = source
        self._home = home
        self.target = target
        self._name = source.path
        self._copy: Log | None = None
        self._generation = -1
        self._deletes_end = Offset(0)
        """Of the source when the copy was begun."""
        self.is_decided = False

    @property
    def copied_end(self) -> Offset:
        """So far everything was sound."""
        return self._source.start_offset if self._copy is None else self._copy.end_offset

    @property
    def copied_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.size

    @property
    def lag(self) -> int:
        """Offsets that the copy does not have yet."""
        return max(0, self._source.end_offset - self.copied_end)

    async def copy(self) -> None:
        """Returns when little is left to copy."""
        source = self._source
        while self._copy is None or source.size - self._copy.size > PIECE_BYTES:
            if not await self._copy_piece():
                return

    async def _copy_piece(self) -> bool:
        """False if there is nothing to copy now."""
        source = self._source
        if source.is_closed or source.damaged is not None:
            raise InvalidRequestError(f"{source.path} was closed or found damaged while it was moved")
        copy = self._copy
        if copy is None or self._has_missed(copy) or copy.end_offset < source.start_offset:
            copy = await self._begin()
        if copy.end_offset >= source.end_offset:
            return False
        try:
            # Where it is empty the first batch may begin below the log's start.
            offset = source.start_offset if copy.end_offset == copy.start_offset else copy.end_offset
            piece = await source.read(offset, bytes_max=PIECE_BYTES)
        except OffsetOutOfRangeError:
            return True  # retention was faster: begin anew
        if not piece.data or self._has_missed(copy):
            return bool(piece.data)
        if copy.end_offset == copy.start_offset != piece.base_offset:
            await copy.reset_to(piece.base_offset)
        copy.append_replicated(piece.data)
        await copy.flush()
        return True

    def _has_missed(self, copy: Log) -> bool:
        """Whether the source was cut, or its cleaner has removed deletes that were still to be copied: the copy may
        hold what they had deleted."""
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
        """Nobody appends to or cuts the source meanwhile. Returns the log in its new place."""
        source = self._source
        async with source.lock:
            pass  # a change of files that had begun is done
        await source.flush()
        more = True
        while more:
            more = await self._copy_piece()
        copy = self._copy
        assert copy is not None, "copied before it is finished"
        if copy.end_offset < source.end_offset:
            await copy.reset_to(source.end_offset)  # only an empty log, or one whose end was compacted away
        assert copy.end_offset == source.end_offset, "the copy is whole"
        await copy.advance_start(source.start_offset)
        copy.epochs = EpochHistory(list(source.epochs))
        copy.epochs_changed = True
        snapshot = source.producers.to_snapshot() if len(source.producers) else b""
        copy.producers = ProducerState.from_snapshot(snapshot) if snapshot else ProducerState()
        copy.gaps = True
        copy.lineage = source.lineage
        await lineage.store(copy)
        await copy.close()
        await self.target.store.commit({copy.prefix + MOVED: encode_number("moved", 1)})
        self.is_decided = True
        try:
            await source.retire()
            deleted = await _take_over(source.log_id, self._home, self.target, self._name)
        except StorageError as error:
            self._home.fail(error)  # the next start ends it
            raise
        return await self._logs.moved(source.log_id, self._home, self.target, deleted)

    async def abandon(self) -> None:
        """The source stays; nothing is left of the copy, unless the target's store has no room to forget it."""
        if self.is_decided:
            return
        try:
            await self._clear()
        except DiskFullError as error:
            LOGGER.warning("log=%s its copy is removed later: %s", self._name, error)
            self.target.unforgotten.add(self._source.log_id)

    async def _clear(self) -> None:
        if self._copy is not None:
            await self._copy.retire()
            self._copy = None
        await _discard(self.target, self._source.log_id, self._name + MOVING)


async def _discard(directory: LogDirectory, log_id: PartitionId, path: str) -> None:
    await forget_log(directory.store, log_id)
    directory.disk.remove_directory(path)


async def _take_over(log_id: PartitionId, source: LogDirectory | None, target: LogDirectory, name: str) -> str | None:
    """What follows the decision; each step may have been done before. Returns the deleted source's name."""
    deleted = None
    if source is not None:
        deleted = source.free_deleted_name(name)
        source.disk.rename(name, deleted)
        await source.disk.sync_many([], [""])
    if target.disk.exists(name + MOVING):
        target.disk.rename(name + MOVING, name)
        await target.disk.sync_many([], [""])
    try:
        await target.store.commit({key_prefix(log_id) + MOVED: None})
    except DiskFullError as error:
        # There is no copy left that it could mean: the next start ends the same move, of which nothing is left to do.
        LOGGER.warning("directory=%s log=%s its move is ended later: %s", target.disk.label, name, error)
    if source is not None:
        await source.forget(log_id)
    return deleted


async def settle_moves(directories: Sequence[LogDirectory]) -> None:
    """At the start, before anybody looks at the logs: end the moves that were decided, forget the others."""
    for target in directories:
        try:
            await outlast_want(target.disk.label, partial(_settle_target, directories, target))
        except StorageError as error:
            target.fail(error)


async def _settle_target(directories: Sequence[LogDirectory], target: LogDirectory) -> None:
    for name in target.disk.list(""):
        await _settle_name(directories, target, name)


async def _settle_name(directories: Sequence[LogDirectory], target: LogDirectory, name: str) -> None:
    path = name.removesuffix(MOVING)
    found = parse_directory_name(path)
    if found is None:
        return
    log_id = found[0]
    if target.store.get(key_prefix(log_id) + MOVED) is not None:
        LOGGER.info("directory=%s log=%s its move is ended", target.disk.label, path)
        others = [other for other in directories if other is not target and other.disk.exists(path)]
        await _take_over(log_id, others[0] if others else None, target, path)
    elif name != path:
        LOGGER.info("directory=%s log=%s was not copied to its end", target.disk.label, name)
        if target.disk.exists(path):
            target.disk.remove_directory(name)  # what is stored is the real log's
        elif await target.forget(log_id):
            target.disk.remove_directory(name)
