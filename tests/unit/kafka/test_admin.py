"""Log directories, features, brokers, quotas, access rules and what a client may do: against whole brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.rpc.kafka import acls, admin, cluster, dispatch, metadata, operations, security
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages.admin import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirTopic,
    ComponentData,
    DescribeClientQuotasRequest,
    FeatureUpdateKey,
    ListConfigResourcesRequest,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from tidelog.rpc.kafka.messages.cluster import DescribeLogDirsRequest
from tidelog.rpc.kafka.messages.metadata import (
    NO_OPERATIONS,
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsTopicRequest,
    MetadataRequest,
    MetadataRequestTopic,
)
from tidelog.rpc.kafka.messages.security import (
    AclCreation,
    CreateAclsRequest,
    DeleteAclsFilter,
    DeleteAclsRequest,
    DescribeAclsRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)
from tidelog.services.context import INTERNAL

BROKERS = (11, 12, 13)
HANDLERS = {**admin.HANDLERS, **security.HANDLERS, **acls.HANDLERS, **metadata.HANDLERS, **cluster.HANDLERS}
TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    """Each has two log directories; nobody is killed in it, and each test has topics of its own."""
    with KafkaCluster(81, HANDLERS, directories=2, brokers=BROKERS) as made:
        yield made


def code(row: Any) -> str:
    return {one.value.code: one.name for one in ErrorCode}[row.error_code] if row.error_code else ""


def place(brokers: KafkaCluster, name: str, *assignment: tuple[int, ...]) -> PartitionId:
    (made,) = brokers.ask(CreateTopics(topics=(NewTopic(name=name, assignment=assignment),))).topics
    assert made.error is None
    brokers.until_same()
    return PartitionId(TopicId(made.topic_id), 0)


def test_every_handler_is_in_the_table_of_a_broker() -> None:
    assert HANDLERS.keys() <= dispatch.handlers().keys()


# Users and access rules.


@pytest.mark.parametrize("version", range(2))
def test_sasl_handshake_is_answered_with_its_error(brokers: KafkaCluster, version: int) -> None:
    found = brokers.send(apis.SASL_HANDSHAKE, SaslHandshakeRequest(mechanism="SCRAM-SHA-256"), version=version)
    assert (code(found), found.mechanisms) == ("ILLEGAL_SASL_STATE", [])


@pytest.mark.parametrize("version", range(3))
def test_sasl_authenticate_is_answered_with_its_error(brokers: KafkaCluster, version: int) -> None:
    found = brokers.send(apis.SASL_AUTHENTICATE, SaslAuthenticateRequest(auth_bytes=b"n,,"), version=version)
    assert (code(found), found.auth_bytes) == ("ILLEGAL_SASL_STATE", b"")
    assert "PLAINTEXT" in found.error_message


@pytest.mark.parametrize("version", range(1, 4))
def test_access_rules_are_disabled(brokers: KafkaCluster, version: int) -> None:
    found = brokers.send(apis.DESCRIBE_ACLS, DescribeAclsRequest(), version=version)
    assert (code(found), found.resources) == ("SECURITY_DISABLED", [])
    made = brokers.send(apis.CREATE_ACLS, CreateAclsRequest(creations=[AclCreation()] * 3), version=version)
    assert [code(row) for row in made.results] == ["SECURITY_DISABLED"] * 3
    gone = brokers.send(apis.DELETE_ACLS, DeleteAclsRequest(filters=[DeleteAclsFilter()] * 2), version=version)
    assert [code(row) for row in gone.filter_results] == ["SECURITY_DISABLED"] * 2
    rows = [found, *made.results, *gone.filter_results]
    assert {"no authorizer" in row.error_message for row in rows} == {True}


def test_operations_are_returned_to_clients_that_ask(brokers: KafkaCluster) -> None:
    place(brokers, "allowed", (11,))
    topics = [MetadataRequestTopic(name="allowed"), MetadataRequestTopic(name="unknown")]
    for version in range(8, 14):
        for asks in (True, False, True):
            request = MetadataRequest(
                topics=topics,
                allow_auto_topic_creation=False,
                include_cluster_authorized_operations=asks,
                include_topic_authorized_operations=asks,
            )
            found = brokers.send(apis.METADATA, request, version=version)
            wanted = operations.TOPIC if asks else NO_OPERATIONS
            assert [row.topic_authorized_operations for row in found.topics] == [wanted, wanted]
            of_cluster = operations.CLUSTER if asks and version <= 10 else NO_OPERATIONS
            assert found.cluster_authorized_operations == of_cluster
    found = brokers.send(apis.DESCRIBE_CLUSTER, DescribeClusterRequest(include_cluster_authorized_operations=True))
    assert found.cluster_authorized_operations == operations.CLUSTER
    asked = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsTopicRequest(name="allowed")], response_partition_limit=10
    )
    (row,) = brokers.send(apis.DESCRIBE_TOPIC_PARTITIONS, asked).topics
    assert row.topic_authorized_operations == operations.TOPIC


def test_operations_have_the_bits_of_kafka() -> None:
    """As Kafka's `AclEntry.supportedOperations` gives them for each type of resource."""
    assert (operations.TOPIC, operations.GROUP, operations.CLUSTER) == (3576, 3400, 8096)


# Log directories.


def move(brokers: KafkaCluster, path: str, topic: str, *partitions: int, node: int = 11, version: int = 2) -> list[str]:
    one = AlterReplicaLogDir(path=path, topics=[AlterReplicaLogDirTopic(name=topic, partitions=list(partitions))])
    request = AlterReplicaLogDirsRequest(dirs=[one])
    (row,) = brokers.send(apis.ALTER_REPLICA_LOG_DIRS, request, node=node, version=version).results
    assert (row.topic_name, [each.partition_index for each in row.partitions]) == (topic, list(partitions))
    return [code(each) for each in row.partitions]


def where(brokers: KafkaCluster, topic: str, node: int = 11) -> dict[str, bool]:
    """The directories of a replica of partition 0, and whether it will be there only."""
    found = brokers.send(apis.DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(topics=None), node=node)
    return {
        result.log_dir: row.is_future_key
        for result in found.results
        for rows in result.topics
        if rows.name == topic
        for row in rows.partitions
        if row.partition_index == 0
    }


def until(brokers: KafkaCluster, condition: Callable[[], bool]) -> None:
    """One that asks a broker itself."""
    end_s = brokers.now_s() + 30
    while not condition():
        assert brokers.now_s() < end_s, "not in 30 s"
        brokers.world.run_for(0.05)


@pytest.mark.parametrize("version", [1, 2])
def test_replica_moves_to_the_directory_that_is_named(brokers: KafkaCluster, version: int) -> None:
    name = f"moved-{version}"
    place(brokers, name, (11, 12))
    until(brokers, lambda: len(where(brokers, name)) == 1)
    (home,) = where(brokers, name)
    directories = [directory.disk.label for directory in brokers.brokers[NodeId(11)].logs.directories]
    (other,) = [label for label in directories if label != home]
    assert move(brokers, home, name, 0, version=version) == [""], "it is there already"
    assert move(brokers, other, name, 0, version=version) == [""]
    until(brokers, lambda: where(brokers, name) == {other: False})
    assert move(brokers, home, name, 0, version=version) == [""], "and back, as a rollback does"
    until(brokers, lambda: where(brokers, name) == {home: False})


def test_copy_under_way_is_the_future_replica_and_ends_when_it_is_sent_back(brokers: KafkaCluster) -> None:
    place(brokers, "future", (11,))
    until(brokers, lambda: len(where(brokers, "future")) == 1)
    (home,) = where(brokers, "future")
    broker = brokers.brokers[NodeId(11)]
    (other,) = [one.disk.label for one in broker.logs.directories if one.disk.label != home]
    log_dirs = brokers.services[11].log_dirs

    async def both(_: object) -> dict[str, bool]:
        await log_dirs.begin_move(INTERNAL, "future", 0, other)
        context = brokers.services[11]
        while not broker.replicas.moves.in_progress:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        found = await context.data.log_directories.describe()
        await log_dirs.begin_move(INTERNAL, "future", 0, home)
        return {one.path: row.is_future for one in found for row in one.replicas if row.topic == "future"}

    seen = brokers.world.run(broker.node, both, timeout=20)
    assert seen == {home: False, other: True}
    brokers.world.run_until(lambda: not log_dirs._moves, timeout=20)
    assert where(brokers, "future") == {home: False}


def test_move_that_cannot_be_says_why(brokers: KafkaCluster) -> None:
    place(brokers, "kept", (12,))
    labels = [directory.disk.label for directory in brokers.brokers[NodeId(11)].logs.directories]
    assert move(brokers, "/nowhere", "kept", 0, node=12) == ["LOG_DIR_NOT_FOUND"]
    assert move(brokers, labels[0], "kept", 0, 7, node=11) == ["REPLICA_NOT_AVAILABLE", "UNKNOWN_TOPIC_OR_PARTITION"]
    assert move(brokers, labels[0], "nobody", 0) == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert brokers.send(apis.ALTER_REPLICA_LOG_DIRS, AlterReplicaLogDirsRequest()).results == []


# Features and brokers.


def test_features_are_updated_as_far_as_they_can_be(brokers: KafkaCluster) -> None:
    def update(version: int, *changes: tuple[str, int, int], **more: Any) -> Any:
        rows = [
            FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=kind) for name, level, kind in changes
        ]
        return brokers.send(apis.UPDATE_FEATURES, UpdateFeaturesRequest(feature_updates=rows, **more), version=version)

    upgrade, safe = 1, 2
    same = update(1, ("metadata.version", 1, upgrade), ("group.version", 1, upgrade), validate_only=True)
    assert (code(same), {row.feature: code(row) for row in same.results}) == (
        "",
        {"metadata.version": "", "group.version": ""},
    )
    wrong = update(1, ("metadata.version", 99, upgrade), ("group.version", 0, safe), ("odd", 1, upgrade))
    failed = "FEATURE_UPDATE_FAILED"
    assert {row.feature: code(row) for row in wrong.results} == {
        "metadata.version": failed,
        "group.version": failed,
        "odd": failed,
    }
    newest = update(2, ("group.version", 0, safe))
    assert code(newest) == failed
    assert "group.version" in newest.error_message
    assert code(update(0, ("metadata.version", 1, upgrade))) == ""
    assert code(update(2)) == ""


def test_broker_is_unregistered_unless_it_is_needed() -> None:
    with KafkaCluster(83, HANDLERS, brokers=(11, 12)) as brokers:
        place(brokers, "held", (12,))
        unknown = brokers.send(apis.UNREGISTER_BROKER, UnregisterBrokerRequest(broker_id=99))
        assert code(unknown) == "BROKER_ID_NOT_REGISTERED"
        needed = brokers.send(apis.UNREGISTER_BROKER, UnregisterBrokerRequest(broker_id=12))
        assert needed.error_code
        assert "12" in needed.error_message
        assert 12 in brokers.image().brokers


def test_quotas_and_resources_with_settings_are_listed(brokers: KafkaCluster) -> None:
    place(brokers, "set", (11,))
    asked = DescribeClientQuotasRequest(components=[ComponentData(entity_type="user", match_type=2, match=None)])
    for version in range(2):
        found = brokers.send(apis.DESCRIBE_CLIENT_QUOTAS, asked, version=version)
        assert (found.error_code, found.error_message, found.entries) == (0, None, [])

    def listed(*types: int, version: int = 1) -> set[tuple[int, str]]:
        request = ListConfigResourcesRequest(resource_types=list(types))
        found = brokers.send(apis.LIST_CONFIG_RESOURCES, request, version=version)
        assert found.error_code == 0
        return {(row.resource_type, row.resource_name) for row in found.config_resources}

    topics = {(TOPIC, name) for name in brokers.image().topic_ids}
    nodes = {(BROKER, str(number)) for number in BROKERS}
    assert listed() == topics | nodes
    assert (listed(TOPIC), listed(BROKER)) == (topics, nodes)
    assert listed(GROUP, CLIENT_METRICS, BROKER_LOGGER) == listed(version=0) == set()
    odd = brokers.send(apis.LIST_CONFIG_RESOURCES, ListConfigResourcesRequest(resource_types=[99]))
    assert code(odd) == "UNSUPPORTED_VERSION"
