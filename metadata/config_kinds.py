"""The definition of a config key (`config_table`). Pure."""

from dataclasses import dataclass
from enum import Enum

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
INT_MAX = (1 << 31) - 1
LONG_MAX = (1 << 63) - 1
BATCH_BYTES_MOST = 60 << 20
"""Brokers send a batch to each other in one frame (`world.transport.FRAME_BYTES_MAX`), with space for what surrounds
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
    default_text: str = ""
    also: tuple[int, ...] = ()
    """Accepted values outside of the range."""
    accepted: tuple[Value, ...] = ()
    """For a Kafka key without effect here: the values that change nothing. All others are rejected."""
    rejection: str = ""
    """Why the others are rejected."""
    is_dynamic: bool = True
    """A change takes effect without a restart."""


CLUSTER_SCOPES = (Scope.CLUSTER,)
TOPIC_SCOPES = (Scope.TOPIC,)
BROKER_SCOPES = (Scope.CLUSTER, Scope.BROKER)
_UNITS = {"ms": "ms", "bytes": "bytes", "seconds": "s", "minutes": "min", "hours": "h", "percentage": "%"}


def unit_of(name: str) -> str:
    """Return the unit that the end of a key's name tells."""
    return _UNITS.get(name.rpartition(".")[2], "")


def topic_key(
    name: str, kind: Kind, default: Value | None, doc: str, *server: str | tuple[str, int], **more: object
) -> Definition:
    """`server`: the cluster-wide keys of its default."""
    names = tuple((entry, 1) if isinstance(entry, str) else entry for entry in server)
    return _key(name, kind, default, doc, scopes=TOPIC_SCOPES, server=names, **more)


def cluster_key(name: str, kind: Kind, default: Value | None, doc: str, **more: object) -> Definition:
    return _key(name, kind, default, doc, scopes=CLUSTER_SCOPES, **more)


def _key(name: str, kind: Kind, default: Value | None, doc: str, **more: object) -> Definition:
    fields = {"unit": unit_of(name), **more}
    return Definition(name=name, kind=kind, default=default, doc=doc, **fields)  # type: ignore[arg-type]


def topic_int(
    name: str, default: int | None, doc: str, *server: str | tuple[str, int], most: int = LONG_MAX, **more: object
) -> Definition:
    return topic_key(name, Kind.INT, default, doc, *server, most=most, **more)


def cluster_int(name: str, default: int, doc: str, *, least: int, most: int = INT_MAX) -> Definition:
    return cluster_key(name, Kind.INT, default, doc, least=least, most=most)


def broker_int(name: str, default: int, doc: str, *, most: int = LONG_MAX, **more: object) -> Definition:
    return _key(name, Kind.INT, default, doc, scopes=BROKER_SCOPES, most=most, **more)
