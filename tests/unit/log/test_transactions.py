"""The transaction index: Kafka's bytes, look-ups, truncation, and bytes that are no index."""

import struct
from dataclasses import replace
from random import Random
from typing import cast

import pytest

from tidelog.log.read_plans import AbortedEntries
from tidelog.log.segment import SegmentInfo
from tidelog.log.transactions import ENTRY_BYTES, AbortedTransaction, TransactionIndex, encode_entry
from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Offset, ProducerId
from tidelog.world.disk import File


def aborted(producer: int, first: int, last: int, stable: int) -> AbortedTransaction:
    return AbortedTransaction(ProducerId(producer), Offset(first), Offset(last), Offset(stable))


ENTRIES = [aborted(1, 0, 10, 5), aborted(2, 5, 12, 13), aborted(1, 13, 20, 18), aborted(3, 18, 25, 26)]


def index() -> TransactionIndex:
    built = TransactionIndex()
    for entry in ENTRIES:
        built.append(entry)
    return built


def test_an_entry_has_kafkas_34_bytes() -> None:
    assert ENTRY_BYTES == 34
    assert encode_entry(aborted(7, 100, 200, 150)) == bytes.fromhex(
        "00000000000000000007000000000000006400000000000000c80000000000000096"
    )


def test_parse_returns_the_written_entries() -> None:
    built = TransactionIndex()
    data = b"".join(built.append(entry) for entry in ENTRIES)
    assert data == built.to_bytes()
    read = TransactionIndex.parse(data)
    assert list(read) == ENTRIES
    assert (len(read), read.size) == (4, 4 * 34)


@pytest.mark.parametrize(
    ("start", "end", "found", "is_complete"),
    [
        (0, 1, ENTRIES[:1], True),
        (0, 5, ENTRIES[:1], True),
        (0, 6, ENTRIES[:2], True),
        (10, 13, ENTRIES[:2], True),
        (11, 13, ENTRIES[1:2], True),
        (11, 14, ENTRIES[1:3], True),
        (13, 18, ENTRIES[2:3], True),
        (21, 26, ENTRIES[3:], True),
        (21, 27, ENTRIES[3:], False),
        (26, 30, [], False),
    ],
)
def test_a_look_up_finds_overlapping_transactions_and_knows_when_to_stop(
    start: int, end: int, found: list[AbortedTransaction], is_complete: bool
) -> None:
    assert index().overlapping(Offset(start), Offset(end)) == (found, is_complete)


def test_truncation_drops_transactions_whose_marker_is_truncated() -> None:
    for offset, left in ((26, 4), (25, 3), (21, 3), (20, 2), (11, 1), (0, 0)):
        built = index()
        built.truncate(Offset(offset))
        assert list(built) == ENTRIES[:left]


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 33,
        struct.pack(">hqqqq", 1, 1, 0, 10, 5),
        struct.pack(">hqqqq", 0, -1, 0, 10, 5),
        struct.pack(">hqqqq", 0, 1, 11, 10, 5),
        struct.pack(">hqqqq", 0, 1, -1, 10, 5),
        struct.pack(">hqqqq", 0, 1, 0, 10, -5),
        encode_entry(ENTRIES[1]) + encode_entry(ENTRIES[0]),
        encode_entry(ENTRIES[0]) * 2,
    ],
)
def test_bytes_that_are_no_index_are_rejected(data: bytes) -> None:
    with pytest.raises(CorruptStateError):
        TransactionIndex.parse(data, path="log/0.txnindex")


# Reading it


class IndexFile:
    """Counts the bytes that are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        self.bytes_read = 0

    def read(self, position: int, length: int) -> bytes:
        self.bytes_read += length
        return self.data[position : position + length]


def look_up(file: IndexFile, waiting: bytes, start: int, end: int) -> tuple[list[AbortedTransaction], bool]:
    count = (file.size + len(waiting)) // ENTRY_BYTES
    info = SegmentInfo(Offset(0), Offset(10 * count + 10), 0, -1, -1, -1, 0, None, aborted=count)
    found: list[AbortedTransaction] = []
    steps = AbortedEntries(info, cast(File, file) if file.size else None, waiting).overlapping(start, end, found)
    try:
        asked = next(steps)
        while True:
            asked = steps.send(file.read(*asked[1:]))
    except StopIteration as done:
        return found, done.value


@pytest.mark.parametrize("waiting", [0, 1, 100, 1_000])
def test_a_look_up_finds_in_the_file_and_behind_it_what_the_whole_index_has(waiting: int) -> None:
    random = Random(waiting)
    index = TransactionIndex()
    open_since = 0
    for number in range(1_000):
        last = 10 * number + 9
        first = max(0, last - random.choice((5, 5, 5, 2_000)))
        open_since = max(open_since, last - random.choice((0, 0, 3_000)))
        index.append(AbortedTransaction(ProducerId(number), Offset(first), Offset(last), Offset(open_since)))
    data = index.to_bytes()
    file = IndexFile(data[: len(data) - waiting * ENTRY_BYTES])
    for _ in range(200):
        start = random.randrange(10_100)
        end = start + random.choice((1, 50, 3_000))
        expected = index.overlapping(Offset(start), Offset(end))
        assert look_up(file, data[file.size :], start, end) == expected


def test_a_look_up_in_an_index_of_100_000_entries_reads_a_few() -> None:
    entry = AbortedTransaction(ProducerId(7), Offset(0), Offset(0), Offset(0))
    data = b"".join(
        encode_entry(replace(entry, first_offset=at, last_offset=Offset(at + 1), last_stable_offset=Offset(at + 2)))
        for at in map(Offset, range(0, 1_000_000, 10))
    )
    file = IndexFile(data)
    found, is_done = look_up(file, b"", 500_000, 500_025)
    assert [row.first_offset for row in found] == [500_000, 500_010, 500_020]
    assert is_done
    assert file.bytes_read < 10_000
