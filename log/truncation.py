"""Truncates a log at its end, repairs a damaged one, or resets it to an empty one.

Both run under the log's lock and survive a crash at any point:

    truncate    lower the recovery point in the store (synced), then truncate the files, then sync them
    reset       store the intent, remove all files, sync the directory, delete the intent

A full disk (`DiskFullError`) stops a change before it touches a file: the log is as it was, and the caller may retry.
One exception: the reset is done, but its intent cannot be deleted. A crash would reset the log again, so it rejects
appends until the intent is deleted.

Between the first change of a file and the last there is no await, so no reader sees half of it.
"""

import logging
from dataclasses import replace

from tidelog.log import stored_state as stored
from tidelog.log.damage import Damage
from tidelog.log.epochs import EpochHistory
from tidelog.log.file_pool import run_async
from tidelog.log.index_rebuilder import IndexRebuilder
from tidelog.log.log_scan import LogScan, ScanRequest, empty_mark, replay, scan_log
from tidelog.log.log_state import LogState
from tidelog.log.producers import ProducerState
from tidelog.log.read_plans import IndexFaultError, locate_steps
from tidelog.log.segment import (
    INDEX,
    LOG,
    TIME_INDEX,
    TRANSACTION_INDEX,
    ActiveSegment,
    RecoveryMark,
    parse_name,
)
from tidelog.log.segment_changes import SegmentChanges
from tidelog.log.stored_state import Intent, Writes
from tidelog.log.transactions import ENTRY_BYTES as ABORTED_ENTRY_BYTES
from tidelog.model.errors import CorruptBatchError, DamagedLogError, DiskFullError
from tidelog.model.ids import Offset, Position

LOGGER = logging.getLogger(__name__)


class Truncation:
    """Truncates and resets one log. Owns no state: it drives the owners in the order that the module states."""

    __slots__ = ("_changes", "_rebuilder", "_state")

    def __init__(self, state: LogState, rebuilder: IndexRebuilder, changes: SegmentChanges) -> None:
        self._state = state
        self._rebuilder = rebuilder
        self._changes = changes

    # Truncation

    async def truncate(self, offset: int) -> None:
        """See `Log.truncate`."""
        context = self._state.context
        async with context.lock:
            assert not context.is_closed, f"{context.path} is closed"
            await self._state.checkpoint.clear_intent()
            damage, start_offset = self._state.damage.current, self._state.offsets.start_offset
            if damage is not None:
                offset = min(offset, damage.good_end)
            elif offset >= self._state.segments.end_offset:
                return
            if offset < start_offset or (damage is not None and offset == start_offset):
                await self._reset(offset)
                return
            with context.changing():
                await self._truncate(offset)

    async def _truncate(self, offset: int) -> None:
        base, position, bound = await self._locate(offset)
        start_offset = self._state.offsets.start_offset
        if bound < start_offset:
            # The batch that goes spans the start too: nothing readable is left.
            await self._reset(start_offset)
            return
        scan, has_producers = await self._scan_prefix(base, bound)
        if position is None:
            if scan.end_offset < start_offset:
                await self._reset(start_offset)
                return
            position = Position(scan.segments[0].size if scan.segments else 0)
        active = scan.segments[0] if scan.segments else self._empty_segment(base)
        end = scan.end_offset
        if active.size != position:
            await self._state.damage.record(Damage(Offset(end), scan.fault or "corrupt in the part that stays"))
            raise DamagedLogError(
                f"{self._state.context.path}: {scan.fault}", path=self._state.context.path, good_end=end
            )
        producers = ProducerState.from_snapshot(scan.producers) if scan.producers else ProducerState()
        if not has_producers:
            producers = await self._replay_into(active, end)
        epochs = self._state.epochs.copy()
        if end < self._state.segments.end_offset:
            epochs.truncate_from_end(end)
        await self._lower_mark(active, end, epochs, producers)
        self._truncate_files(active, end)
        self._state.epochs.replace(epochs)
        self._state.producers.replace_with(producers)
        self._state.checkpoint.truncated(base, end)
        self._state.damage.clear()
        try:
            await self._state.checkpoint.store()
        except DiskFullError as error:
            # The truncation is done, so the caller gets no error. The mark was lowered; a checkpoint raises it again.
            LOGGER.warning("log=%s no checkpoint after a truncation: %s", self._state.context.path, error)
            await self._state.durability.flush()

    async def _locate(self, offset: int) -> tuple[int, int | None, int]:
        """(base offset of the segment, position in it, offset) where the batch begins that holds `offset`.

        The position is None if rot in front of the good end of a damaged log hides it.
        """
        while True:
            try:
                return await run_async(locate_steps(self._state.segments, self._state.context.config, offset))
            except IndexFaultError as fault:
                await self._rebuilder.rebuild_locked(fault.base_offset)
            except CorruptBatchError:
                if self._state.damage.current is None:
                    raise
                return self._state.segments.find(offset).base_offset, None, offset

    async def _scan_prefix(self, base: int, bound: int) -> tuple[LogScan, bool]:
        """Scan the segment that will be the last, up to its new end; from the recovery point if that is before it.

        The second value is False if the producers before the scanned part are not known.
        """
        context, checkpoint, now_ms = self._state.context, self._state.checkpoint, self._state.context.clock.now_ms()
        mark, snapshot = empty_mark(base, created_ms=now_ms), None
        has_producers = base == self._state.segments.first_offset
        if (
            self._state.damage.current is None
            and checkpoint.mark.base_offset == base
            and checkpoint.mark.offset <= bound
        ):
            mark, has_producers = checkpoint.mark, True
            if mark.has_producers:
                snapshot = checkpoint.stored_snapshot(mark.offset)
                has_producers = snapshot is not None
        elif checkpoint.has_snapshot_at(base):
            snapshot, has_producers = checkpoint.snapshot_at(base)
        request = ScanRequest(
            directory=context.path,
            bases=(base,) if context.disk.exists(self._state.segments.file_path(base)) else (),
            mark=mark,
            epoch=-1,
            gaps=self._state.lineage.has_gaps,
            index_interval_bytes=context.config.index_interval_bytes,
            producers=snapshot or None,
            stop_offset=bound,
            now_ms=now_ms,
        )
        return await context.work.run(scan_log, context.disk, request), has_producers

    async def _replay_into(self, active: ActiveSegment, end: int) -> ProducerState:
        """Replay from the newest snapshot for the producers at `end` and the aborted transactions of `active`."""
        context, segments = self._state.context, self._state.segments
        bases = [view.base_offset for view in segments.from_offset(segments.first_offset)]
        start, snapshot = self._state.checkpoint.newest_snapshot(active.base_offset, bases[0])
        span = [base for at, base in enumerate(bases) if base < end and (at + 1 == len(bases) or bases[at + 1] > start)]
        now_ms = context.clock.now_ms()
        replayed = await context.work.run(replay, context.disk, context.path, span, snapshot, start, end, now_ms)
        active.replace_aborted(replayed.aborted.get(active.base_offset, b""))
        return ProducerState.from_snapshot(replayed.producers) if replayed.producers else ProducerState()

    async def _lower_mark(
        self, active: ActiveSegment, end: int, epochs: EpochHistory, producers: ProducerState
    ) -> None:
        """Remove from the store what is about to be truncated. Durable when this returns."""
        context, checkpoint = self._state.context, self._state.checkpoint
        prefix = context.prefix
        writes: Writes = {
            prefix + stored.EPOCHS: stored.encode_epochs(epochs),
            prefix + stored.HIGH_WATERMARK: self._state.offsets.lower_high_watermark(end),
        }
        if end < checkpoint.mark.offset or self._state.damage.current is not None:
            mark = _mark_without_indexes(active, end, has_producers=len(producers) > 0)
            await self._lower_stored(mark, producers, writes)
            await context.store.commit(writes)
            checkpoint.lowered(mark)
        else:
            await context.store.commit(writes)
        self._state.epochs.saved()

    async def _lower_stored(self, mark: RecoveryMark, producers: ProducerState, writes: Writes) -> None:
        context, prefix, end = self._state.context, self._state.context.prefix, mark.offset
        # What is fetched again is dirty: a tombstone must not be removed before the record that it deletes. The
        # cleaner's checkpoint is at or below the mark, so only this truncation can reach below it.
        writes[prefix + stored.CLEANER] = None
        writes[prefix + stored.MARK] = stored.encode_mark(mark)
        writes[prefix + stored.DAMAGE] = None
        # Damage may be below the stored start, which would then hide what is appended from here on.
        writes[prefix + stored.START] = stored.encode_number("start", self._state.offsets.start_offset)
        if self._state.durability.failed is None:
            # The scan ended at or below the suspect range: the log goes on without it. After a failure in this process
            # the log takes no more appends, and the next recovery still needs the field.
            writes[prefix + stored.SUSPECT] = None
        if context.store.keys(prefix + stored.INTENT):
            # It could not be read, or its end was not stored: the names as they are now count.
            await self._state.durability.flush_names(context.path)
            writes[prefix + stored.INTENT] = None
        for key in context.store.keys(prefix + stored.SEGMENT):
            if int.from_bytes(key[-8:], "big") >= mark.base_offset:
                writes[key] = None
        for at in self._state.checkpoint.snapshots:
            if at > end:
                writes[stored.producers_key(prefix, at)] = None
        if mark.has_producers:
            writes[stored.producers_key(prefix, end)] = producers.to_snapshot()

    def _truncate_files(self, active: ActiveSegment, end: int) -> None:
        """Remove the newest files first: a crash leaves no hole. The batches of a segment go last: after an error
        before that the log can be read, and truncated again."""
        context, segments, durability = self._state.context, self._state.segments, self._state.durability
        kept_bytes = {
            LOG: active.size,
            INDEX: active.index_bytes,
            TIME_INDEX: active.time_bytes,
            TRANSACTION_INDEX: active.aborted_bytes,
        }
        names = [parsed for name in context.disk.list(context.path) if (parsed := parse_name(name)) is not None]
        files = [(base, suffix != LOG, suffix) for base, suffix, state in names if not state]
        for base, _, suffix in sorted(files, reverse=True):
            path = segments.file_path(base, suffix)
            if base > active.base_offset:
                durability.forget(path)
                context.disk.remove(path)
            elif base == active.base_offset:
                file = durability.writable(path)
                if file.size > kept_bytes[suffix]:
                    file.truncate(kept_bytes[suffix])
        durability.touch_directory(context.path)
        segments.truncate(active, end)
        durability.cut(end)

    def _empty_segment(self, base: int) -> ActiveSegment:
        interval_bytes = self._state.context.config.index_interval_bytes
        return ActiveSegment(base, created_ms=self._state.context.clock.now_ms(), index_interval_bytes=interval_bytes)

    # Reset

    async def reset_to(self, offset: int) -> None:
        """See `Log.reset_to`."""
        async with self._state.context.lock:
            assert not self._state.context.is_closed, f"{self._state.context.path} is closed"
            await self._reset(offset)

    async def _reset(self, offset: int) -> None:
        context, prefix = self._state.context, self._state.context.prefix
        with context.changing():
            mark = empty_mark(offset, created_ms=context.clock.now_ms())
            writes: Writes = {
                key: None for kind in (stored.SEGMENT, stored.PRODUCERS) for key in context.store.keys(prefix + kind)
            }
            writes[prefix + stored.INTENT] = stored.encode_intent(Intent(stored.RESET))
            writes[prefix + stored.MARK] = stored.encode_mark(mark)
            writes[prefix + stored.START] = stored.encode_number("start", offset)
            writes[prefix + stored.EPOCHS] = stored.encode_epochs(EpochHistory())
            writes[prefix + stored.DAMAGE] = None
            writes[prefix + stored.SUSPECT] = None
            writes[prefix + stored.CLEANER] = None
            writes[prefix + stored.HIGH_WATERMARK] = self._state.offsets.lower_high_watermark(offset)
            await context.store.commit(writes)
            for name in context.disk.list(context.path):
                if parse_name(name) is not None:
                    path = f"{context.path}/{name}"
                    self._state.durability.forget(path)
                    context.disk.remove(path)
            self._state.segments.reset(self._empty_segment(offset))
            self._state.durability.reset(offset)
            self._state.offsets.set_start(offset)
            self._state.checkpoint.reset(mark)
            self._changes.reset()
            self._state.epochs.replace(EpochHistory())
            self._state.epochs.saved()
            self._state.producers.replace_with(ProducerState())
            self._state.damage.clear()
            await self._state.durability.flush_names(context.path)
            self._state.checkpoint.intent_done(stored.RESET)
            await self._state.checkpoint.clear_intent()


def _mark_without_indexes(active: ActiveSegment, end: int, *, has_producers: bool) -> RecoveryMark:
    """A mark that covers no index entry: the files still have others. Recovery drops them; reads rebuild the index."""
    bare = ActiveSegment(active.base_offset, created_ms=active.created_ms, index_interval_bytes=0)
    return replace(
        bare.mark(end, has_producers=has_producers),
        position=Position(active.size),
        crc=active.crc,
        modified_ms=active.modified_ms,
        first_timestamp=active.first_timestamp,
        largest_timestamp=active.index.largest_timestamp,
        largest_offset=active.index.largest_offset,
        aborted_bytes=active.aborted_count * ABORTED_ENTRY_BYTES,
    )
