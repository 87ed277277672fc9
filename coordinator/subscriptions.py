"""Resolves the subscriptions of a group's members to the topics of one image. Pure."""

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
    """Resolves subscriptions in one view; equal subscriptions are resolved once."""

    view: TopicsView
    topics: dict[TopicId, TopicShape] = field(default_factory=dict)
    """All topics resolved so far."""
    _known: dict[tuple[tuple[str, ...], str], tuple[TopicId, ...]] = field(default_factory=dict)
    _last: tuple[tuple[str, ...], str, tuple[TopicId, ...]] = ((), "", ())
    """The last subscription and its topics: most members of a group have the same."""

    def of(self, member: MemberValue) -> tuple[TopicId, ...]:
        """Return the member's topics, ordered by name. Names without a topic are ignored until it exists."""
        topics, pattern, topic_ids = self._last
        if member.topics == topics and member.pattern == pattern:
            return topic_ids
        key = (member.topics, member.pattern)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._find(*key)
        self._last = (*key, known)
        return known

    def _find(self, names: tuple[str, ...], pattern: str) -> tuple[TopicId, ...]:
        topic_names = set(names)
        if pattern:
            matches = compile_pattern(pattern)
            topic_names.update(name for name in self.view.names() if matches(name))
        ids: list[TopicId] = []
        for name in sorted(topic_names):
            shape = self.view.by_name(name)
            if shape is not None:
                self.topics[shape.topic_id] = shape
                ids.append(shape.topic_id)
        return tuple(ids)


def digest(topics: Iterable[TopicShape], *, with_racks: bool) -> bytes:
    """Return a digest that changes with the topics, their sizes or the racks of their replicas.

    Racks matter only to a group whose members have racks."""
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
    """Return the digest of all topics of these members; resolves those that are not resolved yet."""
    for member in members.values():
        resolver.of(member)
    return digest(resolver.topics.values(), with_racks=any(member.rack for member in members.values()))
