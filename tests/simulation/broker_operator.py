"""The operator of the broker runs: topics come, move and go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.broker_checker import Fail, KnownTopic
from simulation.cluster import Context
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import CreateTopics, DeleteTopics, NewTopic
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError, TransportError
from tidelog.model.ids import DirectoryId, PartitionId, TopicId

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.broker_sim import BrokerSimulation
    from simulation.broker_verification import ReplicaVerifier
    from tidelog.metadata.image import ClusterImage

OFFSETS_SEGMENT_BYTES = 3_000
"""A batch of group records has to fit."""


@dataclass(slots=True)
class Operator:
    """The program of a machine that makes, moves and removes topics, and elects preferred leaders."""

    simulation: BrokerSimulation
    draw: Random
    fail: Fail
    is_stopping: bool = False
    pause_s: float = 1.5
    topics: list[KnownTopic] = field(default_factory=list)
    operations: tuple[str, ...] = ("create", "delete", "move", "elect", "nothing")
    """By weight: see the shape's `operations`."""
    verifier: ReplicaVerifier | None = None
    _number: int = 0
    _is_compacting_groups: bool = False

    async def run(self, context: Context) -> None:
        context.app = self
        client = ControllerClient(
            context.transport,
            lambda: self.simulation.controllers,
            ControllerClientConfig(call_timeout_ms=1_500),
            self.draw,
        )
        shape = self.simulation.shape
        settings = shape.settings()
        changes = tuple(ConfigChange(key=key, operation="set", value=str(value)) for key, value in settings.items())
        await self._ask(
            client, AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=changes),))
        )
        for kind in shape.topics:
            await self._create(client, kind)
        while True:
            await asyncio.sleep(self.draw.expovariate(1 / self.pause_s))
            if self.is_stopping:
                break
            await self._compact_groups(client)
            await self._one(client)
            if self.verifier is not None:
                self.verifier.maybe_verify()
        await asyncio.Event().wait()  # a program that ends is started again

    async def _compact_groups(self, client: ControllerClient) -> None:
        """Where there are compacted topics, that of the groups is cleaned as often."""
        compaction = self.simulation.shape.compaction
        if compaction is None or self.image.topic_named(OFFSETS_TOPIC) is None or self._is_compacting_groups:
            return
        configs = {**compaction.configs(), "segment.bytes": str(OFFSETS_SEGMENT_BYTES)}
        changes = tuple(ConfigChange(key=key, operation="set", value=value) for key, value in configs.items())
        change = ResourceChange(resource_type="topic", resource=OFFSETS_TOPIC, changes=changes)
        reply = await self._try(client, AlterConfigs(resources=(change,)))
        self._is_compacting_groups = reply is not None and reply.items[0].error is None

    async def _ask(self, client: ControllerClient, request: object) -> Any:
        """Until it is answered; who repeats may find it done."""
        while True:
            try:
                return await client.call(request)
            except (TransportError, RemoteError):
                await asyncio.sleep(self.draw.uniform(0.05, 0.3))

    async def _one(self, client: ControllerClient) -> None:
        kind = self.draw.choices(self.operations, self.simulation.shape.operations)[0]
        moving = [topic for topic in self.topics if not topic.delete_asked]
        if self.simulation.shape.directories > 1 and moving and self.draw.random() < 0.5:
            self._relocate(self.draw.choice(moving))
        if kind == "create" and len(moving) < 4:
            await self._create(client, "churn")
        elif kind == "delete":
            churn = [topic for topic in moving if topic.name.startswith("churn")]
            if churn:
                topic = self.draw.choice(churn)
                topic.delete_asked = True
                await self._try(client, DeleteTopics(names=(topic.name,)))
        elif kind == "move" and moving:
            await self._move(client, self.draw.choice(moving))
        elif kind == "elect" and moving:
            await self._try(client, ElectLeaders(kind="preferred"))

    async def _try(self, client: ControllerClient, request: object) -> Any:
        try:
            return await client.call(request)
        except (TransportError, RemoteError):
            return None

    async def _move(self, client: ControllerClient, topic: KnownTopic) -> None:
        brokers = [int(node) for node in self.simulation.broker_nodes]
        number = self.draw.randrange(topic.partitions)
        partition = self.image.partition(topic.topic_id, number)
        if partition is None:
            return
        replicas = tuple(self.draw.sample(brokers, len(partition.original_replicas)))
        wanted: tuple[int, ...] | None = None if self.draw.random() < 0.15 else replicas
        item = ReassignmentTarget(topic=topic.name, partition=number, replicas=wanted)
        reply = await self._try(client, AlterReassignments(partitions=(item,)))
        if reply is not None and reply.items[0].error is None:
            self.simulation.nemesis.coverage.acted("reassignment")

    def _relocate(self, topic: KnownTopic) -> None:
        """A replica moves to the other log directory of its broker, or is asked to."""
        app = self.simulation.broker(self.draw.choice(self.simulation.brokers))
        partition_id = PartitionId(TopicId(topic.topic_id), self.draw.randrange(topic.partitions))
        target = self.draw.randrange(self.simulation.shape.directories)
        if app is None or app.context.node.loop.is_held:
            return
        directory = app.logs.directories[target].directory_id
        assert directory is not None, "an open directory has an id"
        self.simulation.world.scheduler.trace("operator", f"{app.name}: {topic.name} goes to directory {target}")
        app.context.node.spawn(self._moved(app, partition_id, directory))

    async def _moved(self, app: BrokerApp, partition_id: PartitionId, directory: DirectoryId) -> None:
        try:
            await app.service.log_directories.move_replica(partition_id, directory)
        except TidelogError as error:
            app.context.node.trace(f"not moved: {error}")
        else:
            self.simulation.nemesis.coverage.acted("moves between directories")

    @property
    def image(self) -> ClusterImage:
        return self.simulation.metadata.image

    async def _create(self, client: ControllerClient, kind: str) -> None:
        self._number += 1
        await self._make(client, f"{kind}.{self._number}", *self._settings(kind))

    def _settings(self, kind: str) -> tuple[int, int, int, list[tuple[str, str]]]:
        """Of a new topic: partitions, replicas, how many in sync, and configs."""
        partitions, factor, min_isr = self.draw.choice((1, 1, 2)), 3, 2
        # The records are dated 1970: retention, which a full disk starts at once, would delete them.
        configs = [("segment.bytes", str(self.simulation.shape.segment_bytes)), ("retention.ms", "-1")]
        if kind == "unclean":
            partitions, factor, min_isr = 1, 2, 1
            configs.append(("unclean.leader.election.enable", "true"))
        elif kind == "weak":
            partitions, min_isr = 1, 1
        elif kind == "compacted":
            assert self.simulation.shape.compaction is not None, "it has been drawn"
            configs = list(self.simulation.shape.compaction.configs().items())
        configs.append(("min.insync.replicas", str(min_isr)))
        return partitions, factor, min_isr, configs

    async def _make(
        self,
        client: ControllerClient,
        name: str,
        partitions: int,
        factor: int,
        min_isr: int,
        configs: list[tuple[str, str]],
    ) -> None:
        topic = NewTopic(name=name, partitions=partitions, replication_factor=factor, configs=tuple(configs))
        while True:
            reply = await self._ask(client, CreateTopics(topics=(topic,)))
            (made,) = reply.topics
            if made.error is None:
                topic_id = made.topic_id
                break
            if made.error is ErrorCode.TOPIC_ALREADY_EXISTS:
                # An earlier attempt was done, and its answer was lost.
                found = self.image.topic_named(name)
                if found is not None:
                    topic_id = found.topic_id
                    break
            await asyncio.sleep(self.draw.uniform(0.05, 0.2))
            if self.is_stopping and name.startswith("churn"):
                return
        self._note(KnownTopic(name, topic_id, partitions, min_isr))

    def _note(self, known: KnownTopic) -> None:
        """It is there."""
        self.topics.append(known)
        self.simulation.made(known)
