"""The one table of what a node's own file can say. Keys are Kafka's where Kafka has them.

Keys of the cluster's state (`metadata.config_table`: `num.partitions`, `log.retention.ms`, ...) may stand in the same
file; they are not in this table. `tidelog config show` and the checks of `server.config` come from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tidelog.metadata.config_table import HOUR_MS, INT_MAX, LONG_MAX


class Kind(Enum):
    INT = "an integer"
    BOOL = "true or false"
    TEXT = "text"
    CHOICE = "one of"
    LIST = "a list of"


Value = int | bool | str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `default` is None if there is no fixed default; `default_text` then describes it."""

    name: str
    kind: Kind
    default: Value | None
    doc: str
    default_text: str = ""
    unit: str = ""
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    form: str = ""
    """Form of a value (text) or of one item (list), for the documentation."""
    aliases: tuple[str, ...] = ()
    """Names of the same setting in other versions."""


def _int(name: str, default: int | None, doc: str, least: int, most: int, unit: str = "", **more: str) -> Setting:
    return Setting(
        name=name,
        kind=Kind.INT,
        default=default,
        doc=doc,
        least=least,
        most=most,
        unit=unit,
        **more,  # type: ignore[arg-type]
    )


BROKER, CONTROLLER = "broker", "controller"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="process.roles",
        kind=Kind.LIST,
        default=(BROKER, CONTROLLER),
        doc="What this node is: a broker that stores partitions, a controller that votes on metadata, or both.",
        choices=(BROKER, CONTROLLER),
    ),
    Setting(
        name="node.id",
        kind=Kind.INT,
        default=None,
        default_text="required",
        doc="The node's number, its own in the cluster, for ever.",
        least=0,
        most=INT_MAX,
        aliases=("broker.id",),
    ),
    Setting(
        name="log.dirs",
        kind=Kind.LIST,
        default=None,
        default_text="required",
        doc="Directories that hold the logs, best each on a device of its own.",
        form="paths",
        aliases=("log.dir",),
    ),
    Setting(
        name="metadata.log.dir",
        kind=Kind.TEXT,
        default=None,
        default_text="the first of log.dirs",
        doc="The directory that holds the metadata log of a controller, and a broker's copy of it.",
        form="a path",
    ),
    Setting(
        name="listeners",
        kind=Kind.LIST,
        default=None,
        default_text="KAFKA://:9092 (brokers), GRPC://:9292, between nodes CONTROLLER://:9192 (INTERNAL of a broker)",
        doc="Where this node listens, one or more of each kind. Clients receive the addresses of the listener they "
        "connected to, so its name is the same on all brokers. "
        "A kind that is not listed is at its default distance: 9092, 9192, 9292.",
        form="NAME://host:port; no host is every interface",
    ),
    Setting(
        name="advertised.listeners",
        kind=Kind.LIST,
        default=None,
        default_text="listeners, with this machine's name for an empty host",
        doc="Addresses that clients and other nodes receive, by listener.",
        form="NAME://host:port",
    ),
    Setting(
        name="listener.security.protocol.map",
        kind=Kind.LIST,
        default=(),
        doc="The security protocol of each listener; PLAINTEXT is the only one so far.",
        form="NAME:PROTOCOL",
    ),
    Setting(
        name="listener.protocols",
        kind=Kind.LIST,
        default=(),
        default_text="by name: GRPC... is grpc, those of controllers and between brokers are node, others are kafka",
        doc="What a listener serves: grpc (our API), kafka (its wire protocol) or node (inside the cluster).",
        form="NAME:grpc, NAME:kafka or NAME:node",
    ),
    Setting(
        name="kafka.enable",
        kind=Kind.BOOL,
        default=True,
        doc="Whether a broker that lists no listener for Kafka clients opens one, at its usual distance.",
    ),
    Setting(
        name="controller.listener.names",
        kind=Kind.LIST,
        default=("CONTROLLER",),
        doc="Listeners of controllers; the first that is among `listeners` is the one this node uses.",
        form="names of listeners",
    ),
    Setting(
        name="inter.broker.listener.name",
        kind=Kind.TEXT,
        default=None,
        default_text="INTERNAL, or the controllers' of a combined node that does not list it",
        doc="The listener between brokers (replication). A combined node may have it beside the controllers'.",
        form="the name of a listener",
    ),
    Setting(
        name="controller.quorum.voters",
        kind=Kind.LIST,
        default=(),
        doc="The controllers, by which a node finds the others; at `storage format` also the first voters.",
        form="id@host:port",
    ),
    Setting(
        name="controller.quorum.bootstrap.servers",
        kind=Kind.LIST,
        default=(),
        doc="Controllers to ask for the others, where their ids are not known.",
        form="host:port",
    ),
    Setting(
        name="broker.rack",
        kind=Kind.TEXT,
        default=None,
        default_text="none",
        doc="Where the node stands: replicas of a partition are spread over racks. With several on one host: the host.",
        form="a name",
        aliases=("rack",),
    ),
    Setting(
        name="http.listener",
        kind=Kind.TEXT,
        default=None,
        default_text="the port of the gRPC listener plus 100: :9392",
        doc="Where /metrics and /healthz are; `none` for nowhere.",
        form="host:port, or none",
    ),
    _int(
        "num.recovery.threads.per.data.dir",
        1,
        "Helper processes of the node, for all of its directories together; they recover, compact and scrub logs.",
        1,
        64,
    ),
    _int("log.open.files.max", 512, "Files of each log directory that stay open.", 16, 1 << 20),
    _int("log.cleaner.backoff.ms", 15_000, "How often a broker looks for logs to compact.", 100, LONG_MAX, "ms"),
    _int(
        "queued.max.request.bytes",
        256 << 20,
        "Bytes of requests that may wait in a broker; past that it reads no more from its clients.",
        1 << 20,
        1 << 40,
        "bytes",
    ),
    _int("fetch.max.bytes", 55 << 20, "The largest answer to one fetch.", 1024, 1 << 30, "bytes"),
    _int(
        "socket.request.max.bytes", 64 << 20, "The largest request that a client may send.", 1 << 16, 1 << 30, "bytes"
    ),
    _int(
        "connections.max.idle.ms",
        600_000,
        "A connection of a Kafka client that asks nothing for so long is closed.",
        1_000,
        LONG_MAX,
        "ms",
    ),
    _int(
        "max.incremental.fetch.session.cache.slots",
        1_000,
        "Fetch sessions of Kafka clients that a broker remembers; 0: none.",
        0,
        1 << 20,
    ),
    _int("max.connections", 10_000, "Connections of Kafka clients; one more is closed at once.", 1, INT_MAX),
    _int("max.connections.per.ip", 10_000, "Of them from one address.", 1, INT_MAX),
    _int("socket.listen.backlog.size", 1_024, "Connections of Kafka clients that wait to be accepted.", 1, 65_535),
    _int(
        "socket.send.buffer.bytes",
        -1,
        "SO_SNDBUF of Kafka connections; -1 leaves it to the kernel, which adapts it.",
        -1,
        1 << 30,
        "bytes",
    ),
    _int(
        "socket.receive.buffer.bytes",
        -1,
        "SO_RCVBUF of Kafka connections; -1 leaves it to the kernel, which adapts it.",
        -1,
        1 << 30,
        "bytes",
    ),
    _int(
        "broker.heartbeat.interval.ms", 500, "How often a broker tells the controller that it lives.", 10, 60_000, "ms"
    ),
    _int(
        "controlled.shutdown.timeout.ms",
        20_000,
        "How long a stopping node tries to move its leaderships; 0 stops without.",
        0,
        HOUR_MS,
        "ms",
    ),
    _int(
        "controller.quorum.election.timeout.ms",
        500,
        "Silence of the leader after which controllers elect, at least; at most it is twice that.",
        50,
        600_000,
        "ms",
    ),
    _int(
        "metadata.log.max.record.bytes.between.snapshots",
        20 << 20,
        "A snapshot of the metadata is taken after so many bytes of records.",
        1024,
        LONG_MAX,
        "bytes",
    ),
    _int(
        "metadata.log.max.snapshot.interval.ms",
        HOUR_MS,
        "And at the latest after this time, if there was any record.",
        1000,
        LONG_MAX,
        "ms",
    ),
    _int(
        "metadata.max.idle.interval.ms",
        500,
        "The controller writes an empty record after so long without one; 0: never.",
        0,
        INT_MAX,
        "ms",
    ),
    _int("loop.lag.warn.ms", 200, "An event loop that is blocked for longer is logged.", 10, 60_000, "ms"),
    Setting(
        name="authorizer",
        kind=Kind.CHOICE,
        default="none",
        doc="What authorizes requests: none allows everything, acl enforces the cluster's ACLs. The same on all nodes.",
        choices=("none", "acl"),
    ),
    Setting(
        name="super.users",
        kind=Kind.TEXT,
        default=None,
        default_text="none",
        doc="Principals that may do everything, whatever the ACLs say. Until listeners authenticate, every client is "
        "User:ANONYMOUS.",
        form="User:name;User:name",
    ),
    Setting(
        name="allow.everyone.if.no.acl.found",
        kind=Kind.BOOL,
        default=False,
        doc="Whether everybody may use a resource that no ACL names.",
    ),
    Setting(
        name="logging.level",
        kind=Kind.CHOICE,
        default="info",
        doc="What the node writes to stderr.",
        choices=("debug", "info", "warning", "error"),
    ),
    Setting(
        name="logging.format",
        kind=Kind.CHOICE,
        default="text",
        doc="Lines for a person (key=value), or one JSON object each.",
        choices=("text", "json"),
    ),
)

TABLE: dict[str, Setting] = {row.name: row for row in SETTINGS}
DEFAULTS: Mapping[str, Value] = {row.name: row.default for row in SETTINGS if row.default is not None}
ALIASES: dict[str, str] = {alias: row.name for row in SETTINGS for alias in row.aliases}
