"""Authorized operations as Kafka returns them: one bit for each code of `AclOperation`.

Without an authorizer every client may carry out all operations of a resource; with one, each is asked of it. Pure.
"""

from __future__ import annotations

from enum import IntEnum

from tidelog.services.authorization import Operation as ServiceOperation
from tidelog.services.authorization import Resource, ResourceType
from tidelog.services.context import RequestContext
from tidelog.services.guard import Guard


class Operation(IntEnum):
    """Kafka's codes."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def bits(*operations: Operation) -> int:
    return sum(1 << operation for operation in operations)


_CONFIGS = (Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS)
TOPIC = bits(
    Operation.READ,
    Operation.WRITE,
    Operation.CREATE,
    Operation.DESCRIBE,
    Operation.DELETE,
    Operation.ALTER,
    *_CONFIGS,
)
GROUP = bits(Operation.READ, Operation.DESCRIBE, Operation.DELETE, *_CONFIGS)
CLUSTER = bits(
    Operation.CREATE,
    Operation.CLUSTER_ACTION,
    Operation.IDEMPOTENT_WRITE,
    Operation.ALTER,
    Operation.DESCRIBE,
    *_CONFIGS,
)
_ALL = {ResourceType.TOPIC: TOPIC, ResourceType.GROUP: GROUP, ResourceType.CLUSTER: CLUSTER}
_NAMED = {operation: ServiceOperation[operation.name] for operation in Operation}


def allowed(guard: Guard, context: RequestContext, resource: Resource) -> int:
    """Returns the operations that the client may carry out on a resource, whether or not it exists."""
    every = _ALL[resource.type]
    if guard.allows_all:
        return every
    return bits(*(each for each in Operation if every & bits(each) and guard.allows(context, _NAMED[each], resource)))


def allowed_on_topic(guard: Guard, context: RequestContext, name: str) -> int:
    return allowed(guard, context, Resource(ResourceType.TOPIC, name))


def allowed_on_group(guard: Guard, context: RequestContext, name: str) -> int:
    return allowed(guard, context, Resource(ResourceType.GROUP, name))
