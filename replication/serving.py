"""Whether this broker serves a partition to a client, and what the client has to know if it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.model.errors import (
    FencedLeaderEpochError,
    LeaderNotAvailableError,
    NotLeaderOrFollowerError,
    TidelogError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.ids import PartitionId
from tidelog.replication.following import Following
from tidelog.replication.leading import Leading

if TYPE_CHECKING:
    from tidelog.replication.replica import Replica
    from tidelog.replication.replicas import Replicas


def find_leading(replicas: Replicas, partition: PartitionId, leader_epoch: int = -1) -> Leading:
    """The partition as its leader; `leader_epoch` is what the client knows, -1 for nothing."""
    replica = _find(replicas, partition, leader_epoch)
    if isinstance(replica.role, Leading):
        return replica.role
    raise _not_here(replicas, replica)


def find_readable(
    replicas: Replicas, partition: PartitionId, leader_epoch: int, rack: str
) -> tuple[Replica, Leading | Following]:
    """As `find_leading`; a follower serves readers of its own rack too, while it is in sync and not fenced as far as
    it knows: one that follows nobody sends its readers back to the leader."""
    replica = _find(replicas, partition, leader_epoch)
    role = replica.role
    if isinstance(role, Leading):
        return replica, role
    own = replicas.image.brokers.get(replicas.me)
    if isinstance(role, Following) and rack and own is not None and own.rack == rack:
        if own.is_live and replicas.me in replica.partition.isr:
            return replica, role
        leader = replica.partition.leader
        raise NotLeaderOrFollowerError(f"broker {replicas.me} is not in sync: ask the leader {leader}", leader=leader)
    raise _not_here(replicas, replica)


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
        raise FencedLeaderEpochError(f"epoch {leader_epoch} is over, it is {current}")
    if leader_epoch > current:
        raise UnknownLeaderEpochError(f"epoch {leader_epoch} is not known here, it is {current}")
    return replica


def _not_here(replicas: Replicas, replica: Replica) -> TidelogError:
    name, leader = f"{replica.topic}-{replica.partition_id.partition}", replica.partition.leader
    if leader < 0:
        return LeaderNotAvailableError(f"{name} has no leader")
    if leader != replicas.me:
        return NotLeaderOrFollowerError(f"{name} is led by broker {leader}", leader=leader)
    if replica.offline is not None:
        return replica.offline
    return LeaderNotAvailableError(f"{name} is not open yet")
