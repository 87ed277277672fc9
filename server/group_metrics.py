"""Numbers of the group coordinator (`server.metrics`)."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.coordinator.service import GroupService
from tidelog.server.metrics import Sample, counter, gauge

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
    yield counter("group_rebalances_total", counts.rebalances, "Times that a member was told of a new epoch.")
    yield counter("group_commits_total", counts.commits, "Requests to commit offsets.")
    yield counter("group_committed_offsets_total", counts.committed_offsets, "Offsets in them that were stored.")
