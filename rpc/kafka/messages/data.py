"""Records and offsets of a log: Produce, Fetch, ListOffsets, OffsetForLeaderEpoch, DeleteRecords, DescribeProducers,
InitProducerId."""

from __future__ import annotations

from tidelog.rpc.kafka.schema import (
    array,
    int8,
    int16,
    int32,
    int32_array,
    int64,
    message,
    nested,
    records,
    response_to,
    stored_records,
    string,
    struct,
    uuid,
)
from tidelog.rpc.kafka.wire import Buffer, Records

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1


@struct(frozen=True)
class LeaderIdAndEpoch:
    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)


@struct
class NodeEndpoint:
    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable_since=0, default=None)


@struct
class PartitionProduceData:
    index: int = int32()
    records: Buffer | None = records()


@struct
class TopicProduceData:
    name: str = string(until=12)
    topic_id: bytes = uuid(since=13)
    partition_data: list[PartitionProduceData] = array(PartitionProduceData)


@message(key=0, versions=(3, 13), flexible_since=9)
class ProduceRequest:
    transactional_id: str | None = string(nullable_since=3, default=None)
    acks: int = int16()
    timeout_ms: int = int32()
    topic_data: list[TopicProduceData] = array(TopicProduceData)


@struct
class BatchIndexAndErrorMessage:
    batch_index: int = int32()
    batch_index_error_message: str | None = string(nullable_since=8, default=None)


@struct
class PartitionProduceResponse:
    index: int = int32()
    error_code: int = int16()
    base_offset: int = int64()
    log_append_time_ms: int = int64(since=2, default=-1)
    log_start_offset: int = int64(since=5, default=-1)
    record_errors: list[BatchIndexAndErrorMessage] = array(BatchIndexAndErrorMessage, since=8)
    error_message: str | None = string(since=8, nullable_since=8, default=None)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch, since=10, tag=0)


@struct
class TopicProduceResponse:
    name: str = string(until=12)
    topic_id: bytes = uuid(since=13)
    partition_responses: list[PartitionProduceResponse] = array(PartitionProduceResponse)


@response_to(ProduceRequest)
class ProduceResponse:
    responses: list[TopicProduceResponse] = array(TopicProduceResponse)
    throttle_time_ms: int = int32(since=1)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, since=10, tag=0)


@struct(frozen=True)
class ReplicaState:
    replica_id: int = int32(default=-1)
    replica_epoch: int = int64(default=-1)


@struct
class FetchPartition:
    partition: int = int32()
    current_leader_epoch: int = int32(since=9, default=-1)
    fetch_offset: int = int64()
    last_fetched_epoch: int = int32(since=12, default=-1)
    log_start_offset: int = int64(since=5, default=-1)
    partition_max_bytes: int = int32()
    replica_directory_id: bytes = uuid(since=17, tag=0)
    high_watermark: int = int64(since=18, default=INT64_MAX, tag=1)


@struct
class FetchTopic:
    topic: str = string(until=12)
    topic_id: bytes = uuid(since=13)
    partitions: list[FetchPartition] = array(FetchPartition)


@struct
class ForgottenTopic:
    topic: str = string(until=12)
    topic_id: bytes = uuid(since=13)
    partitions: list[int] = int32_array()


@message(key=1, versions=(4, 18), flexible_since=12)
class FetchRequest:
    cluster_id: str | None = string(since=12, nullable_since=12, default=None, tag=0)
    replica_id: int = int32(until=14, default=-1)
    replica_state: ReplicaState = nested(ReplicaState, since=15, tag=1)
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(since=3, default=INT32_MAX)
    isolation_level: int = int8(since=4)
    session_id: int = int32(since=7)
    session_epoch: int = int32(since=7, default=-1)
    topics: list[FetchTopic] = array(FetchTopic)
    forgotten_topics_data: list[ForgottenTopic] = array(ForgottenTopic, since=7)
    rack_id: str = string(since=11)


@struct(frozen=True)
class FetchEpochEndOffset:
    epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


@struct(frozen=True)
class SnapshotId:
    end_offset: int = int64(default=-1)
    epoch: int = int32(default=-1)


@struct
class AbortedTransaction:
    producer_id: int = int64()
    first_offset: int = int64()


@struct
class PartitionData:
    """A partition of a fetch answer."""

    partition_index: int = int32()
    error_code: int = int16()
    high_watermark: int = int64()
    last_stable_offset: int = int64(since=4, default=-1)
    log_start_offset: int = int64(since=5, default=-1)
    diverging_epoch: FetchEpochEndOffset = nested(FetchEpochEndOffset, since=12, tag=0)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch, since=12, tag=1)
    snapshot_id: SnapshotId = nested(SnapshotId, since=12, tag=2)
    aborted_transactions: list[AbortedTransaction] | None = array(AbortedTransaction, since=4, nullable_since=4)
    preferred_read_replica: int = int32(since=11, default=-1)
    records: Records | None = stored_records()


@struct
class FetchableTopicResponse:
    topic: str = string(until=12)
    topic_id: bytes = uuid(since=13)
    partitions: list[PartitionData] = array(PartitionData)


@response_to(FetchRequest)
class FetchResponse:
    throttle_time_ms: int = int32(since=1)
    error_code: int = int16(since=7)
    session_id: int = int32(since=7)
    responses: list[FetchableTopicResponse] = array(FetchableTopicResponse)
    node_endpoints: list[NodeEndpoint] = array(NodeEndpoint, since=16, tag=0)


@struct
class ListOffsetsPartition:
    partition_index: int = int32()
    current_leader_epoch: int = int32(since=4, default=-1)
    timestamp: int = int64()


@struct
class ListOffsetsTopic:
    name: str = string()
    partitions: list[ListOffsetsPartition] = array(ListOffsetsPartition)


@message(key=2, versions=(1, 11), flexible_since=6)
class ListOffsetsRequest:
    replica_id: int = int32()
    isolation_level: int = int8(since=2)
    topics: list[ListOffsetsTopic] = array(ListOffsetsTopic)
    timeout_ms: int = int32(since=10)


@struct
class ListOffsetsPartitionResponse:
    partition_index: int = int32()
    error_code: int = int16()
    timestamp: int = int64(since=1, default=-1)
    offset: int = int64(since=1, default=-1)
    leader_epoch: int = int32(since=4, default=-1)


@struct
class ListOffsetsTopicResponse:
    name: str = string()
    partitions: list[ListOffsetsPartitionResponse] = array(ListOffsetsPartitionResponse)


@response_to(ListOffsetsRequest)
class ListOffsetsResponse:
    throttle_time_ms: int = int32(since=2)
    topics: list[ListOffsetsTopicResponse] = array(ListOffsetsTopicResponse)


@struct
class OffsetForLeaderPartition:
    partition: int = int32()
    current_leader_epoch: int = int32(since=2, default=-1)
    leader_epoch: int = int32()


@struct
class OffsetForLeaderTopic:
    topic: str = string()
    partitions: list[OffsetForLeaderPartition] = array(OffsetForLeaderPartition)


@message(key=23, versions=(2, 4), flexible_since=4)
class OffsetForLeaderEpochRequest:
    replica_id: int = int32(since=3, default=-2)
    topics: list[OffsetForLeaderTopic] = array(OffsetForLeaderTopic)


@struct
class EpochEndOffset:
    error_code: int = int16()
    partition: int = int32()
    leader_epoch: int = int32(since=1, default=-1)
    end_offset: int = int64(default=-1)


@struct
class OffsetForLeaderTopicResult:
    topic: str = string()
    partitions: list[EpochEndOffset] = array(EpochEndOffset)


@response_to(OffsetForLeaderEpochRequest)
class OffsetForLeaderEpochResponse:
    throttle_time_ms: int = int32(since=2)
    topics: list[OffsetForLeaderTopicResult] = array(OffsetForLeaderTopicResult)


@struct
class DeleteRecordsPartition:
    partition_index: int = int32()
    offset: int = int64()


@struct
class DeleteRecordsTopic:
    name: str = string()
    partitions: list[DeleteRecordsPartition] = array(DeleteRecordsPartition)


@message(key=21, versions=(0, 2), flexible_since=2)
class DeleteRecordsRequest:
    topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic)
    timeout_ms: int = int32()


@struct
class DeleteRecordsPartitionResult:
    partition_index: int = int32()
    low_watermark: int = int64()
    error_code: int = int16()


@struct
class DeleteRecordsTopicResult:
    name: str = string()
    partitions: list[DeleteRecordsPartitionResult] = array(DeleteRecordsPartitionResult)


@response_to(DeleteRecordsRequest)
class DeleteRecordsResponse:
    throttle_time_ms: int = int32()
    topics: list[DeleteRecordsTopicResult] = array(DeleteRecordsTopicResult)


@struct
class DescribeProducersTopicRequest:
    name: str = string()
    partition_indexes: list[int] = int32_array()


@message(key=61, versions=(0, 0), flexible_since=0)
class DescribeProducersRequest:
    topics: list[DescribeProducersTopicRequest] = array(DescribeProducersTopicRequest)


@struct
class ProducerState:
    producer_id: int = int64()
    producer_epoch: int = int32()
    last_sequence: int = int32(default=-1)
    last_timestamp: int = int64(default=-1)
    coordinator_epoch: int = int32()
    current_txn_start_offset: int = int64(default=-1)


@struct
class DescribeProducersPartitionResponse:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0, default=None)
    active_producers: list[ProducerState] = array(ProducerState)


@struct
class DescribeProducersTopicResponse:
    name: str = string()
    partitions: list[DescribeProducersPartitionResponse] = array(DescribeProducersPartitionResponse)


@response_to(DescribeProducersRequest)
class DescribeProducersResponse:
    throttle_time_ms: int = int32()
    topics: list[DescribeProducersTopicResponse] = array(DescribeProducersTopicResponse)


@message(key=22, versions=(0, 5), flexible_since=2)
class InitProducerIdRequest:
    transactional_id: str | None = string(nullable_since=0)
    transaction_timeout_ms: int = int32()
    producer_id: int = int64(since=3, default=-1)
    producer_epoch: int = int16(since=3, default=-1)


@response_to(InitProducerIdRequest)
class InitProducerIdResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()
