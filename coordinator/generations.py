"""What is stored of classic groups: the generations that their leaders have dealt, and that a group has one kind."""

from __future__ import annotations

from tidelog.coordinator.classic_requests import GroupMigratedError, StoreGeneration
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.records import GroupRecord, classic_key, group_key
from tidelog.coordinator.state import CoordinatorState, Group
from tidelog.model.group_errors import IllegalGenerationError


def check_kind(state: CoordinatorState, group_id: str) -> None:
    """Raises while the group is a consumer group with members."""
    group = state.group(group_id)
    if group is not None and group.members:
        raise GroupMigratedError(f"group {group_id!r} is a consumer group with {len(group.members)} members")


def store_generation(
    state: CoordinatorState, request: StoreGeneration, limits: GroupLimits
) -> tuple[list[GroupRecord], None]:
    check_kind(state, request.group)
    group = state.group(request.group) or Group(request.group)
    if request.value.generation < group.epoch:
        raise IllegalGenerationError(f"generation {request.value.generation} of group {request.group!r} is over")
    records = [GroupRecord(classic_key(request.group), request.value)]
    if group.info is not None:
        records.append(GroupRecord(group_key(request.group), None))
    return records, None
