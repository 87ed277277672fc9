"""Transactions: InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn, WriteTxnMarkers,
DescribeTransactions, ListTransactions."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s


@s.message(key=22, versions=(0, 5), flexible_since=2)
class InitProducerIdRequest:
    transactional_id: str | None = s.string(nullable_since=0)
    transaction_timeout_ms: int = s.int32()
    producer_id: int = s.int64(since=3, default=-1)
    producer_epoch: int = s.int16(since=3, default=-1)


@s.response_to(InitProducerIdRequest)
class InitProducerIdResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    producer_id: int = s.int64(default=-1)
    producer_epoch: int = s.int16()


@s.struct
class AddPartitionsToTxnTopic:
    name: str = s.string()
    partitions: list[int] = s.int32_array()


@s.struct
class AddPartitionsToTxnTransaction:
    transactional_id: str = s.string()
    producer_id: int = s.int64()
    producer_epoch: int = s.int16()
    verify_only: bool = s.boolean()
    topics: list[AddPartitionsToTxnTopic] = s.array(AddPartitionsToTxnTopic)


@s.message(key=24, versions=(0, 5), flexible_since=3)
class AddPartitionsToTxnRequest:
    """Clients send versions up to 3, brokers of Kafka the others."""

    transactions: list[AddPartitionsToTxnTransaction] = s.array(AddPartitionsToTxnTransaction, since=4)
    v3_and_below_transactional_id: str = s.string(until=3)
    v3_and_below_producer_id: int = s.int64(until=3)
    v3_and_below_producer_epoch: int = s.int16(until=3)
    v3_and_below_topics: list[AddPartitionsToTxnTopic] = s.array(AddPartitionsToTxnTopic, until=3)


@s.struct
class AddPartitionsToTxnPartitionResult:
    partition_index: int = s.int32()
    partition_error_code: int = s.int16()


@s.struct
class AddPartitionsToTxnTopicResult:
    name: str = s.string()
    results_by_partition: list[AddPartitionsToTxnPartitionResult] = s.array(AddPartitionsToTxnPartitionResult)


@s.struct
class AddPartitionsToTxnResult:
    transactional_id: str = s.string()
    topic_results: list[AddPartitionsToTxnTopicResult] = s.array(AddPartitionsToTxnTopicResult)


@s.response_to(AddPartitionsToTxnRequest)
class AddPartitionsToTxnResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16(since=4)
    results_by_transaction: list[AddPartitionsToTxnResult] = s.array(AddPartitionsToTxnResult, since=4)
    results_by_topic_v3_and_below: list[AddPartitionsToTxnTopicResult] = s.array(AddPartitionsToTxnTopicResult, until=3)


@s.message(key=25, versions=(0, 4), flexible_since=3)
class AddOffsetsToTxnRequest:
    transactional_id: str = s.string()
    producer_id: int = s.int64()
    producer_epoch: int = s.int16()
    group_id: str = s.string()


@s.response_to(AddOffsetsToTxnRequest)
class AddOffsetsToTxnResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()


@s.message(key=26, versions=(0, 5), flexible_since=3)
class EndTxnRequest:
    transactional_id: str = s.string()
    producer_id: int = s.int64()
    producer_epoch: int = s.int16()
    committed: bool = s.boolean()


@s.response_to(EndTxnRequest)
class EndTxnResponse:
    """From version 5 on the producer goes on with this id and epoch."""

    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    producer_id: int = s.int64(since=5, default=-1)
    producer_epoch: int = s.int16(since=5, default=-1)


@s.struct
class WritableTxnMarkerTopic:
    name: str = s.string()
    partition_indexes: list[int] = s.int32_array()


@s.struct
class WritableTxnMarker:
    producer_id: int = s.int64()
    producer_epoch: int = s.int16()
    transaction_result: bool = s.boolean()
    topics: list[WritableTxnMarkerTopic] = s.array(WritableTxnMarkerTopic)
    coordinator_epoch: int = s.int32()
    transaction_version: int = s.int8(since=2)


@s.message(key=27, versions=(1, 2), flexible_since=1)
class WriteTxnMarkersRequest:
    markers: list[WritableTxnMarker] = s.array(WritableTxnMarker)


@s.struct
class WritableTxnMarkerPartitionResult:
    partition_index: int = s.int32()
    error_code: int = s.int16()


@s.struct
class WritableTxnMarkerTopicResult:
    name: str = s.string()
    partitions: list[WritableTxnMarkerPartitionResult] = s.array(WritableTxnMarkerPartitionResult)


@s.struct
class WritableTxnMarkerResult:
    producer_id: int = s.int64()
    topics: list[WritableTxnMarkerTopicResult] = s.array(WritableTxnMarkerTopicResult)


@s.response_to(WriteTxnMarkersRequest)
class WriteTxnMarkersResponse:
    markers: list[WritableTxnMarkerResult] = s.array(WritableTxnMarkerResult)


@s.struct
class TxnOffsetCommitRequestPartition:
    partition_index: int = s.int32()
    committed_offset: int = s.int64()
    committed_leader_epoch: int = s.int32(since=2, default=-1)
    committed_metadata: str | None = s.string(nullable_since=0)


@s.struct
class TxnOffsetCommitRequestTopic:
    name: str = s.string(until=5)
    topic_id: bytes = s.uuid(since=6)
    partitions: list[TxnOffsetCommitRequestPartition] = s.array(TxnOffsetCommitRequestPartition)


@s.message(key=28, versions=(0, 6), flexible_since=3)
class TxnOffsetCommitRequest:
    """From version 5 on it adds the group to the transaction, too."""

    transactional_id: str = s.string()
    group_id: str = s.string()
    producer_id: int = s.int64()
    producer_epoch: int = s.int16()
    generation_id_or_member_epoch: int = s.int32(since=3, default=-1)
    member_id: str = s.string(since=3)
    group_instance_id: str | None = s.string(since=3, nullable_since=3, default=None)
    topics: list[TxnOffsetCommitRequestTopic] = s.array(TxnOffsetCommitRequestTopic)


@s.struct
class TxnOffsetCommitResponsePartition:
    partition_index: int = s.int32()
    error_code: int = s.int16()


@s.struct
class TxnOffsetCommitResponseTopic:
    name: str = s.string(until=5)
    topic_id: bytes = s.uuid(since=6)
    partitions: list[TxnOffsetCommitResponsePartition] = s.array(TxnOffsetCommitResponsePartition)


@s.response_to(TxnOffsetCommitRequest)
class TxnOffsetCommitResponse:
    throttle_time_ms: int = s.int32()
    topics: list[TxnOffsetCommitResponseTopic] = s.array(TxnOffsetCommitResponseTopic)


@s.message(key=65, versions=(0, 0), flexible_since=0)
class DescribeTransactionsRequest:
    transactional_ids: list[str] = s.string_array()


@s.struct
class TopicData:
    topic: str = s.string()
    partitions: list[int] = s.int32_array()


@s.struct
class DescribedTransaction:
    error_code: int = s.int16()
    transactional_id: str = s.string()
    transaction_state: str = s.string()
    transaction_timeout_ms: int = s.int32()
    transaction_start_time_ms: int = s.int64()
    producer_id: int = s.int64()
    producer_epoch: int = s.int16()
    topics: list[TopicData] = s.array(TopicData)


@s.response_to(DescribeTransactionsRequest)
class DescribeTransactionsResponse:
    throttle_time_ms: int = s.int32()
    transaction_states: list[DescribedTransaction] = s.array(DescribedTransaction, large=True)


@s.message(key=66, versions=(0, 2), flexible_since=0)
class ListTransactionsRequest:
    """Empty filters let all transactional ids pass."""

    state_filters: list[str] = s.string_array()
    producer_id_filters: list[int] = s.int64_array()
    duration_filter: int = s.int64(since=1, default=-1)
    transactional_id_pattern: str | None = s.string(since=2, nullable_since=2, default=None)


@s.struct
class ListedTransaction:
    transactional_id: str = s.string()
    producer_id: int = s.int64()
    transaction_state: str = s.string()


@s.response_to(ListTransactionsRequest)
class ListTransactionsResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    unknown_state_filters: list[str] = s.string_array()
    transaction_states: list[ListedTransaction] = s.array(ListedTransaction, large=True)
