"""The gRPC service `Admin`: topics, configs, replicas, brokers and features. Every node serves it. Translates only.

The services and the controller fill in and check what a message leaves out, so that every API gives the same errors.
This module checks only what a message can say and a request of the services cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tidelog.metadata import brokers, config_changes, features, partitions, queries, reassignments, topics
from tidelog.metadata.configs import ConfigEntry
from tidelog.metadata.decision import Outcome
from tidelog.model.errors import InvalidRequestError
from tidelog.rpc.grpc.acls import AclHandlers
from tidelog.rpc.grpc.cluster import PARTITIONS_PER_SLICE, endpoint_message
from tidelog.rpc.grpc.errors import as_message, coded, outcome
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common
from tidelog.services.configs import ConfigQuery, ConfigResource
from tidelog.services.context import RequestContext
from tidelog.services.limits import ResponseSize
from tidelog.services.log_dirs import BrokerLogDirs, DescribeLogDirs, MoveReplicas, ReplicaMove
from tidelog.services.replica_digests import DigestQuery, DigestReplica
from tidelog.services.replicas import PartitionOutcome
from tidelog.services.services import Services
from tidelog.services.topic_lookup import read_id, topic_with_id
from tidelog.services.topics import TopicQuery
from tidelog.world.slicing import sliced

RESOURCES_PER_SLICE = 10
"""Resources whose configs are converted in one turn of the event loop."""
_OPERATIONS = {
    pb.ConfigChange.SET: config_changes.SET,
    pb.ConfigChange.DELETE: config_changes.DELETE,
    pb.ConfigChange.APPEND: config_changes.APPEND,
    pb.ConfigChange.SUBTRACT: config_changes.SUBTRACT,
}
_ELECTIONS = {
    pb.ElectLeadersRequest.PREFERRED: partitions.PREFERRED,
    pb.ElectLeadersRequest.UNCLEAN: partitions.UNCLEAN,
}
_UPDATES = {
    pb.FeatureUpdate.UPGRADE: features.UPGRADE,
    pb.FeatureUpdate.SAFE_DOWNGRADE: features.SAFE_DOWNGRADE,
    pb.FeatureUpdate.UNSAFE_DOWNGRADE: features.UNSAFE_DOWNGRADE,
}


class AdminHandlers(AclHandlers):
    def __init__(self, services: Services) -> None:
        self._services = services

    # Topics.

    async def create_topics(self, request: pb.CreateTopicsRequest, caller: RequestContext) -> pb.CreateTopicsResponse:
        new_topics = tuple(
            topics.NewTopic(
                name=topic.name,
                partitions=topic.partitions if topic.HasField("partitions") else -1,
                replication_factor=topic.replication_factor if topic.HasField("replication_factor") else -1,
                assignment=_assignment(topic.assignment),
                configs=tuple((pair.key, pair.value) for pair in topic.configs),
            )
            for topic in request.topics
        )
        create = topics.CreateTopics(topics=new_topics, validate_only=request.validate_only)
        rows = await self._services.topics.create(caller, create)
        return pb.CreateTopicsResponse(
            topics=[
                pb.CreatedTopic(
                    name=row.name,
                    error=outcome(row.error, row.message),
                    topic_id=b"" if row.error is not None else row.topic_id.bytes,
                    partitions=row.partitions,
                    replication_factor=row.replication_factor,
                    note="" if row.error is not None else row.message,
                )
                for row in rows
            ]
        )

    async def delete_topics(self, request: pb.DeleteTopicsRequest, caller: RequestContext) -> pb.DeleteTopicsResponse:
        ids = tuple(read_id(topic_id, "topic id") for topic_id in request.topic_ids)
        delete = topics.DeleteTopics(names=tuple(request.topics), ids=ids, validate_only=request.validate_only)
        rows = await self._services.topics.delete(caller, delete)
        return pb.DeleteTopicsResponse(topics=_outcomes(rows))

    async def describe_topics(
        self, request: pb.DescribeTopicsRequest, caller: RequestContext
    ) -> pb.DescribeTopicsResponse:
        names, topic_ids = tuple(dict.fromkeys(request.topics)), tuple(dict.fromkeys(request.topic_ids))
        ids = tuple(read_id(topic_id, "topic id") for topic_id in topic_ids)
        query = TopicQuery(names=names, ids=ids, all_topics=request.all_topics, allow_stale=request.allow_stale)
        reply = await self._services.topics.describe(caller, query)
        response = pb.DescribeTopicsResponse(stale_ms=reply.stale_ms)
        size, partitions = ResponseSize("topics"), 0
        for row in reply.rows:
            size.check()
            message = _topic_message(row)
            size.add(message.ByteSize())
            response.topics.append(message)
            partitions += 1 if row.topic is None else len(row.topic.partitions)
            if partitions >= PARTITIONS_PER_SLICE:
                partitions = 0
                await asyncio.sleep(0)
        if not request.all_topics:
            for message, topic_id in zip(response.topics[len(names) :], topic_ids, strict=True):
                message.topic_id = topic_id
        return response

    async def add_partitions(
        self, request: pb.AddPartitionsRequest, caller: RequestContext
    ) -> pb.AddPartitionsResponse:
        new_partitions = tuple(
            topics.NewPartitions(name=topic.topic, total=topic.total, assignment=_assignment(topic.assignment))
            for topic in request.topics
        )
        add = topics.AddPartitions(topics=new_partitions, validate_only=request.validate_only)
        rows = await self._services.topics.add_partitions(caller, add)
        return pb.AddPartitionsResponse(topics=_outcomes(rows))

    # Configs.

    async def describe_configs(
        self, request: pb.DescribeConfigsRequest, caller: RequestContext
    ) -> pb.DescribeConfigsResponse:
        keys = frozenset(request.keys)
        query = ConfigQuery(
            resources=tuple(ConfigResource(type=item.type, name=item.name) for item in request.resources),
            allow_stale=request.allow_stale,
        )
        reply = await self._services.configs.describe(caller, query)
        response, size = pb.DescribeConfigsResponse(stale_ms=reply.stale_ms), ResponseSize("resources")
        async for resource, row in sliced(zip(request.resources, reply.resources, strict=True), RESOURCES_PER_SLICE):
            size.check()
            entries = [_config_message(entry) for entry in row.entries if not keys or entry.name in keys]
            response.resources.add(resource=resource, error=outcome(row.error, row.message), entries=entries)
            size.add(response.resources[-1].ByteSize())
        return response

    async def alter_configs(self, request: pb.AlterConfigsRequest, caller: RequestContext) -> pb.AlterConfigsResponse:
        changes = tuple(
            config_changes.ResourceChange(
                resource_type=item.resource.type,
                resource=item.resource.name,
                changes=tuple(
                    config_changes.ConfigChange(
                        key=change.key, operation=_OPERATIONS.get(change.operation, "?"), value=change.value
                    )
                    for change in item.changes
                ),
            )
            for item in request.resources
        )
        alter = config_changes.AlterConfigs(resources=changes, validate_only=request.validate_only)
        rows = await self._services.configs.alter(caller, alter)
        return pb.AlterConfigsResponse(resources=_outcomes(rows))

    # Replicas and leaders.

    async def alter_reassignments(
        self, request: pb.AlterReassignmentsRequest, caller: RequestContext
    ) -> pb.AlterReassignmentsResponse:
        targets = tuple(
            reassignments.ReassignmentTarget(
                topic=item.topic, partition=item.partition, replicas=tuple(item.replicas) or None
            )
            for item in request.partitions
        )
        alter = reassignments.AlterReassignments(partitions=targets, validate_only=request.validate_only)
        rows = await self._services.replicas.alter_reassignments(caller, alter)
        return pb.AlterReassignmentsResponse(partitions=_partition_outcomes(rows))

    async def list_reassignments(
        self, request: pb.ListReassignmentsRequest, caller: RequestContext
    ) -> pb.ListReassignmentsResponse:
        names = self._names(request.partitions) if request.partitions else None
        reply = await self._services.replicas.list_reassignments(caller, names, allow_stale=request.allow_stale)
        return pb.ListReassignmentsResponse(
            stale_ms=reply.stale_ms,
            reassignments=[
                pb.OngoingReassignment(
                    topic=item.topic,
                    partition=item.partition,
                    replicas=item.replicas,
                    target=item.target,
                    adding_replicas=item.adding,
                    removing_replicas=item.removing,
                    waiting_for=item.waiting_for,
                )
                for item in reply.rows
            ],
        )

    async def elect_leaders(self, request: pb.ElectLeadersRequest, caller: RequestContext) -> pb.ElectLeadersResponse:
        if request.all == bool(request.partitions):
            raise InvalidRequestError("name partitions, or set `all`; one of the two")
        elect = partitions.ElectLeaders(
            kind=_ELECTIONS.get(request.kind, "?"),
            partitions=None if request.all else self._names(request.partitions),
            validate_only=request.validate_only,
        )
        rows = await self._services.replicas.elect_leaders(caller, elect)
        return pb.ElectLeadersResponse(partitions=_partition_outcomes(rows))

    def _names(self, items: Iterable[common.TopicPartition]) -> tuple[tuple[str, int], ...]:
        """Return names: the controller knows partitions by the names of their topics."""
        image = self._services.cache.image
        return tuple(
            (
                topic_with_id(image, read_id(item.topic_id, "topic id")).name if item.topic_id else item.topic,
                item.partition,
            )
            for item in items
        )

    # Brokers.

    async def describe_brokers(
        self, request: pb.DescribeBrokersRequest, caller: RequestContext
    ) -> pb.DescribeBrokersResponse:
        reply = await self._services.replicas.describe_brokers(
            caller, tuple(request.brokers), allow_stale=request.allow_stale
        )
        rows = [_broker_message(row) for row in reply.rows]
        return pb.DescribeBrokersResponse(brokers=rows, stale_ms=reply.stale_ms)

    async def drain_broker(self, request: pb.DrainBrokerRequest, caller: RequestContext) -> pb.DrainBrokerResponse:
        drain = brokers.Drain(broker=request.broker, on=not request.undo, validate_only=request.validate_only)
        reply = await self._services.replicas.drain_broker(caller, drain)
        return pb.DrainBrokerResponse(leads=reply.leads, replicas=reply.replicas)

    async def unregister_broker(
        self, request: pb.UnregisterBrokerRequest, caller: RequestContext
    ) -> pb.UnregisterBrokerResponse:
        unregister = brokers.Unregister(broker=request.broker, validate_only=request.validate_only)
        await self._services.replicas.unregister_broker(caller, unregister)
        return pb.UnregisterBrokerResponse()

    # Log directories.

    async def describe_log_dirs(
        self, request: pb.DescribeLogDirsRequest, caller: RequestContext
    ) -> pb.DescribeLogDirsResponse:
        query = DescribeLogDirs(topics=tuple(request.topics))
        rows = await self._services.log_dirs.describe(caller, request.brokers, query)
        return pb.DescribeLogDirsResponse(brokers=[_log_dirs_message(row) for row in rows])

    async def digest_replica(
        self, request: pb.DigestReplicaRequest, caller: RequestContext
    ) -> pb.DigestReplicaResponse:
        query = DigestQuery(
            start=request.start if request.HasField("start") else -1,
            end=request.end if request.HasField("end") else -1,
            by_record=request.by_record,
            lists_units=request.lists_units,
            is_suspect=request.is_suspect,
        )
        topic_id = read_id(request.topic_id, "topic id")
        asked = DigestReplica(topic_id=topic_id, partition=request.partition, query=query)
        replica = await self._services.replica_digests.digest(caller, request.broker, asked)
        return pb.DigestReplicaResponse(
            leader=replica.leader,
            leader_epoch=replica.leader_epoch,
            follows=replica.follows,
            start_offset=replica.start_offset,
            high_watermark=replica.high_watermark,
            generation=replica.generation,
            has_gaps=replica.has_gaps,
            damage=replica.damage,
            reached=replica.reached,
            epoch=replica.epoch,
            count=replica.count,
            bytes=replica.size,
            digest=replica.digest,
            fault=replica.fault,
            units=b"".join(replica.units),
        )

    async def move_replicas(self, request: pb.MoveReplicasRequest, caller: RequestContext) -> pb.MoveReplicasResponse:
        response = pb.MoveReplicasResponse()
        moves = []
        for item in request.replicas:
            row = response.replicas.add(topic=item.topic, partition=item.partition)
            try:
                moves.append((row, _move(item)))
            except InvalidRequestError as error:
                row.error.CopyFrom(as_message(error))
        move = MoveReplicas(replicas=tuple(move for _, move in moves))
        results = await self._services.log_dirs.move(caller, request.broker, move)
        for (row, _), result in zip(moves, results, strict=True):
            if result.error is not None:
                row.error.CopyFrom(coded(result.error, result.message))
        return response

    # Features.

    async def describe_features(
        self, request: pb.DescribeFeaturesRequest, caller: RequestContext
    ) -> pb.DescribeFeaturesResponse:
        reply = await self._services.replicas.describe_features(caller, allow_stale=request.allow_stale)
        rows = [
            pb.Feature(name=row.name, level=row.level, level_min=row.level_min, level_max=row.level_max)
            for row in reply.rows
        ]
        return pb.DescribeFeaturesResponse(features=rows, stale_ms=reply.stale_ms)

    async def update_features(
        self, request: pb.UpdateFeaturesRequest, caller: RequestContext
    ) -> pb.UpdateFeaturesResponse:
        changes = tuple(
            features.FeatureChange(name=item.name, level=item.level, kind=_UPDATES.get(item.kind, "?"))
            for item in request.features
        )
        update = features.UpdateFeatures(changes=changes, validate_only=request.validate_only)
        rows = await self._services.replicas.update_features(caller, update)
        return pb.UpdateFeaturesResponse(features=_outcomes(rows))


# Replies to messages.


def _assignment(rows: Sequence[pb.Replicas]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.brokers) for row in rows)


def _move(item: pb.MovedReplica) -> ReplicaMove:
    return ReplicaMove(
        topic=item.topic,
        topic_id=read_id(item.topic_id, "topic id") if item.topic_id else None,
        partition=item.partition,
        directory_id=read_id(item.directory_id, "directory id"),
    )


def _outcomes(rows: Iterable[Outcome]) -> list[common.Outcome]:
    return [common.Outcome(name=row.name, error=outcome(row.error, row.message)) for row in rows]


def _partition_outcomes(rows: Iterable[PartitionOutcome]) -> list[common.PartitionOutcome]:
    return [
        common.PartitionOutcome(
            topic=row.topic, partition=row.partition, error=outcome(row.outcome.error, row.outcome.message)
        )
        for row in rows
    ]


def _log_dirs_message(row: BrokerLogDirs) -> pb.BrokerLogDirs:
    return pb.BrokerLogDirs(
        broker=row.broker,
        error=outcome(row.error, row.message),
        directories=[
            pb.LogDir(
                directory_id=b"" if directory.directory_id is None else directory.directory_id.bytes,
                path=directory.path,
                error=outcome(directory.error, directory.message),
                usable_bytes=directory.usable_bytes,
                is_full=directory.is_full,
                replicas=[
                    pb.ReplicaSize(
                        topic=replica.topic,
                        topic_id=replica.topic_id.bytes,
                        partition=replica.partition,
                        bytes=replica.size,
                        lag=replica.offset_lag,
                    )
                    for replica in directory.replicas
                    if not replica.is_future
                ],
            )
            for directory in row.directories
        ],
    )


def _config_message(entry: ConfigEntry) -> pb.ConfigEntry:
    return pb.ConfigEntry(
        key=entry.name,
        value=entry.value,
        source=entry.source,
        default_value=entry.default,
        documentation=entry.doc,
        is_dynamic=entry.is_dynamic,
    )


def _topic_message(row: queries.DescribedTopic) -> pb.TopicDescription:
    topic = row.topic
    if topic is None:
        return pb.TopicDescription(name=row.name, error=outcome(row.error, row.message))
    return pb.TopicDescription(
        name=topic.name,
        topic_id=topic.topic_id.bytes,
        is_internal=topic.is_internal,
        replication_factor=topic.replication_factor,
        configs=[pb.ConfigPair(key=key, value=value) for key, value in topic.configs],
        partitions=[_partition_message(partition) for partition in topic.partitions],
    )


def _partition_message(row: queries.PartitionDescription) -> pb.PartitionDescription:
    return pb.PartitionDescription(
        partition=row.partition,
        leader=row.leader,
        leader_epoch=row.leader_epoch,
        partition_epoch=row.partition_epoch,
        replicas=row.replicas,
        isr=row.isr,
        eligible_leader_replicas=row.eligible,
        offline_replicas=row.offline_replicas,
        adding_replicas=row.adding,
        removing_replicas=row.removing,
        start_offset=row.start_offset,
        min_isr=row.min_isr,
        state=row.state,
        advice=row.advice,
    )


def _broker_message(row: queries.BrokerDescription) -> pb.BrokerDescription:
    return pb.BrokerDescription(
        id=row.broker,
        epoch=row.broker_epoch,
        endpoints=[endpoint_message(endpoint) for endpoint in row.endpoints],
        rack=row.rack or "",
        is_fenced=row.is_fenced,
        is_draining=row.is_draining,
        replicas=row.replicas,
        preferred_for=row.preferred_for,
        offline_directories=[directory.bytes for directory in row.offline_directories],
    )
