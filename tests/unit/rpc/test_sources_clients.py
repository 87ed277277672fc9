"""What the sources say of clients and brokers together: the way of a record, many readers, a bad or a broken link."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.async_tests import inside
from support.brokers.cluster import values_of
from support.brokers.fault_runs import contents_of
from support.clients.cluster import BROKERS, CLIENT, ClientWorld, batch_of

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.reader import Reader
from tidelog.client.producer.writer import Writer, WriterConfig
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.world.simulated.faults import Latency


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    with ClientWorld(41) as made:
        yield made
        assert made.failures == []


async def create(client: ClusterClient, name: str, *assignment: tuple[int, ...]) -> None:
    await AdminCore(client).create_topic(name, assignment=assignment)


async def read(reader: Reader, count: int) -> list[tuple[int, int, bytes]]:
    """(partition, offset, value) of so many records, as they come."""
    found: list[tuple[int, int, bytes]] = []
    while len(found) < count:
        for piece in await reader.poll(1000):
            found += [(piece.partition.partition, row.offset, row.value or b"") for row in piece.records()]
    return found


@pytest.mark.requirement("a:C-20", "b:B-01")
def test_the_way_of_a_record_from_a_writer_over_all_logs_to_a_reader(world: ClientWorld) -> None:
    async def write(client: ClusterClient) -> PartitionId:
        await create(client, "orders", BROKERS)
        writer = Writer(client)
        acknowledged = await (await writer.send("orders", 0, batch_of(b"a", b"b")))
        assert (acknowledged.base_offset, acknowledged.count) == (0, 2), "the broker gives offsets"
        await writer.close()
        return acknowledged.partition

    orders = world.run(write)
    assert world.leader(orders) == 11
    # Acknowledged: on the device of the leader and of every follower, byte for byte.
    for broker in BROKERS:
        assert world.log(broker, orders).durable_end == 2
    logs = [world.on_broker(broker, lambda found: contents_of(found, orders)) for broker in BROKERS]
    assert logs[0] == logs[1] == logs[2]
    assert values_of(logs[0]) == [b"a", b"b"]
    assert set(world.partition(orders).isr) == set(BROKERS), "the metadata say that all are in sync"

    async def fetch(client: ClusterClient) -> list[tuple[int, int, bytes]]:
        topic = await client.topic("orders")
        reader = Reader(client)
        reader.assign_topic(topic, {topic.partitions[0]: 1})
        found = await read(reader, 1)
        await reader.close()
        return found

    assert world.run(fetch) == [(0, 1, b"b")], "by topic, partition and offset"


@pytest.mark.requirement("b:A-01")
@inside(ClientWorld.run, "world")
async def test_writers_and_readers_know_the_topic_and_not_each_other(client: ClusterClient) -> None:
    await create(client, "orders", BROKERS, BROKERS)
    writer = Writer(client)
    for number in range(20):  # nobody reads yet
        await (await writer.send("orders", number % 2, batch_of(b"%d" % number)))
    topic = await client.topic("orders")
    readers = [Reader(client) for _ in range(3)]
    for reader in readers:
        reader.assign_topic(topic, dict.fromkeys(topic.partitions, 0))
    for found in await asyncio.gather(*(read(reader, 20) for reader in readers)):
        for part in range(2):
            mine = [(offset, value) for partition, offset, value in found if partition == part]
            assert mine == [(number // 2, b"%d" % number) for number in range(part, 20, 2)], "everybody gets all"
    for reader in readers:
        await reader.close()
    await writer.close()


@pytest.mark.requirement("a:X3-5")
def test_a_client_that_loses_one_broker_goes_on_with_the_others_and_loses_nothing(world: ClientWorld) -> None:
    """Brokers see each other, so nobody else is elected: what the lost one leads has to wait."""

    async def job(client: ClusterClient) -> None:
        await create(client, "orders", (11, 12, 13), (12, 13, 11), (13, 11, 12))
        writer = Writer(client)
        for part in range(3):
            await (await writer.send("orders", part, batch_of(b"before")))
        for one, other in ((CLIENT, NodeId(11)), (NodeId(11), CLIENT)):
            world.network.block(one, other)
        late = [await writer.send("orders", 0, batch_of(b"late %d" % number)) for number in range(10)]
        for part in (1, 2):
            for number in range(10):
                acknowledged = await (await writer.send("orders", part, batch_of(b"%d" % number)))
                assert acknowledged.base_offset == 1 + number
        await asyncio.sleep(20)
        assert not any(result.done() for result in late)
        assert world.partition(late_partition(world)).leader == 11, "its session with the controller is fine"
        world.network.heal()
        assert [(await result).base_offset for result in late] == list(range(1, 11)), "once each, in order"
        await writer.close()

    world.run(job, timeout=200)


def late_partition(world: ClientWorld) -> PartitionId:
    return PartitionId(TopicId(world.image().topic_ids["orders"]), 0)


@pytest.mark.requirement("a:X3-6")
def test_a_long_way_to_the_brokers_costs_time_but_no_record_and_more_in_flight_makes_up_for_it() -> None:
    took_s: dict[int, float] = {}
    for in_flight in (1, 5):
        with ClientWorld(42) as world:
            for broker in BROKERS:
                world.network.slow_down(CLIENT, NodeId(broker), Latency(0.2, 0.25))
                world.network.slow_down(NodeId(broker), CLIENT, Latency(0.2, 0.25))

            async def job(client: ClusterClient, in_flight: int = in_flight) -> float:
                await create(client, "orders", BROKERS)
                writer = Writer(client, WriterConfig(in_flight_max=in_flight, delivery_timeout_ms=60_000))
                await (await writer.send("orders", 0, batch_of(b"first")))
                loop = asyncio.get_running_loop()
                began_s = loop.time()
                results = [await writer.send("orders", 0, batch_of(b"%d" % number)) for number in range(40)]
                offsets = [(await result).base_offset for result in results]
                took = loop.time() - began_s
                assert offsets == list(range(1, 41)), "nothing fails, nothing is stored twice"
                await writer.close()
                return took

            took_s[in_flight] = world.run(job)
            assert world.failures == []
    assert 40 * 0.4 <= took_s[1] < 40 * 0.8, "one round trip for each"
    assert took_s[5] < took_s[1] / 3
