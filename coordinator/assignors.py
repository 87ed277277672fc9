"""Assigns partitions to members: pure functions from topics, members and the last target to a new target. Pure.

    range        each topic by itself: consecutive partitions, the first members get one more. Members with the same
                 subscriptions hold the same numbers of every topic, as joins of topics want it.
    roundrobin   all partitions of all topics, assigned one by one.
    uniform      balanced first, then as few moves as possible, then near: prefers a member in a rack of a replica.

Topics go by name, members by instance id (static ones first), then by member id. `range` and `roundrobin` follow from
that order alone; `uniform` follows from the last target, and from that order where it leaves a choice.

Balance of `uniform`: among members with equal subscriptions the numbers of partitions differ by one at most. With
different ones nobody holds two more than a member that could take one over, be it through others in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

from tidelog.coordinator.records import NO_PARTITIONS, Partitions
from tidelog.coordinator.requests import TopicShape
from tidelog.model.ids import PartitionId, TopicId

DEFAULT_ASSIGNOR = "uniform"


@dataclass(frozen=True, slots=True)
class Subscriber:
    topics: tuple[TopicId, ...]
    """Ordered by name."""
    rack: str = ""
    instance_id: str = ""


Topics = Mapping[TopicId, TopicShape]
Subscribers = Mapping[str, Subscriber]
Assigned = dict[str, list[PartitionId]]
_NONE_FREE = bytearray()


@lru_cache(maxsize=4_096)
def _partitions(topic_id: TopicId, count: int) -> tuple[PartitionId, ...]:
    # The same objects in every target: sets of them are then compared by identity.
    return tuple(PartitionId(topic_id, number) for number in range(count))


def assign(
    name: str, topics: Topics, members: Subscribers, previous: Mapping[str, Partitions]
) -> dict[str, Partitions]:
    """Return the target of each member. Each partition of a subscribed topic goes to one of its subscribers."""
    ordered = sorted(members, key=lambda member_id: _place(member_id, members[member_id]))
    assigned = ASSIGNORS[name](topics, {member_id: members[member_id] for member_id in ordered}, previous)
    made: dict[str, Partitions] = {}
    for member_id in members:
        partitions = assigned.get(member_id, [])
        before = previous.get(member_id, NO_PARTITIONS)
        # The same object for an equal set: callers compare by identity.
        is_same = len(partitions) == len(before) and before.issuperset(partitions)
        made[member_id] = before if is_same else frozenset(partitions)
    return made


def _place(member_id: str, member: Subscriber) -> tuple[bool, str]:
    return (False, member.instance_id) if member.instance_id else (True, member_id)


def _readers(members: Subscribers) -> dict[TopicId, list[str]]:
    readers: dict[TopicId, list[str]] = {}
    for member_id, member in members.items():
        for topic_id in member.topics:
            readers.setdefault(topic_id, []).append(member_id)
    return readers


def _by_name(topics: Topics, readers: Mapping[TopicId, object]) -> list[TopicShape]:
    return sorted((topics[topic_id] for topic_id in readers), key=lambda shape: shape.name)


# ---- range and roundrobin


def assign_range(topics: Topics, members: Subscribers, previous: Mapping[str, Partitions]) -> Assigned:
    assigned: Assigned = {member_id: [] for member_id in members}
    for topic_id, readers in _readers(members).items():
        partitions = _partitions(topic_id, topics[topic_id].partitions)
        share, extra = divmod(len(partitions), len(readers))
        start = 0
        for number, member_id in enumerate(readers):
            end = start + share + (number < extra)
            assigned[member_id] += partitions[start:end]
            start = end
    return assigned


def assign_roundrobin(topics: Topics, members: Subscribers, previous: Mapping[str, Partitions]) -> Assigned:
    assigned: Assigned = {member_id: [] for member_id in members}
    readers = {topic_id: frozenset(of) for topic_id, of in _readers(members).items()}
    order = list(members)
    turn = 0
    for shape in _by_name(topics, readers):
        of = readers[shape.topic_id]
        for partition in _partitions(shape.topic_id, shape.partitions):
            while order[turn] not in of:
                turn = (turn + 1) % len(order)
            assigned[order[turn]].append(partition)
            turn = (turn + 1) % len(order)
    return assigned


# ---- uniform


def assign_uniform(topics: Topics, members: Subscribers, previous: Mapping[str, Partitions]) -> Assigned:
    if not members:
        return {}
    first = next(iter(members.values()))
    if all(member.topics == first.topics for member in members.values()):
        return _Even(topics, members, previous, first.topics).deal()
    return _Uneven(topics, members, previous).deal()


def _is_near(topics: Topics, partition: PartitionId, rack: str) -> bool:
    racks = topics[partition.topic_id].racks
    return bool(rack) and partition.partition < len(racks) and rack in racks[partition.partition]


def _with_racks(topics: Topics, members: Subscribers) -> bool:
    return any(shape.racks for shape in topics.values()) and any(member.rack for member in members.values())


def _least_taken(heap: list[tuple[int, int, str]]) -> int:
    return heap[0][0]


class _Even:
    """All members read the same: each gets `share` partitions, and `extra` of them one more."""

    def __init__(
        self, topics: Topics, members: Subscribers, previous: Mapping[str, Partitions], read: Sequence[TopicId]
    ) -> None:
        self.topics, self.members, self.previous = topics, members, previous
        self.parts = {topic: _partitions(topic, topics[topic].partitions) for topic in read}
        self.free = {topic: bytearray(b"\1" * len(parts)) for topic, parts in self.parts.items()}
        """Which partitions of a topic nobody has yet."""
        self.share, self.extra = divmod(sum(map(len, self.parts.values())), len(members))
        self.has_racks = _with_racks(topics, members)

    def deal(self) -> Assigned:
        assigned = self._kept()
        rest = [self.parts[topic][n] for topic, free in self.free.items() for n, is_free in enumerate(free) if is_free]
        room = {member_id: self.share - len(partitions) for member_id, partitions in assigned.items()}
        # A member with one partition more has used an extra; the rest go to the first members that are not full.
        spare = self.extra - sum(1 for places in room.values() if places < 0)
        if self.has_racks:
            rest, spare = self._deal_near(assigned, rest, room, spare)
        self._deal_rest(assigned, rest, room, spare)
        return assigned

    def _kept(self) -> Assigned:
        """Return what each member keeps: as many as its share allows, near ones first. Removes them from `free`."""
        old = {member_id: self._old(member_id) for member_id in self.members}
        extra = self.extra
        for member_id, partitions in old.items():
            if len(partitions) <= self.share:
                continue
            limit = self.share + (extra > 0)
            extra -= extra > 0
            if len(partitions) > limit:
                rack = self.members[member_id].rack
                partitions.sort(key=lambda p: (not _is_near(self.topics, p, rack), p.topic_id.int, p.partition))
                for partition in partitions[limit:]:
                    self.free[partition.topic_id][partition.partition] = 1
                del partitions[limit:]
        return old

    def _old(self, member_id: str) -> list[PartitionId]:
        mine: list[PartitionId] = []
        last: TopicId | None = None
        free = bytearray()
        for partition in self.previous.get(member_id, NO_PARTITIONS):
            # Most targets are of few topics: hashing a UUID for each partition would be most of the work.
            if partition.topic_id is not last:
                last = partition.topic_id
                free = self.free.get(last, _NONE_FREE)
            if partition.partition < len(free) and free[partition.partition]:
                free[partition.partition] = 0
                mine.append(partition)
        return mine

    def _deal_near(
        self, assigned: Assigned, rest: list[PartitionId], room: dict[str, int], spare: int
    ) -> tuple[list[PartitionId], int]:
        """Assign to the least loaded member in a rack of the partition; on a tie by rack, then in member order."""
        in_rack: dict[str, list[tuple[int, int, str]]] = {}
        for order, (member_id, member) in enumerate(self.members.items()):
            if member.rack:
                in_rack.setdefault(member.rack, []).append((-room[member_id], order, member_id))
        for heap in in_rack.values():
            heapify(heap)
        far: list[PartitionId] = []
        for partition in rest:
            racks = self.topics[partition.topic_id].racks
            near = racks[partition.partition] if partition.partition < len(racks) else frozenset()
            heap = min((in_rack[rack] for rack in sorted(near) if rack in in_rack), key=_least_taken, default=[])
            if not heap or -heap[0][0] <= -(spare > 0):
                far.append(partition)
                continue
            taken, order, member_id = heap[0]
            spare -= room[member_id] <= 0
            room[member_id] -= 1
            heapreplace(heap, (taken + 1, order, member_id))
            assigned[member_id].append(partition)
        return far, spare

    def _deal_rest(self, assigned: Assigned, rest: list[PartitionId], room: dict[str, int], spare: int) -> None:
        """In turns, so that the partitions of one topic spread."""
        turns = deque(member_id for member_id in self.members if room[member_id] > 0)
        left = iter(rest)
        while turns:
            member_id = turns.popleft()
            partition = next(left, None)
            assert partition is not None, "the rooms of all are as many as the partitions"
            assigned[member_id].append(partition)
            room[member_id] -= 1
            if room[member_id] > 0:
                turns.append(member_id)
        places = (member_id for member_id in self.members if room[member_id] == 0)
        for partition in left:
            assert spare > 0, "the rooms of all are as many as the partitions"
            spare -= 1
            assigned[next(places)].append(partition)


class _Uneven:
    """Members read different things: deal to whom has least, then even out along who could take what from whom."""

    def __init__(self, topics: Topics, members: Subscribers, previous: Mapping[str, Partitions]) -> None:
        self.topics, self.members, self.previous = topics, members, previous
        self.readers = {topic_id: tuple(of) for topic_id, of in _readers(members).items()}
        self.has_racks = _with_racks(topics, members)
        self.held: dict[str, dict[TopicId, list[PartitionId]]] = {member_id: {} for member_id in members}
        self.load = dict.fromkeys(members, 0)
        self.order = {member_id: number for number, member_id in enumerate(members)}
        self.heaps: dict[tuple[str, ...], list[tuple[int, int, str]]] = {}

    def deal(self) -> Assigned:
        taken = self._keep()
        # The fewer can read a topic, the earlier it is assigned: the others can still make up for it.
        shapes = sorted(_by_name(self.topics, self.readers), key=lambda shape: len(self.readers[shape.topic_id]))
        for shape in shapes:
            for partition in _partitions(shape.topic_id, shape.partitions):
                if partition not in taken:
                    self._give(self._least(partition), partition)
        self._even_out()
        return {m: [p for mine in held.values() for p in mine] for m, held in self.held.items()}

    def _keep(self) -> set[PartitionId]:
        taken: set[PartitionId] = set()
        for member_id, member in self.members.items():
            reads = frozenset(member.topics)
            mine = self.previous.get(member_id, NO_PARTITIONS)
            for partition in sorted(mine, key=lambda p: (p.topic_id.int, p.partition)):
                topic_id = partition.topic_id
                if (
                    topic_id in reads
                    and partition.partition < self.topics[topic_id].partitions
                    and partition not in taken
                ):
                    taken.add(partition)
                    self._give(member_id, partition)
        return taken

    def _give(self, member_id: str, partition: PartitionId) -> None:
        self.held[member_id].setdefault(partition.topic_id, []).append(partition)
        self.load[member_id] += 1

    def _least(self, partition: PartitionId) -> str:
        readers, load = self.readers[partition.topic_id], self.load
        least = self._first(readers)
        if not self.has_racks:
            return least
        near = (m for m in readers if load[m] == load[least] and _is_near(self.topics, partition, self.members[m].rack))
        return next(near, least)

    def _first(self, readers: tuple[str, ...]) -> str:
        """The least loaded of these. Loads only grow meanwhile, so what a heap has of them is brought up on the way."""
        heap = self.heaps.get(readers)
        if heap is None:
            heap = self.heaps[readers] = [(self.load[m], self.order[m], m) for m in readers]
            heapify(heap)
        while heap[0][0] != self.load[heap[0][2]]:
            _, order, member_id = heap[0]
            heapreplace(heap, (self.load[member_id], order, member_id))
        return heap[0][2]

    def _even_out(self) -> None:
        """Move one partition at a time along the shortest way from a member to one that has two less.

        Each move lowers the sum of the squares of the loads, so it ends; and it ends where no such way is left.
        """
        balanced: set[str] = set()
        while left := [member_id for member_id in self.members if member_id not in balanced]:
            most = max(self.load[member_id] for member_id in left)
            givers = [member_id for member_id in left if self.load[member_id] == most]
            way = self._way(givers)
            if way:
                for giver, topic_id, taker in way:
                    self._move(giver, taker, topic_id)
                balanced.clear()
            else:
                balanced.update(givers)

    def _way(self, givers: list[str]) -> list[tuple[str, TopicId, str]]:
        """Steps (giver, topic, taker) from one of these, who have equally much, to the least loaded member in reach;
        none if it has not two less."""
        came: dict[str, tuple[str, TopicId]] = {}
        seen = set(givers)
        topics_seen: set[TopicId] = set()
        queue = deque(givers)
        best = givers[0]
        while queue:
            member_id = queue.popleft()
            for topic_id, mine in self.held[member_id].items():
                if not mine or topic_id in topics_seen:
                    continue
                topics_seen.add(topic_id)
                for taker in self.readers[topic_id]:
                    if taker not in seen:
                        seen.add(taker)
                        came[taker] = (member_id, topic_id)
                        queue.append(taker)
                        if self.load[taker] < self.load[best]:
                            best = taker
        if self.load[best] > self.load[givers[0]] - 2:
            return []
        steps: list[tuple[str, TopicId, str]] = []
        while best in came:
            giver, topic_id = came[best]
            steps.append((giver, topic_id, best))
            best = giver
        return steps

    def _move(self, giver: str, taker: str, topic_id: TopicId) -> None:
        mine = self.held[giver][topic_id]
        # What the taker had before comes back first; else the last that came.
        old = self.previous.get(taker, NO_PARTITIONS)
        number = next((n for n in range(len(mine) - 1, -1, -1) if mine[n] in old), len(mine) - 1)
        partition = mine.pop(number)
        self.load[giver] -= 1
        self._give(taker, partition)


ASSIGNORS: dict[str, Callable[[Topics, Subscribers, Mapping[str, Partitions]], Assigned]] = {
    "uniform": assign_uniform,
    "range": assign_range,
    "roundrobin": assign_roundrobin,
}
