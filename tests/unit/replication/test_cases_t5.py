"""Known failures that need whole brokers and are not covered elsewhere: a follower that missed epochs of one leader,
and a leader that cannot give what its followers lack."""

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster
from test_replica_cases import isolate
from test_replicas import BROKERS, alter, reassign

from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId
from tidelog.world.simulated import Loss


def stored(cluster: ReplicationCluster, broker: int, partition: PartitionId) -> list[tuple[int, int]]:
    """(epoch, first offset) of each epoch with records."""
    return [(int(epoch), int(start)) for epoch, start in cluster.log(broker, partition).epochs]


@pytest.mark.case("T5")
def test_t5_a_follower_that_missed_epochs_of_the_same_leader_is_still_cut() -> None:
    with orders_cluster(105, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        # 13 alone has what 11 takes now and never learns to be replicated: 12 is cut off from 11.
        for link in ((11, 12), (12, 11)):
            cluster.network.block(NodeId(link[0]), NodeId(link[1]))
        assert cluster.produce(11, orders, batch(b"lost 1"), acks=1).error is None
        cluster.until(lambda: cluster.log(13, orders).durable_end == 2)
        cluster.kill(NodeId(13))
        cluster.lose_power(11, Loss.ALL)
        cluster.network.heal()
        cluster.until(lambda: cluster._leader(orders) == 12)
        epoch = cluster.leading(orders).leader_epoch
        # The same leader, again and again, in epochs that 13 does not hear of.
        for number in range(3):
            cluster.start_brokers(11)
            cluster.until_in_sync(orders, 11, 12)
            cluster.write(orders, b"kept %d" % number)
            cluster.kill(NodeId(12))
            cluster.until(lambda: cluster._leader(orders) == 11)
            cluster.start_brokers(12)
            cluster.until_in_sync(orders, 11, 12)
            cluster.lose_power(11)
            cluster.until(lambda: cluster._leader(orders) == 12)
        cluster.start_brokers(11)
        assert cluster.leading(orders).leader_epoch >= epoch + 3
        cluster.start_brokers(13)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"last")
        cluster.until_equal(orders, *BROKERS)
        assert stored(cluster, 13, orders) == stored(cluster, 12, orders)
        assert cluster.values(orders) == [b"0", b"kept 0", b"kept 1", b"kept 2", b"last"]


@pytest.mark.case("T8")
def test_t8_a_leader_that_was_replaced_cuts_nobody_when_it_comes_back() -> None:
    with orders_cluster(128, b"0") as (cluster, orders):
        isolate(cluster, 11)
        cluster.until(lambda: cluster._leader(orders) == 12)
        for value in (b"1", b"2", b"3"):
            cluster.write(orders, value)
        # It still thinks that it leads; what it says late must not reach the newer logs.
        assert cluster.brokers[NodeId(11)].replicas.leader_of(orders) is not None
        cluster.network.heal()
        cluster.until_whole(orders)
        assert cluster.values(orders) == [b"0", b"1", b"2", b"3"]


@pytest.mark.case("T12")
@pytest.mark.case("T13")
def test_t13_a_new_leader_tells_no_high_watermark_before_it_has_confirmed_its_epoch() -> None:
    with orders_cluster(129, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.write(orders, b"1")
        assert cluster.fetch(11, orders, 0).high_watermark == 2
        for link in ((12, 13), (13, 12)):
            cluster.network.block(NodeId(link[0]), NodeId(link[1]))
        cluster.kill(NodeId(11))
        assert cluster.leader(orders) == 12
        assert not cluster.leading(orders).state.is_confirmed
        early = cluster.fetch(12, orders, 0)
        assert (early.error, early.high_watermark, early.last_stable) == (None, -1, -1), "its own is older"
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.fetch(12, orders, 0).high_watermark == 2


@pytest.mark.case("S2")
def test_s2_rot_that_only_a_crc_shows_is_not_pushed_for_ever_but_mended_from_the_others() -> None:
    with orders_cluster(130) as (cluster, orders):
        cluster.write_numbers(orders, 6)
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        for number in range(6, 12):
            cluster.write(orders, b"%d" % number)
        cluster.until_equal(orders, 11, 12)
        device = cluster.world.machine("b11").disk("logs-0")
        log = cluster.log(11, orders)
        (path,) = [path for path, _ in device.files() if path.startswith(f"{log.path}/") and path.endswith(".log")]
        # A value of the ninth batch: its length and its offsets are as they were.
        device.flip_bit(path, 9 * (log.size // 12) - 2)
        cluster.start_brokers(13)
        cluster.until_in_sync(orders, *BROKERS, timeout=60)
        cluster.until_equal(orders, *BROKERS)
        assert cluster.values(orders) == [b"%d" % number for number in range(12)]


@pytest.mark.case("S3")
def test_s3_a_disk_that_turns_read_only_takes_its_partitions_offline_and_others_lead() -> None:
    with orders_cluster(131, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        alter(cluster, "cluster", "", replica_lag_time_max_ms="2000")
        cluster.world.machine("b11").disk("logs-0").is_read_only = True
        result = cluster.produce(11, orders, batch(b"1"))
        assert result.error is not None, "what is not stored is not acknowledged"
        assert result.error.code in (ErrorCode.STORAGE_ERROR, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        cluster.until(lambda: cluster._leader(orders) in (12, 13))
        cluster.write(orders, b"2")
        assert cluster.values(orders) == [b"0", b"2"]
        cluster.world.machine("b11").disk("logs-0").heal()
        cluster.kill(NodeId(11))
        cluster.start_brokers(11)
        cluster.until_whole(orders)


def test_a_replica_that_was_dropped_does_not_take_the_log_of_its_successor_along() -> None:
    with ReplicationCluster(132, brokers=(*BROKERS, 14)) as cluster:
        orders = cluster.topic("orders", BROKERS)
        cluster.write_numbers(orders, 4)
        dropped = cluster.replica(13, orders)
        reassign(cluster, "orders", 11, 12, 14)
        cluster.until(lambda: orders not in cluster.brokers[NodeId(13)].logs.known())
        reassign(cluster, "orders", 11, 12, 13)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.replica(13, orders) is not dropped
        # A timer of its former life: try again to follow.
        found = cluster.brokers[NodeId(13)]

        async def late(_: RunningBroker) -> None:
            found.replicas.queue.add(dropped)

        cluster.on_broker(13, late)
        cluster.world.run_for(1.0)
        assert not cluster.log(13, orders).is_closed
        cluster.write(orders, b"4")
        cluster.until_equal(orders, *BROKERS)
