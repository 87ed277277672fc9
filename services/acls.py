"""Describes, creates and deletes ACLs. The active controller decides, and its auditor hears of each change.

After a change the service waits up to SEE_MS until this node sees it: its next decision is by the new ACLs. Other nodes
follow as they read the metadata. Without an authorizer every method raises `SecurityDisabledError`, as Kafka does: ACLs
that nobody enforces would look like protection.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidelog.metadata.acls import (
    AclBinding,
    AclFilter,
    CreateAcls,
    DeleteAcls,
    DeletedAcls,
    DeletedByFilter,
    binding_of,
)
from tidelog.metadata.decision import Outcome, Outcomes
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.queries import DescribeAcls, DescribedAcls
from tidelog.model.admin_errors import SecurityDisabledError
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline
from tidelog.services.node import NodeAccess

ROWS_MAX = 10_000
"""ACLs or filters in one request."""
FILTERS_PER_QUESTION = 16
"""The controller compares each filter with all ACLs in one turn of its event loop."""


class AclService:
    def __init__(self, node: NodeAccess) -> None:
        self._node = node

    async def describe(self, context: RequestContext, matching: AclFilter) -> tuple[AclBinding, ...]:
        """Return the ACLs that the filter matches, in a fixed order. Needs Describe on the cluster."""
        self._node.guard.admit_query(context)
        self._check_enabled()
        reply = await self._node.ask(context, DescribeAcls(matching=matching))
        assert isinstance(reply, DescribedAcls), "the reply to its question"
        return reply.bindings

    async def create(self, context: RequestContext, request: CreateAcls) -> list[Outcome]:
        """Return one outcome for each ACL, in order; one that exists is no error. Needs Alter on the cluster."""
        node, bindings = self._node, request.bindings
        node.guard.admit_change(context, len(bindings))
        self._check(bindings)
        deadline = node.deadline(context)
        rows: list[Outcome] = []
        for first in range(0, len(bindings), node.limits.admin_items_max):
            some = bindings[first : first + node.limits.admin_items_max]
            try:
                reply = await self._ask(
                    context, CreateAcls(bindings=some, validate_only=request.validate_only), deadline
                )
            except TidelogError as error:
                if not first:
                    raise
                rows += [Outcome(_label(binding), error.code, str(error)) for binding in some]
                continue
            assert isinstance(reply, Outcomes), "the reply to its request"
            rows += reply.items
        created = {binding for binding, row in zip(bindings, rows, strict=True) if row.error is None}
        if created and not request.validate_only:
            await node.cache.until_seen(lambda image: created <= _bindings(image), deadline)
        return rows

    async def delete(self, context: RequestContext, request: DeleteAcls) -> list[DeletedByFilter]:
        """Return what each filter has deleted, in order. Needs Alter on the cluster."""
        node, filters = self._node, request.filters
        node.guard.admit_change(context, len(filters))
        self._check(filters)
        deadline = node.deadline(context)
        rows: list[DeletedByFilter] = []
        for first in range(0, len(filters), FILTERS_PER_QUESTION):
            some = filters[first : first + FILTERS_PER_QUESTION]
            try:
                reply = await self._ask(
                    context, DeleteAcls(filters=some, validate_only=request.validate_only), deadline
                )
            except TidelogError as error:
                if not first:
                    raise
                rows += [DeletedByFilter(error=error.code, message=str(error))] * len(some)
                continue
            assert isinstance(reply, DeletedAcls), "the reply to its request"
            rows += reply.filters
        deleted = {binding for row in rows for binding in row.deleted}
        if deleted and not request.validate_only:
            await node.cache.until_seen(lambda image: not deleted & _bindings(image), deadline)
        return rows

    async def _ask(self, context: RequestContext, request: CreateAcls | DeleteAcls, deadline: Deadline) -> object:
        return await self._node.forwarder.ask(context, request, timeout_ms=deadline.left_ms())

    def _check(self, rows: Sequence[object]) -> None:
        self._check_enabled()
        if len(rows) > ROWS_MAX:
            raise InvalidRequestError(f"{len(rows)} rows in one request; at most {ROWS_MAX}: split it")

    def _check_enabled(self) -> None:
        if self._node.guard.allows_all:
            raise SecurityDisabledError(
                "no authorizer is configured: there are no ACLs, and every client may do everything: "
                "set authorizer=acl on all nodes"
            )


def _label(binding: AclBinding) -> str:
    return f"{binding.principal[:80]} {binding.operation[:40]} {binding.resource_type[:40]}:{binding.resource[:80]}"


def _bindings(image: ClusterImage) -> frozenset[AclBinding]:
    return frozenset(map(binding_of, image.acls.values()))
