"""Keeps a copy of records that a truncation or a reset removes, until the replica has them again.

    <log>.<n>.kept/
        00000000000000000042.log     segments as they were; indexes are not kept
        kept.json                    the reason, the offsets and the epochs; written last

A replica gives up records in four cases: its log is proved damaged and is truncated to its good end; its log cannot be
opened although all of it can be read; its leader, elected uncleanly, lacks committed records; or its leader has it
copied from the start (decision 0019) and may be lost before the copy is complete. It is unknown then whether another
replica has the records, so they are not removed: the segments are moved to a directory beside the log. The first one is
copied if a part of it stays in the log.

The copy is removed when the log has the same records again (`covers`): the same epochs up to the same ends, committed,
in a replica that is in sync. A copy of records that the cluster has lost is never covered. It stays for the operator,
who can read it with `tidelog log dump` and removes it. The same holds if its note cannot be read.

Order, for a crash or an error at any point: copy the first segment, write the note, move the other segments, sync; only
then truncate the log. A directory without a note therefore has only a copy of what the log still has, and the next
attempt uses its name. A log that lacks moved segments is damaged, and is repaired as such.

Limit: `KEPT_MAX` copies of one log. At the limit the replica stays as it is and reports why, until the operator has
removed some.
"""

import json
import logging
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from tidelog.log import stored_state as stored
from tidelog.log.directories import KEPT, LogDirectory, remove_directory
from tidelog.log.duplicate_logs import LogCopy
from tidelog.log.epochs import EpochHistory
from tidelog.log.log import Log
from tidelog.log.log_opener import proves_damage
from tidelog.log.log_scan import ScanRequest, scan_log
from tidelog.log.recovery_files import copy_file, epochs_before
from tidelog.log.segment import LOG, file_name, parse_name
from tidelog.model.errors import DISK_FULL_ADVICE, CorruptStateError, DiskFullError, StorageError, TidelogError
from tidelog.model.ids import PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.work import Work

LOGGER = logging.getLogger(__name__)

KEPT_MAX = 8
NOTE = "kept.json"
NOTE_BYTES_MAX = 1 << 20
ROOM_BYTES_MIN = 1 << 20
"""Free bytes that a copy leaves for appends."""
INDEX_INTERVAL_BYTES = 1 << 30
"""For a scan that needs no index."""


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """The records of a kept copy: offsets [first, end), in these epochs (epoch, start); `end` is -1 if unknown."""

    first: int
    end: int
    epochs: tuple[tuple[int, int], ...]

    def ends(self) -> list[tuple[int, int]]:
        """(epoch, its end in the copy) of each epoch that has records in it."""
        starts = [start for _, start in self.epochs[1:]]
        rows = zip(self.epochs, [*starts, self.end], strict=True)
        ends = [(epoch, start, min(end, self.end)) for (epoch, start), end in rows]
        return [(epoch, end) for epoch, start, end in ends if max(start, self.first) < end]


def covers(log: Log, high_watermark: int, kept: KeptRecords) -> bool:
    """Whether the log has every record of the copy again, committed.

    Two logs that have a record of the same offset and epoch have the same records up to it: Raft's log matching. If
    retention has removed the epochs from the log, the copy stays.
    """
    if kept.end < 0 or not kept.epochs or high_watermark < kept.end or log.damaged is not None:
        return False
    known = {epoch for epoch, _ in log.epochs}
    return all(epoch in known and log.end_offset_for_epoch(epoch)[1] >= end for epoch, end in kept.ends())


def encode_note(kept: KeptRecords, *, reason: str, now_ms: int) -> bytes:
    fields = {"reason": reason, "at_ms": now_ms, "first": kept.first, "end": kept.end, "epochs": kept.epochs}
    return json.dumps(fields, indent=1).encode() + b"\n"


def decode_note(data: bytes) -> KeptRecords:
    try:
        fields = json.loads(data)
        epochs = tuple((int(epoch), int(start)) for epoch, start in fields["epochs"])
        return KeptRecords(int(fields["first"]), int(fields["end"]), epochs)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptStateError(f"{NOTE} cannot be read: {error}") from error


@dataclass(slots=True)
class _Attempt:
    """The preparation of one truncation. Another `Log` of the partition, another generation (each truncation ends one)
    or another end is another truncation."""

    log: Log
    generation: int
    offset: int
    end: int
    copy: LogCopy
    is_reset: bool
    """Nothing stays in the log: every segment is moved, which takes no space."""
    has_note: bool = False
    has_moved: bool = False
    is_done: bool = False

    def is_untruncated(self, log: Log) -> bool:
        return self.log is log and self.generation == log.durability.generation

    def is_for(self, log: Log, offset: int) -> bool:
        return self.is_untruncated(log) and (self.offset, self.end) == (offset, log.end_offset)


class KeptLogs:
    """The kept copies of a node. The owner of a log calls it while nobody else changes the log."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self.copies: dict[PartitionId, list[LogCopy]] = {}
        self._attempts: dict[PartitionId, _Attempt] = {}
        """The last truncation of each log that was prepared or is being prepared."""
        self._work = work
        self._clock = clock

    def __len__(self) -> int:
        return sum(map(len, self.copies.values()))

    def found(self, directory: LogDirectory, names: Iterable[tuple[PartitionId, str]]) -> None:
        """Register the copies found at the start. One without a note is an interrupted attempt: the next one uses its
        name."""
        for log_id, name in names:
            copy = LogCopy(directory, name)
            if directory.disk.exists(f"{name}/{NOTE}") and copy not in self.copies.get(log_id, ()):
                self.copies.setdefault(log_id, []).append(copy)

    async def keep_log(self, log_id: PartitionId, copy: LogCopy, reason: str) -> None:
        """Move a whole log out of the way and delete its stored state, so that it can be created again."""
        directory = copy.directory
        if directory.failed is not None:
            raise directory.failed
        name = self._free_name(directory, log_id, copy.name, is_new=True)
        await self._write_note(directory.disk, copy.name, await self._held(directory, log_id, copy.name), reason)
        directory.disk.rename(copy.name, name)
        self._kept(log_id, LogCopy(directory, name), reason)
        await directory.sync_names("")
        # A crash before this leaves stored state without a log: a lost log. The other order could leave a log without
        # stored state, whose records recovery would truncate as a torn tail.
        await directory.forget(log_id)

    async def keep_tail(
        self, directory: LogDirectory, log: Log, offset: int, reason: str, *, is_reset: bool = False
    ) -> bool:
        """Keep the segments with records at or past `offset`, before the log is truncated there; all segments if it
        `is_reset`, where `offset` is the first record that the log must get back.

        Returns whether segments were moved: then the log must not be used as if it had them, even if the truncation
        fails.
        """
        attempt = self._attempts.get(log.log_id)
        if attempt is None or not attempt.is_for(log, offset):
            truncated_base, later = _to_keep(log, offset, is_reset=is_reset)
            if truncated_base is None and not later:
                return False
            copy = LogCopy(directory, self._free_name(directory, log.log_id, log.path))
            attempt = _Attempt(log, log.durability.generation, offset, log.end_offset, copy, is_reset)
            self._attempts[log.log_id] = attempt
        if attempt.is_done:
            return attempt.has_moved  # kept before, and the truncation has failed
        if not attempt.has_note:
            await self._prepare(attempt, reason)
        async with log.lock:  # neither retention nor the cleaner changes segments meanwhile
            await _move_segments(attempt)
        attempt.is_done = True
        return attempt.has_moved

    async def _prepare(self, attempt: _Attempt, reason: str) -> None:
        log, directory, name = attempt.log, attempt.copy.directory, attempt.copy.name
        log.disk.make_directory(name)
        await directory.sync_names("")
        truncated_base, _ = _to_keep(log, attempt.offset, is_reset=attempt.is_reset)
        if truncated_base is not None:
            path = log.segments.file_path(truncated_base)
            if log.disk.free_bytes() < log.disk.size(path) + ROOM_BYTES_MIN:
                # Do not even try: each retry would take the space of all other logs.
                raise DiskFullError(f"copy {path}: it does not fit; {DISK_FULL_ADVICE}", path=path)
            await self._work.run(copy_file, log.disk, path, f"{name}/{file_name(truncated_base, LOG)}")
        kept = KeptRecords(attempt.offset, log.end_offset, _pairs(log.epochs))
        if log.damaged is not None:  # its end and epochs may be those of its sound part only
            held = await self._held(directory, log.log_id, log.path)
            end = -1 if held.end < 0 else max(held.end, log.end_offset)
            epochs = held.epochs if held.epochs[-1:] > kept.epochs[-1:] else kept.epochs
            kept = KeptRecords(attempt.offset, end, epochs)
        await self._write_note(log.disk, name, kept, reason)
        attempt.has_note = True
        self._kept(log.log_id, attempt.copy, reason)

    async def _held(self, directory: LogDirectory, log_id: PartitionId, path: str) -> KeptRecords:
        """The records of a log that is damaged or cannot be opened: what the store says up to the recovery point, and
        the batches past it, which may have been acknowledged too. `end` is -1 if that cannot be determined."""
        state = stored.load_state(directory.store, log_id)
        known, mark = state.epochs or EpochHistory(), state.mark
        if mark is None:
            return KeptRecords(state.start or 0, -1, _pairs(known))
        later = tuple(base for base in _bases(directory.disk, path) if base >= mark.base_offset)
        request = ScanRequest(
            directory=path,
            bases=later,
            mark=mark,
            epoch=known.epoch_for(mark.offset - 1) if mark.offset > 0 else -1,
            gaps=True,
            index_interval_bytes=INDEX_INTERVAL_BYTES,
            producers=None,
            stop_offset=None,
            now_ms=self._clock.now_ms(),
        )
        try:
            scan = await self._work.run(scan_log, directory.disk, request)
        except TidelogError as error:
            if not proves_damage(error):
                raise
            return KeptRecords(state.start or 0, -1, _pairs(known))
        is_end_known = scan.fault is None or later[-1:] == (scan.segments[-1].base_offset if scan.segments else -1,)
        epochs = (*_pairs(epochs_before(known, mark.offset)), *scan.epochs)
        return KeptRecords(state.start or 0, scan.end_offset if is_end_known else -1, epochs)

    def _kept(self, log_id: PartitionId, copy: LogCopy, reason: str) -> None:
        self.copies.setdefault(log_id, []).append(copy)
        LOGGER.error("kept=%s has records that this replica gave up: %s", copy, reason)

    def _free_name(self, directory: LogDirectory, log_id: PartitionId, path: str, *, is_new: bool = False) -> str:
        """`is_new`: not the name of an interrupted attempt."""
        copies = self.copies.get(log_id, [])
        if len(copies) >= KEPT_MAX:
            places = ", ".join(map(str, copies))
            raise StorageError(
                f"{path}: {KEPT_MAX} copies of records that it gave up are kept, the limit; inspect them with"
                f" `tidelog log dump`, remove those that you do not need and restart the node: {places}",
                path=path,
            )
        used = {copy.name for copy in copies if copy.directory is directory}
        names = (f"{path}.{number}{KEPT}" for number in range(2 * KEPT_MAX))
        return next(name for name in names if name not in used and not (is_new and directory.disk.exists(name)))

    async def _write_note(self, disk: Disk, path: str, kept: KeptRecords, reason: str) -> None:
        disk.remove(f"{path}/{NOTE}")
        with closing(disk.open(f"{path}/{NOTE}", create=True)) as file:
            file.append(encode_note(kept, reason=reason, now_ms=self._clock.now_ms()))
            await disk.sync_many([file], [path])

    async def drop_covered(self, log: Log, high_watermark: int) -> None:
        """Remove the copies whose records this log, of a replica that is in sync, has again."""
        attempt = self._attempts.get(log.log_id)
        for copy in list(self.copies.get(log.log_id, ())):
            if attempt is not None and attempt.copy == copy and attempt.is_untruncated(log):
                continue  # the log still has these records: it is about to be truncated
            try:
                kept = _read_note(copy)
                if kept is not None and covers(log, high_watermark, kept):
                    LOGGER.info("kept=%s is removed: its replica has all records again", copy)
                    await self._remove(log.log_id, copy)
            except TidelogError as error:
                LOGGER.warning("kept=%s is not removed: %s", copy, error)

    async def drop(self, log_id: PartitionId) -> None:
        """Remove all copies of a log whose topic is deleted."""
        for copy in list(self.copies.get(log_id, ())):
            try:
                await self._remove(log_id, copy)
            except TidelogError as error:
                LOGGER.warning("kept=%s is not removed: %s", copy, error)

    async def _remove(self, log_id: PartitionId, copy: LogCopy) -> None:
        await self._work.run(remove_directory, copy.directory.disk, copy.name)
        self.copies[log_id].remove(copy)
        if not self.copies[log_id]:
            del self.copies[log_id]


async def _move_segments(attempt: _Attempt) -> None:
    """If this fails after the first segment, the log lacks segments and counts as damaged."""
    log, name = attempt.log, attempt.copy.name
    _, later = _to_keep(log, attempt.offset, is_reset=attempt.is_reset)
    try:
        for base in later:
            path = log.segments.file_path(base)
            log.durability.forget(path)
            attempt.has_moved = True
            log.disk.rename(path, f"{name}/{file_name(base, LOG)}")
        await attempt.copy.directory.sync_names(name, log.path)
    except BaseException:
        if attempt.has_moved:
            log.mark_missing(log.start_offset if attempt.is_reset else attempt.offset)
        raise


def _to_keep(log: Log, offset: int, *, is_reset: bool) -> tuple[int | None, list[int]]:
    """The base of the segment that is truncated in its middle, if that removes bytes, and the later bases."""
    bases = _bases(log.disk, log.path)
    if is_reset:
        return None, [base for base in bases if log.disk.size(log.segments.file_path(base)) > 0]
    truncated_base = max((base for base in bases if base <= offset), default=None)
    if truncated_base is not None and not _holds_more(log, truncated_base, offset):
        truncated_base = None
    return truncated_base, [base for base in bases if base > offset]


def _bases(disk: Disk, path: str) -> list[int]:
    names = (parse_name(name) for name in disk.list(path))
    return sorted(parsed[0] for parsed in names if parsed is not None and parsed[1:] == (LOG, ""))


def _holds_more(log: Log, base: int, offset: int) -> bool:
    """Whether the file of this segment has bytes that a truncation to `offset` removes."""
    size, segments = log.disk.size(log.segments.file_path(base)), log.segments
    if segments.active.base_offset == base and segments.end_offset <= offset:
        return size > segments.active.size
    return size > 0


def _pairs(epochs: EpochHistory) -> tuple[tuple[int, int], ...]:
    return tuple((int(epoch), int(start)) for epoch, start in epochs)


def _read_note(copy: LogCopy) -> KeptRecords | None:
    """Return the content of `kept.json`; None if there is no such file, or it is too large."""
    disk, path = copy.directory.disk, f"{copy.name}/{NOTE}"
    if not disk.exists(path) or disk.size(path) > NOTE_BYTES_MAX:
        return None
    with closing(disk.open(path)) as file:
        return decode_note(file.read(0, NOTE_BYTES_MAX))
