"""Calls of asyncio clients that are cancelled at any point: the same object goes on, nothing is lost, given twice or
waited for without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any

import pytest
from support.clients.cancellation import TOPIC, Reading, Writing, cut
from support.clients.cluster import ClientWorld
from support.clients.consumers import ConsumerWorld, SimConsumer
from support.clients.producers import SimProducer
from support.clients.records import make_topic, values
from support.groups.fake_coordinator import FakeGroups

import tidelog
from tidelog.client.bridge import Bridge
from tidelog.client.cluster import ClusterClient
from tidelog.client.errors import ProducerClosedError
from tidelog.client.record import TopicPartition
from tidelog.model.errors import TidelogError
from tidelog.model.group_errors import CoordinatorLoadingError
from tidelog.testing import MemoryCluster

PARTITIONS, RECORDS, STEPS = 3, 120, 120
T0 = TopicPartition("t", 0)


class FarHost(Bridge):
    """As the IO thread: requests and responses take their time, and a cancelled caller does not wait for its job."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random) -> None:
        super().__init__(loop)
        self._random = random

    async def run_async(self, job: Coroutine[Any, Any, Any], *, timeout: float | None = None) -> Any:
        try:
            for _ in range(self._random.randrange(3)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            job.close()
            raise
        result = await self._run_elsewhere(job)
        for _ in range(self._random.randrange(3)):
            await asyncio.sleep(0)
        return result

    def release(self, _owner: object, *, is_awaited: bool = True) -> None:
        pass


@pytest.mark.parametrize("is_member", [False, True], ids=["assigned", "member"])
@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_whose_calls_are_cancelled_gives_everything_in_order(seed: int, is_member: bool) -> None:
    with ConsumerWorld(300 + seed) as world:
        world.make_topic(TOPIC, partitions=PARTITIONS)
        world.fill(TOPIC, dict.fromkeys(range(PARTITIONS), RECORDS))
        group = "g" if is_member else None
        program = world.consumer(group, auto_commit_interval_ms=50, max_poll_interval_ms=3_600_000)
        program.consumer._frontend.host.io = FarHost(program.machine.loop, Random(seed))

        async def work(consumer: SimConsumer) -> Reading:
            random = Random(seed)
            reading = Reading(consumer, random, partitions=PARTITIONS, longest_s=0.05, is_member=is_member)
            await reading.begin()
            for _ in range(STEPS):
                await reading.step()
                assert reading.wrong == []
            await reading.drain(dict.fromkeys(reading.names, RECORDS))
            assert reading.wrong == []
            assert reading.ended > STEPS / 5
            assert reading.ended < STEPS * 2
            if is_member:
                await consumer.commit()
                found = await consumer.committed(*reading.names)
                assert [one.offset for one in found.values() if one is not None] == [RECORDS] * PARTITIONS
            await cut(random, consumer.close(), longest_s=0.02)
            await consumer.close()
            return reading

        program.run(work, timeout=600)


@pytest.mark.parametrize("seed", range(4))
def test_a_producer_whose_calls_are_cancelled_stores_what_it_took_once_and_in_order(seed: int) -> None:
    with ClientWorld(400 + seed) as world:

        async def job(client: ClusterClient) -> None:
            await make_topic(client, TOPIC)
            random = Random(seed)
            producer = SimProducer(world, buffer_memory=8_192, max_request_size=4_096, batch_size=2_048)
            writing = Writing(producer, random, longest_s=0.02)
            for _ in range(200):
                await writing.step()
            await producer.flush(60)
            writing.check([value or b"" for value in await values(client, TOPIC)])
            assert 20 < writing.ended < 200
            late = [
                await producer.send(TOPIC, b"%d" % number) for number in range(writing.numbers, writing.numbers + 3)
            ]
            await cut(random, producer.close(), longest_s=0.01)
            await producer.close()
            async with asyncio.timeout(30):
                for delivery in late:
                    try:
                        await delivery
                    except ProducerClosedError:
                        continue
            with pytest.raises(ProducerClosedError):
                await producer.send(TOPIC, b"after")

        world.run(job, timeout=600)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    with MemoryCluster(brokers=3, seed=5) as made:
        yield made


def test_the_same_with_threads_in_memory(cluster: MemoryCluster) -> None:
    name = TOPIC
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=PARTITIONS)

    async def work() -> None:
        random = Random(0)
        async with tidelog.aio.Producer(cluster.bootstrap, buffer_memory=8_192, max_request_size=4_096) as producer:
            writing = Writing(producer, random, longest_s=0.01)
            for _ in range(150):
                await writing.step()
            await producer.flush(60)
            for number in (1, 2):
                await producer.send_many(name, values=[b"x"] * 60, partition=number)
        async with tidelog.aio.Admin(cluster.bootstrap) as admin:
            for _ in range(10):
                await cut(random, admin.list_topics(), longest_s=0.005)
            assert name in {topic.name for topic in await admin.list_topics()}
        async with tidelog.aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as whole:
            await whole.assign([(name, 0)])
            end = (await whole.end_offsets((name, 0)))[TopicPartition(name, 0)]
            stored: list[Any] = []
            async with asyncio.timeout(60):
                while len(stored) < end:
                    stored += [record.value for record in await whole.poll(0.2)]
            writing.check(stored)
        consumer = tidelog.aio.Consumer(
            cluster.bootstrap, group="g", auto_offset_reset="earliest", auto_commit_interval_ms=50
        )
        reading = Reading(consumer, random, partitions=PARTITIONS, longest_s=0.02, is_member=True)
        await reading.begin()
        for _ in range(60):
            await reading.step()
            assert reading.wrong == []
        ends = await consumer.end_offsets(*reading.names)
        await reading.drain(ends)
        assert reading.wrong == []
        await cut(random, consumer.close(), longest_s=0.01)
        await consumer.close()

    asyncio.run(work())


def test_a_commit_that_takes_longer_than_the_poll_interval_does_not_cost_the_membership() -> None:
    with ConsumerWorld(31) as world:
        world.make_topic("t")
        world.fill("t", {0: 5})
        fake = FakeGroups(world)
        (place,) = world.run(lambda client: client.topic("t")).partitions
        fake.deal({place: "t"})

        async def work(consumer: SimConsumer) -> None:
            loop = asyncio.get_running_loop()
            await consumer.subscribe("t")
            while not await consumer.poll(5.0):
                pass
            fake.script("commit_offsets", *[CoordinatorLoadingError("loading")] * 20)
            start_s = loop.time()
            await consumer.commit()
            assert loop.time() - start_s > 4, "longer than the limit, which is 2 s"
            assert consumer.metrics()["poll_interval_exceeded"] == 0
            # Nor does it give new time: what the program takes between its calls counts.
            for _ in range(5):
                await asyncio.sleep(0.8)
                await consumer.assignment()
            assert consumer.metrics()["poll_interval_exceeded"] == 1
            with pytest.raises(TidelogError, match="without a poll, max_poll_interval_ms is 2000"):
                await consumer.commit({T0: 1})
            await consumer.close()

        world.consumer("g", max_poll_interval_ms=2_000, enable_auto_commit=False).run(work)
