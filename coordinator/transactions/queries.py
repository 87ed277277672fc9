"""Read-only queries of a state. Pure; the shell passes the committed state."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tidelog.coordinator.records import Partitions, sorted_partitions
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.records import (
    MEMBER_EPOCH,
    NO_EPOCH,
    NO_PRODUCER,
    Status,
    Transaction,
)
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.model.ids import NO_TIMESTAMP, PartitionId
from tidelog.model.maps import sorted_items
from tidelog.model.transaction_errors import TransactionalIdNotFoundError
from tidelog.replication.transaction_messages import MarkedPartition, Marker

STATUS_NAMES = {
    Status.EMPTY: "Empty",
    Status.ONGOING: "Ongoing",
    Status.PREPARE_COMMIT: "PrepareCommit",
    Status.PREPARE_ABORT: "PrepareAbort",
    Status.COMPLETE_COMMIT: "CompleteCommit",
    Status.COMPLETE_ABORT: "CompleteAbort",
}
"""Kafka's names."""


def status_name(transaction: Transaction) -> str:
    return STATUS_NAMES[Status(transaction.status)]


def markers_count(transaction: Transaction) -> int:
    """Return how many partitions `markers_to_write` has, of all markers."""
    if not transaction.is_ending:
        return 0
    return len(transaction.partitions) + sum(len(member.partitions) for member in transaction.members)


def markers_to_write(transactional_id: str, transaction: Transaction, *, coordinator_epoch: int) -> Iterator[Marker]:
    """Yield one marker for each producer of a transaction in PREPARE that has partitions; none in another status. Those
    of 10,000 members take 20 ms.

    The transaction is complete when every partition of every marker has it. The leader epochs of the partitions are
    `NO_EPOCH`: the shell sets them when it sends.
    """
    if not transaction.is_ending:
        return
    is_commit = transaction.status == Status.PREPARE_COMMIT

    def marker(producer_id: int, partitions: Partitions, *, epoch: int, is_commit: bool, is_strict: bool) -> Marker:
        return Marker(
            transactional_id=transactional_id,
            producer_id=producer_id,
            epoch=epoch,
            coordinator_epoch=coordinator_epoch,
            is_commit=is_commit,
            is_strict=is_strict,
            number=transaction.number,
            partitions=tuple(
                MarkedPartition(each.topic_id, each.partition, NO_EPOCH) for each in sorted_partitions(partitions)
            ),
        )

    committed = frozenset(transaction.committed)
    if transaction.partitions:
        yield marker(
            transaction.producer_id,
            transaction.partitions,
            epoch=transaction.epoch,
            is_commit=is_commit,
            is_strict=transaction.version >= 2,
        )
    for member in transaction.members:
        if member.partitions:
            yield marker(
                member.producer_id,
                member.partitions,
                epoch=MEMBER_EPOCH + 1,
                is_commit=is_commit and member.producer_id in committed,
                is_strict=True,
            )


def due_ms(transaction: Transaction, limits: TransactionLimits) -> int | None:
    """Return the time from which `TimeOut` aborts the transaction; None if none is open."""
    if not transaction.is_open:
        return None
    due = transaction.started_ms + transaction.timeout_ms
    if transaction.prepared_ms != NO_TIMESTAMP:
        due = max(due, transaction.prepared_ms + limits.prepared_timeout_ms)
    return due


def all_partitions(transaction: Transaction) -> frozenset[PartitionId]:
    """Return the partitions of the owner and of all members."""
    return transaction.partitions.union(*(member.partitions for member in transaction.members))


def has_open(transaction: Transaction, producer_id: int, partition: PartitionId) -> bool:
    """Return whether the partition is part of an open or ending transaction, written by this owner or member."""
    if not _is_running(transaction):
        return False
    if producer_id == transaction.producer_id:
        return partition in transaction.partitions
    return any(each.producer_id == producer_id and partition in each.partitions for each in transaction.members)


def describe(state: TransactionsState, transactional_id: str) -> Transaction:
    """Return what is known of the id; raise `TransactionalIdNotFoundError`."""
    transaction = state.get(transactional_id)
    if transaction is None:
        raise TransactionalIdNotFoundError(f"there is no transactional id {transactional_id!r}")
    return transaction


def list_transactions(
    state: TransactionsState,
    *,
    now_ms: int,
    statuses: Collection[str] = (),
    producer_ids: Collection[int] = (),
    longer_than_ms: int = -1,
) -> list[tuple[str, Transaction]]:
    """Return (transactional id, what is known of it) for all that match each filter that is set, sorted by id.

    `statuses`: `STATUS_NAMES`; unknown names match nothing. `producer_ids`: of owners and members. `longer_than_ms`:
    open, or being ended, for longer than that.
    """
    return [
        (transactional_id, transaction)
        for transactional_id, transaction in sorted_items(state.ids)
        if matches(
            transaction, now_ms=now_ms, statuses=statuses, producer_ids=producer_ids, longer_than_ms=longer_than_ms
        )
    ]


def matches(
    transaction: Transaction,
    *,
    now_ms: int,
    statuses: Collection[str],
    producer_ids: Collection[int],
    longer_than_ms: int,
) -> bool:
    """Return whether it passes the filters of `list_transactions`."""
    return (
        (not statuses or status_name(transaction) in statuses)
        and (not producer_ids or any(each in producer_ids for each in _producers(transaction)))
        and (longer_than_ms < 0 or (_is_running(transaction) and now_ms - transaction.started_ms > longer_than_ms))
    )


def _is_running(transaction: Transaction) -> bool:
    return transaction.is_open or transaction.is_ending


def _producers(transaction: Transaction) -> list[int]:
    owners = [each for each in (transaction.producer_id, transaction.next_producer_id) if each != NO_PRODUCER]
    return owners + [member.producer_id for member in transaction.members]
