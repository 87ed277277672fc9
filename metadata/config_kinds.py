"""What a row of the table of settings is (`config_table`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
INT_MAX = (1 << 31) - 1
LONG_MAX = (1 << 63) - 1
BATCH_BYTES_MOST = 60 << 20
"""A batch travels between brokers in one frame (`world.transport.FRAME_BYTES_MAX`), with room for what stands beside
it."""


class Kind(Enum):
    INT = "integer"
    FLOAT = "number"
    BOOL = "true or false"
    CHOICE = "one of"
    LIST = "list of"
    REPLICAS = "list of partition:broker, or *"


class Scope(Enum):
    """Where a key can be set. The values are the resource types of `SetConfig`."""

    CLUSTER = "cluster"
    BROKER = "broker"
    TOPIC = "topic"


Value = int | float | bool | str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    name: str
    kind: Kind
    default: Value | None
    doc: str
    """One sentence."""
    scopes: tuple[Scope, ...]
    unit: str = ""
    least: int | float | None = None
    most: int | float | None = None
    choices: tuple[str, ...] = ()
    server: tuple[tuple[str, int], ...] = ()
    default_says: str = ""
    also: tuple[int, ...] = ()
    """Values outside of the range that are accepted too."""
    accepted: tuple[Value, ...] = ()
    """Of a key of Kafka that has no meaning here: the values that change nothing. All others are refused."""
    refusal: str = ""
    """Why the others are refused."""
    is_dynamic: bool = True
    """A change acts without a restart."""


CLUSTER_SCOPES = (Scope.CLUSTER,)
TOPIC_SCOPES = (Scope.TOPIC,)


def topic_key(
    name: str, kind: Kind, default: Value | None, doc: str, *server: str | tuple[str, int], **more: object
) -> Definition:
    """`server`: the cluster-wide keys that give its default."""
    names = tuple((entry, 1) if isinstance(entry, str) else entry for entry in server)
    return Definition(name=name, kind=kind, default=default, doc=doc, scopes=TOPIC_SCOPES, server=names, **more)  # type: ignore[arg-type]


def cluster_key(name: str, kind: Kind, default: Value | None, doc: str, **more: object) -> Definition:
    return Definition(name=name, kind=kind, default=default, doc=doc, scopes=CLUSTER_SCOPES, **more)  # type: ignore[arg-type]
