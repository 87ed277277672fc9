"""What the sources say of replicas and of those who read them: order, sizes, limits, waiting, coming back later."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster, values_of
from support.brokers.fault_runs import contents_of
from test_replicas import BROKERS

from tidelog.log.batch_header import Codec
from tidelog.metadata.topics import CreateTopics, NewTopic
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId
from tidelog.services.fetch import FetchItem
from tidelog.services.produce import ProduceItem
from tidelog.world.simulated import Loss


@pytest.mark.requirement("a:B-03", "b:C-03", "b:C-05")
def test_followers_take_the_log_in_order_and_the_leader_knows_how_far_each_has_come() -> None:
    with orders_cluster(821, b"0") as (cluster, orders):
        seen: dict[int, list[int]] = {12: [], 13: []}

        def is_done() -> bool:
            whole = cluster.on_broker(11, lambda found: contents_of(found, orders))
            for broker, ends in seen.items():
                part = cluster.on_broker(broker, lambda found: contents_of(found, orders))
                assert whole.startswith(part), "a follower has a beginning of the leader's log, without a hole"
                known = cluster.leading(orders).state.progress(broker)
                assert known is not None
                ends.append(known.durable_end or 0)
                assert ends[-1] <= cluster.log(broker, orders).durable_end, "never more than it has"
            return all(ends[-1] == 31 for ends in seen.values())

        for number in range(1, 31):
            items = [ProduceItem(orders, batch(b"%d" % number + bytes(40_000)))]
            found = cluster.brokers[NodeId(11)]
            found.node.spawn(data_requests.produce(found.service, items, acks=1, timeout_ms=5000))
            if number == 15:
                cluster.network.cut_streams(NodeId(12), NodeId(11))
        for _ in range(500):
            if is_done():
                break
            cluster.world.run_for(0.01)
        for broker, ends in seen.items():
            assert ends == sorted(ends), f"what is known of broker {broker} only grows"
            assert ends[-1] == 31


@pytest.mark.requirement("a:B-16", "b:C-01")
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_topic_has_as_many_copies_as_was_asked_each_on_a_broker_of_its_own(factor: int) -> None:
    with ReplicationCluster(822, brokers=BROKERS) as cluster:
        first = cluster.topic("orders", partitions=4, factor=factor)
        for number in range(4):
            partition = PartitionId(first.topic_id, number)
            cluster.write(partition, bytes(10_000))
            replicas = cluster.partition(partition).replicas
            assert len(set(replicas)) == len(replicas) == factor
            cluster.until_equal(partition, *replicas)
            holders = [broker for broker in BROKERS if partition in cluster.brokers[NodeId(broker)].logs.known()]
            assert sorted(holders) == sorted(replicas)
            assert len({cluster.log(broker, partition).size for broker in replicas}) == 1, "each costs the same room"
        too_many = NewTopic(name="more", partitions=1, replication_factor=4, assignment=(), configs=())
        (refused,) = cluster.ask(CreateTopics(topics=(too_many,))).topics
        assert refused.error is ErrorCode.INVALID_REPLICATION_FACTOR


@pytest.mark.requirement("b:B-41")
def test_no_limit_of_a_reader_or_of_a_follower_is_too_small_for_the_largest_batch() -> None:
    with ReplicationCluster(823, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"max.message.bytes": str(4 << 20)})
        large = batch(Random(1).randbytes(3 << 20))
        assert len(large) > cluster.replica_config.fetch_message_bytes, "more than goes into one message of a stream"
        for data in (batch(b"small"), large, batch(b"small too")):
            assert cluster.produce(11, orders, data).error is None
        cluster.until_equal(orders, *BROKERS)
        offset, sizes = 0, []
        while offset < 3:
            found = cluster.fetch(11, orders, offset, bytes_max=1)
            assert found.error is None
            sizes.append(len(found.data))
            offset += 1
        assert sizes == [len(batch(b"small")), len(large), len(batch(b"small too"))]


@pytest.mark.requirement("a:X3-48", "b:D-19")
def test_a_batch_over_the_limit_is_refused_for_good_and_its_compressed_size_counts() -> None:
    with ReplicationCluster(824, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"max.message.bytes": "2000"})
        value = bytes(50_000)
        before_s = cluster.now_s()
        refused = cluster.produce(11, orders, batch(value)).error
        assert refused is not None
        assert refused.code is ErrorCode.MESSAGE_TOO_LARGE
        assert not refused.retriable
        assert cluster.now_s() - before_s < 0.1, "at once"
        assert cluster.log(11, orders).end_offset == 0
        assert cluster.produce(11, orders, batch(value, codec=Codec.GZIP)).error is None
        assert cluster.values(orders) == [value]


@pytest.mark.requirement("a:X3-50")
def test_a_fetch_of_a_megabyte_or_a_hundred_milliseconds_ends_with_whichever_comes_first() -> None:
    with ReplicationCluster(825, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS)
        cluster.write(orders, b"little")

        async def fetch(found: RunningBroker, offset: int) -> tuple[int, float]:
            began_s = asyncio.get_running_loop().time()
            items = [FetchItem(orders, offset, 4 << 20)]
            (result,) = await data_requests.fetch(
                found.service, items, min_bytes=1 << 20, max_bytes=4 << 20, max_wait_ms=100
            )
            assert result.error is None
            return len(result.data), asyncio.get_running_loop().time() - began_s

        size, took_s = cluster.on_broker(11, lambda found: fetch(found, 0))
        assert size == len(batch(b"little")), "what there is"
        assert 0.099 < took_s < 0.15, "after its time"

        async def filled(found: RunningBroker) -> tuple[int, float]:
            waiting = asyncio.get_running_loop().create_task(fetch(found, 1))
            await asyncio.sleep(0.02)
            await data_requests.produce(
                found.service,
                [ProduceItem(orders, batch(bytes(600_000)) * 2)],
                acks=-1,
                timeout_ms=5000,
            )
            return await waiting

        size, took_s = cluster.on_broker(11, filled)
        assert size > 1 << 20
        assert 0.02 <= took_s < 0.099, "before its time"


def test_a_partition_that_gives_all_it_may_counts_as_full_though_its_batches_do_not_fill_it() -> None:
    """Else who asks for as much as a partition may give would wait out its time at each fetch of a backlog."""
    with ReplicationCluster(827, brokers=BROKERS) as cluster:
        orders, others = cluster.topic("orders", BROKERS), cluster.topic("others", BROKERS)
        for _ in range(2):
            assert cluster.produce(11, orders, batch(bytes(600_000))).error is None
        cluster.write(others, b"little")

        async def fetch(found: RunningBroker, *items: FetchItem, min_bytes: int) -> tuple[list[int], float]:
            began_s = asyncio.get_running_loop().time()
            results = await data_requests.fetch(
                found.service, items, min_bytes=min_bytes, max_bytes=8 << 20, max_wait_ms=5_000
            )
            return [len(one.data) for one in results], asyncio.get_running_loop().time() - began_s

        one, two = FetchItem(orders, 0, 1 << 20), FetchItem(others, 0, 1 << 20)
        sizes, took_s = cluster.on_broker(11, lambda found: fetch(found, one, min_bytes=1 << 20))
        assert sizes == [len(batch(bytes(600_000)))], "the second batch would be too much"
        assert took_s < 1
        sizes, took_s = cluster.on_broker(11, lambda found: fetch(found, one, two, min_bytes=(1 << 20) + 10))
        assert sizes == [len(batch(bytes(600_000))), len(batch(b"little"))]
        assert took_s < 1
        _, took_s = cluster.on_broker(11, lambda found: fetch(found, one, two, min_bytes=2 << 20))
        assert took_s > 4.9, "the other one may still fill up"


@pytest.mark.requirement("a:A-16", "b:A-16", "b:A-02")
def test_a_reader_that_comes_back_later_finds_everything_where_it_left_off() -> None:
    with ReplicationCluster(826, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"segment.bytes": "1048576"})
        written = [b"%d " % number + bytes(200_000) for number in range(20)]
        for value in written[:5]:
            cluster.write(orders, value)
        first = values_of(cluster.fetch(11, orders, 0, bytes_max=300_000).data)
        assert first == written[: len(first)]
        # It is away for a while, in which much is written and everything is switched off once.
        for value in written[5:]:
            cluster.write(orders, value)
        assert len(cluster.log(11, orders).segments.sealed) >= 2
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        cluster.world.run_for(60)
        cluster.start_brokers(*BROKERS)
        cluster.until_in_sync(orders, *BROKERS)
        leader, offset, rest = cluster.leader(orders), len(first), []
        while offset < len(written):
            rest += values_of(cluster.fetch(leader, orders, offset).data, start=offset)
            offset = len(first) + len(rest)
        assert first + rest == written
        # And back to any place, as often as it likes: the same records, in the same order.
        assert cluster.values(orders) == cluster.values(orders) == written
        assert values_of(cluster.fetch(leader, orders, 7).data, start=7)[0] == written[7]


@pytest.mark.requirement("b:A-17")
def test_a_reader_that_lags_behind_costs_the_broker_nothing_and_holds_up_nobody() -> None:
    with orders_cluster(827) as (cluster, orders):
        service = cluster.brokers[NodeId(11)].service
        position = {"slow": 0, "fast": 0}
        for number in range(50):
            cluster.write(orders, b"%d" % number)
            for name, every in (("fast", 1), ("slow", 10)):
                if number % every == 0:
                    found = cluster.fetch(11, orders, position[name], bytes_max=1)
                    assert values_of(found.data) == [b"%d" % position[name]]
                    position[name] += 1
            assert position["fast"] == number + 1, "it keeps up, whatever the other one does"
        assert position["slow"] == 5
        assert (service.fetch.waiting_fetches, len(cluster.brokers[NodeId(11)].replicas.wakers)) == (0, 0), (
            "nothing is kept"
        )
        assert values_of(cluster.fetch(11, orders, position["slow"], bytes_max=1).data) == [b"5"]
