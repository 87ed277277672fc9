"""Deliberate defects of transactions, each of a few lines: of the coordinator, of the leaders of partitions, of groups'
offsets, of readers and of the producer. The simulator has to notice every one.

Some change decisions that `invariants.check_step` would reject: it is switched off with them, since an assertion of the
product is no finding of a checker.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.defects import Defect
from tidelog.client.producer.transactions import _END, Transactions
from tidelog.coordinator import partition_shard, pending_offsets
from tidelog.coordinator.loading import load
from tidelog.coordinator.partition_log import PartitionLog
from tidelog.coordinator.records import GroupRecord, OffsetValue, offset_key, pending_key, sorted_partitions
from tidelog.coordinator.state import CoordinatorState
from tidelog.coordinator.state import apply as apply_groups
from tidelog.coordinator.transactions import ending, initializing, machine
from tidelog.coordinator.transactions import shard as transaction_shard
from tidelog.coordinator.transactions.identities import is_current, raised
from tidelog.coordinator.transactions.marker_sender import MarkerSender
from tidelog.coordinator.transactions.peers import TRANSACTIONS_TOPIC
from tidelog.coordinator.transactions.queries import due_ms, markers_to_write
from tidelog.coordinator.transactions.shard import TransactionShard
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.log.log import Log
from tidelog.log.producers import ProducerState
from tidelog.log.segment import ActiveSegment
from tidelog.model.errors import InvalidProducerEpochError
from tidelog.model.ids import Offset
from tidelog.model.maps import updated
from tidelog.replication import marker_receiver
from tidelog.replication.marker_receiver import LeaderMarkers
from tidelog.replication.partition_transactions import MarkerAction, PartitionTransactions
from tidelog.rpc.v1 import transactions_pb2 as pb

Patches = tuple[tuple[Any, str, Any], ...]
OPEN = "open: ['"
"""How a run begins to name what is open too long. Only lateness shows some defects: nothing wrong is ever read of a
transaction that never ends, and the promise that breaks is that it does."""


def _on(owner: Any, name: str, replacement: Any) -> Patches:
    return ((owner, name, replacement),)


# Decisions.

_append_at = PartitionLog.append_at


async def _append_without_waiting(self: Any, data: bytes, *, at: Any, epoch: Any) -> None:
    leader = self._leader
    if leader.replica.topic != TRANSACTIONS_TOPIC:
        await _append_at(self, data, at=at, epoch=epoch)
        return
    if not self.is_led or epoch != leader.leader_epoch or at != self.end_offset:
        raise self._not_led()
    end = Offset(leader.append(data, is_coordinator=True).last_offset + 1)
    self._on_commit(at, end)


def _check_nothing(_transactional_id: str, _before: Any, _after: Any) -> None:
    return None


def _raised_if_exhausted(owner: Any, new_producer_id: int) -> Any:
    after = raised(owner, new_producer_id)
    return owner if after[0] == owner[0] else after


def _all_members_commit(transactional_id: str, transaction: Any, *, coordinator_epoch: int) -> Any:
    everybody = tuple(sorted(member.producer_id for member in transaction.members))
    return markers_to_write(
        transactional_id, replace(transaction, committed=everybody), coordinator_epoch=coordinator_epoch
    )


def _former_is_current(transaction: Any, request: Any) -> bool:
    is_current(transaction, request)
    return True


def _due_in_any_state(transaction: Any, limits: Any) -> int | None:
    if transaction.is_ending:
        return int(transaction.started_ms + transaction.timeout_ms)
    return due_ms(transaction, limits)


def _begin_of_any_wait(transaction: Any) -> Any:
    return (transaction.number, transaction.prepared_ms) if transaction.is_open or transaction.is_ending else None


def _due_anyway(self: Any, key: Any) -> None:
    transaction = self.state.get(key)
    if transaction is not None and (transaction.is_open or transaction.is_ending):
        self._host.spawn(self._time_out(key, transaction), name="transaction-timeout")


# Coordinators that move.

_begin = TransactionShard._begin


async def _begin_without_prepared(self: Any, state: TransactionsState) -> None:
    await _begin(self, TransactionsState(updated(state.ids, [(k, None) for k, v in state.ids.items() if v.is_ending])))


async def _begin_without_deadlines(self: Any, state: TransactionsState) -> None:
    await _begin(self, TransactionsState(updated(state.ids, [(k, None) for k, v in state.ids.items() if v.is_open])))


async def _load_without_pending(leading: Any, progress: Any, log_format: Any) -> Any:
    state, end = await load(leading, progress, log_format)
    if isinstance(state, CoordinatorState):
        state = apply_groups(
            state,
            [
                GroupRecord(pending_key(group_id, producer_id, partition), None)
                for group_id, group in sorted(state.groups.items())
                for producer_id, pending in sorted(group.pending.items())
                for partition in sorted_partitions(pending.offsets)
            ],
        )
    return state, end


# Markers.

_decide = PartitionTransactions.decide


def _accept_late(self: Any, marker: Any) -> MarkerAction:
    try:
        return _decide(self, marker)
    except InvalidProducerEpochError:
        self._void(marker.producer_id)
        return MarkerAction.APPEND


_begin_marker = LeaderMarkers._begin


def _answer_at_once(self: Any, marker: Any, marked: Any) -> Any:
    outcome = _begin_marker(self, marker, marked)
    if outcome.leader is None:
        return outcome
    outcome.forget()
    return marker_receiver._Outcome()


_written = MarkerSender._written


def _one_is_enough(self: Any, entry: Any) -> None:
    if entry.ending.left > 0:
        entry.ending.left = 1
        _written(self, entry)


# Leaders of partitions.


def _check_nobody(_self: Any, _transaction: Any, _header: Any) -> None:
    return None


def _all_is_stable(_self: Any, high_watermark: Offset) -> Offset:
    return high_watermark


async def _none_aborted(_self: Any, _start: int, _end: int) -> list[Any]:
    return []


_add_aborted = ActiveSegment.add_aborted


def _forget_some(self: Any, entry: bytes) -> None:
    if sum(entry) % 2:
        _add_aborted(self, entry)


# Offsets of groups.

_check_size = pending_offsets._check_size


def _commit_at_once(state: Any, group: Any, producer_id: int, records: Any) -> None:
    _check_size(state, group, producer_id, records)
    for record in list(records):
        value = OffsetValue(
            offset=record.value.offset,
            leader_epoch=record.value.leader_epoch,
            metadata=record.value.metadata,
            commit_ms=record.value.commit_ms,
            order=record.value.order,
        )
        records.append(GroupRecord(offset_key(record.key.group, record.key.partition), value))


def _any_member(_group: Any, _member_id: str, _member_epoch: int, _instance_id: str = "") -> None:
    return None


# The producer.

_end_commit = Transactions._end_commit


async def _token_afterwards(self: Any, members: Any, token: bytes, end_s: float) -> bool:
    is_committed = await _end_commit(self, members, b"", end_s)
    if token:
        request = pb.EndTransactionRequest(transactional_id=self._id, token=token, is_commit=True, **self._named())
        reply = await self._ask("commit_transaction", _END, request, end_s)
        self._identity = replace(self._identity, id=reply.producer_id, epoch=reply.producer_epoch)
        self.token = token
    return is_committed


_wait_for_records = Transactions._wait_for_records


async def _wait_for_any_outcome(self: Any, name: str, end_s: float, *, is_abort: bool = False) -> None:
    await _wait_for_records(self, name, end_s, is_abort=True)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "markers_before_decision", "transactions",
        "a coordinator acts on a decision, and sends its markers, before the decision is replicated",
        _on(PartitionLog, "append_at", _append_without_waiting),
    ),
    Defect(
        "all_members_commit", "transactions", "members that the owner has not named are committed, too",
        _on(transaction_shard, "markers_to_write", _all_members_commit),
    ),
    Defect(
        "token_afterwards", "transactions", "the token is stored by a request of its own, after the commit",
        _on(Transactions, "_end_commit", _token_afterwards),
    ),
    Defect(
        "stable_past_open", "transactions", "the last stable offset does not stop at an open transaction",
        _on(ProducerState, "last_stable_offset", _all_is_stable),
    ),
    Defect(
        "isolation_ignored", "transactions", "a fetch of committed data gets everything",
        (_on(Log, "last_stable_offset", _all_is_stable)
         + _on(Log, "aborted_transactions", _none_aborted)),
    ),
    Defect(
        "aborted_not_indexed", "transactions", "the index of aborted transactions lacks some",
        _on(ActiveSegment, "add_aborted", _forget_some),
    ),
    Defect(
        "offsets_before_commit", "transactions", "a group's offsets are visible before their transaction commits",
        _on(pending_offsets, "_check_size", _commit_at_once),
    ),
    Defect(
        "offsets_of_anybody", "transactions", "offsets of a member that has lost its partitions are committed",
        _on(pending_offsets, "check_commit", _any_member),
    ),
    Defect(
        "pending_lost_at_load", "transactions", "a new group coordinator does not know the pending offsets",
        _on(partition_shard, "load", _load_without_pending),
    ),
    Defect(
        "epoch_kept_by_end", "transactions", "the end of a transaction does not raise the epoch",
        (_on(ending, "raised", _raised_if_exhausted)
         + _on(machine, "check_step", _check_nothing)),
    ),
    Defect(
        "old_instance_not_fenced", "transactions", "a new instance gets the epoch of the one before",
        (_on(initializing, "raised", _raised_if_exhausted)
         + _on(machine, "check_step", _check_nothing)),
    ),
    Defect(
        "late_end_accepted", "transactions", "a repeated end of a transaction ends the next one",
        _on(ending, "is_current", _former_is_current),
    ),
    Defect(
        "timeout_races_commit", "transactions", "the timeout of a transaction aborts it although its commit is decided",
        (_on(ending, "due_ms", _due_in_any_state)
         + _on(transaction_shard, "_begin_of_wait", _begin_of_any_wait)
         + _on(transaction_shard, "due_ms", _due_in_any_state)
         + _on(TransactionShard, "_due", _due_anyway)
         + _on(machine, "check_step", _check_nothing)),
    ),
    Defect(
        "late_marker_accepted", "transactions", "a leader appends a late marker to the transaction that is open",
        _on(PartitionTransactions, "decide", _accept_late),
    ),
    Defect(
        "marker_not_replicated", "transactions", "a leader confirms a marker that it has alone",
        _on(LeaderMarkers, "_begin", _answer_at_once),
    ),
    Defect(
        "one_marker_is_enough", "transactions", "a transaction is complete when one partition has its marker",
        _on(MarkerSender, "_written", _one_is_enough),
    ),
    Defect(
        "verification_skipped", "transactions", "a leader takes a batch of a transaction without a question",
        _on(PartitionTransactions, "check", _check_nobody),
    ),
    Defect(
        "prepared_dropped_at_move", "transactions", "a new coordinator does not complete what was decided before",
        _on(TransactionShard, "_begin", _begin_without_prepared), late=OPEN,
    ),
    Defect(
        "deadlines_lost_at_move", "transactions", "a new coordinator sets no deadlines for open transactions",
        _on(TransactionShard, "_begin", _begin_without_deadlines), late=OPEN,
    ),
    Defect(
        "commit_of_failed_records", "transactions", "a producer requests a commit although a record has failed",
        _on(Transactions, "_wait_for_records", _wait_for_any_outcome),
    ),
)  # fmt: skip
