"""`NodeAccess`: metadata, forwarding, limits and authorization that all services of a node use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline
from tidelog.services.forwarding import Forwarder
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.metadata_cache import MetadataCache

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """The reply to a metadata query."""

    rows: tuple[T, ...]
    stale_ms: int | None
    """The age of this node's copy, if the reply is from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """This node's metadata, its way to other nodes, its limits, and the hooks of authorization, quotas and audit."""

    cache: MetadataCache
    forwarder: Forwarder
    limits: RequestLimits
    guard: Guard

    def deadline(self, context: RequestContext) -> Deadline:
        return Deadline(context, default_ms=self.limits.admin_timeout_ms, max_ms=self.limits.admin_timeout_max_ms)

    async def ask(self, context: RequestContext, request: object) -> Any:
        """Return the active controller's reply, within the limits of an admin request."""
        return await self.forwarder.ask(context, request, timeout_ms=self.deadline(context).left_ms())

    async def read(self, context: RequestContext, question: object, *, allow_stale: bool) -> tuple[Any, int | None]:
        """Return the reply, and its age in ms if it is that of this node's copy."""
        reading = Reading(self, context, allow_stale=allow_stale)
        return await reading.ask(question), reading.stale_ms


class Reading:
    """The questions of one request. An active controller is awaited once, not for each of them: later ones are answered
    from this node's copy, and so are their errors."""

    def __init__(self, node: NodeAccess, context: RequestContext, *, allow_stale: bool) -> None:
        self.stale_ms: int | None = None
        """The age of this node's copy, once replies are from there."""
        self._node = node
        self._context = context
        self._deadline = node.deadline(context)
        self._allow_stale = allow_stale

    async def ask(self, question: object) -> Any:
        forwarder = self._node.forwarder
        if self.stale_ms is None:
            asking = forwarder.ask(self._context, question, timeout_ms=self._deadline.left_ms())
            if not self._allow_stale:
                return await asking
            reply, self.stale_ms = await forwarder.prefer_active(asking)
            if self.stale_ms is None:
                return reply
        return forwarder.read_cache(question)
