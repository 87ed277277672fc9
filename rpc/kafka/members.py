"""Membership: the classic protocol (JoinGroup, SyncGroup, Heartbeat, LeaveGroup) and ConsumerGroupHeartbeat.

A Kafka member depends on heartbeats alone: it has no stream, so a broken connection goes unnoticed until the session
timeout. A join or sync waits for its rebalance in the task of its request. If the connection ends meanwhile, the
response is dropped; the member is removed by its session timeout, after the rebalance.

Members of both protocols share a group (`coordinator/migration.py`). If a classic group cannot become a consumer group,
a ConsumerGroupHeartbeat that joins it gets GROUP_ID_NOT_FOUND ("not a consumer group"); a JoinGroup that does not match
a consumer group gets INCONSISTENT_GROUP_PROTOCOL.

While a coordinator loads its groups, a classic heartbeat succeeds, and a sync gets REBALANCE_IN_PROGRESS: clients do
not expect COORDINATOR_LOAD_IN_PROGRESS there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    GroupIdNotFoundError,
    InconsistentGroupProtocolError,
    MemberIdRequiredError,
    UnknownMemberIdError,
)
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, group_code_of, message_of
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.services.groups import (
    JOIN_EPOCH,
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    MemberHeartbeat,
    SyncGroup,
    by_topic,
)

KNOWN_ID_SINCE = 4
"""JoinGroup: a new member receives its id first (MEMBER_ID_REQUIRED)."""
NULL_PROTOCOL_SINCE = 7
SKIP_SINCE = 9
"""JoinGroup: the response can ask the leader to skip the assignment."""
PROTOCOL_SINCE = 5
"""SyncGroup: has protocol type and name."""
MEMBERS_SINCE = 3
"""LeaveGroup: several members, by member or instance id."""
OWN_ID_SINCE = 1
"""ConsumerGroupHeartbeat: members choose their ids."""

T = TypeVar("T")

# Joining.


async def _begun(work: Coroutine[Any, Any, T]) -> DeferredResponse:
    """Start the request in the group before the connection's next request: a member that joins and then leaves is
    gone."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.sleep(0)
    except BaseException:
        task.cancel()
        raise

    async def answer() -> T:
        return await task

    def leave() -> None:
        task.cancel()  # no effect if it has ended

    return DeferredResponse(answer, leave)


async def join(request: messages.JoinGroupRequest, context: Context) -> DeferredResponse:
    return await _begun(_join(request, context))


async def _join(request: messages.JoinGroupRequest, context: Context) -> messages.JoinGroupResponse:
    version = context.version
    try:
        join_request = JoinGroup(
            member_id=request.member_id,
            protocol_type=request.protocol_type,
            protocols=tuple((protocol.name, protocol.metadata) for protocol in request.protocols),
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms if version >= 1 else request.session_timeout_ms,
            instance_id=request.group_instance_id or "",
            needs_known_id=version >= KNOWN_ID_SINCE,
        )
        reply = await context.services.groups.join_group(context.request, request.group_id, join_request)
    except TidelogError as error:
        member_id = error.member_id if isinstance(error, MemberIdRequiredError) else request.member_id
        none = None if version >= NULL_PROTOCOL_SINCE else ""
        return messages.JoinGroupResponse(error_code=group_code_of(error), member_id=member_id, protocol_name=none)
    return _joined(reply, version)


def _joined(reply: JoinReply, version: int) -> messages.JoinGroupResponse:
    # An older client cannot skip the assignment: name no leader, so that it does not compute one.
    is_quiet = reply.skip_assignment and version < SKIP_SINCE
    return messages.JoinGroupResponse(
        generation_id=reply.generation,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol,
        leader="" if is_quiet else reply.leader,
        skip_assignment=reply.skip_assignment,
        member_id=reply.member_id,
        members=[
            messages.JoinGroupResponseMember(
                member_id=member.member_id, group_instance_id=member.instance_id or None, metadata=member.metadata
            )
            for member in (() if is_quiet else reply.members)
        ],
    )


async def sync(request: messages.SyncGroupRequest, context: Context) -> DeferredResponse:
    return await _begun(_sync(request, context))


async def _sync(request: messages.SyncGroupRequest, context: Context) -> messages.SyncGroupResponse:
    try:
        if context.version >= PROTOCOL_SINCE and (request.protocol_type is None or request.protocol_name is None):
            raise InconsistentGroupProtocolError("a sync names the protocol type and the protocol of its group")
        sync_request = SyncGroup(
            member_id=request.member_id,
            generation=request.generation_id,
            instance_id=request.group_instance_id or "",
            protocol_type=request.protocol_type,
            protocol=request.protocol_name,
            assignments=tuple((member.member_id, member.assignment) for member in request.assignments),
        )
        reply = await context.services.groups.sync_group(context.request, request.group_id, sync_request)
    except CoordinatorLoadingError:
        # The coordinator lost the state of the rebalance: the member must join again.
        return messages.SyncGroupResponse(error_code=code(ErrorCode.REBALANCE_IN_PROGRESS))
    except TidelogError as error:
        return messages.SyncGroupResponse(error_code=group_code_of(error))
    return messages.SyncGroupResponse(
        protocol_type=reply.protocol_type, protocol_name=reply.protocol, assignment=reply.assignment
    )


# Heartbeats and leaving.


async def heartbeat(request: messages.HeartbeatRequest, context: Context) -> messages.HeartbeatResponse:
    try:
        await context.services.groups.classic_heartbeat(
            context.request,
            request.group_id,
            member_id=request.member_id,
            generation=request.generation_id,
            instance_id=request.group_instance_id or "",
        )
    except CoordinatorLoadingError:
        return messages.HeartbeatResponse()
    except TidelogError as error:
        return messages.HeartbeatResponse(error_code=group_code_of(error))
    return messages.HeartbeatResponse()


async def leave(request: messages.LeaveGroupRequest, context: Context) -> messages.LeaveGroupResponse:
    """Remove members of either group type: a member leaves, or an operator removes some."""
    if context.version < MEMBERS_SINCE:
        named = [messages.MemberIdentity(member_id=request.member_id)]
    else:
        named = request.members
    try:
        members = [(member.member_id, member.group_instance_id or "") for member in named]
        errors: Sequence[TidelogError | None] = await context.services.groups.leave_group(
            context.request, request.group_id, members
        )
    except UnknownMemberIdError as error:
        errors = [error] * len(named)
    except TidelogError as error:
        return messages.LeaveGroupResponse(error_code=group_code_of(error))
    if context.version < MEMBERS_SINCE:
        return messages.LeaveGroupResponse(error_code=group_code_of(errors[0]))
    return messages.LeaveGroupResponse(
        members=[
            messages.MemberResponse(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                error_code=group_code_of(error),
            )
            for member, error in zip(named, errors, strict=True)
        ]
    )


# The consumer protocol.


async def consumer_heartbeat(
    request: messages.ConsumerGroupHeartbeatRequest, context: Context
) -> messages.ConsumerGroupHeartbeatResponse:
    groups = context.services.groups
    try:
        _check(request)
        reply = await groups.heartbeat(context.request, _heartbeat(request, context.version))
    except InconsistentGroupProtocolError as error:
        rejection = GroupIdNotFoundError(f"group {request.group_id!r} is not a consumer group: {error}")
        return _rejected(rejection)
    except TidelogError as error:
        return _rejected(error)
    return messages.ConsumerGroupHeartbeatResponse(
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=groups.heartbeat_interval_ms,
        assignment=_assignment(reply),
    )


def _rejected(error: TidelogError) -> messages.ConsumerGroupHeartbeatResponse:
    return messages.ConsumerGroupHeartbeatResponse(error_code=group_code_of(error), error_message=message_of(error))


def _check(request: messages.ConsumerGroupHeartbeatRequest) -> None:
    """Check what only Kafka's message can express: null and empty fields. The coordinator checks the rest."""
    if not request.group_id:
        raise InvalidRequestError("a heartbeat names its group")
    if request.instance_id == "" or request.rack_id == "":
        raise InvalidRequestError("an instance id and a rack have a name, or are null")
    if request.member_epoch != JOIN_EPOCH:
        return
    if request.rebalance_timeout_ms < 0:
        raise InvalidRequestError("a member that joins has a rebalance timeout")
    if request.topic_partitions is None:
        raise InvalidRequestError("a member that joins owns no partitions, and sends an empty list")
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        raise InvalidRequestError("a member that joins subscribes to topics, by names or by a pattern")


def _heartbeat(request: messages.ConsumerGroupHeartbeatRequest, version: int) -> MemberHeartbeat:
    names, owned = request.subscribed_topic_names, request.topic_partitions
    return MemberHeartbeat(
        group=request.group_id,
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id or "",
        rack=request.rack_id or "",
        topics=None if names is None else tuple(names),
        pattern=request.subscribed_topic_regex,
        assignor=request.server_assignor or "",
        rebalance_timeout_ms=max(request.rebalance_timeout_ms, 0),
        owned=None if owned is None else tuple((topic.topic_id, topic.partitions) for topic in owned),
        needs_member_id=version < OWN_ID_SINCE,
    )


def _assignment(reply: HeartbeatReply) -> messages.ConsumerGroupHeartbeatAssignment | None:
    if reply.assignment is None:
        return None
    return messages.ConsumerGroupHeartbeatAssignment(
        topic_partitions=[
            messages.ConsumerGroupHeartbeatTopicPartitions(topic_id=topic_id.bytes, partitions=numbers)
            for topic_id, numbers in by_topic(reply.assignment).items()
        ]
    )


HANDLERS: dict[int, Entry] = {
    apis.JOIN_GROUP.key: Entry(join, on_stop=ErrorCode.NOT_COORDINATOR),
    apis.SYNC_GROUP.key: Entry(sync, on_stop=ErrorCode.NOT_COORDINATOR),
    apis.HEARTBEAT.key: Entry(heartbeat),
    apis.LEAVE_GROUP.key: Entry(leave),
    apis.CONSUMER_GROUP_HEARTBEAT.key: Entry(consumer_heartbeat),
}
