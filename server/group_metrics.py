"""Metrics of the group coordinator (`server.metrics`).

Lag takes two of them: the coordinator of a group has its committed offsets, the leaders of a topic its ends. Both
are sums over a topic's partitions, so that they are few; a scraper of all brokers subtracts them:

    sum by (topic) (tidelog_topic_end_offset) - on (topic) group_right
        sum by (group, topic) (tidelog_group_committed_offset)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.replication.replicas import Replicas
from tidelog.server.metrics import Sample, counter, gauge
from tidelog.services.groups import GroupService

SERIES_MAX = 1_000
"""Series per metric, the first by name: limits the size of a scrape."""

_KINDS = ("consumer", "classic", "simple")


def group_samples(service: GroupService) -> Iterator[Sample]:
    coordinator, counts, loads = service.coordinator, service.counts, service.coordinator.counts
    groups, members = service.sizes()
    for kind in _KINDS:
        yield gauge("groups", groups[kind], "Groups that this broker coordinates.", kind=kind)
        yield gauge("group_members", members[kind], "Members of them.", kind=kind)
    yield gauge("group_partitions", len(coordinator.shards), "Partitions of __consumer_offsets that are led here.")
    yield gauge("group_partitions_loading", coordinator.loading, "Those that are not read yet, or cannot be.")
    yield gauge("group_streams", service.streams, "Members that have a stream here.")
    yield gauge("group_deadlines", len(coordinator.timers), "Deadlines of members.")
    yield counter("group_loads_total", loads.loads, "Partitions of __consumer_offsets that were read.")
    yield counter("group_load_seconds_total", loads.load_seconds, "The time that this took.")
    yield gauge("group_load_longest_seconds", loads.longest_load_seconds, "The longest of them.")
    yield counter("group_heartbeats_total", counts.heartbeats, "Heartbeats of members of consumer groups.")
    yield counter("group_rebalances_total", counts.rebalances, "New epochs sent to members.")
    yield counter("group_commits_total", counts.commits, "Requests to commit offsets.")
    yield counter("group_committed_offsets_total", counts.committed_offsets, "Offsets in them that were stored.")


def lag_samples(service: GroupService, replicas: Replicas) -> Iterator[Sample]:
    committed: Counter[tuple[str, str]] = Counter()
    topics = replicas.image.topics
    for shard in service.coordinator.leading_shards():
        for group in shard.state.groups.values():
            for partition, value in group.offsets.items():
                topic = topics.get(partition.topic_id)
                if topic is not None and value.offset >= 0:
                    committed[group.group_id, topic.name] += value.offset
    ends: Counter[str] = Counter()
    for leader in replicas.leaders():
        if leader.replica.topic not in INTERNAL_TOPICS:
            ends[leader.replica.topic] += leader.high_watermark
    for (group_id, name), offset in sorted(committed.items())[:SERIES_MAX]:
        help_ = "The offsets that a group has committed, of all partitions of a topic together."
        yield gauge("group_committed_offset", offset, help_, group=group_id, topic=name)
    for name, end in sorted(ends.items())[:SERIES_MAX]:
        help_ = "The high watermarks of a topic's partitions that are led here, together."
        yield gauge("topic_end_offset", end, help_, topic=name)
