"""Admin requests: DescribeQuorum, DescribeLogDirs, ElectLeaders, reassignments."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s


@s.struct
class QuorumRequestPartitionData:
    partition_index: int = s.int32()


@s.struct
class QuorumRequestTopicData:
    topic_name: str = s.string()
    partitions: list[QuorumRequestPartitionData] = s.array(QuorumRequestPartitionData)


@s.message(key=55, versions=(0, 2), flexible_since=0)
class DescribeQuorumRequest:
    topics: list[QuorumRequestTopicData] = s.array(QuorumRequestTopicData)


@s.struct
class QuorumReplicaState:
    replica_id: int = s.int32()
    replica_directory_id: bytes = s.uuid(since=2)
    log_end_offset: int = s.int64()
    last_fetch_timestamp: int = s.int64(since=1, default=-1)
    last_caught_up_timestamp: int = s.int64(since=1, default=-1)


@s.struct
class QuorumPartitionData:
    partition_index: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(since=2, nullable_since=2)
    leader_id: int = s.int32()
    leader_epoch: int = s.int32()
    high_watermark: int = s.int64()
    current_voters: list[QuorumReplicaState] = s.array(QuorumReplicaState)
    observers: list[QuorumReplicaState] = s.array(QuorumReplicaState)


@s.struct
class QuorumTopicData:
    topic_name: str = s.string()
    partitions: list[QuorumPartitionData] = s.array(QuorumPartitionData)


@s.struct
class QuorumListener:
    name: str = s.string()
    host: str = s.string()
    port: int = s.uint16()


@s.struct
class QuorumNode:
    node_id: int = s.int32()
    listeners: list[QuorumListener] = s.array(QuorumListener)


@s.response_to(DescribeQuorumRequest)
class DescribeQuorumResponse:
    error_code: int = s.int16()
    error_message: str | None = s.string(since=2, nullable_since=2)
    topics: list[QuorumTopicData] = s.array(QuorumTopicData)
    nodes: list[QuorumNode] = s.array(QuorumNode, since=2)


@s.struct
class DescribableLogDirTopic:
    topic: str = s.string()
    partitions: list[int] = s.int32_array()


@s.message(key=35, versions=(1, 5), flexible_since=2)
class DescribeLogDirsRequest:
    """Null topics are all of them."""

    topics: list[DescribableLogDirTopic] | None = s.array(DescribableLogDirTopic, nullable_since=0)


@s.struct
class DescribeLogDirsPartition:
    partition_index: int = s.int32()
    partition_size: int = s.int64()
    offset_lag: int = s.int64()
    is_future_key: bool = s.boolean()


@s.struct
class DescribeLogDirsTopic:
    name: str = s.string()
    partitions: list[DescribeLogDirsPartition] = s.array(DescribeLogDirsPartition, large=True)


@s.struct
class DescribeLogDirsResult:
    error_code: int = s.int16()
    log_dir: str = s.string()
    topics: list[DescribeLogDirsTopic] = s.array(DescribeLogDirsTopic, large=True)
    total_bytes: int = s.int64(since=4, default=-1)
    usable_bytes: int = s.int64(since=4, default=-1)
    is_cordoned: bool = s.boolean(since=5)


@s.response_to(DescribeLogDirsRequest)
class DescribeLogDirsResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16(since=3)
    results: list[DescribeLogDirsResult] = s.array(DescribeLogDirsResult)


@s.struct
class ElectLeadersTopicPartitions:
    topic: str = s.string()
    partitions: list[int] = s.int32_array()


@s.message(key=43, versions=(0, 2), flexible_since=2)
class ElectLeadersRequest:
    """`election_type`: 0 preferred, 1 unclean. Null partitions are all of them."""

    election_type: int = s.int8(since=1)
    topic_partitions: list[ElectLeadersTopicPartitions] | None = s.array(ElectLeadersTopicPartitions, nullable_since=0)
    timeout_ms: int = s.int32(default=60_000)


@s.struct
class PartitionResult:
    partition_id: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)


@s.struct
class ReplicaElectionResult:
    topic: str = s.string()
    partition_result: list[PartitionResult] = s.array(PartitionResult)


@s.response_to(ElectLeadersRequest)
class ElectLeadersResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16(since=1)
    replica_election_results: list[ReplicaElectionResult] = s.array(ReplicaElectionResult)


@s.struct
class ReassignablePartition:
    """Null replicas cancel the reassignment."""

    partition_index: int = s.int32()
    replicas: list[int] | None = s.int32_array(nullable_since=0, default=None)


@s.struct
class ReassignableTopic:
    name: str = s.string()
    partitions: list[ReassignablePartition] = s.array(ReassignablePartition)


@s.message(key=45, versions=(0, 1), flexible_since=0)
class AlterPartitionReassignmentsRequest:
    timeout_ms: int = s.int32(default=60_000)
    allow_replication_factor_change: bool = s.boolean(since=1, default=True)
    topics: list[ReassignableTopic] = s.array(ReassignableTopic)


@s.struct
class ReassignablePartitionResponse:
    partition_index: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)


@s.struct
class ReassignableTopicResponse:
    name: str = s.string()
    partitions: list[ReassignablePartitionResponse] = s.array(ReassignablePartitionResponse)


@s.response_to(AlterPartitionReassignmentsRequest)
class AlterPartitionReassignmentsResponse:
    throttle_time_ms: int = s.int32()
    allow_replication_factor_change: bool = s.boolean(since=1, default=True)
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    responses: list[ReassignableTopicResponse] = s.array(ReassignableTopicResponse)


@s.struct
class ListPartitionReassignmentsTopics:
    name: str = s.string()
    partition_indexes: list[int] = s.int32_array()


@s.message(key=46, versions=(0, 0), flexible_since=0)
class ListPartitionReassignmentsRequest:
    """Null topics are all that are being reassigned."""

    timeout_ms: int = s.int32(default=60_000)
    topics: list[ListPartitionReassignmentsTopics] | None = s.array(
        ListPartitionReassignmentsTopics, nullable_since=0, default=None
    )


@s.struct
class OngoingPartitionReassignment:
    partition_index: int = s.int32()
    replicas: list[int] = s.int32_array()
    adding_replicas: list[int] = s.int32_array()
    removing_replicas: list[int] = s.int32_array()


@s.struct
class OngoingTopicReassignment:
    name: str = s.string()
    partitions: list[OngoingPartitionReassignment] = s.array(OngoingPartitionReassignment)


@s.response_to(ListPartitionReassignmentsRequest)
class ListPartitionReassignmentsResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    topics: list[OngoingTopicReassignment] = s.array(OngoingTopicReassignment)
