"""Converts messages of the services to the values of `tidelog.Admin`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from tidelog.client.admin.values import (
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    CreatedTopic,
    GroupDescription,
    ListedOffset,
    LogDir,
    MemberDescription,
    Outcomes,
    PartitionDescription,
    QuorumDescription,
    QuorumMember,
    Reassignment,
    ReplicaSize,
    TopicDescription,
    TransactionDescription,
    TransactionMember,
)
from tidelog.client.cluster import error_in
from tidelog.client.coordinators import CoordinatorInfo
from tidelog.client.metadata import address_of
from tidelog.client.offsets import FoundOffset
from tidelog.client.record import TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.uuids import to_text
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import cluster_pb2 as cluster_pb
from tidelog.rpc.v1 import groups_pb2 as groups_pb
from tidelog.rpc.v1 import transactions_pb2 as transactions_pb

K = TypeVar("K")
V = TypeVar("V")


def outcomes(results: Iterable[tuple[K, V | TidelogError]]) -> Outcomes[K, V]:
    done: dict[K, V] = {}
    errors: dict[K, TidelogError] = {}
    for key, result in results:
        if isinstance(result, TidelogError):
            errors[key] = result
        else:
            done[key] = result
    return Outcomes(done, errors)


def whole(outcomes: Outcomes[K, V], *, partial: bool) -> Outcomes[K, V]:
    """Raises the first error, unless `partial`."""
    if not partial:
        outcomes.all()
    return outcomes


def partition_outcomes(rows: Iterable[Any]) -> Outcomes[TopicPartition, None]:
    return outcomes((TopicPartition(row.topic, row.partition), error_in(row)) for row in rows)


def config_text(value: object) -> str:
    """Formats a config value: true and false, lists with commas, anything else as `str` does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(config_text, value))
    return str(value)


def _uuid(data: bytes) -> UUID | None:
    return UUID(bytes=data) if len(data) == 16 else None


def created_topic(row: pb.CreatedTopic, *, is_validated_only: bool) -> CreatedTopic:
    topic_id = None if is_validated_only else _uuid(row.topic_id)
    return CreatedTopic(row.name, topic_id, row.partitions, row.replication_factor, row.note)


def topic_description(row: pb.TopicDescription) -> TopicDescription:
    return TopicDescription(
        name=row.name,
        topic_id=_uuid(row.topic_id) or UUID(int=0),
        is_internal=row.is_internal,
        replication_factor=row.replication_factor,
        configs={pair.key: pair.value for pair in row.configs},
        partitions=tuple(map(_partition, row.partitions)),
    )


def _partition(row: pb.PartitionDescription) -> PartitionDescription:
    return PartitionDescription(
        partition=row.partition,
        leader=row.leader if row.leader >= 0 else None,
        leader_epoch=row.leader_epoch,
        replicas=tuple(row.replicas),
        isr=tuple(row.isr),
        eligible_leader_replicas=tuple(row.eligible_leader_replicas),
        offline_replicas=tuple(row.offline_replicas),
        adding_replicas=tuple(row.adding_replicas),
        removing_replicas=tuple(row.removing_replicas),
        min_isr=row.min_isr,
        state=row.state,
        advice=row.advice,
        partition_epoch=row.partition_epoch,
        start_offset=row.start_offset,
    )


def config_entries(row: pb.DescribedConfig) -> dict[str, ConfigEntry]:
    return {
        entry.key: ConfigEntry(
            entry.key, entry.value, entry.source, entry.default_value, entry.documentation, entry.is_dynamic
        )
        for entry in row.entries
    }


def listed_offset(row: FoundOffset) -> ListedOffset:
    """The wire has -1 for an offset or a timestamp that does not exist."""
    return ListedOffset(
        row.offset if row.offset >= 0 else None, row.timestamp if row.timestamp >= 0 else None, row.leader_epoch
    )


# Groups.


def topic_name(name: str, topic_id: bytes) -> str:
    """A deleted topic has no name any more: its id stands for it."""
    return name or to_text(UUID(bytes=topic_id))


def transaction_description(row: transactions_pb.TransactionDescription) -> TransactionDescription:
    return TransactionDescription(
        transactional_id=row.transactional_id,
        coordinator=row.coordinator,
        producer_id=row.producer_id,
        producer_epoch=row.producer_epoch,
        state=row.state,
        timeout_ms=row.transaction_timeout_ms,
        started_ms=None if row.started_ms < 0 else row.started_ms,
        prepared_ms=None if row.prepared_ms < 0 else row.prepared_ms,
        partitions=tuple(TopicPartition(place.topic, place.partition) for place in row.partitions),
        members=tuple(
            TransactionMember(
                producer_id=member.producer_id,
                label=member.label,
                partitions=tuple(TopicPartition(place.topic, place.partition) for place in member.partitions),
            )
            for member in row.members
        ),
        last_token=row.last_token,
    )


def group_description(row: groups_pb.GroupDescription, coordinator: CoordinatorInfo) -> GroupDescription:
    return GroupDescription(
        group=row.group,
        type=row.type,
        state=row.state,
        epoch=row.epoch,
        assignment_epoch=row.assignment_epoch,
        assignor=row.assignor,
        members=tuple(
            MemberDescription(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                host=member.client_host,
                rack=member.rack,
                epoch=member.member_epoch,
                topics=tuple(member.topics),
                pattern=member.pattern,
                assignment=_assigned(member.assignment),
                target=_assigned(member.target),
            )
            for member in row.members
        ),
        coordinator=coordinator.node,
        coordinator_address=coordinator.address,
    )


def _assigned(partitions: groups_pb.Partitions) -> tuple[TopicPartition, ...]:
    return tuple(
        sorted(
            TopicPartition(topic_name(topic.topic, topic.topic_id), number)
            for topic in partitions.topics
            for number in topic.partitions
        )
    )


# The cluster.


def reassignment(row: pb.OngoingReassignment) -> Reassignment:
    return Reassignment(
        partition=TopicPartition(row.topic, row.partition),
        replicas=tuple(row.replicas),
        target=tuple(row.target),
        adding_replicas=tuple(row.adding_replicas),
        removing_replicas=tuple(row.removing_replicas),
        waiting_for=tuple(row.waiting_for),
    )


def _broker(row: cluster_pb.ClusterBroker | pb.BrokerDescription, **details: Any) -> BrokerDescription:
    return BrokerDescription(
        id=row.id,
        epoch=row.epoch,
        endpoints={endpoint.listener: address_of(endpoint.host, endpoint.port) for endpoint in row.endpoints},
        rack=row.rack,
        is_fenced=row.is_fenced,
        **details,
    )


def broker_description(row: pb.BrokerDescription) -> BrokerDescription:
    return _broker(
        row,
        is_draining=row.is_draining,
        replicas=row.replicas,
        preferred_leaderships=row.preferred_for,
        offline_directories=tuple(UUID(bytes=directory) for directory in row.offline_directories),
    )


def cluster_description(response: cluster_pb.DescribeClusterResponse) -> ClusterDescription:
    return ClusterDescription(
        cluster_id=response.cluster_id,
        controller=response.controller if response.controller >= 0 else None,
        brokers=tuple(map(_broker, response.brokers)),
        version=response.version,
    )


def quorum_description(response: cluster_pb.DescribeQuorumResponse) -> QuorumDescription:
    return QuorumDescription(
        leader=response.leader if response.leader >= 0 else None,
        epoch=response.epoch,
        high_watermark=response.high_watermark,
        members=tuple(map(_quorum_member, response.members)),
        observers={observer.node: observer.offset for observer in response.observers},
        node=response.node,
        role=response.role,
        log_start_offset=response.log_start_offset,
        log_end_offset=response.log_end_offset,
        durable_end_offset=response.durable_end_offset,
        without_leader_ms=response.without_leader_ms,
        snapshot_offset=response.snapshot_offset,
        snapshot_epoch=response.snapshot_epoch,
    )


def _quorum_member(row: cluster_pb.QuorumMember) -> QuorumMember:
    # A leader starts at 0 for a member that it has not heard from: that says nothing about the member's log.
    is_unknown = bool(row.error) and row.log_end_offset <= 0
    return QuorumMember(
        node=row.node,
        directory_id=_uuid(row.directory_id),
        endpoints={endpoint.listener: endpoint.address for endpoint in row.endpoints},
        is_voter=row.is_voter,
        is_connected=row.is_connected,
        log_end_offset=-1 if is_unknown else row.log_end_offset,
        lag=-1 if is_unknown else row.lag,
        error=row.error,
        last_response_age_ms=row.silent_ms,
        lag_age_ms=row.stuck_ms,
        is_recovering=row.is_recovering,
    )


def log_dirs(rows: Sequence[pb.LogDir]) -> tuple[LogDir, ...]:
    return tuple(
        LogDir(
            directory_id=_uuid(row.directory_id),
            path=row.path,
            usable_bytes=row.usable_bytes if row.usable_bytes >= 0 else None,
            replicas=tuple(
                ReplicaSize(TopicPartition(replica.topic, replica.partition), replica.bytes, replica.lag)
                for replica in row.replicas
            ),
            error=error_in(row),
            is_full=row.is_full,
        )
        for row in rows
    )
