"""CreateTopics, DeleteTopics, CreatePartitions.

Translates to `services.topics`. It checks only what Kafka's messages can say and a request of the service cannot. A
response has a row for each topic and no error of its own, so every row gets an error of the whole request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from itertools import repeat
from typing import TypeVar, cast
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.config_table import Scope
from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import AddPartitions, CreatedTopic, CreateTopics, DeleteTopics, NewPartitions, NewTopic
from tidelog.model.errors import (
    ErrorCode,
    InvalidConfigError,
    InvalidReplicaAssignmentError,
    InvalidRequestError,
    TidelogError,
)
from tidelog.rpc.kafka import errors
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.config_rows import Entries, by_name, topic_rows
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import topics as messages
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows
from tidelog.services.partition_lookup import PARTITIONS_PER_SLICE

DETAILS_SINCE = 5
"""Responses of CreateTopics have numbers and configs from this version on."""
TOPICS_AT_A_TIME = 10
"""Topics encoded with their configs before the event loop gets a turn."""
DISABLED_SINCE = 3
"""Older clients of DeleteTopics do not know TOPIC_DELETION_DISABLED."""

T = TypeVar("T")


# CreateTopics.


async def create_topics(request: messages.CreateTopicsRequest, context: Context) -> messages.CreateTopicsResponse:
    services = context.services
    is_detailed = context.version >= DETAILS_SINCE
    topics: list[tuple[messages.CreatableTopic, NewTopic | TidelogError]] = []
    for topic in request.topics:
        topics.append((topic, errors.or_error(_new_topic, topic)))
        if len(topics) % PARTITIONS_PER_SLICE == 0:
            await asyncio.sleep(0)
    create = CreateTopics(
        topics=tuple(new for _, new in topics if isinstance(new, NewTopic)), validate_only=request.validate_only
    )
    rows: Iterator[CreatedTopic | TidelogError]
    try:
        rows = iter(await services.topics.create(context.request, create))
    except TidelogError as error:
        rows = repeat(error)
    cluster = by_name(configs.describe(context.services.image, Scope.CLUSTER, configs.CLUSTER))
    encoded = EncodedRows()
    results = []
    for number, (topic, new) in enumerate(topics, 1):
        row = new if isinstance(new, TidelogError) else next(rows)
        if isinstance(row, TidelogError):
            results.append(_not_created(topic.name, errors.code_of(row), str(row)))
        elif row.error is not None:
            results.append(_not_created(row.name, errors.code(row.error), row.message))
        else:
            assert isinstance(new, NewTopic), "no error"
            result = _created(row)
            if is_detailed:
                own = await services.configs.describe_new_topic(context.request, new)
                result.topic_config_error_code = errors.code(own.error)
                result.configs = _configs(by_name(own.entries), cluster, row.replication_factor)
            results.append(result)
        if len(results) == TOPICS_AT_A_TIME or number == len(topics):
            encoded.add(
                len(results), apis.CREATE_TOPICS.encode_rows(context.version, messages.CreatableTopicResult, results)
            )
            results = []
            await asyncio.sleep(0)
    return messages.CreateTopicsResponse(topics=cast("list[messages.CreatableTopicResult]", encoded))


def _new_topic(topic: messages.CreatableTopic) -> NewTopic:
    null = [config.name for config in topic.configs if config.value is None]
    if null:
        raise InvalidConfigError(f"topic {topic.name}: {null[0][:100]!r} has no value")
    assignment = {row.partition_index: tuple(row.broker_ids) for row in topic.assignments}
    if sorted(assignment) != list(range(len(topic.assignments))):
        raise InvalidReplicaAssignmentError(
            f"topic {topic.name}: an assignment names each partition once, from 0 to the last without a gap"
        )
    return NewTopic(
        name=topic.name,
        partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
        assignment=tuple(assignment[number] for number in range(len(assignment))),
        configs=tuple((config.name, config.value or "") for config in topic.configs),
    )


def _not_created(name: str, code: int, message: str) -> messages.CreatableTopicResult:
    return messages.CreatableTopicResult(
        name=name, error_code=code, error_message=message[: errors.MESSAGE_LENGTH_MAX], configs=[]
    )


def _created(row: CreatedTopic) -> messages.CreatableTopicResult:
    return messages.CreatableTopicResult(
        name=row.name,
        topic_id=row.topic_id.bytes,
        error_message=None,
        num_partitions=row.partitions,
        replication_factor=row.replication_factor,
        configs=[],
    )


def _configs(own: Entries, cluster: Entries, replication_factor: int) -> list[messages.CreatableTopicConfigs]:
    rows = topic_rows(own, cluster, replication_factor=replication_factor)
    return [messages.CreatableTopicConfigs(name=row.name, value=row.value, config_source=row.source) for row in rows]


# DeleteTopics.


async def delete_topics(request: messages.DeleteTopicsRequest, context: Context) -> messages.DeleteTopicsResponse:
    topics = request.topics or [messages.DeleteTopicState(name=name) for name in request.topic_names]
    image = context.services.image
    valid, results = [], {}
    for position, topic in enumerate(topics):
        if (topic.name is None) == (topic.topic_id == ZERO_UUID):
            problem = InvalidRequestError("name a topic by its name or by its id, one of the two")
            results[position] = _deleted(image, topic, errors.code_of(problem), str(problem))
        else:
            valid.append((position, topic))
    valid.sort(key=lambda item: item[1].name is None)  # the service returns names first, then ids
    delete = DeleteTopics(
        names=tuple(topic.name for _, topic in valid if topic.name is not None),
        ids=tuple(UUID(bytes=topic.topic_id) for _, topic in valid if topic.name is None),
    )
    service = context.services.topics
    rows = await _rows(service.delete(context.request, delete), len(valid))
    for (position, topic), row in zip(valid, rows, strict=True):
        code = errors.code(row.error)
        if row.error is ErrorCode.TOPIC_DELETION_DISABLED and context.version < DISABLED_SINCE:
            code = errors.code(ErrorCode.INVALID_REQUEST)
        results[position] = _deleted(image, topic, code, row.message)
    return messages.DeleteTopicsResponse(responses=[results[position] for position in range(len(topics))])


def _deleted(
    image: ClusterImage, topic: messages.DeleteTopicState, code: int, message: str
) -> messages.DeletableTopicResult:
    """A row has name and id, as far as this broker knows them."""
    name, topic_id = topic.name, topic.topic_id
    if name is None:
        known_topic = image.topics.get(UUID(bytes=topic_id))
        name = None if known_topic is None else known_topic.name
    elif topic_id == ZERO_UUID:
        known = image.topic_ids.get(name)
        topic_id = ZERO_UUID if known is None else known.bytes
    return messages.DeletableTopicResult(
        name=name,
        topic_id=topic_id,
        error_code=code,
        error_message=message[: errors.MESSAGE_LENGTH_MAX] if code else None,
    )


# CreatePartitions.


async def create_partitions(
    request: messages.CreatePartitionsRequest, context: Context
) -> messages.CreatePartitionsResponse:
    topics = tuple(_new_partitions(topic) for topic in request.topics)
    add = AddPartitions(topics=topics, validate_only=request.validate_only)
    service = context.services.topics
    rows = await _rows(service.add_partitions(context.request, add), len(topics))
    return messages.CreatePartitionsResponse(
        results=[_grown(topic.name, row.error, row.message) for topic, row in zip(topics, rows, strict=True)]
    )


def _grown(name: str, error: ErrorCode | None, message: str) -> messages.CreatePartitionsTopicResult:
    return messages.CreatePartitionsTopicResult(
        name=name,
        error_code=errors.code(error),
        error_message=errors.row_message(error, message),
    )


def _new_partitions(topic: messages.CreatePartitionsTopic) -> NewPartitions:
    rows = topic.assignments or ()
    return NewPartitions(name=topic.name, total=topic.count, assignment=tuple(tuple(row.broker_ids) for row in rows))


async def _rows(changing: Awaitable[list[Outcome]], count: int) -> list[Outcome]:
    """The service's outcomes. The response has no error of its own, so every row gets an error of the whole request."""
    try:
        return await changing
    except TidelogError as error:
        return [Outcome("", error.code, str(error))] * count


HANDLERS: dict[int, Entry] = {
    apis.CREATE_TOPICS.key: Entry(create_topics),
    apis.DELETE_TOPICS.key: Entry(delete_topics),
    apis.CREATE_PARTITIONS.key: Entry(create_partitions),
}
