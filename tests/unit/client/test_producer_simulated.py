"""The producer against whole brokers in the simulator: batches, order, retries, deadlines, memory, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.clients.cluster import BROKERS, ClientWorld
from support.clients.producers import SimProducer
from support.clients.records import make_topic, stored

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import (
    BufferFullError,
    DeliveryTimeoutError,
    FlushTimeoutError,
    ProducerClosedError,
    UnknownTopicError,
)
from tidelog.client.producer.bulk import Range
from tidelog.client.producer.fast_path import Delivery, RecordMetadata
from tidelog.log.batch import Codec
from tidelog.model.errors import ErrorCode, NotEnoughReplicasError, RecordTooLargeError, UnknownTopicOrPartitionError
from tidelog.model.ids import NodeId


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    with ClientWorld(7) as made:
        yield made
        assert made.failures == []


@pytest.mark.requirement("a:D-02", "a:D-03", "a:D-80", "b:F-02", "b:F-01", "a:D-01")
def test_a_record_comes_back_as_it_was_sent(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=3)
        async with SimProducer(world) as producer:
            pairs = [("trace", b"1"), ("trace", b"2"), ("none", None), ("text", "ä")]
            first = await producer.send("orders", "väl", "key", headers=pairs, timestamp_ms=1_234)
            metadata = await first
            second = await producer.send_and_wait("orders", None, partition=metadata.partition)
        assert metadata == RecordMetadata("orders", metadata.partition, 0, 1_234)
        assert second.offset == 1
        records = (await stored(client, "orders"))[metadata.partition]
        assert records[0].key == b"key"
        assert records[0].value == "väl".encode()
        assert records[0].timestamp == 1_234
        assert records[0].headers == (("trace", b"1"), ("trace", b"2"), ("none", None), ("text", "ä".encode()))
        assert records[1].value is None
        assert records[1].timestamp == second.timestamp

    world.run(job)


@pytest.mark.requirement("a:D-32", "a:D-35", "b:F-35", "b:F-36")
def test_linger_and_batch_size_decide_when_a_batch_goes(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        loop = asyncio.get_running_loop()
        async with SimProducer(world, linger_ms=500, batch_size=10_000) as producer:
            await producer.send_and_wait("orders", b"warm")
            start_s = loop.time()
            lingering = [await producer.send("orders", b"%d" % number) for number in range(50)]
            await lingering[-1]
            assert 0.5 <= loop.time() - start_s < 0.6, "after the linger"
            assert producer.metrics()["batches"] == 2, "all in one"
            start_s = loop.time()
            full = [await producer.send("orders", b"x" * 1_000) for _ in range(10)]
            await full[0]
            assert loop.time() - start_s < 0.4, "a full batch waits for nothing"
            await producer.flush()
            assert producer.metrics()["batches"] == 4
            assert (await full[9]).offset == 60

    world.run(job)


@pytest.mark.requirement("a:D-32", "b:F-36")
def test_without_linger_what_comes_during_a_send_goes_together(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        async with SimProducer(world) as producer:
            await producer.send_and_wait("orders", b"warm")
            for _ in range(40):
                for _ in range(25):
                    await producer.send("orders", b"x")
                await asyncio.sleep(0.001)
            await producer.flush()
            metrics = producer.metrics()
        assert metrics["records_stored"] == 1_001
        assert metrics["batches"] < 40, "fewer batches than rounds: the rest gathered while two were on their way"

    world.run(job)


@pytest.mark.requirement("a:D-05", "a:D-04", "b:F-08", "b:F-06", "a:D-11")
def test_callbacks_of_a_partition_run_in_order_and_may_fail(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=2)
        reported: list[tuple[Exception | None, RecordMetadata]] = []
        later: list[int] = []

        def on_delivery(error: Exception | None, metadata: RecordMetadata) -> None:
            reported.append((error, metadata))
            if metadata.offset % 7 == 3:
                raise RuntimeError("a user's mistake")

        async with SimProducer(world, batch_size=200) as producer:
            for number in range(100):
                sent = await producer.send("orders", b"%d" % number, partition=number % 2, on_delivery=on_delivery)
                if number % 10 == 0:
                    sent.add_done_callback(lambda one: later.append(one.result().offset))
            await producer.flush()
            for part in range(2):
                assert [one.offset for _, one in reported if one.partition == part] == list(range(50))
            assert all(error is None for error, _ in reported)
            assert sorted(later) == list(range(0, 50, 5))
            sent.add_done_callback(lambda one: later.append(-1))
            assert later[-1] == -1, "at once, when it is done"

    world.run(job)


@pytest.mark.requirement("a:D-60", "a:D-08", "a:D-30", "a:D-71", "b:F-10", "b:F-13", "b:F-33", "b:J-06")
@pytest.mark.parametrize("seed", range(4))
def test_leaders_that_die_lose_duplicate_and_reorder_nothing(seed: int) -> None:
    with ClientWorld(200 + seed) as world:
        results: list[Delivery] = []
        order: list[tuple[int, int]] = []

        async def job(client: ClusterClient) -> None:
            await make_topic(client, "orders", partitions=3)
            async with SimProducer(world, batch_size=300, linger_ms=3) as producer:
                for number in range(600):
                    results.append(
                        await producer.send(
                            "orders",
                            b"%d" % number,
                            partition=number % 3,
                            on_delivery=lambda error, reported: order.append((reported.partition, reported.offset)),
                        )
                    )
                    await asyncio.sleep(0.01)
                await producer.flush()
                assert producer.metrics()["records_failed"] == 0
                assert producer.metrics()["buffer_bytes"] == 0
                producer.accumulator.validate()
            found = await stored(client, "orders")
            assert {part: [record.value for record in records] for part, records in found.items()} == {
                part: [b"%d" % number for number in range(part, 600, 3)] for part in range(3)
            }

        task = world.begin(job)
        for victim in (BROKERS[seed % 3], BROKERS[(seed + 1) % 3]):
            world.world.run_for(2.0)
            world.kill(NodeId(victim))
            world.world.run_for(1.0)
            world.start_brokers(victim)
        world.finish(task)
        assert [result.result().offset for result in results] == [number // 3 for number in range(600)]
        for part in range(3):
            assert [offset for where, offset in order if where == part] == list(range(200)), "callbacks in order"
        assert world.failures == []


@pytest.mark.requirement("a:D-28", "a:D-07", "a:D-29", "a:D-26c")
def test_a_record_without_an_answer_fails_after_its_time_counted_from_send(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        loop = asyncio.get_running_loop()
        reported: list[Exception | None] = []
        producer = SimProducer(world, delivery_timeout_ms=4_000, request_timeout_ms=1_000, linger_ms=1_000)
        await producer.send_and_wait("orders", b"0")
        world.cut_off()
        start_s = loop.time()
        late = [
            await producer.send("orders", b"%d" % number, on_delivery=lambda error, _: reported.append(error))
            for number in range(3)
        ]
        with pytest.raises(DeliveryTimeoutError, match="4000 ms"):
            await late[0]
        assert 3.9 <= loop.time() - start_s < 4.5, "the linger is part of it"
        assert all(isinstance(one.exception(), DeliveryTimeoutError) for one in late)
        await producer.flush()
        assert [type(error) for error in reported] == [DeliveryTimeoutError] * 3
        assert producer.metrics()["records_failed"] == 3
        world.network.heal()
        again = await producer.send_and_wait("orders", b"after")
        assert again.offset >= 1
        await producer.close()

    world.run(job)


@pytest.mark.requirement("a:D-33", "a:D-27", "b:F-31", "b:F-09", "a:D-09", "a:T-14", "b:D-20")
def test_a_full_buffer_blocks_and_then_refuses(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=2)
        loop = asyncio.get_running_loop()
        async with SimProducer(world, buffer_memory=64_000, max_request_size=20_000, max_block_ms=700) as producer:
            await producer.send_and_wait("orders", b"0")
            world.cut_off()
            taken: list[Delivery] = []
            start_s = loop.time()

            async def fill() -> None:
                nonlocal start_s
                for _ in range(100):
                    start_s = loop.time()
                    taken.append(await producer.send("orders", b"x" * 5_000))

            with pytest.raises(BufferFullError, match="buffer_memory=64000"):
                await fill()
            assert 0.699 <= loop.time() - start_s < 0.8
            assert 10 <= len(taken) <= 12, "as many as there is room for"
            assert producer.accumulator.reserved <= 64_000
            blocked = asyncio.get_running_loop().create_task(producer.send("orders", b"y" * 5_000))
            await asyncio.sleep(0.1)
            assert not blocked.done()
            world.network.heal()
            taken.append(await blocked)
            await producer.flush()
            assert len({(one.result().partition, one.result().offset) for one in taken}) == len(taken)
            assert producer.accumulator.reserved == 0
            producer.accumulator.validate()

    world.run(job)


def test_memory_that_open_batches_only_reserve_is_given_back_when_it_is_needed(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=40)
        # 16 batches of 4 KB are all that can be reserved; each has one small record, and nothing lingers for ever.
        async with SimProducer(world, buffer_memory=64 << 10, max_request_size=4 << 10, linger_ms=60_000) as producer:
            sent = [await producer.send("orders", b"x", partition=part) for part in range(40)]
            await producer.flush()
            assert [one.result().offset for one in sent] == [0] * 40

    world.run(job)


@pytest.mark.requirement("a:D-23", "a:D-24", "a:D-25", "b:F-30")
@pytest.mark.parametrize("acks", ["all", "1", 0])
def test_any_acks_get_an_answer(world: ClientWorld, acks: object) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        async with SimProducer(world, acks=acks) as producer:
            assert (await producer.send_and_wait("orders", b"x")).offset in ((0,) if acks else (0, -1))
        await asyncio.sleep(1.0)
        assert [record.value for record in (await stored(client, "orders"))[0]] == [b"x"]

    world.run(job)


@pytest.mark.requirement("a:D-34", "b:F-32")
@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_batches_are_compressed(world: ClientWorld, codec: str) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        async with SimProducer(world, compression_type=codec, linger_ms=20) as producer:
            for _ in range(50):
                await producer.send("orders", b"the same again " * 20)
            await producer.flush()
            assert producer.metrics()["batch_bytes"] < 50 * 300 / 4
        assert producer._config.compression is Codec[codec.upper()]
        assert [record.value for record in (await stored(client, "orders"))[0]] == [b"the same again " * 20] * 50

    world.run(job)


@pytest.mark.requirement("a:D-37", "a:D-09", "a:A-53", "b:F-10")
def test_a_record_that_is_too_large_is_refused_here_or_there_and_not_sent_again(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", max_message_bytes="2000")
        async with SimProducer(world, max_request_size=10_000) as producer:
            with pytest.raises(RecordTooLargeError, match="max_request_size=10000"):
                await producer.send("orders", b"x" * 10_000)
            with pytest.raises(RecordTooLargeError, match="record 1 takes"):
                await producer.send_many("orders", values=[b"x", b"x" * 10_000])
            refused = await producer.send("orders", b"x" * 5_000)
            error = None
            try:
                await refused
            except Exception as raised:
                error = raised
            assert getattr(error, "code", None) is ErrorCode.MESSAGE_TOO_LARGE
            assert producer.metrics()["retries"] == 0
            assert (await producer.send_and_wait("orders", b"small")).offset == 0

    world.run(job)


@pytest.mark.requirement("a:D-08", "a:D-28")
def test_too_few_replicas_are_waited_for_and_reported_in_the_end(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", min_insync_replicas="3")
        producer = SimProducer(world, delivery_timeout_ms=3_000, request_timeout_ms=1_000)
        await producer.send_and_wait("orders", b"0")
        leader = client.leader((await client.topic("orders")).partitions[0])
        assert leader is not None
        world.kill(NodeId(next(broker for broker in BROKERS if broker != leader.node)))

        async def go_on() -> None:
            for _ in range(20):
                await producer.send_and_wait("orders", b"1")
                await asyncio.sleep(1)

        with pytest.raises(DeliveryTimeoutError, match="not acknowledged in 3000 ms"):
            await go_on()
        await producer.close()

    assert NotEnoughReplicasError.code is ErrorCode.NOT_ENOUGH_REPLICAS
    world.run(job)


@pytest.mark.requirement("a:D-10", "b:F-12", "a:D-07")
def test_topics_and_partitions_that_are_not_there_are_named(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=3)
        async with SimProducer(world) as producer:
            assert len(await producer.partitions_for("orders")) == 3
            with pytest.raises(UnknownTopicError, match="no topic 'nowhere'"):
                await producer.send("nowhere", b"x")
            with pytest.raises(UnknownTopicOrPartitionError, match="has 3 partitions; there is no partition 3"):
                await producer.send("orders", b"x", partition=3)
            with pytest.raises(UnknownTopicOrPartitionError, match="there is no partition -1"):
                await producer.send("orders", b"x", partition=-1)
            with pytest.raises(UnknownTopicOrPartitionError, match="there is no partition 7"):
                await producer.send_many("orders", values=[b"x", b"y"], partition=[0, 7])

    world.run(job)


@pytest.mark.requirement("a:D-54", "b:F-23", "a:C-06")
def test_new_partitions_are_seen_and_used(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=1)
        async with SimProducer(world, metadata_max_age_ms=2_000) as producer:
            await producer.send_and_wait("orders", b"0", "k")
            await AdminCore(client).add_partitions({"orders": 4})
            reported = await producer.send_and_wait("orders", b"x", partition=3)
            assert reported.partition == 3, "asked for by number: found at once"
            await asyncio.sleep(3)
            assert len(await producer.partitions_for("orders")) == 4
            used = {
                (await producer.send_and_wait("orders", b"x", b"key-%d" % number)).partition for number in range(40)
            }
            assert used == {0, 1, 2, 3}

    world.run(job)


@pytest.mark.case("C7")
def test_a_topic_created_again_with_fewer_partitions_takes_records_again(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=5)
        admin = AdminCore(client)
        async with SimProducer(world, metadata_max_age_ms=1_000, delivery_timeout_ms=31_000) as producer:
            await producer.send_and_wait("orders", b"0", partition=4)
            await admin.delete_topics(["orders"])
            await asyncio.sleep(3)
            await make_topic(client, "orders", partitions=2)
            await asyncio.sleep(3)
            assert len(await producer.partitions_for("orders")) == 2
            assert (await producer.send_and_wait("orders", b"new", partition=1)).offset == 0

    world.run(job)


@pytest.mark.requirement("a:D-06", "b:F-11")
def test_flush_waits_for_all_and_close_fails_what_is_left(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=2)
        producer = SimProducer(world, linger_ms=60_000)
        sent = [await producer.send("orders", b"%d" % number) for number in range(10)]
        assert not any(one.done() for one in sent)
        await producer.flush()
        assert all(one.done() for one in sent)
        world.cut_off()
        reported: list[Exception | None] = []
        lost = [
            await producer.send("orders", b"x", on_delivery=lambda error, _: reported.append(error)) for _ in range(4)
        ]
        with pytest.raises(FlushTimeoutError) as caught:
            await producer.flush(1.0)
        assert caught.value.left == 4
        lost.append(await producer.send("orders", b"open"))
        await producer.close(0.5)
        assert all(isinstance(one.exception(), ProducerClosedError) for one in lost)
        await asyncio.sleep(0.01)
        assert [type(error) for error in reported] == [ProducerClosedError] * 4
        with pytest.raises(ProducerClosedError, match="is closed"):
            await producer.send("orders", b"late")
        with pytest.raises(ProducerClosedError, match="is closed"):
            await producer.send_many("orders", values=[b"late"])
        await producer.close()
        assert producer.accumulator.reserved == 0

    world.run(job)
    world.network.heal()


@pytest.mark.requirement("a:D-05")
def test_close_fails_senders_that_wait_for_room(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        producer = SimProducer(world, buffer_memory=20_000, max_request_size=10_000)
        await producer.send_and_wait("orders", b"0")
        world.cut_off()
        for _ in range(2):
            await producer.send("orders", b"x" * 9_000)
        blocked = asyncio.get_running_loop().create_task(producer.send("orders", b"x" * 9_000))
        await asyncio.sleep(1)
        await producer.close(0.1)
        with pytest.raises(ProducerClosedError):
            await blocked

    world.run(job)
    world.network.heal()


def test_bulk_keeps_order_with_single_records_and_tells_ranges(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders", partitions=2)
        async with SimProducer(world, linger_ms=100, batch_size=2_000) as producer:
            before = await producer.send("orders", b"before", partition=1)
            bulk = await producer.send_many("orders", values=[b"%d" % number for number in range(300)], partition=1)
            after = await producer.send("orders", b"after", partition=1)
            reported = await bulk
            assert reported.count == 300
            assert bulk.batches > 3
            assert bulk.count == 300
            assert reported.ranges == (Range("orders", 1, 1, 300),)
            assert (await before).offset == 0
            assert (await after).offset == 301
            keyed = await (await producer.send_many("orders", [(b"key-%d" % number, b"v") for number in range(50)]))
            assert {one.partition for one in keyed.ranges} == {0, 1}
            mapped = await producer.send_many(
                "orders", [{"value": "text", "key": "k", "headers": {"a": b"1"}, "timestamp_ms": 5, "partition": 0}]
            )
            assert mapped.exception() is None if mapped.done() else (await mapped).count == 1
        records = await stored(client, "orders")
        assert [one.value for one in records[1][:302]] == [
            b"before",
            *(b"%d" % number for number in range(300)),
            b"after",
        ]
        assert records[0][-1].headers == (("a", b"1"),)
        assert records[0][-1].timestamp == 5

    world.run(job)


def test_bulk_without_room_says_what_was_left_out(world: ClientWorld) -> None:
    async def job(client: ClusterClient) -> None:
        await make_topic(client, "orders")
        async with SimProducer(world, buffer_memory=40_000, max_request_size=10_000, max_block_ms=500) as producer:
            await producer.send_and_wait("orders", b"0")
            world.cut_off()
            bulk = await producer.send_many("orders", values=[b"x" * 1_000] * 100)
            world.network.heal()
            error: BaseException | None = None
            try:
                await bulk
            except Exception as raised:
                error = raised
            assert error is not None
            stored = sum(one.count for one in error.stored)  # type: ignore[attr-defined]
            ((_, left_out, why),) = error.errors  # type: ignore[attr-defined]
            assert stored + left_out == 100
            assert stored > 10
            assert isinstance(why, BufferFullError)
            with pytest.raises(TypeError, match="not both"):
                await producer.send_many("orders")

    world.run(job)
