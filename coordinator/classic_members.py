"""Members of the classic protocol in a consumer group: JoinGroup, SyncGroup and Heartbeat on its targets. Pure.

The coordinator assigns, as for all members of the group. The generation of a classic member is its member epoch;
members of one group have different ones. No classic member is a group leader here.

    heartbeat  nothing to do                  no error
               its target has changed         REBALANCE_IN_PROGRESS, until it joins
    join       epoch := a new epoch of the group, never used before;  declared := what the member says that it holds
    sync       own := own & declared;  assigned := own & target;  revoking := own - target
               nothing to revoke: assigned |= what is free of the target

Why the join alone gives nothing away. A member that gives up everything before it joins (an eager one) declares
nothing, a cooperative one all that it has. A join may be late: its connection has broken, and the member has joined
again on another one and holds partitions since then. So what is not declared becomes free only with the sync, which
carries the epoch of that very join and so comes from a member that has no other answer. Until then the member owns what
it owned. A cooperative member that has to revoke sees that in the assignment, revokes, and joins again without it.

The reply to a sync is stable until the next join: a repeated sync gets the same reply. Commits carry the epoch of the
last sync, or of the join after it.

The caller has the timers: a member that `is_pending` for longer than its rebalance timeout is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tidelog.coordinator.classic_requests import (
    ClassicJoin,
    ClassicSync,
    GroupMigratedError,
    JoinGroup,
    JoinReply,
    SyncReply,
    check_size,
)
from tidelog.coordinator.consumer_protocol import PROTOCOL_TYPE, Subscription, encode_assignment, parse_subscription
from tidelog.coordinator.group_change import (
    BORN,
    GroupChange,
    Records,
    needs_new_target,
    next_epoch,
    replace_static_member,
    retarget,
)
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.records import NO_PARTITIONS, CurrentValue, Kind, MemberValue, Partitions, TargetValue
from tidelog.coordinator.requests import TopicsView
from tidelog.coordinator.state import CoordinatorState, Group
from tidelog.coordinator.subscriptions import Resolver
from tidelog.model.errors import InvalidRequestError
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    GroupFullError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId

# ---- Requests


def join(state: CoordinatorState, request: ClassicJoin, limits: GroupLimits) -> tuple[Records, JoinReply]:
    group, join_request = _consumer_group(state, request.group), request.join
    _check_join(group, join_request, limits)
    protocol = _protocol(group, join_request.protocols)
    member_id = join_request.member_id or join_request.new_member_id
    change = GroupChange(group)
    declared = _declared(join_request, request.view)
    if declared and join_request.member_id and join_request.member_id not in group.members:
        # It was removed and does not know it yet: others may own what it holds. It gives that up before it joins.
        raise UnknownMemberIdError(
            f"{join_request.member_id!r} is not in group {group.group_id!r} any more: join again"
        )
    before = _enter(change, member_id, join_request, _member_value(join_request, protocol), limits)
    if before is None or needs_new_target(group, before, change.group.members[member_id], change.group):
        retarget(change, Resolver(request.view))
    else:
        next_epoch(change)
    current = change.group.currents[member_id]
    own = current.assigned | current.revoking
    joined = replace(
        current,
        epoch=change.group.epoch,
        previous_epoch=current.previous_epoch if current.is_joining else current.epoch if before is not None else -1,
        gained=NO_PARTITIONS,
        is_joining=True,
        declared=own & declared,
    )
    change.add([change.put(Kind.CURRENT, member_id, joined)])
    return change.records, JoinReply(member_id, joined.epoch, PROTOCOL_TYPE, protocol, "")


def sync(state: CoordinatorState, request: ClassicSync, limits: GroupLimits) -> tuple[Records, SyncReply]:
    group, sync_request = _consumer_group(state, request.group), request.sync
    member, current = check_member(group, sync_request.member_id, sync_request.instance_id, sync_request.generation)
    protocol = _protocol(group, member.classic_protocols)
    for sent, ours in ((sync_request.protocol_type, PROTOCOL_TYPE), (sync_request.protocol, protocol)):
        if sent is not None and sent != ours:
            raise InconsistentGroupProtocolError(f"group {group.group_id!r} uses {ours!r}, not {sent!r}")
    change = GroupChange(group)
    if current.is_joining:
        current = _after_sync(group, sync_request.member_id)
        change.add([change.put(Kind.CURRENT, sync_request.member_id, current)])
    return change.records, SyncReply(PROTOCOL_TYPE, protocol, assignment_of(current.assigned, request.view))


def heartbeat(group: Group | None, group_id: str, member_id: str, instance_id: str, generation: int) -> None:
    """Raises `RebalanceInProgressError` if the member has to join again."""
    if group is None or not group.members:
        raise UnknownMemberIdError(f"group {group_id!r} has no members: join it")
    check_member(group, member_id, instance_id, generation)
    if needs_join(group, member_id):
        raise RebalanceInProgressError(f"the target of {member_id!r} in group {group_id!r} has changed: join again")


# ---- Questions


def needs_join(group: Group, member_id: str) -> bool:
    """Whether a classic member has something to give up, or something to get that is free."""
    current, target = group.currents[member_id], group.targets[member_id].partitions
    if current.is_joining:
        return False
    if current.revoking or not current.assigned <= target:
        return True
    return any(partition not in group.owners for partition in target - current.assigned)


def is_pending(group: Group, member_id: str) -> bool:
    """Whether the group waits for a classic member to join or to sync."""
    return group.currents[member_id].is_joining or needs_join(group, member_id)


def check_member(group: Group, member_id: str, instance_id: str, generation: int) -> tuple[MemberValue, CurrentValue]:
    """The classic member that a request comes from; raises if it is none, or not in this generation."""
    former_id = group.instances.get(instance_id) if instance_id else None
    if former_id is not None and former_id != member_id:
        raise FencedInstanceIdError(f"another member of group {group.group_id!r} has the instance id {instance_id!r}")
    member, current = group.members.get(member_id), group.currents.get(member_id)
    if member is None or current is None or not member.is_classic:
        raise UnknownMemberIdError(f"{member_id!r} is no classic member of group {group.group_id!r}: join again")
    if generation == current.epoch:
        return member, current
    # The generation of a join whose reply was lost, or of a round that the conversion of the group ended.
    if 0 <= generation == current.previous_epoch or current.epoch < generation <= group.epoch:
        raise RebalanceInProgressError(f"{member_id!r} of group {group.group_id!r} has to join again")
    raise IllegalGenerationError(
        f"generation {generation} of {member_id!r} in group {group.group_id!r} is not the present one, {current.epoch}"
    )


def partitions_of(rows: Iterable[tuple[str, Sequence[int]]], view: TopicsView) -> Partitions:
    """Return the ids of those of these partitions that exist."""
    found: list[PartitionId] = []
    for topic, numbers in rows:
        shape = view.by_name(topic)
        if shape is not None:
            found += (PartitionId(shape.topic_id, number) for number in numbers if 0 <= number < shape.partitions)
    return frozenset(found)


def assignment_of(partitions: Partitions, view: TopicsView) -> bytes:
    """As a classic member reads it; without topics that are deleted."""
    topics: dict[str, list[int]] = {}
    for partition in partitions:
        shape = view.by_id(partition.topic_id)
        if shape is not None:
            topics.setdefault(shape.name, []).append(partition.partition)
    return encode_assignment(topics)


# ---- Parts


def _consumer_group(state: CoordinatorState, group_id: str) -> Group:
    group = state.group(group_id)
    if group is None or not group.members:
        raise GroupMigratedError(f"group {group_id!r} is not a consumer group with members any more")
    return group


def _check_join(group: Group, join_request: JoinGroup, limits: GroupLimits) -> None:
    if not limits.session_timeout_min_ms <= join_request.session_timeout_ms <= limits.session_timeout_max_ms:
        raise InvalidSessionTimeoutError(
            f"a session timeout of {join_request.session_timeout_ms} ms is outside of {limits.session_timeout_min_ms}"
            f" to {limits.session_timeout_max_ms} ms"
        )
    check_size(join_request, limits)
    if join_request.protocol_type != PROTOCOL_TYPE or not join_request.protocols:
        raise InconsistentGroupProtocolError(
            f"group {group.group_id!r} is a consumer group: its members have the protocol type {PROTOCOL_TYPE!r},"
            f" not {join_request.protocol_type!r}, and at least one protocol"
        )


def _protocol(group: Group, protocols: Sequence[tuple[str, bytes]]) -> str:
    """Return the protocol of the reply: the one of the classic group that this group was, if the member supports it, or
    the one that the member prefers."""
    before = "" if group.info is None else group.info.classic_protocol
    return next((name for name, _ in protocols if name == before), protocols[0][0])


def _member_value(join_request: JoinGroup, protocol: str) -> MemberValue:
    try:
        subscription = parse_subscription(dict(join_request.protocols)[protocol])
    except InvalidRequestError as error:
        raise InconsistentGroupProtocolError(f"protocol {protocol!r}: {error}") from error
    return MemberValue(
        instance_id=join_request.instance_id,
        rack=subscription.rack,
        client_id=join_request.client_id,
        client_host=join_request.client_host,
        topics=tuple(sorted(set(subscription.topics))),
        session_timeout_ms=join_request.session_timeout_ms,
        rebalance_timeout_ms=join_request.rebalance_timeout_ms or join_request.session_timeout_ms,
        classic_protocols=join_request.protocols,
    )


def _declared(join_request: JoinGroup, view: TopicsView) -> Partitions:
    """Return what the member reports as owned under any protocol: a claim of too much takes nothing from others."""
    found = NO_PARTITIONS
    for _, metadata in join_request.protocols:
        try:
            subscription = parse_subscription(metadata)
        except InvalidRequestError:
            subscription = Subscription(())  # under a protocol that is not used
        found |= partitions_of(subscription.owned, view)
    return found


def _enter(
    change: GroupChange, member_id: str, join_request: JoinGroup, value: MemberValue, limits: GroupLimits
) -> MemberValue | None:
    """The member is in the group; what it was before, or None of a new one."""
    group = change.group
    former_id = group.instances.get(join_request.instance_id) if join_request.instance_id else None
    if former_id is not None and not join_request.member_id:
        # As in a classic group: the new process replaces the former one, whichever protocol that used.
        former = replace_static_member(change, former_id, member_id, value)
        change.add([change.put(Kind.CURRENT, member_id, replace(change.group.currents[member_id], epoch=-1))])
        return former
    if former_id is not None and former_id != join_request.member_id:
        raise FencedInstanceIdError(
            f"another member of group {group.group_id!r} has the instance id {join_request.instance_id!r}"
        )
    before = group.members.get(member_id)
    if before is not None:
        if not before.is_classic:
            raise UnknownMemberIdError(f"{member_id!r} is no classic member of group {group.group_id!r}")
        if value != before:
            change.add([change.put(Kind.MEMBER, member_id, value)])
        return before
    if len(group.members) >= limits.members_max:
        raise GroupFullError(f"group {group.group_id!r} has {len(group.members)} members, the most it may have")
    if not join_request.member_id and join_request.needs_known_id and not join_request.instance_id:
        raise MemberIdRequiredError("join again with this member id", member_id=member_id)
    # An id that the group does not know was given out here, or by the classic group before: it holds nothing.
    change.add(
        (
            change.put(Kind.MEMBER, member_id, value),
            change.put(Kind.TARGET, member_id, TargetValue()),
            change.put(Kind.CURRENT, member_id, BORN),
        )
    )
    return None


def _after_sync(group: Group, member_id: str) -> CurrentValue:
    current, target = group.currents[member_id], group.targets[member_id].partitions
    own = (current.assigned | current.revoking) & current.declared
    revoking = own - target
    assigned = own & target
    if not revoking:
        owners = group.owners
        free = (partition for partition in target - assigned if owners.get(partition, member_id) == member_id)
        assigned |= frozenset(free)
    return replace(
        current,
        previous_epoch=-1,
        assigned=assigned,
        revoking=revoking,
        gained=assigned - own,
        is_joining=False,
        declared=NO_PARTITIONS,
    )
