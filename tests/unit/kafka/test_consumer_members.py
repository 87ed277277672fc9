"""Members of consumer groups through the Kafka API, and groups that change their protocol."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups.cluster import GroupCluster
from support.kafka.group_api import (
    Classic,
    GroupApi,
    codes,
    commit_of,
    describe,
    going_on,
    joining,
    name_of,
    parts,
    round_of,
)

from tidelog.rpc.kafka.messages import groups as messages

pytest_plugins = ["support.kafka.group_fixtures"]


@pytest.mark.requirement("a:F-01", "a:F-05", "a:F-20", "a:F-32")
def test_two_consumers_share_a_topic(cluster: GroupCluster, api: GroupApi) -> None:
    one = api.ask(joining("pair", member_id="one", rack_id="r1", server_assignor="uniform"))
    assert (one.error_code, one.error_message, one.member_id, one.member_epoch) == (0, None, "one", 1)
    assert one.heartbeat_interval_ms == api.groups.heartbeat_interval_ms
    assert parts(one) == [0, 1, 2, 3]
    (topic,) = one.assignment.topic_partitions
    image = cluster.image()
    assert topic.topic_id == image.topic_ids["orders"].bytes
    quiet = api.ask(going_on("pair", one, topic_partitions=one.assignment.topic_partitions))
    assert (quiet.member_epoch, quiet.assignment) == (1, None), "nothing has changed"
    # The second one gets nothing that the first one still holds.
    two = api.ask(joining("pair", member_id="two"))
    assert (two.member_epoch, two.assignment.topic_partitions) == (2, [])
    one = api.ask(going_on("pair", one))
    assert one.member_epoch == 2
    kept = parts(one)
    assert len(kept) == 2
    assert api.ask(going_on("pair", two)).assignment is None, "not given up yet"
    api.ask(going_on("pair", one, topic_partitions=one.assignment.topic_partitions))
    two = api.ask(going_on("pair", two))
    assert sorted(kept + parts(two)) == [0, 1, 2, 3]
    # What it holds it commits, with its epoch; what it gave up it does not.
    commit = commit_of("pair", {("orders", kept[0]): 5, ("orders", parts(two)[0]): 6})
    commit.member_id, commit.generation_id_or_member_epoch = "one", 2
    assert codes(api.ask(commit, 9)) == ["", "STALE_MEMBER_EPOCH"]
    assert codes(api.ask(commit, 8)) == ["", "UNSUPPORTED_VERSION"], "older clients do not know that error"
    commit.generation_id_or_member_epoch = 7
    assert codes(api.ask(commit, 9)) == ["STALE_MEMBER_EPOCH"] * 2
    assert cluster.committed("pair") == {("orders", kept[0]): 5}
    # They leave.
    left = api.ask(going_on("pair", one, member_epoch=-1))
    assert (left.error_code, left.member_epoch, left.assignment) == (0, -1, None)
    assert parts(api.ask(going_on("pair", two))) == [0, 1, 2, 3]
    assert api.ask(going_on("pair", two, member_epoch=-1)).error_code == 0


def test_members_of_both_apis_are_one_group(cluster: GroupCluster, api: GroupApi) -> None:
    ours = cluster.member("mixed", "orders")
    cluster.until(lambda: len(ours.owned) == 4)
    theirs = api.ask(joining("mixed", member_id="theirs"))
    assert theirs.assignment.topic_partitions == []
    cluster.until(lambda: len(ours.owned) == 2)

    def is_dealt() -> bool:
        nonlocal theirs
        reported = api.ask(going_on("mixed", theirs))
        assert reported.error_code == 0
        if reported.assignment is not None:
            theirs = reported
        return len(theirs.assignment.topic_partitions) == 1 and len(parts(theirs)) == 2

    api.until(is_dealt)
    assert {number for _, number in ours.owned} | set(parts(theirs)) == {0, 1, 2, 3}
    assert cluster.commit("mixed", {("orders", min(number for _, number in ours.owned)): 3}, member=ours) == [""]
    assert api.ask(going_on("mixed", theirs, member_epoch=-1)).error_code == 0
    cluster.until(lambda: len(ours.owned) == 4)
    request = messages.LeaveGroupRequest(
        group_id="mixed",
        members=[messages.MemberIdentity(member_id="unknown"), messages.MemberIdentity(member_id=ours.member_id)],
    )
    ours.comes_back = False
    assert [name_of(row.error_code) for row in api.ask(request).members] == ["UNKNOWN_MEMBER_ID", ""]
    cluster.until(lambda: ours.is_over)


def test_patterns_and_ids_by_version(api: GroupApi) -> None:
    generated = api.ask(joining("ids", member_id=""), 0)
    assert (generated.error_code, generated.member_epoch) == (0, 1)
    assert len(generated.member_id) == 36
    assert api.ask(going_on("ids", generated), 0).error_code == 0
    assert api.ask(going_on("ids", generated, member_epoch=-1), 0).error_code == 0
    by_pattern = joining("pattern", subscribed_topic_names=None, subscribed_topic_regex="o(rd|th)ers")
    found = api.ask(by_pattern)
    assert sum(len(topic.partitions) for topic in found.assignment.topic_partitions) == 6
    narrower = api.ask(going_on("pattern", found, subscribed_topic_regex="oth.*"))
    assert parts(narrower) == [0, 1]
    broken = api.ask(joining("pattern", member_id="x", subscribed_topic_regex="o(rders"))
    assert name_of(broken.error_code) == "INVALID_REGULAR_EXPRESSION"
    assert broken.error_message


@pytest.mark.requirement("a:F-08", "a:E-36")
def test_static_consumers_keep_their_places(api: GroupApi) -> None:
    first = api.ask(joining("places", member_id="first", instance_id="slot"))
    assert parts(first) == [0, 1, 2, 3]
    second = joining("places", member_id="second", instance_id="slot")
    assert name_of(api.ask(second).error_code) == "UNRELEASED_INSTANCE_ID"
    away = api.ask(going_on("places", first, member_epoch=-2, instance_id="slot"))
    assert (away.error_code, away.member_epoch) == (0, -2)
    back = api.ask(second)
    assert (parts(back), back.member_epoch) == ([0, 1, 2, 3], first.member_epoch)
    stale = api.ask(going_on("places", first, instance_id="slot"))
    assert name_of(stale.error_code) == "FENCED_INSTANCE_ID"
    request = messages.LeaveGroupRequest(
        group_id="places",
        members=[
            messages.MemberIdentity(member_id="first", group_instance_id="slot"),
            messages.MemberIdentity(member_id="", group_instance_id="slot"),
            messages.MemberIdentity(member_id="second", group_instance_id="slot"),
        ],
    )
    rows = api.ask(request).members
    assert [name_of(row.error_code) for row in rows] == ["FENCED_INSTANCE_ID", "", ""], "named twice, out once"
    assert name_of(api.ask(going_on("places", back)).error_code) == "UNKNOWN_MEMBER_ID"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"member_id": ""}, "INVALID_REQUEST"),
        ({"instance_id": ""}, "INVALID_REQUEST"),
        ({"rack_id": ""}, "INVALID_REQUEST"),
        ({"rebalance_timeout_ms": -1}, "INVALID_REQUEST"),
        ({"topic_partitions": None}, "INVALID_REQUEST"),
        (
            {"topic_partitions": [messages.ConsumerGroupHeartbeatTopicPartitions(topic_id=bytes(16), partitions=[0])]},
            "INVALID_REQUEST",
        ),
        ({"subscribed_topic_names": None}, "INVALID_REQUEST"),
        ({"member_epoch": -2}, "INVALID_REQUEST"),
        ({"member_epoch": -3}, "INVALID_REQUEST"),
        ({"member_epoch": -1}, "UNKNOWN_MEMBER_ID"),
        ({"member_epoch": 4}, "UNKNOWN_MEMBER_ID"),
        ({"server_assignor": "mine"}, "UNSUPPORTED_ASSIGNOR"),
        ({"subscribed_topic_regex": "x" * 2_000}, "INVALID_REGULAR_EXPRESSION"),
    ],
)
def test_a_consumer_heartbeat_that_cannot_be(api: GroupApi, more: dict[str, Any], error: str) -> None:
    reported = api.ask(joining("wrong", **more))
    assert name_of(reported.error_code) == error
    assert reported.error_message


def test_more_of_a_heartbeat_that_cannot_be(cluster: GroupCluster, api: GroupApi) -> None:
    assert name_of(api.ask(joining("")).error_code) == "INVALID_REQUEST"
    assert name_of(api.ask(joining("x" * 2_000)).error_code) == "INVALID_GROUP_ID"
    assert name_of(api.ask(joining("wrong", member_id="", member_epoch=3), 0).error_code) == "INVALID_REQUEST"
    reported = api.ask(joining("full"))
    ahead = going_on("full", reported, member_epoch=reported.member_epoch + 1)
    assert name_of(api.ask(ahead).error_code) == "FENCED_MEMBER_EPOCH"
    cluster.set_cluster("group.consumer.max.size", "1")
    try:
        assert name_of(api.ask(joining("full", member_id="two")).error_code) == "GROUP_MAX_SIZE_REACHED"
    finally:
        cluster.set_cluster("group.consumer.max.size", "1000")


# Two protocols, one group.


def test_a_group_that_must_not_be_converted_changes_its_protocol_when_it_is_empty(
    cluster: GroupCluster, api: GroupApi
) -> None:
    """Up and down again; offsets and epochs go on."""
    cluster.set_cluster("group.consumer.migration.policy", "disabled")
    old = Classic(api, "change")
    api.run(lambda: round_of(old))
    assert api.run(lambda: old.commit(4)) == ""
    refused = api.ask(joining("change"))
    assert name_of(refused.error_code) == "GROUP_ID_NOT_FOUND"
    assert "not a consumer group" in refused.error_message
    assert api.run(old.leave) == ""
    api.until(lambda: describe(api, "change").group_state == "Empty")
    # Up.
    new = api.ask(joining("change"))
    assert (new.error_code, parts(new)) == (0, [0, 1, 2, 3])
    assert new.member_epoch > old.generation
    late = Classic(api, "change")
    late.member_id = new.member_id
    assert api.run(late.beat) == "UNKNOWN_MEMBER_ID"
    assert cluster.committed("change") == {("orders", 0): 4}
    assert api.ask(going_on("change", new, member_epoch=-1)).error_code == 0
    # Down.
    back = Classic(api, "change")
    api.run(lambda: round_of(back))
    assert back.error == ""
    assert back.generation > new.member_epoch
    assert api.run(lambda: back.commit(5)) == ""
    assert cluster.committed("change") == {("orders", 0): 5}
    assert api.run(back.leave) == ""
    cluster.set_cluster("group.consumer.migration.policy", "bidirectional")


def test_an_id_that_was_asked_for_and_never_used_is_no_member(api: GroupApi) -> None:
    half = Classic(api, "half")
    half.version = 4
    request = messages.JoinGroupRequest(
        group_id="half",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    half.member_id = api.ask(request).member_id
    assert describe(api, "half").group_state == "Empty"
    reported = api.ask(joining("half"))
    assert parts(reported) == [0, 1, 2, 3]
    (row,) = api.ask(messages.ConsumerGroupDescribeRequest(group_ids=["half"])).groups
    assert (row.error_code, row.group_state, len(row.members)) == (0, "Stable", 1)
    listed = api.ask(messages.ListGroupsRequest(types_filter=["consumer"])).groups
    assert [one.group_state for one in listed if one.group_id == "half"] == ["Stable"]
    api.run(half.join)
    assert half.error == "", "it is used after all"
    assert api.ask(going_on("half", reported, member_epoch=-1)).error_code == 0
