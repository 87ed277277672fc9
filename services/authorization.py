"""The one place where a request is authorized. Every service method calls `Authorizer.authorize` before it acts. Pure.

The names of operations and resource types are Kafka's. `AllowAll` serves until access control lists are enforced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tidelog.model.errors import ErrorCode, TidelogError
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


class AllowAll:
    """Authorizes every request."""

    def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
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
