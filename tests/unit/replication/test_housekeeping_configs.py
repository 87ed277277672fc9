"""Retention and compaction go by the configs of a topic, never by the defaults with which its log may be opened."""

from support.brokers.cluster import NodeId, ReplicationCluster
from test_replicas import BROKERS

CONTROLLERS = (NodeId(1), NodeId(2), NodeId(3))


def test_a_broker_that_does_not_know_the_configs_of_a_topic_yet_deletes_nothing() -> None:
    """Seed 20 of the broker runs: the records are older than the default retention, which the topic does not have."""
    with ReplicationCluster(951, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"retention.ms": "-1"})
        cluster.write_numbers(orders, 5)
        cluster.until_equal(orders, *BROKERS)
        cluster.stop(11)
        for node in CONTROLLERS:
            cluster.kill(node)
        cluster.world.machine("b11").disk("data").wipe()  # its copy of the metadata
        cluster.start_brokers(11, wait=False)
        assert orders.topic_id not in cluster.brokers[NodeId(11)].tail.image.topics
        cluster.world.run_for(320)
        cluster.start(*CONTROLLERS)
        cluster.until_live(11)
        cluster.until(lambda: 11 in cluster.partition(orders).isr and cluster.replica(11, orders).log is not None)
        assert [cluster.log(broker, orders).start_offset for broker in BROKERS] == [0, 0, 0]
        assert cluster.values(orders) == [b"%d" % number for number in range(5)]
