"""Metadata, DescribeCluster and DescribeTopicPartitions against whole brokers, in every version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.metadata.config_changes import SET, AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import NodeId
from tidelog.rpc.kafka import metadata
from tidelog.rpc.kafka.messages import DESCRIBE_CLUSTER, DESCRIBE_TOPIC_PARTITIONS, METADATA
from tidelog.rpc.kafka.messages.metadata import (
    NO_OPERATIONS,
    Cursor,
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsTopicRequest,
    MetadataRequest,
    MetadataRequestTopic,
)

BROKERS = (11, 12, 13)
E = ErrorCode


def names(*topics: str) -> list[MetadataRequestTopic]:
    return [MetadataRequestTopic(name=topic) for topic in topics]


def ids(*topics: UUID) -> list[MetadataRequestTopic]:
    return [MetadataRequestTopic(name=None, topic_id=topic.bytes) for topic in topics]


def topic_errors(response: Any) -> list[tuple[str | None, int]]:
    return [(topic.name, topic.error_code) for topic in response.topics]


def configure(cluster: KafkaCluster, **settings: str) -> None:
    changes = [ConfigChange(key=k.replace("_", "."), operation=SET, value=v) for k, v in settings.items()]
    change = ResourceChange(resource_type="cluster", changes=tuple(changes))
    (outcome,) = cluster.ask(AlterConfigs(resources=(change,))).items
    assert outcome.error is None, outcome.message
    cluster.until_same()


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    """Nobody is killed in it; each test has topics of its own."""
    with KafkaCluster(31, metadata.HANDLERS, brokers=()) as made:
        made.start_brokers(*BROKERS, rack="r1")
        made.create("orders", partitions=3, replication_factor=3)
        made.until_same()
        yield made


# Metadata.


@pytest.mark.requirement("a:C-05", "a:C-04")
@pytest.mark.parametrize("version", range(14))
def test_metadata_tells_brokers_leaders_replicas_and_epochs_in_every_version(
    cluster: KafkaCluster, version: int
) -> None:
    found = cluster.send(METADATA, MetadataRequest(topics=names("orders")), version=version, node=12)
    assert [(b.node_id, b.host, b.port) for b in found.brokers] == [(n, f"host-{n}", 9092) for n in BROKERS]
    (topic,) = found.topics
    assert (topic.error_code, topic.name, topic.is_internal) == (0, "orders", False)
    known = cluster.image(12).topic_named("orders")
    assert [row.partition_index for row in topic.partitions] == [0, 1, 2]
    for row in topic.partitions:
        partition = known.partitions[row.partition_index]
        assert (row.error_code, row.leader_id) == (0, partition.leader)
        assert tuple(row.replica_nodes) == partition.replicas
        assert tuple(row.isr_nodes) == partition.isr
        assert row.leader_epoch == (partition.leader_epoch if version >= 7 else -1)
        assert row.offline_replicas == []
    assert topic.topic_id == (known.topic_id.bytes if version >= 10 else bytes(16))
    assert topic.topic_authorized_operations == NO_OPERATIONS
    if version >= 1:
        assert (found.controller_id, {b.rack for b in found.brokers}) == (11, {"r1"})
    if version >= 2:
        assert found.cluster_id == "cluster"


@pytest.mark.requirement("a:C-05")
def test_any_broker_answers_the_same(cluster: KafkaCluster) -> None:
    found = [cluster.send(METADATA, MetadataRequest(topics=names("orders")), node=node) for node in BROKERS]
    assert found[0] == found[1] == found[2]


def test_null_is_all_topics_and_empty_is_none_but_in_the_first_version(cluster: KafkaCluster) -> None:
    everything = sorted(cluster.image().topic_ids)
    for version in range(1, 14):
        found = cluster.send(METADATA, MetadataRequest(topics=None), version=version)
        assert sorted(topic.name for topic in found.topics) == everything
        assert cluster.send(METADATA, MetadataRequest(topics=[]), version=version).topics == []
    found = cluster.send(METADATA, MetadataRequest(topics=[]), version=0)
    assert sorted(topic.name for topic in found.topics) == everything


def test_a_name_that_no_topic_has_says_whether_one_could(cluster: KafkaCluster) -> None:
    wanted = ["nobody", "", "..", "no spaces", "x" * 250, "__consumer_offsets", "__cluster_metadata"]
    found = cluster.send(METADATA, MetadataRequest(topics=names(*wanted), allow_auto_topic_creation=False))
    unknown, invalid = E.UNKNOWN_TOPIC_OR_PARTITION.value.code, E.INVALID_TOPIC.value.code
    assert topic_errors(found) == [
        ("nobody", unknown),
        *((name, invalid) for name in wanted[1:5]),
        ("__consumer_offsets", unknown),
        ("__cluster_metadata", unknown),
    ]
    assert [topic.is_internal for topic in found.topics] == [False] * 5 + [True, False]
    assert all(topic.partitions == [] for topic in found.topics)


def test_topics_are_found_by_id_from_version_12_on(cluster: KafkaCluster) -> None:
    topic_id = cluster.image().topic_ids["orders"]
    wanted = [*ids(topic_id, UUID(int=5)), *names("orders", "orders")]
    for version in (12, 13):
        found = cluster.send(METADATA, MetadataRequest(topics=wanted), version=version)
        assert topic_errors(found) == [("orders", 0), (None, E.UNKNOWN_TOPIC_ID.value.code)], "each topic once"
        assert found.topics[1].topic_id == UUID(int=5).bytes
    for version in (10, 11):
        found = cluster.send(METADATA, MetadataRequest(topics=[*ids(topic_id), *names("orders")]), version=version)
        assert topic_errors(found) == [("", E.INVALID_REQUEST.value.code), ("orders", 0)]


def test_a_topic_is_returned_once_however_often_it_is_named(cluster: KafkaCluster) -> None:
    found = cluster.send(METADATA, MetadataRequest(topics=names(*["orders", "nobody"] * 50)), version=9)
    assert [name for name, _ in topic_errors(found)] == ["orders", "nobody"]


@pytest.mark.requirement("a:A-27")
def test_unknown_topics_are_created_if_the_request_and_the_cluster_allow_it() -> None:
    unknown, invalid = E.UNKNOWN_TOPIC_OR_PARTITION.value.code, E.INVALID_TOPIC.value.code
    with KafkaCluster(32, metadata.HANDLERS, brokers=(11, 12)) as cluster:
        assert topic_errors(cluster.send(METADATA, MetadataRequest(topics=names("one")))) == [("one", unknown)]
        configure(cluster, auto_create_topics_enable="true", num_partitions="2", default_replication_factor="2")
        asked = MetadataRequest(topics=names("one"), allow_auto_topic_creation=False)
        assert topic_errors(cluster.send(METADATA, asked)) == [("one", unknown)]
        found = cluster.send(METADATA, MetadataRequest(topics=names("one", "not this", "__consumer_offsets")))
        assert topic_errors(found) == [("one", 0), ("not this", invalid), ("__consumer_offsets", unknown)]
        assert [sorted(row.replica_nodes) for row in found.topics[0].partitions] == [[11, 12], [11, 12]]
        old = cluster.send(METADATA, MetadataRequest(topics=names("two"), allow_auto_topic_creation=True), version=3)
        assert topic_errors(old) == [("two", 0)], "older clients cannot say that they do not want it"
        cluster.send(METADATA, MetadataRequest(topics=ids(UUID(int=9))))
        assert sorted(cluster.image().topic_ids) == ["one", "two"]


def test_without_a_controller_a_topic_is_not_created_yet() -> None:
    with KafkaCluster(33, metadata.HANDLERS, brokers=(11,)) as cluster:
        configure(cluster, auto_create_topics_enable="true", default_replication_factor="1")
        for node in list(cluster.controllers):
            cluster.kill(node)
        found = cluster.send(METADATA, MetadataRequest(topics=names("later")))
        assert topic_errors(found) == [("later", E.LEADER_NOT_AVAILABLE.value.code)]
        assert found.controller_id == 11, "this broker hands admin calls on as soon as there is a controller"


def test_dead_brokers_offline_replicas_and_partitions_without_a_leader() -> None:
    with KafkaCluster(34, metadata.HANDLERS, brokers=BROKERS) as cluster:
        cluster.ask(
            CreateTopics(
                topics=(NewTopic(name="t", assignment=((11, 12), (12, 13))), NewTopic(name="lost", assignment=((11,),)))
            )
        )
        cluster.until_same()
        before = cluster.send(METADATA, MetadataRequest(topics=None), node=12)
        assert all(row.offline_replicas == [] for topic in before.topics for row in topic.partitions)
        cluster.kill(NodeId(11))
        cluster.world.run_until(lambda: all(cluster.image(n).brokers[11].fenced for n in (12, 13)), timeout=10)
        found = cluster.send(METADATA, MetadataRequest(topics=names("t", "lost")), node=12)
        assert ([broker.node_id for broker in found.brokers], found.controller_id) == ([12, 13], 12)
        first, second = found.topics[0].partitions
        assert (first.error_code, first.leader_id, first.isr_nodes, first.offline_replicas) == (0, 12, [12], [11])
        assert (second.error_code, second.offline_replicas) == (0, [])
        assert first.leader_epoch > before.topics[[t.name for t in before.topics].index("t")].partitions[0].leader_epoch
        (lost,) = found.topics[1].partitions
        assert (lost.error_code, lost.leader_id, lost.replica_nodes, lost.offline_replicas) == (
            E.LEADER_NOT_AVAILABLE.value.code,
            -1,
            [11],
            [11],
        )
        assert found.topics[1].error_code == 0


@pytest.mark.requirement("a:G-09")
def test_endpoints_are_those_of_the_listener_that_the_client_came_through() -> None:
    both = (("CLIENT", "PLAINTEXT", "inside", 1), ("OUTSIDE", "PLAINTEXT", "outside.example", 2))
    with KafkaCluster(35, metadata.HANDLERS, brokers=(11,)) as cluster:
        cluster.start_brokers(12, endpoints=both)
        cluster.ask(CreateTopics(topics=(NewTopic(name="t", assignment=((11, 12), (12, 11))),)))
        cluster.until_same()
        inside = cluster.send(METADATA, MetadataRequest(topics=names("t")))
        assert [(b.node_id, b.host, b.port) for b in inside.brokers] == [(11, "host-11", 9092), (12, "inside", 1)]
        listener_not_found, not_available = E.LISTENER_NOT_FOUND.value.code, E.LEADER_NOT_AVAILABLE.value.code
        for version, code in ((13, listener_not_found), (6, listener_not_found), (5, not_available)):
            found = cluster.send(METADATA, MetadataRequest(topics=names("t")), version=version, listener="OUTSIDE")
            assert [(b.node_id, b.host, b.port) for b in found.brokers] == [(12, "outside.example", 2)]
            assert found.controller_id == 12
            rows = found.topics[0].partitions
            assert [(row.error_code, row.leader_id) for row in rows] == [(code, -1), (0, 12)]
            assert [row.offline_replicas for row in rows] == [[11], [11]]
        again = cluster.send(METADATA, MetadataRequest(topics=names("t")))
        assert again == inside, "rows are remembered for each listener"


def test_what_is_remembered_follows_every_change() -> None:
    with KafkaCluster(36, metadata.HANDLERS, brokers=(11, 12)) as cluster:
        cluster.create("t", partitions=1, replication_factor=2)
        cluster.until_same()

        def rows(version: int = 12) -> Any:
            return cluster.send(METADATA, MetadataRequest(topics=names("t")), version=version, node=11).topics[0]

        first = rows()
        assert rows() == first
        assert len(rows(4).partitions) == 1
        assert rows() == first, "another version has rows of its own"
        cluster.kill(NodeId(12))
        cluster.world.run_until(lambda: cluster.image().brokers[12].fenced, timeout=10)
        assert rows().partitions[0].offline_replicas == [12]
        cluster.start_brokers(12)
        cluster.world.run_until(lambda: len(cluster.image().topic_named("t").partitions[0].isr) == 2, timeout=20)
        assert rows().partitions[0].offline_replicas == []
        assert sorted(rows().partitions[0].isr_nodes) == [11, 12]


# DescribeCluster.


def test_the_cluster_is_described_with_fenced_brokers_if_they_are_asked_for() -> None:
    with KafkaCluster(37, metadata.HANDLERS, brokers=()) as cluster:
        cluster.start_brokers(11, 12, rack="r")
        cluster.kill(NodeId(11))
        cluster.world.run_until(lambda: cluster.image(12).brokers[11].fenced, timeout=10)
        for version in range(3):
            found = cluster.send(DESCRIBE_CLUSTER, DescribeClusterRequest(), version=version, node=12)
            assert (found.error_code, found.cluster_id, found.controller_id) == (0, "cluster", 12)
            assert [(b.broker_id, b.host, b.port, b.rack) for b in found.brokers] == [(12, "host-12", 9092, "r")]
            assert found.cluster_authorized_operations == NO_OPERATIONS
        found = cluster.send(DESCRIBE_CLUSTER, DescribeClusterRequest(include_fenced_brokers=True), node=12)
        assert [(b.broker_id, b.is_fenced) for b in found.brokers] == [(11, True), (12, False)]


def test_controllers_are_not_described_by_a_broker(cluster: KafkaCluster) -> None:
    for kind, error in ((2, E.MISMATCHED_ENDPOINT_TYPE), (7, E.UNSUPPORTED_ENDPOINT_TYPE)):
        found = cluster.send(DESCRIBE_CLUSTER, DescribeClusterRequest(endpoint_type=kind))
        assert (found.error_code, found.endpoint_type, found.brokers) == (error.value.code, kind, [])
        assert found.error_message


# DescribeTopicPartitions.


def wanted(*topics: str, limit: int = 2000, cursor: tuple[str, int] | None = None) -> DescribeTopicPartitionsRequest:
    return DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsTopicRequest(name=topic) for topic in topics],
        response_partition_limit=limit,
        cursor=None if cursor is None else Cursor(topic_name=cursor[0], partition_index=cursor[1]),
    )


def pages(cluster: KafkaCluster, request: DescribeTopicPartitionsRequest) -> list[list[tuple[str, int, list[int]]]]:
    """What each answer tells, until there is no cursor."""
    found = []
    for _ in range(20):
        page = cluster.send(DESCRIBE_TOPIC_PARTITIONS, request)
        found.append([(t.name, t.error_code, [row.partition_index for row in t.partitions]) for t in page.topics])
        if page.next_cursor is None:
            return found
        request.cursor = page.next_cursor
    raise AssertionError("the cursor never ends")


def test_partitions_are_described_page_by_page() -> None:
    unknown = E.UNKNOWN_TOPIC_OR_PARTITION.value.code
    with KafkaCluster(38, metadata.HANDLERS, brokers=(11,)) as cluster:
        for name, count in (("b", 5), ("a", 2), ("c", 1)):
            cluster.create(name, partitions=count, replication_factor=1)
        cluster.until_same()
        assert pages(cluster, wanted()) == [[("a", 0, [0, 1]), ("b", 0, [0, 1, 2, 3, 4]), ("c", 0, [0])]]
        assert pages(cluster, wanted(limit=3)) == [
            [("a", 0, [0, 1]), ("b", 0, [0])],
            [("b", 0, [1, 2, 3])],
            [("b", 0, [4]), ("c", 0, [0])],
        ]
        assert pages(cluster, wanted(limit=2)) == [
            [("a", 0, [0, 1])],
            [("b", 0, [0, 1])],
            [("b", 0, [2, 3])],
            [("b", 0, [4]), ("c", 0, [0])],
        ]
        assert pages(cluster, wanted(limit=0))[0] == [("a", 0, [0])], "an answer goes on by one at least"
        assert pages(cluster, wanted("c", "nobody", "a", "a")) == [
            [("a", 0, [0, 1]), ("c", 0, [0]), ("nobody", unknown, [])]
        ]
        assert pages(cluster, wanted(cursor=("b", 3))) == [[("b", 0, [3, 4]), ("c", 0, [0])]]
        assert pages(cluster, wanted(cursor=("bb", 0))) == [[("c", 0, [0])]], "the topic of the cursor is gone"
        assert pages(cluster, wanted(cursor=("b", 99))) == [[("b", 0, []), ("c", 0, [0])]]


def test_a_cursor_that_cannot_be_is_refused_in_every_row(cluster: KafkaCluster) -> None:
    invalid = E.INVALID_REQUEST.value.code
    assert pages(cluster, wanted("orders", cursor=("other", 0))) == [[("orders", invalid, [])]]
    assert pages(cluster, wanted(cursor=("orders", -1))) == [[("orders", invalid, [])]]
    assert pages(cluster, wanted("bad name")) == [[("bad name", E.INVALID_TOPIC.value.code, [])]]


def test_described_partitions_have_eligible_leaders() -> None:
    with KafkaCluster(39, metadata.HANDLERS, brokers=(11, 12, 13)) as cluster:
        made = cluster.create("t", partitions=1, replication_factor=3)
        cluster.until_same()
        (row,) = cluster.send(DESCRIBE_TOPIC_PARTITIONS, wanted("t")).topics[0].partitions
        assert (sorted(row.isr_nodes), row.eligible_leader_replicas, row.last_known_elr) == ([11, 12, 13], [], [])
        for broker in (13, 12):
            cluster.kill(NodeId(broker))
            cluster.world.run_until(lambda gone=broker: cluster.image().brokers[gone].fenced, timeout=10)  # type: ignore[misc]
        found = cluster.send(DESCRIBE_TOPIC_PARTITIONS, wanted("t")).topics[0]
        (row,) = found.partitions
        known = cluster.image().topic_named("t").partitions[0]
        assert (found.topic_id, row.error_code, row.leader_id) == (made.topic_id.bytes, 0, 11)
        assert (row.isr_nodes, row.eligible_leader_replicas) == ([11], list(known.eligible))
        assert row.eligible_leader_replicas
        assert sorted(row.offline_replicas) == [12, 13]
