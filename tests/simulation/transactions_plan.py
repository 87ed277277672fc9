"""What a seed decides about the programs with transactions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsPlan:
    """What a seed decides."""

    pipelines: int
    ids: int
    """Transactional ids that they share."""
    workers: int
    """Members of joint transactions; 0: there are none."""
    timeout_ms: int
    """transaction.timeout.ms of most."""
    aborts: float
    restless: float
    """How often a pipeline ends and begins again."""
    partitions: int
    """Of `__transaction_state`."""

    def settings(self) -> dict[str, int]:
        return {"transaction.state.log.num.partitions": self.partitions, "offsets.topic.num.partitions": 2}
