"""Brokers that come and go, and who leads then: clean, eligible, unclean; incarnations; controlled shutdown."""

from typing import Any
from uuid import UUID

import pytest
from support.metadata.controller import CLUSTER_ID, Cluster, directory

from tidelog.metadata import elections
from tidelog.metadata.brokers import Drain, Drained, Fence, Heartbeat, Register, Unregister
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.image import NIL, Partition
from tidelog.metadata.queries import describe_topic
from tidelog.metadata.records import NO_LEADER
from tidelog.model.errors import ErrorCode


def partition(isr: tuple[int, ...], leader: int, eligible: tuple[int, ...] = ()) -> Partition:
    return Partition((1, 2, 3), (NIL, NIL, NIL), isr, leader, 5, 9, eligible)


class TestElect:
    @pytest.mark.requirement("a:B-30", "b:E-02")
    @pytest.mark.parametrize(
        ("isr", "eligible", "alive", "leader"),
        [
            ((1, 2, 3), (), (1, 2, 3), 1),
            ((1, 2, 3), (), (2, 3), 2),
            ((3, 2), (), (1, 2, 3), 2),  # assignment order, not the order of the set
            ((3,), (2,), (1, 2, 3), 3),
            ((), (2, 3), (1, 3), 3),
            ((), (2,), (1, 3), None),
            ((), (), (1, 2, 3), None),
        ],
    )
    def test_the_first_live_in_sync_replica_leads_then_the_first_eligible_one(
        self, isr: tuple[int, ...], eligible: tuple[int, ...], alive: tuple[int, ...], leader: int | None
    ) -> None:
        elected = elections.elect(partition(isr, -1, eligible), lambda b: b in alive, unclean=False)
        assert elected == (None if leader is None else elections.Elected(leader))

    @pytest.mark.requirement("a:B-31")
    def test_only_unclean_election_takes_another_live_replica(self) -> None:
        elected = elections.elect(partition((), -1, (2,)), lambda b: b in (1, 3), unclean=True)
        assert elected == elections.Elected(1, is_unclean=True)
        after = elections.led_by(partition((), -1, (2,)), elected, min_isr=2)
        assert (after.leader, after.isr, after.eligible) == (1, (1,), ())

    def test_avoided_brokers_lead_only_where_nobody_else_can(self) -> None:
        def elect(avoided: tuple[int, ...]) -> elections.Elected | None:
            return elections.elect(
                partition((1, 2), -1), lambda b: True, unclean=False, is_avoided=lambda b: b in avoided
            )

        assert elect((1,)) == elections.Elected(2)
        assert elect((1, 2)) == elections.Elected(1)

    def test_who_leaves_an_in_sync_set_that_stays_large_enough_is_not_eligible(self) -> None:
        assert elections.with_isr(partition((1, 2, 3), 1), (1, 2), min_isr=2) == ((1, 2), ())
        assert elections.with_isr(partition((1, 2), 1, ()), (1,), min_isr=2) == ((1,), (2,))
        assert elections.with_isr(partition((1, 2, 3), 1), (3,), min_isr=2) == ((3,), (1, 2))

    def test_nothing_to_change_makes_no_record(self) -> None:
        before = partition((1, 2), 1)
        assert elections.change(NIL, 0, before, before) is None
        record = elections.change(NIL, 0, before, before, new_epoch=True)
        assert record is not None
        assert (record.leader, record.leader_epoch) == (None, 6)


class TestRegistration:
    @pytest.mark.requirement("b:E-21")
    def test_a_broker_begins_fenced_and_is_unfenced_once_it_has_seen_its_registration(self) -> None:
        cluster = Cluster()
        epoch = cluster.register(1)
        assert cluster.image.brokers[1].fenced
        early = cluster.beat(1, metadata_offset=epoch)
        assert (early.is_fenced, early.is_caught_up) == (True, False)
        assert not cluster.beat(1).is_fenced
        assert not cluster.image.brokers[1].fenced

    def test_the_same_incarnation_may_repeat_its_request(self) -> None:
        cluster = Cluster()
        incarnation = UUID(int=77)
        epoch = cluster.register(1, incarnation=incarnation)
        before = cluster.image
        assert cluster.register(1, incarnation=incarnation) == epoch
        assert cluster.image is before

    def test_the_id_of_a_live_broker_is_refused_to_another_process(self) -> None:
        cluster = Cluster(2)
        request = registration(1)
        error = cluster.refused(request)
        assert error.code is ErrorCode.DUPLICATE_BROKER_REGISTRATION
        assert "host-1:9092" in str(error)
        cluster.crash(1)
        assert cluster.ask(request).broker_epoch > 0

    @pytest.mark.requirement("a:B-55", "a:O-15", "a:T-06")
    def test_an_empty_broker_with_the_old_id_gets_the_same_partitions_and_is_in_sync_nowhere(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), (1, 2, 0))
        cluster.crash(0)
        cluster.start(0, directories=(directory(0, 9),), clean_stop_epoch=-1)
        assert {number for _, number, _ in cluster.image.partitions_on(0)} == {0, 1}
        assert all(0 not in p.isr and 0 not in p.eligible for _, _, p in cluster.image.partitions_on(0))
        assert cluster.propose("t", (0, 1, 2), 0).error is None, "and it may catch up"

    def test_a_new_incarnation_ends_the_epochs_that_the_former_one_led(self) -> None:
        cluster = Cluster(1)
        cluster.made("t", (0,))
        before = cluster.partition("t")
        cluster.crash(0)
        cluster.start(0)
        after = cluster.partition("t")
        assert after.leader == before.leader == 0
        assert after.leader_epoch >= before.leader_epoch + 2, "one for losing it, one for the new life"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"cluster_id": "another"},
            {"broker": -1},
            {"broker": 1 << 31},
            {"endpoints": ()},
            {"endpoints": (("A", "PLAINTEXT", "", 9092),)},
            {"endpoints": (("A", "PLAINTEXT", "h" * 300, 9092),)},
            {"endpoints": (("A", "PLAINTEXT", "h\n", 9092),)},
            {"endpoints": (("A", "PLAINTEXT", "h", 0),)},
            {"endpoints": (("A", "PLAINTEXT", "h", 65536),)},
            {"endpoints": (("A", "PLAINTEXT", "h", 1), ("A", "PLAINTEXT", "h", 2))},
            {"endpoints": tuple((f"L{n}", "PLAINTEXT", "h", 1) for n in range(17))},
            {"rack": ""},
            {"rack": "r" * 256},
            {"directories": (directory(1), directory(1))},
            {"directories": (NIL,)},
            {"directories": tuple(UUID(int=n + 1) for n in range(65))},
            {"features": ()},
            {"features": (("metadata.version", 2, 3),)},
            {"features": (("metadata.version", 1, 1), ("metadata.version", 1, 1))},
            {"features": (("metadata.version", 1, 1), ("x", 3, 2))},
        ],
        ids=str,
    )
    def test_a_wrong_registration_is_refused(self, wrong: dict[str, object]) -> None:
        cluster = Cluster(1)
        expected = {
            "cluster_id": ErrorCode.INCONSISTENT_CLUSTER_ID,
            "features": ErrorCode.UNSUPPORTED_VERSION
            if wrong.get("features") in ((), (("metadata.version", 2, 3),))
            else ErrorCode.INVALID_REQUEST,
        }
        error = cluster.refused(registration(**{"broker": 5, **wrong}))
        assert error.code is expected.get(next(iter(wrong)), ErrorCode.INVALID_REQUEST)


def registration(broker: Any, **more: object) -> Register:
    fields: dict[str, object] = {
        "cluster_id": CLUSTER_ID,
        "broker": broker,
        "incarnation": UUID(int=4711),
        "endpoints": (("CLIENT", "PLAINTEXT", "elsewhere", 9092),),
        "directories": (directory(broker),) if broker >= 0 else (),
        "features": (("metadata.version", 1, 1),),
    }
    return Register(**{**fields, **more})  # type: ignore[arg-type]


class TestDeparture:
    @pytest.mark.requirement("a:B-54", "b:E-02")
    def test_every_partition_of_a_lost_broker_gets_a_new_leader_from_its_in_sync_set(self) -> None:
        cluster = Cluster(4)
        cluster.create("t", 20, 3)
        led = [number for _, number, p in cluster.image.partitions_on(0) if p.leader == 0]
        assert led
        cluster.crash(0)
        for number in led:
            after = cluster.partition("t", number)
            assert after.leader == after.isr[0] != 0
            assert after.leader_epoch == 1
        assert all(0 not in p.isr for _, _, p in cluster.image.partitions_on(0))

    def test_fencing_a_fenced_broker_changes_nothing_and_a_former_life_is_not_fenced(self) -> None:
        cluster = Cluster(2)
        cluster.crash(1)
        before = cluster.image
        cluster.crash(1)
        assert cluster.image is before
        error = cluster.refused(Fence(broker=1, broker_epoch=cluster.image.brokers[1].broker_epoch - 1))
        assert error.code is ErrorCode.STALE_BROKER_EPOCH
        assert cluster.refused(Fence(broker=9, broker_epoch=0)).code is ErrorCode.BROKER_ID_NOT_REGISTERED

    @pytest.mark.requirement("a:B-35", "b:I-09")
    def test_a_controlled_shutdown_moves_leaderships_before_the_broker_may_stop(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), (0, 2, 1), (1, 0, 2))
        reply = cluster.beat(0, wants_shutdown=True)
        assert reply.may_shut_down
        assert [cluster.partition("t", number).leader for number in range(3)] == [1, 2, 1]
        assert cluster.image.brokers[0].fenced
        assert cluster.beat(0, wants_shutdown=True).may_shut_down, "asking again is answered again"

    def test_a_broker_may_ask_to_be_fenced(self) -> None:
        cluster = Cluster(2)
        assert cluster.beat(1, wants_fence=True).is_fenced
        assert not cluster.beat(1).is_fenced

    def test_heartbeats_of_unknown_brokers_and_of_former_incarnations_are_refused(self) -> None:
        cluster = Cluster(1)
        stale = Heartbeat(broker=0, broker_epoch=0, metadata_offset=9)
        assert cluster.refused(stale).code is ErrorCode.STALE_BROKER_EPOCH
        unknown = Heartbeat(broker=5, broker_epoch=0, metadata_offset=9)
        assert cluster.refused(unknown).code is ErrorCode.BROKER_ID_NOT_REGISTERED

    def test_a_broker_is_forgotten_only_when_it_is_down_and_empty(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1))
        assert "is live" in str(cluster.refused(Unregister(broker=2)))
        cluster.crash(0)
        assert "holds 1 replicas" in str(cluster.refused(Unregister(broker=0)))
        cluster.crash(2)
        cluster.ask(Unregister(broker=2))
        assert 2 not in cluster.image.brokers
        assert cluster.refused(Unregister(broker=2)).code is ErrorCode.BROKER_ID_NOT_REGISTERED


class TestEligibleLeaders:
    @pytest.mark.case("T10")
    def test_the_last_replica_that_lost_unsynced_data_is_not_elected(self) -> None:
        """ISR {0,1,2}, min ISR 2; 0 leaves, 1 leaves, 2 stops uncleanly with data in memory: 1 must come back."""
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), flush_mode="page-cache", min_insync_replicas="2")
        cluster.crash(0)
        cluster.crash(1)
        assert cluster.partition("t").isr == (2,)
        assert cluster.partition("t").eligible == (1,)
        cluster.crash(2)
        assert cluster.partition("t").eligible == (1, 2)
        cluster.start(2, clean_stop_epoch=-1)
        after = cluster.partition("t")
        assert (after.leader, after.isr, after.eligible) == (NO_LEADER, (), (1,))
        cluster.start(0, clean_stop_epoch=-1)
        assert cluster.partition("t").leader == NO_LEADER, "0 left while two were in sync: it may lack records"
        cluster.start(1)
        assert cluster.partition("t").leader == 1

    @pytest.mark.case("T10")
    def test_a_replica_that_syncs_before_it_acks_keeps_its_place_over_an_unclean_stop(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))
        for broker in (0, 1, 2):
            cluster.crash(broker)
        cluster.start(2, clean_stop_epoch=-1)
        assert cluster.partition("t").leader == 2

    def test_a_damaged_replica_is_not_elected_even_as_the_last_one(self) -> None:
        cluster = Cluster(3)
        topic_id = cluster.made("t", (0, 1, 2))
        for broker in (0, 1, 2):
            cluster.crash(broker)
        cluster.start(2, lost=((topic_id, 0),))
        after = cluster.partition("t")
        assert (after.leader, after.eligible) == (NO_LEADER, (1,))
        cluster.start(1, directories=(directory(1, 5),))
        description = describe_topic(cluster.image, "t").partitions[0]
        assert description.eligible == ()
        assert description.state == "offline"
        assert "tidelog elect-leaders --unclean --topic t --partition 0" in description.advice

    def test_a_replica_without_a_recorded_directory_is_suspect_when_a_directory_is_gone(self) -> None:
        cluster = Cluster()
        cluster.start(0, directories=(directory(0, 0), directory(0, 1)))
        cluster.made("t", (0,))
        assert cluster.partition("t").directories == (NIL,)
        cluster.crash(0)
        cluster.start(0, directories=(directory(0, 0), directory(0, 1)))
        assert cluster.partition("t").leader == 0
        cluster.crash(0)
        cluster.start(0, directories=(directory(0, 0), directory(0, 7)))
        assert cluster.partition("t").leader == NO_LEADER

    @pytest.mark.requirement("a:B-32", "a:T-05")
    def test_without_an_eligible_replica_the_partition_waits(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))
        for broker in (0, 1, 2):
            cluster.crash(broker)
        cluster.start(0)
        assert cluster.partition("t").leader == NO_LEADER
        advice = describe_topic(cluster.image, "t").partitions[0].advice
        assert advice.startswith("bring back broker 1 or 2, which has every acknowledged record")
        cluster.start(1)
        assert cluster.partition("t").leader == 1

    def test_enough_in_sync_replicas_end_the_eligibility_of_others(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))
        cluster.crash(0)
        cluster.crash(1)
        assert cluster.partition("t").eligible == (1,)
        cluster.start(0)
        assert cluster.propose("t", (2, 0)).error is None
        assert cluster.partition("t").eligible == ()

    def test_a_lower_min_isr_ends_eligibility_in_the_same_decision(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))
        cluster.crash(0)
        cluster.crash(1)
        change = ConfigChange(key="min.insync.replicas", operation="set", value="1")
        request = AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),))
        decision = cluster.decide(request)
        assert {type(record).__name__ for record in decision.records} == {"SetConfig", "ChangePartition"}
        cluster.ask(request)
        assert cluster.partition("t").eligible == ()


class TestUnclean:
    @pytest.mark.requirement("a:B-31", "a:T-05")
    @pytest.mark.parametrize("kind", ["topic", "cluster"])
    def test_turning_it_on_brings_an_offline_partition_back_with_what_there_is(self, kind: str) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))
        for broker in (0, 1, 2):
            cluster.crash(broker)
        cluster.start(0)
        assert cluster.partition("t").leader == NO_LEADER
        change = ConfigChange(key="unclean.leader.election.enable", operation="set", value="true")
        name = "t" if kind == "topic" else ""
        resource = ResourceChange(resource_type=kind, resource=name, changes=(change,))
        cluster.ask(AlterConfigs(resources=(resource,)))
        after = cluster.partition("t")
        assert (after.leader, after.isr, after.eligible) == (0, (0,), ())

    def test_a_replica_in_a_failed_directory_is_not_taken_even_uncleanly(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1), unclean_leader_election_enable="true")
        cluster.crash(1)
        cluster.beat(0, failed_directories=(directory(0),))
        assert cluster.partition("t").leader == NO_LEADER


class TestDirectories:
    def test_a_stalled_directory_gives_up_leadership_and_in_sync_place_and_gets_them_back(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2))
        cluster.made("alone", (0,))
        cluster.beat(0, stalled_directories=(directory(0),))
        assert not cluster.image.brokers[0].fenced
        assert (cluster.partition("t").leader, cluster.partition("t").isr) == (1, (1, 2))
        alone = cluster.partition("alone")
        assert (alone.leader, alone.isr, alone.eligible) == (NO_LEADER, (), (0,))
        assert cluster.propose("t", (0, 1, 2)).error is ErrorCode.INELIGIBLE_REPLICA
        before = cluster.image
        cluster.beat(0, stalled_directories=(directory(0),))
        assert cluster.image is before, "reported once"
        cluster.beat(0)
        assert cluster.partition("alone").leader == 0
        assert cluster.propose("t", (0, 1, 2)).error is None

    def test_what_a_failed_directory_held_is_not_eligible(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1))
        cluster.made("alone", (0,))
        cluster.beat(0, failed_directories=(directory(0),))
        assert (cluster.partition("alone").eligible, cluster.partition("t").leader) == ((), 1)

    def test_a_directory_that_the_broker_did_not_register_is_refused(self) -> None:
        cluster = Cluster(1)
        epoch = cluster.image.brokers[0].broker_epoch
        beat = Heartbeat(broker=0, broker_epoch=epoch, metadata_offset=9, failed_directories=(directory(8),))
        assert cluster.refused(beat).code is ErrorCode.INVALID_REQUEST

    def test_a_broker_that_leaves_is_not_elected_on_its_way_out(self) -> None:
        cluster = Cluster(2)
        cluster.made("t", (0, 1), unclean_leader_election_enable="true", min_insync_replicas="1")
        cluster.beat(1, stalled_directories=(directory(1),))
        cluster.crash(0)
        epoch = cluster.partition("t").leader_epoch
        cluster.beat(1, wants_shutdown=True)
        assert (cluster.partition("t").eligible, cluster.partition("t").leader_epoch) == ((0,), epoch)


class TestDrain:
    def test_leaderships_move_away_and_stay_away_while_others_can_lead(self) -> None:
        cluster = Cluster(3)
        cluster.made("t", (0, 1, 2), (2, 0, 1), (1, 0, 2))
        cluster.made("alone", (0,))
        assert cluster.ask(Drain(broker=0)) == Drained(leads=1, replicas=4)
        assert [cluster.partition("t", number).leader for number in range(3)] == [1, 2, 1]
        assert cluster.partition("alone").leader == 0
        assert 0 in cluster.partition("t").isr, "it still follows"
        cluster.crash(1)
        assert cluster.partition("t", 2).leader == 2
        cluster.crash(2)
        assert cluster.partition("t", 2).leader == 0, "better than nobody"

    def test_it_survives_a_restart_and_can_be_ended(self) -> None:
        cluster = Cluster(2)
        cluster.ask(Drain(broker=1))
        cluster.crash(1)
        cluster.start(1)
        assert cluster.image.brokers[1].draining
        cluster.ask(Drain(broker=1, on=False))
        assert not cluster.image.brokers[1].draining

    def test_an_unknown_broker_and_validation_only_change_nothing(self) -> None:
        cluster = Cluster(2)
        assert cluster.refused(Drain(broker=7)).code is ErrorCode.BROKER_ID_NOT_REGISTERED
        before = cluster.image
        cluster.made("t", (0, 1))
        held = cluster.image
        assert cluster.ask(Drain(broker=0, validate_only=True)) == Drained(leads=0, replicas=1)
        assert cluster.image is held is not before
