"""The services behind both APIs: acknowledgements, long polls, offsets, producers, directories."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster, values_of
from test_replicas import BROKERS

from tidelog.metadata.producer_ids import AllocateProducerIdBlock
from tidelog.metadata.topics import AdvanceLogStart
from tidelog.model.errors import (
    ErrorCode,
    FencedLeaderEpochError,
    InvalidRequiredAcksError,
    NotLeaderOrFollowerError,
    OffsetOutOfRangeError,
    OverloadedError,
    PolicyViolationError,
    RemoteError,
    TidelogError,
    UnknownLeaderEpochError,
    UnknownTopicIdError,
)
from tidelog.model.ids import PartitionId, TopicId
from tidelog.replication import log_directories
from tidelog.services.context import INTERNAL
from tidelog.services.data import DataServices
from tidelog.services.fetch import FetchItem
from tidelog.services.limits import RequestLimits
from tidelog.services.offsets import WatchedOffset
from tidelog.services.produce import ProduceItem, ProduceResult


def code(error: TidelogError | None) -> ErrorCode | None:
    return None if error is None else error.code


@pytest.mark.requirement("a:C-07", "a:C-08", "a:U-05")
def test_acks_say_how_far_a_record_is_when_it_is_acknowledged() -> None:
    with orders_cluster(401, b"0") as (cluster, orders):
        log = cluster.log(11, orders)
        assert cluster.produce(11, orders, batch(b"none"), acks=0).base_offset == 1
        assert log.end_offset == 2
        assert log.durable_end < 2, "written, not synced"
        cluster.produce(11, orders, batch(b"leader"), acks=1)
        assert log.durable_end == 3
        cluster.produce(11, orders, batch(b"all"), acks=-1)
        assert cluster.leading(orders).high_watermark == 4
        assert sum(cluster.log(broker, orders).durable_end == 4 for broker in BROKERS) == 3
        with pytest.raises(InvalidRequiredAcksError):
            cluster.produce(11, orders, batch(b"two"), acks=2)


@pytest.mark.requirement("a:C-16", "a:T-30", "b:B-02")
def test_a_broker_that_does_not_lead_says_who_does() -> None:
    with ReplicationCluster(402, brokers=(*BROKERS, 14)) as cluster:
        orders = cluster.topic("orders", BROKERS)
        for broker in (12, 14):
            tail = cluster.brokers[NodeId(broker)].tail
            cluster.until(lambda tail=tail: orders.topic_id in tail.image.topics)  # type: ignore[misc]
            result = cluster.produce(broker, orders, batch(b"x"))
            assert (code(result.error), result.leader) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 11)
            fetched = cluster.fetch(broker, orders)
            assert (code(fetched.error), fetched.leader) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 11)
        unknown = PartitionId(TopicId(UUID(int=5)), 0)
        assert code(cluster.produce(11, unknown, batch(b"x")).error) is ErrorCode.UNKNOWN_TOPIC_ID
        beyond = PartitionId(orders.topic_id, 9)
        assert code(cluster.fetch(11, beyond).error) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(UnknownTopicIdError):
            cluster.on_broker(11, lambda found: data_requests.offset_for_leader_epoch(found.service, unknown, 0))


def test_epochs_of_clients_are_compared() -> None:
    with orders_cluster(403, b"0") as (cluster, orders):
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        epoch = cluster.partition(orders).leader_epoch
        service = cluster.brokers[NodeId(leader)].service
        with pytest.raises(FencedLeaderEpochError):
            data_requests.leading(service, orders, epoch - 1)
        with pytest.raises(UnknownLeaderEpochError):
            data_requests.leading(service, orders, epoch + 1)
        assert data_requests.leading(service, orders, epoch).leader_epoch == epoch
        old = cluster.fetch(leader, orders, 0, leader_epoch=epoch - 1)
        assert code(old.error) is ErrorCode.FENCED_LEADER_EPOCH
        assert (old.leader, old.leader_epoch) == (leader, epoch)
        assert code(cluster.fetch(leader, orders, 0, leader_epoch=epoch + 1).error) is ErrorCode.UNKNOWN_LEADER_EPOCH
        assert code(cluster.fetch(leader, orders, 0, last_epoch=epoch + 5).error) is ErrorCode.UNKNOWN_LEADER_EPOCH


def test_a_duplicate_is_acknowledged_only_when_its_original_is_replicated() -> None:
    with orders_cluster(404, b"warm") as (cluster, orders):
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))
        data = batch(b"once", producer_id=7, producer_epoch=0, base_sequence=0)
        first = cluster.produce(11, orders, data, timeout_ms=300)
        assert code(first.error) is ErrorCode.REQUEST_TIMED_OUT
        again = cluster.produce(11, orders, data, timeout_ms=300)
        assert code(again.error) is ErrorCode.REQUEST_TIMED_OUT, "the original is not replicated either"
        cluster.network.heal()
        last = cluster.produce(11, orders, data, timeout_ms=20_000)
        assert (last.error, last.base_offset) == (None, 1)
        assert cluster.leading(orders).high_watermark == 2
        assert cluster.values(orders) == [b"warm", b"once"]


@pytest.mark.requirement("a:C-09", "a:C-10")
def test_a_fetch_waits_for_enough_bytes_or_for_its_time() -> None:
    with orders_cluster(405, b"0") as (cluster, orders):
        began_s = cluster.now_s()
        empty = cluster.fetch(11, orders, 1, max_wait_ms=700)
        assert empty.data == b""
        assert 0.69 < cluster.now_s() - began_s < 0.8

        async def poll(found: RunningBroker) -> tuple[bytes | memoryview, float]:
            loop = asyncio.get_running_loop()
            waiting = loop.create_task(
                data_requests.fetch(
                    found.service, [FetchItem(orders, 1, 1 << 20)], min_bytes=100, max_bytes=1 << 20, max_wait_ms=10_000
                )
            )
            await asyncio.sleep(0.1)
            small, large = batch(b"x"), batch(b"y" * 200)
            began = loop.time()
            await data_requests.produce(found.service, [ProduceItem(orders, small)], acks=-1, timeout_ms=5000)
            assert not waiting.done(), "not enough yet"
            await data_requests.produce(found.service, [ProduceItem(orders, large)], acks=-1, timeout_ms=5000)
            (result,) = await waiting
            return result.data, loop.time() - began

        data, took_s = cluster.on_broker(11, poll)
        assert values_of(data) == [b"x", b"y" * 200]
        assert took_s < 1
        service = cluster.brokers[NodeId(11)].service
        assert service.fetch.waiting_fetches == 0
        assert len(cluster.brokers[NodeId(11)].replicas.wakers) == 0, "nobody waits"


def test_an_answer_is_bounded_but_has_at_least_one_batch() -> None:
    with ReplicationCluster(406, brokers=BROKERS) as cluster:
        one, two = cluster.topic("one", BROKERS), cluster.topic("two", BROKERS)
        for partition in (one, two):
            for _ in range(3):
                cluster.write(partition, bytes(1000))

        async def fetch(found: RunningBroker, bytes_max: int, each: int) -> list[int]:
            items = [FetchItem(one, 0, each), FetchItem(two, 0, each)]
            results = await data_requests.fetch(found.service, items, min_bytes=1, max_bytes=bytes_max, max_wait_ms=0)
            return [len(values_of(result.data)) for result in results]

        assert cluster.on_broker(11, lambda found: fetch(found, 1, 1)) == [1, 0], "one batch, however small the limit"
        assert cluster.on_broker(11, lambda found: fetch(found, 100_000, 1)) == [1, 1]
        assert cluster.on_broker(11, lambda found: fetch(found, 2500, 100_000)) == [2, 0]
        assert cluster.on_broker(11, lambda found: fetch(found, 100_000, 100_000)) == [3, 3]


@pytest.mark.requirement("a:B-02")
def test_a_follower_serves_readers_of_its_rack_and_the_leader_names_it() -> None:
    with ReplicationCluster(407, brokers=()) as cluster:
        for broker, rack in ((11, "east"), (12, "west"), (13, "north")):
            cluster.start_brokers(broker, rack=rack)
        orders = cluster.topic("orders", BROKERS)
        cluster.write(orders, b"0")
        cluster.until_equal(orders, *BROKERS)
        assert cluster.fetch(11, orders, 0, rack="west").preferred_replica == 12
        assert cluster.fetch(11, orders, 0, rack="east").data, "it is there already"
        assert cluster.fetch(11, orders, 0, rack="moon").data, "nobody is there"
        assert values_of(cluster.fetch(12, orders, 0, rack="west").data) == [b"0"]
        assert code(cluster.fetch(12, orders, 0).error) is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert code(cluster.fetch(12, orders, 5, rack="west").error) is ErrorCode.OFFSET_NOT_AVAILABLE
        # Never past what it knows as committed.
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))
        cluster.produce(11, orders, batch(b"1"), acks=1)
        cluster.until(lambda: cluster.log(12, orders).durable_end == 2)
        assert cluster.fetch(12, orders, 1, rack="west").data == b""


def test_offsets_are_found_by_time() -> None:
    with orders_cluster(408) as (cluster, orders):
        for _ in range(3):
            cluster.write(orders, b"a", b"b")
        epoch = cluster.partition(orders).leader_epoch

        def look(timestamp: int) -> tuple[int, int, int]:
            return cluster.on_broker(11, lambda found: data_requests.list_offsets(found.service, orders, timestamp))

        assert look(-1) == (6, -1, epoch)
        assert look(-2) == (0, -1, epoch)
        assert look(-3) == (1, 1001, epoch)
        assert look(1001) == (1, 1001, epoch)
        assert look(2000) == (-1, -1, -1)

        def end_of(epoch: int) -> tuple[int, int]:
            return cluster.on_broker(
                11, lambda found: data_requests.offset_for_leader_epoch(found.service, orders, epoch)
            )

        assert (end_of(epoch), end_of(epoch + 1)) == ((epoch, 6), (-1, -1))
        size = cluster.log(11, orders).size
        whole = cluster.on_broker(11, lambda found: data_requests.range_bytes(found.service, orders, 0, 100))
        assert whole == size
        assert cluster.on_broker(11, lambda found: data_requests.range_bytes(found.service, orders, 2, 4)) == size // 3


@pytest.mark.requirement("a:G-01")
def test_deleted_records_are_gone_from_every_replica_and_stay_gone() -> None:
    with orders_cluster(409) as (cluster, orders):
        cluster.write_numbers(orders, 6)
        with pytest.raises(OffsetOutOfRangeError):
            cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 7))
        assert cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 3)) == 3
        cluster.until(lambda: all(cluster.log(b, orders).start_offset == 3 for b in BROKERS))
        early = cluster.fetch(11, orders, 2)
        assert (code(early.error), early.start_offset) == (ErrorCode.OFFSET_OUT_OF_RANGE, 3)
        cluster.kill(NodeId(11))
        cluster.leader(orders)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == [b"3", b"4", b"5"]
        leader = cluster.leader(orders)
        assert cluster.on_broker(leader, lambda found: data_requests.delete_records(found.service, orders, -1)) == 6


@pytest.mark.parametrize(("policy", "may_delete"), [("compact", False), ("compact,delete", True)])
def test_records_of_a_topic_that_is_only_compacted_are_not_deleted_on_request(policy: str, may_delete: bool) -> None:
    with ReplicationCluster(415, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"cleanup.policy": policy})
        cluster.write(orders, b"a")
        if may_delete:
            assert cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 1)) == 1
            return
        with pytest.raises(PolicyViolationError, match="policy=compact"):
            cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 1))
        assert cluster.log(11, orders).start_offset == 0


def test_high_watermarks_of_many_partitions_are_watched_at_once() -> None:
    with ReplicationCluster(410, brokers=BROKERS) as cluster:
        one, two = cluster.topic("one", BROKERS), cluster.topic("two", BROKERS)

        async def watch(found: RunningBroker) -> list[list[WatchedOffset]]:
            _, changes = await found.service.offsets.watch(INTERNAL, [one, two])
            seen = [await anext(changes)]
            for _ in range(3):
                await data_requests.produce(found.service, [ProduceItem(two, batch(b"x"))], acks=-1, timeout_ms=5000)
            seen.append(await anext(changes))
            changes.close()
            return seen

        first, after = cluster.on_broker(11, watch)
        assert {change.partition: change for change in first} == {at: WatchedOffset(at, 0, 0) for at in (one, two)}
        assert after == [WatchedOffset(two, 3, 3)], "several changes are reported as one"
        assert len(cluster.brokers[NodeId(11)].replicas.wakers) == 0


def test_a_leader_that_knows_of_a_newer_epoch_takes_no_records() -> None:
    with orders_cluster(418, b"0") as (cluster, orders):
        leader = cluster.leading(orders)
        newer = leader.replica.partition._replace(leader_epoch=leader.leader_epoch + 1)
        assert not leader.state.metadata_changed(newer, min_isr=2, now_ms=0)
        for acks in (0, 1, -1):
            result = cluster.produce(11, orders, batch(b"1"), acks=acks)
            assert code(result.error) is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert leader.log.end_offset == 1
        assert cluster.fetch(11, orders, 0).error is None, "what is committed is read"


def test_producer_ids_are_given_once() -> None:
    with ReplicationCluster(411, brokers=BROKERS) as cluster:

        async def ids(service: DataServices) -> list[tuple[int, int]]:
            return list(await asyncio.gather(*(data_requests.init_producer_id(service) for _ in range(700))))

        given = [
            one for broker in (*BROKERS, 11) for one in cluster.on_broker(broker, lambda found: ids(found.service))
        ]
        assert len({producer for producer, _ in given}) == len(given) == 2800
        assert {epoch for _, epoch in given} == {0}


def test_a_producer_id_is_given_as_soon_as_a_broker_that_starts_is_registered() -> None:
    with ReplicationCluster(416, brokers=()) as cluster:
        cluster.start_brokers(11, wait=False)
        assert cluster.brokers[NodeId(11)].agent.broker_epoch is None
        producer_id, _ = cluster.on_broker(11, lambda found: data_requests.init_producer_id(found.service))
        assert producer_id >= 0


@pytest.mark.parametrize("code", [ErrorCode.STALE_BROKER_EPOCH, ErrorCode.BROKER_ID_NOT_REGISTERED], ids=str)
def test_a_broker_that_has_to_register_again_fails_no_request_for_good(code: ErrorCode) -> None:
    with ReplicationCluster(417, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", (11,))
        cluster.write(orders, b"0")

        async def rejected(found: RunningBroker) -> tuple[int, int]:
            client, answers = found.agent.client, [RemoteError("register", code=code)] * 2
            call = client.call

            async def call_or_reject(request: object, *, is_repeatable: bool = False) -> Any:
                if answers and isinstance(request, AdvanceLogStart | AllocateProducerIdBlock):
                    raise answers.pop()
                return await call(request, is_repeatable=is_repeatable)

            client.call = call_or_reject  # type: ignore[method-assign]
            with pytest.raises(NotLeaderOrFollowerError):
                await data_requests.delete_records(found.service, orders, 1)
            return await data_requests.init_producer_id(found.service)

        assert cluster.on_broker(11, rejected)[0] >= 0


def test_too_many_bytes_that_wait_are_refused_and_nothing_is_written() -> None:
    with orders_cluster(412, b"0") as (cluster, orders):
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))

        async def flood(found: RunningBroker) -> list[ProduceResult | BaseException]:
            service = DataServices(found.replicas, RequestLimits(request_bytes_max=5_000))
            items = [ProduceItem(orders, batch(bytes(2000)))]
            requests = [data_requests.produce(service, items, acks=-1, timeout_ms=500) for _ in range(4)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert service.produce.queued_bytes == 0
            return [result if isinstance(result, BaseException) else result[0] for result in results]

        results = cluster.on_broker(11, flood)
        assert [isinstance(result, OverloadedError) for result in results] == [False, False, True, True]
        assert cluster.log(11, orders).end_offset == 3


def test_a_request_is_appended_when_it_starts_and_leaves_nothing_behind_when_it_is_given_up() -> None:
    with orders_cluster(414, b"0") as (cluster, orders):
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))

        async def produce(found: RunningBroker) -> None:
            loop, service = asyncio.get_running_loop(), found.service
            acks = data_requests.leading(service, orders).acks
            items = [ProduceItem(orders, batch(bytes(1000)))]
            given_up, late, soon = [
                await data_requests.start_produce(service, items, acks=-1, timeout_ms=timeout_ms)
                for timeout_ms in (9_000, 400, 300)
            ]
            assert data_requests.leading(service, orders).log.end_offset == 4, "appended before anybody waits"
            assert (len(acks), service.produce.queued_bytes) == (3, 3 * len(items[0].batches))
            given_up.abandon()
            given_up.abandon()
            assert (len(acks), service.produce.queued_bytes) == (2, 2 * len(items[0].batches))
            began_s = loop.time()
            for waiting in (late, soon):
                (result,) = await waiting.finish()
                assert code(result.error) is ErrorCode.REQUEST_TIMED_OUT
            assert 0.39 < loop.time() - began_s < 0.45, "the time of both counts from their start"
            assert (len(acks), service.produce.queued_bytes) == (0, 0)

        cluster.on_broker(11, produce)


@pytest.mark.requirement("a:T-13")
def test_batches_that_a_topic_does_not_take_are_refused_one_by_one() -> None:
    with ReplicationCluster(413, brokers=BROKERS) as cluster:
        names = ("good", "large", "broken", "good-too")
        topics = [cluster.topic(name, BROKERS, configs={"max.message.bytes": "1000"}) for name in names]
        broken = bytearray(batch(b"x"))
        broken[-1] ^= 1

        async def produce(found: RunningBroker) -> list[ProduceResult]:
            batches = (batch(b"good"), batch(bytes(5000)), bytes(broken), batch(b"good too"), batch(b"again"))
            items = [ProduceItem(*pair) for pair in zip([*topics, topics[0]], batches, strict=True)]
            return await data_requests.produce(found.service, items, acks=-1, timeout_ms=5000)

        results = cluster.on_broker(11, produce)
        assert [code(result.error) for result in results] == [
            None,
            ErrorCode.MESSAGE_TOO_LARGE,
            ErrorCode.CORRUPT_MESSAGE,
            None,
            ErrorCode.INVALID_REQUEST,  # names the partition twice
        ]
        assert [cluster.values(topic) for topic in topics] == [[b"good"], [], [], [b"good too"]]


def test_directories_of_many_replicas_are_reported_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_directories, "REPLICAS_PER_SLICE", 5)
    with ReplicationCluster(415, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", partitions=23, factor=1)
        replicas = cluster.brokers[NodeId(11)].replicas
        cluster.until(lambda: len(replicas.leaders()) == 23)

        async def describe(broker: RunningBroker) -> None:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.ensure_future(count())
            (found,) = await broker.service.log_directories.describe()
            counting.cancel()
            assert [(one.topic_id, one.partition) for one in found.replicas] == [
                (orders.topic_id, number) for number in range(23)
            ]
            assert turns == 4, "the others had their turn after each five"

        cluster.on_broker(11, describe)


def test_directories_tell_what_they_hold() -> None:
    with orders_cluster(414, b"0", directories=2) as (cluster, orders):
        described = cluster.on_broker(12, lambda broker: broker.service.log_directories.describe())
        assert len(described) == 2
        sizes = {(row.topic, row.partition): row.size for directory in described for row in directory.replicas}
        assert sizes == {("orders", 0): cluster.log(12, orders).size}
        assert all(directory.error is None and directory.usable_bytes > 0 for directory in described)
