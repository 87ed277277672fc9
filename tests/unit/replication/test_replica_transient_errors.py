"""Errors that may pass, at the opening of a log or under a leader's reads: nothing is lost, nobody stops for good."""

import errno
import struct

import pytest
from support.brokers.cluster import NodeId, ReplicationCluster, batch
from test_replicas import BROKERS

from tidelog.metadata.partitions import ElectLeaders
from tidelog.model.errors import LeaderNotAvailableError
from tidelog.model.ids import PartitionId
from tidelog.world.simulated import Loss

VALUES = [b"%d" % number for number in range(50)]


def filled(cluster: ReplicationCluster) -> PartitionId:
    cluster.start()
    cluster.start_brokers(*BROKERS)
    orders = cluster.topic("orders", BROKERS)
    for value in VALUES:
        cluster.write(orders, value)
    cluster.until_equal(orders, *BROKERS)
    return orders


def until_confirmed(cluster: ReplicationCluster, partition: PartitionId) -> None:
    cluster.until(lambda: cluster.leading(partition).state.is_confirmed)


def fail_opening(cluster: ReplicationCluster, path: str, number: int, times: int) -> None:
    for broker in BROKERS:
        cluster.world.machine(f"b{broker}").disk("logs-0").fail("open", number=number, times=times, path=path)


@pytest.mark.parametrize("name", ["EMFILE", "EACCES", "EIO", "ENOMEM"])
@pytest.mark.parametrize("times", [1, 6])
def test_an_error_at_the_opening_of_every_replica_loses_nothing(name: str, times: int) -> None:
    with ReplicationCluster(331) as cluster:
        orders = filled(cluster)
        path = cluster.log(11, orders).segments.active_path()
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        fail_opening(cluster, path, getattr(errno, name), times)
        cluster.start_brokers(*BROKERS)
        cluster.leader(orders)
        until_confirmed(cluster, orders)
        cluster.until_in_sync(orders, *BROKERS)
        assert cluster.values(orders) == VALUES


@pytest.mark.parametrize("replicas", [(11,), BROKERS])
def test_helpers_that_die_while_every_replica_is_read_lose_nothing(replicas: tuple[int, ...]) -> None:
    with ReplicationCluster(332, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", replicas)
        for value in VALUES:
            cluster.write(orders, value)
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        cluster.start_brokers(*BROKERS, wait=False)
        for broker in BROKERS:
            cluster.brokers[NodeId(broker)].node.work.deaths["scan_log"] = 12
        cluster.leader(orders)
        until_confirmed(cluster, orders)
        assert cluster.values(orders) == VALUES


def test_a_replica_whose_log_does_not_open_stays_recovering_and_clients_may_retry() -> None:
    with ReplicationCluster(333) as cluster:
        orders = filled(cluster)
        path = cluster.log(11, orders).segments.active_path()
        for broker in BROKERS:
            cluster.lose_power(broker, Loss.ALL)
        fail_opening(cluster, path, errno.EIO, 100_000)
        cluster.start_brokers(*BROKERS)
        cluster.world.run_for(60)
        partition = cluster.partition(orders)
        assert partition.leader == -1
        assert len(partition.eligible) == 2, "the first to leave was not needed"
        assert set(partition.eligible) <= set(partition.recovering)
        refused = cluster.produce(11, orders, batch(b"x")).error
        assert isinstance(refused, LeaderNotAvailableError)
        assert refused.retriable
        assert cluster.brokers[NodeId(11)].replicas.status().offline == 1, "it is reported"
        # An admin who asks for it does not throw away what is merely not open.
        (outcome,) = cluster.ask(ElectLeaders(kind="unclean", partitions=(("orders", 0),))).items
        assert outcome.error is not None
        assert ", ".join(map(str, partition.eligible)) in outcome.message, "they are named"
        for broker in BROKERS:
            cluster.world.machine(f"b{broker}").disk("logs-0").heal()
        cluster.leader(orders)
        cluster.until(lambda: cluster.brokers[NodeId(11)].replicas.status().offline == 0)
        until_confirmed(cluster, orders)
        assert cluster.values(orders) == VALUES


def test_a_follower_goes_on_after_helpers_die_while_its_leader_rebuilds_an_index() -> None:
    with ReplicationCluster(77, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"segment.bytes": "4000", "index.interval.bytes": "300"})
        for _ in range(3):
            cluster.write(orders, b"x" * 200)
        cluster.until_equal(orders, *BROKERS)
        cluster.kill(NodeId(13))
        for number in range(60):
            cluster.write(orders, b"%d" % number + b"y" * 150)
        log = cluster.log(11, orders)
        cluster.world.run_for(3)
        device = cluster.world.machine("b11").disk("logs-0")
        path = log.segments.file_path(log.segments.find(3).base_offset, ".index")
        wrong = b"".join(struct.pack(">ii", at, to + 1) for at, to in struct.iter_unpack(">ii", device.raw(path)))
        device.overwrite(path, 0, wrong)
        log.context.files.discard(path)
        log.segments.forget_hints()
        work = cluster.brokers[NodeId(11)].node.work
        work.dying.add("build_indexes")
        cluster.start_brokers(13)
        cluster.world.run_for(5)
        assert cluster.log(13, orders).end_offset == 3, "it cannot be served now"
        work.dying.clear()
        cluster.until_whole(orders)
