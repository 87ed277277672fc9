"""Client quotas: alters them. `services/` charges requests against them. Pure."""

import math
from dataclasses import dataclass

from tidelog.metadata.decision import Context, Decision, Draft, Outcomes, each
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import Record, SetQuota
from tidelog.model.errors import InvalidRequestError

_QUOTA_KEYS: dict[str, tuple[str, ...]] = {
    "producer_byte_rate": ("user", "client-id"),
    "consumer_byte_rate": ("user", "client-id"),
    "request_percentage": ("user", "client-id"),
    "controller_mutation_rate": ("user", "client-id"),
    "connection_creation_rate": ("ip",),
}
_QUOTA_ENTITIES = (("user",), ("client-id",), ("client-id", "user"), ("ip",))
ENTITY_LENGTH_MAX = 512
Entity = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaChange:
    entity: Entity
    """(`user` | `client-id` | `ip`, name; None is the default of entities without a quota)."""
    values: tuple[tuple[str, float | None], ...]
    """(key, value); None removes the quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterQuotas:
    changes: tuple[QuotaChange, ...]
    validate_only: bool = False


def entity_label(entity: Entity) -> str:
    return ",".join(f"{kind}={name if name is not None else '<default>'}" for kind, name in entity)


def alter_quotas(image: ClusterImage, request: AlterQuotas, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    outcomes = each(
        request.changes,
        lambda change: entity_label(change.entity),
        lambda change: draft.add(_changed_quotas(draft.image, change)),
        key=lambda change: tuple(sorted(change.entity, key=str)),
    )
    return draft.decide(outcomes)


def _changed_quotas(image: ClusterImage, change: QuotaChange) -> list[Record]:
    entity = tuple(sorted(change.entity, key=str))
    kinds = tuple(kind for kind, _ in entity)
    if kinds not in _QUOTA_ENTITIES:
        raise InvalidRequestError(f"quota of {list(kinds)}: a user, a client-id, both, or an ip")
    for kind, name in entity:
        if name is not None and not (0 < len(name) <= ENTITY_LENGTH_MAX and name.isprintable()):
            raise InvalidRequestError(f"quota of a {kind}: its name has 1 to {ENTITY_LENGTH_MAX} printable characters")
    keys = [key for key, _ in change.values]
    if len(set(keys)) != len(keys):
        raise InvalidRequestError(f"{entity_label(entity)}: a key is changed twice in one request")
    present = image.quotas.get(entity)
    records: list[Record] = []
    for key, value in change.values:
        if kinds[0] not in _QUOTA_KEYS.get(key, ()):
            known = ", ".join(name for name, allowed in _QUOTA_KEYS.items() if kinds[0] in allowed)
            raise InvalidRequestError(f"{key[:60]!r} is not a quota of {' and '.join(kinds)}; there are: {known}")
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidRequestError(f"{key}={value}: a number above 0")
        if value != (present.get(key) if present is not None else None):
            records.append(SetQuota(entity=entity, key=key, value=value))
    return records
