"""Describes and alters configs of topics, brokers and the cluster.

The active controller answers, so that a client sees a change after it was acknowledged. Settings in a node's own file
are described by that node only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidelog.metadata import configs
from tidelog.metadata.config_changes import AlterConfigs
from tidelog.metadata.config_table import Scope
from tidelog.metadata.configs import ConfigEntry
from tidelog.metadata.decision import Outcome
from tidelog.metadata.queries import DescribeConfigs, DescribedConfigs, DescribedTopics, DescribeTopics
from tidelog.metadata.topics import INTERNAL_CONFIGS, INTERNAL_TOPICS, NewTopic
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.maps import Map
from tidelog.services.authorization import CLUSTER, Operation
from tidelog.services.batches import change_in_batches, outcomes_of
from tidelog.services.context import RequestContext
from tidelog.services.node import NodeAccess, Reading
from tidelog.services.node_settings import NodeSetting

QUESTIONS_MAX = 16
"""Questions to the active controller at once, for one request."""
_ERRORS_OF_RESOURCE = frozenset(
    {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.BROKER_ID_NOT_REGISTERED, ErrorCode.INVALID_REQUEST}
)
"""Errors of one resource; all others are errors of the whole request."""

Entries = Mapping[str, ConfigEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigResource:
    type: str
    """`topic`, `broker` or `cluster`."""
    name: str = configs.CLUSTER


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigQuery:
    resources: tuple[ConfigResource, ...]
    with_inherited: bool = False
    """Also return what a topic or a broker inherits: the cluster's entries, and the topic's replication factor."""
    allow_stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceConfigs:
    """The configs of one resource, or its error."""

    entries: tuple[ConfigEntry, ...] = ()
    error: ErrorCode | None = None
    message: str = ""
    replication_factor: int | None = None
    """Of a topic, if it was asked for and the topic was not deleted meanwhile."""
    node_settings: tuple[NodeSetting, ...] = ()
    """Of this node, if the resource is this broker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDescriptions:
    resources: tuple[ResourceConfigs, ...]
    cluster: tuple[ConfigEntry, ...] = ()
    """The cluster's entries, if they were asked for."""
    stale_ms: int | None = None
    """The age of this node's copy, if answers are from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigResourceNames:
    topics: tuple[str, ...]
    brokers: tuple[int, ...]


class ConfigService:
    def __init__(self, node: NodeAccess, node_settings: tuple[NodeSetting, ...] = ()) -> None:
        self._node = node
        self._node_settings = node_settings

    async def describe(self, context: RequestContext, query: ConfigQuery) -> ConfigDescriptions:
        """Return one row for each resource, in order. One that is named several times is asked for once."""
        resources = tuple(dict.fromkeys(query.resources))
        rejections: dict[int, ResourceConfigs] = {}
        for position, resource in enumerate(resources):
            error = self._rejection(context, Operation.DESCRIBE_CONFIGS, resource.type, resource.name)
            if error is not None:
                rejections[position] = _failed(error)
        self._node.guard.charge(context)
        reading = _Reading(self._node, context, allow_stale=query.allow_stale)
        cluster: tuple[ConfigEntry, ...] = ()
        if query.with_inherited and len(rejections) < len(resources):
            cluster = await reading.entries(Scope.CLUSTER.value, configs.CLUSTER)
        rows: list[ResourceConfigs] = []
        for first in range(0, len(resources), QUESTIONS_MAX):
            positions = range(first, min(first + QUESTIONS_MAX, len(resources)))
            if query.allow_stale:  # one after the other: the first one finds out whether there is a controller
                rows += [rejections.get(at) or await self._row(reading, query, resources[at]) for at in positions]
            else:
                rows += await asyncio.gather(
                    *(self._row_or(rejections.get(at), reading, query, resources[at]) for at in positions)
                )
        by_resource = dict(zip(resources, rows, strict=True))
        rows = [by_resource[resource] for resource in query.resources]
        return ConfigDescriptions(resources=tuple(rows), cluster=cluster, stale_ms=reading.stale_ms)

    async def _row_or(
        self, rejection: ResourceConfigs | None, reading: _Reading, query: ConfigQuery, resource: ConfigResource
    ) -> ResourceConfigs:
        return rejection or await self._row(reading, query, resource)

    async def _row(self, reading: _Reading, query: ConfigQuery, resource: ConfigResource) -> ResourceConfigs:
        try:
            entries = await reading.entries(resource.type, resource.name)
        except TidelogError as error:
            if error.code not in _ERRORS_OF_RESOURCE:
                raise
            return _failed(error)
        factor = None
        if query.with_inherited and resource.type == Scope.TOPIC.value:
            factor = await reading.replication_factor(resource.name)
        is_own = resource.type == Scope.BROKER.value and resource.name == str(self._node.cache.node)
        return ResourceConfigs(
            entries=entries, replication_factor=factor, node_settings=self._node_settings if is_own else ()
        )

    async def describe_new_topic(self, context: RequestContext, topic: NewTopic) -> ResourceConfigs:
        """Return the configs of a topic that is created or validated, whether or not this node sees it yet."""
        error = self._node.guard.rejection(context, Operation.DESCRIBE_CONFIGS, topic.name)
        self._node.guard.charge(context)
        if error is not None:
            return _failed(error)
        own = {**(dict(INTERNAL_CONFIGS) if topic.name in INTERNAL_TOPICS else {}), **dict(topic.configs)}
        image = self._node.cache.image
        with_topic = replace(image, configs=image.configs.set((Scope.TOPIC.value, topic.name), Map(own)))
        return ResourceConfigs(entries=configs.describe(with_topic, Scope.TOPIC, topic.name))

    async def list_resources(self, context: RequestContext) -> ConfigResourceNames:
        """Return the resources that have configs, besides the cluster, from this node's copy."""
        self._node.guard.authorize(context, Operation.DESCRIBE_CONFIGS, CLUSTER)
        self._node.guard.charge(context)
        image = self._node.cache.image
        return ConfigResourceNames(topics=tuple(image.topic_ids), brokers=tuple(sorted(image.brokers)))

    async def alter(self, context: RequestContext, request: AlterConfigs) -> list[Outcome]:
        """Return one outcome for each resource, in order. All changes of a resource are made, or none."""
        return await change_in_batches(
            self._node,
            context,
            self._node.deadline(context),
            request.resources,
            name=lambda item: (item.resource_type, item.resource),
            rejection=lambda item: self._rejection(context, Operation.ALTER_CONFIGS, item.resource_type, item.resource),
            request=lambda resources: AlterConfigs(resources=resources, validate_only=request.validate_only),
            rows=outcomes_of,
            failed=lambda item, error: Outcome(item.resource, error.code, str(error)),
        )

    def _rejection(
        self, context: RequestContext, operation: Operation, resource_type: str, name: str
    ) -> TidelogError | None:
        resource = name if resource_type == Scope.TOPIC.value else CLUSTER
        return self._node.guard.rejection(context, operation, resource)


class _Reading(Reading):
    async def entries(self, resource_type: str, name: str) -> tuple[ConfigEntry, ...]:
        reply = await self.ask(DescribeConfigs(resource_type=resource_type, resource=name))
        assert isinstance(reply, DescribedConfigs), "the reply to its question"
        return reply.entries

    async def replication_factor(self, topic_name: str) -> int | None:
        """None if the topic was deleted meanwhile."""
        topic = self._node.cache.image.topic_named(topic_name)
        if topic is not None:
            return len(topic.partitions[0].original_replicas)
        reply = await self.ask(DescribeTopics(names=(topic_name,)))
        assert isinstance(reply, DescribedTopics), "the reply to its question"
        description = reply.topics[0].topic
        return None if description is None else description.replication_factor


def _failed(error: TidelogError) -> ResourceConfigs:
    return ResourceConfigs(error=error.code, message=str(error))
