"""Builds changes of partitions from the whole image: live brokers, offline directories, topic configs. Pure.

Every change of leader goes through `build_change`: fencing and unfencing, ISR changes, admin elections, reassignments,
config changes.
"""

from collections.abc import Callable, Collection, Iterator
from uuid import UUID

from tidelog.metadata import elections
from tidelog.metadata.configs import is_unclean_allowed, min_isr
from tidelog.metadata.decision import Context
from tidelog.metadata.image import Broker, ClusterImage, Partition
from tidelog.metadata.records import NO_LEADER, ChangePartition, Record


def can_serve(image: ClusterImage, partition: Partition, broker: int) -> bool:
    """Whether this replica may be in sync and lead: broker live, directory online, log open."""
    registered = image.brokers.get(broker)
    if registered is None or not registered.is_live or broker in partition.recovering:
        return False
    return not registered.offline or partition.directory_of(broker) not in registered.offline


def is_draining(image: ClusterImage) -> Callable[[int], bool]:
    return lambda broker: broker in image.brokers and image.brokers[broker].draining


def has_full_directory(broker: Broker, partition: Partition) -> bool:
    """Whether the broker's replica is in a full log directory."""
    return bool(broker.full) and partition.directory_of(broker.broker) in broker.full


class Candidates:
    """The brokers of an image that may lead, computed once for the partitions of a large decision, without
    `excluded`."""

    __slots__ = ("_live", "_offline", "is_avoided")

    def __init__(self, image: ClusterImage, *, excluded: Collection[int] = ()) -> None:
        live = {number: broker for number, broker in image.brokers.items() if broker.is_live and number not in excluded}
        draining = frozenset(number for number, broker in live.items() if broker.draining)
        self._live = frozenset(live)
        self._offline = {number: broker.offline for number, broker in live.items() if broker.offline}
        self.is_avoided: Callable[[int], bool] | None = draining.__contains__ if draining else None

    def of(self, partition: Partition) -> Callable[[int], bool]:
        """Like `can_serve`."""
        if not self._offline and not partition.recovering:
            return self._live.__contains__
        return lambda broker: (
            broker in self._live
            and broker not in partition.recovering
            and partition.directory_of(broker) not in self._offline.get(broker, ())
        )


def build_change(
    image: ClusterImage,
    topic_id: UUID,
    number: int,
    before: Partition,
    after: Partition,
    *,
    new_epoch: bool = False,
    prefer: int | None = None,
    excluded: Collection[int] = (),
    unclean: bool | None = None,
    candidates: Candidates | None = None,
    context: Context | None = None,
) -> ChangePartition | None:
    """Returns the record that changes a partition from `before` to `after`, with the leader by the election rules.

    `after` may have another ISR, other eligible leaders or replicas. The present leader stays if it may (or `prefer`
    takes over, if it may). `excluded` do not lead. `unclean` overrides the topic's config. `candidates`, of the same
    image and without the excluded, saves looking them up each time. `context` has the log ends that decide an unclean
    election.
    """
    can_lead, is_avoided = (
        (lambda broker: broker not in excluded and can_serve(image, after, broker), is_draining(image))
        if candidates is None
        else (candidates.of(after), candidates.is_avoided)
    )
    elected = elections.elect(
        after,
        can_lead,
        unclean=is_unclean_allowed(image, topic_id) if unclean is None else unclean,
        prefer=before.leader if prefer is None else prefer,
        is_avoided=is_avoided,
        log_end=None if context is None else lambda broker: context.log_end(image, topic_id, number, broker),
    )
    result = elections.led_by(after, elected, min_isr=min_isr(image, topic_id, after))
    return elections.change(topic_id, number, before, result, new_epoch=new_epoch)


def with_isr(image: ClusterImage, topic_id: UUID, partition: Partition, isr: Collection[int]) -> Partition:
    """Returns the partition with this ISR, and the eligible leaders that follow from it."""
    stays, eligible = elections.with_isr(partition, isr, min_isr=min_isr(image, topic_id, partition))
    return partition.led(partition.leader, isr=stays, eligible=eligible)


def without(
    image: ClusterImage, topic_id: UUID, partition: Partition, broker: int, *, has_lost_data: bool = False
) -> Partition:
    """Returns the partition without this replica in the ISR; it stays eligible only if it has lost no data."""
    after = with_isr(image, topic_id, partition, [b for b in partition.isr if b != broker])
    if has_lost_data and broker in after.eligible:
        return after.led(after.leader, isr=after.isr, eligible=tuple(b for b in after.eligible if b != broker))
    return after


def recovered(partition: Partition, broker: int) -> Partition:
    """Returns the partition with this replica no longer marked as recovering."""
    return partition._replace(recovering=tuple(b for b in partition.recovering if b != broker))


def leave_all_isrs(image: ClusterImage, broker: int, context: Context) -> Iterator[Record]:
    """Removes the broker from all ISRs and leaderships. Its replica stays an eligible leader where the ISR falls below
    `min.insync.replicas`."""
    candidates = Candidates(image, excluded=(broker,))
    for topic_id, number, partition in image.partitions_on(broker):
        if broker in partition.isr or partition.leader == broker:
            after = without(image, topic_id, partition, broker)
            record = build_change(image, topic_id, number, partition, after, candidates=candidates, context=context)
            if record is not None:
                yield record


def elect_missing_leaders(
    image: ClusterImage,
    partitions: Iterator[tuple[UUID, int, Partition]],
    context: Context,
    *,
    unclean: bool | None = None,
) -> Iterator[Record]:
    """Elects leaders for leaderless partitions, where the rules allow one. `unclean` overrides the topics' config."""
    candidates = Candidates(image)
    for topic_id, number, partition in partitions:
        # Mostly none of its replicas can lead: checked without an election.
        if partition.leader == NO_LEADER and any(map(candidates.of(partition), partition.replicas)):
            record = build_change(
                image, topic_id, number, partition, partition, unclean=unclean, candidates=candidates, context=context
            )
            if record is not None:
                yield record


def move_leaderships(image: ClusterImage, broker: int) -> Iterator[Record]:
    """Moves what this broker leads to other in-sync replicas, where there are any; it stays in sync."""
    candidates = Candidates(image, excluded=(broker,))
    for topic_id, number, partition in image.partitions_on(broker):
        if partition.leader == broker and any(map(candidates.of(partition), partition.isr)):
            record = build_change(image, topic_id, number, partition, partition, candidates=candidates)
            if record is not None:
                yield record
