"""How replicas are filled: from the device, with gaps, in page-cache mode, after missed epochs, within their bounds."""

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, batch, orders_cluster
from test_replicas import BROKERS, alter, reassign

from tidelog.model.errors import InvalidRequestError, StreamBrokenError, StreamClosedError
from tidelog.model.ids import Offset
from tidelog.replication.messages import MAIN, Ack, Acks, Subscribe
from tidelog.replication.replica import ReplicaConfig
from tidelog.replication.wire import encode
from tidelog.world.simulated import Loss, SimNode


def test_a_follower_far_behind_is_filled_from_the_device_while_others_are_served() -> None:
    config = ReplicaConfig(fetch_message_bytes=50_000, partition_inflight_bytes_max=100_000, cold_reads_max=2)
    with ReplicationCluster(701, replica_config=config, brokers=BROKERS) as cluster:
        partitions = [cluster.topic(f"t{number}", BROKERS, configs={"segment.bytes": "1048576"}) for number in range(4)]
        cluster.kill(NodeId(13))
        for partition in partitions:
            cluster.until_in_sync(partition, 11, 12)
            for _ in range(12):
                cluster.write(partition, bytes(120_000))
        device = cluster.world.machine("b11").disk("logs-0")
        device.evict()
        device.cold_read_probability = 0.8
        cluster.start_brokers(13)
        for partition in partitions:
            cluster.until_in_sync(partition, *BROKERS)
            cluster.until_equal(partition, *BROKERS)


def test_what_is_pushed_and_not_durable_stays_within_the_bound_of_the_partition() -> None:
    config = ReplicaConfig(partition_inflight_bytes_max=50_000)
    with orders_cluster(702, b"0", replica_config=config) as (cluster, orders):
        cluster.world.machine("b12").disk("logs-0").begin_stall()
        for _ in range(20):
            assert cluster.produce(11, orders, batch(bytes(10_000)), acks=0).error is None
        cluster.world.run_for(0.5)
        subscription = cluster.leading(orders).subscriptions[12]
        assert 40_000 < subscription.unacked_bytes <= 61_000
        assert cluster.log(12, orders).end_offset < 10, "the rest waits at the leader"
        cluster.world.machine("b12").disk("logs-0").heal()
        cluster.until_equal(orders, *BROKERS)


def test_compacted_logs_are_followed_over_their_gaps() -> None:
    with ReplicationCluster(703, brokers=(*BROKERS, 14)) as cluster:
        settings = {"cleanup.policy": "compact", "segment.bytes": "1048576", "min.cleanable.dirty.ratio": "0.01"}
        orders = cluster.topic("orders", BROKERS, configs=settings)
        for number in range(12):
            cluster.write(orders, b"%d" % number + bytes(300_000))
        # All records have one key: what is sealed shrinks to its last.
        cluster.until(lambda: cluster.log(11, orders).segments.sealed[0].size < 700_000, timeout=120)
        # Followers that were made later must be notified of gaps that their own settings do not show.
        alter(cluster, "topic", "orders", cleanup_policy="delete")
        cluster.until(lambda: not cluster.log(11, orders).config.cleanup_compact)
        reassign(cluster, "orders", 11, 12, 14)
        cluster.until(lambda: cluster.partition(orders).replicas == (11, 12, 14), timeout=60)
        cluster.write(orders, b"last")
        cluster.until_equal(orders, 11, 12, 14)
        assert cluster.log(14, orders).gaps
        assert cluster.values(orders)[-1] == b"last"


@pytest.mark.requirement("a:B-42")
def test_with_page_cache_a_record_counts_when_it_is_written() -> None:
    with ReplicationCluster(704, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"flush.mode": "page-cache"})
        cluster.write(orders, b"0")
        for broker in BROKERS:
            cluster.world.machine(f"b{broker}").disk("logs-0").begin_stall()
        before_s = cluster.now_s()
        assert cluster.produce(11, orders, batch(b"1")).error is None
        assert cluster.now_s() - before_s < 0.5, "no sync was waited for"
        for broker in BROKERS:
            cluster.world.machine(f"b{broker}").disk("logs-0").heal()
        alter(cluster, "topic", "orders", flush_mode="sync")
        cluster.until(lambda: all(cluster.log(b, orders).durable_end == 2 for b in BROKERS))
        cluster.write(orders, b"2")
        cluster.until_equal(orders, *BROKERS)
        # After an unclean stop a page-cache replica vouches for nothing; a synced one does.
        cluster.lose_power(12, Loss.ALL)
        cluster.start_brokers(12)
        cluster.until_whole(orders)


@pytest.mark.case("T5")
def test_t5_a_follower_that_missed_epochs_of_the_same_leader_still_cuts_its_log() -> None:
    with ReplicationCluster(705, brokers=(11, 12)) as cluster:
        orders = cluster.topic("orders", [11, 12], configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"0")
        cluster.until_equal(orders, 11, 12)
        # 12 takes a record that 11 has not synced, and is cut off; 11 loses the record with its power.
        cluster.world.machine("b11").disk("logs-0").begin_stall()
        assert cluster.produce(11, orders, batch(b"never synced by 11"), acks=0).error is None
        cluster.until(lambda: cluster.log(12, orders).durable_end == 2)
        first_epoch = cluster.partition(orders).leader_epoch
        cluster.kill(NodeId(12))
        cluster.until_in_sync(orders, 11)
        for _ in range(2):
            cluster.lose_power(11, Loss.ALL)
            cluster.world.machine("b11").heal()
            cluster.start_brokers(11)
            cluster.leader(orders)
        cluster.write(orders, b"other")
        assert cluster.partition(orders).leader_epoch >= first_epoch + 2, "epochs that 12 has not seen"
        cluster.start_brokers(12)
        cluster.until_in_sync(orders, 11, 12)
        cluster.until_equal(orders, 11, 12)
        assert cluster.values(orders) == [b"0", b"other"]


@pytest.mark.requirement("a:A-45")
def test_retention_never_takes_what_is_not_committed() -> None:
    with ReplicationCluster(706, brokers=BROKERS) as cluster:
        alter(cluster, "cluster", "", log_retention_check_interval_ms="1000")
        settings = {"segment.bytes": "1048576", "retention.bytes": "1"}
        orders = cluster.topic("orders", BROKERS, configs=settings)
        for broker in (12, 13):
            cluster.network.block(NodeId(broker), NodeId(11))
        for _ in range(8):
            assert cluster.produce(11, orders, batch(bytes(400_000)), acks=1).error is None
        cluster.world.run_for(4)
        assert cluster.log(11, orders).start_offset == 0, "nothing is committed, nothing goes"
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).high_watermark == 8)
        cluster.until(lambda: cluster.log(11, orders).start_offset > 0)
        assert all(cluster.log(b, orders).start_offset <= cluster.replica(b, orders).high_watermark for b in BROKERS)
        cluster.write(orders, b"on")


def test_a_broker_that_is_closed_leads_and_follows_nothing_and_leaves_no_task() -> None:
    with orders_cluster(707, b"0") as (cluster, _):
        found = cluster.brokers[NodeId(12)]
        cluster.on_broker(12, lambda broker: broker.replicas.close())
        assert len(found.replicas.tasks) == 0
        status = found.replicas.status()
        assert (status.leaders, status.followers) == (0, 0)


def test_a_follower_that_acks_what_it_was_never_sent_is_cut_off() -> None:
    with ReplicationCluster(708, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", [11, 12, 13])
        cluster.write(orders, b"0")
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        partition = cluster.partition(orders)
        impostor = cluster.world.machine("impostor").boot()
        transport = cluster.network.join(impostor, NodeId(13))
        asked = Subscribe(
            partition=orders,
            number=1,
            leader_epoch=partition.leader_epoch,
            broker_epoch=cluster.image().brokers[13].broker_epoch,
            next_offset=1,
            last_epoch=partition.leader_epoch,
            durable_end=1,
        )

        async def lie(_: SimNode) -> str:
            await transport.start()
            stream = await transport.open_stream(NodeId(11), MAIN)
            await stream.send(encode(asked))
            await stream.receive()
            await stream.send(encode(Acks(0, (Ack(1, partition.leader_epoch, 99),))))
            try:
                while True:
                    await stream.receive()
            except (StreamBrokenError, StreamClosedError):
                return "cut off"

        assert cluster.world.run(impostor, lie, timeout=20) == "cut off"
        assert cluster.leading(orders).high_watermark == 1
        assert 13 not in cluster.leading(orders).subscriptions
        with pytest.raises(InvalidRequestError):
            cluster.leading(orders).state.acked(12, 10_000, Offset(99), 0)
