"""Transactions of one partition, as its leader decides on them (decision 32). Pure.

The log has the facts that must last: each producer's epoch, its open transaction, the coordinator epoch of its last
marker. This object adds what the coordinator has answered in this leader epoch, and is lost with it: the next leader
asks again.

    batch of a transaction, after the log has checked epoch and sequence (a repeated batch is acknowledged before)
        open here in the same epoch                      append; another transactional id: INVALID_PRODUCER_ID_MAPPING
        open here in a lower epoch                       `UnverifiedError`: the coordinator answers when the marker of
                                                           that transaction is here
        not open, and the coordinator has just said      append, if it is the first of the producer (below)
          that this partition is part of it
        not open otherwise                               `UnverifiedError`: ask, and append again
        no transactional id                              INVALID_TXN_STATE

    marker of epoch m, number n, coordinator epoch c
        c is below that of the last marker               TRANSACTION_COORDINATOR_FENCED
        a transaction of epoch e is open
          e > m; or strict, and e = m; or not strict,    INVALID_PRODUCER_EPOCH: the marker is late
            and n is below the number that is known
          otherwise                                      append
        none is open
          the log knows an epoch from m on               nothing to append: it is there, or it is late
          otherwise                                      append: it fences late batches of lower epochs

A marker voids what the coordinator has answered about its producer, and the questions that are on their way: they may
have been answered before the transaction ended. A strict marker of epoch m ends a transaction of a lower epoch, so it
voids only what is known of those: the transaction of epoch m is the next one. An answer is not kept while a transaction
of another epoch is open here: that is a leader that was replaced, and its successor has the marker. In version 1 the
next transaction has the same epoch: an answer does not count if a marker of its number has been here, which happens if
the coordinator that gave it was replaced.

First batch. A log takes any sequence of a producer that it does not know. If the first batch of a transaction was
rejected and the next one is verified, that one would be stored without it. So the first batch here has sequence 0
(version 2: each transaction has an epoch of its own), or the lowest sequence that was asked about (version 1).

Invariants (`validate`): at most `KNOWN_MAX` answers, and numbers that have ended; what is known of an open transaction
is of its epoch; no void question is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

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
from tidelog.replication.transaction_messages import Marker

KNOWN_MAX = 10_000
"""Answers that are kept. A lost one is asked for again; with one of version 1 the number of the transaction is lost."""


@dataclass(frozen=True, slots=True)
class ProducerTransaction:
    """What a produce request says of the transaction that its batches are part of."""

    transactional_id: str
    version: int = 2
    """Of the client's protocol: in version 1 the client has added the partition itself."""


class UnverifiedError(Exception):
    """The coordinator must be asked first (`PartitionTransactions.ask`). Not an error of the environment."""

    def __init__(self, producer_id: int, epoch: int) -> None:
        super().__init__(f"transaction of producer {producer_id}, epoch {epoch}, is not verified")
        self.producer_id = producer_id
        self.epoch = epoch


class Question:
    """One that is on its way to the coordinator, shared by all that wait for its answer."""

    __slots__ = ("epoch", "is_void", "producer_id", "transaction")

    def __init__(self, transaction: ProducerTransaction, producer_id: int, epoch: int) -> None:
        self.transaction = transaction
        self.producer_id = producer_id
        self.epoch = epoch
        self.is_void = False
        """A marker has arrived, or the leader epoch has ended: the answer counts for nothing."""


class MarkerAction(Enum):
    APPEND = "append"
    NOTHING = "nothing"
    """It is answered when the producer's newest batch or marker is replicated."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A row of `PartitionTransactions.open_transactions`."""

    producer_id: int
    epoch: int
    first_offset: Offset
    newest_ms: int
    """When its newest batch was appended, or found by a recovery."""
    coordinator_epoch: int
    transactional_id: str = ""
    """Empty: not known in this leader epoch."""
    number: int = -1


@dataclass(frozen=True, slots=True)
class _Known:
    """The coordinator's last answer: this partition is part of the open transaction `number`."""

    transactional_id: str
    epoch: int
    number: int


class PartitionTransactions:
    """See the module. `producers` returns the state of the log, which checks epochs and sequences first. It is another
    object after a move of the log to another directory."""

    __slots__ = ("_ended", "_known", "_lowest", "_producers", "_questions")

    def __init__(self, producers: Callable[[], ProducerState]) -> None:
        self._producers = producers
        self._known: dict[int, _Known] = {}
        self._questions: dict[int, list[Question]] = {}
        """By producer, those without an answer: one, unless several clients use its id."""
        self._lowest: dict[int, tuple[int, int]] = {}
        """By producer, of version 1: epoch, and lowest sequence that was asked about."""
        self._ended: dict[int, tuple[int, int]] = {}
        """By producer, of version 1: epoch and number of the last marker."""

    # Batches.

    def check(self, transaction: ProducerTransaction | None, header: BatchHeader) -> None:
        """Raise if this transactional batch, which the log would accept, may not be appended now."""
        producer_id, epoch = header.producer_id, header.producer_epoch
        if transaction is None:
            raise InvalidTransactionStateError(
                f"a batch of producer {producer_id} is part of a transaction: the request names no transactional id"
            )
        known = self._known.get(producer_id)
        if self._producers().open_offset(producer_id) is not None:
            if self._producers().epoch_of(producer_id) != epoch:
                raise UnverifiedError(producer_id, epoch)
            if known is not None and known.transactional_id != transaction.transactional_id:
                raise InvalidProducerIdMappingError(
                    f"producer {producer_id} writes in a transaction of {known.transactional_id!r}, not of"
                    f" {transaction.transactional_id!r}"
                )
            return
        lowest = self._lowest_sequence(transaction, header)
        if known is None or known.epoch != epoch or known.transactional_id != transaction.transactional_id:
            raise UnverifiedError(producer_id, epoch)
        if self._producers().epoch_of(producer_id) < 0 and header.base_sequence > lowest:
            raise OutOfOrderSequenceError(
                f"producer {header.producer_id}: its first batch here has sequence {header.base_sequence}, expected"
                f" {lowest}"
            )

    def _lowest_sequence(self, transaction: ProducerTransaction, header: BatchHeader) -> int:
        if transaction.version >= 2:
            return 0
        epoch, lowest = self._lowest.pop(header.producer_id, (-1, -1))
        if epoch != header.producer_epoch or header.base_sequence < lowest:
            lowest = header.base_sequence
        self._lowest[header.producer_id] = header.producer_epoch, lowest
        _limit(self._lowest)
        return lowest

    # Questions.

    def ask(self, transaction: ProducerTransaction, producer_id: int, epoch: int) -> Question:
        """Return the question that is on its way, or a new one for the caller to send."""
        questions = self._questions.setdefault(producer_id, [])
        for question in questions:
            if question.transaction == transaction and question.epoch == epoch:
                return question
        questions.append(Question(transaction, producer_id, epoch))
        return questions[-1]

    def answered(self, question: Question, number: int) -> None:
        """The coordinator says that this partition is part of the open transaction `number`."""
        self.dropped(question)
        producers, producer_id = self._producers(), question.producer_id
        is_open = producers.open_offset(producer_id) is not None
        if question.is_void or (is_open and producers.epoch_of(producer_id) != question.epoch):
            return
        ended_epoch, ended = self._ended.get(producer_id, (-1, -1))
        if question.epoch == ended_epoch and number <= ended:
            return
        self._known.pop(producer_id, None)
        self._known[producer_id] = _Known(question.transaction.transactional_id, question.epoch, number)
        _limit(self._known)

    def dropped(self, question: Question) -> None:
        """The coordinator rejects it, or does not answer."""
        questions = self._questions.get(question.producer_id, [])
        if question in questions:
            questions.remove(question)
        if not questions:
            self._questions.pop(question.producer_id, None)

    # Markers.

    def decide(self, marker: Marker) -> MarkerAction:
        """Return what the marker changes; raise if it is late. Unless it is late, it voids what is known of the
        transactions that it may end: append it at once."""
        producers, producer_id = self._producers(), marker.producer_id
        written = producers.coordinator_epoch_of(producer_id)
        if marker.coordinator_epoch < written:
            raise TransactionCoordinatorFencedError(
                f"producer {producer_id}: marker of coordinator epoch {marker.coordinator_epoch}, but {written} has"
                " written before"
            )
        known, epoch = self._known.get(producer_id), producers.epoch_of(producer_id)
        is_open = producers.open_offset(producer_id) is not None
        if is_open:
            is_late = epoch > marker.epoch or (marker.is_strict and epoch == marker.epoch)
            if not marker.is_strict and known is not None and known.epoch == marker.epoch:
                is_late = is_late or marker.number < known.number
            if is_late:
                raise InvalidProducerEpochError(
                    f"producer {producer_id}: the marker of epoch {marker.epoch}, transaction {marker.number}, is late:"
                    f" a transaction of epoch {epoch} is open"
                )
        self._void(producer_id, below=marker.epoch if marker.is_strict else None)
        if not marker.is_strict:
            self._ended[producer_id] = max(self._ended.pop(producer_id, (-1, -1)), (marker.epoch, marker.number))
            _limit(self._ended)
        return MarkerAction.APPEND if is_open or epoch < marker.epoch else MarkerAction.NOTHING

    def _void(self, producer_id: int, *, below: int | None = None) -> None:
        """Of epochs below this one; None: of all."""

        def is_over(epoch: int) -> bool:
            return below is None or epoch < below

        known, lowest = self._known.get(producer_id), self._lowest.get(producer_id)
        if known is not None and is_over(known.epoch):
            del self._known[producer_id]
        if lowest is not None and is_over(lowest[0]):
            del self._lowest[producer_id]
        for question in list(self._questions.get(producer_id, ())):
            if is_over(question.epoch):
                question.is_void = True
                self.dropped(question)

    # Queries.

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the open transactions in the order of their first offsets."""
        rows = []
        for row in self._producers().open_rows():
            known = self._known.get(row.producer_id)
            assert row.open_offset is not None, "an open transaction has a first offset"
            rows.append(
                OpenTransaction(
                    row.producer_id,
                    row.epoch,
                    Offset(row.open_offset),
                    row.seen_ms,
                    row.coordinator_epoch,
                    "" if known is None else known.transactional_id,
                    -1 if known is None else known.number,
                )
            )
        return rows

    def end(self) -> None:
        """The leader epoch is over: no answer counts any more."""
        for producer_id in list(self._questions):
            self._void(producer_id)
        self._known.clear()
        self._lowest.clear()
        self._ended.clear()

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._known) <= KNOWN_MAX, "answers are limited"
        assert len(self._lowest) <= KNOWN_MAX, "lowest sequences are limited"
        assert len(self._ended) <= KNOWN_MAX, "numbers that have ended are limited"
        for producer_id, known in self._known.items():
            if self._producers().open_offset(producer_id) is not None:
                opened = self._producers().epoch_of(producer_id)
                assert known.epoch == opened, f"producer {producer_id}: {known.epoch} is known, {opened} is open"
        for questions in self._questions.values():
            assert questions, "an empty list is kept"
            assert not any(question.is_void for question in questions), "a void question is kept"


def _limit(entries: dict[int, _Known] | dict[int, tuple[int, int]]) -> None:
    """Forget the oldest entry of a dict that has one too many."""
    if len(entries) > KNOWN_MAX:
        del entries[next(iter(entries))]
