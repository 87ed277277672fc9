"""Translates the requests of access control lists. The codes are those of Kafka's enums.

The reply to a whole request that is rejected has the error in each of its rows, as Kafka's.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.metadata import acls
from tidelog.metadata.acls import AclBinding, AclFilter
from tidelog.metadata.decision import Outcome
from tidelog.model.errors import TidelogError
from tidelog.rpc.kafka import errors
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import security as messages
from tidelog.rpc.kafka.services import Context

ANY = 1
RESOURCE_TYPES = {2: "topic", 3: "group", 4: "cluster", 5: "transactional-id", 6: "delegation-token", 7: "user"}
PATTERN_TYPES = {2: acls.MATCH, 3: acls.LITERAL, 4: acls.PREFIXED}
OPERATIONS = {
    2: acls.ALL,
    3: "read",
    4: "write",
    5: "create",
    6: "delete",
    7: "alter",
    8: "describe",
    9: "cluster-action",
    10: "describe-configs",
    11: "alter-configs",
    12: "idempotent-write",
    13: "create-tokens",
    14: "describe-tokens",
    15: "two-phase-commit",
}
PERMISSIONS = {2: acls.DENY, 3: acls.ALLOW}
_TYPE_CODES = {name: code for code, name in RESOURCE_TYPES.items()}
_PATTERN_CODES = {name: code for code, name in PATTERN_TYPES.items()}
_OPERATION_CODES = {name: code for code, name in OPERATIONS.items()}
_PERMISSION_CODES = {name: code for code, name in PERMISSIONS.items()}


async def describe_acls(request: messages.DescribeAclsRequest, context: Context) -> messages.DescribeAclsResponse:
    try:
        bindings = await context.services.acls.describe(context.request, _filter(request))
    except TidelogError as error:
        return messages.DescribeAclsResponse(
            error_code=errors.code_of(error), error_message=errors.message_of(error), resources=[]
        )
    resources: dict[tuple[str, str, str], messages.DescribeAclsResource] = {}
    for binding in bindings:
        key = binding.resource_type, binding.resource, binding.pattern_type
        resource = resources.get(key)
        if resource is None:
            resource = resources[key] = messages.DescribeAclsResource(
                resource_type=_TYPE_CODES[binding.resource_type],
                resource_name=binding.resource,
                pattern_type=_PATTERN_CODES[binding.pattern_type],
                acls=[],
            )
        resource.acls.append(
            messages.AclDescription(
                principal=binding.principal,
                host=binding.host,
                operation=_OPERATION_CODES[binding.operation],
                permission_type=_PERMISSION_CODES[binding.permission],
            )
        )
    return messages.DescribeAclsResponse(error_message=None, resources=list(resources.values()))


async def create_acls(request: messages.CreateAclsRequest, context: Context) -> messages.CreateAclsResponse:
    bindings = tuple(map(_binding, request.creations))
    try:
        outcomes = await context.services.acls.create(context.request, acls.CreateAcls(bindings=bindings))
    except TidelogError as error:
        outcomes = [Outcome("", error.code, str(error))] * len(bindings)
    return messages.CreateAclsResponse(
        results=[
            messages.AclCreationResult(
                error_code=errors.code(outcome.error), error_message=errors.row_message(outcome.error, outcome.message)
            )
            for outcome in outcomes
        ]
    )


async def delete_acls(request: messages.DeleteAclsRequest, context: Context) -> messages.DeleteAclsResponse:
    filters = tuple(map(_filter, request.filters))
    try:
        rows = await context.services.acls.delete(context.request, acls.DeleteAcls(filters=filters))
    except TidelogError as error:
        rows = [acls.DeletedByFilter(error=error.code, message=str(error))] * len(filters)
    return messages.DeleteAclsResponse(filter_results=list(map(_deleted, rows)))


def _deleted(row: acls.DeletedByFilter) -> messages.DeleteAclsFilterResult:
    return messages.DeleteAclsFilterResult(
        error_code=errors.code(row.error),
        error_message=errors.row_message(row.error, row.message),
        matching_acls=[
            messages.DeleteAclsMatchingAcl(
                error_message=None,
                resource_type=_TYPE_CODES[binding.resource_type],
                resource_name=binding.resource,
                pattern_type=_PATTERN_CODES[binding.pattern_type],
                principal=binding.principal,
                host=binding.host,
                operation=_OPERATION_CODES[binding.operation],
                permission_type=_PERMISSION_CODES[binding.permission],
            )
            for binding in row.deleted
        ],
    )


# Codes. The controller rejects what is not a name here.


def _binding(creation: messages.AclCreation) -> AclBinding:
    return AclBinding(
        resource_type=_name(RESOURCE_TYPES, creation.resource_type),
        resource=creation.resource_name,
        pattern_type=_name(PATTERN_TYPES, creation.resource_pattern_type),
        principal=creation.principal,
        host=creation.host,
        operation=_name(OPERATIONS, creation.operation),
        permission=_name(PERMISSIONS, creation.permission_type),
    )


def _filter(row: messages.DescribeAclsRequest | messages.DeleteAclsFilter) -> AclFilter:
    return AclFilter(
        resource_type=_name_or_any(RESOURCE_TYPES, row.resource_type_filter),
        resource=row.resource_name_filter,
        pattern_type=_name_or_any(PATTERN_TYPES, row.pattern_type_filter),
        principal=row.principal_filter,
        host=row.host_filter,
        operation=_name_or_any(OPERATIONS, row.operation),
        permission=_name_or_any(PERMISSIONS, row.permission_type),
    )


def _name(names: Mapping[int, str], code: int) -> str:
    return names.get(code, f"code {code}")


def _name_or_any(names: Mapping[int, str], code: int) -> str | None:
    return None if code == ANY else _name(names, code)


HANDLERS: dict[int, Entry] = {
    apis.DESCRIBE_ACLS.key: Entry(describe_acls),
    apis.CREATE_ACLS.key: Entry(create_acls),
    apis.DELETE_ACLS.key: Entry(delete_acls),
}
