"""The gRPC service `Cluster`: metadata for clients, and the controller quorum. Every node serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import Broker, ClusterImage, Topic
from tidelog.metadata.partition_changes import can_serve
from tidelog.metadata.records import NO_LEADER
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.errors import ErrorCode
from tidelog.model.maps import sorted_items
from tidelog.raft.messages import EntryKind
from tidelog.rpc.grpc.errors import coded, outcome
from tidelog.rpc.grpc.methods import Send
from tidelog.rpc.v1 import cluster_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.services.cluster import MetadataQuery
from tidelog.services.context import RequestContext
from tidelog.services.limits import ResponseSize
from tidelog.services.metadata_records import MetadataEntries, MetadataRecords, Part, SnapshotPiece, Stale
from tidelog.services.quorum import AddVoter, Endpoints, QuorumDescription, QuorumMember, RemoveVoter, UpdateVoter
from tidelog.services.services import Services

PARTITIONS_PER_SLICE = 2_000
"""Rows built before the event loop gets a turn."""
_KINDS = {
    EntryKind.NO_OP: pb.MetadataEntry.NO_OP,
    EntryKind.DATA: pb.MetadataEntry.RECORDS,
    EntryKind.MEMBERSHIP: pb.MetadataEntry.MEMBERSHIP,
}


class ClusterHandlers:
    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def broker_addresses(self) -> str:
        return self._services.cluster.broker_addresses

    # Metadata.

    async def metadata(self, request: pb.MetadataRequest, caller: RequestContext) -> pb.MetadataResponse:
        query = MetadataQuery(create=tuple(request.topics) if request.may_create else (), listener=request.listener)
        metadata = await self._services.cluster.metadata(caller, query)
        image = metadata.image
        addresses = {broker.broker: address_of(broker, metadata.listener) for broker in image.live_brokers()}
        reachable = {number for number, address in addresses.items() if address is not None}
        response = pb.MetadataResponse(
            cluster_id=metadata.cluster_id,
            controller=metadata.controller,
            metadata_offset=metadata.metadata_offset,
            listener=metadata.listener,
            stale_ms=metadata.stale_ms,
        )
        for number, address in sorted(addresses.items()):
            if address is not None:
                host, port = address
                response.brokers.add(id=number, host=host, port=port, rack=image.brokers[number].rack or "")
        topics: Iterable[tuple[str, bytes, Topic | Outcome]] = metadata.find_all(request.topics, request.topic_ids)
        if request.all_topics:
            topics = sorted((topic.name, b"", topic) for topic in await metadata.topics())
        rows, size = 0, ResponseSize("topics")
        for name, topic_id, topic in topics:
            size.check()
            row = response.topics.add()
            if isinstance(topic, Outcome):
                row.MergeFrom(pb.Topic(name=name, topic_id=topic_id, error=outcome(topic.error, topic.message)))
                rows += 1
            else:
                _fill_topic(row, image, topic, reachable)
                rows += len(topic.partitions)
            size.add(row.ByteSize())
            if rows >= PARTITIONS_PER_SLICE:
                rows = 0
                await asyncio.sleep(0)
        return response

    async def describe_cluster(
        self, _request: pb.DescribeClusterRequest, caller: RequestContext
    ) -> pb.DescribeClusterResponse:
        description = await self._services.cluster.describe(caller)
        response = pb.DescribeClusterResponse(
            cluster_id=description.cluster_id,
            controller=description.controller,
            node=description.node,
            version=description.version,
            metadata_offset=description.metadata_offset,
            stale_ms=description.stale_ms,
        )
        for number, broker in sorted_items(description.image.brokers):
            response.brokers.add(
                id=number,
                epoch=broker.broker_epoch,
                endpoints=[endpoint_message(endpoint) for endpoint in broker.endpoints],
                rack=broker.rack or "",
                is_fenced=not broker.is_live,
            )
        return response

    # The quorum.

    async def describe_quorum(
        self, request: pb.DescribeQuorumRequest, caller: RequestContext
    ) -> pb.DescribeQuorumResponse:
        quorum = self._services.quorum
        if request.local:
            return _quorum_message(await quorum.describe_own(caller))
        return _quorum_message(await quorum.describe(caller, allow_stale=request.allow_stale))

    async def add_voter(self, request: pb.AddVoterRequest, caller: RequestContext) -> pb.AddVoterResponse:
        voter = AddVoter(
            node=request.node,
            directory_id=request.directory_id,
            endpoints=_endpoints(request.endpoints),
            timeout_ms=request.timeout_ms,
        )
        await self._services.quorum.add_voter(caller, voter)
        return pb.AddVoterResponse()

    async def remove_voter(self, request: pb.RemoveVoterRequest, caller: RequestContext) -> pb.RemoveVoterResponse:
        voter = RemoveVoter(node=request.node, directory_id=request.directory_id, timeout_ms=request.timeout_ms)
        await self._services.quorum.remove_voter(caller, voter)
        return pb.RemoveVoterResponse()

    async def update_voter(self, request: pb.UpdateVoterRequest, caller: RequestContext) -> pb.UpdateVoterResponse:
        voter = UpdateVoter(
            node=request.node,
            directory_id=request.directory_id,
            endpoints=_endpoints(request.endpoints),
            timeout_ms=request.timeout_ms,
        )
        await self._services.quorum.update_voter(caller, voter)
        return pb.UpdateVoterResponse()

    # The metadata log.

    async def metadata_records(self, request: pb.MetadataRecordsRequest, caller: RequestContext, send: Send) -> None:
        records = MetadataRecords(
            from_offset=request.from_offset, follow=request.follow, allow_stale=request.allow_stale
        )

        async def send_part(part: Part) -> None:
            await send(_part_message(part))

        await self._services.metadata_records.read(caller, records, send_part)


# Values to messages.


def _part_message(part: Part) -> pb.MetadataRecordsResponse:
    match part:
        case Stale(stale_ms):
            return pb.MetadataRecordsResponse(stale_ms=stale_ms)
        case SnapshotPiece(end_offset, epoch, data, is_last):
            piece = pb.MetadataSnapshotPiece(end_offset=end_offset, epoch=epoch, data=data, is_last=is_last)
            return pb.MetadataRecordsResponse(snapshot=piece)
        case MetadataEntries(high_watermark, entries):
            rows = [
                pb.MetadataEntry(offset=entry.offset, epoch=entry.epoch, kind=_KINDS[entry.kind], data=entry.data)
                for entry in entries
            ]
            return pb.MetadataRecordsResponse(entries=pb.MetadataEntries(entries=rows, high_watermark=high_watermark))


def _endpoints(endpoints: Sequence[pb.VoterEndpoint]) -> Endpoints:
    return tuple((endpoint.listener, endpoint.address) for endpoint in endpoints)


def _quorum_message(quorum: QuorumDescription) -> pb.DescribeQuorumResponse:
    return pb.DescribeQuorumResponse(
        node=quorum.node,
        role=quorum.role,
        leader=quorum.leader,
        epoch=quorum.epoch,
        high_watermark=quorum.high_watermark,
        log_start_offset=quorum.log_start_offset,
        log_end_offset=quorum.log_end_offset,
        durable_end_offset=quorum.durable_end_offset,
        without_leader_ms=quorum.without_leader_ms,
        members=[_member_message(member) for member in quorum.members],
        observers=[pb.QuorumObserver(node=node, offset=offset) for node, offset in quorum.observers],
        snapshot_offset=quorum.snapshot_offset,
        snapshot_epoch=quorum.snapshot_epoch,
        stale_ms=quorum.stale_ms,
    )


def _member_message(member: QuorumMember) -> pb.QuorumMember:
    return pb.QuorumMember(
        node=member.node,
        directory_id=member.directory_id,
        endpoints=[pb.VoterEndpoint(listener=name, address=address) for name, address in member.endpoints],
        is_voter=member.is_voter,
        is_connected=member.is_connected,
        error=member.error,
        log_end_offset=member.log_end_offset,
        lag=member.lag,
        silent_ms=member.silent_ms,
        is_recovering=member.is_recovering,
        stuck_ms=member.stuck_ms,
    )


def endpoint_message(endpoint: tuple[str, str, str, int]) -> common.Endpoint:
    listener, protocol, host, port = endpoint
    return common.Endpoint(listener=listener, protocol=protocol, host=host, port=port)


def address_of(broker: Broker, listener: str) -> tuple[str, int] | None:
    """Return the address of a listener of a broker; without a name, of its first one."""
    for name, _, host, port in broker.endpoints:
        if not listener or name == listener:
            return host, port
    return None


def _fill_topic(row: pb.Topic, image: ClusterImage, topic: Topic, reachable: set[int]) -> None:
    row.name, row.topic_id = topic.name, topic.topic_id.bytes
    row.is_internal = topic.name in INTERNAL_TOPICS
    for number, partition in sorted_items(topic.partitions):
        error = None
        if partition.leader == NO_LEADER:
            error = coded(ErrorCode.LEADER_NOT_AVAILABLE, f"nobody leads {topic.name}-{number}")
        elif partition.leader not in reachable:
            message = f"broker {partition.leader}, which leads {topic.name}-{number}, has no such listener"
            error = coded(ErrorCode.LISTENER_NOT_FOUND, message)
        row.partitions.add(
            partition=number,
            leader=partition.leader,
            leader_epoch=partition.leader_epoch,
            replicas=partition.replicas,
            isr=partition.isr,
            offline_replicas=[b for b in partition.replicas if not can_serve(image, partition, b)],
            error=error,
        )
