"""Readers with a rack: they go to the follower there, and leave it when it is of no use."""

from __future__ import annotations

import pytest
from support.brokers.cluster import values_of
from support.clients.cluster import BROKERS, CLIENT, ClientWorld
from support.grpc_api.simulated_nodes import ApiCluster

from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.reader import Reader, ReaderConfig
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import NodeId, PartitionId
from tidelog.services import partition_lookup

RACKS = dict(zip(BROKERS, ("east", "west", "north"), strict=True))
LEADER, FOLLOWER = BROKERS[0], BROKERS[1]


class RackedWorld(ClientWorld):
    def __enter__(self) -> RackedWorld:
        ApiCluster.__enter__(self)
        self.start()
        for broker, rack in RACKS.items():
            self.start_brokers(broker, rack=rack)
        self.machine = self.world.machine("client").boot()
        self.transport = self.network.join(self.machine, CLIENT)
        return self


class Reading:
    """A reader of one partition that notes what it gets, until it has `wanted` different values."""

    def __init__(self, partition: PartitionId, wanted: int, config: ReaderConfig) -> None:
        self.values: list[bytes] = []
        self.replicas: list[int] = []
        self._partition = partition
        self._wanted = wanted
        self._config = config

    async def run(self, client: ClusterClient) -> None:
        reader = Reader(client, self._config)
        reader.assign_topic(await client.topic("orders"), {self._partition: 0})
        try:
            while len(set(self.values)) < self._wanted:
                for piece in await reader.poll(500):
                    self.values += [record.value or b"" for record in piece.records()]
                self.replicas.append(reader._subscription.partitions[self._partition].replica)
        finally:
            await reader.close()


def test_a_reader_goes_to_the_follower_of_its_rack_and_back_when_that_has_lost_its_leader() -> None:
    with RackedWorld(9100) as world:
        orders = world.topic("orders", BROKERS)
        assert world.leader(orders) == LEADER
        for number in range(4):
            world.write(orders, b"%d" % number)
        reading = Reading(orders, 12, ReaderConfig(rack="west", replica_lease_ms=3_600_000))
        task = world.begin(reading.run)
        world.until(lambda: len(reading.values) == 4)
        assert reading.replicas[-1] == FOLLOWER
        world.network.block(NodeId(LEADER), NodeId(FOLLOWER))
        world.network.block(NodeId(FOLLOWER), NodeId(LEADER))
        for number in range(4, 12):
            world.write(orders, b"%d" % number)
        world.until(lambda: FOLLOWER not in world.partition(orders).isr, timeout=60)
        world.finish(task, timeout=30)
        # A write that was not acknowledged in time was repeated, and may stand in the log twice: that is what is read.
        stored = values_of(bytes(world.fetch(LEADER, orders, 0).data))
        assert reading.values == stored[: len(reading.values)]
        assert list(dict.fromkeys(reading.values)) == [b"%d" % number for number in range(12)]
        assert reading.replicas[-1] == -1
        refused = world.fetch(FOLLOWER, orders, 0, rack="west").error
        assert refused is not None
        assert refused.code is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_the_leader_is_asked_again_when_the_lease_of_its_choice_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the follower says of itself: here it is one that would serve for ever."""

    def serves_all(replicas: object, partition: PartitionId, leader_epoch: int, rack: str) -> object:
        replica = partition_lookup._find(replicas, partition, leader_epoch)  # type: ignore[arg-type]
        assert replica.role is not None
        return replica, replica.role

    monkeypatch.setattr("tidelog.services.fetch.find_readable", serves_all)
    with RackedWorld(9101) as world:
        orders = world.topic("orders", BROKERS)
        world.write(orders, b"0")
        reading = Reading(orders, 3, ReaderConfig(rack="west", replica_lease_ms=5_000))
        task = world.begin(reading.run)
        world.until(lambda: bool(reading.replicas) and reading.replicas[-1] == FOLLOWER)
        world.network.block(NodeId(LEADER), NodeId(FOLLOWER))
        world.network.block(NodeId(FOLLOWER), NodeId(LEADER))
        for number in (1, 2):
            world.write(orders, b"%d" % number)
        world.finish(task, timeout=60)
        assert reading.replicas[-1] == -1
