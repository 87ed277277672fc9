"""A group with members changes between the classic and the consumer protocol; a classic group stores a generation.
Pure; each is one decision.

    classic group   --a member joins by the consumer protocol--> consumer group    `upgrade_records`, with the join
    consumer group  --all its members speak the classic protocol--> classic group  `downgrade`

Upgrade: the last stored generation is the truth about who owns what. Its members that are still in the group become
classic members of the consumer group (`classic_members`) with what they were assigned and their generation as epoch;
they notice nothing until their target changes. A partition that a member reported as owned and that is assigned to
nobody stays its own (`revoking`): a cooperative member may be about to revoke it. A group cannot be converted if the
policy forbids it, if it is not of the protocol type "consumer", or if a subscription or an assignment cannot be read
(INCONSISTENT_GROUP_PROTOCOL); or if its assignments carry data of a custom assignor, which would be lost
(UNSUPPORTED_VERSION).

Downgrade: the stored generation holds what each member may own, so that a later upgrade finds it, and the epoch that it
knows (`ClassicMember.epoch`). The rounds begin with a rebalance (`ClassicGroup`): all members join the next generation.
A group that is too large for one decision, or whose members have no protocol in common, stays a consumer group: it
works as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.coordinator.classic_members import assignment_of, partitions_of
from tidelog.coordinator.classic_requests import Downgrade, GroupMigratedError, StoreGeneration
from tidelog.coordinator.consumer_protocol import PROTOCOL_TYPE, Subscription, parse_assignment, parse_subscription
from tidelog.coordinator.group_change import MEMBER_KINDS, Records
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.records import (
    ClassicMember,
    ClassicValue,
    CurrentValue,
    GroupRecord,
    GroupValue,
    Kind,
    MemberValue,
    Partitions,
    TargetValue,
    classic_key,
    group_key,
    member_key,
)
from tidelog.coordinator.requests import Heartbeat, TopicsView
from tidelog.coordinator.state import CoordinatorState, Group
from tidelog.model.errors import InvalidRequestError, UnsupportedVersionError
from tidelog.model.group_errors import IllegalGenerationError, InconsistentGroupProtocolError
from tidelog.model.ids import PartitionId
from tidelog.model.maps import Map, sorted_items

STANDARD_ASSIGNORS = frozenset({"range", "roundrobin", "sticky", "cooperative-sticky"})
"""Only these assignors themselves read the user data that they put into assignments (librdkafka's sticky ones do), so
dropping it is harmless."""


# ---- Upgrade


def check_upgrade(group_id: str, protocol_type: str, limits: GroupLimits) -> None:
    """Raises unless a classic group of this protocol type, with members, may become a consumer group."""
    if not limits.can_upgrade:
        raise InconsistentGroupProtocolError(
            f"group {group_id!r} has members of the classic protocol, and group.consumer.migration.policy is"
            f" {limits.migration_policy!r}: use the consumer protocol once they have left, or change the policy"
        )
    if protocol_type != PROTOCOL_TYPE:
        raise InconsistentGroupProtocolError(
            f"group {group_id!r} has members of the protocol type {protocol_type!r}, not {PROTOCOL_TYPE!r}"
        )


def upgrade_records(group: Group, classic: ClassicValue, request: Heartbeat, limits: GroupLimits) -> Records:
    """The classic group as a consumer group, in an epoch that no member has been given."""
    check_upgrade(group.group_id, classic.protocol_type, limits)
    live = request.live_classic
    if live is None or live.stored_generation != classic.generation:
        raise GroupMigratedError(f"group {group.group_id!r} has a new generation since it was looked at")
    records: Records = [
        GroupRecord(classic_key(group.group_id), None),
        GroupRecord(
            group_key(group.group_id),
            GroupValue(epoch=max(classic.generation, live.generation), classic_protocol=classic.protocol),
        ),
    ]
    owners: dict[PartitionId, str] = {}
    held: dict[str, Partitions] = {}
    members = [member for member in classic.members if member.member_id in live.protocols]  # others have left
    for member in members:
        held[member.member_id] = _assigned(group.group_id, classic.protocol, member, request.view)
        for partition in held[member.member_id]:
            if owners.setdefault(partition, member.member_id) != member.member_id:
                raise InconsistentGroupProtocolError(
                    f"members {owners[partition]!r} and {member.member_id!r} of group {group.group_id!r} share a"
                    " partition: a consumer group cannot assign so"
                )
    for member in members:
        subscription = _subscription(group.group_id, member)
        said = partitions_of(subscription.owned, request.view)
        revoking = frozenset(p for p in said if owners.setdefault(p, member.member_id) == member.member_id)
        current = CurrentValue(
            epoch=member.epoch if member.epoch >= 0 else classic.generation,
            assigned=held[member.member_id],
            revoking=revoking - held[member.member_id],
        )
        protocols = live.protocols[member.member_id]
        records += _upgraded(group.group_id, member, protocols, subscription, current)
    return records


def _assigned(group_id: str, protocol: str, member: ClassicMember, view: TopicsView) -> Partitions:
    try:
        assignment = parse_assignment(member.assignment)
    except InvalidRequestError as error:
        raise InconsistentGroupProtocolError(f"member {member.member_id!r} of group {group_id!r}: {error}") from error
    if assignment.user_data and protocol not in STANDARD_ASSIGNORS:
        raise UnsupportedVersionError(
            f"group {group_id!r} uses a custom assignor, {protocol!r}, whose data a consumer group would lose:"
            " change its members to a standard assignor first"
        )
    return partitions_of(assignment.partitions, view)


def _subscription(group_id: str, member: ClassicMember) -> Subscription:
    try:
        return parse_subscription(member.metadata)
    except InvalidRequestError as error:
        raise InconsistentGroupProtocolError(f"member {member.member_id!r} of group {group_id!r}: {error}") from error


def _upgraded(
    group_id: str,
    member: ClassicMember,
    protocols: tuple[tuple[str, bytes], ...],
    subscription: Subscription,
    current: CurrentValue,
) -> Iterator[GroupRecord]:
    value = MemberValue(
        instance_id=member.instance_id,
        rack=subscription.rack,
        client_id=member.client_id,
        client_host=member.client_host,
        topics=tuple(sorted(set(subscription.topics))),
        session_timeout_ms=member.session_timeout_ms,
        rebalance_timeout_ms=member.rebalance_timeout_ms or member.session_timeout_ms,
        classic_protocols=protocols,
    )
    yield GroupRecord(member_key(Kind.MEMBER, group_id, member.member_id), value)
    yield GroupRecord(member_key(Kind.TARGET, group_id, member.member_id), TargetValue(partitions=current.assigned))
    yield GroupRecord(member_key(Kind.CURRENT, group_id, member.member_id), current)


# ---- Downgrade


def is_downgrade_due(group: Group | None, limits: GroupLimits) -> bool:
    """Whether the policy allows it and nobody speaks the consumer protocol in a consumer group with members."""
    if group is None or not group.members or not limits.can_downgrade:
        return False
    return all(member.is_classic for member in group.members.values()) and bool(_common_protocol(group.members))


def downgrade(state: CoordinatorState, request: Downgrade, limits: GroupLimits) -> tuple[Records, None]:
    group = state.group(request.group)
    if group is None or not is_downgrade_due(group, limits):
        return [], None
    protocol = _common_protocol(group.members)
    members = tuple(_downgraded(group, member_id, protocol, request.view) for member_id in sorted(group.members))
    records: Records = [
        GroupRecord(member_key(kind, request.group, member_id), None)
        for member_id in sorted(group.members)
        for kind in MEMBER_KINDS
    ]
    value = ClassicValue(
        generation=group.epoch,
        protocol_type=PROTOCOL_TYPE,
        protocol=protocol,
        leader=members[0].member_id,
        members=members,
        topics=tuple(sorted({topic for member in group.members.values() for topic in member.topics})),
    )
    records += (GroupRecord(group_key(request.group), None), GroupRecord(classic_key(request.group), value))
    return records, None


def _common_protocol(members: Map[str, MemberValue]) -> str:
    """Return the protocol that most members prefer among those that all of them support; "" if there is none."""
    lists = [[name for name, _ in member.classic_protocols] for _, member in sorted_items(members)]
    common = set.intersection(*(set(names) for names in lists))
    votes: dict[str, int] = {}
    for names in lists:
        choice = next((name for name in names if name in common), "")
        votes[choice] = votes.get(choice, 0) + 1
    return min(votes, key=lambda name: (-votes[name], name))


def _downgraded(group: Group, member_id: str, protocol: str, view: TopicsView) -> ClassicMember:
    member, current = group.members[member_id], group.currents[member_id]
    # Between join and sync a member still commits with the epoch of its last sync.
    is_between = current.is_joining and current.previous_epoch >= 0
    return ClassicMember(
        member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.session_timeout_ms,
        member.rebalance_timeout_ms,
        dict(member.classic_protocols)[protocol],
        assignment_of(current.assigned | current.revoking, view),
        current.previous_epoch if is_between else current.epoch,
    )


# ---- Generations of classic groups


def check_kind(state: CoordinatorState, group_id: str) -> None:
    """Raises while the group is a consumer group with members."""
    group = state.group(group_id)
    if group is not None and group.members:
        raise GroupMigratedError(f"group {group_id!r} is a consumer group with {len(group.members)} members")


def store_generation(state: CoordinatorState, request: StoreGeneration, limits: GroupLimits) -> tuple[Records, None]:
    check_kind(state, request.group)
    group = state.group(request.group) or Group(request.group)
    if request.value.generation < group.epoch:
        raise IllegalGenerationError(f"generation {request.value.generation} of group {request.group!r} is over")
    records = [GroupRecord(classic_key(request.group), request.value)]
    if group.info is not None:
        records.append(GroupRecord(group_key(request.group), None))
    return records, None
