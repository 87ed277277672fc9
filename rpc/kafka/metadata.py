"""Metadata, DescribeCluster, DescribeTopicPartitions: where things are, by this broker's own copy of the state.

Which topics a Metadata request means:

    topics      version 0     from version 1 on
    null        -             all
    empty       all           none
    names       these         these, each told once; unknown ones are created if request and cluster allow it
    ids         -             these, from version 12 on; 10 and 11 carry ids and may not use them
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from typing import cast
from uuid import UUID

from tidelog.metadata.image import ClusterImage, Partition, Topic
from tidelog.metadata.topics import INTERNAL_TOPICS, METADATA_TOPIC, check_name
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.rpc.kafka import errors, operations
from tidelog.rpc.kafka.brokers_view import BrokersView, Place, view_of
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import DESCRIBE_CLUSTER, DESCRIBE_TOPIC_PARTITIONS, METADATA
from tidelog.rpc.kafka.messages.metadata import (
    NO_OPERATIONS,
    Cursor,
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponseTopic,
)
from tidelog.rpc.kafka.services import Context, Later
from tidelog.rpc.kafka.topic_rows import TOPIC_COST, rows_of
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows

IDS_SINCE = 12
OPERATIONS_SINCE = 8
BROKERS, CONTROLLERS = 1, 2
"""Types of endpoints."""
DESCRIBED_MAX = 2_000
"""Partitions in one answer of DescribeTopicPartitions."""
DESCRIBED_AT_A_TIME = 500
NAMES_AT_A_TIME = 5_000
_NO_TOPICS = ClusterImage()


# Metadata.


async def metadata(request: MetadataRequest, context: Context) -> MetadataResponse | Later:
    """While topics are created the next request of the connection is begun: without a controller that takes a while,
    and a producer writes to its other topics meanwhile."""
    services = context.services
    unknown: list[str] = []
    if request.allow_auto_topic_creation:
        known = services.image.topic_ids
        unknown = [topic.name for topic in request.topics or () if topic.name and topic.name not in known]
    if unknown:
        return Later(lambda: _created(request, context, unknown))
    return await _told(request, context, {})


async def _created(request: MetadataRequest, context: Context, unknown: list[str]) -> MetadataResponse:
    made = await context.services.auto_create.create(unknown)
    return await _told(request, context, {name: error.code for name, error in made.items()})


async def _told(request: MetadataRequest, context: Context, made: Mapping[str, int]) -> MetadataResponse:
    """`made`: what became of the topics that should be created, where that is an error."""
    services, version = context.services, context.version
    image = services.image  # what is told is of one moment
    rows = rows_of(services.link, image, context.listener)
    wanted: Iterable[Topic | MetadataResponseTopic]
    if request.topics is None or (version == 0 and not request.topics):
        wanted = image.topics.values()
    else:
        wanted = _named(image, request, version, made)
    asks_topics = version >= OPERATIONS_SINCE and request.include_topic_authorized_operations
    encoded = await rows.encode(version, wanted, operations.TOPIC if asks_topics else NO_OPERATIONS)
    return MetadataResponse(
        brokers=[_broker(place) for place in rows.view.places.values()],
        cluster_id=services.link.cluster_id,
        controller_id=rows.view.controller,
        topics=cast("list[MetadataResponseTopic]", encoded),
        cluster_authorized_operations=(
            operations.CLUSTER if request.include_cluster_authorized_operations else NO_OPERATIONS
        ),
    )


def _broker(place: Place) -> MetadataResponseBroker:
    return MetadataResponseBroker(node_id=place.broker, host=place.host, port=place.port, rack=place.rack)


def _named(
    image: ClusterImage, request: MetadataRequest, version: int, made: Mapping[str, int]
) -> Iterator[Topic | MetadataResponseTopic]:
    """Each topic once, however often it is named: an answer must not outgrow its question."""
    told: set[UUID | str] = set()
    for topic in request.topics or ():
        by_id = topic.topic_id != ZERO_UUID
        if version < IDS_SINCE and (by_id or topic.name is None):
            yield MetadataResponseTopic(name=topic.name or "", error_code=errors.code(ErrorCode.INVALID_REQUEST))
            continue
        topic_id = UUID(bytes=topic.topic_id) if by_id else None
        name = topic.name or ""
        found = image.topics.get(topic_id) if topic_id is not None else image.topic_named(name)
        key = found.topic_id if found is not None else (topic_id or name)
        if key in told:
            continue
        told.add(key)
        if found is not None:
            yield found
        elif topic_id is not None:
            unknown = errors.code(ErrorCode.UNKNOWN_TOPIC_ID)
            yield MetadataResponseTopic(name=None, topic_id=topic.topic_id, error_code=unknown)
        else:
            yield MetadataResponseTopic(
                name=name, is_internal=name in INTERNAL_TOPICS, error_code=made.get(name) or unknown_code(name)
            )


def unknown_code(name: str) -> int:
    """Of a name that no topic has: whether one could have it."""
    try:
        if name != METADATA_TOPIC:
            check_name(_NO_TOPICS, name)
    except TidelogError as error:
        return errors.code_of(error)
    return errors.code(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


# DescribeCluster.


async def describe_cluster(request: DescribeClusterRequest, context: Context) -> DescribeClusterResponse:
    if request.endpoint_type != BROKERS:
        refusal, message = (
            (ErrorCode.MISMATCHED_ENDPOINT_TYPE, "this is a broker: controllers describe controllers")
            if request.endpoint_type == CONTROLLERS
            else (ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"there is no endpoint type {request.endpoint_type}")
        )
        return DescribeClusterResponse(
            error_code=errors.code(refusal), error_message=message, endpoint_type=request.endpoint_type
        )
    services = context.services
    view = view_of(services.image, context.listener)
    places = {**view.places, **(view.fenced if request.include_fenced_brokers else {})}
    return DescribeClusterResponse(
        cluster_id=services.link.cluster_id,
        controller_id=view.controller,
        brokers=[
            DescribeClusterBroker(
                broker_id=number, host=place.host, port=place.port, rack=place.rack, is_fenced=place.is_fenced
            )
            for number, place in sorted(places.items())
        ],
        cluster_authorized_operations=(
            operations.CLUSTER if request.include_cluster_authorized_operations else NO_OPERATIONS
        ),
    )


# DescribeTopicPartitions.


async def describe_topic_partitions(
    request: DescribeTopicPartitionsRequest, context: Context
) -> DescribeTopicPartitionsResponse:
    """Topics in the order of their names, from the cursor on, until the answer is full."""
    image = context.services.image
    named = sorted({topic.name for topic in request.topics})
    cursor = request.cursor
    if cursor is not None and (cursor.partition_index < 0 or (named and cursor.topic_name not in named)):
        # There is no place for an error of the whole request, so each topic has it.
        code = errors.code(ErrorCode.INVALID_REQUEST)
        rows = [_failed(name, code) for name in named or [cursor.topic_name]]
        return DescribeTopicPartitionsResponse(topics=rows)
    start = "" if cursor is None else cursor.topic_name
    left = max(1, min(DESCRIBED_MAX, request.response_partition_limit))
    names = [name for name in named if name >= start] if named else await _first_names(image, start, left + 1)
    page = _Page(view_of(image, context.listener), left)
    for name in names:
        topic = image.topic_named(name)
        if topic is None:
            await page.add(_failed(name, unknown_code(name)))
        elif not await page.describe(topic, cursor.partition_index if cursor is not None and name == start else 0):
            break
    return page.response


class _Page:
    """An answer of DescribeTopicPartitions, encoded as it grows."""

    def __init__(self, view: BrokersView, left: int) -> None:
        self._view = view
        self._left = left
        self._done = 0
        self._topics = EncodedRows()
        self.response = DescribeTopicPartitionsResponse(
            topics=cast("list[DescribeTopicPartitionsResponseTopic]", self._topics)
        )

    async def describe(self, topic: Topic, first: int) -> bool:
        """From a partition on, as far as there is room; False when there is none left."""
        stop = min(first + self._left, len(topic.partitions))
        if not self._left or stop < len(topic.partitions):
            self.response.next_cursor = Cursor(topic_name=topic.name, partition_index=max(first, stop))
        if not self._left:
            return False
        rows = EncodedRows()
        while first < stop:
            numbers = range(first, min(first + DESCRIBED_AT_A_TIME, stop))
            some = [self._partition(number, topic.partitions[number]) for number in numbers]
            encoded = DESCRIBE_TOPIC_PARTITIONS.encode_rows(0, DescribeTopicPartitionsResponsePartition, some)
            rows.add(len(some), encoded)
            first = numbers.stop
            self._left -= len(some)
            await self._rest(len(some))
        row = DescribeTopicPartitionsResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id.bytes,
            is_internal=topic.name in INTERNAL_TOPICS,
            partitions=cast("list[DescribeTopicPartitionsResponsePartition]", rows),
            topic_authorized_operations=operations.TOPIC,
        )
        await self.add(row)
        return self.response.next_cursor is None

    async def add(self, row: DescribeTopicPartitionsResponseTopic) -> None:
        encoded = DESCRIBE_TOPIC_PARTITIONS.encode_rows(0, DescribeTopicPartitionsResponseTopic, [row])
        self._topics.add(1, encoded)
        await self._rest(TOPIC_COST)

    async def _rest(self, done: int) -> None:
        self._done += done
        if self._done >= DESCRIBED_AT_A_TIME:
            self._done = 0
            await asyncio.sleep(0)

    def _partition(self, number: int, partition: Partition) -> DescribeTopicPartitionsResponsePartition:
        leader, error = self._view.leader(partition, tells_listeners=True)
        return DescribeTopicPartitionsResponsePartition(
            error_code=error,
            partition_index=number,
            leader_id=leader,
            leader_epoch=partition.leader_epoch,
            replica_nodes=list(partition.replicas),
            isr_nodes=list(partition.isr),
            eligible_leader_replicas=list(partition.eligible),
            last_known_elr=[],
            offline_replicas=self._view.offline(partition),
        )


async def _first_names(image: ClusterImage, start: str, count: int) -> list[str]:
    """The first from `start` on: each has a partition at least, so no answer has room for more."""
    names: list[str] = []
    for at, name in enumerate(image.topic_ids):
        if name >= start:
            names.append(name)
        if at % NAMES_AT_A_TIME == NAMES_AT_A_TIME - 1:
            names = nsmallest(count, names)
            await asyncio.sleep(0)
    return nsmallest(count, names)


def _failed(name: str, code: int) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(name=name, error_code=code, is_internal=name in INTERNAL_TOPICS)


HANDLERS: dict[int, Entry] = {
    METADATA.key: Entry(metadata),
    DESCRIBE_CLUSTER.key: Entry(describe_cluster),
    DESCRIBE_TOPIC_PARTITIONS.key: Entry(describe_topic_partitions),
}
