"""The service `Cluster`: what clients find their way by, and the controllers' quorum. Every node serves it.

Metadata comes from the node's own copy; a request may create the topics that it names (`door_auto_create`). The quorum
is described and changed by the active controller; the metadata log is read from this node if it is a controller, else
from any.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tidelog.metadata.image import Broker, ClusterImage, Topic
from tidelog.metadata.leadership import can_serve
from tidelog.metadata.records import NO_LEADER
from tidelog.metadata.shell import ControllerNode
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.metadata.voter_changes import PROBE_PATIENCE_MS, UNDO_MS
from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    InvalidRequestError,
    InvalidVoterKeyError,
    NotLeaderError,
    OffsetOutOfRangeError,
    TidelogError,
    VoterNotFoundError,
)
from tidelog.model.ids import NodeId, Offset
from tidelog.model.maps import sorted_items
from tidelog.raft.membership import Member, directory_text
from tidelog.raft.messages import Entry, EntryKind
from tidelog.raft.state_machine import SnapshotJob
from tidelog.raft.tail import TailEntries
from tidelog.rpc.door import Caller, Method, Send, method_named
from tidelog.rpc.door_auto_create import AutoCreate
from tidelog.rpc.door_quorum import STALE_AFTER_S, QuorumLink
from tidelog.rpc.door_quorum_report import describe_or_recall, described_by, quorum_message
from tidelog.rpc.door_topics import ID_BYTES, topic_of
from tidelog.rpc.errors import as_message, coded
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.v1 import cluster_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.world.work import Work

NODE_ID_MAX = (1 << 31) - 1
ENDPOINTS_MAX = 16
NAME_LENGTH_MAX = 255
SNAPSHOT_PIECE_BYTES = 1 << 20
VOTER_TIMEOUT_MS = 60_000
VOTER_SLACK_MS = PROBE_PATIENCE_MS + UNDO_MS
PARTITIONS_AT_A_TIME = 2_000
"""After so many the event loop has a turn."""
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s\[\]:/]{1,253}):([0-9]{1,5})")
_KINDS = {
    EntryKind.NO_OP: pb.MetadataEntry.NO_OP,
    EntryKind.DATA: pb.MetadataEntry.RECORDS,
    EntryKind.MEMBERSHIP: pb.MetadataEntry.MEMBERSHIP,
}


class ClusterDoor:
    def __init__(self, link: QuorumLink, work: Work, limits: DoorLimits, *, version: str = "") -> None:
        self._link = link
        self._work = work
        self._limits = limits
        self._version = version
        self._auto_create = AutoCreate(link)

    def brokers_told(self) -> str:
        """Where the brokers are, in words."""
        live = self._link.image.live_brokers()
        told = [f"{host}:{port} ({name})" for broker in live[:3] for name, _, host, port in broker.endpoints]
        return f"brokers are at {', '.join(told)}" if told else "no broker is live"

    # Metadata.

    async def metadata(self, request: pb.MetadataRequest, caller: Caller) -> pb.MetadataResponse:
        link = self._link
        listener = self._listener(link.image, request.listener, caller)
        errors = await self._auto_create.create(request.topics) if request.may_create else {}
        image, offset = link.image, link.metadata_offset  # what is told is of one moment
        brokers = {broker.broker: _at(broker, listener) for broker in image.live_brokers()}
        response = pb.MetadataResponse(
            cluster_id=link.cluster_id,
            controller=link.active,
            metadata_offset=offset,
            listener=listener,
            stale_ms=link.stale_ms(),
        )
        for number, place in sorted(brokers.items()):
            if place is not None:
                response.brokers.add(id=number, host=place[0], port=place[1], rack=image.brokers[number].rack or "")
        if request.all_topics:
            wanted = [(name, b"") for name in sorted(image.topic_ids)]
        else:
            wanted = [(name, b"") for name in request.topics]
            wanted += [("", topic_id) for topic_id in request.topic_ids]
        done = 0
        for name, topic_id in wanted:
            row = response.topics.add()
            try:
                topic = topic_of(image, name=name, topic_id=topic_id)
            except TidelogError as error:
                told = None if topic_id else errors.get(name)
                row.MergeFrom(pb.Topic(name=name, topic_id=topic_id, error=told or as_message(error)))
                continue
            _fill_topic(row, image, topic, {number for number, place in brokers.items() if place is not None})
            done += len(topic.partitions)
            if done >= PARTITIONS_AT_A_TIME:
                done = 0
                await asyncio.sleep(0)
        return response

    def _listener(self, image: ClusterImage, asked: str, caller: Caller) -> str:
        known = {endpoint[0] for broker in image.live_brokers() for endpoint in broker.endpoints}
        if asked and known and asked not in known:
            raise InvalidRequestError(
                f"no broker has a listener {asked[:NAME_LENGTH_MAX]!r}; there are: {', '.join(sorted(known))}"
            )
        return asked or caller.listener

    async def describe_cluster(
        self, _request: pb.DescribeClusterRequest, _caller: Caller
    ) -> pb.DescribeClusterResponse:
        link = self._link
        response = pb.DescribeClusterResponse(
            cluster_id=link.cluster_id,
            controller=link.active,
            node=link.me,
            version=self._version,
            metadata_offset=link.metadata_offset,
            stale_ms=link.stale_ms(),
        )
        for number, broker in sorted_items(link.image.brokers):
            response.brokers.add(
                id=number,
                epoch=broker.broker_epoch,
                endpoints=[endpoint_message(endpoint) for endpoint in broker.endpoints],
                rack=broker.rack or "",
                is_fenced=not broker.is_live,
            )
        return response

    # The quorum.

    async def _by_active(
        self,
        name: str,
        request: pb.DescribeQuorumRequest | pb.AddVoterRequest | pb.RemoveVoterRequest | pb.UpdateVoterRequest,
        caller: Caller,
        *,
        timeout_ms: int,
        is_repeatable: bool = False,
    ) -> object:
        """Carried out here if this node is the active controller, else there."""
        method = method_named("Cluster", name)

        async def local(controller: ControllerNode) -> object:
            return await _QUORUM_CALLS[name](controller, request)

        if caller.is_node:
            controller = self._link.controller
            if controller is None or not controller.is_active:
                leader = None if self._link.active < 0 else NodeId(self._link.active)
                raise NotLeaderError(f"node {self._link.me} is not the active controller", leader=leader)
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    return await local(controller)
            except TimeoutError:
                raise CallTimeoutError(f"{name} was not done in {timeout_ms} ms; it may be done yet") from None
        return await self._link.forward(method, request, local, is_repeatable=is_repeatable, timeout_ms=timeout_ms)

    async def describe_quorum(self, request: pb.DescribeQuorumRequest, caller: Caller) -> pb.DescribeQuorumResponse:
        if request.local:
            if self._link.controller is None:
                raise InvalidRequestError(f"node {self._link.me} is not a controller; ask without `local`")
            return quorum_message(self._link.controller.driver.describe())
        timeout_ms = self._limits.admin_timeout(request.timeout_ms)
        if request.allow_stale and not caller.is_node:
            return await describe_or_recall(self._link, timeout_ms=timeout_ms)
        found = await self._by_active("DescribeQuorum", request, caller, timeout_ms=timeout_ms, is_repeatable=True)
        assert isinstance(found, pb.DescribeQuorumResponse), "the response of its method"
        return found

    async def add_voter(self, request: pb.AddVoterRequest, caller: Caller) -> pb.AddVoterResponse:
        _check_voter(request.node, request.directory_id, request.endpoints, needs_directory=True)
        await self._by_active("AddVoter", request, caller, timeout_ms=self._voter_timeout(request))
        return pb.AddVoterResponse()

    async def remove_voter(self, request: pb.RemoveVoterRequest, caller: Caller) -> pb.RemoveVoterResponse:
        _check_voter(request.node, request.directory_id, None)
        await self._by_active("RemoveVoter", request, caller, timeout_ms=self._voter_timeout(request))
        return pb.RemoveVoterResponse()

    async def update_voter(self, request: pb.UpdateVoterRequest, caller: Caller) -> pb.UpdateVoterResponse:
        _check_voter(request.node, request.directory_id, request.endpoints)
        await self._by_active("UpdateVoter", request, caller, timeout_ms=self._voter_timeout(request))
        return pb.UpdateVoterResponse()

    def _voter_timeout(self, request: pb.AddVoterRequest | pb.RemoveVoterRequest | pb.UpdateVoterRequest) -> int:
        """How long the call may take: the controller gives up first, and undoes what it has begun."""
        if request.timeout_ms < 0:
            raise InvalidRequestError(f"timeout_ms {request.timeout_ms}: at least 0")
        request.timeout_ms = min(request.timeout_ms or VOTER_TIMEOUT_MS, self._limits.admin_timeout_max_ms)
        return request.timeout_ms + VOTER_SLACK_MS

    # The metadata log.

    async def metadata_records(self, request: pb.MetadataRecordsRequest, caller: Caller, send: Send) -> None:
        if request.from_offset < 0:
            raise InvalidRequestError(f"from_offset {request.from_offset}: offsets begin at 0")
        controller, stale_ms = self._link.controller, self._link.stale_ms()
        if controller is not None:
            if stale_ms is not None:
                await send(pb.MetadataRecordsResponse(stale_ms=stale_ms))
            await _Records(controller, self._work, send).run(Offset(request.from_offset), follow=request.follow)
        elif caller.is_node:
            raise NotLeaderError(f"node {self._link.me} is no controller", leader=None)
        else:
            method: Method = method_named("Cluster", "MetadataRecords")
            may_recall = request.allow_stale and stale_ms is not None
            timeout_ms = int(STALE_AFTER_S * 1000) if may_recall else self._limits.admin_timeout_ms
            try:
                await self._link.relay(method, request, send, timeout_ms=timeout_ms)
            except CallTimeoutError:
                if not may_recall:
                    raise
                await self._recall_records(send)

    async def _recall_records(self, send: Send) -> None:
        """This broker's copy, as a snapshot."""
        image, offset, epoch = self._link.image, self._link.metadata_offset, self._link.metadata_epoch
        await send(pb.MetadataRecordsResponse(stale_ms=self._link.stale_ms() or 0))
        data = await self._work.run(snapshot_bytes, image, None)
        await _send_pieces(send, offset, epoch, data)


class _Records:
    """One reader of the metadata log at this controller."""

    def __init__(self, controller: ControllerNode, work: Work, send: Send) -> None:
        self._controller = controller
        self._work = work
        self._send = send

    async def run(self, offset: Offset, *, follow: bool) -> None:
        driver = self._controller.driver
        end = driver.core.commit
        if offset > end:
            raise OffsetOutOfRangeError(
                f"the committed log ends at {end}", offset=offset, start=driver.core.log.start, end=end
            )
        while follow or offset < end:
            if offset < driver.core.log.start:
                offset = await self._send_snapshot()
                continue
            epoch = driver.core.log.epoch_before(offset)
            assert epoch is not None, "what is committed and not below the start is in the log"
            tail = driver.tail(offset, epoch)
            try:
                while follow or offset < end:
                    found = await tail.next()
                    if not isinstance(found, TailEntries):
                        break  # what comes next was replaced by a snapshot meanwhile
                    await self._send_entries(found)
                    offset = tail.offset
            finally:
                tail.close()

    async def _send_entries(self, found: TailEntries) -> None:
        rows = [_entry_message(found.first + number, entry) for number, entry in enumerate(found.entries)]
        entries = pb.MetadataEntries(entries=rows, high_watermark=self._controller.driver.core.commit)
        await self._send(pb.MetadataRecordsResponse(entries=entries))

    async def _send_snapshot(self) -> Offset:
        """Of what is applied here now; newer than the one on disk, and it costs no read."""
        machine = self._controller.machine
        offset, job = machine.offset, machine.take_snapshot()
        epoch = self._controller.driver.core.log.epoch_before(offset)
        assert epoch is not None, "what is applied is in the log, or in its snapshot"
        assert isinstance(job, SnapshotJob), "an image is encoded elsewhere"
        await _send_pieces(self._send, offset, epoch, await self._work.run(job.encode, *job.values))
        return offset


async def _send_pieces(send: Send, offset: int, epoch: int, data: bytes) -> None:
    for position in range(0, len(data), SNAPSHOT_PIECE_BYTES):
        piece = data[position : position + SNAPSHOT_PIECE_BYTES]
        is_last = position + len(piece) == len(data)
        part = pb.MetadataSnapshotPiece(end_offset=offset, epoch=epoch, data=piece, is_last=is_last)
        await send(pb.MetadataRecordsResponse(snapshot=part))


def _entry_message(offset: int, entry: Entry) -> pb.MetadataEntry:
    return pb.MetadataEntry(offset=offset, epoch=entry.epoch, kind=_KINDS[entry.kind], data=entry.data)


# Images to messages.


def endpoint_message(endpoint: tuple[str, str, str, int]) -> common.Endpoint:
    listener, protocol, host, port = endpoint
    return common.Endpoint(listener=listener, protocol=protocol, host=host, port=port)


def _at(broker: Broker, listener: str) -> tuple[str, int] | None:
    """Where a listener of a broker is; without a name its first one."""
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


# What the active controller does.


def _check_voter(
    node: int, directory: bytes, endpoints: Sequence[pb.VoterEndpoint] | None, *, needs_directory: bool = False
) -> None:
    """`endpoints` None: there are none to check."""
    if not 0 <= node <= NODE_ID_MAX:
        raise InvalidRequestError(f"node id {node}: 0 to {NODE_ID_MAX}")
    if (directory or needs_directory) and (len(directory) != ID_BYTES or not any(directory)):
        raise InvalidRequestError(f"voter {node}: a directory id has {ID_BYTES} bytes, not all of them 0")
    if endpoints is None:
        return
    if not 1 <= len(endpoints) <= ENDPOINTS_MAX:
        raise InvalidRequestError(f"voter {node}: 1 to {ENDPOINTS_MAX} endpoints, not {len(endpoints)}")
    if len({endpoint.listener for endpoint in endpoints}) != len(endpoints):
        raise InvalidRequestError(f"voter {node}: a listener is named twice")
    for endpoint in endpoints:
        name, found = endpoint.listener, _ADDRESS.fullmatch(endpoint.address)
        if not (0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()):
            raise InvalidRequestError(f"voter {node}: a listener's name has 1 to {NAME_LENGTH_MAX} characters")
        if found is None or not 0 < int(found[1]) < 65536:
            raise InvalidRequestError(f"voter {node}: {endpoint.address[:NAME_LENGTH_MAX]!r} is not host:port")


def _member(node: int, directory: bytes, endpoints: Sequence[pb.VoterEndpoint]) -> Member:
    return Member(NodeId(node), directory, tuple((endpoint.listener, endpoint.address) for endpoint in endpoints))


def _known_voter(controller: ControllerNode, node: int, directory: bytes) -> Member:
    membership = controller.driver.core.log.membership
    found = membership.voter(NodeId(node)) or membership.learner(NodeId(node))
    if found is None:
        there = ", ".join(str(member.node) for member in membership.voters)
        raise VoterNotFoundError(f"node {node} is not a voter; the voters are {there}")
    if directory and found.directory != directory:
        raise InvalidVoterKeyError(
            f"voter {node} has the directory id {directory_text(found.directory)}, not {directory_text(directory)}"
        )
    return found


async def _describe(controller: ControllerNode, _request: pb.DescribeQuorumRequest) -> pb.DescribeQuorumResponse:
    return await described_by(controller)


async def _add(controller: ControllerNode, request: pb.AddVoterRequest) -> pb.AddVoterResponse:
    wanted = _member(request.node, request.directory_id, request.endpoints)
    await controller.voters.add(wanted, timeout_ms=request.timeout_ms)
    return pb.AddVoterResponse()


async def _remove(controller: ControllerNode, request: pb.RemoveVoterRequest) -> pb.RemoveVoterResponse:
    _known_voter(controller, request.node, request.directory_id)
    await controller.voters.remove(NodeId(request.node))
    return pb.RemoveVoterResponse()


async def _update(controller: ControllerNode, request: pb.UpdateVoterRequest) -> pb.UpdateVoterResponse:
    known = _known_voter(controller, request.node, request.directory_id)
    wanted = _member(request.node, known.directory, request.endpoints)
    await controller.voters.update(wanted, timeout_ms=request.timeout_ms)
    return pb.UpdateVoterResponse()


_QUORUM_CALLS: dict[str, Callable[[ControllerNode, Any], Awaitable[object]]] = {
    "DescribeQuorum": _describe,
    "AddVoter": _add,
    "RemoveVoter": _remove,
    "UpdateVoter": _update,
}
