"""Compaction against a dict: whatever was written and whenever it was cleaned, a reader learns the same."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import aiokafka.record.default_records as peer
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.logs.cleaning import COMPACT, CleanableLog, CleaningResult

from tidelog.log.batch import Codec, Record, parse_control
from tidelog.log.cleaner import CleanerLimits
from tidelog.log.key_map import ENTRY_COST_BYTES
from tidelog.log.producers import ProducerState
from tidelog.log.segment import LOG, SegmentInfo
from tidelog.world.simulated import SimWorld

KEYS = [b"a", b"b", b"c", b"", b"d" * 16, b"d" * 17, b"e" * 40]
RETENTION_MS = COMPACT.delete_retention_ms

keys = st.sampled_from(KEYS)
pairs = st.lists(st.tuples(keys, st.sampled_from([True, True, True, False])), min_size=1, max_size=4)
writes = st.one_of(
    st.tuples(st.just("put"), pairs, st.integers(-1, 1), st.sampled_from(list(Codec))),
    st.tuples(st.just("put"), pairs, st.integers(-1, 1), st.just(Codec.NONE)),
    st.tuples(st.just("transaction"), pairs, st.integers(2, 4), st.just(Codec.NONE)),
    st.tuples(st.just("end"), st.integers(2, 4), st.booleans()),
    st.tuples(st.just("roll")),
)
cleanings = st.tuples(
    st.just("clean"),
    st.sampled_from([0, 1, 500, 999, 1000, 1500]),  # milliseconds later
    st.sampled_from([1, 2, 4, 100, 100]),  # keys in the map
    st.sampled_from([0, 0, 0, 1, 5, 20]),  # the high watermark, this far behind
)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[object, ...]]:
    """Rounds of writing, each with a roll and a cleaning or two at its end."""
    steps: list[tuple[object, ...]] = [("segment bytes", draw(st.sampled_from([1, 300, 1000, 1 << 30])))]
    for _ in range(draw(st.integers(1, 6))):
        steps += draw(st.lists(writes, min_size=3, max_size=14))
        if draw(st.integers(0, 4)) == 0:
            steps.append(("forget producers",))
        steps.append(("roll",))
        steps += draw(st.lists(cleanings, min_size=1, max_size=2))
    return steps


@contextmanager
def simulated_log() -> Iterator[CleanableLog]:
    """On a simulated disk; nothing here runs on a loop, so the world is not entered, only closed."""
    world = SimWorld(0)
    try:
        yield CleanableLog(world.machine("node").boot().disk())
    finally:
        world.close()


@dataclass
class Written:
    record: Record
    producer: int
    """Of an unfinished or aborted transaction; -1 once it counts."""
    is_aborted: bool = False
    first_cleaned_ms: int | None = None


class Run:
    """A log, all that was ever written to it, and the time."""

    def __init__(self, log: CleanableLog) -> None:
        self.log = log
        self.written: dict[int, Written] = {}
        self.now_ms = 0
        self.serial = 0

    def do(self, step: tuple[object, ...]) -> None:
        match step:
            case ("put", list(batch), int(producer), Codec() as codec):
                self._put(batch, producer, codec, transactional=False)
            case ("transaction", list(batch), int(producer), Codec() as codec):
                self._put(batch, producer, codec, transactional=True)
            case ("end", int(producer), bool(is_abort)):
                self.log.end(producer, is_abort=is_abort, timestamp=self.now_ms)
                for written in self.written.values():
                    if written.producer == producer:
                        written.is_aborted = is_abort
                        written.producer = -1
            case ("roll",):
                self.log.roll()
            case ("segment bytes", int(size)):
                self.log.config = replace(self.log.config, segment_bytes=size)
            case ("forget producers",):
                self.log.producers.expire(1, 0)
            case ("clean", int(wait_ms), int(keys_max), int(behind)):
                self.now_ms += wait_ms
                self.clean(keys_max=keys_max, behind=behind)
            case _:
                raise AssertionError(step)

    def _put(self, batch: list[tuple[bytes, bool]], producer: int, codec: Codec, *, transactional: bool) -> None:
        rows: list[tuple[bytes | None, bytes | None]] = []
        for key, has_value in batch:
            self.serial += 1
            rows.append((key, b"%d" % self.serial if has_value else None))
        base = self.log.put(*rows, timestamp=self.now_ms, producer=producer, codec=codec, transactional=transactional)
        for row, (name, value) in enumerate(rows):
            headers = (("row", b"%d" % row),) if row % 2 else ()
            record = Record(base + row, self.now_ms, name, value, headers)
            self.written[base + row] = Written(record, producer if transactional else -1)

    # Cleaning, and everything that must hold after it

    def clean(self, *, keys_max: int, behind: int, force: bool = False) -> CleaningResult | None:
        log = self.log
        bound = max(0, log.bound - behind)
        untouched = {info: log.read(info.base_offset, LOG) for info in log.sealed if info.next_offset > bound}
        head = list(log.active)
        limits = CleanerLimits(key_map_bytes_max=keys_max * ENTRY_COST_BYTES, chunk_bytes=128, index_interval_bytes=100)
        cleaned = log.clean(self.now_ms, bound=bound, limits=limits, force=force)
        log.validate()
        if cleaned is None:
            return None
        end = int(cleaned.checkpoint.first_dirty_offset)
        assert end <= bound
        self._check_untouched(untouched, head)
        self._check_records(end)
        self._check_tombstones(end)
        self._check_producers()
        return cleaned

    def _check_untouched(self, untouched: Mapping[SegmentInfo, bytes], head: list[bytes]) -> None:
        for info, data in untouched.items():
            assert info in self.log.sealed
            assert self.log.read(info.base_offset, LOG) == data, "at or past the bound nothing is touched"
        assert self.log.active == head

    def _check_records(self, end: int) -> None:
        """Survivors are as they were written, in order; what went was obsolete; a reader ends with the same dict."""
        records = self.log.records()
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        assert all(self.written[record.offset].record == record for record in records)
        kept = set(offsets)
        assert all(offset in kept for offset in self.written if offset >= end), "past the end all is kept"
        committed = self.log.committed()
        assert not any(self.written[record.offset].is_aborted for record in committed)
        model = [w.record for w in self.written.values() if not w.is_aborted]
        assert _latest(committed) == _latest(model)
        below = [record.key for record in committed if record.offset < end]
        assert len(below) == len(set(below)), "below the end each key stands once"
        assert not any(self.written[offset].is_aborted for offset in kept if offset < end)

    def _check_tombstones(self, end: int) -> None:
        """The newest record of a key below the end, if a tombstone, is there for its time and then gone."""
        kept = {record.offset for record in self.log.records()}
        newest: dict[bytes | None, Written] = {}
        for offset, written in self.written.items():
            if offset < end and not written.is_aborted:
                newest[written.record.key] = written
        for written in newest.values():
            if written.record.value is not None:
                continue
            if written.first_cleaned_ms is None:
                written.first_cleaned_ms = self.now_ms
            elif self.now_ms >= written.first_cleaned_ms + RETENTION_MS:
                assert written.record.offset not in kept, "its time is over"
            if self.now_ms < written.first_cleaned_ms + RETENTION_MS:
                superseded = any(
                    other.record.key == written.record.key and offset > written.record.offset
                    for offset, other in self.written.items()
                    if not other.is_aborted
                )
                assert written.record.offset in kept or superseded

    def _check_producers(self) -> None:
        """A replica that replays the cleaned log knows the epoch, the next sequence and the open transactions."""
        replayed = ProducerState()
        for batch in self.log.batches():
            control = parse_control(batch.data) if batch.header.is_control else None
            replayed.apply(batch.header, control=control, now_ms=0)
        assert replayed.first_open_offset == self.log.producers.first_open_offset
        known = {row.producer_id: row for row in replayed.rows()}
        for row in self.log.producers.rows():
            again = known[row.producer_id]
            assert (again.epoch, again.open_offset) == (row.epoch, row.open_offset)
            # A producer that was forgotten and came back with a marker has no sequence yet; the log may still know it.
            assert again.last_sequence == row.last_sequence or row.last_sequence == -1


def _latest(records: list[Record]) -> dict[bytes | None, bytes]:
    state: dict[bytes | None, bytes] = {}
    for record in records:
        if record.value is None:
            state.pop(record.key, None)
        else:
            state[record.key] = record.value
    return state


@pytest.mark.requirement("a:A-91", "a:A-98", "a:A-99", "a:X3-47", "b:B-60", "b:B-61", "b:B-63", "b:B-64", "b:B-65")
@pytest.mark.requirement("b:EX-24")
@given(histories())
def test_a_cleaned_log_has_the_same_latest_values_as_the_whole_log(history: list[tuple[object, ...]]) -> None:
    with simulated_log() as log:
        run = Run(log)
        for step in history:
            run.do(step)
        run.do(("roll",))
        run.clean(keys_max=100, behind=0)


@given(histories())
def test_cleaning_a_clean_log_again_changes_no_record_and_soon_nothing_at_all(
    history: list[tuple[object, ...]],
) -> None:
    """A second pass may give a horizon to markers whose data has gone, and merge segments that have become small."""
    with simulated_log() as log:
        run = Run(log)
        for step in history:
            run.do(step)
        run.do(("roll",))
        run.clean(keys_max=100, behind=0, force=True)
        records = log.records()
        for _ in range(len(log.sealed) + 2):
            before = [batch.data for batch in log.batches()]
            again = run.clean(keys_max=100, behind=0, force=True)
            assert log.records() == records
            if again is None or not again.segments:
                break
        else:
            raise AssertionError("every cleaning finds something to do")
        assert [batch.data for batch in log.batches()] == before


@given(histories())
def test_aiokafka_reads_every_batch_of_a_cleaned_log(history: list[tuple[object, ...]]) -> None:
    with simulated_log() as log:
        run = Run(log)
        for step in history:
            run.do(step)
        run.do(("roll",))
        run.clean(keys_max=100, behind=0)
        batches = list(log.batches())
        ours = [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in log.records()]
    theirs = []
    for batch in batches:
        reader = peer.DefaultRecordBatch(batch.data)
        assert reader.validate_crc()
        assert reader.next_offset == batch.header.next_offset
        rows = [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in reader]
        theirs += [] if batch.header.is_control else rows
    assert theirs == ours
