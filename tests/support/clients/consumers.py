"""Consumers in the simulator: `tidelog.aio.Consumer` as users have it, on simulated machines of their own.

with ConsumerWorld(seed=1) as world:
    orders = world.make_topic("orders", partitions=4)
    world.fill("orders", {0: 10, 1: 10})
    one = world.consumer("g")                       # on a machine of its own; `one.kill()` is kill -9
    one.run(lambda consumer: consumer.subscribe(["orders"]))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from support.clients.aio_consumer import SameLoopConsumer
from support.clients.cluster import BOOTSTRAP, BROKERS, ClientWorld, SimConnections
from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.producer.writer import Writer
from tidelog.client.record import ConsumerRecord, TopicPartition
from tidelog.log.batch import encode_columns
from tidelog.model.ids import NodeId
from tidelog.world.simulated import SimNode

T = TypeVar("T")


class SimConsumer(SameLoopConsumer):
    def __init__(self, machine: SimNode, transport: Any, **options: Any) -> None:
        self._transport = transport
        cluster = ClusterClient(
            BOOTSTRAP,
            SimConnections(transport),
            random=machine.random,
            clock=machine.clock,
            config=ClientConfig(),
        )
        super().__init__(cluster, **options)


class Program:
    """A user's process: a machine, a consumer on it, its records and its callbacks."""

    def __init__(self, world: ConsumerWorld, number: int, options: dict[str, Any]) -> None:
        self.world = world
        self.node_id = NodeId(200 + number)
        self._hardware = world.world.machine(f"consumer-{number}")
        self.machine = self._hardware.boot()
        transport = world.network.join(self.machine, self.node_id)
        self.consumer = SimConsumer(self.machine, transport, **options)
        self.records: list[ConsumerRecord[Any, Any]] = []
        self.callbacks: list[tuple[str, list[TopicPartition]]] = []
        self.task: asyncio.Task[None] | None = None

    def run(self, job: Callable[[SimConsumer], Awaitable[T]], *, timeout: float = 120) -> T:
        async def whole(_: SimNode) -> T:
            return await job(self.consumer)

        found: T = self.world.world.run(self.machine, whole, timeout=timeout)
        return found

    def listener(self) -> dict[str, Any]:
        """Callbacks that note what they hear."""
        return {
            f"on_{what}": lambda names, what=what: self.callbacks.append((what, sorted(names)))
            for what in ("assigned", "revoked", "lost")
        }

    def start(
        self, *topics: str, hears: bool = True, each: Callable[[ConsumerRecord[Any, Any]], Any] | None = None
    ) -> Program:
        """Subscribe and read on until `stop`; `each` may be a coroutine function."""

        async def work() -> None:
            await self.consumer.subscribe(topics, **(self.listener() if hears else {}))
            async for record in self.consumer:
                self.records.append(record)
                if each is not None and (waiting := each(record)) is not None:
                    await waiting

        self.task = self.machine.spawn(work())
        return self

    def stop(self) -> None:
        """Close in order."""
        if self.task is not None:
            self.task.cancel()
        self.run(lambda consumer: consumer.close())

    def kill(self) -> None:
        """kill -9: nothing is said to anybody."""
        self._hardware.kill()

    def cut_off(self) -> None:
        """Nobody hears of it, and it of nobody, until `network.heal`."""
        for broker in BROKERS:
            self.world.network.block(self.node_id, NodeId(broker))
            self.world.network.block(NodeId(broker), self.node_id)

    @property
    def assignment(self) -> set[TopicPartition]:
        return {state.name for state in self.consumer.core.subscription}

    @property
    def reading(self) -> set[TopicPartition]:
        """The partitions that are fetched now."""
        return {state.name for state in self.consumer.core.subscription if state.is_fetchable}

    def values(self) -> list[bytes]:
        return [record.value for record in self.records]


class ConsumerWorld(ClientWorld):
    def __enter__(self) -> ConsumerWorld:
        super().__enter__()
        self._programs = 0
        return self

    def make_topic(self, name: str, *, partitions: int = 1) -> None:
        async def make(client: ClusterClient) -> None:
            await AdminCore(client).create_topic(name, partitions=partitions, replication_factor=3)
            await client.topic(name)

        self.run(make)

    def fill(self, topic: str, counts: Mapping[int, int], *, first: int = 0, timestamp: int = 1_000) -> None:
        """So many records into each partition, each a batch of its own: b"<partition>:<number>"."""

        async def write(client: ClusterClient) -> None:
            writer = Writer(client)
            for partition, count in counts.items():
                for number in range(first, first + count):
                    await writer.send(
                        topic, partition, encode_columns([timestamp + number], [b"k"], [b"%d:%d" % (partition, number)])
                    )
            await writer.flush()
            await writer.close()

        self.run(write)

    def consumer(self, group: str | None = None, **options: Any) -> Program:
        self._programs += 1
        options.setdefault("auto_offset_reset", "earliest")
        return Program(self, self._programs, {"group": group, **options})
