"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs: settings of topics, brokers and the cluster.

    resource of Kafka       here
    TOPIC                   a topic
    BROKER, an id           one broker; whichever broker is asked, since settings are the cluster's state. What stands
                            in a node's own file is shown by that node, which is the one that Kafka's clients ask
    BROKER, no name         the cluster: what holds for every broker
    GROUP                   told, read-only: groups go by the cluster's `group.consumer.*`
    BROKER_LOGGER, others   refused

The active controller answers, so that a change is seen by whoever asks after it. An answer has a row for each resource
and no place for an error of the whole request, so such an error stands in every row.

AlterConfigs is Kafka's first way to change settings: what it does not name goes back to its default. The controller
does so in one decision, so that two clients do not mix their settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from tidelog.metadata import settings
from tidelog.metadata.config_table import TABLES, Scope
from tidelog.metadata.configs import CLUSTER
from tidelog.metadata.decision import Outcome
from tidelog.metadata.describe import DescribeConfigs, DescribedConfigs, DescribedTopics, DescribeTopics
from tidelog.metadata.topics import Outcomes
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.rpc.kafka import config_rows, errors
from tidelog.rpc.kafka.config_rows import ConfigRow, Entries, by_name
from tidelog.rpc.kafka.deadline import Deadline
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import ALTER_CONFIGS, DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from tidelog.rpc.kafka.messages.configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
    IncrementalAlterConfigsResponse,
)
from tidelog.rpc.kafka.pieces import pieces
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import EncodedRows

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
_REFUSALS = {
    BROKER_LOGGER: "log levels are set where a broker is started, not here",
    CLIENT_METRICS: "brokers take no metrics of clients, so there is nothing to set",
}
_OPERATIONS = {0: settings.SET, 1: settings.DELETE, 2: settings.APPEND, 3: settings.SUBTRACT}
_TOLD = frozenset({TOPIC, BROKER, GROUP})
RESOURCES_AT_A_TIME = 16
"""That the active controller is asked about by one request."""

Changed = AlterConfigsResource | IncrementalAlterConfigsResource
R = TypeVar("R", AlterConfigsResource, IncrementalAlterConfigsResource)


def _resource(resource_type: int, name: str) -> tuple[str, str]:
    """The type and name of a resource as the controller knows it."""
    if resource_type == TOPIC:
        return Scope.TOPIC.value, name
    if resource_type == BROKER:
        return (Scope.BROKER.value, name) if name else (Scope.CLUSTER.value, CLUSTER)
    raise InvalidRequestError(
        _REFUSALS.get(resource_type, f"there are no settings of resources of type {resource_type}")
    )


# DescribeConfigs.


async def describe_configs(request: DescribeConfigsRequest, context: Context) -> DescribeConfigsResponse:
    """Rows are encoded as they come: there may be thousands of topics, with dozens of keys each."""
    described = _Described(request, context)
    await described.prepare()
    rows = EncodedRows()
    for first in range(0, len(request.resources), RESOURCES_AT_A_TIME):
        some = request.resources[first : first + RESOURCES_AT_A_TIME]
        results = await asyncio.gather(*(described.result(resource) for resource in some))
        rows.add(len(results), DESCRIBE_CONFIGS.encode_rows(context.version, DescribeConfigsResult, results))
        await asyncio.sleep(0)
    return DescribeConfigsResponse(results=cast("list[DescribeConfigsResult]", rows))


class _Described:
    """One request. What holds for the cluster is asked once."""

    def __init__(self, request: DescribeConfigsRequest, context: Context) -> None:
        self._request = request
        self._link = context.services.link
        self._node_settings = context.services.node_settings
        self._cluster: Entries = {}
        self._deadline = Deadline(context.services.limits.admin_timeout_ms)
        self._failed: TidelogError | None = None
        """Why there is no answer for any resource."""

    async def prepare(self) -> None:
        try:
            if any(resource.resource_type in _TOLD for resource in self._request.resources):
                self._cluster = await self._entries(Scope.CLUSTER.value, CLUSTER)
        except TidelogError as error:
            self._failed = error

    async def result(self, resource: DescribeConfigsResource) -> DescribeConfigsResult:
        kind, name = resource.resource_type, resource.resource_name
        try:
            rows = await self._rows(kind, name)
        except TidelogError as error:
            return DescribeConfigsResult(
                error_code=errors.code_of(error),
                error_message=errors.message_of(error),
                resource_type=kind,
                resource_name=name,
            )
        keys = frozenset(resource.configuration_keys or ())
        found = [self._entry(row) for row in rows if not keys or row.name in keys]
        return DescribeConfigsResult(error_message=None, resource_type=kind, resource_name=name, configs=found)

    async def _rows(self, kind: int, name: str) -> list[ConfigRow]:
        if self._failed is not None:
            raise self._failed
        if kind == GROUP:
            if not name:
                raise InvalidRequestError("a group has a name")
            return config_rows.group_rows(self._cluster)
        scope, resource = _resource(kind, name)
        if scope == Scope.CLUSTER.value:
            return config_rows.cluster_rows(self._cluster)
        own = await self._entries(scope, resource)
        if scope == Scope.BROKER.value:
            rows = config_rows.broker_rows(own, self._cluster)
            if resource == str(self._link.me):
                rows += config_rows.node_rows(self._node_settings)
            return rows
        return config_rows.topic_rows(own, self._cluster, replication_factor=await self._replication_factor(name))

    async def _entries(self, scope: str, resource: str) -> Entries:
        question = DescribeConfigs(resource_type=scope, resource=resource)
        reply = await self._link.ask(question, timeout_ms=self._deadline.left_ms())
        assert isinstance(reply, DescribedConfigs), "the reply to its question"
        return by_name(reply.entries)

    async def _replication_factor(self, name: str) -> int | None:
        """None if it is deleted this very moment."""
        topic = self._link.image.topic_named(name)
        if topic is not None:
            return len(topic.partitions[0].settled)
        reply = await self._link.ask(DescribeTopics(names=(name,)), timeout_ms=self._deadline.left_ms())
        assert isinstance(reply, DescribedTopics), "the reply to its question"
        found = reply.topics[0].topic
        return None if found is None else found.replication_factor

    def _entry(self, row: ConfigRow) -> DescribeConfigsResourceResult:
        request = self._request
        return DescribeConfigsResourceResult(
            name=row.name,
            value=row.value,
            read_only=row.is_read_only,
            config_source=row.source,
            is_sensitive=row.is_sensitive,
            synonyms=[
                DescribeConfigsSynonym(name=synonym.name, value=synonym.value, source=synonym.source)
                for synonym in (row.synonyms if request.include_synonyms else ())
            ],
            config_type=row.kind,
            documentation=row.doc if request.include_documentation else None,
        )


# AlterConfigs and IncrementalAlterConfigs.


async def alter_configs(request: AlterConfigsRequest, context: Context) -> AlterConfigsResponse:
    rows = await _alter(request.resources, _replaced, context, validate_only=request.validate_only)
    return AlterConfigsResponse(responses=rows)


async def incremental_alter_configs(
    request: IncrementalAlterConfigsRequest, context: Context
) -> IncrementalAlterConfigsResponse:
    rows = await _alter(request.resources, _changed, context, validate_only=request.validate_only)
    return IncrementalAlterConfigsResponse(responses=rows)


def _replaced(item: AlterConfigsResource) -> settings.ResourceChange:
    scope, resource = _changeable(item)
    changes = [
        settings.ConfigChange(key=config.name, operation=settings.SET, value=_given(config.name, config.value))
        for config in item.configs
    ]
    return settings.ResourceChange(resource_type=scope, resource=resource, changes=tuple(changes), replaces=True)


def _changed(item: IncrementalAlterConfigsResource) -> settings.ResourceChange:
    scope, resource = _changeable(item)
    changes = []
    for config in item.configs:
        operation = _OPERATIONS.get(config.config_operation)
        if operation is None:
            raise InvalidRequestError(f"{config.name}: there is no operation {config.config_operation}")
        if operation == settings.DELETE and config.name not in TABLES[Scope(scope)]:
            continue  # Never set, so there is nothing to delete: tools clear throttles of Kafka that are not ours.
        value = "" if operation == settings.DELETE else _given(config.name, config.value)
        changes.append(settings.ConfigChange(key=config.name, operation=operation, value=value))
    return settings.ResourceChange(resource_type=scope, resource=resource, changes=tuple(changes))


def _changeable(item: Changed) -> tuple[str, str]:
    if item.resource_type == GROUP:
        keys = " and ".join(config_rows.GROUP_KEYS.values())
        raise InvalidRequestError(
            f"single groups have no settings; {keys} are set for the cluster, a broker without name"
        )
    return _resource(item.resource_type, item.resource_name)


def _given(key: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(f"{key[:100]!r} has no value; to go back to the default, delete it")
    return value


async def _alter(
    resources: Sequence[R], change: Callable[[R], settings.ResourceChange], context: Context, *, validate_only: bool
) -> list[AlterConfigsResourceResponse]:
    """The controller's outcome for what is well formed here, in the order of the request."""
    outcomes: dict[int, Outcome] = {}
    good: list[tuple[int, settings.ResourceChange]] = []
    for at, item in enumerate(resources):
        try:
            good.append((at, change(item)))
        except TidelogError as error:
            outcomes[at] = Outcome("", error.code, str(error))
    limits = context.services.limits
    deadline = Deadline(limits.admin_timeout_ms)
    for places in pieces([(item.resource_type, item.resource) for _, item in good], limits.admin_items_max):
        some = [good[place] for place in places]
        question = settings.AlterConfigs(resources=tuple(item for _, item in some), validate_only=validate_only)
        try:
            reply = await context.services.link.ask(question, timeout_ms=deadline.left_ms())
            assert isinstance(reply, Outcomes), "one outcome for each item"
            outcomes |= {at: outcome for (at, _), outcome in zip(some, reply.items, strict=True)}
        except TidelogError as error:
            outcomes |= {at: Outcome("", error.code, str(error)) for at, _ in some}
    return [_row(item, outcomes[at]) for at, item in enumerate(resources)]


def _row(item: Changed, outcome: Outcome) -> AlterConfigsResourceResponse:
    return AlterConfigsResourceResponse(
        error_code=errors.code(outcome.error),
        error_message=None if outcome.error is None else outcome.message[: errors.MESSAGE_LENGTH_MAX],
        resource_type=item.resource_type,
        resource_name=item.resource_name,
    )


HANDLERS: dict[int, Entry] = {
    DESCRIBE_CONFIGS.key: Entry(describe_configs),
    ALTER_CONFIGS.key: Entry(alter_configs),
    INCREMENTAL_ALTER_CONFIGS.key: Entry(incremental_alter_configs),
}
