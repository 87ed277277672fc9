"""One partition with transactions against a simple truth: who wrote each batch, in which transaction, and its outcome.

The coordinator is a few values. Batches, questions, answers and markers are delivered late, repeated, in any order, to
leaders that fail over (the log keeps any part past the high watermark, and is replayed). A transaction is complete when
its marker is replicated. Then: its batches and no others stand before its marker, and nothing of it comes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.brokers.transactions import transactional

from tidelog.log.batch import ControlKind, ControlMarker, encode_control, read_header
from tidelog.log.batch_header import BatchHeader
from tidelog.log.producers import ProducerState
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset
from tidelog.replication.partition_transactions import (
    MarkerAction,
    PartitionTransactions,
    ProducerTransaction,
    Question,
    UnverifiedError,
)
from tidelog.replication.transaction_messages import Marker

PRODUCER = 7
CHOICE = st.integers(0, 1 << 30)


@dataclass(frozen=True)
class Sent:
    """A batch of the client, with the number of its transaction: the truth."""

    header: BatchHeader
    number: int


@dataclass(frozen=True)
class Stored:
    header: BatchHeader
    number: int
    marker: ControlMarker | None = None


@dataclass(frozen=True)
class SentMarker:
    marker: Marker
    leader_epoch: int


class PartitionWithTransactions(RuleBasedStateMachine):
    version = 2

    def __init__(self) -> None:
        super().__init__()
        # The coordinator.
        self.epoch = 0
        self.number = 0
        self.is_open = False
        self.is_added = False
        self.ending: Marker | None = None
        self.outcomes: dict[int, bool] = {}
        # The client.
        self.sequence = 0
        self.client_epoch = 0
        self.client_number = 1
        # The network: everything may be delivered again.
        self.batches: list[Sent] = []
        self.markers: list[SentMarker] = []
        self.questions: list[tuple[int, Question]] = []
        self.answers: list[tuple[int, Question, int]] = []
        # The partition.
        self.log: list[Stored] = []
        self.high_watermark = 0
        self.leader_epoch = 0
        self.waiting: list[tuple[int, int]] = []
        """(end, number) of markers that wait for their replication."""
        self.take_lead()

    @property
    def transaction(self) -> ProducerTransaction:
        return ProducerTransaction("app", self.version)

    @property
    def is_ending(self) -> bool:
        return self.ending is not None

    # The client.

    @precondition(lambda self: self.ending is None)
    @rule()
    def send(self) -> None:
        if self.version < 2 and not self.is_open:
            self.begin()
        if self.version < 2:
            self.is_added = True
        header = read_header(transactional(b"v", PRODUCER, self.client_epoch, self.sequence))
        self.sequence += 1
        self.batches.append(Sent(header, self.client_number))

    # The coordinator.

    def begin(self) -> None:
        self.is_open, self.is_added = True, False
        self.number += 1

    @precondition(lambda self: self.questions)
    @rule(choice=CHOICE)
    def answer(self, choice: int) -> None:
        leader_epoch, question = self.questions.pop(choice % len(self.questions))
        if self.ending is None and question.epoch == self.epoch:
            if not self.is_open and self.version >= 2:
                self.begin()
            self.is_added = self.is_added or (self.is_open and self.version >= 2)
            if self.is_added:
                self.answers.append((leader_epoch, question, self.number))
                return
        if leader_epoch == self.leader_epoch:
            self.transactions.dropped(question)

    @precondition(lambda self: self.is_open and self.ending is None)
    @rule(is_commit=st.booleans(), is_fencing=st.booleans())
    def end(self, is_commit: bool, is_fencing: bool) -> None:
        # A client of version 1 does not end a transaction by itself while a batch is on its way without an answer: it
        # commits what is stored, and initializes again to abort (the epoch rises).
        stored = {stored.header.base_sequence for stored in self.log if stored.number == self.number}
        if self.version < 2 and (not is_commit or any(s.number == self.number for s in self.unstored(stored))):
            is_fencing = True
        is_commit = is_commit and not (is_fencing and self.version < 2)
        raises = self.version >= 2 or is_fencing
        if raises:
            self.epoch += 1
            self.client_epoch, self.sequence = self.epoch, 0
        self.outcomes[self.number] = is_commit
        self.is_open = False
        self.client_number = self.number + 1
        self.ending = Marker(
            transactional_id="app",
            producer_id=PRODUCER,
            epoch=self.epoch,
            coordinator_epoch=0,
            is_commit=is_commit,
            is_strict=raises,
            number=self.number,
            partitions=(),
        )
        if not self.is_added:
            self.ending = None

    def unstored(self, stored: set[int]) -> list[Sent]:
        return [sent for sent in self.batches if sent.header.base_sequence not in stored]

    @precondition(lambda self: self.ending is not None)
    @rule()
    def send_marker(self) -> None:
        assert self.ending is not None
        self.markers.append(SentMarker(self.ending, self.leader_epoch))

    # The partition.

    def take_lead(self) -> None:
        self.producers = ProducerState()
        for stored in self.log:
            self.producers.apply(stored.header, control=stored.marker, now_ms=0)
        self.transactions = PartitionTransactions(lambda: self.producers)

    def append(self, header: BatchHeader, number: int, marker: ControlMarker | None = None) -> None:
        placed = BatchHeader(*(getattr(header, name) for name in BatchHeader.__slots__))
        placed.base_offset = len(self.log)
        self.log.append(Stored(placed, number, marker))
        self.producers.apply(placed, control=marker, now_ms=0)

    @precondition(lambda self: self.batches)
    @rule(choice=CHOICE)
    def deliver_batch(self, choice: int) -> None:
        sent = self.batches[choice % len(self.batches)]
        self.try_append(sent)

    def try_append(self, sent: Sent) -> bool:
        """Whether it is stored, now or before."""
        try:
            if self.producers.check(sent.header) is not None:
                return True
            self.transactions.check(self.transaction, sent.header)
        except UnverifiedError as needed:
            question = self.transactions.ask(self.transaction, needed.producer_id, needed.epoch)
            if (self.leader_epoch, question) not in self.questions:
                self.questions.append((self.leader_epoch, question))
            return False
        except TidelogError:
            return False
        self.append(sent.header, sent.number)
        return True

    @precondition(lambda self: self.answers)
    @rule(choice=CHOICE)
    def deliver_answer(self, choice: int) -> None:
        leader_epoch, question, number = self.answers[choice % len(self.answers)]
        if leader_epoch == self.leader_epoch:
            self.transactions.answered(question, number)
        self.answers.remove((leader_epoch, question, number))

    @precondition(lambda self: self.markers)
    @rule(choice=CHOICE)
    def deliver_marker(self, choice: int) -> None:
        sent = self.markers[choice % len(self.markers)]
        if sent.leader_epoch != self.leader_epoch:
            return
        self.write(sent.marker)

    def write(self, marker: Marker) -> None:
        try:
            action = self.transactions.decide(marker)
        except TidelogError:
            return
        if action is MarkerAction.APPEND:
            kind = ControlKind.COMMIT if marker.is_commit else ControlKind.ABORT
            data = encode_control(
                kind, coordinator_epoch=0, timestamp=0, producer_id=PRODUCER, producer_epoch=marker.epoch
            )
            self.append(read_header(data), marker.number, ControlMarker(kind, 0))
        self.waiting.append((self.producers.newest_offset_of(PRODUCER) + 1, marker.number))
        self.note_replicated()

    @rule(choice=CHOICE)
    def replicate(self, choice: int) -> None:
        self.high_watermark += choice % (len(self.log) - self.high_watermark + 1)
        self.note_replicated()

    def note_replicated(self) -> None:
        for end, number in [pair for pair in self.waiting if pair[0] <= self.high_watermark]:
            self.waiting.remove((end, number))
            if self.ending is not None and self.ending.number == number:
                self.ending = None

    @rule(choice=CHOICE)
    def fail_over(self, choice: int) -> None:
        del self.log[self.high_watermark + choice % (len(self.log) - self.high_watermark + 1) :]
        self.leader_epoch += 1
        self.waiting.clear()
        self.transactions.end()
        self.take_lead()

    # What must hold.

    @invariant()
    def outcomes_are_those_of_the_coordinator(self) -> None:
        opened: list[Stored] = []
        for stored in self.log:
            if stored.marker is None:
                opened.append(stored)
                assert len({each.number for each in opened}) == 1, "two transactions before one marker"
                continue
            for each in opened:
                assert each.number in self.outcomes, "a marker before the decision"
                assert self.outcomes[each.number] == (not stored.marker.is_abort), "another outcome"
            opened.clear()
        if opened:
            assert opened[0].number == self.number, "a transaction is left open"
            assert self.is_open or self.ending is not None, "open here, and complete"
            assert self.is_added, "a batch in a partition that the coordinator does not know"

    @invariant()
    def the_state_is_that_of_the_log(self) -> None:
        self.producers.validate(log_end=len(self.log))
        self.transactions.validate()
        replayed = ProducerState()
        for stored in self.log:
            replayed.apply(stored.header, control=stored.marker, now_ms=0)
        assert replayed.rows() == self.producers.rows()
        stable = self.producers.first_unstable_offset(Offset(self.high_watermark))
        opened = self.producers.open_offset(PRODUCER)
        assert opened is None or (stable is not None and stable <= opened)

    @precondition(lambda self: self.ending is None and len(self.log) < 60)
    @rule()
    def the_client_makes_progress(self) -> None:
        """With a working network the client's batches are stored, in order, and its end is complete."""
        self.questions.clear()
        self.answers.clear()
        self.transactions.end()
        self.send()
        mine = [
            sent
            for sent in self.batches
            if sent.number == self.client_number and sent.header.producer_epoch == self.client_epoch
        ]
        for sent in mine:
            for _ in range(4):
                if self.try_append(sent):
                    break
                while self.questions:
                    self.answer(0)
                while self.answers:
                    self.deliver_answer(0)
            else:
                raise AssertionError(f"{sent} is not stored")
        self.end(True, False)
        self.finish()

    def finish(self) -> None:
        """The marker of the transaction that ends is written and replicated."""
        assert self.ending is not None
        self.write(self.ending)
        self.high_watermark = len(self.log)
        self.note_replicated()
        assert not self.is_ending, "the marker is written"
        assert self.producers.open_offset(PRODUCER) is None


class PartitionWithOldTransactions(PartitionWithTransactions):
    """Version 1: the epoch stays the same."""

    version = 1


TestVersion2: Any = PartitionWithTransactions.TestCase
TestVersion1: Any = PartitionWithOldTransactions.TestCase
for _case in (TestVersion2, TestVersion1):
    pytest.mark.case("C1")(_case)
