"""Configs in the cluster's metadata: validation, and resolution of the effective value. Pure.

A topic uses its own value, else the cluster-wide default, else the built-in one; a broker its own, else the cluster's,
else the built-in one. The keys are in `metadata.config_table`. Values are stored as the text that was set and read
through `parse`, which caches results.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

from tidelog.log.batch import Codec, TimestampType
from tidelog.log.config import FlushMode, LogConfig
from tidelog.metadata.config_kafka import GZIP_DEFAULT, LZ4_FAST
from tidelog.metadata.config_table import TABLES, Definition, Kind, Scope, Value
from tidelog.metadata.image import ClusterImage, Partition
from tidelog.model.errors import InvalidConfigError
from tidelog.model.maps import Map, sorted_items

CLUSTER = ""
"""The name of the only resource of type `cluster`."""
VALUE_LENGTH_MAX = 32_768
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_REPLICA = re.compile(r"[0-9]{1,6}:[0-9]{1,10}")
_SHOWN_MAX = 60


def definition(scope: Scope, name: str) -> Definition:
    """Returns the definition of a key; rejects an unknown one with the closest match."""
    row = TABLES[scope].get(name)
    if row is not None:
        return row
    near = difflib.get_close_matches(name, TABLES[scope], n=1, cutoff=0.6) if len(name) <= 100 else []
    elsewhere = [other.value for other in Scope if other is not scope and name in TABLES[other]]
    if elsewhere:
        hint = f"; it is a {' and '.join(elsewhere)} config"
        server = TABLES[Scope.TOPIC][name].server if name in TABLES[Scope.TOPIC] else ()
        hint += f", its default for all topics is {server[0][0]}" if server and scope is Scope.CLUSTER else ""
    else:
        hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidConfigError(f"{_shown(name)} is not a {scope.value} config{hint}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "...")


def allowed(row: Definition) -> str:
    """Returns the allowed values as text."""
    if row.accepted:
        return "only " + ", ".join(as_text(value) for value in row.accepted)
    match row.kind:
        case Kind.INT | Kind.FLOAT:
            words = "an integer" if row.kind is Kind.INT else "a number"
            most = "" if row.most is None or row.most == (1 << 63) - 1 else f" to {row.most}"
            words += f" from {row.least}{most}" if row.least is not None else ""
            words += "".join(f", or {value}" for value in row.also)
            return words + (f" ({row.unit})" if row.unit else "")
        case Kind.BOOL:
            return "true or false"
        case Kind.CHOICE:
            return "one of " + ", ".join(row.choices)
        case Kind.LIST:
            return "a comma-separated list of " + ", ".join(row.choices)
        case Kind.REPLICAS:
            return "a comma-separated list of partition:broker, or *"


def check(scope: Scope, name: str, text: str) -> Value:
    """Parses and validates the text of a key; raises `InvalidConfigError`, which names the allowed values."""
    row = definition(scope, name)
    if len(text) > VALUE_LENGTH_MAX:
        raise InvalidConfigError(f"{name}: the value has {len(text)} characters, at most {VALUE_LENGTH_MAX}")
    value = _read(row, text.strip())
    if value is None:
        raise InvalidConfigError(f"{name}={_shown(text)}: {allowed(row)}")
    if row.accepted and value not in row.accepted:
        raise InvalidConfigError(f"{name}={_shown(text)}: {allowed(row)}; {row.rejection}")
    return value


@lru_cache(maxsize=4096)
def parse(scope: Scope, name: str, text: str) -> Value:
    """Like `check`, for stored values: a value above a bound that was lowered since counts as the bound."""
    row = definition(scope, name)
    if row.kind is Kind.INT and row.most is not None and _INTEGER.fullmatch(text.strip()) and int(text) > row.most:
        return row.most
    return check(scope, name, text)


def _read(row: Definition, text: str) -> Value | None:
    match row.kind:
        case Kind.INT:
            return _in_range(row, int(text)) if _INTEGER.fullmatch(text) else None
        case Kind.FLOAT:
            return _float(row, text)
        case Kind.BOOL:
            return {"true": True, "false": False}.get(text.lower())
        case Kind.CHOICE:
            return text if text in row.choices else None
        case Kind.LIST:
            items = split_list(text)
            is_sound = 0 < len(items) == len(set(items)) and set(items) <= set(row.choices)
            return items if is_sound else None
        case Kind.REPLICAS:
            items = split_list(text)
            is_sound = items == ("*",) or all(_REPLICA.fullmatch(item) for item in items)
            return items if is_sound else None


def _in_range(row: Definition, value: float) -> Value | None:
    is_inside = (row.least is None or value >= row.least) and (row.most is None or value <= row.most)
    return value if is_inside or value in row.also else None


def _float(row: Definition, text: str) -> Value | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return _in_range(row, value) if math.isfinite(value) else None


def split_list(text: str) -> tuple[str, ...]:
    return tuple(item for part in text.split(",") if (item := part.strip()))


def as_text(value: Value | None) -> str:
    """Returns a value as text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The effective value: `source` is `topic`, `broker`, `cluster` or `default`; `key` is the key that set it."""

    value: Value | None
    source: str
    key: str


def _resolve_topic(row: Definition, own: Map[str, str], cluster: Map[str, str]) -> Resolved:
    return Resolved(*_found(row, own, cluster))


def _found(row: Definition, own: Map[str, str], cluster: Map[str, str]) -> tuple[Value | None, str, str]:
    text = own.get(row.name)
    if text is not None:
        return parse(Scope.TOPIC, row.name, text), "topic", row.name
    for name, factor in row.server:
        text = cluster.get(name)
        if text is not None:
            value = parse(Scope.CLUSTER, name, text)
            if factor != 1 and isinstance(value, int) and value > 0:
                value *= factor
            return value, "cluster", name
    return row.default, "default", row.name


def topic_config(image: ClusterImage, topic: str, name: str) -> Resolved:
    """Returns the effective value for a topic; for a missing one, what a new topic would get."""
    row = definition(Scope.TOPIC, name)
    return _resolve_topic(row, image.config("topic", topic), image.config("cluster", CLUSTER))


def broker_config(image: ClusterImage, name: str, broker: int | None = None) -> Resolved:
    """Returns the effective value for one broker, or for the whole cluster without one."""
    row = definition(Scope.CLUSTER, name)
    if broker is not None and Scope.BROKER in row.scopes:
        text = image.config("broker", str(broker)).get(name)
        if text is not None:
            return Resolved(parse(Scope.BROKER, name, text), "broker", name)
    text = image.config("cluster", CLUSTER).get(name)
    if text is not None:
        return Resolved(parse(Scope.CLUSTER, name, text), "cluster", name)
    return Resolved(row.default, "default", name)


def cluster_int(image: ClusterImage, name: str) -> int:
    value = broker_config(image, name).value
    assert isinstance(value, int), f"{name} is an integer"
    return value


def cluster_bool(image: ClusterImage, name: str) -> bool:
    value = broker_config(image, name).value
    assert isinstance(value, bool), f"{name} is true or false"
    return value


def cluster_choice(image: ClusterImage, name: str) -> str:
    value = broker_config(image, name).value
    assert isinstance(value, str), f"{name} is one of several words"
    return value


# For the controller and the replicas.

_NONE: Map[str, str] = Map()
_CLUSTER_KEY = ("cluster", CLUSTER)
_MIN_ISR = TABLES[Scope.TOPIC]["min.insync.replicas"]
_UNCLEAN = TABLES[Scope.TOPIC]["unclean.leader.election.enable"]
_FLUSH_MODE = TABLES[Scope.TOPIC]["flush.mode"]


def _of_topic(image: ClusterImage, topic_id: UUID, row: Definition) -> Value | None:
    configs = image.configs
    if not configs:
        return row.default
    own = configs.get(("topic", image.topics[topic_id].name), _NONE)
    return _found(row, own, configs.get(_CLUSTER_KEY, _NONE))[0]


def min_isr(image: ClusterImage, topic_id: UUID, partition: Partition) -> int:
    """Returns how many replicas must be in sync for a write; by default a majority of the replicas.

    During a reassignment the original replicas count: added ones must not stop writes.
    """
    count = len(partition.replicas) - len(partition.adding)
    value = _of_topic(image, topic_id, _MIN_ISR)
    if value is None:
        return count // 2 + 1
    assert isinstance(value, int), "min.insync.replicas is an integer"
    return min(value, count)


def is_unclean_allowed(image: ClusterImage, topic_id: UUID) -> bool:
    return _of_topic(image, topic_id, _UNCLEAN) is True


def is_page_cache(image: ClusterImage, topic_id: UUID) -> bool:
    """Whether acknowledged records of this topic may be in memory only."""
    return _of_topic(image, topic_id, _FLUSH_MODE) == FlushMode.PAGE_CACHE.value


# Log configs.

_LOG_FIELDS: dict[str, str] = {
    "segment_bytes": "segment.bytes",
    "segment_ms": "segment.ms",
    "segment_jitter_ms": "segment.jitter.ms",
    "index_interval_bytes": "index.interval.bytes",
    "index_bytes_max": "segment.index.bytes",
    "message_bytes_max": "max.message.bytes",
    "retention_ms": "retention.ms",
    "retention_bytes": "retention.bytes",
    "delete_retention_ms": "delete.retention.ms",
    "min_compaction_lag_ms": "min.compaction.lag.ms",
    "max_compaction_lag_ms": "max.compaction.lag.ms",
    "min_cleanable_dirty_ratio": "min.cleanable.dirty.ratio",
    "file_delete_delay_ms": "file.delete.delay.ms",
    "timestamp_before_max_ms": "message.timestamp.before.max.ms",
    "timestamp_after_max_ms": "message.timestamp.after.max.ms",
    "flush_messages": "flush.messages",
    "flush_ms": "flush.ms",
}
_CODECS = {
    "producer": None,
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}
_LEVELS = {
    Codec.GZIP: ("compression.gzip.level", GZIP_DEFAULT),
    Codec.LZ4: ("compression.lz4.level", LZ4_FAST),
    Codec.ZSTD: ("compression.zstd.level", None),
}
"""The config key of each codec's compression level, and the value that means the codec's own default."""
_TIMESTAMPS = {"CreateTime": TimestampType.CREATE, "LogAppendTime": TimestampType.LOG_APPEND}


def log_config(image: ClusterImage, topic: str) -> LogConfig:
    """Returns the log configs of a topic; topics with equal configs share one object."""
    return _log_config(image.config("topic", topic), image.config("cluster", CLUSTER))


@lru_cache(maxsize=1024)
def _log_config(own: Map[str, str], cluster: Map[str, str]) -> LogConfig:
    def value(name: str) -> Value | None:
        return _resolve_topic(TABLES[Scope.TOPIC][name], own, cluster).value

    policy = value("cleanup.policy")
    assert isinstance(policy, tuple), "cleanup.policy is a list"
    expiry = cluster.get("producer.id.expiration.ms")
    row = TABLES[Scope.CLUSTER]["producer.id.expiration.ms"]
    fields: dict[str, object] = {field: value(name) for field, name in _LOG_FIELDS.items()}
    codec = _CODECS[str(value("compression.type"))]
    key, usual = _LEVELS.get(codec, ("", None)) if codec is not None else ("", None)
    level = value(key) if key else None
    return LogConfig(
        cleanup_delete="delete" in policy,
        cleanup_compact="compact" in policy,
        compression=codec,
        compression_level=level if isinstance(level, int) and level != usual else None,
        timestamp_type=_TIMESTAMPS[str(value("message.timestamp.type"))],
        flush_mode=FlushMode(value("flush.mode")),
        producer_expiry_ms=int(expiry if expiry is not None else str(row.default)),
        **fields,  # type: ignore[arg-type]
    )


def log_problems(own: Map[str, str], cluster: Map[str, str]) -> list[str]:
    """Returns the problems of these configs together, with the names of the keys."""
    found = []
    for problem in _log_config(own, cluster).problems():
        text = problem
        for field, name in sorted(_LOG_FIELDS.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(field, name)
        found.append(text)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One config of a description."""

    name: str
    value: str
    source: str
    default: str
    doc: str
    is_dynamic: bool


def describe(image: ClusterImage, scope: Scope, resource: str) -> tuple[ConfigEntry, ...]:
    """Returns every key of a resource with its effective value and source."""
    entries = []
    for name, row in sorted(TABLES[scope].items()):
        if scope is Scope.TOPIC:
            resolved = topic_config(image, resource, name)
        else:
            resolved = broker_config(image, name, int(resource) if scope is Scope.BROKER else None)
        default = as_text(row.default) if row.default is not None else row.default_text
        shown = as_text(resolved.value) if resolved.value is not None else row.default_text
        entries.append(
            ConfigEntry(
                name=name,
                value=shown,
                source=resolved.source,
                default=default,
                doc=row.doc,
                is_dynamic=row.is_dynamic,
            )
        )
    return tuple(entries)


def overrides(image: ClusterImage, scope: Scope, resource: str) -> dict[str, str]:
    """Returns the configs set on this resource, in the order of the keys."""
    return dict(sorted_items(image.config(scope.value, resource)))
