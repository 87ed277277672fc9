"""Every public method of a service authorizes and charges its request before it acts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_type_hints
from uuid import UUID

import pytest

from tidelog.metadata.acls import AclBinding, AclFilter, CreateAcls, DeleteAcls
from tidelog.metadata.brokers import Drain, Unregister
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.features import FeatureChange, UpdateFeatures
from tidelog.metadata.image import ClusterImage, Topic
from tidelog.metadata.partitions import PREFERRED, ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import AddPartitions, CreateTopics, DeleteTopics, NewPartitions, NewTopic
from tidelog.model.errors import ErrorCode, TidelogError, TransportError
from tidelog.model.group_errors import CoordinatorNotAvailableError, NotCoordinatorError
from tidelog.model.maps import Map
from tidelog.services.authorization import AuthorizationFailedError, Operation, Resource, ResourceType
from tidelog.services.cluster import ClusterMetadata, MetadataQuery
from tidelog.services.configs import ConfigQuery, ConfigResource
from tidelog.services.context import Api, RequestContext
from tidelog.services.data import DataServices
from tidelog.services.fetch import FetchItem, FetchRequest, FetchService
from tidelog.services.groups import GroupService, JoinGroup, MemberHeartbeat, OffsetToCommit, SyncGroup
from tidelog.services.guard import Guard
from tidelog.services.hanging_transactions import HangingTransactions
from tidelog.services.limits import RequestLimits
from tidelog.services.log_dirs import DescribeLogDirs, LogDirService, MoveReplicas, ReplicaMove
from tidelog.services.metadata_records import MetadataRecords, MetadataRecordService
from tidelog.services.node import NodeAccess
from tidelog.services.offsets import (
    EpochQuery,
    InitProducerId,
    OffsetQuery,
    OffsetRange,
    OffsetService,
    PartitionQuery,
    RecordDeletion,
)
from tidelog.services.produce import PendingProduce, ProduceItem, ProduceRequest, ProduceService
from tidelog.services.quorum import AddVoter, RemoveVoter, UpdateVoter
from tidelog.services.quotas import Charge
from tidelog.services.replica_digests import DigestQuery, DigestReplica, ReplicaDigestService
from tidelog.services.services import BrokerServices
from tidelog.services.topics import TopicQuery, TopicService
from tidelog.services.transaction_requests import (
    AddOffsetsToTransaction,
    AddPartitionsToTransaction,
    CommitOffsetsInTransaction,
    EndTransaction,
    HangingTransaction,
    InitTransactions,
    JoinTransaction,
    PrepareTransaction,
    TransactionFilter,
)
from tidelog.services.transactions import TransactionService

CONTEXT = RequestContext(api=Api.GRPC, peer="test")
PARTITION = ("t", 0)
ENDPOINTS = (("CONTROLLER", "host:9192"),)
DENIED = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    ErrorCode.UNKNOWN_TOPIC_ID,
}
"""A topic that is named by its id is unknown."""
LISTS = {"GroupService.list_groups", "TransactionService.list"}
"""They leave out what the principal may not describe."""


OWNER: dict[str, Any] = {"transactional_id": "t", "producer_id": 7, "epoch": 0}
ACL = AclBinding(resource_type="topic", resource="t", principal="User:a", operation="read")
HEARTBEAT = MemberHeartbeat(group="g", member_id="m", member_epoch=0)


async def ignore(_part: object) -> None:
    return None


async def first_answer(groups: Any) -> Any:
    answers: list[Any] = []

    async def receive() -> MemberHeartbeat:
        return HEARTBEAT

    async def send(answer: object) -> None:
        answers.append(answer)

    await groups.membership(CONTEXT, receive, send)
    return answers[0]


async def first_watched(offsets: Any) -> Any:
    found, _ = await offsets.watch(CONTEXT, [PARTITION])
    return found


CALLS: dict[str, Callable[[Any], Any]] = {
    "AclService.describe": lambda s: s.describe(CONTEXT, AclFilter()),
    "AclService.create": lambda s: s.create(CONTEXT, CreateAcls(bindings=(ACL,))),
    "AclService.delete": lambda s: s.delete(CONTEXT, DeleteAcls(filters=(AclFilter(),))),
    "TopicService.create": lambda s: s.create(CONTEXT, CreateTopics(topics=(NewTopic(name="t"),))),
    "TopicService.delete": lambda s: s.delete(CONTEXT, DeleteTopics(names=("t",), ids=(UUID(int=1),))),
    "TopicService.describe": lambda s: s.describe(CONTEXT, TopicQuery(names=("t",))),
    "TopicService.add_partitions": lambda s: s.add_partitions(
        CONTEXT, AddPartitions(topics=(NewPartitions(name="t", total=2),))
    ),
    "TopicService.auto_create": lambda s: s.auto_create(CONTEXT, ["t"]),
    "ConfigService.describe": lambda s: s.describe(
        CONTEXT, ConfigQuery(resources=(ConfigResource(type="topic", name="t"), ConfigResource(type="cluster")))
    ),
    "ConfigService.describe_new_topic": lambda s: s.describe_new_topic(CONTEXT, NewTopic(name="t")),
    "ConfigService.list_resources": lambda s: s.list_resources(CONTEXT),
    "ConfigService.alter": lambda s: s.alter(
        CONTEXT,
        AlterConfigs(
            resources=(
                ResourceChange(resource_type="broker", resource="1", changes=(ConfigChange(key="k", operation="set"),)),
            )
        ),
    ),
    "ClusterService.metadata": lambda s: s.metadata(CONTEXT, MetadataQuery(create=("t",))),
    "ClusterService.describe": lambda s: s.describe(CONTEXT),
    "QuorumService.describe": lambda s: s.describe(CONTEXT),
    "QuorumService.describe_own": lambda s: s.describe_own(CONTEXT),
    "QuorumService.add_voter": lambda s: s.add_voter(
        CONTEXT, AddVoter(node=4, directory_id=b"d" * 16, endpoints=ENDPOINTS)
    ),
    "QuorumService.remove_voter": lambda s: s.remove_voter(CONTEXT, RemoveVoter(node=4)),
    "QuorumService.update_voter": lambda s: s.update_voter(CONTEXT, UpdateVoter(node=4, endpoints=ENDPOINTS)),
    "ReplicaService.alter_reassignments": lambda s: s.alter_reassignments(
        CONTEXT, AlterReassignments(partitions=(ReassignmentTarget(topic="t", partition=0, replicas=(1,)),))
    ),
    "ReplicaService.elect_leaders": lambda s: s.elect_leaders(CONTEXT, ElectLeaders(kind=PREFERRED)),
    "ReplicaService.list_reassignments": lambda s: s.list_reassignments(CONTEXT),
    "ReplicaService.describe_brokers": lambda s: s.describe_brokers(CONTEXT),
    "ReplicaService.drain_broker": lambda s: s.drain_broker(CONTEXT, Drain(broker=1)),
    "ReplicaService.unregister_broker": lambda s: s.unregister_broker(CONTEXT, Unregister(broker=1)),
    "ReplicaService.describe_features": lambda s: s.describe_features(CONTEXT),
    "ReplicaService.update_features": lambda s: s.update_features(
        CONTEXT, UpdateFeatures(changes=(FeatureChange(name="f", level=1),))
    ),
    "LogDirService.describe": lambda s: s.describe(CONTEXT, [1], DescribeLogDirs()),
    "LogDirService.describe_own": lambda s: s.describe_own(CONTEXT),
    "LogDirService.move": lambda s: s.move(
        CONTEXT, 1, MoveReplicas(replicas=(ReplicaMove(topic="t", partition=0, directory_id=UUID(int=1)),))
    ),
    "LogDirService.begin_move": lambda s: s.begin_move(CONTEXT, "t", 0, "/data"),
    "ReplicaDigestService.digest": lambda s: s.digest(
        CONTEXT, 1, DigestReplica(topic_id=UUID(int=5), partition=0, query=DigestQuery())
    ),
    "MetadataRecordService.read": lambda s: s.read(CONTEXT, MetadataRecords(), ignore),
    "ProduceService.start": lambda s: s.start(CONTEXT, ProduceRequest(items=[ProduceItem(PARTITION, b"")])),
    "ProduceService.produce": lambda s: s.produce(CONTEXT, ProduceRequest(items=[ProduceItem(PARTITION, b"")])),
    "FetchService.fetch": lambda s: s.fetch(CONTEXT, FetchRequest(items=[FetchItem(PARTITION, 0)])),
    "OffsetService.list_offsets": lambda s: s.list_offsets(CONTEXT, [OffsetQuery(PARTITION, 0)]),
    "OffsetService.offset_for_leader_epoch": lambda s: s.offset_for_leader_epoch(CONTEXT, [EpochQuery(PARTITION, 0)]),
    "OffsetService.range_bytes": lambda s: s.range_bytes(CONTEXT, [OffsetRange(PARTITION, 0, 1)]),
    "OffsetService.delete_records": lambda s: s.delete_records(CONTEXT, [RecordDeletion(PARTITION, 0)]),
    "OffsetService.init_producer_id": lambda s: s.init_producer_id(CONTEXT, InitProducerId(producer_id=1)),
    "OffsetService.describe_producers": lambda s: s.describe_producers(CONTEXT, [PartitionQuery(PARTITION)]),
    "OffsetService.watch": lambda s: first_watched(s),
    "GroupService.find_coordinators": lambda s: s.find_coordinators(CONTEXT, ["too long"]),
    "GroupService.heartbeat": lambda s: s.heartbeat(CONTEXT, HEARTBEAT),
    "GroupService.membership": lambda s: first_answer(s),
    "GroupService.remove_members": lambda s: s.remove_members(CONTEXT, "g", ["m"], []),
    "GroupService.join_group": lambda s: s.join_group(
        CONTEXT,
        "g",
        JoinGroup(member_id="", protocol_type="", protocols=(), session_timeout_ms=1, rebalance_timeout_ms=1),
    ),
    "GroupService.sync_group": lambda s: s.sync_group(CONTEXT, "g", SyncGroup(member_id="m", generation=1)),
    "GroupService.classic_heartbeat": lambda s: s.classic_heartbeat(CONTEXT, "g", member_id="m", generation=1),
    "GroupService.leave_group": lambda s: s.leave_group(CONTEXT, "g", [("m", "")]),
    "GroupService.commit_offsets": lambda s: s.commit_offsets(
        CONTEXT, "g", {PARTITION: OffsetToCommit(0)}, member_id="", member_epoch=-1
    ),
    "GroupService.fetch_offsets": lambda s: s.fetch_offsets(CONTEXT, "g", [PARTITION]),
    "GroupService.delete_offsets": lambda s: s.delete_offsets(CONTEXT, "g", [PARTITION]),
    "GroupService.list_groups": lambda s: s.list_groups(CONTEXT),
    "GroupService.describe_group": lambda s: s.describe_group(CONTEXT, "g"),
    "GroupService.describe_consumer_group": lambda s: s.describe_consumer_group(CONTEXT, "g"),
    "GroupService.describe_classic_group": lambda s: s.describe_classic_group(CONTEXT, "g"),
    "GroupService.delete_group": lambda s: s.delete_group(CONTEXT, "g"),
    "TransactionService.find_coordinators": lambda s: s.find_coordinators(CONTEXT, ["too long"]),
    "TransactionService.init": lambda s: s.init(CONTEXT, InitTransactions(transactional_id="t", timeout_ms=1)),
    "TransactionService.add_partitions": lambda s: s.add_partitions(
        CONTEXT, AddPartitionsToTransaction(**OWNER, partitions=[PARTITION])
    ),
    "TransactionService.add_offsets": lambda s: s.add_offsets(CONTEXT, AddOffsetsToTransaction(**OWNER, group="g")),
    "TransactionService.commit_offsets": lambda s: s.commit_offsets(
        CONTEXT, CommitOffsetsInTransaction(**OWNER, group="g", offsets={PARTITION: OffsetToCommit(0)})
    ),
    "TransactionService.end": lambda s: s.end(CONTEXT, EndTransaction(**OWNER, is_commit=True)),
    "TransactionService.prepare": lambda s: s.prepare(CONTEXT, PrepareTransaction(**OWNER)),
    "TransactionService.join": lambda s: s.join(CONTEXT, JoinTransaction(transactional_id="t")),
    "TransactionService.abort": lambda s: s.abort(CONTEXT, "t"),
    "TransactionService.abort_hanging": lambda s: s.abort_hanging(
        CONTEXT, [HangingTransaction(partition=PARTITION, producer_id=1, epoch=0, coordinator_epoch=0)]
    ),
    "TransactionService.list": lambda s: s.list(CONTEXT, TransactionFilter()),
    "TransactionService.describe": lambda s: s.describe(CONTEXT, "t"),
}
"""One call of each public method."""


class Cache:
    """The metadata of an empty broker."""

    cluster_id = "c"
    node = 1
    image = ClusterImage()
    controller = None
    metadata_offset = 0
    active_controller = -1

    def stale_ms(self) -> int | None:
        return None


class Forwarder:
    """Reaches no node."""

    def serve(self, *_: object) -> None:
        return None

    async def _fail(self, *_: object, **__: object) -> Any:
        raise TransportError("no other node")

    ask = ask_or_read_cache = to_active = to_broker = open_stream = _fail


class Partitions:
    async def describe(self, *_topics: object) -> list[object]:
        return []


class Hooks:
    """An authorizer and quotas that record their calls."""

    def __init__(self, *, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self.authorized = 0
        self.charged = 0

    def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
        assert context is CONTEXT
        self.authorized += 1
        return self.is_allowed

    def authorize_any(self, context: RequestContext, operation: Operation, kind: ResourceType) -> bool:
        return self.authorize(context, operation, Resource(kind, ""))

    def charge(self, context: RequestContext, _charge: Charge, _amount: int) -> int:
        assert context is CONTEXT
        self.charged += 1
        return 0


def services() -> dict[str, type]:
    hints = (*get_type_hints(BrokerServices).values(), ProduceService, FetchService, OffsetService)
    classes = {kind for hint in hints for kind in (hint, *getattr(hint, "__args__", ())) if inspect.isclass(kind)}
    return {kind.__name__: kind for kind in classes if kind.__name__.endswith("Service")}


def public_methods() -> set[str]:
    return {
        f"{name}.{method}"
        for name, kind in services().items()
        for method, value in vars(kind).items()
        if inspect.isfunction(value) and "context" in inspect.signature(value).parameters and method[0] != "_"
    }


def coordinates_nothing(name: str) -> None:
    raise NotCoordinatorError(f"another broker coordinates {name!r}")


def starts_nothing(work: Any, *, name: str) -> None:
    work.close()
    raise CoordinatorNotAvailableError(f"{name}: this broker stops")


def data_services(guard: Guard) -> dict[type, Any]:
    """Of a broker without partitions and groups."""
    replicas = SimpleNamespace(image=ClusterImage(), me=1, wakers=SimpleNamespace(add=lambda *_: None))
    data = DataServices(cast(Any, replicas), guard=guard)
    coordinator = SimpleNamespace(
        view=None, now_ms=lambda: 0, leading_shards=tuple, loading=0, limits=SimpleNamespace(name_length_max=7)
    )
    coordinator.tasks = SimpleNamespace(keep=lambda _task: None)
    coordinator.shard_of = coordinates_nothing
    groups = GroupService(cast(Any, coordinator), cast(Any, replicas), cast(Any, None), guard=guard)
    coordinator.TOPIC, coordinator.spawn = "__transaction_state", starts_nothing
    transactions = TransactionService(
        *(cast(Any, coordinator), cast(Any, replicas), cast(Any, None), groups, cast(Any, None)),
        guard=guard,
        hanging=HangingTransactions(cast(Any, replicas), cast(Any, None), guard),
    )
    return {type(service): service for service in (data.produce, data.fetch, data.offsets, groups, transactions)}


def call(name: str, hooks: Hooks) -> Any:
    """Return what the method returns or raises."""
    guard = Guard(hooks, hooks)
    node = NodeAccess(cache=cast(Any, Cache()), forwarder=cast(Any, Forwarder()), limits=RequestLimits(), guard=guard)
    kind = services()[name.partition(".")[0]]
    more: dict[type, tuple[Any, ...]] = {
        LogDirService: (Partitions(),),
        MetadataRecordService: (None,),
        ReplicaDigestService: (None,),
    }
    arguments = more.get(kind, (TopicService(node),) if kind.__name__ == "ClusterService" else ())

    async def run() -> Any:
        service = data_services(guard).get(kind) or kind(node, *arguments)
        reply = CALLS[name](service)
        reply = await reply if inspect.isawaitable(reply) else reply
        return reply.results() if isinstance(reply, PendingProduce) else reply

    try:
        return asyncio.run(run())
    except TidelogError as error:
        return error


def test_there_is_a_call_of_every_public_method() -> None:
    assert public_methods() == CALLS.keys()
    assert len(services()) == 14


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_method_authorizes_and_charges_before_it_reaches_another_node(name: str) -> None:
    hooks = Hooks(is_allowed=True)
    reply = call(name, hooks)
    assert hooks.charged, name
    if not isinstance(reply, ClusterMetadata):  # `find` authorizes each topic
        assert hooks.authorized, name


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_method_does_nothing_for_a_principal_that_may_do_nothing(name: str) -> None:
    reply = call(name, Hooks(is_allowed=False))
    if isinstance(reply, TidelogError):
        assert isinstance(reply, AuthorizationFailedError), reply
        assert reply.code in DENIED
        return
    if name in LISTS:
        assert reply == ([], 0)
        return
    if isinstance(reply, ClusterMetadata):
        rows: Any = list(reply.creation_errors.values())
    else:
        rows = getattr(reply, "rows", getattr(reply, "resources", reply))
        rows = list(rows.values()) if isinstance(rows, dict) else rows if isinstance(rows, tuple | list) else (rows,)
    assert rows, name
    errors = {getattr(row, "error", row) for row in rows}
    assert {error.code if isinstance(error, TidelogError) else error for error in errors} <= DENIED, name


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_metadata_response_has_only_topics_that_the_principal_may_describe(is_allowed: bool) -> None:
    topic = Topic(UUID(int=5), "orders", Map())
    metadata = call("ClusterService.metadata", Hooks(is_allowed=is_allowed))
    metadata = replace(
        metadata, image=ClusterImage(topics=Map({topic.topic_id: topic}), topic_ids=Map({"orders": topic.topic_id}))
    )
    assert list(asyncio.run(metadata.topics())) == ([topic] if is_allowed else [])
    by_name, by_id = metadata.find("orders"), metadata.find("", topic.topic_id)
    if is_allowed:
        assert by_name is topic
        assert by_id is topic
    else:
        assert by_name.error is metadata.find("nothing").error is ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert by_id.error is metadata.find("", UUID(int=6)).error is ErrorCode.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize("verify_only", [True, False])
def test_a_broker_adds_partitions_by_its_own_right_and_not_by_that_to_the_transactional_id(verify_only: bool) -> None:
    class Right(Hooks):
        def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
            asked.append((operation, resource.type))
            return super().authorize(context, operation, resource)

    asked: list[tuple[Operation, ResourceType]] = []
    request = AddPartitionsToTransaction(
        **OWNER, partitions=[PARTITION], verify_only=verify_only, version=2, is_broker=True
    )
    hooks = Right(is_allowed=True)
    (error,) = asyncio.run(data_services(Guard(hooks, hooks))[TransactionService].add_partitions(CONTEXT, request))
    assert error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "it was allowed to ask"
    assert asked[0] == (Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
    assert ResourceType.TRANSACTIONAL_ID not in {kind for _, kind in asked}
    assert hooks.charged
    denied = Right(is_allowed=False)
    with pytest.raises(AuthorizationFailedError) as raised:
        asyncio.run(data_services(Guard(denied, denied))[TransactionService].add_partitions(CONTEXT, request))
    assert raised.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
