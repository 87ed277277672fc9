"""The one table of what can be set at run time: for the cluster, for one broker, for one topic.

Every reader of a setting, every check of a value and the page docs/configuration.md come from these rows. A topic's
key names the cluster-wide keys that give its default (`server`, the first that is set wins, each with the factor to the
topic key's unit), so `log.retention.hours` and `retention.ms` are one setting. `None` as a default means that there is
no fixed one; `default_says` tells what holds instead.
"""

from __future__ import annotations

from tidelog.metadata.config_groups import GROUP_KEYS
from tidelog.metadata.config_kafka import COMPRESSION_LEVEL_KEYS, INERT_TOPIC_KEYS
from tidelog.metadata.config_kinds import (
    BATCH_BYTES_MOST,
    CLUSTER_SCOPES,
    DAY_MS,
    HOUR_MS,
    INT_MAX,
    LONG_MAX,
    MINUTE_MS,
    SECOND_MS,
    Definition,
    Kind,
    Scope,
    Value,
    cluster_key,
)
from tidelog.metadata.config_kinds import topic_key as _topic

__all__ = [
    "BATCH_BYTES_MOST",
    "BROKER_KEYS",
    "CLUSTER_KEYS",
    "DAY_MS",
    "HOUR_MS",
    "INT_MAX",
    "LONG_MAX",
    "MINUTE_MS",
    "SECOND_MS",
    "SERVER_KEYS",
    "TABLES",
    "TOPIC_KEYS",
    "Definition",
    "Kind",
    "Scope",
    "Value",
]

_BROKERS = (Scope.CLUSTER, Scope.BROKER)


def _broker(name: str, kind: Kind, default: Value | None, doc: str, **more: object) -> Definition:
    return Definition(name=name, kind=kind, default=default, doc=doc, scopes=_BROKERS, **more)  # type: ignore[arg-type]


_MS = {"unit": "ms"}
_BYTES = {"unit": "bytes"}

TOPIC_KEYS: tuple[Definition, ...] = (
    _topic(
        "cleanup.policy",
        Kind.LIST,
        ("delete",),
        "What happens to old segments: deleted by age and size, compacted to the latest record of each key, or both.",
        "log.cleanup.policy",
        choices=("delete", "compact"),
    ),
    _topic(
        "compression.type",
        Kind.CHOICE,
        "producer",
        "The codec that batches are stored with; `producer` keeps what the producer chose. With another one, and in a "
        "compacted topic, batches are decoded when they arrive, and may decompress to 16 times max.message.bytes (at "
        "least 1 MiB, at most 64 MiB).",
        "compression.type",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    ),
    *COMPRESSION_LEVEL_KEYS,
    _topic(
        "delete.retention.ms",
        Kind.INT,
        DAY_MS,
        "How long a tombstone stays readable in a compacted topic.",
        "log.cleaner.delete.retention.ms",
        least=0,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "file.delete.delay.ms",
        Kind.INT,
        MINUTE_MS,
        "How long the file of a deleted segment is kept for readers that have it open.",
        "log.segment.delete.delay.ms",
        least=0,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "flush.messages",
        Kind.INT,
        None,
        "With flush.mode=page-cache: sync after this many records.",
        "log.flush.interval.messages",
        least=1,
        most=LONG_MAX,
        default_says="left to the system",
    ),
    _topic(
        "flush.mode",
        Kind.CHOICE,
        "sync",
        "When an append counts as safe: on the device (`sync`), or in memory (`page-cache`), which a loss of power "
        "everywhere at once takes with it.",
        "log.flush.mode",
        choices=("sync", "page-cache"),
    ),
    _topic(
        "flush.ms",
        Kind.INT,
        None,
        "With flush.mode=page-cache: sync when the oldest unsynced record is this old.",
        "log.flush.interval.ms",
        least=0,
        most=LONG_MAX,
        default_says="left to the system",
        **_MS,
    ),
    _topic(
        "follower.replication.throttled.replicas",
        Kind.REPLICAS,
        (),
        "Replicas whose catching up is throttled on the follower's side.",
    ),
    _topic(
        "index.interval.bytes",
        Kind.INT,
        4096,
        "Bytes of log between two entries of the offset index.",
        "log.index.interval.bytes",
        least=0,
        most=INT_MAX,
        **_BYTES,
    ),
    _topic(
        "leader.replication.throttled.replicas",
        Kind.REPLICAS,
        (),
        "Replicas whose catching up is throttled on the leader's side.",
    ),
    _topic(
        "max.compaction.lag.ms",
        Kind.INT,
        LONG_MAX,
        "The longest time that a record may wait for compaction.",
        "log.cleaner.max.compaction.lag.ms",
        least=1,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "max.message.bytes",
        Kind.INT,
        1_048_588,
        "The largest record batch that is taken, as it arrives (compressed) and as it is stored. The limit of "
        "socket.request.max.bytes holds as well.",
        "message.max.bytes",
        least=0,
        most=BATCH_BYTES_MOST,
        **_BYTES,
    ),
    _topic(
        "message.timestamp.after.max.ms",
        Kind.INT,
        HOUR_MS,
        "How far a producer's timestamp may lie in the future.",
        "log.message.timestamp.after.max.ms",
        least=0,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "message.timestamp.before.max.ms",
        Kind.INT,
        LONG_MAX,
        "How far a producer's timestamp may lie in the past.",
        "log.message.timestamp.before.max.ms",
        least=0,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "message.timestamp.type",
        Kind.CHOICE,
        "CreateTime",
        "Whether records keep the producer's timestamp or get the log's own.",
        "log.message.timestamp.type",
        choices=("CreateTime", "LogAppendTime"),
    ),
    _topic(
        "min.cleanable.dirty.ratio",
        Kind.FLOAT,
        0.5,
        "The part of a log that has to be uncompacted before it is compacted.",
        "log.cleaner.min.cleanable.ratio",
        least=0.0,
        most=1.0,
    ),
    _topic(
        "min.compaction.lag.ms",
        Kind.INT,
        0,
        "The shortest time that a record stays uncompacted.",
        "log.cleaner.min.compaction.lag.ms",
        least=0,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "min.insync.replicas",
        Kind.INT,
        None,
        "How many replicas must be in sync for a write with acks=all; never more than the topic has.",
        "min.insync.replicas",
        least=1,
        most=INT_MAX,
        default_says="a majority of the replication factor",
    ),
    _topic(
        "retention.bytes",
        Kind.INT,
        -1,
        "Bytes of a partition that are kept at least; -1 is no limit.",
        "log.retention.bytes",
        least=-1,
        most=LONG_MAX,
        **_BYTES,
    ),
    _topic(
        "retention.ms",
        Kind.INT,
        7 * DAY_MS,
        "How long records are kept at least; -1 is for ever.",
        "log.retention.ms",
        ("log.retention.minutes", MINUTE_MS),
        ("log.retention.hours", HOUR_MS),
        least=-1,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "segment.bytes",
        Kind.INT,
        1 << 30,
        "The size at which a segment is sealed and a new one begun.",
        "log.segment.bytes",
        least=14,
        most=INT_MAX,
        **_BYTES,
    ),
    _topic(
        "segment.index.bytes",
        Kind.INT,
        10 << 20,
        "The largest size of a segment's index; a full index seals the segment.",
        "log.index.size.max.bytes",
        least=4,
        most=INT_MAX,
        **_BYTES,
    ),
    _topic(
        "segment.jitter.ms",
        Kind.INT,
        0,
        "Up to this much is taken off segment.ms, so that quiet logs do not roll all at once.",
        "log.roll.jitter.ms",
        ("log.roll.jitter.hours", HOUR_MS),
        least=0,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "segment.ms",
        Kind.INT,
        7 * DAY_MS,
        "The age at which a segment is sealed even if it is small.",
        "log.roll.ms",
        ("log.roll.hours", HOUR_MS),
        least=1,
        most=LONG_MAX,
        **_MS,
    ),
    _topic(
        "unclean.leader.election.enable",
        Kind.BOOL,
        False,
        "Whether a replica that lacks acknowledged records may lead when no other can: available again, with loss.",
        "unclean.leader.election.enable",
    ),
    *INERT_TOPIC_KEYS,
)

CLUSTER_KEYS: tuple[Definition, ...] = (
    cluster_key(
        "auto.create.topics.enable",
        Kind.BOOL,
        False,
        "Whether a client that looks for an unknown topic to write to creates it, with `num.partitions` and "
        "`default.replication.factor`; readers do not, unless they ask for it. `tidelog dev` turns it on.",
    ),
    cluster_key(
        "auto.leader.rebalance.enable",
        Kind.BOOL,
        True,
        "Whether the controller gives leaderships back to preferred replicas from time to time.",
    ),
    cluster_key(
        "broker.session.timeout.ms",
        Kind.INT,
        3000,
        "Silence after which a broker is fenced; a refused connection fences it at once.",
        least=500,
        most=INT_MAX,
        **_MS,
    ),
    cluster_key(
        "default.replication.factor",
        Kind.INT,
        3,
        "Replicas of a topic that is created without a number.",
        least=1,
        most=INT_MAX,
    ),
    cluster_key("delete.topic.enable", Kind.BOOL, True, "Whether topics can be deleted at all."),
    cluster_key(
        "leader.imbalance.check.interval.seconds",
        Kind.INT,
        300,
        "How often the controller looks at who leads.",
        least=1,
        most=INT_MAX,
        unit="s",
    ),
    cluster_key(
        "leader.imbalance.per.broker.percentage",
        Kind.INT,
        10,
        "Leaderships that a broker may be missing, of those that it is preferred for, before they are given back.",
        least=0,
        most=100,
        unit="%",
    ),
    cluster_key(
        "max.partitions.per.broker",
        Kind.INT,
        14_000,
        "Replicas that one broker may be given; past that topics are refused.",
        least=1,
        most=INT_MAX,
    ),
    cluster_key(
        "max.replicas.per.cluster",
        Kind.INT,
        1_000_000,
        "Replicas that all topics may have together.",
        least=1,
        most=INT_MAX,
    ),
    cluster_key(
        "num.partitions",
        Kind.INT,
        1,
        "Partitions of a topic that is created without a number.",
        least=1,
        most=10_000,
    ),
    *GROUP_KEYS,
    cluster_key(
        "transaction.max.timeout.ms",
        Kind.INT,
        15 * MINUTE_MS,
        "The longest timeout that a producer may ask for its transactions.",
        least=1,
        most=INT_MAX,
        **_MS,
    ),
    cluster_key(
        "transaction.state.log.num.partitions",
        Kind.INT,
        50,
        "Partitions of __transaction_state, used when it is created.",
        least=1,
        most=10_000,
    ),
)

BROKER_KEYS: tuple[Definition, ...] = (
    _broker(
        "disk.stall.timeout.ms",
        Kind.INT,
        2000,
        "A log directory that does not finish a write or sync in this time gives up leaderships and in-sync places.",
        least=100,
        most=INT_MAX,
        **_MS,
    ),
    _broker(
        "follower.replication.throttled.rate",
        Kind.INT,
        LONG_MAX,
        "Bytes a second that a broker takes for throttled replicas.",
        least=0,
        most=LONG_MAX,
        unit="bytes/s",
    ),
    _broker(
        "leader.replication.throttled.rate",
        Kind.INT,
        LONG_MAX,
        "Bytes a second that a broker gives to throttled replicas.",
        least=0,
        most=LONG_MAX,
        unit="bytes/s",
    ),
    _broker(
        "log.retention.check.interval.ms",
        Kind.INT,
        5 * MINUTE_MS,
        "How often a broker looks for segments that may go.",
        least=1,
        most=LONG_MAX,
        **_MS,
    ),
    _broker(
        "log.scrub.bytes.per.second",
        Kind.INT,
        10 << 20,
        "How fast a broker reads its sealed segments to find rot, on average; 0 for no scrub.",
        least=0,
        most=LONG_MAX,
        unit="bytes/s",
    ),
    _broker(
        "log.scrub.interval.ms",
        Kind.INT,
        7 * DAY_MS,
        "How often every sealed segment is compared with its checksum, if the rate allows it.",
        least=1000,
        most=LONG_MAX,
        **_MS,
    ),
    _broker(
        "producer.id.expiration.ms",
        Kind.INT,
        DAY_MS,
        "How long a log remembers a producer that sends nothing. A log remembers at most 10000 producers: past that "
        "the ones that wrote longest ago are forgotten, and with them what tells their repeats from something new.",
        least=1,
        most=INT_MAX,
        **_MS,
    ),
    _broker(
        "replica.lag.time.max.ms",
        Kind.INT,
        10_000,
        "How long a follower may be behind before it is taken out of the in-sync replicas.",
        least=100,
        most=LONG_MAX,
        **_MS,
    ),
)


def _derived(definition: Definition) -> list[Definition]:
    """The cluster-wide keys that give a topic key its default."""
    found = []
    for name, factor in definition.server:
        scaled = {}
        if factor != 1:
            unit = {MINUTE_MS: "min", HOUR_MS: "h"}[factor]
            most = None if definition.most is None else definition.most // factor
            scaled = {"unit": unit, "default": None, "default_says": f"see {definition.server[0][0]}", "most": most}
        fields = {
            "kind": definition.kind,
            "default": definition.default,
            "default_says": definition.default_says,
            "unit": definition.unit,
            "least": definition.least,
            "most": definition.most,
            "choices": definition.choices,
            "also": definition.also,
            "accepted": definition.accepted,
            "refusal": definition.refusal,
            **scaled,
        }
        doc = f"Default of the topic key {definition.name}."
        found.append(Definition(name=name, doc=doc, scopes=CLUSTER_SCOPES, **fields))  # type: ignore[arg-type]
    return found


SERVER_KEYS: tuple[Definition, ...] = tuple(
    sorted((made for key in TOPIC_KEYS for made in _derived(key)), key=lambda made: made.name)
)
TABLES: dict[Scope, dict[str, Definition]] = {
    Scope.TOPIC: {key.name: key for key in TOPIC_KEYS},
    Scope.CLUSTER: {key.name: key for key in (*CLUSTER_KEYS, *BROKER_KEYS, *SERVER_KEYS)},
    Scope.BROKER: {key.name: key for key in BROKER_KEYS},
}
