"""Requests of operators: moves between log directories, features, brokers, client quotas, config resources.

AlterReplicaLogDirs goes to the broker whose replicas move; its response says that the moves have begun. DescribeLogDirs
shows a copy in progress as the future replica of its directory. There are no client quotas, so none are listed.
"""

from __future__ import annotations

import asyncio

from tidelog.metadata import brokers, features
from tidelog.metadata.decision import Outcome
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.rpc.kafka import errors
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.api_versions import FIXED_FEATURES
from tidelog.rpc.kafka.configs import BROKER, CLIENT_METRICS, GROUP, TOPIC
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import admin as messages
from tidelog.rpc.kafka.services import Context
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE
from tidelog.world.slicing import sliced

BROKER_LOGGER = 8
TYPES_SINCE = 1
_LISTED = (TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP)
_UPGRADE, _SAFE_DOWNGRADE, _UNSAFE_DOWNGRADE = 1, 2, 3
_KINDS = {
    _UPGRADE: features.UPGRADE,
    _SAFE_DOWNGRADE: features.SAFE_DOWNGRADE,
    _UNSAFE_DOWNGRADE: features.UNSAFE_DOWNGRADE,
}


async def alter_replica_log_dirs(
    request: messages.AlterReplicaLogDirsRequest, context: Context
) -> messages.AlterReplicaLogDirsResponse:
    """Moves replicas of this broker. A partition that is named twice moves to the directory that is named last."""
    results: dict[str, dict[int, int]] = {}
    done = 0
    for directory in request.dirs:
        for topic in directory.topics:
            rows = results.setdefault(topic.name, {})
            for number in topic.partitions:
                rows[number] = await _begin_move(context, directory.path, topic.name, number)
                done += 1
                if done % PARTITIONS_PER_SLICE == 0:
                    await asyncio.sleep(0)
    return messages.AlterReplicaLogDirsResponse(
        results=[
            messages.AlterReplicaLogDirTopicResult(
                topic_name=name,
                partitions=[
                    messages.AlterReplicaLogDirPartitionResult(partition_index=number, error_code=code)
                    for number, code in rows.items()
                ],
            )
            for name, rows in results.items()
        ]
    )


async def _begin_move(context: Context, path: str, topic: str, number: int) -> int:
    try:
        await context.services.log_dirs.begin_move(context.request, topic, number, path)
    except TidelogError as error:
        return errors.code_of(error)
    return errors.NONE


# Features.


async def update_features(request: messages.UpdateFeaturesRequest, context: Context) -> messages.UpdateFeaturesResponse:
    """One row for each feature; from version 2 on the first error is that of the response."""
    outcomes: dict[str, Outcome] = {}
    changes = []
    for item in request.feature_updates:
        level = FIXED_FEATURES.get(item.feature)
        if level is None:
            changes.append(_feature(item, context.version))
        elif item.max_version_level == level:
            outcomes[item.feature] = Outcome(item.feature)
        else:
            message = f"{item.feature} is {level} in this version and cannot be changed"
            outcomes[item.feature] = Outcome(item.feature, ErrorCode.FEATURE_UPDATE_FAILED, message)
    if changes:
        update = features.UpdateFeatures(changes=tuple(changes), validate_only=request.validate_only)
        service = context.services.replicas
        rows = await service.update_features(context.request, update)
        outcomes |= {row.name: row for row in rows}
    failed = next((item for item in outcomes.values() if item.error is not None), None)
    response = messages.UpdateFeaturesResponse(
        error_message=None,
        results=[
            messages.UpdatableFeatureResult(
                feature=item.name, error_code=errors.code(item.error), error_message=item.message or None
            )
            for item in outcomes.values()
        ],
    )
    if failed is not None:
        response.error_code = errors.code(failed.error)
        response.error_message = failed.message[: errors.MESSAGE_LENGTH_MAX]
    return response


def _feature(item: messages.FeatureUpdateKey, version: int) -> features.FeatureChange:
    if version == 0:
        kind = features.SAFE_DOWNGRADE if item.allow_downgrade else features.UPGRADE
    else:
        kind = _KINDS.get(item.upgrade_type, f"upgrade type {item.upgrade_type}")
    return features.FeatureChange(name=item.feature, level=item.max_version_level, kind=kind)


async def unregister_broker(
    request: messages.UnregisterBrokerRequest, context: Context
) -> messages.UnregisterBrokerResponse:
    unregister = brokers.Unregister(broker=request.broker_id)
    await context.services.replicas.unregister_broker(context.request, unregister)
    return messages.UnregisterBrokerResponse(error_message=None)


# Lists.


async def describe_client_quotas(
    _request: messages.DescribeClientQuotasRequest, _context: Context
) -> messages.DescribeClientQuotasResponse:
    return messages.DescribeClientQuotasResponse(error_message=None, entries=[])


async def list_config_resources(
    request: messages.ListConfigResourcesRequest, context: Context
) -> messages.ListConfigResourcesResponse:
    """Lists topics and brokers: single groups and clients have no configs, and a node's file sets its log levels."""
    types = frozenset(request.resource_types or _LISTED)
    if context.version < TYPES_SINCE:
        types = frozenset((CLIENT_METRICS,))
    if any(kind not in _LISTED for kind in types):
        return messages.ListConfigResourcesResponse(error_code=errors.code(ErrorCode.UNSUPPORTED_VERSION))
    names = await context.services.configs.list_resources(context.request)
    rows: list[messages.ConfigResource] = []
    if TOPIC in types:
        rows += [
            messages.ConfigResource(resource_name=name, resource_type=TOPIC)
            async for name in sliced(names.topics, PARTITIONS_PER_SLICE)
        ]
    if BROKER in types:
        rows += [messages.ConfigResource(resource_name=str(broker), resource_type=BROKER) for broker in names.brokers]
    return messages.ListConfigResourcesResponse(config_resources=rows)


HANDLERS: dict[int, Entry] = {
    apis.ALTER_REPLICA_LOG_DIRS.key: Entry(alter_replica_log_dirs),
    apis.UPDATE_FEATURES.key: Entry(update_features),
    apis.UNREGISTER_BROKER.key: Entry(unregister_broker),
    apis.DESCRIBE_CLIENT_QUOTAS.key: Entry(describe_client_quotas),
    apis.LIST_CONFIG_RESOURCES.key: Entry(list_config_resources),
}
