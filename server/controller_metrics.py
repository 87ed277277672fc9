"""Metrics of a controller (`server.metrics`)."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.metadata.controller_node import ControllerNode
from tidelog.raft.driver import RaftDriver
from tidelog.raft.effects import Role
from tidelog.server.metrics import Sample, counter, gauge


def controller_samples(node: ControllerNode) -> Iterable[Sample]:
    yield gauge("controller_active", float(node.is_active), "1 while this controller is the active one.")
    yield from raft_samples(node.driver)
    image = node.image
    yield gauge("cluster_brokers", len(image.brokers), "Brokers that are registered.")
    fenced = sum(1 for broker in image.brokers.values() if broker.fenced)
    yield gauge("cluster_brokers_fenced", fenced, "Of these, those that are fenced.")
    yield gauge("cluster_topics", len(image.topics), "Topics.")


def raft_samples(driver: RaftDriver) -> Iterable[Sample]:
    """What this member knows of the quorum. Only the leader knows the lag of the others."""
    report, metrics = driver.describe(), driver.metrics
    yield gauge("raft_epoch", report.epoch, "Epoch of the metadata quorum.")
    yield gauge("raft_leader", -1 if report.leader is None else report.leader, "Its leader; -1: unknown.")
    for role in Role:
        yield gauge("raft_role", float(report.role is role), "1 for the role of this member.", role=role.value)
    yield gauge("raft_commit_offset", report.commit, "Everything below is committed.")
    yield gauge("raft_log_end_offset", report.log_end, "End of this member's log.")
    yield gauge("raft_durable_end_offset", report.durable_end, "Everything below is on this member's disk.")
    yield gauge("raft_without_leader_seconds", report.without_leader_ms / 1000, "Time since a leader was last known.")
    total_s = driver.without_leader_total_ms() / 1000
    yield counter("raft_without_leader_seconds_total", total_s, "Total time without a known leader.")
    for member in report.members:
        if member.lag is not None:
            yield gauge(
                "raft_member_lag",
                member.lag,
                "Entries that a member has not synced, by the leader's knowledge.",
                node=str(member.node),
            )
    yield counter("raft_elections_total", metrics.elections, "Elections that this member has started.")
    yield counter("raft_leader_changes_total", metrics.leader_changes, "Leaders that this member has seen.")
    yield counter(
        "raft_proposals_committed_total", metrics.proposals_committed, "Proposals that this leader has committed."
    )
    yield counter("raft_entries_applied_total", metrics.entries_applied, "Entries that were applied here.")
    yield counter("raft_snapshots_taken_total", metrics.snapshots_taken, "Snapshots of the metadata.")
    yield counter(
        "raft_snapshots_failed_total", metrics.snapshots_failed, "Snapshots that failed because a helper process died."
    )
