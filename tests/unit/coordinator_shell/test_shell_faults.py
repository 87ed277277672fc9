"""Groups under faults, seed by seed: brokers and members die, streams break, and in the end everything is as it should.

What is checked: a commit that was acknowledged is there; no group has a partition with two owners in the committed
state; the state that a shard lives is the one that its log makes; when the faults end every partition has an owner.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from support.brokers.cluster import RunningBroker
from support.groups.cluster import BROKERS, GroupCluster, Member

from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.loading import Progress, load
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.shard import GROUPS, Shard
from tidelog.coordinator.state import CoordinatorState, validate
from tidelog.model.errors import RemoteError, TransportError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import groups_pb2 as pb

PARTITIONS = 8


class Storm:
    def __init__(self, cluster: GroupCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = Random(seed)
        self.members: list[Member] = []
        self.acked = -1
        self.tried = -1
        self.is_over = False
        self.is_busy = asyncio.Event()
        cluster.admin.spawn(self.commit_for_ever())

    def step(self) -> None:
        choice = self.random.random()
        cluster = self.cluster
        if choice < 0.25 and len(self.members) < 6:
            static = self.random.random() < 0.3
            made = cluster.member(
                "storm",
                "orders",
                join=False,
                instance_id=f"static-{len(self.members)}" if static else "",
                session_timeout_ms=6_000,
            )
            made.begin()
            self.members.append(made)
        elif choice < 0.4 and len(self.members) > 1:
            self.members.pop(self.random.randrange(len(self.members))).kill()
        elif choice < 0.5 and self.members:
            self.random.choice(self.members).cut()
        elif choice < 0.75 and len(cluster.brokers) == len(BROKERS):
            # At any moment of a commit, and more often who coordinates.
            self.is_busy.set()
            cluster.world.run_for(self.random.random() * 0.1)
            leaders = [node for node, shard in self.shards() if shard.number == partition_for("plain", 3)]
            cluster.kill(NodeId(self.random.choice([*BROKERS, *leaders * 3])))
            self.is_busy.clear()
        else:
            for broker in BROKERS:
                if NodeId(broker) not in cluster.brokers:
                    cluster.start_brokers(broker, wait=False)
        cluster.world.run_for(self.random.choice((0.05, 0.5, 2.0)))
        self.check()

    async def commit_for_ever(self) -> None:
        """Of a group without members: rising numbers, each tried once."""
        broker = NodeId(BROKERS[0])
        while not self.is_over:
            self.tried += 1
            offset = pb.OffsetToCommit(topic="orders", partition=0, offset=self.tried, leader_epoch=-1)
            request = pb.CommitOffsetsRequest(group="plain", member_epoch=-1, offsets=[offset])
            try:
                (row,) = (await self._call(broker, "CommitOffsets", request)).offsets
                if not row.error.code:
                    self.acked = self.tried
            except (RemoteError, TransportError):
                broker = await self._find()
            await asyncio.sleep(0.001)
            await self.is_busy.wait()

    async def _find(self) -> NodeId:
        while True:
            for broker in sorted(self.cluster.brokers):
                try:
                    found = await self._call(broker, "FindCoordinator", pb.FindCoordinatorRequest(groups=["plain"]))
                except (RemoteError, TransportError):
                    continue
                if not found.coordinators[0].error.code:
                    return NodeId(found.coordinators[0].broker)
            await asyncio.sleep(0.05)

    async def _call(self, broker: NodeId, name: str, request: Any) -> Any:
        method = method_named("Groups", name)
        data = await self.cluster.admin_transport.call(
            broker, method.wire_name, request.SerializeToString(), timeout_ms=1_000
        )
        return method.response.FromString(data)

    def shards(self) -> list[tuple[int, Shard]]:
        return [
            (int(node), shard)
            for node, broker in sorted(self.cluster.brokers.items())
            for shard in broker.coordinator.leading_shards()
        ]

    def check(self) -> None:
        self.cluster.check()
        for _, shard in self.shards():
            validate(shard.state)

    def heal(self) -> None:
        cluster = self.cluster
        self.is_over = True
        for broker in BROKERS:
            if NodeId(broker) not in cluster.brokers:
                cluster.start_brokers(broker)
        if not self.members:
            self.members.append(cluster.member("storm", "orders"))
        everything = {("orders", number) for number in range(PARTITIONS)}

        def is_stable() -> bool:
            held = [one for member in self.members for one in sorted(member.owned)]
            return len(held) == PARTITIONS and set(held) == everything

        cluster.until(is_stable, timeout=60)
        cluster.world.run_for(12)
        assert is_stable(), "and it stays so"
        found = cluster.committed("plain").get(("orders", 0), -1)
        assert self.acked <= found <= self.tried
        for node, shard in self.shards():
            assert shard.phase is Phase.LEADING
            assert self._replayed(node, shard) == shard.state
        self.check()

    def _replayed(self, node: int, shard: Shard) -> CoordinatorState:
        async def read(_: RunningBroker) -> CoordinatorState:
            return (await load(shard.leader, Progress(), GROUPS))[0]

        return self.cluster.on_broker(node, read)


def storm(seed: int, steps: int = 40) -> None:
    with GroupCluster(seed=seed, orders=PARTITIONS) as cluster:
        weather = Storm(cluster, seed)
        for _ in range(steps):
            weather.step()
        weather.heal()


@pytest.mark.parametrize("seed", range(1, 7))
def test_groups_survive_a_storm(seed: int) -> None:
    storm(seed)
