"""Finds the partitions that requests name, authorizes access to them, and finds this broker's replica of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tidelog.metadata.image import ClusterImage, Topic
from tidelog.metadata.topics import find_topic
from tidelog.model.errors import (
    FencedLeaderEpochError,
    InvalidRequestError,
    LeaderNotAvailableError,
    NotLeaderOrFollowerError,
    TidelogError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.ids import PartitionId
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.replica import Replica
from tidelog.replication.replicas import Replicas
from tidelog.services.authorization import Authorizer, Operation, Resource, ResourceType, require, require_by_id
from tidelog.services.context import RequestContext
from tidelog.services.topic_lookup import partition_in, read_id, topic_with_id
from tidelog.world.slicing import sliced

T = TypeVar("T")

CACHED_MAX = 20_000
"""Partitions of the newest image that are cached by name."""
PARTITIONS_PER_SLICE = 500
"""Partitions looked up in one turn of the event loop: some 3 ms."""

TopicRef = str | bytes
"""A topic's name, or the 16 bytes of its id."""
PartitionRef = PartitionId | tuple[TopicRef, int]
"""How a request names a partition. Callers inside of the node that have a `PartitionId` pass that."""
Ref = TypeVar("Ref", bound=PartitionRef)


def topic_ref(name: str, topic_id: bytes) -> TopicRef:
    """The id where a request has both."""
    return topic_id or name


class PartitionLookup:
    """Caches what it finds until the image changes: clients name the same partitions in every request."""

    def __init__(self, image: Callable[[], ClusterImage], authorizer: Authorizer) -> None:
        self._image = image
        self._authorizer = authorizer
        self._cached_image: ClusterImage | None = None
        self._cache: dict[PartitionRef, tuple[PartitionId, Resource]] = {}

    def find_or_error(
        self, context: RequestContext, operation: Operation, ref: PartitionRef
    ) -> PartitionId | TidelogError:
        """Returns an authorization error before it says whether a topic of that name exists. Errors of a request with
        thousands of partitions are not raised: their tracebacks would slow the garbage collector down."""
        image = self._image()
        if self._cached_image is not image:
            self._cached_image, self._cache = image, {}
        known = self._cache.get(ref)
        try:
            if known is None:
                found = self._look_up(context, operation, image, ref)
                if isinstance(found, TidelogError):
                    return found
                known = found
                if len(self._cache) < CACHED_MAX:
                    self._cache[ref] = known
            partition, resource = known
            if not self._authorizer.authorize(context, operation, resource):
                self._reject(context, operation, ref, partition, resource)
        except TidelogError as error:
            return error.with_traceback(None)
        return partition

    def _reject(
        self,
        context: RequestContext,
        operation: Operation,
        ref: PartitionRef,
        partition: PartitionId,
        resource: Resource,
    ) -> None:
        if isinstance(ref, PartitionId) or isinstance(ref[0], bytes):
            require_by_id(self._authorizer, context, operation, resource.name, partition.topic_id)
        else:
            require(self._authorizer, context, operation, resource)

    async def find_all(
        self, context: RequestContext, operation: Operation, refs: Iterable[Ref], *, is_change: bool = False
    ) -> dict[Ref, PartitionId | TidelogError]:
        """A change has each partition once: its name and its id name the same one."""
        found: dict[Ref, PartitionId | TidelogError] = {}
        seen: set[PartitionId] = set()
        async for ref in sliced(dict.fromkeys(refs), PARTITIONS_PER_SLICE):
            where = self.find_or_error(context, operation, ref)
            if is_change and isinstance(where, PartitionId):
                if where in seen:
                    where = InvalidRequestError(REPEATED)
                else:
                    seen.add(where)
            found[ref] = where
        return found

    def find_topic(self, context: RequestContext, operation: Operation, ref: TopicRef) -> Topic:
        image = self._image()
        if isinstance(ref, bytes):
            topic = topic_with_id(image, read_id(ref, "topic id"))
            require_by_id(self._authorizer, context, operation, topic.name, topic.topic_id)
            return topic
        require(self._authorizer, context, operation, Resource(ResourceType.TOPIC, ref))
        return find_topic(image, ref)

    def _look_up(
        self, context: RequestContext, operation: Operation, image: ClusterImage, ref: PartitionRef
    ) -> tuple[PartitionId, Resource] | TidelogError:
        if isinstance(ref, PartitionId):
            topic = image.topics.get(ref.topic_id)
            return ref, Resource(ResourceType.TOPIC, "" if topic is None else topic.name)
        topic_name, number = ref
        topic = self.find_topic(context, operation, topic_name)
        partition = partition_in(topic, number)
        return (
            partition if isinstance(partition, TidelogError) else (partition, Resource(ResourceType.TOPIC, topic.name))
        )


def check_named(items: Sequence[object]) -> None:
    if not items:
        raise InvalidRequestError("the request names no partition")


def repeated(refs: Iterable[T]) -> set[T]:
    """Return the partitions that a request names more than once."""
    seen: set[T] = set()
    return {ref for ref in refs if ref in seen or seen.add(ref)}  # type: ignore[func-returns-value]


REPEATED = "the request names the partition twice"


def find_leader(replicas: Replicas, partition: PartitionId, leader_epoch: int = -1) -> LeaderReplica:
    """Return the leader replica of this broker. `leader_epoch` is the one that the client knows; -1: any.

    Raises NOT_LEADER_OR_FOLLOWER, LEADER_NOT_AVAILABLE, FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH, or an error for an
    unknown or offline partition. A leader that knows of a newer epoch does not lead any more, even if its metadata
    lacks that epoch: its appends would be truncated.
    """
    replica = _find(replicas, partition, leader_epoch)
    role = replica.role
    if isinstance(role, LeaderReplica):
        if role.state.is_superseded:
            raise NotLeaderOrFollowerError(f"leader epoch {role.leader_epoch} is over", leader=-1)
        known = replicas.image.partition(partition.topic_id, partition.partition)
        if known is not None and known.leader_epoch > role.leader_epoch:
            # The changes of a delta are applied in slices. What this leader rejects is no answer of the next one.
            raise NotLeaderOrFollowerError(f"leader epoch {role.leader_epoch} is over", leader=known.leader)
        return role
    raise _not_served(replicas, replica)


def find_readable(
    replicas: Replicas, partition: PartitionId, leader_epoch: int, rack: str
) -> tuple[Replica, LeaderReplica | FollowerReplica]:
    """As `find_leader`, but a follower serves readers of its own rack while it is in sync and unfenced. A follower
    without a leader sends its readers back to the leader."""
    replica = _find(replicas, partition, leader_epoch)
    role = replica.role
    if isinstance(role, LeaderReplica):
        return replica, role
    own = replicas.image.brokers.get(replicas.me)
    if isinstance(role, FollowerReplica) and rack and own is not None and own.rack == rack:
        if own.is_live and replicas.me in replica.partition.isr:
            return replica, role
        leader = replica.partition.leader
        raise NotLeaderOrFollowerError(f"broker {replicas.me} is not in sync: ask the leader {leader}", leader=leader)
    raise _not_served(replicas, replica)


def leader_hint(replicas: Replicas, partition: PartitionId) -> tuple[int, int]:
    """(leader, leader epoch) as this broker's image has them; -1 for an unknown partition."""
    known = replicas.image.partition(partition.topic_id, partition.partition)
    return (-1, -1) if known is None else (known.leader, known.leader_epoch)


def _find(replicas: Replicas, partition: PartitionId, leader_epoch: int) -> Replica:
    replica = replicas.get(partition)
    if replica is None or replica.is_dropped:
        known = replicas.image.partition(partition.topic_id, partition.partition)
        if known is not None:
            raise NotLeaderOrFollowerError(f"broker {replicas.me} holds no replica of it", leader=known.leader)
        if partition.topic_id in replicas.image.topics:
            raise UnknownTopicOrPartitionError(f"the topic has no partition {partition.partition}")
        raise UnknownTopicIdError(f"topic {partition.topic_id} is not known here")
    current = replica.partition.leader_epoch
    if 0 <= leader_epoch < current:
        raise FencedLeaderEpochError(f"leader epoch {leader_epoch} is over, it is {current}")
    if leader_epoch > current:
        raise UnknownLeaderEpochError(f"leader epoch {leader_epoch} is not known here, it is {current}")
    return replica


def _not_served(replicas: Replicas, replica: Replica) -> TidelogError:
    name, leader = f"{replica.topic}-{replica.partition_id.partition}", replica.partition.leader
    if leader < 0:
        return LeaderNotAvailableError(f"{name} has no leader")
    if leader != replicas.me:
        return NotLeaderOrFollowerError(f"{name} is led by broker {leader}", leader=leader)
    if replica.open_error is not None:
        return replica.open_error
    return LeaderNotAvailableError(f"{name} is not open yet")
