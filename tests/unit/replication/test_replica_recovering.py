"""A broker that starts after a crash serves what it can while it recovers the rest."""

from support.brokers.cluster import NodeId, ReplicationCluster, batch
from test_replica_repair import filled
from test_replicas import BROKERS

from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.errors import LeaderNotAvailableError, TransportError
from tidelog.model.ids import PartitionId
from tidelog.replication.replica import ReplicaConfig
from tidelog.world.simulated import Loss


def hold(cluster: ReplicationCluster, broker: int, *partitions: PartitionId) -> None:
    """Their logs will not be read when this broker starts again."""
    cluster.held.setdefault(broker, set()).update(cluster.log(broker, partition).path for partition in partitions)


def let_go(cluster: ReplicationCluster, broker: int) -> None:
    cluster.held[broker].clear()


def test_a_follower_gets_back_in_sync_where_its_log_is_open_and_can_lead_there() -> None:
    with ReplicationCluster(601, brokers=BROKERS) as cluster:
        slow, quick = cluster.topic("slow", BROKERS), cluster.topic("quick", BROKERS)
        cluster.write_numbers(slow, 3)
        cluster.write_numbers(quick, 3)
        hold(cluster, 12, slow)
        cluster.lose_power(12)
        cluster.write(slow, b"3")
        cluster.write(quick, b"3")
        cluster.start_brokers(12)
        cluster.until_in_sync(quick, *BROKERS)
        assert set(cluster.partition(slow).isr) == {11, 13}
        assert cluster.replica(12, slow).role is None, "it neither follows nor leads"
        cluster.write(slow, b"4")
        cluster.kill(NodeId(11))
        cluster.kill(NodeId(13))
        assert cluster.leader(quick) == 12, "it was in sync there"
        assert cluster.partition(slow).leader == -1, "and not here"
        cluster.start_brokers(11, 13)
        let_go(cluster, 12)
        for partition, count in ((slow, 5), (quick, 4)):
            cluster.until_in_sync(partition, *BROKERS)
            cluster.until_equal(partition, *BROKERS)
            assert cluster.values(partition) == [b"%d" % number for number in range(count)]


def test_the_only_replica_of_a_partition_leads_it_as_soon_as_its_own_log_is_open() -> None:
    with ReplicationCluster(602, brokers=(11,)) as cluster:
        one = {"min.insync.replicas": "1"}
        slow, quick = cluster.topic("slow", [11], configs=one), cluster.topic("quick", [11], configs=one)
        cluster.write(slow, b"slow")
        cluster.write(quick, b"quick")
        hold(cluster, 11, slow)
        cluster.lose_power(11)
        cluster.start_brokers(11)
        assert cluster.leader(quick) == 11
        cluster.write(quick, b"more")
        assert cluster.values(quick) == [b"quick", b"more"]
        refused = cluster.produce(11, slow, batch(b"early"))
        assert isinstance(refused.error, LeaderNotAvailableError), "a client asks again"
        assert refused.error.retriable
        assert cluster.fetch(11, slow).error is not None
        assert cluster.partition(slow).recovering == (11,)
        let_go(cluster, 11)
        cluster.leader(slow)
        cluster.write(slow, b"late")
        assert cluster.values(slow) == [b"slow", b"late"]
        assert cluster.partition(slow).recovering == ()


def test_damage_that_is_found_after_the_broker_was_let_in_loses_nothing_and_is_mended() -> None:
    with ReplicationCluster(603) as cluster:
        orders = filled(cluster)
        cluster.world.run_for(2)  # the recovery point is stored
        log = cluster.log(12, orders)
        path = log.segments.active_path()
        hold(cluster, 12, orders)
        for broker in (11, 13, 12):
            cluster.lose_power(broker, Loss.SOME)
            cluster.world.run_for(12)  # it is fenced
        cluster.world.machine("b12").disk("logs-0").cut(path, 100)
        cluster.start_brokers(12)
        found = cluster.partition(orders)
        assert (found.leader, 12 in found.eligible, found.recovering) == (-1, True, (12,)), "nobody knows yet"
        (outcome,) = cluster.ask(ElectLeaders(kind="preferred", partitions=(("orders", 0),))).items
        assert outcome.error is not None
        let_go(cluster, 12)
        cluster.until(lambda: 12 not in cluster.partition(orders).eligible)
        cluster.world.run_for(2)
        assert cluster.partition(orders).leader == -1, "what it has left is not enough to lead"
        assert cluster.log(12, orders).damaged is not None, "nothing is thrown away by itself"
        cluster.start_brokers(13)
        assert cluster.leader(orders) == 13
        cluster.start_brokers(11)
        cluster.until_whole(orders)
        assert cluster.log(12, orders).damaged is None
        assert cluster.values(orders) == [b"%d" % number for number in range(6)]
        cluster.write(orders, b"6")


def test_slow_logs_delay_no_other_however_few_workers_reconcile_replicas() -> None:
    with ReplicationCluster(604, replica_config=ReplicaConfig(reconcilers_max=1), brokers=(11,)) as cluster:
        one = {"min.insync.replicas": "1"}
        slow = [cluster.topic(f"slow-{number}", [11], configs=one) for number in range(3)]
        quick = cluster.topic("quick", [11], configs=one)
        for partition in (*slow, quick):
            cluster.write(partition, b"x")
        hold(cluster, 11, *slow)
        cluster.lose_power(11)
        cluster.start_brokers(11)
        cluster.write(quick, b"y")
        new = cluster.topic("new", [11], configs=one)
        cluster.write(new, b"z")
        let_go(cluster, 11)
        for partition in slow:
            cluster.leader(partition)
            assert cluster.values(partition) == [b"x"]


def test_a_topic_that_is_deleted_while_its_log_is_recovered_goes_when_that_is_done() -> None:
    with ReplicationCluster(605, brokers=(11,)) as cluster:
        one = {"min.insync.replicas": "1"}
        slow, quick = cluster.topic("slow", [11], configs=one), cluster.topic("quick", [11], configs=one)
        cluster.write(slow, b"x")
        cluster.write(quick, b"x")
        hold(cluster, 11, slow)
        cluster.lose_power(11)
        cluster.start_brokers(11)
        cluster.leader(quick)
        (outcome,) = cluster.ask(DeleteTopics(names=("slow",))).items
        assert outcome.error is None
        cluster.write(quick, b"y")
        let_go(cluster, 11)
        cluster.until(lambda: slow not in cluster.brokers[NodeId(11)].logs.known())


def test_a_report_that_is_not_answered_is_made_again() -> None:
    with ReplicationCluster(606, brokers=(11,)) as cluster:
        slow = cluster.topic("slow", [11], configs={"min.insync.replicas": "1"})
        cluster.write(slow, b"x")
        hold(cluster, 11, slow)
        cluster.lose_power(11)
        cluster.start_brokers(11)
        agent = cluster.brokers[NodeId(11)].agent
        ask, refused = agent.ask, list[object]()

        async def deaf(request: object) -> object:
            if len(refused) < 2:
                refused.append(request)
                raise TransportError("no answer")
            return await ask(request)

        agent.ask = deaf  # type: ignore[method-assign]
        let_go(cluster, 11)
        cluster.leader(slow)
        assert len(refused) == 2
        assert cluster.values(slow) == [b"x"]


def test_a_broker_whose_logs_are_open_in_time_registers_as_one_that_recovers_nothing() -> None:
    with ReplicationCluster(607, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", [11], configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"x")
        epoch = cluster.partition(orders).partition_epoch
        cluster.stop(11)
        cluster.start_brokers(11)
        assert not cluster.brokers[NodeId(11)].agent.registration.is_recovering
        cluster.leader(orders)
        assert cluster.partition(orders).partition_epoch > epoch
        assert cluster.produce(11, orders, batch(b"y")).error is None


def test_a_marked_replica_that_never_had_a_log_does_not_hold_up_an_election() -> None:
    """Seed 12 of the broker runs: a page-cache partition whose replicas all stopped before they had created its log."""
    with ReplicationCluster(608, brokers=(11,)) as cluster:
        slow = cluster.topic("slow", [11], configs={"min.insync.replicas": "1"})
        cluster.write(slow, b"slow")
        hold(cluster, 11, slow)
        disk = cluster.world.machine("b11").disk("logs-0")
        disk.begin_stall()
        cached = cluster.topic("cached", [11], configs={"flush.mode": "page-cache"}, wait=False)
        cluster.until(lambda: cached.topic_id in cluster.image().topics)
        cluster.lose_power(11)
        disk.heal()
        cluster.start_brokers(11)
        cluster.until(lambda: cluster.partition(slow).recovering == (11,))
        assert (cluster.partition(cached).leader, cluster.partition(cached).eligible) == (-1, ()), "it stopped unsynced"
        cluster.until(lambda: cluster.partition(cached).recovering == ())
        cluster.elect("cached", "unclean")
        cluster.write(cached, b"first")
        assert cluster.values(cached) == [b"first"]
        let_go(cluster, 11)
        cluster.write(slow, b"late")
