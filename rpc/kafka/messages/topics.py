"""CreateTopics, DeleteTopics, CreatePartitions."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s


@s.struct
class CreatableReplicaAssignment:
    partition_index: int = s.int32()
    broker_ids: list[int] = s.int32_array()


@s.struct
class CreatableTopicConfig:
    name: str = s.string()
    value: str | None = s.string(nullable_since=0)


@s.struct
class CreatableTopic:
    """-1 partitions or replicas are the broker's defaults, or as many as the assignments name."""

    name: str = s.string()
    num_partitions: int = s.int32()
    replication_factor: int = s.int16()
    assignments: list[CreatableReplicaAssignment] = s.array(CreatableReplicaAssignment)
    configs: list[CreatableTopicConfig] = s.array(CreatableTopicConfig)


@s.message(key=19, versions=(2, 7), flexible_since=5)
class CreateTopicsRequest:
    topics: list[CreatableTopic] = s.array(CreatableTopic)
    timeout_ms: int = s.int32(default=60_000)
    validate_only: bool = s.boolean(since=1)


@s.struct
class CreatableTopicConfigs:
    name: str = s.string()
    value: str | None = s.string(nullable_since=5)
    read_only: bool = s.boolean()
    config_source: int = s.int8(default=-1)
    is_sensitive: bool = s.boolean()


@s.struct
class CreatableTopicResult:
    name: str = s.string()
    topic_id: bytes = s.uuid(since=7)
    error_code: int = s.int16()
    error_message: str | None = s.string(since=1, nullable_since=0)
    topic_config_error_code: int = s.int16(since=5, tag=0)
    num_partitions: int = s.int32(since=5, default=-1)
    replication_factor: int = s.int16(since=5, default=-1)
    configs: list[CreatableTopicConfigs] | None = s.array(CreatableTopicConfigs, since=5, nullable_since=5)


@s.response_to(CreateTopicsRequest)
class CreateTopicsResponse:
    throttle_time_ms: int = s.int32(since=2)
    topics: list[CreatableTopicResult] = s.array(CreatableTopicResult, large=True)


@s.struct
class DeleteTopicState:
    name: str | None = s.string(nullable_since=6, default=None)
    topic_id: bytes = s.uuid()


@s.message(key=20, versions=(1, 6), flexible_since=4)
class DeleteTopicsRequest:
    topics: list[DeleteTopicState] = s.array(DeleteTopicState, since=6)
    topic_names: list[str] = s.string_array(until=5)
    timeout_ms: int = s.int32()


@s.struct
class DeletableTopicResult:
    name: str | None = s.string(nullable_since=6)
    topic_id: bytes = s.uuid(since=6)
    error_code: int = s.int16()
    error_message: str | None = s.string(since=5, nullable_since=5, default=None)


@s.response_to(DeleteTopicsRequest)
class DeleteTopicsResponse:
    throttle_time_ms: int = s.int32(since=1)
    responses: list[DeletableTopicResult] = s.array(DeletableTopicResult)


@s.struct
class CreatePartitionsAssignment:
    broker_ids: list[int] = s.int32_array()


@s.struct
class CreatePartitionsTopic:
    name: str = s.string()
    count: int = s.int32()
    assignments: list[CreatePartitionsAssignment] | None = s.array(CreatePartitionsAssignment, nullable_since=0)


@s.message(key=37, versions=(0, 3), flexible_since=2)
class CreatePartitionsRequest:
    topics: list[CreatePartitionsTopic] = s.array(CreatePartitionsTopic)
    timeout_ms: int = s.int32()
    validate_only: bool = s.boolean()


@s.struct
class CreatePartitionsTopicResult:
    name: str = s.string()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0, default=None)


@s.response_to(CreatePartitionsRequest)
class CreatePartitionsResponse:
    throttle_time_ms: int = s.int32()
    results: list[CreatePartitionsTopicResult] = s.array(CreatePartitionsTopicResult)
