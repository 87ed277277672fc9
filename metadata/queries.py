"""Queries of the metadata: topics, partitions, brokers, configs, reassignments, users, ACLs, quotas. Reads an image.
Pure."""

from dataclasses import dataclass
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.acls import AclBinding, AclFilter, find_acls
from tidelog.metadata.config_changes import check_resource
from tidelog.metadata.config_table import Scope
from tidelog.metadata.image import ClusterImage, Partition, Topic
from tidelog.metadata.partition_changes import can_serve, has_full_directory
from tidelog.metadata.quotas import Entity
from tidelog.metadata.reassignments import Reassignment, list_reassignments
from tidelog.metadata.records import NO_LEADER
from tidelog.metadata.topics import INTERNAL_TOPICS, find_topic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.maps import sorted_items

ONLINE, READ_ONLY, OFFLINE = "online", "read-only", "offline"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionDescription:
    partition: int
    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    eligible: tuple[int, ...]
    offline_replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]
    start_offset: int
    min_isr: int
    state: str
    """`online`; `read-only`: the ISR is below its minimum, or the leader's disk is full; `offline`: there is no
    leader."""
    advice: str
    """What to do if the partition is offline, or if a disk of its replicas is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    name: str
    topic_id: UUID
    is_internal: bool
    replication_factor: int
    configs: tuple[tuple[str, str], ...]
    """Configs set on the topic itself."""
    partitions: tuple[PartitionDescription, ...]


def topic_names(image: ClusterImage) -> list[str]:
    return sorted(image.topic_ids)


def describe_topic(image: ClusterImage, name: str) -> TopicDescription:
    """Describes a topic; raises `UnknownTopicOrPartitionError`."""
    topic = find_topic(image, name)
    return TopicDescription(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.name in INTERNAL_TOPICS,
        replication_factor=len(topic.partitions[0].original_replicas),
        configs=tuple(configs.overrides(image, Scope.TOPIC, topic.name).items()),
        partitions=tuple(
            _partition(image, topic, number, partition) for number, partition in sorted_items(topic.partitions)
        ),
    )


def _partition(image: ClusterImage, topic: Topic, number: int, partition: Partition) -> PartitionDescription:
    least = configs.min_isr(image, topic.topic_id, partition)
    full = [b for b in partition.replicas if b in image.brokers and has_full_directory(image.brokers[b], partition)]
    if partition.leader == NO_LEADER:
        state, advice = OFFLINE, _advice(topic.name, number, partition)
    else:
        is_writable = len(partition.isr) >= least and partition.leader not in full
        state, advice = ONLINE if is_writable else READ_ONLY, _room_advice(full) if full else ""
    return PartitionDescription(
        partition=number,
        leader=partition.leader,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        replicas=partition.replicas,
        isr=partition.isr,
        eligible=partition.eligible,
        offline_replicas=tuple(b for b in partition.replicas if not can_serve(image, partition, b)),
        adding=partition.adding,
        removing=partition.removing,
        start_offset=partition.start_offset,
        min_isr=least,
        state=state,
        advice=advice,
    )


def _room_advice(full: list[int]) -> str:
    return f"a log directory of broker {' and '.join(map(str, full))} is full: make room there, no restart is needed"


def _advice(name: str, number: int, partition: Partition) -> str:
    unclean = f"tidelog elect-leaders --unclean --topic {name} --partition {number}"
    recovering = [broker for broker in partition.eligible if broker in partition.recovering]
    if recovering:
        brokers = " and ".join(map(str, recovering))
        return (
            f"broker {brokers} recovers its log, and leads when that is done; if it cannot, see its log and repair its"
            f" disk, or stop broker {brokers} and lose records: {unclean}"
        )
    if partition.eligible:
        brokers = " or ".join(str(broker) for broker in partition.eligible)
        return f"bring back broker {brokers}, which has every acknowledged record; or lose records: {unclean}"
    return f"no replica is known to have every acknowledged record; to go on with what there is: {unclean}"


# Queries and replies.


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeTopics:
    names: tuple[str, ...] | None = None
    """None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTopic:
    """Exactly one of `topic` and `error` is set."""

    name: str
    topic: TopicDescription | None = None
    error: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTopics:
    topics: tuple[DescribedTopic, ...]


def describe_topics(image: ClusterImage, query: DescribeTopics) -> DescribedTopics:
    answers = []
    for name in topic_names(image) if query.names is None else query.names:
        try:
            answers.append(DescribedTopic(name=name, topic=describe_topic(image, name)))
        except TidelogError as error:
            answers.append(DescribedTopic(name=name, error=error.code, message=str(error)))
    return DescribedTopics(topics=tuple(answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FindTopics:
    """Returns which of these topics exist, linearizably: one that does not exist any more is deleted."""

    topic_ids: tuple[UUID, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTopics:
    topic_ids: tuple[UUID, ...]
    """The topics that exist, in the order of the query."""


def find_topics(image: ClusterImage, query: FindTopics) -> FoundTopics:
    return FoundTopics(topic_ids=tuple(topic_id for topic_id in query.topic_ids if topic_id in image.topics))


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeBrokers:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDescription:
    broker: int
    broker_epoch: int
    endpoints: tuple[tuple[str, str, str, int], ...]
    rack: str | None
    is_fenced: bool
    is_draining: bool
    replicas: int
    preferred_for: int
    offline_directories: tuple[UUID, ...]
    full_directories: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedBrokers:
    brokers: tuple[BrokerDescription, ...]


def describe_brokers(image: ClusterImage, _query: DescribeBrokers) -> DescribedBrokers:
    return DescribedBrokers(
        brokers=tuple(
            BrokerDescription(
                broker=number,
                broker_epoch=broker.broker_epoch,
                endpoints=broker.endpoints,
                rack=broker.rack,
                is_fenced=broker.fenced,
                is_draining=broker.draining,
                replicas=image.replica_count(number),
                preferred_for=image.preferred.get(number, 0),
                offline_directories=broker.offline,
                full_directories=broker.full,
            )
            for number, broker in sorted_items(image.brokers)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeConfigs:
    resource_type: str
    resource: str = configs.CLUSTER


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedConfigs:
    entries: tuple[configs.ConfigEntry, ...]


def describe_configs(image: ClusterImage, query: DescribeConfigs) -> DescribedConfigs:
    scope = check_resource(image, query.resource_type, query.resource)
    return DescribedConfigs(entries=configs.describe(image, scope, query.resource))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReassignments:
    partitions: tuple[tuple[str, int], ...] | None = None
    """(topic, partition) each; None is all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedReassignments:
    reassignments: tuple[Reassignment, ...]


def answer_list_reassignments(image: ClusterImage, query: ListReassignments) -> ListedReassignments:
    return ListedReassignments(reassignments=list_reassignments(image, query.partitions))


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeAcls:
    matching: AclFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedAcls:
    bindings: tuple[AclBinding, ...]


def describe_acls(image: ClusterImage, query: DescribeAcls) -> DescribedAcls:
    return DescribedAcls(bindings=find_acls(image, query.matching))


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeQuotas:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedQuotas:
    quotas: tuple[tuple[Entity, tuple[tuple[str, float], ...]], ...]


def describe_quotas(image: ClusterImage, _query: DescribeQuotas) -> DescribedQuotas:
    found = sorted(image.quotas.items(), key=lambda item: str(item[0]))
    return DescribedQuotas(quotas=tuple((entity, tuple(sorted_items(values))) for entity, values in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeUsers:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedUsers:
    users: tuple[tuple[str, str, int], ...]
    """(user, mechanism, iterations); nothing that helps to guess a password."""


def describe_users(image: ClusterImage, _query: DescribeUsers) -> DescribedUsers:
    found = [(user, mechanism, known.iterations) for (user, mechanism), known in sorted_items(image.users)]
    return DescribedUsers(users=tuple(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeFeatures:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedFeatures:
    levels: tuple[tuple[str, int], ...]


def describe_features(image: ClusterImage, _query: DescribeFeatures) -> DescribedFeatures:
    return DescribedFeatures(levels=tuple(sorted_items(image.features)))
