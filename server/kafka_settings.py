"""The settings of this node, from its file and environment, in the form of the Kafka API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tidelog.metadata.config_table import INT_MAX
from tidelog.rpc.kafka.config_rows import BOOLEAN, INT, LIST, LONG, STRING
from tidelog.security.secrets import HIDDEN
from tidelog.server.config import NodeConfig, as_text
from tidelog.server.settings_table import TABLE, Kind, Setting
from tidelog.services.node_settings import NodeSetting


def node_settings(config: NodeConfig) -> tuple[NodeSetting, ...]:
    """Returns every key of the settings table; secrets without their value."""
    return tuple(_settings(config))


def _settings(config: NodeConfig) -> Iterator[NodeSetting]:
    derived = _derived(config)
    for entry in config.entries:
        if entry.is_of_cluster:
            continue
        row = TABLE[entry.key]
        is_secret = entry.value == HIDDEN
        value = derived.get(entry.key, as_text(config.values.get(entry.key)))
        yield NodeSetting(
            name=entry.key,
            value=None if is_secret else value or None,
            default=as_text(row.default) or None,
            is_set=entry.source != "default",
            is_sensitive=is_secret,
            kind=_kind(row),
            doc=row.doc,
        )


def _derived(config: NodeConfig) -> Mapping[str, str]:
    """Effective values of settings that are resolved: relative paths, default listeners."""
    return {
        "node.id": str(config.node),
        "log.dirs": ",".join(config.log_dirs),
        "metadata.log.dir": config.metadata_dir,
        "listeners": ",".join(f"{one.name}://{one.address}" for one in config.listeners),
        "advertised.listeners": ",".join(f"{one.name}://{one.advertised}" for one in config.listeners),
    }


def _kind(row: Setting) -> int:
    match row.kind:
        case Kind.INT:
            return INT if row.most is not None and row.most <= INT_MAX else LONG
        case Kind.BOOL:
            return BOOLEAN
        case Kind.LIST:
            return LIST
        case Kind.TEXT | Kind.CHOICE:
            return STRING
