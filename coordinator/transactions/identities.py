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
from tidelog.model.ids import NO_TIMESTAMP
from tidelog.model.transaction_errors import (
    InvalidProducerIdMappingError,
    ProducerFencedError,
    TransactionAbortableError,
)


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
    """Return whether the sender is the owner; False: the owner, before its last change of producer id or epoch, or
    before several timeouts in a row (`last_known`).

    Raise for everybody else: `ProducerFencedError` with another epoch, `InvalidProducerIdMappingError` with another
    producer id.
    """
    sender = request.producer_id, request.epoch
    if sender == transaction.owner:
        return True
    if sender != NOBODY and _is_previous(transaction, sender):
        return False
    who = f"transactional id {request.transactional_id!r}"
    producer_id, epoch = transaction.owner
    if request.producer_id in (producer_id, transaction.producer_id, transaction.previous_producer_id):
        raise ProducerFencedError(
            f"{who}: a newer instance uses it (producer {producer_id}, epoch {epoch}; this one has producer"
            f" {request.producer_id}, epoch {request.epoch}): close this producer"
        )
    raise InvalidProducerIdMappingError(f"{who} belongs to producer {producer_id}, not to {request.producer_id}")


def _is_previous(transaction: Transaction, sender: ProducerIdentity) -> bool:
    if sender == transaction.previous:
        return True
    if transaction.previous == NOBODY or not was_aborted_for_owner(transaction):
        return False
    # The owner has had each epoch from `previous` on, whether it has learned of it or not. A producer id that came
    # after that of `previous` began then, with epoch 0.
    (producer_id, epoch), (last_id, last_epoch) = transaction.previous, transaction.owner
    if sender[0] == producer_id:
        return sender[1] >= epoch and (producer_id != last_id or sender[1] < last_epoch)
    return sender[0] == last_id and sender[1] < last_epoch


def last_known(before: Transaction) -> ProducerIdentity:
    """Return the identity that the owner surely knows, for a transaction that is aborted without it.

    A member may open a transaction whose owner has not heard yet that the one before has timed out: then it is that of
    before both.
    """
    is_seen = before.partitions or before.prepared_ms != NO_TIMESTAMP
    if was_aborted_for_owner(before) and before.previous != NOBODY and not is_seen:
        return before.previous
    return before.owner


def raised(owner: ProducerIdentity, new_producer_id: int) -> ProducerIdentity:
    """Return what the owner uses after this identity; raise `ProducerIdNeeded` if that is a new producer id."""
    producer_id, epoch = owner
    if epoch + 1 < EPOCH_MAX:
        return producer_id, epoch + 1
    if new_producer_id == NO_PRODUCER:
        raise ProducerIdNeeded(f"the epochs of producer {producer_id} are exhausted")
    return new_producer_id, 0


def aborted(before: Transaction, request: OwnerRequest) -> TransactionAbortableError:
    """The error of a transaction that `was_aborted_for_owner`."""
    by = "an operator"
    if before.cause == Cause.TIMEOUT:
        by = f"its timeout ({before.timeout_ms} ms; transaction.prepared.timeout.ms if it was prepared)"
    return TransactionAbortableError(
        f"transactional id {request.transactional_id!r}: the transaction of epoch {request.epoch} was aborted by {by}"
    )


def was_aborted_for_owner(transaction: Transaction) -> bool:
    """Return whether the transaction of the owner's previous identity was aborted, and not by the owner."""
    return transaction.previous_outcome == Status.COMPLETE_ABORT and transaction.cause in (
        Cause.TIMEOUT,
        Cause.OPERATOR,
    )
