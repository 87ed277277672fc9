"""What the members of a group read, as topics of one image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgpack

from tidelog.coordinator.patterns import compile_pattern
from tidelog.coordinator.records import MemberValue
from tidelog.coordinator.requests import TopicShape, TopicsView
from tidelog.model.ids import TopicId


@dataclass(slots=True)
class Resolver:
    """The topics behind subscriptions, in one view; equal subscriptions are looked up once."""

    view: TopicsView
    topics: dict[TopicId, TopicShape] = field(default_factory=dict)
    """All that somebody reads."""
    _known: dict[tuple[tuple[str, ...], str], tuple[TopicId, ...]] = field(default_factory=dict)
    _last: tuple[tuple[str, ...], str, tuple[TopicId, ...]] = ((), "", ())
    """What was asked for last, and found: most members of a group ask for the same."""

    def of(self, member: MemberValue) -> tuple[TopicId, ...]:
        """Ordered by the topics' names. Names without a topic stand for nothing until there is one."""
        topics, pattern, found = self._last
        if member.topics == topics and member.pattern == pattern:
            return found
        asked = (member.topics, member.pattern)
        known = self._known.get(asked)
        if known is None:
            known = self._known[asked] = self._find(*asked)
        self._last = (*asked, known)
        return known

    def _find(self, names: tuple[str, ...], pattern: str) -> tuple[TopicId, ...]:
        wanted = set(names)
        if pattern:
            matches = compile_pattern(pattern)
            wanted.update(name for name in self.view.names() if matches(name))
        ids: list[TopicId] = []
        for name in sorted(wanted):
            shape = self.view.by_name(name)
            if shape is not None:
                self.topics[shape.topic_id] = shape
                ids.append(shape.topic_id)
        return tuple(ids)


def digest(topics: Iterable[TopicShape], *, with_racks: bool) -> bytes:
    """Tells apart what members read before and after a change of the image: another topic, size, or place.

    Places matter only to a group whose members have racks."""
    rows = [
        [
            shape.name,
            shape.topic_id.bytes,
            shape.partitions,
            [sorted(racks) for racks in shape.racks] if with_racks else [],
        ]
        for shape in topics
    ]
    rows.sort(key=lambda row: str(row[0]))
    return hashlib.blake2b(msgpack.packb(rows), digest_size=8).digest()


def group_digest(members: Mapping[str, MemberValue], resolver: Resolver) -> bytes:
    """`resolver` has been asked about all of the members, or is now."""
    for member in members.values():
        resolver.of(member)
    return digest(resolver.topics.values(), with_racks=any(member.rack for member in members.values()))
