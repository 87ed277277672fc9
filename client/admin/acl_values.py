"""Access control lists as `tidelog.Admin` takes and returns them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AclBinding:
    """Allows or denies a principal an operation on the resources that a pattern names."""

    resource_type: str
    """"topic", "group", "cluster", "transactional-id", "delegation-token" or "user"."""
    resource: str = "kafka-cluster"
    """A name, the beginning of names (`pattern_type` "prefixed"), or "*"; the default names the cluster."""
    pattern_type: str = "literal"
    principal: str
    """"User:alice"; "User:*" is everybody."""
    host: str = "*"
    """An address, or "*"."""
    operation: str
    """"read", "write", "create", "delete", "alter", "describe", "cluster-action", "describe-configs", "alter-configs",
    "idempotent-write", ... or "all"."""
    permission: str = "allow"
    """"allow" or "deny". A denial wins over every allowance."""

    def __str__(self) -> str:
        pattern = f"{self.resource}*" if self.pattern_type == "prefixed" else self.resource
        return f"{self.permission} {self.principal} from {self.host} {self.operation} on {self.resource_type} {pattern}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AclFilter:
    """None matches anything. The `pattern_type` "match" matches every ACL that applies to a resource of this name."""

    resource_type: str | None = None
    resource: str | None = None
    pattern_type: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: str | None = None
    permission: str | None = None
