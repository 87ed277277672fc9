"""An operator of the broker runs who compares replicas (`tidelog brokers verify-replicas`) while faults strike.

A difference is an error of ours unless bits of that replica were flipped. At the end every partition agrees, and before
that rot is reported as a difference that names its broker, or has been repaired. Draws from a random stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from support.brokers.verification import verify

from simulation.broker_checker import Fail
from tidelog.client.admin.verification import AGREE, DIFFER, PartitionVerification
from tidelog.model.ids import PartitionId, TopicId

if TYPE_CHECKING:
    from simulation.broker_node import BrokerApp
    from simulation.broker_sim import BrokerSimulation

SHARE = 0.4
"""Of the runs that have such an operator."""
CHANCE = 0.5
ATTEMPTS_MAX = 5
TIMEOUT_S = 60.0


@dataclass(slots=True)
class ReplicaVerifier:
    simulation: BrokerSimulation
    draw: Random
    fail: Fail
    is_on: bool = field(init=False)
    agreed: int = 0
    differed: int = 0

    def __post_init__(self) -> None:
        self.is_on = self.draw.random() < SHARE

    def maybe_verify(self) -> None:
        """Compare the replicas of a partition through a broker that runs; it may die meanwhile."""
        if not self.is_on or self.draw.random() >= CHANCE:
            return
        partitions, app = self._partitions(), self._app()
        if app is not None and partitions:
            name, partition_id = self.draw.choice(partitions)
            app.context.node.spawn(self._verify(app, partition_id, name))

    def _partitions(self) -> list[tuple[str, PartitionId]]:
        return [
            (topic.name, PartitionId(TopicId(topic.topic_id), number))
            for topic in self.simulation.operator.topics
            if not topic.delete_asked
            for number in range(topic.partitions)
        ]

    def _app(self) -> BrokerApp | None:
        app = self.simulation.broker(self.draw.choice(self.simulation.brokers))
        return None if app is None or app.context.node.loop.is_held else app

    async def _verify(self, app: BrokerApp, partition_id: PartitionId, name: str) -> PartitionVerification:
        result = await verify(app.broker, partition_id, name)
        self.agreed += result.state == AGREE
        if result.state == DIFFER:
            self.differed += 1
            rotten = self.simulation.rotten.get(partition_id)
            suspects = () if result.difference is None else result.difference.suspects
            if rotten is None or int(rotten.node_id) not in suspects:
                self.fail(app.name, f"replicas of {name} differ, and no bit of the suspects has changed: {result}")
        return result

    def _run(self, partition_id: PartitionId, name: str) -> PartitionVerification:
        """When faults have ended."""
        app = next(app for app in map(self.simulation.broker, self.simulation.brokers) if app is not None)
        job = self._verify(app, partition_id, name)
        return self.simulation.world.run(app.context.node, lambda _: job, timeout=TIMEOUT_S)

    def check_rot(self) -> None:
        """Rot that is still there is reported."""
        if not self.is_on:
            return
        names = {partition_id: name for name, partition_id in self._partitions()}
        for partition_id, station in self.simulation.rotten.items():
            app = self.simulation.broker(station)
            replica = None if app is None else app.replicas.get(partition_id)
            if app is None or partition_id not in names or replica is None or replica.log is None:
                continue
            result = self._run(partition_id, names[partition_id])
            if result.state != AGREE or replica.log is None or replica.log.damaged is not None:
                continue
            if isinstance(self.simulation.read_log(app, partition_id), int):
                self.fail(app.name, f"replicas of {names[partition_id]} are said to agree, but one is rotten: {result}")

    def check_all(self) -> None:
        """At the end all replicas agree, and are proved to."""
        if not self.is_on:
            return
        for name, partition_id in self._partitions():
            for _ in range(ATTEMPTS_MAX):
                result = self._run(partition_id, name)
                if result.state == AGREE:
                    break
                self.simulation.world.run_for(1)
            else:
                self.fail("operator", f"replicas of {name} are not proved to agree: {result}")
