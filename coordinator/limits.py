"""Limits of a group; the defaults are Kafka's. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    session_timeout_ms: int = 45_000
    session_timeout_min_ms: int = 6_000
    session_timeout_max_ms: int = 1_800_000
    heartbeat_interval_ms: int = 3_000
    rebalance_timeout_ms: int = 300_000
    members_max: int = 1_000
    """group.consumer.max.size; for classic groups group.max.size."""
    offset_metadata_bytes_max: int = 4_096
    initial_rebalance_delay_ms: int = 3_000
    """How long an empty classic group waits for more members before its first generation."""
    name_length_max: int = 1_024
    """Characters of group ids, member ids, instance ids, racks and client ids."""
    subscription_bytes_max: int = 512 << 10
    """Bytes of the names in one subscription; a group keeps those of all its members."""
    pattern_length_max: int = 1_024
    expired_per_decision_max: int = 1_000
    fences_max: int = 100_000
    """Producers whose last marker one partition remembers; past that the oldest are forgotten. The transaction
    coordinator rejects what they send, too."""
    protocols_max: int = 100
    """Protocols of one classic member."""
    classic_metadata_bytes_max: int = 256 << 10
    """Bytes of one classic member: its subscriptions under all protocols, or its assignment."""
    migration_policy: str = "bidirectional"
    """group.consumer.migration.policy."""

    @property
    def can_upgrade(self) -> bool:
        """Whether a classic group with members may become a consumer group."""
        return self.migration_policy in ("upgrade", "bidirectional")

    @property
    def can_downgrade(self) -> bool:
        """Whether a consumer group of classic members only may become a classic group."""
        return self.migration_policy in ("downgrade", "bidirectional")
