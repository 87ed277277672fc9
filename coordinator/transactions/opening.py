"""Opens a transaction and adds to it: AddPartitions, Join and Prepare. Pure.

    state       AddPartitions                  Join                       Prepare
    idle        opens it (v1 verify: rejects)  opens it                   INVALID_TXN_STATE
    ONGOING     adds                           adds a member              once
     prepared   INVALID_TXN_STATE              INVALID_TXN_STATE          nothing
    PREPARE     CONCURRENT_TRANSACTIONS        CONCURRENT_TRANSACTIONS    CONCURRENT_TRANSACTIONS

The owner with the epoch before its last is late, or does not know yet that its transaction was aborted: fenced, or
TRANSACTION_ABORTABLE (version 2). A member that is late is fenced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidelog.coordinator.records import Partitions
from tidelog.coordinator.transactions.identities import OwnerRequest, aborted, is_current, known, was_aborted_for_owner
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.queries import describe
from tidelog.coordinator.transactions.records import (
    MEMBER_EPOCH,
    NO_PRODUCER,
    Member,
    Status,
    Transaction,
    TransactionRecord,
)
from tidelog.coordinator.transactions.requests import (
    AddPartitions,
    AddReply,
    Join,
    JoinReply,
    Prepare,
    ProducerIdNeeded,
)
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.model.errors import InvalidRequestError, InvalidTransactionStateError, PolicyViolationError
from tidelog.model.ids import NO_TIMESTAMP
from tidelog.model.transaction_errors import (
    ConcurrentTransactionsError,
    ProducerFencedError,
    TransactionAbortableError,
)

Records = Sequence[TransactionRecord]


def add_partitions(
    state: TransactionsState, request: AddPartitions, limits: TransactionLimits
) -> tuple[Records, AddReply]:
    before = known(state, request)
    if not request.partitions:
        raise InvalidRequestError(f"transactional id {request.transactional_id!r}: no partition is named")
    member = next((each for each in before.members if each.producer_id == request.producer_id), None)
    if member is not None:
        _check_member(before, request)
        held = member.partitions
    else:
        _check_owner(before, request, request.version)
        held = before.partitions
    if request.verify_only:
        _check_has(before, request, held)
    if before.is_open:
        _check_version(before, request.transactional_id, request.version)
        _check_not_prepared(before, request.transactional_id)
        if request.partitions <= held:
            return (), AddReply(number=before.number)
    after = before if before.is_open else _begun(before, now_ms=request.now_ms, version=request.version)
    wanted = held | request.partitions
    count = len(wanted) - len(held) + len(after.partitions) + sum(len(each.partitions) for each in after.members)
    if count > limits.partitions_max:
        raise PolicyViolationError(
            f"transactional id {request.transactional_id!r}: {count} partitions are over the limit of"
            f" {limits.partitions_max} of one transaction: use smaller transactions"
        )
    after = replace(_with_partitions(after, request.producer_id, wanted), updated_ms=request.now_ms)
    return [TransactionRecord(request.transactional_id, after)], AddReply(number=after.number)


def _check_member(before: Transaction, request: AddPartitions) -> None:
    if request.epoch != MEMBER_EPOCH or not before.is_open:
        raise ProducerFencedError(
            f"transactional id {request.transactional_id!r}: the transaction of member {request.producer_id}, epoch"
            f" {request.epoch}, is over"
        )


def _check_owner(before: Transaction, request: OwnerRequest, version: int) -> None:
    """Raise unless the owner may add to a transaction or open one."""
    who = f"transactional id {request.transactional_id!r}"
    if not is_current(before, request):
        if was_aborted_for_owner(before) and version >= 2:
            raise aborted(before, request)
        raise ProducerFencedError(f"{who}: epoch {request.epoch} is over; it is {before.owner[1]} now")
    _check_not_ending(before, request.transactional_id)


def _check_not_ending(before: Transaction, transactional_id: str) -> None:
    if before.is_ending:
        raise ConcurrentTransactionsError(
            f"transactional id {transactional_id!r}: the transaction before is being ended: retry"
        )


def _check_version(before: Transaction, transactional_id: str, version: int) -> None:
    if before.version != version:
        raise InvalidTransactionStateError(
            f"transactional id {transactional_id!r}: the open transaction has protocol version {before.version}, the"
            f" request {version}"
        )


def _check_not_prepared(before: Transaction, transactional_id: str) -> None:
    if before.is_prepared:
        raise InvalidTransactionStateError(
            f"transactional id {transactional_id!r}: the open transaction is prepared: commit or abort it"
        )


def _check_has(before: Transaction, request: AddPartitions, held: Partitions) -> None:
    lacking = request.partitions - held if before.is_open else request.partitions
    if lacking:
        raise TransactionAbortableError(
            f"transactional id {request.transactional_id!r}: {len(lacking)} partitions are not in the open transaction"
        )


def _begun(before: Transaction, *, now_ms: int, version: int = 2) -> Transaction:
    return replace(
        before,
        status=int(Status.ONGOING),
        number=before.number + 1,
        version=version,
        started_ms=now_ms,
        updated_ms=now_ms,
    )


def _with_partitions(transaction: Transaction, producer_id: int, partitions: Partitions) -> Transaction:
    members = transaction.members
    if not any(each.producer_id == producer_id for each in members):
        return replace(transaction, partitions=partitions)
    return replace(
        transaction,
        members=tuple(
            replace(each, partitions=partitions) if each.producer_id == producer_id else each for each in members
        ),
    )


def join(state: TransactionsState, request: Join, limits: TransactionLimits) -> tuple[Records, JoinReply]:
    before = describe(state, request.transactional_id)
    who = f"transactional id {request.transactional_id!r}"
    if len(request.label) > limits.name_length_max:
        raise InvalidRequestError(f"{who}: the label of a member has up to {limits.name_length_max} characters")
    _check_not_ending(before, request.transactional_id)
    if before.is_open:
        _check_version(before, request.transactional_id, 2)
        _check_not_prepared(before, request.transactional_id)
    if len(before.members) >= limits.members_max:
        raise PolicyViolationError(f"{who}: the open transaction has {limits.members_max} members, the limit")
    if request.new_producer_id == NO_PRODUCER:
        raise ProducerIdNeeded(f"{who}: a member joins")
    after = before if before.is_open else _begun(before, now_ms=request.now_ms)
    member = Member(request.new_producer_id, request.label)
    after = replace(after, members=(*after.members, member), updated_ms=request.now_ms)
    reply = JoinReply(producer_id=member.producer_id, epoch=MEMBER_EPOCH)
    return [TransactionRecord(request.transactional_id, after)], reply


def prepare(state: TransactionsState, request: Prepare, limits: TransactionLimits) -> tuple[Records, None]:
    before = known(state, request)
    _check_owner(before, request, 2)
    if not before.is_open:
        raise InvalidTransactionStateError(f"transactional id {request.transactional_id!r}: no transaction is open")
    _check_version(before, request.transactional_id, 2)
    if before.prepared_ms != NO_TIMESTAMP:
        return (), None
    after = replace(before, prepared_ms=request.now_ms, updated_ms=request.now_ms)
    return [TransactionRecord(request.transactional_id, after)], None
