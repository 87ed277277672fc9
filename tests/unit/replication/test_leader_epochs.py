"""A leader epoch is led once, by one life of one replica."""

from support.brokers.cluster import NodeId, RunningBroker, batch, orders_cluster
from test_replicas import BROKERS

from tidelog.model.errors import ErrorCode


def test_a_leader_whose_role_has_ended_does_not_lead_the_same_epoch_again() -> None:
    """What the controller had answered in that epoch is forgotten: a follower may be in sync, by an answer that was on
    its way, and would not be counted."""
    with orders_cluster(431, b"before") as (cluster, orders):
        cluster.until_in_sync(orders, *BROKERS)
        leader = cluster.leader(orders)
        replica, epoch = cluster.replica(leader, orders), cluster.partition(orders).leader_epoch

        async def end_role(found: RunningBroker) -> None:
            replica.end_role()
            found.replicas.queue.add(replica)

        cluster.on_broker(leader, end_role)
        for _ in range(20):
            cluster.world.run_for(0.1)
            assert cluster.partition(orders).leader_epoch == epoch, "nobody has elected anybody"
            assert replica.role is None, "epoch and leader are as they were"
        result = cluster.produce(leader, orders, batch(b"not taken"))
        assert result.error is not None
        assert result.error.code is ErrorCode.LEADER_NOT_AVAILABLE
        cluster.kill(NodeId(leader))
        cluster.until(lambda: cluster.partition(orders).leader_epoch > epoch, timeout=30)
        cluster.write(orders, b"after")
        assert cluster.values(orders) == [b"before", b"after"]
