"""Access control lists: creates, deletes and finds ACL bindings. The authorizer of `services/` evaluates them. Pure."""

from dataclasses import asdict, astuple, dataclass

from tidelog.metadata.decision import Context, Decision, Outcomes, each
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import CreateAcl, Record, RemoveAcl
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError

NAME_LENGTH_MAX = 512

_OPERATIONS: dict[str, tuple[str, ...]] = {
    "topic": ("read", "write", "create", "delete", "alter", "describe", "describe-configs", "alter-configs"),
    "group": ("read", "describe", "delete", "describe-configs", "alter-configs"),
    "cluster": (
        "create",
        "alter",
        "describe",
        "cluster-action",
        "describe-configs",
        "alter-configs",
        "idempotent-write",
        "create-tokens",
        "describe-tokens",
    ),
    "transactional-id": ("describe", "write", "two-phase-commit"),
    "delegation-token": ("describe",),
    "user": ("create-tokens", "describe-tokens"),
}
RESOURCE_TYPES = tuple(_OPERATIONS)
LITERAL, PREFIXED, MATCH = "literal", "prefixed", "match"
ALLOW, DENY = "allow", "deny"
ALL = "all"
CLUSTER_RESOURCE = "kafka-cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class AclBinding:
    resource_type: str
    resource: str
    pattern_type: str = LITERAL
    principal: str
    host: str = "*"
    operation: str
    permission: str = ALLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateAcls:
    bindings: tuple[AclBinding, ...]
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AclFilter:
    """None matches anything. `pattern_type` `match` matches every ACL that would apply to a resource of this name."""

    resource_type: str | None = None
    resource: str | None = None
    pattern_type: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: str | None = None
    permission: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAcls:
    filters: tuple[AclFilter, ...]
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedByFilter:
    deleted: tuple[AclBinding, ...] = ()
    error: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedAcls:
    filters: tuple[DeletedByFilter, ...]


def binding_of(acl: CreateAcl) -> AclBinding:
    return AclBinding(
        resource_type=acl.resource_type,
        resource=acl.resource,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission=acl.permission,
    )


def create_acls(image: ClusterImage, request: CreateAcls, context: Context) -> Decision[Outcomes]:
    """Creates ACLs. An existing binding is no error and is not stored twice."""
    present = {binding_of(acl) for acl in image.acls.values()}
    records: list[Record] = []

    def create(binding: AclBinding) -> None:
        _check_binding(binding)
        if binding not in present:
            present.add(binding)
            records.append(CreateAcl(acl_id=context.new_id(), **asdict(binding)))

    outcomes = each(request.bindings, _label, create, duplicate=None)
    return Decision(tuple(records), outcomes)


def _label(binding: AclBinding) -> str:
    return f"{binding.principal[:80]} {binding.operation[:40]} {binding.resource_type[:40]}:{binding.resource[:80]}"


def _check_binding(binding: AclBinding) -> None:
    if binding.resource_type not in _OPERATIONS:
        raise InvalidRequestError(f"resource type {binding.resource_type[:40]!r}: {', '.join(RESOURCE_TYPES)}")
    if binding.pattern_type not in (LITERAL, PREFIXED):
        raise InvalidRequestError(f"pattern type {binding.pattern_type[:40]!r}: {LITERAL} or {PREFIXED}")
    operations = (*_OPERATIONS[binding.resource_type], ALL)
    if binding.operation not in operations:
        raise InvalidRequestError(
            f"operation {binding.operation[:40]!r} on a {binding.resource_type}: {', '.join(operations)}"
        )
    if binding.permission not in (ALLOW, DENY):
        raise InvalidRequestError(f"permission {binding.permission[:40]!r}: {ALLOW} or {DENY}")
    kind, colon, name = binding.principal.partition(":")
    if not (kind and colon and name) or len(binding.principal) > NAME_LENGTH_MAX or not binding.principal.isprintable():
        raise InvalidRequestError(f"principal {binding.principal[:80]!r}: written as User:name")
    for what, value in (("resource", binding.resource), ("host", binding.host)):
        if not 0 < len(value) <= NAME_LENGTH_MAX or not value.isprintable():
            raise InvalidRequestError(f"{what} {value[:80]!r}: 1 to {NAME_LENGTH_MAX} printable characters")
    if binding.resource_type == "cluster" and binding.resource != CLUSTER_RESOURCE:
        raise InvalidRequestError(f"the cluster as a resource is called {CLUSTER_RESOURCE}")


def matches(acl_filter: AclFilter, acl: AclBinding) -> bool:
    for name in ("resource_type", "principal", "host", "operation", "permission"):
        expected = getattr(acl_filter, name)
        if expected is not None and expected != getattr(acl, name):
            return False
    resource = acl_filter.resource
    if acl_filter.pattern_type == MATCH:
        if resource is None:
            return True
        if acl.pattern_type == LITERAL:
            return acl.resource in (resource, "*")
        return resource.startswith(acl.resource)
    if acl_filter.pattern_type is not None and acl_filter.pattern_type != acl.pattern_type:
        return False
    return resource is None or resource == acl.resource


def find_acls(image: ClusterImage, acl_filter: AclFilter) -> tuple[AclBinding, ...]:
    """Returns the stored ACLs that a filter matches, in a fixed order."""
    _check_filter(acl_filter)
    bindings = [binding for acl in image.acls.values() if matches(acl_filter, binding := binding_of(acl))]
    return tuple(sorted(bindings, key=astuple))


def _check_filter(acl_filter: AclFilter) -> None:
    allowed: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
        ("resource type", acl_filter.resource_type, RESOURCE_TYPES),
        ("pattern type", acl_filter.pattern_type, (LITERAL, PREFIXED, MATCH)),
        ("permission", acl_filter.permission, (ALLOW, DENY)),
        ("operation", acl_filter.operation, tuple({name: 0 for row in _OPERATIONS.values() for name in (*row, ALL)})),
    )
    for what, value, choices in allowed:
        if value is not None and value not in choices:
            raise InvalidRequestError(f"{what} {value[:40]!r}: {', '.join(choices)}")


def delete_acls(image: ClusterImage, request: DeleteAcls, _context: Context) -> Decision[DeletedAcls]:
    """Deletes ACLs. Each filter reports what it deleted; a binding that two filters match is reported for the first."""
    left = dict(sorted(image.acls.items()))
    results = []
    records: list[Record] = []
    for acl_filter in request.filters:
        try:
            _check_filter(acl_filter)
        except TidelogError as error:
            results.append(DeletedByFilter(error=error.code, message=str(error)))
            continue
        matching = [acl for acl in left.values() if matches(acl_filter, binding_of(acl))]
        for acl in matching:
            del left[acl.acl_id]
            records.append(RemoveAcl(acl_id=acl.acl_id))
        results.append(DeletedByFilter(deleted=tuple(sorted(map(binding_of, matching), key=astuple))))
    return Decision(tuple(records), DeletedAcls(filters=tuple(results)))
