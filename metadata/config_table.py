"""The one table of what can be set at run time: for the cluster, for one broker, for one topic. Pure.

Every reader of a setting, every check of a value and the page docs/configuration.md come from these rows. A topic's
key names the cluster-wide keys that give its default (`server`, the first that is set wins, each with the factor to the
topic key's unit), so `log.retention.hours` and `retention.ms` are one setting. `None` as a default means that there is
no fixed one; `default_text` tells what holds instead.
"""

from dataclasses import replace

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
    broker_int,
    cluster_int,
    cluster_key,
    topic_int,
    topic_key,
    unit_of,
)

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

TOPIC_KEYS: tuple[Definition, ...] = (
    topic_key(
        "cleanup.policy",
        Kind.LIST,
        ("delete",),
        "What happens to old segments: deleted by age and size, compacted to the latest record of each key, or both.",
        "log.cleanup.policy",
        choices=("delete", "compact"),
    ),
    topic_key(
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
    topic_int(
        "delete.retention.ms",
        DAY_MS,
        "How long a tombstone stays readable in a compacted topic.",
        "log.cleaner.delete.retention.ms",
        least=0,
    ),
    topic_int(
        "file.delete.delay.ms",
        MINUTE_MS,
        "How long the file of a deleted segment is kept for readers that have it open.",
        "log.segment.delete.delay.ms",
        least=0,
    ),
    topic_int(
        "flush.messages",
        None,
        "With flush.mode=page-cache: sync after this many records.",
        "log.flush.interval.messages",
        least=1,
        default_text="left to the system",
    ),
    topic_key(
        "flush.mode",
        Kind.CHOICE,
        "sync",
        "When an append counts as safe: on the device (`sync`), or in memory (`page-cache`), which a loss of power "
        "everywhere at once takes with it.",
        "log.flush.mode",
        choices=("sync", "page-cache"),
    ),
    topic_int(
        "flush.ms",
        None,
        "With flush.mode=page-cache: sync when the oldest unsynced record is this old.",
        "log.flush.interval.ms",
        least=0,
        default_text="left to the system",
    ),
    topic_key(
        "follower.replication.throttled.replicas",
        Kind.REPLICAS,
        (),
        "Replicas whose catching up is throttled on the follower's side.",
    ),
    topic_int(
        "index.interval.bytes",
        4096,
        "Bytes of log between two entries of the offset index.",
        "log.index.interval.bytes",
        least=0,
        most=INT_MAX,
    ),
    topic_key(
        "leader.replication.throttled.replicas",
        Kind.REPLICAS,
        (),
        "Replicas whose catching up is throttled on the leader's side.",
    ),
    topic_int(
        "max.compaction.lag.ms",
        LONG_MAX,
        "The longest time that a record may wait for compaction.",
        "log.cleaner.max.compaction.lag.ms",
        least=1,
    ),
    topic_int(
        "max.message.bytes",
        1_048_588,
        "The largest record batch that is taken, as it arrives (compressed) and as it is stored. The limit of "
        "socket.request.max.bytes holds as well.",
        "message.max.bytes",
        least=0,
        most=BATCH_BYTES_MOST,
    ),
    topic_int(
        "message.timestamp.after.max.ms",
        HOUR_MS,
        "How far a producer's timestamp may lie in the future.",
        "log.message.timestamp.after.max.ms",
        least=0,
    ),
    topic_int(
        "message.timestamp.before.max.ms",
        LONG_MAX,
        "How far a producer's timestamp may lie in the past.",
        "log.message.timestamp.before.max.ms",
        least=0,
    ),
    topic_key(
        "message.timestamp.type",
        Kind.CHOICE,
        "CreateTime",
        "Whether records keep the producer's timestamp or get the log's own.",
        "log.message.timestamp.type",
        choices=("CreateTime", "LogAppendTime"),
    ),
    topic_key(
        "min.cleanable.dirty.ratio",
        Kind.FLOAT,
        0.5,
        "The part of a log that has to be uncompacted before it is compacted.",
        "log.cleaner.min.cleanable.ratio",
        least=0.0,
        most=1.0,
    ),
    topic_int(
        "min.compaction.lag.ms",
        0,
        "The shortest time that a record stays uncompacted.",
        "log.cleaner.min.compaction.lag.ms",
        least=0,
    ),
    topic_int(
        "min.insync.replicas",
        None,
        "How many replicas must be in sync for a write with acks=all; never more than the topic has.",
        "min.insync.replicas",
        least=1,
        most=INT_MAX,
        default_text="a majority of the replication factor",
    ),
    topic_int(
        "retention.bytes",
        -1,
        "Bytes of a partition that are kept at least; -1 is no limit.",
        "log.retention.bytes",
        least=-1,
    ),
    topic_int(
        "retention.ms",
        7 * DAY_MS,
        "How long records are kept at least; -1 is for ever.",
        "log.retention.ms",
        ("log.retention.minutes", MINUTE_MS),
        ("log.retention.hours", HOUR_MS),
        least=-1,
    ),
    topic_int(
        "segment.bytes",
        1 << 30,
        "The size at which a segment is sealed and a new one begun.",
        "log.segment.bytes",
        least=14,
        most=INT_MAX,
    ),
    topic_int(
        "segment.index.bytes",
        10 << 20,
        "The largest size of a segment's index; a full index seals the segment.",
        "log.index.size.max.bytes",
        least=4,
        most=INT_MAX,
    ),
    topic_int(
        "segment.jitter.ms",
        0,
        "Up to this much is taken off segment.ms, so that quiet logs do not roll all at once.",
        "log.roll.jitter.ms",
        ("log.roll.jitter.hours", HOUR_MS),
        least=0,
    ),
    topic_int(
        "segment.ms",
        7 * DAY_MS,
        "The age at which a segment is sealed even if it is small.",
        "log.roll.ms",
        ("log.roll.hours", HOUR_MS),
        least=1,
    ),
    topic_key(
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
    cluster_int(
        "broker.session.timeout.ms",
        3000,
        "Silence after which a broker is fenced; a refused connection fences it at once.",
        least=500,
    ),
    cluster_int("default.replication.factor", 3, "Replicas of a topic that is created without a number.", least=1),
    cluster_key("delete.topic.enable", Kind.BOOL, True, "Whether topics can be deleted at all."),
    cluster_int(
        "leader.imbalance.check.interval.seconds", 300, "How often the controller looks at who leads.", least=1
    ),
    cluster_int(
        "leader.imbalance.per.broker.percentage",
        10,
        "Leaderships that a broker may be missing, of those that it is preferred for, before they are given back.",
        least=0,
        most=100,
    ),
    cluster_int(
        "max.partitions.per.broker",
        14_000,
        "Replicas that one broker may be given; past that topics are rejected.",
        least=1,
    ),
    cluster_int("max.replicas.per.cluster", 1_000_000, "Replicas that all topics may have together.", least=1),
    cluster_int("num.partitions", 1, "Partitions of a topic that is created without a number.", least=1, most=10_000),
    *GROUP_KEYS,
    cluster_int(
        "transaction.max.timeout.ms",
        15 * MINUTE_MS,
        "The longest timeout that a producer may ask for its transactions.",
        least=1,
    ),
    cluster_int(
        "transaction.prepared.timeout.ms",
        DAY_MS,
        "How long a prepared transaction waits for its owner before it is aborted.",
        least=1,
    ),
    cluster_int(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        HOUR_MS,
        "How often unused transactional ids are looked for.",
        least=1,
    ),
    cluster_int(
        "transaction.state.log.num.partitions",
        50,
        "Partitions of __transaction_state, used when it is created.",
        least=1,
        most=10_000,
    ),
    cluster_int(
        "transactional.id.expiration.ms",
        7 * DAY_MS,
        "How long a transactional id without a transaction and without a token is kept after its last use.",
        least=1,
    ),
)

BROKER_KEYS: tuple[Definition, ...] = (
    broker_int(
        "disk.stall.timeout.ms",
        2000,
        "A log directory that does not finish a write or sync in this time gives up leaderships and in-sync places.",
        least=100,
        most=INT_MAX,
    ),
    broker_int(
        "follower.replication.throttled.rate",
        LONG_MAX,
        "Bytes a second that a broker takes for throttled replicas.",
        least=0,
        unit="bytes/s",
    ),
    broker_int(
        "leader.replication.throttled.rate",
        LONG_MAX,
        "Bytes a second that a broker gives to throttled replicas.",
        least=0,
        unit="bytes/s",
    ),
    broker_int(
        "log.retention.check.interval.ms", 5 * MINUTE_MS, "How often a broker looks for segments that may go.", least=1
    ),
    broker_int(
        "log.scrub.bytes.per.second",
        10 << 20,
        "How fast a broker reads its sealed segments to find rot, on average; 0 for no scrub.",
        least=0,
        unit="bytes/s",
    ),
    broker_int(
        "log.scrub.interval.ms",
        7 * DAY_MS,
        "How often every sealed segment is compared with its checksum, if the rate allows it.",
        least=1000,
    ),
    broker_int(
        "replica.verify.bytes.per.second",
        20 << 20,
        "How fast a broker reads its replicas for `tidelog brokers verify-replicas`, for all its callers together.",
        least=64 << 10,
        unit="bytes/s",
    ),
    broker_int(
        "producer.id.expiration.ms",
        DAY_MS,
        "How long a log remembers a producer that sends nothing. A log remembers at most 10000 producers: past that "
        "the ones that wrote longest ago are forgotten, and with them what tells their repeats from something new.",
        least=1,
        most=INT_MAX,
    ),
    broker_int(
        "replica.lag.time.max.ms",
        10_000,
        "How long a follower may be behind before it is taken out of the in-sync replicas.",
        least=100,
    ),
)


def _derived(definition: Definition) -> list[Definition]:
    """The cluster-wide keys that give a topic key its default."""
    found = []
    for name, factor in definition.server:
        made = replace(
            definition,
            name=name,
            doc=f"Default of the topic key {definition.name}.",
            scopes=CLUSTER_SCOPES,
            server=(),
            unit=unit_of(name),
        )
        if factor != 1:
            most = None if made.most is None else made.most // factor
            made = replace(made, default=None, default_text=f"see {definition.server[0][0]}", most=most)
        found.append(made)
    return found


SERVER_KEYS: tuple[Definition, ...] = tuple(
    sorted((made for key in TOPIC_KEYS for made in _derived(key)), key=lambda made: made.name)
)
TABLES: dict[Scope, dict[str, Definition]] = {
    Scope.TOPIC: {key.name: key for key in TOPIC_KEYS},
    Scope.CLUSTER: {key.name: key for key in (*CLUSTER_KEYS, *BROKER_KEYS, *SERVER_KEYS)},
    Scope.BROKER: {key.name: key for key in BROKER_KEYS},
}
