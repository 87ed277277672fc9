"""Begins and ends the life of a transactional id: InitProducer and ForgetIdle. Pure.

    state       a new instance             the owner recovers (CURRENT)    a repeat of that (PREVIOUS)
    unknown     a new producer id          a new producer id               -
    idle        raises the epoch           raises the epoch                the same reply
    ONGOING     aborts, `is_ending`        aborts, `is_ending`             the same reply
     prepared   and `keep_prepared`:       and `keep_prepared`:            the same reply
                raises the owner's epoch   raises the owner's epoch
    PREPARE     `is_ending`                `is_ending`                     `is_ending`

CURRENT and PREVIOUS: `identities.is_current`; anybody else is fenced. After a new instance there is no PREVIOUS: the
one before it cannot come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidelog.coordinator.records import DECISION_BYTES_MAX
from tidelog.coordinator.transactions.ending import to_abort
from tidelog.coordinator.transactions.identities import is_current, raised
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.records import (
    NO_EPOCH,
    NO_PRODUCER,
    NOBODY,
    Cause,
    ProducerIdentity,
    Status,
    Transaction,
    TransactionRecord,
    encode_key,
)
from tidelog.coordinator.transactions.requests import ForgetIdle, InitProducer, InitReply, ProducerIdNeeded
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.model.errors import InvalidRequestError, PolicyViolationError
from tidelog.model.transaction_errors import InvalidTransactionTimeoutError

Records = Sequence[TransactionRecord]


def init_producer(
    state: TransactionsState, request: InitProducer, limits: TransactionLimits
) -> tuple[Records, InitReply]:
    _check(request, limits)
    is_recovering = request.producer_id != NO_PRODUCER
    before = state.get(request.transactional_id)
    if before is None:
        after = _new(state, request, limits)
        return _decided(request, after)
    is_repeat = is_recovering and not is_current(before, request)
    if before.is_ending:
        return (), InitReply(is_ending=True)
    if is_repeat:
        return (), _reply(request, before)
    previous = before.owner if is_recovering else NOBODY
    if before.is_open and not (request.keep_prepared and before.is_prepared):
        after = to_abort(
            before,
            cause=Cause.OWNER if is_recovering else Cause.FENCED,
            previous=previous,
            new_producer_id=request.new_producer_id,
            now_ms=request.now_ms,
        )
        return [TransactionRecord(request.transactional_id, after)], InitReply(is_ending=True)
    return _decided(request, _with_new_owner(before, request, previous))


def _check(request: InitProducer, limits: TransactionLimits) -> None:
    if not 0 < len(request.transactional_id) <= limits.name_length_max:
        raise InvalidRequestError(f"a transactional id has 1 to {limits.name_length_max} characters")
    if (request.producer_id == NO_PRODUCER) != (request.epoch == NO_EPOCH):
        raise InvalidRequestError("a producer that recovers sends both its producer id and its epoch")
    if not 0 < request.timeout_ms <= limits.timeout_max_ms:
        raise InvalidTransactionTimeoutError(
            f"the transaction timeout is {request.timeout_ms} ms: use 1 to {limits.timeout_max_ms} ms"
            " (transaction.max.timeout.ms)"
        )


def _new(state: TransactionsState, request: InitProducer, limits: TransactionLimits) -> Transaction:
    if len(state.ids) >= limits.ids_max:
        raise PolicyViolationError(
            f"there are {limits.ids_max} transactional ids in this partition of __transaction_state: use fewer, or wait"
            " until unused ones expire (transactional.id.expiration.ms)"
        )
    if request.new_producer_id == NO_PRODUCER:
        raise ProducerIdNeeded(f"transactional id {request.transactional_id!r} is new")
    return Transaction(producer_id=request.new_producer_id, timeout_ms=request.timeout_ms, updated_ms=request.now_ms)


def _with_new_owner(before: Transaction, request: InitProducer, previous: ProducerIdentity) -> Transaction:
    """Give the owner a new epoch: if a prepared transaction is open, its batches and markers keep theirs."""
    owner = raised(before.owner, request.new_producer_id)
    changed = replace(
        before,
        timeout_ms=request.timeout_ms,
        updated_ms=request.now_ms,
        previous_producer_id=previous[0],
        previous_epoch=previous[1],
        previous_outcome=int(Status.EMPTY),
    )
    if before.is_open:
        return replace(changed, next_producer_id=owner[0], next_epoch=owner[1])
    return replace(changed, status=int(Status.EMPTY), producer_id=owner[0], epoch=owner[1])


def _decided(request: InitProducer, after: Transaction) -> tuple[Records, InitReply]:
    return [TransactionRecord(request.transactional_id, after)], _reply(request, after)


def _reply(request: InitProducer, after: Transaction) -> InitReply:
    has_open = request.keep_prepared and after.is_prepared
    return InitReply(
        producer_id=after.owner[0],
        epoch=after.owner[1],
        has_open=has_open,
        open_producer_id=after.producer_id if has_open else NO_PRODUCER,
        open_epoch=after.epoch if has_open else NO_EPOCH,
        last_token=after.last_token,
    )


def is_idle(transaction: Transaction | None, request: ForgetIdle) -> bool:
    """Return whether the id may be forgotten."""
    return (
        transaction is not None
        and transaction.updated_ms + request.expiration_ms <= request.now_ms
        and not (transaction.is_open or transaction.is_ending or transaction.last_token)
    )


def forget_idle(state: TransactionsState, request: ForgetIdle, limits: TransactionLimits) -> tuple[Records, bool]:
    """Forget the ids that are idle since `expiration_ms`. The reply is True if one decision cannot hold all of them."""
    idle = sorted(
        transactional_id
        for transactional_id in (state.ids if request.ids is None else request.ids)
        if is_idle(state.get(transactional_id), request)
    )
    records: list[TransactionRecord] = []
    size = 0
    for transactional_id in idle[: limits.forgotten_per_decision_max]:
        size += len(encode_key(transactional_id)) + 16
        if size > DECISION_BYTES_MAX:
            break
        records.append(TransactionRecord(transactional_id, None))
    return records, len(records) < len(idle)
