"""Groups as they are: who coordinates them, what they are, and that they end.

A group is told as Kafka tells it. Groups of both kinds have one coordinator, and one that has only offsets is an empty
classic group:

    kind here   type in ListGroups   DescribeGroups                 ConsumerGroupDescribe
    consumer    consumer             GROUP_ID_NOT_FOUND (from       its members and what they hold
                                     version 6 on), else "Dead"
    classic     classic              its members; their bytes       GROUP_ID_NOT_FOUND
                                     while it is stable
    simple      classic              "Empty"                        GROUP_ID_NOT_FOUND

A request may name any number of groups. Rows are encoded as they come; once an answer holds `ANSWER_BYTES_MAX`, the
other groups are refused (INVALID_REQUEST). Errors stand in the rows of their groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import cast

from tidelog.coordinator.classic_requests import ClassicDetails
from tidelog.coordinator.requests import GroupDetails, MemberSummary
from tidelog.coordinator.service import GroupService
from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError, TransactionalIdRefusedError
from tidelog.model.group_errors import CoordinatorNotAvailableError, GroupIdNotFoundError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.kafka import operations
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
from tidelog.rpc.kafka.wire import EncodedRows

ANSWER_BYTES_MAX = 128 << 20
"""Of one answer. Kafka has no such bound, but its clients take no larger one (`receive.message.max.bytes`)."""
GROUPS_PER_SLICE = 500
DELETES_AT_A_TIME = 32
ROWS_AT_A_TIME = 1_000

OF_A_GROUP, OF_A_TRANSACTION = 0, 1
"""Types of keys in FindCoordinator."""
KEYS_SINCE = 4
NOT_FOUND_SINCE = 6
"""DescribeGroups: before, a group that is not there is dead."""
MEMBER_TYPE_CLASSIC, MEMBER_TYPE_CONSUMER = 0, 1

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
        self._bytes = 0

    def enter(self) -> None:
        """Before each group."""
        if self._bytes >= ANSWER_BYTES_MAX:
            raise InvalidRequestError("the answer would be too large: ask for fewer groups at once")

    def count(self, size: int) -> None:
        self._bytes += size


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
    await asyncio.sleep(0)
    sound = [key for key in keys if key not in outcomes]
    try:
        outcomes.update(zip(sound, await groups.find_coordinators(sound), strict=True))
    except TidelogError as error:
        outcomes.update(dict.fromkeys(sound, error))
    view = view_of(groups.image, context.listener)
    rows = []
    for number, key in enumerate(keys, start=1):
        rows.append(_coordinator(view, key, outcomes[key], context.listener))
        if number % GROUPS_PER_SLICE == 0:
            await asyncio.sleep(0)
    return rows


def _wrong_key(keys: Sequence[str], key_type: int, version: int) -> TidelogError | None:
    if key_type == OF_A_TRANSACTION:
        # librdkafka, which asks in the older versions, asks on after any other code until its caller's time is over.
        # Java's client gives up after any, and shows the text of those only that it has no exception for.
        kind = InvalidRequestError if version >= KEYS_SINCE else TransactionalIdRefusedError
        return kind("this cluster has no transactions: use a producer without transactional.id")
    if key_type != OF_A_GROUP:
        return InvalidRequestError(f"there are no coordinators of type {key_type} here, only those of groups (0)")
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
    encoded = EncodedRows()
    for number, one in enumerate(found, start=1):
        state, group_type = STATES[one.state], "consumer" if one.kind == "consumer" else "classic"
        if (not states or state.lower() in states) and (not types or group_type in types):
            rows.append(
                messages.ListedGroup(
                    group_id=one.group, protocol_type=one.protocol_type, group_state=state, group_type=group_type
                )
            )
        if number % ROWS_AT_A_TIME == 0 or number == len(found):
            encoded.add(len(rows), LIST_GROUPS.encode_rows(context.version, messages.ListedGroup, rows))
            rows = []
            await asyncio.sleep(0)
    error = code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if loading else None)
    return messages.ListGroupsResponse(error_code=error, groups=cast("list[messages.ListedGroup]", encoded))


# Descriptions.


async def describe_groups(request: messages.DescribeGroupsRequest, context: Context) -> messages.DescribeGroupsResponse:
    allowed = operations.GROUP if request.include_authorized_operations else NO_OPERATIONS
    room = Room()
    rows = EncodedRows()
    for group in request.groups:
        try:
            room.enter()
            row = _classic(context.services.groups.describe_classic(group))
            row.authorized_operations = allowed
        except GroupIdNotFoundError as error:
            row = messages.DescribedGroup(group_id=group, group_state=STATES["dead"])
            if context.version >= NOT_FOUND_SINCE:
                row.error_code, row.error_message = group_code_of(error), message_of(error)
        except TidelogError as error:
            row = messages.DescribedGroup(
                group_id=group, error_code=group_code_of(error), error_message=message_of(error)
            )
        data = DESCRIBE_GROUPS.encode_rows(context.version, messages.DescribedGroup, [row])
        room.count(len(data))
        rows.add(1, data)
        await asyncio.sleep(0)
    return messages.DescribeGroupsResponse(groups=cast("list[messages.DescribedGroup]", rows))


def _classic(details: ClassicDetails) -> messages.DescribedGroup:
    members = [
        messages.DescribedGroupMember(
            member_id=member.member_id,
            group_instance_id=member.instance_id or None,
            client_id=member.client_id,
            client_host=member.client_host,
            member_metadata=member.metadata,
            member_assignment=member.assignment,
        )
        for member in details.members
    ]
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
    allowed = operations.GROUP if request.include_authorized_operations else NO_OPERATIONS
    room = Room()
    rows = EncodedRows()
    for group in request.group_ids:
        try:
            room.enter()
            row = _consumer(groups.image, _consumer_details(groups, group))
            row.authorized_operations = allowed
        except TidelogError as error:
            row = messages.ConsumerGroupDescribedGroup(
                group_id=group, error_code=group_code_of(error), error_message=message_of(error)
            )
        encode_rows = CONSUMER_GROUP_DESCRIBE.encode_rows
        data = encode_rows(context.version, messages.ConsumerGroupDescribedGroup, [row])
        room.count(len(data))
        rows.add(1, data)
        await asyncio.sleep(0)
    return messages.ConsumerGroupDescribeResponse(groups=cast("list[messages.ConsumerGroupDescribedGroup]", rows))


def _consumer_details(groups: GroupService, group: str) -> GroupDetails:
    if groups.kind_of(group) not in (None, "consumer"):
        raise GroupIdNotFoundError(f"group {group!r} is not a consumer group")
    return groups.describe_group(group)


def _consumer(image: ClusterImage, details: GroupDetails) -> messages.ConsumerGroupDescribedGroup:
    return messages.ConsumerGroupDescribedGroup(
        group_id=details.group,
        group_state=STATES[details.state],
        group_epoch=details.epoch,
        assignment_epoch=details.assignment_epoch,
        assignor_name=details.assignor,
        members=[_member(image, member) for member in details.members],
    )


def _member(image: ClusterImage, member: MemberSummary) -> messages.ConsumerGroupDescribeMember:
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
    for first in range(0, len(names), DELETES_AT_A_TIME):
        some = names[first : first + DELETES_AT_A_TIME]
        errors += await asyncio.gather(*(_deleted(groups, name) for name in some))
        await asyncio.sleep(0)
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
