"""Authorized operations as Kafka returns them: one bit for each code of `AclOperation`.

Without an authorizer every client may carry out all operations of a resource. Pure.
"""

from __future__ import annotations

from enum import IntEnum


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
