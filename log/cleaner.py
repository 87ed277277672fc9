"""Runs a `CleaningPlan` on the files: functions of values for a helper process, on sealed segments. Pure.

A cleaning takes the space of one more segment at any time:

1. `plan_cleaning` makes the plan; with the aborted transactions that overlap it, the last batch of each active producer
   and the limits it becomes a `CleaningTask`.
2. `map_keys` reads the dirty part and writes the key map to a file. It returns how far the map reaches.
3. For each group below that, oldest first: `clean_group` writes the new segment and its indexes beside the old files,
   with the suffix `.cleaned`, synced; the owner swaps them in (and keeps the CRC of the whole file). `unfinished` of
   one group is passed to the next. A group that would not change is left alone.
4. The owner stores the new checkpoint, and `discard_cleaned` removes the key map.

The order matters: an old value must go before its tombstone gets its horizon. If anything fails, or the process dies,
the groups that were swapped in stay, `discard_cleaned` removes the rest, and the checkpoint is the old one: the next
cleaning repeats the work and removes nothing that it should not.

A batch that fails its CRC or is misplaced stops the cleaning with an error that names file and position; nothing is
swapped in. Memory: the key map, one batch encoded and decoded (both bounded), one chunk each for reading and writing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from crc32c import crc32c

from tidelog.log.batch import decode_columns
from tidelog.log.batch_filter import AbortedRanges, BatchFilter
from tidelog.log.batch_header import CLAIM_BIT, HEADER_BYTES, BatchHeader, Buffer, check_batch, read_header
from tidelog.log.compaction import Checkpoint, CleaningPlan
from tidelog.log.index import IndexBuilder
from tidelog.log.key_map import KeyMap
from tidelog.log.producers import LastBatch
from tidelog.log.segment import CLEANED, INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, SegmentInfo, file_path
from tidelog.log.transactions import AbortedTransaction, encode_entry
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    StorageError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Offset
from tidelog.world.disk import Disk, File

KEY_MAP_NAME = "keys" + CLEANED
_POSITION_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class CleanerLimits:
    key_map_bytes_max: int = 128 << 20
    batch_bytes_max: int = 256 << 20
    decompressed_bytes_max: int = 256 << 20
    chunk_bytes: int = 1 << 20
    io_bytes_per_second: int | None = None
    """Bytes read and written, together."""
    index_interval_bytes: int = 4096


@dataclass(frozen=True, slots=True)
class CleaningTask:
    """The input of the helper process; picklable.

    `aborted`: every aborted transaction with an offset in the plan's segments, also those whose marker is later.
    `last_batches`: from `ProducerState.last_batches()`. `newest_claim`: from `map_keys`, for `clean_group`.
    """

    path: str
    plan: CleaningPlan
    aborted: tuple[AbortedTransaction, ...]
    last_batches: Mapping[int, LastBatch]
    limits: CleanerLimits
    newest_claim: int = -1


@dataclass(frozen=True, slots=True)
class KeysMapped:
    """The key map reached `end_offset`: clean the groups that begin below it; the dirty part then begins there.
    `newest_claim`: offset of the newest claim of the dirty part below that; -1 without one."""

    end_offset: Offset
    keys: int
    newest_claim: int = -1


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A new segment that replaces those in `replaces` (base offsets; the first is its own).

    `suffixes` are those of its files, each followed by `.cleaned`; a `.txnindex` is written only if it has entries.
    `info` is final: next offset and modification time are those of the last segment replaced.
    """

    info: SegmentInfo
    replaces: tuple[Offset, ...]
    suffixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CleanedGroup:
    """`segment` is None if the group is clean already. `waiting_until_ms` and `waiting_from`: see `Checkpoint`, for
    this group. `deletes_end`: tombstones and markers below it may be missing from `segment`."""

    segment: CleanedSegment | None
    unfinished: frozenset[int]
    waiting_until_ms: int | None
    waiting_from: int | None
    deletes_end: Offset
    bytes_read: int
    bytes_kept: int
    records_read: int
    records_kept: int
    keyless: int


def map_keys(disk: Disk, task: CleaningTask) -> KeysMapped:
    """Read the keys of the dirty part into a map and write it to a file for `clean_group`."""
    keys, newest_claim = _read_keys(disk, task)
    name = f"{task.path}/{KEY_MAP_NAME}"
    disk.remove(name)
    with closing(disk.open(name, create=True)) as file:
        for chunk in keys.to_chunks():
            file.append(chunk)
    return KeysMapped(keys.end, len(keys), newest_claim)


def clean_group(
    disk: Disk, task: CleaningTask, group: Sequence[SegmentInfo], unfinished: frozenset[int]
) -> CleanedGroup:
    """Write the segment that replaces this group of the plan. Needs the file of `map_keys`."""
    name = f"{task.path}/{KEY_MAP_NAME}"
    with closing(disk.open(name)) as file:
        keys = KeyMap.from_bytes(file.read(0, file.size), path=name)
    plan, limits = task.plan, task.limits
    batches = BatchFilter(
        keys,
        aborted=task.aborted,
        last_batches=task.last_batches,
        newest_claim=task.newest_claim,
        unfinished=unfinished,
        now_ms=plan.now_ms,
        delete_retention_ms=plan.delete_retention_ms,
        deletes_bound=plan.deletes_bound,
        decompressed_bytes_max=limits.decompressed_bytes_max,
    )
    last_of_group = max((segment.base_offset for segment in group if segment.size), default=None)
    writer = _SegmentWriter(disk, task.path, group, limits)
    is_changed = sum(1 for segment in group if segment.size) > 1
    try:
        for source in group:
            for name, position, header, batch in _read_batches(disk, task, source):
                is_last = source.base_offset == last_of_group and position + header.size == source.size
                with _located(name, position):
                    kept = batches.filter(header, batch, is_last_of_segment=is_last)
                is_changed = is_changed or kept is not batch
                if kept is not None:
                    writer.append(kept)
        segment = writer.finish(batches.aborted_here) if is_changed else None
    except BaseException:
        writer.discard()
        raise
    if segment is None:
        writer.discard()
    return CleanedGroup(
        segment=segment,
        unfinished=frozenset(batches.unfinished),
        waiting_until_ms=batches.waiting_until_ms,
        waiting_from=batches.waiting_from,
        deletes_end=Offset(batches.deletes_end),
        bytes_read=sum(source.size for source in group),
        bytes_kept=writer.size,
        records_read=batches.records_read,
        records_kept=batches.records_kept,
        keyless=batches.keyless,
    )


def checkpoint_after(end: Offset, groups: Sequence[CleanedGroup]) -> Checkpoint:
    """The checkpoint to store when all of a plan's groups below `end` are swapped in."""
    waiting = [group.waiting_until_ms for group in groups if group.waiting_until_ms is not None]
    offsets = [group.waiting_from for group in groups if group.waiting_from is not None]
    return Checkpoint(end, max(waiting, default=None), min(offsets, default=0))


def discard_cleaned(disk: Disk, path: str) -> None:
    """Remove what a cleaning has written and nobody has swapped in."""
    for name in disk.list(path):
        if name.endswith(CLEANED):
            disk.remove(f"{path}/{name}")


def _read_keys(disk: Disk, task: CleaningTask) -> tuple[KeyMap, int]:
    """Return the keys of the dirty part, and the offset of its newest claim."""
    plan, limits = task.plan, task.limits
    keys = KeyMap(bytes_max=limits.key_map_bytes_max, end=plan.end_offset)
    aborted = AbortedRanges(task.aborted)
    newest_claim = -1
    for segment in plan.segments:
        if segment.next_offset <= plan.first_dirty_offset:
            continue
        for name, position, header, batch in _read_batches(disk, task, segment):
            if header.next_offset <= plan.first_dirty_offset or header.is_control:
                continue
            if not aborted.covers(header):
                with _located(name, position):
                    columns = decode_columns(batch, decompressed_bytes_max=limits.decompressed_bytes_max)
                if not keys.add_batch(Offset(header.base_offset), columns.keys.to_list(), columns.offsets):
                    return keys, newest_claim
            if header.attributes & CLAIM_BIT:
                newest_claim = header.base_offset
    return keys, newest_claim


def _read_batches(
    disk: Disk, task: CleaningTask, segment: SegmentInfo
) -> Iterator[tuple[str, int, BatchHeader, memoryview]]:
    """(file, position, header, bytes) of each batch of a segment, checked: CRC, and ascending offsets within the
    segment.

    At the end the CRC of the whole file is compared with the one it was sealed with: offsets and epochs are outside of
    the batch CRCs, and rot in them must not be copied into a segment that looks sound.
    """
    name = file_path(task.path, segment.base_offset, LOG)
    with closing(disk.open(name)) as file:
        if file.size != segment.size:
            raise CorruptBatchError(f"{name} has {file.size} bytes, not {segment.size}")
        position = 0
        crc = 0
        next_offset = int(segment.base_offset)
        while position < segment.size:
            with _located(name, position):
                data = _read_chunk(file, position, segment.size - position, task.limits)
            view = memoryview(data)
            at = 0
            while at < len(data):
                is_tail = position + len(data) == segment.size
                if len(data) - at < HEADER_BYTES and not is_tail:
                    break
                with _located(name, position + at):
                    if at + read_header(view, at).size > len(data) and not is_tail:
                        break
                    header = check_batch(view, at, size_max=task.limits.batch_bytes_max)
                    if header.base_offset < next_offset or header.next_offset > segment.next_offset:
                        raise CorruptBatchError(
                            f"offsets {header.base_offset} to {header.last_offset} are not inside"
                            f" {next_offset} to {segment.next_offset - 1}"
                        )
                yield name, position + at, header, view[at : at + header.size]
                next_offset = header.next_offset
                at += header.size
            crc = crc32c(view[:at], crc)
            position += at
        if segment.crc is not None and crc != segment.crc:
            raise CorruptBatchError(f"{name} has CRC-32C {crc:#010x}, it was sealed with {segment.crc:#010x}")


def _read_chunk(file: File, position: int, available: int, limits: CleanerLimits) -> bytes:
    """At least one whole batch, if the file has it. A length field alone never decides how much memory is used."""
    data = file.read(position, min(limits.chunk_bytes, available))
    if len(data) < min(HEADER_BYTES, available):
        raise CorruptBatchError("the file is shorter than it was")
    if len(data) < HEADER_BYTES:
        return data
    size = read_header(data).size
    if size <= len(data):
        return data
    if size > limits.batch_bytes_max:
        raise RecordTooLargeError(f"a batch of {size} bytes is over the limit of {limits.batch_bytes_max}")
    if size > available:
        raise CorruptBatchError(f"a batch of {size} bytes ends after {available}")
    return file.read(position, size)


@contextmanager
def _located(name: str, position: int) -> Iterator[None]:
    """Add file and position to errors about a batch."""
    try:
        yield
    except (
        CorruptBatchError,
        InvalidRecordError,
        RecordTooLargeError,
        UnsupportedCompressionError,
        UnsupportedMagicError,
    ) as error:
        raise type(error)(f"{name} at position {position}: {error}") from error


class _SegmentWriter:
    """Writes one cleaned segment and its indexes."""

    def __init__(self, disk: Disk, path: str, group: Sequence[SegmentInfo], limits: CleanerLimits) -> None:
        self._disk = disk
        self._path = path
        self._group = group
        self._base = group[0].base_offset
        self._chunk_bytes = limits.chunk_bytes
        self._index = IndexBuilder(self._base, limits.index_interval_bytes)
        self._buffer = bytearray()
        self._crc = 0
        self._first_timestamp = -1
        self._suffixes: list[str] = []
        self._files: list[File] = []
        self.size = 0
        self._log = self._create(LOG)

    def append(self, batch: Buffer) -> None:
        if self.size + len(batch) > _POSITION_MAX:
            raise StorageError(f"the cleaned segment {self._base} is too large for its index", path=self._path)
        header = read_header(batch)
        if self._first_timestamp < 0:
            self._first_timestamp = header.max_timestamp
        self._index.add(header.last_offset, self.size, len(batch), header.max_timestamp)
        self.size += len(batch)
        self._buffer += batch
        if len(self._buffer) >= self._chunk_bytes:
            self._flush()

    def finish(self, aborted: Sequence[AbortedTransaction]) -> CleanedSegment:
        """Write what is left and the indexes, sync all, close."""
        self._flush()
        self._index.add_time()
        offsets, times = self._index.offsets or b"", self._index.times or b""
        transactions = b"".join(encode_entry(entry) for entry in aborted)
        for suffix, data in ((INDEX, offsets), (TIME_INDEX, times), (TRANSACTION_INDEX, transactions)):
            if suffix == TRANSACTION_INDEX and not data:
                continue
            file = self._create(suffix)
            if data:
                file.append(data)
        self._disk.sync(self._files, [self._path])
        self._close()
        info = SegmentInfo(
            base_offset=self._base,
            next_offset=self._group[-1].next_offset,
            size=self.size,
            largest_timestamp=self._index.largest_timestamp,
            largest_offset=self._index.largest_offset,
            first_timestamp=self._first_timestamp,
            modified_ms=self._group[-1].modified_ms,
            crc=self._crc,
            aborted=len(aborted),
        )
        return CleanedSegment(info, tuple(segment.base_offset for segment in self._group), tuple(self._suffixes))

    def discard(self) -> None:
        self._close()
        for suffix in self._suffixes:
            self._disk.remove(file_path(self._path, self._base, suffix, CLEANED))

    def _create(self, suffix: str) -> File:
        name = file_path(self._path, self._base, suffix, CLEANED)
        self._disk.remove(name)  # left by a cleaning that died
        self._suffixes.append(suffix)
        file = self._disk.open(name, create=True)
        self._files.append(file)
        return file

    def _flush(self) -> None:
        if self._buffer:
            self._log.append(self._buffer)
            self._crc = crc32c(self._buffer, self._crc)
            self._buffer.clear()

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()
