"""The sparse indexes of a segment: offset to position, and timestamp to offset. Pure; Kafka's layouts, big endian.

    .index, 8 bytes an entry                    .timeindex, 12 bytes an entry
    0               4               8           0                               8              12
    +---------------+---------------+           +-------------------------------+---------------+
    | rel. offset   | position      |           | largest timestamp so far      | rel. offset   |
    +---------------+---------------+           +-------------------------------+---------------+

Relative offsets count from the segment's base offset. An entry of the offset index stands for one batch: its *last*
offset and where the batch begins. An entry (t, o) of the time index says: every record up to o has a timestamp of at
most t, and the batch whose last offset is o has t as its largest. Both are strictly ascending.

Indexes carry no checksum and are never trusted: an entry is a hint which the reader checks against the header of the
batch that it names (`OffsetEntry.last_offset`, `TimeEntry.timestamp`). An entry that proves true gives a right answer
even if entries around it are lost or wrong; one that proves false, or a long walk without one, has the index rebuilt
from the log. So an index may be lost, stale, torn or deleted by an administrator at no risk.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from struct import Struct

from tidelog.log.files import Steps
from tidelog.model.ids import Offset, Position, TimestampMs
from tidelog.world.disk import Buffer, File

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
    """The last entry in `data` with a timestamp *below* the one sought: the answer lies after its batch."""
    count = bisect_left(range(len(data) // TIME_ENTRY_BYTES), timestamp, key=lambda at: int(_timestamp_at(data, at)))
    if count == 0:
        return None
    found, relative = _TIME.unpack_from(data, (count - 1) * TIME_ENTRY_BYTES)
    return TimeEntry(TimestampMs(found), Offset(base_offset + relative))


def offset_block(file: File, size: int, offset: int, *, base_offset: int) -> Steps[bytes]:
    """Read the part of an offset index file that holds the floor of `offset`; give it to `offset_floor`."""
    relative = offset - base_offset
    return (yield from _block(file, size, OFFSET_ENTRY_BYTES, _OFFSET, 0, relative + 1))


def position_block(file: File, size: int, position: int) -> Steps[bytes]:
    """Read the part of an offset index file that holds the floor of `position`; give it to `position_floor`."""
    return (yield from _block(file, size, OFFSET_ENTRY_BYTES, _OFFSET, 1, position + 1))


def time_block(file: File, size: int, timestamp: int) -> Steps[bytes]:
    """Read the part of a time index file that holds the floor of `timestamp`; give it to `time_floor`."""
    return (yield from _block(file, size, TIME_ENTRY_BYTES, _TIME, 0, timestamp))


def _block(file: File, size: int, entry_bytes: int, layout: Struct, field: int, bound: int) -> Steps[bytes]:
    """Binary search for the last entry whose `field` is below `bound`, until the rest fits one read.

    Entry `low` is always kept in the block if it is below the bound, so the block holds the floor wherever it is.
    """
    low, high = 0, size // entry_bytes
    while (high - low) * entry_bytes > _BLOCK_BYTES:
        middle = (low + high) // 2
        data = yield file, middle * entry_bytes, entry_bytes
        if len(data) < entry_bytes:  # shorter than it was said to be: an index may be anything
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


class IndexBuilder:
    """Chooses which batches of a segment are indexed. The one rule for appending, recovery, rebuilding and cleaning.

    A batch gets entries when at least `interval_bytes` lie between the end of the last indexed batch's predecessors
    and itself; so the first batch gets none (a search without an entry begins at position 0).

    `offsets` and `times` collect encoded entries; the owner takes them to the files (`take`). None means nothing was
    collected, so that an idle segment holds no buffers.
    """

    __slots__ = (
        "_since",
        "base_offset",
        "indexed_timestamp",
        "interval_bytes",
        "largest_offset",
        "largest_timestamp",
        "offsets",
        "times",
    )

    def __init__(self, base_offset: int, interval_bytes: int) -> None:
        self.base_offset = base_offset
        self.interval_bytes = interval_bytes
        self._since = 0
        self.largest_timestamp = -1
        self.largest_offset = -1
        self.indexed_timestamp = -1
        self.offsets: bytearray | None = None
        self.times: bytearray | None = None

    def resume(self, *, largest_timestamp: int, largest_offset: int, indexed_timestamp: int) -> None:
        """Go on where files left off. The next batch far enough on is indexed; entries may stand a little closer."""
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

    def add_time(self) -> None:
        """Index the largest timestamp so far, unless it is: also done when a segment is sealed."""
        if self.largest_timestamp > self.indexed_timestamp:
            if self.times is None:
                self.times = bytearray()
            self.times += _TIME.pack(self.largest_timestamp, self.largest_offset - self.base_offset)
            self.indexed_timestamp = self.largest_timestamp
