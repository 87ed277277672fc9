"""The state of the cluster as an immutable value: the result of the records so far. Pure.

`ClusterImage.apply(record)` returns a new image that shares everything unchanged; readers need no locks. The
controller's speculative state is a newer image, dropped when leadership is lost. Two images give a delta
(`metadata.delta`); an image is encoded as the records of a snapshot (`metadata.snapshot`).

Invariants (`validate`), for every sequence of records that the controller decided:
- the replicas of a partition are distinct; its ISR and eligible leaders are disjoint subsets of them;
- recovering replicas are among the replicas, and not in the ISR;
- the leader is in the ISR, or there is none (after an unclean election the ISR is the leader alone);
- a topic's name and id refer to each other; the indexes (`hosted` and those below it) mirror the partitions;
- during a reassignment, `replicas` is the old list followed by `adding`;
- an in-sync broker is live, or is leaving and was in sync before it was marked; a fenced one is in no ISR;
- epochs of a partition and of a broker only rise, and a broker that joins an ISR or begins to lead is live (checked
  between images, by the tests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from tidelog.metadata import records as r
from tidelog.metadata.records import NO_LEADER, Record
from tidelog.metadata.unknown_fields import with_unknown_fields
from tidelog.model.maps import Map, sorted_items, updated, without

NIL = UUID(int=0)


@dataclass(frozen=True, slots=True)
class Broker:
    broker: int
    broker_epoch: int
    incarnation: UUID
    endpoints: tuple[tuple[str, str, str, int], ...]
    rack: str | None
    directories: tuple[UUID, ...]
    features: tuple[tuple[str, int, int], ...]
    fenced: bool = True
    in_controlled_shutdown: bool = False
    draining: bool = False
    offline: tuple[UUID, ...] = ()
    """Directories that failed or stall."""
    full: tuple[UUID, ...] = ()
    """Directories without space for appends: readable."""

    @property
    def is_live(self) -> bool:
        """May join in-sync sets and lead."""
        return not self.fenced and not self.in_controlled_shutdown

    @property
    def is_leaving(self) -> bool:
        """Marked to be fenced: it joins no ISR and leads nothing new, and is fenced once it has left its ISRs."""
        return self.in_controlled_shutdown and not self.fenced


class Partition(NamedTuple):
    """A named tuple, not a frozen dataclass: three times as fast to create, and there are 100,000 of them."""

    replicas: tuple[int, ...]
    directories: tuple[UUID, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    eligible: tuple[int, ...] = ()
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    start_offset: int = 0
    target: tuple[int, ...] = ()
    recovering: tuple[int, ...] = ()
    unclean_epoch: int = -1

    @property
    def is_reassigning(self) -> bool:
        return bool(self.adding or self.removing)

    @property
    def original_replicas(self) -> tuple[int, ...]:
        """The replicas without those that a reassignment is adding."""
        if not self.adding:
            return self.replicas
        return tuple(broker for broker in self.replicas if broker not in self.adding)

    @property
    def preferred(self) -> int:
        return self.replicas[0]

    def directory_of(self, broker: int) -> UUID:
        return self.directories[self.replicas.index(broker)] if broker in self.replicas else NIL

    def led(self, leader: int, *, isr: tuple[int, ...], eligible: tuple[int, ...]) -> Partition:
        """Like `_replace`, and faster: fencing a broker does this for thousands."""
        return Partition(
            self.replicas,
            self.directories,
            isr,
            leader,
            self.leader_epoch,
            self.partition_epoch,
            eligible,
            self.adding,
            self.removing,
            self.start_offset,
            self.target,
            self.recovering,
            self.unclean_epoch,
        )

    def validate(self) -> None:
        replicas = set(self.replicas)
        assert len(replicas) == len(self.replicas) == len(self.directories) > 0, "replicas are distinct"
        assert len(set(self.isr)) == len(self.isr), "the ISR names each replica once"
        assert set(self.isr) <= replicas, "the ISR is within the replicas"
        assert set(self.eligible) <= replicas - set(self.isr), "eligible leaders are outside the ISR"
        assert set(self.recovering) <= replicas - set(self.isr), "recovering replicas are outside the ISR"
        assert self.leader == NO_LEADER or self.leader in self.isr, "the leader is in sync"
        assert set(self.adding) | set(self.removing) <= replicas, "adding and removing replicas are among the replicas"
        assert not set(self.adding) & set(self.removing), "a replica is not added and removed at once"
        assert bool(self.target) == self.is_reassigning, "a reassignment has a target"
        if self.target:
            assert set(self.target) == replicas - set(self.removing), (
                "the target is the replicas without those that are removed"
            )


_partition_fields = attrgetter(*Partition._fields)
_broker_fields = attrgetter("broker", "broker_epoch", "incarnation", "endpoints", "rack", "directories", "features")


@dataclass(frozen=True, slots=True)
class Topic:
    topic_id: UUID
    name: str
    partitions: Map[int, Partition]


@dataclass(frozen=True, slots=True)
class Credential:
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


@dataclass(frozen=True, slots=True)
class ClusterImage:
    features: Map[str, int] = field(default_factory=Map)
    brokers: Map[int, Broker] = field(default_factory=Map)
    topics: Map[UUID, Topic] = field(default_factory=Map)
    topic_ids: Map[str, UUID] = field(default_factory=Map)
    configs: Map[tuple[str, str], Map[str, str]] = field(default_factory=Map)
    """(`cluster` | `broker` | `topic`, name) -> what was set."""
    quotas: Map[tuple[tuple[str, str | None], ...], Map[str, float]] = field(default_factory=Map)
    users: Map[tuple[str, str], Credential] = field(default_factory=Map)
    """(user, mechanism)."""
    acls: Map[UUID, r.CreateAcl] = field(default_factory=Map)
    next_producer_id: int = 0
    hosted: Map[int, Map[UUID, int]] = field(default_factory=Map)
    """broker -> topic -> bit mask of its partitions: finds a broker's partitions at once."""
    reassigning: Map[UUID, int] = field(default_factory=Map)
    """topic -> bit mask of the partitions that are being reassigned."""
    unbalanced: Map[UUID, int] = field(default_factory=Map)
    """topic -> bit mask of the partitions whose leader is not the preferred replica, including leaderless ones."""
    weakened: Map[UUID, int] = field(default_factory=Map)
    """topic -> bit mask of the partitions with eligible leaders outside the ISR."""
    preferred: Map[int, int] = field(default_factory=Map)
    """broker -> number of partitions whose preferred leader it is."""
    replica_counts: Map[int, int] = field(default_factory=Map)
    """broker -> number of its replicas."""
    folded: Map[str, str] = field(default_factory=Map)
    """Topic names with a dot or an underscore: with dots written as underscores -> the name."""
    unknown: tuple[r.UnknownRecord, ...] = ()
    """Records of newer versions, kept for the snapshot."""
    unknown_fields: Map[tuple[Any, ...], r.UnknownFields] = field(default_factory=Map)
    """Fields of newer versions (`metadata.unknown_fields`)."""

    def apply(self, record: Record) -> ClusterImage:
        after = _APPLY[type(record)](self, record)
        if (record.extra or self.unknown_fields) and type(record) not in _PARTITION_RECORDS:
            return replace(after, unknown_fields=with_unknown_fields(self, self.unknown_fields, record))
        return after

    def apply_all(self, records: Iterable[Record]) -> ClusterImage:
        """Like `apply` one by one, with the partition records of a topic batched."""
        image = self
        pending: list[Record] = []
        for record in records:
            if type(record) in _PARTITION_RECORDS:
                pending.append(record)
                continue
            if pending:
                image = _apply_partitions(image, pending)
                pending = []
            image = image.apply(record)
        return _apply_partitions(image, pending) if pending else image

    def topic_named(self, name: str) -> Topic | None:
        topic_id = self.topic_ids.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def partition(self, topic_id: UUID, partition: int) -> Partition | None:
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.partitions.get(partition)

    def partitions_on(self, broker: int) -> Iterator[tuple[UUID, int, Partition]]:
        """Yields every partition with a replica on this broker, ordered by topic id and number."""
        return self.indexed(self.hosted.get(broker, Map()))

    def indexed(self, index: Map[UUID, int]) -> Iterator[tuple[UUID, int, Partition]]:
        """Yields the partitions of an index, ordered by topic id and number."""
        for topic_id, mask in sorted_items(index):
            partitions = self.topics[topic_id].partitions
            for number in _bits(mask):
                yield topic_id, number, partitions[number]

    def replica_count(self, broker: int) -> int:
        return self.replica_counts.get(broker, 0)

    def config(self, resource_type: str, resource: str) -> Map[str, str]:
        return self.configs.get((resource_type, resource), Map())

    def live_brokers(self) -> list[Broker]:
        return [broker for _, broker in sorted_items(self.brokers) if broker.is_live]

    def validate(self) -> None:
        """Checks the invariants above; for tests."""
        hosted: dict[tuple[int, UUID], int] = {}
        preferred: dict[int, int] = {}
        counts: dict[int, int] = {}
        indexes: dict[str, dict[UUID, int]] = {name: {} for name in _INDEXES}
        names = {topic.name: topic.topic_id for topic in self.topics.values()}
        assert names == dict(self.topic_ids), "names and ids point at each other"
        for topic_id, topic in self.topics.items():
            assert sorted(topic.partitions) == list(range(len(topic.partitions))), "partitions are numbered from 0"
            for number, partition in topic.partitions.items():
                partition.validate()
                for broker in partition.replicas:
                    assert broker in self.brokers, "replicas are on registered brokers"
                    hosted[broker, topic_id] = hosted.get((broker, topic_id), 0) | 1 << number
                    counts[broker] = counts.get(broker, 0) + 1
                for broker in partition.isr:
                    assert not self.brokers[broker].fenced, "an in-sync broker is live or leaving"
                preferred[partition.preferred] = preferred.get(partition.preferred, 0) + 1
                for name, belongs in _INDEXES.items():
                    if belongs(partition):
                        indexes[name][topic_id] = indexes[name].get(topic_id, 0) | 1 << number
        mirrored = {(broker, topic): mask for broker, by in self.hosted.items() for topic, mask in by.items()}
        assert mirrored == hosted, "hosted mirrors the replicas"
        assert dict(self.preferred) == preferred, "preferred mirrors the first replicas"
        assert dict(self.replica_counts) == counts, "replica_counts mirrors the replicas"
        folded = {name.replace(".", "_"): name for name in names if folds(name)}
        assert dict(self.folded) == folded, "folded mirrors the names"
        for name, masks in indexes.items():
            assert dict(getattr(self, name)) == masks, f"{name} mirrors the partitions"


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# Brokers.


def _register(image: ClusterImage, record: r.RegisterBroker) -> ClusterImage:
    known = image.brokers.get(record.broker)
    broker = replace(Broker(*_broker_fields(record)), draining=known is not None and known.draining)
    return replace(image, brokers=image.brokers.set(record.broker, broker))


def _unregister(image: ClusterImage, record: r.UnregisterBroker) -> ClusterImage:
    return replace(image, brokers=image.brokers.delete(record.broker))


def _change_broker(image: ClusterImage, record: r.ChangeBroker) -> ClusterImage:
    broker = image.brokers[record.broker]
    names = ("fenced", "in_controlled_shutdown", "draining", "offline", "full")
    changes = {name: getattr(record, name) for name in names if getattr(record, name) is not None}
    return replace(image, brokers=image.brokers.set(record.broker, replace(broker, **changes)))


# Topics and partitions.


def folds(name: str) -> bool:
    """Whether the name may collide with another one when dots are written as underscores."""
    return "." in name or "_" in name


def _create_topic(image: ClusterImage, record: r.CreateTopic) -> ClusterImage:
    name = record.name
    return replace(
        image,
        topics=image.topics.set(record.topic_id, Topic(record.topic_id, name, Map())),
        topic_ids=image.topic_ids.set(name, record.topic_id),
        folded=image.folded.set(name.replace(".", "_"), name) if folds(name) else image.folded,
    )


def _remove_topic(image: ClusterImage, record: r.RemoveTopic) -> ClusterImage:
    topic = image.topics[record.topic_id]
    hosted = image.hosted
    for broker in sorted({broker for p in topic.partitions.values() for broker in p.replicas}):
        by_topic = hosted[broker].delete(record.topic_id)
        hosted = hosted.set(broker, by_topic) if by_topic else hosted.delete(broker)
    preferred = Counter(partition.preferred for partition in topic.partitions.values())
    replicas = Counter(broker for partition in topic.partitions.values() for broker in partition.replicas)
    return replace(
        image,
        topics=image.topics.delete(record.topic_id),
        topic_ids=image.topic_ids.delete(topic.name),
        configs=without(image.configs, ("topic", topic.name)),
        hosted=hosted,
        preferred=_counted(image.preferred, preferred, -1),
        replica_counts=_counted(image.replica_counts, replicas, -1),
        folded=without(image.folded, topic.name.replace(".", "_")) if folds(topic.name) else image.folded,
        reassigning=without(image.reassigning, record.topic_id),
        unbalanced=without(image.unbalanced, record.topic_id),
        weakened=without(image.weakened, record.topic_id),
    )


def _counted(counts: Map[int, int], changes: Mapping[int, int], sign: int = 1) -> Map[int, int]:
    return updated(counts, [(key, counts.get(key, 0) + sign * n or None) for key, n in changes.items()])


def _created(record: r.CreatePartition) -> Partition:
    # Equal tuples are shared: 100,000 partitions must stay under 1 KiB each.
    replicas, directories, isr, *rest = _partition_fields(record)
    return Partition(replicas, directories, replicas if isr == replicas else isr, *rest)


def _changed(before: Partition, record: r.ChangePartition) -> Partition:
    replicas = before.replicas if record.replicas is None else record.replicas
    isr = before.isr if record.isr is None else record.isr
    directories = before.directories if record.directories is None else record.directories
    if record.replicas is not None and record.directories is None:
        directories = tuple(before.directory_of(broker) for broker in replicas)
    return Partition(
        replicas,
        directories,
        replicas if isr == replicas else isr,
        before.leader if record.leader is None else record.leader,
        before.leader_epoch if record.leader_epoch is None else record.leader_epoch,
        before.partition_epoch + 1,
        before.eligible if record.eligible is None else record.eligible,
        before.adding if record.adding is None else record.adding,
        before.removing if record.removing is None else record.removing,
        before.start_offset if record.start_offset is None else record.start_offset,
        before.target if record.target is None else record.target,
        before.recovering if record.recovering is None else record.recovering,
        before.unclean_epoch if record.unclean_epoch is None else record.unclean_epoch,
    )


def _apply_partitions(image: ClusterImage, pending: list[Record]) -> ClusterImage:
    """Applies many partition records: each topic's map, and each index, is opened once."""
    changes: dict[UUID, dict[int, Partition]] = {}
    has_extras = bool(image.unknown_fields)
    for record in pending:
        assert isinstance(record, r.CreatePartition | r.ChangePartition)
        topic_id, number = record.topic_id, record.partition
        of_topic = changes.get(topic_id)
        if of_topic is None:
            of_topic = changes[topic_id] = {}
        before = of_topic.get(number) or image.topics[topic_id].partitions.get(number)
        if isinstance(record, r.CreatePartition):
            assert before is None, "a partition is created once"
            of_topic[number] = _created(record)
        else:
            assert before is not None, "only what exists is changed"
            of_topic[number] = _changed(before, record)
        has_extras = has_extras or bool(record.extra)
    after = with_partitions(image, changes)
    if has_extras:
        unknown_fields = image.unknown_fields
        for record in pending:
            unknown_fields = with_unknown_fields(image, unknown_fields, record)
        after = replace(after, unknown_fields=unknown_fields)
    return after


def with_partitions(image: ClusterImage, changes: Mapping[UUID, Mapping[int, Partition]]) -> ClusterImage:
    """Returns the image with these partitions replaced, and the indexes updated. The topics exist."""
    hosted_masks: dict[tuple[int, UUID], list[int]] = {}
    index_masks: dict[str, dict[UUID, list[int]]] = {name: {} for name in _INDEXES}
    preferred: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    topics = image.topics.mutate()
    for topic_id, partitions in changes.items():
        topic = image.topics[topic_id]
        for number, after in partitions.items():
            before = topic.partitions.get(number)
            if before is None or before.replicas is not after.replicas:
                _note_replicas(hosted_masks, replicas, topic_id, number, before, after)
                if before is not None:
                    preferred[before.preferred] -= 1
                preferred[after.preferred] += 1
            belonged, belongs = () if before is None else _indexes_of(before), _indexes_of(after)
            if belonged != belongs:
                for name in _INDEXES:
                    if (name in belonged) != (name in belongs):
                        _note(index_masks[name], topic_id, number, on=name in belongs)
        topics[topic_id] = replace(topic, partitions=updated(topic.partitions, partitions.items()))
    hosted = image.hosted
    for (broker, topic_id), masks in hosted_masks.items():
        by = _masked(hosted.get(broker, Map()), topic_id, masks)
        hosted = hosted.set(broker, by) if by else without(hosted, broker)
    indexes: dict[str, Any] = {}
    for name, of_topics in index_masks.items():
        index = getattr(image, name)
        for topic_id, masks in of_topics.items():
            index = _masked(index, topic_id, masks)
        indexes[name] = index
    return replace(
        image,
        topics=topics.finish(),
        hosted=hosted,
        preferred=_counted(image.preferred, preferred),
        replica_counts=_counted(image.replica_counts, replicas),
        **indexes,
    )


def _note_replicas(
    masks: dict[tuple[int, UUID], list[int]],
    counts: Counter[int],
    topic_id: UUID,
    number: int,
    before: Partition | None,
    after: Partition,
) -> None:
    had = before.replicas if before is not None else ()
    for broker in had:
        if broker not in after.replicas:
            _note(masks, (broker, topic_id), number, on=False)
            counts[broker] -= 1
    for broker in after.replicas:
        if broker not in had:
            _note(masks, (broker, topic_id), number, on=True)
            counts[broker] += 1


def _note(masks: dict[Any, list[int]], key: object, number: int, *, on: bool) -> None:
    pair = masks.get(key)
    if pair is None:
        pair = masks[key] = [0, 0]
    pair[0 if on else 1] |= 1 << number


def _masked(values: Map[Any, int], key: object, masks: list[int]) -> Map[Any, int]:
    """Sets the bits of `masks[0]` and clears those of `masks[1]`."""
    before = values.get(key, 0)
    after = before & ~masks[1] | masks[0]
    if after == before:
        return values
    return values.set(key, after) if after else values.delete(key)


def _one_partition(image: ClusterImage, record: Record) -> ClusterImage:
    return _apply_partitions(image, [record])


# Configs, quotas, users, ACLs, producer ids, features.


def _set_config(image: ClusterImage, record: r.SetConfig) -> ClusterImage:
    resource = (record.resource_type, record.resource)
    values = updated(image.configs.get(resource, Map()), [(record.key, record.value)])
    return replace(image, configs=updated(image.configs, [(resource, values if values else None)]))


def _set_quota(image: ClusterImage, record: r.SetQuota) -> ClusterImage:
    values = updated(image.quotas.get(record.entity, Map()), [(record.key, record.value)])
    return replace(image, quotas=updated(image.quotas, [(record.entity, values if values else None)]))


def _set_user(image: ClusterImage, record: r.SetUser) -> ClusterImage:
    credential = Credential(record.salt, record.stored_key, record.server_key, record.iterations)
    key = (record.user, record.mechanism)
    return replace(image, users=updated(image.users, [(key, credential if record.salt else None)]))


def _create_acl(image: ClusterImage, record: r.CreateAcl) -> ClusterImage:
    return replace(image, acls=image.acls.set(record.acl_id, record))


def _remove_acl(image: ClusterImage, record: r.RemoveAcl) -> ClusterImage:
    return replace(image, acls=updated(image.acls, [(record.acl_id, None)]))


def _allocate(image: ClusterImage, record: r.AllocateProducerIds) -> ClusterImage:
    return replace(image, next_producer_id=record.next_producer_id)


def _feature(image: ClusterImage, record: r.FeatureLevel) -> ClusterImage:
    return replace(image, features=updated(image.features, [(record.name, record.level or None)]))


def _unknown(image: ClusterImage, record: r.UnknownRecord) -> ClusterImage:
    return replace(image, unknown=(*image.unknown, record))


def _same(image: ClusterImage, _record: Record) -> ClusterImage:
    return image


_INDEXES: dict[str, Callable[[Partition], bool]] = {
    "reassigning": lambda partition: bool(partition.adding or partition.removing),
    "unbalanced": lambda partition: partition.leader != partition.replicas[0],
    "weakened": lambda partition: bool(partition.eligible),
}
_NAMES = {
    (reassigns, is_unbalanced, is_weakened): tuple(
        name for name, belongs in zip(_INDEXES, (reassigns, is_unbalanced, is_weakened), strict=True) if belongs
    )
    for reassigns in (False, True)
    for is_unbalanced in (False, True)
    for is_weakened in (False, True)
}


def _indexes_of(partition: Partition) -> tuple[str, ...]:
    """Returns which of `_INDEXES` the partition belongs to: the same conditions, faster."""
    return _NAMES[
        bool(partition.adding or partition.removing),
        partition.leader != partition.replicas[0],
        bool(partition.eligible),
    ]


_PARTITION_RECORDS = frozenset({r.CreatePartition, r.ChangePartition})
_APPLY: dict[type[Record], Callable[[ClusterImage, Any], ClusterImage]] = {
    r.NoOp: _same,
    r.BeginDecision: _same,
    r.EndDecision: _same,
    r.AbortDecision: _same,
    r.FeatureLevel: _feature,
    r.RegisterBroker: _register,
    r.UnregisterBroker: _unregister,
    r.ChangeBroker: _change_broker,
    r.CreateTopic: _create_topic,
    r.RemoveTopic: _remove_topic,
    r.CreatePartition: _one_partition,
    r.ChangePartition: _one_partition,
    r.SetConfig: _set_config,
    r.SetQuota: _set_quota,
    r.SetUser: _set_user,
    r.CreateAcl: _create_acl,
    r.RemoveAcl: _remove_acl,
    r.AllocateProducerIds: _allocate,
    r.UnknownRecord: _unknown,
}
