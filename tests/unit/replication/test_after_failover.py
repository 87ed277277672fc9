"""What a new leader says and does before and after it has confirmed its epoch."""

from replication_cluster import NodeId, ReplicationCluster
from test_replicas import BROKERS
from test_service import code

from tidelog.model.errors import ErrorCode


def test_records_that_were_deleted_do_not_come_back_with_a_new_leader() -> None:
    """The followers hear of the deletion, but not of the high watermark that it reached to."""
    with ReplicationCluster(441) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        orders = cluster.topic("orders", BROKERS)
        for number in range(20):
            cluster.write(orders, b"%d" % number)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        start = cluster.on_broker(11, lambda found: found.service.delete_records(orders, -1))
        assert start == 20

        def is_heard(broker: int) -> bool:
            known = cluster.brokers[NodeId(broker)].tail.image.partition(orders.topic_id, 0)
            return known is not None and known.start_offset == start

        cluster.until(lambda: all(is_heard(broker) for broker in (12, 13)))
        assert max(cluster.replica(broker, orders).high_watermark for broker in (12, 13)) < start
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        cluster.until(lambda: cluster.log(leader, orders).start_offset == start)
        assert cluster.values(orders) == []
        cluster.write(orders, b"new")
        assert cluster.values(orders) == [b"new"]
        cluster.check()


def test_an_error_tells_no_high_watermark_that_is_not_confirmed() -> None:
    with ReplicationCluster(442) as cluster:
        cluster.start()
        cluster.start_brokers(*BROKERS)
        orders = cluster.topic("orders", BROKERS)
        for number in range(20):
            cluster.write(orders, b"%d" % number)
        told = cluster.fetch(11, orders, 20).high_watermark
        assert told == 20
        assert cluster.fetch(11, orders, 25).high_watermark == told, "confirmed: an error tells it too"
        follower = cluster.fetch(12, orders, 0)
        assert (code(follower.error), follower.high_watermark) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
        for one, other in ((12, 13), (13, 12)):
            cluster.network.block(NodeId(one), NodeId(other))
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        assert not cluster.leading(orders).state.is_confirmed
        refused = cluster.fetch(leader, orders, 25)
        assert (code(refused.error), refused.high_watermark) == (ErrorCode.OFFSET_NOT_AVAILABLE, -1)
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.fetch(leader, orders, 25).high_watermark == told
        cluster.check()
