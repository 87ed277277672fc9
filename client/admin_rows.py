"""Rows of the services `Admin` and `Cluster` as the values of `tidelog.Admin`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar
from uuid import UUID

from tidelog.client.admin_values import (
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    CreatedTopic,
    ListedOffset,
    LogDir,
    Outcomes,
    PartitionDescription,
    QuorumDescription,
    QuorumMember,
    Reassignment,
    ReplicaSize,
    TopicDescription,
)
from tidelog.client.cluster import error_in
from tidelog.client.metadata import address_of
from tidelog.client.offsets import FoundOffset
from tidelog.client.record import TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import cluster_pb2 as cluster_pb

K = TypeVar("K")
V = TypeVar("V")


def outcomes(rows: Iterable[tuple[K, Any, V]]) -> Outcomes[K, V]:
    """Of (item, row, value): the value where the row has no error."""
    done: dict[K, V] = {}
    errors: dict[K, TidelogError] = {}
    for key, row, value in rows:
        error = error_in(row)
        if error is None:
            done[key] = value
        else:
            errors[key] = error
    return Outcomes(done, errors)


def raise_in(row: Any) -> None:
    error = error_in(row)
    if error is not None:
        raise error


def config_text(value: object) -> str:
    """A value as settings have it: true and false, lists with commas, anything else as it is printed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(config_text(one) for one in value)
    return str(value)


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic, number in partitions:
        found.setdefault(topic, []).append(number)
    return found


def _uuid(data: bytes) -> UUID | None:
    return UUID(bytes=data) if len(data) == 16 else None


def created_topic(row: pb.CreatedTopic, *, is_made: bool) -> CreatedTopic:
    topic_id = _uuid(row.topic_id) if is_made else None
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
    )


def config_entries(row: pb.DescribedConfig) -> dict[str, ConfigEntry]:
    return {
        entry.key: ConfigEntry(
            entry.key, entry.value, entry.source, entry.default_value, entry.documentation, entry.is_dynamic
        )
        for entry in row.entries
    }


def reassignment(row: pb.OngoingReassignment) -> Reassignment:
    return Reassignment(
        partition=TopicPartition(row.topic, row.partition),
        replicas=tuple(row.replicas),
        target=tuple(row.target),
        adding_replicas=tuple(row.adding_replicas),
        removing_replicas=tuple(row.removing_replicas),
        waiting_for=tuple(row.waiting_for),
    )


def cluster_description(answer: cluster_pb.DescribeClusterResponse) -> ClusterDescription:
    return ClusterDescription(
        cluster_id=answer.cluster_id,
        controller=answer.controller if answer.controller >= 0 else None,
        brokers=tuple(
            BrokerDescription(
                id=broker.id,
                epoch=broker.epoch,
                endpoints={one.listener: address_of(one.host, one.port) for one in broker.endpoints},
                rack=broker.rack,
                is_fenced=broker.is_fenced,
            )
            for broker in answer.brokers
        ),
        version=answer.version,
    )


def quorum_description(answer: cluster_pb.DescribeQuorumResponse) -> QuorumDescription:
    return QuorumDescription(
        leader=answer.leader if answer.leader >= 0 else None,
        epoch=answer.epoch,
        high_watermark=answer.high_watermark,
        members=tuple(
            QuorumMember(
                node=member.node,
                directory_id=_uuid(member.directory_id),
                endpoints={one.listener: one.address for one in member.endpoints},
                is_voter=member.is_voter,
                is_connected=member.is_connected,
                log_end_offset=member.log_end_offset,
                lag=member.lag,
                error=member.error,
            )
            for member in answer.members
        ),
        observers={one.node: one.offset for one in answer.observers},
    )


def log_dir(row: pb.LogDir) -> LogDir:
    return LogDir(
        directory_id=_uuid(row.directory_id),
        path=row.path,
        usable_bytes=row.usable_bytes if row.usable_bytes >= 0 else None,
        replicas=tuple(
            ReplicaSize(TopicPartition(one.topic, one.partition), one.bytes, one.lag) for one in row.replicas
        ),
        error=error_in(row),
    )


def listed_offset(row: FoundOffset) -> ListedOffset:
    """-1 is what the wire has for what is not there."""
    return ListedOffset(
        row.offset if row.offset >= 0 else None, row.timestamp if row.timestamp >= 0 else None, row.leader_epoch
    )
