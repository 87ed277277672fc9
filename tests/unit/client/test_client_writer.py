"""The writer and the reader against whole brokers in the simulator: retries, failovers, deadlines, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from client_records import create, make_topic, stored
from client_world import BOOTSTRAP, BROKERS, ClientWorld, batch_of

from tidelog.client.admin import AdminClient
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import (
    DeliveryTimeoutError,
    NobodyLeadsError,
    NoClusterError,
    PositionError,
    TruncatedError,
    WriterClosedError,
)
from tidelog.client.offsets import LATEST, delete_records, epoch_end, list_offsets, range_bytes
from tidelog.client.reader import Reader, ReaderConfig
from tidelog.client.writer import Acknowledged, Writer, WriterConfig
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


@pytest.mark.source("a:A-09", "b:A-11")
def test_batches_are_stored_in_order_over_many_partitions(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
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

    world.run(job)


@pytest.mark.parametrize("seed", range(6))
def test_leaders_that_die_lose_duplicate_and_reorder_nothing(seed: int) -> None:
    with ClientWorld(100 + seed) as world:
        done: list[list[Acknowledged | BaseException]] = []

        async def job(client: ClusterClient) -> None:
            await make_topic(client, "orders", partitions=2)
            writer = Writer(client)
            results = []
            for number in range(300):
                results.append(await writer.send("orders", number % 2, batch_of(b"%d" % number)))
                await asyncio.sleep(0.02)
            await writer.flush()
            await writer.close()
            leaders = [client.leader(place) for place in (await client.topic("orders")).partitions]
            assert any(leader is not None and leader.epoch > 0 for leader in leaders), "somebody took over"
            done.append([result.exception() or result.result() for result in results])
            assert await read_all(client, "orders") == {
                part: [b"%d" % number for number in range(part, 300, 2)] for part in range(2)
            }

        task = world.begin(job)
        for victim in (BROKERS[seed % 3], BROKERS[(seed + 1) % 3]):
            world.world.run_for(2.0)
            world.kill(NodeId(victim))
            world.world.run_for(1.0)
            world.start_brokers(victim)
        world.finish(task)
        assert all(isinstance(one, Acknowledged) for one in done[0])
        assert world.failures == []


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
        assert isinstance(error, NobodyLeadsError)
        assert (error.code, error.was_sent) == (ErrorCode.LEADER_NOT_AVAILABLE, False)
        assert str(error) == (
            "2 records to orders-0 were not stored: nobody leads orders-0; not acknowledged in 3000 ms"
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
        assert writer.last_error is not None
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
def test_a_topic_that_is_made_anew_is_not_taken_for_the_old_one(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        writer = Writer(client)
        reader = Reader(client)
        await (await writer.send("orders", 0, batch_of(b"old")))
        old = await client.topic("orders")
        reader.assign_topic(old, {old.partitions[0]: 1})
        assert await reader.poll(100) == []
        await AdminClient(client).delete_topics(["orders"])
        await make_topic(client, "orders")
        result = await writer.send("orders", 0, batch_of(b"to the old one, as far as this client knows"))
        with pytest.raises(UnknownTopicIdError, match="made anew"):
            await result
        with pytest.raises(UnknownTopicIdError, match="made anew"):
            await reader.poll(30_000)
        assert (await (await writer.send("orders", 0, batch_of(b"new")))).base_offset == 0
        assert await read_all(client, "orders") == {0: [b"new"]}
        await writer.close()
        await reader.close()

    world.run(job)


def test_what_cannot_be_sent_is_said_at_once(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", max_message_bytes="2000")
        writer = Writer(client, WriterConfig(batch_bytes_max=10_000))
        with pytest.raises(UnknownTopicOrPartitionError, match="there is no topic 'nosuch'"):
            await writer.send("nosuch", 0, batch_of(b"x"))
        with pytest.raises(UnknownTopicOrPartitionError, match="1 partitions from 0 on"):
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
        with pytest.raises(WriterClosedError):
            await writer.send("orders", 0, batch_of(b"x"))

    world.run(job)


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
        # The first of these gets the room of those before when their time is up; the second has waited as long.
        both = [writer.send("orders", 0, batch_of(b"x" * 3_800)) for _ in range(2)]
        _, refused = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(refused, DeliveryTimeoutError)
        assert not refused.was_sent
        assert "no room" in str(refused)
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


def test_a_reader_gets_what_comes_and_nothing_twice(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=3)
        topic = await client.topic("orders")
        writer, reader = Writer(client), Reader(client)
        reader.assign_topic(topic, dict.fromkeys(topic.partitions, 0))
        found: list[tuple[int, int]] = []
        for number in range(30):
            await (await writer.send("orders", number % 3, batch_of(b"a", b"b", b"c")))
            while len(found) < 3 * (number + 1):
                for piece in await reader.poll(1000):
                    found += [(piece.partition.partition, record.offset) for record in piece.records()]
        for part in range(3):
            assert [offset for number, offset in found if number == part] == list(range(30))
        await writer.close()
        await reader.close()

    world.run(job)


def test_seek_pause_and_an_offset_inside_of_a_batch(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=2)
        topic = await client.topic("orders")
        first, second = topic.partitions
        writer, reader = Writer(client), Reader(client)
        for part in (0, 1):
            await (await writer.send("orders", part, batch_of(*(b"%d" % number for number in range(10)))))
        reader.assign_topic(topic, {first: 7, second: 0})
        reader.pause(second)

        async def values() -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = []
            while not found:
                for piece in await reader.poll(1000):
                    found += [(piece.partition.partition, record.offset) for record in piece.records()]
            return found

        assert await values() == [(0, 7), (0, 8), (0, 9)]
        assert await reader.poll(1000) == []
        reader.seek(first, 9)
        assert await values() == [(0, 9)]
        reader.resume(second)
        assert await values() == [(1, offset) for offset in range(10)]
        assert (reader.position(first), reader.position(second)) == (10, 10)
        await writer.close()
        await reader.close()

    world.run(job)


def test_a_position_outside_of_the_log_is_told_once_and_seek_goes_on(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        topic = await client.topic("orders")
        (place,) = topic.partitions
        writer, reader = Writer(client), Reader(client)
        for value in (b"a", b"b", b"c"):
            await (await writer.send("orders", 0, batch_of(value)))
        assert await delete_records(client, [topic], {place: 2}) == {place: 2}
        reader.assign_topic(topic, {place: 0})
        with pytest.raises(PositionError) as error:
            await reader.poll(5000)
        assert (error.value.partition, error.value.position) == (place, 0)
        assert await reader.poll(1000) == []
        reader.seek(place, 2)
        (piece,) = await reader.poll(5000)
        assert [record.value for record in piece.records()] == [b"c"]
        assert (piece.start_offset, piece.high_watermark, piece.next_offset) == (2, 3, 3)
        await writer.close()
        await reader.close()

    world.run(job)


@pytest.mark.case("T4")
def test_truncation_is_told_with_the_offset_where_the_log_departs(world: ClientWorld) -> None:
    leaders: list[int] = []

    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        topic = await client.topic("orders")
        (place,) = topic.partitions
        writer, reader = Writer(client), Reader(client)
        for value in (b"a", b"b", b"c"):
            await (await writer.send("orders", 0, batch_of(value)))
        leader = client.leader(place)
        assert leader is not None
        leaders.append(leader.node)
        while (now := client.leader(place)) is None or now.epoch == leader.epoch:
            await (await writer.send("orders", 0, batch_of(b"d")))
        await writer.close()
        _, start = await epoch_end(client, topic, place, leader.epoch)
        reader.assign_topic(topic, {place: 0})
        while reader.position(place) <= start:
            await reader.poll(1000)
        # A reader that has read the same offsets from the epoch before: another leader's records stand there now.
        position = reader.position(place)
        reader._places[place].last_epoch = leader.epoch
        with pytest.raises(TruncatedError) as told:
            await reader.poll(5000)
        found = told.value
        assert (found.position, found.diverging_epoch, found.diverging_offset) == (position, leader.epoch, start)
        reader.seek(place, found.diverging_offset)
        (piece,) = await reader.poll(5000)
        assert piece.position == start
        await reader.close()

    task = world.begin(job)
    world.until(lambda: bool(leaders) or task.done())
    world.kill(NodeId(leaders[0]))
    world.finish(task)


def test_a_reader_that_does_not_poll_holds_little(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
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

    world.run(job)


def test_offsets_epochs_and_sizes_are_answered_by_leaders(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
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

    world.run(job)


# Finding the cluster.


def test_a_dead_bootstrap_address_is_passed_over(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await client.refresh()
        assert sorted(client.view.brokers) == list(BROKERS)
        assert client.answered == BOOTSTRAP[0]

    world.run(job, bootstrap=("nowhere:1", "host-77:9092", *BOOTSTRAP))


def test_no_cluster_names_every_address_and_its_reason(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        with pytest.raises(NoClusterError, match="no cluster at nowhere:1, host-77:9092") as error:
            await client.refresh()
        assert len(error.value.reasons) == 2

    world.run(job, bootstrap=("nowhere:1", "host-77:9092"))
