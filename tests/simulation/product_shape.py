"""Which other parts of the product a broker run has: drawn from a stream of its own, so that the rest of a seed's shape
stays what it was.

    timed, sized    topics with retention by time and by size, and a broker that looks for old segments all the time
    cached          a topic with `flush.mode=page-cache`
    tuned           a topic whose configs change while it is written
    again           a topic that is deleted and created again under its name
    piped           a topic with many producers, each with five batches in flight
    expiry          of producers that are idle, in a fraction of a second
"""

from dataclasses import dataclass
from random import Random

PRODUCT_PREFIXES = ("timed", "sized", "cached", "tuned", "again", "piped")
RETAINED_PREFIXES = ("timed", "sized", "tuned")
"""Names of topics whose old segments retention deletes begin so. Their records have the time of their producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    time_ms: int
    size_bytes: int
    segment_bytes: int
    segment_ms: int
    check_ms: int
    delete_delay_ms: int

    def configs(self, kind: str) -> dict[str, str]:
        by_kind = {"timed": ("retention.ms", self.time_ms), "sized": ("retention.bytes", self.size_bytes)}
        key, value = by_kind[kind]
        return {
            "retention.ms": "-1",
            key: str(value),
            "segment.bytes": str(self.segment_bytes),
            "segment.ms": str(self.segment_ms),
            "file.delete.delay.ms": str(self.delete_delay_ms),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    retention: Retention | None = None
    flush: dict[str, str] | None = None
    """Of the page-cache topic, if there is one: `flush.messages`, `flush.ms`."""
    has_changes: bool = False
    has_recreation: bool = False
    producers: int = 0
    """With five batches in flight, on each partition of the topic `piped`."""
    expiry_ms: int = 0
    throttle_bytes: int = 0
    """A second, of throttled replicas; 0 is no throttle."""
    has_drains: bool = False
    has_elections: bool = False
    """An operator elects preferred leaders, and any leader where none is left."""
    has_moves: bool = False
    """Reassignments that are cancelled half-way, and added partitions."""
    pause_s: float = 1.0
    """Of the operator."""

    @property
    def has_page_cache(self) -> bool:
        """A topic acknowledges what it has not synced, at least for a while."""
        return self.flush is not None or self.has_changes

    def topics(self) -> tuple[str, ...]:
        return (
            *(("timed", "sized") if self.retention is not None else ()),
            *(("cached",) if self.flush is not None else ()),
            *(("tuned",) if self.has_changes else ()),
            *(("again",) if self.has_recreation else ()),
            *(("piped",) if self.producers else ()),
        )

    def settings(self) -> dict[str, int]:
        """Of the cluster."""
        found = {}
        if self.expiry_ms:
            found["producer.id.expiration.ms"] = self.expiry_ms
        if self.retention is not None or self.has_changes or self.expiry_ms:
            found["log.retention.check.interval.ms"] = 100 if self.retention is None else self.retention.check_ms
        return found


def draw_product(draw: Random) -> ProductPlan | None:
    """Six of ten runs have none of it, one of ten has all."""
    kind = draw.random()
    if kind < 0.6:
        return None
    part = 1.0 if kind > 0.9 else 0.35

    def has() -> bool:
        return draw.random() < part

    retention = Retention(
        time_ms=draw.choice((200, 600, 1_500)),
        size_bytes=draw.choice((0, 600, 2_500)),
        segment_bytes=draw.choice((300, 700)),
        segment_ms=draw.choice((200, 3_600_000)),
        check_ms=draw.choice((40, 250)),
        delete_delay_ms=draw.choice((0, 200, 60_000)),
    )
    flush = draw.choice(({}, {}, {"flush.messages": "4"}, {"flush.ms": "150"}))
    producers, expiry_ms, rate = draw.choice((1, 3, 8)), draw.choice((150, 500, 2_000)), draw.choice((300, 3_000))
    return ProductPlan(
        retention=retention if has() else None,
        flush=flush if has() else None,
        has_changes=has(),
        has_recreation=has(),
        producers=producers if has() else 0,
        expiry_ms=expiry_ms if has() and draw.random() < 0.7 else 0,
        throttle_bytes=rate if has() else 0,
        has_drains=has(),
        has_elections=has(),
        has_moves=has(),
        pause_s=draw.choice((0.15, 0.4)),
    )
