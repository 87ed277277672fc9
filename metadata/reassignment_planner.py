"""Plans reassignments that spread replicas and leaders evenly over brokers. A plan changes nothing by itself. Pure.

A plan is made topic by topic, so that a new broker gets its share of every topic and not only of the largest one:
1. A replica on a broker that may not hold it moves to one that may.
2. Within each topic, replicas move from the broker with most replicas of that topic to the one with fewest, until these
   numbers differ by at most one. A move between brokers that differ by one is made where it levels the totals.
3. Replica lists are reordered so that preferred leaders are even within each topic, and then over all topics. A new
   order moves no data.
No move puts the replicas of a partition on fewer racks. A replica that moves keeps its position in the list.

Each move lowers the sum of squares of a topic's replicas per broker, or keeps it and lowers the sum of squares of all
replicas per broker; so planning ends, and a plan for what a plan has made is empty.
"""

from collections import Counter
from collections.abc import Collection
from uuid import UUID

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.placement import spread_leaders
from tidelog.metadata.reassignments import ReassignmentTarget
from tidelog.metadata.topics import find_topic
from tidelog.model.errors import BrokerNotRegisteredError, InvalidReplicationFactorError
from tidelog.model.maps import sorted_items

Placed = dict[tuple[UUID, int], tuple[int, ...]]


def plan_reassignments(
    image: ClusterImage, *, topics: Collection[str] | None = None, brokers: Collection[int] | None = None
) -> tuple[ReassignmentTarget, ...]:
    """Returns the moves that spread these topics (default: all) over these brokers (default: all live, undrained ones).

    Between moves that level a topic equally well, the broker with fewer replicas of all topics gets the replica.
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
    _Leveller(image, placed, allowed, load).level()
    _spread_leaders(placed)
    return tuple(
        ReassignmentTarget(topic=image.topics[topic_id].name, partition=number, replicas=replicas)
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


class _Leveller:
    """Moves one replica at a time in `placed`."""

    def __init__(self, image: ClusterImage, placed: Placed, allowed: list[int], load: Counter[int]) -> None:
        self._image = image
        self._placed = placed
        self._allowed = allowed
        self._load = load
        self._held: dict[UUID, dict[int, dict[int, None]]] = {}
        """Partitions by topic and broker. Dictionaries, not sets: a plan is the same each time it is made."""
        for (topic_id, number), replicas in placed.items():
            by_broker = self._held.setdefault(topic_id, {broker: {} for broker in allowed})
            for broker in replicas:
                by_broker[broker][number] = None

    def level(self) -> None:
        for topic_id in self._held:
            while self._level_topic_once(topic_id):
                pass
        while self._level_totals_once():
            pass

    def _level_topic_once(self, topic_id: UUID) -> bool:
        held = self._held[topic_id]
        emptiest = sorted(self._allowed, key=lambda broker: (len(held[broker]), self._load[broker], broker))
        for source in reversed(emptiest):
            for target in emptiest:
                if len(held[source]) - len(held[target]) < 2:
                    break
                if self._move_one(topic_id, source=source, target=target):
                    return True
        return False

    def _level_totals_once(self) -> bool:
        """Moves one replica from a fuller to an emptier broker of a topic that differs by one between them."""
        emptiest = sorted(self._allowed, key=lambda broker: (self._load[broker], broker))
        for source in reversed(emptiest):
            for target in emptiest:
                if self._load[source] - self._load[target] < 2:
                    break
                for topic_id, held in self._held.items():
                    is_fuller = len(held[source]) > len(held[target])
                    if is_fuller and self._move_one(topic_id, source=source, target=target):
                        return True
        return False

    def _move_one(self, topic_id: UUID, *, source: int, target: int) -> bool:
        """Returns whether some replica of the topic could move."""
        for number in self._held[topic_id][source]:
            replicas = self._placed[topic_id, number]
            if target not in replicas and _keeps_racks(self._image, replicas, source, target):
                self._move(topic_id, number, source=source, target=target)
                return True
        return False

    def _move(self, topic_id: UUID, number: int, *, source: int, target: int) -> None:
        replicas = self._placed[topic_id, number]
        self._placed[topic_id, number] = tuple(target if broker == source else broker for broker in replicas)
        del self._held[topic_id][source][number]
        self._held[topic_id][target][number] = None
        self._load[source] -= 1
        self._load[target] += 1


def _spread_leaders(placed: Placed) -> None:
    """Reorders replicas: preferred leaders become even within each topic, then over all topics in `placed`."""
    numbers: dict[UUID, list[int]] = {}
    for topic_id, number in placed:
        numbers.setdefault(topic_id, []).append(number)
    in_topic: dict[UUID, Counter[int]] = {}
    for topic_id, of_topic in numbers.items():
        for number, replicas in zip(of_topic, spread_leaders([placed[topic_id, n] for n in of_topic]), strict=True):
            placed[topic_id, number] = replicas
        in_topic[topic_id] = Counter(placed[topic_id, number][0] for number in of_topic)
    in_all = sum(in_topic.values(), Counter())
    has_changed = True
    while has_changed:
        has_changed = False
        for (topic_id, number), replicas in placed.items():
            leader, leads = replicas[0], in_topic[topic_id]
            other = min(replicas, key=lambda broker: (in_all[broker], broker))
            if in_all[leader] - in_all[other] >= 2 and leads[leader] - leads[other] >= 1:
                placed[topic_id, number] = (other, *(broker for broker in replicas if broker != other))
                for counts in (in_all, leads):
                    counts[leader] -= 1
                    counts[other] += 1
                has_changed = True


def _keeps_racks(image: ClusterImage, replicas: tuple[int, ...], source: int, target: int) -> bool:
    if image.brokers[source].rack == image.brokers[target].rack:
        return True
    racks = _racks(image, replicas)
    after = racks.copy()
    after[image.brokers[source].rack] -= 1
    after[image.brokers[target].rack] += 1
    return max(after.values()) <= max(racks.values()) and len(+after) >= len(racks)
