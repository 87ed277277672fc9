"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs: translates to `services.configs`.

    resource of Kafka       here
    TOPIC                   a topic
    BROKER, an id           one broker, through any broker; settings of a node's own file only through that node, which
                            is the one that Kafka's clients ask
    BROKER, no name         the cluster: configs of every broker
    GROUP                   read-only: the cluster's `group.consumer.*` apply to groups
    BROKER_LOGGER, others   rejected

A response has a row for each resource and no error of its own, so every row gets an error of the whole request.

AlterConfigs is Kafka's older request: configs that it does not name return to their defaults. The controller does so in
one decision, so that changes of two clients do not mix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import TypeVar, cast

from tidelog.metadata import config_changes
from tidelog.metadata.config_table import TABLES, Scope
from tidelog.metadata.configs import CLUSTER
from tidelog.metadata.decision import Outcome
from tidelog.model.errors import ErrorCode, InvalidRequestError, TidelogError
from tidelog.rpc.kafka import config_rows, errors
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.config_rows import ConfigRow, Entries, by_name
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import configs as messages
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import EncodedRows
from tidelog.services.configs import ConfigDescriptions, ConfigQuery, ConfigResource, ResourceConfigs
from tidelog.services.deadline import deadline_after

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
_REJECTIONS = {
    BROKER_LOGGER: "set log levels in the file of the node",
    CLIENT_METRICS: "brokers collect no client metrics, so there is nothing to set",
}
_OPERATIONS = {0: config_changes.SET, 1: config_changes.DELETE, 2: config_changes.APPEND, 3: config_changes.SUBTRACT}
RESOURCES_AT_A_TIME = 16
"""Resources described and encoded at once."""

Changed = messages.AlterConfigsResource | messages.IncrementalAlterConfigsResource
R = TypeVar("R", messages.AlterConfigsResource, messages.IncrementalAlterConfigsResource)


def _resource(resource_type: int, name: str) -> tuple[str, str]:
    """Return the type and name of a resource as services know it."""
    if resource_type == TOPIC:
        return Scope.TOPIC.value, name
    if resource_type == BROKER:
        return (Scope.BROKER.value, name) if name else (Scope.CLUSTER.value, CLUSTER)
    raise InvalidRequestError(_REJECTIONS.get(resource_type, f"resources of type {resource_type} have no configs"))


# DescribeConfigs.


async def describe_configs(
    request: messages.DescribeConfigsRequest, context: Context
) -> messages.DescribeConfigsResponse:
    """Rows are encoded as they arrive: there may be thousands of topics, with dozens of keys each."""
    context.request.deadline_s = deadline_after(context.services.limits.admin_timeout_ms)
    described = _Described(request, context)
    rows = EncodedRows()
    for first in range(0, len(request.resources), RESOURCES_AT_A_TIME):
        results = await described.results(request.resources[first : first + RESOURCES_AT_A_TIME])
        rows.add(
            len(results), apis.DESCRIBE_CONFIGS.encode_rows(context.version, messages.DescribeConfigsResult, results)
        )
        await asyncio.sleep(0)
    return messages.DescribeConfigsResponse(results=cast("list[messages.DescribeConfigsResult]", rows))


class _Described:
    """One request."""

    def __init__(self, request: messages.DescribeConfigsRequest, context: Context) -> None:
        self._request = request
        self._context = context.request
        self._service = context.services.configs

    async def results(
        self, resources: Sequence[messages.DescribeConfigsResource]
    ) -> list[messages.DescribeConfigsResult]:
        """One row for each resource. The response has no error of its own, so every row gets that of the request."""
        queries = [errors.or_error(_query, resource) for resource in resources]
        valid = tuple(query for query in queries if isinstance(query, ConfigResource))
        try:
            query = ConfigQuery(resources=valid, with_inherited=True)
            reply = await self._service.describe(self._context, query) if valid else ConfigDescriptions(resources=())
        except TidelogError as error:
            return [_failed(resource, error.code, str(error)) for resource in resources]
        cluster, answers = by_name(reply.cluster), iter(reply.resources)
        results = []
        for resource, item in zip(resources, queries, strict=True):
            if isinstance(item, TidelogError):
                results.append(_failed(resource, item.code, str(item)))
                continue
            row = next(answers)
            if row.error is not None:
                results.append(_failed(resource, row.error, row.message))
                continue
            keys = frozenset(resource.configuration_keys or ())
            entries = [self._entry(one) for one in _rows(resource, row, cluster) if not keys or one.name in keys]
            results.append(
                messages.DescribeConfigsResult(
                    error_message=None,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                    configs=entries,
                )
            )
        return results

    def _entry(self, row: ConfigRow) -> messages.DescribeConfigsResourceResult:
        request = self._request
        return messages.DescribeConfigsResourceResult(
            name=row.name,
            value=row.value,
            read_only=row.is_read_only,
            config_source=row.source,
            is_sensitive=row.is_sensitive,
            synonyms=[
                messages.DescribeConfigsSynonym(name=synonym.name, value=synonym.value, source=synonym.source)
                for synonym in (row.synonyms if request.include_synonyms else ())
            ],
            config_type=row.kind,
            documentation=row.doc if request.include_documentation else None,
        )


def _query(resource: messages.DescribeConfigsResource) -> ConfigResource:
    """A group has no configs of its own: the cluster's hold for it."""
    if resource.resource_type == GROUP:
        if not resource.resource_name:
            raise InvalidRequestError("a group has a name")
        return ConfigResource(type=Scope.CLUSTER.value)
    scope, name = _resource(resource.resource_type, resource.resource_name)
    return ConfigResource(type=scope, name=name)


def _rows(resource: messages.DescribeConfigsResource, row: ResourceConfigs, cluster: Entries) -> list[ConfigRow]:
    own = by_name(row.entries)
    if resource.resource_type == GROUP:
        return config_rows.group_rows(cluster)
    if resource.resource_type == TOPIC:
        return config_rows.topic_rows(own, cluster, replication_factor=row.replication_factor)
    if not resource.resource_name:
        return config_rows.cluster_rows(cluster)
    return config_rows.broker_rows(own, cluster) + config_rows.node_rows(row.node_settings)


def _failed(
    resource: messages.DescribeConfigsResource, error: ErrorCode, message: str
) -> messages.DescribeConfigsResult:
    return messages.DescribeConfigsResult(
        error_code=errors.code(error),
        error_message=message[: errors.MESSAGE_LENGTH_MAX],
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


# AlterConfigs and IncrementalAlterConfigs.


async def alter_configs(request: messages.AlterConfigsRequest, context: Context) -> messages.AlterConfigsResponse:
    rows = await _alter(request.resources, _replaced, context, validate_only=request.validate_only)
    return messages.AlterConfigsResponse(responses=rows)


async def incremental_alter_configs(
    request: messages.IncrementalAlterConfigsRequest, context: Context
) -> messages.IncrementalAlterConfigsResponse:
    rows = await _alter(request.resources, _changed, context, validate_only=request.validate_only)
    return messages.IncrementalAlterConfigsResponse(responses=rows)


def _replaced(item: messages.AlterConfigsResource) -> config_changes.ResourceChange:
    scope, resource = _changeable(item)
    changes = [
        config_changes.ConfigChange(
            key=config.name, operation=config_changes.SET, value=_required(config.name, config.value)
        )
        for config in item.configs
    ]
    return config_changes.ResourceChange(resource_type=scope, resource=resource, changes=tuple(changes), replaces=True)


def _changed(item: messages.IncrementalAlterConfigsResource) -> config_changes.ResourceChange:
    scope, resource = _changeable(item)
    changes = []
    for config in item.configs:
        operation = _OPERATIONS.get(config.config_operation)
        if operation is None:
            raise InvalidRequestError(f"{config.name}: there is no operation {config.config_operation}")
        if operation == config_changes.DELETE and config.name not in TABLES[Scope(scope)]:
            continue  # never set: Kafka's tools delete throttles that do not exist here
        value = "" if operation == config_changes.DELETE else _required(config.name, config.value)
        changes.append(config_changes.ConfigChange(key=config.name, operation=operation, value=value))
    return config_changes.ResourceChange(resource_type=scope, resource=resource, changes=tuple(changes))


def _changeable(item: Changed) -> tuple[str, str]:
    if item.resource_type == GROUP:
        keys = " and ".join(config_rows.GROUP_KEYS.values())
        raise InvalidRequestError(
            f"groups have no configs of their own; set {keys} for the cluster, a broker without a name"
        )
    return _resource(item.resource_type, item.resource_name)


def _required(key: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(f"{key[:100]!r} has no value; delete it to return to the default")
    return value


async def _alter(
    resources: Sequence[R],
    change: Callable[[R], config_changes.ResourceChange],
    context: Context,
    *,
    validate_only: bool,
) -> list[messages.AlterConfigsResourceResponse]:
    """One row for each resource, in order."""
    changes = [errors.or_error(change, item) for item in resources]
    alter = config_changes.AlterConfigs(
        resources=tuple(item for item in changes if isinstance(item, config_changes.ResourceChange)),
        validate_only=validate_only,
    )
    answers: Iterator[Outcome]
    try:
        answers = iter(await context.services.configs.alter(context.request, alter))
    except TidelogError as error:
        answers = repeat(Outcome("", error.code, str(error)))
    return [
        _row(item, Outcome("", parsed.code, str(parsed)) if isinstance(parsed, TidelogError) else next(answers))
        for item, parsed in zip(resources, changes, strict=True)
    ]


def _row(item: Changed, outcome: Outcome) -> messages.AlterConfigsResourceResponse:
    return messages.AlterConfigsResourceResponse(
        error_code=errors.code(outcome.error),
        error_message=errors.row_message(outcome.error, outcome.message),
        resource_type=item.resource_type,
        resource_name=item.resource_name,
    )


HANDLERS: dict[int, Entry] = {
    apis.DESCRIBE_CONFIGS.key: Entry(describe_configs),
    apis.ALTER_CONFIGS.key: Entry(alter_configs),
    apis.INCREMENTAL_ALTER_CONFIGS.key: Entry(incremental_alter_configs),
}
