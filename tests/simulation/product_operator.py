"""The operator of what `product_shape` draws: makes the topics, changes configs, drains, throttles, elects, recreates.

When faults have ended it undoes what would stop the cluster for good (drains, throttles), and decides where the docs
say that an operator has to: it elects a leader for a partition of a page-cache topic all of whose replicas have stopped
without a sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.broker_checker import KnownTopic
from simulation.broker_operator import Operator
from simulation.cluster import Context
from tidelog.metadata.brokers import Drain
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import AddPartitions, DeleteTopics, NewPartitions

if TYPE_CHECKING:
    from simulation.product_shape import ProductPlan
    from tidelog.metadata.image import ClusterImage

TUNED: dict[str, tuple[str, ...]] = {
    "min.insync.replicas": ("1", "2", "3"),
    "flush.mode": ("sync", "page-cache"),
    "retention.ms": ("-1", "400", "2000"),
    "retention.bytes": ("-1", "800"),
    "segment.bytes": ("300", "900", "1000000"),
    "cleanup.policy": ("delete", "compact,delete"),
    "compression.type": ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
}
"""What an operator changes of the topic `tuned`; the first value is what it is made with."""
BROKER_CONFIGS: dict[str, tuple[str, ...]] = {
    "log.retention.check.interval.ms": ("40", "500"),
    "replica.lag.time.max.ms": ("300", "2000"),
    "log.scrub.interval.ms": ("1000", "60000"),
    "log.scrub.bytes.per.second": ("0", "100", "1000000"),
}
"""What it changes of one broker."""
THROTTLES = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
PARTITIONS_MAX = 3
ELECTION_PAUSE_S = 0.5
TRIES_AFTER = 30
"""Requests with the id of a topic that was deleted and created again."""


@dataclass(slots=True)
class ProductOperator(Operator):
    """See the module's docstring."""

    is_undone: bool = False
    """Nothing that it has done stops the cluster any more."""
    is_asking: bool = False
    """The controller has a request that was not answered."""
    elected: int = 0
    """Partitions for which it has asked for a leader that may lack records."""
    _draining: set[int] = field(default_factory=set)
    _is_throttling: bool = False
    _configs: dict[str, str] = field(default_factory=lambda: {key: values[0] for key, values in TUNED.items()})
    """Of the topic `tuned`, as they were asked for last."""

    @property
    def plan(self) -> ProductPlan:
        plan = self.simulation.shape.product
        assert plan is not None, "the run has it"
        return plan

    @property
    def image(self) -> ClusterImage:
        self.simulation.metadata.advance()
        return self.simulation.metadata.image

    async def run(self, context: Context) -> None:
        context.app = self
        client = ControllerClient(
            context.transport,
            lambda: self.simulation.controllers,
            ControllerClientConfig(call_timeout_ms=1_500),
            self.draw,
        )
        for kind in self.plan.topics():
            await self._create(client, kind)
        acts = self._acts()
        while True:
            await asyncio.sleep(self.draw.expovariate(1 / self.plan.pause_s))
            if self.is_stopping:
                break
            if acts:
                self.is_asking = True
                await self.draw.choice(acts)(client)
                self.is_asking = False
        await self._undo(client)
        await asyncio.Event().wait()

    def _acts(self) -> list[Callable[[ControllerClient], Any]]:
        plan = self.plan
        return [
            *((self._tune, self._tune, self._tune_broker) if plan.has_changes else ()),
            *((self._recreate,) if plan.has_recreation else ()),
            *((self._drain,) if plan.has_drains else ()),
            *((self._throttle,) if plan.throttle_bytes else ()),
            *((self._elect, self._elect_any) if plan.has_elections else ()),
            *((self._move_and_cancel, self._grow) if plan.has_moves and plan.topics() else ()),
        ]

    def _settings(self, kind: str) -> tuple[int, int, int, list[tuple[str, str]]]:
        partitions, factor, min_isr, configs = 1, 3, 2, {"retention.ms": "-1"}
        if kind in ("timed", "sized"):
            assert self.plan.retention is not None, "it has been drawn"
            configs = self.plan.retention.configs(kind)
        elif kind == "cached":
            assert self.plan.flush is not None, "it has been drawn"
            configs.update({"flush.mode": "page-cache", **self.plan.flush})
        elif kind == "tuned":
            configs.update(self._configs)
            min_isr = int(configs.pop("min.insync.replicas"))
        configs.setdefault("segment.bytes", str(self.simulation.shape.segment_bytes))
        return partitions, factor, min_isr, [*configs.items(), ("min.insync.replicas", str(min_isr))]

    def _note(self, known: KnownTopic) -> None:
        known.is_cached = known.name.startswith(("cached", "tuned"))
        Operator._note(self, known)

    # Acts, each of which may fail.

    async def _alter(self, client: ControllerClient, kind: str, name: str, values: dict[str, str | None]) -> bool:
        """Sets configs of a topic, a broker or the cluster; None is the default again."""
        changes = tuple(
            ConfigChange(key=key, operation="delete" if value is None else "set", value=value or "")
            for key, value in values.items()
        )
        change = ResourceChange(resource_type=kind, resource=name, changes=changes)
        reply = await self._try(client, AlterConfigs(resources=(change,)))
        return reply is not None and reply.items[0].error is None

    async def _tune(self, client: ControllerClient) -> None:
        (topic,) = [topic for topic in self.topics if topic.name.startswith("tuned")]
        key = self.draw.choice((*sorted(TUNED), "min.insync.replicas", "flush.mode"))
        value = self.draw.choice([value for value in TUNED[key] if value != self._configs[key]])
        self._configs[key] = value
        if await self._alter(client, "topic", topic.name, {key: value}):
            self._acted(f"config: {key}")

    async def _tune_broker(self, client: ControllerClient) -> None:
        broker = self.draw.choice(self.simulation.broker_nodes)
        key = self.draw.choice(sorted(BROKER_CONFIGS))
        value = self.draw.choice((*BROKER_CONFIGS[key], None))
        if await self._alter(client, "broker", str(int(broker)), {key: value}):
            self._acted("config: brokers")

    async def _recreate(self, client: ControllerClient) -> None:
        """Clients go on with the id of the former topic for a while."""
        (topic,) = [topic for topic in self.topics if topic.name.startswith("again") and not topic.delete_asked]
        topic.delete_asked, topic.tries_left = True, TRIES_AFTER
        await self._undrain(client)  # a new topic needs all brokers
        await self._ask(client, DeleteTopics(ids=(topic.topic_id,)))
        await asyncio.sleep(self.draw.choice((0.0, 0.0, 0.2)))
        await self._make(client, topic.name, *self._settings("again"))
        assert self.topics[-1].topic_id != topic.topic_id, "a new topic has an id of its own"
        self._acted("topics: again")

    async def _drain(self, client: ControllerClient) -> None:
        broker = int(self.draw.choice(self.simulation.broker_nodes))
        is_on = broker not in self._draining
        if is_on and self._draining:
            broker, is_on = min(self._draining), False
        self._draining.add(broker)
        reply = await self._try(client, Drain(broker=broker, on=is_on))
        if reply is not None and not is_on:
            self._draining.discard(broker)
        if reply is not None and is_on:
            self._acted("drain")

    async def _throttle(self, client: ControllerClient) -> None:
        """All replicas of all topics that this operator has made; or none."""
        is_on = not self._is_throttling
        self._is_throttling = True
        rate = str(self.plan.throttle_bytes) if is_on else None
        done = await self._alter(client, "cluster", "", dict.fromkeys(THROTTLES, rate))
        named = "*" if is_on else None
        for topic in self._present():
            done = await self._alter(client, "topic", topic.name, dict.fromkeys(THROTTLED, named)) and done
        if done and is_on:
            self._acted("throttle")
        elif done:
            self._is_throttling = False

    async def _elect(self, client: ControllerClient) -> None:
        reply = await self._try(client, ElectLeaders(kind="preferred"))
        if reply is not None and reply.items:
            self._acted("elections")

    async def _elect_any(self, client: ControllerClient) -> None:
        """For partitions without a leader, of topics that may lose records by that."""
        names = [
            (topic, number)
            for topic in self._cached()
            for number in range(topic.partitions)
            if (partition := self.image.partition(topic.topic_id, number)) is not None and partition.leader < 0
        ]
        if not names:
            return
        self.elected += len(names)
        self.simulation.metadata.asked_unclean.update((topic.topic_id, number) for topic, number in names)
        request = ElectLeaders(kind="unclean", partitions=tuple((topic.name, number) for topic, number in names))
        reply = await self._try(client, request)
        if reply is not None and any(item.error is None for item in reply.items):
            self._acted("unclean elections")

    def _present(self) -> list[KnownTopic]:
        return [topic for topic in self.topics if not topic.delete_asked]

    def _cached(self) -> list[KnownTopic]:
        return [topic for topic in self.topics if topic.is_cached and not topic.delete_asked]

    async def _move_and_cancel(self, client: ControllerClient) -> None:
        topic = self.draw.choice(self._present())
        await self._move(client, topic)
        await asyncio.sleep(self.draw.uniform(0.0, 0.3))
        items = tuple(
            ReassignmentTarget(topic=topic.name, partition=number, replicas=None) for number in range(topic.partitions)
        )
        reply = await self._try(client, AlterReassignments(partitions=items))
        if reply is not None and any(item.error is None for item in reply.items):
            self._acted("cancelled reassignments")

    async def _grow(self, client: ControllerClient) -> None:
        topic = self.draw.choice(self._present())
        if topic.partitions >= PARTITIONS_MAX:
            return
        total = topic.partitions + 1
        request = AddPartitions(topics=(NewPartitions(name=topic.name, total=total),))
        await self._try(client, request)
        found = self.image.topics.get(topic.topic_id)
        if found is not None and len(found.partitions) >= total:
            first, topic.partitions = topic.partitions, total
            self.simulation.made(topic, first=first)
            self._acted("added partitions")

    def _acted(self, feature: str) -> None:
        self.simulation.nemesis.coverage.acted(feature)

    # The end.

    async def _undrain(self, client: ControllerClient) -> None:
        for broker in sorted(self._draining):
            await self._ask(client, Drain(broker=broker, on=False))
            self._draining.discard(broker)

    async def _undo(self, client: ControllerClient) -> None:
        await self._undrain(client)
        while self._is_throttling:
            await self._throttle(client)
            await asyncio.sleep(0.1)
        self.is_undone = True
        while self._cached():
            await asyncio.sleep(ELECTION_PAUSE_S)
            await self._elect_any(client)
