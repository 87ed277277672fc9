"""The operator of the runs with transactions: moves topics, those of coordinators too, ages transactional ids, deletes
records and aborts transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simulation.broker_operator import Operator
from simulation.cluster import Context
from simulation.groups_node import Connections
from simulation.groups_workload import new_cluster
from simulation.transactions_clients import CALL_S, StationProducer, closed
from tidelog.client.coordinators import TRANSACTIONS, Coordinators
from tidelog.coordinator.coordinator import OFFSETS_TOPIC
from tidelog.coordinator.transactions.limits import TransactionLimits
from tidelog.coordinator.transactions.machine import DECISIONS
from tidelog.coordinator.transactions.records import TransactionRecord
from tidelog.coordinator.transactions.state import TransactionsState
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.model.errors import TidelogError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import log_pb2, transactions_pb2

if TYPE_CHECKING:
    from simulation.transactions_sim import TransactionsSimulation

STATE_TOPIC = "__transaction_state"
ABORT, DELETE = method_named("Transactions", "Abort"), method_named("Log", "DeleteRecords")
COMPACTED = {"segment.bytes": "3000", "min.cleanable.dirty.ratio": "0.01", "delete.retention.ms": "300"}


@dataclass(frozen=True, slots=True)
class Age:
    """Sets the epoch of an idle transactional id, as if it had been used often."""

    transactional_id: str
    epoch: int
    now_ms: int = 0


def _age(
    state: TransactionsState, request: Age, _limits: TransactionLimits
) -> tuple[Sequence[TransactionRecord], None]:
    before = state.ids[request.transactional_id]
    if before.epoch >= request.epoch:
        return (), None
    after = replace(before, epoch=request.epoch, previous_producer_id=-1, previous_epoch=-1)
    return [TransactionRecord(request.transactional_id, after)], None


DECISIONS[Age] = _age


class TransactionsOperator(Operator):
    pause_s: float = 1.0
    operations: tuple[str, ...] = ("move", "move_state", "move_offsets", "elect", "nothing")
    is_aged = False
    deleted = aborted = 0
    """Requests that were done."""

    @property
    def _run(self) -> TransactionsSimulation:
        from simulation.transactions_sim import TransactionsSimulation  # it imports this module

        assert isinstance(self.simulation, TransactionsSimulation), "the run has transactions"
        return self.simulation

    async def run(self, context: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run(context))
            group.create_task(self._prepare(context))

    async def _prepare(self, context: Context) -> None:
        """Before programs begin. Later: what needs a client of the API."""
        while len(self.topics) < len(self.simulation.shape.topics):  # noqa: ASYNC110 - by the other task
            await asyncio.sleep(0.02)
        if self._run.transactions.first_epoch:
            for owner in sorted({pipeline.owner for pipeline in self._run.pipelines}):
                await self._make_old(context, owner)
        self.is_aged = True
        cluster = new_cluster(context, self._run.bootstrap, Connections(context.transport))
        coordinators = Coordinators(cluster, TRANSACTIONS)
        while not self.is_stopping:
            await asyncio.sleep(self.draw.expovariate(1 / self.pause_s))
            try:
                if self._run.transactions.has_operator:
                    await self._abort_one(cluster, coordinators)
                if self._run.transactions.deletes:
                    await self._delete(cluster)
            except TidelogError as error:
                context.trace(f"not done: {error.code.name}: {error}")
        await asyncio.Event().wait()

    async def _make_old(self, context: Context, owner: str) -> None:
        producer = StationProducer(context, self._run, transactional_id=owner)
        while True:
            try:
                await producer.init_transactions(timeout=CALL_S)
                break
            except TidelogError:
                await asyncio.sleep(0.05)
        await closed(producer.close(timeout=CALL_S))
        while not any([await self._age_at(app, owner) for app in list(self.simulation.apps.values())]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _age_at(self, app: Any, owner: str) -> bool:
        """On the coordinator; False if this broker is not."""
        try:
            shard = app.broker.transactions.shard_of(owner)
        except TidelogError:
            return False
        request, done = Age(owner, self._run.transactions.first_epoch), []

        async def submit() -> None:
            try:
                await shard.submit(request)
            except TidelogError:
                return
            done.append(True)

        app.context.node.spawn(submit())
        for _ in range(40):
            if done:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _abort_one(self, cluster: Any, coordinators: Coordinators) -> None:
        owners = sorted({pipeline.owner for pipeline in self._run.pipelines} | {one.owner for one in self._run.owners})
        owner = self.draw.choice(owners)
        coordinator = await coordinators.find(owner, timeout_ms=1_000)
        coordinators.forget(owner)
        request = transactions_pb2.AbortTransactionRequest(transactional_id=owner)
        await cluster.call_at(coordinator.address, ABORT, request, timeout_ms=1_000)
        self.aborted += 1

    async def _delete(self, cluster: Any) -> None:
        """What every program has read. It may lie beside an open transaction, and not behind its first record."""
        topic, number, offset = self._run.draw_processed(self.draw)
        known = self._run.replica_checker.partitions[PartitionId(TopicId(topic.topic_id), number)]
        partition = self.image.partition(topic.topic_id, number)
        if offset <= known.deleted or partition is None or partition.leader < 0:
            return
        known.deleting = max(known.deleting, offset)
        named = log_pb2.DeleteRecordsPartition(topic_id=topic.topic_id.bytes, partition=number, before_offset=offset)
        address = f"{self.simulation.cluster.station(NodeId(partition.leader)).name}:9092"
        request = log_pb2.DeleteRecordsRequest(partitions=[named])
        reply = await cluster.call_at(address, DELETE, request, timeout_ms=1_000)
        if not reply.partitions[0].HasField("error"):
            known.deleted = max(known.deleted, offset)
            self.deleted += 1

    async def _compact_groups(self, client: ControllerClient) -> None:
        if not self._run.transactions.is_compacted or self._is_compacting_groups:
            return
        names = (STATE_TOPIC, OFFSETS_TOPIC)
        if any(self.image.topic_named(name) is None for name in names):
            return
        changes = tuple(ConfigChange(key=key, operation="set", value=value) for key, value in COMPACTED.items())
        resources = tuple(ResourceChange(resource_type="topic", resource=name, changes=changes) for name in names)
        reply = await self._try(client, AlterConfigs(resources=resources))
        self._is_compacting_groups = reply is not None and all(item.error is None for item in reply.items)

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
