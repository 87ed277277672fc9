"""Changes of the assigned partitions, as the user's callbacks receive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tidelog.client.consumer.subscription_state import PartitionState
from tidelog.client.record import TopicPartition
from tidelog.model.ids import PartitionId


class Change(Enum):
    ASSIGNED = "assigned"
    """New partitions; nothing of them was fetched yet. Sent for every rebalance, so it may be empty."""
    REVOKED = "revoked"
    """The group takes them away; this member owns them until the callback has returned. Never empty."""
    LOST = "lost"
    """The group removed this member; others may own them already."""


@dataclass(frozen=True, slots=True, eq=False)
class Rebalance:
    change: Change
    partitions: tuple[PartitionId, ...]
    names: tuple[TopicPartition, ...]

    @classmethod
    def of(cls, change: Change, states: Sequence[PartitionState]) -> Rebalance:
        return cls(change, tuple(state.partition for state in states), tuple(state.name for state in states))


RebalanceCallback = Callable[[list[TopicPartition]], Any]


@dataclass(frozen=True, slots=True)
class RebalanceListener:
    """The user's callbacks."""

    on_assigned: RebalanceCallback | None = None
    on_revoked: RebalanceCallback | None = None
    on_lost: RebalanceCallback | None = None

    def callback(self, change: Change) -> RebalanceCallback | None:
        """`on_revoked` handles lost partitions if there is no `on_lost`."""
        if change is Change.ASSIGNED:
            return self.on_assigned
        return self.on_revoked if change is Change.REVOKED else self.on_lost or self.on_revoked
