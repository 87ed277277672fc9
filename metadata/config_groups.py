"""Configs of consumer groups: part of `config_table`. All take effect without a restart. Pure."""

from tidelog.metadata.config_kinds import MINUTE_MS, SECOND_MS, Definition, Kind, cluster_int, cluster_key

GROUP_KEYS: tuple[Definition, ...] = (
    cluster_int(
        "group.consumer.heartbeat.interval.ms",
        5 * SECOND_MS,
        "Heartbeat interval of consumer group members.",
        least=100,
    ),
    cluster_int(
        "group.consumer.max.size",
        1_000,
        "Members that a group may have; a change of a group is one record batch, so there is a limit.",
        least=1,
        most=10_000,
    ),
    cluster_key(
        "group.consumer.migration.policy",
        Kind.CHOICE,
        "bidirectional",
        "Whether a group with members changes its protocol: from classic to consumer when a member of the consumer "
        "protocol joins (`upgrade`), back when only members of the classic protocol are left (`downgrade`), both, or "
        "not at all.",
        choices=("disabled", "upgrade", "downgrade", "bidirectional"),
    ),
    cluster_int(
        "group.consumer.session.timeout.ms",
        45 * SECOND_MS,
        "Silence after which a member that has not asked for another time is out of its group.",
        least=1,
    ),
    cluster_int(
        "group.consumer.stream.grace.ms",
        2 * SECOND_MS,
        "How long a member whose stream has broken without a goodbye may take to come back; a static member keeps its "
        "session.",
        least=0,
    ),
    cluster_int(
        "group.consumer.stream.reconnect.ms",
        10 * SECOND_MS,
        "How long a member with a stream may take to be heard by a new coordinator of its group, if its session is not "
        "shorter. A client may need a heartbeat interval and 3 s to notice that the former one is silent, and 2 s for "
        "each broker that it asks in vain; a static member keeps its session.",
        least=0,
    ),
    cluster_int(
        "group.initial.rebalance.delay.ms",
        3 * SECOND_MS,
        "How long the first round of an empty group of the classic protocol waits for more members.",
        least=0,
    ),
    cluster_int(
        "group.max.session.timeout.ms",
        30 * MINUTE_MS,
        "The longest session timeout that a member may ask for.",
        least=1,
    ),
    cluster_int(
        "group.min.session.timeout.ms",
        6 * SECOND_MS,
        "The shortest session timeout that a member may ask for.",
        least=1,
    ),
    cluster_int(
        "offset.metadata.max.bytes",
        4096,
        "The longest text that may be committed with an offset.",
        least=0,
        most=1 << 16,
    ),
    cluster_int(
        "offsets.commit.timeout.ms",
        5 * SECOND_MS,
        "How long a request to a group's coordinator may wait until its change is replicated.",
        least=1,
    ),
    cluster_int(
        "offsets.retention.check.interval.ms",
        10 * MINUTE_MS,
        "How often a coordinator looks for committed offsets that have expired.",
        least=1,
    ),
    cluster_int(
        "offsets.retention.minutes",
        7 * 24 * 60,
        "How long the committed offsets of a group without members are kept.",
        least=1,
    ),
    cluster_int(
        "offsets.topic.num.partitions",
        50,
        "Partitions of __consumer_offsets, used when it is created.",
        least=1,
        most=10_000,
    ),
)
