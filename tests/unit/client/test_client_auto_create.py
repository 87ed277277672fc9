"""A topic that is created because somebody writes to it, by the client against whole brokers in the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.clients.cluster import ClientWorld, batch_of

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import UnknownTopicError
from tidelog.client.producer.writer import Writer, WriterConfig
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    with ClientWorld(31) as made:
        yield made
        assert made.failures == []


async def configure(client: ClusterClient, **settings: str) -> None:
    sets = {key.replace("_", "."): value for key, value in settings.items()}
    await AdminCore(client).alter_config(("cluster", ""), sets=sets)


async def delete(client: ClusterClient, name: str) -> None:
    await AdminCore(client).delete_topic(name)


def until_notified(world: ClientWorld) -> None:
    """Every broker has heard of what was changed."""
    end = world.controller(world.active()).machine.offset
    world.world.run_until(lambda: all(one.tail.offset >= end for one in world.brokers.values()), timeout=10)


def turn_on(world: ClientWorld) -> None:
    world.run(lambda client: configure(client, auto_create_topics_enable="true", num_partitions="2"))
    until_notified(world)


def known(world: ClientWorld) -> list[str]:
    return sorted(world.controller(world.active()).image.topic_ids)


@pytest.mark.requirement("a:A-27", "b:B-11")
def test_a_writer_creates_its_topic_and_a_deleted_one_does_not_come_back(world: ClientWorld) -> None:
    turn_on(world)

    async def job(client: ClusterClient) -> None:
        writer = Writer(client, WriterConfig(delivery_timeout_ms=3_000))
        first = await (await writer.send("nope", 1, batch_of(b"0")))
        assert (first.base_offset, len((await client.topic("nope")).partitions)) == (0, 2)
        await delete(client, "nope")
        result = await writer.send("nope", 1, batch_of(b"to what is there as far as this client knows"))
        with pytest.raises(TidelogError, match="nope"):
            await result
        with pytest.raises(UnknownTopicError):
            await writer.send("nope", 1, batch_of(b"it has heard by now"))
        with pytest.raises(UnknownTopicError):
            await client.topic("nope", may_create=True)
        await writer.close()

    world.run(job)
    assert known(world) == []


@pytest.mark.requirement("a:A-27")
def test_a_topic_that_was_read_and_deleted_by_another_client_does_not_come_back(world: ClientWorld) -> None:
    turn_on(world)

    async def job(client: ClusterClient) -> None:
        await client.topic("seen", may_create=True)
        other = world.new_client()
        await other.topic("seen")
        await delete(client, "seen")
        async with asyncio.timeout(10):
            while "seen" in other.view.topics:
                await other.refresh("seen")
                await asyncio.sleep(0.05)
        with pytest.raises(UnknownTopicError):
            await other.topic("seen", may_create=True)
        await other.close()

    world.run(job)
    assert known(world) == []


@pytest.mark.requirement("a:A-27", "b:B-11")
def test_readers_and_refreshes_create_nothing_and_neither_does_a_writer_where_it_is_off(world: ClientWorld) -> None:
    async def write(client: ClusterClient) -> None:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(UnknownTopicError, match="there is no topic 'nope'"):
            await Writer(client).send("nope", 0, batch_of(b"0"))
        assert asyncio.get_running_loop().time() - began_s < 2, "that is reported soon"

    async def read(client: ClusterClient) -> None:
        with pytest.raises(UnknownTopicError, match="there is no topic 'nope'"):
            await client.topic("nope")
        await client.refresh("nope")

    world.run(write)
    turn_on(world)
    world.run(read)
    assert known(world) == []


def test_what_keeps_a_topic_from_being_created_is_raised(world: ClientWorld) -> None:
    turn_on(world)

    async def job(client: ClusterClient) -> None:
        with pytest.raises(RemoteError, match="bad name") as refusal:
            await client.topic("bad name", may_create=True)
        assert refusal.value.code is ErrorCode.INVALID_TOPIC
        await client.refresh()
        await configure(client, default_replication_factor="4")
        with pytest.raises(RemoteError, match="3 brokers are registered") as refusal:
            await client.topic("wide", may_create=True)
        assert refusal.value.code is ErrorCode.INVALID_REPLICATION_FACTOR

    world.run(job)


@pytest.mark.requirement("a:A-27")
def test_a_controller_that_is_away_is_waited_for(world: ClientWorld) -> None:
    turn_on(world)
    for node in list(world.controllers):
        world.kill(node)
    found: list[int] = []

    async def job(client: ClusterClient) -> None:
        found.append(len((await client.topic("late", may_create=True)).partitions))

    task = world.begin(job)
    world.world.run_for(4)
    assert not task.done()
    world.start()
    world.finish(task, timeout=40)
    assert found == [2]


def test_the_reason_is_reported_in_time_when_no_controller_comes_back(world: ClientWorld) -> None:
    turn_on(world)
    for node in list(world.controllers):
        world.kill(node)

    async def job(client: ClusterClient) -> None:
        with pytest.raises(RemoteError, match="topic late is being created") as refusal:
            await client.topic("late", may_create=True)
        assert refusal.value.code is ErrorCode.LEADER_NOT_AVAILABLE

    world.run(job, timeout=20, request_timeout_ms=6_000)
