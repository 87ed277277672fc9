"""What the sources say of producers and consumers, in the simulator: who waits for whom, what is lost or repeated."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.cluster import BOOTSTRAP, BROKERS, CLIENT, ClientWorld
from support.clients.consumers import ConsumerWorld, SimConsumer
from support.clients.producers import SimProducer
from support.clients.records import create, some, stored, values

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import DeliveryTimeoutError, ProducerClosedError
from tidelog.client.option_table import ConsumerConfig, read_options
from tidelog.client.producer.partitioners import partition_of
from tidelog.client.record import TopicPartition
from tidelog.model.ids import NodeId, PartitionId
from tidelog.world.simulated.faults import Latency

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def slow_replication(world: ClientWorld, seconds: float) -> None:
    for one in BROKERS:
        for other in BROKERS:
            if one != other:
                world.network.slow_down(NodeId(one), NodeId(other), Latency(seconds, seconds))


def slow_client(world: ClientWorld, seconds: float) -> None:
    for broker in BROKERS:
        world.network.slow_down(CLIENT, NodeId(broker), Latency(seconds, seconds))
        world.network.slow_down(NodeId(broker), CLIENT, Latency(seconds, seconds))


# Who waits for whom.


@pytest.mark.requirement("a:D-26")
def test_a_record_is_read_when_all_in_sync_have_it_whatever_the_producer_waited_for() -> None:
    with ConsumerWorld(51) as world:
        world.make_topic("t")
        world.fill("t", {0: 1})
        one = world.consumer()
        seen: dict[bytes, float] = {}
        arrived: dict[bytes, asyncio.Event] = {}

        async def read() -> None:
            await one.consumer.assign([T0])
            async for record in one.consumer:
                seen[record.value] = world.now_s()
                arrived.setdefault(record.value, asyncio.Event()).set()

        one.task = one.machine.spawn(read())
        world.until(lambda: b"0:0" in seen)
        slow_replication(world, 0.3)
        acknowledged: dict[object, float] = {}
        read_after: dict[object, float] = {}
        for acks in (0, 1, "all"):

            async def job(_: ClusterClient, acks: object = acks) -> None:
                async with SimProducer(world, acks=acks) as producer:
                    await producer.send_and_wait("t", b"warm")
                    await asyncio.sleep(3)
                    value = f"acks={acks}".encode()
                    began_s = world.now_s()
                    await producer.send_and_wait("t", value)
                    acknowledged[acks] = world.now_s() - began_s
                    await arrived.setdefault(value, asyncio.Event()).wait()
                    read_after[acks] = seen[value] - began_s

            world.run(job)
        assert max(acknowledged[0], acknowledged[1]) < 0.2
        assert acknowledged["all"] >= 0.6, "there and back"
        assert min(read_after.values()) >= 0.6, "nobody reads before the replicas have it"
        assert max(read_after.values()) - min(read_after.values()) < 0.2


@pytest.mark.requirement("a:D-26b")
def test_with_a_long_way_to_the_leader_the_number_in_flight_is_the_throughput() -> None:
    took_s: dict[object, float] = {}
    for in_flight in (1, 5, "waits for each"):
        with ClientWorld(52) as world:

            async def job(client: ClusterClient, in_flight: object = in_flight, world: ClientWorld = world) -> float:
                await create(client, "t", BROKERS)
                limit = in_flight if isinstance(in_flight, int) else 5
                async with SimProducer(world, acks=1, max_in_flight=limit, batch_size=0) as producer:
                    await producer.send_and_wait("t", b"warm")
                    slow_client(world, 0.2)
                    began_s = world.now_s()
                    if in_flight == limit:
                        sent = [await producer.send("t", b"%d" % number) for number in range(20)]
                        assert [(await one).offset for one in sent] == list(range(1, 21))
                    else:
                        for number in range(20):
                            assert (await producer.send_and_wait("t", b"%d" % number)).offset == 1 + number
                    return world.now_s() - began_s

            took_s[in_flight] = world.run(job)
    assert took_s[1] >= 20 * 0.4, "one round trip for each"
    assert took_s["waits for each"] >= 20 * 0.4, "a wait for each result is a wait for each round trip"
    assert took_s[5] < took_s[1] / 3


@pytest.mark.requirement("a:C-19")
def test_a_producer_goes_as_fast_as_its_acknowledgements() -> None:
    took_s: list[float] = []
    for delay_s in (0.0, 0.2):
        with ClientWorld(53) as world:

            async def job(client: ClusterClient, delay_s: float = delay_s, world: ClientWorld = world) -> float:
                await create(client, "t", BROKERS)
                options = {"buffer_memory": 20_000, "max_request_size": 10_000, "batch_size": 1_000}
                async with SimProducer(world, **options) as producer:
                    await producer.send_and_wait("t", b"warm")
                    if delay_s:
                        slow_replication(world, delay_s)
                    began_s = world.now_s()
                    for _ in range(200):
                        await producer.send("t", b"x" * 1_000)
                        assert producer.accumulator.reserved <= 20_000
                    await producer.flush()
                    assert producer.metrics()["records_failed"] == 0
                    return world.now_s() - began_s

            took_s.append(world.run(job))
    assert took_s[1] >= 200 / 20 * 0.4, "20 fit in; a round of replication for each so many"
    assert took_s[0] < took_s[1] / 5


@pytest.mark.requirement("a:C-19", "a:V-07", "b:A-13")
def test_the_log_takes_in_what_a_reader_is_too_slow_for_and_the_reader_catches_up() -> None:
    with ConsumerWorld(54) as world:
        world.make_topic("t")
        one = world.consumer(prefetch_bytes=30_000, max_partition_fetch_bytes=10_000, fetch_max_bytes=10_000)

        async def begin(consumer: SimConsumer) -> None:
            await consumer.assign([T0])
            assert await consumer.poll(0.1) == []

        one.run(begin)

        async def write(_: ClusterClient) -> float:
            async with SimProducer(world, batch_size=1_000) as producer:
                began_s = world.now_s()
                for number in range(500):
                    await producer.send("t", b"%04d" % number + bytes(1_000))
                await producer.flush()
                return world.now_s() - began_s

        took_s = world.run(write)
        world.world.run_for(10)

        async def figures_of(consumer: SimConsumer) -> dict[str, float]:
            return consumer.metrics()

        figures = one.run(figures_of)
        assert figures["prefetched_bytes"] <= 45_000, "it pulls what it has room for, and nothing is pushed on it"
        assert took_s < 5, "the producer knows nothing of it"

        async def catch_up(consumer: SimConsumer) -> list[int]:
            return [int(record.value[:4]) for record in await some(consumer, 500, max_records=7)]

        assert one.run(catch_up) == list(range(500))


@pytest.mark.requirement("a:E-29")
def test_a_fetch_without_an_answer_is_retried_after_the_request_timeout() -> None:
    assert read_options(ConsumerConfig, {"bootstrap.servers": "x"}, {}).request_timeout_ms == 30_000
    with ConsumerWorld(55) as world:
        world.make_topic("t")
        world.fill("t", {0: 1})
        leader = NodeId(world.leader(world.run(lambda client: client.topic("t")).partitions[0]))
        one = world.consumer(request_timeout_ms=1_000, fetch_max_wait_ms=500)
        asked: list[float] = []

        async def read() -> None:
            await one.consumer.assign([T0])
            call = one.consumer.core._reader.cluster.call_node

            async def noted(node: int, method: object, request: object, **more: object) -> object:
                asked.append(world.now_s())
                return await call(node, method, request, **more)  # type: ignore[arg-type]

            one.consumer.core._reader.cluster.call_node = noted  # type: ignore[method-assign]
            async for record in one.consumer:
                one.records.append(record)

        one.task = one.machine.spawn(read())
        world.until(lambda: len(one.records) == 1)
        world.network.block(leader, one.node_id)
        at_s = world.now_s()
        world.world.run_for(8)
        attempts = [when for when in asked if when > at_s]
        assert 3 <= len(attempts) <= 12, "again and again, each for the time of a request and of the long poll"
        world.network.heal()
        world.fill("t", {0: 1}, first=1)
        healed_s = world.now_s()
        world.until(lambda: len(one.records) == 2)
        assert world.now_s() - healed_s < 2


class RackedConsumers(ConsumerWorld):
    """Brokers in three places."""

    def start_brokers(self, *brokers: int, wait: bool = True, **more: object) -> None:
        for broker in brokers:
            super().start_brokers(broker, wait=wait, rack=f"rack-{broker}", **more)


@pytest.mark.requirement("a:E-35")
def test_a_consumer_with_a_rack_reads_from_the_replica_there_and_others_from_the_leader() -> None:
    with RackedConsumers(56) as world:

        async def make(client: ClusterClient) -> PartitionId:
            await create(client, "t", BROKERS)
            return (await client.topic("t")).partitions[0]

        place = world.run(make)
        world.until_in_sync(place, *BROKERS)
        world.fill("t", {0: 5})

        def replica(rack: str) -> int:
            async def read(consumer: SimConsumer) -> int:
                await consumer.assign([T0])
                found = await some(consumer, 5, max_records=1)
                assert [record.offset for record in found] == list(range(5))
                await consumer.poll(1.0)
                where = consumer.core.subscription.partitions[place].replica
                await consumer.close()
                return where

            return world.consumer(client_rack=rack).run(read)

        assert world.leader(place) == BROKERS[0]
        assert replica("rack-12") == 12
        assert replica("rack-13") == 13
        assert replica("") == replica("rack-of-nobody") == -1, "the leader"


# Where a record goes.


@pytest.mark.requirement("a:T-28", "b:D-21")
def test_a_key_of_a_partition_without_a_leader_waits_and_fails_and_records_without_one_go_elsewhere() -> None:
    with ClientWorld(57) as world:

        async def job(client: ClusterClient) -> None:
            await create(client, "t", (11,), (12,), (13,))
            keys = {partition_of(b"key-%d" % number, 3): b"key-%d" % number for number in range(50)}
            options = {"delivery_timeout_ms": 6_000, "request_timeout_ms": 2_000, "metadata_max_age_ms": 1_000}
            async with SimProducer(world, **options) as producer:
                for part in range(3):
                    assert (await producer.send_and_wait("t", b"x", keys[part])).partition == part
                world.kill(NodeId(11))
                await asyncio.sleep(15)
                began_s = world.now_s()
                with pytest.raises(DeliveryTimeoutError):
                    await producer.send_and_wait("t", b"x", keys[0])
                assert world.now_s() - began_s < 7
                assert (await producer.send_and_wait("t", b"x", keys[1])).partition == 1
                used = [(await producer.send_and_wait("t", b"x")).partition for _ in range(30)]
                assert set(used) == {1, 2}, "only where there is a leader"

        world.run(job, timeout=200)


@pytest.mark.requirement("a:U-07", "b:D-35", "b:EX-36")
def test_more_partitions_move_keys_and_no_record_and_only_groups_notice() -> None:
    with ConsumerWorld(58) as world:
        world.make_topic("t", partitions=3)
        keys = [b"user-%d" % number for number in range(40)]
        member = world.consumer("g", metadata_max_age_ms=1_000).start("t")
        given = world.consumer(metadata_max_age_ms=1_000)

        async def read() -> None:
            await given.consumer.assign([TopicPartition("t", number) for number in range(3)])
            async for record in given.consumer:
                given.records.append(record)

        given.task = given.machine.spawn(read())
        world.until(lambda: len(member.reading) == 3)

        async def job(client: ClusterClient) -> tuple[dict[bytes, int], dict[bytes, int]]:
            async with SimProducer(world, metadata_max_age_ms=1_000) as producer:

                async def places() -> dict[bytes, int]:
                    return {key: (await producer.send_and_wait("t", b"v", key)).partition for key in keys}

                before = await places()
                assert await places() == before, "a key has one place"
                assert before == {key: partition_of(key, 3) for key in keys}
                kept = await stored(client, "t")
                await AdminCore(client).add_partitions({"t": 5})
                await asyncio.sleep(5)
                after = await places()
                assert after == {key: partition_of(key, 5) for key in keys}
                now = await stored(client, "t")
                for part, records in kept.items():
                    assert now[part][: len(records)] == records, "what is stored stays where it is"
                return before, after

        before, after = world.run(job)
        moved = [key for key in keys if before[key] != after[key]]
        assert 10 < len(moved) < 40
        assert {after[key] for key in moved} >= {3, 4}
        world.until(lambda: len(member.reading) == 5, timeout=20)
        world.until(lambda: len(member.records) == 120, timeout=20)
        world.world.run_for(5)
        assert {record.partition for record in given.records} == {0, 1, 2}, "records with a given partition are in it"
        assert len(given.records) == 120 - len([record for record in member.records if record.partition > 2])


@pytest.mark.requirement("b:B-03", "b:D-29")
def test_one_live_address_of_the_list_leads_to_the_whole_cluster() -> None:
    with ClientWorld(59) as world:

        async def make(client: ClusterClient) -> None:
            await create(client, "t", (11, 12, 13), (12, 13, 11), (13, 11, 12))

        world.run(make)

        def write(bootstrap: tuple[str, ...]) -> list[int]:
            async def job(_: ClusterClient) -> list[int]:
                class Somewhere(SimProducer):
                    def _new_cluster(self, host: object) -> ClusterClient:
                        return world.new_client(bootstrap)

                async with Somewhere(world) as producer:
                    sent = [await producer.send_and_wait("t", b"x", partition=part) for part in range(3)]
                    return [one.partition for one in sent]

            return world.run(job)

        assert write((BOOTSTRAP[1],)) == [0, 1, 2], "of each leader, known by one of them"
        world.kill(NodeId(11))
        began_s = world.now_s()
        assert write(BOOTSTRAP) == [0, 1, 2], "the first address is dead"
        assert write(("host-99:9092", BOOTSTRAP[2])) == [0, 1, 2], "nobody was ever there"
        assert world.now_s() - began_s < 30


# What is sent again.


@pytest.mark.case("C2")
@pytest.mark.requirement("b:D-06", "b:J-06")
def test_a_producer_that_does_not_know_sends_again_and_the_log_has_it_once() -> None:
    with ClientWorld(60) as world:

        async def job(client: ClusterClient) -> None:
            await create(client, "t", BROKERS)
            async with SimProducer(world, request_timeout_ms=1_000, batch_size=0) as producer:
                await producer.send_and_wait("t", b"warm")
                (place,) = (await client.topic("t")).partitions
                for broker in BROKERS:
                    world.network.block(NodeId(broker), CLIENT)  # what it sends arrives; no answer does
                sent = [await producer.send("t", b"%d" % number) for number in range(5)]
                await asyncio.sleep(4)
                assert not any(one.done() for one in sent)
                assert world.log(11, place).end_offset > 1, "it was stored, and nobody said so"
                world.network.heal()
                assert [(await one).offset for one in sent] == [1, 2, 3, 4, 5]
                assert producer.metrics()["retries"] > 0
            assert await values(client, "t") == [b"warm", b"0", b"1", b"2", b"3", b"4"]

        world.run(job)


@pytest.mark.requirement("b:D-07", "b:EX-33")
@pytest.mark.parametrize("in_flight", [1, 5])
@pytest.mark.parametrize("acks", ["all", 1])
def test_a_batch_that_fails_and_is_sent_again_does_not_come_after_the_next_one(acks: object, in_flight: int) -> None:
    """With any number in flight, and with any acks: a partition queue that has failed waits until its first is
    stored."""
    with ClientWorld(61) as world:

        async def job(client: ClusterClient) -> None:
            await create(client, "t", BROKERS)
            options = {"request_timeout_ms": 1_000, "batch_size": 0, "acks": acks, "max_in_flight": in_flight}
            async with SimProducer(world, **options) as producer:
                await producer.send_and_wait("t", b"warm")
                slow_client(world, 0.05)
                sent = [await producer.send("t", b"%d" % number) for number in range(3)]
                await asyncio.sleep(0.06)  # some are on their way there, their answers on the way back
                world.network.cut_streams(CLIENT, NodeId(11))
                sent += [await producer.send("t", b"%d" % number) for number in range(3, 9)]
                await producer.flush()
                assert [(await one).offset for one in sent] == list(range(1, 10))
                assert producer.metrics()["retries"] > 0
            assert await values(client, "t") == [b"warm", *(b"%d" % number for number in range(9))]

        world.run(job)


@pytest.mark.requirement("a:T-16")
def test_a_restarted_producer_has_another_id_and_its_repeats_are_stored_twice() -> None:
    with ClientWorld(62) as world:

        async def job(client: ClusterClient) -> None:
            await create(client, "t", BROKERS)
            first = SimProducer(world)
            await first.send_and_wait("t", b"warm")
            for broker in BROKERS:
                world.network.block(NodeId(broker), CLIENT)
            lost = await first.send("t", b"payment")
            await asyncio.sleep(1)
            await first.close(0)
            assert isinstance(lost.exception(), ProducerClosedError)
            world.network.heal()
            async with SimProducer(world) as second:
                await second.send_and_wait("t", b"payment")
            assert await values(client, "t") == [b"warm", b"payment", b"payment"]

        world.run(job)
