"""What a fetch holds: nothing while it waits, and never more than the memory gives; and how long it takes at a time."""

import asyncio
from functools import partial

import pytest
from support.brokers import data_requests
from support.brokers.cluster import ReplicationCluster, RunningBroker, batch, values_of
from test_replicas import BROKERS

from tidelog.model.ids import PartitionId
from tidelog.services.fetch import READS_PER_SLICE, FetchItem, FetchResult
from tidelog.services.produce import ProduceItem

SIZE = 1_000


class Memory:
    """Gives `most` in all, and `least` in any case; remembers the most that was taken."""

    def __init__(self, most: int = 1 << 30, least: int = 1) -> None:
        self.most = most
        self.least = least
        self.used = 0
        self.peak = 0

    def take(self, asked: int) -> int:
        taken = min(asked, max(self.least, self.most - self.used))
        self.used += taken
        self.peak = max(self.peak, self.used)
        return taken

    def give_back(self, size: int) -> None:
        self.used -= size


def read(results: list[FetchResult]) -> list[int]:
    return [len(values_of(result.data)) for result in results]


def test_a_fetch_that_waits_holds_nothing_and_reads_again_what_it_answers() -> None:
    with ReplicationCluster(451, brokers=BROKERS) as cluster:
        one, two = cluster.topic("one", BROKERS), cluster.topic("two", BROKERS)
        for _ in range(3):
            cluster.write(one, bytes(SIZE))

        async def job(found: RunningBroker) -> None:
            memory = Memory()
            items = [FetchItem(one, 0, 1 << 20), FetchItem(two, 0, 1 << 20)]

            def poll(min_bytes: int, max_wait_ms: int) -> asyncio.Task[list[FetchResult]]:
                fetch = data_requests.fetch(
                    found.service, items, min_bytes=min_bytes, max_bytes=1 << 20, max_wait_ms=max_wait_ms, memory=memory
                )
                return asyncio.get_running_loop().create_task(fetch)

            async def write(place: PartitionId) -> None:
                items = [ProduceItem(place, batch(bytes(SIZE)))]
                (result,) = await data_requests.produce(found.service, items, acks=-1, timeout_ms=5_000)
                assert result.error is None

            enough, timed, given_up = poll(5 * SIZE, 10_000), poll(50 * SIZE, 500), poll(50 * SIZE, 10_000)
            await asyncio.sleep(0.1)
            assert found.service.fetch.waiting_fetches == 3
            assert memory.peak >= 3 * SIZE, "it was read, to see how much there is"
            assert memory.used == 0
            await write(two)
            await asyncio.sleep(0.1)
            assert memory.used == 0
            assert not enough.done()
            assert read(await timed) == [3, 1], "what there was when its time was over"
            await write(two)
            assert read(await enough) == [3, 2]
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert (memory.used, found.service.fetch.waiting_fetches, len(found.replicas.wakers)) == (0, 0, 0)

        cluster.on_broker(11, job)


def test_a_fetch_brings_what_the_memory_gives_and_does_not_wait_for_more() -> None:
    with ReplicationCluster(452, brokers=BROKERS) as cluster:
        one, two = cluster.topic("one", BROKERS), cluster.topic("two", BROKERS)
        for place in (one, two):
            for _ in range(3):
                cluster.write(place, bytes(SIZE))

        async def job(memory: Memory, found: RunningBroker) -> list[int]:
            items = [FetchItem(one, 0, 1 << 20), FetchItem(two, 0, 1 << 20)]
            began_s = asyncio.get_running_loop().time()
            results = await data_requests.fetch(
                found.service, items, min_bytes=100 * SIZE, max_bytes=1 << 20, max_wait_ms=10_000, memory=memory
            )
            assert asyncio.get_running_loop().time() - began_s < 1
            assert memory.used == 0, "the holder of the answer counts it from here on"
            return read(results)

        for most, expected in ((5 * SIZE // 2, [2, 0]), (9 * SIZE // 2, [3, 1]), (0, [1, 0])):
            memory = Memory(most)
            assert cluster.on_broker(11, partial(job, memory)) == expected
            assert memory.peak <= max(most, 1)


def test_a_fetch_of_many_partitions_lets_others_have_their_turn_and_misses_nothing() -> None:
    count = 3 * READS_PER_SLICE
    with ReplicationCluster(453, brokers=(11,)) as cluster:
        # Committed as soon as it is written: in the same turn.
        many = cluster.topic("many", partitions=count, factor=1, configs={"flush.mode": "page-cache"})
        places = [PartitionId(many.topic_id, number) for number in range(count)]

        async def job(found: RunningBroker) -> None:
            loop = asyncio.get_running_loop()
            fetch = loop.create_task(
                data_requests.fetch(
                    found.service,
                    [FetchItem(place, 0, 1 << 20) for place in places],
                    min_bytes=1,
                    max_bytes=1 << 20,
                    max_wait_ms=60_000,
                )
            )
            turns = 0
            while not fetch.done() and found.service.fetch.waiting_fetches == 0:
                await asyncio.sleep(0)
                turns += 1
                if turns == 1:
                    # Looked at already, and written to before the last of the others is.
                    items = [ProduceItem(places[0], batch(b"between"))]
                    await data_requests.start_produce(found.service, items, acks=0, timeout_ms=1_000)
                    assert data_requests.leading(found.service, places[0]).high_watermark == 1
            assert turns >= count // READS_PER_SLICE
            began_s = loop.time()
            results = await fetch
            assert loop.time() - began_s < 1
            assert values_of(results[0].data) == [b"between"]
            assert len(found.replicas.wakers) == 0

        cluster.on_broker(11, job)
