"""What must hold of what `product_shape` draws.

    retention     a log begins where it began before, where another replica began, where delete-records says, or behind
                  segments that retention may delete: all of their batches are older than `retention.ms`, or what is
                  left has `retention.bytes`; none of them is past the high watermark. Values count that the broker had
                  in its metadata a moment ago
    it acts       when faults have ended, what has outlived its retention goes
    minimum       a high watermark advances only while `min.insync.replicas` are in sync, of the values that the leader
                  had in its metadata a moment ago
    drained       who is drained is elected only where no other replica in sync is live, and gets no new replica

Checks draw no random numbers and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from simulation.broker_checker import Fail, KnownPartition, KnownTopic
from tidelog.log.batch import read_header
from tidelog.log.log import Log
from tidelog.metadata import configs
from tidelog.metadata.image import ClusterImage
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.broker_sim import BrokerSimulation

MOMENT_S = 3.0
"""So long an older value of a config may still act: it was read before the change, and a store commits it now."""
MINIMUM_S = 0.5
"""The same for a leader's minimum of replicas in sync, which changes with its metadata."""
SLACK_MS = 500


@dataclass(frozen=True, slots=True)
class Values:
    """Configs of one topic, as a broker has them in its metadata."""

    retention_ms: int
    retention_bytes: int
    deletes: bool
    min_isr: int


@dataclass(slots=True)
class Seen:
    """What was seen of one process."""

    image: ClusterImage | None = None
    values: dict[UUID, list[tuple[float, Values]]] = field(default_factory=dict)
    """By topic: since when (true time) it has which values, oldest first."""
    starts: dict[Replica, int] = field(default_factory=dict)
    high_watermarks: dict[LeaderReplica, int] = field(default_factory=dict)
    producers: dict[Log, int] = field(default_factory=dict)


class ProductChecker:
    """Looks at a broker after each of its events."""

    def __init__(self, simulation: BrokerSimulation, fail: Fail) -> None:
        self.expired = 0
        """Log starts that retention has moved."""
        self.forgotten = 0
        """Producers that logs have forgotten."""
        self._expires = simulation.replica_checker.expiry_s > 0
        self._simulation = simulation
        self._fail = fail
        self._seen: dict[BrokerApp, Seen] = {}
        self._known: dict[Replica, KnownPartition] = {}

    def look(self, app: BrokerApp) -> None:
        seen = self._seen.get(app)
        if seen is None:
            seen = self._seen[app] = Seen()
        image = app.tail.image
        if seen.image is not image:
            self._note_values(seen, image)
        for replica in app.replicas.all():
            log, role = replica.log, replica.role
            if self._expires and log is not None:
                count = len(log.producers)
                self.forgotten += max(0, seen.producers.get(log, 0) - count)
                seen.producers[log] = count
            known = self._known_of(replica)
            if known is None:
                continue
            if log is not None and log.start_offset > seen.starts.get(replica, 0):
                self._start_moved(app, seen, known, replica, log)
                seen.starts[replica] = log.start_offset
            if isinstance(role, LeaderReplica) and role.high_watermark > seen.high_watermarks.get(role, -1):
                if role in seen.high_watermarks:
                    self._check_minimum(app, seen, known, role)
                seen.high_watermarks[role] = role.high_watermark

    def _known_of(self, replica: Replica) -> KnownPartition | None:
        if not replica.topic.startswith(("timed", "sized", "tuned")):
            return None
        known = self._known.get(replica)
        if known is None:
            known = self._simulation.replica_checker.partitions.get(replica.partition_id)
            if known is not None:
                self._known[replica] = known
        return known

    # Configs.

    def _note_values(self, seen: Seen, image: ClusterImage) -> None:
        before, seen.image = seen.image, image
        if before is not None and before.configs is image.configs and before.topics is image.topics:
            return
        now_s = self._now_s()
        for topic in self._topics():
            if topic.topic_id in image.topics:
                values = values_of(image, topic)
                past = seen.values.setdefault(topic.topic_id, [])
                if not past or past[-1][1] != values:
                    past.append((now_s, values))

    def _topics(self) -> list[KnownTopic]:
        operator = self._simulation.product_operator
        return [] if operator is None else [topic for topic in operator.topics if topic.is_retained]

    def _recent(self, app: BrokerApp, seen: Seen, topic: KnownTopic, moment_s: float) -> list[Values]:
        """The values of now, and those that ended a moment ago."""
        past = seen.values.get(topic.topic_id)
        if past is None:  # its maker had not heard of it when the image came
            return [values_of(app.tail.image, topic)]
        since_s = self._now_s() - moment_s
        ends = [began for began, _ in past[1:]] + [float("inf")]
        return [values for end, (_, values) in zip(ends, past, strict=True) if end >= since_s]

    def _now_s(self) -> float:
        return self._simulation.world.scheduler.now_ns / 1e9

    # Retention.

    def _start_moved(self, app: BrokerApp, seen: Seen, known: KnownPartition, replica: Replica, log: Log) -> None:
        start = int(log.start_offset)
        if start <= known.deleting or known.is_unclean:
            known.deleting = max(known.deleting, start)
            return
        if replica.role is not None and start > replica.high_watermark:
            self._fail(app.name, f"{known} begins at {start}, past its high watermark {replica.high_watermark}")
        now_ms = app.context.node.clock.now_ms()
        recent = self._recent(app, seen, known.topic, MOMENT_S)
        if not any(is_expired(known, log, start, values, now_ms) for values in recent):
            self._fail(app.name, f"{known} begins at {start} at {now_ms}, which retention does not allow: {recent}")
        known.deleting = start
        self.expired += 1
        self._simulation.nemesis.coverage.acted(f"retention: {known.topic.name.partition('.')[0]}")

    def has_acted(self) -> bool:
        """Nothing that has outlived its retention is left, apart from what a check is about to find."""
        for station in self._simulation.brokers:
            app = self._simulation.broker(station)
            if app is None:
                return False
            image, me = app.tail.image, app.agent.broker
            interval_ms = configs.broker_config(image, "log.retention.check.interval.ms", me).value
            assert isinstance(interval_ms, int), "an interval is an integer"
            slack_ms = SLACK_MS + interval_ms
            for replica in app.replicas.all():
                known, log = self._known_of(replica), replica.log
                if known is not None and log is not None and log.damaged is None:
                    now_ms = app.context.node.clock.now_ms() - slack_ms
                    if has_expired(log, values_of(app.tail.image, known.topic), now_ms):
                        return False
        return True

    # The minimum of replicas in sync.

    def _check_minimum(self, app: BrokerApp, seen: Seen, known: KnownPartition, role: LeaderReplica) -> None:
        least = min(values.min_isr for values in self._recent(app, seen, known.topic, MINIMUM_S))
        if len(role.state.isr) < least:
            self._fail(
                app.name,
                f"{known}: the high watermark advances to {role.high_watermark} with {sorted(role.state.isr)} in sync; "
                f"min.insync.replicas was {least} or more for {MINIMUM_S} s",
            )


def values_of(image: ClusterImage, topic: KnownTopic) -> Values:
    config = configs.log_config(image, topic.name)
    partitions = image.topics[topic.topic_id].partitions if topic.topic_id in image.topics else {}
    return Values(
        config.retention_ms,
        config.retention_bytes,
        config.cleanup_delete,
        min((configs.min_isr(image, topic.topic_id, partition) for partition in partitions.values()), default=1),
    )


def is_expired(known: KnownPartition, log: Log, start: int, values: Values, now_ms: int) -> bool:
    """Whether retention may have deleted all below `start`, as far as the batches are known."""
    if not values.deletes:
        return False
    sizes = sum(segment.size for segment in log.sealed_segments()) + log.segments.active.size
    for base, batch in reversed(known.batches):
        if base >= start:
            continue
        if 0 <= values.retention_bytes <= sizes:
            return True
        if values.retention_ms < 0 or now_ms - read_header(batch).max_timestamp <= values.retention_ms:
            return False
        sizes += len(batch)
    return True


def has_expired(log: Log, values: Values, now_ms: int) -> bool:
    """Whether the oldest segment should be gone."""
    segments = log.sealed_segments()
    if not values.deletes or not segments or segments[0].next_offset > log.durable_end:
        return False
    rest = sum(segment.size for segment in segments[1:]) + log.segments.active.size
    is_old = values.retention_ms >= 0 and now_ms - segments[0].largest_timestamp > values.retention_ms
    return is_old or 0 <= values.retention_bytes <= rest
