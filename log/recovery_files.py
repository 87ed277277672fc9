"""The files of a log that is being opened: finishes changes, restores indexes, and derives state from batches. Pure.

Everything here is idempotent: a crash during recovery leads to the same recovery.
"""

from contextlib import closing
from dataclasses import dataclass, field

from tidelog.log import stored_state as stored
from tidelog.log.epochs import EpochHistory
from tidelog.log.log_scan import Replay, build_indexes, replay
from tidelog.log.producers import ProducerState
from tidelog.log.segment import (
    CLEANED,
    INDEX,
    LOG,
    RESTORED,
    SUFFIXES,
    SWAP,
    TIME_INDEX,
    TRANSACTION_INDEX,
    ActiveSegment,
    RecoveryMark,
    file_name,
    file_path,
    parse_name,
)
from tidelog.log.stored_state import Intent, StoredState
from tidelog.model.errors import CorruptStateError, TidelogError
from tidelog.world.disk import Disk, File
from tidelog.world.store import StateStore
from tidelog.world.work import Work

PIECE_BYTES = 1 << 20


def merge_epochs(
    known: EpochHistory, found: list[tuple[int, int]], *, log_end: int, read_from: int | None = None
) -> EpochHistory:
    """The epoch history that the batches have (`found`), with `known` entries added where they fit.

    Batches are authoritative. A known epoch without records fits if its epoch and start are between its neighbours and
    it does not begin past the end; others are remnants of truncated or unwritten records. From `read_from` on every
    batch was read: there a known epoch must begin where a later one does, or at the end. Otherwise a replica that led
    without a record, and then got records of an older epoch from the next leader, would claim after a crash that the
    older epoch ended before them, and followers would truncate acknowledged records.
    """
    entries = list(found)
    with_records = {epoch for epoch, _ in found}
    for epoch, start in known:
        at = sum(1 for other, _ in entries if other < epoch)
        if at < len(entries) and entries[at][0] == epoch:
            # The known start may be earlier: records of the epoch may be removed, or before the part that was read.
            before = entries[at - 1][1] if at else 0
            entries[at] = (epoch, max(before, min(start, entries[at][1])))
            continue
        low = entries[at - 1][1] if at else 0
        if at and entries[at - 1][0] in with_records:
            low += 1  # that epoch has a record there
        high = entries[at][1] if at < len(entries) else log_end
        if low <= start <= high and (read_from is None or start < read_from or start == high):
            entries.insert(at, (epoch, start))
    return EpochHistory(entries)


def epochs_before(epochs: EpochHistory, offset: int) -> EpochHistory:
    """The epochs that begin below `offset`: those that the recovery point covers."""
    kept = EpochHistory(list(epochs))
    kept.truncate_from_end(offset)
    return kept


def close_files(files: list[File]) -> None:
    for file in files:
        file.close()


def copy_file(disk: Disk, source: str, target: str) -> None:
    """Runs in a helper process: copies and syncs a file, replacing the target."""
    disk.remove(target)
    with closing(disk.open(source)) as original:
        copy = disk.open(target, create=True)
        try:
            for position in range(0, original.size, PIECE_BYTES):
                copy.append(original.read(position, PIECE_BYTES))
            disk.sync([copy])
        except TidelogError:
            disk.remove(target)  # a partial copy would take the last space of a full disk
            raise
        finally:
            copy.close()


def rewrite_file(disk: Disk, path: str) -> None:
    """Runs in a helper process: writes a file again. After a failed sync the system may consider its pages written."""
    copy_file(disk, path, path + CLEANED)
    disk.rename(path + CLEANED, path)


def _is_snapshot(data: bytes) -> bool:
    """Whether producers can be read from it; an empty snapshot has none."""
    if not data:
        return True
    try:
        ProducerState.from_snapshot(data)
    except CorruptStateError:
        return False
    return True


@dataclass(slots=True, eq=False)
class RecoveryFiles:
    """The directory of a log that is being opened. Counts what it did, for the report."""

    _disk: Disk
    _work: Work
    _path: str
    _index_interval_bytes: int
    _now_ms: int
    bytes_read: int = 0
    files_removed: int = 0
    rebuilt: list[str] = field(default_factory=list)

    # Files

    def bases(self) -> list[int]:
        names = (parse_name(name) for name in self._disk.list(self._path))
        return sorted(parsed[0] for parsed in names if parsed is not None and parsed[1:] == (LOG, ""))

    def segment_path(self, base: int, suffix: str = LOG, state: str = "") -> str:
        return file_path(self._path, base, suffix, state)

    def size(self, base: int, suffix: str = LOG) -> int:
        path = self.segment_path(base, suffix)
        return self._disk.size(path) if self._disk.exists(path) else 0

    async def finish_changes(self, state: StoredState, store: StateStore, prefix: bytes) -> None:
        """Finish a change that has a stored intent; without one, remove what a change left behind."""
        removed_before = self.files_removed
        names = set(self._disk.list(self._path))
        if state.intent is not None:
            names = self._finish(state.intent, names, is_suspect=state.suspect is not None)
        bases = {parsed[0] for name in names if (parsed := parse_name(name)) and parsed[1:] == (LOG, "")}
        for name in sorted(names):
            parsed = parse_name(name)
            if name.endswith((CLEANED, RESTORED)) or (parsed is not None and (parsed[2] or parsed[0] not in bases)):
                self.remove(name)
        if state.intent is not None:
            await self._disk.sync_many([], [self._path])
            await store.commit({prefix + stored.INTENT: None})
        elif self.files_removed > removed_before:
            await self._disk.sync_many([], [self._path])

    def _undo_names(self, intent: Intent, names: set[str]) -> set[str]:
        """Rename new segments back, and create the names of old ones again. A sync of these names has failed: they may
        be in memory only, and the next sync writes only what changes from now on."""
        for base, suffixes in intent.new:
            for suffix in suffixes:
                if file_name(base, suffix, SWAP) not in names and file_name(base, suffix) in names:
                    self._disk.rename(self.segment_path(base, suffix), self.segment_path(base, suffix, SWAP))
        new = dict(intent.new)
        for base in intent.old:
            for suffix in SUFFIXES:
                if suffix not in new.get(base, ()) and file_name(base, suffix) not in names:
                    self._disk.open(self.segment_path(base, suffix), create=True).close()
        return set(self._disk.list(self._path))

    def _finish(self, intent: Intent, names: set[str], *, is_suspect: bool) -> set[str]:
        if intent.kind == "reset":
            for name in sorted(names):
                if parse_name(name) is not None:
                    self.remove(name)
            return set()
        assert intent.kind == "swap", f"unknown intent {intent.kind}"
        if is_suspect:
            names = self._undo_names(intent, names)
        new = dict(intent.new)
        for base in intent.old:
            for suffix in SUFFIXES:
                name = file_name(base, suffix)
                # A name that the new segment also has is new already, or replaced by the rename below.
                if suffix not in new.get(base, ()) and name in names:
                    self.remove(name)
        for base, suffixes in intent.new:
            for suffix in suffixes:
                if file_name(base, suffix, SWAP) in names:
                    self._disk.rename(self.segment_path(base, suffix, SWAP), self.segment_path(base, suffix))
        return set(self._disk.list(self._path))

    def remove(self, name: str) -> None:
        self._disk.remove(f"{self._path}/{name}")
        self.files_removed += 1

    def drop_below_start(self, state: StoredState, bases: list[int]) -> list[int]:
        """Remove segments that end at or below the start offset: a crash interrupted their removal."""
        if state.start is None or state.mark is None:
            return bases
        # The segment of the recovery point stays: recovery begins there.
        bound = min(state.start, state.mark.base_offset)
        keep = bases
        while len(keep) > 1 and keep[1] <= bound:
            for suffix in SUFFIXES:
                self.remove(file_name(keep[0], suffix))
            keep = keep[1:]
        return keep

    # State derived from batches

    async def restore_indexes(self, segment: ActiveSegment, files: list[File]) -> None:
        """Write the index entries that the scan found behind the part from before the mark.

        A file that lost the part from before the mark is rebuilt from the whole segment. `files` collects what must be
        synced.
        """
        base = segment.base_offset
        whole = {INDEX: segment.index_bytes, TIME_INDEX: segment.time_bytes}
        if any(self.size(base, suffix) < kept for suffix, kept in whole.items()):
            built = await self._work.run(
                build_indexes, self._disk, self._path, base, segment.size, self._index_interval_bytes, False
            )
            self.bytes_read += segment.size
            self.rebuilt.append(f"index {base}")
            segment.index_bytes = segment.time_bytes = 0
            segment.index.offsets, segment.index.times = built.offsets, built.times
            segment.index.indexed_timestamp = built.indexed_timestamp
        segment.index_bytes = self._write_tail(base, INDEX, segment.index_bytes, segment.index.offsets, files)
        segment.time_bytes = self._write_tail(base, TIME_INDEX, segment.time_bytes, segment.index.times, files)
        segment.index.offsets = segment.index.times = None
        if self.size(base, TRANSACTION_INDEX) >= segment.aborted_bytes:
            segment.aborted_bytes = self._write_tail(
                base, TRANSACTION_INDEX, segment.aborted_bytes, segment.aborted, files
            )
            segment.aborted = None

    def _write_tail(self, base: int, suffix: str, kept: int, tail: bytearray | None, files: list[File]) -> int:
        size = self.size(base, suffix)
        if size == kept and not tail:
            return kept
        file = self._disk.open(self.segment_path(base, suffix), create=True)
        files.append(file)
        if size > kept:
            file.truncate(kept)
        if tail:
            file.append(tail)
        return kept + len(tail or b"")

    def aborted_is_whole(self, active: ActiveSegment) -> bool:
        return active.aborted is None and self.size(active.base_offset, TRANSACTION_INDEX) >= active.aborted_bytes

    async def rebuild_aborted(self, state: StoredState, active: ActiveSegment, bases: list[int], end: int) -> None:
        """The transaction index of the active segment is lost: rebuild it by a replay of the log."""
        replayed = await self._replay(state, bases, end, below=active.base_offset)
        data = replayed.aborted.get(active.base_offset, b"")
        path = self.segment_path(active.base_offset, TRANSACTION_INDEX)
        self._disk.remove(path)
        with closing(self._disk.open(path, create=True)) as file:
            file.append(data)
            await self._disk.sync_many([file], [self._path])
        active.aborted = None
        active.aborted_bytes = len(data)
        self.rebuilt.append(f"transaction index {active.base_offset}")

    async def producers_at(self, state: StoredState, mark: RecoveryMark, bases: list[int]) -> ProducerState:
        """The producers at the mark: from its snapshot, or by a replay from an older one."""
        if not mark.has_producers:
            return ProducerState()
        snapshot = state.producers.get(mark.offset)
        if snapshot is not None:
            try:
                return ProducerState.from_snapshot(snapshot)
            except CorruptStateError:
                del state.producers[mark.offset]
        replayed = await self._replay(state, bases, mark.offset, below=mark.offset - 1)
        self.rebuilt.append("producers")
        return ProducerState.from_snapshot(replayed.producers) if replayed.producers else ProducerState()

    async def _replay(self, state: StoredState, bases: list[int], end: int, *, below: int) -> Replay:
        """Replay up to `end` from the newest snapshot at or below `below`, else from the beginning."""
        start, snapshot = 0, b""
        for offset in sorted((offset for offset in state.producers if offset <= below), reverse=True):
            if _is_snapshot(state.producers[offset]):
                start, snapshot = offset, state.producers[offset]
                break
        first = max((at for at, base in enumerate(bases) if base <= start), default=0)
        span = [base for base in bases[first:] if base < end]
        self.bytes_read += sum(self.size(base) for base in span)
        return await self._work.run(replay, self._disk, self._path, span, snapshot or None, start, end, self._now_ms)

    async def epochs_from_batches(self, bases: list[int], start: int, end: int) -> EpochHistory:
        if end <= start:
            return EpochHistory()
        self.rebuilt.append("epochs")
        self.bytes_read += sum(self.size(base) for base in bases)
        replayed = await self._work.run(replay, self._disk, self._path, bases, None, start, end, self._now_ms)
        epochs = EpochHistory(replayed.epochs)
        epochs.truncate_from_start(start)
        return epochs
