"""What a seed decides about the clients of the Kafka API in a run, from a random stream of its own."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from simulation.kafka_groups_checker import CLASSIC, CONSUMER
from simulation.kafka_member import KafkaMemberPlan

ACKS_ALL, ACKS_LEADER = -1, 1
STREAMS = {"brokers": 11_880, "groups": 67}
"""Numbers of the random streams: with these, no seed that is remembered for a defect has got such clients, so that all
of them keep their runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaGroupsPlan:
    members: tuple[KafkaMemberPlan, ...]
    session_ms: int
    rebalance_ms: int
    heartbeat_ms: int
    check_interval_ms: int
    """Of expired offsets."""
    ages: bool
    """The clocks of all brokers jump past the retention of offsets, while faults go on."""

    def settings(self) -> dict[str, int]:
        return {
            "group.initial.rebalance.delay.ms": 200,
            "group.consumer.session.timeout.ms": self.session_ms,
            "offsets.retention.minutes": 1,
            "offsets.retention.check.interval.ms": self.check_interval_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaPlan:
    acks: tuple[int, ...]
    """Of each producer."""
    isolations: tuple[int, ...]
    """Of each reader: 0 reads uncommitted, 1 committed records."""
    pause_s: float
    restless: float
    """How often a client closes its connections."""
    groups: KafkaGroupsPlan | None = None
    """Only in runs that have groups."""


def draw_kafka(seed: int, stack: str, *, share: float, has_groups: bool) -> KafkaPlan | None:
    """The clients of about this share of the runs; None for the others."""
    draw = Random(f"{seed}/kafka/{stack}/{STREAMS[stack]}")
    if draw.random() >= share:
        return None
    return KafkaPlan(
        acks=draw.choice(((ACKS_ALL,), (ACKS_ALL, ACKS_ALL), (ACKS_ALL, ACKS_LEADER))),
        isolations=draw.choice(((0,), (1,), (0, 1))),
        pause_s=draw.choice((0.2, 0.4) if has_groups else (0.05, 0.1, 0.2)),
        restless=draw.choice((0.0, 0.05, 0.2)),
        groups=_draw_groups(draw) if has_groups else None,
    )


def _draw_groups(draw: Random) -> KafkaGroupsPlan:
    has_mixed = draw.random() < 0.5
    restless, slow = draw.choice((0.0, 0.02, 0.06)), draw.choice((0.0, 0.0, 0.02))
    members = tuple(
        KafkaMemberPlan(
            group="mixed" if has_mixed else "kappa",
            protocols=draw.choice(((CLASSIC,), (CLASSIC, CONSUMER), (CONSUMER,))) if has_mixed else (CLASSIC,),
            is_static=draw.random() < 0.4,
            restless=restless,
            slow=slow,
        )
        for _ in range(draw.choice((2, 3)))
    )
    return KafkaGroupsPlan(
        members=members,
        session_ms=draw.choice((2_000, 4_000)),
        rebalance_ms=draw.choice((1_500, 3_000)),
        heartbeat_ms=draw.choice((200, 400)),
        check_interval_ms=200,
        ages=draw.random() < 0.5,
    )
