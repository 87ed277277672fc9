"""Topics that are made because a metadata request may create them, against whole controllers and brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.grpc_api.simulated_nodes import ApiCluster

from tidelog.model.errors import ErrorCode, RemoteError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import admin_pb2
from tidelog.rpc.v1 import cluster_pb2 as pb
from tidelog.services.auto_create import NAMES_MAX
from tidelog.world.simulated import SimNode

BROKERS = (11, 12)


@pytest.fixture
def quorum() -> Iterator[ApiCluster]:
    with ApiCluster(21, brokers=BROKERS) as made:
        yield made


def configure(quorum: ApiCluster, **settings: str) -> None:
    """Set keys of the cluster, and wait until every node has heard of them."""
    changes = [admin_pb2.ConfigChange(key=key.replace("_", "."), value=value) for key, value in settings.items()]
    resource = admin_pb2.ConfigResource(type="cluster", name="")
    request = admin_pb2.AlterConfigsRequest(resources=[admin_pb2.AlteredConfig(resource=resource, changes=changes)])
    (row,) = quorum.api(quorum.active(), "Admin", "AlterConfigs", request).resources
    assert not row.HasField("error"), row.error.message
    until_same(quorum)


def until_same(quorum: ApiCluster) -> None:
    end = quorum.controller(quorum.active()).machine.offset
    tails = [broker.tail for broker in quorum.brokers.values()]
    controllers = [controller for _, controller in quorum.controllers.values()]
    quorum.world.run_until(
        lambda: all(tail.offset >= end for tail in tails) and all(one.machine.offset >= end for one in controllers),
        timeout=10,
    )


def turn_on(quorum: ApiCluster) -> None:
    configure(quorum, auto_create_topics_enable="true", num_partitions="3", default_replication_factor="2")


def look_for(quorum: ApiCluster, node: int, *names: str, may_create: bool = True) -> list[pb.Topic]:
    request = pb.MetadataRequest(topics=names, may_create=may_create)
    return list(quorum.api(node, "Cluster", "Metadata", request).topics)


def known(quorum: ApiCluster) -> list[str]:
    return sorted(quorum.controller(quorum.active()).image.topic_ids)


@pytest.mark.requirement("a:A-27", "b:B-11", "a:A-40", "b:B-12")
def test_an_unknown_topic_is_created_with_the_clusters_defaults_through_a_node_of_any_role(quorum: ApiCluster) -> None:
    turn_on(quorum)
    active = quorum.active()
    standby = next(node for node in quorum.controllers if node != active)
    for node, name in ((11, "by-broker"), (active, "by-active"), (standby, "by-standby")):
        (row,) = look_for(quorum, node, name)
        assert not row.HasField("error"), row.error.message
        assert [len(part.replicas) for part in row.partitions] == [2, 2, 2]
        assert all(part.leader in BROKERS for part in row.partitions)
        (again,) = look_for(quorum, node, name)
        assert again.topic_id == row.topic_id
    assert known(quorum) == ["by-active", "by-broker", "by-standby"]


@pytest.mark.requirement("a:A-27", "b:B-11")
def test_nothing_is_created_where_the_setting_is_off_or_the_request_does_not_say_so(quorum: ApiCluster) -> None:
    (row,) = look_for(quorum, 11, "nope")
    assert row.error.name == "UNKNOWN_TOPIC_OR_PARTITION", "it is off unless somebody turns it on"
    turn_on(quorum)
    (row,) = look_for(quorum, 11, "nope", may_create=False)
    assert row.error.name == "UNKNOWN_TOPIC_OR_PARTITION"
    quorum.api(11, "Cluster", "Metadata", pb.MetadataRequest(all_topics=True, may_create=True))
    configure(quorum, auto_create_topics_enable="false")
    (row,) = look_for(quorum, 11, "nope")
    assert row.error.name == "UNKNOWN_TOPIC_OR_PARTITION"
    assert known(quorum) == []


@pytest.mark.requirement("a:A-27")
def test_names_that_no_topic_can_have_and_the_clusters_own_are_not_created(quorum: ApiCluster) -> None:
    turn_on(quorum)
    names = ["bad name", "", "..", "x" * 250, "__consumer_offsets", "__transaction_state", "__cluster_metadata", "good"]
    rows = look_for(quorum, 11, *names)
    assert [row.error.name for row in rows] == [
        *["INVALID_TOPIC"] * 4,
        *["UNKNOWN_TOPIC_OR_PARTITION"] * 3,
        "",
    ]
    assert known(quorum) == ["good"]
    (first, second) = look_for(quorum, 11, "a.b", "a_b")
    assert (first.error.name, second.error.name) == ("", "INVALID_TOPIC"), "they would be one name in a metric"
    (once,) = look_for(quorum, 11, "twice", "twice")
    assert once.name == "twice"
    assert not once.HasField("error")


def test_a_request_that_is_refused_creates_nothing(quorum: ApiCluster) -> None:
    turn_on(quorum)
    request = pb.MetadataRequest(topics=["t"], listener="NOWHERE", may_create=True)
    with pytest.raises(RemoteError) as refusal:
        quorum.api(11, "Cluster", "Metadata", request)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
    assert known(quorum) == []


def test_an_id_beside_an_empty_name_keeps_its_own_error(quorum: ApiCluster) -> None:
    turn_on(quorum)
    request = pb.MetadataRequest(topics=[""], topic_ids=[bytes(15) + b"\x01"], may_create=True)
    named, by_id = quorum.api(11, "Cluster", "Metadata", request).topics
    assert (named.error.name, by_id.error.name) == ("INVALID_TOPIC", "UNKNOWN_TOPIC_ID")


def test_a_request_creates_a_bounded_number_and_the_next_one_the_others(quorum: ApiCluster) -> None:
    turn_on(quorum)
    configure(quorum, num_partitions="1")
    names = [f"t{number:03}" for number in range(NAMES_MAX + 5)]
    rows = look_for(quorum, 11, *names)
    assert [row.error.name for row in rows] == [""] * NAMES_MAX + ["LEADER_NOT_AVAILABLE"] * 5
    assert all(row.error.retriable for row in rows[NAMES_MAX:])
    assert known(quorum) == names[:NAMES_MAX]
    assert not any(row.HasField("error") for row in look_for(quorum, 11, *names))
    assert known(quorum) == names


def test_many_partitions_each_are_created_few_topics_at_a_time(quorum: ApiCluster) -> None:
    turn_on(quorum)
    configure(quorum, num_partitions="4000", default_replication_factor="1", max_partitions_per_broker="100000")
    rows = look_for(quorum, 11, "a", "b", "c")
    assert rows[2].error.name == "LEADER_NOT_AVAILABLE", "three would be more than one request may create"
    assert known(quorum) == ["a", "b"]


def test_a_refusal_of_the_controller_is_reported(quorum: ApiCluster) -> None:
    turn_on(quorum)
    configure(quorum, default_replication_factor="3")
    (row,) = look_for(quorum, 11, "t")
    assert row.error.name == "INVALID_REPLICATION_FACTOR"
    assert "2 brokers are registered" in row.error.message
    assert known(quorum) == []


@pytest.mark.requirement("a:A-27")
def test_requests_that_race_for_one_name_make_one_topic(quorum: ApiCluster) -> None:
    turn_on(quorum)
    method = method_named("Cluster", "Metadata")
    data = pb.MetadataRequest(topics=["t"], may_create=True).SerializeToString()
    nodes = [11, 12, *quorum.controllers] * 4

    async def race(_: SimNode) -> list[pb.MetadataResponse]:
        calls = [quorum.admin_transport.call(NodeId(node), method.wire_name, data, timeout_ms=9_000) for node in nodes]
        return [pb.MetadataResponse.FromString(answer) for answer in await asyncio.gather(*calls)]

    answers = quorum.world.run(quorum.admin, race, timeout=30)
    assert len(answers) == len(nodes)
    assert not any(answer.topics[0].HasField("error") for answer in answers)
    assert len({answer.topics[0].topic_id for answer in answers}) == 1
    assert known(quorum) == ["t"]


@pytest.mark.requirement("a:A-27")
def test_without_a_controller_the_answer_comes_soon_and_says_ask_again(quorum: ApiCluster) -> None:
    turn_on(quorum)
    look_for(quorum, 11, "old")
    for node in list(quorum.controllers):
        quorum.kill(node)
    began_s = quorum.now_s()
    old, new = look_for(quorum, 11, "old", "new")
    assert quorum.now_s() - began_s < 2.0, "before a client gives the node up"
    assert not old.HasField("error")
    assert (new.error.name, new.error.retriable) == ("LEADER_NOT_AVAILABLE", True)
    quorum.start()
    until_s = quorum.now_s() + 30
    while look_for(quorum, 11, "new")[0].HasField("error"):
        assert quorum.now_s() < until_s, "it is created when there is a controller again"
        quorum.world.run_for(0.2)
    assert known(quorum) == ["new", "old"]
