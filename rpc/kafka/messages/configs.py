"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs."""

from __future__ import annotations

from tidelog.rpc.kafka.schema import (
    array,
    boolean,
    int8,
    int16,
    int32,
    message,
    response_to,
    string,
    string_array,
    struct,
)


@struct
class DescribeConfigsResource:
    resource_type: int = int8()
    resource_name: str = string()
    configuration_keys: list[str] | None = string_array(nullable_since=0)


@message(key=32, versions=(1, 4), flexible_since=4)
class DescribeConfigsRequest:
    resources: list[DescribeConfigsResource] = array(DescribeConfigsResource)
    include_synonyms: bool = boolean(since=1)
    include_documentation: bool = boolean(since=3)


@struct
class DescribeConfigsSynonym:
    name: str = string()
    value: str | None = string(nullable_since=0)
    source: int = int8()


@struct
class DescribeConfigsResourceResult:
    name: str = string()
    value: str | None = string(nullable_since=0)
    read_only: bool = boolean()
    config_source: int = int8(since=1, default=-1)
    is_sensitive: bool = boolean()
    synonyms: list[DescribeConfigsSynonym] = array(DescribeConfigsSynonym, since=1)
    config_type: int = int8(since=3)
    documentation: str | None = string(since=3, nullable_since=0)


@struct
class DescribeConfigsResult:
    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)
    resource_type: int = int8()
    resource_name: str = string()
    configs: list[DescribeConfigsResourceResult] = array(DescribeConfigsResourceResult)


@response_to(DescribeConfigsRequest)
class DescribeConfigsResponse:
    throttle_time_ms: int = int32()
    results: list[DescribeConfigsResult] = array(DescribeConfigsResult, large=True)


@struct
class AlterableConfig:
    name: str = string()
    value: str | None = string(nullable_since=0)


@struct
class AlterConfigsResource:
    resource_type: int = int8()
    resource_name: str = string()
    configs: list[AlterableConfig] = array(AlterableConfig)


@message(key=33, versions=(0, 2), flexible_since=2)
class AlterConfigsRequest:
    resources: list[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = boolean()


@struct
class AlterConfigsResourceResponse:
    """Of AlterConfigs and of IncrementalAlterConfigs."""

    error_code: int = int16()
    error_message: str | None = string(nullable_since=0)
    resource_type: int = int8()
    resource_name: str = string()


@response_to(AlterConfigsRequest)
class AlterConfigsResponse:
    throttle_time_ms: int = int32()
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)


@struct
class IncrementalAlterableConfig:
    """`config_operation`: 0 set, 1 delete, 2 append, 3 subtract."""

    name: str = string()
    config_operation: int = int8()
    value: str | None = string(nullable_since=0)


@struct
class IncrementalAlterConfigsResource:
    resource_type: int = int8()
    resource_name: str = string()
    configs: list[IncrementalAlterableConfig] = array(IncrementalAlterableConfig)


@message(key=44, versions=(0, 1), flexible_since=1)
class IncrementalAlterConfigsRequest:
    resources: list[IncrementalAlterConfigsResource] = array(IncrementalAlterConfigsResource)
    validate_only: bool = boolean()


@response_to(IncrementalAlterConfigsRequest)
class IncrementalAlterConfigsResponse:
    throttle_time_ms: int = int32()
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)
