"""In-sync sets with their epochs, elections by admin call, the balance of leaders, replica directories."""

from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import Cluster, directory

from tidelog.metadata.brokers import Drain
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.configs import cluster_int
from tidelog.metadata.image import NIL
from tidelog.metadata.partitions import (
    AlteredPartition,
    AlterPartition,
    AssignDirectories,
    BalanceLeaders,
    ElectLeaders,
    imbalance,
)
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import ErrorCode


def set_cluster(cluster: Cluster, key: str, value: str) -> None:
    change = ConfigChange(key=key, operation="set", value=value)
    reply = cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)))
    assert reply.items[0].error is None


def outcomes(reply: Any) -> list[tuple[str, ErrorCode | None]]:
    return [(item.name, item.error) for item in reply.items]


class TestAlterPartition:
    def cluster(self) -> Cluster:
        cluster = Cluster(4)
        cluster.made("t", (0, 1, 2))
        return cluster

    def test_the_leader_shrinks_and_expands_its_in_sync_set(self) -> None:
        cluster = self.cluster()
        state = cluster.propose("t", (0, 1))
        assert (state.error, state.isr, state.partition_epoch, state.leader_epoch) == (None, (0, 1), 1, 0)
        assert state.min_isr == 2
        state = cluster.propose("t", (2, 1, 0))
        assert (state.isr, state.partition_epoch) == ((0, 1, 2), 2), "in the order of the assignment"

    def test_below_min_isr_who_left_is_eligible(self) -> None:
        cluster = self.cluster()
        cluster.propose("t", (0, 1))
        cluster.propose("t", (0,))
        assert cluster.partition("t").eligible == (1,)
        cluster.crash(0)
        after = cluster.partition("t")
        assert (after.leader, after.isr, after.eligible) == (1, (1,), (0,))

    def test_the_same_set_again_changes_nothing(self) -> None:
        cluster = self.cluster()
        before = cluster.image
        assert cluster.propose("t", (0, 1, 2)).error is None
        assert cluster.image is before

    @pytest.mark.parametrize(
        ("isr", "more", "code"),
        [
            ((0, 1), {"leader_epoch": -1}, ErrorCode.FENCED_LEADER_EPOCH),
            ((0, 1), {"leader_epoch": 1}, ErrorCode.NOT_CONTROLLER),
            ((0, 1), {"partition_epoch": 1}, ErrorCode.NOT_CONTROLLER),
            ((0, 1), {"partition_epoch": -1}, ErrorCode.INVALID_UPDATE_VERSION),
            ((0, 1), {"broker": 1}, ErrorCode.INVALID_REQUEST),
            ((1, 2), {}, ErrorCode.INVALID_REQUEST),
            ((), {}, ErrorCode.INVALID_REQUEST),
            ((0, 0, 1), {}, ErrorCode.INVALID_REQUEST),
            ((0, 3), {}, ErrorCode.INVALID_REQUEST),
            ((0, 99), {}, ErrorCode.INVALID_REQUEST),
            ((0, 1), {"isr": ((0, 1), (1, 10_000))}, ErrorCode.INELIGIBLE_REPLICA),
            ((0, 1), {"topic_id": UUID(int=9)}, ErrorCode.UNKNOWN_TOPIC_ID),
            ((0, 1), {"partition": 5}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ],
        ids=str,
    )
    def test_a_wrong_proposal_is_refused(self, isr: tuple[int, ...], more: dict[str, Any], code: ErrorCode) -> None:
        cluster = self.cluster()
        before = cluster.image
        state = cluster.propose("t", isr, **more)
        assert (state.error, cluster.image) == (code, before)
        assert state.message

    def test_a_fenced_or_stopping_broker_cannot_join(self) -> None:
        cluster = self.cluster()
        cluster.crash(2)
        assert cluster.propose("t", (0, 1, 2)).error is ErrorCode.INELIGIBLE_REPLICA
        cluster.stop(1)
        assert cluster.propose("t", (0, 1)).error is ErrorCode.INELIGIBLE_REPLICA

    def test_a_leader_that_spoke_to_a_former_incarnation_is_refused(self) -> None:
        cluster = self.cluster()
        former = cluster.image.brokers[2].broker_epoch
        cluster.crash(2)
        cluster.start(2)
        own = cluster.image.brokers[0].broker_epoch
        state = cluster.propose("t", (0, 2), isr=((0, own), (2, former)))
        assert state.error is ErrorCode.INELIGIBLE_REPLICA

    def test_a_partition_twice_in_one_request_is_refused(self) -> None:
        cluster = self.cluster()
        before = cluster.image
        epochs = tuple((b, cluster.image.brokers[b].broker_epoch) for b in (0, 1))
        item = AlteredPartition(
            topic_id=cluster.image.topic_ids["t"], partition=0, leader_epoch=0, partition_epoch=0, isr=epochs
        )
        reply = cluster.ask(AlterPartition(broker=0, broker_epoch=epochs[0][1], partitions=(item, item)))
        assert [state.error for state in reply.partitions] == [ErrorCode.INVALID_REQUEST] * 2
        assert cluster.image is before

    def test_a_sender_of_a_former_life_is_refused_as_a_whole(self) -> None:
        request = AlterPartition(broker=0, broker_epoch=0, partitions=())
        assert self.cluster().refused(request).code is ErrorCode.STALE_BROKER_EPOCH


class TestElectLeaders:
    def skewed(self) -> Cluster:
        """Two partitions that prefer broker 0 and are led by 1; 0 is back and in sync with the first only."""
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), (0, 1, 2), (1, 2, 0))
        cluster.crash(0)
        cluster.start(0)
        assert cluster.propose("t", (1, 2, 0), 0).error is None
        return cluster

    @pytest.mark.requirement("a:B-13", "a:B-33", "a:X3-45", "b:I-07")
    def test_the_preferred_replica_leads_again_once_it_is_in_sync(self) -> None:
        cluster = self.skewed()
        assert [cluster.partition("t", number).leader for number in range(3)] == [1, 1, 1]
        named = (("t", 0), ("t", 1), ("t", 2), ("t", 9), ("u", 0))
        assert outcomes(cluster.ask(ElectLeaders(kind="preferred", partitions=named))) == [
            ("t-0", None),
            ("t-1", ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE),
            ("t-2", ErrorCode.ELECTION_NOT_NEEDED),
            ("t-9", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            ("u-0", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ]
        after = cluster.partition("t", 0)
        assert (after.leader, after.leader_epoch, after.isr) == (0, 2, (0, 1, 2))

    @pytest.mark.requirement("b:I-07")
    def test_for_all_partitions_those_that_need_nothing_are_passed_over(self) -> None:
        cluster = self.skewed()
        reply = cluster.ask(ElectLeaders(kind="preferred"))
        assert outcomes(reply) == [("t-0", None), ("t-1", ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE)]
        before = cluster.image
        healthy = Cluster(1)
        healthy.made("t", (0,))
        assert outcomes(healthy.ask(ElectLeaders(kind="preferred"))) == []
        assert cluster.image is before

    @pytest.mark.requirement("a:B-31", "a:B-32", "a:T-05")
    def test_an_unclean_election_takes_what_is_live_and_only_where_nobody_leads(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), (2, 1, 0))
        for broker in (0, 1, 2):
            cluster.crash(broker)
        request = ElectLeaders(kind="unclean", partitions=(("t", 0),))
        assert outcomes(cluster.ask(request)) == [("t-0", ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE)]
        cluster.start(0)
        assert cluster.partition("t").leader == NO_LEADER
        assert outcomes(cluster.ask(request)) == [("t-0", None)]
        after = cluster.partition("t")
        assert (after.leader, after.isr, after.eligible) == (0, (0,), ())
        assert outcomes(cluster.ask(request)) == [("t-0", ErrorCode.ELECTION_NOT_NEEDED)]
        assert outcomes(cluster.ask(ElectLeaders(kind="unclean"))) == [("t-1", None)]

    def test_it_prefers_an_eligible_replica_to_losing_anything(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1), min_insync_replicas="2")
        cluster.crash(0)
        cluster.crash(1)
        cluster.start(1)
        assert cluster.partition("t").leader == 1
        assert cluster.partition("t").eligible == (0,)

    def test_wrong_kinds_and_partitions_named_twice_are_refused(self) -> None:
        cluster = self.skewed()
        assert cluster.refused(ElectLeaders(kind="best")).code is ErrorCode.INVALID_REQUEST
        before = cluster.image
        twice = cluster.ask(ElectLeaders(kind="preferred", partitions=(("t", 0), ("t", 0))))
        assert [item.error for item in twice.items] == [ErrorCode.INVALID_REQUEST] * 2
        cluster.ask(ElectLeaders(kind="preferred", validate_only=True))
        assert cluster.image is before


class TestBalance:
    def back(self, partitions: int = 20) -> Cluster:
        """Broker 0 leads nothing of what it is preferred for, and could lead all of it."""
        cluster = Cluster(3)
        cluster.create("t", partitions, 3)
        cluster.crash(0)
        cluster.start(0)
        for _, number, _ in list(cluster.image.partitions_on(0)):
            assert cluster.propose("t", (0, 1, 2), number).error is None
        return cluster

    @pytest.mark.requirement("a:B-33", "a:X3-45")
    def test_leaderships_go_back_when_too_many_are_missing(self) -> None:
        cluster = self.back()
        shares = imbalance(cluster.image)
        assert (shares[0], shares[1]) == (100.0, 0.0)
        reply = cluster.ask(BalanceLeaders())
        assert reply.elected == cluster.image.preferred[0] >= 6
        assert set(imbalance(cluster.image).values()) == {0.0}
        assert cluster.ask(BalanceLeaders()).elected == 0

    def test_it_can_be_switched_off(self) -> None:
        cluster = self.back()
        set_cluster(cluster, "auto.leader.rebalance.enable", "false")
        assert cluster.ask(BalanceLeaders()).elected == 0

    @pytest.mark.requirement("a:A-30")
    def test_a_small_imbalance_is_left_alone(self) -> None:
        cluster = self.back(60)
        mine = [(f"t-{n}", n) for _, n, p in cluster.image.partitions_on(0) if p.preferred == 0]
        cluster.ask(ElectLeaders(kind="preferred", partitions=tuple(("t", n) for _, n in mine[1:])))
        assert 0 < imbalance(cluster.image)[0] <= 10
        assert cluster.ask(BalanceLeaders()).elected == 0
        set_cluster(cluster, "leader.imbalance.per.broker.percentage", "4")
        assert cluster.ask(BalanceLeaders()).elected == 1

    def test_the_interval_of_the_check_is_five_minutes(self) -> None:
        cluster = Cluster(1)
        assert cluster_int(cluster.image, "leader.imbalance.check.interval.seconds") == 300

    def test_one_round_is_bounded(self) -> None:
        cluster = self.back()
        reply = cluster.ask(BalanceLeaders(elections_max=2))
        assert (reply.elected, reply.has_more) == (2, True)

    def test_nothing_goes_back_to_a_broker_that_is_drained_or_not_in_sync(self) -> None:
        cluster = self.back()
        cluster.ask(Drain(broker=0))
        assert cluster.ask(BalanceLeaders()).elected == 0
        cluster.ask(Drain(broker=0, on=False))
        cluster.crash(0)
        assert cluster.ask(BalanceLeaders()).elected == 0


class TestAssignDirectories:
    def test_a_broker_says_where_its_replicas_are(self) -> None:
        cluster = Cluster()
        there, other = directory(0, 0), directory(0, 1)
        cluster.start(0, directories=(there, other))
        topic_id = cluster.made("t", (0,))
        assert cluster.partition("t").directories == (NIL,)
        epoch = cluster.image.brokers[0].broker_epoch

        def assign(*rows: tuple[UUID, int, UUID]) -> list[ErrorCode | None]:
            request = AssignDirectories(broker=0, broker_epoch=epoch, replicas=rows)
            return [item.error for item in cluster.ask(request).items]

        assert assign((topic_id, 0, other)) == [None]
        assert cluster.partition("t").directories == (other,)
        before = cluster.image
        assert assign((topic_id, 0, other)) == [None]
        assert assign((topic_id, 0, directory(5))) == [ErrorCode.INVALID_REQUEST]
        assert assign((topic_id, 7, other)) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
        assert assign((UUID(int=3), 0, other)) == [ErrorCode.UNKNOWN_TOPIC_ID]
        assert assign((topic_id, 0, there), (topic_id, 0, other)) == [ErrorCode.INVALID_REQUEST] * 2
        assert cluster.image is before

    def test_only_of_replicas_that_it_has(self) -> None:
        cluster = Cluster(2)
        topic_id = cluster.made("t", (0,))
        epoch = cluster.image.brokers[1].broker_epoch
        request = AssignDirectories(broker=1, broker_epoch=epoch, replicas=((topic_id, 0, directory(1)),))
        assert cluster.ask(request).items[0].error is ErrorCode.INVALID_REQUEST
        stale = AssignDirectories(broker=1, broker_epoch=epoch - 1, replicas=())
        assert cluster.refused(stale).code is ErrorCode.STALE_BROKER_EPOCH
