"""The cluster behind a `MockAdmin`: the API and the services of a node, on metadata in memory.

    MockAdmin --AdminCore--> MockConnections --> rpc.grpc handlers --> services --> MockMetadata
                             scripted: Groups, Records, Transactions, Voters, LogDirs <---'

Client, handlers and services are those of a real cluster. No broker runs: the test scripts groups and logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from tidelog import __version__
from tidelog.client.connections import Exchange
from tidelog.client.offsets import EARLIEST, LATEST, MAX_TIMESTAMP
from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.requests import check_request
from tidelog.metadata.state_machine import is_query
from tidelog.model.admin_errors import VoterNotFoundError
from tidelog.model.errors import ErrorCode, InvalidRequestError, OffsetOutOfRangeError, RemoteError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorNotAvailableError,
    GroupIdNotFoundError,
    GroupSubscribedError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    UnknownMemberIdError,
)
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.rpc.grpc.admin import AdminHandlers
from tidelog.rpc.grpc.cluster import ClusterHandlers
from tidelog.rpc.grpc.dispatch import Handlers, grpc_context
from tidelog.rpc.grpc.errors import as_exception, as_message
from tidelog.rpc.grpc.groups import GroupsHandlers
from tidelog.rpc.grpc.log import LogHandlers
from tidelog.rpc.grpc.methods import Method
from tidelog.rpc.grpc.transactions import TransactionsHandlers
from tidelog.services.acls import AclService
from tidelog.services.authorization import AllowAll, Operation
from tidelog.services.cluster import ClusterService
from tidelog.services.configs import ConfigService
from tidelog.services.context import RequestContext
from tidelog.services.data import DataServices
from tidelog.services.deadline import Deadline
from tidelog.services.forwarding import Forwarder
from tidelog.services.groups import (
    NOT_COMMITTED,
    Committed,
    GroupDetails,
    GroupService,
    GroupSummary,
    MemberSummary,
    OffsetToCommit,
)
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.log_dirs import (
    BrokerLogDirs,
    DescribeLogDirs,
    LogDir,
    LogDirReplica,
    LogDirService,
    MoveOutcome,
    MoveReplicas,
)
from tidelog.services.metadata_cache import MetadataCache
from tidelog.services.metadata_records import MetadataRecordService
from tidelog.services.node import NodeAccess
from tidelog.services.offsets import (
    ListedOffset,
    OffsetQuery,
    OffsetService,
    PartitionQuery,
    ProducerState,
    RecordDeletion,
)
from tidelog.services.partition_lookup import PartitionLookup, PartitionRef
from tidelog.services.quorum import AddVoter, QuorumDescription, QuorumMember, QuorumService, RemoveVoter, UpdateVoter
from tidelog.services.replica_digests import ReplicaDigestService
from tidelog.services.replicas import ReplicaService
from tidelog.services.services import Services
from tidelog.services.topics import TopicService
from tidelog.testing.mock_metadata import CLUSTER_ID, LISTENER, MockMetadata, directory
from tidelog.testing.mock_transaction_service import ScriptedTransactions

R = TypeVar("R")
Ref = TypeVar("Ref", bound=PartitionRef)


class MockCluster:
    def __init__(self, metadata: MockMetadata) -> None:
        lookup = PartitionLookup(lambda: metadata.image, AllowAll())
        node = NodeAccess(cache=_Cache(metadata), forwarder=_Forwarder(metadata), limits=RequestLimits(), guard=Guard())
        topics = TopicService(node)
        services = Services(
            cache=node.cache,
            guard=node.guard,
            limits=node.limits,
            topics=topics,
            configs=ConfigService(node),
            cluster=ClusterService(node, topics, version=__version__),
            quorum=_Voters(metadata),
            replicas=ReplicaService(node),
            log_dirs=_LogDirs(metadata),
            replica_digests=ReplicaDigestService(node, None),
            metadata_records=_NoRecords(),
            acls=AclService(node),
        )
        self.records = Records(lookup)
        self.groups = Groups(metadata, lookup)
        self.transactions = ScriptedTransactions(lambda: self.groups.coordinator.me)
        data = cast(DataServices, SimpleNamespace(offsets=self.records))
        self.handlers = Handlers(
            cluster=ClusterHandlers(services),
            admin=AdminHandlers(services),
            log=LogHandlers(data, node.limits),
            groups=GroupsHandlers(self.groups, lambda: metadata.image),
            transactions=TransactionsHandlers(self.transactions, lambda: metadata.image),
        )


class MockConnections:
    """Implements `Connections`: every address is one of the cluster."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    async def call(self, address: str, method: Method, request: Message, *, timeout_ms: int) -> Any:
        try:
            return await self._handlers.handler(method)(request, grpc_context(peer=address))
        except TidelogError as error:
            raise as_exception(as_message(error)) from error

    async def open(self, address: str, method: Method, request: Message | None = None) -> Exchange:
        raise NotImplementedError(f"{method.full_name}: a mock has no streams")

    async def close(self) -> None:
        pass


class _Cache(MetadataCache):
    def __init__(self, metadata: MockMetadata) -> None:
        self.cluster_id, self.node, self.controller = CLUSTER_ID, NodeId(1), None
        self._metadata = metadata

    @property
    def image(self) -> ClusterImage:
        return self._metadata.image

    @property
    def metadata_offset(self) -> int:
        return self._metadata.offset

    @property
    def active_controller(self) -> int:
        return 1

    def stale_ms(self) -> int | None:
        return None

    async def until_seen(self, condition: Callable[[ClusterImage], bool], deadline: Deadline) -> None:
        pass  # changes are seen at once


class _Forwarder(Forwarder):
    def __init__(self, metadata: MockMetadata) -> None:
        self._metadata = metadata

    async def ask(self, context: RequestContext, request: object, *, timeout_ms: int) -> Any:
        check_request(request)
        return self._metadata.answer(request) if is_query(request) else self._metadata.ask(request)

    async def prefer_active(self, asking: Coroutine[Any, Any, R]) -> tuple[R | None, int | None]:
        return await asking, None


class _NoRecords(MetadataRecordService):
    def __init__(self) -> None:
        pass


class _Voters(QuorumService):
    """Broker 1 is the only controller, until a voter is added."""

    def __init__(self, metadata: MockMetadata) -> None:
        self._metadata = metadata
        self._voters = {1: QuorumMember(node=1, is_voter=True, directory_id=directory(1).bytes, endpoints=_ENDPOINTS)}

    async def describe(self, context: RequestContext, *, allow_stale: bool = False) -> QuorumDescription:
        end = self._metadata.offset
        return QuorumDescription(
            node=1,
            role="leader",
            leader=1,
            epoch=1,
            high_watermark=end,
            log_end_offset=end,
            members=tuple(
                QuorumMember(
                    node=voter.node,
                    is_voter=True,
                    directory_id=voter.directory_id,
                    endpoints=voter.endpoints,
                    is_connected=True,
                    log_end_offset=end,
                    lag=0,
                )
                for _, voter in sorted(self._voters.items())
            ),
            observers=tuple((broker, end) for broker in sorted(self._metadata.image.brokers)),
        )

    async def add_voter(self, context: RequestContext, request: AddVoter) -> None:
        if request.node in self._voters:
            raise RemoteError(f"node {request.node} is a voter already", code=ErrorCode.DUPLICATE_VOTER)
        self._put(request)

    async def update_voter(self, context: RequestContext, request: UpdateVoter) -> None:
        self._check(request)
        self._put(request)

    async def remove_voter(self, context: RequestContext, request: RemoveVoter) -> None:
        self._check(request)
        if len(self._voters) == 1:
            raise InvalidRequestError(f"node {request.node} is the only voter: add another one first")
        del self._voters[request.node]

    def _put(self, request: AddVoter | UpdateVoter) -> None:
        self._voters[request.node] = QuorumMember(
            node=request.node, is_voter=True, directory_id=request.directory_id, endpoints=request.endpoints
        )

    def _check(self, request: UpdateVoter | RemoveVoter) -> None:
        known = self._voters.get(request.node)
        if known is None or (request.directory_id and request.directory_id != known.directory_id):
            raise VoterNotFoundError(f"node {request.node} is not a voter")


_ENDPOINTS = ((LISTENER, "broker-1.mock:9192"),)


class _LogDirs(LogDirService):
    """A broker has one directory, which holds everything; all replicas have 0 bytes."""

    def __init__(self, metadata: MockMetadata) -> None:
        self._metadata = metadata

    async def describe(
        self, context: RequestContext, brokers: Sequence[int], request: DescribeLogDirs
    ) -> tuple[BrokerLogDirs, ...]:
        image = self._metadata.image
        ids = list(brokers) or [broker.broker for broker in image.live_brokers()]
        return tuple(self._held_by(image, broker, frozenset(request.topics)) for broker in ids)

    def _held_by(self, image: ClusterImage, broker: int, topics: frozenset[str]) -> BrokerLogDirs:
        if broker not in image.brokers:
            message = f"there is no broker {broker}"
            return BrokerLogDirs(broker=broker, error=ErrorCode.BROKER_ID_NOT_REGISTERED, message=message)
        replicas = tuple(
            LogDirReplica(topic=topic.name, topic_id=topic_id, partition=number, size=0, offset_lag=0, is_future=False)
            for topic_id, topic in sorted(image.topics.items(), key=lambda item: item[1].name)
            for number, partition in sorted(topic.partitions.items())
            if broker in partition.replicas and (not topics or topic.name in topics)
        )
        held = LogDir(
            directory_id=directory(broker),
            path=f"mock-{broker}",
            error=None,
            message="",
            total_bytes=0,
            usable_bytes=0,
            is_full=False,
            replicas=replicas,
        )
        return BrokerLogDirs(broker=broker, directories=(held,))

    async def move(self, context: RequestContext, broker: int, request: MoveReplicas) -> tuple[MoveOutcome, ...]:
        return tuple(MoveOutcome(topic=move.topic, partition=move.partition) for move in request.replicas)


class Records(OffsetService):
    """The logs of partitions, as the test has set them."""

    def __init__(self, lookup: PartitionLookup) -> None:
        self._lookup = lookup
        self._ranges: dict[PartitionId, tuple[int, int]] = {}
        self._times: dict[PartitionId, list[tuple[int, int]]] = {}
        self._open: dict[PartitionId, list[ProducerState]] = {}

    def open_transaction(self, partition: PartitionId, *, producer_id: int, start_offset: int, age_s: float) -> None:
        stamp_ms = int((time.time() - age_s) * 1000)
        state = ProducerState(producer_id, 0, 0, stamp_ms, -1, start_offset)
        self._open.setdefault(partition, []).append(state)

    async def describe_producers(
        self, context: RequestContext, partitions: Sequence[PartitionQuery]
    ) -> list[list[ProducerState] | TidelogError]:
        found = [self._lookup.find_or_error(context, Operation.READ, query.partition) for query in partitions]
        return [self._open.get(place, []) if isinstance(place, PartitionId) else place for place in found]

    def set_log(self, partition: PartitionId, start: int, end: int, times: Iterable[tuple[int, int]]) -> None:
        """`times` are (timestamp, offset) pairs."""
        self._ranges[partition] = (start, end)
        self._times[partition] = sorted(times)

    async def list_offsets(
        self, context: RequestContext, queries: Sequence[OffsetQuery], *, isolation: int = 0
    ) -> list[ListedOffset | TidelogError]:
        return [
            self._listed(found, query.timestamp) if isinstance(found, PartitionId) else found
            for query in queries
            for found in [self._lookup.find_or_error(context, Operation.DESCRIBE, query.partition)]
        ]

    def _listed(self, partition: PartitionId, timestamp: int) -> ListedOffset:
        start, end = self._ranges.get(partition, (0, 0))
        if timestamp in (EARLIEST, LATEST):
            return ListedOffset(start if timestamp == EARLIEST else end)
        rows = [(stamp, offset) for stamp, offset in self._times.get(partition, ()) if start <= offset < end]
        if timestamp == MAX_TIMESTAMP:
            row = max(rows, key=lambda row: (row[0], -row[1]), default=None)
        else:
            row = next((row for row in rows if row[0] >= timestamp), None)
        return ListedOffset() if row is None else ListedOffset(row[1], row[0])

    async def delete_records(
        self, context: RequestContext, deletions: Sequence[RecordDeletion]
    ) -> list[int | TidelogError]:
        return [
            self._trim(found, deletion.before_offset) if isinstance(found, PartitionId) else found
            for deletion in deletions
            for found in [self._lookup.find_or_error(context, Operation.DELETE, deletion.partition)]
        ]

    def _trim(self, partition: PartitionId, before: int) -> int | TidelogError:
        start, end = self._ranges.get(partition, (0, 0))
        if before > end:
            message = f"partition {partition.partition} ends at {end}, before {before}"
            return OffsetOutOfRangeError(message, offset=before, start=start, end=end)
        self._ranges[partition] = (max(start, end if before < 0 else before), end)
        return self._ranges[partition][0]


class _Group:
    def __init__(self) -> None:
        self.offsets: dict[PartitionId, Committed] = {}
        self.members: list[MemberSummary] = []

    @property
    def state(self) -> str:
        return "stable" if self.members else "empty"


class Groups(GroupService):
    """Groups as the test has set them. The live broker with the lowest number coordinates all of them."""

    def __init__(self, metadata: MockMetadata, lookup: PartitionLookup) -> None:
        self._metadata = metadata
        self._lookup = lookup
        self._groups: dict[str, _Group] = {}

    def add(self, name: str, offsets: Mapping[PartitionId, OffsetToCommit]) -> None:
        group = self._groups.setdefault(name, _Group())
        for partition, offset in offsets.items():
            now_ms = int(time.time() * 1000)
            group.offsets[partition] = Committed(offset.offset, offset.leader_epoch, offset.metadata, now_ms)

    def set_members(self, name: str, members: Mapping[str, tuple[tuple[str, ...], tuple[PartitionId, ...]]]) -> None:
        """Topics and partitions of each member."""
        self._groups[name].members = [
            MemberSummary(member, "", "", member, "mock", 1, topics, "", held, held)
            for member, (topics, held) in members.items()
        ]

    @property
    def coordinator(self) -> GroupCoordinator:
        return cast(GroupCoordinator, SimpleNamespace(me=self._broker()))

    def _broker(self) -> int:
        live = [broker.broker for broker in self._metadata.image.live_brokers()]
        if not live:
            raise CoordinatorNotAvailableError("no broker is live")
        return min(live)

    def _group(self, name: str) -> _Group:
        if name not in self._groups:
            raise GroupIdNotFoundError(f"there is no group '{name}'")
        return self._groups[name]

    def _found(self, context: RequestContext, refs: Iterable[Ref]) -> dict[Ref, PartitionId | TidelogError]:
        return {ref: self._lookup.find_or_error(context, Operation.READ, ref) for ref in refs}

    async def find_coordinators(self, context: RequestContext, groups: Sequence[str]) -> list[int | TidelogError]:
        return [self._broker() if group else InvalidGroupIdError("a group id is not empty") for group in groups]

    async def list_groups(
        self, context: RequestContext, states: Sequence[str] = (), kinds: Sequence[str] = ()
    ) -> tuple[list[GroupSummary], int]:
        _, _, host, port = self._metadata.image.brokers[self._broker()].endpoints[0]
        if context.peer != f"{host}:{port}":
            return [], 0
        return [
            GroupSummary(name, "consumer", group.state, len(group.members))
            for name, group in sorted(self._groups.items())
            if (not states or group.state in states) and (not kinds or "consumer" in kinds)
        ], 0

    def describe_group(self, context: RequestContext, group: str) -> GroupDetails:
        found = self._group(group)
        return GroupDetails(group, "consumer", found.state, 1, 1, "uniform", tuple(found.members))

    async def fetch_offsets(
        self,
        context: RequestContext,
        group: str,
        partitions: Iterable[PartitionRef] | None,
        *,
        member_id: str = "",
        member_epoch: int | None = None,
        require_stable: bool = False,
    ) -> dict[PartitionRef, Committed | TidelogError]:
        committed = self._groups[group].offsets if group in self._groups else {}
        found = self._found(context, list(committed) if partitions is None else partitions)
        return {
            ref: committed.get(where, NOT_COMMITTED) if isinstance(where, PartitionId) else where
            for ref, where in found.items()
        }

    async def commit_offsets(
        self,
        context: RequestContext,
        group: str,
        offsets: Mapping[Ref, OffsetToCommit],
        *,
        member_id: str,
        member_epoch: int,
        instance_id: str = "",
        sequence: int = 0,
        allows_negative: bool = False,
    ) -> dict[Ref, TidelogError | None]:
        if group in self._groups and self._groups[group].members:
            raise UnknownMemberIdError(f"group '{group}' has members: only they commit")
        found = self._found(context, offsets)
        self.add(group, {where: offsets[ref] for ref, where in found.items() if isinstance(where, PartitionId)})
        return {ref: where if isinstance(where, TidelogError) else None for ref, where in found.items()}

    async def delete_offsets(
        self, context: RequestContext, group: str, partitions: Sequence[PartitionRef]
    ) -> dict[PartitionRef, TidelogError | None]:
        known = self._group(group)
        held = {partition.topic_id for member in known.members for partition in member.assignment}

        def delete(where: PartitionId | TidelogError) -> TidelogError | None:
            if isinstance(where, TidelogError):
                return where
            if where.topic_id in held:
                return GroupSubscribedError(f"members of '{group}' read the topic")
            known.offsets.pop(where, None)
            return None

        return {ref: delete(where) for ref, where in self._found(context, partitions).items()}

    async def delete_group(self, context: RequestContext, group: str) -> None:
        if self._group(group).members:
            raise NonEmptyGroupError(f"group '{group}' has members")
        del self._groups[group]

    async def remove_members(
        self, context: RequestContext, group: str, member_ids: Sequence[str], instance_ids: Sequence[str]
    ) -> dict[str, TidelogError | None]:
        known = self._group(group)
        names = [*member_ids, *instance_ids] or [member.member_id for member in known.members]
        present = {member.member_id for member in known.members}
        known.members = [member for member in known.members if member.member_id not in names]
        return {
            name: None if name in present else UnknownMemberIdError(f"'{group}' has no member '{name}'")
            for name in names
        }


def partition_id(image: ClusterImage, topic: str, number: int) -> PartitionId | None:
    topic_id = image.topic_ids.get(topic)
    if topic_id is None or number not in image.topics[topic_id].partitions:
        return None
    return PartitionId(TopicId(topic_id), number)
