"""Changes of a consumer group that several requests share: collected records, a new target, a static member. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tidelog.coordinator.assignors import ASSIGNORS, DEFAULT_ASSIGNOR, Subscriber, assign
from tidelog.coordinator.records import (
    CurrentValue,
    GroupRecord,
    GroupValue,
    Key,
    Kind,
    MemberValue,
    TargetValue,
    Value,
    classic_key,
    group_key,
    member_key,
)
from tidelog.coordinator.requests import JOIN_EPOCH, STATIC_LEAVE_EPOCH
from tidelog.coordinator.state import Group, apply_to_group
from tidelog.coordinator.subscriptions import Resolver, group_digest
from tidelog.model.maps import Map, sorted_items

Records = list[GroupRecord]
MEMBER_KINDS = (Kind.MEMBER, Kind.TARGET, Kind.CURRENT)
BORN = CurrentValue(epoch=JOIN_EPOCH)


class GroupChange:
    """A group and the records that changed it so far."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._last: dict[Key, GroupRecord] = {}

    @property
    def records(self) -> Records:
        """The last record of each key, in order of creation."""
        return list(self._last.values())

    def add(self, records: Iterable[GroupRecord]) -> None:
        records = list(records)
        self.group = apply_to_group(self.group, records)
        for record in records:
            self._last.pop(record.key, None)
            self._last[record.key] = record

    def put(self, kind: Kind, member_id: str, value: Value | None) -> GroupRecord:
        return GroupRecord(member_key(kind, self.group.group_id, member_id), value)


def replace_static_member(change: GroupChange, former_id: str, member_id: str, value: MemberValue) -> MemberValue:
    """Give a new member the target and partitions of the former member with its instance id; return the former."""
    group = change.group
    before, target, current = group.members[former_id], group.targets[former_id], group.currents[former_id]
    inherited = replace(BORN, epoch=group.epoch, assigned=current.assigned)
    change.add(change.put(kind, former_id, None) for kind in MEMBER_KINDS)
    change.add(
        (
            change.put(Kind.MEMBER, member_id, value),
            change.put(Kind.TARGET, member_id, target),
            change.put(Kind.CURRENT, member_id, inherited),
        )
    )
    return before


def needs_new_target(group: Group, before: MemberValue, after: MemberValue, changed: Group) -> bool:
    """Return whether the change of a member requires a new target."""
    if (before.topics, before.pattern, before.rack) != (after.topics, after.pattern, after.rack):
        return True
    return group.info is None or chosen_assignor(changed.members) != group.info.assignor


def chosen_assignor(members: Map[str, MemberValue]) -> str:
    """Return the assignor that most members request; on a tie the default, then by name."""
    votes: dict[str, int] = {}
    for member in members.values():
        if member.assignor in ASSIGNORS:
            votes[member.assignor] = votes.get(member.assignor, 0) + 1
    if not votes:
        return DEFAULT_ASSIGNOR
    return min(votes, key=lambda name: (-votes[name], name != DEFAULT_ASSIGNOR, name))


def next_epoch(change: GroupChange) -> None:
    """Begin a new group epoch with the same targets, for one member: the epochs of others follow only when their own
    assignment changes."""
    assert change.group.info is not None, "a consumer group"
    info = replace(change.group.info, epoch=change.group.epoch + 1)
    change.add([GroupRecord(group_key(change.group.group_id), info)])


def retarget(change: GroupChange, resolver: Resolver, *, now_ms: int = -1) -> None:
    """Begin a new group epoch with a target for each member. `now_ms`: `empty_since_ms` of an empty group."""
    group = change.group
    epoch = group.epoch + 1
    assignor = chosen_assignor(group.members)
    members = dict(sorted_items(group.members))
    subscribers = {
        member_id: Subscriber(resolver.of(member), member.rack, member.instance_id)
        for member_id, member in members.items()
    }
    previous = {member_id: group.targets[member_id].partitions for member_id in members}
    made = assign(assignor, resolver.topics, subscribers, previous)
    info = replace(
        group.info or GroupValue(epoch=0),
        epoch=epoch,
        assignor=assignor,
        topics_digest=group_digest(members, resolver),
        empty_since_ms=-1 if members else now_ms,
    )
    records: Records = []
    if group.classic is not None:
        records.append(GroupRecord(classic_key(group.group_id), None))
    records.append(GroupRecord(group_key(group.group_id), info))
    for member_id, partitions in made.items():
        if partitions is not previous[member_id]:  # `assign` returns the same object for an equal set
            target = TargetValue(partitions=partitions, extra=group.targets[member_id].extra)
            records.append(change.put(Kind.TARGET, member_id, target))
        current = group.currents[member_id]
        if current.epoch == STATIC_LEAVE_EPOCH and not current.assigned <= partitions:
            reduced = replace(current, assigned=current.assigned & partitions)
            records.append(change.put(Kind.CURRENT, member_id, reduced))
    change.add(records)
