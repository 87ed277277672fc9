"""Producer ids and epochs of a transactional id: who sends a request, and what the owner uses next. Pure."""

from __future__ import annotations

from typing import Protocol

from tidelog.coordinator.transactions.records import (
    EPOCH_MAX,
    NO_PRODUCER,
    NOBODY,
    Cause,
    ProducerIdentity,
    Status,
    Transaction,
)
from tidelog.coordinator.transactions.requests import ProducerIdNeeded
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.model.transaction_errors import InvalidProducerIdMappingError, ProducerFencedError


class OwnerRequest(Protocol):
    @property
    def transactional_id(self) -> str: ...

    @property
    def producer_id(self) -> int: ...

    @property
    def epoch(self) -> int: ...


def known(state: TransactionsState, request: OwnerRequest) -> Transaction:
    transaction = state.get(request.transactional_id)
    if transaction is None:
        raise InvalidProducerIdMappingError(
            f"transactional id {request.transactional_id!r} is unknown: initialize the producer first"
        )
    return transaction


def is_current(transaction: Transaction, request: OwnerRequest) -> bool:
    """Return whether the sender is the owner; False: the owner, before its last change of producer id or epoch.

    Raise for everybody else: `ProducerFencedError` with another epoch, `InvalidProducerIdMappingError` with another
    producer id.
    """
    sender = request.producer_id, request.epoch
    if sender == transaction.owner:
        return True
    if sender == transaction.previous and sender != NOBODY:
        return False
    who = f"transactional id {request.transactional_id!r}"
    producer_id, epoch = transaction.owner
    if request.producer_id in (producer_id, transaction.producer_id, transaction.previous_producer_id):
        raise ProducerFencedError(
            f"{who}: producer {request.producer_id} has epoch {request.epoch}; it is producer {producer_id}, epoch"
            f" {epoch} now"
        )
    raise InvalidProducerIdMappingError(f"{who} belongs to producer {producer_id}, not to {request.producer_id}")


def raised(owner: ProducerIdentity, new_producer_id: int) -> ProducerIdentity:
    """Return what the owner uses after this identity; raise `ProducerIdNeeded` if that is a new producer id."""
    producer_id, epoch = owner
    if epoch + 1 < EPOCH_MAX:
        return producer_id, epoch + 1
    if new_producer_id == NO_PRODUCER:
        raise ProducerIdNeeded(f"the epochs of producer {producer_id} are exhausted")
    return new_producer_id, 0


def was_aborted_for_owner(transaction: Transaction) -> bool:
    """Return whether the transaction of the owner's previous identity was aborted, and not by the owner."""
    return transaction.previous_outcome == Status.COMPLETE_ABORT and transaction.cause in (
        Cause.TIMEOUT,
        Cause.OPERATOR,
    )
