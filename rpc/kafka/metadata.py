"""Metadata, DescribeCluster, DescribeTopicPartitions: from this broker's copy of the metadata.

The topics of a Metadata request:

    topics      version 0     from version 1 on
    null        -             all
    empty       all           none
    names       these         these, each once; unknown ones are created if request and cluster allow it
    ids         -             these, from version 12 on; 10 and 11 carry ids and may not use them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import nsmallest
from typing import cast
from uuid import UUID

from tidelog.metadata.decision import Outcome
from tidelog.metadata.image import Partition, Topic
from tidelog.metadata.topics import INTERNAL_TOPICS
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka import errors, operations
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.brokers_view import BrokerEndpoint, BrokersView, view_of
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import metadata as messages
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.rpc.kafka.topic_rows import TOPIC_COST, rows_of
from tidelog.rpc.kafka.wire import ZERO_UUID, EncodedRows
from tidelog.services.authorization import CLUSTER
from tidelog.services.cluster import ClusterMetadata, MetadataQuery

IDS_SINCE = 12
OPERATIONS_SINCE = 8
BROKERS, CONTROLLERS = 1, 2
"""Types of endpoints."""
DESCRIBED_MAX = 2_000
"""Partitions in one answer of DescribeTopicPartitions."""
DESCRIBED_AT_A_TIME = 500
NAMES_AT_A_TIME = 5_000


# Metadata.


async def metadata(request: messages.MetadataRequest, context: Context) -> messages.MetadataResponse | DeferredResponse:
    """While topics are created the connection's next request begins: without a controller that takes a while, and a
    producer writes to its other topics meanwhile."""
    unknown: list[str] = []
    if request.allow_auto_topic_creation:
        known = context.services.image.topic_ids
        unknown = [topic.name for topic in request.topics or () if topic.name and topic.name not in known]
    if unknown:
        return DeferredResponse(lambda: _respond(request, context, unknown))
    return await _respond(request, context, [])


async def _respond(
    request: messages.MetadataRequest, context: Context, unknown: list[str]
) -> messages.MetadataResponse:
    services, version = context.services, context.version
    cluster = await services.cluster.metadata(context.request, MetadataQuery(create=tuple(unknown)))
    rows = rows_of(services.cache, cluster.image, context.listener)
    topics: Iterable[Topic | messages.MetadataResponseTopic]
    if request.topics is None or (version == 0 and not request.topics):
        topics = await cluster.topics()
    else:
        topics = _named(cluster, request, version)
    asks_topics = version >= OPERATIONS_SINCE and request.include_topic_authorized_operations
    on_topic = partial(operations.allowed_on_topic, services.guard, context.request)
    encoded = await rows.encode(version, topics, on_topic if asks_topics else None)
    return messages.MetadataResponse(
        brokers=[_broker(endpoint) for endpoint in rows.view.reachable.values()],
        cluster_id=cluster.cluster_id,
        controller_id=rows.view.controller,
        topics=cast("list[messages.MetadataResponseTopic]", encoded),
        cluster_authorized_operations=(
            operations.allowed(context.services.guard, context.request, CLUSTER)
            if request.include_cluster_authorized_operations
            else messages.NO_OPERATIONS
        ),
    )


def _broker(endpoint: BrokerEndpoint) -> messages.MetadataResponseBroker:
    return messages.MetadataResponseBroker(
        node_id=endpoint.broker, host=endpoint.host, port=endpoint.port, rack=endpoint.rack
    )


def _named(
    cluster: ClusterMetadata, request: messages.MetadataRequest, version: int
) -> Iterator[Topic | messages.MetadataResponseTopic]:
    """Each topic once, however often it is named: a response must not outgrow its request."""
    done: set[UUID | str] = set()
    for topic in request.topics or ():
        topic_id = UUID(bytes=topic.topic_id) if topic.topic_id != ZERO_UUID else None
        if version < IDS_SINCE and (topic_id is not None or topic.name is None):
            yield messages.MetadataResponseTopic(
                name=topic.name or "", error_code=errors.code(ErrorCode.INVALID_REQUEST)
            )
            continue
        name = topic.name or ""
        row = cluster.find(name, topic_id)
        key = row.topic_id if isinstance(row, Topic) else (topic_id or name)
        if key in done:
            continue
        done.add(key)
        if isinstance(row, Topic):
            yield row
        elif topic_id is not None:
            yield messages.MetadataResponseTopic(name=None, topic_id=topic.topic_id, error_code=errors.code(row.error))
        else:
            yield messages.MetadataResponseTopic(
                name=name, is_internal=name in INTERNAL_TOPICS, error_code=errors.code(row.error)
            )


# DescribeCluster.


async def describe_cluster(
    request: messages.DescribeClusterRequest, context: Context
) -> messages.DescribeClusterResponse:
    if request.endpoint_type != BROKERS:
        rejection, message = (
            (ErrorCode.MISMATCHED_ENDPOINT_TYPE, "this is a broker: controllers describe controllers")
            if request.endpoint_type == CONTROLLERS
            else (ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"there is no endpoint type {request.endpoint_type}")
        )
        return messages.DescribeClusterResponse(
            error_code=errors.code(rejection), error_message=message, endpoint_type=request.endpoint_type
        )
    description = await context.services.cluster.describe(context.request)
    view = view_of(description.image, context.listener)
    reachable = {**view.reachable, **(view.fenced if request.include_fenced_brokers else {})}
    return messages.DescribeClusterResponse(
        cluster_id=description.cluster_id,
        controller_id=view.controller,
        brokers=[
            messages.DescribeClusterBroker(
                broker_id=number,
                host=endpoint.host,
                port=endpoint.port,
                rack=endpoint.rack,
                is_fenced=endpoint.is_fenced,
            )
            for number, endpoint in sorted(reachable.items())
        ],
        cluster_authorized_operations=(
            operations.allowed(context.services.guard, context.request, CLUSTER)
            if request.include_cluster_authorized_operations
            else messages.NO_OPERATIONS
        ),
    )


# DescribeTopicPartitions.


async def describe_topic_partitions(
    request: messages.DescribeTopicPartitionsRequest, context: Context
) -> messages.DescribeTopicPartitionsResponse:
    """Topics in the order of their names, from the cursor on, until the response is full."""
    cluster = await context.services.cluster.metadata(context.request, MetadataQuery())
    image = cluster.image
    named = sorted({topic.name for topic in request.topics})
    cursor = request.cursor
    if cursor is not None and (cursor.partition_index < 0 or (named and cursor.topic_name not in named)):
        # The response has no error of its own, so every row has it.
        code = errors.code(ErrorCode.INVALID_REQUEST)
        rows = [_failed(name, code) for name in named or [cursor.topic_name]]
        return messages.DescribeTopicPartitionsResponse(topics=rows)
    start = "" if cursor is None else cursor.topic_name
    left = max(1, min(DESCRIBED_MAX, request.response_partition_limit))
    names = [name for name in named if name >= start] if named else await _first_names(cluster, start, left + 1)
    on_topic = partial(operations.allowed_on_topic, context.services.guard, context.request)
    page = _Page(view_of(image, context.listener), left, on_topic)
    for name in names:
        topic = cluster.find(name)
        if isinstance(topic, Outcome):
            await page.add(_failed(name, errors.code(topic.error)))
        elif not await page.describe(topic, cursor.partition_index if cursor is not None and name == start else 0):
            break
    return page.response


class _Page:
    """An answer of DescribeTopicPartitions, encoded as it grows."""

    def __init__(self, view: BrokersView, left: int, on_topic: Callable[[str], int]) -> None:
        """`on_topic` returns the authorized operations."""
        self._view = view
        self._left = left
        self._on_topic = on_topic
        self._done = 0
        self._topics = EncodedRows()
        self.response = messages.DescribeTopicPartitionsResponse(
            topics=cast("list[messages.DescribeTopicPartitionsResponseTopic]", self._topics)
        )

    async def describe(self, topic: Topic, first: int) -> bool:
        """Add partitions from `first` on, up to the limit; return whether the response may have more topics."""
        stop = min(first + self._left, len(topic.partitions))
        if not self._left or stop < len(topic.partitions):
            self.response.next_cursor = messages.Cursor(topic_name=topic.name, partition_index=max(first, stop))
        if not self._left:
            return False
        rows = EncodedRows()
        while first < stop:
            numbers = range(first, min(first + DESCRIBED_AT_A_TIME, stop))
            some = [self._partition(number, topic.partitions[number]) for number in numbers]
            encoded = apis.DESCRIBE_TOPIC_PARTITIONS.encode_rows(
                0, messages.DescribeTopicPartitionsResponsePartition, some
            )
            rows.add(len(some), encoded)
            first = numbers.stop
            self._left -= len(some)
            await self._rest(len(some))
        row = messages.DescribeTopicPartitionsResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id.bytes,
            is_internal=topic.name in INTERNAL_TOPICS,
            partitions=cast("list[messages.DescribeTopicPartitionsResponsePartition]", rows),
            topic_authorized_operations=self._on_topic(topic.name),
        )
        await self.add(row)
        return self.response.next_cursor is None

    async def add(self, row: messages.DescribeTopicPartitionsResponseTopic) -> None:
        encoded = apis.DESCRIBE_TOPIC_PARTITIONS.encode_rows(0, messages.DescribeTopicPartitionsResponseTopic, [row])
        self._topics.add(1, encoded)
        await self._rest(TOPIC_COST)

    async def _rest(self, done: int) -> None:
        self._done += done
        if self._done >= DESCRIBED_AT_A_TIME:
            self._done = 0
            await asyncio.sleep(0)

    def _partition(self, number: int, partition: Partition) -> messages.DescribeTopicPartitionsResponsePartition:
        leader, error = self._view.leader(partition, tells_listeners=True)
        return messages.DescribeTopicPartitionsResponsePartition(
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


async def _first_names(cluster: ClusterMetadata, start: str, count: int) -> list[str]:
    """Return the first names from `start` on that the client may describe. Each topic has a partition, so a response
    cannot have more."""
    names: list[str] = []
    for at, topic in enumerate(await cluster.topics()):
        if topic.name >= start:
            names.append(topic.name)
        if at % NAMES_AT_A_TIME == NAMES_AT_A_TIME - 1:
            names = nsmallest(count, names)
            await asyncio.sleep(0)
    return nsmallest(count, names)


def _failed(name: str, code: int) -> messages.DescribeTopicPartitionsResponseTopic:
    return messages.DescribeTopicPartitionsResponseTopic(
        name=name, error_code=code, is_internal=name in INTERNAL_TOPICS
    )


HANDLERS: dict[int, Entry] = {
    apis.METADATA.key: Entry(metadata),
    apis.DESCRIBE_CLUSTER.key: Entry(describe_cluster),
    apis.DESCRIBE_TOPIC_PARTITIONS.key: Entry(describe_topic_partitions),
}
