"""Plans of reads: whole batches from an offset, look-up by timestamp, aborted transactions.

Each is a plan (`file_pool.ReadPlan`) over one view of the segments. Files are pinned when a segment is entered, its log
and index together, so that a plan goes on with the files it began with even if they are replaced.

Batches are not decoded; a header gives the position of the next batch. Index entries are hints: each is checked against
the header of the batch that it names. A missing or wrong entry raises `IndexFaultError`; the log then rebuilds the
index of the segment and reads again.
"""

from dataclasses import dataclass
from struct import Struct

from tidelog.log import index
from tidelog.log.batch import HEADER_BYTES, BatchHeader, check_batch, decode_columns, read_header
from tidelog.log.config import LogConfig
from tidelog.log.index import ReadPlan
from tidelog.log.segment import INDEX, TIME_INDEX, TRANSACTION_INDEX, SegmentInfo
from tidelog.log.segments import Segments, SegmentView
from tidelog.log.transactions import ENTRY_BYTES as ABORTED_ENTRY_BYTES
from tidelog.log.transactions import AbortedTransaction, TransactionIndex
from tidelog.model.errors import (
    CorruptBatchError,
    CorruptStateError,
    RecordTooLargeError,
    StorageError,
    UnsupportedMagicError,
)
from tidelog.model.ids import Offset, TimestampMs
from tidelog.world.disk import File

# Base offset, batch length and last offset delta: all that a walk over batches needs.
_WALK = Struct(">qi11xi")
_PREFIX_BYTES = 12
_WINDOW_BYTES = 8192
# From this number of batches in one read on, the index gives the position of the last ones, instead of a walk.
_WALK_BATCHES = 64
# Batches behind an index entry beyond the interval, before the index counts as incomplete.
_WALK_SLACK = 64
DECODED_BYTES_INLINE = 256 << 10
"""A look-up by timestamp decodes up to this many bytes inline: about 2 ms."""
ENTRIES_PER_READ = 64
"""Of a transaction index."""


class IndexFaultError(Exception):
    """The index files of the segment at `base_offset` are missing, incomplete or wrong."""

    def __init__(self, base_offset: int, what: str) -> None:
        super().__init__(f"index of segment {base_offset}: {what}")
        self.base_offset = base_offset


@dataclass(frozen=True, slots=True)
class Slice:
    """Whole batches in order; the first may begin below the requested offset.

    `base_offset` is that of the first batch, `next_offset` the offset of the next read. At the end of the log `data` is
    empty and both are the requested offset. `data` is a view if a partial batch was read behind it.
    """

    data: bytes | memoryview
    base_offset: Offset
    next_offset: Offset


@dataclass(frozen=True, slots=True)
class TimestampedOffset:
    offset: Offset
    timestamp: TimestampMs


@dataclass(frozen=True, slots=True)
class LargeBatch:
    """A batch that may hold the record, with too many records to decode inline."""

    data: bytes
    next_offset: Offset


def read_steps(segments: Segments, config: LogConfig, offset: int, bytes_max: int, end: int) -> ReadPlan[Slice]:
    """Whole batches from the one that holds `offset`, all below `end`: at most `bytes_max` bytes, at least one batch.

    The caller has checked that `offset` is within the log. Empty if it is not below `end`.
    """
    view, version = segments.find(offset), segments.version
    while view.size and offset < end:
        file = segments.files.pin(segments.file_path(view.base_offset))
        try:
            position = yield from _position_of(segments, config, file, view, offset)
            if position < view.size:
                return (yield from _read_batches(segments, version, file, view, position, bytes_max, end, offset))
        except CorruptBatchError:
            # The hint may be wrong: the next read uses the index.
            segments.forget_hints()
            raise
        finally:
            segments.files.unpin(file)
        # Cleaning may have removed the last records of a segment: go on with the next one.
        if view.is_active or view.next_offset >= end:
            break
        view = segments.find(view.next_offset)
    return Slice(b"", Offset(offset), Offset(offset))


def _read_batches(
    segments: Segments,
    version: int,
    file: File,
    view: SegmentView,
    position: int,
    bytes_max: int,
    end: int,
    offset: int,
) -> ReadPlan[Slice]:
    available = view.size - position
    data = yield file, position, min(max(bytes_max, HEADER_BYTES), available)
    if len(data) < HEADER_BYTES:
        raise CorruptBatchError(f"{file.path} at {position}: {len(data)} bytes are left of a batch")
    base, length, delta = _WALK.unpack_from(data)
    whole = length + _PREFIX_BYTES
    if whole < HEADER_BYTES or whole > available or delta < 0:
        raise CorruptBatchError(f"{file.path} at {position}: a batch length of {length}")
    if not view.base_offset <= base <= base + delta < view.next_offset:
        # No CRC covers the base offset: a wrong one must not make a reader wait or loop.
        raise CorruptBatchError(f"{file.path} at {position}: a batch with offsets {base} to {base + delta}")
    if base + delta >= end:
        return Slice(b"", Offset(offset), Offset(offset))
    if whole > len(data):
        data = yield file, position, whole
        if len(data) < whole:
            raise CorruptBatchError(f"{file.path} at {position}: the batch ends after {len(data)} bytes")
    if len(data) == available and end >= view.next_offset:
        size, next_offset = len(data), view.next_offset
    else:
        known = 0
        if len(data) > _WALK_BATCHES * whole:
            known = yield from _indexed_position(segments, view, data, position, end)
        size, next_offset = _whole_batches(file, data, position, end, known)
    if next_offset <= offset:
        raise CorruptBatchError(f"{file.path} at {position}: batches below offset {offset}")
    result = data if size == len(data) else memoryview(data)[:size]
    if next_offset < view.next_offset:
        segments.remember(next_offset, view.base_offset, position + size, version)
    elif view.is_active:
        segments.remember(next_offset, view.base_offset, view.size, version)
    return Slice(result, Offset(base), Offset(next_offset))


def _indexed_position(segments: Segments, view: SegmentView, data: bytes, start: int, end: int) -> ReadPlan[int]:
    """The position in `data` of the last batch below offset `end` that the index has: the walk may begin there.

    0 if there is none or it is wrong; that is no fault, since the walk works without it.
    """
    base_offset = view.base_offset
    limit = start + len(data) - HEADER_BYTES
    pending = segments.active.index.offsets if view.is_active else None
    entry = index.position_floor(pending, limit, base_offset=base_offset) if pending else None
    if entry is None and not (view.is_active and segments.active.index_bytes == 0):
        try:
            with _index_file(segments, base_offset, INDEX) as held:
                block = yield from index.position_block(held, held.size, limit)
        except IndexFaultError:
            return 0
        entry = index.position_floor(block, limit, base_offset=base_offset)
    if entry is None or not start < entry.position <= limit or entry.last_offset >= end:
        return 0
    at = entry.position - start
    base, _, delta = _WALK.unpack_from(data, at)
    return at if base + delta == entry.last_offset else 0


def _whole_batches(file: File, data: bytes, start: int, end: int, position: int) -> tuple[int, int]:
    """Bytes of the whole batches below offset `end`, and the offset after them; there is one at `position`."""
    unpack = _WALK.unpack_from
    # The last batch may be incomplete: the next read begins with it, and the batches before it are whole.
    next_offset: int = unpack(data, position)[0] if position else 0
    last_header = len(data) - HEADER_BYTES
    while position <= last_header:
        base, length, delta = unpack(data, position)
        if length < HEADER_BYTES - _PREFIX_BYTES or delta < 0 or base < next_offset:
            raise CorruptBatchError(f"{file.path} at {start + position}: no batch")
        stop = position + _PREFIX_BYTES + length
        if stop > len(data) or base + delta >= end:
            break
        position = stop
        next_offset = base + delta + 1
    return position, next_offset


def _position_of(segments: Segments, config: LogConfig, file: File, view: SegmentView, offset: int) -> ReadPlan[int]:
    """Where the batch that holds `offset` begins, or the first one after it; the segment's size if there is none."""
    hint = segments.hint(offset)
    if hint is not None and hint[0] == view.base_offset:
        return hint[1]
    if offset <= view.base_offset:
        return 0
    if offset >= view.next_offset:
        return view.size
    entry = yield from _offset_floor(segments, view, offset)
    position = 0
    if entry is not None:
        header = yield from _header_at(file, view, entry.position)
        if header is None or header.last_offset != entry.last_offset:
            raise IndexFaultError(view.base_offset, f"an entry says {entry}, the log does not")
        position = entry.position
    bound = None
    if not segments.was_rebuilt(view.base_offset):
        bound = config.index_interval_bytes // HEADER_BYTES + _WALK_SLACK
    return (yield from _walk_to(file, view, position, offset, bound))


def locate_steps(segments: Segments, config: LogConfig, offset: int) -> ReadPlan[tuple[int, int, int]]:
    """Where to cut a log to end at `offset`: (base offset of the segment, position, bound).

    A batch that spans `offset` goes whole. Every batch in front of the position ends at or below `bound`.
    """
    view = segments.find(offset)
    if view.size == 0 or offset <= view.base_offset:
        return view.base_offset, 0, view.base_offset
    if offset >= view.next_offset:
        return view.base_offset, view.size, offset
    file = segments.files.pin(segments.file_path(view.base_offset))
    try:
        position = yield from _position_of(segments, config, file, view, offset)
        if position >= view.size:
            return view.base_offset, view.size, offset
        header = yield from _header_at(file, view, position)
        # The unreadable bytes directly follow the part that stays: the truncation removes them.
        return view.base_offset, position, offset if header is None else min(offset, header.base_offset)
    finally:
        segments.files.unpin(file)


def range_steps(segments: Segments, config: LogConfig, start: int, end: int) -> ReadPlan[int]:
    """How many bytes the batches from `start` to below `end` take; a batch that spans an end counts on its start."""
    first_base, first_position, _ = yield from locate_steps(segments, config, start)
    last_base, last_position, _ = yield from locate_steps(segments, config, end)
    between = [view.size for view in segments.from_offset(start) if first_base <= view.base_offset < last_base]
    return max(0, sum(between) - first_position + last_position)


def _walk_to(file: File, view: SegmentView, position: int, offset: int, bound: int | None) -> ReadPlan[int]:
    """From a batch at `position` on to the first that ends at or past `offset`, over at most `bound` batches."""
    unpack = _WALK.unpack_from
    walked = reached = 0
    while position < view.size:
        window = yield file, position, min(_WINDOW_BYTES, view.size - position)
        at = 0
        while at + HEADER_BYTES <= len(window):
            if reached >= offset:
                return position + at  # even if it is unreadable: a truncation may be about to remove it
            base, length, delta = unpack(window, at)
            if length < HEADER_BYTES - _PREFIX_BYTES or delta < 0 or base < reached or base + delta >= view.next_offset:
                raise CorruptBatchError(f"{file.path} at {position + at}: no batch")
            if base + delta >= offset:
                return position + at
            reached = base + delta + 1
            at += _PREFIX_BYTES + length
            walked += 1
            if bound is not None and walked > bound:
                raise IndexFaultError(view.base_offset, f"no entry near offset {offset}")
        if at == 0:
            raise CorruptBatchError(f"{file.path} at {position}: {len(window)} bytes are left of a batch")
        position += at
    return view.size


def _header_at(file: File, view: SegmentView, position: int) -> ReadPlan[BatchHeader | None]:
    """The header at `position`, None if there is none."""
    if not 0 <= position <= view.size - HEADER_BYTES:
        return None
    data = yield file, position, HEADER_BYTES
    try:
        return read_header(data)
    except (CorruptBatchError, UnsupportedMagicError):
        return None


def _offset_floor(segments: Segments, view: SegmentView, offset: int) -> ReadPlan[index.OffsetEntry | None]:
    base = view.base_offset
    if view.is_active:
        pending = segments.active.index.offsets
        entry = index.offset_floor(pending, offset, base_offset=base) if pending else None
        if entry is not None or segments.active.index_bytes == 0:
            return entry
    with _index_file(segments, base, INDEX) as held:
        block = yield from index.offset_block(held, held.size, offset, base_offset=base)
    return index.offset_floor(block, offset, base_offset=base)


def _time_floor(segments: Segments, view: SegmentView, timestamp: int) -> ReadPlan[index.TimeEntry | None]:
    base = view.base_offset
    if view.is_active:
        pending = segments.active.index.times
        entry = index.time_floor(pending, timestamp, base_offset=base) if pending else None
        if entry is not None or segments.active.time_bytes == 0:
            return entry
    with _index_file(segments, base, TIME_INDEX) as held:
        block = yield from index.time_block(held, held.size, timestamp)
    return index.time_floor(block, timestamp, base_offset=base)


class _index_file:  # noqa: N801  a context manager reads as a function
    """An index file, pinned; a missing one is a fault of the index."""

    __slots__ = ("_file", "_segments")

    def __init__(self, segments: Segments, base_offset: int, suffix: str) -> None:
        self._segments = segments
        try:
            self._file = segments.files.pin(segments.file_path(base_offset, suffix))
        except StorageError as error:
            raise IndexFaultError(base_offset, str(error)) from error

    def __enter__(self) -> File:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._segments.files.unpin(self._file)


def timestamp_steps(
    segments: Segments, config: LogConfig, timestamp: int, start: int, end: int
) -> ReadPlan[TimestampedOffset | LargeBatch | None]:
    """The first record in [start, end) with a timestamp at or after the one given, or the batch to look for it in;
    if it is not there, the search goes on behind that batch."""
    for view in segments.from_offset(start):
        if view.base_offset >= end:
            return None
        if view.size == 0 or segments.info(view.base_offset).largest_timestamp < timestamp:
            continue
        file = segments.files.pin(segments.file_path(view.base_offset))
        try:
            found = yield from _timestamp_in_segment(segments, config, file, view, timestamp, start, end)
        finally:
            segments.files.unpin(file)
        if isinstance(found, TimestampedOffset):
            return found if found.offset < end else None
        if found is not None:
            return found
    return None


def _timestamp_in_segment(
    segments: Segments, config: LogConfig, file: File, view: SegmentView, timestamp: int, start: int, end: int
) -> ReadPlan[TimestampedOffset | LargeBatch | None]:
    position = 0
    entry = yield from _time_floor(segments, view, timestamp)
    if entry is not None:
        position = yield from _position_of(segments, config, file, view, entry.last_offset)
        header = yield from _header_at(file, view, position)
        if header is None or header.last_offset != entry.last_offset or header.max_timestamp != entry.timestamp:
            raise IndexFaultError(view.base_offset, f"an entry says {entry}, the log does not")
    while position < view.size:
        header = yield from _header_at(file, view, position)
        if header is None:
            raise CorruptBatchError(f"{file.path} at {position}: no batch")
        if header.base_offset >= end:
            return None
        if header.max_timestamp >= timestamp and header.last_offset >= start:
            if header.size > view.size - position:
                raise CorruptBatchError(f"{file.path} at {position}: a batch of {header.size} bytes")
            batch = yield file, position, header.size
            check_batch(batch, size_max=header.size)
            inline_bytes_max = min(DECODED_BYTES_INLINE, config.decompressed_bytes_max)
            try:
                found = first_at(batch, timestamp, start, inline_bytes_max)
            except RecordTooLargeError:
                return LargeBatch(batch, Offset(header.last_offset + 1))
            if found is not None:
                return found
        position += header.size
    return None


def first_at(batch: bytes, timestamp: int, start: int, bytes_max: int) -> TimestampedOffset | None:
    """The first record of a batch at or after a time, from an offset on. `RecordTooLargeError` if its records are more
    than `bytes_max` bytes before compression."""
    columns = decode_columns(batch, decompressed_bytes_max=bytes_max)
    for offset, time in zip(columns.offsets, columns.timestamps, strict=True):
        if time >= timestamp and offset >= start:
            return TimestampedOffset(Offset(offset), TimestampMs(time))
    return None


def largest_timestamp(segments: Segments, start: int) -> int:
    """Of the segments from an offset on; -1 if no record has one."""
    views = (view for view in segments.from_offset(start) if view.size)
    return max((segments.info(view.base_offset).largest_timestamp for view in views), default=-1)


def aborted_steps(segments: Segments, start: int, end: int) -> ReadPlan[list[AbortedTransaction]]:
    """Aborted transactions that overlap [start, end), in the order of their markers."""
    found: list[AbortedTransaction] = []
    for view in segments.from_offset(start):
        info = segments.info(view.base_offset)
        if info.aborted == 0:
            continue
        waiting = bytes(segments.active.aborted or b"") if view.is_active else b""
        if len(waiting) == info.aborted * ABORTED_ENTRY_BYTES:
            is_done = yield from AbortedEntries(info, None, waiting).overlapping(start, end, found)
        else:
            with _index_file(segments, view.base_offset, TRANSACTION_INDEX) as held:
                is_done = yield from AbortedEntries(info, held, waiting).overlapping(start, end, found)
        if is_done:
            break
    return found


class AbortedEntries:
    """The transaction index of a segment, which may have 100,000 entries: those in the file, then those that wait for
    it. Reads a few at a time."""

    __slots__ = ("_file", "_info", "_stored", "_waiting")

    def __init__(self, info: SegmentInfo, file: File | None, waiting: bytes) -> None:
        self._info = info
        self._file = file
        self._stored = 0 if file is None else file.size // ABORTED_ENTRY_BYTES
        self._waiting = waiting
        size = (0 if file is None else file.size) + len(waiting)
        if size != info.aborted * ABORTED_ENTRY_BYTES:
            raise self._fault(f"{size} bytes of aborted transactions, {info.aborted} were written")

    def overlapping(self, start: int, end: int, found: list[AbortedTransaction]) -> ReadPlan[bool]:
        """Add those that overlap [start, end); return whether later segments cannot have more."""
        low, high = 0, self._info.aborted
        while high - low > ENTRIES_PER_READ:
            middle = (low + high) // 2
            (entry,) = yield from self._read(middle, middle + 1)
            if entry.last_offset < start:
                low = middle + 1
            else:
                high = middle
        for first in range(low, self._info.aborted, ENTRIES_PER_READ):
            entries = yield from self._read(first, min(first + ENTRIES_PER_READ, self._info.aborted))
            more, is_done = entries.overlapping(Offset(start), Offset(end))
            found += more
            if is_done:
                return True
        return False

    def _read(self, first: int, after: int) -> ReadPlan[TransactionIndex]:
        """The entries [first, after)."""
        stored, info, data = self._stored, self._info, b""
        if self._file is not None and first < stored:
            data = yield self._file, first * ABORTED_ENTRY_BYTES, (min(after, stored) - first) * ABORTED_ENTRY_BYTES
        data += self._waiting[
            max(first - stored, 0) * ABORTED_ENTRY_BYTES : max(after - stored, 0) * ABORTED_ENTRY_BYTES
        ]
        try:
            entries = TransactionIndex.parse(data)
        except CorruptStateError as error:
            raise self._fault(str(error)) from error
        markers = [entry.last_offset for entry in entries]
        if len(markers) != after - first or not info.base_offset <= markers[0] <= markers[-1] < info.next_offset:
            raise self._fault(f"aborted transactions that end at {markers}")
        return entries

    def _fault(self, what: str) -> IndexFaultError:
        return IndexFaultError(self._info.base_offset, what)
