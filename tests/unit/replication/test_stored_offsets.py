"""Offsets that were stored before a loss: they say nothing about the records that are appended after it."""

from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, batch
from test_replicas import BROKERS

from tidelog.log.batch import Record, encode
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.model.ids import PartitionId
from tidelog.world.simulated import Loss


def lose_everything_and_elect(cluster: ReplicationCluster, orders: PartitionId) -> None:
    """Every broker loses its page cache; broker 11 is elected uncleanly, alone."""
    for broker in BROKERS:
        cluster.lose_power(broker, Loss.ALL)
    cluster.start_brokers(11)
    cluster.until(lambda: cluster.partition(orders).leader == -1)
    cluster.elect("orders", "unclean")
    assert cluster.leader(orders) == 11


def test_high_watermark_stays_below_uncommitted_records_after_a_loss_and_a_clean_restart() -> None:
    with ReplicationCluster(901, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"flush.mode": "page-cache", "min.insync.replicas": "2"})
        cluster.write_numbers(orders, 20, b"old%d")
        cluster.world.run_for(3)  # the high watermark is stored
        lose_everything_and_elect(cluster, orders)
        for number in range(30):
            assert cluster.produce(11, orders, batch(b"new%d" % number), acks=1).error is None
        assert cluster.leading(orders).high_watermark == 0
        cluster.stop(11)
        cluster.start_brokers(11)
        cluster.leader(orders)
        leading = cluster.leading(orders)
        assert (leading.log.end_offset, leading.high_watermark) == (30, 0)
        assert not cluster.fetch(11, orders, max_wait_ms=100).data, "nothing is committed"


def test_unclean_leader_that_ends_below_the_deleted_records_appends_behind_them() -> None:
    """Records below 15 were deleted on request. A leader that ends at 5 must not give these offsets to new records:
    they would be deleted as the old ones were."""
    with ReplicationCluster(902, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"min.insync.replicas": "1"})
        cluster.write_numbers(orders, 5, b"old%d")
        cluster.until_equal(orders, *BROKERS)
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        cluster.write_numbers(orders, 15, b"more%d")
        assert cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 15)) == 15
        cluster.kill(NodeId(11))
        cluster.kill(NodeId(12))
        cluster.start_brokers(13)
        cluster.until(lambda: cluster.partition(orders).leader == -1)
        cluster.elect("orders", "unclean")
        assert cluster.leader(orders) == 13
        values = [b"new%d" % number for number in range(20)]
        for value in values:
            cluster.write(orders, value)
        assert cluster.values(orders) == values
        cluster.start_brokers(11, 12)
        cluster.until_whole(orders)
        assert {cluster.log(broker, orders).start_offset for broker in BROKERS} == {15}
        assert cluster.values(orders) == values


def test_repeat_of_a_backfill_is_found_after_all_brokers_crashed() -> None:
    """Records with timestamps of two days ago: the producer wrote just now, so no broker may have expired it."""
    with ReplicationCluster(903, brokers=BROKERS) as cluster:
        change = ConfigChange(key="log.retention.check.interval.ms", operation="set", value="1000")
        cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", resource="", changes=(change,)),)))
        orders = cluster.topic("orders", BROKERS, configs={"retention.ms": "-1"})
        old_ms = cluster.brokers[NodeId(11)].node.clock.now_ms() - 2 * 86_400_000
        batches = [
            encode(
                [Record(0, old_ms, b"k", b"v%d" % number, ())], producer_id=7, producer_epoch=0, base_sequence=number
            )
            for number in range(5)
        ]
        for data in batches:
            assert cluster.produce(11, orders, data).error is None
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        cluster.start_brokers(*BROKERS)
        cluster.leader(orders)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.world.run_for(3)  # several rounds of the retention check, which expires producers
        result = cluster.produce(cluster.leader(orders), orders, batches[4])
        assert (result.error, result.base_offset) == (None, 4)
        assert cluster.values(orders) == [b"v%d" % number for number in range(5)]
