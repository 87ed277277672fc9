"""Changes of single partitions: ISR, admin elections, leader balance, replica directories. Pure.

The leader of a partition proposes its ISR (`AlterPartition`); the controller accepts it only from the leader of this
leader epoch, for this partition epoch, and with live members of the broker epochs that the leader knows. A reassignment
completes here, when the last replica of its target is in sync.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision, Done, Draft, Outcome, Outcomes, each
from tidelog.metadata.image import ClusterImage, Partition, Topic
from tidelog.metadata.log_ends import UNKNOWN
from tidelog.metadata.partition_changes import (
    build_change,
    can_serve,
    elect_missing_leaders,
    has_full_directory,
    with_isr,
)
from tidelog.metadata.reassignments import completed
from tidelog.metadata.records import NO_LEADER, ChangePartition, Record
from tidelog.metadata.topics import find_partition, find_topic
from tidelog.model.errors import (
    ElectionNotNeededError,
    EligibleLeadersUnavailableError,
    ErrorCode,
    FencedLeaderEpochError,
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NotLeaderError,
    PreferredLeaderUnavailableError,
    TidelogError,
    UnknownTopicOrPartitionError,
)

ELECTIONS_PER_ROUND_MAX = 1000
LOG_ENDS_PER_REQUEST_MAX = 1000

# ISR.


@dataclass(frozen=True, slots=True, kw_only=True)
class AlteredPartition:
    topic_id: UUID
    partition: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    """(broker, its broker epoch) of each member, the leader included."""
    is_barrier: bool = False
    """Raises the partition epoch even if the ISR is the same: fences earlier proposals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterPartition:
    broker: int
    broker_epoch: int
    partitions: tuple[AlteredPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """The state after the request; -1 and empty if the partition is unknown.

    `min_isr` is the value of this decision. The leader uses it together with this ISR, even if its own metadata lags:
    eligible replicas rest on it.
    """

    topic_id: UUID
    partition: int
    error: ErrorCode | None = None
    message: str = ""
    leader: int = -1
    leader_epoch: int = -1
    partition_epoch: int = -1
    isr: tuple[int, ...] = ()
    min_isr: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AlteredPartitions:
    partitions: tuple[PartitionState, ...]


def alter_partition(image: ClusterImage, request: AlterPartition, _context: Context) -> Decision[AlteredPartitions]:
    known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    named = Counter((item.topic_id, item.partition) for item in request.partitions)
    records: list[Record] = []
    ends: list[tuple[ErrorCode | None, str]] = []
    for item in request.partitions:
        try:
            if named[item.topic_id, item.partition] > 1:
                raise InvalidRequestError(f"{item.topic_id}-{item.partition} is named more than once in one request")
            record = _alter_partition(image, request.broker, item)
        except TidelogError as rejection:
            ends.append((rejection.code, str(rejection)))
            continue
        if record is not None:
            records.append(record)
        if record is not None and record.leader is not None:
            why = "another leads: a reassignment is complete, or the leader is leaving"
            ends.append((ErrorCode.NEW_LEADER_ELECTED, why))
        else:
            ends.append((None, ""))
    draft.add(records)  # all at once: a restarted broker joins thousands of partitions in one request
    states = [_state(draft.image, item, *end) for item, end in zip(request.partitions, ends, strict=True)]
    return draft.decide(AlteredPartitions(partitions=tuple(states)))


def _state(image: ClusterImage, item: AlteredPartition, error: ErrorCode | None, message: str) -> PartitionState:
    partition = image.partition(item.topic_id, item.partition)
    if partition is None:
        return PartitionState(topic_id=item.topic_id, partition=item.partition, error=error, message=message)
    return PartitionState(
        topic_id=item.topic_id,
        partition=item.partition,
        error=error,
        message=message,
        leader=partition.leader,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        isr=partition.isr,
        min_isr=configs.min_isr(image, item.topic_id, partition),
    )


def _alter_partition(image: ClusterImage, broker: int, item: AlteredPartition) -> ChangePartition | None:
    topic, partition = find_partition(image, item.topic_id, item.partition)
    _check_epochs(topic, partition, broker, item)
    _check_isr(image, topic, partition, item)
    isr = tuple(member for member, _ in item.isr)
    after = with_isr(image, item.topic_id, partition, isr)
    done = completed(after)
    gone = done is not None and len(done.replicas) < len(partition.replicas)
    record = build_change(image, item.topic_id, item.partition, partition, done or after, new_epoch=gone)
    if record is None and item.is_barrier:
        return ChangePartition(topic_id=item.topic_id, partition=item.partition)
    return record


def _check_epochs(topic: Topic, partition: Partition, broker: int, item: AlteredPartition) -> None:
    name = f"partition {item.partition} of {topic.name}"
    if item.leader_epoch > partition.leader_epoch or item.partition_epoch > partition.partition_epoch:
        # The sender has seen a newer decision: another controller is ahead.
        raise NotLeaderError(f"{name} is newer at the sender than at this controller")
    if item.leader_epoch < partition.leader_epoch:
        raise FencedLeaderEpochError(f"{name} is in leader epoch {partition.leader_epoch}, not {item.leader_epoch}")
    if partition.leader != broker:
        raise InvalidRequestError(f"{name} is led by {partition.leader}, not by {broker}")
    if item.partition_epoch < partition.partition_epoch:
        raise InvalidUpdateVersionError(
            f"{name} is in partition epoch {partition.partition_epoch}, not {item.partition_epoch}"
        )


def _check_isr(image: ClusterImage, topic: Topic, partition: Partition, item: AlteredPartition) -> None:
    name = f"partition {item.partition} of {topic.name}"
    members = [member for member, _ in item.isr]
    if len(set(members)) != len(members):
        raise InvalidRequestError(f"{name}: the in-sync set {members} names a broker twice")
    unassigned = [member for member in members if member not in partition.replicas]
    if unassigned:
        raise InvalidRequestError(f"{name}: broker {unassigned[0]} holds no replica")
    if partition.leader not in members:
        raise InvalidRequestError(f"{name}: the in-sync set {members} lacks the leader {partition.leader}")
    for member, epoch in item.isr:
        found = image.brokers[member]
        if found.broker_epoch != epoch:
            raise IneligibleReplicaError(
                f"{name}: broker {member} is in broker epoch {found.broker_epoch}, the leader spoke to {epoch}"
            )
        # A leaving broker in the ISR does not keep others from joining and leaving.
        if member not in partition.isr and not can_serve(image, partition, member):
            raise IneligibleReplicaError(f"{name}: broker {member} is fenced, stopping, or its directory is offline")


# Elections by admin call, and the balance of leaders.

PREFERRED, UNCLEAN = "preferred", "unclean"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectLeaders:
    kind: str
    """`preferred` or `unclean`."""
    partitions: tuple[tuple[str, int], ...] | None = None
    """(topic, partition) each; None is all of the cluster."""
    validate_only: bool = False


def elect_leaders(image: ClusterImage, request: ElectLeaders, context: Context) -> Decision[Outcomes]:
    """Elects leaders. Partitions that need no election are reported when named, and skipped when all are requested."""
    if request.kind not in (PREFERRED, UNCLEAN):
        raise InvalidRequestError(f"election {request.kind!r}: {PREFERRED} or {UNCLEAN}")
    draft = Draft(image)
    wanted: Iterable[tuple[str, int]]
    if request.partitions is None:
        wanted = [(image.topics[topic_id].name, number) for topic_id, number, _ in image.indexed(image.unbalanced)]
    else:
        wanted = request.partitions
    named = Counter(wanted)
    outcomes: list[Outcome] = []
    records: list[Record] = []
    for name, number in wanted:
        label = f"{name}-{number}"
        try:
            if named[name, number] > 1:
                raise InvalidRequestError(f"{label} is named more than once in one request")
            records.append(_elected(image, name, number, request.kind, context))
        except ElectionNotNeededError as error:
            if request.partitions is not None:
                outcomes.append(Outcome(label, error.code, str(error)))
        except TidelogError as error:
            outcomes.append(Outcome(label, error.code, str(error)))
        else:
            outcomes.append(Outcome(label))
    draft.add(records)
    return draft.decide(Outcomes(items=tuple(outcomes)))


def _elected(image: ClusterImage, name: str, number: int, kind: str, context: Context) -> ChangePartition:
    topic = find_topic(image, name)
    partition = topic.partitions.get(number)
    if partition is None:
        raise UnknownTopicOrPartitionError(f"topic {name} has no partition {number}")
    if kind == PREFERRED:
        return _preferred_elected(image, topic, number, partition)
    if partition.leader != NO_LEADER:
        raise ElectionNotNeededError(f"partition {number} of {name} is led by {partition.leader}")
    _check_nobody_recovers(image, name, number, partition)
    record = build_change(image, topic.topic_id, number, partition, partition, unclean=True, context=context)
    if record is None or record.leader is None:
        raise EligibleLeadersUnavailableError(
            f"partition {number} of {name}: none of its brokers {list(partition.replicas)} is live"
        )
    return record


def _check_nobody_recovers(image: ClusterImage, name: str, number: int, partition: Partition) -> None:
    """Rejects an unclean election while a replica with possibly more data recovers its log.

    Such a replica counts only if it holds every acknowledged record, or if no replica is known to hold them.
    """
    marked = [b for b in partition.replicas if b in partition.recovering]
    waiting = [b for b in marked if b in image.brokers and image.brokers[b].is_live]
    if partition.eligible:
        waiting = [b for b in waiting if b in partition.eligible]
    if waiting:
        brokers = ", ".join(map(str, waiting))
        raise EligibleLeadersUnavailableError(
            f"partition {number} of {name}: broker {brokers} recovers its log, and may lead when that is done. Wait for"
            f" it, or repair its disk; to lose what it holds, stop broker {brokers} first"
        )


def _preferred_elected(image: ClusterImage, topic: Topic, number: int, partition: Partition) -> ChangePartition:
    preferred = partition.preferred
    if partition.leader == preferred:
        raise ElectionNotNeededError(f"partition {number} of {topic.name} is led by its preferred replica {preferred}")
    if not _may_lead_again(image, partition):
        raise PreferredLeaderUnavailableError(
            f"partition {number} of {topic.name}: preferred replica {preferred} is not live, not in sync, or draining"
        )
    record = build_change(image, topic.topic_id, number, partition, partition, prefer=preferred)
    assert record is not None, "another replica takes over"
    return record


def _may_lead_again(image: ClusterImage, partition: Partition) -> bool:
    preferred = partition.preferred
    is_in_sync = preferred in partition.isr and can_serve(image, partition, preferred)
    broker = image.brokers.get(preferred)
    return is_in_sync and broker is not None and not broker.draining and not has_full_directory(broker, partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceLeaders:
    """Submitted by the controller itself: elects the preferred leaders of brokers that do not lead too many of the
    partitions for which they are preferred."""

    elections_max: int = ELECTIONS_PER_ROUND_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadersMoved:
    elected: int
    has_more: bool


def imbalance(image: ClusterImage) -> dict[int, float]:
    """Returns, for each broker that is preferred for any partition, the percentage of those that it does not lead."""
    missing = Counter(partition.preferred for _, _, partition in image.indexed(image.unbalanced))
    return {broker: 100.0 * missing[broker] / count for broker, count in sorted(image.preferred.items())}


def balance_leaders(image: ClusterImage, request: BalanceLeaders, _context: Context) -> Decision[LeadersMoved]:
    if not configs.cluster_bool(image, "auto.leader.rebalance.enable"):
        return Decision((), LeadersMoved(elected=0, has_more=False))
    limit = configs.cluster_int(image, "leader.imbalance.per.broker.percentage")
    skewed = {broker for broker, percent in imbalance(image).items() if percent > limit}
    records: list[Record] = []
    for topic_id, number, partition in image.indexed(image.unbalanced):
        if partition.preferred in skewed and _may_lead_again(image, partition):
            if len(records) == request.elections_max:
                return Decision(tuple(records), LeadersMoved(elected=len(records), has_more=True))
            record = build_change(image, topic_id, number, partition, partition, prefer=partition.preferred)
            assert record is not None, "another replica takes over"
            records.append(record)
    return Decision(tuple(records), LeadersMoved(elected=len(records), has_more=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectMissingLeaders:
    """Submitted by the controller itself: elects leaders for leaderless partitions, where the rules allow one.

    For an unfenced broker: as at its unfencing (`metadata.brokers`), uncleanly too, where the topic allows it. For all
    (-1): cleanly only, so that a replica which reported a loss does not lead by it.
    """

    broker: int = -1
    elections_max: int = ELECTIONS_PER_ROUND_MAX


def decide_missing_leaders(
    image: ClusterImage, request: ElectMissingLeaders, context: Context
) -> Decision[LeadersMoved]:
    if request.broker < 0:
        found = elect_missing_leaders(image, image.indexed(image.unbalanced), context, unclean=False)
    else:
        found = elect_missing_leaders(image, image.partitions_on(request.broker), context)
    records = tuple(islice(found, request.elections_max + 1))
    some = records[: request.elections_max]
    return Decision(some, LeadersMoved(elected=len(some), has_more=len(some) < len(records)))


# Log ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLogEnds:
    """A broker reports log ends of replicas that only an unclean election can elect (`metadata.log_ends`)."""

    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int, int, int], ...]
    """(topic id, partition, epoch of the last record, durable end offset)."""


def report_log_ends(image: ClusterImage, request: ReportLogEnds, context: Context) -> Decision[Done]:
    known_broker(image, request.broker, request.broker_epoch)
    if len(request.replicas) > LOG_ENDS_PER_REQUEST_MAX:
        raise InvalidRequestError(f"{len(request.replicas)} log ends are reported: at most {LOG_ENDS_PER_REQUEST_MAX}")
    context.log_ends.report(request.broker, request.broker_epoch, request.replicas, now_ms=context.now_ms)
    return Decision((), Done())


def lacks_log_ends(image: ClusterImage, request: ElectLeaders, context: Context) -> bool:
    """Whether a live candidate of this unclean election has not reported its log end."""
    if request.kind != UNCLEAN:
        return False
    if request.partitions is None:
        found: Iterable[tuple[UUID, int, Partition]] = image.indexed(image.unbalanced)
    else:
        found = _named_partitions(image, request.partitions)
    return any(
        partition.leader == NO_LEADER
        and can_serve(image, partition, broker)
        and context.log_end(image, topic_id, number, broker) == UNKNOWN
        for topic_id, number, partition in found
        for broker in partition.replicas
    )


def _named_partitions(image: ClusterImage, names: Iterable[tuple[str, int]]) -> Iterator[tuple[UUID, int, Partition]]:
    for name, number in names:
        topic_id = image.topic_ids.get(name)
        partition = None if topic_id is None else image.partition(topic_id, number)
        if topic_id is not None and partition is not None:
            yield topic_id, number, partition


# Directories.


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignDirectories:
    """A broker reports the log directories of replicas."""

    broker: int
    broker_epoch: int
    replicas: tuple[tuple[UUID, int, UUID], ...]
    """(topic id, partition, directory id)."""


def assign_directories(image: ClusterImage, request: AssignDirectories, _context: Context) -> Decision[Outcomes]:
    broker = known_broker(image, request.broker, request.broker_epoch)
    records: list[Record] = []

    def assign(replica: tuple[UUID, int, UUID]) -> None:
        topic_id, number, directory = replica
        topic, partition = find_partition(image, topic_id, number)
        if request.broker not in partition.replicas:
            raise InvalidRequestError(f"broker {request.broker} holds no replica of {topic.name}-{number}")
        if directory not in broker.directories or directory in broker.offline:
            raise InvalidRequestError(f"broker {request.broker} has no working log directory {directory}")
        records.extend(_in_directory(topic_id, number, partition, request.broker, directory))

    outcomes = each(request.replicas, lambda replica: f"{replica[0]}-{replica[1]}", assign)
    return Decision(tuple(records), outcomes)


def _in_directory(
    topic_id: UUID, number: int, partition: Partition, broker: int, directory: UUID
) -> Iterator[ChangePartition]:
    if partition.directory_of(broker) != directory:
        directories = tuple(
            directory if replica == broker else there
            for replica, there in zip(partition.replicas, partition.directories, strict=True)
        )
        yield ChangePartition(topic_id=topic_id, partition=number, directories=directories)
