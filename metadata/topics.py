"""Topics: create, delete, add partitions, advance log starts. Requests, and the decisions on them. Pure.

A request for several topics has one outcome for each. Names are Kafka's: 1 to 249 of `[a-zA-Z0-9._-]`, not `.` or `..`;
two names that differ only in dots and underscores would be one metric name, so the second is rejected.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.brokers import known_broker
from tidelog.metadata.config_table import Scope
from tidelog.metadata.decision import Context, Decision, Draft, Outcomes, each
from tidelog.metadata.image import NIL, ClusterImage, Partition, Topic, folds
from tidelog.metadata.partition_changes import can_serve
from tidelog.metadata.placement import UsableBroker, place_replicas
from tidelog.metadata.records import ChangePartition, CreatePartition, CreateTopic, Record, RemoveTopic, SetConfig
from tidelog.model.errors import (
    ErrorCode,
    FencedLeaderEpochError,
    InvalidConfigError,
    InvalidPartitionsError,
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    InvalidRequestError,
    InvalidTopicError,
    PolicyViolationError,
    TidelogError,
    TopicAlreadyExistsError,
    TopicDeletionDisabledError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.maps import Map

NAME_LENGTH_MAX = 249
_NAME = re.compile(r"[a-zA-Z0-9._-]+")
METADATA_TOPIC = "__cluster_metadata"
INTERNAL_TOPICS: dict[str, str] = {
    "__consumer_offsets": "offsets.topic.num.partitions",
    "__transaction_state": "transaction.state.log.num.partitions",
}
"""Internal topics, and the config key of their partition count. The hash of a group id over this count chooses the
partition that holds the group's state, so the count of an existing topic never changes."""
INTERNAL_CONFIGS = (("cleanup.policy", "compact"), ("segment.bytes", str(100 << 20)))
INTERNAL_REPLICAS = 3
PARTITIONS_PER_REQUEST_MAX = 10_000
PARTITIONS_PER_TOPIC_MAX = 100_000
REPLICAS_MAX = 32_767


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    name: str
    partitions: int = -1
    """-1: `num.partitions`."""
    replication_factor: int = -1
    """-1: `default.replication.factor`."""
    assignment: tuple[tuple[int, ...], ...] = ()
    """Instead of the two numbers: the brokers of each partition, preferred leader first."""
    configs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopics:
    topics: tuple[NewTopic, ...]
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedTopic:
    name: str
    error: ErrorCode | None = None
    message: str = ""
    """What is wrong; or, if it was created, a hint for its owner."""
    topic_id: UUID = NIL
    partitions: int = -1
    replication_factor: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedTopics:
    topics: tuple[CreatedTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTopics:
    names: tuple[str, ...] = ()
    ids: tuple[UUID, ...] = ()
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPartitions:
    name: str
    total: int
    """The new total number of partitions."""
    assignment: tuple[tuple[int, ...], ...] = ()
    """The brokers of each new partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPartitions:
    topics: tuple[NewPartitions, ...]
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStartAdvance:
    topic_id: UUID
    partition: int
    leader_epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceLogStart:
    """A leader deletes records before an offset (DeleteRecords). It has checked the offset against its high watermark;
    the image keeps it, so that no later leader serves the records again."""

    broker: int
    broker_epoch: int
    partitions: tuple[LogStartAdvance, ...]


def check_name(image: ClusterImage, name: str) -> None:
    """Raises `InvalidTopicError` or `TopicAlreadyExistsError` if the name cannot be used."""
    if not name:
        raise InvalidTopicError("a topic needs a name")
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidTopicError(f"topic name of {len(name)} characters: at most {NAME_LENGTH_MAX}")
    if name in (".", "..") or not _NAME.fullmatch(name):
        raise InvalidTopicError(
            f"topic name {name!r}: letters, digits, '.', '_' and '-' of ASCII only, and not '.' or '..'"
        )
    if name == METADATA_TOPIC:
        raise InvalidTopicError(f"{METADATA_TOPIC} is the controllers' own log")
    if name in image.topic_ids:
        raise TopicAlreadyExistsError(f"topic {name} exists")
    other = image.folded.get(name.replace(".", "_")) if folds(name) else None
    if other is not None:
        raise InvalidTopicError(f"topic name {name} collides with {other}: '.' and '_' are one in the names of metrics")


def find_topic(image: ClusterImage, name: str) -> Topic:
    topic = image.topic_named(name)
    if topic is None:
        shown = name if len(name) <= NAME_LENGTH_MAX and name.isprintable() else repr(name[:40])
        raise UnknownTopicOrPartitionError(f"there is no topic {shown}")
    return topic


def find_partition(image: ClusterImage, topic_id: UUID, number: int) -> tuple[Topic, Partition]:
    topic = image.topics.get(topic_id)
    if topic is None:
        raise UnknownTopicIdError(f"there is no topic with id {topic_id}")
    partition = topic.partitions.get(number)
    if partition is None:
        raise UnknownTopicOrPartitionError(
            f"topic {topic.name} has no partition {number}; it has {len(topic.partitions)}"
        )
    return topic, partition


# Placement.


def choose_replicas(
    image: ClusterImage, *, partitions: int, replication_factor: int, first: int = 0
) -> list[tuple[int, ...]]:
    """Places the replicas of new partitions on live brokers, and on fenced ones only if there are too few live ones."""
    if not 1 <= replication_factor <= REPLICAS_MAX:
        raise InvalidReplicationFactorError(f"replication factor {replication_factor}: from 1 to {REPLICAS_MAX}")
    candidates = [broker for _, broker in sorted(image.brokers.items()) if not broker.draining]
    live = [broker for broker in candidates if broker.is_live]
    if not live:
        raise InvalidReplicationFactorError(_no_broker_for_replicas(image))
    if replication_factor > len(candidates):
        draining = len(image.brokers) - len(candidates)
        raise InvalidReplicationFactorError(
            f"replication factor {replication_factor}: "
            + ("1 broker is registered" if len(candidates) == 1 else f"{len(candidates)} brokers are registered")
            + (f" and {draining} more {'is' if draining == 1 else 'are'} being drained" if draining else "")
        )
    # With too few live brokers every partition gets all of them, so that each has a leader.
    waiting = [broker for broker in candidates if not broker.is_live][: max(0, replication_factor - len(live))]
    usable = [
        UsableBroker(broker.broker, broker.rack, image.replica_count(broker.broker)) for broker in (*live, *waiting)
    ]
    return place_replicas(usable, partitions=partitions, replication_factor=replication_factor, first=first)


def _no_broker_for_replicas(image: ClusterImage) -> str:
    """Says why no broker can take a new replica: each is drained or fenced, or none is registered."""
    if not image.brokers:
        return "no broker is registered: start one"
    drained = sum(1 for broker in image.brokers.values() if broker.draining)
    fenced = len(image.brokers) - drained
    reasons = []
    if drained:
        reasons.append(f"{drained} {'is' if drained == 1 else 'are'} drained (`tidelog brokers drain ID --undo`)")
    if fenced:
        reasons.append(f"{fenced} {'is fenced (start it)' if fenced == 1 else 'are fenced (start them)'}")
    registered = "1 registered broker" if len(image.brokers) == 1 else f"{len(image.brokers)} registered brokers"
    return f"no broker can take new replicas: of {registered} {' and '.join(reasons)}"


def check_replicas(image: ClusterImage, replicas: Sequence[int], what: str) -> None:
    if not 1 <= len(replicas) <= REPLICAS_MAX:
        raise InvalidReplicaAssignmentError(f"{what}: an assignment names 1 to {REPLICAS_MAX} brokers")
    if len(set(replicas)) != len(replicas):
        raise InvalidReplicaAssignmentError(f"{what}: {list(replicas)} names a broker twice")
    unknown = [broker for broker in replicas if broker not in image.brokers]
    if unknown:
        raise InvalidReplicaAssignmentError(f"{what}: broker {unknown[0]} is not registered")


def _check_assignment(
    image: ClusterImage, assignment: Sequence[tuple[int, ...]], topic: str, *, first: int = 0, factor: int | None = None
) -> None:
    for number, replicas in enumerate(assignment, first):
        check_replicas(image, replicas, f"partition {number} of {topic}")
        factor = len(replicas) if factor is None else factor
        if len(replicas) != factor:
            raise InvalidReplicaAssignmentError(
                f"partition {number} of {topic} gets {len(replicas)} replicas, the others have {factor}"
            )


def check_limits(image: ClusterImage, assignments: Sequence[tuple[int, ...]]) -> None:
    per_broker = configs.cluster_int(image, "max.partitions.per.broker")
    added = Counter(broker for replicas in assignments for broker in replicas)
    for broker, count in sorted(added.items()):
        if image.replica_count(broker) + count > per_broker:
            raise PolicyViolationError(
                f"broker {broker} would hold {image.replica_count(broker) + count} replicas; "
                f"max.partitions.per.broker is {per_broker}"
            )
    most = configs.cluster_int(image, "max.replicas.per.cluster")
    total = sum(image.replica_counts.values()) + added.total()
    if total > most:
        raise PolicyViolationError(f"the cluster would hold {total} replicas; max.replicas.per.cluster is {most}")


def first_directory(image: ClusterImage, broker: int) -> UUID:
    """Returns the directory of a new replica if the broker has one; otherwise the broker reports it later."""
    directories = image.brokers[broker].directories
    return directories[0] if len(directories) == 1 else NIL


def _new_partition(image: ClusterImage, topic_id: UUID, number: int, replicas: tuple[int, ...]) -> CreatePartition:
    directories = tuple(first_directory(image, broker) for broker in replicas)
    bare = Partition(replicas, directories, (), -1, 0, 0)
    isr = tuple(broker for broker in replicas if can_serve(image, bare, broker))
    if not isr:
        raise InvalidReplicaAssignmentError(f"partition {number}: none of the brokers {list(replicas)} is live")
    leader = next((broker for broker in isr if not image.brokers[broker].draining), isr[0])
    return CreatePartition(
        topic_id=topic_id, partition=number, replicas=replicas, directories=directories, isr=isr, leader=leader
    )


# Create.


def create_topics(image: ClusterImage, request: CreateTopics, context: Context) -> Decision[CreatedTopics]:
    draft = Draft(image)
    named = Counter(topic.name for topic in request.topics)
    requested = sum(_requested_partitions(image, topic) for topic in request.topics)
    results = []
    for topic in request.topics:
        try:
            if named[topic.name] > 1:
                raise InvalidRequestError(f"topic {topic.name!r} is named {named[topic.name]} times in one request")
            if requested > PARTITIONS_PER_REQUEST_MAX:
                raise PolicyViolationError(
                    f"{requested} partitions in one request: at most {PARTITIONS_PER_REQUEST_MAX}"
                )
            records, result = _create(draft.image, topic, context)
        except TidelogError as error:
            results.append(CreatedTopic(name=topic.name, error=error.code, message=str(error)))
        else:
            draft.add(records)
            results.append(result)
    return draft.decide(CreatedTopics(topics=tuple(results)))


def _requested_partitions(image: ClusterImage, topic: NewTopic) -> int:
    return len(topic.assignment) or (_partition_count(image, topic) if topic.partitions == -1 else topic.partitions)


def _create(image: ClusterImage, topic: NewTopic, context: Context) -> tuple[list[Record], CreatedTopic]:
    check_name(image, topic.name)
    settings = _checked_configs(image, topic)
    if topic.assignment:
        if topic.partitions != -1 or topic.replication_factor != -1:
            raise InvalidRequestError(
                f"topic {topic.name}: give an assignment, or the numbers of partitions and replicas, not both"
            )
        _check_assignment(image, topic.assignment, topic.name)
        assignment = list(topic.assignment)
    else:
        assignment = choose_replicas(
            image, partitions=_partition_count(image, topic), replication_factor=_replication_factor(image, topic)
        )
    check_limits(image, assignment)
    topic_id = context.new_id()
    records: list[Record] = [CreateTopic(topic_id=topic_id, name=topic.name)]
    records += [SetConfig(resource_type="topic", resource=topic.name, key=k, value=v) for k, v in settings]
    records += [_new_partition(image, topic_id, number, replicas) for number, replicas in enumerate(assignment)]
    factor = len(assignment[0])
    return records, CreatedTopic(
        name=topic.name,
        message=_note(image, factor, dict(settings)),
        topic_id=topic_id,
        partitions=len(assignment),
        replication_factor=factor,
    )


def _note(image: ClusterImage, factor: int, settings: dict[str, str]) -> str:
    cluster = image.config("cluster", configs.CLUSTER)
    if factor == 2 and "min.insync.replicas" not in settings and "min.insync.replicas" not in cluster:
        return "with 2 replicas a majority is both: while one broker is down, the topic is read-only"
    return ""


def _checked_configs(image: ClusterImage, topic: NewTopic) -> list[tuple[str, str]]:
    named = Counter(key for key, _ in topic.configs)
    twice = [key for key, count in named.items() if count > 1]
    if twice:
        raise InvalidConfigError(f"topic {topic.name}: {twice[0]} is given twice")
    settings = dict(INTERNAL_CONFIGS) if topic.name in INTERNAL_TOPICS else {}
    for key, value in topic.configs:
        configs.check(Scope.TOPIC, key, value)
        settings[key] = value
    check_internal_policy(topic.name, settings.get("cleanup.policy"))
    problems = configs.log_problems(Map(settings), image.config("cluster", configs.CLUSTER))
    if problems:
        raise InvalidConfigError(f"topic {topic.name}: {'; '.join(problems)}")
    return sorted(settings.items())


def check_internal_policy(topic: str, policy: str | None) -> None:
    """Raises if the topic is internal and this policy of its own would delete the state in it; with None it would have
    the policy of the cluster, which may change."""
    if topic in INTERNAL_TOPICS and (policy is None or configs.split_list(policy) != ("compact",)):
        raise InvalidConfigError(
            f"topic {topic} accepts only cleanup.policy=compact: its records are state, and retention would delete it"
        )


def _partition_count(image: ClusterImage, topic: NewTopic) -> int:
    count = topic.partitions
    if count == -1:
        return configs.cluster_int(image, INTERNAL_TOPICS.get(topic.name, "num.partitions"))
    if count < 1:
        raise InvalidPartitionsError(f"topic {topic.name}: {count} partitions; ask for at least 1")
    return count


def _replication_factor(image: ClusterImage, topic: NewTopic) -> int:
    if topic.replication_factor != -1:
        return topic.replication_factor
    if topic.name in INTERNAL_TOPICS:
        registered = sum(1 for broker in image.brokers.values() if not broker.draining)
        return min(INTERNAL_REPLICAS, max(1, registered))
    return configs.cluster_int(image, "default.replication.factor")


# Delete.


def delete_topics(image: ClusterImage, request: DeleteTopics, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    if not configs.cluster_bool(image, "delete.topic.enable"):
        raise TopicDeletionDisabledError("topics cannot be deleted: delete.topic.enable is false")
    wanted: list[tuple[str, UUID | str]] = [(name, name) for name in request.names]
    wanted += [(str(topic_id), topic_id) for topic_id in request.ids]
    outcomes = each(
        wanted,
        lambda topic: topic[0],
        lambda topic: draft.add([_delete_topic(draft.image, topic[1])]),
        key=lambda topic: _id_of(image, topic[1]),
    )
    return draft.decide(outcomes)


def _id_of(image: ClusterImage, key: UUID | str) -> UUID | str:
    return image.topic_ids.get(key, key) if isinstance(key, str) else key


def _delete_topic(image: ClusterImage, key: UUID | str) -> RemoveTopic:
    if isinstance(key, str):
        topic = find_topic(image, key)
    else:
        found = image.topics.get(key)
        if found is None:
            raise UnknownTopicIdError(f"there is no topic with id {key}")
        topic = found
    if topic.name in INTERNAL_TOPICS:
        raise InvalidRequestError(f"{topic.name} is the cluster's own: it cannot be deleted")
    return RemoveTopic(topic_id=topic.topic_id)


# Add partitions.


def add_partitions(image: ClusterImage, request: AddPartitions, _context: Context) -> Decision[Outcomes]:
    draft = Draft(image)
    outcomes = each(
        request.topics, lambda topic: topic.name, lambda topic: draft.add(_add_partitions(draft.image, topic))
    )
    return draft.decide(outcomes)


def _add_partitions(image: ClusterImage, request: NewPartitions) -> Iterator[Record]:
    topic = find_topic(image, request.name)
    if topic.name in INTERNAL_TOPICS:
        raise InvalidTopicError(
            f"topic {topic.name} keeps its partition count: with another one, groups and transactions would hash to "
            "partitions that do not hold their state"
        )
    present = len(topic.partitions)
    if request.total < present:
        raise InvalidPartitionsError(
            f"topic {topic.name} has {present} partitions, {request.total} would be fewer: partitions are never "
            "removed; create a new topic"
        )
    if request.total == present:
        raise InvalidPartitionsError(f"topic {topic.name} has {present} partitions already")
    if request.total > PARTITIONS_PER_TOPIC_MAX:
        raise InvalidPartitionsError(
            f"topic {topic.name}: {request.total} partitions; {PARTITIONS_PER_TOPIC_MAX} at most"
        )
    count = request.total - present
    if count > PARTITIONS_PER_REQUEST_MAX:
        raise PolicyViolationError(f"{count} partitions in one request: at most {PARTITIONS_PER_REQUEST_MAX}")
    factor = len(topic.partitions[0].original_replicas)
    if request.assignment:
        if len(request.assignment) != count:
            raise InvalidReplicaAssignmentError(
                f"topic {topic.name}: {count} partitions are new, the assignment is for {len(request.assignment)}"
            )
        _check_assignment(image, request.assignment, topic.name, first=present, factor=factor)
        assignment = list(request.assignment)
    else:
        assignment = choose_replicas(image, partitions=count, replication_factor=factor, first=present)
    check_limits(image, assignment)
    for number, replicas in enumerate(assignment, present):
        yield _new_partition(image, topic.topic_id, number, replicas)


# Advance log starts.


def advance_log_start(image: ClusterImage, request: AdvanceLogStart, _context: Context) -> Decision[Outcomes]:
    known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    outcomes = each(
        request.partitions,
        lambda item: f"{item.topic_id}-{item.partition}",
        lambda item: draft.add(_advanced(draft.image, request.broker, item)),
        duplicate=None,
    )
    return draft.decide(outcomes)


def _advanced(image: ClusterImage, broker: int, item: LogStartAdvance) -> list[Record]:
    topic, partition = find_partition(image, item.topic_id, item.partition)
    if partition.leader != broker or partition.leader_epoch != item.leader_epoch:
        raise FencedLeaderEpochError(
            f"partition {item.partition} of {topic.name} is led by {partition.leader} in epoch "
            f"{partition.leader_epoch}, not by {broker} in epoch {item.leader_epoch}"
        )
    if item.start_offset < 0:
        raise InvalidRequestError(f"start offset {item.start_offset}: at least 0")
    if item.start_offset <= partition.start_offset:
        return []
    return [ChangePartition(topic_id=item.topic_id, partition=item.partition, start_offset=item.start_offset)]
