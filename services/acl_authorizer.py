"""Authorizes requests by the ACLs of the metadata image, as Kafka does. Pure.

    a request of a node                                   allowed (nodes have a listener of their own)
    a super user                                          allowed
    no ACL names the resource                             `allow.everyone.if.no.acl.found`
    an ACL denies the operation, or all                   denied
    an ACL allows the operation, all, or one above it     allowed
    otherwise                                             denied

An ACL names a resource literally, by a prefix, or as `*`; a principal or `User:*`; a host or `*`. Read, Write, Delete
and Alter allow Describe too, AlterConfigs allows DescribeConfigs. A denial of them denies nothing else.

The index of the ACLs is built again when the image has another map of them: one pass, at the first check after a
change. What was decided is kept until then, for at most `DECISIONS_MAX` resources of all principals and hosts. No
decision is older than the image.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata.acls import ALL, DENY, LITERAL
from tidelog.metadata.records import CreateAcl
from tidelog.model.errors import InvalidConfigError
from tidelog.model.principals import Principal
from tidelog.services.authorization import Operation, Resource, ResourceType
from tidelog.services.context import Api, RequestContext

DECISIONS_MAX = 100_000
CACHED_NAME_LENGTH_MAX = 512
"""Clients choose names; a longer one is evaluated each time."""
ANY = "*"
ANYBODY = "User:*"
_MAPPED_IPV4 = "::ffff:"

OPERATION_NAMES = {
    Operation.READ: "read",
    Operation.WRITE: "write",
    Operation.CREATE: "create",
    Operation.DELETE: "delete",
    Operation.ALTER: "alter",
    Operation.DESCRIBE: "describe",
    Operation.CLUSTER_ACTION: "cluster-action",
    Operation.DESCRIBE_CONFIGS: "describe-configs",
    Operation.ALTER_CONFIGS: "alter-configs",
    Operation.IDEMPOTENT_WRITE: "idempotent-write",
}
TYPE_NAMES = {
    ResourceType.TOPIC: "topic",
    ResourceType.GROUP: "group",
    ResourceType.CLUSTER: "cluster",
    ResourceType.TRANSACTIONAL_ID: "transactional-id",
}
_ABOVE = {
    Operation.DESCRIBE: ("read", "write", "delete", "alter"),
    Operation.DESCRIBE_CONFIGS: ("alter-configs",),
}
_DENYING = {operation: frozenset((name, ALL)) for operation, name in OPERATION_NAMES.items()}
_ALLOWING = {operation: names | set(_ABOVE.get(operation, ())) for operation, names in _DENYING.items()}

Acls = Mapping[UUID, CreateAcl]


@dataclass(frozen=True, slots=True, kw_only=True)
class AclAuthorizerConfig:
    super_users: frozenset[str] = frozenset()
    """Principals that may do everything, whatever the ACLs say: `User:alice`."""
    allow_everyone_if_no_acl: bool = False


def parse_super_users(text: str) -> frozenset[str]:
    """Reads `User:alice;User:bob`; raises `InvalidConfigError`. A name may have commas and equal signs, as those of
    certificates have."""
    users = [user.strip() for user in text.split(";") if user.strip()]
    for user in users:
        kind, _, name = user.partition(":")
        if not kind or not name:
            raise InvalidConfigError(f"super.users: {user[:80]!r} is no principal: write User:name;User:name")
    return frozenset(users)


class AclIndex:
    """The ACLs of one image by type and name of the resource."""

    def __init__(self, acls: Acls) -> None:
        literal: dict[tuple[str, str], list[CreateAcl]] = {}
        prefixed: dict[tuple[str, str], list[CreateAcl]] = {}
        lengths: dict[str, set[int]] = {}
        for acl in acls.values():
            if acl.pattern_type == LITERAL:
                literal.setdefault((acl.resource_type, acl.resource), []).append(acl)
            else:
                prefixed.setdefault((acl.resource_type, acl.resource), []).append(acl)
                lengths.setdefault(acl.resource_type, set()).add(len(acl.resource))
        self._literal = literal
        self._prefixed = prefixed
        self._lengths = {kind: sorted(some) for kind, some in lengths.items()}

    def of_resource(self, kind: str, name: str) -> Iterator[CreateAcl]:
        """The ACLs that name this resource."""
        yield from self._literal.get((kind, name), ())
        if name != ANY:
            yield from self._literal.get((kind, ANY), ())
        yield from self.of_prefixes(kind, name)

    def of_prefixes(self, kind: str, name: str) -> Iterator[CreateAcl]:
        lengths = self._lengths.get(kind, [])
        for length in lengths[: bisect_right(lengths, len(name))]:
            yield from self._prefixed.get((kind, name[:length]), ())

    def literals_of(self, kind: str, name: str) -> Iterable[CreateAcl]:
        return self._literal.get((kind, name), ())

    def of_type(self, kind: str) -> Iterator[CreateAcl]:
        for table in (self._literal, self._prefixed):
            for (of_kind, _), acls in table.items():
                if of_kind == kind:
                    yield from acls


class AclAuthorizer:
    def __init__(self, acls: Callable[[], Acls], config: AclAuthorizerConfig) -> None:
        """`acls` returns those of the newest image of this node."""
        self._acls = acls
        self._config = config
        self._known: Acls | None = None
        self._index = AclIndex({})
        self._decisions: dict[tuple[Principal, str], dict[tuple[Operation, Resource], bool]] = {}
        self._count = 0

    def authorize(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
        if self._acls() is not self._known:
            self._read()
        decisions = self._decisions.get((context.principal, context.client_host))
        decision = None if decisions is None else decisions.get((operation, resource))
        if decision is None or context.api is Api.INTERNAL:
            return self._decide(context, operation, resource)
        return decision

    def authorize_any(self, context: RequestContext, operation: Operation, kind: ResourceType) -> bool:
        """True if there is a name of a resource for which the operation is allowed."""
        principal, host = str(context.principal), _host_of(context)
        if context.api is Api.INTERNAL or principal in self._config.super_users:
            return True
        if self._acls() is not self._known:
            self._read()
        name = TYPE_NAMES[kind]
        acls = [acl for acl in self._index.of_type(name) if _names_client(acl, principal, host)]
        denials = [acl for acl in acls if acl.permission == DENY and acl.operation in _DENYING[operation]]
        if any(_denies_all(acl) for acl in denials):
            return False
        if self._config.allow_everyone_if_no_acl and not any(self._index.literals_of(name, ANY)):
            return True  # there is always a name that no other ACL has
        literals = {acl.resource for acl in denials if acl.pattern_type == LITERAL}
        prefixes = tuple({acl.resource for acl in denials if acl.pattern_type != LITERAL})
        for acl in acls:
            if acl.permission == DENY or acl.operation not in _ALLOWING[operation]:
                continue
            is_literal = acl.pattern_type == LITERAL
            if is_literal and acl.resource == ANY:
                return True
            if not acl.resource.startswith(prefixes) and not (is_literal and acl.resource in literals):
                return True
        return False

    def _read(self) -> None:
        self._known = self._acls()
        self._index = AclIndex(self._known)
        self._decisions = {}
        self._count = 0

    def _decide(self, context: RequestContext, operation: Operation, resource: Resource) -> bool:
        principal = str(context.principal)
        if context.api is Api.INTERNAL or principal in self._config.super_users:
            return True
        decision = self._evaluate(principal, _host_of(context), operation, resource)
        if len(resource.name) <= CACHED_NAME_LENGTH_MAX:
            if self._count >= DECISIONS_MAX:
                self._decisions = {}
                self._count = 0
            self._decisions.setdefault((context.principal, context.client_host), {})[operation, resource] = decision
            self._count += 1
        return decision

    def _evaluate(self, principal: str, host: str, operation: Operation, resource: Resource) -> bool:
        has_acl = is_allowed = False
        for acl in self._index.of_resource(TYPE_NAMES[resource.type], resource.name):
            has_acl = True
            if not _names_client(acl, principal, host):
                continue
            if acl.permission == DENY:
                if acl.operation in _DENYING[operation]:
                    return False
            elif acl.operation in _ALLOWING[operation]:
                is_allowed = True
        return is_allowed if has_acl else self._config.allow_everyone_if_no_acl


def _names_client(acl: CreateAcl, principal: str, host: str) -> bool:
    return acl.principal in (principal, ANYBODY) and acl.host in (host, ANY)


def _denies_all(acl: CreateAcl) -> bool:
    return acl.pattern_type == LITERAL and acl.resource == ANY


def _host_of(context: RequestContext) -> str:
    """A client of IPv4 has the same host on listeners of both kinds."""
    host = context.client_host
    return host[len(_MAPPED_IPV4) :] if host.startswith(_MAPPED_IPV4) and "." in host else host
