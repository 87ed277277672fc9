"""Large answers of Metadata: encoded in slices, remembered, and byte for byte what the codec makes of the whole."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from tidelog.metadata.image import Broker, ClusterImage, Partition, Topic
from tidelog.model.maps import Map
from tidelog.rpc.kafka import metadata, topic_rows
from tidelog.rpc.kafka.brokers_view import BrokersView
from tidelog.rpc.kafka.messages import DESCRIBE_TOPIC_PARTITIONS, METADATA
from tidelog.rpc.kafka.messages.metadata import (
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tidelog.rpc.kafka.services import Context, DeferredResponse
from tidelog.rpc.kafka.topic_rows import PARTITIONS_AT_A_TIME, TopicRows, rows_of
from tidelog.rpc.kafka.wire import EncodedRows, UnencodableError
from tidelog.services.cluster import ClusterService
from tidelog.services.context import INTERNAL
from tidelog.services.forwarding import Forwarder
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.node import NodeAccess
from tidelog.services.topics import TopicService

DIRECTORY = UUID(int=1)
VERSION = 12


class Cache:
    """The part of a `MetadataCache` that `ClusterService.metadata` reads."""

    cluster_id = "c"
    image = ClusterImage()
    metadata_offset = 0
    active_controller = 1

    def stale_ms(self) -> int | None:
        return None


def broker(number: int, **fields: Any) -> Broker:
    endpoints = (("L", "PLAINTEXT", f"host-{number}", 9092),)
    return Broker(number, 1, DIRECTORY, endpoints, None, (DIRECTORY,), (), **{"fenced": False, **fields})


BROKERS = Map({number: broker(number) for number in (1, 2, 3)})


def topic(number: int, partitions: int) -> Topic:
    rows = {at: Partition((1, 2, 3), (DIRECTORY,) * 3, (1, 3), 1, 5, 6, (2,)) for at in range(partitions)}
    return Topic(UUID(int=100 + number), f"topic-{number:06}", Map(rows))


def image_of(*topics: Topic, brokers: Map[int, Broker] = BROKERS) -> ClusterImage:
    by_id = Map({one.topic_id: one for one in topics})
    return ClusterImage(brokers=brokers, topics=by_id, topic_ids=Map({one.name: one.topic_id for one in topics}))


def driven(job: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """Its result, and how many turns of the event loop it took."""
    turns = 1
    while True:
        try:
            assert job.send(None) is None, "it waits for nothing"
        except StopIteration as end:
            return end.value, turns
        turns += 1


def context(image: ClusterImage, cache: Cache, version: int) -> Context:
    cache.image = image
    node = NodeAccess(cache=cast(Any, cache), forwarder=cast(Forwarder, None), limits=RequestLimits(), guard=Guard())
    cluster = ClusterService(node, TopicService(node))
    services = SimpleNamespace(guard=node.guard, cluster=cluster, cache=cache, image=image)
    return cast(Context, SimpleNamespace(services=services, version=version, listener="L", request=INTERNAL))


def ask(image: ClusterImage, cache: Cache, *names: str, version: int = VERSION) -> tuple[Any, int]:
    topics = [MetadataRequestTopic(name=name) for name in names] or None
    request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
    answer, turns = driven(metadata.metadata(request, context(image, cache, version)))
    data = b"".join(METADATA.encode_response(version, answer))
    return METADATA.decode_response(version, data), turns


@pytest.mark.parametrize("version", range(14))
def test_rows_that_were_encoded_before_are_the_same_bytes(version: int) -> None:
    def row(number: int) -> MetadataResponsePartition:
        return MetadataResponsePartition(partition_index=number, leader_id=1, replica_nodes=[1, 2], isr_nodes=[2])

    rows = [row(number) for number in range(300)]
    whole = [
        MetadataResponseTopic(name="a"),
        MetadataResponseTopic(name="b", topic_id=bytes(range(16)), partitions=rows),
    ]
    parts = EncodedRows()
    for first in (0, 100, 200):
        parts.add(100, METADATA.encode_rows(version, MetadataResponsePartition, rows[first : first + 100]))
    assert len(parts) == 300
    sliced = MetadataResponseTopic(
        name="b", topic_id=bytes(range(16)), partitions=cast("list[MetadataResponsePartition]", parts)
    )
    assert METADATA.encode_rows(version, MetadataResponseTopic, [whole[0], sliced]) == METADATA.encode_rows(
        version, MetadataResponseTopic, whole
    )


def test_a_row_that_cannot_be_written_says_which_value_is_wrong() -> None:
    with pytest.raises(UnencodableError, match="MetadataResponsePartition v12"):
        METADATA.encode_rows(VERSION, MetadataResponsePartition, [MetadataResponsePartition(partition_index=1 << 40)])


@pytest.mark.parametrize(("topics", "partitions"), [(1, 20_000), (40, 500), (2_000, 10), (20_000, 1)])
def test_a_large_answer_is_made_in_many_turns(topics: int, partitions: int) -> None:
    image, cache = image_of(*(topic(number, partitions) for number in range(topics))), Cache()
    found, turns = ask(image, cache)
    assert sum(len(one.partitions) for one in found.topics) == 20_000
    assert turns >= 20_000 // PARTITIONS_AT_A_TIME
    again, fewer = ask(image, cache)
    assert again == found
    assert fewer < turns / 4, "rows are remembered"
    one, turns = ask(image, cache, "topic-000000")
    assert (one.topics, turns) == ([found.topics[[t.name for t in found.topics].index("topic-000000")]], 1)
    request = DescribeTopicPartitionsRequest()
    page, turns = driven(metadata.describe_topic_partitions(request, context(image, cache, 0)))
    data = b"".join(DESCRIBE_TOPIC_PARTITIONS.encode_response(0, page))
    decoded = DESCRIBE_TOPIC_PARTITIONS.decode_response(0, data)
    assert sum(len(one.partitions) for one in decoded.topics) == metadata.DESCRIBED_MAX
    assert turns >= metadata.DESCRIBED_MAX // metadata.DESCRIBED_AT_A_TIME
    assert [one.name for one in decoded.topics] == sorted(str(one.name) for one in decoded.topics)


def test_a_row_holds_as_long_as_its_topic_and_the_brokers_are_the_same() -> None:
    cache, first = Cache(), topic(1, 2)
    image = image_of(first, topic(2, 1))
    rows = rows_of(cast(Any, cache), image, "L")
    assert rows_of(cast(Any, cache), image, "L") is rows
    assert rows_of(cast(Any, cache), image_of(first), "L") is rows, "other topics, the same brokers"
    assert rows_of(cast(Any, cache), image, "OTHER") is not rows
    ask(image, cache)
    changed = Topic(
        first.topic_id, first.name, first.partitions.set(0, first.partitions[0].led(3, isr=(3,), eligible=()))
    )
    found, _ = ask(image_of(changed), cache)
    assert [row.leader_id for row in found.topics[0].partitions] == [3, 1]
    fenced = BROKERS.set(2, broker(2, fenced=True))
    found, _ = ask(image_of(changed, brokers=fenced), cache)
    assert [row.offline_replicas for row in found.topics[0].partitions] == [[2], [2]]


def test_no_more_is_remembered_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_rows, "BYTES_MAX", 1_000)
    rows = TopicRows(BROKERS, "L")
    for number in range(50):
        driven(rows.encode(VERSION, [topic(number, 5)]))
        assert 0 < sum(len(data) for _, data in rows._rows.values()) == rows._bytes <= 1_000
    driven(rows.encode(VERSION, [topic(99, 100)]))
    assert rows._bytes == 0, "a row that is larger than all the room is not kept"
    cache = Cache()
    for number in range(3 * topic_rows.LISTENERS_MAX):
        rows_of(cast(Any, cache), image_of(), str(number))
    assert len(topic_rows._CACHES[cast(Any, cache)]) <= topic_rows.LISTENERS_MAX


def test_only_a_request_that_may_create_lets_the_next_one_begin() -> None:
    image, cache = image_of(topic(1, 1)), Cache()

    def handled(name: str, *, may_create: bool) -> object:
        request = MetadataRequest(topics=[MetadataRequestTopic(name=name)], allow_auto_topic_creation=may_create)
        return driven(metadata.metadata(request, context(image, cache, VERSION)))[0]

    assert isinstance(handled("new", may_create=True), DeferredResponse)
    assert isinstance(handled("new", may_create=False), MetadataResponse)
    assert isinstance(handled("topic-000001", may_create=True), MetadataResponse)


def test_replicas_in_a_directory_that_stands_still_are_offline() -> None:
    other = UUID(int=2)
    view = BrokersView(BROKERS.set(2, broker(2, offline=(other,))), "L")
    assert view.offline(Partition((1, 2), (DIRECTORY, other), (1,), 1, 0, 0)) == [2]
    assert view.offline(Partition((1, 2), (DIRECTORY, DIRECTORY), (1,), 1, 0, 0)) == []
    assert view.offline(Partition((1, 9), (DIRECTORY, DIRECTORY), (1,), 1, 0, 0)) == [9]
    leaving = BrokersView(BROKERS.set(2, broker(2, in_controlled_shutdown=True)), "L")
    assert leaving.leader(Partition((2,), (DIRECTORY,), (2,), 2, 0, 0), tells_listeners=True) == (2, 0)
    assert BrokersView(Map(), "L").controller == -1
