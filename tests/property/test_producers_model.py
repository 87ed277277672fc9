"""Producer state against a model that remembers everything, and against its own replay from the log."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.log.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, ControlKind, ControlMarker
from tidelog.log.producers import SEQUENCES, Duplicate, ProducerState
from tidelog.model.errors import (
    DuplicateSequenceError,
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
    TidelogError,
)
from tidelog.model.ids import Offset

Entry = tuple[BatchHeader, ControlMarker | None]


@dataclass
class ModelProducer:
    epoch: int
    batches: list[BatchHeader] = field(default_factory=list)
    """Every batch of this epoch, from the first."""


class Model:
    """Says the same with the whole history at hand: sequences as a walk over the batches, nothing computed."""

    def __init__(self) -> None:
        self.producers: dict[int, ModelProducer] = {}
        self.open: dict[int, int] = {}
        self.ended: list[tuple[int, int]] = []

    def check(self, header: BatchHeader) -> Duplicate | type[TidelogError] | None:
        producer = self.producers.get(header.producer_id)
        if producer is not None:
            if header.producer_epoch == producer.epoch:
                for number, batch in enumerate(reversed(producer.batches)):
                    if (batch.base_sequence, batch.count) == (header.base_sequence, header.count) and number < 5:
                        return Duplicate(Offset(batch.base_offset), batch.last_offset, batch.max_timestamp)
                expected = self._next(producer)
                if header.base_sequence != expected:
                    kept = {s for batch in producer.batches[-5:] for s in _sequences(batch)}
                    older = {s for batch in producer.batches[:-5] for s in _sequences(batch)}
                    is_older = older.issuperset(_sequences(header)) and not kept & set(_sequences(header))
                    return DuplicateSequenceError if is_older else OutOfOrderSequenceError
            elif header.producer_epoch < producer.epoch:
                return InvalidProducerEpochError
            elif header.base_sequence != 0:
                return OutOfOrderSequenceError
        if header.producer_id in self.open and not header.is_transactional:
            return InvalidTransactionStateError
        return None

    def apply(self, header: BatchHeader, control: ControlMarker | None) -> None:
        producer = self.producers.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch:
            producer = self.producers[header.producer_id] = ModelProducer(header.producer_epoch)
        if control is not None:
            first = self.open.pop(header.producer_id, None)
            if first is not None:
                self.ended.append((first, header.base_offset))
            return
        producer.batches.append(header)
        if header.is_transactional:
            self.open.setdefault(header.producer_id, header.base_offset)

    def first_unstable(self, high_watermark: int) -> int | None:
        firsts = [*self.open.values(), *(first for first, end in self.ended if end >= high_watermark)]
        return min(firsts, default=None)

    @staticmethod
    def _next(producer: ModelProducer) -> int:
        return (producer.batches[-1].last_sequence + 1) % SEQUENCES if producer.batches else 0


def _sequences(header: BatchHeader) -> list[int]:
    return [(header.base_sequence + n) % SEQUENCES for n in range(header.count)]


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int, int, bool, str]]:
    step = st.tuples(
        st.integers(0, 2),  # producer
        st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1]),  # epoch, relative to its newest
        st.sampled_from([0, 0, 0, 0, 0, 1, -1, -2, -3, -5, -6, -7, -12, 40]),  # sequence, relative to the next
        st.integers(1, 4),  # count
        st.booleans(),  # transactional
        st.sampled_from(["send", "send", "send", "send", "retry", "commit", "abort"]),
    )
    return draw(st.lists(step, max_size=60))


def _header(
    producer: int, epoch: int, sequence: int, count: int, offset: int, *, transactional: bool, control: bool = False
) -> BatchHeader:
    return BatchHeader(
        base_offset=offset,
        size=100,
        leader_epoch=0,
        attributes=(TRANSACTIONAL_BIT if transactional else 0) | (CONTROL_BIT if control else 0),
        last_offset_delta=count - 1,
        base_timestamp=offset,
        max_timestamp=offset,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        count=count,
        crc=0,
    )


class Run:
    """One history: a leader's state, the model, and the log that both have made."""

    def __init__(self, first_sequence: int) -> None:
        self.state = ProducerState()
        self.model = Model()
        self.log: list[Entry] = []
        self.first_sequence = first_sequence
        self.offset = 0

    def do(
        self, producer: int, epoch_step: int, sequence_step: int, count: int, transactional: bool, what: str
    ) -> None:
        known = self.model.producers.get(producer)
        epoch = max(0, (known.epoch if known else 1) + epoch_step)
        if what in ("commit", "abort"):
            kind = ControlKind.COMMIT if what == "commit" else ControlKind.ABORT
            header = _header(producer, epoch, -1, 1, self.offset, transactional=True, control=True)
            marker = ControlMarker(kind, 0)
            try:
                self.state.check_marker(header, marker)
            except InvalidProducerEpochError:
                assert known is not None
                assert epoch < known.epoch
                return
            self._store(header, marker)
            return
        if what == "retry" and known is not None and known.batches:
            again = known.batches[max(-len(known.batches), min(-1, sequence_step))]
            header = _header(
                producer, known.epoch, again.base_sequence, again.count, self.offset, transactional=transactional
            )
        else:
            expected = Model._next(known) if known is not None else self.first_sequence
            if epoch_step > 0:
                expected = 0
            sequence = (expected + sequence_step) % SEQUENCES
            header = _header(producer, epoch, sequence, count, self.offset, transactional=transactional)
        self._send(header)

    def _send(self, header: BatchHeader) -> None:
        before = self.state.to_snapshot()
        expected = self.model.check(header)
        if isinstance(expected, type):
            with pytest.raises(expected) as caught:
                self.state.check(header)
            assert type(caught.value) is expected
        else:
            assert self.state.check(header) == expected
        assert self.state.to_snapshot() == before, "a check changes nothing"
        if expected is None:
            self._store(header, None)

    def _store(self, header: BatchHeader, marker: ControlMarker | None) -> None:
        self.state.apply(header, control=marker, now_ms=0)
        self.state.validate()
        self.model.apply(header, marker)
        self.log.append((header, marker))
        self.offset = header.next_offset
        assert self.state.first_open_offset == min(self.model.open.values(), default=None)


first_sequences = st.sampled_from([0, 0, 7, SEQUENCES - 1, SEQUENCES - 3, SEQUENCES - 12])


@pytest.mark.requirement("a:D-60", "a:D-62", "a:D-63", "a:D-64")
@pytest.mark.case("C2")
@given(first_sequences, steps())
def test_producer_state_agrees_with_a_model_that_keeps_everything(
    first_sequence: int, history: list[tuple[int, int, int, int, bool, str]]
) -> None:
    run = Run(first_sequence)
    for step in history:
        run.do(*step)
    for high_watermark in range(run.offset + 1):
        assert run.state.first_unstable_offset(Offset(high_watermark)) == run.model.first_unstable(high_watermark)


@pytest.mark.requirement("a:D-72", "a:D-73", "a:B-19")
@pytest.mark.case("C3")
@given(first_sequences, steps(), st.data())
def test_a_replay_from_any_snapshot_ends_where_the_live_state_is(
    first_sequence: int, history: list[tuple[int, int, int, int, bool, str]], data: st.DataObject
) -> None:
    run = Run(first_sequence)
    for step in history:
        run.do(*step)
    cut = data.draw(st.integers(0, len(run.log)))
    replayed = ProducerState()
    for header, marker in run.log[:cut]:
        replayed.apply(header, control=marker, now_ms=0)
    replayed = ProducerState.from_snapshot(replayed.to_snapshot())
    for header, marker in run.log[cut:]:
        replayed.apply(header, control=marker, now_ms=0)
    replayed.validate()
    assert replayed.to_snapshot() == run.state.to_snapshot()
    assert replayed.rows() == run.state.rows()


@given(first_sequences, steps(), st.integers(0, 200), st.integers(0, 100))
def test_expiry_forgets_exactly_the_silent_ones_without_an_open_transaction(
    first_sequence: int, history: list[tuple[int, int, int, int, bool, str]], now_ms: int, expiration_ms: int
) -> None:
    run = Run(first_sequence)
    for step in history:
        run.do(*step)
    rows = run.state.rows()
    expired = run.state.expire(now_ms, expiration_ms)
    assert expired == [
        row.producer_id for row in rows if row.open_offset is None and row.seen_ms <= now_ms - expiration_ms
    ]
    assert run.state.rows() == [row for row in rows if row.producer_id not in expired]
    run.state.validate()
