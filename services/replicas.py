"""Reassigns replicas, elects leaders, drains brokers, updates features. The active controller decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tidelog.metadata.brokers import Drain, Drained, Unregister
from tidelog.metadata.decision import Outcome
from tidelog.metadata.features import KNOWN_FEATURES, UpdateFeatures
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.queries import (
    BrokerDescription,
    DescribeBrokers,
    DescribedBrokers,
    DescribedFeatures,
    DescribeFeatures,
    ListedReassignments,
    ListReassignments,
)
from tidelog.metadata.reassignments import AlterReassignments, Reassignment
from tidelog.model.errors import BrokerNotRegisteredError
from tidelog.services.authorization import CLUSTER, Operation
from tidelog.services.batches import change_in_batches, outcomes_of
from tidelog.services.context import RequestContext
from tidelog.services.node import NodeAccess, Rows

Item = TypeVar("Item")

PARTITIONS_MAX = 1_000
"""Partitions in one request to the controller; a larger request is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOutcome:
    topic: str
    partition: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureDescription:
    name: str
    level: int
    level_min: int
    level_max: int


class ReplicaService:
    def __init__(self, node: NodeAccess) -> None:
        self._node = node

    # Partitions.

    async def alter_reassignments(
        self, context: RequestContext, request: AlterReassignments
    ) -> tuple[PartitionOutcome, ...]:
        """Return one outcome for each partition, in order."""
        return await self._change_partitions(
            context,
            request.partitions,
            lambda item: (item.topic, item.partition),
            lambda items: replace(request, partitions=items),
        )

    async def elect_leaders(self, context: RequestContext, request: ElectLeaders) -> tuple[PartitionOutcome, ...]:
        """Return one outcome for each named partition. Without names: for each partition that needed an election."""
        if request.partitions is not None:
            return await self._change_partitions(
                context, request.partitions, lambda name: name, lambda names: replace(request, partitions=names)
            )
        self._node.guard.admit_change(context)
        outcomes = outcomes_of(await self._node.ask(context, request))
        # The controller labels each partition `topic-partition`.
        labels = [outcome.name.rpartition("-") for outcome in outcomes]
        return tuple(
            PartitionOutcome(topic=topic, partition=int(number), outcome=outcome)
            for (topic, _, number), outcome in zip(labels, outcomes, strict=True)
        )

    async def _change_partitions(
        self,
        context: RequestContext,
        items: Sequence[Item],
        name: Callable[[Item], tuple[str, int]],
        request: Callable[[tuple[Item, ...]], object],
    ) -> tuple[PartitionOutcome, ...]:
        self._node.guard.authorize(context, Operation.ALTER, CLUSTER)
        outcomes = await change_in_batches(
            self._node,
            context,
            self._node.deadline(context),
            items,
            name=name,
            rejection=lambda _: None,
            request=request,
            rows=outcomes_of,
            failed=lambda _, error: Outcome("", error.code, str(error)),
            size=PARTITIONS_MAX,
        )
        return tuple(
            PartitionOutcome(topic=topic, partition=number, outcome=outcome)
            for (topic, number), outcome in zip(map(name, items), outcomes, strict=True)
        )

    async def list_reassignments(
        self,
        context: RequestContext,
        partitions: tuple[tuple[str, int], ...] | None = None,
        *,
        allow_stale: bool = False,
    ) -> Rows[Reassignment]:
        """Return reassignments in progress; `partitions` None: all."""
        self._node.guard.admit_query(context)
        reply, stale_ms = await self._node.read(
            context, ListReassignments(partitions=partitions), allow_stale=allow_stale
        )
        assert isinstance(reply, ListedReassignments), "the reply to its question"
        return Rows(reply.reassignments, stale_ms)

    # Brokers.

    async def describe_brokers(
        self, context: RequestContext, brokers: tuple[int, ...] = (), *, allow_stale: bool = False
    ) -> Rows[BrokerDescription]:
        """Return the named brokers in order, each once, or all; raises `BrokerNotRegisteredError`."""
        self._node.guard.admit_query(context)
        reply, stale_ms = await self._node.read(context, DescribeBrokers(), allow_stale=allow_stale)
        assert isinstance(reply, DescribedBrokers), "the reply to its question"
        registered = {description.broker: description for description in reply.brokers}
        for broker in brokers:
            if broker not in registered:
                raise BrokerNotRegisteredError(f"broker {broker} is not registered")
        return Rows(tuple(registered[broker] for broker in dict.fromkeys(brokers) or sorted(registered)), stale_ms)

    async def drain_broker(self, context: RequestContext, request: Drain) -> Drained:
        self._node.guard.admit_change(context)
        reply = await self._node.ask(context, request)
        assert isinstance(reply, Drained), "the reply to its request"
        return reply

    async def unregister_broker(self, context: RequestContext, request: Unregister) -> None:
        """Forget a broker that will not return; the controller rejects one that is live or holds replicas."""
        self._node.guard.admit_change(context)
        await self._node.ask(context, request)

    # Features.

    async def describe_features(
        self, context: RequestContext, *, allow_stale: bool = False
    ) -> Rows[FeatureDescription]:
        """Return the features of the cluster and those that this node knows, by name."""
        self._node.guard.admit_query(context)
        reply, stale_ms = await self._node.read(context, DescribeFeatures(), allow_stale=allow_stale)
        assert isinstance(reply, DescribedFeatures), "the reply to its question"
        levels = dict(reply.levels)
        rows = []
        for name in sorted({*levels, *KNOWN_FEATURES}):
            low, high = KNOWN_FEATURES.get(name, (0, 0))
            row = FeatureDescription(name=name, level=levels.get(name, 0), level_min=low, level_max=high)
            rows.append(row)
        return Rows(tuple(rows), stale_ms)

    async def update_features(self, context: RequestContext, request: UpdateFeatures) -> tuple[Outcome, ...]:
        """Return one outcome for each feature, in order."""
        self._node.guard.authorize(context, Operation.ALTER, CLUSTER)
        outcomes = await change_in_batches(
            self._node,
            context,
            self._node.deadline(context),
            request.changes,
            name=lambda change: change.name,
            rejection=lambda _: None,
            request=lambda changes: replace(request, changes=changes),
            rows=outcomes_of,
            failed=lambda change, error: Outcome(change.name, error.code, str(error)),
        )
        return tuple(outcomes)
