"""The methods of `tidelog.v1.Admin` about access control lists."""

from __future__ import annotations

from tidelog.metadata import acls
from tidelog.rpc.grpc.errors import outcome
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.services.context import RequestContext
from tidelog.services.services import Services

_FIELDS = ("resource_type", "resource", "pattern_type", "principal", "host", "operation", "permission")
"""Of an ACL and of a filter, in messages and in the metadata."""


class AclHandlers:
    _services: Services

    async def describe_acls(self, request: pb.DescribeAclsRequest, caller: RequestContext) -> pb.DescribeAclsResponse:
        bindings = await self._services.acls.describe(caller, _filter(request.filter))
        return pb.DescribeAclsResponse(acls=map(_message, bindings))

    async def create_acls(self, request: pb.CreateAclsRequest, caller: RequestContext) -> pb.CreateAclsResponse:
        bindings = tuple(acls.AclBinding(**{name: getattr(acl, name) for name in _FIELDS}) for acl in request.acls)
        change = acls.CreateAcls(bindings=bindings, validate_only=request.validate_only)
        rows = await self._services.acls.create(caller, change)
        return pb.CreateAclsResponse(
            acls=[common.Outcome(name=row.name, error=outcome(row.error, row.message)) for row in rows]
        )

    async def delete_acls(self, request: pb.DeleteAclsRequest, caller: RequestContext) -> pb.DeleteAclsResponse:
        change = acls.DeleteAcls(filters=tuple(map(_filter, request.filters)), validate_only=request.validate_only)
        rows = await self._services.acls.delete(caller, change)
        return pb.DeleteAclsResponse(
            filters=[
                pb.DeletedAcls(acls=map(_message, row.deleted), error=outcome(row.error, row.message)) for row in rows
            ]
        )


def _filter(message: pb.AclFilter) -> acls.AclFilter:
    return acls.AclFilter(
        **{name: getattr(message, name) if message.HasField(name) else None for name in _FIELDS}  # type: ignore[arg-type]
    )


def _message(binding: acls.AclBinding) -> pb.Acl:
    return pb.Acl(**{name: getattr(binding, name) for name in _FIELDS})
