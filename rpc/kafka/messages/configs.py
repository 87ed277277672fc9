"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s


@s.struct
class DescribeConfigsResource:
    resource_type: int = s.int8()
    resource_name: str = s.string()
    configuration_keys: list[str] | None = s.string_array(nullable_since=0)


@s.message(key=32, versions=(1, 4), flexible_since=4)
class DescribeConfigsRequest:
    resources: list[DescribeConfigsResource] = s.array(DescribeConfigsResource)
    include_synonyms: bool = s.boolean(since=1)
    include_documentation: bool = s.boolean(since=3)


@s.struct
class DescribeConfigsSynonym:
    name: str = s.string()
    value: str | None = s.string(nullable_since=0)
    source: int = s.int8()


@s.struct
class DescribeConfigsResourceResult:
    name: str = s.string()
    value: str | None = s.string(nullable_since=0)
    read_only: bool = s.boolean()
    config_source: int = s.int8(since=1, default=-1)
    is_sensitive: bool = s.boolean()
    synonyms: list[DescribeConfigsSynonym] = s.array(DescribeConfigsSynonym, since=1)
    config_type: int = s.int8(since=3)
    documentation: str | None = s.string(since=3, nullable_since=0)


@s.struct
class DescribeConfigsResult:
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    resource_type: int = s.int8()
    resource_name: str = s.string()
    configs: list[DescribeConfigsResourceResult] = s.array(DescribeConfigsResourceResult)


@s.response_to(DescribeConfigsRequest)
class DescribeConfigsResponse:
    throttle_time_ms: int = s.int32()
    results: list[DescribeConfigsResult] = s.array(DescribeConfigsResult, large=True)


@s.struct
class AlterableConfig:
    name: str = s.string()
    value: str | None = s.string(nullable_since=0)


@s.struct
class AlterConfigsResource:
    resource_type: int = s.int8()
    resource_name: str = s.string()
    configs: list[AlterableConfig] = s.array(AlterableConfig)


@s.message(key=33, versions=(0, 2), flexible_since=2)
class AlterConfigsRequest:
    resources: list[AlterConfigsResource] = s.array(AlterConfigsResource)
    validate_only: bool = s.boolean()


@s.struct
class AlterConfigsResourceResponse:
    """Of AlterConfigs and of IncrementalAlterConfigs."""

    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    resource_type: int = s.int8()
    resource_name: str = s.string()


@s.response_to(AlterConfigsRequest)
class AlterConfigsResponse:
    throttle_time_ms: int = s.int32()
    responses: list[AlterConfigsResourceResponse] = s.array(AlterConfigsResourceResponse)


@s.struct
class IncrementalAlterableConfig:
    """`config_operation`: 0 set, 1 delete, 2 append, 3 subtract."""

    name: str = s.string()
    config_operation: int = s.int8()
    value: str | None = s.string(nullable_since=0)


@s.struct
class IncrementalAlterConfigsResource:
    resource_type: int = s.int8()
    resource_name: str = s.string()
    configs: list[IncrementalAlterableConfig] = s.array(IncrementalAlterableConfig)


@s.message(key=44, versions=(0, 1), flexible_since=1)
class IncrementalAlterConfigsRequest:
    resources: list[IncrementalAlterConfigsResource] = s.array(IncrementalAlterConfigsResource)
    validate_only: bool = s.boolean()


@s.response_to(IncrementalAlterConfigsRequest)
class IncrementalAlterConfigsResponse:
    throttle_time_ms: int = s.int32()
    responses: list[AlterConfigsResourceResponse] = s.array(AlterConfigsResourceResponse)
