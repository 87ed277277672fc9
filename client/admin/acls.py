"""Admin operations on access control lists. Any node forwards them to the active controller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidelog.client.admin import conversions
from tidelog.client.admin.acl_values import AclBinding, AclFilter
from tidelog.client.admin.calls import AdminCalls, change, query
from tidelog.client.admin.values import Outcomes
from tidelog.client.cluster import error_in
from tidelog.model.errors import InvalidRequestError
from tidelog.rpc.v1 import admin_pb2 as pb

_FIELDS = ("resource_type", "resource", "pattern_type", "principal", "host", "operation", "permission")


class AclOperations(AdminCalls):
    @query
    async def describe_acls(
        self, matching: AclFilter | None = None, *, timeout: float | None = None
    ) -> tuple[AclBinding, ...]:
        """Return the ACLs that the filter matches, or all of them, in a fixed order. SECURITY_DISABLED on nodes without
        an authorizer."""
        request = pb.DescribeAclsRequest(filter=_filter_message(AclFilter() if matching is None else matching))
        response = await self._ask("Admin", "DescribeAcls", request)
        return tuple(map(_binding, response.acls))

    @change
    async def create_acls(
        self,
        acls: Iterable[AclBinding],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[AclBinding, None]:
        """Create ACLs; one that exists is no error."""
        bindings = _checked(acls, AclBinding)
        rows = [pb.Acl(**{name: getattr(binding, name) for name in _FIELDS}) for binding in bindings]
        request = pb.CreateAclsRequest(acls=rows, validate_only=validate_only)
        response = await self._ask("Admin", "CreateAcls", request, is_change=True)
        outcomes = conversions.outcomes(
            (binding, error_in(row)) for binding, row in zip(bindings, response.acls, strict=True)
        )
        return conversions.whole(outcomes, partial=partial)

    @change
    async def delete_acls(
        self,
        filters: Iterable[AclFilter],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[AclFilter, tuple[AclBinding, ...]]:
        """Delete all ACLs that a filter matches. Returns those that each filter has deleted, or would with
        `validate_only`."""
        asked = _checked(filters, AclFilter)
        request = pb.DeleteAclsRequest(filters=map(_filter_message, asked), validate_only=validate_only)
        response = await self._ask("Admin", "DeleteAcls", request, is_change=True)
        outcomes = conversions.outcomes(
            (acl_filter, error_in(row) or tuple(map(_binding, row.acls)))
            for acl_filter, row in zip(asked, response.filters, strict=True)
        )
        return conversions.whole(outcomes, partial=partial)


def _checked(rows: Iterable[Any], kind: type[Any]) -> list[Any]:
    """Without duplicates. TypeError for one row instead of several."""
    checked = [] if isinstance(rows, kind) else list(dict.fromkeys(rows))
    if isinstance(rows, kind) or not all(isinstance(row, kind) for row in checked):
        raise TypeError(f"use a list of {kind.__name__}")
    if not checked:
        raise InvalidRequestError(f"nothing to do: name at least one {kind.__name__}")
    return checked


def _filter_message(acl_filter: AclFilter) -> pb.AclFilter:
    return pb.AclFilter(**{name: getattr(acl_filter, name) for name in _FIELDS})


def _binding(message: pb.Acl) -> AclBinding:
    return AclBinding(**{name: getattr(message, name) for name in _FIELDS})
