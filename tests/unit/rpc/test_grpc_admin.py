"""The service Admin against whole controllers and brokers: every call, through every role, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from support.grpc_api.simulated_nodes import ApiCluster
from support.metadata.quorum import BROKER_DIRECTORY

from tidelog.model.errors import ErrorCode, RemoteError
from tidelog.model.ids import NodeId
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common

BROKERS = (11, 12, 13)


class World:
    """One quorum for the module; each test has topics of its own."""

    def __init__(self, quorum: ApiCluster) -> None:
        self.quorum = quorum

    def ask(self, name: str, request: Any, *, node: int = 11) -> Any:
        return self.quorum.api(node, "Admin", name, request)

    def refused(self, name: str, request: Any, *, node: int = 11) -> RemoteError:
        with pytest.raises(RemoteError, match=r".") as refusal:
            self.ask(name, request, node=node)
        return refusal.value

    def create(self, name: str, *assignment: tuple[int, ...], node: int = 11, **more: Any) -> pb.CreatedTopic:
        rows = [pb.Replicas(brokers=row) for row in assignment]
        topic = pb.NewTopic(name=name, assignment=rows, **more)
        (made,) = self.ask("CreateTopics", pb.CreateTopicsRequest(topics=[topic]), node=node).topics
        assert isinstance(made, pb.CreatedTopic)
        return made

    def until_known(self, name: str) -> None:
        """At every broker."""
        tails = [broker.tail for broker in self.quorum.brokers.values()]
        self.quorum.world.run_until(lambda: all(name in tail.image.topic_ids for tail in tails), timeout=10)

    @property
    def standby(self) -> NodeId:
        active = self.quorum.active()
        return next(node for node in self.quorum.controllers if node != active)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ApiCluster(5, brokers=BROKERS) as quorum:
        yield World(quorum)


def names(outcomes: Any) -> list[str]:
    """The error of each, or an empty text."""
    return [row.error.name if row.HasField("error") else "" for row in outcomes]


@pytest.mark.parametrize("role", ["active", "standby", "broker"])
def test_topics_are_made_through_a_node_of_any_role(world: World, role: str) -> None:
    node = {"active": world.quorum.active(), "standby": world.standby, "broker": 12}[role]
    name = f"made-{role}"
    request = pb.CreateTopicsRequest(topics=[pb.NewTopic(name=name, partitions=4, replication_factor=3)])
    (made,) = world.ask("CreateTopics", request, node=node).topics
    assert not made.HasField("error")
    assert (made.name, made.partitions, made.replication_factor, len(made.topic_id)) == (name, 4, 3, 16)
    request_back = pb.DescribeTopicsRequest(topics=[name])
    for asked in (world.quorum.active(), world.standby, 13):
        (found,) = world.ask("DescribeTopics", request_back, node=asked).topics
        assert (found.name, found.topic_id, found.replication_factor) == (name, made.topic_id, 3)
        assert [row.partition for row in found.partitions] == [0, 1, 2, 3]
        assert all(row.state == "online" and sorted(row.isr) == sorted(row.replicas) for row in found.partitions)


def test_what_is_left_out_is_the_clusters_default_and_validate_only_makes_nothing(world: World) -> None:
    request = pb.CreateTopicsRequest(topics=[pb.NewTopic(name="dry")], validate_only=True)
    (made,) = world.ask("CreateTopics", request).topics
    assert not made.HasField("error")
    assert made.partitions >= 1
    assert made.replication_factor == 3
    (found,) = world.ask("DescribeTopics", pb.DescribeTopicsRequest(topics=["dry"])).topics
    assert found.error.name == "UNKNOWN_TOPIC_OR_PARTITION"
    assert found.error.code == 3
    assert found.error.retriable


BAD_TOPICS = [
    ({"name": ""}, "INVALID_TOPIC"),
    ({"name": "a" * 300}, "INVALID_TOPIC"),
    ({"name": ".."}, "INVALID_TOPIC"),
    ({"name": "."}, "INVALID_TOPIC"),
    ({"name": "tab\tinside"}, "INVALID_TOPIC"),
    ({"name": "nul\0"}, "INVALID_TOPIC"),
    ({"name": "übung"}, "INVALID_TOPIC"),
    ({"name": "__cluster_metadata"}, "INVALID_TOPIC"),
    ({"name": "x", "partitions": 0}, "INVALID_PARTITIONS"),
    ({"name": "x", "partitions": -5}, "INVALID_PARTITIONS"),
    ({"name": "x", "replication_factor": 0}, "INVALID_REPLICATION_FACTOR"),
    ({"name": "x", "replication_factor": 4}, "INVALID_REPLICATION_FACTOR"),
    ({"name": "x", "partitions": 2_000_000_000}, "POLICY_VIOLATION"),
    ({"name": "x", "assignment": [pb.Replicas(brokers=[11, 11])]}, "INVALID_REPLICA_ASSIGNMENT"),
    ({"name": "x", "assignment": [pb.Replicas(brokers=[11, 77])]}, "INVALID_REPLICA_ASSIGNMENT"),
    ({"name": "x", "assignment": [pb.Replicas()]}, "INVALID_REPLICA_ASSIGNMENT"),
    ({"name": "x", "configs": [pb.ConfigPair(key="no.such.key", value="1")]}, "INVALID_CONFIG"),
    ({"name": "x", "configs": [pb.ConfigPair(key="retention.ms", value="soon")]}, "INVALID_CONFIG"),
]


@pytest.mark.parametrize(("fields", "error"), BAD_TOPICS, ids=[str(number) for number in range(len(BAD_TOPICS))])
def test_a_topic_that_cannot_be_is_refused_by_name_with_a_sentence(
    world: World, fields: dict[str, Any], error: str
) -> None:
    (made,) = world.ask("CreateTopics", pb.CreateTopicsRequest(topics=[pb.NewTopic(**fields)])).topics
    assert made.error.name == error
    assert made.error.message
    assert made.error.advice
    assert made.topic_id == b""


def test_one_bad_topic_does_not_keep_the_others_from_being_made(world: World) -> None:
    wanted = [pb.NewTopic(name="good-one", partitions=1), pb.NewTopic(name=".."), pb.NewTopic(name="good-two")]
    made = world.ask("CreateTopics", pb.CreateTopicsRequest(topics=wanted)).topics
    assert names(made) == ["", "INVALID_TOPIC", ""]
    again = world.ask("CreateTopics", pb.CreateTopicsRequest(topics=wanted[:1])).topics
    assert names(again) == ["TOPIC_ALREADY_EXISTS"]
    assert not again[0].error.retriable
    twice = [pb.NewTopic(name="pair"), pb.NewTopic(name="pair")]
    made = world.ask("CreateTopics", pb.CreateTopicsRequest(topics=twice)).topics
    assert names(made) == ["INVALID_REQUEST"] * 2


def test_topics_are_found_and_deleted_by_name_and_by_id(world: World) -> None:
    first, second = world.create("del-1", (11,)), world.create("del-2", (12,))
    world.until_known("del-2")
    unknown = UUID(int=99).bytes
    asked = pb.DescribeTopicsRequest(topics=["del-1"], topic_ids=[second.topic_id, unknown])
    found = world.ask("DescribeTopics", asked).topics
    assert [row.name for row in found] == ["del-1", "del-2", ""]
    assert names(found) == ["", "", "UNKNOWN_TOPIC_ID"]
    everything = world.ask("DescribeTopics", pb.DescribeTopicsRequest(all_topics=True)).topics
    assert {"del-1", "del-2"} <= {row.name for row in everything}
    assert [row.name for row in everything] == sorted(row.name for row in everything)

    request = pb.DeleteTopicsRequest(topics=["del-1", "nobody"], topic_ids=[second.topic_id, unknown])
    request.validate_only = True
    expected = ["", "UNKNOWN_TOPIC_OR_PARTITION", "", "UNKNOWN_TOPIC_ID"]
    assert names(world.ask("DeleteTopics", request).topics) == expected
    request.validate_only = False
    assert names(world.ask("DeleteTopics", request).topics) == expected
    assert names(world.ask("DeleteTopics", request).topics)[0] == "UNKNOWN_TOPIC_OR_PARTITION"
    again = world.create("del-1", (11,))
    assert again.topic_id != first.topic_id
    refusal = world.refused("DeleteTopics", pb.DeleteTopicsRequest(topic_ids=[b"short"]))
    assert refusal.code is ErrorCode.INVALID_REQUEST


def test_partitions_are_only_ever_added(world: World) -> None:
    world.create("grow", (11,))

    def add(**fields: Any) -> list[str]:
        request = pb.AddPartitionsRequest(topics=[pb.MorePartitions(**fields)])
        return names(world.ask("AddPartitions", request).topics)

    assert add(topic="grow", total=3) == [""]
    assert add(topic="grow", total=3) == ["INVALID_PARTITIONS"]
    assert add(topic="grow", total=1) == ["INVALID_PARTITIONS"]
    assert add(topic="nobody", total=3) == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert add(topic="grow", total=4, assignment=[pb.Replicas(brokers=[55])]) == ["INVALID_REPLICA_ASSIGNMENT"]
    assert add(topic="grow", total=4, assignment=[pb.Replicas(brokers=[13])]) == [""]
    (found,) = world.ask("DescribeTopics", pb.DescribeTopicsRequest(topics=["grow"])).topics
    assert len(found.partitions) == 4
    assert list(found.partitions[3].replicas) == [13]


def test_configs_are_changed_and_described_with_their_source(world: World) -> None:
    world.create("conf", (11,))
    topic = pb.ConfigResource(type="topic", name="conf")

    def alter(*changes: pb.ConfigChange, resource: pb.ConfigResource = topic, validate_only: bool = False) -> list[str]:
        row = pb.AlteredConfig(resource=resource, changes=changes)
        request = pb.AlterConfigsRequest(resources=[row], validate_only=validate_only)
        return names(world.ask("AlterConfigs", request).resources)

    def value(key: str) -> tuple[str, str]:
        request = pb.DescribeConfigsRequest(resources=[topic], keys=[key])
        (entry,) = world.ask("DescribeConfigs", request).resources[0].entries
        return entry.value, entry.source

    default = value("retention.ms")
    change = pb.ConfigChange(key="retention.ms", value="1234")
    assert alter(change, validate_only=True) == [""]
    assert value("retention.ms") == default
    assert alter(change) == [""]
    assert value("retention.ms") == ("1234", "topic")
    assert alter(pb.ConfigChange(key="cleanup.policy", operation=pb.ConfigChange.APPEND, value="compact")) == [""]
    assert value("cleanup.policy")[0].split(",") == ["delete", "compact"]
    assert alter(pb.ConfigChange(key="cleanup.policy", operation=pb.ConfigChange.SUBTRACT, value="delete")) == [""]
    assert value("cleanup.policy")[0] == "compact"
    assert alter(pb.ConfigChange(key="retention.ms", operation=pb.ConfigChange.DELETE)) == [""]
    assert value("retention.ms") == default
    assert alter(pb.ConfigChange(key="retention.mss", value="1")) == ["INVALID_CONFIG"]
    assert alter(pb.ConfigChange(key="retention.ms", value="x" * 40_000)) == ["INVALID_CONFIG"]
    assert alter(pb.ConfigChange(key="retention.ms", operation=9, value="1")) == ["INVALID_REQUEST"]  # type: ignore[arg-type]
    assert alter(change, resource=pb.ConfigResource(type="topic", name="nobody")) == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert alter(change, resource=pb.ConfigResource(type="planet")) == ["INVALID_REQUEST"]
    rows = [pb.ConfigResource(type="cluster"), pb.ConfigResource(type="broker", name="11"), topic]
    rows += [pb.ConfigResource(type="broker", name="99"), pb.ConfigResource(type="topic", name="nobody")]
    found = world.ask("DescribeConfigs", pb.DescribeConfigsRequest(resources=rows)).resources
    assert names(found) == ["", "", "", "BROKER_ID_NOT_REGISTERED", "UNKNOWN_TOPIC_OR_PARTITION"]
    assert all(entry.documentation for row in found[:3] for entry in row.entries)


def test_replicas_are_moved_listed_and_cancelled(world: World) -> None:
    world.create("move", (11, 12))
    row = pb.Reassignment(topic="move", partition=0, replicas=[13, 12])

    def alter(item: pb.Reassignment, **more: Any) -> list[str]:
        request = pb.AlterReassignmentsRequest(partitions=[item], **more)
        return names(world.ask("AlterReassignments", request).partitions)

    assert alter(row, validate_only=True) == [""]
    assert not world.ask("ListReassignments", pb.ListReassignmentsRequest()).reassignments
    for leader in (11, 12):  # the new replica cannot follow, so the reassignment stays in progress
        world.quorum.network.block(NodeId(13), NodeId(leader))
    assert alter(row) == [""]
    (found,) = world.ask("ListReassignments", pb.ListReassignmentsRequest()).reassignments
    assert (found.topic, list(found.target), list(found.adding_replicas)) == ("move", [13, 12], [13])
    assert (list(found.removing_replicas), list(found.waiting_for)) == ([11], [13])
    named = pb.ListReassignmentsRequest(partitions=[common.TopicPartition(topic="move", partition=0)])
    assert len(world.ask("ListReassignments", named).reassignments) == 1
    assert alter(pb.Reassignment(topic="move", partition=0)) == [""]
    world.quorum.network.heal()
    assert alter(pb.Reassignment(topic="move", partition=0)) == ["NO_REASSIGNMENT_IN_PROGRESS"]
    assert alter(pb.Reassignment(topic="move", partition=-1, replicas=[11])) == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert alter(pb.Reassignment(topic="move", partition=0, replicas=[11, 44])) == ["INVALID_REPLICA_ASSIGNMENT"]


def test_leaders_are_elected_by_name_by_id_or_all_but_never_by_a_forgotten_list(world: World) -> None:
    made = world.create("elect", (11, 12), (12, 11))
    world.until_known("elect")

    def elect(**fields: Any) -> list[tuple[str, int, str]]:
        rows = world.ask("ElectLeaders", pb.ElectLeadersRequest(**fields)).partitions
        return [(row.topic, row.partition, row.error.name if row.HasField("error") else "") for row in rows]

    by_name = common.TopicPartition(topic="elect", partition=0)
    by_id = common.TopicPartition(topic_id=made.topic_id, partition=1)
    strange = common.TopicPartition(topic="elect", partition=-3)
    assert elect(partitions=[by_name, by_id, strange]) == [
        ("elect", 0, "ELECTION_NOT_NEEDED"),
        ("elect", 1, "ELECTION_NOT_NEEDED"),
        ("elect", -3, "UNKNOWN_TOPIC_OR_PARTITION"),
    ]
    unclean = pb.ElectLeadersRequest.UNCLEAN
    assert elect(partitions=[by_name], kind=unclean) == [("elect", 0, "ELECTION_NOT_NEEDED")]
    assert elect(all=True, validate_only=True) == []
    assert world.refused("ElectLeaders", pb.ElectLeadersRequest()).code is ErrorCode.INVALID_REQUEST
    both = pb.ElectLeadersRequest(all=True, partitions=[by_name])
    assert world.refused("ElectLeaders", both).code is ErrorCode.INVALID_REQUEST
    gone = common.TopicPartition(topic_id=UUID(int=5).bytes)
    assert world.refused("ElectLeaders", pb.ElectLeadersRequest(partitions=[gone])).code is ErrorCode.UNKNOWN_TOPIC_ID


def test_a_drained_broker_leads_nothing_and_all_leaders_come_back_by_election(world: World) -> None:
    world.create("drained", (13, 12), (13, 11))
    request = pb.DrainBrokerRequest(broker=13, validate_only=True)
    world.ask("DrainBroker", request)

    def leaders() -> list[int]:
        (found,) = world.ask("DescribeTopics", pb.DescribeTopicsRequest(topics=["drained"])).topics
        return [row.leader for row in found.partitions]

    assert leaders() == [13, 13]
    left = world.ask("DrainBroker", pb.DrainBrokerRequest(broker=13))
    assert left.replicas >= 2
    assert leaders() == [12, 11]
    (described,) = world.ask("DescribeBrokers", pb.DescribeBrokersRequest(brokers=[13])).brokers
    assert described.is_draining
    world.ask("DrainBroker", pb.DrainBrokerRequest(broker=13, undo=True))
    rows = world.ask("ElectLeaders", pb.ElectLeadersRequest(all=True)).partitions
    assert {(row.topic, row.partition) for row in rows if not row.HasField("error")} >= {("drained", 0), ("drained", 1)}
    assert leaders() == [13, 13]
    assert world.refused("DrainBroker", pb.DrainBrokerRequest(broker=77)).code is ErrorCode.BROKER_ID_NOT_REGISTERED


def test_brokers_are_described_and_a_live_one_is_not_unregistered(world: World) -> None:
    found = world.ask("DescribeBrokers", pb.DescribeBrokersRequest()).brokers
    assert [row.id for row in found] == list(BROKERS)
    assert [(e.listener, e.host, e.port, e.protocol) for e in found[0].endpoints] == [
        ("CLIENT", "host-11", 9092, "PLAINTEXT")
    ]
    refusal = world.refused("DescribeBrokers", pb.DescribeBrokersRequest(brokers=[11, 44]))
    assert refusal.code is ErrorCode.BROKER_ID_NOT_REGISTERED
    refusal = world.refused("UnregisterBroker", pb.UnregisterBrokerRequest(broker=11))
    assert refusal.code is ErrorCode.INVALID_REQUEST
    refusal = world.refused("UnregisterBroker", pb.UnregisterBrokerRequest(broker=44, validate_only=True))
    assert refusal.code is ErrorCode.BROKER_ID_NOT_REGISTERED


def test_features_are_described_and_a_level_that_nobody_supports_is_refused(world: World) -> None:
    (found,) = world.ask("DescribeFeatures", pb.DescribeFeaturesRequest()).features
    assert (found.name, found.level) == ("metadata.version", 1)
    assert found.level_min <= found.level <= found.level_max

    def update(**fields: Any) -> list[str]:
        request = pb.UpdateFeaturesRequest(features=[pb.FeatureUpdate(**fields)])
        return names(world.ask("UpdateFeatures", request).features)

    assert update(name="metadata.version", level=99) == ["FEATURE_UPDATE_FAILED"]
    assert update(name="no.such", level=1) == ["FEATURE_UPDATE_FAILED"]
    assert update(name="metadata.version", level=1) == [""]
    assert update(name="metadata.version", level=1, kind=7) == ["INVALID_REQUEST"]


def test_log_directories_are_asked_of_their_broker(world: World) -> None:
    """These brokers have no logs; a broker without logs says so, and an unknown broker is named."""
    rows = world.ask("DescribeLogDirs", pb.DescribeLogDirsRequest(brokers=[12, 55])).brokers
    assert [row.broker for row in rows] == [12, 55]
    assert rows[1].error.name == "BROKER_ID_NOT_REGISTERED"
    item = pb.MovedReplica(topic="x", partition=0, directory_id=BROKER_DIRECTORY.bytes)
    refusal = world.refused("MoveReplicas", pb.MoveReplicasRequest(broker=55, replicas=[item]))
    assert refusal.code is ErrorCode.BROKER_ID_NOT_REGISTERED


def test_a_request_that_cannot_be_decoded_is_rejected(world: World) -> None:
    async def call(_: Any) -> Any:
        return await world.quorum.admin_transport.call(NodeId(11), "v1/Admin/CreateTopics", b"\xff" * 9, timeout_ms=500)

    with pytest.raises(RemoteError) as refusal:
        world.quorum.world.run(world.quorum.admin, call)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST


def test_text_over_the_limit_of_a_request_is_refused_at_any_node(world: World) -> None:
    request = pb.CreateTopicsRequest(topics=[pb.NewTopic(name="n" * 70_000)])
    for node in (world.quorum.active(), 11):
        assert world.refused("CreateTopics", request, node=node).code is ErrorCode.INVALID_REQUEST


def test_the_server_reports_a_missing_quorum_in_time() -> None:
    with ApiCluster(6, brokers=(11,)) as quorum:
        for node in sorted(quorum.controllers)[:2]:
            quorum.kill(node)
        request = pb.CreateTopicsRequest(topics=[pb.NewTopic(name="late")], timeout_ms=3_000)
        with pytest.raises(RemoteError) as refusal:
            quorum.api(11, "Admin", "CreateTopics", request)
        assert refusal.value.code in (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NETWORK_EXCEPTION)
        assert refusal.value.retriable


def test_a_change_reaches_the_next_active_controller_after_the_old_one_died() -> None:
    with ApiCluster(7, brokers=(11, 12)) as quorum:
        standby = next(node for node in quorum.controllers if node != quorum.active())
        quorum.kill(quorum.active())
        request = pb.CreateTopicsRequest(topics=[pb.NewTopic(name="after", replication_factor=2)])
        for number, node in enumerate((11, standby)):
            request.topics[0].name = f"after-{number}"
            (made,) = quorum.api(node, "Admin", "CreateTopics", request).topics
            assert not made.HasField("error"), made.error.message


def test_many_resources_are_described_without_a_quorum_in_about_a_second_and_marked_as_old() -> None:
    with ApiCluster(16, brokers=(11,)) as quorum:
        for node in sorted(quorum.controllers)[:2]:
            quorum.kill(node)
        quorum.world.run_for(5)
        resources = [pb.ConfigResource(type="topic", name=f"unknown-{number}") for number in range(20)]
        resources.append(pb.ConfigResource(type="cluster", name=""))
        began_s = quorum.now_s()
        answer = quorum.api(
            11, "Admin", "DescribeConfigs", pb.DescribeConfigsRequest(resources=resources, allow_stale=True)
        )
        assert quorum.now_s() - began_s < 2
        assert answer.stale_ms > 0
        assert {row.error.code for row in answer.resources[:20]} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION.value.code}
        assert answer.resources[-1].entries
