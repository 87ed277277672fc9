"""Opens a log: after a clean stop without reading segments, after a crash by reading past the recovery point.

    no directory, and no stored state: a new log, empty; its mark is stored, nothing is read or synced

    files + stored state
      |  finish or undo changes of several files that were under way (intent), drop what is below the start
      v
    closed cleanly, and the directory is unchanged? --yes--> open: no sealed segment is read
      | no
      v
    all below the recovery point present, by name and size? --no--> damaged(good end): nothing is truncated or removed
      | yes
      v
    scan from the recovery point: CRC, offsets, epochs; stop at the first fault, or where a failed sync makes suspect
      |
      v
    truncate there, write the indexes, sync, commit the new recovery point at the end    (the durable end)

Everything below the recovery point was acknowledged as being on the device. If it is missing, truncating it silently
would turn one bad disk into lost records. So the log opens as damaged: readable below the good end, closed to appends,
until its owner decides. Recovery does not read sealed segments; `log_scan.scrub` finds rot there. Rot between the
recovery point and the durable end (a second of traffic) is treated as a torn tail.
"""

from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise

from tidelog.log import fallback_notes
from tidelog.log import stored_state as stored
from tidelog.log.config import FlushMode
from tidelog.log.damage import Damage
from tidelog.log.epochs import EpochHistory
from tidelog.log.lineage import Lineage, assume_lineage
from tidelog.log.lineage import encode as encode_lineage
from tidelog.log.log_context import LogContext
from tidelog.log.log_scan import LogScan, ScanRequest, empty_mark, file_crc, scan_log, scrub
from tidelog.log.producers import ProducerState
from tidelog.log.recovery_files import RecoveryFiles, close_files, epochs_before, merge_epochs, rewrite_file
from tidelog.log.recovery_result import RecoveryReport, RecoveryResult
from tidelog.log.segment import LOG, SUFFIXES, ActiveSegment, RecoveryMark, SegmentInfo, file_name, file_path
from tidelog.log.stored_state import StoredState, Writes
from tidelog.model.errors import StorageError, UnsyncedError
from tidelog.model.ids import Offset
from tidelog.world.disk import File


class Recovery:
    """One opening of one log. `run` is called once."""

    def __init__(self, context: LogContext, *, verify: bool = False) -> None:
        self._disk, self._store, self._work, self._clock = context.disk, context.store, context.work, context.clock
        self._path, self._log_id, self._prefix = context.path, context.log_id, context.prefix
        self._config = context.config
        self._verify = verify
        self._files = RecoveryFiles(
            context.disk, context.work, context.path, context.config.index_interval_bytes, context.clock.now_ms()
        )

    async def run(self) -> RecoveryResult:
        is_new = not self._disk.exists(self._path)
        if is_new:
            self._disk.make_directory(self._path)
        state = stored.load_state(self._store, self._log_id)
        if is_new and state == StoredState():
            return await self._begin(state)
        await self._store_notes(state)
        bases = self._files.bases()
        if "intent" not in state.lost:
            await self._files.finish_changes(state, self._store, self._prefix)
            bases = self._files.drop_below_start(state, self._files.bases())
        recovered = None
        if self._is_clean(state, bases):
            recovered = await self._open_clean(state, bases)
        if recovered is None:
            recovered = await self._open_after_crash(state, bases)
        is_blank = not recovered.sealed and recovered.active.size == 0
        recovered.is_named = not (is_new or is_blank)
        recovered.high_watermark = state.high_watermark_below(recovered.end_offset)
        return recovered

    async def _store_notes(self, state: StoredState) -> None:
        """Move what a former process could only note in the directory to the state store."""
        notes = fallback_notes.read(self._disk, self._path)
        for field in notes:
            known = state.suspect if field == stored.SUSPECT else state.unsynced
            notes[field] = notes[field] if known is None else min(known, notes[field])
        if notes:
            kinds = fallback_notes.KINDS
            await self._store.commit(
                {self._prefix + field: stored.encode_number(kinds[field], offset) for field, offset in notes.items()}
            )
            state.suspect = notes.get(stored.SUSPECT, state.suspect)
            state.unsynced = notes.get(stored.UNSYNCED, state.unsynced)

    async def _begin(self, state: StoredState) -> RecoveryResult:
        """Create a new log. Its directory entry is synced with its first records: without them nothing is lost."""
        active = self._empty(0)
        mark = active.mark(0, has_producers=False)
        epochs, producers = EpochHistory(), ProducerState()
        await self._commit(state, mark, 0, epochs, producers, {}, {})
        return RecoveryResult(
            start_offset=0,
            end_offset=0,
            sealed=[],
            active=active,
            epochs=epochs,
            producers=producers,
            snapshots=[],
            mark=mark,
            gaps=self._gaps(state),
            lineage=self._lineage(state, state.mark or mark),
            report=self._report(state, mark),
            is_named=False,
        )

    # After a clean stop

    def _is_clean(self, state: StoredState, bases: list[int]) -> bool:
        """Whether the log was closed cleanly and the directory is unchanged. Reads no sealed segment."""
        mark = state.mark
        if mark is None or state.clean != mark.offset or state.lost or self._verify:
            return False
        if state.suspect is not None or state.damage is not None or state.unsynced is not None:
            return False
        sealed = self._known_sealed(state, mark)
        below = [base for base in bases if base < mark.base_offset]
        above = [base for base in bases if base > mark.base_offset]
        if above or below != [info.base_offset for info in sealed]:
            return False
        ends = [*below[1:], mark.base_offset] if below else []
        if any(info.next_offset != end for info, end in zip(sealed, ends, strict=True)):
            return False
        first = sealed[0].base_offset if sealed else mark.base_offset
        if state.start is not None and state.start < first:
            return False
        return self._files.size(mark.base_offset) == mark.position

    @staticmethod
    def _known_sealed(state: StoredState, mark: RecoveryMark) -> list[SegmentInfo]:
        start = state.start or 0
        return [
            info
            for base, info in sorted(state.segments.items())
            if base < mark.base_offset and info.next_offset > start
        ]

    async def _open_clean(self, state: StoredState, bases: list[int]) -> RecoveryResult | None:
        mark = state.mark
        assert mark is not None, "a clean stop has a mark"
        sealed = self._known_sealed(state, mark)
        active = ActiveSegment.resume(mark, index_interval_bytes=self._config.index_interval_bytes)
        files: list[File] = []
        try:
            await self._files.restore_indexes(active, files)
            if files:
                await self._disk.sync_many(files, [self._path])
        finally:
            close_files(files)
        producers = await self._files.producers_at(state, mark, bases)
        start = self._start(state, bases, mark)
        if not self._files.aborted_is_whole(active):
            await self._files.rebuild_aborted(state, active, bases, mark.offset)
        epochs = state.epochs
        if epochs is None:
            epochs = await self._files.epochs_from_batches(bases, start, mark.offset)
        mark = active.mark(mark.offset, has_producers=len(producers) > 0)
        await self._commit(state, mark, start, epochs, producers, {}, {})
        return RecoveryResult(
            start_offset=start,
            end_offset=mark.offset,
            sealed=sealed,
            active=active,
            epochs=epochs,
            producers=producers,
            snapshots=sorted(state.producers),
            mark=mark,
            gaps=self._gaps(state),
            lineage=self._lineage(state, state.mark or mark),
            report=self._report(state, mark, clean=True),
        )

    # After a crash

    async def _open_after_crash(self, state: StoredState, bases: list[int]) -> RecoveryResult:
        first = bases[0] if bases else state.start or 0
        mark = state.mark or empty_mark(first, created_ms=self._clock.now_ms())
        sealed, damage = await self._check_below(state, mark, bases)
        if damage is None and self._files.size(mark.base_offset) < mark.position:
            good = await self._scan_one(state, mark.base_offset)
            damage = Damage(
                Offset(min(good.end_offset, mark.offset)),
                f"the log ends at {good.end_offset}, below its recovery point {mark.offset}",
            )
        if damage is None and self._verify and state.mark is not None and mark.position > 0:
            damage = await self._check_active(state, mark)
        if damage is not None:
            return await self._open_damaged(state, mark, sealed, damage, bases)
        later = tuple(base for base in bases if base >= mark.base_offset)
        producers = await self._files.producers_at(state, mark, bases)
        scan = await self._scan(state, mark, later, producers)
        damage = self._stored_damage(state, mark, scan)
        if damage is not None and await self._is_restored(state, sealed, damage):
            damage = None
        if damage is not None:
            read = [segment.info(following.base_offset) for segment, following in pairwise(scan.segments)]
            return await self._open_damaged(state, mark, [*sealed, *read], damage, bases)
        return await self._open_sound(state, mark, sealed, scan, later, bases)

    async def _check_below(
        self, state: StoredState, mark: RecoveryMark, bases: list[int]
    ) -> tuple[list[SegmentInfo], Damage | None]:
        """The sealed segments below the recovery point, checked by name and size; those after damage are left out."""
        sealed: list[SegmentInfo] = []
        start = self._start(state, bases, mark)
        bases_known: set[int] = {info.base_offset for info in self._known_sealed(state, mark)}
        bases_known.update(base for base in bases if base < mark.base_offset)
        ordered = sorted(bases_known)
        expected = min([start, *ordered, mark.base_offset])
        for base, following in pairwise([*ordered, mark.base_offset]):
            if base > expected or base not in bases:
                return sealed, Damage(Offset(max(expected, start)), f"the segment at offset {expected} is missing")
            info = state.segments.get(base)
            if info is None:
                info, damage = await self._scan_sealed(state, base, following)
            else:
                info, damage = await self._compare(state, info, following)
            if damage is not None:
                return sealed, damage
            sealed.append(info)
            expected = following
        if expected < mark.base_offset:
            return sealed, Damage(Offset(max(expected, start)), f"the segment at offset {expected} is missing")
        return sealed, None

    async def _compare(
        self, state: StoredState, info: SegmentInfo, following: int
    ) -> tuple[SegmentInfo, Damage | None]:
        """Check a sealed segment against its stored info: its size, and with `verify` all of its bytes."""
        if self._files.size(info.base_offset) == info.size and info.next_offset == following and not self._verify:
            return info, None
        result = await self._work.run(scrub, self._disk, self._path, info, self._gaps(state))
        self._files.bytes_read += result.size
        if result.fault is not None:
            return info, Damage(Offset(result.good_end), result.fault)
        if info.next_offset != following:
            reason = f"segment {info.base_offset} ends at {info.next_offset}, the next begins at {following}"
            return info, Damage(Offset(min(info.next_offset, following)), reason)
        return info, None

    async def _scan_sealed(self, state: StoredState, base: int, following: int) -> tuple[SegmentInfo, Damage | None]:
        """The stored info of a sealed segment is lost: read the segment."""
        scan = await self._scan_one(state, base)
        segment = scan.segments[0] if scan.segments else self._empty(base)
        info = segment.info(following)
        self._files.rebuilt.append(f"segment {base}")
        if scan.fault is not None or scan.end_offset > following:
            return info, Damage(
                Offset(min(scan.end_offset, following)), scan.fault or f"segment {base} goes past the next one"
            )
        if scan.end_offset < following and not self._gaps(state):
            reason = f"records between offsets {scan.end_offset} and {following} are missing"
            return info, Damage(Offset(scan.end_offset), reason)
        return info, None

    async def _check_active(self, state: StoredState, mark: RecoveryMark) -> Damage | None:
        """Check the part of the active segment below the recovery point: batch by batch, and its CRC."""
        scan = await self._scan_one(state, mark.base_offset)
        if scan.end_offset < mark.offset:
            return Damage(Offset(scan.end_offset), scan.fault or "corrupt below the recovery point")
        path = file_path(self._path, mark.base_offset, LOG)
        if mark.crc is None or await self._work.run(file_crc, self._disk, path, mark.position) == mark.crc:
            return None
        # Every batch is sound, so a byte outside of the batch CRCs differs: it is unknown which one.
        return Damage(Offset(mark.base_offset), f"the CRC of {path} up to {mark.position} differs from the stored one")

    def _empty(self, base: int) -> ActiveSegment:
        return ActiveSegment(
            base, created_ms=self._clock.now_ms(), index_interval_bytes=self._config.index_interval_bytes
        )

    async def _scan_one(self, state: StoredState, base: int) -> LogScan:
        """Scan all of one segment."""
        return await self._scan(state, empty_mark(base), (base,) if self._files.size(base) else (), None)

    async def _scan(
        self, state: StoredState, mark: RecoveryMark, bases: tuple[int, ...], producers: ProducerState | None
    ) -> LogScan:
        epoch = state.epochs.epoch_for(mark.offset - 1) if state.epochs is not None and mark.offset > 0 else -1
        request = ScanRequest(
            directory=self._path,
            bases=bases,
            mark=mark,
            epoch=epoch,
            gaps=self._gaps(state),
            index_interval_bytes=self._config.index_interval_bytes,
            producers=producers.to_snapshot() if producers is not None and len(producers) else None,
            stop_offset=state.suspect,
            now_ms=self._clock.now_ms(),
        )
        scan = await self._work.run(scan_log, self._disk, request)
        self._files.bytes_read += scan.bytes_read
        return scan

    def _stored_damage(self, state: StoredState, mark: RecoveryMark, scan: LogScan) -> Damage | None:
        """Damage that the stored state names, or that must be assumed because stored fields cannot be read."""
        if scan.end_offset < mark.offset:
            return Damage(Offset(scan.end_offset), scan.fault or "corrupt below the recovery point")
        if state.damage is not None:
            good_end, reason, segment = state.damage
            return Damage(Offset(min(good_end, scan.end_offset)), reason, segment)
        if state.mark is None and scan.segments:
            # Opening stores a mark before anything is written, so the mark was lost.
            return Damage(Offset(scan.end_offset), "the recovery point is lost: the former end of the log is unknown")
        if "suspect" in state.lost:
            return Damage(mark.offset, "a sync had failed, and the stored durable end cannot be read")
        if "intent" in state.lost:
            return Damage(
                Offset(self._start(state, [], mark)), "a change of files was under way, and its intent cannot be read"
            )
        return None

    async def _is_restored(self, state: StoredState, sealed: list[SegmentInfo], damage: Damage) -> bool:
        """Whether the damage is a sealed segment that has its checksum: it was restored before the crash."""
        info = next((info for info in sealed if info.base_offset == damage.segment), None)
        if info is None or info.crc is None or state.lost:
            return False
        path = self._files.segment_path(info.base_offset)
        if await self._work.run(file_crc, self._disk, path, info.size) != info.crc:
            return False
        await self._disk.sync_many([], [self._path])  # the name of the restored file may not be on the device
        return True

    async def _open_sound(
        self,
        state: StoredState,
        mark: RecoveryMark,
        sealed: list[SegmentInfo],
        scan: LogScan,
        later: tuple[int, ...],
        bases: list[int],
    ) -> RecoveryResult:
        """Truncate the log where the scan ended, make it durable, and commit that."""
        segments = scan.segments or [ActiveSegment.resume(mark, index_interval_bytes=self._config.index_interval_bytes)]
        active = segments[-1]
        bytes_truncated = self._truncate_files(active, later)
        is_unsynced = state.unsynced is not None or "unsynced" in state.lost
        is_suspect = state.suspect is not None or is_unsynced
        if is_suspect and not sealed and len(segments) == 1 and active.size == 0:
            # No sync before the failed one covered this log, so its directory entry may not be on the device either.
            # Create the directory again: the next sync writes it.
            self._disk.remove_directory(self._path)
            self._disk.make_directory(self._path)
        if is_suspect:
            fallback_notes.erase(self._disk, self._path)
        infos = await self._make_durable(segments, mark, is_unsynced=is_unsynced)
        end = scan.end_offset
        start = min(self._start(state, bases, mark), end)
        epochs = state.epochs
        if epochs is None:
            epochs = await self._files.epochs_from_batches(bases, start, end) if end > start else EpochHistory()
        epochs = merge_epochs(epochs_before(epochs, mark.offset), scan.epochs, log_end=end)
        epochs = merge_epochs(state.epochs or EpochHistory(), list(epochs), log_end=end, read_from=mark.offset)
        epochs = self._lineage(state, mark).complete(epochs, log_start=start, log_end=end)
        producers = ProducerState.from_snapshot(scan.producers) if scan.producers else ProducerState()
        if not self._files.aborted_is_whole(active):
            await self._files.rebuild_aborted(state, active, bases, end)
        new_mark = active.mark(end, has_producers=len(producers) > 0)
        cleared: Writes = dict.fromkeys(self._snapshots_above(state, end))
        await self._commit(state, new_mark, start, epochs, producers, infos, cleared)
        snapshots = sorted(
            {offset for offset in state.producers if offset <= end} | ({end} if len(producers) else set())
        )
        return RecoveryResult(
            start_offset=start,
            end_offset=end,
            sealed=[*sealed, *infos.values()],
            active=active,
            epochs=epochs,
            producers=producers,
            snapshots=snapshots,
            mark=new_mark,
            gaps=self._gaps(state),
            lineage=self._lineage(state, state.mark or mark),
            report=self._report(state, mark, scan=scan, bytes_truncated=bytes_truncated),
        )

    async def _make_durable(
        self, segments: list[ActiveSegment], mark: RecoveryMark, *, is_unsynced: bool
    ) -> dict[int, SegmentInfo]:
        """Restore the indexes of the scanned segments and sync them; returns the infos of the sealed ones.

        Not covered: if the very first sync of a log was that of a recovery, and failed, the name of its directory may
        not get to the device later either.
        """
        infos: dict[int, SegmentInfo] = {}
        files: list[File] = []
        if is_unsynced:
            for segment in segments:
                if self._files.size(segment.base_offset):
                    path = self._files.segment_path(segment.base_offset)
                    await self._work.run(rewrite_file, self._disk, path)
        try:
            for segment, following in pairwise(segments):
                segment.index.add_time()
                infos[segment.base_offset] = segment.info(following.base_offset)
            for segment in segments:
                if self._files.size(segment.base_offset) or segment.size:
                    files.append(self._disk.open(self._files.segment_path(segment.base_offset)))
                await self._files.restore_indexes(segment, files)
            await self._sync(files, [self._path, self._path.rpartition("/")[0]], mark.offset)
        finally:
            close_files(files)
        return infos

    async def _sync(self, files: list[File], directories: list[str], recovery_point: int) -> None:
        """Sync; if that fails, store that the next recovery must write the files again.

        After a failure the page cache may have what the device lacks, and the next sync would not write it. The files
        hold acknowledged records, so they must not be truncated.
        """
        try:
            await self._disk.sync_many(files, directories)
        except StorageError as error:
            unsynced = stored.encode_number("unsynced", recovery_point)
            try:
                await self._store.commit({self._prefix + stored.UNSYNCED: unsynced})
            except StorageError as failure:
                with suppress(StorageError):  # this process does not open it again: see `UnsyncedError`
                    fallback_notes.leave(self._disk, self._path, stored.UNSYNCED, recovery_point)
                raise UnsyncedError(f"{error}; this cannot be stored: {failure}", path=self._path) from error
            raise

    def _truncate_files(self, active: ActiveSegment, later: tuple[int, ...]) -> int:
        """Remove everything past the end of the active segment. Returns the number of bytes.

        Empty files go too: after a failed sync the page cache may show a name that is not on the device and never will
        be. A file that is created again will be.
        """
        cut = 0
        for base in later:
            if base > active.base_offset or active.size == 0:
                cut += self._files.size(base)
                for suffix in SUFFIXES:
                    self._files.remove(file_name(base, suffix))
        size = self._files.size(active.base_offset)
        if size > active.size:
            cut += size - active.size
            with closing(self._disk.open(self._files.segment_path(active.base_offset))) as file:
                file.truncate(active.size)
        return cut

    async def _open_damaged(
        self, state: StoredState, mark: RecoveryMark, sealed: list[SegmentInfo], damage: Damage, bases: list[int]
    ) -> RecoveryResult:
        """Truncate and remove nothing; everything below the good end can be read."""
        sealed = [info for info in sealed if info.next_offset <= damage.good_end]
        active, end = await self._readable_part(state, damage.good_end, sealed, bases)
        if end < damage.good_end:
            damage = replace(damage, good_end=Offset(end))
        start = min(self._start(state, bases, mark), damage.good_end)
        epochs = state.epochs
        if epochs is None:
            epochs = await self._files.epochs_from_batches(bases, start, damage.good_end)
        epochs = self._lineage(state, mark).complete(epochs, log_start=start, log_end=damage.good_end)
        epochs.clip(damage.good_end)
        writes: Writes = {self._prefix + stored.CLEAN: None}
        self._note_page_cache(state, writes)
        await self._store.commit(writes)
        return RecoveryResult(
            start_offset=start,
            end_offset=damage.good_end,
            sealed=sealed,
            active=active,
            epochs=epochs,
            producers=ProducerState(),
            snapshots=sorted(state.producers),
            mark=mark,
            gaps=self._gaps(state),
            lineage=self._lineage(state, state.mark or mark),
            damage=damage,
            report=self._report(state, mark),
        )

    async def _readable_part(
        self, state: StoredState, good_end: int, sealed: list[SegmentInfo], bases: list[int]
    ) -> tuple[ActiveSegment, int]:
        """The segment that holds the good end, up to it, and its end. Its index stays in memory: the files are not
        changed."""
        base = sealed[-1].next_offset if sealed else next((base for base in bases if base <= good_end), good_end)
        if self._files.size(base) == 0 or base >= good_end:
            return self._empty(base), base
        request = ScanRequest(
            directory=self._path,
            bases=(base,),
            mark=empty_mark(base),
            epoch=-1,
            gaps=self._gaps(state),
            index_interval_bytes=self._config.index_interval_bytes,
            now_ms=self._clock.now_ms(),
            stop_offset=good_end,
        )
        scan = await self._work.run(scan_log, self._disk, request)
        self._files.bytes_read += scan.bytes_read
        return scan.segments[0], scan.end_offset if scan.segments[0].size else base

    # State store

    def _note_page_cache(self, state: StoredState, writes: Writes) -> None:
        """As `RecoveryCheckpoint.note_page_cache`, before the log is open."""
        if self._config.flush_mode is FlushMode.PAGE_CACHE and not state.page_cache:
            writes[self._prefix + stored.PAGE_CACHE] = stored.encode_number("page-cache", 1)

    def _gaps(self, state: StoredState) -> bool:
        return state.gaps or self._config.cleanup_compact or "gaps" in state.lost

    def _lineage(self, state: StoredState, mark: RecoveryMark) -> Lineage:
        if state.lineage is not None:
            deletes_end, leader_epoch, entries = state.lineage
            return Lineage(Offset(deletes_end), leader_epoch, entries)
        return assume_lineage(sealed_to=mark.base_offset, has_gaps=self._gaps(state))

    @staticmethod
    def _start(state: StoredState, bases: list[int], mark: RecoveryMark) -> int:
        """The stored start; if that is lost, the first offset that files or stored segments name."""
        if state.start is not None:
            return state.start
        return min([*bases, *state.segments, mark.base_offset])

    def _snapshots_above(self, state: StoredState, end: int) -> list[bytes]:
        return [stored.producers_key(self._prefix, offset) for offset in state.producers if offset > end]

    async def _commit(
        self,
        state: StoredState,
        mark: RecoveryMark,
        start: int,
        epochs: EpochHistory,
        producers: ProducerState,
        infos: dict[int, SegmentInfo],
        writes: Writes,
    ) -> None:
        """Store the state of a sound log: from here on a crash recovers from `mark`. Deletes the clean stop."""
        prefix = self._prefix
        writes = dict(writes)
        for name in (stored.CLEAN, stored.SUSPECT, stored.DAMAGE):
            if name != stored.SUSPECT or state.suspect is not None:
                writes[prefix + name] = None
        if state.unsynced is not None or "unsynced" in state.lost:
            writes[prefix + stored.UNSYNCED] = None
        if mark != state.mark:
            writes[prefix + stored.MARK] = stored.encode_mark(mark)
            if len(producers):
                writes[stored.producers_key(prefix, mark.offset)] = producers.to_snapshot()
        if state.start != start:
            writes[prefix + stored.START] = stored.encode_number("start", start)
        if state.epochs is None or epochs != state.epochs:
            writes[prefix + stored.EPOCHS] = stored.encode_epochs(epochs)
        high_watermark = state.high_watermark_below(mark.offset)
        if state.high_watermark not in (None, high_watermark):
            # A later start must not apply the old value to records that are appended from here on.
            writes[prefix + stored.HIGH_WATERMARK] = stored.encode_high_watermark(high_watermark)
        self._note_page_cache(state, writes)
        if self._gaps(state) and not state.gaps:
            writes[prefix + stored.GAPS] = stored.encode_number("gaps", 1)
        if self._gaps(state) and state.lineage is None:
            writes[prefix + stored.LINEAGE] = encode_lineage(self._lineage(state, state.mark or mark))
        for base, info in state.segments.items():
            if base >= mark.base_offset or info.next_offset <= start:  # the files below the start are gone
                writes[stored.segment_key(prefix, base)] = None
        for base, info in infos.items():
            writes[stored.segment_key(prefix, base)] = stored.encode_segment(info)
        await self._store.commit(writes)

    def _report(
        self,
        state: StoredState,
        mark: RecoveryMark,
        *,
        clean: bool = False,
        scan: LogScan | None = None,
        bytes_truncated: int = 0,
    ) -> RecoveryReport:
        return RecoveryReport(
            clean=clean,
            recovery_point=mark.offset,
            was_page_cache=state.page_cache,
            bytes_read=self._files.bytes_read,
            batches_scanned=scan.batches if scan is not None else 0,
            bytes_truncated=bytes_truncated,
            fault=scan.fault if scan is not None else None,
            rebuilt=tuple(self._files.rebuilt),
            lost=(*state.lost, *(["high-watermark"] if state.high_watermark == -1 else [])),
            files_removed=self._files.files_removed,
        )
