"""AlterReplicaLogDirs, UpdateFeatures, UnregisterBroker; and lists: of client quotas, of resources with settings."""

from __future__ import annotations

from tidelog.rpc.kafka.schema import (
    array,
    boolean,
    float64,
    int8,
    int8_array,
    int16,
    int32,
    int32_array,
    message,
    response_to,
    string,
    struct,
)


@struct
class AlterReplicaLogDirTopic:
    name: str = string()
    partitions: list[int] = int32_array()


@struct
class AlterReplicaLogDir:
    path: str = string()
    topics: list[AlterReplicaLogDirTopic] = array(AlterReplicaLogDirTopic)


@message(key=34, versions=(1, 2), flexible_since=2)
class AlterReplicaLogDirsRequest:
    dirs: list[AlterReplicaLogDir] = array(AlterReplicaLogDir)


@struct
class AlterReplicaLogDirPartitionResult:
    partition_index: int = int32()
    error_code: int = int16()


@struct
class AlterReplicaLogDirTopicResult:
    topic_name: str = string()
    partitions: list[AlterReplicaLogDirPartitionResult] = array(AlterReplicaLogDirPartitionResult)


@response_to(AlterReplicaLogDirsRequest)
class AlterReplicaLogDirsResponse:
    throttle_time_ms: int = int32()
    results: list[AlterReplicaLogDirTopicResult] = array(AlterReplicaLogDirTopicResult)


@struct
class FeatureUpdateKey:
    feature: str = string()
    max_version_level: int = int16()
    allow_downgrade: bool = boolean(until=0)
    upgrade_type: int = int8(since=1, default=1)


@message(key=57, versions=(0, 2), flexible_since=0)
class UpdateFeaturesRequest:
    timeout_ms: int = int32(default=60_000)
    feature_updates: list[FeatureUpdateKey] = array(FeatureUpdateKey)
    validate_only: bool = boolean(since=1)


@struct
class UpdatableFeatureResult:
    feature: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)


@response_to(UpdateFeaturesRequest)
class UpdateFeaturesResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)
    results: list[UpdatableFeatureResult] = array(UpdatableFeatureResult, until=1)


@message(key=64, versions=(0, 0), flexible_since=0)
class UnregisterBrokerRequest:
    broker_id: int = int32()


@response_to(UnregisterBrokerRequest)
class UnregisterBrokerResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)


@struct
class ComponentData:
    entity_type: str = string()
    match_type: int = int8()
    match: str | None = string(nullable_since=0)


@message(key=48, versions=(0, 1), flexible_since=1)
class DescribeClientQuotasRequest:
    components: list[ComponentData] = array(ComponentData)
    strict: bool = boolean()


@struct
class EntityData:
    entity_type: str = string()
    entity_name: str | None = string(nullable_since=0)


@struct
class ValueData:
    key: str = string()
    value: float = float64()


@struct
class EntryData:
    entity: list[EntityData] = array(EntityData)
    values: list[ValueData] = array(ValueData)


@response_to(DescribeClientQuotasRequest)
class DescribeClientQuotasResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)
    entries: list[EntryData] | None = array(EntryData, nullable_since=0)


@message(key=74, versions=(0, 1), flexible_since=0)
class ListConfigResourcesRequest:
    """No types are all that there are; version 0 asks for those of client metrics."""

    resource_types: list[int] = int8_array(since=1)


@struct
class ConfigResource:
    resource_name: str = string()
    resource_type: int = int8(since=1, default=16)


@response_to(ListConfigResourcesRequest)
class ListConfigResourcesResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    config_resources: list[ConfigResource] = array(ConfigResource)
