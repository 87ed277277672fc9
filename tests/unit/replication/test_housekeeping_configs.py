"""Retention and compaction go by the configs of a topic, never by the defaults with which its log may be opened."""

import errno

from support.brokers.cluster import NodeId, ReplicationCluster
from test_replicas import BROKERS

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange

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


def test_retention_goes_by_a_config_that_a_full_disk_cannot_store() -> None:
    """That the log may have gaps is stored before it has the config. What retention may delete is what frees the
    disk."""
    with ReplicationCluster(952, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"retention.ms": "-1", "segment.bytes": "200"})
        cluster.write_numbers(orders, 12)
        cluster.until_equal(orders, *BROKERS)
        cluster.world.run_for(2)
        log, store = cluster.log(12, orders), cluster.world.machine("b12").store("logs-0")

        def refuse(operation: str, _paths: tuple[str, ...]) -> None:
            if operation == "commit" and not log.context.lock.locked():  # retention has the lock
                store.faults.arm("commit", number=errno.ENOSPC)

        store.on_call = refuse
        values = {"cleanup.policy": "compact,delete", "retention.bytes": "300"}
        changes = tuple(ConfigChange(key=key, operation="set", value=value) for key, value in values.items())
        resource = ResourceChange(resource_type="topic", resource="orders", changes=changes)
        (outcome,) = cluster.ask(AlterConfigs(resources=(resource,))).items
        assert outcome.error is None, outcome.message
        cluster.world.run_for(320)
        assert not log.config.cleanup_compact, "the disk is full"
        assert log.start_offset > 0
        assert len(log.segments.sealed) < 4
        store.on_call = None
        cluster.until(lambda: log.config.cleanup_compact, timeout=60)
