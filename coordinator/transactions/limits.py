"""Limits of transactions. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLimits:
    timeout_max_ms: int = 15 * 60_000
    """transaction.max.timeout.ms."""
    prepared_timeout_ms: int = 24 * 3_600_000
    """transaction.prepared.timeout.ms: how long a prepared transaction waits for its owner."""
    ids_max: int = 100_000
    """Transactional ids of one partition of `__transaction_state`."""
    name_length_max: int = 1_024
    """Characters of a transactional id and of a member's label."""
    partitions_max: int = 10_000
    """Of one transaction, with those of its members."""
    members_max: int = 10_000
    token_bytes_max: int = 1_024
    forgotten_per_decision_max: int = 1_000
