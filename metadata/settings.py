"""Configs, quotas, producer-id blocks and feature levels: what operators set, and what follows from it at once.

A changed config can change who may lead: with a lower `min.insync.replicas` the high watermark may advance without
replicas that were eligible until now, so they stop being eligible in the same decision; with unclean election allowed,
partitions without a leader get one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.brokers import known_broker
from tidelog.metadata.config_table import TABLES, Kind, Scope
from tidelog.metadata.decision import Context, Decision, Draft, Outcome
from tidelog.metadata.features import KNOWN_FEATURES, METADATA_VERSION, level_needed
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.leadership import find_leaders, shifted
from tidelog.metadata.records import AllocateProducerIds, FeatureLevel, Record, SetConfig, SetQuota
from tidelog.metadata.topics import Outcomes, find_topic
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    FeatureUpdateError,
    InvalidConfigError,
    InvalidRequestError,
    TidelogError,
)
from tidelog.model.maps import Map, updated

# Configs.

SET, DELETE, APPEND, SUBTRACT = "set", "delete", "append", "subtract"
_BROKER = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    key: str
    operation: str
    """`set`; `delete` goes back to the default; `append` and `subtract` work on lists."""
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceChange:
    resource_type: str
    """`cluster`, `broker` or `topic`."""
    resource: str = configs.CLUSTER
    changes: tuple[ConfigChange, ...]
    replaces: bool = False
    """What is set on the resource and not named here goes back to its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterConfigs:
    resources: tuple[ResourceChange, ...]
    validate_only: bool = False


def alter_configs(image: ClusterImage, request: AlterConfigs, context: Context) -> Decision[Outcomes]:
    """Resource by resource: all changes of one are taken, or none."""
    draft = Draft(image)
    named = Counter((item.resource_type, item.resource) for item in request.resources)
    outcomes = []
    for item in request.resources:
        label = f"{item.resource_type}:{item.resource}" if item.resource else item.resource_type
        try:
            if named[item.resource_type, item.resource] > 1:
                raise InvalidRequestError(f"{label} is named more than once in one request")
            whole = _with_deletions(draft.image, item) if item.replaces else item
            records = _changed_configs(draft.image, whole)
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
        else:
            draft.add(records)
            draft.add(_consequences(draft.image, whole, context))
            outcomes.append(Outcome(label))
    return draft.decide(Outcomes(items=tuple(outcomes)))


def check_resource(image: ClusterImage, resource_type: str, resource: str) -> Scope:
    """The scope of a config resource that exists."""
    if resource_type == Scope.TOPIC.value:
        find_topic(image, resource)
    elif resource_type == Scope.BROKER.value:
        number = int(resource) if _BROKER.fullmatch(resource) else -1
        if number not in image.brokers or resource != str(number):
            raise BrokerNotRegisteredError(f"broker {resource[:20]!r} is not registered")
    elif resource_type == Scope.CLUSTER.value:
        if resource != configs.CLUSTER:
            raise InvalidRequestError("the cluster is one resource and has no name here")
    else:
        raise InvalidRequestError(f"config resource {resource_type[:40]!r}: topic, broker or cluster")
    return Scope(resource_type)


def _with_deletions(image: ClusterImage, item: ResourceChange) -> ResourceChange:
    named = {change.key for change in item.changes}
    present = image.config(item.resource_type, item.resource)
    gone = tuple(ConfigChange(key=key, operation=DELETE) for key in sorted(present) if key not in named)
    return replace(item, changes=item.changes + gone)


def _changed_configs(image: ClusterImage, item: ResourceChange) -> list[Record]:
    scope = check_resource(image, item.resource_type, item.resource)
    named = Counter(change.key for change in item.changes)
    twice = [key for key, count in named.items() if count > 1]
    if twice:
        raise InvalidRequestError(f"{twice[0]} is changed twice in one request")
    present = image.config(item.resource_type, item.resource)
    changes: dict[str, str | None] = {}
    for change in item.changes:
        value = _changed_value(image, scope, item.resource, change)
        if value != present.get(change.key):
            changes[change.key] = value
    _check_together(image, scope, item.resource, changes)
    return [
        SetConfig(resource_type=item.resource_type, resource=item.resource, key=key, value=value)
        for key, value in sorted(changes.items())
    ]


def _changed_value(image: ClusterImage, scope: Scope, resource: str, change: ConfigChange) -> str | None:
    row = configs.definition(scope, change.key)
    if change.operation == DELETE:
        return None
    if change.operation == SET:
        configs.check(scope, change.key, change.value)
        return change.value.strip()
    if change.operation not in (APPEND, SUBTRACT):
        raise InvalidRequestError(
            f"{change.key}: operation {change.operation[:20]!r} is not set, delete, append, subtract"
        )
    if row.kind not in (Kind.LIST, Kind.REPLICAS):
        raise InvalidConfigError(f"{change.key} is not a list: {change.operation} does not apply")
    own = image.config(scope.value, resource).get(change.key)
    if own is None and scope is Scope.TOPIC:
        own = configs.as_text(configs.topic_config(image, resource, change.key).value)
    elif own is None:
        own = configs.as_text(configs.broker_config(image, change.key).value)
    items = list(configs.split_list(own))
    for value in configs.split_list(change.value):
        if change.operation == APPEND and value not in items:
            items.append(value)
        elif change.operation == SUBTRACT and value in items:
            items.remove(value)
    text = ",".join(items)
    configs.check(scope, change.key, text)
    return text


_TOGETHER = {
    name
    for key in ("segment.ms", "segment.jitter.ms", "min.compaction.lag.ms", "max.compaction.lag.ms")
    for name in (key, *(server for server, _ in TABLES[Scope.TOPIC][key].server))
}
"""Keys whose values bound each other."""


def _check_together(image: ClusterImage, scope: Scope, resource: str, changes: dict[str, str | None]) -> None:
    if not _TOGETHER & set(changes):
        return
    cluster = image.config("cluster", configs.CLUSTER)
    after = updated(image.config(scope.value, resource), changes.items())
    if scope is Scope.TOPIC:
        checks = [(resource, after, cluster)]
    else:
        checks = [("a topic without settings", updated(after, [(key, None) for key in after]), after)]
        checks += [(name, own, after) for (kind, name), own in sorted(image.configs.items()) if kind == "topic"]
    for name, own, of_cluster in checks:
        problems = configs.log_problems(own, of_cluster)
        if problems:
            raise InvalidConfigError(f"{name}: {'; '.join(problems)}")


def _consequences(image: ClusterImage, item: ResourceChange, context: Context) -> list[Record]:
    """What the new settings mean for elections, in the same decision."""
    keys = {change.key for change in item.changes}
    records: list[Record] = []
    if item.resource_type == Scope.BROKER.value or not keys & {"min.insync.replicas", "unclean.leader.election.enable"}:
        return records
    topic_id = image.topic_ids[item.resource] if item.resource_type == Scope.TOPIC.value else None

    def of(index: Map[UUID, int]) -> Iterator[tuple[UUID, int, Partition]]:
        for found in image.indexed(index):
            if topic_id is None or found[0] == topic_id:
                yield found

    if "min.insync.replicas" in keys:
        for found_id, number, partition in of(image.weakened):
            record = shifted(image, found_id, number, partition, partition, context=context)
            if record is not None:
                records.append(record)
    if "unclean.leader.election.enable" in keys:
        records += find_leaders(image.apply_all(records), of(image.unbalanced), context)
    return records


# Quotas.

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
    """(`user` | `client-id` | `ip`, name, or None for the default of all that have none)."""
    values: tuple[tuple[str, float | None], ...]
    """(key, value); None removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterQuotas:
    changes: tuple[QuotaChange, ...]
    validate_only: bool = False


def entity_label(entity: Entity) -> str:
    return ",".join(f"{kind}={name if name is not None else '<default>'}" for kind, name in entity)


def alter_quotas(image: ClusterImage, request: AlterQuotas, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    named = Counter(tuple(sorted(change.entity, key=str)) for change in request.changes)
    outcomes = []
    for change in request.changes:
        label = entity_label(change.entity)
        try:
            if named[tuple(sorted(change.entity, key=str))] > 1:
                raise InvalidRequestError(f"{label} is named more than once in one request")
            draft.add(_changed_quotas(draft.image, change))
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
        else:
            outcomes.append(Outcome(label))
    return draft.decide(Outcomes(items=tuple(outcomes)))


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


# Producer ids.

PRODUCER_ID_BLOCK = 1000
PRODUCER_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateProducerIdBlock:
    broker: int
    broker_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdBlock:
    first: int
    count: int


def allocate_producer_ids(
    image: ClusterImage, request: AllocateProducerIdBlock, _context: Context
) -> Decision[ProducerIdBlock]:
    known_broker(image, request.broker, request.broker_epoch)
    first = image.next_producer_id
    if first > PRODUCER_ID_MAX - PRODUCER_ID_BLOCK:
        raise InvalidRequestError("all producer ids are used up")
    record = AllocateProducerIds(
        broker=request.broker, broker_epoch=request.broker_epoch, next_producer_id=first + PRODUCER_ID_BLOCK
    )
    return Decision((record,), ProducerIdBlock(first=first, count=PRODUCER_ID_BLOCK))


# Feature levels.

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = "upgrade", "safe-downgrade", "unsafe-downgrade"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureChange:
    name: str
    level: int
    kind: str = UPGRADE
    """`upgrade`; `safe-downgrade` is refused if it would lose something; `unsafe-downgrade` is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFeatures:
    changes: tuple[FeatureChange, ...]
    validate_only: bool = False


def update_features(
    image: ClusterImage,
    request: UpdateFeatures,
    context: Context,
    *,
    known: dict[str, tuple[int, int]] | None = None,
) -> Decision[Outcomes]:
    """`known`: the levels (lowest, highest) that this controller supports."""
    named = Counter(change.name for change in request.changes)
    outcomes = []
    records: list[Record] = []
    for change in request.changes:
        try:
            if named[change.name] > 1:
                raise InvalidRequestError(f"feature {change.name[:60]!r} is named more than once in one request")
            _check_feature(image, change, context, KNOWN_FEATURES if known is None else known)
        except TidelogError as error:
            outcomes.append(Outcome(change.name, error.code, str(error)))
        else:
            if change.level != image.features.get(change.name, 0):
                records.append(FeatureLevel(name=change.name, level=change.level))
            outcomes.append(Outcome(change.name))
    return Decision(tuple(records), Outcomes(items=tuple(outcomes)))


def _check_feature(
    image: ClusterImage, change: FeatureChange, context: Context, known: dict[str, tuple[int, int]]
) -> None:
    present = image.features.get(change.name, 0)
    if change.name not in known:
        raise FeatureUpdateError(f"there is no feature {change.name[:60]!r}; there are: {', '.join(sorted(known))}")
    if change.kind not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise InvalidRequestError(f"{change.kind[:40]!r}: {UPGRADE}, {SAFE_DOWNGRADE} or {UNSAFE_DOWNGRADE}")
    low, high = known[change.name]
    if not low <= change.level <= high:
        raise FeatureUpdateError(f"{change.name} {change.level}: this controller supports {low} to {high}")
    if change.level < present and change.kind == UPGRADE:
        raise InvalidRequestError(
            f"{change.name} is at {present}, {change.level} is lower: that is a downgrade, which may lose something"
        )
    if change.level > present and change.kind != UPGRADE:
        raise InvalidRequestError(f"{change.name} is at {present}, {change.level} is not lower")
    nodes = [(f"broker {number}", broker.features) for number, broker in sorted(image.brokers.items())]
    nodes += [(f"controller {number}", features) for number, features in context.controller_features]
    for node, features in nodes:
        lowest, highest = next(((a, b) for name, a, b in features if name == change.name), (0, 0))
        if not lowest <= change.level <= highest:
            raise FeatureUpdateError(
                f"{change.name} {change.level}: {node} supports {lowest} to {highest}; upgrade or unregister it first"
            )
    if change.kind == SAFE_DOWNGRADE and change.name == METADATA_VERSION and level_needed(image) > change.level:
        raise FeatureUpdateError(
            f"{change.name} {change.level} cannot keep what the cluster has stored; {UNSAFE_DOWNGRADE} would lose it"
        )
