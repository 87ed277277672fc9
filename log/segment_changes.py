"""Drops the oldest segments of an open log, and swaps in cleaned ones.

All changes run under the log's lock and survive a crash at any point:

    drop    raise the start offset in the store, then rename the files away
    swap    store the intent, change all names, sync the directory, delete the intent

A full disk (`DiskFullError`) stops a change before it touches a file. If only the deletion of a swap's intent finds no
space, the swap is done: a crash finds nothing to do, and the next checkpoint deletes the intent.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

from tidelog.log import stored_state as stored
from tidelog.log.cleaner import CleanedSegment
from tidelog.log.config import LogConfig
from tidelog.log.log_appender import LogAppender
from tidelog.log.log_state import LogState
from tidelog.log.retention import ExpiredSegment, expired_segments
from tidelog.log.segment import CLEANED, DELETED, SUFFIXES, SWAP, SegmentInfo
from tidelog.log.stored_state import Intent, Writes
from tidelog.model.errors import DiskFullError, OffsetOutOfRangeError, StorageError
from tidelog.model.ids import Offset
from tidelog.world.disk import Disk

LOGGER = logging.getLogger(__name__)


class SegmentChanges:
    """Drops and swaps segments. Owns the files that were renamed away and wait to be removed."""

    __slots__ = ("_appender", "_deleted", "_state")

    def __init__(self, state: LogState, appender: LogAppender) -> None:
        self._state = state
        self._appender = appender
        # (time from which a file may be removed, its path)
        self._deleted: list[tuple[int, str]] = []

    def reset(self) -> None:
        """A reset of the log has removed all files."""
        self._deleted = []

    # Dropping the oldest

    async def advance_start(self, offset: int) -> None:
        """See `Log.advance_start`."""
        context, segments = self._state.context, self._state.segments
        async with context.lock:
            start = self._state.offsets.start_offset
            if context.is_closed or offset <= start:
                return
            if offset > segments.end_offset:
                raise OffsetOutOfRangeError(
                    f"{context.path}: the start cannot advance to {offset}, the log ends at {segments.end_offset}",
                    offset=offset,
                    start=start,
                    end=segments.end_offset,
                )
            await self._drop([info for info in segments.sealed if info.next_offset <= offset], offset)

    async def expire(self, bound: Offset, config: LogConfig) -> list[ExpiredSegment]:
        """See `Log.expire`. The lock is held for decision and change: a swap or a truncation may be under way."""
        context = self._state.context
        async with context.lock:
            if self._state.damage.current is not None or context.is_closed:
                return []
            with suppress(DiskFullError):  # sealed segments can still expire, which makes space
                self._appender.roll_if_due()
            expired = expired_segments(
                self._state.segments.sealed,
                config=config,
                now_ms=context.clock.now_ms(),
                log_start=self._state.offsets.start_offset,
                bound=self._state.producers.last_stable_offset(bound),
                active_bytes=self._state.segments.active.size,
            )
            if not expired:
                return []
            try:
                await self._drop_oldest(len(expired))
            except DiskFullError:
                # There is no space to move the recovery point. Segments below it can be dropped without that.
                mark = self._state.checkpoint.mark
                expired = [
                    info for info in expired if info.next_offset <= mark.offset and info.base_offset < mark.base_offset
                ]
                if not expired:
                    raise
                await self._drop_oldest(len(expired))
            return expired

    async def _drop_oldest(self, count: int) -> None:
        dropped = self._state.segments.sealed[:count]
        await self._drop(dropped, max(self._state.offsets.start_offset, dropped[-1].next_offset))

    async def _drop(self, dropped: list[SegmentInfo], start: int) -> None:
        context, mark = self._state.context, self._state.checkpoint.mark
        if start > mark.offset or (dropped and dropped[-1].base_offset >= mark.base_offset):
            # The stored recovery point must not be in a segment that is dropped.
            await self._state.checkpoint.store()
        epochs = self._state.epochs.copy()
        epochs.truncate_from_start(start)
        writes: Writes = {
            context.prefix + stored.START: stored.encode_number("start", start),
            context.prefix + stored.EPOCHS: stored.encode_epochs(epochs),
        }
        for info in dropped:
            writes[stored.segment_key(context.prefix, info.base_offset)] = None
        await context.store.commit(writes)
        # Appends may have added epochs meanwhile; the same truncation applies to them.
        self._state.epochs.truncate_from_start(start)
        self._state.offsets.set_start(start)
        self._state.segments.drop(dropped)
        self._state.checkpoint.segments_dropped(dropped)
        for info in dropped:
            self._rename_away(info.base_offset)

    def _rename_away(self, base: int) -> None:
        """Readers that have the files open go on. The names are free at once, the space after a delay."""
        context = self._state.context
        due_ms = context.clock.now_ms() + context.config.file_delete_delay_ms
        for suffix in SUFFIXES:
            path = self._state.segments.file_path(base, suffix)
            self._state.durability.forget(path)
            if context.disk.exists(path):
                try:
                    context.disk.rename(path, path + DELETED)
                except DiskFullError:
                    # No space for another name. The segment is dropped all the same: no caller may try again.
                    context.disk.remove(path)
                else:
                    self._deleted.append((due_ms, path + DELETED))

    async def remove_deleted(self, now_ms: int) -> int:
        """See `Log.remove_deleted`."""
        due = [(due_ms, path) for due_ms, path in self._deleted if due_ms <= now_ms]
        if not due or self._state.context.is_closed:
            return 0
        self._deleted = [(due_ms, path) for due_ms, path in self._deleted if due_ms > now_ms]
        try:
            await self._state.context.work.run(remove_files, self._state.context.disk, [path for _, path in due])
        except BaseException:
            # Some may be removed already; removing them again is harmless.
            self._deleted = due + self._deleted
            raise
        return len(due)

    # Swapping in cleaned segments

    async def replace(self, cleaned: list[CleanedSegment], generation: int | None) -> bool:
        """See `Log.replace_segments`."""
        context, checkpoint = self._state.context, self._state.checkpoint
        async with context.lock:
            if context.is_closed or self._state.damage.current is not None:
                return False
            if generation is not None and generation != self._state.durability.generation:
                return False
            old = [int(base) for segment in cleaned for base in segment.replaces]
            known = {info.base_offset: info for info in self._state.segments.sealed}
            if any(base not in known for base in old):
                return False
            for segment in cleaned:
                end = known[segment.replaces[-1]].next_offset
                assert segment.info.base_offset == segment.replaces[0], "a cleaned segment is named after its first"
                assert segment.info.next_offset == end, "a cleaned segment has a hole"
            # A crash would apply the intent of an earlier change to these files.
            await checkpoint.clear_intent()
            if not checkpoint.covers(old):
                await checkpoint.store()
            for path in self._paths_of(cleaned):
                context.disk.rename(path + CLEANED, path + SWAP)
            await self._state.durability.flush_names(context.path)
            await self._store_swap(cleaned, old)
            try:
                self._swap_files(cleaned, old)
            except StorageError as error:
                self._state.durability.fail_directory(error)  # it is decided: the next start finishes it
                raise
            await self._state.durability.flush_names(context.path)
            checkpoint.intent_done(stored.SWAP)
            try:
                await checkpoint.clear_intent()
            except DiskFullError as error:
                LOGGER.warning("log=%s the swap is done, its intent is deleted later: %s", context.path, error)
                self._state.durability.touch()
            return True

    def _paths_of(self, cleaned: list[CleanedSegment]) -> list[str]:
        return [
            self._state.segments.file_path(segment.info.base_offset, suffix)
            for segment in cleaned
            for suffix in segment.suffixes
        ]

    async def _store_swap(self, cleaned: list[CleanedSegment], old: list[int]) -> None:
        """The decision: from here on the swap is finished, after a crash by recovery."""
        prefix = self._state.context.prefix
        new = tuple((int(segment.info.base_offset), tuple(segment.suffixes)) for segment in cleaned)
        writes: Writes = {stored.segment_key(prefix, base): None for base in old}
        for segment in cleaned:
            writes[stored.segment_key(prefix, segment.info.base_offset)] = stored.encode_segment(segment.info)
        writes[prefix + stored.INTENT] = stored.encode_intent(Intent(stored.SWAP, tuple(old), new))
        writes[prefix + stored.GAPS] = stored.encode_number("gaps", 1)
        await self._state.context.store.commit(writes)
        self._state.lineage.gaps_stored()

    def _swap_files(self, cleaned: list[CleanedSegment], old: list[int]) -> None:
        for base in old:
            self._rename_away(base)
        for path in self._paths_of(cleaned):
            self._state.context.disk.rename(path + SWAP, path)
        self._state.segments.swap(old, [segment.info for segment in cleaned])


def remove_files(disk: Disk, paths: Sequence[str]) -> None:
    """Runs in a helper process: removing a large file takes a while."""
    for path in paths:
        disk.remove(path)
