"""Scans whole segments: to recover a log, to replay its producers, to rebuild an index, to scrub. Pure.

These are functions of values over immutable files, for a helper process (`Work.run`): they read blocking and change
nothing. `scan_log` trusts no byte: it checks each batch by its CRC, by the continuity of offsets and by the order of
epochs, and stops at the first that fails, with a reason.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from crc32c import crc32c

from tidelog.log.batch import HEADER_BYTES, BatchHeader, ControlMarker, check_batch, parse_control, read_header
from tidelog.log.index import RELATIVE_OFFSET_MAX, IndexBuilder
from tidelog.log.producers import ProducerState
from tidelog.log.segment import LOG, ActiveSegment, RecoveryMark, SegmentInfo, file_path
from tidelog.log.transactions import encode_entry
from tidelog.model.errors import CorruptBatchError, RecordTooLargeError, TidelogError, UnsupportedCompressionError
from tidelog.world.disk import Disk, File

BATCH_BYTES_MAX = (1 << 31) - 1
"""No limit of a topic: stored batches were admitted once. The file bounds a batch."""
_CHUNK_BYTES = 1 << 20
_HEADERS_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest:
    """Scan the segments `bases` (ascending) of a log, the first from `mark` on, the others from their beginning.

    `epoch` is that of the last batch before the mark. With `gaps`, offsets may be missing between batches. The scan
    stops at `stop_offset`. `producers` is the snapshot at the mark; `now_ms` dates the producers that are found.
    """

    directory: str
    bases: tuple[int, ...]
    mark: RecoveryMark
    epoch: int
    gaps: bool
    index_interval_bytes: int
    now_ms: int
    producers: bytes | None = None
    stop_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScan:
    """The sound part: segments in order (the log ends in the last one), up to `end_offset`.

    `fault` is the reason if the scan ended before the last byte, else None. `is_misplaced`: the batch there is sound
    but in the wrong place, so it or one before it was changed. `epochs` are those that begin in the scanned part.
    """

    segments: list[ActiveSegment]
    end_offset: int
    epochs: list[tuple[int, int]]
    producers: bytes
    batches: int
    bytes_read: int
    fault: str | None
    is_misplaced: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """State from the headers of a part of a log: producers at its end, aborted transactions by segment."""

    producers: bytes
    aborted: dict[int, bytes]
    epochs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """A sealed segment against its CRC. If `fault` is not None, the log can be trusted below `good_end`."""

    base_offset: int
    size: int
    crc: int
    good_end: int
    fault: str | None


def scan_log(disk: Disk, request: ScanRequest) -> LogScan:
    scan = _Scan(request)
    for base in request.bases:
        if not scan.scan_segment(disk, base):
            break
    return scan.result()


class _Scan:
    """One pass over segments. `scan_segment` returns False when the scan has ended."""

    def __init__(self, request: ScanRequest) -> None:
        self._request = request
        self._next_offset: int = request.mark.offset
        self._epoch = request.epoch
        self._producers = ProducerState.from_snapshot(request.producers) if request.producers else ProducerState()
        self._segments: list[ActiveSegment] = []
        self._epochs: list[tuple[int, int]] = []
        self._batches = 0
        self._bytes_read = 0
        self._fault: str | None = None
        self._is_misplaced = False

    def result(self) -> LogScan:
        return LogScan(
            segments=self._segments,
            end_offset=self._next_offset,
            epochs=self._epochs,
            producers=self._producers.to_snapshot() if len(self._producers) else b"",
            batches=self._batches,
            bytes_read=self._bytes_read,
            fault=self._fault,
            is_misplaced=self._is_misplaced,
        )

    def scan_segment(self, disk: Disk, base: int) -> bool:
        request = self._request
        if base == request.mark.base_offset:
            segment = ActiveSegment.resume(request.mark, index_interval_bytes=request.index_interval_bytes)
        elif base != self._next_offset:
            self._fault = f"segment {base} does not follow on offset {self._next_offset}"
            return False
        else:
            segment = ActiveSegment(base, created_ms=request.now_ms, index_interval_bytes=request.index_interval_bytes)
        with closing(disk.open(file_path(request.directory, base, LOG))) as file:
            self._fault = self._scan_file(file, segment)
        if segment.size > 0 or base == request.mark.base_offset:
            self._segments.append(segment)
        return self._fault is None

    def _scan_file(self, file: File, segment: ActiveSegment) -> str | None:
        """Add batches up to the end of the file; returns the reason if it stops before."""
        size = file.size
        if size < segment.size:
            return f"{file.path} has {size} bytes, it must have {segment.size}"
        wanted = _CHUNK_BYTES
        while segment.size < size:
            start = segment.size
            requested = min(wanted, size - start)
            chunk = memoryview(file.read(start, requested))
            self._bytes_read += len(chunk)
            if len(chunk) < requested:
                return f"{file.path} at {start}: the file ends before its size of {size}"
            wanted = _CHUNK_BYTES
            at = 0
            while at < len(chunk):
                try:
                    if len(chunk) - at >= HEADER_BYTES:
                        whole = read_header(chunk, at).size
                        if at + whole > len(chunk) and start + at + whole <= size:
                            wanted = max(_CHUNK_BYTES, whole)
                            break
                    elif start + len(chunk) < size:
                        break
                    header = check_batch(chunk, at, size_max=BATCH_BYTES_MAX)
                except TidelogError as error:
                    return f"{file.path} at {start + at}: {error}"
                fault = self._reject(header, segment)
                if fault is not None:
                    self._is_misplaced = True
                    return f"{file.path} at {start + at}: {fault}"
                self._take(header, chunk[at : at + header.size], segment)
                at += header.size
        return None

    def _reject(self, header: BatchHeader, segment: ActiveSegment) -> str | None:
        expected = self._next_offset
        request = self._request
        if header.base_offset < expected or (header.base_offset > expected and not request.gaps):
            return f"offset {header.base_offset} where {expected} must follow"
        if header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX:
            return f"offset {header.last_offset} is out of reach of the segment"
        if header.leader_epoch < self._epoch:
            return f"epoch {header.leader_epoch} after epoch {self._epoch}"
        if request.stop_offset is not None and header.next_offset > request.stop_offset:
            return f"offset {header.base_offset} is not known to be on the device, a sync had failed"
        return None

    def _take(self, header: BatchHeader, batch: memoryview, segment: ActiveSegment) -> None:
        if header.leader_epoch > self._epoch:
            self._epoch = header.leader_epoch
            self._epochs.append((header.leader_epoch, header.base_offset))
        completed = apply_batch(self._producers, header, batch, self._request.now_ms)
        if completed is not None:
            segment.add_aborted(completed)
        segment.add(
            header.last_offset,
            header.size,
            header.max_timestamp,
            crc=None if segment.crc is None else crc32c(batch, segment.crc),
            modified_ms=max(segment.modified_ms, self._request.now_ms),
        )
        self._next_offset = header.next_offset
        self._batches += 1


def apply_batch(
    producers: ProducerState, header: BatchHeader, batch: bytes | bytearray | memoryview, now_ms: int
) -> bytes | None:
    """Apply a stored batch to the producers; returns the transaction index entry if it aborted a transaction."""
    if not header.has_producer:
        return None
    completed = producers.apply(header, control=stored_marker(header, batch), now_ms=now_ms)
    entry = completed.index_entry() if completed is not None else None
    return None if entry is None else encode_entry(entry)


def stored_marker(header: BatchHeader, batch: bytes | bytearray | memoryview) -> ControlMarker | None:
    """The transaction marker in a stored batch, if it is one."""
    if not header.is_control:
        return None
    try:
        marker = parse_control(batch)
    except (CorruptBatchError, UnsupportedCompressionError, RecordTooLargeError):
        # It was stored like this, or is corrupt and the caller checks no CRC: it ends no known transaction.
        return None
    return marker if marker is not None and marker.ends_transaction else None


def replay(
    disk: Disk,
    directory: str,
    bases: Sequence[int],
    snapshot: bytes | None,
    start_offset: int,
    end_offset: int,
    now_ms: int,
) -> Replay:
    """Walk the headers of [start_offset, end_offset) in these segments; `snapshot` is the state at the start.

    The walk ends at bytes that are no batch: what follows is not readable either. `now_ms` dates the producers: their
    real time is unknown, and later is safe.
    """
    producers = ProducerState.from_snapshot(snapshot) if snapshot else ProducerState()
    aborted: dict[int, bytes] = {}
    epochs: list[tuple[int, int]] = []
    latest = -1
    for base in bases:
        for header, batch in _stored_batches(disk, directory, base):
            if header.base_offset >= end_offset:
                break
            if header.leader_epoch > latest:
                latest = header.leader_epoch
                epochs.append((latest, header.base_offset))
            if header.base_offset >= start_offset:
                entry = apply_batch(producers, header, batch, now_ms)
                if entry is not None:
                    aborted[base] = aborted.get(base, b"") + entry
    return Replay(producers.to_snapshot() if len(producers) else b"", aborted, epochs)


def build_indexes(
    disk: Disk, directory: str, base: int, size: int, interval_bytes: int, is_sealed: bool
) -> IndexBuilder:
    """The index entries of the first `size` bytes of a segment, from the headers of its batches."""
    builder = IndexBuilder(base, interval_bytes)
    with closing(disk.open(file_path(directory, base, LOG))) as file:
        for position, header in walk_headers(file, size):
            if not base <= header.last_offset <= base + RELATIVE_OFFSET_MAX:
                break  # no CRC covers the base offset; a walk finds what follows a wrong one
            builder.add(header.last_offset, position, header.size, header.max_timestamp)
    if is_sealed:
        builder.add_time()
    return builder


def file_crc(disk: Disk, path: str, size: int) -> int:
    """CRC-32C of the first `size` bytes of a file."""
    with closing(disk.open(path)) as file:
        crc = 0
        position = 0
        while position < size:
            data = file.read(position, min(_CHUNK_BYTES, size - position))
            if not data:
                break
            crc = crc32c(data, crc)
            position += len(data)
        return crc


def crc_of_piece(disk: Disk, path: str, position: int, length: int, crc: int) -> tuple[int, int, int]:
    """Return (CRC up to the end of this piece, bytes read, file size). Runs in a worker process."""
    size = disk.size(path)
    file = disk.open(path)
    try:
        data = file.read(position, length)
    finally:
        file.close()
    return crc32c(data, crc), len(data), size


def scrub(disk: Disk, directory: str, info: SegmentInfo, gaps: bool) -> ScrubResult:
    """Check a sealed segment against the CRC of its whole file; if it differs, find where the good part ends."""
    path = file_path(directory, info.base_offset, LOG)
    size = disk.size(path) if disk.exists(path) else 0
    crc = file_crc(disk, path, size) if size else 0
    if size == info.size and (info.crc is None or crc == info.crc):
        return ScrubResult(info.base_offset, size, crc, info.next_offset, None)
    good_end: int = info.base_offset
    if size:
        mark = empty_mark(info.base_offset)
        scan = scan_log(disk, _whole_segment(directory, mark, gaps))
        # If all batches are sound, a byte outside of their CRCs differs: it may be in any of them.
        if size != info.size or (scan.fault is not None and not scan.is_misplaced):
            good_end = min(scan.end_offset, info.next_offset)
    fault = f"{path} has {size} bytes with CRC-32C {crc:#010x}, sealed with {info.size} and {info.crc or 0:#010x}"
    return ScrubResult(info.base_offset, size, crc, good_end, fault)


def _whole_segment(directory: str, mark: RecoveryMark, gaps: bool) -> ScanRequest:
    return ScanRequest(
        directory=directory,
        bases=(mark.base_offset,),
        mark=mark,
        epoch=-1,
        gaps=gaps,
        index_interval_bytes=4096,
        now_ms=0,  # its producers are not needed
    )


def empty_mark(base: int, *, created_ms: int = 0) -> RecoveryMark:
    """The mark at the beginning of a segment."""
    return ActiveSegment(base, created_ms=created_ms, index_interval_bytes=0).mark(base, has_producers=False)


def walk_headers(file: File, size: int, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each batch in [position, size); ends at bytes that are no batch. No CRC is checked."""
    window = b""
    window_start = position
    while position + HEADER_BYTES <= size:
        at = position - window_start
        if at + HEADER_BYTES > len(window):
            window = file.read(position, min(_HEADERS_BYTES, size - position))
            window_start, at = position, 0
        try:
            header = read_header(window, at)
        except TidelogError:
            return
        if position + header.size > size:
            return
        yield position, header
        position += header.size


def _stored_batches(disk: Disk, directory: str, base: int) -> Iterator[tuple[BatchHeader, bytes]]:
    """Headers of a segment's batches, with the whole batch where it is a control batch (else empty)."""
    path = file_path(directory, base, LOG)
    if not disk.exists(path):
        return
    with closing(disk.open(path)) as file:
        for position, header in walk_headers(file, file.size):
            yield header, file.read(position, header.size) if header.is_control else b""
