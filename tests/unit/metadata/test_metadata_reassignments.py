"""Moving replicas: add, move, drop, reorder, cancel, replace, list."""

from typing import Any

import pytest
from support.metadata.controller import Cluster, directory

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.partitions import BalanceLeaders
from tidelog.metadata.queries import ListReassignments
from tidelog.metadata.reassignments import AlterReassignments, ReassignmentTarget, list_reassignments
from tidelog.model.errors import ErrorCode


def reassign(cluster: Cluster, target: tuple[int, ...] | None, name: str = "t", number: int = 0, **more: Any) -> Any:
    item = ReassignmentTarget(topic=name, partition=number, replicas=target)
    return cluster.ask(AlterReassignments(partitions=(item,), **more)).items[0]


def three() -> Cluster:
    cluster = Cluster(6)
    cluster.made("t", (0, 1, 2))
    return cluster


@pytest.mark.requirement("a:O-16", "a:X3-52")
def test_a_move_adds_the_new_replicas_first_and_drops_the_old_when_all_are_in_sync() -> None:
    cluster = three()
    assert reassign(cluster, (3, 4, 5)).error is None
    under_way = cluster.partition("t")
    assert under_way.replicas == (0, 1, 2, 3, 4, 5)
    assert (under_way.adding, under_way.removing, under_way.target) == ((3, 4, 5), (0, 1, 2), (3, 4, 5))
    assert under_way.directories[3] == directory(3)
    (progress,) = list_reassignments(cluster.image)
    assert progress.waiting_for == (3, 4, 5)
    assert cluster.propose("t", (0, 1, 2, 3, 4)).error is None
    assert list_reassignments(cluster.image)[0].waiting_for == (5,)
    assert cluster.partition("t").leader == 0
    state = cluster.propose("t", (0, 1, 2, 3, 4, 5))
    assert state.error is ErrorCode.NEW_LEADER_ELECTED
    after = cluster.partition("t")
    assert (after.replicas, after.isr, after.leader) == ((3, 4, 5), (3, 4, 5), 3)
    assert (after.adding, after.removing, after.target) == ((), (), ())
    assert after.leader_epoch == 1
    assert list_reassignments(cluster.image) == ()
    assert cluster.image.replica_count(0) == 0


@pytest.mark.requirement("a:X3-52")
def test_a_replica_can_be_added() -> None:
    cluster = three()
    reassign(cluster, (0, 1, 2, 3))
    cluster.propose("t", (0, 1, 2, 3))
    after = cluster.partition("t")
    assert (after.replicas, after.isr, after.leader, after.leader_epoch) == ((0, 1, 2, 3), (0, 1, 2, 3), 0, 0)


def test_another_number_of_replicas_is_refused_where_the_request_says_so() -> None:
    cluster = three()
    for target in ((0, 1), (0, 1, 2, 3)):
        refused = reassign(cluster, target, keeps_factor=True)
        assert refused.error is ErrorCode.INVALID_REPLICATION_FACTOR
        assert "has 3 replicas" in refused.message
    assert reassign(cluster, (0, 1, 5), keeps_factor=True).error is None
    refused = reassign(cluster, (0, 1, 4, 5), keeps_factor=True)
    assert refused.error is ErrorCode.INVALID_REPLICATION_FACTOR, "those from before the move under way count"
    assert reassign(cluster, None, keeps_factor=True).error is None


def test_replicas_that_are_added_do_not_raise_what_a_write_needs() -> None:
    cluster = three()
    reassign(cluster, (3, 4, 5))
    assert cluster.propose("t", (0, 1)).min_isr == 2


@pytest.mark.requirement("a:X3-52")
def test_dropping_replicas_is_complete_at_once_and_raises_the_epoch() -> None:
    cluster = three()
    assert reassign(cluster, (1, 2)).error is None
    after = cluster.partition("t")
    assert (after.replicas, after.leader, after.leader_epoch) == ((1, 2), 1, 1)
    reassign(cluster, (1,))
    assert cluster.partition("t").leader_epoch == 2, "2 must not follow in the epoch in which it was a replica"


@pytest.mark.requirement("a:X3-52", "a:B-13")
def test_another_order_changes_the_preferred_leader_only() -> None:
    cluster = three()
    reassign(cluster, (2, 0, 1))
    after = cluster.partition("t")
    assert (after.replicas, after.leader, after.leader_epoch, after.target) == ((2, 0, 1), 0, 0, ())
    assert after.directories == (directory(2), directory(0), directory(1))
    assert cluster.ask(BalanceLeaders()).elected == 1
    assert cluster.partition("t").leader == 2


@pytest.mark.requirement("a:X3-52")
def test_a_cancel_restores_what_was_before() -> None:
    cluster = three()
    before = cluster.partition("t")
    reassign(cluster, (5, 0))
    cluster.propose("t", (0, 1, 2, 5)[:3])
    assert reassign(cluster, None).error is None
    after = cluster.partition("t")
    assert (after.replicas, after.isr, after.directories) == (before.replicas, before.isr, before.directories)
    assert list_reassignments(cluster.image) == ()
    assert reassign(cluster, None).error is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


def test_a_cancel_gives_leadership_back_from_a_replica_that_goes() -> None:
    cluster = three()
    reassign(cluster, (5, 4, 3))
    cluster.propose("t", (0, 1, 2, 5))
    for broker in (0, 1, 2):
        cluster.crash(broker)
    assert cluster.partition("t").leader == 5
    cluster.start(2)
    cluster.propose("t", (2, 5))
    assert reassign(cluster, None).error is None
    after = cluster.partition("t")
    assert (after.replicas, after.leader, after.isr) == ((0, 1, 2), 2, (2,))


def test_what_would_drop_the_last_replica_with_the_data_is_refused() -> None:
    cluster = three()
    reassign(cluster, (5, 4, 3))
    cluster.propose("t", (0, 1, 2, 5, 4))
    for broker in (0, 1, 2):
        cluster.crash(broker)
    before = cluster.image
    outcome = reassign(cluster, None)
    assert (outcome.error, cluster.image) == (ErrorCode.INVALID_REPLICA_ASSIGNMENT, before)
    assert "they would be dropped" in outcome.message


def test_a_new_target_replaces_the_old_one() -> None:
    cluster = three()
    reassign(cluster, (3, 4, 5))
    cluster.propose("t", (0, 1, 2, 3))
    reassign(cluster, (0, 1, 4))
    now = cluster.partition("t")
    assert (now.replicas, now.adding, now.removing) == ((0, 1, 2, 4), (4,), (2,))
    assert now.isr == (0, 1, 2)
    assert now.leader_epoch == 1, "3 was a replica in the epoch before"


def test_a_dead_broker_is_replaced_without_it() -> None:
    cluster = three()
    cluster.crash(2)
    reassign(cluster, (0, 1, 3))
    assert cluster.propose("t", (0, 1, 3)).error is None
    assert cluster.partition("t").replicas == (0, 1, 3)


@pytest.mark.requirement("a:X3-52")
def test_the_list_can_be_for_some_partitions() -> None:
    cluster = Cluster(4)
    cluster.made("t", (0,), (1,))
    cluster.made("a", (0,))
    for name, number in (("t", 0), ("t", 1), ("a", 0)):
        reassign(cluster, (3,), name, number)
    assert [(r.topic, r.partition) for r in list_reassignments(cluster.image)] == [("a", 0), ("t", 0), ("t", 1)]
    question = ListReassignments(partitions=(("t", 1), ("t", 9)))
    answer = cluster.controller.answer(cluster.image, question)
    assert [(r.topic, r.partition) for r in answer.reassignments] == [("t", 1)]


@pytest.mark.parametrize(
    ("name", "number", "target", "code"),
    [
        ("nothing", 0, (1,), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("", 0, (1,), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("t", 1, (1,), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("t", -1, (1,), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("t", 0, (), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ("t", 0, (1, 1), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ("t", 0, (1, 77), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ("t", 0, (-1,), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ("t", 0, None, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
    ],
)
def test_bad_targets_are_refused(name: str, number: int, target: tuple[int, ...] | None, code: ErrorCode) -> None:
    cluster = three()
    before = cluster.image
    outcome = reassign(cluster, target, name, number)
    assert (outcome.error, cluster.image) == (code, before)
    assert outcome.message


def test_a_partition_named_twice_is_refused_and_validation_only_changes_nothing() -> None:
    cluster = three()
    before = cluster.image
    item = ReassignmentTarget(topic="t", partition=0, replicas=(3,))
    twice = cluster.ask(AlterReassignments(partitions=(item, item)))
    assert [outcome.error for outcome in twice.items] == [ErrorCode.INVALID_REQUEST] * 2
    assert reassign(cluster, (3, 4), validate_only=True).error is None
    assert cluster.image is before


def test_a_full_broker_takes_no_more() -> None:
    cluster = three()
    change = ConfigChange(key="max.partitions.per.broker", operation="set", value="1")
    cluster.ask(AlterConfigs(resources=(ResourceChange(resource_type="cluster", changes=(change,)),)))
    cluster.made("u", (3,))
    assert reassign(cluster, (0, 1, 3)).error is ErrorCode.POLICY_VIOLATION
    assert reassign(cluster, (0, 1, 4)).error is None
