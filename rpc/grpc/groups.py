"""Translates the gRPC service `Groups` to the group service. Only brokers serve it.

A topic that was deleted has its id and no name in a response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.grpc.cluster import address_of
from tidelog.rpc.grpc.errors import as_message, coded
from tidelog.rpc.grpc.methods import Receive, Send
from tidelog.rpc.grpc.partition_rows import outcomes, refs
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.services.context import RequestContext
from tidelog.services.groups import (
    Answer,
    GroupDetails,
    GroupService,
    HeartbeatReply,
    MemberHeartbeat,
    MemberSummary,
    OffsetToCommit,
    by_topic,
    check_groups,
)
from tidelog.services.limits import ResponseSize
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE, PartitionRef, topic_ref
from tidelog.services.topic_lookup import ID_BYTES
from tidelog.world.slicing import sliced


class GroupsHandlers:
    def __init__(self, service: GroupService, image: Callable[[], ClusterImage]) -> None:
        """`image` returns the broker's current copy of the metadata."""
        self._service = service
        self._image = image

    # Coordinators.

    async def find_coordinator(
        self, request: pb.FindCoordinatorRequest, context: RequestContext
    ) -> pb.FindCoordinatorResponse:
        listener = request.listener or context.listener
        brokers = await self._service.find_coordinators(context, request.groups)
        image = self._image()
        return pb.FindCoordinatorResponse(
            coordinators=[
                _coordinator(image, group, broker, listener)
                for group, broker in zip(request.groups, brokers, strict=True)
            ]
        )

    # Membership.

    async def heartbeat(self, request: pb.HeartbeatRequest, context: RequestContext) -> pb.HeartbeatResponse:
        return self._reply(await self._service.heartbeat(context, _heartbeat(request)))

    async def membership(self, receive: Receive, context: RequestContext, send: Send) -> None:
        async def next_heartbeat() -> MemberHeartbeat | None:
            request = await receive()
            return None if request is None else _heartbeat(request)

        async def respond(reply: Answer) -> None:
            if isinstance(reply, TidelogError):
                await send(pb.HeartbeatResponse(error=as_message(reply)))
            else:
                await send(self._reply(reply))

        await self._service.membership(context, next_heartbeat, respond)

    def _reply(self, reply: HeartbeatReply) -> pb.HeartbeatResponse:
        assignment = None if reply.assignment is None else _partitions(self._image(), reply.assignment)
        return pb.HeartbeatResponse(
            member_id=reply.member_id,
            member_epoch=reply.member_epoch,
            heartbeat_interval_ms=self._service.heartbeat_interval_ms,
            assignment=assignment,
            session_timeout_ms=reply.session_timeout_ms,
        )

    async def remove_members(
        self, request: pb.RemoveMembersRequest, context: RequestContext
    ) -> pb.RemoveMembersResponse:
        removed = await self._service.remove_members(context, request.group, request.member_ids, request.instance_ids)
        return pb.RemoveMembersResponse(members=[_outcome(name, error) for name, error in removed.items()])

    # Offsets.

    async def commit_offsets(
        self, request: pb.CommitOffsetsRequest, context: RequestContext
    ) -> pb.CommitOffsetsResponse:
        errors = await self._service.commit_offsets(
            context,
            request.group,
            {
                ref: OffsetToCommit(item.offset, item.leader_epoch, item.metadata)
                for ref, item in zip(await refs(request.offsets), request.offsets, strict=True)
            },
            member_id=request.member_id,
            member_epoch=request.member_epoch,
            instance_id=request.instance_id,
            sequence=request.sequence,
        )
        return pb.CommitOffsetsResponse(offsets=await outcomes(request.offsets, errors))

    async def fetch_offsets(self, request: pb.FetchOffsetsRequest, context: RequestContext) -> pb.FetchOffsetsResponse:
        committed = await self._service.fetch_offsets(
            context,
            request.group,
            await refs(request.partitions) or None,
            member_id=request.member_id,
            member_epoch=request.member_epoch if request.HasField("member_epoch") else None,
            require_stable=request.require_stable,
        )
        image = self._image()
        response = pb.FetchOffsetsResponse()
        async for ref, offset in sliced(committed.items(), PARTITIONS_PER_SLICE):
            row = response.offsets.add(offset=-1, leader_epoch=-1, commit_time_ms=-1)
            _set_name(image, row, ref)
            if isinstance(offset, TidelogError):
                row.error.CopyFrom(as_message(offset))
            else:
                row.offset, row.leader_epoch = offset.offset, offset.leader_epoch
                row.metadata, row.commit_time_ms = offset.metadata, offset.commit_ms
        return response

    async def delete_offsets(
        self, request: pb.DeleteOffsetsRequest, context: RequestContext
    ) -> pb.DeleteOffsetsResponse:
        errors = await self._service.delete_offsets(context, request.group, await refs(request.partitions))
        return pb.DeleteOffsetsResponse(offsets=await outcomes(request.partitions, errors))

    # Groups.

    async def list_groups(self, request: pb.ListGroupsRequest, context: RequestContext) -> pb.ListGroupsResponse:
        groups, loading = await self._service.list_groups(context, request.states, request.types)
        return pb.ListGroupsResponse(
            groups=[
                pb.GroupListing(group=group.group, type=group.kind, state=group.state, members=group.members)
                for group in groups
            ],
            loading=loading,
        )

    async def describe_groups(
        self, request: pb.DescribeGroupsRequest, context: RequestContext
    ) -> pb.DescribeGroupsResponse:
        check_groups(request.groups)
        response, size = pb.DescribeGroupsResponse(), ResponseSize("groups")
        async for group in sliced(dict.fromkeys(request.groups), 1):  # a group may have thousands of members
            try:
                size.check()
                details = self._service.describe_group(context, group)
            except TidelogError as error:
                response.groups.add(group=group, error=as_message(error))
            else:
                response.groups.append(self._description(details))
            size.add(response.groups[-1].ByteSize())
        return response

    def _description(self, details: GroupDetails) -> pb.GroupDescription:
        image = self._image()
        return pb.GroupDescription(
            group=details.group,
            type=details.kind,
            state=details.state,
            epoch=details.epoch,
            assignment_epoch=details.assignment_epoch,
            assignor=details.assignor,
            members=[_member(image, member) for member in details.members],
            coordinator=self._service.coordinator.me,
        )

    async def delete_groups(self, request: pb.DeleteGroupsRequest, context: RequestContext) -> pb.DeleteGroupsResponse:
        check_groups(request.groups)
        response = pb.DeleteGroupsResponse()
        for group in request.groups:
            error: TidelogError | None = None
            try:
                await self._service.delete_group(context, group)
            except TidelogError as rejection:
                error = rejection
            response.groups.append(_outcome(group, error))
        return response


def _heartbeat(request: pb.HeartbeatRequest) -> MemberHeartbeat:
    subscription = request.subscription if request.HasField("subscription") else None
    owned = [(topic_ref(topic.topic, topic.topic_id), topic.partitions) for topic in request.owned.topics]
    return MemberHeartbeat(
        group=request.group,
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack=request.rack,
        client_id=request.client_id,
        topics=None if subscription is None else tuple(subscription.topics),
        pattern=None if subscription is None else subscription.pattern,
        assignor=request.assignor,
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        owned=tuple(owned) if request.HasField("owned") else None,
    )


def _coordinator(image: ClusterImage, group: str, broker: int | TidelogError, listener: str) -> pb.Coordinator:
    if isinstance(broker, TidelogError):
        return pb.Coordinator(group=group, error=as_message(broker), broker=-1)
    registered = image.brokers.get(broker)
    endpoint = None if registered is None else address_of(registered, listener)
    if endpoint is None:
        message = f"broker {broker}, which coordinates the group, has no listener {listener[:100]!r}"
        return pb.Coordinator(group=group, error=coded(ErrorCode.LISTENER_NOT_FOUND, message), broker=broker)
    return pb.Coordinator(group=group, broker=broker, host=endpoint[0], port=endpoint[1])


def _name_of(image: ClusterImage, topic_id: TopicId) -> str:
    topic = image.topics.get(topic_id)
    return "" if topic is None else topic.name


def _partitions(image: ClusterImage, partitions: Iterable[PartitionId]) -> pb.Partitions:
    return pb.Partitions(
        topics=[
            pb.TopicPartitions(topic=_name_of(image, topic_id), topic_id=topic_id.bytes, partitions=numbers)
            for topic_id, numbers in by_topic(partitions).items()
        ]
    )


def _member(image: ClusterImage, member: MemberSummary) -> pb.MemberDescription:
    return pb.MemberDescription(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack=member.rack,
        client_id=member.client_id,
        client_host=member.client_host,
        member_epoch=member.member_epoch,
        topics=member.topics,
        pattern=member.pattern,
        assignment=_partitions(image, member.assignment),
        target=_partitions(image, member.target),
    )


def _outcome(name: str, error: TidelogError | None) -> common.Outcome:
    return common.Outcome(name=name, error=None if error is None else as_message(error))


def _set_name(image: ClusterImage, row: pb.CommittedOffset, ref: PartitionRef) -> None:
    """Sets name and id of a known topic; otherwise what the request has."""
    if isinstance(ref, PartitionId):
        row.partition, row.topic_id = ref.partition, ref.topic_id.bytes
        row.topic = _name_of(image, ref.topic_id)
        return
    topic, row.partition = ref
    if isinstance(topic, bytes):
        row.topic_id = topic
        row.topic = _name_of(image, TopicId(UUID(bytes=topic))) if len(topic) == ID_BYTES else ""
    else:
        row.topic = topic
        known = image.topic_ids.get(topic)
        row.topic_id = b"" if known is None else known.bytes
