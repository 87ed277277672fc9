"""Checks the index files of a sealed segment against its batches.

Indexes have no checksum. A read notices most wrong entries when it uses them; this notices all of them. Each entry must
name a batch of the segment, in order. The interval of the entries is not checked: it is a setting. The transaction
index must be what a replay of the batches gives.
"""

from contextlib import closing

from tidelog.log.index import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, decode_offset_entries, decode_time_entries
from tidelog.log.index_rebuilder import IndexRebuilder
from tidelog.log.log_scan import build_indexes, walk_headers
from tidelog.log.log_state import LogState
from tidelog.log.segment import INDEX, LOG, TIME_INDEX, TRANSACTION_INDEX, SegmentInfo, file_path
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
            fault = await context.work.run(aborted_fault, context.disk, context.path, info.base_offset, expected)
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


def aborted_fault(disk: Disk, directory: str, base: int, expected: bytes) -> str | None:
    """Why the transaction index of a sealed segment is wrong. Runs in a helper process."""
    data = _read(disk, file_path(directory, base, TRANSACTION_INDEX))
    return None if data == expected else f"{TRANSACTION_INDEX} does not have the aborted transactions of the log"


def _read(disk: Disk, path: str) -> bytes | None:
    if not disk.exists(path):
        return None
    with closing(disk.open(path)) as file:
        return file.read(0, file.size)
