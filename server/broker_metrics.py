"""Metrics of a broker (`server.metrics`)."""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.log.logs import Logs
from tidelog.replication.replicas import Replicas
from tidelog.server.group_metrics import group_samples, lag_samples
from tidelog.server.membership import BrokerMembership
from tidelog.server.metrics import Sample, counter, gauge
from tidelog.server.transaction_metrics import transaction_samples
from tidelog.services.services import BrokerServices


def broker_samples(
    membership: BrokerMembership, logs: Logs, replicas: Replicas, services: BrokerServices
) -> Iterable[Sample]:
    yield from _membership_samples(membership)
    yield from _replica_samples(replicas)
    yield from group_samples(services.groups)
    yield from lag_samples(services.groups, replicas)
    yield from transaction_samples(services.transactions)
    yield from _log_samples(logs)
    yield from _scrub_samples(replicas)
    for directory in logs.directories:
        label = directory.disk.label
        yield gauge("directory_failed", float(directory.failed is not None), "1: given up.", directory=label)
        yield gauge("directory_logs", len(directory.paths), "Logs in a directory.", directory=label)
        # A stalled directory would block the event loop.
        if directory.failed is None and directory.directory_id not in membership.agent.stalled_directories:
            yield gauge("directory_free_bytes", directory.disk.free_bytes(), "Free bytes.", directory=label)


def _membership_samples(membership: BrokerMembership) -> Iterable[Sample]:
    tail = membership.tail
    stale_ms = tail.stale_ms()
    yield gauge("broker_fenced", float(membership.agent.is_fenced), "1 while the controller fences this broker.")
    yield gauge("metadata_offset", tail.offset, "This broker has applied the metadata log up to this offset.")
    yield gauge("metadata_stale_seconds", -1 if stale_ms is None else stale_ms / 1000, "Age of its metadata.")
    yield gauge("metadata_trouble", float(tail.unhealthy_reason is not None), "1: the metadata log cannot be followed.")


def _replica_samples(replicas: Replicas) -> Iterable[Sample]:
    status = replicas.status()
    yield gauge("partitions_leading", status.leaders, "Partitions that this broker leads.")
    yield gauge("partitions_following", status.followers, "Partitions that it follows.")
    yield gauge("partitions_offline", status.offline, "Replicas here without a usable log.")
    yield gauge("partitions_cut_off", status.cut_off, "Followed here, while their leader cannot be reached.")
    yield gauge("partitions_under_replicated", status.under_replicated, "Led here, with replicas out of sync.")
    yield gauge("partitions_under_min_isr", status.under_min_isr, "Led here, read-only for acks=all.")
    yield gauge("partitions_at_min_isr", status.at_min_isr, "Led here, with no redundancy to lose.")
    yield counter("isr_shrinks_total", status.isr_shrinks, "Replicas that this leader has removed from an ISR.")
    yield counter("isr_expands_total", status.isr_expands, "Replicas that it has added to an ISR.")


def _log_samples(logs: Logs) -> Iterable[Sample]:
    yield gauge("logs_open", len(logs), "Logs that are open.")
    yield gauge("logs_recovering", logs.recovering, "Logs that were found at the start and are not open yet.")
    yield gauge("logs_open_retries", len(logs.open_retries), "Logs that could not be opened and are retried.")
    yield gauge("logs_kept", len(logs.kept), "Kept copies of records that replicas here have truncated.")


def _scrub_samples(replicas: Replicas) -> Iterable[Sample]:
    scrub = replicas.background_tasks.scrubbing
    yield counter("scrub_segments_total", scrub.segments, "Sealed segments that were read and compared.")
    yield counter("scrub_bytes_total", scrub.bytes, "Bytes of them.")
    yield counter("scrub_faults_total", scrub.faults, "Segments whose bytes have changed.")
    yield counter("scrub_index_faults_total", scrub.index_faults, "Segments whose index files were wrong, and rebuilt.")
    yield counter("scrub_unrepairable_total", scrub.unrepairable, "Corrupt segments without a sound copy elsewhere.")
    yield counter("scrub_restored_total", replicas.segment_repair.restored, "Segments restored byte by byte.")
    yield counter("scrub_errors_total", scrub.errors, "Segments that could not be read.")
    yield counter("scrub_cycles_total", scrub.cycles, "Times that every sealed segment was read.")
