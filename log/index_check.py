"""Checks the index files of a sealed segment against its batches.

Indexes have no checksum. A read notices most wrong entries when it uses them; this notices all of them. Each entry must
name a batch of the segment, in order. The interval of the entries is not checked: it is a setting.

The transaction index must have what a replay of the batches gives. It may have more, if the log has lost records since
it was written: entries of transactions without any batch, and first offsets of batches that are gone. Compaction and
retention leave both.
"""

from contextlib import closing

from tidelog.log.index import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, decode_offset_entries, decode_time_entries
from tidelog.log.index_rebuilder import IndexRebuilder
from tidelog.log.log_scan import build_indexes, walk_headers
from tidelog.log.log_state import LogState
from tidelog.log.segment import INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, SegmentInfo, file_path
from tidelog.log.transactions import AbortedTransaction, TransactionIndex
from tidelog.model.errors import CorruptStateError
from tidelog.world.disk import Disk


class IndexCheck:
    """Checks indexes of an open log. Owns no state."""

    __slots__ = ("_rebuilder", "_state")

    def __init__(self, state: LogState, rebuilder: IndexRebuilder) -> None:
        self._state = state
        self._rebuilder = rebuilder

    async def check(self, info: SegmentInfo) -> str | None:
        """Return why an index file of this sealed segment, whose batches are sound, is wrong; None if all are right, or
        if the segment has changed meanwhile."""
        context, segments = self._state.context, self._state.segments
        version, interval = segments.version, context.config.index_interval_bytes
        fault = await context.work.run(index_fault, context.disk, context.path, info, interval)
        if fault is None and info.aborted:
            expected = await self._rebuilder.aborted_of(info)
            # Of transactions that began below it, batches may be gone.
            whole_from = info.next_offset if self._state.lineage.has_gaps else segments.first_offset
            fault = await context.work.run(aborted_fault, context.disk, context.path, info, expected, whole_from)
        if context.is_closed or segments.version != version or info not in segments.sealed:
            return None
        return fault


def index_fault(disk: Disk, directory: str, info: SegmentInfo, interval_bytes: int) -> str | None:
    """Why the offset or time index of a sealed segment is wrong. Runs in a helper process."""
    base = info.base_offset
    files = {suffix: _read(disk, file_path(directory, base, suffix)) for suffix in (INDEX, TIME_INDEX)}
    missing = [suffix for suffix, data in files.items() if data is None]
    if missing:
        return f"{missing[0]} is missing"
    offsets, times = files[INDEX] or b"", files[TIME_INDEX] or b""
    built = build_indexes(disk, directory, base, info.size, interval_bytes, is_sealed=True)
    if offsets == bytes(built.offsets or b"") and times == bytes(built.times or b""):
        return None
    if len(offsets) % OFFSET_ENTRY_BYTES or len(times) % TIME_ENTRY_BYTES:
        return "an index does not end with a whole entry"
    if bool(times) != bool(built.times) or (len(built.offsets or b"") and not offsets):
        return "an index has no entries"
    return _wrong_entry(disk, directory, info, offsets, times)


def _wrong_entry(disk: Disk, directory: str, info: SegmentInfo, offsets: bytes, times: bytes) -> str | None:
    base = info.base_offset
    entries = iter(decode_offset_entries(offsets, base_offset=base))
    time_entries = iter(decode_time_entries(times, base_offset=base))
    entry, time = next(entries, None), next(time_entries, None)
    largest = -1
    with closing(disk.open(file_path(directory, base, LOG))) as file:
        for position, header in walk_headers(file, info.size):
            if entry is not None and entry.position == position:
                if entry.last_offset != header.last_offset:
                    break
                entry = next(entries, None)
            is_largest = header.max_timestamp > largest
            largest = max(largest, header.max_timestamp)
            if time is not None and time.last_offset == header.last_offset:
                if time.timestamp != header.max_timestamp or not is_largest:
                    break
                time = next(time_entries, None)
    if entry is not None:
        return f"{INDEX} says {entry}, the log does not"
    return None if time is None else f"{TIME_INDEX} says {time}, the log does not"


def aborted_fault(disk: Disk, directory: str, info: SegmentInfo, expected: bytes, whole_from: int) -> str | None:
    """Why the transaction index of a sealed segment is wrong. `expected` is the one of a replay; transactions that
    began at `whole_from` or later are complete in the log. Runs in a helper process."""
    name = file_path(directory, info.base_offset, TRANSACTION_INDEX)
    data = _read(disk, name)
    if data is None or data == expected:
        return f"{TRANSACTION_INDEX} is missing" if data is None else None
    try:
        index = TransactionIndex.parse(data, path=name)
    except CorruptStateError as error:
        return str(error)
    if len(index) != info.aborted:
        return f"{TRANSACTION_INDEX} has {len(index)} entries, {info.aborted} were written"
    replayed = {entry.last_offset: entry for entry in TransactionIndex.parse(expected)}
    for entry in index:
        if not _is_entry_of(entry, replayed.pop(entry.last_offset, None), info, whole_from):
            return f"{TRANSACTION_INDEX} says {entry}, the log does not"
    return f"{TRANSACTION_INDEX} does not have {next(iter(replayed.values()))}" if replayed else None


def _is_entry_of(
    entry: AbortedTransaction, replayed: AbortedTransaction | None, info: SegmentInfo, whole_from: int
) -> bool:
    """Whether a replay of what is left of the transaction may give this."""
    if replayed is None:
        return entry.first_offset < whole_from and info.base_offset <= entry.last_offset < info.next_offset
    if entry.producer_id != replayed.producer_id or entry.last_stable_offset > replayed.last_stable_offset:
        return False
    return entry.first_offset == replayed.first_offset or entry.first_offset < min(replayed.first_offset, whole_from)


def _read(disk: Disk, path: str) -> bytes | None:
    if not disk.exists(path):
        return None
    with closing(disk.open(path)) as file:
        return file.read(0, file.size)
