"""A consumer of given partitions, in the simulator: positions, pauses, resets, errors; and what is reported of all
that."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from support.clients.consumers import ConsumerWorld, SimConsumer

from tidelog.client import group_offsets
from tidelog.client.consumer import reader
from tidelog.client.consumer.errors import (
    ConsumerClosedError,
    DeserializationError,
    NoOffsetForPartitionError,
    SubscriptionError,
)
from tidelog.client.errors import LogTruncatedError, UnknownTopicError
from tidelog.client.offsets import delete_records
from tidelog.client.record import ConsumerRecord, OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from tidelog.model.errors import InvalidRequestError, UnknownTopicOrPartitionError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc import methods

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture(scope="module")
def world() -> Iterator[ConsumerWorld]:
    """With a topic of two partitions, ten records each at the times 1,000 to 1,009."""
    with ConsumerWorld(21) as made:
        made.make_topic("t", partitions=2)
        made.fill("t", {0: 10, 1: 10})
        yield made


async def read(consumer: SimConsumer, count: int, *, max_records: int = 500) -> list[ConsumerRecord[Any, Any]]:
    found: list[ConsumerRecord[Any, Any]] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll(1.0, max_records)
    assert len(found) == count
    return found


@pytest.mark.requirement(
    "a:E-03", "a:E-09", "a:E-13", "a:E-17", "a:E-18", "a:E-19", "b:G-09", "b:G-10", "b:G-11", "b:EX-19"
)
def test_given_partitions_are_read_from_wherever_the_program_wants(world: ConsumerWorld) -> None:
    async def work(consumer: SimConsumer) -> None:
        assert await consumer.partitions_for("t") == [T0, T1]
        await consumer.assign([T0])
        assert await consumer.assignment() == {T0}
        assert await consumer.position(T0) == 0
        (first,) = await read(consumer, 1, max_records=1)
        assert tuple(first) == ("t", 0, 0, 1_000, b"k", b"0:0", (), first.leader_epoch)
        assert (first.topic, first.key, first.value, first.topic_partition) == ("t", b"k", b"0:0", T0)
        assert await consumer.position(T0) == 1
        await consumer.seek(T0, 7)
        assert await consumer.position(T0) == 7
        assert [record.offset for record in await read(consumer, 3)] == [7, 8, 9]
        await consumer.seek_to_beginning()
        assert [record.offset for record in await read(consumer, 2, max_records=2)] == [0, 1]
        await consumer.seek_to_end(T0)
        assert await consumer.poll(0.7) == []
        assert await consumer.position(T0) == 10
        await consumer.seek_to_time(1_004, T0)
        assert (await read(consumer, 6))[0].offset == 4
        await consumer.seek_to_time({T0: 999_999})
        assert await consumer.position(T0) == 10
        # Another partition beside it: the first stays where it is.
        await consumer.seek(T0, 8)
        await consumer.assign([T0, T1])
        found = await read(consumer, 12)
        assert sorted((record.partition, record.offset) for record in found) == [
            (0, 8), (0, 9), *((1, offset) for offset in range(10))
        ]  # fmt: skip
        # Questions about partitions, assigned or not.
        await consumer.assign([T1])
        assert await consumer.beginning_offsets(T0, T1) == {T0: 0, T1: 0}
        assert await consumer.end_offsets(T0) == {T0: 10}
        found_times = await consumer.offsets_for_times({T0: 1_003, T1: 5_000})
        assert found_times == {T0: OffsetAndTimestamp(3, 1_003), T1: None}
        with pytest.raises(SubscriptionError, match="t-0 is not assigned"):
            await consumer.position(T0)
        with pytest.raises(InvalidRequestError, match="-1 is not an offset"):
            await consumer.seek(T1, -1)
        await consumer.close()
        with pytest.raises(ConsumerClosedError):
            await consumer.poll()

    world.consumer().run(work)


def test_a_client_of_more_partitions_than_a_request_may_name_splits_its_requests(
    world: ConsumerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of every node, here 2."""
    for module in (methods, reader, group_offsets):
        monkeypatch.setattr(module, "PARTITIONS_MAX", 2)
    world.make_topic("wide", partitions=7)
    world.fill("wide", dict.fromkeys(range(7), 3))
    partitions = [TopicPartition("wide", number) for number in range(7)]

    async def work(consumer: SimConsumer) -> None:
        await consumer.assign(partitions)
        found = await read(consumer, 21)
        assert {record.partition for record in found} == set(range(7))
        await consumer.commit()
        assert await consumer.committed(*partitions) == {
            partition: OffsetAndMetadata(3, "", 0) for partition in partitions
        }
        assert await consumer.end_offsets(*partitions) == dict.fromkeys(partitions, 3)
        await consumer.close()

    world.consumer("wide", enable_auto_commit=False).run(work)


@pytest.mark.requirement("b:G-12", "b:G-01", "a:E-39", "a:E-03")
def test_calls_that_do_not_go_together_are_refused(world: ConsumerWorld) -> None:
    async def work(consumer: SimConsumer) -> None:
        with pytest.raises(SubscriptionError, match="subscribe or assign first"):
            await consumer.poll()
        with pytest.raises(SubscriptionError, match="needs a group"):
            await consumer.subscribe("t")
        with pytest.raises(InvalidRequestError, match="commits need a group"):
            await consumer.commit()
        with pytest.raises(UnknownTopicError):
            await consumer.assign([TopicPartition("nosuch", 0)])
        with pytest.raises(UnknownTopicOrPartitionError, match="partitions 0 to 1"):
            await consumer.assign([TopicPartition("t", 2)])
        with pytest.raises(SubscriptionError, match="TopicPartition"):
            await consumer.assign(["t"])  # type: ignore[list-item]
        await consumer.close()

    async def grouped(consumer: SimConsumer) -> None:
        await consumer.subscribe("t")
        with pytest.raises(SubscriptionError, match="has subscribed"):
            await consumer.assign([T0])
        await consumer.unsubscribe()
        await consumer.assign([T0])
        with pytest.raises(SubscriptionError, match="uses assign"):
            await consumer.subscribe("t")
        with pytest.raises(SubscriptionError, match="not a regular expression"):
            await consumer.subscribe(pattern="(")
        # Without a membership, commits are taken while the group has no members.
        await consumer.commit({T0: OffsetAndMetadata(4, "by hand")})
        assert await consumer.committed(T0, T1) == {T0: OffsetAndMetadata(4, "by hand"), T1: None}
        await consumer.close()

    async def again(consumer: SimConsumer) -> None:
        await consumer.assign([T0])
        assert await consumer.position(T0) == 4
        await consumer.close()

    world.consumer().run(work)
    world.consumer("by-hand", enable_auto_commit=False).run(grouped)
    world.consumer("by-hand").run(again)


@pytest.mark.requirement("a:E-23", "b:G-15")
def test_a_poll_gives_no_more_than_it_is_asked_for_and_the_rest_later(world: ConsumerWorld) -> None:
    async def work(consumer: SimConsumer) -> None:
        await consumer.assign([T0, T1])
        sizes: list[int] = []
        found: list[ConsumerRecord[Any, Any]] = []
        while len(found) < 20:
            got = await consumer.poll(1.0)
            sizes.append(len(got))
            found += got
        assert max(sizes) == 7
        for number in (0, 1):
            assert [record.offset for record in found if record.partition == number] == list(range(10))
        await consumer.close()

    world.consumer(max_poll_records=7).run(work)


@pytest.mark.requirement("a:E-14", "b:G-13")
def test_a_paused_partition_gives_nothing_and_goes_on_where_it_was(world: ConsumerWorld) -> None:
    async def work(consumer: SimConsumer) -> None:
        await consumer.assign([T0, T1])
        found = await read(consumer, 3, max_records=3)  # more is fetched, and waits
        place = found[-1].topic_partition
        other = T1 if place == T0 else T0
        await consumer.pause(place)
        assert await consumer.paused() == {place}
        rest: list[ConsumerRecord[Any, Any]] = []
        while len(rest) < 10 - sum(record.topic_partition == other for record in found):
            rest += await consumer.poll(1.0)
        assert {record.topic_partition for record in rest} == {other}
        assert await consumer.poll(1.0) == []
        await consumer.resume(place)
        more = await read(consumer, 10 - sum(record.topic_partition == place for record in found))
        every = found + rest + more
        for name in (T0, T1):
            offsets = [record.offset for record in every if record.topic_partition == name]
            assert offsets == list(range(10))
        await consumer.close()

    world.consumer().run(work)


@pytest.mark.requirement("a:E-30", "b:G-25")
def test_where_to_begin_without_an_offset_is_the_programs_choice(world: ConsumerWorld) -> None:
    async def latest(consumer: SimConsumer) -> None:
        await consumer.assign([T0])
        assert await consumer.position(T0) == 10
        await consumer.close()

    async def none(consumer: SimConsumer) -> None:
        await consumer.assign([T0])
        for _ in range(2):
            with pytest.raises(NoOffsetForPartitionError, match=r"t-0.*auto_offset_reset is 'none'") as raised:
                await consumer.poll(1.0)
            assert raised.value.partitions == (T0,)
        await consumer.seek(T0, 9)
        assert [record.offset for record in await read(consumer, 1)] == [9]
        await consumer.close()

    async def hour(consumer: SimConsumer) -> None:
        await consumer.assign([TopicPartition("aged", 0)])
        assert (await read(consumer, 1))[0].value == b"0:1"
        await consumer.close()

    world.consumer(auto_offset_reset="latest").run(latest)
    world.consumer("no-offset", auto_offset_reset="none").run(none)
    world.make_topic("aged")
    now_ms = world.machine.clock.now_ms()
    world.fill("aged", {0: 1}, timestamp=now_ms - 7_200_000)
    world.fill("aged", {0: 1}, first=1, timestamp=now_ms - 60_000)
    world.consumer(auto_offset_reset="1h").run(hour)
    world.consumer(auto_offset_reset="by_duration:PT1H").run(hour)


def test_a_position_outside_of_the_log_is_reset_or_reported() -> None:
    with ConsumerWorld(22) as world:
        world.make_topic("t")
        world.fill("t", {0: 10})

        async def cut(client):  # type: ignore[no-untyped-def]
            topic = await client.topic("t")
            await delete_records(client, [topic], {topic.partitions[0]: 4})

        world.run(cut)

        async def earliest(consumer: SimConsumer) -> None:
            await consumer.assign([T0])
            await consumer.seek(T0, 1)
            assert (await read(consumer, 6))[0].offset == 4
            await consumer.seek(T0, 99)
            assert (await read(consumer, 6))[0].offset == 4
            await consumer.close()

        async def none(consumer: SimConsumer) -> None:
            await consumer.assign([T0])
            await consumer.seek(T0, 1)
            with pytest.raises(NoOffsetForPartitionError, match="outside of the log"):
                await consumer.poll(5.0)
            await consumer.seek(T0, 5)
            assert (await read(consumer, 5))[0].offset == 5
            await consumer.close()

        world.consumer().run(earliest)
        world.consumer(auto_offset_reset="none").run(none)


class Customer:
    """The example of the source documents: an id, the size of a name, the name."""

    def deserialize(self, topic: str, data: bytes) -> tuple[int, str]:
        if len(data) < 8:
            raise ValueError(f"{len(data)} bytes are too few")
        number, size = struct.unpack_from(">ii", data)
        return number, data[8 : 8 + size].decode()


@pytest.mark.requirement("a:E-16", "b:G-40", "b:G-41", "b:EX-10", "b:D-30")
def test_a_deserializer_that_fails_names_the_record_and_loses_nothing(world: ConsumerWorld) -> None:
    from tidelog.client.cluster import ClusterClient
    from tidelog.client.producer.writer import Writer
    from tidelog.log.batch import encode_columns

    good = struct.pack(">ii", 7, 3) + b"Ann"
    values: list[bytes | None] = [good, None, b"short", good]

    async def write(client: ClusterClient) -> None:
        writer = Writer(client)
        await writer.send("customers", 0, encode_columns([1] * 4, [b"k"] * 4, values))
        await writer.flush()
        await writer.close()

    world.make_topic("customers")
    world.run(write)
    place = TopicPartition("customers", 0)

    async def work(consumer: SimConsumer) -> None:
        await consumer.assign([place])
        found = await consumer.poll(5.0)
        assert [record.value for record in found] == [(7, "Ann"), None]
        for _ in range(2):
            with pytest.raises(
                DeserializationError,
                match=r"value of customers-0 at offset 2 .*ValueError: 5 bytes are too few.*seek to 3",
            ) as raised:
                await consumer.poll(5.0)
            assert (raised.value.partition, raised.value.offset) == (place, 2)
            assert await consumer.position(place) == 2
        await consumer.seek(place, 3)
        assert [record.value for record in await read(consumer, 1)] == [(7, "Ann")]
        await consumer.close()

    world.consumer(value_deserializer=Customer(), key_deserializer="str").run(work)

    async def texts(consumer: SimConsumer) -> None:
        await consumer.assign([T0])
        assert [(record.key, record.value) for record in await read(consumer, 2, max_records=2)] == [
            ("k", "0:0"),
            ("k", "0:1"),
        ]
        await consumer.close()

    world.consumer(value_deserializer=bytes.decode, key_deserializer="str").run(texts)


def test_a_poll_that_is_cut_short_loses_and_repeats_nothing(world: ConsumerWorld) -> None:
    """A program that polls under a timeout of its own, of any length."""

    async def work(consumer: SimConsumer) -> None:
        await consumer.assign([T0, T1])
        found: list[ConsumerRecord[Any, Any]] = []
        step = 0
        while len(found) < 20:
            step += 1
            try:
                async with asyncio.timeout(0.0004 * (step % 40)):
                    found += await consumer.poll(1.0, 2)
            except TimeoutError:
                continue
        for number in (0, 1):
            assert [record.offset for record in found if record.partition == number] == list(range(10))
        assert step > 11
        # A call that was cancelled after it fetched: the next one returns the data.
        await consumer.seek_to_beginning()
        await consumer.core.fill(5.0)
        again = await consumer.poll(5.0, 100)
        while len(again) < 20:
            again += await consumer.poll(5.0, 100)
        assert sorted((record.partition, record.offset) for record in again) == [
            (n, at) for n in (0, 1) for at in range(10)
        ]
        await consumer.close()

    world.consumer().run(work)


@pytest.mark.requirement("a:E-20", "a:E-21", "a:E-22", "a:E-24", "b:G-20", "b:G-21", "b:G-22", "b:EX-37")
def test_a_fetch_waits_for_its_bytes_or_its_time_whichever_comes_first(world: ConsumerWorld) -> None:
    async def work(consumer: SimConsumer) -> None:
        await consumer.assign([T0])
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await consumer.poll(5.0)
        assert 0.09 < loop.time() - began_s < 0.3  # 1 MB never comes: 100 ms
        await consumer.close()

    world.consumer(fetch_min_bytes=1 << 20, fetch_max_wait_ms=100).run(work)

    async def at_once(consumer: SimConsumer) -> None:
        await consumer.assign([T0])
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await consumer.poll(5.0)
        assert loop.time() - began_s < 0.09
        config = consumer.core._reader.config
        assert (config.max_bytes, config.partition_bytes, config.rack) == (3 << 20, 1 << 19, "r1")
        assert config.buffer_bytes_max == 1 << 21
        await consumer.close()

    world.consumer(
        fetch_max_bytes=3 << 20, max_partition_fetch_bytes=1 << 19, client_rack="r1", prefetch_bytes=1 << 21
    ).run(at_once)


@pytest.mark.case("T4")
def test_a_truncation_below_the_position_is_reported_with_the_diverging_offset() -> None:
    """An unclean election: the reader has read from a leader whose records are gone. Raised again until a seek."""
    with ConsumerWorld(23) as world:
        world.make_topic("t")
        world.fill("t", {0: 5})
        place = world.run(lambda client: client.topic("t")).partitions[0]
        leader = world.leader(place)
        one = world.consumer()

        async def first(consumer: SimConsumer) -> None:
            await consumer.assign([T0])
            await read(consumer, 5)

        one.run(first)
        world.kill(NodeId(leader))
        world.until(lambda: world._leader(place) not in (None, leader))
        world.fill("t", {0: 3}, first=5)

        async def then(consumer: SimConsumer) -> None:
            got = await read(consumer, 3)
            epoch = got[-1].leader_epoch
            assert epoch > 0
            # As if these had been read from the leader before, which had other records there.
            await consumer.seek(T0, 8, leader_epoch=epoch - 1)
            for _ in range(2):
                with pytest.raises(LogTruncatedError, match="t-0") as raised:
                    await consumer.poll(5.0)
                assert (raised.value.position, raised.value.diverging_offset) == (8, 5)
                assert raised.value.diverging_epoch < epoch
            await consumer.seek(T0, raised.value.diverging_offset)
            assert [record.offset for record in await read(consumer, 3)] == [5, 6, 7]
            await consumer.close()

        one.run(then)
