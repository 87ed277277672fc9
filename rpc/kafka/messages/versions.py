"""ApiVersions: which keys and versions a broker serves."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s


@s.message(key=18, versions=(0, 4), flexible_since=3)
class ApiVersionsRequest:
    client_software_name: str = s.string(since=3)
    client_software_version: str = s.string(since=3)


@s.struct
class ApiVersion:
    api_key: int = s.int16()
    min_version: int = s.int16()
    max_version: int = s.int16()


@s.struct
class SupportedFeatureKey:
    name: str = s.string()
    min_version: int = s.int16()
    max_version: int = s.int16()


@s.struct
class FinalizedFeatureKey:
    name: str = s.string()
    max_version_level: int = s.int16()
    min_version_level: int = s.int16()


@s.response_to(ApiVersionsRequest)
class ApiVersionsResponse:
    error_code: int = s.int16()
    api_keys: list[ApiVersion] = s.array(ApiVersion)
    throttle_time_ms: int = s.int32(since=1)
    supported_features: list[SupportedFeatureKey] = s.array(SupportedFeatureKey, since=3, tag=0)
    finalized_features_epoch: int = s.int64(since=3, default=-1, tag=1)
    finalized_features: list[FinalizedFeatureKey] = s.array(FinalizedFeatureKey, since=3, tag=2)
    zk_migration_ready: bool = s.boolean(since=3, tag=3)
