"""What a seed decides about the programs with transactions, and about what else happens to their topics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random

from tidelog.coordinator.transactions.records import EPOCH_MAX


class Trial(Enum):
    """See `transactions_trials`."""

    LOSS = "lost for good"
    REMOVAL = "members removed"
    SILENCE = "records failed"


TRIALS = {Trial.REMOVAL: 0.5, Trial.SILENCE: 0.5, Trial.LOSS: 0.4}
"""How many runs have each, in their order."""


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
    poll_interval_ms: int
    aborts: float
    restless: float
    """How often a pipeline ends and begins again."""
    partitions: int
    """Of `__transaction_state`."""
    is_chained: bool
    """A further pipeline reads what the others write to the first output."""
    probes: float
    """How often a transaction reads committed data of the outputs before it ends."""
    prepares: float
    """How often an owner prepares its transaction before the commit."""
    first_epoch: int
    """Of the pipelines' ids; near the last one, another producer id follows soon."""
    expiration_ms: int
    """transactional.id.expiration.ms; 0: ids do not expire."""
    is_compacted: bool
    """The logs of both coordinators are compacted."""
    deletes: bool
    """An operator deletes records that every program has read."""
    has_operator: bool
    """Who aborts transactions."""
    trials: tuple[Trial, ...]
    """What happens when faults have ended."""
    lateness: float
    """How many of the calls of a transaction arrive once more, later, or only later: see `transactions_postman`."""

    session_ms: int
    """Of the members of groups. A short one: a member is removed, and its transaction is still open."""
    delivery_ms: int
    """delivery.timeout.ms of most: some records fail while their transaction could still commit."""

    def delivery(self) -> dict[str, int]:
        """Options of a producer."""
        return {"delivery_timeout_ms": self.delivery_ms, "request_timeout_ms": self.delivery_ms // 2}

    def settings(self) -> dict[str, int]:
        expiry = {
            "transactional.id.expiration.ms": self.expiration_ms,
            "transaction.remove.expired.transaction.cleanup.interval.ms": 300,
        }
        return {
            "transaction.state.log.num.partitions": self.partitions,
            "transaction.prepared.timeout.ms": 3_000,
            "offsets.topic.num.partitions": 2,
            "offsets.commit.timeout.ms": 1_500,
            "group.min.session.timeout.ms": 500,
            "group.consumer.stream.grace.ms": 600,
            "group.consumer.stream.reconnect.ms": 2_000,
            **(expiry if self.expiration_ms else {}),
        }


def draw_transactions(draw: Random) -> TransactionsPlan:
    return TransactionsPlan(
        pipelines=draw.choice((1, 2, 2, 3)),
        ids=draw.choice((1, 2, 3)),
        workers=draw.choice((0, 2, 2)),
        timeout_ms=draw.choice((700, 1_500, 4_000)),
        poll_interval_ms=draw.choice((800, 2_500, 60_000)),
        aborts=draw.choice((0.0, 0.1, 0.3)),
        restless=draw.choice((0.0, 0.02, 0.1)),
        partitions=draw.choice((1, 2)),
        is_chained=draw.random() < 0.3,
        probes=draw.choice((0.0, 0.0, 0.2)),
        prepares=draw.choice((0.0, 0.3)),
        first_epoch=EPOCH_MAX - 1 - draw.randrange(12) if draw.random() < 0.25 else 0,
        expiration_ms=draw.choice((0, 0, 0, 500)),
        is_compacted=draw.random() < 0.3,
        deletes=draw.random() < 0.3,
        has_operator=draw.random() < 0.3,
        trials=tuple(trial for trial, share in TRIALS.items() if draw.random() < share),
        lateness=draw.choice((0.0, 0.05, 0.2)),
        session_ms=draw.choice((600, 600, 3_000)),
        delivery_ms=draw.choice((600, 600, 3_000)),
    )
