"""An unclean election elects the live replica that has lost least, on whole brokers in a simulated world."""

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.ids import PartitionId
from tidelog.replication.log_end_reports import REPORT_INTERVAL_S

IN_ORDER = (11, 13, 12)
"""Broker 13 comes before broker 12 in the assignment, and has less."""


def leaderless(cluster: ReplicationCluster, **configs: str) -> PartitionId:
    """Broker 11 had everything and is gone; 12 has ten records, and 13 only six. Both are stopped."""
    cluster.start()
    cluster.start_brokers(*IN_ORDER)
    settings = {"min.insync.replicas": "1", "retention.ms": "-1", **configs}
    orders = cluster.topic("orders", IN_ORDER, configs=settings)
    cluster.write_numbers(orders, 6)
    cluster.until_equal(orders, *IN_ORDER)
    cluster.kill(NodeId(13))
    cluster.until_in_sync(orders, 11, 12)
    for number in range(6, 10):
        cluster.write(orders, b"%d" % number)
    cluster.kill(NodeId(12))
    cluster.until_in_sync(orders, 11)
    cluster.write(orders, b"10")
    return orders


def elect(cluster: ReplicationCluster) -> None:
    cluster.elect("orders", "unclean")


@pytest.mark.parametrize("started", [(12, 13), (13, 12)])
def test_an_admins_unclean_election_elects_the_replica_with_the_longest_log(started: tuple[int, int]) -> None:
    with ReplicationCluster(371) as cluster:
        orders = leaderless(cluster)
        cluster.kill(NodeId(11))
        cluster.start_brokers(*started)
        cluster.until(lambda: cluster.partition(orders).leader == -1)
        elect(cluster)
        assert cluster.leader(orders) == 12
        cluster.until_in_sync(orders, 12, 13)
        assert cluster.log(13, orders).end_offset == 10


def test_an_election_right_after_a_change_of_controllers_waits_for_the_log_ends() -> None:
    with ReplicationCluster(372) as cluster:
        orders = leaderless(cluster)
        cluster.kill(NodeId(11))
        cluster.start_brokers(12, 13)
        cluster.world.run_for(2 * REPORT_INTERVAL_S)
        cluster.kill(cluster.active())
        elect(cluster)
        assert cluster.leader(orders) == 12


def test_an_election_does_not_wait_for_ever_for_a_broker_that_reports_nothing() -> None:
    with ReplicationCluster(373) as cluster:
        orders = leaderless(cluster)
        cluster.kill(NodeId(11))
        cluster.start_brokers(12, 13)
        for controller in cluster.controllers:
            cluster.network.block(NodeId(12), controller)
        began_s = cluster.now_s()
        elect(cluster)
        assert cluster.now_s() - began_s < 3
        assert cluster.partition(orders).leader in (12, 13)


def test_an_automatic_unclean_election_elects_the_longest_log_among_those_that_are_catching_up() -> None:
    with ReplicationCluster(374) as cluster:
        orders = leaderless(cluster, **{"unclean.leader.election.enable": "true"})
        for broker in (12, 13):  # they are live, and cannot catch up
            cluster.network.block(NodeId(11), NodeId(broker))
            cluster.network.block(NodeId(broker), NodeId(11))
        cluster.start_brokers(13, 12)
        cluster.world.run_for(2 * REPORT_INTERVAL_S)
        assert cluster.partition(orders).isr == (11,)
        cluster.kill(NodeId(11))
        cluster.until(lambda: cluster.partition(orders).leader in (12, 13), timeout=60)
        assert cluster.partition(orders).leader == 12


def test_a_broker_reports_nothing_of_a_topic_that_is_deleted_while_its_replica_is_still_there() -> None:
    with ReplicationCluster(376) as cluster:
        orders = leaderless(cluster, **{"unclean.leader.election.enable": "true"})
        cluster.topic("other", (11,), configs={"retention.ms": "-1"})  # some topic still has settings of its own
        cluster.network.block(NodeId(11), NodeId(13))
        cluster.network.block(NodeId(13), NodeId(11))
        cluster.start_brokers(13)
        replica, replicas = cluster.replica(13, orders), cluster.brokers[NodeId(13)].replicas
        cluster.until(lambda: replica.log is not None)
        log = replica.log
        assert len(list(replicas.log_end_reports._ends([replica]))) == 1
        cluster.ask(DeleteTopics(names=("orders",)))
        cluster.until(lambda: orders.topic_id not in replicas.image.topics)
        replica.log = log
        assert list(replicas.log_end_reports._ends([replica])) == []


def test_a_change_of_settings_that_allows_an_unclean_election_elects_the_longest_log() -> None:
    with ReplicationCluster(375) as cluster:
        orders = leaderless(cluster)
        cluster.kill(NodeId(11))
        cluster.start_brokers(12, 13)
        cluster.world.run_for(2 * REPORT_INTERVAL_S)
        change = ConfigChange(key="unclean.leader.election.enable", operation="set", value="true")
        cluster.ask(
            AlterConfigs(resources=(ResourceChange(resource_type="topic", resource="orders", changes=(change,)),))
        )
        assert cluster.leader(orders) == 12
