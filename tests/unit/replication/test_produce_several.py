"""Several batches in one item of a produce, and many items in one request: what the one answer stands for."""

import asyncio

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster
from test_client_requests import code
from test_replicas import BROKERS

from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId
from tidelog.services.produce import APPENDS_PER_SLICE, ProduceItem


def numbered(value: bytes, producer: int, sequence: int = 0) -> bytes:
    return batch(value, producer_id=producer, producer_epoch=0, base_sequence=sequence)


@pytest.mark.parametrize("is_fresh_first", [True, False])
def test_what_is_new_beside_a_duplicate_is_not_acknowledged_before_it_is_replicated(is_fresh_first: bool) -> None:
    with orders_cluster(431) as (cluster, orders):
        repeated, fresh = numbered(b"repeated", 7), numbered(b"fresh", 8)
        assert cluster.produce(11, orders, repeated).error is None
        cluster.write(orders, b"between")
        cluster.until_equal(orders, *BROKERS)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        both = fresh + repeated if is_fresh_first else repeated + fresh
        result = cluster.produce(11, orders, both, timeout_ms=1_000)
        assert code(result.error) is ErrorCode.REQUEST_TIMED_OUT
        cluster.network.heal()
        again = cluster.produce(11, orders, both, timeout_ms=20_000)
        assert again.error is None
        assert again.base_offset == -1, "at 0 and at 2: no offset stands for both"
        cluster.kill(NodeId(11))
        cluster.leader(orders)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == [b"repeated", b"between", b"fresh"]


def test_duplicates_are_acknowledged_when_the_highest_of_them_is_replicated() -> None:
    with orders_cluster(432) as (cluster, orders):
        early, late = numbered(b"early", 7), numbered(b"late", 8)
        assert cluster.produce(11, orders, early).error is None
        cluster.until_equal(orders, *BROKERS)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        for data in (late, late + early):
            result = cluster.produce(11, orders, data, timeout_ms=500)
            assert code(result.error) is ErrorCode.REQUEST_TIMED_OUT
        cluster.network.heal()
        assert cluster.produce(11, orders, early + late, timeout_ms=20_000).base_offset == 0, "one behind the other"


@pytest.mark.parametrize("acks", [-1, 0, 1])
def test_a_duplicate_of_unknown_offset_among_several_has_all_of_them_refused(acks: int) -> None:
    with orders_cluster(433) as (cluster, orders):
        for sequence in range(8):
            assert cluster.produce(11, orders, numbered(b"%d" % sequence, 7, sequence)).error is None
        old, fresh = numbered(b"0", 7), numbered(b"fresh", 8)
        for several in (fresh + old, old + fresh, batch(b"without producer") + old):
            result = cluster.produce(11, orders, several, acks=acks)
            assert code(result.error) is ErrorCode.INVALID_RECORD, "a client would take the other for a success"
        assert cluster.values(orders) == [b"%d" % sequence for sequence in range(8)], "nothing of it is stored"
        alone = cluster.produce(11, orders, old, acks=acks)
        assert code(alone.error) is ErrorCode.DUPLICATE_SEQUENCE_NUMBER
        assert cluster.produce(11, orders, fresh, acks=acks).base_offset == 8


def test_an_old_duplicate_with_acks_1_is_acknowledged_when_the_original_is_synced() -> None:
    with orders_cluster(434) as (cluster, orders):
        log = cluster.log(11, orders)

        async def job(found: RunningBroker) -> None:
            for sequence in range(8):
                items = [ProduceItem(orders, numbered(b"%d" % sequence, 7, sequence))]
                await data_requests.produce(found.service, items, acks=0, timeout_ms=1_000)
            assert log.durable_end < 3, "written, not synced"
            items = [ProduceItem(orders, numbered(b"0", 7))]
            (result,) = await data_requests.produce(found.service, items, acks=1, timeout_ms=5_000)
            assert code(result.error) is ErrorCode.DUPLICATE_SEQUENCE_NUMBER
            assert log.durable_end >= 3

        cluster.on_broker(11, job)


def test_a_request_of_many_partitions_lets_others_have_their_turn() -> None:
    count = 3 * APPENDS_PER_SLICE
    with ReplicationCluster(435, brokers=(11,)) as cluster:
        many = cluster.topic("many", partitions=count, factor=1)
        places = [PartitionId(many.topic_id, number) for number in range(count)]

        async def job(found: RunningBroker) -> list[int]:
            def written() -> int:
                return sum(cluster.log(11, place).end_offset for place in places)

            seen: list[int] = []

            async def look() -> None:
                while written() < count:
                    seen.append(written())
                    await asyncio.sleep(0)

            other = asyncio.get_running_loop().create_task(look())
            items = [ProduceItem(place, batch(b"v")) for place in places]
            started = await data_requests.start_produce(found.service, items, acks=-1, timeout_ms=5_000)
            assert written() == count, "appended when it returns"
            assert [result.error for result in await started.finish()] == [None] * count
            await other
            assert found.service.produce.queued_bytes == 0
            return seen

        steps = cluster.on_broker(11, job)
        assert {APPENDS_PER_SLICE, 2 * APPENDS_PER_SLICE} <= set(steps)


def test_a_request_that_is_given_up_between_two_turns_leaves_nothing_behind() -> None:
    count = 2 * APPENDS_PER_SLICE
    with ReplicationCluster(436, brokers=(11,)) as cluster:
        many = cluster.topic("many", partitions=count, factor=1)
        places = [PartitionId(many.topic_id, number) for number in range(count)]

        async def job(found: RunningBroker) -> None:
            items = [ProduceItem(place, batch(b"v")) for place in places]
            running = asyncio.get_running_loop().create_task(
                data_requests.produce(found.service, items, acks=-1, timeout_ms=60_000)
            )
            await asyncio.sleep(0)
            assert cluster.log(11, places[0]).end_offset == 1, "the first turn is over"
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert found.service.produce.queued_bytes == 0
            assert sum(len(data_requests.leading(found.service, place).acks) for place in places) == 0

        cluster.on_broker(11, job)
        assert [cluster.log(11, place).end_offset for place in (places[0], places[-1])] == [1, 0]
