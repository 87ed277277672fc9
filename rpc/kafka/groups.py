"""Groups as they are: who coordinates them, what they are, and that they end.

A group is told as Kafka tells it. Groups of both kinds have one coordinator, and one that has only offsets is an empty
classic group:

    kind here   type in ListGroups   DescribeGroups                 ConsumerGroupDescribe
    consumer    consumer             GROUP_ID_NOT_FOUND (from       its members and what they hold
                                     version 6 on), else "Dead"
    classic     classic              its members; their bytes       GROUP_ID_NOT_FOUND
                                     while it is stable
    simple      classic              "Empty"                        GROUP_ID_NOT_FOUND

Beyond `GROUPS_MAX` groups in a request, and once an answer has become large, a group is refused (INVALID_REQUEST): ask
for fewer at once. Errors stand in the rows of their groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tidelog.coordinator.classic_requests import ClassicDetails
from tidelog.coordinator.requests import GroupDetails, MemberSummary
from tidelog.coordinator.service import GroupService
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError, TransactionalIdRefusedError
from tidelog.model.group_errors import CoordinatorNotAvailableError, GroupIdNotFoundError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.kafka.brokers_view import BrokersView, view_of
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, group_code_of, message_of
from tidelog.rpc.kafka.messages import (
    CONSUMER_GROUP_DESCRIBE,
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    LIST_GROUPS,
)
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.messages.metadata import (
    NO_OPERATIONS,
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from tidelog.rpc.kafka.services import Context

GROUPS_MAX = 1_000
"""Named in one request."""
ANSWER_WEIGHT_MAX = 16 << 20
"""About the bytes of an answer, after which no further group is told."""
DELETES_AT_A_TIME = 64
ROWS_AT_A_TIME = 1_000

OF_A_GROUP, OF_A_TRANSACTION = 0, 1
"""Types of keys in FindCoordinator."""
KEYS_SINCE = 4
NOT_FOUND_SINCE = 6
"""DescribeGroups: before, a group that is not there is dead."""
MEMBER_TYPE_CLASSIC, MEMBER_TYPE_CONSUMER = 0, 1
OPERATIONS = 1 << 3 | 1 << 6 | 1 << 8
"""On groups: read, delete, describe. Everybody may, until there are access rules."""

STATES = {
    "empty": "Empty",
    "preparing": "PreparingRebalance",
    "completing": "CompletingRebalance",
    "stable": "Stable",
    "reconciling": "Reconciling",
    "dead": "Dead",
}
"""Ours, and Kafka's."""


class Room:
    """What an answer may still hold. Its first group is told however large it is."""

    def __init__(self) -> None:
        self._groups = 0
        self._weight = 0

    def enter(self) -> None:
        """Before each group."""
        self._groups += 1
        if self._groups > GROUPS_MAX:
            raise InvalidRequestError(f"more than {GROUPS_MAX} groups in one request")
        if self._weight >= ANSWER_WEIGHT_MAX:
            raise InvalidRequestError("the answer would be too large: ask for fewer groups at once")

    def count(self, weight: int) -> None:
        self._weight += weight


# Coordinators.


async def find_coordinator(request: FindCoordinatorRequest, context: Context) -> FindCoordinatorResponse:
    if context.version >= KEYS_SINCE:
        return FindCoordinatorResponse(coordinators=await _found(request.coordinator_keys, request.key_type, context))
    (row,) = await _found([request.key], request.key_type, context)
    return FindCoordinatorResponse(
        error_code=row.error_code,
        error_message=row.error_message,
        node_id=row.node_id,
        host=row.host,
        port=row.port,
    )


async def _found(keys: Sequence[str], key_type: int, context: Context) -> list[Coordinator]:
    groups = context.services.groups
    refusal = _wrong_key(keys, key_type, context.version)
    if refusal is not None:
        return [_nobody(key, refusal) for key in keys]
    outcomes: dict[str, int | TidelogError] = {}
    for key in keys:
        try:
            groups.check_name(key)
        except TidelogError as error:
            outcomes[key] = error
    sound = [key for key in keys if key not in outcomes]
    try:
        outcomes.update(zip(sound, await groups.find_coordinators(sound), strict=True))
    except TidelogError as error:
        outcomes.update(dict.fromkeys(sound, error))
    view = view_of(groups.image, context.listener)
    return [_coordinator(view, key, outcomes[key], context.listener) for key in keys]


def _wrong_key(keys: Sequence[str], key_type: int, version: int) -> TidelogError | None:
    if key_type == OF_A_TRANSACTION:
        # librdkafka, which asks in the older versions, asks on after any other code until its caller's time is over.
        # Java's client gives up after any, and shows the text of those only that it has no exception for.
        kind = InvalidRequestError if version >= KEYS_SINCE else TransactionalIdRefusedError
        return kind("this cluster has no transactions: use a producer without transactional.id")
    if key_type != OF_A_GROUP:
        return InvalidRequestError(f"there are no coordinators of type {key_type} here, only those of groups (0)")
    if len(keys) > GROUPS_MAX:
        return InvalidRequestError(f"{len(keys)} groups: at most {GROUPS_MAX}")
    return None


def _coordinator(view: BrokersView, key: str, where: int | TidelogError, listener: str) -> Coordinator:
    if isinstance(where, TidelogError):
        return _nobody(key, where)
    place = view.places.get(where)
    if place is None:
        message = f"broker {where}, which coordinates the group, cannot be reached by listener {listener!r} now"
        return _nobody(key, CoordinatorNotAvailableError(message))
    return Coordinator(key=key, node_id=place.broker, host=place.host, port=place.port)


def _nobody(key: str, error: TidelogError) -> Coordinator:
    return Coordinator(key=key, node_id=-1, port=-1, error_code=group_code_of(error), error_message=message_of(error))


# Lists.


async def list_groups(request: messages.ListGroupsRequest, context: Context) -> messages.ListGroupsResponse:
    """Those of this broker. While it reads some of them, it says so beside those that it knows."""
    states = {name.lower() for name in request.states_filter}
    types = {name.lower() for name in request.types_filter}
    found, loading = await context.services.groups.list_groups()
    rows: list[messages.ListedGroup] = []
    for number, one in enumerate(found, start=1):
        state, group_type = STATES[one.state], "consumer" if one.kind == "consumer" else "classic"
        if (not states or state.lower() in states) and (not types or group_type in types):
            rows.append(
                messages.ListedGroup(
                    group_id=one.group, protocol_type=one.protocol_type, group_state=state, group_type=group_type
                )
            )
        if number % ROWS_AT_A_TIME == 0:
            await asyncio.sleep(0)
    error = code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if loading else None)
    return messages.ListGroupsResponse(error_code=error, groups=rows)


# Descriptions.


async def describe_groups(request: messages.DescribeGroupsRequest, context: Context) -> messages.DescribeGroupsResponse:
    operations = OPERATIONS if request.include_authorized_operations else NO_OPERATIONS
    room = Room()
    rows: list[messages.DescribedGroup] = []
    for group in request.groups:
        try:
            room.enter()
            row = _classic(context.services.groups.describe_classic(group), room)
            row.authorized_operations = operations
        except GroupIdNotFoundError as error:
            row = messages.DescribedGroup(group_id=group, group_state=STATES["dead"])
            if context.version >= NOT_FOUND_SINCE:
                row.error_code, row.error_message = group_code_of(error), message_of(error)
        except TidelogError as error:
            row = messages.DescribedGroup(
                group_id=group, error_code=group_code_of(error), error_message=message_of(error)
            )
        rows.append(row)
        await asyncio.sleep(0)
    return messages.DescribeGroupsResponse(groups=rows)


def _classic(details: ClassicDetails, room: Room) -> messages.DescribedGroup:
    members = []
    for member in details.members:
        room.count(200 + len(member.metadata) + len(member.assignment))
        members.append(
            messages.DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id or None,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
        )
    return messages.DescribedGroup(
        group_id=details.group,
        group_state=STATES[details.state],
        protocol_type=details.protocol_type,
        protocol_data=details.protocol,
        members=members,
    )


async def describe_consumer_groups(
    request: messages.ConsumerGroupDescribeRequest, context: Context
) -> messages.ConsumerGroupDescribeResponse:
    groups = context.services.groups
    operations = OPERATIONS if request.include_authorized_operations else NO_OPERATIONS
    room = Room()
    rows: list[messages.ConsumerGroupDescribedGroup] = []
    for group in request.group_ids:
        try:
            room.enter()
            row = _consumer(groups.image, _consumer_details(groups, group), room)
            row.authorized_operations = operations
        except TidelogError as error:
            row = messages.ConsumerGroupDescribedGroup(
                group_id=group, error_code=group_code_of(error), error_message=message_of(error)
            )
        rows.append(row)
        await asyncio.sleep(0)
    return messages.ConsumerGroupDescribeResponse(groups=rows)


def _consumer_details(groups: GroupService, group: str) -> GroupDetails:
    if groups.kind_of(group) not in (None, "consumer"):
        raise GroupIdNotFoundError(f"group {group!r} is not a consumer group")
    return groups.describe_group(group)


def _consumer(image: ClusterImage, details: GroupDetails, room: Room) -> messages.ConsumerGroupDescribedGroup:
    return messages.ConsumerGroupDescribedGroup(
        group_id=details.group,
        group_state=STATES[details.state],
        group_epoch=details.epoch,
        assignment_epoch=details.assignment_epoch,
        assignor_name=details.assignor,
        members=[_member(image, member, room) for member in details.members],
    )


def _member(image: ClusterImage, member: MemberSummary, room: Room) -> messages.ConsumerGroupDescribeMember:
    room.count(200 + 4 * (len(member.assignment) + len(member.target)) + sum(map(len, member.topics)))
    return messages.ConsumerGroupDescribeMember(
        member_id=member.member_id,
        instance_id=member.instance_id or None,
        rack_id=member.rack or None,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topics),
        subscribed_topic_regex=member.pattern or None,
        assignment=_assignment(image, member.assignment),
        target_assignment=_assignment(image, member.target),
        member_type=MEMBER_TYPE_CLASSIC if member.is_classic else MEMBER_TYPE_CONSUMER,
    )


def _assignment(image: ClusterImage, partitions: Iterable[PartitionId]) -> messages.ConsumerGroupDescribeAssignment:
    rows = []
    for topic_id, numbers in by_topic(partitions).items():
        topic = image.topics.get(topic_id)
        rows.append(
            messages.ConsumerGroupDescribeTopicPartitions(
                topic_id=topic_id.bytes, topic_name="" if topic is None else topic.name, partitions=numbers
            )
        )
    return messages.ConsumerGroupDescribeAssignment(topic_partitions=rows)


def by_topic(partitions: Iterable[PartitionId]) -> dict[TopicId, list[int]]:
    found: dict[TopicId, list[int]] = {}
    for partition in partitions:
        found.setdefault(partition.topic_id, []).append(partition.partition)
    return found


# Ends.


async def delete_groups(request: messages.DeleteGroupsRequest, context: Context) -> messages.DeleteGroupsResponse:
    groups, names = context.services.groups, request.groups_names
    errors: list[TidelogError | None] = []
    for first in range(0, min(len(names), GROUPS_MAX), DELETES_AT_A_TIME):
        some = names[first : min(first + DELETES_AT_A_TIME, GROUPS_MAX)]
        errors += await asyncio.gather(*(_deleted(groups, name) for name in some))
    if len(names) > GROUPS_MAX:
        refusal = InvalidRequestError(f"more than {GROUPS_MAX} groups in one request")
        errors += [refusal] * (len(names) - GROUPS_MAX)
    return messages.DeleteGroupsResponse(
        results=[
            messages.DeletableGroupResult(
                group_id=name, error_code=group_code_of(error), error_message=message_of(error)
            )
            for name, error in zip(names, errors, strict=True)
        ]
    )


async def _deleted(groups: GroupService, name: str) -> TidelogError | None:
    try:
        await groups.delete_group(name)
    except TidelogError as error:
        return error
    return None


HANDLERS: dict[int, Entry] = {
    FIND_COORDINATOR.key: Entry(find_coordinator),
    LIST_GROUPS.key: Entry(list_groups),
    DESCRIBE_GROUPS.key: Entry(describe_groups),
    DELETE_GROUPS.key: Entry(delete_groups),
    CONSUMER_GROUP_DESCRIBE.key: Entry(describe_consumer_groups),
}
