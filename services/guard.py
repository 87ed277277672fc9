"""Authorizes, charges and audits requests: the way of services to `Authorizer`, `Quotas` and `Auditor` of a node. Pure.

Every public method of a service takes a `RequestContext` first. Before it acts it authorizes the request and charges
it. A charge never waits: it adds to `RequestContext.throttle_ms`, and the API server delays the client.
"""

from __future__ import annotations

from typing import Protocol

from tidelog.metadata.image import Topic
from tidelog.services.authorization import (
    CLUSTER,
    AllowAll,
    AuthorizationFailedError,
    Authorizer,
    Operation,
    Resource,
    ResourceType,
    require,
    require_known_id,
)
from tidelog.services.context import RequestContext
from tidelog.services.quotas import Charge, Quotas, Unlimited


class Auditor(Protocol):
    def decided(self, context: RequestContext, request: object, reply: object) -> None:
        """The active controller has decided on a client's request. `reply` has the outcomes, or is the error."""
        ...


class NoAudit:
    """Writes nothing."""

    def decided(self, context: RequestContext, request: object, reply: object) -> None:
        return None


class Guard:
    def __init__(
        self, authorizer: Authorizer | None = None, quotas: Quotas | None = None, auditor: Auditor | None = None
    ) -> None:
        """The default allows everything, delays nothing and writes nothing."""
        self.authorizer = authorizer or AllowAll()
        self.auditor = auditor or NoAudit()
        self._quotas = quotas or Unlimited()

    def with_authorizer(self, authorizer: Authorizer) -> Guard:
        return Guard(authorizer, self._quotas, self.auditor)

    # Authorization.

    def rejection(
        self, context: RequestContext, operation: Operation, resource: Resource | str
    ) -> AuthorizationFailedError | None:
        """Return why the principal may not do this; None if it may. For rows that fail one by one. A `str` names a
        topic."""
        try:
            self.authorize(context, operation, resource)
        except AuthorizationFailedError as error:
            return error
        return None

    def authorize(self, context: RequestContext, operation: Operation, resource: Resource | str) -> None:
        """Raise `AuthorizationFailedError` unless the principal may do this. A `str` names a topic."""
        if isinstance(resource, str):
            resource = Resource(ResourceType.TOPIC, resource)
        require(self.authorizer, context, operation, resource)

    def allows(self, context: RequestContext, operation: Operation, resource: Resource | str) -> bool:
        if isinstance(resource, str):
            resource = Resource(ResourceType.TOPIC, resource)
        return self.authorizer.authorize(context, operation, resource)

    def authorize_by_id(self, context: RequestContext, operation: Operation, topic: Topic) -> None:
        """As `authorize`, for a topic that the request names by its id: `UnknownTopicIdError` if the principal may not
        describe it."""
        require_known_id(self.authorizer, context, operation, topic.name, topic.topic_id)

    @property
    def allows_all(self) -> bool:
        """True without an authorizer."""
        return isinstance(self.authorizer, AllowAll)

    # Charges.

    def charge(self, context: RequestContext, charge: Charge = Charge.REQUEST, amount: int = 1) -> None:
        if delay_ms := self._quotas.charge(context, charge, amount):
            context.throttle(delay_ms)

    # Requests about the cluster as a whole.

    def admit_query(self, context: RequestContext) -> None:
        self.authorize(context, Operation.DESCRIBE, CLUSTER)
        self.charge(context)

    def admit_change(self, context: RequestContext, count: int = 1) -> None:
        self.authorize(context, Operation.ALTER, CLUSTER)
        self.charge(context, Charge.MUTATIONS, count)
