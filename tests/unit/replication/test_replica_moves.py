"""A replica changes its log directory: used meanwhile, whole afterwards, whatever crashes."""

import asyncio
import errno
from contextlib import suppress
from typing import Any

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster
from test_compacted_replicas import COMPACT, put, records, until_read
from test_replica_repair import filled
from test_replicas import BROKERS

from tidelog.log.directories import LogDirectory
from tidelog.model.errors import (
    CorruptBatchError,
    InvalidRequestError,
    ReplicaNotAvailableError,
    StorageError,
    TidelogError,
)
from tidelog.model.ids import DirectoryId, PartitionId
from tidelog.services.produce import ProduceItem
from tidelog.world.simulated import Loss


def homes(cluster: ReplicationCluster, broker: int, partition: PartitionId) -> tuple[LogDirectory, LogDirectory]:
    """(where it is, another)."""
    logs = cluster.brokers[NodeId(broker)].logs
    home = logs.directory_of(partition)
    assert home is not None
    return home, next(directory for directory in logs.directories if directory is not home)


def id_of(directory: LogDirectory) -> DirectoryId:
    assert directory.directory_id is not None
    return directory.directory_id


@pytest.mark.parametrize("broker", [11, 12])
def test_a_replica_is_moved_while_it_leads_or_follows_and_loses_nothing(broker: int) -> None:
    with ReplicationCluster(501, directories=2, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"segment.bytes": "1048576"})
        written = [b"%d-" % number + bytes(200_000) for number in range(12)]
        for value in written:
            cluster.write(orders, value)
        home, other = homes(cluster, broker, orders)
        epoch = cluster.partition(orders).leader_epoch
        acknowledged: list[int] = []

        async def write_on(found: RunningBroker) -> None:
            while len(acknowledged) < 40:
                items = [ProduceItem(orders, batch(b"meanwhile"))]
                (result,) = await data_requests.produce(found.service, items, acks=-1, timeout_ms=5000)
                if result.error is None:
                    acknowledged.append(result.base_offset)
                else:
                    assert result.error.retriable
                await asyncio.sleep(0.002)

        writer = cluster.brokers[NodeId(11)].node.spawn(write_on(cluster.brokers[NodeId(11)]))
        cluster.on_broker(broker, lambda found: found.service.log_directories.move_replica(orders, id_of(other)))
        cluster.until(writer.done)
        writer.result()
        assert homes(cluster, broker, orders)[0] is other
        assert orders not in home.paths
        cluster.until(lambda: cluster.partition(orders).directory_of(broker) == other.directory_id)
        assert cluster.partition(orders).leader_epoch == epoch, "nobody else had to lead"
        cluster.until_whole(orders)
        assert cluster.values(orders) == [*written, *([b"meanwhile"] * 40)]
        assert len(set(acknowledged)) == 40
        # And after a restart it is found in its new place, whole.
        cluster.kill(NodeId(broker))
        cluster.start_brokers(broker)
        cluster.until_in_sync(orders, *BROKERS)
        found = cluster.brokers[NodeId(broker)].logs.directory_of(orders)
        assert found is not None
        assert found.directory_id == other.directory_id
        cluster.until_equal(orders, *BROKERS)


@pytest.mark.parametrize("broker", [11, 12])
def test_a_compacted_log_begins_at_the_same_offset_after_a_move(broker: int) -> None:
    """Seed 45 (brokers): the moved log began at its first batch, and a reader at offset 0 was out of range."""
    with ReplicationCluster(502, directories=2, brokers=BROKERS) as cluster:
        table = cluster.topic("table", BROKERS, configs=COMPACT)
        for number in range(120):
            put(cluster, table, b"k", b"%d" % number + bytes(60))
        until_read(cluster, lambda: min(records(cluster, broker, table)) > 0)
        before = records(cluster, broker, table)
        _, other = homes(cluster, broker, table)
        cluster.on_broker(broker, lambda found: found.service.log_directories.move_replica(table, id_of(other)))
        assert homes(cluster, broker, table)[0] is other
        for _ in range(2):
            assert cluster.log(broker, table).start_offset == 0
            assert records(cluster, broker, table) == before
            cluster.kill(NodeId(broker))
            cluster.start_brokers(broker)
            cluster.until_in_sync(table, *BROKERS)


@pytest.mark.parametrize("step", range(25))
def test_a_crash_during_a_move_leaves_one_log_and_loses_nothing(step: int) -> None:
    with ReplicationCluster(600 + step, directories=2, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", [11], configs={"min.insync.replicas": "1"})
        written = [b"%d" % number for number in range(5)]
        for value in written:
            cluster.write(orders, value)
        cluster.world.run_for(2)
        _, other = homes(cluster, 11, orders)
        found = cluster.brokers[NodeId(11)]
        found.node.spawn(found.service.log_directories.move_replica(orders, id_of(other)))
        cluster.world.run_for(step * 0.0007)
        cluster.lose_power(11, Loss.ALL)
        cluster.start_brokers(11)
        cluster.leader(orders)
        assert cluster.values(orders) == written
        logs = cluster.brokers[NodeId(11)].logs
        places = [
            name
            for label in found.labels
            for name in cluster.brokers[NodeId(11)].node.disk(label).list("")
            if name.startswith("orders") and not name.endswith(".deleted")
        ]
        assert len(places) == 1, "it stands in one place, and no copy is left"
        assert cluster.write(orders, b"more").base_offset == 5
        assert logs.directory_of(orders) is not None


@pytest.mark.parametrize("broker", [11, 12])
def test_corruption_found_by_a_move_is_reported_and_repaired(broker: int) -> None:
    with ReplicationCluster(504, directories=2) as cluster:
        orders = filled(cluster)
        home, other = homes(cluster, broker, orders)
        log = cluster.log(broker, orders)
        label = cluster.brokers[NodeId(broker)].labels[cluster.brokers[NodeId(broker)].logs.directories.index(home)]
        at = 2 * (log.size // 6) + 70
        cluster.world.machine(f"b{broker}").disk(label).overwrite(log.segments.active_path(), at, b"\xff")
        with pytest.raises(CorruptBatchError):
            cluster.on_broker(broker, lambda found: found.service.log_directories.move_replica(orders, id_of(other)))
        cluster.until(lambda: log.damaged is not None)
        assert log.damaged is not None
        assert log.damaged.good_end <= 2, "a piece with rot in it is not taken at all"
        cluster.until(lambda: log.damaged is None)
        cluster.until_whole(orders)
        assert cluster.values(orders) == [b"%d" % number for number in range(6)]
        cluster.on_broker(broker, lambda found: found.service.log_directories.move_replica(orders, id_of(other)))
        assert homes(cluster, broker, orders)[0] is other


def test_a_move_to_nowhere_is_refused() -> None:
    with orders_cluster(502, directories=2) as (cluster, orders):
        home, _ = homes(cluster, 11, orders)
        service = cluster.brokers[NodeId(11)].service
        cluster.on_broker(11, lambda _: service.log_directories.move_replica(orders, id_of(home)))
        with pytest.raises(InvalidRequestError):
            cluster.on_broker(11, lambda _: service.log_directories.move_replica(orders, DirectoryId(orders.topic_id)))
        with pytest.raises(ReplicaNotAvailableError):
            cluster.on_broker(
                11, lambda _: service.log_directories.move_replica(PartitionId(orders.topic_id, 7), id_of(home))
            )


def test_a_move_to_a_full_disk_is_given_up_and_the_replica_stays() -> None:
    with orders_cluster(503, directories=2) as (cluster, orders):
        cluster.write(orders, bytes(100_000))
        home, other = homes(cluster, 11, orders)
        label = cluster.brokers[NodeId(11)].labels[cluster.brokers[NodeId(11)].logs.directories.index(other)]
        cluster.world.machine("b11").disk(label).fill(50_000)
        service = cluster.brokers[NodeId(11)].service
        with pytest.raises(Exception, match="space"):
            cluster.on_broker(11, lambda _: service.log_directories.move_replica(orders, id_of(other)))
        assert homes(cluster, 11, orders)[0] is home
        cluster.write(orders, b"goes on")


@pytest.mark.parametrize("broker", [11, 12])
def test_a_moved_log_that_cannot_be_opened_for_a_while_is_opened_in_its_new_place(broker: int) -> None:
    with ReplicationCluster(506, directories=2) as cluster:
        orders = filled(cluster)
        _, other = homes(cluster, broker, orders)
        device = cluster.world.machine(f"b{broker}").disk(other.disk.label.rpartition(":")[2])

        async def move(found: RunningBroker) -> None:
            # The last call of the move before the log is opened in its new place.
            moved = found.logs.moved

            async def moved_with_errors(*values: Any) -> Any:
                device.fail("list", number=errno.EMFILE, times=5)
                return await moved(*values)

            found.logs.moved = moved_with_errors  # type: ignore[method-assign, assignment]
            await found.service.log_directories.move_replica(orders, id_of(other))

        cluster.on_broker(broker, move)
        assert homes(cluster, broker, orders)[0] is other
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.write(orders, b"6").base_offset == 6
        cluster.until_equal(orders, *BROKERS)


def test_a_move_whose_directory_fails_ends_and_leaves_nothing_behind() -> None:
    with ReplicationCluster(507, directories=2) as cluster:
        orders = filled(cluster)
        home, other = homes(cluster, 12, orders)
        replica = cluster.replica(12, orders)

        async def move(found: RunningBroker) -> None:
            moves = found.replicas.moves
            moving = asyncio.ensure_future(found.service.log_directories.move_replica(orders, id_of(other)))
            while replica not in moves._copied and not moving.done():  # noqa: ASYNC110 - the world's time goes on
                await asyncio.sleep(0.0001)
            home.fail(StorageError("the device is gone"))
            with suppress(TidelogError):  # it may have been decided before
                await moving

        cluster.on_broker(12, move)
        moves = cluster.brokers[NodeId(12)].replicas.moves
        cluster.until(lambda: not moves.is_moving(replica))
