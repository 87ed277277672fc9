"""Placement of the replicas of new partitions: distinct brokers, spread over racks, balanced over brokers. Pure.

The broker list alternates between racks (0,1,2 on one rack and 3,4,5 on another: 0,3,1,4,2,5). Each partition starts
one position further in the list and takes, one replica at a time, the broker with the fewest replicas so far among
those whose rack has the fewest replicas of this partition; the list decides between equals. Racks come first: with
racks of unequal size the brokers of a small rack hold more, so that losing a rack never takes all replicas of a
partition while another rack could hold one.

Leaders are then balanced: a partition's first replica is its preferred leader, and replicas are reordered until the
numbers of preferred leaders differ by at most one wherever the replica sets allow it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidelog.model.errors import InvalidReplicationFactorError


@dataclass(frozen=True, slots=True)
class UsableBroker:
    """A broker that may take replicas, and its number of replicas."""

    broker: int
    rack: str | None
    replicas: int = 0


def alternate_racks(usable: Sequence[UsableBroker]) -> list[UsableBroker]:
    """Orders brokers by id, alternating between racks; all brokers without a rack count as one rack."""
    racks: dict[str | None, deque[UsableBroker]] = {}
    for broker in sorted(usable, key=lambda broker: broker.broker):
        racks.setdefault(broker.rack, deque()).append(broker)
    queues = deque(racks.values())
    order: list[UsableBroker] = []
    while queues:
        queue = queues.popleft()
        order.append(queue.popleft())
        if queue:
            queues.append(queue)
    return order


def place_replicas(
    usable: Sequence[UsableBroker], *, partitions: int, replication_factor: int, first: int = 0
) -> list[tuple[int, ...]]:
    """Returns the replicas of each partition, preferred leader first.

    `first` is the number of existing partitions of the topic, so that new ones continue where the earlier ones stopped.
    """
    if replication_factor < 1:
        raise InvalidReplicationFactorError(f"replication factor {replication_factor}: at least 1")
    if replication_factor > len(usable):
        raise InvalidReplicationFactorError(
            f"replication factor {replication_factor} needs {replication_factor} brokers, {len(usable)} are available"
        )
    order = alternate_racks(usable)
    start = min(range(len(order)), key=lambda index: (order[index].replicas, index)) + first
    load = {broker.broker: 0 for broker in order}
    chosen = []
    for partition in range(partitions):
        turn = (start + partition) % len(order)
        chosen.append(_choose(order[turn:] + order[:turn], load, replication_factor))
    return spread_leaders(chosen)


def _choose(order: list[UsableBroker], load: dict[int, int], replication_factor: int) -> tuple[int, ...]:
    """Chooses each replica in the rack with the fewest of this partition, there on the broker with the fewest
    replicas."""
    in_rack: dict[str | None, int] = dict.fromkeys((broker.rack for broker in order), 0)
    lowest = min(load.values())
    replicas: list[int] = []
    for _ in range(replication_factor):
        best: UsableBroker | None = None
        best_key = unbeaten = (min(in_rack.values()), lowest)
        for broker in order:
            key = (in_rack[broker.rack], load[broker.broker])
            if (best is None or key < best_key) and broker.broker not in replicas:
                best, best_key = broker, key
                if key == unbeaten:
                    break
        assert best is not None, "there are as many brokers as replicas"
        in_rack[best.rack] += 1
        load[best.broker] += 1
        replicas.append(best.broker)
    return tuple(replicas)


def spread_leaders(assignments: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Reorders replica lists so that preferred leaders are balanced.

    While one broker leads two more than another that could take over, directly or through a chain of brokers that each
    pass one leadership on, shifts one along the shortest such chain. Each shift reduces the difference, so this ends.
    """
    result = list(assignments)
    leads: dict[int, set[int]] = {broker: set() for replicas in result for broker in replicas}
    for number, replicas in enumerate(result):
        leads[replicas[0]].add(number)
    while True:
        busiest = sorted(leads, key=lambda broker: (-len(leads[broker]), broker))
        chain = next((found for broker in busiest if (found := _chain(broker, leads, result))), None)
        if chain is None:
            return result
        for number, to in chain:
            leads[result[number][0]].discard(number)
            result[number] = (to, *(broker for broker in result[number] if broker != to))
            leads[to].add(number)


def _chain(
    source: int, leads: Mapping[int, set[int]], assignments: Sequence[tuple[int, ...]]
) -> list[tuple[int, int]] | None:
    """Returns the leaderships to move, (partition, new leader) each, from `source` to a broker that leads at least two
    fewer."""
    came_from: dict[int, tuple[int, int]] = {}
    seen = {source}
    queue = deque([source])
    while queue:
        broker = queue.popleft()
        if len(leads[source]) - len(leads[broker]) >= 2:
            chain = []
            while broker != source:
                before, number = came_from[broker]
                chain.append((number, broker))
                broker = before
            return chain[::-1]
        for number in sorted(leads[broker]):
            for other in assignments[number][1:]:
                if other not in seen:
                    seen.add(other)
                    came_from[other] = (broker, number)
                    queue.append(other)
    return None
