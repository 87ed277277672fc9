"""Rebuilds the index files of a segment from its batches.

A transaction index may lose entries by that: those of transactions whose batches are gone (compaction, retention).
"""

from dataclasses import replace

from tidelog.log.config import FlushMode
from tidelog.log.log_scan import build_indexes, replay
from tidelog.log.log_state import LogState
from tidelog.log.segment import INDEX, TIME_INDEX, TRANSACTION_INDEX, SegmentInfo
from tidelog.log.transactions import ENTRY_BYTES


class IndexRebuilder:
    """Rebuilds indexes of an open log. Appends and reads go on meanwhile."""

    __slots__ = ("_state",)

    def __init__(self, state: LogState) -> None:
        self._state = state

    async def rebuild(self, base_offset: int) -> None:
        """Rebuild the indexes of one segment. A log that is closed stays as it is."""
        async with self._state.context.lock:
            if not self._state.context.is_closed:
                await self.rebuild_locked(base_offset)

    async def rebuild_locked(self, base_offset: int) -> None:
        """As `rebuild`; the caller holds the lock. A segment that is gone needs no index."""
        context, segments, durability = self._state.context, self._state.segments, self._state.durability
        while True:
            is_active = base_offset == segments.active.base_offset
            if not is_active and all(info.base_offset != base_offset for info in segments.sealed):
                return
            info = segments.info(base_offset)
            interval_bytes = context.config.index_interval_bytes
            built = await context.work.run(
                build_indexes, context.disk, context.path, base_offset, info.size, interval_bytes, not is_active
            )
            aborted = await self.aborted_of(info) if info.aborted else b""
            if is_active == (base_offset == segments.active.base_offset):
                break  # else the segment was sealed meanwhile
        if is_active:
            segments.active.replace_index(info, built, aborted)
        for suffix, entries in (
            (INDEX, bytes(built.offsets or b"")),
            (TIME_INDEX, bytes(built.times or b"")),
            (TRANSACTION_INDEX, aborted),
        ):
            path = segments.file_path(base_offset, suffix)
            durability.forget(path)
            context.disk.remove(path)
            if entries or suffix != TRANSACTION_INDEX:
                durability.writable(path, create=True).append(entries)
        durability.touch_directory(context.path)
        count = len(aborted) // ENTRY_BYTES
        if not is_active and count != info.aborted:
            counted = replace(segments.info(base_offset), aborted=count)
            segments.replace_info(counted)
            self._state.checkpoint.info_changed(counted)
        segments.index_rebuilt(base_offset)
        if context.config.flush_mode is FlushMode.SYNC:
            durability.request_sync()
        else:
            durability.touch()

    async def aborted_of(self, info: SegmentInfo) -> bytes:
        """The transaction index of one segment, by a replay from the newest snapshot before it."""
        context, segments = self._state.context, self._state.segments
        bases = [view.base_offset for view in segments.from_offset(segments.first_offset)]
        start, snapshot = self._state.checkpoint.newest_snapshot(info.base_offset, bases[0])
        ends = [*bases[1:], segments.end_offset]
        span = [base for base, end in zip(bases, ends, strict=True) if base <= info.base_offset and end > start]
        now_ms = context.clock.now_ms()
        replayed = await context.work.run(
            replay, context.disk, context.path, span, snapshot, start, info.next_offset, now_ms
        )
        return replayed.aborted.get(info.base_offset, b"")
