"""What the core hands to the user's side: fetched data, or a change of partitions that a callback has to hear of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tidelog.client.fetched import Fetched
from tidelog.client.positions import Held
from tidelog.client.record import TopicPartition
from tidelog.model.ids import PartitionId


class Change(Enum):
    ASSIGNED = "assigned"
    """Taken over; nothing of them was read yet. At every rebalance, so perhaps of none."""
    REVOKED = "revoked"
    """To be given up: still ours until the callback has ended. Never empty."""
    LOST = "lost"
    """Not ours any more: the group has gone on without this member."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    change: Change
    partitions: tuple[PartitionId, ...]
    names: tuple[TopicPartition, ...]


def change_of(change: Change, held: Sequence[Held]) -> Rebalance:
    return Rebalance(change, tuple(one.partition for one in held), tuple(one.name for one in held))


@dataclass(frozen=True, slots=True)
class Handover:
    """Either pieces or a rebalance, or neither when time was up. An answer may get lost on its way (Ctrl-C, a cancelled
    task): the next call says the `number` that arrived last, and a newer one is handed over again."""

    number: int
    pieces: Sequence[Fetched] = ()
    rebalance: Rebalance | None = None


@dataclass(frozen=True, slots=True)
class Listener:
    """The user's callbacks, each with a list of `TopicPartition`."""

    on_assigned: Callable[[list[TopicPartition]], Any] | None = None
    on_revoked: Callable[[list[TopicPartition]], Any] | None = None
    on_lost: Callable[[list[TopicPartition]], Any] | None = None

    def callback(self, change: Change) -> Callable[[list[TopicPartition]], Any] | None:
        """Without one for lost partitions that for revoked ones is called."""
        if change is Change.ASSIGNED:
            return self.on_assigned
        return self.on_revoked if change is Change.REVOKED else self.on_lost or self.on_revoked
