"""The one place where a request is authorized. Every service method calls `Authorizer.authorize` before it acts. Pure.

The names of operations and resource types are Kafka's. `AllowAll` serves nodes without an authorizer,
`acl_authorizer.AclAuthorizer` the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tidelog.model.errors import ErrorCode, TidelogError, UnknownTopicIdError
from tidelog.services.context import RequestContext


class Operation(Enum):
    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DELETE = "Delete"
    ALTER = "Alter"
    DESCRIBE = "Describe"
    CLUSTER_ACTION = "ClusterAction"
    DESCRIBE_CONFIGS = "DescribeConfigs"
    ALTER_CONFIGS = "AlterConfigs"
    IDEMPOTENT_WRITE = "IdempotentWrite"


class ResourceType(Enum):
    TOPIC = "Topic"
    GROUP = "Group"
    CLUSTER = "Cluster"
    TRANSACTIONAL_ID = "TransactionalId"


@dataclass(frozen=True, slots=True)
class Resource:
    type: ResourceType
    name: str


CLUSTER = Resource(ResourceType.CLUSTER, "kafka-cluster")


class Authorizer(Protocol):
    def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
        """Return whether the principal may do this. Cheap: called once for each resource of a request."""
        ...

    def authorize_any(self, context: RequestContext, operation: Operation, kind: ResourceType) -> bool:
        """Return whether the principal may do this with any resource of this type, known or not."""
        ...


class AllowAll:
    """Authorizes every request."""

    def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
        return True

    def authorize_any(self, context: RequestContext, operation: Operation, kind: ResourceType) -> bool:
        return True


_CODES = {
    ResourceType.TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ResourceType.GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ResourceType.CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


class AuthorizationFailedError(TidelogError):
    """The code depends on the type of the resource."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


def require(authorizer: Authorizer, context: RequestContext, operation: Operation, resource: Resource) -> None:
    """Raises `AuthorizationFailedError` unless the principal may do this."""
    if not authorizer.authorize(context, operation, resource):
        name = f"{resource.type.value} {resource.name!r}"
        message = f"{context.principal} may not {operation.value} {name}: grant it, or use another principal"
        raise AuthorizationFailedError(message, _CODES[resource.type])


def require_by_id(
    authorizer: Authorizer, context: RequestContext, operation: Operation, name: str, topic_id: object
) -> None:
    """As `require`, for a topic that the request names by its id. The reply does not tell its name to a principal that
    may not describe it. A client that has the id learns that it is refused, as in Kafka: it reads and writes by id, and
    must not take the refusal for a deletion."""
    resource = Resource(ResourceType.TOPIC, name)
    if authorizer.authorize(context, operation, resource):
        return
    if not authorizer.authorize(context, Operation.DESCRIBE, resource):
        raise AuthorizationFailedError(
            f"{context.principal} may not {operation.value} Topic {topic_id}: grant it, or use another principal",
            _CODES[ResourceType.TOPIC],
        )
    require(authorizer, context, operation, resource)


def require_known_id(
    authorizer: Authorizer, context: RequestContext, operation: Operation, name: str, topic_id: object
) -> None:
    """As `require_by_id`, for questions about topics: the id is unknown to a principal that may not describe it."""
    if not authorizer.authorize(context, Operation.DESCRIBE, Resource(ResourceType.TOPIC, name)):
        raise UnknownTopicIdError(f"there is no topic with id {topic_id}")
    require_by_id(authorizer, context, operation, name, topic_id)
