"""Writes the index entries of the active segment to its index files."""

from tidelog.log.durability import Durability
from tidelog.log.segment import INDEX, TIME_INDEX
from tidelog.log.segments import Segments


def write_index_entries(path: str, segments: Segments, durability: Durability) -> None:
    """Append the waiting entries of the active segment to its files. `path` is the log's directory."""
    active = segments.active
    for suffix, size, entries in active.waiting_entries():
        file = durability.writable(segments.file_path(active.base_offset, suffix), create=True)
        if size == 0:
            durability.touch_directory(path)
            if file.size:
                file.truncate(0)
        file.append(entries)
        active.entries_written(suffix)


def create_index_files(path: str, segments: Segments, durability: Durability) -> None:
    """A sealed segment has its index files, even without entries: a missing file is a lost one."""
    active = segments.active
    for suffix, size in ((INDEX, active.index_bytes), (TIME_INDEX, active.time_bytes)):
        if size == 0:
            durability.writable(segments.file_path(active.base_offset, suffix), create=True)
            durability.touch_directory(path)
