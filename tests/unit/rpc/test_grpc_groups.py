"""The service Groups: in the simulator, and over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio  # type: ignore[import-untyped]
from support.async_tests import inside
from support.brokers.cluster import batch
from support.groups.cluster import BROKERS, OFFSETS_TOPIC, GroupCluster
from support.grpc_api.nodes import STATUS, GrpcCluster, error_of, until

from tidelog.coordinator.hashing import java_hash, partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.model.errors import ErrorCode, RemoteError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.server import _host
from tidelog.rpc.v1 import admin_pb2, log_pb2
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.rpc.v1 import groups_pb2 as pb


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("a", 97),
        ("ab", 3105),
        ("hello", 99162322),
        ("polygenelubricants", 0x80000000),
        ("grüße", 0x05E19440),
        ("\U0001f600", 1772899),
    ],
)
def test_groups_lie_where_every_client_of_kafka_expects_them(text: str, value: int) -> None:
    """Java's String.hashCode, over UTF-16."""
    by_hand = 0
    data = text.encode("utf-16-be")
    for at in range(0, len(data), 2):
        by_hand = (by_hand * 31 + int.from_bytes(data[at : at + 2], "big")) % (1 << 32)
    assert java_hash(text) == by_hand
    if text.isascii() or len(text) == 1:
        assert java_hash(text) == value
    assert 0 <= partition_for(text, 50) < 50
    assert partition_for("polygenelubricants", 50) == 0, "the sign bit is dropped"


def test_hosts_of_callers() -> None:
    assert _host("ipv4:10.0.0.1:41000") == "10.0.0.1"
    assert _host("ipv6:%5B::1%5D:41000") == "::1"
    assert _host("node 98") == "node 98"
    assert len(_host("x" * 1000)) == 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[GroupCluster]:
    with GroupCluster(seed=1, orders=6) as made:
        made.topic("others", partitions=2)
        made.shard("warm-up")
        yield made


def refused(cluster: GroupCluster, group: str, name: str, request: Any) -> ErrorCode:
    with pytest.raises(RemoteError) as refusal:
        cluster.ask_groups(group, name, request)
    return refusal.value.code


def offsets_of(*rows: tuple[str, int, int]) -> list[pb.OffsetToCommit]:
    return [pb.OffsetToCommit(topic=topic, partition=number, offset=offset) for topic, number, offset in rows]


def test_the_first_who_asks_makes_the_topic() -> None:
    with GroupCluster(seed=3, offsets_partitions=4) as fresh:
        request = pb.FindCoordinatorRequest(groups=["a", "b", "c"])
        found = fresh.groups("FindCoordinator", request, node=12).coordinators
        assert [row.group for row in found] == ["a", "b", "c"]
        topic = fresh.image().topic_named(OFFSETS_TOPIC)
        assert topic is not None
        assert len(topic.partitions) == 4
        assert {len(partition.replicas) for partition in topic.partitions.values()} == {3}
        for row in found:
            assert not row.error.code
            assert row.broker == topic.partitions[partition_for(row.group, 4)].leader
            assert (row.host, row.port) == (f"host-{row.broker}", 9092)
        wrong = pb.FindCoordinatorRequest(groups=["", "x" * 100_000, "a"])
        names = [row.error.name for row in fresh.groups("FindCoordinator", wrong, node=12).coordinators]
        assert names == ["INVALID_GROUP_ID", "INVALID_GROUP_ID", ""]
        unheard = pb.FindCoordinatorRequest(groups=["a"], listener="NOWHERE")
        (row,) = fresh.groups("FindCoordinator", unheard, node=11).coordinators
        assert row.error.name == "LISTENER_NOT_FOUND"


def test_another_broker_says_who_coordinates(cluster: GroupCluster) -> None:
    leader = cluster.coordinator("billing")
    other = next(broker for broker in BROKERS if broker != leader)
    with pytest.raises(RemoteError) as refusal:
        cluster.groups("FetchOffsets", pb.FetchOffsetsRequest(group="billing"), node=other)
    assert refusal.value.code is ErrorCode.NOT_COORDINATOR
    assert refusal.value.facts["coordinator"] == leader
    (row,) = cluster.groups("DescribeGroups", pb.DescribeGroupsRequest(groups=["billing"]), node=other).groups
    assert row.error.name == "NOT_COORDINATOR"


@pytest.mark.requirement("a:F-20", "a:F-23")
def test_offsets_are_committed_fetched_and_deleted(cluster: GroupCluster) -> None:
    request = pb.CommitOffsetsRequest(
        group="plain",
        member_epoch=-1,
        offsets=[
            pb.OffsetToCommit(topic="orders", partition=3, offset=7, leader_epoch=2, metadata="half way"),
            *offsets_of(("others", 1, 9), ("nothing", 0, 1), ("orders", 77, 1)),
        ],
    )
    rows = cluster.ask_groups("plain", "CommitOffsets", request).offsets
    assert [row.error.name for row in rows] == ["", "", "UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_OR_PARTITION"]
    wanted = [("orders", 3), ("orders", 0), ("nothing", 0)]
    fetch = pb.FetchOffsetsRequest(
        group="plain", partitions=[common.TopicPartition(topic=topic, partition=number) for topic, number in wanted]
    )
    first, second, third = cluster.ask_groups("plain", "FetchOffsets", fetch).offsets
    assert (first.offset, first.leader_epoch, first.metadata) == (7, 2, "half way")
    assert first.commit_time_ms > 0
    assert (second.offset, second.error.code) == (-1, 0), "it has none"
    assert (third.topic, third.error.name) == ("nothing", "UNKNOWN_TOPIC_OR_PARTITION")
    assert cluster.committed("plain") == {("orders", 3): 7, ("others", 1): 9}, "no partitions named: all"
    delete = pb.DeleteOffsetsRequest(
        group="plain", partitions=[common.TopicPartition(topic="orders", partition=3), common.TopicPartition(topic="x")]
    )
    rows = cluster.ask_groups("plain", "DeleteOffsets", delete).offsets
    assert [row.error.name for row in rows] == ["", "UNKNOWN_TOPIC_OR_PARTITION"]
    assert cluster.committed("plain") == {("others", 1): 9}


def test_a_partition_named_by_topic_name_and_by_topic_id_is_named_twice(cluster: GroupCluster) -> None:
    orders = cluster.image().topic_ids["orders"].bytes
    offsets = offsets_of(("orders", 0, 1), ("orders", 1, 5))
    offsets.append(pb.OffsetToCommit(topic_id=orders, partition=0, offset=2))
    request = pb.CommitOffsetsRequest(group="twice", member_epoch=-1, offsets=offsets)
    rows = cluster.ask_groups("twice", "CommitOffsets", request).offsets
    assert [row.error.name for row in rows] == ["", "", "INVALID_REQUEST"]
    assert cluster.committed("twice") == {("orders", 0): 1, ("orders", 1): 5}
    named = [common.TopicPartition(topic="orders"), common.TopicPartition(topic_id=orders)]
    rows = cluster.ask_groups(
        "twice", "DeleteOffsets", pb.DeleteOffsetsRequest(group="twice", partitions=named)
    ).offsets
    assert [row.error.name for row in rows] == ["", "INVALID_REQUEST"]
    assert cluster.committed("twice") == {("orders", 1): 5}


def test_groups_are_listed_described_and_deleted(cluster: GroupCluster) -> None:
    cluster.commit("simple", {("orders", 0): 1})
    one = cluster.member("seen", "orders", instance_id="rack-1-slot-2")
    cluster.until(lambda: len(one.owned) == 6)

    def listed(**more: Any) -> dict[str, tuple[str, str, int]]:
        answers = [cluster.groups("ListGroups", pb.ListGroupsRequest(**more), node=broker) for broker in BROKERS]
        assert not any(answer.loading for answer in answers)
        return {row.group: (row.type, row.state, row.members) for answer in answers for row in answer.groups}

    assert listed()["simple"] == ("simple", "empty", 0)
    assert listed()["seen"] == ("consumer", "stable", 1)
    assert set(listed(types=["consumer"], states=["stable"])) >= {"seen"}
    assert "simple" not in listed(types=["consumer"])
    assert "seen" not in listed(states=["empty"])
    details = cluster.describe("seen")
    (member,) = details.members
    assert (member.member_id, member.instance_id, member.client_host) == (one.member_id, "rack-1-slot-2", "node 1001")
    assert list(member.topics) == ["orders"]
    assert sorted(member.assignment.topics[0].partitions) == list(range(6))
    assert details.coordinator == cluster.coordinator("seen")
    assert details.epoch == one.epoch
    rows = cluster.ask_groups("seen", "DeleteGroups", pb.DeleteGroupsRequest(groups=["seen", "nobody"])).groups
    codes = {row.name: row.error.name for row in rows}
    assert codes["seen"] == "NON_EMPTY_GROUP"
    assert codes["nobody"] in ("GROUP_ID_NOT_FOUND", "NOT_COORDINATOR")
    subscribed = pb.DeleteOffsetsRequest(group="seen", partitions=[common.TopicPartition(topic="orders")])
    (row,) = cluster.ask_groups("seen", "DeleteOffsets", subscribed).offsets
    assert row.error.name == "GROUP_SUBSCRIBED_TO_TOPIC"
    one.leave()
    (row,) = cluster.ask_groups("seen", "DeleteGroups", pb.DeleteGroupsRequest(groups=["seen"])).groups
    assert row.error.name == ""
    assert cluster.describe("seen").error.name == "GROUP_ID_NOT_FOUND"


def test_members_fetch_and_commit_with_their_epoch(cluster: GroupCluster) -> None:
    one = cluster.member("fenced", "orders")
    cluster.until(lambda: len(one.owned) == 6)
    assert cluster.commit("fenced", {("orders", 1): 4}, member=one) == [""]

    def fetch(**more: Any) -> Any:
        return pb.FetchOffsetsRequest(group="fenced", partitions=[common.TopicPartition(topic="orders")], **more)

    cluster.ask_groups("fenced", "FetchOffsets", fetch(member_id=one.member_id, member_epoch=one.epoch))
    unknown = fetch(member_id="somebody", member_epoch=one.epoch)
    assert refused(cluster, "fenced", "FetchOffsets", unknown) is ErrorCode.UNKNOWN_MEMBER_ID
    stale = pb.FetchOffsetsRequest(group="fenced", member_id=one.member_id, member_epoch=one.epoch + 7)
    with pytest.raises(RemoteError) as refusal:
        cluster.groups("FetchOffsets", stale, node=cluster.coordinator("fenced"))
    assert refusal.value.code is ErrorCode.STALE_MEMBER_EPOCH
    outsider = pb.CommitOffsetsRequest(group="fenced", member_epoch=-1, offsets=offsets_of(("orders", 0, 1)))
    assert refused(cluster, "fenced", "CommitOffsets", outsider) is ErrorCode.UNKNOWN_MEMBER_ID
    one.leave()


def test_thousands_of_groups_and_partitions_in_one_request_are_answered(cluster: GroupCluster) -> None:
    names = [f"many-{number}" for number in range(3_000)]
    found = cluster.ask_groups("any", "FindCoordinator", pb.FindCoordinatorRequest(groups=names)).coordinators
    assert [(row.group, row.error.name) for row in found] == [(name, "") for name in names]
    described = cluster.ask_groups(names[0], "DescribeGroups", pb.DescribeGroupsRequest(groups=names)).groups
    assert [row.group for row in described] == names
    wanted = [common.TopicPartition(topic="orders", partition=number) for number in range(10_000)]
    rows = cluster.ask_groups("any", "FetchOffsets", pb.FetchOffsetsRequest(group="any", partitions=wanted)).offsets
    assert [row.partition for row in rows] == list(range(10_000))
    assert rows[-1].error.name == "UNKNOWN_TOPIC_OR_PARTITION"


HOSTILE: list[tuple[str, Any, ErrorCode]] = [
    ("FindCoordinator", pb.FindCoordinatorRequest(), ErrorCode.INVALID_REQUEST),
    ("Heartbeat", pb.HeartbeatRequest(), ErrorCode.INVALID_GROUP_ID),
    ("Heartbeat", pb.HeartbeatRequest(group="g"), ErrorCode.INVALID_REQUEST),
    ("Heartbeat", pb.HeartbeatRequest(group="g", member_id="m", member_epoch=-3), ErrorCode.INVALID_REQUEST),
    ("Heartbeat", pb.HeartbeatRequest(group="g", member_id="m", member_epoch=9), ErrorCode.UNKNOWN_MEMBER_ID),
    ("Heartbeat", pb.HeartbeatRequest(group="g", member_id="m" * 100_000), ErrorCode.INVALID_REQUEST),
    ("Heartbeat", pb.HeartbeatRequest(group="g", member_id="m", assignor="best"), ErrorCode.UNSUPPORTED_ASSIGNOR),
    (
        "Heartbeat",
        pb.HeartbeatRequest(group="g", member_id="m", session_timeout_ms=1),
        ErrorCode.INVALID_SESSION_TIMEOUT,
    ),
    (
        "Heartbeat",
        pb.HeartbeatRequest(group="g", member_id="m", subscription=pb.Subscription(pattern="(")),
        ErrorCode.INVALID_REGULAR_EXPRESSION,
    ),
    (
        "Heartbeat",
        pb.HeartbeatRequest(group="g", member_id="m", subscription=pb.Subscription(pattern="(a+)+" * 900)),
        ErrorCode.INVALID_REGULAR_EXPRESSION,
    ),
    (
        "Heartbeat",
        pb.HeartbeatRequest(
            group="g", member_id="m", owned=pb.Partitions(topics=[pb.TopicPartitions(topic_id=b"short")])
        ),
        ErrorCode.INVALID_REQUEST,
    ),
    ("CommitOffsets", pb.CommitOffsetsRequest(group="g", member_epoch=-1), ErrorCode.INVALID_REQUEST),
    (
        "CommitOffsets",
        pb.CommitOffsetsRequest(group="g", member_epoch=-1, offsets=offsets_of(("orders", 0, 1), ("orders", 0, 2))),
        ErrorCode.INVALID_REQUEST,
    ),
    (
        "CommitOffsets",
        pb.CommitOffsetsRequest(group="g", member_id="m", member_epoch=3, offsets=offsets_of(("orders", 0, 1))),
        ErrorCode.UNKNOWN_MEMBER_ID,
    ),
    ("FetchOffsets", pb.FetchOffsetsRequest(), ErrorCode.INVALID_GROUP_ID),
    (
        "FetchOffsets",
        pb.FetchOffsetsRequest(group="g", partitions=[common.TopicPartition(topic="orders")] * 2),
        ErrorCode.INVALID_REQUEST,
    ),
    ("DeleteOffsets", pb.DeleteOffsetsRequest(group="g"), ErrorCode.INVALID_REQUEST),
    ("DescribeGroups", pb.DescribeGroupsRequest(), ErrorCode.INVALID_REQUEST),
    ("DeleteGroups", pb.DeleteGroupsRequest(), ErrorCode.INVALID_REQUEST),
    ("RemoveMembers", pb.RemoveMembersRequest(group="g"), ErrorCode.GROUP_ID_NOT_FOUND),
]


@pytest.mark.parametrize(("name", "request_", "code"), HOSTILE, ids=lambda value: str(value)[:40])
def test_what_makes_no_sense_is_refused(cluster: GroupCluster, name: str, request_: Any, code: ErrorCode) -> None:
    assert refused(cluster, "g", name, request_) is code
    state = cluster.shard("g").state
    assert state.group("g") is None, "nothing is kept of it"


def test_offsets_that_make_no_sense_are_refused_by_themselves(cluster: GroupCluster) -> None:
    request = pb.CommitOffsetsRequest(
        group="odd",
        member_epoch=-1,
        offsets=[
            *offsets_of(("orders", 0, -5), ("orders", 1, 3)),
            pb.OffsetToCommit(topic="orders", partition=2, offset=1, metadata="x" * 5_000),
        ],
    )
    rows = cluster.ask_groups("odd", "CommitOffsets", request).offsets
    assert [bool(row.error.name) for row in rows] == [True, False, True]
    assert rows[2].error.name == "OFFSET_METADATA_TOO_LARGE"
    assert cluster.committed("odd") == {("orders", 1): 3}


def test_a_stream_is_of_one_member_and_ends_with_what_is_no_heartbeat(cluster: GroupCluster) -> None:
    leader = cluster.coordinator("one-stream")
    join = pb.HeartbeatRequest(group="one-stream", member_id="a", subscription=pb.Subscription(topics=["orders"]))
    other = pb.HeartbeatRequest(group="one-stream", member_id="b", subscription=pb.Subscription(topics=["orders"]))
    first, last = cluster.api_stream(leader, "Groups", "Membership", join, other)
    assert first.member_epoch > 0
    assert last.error.name == "INVALID_REQUEST"
    (last,) = cluster.api_stream(leader, "Groups", "Membership", pb.HeartbeatRequest(group="one-stream"))
    assert last.error.name == "INVALID_REQUEST"
    assert cluster.api_stream(leader, "Groups", "Membership") == [], "a stream without a word"
    elsewhere = next(broker for broker in BROKERS if broker != leader)
    (last,) = cluster.api_stream(elsewhere, "Groups", "Membership", join)
    assert last.error.name == "NOT_COORDINATOR"
    assert last.error.retriable


def test_nobody_writes_into_the_coordinators_log(cluster: GroupCluster) -> None:
    leader = cluster.coordinator("billing")
    item = log_pb2.ProducePartition(topic=OFFSETS_TOPIC, partition=partition_for("billing", 3), batches=batch(b"x"))
    (row,) = cluster.api(leader, "Log", "Produce", log_pb2.ProduceRequest(partitions=[item])).partitions
    assert row.error.name == "INVALID_TOPIC"


# Over gRPC.


SETTINGS = {"offsets.topic.num.partitions": "2", "group.consumer.stream.grace.ms": "300"}


def over_grpc(path: Path, job: Callable[[GrpcCluster], Awaitable[None]]) -> None:
    """One controller and one broker with the topic `orders`; the grace of members is short."""

    async def main() -> None:
        async with asyncio.timeout(60), GrpcCluster(path) as grpc_cluster:
            await grpc_cluster.start_controllers(1)
            await grpc_cluster.active()
            broker = await grpc_cluster.start_broker(11)
            changes = [admin_pb2.ConfigChange(key=key, value=value) for key, value in SETTINGS.items()]
            resource = admin_pb2.AlteredConfig(resource=admin_pb2.ConfigResource(type="cluster"), changes=changes)
            await grpc_cluster.call(11, "Admin", "AlterConfigs", admin_pb2.AlterConfigsRequest(resources=[resource]))
            new = admin_pb2.NewTopic(name="orders", partitions=4, replication_factor=1)
            await grpc_cluster.call(11, "Admin", "CreateTopics", admin_pb2.CreateTopicsRequest(topics=[new]))
            tail = broker.tail
            assert tail is not None
            await until(lambda: "orders" in tail.image.topic_ids)
            await job(grpc_cluster)

    asyncio.run(main())


async def find(grpc_cluster: GrpcCluster, group: str) -> None:
    """Until it is coordinated."""
    (found,) = (
        await grpc_cluster.call(11, "Groups", "FindCoordinator", pb.FindCoordinatorRequest(groups=[group]))
    ).coordinators
    assert found.broker == 11
    groups = grpc_cluster.nodes[11].groups
    assert groups is not None
    number = partition_for(group, 2)

    def is_led() -> bool:
        shard = groups.coordinator.shards.get(number)
        return shard is not None and shard.phase is Phase.LEADING

    await until(is_led)


def joining(group: str, member_id: str = "one") -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        group=group, member_id=member_id, subscription=pb.Subscription(topics=["orders"]), client_id="tests"
    )


def held(response: pb.HeartbeatResponse) -> list[int]:
    return sorted(number for topic in response.assignment.topics for number in topic.partitions)


@inside(over_grpc, "tmp_path")
async def test_membership_over_grpc(grpc_cluster: GrpcCluster) -> None:
    await find(grpc_cluster, "billing")
    one, two = joining("billing"), joining("billing", "two")
    first = grpc_cluster.stream(11, "Groups", "Membership", None)
    await first.write(one)
    reported = await first.read()
    assert held(reported) == [0, 1, 2, 3]
    second = grpc_cluster.stream(11, "Groups", "Membership", None)
    await second.write(two)
    waits = await second.read()
    assert held(waits) == [], "nothing is free yet"
    news = await first.read()  # nobody has asked
    assert news.member_epoch > reported.member_epoch
    assert len(held(news)) == 2
    kept = pb.Partitions(topics=[pb.TopicPartitions(topic="orders", partitions=held(news))])
    report = pb.HeartbeatRequest(group="billing", member_id=one.member_id, member_epoch=news.member_epoch, owned=kept)
    await first.write(report)
    given = await second.read()
    assert sorted([*held(news), *held(given)]) == [0, 1, 2, 3]
    # The second is gone without a word: 300 ms later the first has everything.
    second.cancel()
    answer = await first.read()
    while not held(answer) or len(held(answer)) < 4:
        answer = await first.read()
    await first.write(pb.HeartbeatRequest(group="billing", member_id=one.member_id, member_epoch=-1))
    goodbye = await first.read()
    assert goodbye.member_epoch == -1
    assert await first.read() is aio.EOF
    details = (
        await grpc_cluster.call(11, "Groups", "DescribeGroups", pb.DescribeGroupsRequest(groups=["billing"]))
    ).groups[0]
    assert (details.state, len(details.members)) == ("empty", 0)


@inside(over_grpc, "tmp_path")
async def test_an_error_of_the_member_is_the_last_word_of_its_stream(grpc_cluster: GrpcCluster) -> None:
    await find(grpc_cluster, "billing")
    stream = grpc_cluster.stream(11, "Groups", "Membership", None)
    one = joining("billing")
    await stream.write(one)
    assert (await stream.read()).member_epoch > 0
    removed = pb.RemoveMembersRequest(group="billing")
    rows = (await grpc_cluster.call(11, "Groups", "RemoveMembers", removed)).members
    assert [row.name for row in rows] == [one.member_id]
    last = await stream.read()
    assert last.error.name == "UNKNOWN_MEMBER_ID"
    assert await stream.read() is aio.EOF
    assert await stream.code() is STATUS.OK


@inside(over_grpc, "tmp_path")
async def test_errors_of_unary_calls_have_a_status(grpc_cluster: GrpcCluster) -> None:
    await find(grpc_cluster, "billing")
    cases = [
        (
            pb.HeartbeatRequest(group="billing", member_id="x", member_epoch=4),
            "UNKNOWN_MEMBER_ID",
            STATUS.NOT_FOUND,
        ),
        (pb.HeartbeatRequest(), "INVALID_GROUP_ID", STATUS.INVALID_ARGUMENT),
    ]
    for request, name, status in cases:
        with pytest.raises(aio.AioRpcError) as refusal:
            await grpc_cluster.call(11, "Groups", "Heartbeat", request)
        assert error_of(refusal.value).code.name == name
        assert refusal.value.code() is status


@inside(over_grpc, "tmp_path")
async def test_streams_end_when_the_node_stops(grpc_cluster: GrpcCluster) -> None:
    await find(grpc_cluster, "billing")
    stream = grpc_cluster.stream(11, "Groups", "Membership", None)
    await stream.write(joining("billing"))
    await stream.read()
    stopping = asyncio.create_task(grpc_cluster.nodes[11].grpc_server.close(grace_s=2))
    with pytest.raises(aio.AioRpcError) as ended:
        await stream.read()
    assert ended.value.code() is STATUS.UNAVAILABLE
    await stopping


@inside(over_grpc, "tmp_path")
async def test_a_controller_says_that_brokers_serve_groups(grpc_cluster: GrpcCluster) -> None:
    with pytest.raises(aio.AioRpcError) as refusal:
        await grpc_cluster.call(1, "Groups", "ListGroups", pb.ListGroupsRequest())
    assert error_of(refusal.value).code is ErrorCode.UNSUPPORTED_VERSION
    assert NodeId(1) in grpc_cluster.nodes


@inside(over_grpc, "tmp_path")
async def test_a_burst_of_calls_is_answered_call_by_call(grpc_cluster: GrpcCluster) -> None:
    """gRPC itself would cancel some of more than 1,000 that have not been taken yet."""
    await find(grpc_cluster, "billing")
    request = pb.CommitOffsetsRequest(group="billing", member_epoch=-1, offsets=offsets_of(("orders", 0, 1)))
    calls = [grpc_cluster.call(11, "Groups", "CommitOffsets", request) for _ in range(2_000)]
    answers = await asyncio.gather(*calls)
    assert {row.error.name for answer in answers for row in answer.offsets} == {""}
    groups = grpc_cluster.nodes[11].groups
    assert groups is not None
    shard = groups.coordinator.shards[partition_for("billing", 2)]
    assert shard.runtime.appends < 1_000, "commits share their syncs"
