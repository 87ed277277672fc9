"""What clients do to connections of a whole node, over real sockets: they go away while they wait, hang up halfway,
never read, come by the thousand. Nothing of it is left, nothing is logged as an error, and others are served."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
import uvloop
from support.async_tests import inside
from support.kafka.group_api import name_of, subscription
from support.kafka.node import KafkaNode, prepare, running
from support.kafka.server import KafkaClient, api_versions, frame, soon

from tidelog.log.batch import Record, encode
from tidelog.rpc.kafka.messages import (
    ALTER_CONFIGS,
    API_VERSIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_GROUPS,
    ELECT_LEADERS,
    FETCH,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_OFFSETS,
    METADATA,
    OFFSET_FETCH,
    PRODUCE,
    SYNC_GROUP,
)
from tidelog.rpc.kafka.messages.cluster import ElectLeadersRequest, ElectLeadersTopicPartitions
from tidelog.rpc.kafka.messages.configs import AlterConfigsRequest, AlterConfigsResource
from tidelog.rpc.kafka.messages.data import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tidelog.rpc.kafka.messages.groups import (
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
    LeaveGroupRequest,
    MemberIdentity,
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from tidelog.rpc.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from tidelog.rpc.kafka.messages.topics import CreatableTopic, CreateTopicsRequest, DeleteTopicsRequest, DeleteTopicState
from tidelog.rpc.kafka.messages.versions import ApiVersionsRequest
from tidelog.rpc.kafka.wire import NUMBERS_MAX
from tidelog.services.context import INTERNAL

MIB = 1 << 20
APIS_REQUEST = ApiVersionsRequest()
SESSION_MS = 2_000
OPENING = ("NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS")
SETTINGS = {"group.min.session.timeout.ms": 100}
TURN_MAX_S = 0.5
IDLE = 1_000
IDLE_BYTES_MAX = 16_000
"""Of a connection that does nothing, the test's own end of it included."""


class World:
    """One node for all tests; its loop stands still between them."""

    def __init__(self, runner: asyncio.Runner, node: KafkaNode) -> None:
        self._runner = runner
        self.node = node

    def run(self, job: Callable[[KafkaNode], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            try:
                await job(self.node)
            finally:
                self.node.drop_all()
            await soon(self.node.is_idle, "nothing is held")
            assert not self.node.lines.wrong, "\n".join(self.node.lines.wrong)

        self._runner.run(main())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    config = prepare(tmp_path_factory.mktemp("node"), SETTINGS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        made = World(runner, runner.run(stack.enter_async_context(running(config))))
        try:
            yield made
        finally:
            runner.run(stack.aclose())


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def ask(client: KafkaClient, api: Any, version: int, request: object) -> Any:
    client.send(api, version, 1, request)
    return (await client.response(api, version))[1]


async def topic(node: KafkaNode, name: str) -> None:
    client = await node.client()
    wanted = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    await ask(client, CREATE_TOPICS, 5, CreateTopicsRequest(topics=[wanted], timeout_ms=10_000))
    await soon_led(node, name)


async def soon_led(node: KafkaNode, name: str) -> None:
    def is_led() -> bool:
        topic_id = node.shared.services.image.topic_ids.get(name)
        return any(
            one.replica.partition_id.topic_id == topic_id for one in node.data.log_directories._replicas.leaders()
        )

    await soon(is_led, f"{name} is led")


def writing(name: str, value: bytes, *, acks: int = -1) -> ProduceRequest:
    part = PartitionProduceData(index=0, records=encode([Record(0, 1 << 40, None, value, ())]))
    return ProduceRequest(acks=acks, topic_data=[TopicProduceData(name=name, partition_data=[part])])


def reading(name: str, offset: int = 0, **more: Any) -> FetchRequest:
    part = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=MIB)
    return FetchRequest(topics=[FetchTopic(topic=name, partitions=[part])], **more)


async def end_of(node: KafkaNode, name: str) -> int:
    client = await node.client()
    part = ListOffsetsPartition(partition_index=0, timestamp=-1)
    request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name=name, partitions=[part])])
    found = (await ask(client, LIST_OFFSETS, 5, request)).topics[0].partitions[0]
    node.drop(client)
    assert found.error_code == 0
    return int(found.offset)


def joining(group: str, member_id: str = "") -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        member_id=member_id,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=20_000,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=subscription("t"))],
    )


async def joined(client: KafkaClient, group: str, member_id: str = "") -> JoinGroupResponse:
    """In version 3 a member has its id at once. A broker that opens its groups for the first time says so."""
    async with asyncio.timeout(20):
        while True:
            found: JoinGroupResponse = await ask(client, JOIN_GROUP, 3, joining(group, member_id))
            if name_of(found.error_code) not in OPENING:
                return found
            await asyncio.sleep(0.02)


async def first_member(node: KafkaNode, group: str) -> tuple[KafkaClient, JoinGroupResponse]:
    """A stable group of one."""
    await node.groups.find_coordinators(INTERNAL, [group])
    client = await node.client()
    me = await joined(client, group)
    assert me.error_code == 0, name_of(me.error_code)
    dealt = SyncGroupRequest(
        group_id=group,
        generation_id=me.generation_id,
        member_id=me.member_id,
        assignments=[SyncGroupRequestAssignment(member_id=me.member_id, assignment=b"all")],
    )
    assert (await ask(client, SYNC_GROUP, 1, dealt)).assignment == b"all"
    return client, me


def members_of(node: KafkaNode, group: str) -> set[str]:
    return {member.member_id for member in node.groups.describe_classic_group(INTERNAL, group).members}


# Gone while they wait.


@inside(World.run, "world")
async def test_a_client_that_is_gone_while_its_fetch_waits_leaves_nothing(node: KafkaNode) -> None:
    await topic(node, "waited-for")
    for is_abrupt in (True, False):
        client = await node.client()
        client.send(FETCH, 12, 1, reading("waited-for", max_wait_ms=60_000, min_bytes=1))
        await soon(lambda: node.data.fetch.waiting_fetches == 1, "it waits")
        if is_abrupt:
            client.writer.transport.abort()
        else:
            client.writer.close()
        await soon(lambda: node.data.fetch.waiting_fetches == 0, "it waits no longer")


@inside(World.run, "world")
async def test_a_member_that_is_gone_while_its_join_waits_is_out_when_its_session_is_over(node: KafkaNode) -> None:
    """As with Kafka: a broken connection says nothing about its member."""
    group = "gone-while-joining"
    client, me = await first_member(node, group)
    other = await node.client()
    other.send(JOIN_GROUP, 3, 1, joining(group))
    await soon(lambda: len(members_of(node, group)) == 2, "it has joined, and waits")
    other.writer.transport.abort()
    await soon(lambda: len(node.server) == len(node.clients) - 1, "its connection is gone")
    beat = HeartbeatRequest(group_id=group, generation_id=me.generation_id, member_id=me.member_id)
    reported = name_of((await ask(client, HEARTBEAT, 3, beat)).error_code)
    assert reported == "REBALANCE_IN_PROGRESS"
    again = await joined(client, group, me.member_id)
    assert again.error_code == 0
    assert again.generation_id == me.generation_id + 1
    beat.generation_id = again.generation_id
    async with asyncio.timeout(20):
        while members_of(node, group) != {me.member_id}:
            await ask(client, HEARTBEAT, 3, beat)
            await asyncio.sleep(0.05)


@inside(World.run, "world")
async def test_writes_of_clients_that_are_gone_are_counted_no_longer(node: KafkaNode) -> None:
    await topic(node, "hasty")
    for number in range(60):
        client = await node.client()
        data = frame(PRODUCE, 9, 1, writing("hasty", bytes(200_000))) * 3
        client.writer.write(data[: len(data) - (number % 3) * 1_000])
        if number % 2:
            await client.writer.drain()
        client.writer.transport.abort()
    await soon(lambda: len(node.server) == 1, "all are gone")
    assert node.held() == {**node.held(), "request bytes": 0, "queued writes": 0}
    client = await node.client()
    row = (await ask(client, PRODUCE, 9, writing("hasty", b"last"))).responses[0].partition_responses[0]
    assert row.error_code == 0


@inside(World.run, "world")
async def test_who_joins_and_leaves_at_once_is_out(node: KafkaNode) -> None:
    """The requests of a connection are begun in their order: the join is the group's before the leave is."""
    group = "in-and-out"
    client, me = await first_member(node, group)
    again = frame(JOIN_GROUP, 3, 2, joining(group, me.member_id))
    leave = LeaveGroupRequest(group_id=group, members=[MemberIdentity(member_id=me.member_id)])
    client.writer.write(again + frame(LEAVE_GROUP, 3, 3, leave))
    number, back = await client.response(JOIN_GROUP, 3)
    assert (number, name_of(back.error_code)) in ((2, ""), (2, "UNKNOWN_MEMBER_ID"))
    number, left = await client.response(LEAVE_GROUP, 3)
    assert (number, left.error_code, left.members[0].error_code) == (3, 0, 0)
    assert members_of(node, group) == set()
    # And a new member: its id is not known yet, so it cannot be left, and its session decides.
    newer = await node.client()
    newer.writer.write(frame(JOIN_GROUP, 3, 4, joining(group)) + frame(LEAVE_GROUP, 3, 5, leave))
    assert (await newer.response(JOIN_GROUP, 3))[1].error_code == 0
    assert name_of((await newer.response(LEAVE_GROUP, 3))[1].members[0].error_code) == "UNKNOWN_MEMBER_ID"


# Half of a connection.


@inside(World.run, "world")
async def test_what_was_sent_before_the_client_ended_its_side_is_done_and_answered_if_it_is_ready(
    node: KafkaNode,
) -> None:
    """Kafka's broker takes such a client for gone. Here what needs no waiting is answered yet."""
    await topic(node, "half-open")
    client = await node.client()
    client.writer.write(b"".join(api_versions(number) for number in (1, 2, 3)))
    client.writer.write_eof()
    assert [(await client.response(API_VERSIONS, 3))[0] for _ in range(3)] == [1, 2, 3]
    assert await client.rest() == b""
    before = await end_of(node, "half-open")
    client = await node.client()
    waiting = frame(FETCH, 12, 1, reading("half-open", before, max_wait_ms=60_000, min_bytes=1 << 30))
    client.writer.write(waiting + frame(PRODUCE, 9, 2, writing("half-open", b"0", acks=0)))
    client.writer.write_eof()
    assert await client.rest() == b"", "nobody waits for who reads no more"
    leaders = node.data.log_directories._replicas.leaders()
    (leading,) = [one for one in leaders if one.replica.topic == "half-open"]
    await soon(lambda: leading.high_watermark == before + 1, "a write counts")


@inside(World.run, "world")
async def test_a_reset_in_the_middle_is_no_event(node: KafkaNode) -> None:
    await topic(node, "reset")
    whole = frame(PRODUCE, 9, 1, writing("reset", bytes(100_000))) + frame(
        FETCH, 12, 2, reading("reset", max_wait_ms=60_000, min_bytes=1 << 30)
    )
    for cut in (1, 3, 5, 11, 2_000, len(whole) - 1, len(whole)):
        one = socket.create_connection(("localhost", node.port))
        one.sendall(whole[:cut])
        await asyncio.sleep(0.01)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
    await soon(lambda: len(node.server) == len(node.clients), "they are gone")
    await soon(lambda: node.shared.requests.used == 0, "and hold nothing")


# Much.


@inside(World.run, "world")
async def test_a_client_that_fetches_and_never_reads_costs_no_more_than_its_part(node: KafkaNode) -> None:
    await topic(node, "unread")
    good = await node.client()
    for _ in range(8):
        row = (await ask(good, PRODUCE, 9, writing("unread", Random(1).randbytes(900_000)))).responses[0]
        assert row.partition_responses[0].error_code == 0
    before = resident()
    greedy = [await node.client(limit=1 << 14) for _ in range(10)]
    for client in greedy:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(b"".join(frame(FETCH, 12, at, reading("unread", at % 8)) for at in range(100)))
    await soon(lambda: node.shared.responses.used > 4 * MIB, "answers wait")
    most = 0
    for _ in range(50):
        await asyncio.sleep(0.01)
        most = max(most, node.shared.responses.used)
        await ask(good, API_VERSIONS, 0, APIS_REQUEST)
    assert most <= len(greedy) * 4 * MIB, f"{most / MIB:.1f} MiB of answers"
    grown = resident() - before
    print(f"10 clients, 1,000 fetches of 0.9 MB not read: {most / MIB:.1f} MiB counted, {grown / MIB:.0f} MiB more")
    assert grown < 100 * MIB
    for client in greedy:
        node.drop(client)
    await soon(lambda: node.shared.responses.used == 0, "all is given back")


@inside(World.run, "world")
async def test_a_thousand_idle_connections_cost_little(node: KafkaNode) -> None:
    good = await node.client()
    await ask(good, API_VERSIONS, 0, APIS_REQUEST)
    here = len(node.server)
    gc.collect()
    before = resident()
    idle = []
    try:
        for _ in range(IDLE):
            idle.append(socket.create_connection(("localhost", node.port)))
            if len(idle) % 50 == 0:
                await soon(lambda: len(node.server) == here + len(idle), "they are let in")
        each = (resident() - before) / IDLE
        print(f"an idle connection takes {each:.0f} bytes, the client's end in Python included")
        assert each < IDLE_BYTES_MAX
        for one in idle[::100]:
            one.sendall(api_versions(7))
            one.setblocking(False)
        for one in idle[::100]:
            head = await asyncio.get_running_loop().sock_recv(one, 8)
            assert head[4:] == (7).to_bytes(4, "big")
        await ask(good, API_VERSIONS, 0, APIS_REQUEST)
    finally:
        for one in idle:
            one.close()
    await soon(lambda: len(node.server) == here, "they are gone")


@inside(World.run, "world")
async def test_requests_that_name_as_much_as_they_can_hold_up_nobody_for_long(node: KafkaNode) -> None:
    """Those whose work is in the naming: decoded, looked up, refused or answered. What is measured is the time of the
    processor in one turn of the loop, some 50 to 100 ms; the bound is wide, since a turn may have more in it."""
    numbers = list(range(NUMBERS_MAX))
    names = [f"n{number}" for number in range(10_000)]
    many = names * 3
    requests: list[tuple[Any, int, object]] = [
        (ELECT_LEADERS, 2, ElectLeadersRequest(topic_partitions=[ElectLeadersTopicPartitions(partitions=numbers)])),
        (OFFSET_FETCH, 8, OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=one) for one in many])),
        (FETCH, 12, FetchRequest(topics=[FetchTopic(topic=one, partitions=[FetchPartition()]) for one in names])),
        (CREATE_TOPICS, 5, CreateTopicsRequest(topics=[CreatableTopic(name=one) for one in many])),
        (DELETE_TOPICS, 6, DeleteTopicsRequest(topics=[DeleteTopicState(name=one) for one in many])),
        (DESCRIBE_GROUPS, 5, DescribeGroupsRequest(groups=many)),
        (METADATA, 12, MetadataRequest(topics=[MetadataRequestTopic(name=one) for one in many])),
        (ALTER_CONFIGS, 2, AlterConfigsRequest(resources=[AlterConfigsResource(resource_type=2)] * len(many))),
    ]
    for api, version, request in requests:
        client, longest = await node.client(), 0.0
        client.send(api, version, 1, request)
        await client.writer.drain()
        answer, last = asyncio.ensure_future(client.answer()), time.thread_time()
        while not answer.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        answer.result()
        print(f"{api.name}: {longest * 1000:.0f} ms of one turn")
        assert longest < TURN_MAX_S, api.name
