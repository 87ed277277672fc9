"""One segment of a log: its file names, the info of a sealed one, and the state of the active one. Pure.

    00000000000000000042.log         record batches, one after the other, from offset 42 on
    00000000000000000042.index       offset -> position, sparse          (`index`)
    00000000000000000042.timeindex   timestamp -> offset, sparse         (`index`)
    00000000000000000042.txnindex    aborted transactions, if there are any (`transactions`)

During a cleaning the same names have one more suffix: `.cleaned` (being written), `.swap` (complete, about to replace
others) and `.deleted` (replaced or expired, removed after a delay).
"""

import re
from dataclasses import dataclass
from zlib import crc32

from tidelog.log.config import LogConfig
from tidelog.log.index import OFFSET_ENTRY_BYTES, RELATIVE_OFFSET_MAX, TIME_ENTRY_BYTES, IndexBuilder
from tidelog.log.transactions import ENTRY_BYTES as ABORTED_ENTRY_BYTES
from tidelog.log.transactions import TransactionIndex
from tidelog.model.ids import Offset, Position

LOG = ".log"
INDEX = ".index"
TIME_INDEX = ".timeindex"
TRANSACTION_INDEX = ".txnindex"
SUFFIXES = (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)

CLEANED = ".cleaned"
SWAP = ".swap"
DELETED = ".deleted"
RESTORED = ".restored"
"""A copy of a damaged segment that is being fetched: not a name of a segment's file."""

_NAME = re.compile(r"(\d{20})(\.log|\.index|\.timeindex|\.txnindex)(\.cleaned|\.swap|\.deleted)?")


def file_name(base_offset: int, suffix: str, state: str = "") -> str:
    return f"{base_offset:020d}{suffix}{state}"


def file_path(directory: str, base_offset: int, suffix: str, state: str = "") -> str:
    return f"{directory}/{base_offset:020d}{suffix}{state}"


def parse_name(name: str) -> tuple[Offset, str, str] | None:
    """(base offset, suffix, state) of a segment's file; None for any other file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Offset(int(match[1])), match[2], match[3] or ""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The info of a sealed segment; stored when it is sealed.

    Offsets are [base_offset, next_offset); the next segment begins at `next_offset`. `largest_offset` is the last
    offset of the batch with the largest timestamp; `first_timestamp` is the largest of the first batch; both timestamps
    are -1 if there is none. `crc` is the CRC-32C of the whole file, None until it is computed. `aborted` counts the
    entries of the transaction index.
    """

    base_offset: Offset
    next_offset: Offset
    size: int
    largest_timestamp: int
    largest_offset: int
    first_timestamp: int
    modified_ms: int
    crc: int | None
    aborted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryMark:
    """The state of the active segment at `offset`: recovery goes on from here without reading earlier bytes.

    `offset` is the recovery point: everything below it is on the device and was sound when it was written. `position`
    is its position in the file of `base_offset`; `crc` is that of the file up to there (None: unknown). The byte counts
    give the part of the index files from before the mark. `has_producers`: a snapshot of the producers at `offset` is
    stored (without one, there were none).
    """

    offset: Offset
    base_offset: Offset
    position: Position
    crc: int | None
    created_ms: int
    modified_ms: int
    first_timestamp: int
    largest_timestamp: int
    largest_offset: int
    indexed_timestamp: int
    index_bytes: int
    time_bytes: int
    aborted_bytes: int
    has_producers: bool


class ActiveSegment:
    """The segment that is written. Its `.log` file exists once something was appended.

    `size` is the file's, `crc` covers all of it (None: unknown, computed after it is sealed). Index entries wait in
    `index` and `aborted` until they are written (`waiting_entries`); `index_bytes`, `time_bytes` and `aborted_bytes`
    are in the files.
    """

    __slots__ = (
        "aborted",
        "aborted_bytes",
        "base_offset",
        "crc",
        "created_ms",
        "first_timestamp",
        "index",
        "index_bytes",
        "modified_ms",
        "path",
        "size",
        "time_bytes",
    )

    def __init__(self, base_offset: int, *, created_ms: int, index_interval_bytes: int) -> None:
        self.base_offset = Offset(base_offset)
        self.path: str | None = None
        self.size = 0
        self.crc: int | None = 0
        self.created_ms = created_ms
        self.modified_ms = created_ms
        self.first_timestamp = -1
        self.index = IndexBuilder(base_offset, index_interval_bytes)
        self.index_bytes = 0
        self.time_bytes = 0
        self.aborted: bytearray | None = None
        self.aborted_bytes = 0

    @classmethod
    def resume(cls, mark: RecoveryMark, *, index_interval_bytes: int) -> "ActiveSegment":
        """The active segment as it was at `mark`."""
        segment = cls(mark.base_offset, created_ms=mark.created_ms, index_interval_bytes=index_interval_bytes)
        segment.size = mark.position
        segment.crc = mark.crc
        segment.modified_ms = mark.modified_ms
        segment.first_timestamp = mark.first_timestamp
        segment.index.resume(
            largest_timestamp=mark.largest_timestamp,
            largest_offset=mark.largest_offset,
            indexed_timestamp=mark.indexed_timestamp,
        )
        segment.index_bytes = mark.index_bytes
        segment.time_bytes = mark.time_bytes
        segment.aborted_bytes = mark.aborted_bytes
        return segment

    def begin(self, created_ms: int) -> None:
        """The first bytes are about to be written: the file is created now."""
        self.created_ms = created_ms

    def add(self, last_offset: int, size: int, max_timestamp: int, *, crc: int | None, modified_ms: int) -> None:
        """A batch of `size` bytes was appended to the file, whose CRC is `crc` now."""
        if self.first_timestamp < 0:
            self.first_timestamp = max_timestamp
        self.index.add(last_offset, self.size, size, max_timestamp)
        self.size += size
        self.crc = crc
        self.modified_ms = modified_ms

    def waiting_entries(self) -> list[tuple[str, int, bytearray]]:
        """Index entries that are not written yet: (suffix of the file, its size, entries)."""
        waiting = (
            (INDEX, self.index_bytes, self.index.offsets),
            (TIME_INDEX, self.time_bytes, self.index.times),
            (TRANSACTION_INDEX, self.aborted_bytes, self.aborted),
        )
        return [(suffix, size, entries) for suffix, size, entries in waiting if entries]

    def entries_written(self, suffix: str) -> None:
        """The entries that `waiting_entries` returned for this file are in it now."""
        if suffix == INDEX:
            self.index_bytes += len(self.index.offsets or b"")
            self.index.offsets = None
        elif suffix == TIME_INDEX:
            self.time_bytes += len(self.index.times or b"")
            self.index.times = None
        else:
            self.aborted_bytes += len(self.aborted or b"")
            self.aborted = None

    def replace_index(self, read: SegmentInfo, built: IndexBuilder, aborted: bytes) -> None:
        """Indexes of the part `read` were rebuilt and are in the files; appends went on meanwhile.

        Entries past that part keep waiting.
        """
        offsets, times = built.offsets or b"", built.times or b""
        self.index.keep_newer(position=read.size, next_offset=read.next_offset, built=built)
        waiting = TransactionIndex.parse(bytes(self.aborted or b""))
        newer = sum(1 for entry in waiting if entry.last_offset >= read.next_offset)
        self.aborted = bytearray(waiting.to_bytes()[-ABORTED_ENTRY_BYTES * newer :]) if newer else None
        self.index_bytes, self.time_bytes, self.aborted_bytes = len(offsets), len(times), len(aborted)

    def replace_aborted(self, entries: bytes) -> None:
        """A replay found these aborted transactions; none of them is in the file."""
        self.aborted_bytes = 0
        self.aborted = bytearray(entries) or None

    def add_aborted(self, entry: bytes) -> None:
        if self.aborted is None:
            self.aborted = bytearray()
        self.aborted += entry

    @property
    def aborted_count(self) -> int:
        return (self.aborted_bytes + len(self.aborted or b"")) // ABORTED_ENTRY_BYTES

    def mark(self, offset: int, *, has_producers: bool) -> RecoveryMark:
        """The state now; the log ends at `offset`, and all entries are in the files."""
        waiting = self.index.offsets or self.index.times or self.aborted
        assert not waiting, "index entries wait to be written"
        return RecoveryMark(
            offset=Offset(offset),
            base_offset=self.base_offset,
            position=Position(self.size),
            crc=self.crc,
            created_ms=self.created_ms,
            modified_ms=self.modified_ms,
            first_timestamp=self.first_timestamp,
            largest_timestamp=self.index.largest_timestamp,
            largest_offset=self.index.largest_offset,
            indexed_timestamp=self.index.indexed_timestamp,
            index_bytes=self.index_bytes,
            time_bytes=self.time_bytes,
            aborted_bytes=self.aborted_bytes,
            has_producers=has_producers,
        )

    def info(self, next_offset: int) -> SegmentInfo:
        """The info if the segment ends at `next_offset`: when it is sealed, or for a reader."""
        return SegmentInfo(
            base_offset=self.base_offset,
            next_offset=Offset(next_offset),
            size=self.size,
            largest_timestamp=self.index.largest_timestamp,
            largest_offset=self.index.largest_offset,
            first_timestamp=self.first_timestamp,
            modified_ms=self.modified_ms,
            crc=self.crc,
            aborted=self.aborted_count,
        )

    def must_roll(
        self, config: LogConfig, *, size: int, last_offset: int, max_timestamp: int, now_ms: int, log_number: int
    ) -> bool:
        """Whether `size` more bytes, up to `last_offset` and `max_timestamp`, belong in a new segment.

        By size; by time (of the records if they have timestamps, else since the file was created); when an index is
        full; when an offset no longer fits 31 bits. An empty segment never rolls.
        """
        if self.size == 0:
            return False
        if self.size + size > config.segment_bytes or last_offset - self.base_offset > RELATIVE_OFFSET_MAX:
            return True
        if self.is_due(config, max_timestamp=max_timestamp, now_ms=now_ms, log_number=log_number):
            return True
        # Space for this append's entry and for the last time entry, which is written when the segment is sealed.
        index_bytes = self.index_bytes + OFFSET_ENTRY_BYTES
        time_bytes = self.time_bytes + 2 * TIME_ENTRY_BYTES
        if self.index.offsets is not None:
            index_bytes += len(self.index.offsets)
        if self.index.times is not None:
            time_bytes += len(self.index.times)
        return index_bytes > config.index_bytes_max or time_bytes > config.index_bytes_max

    def is_due(self, config: LogConfig, *, max_timestamp: int, now_ms: int, log_number: int) -> bool:
        """Whether `segment_ms`, less this segment's jitter, has passed.

        A compacted log rolls after `max_compaction_lag_ms` at the latest, since only sealed segments are cleaned.
        """
        if self.size == 0:
            return False
        if self.first_timestamp >= 0 and max_timestamp >= 0:
            waited_ms = max_timestamp - self.first_timestamp
        else:
            waited_ms = now_ms - self.created_ms
        due_ms = config.segment_ms
        if config.segment_jitter_ms:
            due_ms -= self._jitter_ms(config, log_number)
        return waited_ms > (min(due_ms, config.max_compaction_lag_ms) if config.cleanup_compact else due_ms)

    def _jitter_ms(self, config: LogConfig, log_number: int) -> int:
        """The same for a segment every time, so that a restart or a replay rolls at the same time."""
        return crc32(b"%d %d" % (log_number, self.base_offset)) % config.segment_jitter_ms
