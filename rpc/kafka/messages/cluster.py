"""What an operator asks and orders: DescribeQuorum, DescribeLogDirs, ElectLeaders, reassignments."""

from __future__ import annotations

from tidelog.rpc.kafka.schema import (
    array,
    boolean,
    int8,
    int16,
    int32,
    int32_array,
    int64,
    message,
    response_to,
    string,
    struct,
    uint16,
    uuid,
)


@struct
class QuorumRequestPartitionData:
    partition_index: int = int32()


@struct
class QuorumRequestTopicData:
    topic_name: str = string()
    partitions: list[QuorumRequestPartitionData] = array(QuorumRequestPartitionData)


@message(key=55, versions=(0, 2), flexible_since=0)
class DescribeQuorumRequest:
    topics: list[QuorumRequestTopicData] = array(QuorumRequestTopicData)


@struct
class QuorumReplicaState:
    replica_id: int = int32()
    replica_directory_id: bytes = uuid(since=2)
    log_end_offset: int = int64()
    last_fetch_timestamp: int = int64(since=1, default=-1)
    last_caught_up_timestamp: int = int64(since=1, default=-1)


@struct
class QuorumPartitionData:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(since=2, nullable_since=2)
    leader_id: int = int32()
    leader_epoch: int = int32()
    high_watermark: int = int64()
    current_voters: list[QuorumReplicaState] = array(QuorumReplicaState)
    observers: list[QuorumReplicaState] = array(QuorumReplicaState)


@struct
class QuorumTopicData:
    topic_name: str = string()
    partitions: list[QuorumPartitionData] = array(QuorumPartitionData)


@struct
class QuorumListener:
    name: str = string()
    host: str = string()
    port: int = uint16()


@struct
class QuorumNode:
    node_id: int = int32()
    listeners: list[QuorumListener] = array(QuorumListener)


@response_to(DescribeQuorumRequest)
class DescribeQuorumResponse:
    error_code: int = int16()
    error_message: str | None = string(since=2, nullable_since=2)
    topics: list[QuorumTopicData] = array(QuorumTopicData)
    nodes: list[QuorumNode] = array(QuorumNode, since=2)


@struct
class DescribableLogDirTopic:
    topic: str = string()
    partitions: list[int] = int32_array()


@message(key=35, versions=(1, 5), flexible_since=2)
class DescribeLogDirsRequest:
    """Null topics are all of them."""

    topics: list[DescribableLogDirTopic] | None = array(DescribableLogDirTopic, nullable_since=0)


@struct
class DescribeLogDirsPartition:
    partition_index: int = int32()
    partition_size: int = int64()
    offset_lag: int = int64()
    is_future_key: bool = boolean()


@struct
class DescribeLogDirsTopic:
    name: str = string()
    partitions: list[DescribeLogDirsPartition] = array(DescribeLogDirsPartition, large=True)


@struct
class DescribeLogDirsResult:
    error_code: int = int16()
    log_dir: str = string()
    topics: list[DescribeLogDirsTopic] = array(DescribeLogDirsTopic, large=True)
    total_bytes: int = int64(since=4, default=-1)
    usable_bytes: int = int64(since=4, default=-1)
    is_cordoned: bool = boolean(since=5)


@response_to(DescribeLogDirsRequest)
class DescribeLogDirsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16(since=3)
    results: list[DescribeLogDirsResult] = array(DescribeLogDirsResult)


@struct
class ElectLeadersTopicPartitions:
    topic: str = string()
    partitions: list[int] = int32_array()


@message(key=43, versions=(0, 2), flexible_since=2)
class ElectLeadersRequest:
    """`election_type`: 0 preferred, 1 unclean. Null partitions are all of them."""

    election_type: int = int8(since=1)
    topic_partitions: list[ElectLeadersTopicPartitions] | None = array(ElectLeadersTopicPartitions, nullable_since=0)
    timeout_ms: int = int32(default=60_000)


@struct
class PartitionResult:
    partition_id: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)


@struct
class ReplicaElectionResult:
    topic: str = string()
    partition_result: list[PartitionResult] = array(PartitionResult)


@response_to(ElectLeadersRequest)
class ElectLeadersResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16(since=1)
    replica_election_results: list[ReplicaElectionResult] = array(ReplicaElectionResult)


@struct
class ReassignablePartition:
    """Null replicas cancel what is under way."""

    partition_index: int = int32()
    replicas: list[int] | None = int32_array(nullable_since=0, default=None)


@struct
class ReassignableTopic:
    name: str = string()
    partitions: list[ReassignablePartition] = array(ReassignablePartition)


@message(key=45, versions=(0, 1), flexible_since=0)
class AlterPartitionReassignmentsRequest:
    timeout_ms: int = int32(default=60_000)
    allow_replication_factor_change: bool = boolean(since=1, default=True)
    topics: list[ReassignableTopic] = array(ReassignableTopic)


@struct
class ReassignablePartitionResponse:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)


@struct
class ReassignableTopicResponse:
    name: str = string()
    partitions: list[ReassignablePartitionResponse] = array(ReassignablePartitionResponse)


@response_to(AlterPartitionReassignmentsRequest)
class AlterPartitionReassignmentsResponse:
    throttle_time_ms: int = int32()
    allow_replication_factor_change: bool = boolean(since=1, default=True)
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)
    responses: list[ReassignableTopicResponse] = array(ReassignableTopicResponse)


@struct
class ListPartitionReassignmentsTopics:
    name: str = string()
    partition_indexes: list[int] = int32_array()


@message(key=46, versions=(0, 0), flexible_since=0)
class ListPartitionReassignmentsRequest:
    """Null topics are all that are being reassigned."""

    timeout_ms: int = int32(default=60_000)
    topics: list[ListPartitionReassignmentsTopics] | None = array(
        ListPartitionReassignmentsTopics, nullable_since=0, default=None
    )


@struct
class OngoingPartitionReassignment:
    partition_index: int = int32()
    replicas: list[int] = int32_array()
    adding_replicas: list[int] = int32_array()
    removing_replicas: list[int] = int32_array()


@struct
class OngoingTopicReassignment:
    name: str = string()
    partitions: list[OngoingPartitionReassignment] = array(OngoingPartitionReassignment)


@response_to(ListPartitionReassignmentsRequest)
class ListPartitionReassignmentsResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)
    topics: list[OngoingTopicReassignment] = array(OngoingTopicReassignment)
