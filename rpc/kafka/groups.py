"""FindCoordinator, ListGroups, DescribeGroups, ConsumerGroupDescribe and DeleteGroups.

Responses describe groups in Kafka's terms. Groups of both types have one coordinator, and a group with offsets only is
an empty classic group:

    type here   type in ListGroups   DescribeGroups                 ConsumerGroupDescribe
    consumer    consumer             GROUP_ID_NOT_FOUND (from       members and assignments
                                     version 6), else "Dead"
    classic     classic              members; their metadata        GROUP_ID_NOT_FOUND
                                     while it is stable
    simple      classic              "Empty"                        GROUP_ID_NOT_FOUND

A request may name any number of groups. Rows are encoded one by one; once a response has `RESPONSE_BYTES_MAX`, the
remaining groups fail with INVALID_REQUEST. Each group's row has its own error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import cast

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.group_errors import CoordinatorNotAvailableError, GroupIdNotFoundError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka import operations
from tidelog.rpc.kafka.brokers_view import BrokersView, view_of
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, group_code_of, message_of
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.messages.metadata import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.rpc.kafka.wire import EncodedRows
from tidelog.services.groups import ClassicDetails, GroupDetails, MemberSummary, by_topic
from tidelog.services.limits import ResponseSize
from tidelog.world.slicing import sliced

GROUPS_PER_SLICE = 500
DELETES_AT_A_TIME = 32
ROWS_AT_A_TIME = 1_000

OF_A_GROUP, OF_A_TRANSACTION = 0, 1
"""Key types of FindCoordinator."""
KEYS_SINCE = 4
NOT_FOUND_SINCE = 6
"""DescribeGroups: before this version a missing group is "Dead"."""
MEMBER_TYPE_CLASSIC, MEMBER_TYPE_CONSUMER = 0, 1

STATES = {
    "empty": "Empty",
    "preparing": "PreparingRebalance",
    "completing": "CompletingRebalance",
    "stable": "Stable",
    "reconciling": "Reconciling",
    "dead": "Dead",
}
"""Our states and Kafka's."""


# Coordinators.


async def find_coordinator(request: FindCoordinatorRequest, context: Context) -> DeferredResponse:
    """The first search creates the offsets topic, which may take long."""
    return DeferredResponse(lambda: _find_coordinator(request, context))


async def _find_coordinator(request: FindCoordinatorRequest, context: Context) -> FindCoordinatorResponse:
    if context.version >= KEYS_SINCE:
        return FindCoordinatorResponse(
            coordinators=await _coordinators(request.coordinator_keys, request.key_type, context)
        )
    (row,) = await _coordinators([request.key], request.key_type, context)
    return FindCoordinatorResponse(
        error_code=row.error_code,
        error_message=row.error_message,
        node_id=row.node_id,
        host=row.host,
        port=row.port,
    )


async def _coordinators(keys: Sequence[str], key_type: int, context: Context) -> list[Coordinator]:
    brokers: Sequence[int | TidelogError] = ()
    if keys:
        try:
            brokers = await _find(keys, key_type, context)
        except TidelogError as rejection:
            brokers = [rejection] * len(keys)
    view = view_of(context.services.image, context.listener)
    pairs = sliced(zip(keys, brokers, strict=True), GROUPS_PER_SLICE)
    return [_coordinator(view, key, broker, context.listener) async for key, broker in pairs]


async def _find(keys: Sequence[str], key_type: int, context: Context) -> list[int | TidelogError]:
    if key_type == OF_A_TRANSACTION:
        return await context.services.transactions.find_coordinators(context.request, keys)
    if key_type == OF_A_GROUP:
        return await context.services.groups.find_coordinators(context.request, keys)
    raise InvalidRequestError(f"there are no coordinators of type {key_type} here: use 0 (group) or 1 (transaction)")


def _coordinator(view: BrokersView, key: str, broker: int | TidelogError, listener: str) -> Coordinator:
    if isinstance(broker, TidelogError):
        return _no_coordinator(key, broker)
    endpoint = view.reachable.get(broker)
    if endpoint is None:
        message = f"broker {broker}, which coordinates it, cannot be reached by listener {listener!r} now"
        return _no_coordinator(key, CoordinatorNotAvailableError(message))
    return Coordinator(key=key, node_id=endpoint.broker, host=endpoint.host, port=endpoint.port)


def _no_coordinator(key: str, error: TidelogError) -> Coordinator:
    return Coordinator(key=key, node_id=-1, port=-1, error_code=group_code_of(error), error_message=message_of(error))


# Listing.


async def list_groups(request: messages.ListGroupsRequest, context: Context) -> messages.ListGroupsResponse:
    """List this broker's groups. While it loads some of them, the response has the known ones and an error."""
    states = {name.lower() for name in request.states_filter}
    types = {name.lower() for name in request.types_filter}
    groups, loading = await context.services.groups.list_groups(context.request)
    rows: list[messages.ListedGroup] = []
    encoded = EncodedRows()
    for number, group in enumerate(groups, start=1):
        state, group_type = STATES[group.state], "consumer" if group.kind == "consumer" else "classic"
        if (not states or state.lower() in states) and (not types or group_type in types):
            rows.append(
                messages.ListedGroup(
                    group_id=group.group, protocol_type=group.protocol_type, group_state=state, group_type=group_type
                )
            )
        if number % ROWS_AT_A_TIME == 0 or number == len(groups):
            encoded.add(len(rows), apis.LIST_GROUPS.encode_rows(context.version, messages.ListedGroup, rows))
            rows = []
            await asyncio.sleep(0)
    error = code(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if loading else None)
    return messages.ListGroupsResponse(error_code=error, groups=cast("list[messages.ListedGroup]", encoded))


# Descriptions.


async def describe_groups(request: messages.DescribeGroupsRequest, context: Context) -> messages.DescribeGroupsResponse:
    guard = context.services.guard
    size = ResponseSize("groups")
    rows = EncodedRows()
    for group in request.groups:
        try:
            size.check()
            row = _classic(context.services.groups.describe_classic_group(context.request, group))
            if request.include_authorized_operations:
                row.authorized_operations = operations.allowed_on_group(guard, context.request, group)
        except GroupIdNotFoundError as error:
            row = messages.DescribedGroup(group_id=group, group_state=STATES["dead"])
            if context.version >= NOT_FOUND_SINCE:
                row.error_code, row.error_message = group_code_of(error), message_of(error)
        except TidelogError as error:
            row = messages.DescribedGroup(
                group_id=group, error_code=group_code_of(error), error_message=message_of(error)
            )
        data = apis.DESCRIBE_GROUPS.encode_rows(context.version, messages.DescribedGroup, [row])
        size.add(len(data))
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
    guard = context.services.guard
    size = ResponseSize("groups")
    rows = EncodedRows()
    for group in request.group_ids:
        try:
            size.check()
            details = context.services.groups.describe_consumer_group(context.request, group)
            row = _consumer(context.services.image, details)
            if request.include_authorized_operations:
                row.authorized_operations = operations.allowed_on_group(guard, context.request, group)
        except TidelogError as error:
            row = messages.ConsumerGroupDescribedGroup(
                group_id=group, error_code=group_code_of(error), error_message=message_of(error)
            )
        encode_rows = apis.CONSUMER_GROUP_DESCRIBE.encode_rows
        data = encode_rows(context.version, messages.ConsumerGroupDescribedGroup, [row])
        size.add(len(data))
        rows.add(1, data)
        await asyncio.sleep(0)
    return messages.ConsumerGroupDescribeResponse(groups=cast("list[messages.ConsumerGroupDescribedGroup]", rows))


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


# Deletion.


async def delete_groups(request: messages.DeleteGroupsRequest, context: Context) -> messages.DeleteGroupsResponse:
    names = request.groups_names
    errors: list[TidelogError | None] = []
    for first in range(0, len(names), DELETES_AT_A_TIME):
        errors += await asyncio.gather(*(_delete(context, name) for name in names[first : first + DELETES_AT_A_TIME]))
        await asyncio.sleep(0)
    return messages.DeleteGroupsResponse(
        results=[
            messages.DeletableGroupResult(
                group_id=name, error_code=group_code_of(error), error_message=message_of(error)
            )
            for name, error in zip(names, errors, strict=True)
        ]
    )


async def _delete(context: Context, name: str) -> TidelogError | None:
    try:
        await context.services.groups.delete_group(context.request, name)
    except TidelogError as error:
        return error
    return None


HANDLERS: dict[int, Entry] = {
    apis.FIND_COORDINATOR.key: Entry(find_coordinator),
    apis.LIST_GROUPS.key: Entry(list_groups),
    apis.DESCRIBE_GROUPS.key: Entry(describe_groups),
    apis.DELETE_GROUPS.key: Entry(delete_groups),
    apis.CONSUMER_GROUP_DESCRIBE.key: Entry(describe_consumer_groups),
}
