"""Admin operations on replicas, leaders, brokers, the controller quorum and the metadata log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from uuid import UUID

from tidelog.client.admin import conversions
from tidelog.client.admin.arguments import online_log_dir, read_names
from tidelog.client.admin.calls import AdminCalls, change, query
from tidelog.client.admin.values import (
    BrokerDescription,
    ClusterDescription,
    DrainedBroker,
    Feature,
    LogDir,
    MetadataEntry,
    MetadataLog,
    MetadataSnapshot,
    Outcomes,
    QuorumDescription,
    Reassignment,
)
from tidelog.client.cluster import error_in
from tidelog.client.consumer.arguments import ByPartition, PartitionLike, read_partitions
from tidelog.client.record import TopicPartition
from tidelog.model.errors import CorruptStateError, InvalidRequestError, StreamClosedError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import cluster_pb2
from tidelog.rpc.v1 import common_pb2 as common

_ENTRY_KINDS = {
    cluster_pb2.MetadataEntry.NO_OP: "no-op",
    cluster_pb2.MetadataEntry.RECORDS: "records",
    cluster_pb2.MetadataEntry.MEMBERSHIP: "membership",
}
_FEATURE_UPDATES = {
    "upgrade": pb.FeatureUpdate.UPGRADE,
    "safe_downgrade": pb.FeatureUpdate.SAFE_DOWNGRADE,
    "unsafe_downgrade": pb.FeatureUpdate.UNSAFE_DOWNGRADE,
}


class ClusterOperations(AdminCalls):
    # Replicas and leaders.

    @change
    async def alter_reassignments(
        self,
        targets: ByPartition[Sequence[int] | None],
        *,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Start to move partitions to these brokers, the preferred leader first; None cancels a reassignment in
        progress. `list_reassignments` returns the progress."""
        rows = [
            pb.Reassignment(topic=topic, partition=number, replicas=brokers or ())
            for (topic, number), brokers in targets.items()
        ]
        request = pb.AlterReassignmentsRequest(partitions=rows, validate_only=validate_only)
        response = await self._ask("Admin", "AlterReassignments", request, is_change=True)
        return conversions.whole(conversions.partition_outcomes(response.partitions), partial=partial)

    @query
    async def list_reassignments(
        self, partitions: Iterable[PartitionLike] | None = None, *, timeout: float | None = None
    ) -> list[Reassignment]:
        """List the reassignments in progress, of these partitions or of all."""
        named = _named(partitions)
        if partitions is not None and not named:
            return []  # to the controller an empty list means all
        request = pb.ListReassignmentsRequest(partitions=named)
        response = await self._ask("Admin", "ListReassignments", request)
        return list(map(conversions.reassignment, response.reassignments))

    @change
    async def elect_leaders(
        self,
        partitions: Iterable[PartitionLike] | None = None,
        *,
        unclean: bool = False,
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Elect the preferred replicas as leaders, of these partitions or of all that need it. ELECTION_NOT_NEEDED
        where they lead already. `unclean` elects any live replica where there is no leader: acknowledged records may
        be lost."""
        named = _named(partitions)
        if partitions is not None and not named:
            raise InvalidRequestError("no partition is named; None means all of the cluster")
        request = pb.ElectLeadersRequest(
            kind=pb.ElectLeadersRequest.UNCLEAN if unclean else pb.ElectLeadersRequest.PREFERRED,
            partitions=named,
            all=partitions is None,
            validate_only=validate_only,
        )
        response = await self._ask("Admin", "ElectLeaders", request, is_change=True)
        return conversions.whole(conversions.partition_outcomes(response.partitions), partial=partial)

    # Brokers.

    @query
    async def describe_cluster(self, *, timeout: float | None = None) -> ClusterDescription:
        """Return cluster id, brokers and active controller."""
        request = cluster_pb2.DescribeClusterRequest()
        return conversions.cluster_description(await self._ask("Cluster", "DescribeCluster", request))

    @query
    async def describe_brokers(
        self, brokers: Iterable[int] | None = None, *, allow_stale: bool = False, timeout: float | None = None
    ) -> list[BrokerDescription]:
        """Describe these brokers, or all registered ones. `allow_stale` as in `describe_topics`."""
        ids = [] if brokers is None else list(brokers)
        if brokers is not None and not ids:
            return []
        request = pb.DescribeBrokersRequest(brokers=ids)
        response = await self._ask("Admin", "DescribeBrokers", request, allow_stale=allow_stale)
        return list(map(conversions.broker_description, response.brokers))

    @change
    async def drain_broker(
        self, broker: int, *, undo: bool = False, validate_only: bool = False, timeout: float | None = None
    ) -> DrainedBroker:
        """Move leaderships away from a broker, and place no new replicas on it; `undo` ends that. Its replicas
        stay: `alter_reassignments` moves them."""
        request = pb.DrainBrokerRequest(broker=broker, undo=undo, validate_only=validate_only)
        response = await self._ask("Admin", "DrainBroker", request, is_change=True)
        return DrainedBroker(response.leads, response.replicas)

    @change
    async def unregister_broker(
        self, broker: int, *, validate_only: bool = False, timeout: float | None = None
    ) -> None:
        """Remove a stopped broker that will not return from the cluster. Rejected while it runs or has replicas."""
        request = pb.UnregisterBrokerRequest(broker=broker, validate_only=validate_only)
        await self._ask("Admin", "UnregisterBroker", request, is_change=True)

    @query
    async def describe_log_dirs(
        self,
        brokers: Iterable[int] | None = None,
        topics: Iterable[str] | None = None,
        *,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[int, tuple[LogDir, ...]]:
        """Return the log directories of these brokers, or of all live ones: usable bytes, and the replicas of these
        topics, or of all."""
        ids = [] if brokers is None else list(brokers)
        names = [] if topics is None else read_names(topics, "topics")
        if (brokers is not None and not ids) or (topics is not None and not names):
            return Outcomes({}, {})
        request = pb.DescribeLogDirsRequest(brokers=ids, topics=names)
        response = await self._ask("Admin", "DescribeLogDirs", request)
        outcomes = conversions.outcomes(
            (row.broker, error_in(row) or conversions.log_dirs(row.directories)) for row in response.brokers
        )
        return conversions.whole(outcomes, partial=partial)

    @change
    async def move_replicas(
        self,
        broker: int,
        to: ByPartition[UUID | str],
        *,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[TopicPartition, None]:
        """Move replicas of a broker to other log directories of it, named by id or path (`describe_log_dirs`). They
        stay in use. Returns when they are moved. A move that takes longer continues; the same call waits for it."""
        directories = (await self.describe_log_dirs([broker]))[broker]
        rows = [
            pb.MovedReplica(topic=topic, partition=number, directory_id=online_log_dir(directories, directory).bytes)
            for (topic, number), directory in to.items()
        ]
        request = pb.MoveReplicasRequest(broker=broker, replicas=rows)
        response = await self._ask("Admin", "MoveReplicas", request, is_change=True)
        return conversions.whole(conversions.partition_outcomes(response.replicas), partial=partial)

    # Features.

    @query
    async def describe_features(self, *, timeout: float | None = None) -> list[Feature]:
        """Return the feature levels of the cluster, and those that its nodes support."""
        response = await self._ask("Admin", "DescribeFeatures", pb.DescribeFeaturesRequest())
        return [Feature(row.name, row.level, row.level_min, row.level_max) for row in response.features]

    @change
    async def update_features(
        self,
        levels: Mapping[str, int],
        *,
        kind: Literal["upgrade", "safe_downgrade", "unsafe_downgrade"] = "upgrade",
        validate_only: bool = False,
        partial: bool = False,
        timeout: float | None = None,
    ) -> Outcomes[str, None]:
        """Change feature levels: {feature: level}."""
        if kind not in _FEATURE_UPDATES:
            raise InvalidRequestError(f"kind={kind!r}: use one of {', '.join(_FEATURE_UPDATES)}")
        rows = [pb.FeatureUpdate(name=name, level=level, kind=_FEATURE_UPDATES[kind]) for name, level in levels.items()]
        request = pb.UpdateFeaturesRequest(features=rows, validate_only=validate_only)
        response = await self._ask("Admin", "UpdateFeatures", request, is_change=True)
        outcomes = conversions.outcomes((row.name, error_in(row)) for row in response.features)
        return conversions.whole(outcomes, partial=partial)

    # The controller quorum.

    @query
    async def describe_quorum(self, *, allow_stale: bool = False, timeout: float | None = None) -> QuorumDescription:
        """Return the controllers and how far each has replicated. `allow_stale` as in `describe_topics`."""
        request = cluster_pb2.DescribeQuorumRequest()
        response = await self._ask("Cluster", "DescribeQuorum", request, allow_stale=allow_stale)
        return conversions.quorum_description(response)

    @change
    async def add_voter(
        self, node: int, directory_id: UUID, endpoints: Mapping[str, str], *, timeout: float | None = None
    ) -> None:
        """Make a running controller a voter, when it has caught up. `endpoints` is {listener: "host:port"}. If it has
        not caught up when time is up, it is not added."""
        request = cluster_pb2.AddVoterRequest(
            node=node, directory_id=directory_id.bytes, endpoints=_voter_endpoints(endpoints)
        )
        await self._ask("Cluster", "AddVoter", request, is_change=True)

    @change
    async def update_voter(
        self, node: int, directory_id: UUID, endpoints: Mapping[str, str], *, timeout: float | None = None
    ) -> None:
        """Change the endpoints of a voter."""
        request = cluster_pb2.UpdateVoterRequest(
            node=node, directory_id=directory_id.bytes, endpoints=_voter_endpoints(endpoints)
        )
        await self._ask("Cluster", "UpdateVoter", request, is_change=True)

    @change
    async def remove_voter(self, node: int, directory_id: UUID | None = None, *, timeout: float | None = None) -> None:
        """Remove a voter; with `directory_id` only if it has this metadata directory."""
        request = cluster_pb2.RemoveVoterRequest(
            node=node, directory_id=b"" if directory_id is None else directory_id.bytes
        )
        await self._ask("Cluster", "RemoveVoter", request, is_change=True)

    # The metadata log.

    @query
    async def read_metadata_log(self, *, allow_stale: bool = False, timeout: float | None = None) -> MetadataLog:
        """Read the committed metadata log into memory, from the last snapshot on. `allow_stale` as in
        `describe_topics`."""
        await self.cluster.refresh()
        request = cluster_pb2.MetadataRecordsRequest(allow_stale=allow_stale)
        exchange = await self.cluster.open(method_named("Cluster", "MetadataRecords"), request)
        snapshot: MetadataSnapshot | None = None
        pieces: list[bytes] = []
        entries: list[MetadataEntry] = []
        try:
            while True:
                part: Any = await exchange.receive()
                self._note_age(part.stale_ms if part.HasField("stale_ms") else None)
                if part.HasField("snapshot"):
                    pieces.append(part.snapshot.data)
                    if part.snapshot.is_last:
                        data = b"".join(pieces)
                        snapshot = MetadataSnapshot(part.snapshot.end_offset, part.snapshot.epoch, data)
                        pieces.clear()
                entries += [
                    MetadataEntry(entry.offset, entry.epoch, _ENTRY_KINDS[entry.kind], entry.data)
                    for entry in part.entries.entries
                ]
        except StreamClosedError:
            if pieces:
                raise CorruptStateError(f"{self.cluster.answered}: a snapshot ended before its last piece") from None
            return MetadataLog(snapshot, tuple(entries))
        finally:
            exchange.close()


def _named(partitions: Iterable[PartitionLike] | None) -> list[common.TopicPartition]:
    return [
        common.TopicPartition(topic=partition.topic, partition=partition.partition)
        for partition in ([] if partitions is None else read_partitions(partitions))
    ]


def _voter_endpoints(endpoints: Mapping[str, str]) -> list[cluster_pb2.VoterEndpoint]:
    return [cluster_pb2.VoterEndpoint(listener=name, address=address) for name, address in endpoints.items()]
