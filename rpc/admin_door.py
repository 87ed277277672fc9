"""The service `Admin`: topics, configs, replicas, brokers and features. Every node serves it.

A handler turns a message into a request of `metadata.requests`, has the active controller decide it, and turns the
reply back. What a message leaves out and what is wrong with it is the controller's business, so that both front doors
refuse alike; here is only checked what a message could say and a request could not.

Log directories belong to brokers: the broker that is asked forwards to the one that is meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from tidelog.metadata import brokers, describe, partitions, reassignments, settings, topics
from tidelog.metadata.configs import ConfigEntry
from tidelog.metadata.decision import Outcome
from tidelog.metadata.features import KNOWN_FEATURES
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    ErrorCode,
    InvalidRequestError,
    TidelogError,
    UnknownTopicIdError,
)
from tidelog.model.ids import NodeId
from tidelog.rpc.cluster_door import endpoint_message
from tidelog.rpc.door import Caller, method_named
from tidelog.rpc.door_log_dirs import LogDirs
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.door_topics import NamesPartition, read_id, topic_of
from tidelog.rpc.errors import as_message, outcome
from tidelog.rpc.limits import DoorLimits
from tidelog.rpc.v1 import admin_pb2 as pb
from tidelog.rpc.v1 import common_pb2 as common

_OPERATIONS = {
    pb.ConfigChange.SET: settings.SET,
    pb.ConfigChange.DELETE: settings.DELETE,
    pb.ConfigChange.APPEND: settings.APPEND,
    pb.ConfigChange.SUBTRACT: settings.SUBTRACT,
}
_ELECTIONS = {
    pb.ElectLeadersRequest.PREFERRED: partitions.PREFERRED,
    pb.ElectLeadersRequest.UNCLEAN: partitions.UNCLEAN,
}
_UPDATES = {
    pb.FeatureUpdate.UPGRADE: settings.UPGRADE,
    pb.FeatureUpdate.SAFE_DOWNGRADE: settings.SAFE_DOWNGRADE,
    pb.FeatureUpdate.UNSAFE_DOWNGRADE: settings.UNSAFE_DOWNGRADE,
}
_OF_RESOURCE = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.BROKER_ID_NOT_REGISTERED, ErrorCode.INVALID_REQUEST}
)
"""Errors of one config resource; others are of the whole call."""


class _Read(Protocol):
    """A request that changes nothing."""

    @property
    def timeout_ms(self) -> int: ...

    @property
    def allow_stale(self) -> bool: ...


class AdminDoor:
    def __init__(self, link: QuorumLink, limits: DoorLimits, log_dirs: LogDirs | None = None) -> None:
        """`log_dirs` are those of this node, if it is a broker."""
        self._link = link
        self._limits = limits
        self._log_dirs = log_dirs

    async def _ask(self, request: object, timeout_ms: int) -> object:
        return await self._link.ask(request, timeout_ms=self._limits.admin_timeout(timeout_ms))

    async def _read(self, question: object, request: _Read) -> tuple[object, int | None]:
        """The reply, and its age in ms if it is that of this node's copy."""
        timeout_ms = self._limits.admin_timeout(request.timeout_ms)
        if request.allow_stale:
            return await self._link.ask_or_recall(question, timeout_ms=timeout_ms)
        return await self._link.ask(question, timeout_ms=timeout_ms), None

    # Topics.

    async def create_topics(self, request: pb.CreateTopicsRequest, _caller: Caller) -> pb.CreateTopicsResponse:
        wanted = tuple(
            topics.NewTopic(
                name=topic.name,
                partitions=topic.partitions if topic.HasField("partitions") else -1,
                replication_factor=topic.replication_factor if topic.HasField("replication_factor") else -1,
                assignment=_assignment(topic.assignment),
                configs=tuple((pair.key, pair.value) for pair in topic.configs),
            )
            for topic in request.topics
        )
        question = topics.CreateTopics(topics=wanted, validate_only=request.validate_only)
        reply = await self._ask(question, request.timeout_ms)
        assert isinstance(reply, topics.CreatedTopics), "the reply to its request"
        return pb.CreateTopicsResponse(
            topics=[
                pb.CreatedTopic(
                    name=made.name,
                    error=outcome(made.error, made.message),
                    topic_id=b"" if made.error is not None else made.topic_id.bytes,
                    partitions=made.partitions,
                    replication_factor=made.replication_factor,
                    note="" if made.error is not None else made.message,
                )
                for made in reply.topics
            ]
        )

    async def delete_topics(self, request: pb.DeleteTopicsRequest, _caller: Caller) -> pb.DeleteTopicsResponse:
        ids = tuple(read_id(topic_id, "topic id") for topic_id in request.topic_ids)
        question = topics.DeleteTopics(names=tuple(request.topics), ids=ids, validate_only=request.validate_only)
        return pb.DeleteTopicsResponse(topics=_outcomes(await self._ask(question, request.timeout_ms)))

    async def describe_topics(self, request: pb.DescribeTopicsRequest, _caller: Caller) -> pb.DescribeTopicsResponse:
        image = self._link.image
        ids = [read_id(topic_id, "topic id") for topic_id in request.topic_ids]
        # An id that this node has not heard of yet is unknown; one of a topic that was deleted since is so below.
        named = [(topic_id, image.topics[topic_id].name if topic_id in image.topics else None) for topic_id in ids]
        names = (*request.topics, *(name for _, name in named if name is not None))
        question = describe.DescribeTopics(names=None if request.all_topics else names)
        reply, stale_ms = await self._read(question, request)
        assert isinstance(reply, describe.DescribedTopics), "the reply to its question"
        if request.all_topics:
            return pb.DescribeTopicsResponse(
                topics=[_topic_message(found) for found in reply.topics], stale_ms=stale_ms
            )
        rows = [_topic_message(found) for found in reply.topics[: len(request.topics)]]
        rest = iter(reply.topics[len(request.topics) :])
        for topic_id, name in named:
            found = next(rest) if name is not None else None
            if found is not None and found.topic is not None and found.topic.topic_id == topic_id:
                rows.append(_topic_message(found))
            else:
                error = as_message(UnknownTopicIdError(f"there is no topic with id {topic_id}"))
                rows.append(pb.TopicDescription(topic_id=topic_id.bytes, error=error))
        return pb.DescribeTopicsResponse(topics=rows, stale_ms=stale_ms)

    async def add_partitions(self, request: pb.AddPartitionsRequest, _caller: Caller) -> pb.AddPartitionsResponse:
        more = tuple(
            topics.MoreOfTopic(name=topic.topic, total=topic.total, assignment=_assignment(topic.assignment))
            for topic in request.topics
        )
        question = topics.AddPartitions(topics=more, validate_only=request.validate_only)
        return pb.AddPartitionsResponse(topics=_outcomes(await self._ask(question, request.timeout_ms)))

    # Configs.

    async def describe_configs(self, request: pb.DescribeConfigsRequest, _caller: Caller) -> pb.DescribeConfigsResponse:
        keys = frozenset(request.keys)
        response = pb.DescribeConfigsResponse()
        for resource in request.resources:
            question = describe.DescribeConfigs(resource_type=resource.type, resource=resource.name)
            row = response.resources.add(resource=resource)
            try:
                reply = await self._resource(question, request, response)
            except TidelogError as error:
                if error.code not in _OF_RESOURCE:
                    raise
                row.error.CopyFrom(as_message(error))
                continue
            assert isinstance(reply, describe.DescribedConfigs), "the reply to its question"
            row.entries.extend(_config_message(entry) for entry in reply.entries if not keys or entry.name in keys)
        return response

    async def _resource(
        self, question: object, request: pb.DescribeConfigsRequest, response: pb.DescribeConfigsResponse
    ) -> object:
        """The reply about one of several resources. An active controller is waited for once, not for each of them; what
        follows is of this node's copy, and so are its errors."""
        timeout_ms = self._limits.admin_timeout(request.timeout_ms)
        if not request.allow_stale:
            return await self._link.ask(question, timeout_ms=timeout_ms)
        if not response.HasField("stale_ms"):
            reply, stale_ms = await self._link.prefer_active(self._link.ask(question, timeout_ms=timeout_ms))
            if stale_ms is None:
                return reply
            response.stale_ms = stale_ms
        return self._link.recall(question)

    async def alter_configs(self, request: pb.AlterConfigsRequest, _caller: Caller) -> pb.AlterConfigsResponse:
        wanted = tuple(
            settings.ResourceChange(
                resource_type=item.resource.type,
                resource=item.resource.name,
                changes=tuple(
                    settings.ConfigChange(
                        key=change.key, operation=_OPERATIONS.get(change.operation, "?"), value=change.value
                    )
                    for change in item.changes
                ),
            )
            for item in request.resources
        )
        question = settings.AlterConfigs(resources=wanted, validate_only=request.validate_only)
        return pb.AlterConfigsResponse(resources=_outcomes(await self._ask(question, request.timeout_ms)))

    # Replicas and leaders.

    async def alter_reassignments(
        self, request: pb.AlterReassignmentsRequest, _caller: Caller
    ) -> pb.AlterReassignmentsResponse:
        wanted = tuple(
            reassignments.Reassigned(topic=item.topic, partition=item.partition, replicas=tuple(item.replicas) or None)
            for item in request.partitions
        )
        question = reassignments.AlterReassignments(partitions=wanted, validate_only=request.validate_only)
        reply = await self._ask(question, request.timeout_ms)
        named = [(item.topic, item.partition) for item in wanted]
        return pb.AlterReassignmentsResponse(partitions=_partition_outcomes(named, reply))

    async def list_reassignments(
        self, request: pb.ListReassignmentsRequest, _caller: Caller
    ) -> pb.ListReassignmentsResponse:
        named = self._named(request.partitions) if request.partitions else None
        reply, stale_ms = await self._read(describe.ListReassignments(partitions=named), request)
        assert isinstance(reply, describe.ListedReassignments), "the reply to its question"
        return pb.ListReassignmentsResponse(
            stale_ms=stale_ms,
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
                for item in reply.reassignments
            ],
        )

    async def elect_leaders(self, request: pb.ElectLeadersRequest, _caller: Caller) -> pb.ElectLeadersResponse:
        if request.all == bool(request.partitions):
            raise InvalidRequestError("name partitions, or say `all`; one of the two")
        named = None if request.all else self._named(request.partitions)
        kind = _ELECTIONS.get(request.kind, "?")
        question = partitions.ElectLeaders(kind=kind, partitions=named, validate_only=request.validate_only)
        reply = await self._ask(question, request.timeout_ms)
        if named is None:
            # The controller chose them, and labels each `topic-partition`.
            labels = [item.name.rpartition("-") for item in _items(reply)]
            named = tuple((topic, int(number)) for topic, _, number in labels)
        return pb.ElectLeadersResponse(partitions=_partition_outcomes(named, reply))

    def _named(self, wanted: Iterable[NamesPartition]) -> tuple[tuple[str, int], ...]:
        """By name, as the controller takes them."""
        image = self._link.image
        return tuple(
            (topic_of(image, name="", topic_id=item.topic_id).name if item.topic_id else item.topic, item.partition)
            for item in wanted
        )

    # Brokers.

    async def describe_brokers(self, request: pb.DescribeBrokersRequest, _caller: Caller) -> pb.DescribeBrokersResponse:
        reply, stale_ms = await self._read(describe.DescribeBrokers(), request)
        assert isinstance(reply, describe.DescribedBrokers), "the reply to its question"
        known = {found.broker: found for found in reply.brokers}
        for broker in request.brokers:
            if broker not in known:
                raise BrokerNotRegisteredError(f"broker {broker} is not registered")
        wanted = request.brokers or sorted(known)
        rows = [_broker_message(known[broker]) for broker in wanted]
        return pb.DescribeBrokersResponse(brokers=rows, stale_ms=stale_ms)

    async def drain_broker(self, request: pb.DrainBrokerRequest, _caller: Caller) -> pb.DrainBrokerResponse:
        question = brokers.Drain(broker=request.broker, on=not request.undo, validate_only=request.validate_only)
        reply = await self._ask(question, request.timeout_ms)
        assert isinstance(reply, brokers.Drained), "the reply to its request"
        return pb.DrainBrokerResponse(leads=reply.leads, replicas=reply.replicas)

    async def unregister_broker(
        self, request: pb.UnregisterBrokerRequest, _caller: Caller
    ) -> pb.UnregisterBrokerResponse:
        question = brokers.Unregister(broker=request.broker, validate_only=request.validate_only)
        await self._ask(question, request.timeout_ms)
        return pb.UnregisterBrokerResponse()

    # Log directories.

    async def describe_log_dirs(self, request: pb.DescribeLogDirsRequest, caller: Caller) -> pb.DescribeLogDirsResponse:
        timeout_ms = self._limits.admin_timeout(request.timeout_ms)
        wanted = list(request.brokers) or [broker.broker for broker in self._link.image.live_brokers()]
        if caller.is_node and wanted != [self._link.me]:
            raise InvalidRequestError(f"this is node {self._link.me}")
        rows = await asyncio.gather(*(self._log_dirs_of(broker, request, timeout_ms) for broker in wanted))
        return pb.DescribeLogDirsResponse(brokers=rows)

    async def _log_dirs_of(self, broker: int, request: pb.DescribeLogDirsRequest, timeout_ms: int) -> pb.BrokerLogDirs:
        try:
            if broker == self._link.me and self._log_dirs is not None:
                found = await self._log_dirs.describe(self._link.image, frozenset(request.topics))
                return pb.BrokerLogDirs(broker=broker, directories=found)
            self._check_broker(broker)
            asked = pb.DescribeLogDirsRequest(brokers=[broker], topics=request.topics, timeout_ms=timeout_ms)
            method = method_named("Admin", "DescribeLogDirs")
            response = await self._link.forward_to(NodeId(broker), method, asked, timeout_ms=timeout_ms)
            row: pb.BrokerLogDirs = response.brokers[0]
            return row
        except TidelogError as error:
            return pb.BrokerLogDirs(broker=broker, error=as_message(error))

    def _check_broker(self, broker: int) -> None:
        if broker == self._link.me:
            raise InvalidRequestError(f"node {broker} has no log directories: it is not a broker")
        if broker not in self._link.image.brokers:
            raise BrokerNotRegisteredError(f"broker {broker} is not registered")

    async def move_replicas(self, request: pb.MoveReplicasRequest, caller: Caller) -> pb.MoveReplicasResponse:
        timeout_ms = self._limits.admin_timeout(request.timeout_ms)
        if request.broker == self._link.me and self._log_dirs is not None:
            rows = await self._log_dirs.move(self._link.image, request.replicas, timeout_ms=timeout_ms)
            return pb.MoveReplicasResponse(replicas=rows)
        if caller.is_node:
            raise InvalidRequestError(f"this is node {self._link.me}")
        self._check_broker(request.broker)
        method = method_named("Admin", "MoveReplicas")
        found = await self._link.forward_to(NodeId(request.broker), method, request, timeout_ms=timeout_ms)
        assert isinstance(found, pb.MoveReplicasResponse), "the response of its method"
        return found

    # Features.

    async def describe_features(
        self, request: pb.DescribeFeaturesRequest, _caller: Caller
    ) -> pb.DescribeFeaturesResponse:
        reply, stale_ms = await self._read(describe.DescribeFeatures(), request)
        assert isinstance(reply, describe.DescribedFeatures), "the reply to its question"
        levels = dict(reply.levels)
        rows = []
        for name in sorted({*levels, *KNOWN_FEATURES}):
            low, high = KNOWN_FEATURES.get(name, (0, 0))
            rows.append(pb.Feature(name=name, level=levels.get(name, 0), level_min=low, level_max=high))
        return pb.DescribeFeaturesResponse(features=rows, stale_ms=stale_ms)

    async def update_features(self, request: pb.UpdateFeaturesRequest, _caller: Caller) -> pb.UpdateFeaturesResponse:
        changes = tuple(
            settings.FeatureChange(name=item.name, level=item.level, kind=_UPDATES.get(item.kind, "?"))
            for item in request.features
        )
        question = settings.UpdateFeatures(changes=changes, validate_only=request.validate_only)
        return pb.UpdateFeaturesResponse(features=_outcomes(await self._ask(question, request.timeout_ms)))


# Replies to messages.


def _assignment(rows: Sequence[pb.Replicas]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.brokers) for row in rows)


def _items(reply: object) -> tuple[Outcome, ...]:
    assert isinstance(reply, topics.Outcomes), "one outcome for each item"
    return reply.items


def _outcomes(reply: object) -> list[common.Outcome]:
    return [common.Outcome(name=item.name, error=outcome(item.error, item.message)) for item in _items(reply)]


def _partition_outcomes(named: Sequence[tuple[str, int]], reply: object) -> list[common.PartitionOutcome]:
    return [
        common.PartitionOutcome(topic=topic, partition=number, error=outcome(item.error, item.message))
        for (topic, number), item in zip(named, _items(reply), strict=True)
    ]


def _config_message(entry: ConfigEntry) -> pb.ConfigEntry:
    return pb.ConfigEntry(
        key=entry.name,
        value=entry.value,
        source=entry.source,
        default_value=entry.default,
        documentation=entry.doc,
        is_dynamic=entry.is_dynamic,
    )


def _topic_message(found: describe.DescribedTopic) -> pb.TopicDescription:
    topic = found.topic
    if topic is None:
        return pb.TopicDescription(name=found.name, error=outcome(found.error, found.message))
    return pb.TopicDescription(
        name=topic.name,
        topic_id=topic.topic_id.bytes,
        is_internal=topic.is_internal,
        replication_factor=topic.replication_factor,
        configs=[pb.ConfigPair(key=key, value=value) for key, value in topic.configs],
        partitions=[_partition_message(row) for row in topic.partitions],
    )


def _partition_message(row: describe.PartitionDescription) -> pb.PartitionDescription:
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


def _broker_message(found: describe.BrokerDescription) -> pb.BrokerDescription:
    return pb.BrokerDescription(
        id=found.broker,
        epoch=found.broker_epoch,
        endpoints=[endpoint_message(endpoint) for endpoint in found.endpoints],
        rack=found.rack or "",
        is_fenced=found.is_fenced,
        is_draining=found.is_draining,
        replicas=found.replicas,
        preferred_for=found.preferred_for,
        offline_directories=[directory.bytes for directory in found.offline_directories],
    )
