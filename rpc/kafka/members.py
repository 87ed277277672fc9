"""Membership: the classic protocol (JoinGroup, SyncGroup, Heartbeat, LeaveGroup) and ConsumerGroupHeartbeat.

A member on this door lives by its heartbeats alone: it has no stream, so nothing is noticed when its connection breaks,
and its session decides. A join or a sync waits as long as its round takes, in the task of its request. When the
connection ends meanwhile the answer is dropped; the member itself is out when its session is over, after the round.

Members of both protocols share a group (`coordinator/migration.py`). Where a classic group cannot become a consumer
group, a ConsumerGroupHeartbeat that joins it is answered with GROUP_ID_NOT_FOUND ("not a consumer group"); a JoinGroup
that does not fit a consumer group with INCONSISTENT_GROUP_PROTOCOL.

While a coordinator reads its groups, a classic heartbeat is answered as if all were well, and a sync with
REBALANCE_IN_PROGRESS: clients do not expect COORDINATOR_LOAD_IN_PROGRESS there.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from uuid import UUID

from tidelog.coordinator.classic_requests import GroupMigratedError, JoinReply
from tidelog.coordinator.mixed_groups import DISPATCHES_MAX
from tidelog.coordinator.requests import JOIN_EPOCH, STATIC_LEAVE_EPOCH, Heartbeat, HeartbeatReply
from tidelog.coordinator.service import GroupService
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorLoadingError,
    FencedInstanceIdError,
    GroupIdNotFoundError,
    InconsistentGroupProtocolError,
    MemberIdRequiredError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.errors import code, group_code_of, message_of
from tidelog.rpc.kafka.groups import by_topic
from tidelog.rpc.kafka.messages import (
    CONSUMER_GROUP_HEARTBEAT,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    SYNC_GROUP,
)
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.services import Context, Later

CLIENT_ID_LENGTH_MAX = 255
"""Kept of a client's id: it is a part of the member ids that are given out."""
CONSUMER = "consumer"
"""The protocol type whose subscriptions are understood here."""

KNOWN_ID_SINCE = 4
"""JoinGroup: a new member gets its id first (MEMBER_ID_REQUIRED)."""
NULL_PROTOCOL_SINCE = 7
SKIP_SINCE = 9
"""JoinGroup: a leader can be told that it need not deal."""
PROTOCOL_SINCE = 5
"""SyncGroup: protocol type and name are given."""
MEMBERS_SINCE = 3
"""LeaveGroup: several members, by member or instance id."""
OWN_ID_SINCE = 1
"""ConsumerGroupHeartbeat: members choose their ids themselves."""

T = TypeVar("T")

_INT16, _INT32 = struct.Struct(">h"), struct.Struct(">i")


# Joining.


async def _begun(work: Coroutine[Any, Any, T]) -> Later:
    """The group hears of it before the next request of the connection is begun: who joins and leaves is out."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.sleep(0)
    except BaseException:
        task.cancel()
        raise

    async def answer() -> T:
        return await task

    def leave() -> None:
        task.cancel()  # nothing, where it has ended

    return Later(answer, leave)


async def join(request: messages.JoinGroupRequest, context: Context) -> Later:
    return await _begun(_join(request, context))


async def _join(request: messages.JoinGroupRequest, context: Context) -> messages.JoinGroupResponse:
    version = context.version
    try:
        reply = await context.services.groups.join_group(
            request.group_id,
            member_id=request.member_id,
            protocol_type=request.protocol_type,
            protocols=tuple((one.name, one.metadata) for one in request.protocols),
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms if version >= 1 else request.session_timeout_ms,
            instance_id=_instance(request.group_instance_id),
            client_id=_client_id(context),
            client_host=context.client_host,
            needs_known_id=version >= KNOWN_ID_SINCE,
            topics=_topics(request),
        )
    except TidelogError as error:
        given = error.member_id if isinstance(error, MemberIdRequiredError) else request.member_id
        nothing = None if version >= NULL_PROTOCOL_SINCE else ""
        return messages.JoinGroupResponse(error_code=group_code_of(error), member_id=given, protocol_name=nothing)
    return _joined(reply, version)


def _joined(reply: JoinReply, version: int) -> messages.JoinGroupResponse:
    # A client that cannot be told to skip the dealing is told that it does not lead: what it would deal is not wanted.
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


def _topics(request: messages.JoinGroupRequest) -> tuple[str, ...]:
    """What the member reads, by what it says under all its protocols; empty if that is not understood."""
    if request.protocol_type != CONSUMER:
        return ()
    found: set[str] = set()
    for protocol in request.protocols:
        found.update(subscribed_topics(protocol.metadata))
    return tuple(sorted(found))


def subscribed_topics(metadata: bytes) -> tuple[str, ...]:
    """The topics in a consumer's subscription, which begins so in each of its versions:

        version int16 | number of topics int32 | each: length int16, name

    Empty of anything else: the bytes are the members' own affair.
    """
    try:
        (count,) = _INT32.unpack_from(metadata, _INT16.size)
        if not 0 <= count <= len(metadata) // _INT16.size:
            return ()
        names, at = [], _INT16.size + _INT32.size
        for _ in range(count):
            (size,) = _INT16.unpack_from(metadata, at)
            at += _INT16.size
            if not 0 <= size <= len(metadata) - at:
                return ()
            names.append(metadata[at : at + size].decode())
            at += size
    except (ValueError, struct.error):
        return ()
    return tuple(names)


async def sync(request: messages.SyncGroupRequest, context: Context) -> Later:
    return await _begun(_sync(request, context))


async def _sync(request: messages.SyncGroupRequest, context: Context) -> messages.SyncGroupResponse:
    try:
        if context.version >= PROTOCOL_SINCE and (request.protocol_type is None or request.protocol_name is None):
            raise InconsistentGroupProtocolError("a sync names the protocol type and the protocol of its group")
        reply = await context.services.groups.sync_group(
            request.group_id,
            member_id=request.member_id,
            generation=request.generation_id,
            instance_id=_instance(request.group_instance_id),
            protocol_type=request.protocol_type,
            protocol=request.protocol_name,
            assignments=tuple((one.member_id, one.assignment) for one in request.assignments),
        )
    except CoordinatorLoadingError:
        # What was known of the round is lost: join again.
        return messages.SyncGroupResponse(error_code=code(ErrorCode.REBALANCE_IN_PROGRESS))
    except TidelogError as error:
        return messages.SyncGroupResponse(error_code=group_code_of(error))
    return messages.SyncGroupResponse(
        protocol_type=reply.protocol_type, protocol_name=reply.protocol, assignment=reply.assignment
    )


# Going on, leaving.


async def heartbeat(request: messages.HeartbeatRequest, context: Context) -> messages.HeartbeatResponse:
    try:
        await context.services.groups.classic_heartbeat(
            request.group_id,
            member_id=request.member_id,
            generation=request.generation_id,
            instance_id=_instance(request.group_instance_id),
        )
    except CoordinatorLoadingError:
        return messages.HeartbeatResponse()
    except TidelogError as error:
        return messages.HeartbeatResponse(error_code=group_code_of(error))
    return messages.HeartbeatResponse()


async def leave(request: messages.LeaveGroupRequest, context: Context) -> messages.LeaveGroupResponse:
    """By a member, or by an operator in the name of some, of either kind of group."""
    if context.version < MEMBERS_SINCE:
        named = [messages.MemberIdentity(member_id=request.member_id)]
    else:
        named = request.members
    try:
        errors: Sequence[TidelogError | None] = await _leave(
            context.services.groups,
            request.group_id,
            [(one.member_id, _instance(one.group_instance_id)) for one in named],
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
                member_id=one.member_id, group_instance_id=one.group_instance_id, error_code=group_code_of(error)
            )
            for one, error in zip(named, errors, strict=True)
        ]
    )


async def _leave(groups: GroupService, group: str, named: Sequence[tuple[str, str]]) -> Sequence[TidelogError | None]:
    """(member id, instance id) of each."""
    for _ in range(DISPATCHES_MAX):
        try:
            if groups.kind_of(group) != CONSUMER:
                return await groups.leave_group(group, named)
            return await _leave_consumer_group(groups, group, named)
        except GroupMigratedError as error:
            last = error  # it has changed its protocol meanwhile
    raise last


async def _leave_consumer_group(
    groups: GroupService, group: str, named: Sequence[tuple[str, str]]
) -> Sequence[TidelogError | None]:
    members = {member.member_id: member.instance_id for member in groups.describe_group(group).members}
    places = {instance_id: member_id for member_id, instance_id in members.items() if instance_id}
    found: list[str | TidelogError] = []
    for member_id, instance_id in named:
        place = places.get(instance_id, "") if instance_id else member_id
        if place not in members:
            found.append(UnknownMemberIdError(f"{instance_id or member_id!r} is no member of group {group!r}"))
        elif instance_id and member_id and member_id != place:
            found.append(FencedInstanceIdError(f"{place!r} has the instance id {instance_id!r} of group {group!r}"))
        else:
            found.append(place)
    leaving = list(dict.fromkeys(one for one in found if isinstance(one, str)))
    removed = await groups.remove_members(group, leaving, ()) if leaving else {}
    return [removed[one] if isinstance(one, str) else one for one in found]


# The consumer protocol.


async def consumer_heartbeat(
    request: messages.ConsumerGroupHeartbeatRequest, context: Context
) -> messages.ConsumerGroupHeartbeatResponse:
    groups = context.services.groups
    try:
        _check(request, context.version)
        reply = await groups.heartbeat(_heartbeat(request, context))
    except InconsistentGroupProtocolError as error:
        refusal = GroupIdNotFoundError(f"group {request.group_id!r} is not a consumer group: {error}")
        return _refused(refusal)
    except TidelogError as error:
        return _refused(error)
    return messages.ConsumerGroupHeartbeatResponse(
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval_ms=groups.heartbeat_interval_ms,
        assignment=_assignment(reply),
    )


def _refused(error: TidelogError) -> messages.ConsumerGroupHeartbeatResponse:
    return messages.ConsumerGroupHeartbeatResponse(error_code=group_code_of(error), error_message=message_of(error))


def _check(request: messages.ConsumerGroupHeartbeatRequest, version: int) -> None:
    """What Kafka asks of a heartbeat beyond what the coordinator asks of all."""
    if not request.group_id:
        raise InvalidRequestError("a heartbeat names its group")
    if not request.member_id and (version >= OWN_ID_SINCE or request.member_epoch != JOIN_EPOCH):
        raise InvalidRequestError("a heartbeat names its member: choose an id, a random UUID, before joining")
    if request.instance_id == "" or request.rack_id == "":
        raise InvalidRequestError("an instance id and a rack have a name, or are left out")
    if request.member_epoch == STATIC_LEAVE_EPOCH and request.instance_id is None:
        raise InvalidRequestError("only a member with an instance id can leave for a while (epoch -2)")
    if request.member_epoch != JOIN_EPOCH:
        return
    if request.rebalance_timeout_ms < 0:
        raise InvalidRequestError("who joins says its rebalance timeout")
    if request.topic_partitions is None or request.topic_partitions:
        raise InvalidRequestError("who joins holds nothing, and says so: give up what you hold first")
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        raise InvalidRequestError("who joins says which topics it reads, by names or by a pattern")


def _heartbeat(request: messages.ConsumerGroupHeartbeatRequest, context: Context) -> Heartbeat:
    groups, names = context.services.groups, request.subscribed_topic_names
    return Heartbeat(
        group=request.group_id,
        member_id=request.member_id or groups.new_member_id(),
        member_epoch=request.member_epoch,
        view=groups.view,
        now_ms=groups.now_ms(),
        instance_id=_instance(request.instance_id),
        rack=request.rack_id or "",
        client_id=_client_id(context),
        client_host=context.client_host,
        topics=None if names is None else tuple(names),
        pattern=request.subscribed_topic_regex,
        assignor=request.server_assignor or "",
        rebalance_timeout_ms=max(request.rebalance_timeout_ms, 0),
        owned=_owned(request),
    )


def _owned(request: messages.ConsumerGroupHeartbeatRequest) -> frozenset[PartitionId] | None:
    if request.topic_partitions is None:
        return None
    return frozenset(
        PartitionId(TopicId(UUID(bytes=topic.topic_id)), number)
        for topic in request.topic_partitions
        for number in topic.partitions
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


def _instance(given: str | None) -> str:
    return given or ""


def _client_id(context: Context) -> str:
    return (context.client_id or "")[:CLIENT_ID_LENGTH_MAX]


HANDLERS: dict[int, Entry] = {
    JOIN_GROUP.key: Entry(join, on_stop=ErrorCode.NOT_COORDINATOR),
    SYNC_GROUP.key: Entry(sync, on_stop=ErrorCode.NOT_COORDINATOR),
    HEARTBEAT.key: Entry(heartbeat),
    LEAVE_GROUP.key: Entry(leave),
    CONSUMER_GROUP_HEARTBEAT.key: Entry(consumer_heartbeat),
}
