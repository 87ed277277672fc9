"""SaslHandshake, SaslAuthenticate, and the three requests of access control lists."""

from __future__ import annotations

from tidelog.rpc.kafka import schema as s

LITERAL = 3
"""Type of a pattern: the name itself."""


@s.message(key=17, versions=(0, 1))
class SaslHandshakeRequest:
    mechanism: str = s.string()


@s.response_to(SaslHandshakeRequest)
class SaslHandshakeResponse:
    error_code: int = s.int16()
    mechanisms: list[str] = s.string_array()


@s.message(key=36, versions=(0, 2), flexible_since=2)
class SaslAuthenticateRequest:
    auth_bytes: bytes = s.binary()


@s.response_to(SaslAuthenticateRequest)
class SaslAuthenticateResponse:
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    auth_bytes: bytes = s.binary()
    session_lifetime_ms: int = s.int64(since=1)


@s.message(key=29, versions=(1, 3), flexible_since=2)
class DescribeAclsRequest:
    resource_type_filter: int = s.int8()
    resource_name_filter: str | None = s.string(nullable_since=0)
    pattern_type_filter: int = s.int8(since=1, default=LITERAL)
    principal_filter: str | None = s.string(nullable_since=0)
    host_filter: str | None = s.string(nullable_since=0)
    operation: int = s.int8()
    permission_type: int = s.int8()


@s.struct
class AclDescription:
    principal: str = s.string()
    host: str = s.string()
    operation: int = s.int8()
    permission_type: int = s.int8()


@s.struct
class DescribeAclsResource:
    resource_type: int = s.int8()
    resource_name: str = s.string()
    pattern_type: int = s.int8(since=1, default=LITERAL)
    acls: list[AclDescription] = s.array(AclDescription)


@s.response_to(DescribeAclsRequest)
class DescribeAclsResponse:
    throttle_time_ms: int = s.int32()
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    resources: list[DescribeAclsResource] = s.array(DescribeAclsResource)


@s.struct
class AclCreation:
    resource_type: int = s.int8()
    resource_name: str = s.string()
    resource_pattern_type: int = s.int8(since=1, default=LITERAL)
    principal: str = s.string()
    host: str = s.string()
    operation: int = s.int8()
    permission_type: int = s.int8()


@s.message(key=30, versions=(1, 3), flexible_since=2)
class CreateAclsRequest:
    creations: list[AclCreation] = s.array(AclCreation)


@s.struct
class AclCreationResult:
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)


@s.response_to(CreateAclsRequest)
class CreateAclsResponse:
    throttle_time_ms: int = s.int32()
    results: list[AclCreationResult] = s.array(AclCreationResult)


@s.struct
class DeleteAclsFilter:
    resource_type_filter: int = s.int8()
    resource_name_filter: str | None = s.string(nullable_since=0)
    pattern_type_filter: int = s.int8(since=1, default=LITERAL)
    principal_filter: str | None = s.string(nullable_since=0)
    host_filter: str | None = s.string(nullable_since=0)
    operation: int = s.int8()
    permission_type: int = s.int8()


@s.message(key=31, versions=(1, 3), flexible_since=2)
class DeleteAclsRequest:
    filters: list[DeleteAclsFilter] = s.array(DeleteAclsFilter)


@s.struct
class DeleteAclsMatchingAcl:
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    resource_type: int = s.int8()
    resource_name: str = s.string()
    pattern_type: int = s.int8(since=1, default=LITERAL)
    principal: str = s.string()
    host: str = s.string()
    operation: int = s.int8()
    permission_type: int = s.int8()


@s.struct
class DeleteAclsFilterResult:
    error_code: int = s.int16()
    error_message: str | None = s.string(nullable_since=0)
    matching_acls: list[DeleteAclsMatchingAcl] = s.array(DeleteAclsMatchingAcl)


@s.response_to(DeleteAclsRequest)
class DeleteAclsResponse:
    throttle_time_ms: int = s.int32()
    filter_results: list[DeleteAclsFilterResult] = s.array(DeleteAclsFilterResult)
