"""Admin clients of the metadata runs: topics come, grow and go, configs change, replicas and leaderships move, brokers
are drained, questions are asked. All answers are checked.

A name is used for one topic only, and each topic's configs are changed by the one client that made it, one change after
the other: so what the end must look like follows from what was answered.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

from simulation.cluster import Context
from simulation.metadata_checker import MetadataChecker
from tidelog.metadata.brokers import Drain
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.queries import DescribeTopics
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import AddPartitions, CreateTopics, DeleteTopics, NewPartitions, NewTopic
from tidelog.model.errors import RemoteError, TransportError
from tidelog.model.ids import NodeId

KEY = "retention.ms"
TOPICS_MAX = 6
PARTITIONS_MAX = 12
BROKERS = tuple(range(11, 16))


@dataclass(slots=True)
class KnownTopic:
    topic_id: UUID | None = None
    """Set when its making was acknowledged."""
    delete_asked: bool = False
    deleted: bool = False
    partitions: int = 0
    """At least so many, as was acknowledged."""
    values: list[str | None] = field(default_factory=lambda: [None])
    """What its config may be now: the last acknowledged value, and those since whose outcome is not known."""


class AdminChecker:
    def __init__(self, checker: MetadataChecker, fail: Callable[[str, str], None]) -> None:
        self.topics: dict[str, KnownTopic] = {}
        self.acknowledged = 0
        self.reads = 0
        self._checker = checker
        self._fail = fail

    def created(self, who: str, name: str, topic_id: UUID) -> None:
        self.acknowledged += 1
        self.topics[name].topic_id = topic_id
        if topic_id not in self._checker.image.topics and not self.topics[name].delete_asked:
            self._fail(who, f"topic {name} is acknowledged and not committed")

    def deleted(self, who: str, name: str) -> None:
        self.acknowledged += 1
        self.topics[name].deleted = True
        if self._checker.image.topic_named(name) is not None:
            self._fail(who, f"topic {name} is acknowledged as removed and still there")

    def grown(self, who: str, name: str, total: int) -> None:
        self.acknowledged += 1
        self.topics[name].partitions = total
        self.check_topic(who, self._checker.image, name)

    def configured(self, who: str, name: str, value: str) -> None:
        self.acknowledged += 1
        self.topics[name].values = [value]
        self.check_topic(who, self._checker.image, name)

    def check_topic(self, who: str, image: ClusterImage, name: str) -> None:
        known, found = self.topics[name], image.topic_named(name)
        if known.deleted and found is not None:
            self._fail(who, f"topic {name} was removed, and is there")
        if known.topic_id is not None and not known.delete_asked:
            if found is None or found.topic_id != known.topic_id:
                self._fail(who, f"topic {name} was made as {known.topic_id}, and is {found}")
            elif len(found.partitions) < known.partitions:
                self._fail(who, f"topic {name} has {len(found.partitions)} partitions, not {known.partitions}")
            value = image.config("topic", name).get(KEY)
            if value not in known.values:
                self._fail(who, f"the config of {name} is {value}, not one of {known.values}")

    def check_end(self) -> None:
        for name in self.topics:
            self.check_topic("end", self._checker.image, name)


class Admin:
    """The program of a machine with one such client."""

    def __init__(
        self, checker: AdminChecker, controllers: list[NodeId], draw: Random, *, pause_s: float, only_reads: bool
    ) -> None:
        """Who only reads is never stuck in a change that cannot commit: it finds a leader that leads no more."""
        self._only_reads = only_reads
        self._checker = checker
        self._controllers = controllers
        self._random = draw
        self._pause_s = pause_s
        self._number = 0
        self._mine: list[str] = []
        self.is_stopping = False
        self.must_do = 0
        """Operations that are still to be answered before the client may stop."""

    async def run(self, context: Context) -> None:
        context.app = self
        client = ControllerClient(
            context.transport, lambda: self._controllers, ControllerClientConfig(call_timeout_ms=1500), self._random
        )
        name = context.station.name
        while True:
            if self.is_stopping and self.must_do <= 0:
                await asyncio.sleep(1.0)
                continue
            try:
                await self._one(name, client)
            except (TransportError, RemoteError) as error:
                context.trace(f"{type(error).__name__}: {error}")
            else:
                self.must_do -= 1
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))

    async def _one(self, who: str, client: ControllerClient) -> None:
        if self._only_reads:
            await self._read(who, client)
            return
        live = [name for name in self._mine if not self._checker.topics[name].delete_asked]
        kind = self._random.choices(("create", "delete", "config", "read", "grow", "move"), (3, 1, 3, 3, 1, 3))[0]
        if len(live) >= TOPICS_MAX and kind == "create":
            kind = "delete"
        if kind == "create" or not live:
            await self._create(who, client)
        elif kind == "delete":
            await self._delete(who, client, self._random.choice(live))
        elif kind == "config":
            await self._configure(who, client, self._random.choice(live))
        elif kind == "grow":
            await self._grow(who, client, self._random.choice(live))
        elif kind == "move":
            await self._move(client, self._random.choice(live))
        else:
            await self._read(who, client)

    async def _create(self, who: str, client: ControllerClient) -> None:
        self._number += 1
        name = f"{who}.{self._number}"
        self._checker.topics[name] = KnownTopic()
        partitions = self._random.choice((1, 3, 8))
        topic = NewTopic(name=name, partitions=partitions, replication_factor=self._random.choice((1, 2, 3)))
        (made,) = (await client.call(CreateTopics(topics=(topic,)))).topics
        if made.error is None:
            self._mine.append(name)
            self._checker.topics[name].partitions = partitions
            self._checker.created(who, name, made.topic_id)

    async def _delete(self, who: str, client: ControllerClient, name: str) -> None:
        self._checker.topics[name].delete_asked = True
        (outcome,) = (await client.call(DeleteTopics(names=(name,)))).items
        if outcome.error is None:
            self._checker.deleted(who, name)

    async def _configure(self, who: str, client: ControllerClient, name: str) -> None:
        self._number += 1
        value = str(1_000_000 + self._number)
        self._checker.topics[name].values.append(value)
        change = ConfigChange(key=KEY, operation="set", value=value)
        resource = ResourceChange(resource_type="topic", resource=name, changes=(change,))
        (outcome,) = (await client.call(AlterConfigs(resources=(resource,)))).items
        if outcome.error is None:
            self._checker.configured(who, name, value)

    async def _grow(self, who: str, client: ControllerClient, name: str) -> None:
        total = min(self._checker.topics[name].partitions + self._random.choice((1, 2, 4)), PARTITIONS_MAX)
        (outcome,) = (await client.call(AddPartitions(topics=(NewPartitions(name=name, total=total),)))).items
        if outcome.error is None:
            self._checker.grown(who, name, total)

    async def _move(self, client: ControllerClient, name: str) -> None:
        """Replicas and leaderships go elsewhere; what must hold of that is checked record by record."""
        kind, broker = (
            self._random.choice(("reassign", "reassign", "cancel", "elect", "drain")),
            self._random.choice(BROKERS),
        )
        where = tuple(self._random.sample(BROKERS, self._random.choice((1, 2, 3))))
        partition = self._random.randrange(3)
        request: object
        if kind == "elect":
            request = ElectLeaders(kind="preferred")
        elif kind == "drain":
            request = Drain(broker=broker, on=self._random.random() < 0.5)
        else:
            replicas = where if kind == "reassign" else None
            request = AlterReassignments(
                partitions=(ReassignmentTarget(topic=name, partition=partition, replicas=replicas),)
            )
        await client.call(request)

    async def _read(self, who: str, client: ControllerClient) -> None:
        """What was made before this is asked is seen, unless somebody may have removed it meanwhile."""
        before = {name: known.topic_id for name, known in self._checker.topics.items() if known.topic_id is not None}
        gone = [name for name, known in self._checker.topics.items() if known.deleted]
        reply: Any = await client.call(DescribeTopics(), is_repeatable=True)
        self._checker.reads += 1
        there = {item.name for item in reply.topics}
        for name in before:
            if name not in there and not self._checker.topics[name].delete_asked:
                self._checker._fail(who, f"asks for topics, and {name}, made before, is not among them")
        for name in gone:
            if name in there:
                self._checker._fail(who, f"asks for topics, and {name}, removed before, is among them")
