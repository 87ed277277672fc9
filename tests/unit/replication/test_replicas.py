"""Replicated partitions in a simulated world: written, read, failed over, grown, moved and deleted."""

from uuid import UUID

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, batch, orders_cluster

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.errors import ErrorCode
from tidelog.model.ids import PartitionId
from tidelog.replication.follower_replica import FollowerReplica
from tidelog.world.simulated import Loss

BROKERS = (11, 12, 13)


def alter(cluster: ReplicationCluster, resource_type: str, resource: str, **values: str) -> None:
    changes = tuple(
        ConfigChange(key=name.replace("_", "."), operation="set", value=value) for name, value in values.items()
    )
    item = ResourceChange(resource_type=resource_type, resource=resource, changes=changes)
    (outcome,) = cluster.ask(AlterConfigs(resources=(item,))).items
    assert outcome.error is None, outcome.message


def reassign(cluster: ReplicationCluster, topic: str, *replicas: int) -> None:
    item = ReassignmentTarget(topic=topic, partition=0, replicas=replicas)
    (outcome,) = cluster.ask(AlterReassignments(partitions=(item,))).items
    assert outcome.error is None, outcome.message


@pytest.mark.requirement("a:B-01", "a:B-13", "a:B-30", "a:T-02", "a:U-02", "a:U-03", "a:U-12", "b:D-01")
def test_what_was_acknowledged_survives_the_leader_and_writing_goes_on() -> None:
    with orders_cluster(1) as (cluster, orders):
        for number in range(5):
            assert cluster.write(orders, b"%d" % number).base_offset == number
        assert cluster.values(orders) == [b"0", b"1", b"2", b"3", b"4"]
        cluster.kill(NodeId(11))
        assert cluster.leader(orders) == 12
        cluster.write(orders, b"5")
        assert cluster.values(orders) == [b"0", b"1", b"2", b"3", b"4", b"5"]
        cluster.start_brokers(11)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"6")
        cluster.until_equal(orders, *BROKERS)


@pytest.mark.requirement("a:B-40", "a:B-41", "a:T-04", "a:C-07", "a:X3-21", "b:C-11")
def test_one_replica_down_is_normal_and_two_make_the_partition_read_only() -> None:
    with orders_cluster(2, b"three") as (cluster, orders):
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        cluster.write(orders, b"two")
        cluster.kill(NodeId(12))
        cluster.until_in_sync(orders, 11)
        cluster.until(lambda: len(cluster.leading(orders).state.isr) == 1)
        result = cluster.produce(11, orders, batch(b"one"))
        assert result.error is not None
        assert result.error.code is ErrorCode.NOT_ENOUGH_REPLICAS
        assert cluster.values(orders) == [b"three", b"two"], "it can be read"
        assert cluster.log(11, orders).end_offset == 2, "what is refused is not written"
        cluster.start_brokers(12)
        cluster.write(orders, b"two again")
        assert cluster.values(orders) == [b"three", b"two", b"two again"]


@pytest.mark.requirement("a:B-35")
def test_a_broker_that_is_stopped_in_order_hands_its_leaderships_over_and_loses_nothing() -> None:
    with orders_cluster(3) as (cluster, orders):
        cluster.write_numbers(orders, 3)
        began_s = cluster.now_s()
        cluster.stop(11)
        assert cluster.leader(orders) == 12
        assert cluster.now_s() - began_s < 2.0
        cluster.write(orders, b"3")
        cluster.start_brokers(11)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.log(11, orders).report.bytes_truncated == 0
        cluster.until_equal(orders, *BROKERS)


def test_all_brokers_lose_power_at_once_and_nothing_acknowledged_is_lost() -> None:
    with orders_cluster(4) as (cluster, orders):
        written = [b"%d" % number for number in range(10)]
        for value in written:
            cluster.write(orders, value)
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        cluster.start_brokers(*BROKERS)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == written
        assert cluster.write(orders, b"more").base_offset == 10


def test_many_partitions_share_two_streams_between_two_brokers() -> None:
    with ReplicationCluster(5, brokers=BROKERS) as cluster:
        first = cluster.topic("many", partitions=30)
        for number in range(30):
            cluster.write(PartitionId(first.topic_id, number), b"%d" % number)
        for found in cluster.brokers.values():
            keys = sorted(found.replicas.follower_streams._streams)
            assert len(keys) == len(set(keys)) <= 4, "one for each leader and channel"
        tasks = [len(found.replicas.tasks) for found in cluster.brokers.values()]
        assert max(tasks) < 20, "no task for a partition"


@pytest.mark.requirement("a:B-19")
def test_a_topic_that_is_deleted_leaves_no_log_behind_and_its_name_can_be_taken_again() -> None:
    with orders_cluster(6, b"old") as (cluster, orders):
        cluster.kill(NodeId(13))
        cluster.ask(DeleteTopics(names=("orders",)))
        cluster.until(lambda: all(orders not in cluster.brokers[NodeId(b)].logs.known() for b in (11, 12)))
        again = cluster.topic("orders", BROKERS)
        assert again != orders
        cluster.start_brokers(13)
        cluster.write(again, b"new")
        assert cluster.values(again) == [b"new"]
        # What was deleted while it was down is swept away.
        cluster.until(lambda: cluster.brokers[NodeId(13)].logs.known() == [again])
        cluster.until_equal(again, *BROKERS)


def test_a_reassignment_copies_the_partition_and_the_old_replica_goes() -> None:
    with ReplicationCluster(7, brokers=(*BROKERS, 14)) as cluster:
        orders = cluster.topic("orders", BROKERS)
        written = [b"%d" % number for number in range(20)]
        for value in written:
            cluster.write(orders, value)
        reassign(cluster, "orders", 12, 13, 14)
        cluster.until(lambda: cluster.partition(orders).replicas == (12, 13, 14))
        cluster.until(lambda: orders not in cluster.brokers[NodeId(11)].logs.known())
        cluster.until_in_sync(orders, 12, 13, 14)
        assert cluster.leader(orders) == 12
        cluster.write(orders, b"after")
        assert cluster.values(orders) == [*written, b"after"]
        cluster.until_equal(orders, 12, 13, 14)


@pytest.mark.requirement("a:A-51")
def test_settings_of_a_topic_reach_its_logs_while_they_run() -> None:
    with orders_cluster(8, b"0") as (cluster, orders):
        alter(cluster, "topic", "orders", retention_ms="1234", min_insync_replicas="3")
        cluster.until(lambda: all(cluster.log(b, orders).config.retention_ms == 1234 for b in BROKERS))
        cluster.until(lambda: cluster.leading(orders).state.min_isr == 3)
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        cluster.until(lambda: len(cluster.leading(orders).state.isr) == 2)
        error = cluster.produce(11, orders, batch(b"1")).error
        assert error is not None
        assert error.code is ErrorCode.NOT_ENOUGH_REPLICAS
        alter(cluster, "topic", "orders", min_insync_replicas="2")
        cluster.write(orders, b"1")


@pytest.mark.requirement("a:B-04", "a:B-05", "a:B-12", "b:C-06", "b:C-07", "b:C-19", "b:D-08")
def test_a_follower_that_does_not_follow_leaves_the_in_sync_set_and_comes_back() -> None:
    with orders_cluster(9, b"0") as (cluster, orders):
        # It still beats for the controller, but its way to the leader is gone.
        cluster.network.block(NodeId(13), NodeId(11))
        cluster.network.block(NodeId(11), NodeId(13))
        began_s = cluster.now_s()
        result = cluster.produce(11, orders, batch(b"1"), timeout_ms=30_000)
        assert result.error is None, "it is acknowledged once the lagging one is out"
        assert 9 < cluster.now_s() - began_s < 22
        cluster.until_in_sync(orders, 11, 12)
        assert cluster.brokers[NodeId(11)].replicas.status().under_replicated == 1
        cluster.network.heal()
        cluster.until_whole(orders)
        status = cluster.brokers[NodeId(11)].replicas.status()
        assert (status.isr_shrinks, status.isr_expands, status.under_replicated) == (1, 1, 0)


def test_a_follower_that_is_not_in_sync_catches_up_on_a_stream_of_its_own() -> None:
    with orders_cluster(10, b"0") as (cluster, orders):
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        for _ in range(5):
            cluster.write(orders, bytes(300_000))
        seen: set[str] = set()
        cluster.start_brokers(13, wait=False)

        def is_in_sync() -> bool:
            replica = cluster.brokers[NodeId(13)].replicas.get(orders)
            if replica is not None and isinstance(replica.role, FollowerReplica) and replica.role.stream is not None:
                seen.add(replica.role.stream.service)
            return len(cluster.partition(orders).isr) == 3 and "replication" in seen

        cluster.until(is_in_sync)
        assert seen == {"replication", "replication-catch-up"}
        cluster.until_equal(orders, *BROKERS)


def test_moved_replicas_are_filled_at_the_rate_that_was_set() -> None:
    with ReplicationCluster(11, brokers=(*BROKERS, 14)) as cluster:
        orders = cluster.topic("orders", BROKERS)
        for _ in range(10):
            cluster.write(orders, bytes(100_000))
        alter(cluster, "topic", "orders", leader_replication_throttled_replicas="0:11")
        alter(cluster, "broker", "11", leader_replication_throttled_rate="100000")
        began_s = cluster.now_s()
        reassign(cluster, "orders", 11, 12, 14)
        # In sync replicas are not held back.
        cluster.until(lambda: bool(cluster.partition(orders).adding))
        before_s = cluster.now_s()
        cluster.write(orders, b"quick")
        assert cluster.now_s() - before_s < 1.0
        cluster.until(lambda: cluster.partition(orders).replicas == (11, 12, 14), timeout=60)
        assert 5 < cluster.now_s() - began_s < 20


def test_a_follower_holds_its_acks_back_to_be_filled_at_the_rate_that_was_set() -> None:
    with ReplicationCluster(12) as cluster:
        cluster.replica_config = type(cluster.replica_config)(partition_inflight_bytes_max=100_000)
        cluster.start()
        cluster.start_brokers(*BROKERS, 14)
        orders = cluster.topic("orders", BROKERS)
        for _ in range(10):
            cluster.write(orders, bytes(100_000))
        alter(cluster, "topic", "orders", follower_replication_throttled_replicas="*")
        alter(cluster, "broker", "14", follower_replication_throttled_rate="100000")
        began_s = cluster.now_s()
        reassign(cluster, "orders", 11, 12, 14)
        cluster.until(lambda: cluster.partition(orders).replicas == (11, 12, 14), timeout=60)
        assert 4 < cluster.now_s() - began_s < 30


def test_a_partition_whose_disk_is_slow_at_the_follower_does_not_hold_up_the_others() -> None:
    with ReplicationCluster(13, directories=2, brokers=BROKERS) as cluster:
        slow = cluster.topic("slow", BROKERS)
        cluster.write(slow, b"0")
        quick = cluster.topic("quick", BROKERS)
        cluster.write(quick, b"0")
        logs = cluster.brokers[NodeId(12)].logs
        home, other = logs.directory_of(slow), logs.directory_of(quick)
        assert home is not None
        assert home is not other, "each in a directory of its own"
        label = cluster.brokers[NodeId(12)].labels[logs.directories.index(home)]
        cluster.world.machine("b12").disk(label).begin_stall()
        for _ in range(12):
            assert cluster.produce(11, slow, batch(bytes(500_000)), acks=1).error is None
        before_s = cluster.now_s()
        cluster.write(quick, b"1")
        assert cluster.now_s() - before_s < 1.0
        cluster.world.machine("b12").disk(label).heal()
        cluster.until_equal(slow, *BROKERS, timeout=60)


def test_a_leader_epoch_is_never_kept_across_a_restart() -> None:
    with ReplicationCluster(14, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", [11], configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"0")
        epochs = [cluster.leading(orders).leader_epoch]
        for _ in range(3):
            cluster.kill(NodeId(11))
            cluster.start_brokers(11)
            cluster.write(orders, b"again")
            epochs.append(cluster.leading(orders).leader_epoch)
        assert epochs == sorted(set(epochs)), "each life has its own"
        assert cluster.values(orders) == [b"0", b"again", b"again", b"again"]


def test_brokers_report_the_directories_of_replicas_to_the_controller() -> None:
    with orders_cluster(15, directories=2) as (cluster, orders):
        nil = UUID(int=0)
        cluster.until(lambda: nil not in cluster.partition(orders).directories)
        for broker in BROKERS:
            home = cluster.brokers[NodeId(broker)].logs.directory_of(orders)
            assert home is not None
            assert cluster.partition(orders).directory_of(broker) == home.directory_id
