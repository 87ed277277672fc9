"""Where things are: Metadata, FindCoordinator, DescribeCluster, DescribeTopicPartitions."""

from __future__ import annotations

from tidelog.rpc.kafka.schema import (
    array,
    boolean,
    int8,
    int16,
    int32,
    int32_array,
    message,
    nested_or_null,
    response_to,
    string,
    string_array,
    struct,
    uuid,
)

NO_OPERATIONS = -(1 << 31)
"""In the place of authorized operations: they were not asked for."""


@struct
class MetadataRequestTopic:
    topic_id: bytes = uuid(since=10)
    name: str | None = string(nullable_since=10)


# librdkafka asks for all topics with a count of 4 bytes where one byte is meant: 3 are left over.
@message(key=3, versions=(0, 13), flexible_since=9, slack=3)
class MetadataRequest:
    """Null topics are all of them; up to version 0 none are all."""

    topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable_since=1)
    allow_auto_topic_creation: bool = boolean(since=4, default=True)
    include_cluster_authorized_operations: bool = boolean(since=8, until=10)
    include_topic_authorized_operations: bool = boolean(since=8)


@struct
class MetadataResponseBroker:
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(since=1, nullable_since=1, default=None)


@struct
class MetadataResponsePartition:
    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32(since=7, default=-1)
    replica_nodes: list[int] = int32_array()
    isr_nodes: list[int] = int32_array()
    offline_replicas: list[int] = int32_array(since=5)


@struct
class MetadataResponseTopic:
    error_code: int = int16()
    name: str | None = string(nullable_since=12)
    topic_id: bytes = uuid(since=10)
    is_internal: bool = boolean(since=1)
    partitions: list[MetadataResponsePartition] = array(MetadataResponsePartition, large=True)
    topic_authorized_operations: int = int32(since=8, default=NO_OPERATIONS)


@response_to(MetadataRequest)
class MetadataResponse:
    throttle_time_ms: int = int32(since=3)
    brokers: list[MetadataResponseBroker] = array(MetadataResponseBroker)
    cluster_id: str | None = string(since=2, nullable_since=2, default=None)
    controller_id: int = int32(since=1, default=-1)
    topics: list[MetadataResponseTopic] = array(MetadataResponseTopic, large=True)
    cluster_authorized_operations: int = int32(since=8, until=10, default=NO_OPERATIONS)
    error_code: int = int16(since=13)


@message(key=10, versions=(0, 6), flexible_since=3)
class FindCoordinatorRequest:
    """`key_type`: 0 group, 1 transaction, 2 share group (version 6)."""

    key: str = string(until=3)
    key_type: int = int8(since=1)
    coordinator_keys: list[str] = string_array(since=4)


@struct
class Coordinator:
    key: str = string()
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=4)


@response_to(FindCoordinatorRequest)
class FindCoordinatorResponse:
    throttle_time_ms: int = int32(since=1)
    error_code: int = int16(until=3)
    error_message: str | None = string(since=1, until=3, nullable_since=1)
    node_id: int = int32(until=3)
    host: str = string(until=3)
    port: int = int32(until=3)
    coordinators: list[Coordinator] = array(Coordinator, since=4)


@message(key=60, versions=(0, 2), flexible_since=0)
class DescribeClusterRequest:
    """`endpoint_type`: 1 brokers, 2 controllers."""

    include_cluster_authorized_operations: bool = boolean()
    endpoint_type: int = int8(since=1, default=1)
    include_fenced_brokers: bool = boolean(since=2)


@struct
class DescribeClusterBroker:
    broker_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable_since=0, default=None)
    is_fenced: bool = boolean(since=2)


@response_to(DescribeClusterRequest)
class DescribeClusterResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0, default=None)
    endpoint_type: int = int8(since=1, default=1)
    cluster_id: str = string()
    controller_id: int = int32(default=-1)
    brokers: list[DescribeClusterBroker] = array(DescribeClusterBroker)
    cluster_authorized_operations: int = int32(default=NO_OPERATIONS)


@struct
class DescribeTopicPartitionsTopicRequest:
    name: str = string()


@struct
class Cursor:
    """Where the next answer goes on: this partition is its first."""

    topic_name: str = string()
    partition_index: int = int32()


@message(key=75, versions=(0, 0), flexible_since=0)
class DescribeTopicPartitionsRequest:
    topics: list[DescribeTopicPartitionsTopicRequest] = array(DescribeTopicPartitionsTopicRequest)
    response_partition_limit: int = int32(default=2000)
    cursor: Cursor | None = nested_or_null(Cursor)


@struct
class DescribeTopicPartitionsResponsePartition:
    error_code: int = int16()
    partition_index: int = int32()
    leader_id: int = int32()
    leader_epoch: int = int32(default=-1)
    replica_nodes: list[int] = int32_array()
    isr_nodes: list[int] = int32_array()
    eligible_leader_replicas: list[int] | None = int32_array(nullable_since=0, default=None)
    last_known_elr: list[int] | None = int32_array(nullable_since=0, default=None)
    offline_replicas: list[int] = int32_array()


@struct
class DescribeTopicPartitionsResponseTopic:
    error_code: int = int16()
    name: str | None = string(nullable_since=0)
    topic_id: bytes = uuid()
    is_internal: bool = boolean()
    partitions: list[DescribeTopicPartitionsResponsePartition] = array(
        DescribeTopicPartitionsResponsePartition, large=True
    )
    topic_authorized_operations: int = int32(default=NO_OPERATIONS)


@response_to(DescribeTopicPartitionsRequest)
class DescribeTopicPartitionsResponse:
    throttle_time_ms: int = int32()
    topics: list[DescribeTopicPartitionsResponseTopic] = array(DescribeTopicPartitionsResponseTopic, large=True)
    next_cursor: Cursor | None = nested_or_null(Cursor)
