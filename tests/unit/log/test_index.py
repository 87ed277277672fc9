"""The sparse indexes: entries, searches, and files with wrong bytes."""

import asyncio
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.log import index
from tidelog.log.file_pool import run_async
from tidelog.log.index import IndexBuilder, OffsetEntry, ReadPlan, TimeEntry
from tidelog.model.ids import Offset, Position, TimestampMs
from tidelog.world.disk import File
from tidelog.world.real.disk import RealDisk


def offset_entries(count: int) -> list[OffsetEntry]:
    return [OffsetEntry(Offset(100 + 3 * at), Position(1000 * at)) for at in range(1, count + 1)]


def encoded(entries: list[OffsetEntry]) -> bytes:
    return b"".join(index.encode_offset_entry(entry, base_offset=100) for entry in entries)


@pytest.mark.requirement("a:A-71")
def test_an_offset_entry_is_a_relative_offset_and_a_position_of_four_bytes_each() -> None:
    entry = OffsetEntry(Offset(1_000_007), Position(4096))
    assert index.encode_offset_entry(entry, base_offset=1_000_000) == pack(">ii", 7, 4096)
    assert index.decode_offset_entries(pack(">ii", 7, 4096), base_offset=1_000_000) == [entry]


@pytest.mark.requirement("a:A-72")
def test_a_time_entry_is_a_timestamp_of_eight_bytes_and_a_relative_offset() -> None:
    entry = TimeEntry(TimestampMs(1_700_000_000_000), Offset(1_000_007))
    assert index.encode_time_entry(entry, base_offset=1_000_000) == pack(">qi", 1_700_000_000_000, 7)
    assert index.decode_time_entries(pack(">qi", 1_700_000_000_000, 7), base_offset=1_000_000) == [entry]


def test_a_torn_last_entry_is_left_out() -> None:
    data = encoded(offset_entries(3))
    assert len(index.decode_offset_entries(data[:-1], base_offset=100)) == 2
    assert index.offset_floor(data[:-1], 10_000, base_offset=100) == offset_entries(2)[-1]


@given(count=st.integers(0, 40), offset=st.integers(90, 300))
def test_the_floor_is_the_last_batch_that_ends_at_or_below_the_offset(count: int, offset: int) -> None:
    entries = offset_entries(count)
    expected = [entry for entry in entries if entry.last_offset <= offset]
    assert index.offset_floor(encoded(entries), offset, base_offset=100) == (expected[-1] if expected else None)


@given(count=st.integers(0, 40), position=st.integers(0, 50_000))
def test_the_floor_by_position_is_the_last_batch_that_begins_at_or_below_it(count: int, position: int) -> None:
    entries = offset_entries(count)
    expected = [entry for entry in entries if entry.position <= position]
    assert index.position_floor(encoded(entries), position, base_offset=100) == (expected[-1] if expected else None)


@given(count=st.integers(0, 40), timestamp=st.integers(0, 500))
def test_the_time_floor_is_strictly_below_the_timestamp(count: int, timestamp: int) -> None:
    entries = [TimeEntry(TimestampMs(10 * at), Offset(100 + at)) for at in range(1, count + 1)]
    data = b"".join(index.encode_time_entry(entry, base_offset=100) for entry in entries)
    expected = [entry for entry in entries if entry.timestamp < timestamp]
    assert index.time_floor(data, timestamp, base_offset=100) == (expected[-1] if expected else None)


def read(plan: ReadPlan[bytes]) -> bytes:
    return asyncio.run(run_async(plan))


def file_of(disk: RealDisk, data: bytes) -> File:
    file = disk.open("index", create=True)
    file.append(data)
    return file


@pytest.mark.parametrize("count", [0, 1, 767, 768, 769, 5000])
def test_searches_in_a_file_and_in_memory_agree(tmp_path: str, count: int) -> None:
    entries = offset_entries(count)
    data = encoded(entries)
    file = file_of(RealDisk(tmp_path), data)
    for offset in [90, 100, 103, 104, 100 + 3 * count // 2, 100 + 3 * count, 10**6]:
        block = read(index.offset_block(file, file.size, offset, base_offset=100))
        assert len(block) <= 8192
        assert index.offset_floor(block, offset, base_offset=100) == index.offset_floor(data, offset, base_offset=100)
        position = read(index.position_block(file, file.size, 1000 * offset))
        assert index.position_floor(position, 1000 * offset, base_offset=100) == index.position_floor(
            data, 1000 * offset, base_offset=100
        )


@pytest.mark.parametrize("count", [0, 3, 2000])
def test_searches_by_time_in_a_file_and_in_memory_agree(tmp_path: str, count: int) -> None:
    entries = [TimeEntry(TimestampMs(10 * at), Offset(100 + at)) for at in range(1, count + 1)]
    data = b"".join(index.encode_time_entry(entry, base_offset=100) for entry in entries)
    file = file_of(RealDisk(tmp_path), data)
    for timestamp in [0, 10, 11, 5 * count, 10 * count, 10**9]:
        block = read(index.time_block(file, file.size, timestamp))
        assert index.time_floor(block, timestamp, base_offset=100) == index.time_floor(data, timestamp, base_offset=100)


@given(data=st.binary(max_size=20_000), offset=st.integers(0, 2**40))
def test_any_bytes_can_be_searched(data: bytes, offset: int) -> None:
    found = index.offset_floor(data, offset, base_offset=0)
    assert found is None or found.last_offset <= 2**31
    by_time = index.time_floor(data, offset, base_offset=0)
    assert by_time is None or by_time.last_offset <= 2**31


def test_an_index_shorter_than_its_size_can_be_searched(tmp_path: str) -> None:
    file = file_of(RealDisk(tmp_path), encoded(offset_entries(10)))
    block = read(index.offset_block(file, 8 * 5000, 10**6, base_offset=100))
    assert index.offset_floor(block, 10**6, base_offset=100) in [None, *offset_entries(10)]


class TestIndexBuilder:
    def test_a_batch_is_indexed_when_more_than_the_interval_lies_before_it(self) -> None:
        builder = IndexBuilder(0, 100)
        for at in range(6):
            builder.add(last_offset=at, position=60 * at, size=60, max_timestamp=at)
        entries = index.decode_offset_entries(builder.offsets or b"", base_offset=0)
        assert entries == [OffsetEntry(Offset(2), Position(120)), OffsetEntry(Offset(4), Position(240))]

    def test_the_first_batch_needs_no_entry(self) -> None:
        builder = IndexBuilder(0, 0)
        builder.add(last_offset=9, position=0, size=500, max_timestamp=5)
        assert builder.offsets is None

    def test_a_time_entry_tells_the_largest_timestamp_so_far_and_its_batch(self) -> None:
        builder = IndexBuilder(10, 0)
        for last_offset, timestamp in [(10, 50), (11, 90), (12, 70), (13, 80), (14, 95)]:
            builder.add(last_offset, 100 * (last_offset - 10), 100, timestamp)
        entries = index.decode_time_entries(builder.times or b"", base_offset=10)
        assert entries == [TimeEntry(TimestampMs(90), Offset(11)), TimeEntry(TimestampMs(95), Offset(14))]

    def test_sealing_indexes_the_largest_timestamp_once(self) -> None:
        builder = IndexBuilder(0, 10_000)
        builder.add(last_offset=3, position=0, size=100, max_timestamp=70)
        builder.add_time()
        builder.add_time()
        assert index.decode_time_entries(builder.times or b"", base_offset=0) == [TimeEntry(TimestampMs(70), Offset(3))]

    def test_batches_without_timestamps_leave_the_time_index_empty(self) -> None:
        builder = IndexBuilder(0, 0)
        for at in range(3):
            builder.add(last_offset=at, position=100 * at, size=100, max_timestamp=-1)
        builder.add_time()
        assert builder.times is None
