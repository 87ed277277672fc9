"""Membership through the Kafka API: on a simulated broker, over its real coordinator and log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    round_of,
    subscription,
)

from tidelog.coordinator.partition_shard import Phase
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.services.groups import CLIENT_ID_LENGTH_MAX, subscribed_topics

pytest_plugins = ["support.kafka.group_fixtures"]

# The classic protocol.


@pytest.mark.requirement("a:F-01", "a:F-03", "a:F-06", "a:F-07", "a:F-20", "a:F-35", "a:E-07", "a:E-12")
def test_a_whole_life_of_a_classic_group_of_three(cluster: GroupCluster, api: GroupApi) -> None:
    one, two, three = members = [Classic(api, "round") for _ in range(3)]

    # All join the empty group; the first one leads, and hears of all.
    api.run(lambda: round_of(*members))
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
    assert [api.run(member.beat) for member in members] == ["", "", ""]
    assert api.run(lambda: one.commit(7)) == ""
    assert api.run(lambda: one.beat(generation_id=9)) == "ILLEGAL_GENERATION"
    found = describe(api, "round")
    assert (found.group_state, found.protocol_type, found.protocol_data) == ("Stable", "consumer", "range")
    assert {row.member_id: row.member_assignment for row in found.members} == {
        member.member_id: member.assignment for member in members
    }
    assert {row.member_metadata for row in found.members} == {subscription("orders")}
    assert {(row.client_id, row.client_host) for row in found.members} == {("app", "10.0.0.9")}

    # One leaves: the others hear of it, and join again.
    assert api.run(three.leave) == ""
    assert api.run(three.beat) == "UNKNOWN_MEMBER_ID"
    assert [api.run(member.beat) for member in (one, two)] == ["REBALANCE_IN_PROGRESS"] * 2
    found = describe(api, "round")
    assert (found.group_state, found.protocol_data, len(found.members)) == ("PreparingRebalance", "", 2)
    assert {row.member_assignment for row in found.members} == {b""}, "its bytes are returned while it is stable"
    assert api.run(lambda: one.commit(8)) == "", "what it has read still counts"
    api.run(lambda: round_of(one, two))
    assert {member.generation for member in (one, two)} == {2}
    assert {member.error for member in (one, two)} == {""}

    # Commits of the old generation are over, and so are programs that are no members.
    one.generation = 1
    assert api.run(lambda: one.commit(9)) == "ILLEGAL_GENERATION"
    one.generation = 2
    assert codes(api.ask(commit_of("round", {("orders", 0): 1}), 9)) == ["UNKNOWN_MEMBER_ID"]
    assert api.run(lambda: one.commit(9)) == ""
    assert cluster.committed("round") == {("orders", 0): 9}, "the other API returns the same"

    # All leave: the group is empty, and keeps its offsets.
    assert [api.run(member.leave) for member in (one, two)] == ["", ""]
    api.until(lambda: describe(api, "round").group_state == "Empty")
    found = describe(api, "round")
    assert (found.protocol_type, found.members) == ("consumer", [])
    assert cluster.committed("round") == {("orders", 0): 9}


@pytest.mark.parametrize(
    ("join", "sync", "beat", "leave"), [(0, 0, 0, 0), (2, 1, 1, 1), (4, 2, 2, 2), (5, 3, 3, 3), (7, 4, 4, 4)]
)
def test_every_version_goes_through_a_round(api: GroupApi, join: int, sync: int, beat: int, leave: int) -> None:
    """Older ones have no id first, no protocol type, no instance id."""
    member = Classic(api, f"version-{join}", version=join)

    async def life() -> None:
        request = messages.JoinGroupRequest(
            group_id=member.group,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000 if join else -1,
            protocol_type="consumer",
            protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=subscription("orders"))],
        )
        first = await api.call(request, join)
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

    api.run(life)
    assert api.run(lambda: member.leave(leave)) == "UNKNOWN_MEMBER_ID"


@pytest.mark.requirement("a:C-16")
def test_a_join_that_cannot_be(cluster: GroupCluster, api: GroupApi) -> None:
    def refused(group: str = "picky", **more: Any) -> str:
        member = Classic(api, group, instance_id=more.pop("instance_id", None))
        member.member_id = more.pop("member_id", "")
        api.run(lambda: member.join(**more))
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
    one = Classic(api, "picky", instance_id="here")
    api.run(lambda: round_of(one))
    assert one.error == ""
    assert refused(protocol_type="connect") == "INCONSISTENT_GROUP_PROTOCOL"
    other = messages.JoinGroupRequestProtocol(name="sticky", metadata=b"")
    assert refused(protocols=[other]) == "INCONSISTENT_GROUP_PROTOCOL"
    assert refused(member_id="another", instance_id="here") == "FENCED_INSTANCE_ID"
    assert api.run(lambda: one.beat(member_id="another")) == "FENCED_INSTANCE_ID"
    cluster.set_cluster("group.consumer.max.size", "1")
    try:
        assert refused(protocols=[some]) == "GROUP_MAX_SIZE_REACHED"
    finally:
        cluster.set_cluster("group.consumer.max.size", "1000")
    assert api.run(one.leave) == ""


def test_a_sync_that_cannot_be(api: GroupApi) -> None:
    member = Classic(api, "sync")
    api.run(lambda: round_of(member))

    def refused(version: int = 5, **more: Any) -> str:
        fields: dict[str, Any] = {
            "group_id": "sync",
            "generation_id": member.generation,
            "member_id": member.member_id,
            "protocol_type": "consumer",
            "protocol_name": "range",
            **more,
        }
        return name_of(api.ask(messages.SyncGroupRequest(**fields), version).error_code)

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
    assert api.run(member.leave) == ""


@pytest.mark.requirement("a:F-08", "a:E-36")
@pytest.mark.parametrize("version", [8, 9])
def test_a_static_leader_comes_back_and_nobody_deals_again(api: GroupApi, version: int) -> None:
    group = f"static-{version}"
    one, two = (Classic(api, group, instance_id=f"slot-{number}", version=version) for number in (1, 2))
    api.run(lambda: round_of(one, two))
    first, second = (one, two) if one.leads else (two, one)
    again = Classic(api, group, instance_id=first.instance_id, version=version)
    api.run(again.join)
    assert (again.error, again.generation) == ("", first.generation)
    assert again.member_id != first.member_id
    if version >= 9:
        assert again.leads
        assert again.joined.skip_assignment
        assert len(again.joined.members) == 2
    else:
        assert not again.leads, "it has no field to skip the assignment"
        assert again.joined.members == []
    api.run(again.sync)
    assert again.assignment == f"for {first.member_id}".encode(), "what its former self was dealt"
    assert api.run(second.beat) == "", "the others do not notice"
    assert api.run(first.beat) == "FENCED_INSTANCE_ID"
    assert api.run(lambda: first.commit(1)) == "FENCED_INSTANCE_ID"
    # An operator takes them out by their instance ids alone.
    request = messages.LeaveGroupRequest(
        group_id=group,
        members=[
            messages.MemberIdentity(member_id="", group_instance_id="slot-1"),
            messages.MemberIdentity(member_id="unknown", group_instance_id="slot-2"),
            messages.MemberIdentity(member_id="", group_instance_id="slot-3"),
            messages.MemberIdentity(member_id="", group_instance_id="slot-2", reason="it is old"),
        ],
    )
    rows = api.ask(request).members
    assert [name_of(row.error_code) for row in rows] == ["", "FENCED_INSTANCE_ID", "UNKNOWN_MEMBER_ID", ""]
    assert [row.group_instance_id for row in rows] == ["slot-1", "slot-2", "slot-3", "slot-2"]


def test_leaving_a_group_that_is_not_there(api: GroupApi) -> None:
    member = Classic(api, "nowhere")
    member.member_id = "nobody"
    assert api.run(lambda: member.leave(2)) == "UNKNOWN_MEMBER_ID"
    assert api.run(lambda: member.leave(5)) == "UNKNOWN_MEMBER_ID", "in the row of the member"
    assert name_of(api.ask(messages.LeaveGroupRequest(group_id=""), 2).error_code) == "INVALID_GROUP_ID"


def test_a_connection_that_ends_while_its_join_waits(cluster: GroupCluster, api: GroupApi) -> None:
    stays, goes = Classic(api, "gone"), Classic(api, "gone")
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

    api.run(work)


def test_a_member_lives_by_its_heartbeats_alone(cluster: GroupCluster, api: GroupApi) -> None:
    """No stream, no grace: the session decides, of either protocol."""
    member = Classic(api, "alone")
    api.run(lambda: round_of(member))
    reported = api.ask(joining("alone-too"))
    cluster.world.run_for(9)
    assert api.run(member.beat) == ""
    cluster.world.run_for(9)
    assert api.run(member.beat) == ""
    cluster.world.run_for(11)
    assert api.run(member.beat) == "UNKNOWN_MEMBER_ID"
    assert api.ask(going_on("alone-too", reported)).error_code == 0, "45 s are not over yet"
    cluster.world.run_for(46)
    assert name_of(api.ask(going_on("alone-too", reported)).error_code) == "UNKNOWN_MEMBER_ID"


def test_what_the_client_calls_itself_is_cut(api: GroupApi) -> None:
    request = messages.JoinGroupRequest(
        group_id="long",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[messages.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    given = api.ask(request, client_id="x" * 20_000)
    assert name_of(given.error_code) == "MEMBER_ID_REQUIRED"
    assert given.member_id.startswith("x" * CLIENT_ID_LENGTH_MAX + "-")
    nameless = api.ask(request, client_id=None)
    assert nameless.member_id.startswith("member-")


# Trouble with the coordinator.


def test_a_broker_that_does_not_coordinate_says_so(cluster: GroupCluster, api: GroupApi) -> None:
    other = GroupApi(cluster, next(broker for broker in (11, 12, 13) if broker != api.broker))
    member = Classic(other, "any")
    other.run(member.join)
    assert member.error == "NOT_COORDINATOR"
    other.run(member.sync)
    assert member.error == "NOT_COORDINATOR"
    assert other.run(member.beat) == "NOT_COORDINATOR"
    assert other.run(lambda: member.leave(0)) == "NOT_COORDINATOR"
    left = other.ask(messages.LeaveGroupRequest(group_id="any", members=[messages.MemberIdentity(member_id="m")]))
    assert name_of(left.error_code) == "NOT_COORDINATOR"
    reported = other.ask(joining("any"))
    assert (name_of(reported.error_code), reported.assignment) == ("NOT_COORDINATOR", None)
    assert f"broker {api.broker}" in reported.error_message


def test_a_coordinator_that_reads_its_groups(cluster: GroupCluster, api: GroupApi) -> None:
    shard = cluster.shard("any")
    member = Classic(api, "any")
    shard.phase = Phase.LOADING
    try:
        api.run(member.join)
        assert member.error == "COORDINATOR_LOAD_IN_PROGRESS"
        api.run(member.sync)
        assert member.error == "REBALANCE_IN_PROGRESS", "the round is lost: join again"
        assert api.run(member.beat) == "", "it may well be a member"
        assert api.run(lambda: member.leave(1)) == "COORDINATOR_LOAD_IN_PROGRESS"
        assert name_of(api.ask(joining("any")).error_code) == "COORDINATOR_LOAD_IN_PROGRESS"
        shard.phase = Phase.BROKEN
        api.run(member.join)
        assert member.error == "COORDINATOR_NOT_AVAILABLE"
        assert api.run(member.beat) == "COORDINATOR_NOT_AVAILABLE"
    finally:
        shard.phase = Phase.LEADING


def test_one_that_is_too_busy_is_not_available(api: GroupApi) -> None:
    coordinator = api.groups.coordinator
    steady = Classic(api, "steady")
    api.run(steady.join)
    api.run(steady.sync)
    before, coordinator.waiting_max = coordinator.waiting_max, 0
    try:
        member = Classic(api, "busy")
        api.run(member.join)
        assert member.error == "COORDINATOR_NOT_AVAILABLE"
        assert api.run(steady.beat) == "", "too many joins end no session of other groups"
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
