"""Offsets of groups that transactions commit. Pure.

A pending offset is kept by (group, producer id, partition). All those of a producer are of its open transaction, which
the transaction coordinator knows to write to this partition of `__consumer_offsets` (`number`). The marker of the
transaction turns them into offsets or drops them, in one decision for all groups, and leaves a fence:

    what comes                              fence         pending          result
    commit, epoch below                     or            either           INVALID_PRODUCER_EPOCH
    commit, epoch or number above                         some             CONCURRENT_TRANSACTIONS
    commit, number below                                  some             INVALID_TXN_STATE
    commit, number not above that of the    same epoch    none             INVALID_TXN_STATE
    commit, number not known                any           none             UnverifiedTransactionError
    marker, epoch below                     or            either           INVALID_PRODUCER_EPOCH
    marker, same epoch, strict                            some             INVALID_PRODUCER_EPOCH
    marker, same epoch, number below                      some             INVALID_PRODUCER_EPOCH
    marker of an older coordinator          any           any              TRANSACTION_COORDINATOR_FENCED
    marker, repeated                        equal         none             nothing changes

The newest write for a partition wins, as in Kafka: a marker does not replace an offset that was committed after the
pending one (`OffsetValue.order`).

Limits: `PENDING_BYTES_MAX` of one producer, so that its marker fits one decision; `GroupLimits.fences_max`. Nothing
scans all fences in one turn: a full table forgets the oldest of some.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.offsets import check_commit, check_offsets, next_order
from tidelog.coordinator.records import (
    FenceValue,
    GroupRecord,
    OffsetValue,
    PendingValue,
    fence_key,
    offset_key,
    pending_key,
    sorted_partitions,
)
from tidelog.coordinator.requests import CommitPendingOffsets, EndPendingOffsets, ForgetFences, PartitionErrors
from tidelog.coordinator.state import PENDING_BYTES_MAX, CoordinatorState, Group, pending_size
from tidelog.model.errors import (
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    PolicyViolationError,
    TransactionCoordinatorFencedError,
)
from tidelog.model.group_errors import InvalidGroupIdError
from tidelog.model.ids import PartitionId
from tidelog.model.transaction_errors import ConcurrentTransactionsError

Records = list[GroupRecord]

FENCES_SAMPLED = 1_000
FENCES_DROPPED = 50
"""Of a full table: some 3 ms for every 50 markers."""


class UnverifiedTransactionError(InvalidTransactionStateError):
    """The producer has no pending offsets here: its coordinator has to be asked first."""


# ---- Committing


def commit(
    state: CoordinatorState, request: CommitPendingOffsets, limits: GroupLimits
) -> tuple[Records, PartitionErrors]:
    if not request.group or len(request.group) > limits.name_length_max:
        raise InvalidGroupIdError(f"a group id has 1 to {limits.name_length_max} characters")
    group = state.group(request.group) or Group(request.group)
    is_fenced = bool(request.member_id or request.instance_id) or request.member_epoch >= 0
    current = check_commit(group, request.member_id, request.member_epoch, request.instance_id) if is_fenced else None
    number = _check_producer(state, request)
    reply = check_offsets(group, request, current, limits)
    records: Records = []
    for partition, wanted in request.offsets.items():
        if reply[partition] is None:
            value = PendingValue(
                offset=wanted.offset,
                epoch=request.epoch,
                number=number,
                leader_epoch=wanted.leader_epoch,
                metadata=wanted.metadata,
                commit_ms=request.now_ms,
                order=next_order(group, partition),
            )
            records.append(GroupRecord(pending_key(request.group, request.producer_id, partition), value))
    _check_size(state, group, request.producer_id, records)
    return records, reply


def _check_producer(state: CoordinatorState, request: CommitPendingOffsets) -> int:
    """Return the number of the producer's transaction; raise if it is not, or cannot be, the open one."""
    producer_id, epoch, number = request.producer_id, request.epoch, request.number
    fence, pending = state.fences.get(producer_id), state.open_transaction(producer_id)
    known = max(-1 if fence is None else fence.epoch, -1 if pending is None else pending.epoch)
    if epoch < known:
        raise InvalidProducerEpochError(f"epoch {epoch} of producer {producer_id} is below {known}")
    if pending is not None:
        if epoch > pending.epoch or (number is not None and number > pending.number):
            raise ConcurrentTransactionsError(
                f"transaction {pending.number} of producer {producer_id} is not ended here yet: retry"
            )
        if number is not None and number < pending.number:
            raise InvalidTransactionStateError(f"transaction {number} of producer {producer_id} has ended")
        return pending.number
    if number is None:
        raise UnverifiedTransactionError(f"producer {producer_id} has no open transaction here")
    if fence is not None and number <= fence.number:
        raise InvalidTransactionStateError(f"transaction {number} of producer {producer_id} has ended")
    return number


def _check_size(state: CoordinatorState, group: Group, producer_id: int, records: Records) -> None:
    """Raise `PolicyViolationError` if one decision could not end what is pending with these records."""
    held = group.pending.get(producer_id)
    size = sum(state.groups[name].pending[producer_id].size for name in state.open.get(producer_id, ()))
    for record in records:
        assert isinstance(record.value, PendingValue), "all records are pending offsets"
        assert record.key.partition is not None, "the key of a pending offset names its partition"
        former = None if held is None else held.offsets.get(record.key.partition)
        size += pending_size(group.group_id, record.value.metadata)
        size -= 0 if former is None else pending_size(group.group_id, former.metadata)
    if records and size > PENDING_BYTES_MAX:
        raise PolicyViolationError(
            f"the offsets of one transaction would take {size} bytes, more than {PENDING_BYTES_MAX}: commit fewer"
            " partitions in one transaction, or with less metadata"
        )


# ---- The end of a transaction


def end(state: CoordinatorState, request: EndPendingOffsets, limits: GroupLimits) -> tuple[Records, None]:
    producer_id = request.producer_id
    _check_marker(state, request)
    records: Records = []
    for group_id in state.open.get(producer_id, ()):
        group = state.groups[group_id]
        for partition in sorted_partitions(group.pending[producer_id].offsets):
            records += _ended(group, producer_id, partition, is_commit=request.is_commit)
    fence = state.fences.get(producer_id)
    epoch, number, coordinator_epoch = request.epoch, request.number, request.coordinator_epoch
    if fence is not None:
        number, coordinator_epoch = max(number, fence.number), max(coordinator_epoch, fence.coordinator_epoch)
        if not records and (epoch, number, coordinator_epoch) == (fence.epoch, fence.number, fence.coordinator_epoch):
            return [], None
    elif len(state.fences) >= limits.fences_max:
        records += _oldest_fences(state, min(FENCES_DROPPED, limits.expired_per_decision_max))
    value = FenceValue(epoch=epoch, number=number, coordinator_epoch=coordinator_epoch, updated_ms=request.now_ms)
    records.append(GroupRecord(fence_key(producer_id), value))
    return records, None


def _check_marker(state: CoordinatorState, request: EndPendingOffsets) -> None:
    producer_id, epoch, number = request.producer_id, request.epoch, request.number
    fence, pending = state.fences.get(producer_id), state.open_transaction(producer_id)
    known = max(-1 if fence is None else fence.epoch, -1 if pending is None else pending.epoch)
    if epoch < known:
        raise InvalidProducerEpochError(f"a marker of producer {producer_id} has epoch {epoch}, below {known}")
    if fence is not None and request.coordinator_epoch < fence.coordinator_epoch:
        raise TransactionCoordinatorFencedError(
            f"a marker of producer {producer_id} has coordinator epoch {request.coordinator_epoch}, below"
            f" {fence.coordinator_epoch}"
        )
    if pending is None or epoch > pending.epoch:
        return
    if request.is_strict or number < pending.number:
        raise InvalidProducerEpochError(
            f"a marker of producer {producer_id} with epoch {epoch} comes late: transaction {pending.number} is open"
        )


def _ended(group: Group, producer_id: int, partition: PartitionId, *, is_commit: bool) -> Iterator[GroupRecord]:
    yield GroupRecord(pending_key(group.group_id, producer_id, partition), None)
    pending, committed = group.pending[producer_id].offsets[partition], group.offsets.get(partition)
    if is_commit and (committed is None or committed.order < pending.order):
        value = OffsetValue(
            offset=pending.offset,
            leader_epoch=pending.leader_epoch,
            metadata=pending.metadata,
            commit_ms=pending.commit_ms,
            order=0 if group.unstable[partition] == (producer_id,) else pending.order,
        )
        yield GroupRecord(offset_key(group.group_id, partition), value)


# ---- Forgetting


def _oldest_fences(state: CoordinatorState, count: int) -> Iterator[GroupRecord]:
    sample = islice(state.fences.items(), FENCES_SAMPLED)
    for _, producer_id in heapq.nsmallest(count, ((fence.updated_ms, producer_id) for producer_id, fence in sample)):
        yield GroupRecord(fence_key(producer_id), None)


def is_old_fence(state: CoordinatorState, producer_id: int, request: ForgetFences) -> bool:
    """Return whether the fence may be forgotten."""
    fence = state.fences.get(producer_id)
    is_old = fence is not None and fence.updated_ms + request.retention_ms <= request.now_ms
    return is_old and producer_id not in state.open


def forget_fences(state: CoordinatorState, request: ForgetFences, limits: GroupLimits) -> tuple[Records, bool]:
    named = state.fences if request.ids is None else request.ids
    old = sorted(producer_id for producer_id in named if is_old_fence(state, producer_id, request))
    count = limits.expired_per_decision_max
    return [GroupRecord(fence_key(producer_id), None) for producer_id in old[:count]], len(old) > count
