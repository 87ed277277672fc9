"""Metrics of the transaction coordinator (`server.metrics`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tidelog.server.metrics import Sample, counter, gauge
from tidelog.services.transactions import TransactionService


def transaction_samples(service: TransactionService) -> Iterator[Sample]:
    coordinator = service.coordinator
    counts, loads, sender = coordinator.transactions, coordinator.counts, coordinator.sender
    shards = list(coordinator.leading_shards())
    ids = sum(shard.size for shard in shards)
    opened = sum(len(shard.timers) for shard in shards)
    oldest = sender.oldest
    ending_s = 0.0 if oldest is None else asyncio.get_running_loop().time() - oldest.begun_s
    topic = coordinator.TOPIC
    yield gauge("transaction_partitions", len(coordinator.shards), f"Partitions of {topic} that are led here.")
    yield gauge("transaction_partitions_loading", coordinator.loading, "Those that are not read yet, or cannot be.")
    yield counter("transaction_loads_total", loads.loads, f"Partitions of {topic} that were read.")
    yield counter("transaction_load_seconds_total", loads.load_seconds, "The time that this took.")
    yield gauge("transactional_ids", ids, "Transactional ids that this broker coordinates.")
    yield gauge("transactions_open", opened, "Transactions of them that are open.")
    yield gauge("transactions_ending", sum(len(shard.endings) for shard in shards), "Decided, markers are written.")
    yield gauge("transaction_longest_end_seconds", ending_s, "How long the oldest of these has been ending.")
    yield gauge("transaction_markers_waiting", sender.waiting, "Partitions without the marker of such a transaction.")
    yield counter("transaction_markers_total", sender.written, "Markers that were written.")
    yield counter("transaction_marker_failures_total", sender.failures, "Attempts to write one that failed.")
    yield counter("transactions_committed_total", counts.commits, "Transactions that were decided to commit.")
    yield counter("transactions_aborted_total", counts.aborts, "Transactions that were decided to abort.")
    yield counter("transactions_timed_out_total", counts.timeouts, "Those aborted because their time was over.")
