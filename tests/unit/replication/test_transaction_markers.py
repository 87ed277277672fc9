"""Markers of transactions at the leaders of partitions: errors, repeats, replication, restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster, values_of
from support.brokers.transactions import ScriptedCoordinator, marker_of, transactional
from test_transactional_produce import connect, produce, transactional_cluster

from tidelog.log.batch import read_header
from tidelog.log.log import Log
from tidelog.log.transactions import AbortedTransaction
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.group_errors import CoordinatorLoadingError
from tidelog.model.ids import PartitionId
from tidelog.replication import marker_receiver
from tidelog.replication.leader_replica import LeaderReplica
from tidelog.replication.marker_receiver import LeaderMarkers
from tidelog.replication.transaction_messages import MarkedPartition, Marker, WriteMarkers
from tidelog.services.fetch import READ_COMMITTED, FetchItem, FetchResult


def receiver(found: RunningBroker) -> LeaderMarkers:
    return LeaderMarkers(found.replicas.get, lambda: found.replicas.image)


def write(cluster: ReplicationCluster, broker: int, *markers: Marker) -> list[ErrorCode | None]:
    async def job(found: RunningBroker) -> list[ErrorCode | None]:
        written = await receiver(found).write_markers(WriteMarkers(markers=markers))
        assert [len(errors) for errors in written.errors] == [len(marker.partitions) for marker in markers]
        return [error for errors in written.errors for error in errors]

    return cluster.on_broker(broker, job)


def committed(cluster: ReplicationCluster, orders: PartitionId) -> tuple[list[bytes], list[tuple[int, int]], int]:
    """(values, aborted, last stable offset) of a reader of committed data."""

    async def job(found: RunningBroker) -> tuple[list[bytes], list[tuple[int, int]], int]:
        (result,) = await data_requests.fetch(
            found.service, [FetchItem(orders, 0)], max_bytes=1 << 20, isolation=READ_COMMITTED
        )
        assert result.error is None

        return values_of(result.data), list(result.aborted), result.last_stable

    return cluster.on_broker(cluster.leader(orders), job)


@pytest.mark.requirement("a:H-34")
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_marker_is_replicated_before_it_is_answered_and_a_repeat_changes_nothing(is_commit: bool) -> None:
    with transactional_cluster(731) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        assert committed(cluster, orders) == ([], [], 0), "open"
        leader = cluster.leading(orders)
        marker = marker_of(leader, 7, 4, is_commit=is_commit)
        assert write(cluster, 11, marker) == [None]
        assert leader.high_watermark == leader.log.end_offset == 2
        assert write(cluster, 11, marker) == [None]
        assert leader.log.end_offset == 2
        assert committed(cluster, orders) == ([b"a"], [] if is_commit else [(7, 0)], 2)
        cluster.until_equal(orders, 11, 12, 13)


def test_a_marker_waits_for_replicas_and_is_answered_by_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_receiver, "WAIT_S", 0.2)
    with transactional_cluster(732) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        leader = cluster.leading(orders)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        marker = marker_of(leader, 7, 4)
        for _ in range(2):
            assert write(cluster, 11, marker) == [ErrorCode.REQUEST_TIMED_OUT]
            assert leader.log.end_offset == 2, "appended once"
            assert len(leader.acks) == 0, "nothing is left behind"
        assert leader.log.last_stable_offset(leader.high_watermark) == 0
        cluster.network.heal()
        cluster.until(lambda: leader.high_watermark == 2)
        assert write(cluster, 11, marker) == [None]


def test_a_marker_is_appended_with_too_few_replicas_in_sync_and_over_every_limit_of_its_topic() -> None:
    with ReplicationCluster(733, brokers=(11, 12)) as cluster:
        configs = {"min.insync.replicas": "2", "max.message.bytes": "70", "segment.bytes": "1048576"}
        orders = cluster.topic("orders", (11, 12), configs=configs)
        cluster.kill(NodeId(12))
        cluster.until(lambda: cluster.partition(orders).isr == (11,))
        leader = cluster.leading(orders)
        assert write(cluster, 11, marker_of(leader, 7, 4)) == [ErrorCode.REQUEST_TIMED_OUT]
        assert leader.log.end_offset == 1
        cluster.start_brokers(12)
        cluster.until(lambda: leader.high_watermark == 1)
        assert write(cluster, 11, marker_of(leader, 7, 4)) == [None]


@pytest.mark.case("C1")
def test_a_marker_for_a_producer_that_wrote_nothing_fences_it_after_a_restart_too() -> None:
    with ReplicationCluster(734, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", (11,))
        assert write(cluster, 11, marker_of(cluster.leading(orders), 7, 4)) == [None]
        assert cluster.leading(orders).log.last_stable_offset(cluster.leading(orders).high_watermark) == 1
        cluster.kill(NodeId(11))
        cluster.start_brokers(11)
        coordinator = ScriptedCoordinator()
        coordinator.begin("app", producer_id=7, epoch=3)
        connect(cluster.brokers[NodeId(11)], coordinator)
        result = produce(cluster, orders, transactional(b"late", 7, 3))
        assert result.error is not None
        assert result.error.code is ErrorCode.INVALID_PRODUCER_EPOCH
        assert coordinator.requests == []


def test_a_marker_of_another_leader_epoch_or_partition_gets_its_error() -> None:
    with orders_cluster(735) as (cluster, orders):
        leader = cluster.leading(orders)
        now = marker_of(leader, 7, 4)
        follower = next(broker for broker in (11, 12, 13) if broker != cluster.leader(orders))

        def of(partition: MarkedPartition) -> Marker:
            return replace(now, partitions=(partition,))

        (mine,) = now.partitions
        markers = (
            of(replace(mine, leader_epoch=leader.leader_epoch - 1)),
            of(replace(mine, leader_epoch=leader.leader_epoch + 1)),
            of(replace(mine, partition=9)),
            of(replace(mine, topic_id=UUID(int=5))),
        )
        assert write(cluster, cluster.leader(orders), *markers) == [
            ErrorCode.FENCED_LEADER_EPOCH,
            ErrorCode.UNKNOWN_LEADER_EPOCH,
            ErrorCode.NOT_LEADER_OR_FOLLOWER,
            ErrorCode.UNKNOWN_TOPIC_ID,
        ]
        assert write(cluster, follower, now) == [ErrorCode.NOT_LEADER_OR_FOLLOWER]
        assert leader.log.end_offset == 0


def test_one_request_has_an_outcome_for_each_marker_and_partition() -> None:
    with ReplicationCluster(736, brokers=(11,)) as cluster:
        many = cluster.topic("many", partitions=3, factor=1)
        places = [PartitionId(many.topic_id, number) for number in range(3)]
        leaders = [cluster.leading(place) for place in places]
        both = replace(
            marker_of(leaders[0], 7, 4), partitions=tuple(marker_of(each, 7, 4).partitions[0] for each in leaders)
        )
        fenced = marker_of(leaders[0], 7, 5, coordinator_epoch=-1)
        late = replace(both, partitions=(replace(both.partitions[1], leader_epoch=-5),))
        assert write(cluster, 11, both, fenced, late) == [
            *(None, None, None),
            ErrorCode.TRANSACTION_COORDINATOR_FENCED,
            ErrorCode.FENCED_LEADER_EPOCH,
        ]
        assert [leader.log.end_offset for leader in leaders] == [1, 1, 1]


@pytest.mark.case("C1")
def test_a_late_marker_leaves_the_next_transaction_open() -> None:
    with transactional_cluster(737) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        first = marker_of(cluster.leading(orders), 7, 4)
        assert write(cluster, 11, first) == [None]
        coordinator.begin("app", producer_id=7, epoch=4, number=2)
        assert produce(cluster, orders, transactional(b"b", 7, 4)).error is None
        assert write(cluster, 11, first) == [ErrorCode.INVALID_PRODUCER_EPOCH]
        assert cluster.leading(orders).log.producers.open_offset(7) == 2


def test_markers_of_group_offsets_go_to_their_shard() -> None:
    calls: list[int] = []

    class Groups:
        error: TidelogError | None = None

        async def write_marker(self, leader: LeaderReplica, marker: Marker) -> None:
            calls.append(leader.replica.partition_id.partition)
            await asyncio.sleep(0.01)
            if self.error is not None:
                raise self.error

    with ReplicationCluster(738, brokers=(11,)) as cluster:
        offsets = cluster.topic("__consumer_offsets", factor=1)
        leader = cluster.leading(offsets)
        groups = Groups()

        def ask(hook: Groups | None) -> ErrorCode | None:
            async def job(found: RunningBroker) -> ErrorCode | None:
                markers = LeaderMarkers(found.replicas.get, lambda: found.replicas.image, hook)
                written = await markers.write_markers(WriteMarkers(markers=(marker_of(leader, 7, 4),)))
                return written.errors[0][0]

            return cluster.on_broker(11, job)

        before = leader.log.end_offset
        assert ask(groups) is None
        assert calls == [0]
        groups.error = CoordinatorLoadingError("loading")
        assert ask(groups) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        assert ask(None) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert leader.log.end_offset == before, "it has no control batches"


@pytest.mark.parametrize("is_late", [False, True])
def test_group_marker_that_fails_after_its_caller_is_cancelled_is_no_unhandled_error(is_late: bool) -> None:
    """As in a stop of the broker: the shards end while the calls of coordinators are cancelled. The simulated world
    reports errors that nobody retrieves."""

    class Groups:
        def __init__(self) -> None:
            self.leads_no_more = asyncio.Event()

        async def write_marker(self, leader: LeaderReplica, marker: Marker) -> None:
            try:
                await self.leads_no_more.wait()
            except asyncio.CancelledError:
                if not is_late:
                    raise
            raise CoordinatorLoadingError("leadership was lost")

    with ReplicationCluster(743, brokers=(11,)) as cluster:
        leader = cluster.leading(cluster.topic("__consumer_offsets", factor=1))

        async def job(found: RunningBroker) -> None:
            groups = Groups()
            markers = LeaderMarkers(found.replicas.get, lambda: found.replicas.image, groups)
            task = asyncio.ensure_future(markers.write_markers(WriteMarkers(markers=(marker_of(leader, 7, 4),))))
            await asyncio.sleep(0.01)
            if not is_late:
                groups.leads_no_more.set()
                await asyncio.sleep(0)  # the marker has failed, and nobody has looked
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(0.01)

        cluster.on_broker(11, job)


def test_another_internal_topic_takes_no_marker() -> None:
    with ReplicationCluster(739, brokers=(11,)) as cluster:
        state = cluster.topic("__transaction_state", factor=1)
        assert write(cluster, 11, marker_of(cluster.leading(state), 7, 4)) == [ErrorCode.INVALID_TOPIC]


def test_a_leader_that_moves_its_log_takes_no_marker() -> None:
    with orders_cluster(740) as (cluster, orders):
        leader = cluster.leading(orders)
        leader.is_paused = True
        assert write(cluster, 11, marker_of(leader, 7, 4)) == [ErrorCode.LEADER_NOT_AVAILABLE]
        leader.is_paused = False
        assert write(cluster, 11, marker_of(leader, 7, 4)) == [None]


def test_a_marker_whose_leader_epoch_ends_while_it_waits_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_receiver, "WAIT_S", 60.0)
    with transactional_cluster(741) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        leader = cluster.leading(orders)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))

        async def job(found: RunningBroker) -> ErrorCode | None:
            async with asyncio.TaskGroup() as group:
                request = WriteMarkers(markers=(marker_of(leader, 7, 4),))
                task = group.create_task(receiver(found).write_markers(request))
                await asyncio.sleep(1)  # virtual time: it waits for the replicas
                assert len(leader.acks) == 1
                leader.replica.end_role()
            return task.result().errors[0][0]

        assert cluster.on_broker(11, job) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_markers_of_the_new_leader_end_what_the_former_one_left_open() -> None:
    with transactional_cluster(742) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"a", 7, 3)).error is None
        cluster.until_whole(orders)
        former = cluster.leading(orders)
        stale = marker_of(former, 7, 4, is_commit=False)
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert write(cluster, leader, stale) == [ErrorCode.FENCED_LEADER_EPOCH]
        assert write(cluster, leader, marker_of(cluster.leading(orders), 7, 4)) == [None]
        assert committed(cluster, orders)[0] == [b"a"]


def test_plain_batches_and_their_markers_differ_by_their_headers() -> None:
    with orders_cluster(743) as (cluster, orders):
        leader = cluster.leading(orders)
        cluster.write(orders, b"before")
        assert write(cluster, 11, marker_of(leader, 7, 4, is_commit=False)) == [None]

        async def job(_: RunningBroker) -> bytes:
            return bytes((await leader.log.read(1, bytes_max=1 << 20)).data)

        header = read_header(cluster.on_broker(11, job))
        assert (header.is_control, header.is_transactional, header.producer_id, header.producer_epoch) == (
            *(True, True, 7),
            4,
        )
        assert cluster.produce(11, orders, batch(b"after")).base_offset == 2
        assert cluster.values(orders) == [b"before", b"after"]
        assert committed(cluster, orders)[1:] == ([], 3), "no transaction was aborted here"


def test_a_segment_that_is_dropped_while_its_aborted_transactions_are_looked_up_is_out_of_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with transactional_cluster(746) as (cluster, orders, coordinator):
        coordinator.begin("app", producer_id=7, epoch=3)
        assert produce(cluster, orders, transactional(b"aborted", 7, 3)).error is None
        leader = cluster.leading(orders)
        assert write(cluster, 11, marker_of(leader, 7, 4, is_commit=False)) == [None]
        look_up = Log.aborted_transactions

        async def overtaken(log: Log, start: int, end: int) -> list[AbortedTransaction]:
            log.roll()
            await log.advance_start(log.end_offset)  # retention, or `delete-records`
            return await look_up(log, start, end)

        monkeypatch.setattr(Log, "aborted_transactions", overtaken)

        async def job(found: RunningBroker) -> FetchResult:
            (result,) = await data_requests.fetch(
                found.service, [FetchItem(orders, 0)], max_bytes=1 << 20, isolation=READ_COMMITTED
            )
            return result

        result = cluster.on_broker(11, job)
        assert result.error is not None, f"{values_of(result.data)}, aborted {result.aborted}"
        assert result.error.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert not result.data
