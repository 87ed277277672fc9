"""Read-only queries of a state. Pure; the shell passes the committed state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.coordinator.classic_group import ClassicGroup, ClassicState
from tidelog.coordinator.classic_requests import ClassicDetails
from tidelog.coordinator.offsets import check_fetch
from tidelog.coordinator.records import sorted_partitions
from tidelog.coordinator.requests import STATIC_LEAVE_EPOCH, Committed, GroupDetails, GroupSummary, MemberSummary
from tidelog.coordinator.state import CoordinatorState, Group
from tidelog.model.group_errors import GroupIdNotFoundError
from tidelog.model.ids import PartitionId
from tidelog.model.maps import sorted_items

NOT_COMMITTED = Committed(-1)


def fetch_offsets(
    state: CoordinatorState,
    group_id: str,
    partitions: Iterable[PartitionId] | None = None,
    *,
    member_id: str = "",
    member_epoch: int | None = None,
) -> dict[PartitionId, Committed]:
    """What the group has committed, of these partitions or (None) of all; -1 where it has nothing.

    With a member epoch it is a member's request, rejected if this state does not know it so: UNKNOWN_MEMBER_ID,
    STALE_MEMBER_EPOCH (a consumer group), ILLEGAL_GENERATION (a classic one). A group that does not exist has nothing.
    """
    group = state.group(group_id)
    if member_epoch is not None:
        check_fetch(group, group_id, member_id, member_epoch)
    held = {} if group is None else group.offsets
    wanted = sorted_partitions(held) if partitions is None else partitions
    found: dict[PartitionId, Committed] = {}
    for partition in wanted:
        value = held.get(partition)
        found[partition] = (
            NOT_COMMITTED
            if value is None
            else Committed(value.offset, value.leader_epoch, value.metadata, value.commit_ms)
        )
    return found


def unstable_partitions(
    state: CoordinatorState, group_id: str, partitions: Iterable[PartitionId] | None = None
) -> list[PartitionId]:
    """Return those of these partitions, or (None) of all, for which an open transaction has an offset."""
    group = state.group(group_id)
    if group is None:
        return []
    wanted = sorted_partitions(group.unstable) if partitions is None else partitions
    return [partition for partition in wanted if partition in group.unstable]


def group_state(group: Group) -> str:
    """ "empty", "reconciling" or "stable"; for a classic group the stored state: `ClassicGroup` has the live one."""
    if not group.member_count:
        return "empty"
    for member_id, current in group.currents.items():
        target = group.targets.get(member_id)
        # A static member that left for a restart (epoch -2) takes nothing over: the group does not wait for it.
        is_away = current.epoch == STATIC_LEAVE_EPOCH
        is_under_way = bool(current.revoking) or current.is_joining
        if not is_away and (is_under_way or (target is not None and current.assigned != target.partitions)):
            return "reconciling"
    return "stable"


def summary_of(group_id: str, group: Group) -> GroupSummary:
    return GroupSummary(group_id, group.kind, group_state(group), group.member_count, _protocol_type(group))


def describe_group(state: CoordinatorState, group_id: str) -> GroupDetails:
    """Raises `GroupIdNotFoundError`. Assignments of classic members are opaque bytes and are not shown here."""
    group = state.group(group_id)
    if group is None:
        raise GroupIdNotFoundError(f"there is no group {group_id!r} here")
    return GroupDetails(
        group_id,
        group.kind,
        group_state(group),
        group.epoch,
        group.epoch,
        _assignor(group),
        tuple(_members(group)),
    )


def describe_classic(state: CoordinatorState, group_id: str, held: ClassicGroup | None) -> ClassicDetails:
    """`held` is the group in its rounds, if it is there: it knows more than the state. A group of offsets alone is an
    empty classic one. `GroupIdNotFoundError`, also of a consumer group."""
    group = state.group(group_id)
    if held is not None and (held.members or group is None):
        is_stable = held.state is ClassicState.STABLE
        members = tuple(each.stored(held.protocol, is_shown=is_stable) for each in held.members.values())
        protocol = held.protocol if is_stable else ""
        return ClassicDetails(group_id, held.state.value, held.protocol_type, protocol, members)
    if group is None:
        raise GroupIdNotFoundError(f"there is no group {group_id!r} here")
    if group.kind == "consumer":
        raise GroupIdNotFoundError(f"group {group_id!r} is not a classic group")
    return ClassicDetails(group_id, ClassicState.EMPTY.value, _protocol_type(group), "", ())


def _protocol_type(group: Group) -> str:
    if group.info is not None:
        return "consumer"
    return "" if group.classic is None else group.classic.protocol_type


def _assignor(group: Group) -> str:
    if group.info is not None:
        return group.info.assignor
    return "" if group.classic is None else group.classic.protocol


def _members(group: Group) -> Iterator[MemberSummary]:
    for member_id, member in sorted_items(group.members):
        current, target = group.currents.get(member_id), group.targets.get(member_id)
        yield MemberSummary(
            member_id,
            member.instance_id,
            member.rack,
            member.client_id,
            member.client_host,
            0 if current is None else current.epoch,
            member.topics,
            member.pattern,
            tuple(sorted_partitions(() if current is None else current.assigned | current.revoking)),
            tuple(sorted_partitions(() if target is None else target.partitions)),
            member.is_classic,
        )
    for each in () if group.classic is None else group.classic.members:
        generation = 0 if group.classic is None else group.classic.generation
        yield MemberSummary(
            each.member_id, each.instance_id, "", each.client_id, each.client_host, generation, (), "", (), (), True
        )
