"""The changes between two images, and what they mean for one broker. Pure.

Images share unchanged parts, so identical objects are not compared. With the records in between, only the topics that
they name are compared. `apply_delta(older, delta)` is the newer image.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import UUID

from tidelog.metadata import records as r
from tidelog.metadata.image import Broker, ClusterImage, Credential, Partition, with_partitions
from tidelog.metadata.records import CreateTopic, Record, RemoveTopic
from tidelog.model.maps import Map, updated
from tidelog.model.steps import Steps, run_steps

PARTITIONS_PER_STEP = 1000
"""Partitions compared in one turn of the event loop."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDelta:
    """None as a value: removed. Everything is in the order of its keys."""

    removed_topics: tuple[UUID, ...] = ()
    created_topics: tuple[tuple[UUID, str], ...] = ()
    partitions: Mapping[UUID, Mapping[int, Partition]] = field(default_factory=dict)
    """topic -> new or changed partitions; all of a created topic."""
    brokers: Mapping[int, Broker | None] = field(default_factory=dict)
    features: Mapping[str, int | None] = field(default_factory=dict)
    configs: Mapping[tuple[str, str], Map[str, str] | None] = field(default_factory=dict)
    """Resource -> all of its configs."""
    quotas: Mapping[tuple[tuple[str, str | None], ...], Map[str, float] | None] = field(default_factory=dict)
    users: Mapping[tuple[str, str], Credential | None] = field(default_factory=dict)
    acls: Mapping[UUID, r.CreateAcl | None] = field(default_factory=dict)
    next_producer_id: int | None = None
    unknown: tuple[r.UnknownRecord, ...] | None = None
    unknown_fields: Mapping[tuple[Any, ...], r.UnknownFields | None] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self == ImageDelta()


def _changes(older: Map[K, V], newer: Map[K, V]) -> dict[K, V | None]:
    if older is newer:
        return {}
    found: dict[K, V | None] = {}
    for key, value in newer.items():
        before = older.get(key)
        if before is not value and before != value:
            found[key] = value
    if len(older) != len(newer) or found:
        found.update((key, None) for key in older if key not in newer)
    # Plain keys sort directly; tuples that contain None (default quotas) have no order.
    by_text = any(isinstance(key, tuple) for key in found)
    return dict(sorted(found.items(), key=lambda item: str(item[0]) if by_text else item[0]))  # type: ignore[arg-type,return-value]


def _touched_topics(records: Iterable[Record]) -> set[UUID]:
    kinds = (r.CreateTopic, r.RemoveTopic, r.CreatePartition, r.ChangePartition)
    return {record.topic_id for record in records if isinstance(record, kinds)}


def delta_between(older: ClusterImage, newer: ClusterImage, records: Iterable[Record] | None = None) -> ImageDelta:
    """Returns the changes from one image to a newer one; `records`, if passed, are exactly those in between."""
    return run_steps(delta_steps(older, newer, records))


def delta_steps(older: ClusterImage, newer: ClusterImage, records: Iterable[Record] | None = None) -> Steps[ImageDelta]:
    """`delta_between`, in steps of `PARTITIONS_PER_STEP`."""
    removed: list[UUID] = []
    created: list[tuple[UUID, str]] = []
    partitions: dict[UUID, dict[int, Partition]] = {}
    compared = 0
    if older.topics is not newer.topics:
        topics = _touched_topics(records) if records is not None else {*older.topics, *newer.topics}
        for topic_id in sorted(topics):
            before, after = older.topics.get(topic_id), newer.topics.get(topic_id)
            if after is before:
                continue
            if after is None:
                removed.append(topic_id)
                continue
            if before is None:
                created.append((topic_id, after.name))
            known: Map[int, Partition] = before.partitions if before is not None else Map()
            changed: dict[int, Partition] = {}
            for number, now in after.partitions.items():
                was = known.get(number)
                if was is not now and was != now:
                    changed[number] = now
                compared += 1
                if compared % PARTITIONS_PER_STEP == 0:
                    yield
            if changed:
                partitions[topic_id] = dict(sorted(changed.items()))
    return ImageDelta(
        removed_topics=tuple(removed),
        created_topics=tuple(created),
        partitions=partitions,
        brokers=_changes(older.brokers, newer.brokers),
        features=_changes(older.features, newer.features),
        configs=_changes(older.configs, newer.configs),
        quotas=_changes(older.quotas, newer.quotas),
        users=_changes(older.users, newer.users),
        acls=_changes(older.acls, newer.acls),
        next_producer_id=newer.next_producer_id if newer.next_producer_id != older.next_producer_id else None,
        unknown=newer.unknown if newer.unknown != older.unknown else None,
        unknown_fields=_changes(older.unknown_fields, newer.unknown_fields),
    )


def apply_delta(older: ClusterImage, delta: ImageDelta) -> ClusterImage:
    image = older
    for topic_id in delta.removed_topics:
        image = image.apply(RemoveTopic(topic_id=topic_id))
    for topic_id, name in delta.created_topics:
        image = image.apply(CreateTopic(topic_id=topic_id, name=name))
    if delta.partitions:
        image = with_partitions(image, delta.partitions)
    # From the older image, not from this one: removing a topic has removed its configs, and a topic of the same name
    # may have the same ones again.
    return replace(
        image,
        brokers=updated(older.brokers, delta.brokers.items()),
        features=updated(older.features, delta.features.items()),
        configs=updated(older.configs, delta.configs.items()),
        quotas=updated(older.quotas, delta.quotas.items()),
        users=updated(older.users, delta.users.items()),
        acls=updated(older.acls, delta.acls.items()),
        next_producer_id=older.next_producer_id if delta.next_producer_id is None else delta.next_producer_id,
        unknown=older.unknown if delta.unknown is None else delta.unknown,
        unknown_fields=updated(older.unknown_fields, delta.unknown_fields.items()),
    )


@dataclass(frozen=True, slots=True)
class LocalPartition:
    topic_id: UUID
    number: int
    partition: Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDelta:
    """What one broker has to do."""

    led: tuple[LocalPartition, ...] = ()
    """Led by this broker; new or changed."""
    followed: tuple[LocalPartition, ...] = ()
    leaderless: tuple[LocalPartition, ...] = ()
    dropped: tuple[tuple[UUID, int], ...] = ()
    """Replicas to delete: the topic is gone, or a reassignment has ended."""


def for_broker(delta: ImageDelta, older: ClusterImage, broker: int) -> BrokerDelta:
    return run_steps(for_broker_steps(delta, older, broker))


def for_broker_steps(delta: ImageDelta, older: ClusterImage, broker: int) -> Steps[BrokerDelta]:
    """`for_broker`, in steps of `PARTITIONS_PER_STEP`."""
    compared = 0
    led: list[LocalPartition] = []
    followed: list[LocalPartition] = []
    leaderless: list[LocalPartition] = []
    dropped: list[tuple[UUID, int]] = []
    for topic_id in delta.removed_topics:
        for number, partition in sorted(older.topics[topic_id].partitions.items()):
            if broker in partition.replicas:
                dropped.append((topic_id, number))
            compared += 1
            if compared % PARTITIONS_PER_STEP == 0:
                yield
    for topic_id, partitions in delta.partitions.items():
        for number, partition in partitions.items():
            compared += 1
            if compared % PARTITIONS_PER_STEP == 0:
                yield
            if broker in partition.replicas:
                here = LocalPartition(topic_id, number, partition)
                where = led if partition.leader == broker else followed if partition.leader >= 0 else leaderless
                where.append(here)
            else:
                before = older.partition(topic_id, number)
                if before is not None and broker in before.replicas:
                    dropped.append((topic_id, number))
    return BrokerDelta(
        led=tuple(led), followed=tuple(followed), leaderless=tuple(leaderless), dropped=tuple(sorted(dropped))
    )
