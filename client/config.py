"""The settings that all clients share, and the backoff between attempts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    request_timeout_ms: int = 30_000
    """Of one request with all its attempts, unless the call has a timeout."""
    attempt_timeout_ms: int = 2_000
    """Of one metadata attempt; then the next node is asked."""
    retry_backoff_ms: int = 50
    retry_backoff_max_ms: int = 1_000
    metadata_max_age_ms: int = 300_000
    unknown_topic_wait_ms: int = 500
    """How long a topic may be unknown before it is an error: a broker may lag behind."""
    bootstrap_wait_ms: int = 0
    """How long to wait for the first response of a cluster."""
    listener: str = ""
    """The listener whose advertised addresses to use; empty: that of the bootstrap address."""
    topics_max: int = 100_000

    def __post_init__(self) -> None:
        assert 0 < self.retry_backoff_ms <= self.retry_backoff_max_ms, "a backoff"
        assert self.request_timeout_ms > 0 and self.attempt_timeout_ms > 0, "time for an attempt"  # noqa: PT018


class Backoff:
    """Exponential backoff with 20% jitter."""

    def __init__(self, config: ClientConfig, random: Random) -> None:
        self._config = config
        self._random = random
        self.attempts = 0

    def next_s(self) -> float:
        pause_ms = min(self._config.retry_backoff_ms << min(self.attempts, 20), self._config.retry_backoff_max_ms)
        self.attempts += 1
        return pause_ms * (0.8 + 0.4 * self._random.random()) / 1000

    def reset(self) -> None:
        self.attempts = 0
