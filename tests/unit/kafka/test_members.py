"""Membership through the Kafka door: on a simulated broker, over its real coordinator and log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from group_cluster import GroupCluster
from hypothesis import given
from hypothesis import strategies as st
from kafka_groups import Classic, Door, codes, commit_of, describe, going_on, joining, name_of, round_of, subscription

from tidelog.coordinator.shard import Phase
from tidelog.rpc.kafka.members import CLIENT_ID_LENGTH_MAX, subscribed_topics
from tidelog.rpc.kafka.messages import groups as messages


@pytest.fixture(scope="module")
def cluster() -> Iterator[GroupCluster]:
    with GroupCluster(seed=11, offsets_partitions=1) as made:
        made.topic("orders", partitions=4)
        made.topic("others", partitions=2)
        made.shard("any")
        yield made


@pytest.fixture(scope="module")
def door(cluster: GroupCluster) -> Door:
    return Door(cluster, cluster.coordinator("any"))


# The classic protocol.


@pytest.mark.source("a:F-01", "a:F-03", "a:F-06", "a:F-07", "a:F-20", "a:F-35", "a:E-07", "a:E-12")
def test_a_whole_life_of_a_classic_group_of_three(cluster: GroupCluster, door: Door) -> None:
    one, two, three = members = [Classic(door, "round") for _ in range(3)]

    # All join the empty group; the first one leads, and hears of all.
    door.run(lambda: round_of(*members))
    assert {member.error for member in members} == {""}
    assert len({member.member_id for member in members}) == 3
    assert all(member.member_id.startswith("app-") for member in members)
    assert len({member.joined.leader for member in members}) == 1
    (leader,) = [member for member in members if member.leads]
    assert {row.member_id for row in leader.joined.members} == {member.member_id for member in members}
    assert {row.metadata for row in leader.joined.members} == {subscription("orders")}
    assert all(not member.joined.members for member in members if member is not leader)
    assert {(member.joined.protocol_type, member.joined.protocol_name) for member in members} == {("consumer", "range")}
    assert [member.assignment for member in members] == [f"for {member.member_id}".encode() for member in members]
    assert {member.generation for member in members} == {1}

    # It is stable: heartbeats are quiet, commits are taken with the generation alone.
    assert [door.run(member.beat) for member in members] == ["", "", ""]
    assert door.run(lambda: one.commit(7)) == ""
    assert door.run(lambda: one.beat(generation_id=9)) == "ILLEGAL_GENERATION"
    found = describe(door, "round")
    assert (found.group_state, found.protocol_type, found.protocol_data) == ("Stable", "consumer", "range")
    assert {row.member_id: row.member_assignment for row in found.members} == {
        member.member_id: member.assignment for member in members
    }
    assert {row.member_metadata for row in found.members} == {subscription("orders")}
    assert {(row.client_id, row.client_host) for row in found.members} == {("app", "10.0.0.9")}

    # One leaves: the others hear of it, and join again.
    assert door.run(three.leave) == ""
    assert door.run(three.beat) == "UNKNOWN_MEMBER_ID"
    assert [door.run(member.beat) for member in (one, two)] == ["REBALANCE_IN_PROGRESS"] * 2
    found = describe(door, "round")
    assert (found.group_state, found.protocol_data, len(found.members)) == ("PreparingRebalance", "", 2)
    assert {row.member_assignment for row in found.members} == {b""}, "its bytes are told while it is stable"
    assert door.run(lambda: one.commit(8)) == "", "what it has read still counts"
    door.run(lambda: round_of(one, two))
    assert {member.generation for member in (one, two)} == {2}
    assert {member.error for member in (one, two)} == {""}

    # Commits of the old generation are over, and so are programs that are no members.
    one.generation = 1
    assert door.run(lambda: one.commit(9)) == "ILLEGAL_GENERATION"
    one.generation = 2
    assert codes(door.ask(commit_of("round", {("orders", 0): 1}), 9)) == ["UNKNOWN_MEMBER_ID"]
    assert door.run(lambda: one.commit(9)) == ""
    assert cluster.committed("round") == {("orders", 0): 9}, "the other door tells the same"

    # All leave: the group is empty, and keeps its offsets.
    assert [door.run(member.leave) for member in (one, two)] == ["", ""]
    door.until(lambda: describe(door, "round").group_state == "Empty")
    found = describe(door, "round")
    assert (found.protocol_type, found.members) == ("consumer", [])
    assert cluster.committed("round") == {("orders", 0): 9}


@pytest.mark.parametrize(
    ("join", "sync", "beat", "leave"), [(0, 0, 0, 0), (2, 1, 1, 1), (4, 2, 2, 2), (5, 3, 3, 3), (7, 4, 4, 4)]
)
def test_every_version_goes_through_a_round(door: Door, join: int, sync: int, beat: int, leave: int) -> None:
    """Older ones have no id first, no protocol type, no instance id."""
    member = Classic(door, f"version-{join}", version=join)

    async def life() -> None:
        request = messages.JoinGroupRequest(
            group_id=member.group,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000 if join else -1,
            protocol_type="consumer",
            protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=subscription("orders"))],
        )
        first = await door.call(request, join)
        assert name_of(first.error_code) == ("MEMBER_ID_REQUIRED" if join >= 4 else "")
        if first.error_code:
            assert first.protocol_name == (None if join >= 7 else "")
            member.member_id = first.member_id
            await member.join()
        else:
            member.joined, member.member_id, member.generation = first, first.member_id, first.generation_id
        assert member.leads
        await member.sync(sync)
        assert (member.error, member.assignment) == ("", f"for {member.member_id}".encode())
        assert await member.beat(beat) == ""
        assert await member.leave(leave) == ""

    door.run(life)
    assert door.run(lambda: member.leave(leave)) == "UNKNOWN_MEMBER_ID"


@pytest.mark.source("a:C-16")
def test_a_join_that_cannot_be(cluster: GroupCluster, door: Door) -> None:
    def refused(group: str = "picky", **more: Any) -> str:
        member = Classic(door, group, instance_id=more.pop("instance_id", None))
        member.member_id = more.pop("member_id", "")
        door.run(lambda: member.join(**more))
        return member.error

    some = messages.JoinGroupRequestProtocol(name="range", metadata=b"")
    assert refused(group="") == "INVALID_GROUP_ID"
    assert refused(group="x" * 1_025) == "INVALID_GROUP_ID"
    assert refused(session_timeout_ms=5_999) == "INVALID_SESSION_TIMEOUT"
    assert refused(session_timeout_ms=1_800_001) == "INVALID_SESSION_TIMEOUT"
    assert refused(rebalance_timeout_ms=-2) == "INVALID_REQUEST"
    assert refused(protocols=[]) == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(protocol_type="") == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(member_id="nobody") == "UNKNOWN_MEMBER_ID"
    assert refused(instance_id="i" * 1_025) == "INVALID_REQUEST"
    large = messages.JoinGroupRequestProtocol(name="range", metadata=bytes(300 << 10))
    assert refused(protocols=[large]) == "INVALID_REQUEST"
    one = Classic(door, "picky", instance_id="here")
    door.run(lambda: round_of(one))
    assert one.error == ""
    assert refused(protocol_type="connect") == "INCONSISTENT_GROUP_PROTOCOL"
    other = messages.JoinGroupRequestProtocol(name="sticky", metadata=b"")
    assert refused(protocols=[other]) == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(member_id="another", instance_id="here") == "FENCED_INSTANCE_ID"
    assert door.run(lambda: one.beat(member_id="another")) == "FENCED_INSTANCE_ID"
    cluster.set_cluster("group.consumer.max.size", "1")
    try:
        assert refused(protocols=[some]) == "GROUP_MAX_SIZE_REACHED"
    finally:
        cluster.set_cluster("group.consumer.max.size", "1000")
    assert door.run(one.leave) == ""


def test_a_sync_that_cannot_be(door: Door) -> None:
    member = Classic(door, "sync")
    door.run(lambda: round_of(member))

    def refused(version: int = 5, **more: Any) -> str:
        fields: dict[str, Any] = {
            "group_id": "sync",
            "generation_id": member.generation,
            "member_id": member.member_id,
            "protocol_type": "consumer",
            "protocol_name": "range",
            **more,
        }
        return name_of(door.ask(messages.SyncGroupRequest(**fields), version).error_code)

    assert refused() == ""
    assert refused(protocol_type=None) == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(protocol_name=None) == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(version=4, protocol_type=None, protocol_name=None) == ""
    assert refused(protocol_name="sticky") == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(protocol_type="connect") == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(generation_id=member.generation + 1) == "ILLEGAL_GENERATION"
    assert refused(member_id="nobody") == "UNKNOWN_MEMBER_ID"
    assert refused(group_id="nowhere") == "UNKNOWN_MEMBER_ID"
    assert refused(group_id="") == "INVALID_GROUP_ID"
    large = messages.SyncGroupRequestAssignment(member_id=member.member_id, assignment=bytes(2 << 20))
    assert refused(assignments=[large]) == "INVALID_REQUEST"
    assert door.run(member.leave) == ""


@pytest.mark.source("a:F-08", "a:E-36")
@pytest.mark.parametrize("version", [8, 9])
def test_a_static_leader_comes_back_and_nobody_deals_again(door: Door, version: int) -> None:
    group = f"static-{version}"
    one, two = (Classic(door, group, instance_id=f"slot-{number}", version=version) for number in (1, 2))
    door.run(lambda: round_of(one, two))
    first, second = (one, two) if one.leads else (two, one)
    again = Classic(door, group, instance_id=first.instance_id, version=version)
    door.run(again.join)
    assert (again.error, again.generation) == ("", first.generation)
    assert again.member_id != first.member_id
    if version >= 9:
        assert again.leads
        assert again.joined.skip_assignment
        assert len(again.joined.members) == 2
    else:
        assert not again.leads, "it cannot be told to skip the dealing"
        assert again.joined.members == []
    door.run(again.sync)
    assert again.assignment == f"for {first.member_id}".encode(), "what its former self was dealt"
    assert door.run(second.beat) == "", "the others do not notice"
    assert door.run(first.beat) == "FENCED_INSTANCE_ID"
    assert door.run(lambda: first.commit(1)) == "FENCED_INSTANCE_ID"
    # An operator takes them out by their instance ids alone.
    request = messages.LeaveGroupRequest(
        group_id=group,
        members=[
            messages.MemberIdentity(member_id="", group_instance_id="slot-1"),
            messages.MemberIdentity(member_id="stranger", group_instance_id="slot-2"),
            messages.MemberIdentity(member_id="", group_instance_id="slot-3"),
            messages.MemberIdentity(member_id="", group_instance_id="slot-2", reason="it is old"),
        ],
    )
    rows = door.ask(request).members
    assert [name_of(row.error_code) for row in rows] == ["", "FENCED_INSTANCE_ID", "UNKNOWN_MEMBER_ID", ""]
    assert [row.group_instance_id for row in rows] == ["slot-1", "slot-2", "slot-3", "slot-2"]


def test_leaving_a_group_that_is_not_there(door: Door) -> None:
    member = Classic(door, "nowhere")
    member.member_id = "nobody"
    assert door.run(lambda: member.leave(2)) == "UNKNOWN_MEMBER_ID"
    assert door.run(lambda: member.leave(5)) == "UNKNOWN_MEMBER_ID", "in the row of the member"
    assert name_of(door.ask(messages.LeaveGroupRequest(group_id=""), 2).error_code) == "INVALID_GROUP_ID"


def test_a_connection_that_ends_while_its_join_waits(cluster: GroupCluster, door: Door) -> None:
    stays, goes = Classic(door, "gone"), Classic(door, "gone")
    rounds = cluster.shard("gone").rounds

    async def work() -> None:
        await round_of(stays)
        task = asyncio.ensure_future(goes.join())
        for _ in range(500):
            if goes.member_id and len(rounds) == 1:
                break
            await asyncio.sleep(0.01)
        assert await stays.beat() == "REBALANCE_IN_PROGRESS"
        task.cancel()
        await asyncio.wait([task])
        assert len(rounds) == 0, "nobody waits any more"
        await round_of(stays)
        assert (stays.error, stays.generation) == ("", 2), "it was in the round when it ended"
        assert len(stays.joined.members) == 2
        for _ in range(10):
            await asyncio.sleep(1)
            if await stays.beat() == "REBALANCE_IN_PROGRESS":
                break
        await round_of(stays)
        assert [row.member_id for row in stays.joined.members] == [stays.member_id], "its session is over"
        assert await stays.leave() == ""

    door.run(work)


def test_a_member_lives_by_its_heartbeats_alone(cluster: GroupCluster, door: Door) -> None:
    """No stream, no grace: the session decides, of either protocol."""
    member = Classic(door, "alone")
    door.run(lambda: round_of(member))
    told = door.ask(joining("alone-too"))
    cluster.world.run_for(9)
    assert door.run(member.beat) == ""
    cluster.world.run_for(9)
    assert door.run(member.beat) == ""
    cluster.world.run_for(11)
    assert door.run(member.beat) == "UNKNOWN_MEMBER_ID"
    assert door.ask(going_on("alone-too", told)).error_code == 0, "45 s are not over yet"
    cluster.world.run_for(46)
    assert name_of(door.ask(going_on("alone-too", told)).error_code) == "UNKNOWN_MEMBER_ID"


def test_what_the_client_calls_itself_is_cut(door: Door) -> None:
    request = messages.JoinGroupRequest(
        group_id="long",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    given = door.ask(request, client_id="x" * 20_000)
    assert name_of(given.error_code) == "MEMBER_ID_REQUIRED"
    assert given.member_id.startswith("x" * CLIENT_ID_LENGTH_MAX + "-")
    nameless = door.ask(request, client_id=None)
    assert nameless.member_id.startswith("member-")


# Trouble with the coordinator.


def test_a_broker_that_does_not_coordinate_says_so(cluster: GroupCluster, door: Door) -> None:
    other = Door(cluster, next(broker for broker in (11, 12, 13) if broker != door.broker))
    member = Classic(other, "any")
    other.run(member.join)
    assert member.error == "NOT_COORDINATOR"
    other.run(member.sync)
    assert member.error == "NOT_COORDINATOR"
    assert other.run(member.beat) == "NOT_COORDINATOR"
    assert other.run(lambda: member.leave(0)) == "NOT_COORDINATOR"
    left = other.ask(messages.LeaveGroupRequest(group_id="any", members=[messages.MemberIdentity(member_id="m")]))
    assert name_of(left.error_code) == "NOT_COORDINATOR"
    told = other.ask(joining("any"))
    assert (name_of(told.error_code), told.assignment) == ("NOT_COORDINATOR", None)
    assert f"broker {door.broker}" in told.error_message


def test_a_coordinator_that_reads_its_groups(cluster: GroupCluster, door: Door) -> None:
    shard = cluster.shard("any")
    member = Classic(door, "any")
    shard.phase = Phase.LOADING
    try:
        door.run(member.join)
        assert member.error == "COORDINATOR_LOAD_IN_PROGRESS"
        door.run(member.sync)
        assert member.error == "REBALANCE_IN_PROGRESS", "the round is lost: join again"
        assert door.run(member.beat) == "", "it may well be a member"
        assert door.run(lambda: member.leave(1)) == "COORDINATOR_LOAD_IN_PROGRESS"
        assert name_of(door.ask(joining("any")).error_code) == "COORDINATOR_LOAD_IN_PROGRESS"
        shard.phase = Phase.BROKEN
        door.run(member.join)
        assert member.error == "COORDINATOR_NOT_AVAILABLE"
        assert door.run(member.beat) == "COORDINATOR_NOT_AVAILABLE"
    finally:
        shard.phase = Phase.LEADING


def test_one_that_is_too_busy_is_not_available(door: Door) -> None:
    coordinator = door.groups.coordinator
    before, coordinator.waiting_max = coordinator.waiting_max, 0
    try:
        member = Classic(door, "busy")
        door.run(member.join)
        assert member.error == "COORDINATOR_NOT_AVAILABLE"
    finally:
        coordinator.waiting_max = before


# Subscriptions.


@given(st.lists(st.text(max_size=20), max_size=10), st.integers(0, 3), st.binary(max_size=10))
def test_topics_are_read_out_of_a_subscription(topics: list[str], version: int, rest: bytes) -> None:
    names = b"".join(len(name.encode()).to_bytes(2, "big") + name.encode() for name in topics)
    data = version.to_bytes(2, "big") + len(topics).to_bytes(4, "big") + names + rest
    assert subscribed_topics(data) == tuple(topics)


@given(st.binary(max_size=60))
def test_bytes_of_any_other_kind_are_no_trouble(data: bytes) -> None:
    assert all(isinstance(name, str) for name in subscribed_topics(data))


@pytest.mark.parametrize(
    "data", [b"", b"\0\0", b"\0\0\0\0\0\1", b"\0\0\xff\xff\xff\xff", b"\0\0\0\0\0\1\xff\xff", b"\0\0\0\0\0\1\0\1\xff"]
)
def test_a_subscription_that_is_none(data: bytes) -> None:
    assert subscribed_topics(data) == ()
