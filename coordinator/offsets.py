"""Commits, deletes and expires the offsets of groups. Pure.

Who may commit (`check_commit`), for a group that has members:
- a member of a consumer group with its epoch, for every partition that it holds, and for those that the group does not
  read. A partition that it revoked may have another owner now, or may be about to get one. A late commit would
  overwrite the newer offset, so that partition gets STALE_MEMBER_EPOCH. With its previous epoch it may commit only
  for partitions that it has held since then: its commit may have been sent before the reply with the new epoch arrived.
- a classic member of a consumer group likewise; it gets ILLEGAL_GENERATION for the request, or REBALANCE_IN_PROGRESS
  for a partition.
- a member of a classic group with the stored generation (ILLEGAL_GENERATION), or with its member epoch if the group was
  a consumer group and the member has not joined a generation since.
- nobody else (UNKNOWN_MEMBER_ID): a client that is no member may commit only while the group has no members.

A negative offset is stored as it is, as Kafka stores it: clients read it as "nothing committed", or as a position of
their own (kafkajs: -1 latest, -2 earliest).

An offset that is committed while a transaction has a pending one (`pending_offsets`) for the same partition is newer
than it: it is numbered (`order`), and the end of the transaction does not replace it.

Offsets of a group without members expire `retention_ms` after it became empty and after they were committed; those of a
group that never had members (a "simple" one) after their commit. A group that has been empty that long and
has no offsets left is deleted with them. Offsets of deleted topics expire at once. An offset for whose partition an
offset is pending does not expire, and its group is not deleted by expiry. An operator's deletion drops both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.records import (
    ClassicValue,
    CurrentValue,
    GroupRecord,
    Kind,
    OffsetValue,
    Partitions,
    classic_key,
    group_key,
    member_key,
    offset_key,
    pending_key,
    sorted_partitions,
)
from tidelog.coordinator.requests import (
    CommitOffsets,
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    OffsetToCommit,
    PartitionErrors,
)
from tidelog.coordinator.state import CoordinatorState, Group, apply_to_group
from tidelog.coordinator.subscriptions import Resolver
from tidelog.model.errors import TidelogError
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    GroupIdNotFoundError,
    GroupSubscribedError,
    IllegalGenerationError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    OffsetMetadataTooLargeError,
    RebalanceInProgressError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId

Records = list[GroupRecord]


# ---- Committing


def commit(state: CoordinatorState, request: CommitOffsets, limits: GroupLimits) -> tuple[Records, PartitionErrors]:
    if not request.group or len(request.group) > limits.name_length_max:
        raise InvalidGroupIdError(f"a group id has 1 to {limits.name_length_max} characters")
    group = state.group(request.group) or Group(request.group)
    current = check_commit(group, request.member_id, request.member_epoch, request.instance_id)
    reply = check_offsets(group, request, current, limits)
    records: Records = []
    for partition, wanted in request.offsets.items():
        if reply[partition] is None:
            value = OffsetValue(
                offset=wanted.offset,
                leader_epoch=wanted.leader_epoch,
                metadata=wanted.metadata,
                commit_ms=request.now_ms,
                order=next_order(group, partition) if partition in group.unstable else 0,
            )
            records.append(GroupRecord(offset_key(request.group, partition), value))
    return records, reply


def next_order(group: Group, partition: PartitionId) -> int:
    """Return the order of a write that comes after all others for the partition."""
    committed = group.offsets.get(partition)
    orders = [group.pending[each].offsets[partition].order for each in group.unstable.get(partition, ())]
    return 1 + max(*orders, 0 if committed is None else committed.order, 0)


def check_offsets(
    group: Group, request: CommitOffsets, current: CurrentValue | None, limits: GroupLimits
) -> PartitionErrors:
    """Return for each partition why `current`, from `check_commit`, may not commit it; None if it may."""
    reply: PartitionErrors = {}
    # Partitions of all targets. Computed lazily: only a commit for an unowned partition needs them.
    targeted = cache(lambda: frozenset().union(*(target.partitions for target in group.targets.values())))
    for partition, wanted in request.offsets.items():
        error = _metadata_error(wanted, limits)
        if error is None and current is not None:
            error = _stale_epoch_error(group, request, current, partition, targeted)
            if error is not None and group.members[request.member_id].is_classic:
                error = RebalanceInProgressError(str(error))  # classic clients do not know STALE_MEMBER_EPOCH
        reply[partition] = error
    return reply


def check_commit(group: Group, member_id: str, member_epoch: int, instance_id: str = "") -> CurrentValue | None:
    """Return the member of a consumer group that commits; None for a member of a classic group and for a client that is
    no member. Raises if it may not commit."""
    if group.classic is not None and group.classic.members:
        _check_classic(group, member_id, member_epoch, instance_id)
        return None
    if not group.members:
        if member_id or member_epoch >= 0:
            raise UnknownMemberIdError(f"{member_id!r} is no member of group {group.group_id!r}, which has none")
        return None
    _check_instance(group, member_id, instance_id)
    current = group.currents.get(member_id)
    if current is None:
        raise UnknownMemberIdError(
            f"{member_id!r} is no member of group {group.group_id!r}; while it has members only they commit"
        )
    if member_epoch < 0 or member_epoch not in (current.epoch, current.previous_epoch):
        rejection = IllegalGenerationError if group.members[member_id].is_classic else StaleMemberEpochError
        raise rejection(
            f"member {member_id!r} of group {group.group_id!r} comes with epoch {member_epoch}; it is {current.epoch}"
        )
    return current


def check_fetch(group: Group | None, group_id: str, member_id: str, member_epoch: int) -> None:
    """Raises unless the group has the member in this epoch. A client without membership (no id, epoch -1) may fetch."""
    if not member_id and member_epoch < 0:
        return
    if group is None or not group.member_count:
        raise UnknownMemberIdError(f"{member_id!r} is no member of group {group_id!r}, which has none")
    check_commit(group, member_id, member_epoch)


def _check_instance(group: Group, member_id: str, instance_id: str) -> None:
    place = group.instances.get(instance_id) if instance_id else None
    if place is not None and place != member_id:
        raise FencedInstanceIdError(
            f"another member has taken the place of {member_id!r} under the instance id {instance_id!r}"
        )


def _check_classic(group: Group, member_id: str, generation: int, instance_id: str) -> None:
    assert group.classic is not None, "asked of classic groups"
    for member in group.classic.members:
        if instance_id and member.instance_id == instance_id and member.member_id != member_id:
            raise FencedInstanceIdError(
                f"another member has taken the place of {member_id!r} under the instance id {instance_id!r}"
            )
    found = next((member for member in group.classic.members if member.member_id == member_id), None)
    if found is None:
        raise UnknownMemberIdError(f"{member_id!r} is no member of group {group.group_id!r}")
    present = found.epoch if found.epoch >= 0 else group.classic.generation
    if generation != present:
        raise IllegalGenerationError(
            f"generation {generation} of group {group.group_id!r} is not the present one, {present}"
        )


def _metadata_error(wanted: OffsetToCommit, limits: GroupLimits) -> TidelogError | None:
    if len(wanted.metadata.encode()) > limits.offset_metadata_bytes_max:
        return OffsetMetadataTooLargeError(
            f"metadata of an offset has at most {limits.offset_metadata_bytes_max} bytes"
        )
    return None


def _stale_epoch_error(
    group: Group,
    request: CommitOffsets,
    current: CurrentValue,
    partition: PartitionId,
    targeted: Callable[[], Partitions],
) -> TidelogError | None:
    owner = group.owners.get(partition)
    if owner is not None and owner != request.member_id:
        return StaleMemberEpochError(f"partition {partition.partition} belongs to another member now")
    if owner is None and partition in targeted():
        return StaleMemberEpochError(f"partition {partition.partition} is on its way to its next owner")
    if request.member_epoch != current.epoch and (owner is None or partition in current.gained):
        return StaleMemberEpochError(
            f"partition {partition.partition} has changed hands since epoch {request.member_epoch};"
            f" the member's epoch is {current.epoch}"
        )
    return None


# ---- Deletion and expiry


def delete(state: CoordinatorState, request: DeleteOffsets, limits: GroupLimits) -> tuple[Records, PartitionErrors]:
    group = state.group(request.group)
    if group is None:
        raise GroupIdNotFoundError(f"there is no group {request.group!r} here")
    resolver = Resolver(request.view)
    for member in group.members.values():
        resolver.of(member)
    if group.classic is not None and group.classic.members and not group.classic.topics:
        raise NonEmptyGroupError(f"group {request.group!r} has members, and what they read is not known here")
    classic = () if group.classic is None or not group.classic.members else group.classic.topics
    reply: PartitionErrors = {}
    records: Records = []
    for partition in request.partitions:
        shape = request.view.by_id(partition.topic_id)
        is_read = partition.topic_id in resolver.topics or (shape is not None and shape.name in classic)
        reply[partition] = (
            GroupSubscribedError(f"members of group {request.group!r} read that topic") if is_read else None
        )
        if not is_read:
            records += _tombstones_of(group, partition)
    after = apply_to_group(group, records)
    if records and after.has_no_records:
        # The group itself stays, empty, until it is deleted or expires.
        empty = ClassicValue(generation=0, empty_since_ms=request.now_ms)
        records.append(GroupRecord(classic_key(request.group), empty))
    return records, reply


def delete_group(state: CoordinatorState, request: DeleteGroup, limits: GroupLimits) -> tuple[Records, None]:
    group = state.group(request.group)
    if group is None:
        raise GroupIdNotFoundError(f"there is no group {request.group!r} here")
    if group.member_count:
        raise NonEmptyGroupError(f"group {request.group!r} has {group.member_count} members")
    return [
        *(
            record
            for partition in sorted_partitions({*group.offsets, *group.unstable})
            for record in _tombstones_of(group, partition)
        ),
        *_tombstones(group),
    ], None


def _tombstones_of(group: Group, partition: PartitionId) -> Iterator[GroupRecord]:
    """Yield tombstones of the partition's offset and of those that are pending for it."""
    if partition in group.offsets:
        yield GroupRecord(offset_key(group.group_id, partition), None)
    for producer_id in group.unstable.get(partition, ()):
        yield GroupRecord(pending_key(group.group_id, producer_id, partition), None)


def _tombstones(group: Group) -> Iterator[GroupRecord]:
    """Yield tombstones of all keys of the group except its offsets."""
    # A former leader of another version may have left keys of members that do not exist any more.
    for kind, parts in ((Kind.MEMBER, group.members), (Kind.TARGET, group.targets), (Kind.CURRENT, group.currents)):
        for member_id in sorted(parts):
            yield GroupRecord(member_key(kind, group.group_id, member_id), None)
    if group.info is not None:
        yield GroupRecord(group_key(group.group_id), None)
    if group.classic is not None:
        yield GroupRecord(classic_key(group.group_id), None)


def expire(state: CoordinatorState, request: ExpireOffsets, limits: GroupLimits) -> tuple[Records, bool]:
    records: Records = []
    for record in _expired(state, request):
        if len(records) == limits.expired_per_decision_max:
            return records, True
        records.append(record)
    return records, False


def _expired(state: CoordinatorState, request: ExpireOffsets) -> Iterator[GroupRecord]:
    horizon = request.now_ms - request.retention_ms
    for group_id in sorted(state.groups) if request.groups is None else request.groups:
        group = state.group(group_id)
        if group is None:
            continue
        is_over = not group.member_count and group.empty_since_ms <= horizon
        if not is_over and not request.gone:
            continue
        expired = [
            partition
            for partition, value in group.offsets.items()
            if (is_over and value.commit_ms <= horizon and partition not in group.unstable)
            or partition.topic_id in request.gone
        ]
        expired += [
            partition
            for partition in group.unstable
            if partition.topic_id in request.gone and partition not in group.offsets
        ]
        for partition in sorted_partitions(expired):
            yield from _tombstones_of(group, partition)
        gone = frozenset(expired)
        if is_over and gone.issuperset(group.offsets) and gone.issuperset(group.unstable):
            yield from _tombstones(group)
