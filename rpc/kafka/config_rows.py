"""Translates configs to Kafka's rows: types, sources, synonyms, values that a program can read. Pure.

    here                                       Kafka
    a topic's own value                        DYNAMIC_TOPIC_CONFIG
    a broker's own value                       DYNAMIC_BROKER_CONFIG
    a value for the whole cluster              DYNAMIC_DEFAULT_BROKER_CONFIG: for brokers without a value of their own
    of a node's file or environment            STATIC_BROKER_CONFIG, read-only
    built in                                   DEFAULT_CONFIG

A key without a fixed default has a description (`default_text`). Kafka's programs read numbers, so the row has the
effective number, or null.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidelog.metadata.config_table import INT_MAX, LONG_MAX, TABLES, Definition, Kind, Scope
from tidelog.metadata.configs import ConfigEntry, as_text
from tidelog.services.node_settings import NodeSetting

TOPIC_CONFIG, BROKER_CONFIG, CLUSTER_CONFIG, STATIC_CONFIG, DEFAULT_CONFIG = 1, 2, 3, 4, 5
SOURCES = {"topic": TOPIC_CONFIG, "broker": BROKER_CONFIG, "cluster": CLUSTER_CONFIG, "default": DEFAULT_CONFIG}
BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7
_TYPES = {
    Kind.FLOAT: DOUBLE,
    Kind.BOOL: BOOLEAN,
    Kind.CHOICE: STRING,
    Kind.LIST: LIST,
    Kind.REPLICAS: LIST,
}
_NEVER = frozenset({"flush.messages", "flush.ms", "log.flush.interval.messages", "log.flush.interval.ms"})
"""Never, unless they are set: the operating system flushes."""
_MIN_ISR = "min.insync.replicas"

GROUP_KEYS = {
    "consumer.heartbeat.interval.ms": "group.consumer.heartbeat.interval.ms",
    "consumer.session.timeout.ms": "group.consumer.session.timeout.ms",
}
"""Group configs and the cluster's key of each: groups have no configs of their own."""


@dataclass(frozen=True, slots=True)
class Synonym:
    name: str
    value: str | None
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
    name: str
    value: str | None
    source: int
    kind: int
    is_read_only: bool
    doc: str
    synonyms: tuple[Synonym, ...]
    """All values that are set, and the default; the first one applies."""
    is_sensitive: bool = False


Entries = Mapping[str, ConfigEntry]


def by_name(entries: tuple[ConfigEntry, ...]) -> dict[str, ConfigEntry]:
    return {entry.name: entry for entry in entries}


def topic_rows(own: Entries, cluster: Entries, *, replication_factor: int | None) -> list[ConfigRow]:
    rows = []
    for name, entry in own.items():
        definition = TABLES[Scope.TOPIC][name]
        synonyms = [_set(entry)] if entry.source == "topic" else []
        synonyms += [_set(cluster[server]) for server, _ in definition.server if cluster[server].source == "cluster"]
        of_cluster = definition.server[0][0] if definition.server else name
        default = _default(definition, replication_factor)
        synonyms.append(Synonym(of_cluster, default, DEFAULT_CONFIG))
        value = default if entry.source == "default" else entry.value
        rows.append(_row(definition, value, entry.source, synonyms))
    return rows


def cluster_rows(cluster: Entries) -> list[ConfigRow]:
    return [_cluster_row(entry, [], is_read_only=False) for entry in cluster.values()]


def broker_rows(own: Entries, cluster: Entries) -> list[ConfigRow]:
    """All configs of a broker; those that only the cluster can have are read-only."""
    rows = []
    for name, entry in cluster.items():
        mine = own.get(name)
        synonyms = [_set(mine)] if mine is not None and mine.source == "broker" else []
        rows.append(_cluster_row(entry, synonyms, is_read_only=mine is None))
    return rows


def node_rows(settings: Iterable[NodeSetting]) -> list[ConfigRow]:
    rows = []
    for setting in settings:
        synonyms = [Synonym(setting.name, setting.default, DEFAULT_CONFIG)]
        if setting.is_set:
            synonyms.insert(0, Synonym(setting.name, setting.value, STATIC_CONFIG))
        row = ConfigRow(
            name=setting.name,
            value=setting.value,
            source=synonyms[0].source,
            kind=setting.kind,
            is_read_only=True,
            doc=setting.doc,
            synonyms=tuple(synonyms),
            is_sensitive=setting.is_sensitive,
        )
        rows.append(row)
    return rows


def group_rows(cluster: Entries) -> list[ConfigRow]:
    rows = []
    for name, key in GROUP_KEYS.items():
        entry, definition = cluster[key], TABLES[Scope.CLUSTER][key]
        synonyms = [_set(entry)] if entry.source == "cluster" else []
        synonyms.append(Synonym(key, _default(definition), DEFAULT_CONFIG))
        row = _row(definition, entry.value, entry.source, synonyms, name=name, is_read_only=True)
        rows.append(row)
    return rows


def _cluster_row(entry: ConfigEntry, synonyms: list[Synonym], *, is_read_only: bool) -> ConfigRow:
    definition = TABLES[Scope.CLUSTER][entry.name]
    if entry.source == "cluster":
        synonyms.append(_set(entry))
    synonyms.append(Synonym(entry.name, _default(definition), DEFAULT_CONFIG))
    first = synonyms[0]
    return ConfigRow(
        name=entry.name,
        value=first.value,
        source=first.source,
        kind=kind_of(definition),
        is_read_only=is_read_only,
        doc=definition.doc,
        synonyms=tuple(synonyms),
    )


def _row(
    definition: Definition,
    value: str | None,
    source: str,
    synonyms: list[Synonym],
    *,
    name: str | None = None,
    is_read_only: bool = False,
) -> ConfigRow:
    return ConfigRow(
        name=name or definition.name,
        value=value,
        source=SOURCES[source],
        kind=kind_of(definition),
        is_read_only=is_read_only,
        doc=definition.doc,
        synonyms=tuple(synonyms),
    )


def _set(entry: ConfigEntry) -> Synonym:
    return Synonym(entry.name, entry.value, SOURCES[entry.source])


def _default(definition: Definition, replication_factor: int | None = None) -> str | None:
    if definition.default is not None:
        return as_text(definition.default)
    if definition.name in _NEVER:
        return str(LONG_MAX)
    if definition.name == _MIN_ISR and replication_factor is not None:
        return str(replication_factor // 2 + 1)
    return None


def kind_of(definition: Definition) -> int:
    if definition.kind is Kind.INT:
        return INT if definition.most is not None and definition.most <= INT_MAX else LONG
    return _TYPES[definition.kind]
