"""Opening a log: after a clean stop for nothing, after a crash by reading what lies past the recovery point.

    no directory, and the store knows nothing of it: a new log, empty; its mark is stored, nothing is read or synced

    files + stored state
      |  finish or undo changes of several files that were under way (intent), drop what is below the start
      v
    closed cleanly, and the directory is as it was left? --yes--> open: nothing of a sealed segment is read
      | no
      v
    all below the recovery point there, by name and size? --no--> damaged(good end): nothing is cut or removed
      | yes
      v
    scan from the recovery point: CRC, offsets, epochs; stop at the first fault, or where a failed sync makes suspect
      |
      v
    cut there, write the indexes, sync it all, commit the new recovery point at the end    (the durable end)

What is below the recovery point was acknowledged as being on the device. If it is not there, cutting it away silently
would turn one bad disk into lost records: so the log opens as damaged, readable below the good end, closed to appends,
until its owner has made up its mind. Rot inside of a sealed segment is not looked for here but by `scan.scrub`; rot in
the part between the recovery point and the durable end (a second of traffic) is taken for a torn tail.
"""

from dataclasses import replace
from itertools import pairwise

from tidelog.log import checkpoint as stored
from tidelog.log.checkpoint import StoredState, Writes, key_prefix
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.epochs import EpochHistory
from tidelog.log.lineage import Lineage, guess
from tidelog.log.lineage import encode as encode_lineage
from tidelog.log.producers import ProducerState
from tidelog.log.recovered import Damage, Recovered, RecoveryReport
from tidelog.log.restoring import Workbench, close_files, epochs_before, merge_epochs, rewrite_file
from tidelog.log.scan import LogScan, ScanRequest, empty_mark, file_crc, scan_log, scrub
from tidelog.log.segment import LOG, SUFFIXES, ActiveSegment, RecoveryMark, SegmentInfo, file_name, file_path
from tidelog.model.errors import StorageError, UnsyncedError
from tidelog.model.ids import Offset, PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk, File
from tidelog.world.store import StateStore
from tidelog.world.work import Work


class Recovery:
    """One opening of one log. `run` is called once."""

    def __init__(
        self,
        *,
        disk: Disk,
        store: StateStore,
        work: Work,
        clock: Clock,
        path: str,
        log_id: PartitionId,
        config: LogConfig,
        verify: bool = False,
    ) -> None:
        self._disk = disk
        self._store = store
        self._work = work
        self._clock = clock
        self._path = path
        self._config = config
        self._log_id = log_id
        self._prefix = key_prefix(log_id)
        self._verify = verify
        self._bench = Workbench(
            disk=disk,
            work=work,
            path=path,
            index_interval_bytes=config.index_interval_bytes,
            now_ms=clock.now_ms(),
        )

    async def run(self) -> Recovered:
        is_new = not self._disk.exists(self._path)
        if is_new:
            self._disk.make_directory(self._path)
        state = stored.load_state(self._store, self._log_id)
        if is_new and state == StoredState():
            return await self._begin(state)
        bases = self._bench.bases()
        if "intent" not in state.lost:
            await self._bench.finish_changes(state, self._store, self._prefix)
            bases = self._bench.drop_below_start(state, self._bench.bases())
        recovered = None
        if self._is_clean(state, bases):
            recovered = await self._open_clean(state, bases)
        if recovered is None:
            recovered = await self._open_after_crash(state, bases)
        is_blank = not recovered.sealed and recovered.active.size == 0
        recovered.is_named = not (is_new or is_blank)
        recovered.high_watermark = state.high_watermark_below(recovered.end_offset)
        return recovered

    async def _begin(self, state: StoredState) -> Recovered:
        """A log that never was. Its name goes to the device with its first records: without them nothing is lost."""
        active = self._empty(0)
        mark = active.mark(0, has_producers=False)
        epochs, producers = EpochHistory(), ProducerState()
        await self._commit(state, mark, 0, epochs, producers, {}, {})
        return Recovered(
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
            damage=None,
            report=self._report(state, mark),
            is_named=False,
        )

    # After a clean stop

    def _is_clean(self, state: StoredState, bases: list[int]) -> bool:
        """Closed cleanly, and the directory is what was closed. Costs no look into a sealed segment."""
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
        return self._bench.size(mark.base_offset) == mark.position

    @staticmethod
    def _known_sealed(state: StoredState, mark: RecoveryMark) -> list[SegmentInfo]:
        start = state.start or 0
        return [
            info
            for base, info in sorted(state.segments.items())
            if base < mark.base_offset and info.next_offset > start
        ]

    async def _open_clean(self, state: StoredState, bases: list[int]) -> Recovered | None:
        mark = state.mark
        assert mark is not None, "a clean stop has a mark"
        sealed = self._known_sealed(state, mark)
        active = ActiveSegment.resume(mark, index_interval_bytes=self._config.index_interval_bytes)
        files: list[File] = []
        try:
            await self._bench.restore_indexes(active, files)
            if files:
                await self._disk.sync_many(files, [self._path])
        finally:
            close_files(files)
        producers = await self._bench.producers_at(state, mark, bases)
        start = self._start(state, bases, mark)
        if not self._bench.aborted_is_whole(active):
            await self._bench.rebuild_aborted(state, active, bases, mark.offset)
        epochs = state.epochs
        if epochs is None:
            epochs = await self._bench.epochs_from_batches(bases, start, mark.offset)
        mark = active.mark(mark.offset, has_producers=len(producers) > 0)
        await self._commit(state, mark, start, epochs, producers, {}, {})
        return Recovered(
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
            damage=None,
            report=self._report(state, mark, clean=True),
        )

    # After a crash

    async def _open_after_crash(self, state: StoredState, bases: list[int]) -> Recovered:
        first = bases[0] if bases else state.start or 0
        mark = state.mark or empty_mark(first, created_ms=self._clock.now_ms())
        sealed, damage = await self._check_below(state, mark, bases)
        if damage is None and self._bench.size(mark.base_offset) < mark.position:
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
        producers = await self._bench.producers_at(state, mark, bases)
        scan = await self._scan(state, mark, later, producers)
        damage = self._unsure(state, mark, scan)
        if damage is not None:
            read = [one.info(next_.base_offset) for one, next_ in pairwise(scan.segments)]
            return await self._open_damaged(state, mark, [*sealed, *read], damage, bases)
        return await self._keep(state, mark, sealed, scan, later, bases)

    async def _check_below(
        self, state: StoredState, mark: RecoveryMark, bases: list[int]
    ) -> tuple[list[SegmentInfo], Damage | None]:
        """The sealed segments below the recovery point, by name and size; those after a damage are left out."""
        sealed: list[SegmentInfo] = []
        start = self._start(state, bases, mark)
        wanted: set[int] = {info.base_offset for info in self._known_sealed(state, mark)}
        wanted.update(base for base in bases if base < mark.base_offset)
        ordered = sorted(wanted)
        expected = min([start, *ordered, mark.base_offset])
        for base, following in pairwise([*ordered, mark.base_offset]):
            if base > expected or base not in bases:
                return sealed, Damage(Offset(max(expected, start)), f"the segment at offset {expected} is missing")
            info = state.segments.get(base)
            if info is None:
                info, damage = await self._find_out(state, base, following)
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
        """A sealed segment against what is known of it: its size, and all of its bytes if that is asked for."""
        if self._bench.size(info.base_offset) == info.size and info.next_offset == following and not self._verify:
            return info, None
        result = await self._work.run(scrub, self._disk, self._path, info, self._gaps(state))
        self._bench.bytes_read += result.size
        if result.fault is not None:
            return info, Damage(Offset(result.good_end), result.fault)
        if info.next_offset != following:
            reason = f"segment {info.base_offset} ends at {info.next_offset}, the next begins at {following}"
            return info, Damage(Offset(min(info.next_offset, following)), reason)
        return info, None

    async def _find_out(self, state: StoredState, base: int, following: int) -> tuple[SegmentInfo, Damage | None]:
        """What was known of a sealed segment is lost: read it."""
        scan = await self._scan_one(state, base)
        segment = scan.segments[0] if scan.segments else self._empty(base)
        info = segment.info(following)
        self._bench.rebuilt.append(f"segment {base}")
        if scan.fault is not None or scan.end_offset > following:
            return info, Damage(Offset(min(scan.end_offset, following)), scan.fault or f"segment {base} has too much")
        if scan.end_offset < following and not self._gaps(state):
            reason = f"the log has nothing between offsets {scan.end_offset} and {following}"
            return info, Damage(Offset(scan.end_offset), reason)
        return info, None

    async def _check_active(self, state: StoredState, mark: RecoveryMark) -> Damage | None:
        """The part of the active segment that lies below the recovery point: batch by batch, and as a whole."""
        scan = await self._scan_one(state, mark.base_offset)
        if scan.end_offset < mark.offset:
            return Damage(Offset(scan.end_offset), scan.fault or "corrupt below the recovery point")
        path = file_path(self._path, mark.base_offset, LOG)
        if mark.crc is None or await self._work.run(file_crc, self._disk, path, mark.position) == mark.crc:
            return None
        # Every batch is sound by itself, so a byte outside of the batch CRCs differs: nothing can be told apart.
        return Damage(Offset(mark.base_offset), f"{path} has another CRC up to {mark.position} than it had")

    def _empty(self, base: int) -> ActiveSegment:
        return ActiveSegment(
            base, created_ms=self._clock.now_ms(), index_interval_bytes=self._config.index_interval_bytes
        )

    async def _scan_one(self, state: StoredState, base: int) -> LogScan:
        """All of one segment, on its own."""
        return await self._scan(state, empty_mark(base), (base,) if self._bench.size(base) else (), None)

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
        self._bench.bytes_read += scan.bytes_read
        return scan

    def _unsure(self, state: StoredState, mark: RecoveryMark, scan: LogScan) -> Damage | None:
        """Damage that the stored state tells of, or that lies in what of it cannot be read any more."""
        if scan.end_offset < mark.offset:
            return Damage(Offset(scan.end_offset), scan.fault or "corrupt below the recovery point")
        if state.damage is not None:
            return Damage(Offset(min(state.damage[0], scan.end_offset)), state.damage[1])
        if state.mark is None and scan.segments:
            # Opening stores a mark before anything is written, so it was there and is lost.
            return Damage(Offset(scan.end_offset), "the recovery point is lost: what the log had is not known")
        if "suspect" in state.lost:
            return Damage(mark.offset, "a sync had failed, and where cannot be read any more")
        if "intent" in state.lost:
            return Damage(Offset(self._start(state, [], mark)), "a change of files was under way and cannot be read")
        return None

    async def _keep(
        self,
        state: StoredState,
        mark: RecoveryMark,
        sealed: list[SegmentInfo],
        scan: LogScan,
        later: tuple[int, ...],
        bases: list[int],
    ) -> Recovered:
        """Cut the log where the scan ended, make all of it durable, and commit that."""
        segments = scan.segments or [ActiveSegment.resume(mark, index_interval_bytes=self._config.index_interval_bytes)]
        active = segments[-1]
        bytes_cut = self._cut(active, later)
        is_unsynced = state.unsynced is not None or "unsynced" in state.lost
        is_doubted = state.suspect is not None or is_unsynced
        if is_doubted and not sealed and len(segments) == 1 and active.size == 0:
            # Nothing was ever synced here but with the sync that failed, so the directory's own name is not to be
            # believed either. One that is made anew will be on the device with the next sync.
            self._disk.remove_directory(self._path)
            self._disk.make_directory(self._path)
        infos: dict[int, SegmentInfo] = {}
        files: list[File] = []
        if is_unsynced:
            for segment in segments:
                if self._bench.size(segment.base_offset):
                    path = self._bench.segment_path(segment.base_offset)
                    await self._work.run(rewrite_file, self._disk, path)
        try:
            for segment, following in pairwise(segments):
                segment.index.add_time()
                infos[segment.base_offset] = segment.info(following.base_offset)
            for segment in segments:
                if self._bench.size(segment.base_offset) or segment.size:
                    files.append(self._disk.open(self._bench.segment_path(segment.base_offset)))
                await self._bench.restore_indexes(segment, files)
            parent = self._path.rpartition("/")[0]
            await self._sync(files, [self._path, parent], mark.offset)
        finally:
            close_files(files)
        end = scan.end_offset
        start = min(self._start(state, bases, mark), end)
        epochs = state.epochs
        if epochs is None:
            epochs = await self._bench.epochs_from_batches(bases, start, end) if end > start else EpochHistory()
        epochs = merge_epochs(epochs_before(epochs, mark.offset), scan.epochs, log_end=end)
        epochs = merge_epochs(state.epochs or EpochHistory(), list(epochs), log_end=end, read_from=mark.offset)
        epochs = self._lineage(state, mark).complete(epochs, log_start=start, log_end=end)
        producers = ProducerState.from_snapshot(scan.producers) if scan.producers else ProducerState()
        if not self._bench.aborted_is_whole(active):
            await self._bench.rebuild_aborted(state, active, bases, end)
        new_mark = active.mark(end, has_producers=len(producers) > 0)
        cleared: Writes = dict.fromkeys(self._snapshots_above(state, end))
        await self._commit(state, new_mark, start, epochs, producers, infos, cleared)
        snapshots = sorted(
            {offset for offset in state.producers if offset <= end} | ({end} if len(producers) else set())
        )
        return Recovered(
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
            damage=None,
            report=self._report(state, mark, scan=scan, bytes_cut=bytes_cut),
        )

    async def _sync(self, files: list[File], directories: list[str], recovery_point: int) -> None:
        """If this fails, the page cache may show what the device does not have, and the next sync would not write it.
        The next recovery writes all of it again: what was acknowledged is in there, so it must not be cut."""
        try:
            await self._disk.sync_many(files, directories)
        except StorageError as error:
            unsynced = stored.encode_number("unsynced", recovery_point)
            try:
                await self._store.commit({self._prefix + stored.UNSYNCED: unsynced})
            except StorageError as refused:
                raise UnsyncedError(f"{error}; that is not stored: {refused}", path=self._path) from error
            raise

    def _cut(self, active: ActiveSegment, later: tuple[int, ...]) -> int:
        """Remove what lies behind the active segment's end. Returns the number of bytes.

        Files with nothing in them go too: after a failed sync the page cache may show a name that is not on the
        device and never will be; one that is made anew will.
        """
        cut = 0
        for base in later:
            if base > active.base_offset or active.size == 0:
                cut += self._bench.size(base)
                for suffix in SUFFIXES:
                    self._bench.remove(file_name(base, suffix))
        size = self._bench.size(active.base_offset)
        if size > active.size:
            cut += size - active.size
            file = self._disk.open(self._bench.segment_path(active.base_offset))
            try:
                file.truncate(active.size)
            finally:
                file.close()
        return cut

    async def _open_damaged(
        self, state: StoredState, mark: RecoveryMark, sealed: list[SegmentInfo], damage: Damage, bases: list[int]
    ) -> Recovered:
        """Nothing is cut or removed; what is below the good end can be read."""
        sealed = [info for info in sealed if info.next_offset <= damage.good_end]
        active, end = await self._readable_part(state, damage.good_end, sealed, bases)
        if end < damage.good_end:
            damage = replace(damage, good_end=Offset(end))
        start = min(self._start(state, bases, mark), damage.good_end)
        epochs = state.epochs
        if epochs is None:
            epochs = await self._bench.epochs_from_batches(bases, start, damage.good_end)
        epochs = self._lineage(state, mark).complete(epochs, log_start=start, log_end=damage.good_end)
        epochs.clip(damage.good_end)
        writes: Writes = {self._prefix + stored.CLEAN: None}
        self._note_page_cache(state, writes)
        await self._store.commit(writes)
        return Recovered(
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
        """The segment that holds the good end, up to it, and where that is. Its index stays in memory: the files are
        left as they are."""
        base = sealed[-1].next_offset if sealed else next((base for base in bases if base <= good_end), good_end)
        if self._bench.size(base) == 0 or base >= good_end:
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
        found = await self._work.run(scan_log, self._disk, request)
        self._bench.bytes_read += found.bytes_read
        return found.segments[0], found.end_offset if found.segments[0].size else base

    # The store

    def _note_page_cache(self, state: StoredState, writes: Writes) -> None:
        """As `marking.note_page_cache`, before the log is open."""
        if self._config.flush_mode is FlushMode.PAGE_CACHE and not state.page_cache:
            writes[self._prefix + stored.PAGE_CACHE] = stored.encode_number("page-cache", 1)

    def _gaps(self, state: StoredState) -> bool:
        return state.gaps or self._config.cleanup_compact or "gaps" in state.lost

    def _lineage(self, state: StoredState, mark: RecoveryMark) -> Lineage:
        if state.lineage is not None:
            deletes_end, leader_epoch, entries = state.lineage
            return Lineage(Offset(deletes_end), leader_epoch, entries)
        return guess(sealed_to=mark.base_offset, has_gaps=self._gaps(state))

    @staticmethod
    def _start(state: StoredState, bases: list[int], mark: RecoveryMark) -> int:
        """The stored start; if that is lost, the first offset that anything tells of."""
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
        """The state of a sound log: from here on a crash recovers from `mark`. The clean stop is no more."""
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
            # A later start must not find the old value over records that are appended from here on.
            writes[prefix + stored.HIGH_WATERMARK] = stored.encode_high_watermark(high_watermark)
        self._note_page_cache(state, writes)
        if self._gaps(state) and not state.gaps:
            writes[prefix + stored.GAPS] = stored.encode_number("gaps", 1)
        if self._gaps(state) and state.lineage is None:
            writes[prefix + stored.LINEAGE] = encode_lineage(self._lineage(state, state.mark or mark))
        for base in state.segments:
            if base >= mark.base_offset:
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
        bytes_cut: int = 0,
    ) -> RecoveryReport:
        return RecoveryReport(
            clean=clean,
            recovery_point=mark.offset,
            was_page_cache=state.page_cache,
            bytes_read=self._bench.bytes_read,
            batches_scanned=scan.batches if scan is not None else 0,
            bytes_cut=bytes_cut,
            cut_reason=scan.fault if scan is not None else None,
            rebuilt=tuple(self._bench.rebuilt),
            lost=(*state.lost, *(["high-watermark"] if state.high_watermark == -1 else [])),
            files_removed=self._bench.files_removed,
        )
