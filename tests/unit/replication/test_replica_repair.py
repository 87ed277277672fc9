"""Logs that have lost data: out of the in-sync set, mended from the leader, back."""

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, RunningBroker, batch, orders_cluster, values_of
from test_replicas import BROKERS

from tidelog.log.log import Damage
from tidelog.metadata.lost_replicas import ReplicasLost
from tidelog.metadata.partitions import AlteredPartition, AlterPartition
from tidelog.model.errors import TransportError
from tidelog.model.ids import Offset, PartitionId
from tidelog.replication.startup_report import lost_replicas
from tidelog.world.simulated import Loss


def filled(cluster: ReplicationCluster) -> PartitionId:
    """Three brokers, and a topic with the values 0 to 5 on all of them."""
    cluster.start()
    cluster.start_brokers(*BROKERS)
    orders = cluster.topic("orders", BROKERS)
    cluster.write_numbers(orders, 6)
    cluster.until_equal(orders, *BROKERS)
    return orders


def segment(cluster: ReplicationCluster, broker: int, partition: PartitionId) -> str:
    return cluster.log(broker, partition).segments.active_path()


def damage(cluster: ReplicationCluster, broker: int, partition: PartitionId, good_end: int) -> None:
    async def mark(found: RunningBroker) -> None:
        log = found.logs.get(partition)
        assert log is not None
        await log.mark_damaged(Damage(Offset(good_end), "rot, found by a scrub"))

    cluster.on_broker(broker, mark)


@pytest.mark.case("S2")
def test_a_follower_whose_log_is_damaged_fetches_the_range_again() -> None:
    with ReplicationCluster(301) as cluster:
        orders = filled(cluster)
        epoch = cluster.partition(orders).partition_epoch
        damage(cluster, 12, orders, 2)
        cluster.until(lambda: cluster.log(12, orders).damaged is None)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.partition(orders).partition_epoch > epoch, "it has left the in-sync set first"
        cluster.until_whole(orders)
        cluster.kill(NodeId(11))
        assert cluster.leader(orders) == 12
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == [b"%d" % number for number in range(6)]


@pytest.mark.case("S2")
def test_a_leader_whose_log_is_damaged_gives_up_leading_and_is_mended() -> None:
    with orders_cluster(302) as (cluster, orders):
        cluster.write_numbers(orders, 6)
        damage(cluster, 11, orders, 3)
        cluster.until(lambda: cluster._leader(orders) == 12)
        cluster.write(orders, b"6")
        cluster.until_whole(orders)
        assert cluster.log(11, orders).damaged is None
        assert cluster.values(orders) == [b"%d" % number for number in range(7)]


@pytest.mark.case("S2")
def test_rot_that_a_reader_meets_on_the_leader_is_mended_from_the_others() -> None:
    with ReplicationCluster(303) as cluster:
        orders = filled(cluster)
        size = cluster.log(11, orders).size // 6
        # The length of the third batch is nonsense.
        cluster.world.machine("b11").disk("logs-0").overwrite(segment(cluster, 11, orders), 2 * size + 8, b"\xff" * 4)
        result = cluster.fetch(11, orders, 2)
        assert result.error is not None, "rot is not handed out"
        cluster.until(lambda: cluster._leader(orders) == 12)
        cluster.until_whole(orders)
        assert cluster.values(orders) == [b"%d" % number for number in range(6)]


@pytest.mark.case("S2")
def test_a_log_corrupt_below_its_synced_end_is_reported_at_registration_and_fetched_again() -> None:
    with ReplicationCluster(304) as cluster:
        orders = filled(cluster)
        cluster.world.run_for(2)  # the recovery point is stored
        path = segment(cluster, 12, orders)
        cluster.lose_power(12, Loss.NONE if hasattr(Loss, "NONE") else Loss.SOME)
        cluster.world.machine("b12").disk("logs-0").cut(path, 100)
        cluster.start_brokers(12)
        cluster.until_whole(orders)
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders, broker=leader) == [b"%d" % number for number in range(6)]


@pytest.mark.case("S2")
def test_a_follower_that_cannot_be_cut_for_rot_in_front_is_mended() -> None:
    """Seed 45 (brokers): it tried the cut again and again, and never came back."""
    with ReplicationCluster(308) as cluster:
        orders = filled(cluster)
        cluster.world.run_for(2)  # the recovery point is stored: what lies below is not read at the start
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        cluster.produce(11, orders, batch(b"nobody else has this"), acks=1)
        path = segment(cluster, 11, orders)
        size = cluster.log(12, orders).size // 6
        cluster.kill(NodeId(11))
        cluster.network.heal()
        cluster.write(orders, b"6")
        cluster.world.machine("b11").disk("logs-0").overwrite(path, 2 * size + 8, b"\xff" * 4)
        cluster.start_brokers(11)
        cluster.until_whole(orders)
        assert cluster.log(11, orders).damaged is None
        assert _all_of(cluster, 11, orders) == [b"%d" % number for number in range(7)]


def _all_of(cluster: ReplicationCluster, broker: int, partition: PartitionId) -> list[bytes]:
    """As its log has it, whatever its role is."""

    async def read(found: RunningBroker) -> list[bytes]:
        log = found.logs.get(partition)
        assert log is not None
        return values_of((await log.read(log.start_offset, bytes_max=1 << 20)).data)

    return cluster.on_broker(broker, read)


def test_the_only_replica_that_is_damaged_waits_for_an_admin_and_then_leads_with_what_it_has() -> None:
    with ReplicationCluster(305, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", [11], configs={"min.insync.replicas": "1"})
        cluster.write_numbers(orders, 5)
        damage(cluster, 11, orders, 3)
        cluster.until(lambda: cluster.partition(orders).leader == -1)
        cluster.world.run_for(5)
        assert cluster.partition(orders).leader == -1
        assert cluster.log(11, orders).damaged is not None, "nothing is thrown away by itself"
        cluster.elect("orders", "unclean")
        cluster.leader(orders)
        assert cluster.values(orders) == [b"0", b"1", b"2"]
        assert cluster.write(orders, b"new").base_offset == 3


def test_a_log_that_is_gone_is_known_as_lost_and_one_that_never_was_is_not() -> None:
    with orders_cluster(306, b"0") as (cluster, orders):
        cluster.world.run_for(2)
        path = cluster.log(12, orders).path
        cluster.kill(NodeId(12))
        node = cluster.world.machine("b12").boot()
        node.disk("logs-0").remove_directory(path)
        cluster.world.machine("b12").kill()
        cluster.start_brokers(12, wait=False)
        found = cluster.brokers[NodeId(12)]
        cluster.until(lambda: found.agent.registration.lost == ((orders.topic_id, 0),))
        assert lost_replicas(found.logs, cluster.image(), 14) == ()
        cluster.until_whole(orders)


def drop(cluster: ReplicationCluster, partition_id: PartitionId, broker: int) -> None:
    """The in-sync set without this one, as the leader would propose it."""
    partition, brokers = cluster.partition(partition_id), cluster.image().brokers
    item = AlteredPartition(
        topic_id=partition_id.topic_id,
        partition=partition_id.partition,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        isr=tuple((member, brokers[member].broker_epoch) for member in partition.isr if member != broker),
    )
    request = AlterPartition(
        broker=partition.leader, broker_epoch=brokers[partition.leader].broker_epoch, partitions=(item,)
    )
    (state,) = cluster.on(cluster.active(), lambda controller: controller.submit(request)).partitions
    assert state.error is None, state.message


def test_a_damaged_log_outside_of_the_in_sync_set_is_not_cut_before_its_loss_is_acknowledged() -> None:
    """Its leader may be taking it back by what it acknowledged before."""
    with ReplicationCluster(307) as cluster:
        orders = filled(cluster)
        agent = cluster.brokers[NodeId(12)].agent
        ask = agent.ask

        async def not_reported(request: object) -> object:
            if isinstance(request, ReplicasLost):
                raise TransportError("no controller hears of it")
            return await ask(request)

        agent.ask = not_reported  # type: ignore[method-assign]
        epoch = cluster.partition(orders).leader_epoch
        damage(cluster, 12, orders, 2)
        cluster.world.run_for(1)
        drop(cluster, orders, 12)
        tail = cluster.brokers[NodeId(12)].tail
        cluster.until(lambda: 12 not in tail.image.topics[orders.topic_id].partitions[0].isr)
        cluster.world.run_for(3)
        assert cluster.log(12, orders).damaged is not None, "it waits for the acknowledgement"
        assert cluster.partition(orders).leader_epoch == epoch
        agent.ask = ask  # type: ignore[method-assign]
        cluster.until(lambda: cluster.log(12, orders).damaged is None)
        assert cluster.partition(orders).leader_epoch > epoch
        cluster.until_whole(orders)
