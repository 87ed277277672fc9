"""Metadata, FindCoordinator, DescribeCluster, DescribeTopicPartitions."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s

NO_OPERATIONS = -(1 << 31)
"""Authorized operations that the client did not request."""


@s.struct
class MetadataRequestTopic:
    topic_id: bytes = s.uuid(since=10)
    name: str | None = s.string(nullable_since=10)


# librdkafka asks for all topics with a count of 4 bytes where one byte is meant: 3 are left over.
@s.message(key=3, versions=(0, 13), flexible_since=9, slack=3)
class MetadataRequest:
    """Null topics are all of them; up to version 0 none are all."""

    topics: list[MetadataRequestTopic] | None = s.array(MetadataRequestTopic, nullable_since=1)
    allow_auto_topic_creation: bool = s.boolean(since=4, default=True)
    include_cluster_authorized_operations: bool = s.boolean(since=8, until=10)
    include_topic_authorized_operations: bool = s.boolean(since=8)


@s.struct
class MetadataResponseBroker:
    node_id: int = s.int32()
    host: str = s.string()
    port: int = s.int32()
    rack: str | None = s.string(since=1, nullable_since=1, default=None)


@s.struct
class MetadataResponsePartition:
    error_code: int = s.int16()
    partition_index: int = s.int32()
    leader_id: int = s.int32()
    leader_epoch: int = s.int32(since=7, default=-1)
    replica_nodes: list[int] = s.int32_array()
    isr_nodes: list[int] = s.int32_array()
    offline_replicas: list[int] = s.int32_array(since=5)


@s.struct
class MetadataResponseTopic:
    error_code: int = s.int16()
    name: str | None = s.string(nullable_since=12)
    topic_id: bytes = s.uuid(since=10)
    is_internal: bool = s.boolean(since=1)
    partitions: list[MetadataResponsePartition] = s.array(MetadataResponsePartition, large=True)
    topic_authorized_operations: int = s.int32(since=8, default=NO_OPERATIONS)


@s.response_to(MetadataRequest)
class MetadataResponse:
    throttle_time_ms: int = s.int32(since=3)
    brokers: list[MetadataResponseBroker] = s.array(MetadataResponseBroker)
    cluster_id: str | None = s.string(since=2, nullable_since=2, default=None)
    controller_id: int = s.int32(since=1, default=-1)
    topics: list[MetadataResponseTopic] = s.array(MetadataResponseTopic, large=True)
    cluster_authorized_operations: int = s.int32(since=8, until=10, default=NO_OPERATIONS)
    error_code: int = s.int16(since=13)


@s.message(key=10, versions=(0, 6), flexible_since=3)
class FindCoordinatorRequest:
    """`key_type`: 0 group, 1 transaction, 2 share group (version 6)."""

    key: str = s.string(until=3)
    key_type: int = s.int8(since=1)
    coordinator_keys: list[str] = s.string_array(since=4)


@s.struct
class Coordinator:
    key: str = s.string()
    node_id: int = s.int32()
    host: str = s.string()
    port: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=4)


@s.response_to(FindCoordinatorRequest)
class FindCoordinatorResponse:
    throttle_time_ms: int = s.int32(since=1)
    error_code: int = s.int16(until=3)
    error_message: str | None = s.string(since=1, until=3, nullable_since=1)
    node_id: int = s.int32(until=3)
    host: str = s.string(until=3)
    port: int = s.int32(until=3)
    coordinators: list[Coordinator] = s.array(Coordinator, since=4)


@s.message(key=60, versions=(0, 2), flexible_since=0)
class DescribeClusterRequest:
    """`endpoint_type`: 1 brokers, 2 controllers."""

    include_cluster_authorized_operations: bool = s.boolean()
    endpoint_type: int = s.int8(since=1, default=1)
    include_fenced_brokers: bool = s.boolean(since=2)


@s.struct
class DescribeClusterBroker:
    broker_id: int = s.int32()
    host: str = s.string()
    port: int = s.int32()
    rack: str | None = s.string(nullable_since=0, default=None)
    is_fenced: bool = s.boolean(since=2)


@s.response_to(DescribeClusterRequest)
class DescribeClusterResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0, default=None)
    endpoint_type: int = s.int8(since=1, default=1)
    cluster_id: str = s.string()
    controller_id: int = s.int32(default=-1)
    brokers: list[DescribeClusterBroker] = s.array(DescribeClusterBroker)
    cluster_authorized_operations: int = s.int32(default=NO_OPERATIONS)


@s.struct
class DescribeTopicPartitionsTopicRequest:
    name: str = s.string()


@s.struct
class Cursor:
    """The next response begins with this partition."""

    topic_name: str = s.string()
    partition_index: int = s.int32()


@s.message(key=75, versions=(0, 0), flexible_since=0)
class DescribeTopicPartitionsRequest:
    topics: list[DescribeTopicPartitionsTopicRequest] = s.array(DescribeTopicPartitionsTopicRequest)
    response_partition_limit: int = s.int32(default=2000)
    cursor: Cursor | None = s.nested_or_null(Cursor)


@s.struct
class DescribeTopicPartitionsResponsePartition:
    error_code: int = s.int16()
    partition_index: int = s.int32()
    leader_id: int = s.int32()
    leader_epoch: int = s.int32(default=-1)
    replica_nodes: list[int] = s.int32_array()
    isr_nodes: list[int] = s.int32_array()
    eligible_leader_replicas: list[int] | None = s.int32_array(nullable_since=0, default=None)
    last_known_elr: list[int] | None = s.int32_array(nullable_since=0, default=None)
    offline_replicas: list[int] = s.int32_array()


@s.struct
class DescribeTopicPartitionsResponseTopic:
    error_code: int = s.int16()
    name: str | None = s.string(nullable_since=0)
    topic_id: bytes = s.uuid()
    is_internal: bool = s.boolean()
    partitions: list[DescribeTopicPartitionsResponsePartition] = s.array(
        DescribeTopicPartitionsResponsePartition, large=True
    )
    topic_authorized_operations: int = s.int32(default=NO_OPERATIONS)


@s.response_to(DescribeTopicPartitionsRequest)
class DescribeTopicPartitionsResponse:
    throttle_time_ms: int = s.int32()
    topics: list[DescribeTopicPartitionsResponseTopic] = s.array(DescribeTopicPartitionsResponseTopic, large=True)
    next_cursor: Cursor | None = s.nested_or_null(Cursor)
