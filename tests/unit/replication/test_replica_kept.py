"""Records that a replica has to give up are kept beside its log until it has them again."""

from support.brokers.cluster import NodeId, ReplicationCluster, batch
from test_replica_repair import damage
from test_replicas import BROKERS

from tidelog.log.batch import read_header
from tidelog.log.kept_copies import KEPT_MAX, NOTE
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.ids import PartitionId
from tidelog.world.simulated import Loss


def filled(cluster: ReplicationCluster, **settings: str) -> PartitionId:
    """Three brokers, and a topic with the values 0 to 5 on all of them, of which nothing expires."""
    cluster.start()
    cluster.start_brokers(*BROKERS)
    orders = cluster.topic("orders", BROKERS, configs={"retention.ms": "-1", **settings})
    cluster.write_numbers(orders, 6)
    cluster.until_equal(orders, *BROKERS)
    return orders


def kept(cluster: ReplicationCluster, broker: int) -> list[str]:
    disk = cluster.brokers[NodeId(broker)].node.disk("logs-0")
    return [name for name in disk.list("") if name.endswith(".kept")]


def kept_offsets(cluster: ReplicationCluster, broker: int, name: str) -> list[int]:
    """Base offsets of the batches in a kept copy that can be read."""
    device = cluster.world.machine(f"b{broker}").disk("logs-0")
    disk = cluster.brokers[NodeId(broker)].node.disk("logs-0")
    found = []
    for file in disk.list(name):
        data = device.raw(f"{name}/{file}") if file.endswith(".log") else b""
        position = 0
        while position < len(data):
            header = read_header(data, position)
            found.append(int(header.base_offset))
            position += header.size
    return found


def check_often(cluster: ReplicationCluster) -> None:
    """Retention, which also looks at kept copies, runs every second."""
    change = ConfigChange(key="log.retention.check.interval.ms", operation="set", value="1000")
    cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)))


def test_what_a_damaged_follower_cuts_is_kept_until_it_is_in_sync_with_all_of_it() -> None:
    with ReplicationCluster(341) as cluster:
        orders = filled(cluster)
        damage(cluster, 12, orders, 2)
        cluster.until(lambda: cluster.log(12, orders).damaged is None)
        (name,) = kept(cluster, 12)
        assert kept_offsets(cluster, 12, name) == list(range(6)), "the segment as it was"
        assert cluster.brokers[NodeId(12)].node.disk("logs-0").exists(f"{name}/{NOTE}")
        cluster.until_whole(orders)
        check_often(cluster)
        cluster.until(lambda: kept(cluster, 12) == [])


def test_a_kept_copy_outlives_a_restart_and_is_removed_after_it() -> None:
    with ReplicationCluster(342) as cluster:
        orders = filled(cluster)
        damage(cluster, 12, orders, 2)
        cluster.until(lambda: cluster.log(12, orders).damaged is None)
        assert len(kept(cluster, 12)) == 1
        cluster.lose_power(12, Loss.ALL)
        cluster.start_brokers(12)
        assert len(kept(cluster, 12)) == 1
        cluster.until_in_sync(orders, *BROKERS)
        check_often(cluster)
        cluster.until(lambda: kept(cluster, 12) == [])


def lose_uncleanly(cluster: ReplicationCluster, **settings: str) -> PartitionId:
    """The uncleanly elected leader 13 does not have the last four records that were committed on 11 and 12."""
    orders = filled(cluster, **settings)
    cluster.kill(NodeId(13))
    cluster.until_in_sync(orders, 11, 12)
    for number in range(6, 10):
        cluster.write(orders, b"%d" % number)
    cluster.kill(NodeId(12))
    cluster.kill(NodeId(11))
    cluster.start_brokers(13)
    cluster.until(lambda: cluster.partition(orders).leader == -1)
    cluster.elect("orders", "unclean")
    assert cluster.leader(orders) == 13
    cluster.write(orders, b"other 6", acks=1)
    return orders


def test_committed_records_that_an_uncleanly_elected_leader_lacks_are_kept_for_the_operator() -> None:
    with ReplicationCluster(343) as cluster:
        orders = lose_uncleanly(cluster)
        cluster.start_brokers(11, 12)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write_numbers(orders, 10, b"new %d")
        check_often(cluster)
        cluster.world.run_for(10)
        for broker in (11, 12):
            (name,) = kept(cluster, broker)
            assert set(range(6, 10)) <= set(kept_offsets(cluster, broker, name)), "they are the last copies"
        assert kept(cluster, 13) == []


def test_a_follower_that_has_moved_segments_away_and_cannot_cut_does_not_follow_as_if_it_had_them() -> None:
    with ReplicationCluster(347) as cluster:
        orders = lose_uncleanly(cluster, **{"segment.bytes": "150"})
        for other in (12, 13):
            cluster.network.block(NodeId(11), NodeId(other))
            cluster.network.block(NodeId(other), NodeId(11))
        cluster.start_brokers(11)
        cluster.until(lambda: cluster.log(11, orders).end_offset == 10)
        store = cluster.world.machine("b11").store("logs-0")
        store.fill()
        cluster.network.heal()
        disk = cluster.brokers[NodeId(11)].node.disk("logs-0")
        cluster.until(lambda: any(disk.list(name) for name in kept(cluster, 11)))
        cluster.until(lambda: store.refusals > 3)
        assert len(cluster.log(11, orders).sealed_segments()) > 3, "it is not cut"
        assert cluster.log(11, orders).damaged is not None
        assert 11 not in cluster.partition(orders).isr
        store.heal()
        cluster.until_in_sync(orders, 11, 13)
        (name,) = kept(cluster, 11)
        assert set(range(6, 10)) <= set(kept_offsets(cluster, 11, name))


def test_kept_copies_go_with_their_topic() -> None:
    with ReplicationCluster(344) as cluster:
        orders = lose_uncleanly(cluster)
        cluster.start_brokers(11, 12)
        cluster.until_in_sync(orders, *BROKERS)
        assert kept(cluster, 11)
        cluster.ask(DeleteTopics(names=("orders",)))
        check_often(cluster)
        cluster.until(lambda: kept(cluster, 11) == [] == kept(cluster, 12))


def test_uncommitted_records_that_a_follower_cuts_are_not_kept() -> None:
    with ReplicationCluster(345) as cluster:
        orders = filled(cluster)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        cluster.produce(11, orders, batch(b"nobody else has this"), acks=1)
        cluster.kill(NodeId(11))
        cluster.network.heal()
        cluster.write(orders, b"6")
        cluster.start_brokers(11)
        cluster.until_in_sync(orders, *BROKERS)
        assert kept(cluster, 11) == []


def test_a_replica_with_too_many_kept_copies_stays_as_it_is() -> None:
    with ReplicationCluster(346) as cluster:
        orders = filled(cluster)
        for number in range(KEPT_MAX):
            damage(cluster, 12, orders, 2)
            cluster.until(lambda: cluster.log(12, orders).damaged is None)
            cluster.until_in_sync(orders, *BROKERS)
            assert len(kept(cluster, 12)) == number + 1
        damage(cluster, 12, orders, 2)
        cluster.world.run_for(10)
        assert cluster.log(12, orders).damaged is not None, "nothing is thrown away"
        assert len(kept(cluster, 12)) == KEPT_MAX
        check_often(cluster)  # the log of this replica does not cover them while it is damaged
        cluster.world.run_for(10)
        assert len(kept(cluster, 12)) == KEPT_MAX
