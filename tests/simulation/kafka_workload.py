"""The clients of the Kafka API in a run: producers and readers beside those of gRPC, on the same partitions.

    k121, k122    producers (`kafka_producer.KafkaProducer`)
    r131, r132    readers of every partition (`KafkaReader`), in the rack of a broker

The checkers are those of the other clients: what was acknowledged by one API is read by the other.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from simulation.broker_checker import KnownPartition
from simulation.cluster import Context, Station
from simulation.kafka_client import KafkaClient
from simulation.kafka_fetcher import FetchCounts, KafkaFetcher, Position
from simulation.kafka_groups import KafkaGroups
from simulation.kafka_plan import KafkaPlan
from simulation.kafka_producer import KafkaProducer
from simulation.product_shape import PRODUCT_PREFIXES
from tidelog.model.ids import NodeId

if TYPE_CHECKING:
    from simulation.broker_sim import BrokerSimulation

PRODUCERS, READERS = (NodeId(121), NodeId(122)), (NodeId(131), NodeId(132))
LOOK_S = 0.2


class KafkaReader:
    """The program of a machine that reads every partition from its first record on."""

    def __init__(self, clients: KafkaClients, number: int, draw: Random, *, isolation: int) -> None:
        self.counts = FetchCounts()
        self.client: KafkaClient | None = None
        self._clients = clients
        self._number = number
        self._random = draw
        self._isolation = isolation
        self._fetcher: KafkaFetcher | None = None

    async def run(self, context: Context) -> None:
        context.app = self
        simulation = self._clients.simulation
        nodes = simulation.broker_nodes
        name = context.station.name
        rack = f"rack-{int(nodes[self._number % len(nodes)]) % 10}"
        client = self.client = KafkaClient(
            context, nodes, self._random, simulation.fail, client_id=name, rack=self._random.choice(("", rack, rack))
        )
        fetcher = self._fetcher = KafkaFetcher(
            client,
            self._random,
            simulation.fail,
            on_data=lambda position, data, end: self._read(name, position, data, end),
            on_rot=simulation._rot_was_served,
            counts=self.counts,
            isolation=self._isolation,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fetcher.run([int(node) for node in nodes]))
            while True:
                self._look(fetcher)
                await asyncio.sleep(LOOK_S)
                if self._random.random() < self._clients.plan.restless:
                    client.disconnect()

    def _look(self, fetcher: KafkaFetcher) -> None:
        """Takes up new partitions, and leaves those that are deleted."""
        for known in self._clients.partitions():
            if known.topic.delete_asked:
                fetcher.positions.pop(known, None)
            elif known not in fetcher.positions:
                fetcher.positions[known] = Position(known, 0)

    def _read(self, name: str, position: Position, data: bytes, high_watermark: int) -> None:
        checker = self._clients.simulation.replica_checker
        position.offset, position.last_epoch = checker.read(name, position.known, position.offset, data, high_watermark)

    def has_read(self, known: KnownPartition, end: int) -> bool:
        position = None if self._fetcher is None else self._fetcher.positions.get(known)
        return position is not None and position.offset >= end


class KafkaClients:
    def __init__(self, simulation: BrokerSimulation, plan: KafkaPlan) -> None:
        self.simulation = simulation
        self.plan = plan
        self.producers: list[KafkaProducer] = []
        self.readers: list[KafkaReader] = []
        self.stations: list[Station] = []
        """Of producers and readers; those of members are `groups.stations`."""
        self.groups: KafkaGroups | None = None
        if plan.groups is not None:
            assert simulation.groups is not None, "the run has groups"
            self.groups = simulation.groups.kafka = KafkaGroups(simulation, simulation.groups, plan.groups)

    def add_machines(self) -> None:
        simulation = self.simulation
        for node, acks in zip(PRODUCERS, self.plan.acks, strict=False):
            producer = KafkaProducer(
                simulation.replica_checker,
                simulation.broker_nodes,
                simulation.world.random(f"kafka/{node}"),
                simulation.fail,
                pause_s=self.plan.pause_s,
                acks=acks,
                partitions=self.partitions,
            )
            self.producers.append(producer)
            self.stations.append(simulation.cluster.add(f"k{node}", node, producer.run))
        for node, isolation in zip(READERS, self.plan.isolations, strict=False):
            reader = KafkaReader(self, int(node), simulation.world.random(f"kafka/{node}"), isolation=isolation)
            self.readers.append(reader)
            self.stations.append(simulation.cluster.add(f"r{node}", node, reader.run))
        if self.groups is not None:
            self.groups.add_machines()

    def partitions(self) -> list[KnownPartition]:
        """Those that these clients write and read: keys, unclean elections and retention are for the others."""
        return [
            known
            for known in self.simulation.replica_checker.partitions.values()
            if not known.topic.is_compacted
            and not known.topic.is_unclean
            and not known.topic.name.startswith(PRODUCT_PREFIXES)
        ]

    def has_read(self, known: KnownPartition, end: int) -> bool:
        return known not in self.partitions() or all(reader.has_read(known, end) for reader in self.readers)

    @property
    def acts(self) -> dict[str, int]:
        """What these clients have done, for `coverage`."""
        return {
            "acknowledged batches": sum(producer.acked for producer in self.producers),
            "repeated batches": sum(producer.retried for producer in self.producers),
            "fetches of a session": sum(reader.counts.incremental for reader in self.readers),
            "fetches nearby": sum(reader.counts.nearby for reader in self.readers),
            "offset lookups": sum(reader.counts.lookups for reader in self.readers),
        }
