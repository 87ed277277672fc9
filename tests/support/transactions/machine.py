"""The machine of the transaction coordinator with its log, and requests of an owner in short form."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

from tidelog.coordinator.transactions.invariants import validate
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.records import NO_EPOCH, NO_PRODUCER, ProducerIdentity, Transaction
from tidelog.coordinator.transactions.requests import (
    Abort,
    AddPartitions,
    AddReply,
    Complete,
    End,
    EndReply,
    InitProducer,
    InitReply,
    Join,
    JoinReply,
    Prepare,
    ProducerIdNeeded,
    TimeOut,
)
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState
from tidelog.model.errors import TidelogError
from tidelog.model.ids import Offset, PartitionId, TopicId

ID = "orders-1"
TIMEOUT_MS = 60_000


def partition(number: int, *, topic: int = 1) -> PartitionId:
    return PartitionId(TopicId(UUID(int=topic)), number)


def partitions(*numbers: int) -> frozenset[PartitionId]:
    return frozenset(partition(number) for number in numbers)


class Coordinator:
    """Decides and commits; what a new coordinator would read is compared with what this one knows."""

    def __init__(self, limits: TransactionLimits | None = None, *, transactional_id: str = ID) -> None:
        self.machine = TransactionMachine(limits)
        self.state: TransactionsState = EMPTY
        self.log: list[bytes] = []
        self.now_ms = 1_000
        self.id = transactional_id
        self.next_producer_id = 10

    def submit(self, request: Any) -> Any:
        """Return the reply; raises the rejection, which changes nothing."""
        before = self.state
        try:
            decisions, reply = self.machine.decide(before, request, offset=Offset(len(self.log)))
        except ProducerIdNeeded:
            assert self.state is before, "a rejection changes nothing"
            request = dataclasses.replace(request, new_producer_id=self.next_producer_id)
            self.next_producer_id += 1
            decisions, reply = self.machine.decide(before, request, offset=Offset(len(self.log)))
        assert self.state is before, "a decision changes nothing"
        assert len(decisions) <= 1, "one request is one decision"
        self.state = self.machine.apply(before, decisions)
        replayed = before
        for entry in self.machine.encode(decisions) if decisions else ():
            self.log.append(entry)
            replayed = self.machine.replay(replayed, entry)
        assert replayed == self.state, "the records say something else"
        validate(self.state, since=before)
        return reply

    def code(self, request: Any) -> str:
        """Return the name of the rejection."""
        try:
            reply = self.submit(request)
        except TidelogError as error:
            return error.code.name
        raise AssertionError(f"{request} was not rejected: {reply}")

    def replayed(self) -> TransactionsState:
        """What a new coordinator reads from the whole log."""
        state = EMPTY
        for entry in self.log:
            state = self.machine.replay(state, entry)
        return state

    @property
    def transaction(self) -> Transaction:
        return self.state.ids[self.id]

    @property
    def owner(self) -> ProducerIdentity:
        return self.transaction.owner

    # Requests of the owner, unless another identity is given.

    def init_request(self, who: ProducerIdentity = (NO_PRODUCER, NO_EPOCH), **fields: Any) -> InitProducer:
        values = {"timeout_ms": TIMEOUT_MS, "now_ms": self.now_ms, **fields}
        return InitProducer(transactional_id=self.id, producer_id=who[0], epoch=who[1], **values)

    def add_request(self, *numbers: int, who: ProducerIdentity | None = None, **fields: Any) -> AddPartitions:
        producer_id, epoch = self.owner if who is None else who
        return AddPartitions(
            transactional_id=self.id,
            producer_id=producer_id,
            epoch=epoch,
            partitions=partitions(*numbers),
            now_ms=self.now_ms,
            **fields,
        )

    def end_request(self, *, is_commit: bool = True, who: ProducerIdentity | None = None, **fields: Any) -> End:
        producer_id, epoch = self.owner if who is None else who
        return End(
            transactional_id=self.id,
            producer_id=producer_id,
            epoch=epoch,
            is_commit=is_commit,
            now_ms=self.now_ms,
            **fields,
        )

    def prepare_request(self, who: ProducerIdentity | None = None) -> Prepare:
        producer_id, epoch = self.owner if who is None else who
        return Prepare(transactional_id=self.id, producer_id=producer_id, epoch=epoch, now_ms=self.now_ms)

    def timeout_request(self, *, after_ms: int = TIMEOUT_MS, number: int | None = None) -> TimeOut:
        current = self.transaction.number if number is None else number
        return TimeOut(transactional_id=self.id, number=current, now_ms=self.now_ms + after_ms)

    def complete_request(self, number: int | None = None) -> Complete:
        current = self.transaction.number if number is None else number
        return Complete(transactional_id=self.id, number=current, now_ms=self.now_ms)

    def init(self, who: ProducerIdentity = (NO_PRODUCER, NO_EPOCH), **fields: Any) -> InitReply:
        reply: InitReply = self.submit(self.init_request(who, **fields))
        return reply

    def add(self, *numbers: int, who: ProducerIdentity | None = None, **fields: Any) -> AddReply:
        reply: AddReply = self.submit(self.add_request(*numbers, who=who, **fields))
        return reply

    def join(self, label: str = "") -> JoinReply:
        reply: JoinReply = self.submit(Join(transactional_id=self.id, now_ms=self.now_ms, label=label))
        return reply

    def prepare(self) -> None:
        self.submit(self.prepare_request())

    def commit(self, **fields: Any) -> EndReply:
        reply: EndReply = self.submit(self.end_request(**fields))
        return reply

    def abort(self, **fields: Any) -> EndReply:
        reply: EndReply = self.submit(self.end_request(is_commit=False, **fields))
        return reply

    def operator_aborts(self) -> bool:
        return bool(self.submit(Abort(transactional_id=self.id, now_ms=self.now_ms)))

    def time_out(self) -> bool:
        return bool(self.submit(self.timeout_request()))

    def complete(self) -> bool:
        return bool(self.submit(self.complete_request()))
