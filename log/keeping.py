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

Order, for a crash at any point: segments are copied and moved, that is synced, the note is written; only then the log
is cut. A directory without a note is an attempt that was cut short, and is used for the next one. A log that misses the
segments that were moved is damaged, as before, and is repaired as before.

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
from tidelog.log.recovered import Damage
from tidelog.log.restoring import copy_file
from tidelog.log.segment import LOG, file_name, parse_name
from tidelog.model.errors import CorruptStateError, DiskFullError, StorageError, TidelogError
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


class KeptLogs:
    """The kept copies of a node. The owner of a log calls it while nobody else changes the log."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self.copies: dict[PartitionId, list[LogCopy]] = {}
        # Generation of the log and offset of the last cut that was prepared: every cut ends a generation.
        self._uncut: dict[PartitionId, tuple[int, int]] = {}
        self._work = work
        self._clock = clock

    def __len__(self) -> int:
        return sum(map(len, self.copies.values()))

    def found(self, directory: LogDirectory, names: Iterable[tuple[PartitionId, str]]) -> None:
        """At the start. One without a note is an attempt that was cut short: the next one goes on with its name."""
        for log_id, name in names:
            if directory.disk.exists(f"{name}/{NOTE}"):
                self.copies.setdefault(log_id, []).append(LogCopy(directory, name))

    async def keep_log(self, log_id: PartitionId, copy: LogCopy, reason: str) -> None:
        """Move a whole log out of the way. What is stored of it is deleted: a log may be created here again."""
        directory = copy.directory
        if directory.failed is not None:
            raise directory.failed
        name = self._free_name(directory, log_id, copy.name, is_new=True)
        await self._write_note(directory.disk, copy.name, _stored_records(directory, log_id), reason)
        if not await directory.forget(log_id):
            raise DiskFullError(f"{copy}: what is stored of it is not deleted for want of room", path=copy.name)
        directory.disk.rename(copy.name, name)
        await directory.disk.sync_many([], [""])
        self._kept(log_id, LogCopy(directory, name), reason)

    async def keep_tail(self, directory: LogDirectory, log: "Log", offset: int, reason: str) -> None:
        """Keep the segments with records at or past `offset`, which are about to be cut from this log."""
        if log.damaged is not None and offset <= log.start_offset:
            await self.keep_all(directory, log, offset, reason)  # nothing of it stays
            return
        disk, bases = log.disk, _bases(log)
        cut_base = max((base for base in bases if base <= offset), default=-1)
        later = [base for base in bases if base > offset]
        if cut_base >= 0 and not _holds_more(log, cut_base, offset):
            cut_base = -1
        if cut_base < 0 and not later and not self._has_attempt(directory, log):
            return
        if self._uncut.get(log.log_id) == (log.durability.generation, offset):
            return  # kept before, and the cut has failed
        name = self._free_name(directory, log.log_id, log.path)
        disk.make_directory(name)
        await disk.sync_many([], [""])
        if cut_base >= 0:
            await self._work.run(
                copy_file, disk, log.segments.file_path(cut_base), f"{name}/{file_name(cut_base, LOG)}"
            )
        await self._move(directory, log, name, later, offset, reason)

    async def keep_all(self, directory: LogDirectory, log: "Log", first: int, reason: str) -> None:
        """Keep all segments of this log, which is about to be reset. They are moved, so this takes no space.

        `first` is where the records begin that the log has to get back before the copy is removed.
        """
        async with log.lock:
            bases = [base for base in _bases(log) if log.disk.size(log.segments.file_path(base)) > 0]
            if not bases and not self._has_attempt(directory, log):
                return
            name = self._free_name(directory, log.log_id, log.path)
            log.disk.make_directory(name)
            await log.disk.sync_many([], [""])
            _misses_segments(log, log.start_offset)  # until it is reset
            await self._move(directory, log, name, bases, first, reason)

    async def _move(
        self, directory: LogDirectory, log: "Log", name: str, bases: list[int], first: int, reason: str
    ) -> None:
        """Move these segments to the copy `name` and write its note."""
        disk = log.disk
        try:
            for base in bases:
                path = log.segments.file_path(base)
                log.durability.forget(path)
                disk.rename(path, f"{name}/{file_name(base, LOG)}")
            await disk.sync_many([], [name, log.path])
            known = _stored_records(directory, log.log_id)
            epochs = known.epochs if known.epochs[-1:] > tuple(log.epochs)[-1:] else tuple(log.epochs)
            end = max(known.end, log.end_offset)
            await self._write_note(disk, name, KeptRecords(first, end, epochs), reason)
        except BaseException:
            _misses_segments(log, first)
            raise
        self._uncut[log.log_id] = log.durability.generation, first
        self._kept(log.log_id, LogCopy(directory, name), reason)

    def cut_failed(self, log: "Log") -> None:
        """The log was not cut although its tail was kept: it counts as damaged where the cut was to be."""
        generation, offset = self._uncut.get(log.log_id, (-1, 0))
        if generation == log.durability.generation:
            _misses_segments(log, offset)

    def _has_attempt(self, directory: LogDirectory, log: "Log") -> bool:
        """Whether a crash has left segments of this log in a copy without a note."""
        if len(self.copies.get(log.log_id, ())) >= KEPT_MAX:
            return False
        name = self._free_name(directory, log.log_id, log.path)
        return directory.disk.exists(name) and len(directory.disk.list(name)) > 0

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
        for copy in list(self.copies.get(log.log_id, ())):
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


def _bases(log: "Log") -> list[int]:
    names = (parse_name(name) for name in log.disk.list(log.path))
    return sorted(parsed[0] for parsed in names if parsed is not None and parsed[1:] == (LOG, ""))


def _misses_segments(log: "Log", offset: int) -> None:
    """Segments of the log were moved to a copy: it must not claim records that it no longer has."""
    if log.damaged is None:
        log.damaged = Damage(Offset(offset), "its segments are kept under another name, and it is not cut yet")


def _holds_more(log: "Log", base: int, offset: int) -> bool:
    """Whether the file of this segment has bytes that the cut at `offset` takes away."""
    size, segments = log.disk.size(log.segments.file_path(base)), log.segments
    if segments.active.base_offset == base and segments.end_offset <= offset:
        return size > segments.active.size
    return size > 0


def _stored_records(directory: LogDirectory, log_id: PartitionId) -> KeptRecords:
    """What the store says that the log has: up to the recovery point."""
    state = stored.load_state(directory.store, log_id)
    epochs = state.epochs or EpochHistory()
    end = -1 if state.mark is None else state.mark.offset
    return KeptRecords(state.start or 0, end, tuple((int(epoch), int(start)) for epoch, start in epochs))


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
