"""The leader's decisions on batches and markers of transactions, over the producers of a log."""

from dataclasses import replace

import pytest
from support.brokers.transactions import transactional

from tidelog.log.batch import ControlKind, ControlMarker, encode_control, read_header
from tidelog.log.batch_header import BatchHeader
from tidelog.log.producers import ProducerState
from tidelog.model.errors import (
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
    TransactionCoordinatorFencedError,
)
from tidelog.model.ids import Offset
from tidelog.model.transaction_errors import InvalidProducerIdMappingError
from tidelog.replication import partition_transactions
from tidelog.replication.partition_transactions import (
    MarkerAction,
    OpenTransaction,
    PartitionTransactions,
    ProducerTransaction,
    UnverifiedError,
)
from tidelog.replication.transaction_messages import Marker

APP, OLD = ProducerTransaction("app"), ProducerTransaction("app", version=1)
MARKER = Marker(
    transactional_id="app",
    producer_id=7,
    epoch=4,
    coordinator_epoch=0,
    is_commit=True,
    is_strict=True,
    number=1,
    partitions=(),
)
OLD_MARKER = replace(MARKER, epoch=3, is_strict=False)


class Partition:
    """A log as its producers see it."""

    def __init__(self) -> None:
        self.producers = ProducerState()
        self.transactions = PartitionTransactions(lambda: self.producers)
        self.end = 0

    def append(self, header: BatchHeader, control: ControlMarker | None = None) -> None:
        header.base_offset = self.end
        self.end = header.next_offset
        self.producers.apply(header, control=control, now_ms=1_000 + self.end)
        self.transactions.validate()

    def marker(self, marker: Marker) -> MarkerAction:
        action = self.transactions.decide(marker)
        if action is MarkerAction.APPEND:
            kind = ControlKind.COMMIT if marker.is_commit else ControlKind.ABORT
            data = encode_control(
                kind,
                coordinator_epoch=marker.coordinator_epoch,
                timestamp=0,
                producer_id=marker.producer_id,
                producer_epoch=marker.epoch,
            )
            self.append(read_header(data), ControlMarker(kind, marker.coordinator_epoch))
        return action

    def confirm(self, transaction: ProducerTransaction = APP, epoch: int = 3, number: int = 1) -> None:
        self.transactions.answered(self.transactions.ask(transaction, 7, epoch), number)

    def write(self, epoch: int = 3, sequence: int = 0, transaction: ProducerTransaction | None = APP) -> None:
        """As the log: epochs and sequences are checked first."""
        header = batch(epoch, sequence)
        self.producers.check(header)
        self.transactions.check(transaction, header)
        self.append(header)


def batch(epoch: int = 3, sequence: int = 0) -> BatchHeader:
    return read_header(transactional(b"v", 7, epoch, sequence))


@pytest.fixture
def partition() -> Partition:
    return Partition()


# Batches.


def test_the_first_batch_of_a_transaction_is_verified_and_the_next_are_not(partition: Partition) -> None:
    with pytest.raises(UnverifiedError) as needed:
        partition.write()
    assert (needed.value.producer_id, needed.value.epoch) == (7, 3)
    partition.confirm()
    partition.write()
    partition.transactions = PartitionTransactions(lambda: partition.producers)
    partition.write(sequence=1)
    assert partition.producers.open_offset(7) == 0, "a new leader knows it from the log"


def test_an_answer_counts_for_its_epoch_and_its_transactional_id_only(partition: Partition) -> None:
    partition.confirm()
    for epoch, transaction in ((4, APP), (2, APP), (3, ProducerTransaction("other"))):
        with pytest.raises(UnverifiedError):
            partition.transactions.check(transaction, batch(epoch))


def test_a_batch_without_a_transactional_id_is_rejected(partition: Partition) -> None:
    partition.confirm()
    with pytest.raises(InvalidTransactionStateError, match="names no transactional id"):
        partition.write(transaction=None)
    partition.write()
    with pytest.raises(InvalidTransactionStateError, match="names no transactional id"):
        partition.write(sequence=1, transaction=None)


def test_a_foreign_transactional_id_does_not_write_in_an_open_transaction(partition: Partition) -> None:
    partition.confirm()
    partition.write()
    with pytest.raises(InvalidProducerIdMappingError, match="'app', not of 'other'"):
        partition.write(sequence=1, transaction=ProducerTransaction("other"))


def test_a_batch_of_the_next_epoch_is_asked_about_while_the_marker_of_the_open_transaction_is_on_its_way(
    partition: Partition,
) -> None:
    partition.confirm()
    partition.write()
    with pytest.raises(UnverifiedError):
        partition.write(epoch=4)
    question = partition.transactions.ask(APP, 7, 4)
    partition.marker(MARKER)
    partition.transactions.answered(question, 2)
    partition.write(epoch=4)
    with pytest.raises(InvalidProducerEpochError):
        partition.write(epoch=3, sequence=1)


@pytest.mark.case("C1")
@pytest.mark.parametrize("is_open_for", ["app", "other"])
def test_an_answer_about_the_next_epoch_does_not_count_while_the_transaction_is_open_here(
    partition: Partition, is_open_for: str
) -> None:
    """A leader that was replaced, and does not know it: the marker went to its successor."""
    opened = ProducerTransaction(is_open_for)
    partition.confirm(opened)
    partition.write(transaction=opened)
    partition.confirm(epoch=4, number=2)
    partition.transactions.validate()
    with pytest.raises(UnverifiedError):
        partition.write(epoch=4)
    partition.write(sequence=1, transaction=opened)


@pytest.mark.case("C1")
def test_a_strict_marker_leaves_what_is_known_of_its_own_epoch_and_voids_what_is_below(partition: Partition) -> None:
    """It ends a transaction of a lower epoch. That of its own epoch is the next one, and other markers end it."""
    older, newer = partition.transactions.ask(APP, 7, 3), partition.transactions.ask(APP, 7, 4)
    partition.marker(MARKER)
    assert (older.is_void, newer.is_void) == (True, False)
    partition.transactions.answered(newer, 2)
    partition.marker(MARKER)
    partition.write(epoch=4)
    partition.marker(replace(MARKER, epoch=5))
    with pytest.raises(UnverifiedError):
        partition.transactions.check(APP, batch(5))


@pytest.mark.case("C1")
def test_a_marker_of_version_1_voids_what_is_known_of_its_epoch(partition: Partition) -> None:
    question = partition.transactions.ask(OLD, 7, 3)
    partition.marker(OLD_MARKER)
    assert question.is_void


@pytest.mark.case("C1")
def test_the_first_batch_of_a_transaction_of_version_2_has_sequence_0(partition: Partition) -> None:
    partition.confirm()
    with pytest.raises(OutOfOrderSequenceError, match="sequence 5, expected 0"):
        partition.write(sequence=5)
    partition.write(sequence=0)


@pytest.mark.case("C1")
def test_a_batch_of_version_1_does_not_overtake_the_one_that_was_asked_about(partition: Partition) -> None:
    with pytest.raises(UnverifiedError):
        partition.write(sequence=5, transaction=OLD)
    partition.transactions.dropped(partition.transactions.ask(OLD, 7, 3))
    partition.confirm(OLD)
    with pytest.raises(OutOfOrderSequenceError, match="sequence 9, expected 5"):
        partition.write(sequence=9, transaction=OLD)
    partition.write(sequence=5, transaction=OLD)
    partition.write(sequence=6, transaction=OLD)


def test_a_lower_sequence_lowers_what_is_expected_of_version_1_and_another_epoch_sets_it(partition: Partition) -> None:
    for epoch, sequence in ((3, 5), (3, 2), (3, 4), (4, 8)):
        with pytest.raises(UnverifiedError):
            partition.write(epoch=epoch, sequence=sequence, transaction=OLD)
        if sequence == 4:
            partition.confirm(OLD)
            with pytest.raises(OutOfOrderSequenceError, match="expected 2"):
                partition.write(sequence=3, transaction=OLD)
    partition.confirm(OLD, epoch=4)
    partition.write(epoch=4, sequence=8, transaction=OLD)


# Questions.


def test_a_question_is_shared_until_it_is_answered(partition: Partition) -> None:
    question = partition.transactions.ask(APP, 7, 3)
    assert partition.transactions.ask(APP, 7, 3) is question
    assert partition.transactions.ask(APP, 7, 4) is not question
    assert partition.transactions.ask(APP, 8, 3) is not question
    assert partition.transactions.ask(OLD, 7, 4) is not partition.transactions.ask(APP, 7, 4)
    again = partition.transactions.ask(APP, 7, 3)
    partition.transactions.dropped(again)
    assert partition.transactions.ask(APP, 7, 3) is not again


def test_dropping_an_older_question_leaves_the_newer_one(partition: Partition) -> None:
    older = partition.transactions.ask(APP, 7, 3)
    newer = partition.transactions.ask(APP, 7, 4)
    partition.transactions.dropped(older)
    assert partition.transactions.ask(APP, 7, 4) is newer


@pytest.mark.case("C1")
@pytest.mark.parametrize("marker", [MARKER, OLD_MARKER])
def test_a_marker_between_question_and_append_voids_the_answer(partition: Partition, marker: Marker) -> None:
    question = partition.transactions.ask(APP, 7, 3)
    partition.marker(marker)
    assert question.is_void
    partition.transactions.answered(question, 1)
    with pytest.raises(UnverifiedError):
        partition.transactions.check(APP, batch())
    partition.confirm()
    partition.marker(marker)
    with pytest.raises(UnverifiedError):
        partition.transactions.check(APP, batch())


@pytest.mark.case("C1")
def test_an_answer_of_version_1_about_a_transaction_that_has_its_marker_counts_for_nothing(
    partition: Partition,
) -> None:
    """A coordinator that does not know yet that it was replaced says so: its next transaction has the same epoch."""
    with pytest.raises(UnverifiedError):
        partition.write(transaction=OLD)
    partition.confirm(OLD, number=4)
    partition.write(transaction=OLD)
    partition.marker(replace(OLD_MARKER, number=4))
    partition.confirm(OLD, number=4)
    with pytest.raises(UnverifiedError):
        partition.write(sequence=1, transaction=OLD)
    partition.confirm(OLD, number=5)
    partition.write(sequence=1, transaction=OLD)


def test_an_answer_to_a_leader_epoch_that_is_over_counts_for_nothing(partition: Partition) -> None:
    question = partition.transactions.ask(APP, 7, 3)
    partition.confirm(ProducerTransaction("other"), epoch=5)
    partition.transactions.end()
    partition.transactions.answered(question, 1)
    for transaction, epoch in ((APP, 3), (ProducerTransaction("other"), 5)):
        with pytest.raises(UnverifiedError):
            partition.transactions.check(transaction, batch(epoch))


def test_the_oldest_answer_is_forgotten_at_the_limit(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_transactions, "KNOWN_MAX", 2)
    for producer_id in (1, 2, 3):
        with pytest.raises(UnverifiedError):
            partition.transactions.check(OLD, read_header(transactional(b"v", producer_id, 0)))
        partition.transactions.answered(partition.transactions.ask(OLD, producer_id, 0), 1)
        partition.transactions.validate()
    with pytest.raises(UnverifiedError):
        partition.transactions.check(OLD, read_header(transactional(b"v", 1, 0)))
    partition.transactions.check(OLD, read_header(transactional(b"v", 3, 0)))


# Markers.


def test_a_marker_ends_the_open_transaction_and_a_repeated_one_changes_nothing(partition: Partition) -> None:
    partition.confirm()
    partition.write()
    assert partition.marker(MARKER) is MarkerAction.APPEND
    assert partition.producers.open_offset(7) is None
    assert partition.marker(MARKER) is MarkerAction.NOTHING
    assert partition.end == 2


def test_a_marker_for_a_producer_that_wrote_nothing_fences_late_batches(partition: Partition) -> None:
    assert partition.marker(MARKER) is MarkerAction.APPEND
    assert partition.marker(MARKER) is MarkerAction.NOTHING
    partition.confirm()
    with pytest.raises(InvalidProducerEpochError):
        partition.write(epoch=3)


@pytest.mark.case("C1")
@pytest.mark.parametrize(("epoch", "is_strict"), [(3, True), (2, True), (2, False)])
def test_a_late_marker_does_not_end_the_next_transaction(partition: Partition, epoch: int, is_strict: bool) -> None:
    partition.confirm()
    partition.write()
    late = replace(MARKER, epoch=epoch, is_strict=is_strict)
    with pytest.raises(InvalidProducerEpochError, match="is late"):
        partition.marker(late)
    partition.write(sequence=1)
    assert partition.marker(MARKER) is MarkerAction.APPEND


@pytest.mark.case("C1")
def test_a_late_marker_of_version_1_has_a_lower_number(partition: Partition) -> None:
    with pytest.raises(UnverifiedError):
        partition.write(transaction=OLD)
    partition.confirm(OLD, number=4)
    partition.write(transaction=OLD)
    with pytest.raises(InvalidProducerEpochError, match="transaction 3, is late"):
        partition.marker(replace(OLD_MARKER, number=3))
    partition.write(sequence=1, transaction=OLD)
    assert partition.marker(replace(OLD_MARKER, number=4)) is MarkerAction.APPEND
    assert partition.marker(replace(OLD_MARKER, number=4)) is MarkerAction.NOTHING


def test_a_new_leader_takes_a_marker_of_version_1_by_its_leader_epoch_alone(partition: Partition) -> None:
    with pytest.raises(UnverifiedError):
        partition.write(transaction=OLD)
    partition.confirm(OLD, number=4)
    partition.write(transaction=OLD)
    partition.transactions = PartitionTransactions(lambda: partition.producers)
    assert partition.marker(replace(OLD_MARKER, number=4)) is MarkerAction.APPEND


def test_a_marker_of_a_higher_epoch_ends_a_transaction_of_version_1(partition: Partition) -> None:
    with pytest.raises(UnverifiedError):
        partition.write(transaction=OLD)
    partition.confirm(OLD, number=4)
    partition.write(transaction=OLD)
    assert partition.marker(replace(OLD_MARKER, epoch=5, number=3, is_strict=True)) is MarkerAction.APPEND


def test_a_late_marker_without_an_open_transaction_changes_nothing(partition: Partition) -> None:
    partition.marker(replace(MARKER, epoch=9))
    assert partition.marker(MARKER) is MarkerAction.NOTHING
    assert partition.marker(OLD_MARKER) is MarkerAction.NOTHING
    assert partition.end == 1


def test_a_marker_of_a_replaced_coordinator_is_rejected(partition: Partition) -> None:
    partition.marker(replace(MARKER, coordinator_epoch=6))
    partition.confirm(epoch=4)
    with pytest.raises(TransactionCoordinatorFencedError):
        partition.marker(replace(MARKER, epoch=5, coordinator_epoch=5))
    partition.transactions.check(APP, batch(4))  # it voided nothing
    assert partition.marker(replace(MARKER, epoch=5, coordinator_epoch=6)) is MarkerAction.APPEND


# Queries and limits.


def test_open_transactions_are_listed_with_what_the_coordinator_has_said(partition: Partition) -> None:
    partition.confirm(number=9)
    partition.write()
    other = read_header(transactional(b"v", 8, 0))
    partition.append(other)
    rows = partition.transactions.open_transactions()
    assert rows == [
        OpenTransaction(7, 3, Offset(0), 1_001, -1, "app", 9),
        OpenTransaction(8, 0, Offset(1), 1_002, -1),
    ]
    partition.marker(MARKER)
    assert [row.producer_id for row in partition.transactions.open_transactions()] == [8]
