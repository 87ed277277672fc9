"""What an operator changes and lists: replicas in log directories, features, brokers, quotas, resources with settings.

AlterReplicaLogDirs goes to the broker whose replicas move and is answered when the moves have begun; DescribeLogDirs
shows a copy under way as the future replica of its directory. There are no quotas, so none are listed.
"""

from __future__ import annotations

import asyncio

from tidelog.metadata import brokers, settings
from tidelog.metadata.decision import Outcome
from tidelog.metadata.topics import Outcomes
from tidelog.model.errors import ErrorCode, TidelogError, UnknownTopicIdError
from tidelog.model.ids import PartitionId
from tidelog.rpc.kafka import errors, messages
from tidelog.rpc.kafka.api_versions import FIXED_FEATURES
from tidelog.rpc.kafka.configs import BROKER, CLIENT_METRICS, GROUP, TOPIC
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.finding import NAMES_PER_SLICE, find
from tidelog.rpc.kafka.messages.admin import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
    ConfigResource,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    FeatureUpdateKey,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
    UpdatableFeatureResult,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from tidelog.rpc.kafka.services import Context

BROKER_LOGGER = 8
TYPES_SINCE = 1
_LISTED = (TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP)
_UPGRADE, _SAFE_DOWNGRADE, _UNSAFE_DOWNGRADE = 1, 2, 3
_KINDS = {
    _UPGRADE: settings.UPGRADE,
    _SAFE_DOWNGRADE: settings.SAFE_DOWNGRADE,
    _UNSAFE_DOWNGRADE: settings.UNSAFE_DOWNGRADE,
}


async def alter_replica_log_dirs(request: AlterReplicaLogDirsRequest, context: Context) -> AlterReplicaLogDirsResponse:
    """Of this broker's replicas; a partition that is named twice goes to the directory that is named last."""
    results: dict[str, dict[int, int]] = {}
    done = 0
    for directory in request.dirs:
        for topic in directory.topics:
            rows = results.setdefault(topic.name, {})
            for number in topic.partitions:
                rows[number] = _begin_move(context, directory.path, topic.name, number)
                done += 1
                if done % NAMES_PER_SLICE == 0:
                    await asyncio.sleep(0)
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirTopicResult(
                topic_name=name,
                partitions=[
                    AlterReplicaLogDirPartitionResult(partition_index=number, error_code=code)
                    for number, code in rows.items()
                ],
            )
            for name, rows in results.items()
        ]
    )


def _begin_move(context: Context, path: str, topic: str, number: int) -> int:
    try:
        where = find(context.services.image, topic, number)
        if not isinstance(where, PartitionId):
            raise where
        context.services.log_dirs.begin_move(where, path)
    except UnknownTopicIdError:
        return errors.code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    except TidelogError as error:
        return errors.code_of(error)
    return errors.NONE


# Features.


async def update_features(request: UpdateFeaturesRequest, context: Context) -> UpdateFeaturesResponse:
    """One outcome for each; from version 2 on the first error stands for all."""
    limits = context.services.limits
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
        question = settings.UpdateFeatures(changes=tuple(changes), validate_only=request.validate_only)
        reply = await context.services.link.ask(question, timeout_ms=limits.admin_timeout(request.timeout_ms))
        assert isinstance(reply, Outcomes), "one outcome for each item"
        outcomes |= {item.name: item for item in reply.items}
    failed = next((item for item in outcomes.values() if item.error is not None), None)
    response = UpdateFeaturesResponse(
        error_message=None,
        results=[
            UpdatableFeatureResult(
                feature=item.name, error_code=errors.code(item.error), error_message=item.message or None
            )
            for item in outcomes.values()
        ],
    )
    if failed is not None:
        response.error_code = errors.code(failed.error)
        response.error_message = failed.message[: errors.MESSAGE_LENGTH_MAX]
    return response


def _feature(item: FeatureUpdateKey, version: int) -> settings.FeatureChange:
    if version == 0:
        kind = settings.SAFE_DOWNGRADE if item.allow_downgrade else settings.UPGRADE
    else:
        kind = _KINDS.get(item.upgrade_type, f"upgrade type {item.upgrade_type}")
    return settings.FeatureChange(name=item.feature, level=item.max_version_level, kind=kind)


async def unregister_broker(request: UnregisterBrokerRequest, context: Context) -> UnregisterBrokerResponse:
    """Forgets a broker that will not come back; the controller refuses one that is alive or holds replicas."""
    services = context.services
    question = brokers.Unregister(broker=request.broker_id)
    await services.link.ask(question, timeout_ms=services.limits.admin_timeout_ms)
    return UnregisterBrokerResponse(error_message=None)


# Lists.


async def describe_client_quotas(
    _request: DescribeClientQuotasRequest, _context: Context
) -> DescribeClientQuotasResponse:
    return DescribeClientQuotasResponse(error_message=None, entries=[])


async def list_config_resources(request: ListConfigResourcesRequest, context: Context) -> ListConfigResourcesResponse:
    """Topics and brokers. Single groups and clients have no settings here, log levels are set where a node starts."""
    types = frozenset(request.resource_types or _LISTED)
    if context.version < TYPES_SINCE:
        types = frozenset((CLIENT_METRICS,))
    if any(kind not in _LISTED for kind in types):
        return ListConfigResourcesResponse(error_code=errors.code(ErrorCode.UNSUPPORTED_VERSION))
    image = context.services.image
    found: list[ConfigResource] = []
    if TOPIC in types:
        for name in image.topic_ids:
            found.append(ConfigResource(resource_name=name, resource_type=TOPIC))
            if len(found) % NAMES_PER_SLICE == 0:
                await asyncio.sleep(0)
    if BROKER in types:
        found += [ConfigResource(resource_name=str(broker), resource_type=BROKER) for broker in sorted(image.brokers)]
    return ListConfigResourcesResponse(config_resources=found)


HANDLERS: dict[int, Entry] = {
    messages.ALTER_REPLICA_LOG_DIRS.key: Entry(alter_replica_log_dirs),
    messages.UPDATE_FEATURES.key: Entry(update_features),
    messages.UNREGISTER_BROKER.key: Entry(unregister_broker),
    messages.DESCRIBE_CLIENT_QUOTAS.key: Entry(describe_client_quotas),
    messages.LIST_CONFIG_RESOURCES.key: Entry(list_config_resources),
}
