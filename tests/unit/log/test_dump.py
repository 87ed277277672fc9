"""Reads and verifies the files of a log: sound files pass, and every wrong bit of every file is detected."""

from dataclasses import replace
from struct import pack

import pytest
from crc32c import crc32c

from tidelog.log.batch import Codec, ControlKind, Record, encode, encode_control
from tidelog.log.dump import (
    FileKind,
    OffsetEntry,
    Problem,
    StoredBatch,
    TimeEntry,
    parse_name,
    read_batches,
    read_offset_index,
    read_time_index,
    read_transaction_index,
)
from tidelog.log.epochs import EpochHistory
from tidelog.log.producers import ProducerState
from tidelog.log.segment import RecoveryMark, SegmentInfo
from tidelog.log.stored_state import StoredState
from tidelog.log.transactions import AbortedTransaction, encode_entry
from tidelog.log.verify import LogVerifier
from tidelog.model.ids import Offset, Position, ProducerId


class Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, position: int, length: int) -> bytes:
        return self.data[position : position + length]


def records(first: int, count: int, *, time_ms: int) -> list[Record]:
    return [
        Record(
            offset=Offset(first + number),
            timestamp=time_ms + number,
            key=b"k%d" % (number % 3),
            value=b"value %d" % (first + number),
            headers=(("origin", b"test"),),
        )
        for number in range(count)
    ]


def batch(
    first: int,
    count: int,
    *,
    epoch: int = 0,
    producer: int = -1,
    sequence: int = -1,
    codec: Codec = Codec.NONE,
    time_ms: int = 0,
    transactional: bool = False,
) -> bytes:
    return encode(
        records(first, count, time_ms=time_ms),
        base_offset=first,
        leader_epoch=epoch,
        producer_id=producer,
        producer_epoch=0 if producer >= 0 else -1,
        base_sequence=sequence,
        codec=codec,
        is_transactional=transactional,
    )


def marker(offset: int, producer: int, kind: ControlKind, *, epoch: int) -> bytes:
    return encode_control(
        kind,
        coordinator_epoch=0,
        timestamp=900,
        producer_id=producer,
        producer_epoch=0,
        base_offset=offset,
        leader_epoch=epoch,
    )


def sealed_info(base: int, end: int, data: bytes, *, largest: tuple[int, int]) -> SegmentInfo:
    return SegmentInfo(
        base_offset=Offset(base),
        next_offset=Offset(end),
        size=len(data),
        largest_timestamp=largest[0],
        largest_offset=largest[1],
        first_timestamp=0,
        modified_ms=0,
        crc=crc32c(data),
    )


def sound_log() -> tuple[dict[str, bytes], StoredState]:
    """Two segments with all their indexes: a plain one, and one with an aborted and a committed transaction."""
    first = [batch(0, 5, time_ms=100), batch(5, 5, codec=Codec.GZIP, time_ms=300), batch(10, 5, epoch=2, time_ms=200)]
    second = [
        batch(15, 5, epoch=2, producer=7, sequence=0, transactional=True, time_ms=400),
        batch(20, 5, epoch=2, producer=8, sequence=0, transactional=True, time_ms=500),
        marker(25, 7, ControlKind.ABORT, epoch=2),
        batch(26, 4, epoch=3, producer=8, sequence=5, transactional=True, time_ms=600),
        marker(30, 8, ControlKind.COMMIT, epoch=3),
    ]
    at = [0, len(first[0]), len(first[0]) + len(first[1])]
    starts = [sum(map(len, second[:number])) for number in range(len(second))]
    files = {
        "00000000000000000000.log": b"".join(first),
        "00000000000000000000.index": pack(">iiii", 9, at[1], 14, at[2]),
        "00000000000000000000.timeindex": pack(">qi", 304, 9),
        "00000000000000000015.log": b"".join(second),
        "00000000000000000015.index": pack(">iiii", 9, starts[1], 14, starts[3]),
        "00000000000000000015.timeindex": pack(">qiqi", 504, 9, 900, 10),
        "00000000000000000015.txnindex": encode_entry(
            AbortedTransaction(ProducerId(7), Offset(15), Offset(25), Offset(20))
        ),
    }
    producers = ProducerState()
    for data in second:
        (found,) = read_batches(Bytes(data), "x")
        assert isinstance(found, StoredBatch)
        if not found.header.is_control:
            producers.apply(found.header, now_ms=0)
    state = StoredState(
        mark=RecoveryMark(
            offset=Offset(26),
            base_offset=Offset(15),
            position=Position(starts[3]),
            crc=crc32c(b"".join(second[:3])),
            created_ms=0,
            modified_ms=0,
            first_timestamp=404,
            largest_timestamp=900,
            largest_offset=25,
            indexed_timestamp=900,
            index_bytes=16,
            time_bytes=24,
            aborted_bytes=34,
            has_producers=False,
        ),
        start=0,
        epochs=EpochHistory([(0, 0), (2, 10), (3, 26)]),
        segments={0: sealed_info(0, 15, files["00000000000000000000.log"], largest=(304, 9))},
        producers={30: producers.to_snapshot()},
    )
    return files, state


def problems(files: dict[str, bytes], state: StoredState | None = None) -> list[Problem]:
    verifier = LogVerifier({name: Bytes(data) for name, data in files.items()}, state)
    verifier.run()
    return verifier.problems


def change(files: dict[str, bytes], name: str, at: int, data: bytes) -> dict[str, bytes]:
    old = files[name]
    return {**files, name: old[:at] + data + old[at + len(data) :]}


LOG_0, LOG_15 = "00000000000000000000.log", "00000000000000000015.log"
INDEX_0, TIME_0 = "00000000000000000000.index", "00000000000000000000.timeindex"
TXN_15 = "00000000000000000015.txnindex"


@pytest.mark.requirement("b:B-25", "a:N-12")
def test_a_file_is_known_by_its_name() -> None:
    assert parse_name("00000000000000000042.log") == (FileKind.SEGMENT, 42)
    assert parse_name("00000000000000000042.timeindex") == (FileKind.TIME_INDEX, 42)
    for other in ("42.log", "00000000000000000042.log.deleted", "00000000000000000042.txt", "data.mdb"):
        assert parse_name(other) is None


@pytest.mark.requirement("a:N-12")
def test_a_segment_gives_its_batches_and_their_records() -> None:
    files, _ = sound_log()
    found = list(read_batches(Bytes(files[LOG_0]), LOG_0))
    assert [(item.header.base_offset, item.header.last_offset) for item in found if isinstance(item, StoredBatch)] == [
        (0, 4),
        (5, 9),
        (10, 14),
    ]
    assert isinstance(found[1], StoredBatch)
    assert found[1].records() == records(5, 5, time_ms=300)
    assert found[1].marker is None


def test_control_batches_show_their_marker() -> None:
    files, _ = sound_log()
    found = [item for item in read_batches(Bytes(files[LOG_15]), LOG_15) if isinstance(item, StoredBatch)]
    assert [item.marker for item in found] == [None, None, "ABORT", None, "COMMIT"]


def test_indexes_give_absolute_offsets() -> None:
    files, _ = sound_log()
    position = len(batch(0, 5, time_ms=100))
    entries = list(read_offset_index(Bytes(files[INDEX_0]), INDEX_0, Offset(0)))
    assert entries[0] == OffsetEntry(0, Offset(9), position)
    times = list(read_time_index(Bytes(files["00000000000000000015.timeindex"]), "x", Offset(15)))
    assert times == [TimeEntry(0, 504, Offset(24)), TimeEntry(12, 900, Offset(25))]


def test_sound_files_have_no_problem_with_and_without_the_state_store() -> None:
    files, state = sound_log()
    assert problems(files) == []
    assert problems(files, state) == []


def test_every_flipped_bit_of_every_file_is_detected() -> None:
    files, state = sound_log()
    last = [item.position for item in read_batches(Bytes(files[LOG_15]), LOG_15) if isinstance(item, StoredBatch)][-1]
    for name, data in files.items():
        for at in range(len(data)):
            if name == LOG_15 and last + 12 <= at < last + 16:
                continue  # past the recovery mark the last batch's epoch may be one that was not stored yet
            for bit in (0, 3, 7):
                broken = change(files, name, at, bytes([data[at] ^ (1 << bit)]))
                assert problems(broken, state), f"bit {bit} of byte {at} of {name}"


def test_without_the_state_store_every_flipped_bit_under_a_crc_is_detected() -> None:
    files, _ = sound_log()
    data = files[LOG_0]
    outside = {place + start for start in (0, len(batch(0, 5, time_ms=100))) for place in (*range(8), *range(12, 16))}
    for at in set(range(len(batch(0, 5, time_ms=100)) * 2)) - outside:
        assert problems(change(files, LOG_0, at, bytes([data[at] ^ 4]))), f"byte {at}"


@pytest.mark.parametrize("name", [LOG_0, LOG_15, INDEX_0, TIME_0, TXN_15])
def test_a_torn_file_is_detected_at_every_length(name: str) -> None:
    files, state = sound_log()
    whole = files[name]
    mark = state.mark
    assert mark is not None
    batches = read_batches(Bytes(files[LOG_15]), LOG_15)
    unsynced = {item.position for item in batches if isinstance(item, StoredBatch) and item.position >= mark.position}
    for length in range(len(whole)):
        found = problems({**files, name: whole[:length]}, state)
        if name == LOG_15 and length in unsynced:
            continue  # whole batches past the recovery mark may be missing after a crash: undetectable
        if name.endswith(".log"):
            assert found, f"{name} cut to {length}"
        elif length % {INDEX_0: 8, TIME_0: 12, TXN_15: 34}[name]:
            assert [problem.file for problem in found] in ([name], [name, name]), f"{name} cut to {length}"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x00" * 5, "torn: 5 bytes are left"),
        (b"\x00" * 61, "no batch here: its length would be 12 bytes"),
        (b"\x00" * 8 + b"\xff\xff\xff\xff" + b"\x00" * 61, "no batch here: its length would be 11 bytes"),
        (b"\x00" * 8 + b"\x7f\xff\xff\xff" + b"\x00" * 61, "no batch here: its length would be 2147483659 bytes"),
        (
            b"\x00" * 8 + (1000).to_bytes(4, "big") + b"\x00" * 61,
            "torn: the batch has 1012 bytes, the file only 73 more",
        ),
        (b"\x00" * 8 + (49).to_bytes(4, "big") + b"\x00" * 49, "no batch here: "),
    ],
)
def test_bytes_that_are_no_batch_end_the_reading_with_a_problem(data: bytes, what: str) -> None:
    good = batch(0, 3)
    found = list(read_batches(Bytes(good + data), LOG_0))
    assert isinstance(found[0], StoredBatch)
    assert len(found) == 2
    problem = found[1]
    assert isinstance(problem, Problem)
    assert problem.position == len(good)
    assert problem.what.startswith(what)


def test_a_transaction_entry_of_another_version_is_a_problem() -> None:
    data = pack(">hqqqq", 1, 7, 0, 5, 6)
    assert list(read_transaction_index(Bytes(data), TXN_15)) == [Problem(TXN_15, 0, "entry of unknown version 1")]


def test_problems_read_as_one_line() -> None:
    assert str(Problem("a.log", 12, "torn")) == "a.log at 12: torn"
    assert str(Problem("a.log", None, "gone")) == "a.log: gone"


def expect(found: list[Problem], file: str, what: str) -> None:
    assert any(problem.file == file and what in problem.what for problem in found), [str(problem) for problem in found]


def test_an_index_entry_into_the_middle_of_a_batch_is_a_problem() -> None:
    files, _ = sound_log()
    expect(problems(change(files, INDEX_0, 4, pack(">i", 3))), INDEX_0, "no batch starts at position 3")


def test_an_index_without_a_segment_is_a_problem() -> None:
    files, _ = sound_log()
    del files[LOG_0]
    expect(problems(files), INDEX_0, "an index without its segment")


def test_overlapping_segments_are_a_problem() -> None:
    files, _ = sound_log()
    files["00000000000000000012.log"] = batch(12, 3, epoch=2)
    expect(problems(files), "00000000000000000012.log", "begins below 15")


def test_a_descending_epoch_is_a_problem() -> None:
    files, _ = sound_log()
    files["00000000000000000031.log"] = batch(31, 1, epoch=1)
    expect(problems(files), "00000000000000000031.log", "leader epoch 1 after epoch 3")


def test_a_missing_entry_for_an_aborted_transaction_is_a_problem() -> None:
    files, state = sound_log()
    expect(problems({**files, TXN_15: b""}, state), TXN_15, "no entry for producer 7, aborted from 15 to 25")
    del files[TXN_15]
    expect(problems(files, state), LOG_15, "1 aborted transactions, but no")
    assert problems(files) == [], "the newest segment's index is completed by recovery"


def test_a_missing_offset_is_a_problem_only_in_a_log_that_was_never_compacted() -> None:
    files, state = sound_log()
    files["00000000000000000040.log"] = batch(40, 1, epoch=3)
    assert problems(files) == []
    assert problems(files, replace(state, gaps=True)) == []
    expect(problems(files, state), "00000000000000000040.log", "begins at 40, the segment before ends at 31")


def test_verify_compares_the_state_store_with_the_log() -> None:
    files, state = sound_log()
    mark = state.mark
    assert mark is not None
    info = state.segments[0]
    cases = {
        "start offset 99 is past the end of the log, 31": replace(state, start=99),
        "offset of the clean stop 99 is past": replace(state, clean=99),
        "epochs: cannot be read": replace(state, lost=["epochs"]),
        "the log is damaged from 12 on: rot": replace(state, damage=(12, "rot", None)),
        "everything from 12 on is suspect": replace(state, suspect=12),
        "sealed segment 00000000000000000007.log is missing": replace(
            state, segments={7: replace(info, base_offset=Offset(7))}
        ),
        "recovery point 99 is past the end": replace(state, mark=replace(mark, offset=Offset(99))),
        "which is missing": replace(state, mark=replace(mark, base_offset=Offset(20))),
        "producer snapshot at 30: ": replace(state, producers={30: b"nonsense"}),
    }
    for what, changed in cases.items():
        expect(problems(files, changed), "state store", what)
    in_files = {
        (LOG_15, "the recovery mark is here, in the middle"): replace(state, mark=replace(mark, position=Position(5))),
        (LOG_15, "are not those that were synced"): replace(state, mark=replace(mark, crc=1)),
        (LOG_15, "were synced"): replace(state, mark=replace(mark, position=Position(1 << 20))),
        (LOG_0, "it was sealed with 00000001"): replace(state, segments={0: replace(info, crc=1)}),
        (LOG_0, "bytes, it was sealed with 1"): replace(state, segments={0: replace(info, size=1)}),
        (LOG_0, "the largest timestamp is 304, it was sealed with 9"): replace(
            state, segments={0: replace(info, largest_timestamp=9)}
        ),
        (LOG_0, "the epoch history says 0"): replace(state, epochs=EpochHistory([(0, 0), (3, 26)])),
    }
    for (file, what), changed in in_files.items():
        expect(problems(files, changed), file, what)


def test_a_snapshot_with_another_batch_is_a_problem() -> None:
    files, state = sound_log()
    other_state = ProducerState()
    (found,) = read_batches(Bytes(batch(20, 5, producer=99, sequence=0)), "x")
    assert isinstance(found, StoredBatch)
    other_state.apply(found.header, now_ms=0)
    expect(
        problems(files, replace(state, producers={30: other_state.to_snapshot()})),
        LOG_15,
        "the producer snapshot remembers (99, 4)",
    )


def test_an_empty_log_that_begins_at_some_offset_is_sound() -> None:
    _, state = sound_log()
    assert state.mark is not None
    empty = replace(state.mark, offset=Offset(70), base_offset=Offset(70), position=Position(0), crc=0)
    assert problems({}, StoredState(mark=empty, start=70, clean=70)) == []


def test_records_that_contradict_their_batch_are_a_problem() -> None:
    lying = encode(records(0, 3, time_ms=50), base_offset=0, leader_epoch=0, max_timestamp=51)
    expect(problems({LOG_0: lying}), LOG_0, "a record of time 52 is newer than the batch's largest time 51")
