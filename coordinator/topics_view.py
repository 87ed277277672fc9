"""Topics as the coordinator's pure core sees them, and an index of groups by subscribed topic. Pure.

A view is cheap: shapes are computed on demand, sorted names once per set of topics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tidelog.coordinator.patterns import compile_pattern
from tidelog.coordinator.requests import TopicShape
from tidelog.coordinator.state import Group
from tidelog.metadata.delta import ImageDelta
from tidelog.metadata.image import ClusterImage, Partition, Topic
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.ids import TopicId


class ImageTopics:
    """`requests.TopicsView` of one image."""

    __slots__ = ("_has_racks", "_names", "_shapes", "image")

    def __init__(self, image: ClusterImage, older: ImageTopics | None = None) -> None:
        """`older` is a view of a former image; unchanged names are reused from it."""
        self.image = image
        self._has_racks = any(broker.rack for broker in image.brokers.values())
        is_same = older is not None and older.image.topic_ids is image.topic_ids
        self._names: tuple[str, ...] | None = older._names if older is not None and is_same else None
        self._shapes: dict[TopicId, TopicShape] = {}

    def by_name(self, name: str) -> TopicShape | None:
        topic = self.image.topic_named(name)
        return None if topic is None else self._shape(topic)

    def by_id(self, topic_id: TopicId) -> TopicShape | None:
        topic = self.image.topics.get(topic_id)
        return None if topic is None else self._shape(topic)

    def names(self) -> Iterable[str]:
        if self._names is None:
            self._names = tuple(sorted(name for name in self.image.topic_ids if name not in INTERNAL_TOPICS))
        return self._names

    def _shape(self, topic: Topic) -> TopicShape:
        topic_id = TopicId(topic.topic_id)
        found = self._shapes.get(topic_id)
        if found is None:
            racks = self._racks(topic) if self._has_racks else ()
            found = self._shapes[topic_id] = TopicShape(topic_id, topic.name, len(topic.partitions), racks)
        return found

    def _racks(self, topic: Topic) -> tuple[frozenset[str], ...]:
        racks = {number: broker.rack for number, broker in self.image.brokers.items() if broker.rack}
        return tuple(
            frozenset(racks[broker] for broker in topic.partitions[number].replicas if broker in racks)
            for number in range(len(topic.partitions))
        )


def reshaped_topics(delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> set[str]:
    """Return the names of topics that were created, deleted or resized; if brokers have racks, also of those with other
    replicas."""
    has_racks = any(broker.rack for broker in newer.brokers.values())
    names = {older.topics[topic_id].name for topic_id in delta.removed_topics}
    names.update(name for _, name in delta.created_topics)
    for topic_id, changed in delta.partitions.items():
        before, after = older.topics.get(topic_id), newer.topics.get(topic_id)
        if before is None or after is None:
            continue
        if len(before.partitions) != len(after.partitions) or (has_racks and _has_moved(before, changed)):
            names.add(after.name)
    return names


def _has_moved(before: Topic, changed: Mapping[int, Partition]) -> bool:
    return any(before.partitions[number].replicas != partition.replicas for number, partition in changed.items())


class SubscriptionIndex:
    """Finds the groups of a shard by topic. A topic without subscribers costs one lookup and one match per pattern."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        """group -> (names, patterns)."""
        self._by_name: dict[str, dict[str, None]] = {}
        self._by_pattern: dict[str, dict[str, None]] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the groups with a subscription, in insertion order."""
        return iter(self._groups)

    def put(self, group_id: str, group: Group | None) -> None:
        """Set the subscriptions of a group; None removes it."""
        members = () if group is None else group.members.values()
        names = frozenset(name for member in members for name in member.topics)
        patterns = frozenset(member.pattern for member in members if member.pattern)
        before = self._groups.pop(group_id, (frozenset(), frozenset()))
        if names or patterns:
            self._groups[group_id] = names, patterns
        _move(self._by_name, group_id, before[0], names)
        _move(self._by_pattern, group_id, before[1], patterns)

    def validate(self, groups: Mapping[str, Group]) -> None:
        """Assert that it has the subscriptions of these groups, and no others."""
        members = [(group_id, member) for group_id, group in groups.items() for member in group.members.values()]
        read = {(topic, group_id) for group_id, member in members for topic in member.topics}
        matched = {(member.pattern, group_id) for group_id, member in members if member.pattern}
        for indexed, wanted in ((self._by_name, read), (self._by_pattern, matched)):
            known = {(key, group_id) for key, found in indexed.items() for group_id in found}
            assert known == wanted, f"{sorted(known ^ wanted)} are indexed or read, not both"
        assert self._groups.keys() == {group_id for _, group_id in read | matched}, "groups with a subscription"

    def concerned(self, topics: Iterable[str]) -> list[str]:
        """Return the groups subscribed to one of these topics, each once, sorted."""
        found: set[str] = set()
        names = list(topics)
        for name in names:
            found.update(self._by_name.get(name, ()))
        for pattern, groups in self._by_pattern.items():
            if not found.issuperset(groups) and _matches(pattern, names):
                found.update(groups)
        return sorted(found)


def _matches(pattern: str, names: list[str]) -> bool:
    matches = compile_pattern(pattern)
    return any(matches(name) for name in names)


def _move(index: dict[str, dict[str, None]], group_id: str, before: frozenset[str], after: frozenset[str]) -> None:
    for key in sorted(before - after):
        groups = index[key]
        del groups[group_id]
        if not groups:
            del index[key]
    for key in sorted(after - before):
        index.setdefault(key, {})[group_id] = None
