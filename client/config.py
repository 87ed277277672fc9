"""What a client may be told, and how long it waits between two attempts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    request_timeout_ms: int = 30_000
    """Of one request, with all its attempts, unless its caller says otherwise."""
    attempt_timeout_ms: int = 2_000
    """Of one attempt to get metadata: a node that does not answer is passed over."""
    retry_backoff_ms: int = 50
    retry_backoff_max_ms: int = 1_000
    metadata_max_age_ms: int = 300_000
    unknown_topic_wait_ms: int = 500
    """How long a topic may be unknown before that is told: a broker may not have heard of it yet."""
    bootstrap_wait_ms: int = 0
    """How long to wait for the first answer of a cluster."""
    listener: str = ""
    """Whose advertised addresses to use; empty: those of the listener that bootstrap reaches."""
    topics_max: int = 100_000

    def __post_init__(self) -> None:
        assert 0 < self.retry_backoff_ms <= self.retry_backoff_max_ms, "a pause between attempts"
        assert self.request_timeout_ms > 0 and self.attempt_timeout_ms > 0, "time for an attempt"  # noqa: PT018


class Backoff:
    """Pauses that double from attempt to attempt, each up to a fifth shorter or longer than that."""

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
