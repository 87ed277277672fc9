"""AlterReplicaLogDirs, UpdateFeatures, UnregisterBroker, and lists of client quotas and config resources."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s


@s.struct
class AlterReplicaLogDirTopic:
    name: str = s.string()
    partitions: list[int] = s.int32_array()


@s.struct
class AlterReplicaLogDir:
    path: str = s.string()
    topics: list[AlterReplicaLogDirTopic] = s.array(AlterReplicaLogDirTopic)


@s.message(key=34, versions=(1, 2), flexible_since=2)
class AlterReplicaLogDirsRequest:
    dirs: list[AlterReplicaLogDir] = s.array(AlterReplicaLogDir)


@s.struct
class AlterReplicaLogDirPartitionResult:
    partition_index: int = s.int32()
    error_code: int = s.int16()


@s.struct
class AlterReplicaLogDirTopicResult:
    topic_name: str = s.string()
    partitions: list[AlterReplicaLogDirPartitionResult] = s.array(AlterReplicaLogDirPartitionResult)


@s.response_to(AlterReplicaLogDirsRequest)
class AlterReplicaLogDirsResponse:
    throttle_time_ms: int = s.int32()
    results: list[AlterReplicaLogDirTopicResult] = s.array(AlterReplicaLogDirTopicResult)


@s.struct
class FeatureUpdateKey:
    feature: str = s.string()
    max_version_level: int = s.int16()
    allow_downgrade: bool = s.boolean(until=0)
    upgrade_type: int = s.int8(since=1, default=1)


@s.message(key=57, versions=(0, 2), flexible_since=0)
class UpdateFeaturesRequest:
    timeout_ms: int = s.int32(default=60_000)
    feature_updates: list[FeatureUpdateKey] = s.array(FeatureUpdateKey)
    validate_only: bool = s.boolean(since=1)


@s.struct
class UpdatableFeatureResult:
    feature: str = s.string()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)


@s.response_to(UpdateFeaturesRequest)
class UpdateFeaturesResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    results: list[UpdatableFeatureResult] = s.array(UpdatableFeatureResult, until=1)


@s.message(key=64, versions=(0, 0), flexible_since=0)
class UnregisterBrokerRequest:
    broker_id: int = s.int32()


@s.response_to(UnregisterBrokerRequest)
class UnregisterBrokerResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)


@s.struct
class ComponentData:
    entity_type: str = s.string()
    match_type: int = s.int8()
    match: str | None = s.string(nullable_since=0)


@s.message(key=48, versions=(0, 1), flexible_since=1)
class DescribeClientQuotasRequest:
    components: list[ComponentData] = s.array(ComponentData)
    strict: bool = s.boolean()


@s.struct
class EntityData:
    entity_type: str = s.string()
    entity_name: str | None = s.string(nullable_since=0)


@s.struct
class ValueData:
    key: str = s.string()
    value: float = s.float64()


@s.struct
class EntryData:
    entity: list[EntityData] = s.array(EntityData)
    values: list[ValueData] = s.array(ValueData)


@s.response_to(DescribeClientQuotasRequest)
class DescribeClientQuotasResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    entries: list[EntryData] | None = s.array(EntryData, nullable_since=0)


@s.message(key=74, versions=(0, 1), flexible_since=0)
class ListConfigResourcesRequest:
    """No types are all that there are; version 0 asks for those of client metrics."""

    resource_types: list[int] = s.int8_array(since=1)


@s.struct
class ConfigResource:
    resource_name: str = s.string()
    resource_type: int = s.int8(since=1, default=16)


@s.response_to(ListConfigResourcesRequest)
class ListConfigResourcesResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    config_resources: list[ConfigResource] = s.array(ConfigResource)
