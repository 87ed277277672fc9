"""What a seed decides about a broker run before it begins."""

from dataclasses import dataclass, fields, replace
from random import Random

from simulation.consumer_groups import GroupsPlan, draw_groups
from simulation.kafka_plan import KafkaPlan, draw_kafka
from simulation.metadata_sim import draw_metadata_shape
from simulation.product_shape import ProductPlan, draw_product
from simulation.run_result import Shape
from simulation.transactions_plan import TransactionsPlan
from tidelog.replication.replica import ReplicaConfig
from tidelog.world.simulated import Latency

PRODUCT_STREAM = "product-158988"
"""Chosen so that the seeds which catch older defects keep their runs."""
BEGIN_S = 2.0
"""Faults begin when there is something to harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """How compacted topics are written and cleaned."""

    keys: int
    segment_bytes: int
    dirty_ratio: float
    delete_retention_ms: int
    backoff_ms: int

    def configs(self) -> dict[str, str]:
        return {
            "cleanup.policy": "compact",
            "segment.bytes": str(self.segment_bytes),
            "min.cleanable.dirty.ratio": str(self.dirty_ratio),
            "delete.retention.ms": str(self.delete_retention_ms),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerShape(Shape):
    """What a seed decides about a run, beside what it decides about its controllers."""

    is_combined: bool
    brokers: int
    topics: tuple[str, ...]
    """`plain` (3 replicas, two in sync to write), `weak` (one is enough), `unclean` (may lose data), `compacted`,
    `grouped` (consumer groups read it)."""
    operations: tuple[int, ...]
    """How often a topic is made, deleted, moved, its preferred leader elected, nothing."""
    lag_ms: int
    session_ms: int
    stall_ms: int
    checkpoint_ms: int
    replica: ReplicaConfig
    opening_grace_ms: int
    """A broker that starts registers after so long, whether its logs are open or not."""
    recovery: Latency
    """How long a log that has to be read takes, beside the work itself."""
    directories: int = 1
    """Of logs, on each broker. With two of them an operator moves replicas from one to the other."""
    deletes: float = 0.0
    """How often a reader of a partition deletes some of its oldest records."""
    compaction: Compaction | None = None
    """Of the topics `compacted`, if there are any."""
    groups: GroupsPlan | None = None
    """Of the groups that read the topics `grouped`, if there are any."""
    kafka: KafkaPlan | None = None
    """Of the clients of the Kafka API, if there are any."""
    product: ProductPlan | None = None
    """Which other parts of the product it has."""
    transactions: TransactionsPlan | None = None
    """Of the programs with transactions, if there are any."""

    @property
    def has_weak_topics(self) -> bool:
        """Topics whose acknowledged records one replica may have alone."""
        return "weak" in self.topics or (self.product is not None and self.product.has_changes)

    def settings(self) -> dict[str, int]:
        """Of the cluster."""
        return {
            "replica.lag.time.max.ms": self.lag_ms,
            "broker.session.timeout.ms": self.session_ms,
            "disk.stall.timeout.ms": self.stall_ms,
            "log.scrub.interval.ms": 1_000,
            **({} if self.groups is None else self.groups.settings()),
            **({} if self.kafka is None or self.kafka.groups is None else self.kafka.groups.settings()),
            **({} if self.product is None else self.product.settings()),
            **({} if self.transactions is None else self.transactions.settings()),
        }


def draw_broker_shape(seed: int, *, has_more: bool = True) -> BrokerShape:
    """`has_more`: with what `_draw_more` adds."""
    base = draw_metadata_shape(seed)
    draw, of_start, of_logs = (Random(f"{seed}/brokers{more}") for more in ("", "/start", "/logs"))
    fast = Latency(0.0002, 0.001, 0.01, 0.01)
    values = {field.name: getattr(base, field.name) for field in fields(Shape)}
    values.update(
        stack="brokers",
        spares=0,
        fault_s=BEGIN_S + draw.choice((3.0, 5.0, 8.0)),
        client_pause_s=draw.choice((0.05, 0.1, 0.2)),
        segment_bytes=draw.choice((700, 2_000, 1 << 20)),
        latency=draw.choice((fast, fast, Latency(0.001, 0.02))),
        disk_latency=draw.choice((Latency(0.0002, 0.001), Latency(0.0002, 0.001), Latency(0.001, 0.02, 0.02, 0.1))),
    )
    is_small = draw.random() < 0.4
    shape = BrokerShape(
        **values,
        is_combined=draw.random() < 0.5,
        brokers=draw.choice((3, 3, 4)),
        topics=draw.choice((("plain",), ("plain",), ("plain", "weak"), ("plain", "weak"), ("plain", "unclean"))),
        operations=draw.choice(((0, 0, 0, 1, 5), (2, 2, 2, 1, 0), (0, 0, 4, 1, 1))),
        lag_ms=draw.choice((500, 1_000, 2_000)),
        session_ms=draw.choice((1_000, 1_500)),
        stall_ms=draw.choice((400, 1_000)),
        checkpoint_ms=draw.choice((100, 800)),
        replica=ReplicaConfig(
            fetch_message_bytes=400 if is_small else 1 << 20,
            inflight_bytes_max=1_000 if is_small else 8 << 20,
            partition_inflight_bytes_max=600 if is_small else 4 << 20,
            repair_retry_ms=200,
            scrub_delay_ms=500,
            partitions_per_slice=draw.choice((1, 2, 200)),
            reconcilers_max=of_start.choice((1, 32)),
        ),
        opening_grace_ms=of_start.choice((0, 0, 500)),
        recovery=of_start.choice((Latency(0.0, 0.0), Latency(0.0, 0.5), Latency(0.0, 0.05, 0.3, 2.5))),
        directories=of_logs.choice((1, 1, 2)),
        deletes=of_logs.choice((0.0, 0.0, 0.05)),
    )
    if not has_more:
        return shape
    shape = _draw_more(shape, Random(f"{seed}/brokers/more"))
    kafka = draw_kafka(seed, "brokers", share=0.35, has_groups=shape.groups is not None)
    return replace(shape, kafka=kafka)


def draw_product_shape(seed: int) -> BrokerShape:
    """As `draw_broker_shape`, without clients of the Kafka API, and with what `product_shape` draws."""
    shape = replace(draw_broker_shape(seed), stack="product", kafka=None)
    product = draw_product(Random(f"{seed}/brokers/{PRODUCT_STREAM}"))
    if product is not None and shape.compaction is not None:
        # What is stored twice may be the latest record of its key, after one that was acknowledged later.
        product = replace(product, expiry_ms=0)
    return replace(shape, product=product)


def _draw_more(shape: BrokerShape, draw: Random) -> BrokerShape:
    """Each run has its own subset of these, about one in five has all of them."""
    has_all = draw.random() < 0.15
    if has_all or draw.random() < 0.4:
        compaction = Compaction(
            keys=draw.choice((2, 5, 12)),
            segment_bytes=draw.choice((500, 900)),
            dirty_ratio=draw.choice((0.01, 0.3)),
            delete_retention_ms=draw.choice((100, 400, 1_500)),
            backoff_ms=draw.choice((100, 400)),
        )
        shape = replace(
            shape,
            compaction=compaction,
            topics=(*shape.topics, "compacted"),
            replica=replace(shape.replica, cleaner_backoff_ms=compaction.backoff_ms),
        )
    if has_all or draw.random() < 0.35:
        groups = draw_groups(draw, pattern="grouped.*")
        shape = replace(shape, groups=groups, topics=(*shape.topics, "grouped"))
    if has_all or draw.random() < 0.4:
        shape = replace(shape, spares=draw.choice((1, 1, 2)))
    return shape
