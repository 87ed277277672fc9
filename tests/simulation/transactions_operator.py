"""The operator of the runs with transactions: topics move, those of coordinators too."""

from __future__ import annotations

from simulation.broker_operator import Operator
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget

STATE_TOPIC = "__transaction_state"


class TransactionsOperator(Operator):
    pause_s: float = 1.2
    operations: tuple[str, ...] = ("move", "move_state", "move_offsets", "elect", "nothing")

    async def _one(self, client: ControllerClient) -> None:
        kind = self.draw.choices(self.operations, self.simulation.shape.operations)[0]
        if kind == "move":
            await self._move(client, self.draw.choice(self.topics))
        elif kind == "move_state":
            await self._move_internal(client, STATE_TOPIC)
        elif kind == "move_offsets":
            await self._move_internal(client, OFFSETS_TOPIC)
        elif kind == "elect":
            await self._try(client, ElectLeaders(kind="preferred"))

    async def _move_internal(self, client: ControllerClient, name: str) -> None:
        topic = self.image.topic_named(name)
        if topic is None:
            return
        number = self.draw.choice(sorted(topic.partitions))
        brokers = [int(node) for node in self.simulation.broker_nodes]
        replicas = tuple(self.draw.sample(brokers, len(topic.partitions[number].original_replicas)))
        item = ReassignmentTarget(topic=name, partition=number, replicas=replicas)
        await self._try(client, AlterReassignments(partitions=(item,)))
