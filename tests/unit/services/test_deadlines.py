"""Every method of a service that waits ends at the deadline of its request, with REQUEST_TIMED_OUT.

Broker 11 leads, its follower 12 and all controllers are cut off: nothing is replicated, decided or answered.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from support.brokers.cluster import ReplicationCluster, RunningBroker, batch
from support.metadata.quorum import CONTROLLERS

from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.metadata import configs
from tidelog.metadata.brokers import Drain, Unregister
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.features import FeatureChange, UpdateFeatures
from tidelog.metadata.partitions import PREFERRED, ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import AddPartitions, CreateTopics, DeleteTopics, NewPartitions, NewTopic
from tidelog.model.errors import ErrorCode, RequestTimedOutError, TidelogError
from tidelog.model.ids import NodeId
from tidelog.services.cluster import ClusterService, MetadataQuery
from tidelog.services.configs import ConfigQuery, ConfigResource, ConfigService
from tidelog.services.context import INTERNAL, Api, RequestContext
from tidelog.services.deadline import Deadline, deadline_after
from tidelog.services.fetch import FetchItem, FetchRequest, FetchService
from tidelog.services.fetch_stream import FetchStream
from tidelog.services.groups import GroupService, JoinGroup, MemberHeartbeat, OffsetToCommit, SyncGroup
from tidelog.services.log_dirs import MOVE_SLACK_MS, DescribeLogDirs, LogDirService, MoveReplicas, ReplicaMove
from tidelog.services.metadata_records import MetadataRecords, MetadataRecordService
from tidelog.services.offsets import MAX_TIMESTAMP, InitProducerId, OffsetQuery, OffsetService, RecordDeletion
from tidelog.services.produce import ProduceItem, ProduceRequest, ProduceService
from tidelog.services.quorum import VOTER_SLACK_MS, AddVoter, QuorumService, RemoveVoter, UpdateVoter
from tidelog.services.quotas import Charge
from tidelog.services.replica_digests import DigestQuery, DigestReplica, ReplicaDigestService
from tidelog.services.replicas import ReplicaService
from tidelog.services.services import BrokerServices
from tidelog.services.topics import TopicQuery, TopicService

DEADLINE_S = 0.3
ENDPOINTS = (("CONTROLLER", "host:9192"),)
ORDERS = ("orders", 0)
FOLLOWER = [""]
"""The member of the group `classic` that waits for its assignment."""
Call = Callable[[BrokerServices, RequestContext], Coroutine[Any, Any, Any]]


JOIN = JoinGroup(
    member_id="",
    protocol_type="consumer",
    protocols=(("range", b""),),
    session_timeout_ms=300_000,
    rebalance_timeout_ms=300_000,
    needs_known_id=False,
)


def heartbeat(group: str) -> MemberHeartbeat:
    return MemberHeartbeat(group=group, member_id="m", member_epoch=0, topics=("orders",), rebalance_timeout_ms=30_000)


async def never(*_: object) -> Any:
    await asyncio.Event().wait()


def topic_id_of(services: BrokerServices, name: str) -> UUID:
    topic = services.image.topic_named(name)
    assert topic is not None
    return topic.topic_id


async def first_change(services: BrokerServices, context: RequestContext) -> Any:
    _, watch = await services.data.offsets.watch(context, [ORDERS])
    try:
        await anext(watch)
        return await anext(watch)
    finally:
        watch.close()


WAITS: dict[str, Call] = {
    "TopicService.create": lambda s, c: s.topics.create(c, CreateTopics(topics=(NewTopic(name="t"),))),
    "TopicService.delete": lambda s, c: s.topics.delete(c, DeleteTopics(names=("orders",))),
    "TopicService.describe": lambda s, c: s.topics.describe(c, TopicQuery(names=("orders",))),
    "TopicService.add_partitions": lambda s, c: s.topics.add_partitions(
        c, AddPartitions(topics=(NewPartitions(name="orders", total=2),))
    ),
    "ConfigService.describe": lambda s, c: s.configs.describe(
        c, ConfigQuery(resources=(ConfigResource(type="cluster"),))
    ),
    "ConfigService.alter": lambda s, c: s.configs.alter(
        c,
        AlterConfigs(
            resources=(
                ResourceChange(resource_type="broker", resource="1", changes=(ConfigChange(key="k", operation="set"),)),
            )
        ),
    ),
    "QuorumService.describe": lambda s, c: s.quorum.describe(c),
    "QuorumService.add_voter": lambda s, c: s.quorum.add_voter(
        c, AddVoter(node=4, directory_id=b"d" * 16, endpoints=ENDPOINTS)
    ),
    "QuorumService.remove_voter": lambda s, c: s.quorum.remove_voter(c, RemoveVoter(node=4)),
    "QuorumService.update_voter": lambda s, c: s.quorum.update_voter(c, UpdateVoter(node=4, endpoints=ENDPOINTS)),
    "ReplicaService.alter_reassignments": lambda s, c: s.replicas.alter_reassignments(
        c, AlterReassignments(partitions=(ReassignmentTarget(topic="orders", partition=0, replicas=(11,)),))
    ),
    "ReplicaService.elect_leaders": lambda s, c: s.replicas.elect_leaders(c, ElectLeaders(kind=PREFERRED)),
    "ReplicaService.list_reassignments": lambda s, c: s.replicas.list_reassignments(c),
    "ReplicaService.describe_brokers": lambda s, c: s.replicas.describe_brokers(c),
    "ReplicaService.drain_broker": lambda s, c: s.replicas.drain_broker(c, Drain(broker=12)),
    "ReplicaService.unregister_broker": lambda s, c: s.replicas.unregister_broker(c, Unregister(broker=12)),
    "ReplicaService.describe_features": lambda s, c: s.replicas.describe_features(c),
    "ReplicaService.update_features": lambda s, c: s.replicas.update_features(
        c, UpdateFeatures(changes=(FeatureChange(name="f", level=1),))
    ),
    "LogDirService.describe": lambda s, c: s.log_dirs.describe(c, [12], DescribeLogDirs()),
    "LogDirService.move": lambda s, c: s.log_dirs.move(
        c, 12, MoveReplicas(replicas=(ReplicaMove(topic="orders", partition=0, directory_id=UUID(int=1)),))
    ),
    "MetadataRecordService.read": lambda s, c: s.metadata_records.read(c, MetadataRecords(follow=True), never),
    "ProduceService.produce": lambda s, c: s.data.produce.produce(
        c, ProduceRequest(items=[ProduceItem(ORDERS, batch(b"late"))])
    ),
    "FetchService.fetch": lambda s, c: s.data.fetch.fetch(c, end_of_orders()),
    "FetchStream.next": lambda s, c: FetchStream(s.data.fetch, c, end_of_orders()).next(),
    "OffsetWatch.__anext__": first_change,
    "OffsetService.list_offsets": lambda s, c: s.data.offsets.list_offsets(c, [OffsetQuery(ORDERS, MAX_TIMESTAMP)]),
    "OffsetService.delete_records": lambda s, c: s.data.offsets.delete_records(c, [RecordDeletion(ORDERS, 1)]),
    "OffsetService.init_producer_id": lambda s, c: s.data.offsets.init_producer_id(c, InitProducerId()),
    "GroupService.heartbeat": lambda s, c: s.groups.heartbeat(c, heartbeat("new")),
    "GroupService.membership": lambda s, c: s.groups.membership(c, never, never),
    "GroupService.remove_members": lambda s, c: s.groups.remove_members(c, "consumers", ["m"], []),
    "GroupService.leave_group": lambda s, c: s.groups.leave_group(c, "consumers", [("m", "")]),
    "GroupService.join_group": lambda s, c: s.groups.join_group(c, "classic-2", JOIN),
    "GroupService.sync_group": lambda s, c: s.groups.sync_group(
        c, "classic", SyncGroup(member_id=FOLLOWER[0], generation=1)
    ),
    "GroupService.commit_offsets": lambda s, c: s.groups.commit_offsets(
        c, "commits", {ORDERS: OffsetToCommit(1)}, member_id="", member_epoch=-1
    ),
    "ReplicaDigestService.digest": lambda s, c: s.replica_digests.digest(
        c, 12, DigestReplica(topic_id=topic_id_of(s, "orders"), partition=0, query=DigestQuery())
    ),
    "GroupService.delete_offsets": lambda s, c: s.groups.delete_offsets(c, "commits", [ORDERS]),
    "GroupService.delete_group": lambda s, c: s.groups.delete_group(c, "commits"),
}
OWN_CLUSTER = {"GroupService.find_coordinators"}
"""Waits only while there is no offsets topic."""
RETURNS_EARLY = {"ClusterService.metadata", "TopicService.auto_create"}
"""Return what there is: LEADER_NOT_AVAILABLE for topics that are being created."""
DO_NOT_WAIT = {
    "ClusterService.describe",
    "ConfigService.describe_new_topic",
    "ConfigService.list_resources",
    "GroupService.classic_heartbeat",
    "GroupService.fetch_offsets",
    "GroupService.list_groups",
    "LogDirService.begin_move",
    "LogDirService.describe_own",
    "OffsetService.describe_producers",
    "OffsetService.offset_for_leader_epoch",
    "OffsetService.range_bytes",
    "OffsetService.watch",
    "ProduceService.start",
    "QuorumService.describe_own",
}
"""For other nodes or clients: they read memory or disk, or only begin."""
SERVICES = (
    ClusterService,
    ConfigService,
    FetchService,
    GroupService,
    LogDirService,
    MetadataRecordService,
    OffsetService,
    ProduceService,
    QuorumService,
    ReplicaDigestService,
    ReplicaService,
    TopicService,
)
AUTO_CREATION = ResourceChange(
    resource_type="cluster",
    resource=configs.CLUSTER,
    changes=(ConfigChange(key="auto.create.topics.enable", operation="set", value="true"),),
)


def end_of_orders() -> FetchRequest:
    return FetchRequest(items=[FetchItem(ORDERS, 1)], min_bytes=1, max_wait_ms=30_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicationCluster]:
    with ReplicationCluster(9, brokers=(11, 12)) as made:
        for name in ("orders", OFFSETS_TOPIC):
            partition = made.topic(name, (11, 12))
            made.until_in_sync(partition, 11, 12)
            assert made.leader(partition) == 11
        made.ask(AlterConfigs(resources=(AUTO_CREATION,)))
        made.on_broker(11, _write)
        coordinator = made.brokers[NodeId(11)].broker.coordinator
        made.until(lambda: bool(list(coordinator.leading_shards())))
        made.on_broker(11, _fill_groups)
        for node in (*CONTROLLERS, NodeId(12)):
            made.network.block(NodeId(11), node)
            made.network.block(node, NodeId(11))
        made.on_broker(11, _write_unreplicated)
        yield made


async def _write(broker: RunningBroker) -> None:
    request = ProduceRequest(items=[ProduceItem(ORDERS, batch(b"first"))])
    (written,) = await broker.broker.data.produce.produce(INTERNAL, request)
    assert written.error is None


async def _fill_groups(broker: RunningBroker) -> None:
    """Groups in a state in which a request about them waits."""
    groups = broker.broker.groups
    await groups.heartbeat(INTERNAL, heartbeat("consumers"))
    await groups.commit_offsets(INTERNAL, "commits", {ORDERS: OffsetToCommit(0)}, member_id="", member_epoch=-1)
    members = await asyncio.gather(*(groups.join_group(INTERNAL, "classic", JOIN) for _ in range(2)))
    FOLLOWER[0] = next(member.member_id for member in members if member.member_id != member.leader)


async def _write_unreplicated(broker: RunningBroker) -> None:
    await broker.broker.data.produce.start(
        INTERNAL, ProduceRequest(items=[ProduceItem(ORDERS, batch(b"second", b"newest"))])
    )


def timed(cluster: ReplicationCluster, call: Call, timeout_s: float = DEADLINE_S) -> tuple[Any, float]:
    """What it returns or raises, and after how many seconds."""

    async def job(broker: RunningBroker) -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        context = RequestContext(Api.GRPC, deadline_s=begun_s + timeout_s)
        try:
            reply = await call(broker.broker.api, context)
        except TidelogError as error:
            reply = error
        return reply, loop.time() - begun_s

    return cluster.on_broker(11, job)


def codes_of(reply: Any) -> set[ErrorCode | None]:
    """The error of the whole request, or those of its rows."""
    if isinstance(reply, TidelogError):
        return {reply.code}
    rows = reply.values() if isinstance(reply, dict) else reply
    errors = {getattr(getattr(row, "outcome", row), "error", row) for row in rows}
    return {error.code if isinstance(error, TidelogError) else error for error in errors}


def test_every_public_method_waits_until_its_deadline_or_does_not_wait() -> None:
    methods = {
        f"{kind.__name__}.{name}"
        for kind in SERVICES
        for name, value in vars(kind).items()
        if inspect.iscoroutinefunction(inspect.unwrap(value)) and not name.startswith("_") and name != "close"
    }
    tested = {name for name in WAITS if name.partition(".")[0] in {kind.__name__ for kind in SERVICES}}
    assert methods == tested | DO_NOT_WAIT | RETURNS_EARLY | OWN_CLUSTER


@pytest.mark.parametrize("name", sorted(WAITS))
def test_a_method_that_waits_ends_at_the_deadline(cluster: ReplicationCluster, name: str) -> None:
    reply, taken_s = timed(cluster, WAITS[name])
    assert codes_of(reply) == {ErrorCode.REQUEST_TIMED_OUT}, reply
    slack_s = VOTER_SLACK_MS / 1000 if "_voter" in name else MOVE_SLACK_MS / 1000 if ".move" in name else 0
    assert DEADLINE_S - 0.01 <= taken_s <= DEADLINE_S + 0.05 + slack_s


def test_a_fetch_that_ends_by_its_deadline_is_charged_for_what_it_has_read(
    cluster: ReplicationCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[tuple[Charge, int]] = []

    def charge(_: RequestContext, kind: Charge, amount: int = 1) -> None:
        charged.append((kind, amount))

    request = FetchRequest(items=[FetchItem(ORDERS, 0)], min_bytes=1 << 20, max_wait_ms=30_000)
    fetches = cluster.brokers[NodeId(11)].broker.data.fetch
    monkeypatch.setattr(fetches, "_guard", SimpleNamespace(charge=charge))
    reply, _ = timed(cluster, lambda _, context: fetches.fetch(context, request))
    assert codes_of(reply) == {ErrorCode.REQUEST_TIMED_OUT}, reply
    assert charged == [(Charge.FETCH_BYTES, len(batch(b"first")))]


@pytest.mark.parametrize("name", sorted(WAITS))
def test_a_deadline_that_has_passed_ends_a_wait_at_once(cluster: ReplicationCluster, name: str) -> None:
    reply, taken_s = timed(cluster, WAITS[name], timeout_s=-1)
    assert codes_of(reply) == {ErrorCode.REQUEST_TIMED_OUT}, reply
    assert taken_s < 0.05


def test_metadata_of_a_topic_that_cannot_be_created_comes_at_the_deadline(cluster: ReplicationCluster) -> None:
    reply, taken_s = timed(cluster, lambda s, c: s.cluster.metadata(c, MetadataQuery(create=("new",))))
    assert codes_of(reply.creation_errors) == {ErrorCode.LEADER_NOT_AVAILABLE}
    assert taken_s <= DEADLINE_S + 0.05


def test_the_search_for_a_coordinator_ends_at_the_deadline() -> None:
    with ReplicationCluster(10, brokers=(11,)) as made:
        for node in CONTROLLERS:
            made.kill(node)
        reply, taken_s = timed(made, lambda s, c: s.groups.find_coordinators(c, ["g"]))
        assert codes_of(reply) == {ErrorCode.REQUEST_TIMED_OUT}
        assert taken_s <= DEADLINE_S + 0.05


def test_times_are_the_clients_within_the_servers_bounds() -> None:
    async def timeout_ms(asked_ms: int) -> int:
        context = RequestContext(Api.GRPC, deadline_s=deadline_after(asked_ms))
        return Deadline(context, default_ms=10_000, max_ms=50_000).timeout_ms

    assert [asyncio.run(timeout_ms(asked)) for asked in (0, -1, 20_000, 90_000)] == [10_000, 10_000, 20_000, 50_000]


def test_the_earlier_of_deadline_and_timeout_counts() -> None:
    async def ends() -> list[float | None]:
        now_s = asyncio.get_running_loop().time()
        given = [(0, None), (0, now_s + 5), (2_000, None), (2_000, now_s + 5), (9_000, now_s + 5)]
        return [
            None if (end := deadline_after(timeout_ms, deadline_s)) is None else round(end - now_s, 2)
            for timeout_ms, deadline_s in given
        ]

    assert asyncio.run(ends()) == [None, 5, 2, 2, 5]


def test_a_deadline_names_its_time_and_what_is_known() -> None:
    async def wait() -> None:
        deadline = Deadline(RequestContext(Api.GRPC), default_ms=20, max_ms=50)
        await deadline.wait(never(), "it goes on")

    with pytest.raises(RequestTimedOutError, match="not done in 20 ms; it goes on"):
        asyncio.run(wait())
