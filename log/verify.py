"""Verifies a log offline: compares its files with each other and with the state store. Pure.

Checks:

- segment: batches follow each other without a gap in the file; length, magic, CRC, counts; base offsets ascend from
  the segment's name; leader epochs never go down; records decode, their offsets ascend inside the batch, none is
  newer than the batch says; the sealed segment's whole-file checksum.
- offset index: ascending; every entry is the start of a batch and its last offset.
- time index: ascending; every entry is the last offset of a batch, that batch's largest timestamp, and the largest up
  to there.
- transaction index: ordered; every entry has its abort marker in this segment, and every abort marker of a transaction
  that was seen to begin has its entry.
- segments against each other: no overlap; no index without its segment; every sealed segment of the state store exists.
- state store: start, recovery mark and clean stop inside the log; epoch history as in the batches; producer snapshots
  as in the batches; size, checksum and times of sealed segments; no offset missing unless the log was compacted.

Without the state store, gaps between offsets are no error: compaction leaves them, and a follower copies them. Memory
is bounded by four integers for each batch of the log.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from crc32c import crc32c

from tidelog.log.batch import check_batch
from tidelog.log.dump import (
    BATCH_BYTES_MAX,
    READ_BYTES,
    FileKind,
    Problem,
    Source,
    StoredBatch,
    TransactionEntry,
    parse_name,
    read_batches,
    read_offset_index,
    read_time_index,
    read_transaction_index,
)
from tidelog.log.producer_snapshot import decode_snapshot
from tidelog.log.stored_state import StoredState
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Epoch, Offset

RELATIVE_OFFSET_MAX = (1 << 31) - 1
STATE = "state store"
"""The file name of a problem that is in no file."""


@dataclass(frozen=True, slots=True)
class SeenAbort:
    """An aborted transaction, from the batches. Offsets are upper bounds unless `is_exact`: the beginning of it, or of
    another open one, may no longer be in the log."""

    producer_id: int
    first_offset: int
    last_stable: int
    is_exact: bool


@dataclass(slots=True)
class SegmentContents:
    """The result of the scan of one segment; the arrays have one value for each batch."""

    name: str
    base_offset: Offset
    size: int
    next_offset: Offset
    crc: int = 0
    positions: "array[int]" = field(default_factory=lambda: array("q"))
    base_offsets: "array[int]" = field(default_factory=lambda: array("q"))
    last_offsets: "array[int]" = field(default_factory=lambda: array("q"))
    timestamps: "array[int]" = field(default_factory=lambda: array("q"))
    epochs: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, base offset, position) of the first and the last batch of each run of one epoch."""
    markers: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """offset of a transaction's marker -> (producer id, is an abort)."""
    aborted: dict[int, "SeenAbort"] = field(default_factory=dict)
    """offset of an abort marker -> the transaction, where it was seen to begin."""
    is_readable: bool = True
    """False: the scan stopped before the end of the file."""


class LogVerifier:
    """Reads the files of one log in order and collects `problems` and the contents of `segments`.

    With `state`, the stored state of the log, it compares that with the files too.
    """

    def __init__(self, files: Mapping[str, Source], state: StoredState | None = None) -> None:
        self._files = files
        self._state = state
        self.problems: list[Problem] = []
        self.segments: list[SegmentContents] = []
        self._last_epoch = -1
        self._remembered: dict[int, tuple[int, int]] = {}
        """last offset of a batch that a producer snapshot remembers -> (producer id, last sequence)."""
        self._open: dict[int, int] = {}
        """producer id -> first offset of its open transaction."""
        self._is_whole = True
        """Every batch from offset 0 on was seen: nothing is deleted or compacted up to here."""

    def run(self) -> None:
        """Verify all files; call once."""
        if self._state is not None:
            self._check_snapshots(self._state)
        parsed = {name: found for name in sorted(self._files) if (found := parse_name(name)) is not None}
        bases = {base for kind, base in parsed.values() if kind is FileKind.SEGMENT}
        for name, (kind, base) in parsed.items():
            if kind is FileKind.SEGMENT:
                self._check_segment(name, base)
            elif base not in bases:
                self._problem(name, None, "an index without its segment")
        indexed_end = self._indexed_end()
        for contents in self.segments:
            contents.aborted = {marker: seen for marker, seen in contents.aborted.items() if marker < indexed_end}
            for kind in (FileKind.OFFSET_INDEX, FileKind.TIME_INDEX, FileKind.TRANSACTION_INDEX):
                name = f"{contents.base_offset:020d}{kind.value}"
                if name in parsed:
                    self.problems += check_index(kind, contents, self._files[name], name)
                elif kind is FileKind.TRANSACTION_INDEX and contents.aborted:
                    self._problem(contents.name, None, f"{len(contents.aborted)} aborted transactions, but no {name}")
        if self._state is not None:
            self.problems += check_state(self.segments, self._state, self._files)

    def _indexed_end(self) -> int:
        """Aborted transactions below this must be indexed; recovery completes the index of the newest ones."""
        if self._state is not None and self._state.mark is not None:
            return self._state.mark.offset
        return self.segments[-1].base_offset if self.segments else 0

    def _check_snapshots(self, state: StoredState) -> None:
        """Check the producer snapshots; their batches are checked when the scan reaches them."""
        for offset, data in sorted(state.producers.items()):
            if not data:
                continue  # there were no producers
            try:
                rows = decode_snapshot(data).producers
            except TidelogError as error:
                self._problem(STATE, None, f"producer snapshot at {offset}: {error}")
                continue
            for row in rows:
                if row.offset >= offset:
                    self._problem(
                        STATE, None, f"producer snapshot at {offset}: producer {row.producer_id} at {row.offset}"
                    )
                for last_sequence, last_offset, *_ in row.batches:
                    self._remembered[last_offset] = (row.producer_id, last_sequence)

    def _problem(self, name: str, position: int | None, what: str) -> None:
        self.problems.append(Problem(name, position, what))

    def _check_segment(self, name: str, base: Offset) -> None:
        source = self._files[name]
        contents = SegmentContents(name, base, source.size, base)
        if self.segments and base < self.segments[-1].next_offset:
            last = self.segments[-1]
            self._problem(name, None, f"begins below {last.next_offset}, where {last.name} ends")
        for found in read_batches(source, name):
            if isinstance(found, Problem):
                contents.is_readable = False
                self.problems.append(found)
            else:
                self._check_batch(contents, found)
        contents.crc = file_crc(source)
        self.segments.append(contents)

    def _check_batch(self, contents: SegmentContents, batch: StoredBatch) -> None:
        header = batch.header
        try:
            check_batch(batch.data, size_max=BATCH_BYTES_MAX)
        except TidelogError as error:
            self._problem(contents.name, batch.position, str(error))
        else:
            for what in check_records(batch):
                self._problem(contents.name, batch.position, what)
        if header.base_offset < contents.next_offset:
            self._problem(
                contents.name,
                batch.position,
                f"base offset {header.base_offset} is below {contents.next_offset}, expected next",
            )
        if header.last_offset - contents.base_offset > RELATIVE_OFFSET_MAX:
            self._problem(
                contents.name, batch.position, f"offset {header.last_offset} is too far from the segment's base"
            )
        if header.leader_epoch < self._last_epoch:
            self._problem(
                contents.name, batch.position, f"leader epoch {header.leader_epoch} after epoch {self._last_epoch}"
            )
        self._note(contents, batch)

    def _note(self, contents: SegmentContents, batch: StoredBatch) -> None:
        header = batch.header
        before = contents.next_offset if contents.positions or self.segments else 0
        self._is_whole = self._is_whole and header.base_offset == before
        contents.positions.append(batch.position)
        contents.base_offsets.append(header.base_offset)
        contents.last_offsets.append(header.last_offset)
        contents.timestamps.append(header.max_timestamp)
        contents.next_offset = max(contents.next_offset, header.next_offset)
        here = (header.leader_epoch, header.base_offset, batch.position)
        if len(contents.epochs) >= 2 and contents.epochs[-2][0] == contents.epochs[-1][0] == header.leader_epoch:
            contents.epochs[-1] = here
        else:
            contents.epochs.append(here)
        self._last_epoch = max(self._last_epoch, header.leader_epoch)
        remembered = self._remembered.get(header.last_offset)
        if remembered not in (None, (header.producer_id, header.last_sequence)):
            found = f"producer {header.producer_id}, sequence {header.last_sequence}"
            said = f"the producer snapshot remembers {remembered}"
            self._problem(contents.name, batch.position, f"{found} at {header.last_offset}: {said}")
        if not header.is_transactional:
            return
        if not header.is_control:
            self._open.setdefault(header.producer_id, header.base_offset)
        elif (marker := batch.marker) in ("COMMIT", "ABORT"):
            contents.markers[header.base_offset] = (header.producer_id, marker == "ABORT")
            first = self._open.pop(header.producer_id, None)
            if first is not None and marker == "ABORT":
                stable = min(self._open.values(), default=header.base_offset + 1)
                contents.aborted[header.base_offset] = SeenAbort(header.producer_id, first, stable, self._is_whole)


def check_records(batch: StoredBatch) -> Iterator[str]:
    """The problems of the records of a batch whose CRC is right."""
    header = batch.header
    try:
        records = batch.records()
    except TidelogError as error:
        yield f"records do not decode: {error}"
        return
    if len(records) != header.count:
        yield f"{len(records)} records, the header says {header.count}"
    expected = header.base_offset
    for record in records:
        if not expected <= record.offset <= header.last_offset:
            yield f"record offset {record.offset} outside of {expected} to {header.last_offset}"
            return
        expected = Offset(record.offset + 1)
    newest = max((record.timestamp for record in records), default=header.max_timestamp)
    if newest > header.max_timestamp:
        yield f"a record of time {newest} is newer than the batch's largest time {header.max_timestamp}"


def check_index(kind: FileKind, contents: SegmentContents, source: Source, name: str) -> Iterator[Problem]:
    """Compare one index with the contents of its segment."""
    if kind is FileKind.OFFSET_INDEX:
        yield from check_offset_index(contents, source, name)
    elif kind is FileKind.TIME_INDEX:
        yield from check_time_index(contents, source, name)
    else:
        assert kind is FileKind.TRANSACTION_INDEX, "a segment is no index"
        yield from check_transaction_index(contents, source, name)


def check_offset_index(contents: SegmentContents, source: Source, name: str) -> Iterator[Problem]:
    last_offset, last_position = -1, -1
    for entry in read_offset_index(source, name, contents.base_offset):
        if isinstance(entry, Problem):
            yield entry
            continue
        if entry.offset <= last_offset or entry.position <= last_position:
            yield Problem(name, entry.at, f"entry ({entry.offset}, {entry.position}) does not ascend")
        last_offset, last_position = max(last_offset, entry.offset), max(last_position, entry.position)
        number = _find(contents.positions, entry.position)
        if number is None:
            yield Problem(name, entry.at, f"offset {entry.offset}: no batch starts at position {entry.position}")
        elif contents.last_offsets[number] != entry.offset:
            there = f"the batch at {entry.position} ends with {contents.last_offsets[number]}"
            yield Problem(name, entry.at, f"offset {entry.offset}: {there}")


def check_time_index(contents: SegmentContents, source: Source, name: str) -> Iterator[Problem]:
    last_timestamp, last_offset, scanned, largest = -1, -1, 0, -1
    for entry in read_time_index(source, name, contents.base_offset):
        if isinstance(entry, Problem):
            yield entry
            continue
        if entry.timestamp <= last_timestamp or entry.offset <= last_offset:
            yield Problem(name, entry.at, f"entry ({entry.timestamp}, {entry.offset}) does not ascend")
        last_timestamp, last_offset = max(last_timestamp, entry.timestamp), max(last_offset, entry.offset)
        number = _find(contents.last_offsets, entry.offset)
        if number is None:
            yield Problem(name, entry.at, f"time {entry.timestamp}: no batch ends with offset {entry.offset}")
            continue
        largest = max([largest, *contents.timestamps[scanned : number + 1]])
        scanned = max(scanned, number + 1)
        if contents.timestamps[number] != entry.timestamp:
            there = f"the batch that ends with {entry.offset} has {contents.timestamps[number]}"
            yield Problem(name, entry.at, f"time {entry.timestamp}: {there}")
        elif largest > entry.timestamp:
            yield Problem(name, entry.at, f"time {entry.timestamp}: a batch before it has {largest}")


def check_transaction_index(contents: SegmentContents, source: Source, name: str) -> Iterator[Problem]:
    last = -1
    missing = dict(contents.aborted)
    for entry in read_transaction_index(source, name):
        if isinstance(entry, Problem):
            yield entry
            continue
        aborted = entry.aborted
        if aborted.last_offset <= last or aborted.first_offset > aborted.last_offset:
            yield Problem(name, entry.at, f"entry ({aborted.first_offset}, {aborted.last_offset}) is not in order")
        last = max(last, aborted.last_offset)
        yield from _check_transaction(contents, entry, name, missing.pop(aborted.last_offset, None))
    for marker, seen in sorted(missing.items()):
        which = f"producer {seen.producer_id}, aborted from {seen.first_offset} to {marker}"
        yield Problem(name, None, f"no entry for {which}")


def _check_transaction(
    contents: SegmentContents, entry: TransactionEntry, name: str, seen: SeenAbort | None
) -> Iterator[Problem]:
    aborted = entry.aborted
    marker = contents.markers.get(aborted.last_offset)
    who = f"producer {aborted.producer_id}"
    if not contents.base_offset <= aborted.last_offset < contents.next_offset:
        yield Problem(name, entry.at, f"{who}: its marker {aborted.last_offset} lies outside of the segment")
    elif marker is None:
        # Compaction drops markers once nothing of their transaction is left; a batch of data there is an error.
        number = bisect_left(contents.last_offsets, aborted.last_offset)
        if number < len(contents.base_offsets) and contents.base_offsets[number] <= aborted.last_offset:
            yield Problem(name, entry.at, f"{who}: offset {aborted.last_offset} is no marker")
    elif marker != (aborted.producer_id, True):
        what = "an abort" if marker[1] else "a commit"
        yield Problem(name, entry.at, f"{who}: the marker at {aborted.last_offset} is {what} of producer {marker[0]}")
    if seen is None:
        return
    first = aborted.first_offset
    if first > seen.first_offset or (seen.is_exact and first != seen.first_offset):
        began = f"its transaction began at {seen.first_offset}"
        yield Problem(name, entry.at, f"{who}: {began}, not at {first}")
    stable = aborted.last_stable_offset
    if stable > seen.last_stable or (seen.is_exact and stable != seen.last_stable):
        yield Problem(name, entry.at, f"{who}: the last stable offset was {seen.last_stable}, not {stable}")


def check_state(segments: list[SegmentContents], state: StoredState, files: Mapping[str, Source]) -> Iterator[Problem]:
    """Compare the state store with the segments: points inside the log, epochs, sealed segments, the recovery mark."""
    for lost in state.lost:
        yield Problem(STATE, None, f"{lost}: cannot be read")
    if state.damage is not None:
        yield Problem(STATE, None, f"the log is damaged from {state.damage[0]} on: {state.damage[1]}")
    if state.suspect is not None:
        yield Problem(STATE, None, f"a sync failed; everything from {state.suspect} on is suspect")
    end = max(
        [0, *(contents.next_offset for contents in segments), *(info.next_offset for info in state.segments.values())]
    )
    points = {
        "start offset": state.start,
        "recovery point": None if state.mark is None else state.mark.offset,
        "offset of the clean stop": state.clean,
        "producer snapshot": max(state.producers, default=None),
    }
    for what, offset in points.items():
        if offset is not None and offset > end and not _is_empty_from(segments, state, offset):
            yield Problem(STATE, None, f"{what} {offset} is past the end of the log, {end}")
    if segments and state.start is not None and state.start < segments[0].base_offset:
        yield Problem(STATE, None, f"start offset {state.start} is before the first segment, {segments[0].name}")
    if state.epochs is not None:
        stored_end = end if state.mark is None else state.mark.offset
        yield from check_epochs(segments, list(state.epochs), state.start or 0, stored_end)
    yield from check_mark(segments, state, files)
    if state.intent is None:  # else recovery will move files first
        yield from check_seals(segments, state)
        if not state.gaps:
            yield from check_continuity(segments)


def _is_empty_from(segments: list[SegmentContents], state: StoredState, offset: int) -> bool:
    """Whether the log is empty and begins at `offset`: then no file shows its end."""
    begins = state.mark is not None and state.mark.base_offset == offset and state.mark.position == 0
    return not segments and not state.segments and begins


def check_epochs(
    segments: Iterable[SegmentContents], history: list[tuple[Epoch, Offset]], start_offset: int, stored_end: int
) -> Iterator[Problem]:
    """Compare the epoch history with the epochs in the batches, from the log start.

    At and past `stored_end` batches may have newer epochs, which were not stored before a crash.
    """
    for (epoch, start), (later_epoch, later_start) in pairwise(history):
        if later_epoch <= epoch or later_start < start:
            yield Problem(STATE, None, f"epoch {later_epoch} from {later_start} after epoch {epoch} from {start}")
    starts = [start for _, start in history]
    for contents in segments:
        for found, offset, position in contents.epochs:
            if offset < start_offset:
                continue  # the history is cut to the log's start
            number = bisect_right(starts, offset) - 1
            recorded = history[number][0] if number >= 0 else None
            is_newer = recorded is None or found > recorded
            if recorded != found and not (is_newer and offset >= stored_end):
                said = "none" if recorded is None else recorded
                yield Problem(
                    contents.name, position, f"leader epoch {found} at {offset}, the epoch history says {said}"
                )


def check_mark(segments: list[SegmentContents], state: StoredState, files: Mapping[str, Source]) -> Iterator[Problem]:
    """The recovery mark is the end of a batch, and the bytes before it are those that were synced."""
    mark = state.mark
    if mark is None:
        return
    contents = next((contents for contents in segments if contents.base_offset == mark.base_offset), None)
    name = f"{mark.base_offset:020d}.log"
    if contents is None:
        if mark.position > 0 and state.intent is None:
            yield Problem(STATE, None, f"the recovery mark is in {name}, which is missing")
        return
    if mark.position > contents.size:
        yield Problem(name, None, f"{contents.size} bytes, but {mark.position} were synced")
        return
    number = bisect_left(contents.positions, mark.position)
    is_boundary = contents.positions[number] == mark.position if number < len(contents.positions) else True
    if contents.is_readable and not is_boundary:
        yield Problem(name, mark.position, "the recovery mark is here, in the middle of a batch")
    if mark.crc is not None and file_crc(files[contents.name], mark.position) != mark.crc:
        yield Problem(name, None, f"the first {mark.position} bytes are not those that were synced")


def check_seals(segments: list[SegmentContents], state: StoredState) -> Iterator[Problem]:
    """Compare each sealed segment with its stored info."""
    present = {contents.base_offset: contents for contents in segments}
    for base, info in sorted(state.segments.items()):
        contents = present.get(Offset(base))
        if contents is None:
            yield Problem(STATE, None, f"sealed segment {base:020d}.log is missing")
            continue
        if contents.size != info.size:
            yield Problem(contents.name, None, f"{contents.size} bytes, it was sealed with {info.size}")
        elif info.crc is not None and contents.crc != info.crc:
            was = f"it was sealed with {info.crc:08x}"
            yield Problem(contents.name, None, f"the checksum of the file is {contents.crc:08x}, {was}")
        if contents.next_offset > info.next_offset:
            yield Problem(contents.name, None, f"ends at {contents.next_offset}, it was sealed at {info.next_offset}")
        largest = max(contents.timestamps, default=-1)
        if contents.is_readable and largest != info.largest_timestamp:
            was = f"it was sealed with {info.largest_timestamp}"
            yield Problem(contents.name, None, f"the largest timestamp is {largest}, {was}")


def check_continuity(segments: list[SegmentContents]) -> Iterator[Problem]:
    """No offset is missing: for a log that was never compacted."""
    expected: int | None = None
    for contents in segments:
        if expected is not None and contents.base_offset > expected:
            yield Problem(
                contents.name, None, f"begins at {contents.base_offset}, the segment before ends at {expected}"
            )
        expected = contents.base_offset
        for position, base, last in zip(contents.positions, contents.base_offsets, contents.last_offsets, strict=True):
            if base > expected:
                yield Problem(contents.name, position, f"offsets {expected} to {base - 1} are missing")
            expected = last + 1


def file_crc(source: Source, size: int | None = None) -> int:
    """CRC-32C of the first `size` bytes, or of all."""
    crc, end = 0, source.size if size is None else size
    for position in range(0, end, READ_BYTES):
        crc = crc32c(source.read(position, min(READ_BYTES, end - position)), crc)
    return crc


def _find(values: "array[int]", value: int) -> int | None:
    """The index of a value in an ascending array."""
    number = bisect_left(values, value)
    return number if number < len(values) and values[number] == value else None
