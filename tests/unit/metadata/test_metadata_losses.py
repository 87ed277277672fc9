"""A replica that has lost data: out of everything, and not back by what was said before."""

import dataclasses
from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import Cluster
from support.metadata.quorum import ADMIN, Quorum

from tidelog.metadata.lost_replicas import ReplicasLost, ReportedLost
from tidelog.metadata.partitions import AlteredPartition, AlterPartition, ElectLeaders
from tidelog.model.errors import ErrorCode, RemoteError, StaleBrokerEpochError


def report(cluster: Cluster, broker: int, *replicas: tuple[UUID, int]) -> ReportedLost:
    epoch = cluster.image.brokers[broker].broker_epoch
    reply = cluster.ask(ReplicasLost(broker=broker, broker_epoch=epoch, replicas=replicas))
    assert isinstance(reply, ReportedLost)
    return reply


def proposal(cluster: Cluster, *members: int) -> AlterPartition:
    partition, brokers = cluster.partition("t"), cluster.image.brokers
    item = AlteredPartition(
        topic_id=cluster.image.topic_ids["t"],
        partition=0,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        isr=tuple((member, brokers[member].broker_epoch) for member in members),
    )
    return AlterPartition(
        broker=partition.leader, broker_epoch=brokers[partition.leader].broker_epoch, partitions=(item,)
    )


def test_a_proposal_on_its_way_does_not_take_back_who_has_lost_data_outside_of_the_in_sync_set() -> None:
    cluster = Cluster(3)
    topic_id = cluster.made("t", (0, 1, 2))
    assert cluster.propose("t", (0, 1)).error is None
    on_its_way = proposal(cluster, 0, 1, 2)
    before = cluster.partition("t")
    reply = report(cluster, 2, (topic_id, 0))
    now = cluster.partition("t")
    assert reply.items[0].error is None
    assert reply.partition_epochs == (now.partition_epoch,)
    assert now.partition_epoch > before.partition_epoch
    assert (now.leader, now.isr) == (0, (0, 1))
    (state,) = cluster.ask(on_its_way).partitions
    assert state.error is ErrorCode.FENCED_LEADER_EPOCH
    assert cluster.partition("t") == now


def test_nor_does_one_that_its_leader_makes_after_it_has_heard_of_the_report() -> None:
    """What the leader knows of a follower is of one leader epoch: that one is over."""
    cluster = Cluster(3)
    topic_id = cluster.made("t", (0, 1, 2))
    assert cluster.propose("t", (0, 1)).error is None
    by_old_acks = proposal(cluster, 0, 1, 2)
    report(cluster, 2, (topic_id, 0))
    item = dataclasses.replace(by_old_acks.partitions[0], partition_epoch=cluster.partition("t").partition_epoch)
    (state,) = cluster.ask(dataclasses.replace(by_old_acks, partitions=(item,))).partitions
    assert state.error is ErrorCode.FENCED_LEADER_EPOCH
    assert cluster.propose("t", (0, 1, 2)).error is None, "in the new epoch it may come back"


def test_an_in_sync_replica_leaves_and_is_not_eligible() -> None:
    cluster = Cluster(3)
    topic_id = cluster.made("t", (0, 1, 2), min_insync_replicas="3")
    report(cluster, 1, (topic_id, 0))
    now = cluster.partition("t")
    assert (now.leader, now.isr, now.eligible) == (0, (0, 2), ())


def test_an_eligible_replica_is_not_eligible_any_more() -> None:
    cluster = Cluster(2)
    topic_id = cluster.made("t", (0, 1), min_insync_replicas="2")
    assert cluster.propose("t", (0,)).error is None
    assert cluster.partition("t").eligible == (1,)
    report(cluster, 1, (topic_id, 0))
    assert cluster.partition("t").eligible == ()


def test_a_leader_gives_up_and_nobody_is_elected_uncleanly_by_that() -> None:
    cluster = Cluster(2)
    topic_id = cluster.made("t", (0, 1), unclean_leader_election_enable="true")
    report(cluster, 0, (topic_id, 0))
    assert cluster.partition("t").leader == 1
    alone = cluster.made("alone", (0,), unclean_leader_election_enable="true")
    reported = report(cluster, 0, (alone, 0)).partition_epochs[0]
    assert cluster.partition("alone").leader == -1
    cluster.ask(ElectLeaders(kind="unclean", partitions=(("alone", 0),)))
    now = cluster.partition("alone")
    assert now.leader == 0
    assert now.partition_epoch > reported, "the broker sees that this is later than its report"


def test_every_report_raises_the_epochs_also_one_that_is_repeated() -> None:
    cluster = Cluster(3)
    topic_id = cluster.made("t", (0, 1, 2))
    epochs = []
    for _ in range(3):
        (reported,) = report(cluster, 2, (topic_id, 0)).partition_epochs
        assert reported == cluster.partition("t").partition_epoch
        epochs.append((reported, cluster.partition("t").leader_epoch))
    assert len({reported for reported, _ in epochs}) == len({epoch for _, epoch in epochs}) == 3
    assert epochs == sorted(epochs)


def test_what_cannot_be_reported_is_refused_by_itself() -> None:
    cluster = Cluster(3)
    topic_id = cluster.made("t", (0, 1))
    reply = report(cluster, 1, (topic_id, 0), (topic_id, 7), (UUID(int=5), 0))
    codes = [item.error for item in reply.items]
    assert codes == [None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID]
    assert reply.partition_epochs[1:] == (-1, -1)
    assert report(cluster, 2, (topic_id, 0)).items[0].error is ErrorCode.INVALID_REQUEST
    stale = ReplicasLost(broker=1, broker_epoch=0, replicas=((topic_id, 0),))
    assert isinstance(cluster.refused(stale), StaleBrokerEpochError)


@pytest.mark.sim
def test_a_broker_reports_its_own_losses_only() -> None:
    with Quorum(31) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        made: Any = quorum.create("t")
        broker = quorum.controller(quorum.active()).image.brokers[11]
        request = ReplicasLost(broker=11, broker_epoch=broker.broker_epoch, replicas=((made.topic_id, 0),))
        with pytest.raises(RemoteError, match=f"node {ADMIN} sends a request of broker 11") as rejection:
            quorum.ask(request)
        assert rejection.value.code is ErrorCode.INVALID_REQUEST
