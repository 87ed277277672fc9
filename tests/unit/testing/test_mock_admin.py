from __future__ import annotations

import pytest

from tidelog.client.admin.calls import AdminClosedError
from tidelog.client.admin.values import ConfigResource, ListedOffset, NewTopic
from tidelog.client.record import TopicPartition
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.testing import MockAdmin

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


@pytest.mark.requirement("a:G-70", "a:S-07")
@pytest.mark.parametrize("brokers", [1, 3, 100])
def test_what_was_created_is_listed_with_any_number_of_brokers(brokers: int) -> None:
    with MockAdmin(brokers=brokers) as admin:
        factor = min(3, brokers)
        made = admin.create_topic("orders", partitions=6, replication_factor=factor)
        assert (made.partitions, made.replication_factor) == (6, factor)
        assert [(one.name, one.partitions, one.topic_id) for one in admin.list_topics()] == [
            ("orders", 6, made.topic_id)
        ]
        described = admin.describe_topic("orders")
        assert all(len(set(one.replicas)) == factor and one.leader in one.isr for one in described.partitions)
        assert len(admin.describe_cluster().brokers) == brokers
        admin.delete_topic("orders")
        assert admin.list_topics() == []
    with pytest.raises(AdminClosedError):
        admin.list_topics()


def ensure_topics(admin: MockAdmin, names: list[str]) -> None:
    for name in names:
        if name.startswith("test"):
            admin.create_topic(name, partitions=1, replication_factor=1)


@pytest.mark.requirement("a:S-07", "a:X3-19")
def test_a_program_can_be_asked_which_calls_it_made() -> None:
    admin = MockAdmin()
    ensure_topics(admin, ["test-1", "other"])
    assert admin.calls == ["create_topic"]
    assert [one.name for one in admin.list_topics()] == ["test-1"]


def test_a_part_of_a_call_may_fail_and_a_validated_topic_is_not_created() -> None:
    admin = MockAdmin(brokers=2)
    admin.create_topic("orders", partitions=1, replication_factor=2)
    found = admin.create_topics([NewTopic("a", 1, 1), NewTopic("orders", 1, 1)], partial=True)
    assert set(found.succeeded) == {"a"}
    assert set(found.errors) == {"orders"}
    admin.create_topic("checked", partitions=1, replication_factor=1, validate_only=True)
    assert "checked" not in [one.name for one in admin.list_topics()]


def test_settings_and_partitions_change() -> None:
    admin = MockAdmin()
    admin.create_topic("orders", partitions=1, replication_factor=3, configs={"retention.ms": 5_000})
    resource = ConfigResource("topic", "orders")
    assert admin.describe_config(resource, ["retention.ms"])["retention.ms"].value == "5000"
    admin.alter_config(resource, deletes=["retention.ms"], sets={"cleanup.policy": "compact"})
    entries = admin.describe_configs([resource])[resource]
    assert entries["retention.ms"].is_default
    assert entries["cleanup.policy"].value == "compact"
    assert admin.add_partitions({"orders": 4})["orders"] == 4
    assert len(admin.describe_topics()["orders"].partitions) == 4


def test_leaders_move_when_a_broker_dies_and_comes_back() -> None:
    admin = MockAdmin(brokers=3)
    admin.create_topic("orders", assignment=[[1, 2, 3]])
    admin.kill_broker(1)
    (partition,) = admin.describe_topic("orders").partitions
    assert partition.leader != 1
    assert 1 not in partition.isr
    admin.restart_broker(1)
    assert admin.elect_leaders([("orders", 0)]).all() == {P0: None}
    assert admin.describe_topic("orders").partitions[0].leader == 1
    with pytest.raises(TidelogError) as refusal:
        admin.elect_leaders([("orders", 0)])
    assert refusal.value.code is ErrorCode.ELECTION_NOT_NEEDED


def test_a_reassignment_is_under_way_until_it_is_finished() -> None:
    admin = MockAdmin(brokers=4)
    admin.create_topic("orders", assignment=[[1, 2]])
    admin.alter_reassignments({P0: [3, 4]})
    (move,) = admin.list_reassignments()
    assert set(move.adding_replicas) == {3, 4}
    admin.finish_reassignments()
    assert admin.list_reassignments() == []
    assert set(admin.describe_topic("orders").partitions[0].replicas) == {3, 4}
    assert admin.describe_log_dirs([3])[3][0].replicas[0].partition == P0


def test_groups_have_lag_and_can_be_reset_when_they_are_empty() -> None:
    admin = MockAdmin()
    admin.create_topic("orders", partitions=2, replication_factor=1)
    admin.set_offsets(P0, start=5, end=25, times=[(1_000, 5), (2_000, 15)])
    admin.add_group("billing", {P0: 10}, members={"m1": [P0]})
    (row,) = admin.group_lag("billing")
    assert (row.committed, row.end, row.lag, row.member_id) == (10, 25, 15, "m1")
    assert [one.state for one in admin.list_groups()] == ["stable"]
    for job in (
        lambda: admin.reset_group_offsets("billing", to="earliest"),
        lambda: admin.alter_group_offsets("billing", {P0: 1}),
        lambda: admin.delete_group("billing"),
    ):
        with pytest.raises(TidelogError) as refusal:
            job()
        assert refusal.value.code is ErrorCode.NON_EMPTY_GROUP
    admin.remove_members("billing", all_members=True)
    assert admin.list_groups(states=["stable"]).groups == ()
    (change,) = admin.reset_group_offsets("billing", to="earliest", dry_run=True)
    assert (change.before, change.after) == (10, 5)
    assert admin.group_offsets("billing")[P0].committed.offset == 10
    admin.reset_group_offsets("billing", to_time=1_500)
    assert admin.group_offsets("billing")[P0].committed.offset == 15
    admin.reset_group_offsets("billing", shift_by=-100)
    assert admin.group_offsets("billing")[P0].committed.offset == 5
    admin.delete_group_offsets("billing", "orders")
    assert admin.group_offsets("billing") == {}
    admin.delete_group("billing")
    assert len(admin.list_groups()) == 0


def test_records_are_deleted_up_to_an_offset() -> None:
    admin = MockAdmin()
    admin.create_topic("orders", partitions=2, replication_factor=1)
    admin.set_offsets(P0, end=25, times=[(1_000, 0), (2_000, 15)])
    assert {place: row.offset for place, row in admin.list_offsets([P0, P1]).items()} == {P0: 25, P1: 0}
    assert admin.list_offsets([P0], at=1_500)[P0] == ListedOffset(15, 2_000, -1)
    assert admin.list_offsets([P0], at="max_timestamp")[P0] == ListedOffset(15, 2_000, -1)
    assert admin.list_offsets([P1], at="max_timestamp")[P1].offset is None
    assert admin.delete_records({P0: 10}).all() == {P0: 10}
    assert admin.list_offsets([P0], at="earliest")[P0].offset == 10
    assert admin.delete_records_by_time([P0], 2_000).all() == {P0: 15}
    found = admin.delete_records({P0: 26, P1: "end"}, partial=True)
    assert found.errors[P0].code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert found.succeeded == {P1: 0}


def test_a_call_fails_as_often_as_configured() -> None:
    admin = MockAdmin()
    admin.fail_next("create_topic", TidelogError("no"), times=2)
    for _ in range(2):
        with pytest.raises(TidelogError, match="no"):
            admin.create_topic("orders", partitions=1, replication_factor=1)
    admin.create_topic("orders", partitions=1, replication_factor=1)
    assert admin.metrics() == {"calls": 3, "failures": 2, "calls_in_progress": 0}
    with pytest.raises(ValueError, match="no_such"):
        admin.fail_next("no_such", TidelogError("no"))
    assert admin.describe_quorum().leader == 1
