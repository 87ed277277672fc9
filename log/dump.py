"""Reads the files of a log offline: segments, indexes, transaction indexes. Pure.

This module opens no log, repairs nothing and writes nothing. It reads a file up to the first invalid byte and reports
that as a `Problem`, never as an exception: it is made for damaged files. `verify` compares the files with each other.

    00000000000000000042.log          batches, one after the other
    00000000000000000042.index        8 bytes each:  offset - 42 (int32) | position in the .log (int32)
    00000000000000000042.timeindex   12 bytes each:  largest timestamp so far (int64) | its offset - 42 (int32)
    00000000000000000042.txnindex    34 bytes each:  see log/transactions.py

All big endian; the number in the name is the segment's base offset. This module decodes the entries independently of
the code that writes them, so that it finds errors of that code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Protocol

from tidelog.log.batch import BatchHeader, Record, decode, parse_control, read_header
from tidelog.log.transactions import ENTRY_BYTES as TRANSACTION_ENTRY_BYTES
from tidelog.log.transactions import VERSION as TRANSACTION_VERSION
from tidelog.log.transactions import AbortedTransaction
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset, ProducerId

LENGTH_PREFIX_BYTES = 12
HEADER_BYTES = 61
BATCH_BYTES_MAX = 1 << 30
"""No batch is larger than the largest segment; a length above it is garbage, not a reason to read a gigabyte."""
DECOMPRESSED_BYTES_MAX = 1 << 30
READ_BYTES = 1 << 20

OFFSET_ENTRY = Struct(">ii")
TIME_ENTRY = Struct(">qi")
TRANSACTION_ENTRY = Struct(">hqqqq")

_NAME = re.compile(r"(?P<base>\d{20})(?P<suffix>\.log|\.index|\.timeindex|\.txnindex)")


class Source(Protocol):
    """Bytes to read: a `world.disk.File`, or any file that is only read."""

    @property
    def size(self) -> int: ...

    def read(self, position: int, length: int) -> bytes: ...


class FileKind(Enum):
    """The kind of a log's file; the value is the end of its name."""

    SEGMENT = ".log"
    OFFSET_INDEX = ".index"
    TIME_INDEX = ".timeindex"
    TRANSACTION_INDEX = ".txnindex"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error: the file, the position (None: the file or the log as a whole), and what is wrong."""

    file: str
    position: int | None
    what: str

    def __str__(self) -> str:
        where = self.file if self.position is None else f"{self.file} at {self.position}"
        return f"{where}: {self.what}"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch and its position in a segment; `data` is all of it."""

    position: int
    header: BatchHeader
    data: bytes

    @property
    def marker(self) -> str | None:
        """`COMMIT`, `ABORT` or another kind of control record; None for data.

        `EMPTY` is a control batch of which compaction has left the header, `BROKEN` an invalid one.
        """
        if not self.header.is_control:
            return None
        try:
            marker = parse_control(self.data)
        except TidelogError:
            return "BROKEN"
        return "EMPTY" if marker is None else marker.kind.name

    def records(self) -> list[Record]:
        """Its records, decompressed; raises `TidelogError` if they are invalid."""
        return decode(self.data, decompressed_bytes_max=DECOMPRESSED_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class OffsetEntry:
    """An entry of an offset index; `at` is its own position, `position` where its batch starts in the segment."""

    at: int
    offset: Offset
    position: int


@dataclass(frozen=True, slots=True)
class TimeEntry:
    """An entry of a time index: no batch up to `offset` has a larger timestamp than `timestamp`."""

    at: int
    timestamp: int
    offset: Offset


@dataclass(frozen=True, slots=True)
class TransactionEntry:
    at: int
    aborted: AbortedTransaction


def parse_name(name: str) -> tuple[FileKind, Offset] | None:
    """Kind and base offset of a file from its name; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else (FileKind(match["suffix"]), Offset(int(match["base"])))


def read_batches(source: Source, name: str) -> Iterator[StoredBatch | Problem]:
    """The batches of a segment in order; stops with a `Problem` at the first bytes that are no batch.

    Does not check CRCs (`verify` does), so that a batch with a flipped bit can still be inspected.
    """
    position, size = 0, source.size
    window_start, window = 0, b""

    def peek(length: int) -> bytes:
        nonlocal window_start, window
        if position < window_start or position + length > window_start + len(window):
            window_start, window = position, source.read(position, max(length, READ_BYTES))
        return window[position - window_start : position - window_start + length]

    while position < size:
        prefix = peek(LENGTH_PREFIX_BYTES)
        if len(prefix) < LENGTH_PREFIX_BYTES:
            yield Problem(name, position, f"torn: {size - position} bytes are left, less than a batch's first 12")
            return
        length = LENGTH_PREFIX_BYTES + int.from_bytes(prefix[8:12], "big", signed=True)
        if not HEADER_BYTES <= length <= BATCH_BYTES_MAX:
            yield Problem(name, position, f"no batch here: its length would be {length} bytes")
            return
        if position + length > size:
            yield Problem(name, position, f"torn: the batch has {length} bytes, the file only {size - position} more")
            return
        data = peek(length)
        if len(data) < length:
            yield Problem(name, position, "the file became shorter while it was read")
            return
        try:
            header = read_header(data)
        except TidelogError as error:
            yield Problem(name, position, f"no batch here: {error}")
            return
        yield StoredBatch(position, header, data)
        position += length


def read_offset_index(source: Source, name: str, base_offset: Offset) -> Iterator[OffsetEntry | Problem]:
    """Entries of an offset index, in file order; offsets are absolute."""
    for at, (relative, position) in _entries(source, OFFSET_ENTRY):
        yield OffsetEntry(at, Offset(base_offset + relative), position)
    yield from _remainder(source, name, OFFSET_ENTRY.size)


def read_time_index(source: Source, name: str, base_offset: Offset) -> Iterator[TimeEntry | Problem]:
    """Entries of a time index, in file order; offsets are absolute."""
    for at, (timestamp, relative) in _entries(source, TIME_ENTRY):
        yield TimeEntry(at, timestamp, Offset(base_offset + relative))
    yield from _remainder(source, name, TIME_ENTRY.size)


def read_transaction_index(source: Source, name: str) -> Iterator[TransactionEntry | Problem]:
    """Entries of a transaction index, in file order; an entry of another version is a problem and is left out."""
    assert TRANSACTION_ENTRY.size == TRANSACTION_ENTRY_BYTES, "one layout"
    for at, (version, producer_id, first, last, stable) in _entries(source, TRANSACTION_ENTRY):
        if version != TRANSACTION_VERSION:
            yield Problem(name, at, f"entry of unknown version {version}")
            continue
        yield TransactionEntry(
            at, AbortedTransaction(ProducerId(producer_id), Offset(first), Offset(last), Offset(stable))
        )
    yield from _remainder(source, name, TRANSACTION_ENTRY.size)


def _entries(source: Source, layout: Struct) -> Iterator[tuple[int, tuple[int, ...]]]:
    whole = source.size - source.size % layout.size
    chunk_bytes = READ_BYTES - READ_BYTES % layout.size
    for start in range(0, whole, chunk_bytes):
        data = source.read(start, min(chunk_bytes, whole - start))
        data = data[: len(data) - len(data) % layout.size]
        for number, entry in enumerate(layout.iter_unpack(data)):
            yield start + number * layout.size, entry


def _remainder(source: Source, name: str, entry_bytes: int) -> Iterator[Problem]:
    rest = source.size % entry_bytes
    if rest:
        yield Problem(name, source.size - rest, f"torn: {rest} bytes are no whole entry of {entry_bytes}")
