"""Reassignments: add, move, drop, reorder, cancel, list. Pure.

    replicas before     [1, 2, 3]
    requested           [4, 3, 2]      target = (4, 3, 2), adding = (4,), removing = (1,)
    in progress         [1, 2, 3, 4]   the old list followed by what is added: the preferred leader stays for now
    complete            [4, 3, 2]      when every replica of the target is in sync; the epoch rises, 1 follows no more
    cancelled           [1, 2, 3]

A target with the same brokers in another order only changes the preferred leader, and completes at once. A new target
during a reassignment replaces the old one; it starts from the original replicas.
"""

from collections import Counter
from dataclasses import dataclass

from tidelog.metadata.decision import Context, Decision, Draft, Outcome, Outcomes, each
from tidelog.metadata.image import ClusterImage, Partition, Topic
from tidelog.metadata.partition_changes import build_change
from tidelog.metadata.placement import UsableBroker, alternate_racks
from tidelog.metadata.records import ChangePartition
from tidelog.metadata.topics import (
    INTERNAL_REPLICAS,
    INTERNAL_TOPICS,
    check_limits,
    check_replicas,
    find_topic,
    first_directory,
)
from tidelog.model.errors import (
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    NoReassignmentError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.maps import sorted_items

GROWN_PER_ROUND_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReassignmentTarget:
    topic: str
    partition: int
    replicas: tuple[int, ...] | None
    """The target replicas, preferred leader first; None cancels the reassignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterReassignments:
    partitions: tuple[ReassignmentTarget, ...]
    validate_only: bool = False
    keeps_factor: bool = False
    """Rejects a target with another replication factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignment:
    """A reassignment in progress."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    target: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]
    waiting_for: tuple[int, ...]
    """Replicas of the target that are not in sync yet."""


def alter_reassignments(image: ClusterImage, request: AlterReassignments, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)

    def reassign(item: ReassignmentTarget) -> None:
        record = _reassigned(draft.image, item, keeps_factor=request.keeps_factor)
        if record is not None:
            draft.add([record])

    outcomes = each(
        request.partitions,
        lambda item: f"{item.topic}-{item.partition}",
        reassign,
        key=lambda item: (item.topic, item.partition),
    )
    return draft.decide(outcomes)


def _reassigned(image: ClusterImage, item: ReassignmentTarget, *, keeps_factor: bool) -> ChangePartition | None:
    topic = find_topic(image, item.topic)
    partition = topic.partitions.get(item.partition)
    if partition is None:
        raise UnknownTopicOrPartitionError(f"topic {item.topic} has no partition {item.partition}")
    name = f"partition {item.partition} of {item.topic}"
    if item.replicas is None:
        if not partition.is_reassigning:
            raise NoReassignmentError(f"{name} is not being reassigned")
        return cancel(image, topic, item.partition, partition)
    check_replicas(image, item.replicas, name)
    if keeps_factor and len(item.replicas) != len(partition.original_replicas):
        raise InvalidReplicationFactorError(
            f"{name} has {len(partition.original_replicas)} replicas and the target has {len(item.replicas)}: "
            "the request does not allow another replication factor"
        )
    return retarget(image, topic, item.partition, partition, item.replicas)


def cancel(image: ClusterImage, topic: Topic, number: int, partition: Partition) -> ChangePartition | None:
    return retarget(image, topic, number, partition, partition.original_replicas)


def retarget(
    image: ClusterImage, topic: Topic, number: int, partition: Partition, target: tuple[int, ...]
) -> ChangePartition | None:
    """Returns the record that starts, replaces or (with the original replicas as target) ends a reassignment."""
    before = partition.original_replicas
    adding = tuple(broker for broker in target if broker not in before)
    removing = tuple(broker for broker in before if broker not in target)
    replicas = (*before, *adding)
    check_limits(image, [tuple(broker for broker in adding if broker not in partition.adding)])
    under_way = _narrowed(image, topic, number, partition, replicas)
    if adding or removing:
        after = under_way._replace(adding=adding, removing=removing, target=target)
        after = completed(after) or after
    else:
        order = {broker: position for position, broker in enumerate(target)}
        reordered = _with_replicas(under_way, tuple(sorted(before, key=order.__getitem__)))
        after = reordered._replace(adding=(), removing=(), target=())
    has_dropped = not set(partition.replicas) <= set(after.replicas)
    return build_change(image, topic.topic_id, number, partition, after, new_epoch=has_dropped)


def _narrowed(
    image: ClusterImage, topic: Topic, number: int, partition: Partition, replicas: tuple[int, ...]
) -> Partition:
    """Returns the partition on these replicas; those of an abandoned target leave. A replica with the data must
    remain."""
    after = _with_replicas(partition, replicas)
    holders = (*partition.isr, *partition.eligible)
    if holders and not (after.isr or after.eligible):
        raise InvalidReplicaAssignmentError(
            f"partition {number} of {topic.name}: only {list(holders)} have every record, and they would be dropped"
        )
    directories = tuple(
        partition.directory_of(broker) if broker in partition.replicas else first_directory(image, broker)
        for broker in replicas
    )
    return after._replace(directories=directories)


def _with_replicas(partition: Partition, replicas: tuple[int, ...]) -> Partition:
    return partition._replace(
        replicas=replicas,
        directories=tuple(partition.directory_of(broker) for broker in replicas),
        isr=tuple(broker for broker in replicas if broker in partition.isr),
        eligible=tuple(broker for broker in replicas if broker in partition.eligible),
        recovering=tuple(broker for broker in replicas if broker in partition.recovering),
    )


def completed(partition: Partition) -> Partition | None:
    """Returns the partition after its reassignment if every replica of the target is in sync, else None."""
    if not partition.target or not set(partition.target) <= set(partition.isr):
        return None
    return _with_replicas(partition, partition.target)._replace(adding=(), removing=(), target=())


def list_reassignments(
    image: ClusterImage, partitions: tuple[tuple[str, int], ...] | None = None
) -> tuple[Reassignment, ...]:
    """Lists the reassignments in progress, of all or of the named partitions."""
    names = None if partitions is None else set(partitions)
    found = []
    for topic_id, number, partition in image.indexed(image.reassigning):
        name = image.topics[topic_id].name
        if names is None or (name, number) in names:
            found.append(
                Reassignment(
                    topic=name,
                    partition=number,
                    replicas=partition.replicas,
                    target=partition.target,
                    adding=partition.adding,
                    removing=partition.removing,
                    waiting_for=tuple(b for b in partition.target if b not in partition.isr),
                )
            )
    return tuple(sorted(found, key=lambda item: (item.topic, item.partition)))


# The cluster's own topics grow with the cluster.


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowInternalTopics:
    """The controller's own: internal topics get up to three replicas once enough brokers are registered."""

    partitions_max: int = GROWN_PER_ROUND_MAX


def grow_internal_topics(image: ClusterImage, request: GrowInternalTopics, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    outcomes: list[Outcome] = []
    for name in sorted(INTERNAL_TOPICS):
        topic = image.topic_named(name)
        for number, partition in sorted_items(topic.partitions) if topic is not None else ():
            assert topic is not None
            if len(outcomes) == request.partitions_max:
                return draft.decide(Outcomes(items=tuple(outcomes)))
            more = _grown(draft.image, partition)
            if more is not None:
                record = retarget(draft.image, topic, number, partition, more)
                if record is not None:
                    draft.add([record])
                    outcomes.append(Outcome(f"{name}-{number}"))
    return draft.decide(Outcomes(items=tuple(outcomes)))


def _grown(image: ClusterImage, partition: Partition) -> tuple[int, ...] | None:
    """Returns the replicas followed by new ones: on other racks first, then on brokers with the fewest replicas."""
    missing = INTERNAL_REPLICAS - len(partition.replicas)
    if missing <= 0 or partition.is_reassigning:
        return None
    chosen = list(partition.replicas)
    usable = [
        UsableBroker(broker.broker, broker.rack, image.replica_count(broker.broker))
        for broker in image.live_brokers()
        if not broker.draining and broker.broker not in chosen
    ]
    for _ in range(min(missing, len(usable))):
        racks = Counter(image.brokers[broker].rack for broker in chosen)
        best = min(alternate_racks(usable), key=lambda broker: (racks[broker.rack], broker.replicas))
        usable.remove(best)
        chosen.append(best.broker)
    return tuple(chosen) if len(chosen) > len(partition.replicas) else None
