"""Ends a transaction: End, Abort, TimeOut and Complete. Pure.

    state       End of the owner (CURRENT)                         End, repeated (PREVIOUS)
    idle        v2 abort: raises the epoch (EMPTY)                 as below
                v2 commit with a token: PREPARE_COMMIT
                v1: as the last outcome; else INVALID_TXN_STATE
    ONGOING     PREPARE_COMMIT or PREPARE_ABORT                    as below
    PREPARE     v1: as the outcome; else CONCURRENT_TRANSACTIONS   as below

A repeated End (its identity is that of before the last end) is answered by the outcome of that end: the same is done;
the commit of a transaction that timed out gets TRANSACTION_ABORTABLE; else INVALID_TXN_STATE. In version 1 the owner is
fenced, since no reply would return the new epoch. A commit with the stored token is done in every state, for both, and
changes nothing; the reply says if an earlier transaction has stored it (`is_earlier`).

An abort of nothing raises the epoch: a late batch could open a transaction otherwise, and be part of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidelog.coordinator.records import NO_PARTITIONS
from tidelog.coordinator.transactions.identities import (
    aborted,
    is_current,
    known,
    last_known,
    raised,
    was_aborted_for_owner,
)
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.queries import describe, due_ms
from tidelog.coordinator.transactions.records import (
    NO_EPOCH,
    NO_PRODUCER,
    Cause,
    ProducerIdentity,
    Status,
    Transaction,
    TransactionRecord,
)
from tidelog.coordinator.transactions.requests import Abort, Complete, End, EndReply, TimeOut
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.model.errors import InvalidRequestError, InvalidTransactionStateError, PolicyViolationError
from tidelog.model.ids import NO_TIMESTAMP
from tidelog.model.transaction_errors import ConcurrentTransactionsError, ProducerFencedError, TransactionAbortableError

Records = Sequence[TransactionRecord]

_COMPLETE = {
    int(Status.PREPARE_COMMIT): int(Status.COMPLETE_COMMIT),
    int(Status.PREPARE_ABORT): int(Status.COMPLETE_ABORT),
}


def end(state: TransactionsState, request: End, limits: TransactionLimits) -> tuple[Records, EndReply]:
    before = known(state, request)
    _check(request, limits)
    is_owner = is_current(before, request)
    if request.token and request.token == before.last_token:
        is_earlier = is_owner or before.previous_outcome != Status.COMPLETE_COMMIT
        return (), _reply(before, was_done=True, is_earlier=is_earlier)
    if not is_owner and request.version < 2:
        raise ProducerFencedError(  # it would not learn the new epoch
            f"transactional id {request.transactional_id!r}: epoch {request.epoch} is over; it is {before.owner[1]} now"
        )
    if not is_owner:
        return (), _repeated(before, request, outcome=before.previous_outcome)
    if not before.is_open and request.version < 2 and before.version < 2:
        outcome = _COMPLETE.get(before.status, before.status)
        return (), _repeated(before, request, outcome=outcome)
    if before.is_ending:
        raise ConcurrentTransactionsError(
            f"transactional id {request.transactional_id!r}: the transaction before is being ended: retry"
        )
    after = _ended(before, request) if before.is_open else _ended_nothing(before, request)
    return [TransactionRecord(request.transactional_id, after)], _reply(after)


def _check(request: End, limits: TransactionLimits) -> None:
    who = f"transactional id {request.transactional_id!r}"
    if (request.token or request.members) and not (request.is_commit and request.version >= 2):
        raise InvalidRequestError(f"{who}: only a commit of protocol version 2 has a token or names members")
    if len(request.token) > limits.token_bytes_max:
        raise PolicyViolationError(
            f"{who}: the token has {len(request.token)} bytes; the limit is {limits.token_bytes_max}"
        )


def _reply(after: Transaction, *, was_done: bool = False, is_earlier: bool = False) -> EndReply:
    return EndReply(producer_id=after.owner[0], epoch=after.owner[1], was_done=was_done, is_earlier=is_earlier)


def _repeated(before: Transaction, request: End, *, outcome: int) -> EndReply:
    """Answer a request that was decided before, by its outcome."""
    who = f"transactional id {request.transactional_id!r}"
    is_same_token = not request.token or request.token == before.last_token
    if outcome == (Status.COMPLETE_COMMIT if request.is_commit else Status.COMPLETE_ABORT) and is_same_token:
        return _reply(before, was_done=True)
    if request.is_commit and outcome == before.previous_outcome and was_aborted_for_owner(before):
        raise aborted(before, request)
    last = {Status.COMPLETE_COMMIT: "committed", Status.COMPLETE_ABORT: "aborted"}.get(Status(outcome))
    raise InvalidTransactionStateError(
        f"{who}: " + ("no transaction is open" if last is None else f"the transaction was {last}")
    )


def _no_member(request: End, producer_id: int) -> TransactionAbortableError:
    return TransactionAbortableError(
        f"transactional id {request.transactional_id!r}: {producer_id} is no member of this transaction: it has joined"
        " an earlier one, or none"
    )


def _ended(before: Transaction, request: End) -> Transaction:
    who = f"transactional id {request.transactional_id!r}"
    if before.version != request.version:
        raise InvalidTransactionStateError(
            f"{who}: the open transaction has protocol version {before.version}, the request {request.version}"
        )
    committed = tuple(sorted(set(request.members)))
    members = {member.producer_id for member in before.members}
    missing = next((each for each in committed if each not in members), None)
    if missing is not None:
        raise _no_member(request, missing)
    status = Status.PREPARE_COMMIT if request.is_commit else Status.PREPARE_ABORT
    if request.version < 2:
        return replace(before, status=int(status), cause=int(Cause.OWNER), updated_ms=request.now_ms)
    return _with_outcome(
        before,
        status,
        cause=Cause.OWNER,
        previous=before.owner,
        new_producer_id=request.new_producer_id,
        now_ms=request.now_ms,
        committed=committed,
        token=request.token,
    )


def _ended_nothing(before: Transaction, request: End) -> Transaction:
    who = f"transactional id {request.transactional_id!r}"
    if request.members:
        raise _no_member(request, request.members[0])
    if request.version < 2 or (request.is_commit and not request.token):
        raise InvalidTransactionStateError(f"{who}: no transaction is open")
    if request.is_commit:
        before = replace(before, number=before.number + 1, started_ms=request.now_ms)
    after = _with_outcome(
        before,
        Status.PREPARE_COMMIT if request.is_commit else Status.PREPARE_ABORT,
        cause=Cause.OWNER,
        previous=before.owner,
        new_producer_id=request.new_producer_id,
        now_ms=request.now_ms,
        token=request.token,
    )
    return after if request.is_commit else replace(_completed(after, request.now_ms), status=int(Status.EMPTY))


def _with_outcome(
    before: Transaction,
    status: Status,
    *,
    cause: Cause,
    previous: ProducerIdentity,
    new_producer_id: int,
    now_ms: int,
    committed: tuple[int, ...] = (),
    token: bytes = b"",
) -> Transaction:
    """Decide the outcome and raise the epoch, of the owner and of the markers."""
    owner = raised(before.owner, new_producer_id)
    markers = before.producer_id, owner[1] if owner[0] == before.producer_id else before.epoch + 1
    has_next = owner != markers
    return replace(
        before,
        status=int(status),
        version=2,
        cause=int(cause),
        updated_ms=now_ms,
        epoch=markers[1],
        next_producer_id=owner[0] if has_next else NO_PRODUCER,
        next_epoch=owner[1] if has_next else NO_EPOCH,
        previous_producer_id=previous[0],
        previous_epoch=previous[1],
        previous_outcome=_COMPLETE[status],
        committed=committed,
        last_token=token or before.last_token,
    )


def to_abort(
    before: Transaction, *, cause: Cause, previous: ProducerIdentity, new_producer_id: int, now_ms: int
) -> Transaction:
    """Return the open transaction in PREPARE_ABORT."""
    return _with_outcome(
        before,
        Status.PREPARE_ABORT,
        cause=cause,
        previous=previous,
        new_producer_id=new_producer_id,
        now_ms=now_ms,
    )


def abort(state: TransactionsState, request: Abort, limits: TransactionLimits) -> tuple[Records, bool]:
    before = describe(state, request.transactional_id)
    if not before.is_open:
        return (), False
    after = to_abort(
        before,
        cause=Cause.OPERATOR,
        previous=last_known(before),
        new_producer_id=request.new_producer_id,
        now_ms=request.now_ms,
    )
    return [TransactionRecord(request.transactional_id, after)], True


def time_out(state: TransactionsState, request: TimeOut, limits: TransactionLimits) -> tuple[Records, bool]:
    """Abort the transaction if it is that one and due. The reply is False if nothing has changed."""
    before = state.get(request.transactional_id)
    due = None if before is None or before.number != request.number else due_ms(before, limits)
    if before is None or due is None or request.now_ms < due:
        return (), False
    after = to_abort(
        before,
        cause=Cause.TIMEOUT,
        previous=last_known(before),
        new_producer_id=request.new_producer_id,
        now_ms=request.now_ms,
    )
    return [TransactionRecord(request.transactional_id, after)], True


def complete(state: TransactionsState, request: Complete, limits: TransactionLimits) -> tuple[Records, bool]:
    """Complete the transaction if it is that one. The reply is False if nothing has changed: it is a repeat."""
    before = state.get(request.transactional_id)
    if before is None or not before.is_ending or before.number != request.number:
        return (), False
    return [TransactionRecord(request.transactional_id, _completed(before, request.now_ms))], True


def _completed(before: Transaction, now_ms: int) -> Transaction:
    producer_id, epoch = before.owner
    return replace(
        before,
        status=_COMPLETE[before.status],
        producer_id=producer_id,
        epoch=epoch,
        next_producer_id=NO_PRODUCER,
        next_epoch=NO_EPOCH,
        updated_ms=now_ms,
        started_ms=NO_TIMESTAMP,
        prepared_ms=NO_TIMESTAMP,
        partitions=NO_PARTITIONS,
        members=(),
        committed=(),
    )
