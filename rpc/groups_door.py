"""The service `Groups`: consumer groups and their committed offsets. Only brokers have it.

The door finds topics by name or id in the broker's own image, and hands everything else to `GroupService`, which the
Kafka door calls as well. What a member is told of a topic that is gone has its id and no name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidelog.coordinator.requests import GroupDetails, Heartbeat, HeartbeatReply, MemberSummary, OffsetToCommit
from tidelog.coordinator.service import GroupService
from tidelog.coordinator.streams import Answer
from tidelog.metadata.image import Broker, ClusterImage
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.door import Caller, Receive, Send
from tidelog.rpc.door_topics import NamesPartition, partition_of, read_id
from tidelog.rpc.errors import as_message, coded
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb

GROUPS_PER_SLICE = 100
PARTITIONS_PER_SLICE = 500
"""Of one request, in one turn of the event loop."""


class GroupsDoor:
    def __init__(self, service: GroupService, image: Callable[[], ClusterImage], limits: DoorLimits) -> None:
        """`image` gives the broker's own copy of the metadata."""
        self._service = service
        self._image = image
        self._limits = limits

    # Coordinators.

    async def find_coordinator(self, request: pb.FindCoordinatorRequest, caller: Caller) -> pb.FindCoordinatorResponse:
        _check_groups(request.groups)
        listener = request.listener or caller.listener
        found = await self._service.find_coordinators(request.groups)
        image = self._image()
        return pb.FindCoordinatorResponse(
            coordinators=[
                _coordinator(image, group, where, listener) for group, where in zip(request.groups, found, strict=True)
            ]
        )

    # Membership.

    async def heartbeat(self, request: pb.HeartbeatRequest, caller: Caller) -> pb.HeartbeatResponse:
        return self._reply(await self._service.heartbeat(self._heartbeat(request, caller)))

    async def membership(self, receive: Receive, caller: Caller, send: Send) -> None:
        async def next_heartbeat() -> Heartbeat | None:
            request = await receive()
            return None if request is None else self._heartbeat(request, caller)

        async def answer(reply: Answer) -> None:
            if isinstance(reply, TidelogError):
                await send(pb.HeartbeatResponse(error=as_message(reply)))
            else:
                await send(self._reply(reply))

        await self._service.membership(next_heartbeat, answer)

    def _heartbeat(self, request: pb.HeartbeatRequest, caller: Caller) -> Heartbeat:
        subscription = request.subscription if request.HasField("subscription") else None
        return Heartbeat(
            group=request.group,
            member_id=request.member_id,
            member_epoch=request.member_epoch,
            view=self._service.view,
            now_ms=self._service.now_ms(),
            instance_id=request.instance_id,
            rack=request.rack,
            client_id=request.client_id,
            client_host=_host(caller.peer),
            topics=None if subscription is None else tuple(subscription.topics),
            pattern=None if subscription is None else subscription.pattern,
            assignor=request.assignor,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            owned=self._owned(request.owned) if request.HasField("owned") else None,
        )

    def _owned(self, named: pb.Partitions) -> frozenset[PartitionId]:
        ids = self._image().topic_ids
        owned: set[PartitionId] = set()
        for topic in named.topics:
            found = read_id(topic.topic_id, "topic id") if topic.topic_id else ids.get(topic.topic)
            if found is not None:  # nobody is dealt what does not exist, so nobody waits for it either
                owned.update(PartitionId(TopicId(found), number) for number in topic.partitions)
        return frozenset(owned)

    def _reply(self, reply: HeartbeatReply) -> pb.HeartbeatResponse:
        assignment = None if reply.assignment is None else _partitions(self._image(), reply.assignment)
        return pb.HeartbeatResponse(
            member_id=reply.member_id,
            member_epoch=reply.member_epoch,
            heartbeat_interval_ms=self._service.heartbeat_interval_ms,
            assignment=assignment,
            session_timeout_ms=reply.session_timeout_ms,
        )

    async def remove_members(self, request: pb.RemoveMembersRequest, _caller: Caller) -> pb.RemoveMembersResponse:
        removed = await self._service.remove_members(request.group, request.member_ids, request.instance_ids)
        return pb.RemoveMembersResponse(members=[_outcome(name, error) for name, error in removed.items()])

    # Offsets.

    def _check_count(self, items: Sequence[object]) -> None:
        if not items:
            raise InvalidRequestError("no partition is named")

    async def _find(self, named: Sequence[NamesPartition]) -> list[PartitionId | TidelogError]:
        """Each of them, or what is wrong with it; raises if one is named twice."""
        image = self._image()
        found: list[PartitionId | TidelogError] = []
        seen: set[PartitionId] = set()
        for number, item in enumerate(named, start=1):
            if number % PARTITIONS_PER_SLICE == 0:
                await asyncio.sleep(0)
            try:
                partition = partition_of(image, item)
            except TidelogError as error:
                found.append(error)
                continue
            if partition in seen:
                raise InvalidRequestError(f"partition {item.partition} of {_label(item)} is named twice")
            seen.add(partition)
            found.append(partition)
        return found

    async def commit_offsets(self, request: pb.CommitOffsetsRequest, _caller: Caller) -> pb.CommitOffsetsResponse:
        self._check_count(request.offsets)
        found = [
            InvalidRequestError(f"an offset of {item.offset}") if item.offset < 0 else where
            for item, where in zip(request.offsets, await self._find(request.offsets), strict=True)
        ]
        offsets = {
            where: OffsetToCommit(item.offset, item.leader_epoch, item.metadata)
            for item, where in zip(request.offsets, found, strict=True)
            if isinstance(where, PartitionId)
        }
        done: Mapping[PartitionId, TidelogError | None] = {}
        if offsets:
            done = await self._service.commit_offsets(
                request.group,
                offsets,
                member_id=request.member_id,
                member_epoch=request.member_epoch,
                instance_id=request.instance_id,
                sequence=request.sequence,
            )
        return pb.CommitOffsetsResponse(offsets=_outcomes(request.offsets, found, done))

    async def fetch_offsets(self, request: pb.FetchOffsetsRequest, _caller: Caller) -> pb.FetchOffsetsResponse:
        found = await self._find(request.partitions)
        image = self._image()
        held = self._service.fetch_offsets(
            request.group,
            [where for where in found if isinstance(where, PartitionId)] if found else None,
            member_id=request.member_id,
            member_epoch=request.member_epoch if request.HasField("member_epoch") else None,
        )
        response = pb.FetchOffsetsResponse()
        for number, where in enumerate(found or held, start=1):
            if number % PARTITIONS_PER_SLICE == 0:
                await asyncio.sleep(0)
            if isinstance(where, PartitionId):
                committed = held[where]
                response.offsets.add(
                    topic=_name_of(image, where.topic_id),
                    topic_id=where.topic_id.bytes,
                    partition=where.partition,
                    offset=committed.offset,
                    leader_epoch=committed.leader_epoch,
                    metadata=committed.metadata,
                    commit_time_ms=committed.commit_ms,
                )
            else:
                named = request.partitions[len(response.offsets)]
                response.offsets.add(
                    topic=named.topic,
                    topic_id=named.topic_id,
                    partition=named.partition,
                    error=as_message(where),
                    offset=-1,
                    leader_epoch=-1,
                    commit_time_ms=-1,
                )
        return response

    async def delete_offsets(self, request: pb.DeleteOffsetsRequest, _caller: Caller) -> pb.DeleteOffsetsResponse:
        self._check_count(request.partitions)
        found = await self._find(request.partitions)
        partitions = [where for where in found if isinstance(where, PartitionId)]
        done = await self._service.delete_offsets(request.group, partitions) if partitions else {}
        return pb.DeleteOffsetsResponse(offsets=_outcomes(request.partitions, found, done))

    # Groups.

    async def list_groups(self, request: pb.ListGroupsRequest, _caller: Caller) -> pb.ListGroupsResponse:
        found, loading = await self._service.list_groups(request.states, request.types)
        return pb.ListGroupsResponse(
            groups=[
                pb.GroupListing(group=one.group, type=one.kind, state=one.state, members=one.members) for one in found
            ],
            loading=loading,
        )

    async def describe_groups(self, request: pb.DescribeGroupsRequest, _caller: Caller) -> pb.DescribeGroupsResponse:
        _check_groups(request.groups)
        response = pb.DescribeGroupsResponse()
        for number, group in enumerate(request.groups, start=1):
            if number % GROUPS_PER_SLICE == 0:
                await asyncio.sleep(0)
            try:
                details = self._service.describe_group(group)
            except TidelogError as error:
                response.groups.add(group=group, error=as_message(error))
            else:
                response.groups.append(self._description(details))
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

    async def delete_groups(self, request: pb.DeleteGroupsRequest, _caller: Caller) -> pb.DeleteGroupsResponse:
        _check_groups(request.groups)
        response = pb.DeleteGroupsResponse()
        for group in request.groups:
            error: TidelogError | None = None
            try:
                await self._service.delete_group(group)
            except TidelogError as refusal:
                error = refusal
            response.groups.append(_outcome(group, error))
        return response


def _check_groups(groups: Sequence[str]) -> None:
    if not groups:
        raise InvalidRequestError("no group is named")


def _coordinator(image: ClusterImage, group: str, where: int | TidelogError, listener: str) -> pb.Coordinator:
    if isinstance(where, TidelogError):
        return pb.Coordinator(group=group, error=as_message(where), broker=-1)
    broker = image.brokers.get(where)
    endpoint = None if broker is None else _endpoint(broker, listener)
    if endpoint is None:
        message = f"broker {where}, which coordinates the group, has no listener {listener[:100]!r}"
        return pb.Coordinator(group=group, error=coded(ErrorCode.LISTENER_NOT_FOUND, message), broker=where)
    return pb.Coordinator(group=group, broker=where, host=endpoint[0], port=endpoint[1])


def _endpoint(broker: Broker, listener: str) -> tuple[str, int] | None:
    """Where a listener of a broker is; without a name its first one."""
    for name, _, host, port in broker.endpoints:
        if not listener or name == listener:
            return host, port
    return None


def _name_of(image: ClusterImage, topic_id: TopicId) -> str:
    topic = image.topics.get(topic_id)
    return "" if topic is None else topic.name


def _partitions(image: ClusterImage, partitions: Iterable[PartitionId]) -> pb.Partitions:
    by_topic: dict[TopicId, list[int]] = {}
    for partition in partitions:
        by_topic.setdefault(partition.topic_id, []).append(partition.partition)
    return pb.Partitions(
        topics=[
            pb.TopicPartitions(topic=_name_of(image, topic_id), topic_id=topic_id.bytes, partitions=numbers)
            for topic_id, numbers in by_topic.items()
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


def _outcomes(
    named: Sequence[Any],
    found: Sequence[PartitionId | TidelogError],
    done: Mapping[PartitionId, TidelogError | None],
) -> list[common.PartitionOutcome]:
    """In the order of the request."""
    rows = []
    for item, where in zip(named, found, strict=True):
        error = done[where] if isinstance(where, PartitionId) else where
        message = None if error is None else as_message(error)
        rows.append(common.PartitionOutcome(topic=item.topic, partition=item.partition, error=message))
    return rows


def _label(named: NamesPartition) -> str:
    return named.topic or named.topic_id.hex()


def _host(peer: str) -> str:
    """The host of a gRPC peer (`ipv4:10.0.0.1:41000`, `ipv6:%5B::1%5D:41000`); anything else as it is."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer[:100]
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")[:100]
