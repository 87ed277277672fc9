"""A partition in transactions, as decision 32 says of its leader: epochs, questions to the coordinator, markers. Pure.

It holds what a log would hold (epoch, sequence, open transaction of each producer) and what the leader keeps in memory
(questions, answers), which a new leader does not have. Tags say which transaction of which client a batch belongs to:
nothing decides by them, the properties are about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

ACK, ASK, STALE, LATE, WRONG_LEADER = "ack", "ask", "stale", "late", "wrong leader"


class Batch(NamedTuple):
    sender: str
    tag: str
    producer_id: int
    epoch: int
    sequence: int


class MarkerMessage(NamedTuple):
    producer_id: int
    epoch: int
    coordinator_epoch: int
    is_commit: bool
    is_strict: bool
    number: int
    leader_epoch: int


@dataclass
class PartitionProducer:
    epoch: int = -1
    next_sequence: int = 0
    coordinator_epoch: int = -1
    open_tag: str = ""
    answer: int = 0
    """Number of the transaction in the coordinator's last answer; 0: this leader has none."""

    def as_key(self) -> tuple[Any, ...]:
        return self.epoch, self.next_sequence, self.coordinator_epoch, self.open_tag, self.answer


@dataclass
class Question:
    batch: Batch
    number: int
    """The reply has it: an answer is to one question."""
    is_void: bool = False
    """A marker has arrived since, which may have ended the transaction."""


@dataclass
class PartitionLeader:
    checks_answers: bool = True
    """False is a defect: a marker voids no answer, and any version 1 marker is accepted."""
    leader_epoch: int = 0
    asked: int = 0
    producers: dict[int, PartitionProducer] = field(default_factory=dict)
    questions: dict[int, Question] = field(default_factory=dict)
    results: dict[str, bool] = field(default_factory=dict)
    """Whether the transaction of each tag was committed here."""

    def receive(self, batch: Batch) -> str:
        """Return ACK, ASK (the coordinator, and call `answered`) or the reason of a rejection."""
        producer = self.producers.setdefault(batch.producer_id, PartitionProducer())
        reason = self._rejection(producer, batch)
        if reason is not None:
            return reason
        if producer.open_tag and producer.epoch == batch.epoch:
            self._append(producer, batch)
            return ACK
        self._ask(batch)
        return ASK

    def _ask(self, batch: Batch) -> None:
        self.asked += 1
        self.questions[batch.producer_id] = Question(batch, self.asked)

    @staticmethod
    def _rejection(producer: PartitionProducer, batch: Batch) -> str | None:
        if batch.epoch < producer.epoch:
            return STALE
        if batch.epoch == producer.epoch and batch.sequence < producer.next_sequence:
            return ACK  # a duplicate
        expected = producer.next_sequence if batch.epoch == producer.epoch else 0
        return None if batch.sequence == expected else STALE

    def answered(self, producer_id: int, number: int) -> str:
        """The coordinator has added the partition, or confirmed it. Return as `receive` does."""
        question = self.questions.pop(producer_id)
        producer = self.producers[producer_id]
        if question.is_void and self.checks_answers:
            self._ask(question.batch)
            return ASK
        producer.answer = number
        reason = self._rejection(producer, question.batch)
        if reason is None:
            self._append(producer, question.batch)
        return reason or ACK

    def _append(self, producer: PartitionProducer, batch: Batch) -> None:
        assert producer.open_tag in ("", batch.tag), f"a batch of {batch.tag} is in the transaction {producer.open_tag}"
        assert batch.tag not in self.results, f"a batch of {batch.tag} comes after its marker"
        if batch.epoch > producer.epoch:
            producer.epoch, producer.next_sequence = batch.epoch, 0
        producer.open_tag = batch.tag
        producer.next_sequence += 1

    def write(self, marker: MarkerMessage) -> str:
        """Return ACK (written, now or before), or the reason of a rejection."""
        if marker.leader_epoch != self.leader_epoch:
            return WRONG_LEADER
        producer = self.producers.setdefault(marker.producer_id, PartitionProducer())
        if marker.coordinator_epoch < producer.coordinator_epoch or marker.epoch < producer.epoch:
            return LATE
        if producer.open_tag:
            is_of_next = producer.epoch == marker.epoch if marker.is_strict else marker.number < producer.answer
            if is_of_next and (marker.is_strict or self.checks_answers):
                return LATE
            self.results[producer.open_tag] = marker.is_commit
        question = self.questions.get(marker.producer_id)
        if question is not None and (not marker.is_strict or question.batch.epoch < marker.epoch):
            question.is_void = True
        if marker.epoch > producer.epoch:
            producer.epoch, producer.next_sequence = marker.epoch, 0
        producer.coordinator_epoch = marker.coordinator_epoch
        producer.open_tag = ""
        return ACK

    def restart(self) -> None:
        """Another leader has the log, and knows no questions and no answers."""
        self.leader_epoch += 1
        self.questions.clear()
        for producer in self.producers.values():
            producer.answer = 0

    def as_key(self) -> tuple[Any, ...]:
        return (
            self.leader_epoch,
            self.asked,
            tuple((number, producer.as_key()) for number, producer in sorted(self.producers.items())),
            tuple(
                (number, tuple(each.batch), each.number, each.is_void)
                for number, each in sorted(self.questions.items())
            ),
            tuple(sorted(self.results.items())),
        )
