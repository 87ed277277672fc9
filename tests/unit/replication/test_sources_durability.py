"""What the sources say of loss: which acknowledgements survive which failures, and what a failing disk takes along."""

from __future__ import annotations

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, batch, orders_cluster
from test_replicas import BROKERS

from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.services.produce import ProduceItem
from tidelog.world.simulated import Loss


def code(error: TidelogError | None) -> ErrorCode | None:
    return None if error is None else error.code


def keep_from_followers(cluster: ReplicationCluster, leader: int) -> None:
    """Nothing that the leader writes from now on reaches anybody."""
    for broker in BROKERS:
        if broker != leader:
            cluster.network.block(NodeId(leader), NodeId(broker))


@pytest.mark.requirement("a:T-01", "a:X3-22", "b:D-03")
def test_acks_1_may_be_lost_with_the_leader_and_acks_all_is_then_not_given() -> None:
    with orders_cluster(801, b"everywhere") as (cluster, orders):
        keep_from_followers(cluster, 11)
        assert cluster.produce(11, orders, batch(b"acks=1"), acks=1).error is None
        assert code(cluster.produce(11, orders, batch(b"acks=all"), timeout_ms=300).error) is (
            ErrorCode.REQUEST_TIMED_OUT
        )
        cluster.kill(NodeId(11))
        cluster.network.heal()
        assert cluster.leader(orders) == 12
        cluster.write(orders, b"after")
        assert cluster.values(orders) == [b"everywhere", b"after"], "what only the leader had is gone"
        cluster.start_brokers(11)
        cluster.until_whole(orders)
        assert cluster.values(orders) == [b"everywhere", b"after"], "and does not come back with it"


@pytest.mark.requirement("b:D-04")
def test_acks_0_is_lost_without_a_word() -> None:
    with ReplicationCluster(802, brokers=(11,)) as cluster:
        orders = cluster.topic("orders", [11])
        cluster.write(orders, b"0")
        cluster.world.machine("b11").disk("logs-0").begin_stall()
        result = cluster.produce(11, orders, batch(b"1"), acks=0)
        assert result.error is None, "nobody waits for the disk"
        cluster.lose_power(11, Loss.ALL)
        cluster.world.machine("b11").heal()
        cluster.start_brokers(11)
        cluster.leader(orders)
        assert cluster.values(orders) == [b"0"]


@pytest.mark.requirement("a:X3-23", "b:D-02")
def test_without_a_leader_a_write_is_refused_and_may_be_tried_again_until_there_is_one() -> None:
    with orders_cluster(803) as (cluster, orders):
        cluster.kill(NodeId(13))
        cluster.until_in_sync(orders, 11, 12)
        cluster.write(orders, b"0")
        for broker in (11, 12):
            cluster.kill(NodeId(broker))
        cluster.start_brokers(13)
        cluster.until(lambda: cluster.partition(orders).leader == -1)
        for acks in (1, -1):
            result = cluster.produce(13, orders, batch(b"1"), acks=acks)
            assert code(result.error) is ErrorCode.LEADER_NOT_AVAILABLE
            assert result.error is not None
            assert result.error.retriable
        cluster.start_brokers(11, 12)
        cluster.write(orders, b"1")
        assert cluster.values(orders) == [b"0", b"1"]


@pytest.mark.requirement("b:A-18", "b:C-10")
def test_one_in_sync_replica_is_enough_to_keep_what_is_committed() -> None:
    with ReplicationCluster(804, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"min.insync.replicas": "1"})
        written = []
        for left in ((11, 12, 13), (12, 13), (13,)):
            cluster.until_in_sync(orders, *left)
            assert cluster.leader(orders) == left[0]
            written.append(b"%d left" % len(left))
            cluster.write(orders, written[-1])
            assert cluster.values(orders) == written
            if len(left) > 1:
                cluster.lose_power(left[0], Loss.ALL)


@pytest.mark.requirement("a:X3-4", "a:B-07", "b:B-02", "a:S-03")
@pytest.mark.parametrize("is_unclean", [False, True])
def test_a_replica_out_of_sync_leads_only_by_an_unclean_election_which_loses_just_what_it_lacks(
    is_unclean: bool,
) -> None:
    with ReplicationCluster(805, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", BROKERS, configs={"min.insync.replicas": "1"})
        for value, victim in ((b"three", 13), (b"two", 12), (b"one", 11)):
            cluster.write(orders, value)
            cluster.kill(NodeId(victim))
            if victim != 11:
                cluster.until_in_sync(orders, *[broker for broker in (11, 12) if broker < victim])
        cluster.start_brokers(13)
        cluster.world.run_for(5)
        assert cluster.partition(orders).leader == -1
        assert code(cluster.produce(13, orders, batch(b"x")).error) is ErrorCode.LEADER_NOT_AVAILABLE
        assert code(cluster.fetch(13, orders).error) is ErrorCode.LEADER_NOT_AVAILABLE
        if not is_unclean:
            cluster.start_brokers(11)
            assert cluster.leader(orders) == 11, "the last in-sync replica"
            kept = [b"three", b"two", b"one"]
        else:
            cluster.elect("orders", "unclean")
            assert cluster.leader(orders) == 13
            kept = [b"three"]
            cluster.start_brokers(11)
        cluster.write(orders, b"new")
        cluster.start_brokers(12)
        cluster.until_whole(orders)
        for broker in BROKERS:
            assert cluster.log(broker, orders).end_offset == len(kept) + 1
        assert cluster.values(orders) == [*kept, b"new"]


@pytest.mark.requirement("a:X3-8")
@pytest.mark.parametrize("victim", [11, 12])
def test_a_disk_that_hangs_holds_up_writers_only_until_its_replica_is_out(victim: int) -> None:
    with orders_cluster(806, b"0") as (cluster, orders):
        cluster.until_equal(orders, *BROKERS)
        cluster.world.machine(f"b{victim}").disk("logs-0").begin_stall()
        began_s = cluster.now_s()
        others = [broker for broker in BROKERS if broker != victim]
        if victim == 11:
            assert cluster.produce(11, orders, batch(b"not stored"), timeout_ms=100).error is not None
            cluster.until(lambda: cluster._leader(orders) == 12)
        cluster.write(orders, b"1")
        assert cluster.now_s() - began_s < 2.0 + 2.0, "disk.stall.timeout.ms and a moment"
        cluster.until_in_sync(orders, *others)
        cluster.world.machine(f"b{victim}").disk("logs-0").heal()
        cluster.until_whole(orders)
        assert cluster.values(orders)[-1] == b"1"


@pytest.mark.requirement("a:X3-7", "b:D-24")
def test_one_full_directory_takes_no_writes_and_the_rest_of_the_broker_goes_on() -> None:
    with ReplicationCluster(807, directories=2, brokers=BROKERS) as cluster:
        first, second = cluster.topic("first", BROKERS), cluster.topic("second", BROKERS)
        for partition in (first, second):
            cluster.write(partition, b"0")
        logs = cluster.brokers[NodeId(11)].logs
        home = logs.directory_of(first)
        assert home is not None
        assert home is not logs.directory_of(second)
        full = cluster.world.machine("b11").disk(f"logs-{logs.directories.index(home)}")
        full.fill()
        result = cluster.produce(11, first, batch(b"no room"))
        assert code(result.error) is ErrorCode.STORAGE_ERROR
        assert cluster.values(first) == [b"0"], "nothing is acknowledged that was not written, and reads go on"
        cluster.write(second, b"1")
        assert cluster.values(second) == [b"0", b"1"]
        assert not cluster.brokers[NodeId(11)].agent.is_fenced
        cluster.until(lambda: cluster._leader(first) not in (None, 11))
        assert cluster._leader(second) == 11, "only what has no room is led by others"
        full.heal()
        cluster.write(first, b"1")
        assert cluster.values(first) == [b"0", b"1"]


@pytest.mark.requirement("b:D-05")
@pytest.mark.parametrize("is_numbered", [False, True])
def test_a_write_whose_answer_was_lost_is_stored_twice_when_repeated_unless_it_is_numbered(is_numbered: bool) -> None:
    with orders_cluster(808, b"0") as (cluster, orders):
        data = batch(b"1")
        if is_numbered:
            producer, epoch = cluster.on_broker(11, lambda found: data_requests.init_producer_id(found.service))
            data = batch(b"1", producer_id=producer, producer_epoch=epoch, base_sequence=0)
        found = cluster.brokers[NodeId(11)]
        found.node.spawn(data_requests.produce(found.service, [ProduceItem(orders, data)], acks=-1, timeout_ms=5000))
        cluster.until(lambda: all(cluster.log(broker, orders).durable_end == 2 for broker in (12, 13)))
        cluster.kill(NodeId(11))
        again = cluster.produce(cluster.leader(orders), orders, data, timeout_ms=20_000)
        assert (again.error, again.base_offset) == (None, 1 if is_numbered else 2)
        assert cluster.values(orders) == [b"0", b"1"] + ([] if is_numbered else [b"1"])
