"""CreateTopics, DeleteTopics, CreatePartitions."""

from __future__ import annotations

from tidelog.rpc.kafka.schema import (
    array,
    boolean,
    int8,
    int16,
    int32,
    int32_array,
    message,
    response_to,
    string,
    string_array,
    struct,
    uuid,
)


@struct
class CreatableReplicaAssignment:
    partition_index: int = int32()
    broker_ids: list[int] = int32_array()


@struct
class CreatableTopicConfig:
    name: str = string()
    value: str | None = string(nullable_since=0)


@struct
class CreatableTopic:
    """-1 partitions or replicas are the broker's defaults, or as many as the assignments name."""

    name: str = string()
    num_partitions: int = int32()
    replication_factor: int = int16()
    assignments: list[CreatableReplicaAssignment] = array(CreatableReplicaAssignment)
    configs: list[CreatableTopicConfig] = array(CreatableTopicConfig)


@message(key=19, versions=(2, 7), flexible_since=5)
class CreateTopicsRequest:
    topics: list[CreatableTopic] = array(CreatableTopic)
    timeout_ms: int = int32(default=60_000)
    validate_only: bool = boolean(since=1)


@struct
class CreatableTopicConfigs:
    name: str = string()
    value: str | None = string(nullable_since=5)
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()


@struct
class CreatableTopicResult:
    name: str = string()
    topic_id: bytes = uuid(since=7)
    error_code: int = int16()
    error_message: str | None = string(since=1, nullable_since=0)
    topic_config_error_code: int = int16(since=5, tag=0)
    num_partitions: int = int32(since=5, default=-1)
    replication_factor: int = int16(since=5, default=-1)
    configs: list[CreatableTopicConfigs] | None = array(CreatableTopicConfigs, since=5, nullable_since=5)


@response_to(CreateTopicsRequest)
class CreateTopicsResponse:
    throttle_time_ms: int = int32(since=2)
    topics: list[CreatableTopicResult] = array(CreatableTopicResult, large=True)


@struct
class DeleteTopicState:
    name: str | None = string(nullable_since=6, default=None)
    topic_id: bytes = uuid()


@message(key=20, versions=(1, 6), flexible_since=4)
class DeleteTopicsRequest:
    topics: list[DeleteTopicState] = array(DeleteTopicState, since=6)
    topic_names: list[str] = string_array(until=5)
    timeout_ms: int = int32()


@struct
class DeletableTopicResult:
    name: str | None = string(nullable_since=6)
    topic_id: bytes = uuid(since=6)
    error_code: int = int16()
    error_message: str | None = string(since=5, nullable_since=5, default=None)


@response_to(DeleteTopicsRequest)
class DeleteTopicsResponse:
    throttle_time_ms: int = int32(since=1)
    responses: list[DeletableTopicResult] = array(DeletableTopicResult)


@struct
class CreatePartitionsAssignment:
    broker_ids: list[int] = int32_array()


@struct
class CreatePartitionsTopic:
    name: str = string()
    count: int = int32()
    assignments: list[CreatePartitionsAssignment] | None = array(CreatePartitionsAssignment, nullable_since=0)


@message(key=37, versions=(0, 3), flexible_since=2)
class CreatePartitionsRequest:
    topics: list[CreatePartitionsTopic] = array(CreatePartitionsTopic)
    timeout_ms: int = int32()
    validate_only: bool = boolean()


@struct
class CreatePartitionsTopicResult:
    name: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0, default=None)


@response_to(CreatePartitionsRequest)
class CreatePartitionsResponse:
    throttle_time_ms: int = int32()
    results: list[CreatePartitionsTopicResult] = array(CreatePartitionsTopicResult)
