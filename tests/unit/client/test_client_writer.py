"""The writer and the reader against whole brokers in the simulator: retries, failovers, deadlines, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.async_tests import inside
from support.clients.cluster import BROKERS, ClientWorld, batch_of
from support.clients.records import create, make_topic, stored

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.consumer.reader import Reader, ReaderConfig
from tidelog.client.errors import (
    DeliveryTimeoutError,
    NoClusterError,
    NoLeaderError,
    OffsetOutOfRangeError,
    ProducerClosedError,
)
from tidelog.client.offsets import LATEST, delete_records, epoch_end, list_offsets, range_bytes
from tidelog.client.producer.writer import Acknowledged, Writer, WriterConfig
from tidelog.client.record import TopicPartition
from tidelog.model.errors import (
    ErrorCode,
    RecordTooLargeError,
    RemoteError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from tidelog.model.ids import NodeId


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    with ClientWorld(5) as made:
        yield made
        assert made.failures == []


async def read_all(client: ClusterClient, name: str) -> dict[int, list[bytes]]:
    """Values of each partition, from start to end."""
    return {part: [record.value or b"" for record in records] for part, records in (await stored(client, name)).items()}


@pytest.mark.requirement("a:A-09", "b:A-11")
@inside(ClientWorld.run, "world")
async def test_batches_are_stored_in_order_over_many_partitions(client: ClusterClient) -> None:
    await make_topic(client, "orders", partitions=4)
    writer = Writer(client)
    results = [await writer.send("orders", number % 4, batch_of(b"%d" % number)) for number in range(200)]
    await writer.flush()
    offsets = [result.result().base_offset for result in results]
    assert offsets == [number // 4 for number in range(200)]
    assert writer.buffered_bytes == 0
    await writer.close()
    found = await read_all(client, "orders")
    assert found == {part: [b"%d" % number for number in range(part, 200, 4)] for part in range(4)}


def test_a_client_that_is_cut_off_goes_on_when_the_way_is_free(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        writer = Writer(client)
        first = await (await writer.send("orders", 0, batch_of(b"0")))
        assert first.base_offset == 0
        world.cut_off()
        late = [await writer.send("orders", 0, batch_of(b"%d" % number)) for number in range(1, 8)]
        await asyncio.sleep(20)
        assert not any(result.done() for result in late)
        world.network.heal()
        assert [(await result).base_offset for result in late] == list(range(1, 8))
        await writer.close()
        assert await read_all(client, "orders") == {0: [b"%d" % number for number in range(8)]}

    world.run(job, timeout=200)


def test_what_nobody_leads_is_said_to_be_so_and_was_never_sent(world: ClientWorld) -> None:
    reached: list[bool] = []

    async def job(client: ClusterClient) -> None:
        await create(client, "orders", (BROKERS[0],), (BROKERS[1],))
        writer = Writer(client, WriterConfig(delivery_timeout_ms=3_000))
        await (await writer.send("orders", 0, batch_of(b"0")))
        place = (await client.topic("orders")).partitions[0]
        reached.append(True)
        while (leader := client.view.leader(place)) is None or leader.node >= 0:
            await asyncio.sleep(0.1)
            await client.refresh_quietly("orders")
        late = await writer.send("orders", 0, batch_of(b"1", b"2"))
        single = await writer.send("orders", 0, batch_of(b"3"))
        await (await writer.send("orders", 1, batch_of(b"others go on")))
        await asyncio.wait([late, single])
        assert str(single.exception()).startswith("1 record to orders-0 was not stored: ")
        error = late.exception()
        assert isinstance(error, NoLeaderError)
        assert (error.code, error.was_sent) == (ErrorCode.LEADER_NOT_AVAILABLE, False)
        assert str(error) == (
            "2 records to orders-0 were not stored: orders-0 has no leader; not acknowledged in 3000 ms"
        )
        assert "carried out" not in error.advice
        await writer.close()

    task = world.begin(job)
    world.until(lambda: bool(reached) or task.done())
    world.kill(NodeId(BROKERS[0]))
    world.finish(task)


def test_every_batch_ends_when_its_time_is_up(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        writer = Writer(client, WriterConfig(delivery_timeout_ms=3_000))
        await (await writer.send("orders", 0, batch_of(b"0")))
        world.cut_off()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        late = [await writer.send("orders", 0, batch_of(b"late")) for _ in range(8)]
        await asyncio.wait(late)
        assert 2.9 < loop.time() - start_s < 4.0
        errors = [result.exception() for result in late]
        assert all(isinstance(error, DeliveryTimeoutError) for error in errors)
        sent = [error.was_sent for error in errors if isinstance(error, DeliveryTimeoutError)]
        assert (sent[0], sent[-1]) == (True, False), "five were on their way, the others were not"
        assert "may be stored or not" in str(errors[0])
        assert "was not stored" in str(errors[-1])
        assert isinstance(errors[-1], DeliveryTimeoutError)
        assert errors[-1].advice == "try again; nothing was stored"
        world.network.heal()
        # The numbers have a gap now, unless the lost ones arrived: either way it goes on.
        after = await (await writer.send("orders", 0, batch_of(b"after")))
        assert after.base_offset >= 1
        await writer.close()

    world.run(job, timeout=200)


def test_too_few_replicas_are_waited_for(world: ClientWorld) -> None:
    leaders: list[int] = []
    late: list[asyncio.Future[Acknowledged]] = []

    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", min_insync_replicas="3")
        writer = Writer(client)
        await (await writer.send("orders", 0, batch_of(b"0")))
        leader = client.leader((await client.topic("orders")).partitions[0])
        assert leader is not None
        leaders.append(leader.node)
        await asyncio.sleep(15)
        late.extend([await writer.send("orders", 0, batch_of(b"%d" % number)) for number in (1, 2, 3)])
        await asyncio.wait(late)
        assert writer.sender.last_error is not None
        assert [result.result().base_offset for result in late] == [1, 2, 3]
        await writer.close()

    task = world.begin(job)
    world.until(lambda: bool(leaders) or task.done())
    victim = next(broker for broker in BROKERS if broker not in leaders)
    world.kill(NodeId(victim))
    world.until(lambda: len(late) == 3 or task.done(), timeout=30)
    world.world.run_for(3)
    assert not any(result.done() for result in late)
    world.start_brokers(victim)
    world.finish(task)


@pytest.mark.case("C4")
@pytest.mark.case("C7")
def test_a_topic_created_again_is_not_taken_for_the_old_one(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        writer = Writer(client)
        reader = Reader(client)
        await (await writer.send("orders", 0, batch_of(b"old")))
        old = await client.topic("orders")
        other = world.new_client()
        await AdminCore(other).delete_topics(["orders"])
        await make_topic(other, "orders")
        await other.close()
        result = await writer.send("orders", 0, batch_of(b"to the old one, as far as this client knows"))
        with pytest.raises(UnknownTopicIdError, match="created again"):
            await result
        reader.assign_topic(old, {old.partitions[0]: 1})
        with pytest.raises(UnknownTopicIdError, match="created again"):
            await reader.poll(30_000)
        assert (await (await writer.send("orders", 0, batch_of(b"new")))).base_offset == 0
        assert await read_all(client, "orders") == {0: [b"new"]}
        await writer.close()
        await reader.close()

    world.run(job)


@inside(ClientWorld.run, "world")
async def test_what_cannot_be_sent_is_said_at_once(client: ClusterClient) -> None:
    await make_topic(client, "orders", max_message_bytes="2000")
    writer = Writer(client, WriterConfig(batch_bytes_max=10_000))
    with pytest.raises(UnknownTopicOrPartitionError, match="there is no topic 'nosuch'"):
        await writer.send("nosuch", 0, batch_of(b"x"))
    with pytest.raises(UnknownTopicOrPartitionError, match="1 partitions; there is no partition"):
        await writer.send("orders", 1, batch_of(b"x"))
    with pytest.raises(RecordTooLargeError):
        await writer.send("orders", 0, batch_of(b"x" * 20_000))
    # The topic's own limit is known to the broker: the batch fails, those around it are stored.
    results = [await writer.send("orders", 0, batch_of(value)) for value in (b"a", b"x" * 5_000, b"b", b"c")]
    await writer.flush()
    assert [result.exception() is None for result in results] == [True, False, True, True]
    with pytest.raises(RemoteError) as refused:
        results[1].result()
    assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE
    assert await read_all(client, "orders") == {0: [b"a", b"b", b"c"]}
    await writer.close()
    with pytest.raises(ProducerClosedError):
        await writer.send("orders", 0, batch_of(b"x"))


def test_the_buffer_is_bounded_and_waited_for(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        writer = Writer(client, WriterConfig(buffer_bytes_max=4_000, delivery_timeout_ms=5_000))
        for _ in range(20):
            await writer.send("orders", 0, batch_of(b"x" * 1_000))
            assert writer.buffered_bytes <= 4_000
        await writer.flush()
        world.cut_off()
        sent = [await writer.send("orders", 0, batch_of(b"x" * 1_000)) for _ in range(3)]
        # One of these gets the memory of those before when they expire; the other has waited as long.
        both = [writer.send("orders", 0, batch_of(b"x" * 3_800)) for _ in range(2)]
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        (rejected,) = [outcome for outcome in outcomes if isinstance(outcome, DeliveryTimeoutError)]
        assert not rejected.was_sent
        assert "buffer full" in str(rejected)
        assert all(isinstance(result.exception(), DeliveryTimeoutError) for result in sent)
        world.network.heal()
        await writer.close()

    world.run(job, timeout=200)


@pytest.mark.parametrize("acks", [0, 1, -1])
def test_acknowledgements_of_every_kind_carry_offsets(world: ClientWorld, acks: int) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        writer = Writer(client, WriterConfig(acks=acks))
        results = [await writer.send("orders", 0, batch_of(b"a", b"b")) for _ in range(5)]
        await writer.flush()
        assert [(result.result().base_offset, result.result().count) for result in results] == [
            (number * 2, 2) for number in range(5)
        ]
        await writer.close()

    world.run(job)


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"acks": 2}, {"in_flight_max": 6}, {"in_flight_max": 0}, {"delivery_timeout_ms": 0}):
        with pytest.raises(ValueError, match=r"acks|in_flight_max|timeouts"):
            WriterConfig(**wrong)


# Reading.


@inside(ClientWorld.run, "world")
async def test_a_position_outside_of_the_log_is_reported_once_and_seek_goes_on(client: ClusterClient) -> None:
    await make_topic(client, "orders")
    topic = await client.topic("orders")
    (place,) = topic.partitions
    writer, reader = Writer(client), Reader(client)
    for value in (b"a", b"b", b"c"):
        await (await writer.send("orders", 0, batch_of(value)))
    assert await delete_records(client, [topic], {place: 2}) == {place: 2}
    reader.assign_topic(topic, {place: 0})
    with pytest.raises(OffsetOutOfRangeError) as error:
        await reader.poll(5000)
    assert (error.value.partition, error.value.position) == (TopicPartition("orders", 0), 0)
    assert await reader.poll(1000) == []
    reader.seek(place, 2)
    (piece,) = await reader.poll(5000)
    assert [record.value for record in piece.records()] == [b"c"]
    assert (piece.log_start_offset, piece.high_watermark, piece.next_offset) == (2, 3, 3)
    await writer.close()
    await reader.close()


@inside(ClientWorld.run, "world")
async def test_a_reader_that_does_not_poll_holds_little(client: ClusterClient) -> None:
    await make_topic(client, "orders")
    topic = await client.topic("orders")
    (place,) = topic.partitions
    writer = Writer(client)
    for _ in range(50):
        await (await writer.send("orders", 0, batch_of(b"x" * 2_000)))
    reader = Reader(client, ReaderConfig(buffer_bytes_max=8_000, partition_bytes=4_000))
    reader.assign_topic(topic, {place: 0})
    await asyncio.sleep(10)
    assert 0 < reader.buffered_bytes <= 12_100
    count = 0
    while count < 50:
        for piece in await reader.poll(1000):
            count += len(list(piece.records()))
    assert reader.buffered_bytes == 0
    await writer.close()
    await reader.close()


@inside(ClientWorld.run, "world")
async def test_offsets_epochs_and_sizes_are_answered_by_leaders(client: ClusterClient) -> None:
    await make_topic(client, "orders", partitions=2)
    topic = await client.topic("orders")
    first, second = topic.partitions
    writer = Writer(client)
    for number in range(5):
        await (await writer.send("orders", 0, batch_of(b"x", timestamp=1_000 * number)))
    assert {place: row.offset for place, row in (await list_offsets(client, topic, LATEST)).items()} == {
        first: 5,
        second: 0,
    }
    by_time = await list_offsets(client, topic, 2_500)
    assert (by_time[first].offset, by_time[first].timestamp, by_time[second].offset) == (3, 3_000, -1)
    epoch = client.leader(first)
    assert epoch is not None
    assert await epoch_end(client, topic, first, epoch.epoch) == (epoch.epoch, 5)
    sizes = await range_bytes(client, topic, {first: (0, 5), second: (0, 0)})
    assert sizes[second] == 0
    size = sizes[first]
    assert isinstance(size, int)
    assert size > 5 * 61
    await writer.close()


# Finding the cluster.


def test_no_cluster_names_every_address_and_its_reason(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        with pytest.raises(NoClusterError, match="no cluster at nowhere:1, host-77:9092") as error:
            await client.refresh()
        assert len(error.value.reasons) == 2

    world.run(job, bootstrap=("nowhere:1", "host-77:9092"))
