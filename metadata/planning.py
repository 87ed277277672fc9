"""Plans of reassignments: what to move so that topics live on the brokers that they should, evenly. Nothing is changed.

A plan moves as little as it can:
1. a replica on a broker that may not have it goes to one that may;
2. then replicas go from the fullest broker to the emptiest, one at a time, until they differ by at most one, or until
   no move is left that keeps the replicas of a partition on as many racks as they are on.
A replica that moves keeps its place in the list, so a preferred leader moves with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.reassignments import Reassigned
from tidelog.metadata.topics import find_topic
from tidelog.model.errors import BrokerNotRegisteredError, InvalidReplicationFactorError
from tidelog.model.maps import sorted_items

Placed = dict[tuple[UUID, int], tuple[int, ...]]


def plan_reassignments(
    image: ClusterImage, *, topics: Collection[str] | None = None, brokers: Collection[int] | None = None
) -> tuple[Reassigned, ...]:
    """The moves that put these topics (all, if none are named) evenly on these brokers (all that are not drained).

    The load that counts is all replicas of a broker, those of other topics included.
    """
    allowed = _allowed(image, brokers)
    wanted = image.topics.values() if topics is None else [find_topic(image, name) for name in sorted(set(topics))]
    before: Placed = {
        (topic.topic_id, number): partition.target or partition.replicas
        for topic in sorted(wanted, key=lambda topic: topic.name)
        for number, partition in sorted_items(topic.partitions)
    }
    for (topic_id, number), replicas in before.items():
        if len(replicas) > len(allowed):
            raise InvalidReplicationFactorError(
                f"partition {number} of {image.topics[topic_id].name} has {len(replicas)} replicas, "
                f"the plan has {len(allowed)} brokers"
            )
    load = Counter({broker: image.replica_count(broker) for broker in allowed})
    placed = dict(before)
    for key, replicas in before.items():
        placed[key] = _moved_in(image, replicas, allowed, load)
    _level(image, placed, allowed, load)
    return tuple(
        Reassigned(topic=image.topics[topic_id].name, partition=number, replicas=replicas)
        for (topic_id, number), replicas in placed.items()
        if replicas != before[topic_id, number]
    )


def _allowed(image: ClusterImage, brokers: Collection[int] | None) -> list[int]:
    if brokers is None:
        return sorted(number for number, broker in image.brokers.items() if broker.is_live and not broker.draining)
    for broker in sorted(brokers):
        if broker not in image.brokers:
            raise BrokerNotRegisteredError(f"broker {broker} is not registered")
    return sorted(set(brokers))


def _racks(image: ClusterImage, replicas: Collection[int]) -> Counter[str | None]:
    return Counter(image.brokers[broker].rack for broker in replicas)


def _moved_in(
    image: ClusterImage, replicas: tuple[int, ...], allowed: list[int], load: Counter[int]
) -> tuple[int, ...]:
    """Replicas outside of the plan go to the rack with the fewest of this partition, there to the emptiest broker."""
    result = list(replicas)
    for place, broker in enumerate(replicas):
        if broker in allowed:
            continue
        others = [b for b in result if b in allowed]
        racks = _racks(image, others)
        best = min((b for b in allowed if b not in result), key=lambda b: (racks[image.brokers[b].rack], load[b], b))
        result[place] = best
        load[best] += 1
    return tuple(result)


def _level(image: ClusterImage, placed: Placed, allowed: list[int], load: Counter[int]) -> None:
    """Moves one replica at a time; each brings two brokers closer, so this ends."""
    held: dict[int, dict[tuple[UUID, int], None]] = {broker: {} for broker in allowed}
    for key, replicas in placed.items():
        for broker in replicas:
            held[broker][key] = None
    while True:
        move = _next_move(image, placed, allowed, load, held)
        if move is None:
            return
        key, source, target = move
        placed[key] = tuple(target if broker == source else broker for broker in placed[key])
        del held[source][key]
        held[target][key] = None
        load[source] -= 1
        load[target] += 1


def _next_move(
    image: ClusterImage,
    placed: Placed,
    allowed: list[int],
    load: Counter[int],
    held: dict[int, dict[tuple[UUID, int], None]],
) -> tuple[tuple[UUID, int], int, int] | None:
    emptiest = sorted(allowed, key=lambda broker: (load[broker], broker))
    for source in reversed(emptiest):
        for target in emptiest:
            if load[source] - load[target] < 2:
                break
            for key in held[source]:
                replicas = placed[key]
                if target not in replicas and _keeps_racks(image, replicas, source, target):
                    return key, source, target
    return None


def _keeps_racks(image: ClusterImage, replicas: tuple[int, ...], source: int, target: int) -> bool:
    if image.brokers[source].rack == image.brokers[target].rack:
        return True
    racks = _racks(image, replicas)
    after = racks.copy()
    after[image.brokers[source].rack] -= 1
    after[image.brokers[target].rack] += 1
    return max(after.values()) <= max(racks.values()) and len(+after) >= len(racks)
