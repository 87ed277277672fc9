"""The invariants of decision 32, as the records show them. Pure.

    validate      what holds in every state that decisions have made
    check_step    what holds between two records of one id, one after the other

Numbers are those of the decision. That a marker is sent only when its PREPARE is committed (2), and that batches wait
for the record (3), is for the shell and the leaders; here, COMPLETE follows only its PREPARE, and keeps nothing.
"""

from __future__ import annotations

from tidelog.coordinator.transactions.identities import last_known, was_aborted_for_owner
from tidelog.coordinator.transactions.records import (
    EPOCH_MAX,
    MEMBER_EPOCH,
    NO_EPOCH,
    NO_PRODUCER,
    NOBODY,
    Status,
    Transaction,
)
from tidelog.coordinator.transactions.state import EMPTY, TransactionsState
from tidelog.model.ids import NO_TIMESTAMP
from tidelog.model.maps import sorted_items

_IDLE = (Status.EMPTY, Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT)
_FOLLOWING: dict[int, tuple[Status, ...]] = {
    **dict.fromkeys(map(int, _IDLE), (Status.EMPTY, Status.ONGOING, Status.PREPARE_COMMIT)),
    int(Status.ONGOING): (Status.ONGOING, Status.PREPARE_COMMIT, Status.PREPARE_ABORT),
    int(Status.PREPARE_COMMIT): (Status.COMPLETE_COMMIT,),
    int(Status.PREPARE_ABORT): (Status.COMPLETE_ABORT,),
}
"""Of each status; an idle id that commits nothing, with a token, is in PREPARE_COMMIT at once."""


def validate(state: TransactionsState, *, since: TransactionsState = EMPTY) -> None:
    """Assert the invariants of the ids that differ from those in `since`."""
    if state.ids is since.ids:
        return
    for transactional_id, transaction in sorted_items(state.ids):
        if transaction is not since.get(transactional_id):
            validate_transaction(transactional_id, transaction)


def validate_transaction(transactional_id: str, transaction: Transaction) -> None:
    who, status = repr(transactional_id), transaction.status
    assert transactional_id, "an id has a name"
    assert transaction.producer_id >= 0, f"{who}: no producer id"
    assert transaction.version in (1, 2), f"{who}: protocol version {transaction.version}"
    is_running = transaction.is_open or transaction.is_ending
    assert 0 <= transaction.epoch <= EPOCH_MAX - (not transaction.is_ending), f"{who}: epoch {transaction.epoch}"
    assert 0 <= transaction.owner[1] < EPOCH_MAX, f"{who}: the owner has epoch {transaction.owner[1]}"
    assert (transaction.next_producer_id == NO_PRODUCER) == (transaction.next_epoch == NO_EPOCH), (
        f"{who}: half an owner"
    )
    assert (transaction.previous_producer_id == NO_PRODUCER) == (transaction.previous_epoch == NO_EPOCH), who
    assert transaction.owner != transaction.previous, f"{who}: nothing has changed since"
    assert (transaction.started_ms != NO_TIMESTAMP) == is_running, f"{who}: started at {transaction.started_ms}"
    assert is_running or transaction.prepared_ms == NO_TIMESTAMP, f"{who}: prepared, and not open"
    assert is_running or not (transaction.partitions or transaction.members), f"{who}: keeps what is complete"
    assert transaction.number >= is_running, f"{who}: transaction {transaction.number}"
    if not transaction.is_ending:
        is_taken_over = transaction.next_producer_id != NO_PRODUCER
        assert not is_taken_over or transaction.is_prepared, f"{who}: another owner of a transaction not prepared"
    _validate_members(who, transaction, status)


def _validate_members(who: str, transaction: Transaction, status: int) -> None:
    members = [member.producer_id for member in transaction.members]
    known = {*members, transaction.producer_id, transaction.owner[0]}
    assert len(known) == len(members) + len({transaction.producer_id, transaction.owner[0]}), f"{who}: an id twice"
    assert transaction.version == 2 or not members, f"{who}: members, in version 1"
    assert list(transaction.committed) == sorted(set(transaction.committed)), f"{who}: members out of order"
    assert status == Status.PREPARE_COMMIT or not transaction.committed, f"{who}: members commit"
    assert set(transaction.committed) <= set(members), f"{who}: commits what is no member"


def check_step(transactional_id: str, before: Transaction | None, after: Transaction | None) -> None:
    """Assert what holds between the values of two records."""
    who = repr(transactional_id)
    if after is not None:
        validate_transaction(transactional_id, after)
    if before is None:
        assert after is not None, f"{who}: forgets what is unknown"
        assert after.status == Status.EMPTY, f"{who}: begins in status {after.status}"
        return
    if after is None:
        assert before.status in _IDLE, f"{who}: forgets a transaction that is not over"
        assert not before.last_token, f"{who}: forgets a token"
        return
    assert after.status in _FOLLOWING[before.status], f"{who}: status {before.status} becomes {after.status}"  # 1, 4
    begins = before.status in _IDLE and after.status != Status.EMPTY
    assert after.number == before.number + begins, f"{who}: transaction {before.number} becomes {after.number}"
    is_token_kept = after.last_token == before.last_token
    assert is_token_kept or (after.status == Status.PREPARE_COMMIT), f"{who}: another token"  # 5
    _check_epochs(who, before, after)
    if before.is_open:
        _check_kept(who, before, after)


def _check_epochs(who: str, before: Transaction, after: Transaction) -> None:
    """Epochs of a producer id never fall, and each end of version 2 raises them (5)."""
    for old, new in (
        ((before.producer_id, before.epoch), (after.producer_id, after.epoch)),
        (before.owner, after.owner),
    ):
        assert old[0] != new[0] or old[1] <= new[1], f"{who}: epoch {old[1]} of {old[0]} becomes {new[1]}"
    if after.owner[0] != before.owner[0]:
        assert before.owner[1] + 1 >= EPOCH_MAX, f"{who}: another producer id before the epoch is exhausted"
        assert after.owner[1] == MEMBER_EPOCH, f"{who}: a new producer id begins with epoch {after.owner[1]}"
    if after.is_ending and after.version >= 2:
        assert after.epoch > before.epoch, f"{who}: markers with the epoch of the batches"
        assert after.owner != before.owner, f"{who}: the end does not raise the epoch"
    if before.is_ending:
        assert after.owner == before.owner, f"{who}: the owner changes when its transaction completes"
    if after.owner != before.owner:
        expected = (before.owner, NOBODY, last_known(before) if was_aborted_for_owner(after) else NOBODY)
        assert after.previous in expected, f"{who}: {before.owner} was before, not {after.previous}"


def _check_kept(who: str, before: Transaction, after: Transaction) -> None:
    """An open transaction loses nothing; a prepared one does not change."""
    assert before.producer_id == after.producer_id, f"{who}: another producer id in a transaction"
    assert after.is_ending or before.epoch == after.epoch, f"{who}: another epoch in a transaction"
    assert before.started_ms == after.started_ms, f"{who}: begins twice"
    assert before.partitions <= after.partitions, f"{who}: loses partitions"
    remaining = {member.producer_id: member for member in after.members}
    for member in before.members:
        assert member.producer_id in remaining, f"{who}: loses member {member.producer_id}"
        assert member.partitions <= remaining[member.producer_id].partitions, f"{who}: loses partitions of a member"
    if before.is_prepared or after.is_ending:
        assert (before.partitions, before.members) == (after.partitions, after.members), f"{who}: a change too late"
