"""Where replicas go: the worked examples of the sources, and what a lost rack leaves."""

from collections import Counter

import pytest
from support.metadata.controller import Cluster

from tidelog.metadata.brokers import Drain
from tidelog.metadata.placement import UsableBroker, alternate_racks, place_replicas, spread_leaders
from tidelog.metadata.topics import choose_replicas
from tidelog.model.errors import ErrorCode, InvalidReplicationFactorError

TWO_RACKS = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}


def sites(racks: dict[int, str | None], replicas: dict[int, int] | None = None) -> list[UsableBroker]:
    return [UsableBroker(broker, rack, (replicas or {}).get(broker, 0)) for broker, rack in racks.items()]


def plain(count: int) -> list[UsableBroker]:
    return sites(dict.fromkeys(range(count)))


@pytest.mark.requirement("a:A-120", "a:A-10")
def test_thirty_replicas_over_six_brokers_are_five_each_on_different_brokers() -> None:
    assignment = place_replicas(plain(6), partitions=10, replication_factor=3)
    assert all(len(set(replicas)) == 3 for replicas in assignment)
    assert Counter(broker for replicas in assignment for broker in replicas) == dict.fromkeys(range(6), 5)


@pytest.mark.requirement("a:A-121")
def test_brokers_of_two_racks_alternate() -> None:
    assert [site.broker for site in alternate_racks(sites(dict(TWO_RACKS)))] == [0, 3, 1, 4, 2, 5]


@pytest.mark.requirement("a:A-121")
def test_a_partition_that_is_led_by_4_has_its_first_follower_on_2() -> None:
    used = {broker: 1 for broker in TWO_RACKS if broker != 4}
    (replicas,) = place_replicas(sites(dict(TWO_RACKS), used), partitions=1, replication_factor=3)
    assert replicas[:2] == (4, 2)


@pytest.mark.requirement("a:A-122", "a:A-120", "a:X3-44")
def test_with_two_racks_no_partition_has_all_replicas_on_one() -> None:
    assignment = place_replicas(sites(dict(TWO_RACKS)), partitions=12, replication_factor=2)
    assert all({TWO_RACKS[broker] for broker in replicas} == {"a", "b"} for replicas in assignment)
    assert set(Counter(broker for replicas in assignment for broker in replicas).values()) == {4}


@pytest.mark.requirement("a:A-123", "b:C-02")
@pytest.mark.parametrize("partitions", [6, 10, 13, 60])
def test_leaders_are_spread_to_within_one(partitions: int) -> None:
    leads = Counter(replicas[0] for replicas in place_replicas(plain(6), partitions=partitions, replication_factor=3))
    assert max(leads.values()) - min(leads[broker] for broker in range(6)) <= 1


def test_a_small_rack_holds_more_rather_than_leaving_a_partition_in_one_rack() -> None:
    racks: dict[int, str | None] = {0: "a", 1: "b", 2: "b", 3: "b"}
    assignment = place_replicas(sites(racks), partitions=9, replication_factor=2)
    assert all(0 in replicas for replicas in assignment)


def test_partitions_that_are_added_go_on_where_the_others_stopped() -> None:
    first = place_replicas(plain(4), partitions=2, replication_factor=1)
    more = place_replicas(plain(4), partitions=2, replication_factor=1, first=2)
    assert [*first, *more] == [(0,), (1,), (2,), (3,)]


def test_leaderships_are_passed_on_through_a_chain_of_brokers() -> None:
    # Broker 2 shares no partition with the busy broker 0: broker 1 takes one over and passes one on.
    leads = Counter(replicas[0] for replicas in spread_leaders([(0, 1), (0, 1), (0, 1), (1, 2)]))
    assert sorted(leads.values()) == [1, 1, 2]


@pytest.mark.parametrize(("brokers", "factor"), [(2, 3), (0, 1), (3, 0), (3, -2)])
def test_a_factor_that_cannot_be_met_is_refused(brokers: int, factor: int) -> None:
    with pytest.raises(InvalidReplicationFactorError):
        place_replicas(plain(brokers), partitions=1, replication_factor=factor)


@pytest.mark.requirement("a:X3-44", "a:T-23", "b:D-25")
@pytest.mark.parametrize("rack", ["a", "b", "c"])
def test_when_a_whole_rack_is_lost_every_partition_still_has_a_leader(rack: str) -> None:
    racks = {broker: "abc"[broker % 3] for broker in range(9)}
    cluster = Cluster(9, racks=racks)
    assert cluster.create("t", 30, 3).error is None
    for broker in range(9):
        if racks[broker] == rack:
            cluster.crash(broker)
    topic = cluster.image.topic_named("t")
    assert topic is not None
    for partition in topic.partitions.values():
        assert racks[partition.leader] != rack
        assert len(partition.isr) == 2, "one replica was in each rack, so writes go on"


@pytest.mark.requirement("b:E-05", "b:I-10", "a:O-11")
def test_new_brokers_take_their_share_of_new_topics_and_none_of_the_old() -> None:
    cluster = Cluster(3)
    cluster.create("old", 6, 3)
    for broker in (3, 4, 5):
        cluster.start(broker)
    assert cluster.image.replica_count(3) == 0, "what is there moves only by reassignment"
    cluster.create("new", 12, 3)
    assert [cluster.image.replica_count(broker) for broker in (3, 4, 5)] == [6, 6, 6]


def test_fenced_brokers_are_used_only_when_live_ones_are_too_few() -> None:
    cluster = Cluster(4)
    cluster.crash(3)
    assert {b for r in choose_replicas(cluster.image, partitions=8, replication_factor=3) for b in r} == {0, 1, 2}
    cluster.crash(2)
    created = cluster.create("t", 4, 3)
    assert created.error is None
    topic = cluster.image.topic_named("t")
    assert topic is not None
    for partition in topic.partitions.values():
        assert set(partition.isr) == {0, 1}
        assert partition.leader in (0, 1)


def test_nothing_is_placed_on_a_broker_that_is_drained() -> None:
    cluster = Cluster(4)
    cluster.ask(Drain(broker=1))
    cluster.create("t", 12, 3)
    assert cluster.image.replica_count(1) == 0
    refused = cluster.create("u", 1, 4)
    assert refused.error is ErrorCode.INVALID_REPLICATION_FACTOR
    assert "3 brokers are registered and 1 more is being drained" in refused.message


def test_error_names_drained_and_fenced_brokers_when_no_broker_can_take_replicas() -> None:
    cluster = Cluster(3)
    for broker in (0, 1):
        cluster.ask(Drain(broker=broker))
    cluster.crash(2)
    refused = cluster.create("t", 1, 1)
    assert refused.error is ErrorCode.INVALID_REPLICATION_FACTOR
    assert refused.message == (
        "no broker can take new replicas: of 3 registered brokers 2 are drained (`tidelog brokers drain ID --undo`) "
        "and 1 is fenced (start it)"
    )
