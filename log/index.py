"""The sparse indexes of a segment: offset to position, and timestamp to offset. Pure; Kafka's layouts, big endian.

    .index, 8 bytes an entry                    .timeindex, 12 bytes an entry
    0               4               8           0                               8              12
    +---------------+---------------+           +-------------------------------+---------------+
    | rel. offset   | position      |           | largest timestamp so far      | rel. offset   |
    +---------------+---------------+           +-------------------------------+---------------+

Relative offsets count from the segment's base offset. An entry of the offset index is one batch: its *last* offset and
its position. An entry (t, o) of the time index means: every record up to o has a timestamp of at
most t, and the batch whose last offset is o has t as its largest. Both are strictly ascending.

Indexes have no checksum and are never trusted: the reader checks an entry against the header of the batch that it names
(`OffsetEntry.last_offset`, `TimeEntry.timestamp`). A correct entry gives a correct result even if entries around it are
lost or wrong; after a wrong entry, or a long walk without one, the index is rebuilt from the log. So an index may be
lost, stale, torn or deleted by an administrator without risk.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from typing import TypeVar

from tidelog.model.ids import Offset, Position, TimestampMs
from tidelog.world.disk import Buffer, File

T = TypeVar("T")

ReadPlan = Generator[tuple[File, int, int], bytes, T]
"""A plan of reads: yields (file, position, length), is sent the bytes (fewer only at the end of the file), returns the
result. `file_pool` runs it."""

_OFFSET = Struct(">ii")
_TIME = Struct(">qi")
OFFSET_ENTRY_BYTES = _OFFSET.size
TIME_ENTRY_BYTES = _TIME.size
RELATIVE_OFFSET_MAX = (1 << 31) - 1

# A search narrows down to this many bytes by reading single entries, then reads them at once.
_BLOCK_BYTES = 6144


@dataclass(frozen=True, slots=True)
class OffsetEntry:
    last_offset: Offset
    position: Position


@dataclass(frozen=True, slots=True)
class TimeEntry:
    timestamp: TimestampMs
    last_offset: Offset


def encode_offset_entry(entry: OffsetEntry, *, base_offset: int) -> bytes:
    return _OFFSET.pack(entry.last_offset - base_offset, entry.position)


def encode_time_entry(entry: TimeEntry, *, base_offset: int) -> bytes:
    return _TIME.pack(entry.timestamp, entry.last_offset - base_offset)


def decode_offset_entries(data: Buffer, *, base_offset: int) -> list[OffsetEntry]:
    """All whole entries of the bytes of an offset index."""
    whole = memoryview(data)[: len(data) // OFFSET_ENTRY_BYTES * OFFSET_ENTRY_BYTES]
    return [OffsetEntry(Offset(base_offset + relative), Position(at)) for relative, at in _OFFSET.iter_unpack(whole)]


def decode_time_entries(data: Buffer, *, base_offset: int) -> list[TimeEntry]:
    """All whole entries of the bytes of a time index."""
    whole = memoryview(data)[: len(data) // TIME_ENTRY_BYTES * TIME_ENTRY_BYTES]
    return [
        TimeEntry(TimestampMs(timestamp), Offset(base_offset + relative))
        for timestamp, relative in _TIME.iter_unpack(whole)
    ]


def offset_floor(data: Buffer, offset: int, *, base_offset: int) -> OffsetEntry | None:
    """The last entry in `data` whose batch ends at or below `offset`."""
    relative = offset - base_offset
    count = bisect_right(range(len(data) // OFFSET_ENTRY_BYTES), relative, key=lambda at: int(_relative_at(data, at)))
    if count == 0:
        return None
    found, position = _OFFSET.unpack_from(data, (count - 1) * OFFSET_ENTRY_BYTES)
    return OffsetEntry(Offset(base_offset + found), Position(position))


def position_floor(data: Buffer, position: int, *, base_offset: int) -> OffsetEntry | None:
    """The last entry in `data` whose batch begins at or below `position`."""
    count = bisect_right(range(len(data) // OFFSET_ENTRY_BYTES), position, key=lambda at: int(_position_at(data, at)))
    if count == 0:
        return None
    found, at = _OFFSET.unpack_from(data, (count - 1) * OFFSET_ENTRY_BYTES)
    return OffsetEntry(Offset(base_offset + found), Position(at))


def time_floor(data: Buffer, timestamp: int, *, base_offset: int) -> TimeEntry | None:
    """The last entry in `data` with a timestamp *below* this one: the record is after its batch."""
    count = bisect_left(range(len(data) // TIME_ENTRY_BYTES), timestamp, key=lambda at: int(_timestamp_at(data, at)))
    if count == 0:
        return None
    found, relative = _TIME.unpack_from(data, (count - 1) * TIME_ENTRY_BYTES)
    return TimeEntry(TimestampMs(found), Offset(base_offset + relative))


def offset_block(file: File, size: int, offset: int, *, base_offset: int) -> ReadPlan[bytes]:
    """Read the part of an offset index file that holds the floor of `offset`; give it to `offset_floor`."""
    relative = offset - base_offset
    return (yield from _block(file, size, OFFSET_ENTRY_BYTES, _OFFSET, 0, relative + 1))


def position_block(file: File, size: int, position: int) -> ReadPlan[bytes]:
    """Read the part of an offset index file that holds the floor of `position`; give it to `position_floor`."""
    return (yield from _block(file, size, OFFSET_ENTRY_BYTES, _OFFSET, 1, position + 1))


def time_block(file: File, size: int, timestamp: int) -> ReadPlan[bytes]:
    """Read the part of a time index file that holds the floor of `timestamp`; give it to `time_floor`."""
    return (yield from _block(file, size, TIME_ENTRY_BYTES, _TIME, 0, timestamp))


def _block(file: File, size: int, entry_bytes: int, layout: Struct, field: int, bound: int) -> ReadPlan[bytes]:
    """Binary search for the last entry whose `field` is below `bound`, until the rest fits one read.

    Entry `low` is always kept in the block if it is below the bound, so the block holds the floor wherever it is.
    """
    low, high = 0, size // entry_bytes
    while (high - low) * entry_bytes > _BLOCK_BYTES:
        middle = (low + high) // 2
        data = yield file, middle * entry_bytes, entry_bytes
        if len(data) < entry_bytes:  # shorter than its size: an index may hold anything
            high = middle
        elif layout.unpack(data)[field] < bound:
            low = middle
        else:
            high = middle
    if low == high:
        return b""
    return (yield file, low * entry_bytes, (high - low) * entry_bytes)


def _relative_at(data: Buffer, at: int) -> int:
    relative: int = _OFFSET.unpack_from(data, at * OFFSET_ENTRY_BYTES)[0]
    return relative


def _position_at(data: Buffer, at: int) -> int:
    position: int = _OFFSET.unpack_from(data, at * OFFSET_ENTRY_BYTES)[1]
    return position


def _timestamp_at(data: Buffer, at: int) -> int:
    timestamp: int = _TIME.unpack_from(data, at * TIME_ENTRY_BYTES)[0]
    return timestamp


@dataclass(slots=True, eq=False)
class IndexBuilder:
    """Chooses which batches of a segment are indexed: the same rule for append, recovery, rebuild and cleaning.

    A batch gets entries when at least `interval_bytes` lie between the end of the last indexed batch's predecessors and
    itself; so the first batch gets none (a search without an entry begins at position 0).

    `offsets` and `times` collect encoded entries until they are written to the files. None means nothing was collected,
    so an idle segment holds no buffers.
    """

    base_offset: int
    interval_bytes: int
    largest_timestamp: int = -1
    largest_offset: int = -1
    indexed_timestamp: int = -1
    offsets: bytearray | None = None
    times: bytearray | None = None
    _since: int = 0

    def resume(self, *, largest_timestamp: int, largest_offset: int, indexed_timestamp: int) -> None:
        """Continue an index whose files have entries. The first new entry may be closer than the interval."""
        self.largest_timestamp = largest_timestamp
        self.largest_offset = largest_offset
        self.indexed_timestamp = indexed_timestamp

    def add(self, last_offset: int, position: int, size: int, max_timestamp: int) -> None:
        """The batch of `size` bytes at `position` is in the log now."""
        if max_timestamp > self.largest_timestamp:
            self.largest_timestamp = max_timestamp
            self.largest_offset = last_offset
        if self._since > self.interval_bytes:
            if self.offsets is None:
                self.offsets = bytearray()
            self.offsets += _OFFSET.pack(last_offset - self.base_offset, position)
            self._since = 0
            self.add_time()
        self._since += size

    def keep_newer(self, *, position: int, next_offset: int, built: "IndexBuilder") -> None:
        """`built` has indexed the batches in front of this position: keep only the entries of later ones."""
        newer, newer_times = bytearray(), bytearray()
        for entry in decode_offset_entries(self.offsets or b"", base_offset=self.base_offset):
            if entry.position >= position:
                newer += encode_offset_entry(entry, base_offset=self.base_offset)
        for time in decode_time_entries(self.times or b"", base_offset=self.base_offset):
            if time.timestamp > built.indexed_timestamp and time.last_offset >= next_offset:
                newer_times += encode_time_entry(time, base_offset=self.base_offset)
        self.offsets, self.times = newer or None, newer_times or None
        if not newer_times:
            self.indexed_timestamp = built.indexed_timestamp

    def configure(self, interval_bytes: int) -> None:
        self.interval_bytes = interval_bytes

    def validate(self, *, next_offset: int, size: int, thorough: bool = True) -> None:
        """Assert that the waiting entries lie in a segment of `size` bytes that ends at `next_offset`, ascending."""
        offsets, times = self.offsets or b"", self.times or b""
        assert not len(offsets) % OFFSET_ENTRY_BYTES, "a part of an offset entry waits"
        assert not len(times) % TIME_ENTRY_BYTES, "a part of a time entry waits"
        assert self.largest_offset < next_offset, f"the largest timestamp is at {self.largest_offset} of {next_offset}"
        assert self.indexed_timestamp <= self.largest_timestamp, "a timestamp is indexed that no batch has"
        if not thorough:
            offsets, times = offsets[-OFFSET_ENTRY_BYTES:], times[-TIME_ENTRY_BYTES:]
        entries = decode_offset_entries(offsets, base_offset=self.base_offset)
        dated = decode_time_entries(times, base_offset=self.base_offset)
        assert all(e.position < size and self.base_offset <= e.last_offset < next_offset for e in entries), (
            f"an index entry outside of the segment: {entries[-1]}"
        )
        assert all(self.base_offset <= e.last_offset < next_offset for e in dated), (
            "a time entry outside of the segment"
        )
        assert all(a.last_offset < b.last_offset and a.position < b.position for a, b in pairwise(entries)), (
            "offset entries do not rise"
        )
        assert all(a.timestamp < b.timestamp and a.last_offset <= b.last_offset for a, b in pairwise(dated)), (
            "time entries do not rise"
        )

    def add_time(self) -> None:
        """Index the largest timestamp so far, unless it is indexed; also when a segment is sealed."""
        if self.largest_timestamp > self.indexed_timestamp:
            if self.times is None:
                self.times = bytearray()
            self.times += _TIME.pack(self.largest_timestamp, self.largest_offset - self.base_offset)
            self.indexed_timestamp = self.largest_timestamp
