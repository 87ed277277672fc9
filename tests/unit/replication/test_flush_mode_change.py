"""`flush.mode` changes from page-cache to sync: what was acknowledged before counts as lost until it is synced."""

from support.brokers.cluster import NodeId, ReplicationCluster
from test_replicas import BROKERS, alter

from tidelog.log.config import FlushMode
from tidelog.model.ids import PartitionId
from tidelog.world.simulated import Loss

VALUES = [b"%d" % number for number in range(20)]


def written(cluster: ReplicationCluster) -> PartitionId:
    """A topic with page-cache, whose records are on no device."""
    cluster.start()
    cluster.start_brokers(*BROKERS)
    orders = cluster.topic("orders", BROKERS, configs={"flush.mode": "page-cache", "min.insync.replicas": "2"})
    for value in VALUES:
        cluster.write(orders, value)
    cluster.until_in_sync(orders, *BROKERS)
    assert all(cluster.log(broker, orders).durable_end == 0 for broker in BROKERS)
    return orders


def switch_to_sync(cluster: ReplicationCluster) -> None:
    alter(cluster, "topic", "orders", flush_mode="sync")

    def is_heard(broker: int) -> bool:
        image = cluster.brokers[NodeId(broker)].tail.image
        return image.config("topic", "orders").get("flush.mode") == "sync"

    cluster.until(lambda: all(is_heard(broker) for broker in BROKERS))


def restart_after_power_loss(cluster: ReplicationCluster) -> None:
    for broker in BROKERS:
        cluster.lose_power(broker, Loss.ALL)
        cluster.world.machine(f"b{broker}").disk("logs-0").heal()
    cluster.start_brokers(*BROKERS)
    cluster.until(lambda: all(not cluster.brokers[NodeId(broker)].agent.is_fenced for broker in BROKERS))


def test_replicas_that_lost_page_cache_records_are_not_elected_after_the_mode_changed() -> None:
    """The power goes after the change and before any broker has synced."""
    with ReplicationCluster(921) as cluster:
        orders = written(cluster)
        for broker in BROKERS:
            cluster.world.machine(f"b{broker}").disk("logs-0").begin_stall()
        switch_to_sync(cluster)
        restart_after_power_loss(cluster)
        cluster.world.run_for(3)
        partition = cluster.partition(orders)
        assert partition.leader == -1, "every replica has lost what it acknowledged"
        assert not partition.isr
        cluster.elect("orders", "unclean")
        cluster.write(orders, b"after")
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == [b"after"]
        restart_after_power_loss(cluster)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == [b"after"], "from here on it is a topic that syncs"


def test_replicas_that_have_synced_after_the_mode_changed_are_elected() -> None:
    with ReplicationCluster(922) as cluster:
        orders = written(cluster)
        switch_to_sync(cluster)
        logs = [cluster.log(broker, orders) for broker in BROKERS]
        cluster.until(lambda: all(log.durable_end == 20 and not log.is_page_cache for log in logs))
        restart_after_power_loss(cluster)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == VALUES


def test_a_broker_that_crashes_again_before_it_registers_still_reports_the_loss() -> None:
    with ReplicationCluster(923) as cluster:
        orders = written(cluster)
        for broker in BROKERS:
            cluster.world.machine(f"b{broker}").disk("logs-0").begin_stall()
        switch_to_sync(cluster)
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
            cluster.world.machine(f"b{broker}").disk("logs-0").heal()
            for controller in (1, 2, 3):
                cluster.network.block(NodeId(broker), NodeId(controller))
                cluster.network.block(NodeId(controller), NodeId(broker))
        cluster.start_brokers(*BROKERS, wait=False)
        cluster.world.run_for(2)  # the logs are recovered, and nobody has heard of it
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        cluster.network.heal()
        cluster.start_brokers(*BROKERS)
        cluster.until(lambda: all(not cluster.brokers[NodeId(broker)].agent.is_fenced for broker in BROKERS))
        cluster.world.run_for(3)
        assert cluster.partition(orders).leader == -1


def test_a_clean_stop_with_page_cache_loses_nothing_whatever_the_mode_is_then() -> None:
    with ReplicationCluster(924) as cluster:
        orders = written(cluster)
        for broker in BROKERS:
            cluster.stop(broker)
        alter(cluster, "topic", "orders", flush_mode="sync")
        cluster.start_brokers(*BROKERS)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == VALUES
        assert {cluster.log(broker, orders).config.flush_mode for broker in BROKERS} == {FlushMode.SYNC}
