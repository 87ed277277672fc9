"""CreateTopics, DeleteTopics, CreatePartitions.

The active controller decides; here is checked only what Kafka's messages can say and a request of ours cannot. An
answer has a row for each topic and no place for an error of the whole request, so such an error stands in every row.

After a change the answer waits a moment until this broker has heard of it: whoever creates a topic and writes to it
through the same broker finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar, cast
from uuid import UUID

from tidelog.metadata import configs
from tidelog.metadata.config_table import Scope
from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import (
    INTERNAL_CONFIGS,
    INTERNAL_TOPICS,
    AddPartitions,
    CreatedTopic,
    CreatedTopics,
    CreateTopics,
    DeleteTopics,
    MoreOfTopic,
    NewTopic,
    Outcomes,
)
from tidelog.model.errors import (
    ErrorCode,
    InvalidConfigError,
    InvalidReplicaAssignmentError,
    InvalidRequestError,
    TidelogError,
)
from tidelog.model.maps import Map
from tidelog.rpc.door_quorum import QuorumLink
from tidelog.rpc.kafka import errors
from tidelog.rpc.kafka.config_rows import Entries, by_name, topic_rows
from tidelog.rpc.kafka.deadline import Deadline
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.finding import NAMES_PER_SLICE
from tidelog.rpc.kafka.messages import CREATE_PARTITIONS, CREATE_TOPICS, DELETE_TOPICS
from tidelog.rpc.kafka.messages.topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from tidelog.rpc.kafka.pieces import pieces
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows
from tidelog.rpc.limits import DoorLimits

HEAR_MS = 500
"""For this broker to hear of a change."""
DETAILS_SINCE = 5
"""An answer of CreateTopics has numbers and configs."""
TOPICS_AT_A_TIME = 10
"""With their configs, before the event loop has a turn."""
DISABLED_SINCE = 3
"""Older clients of DeleteTopics do not know TOPIC_DELETION_DISABLED."""

T = TypeVar("T")


async def _heard(link: QuorumLink, condition: Callable[[ClusterImage], bool]) -> None:
    try:
        async with asyncio.timeout(HEAR_MS / 1000):
            await link.until(condition)
    except TimeoutError:
        return  # it is done; this broker hears of it later


# CreateTopics.


async def create_topics(request: CreateTopicsRequest, context: Context) -> CreateTopicsResponse:
    link = context.services.link
    is_detailed = context.version >= DETAILS_SINCE
    wanted: list[tuple[CreatableTopic, NewTopic | TidelogError]] = []
    for topic in request.topics:
        wanted.append((topic, _or_error(_new_topic, topic)))
        if len(wanted) % NAMES_PER_SLICE == 0:
            await asyncio.sleep(0)
    rows = await _created_by_controller([new for _, new in wanted if isinstance(new, NewTopic)], request, context)
    made = {row.name for row in rows if isinstance(row, CreatedTopic) and row.error is None}
    if made and not request.validate_only:
        await _heard(link, lambda image: all(name in image.topic_ids for name in made))
    image, told = link.image, iter(rows)
    cluster = by_name(configs.describe(image, Scope.CLUSTER, configs.CLUSTER))
    encoded = EncodedRows()
    results = []
    for at, (topic, new) in enumerate(wanted, 1):
        row = new if isinstance(new, TidelogError) else next(told)
        if isinstance(row, TidelogError):
            results.append(_not_created(topic.name, errors.code_of(row), str(row)))
        elif row.error is not None:
            results.append(_not_created(row.name, errors.code(row.error), row.message))
        else:
            assert isinstance(new, NewTopic), "no error"
            details = _configs(image, new, cluster, row.replication_factor) if is_detailed else []
            results.append(_created(row, details))
        if len(results) == TOPICS_AT_A_TIME or at == len(wanted):
            encoded.add(len(results), CREATE_TOPICS.encode_rows(context.version, CreatableTopicResult, results))
            results = []
            await asyncio.sleep(0)
    return CreateTopicsResponse(topics=cast("list[CreatableTopicResult]", encoded))


async def _created_by_controller(
    topics: Sequence[NewTopic], request: CreateTopicsRequest, context: Context
) -> list[CreatedTopic | TidelogError]:
    """One row for each, in their order."""
    link, limits = context.services.link, context.services.limits
    rows: dict[int, CreatedTopic | TidelogError] = {}
    deadline = Deadline(limits.admin_timeout(request.timeout_ms))
    for places in pieces([topic.name for topic in topics], limits.admin_items_max):
        question = CreateTopics(topics=tuple(topics[at] for at in places), validate_only=request.validate_only)
        try:
            reply = await link.ask(question, timeout_ms=deadline.left_ms())
            assert isinstance(reply, CreatedTopics), "the reply to its request"
            rows |= dict(zip(places, reply.topics, strict=True))
        except TidelogError as error:
            rows |= dict.fromkeys(places, error)
    return [rows[at] for at in range(len(topics))]


def _or_error(make: Callable[[T], NewTopic], item: T) -> NewTopic | TidelogError:
    try:
        return make(item)
    except TidelogError as error:
        return error


def _new_topic(topic: CreatableTopic) -> NewTopic:
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


def _not_created(name: str, code: int, message: str) -> CreatableTopicResult:
    return CreatableTopicResult(
        name=name, error_code=code, error_message=message[: errors.MESSAGE_LENGTH_MAX], configs=[]
    )


def _created(made: CreatedTopic, details: list[CreatableTopicConfigs]) -> CreatableTopicResult:
    return CreatableTopicResult(
        name=made.name,
        topic_id=made.topic_id.bytes,
        error_message=None,
        num_partitions=made.partitions,
        replication_factor=made.replication_factor,
        configs=details,
    )


def _configs(
    image: ClusterImage, new: NewTopic, cluster: Entries, replication_factor: int
) -> list[CreatableTopicConfigs]:
    """What holds for the topic, whether or not this broker has heard of it, and whether or not it was made."""
    own = {**(dict(INTERNAL_CONFIGS) if new.name in INTERNAL_TOPICS else {}), **dict(new.configs)}
    with_topic = replace(image, configs=image.configs.set((Scope.TOPIC.value, new.name), Map(own)))
    entries = by_name(configs.describe(with_topic, Scope.TOPIC, new.name))
    rows = topic_rows(entries, cluster, replication_factor=replication_factor)
    return [CreatableTopicConfigs(name=row.name, value=row.value, config_source=row.source) for row in rows]


# DeleteTopics.


async def delete_topics(request: DeleteTopicsRequest, context: Context) -> DeleteTopicsResponse:
    link, limits = context.services.link, context.services.limits
    wanted = request.topics or [DeleteTopicState(name=name) for name in request.topic_names]
    image = link.image
    good, results = [], {}
    for at, topic in enumerate(wanted):
        if (topic.name is None) == (topic.topic_id == ZERO_UUID):
            problem = InvalidRequestError("a topic is named by its name or by its id, one of the two")
            results[at] = _deleted(image, topic, errors.code_of(problem), str(problem))
        else:
            good.append((at, topic))
    # The controller answers names first, then ids.
    good.sort(key=lambda item: item[1].name is None)
    if good:

        def deletion(places: Sequence[int]) -> DeleteTopics:
            some = [good[at][1] for at in places]
            return DeleteTopics(
                names=tuple(topic.name for topic in some if topic.name is not None),
                ids=tuple(UUID(bytes=topic.topic_id) for topic in some if topic.name is None),
            )

        named = [_topic_id(image, topic) for _, topic in good]
        outcomes = await _outcomes(link, deletion, named, limits, request.timeout_ms)
        gone = set()
        for (at, topic), item in zip(good, outcomes, strict=True):
            code = errors.code(item.error)
            if item.error is ErrorCode.TOPIC_DELETION_DISABLED and context.version < DISABLED_SINCE:
                code = errors.code(ErrorCode.INVALID_REQUEST)
            results[at] = _deleted(image, topic, code, item.message)
            found = image.topic_ids.get(topic.name) if topic.name is not None else UUID(bytes=topic.topic_id)
            if item.error is None and found is not None:
                gone.add(found)
        if gone:
            await _heard(link, lambda now: not any(topic_id in now.topics for topic_id in gone))
    return DeleteTopicsResponse(responses=[results[at] for at in range(len(wanted))])


def _topic_id(image: ClusterImage, topic: DeleteTopicState) -> UUID | str:
    """What tells a topic from others, whether it is named by its name or by its id."""
    if topic.name is None:
        return UUID(bytes=topic.topic_id)
    return image.topic_ids.get(topic.name, topic.name)


def _deleted(image: ClusterImage, topic: DeleteTopicState, code: int, message: str) -> DeletableTopicResult:
    """With name and id, as far as they are known here."""
    name, topic_id = topic.name, topic.topic_id
    if name is None:
        found = image.topics.get(UUID(bytes=topic_id))
        name = None if found is None else found.name
    elif topic_id == ZERO_UUID:
        known = image.topic_ids.get(name)
        topic_id = ZERO_UUID if known is None else known.bytes
    return DeletableTopicResult(
        name=name,
        topic_id=topic_id,
        error_code=code,
        error_message=message[: errors.MESSAGE_LENGTH_MAX] if code else None,
    )


# CreatePartitions.


async def create_partitions(request: CreatePartitionsRequest, context: Context) -> CreatePartitionsResponse:
    link, limits = context.services.link, context.services.limits
    more = tuple(_more(topic) for topic in request.topics)
    outcomes: Sequence[Outcome] = ()
    if more:

        def addition(places: Sequence[int]) -> AddPartitions:
            return AddPartitions(topics=tuple(more[at] for at in places), validate_only=request.validate_only)

        outcomes = await _outcomes(link, addition, [one.name for one in more], limits, request.timeout_ms)
    totals = {topic.name: topic.total for topic, item in zip(more, outcomes, strict=True) if item.error is None}
    if totals and not request.validate_only:
        await _heard(link, lambda image: all(_has(image, name, total) for name, total in totals.items()))
    return CreatePartitionsResponse(
        results=[_grown(topic.name, item.error, item.message) for topic, item in zip(more, outcomes, strict=True)]
    )


def _grown(name: str, error: ErrorCode | None, message: str) -> CreatePartitionsTopicResult:
    return CreatePartitionsTopicResult(
        name=name,
        error_code=errors.code(error),
        error_message=None if error is None else message[: errors.MESSAGE_LENGTH_MAX],
    )


def _more(topic: CreatePartitionsTopic) -> MoreOfTopic:
    rows = topic.assignments or ()
    return MoreOfTopic(name=topic.name, total=topic.count, assignment=tuple(tuple(row.broker_ids) for row in rows))


def _has(image: ClusterImage, name: str, total: int) -> bool:
    """Also if it is gone by now."""
    topic = image.topic_named(name)
    return topic is None or len(topic.partitions) >= total


async def _outcomes(
    link: QuorumLink,
    question: Callable[[Sequence[int]], object],
    names: Sequence[Hashable],
    limits: DoorLimits,
    timeout_ms: int,
) -> Sequence[Outcome]:
    """One for each item, in their order; `question` asks the controller about those in some places. An error of a whole
    question is that of each of its items."""
    found: dict[int, Outcome] = {}
    deadline = Deadline(limits.admin_timeout(timeout_ms))
    for places in pieces(names, limits.admin_items_max):
        places.sort()
        try:
            reply = await link.ask(question(places), timeout_ms=deadline.left_ms())
        except TidelogError as error:
            found |= dict.fromkeys(places, Outcome("", error.code, str(error)))
        else:
            assert isinstance(reply, Outcomes), "one outcome for each item"
            found |= dict(zip(places, reply.items, strict=True))
    return [found[at] for at in range(len(names))]


HANDLERS: dict[int, Entry] = {
    CREATE_TOPICS.key: Entry(create_topics),
    DELETE_TOPICS.key: Entry(delete_topics),
    CREATE_PARTITIONS.key: Entry(create_partitions),
}
