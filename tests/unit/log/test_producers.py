"""The rules of `producers`, one test for each."""

import msgpack
import pytest

from tidelog.log.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader, ControlKind, ControlMarker
from tidelog.log.producers import Duplicate, LastBatch, ProducerState
from tidelog.log.transactions import AbortedTransaction, CompletedTransaction
from tidelog.model.errors import (
    CorruptStateError,
    DuplicateSequenceError,
    ErrorCode,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
    TransactionCoordinatorFencedError,
)
from tidelog.model.ids import Offset, ProducerId

LAST_SEQUENCE = (1 << 31) - 1


def ending(*, is_abort: bool, coordinator_epoch: int = 0) -> ControlMarker:
    return ControlMarker(ControlKind.ABORT if is_abort else ControlKind.COMMIT, coordinator_epoch)


def batch(
    sequence: int,
    offset: int,
    *,
    count: int = 1,
    producer: int = 7,
    epoch: int = 0,
    transactional: bool = False,
    control: bool = False,
    timestamp: int = 1000,
) -> BatchHeader:
    return BatchHeader(
        base_offset=offset,
        size=61 + 10 * count,
        leader_epoch=0,
        attributes=(TRANSACTIONAL_BIT if transactional else 0) | (CONTROL_BIT if control else 0),
        last_offset_delta=count - 1,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        count=count,
        crc=0,
    )


def marker(offset: int, *, producer: int = 7, epoch: int = 0) -> BatchHeader:
    return batch(-1, offset, producer=producer, epoch=epoch, transactional=True, control=True)


def append(state: ProducerState, header: BatchHeader) -> None:
    assert state.check(header) is None
    state.apply(header, now_ms=0)
    state.validate()


@pytest.mark.requirement("a:D-60", "a:D-62", "a:D-63")
def test_a_duplicate_of_the_last_five_batches_returns_the_original_offset() -> None:
    state = ProducerState()
    sent = [batch(sequence, 100 + sequence, count=2, timestamp=sequence) for sequence in range(0, 10, 2)]
    for header in sent:
        append(state, header)
    for header in sent:
        retried = batch(header.base_sequence, 999, count=2)
        assert state.check(retried) == Duplicate(Offset(header.base_offset), header.last_offset, header.max_timestamp)
    append(state, batch(10, 110))


@pytest.mark.requirement("a:D-62")
@pytest.mark.case("C3")
def test_an_older_duplicate_is_reported_as_stored_below_an_offset() -> None:
    state = ProducerState()
    for sequence in range(6):
        append(state, batch(sequence, 100 + sequence))
    with pytest.raises(DuplicateSequenceError) as caught:
        state.check(batch(0, 106))
    assert caught.value.below_offset == 101
    assert caught.value.code is ErrorCode.DUPLICATE_SEQUENCE_NUMBER
    assert state.check(batch(1, 106)) == Duplicate(Offset(101), Offset(101), 1000)


@pytest.mark.requirement("a:D-64", "a:X3-26")
def test_sequence_27_after_2_is_out_of_order_and_a_repeat_of_2_is_a_duplicate() -> None:
    state = ProducerState()
    for sequence in range(3):
        append(state, batch(sequence, sequence))
    before = state.to_snapshot()
    with pytest.raises(OutOfOrderSequenceError, match="sequence 27, expected 3"):
        state.check(batch(27, 3))
    assert state.check(batch(2, 3)) == Duplicate(Offset(2), Offset(2), 1000)
    assert state.to_snapshot() == before, "a check changes nothing"


def test_an_overlap_that_is_no_stored_batch_is_out_of_order() -> None:
    state = ProducerState()
    append(state, batch(0, 0, count=3))
    append(state, batch(3, 3, count=3))
    for sequence, count in ((1, 1), (0, 6), (4, 3), (5, 2), (0, 2)):
        with pytest.raises(OutOfOrderSequenceError):
            state.check(batch(sequence, 6, count=count))


@pytest.mark.requirement("a:D-70", "a:X3-27")
def test_a_later_batch_is_rejected_until_the_failed_one_is_sent_again() -> None:
    state = ProducerState()
    append(state, batch(0, 0))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(batch(2, 1))
    append(state, batch(1, 1))
    append(state, batch(2, 2))


def test_a_batch_before_the_first_that_is_known_is_never_called_a_duplicate() -> None:
    """A client treats DUPLICATE_SEQUENCE_NUMBER as an ack: for a batch that is not in the log it would lose data."""
    state = ProducerState()
    append(state, batch(27, 0))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(batch(2, 1))
    for sequence in range(28, 40):
        append(state, batch(sequence, sequence))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(batch(26, 40))
    with pytest.raises(DuplicateSequenceError):
        state.check(batch(27, 40))


def test_after_the_last_sequence_comes_zero() -> None:
    state = ProducerState()
    append(state, batch(LAST_SEQUENCE - 1, 0, count=2))
    append(state, batch(0, 2))
    assert state.check(batch(LAST_SEQUENCE - 1, 3, count=2)) == Duplicate(Offset(0), Offset(1), 1000)


def test_one_batch_may_hold_the_last_sequence_and_zero() -> None:
    state = ProducerState()
    append(state, batch(LAST_SEQUENCE, 0, count=3))
    append(state, batch(2, 3))
    assert state.check(batch(LAST_SEQUENCE, 4, count=3)) == Duplicate(Offset(0), Offset(2), 1000)
    with pytest.raises(OutOfOrderSequenceError):
        state.check(batch(4, 4))


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() -> None:
    state = ProducerState()
    append(state, batch(0, 0, epoch=3))
    with pytest.raises(InvalidProducerEpochError, match="epoch 2 is older than 3"):
        state.check(batch(1, 1, epoch=2))
    with pytest.raises(OutOfOrderSequenceError, match="must be 0"):
        state.check(batch(1, 1, epoch=4))
    append(state, batch(0, 1, epoch=4))
    with pytest.raises(InvalidProducerEpochError):
        state.check(batch(1, 2, epoch=3))
    append(state, batch(1, 2, epoch=4))


def test_batches_of_the_epoch_before_are_no_duplicates() -> None:
    state = ProducerState()
    append(state, batch(0, 0, epoch=0))
    append(state, batch(0, 1, epoch=1))
    assert state.check(batch(0, 2, epoch=1)) == Duplicate(Offset(1), Offset(1), 1000)


@pytest.mark.requirement("a:D-65", "a:D-66")
def test_another_producer_id_with_the_same_data_is_another_producer() -> None:
    state = ProducerState()
    append(state, batch(0, 0, producer=1))
    append(state, batch(0, 1, producer=2))
    assert len(state) == 2


@pytest.mark.requirement("a:D-71")
def test_without_a_producer_id_nothing_is_checked_and_a_retry_is_a_second_copy() -> None:
    state = ProducerState()
    for offset in (0, 1):
        append(state, batch(-1, offset, producer=-1, epoch=-1))
    assert len(state) == 0


def test_a_producer_id_without_epoch_or_sequence_is_rejected() -> None:
    state = ProducerState()
    for header in (
        batch(-1, 0),
        batch(0, 0, epoch=-1),
        batch(0, 0, producer=-1, transactional=True),
    ):
        with pytest.raises(InvalidRecordError):
            state.check(header)


def test_an_unknown_producer_is_accepted_at_any_sequence() -> None:
    state = ProducerState()
    append(state, batch(500, 0))
    append(state, batch(501, 1))


def test_expiry_forgets_the_idle_but_never_an_open_transaction() -> None:
    state = ProducerState()
    state.apply(batch(0, 0, producer=1), now_ms=0)
    state.apply(batch(0, 1, producer=2, transactional=True), now_ms=0)
    state.apply(batch(0, 2, producer=3), now_ms=50)
    assert state.expire(99, 100) == []
    assert state.expire(100, 100) == [ProducerId(1)]
    append(state, batch(77, 3, producer=1))
    assert state.first_open_offset == 1
    state.apply(marker(4, producer=2), control=ending(is_abort=False), now_ms=101)
    assert state.expire(10_000_000, 100) == [ProducerId(1), ProducerId(2), ProducerId(3)]
    assert len(state) == 0


def test_a_producer_of_old_data_is_dated_by_the_clock_not_by_its_records() -> None:
    state = ProducerState()
    state.apply(batch(0, 0, timestamp=1), now_ms=1_000_000)
    assert state.expire(1_000_050, 100) == []


def test_the_longest_silent_producers_over_the_limit_are_evicted() -> None:
    state = ProducerState(producers_max=16)
    state.apply(batch(0, 0, producer=0, transactional=True), now_ms=0)
    for producer in range(1, 40):
        append(state, batch(0, producer, producer=producer))
    assert len(state) == 16
    assert [row.producer_id for row in state.rows()] == [0, *range(25, 40)]


@pytest.mark.requirement("a:D-72", "a:B-19", "a:X3-24")
def test_a_follower_with_the_same_batches_has_the_same_producers() -> None:
    leader, follower = ProducerState(), ProducerState()
    for sequence in range(7):
        header = batch(sequence, sequence)
        append(leader, header)
        follower.apply(header, now_ms=0)
    assert follower.to_snapshot() == leader.to_snapshot()
    assert follower.check(batch(6, 7)) == Duplicate(Offset(6), Offset(6), 1000)
    append(follower, batch(7, 7))


@pytest.mark.requirement("a:D-73", "a:X3-25")
def test_a_snapshot_restores_the_whole_state() -> None:
    state = ProducerState()
    for sequence in range(8):
        append(state, batch(sequence, sequence, producer=9, epoch=2))
    append(state, batch(0, 8, producer=3, transactional=True))
    append(state, batch(0, 9, producer=4, transactional=True))
    state.apply(marker(10, producer=4, epoch=5), control=ending(is_abort=True, coordinator_epoch=6), now_ms=0)
    restored = ProducerState.from_snapshot(state.to_snapshot())
    restored.validate()
    assert restored.rows() == state.rows()
    assert restored.to_snapshot() == state.to_snapshot()
    assert restored.first_open_offset == 8
    assert restored.first_unstable_offset(Offset(10)) == 8
    assert restored.check(batch(5, 11, producer=9, epoch=2)) == Duplicate(Offset(5), Offset(5), 1000)
    with pytest.raises(DuplicateSequenceError):
        restored.check(batch(0, 11, producer=9, epoch=2))
    with pytest.raises(TransactionCoordinatorFencedError):
        restored.check_marker(marker(11, producer=4, epoch=5), ending(is_abort=True, coordinator_epoch=5))


def test_a_snapshot_keeps_the_fields_of_a_newer_version() -> None:
    state = ProducerState()
    append(state, batch(0, 0))
    kind, version, fields = msgpack.unpackb(state.to_snapshot())
    fields["invented_later"] = [1, 2]
    fields["producers"][0].append("a value at the end")
    restored = ProducerState.from_snapshot(msgpack.packb([kind, version, fields]))
    assert restored.rows() == state.rows()
    assert msgpack.unpackb(restored.to_snapshot())[2]["invented_later"] == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgpack.packb(["other", 1, {}]),
        msgpack.packb(["producers", 2, {}]),
        msgpack.packb(["producers", 1, {}]),
        msgpack.packb(["producers", 1, {"producers": [], "pending": [[5, 4]]}]),
        msgpack.packb(["producers", 1, {"producers": [[1]], "pending": []}]),
        msgpack.packb(["producers", 1, {"producers": [[1, 0, 0, 0, 0, 0, None, [[0, 0, 1, 0]]]], "pending": []}]),
        msgpack.packb(["producers", 1, {"producers": [["x", 0, 0, 0, 0, 0, None, []]], "pending": []}]),
        msgpack.packb(["producers", 1, {"producers": [[1, 0, 0, 0, 0, 0, None, []]] * 2, "pending": []}]),
        msgpack.packb(["producers", 1, {"producers": [[1, 0, 0, 0, 0, 6, None, [[0, 0, 0, 0]] * 6]], "pending": []}]),
    ],
)
def test_bytes_that_are_no_snapshot_give_one_error(value: bytes) -> None:
    with pytest.raises(CorruptStateError):
        ProducerState.from_snapshot(value)


def test_a_truncated_or_flipped_snapshot_gives_a_state_or_that_error() -> None:
    state = ProducerState()
    for sequence in range(6):
        append(state, batch(sequence, sequence, transactional=True))
    data = state.to_snapshot()
    for position in range(len(data)):
        for bad in (data[:position], data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]):
            try:
                ProducerState.from_snapshot(bad).validate()
            except CorruptStateError:
                continue


def test_open_transactions_hold_back_the_last_stable_offset() -> None:
    state = ProducerState()
    append(state, batch(0, 10, producer=1, transactional=True))
    append(state, batch(0, 11, producer=2, transactional=True))
    append(state, batch(1, 12, producer=1, transactional=True))
    assert state.first_open_offset == 10
    done = state.apply(marker(13, producer=1), control=ending(is_abort=True), now_ms=0)
    assert done == CompletedTransaction(ProducerId(1), Offset(10), Offset(13), Offset(11), is_aborted=True)
    assert done is not None
    assert done.index_entry() == AbortedTransaction(ProducerId(1), Offset(10), Offset(13), Offset(11))
    assert state.first_open_offset == 11
    done = state.apply(marker(14, producer=2), control=ending(is_abort=False), now_ms=0)
    assert done == CompletedTransaction(ProducerId(2), Offset(11), Offset(14), Offset(15), is_aborted=False)
    assert done is not None
    assert done.index_entry() is None
    assert state.first_open_offset is None


def test_an_unreplicated_marker_does_not_advance_the_last_stable_offset() -> None:
    """Otherwise the last stable offset could go back: the marker may be truncated and replaced by the other one."""
    state = ProducerState()
    append(state, batch(0, 0, producer=1, transactional=True))
    state.apply(marker(5, producer=1), control=ending(is_abort=False), now_ms=0)
    append(state, batch(0, 6, producer=2, transactional=True))
    state.apply(marker(7, producer=2), control=ending(is_abort=False), now_ms=0)
    assert state.first_open_offset is None
    assert state.first_unstable_offset(Offset(5)) == 0
    assert state.first_unstable_offset(Offset(6)) == 6
    assert state.first_unstable_offset(Offset(5)) == 6, "replicated once, it stays so"
    state.forget_replicated(Offset(8))
    assert state.first_unstable_offset(Offset(7)) is None
    state.validate()


def test_many_unreplicated_transactions_are_merged_and_never_hold_back_less() -> None:
    state = ProducerState()
    for number in range(3000):
        append(state, batch(number, 2 * number, transactional=True))
        state.apply(marker(2 * number + 1), control=ending(is_abort=False), now_ms=0)
        state.validate()
    for high_watermark in range(0, 6001, 7):
        unstable = state.first_unstable_offset(Offset(high_watermark))
        exact = next((2 * n for n in range(3000) if 2 * n + 1 >= high_watermark), None)
        if exact is None or exact >= 5000:
            assert unstable == exact, "the newest are kept one by one"
        else:
            assert unstable is not None
            assert unstable <= exact


def test_data_outside_the_open_transaction_of_its_producer_is_rejected() -> None:
    state = ProducerState()
    append(state, batch(0, 0, transactional=True))
    with pytest.raises(InvalidTransactionStateError):
        state.check(batch(1, 1))
    append(state, batch(1, 1, transactional=True))


def test_a_marker_of_an_older_producer_epoch_or_coordinator_is_fenced() -> None:
    state = ProducerState()
    append(state, batch(0, 0, epoch=4, transactional=True))
    with pytest.raises(InvalidProducerEpochError):
        state.check_marker(marker(1, epoch=3), ending(is_abort=True))
    state.check_marker(marker(1, epoch=4), ending(is_abort=True, coordinator_epoch=8))
    state.apply(marker(1, epoch=4), control=ending(is_abort=True, coordinator_epoch=8), now_ms=0)
    with pytest.raises(TransactionCoordinatorFencedError, match="coordinator epoch 7, but 8"):
        state.check_marker(marker(2, epoch=4), ending(is_abort=False, coordinator_epoch=7))
    assert TransactionCoordinatorFencedError.code.value.code == 52


def test_a_marker_with_a_newer_epoch_fences_the_producer_and_its_next_epoch_begins_at_zero() -> None:
    state = ProducerState()
    append(state, batch(0, 0, transactional=True))
    state.apply(marker(1, epoch=1), control=ending(is_abort=True), now_ms=0)
    with pytest.raises(InvalidProducerEpochError):
        state.check(batch(1, 2, epoch=0, transactional=True))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(batch(1, 2, epoch=1, transactional=True))
    append(state, batch(0, 2, epoch=1, transactional=True))


def test_a_marker_for_a_producer_without_data_here_completes_nothing() -> None:
    state = ProducerState()
    assert state.apply(marker(0), control=ending(is_abort=False), now_ms=0) is None
    assert state.first_unstable_offset(Offset(0)) is None


def test_a_control_batch_emptied_by_compaction_keeps_the_epoch() -> None:
    state = ProducerState()
    state.apply(marker(3, epoch=6), now_ms=0)
    with pytest.raises(InvalidProducerEpochError):
        state.check(batch(0, 4, epoch=5))


def test_control_records_of_other_kinds_end_no_transaction() -> None:
    state = ProducerState()
    append(state, batch(0, 0, transactional=True))
    assert state.apply(marker(1), control=ControlMarker(ControlKind.UNKNOWN), now_ms=0) is None
    assert state.first_open_offset == 0


def test_apply_accepts_every_stored_batch() -> None:
    """A leader that had expired the producer accepted these; a replay must end in the same state."""
    state = ProducerState()
    state.apply(batch(0, 0, epoch=5), now_ms=0)
    state.apply(batch(40, 1, epoch=3), now_ms=0)
    state.apply(batch(90, 2, epoch=3), now_ms=0)
    for sequence in range(91, 97):
        append(state, batch(sequence, sequence, epoch=3))
    for gap in (89, 60, 40):
        with pytest.raises(OutOfOrderSequenceError):
            state.check(batch(gap, 100, epoch=3))
    with pytest.raises(DuplicateSequenceError):
        state.check(batch(90, 100, epoch=3))


def test_last_batches_has_the_newest_batch_of_each_producer() -> None:
    state = ProducerState()
    append(state, batch(0, 0, producer=1, count=5))
    append(state, batch(0, 5, producer=2, transactional=True))
    state.apply(marker(6, producer=2, epoch=9), control=ending(is_abort=False), now_ms=0)
    assert state.last_batches() == {1: LastBatch(Offset(4), 0), 2: LastBatch(None, 9)}


def test_a_producer_costs_less_than_a_kilobyte() -> None:
    import tracemalloc

    headers = [
        batch(sequence, 10 * producer + sequence, producer=producer) for producer in range(500) for sequence in range(5)
    ]
    state = ProducerState()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for header in headers:
        state.apply(header, now_ms=0)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / 500 < 1024
