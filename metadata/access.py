"""Who may come in and what they may do: SCRAM users and ACLs, stored and found. Checking a request is not done here.

Of a password nothing is stored but what SCRAM (RFC 5802) needs to check it: salt, iterations, H(client key) and server
key. The sender has done the expensive part (salting); the controller derives the two keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass

from tidelog.metadata.decision import Context, Decision, Draft, Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import CreateAcl, Record, RemoveAcl, SetUser
from tidelog.metadata.topics import Outcomes
from tidelog.model.errors import (
    DuplicateResourceError,
    ErrorCode,
    InvalidRequestError,
    ResourceNotFoundError,
    TidelogError,
    UnacceptableCredentialError,
    UnsupportedSaslMechanismError,
)

# Users.

MECHANISMS: dict[str, str] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ITERATIONS_MIN, ITERATIONS_MAX = 4096, 16_384
NAME_LENGTH_MAX = 512
SALT_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChange:
    user: str
    mechanism: str
    salt: bytes = b""
    """Empty: the credential is removed."""
    salted_password: bytes = b""
    """PBKDF2 of password, salt and iterations."""
    iterations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterUsers:
    changes: tuple[UserChange, ...]
    validate_only: bool = False


def scram_keys(mechanism: str, salted_password: bytes) -> tuple[bytes, bytes]:
    """(stored key, server key) of RFC 5802, section 3."""
    digest = MECHANISMS[mechanism]
    client_key = hmac.new(salted_password, b"Client Key", digest).digest()
    return hashlib.new(digest, client_key).digest(), hmac.new(salted_password, b"Server Key", digest).digest()


def alter_users(image: ClusterImage, request: AlterUsers, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    named = Counter((change.user, change.mechanism) for change in request.changes)
    outcomes = []
    for change in request.changes:
        label = f"{change.user[:NAME_LENGTH_MAX]}:{change.mechanism[:40]}"
        try:
            if named[change.user, change.mechanism] > 1:
                raise DuplicateResourceError(f"{label} is named more than once in one request")
            draft.add([_changed_user(draft.image, change)])
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
        else:
            outcomes.append(Outcome(label))
    return draft.decide(Outcomes(items=tuple(outcomes)))


def _changed_user(image: ClusterImage, change: UserChange) -> SetUser:
    if not 0 < len(change.user) <= NAME_LENGTH_MAX or not change.user.isprintable():
        raise UnacceptableCredentialError(f"a user's name has 1 to {NAME_LENGTH_MAX} printable characters")
    if change.mechanism not in MECHANISMS:
        raise UnsupportedSaslMechanismError(f"mechanism {change.mechanism[:40]!r}: {' or '.join(MECHANISMS)}")
    if not change.salt:
        if change.salted_password or change.iterations:
            raise UnacceptableCredentialError(f"user {change.user}: a credential needs a salt")
        if (change.user, change.mechanism) not in image.users:
            raise ResourceNotFoundError(f"user {change.user} has no {change.mechanism} credential")
        return SetUser(user=change.user, mechanism=change.mechanism)
    if not ITERATIONS_MIN <= change.iterations <= ITERATIONS_MAX:
        raise UnacceptableCredentialError(
            f"user {change.user}: {change.iterations} iterations; from {ITERATIONS_MIN} to {ITERATIONS_MAX}"
        )
    if len(change.salt) > SALT_BYTES_MAX:
        raise UnacceptableCredentialError(f"user {change.user}: a salt of {len(change.salt)} bytes is too long")
    size = hashlib.new(MECHANISMS[change.mechanism]).digest_size
    if len(change.salted_password) != size:
        raise UnacceptableCredentialError(
            f"user {change.user}: the salted password has {len(change.salted_password)} bytes, not {size}"
        )
    stored, server = scram_keys(change.mechanism, change.salted_password)
    return SetUser(
        user=change.user,
        mechanism=change.mechanism,
        salt=change.salt,
        stored_key=stored,
        server_key=server,
        iterations=change.iterations,
    )


# ACLs.

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
    """None matches anything. `pattern_type` may be `match`: whatever would apply to a resource of this name."""

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
    """One that is there already is not stored twice, and no error."""
    present = {binding_of(acl) for acl in image.acls.values()}
    outcomes = []
    records: list[Record] = []
    for binding in request.bindings:
        label = (
            f"{binding.principal[:80]} {binding.operation[:40]} {binding.resource_type[:40]}:{binding.resource[:80]}"
        )
        try:
            _check_binding(binding)
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
            continue
        outcomes.append(Outcome(label))
        if binding not in present:
            present.add(binding)
            records.append(
                CreateAcl(
                    acl_id=context.new_id(),
                    resource_type=binding.resource_type,
                    resource=binding.resource,
                    pattern_type=binding.pattern_type,
                    principal=binding.principal,
                    host=binding.host,
                    operation=binding.operation,
                    permission=binding.permission,
                )
            )
    return Decision(tuple(records), Outcomes(items=tuple(outcomes)))


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
        wanted = getattr(acl_filter, name)
        if wanted is not None and wanted != getattr(acl, name):
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
    """The stored ones that a filter matches, in a fixed order."""
    _check_filter(acl_filter)
    found = [binding for acl in image.acls.values() if matches(acl_filter, binding := binding_of(acl))]
    return tuple(sorted(found, key=_order))


def _order(acl: AclBinding) -> tuple[str, ...]:
    return (
        acl.resource_type,
        acl.resource,
        acl.pattern_type,
        acl.principal,
        acl.host,
        acl.operation,
        acl.permission,
    )


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
    """Each filter tells what it took; what two filters match is told of the first."""
    left = dict(sorted(image.acls.items()))
    results = []
    records: list[Record] = []
    for acl_filter in request.filters:
        try:
            _check_filter(acl_filter)
        except TidelogError as error:
            results.append(DeletedByFilter(error=error.code, message=str(error)))
            continue
        taken = [acl for acl in left.values() if matches(acl_filter, binding_of(acl))]
        for acl in taken:
            del left[acl.acl_id]
            records.append(RemoveAcl(acl_id=acl.acl_id))
        results.append(DeletedByFilter(deleted=tuple(sorted(map(binding_of, taken), key=_order))))
    return Decision(tuple(records), DeletedAcls(filters=tuple(results)))
