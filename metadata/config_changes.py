"""Config changes, and their consequences for elections. Pure.

A config change can change which replicas may lead: with a lower `min.insync.replicas` the high watermark may advance
without replicas that were eligible until now, so the same decision removes them from the eligible leaders; with unclean
election allowed, leaderless partitions get a leader.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.config_table import TABLES, Kind, Scope
from tidelog.metadata.decision import Context, Decision, Draft, Outcomes, each
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.metadata.partition_changes import build_change, elect_missing_leaders
from tidelog.metadata.records import Record, SetConfig
from tidelog.metadata.topics import check_internal_policy, find_topic
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    InvalidConfigError,
    InvalidRequestError,
)
from tidelog.model.maps import Map, updated

SET, DELETE, APPEND, SUBTRACT = "set", "delete", "append", "subtract"
_BROKER = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    key: str
    operation: str
    """`set`; `delete` restores the default; `append` and `subtract` change lists."""
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceChange:
    resource_type: str
    """`cluster`, `broker` or `topic`."""
    resource: str = configs.CLUSTER
    changes: tuple[ConfigChange, ...]
    replaces: bool = False
    """Configs of the resource that are not named here get their default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterConfigs:
    resources: tuple[ResourceChange, ...]
    validate_only: bool = False


def alter_configs(image: ClusterImage, request: AlterConfigs, context: Context) -> Decision[Outcomes]:
    """Alters configs, atomically for each resource."""
    draft = Draft(image)

    def change(item: ResourceChange) -> None:
        whole = _with_deletions(draft.image, item) if item.replaces else item
        draft.add(_changed_configs(draft.image, whole))
        draft.add(_consequences(draft.image, whole, context))

    outcomes = each(
        request.resources,
        lambda item: f"{item.resource_type}:{item.resource}" if item.resource else item.resource_type,
        change,
        key=lambda item: (item.resource_type, item.resource),
    )
    return draft.decide(outcomes)


def check_resource(image: ClusterImage, resource_type: str, resource: str) -> Scope:
    """Returns the scope of an existing config resource."""
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
    if scope is Scope.TOPIC and "cleanup.policy" in changes:
        check_internal_policy(item.resource, changes["cleanup.policy"])
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
    """Returns the changes of elections that follow from the new configs."""
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
            record = build_change(image, found_id, number, partition, partition, context=context)
            if record is not None:
                records.append(record)
    if "unclean.leader.election.enable" in keys:
        records += elect_missing_leaders(image.apply_all(records), of(image.unbalanced), context)
    return records
