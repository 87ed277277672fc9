"""Requests that name thousands of groups and partitions, through the sockets of a whole node: all are answered, and
other clients have their turn meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.async_tests import inside
from support.kafka.group_api import name_of
from support.kafka.node import KafkaNode, prepare, running
from support.kafka.server import soon

from tidelog.coordinator.requests import OffsetToCommit
from tidelog.log.batch import Record, encode
from tidelog.model.ids import PartitionId, TopicId
from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.messages import data, groups
from tidelog.rpc.kafka.messages.admin import AlterReplicaLogDir, AlterReplicaLogDirsRequest, AlterReplicaLogDirTopic
from tidelog.rpc.kafka.messages.cluster import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ElectLeadersTopicPartitions,
    ReassignablePartition,
    ReassignableTopic,
)
from tidelog.rpc.kafka.messages.configs import DescribeConfigsRequest, DescribeConfigsResource
from tidelog.rpc.kafka.messages.metadata import FindCoordinatorRequest, MetadataRequest, MetadataRequestTopic
from tidelog.rpc.kafka.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest, DeleteTopicState
from tidelog.services.context import INTERNAL

GROUPS = 3_000
PARTITIONS = 12_000
NAMES = [f"group-{number}" for number in range(GROUPS)]
UNKNOWN = "UNKNOWN_TOPIC_OR_PARTITION"
TURN_MAX_S = 0.5
"""Far above what a slice takes, and far below what the whole request takes where it is not sliced on a slow machine."""
PATIENCE_S = 120


@dataclass
class Turns:
    """What another task on the loop sees while a request is answered."""

    count: int = 0
    longest_s: float = 0.0


class Client:
    def __init__(self, node: KafkaNode) -> None:
        self.node = node
        self.turns = Turns()

    async def ask(self, api: Any, request: object, version: int | None = None) -> Any:
        """The decoded answer, which came in one frame; `turns` counts those of the loop."""
        version = api.high if version is None else version
        client = await self.node.client()
        client.send(api, version, 1, request)
        async with asyncio.timeout(PATIENCE_S):
            ticking = asyncio.create_task(self._tick())
            try:
                data = await self._answer(client)
            finally:
                ticking.cancel()
        self.node.drop(client)
        return api.decode_response(version, data[8:], _body_at(api, version) - 4)

    async def _answer(self, client: Any) -> bytes:
        head = await client.reader.readexactly(4)
        return bytes(head + await client.reader.readexactly(int.from_bytes(head, "big")))

    async def _tick(self) -> None:
        self.turns = Turns()
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now_s = time.monotonic()
            self.turns.count += 1
            self.turns.longest_s = max(self.turns.longest_s, now_s - last_s)
            last_s = now_s


def _body_at(api: Any, version: int) -> int:
    """Behind the correlation id, and the tagged fields of a flexible header."""
    return 5 if api.flexible(version) else 4


class World:
    def __init__(self, runner: asyncio.Runner, node: KafkaNode) -> None:
        self._runner = runner
        self.node = node

    def run(self, job: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            try:
                await job(Client(self.node))
            finally:
                self.node.drop_all()
            await soon(self.node.is_idle, "nothing is held")
            assert not self.node.lines.wrong, "\n".join(self.node.lines.wrong)

        self._runner.run(main())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    config = prepare(tmp_path_factory.mktemp("node"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        made = World(runner, runner.run(stack.enter_async_context(running(config))))
        try:
            runner.run(_topic(Client(made.node)))
            yield made
        finally:
            runner.run(stack.aclose())


async def _topic(client: Client) -> None:
    wanted = CreatableTopic(name="orders", num_partitions=2, replication_factor=1)
    (row,) = (await client.ask(apis.CREATE_TOPICS, CreateTopicsRequest(topics=[wanted], timeout_ms=10_000))).topics
    assert row.error_code == 0
    services = client.node.shared.services
    where = PartitionId(TopicId(services.image.topic_ids["orders"]), 0)
    await soon(lambda: services.data.log_directories._replicas.get(where) is not None, "the replica is open")

    def is_led() -> bool:
        return any(one.replica.partition_id == where for one in services.data.log_directories._replicas.leaders())

    await soon(is_led, "orders is led")
    await services.groups.find_coordinators(INTERNAL, ["any"])
    await soon(lambda: len(list(services.groups.coordinator.leading_shards())) == 2, "groups are open")


def codes(rows: list[Any]) -> list[str]:
    return [name_of(row.error_code) for row in rows]


@inside(World.run, "world")
async def test_thousands_of_groups_in_one_request(client: Client) -> None:
    found = await client.ask(apis.FIND_COORDINATOR, FindCoordinatorRequest(coordinator_keys=NAMES))
    assert [row.key for row in found.coordinators] == NAMES
    assert set(codes(found.coordinators)) == {""}

    service = client.node.groups
    where = PartitionId(TopicId(service._tail.image.topic_ids["orders"]), 1)
    for first in range(0, GROUPS, 100):
        some = NAMES[first : first + 100]
        one = {where: OffsetToCommit(7)}
        await asyncio.gather(
            *(service.commit_offsets(INTERNAL, name, one, member_id="", member_epoch=-1) for name in some)
        )

    listed = await client.ask(apis.LIST_GROUPS, groups.ListGroupsRequest())
    assert sorted(row.group_id for row in listed.groups) == sorted(NAMES)
    described = (await client.ask(apis.DESCRIBE_GROUPS, groups.DescribeGroupsRequest(groups=NAMES))).groups
    assert [(row.group_id, row.group_state) for row in described] == [(name, "Empty") for name in NAMES]
    assert client.turns.count >= GROUPS // 2
    assert client.turns.longest_s < TURN_MAX_S
    request = groups.ConsumerGroupDescribeRequest(group_ids=NAMES)
    rows = (await client.ask(apis.CONSUMER_GROUP_DESCRIBE, request)).groups
    assert codes(rows) == ["GROUP_ID_NOT_FOUND"] * GROUPS
    wanted = [groups.OffsetFetchRequestGroup(group_id=name, topics=None) for name in NAMES]
    for version in (8, 9, 10):
        request_of = groups.OffsetFetchRequest(groups=wanted)
        fetched = (await client.ask(apis.OFFSET_FETCH, request_of, version)).groups
        assert [row.group_id for row in fetched] == NAMES
        assert {row.topics[0].partitions[0].committed_offset for row in fetched} == {7}
    deleted = (await client.ask(apis.DELETE_GROUPS, groups.DeleteGroupsRequest(groups_names=NAMES))).results
    assert [(row.group_id, row.error_code) for row in deleted] == [(name, 0) for name in NAMES]
    assert client.turns.longest_s < TURN_MAX_S
    assert (await client.ask(apis.LIST_GROUPS, groups.ListGroupsRequest())).groups == []


@inside(World.run, "world")
async def test_thousands_of_partitions_in_one_produce_fetch_and_list(client: Client) -> None:
    records = encode([Record(0, 1 << 40, None, b"x", ())])
    numbers = range(PARTITIONS)
    expected = ["", "", *[UNKNOWN] * (PARTITIONS - 2)]
    parts = [data.PartitionProduceData(index=number, records=records) for number in numbers]
    topic = data.TopicProduceData(name="orders", partition_data=parts)
    request: Any = data.ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=[topic])
    answer = await client.ask(apis.PRODUCE, request, 12)
    assert codes(answer.responses[0].partition_responses) == expected
    assert client.turns.count >= 4 * PARTITIONS // 1_000
    assert client.turns.longest_s < TURN_MAX_S

    wanted = [data.FetchPartition(partition=number, partition_max_bytes=1 << 20) for number in numbers]
    request = data.FetchRequest(topics=[data.FetchTopic(topic="orders", partitions=wanted)])
    answer = await client.ask(apis.FETCH, request, 12)
    rows = answer.responses[0].partitions
    assert codes(rows) == expected
    assert len(rows[0].records) == len(rows[1].records) > 0
    assert client.turns.count >= 4 * PARTITIONS // 1_000
    assert client.turns.longest_s < TURN_MAX_S

    asked = [data.ListOffsetsPartition(partition_index=number, timestamp=-1) for number in numbers]
    topics = [data.ListOffsetsTopic(name="orders", partitions=asked)]
    answer = await client.ask(apis.LIST_OFFSETS, data.ListOffsetsRequest(replica_id=0, topics=topics))
    assert codes(answer.topics[0].partitions) == expected
    assert [row.offset for row in answer.topics[0].partitions[:2]] == [1, 1]
    assert client.turns.longest_s < TURN_MAX_S
    ends = [data.OffsetForLeaderPartition(partition=number) for number in numbers]
    request = data.OffsetForLeaderEpochRequest(topics=[data.OffsetForLeaderTopic(topic="orders", partitions=ends)])
    answer = await client.ask(apis.OFFSET_FOR_LEADER_EPOCH, request)
    assert codes(answer.topics[0].partitions) == expected


@inside(World.run, "world")
async def test_thousands_of_offsets_in_one_commit_fetch_and_delete(client: Client) -> None:
    numbers = range(PARTITIONS)
    expected = ["", "", *[UNKNOWN] * (PARTITIONS - 2)]
    rows = [groups.OffsetCommitRequestPartition(partition_index=number, committed_offset=5) for number in numbers]
    topic = groups.OffsetCommitRequestTopic(name="orders", partitions=rows)
    request: Any = groups.OffsetCommitRequest(group_id="wide", topics=[topic])
    answer = await client.ask(apis.OFFSET_COMMIT, request, 9)
    assert codes(answer.topics[0].partitions) == expected
    named = [groups.OffsetFetchRequestTopics(name="orders", partition_indexes=list(numbers))]
    wanted = [groups.OffsetFetchRequestGroup(group_id="wide", topics=named)]
    answer = await client.ask(apis.OFFSET_FETCH, groups.OffsetFetchRequest(groups=wanted), 9)
    found = answer.groups[0].topics[0].partitions
    assert [row.committed_offset for row in found] == [5, 5, *[-1] * (PARTITIONS - 2)]

    # Those of partitions that there are: by the service, which both APIs call.
    service = client.node.groups
    topic_id = TopicId(service._tail.image.topic_ids["orders"])
    offsets = {PartitionId(topic_id, number): OffsetToCommit(number) for number in numbers}
    done = await service.commit_offsets(INTERNAL, "wider", offsets, member_id="", member_epoch=-1)
    assert len(done) == PARTITIONS
    assert set(done.values()) == {None}
    held = await service.fetch_offsets(INTERNAL, "wider", None)
    assert [getattr(held[place], "offset", None) for place in offsets] == list(numbers)
    assert set((await service.delete_offsets(INTERNAL, "wider", list(offsets))).values()) == {None}
    assert await service.fetch_offsets(INTERNAL, "wider", None) == {}
    await service.delete_group(INTERNAL, "wider")


@inside(World.run, "world")
async def test_thousands_of_topics_in_one_request(client: Client) -> None:
    names = [f"topic-{number}" for number in range(PARTITIONS)]
    topics = [MetadataRequestTopic(name=name) for name in names]
    request: Any = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
    answer = await client.ask(apis.METADATA, request)
    assert codes(answer.topics) == [UNKNOWN] * PARTITIONS
    assert client.turns.longest_s < TURN_MAX_S
    wanted = [CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in names]
    request = CreateTopicsRequest(topics=wanted, validate_only=True, timeout_ms=60_000)
    answer = await client.ask(apis.CREATE_TOPICS, request, 4)
    assert codes(answer.topics) == [""] * PARTITIONS
    gone = DeleteTopicsRequest(topics=[DeleteTopicState(name=name) for name in names], timeout_ms=60_000)
    answer = await client.ask(apis.DELETE_TOPICS, gone)
    assert codes(answer.responses) == [UNKNOWN] * PARTITIONS
    resources = [DescribeConfigsResource(resource_type=2, resource_name=name) for name in names[:GROUPS]]
    answer = await client.ask(apis.DESCRIBE_CONFIGS, DescribeConfigsRequest(resources=resources))
    assert codes(answer.results) == [UNKNOWN] * GROUPS


def test_thousands_of_partitions_in_requests_of_an_operator(world: World, tmp_path: Path) -> None:
    async def job(client: Client) -> None:
        numbers = list(range(PARTITIONS))
        request: Any = ElectLeadersRequest(
            election_type=0,
            topic_partitions=[ElectLeadersTopicPartitions(topic="orders", partitions=numbers)],
            timeout_ms=60_000,
        )
        answer = await client.ask(apis.ELECT_LEADERS, request)
        rows = answer.replica_election_results[0].partition_result
        assert codes(rows) == ["ELECTION_NOT_NEEDED"] * 2 + [UNKNOWN] * (PARTITIONS - 2)
        moved = [ReassignablePartition(partition_index=number, replicas=[1]) for number in numbers]
        request = AlterPartitionReassignmentsRequest(
            topics=[ReassignableTopic(name="orders", partitions=moved)], timeout_ms=60_000
        )
        answer = await client.ask(apis.ALTER_PARTITION_REASSIGNMENTS, request)
        assert codes(answer.responses[0].partitions) == ["", "", *[UNKNOWN] * (PARTITIONS - 2)]
        topic = AlterReplicaLogDirTopic(name="orders", partitions=numbers)
        nowhere = AlterReplicaLogDir(path=str(tmp_path), topics=[topic])
        answer = await client.ask(apis.ALTER_REPLICA_LOG_DIRS, AlterReplicaLogDirsRequest(dirs=[nowhere]))
        assert codes(answer.results[0].partitions) == ["LOG_DIR_NOT_FOUND"] * 2 + [UNKNOWN] * (PARTITIONS - 2)

    world.run(job)
