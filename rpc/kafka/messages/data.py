"""Records and offsets of a log: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, DeleteRecords, DescribeProducers."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s
from tidelog.rpc.kafka.wire import Buffer, Records

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1


@s.struct(frozen=True)
class LeaderIdAndEpoch:
    leader_id: int = s.int32(default=-1)
    leader_epoch: int = s.int32(default=-1)


@s.struct
class NodeEndpoint:
    node_id: int = s.int32()
    host: str = s.string()
    port: int = s.int32()
    rack: str | None = s.string(nullable_since=0, default=None)


@s.struct
class PartitionProduceData:
    index: int = s.int32()
    records: Buffer | None = s.records()


@s.struct
class TopicProduceData:
    name: str = s.string(until=12)
    topic_id: bytes = s.uuid(since=13)
    partition_data: list[PartitionProduceData] = s.array(PartitionProduceData)


@s.message(key=0, versions=(3, 13), flexible_since=9)
class ProduceRequest:
    transactional_id: str | None = s.string(nullable_since=3, default=None)
    acks: int = s.int16()
    timeout_ms: int = s.int32()
    topic_data: list[TopicProduceData] = s.array(TopicProduceData)


@s.struct
class BatchIndexAndErrorMessage:
    batch_index: int = s.int32()
    batch_index_error_message: str | None = s.string(nullable_since=8, default=None)


@s.struct
class PartitionProduceResponse:
    index: int = s.int32()
    error_code: int = s.int16()
    base_offset: int = s.int64()
    log_append_time_ms: int = s.int64(since=2, default=-1)
    log_start_offset: int = s.int64(since=5, default=-1)
    record_errors: list[BatchIndexAndErrorMessage] = s.array(BatchIndexAndErrorMessage, since=8)
    error_message: str | None = s.string(since=8, nullable_since=8, default=None)
    current_leader: LeaderIdAndEpoch = s.nested(LeaderIdAndEpoch, since=10, tag=0)


@s.struct
class TopicProduceResponse:
    name: str = s.string(until=12)
    topic_id: bytes = s.uuid(since=13)
    partition_responses: list[PartitionProduceResponse] = s.array(PartitionProduceResponse)


@s.response_to(ProduceRequest)
class ProduceResponse:
    responses: list[TopicProduceResponse] = s.array(TopicProduceResponse)
    throttle_time_ms: int = s.int32(since=1)
    node_endpoints: list[NodeEndpoint] = s.array(NodeEndpoint, since=10, tag=0)


@s.struct(frozen=True)
class ReplicaState:
    replica_id: int = s.int32(default=-1)
    replica_epoch: int = s.int64(default=-1)


@s.struct
class FetchPartition:
    partition: int = s.int32()
    current_leader_epoch: int = s.int32(since=9, default=-1)
    fetch_offset: int = s.int64()
    last_fetched_epoch: int = s.int32(since=12, default=-1)
    log_start_offset: int = s.int64(since=5, default=-1)
    partition_max_bytes: int = s.int32()
    replica_directory_id: bytes = s.uuid(since=17, tag=0)
    high_watermark: int = s.int64(since=18, default=INT64_MAX, tag=1)


@s.struct
class FetchTopic:
    topic: str = s.string(until=12)
    topic_id: bytes = s.uuid(since=13)
    partitions: list[FetchPartition] = s.array(FetchPartition)


@s.struct
class ForgottenTopic:
    topic: str = s.string(until=12)
    topic_id: bytes = s.uuid(since=13)
    partitions: list[int] = s.int32_array()


@s.message(key=1, versions=(4, 18), flexible_since=12)
class FetchRequest:
    cluster_id: str | None = s.string(since=12, nullable_since=12, default=None, tag=0)
    replica_id: int = s.int32(until=14, default=-1)
    replica_state: ReplicaState = s.nested(ReplicaState, since=15, tag=1)
    max_wait_ms: int = s.int32()
    min_bytes: int = s.int32()
    max_bytes: int = s.int32(since=3, default=INT32_MAX)
    isolation_level: int = s.int8(since=4)
    session_id: int = s.int32(since=7)
    session_epoch: int = s.int32(since=7, default=-1)
    topics: list[FetchTopic] = s.array(FetchTopic)
    forgotten_topics_data: list[ForgottenTopic] = s.array(ForgottenTopic, since=7)
    rack_id: str = s.string(since=11)


@s.struct(frozen=True)
class FetchEpochEndOffset:
    epoch: int = s.int32(default=-1)
    end_offset: int = s.int64(default=-1)


@s.struct(frozen=True)
class SnapshotId:
    end_offset: int = s.int64(default=-1)
    epoch: int = s.int32(default=-1)


@s.struct
class AbortedTransaction:
    producer_id: int = s.int64()
    first_offset: int = s.int64()


@s.struct
class PartitionData:
    """A partition of a Fetch response."""

    partition_index: int = s.int32()
    error_code: int = s.int16()
    high_watermark: int = s.int64()
    last_stable_offset: int = s.int64(since=4, default=-1)
    log_start_offset: int = s.int64(since=5, default=-1)
    diverging_epoch: FetchEpochEndOffset = s.nested(FetchEpochEndOffset, since=12, tag=0)
    current_leader: LeaderIdAndEpoch = s.nested(LeaderIdAndEpoch, since=12, tag=1)
    snapshot_id: SnapshotId = s.nested(SnapshotId, since=12, tag=2)
    aborted_transactions: list[AbortedTransaction] | None = s.array(AbortedTransaction, since=4, nullable_since=4)
    preferred_read_replica: int = s.int32(since=11, default=-1)
    records: Records | None = s.records()


@s.struct
class FetchableTopicResponse:
    topic: str = s.string(until=12)
    topic_id: bytes = s.uuid(since=13)
    partitions: list[PartitionData] = s.array(PartitionData)


@s.response_to(FetchRequest)
class FetchResponse:
    throttle_time_ms: int = s.int32(since=1)
    error_code: int = s.int16(since=7)
    session_id: int = s.int32(since=7)
    responses: list[FetchableTopicResponse] = s.array(FetchableTopicResponse)
    node_endpoints: list[NodeEndpoint] = s.array(NodeEndpoint, since=16, tag=0)


@s.struct
class ListOffsetsPartition:
    partition_index: int = s.int32()
    current_leader_epoch: int = s.int32(since=4, default=-1)
    timestamp: int = s.int64()


@s.struct
class ListOffsetsTopic:
    name: str = s.string()
    partitions: list[ListOffsetsPartition] = s.array(ListOffsetsPartition)


@s.message(key=2, versions=(1, 11), flexible_since=6)
class ListOffsetsRequest:
    replica_id: int = s.int32()
    isolation_level: int = s.int8(since=2)
    topics: list[ListOffsetsTopic] = s.array(ListOffsetsTopic)
    timeout_ms: int = s.int32(since=10)


@s.struct
class ListOffsetsPartitionResponse:
    partition_index: int = s.int32()
    error_code: int = s.int16()
    timestamp: int = s.int64(since=1, default=-1)
    offset: int = s.int64(since=1, default=-1)
    leader_epoch: int = s.int32(since=4, default=-1)


@s.struct
class ListOffsetsTopicResponse:
    name: str = s.string()
    partitions: list[ListOffsetsPartitionResponse] = s.array(ListOffsetsPartitionResponse)


@s.response_to(ListOffsetsRequest)
class ListOffsetsResponse:
    throttle_time_ms: int = s.int32(since=2)
    topics: list[ListOffsetsTopicResponse] = s.array(ListOffsetsTopicResponse)


@s.struct
class OffsetForLeaderPartition:
    partition: int = s.int32()
    current_leader_epoch: int = s.int32(since=2, default=-1)
    leader_epoch: int = s.int32()


@s.struct
class OffsetForLeaderTopic:
    topic: str = s.string()
    partitions: list[OffsetForLeaderPartition] = s.array(OffsetForLeaderPartition)


@s.message(key=23, versions=(2, 4), flexible_since=4)
class OffsetForLeaderEpochRequest:
    replica_id: int = s.int32(since=3, default=-2)
    topics: list[OffsetForLeaderTopic] = s.array(OffsetForLeaderTopic)


@s.struct
class EpochEndOffset:
    error_code: int = s.int16()
    partition: int = s.int32()
    leader_epoch: int = s.int32(since=1, default=-1)
    end_offset: int = s.int64(default=-1)


@s.struct
class OffsetForLeaderTopicResult:
    topic: str = s.string()
    partitions: list[EpochEndOffset] = s.array(EpochEndOffset)


@s.response_to(OffsetForLeaderEpochRequest)
class OffsetForLeaderEpochResponse:
    throttle_time_ms: int = s.int32(since=2)
    topics: list[OffsetForLeaderTopicResult] = s.array(OffsetForLeaderTopicResult)


@s.struct
class DeleteRecordsPartition:
    partition_index: int = s.int32()
    offset: int = s.int64()


@s.struct
class DeleteRecordsTopic:
    name: str = s.string()
    partitions: list[DeleteRecordsPartition] = s.array(DeleteRecordsPartition)


@s.message(key=21, versions=(0, 2), flexible_since=2)
class DeleteRecordsRequest:
    topics: list[DeleteRecordsTopic] = s.array(DeleteRecordsTopic)
    timeout_ms: int = s.int32()


@s.struct
class DeleteRecordsPartitionResult:
    partition_index: int = s.int32()
    low_watermark: int = s.int64()
    error_code: int = s.int16()


@s.struct
class DeleteRecordsTopicResult:
    name: str = s.string()
    partitions: list[DeleteRecordsPartitionResult] = s.array(DeleteRecordsPartitionResult)


@s.response_to(DeleteRecordsRequest)
class DeleteRecordsResponse:
    throttle_time_ms: int = s.int32()
    topics: list[DeleteRecordsTopicResult] = s.array(DeleteRecordsTopicResult)


@s.struct
class DescribeProducersTopicRequest:
    name: str = s.string()
    partition_indexes: list[int] = s.int32_array()


@s.message(key=61, versions=(0, 0), flexible_since=0)
class DescribeProducersRequest:
    topics: list[DescribeProducersTopicRequest] = s.array(DescribeProducersTopicRequest)


@s.struct
class ProducerState:
    producer_id: int = s.int64()
    producer_epoch: int = s.int32()
    last_sequence: int = s.int32(default=-1)
    last_timestamp: int = s.int64(default=-1)
    coordinator_epoch: int = s.int32()
    current_txn_start_offset: int = s.int64(default=-1)


@s.struct
class DescribeProducersPartitionResponse:
    partition_index: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0, default=None)
    active_producers: list[ProducerState] = s.array(ProducerState)


@s.struct
class DescribeProducersTopicResponse:
    name: str = s.string()
    partitions: list[DescribeProducersPartitionResponse] = s.array(DescribeProducersPartitionResponse)


@s.response_to(DescribeProducersRequest)
class DescribeProducersResponse:
    throttle_time_ms: int = s.int32()
    topics: list[DescribeProducersTopicResponse] = s.array(DescribeProducersTopicResponse)
