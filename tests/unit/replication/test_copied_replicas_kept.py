"""A replica of a compacted log that is copied from the start keeps its old records until the copy is in sync."""

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster
from test_compacted_replicas import LAG_MAX_S, away_while_deleted, fill, has_tombstone, latest, put, until_read
from test_replica_kept import check_often, kept, kept_offsets
from test_replicas import BROKERS

from tidelog.log.kept_copies import NOTE
from tidelog.model.ids import PartitionId
from tidelog.replication.replica import ReplicaConfig
from tidelog.world.simulated import Loss

SMALL_PUSHES = ReplicaConfig(cleaner_backoff_ms=1_000, fetch_message_bytes=600)


def missed_a_delete(cluster: ReplicationCluster) -> PartitionId:
    """Broker 13 is away, has offsets 0 and 1, and the others have compacted away a delete that it has not seen."""
    topic = away_while_deleted(cluster, away_s=4 * LAG_MAX_S)
    until_read(cluster, lambda: not has_tombstone(cluster, 11, topic, b"gone"))
    until_read(cluster, lambda: not has_tombstone(cluster, 12, topic, b"gone"))
    return topic


def begin_copy(cluster: ReplicationCluster, topic: PartitionId, *, copied_bytes: int = 1500) -> None:
    """Broker 13 is copied from the start, and its disk is full after so many bytes."""
    disk = cluster.world.machine("b13").disk("logs-0")
    disk.fill(free_bytes=copied_bytes)
    cluster.start_brokers(13)
    cluster.until(lambda: kept(cluster, 13) != [], timeout=60)
    cluster.until(lambda: cluster.log(13, topic).end_offset > 2, timeout=60)
    assert 13 not in cluster.partition(topic).isr


def until_complete(cluster: ReplicationCluster, topic: PartitionId) -> None:
    cluster.world.machine("b13").disk("logs-0").heal()
    cluster.until_in_sync(topic, *BROKERS, timeout=60)
    cluster.until_equal(topic, *BROKERS)
    check_often(cluster)
    cluster.until(lambda: kept(cluster, 13) == [], timeout=60)
    assert latest(cluster, 13, topic, b"gone") is None
    assert latest(cluster, 13, topic, b"stays") == b"value"
    cluster.check()


def test_old_records_are_kept_until_the_copy_is_complete_and_in_sync() -> None:
    with ReplicationCluster(361, replica_config=SMALL_PUSHES) as cluster:
        topic = missed_a_delete(cluster)
        begin_copy(cluster, topic)
        (name,) = kept(cluster, 13)
        assert kept_offsets(cluster, 13, name) == [0, 1]
        assert cluster.brokers[NodeId(13)].node.disk("logs-0").exists(f"{name}/{NOTE}")
        check_often(cluster)
        cluster.world.run_for(10)
        assert kept(cluster, 13) == [name], "the copy is not complete"
        until_complete(cluster, topic)


def test_old_records_outlive_a_restart_in_the_middle_of_the_copy() -> None:
    with ReplicationCluster(362, replica_config=SMALL_PUSHES) as cluster:
        topic = missed_a_delete(cluster)
        begin_copy(cluster, topic)
        cluster.lose_power(13, Loss.ALL)
        cluster.start_brokers(13)
        (name,) = kept(cluster, 13)
        assert kept_offsets(cluster, 13, name) == [0, 1]
        until_complete(cluster, topic)


def test_a_second_copy_keeps_the_oldest_records_and_not_the_incomplete_copy() -> None:
    with ReplicationCluster(363, replica_config=SMALL_PUSHES) as cluster:
        topic = missed_a_delete(cluster)
        put(cluster, topic, b"a1", None)
        fill(cluster, topic, b"c")
        for broker in (11, 12):
            until_read(cluster, lambda broker=broker: not has_tombstone(cluster, broker, topic, b"a1"))  # type: ignore[misc]
        begin_copy(cluster, topic)
        log = cluster.log(13, topic)
        assert log.end_offset < log.lineage.deletes_end, "the copy is not complete"
        generation = cluster.log(13, topic).durability.generation
        (name,) = kept(cluster, 13)
        # In another leader epoch a copy that was broken off does not go on.
        cluster.kill(NodeId(11))
        cluster.until(lambda: cluster._leader(topic) == 12, timeout=60)
        cluster.until(lambda: cluster.log(13, topic).durability.generation > generation, timeout=60)
        assert kept(cluster, 13) == [name]
        assert kept_offsets(cluster, 13, name) == [0, 1]
        cluster.start_brokers(11)
        until_complete(cluster, topic)


@pytest.mark.parametrize("device", ["disk", "store"])
def test_a_replica_that_cannot_keep_its_records_on_a_full_disk_goes_on_when_there_is_space(device: str) -> None:
    with ReplicationCluster(364, replica_config=SMALL_PUSHES) as cluster:
        topic = missed_a_delete(cluster)
        machine = cluster.world.machine("b13")
        if device == "disk":
            machine.disk("logs-0").fill()
        cluster.network.block(NodeId(13), NodeId(11))
        cluster.start_brokers(13)
        cluster.world.run_for(2)
        if device == "store":
            machine.store("logs-0").fill()
        cluster.network.heal()
        cluster.world.run_for(20)
        assert 13 not in cluster.partition(topic).isr
        names = [name for name in cluster.brokers[NodeId(13)].node.disk("logs-0").list("") if "keys" in name]
        assert {0, 1} <= {offset for name in names for offset in kept_offsets(cluster, 13, name)}
        machine.store("logs-0").heal()
        until_complete(cluster, topic)


def test_a_replica_that_fell_behind_retention_keeps_nothing() -> None:
    with ReplicationCluster(365, replica_config=SMALL_PUSHES, brokers=BROKERS) as cluster:
        topic = cluster.topic("keys", BROKERS, configs={"segment.bytes": "3000", "retention.bytes": "3000"})
        fill(cluster, topic, b"a", 5)
        cluster.until_equal(topic, *BROKERS)
        cluster.kill(NodeId(13))
        fill(cluster, topic, b"b", 120)
        check_often(cluster)
        cluster.until(lambda: cluster.log(11, topic).start_offset > 5, timeout=60)
        cluster.start_brokers(13)
        cluster.until_in_sync(topic, *BROKERS, timeout=60)
        assert cluster.log(13, topic).start_offset > 5
        assert kept(cluster, 13) == []
