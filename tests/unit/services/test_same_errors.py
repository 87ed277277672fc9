"""A request that is wrong gets the same error and the same message through the gRPC API and the Kafka API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.kafka.cluster import KafkaCluster

from tidelog.rpc.kafka import cluster, configs, metadata, topics
from tidelog.rpc.kafka.messages import (
    ALTER_PARTITION_REASSIGNMENTS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    ELECT_LEADERS,
    INCREMENTAL_ALTER_CONFIGS,
    METADATA,
)
from tidelog.rpc.kafka.messages import cluster as kafka_cluster_messages
from tidelog.rpc.kafka.messages import configs as kafka_configs
from tidelog.rpc.kafka.messages import topics as kafka_topics
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import cluster_pb2
from tidelog.rpc.v1.common_pb2 import TopicPartition

BROKERS = (11, 12)
BAD_NAME = "no topic/name"


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    handlers = topics.HANDLERS | configs.HANDLERS | cluster.HANDLERS | metadata.HANDLERS
    with KafkaCluster(77, handlers, brokers=BROKERS) as made:
        created = made.send(CREATE_TOPICS, kafka_topics.CreateTopicsRequest(topics=[_topic("orders", 3)]))
        assert created.topics[0].error_code == 0
        yield made


def _topic(name: str, partitions: int, **values: str) -> kafka_topics.CreatableTopic:
    settings = [kafka_topics.CreatableTopicConfig(name=key, value=value) for key, value in values.items()]
    return kafka_topics.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1, configs=settings)


def _of_grpc(error: Any) -> tuple[int, str]:
    return error.code, error.message


def _of_kafka(row: Any) -> tuple[int, str]:
    return row.error_code, row.error_message


@pytest.mark.parametrize(
    ("name", "partitions", "values"),
    [
        (BAD_NAME, 1, {}),
        ("", 1, {}),
        ("x" * 250, 1, {}),
        ("orders", 1, {}),
        ("new", 0, {}),
        ("new", 1_000_000, {}),
        ("new", 1, {"retention.ms": "soon"}),
        ("new", 1, {"no.such.key": "1"}),
    ],
)
def test_creation_of_a_topic(brokers: KafkaCluster, name: str, partitions: int, values: dict[str, str]) -> None:
    pairs = [pb.ConfigPair(key=key, value=value) for key, value in values.items()]
    new = pb.NewTopic(name=name, partitions=partitions, replication_factor=1, configs=pairs)
    by_grpc = brokers.api(11, "Admin", "CreateTopics", pb.CreateTopicsRequest(topics=[new])).topics[0].error
    request = kafka_topics.CreateTopicsRequest(topics=[_topic(name, partitions, **values)])
    by_kafka = brokers.send(CREATE_TOPICS, request).topics[0]
    assert _of_grpc(by_grpc) == _of_kafka(by_kafka)
    assert by_kafka.error_code != 0


def test_deletion_of_an_unknown_topic(brokers: KafkaCluster) -> None:
    by_grpc = brokers.api(11, "Admin", "DeleteTopics", pb.DeleteTopicsRequest(topics=["none"])).topics[0].error
    request = kafka_topics.DeleteTopicsRequest(topics=[kafka_topics.DeleteTopicState(name="none")])
    assert _of_grpc(by_grpc) == _of_kafka(brokers.send(DELETE_TOPICS, request).responses[0])


@pytest.mark.parametrize(("name", "total"), [("orders", 2), ("orders", 0), ("none", 5)])
def test_new_partitions(brokers: KafkaCluster, name: str, total: int) -> None:
    add = pb.AddPartitionsRequest(topics=[pb.MorePartitions(topic=name, total=total)])
    by_grpc = brokers.api(11, "Admin", "AddPartitions", add).topics[0].error
    row = kafka_topics.CreatePartitionsTopic(name=name, count=total)
    by_kafka = brokers.send(CREATE_PARTITIONS, kafka_topics.CreatePartitionsRequest(topics=[row])).results[0]
    assert _of_grpc(by_grpc) == _of_kafka(by_kafka)
    assert by_kafka.error_code != 0


@pytest.mark.parametrize(("name", "key", "value"), [("none", "retention.ms", "1"), ("orders", "retention.ms", "soon")])
def test_change_of_a_config(brokers: KafkaCluster, name: str, key: str, value: str) -> None:
    change = pb.ConfigChange(key=key, operation=pb.ConfigChange.SET, value=value)
    resource = pb.ConfigResource(type="topic", name=name)
    alter = pb.AlterConfigsRequest(resources=[pb.AlteredConfig(resource=resource, changes=[change])])
    by_grpc = brokers.api(11, "Admin", "AlterConfigs", alter).resources[0].error
    row = kafka_configs.IncrementalAlterConfigsResource(
        resource_type=configs.TOPIC,
        resource_name=name,
        configs=[kafka_configs.IncrementalAlterableConfig(name=key, config_operation=0, value=value)],
    )
    request = kafka_configs.IncrementalAlterConfigsRequest(resources=[row])
    by_kafka = brokers.send(INCREMENTAL_ALTER_CONFIGS, request).responses[0]
    assert _of_grpc(by_grpc) == _of_kafka(by_kafka)
    assert by_kafka.error_code != 0


def test_description_of_configs_of_an_unknown_topic(brokers: KafkaCluster) -> None:
    describe = pb.DescribeConfigsRequest(resources=[pb.ConfigResource(type="topic", name="none")])
    by_grpc = brokers.api(11, "Admin", "DescribeConfigs", describe).resources[0].error
    row = kafka_configs.DescribeConfigsResource(resource_type=configs.TOPIC, resource_name="none")
    request = kafka_configs.DescribeConfigsRequest(resources=[row])
    assert _of_grpc(by_grpc) == _of_kafka(brokers.send(DESCRIBE_CONFIGS, request).results[0])


@pytest.mark.parametrize(("name", "partition"), [("none", 0), ("orders", 7)])
def test_election_and_reassignment_of_an_unknown_partition(brokers: KafkaCluster, name: str, partition: int) -> None:
    elect = pb.ElectLeadersRequest(partitions=[TopicPartition(topic=name, partition=partition)])
    by_grpc = brokers.api(11, "Admin", "ElectLeaders", elect).partitions[0].error
    named = kafka_cluster_messages.ElectLeadersTopicPartitions(topic=name, partitions=[partition])
    request = kafka_cluster_messages.ElectLeadersRequest(election_type=0, topic_partitions=[named], timeout_ms=5_000)
    (result,) = brokers.send(ELECT_LEADERS, request).replica_election_results
    assert _of_grpc(by_grpc) == _of_kafka(result.partition_result[0])

    alter = pb.AlterReassignmentsRequest(partitions=[pb.Reassignment(topic=name, partition=partition, replicas=[11])])
    by_grpc = brokers.api(11, "Admin", "AlterReassignments", alter).partitions[0].error
    moved = kafka_cluster_messages.ReassignablePartition(partition_index=partition, replicas=[11])
    row = kafka_cluster_messages.ReassignableTopic(name=name, partitions=[moved])
    moving = kafka_cluster_messages.AlterPartitionReassignmentsRequest(topics=[row], timeout_ms=5_000)
    (topic,) = brokers.send(ALTER_PARTITION_REASSIGNMENTS, moving).responses
    assert _of_grpc(by_grpc) == _of_kafka(topic.partitions[0])


@pytest.mark.parametrize("may_create", [True, False])
@pytest.mark.parametrize("name", [BAD_NAME, "x" * 250, "__cluster_metadata"])
def test_metadata_of_a_topic_that_cannot_be(brokers: KafkaCluster, name: str, may_create: bool) -> None:
    asked = cluster_pb2.MetadataRequest(topics=[name], may_create=may_create)
    by_grpc = brokers.api(11, "Cluster", "Metadata", asked).topics[0].error
    request = MetadataRequest(topics=[MetadataRequestTopic(name=name)], allow_auto_topic_creation=may_create)
    assert by_grpc.code == brokers.send(METADATA, request).topics[0].error_code != 0
