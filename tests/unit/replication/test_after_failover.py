"""What a new leader says and does before and after it has confirmed its epoch."""

import pytest
from support.brokers import data_requests
from support.brokers.cluster import NodeId, ReplicationCluster, batch, orders_cluster
from test_client_requests import code
from test_replica_repair import damage
from test_replicas import BROKERS

from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget
from tidelog.model.errors import ErrorCode, OffsetNotAvailableError, OffsetOutOfRangeError
from tidelog.replication.leader_replica import LeaderReplica


def test_records_that_were_deleted_do_not_come_back_with_a_new_leader() -> None:
    """The followers hear of the deletion, but not of the high watermark that it reached to."""
    with orders_cluster(441) as (cluster, orders):
        cluster.write_numbers(orders, 20)
        for broker in (12, 13):
            cluster.network.block(NodeId(11), NodeId(broker))
        start = cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, -1))
        assert start == 20

        def is_heard(broker: int) -> bool:
            known = cluster.brokers[NodeId(broker)].tail.image.partition(orders.topic_id, 0)
            return known is not None and known.start_offset == start

        cluster.until(lambda: all(is_heard(broker) for broker in (12, 13)))
        assert max(cluster.replica(broker, orders).high_watermark for broker in (12, 13)) < start
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        assert cluster.log(leader, orders).start_offset == start, "from the moment on that it leads"
        assert cluster.values(orders) == []
        cluster.write(orders, b"new")
        assert cluster.values(orders) == [b"new"]


def test_a_leader_that_is_behind_what_clients_know_does_not_refuse_to_delete_it() -> None:
    with orders_cluster(443) as (cluster, orders):
        cluster.write_numbers(orders, 20)
        for one, other in ((12, 13), (13, 12)):
            cluster.network.block(NodeId(one), NodeId(other))
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        assert cluster.leading(orders).high_watermark < 20
        with pytest.raises(OffsetNotAvailableError):
            cluster.on_broker(leader, lambda found: data_requests.delete_records(found.service, orders, 20))
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.on_broker(leader, lambda found: data_requests.delete_records(found.service, orders, 20)) == 20
        with pytest.raises(OffsetOutOfRangeError):
            cluster.on_broker(leader, lambda found: data_requests.delete_records(found.service, orders, 21))
        with pytest.raises(OffsetOutOfRangeError):
            cluster.on_broker(leader, lambda found: data_requests.delete_records(found.service, orders, -2))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_replica_begins_with_the_batch_in_which_records_were_deleted(is_new: bool) -> None:
    """One that has nothing, or lost what it had: the batch that holds the log's start begins before that."""
    with ReplicationCluster(444, brokers=BROKERS) as cluster:
        orders = cluster.topic("orders", [11, 12] if is_new else BROKERS)
        cluster.write(orders, b"0")
        cluster.write(orders, b"1", b"2", b"3")
        cluster.write(orders, b"4")
        assert cluster.on_broker(11, lambda found: data_requests.delete_records(found.service, orders, 2)) == 2
        if is_new:
            item = ReassignmentTarget(topic="orders", partition=0, replicas=tuple(BROKERS))
            cluster.ask(AlterReassignments(partitions=(item,)))
        else:
            cluster.until(lambda: cluster.log(13, orders).start_offset == 2)
            damage(cluster, 13, orders, 2)
            cluster.until(lambda: 13 not in cluster.partition(orders).isr)
        cluster.until_in_sync(orders, *BROKERS)
        cluster.write(orders, b"5")
        cluster.until_equal(orders, *BROKERS)
        cluster.until(lambda: all(cluster.log(broker, orders).start_offset == 2 for broker in BROKERS))
        cluster.kill(NodeId(11))
        cluster.ask(
            AlterReassignments(partitions=(ReassignmentTarget(topic="orders", partition=0, replicas=(13, 12)),))
        )
        cluster.until(lambda: 11 not in cluster.partition(orders).replicas)
        cluster.ask(ElectLeaders(kind="preferred"))
        cluster.until(lambda: cluster._leader(orders) == 13)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.values(orders) == [b"2", b"3", b"4", b"5"]


def test_an_error_tells_no_high_watermark_that_is_not_confirmed() -> None:
    with orders_cluster(442) as (cluster, orders):
        cluster.write_numbers(orders, 20)
        reported = cluster.fetch(11, orders, 20).high_watermark
        assert reported == 20
        assert cluster.fetch(11, orders, 25).high_watermark == reported, "confirmed: an error tells it too"
        follower = cluster.fetch(12, orders, 0)
        assert (code(follower.error), follower.high_watermark) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
        for one, other in ((12, 13), (13, 12)):
            cluster.network.block(NodeId(one), NodeId(other))
        cluster.kill(NodeId(11))
        leader = cluster.leader(orders)
        assert not cluster.leading(orders).state.is_confirmed
        refused = cluster.fetch(leader, orders, 25)
        assert (code(refused.error), refused.high_watermark) == (ErrorCode.OFFSET_NOT_AVAILABLE, -1)
        cluster.network.heal()
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)
        assert cluster.fetch(leader, orders, 25).high_watermark == reported


def test_a_leader_whose_metadata_name_the_next_one_answers_as_no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks what the next one has acknowledged: OUT_OF_ORDER_SEQUENCE_NUMBER would end an idempotent producer."""
    with orders_cluster(445) as (cluster, orders):
        cluster.write(orders, b"0", producer_id=7, producer_epoch=0, base_sequence=0)
        former = cluster.brokers[NodeId(11)]
        monkeypatch.setattr(former.replicas._changes, "partition_changed", lambda _local: None)
        item = ReassignmentTarget(topic="orders", partition=0, replicas=(12, 13, 11))
        cluster.ask(AlterReassignments(partitions=(item,)))
        cluster.until(lambda: not cluster.partition(orders).adding)
        cluster.ask(ElectLeaders(kind="preferred"))
        cluster.until(lambda: cluster._leader(orders) == 12)
        cluster.until(lambda: cluster.leading(orders).state.is_confirmed)

        def known_leader() -> int:
            known = former.replicas.image.partition(orders.topic_id, 0)
            return -1 if known is None else known.leader

        cluster.until(lambda: known_leader() == 12)
        assert isinstance(cluster.replica(11, orders).role, LeaderReplica), "the change waits for its slice"
        late = cluster.produce(11, orders, batch(b"2", producer_id=7, producer_epoch=0, base_sequence=2))
        assert code(late.error) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert late.leader == 12
