"""`AdminClient`: the calls of the services `Admin` and `Cluster`, one method each, asked of any node.

Answers are the messages of `tidelog.v1`: each item of an answer has its own `error` (see `client.cluster.error_in`);
what concerns the whole call is raised. A question may be repeated and is; a change is repeated only if the node says
that it was not begun. A change whose answer was lost raises, and may have been made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from google.protobuf.message import Message

from tidelog.client.cluster import ClusterClient, error_in
from tidelog.model.errors import InvalidRequestError, StreamClosedError
from tidelog.rpc.door import method_named
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import cluster_pb2 as cluster_pb
from tidelog.rpc.v1 import common_pb2 as common

_SLACK_MS = 2_000
"""The client waits a little longer than the server tries, so that the server's own word arrives."""


def topic_partitions(places: Mapping[str, Sequence[int]]) -> list[common.TopicPartition]:
    return [
        common.TopicPartition(topic=topic, partition=number) for topic, numbers in places.items() for number in numbers
    ]


class AdminClient:
    def __init__(self, cluster: ClusterClient, *, timeout_ms: int | None = None, allow_stale: bool = False) -> None:
        """`allow_stale`: without an active controller a node answers with what it knows, and `stale_ms` says how old
        that is."""
        self.cluster = cluster
        self.timeout_ms = timeout_ms or cluster.config.request_timeout_ms
        self.allow_stale = allow_stale
        self.stale_ms: int | None = None
        """Age of the oldest answer that was not of an active controller; None if there was none."""

    async def _ask(self, name: str, request: Any, *, service: str = "Admin", is_change: bool = False) -> Any:
        fields = request.DESCRIPTOR.fields_by_name
        timeout_ms = self.timeout_ms
        if "timeout_ms" in fields:
            if not request.timeout_ms:
                request.timeout_ms = timeout_ms
            timeout_ms = request.timeout_ms
        if "allow_stale" in fields:
            request.allow_stale = self.allow_stale
        is_repeatable = not is_change or ("validate_only" in fields and request.validate_only)
        method = method_named(service, name)
        answer = await self.cluster.call(
            method, request, timeout_ms=timeout_ms + _SLACK_MS, is_repeatable=is_repeatable
        )
        if "stale_ms" in answer.DESCRIPTOR.fields_by_name and answer.HasField("stale_ms"):
            self.stale_ms = max(answer.stale_ms, self.stale_ms or 0)
        return answer

    # Topics.

    async def create_topics(
        self, topics: Sequence[pb.NewTopic], *, validate_only: bool = False
    ) -> Sequence[pb.CreatedTopic]:
        request = pb.CreateTopicsRequest(topics=topics, validate_only=validate_only)
        answer: pb.CreateTopicsResponse = await self._ask("CreateTopics", request, is_change=True)
        return answer.topics

    async def delete_topics(
        self, names: Sequence[str] = (), *, topic_ids: Sequence[bytes] = (), validate_only: bool = False
    ) -> Sequence[common.Outcome]:
        request = pb.DeleteTopicsRequest(topics=names, topic_ids=topic_ids, validate_only=validate_only)
        answer: pb.DeleteTopicsResponse = await self._ask("DeleteTopics", request, is_change=True)
        return answer.topics

    async def describe_topics(self, names: Sequence[str] | None = None) -> Sequence[pb.TopicDescription]:
        """None: all of them."""
        request = pb.DescribeTopicsRequest(topics=names or (), all_topics=names is None)
        answer: pb.DescribeTopicsResponse = await self._ask("DescribeTopics", request)
        return answer.topics

    async def add_partitions(
        self, topics: Sequence[pb.MorePartitions], *, validate_only: bool = False
    ) -> Sequence[common.Outcome]:
        request = pb.AddPartitionsRequest(topics=topics, validate_only=validate_only)
        answer: pb.AddPartitionsResponse = await self._ask("AddPartitions", request, is_change=True)
        return answer.topics

    # Configs.

    async def describe_configs(
        self, resources: Sequence[pb.ConfigResource], *, keys: Sequence[str] = ()
    ) -> Sequence[pb.DescribedConfig]:
        request = pb.DescribeConfigsRequest(resources=resources, keys=keys)
        answer: pb.DescribeConfigsResponse = await self._ask("DescribeConfigs", request)
        return answer.resources

    async def alter_configs(
        self, resources: Sequence[pb.AlteredConfig], *, validate_only: bool = False
    ) -> Sequence[common.Outcome]:
        request = pb.AlterConfigsRequest(resources=resources, validate_only=validate_only)
        answer: pb.AlterConfigsResponse = await self._ask("AlterConfigs", request, is_change=True)
        return answer.resources

    # Replicas and leaders.

    async def alter_reassignments(
        self, partitions: Sequence[pb.Reassignment], *, validate_only: bool = False
    ) -> Sequence[common.PartitionOutcome]:
        request = pb.AlterReassignmentsRequest(partitions=partitions, validate_only=validate_only)
        answer: pb.AlterReassignmentsResponse = await self._ask("AlterReassignments", request, is_change=True)
        return answer.partitions

    async def list_reassignments(
        self, partitions: Mapping[str, Sequence[int]] | None = None
    ) -> Sequence[pb.OngoingReassignment]:
        request = pb.ListReassignmentsRequest(partitions=topic_partitions(partitions or {}))
        answer: pb.ListReassignmentsResponse = await self._ask("ListReassignments", request)
        return answer.reassignments

    async def elect_leaders(
        self,
        partitions: Mapping[str, Sequence[int]] | None = None,
        *,
        is_unclean: bool = False,
        validate_only: bool = False,
    ) -> Sequence[common.PartitionOutcome]:
        """None: all partitions that need it."""
        request = pb.ElectLeadersRequest(
            kind=pb.ElectLeadersRequest.UNCLEAN if is_unclean else pb.ElectLeadersRequest.PREFERRED,
            partitions=topic_partitions(partitions or {}),
            all=partitions is None,
            validate_only=validate_only,
        )
        answer: pb.ElectLeadersResponse = await self._ask("ElectLeaders", request, is_change=True)
        return answer.partitions

    # Brokers.

    async def describe_brokers(self, brokers: Sequence[int] = ()) -> Sequence[pb.BrokerDescription]:
        request = pb.DescribeBrokersRequest(brokers=brokers)
        answer: pb.DescribeBrokersResponse = await self._ask("DescribeBrokers", request)
        return answer.brokers

    async def drain_broker(
        self, broker: int, *, undo: bool = False, validate_only: bool = False
    ) -> pb.DrainBrokerResponse:
        request = pb.DrainBrokerRequest(broker=broker, undo=undo, validate_only=validate_only)
        answer: pb.DrainBrokerResponse = await self._ask("DrainBroker", request, is_change=True)
        return answer

    async def unregister_broker(self, broker: int, *, validate_only: bool = False) -> None:
        request = pb.UnregisterBrokerRequest(broker=broker, validate_only=validate_only)
        await self._ask("UnregisterBroker", request, is_change=True)

    async def describe_log_dirs(
        self, brokers: Sequence[int] = (), *, topics: Sequence[str] = ()
    ) -> Sequence[pb.BrokerLogDirs]:
        request = pb.DescribeLogDirsRequest(brokers=brokers, topics=topics)
        answer: pb.DescribeLogDirsResponse = await self._ask("DescribeLogDirs", request)
        return answer.brokers

    async def working_log_dirs(self, broker: int) -> dict[str, UUID]:
        """Ids of a broker's log directories that work, by path; raises its error."""
        (found,) = await self.describe_log_dirs([broker])
        if (error := error_in(found)) is not None:
            raise error
        working = [one for one in found.directories if one.directory_id and not one.HasField("error")]
        return {one.path: UUID(bytes=one.directory_id) for one in working}

    async def move_replicas(
        self, broker: int, replicas: Sequence[pb.MovedReplica]
    ) -> Sequence[common.PartitionOutcome]:
        request = pb.MoveReplicasRequest(broker=broker, replicas=replicas)
        answer: pb.MoveReplicasResponse = await self._ask("MoveReplicas", request, is_change=True)
        return answer.replicas

    # Features.

    async def describe_features(self) -> Sequence[pb.Feature]:
        answer: pb.DescribeFeaturesResponse = await self._ask("DescribeFeatures", pb.DescribeFeaturesRequest())
        return answer.features

    async def update_features(
        self, features: Sequence[pb.FeatureUpdate], *, validate_only: bool = False
    ) -> Sequence[common.Outcome]:
        request = pb.UpdateFeaturesRequest(features=features, validate_only=validate_only)
        answer: pb.UpdateFeaturesResponse = await self._ask("UpdateFeatures", request, is_change=True)
        return answer.features

    # The cluster and its quorum.

    async def describe_cluster(self) -> cluster_pb.DescribeClusterResponse:
        request = cluster_pb.DescribeClusterRequest()
        answer: cluster_pb.DescribeClusterResponse = await self._ask("DescribeCluster", request, service="Cluster")
        return answer

    async def describe_quorum(self, *, local: bool = False) -> cluster_pb.DescribeQuorumResponse:
        request = cluster_pb.DescribeQuorumRequest(local=local)
        answer: cluster_pb.DescribeQuorumResponse = await self._ask("DescribeQuorum", request, service="Cluster")
        return answer

    async def add_voter(
        self, node: int, directory_id: bytes, endpoints: Mapping[str, str], *, timeout_ms: int = 60_000
    ) -> None:
        request = cluster_pb.AddVoterRequest(
            node=node, directory_id=directory_id, endpoints=_voter_endpoints(endpoints), timeout_ms=timeout_ms
        )
        await self._ask("AddVoter", request, service="Cluster", is_change=True)

    async def remove_voter(self, node: int, directory_id: bytes = b"") -> None:
        request = cluster_pb.RemoveVoterRequest(node=node, directory_id=directory_id)
        await self._ask("RemoveVoter", request, service="Cluster", is_change=True)

    async def update_voter(self, node: int, endpoints: Mapping[str, str], directory_id: bytes = b"") -> None:
        request = cluster_pb.UpdateVoterRequest(
            node=node, directory_id=directory_id, endpoints=_voter_endpoints(endpoints)
        )
        await self._ask("UpdateVoter", request, service="Cluster", is_change=True)

    async def metadata_records(self, *, from_offset: int = 0, follow: bool = False) -> AsyncIterator[Message]:
        """The parts of the committed metadata log, as they come. Close it (`aclose`) to end it early."""
        await self.cluster.refresh()
        request = cluster_pb.MetadataRecordsRequest(from_offset=from_offset, follow=follow)
        exchange = await self.cluster.open(method_named("Cluster", "MetadataRecords"), request)
        try:
            while True:
                yield await exchange.receive()
        except StreamClosedError:
            return
        finally:
            exchange.close()


def directory_named(working: Mapping[str, UUID], wanted: UUID | str) -> UUID:
    """The id of one of `working_log_dirs`, by id or path; raises `InvalidRequestError`."""
    known = {**{str(one): one for one in working.values()}, **working}
    found = known.get(str(wanted).rstrip("/") or "/")
    if found is None:
        raise InvalidRequestError(f"no working log directory {str(wanted)!r}; there are: {', '.join(sorted(working))}")
    return found


def _voter_endpoints(endpoints: Mapping[str, str]) -> list[cluster_pb.VoterEndpoint]:
    return [cluster_pb.VoterEndpoint(listener=name, address=address) for name, address in endpoints.items()]
