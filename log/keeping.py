"""Keeps the records that a replica has to give up, until the replica is whole again.

    <log>.<n>.kept/
        00000000000000000042.log     segments as they were; the indexes are not kept
        kept.json                    why, which offsets and which epochs; written last

A replica gives up records in four cases: its log is proved to be damaged and is cut at its good end; its log cannot
be opened although all of it can be read; its leader, elected uncleanly, does not have records that were committed; or
its leader has it copied from the start (decision 0019), and may be lost before the copy is complete.
Nobody knows then whether another replica has them, so nothing is removed: the segments are moved to a directory beside
the log. The first one is copied if a part of it stays in the log.

The copy is removed when the log has everything again that it had (`covers`): the same epochs up to the same ends, all
of it committed, in a replica that is in sync. A copy of records that the cluster has lost is never covered. It stays
for the operator, who may read it with `tidelog log dump`, and removes it. So it does if its note cannot be read.

Order, for a crash or an error at any point: the first segment is copied, the note is written, the others are moved, all
of that is synced; only then the log is cut. So a directory without a note has nothing but a copy of what the log still
has, and the next attempt uses its name. A log that misses segments which were moved is damaged, and is repaired so.

Limit: `KEPT_MAX` copies of one log. With so many the replica stays as it is, and says why, until the operator has
removed some.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidelog.log import checkpoint as stored
from tidelog.log.directories import KEPT, LogDirectory, remove_directory
from tidelog.log.doubles import LogCopy
from tidelog.log.epochs import EpochHistory
from tidelog.log.opening import proves_damage
from tidelog.log.recovered import Damage
from tidelog.log.restoring import copy_file, epochs_before
from tidelog.log.scan import ScanRequest, scan_log
from tidelog.log.segment import LOG, file_name, parse_name
from tidelog.model.errors import FULL_ADVICE, CorruptStateError, DiskFullError, StorageError, TidelogError
from tidelog.model.ids import Offset, PartitionId
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.work import Work

if TYPE_CHECKING:
    from tidelog.log.log import Log

LOGGER = logging.getLogger(__name__)

KEPT_MAX = 8
NOTE = "kept.json"
NOTE_BYTES_MAX = 1 << 20
ROOM_BYTES_MIN = 1 << 20
"""A copy leaves at least so much room for appends."""
INDEX_INTERVAL_BYTES = 1 << 30
"""Of a scan that needs no index."""


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """What a kept copy holds: the records of [first, end), in these epochs (epoch, start); `end` -1: not known."""

    first: int
    end: int
    epochs: tuple[tuple[int, int], ...]

    def ends(self) -> list[tuple[int, int]]:
        """(epoch, where it ends in the copy) of each epoch that has records in it."""
        starts = [start for _, start in self.epochs[1:]]
        rows = zip(self.epochs, [*starts, self.end], strict=True)
        ends = [(epoch, start, min(end, self.end)) for (epoch, start), end in rows]
        return [(epoch, end) for epoch, start, end in ends if max(start, self.first) < end]


def covers(log: "Log", high_watermark: int, kept: KeptRecords) -> bool:
    """Whether the log has every record of the copy again, committed.

    Two logs that have a record of the same offset and epoch have the same records up to it: Raft's log matching. Where
    retention was faster, and the log does not know the epochs any more, the copy stays.
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
    """A cut of this log that is being prepared. Another `Log` of the same partition, another generation (every cut ends
    one) or another end is another cut."""

    log: "Log"
    generation: int
    offset: int
    end: int
    copy: LogCopy
    is_reset: bool
    """Nothing stays in the log: every segment is moved, which takes no space."""
    has_note: bool = False
    has_moved: bool = False
    is_done: bool = False

    def is_uncut(self, log: "Log") -> bool:
        return self.log is log and self.generation == log.durability.generation

    def is_for(self, log: "Log", offset: int) -> bool:
        return self.is_uncut(log) and (self.offset, self.end) == (offset, log.end_offset)


class KeptLogs:
    """The kept copies of a node. The owner of a log calls it while nobody else changes the log."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self.copies: dict[PartitionId, list[LogCopy]] = {}
        self._attempts: dict[PartitionId, _Attempt] = {}
        """The last cut of each log that was prepared, or is being prepared."""
        self._work = work
        self._clock = clock

    def __len__(self) -> int:
        return sum(map(len, self.copies.values()))

    def found(self, directory: LogDirectory, names: Iterable[tuple[PartitionId, str]]) -> None:
        """At the start. One without a note is an attempt that was cut short: the next one goes on with its name."""
        for log_id, name in names:
            copy = LogCopy(directory, name)
            if directory.disk.exists(f"{name}/{NOTE}") and copy not in self.copies.get(log_id, ()):
                self.copies.setdefault(log_id, []).append(copy)

    async def keep_log(self, log_id: PartitionId, copy: LogCopy, reason: str) -> None:
        """Move a whole log out of the way. What is stored of it is deleted: a log may be created here again."""
        directory = copy.directory
        if directory.failed is not None:
            raise directory.failed
        name = self._free_name(directory, log_id, copy.name, is_new=True)
        await self._write_note(directory.disk, copy.name, await self._held(directory, log_id, copy.name), reason)
        directory.disk.rename(copy.name, name)
        self._kept(log_id, LogCopy(directory, name), reason)
        await directory.sync_names("")
        # A crash before this leaves stored state without a log, which is a log that is lost. The other order could
        # leave a log without stored state, whose records would be taken for a torn tail.
        await directory.forget(log_id)

    async def keep_tail(
        self, directory: LogDirectory, log: "Log", offset: int, reason: str, *, is_reset: bool = False
    ) -> bool:
        """Keep the segments with records at or past `offset`, which are about to be cut from this log; all of them if
        it `is_reset`, where `offset` is the first that the log has to get back.

        Whether some were moved: then the log must not be used any more as if it had them, if it is not cut.
        """
        attempt = self._attempts.get(log.log_id)
        if attempt is None or not attempt.is_for(log, offset):
            cut_base, later = _to_keep(log, offset, is_reset=is_reset)
            if cut_base is None and not later:
                return False
            copy = LogCopy(directory, self._free_name(directory, log.log_id, log.path))
            attempt = _Attempt(log, log.durability.generation, offset, log.end_offset, copy, is_reset)
            self._attempts[log.log_id] = attempt
        if attempt.is_done:
            return attempt.has_moved  # kept before, and the cut has failed
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
        cut_base, _ = _to_keep(log, attempt.offset, is_reset=attempt.is_reset)
        if cut_base is not None:
            path = log.segments.file_path(cut_base)
            if log.disk.free_bytes() < log.disk.size(path) + ROOM_BYTES_MIN:
                # Not tried: it would take the room of all other logs, again and again.
                raise DiskFullError(f"copy {path}: it does not fit; {FULL_ADVICE}", path=path)
            await self._work.run(copy_file, log.disk, path, f"{name}/{file_name(cut_base, LOG)}")
        kept = KeptRecords(attempt.offset, log.end_offset, _pairs(log.epochs))
        if log.damaged is not None:  # then its end and epochs are those of its sound part, perhaps
            held = await self._held(directory, log.log_id, log.path)
            end = -1 if held.end < 0 else max(held.end, log.end_offset)
            epochs = held.epochs if held.epochs[-1:] > kept.epochs[-1:] else kept.epochs
            kept = KeptRecords(attempt.offset, end, epochs)
        await self._write_note(log.disk, name, kept, reason)
        attempt.has_note = True
        self._kept(log.log_id, attempt.copy, reason)

    async def _held(self, directory: LogDirectory, log_id: PartitionId, path: str) -> KeptRecords:
        """What a log that is damaged or does not open holds: what the store says, up to the recovery point, and the
        batches past it, which may have been acknowledged too. `end` is -1 where that cannot be found out."""
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
        LOGGER.error("kept=%s holds records that this replica gives up: %s", copy, reason)

    def _free_name(self, directory: LogDirectory, log_id: PartitionId, path: str, *, is_new: bool = False) -> str:
        """`is_new`: not the name of an attempt that was cut short."""
        copies = self.copies.get(log_id, [])
        if len(copies) >= KEPT_MAX:
            places = ", ".join(map(str, copies))
            raise StorageError(
                f"{path}: {KEPT_MAX} copies of records that it gave up are kept, which is the limit; look at them with"
                f" `tidelog log dump`, remove those that you do not need and start the node again: {places}",
                path=path,
            )
        taken = {copy.name for copy in copies if copy.directory is directory}
        names = (f"{path}.{number}{KEPT}" for number in range(2 * KEPT_MAX))
        return next(name for name in names if name not in taken and not (is_new and directory.disk.exists(name)))

    async def _write_note(self, disk: Disk, path: str, kept: KeptRecords, reason: str) -> None:
        disk.remove(f"{path}/{NOTE}")
        file = disk.open(f"{path}/{NOTE}", create=True)
        try:
            file.append(encode_note(kept, reason=reason, now_ms=self._clock.now_ms()))
            await disk.sync_many([file], [path])
        finally:
            file.close()

    async def drop_covered(self, log: "Log", high_watermark: int) -> None:
        """Remove the copies whose records this log, of a replica that is in sync, has again."""
        attempt = self._attempts.get(log.log_id)
        for copy in list(self.copies.get(log.log_id, ())):
            if attempt is not None and attempt.copy == copy and attempt.is_uncut(log):
                continue  # the log has these records for the moment: it is about to be cut
            try:
                kept = _read_note(copy)
                if kept is not None and covers(log, high_watermark, kept):
                    LOGGER.info("kept=%s is removed: its replica has all of it again", copy)
                    await self._remove(log.log_id, copy)
            except TidelogError as error:
                LOGGER.warning("kept=%s is not removed: %s", copy, error)

    async def drop(self, log_id: PartitionId) -> None:
        """Remove all copies of a log: its topic is deleted."""
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
    """If this fails after the first one, the log does not have what it had, so it counts as damaged."""
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
            misses_segments(log, log.start_offset if attempt.is_reset else attempt.offset)
        raise


def misses_segments(log: "Log", offset: int) -> None:
    """The log takes no role until it is cut at `offset`: segments past that were moved away. In memory only: the next
    start finds that they are missing."""
    if log.damaged is None or offset < log.damaged.good_end:
        log.damaged = Damage(Offset(offset), "segments past this were moved to a kept copy")


def _to_keep(log: "Log", offset: int, *, is_reset: bool) -> tuple[int | None, list[int]]:
    """The segment that is cut in its middle at `offset`, if that takes something away from it, and the later ones."""
    bases = _bases(log.disk, log.path)
    if is_reset:
        return None, [base for base in bases if log.disk.size(log.segments.file_path(base)) > 0]
    cut_base = max((base for base in bases if base <= offset), default=None)
    if cut_base is not None and not _holds_more(log, cut_base, offset):
        cut_base = None
    return cut_base, [base for base in bases if base > offset]


def _bases(disk: Disk, path: str) -> list[int]:
    names = (parse_name(name) for name in disk.list(path))
    return sorted(parsed[0] for parsed in names if parsed is not None and parsed[1:] == (LOG, ""))


def _holds_more(log: "Log", base: int, offset: int) -> bool:
    """Whether the file of this segment has bytes that the cut at `offset` takes away."""
    size, segments = log.disk.size(log.segments.file_path(base)), log.segments
    if segments.active.base_offset == base and segments.end_offset <= offset:
        return size > segments.active.size
    return size > 0


def _pairs(epochs: EpochHistory) -> tuple[tuple[int, int], ...]:
    return tuple((int(epoch), int(start)) for epoch, start in epochs)


def _read_note(copy: LogCopy) -> KeptRecords | None:
    """None: there is none, or it is of no use."""
    disk, path = copy.directory.disk, f"{copy.name}/{NOTE}"
    if not disk.exists(path) or disk.size(path) > NOTE_BYTES_MAX:
        return None
    file = disk.open(path)
    try:
        return decode_note(file.read(0, NOTE_BYTES_MAX))
    finally:
        file.close()
