"""Groups and their offsets through the Kafka API: on a simulated broker, over its real coordinator and log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.groups.cluster import BROKERS, OFFSETS_TOPIC, GroupCluster
from support.kafka.group_api import (
    ENTRIES,
    TABLE,
    Classic,
    GroupApi,
    codes,
    commit_of,
    fetch_of,
    fetches_of,
    name_of,
    round_of,
)

from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.model.ids import NodeId
from tidelog.rpc.kafka import dispatch
from tidelog.rpc.kafka.messages import groups as messages
from tidelog.rpc.kafka.messages.metadata import NO_OPERATIONS, FindCoordinatorRequest
from tidelog.rpc.kafka.operations import GROUP as OPERATIONS
from tidelog.services import groups as service
from tidelog.services import limits
from tidelog.services.context import INTERNAL

pytest_plugins = ["support.kafka.group_fixtures"]

NO_BROKER = (-1, "", -1)


def found(topics: Any) -> dict[tuple[str, int], int]:
    return {(topic.name, row.partition_index): row.committed_offset for topic in topics for row in topic.partitions}


def test_every_group_api_is_served_as_far_as_the_codec_goes() -> None:
    served = dispatch.handlers()
    assert ENTRIES.keys() <= served.keys(), "the modules stand in the table of the API"
    assert {TABLE[key].api.name: (TABLE[key].low, TABLE[key].high) for key in ENTRIES} == {
        "FindCoordinator": (0, 6),
        "OffsetCommit": (2, 10),
        "OffsetFetch": (1, 10),
        "OffsetDelete": (0, 0),
        "ListGroups": (0, 5),
        "DescribeGroups": (0, 6),
        "DeleteGroups": (0, 3),
        "ConsumerGroupDescribe": (0, 1),
        "JoinGroup": (0, 9),
        "SyncGroup": (0, 5),
        "Heartbeat": (0, 4),
        "LeaveGroup": (0, 5),
        "ConsumerGroupHeartbeat": (0, 1),
    }


# Coordinators.


@pytest.mark.requirement("a:F-06")
def test_the_first_who_asks_makes_the_topic_and_hears_of_this_listener() -> None:
    with GroupCluster(seed=13, offsets_partitions=3) as fresh:
        for version in range(7):
            api = GroupApi(fresh, 12)
            if version < 4:
                row = api.ask(FindCoordinatorRequest(key="billing"), version)
            else:
                (row,) = api.ask(FindCoordinatorRequest(coordinator_keys=["billing"]), version).coordinators
                assert row.key == "billing"
            topic = fresh.image().topic_named(OFFSETS_TOPIC)
            assert topic is not None
            leader = topic.partitions[partition_for("billing", 3)].leader
            assert row.error_code == 0
            assert (row.node_id, row.host, row.port) == (leader, f"host-{leader}", 9092)


def test_where_nobody_coordinates(cluster: GroupCluster, api: GroupApi) -> None:
    def ask(*keys: str, key_type: int = 0, where: GroupApi = api) -> list[Any]:
        request = FindCoordinatorRequest(coordinator_keys=list(keys), key_type=key_type)
        rows: list[Any] = where.ask(request).coordinators
        assert [row.key for row in rows] == list(keys)
        return rows

    good, empty, long, again = ask("any", "", "x" * 2_000, "any")
    assert (good.node_id, name_of(good.error_code)) == (api.broker, "")
    assert again == good
    for row in (empty, long):
        assert (name_of(row.error_code), (row.node_id, row.host, row.port)) == ("INVALID_GROUP_ID", NO_BROKER)
        assert row.error_message
    for key_type in (2, 7):
        (row,) = ask("any", key_type=key_type)
        assert name_of(row.error_code) == "INVALID_REQUEST"
    (row,) = ask("any", where=GroupApi(cluster, api.broker, listener="NOWHERE"))
    assert name_of(row.error_code) == "COORDINATOR_NOT_AVAILABLE"
    assert "NOWHERE" in row.error_message


# Offsets.


def commits_of_several_kinds(orders: bytes, others: bytes, unknown: bytes) -> list[messages.OffsetCommitRequestTopic]:
    """Returns commits that are accepted, too large, and of unknown partitions and topics."""
    return [
        messages.OffsetCommitRequestTopic(
            name="orders",
            topic_id=orders,
            partitions=[
                messages.OffsetCommitRequestPartition(
                    partition_index=0, committed_offset=7, committed_leader_epoch=3, committed_metadata="half way"
                ),
                messages.OffsetCommitRequestPartition(partition_index=9, committed_offset=1),
                messages.OffsetCommitRequestPartition(partition_index=1, committed_offset=-5),
                messages.OffsetCommitRequestPartition(
                    partition_index=2, committed_offset=1, committed_metadata="x" * 5_000
                ),
            ],
        ),
        messages.OffsetCommitRequestTopic(
            name="others",
            topic_id=others,
            partitions=[
                messages.OffsetCommitRequestPartition(partition_index=1, committed_offset=8, committed_metadata=None)
            ],
        ),
        messages.OffsetCommitRequestTopic(
            name="nothing",
            topic_id=unknown,
            partitions=[messages.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)],
        ),
    ]


@pytest.mark.requirement("a:F-20", "a:E-07", "a:C-14")
@pytest.mark.parametrize("version", range(2, 11))
def test_offsets_are_committed_and_fetched_in_every_version(cluster: GroupCluster, api: GroupApi, version: int) -> None:
    group = f"offsets-{version}"
    ids = cluster.image().topic_ids
    orders, others, unknown = ids["orders"].bytes, ids["others"].bytes, bytes(range(16))
    rows = commits_of_several_kinds(orders, others, unknown)
    response = api.ask(messages.OffsetCommitRequest(group_id=group, topics=rows), version)
    gone = "UNKNOWN_TOPIC_ID" if version >= 10 else "UNKNOWN_TOPIC_OR_PARTITION"
    assert codes(response) == [
        "",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "",
        "OFFSET_METADATA_TOO_LARGE",
        "",
        gone,
    ]
    names = [topic.name for topic in response.topics]
    assert names == (["", "", ""] if version >= 10 else ["orders", "others", "nothing"])
    assert cluster.committed(group) == {("orders", 0): 7, ("orders", 1): -5, ("others", 1): 8}
    if version >= 8:
        topics = [
            messages.OffsetFetchRequestTopics(name="orders", topic_id=orders, partition_indexes=[0, 1, 99]),
            messages.OffsetFetchRequestTopics(name="nothing", topic_id=unknown, partition_indexes=[0]),
        ]
        request = fetches_of(messages.OffsetFetchRequestGroup(group_id=group, topics=topics))
        (reported,) = api.ask(request, version).groups
        assert (reported.group_id, reported.error_code) == (group, 0)
        answer = reported.topics
    else:
        request = fetch_of(group, ("orders", [0, 1, 99]), ("nothing", [0]))
        reported = api.ask(request, version)
        assert reported.error_code == 0
        answer = reported.topics
    by_id = version >= 10
    assert [topic.name for topic in answer] == (["", ""] if by_id else ["orders", "nothing"])
    if by_id:
        assert [topic.topic_id for topic in answer] == [orders, unknown]
    first, negative, *none = (row for topic in answer for row in topic.partitions)
    epoch = 3 if version >= 6 else -1
    assert (first.partition_index, first.committed_offset, first.metadata) == (0, 7, "half way")
    assert first.committed_leader_epoch == epoch
    assert (negative.partition_index, negative.committed_offset, negative.error_code) == (1, -5, 0), "as it came"
    assert [(row.committed_offset, row.metadata) for row in none] == [(-1, "")] * 2, "there are none, and no error"
    assert [name_of(row.error_code) for row in none] == ["", "UNKNOWN_TOPIC_ID" if by_id else ""]


def test_all_offsets_of_several_groups(cluster: GroupCluster, api: GroupApi) -> None:
    cluster.commit("all-1", {("orders", 3): 30, ("orders", 1): 10, ("others", 0): 5})
    cluster.commit("all-2", {("orders", 0): 1})
    wanted = [messages.OffsetFetchRequestGroup(group_id=name, topics=None) for name in ("all-1", "all-2", "all-3", "")]
    one, two, three, four = api.ask(fetches_of(*wanted), 9).groups
    assert found(one.topics) == {("orders", 1): 10, ("orders", 3): 30, ("others", 0): 5}
    assert found(two.topics) == {("orders", 0): 1}
    assert (three.topics, three.error_code) == ([], 0), "a group that is not there has none"
    assert name_of(four.error_code) == "INVALID_GROUP_ID"
    by_id = api.ask(fetches_of(wanted[1]), 10).groups[0].topics
    assert [topic.topic_id for topic in by_id] == [cluster.image().topic_ids["orders"].bytes]
    assert found(api.ask(fetch_of("all-1"), 2).topics) == found(one.topics)
    stable = fetch_of("all-1")
    stable.require_stable = True
    assert found(api.ask(stable, 7).topics) == found(one.topics), "without transactions all are"


def test_a_member_fetches_with_its_epoch(cluster: GroupCluster, api: GroupApi) -> None:
    member = cluster.member("asking", "orders")
    cluster.until(lambda: len(member.owned) == 4)
    assert cluster.commit("asking", {("orders", 0): 4}, member=member) == [""]

    def ask(member_id: str | None, epoch: int) -> tuple[str, dict[tuple[str, int], int]]:
        group = messages.OffsetFetchRequestGroup(
            group_id="asking", member_id=member_id, member_epoch=epoch, topics=None
        )
        (reported,) = api.ask(fetches_of(group), 9).groups
        return name_of(reported.error_code), found(reported.topics)

    assert ask(member.member_id, member.epoch) == ("", {("orders", 0): 4})
    assert ask(None, -1) == ("", {("orders", 0): 4})
    assert ask("unknown", member.epoch) == ("UNKNOWN_MEMBER_ID", {})
    assert ask(member.member_id, member.epoch + 5) == ("STALE_MEMBER_EPOCH", {})
    member.leave()


@pytest.mark.requirement("a:F-23", "a:C-16")
def test_a_commit_that_cannot_be(cluster: GroupCluster, api: GroupApi) -> None:
    def commit(group: str, version: int = 9, where: GroupApi = api, **more: Any) -> list[str]:
        request = commit_of(group, {("orders", 0): 1, ("orders", 1): 2})
        for name, value in more.items():
            setattr(request, name, value)
        return codes(where.ask(request, version))

    assert commit("", 9) == ["INVALID_GROUP_ID"] * 2
    # A member of a group that is not there, or that has none.
    late: dict[str, Any] = {"generation_id_or_member_epoch": 3, "member_id": "late"}
    assert commit("nowhere", 8, **late) == ["ILLEGAL_GENERATION"] * 2
    assert commit("nowhere", 9, **late) == ["GROUP_ID_NOT_FOUND"] * 2
    assert commit("plain") == ["", ""]
    assert commit("plain", 8, **late) == ["UNKNOWN_MEMBER_ID"] * 2
    assert commit("plain", member_id="late") == ["UNKNOWN_MEMBER_ID"] * 2
    # While there are members, nobody else.
    member = cluster.member("live", "orders")
    assert commit("live") == ["UNKNOWN_MEMBER_ID"] * 2
    assert commit("live", group_instance_id="slot") == ["UNKNOWN_MEMBER_ID"] * 2
    member.leave()
    nothing = messages.OffsetCommitRequest(group_id="plain")
    assert api.ask(nothing, 9).topics == []
    twice = commit_of("twice", {("orders", 0): 1})
    again = messages.OffsetCommitRequestPartition(partition_index=0, committed_offset=2)
    twice.topics[0].partitions.append(again)
    assert codes(api.ask(twice, 9)) == ["", ""]
    assert cluster.committed("twice") == {("orders", 0): 2}, "the last word counts"


def test_a_commit_in_the_middle_of_a_round(api: GroupApi) -> None:
    member = Classic(api, "between")
    api.run(member.join)
    assert api.run(lambda: member.commit(1)) == "REBALANCE_IN_PROGRESS", "the assignment is not there yet"
    (row,) = api.ask(messages.DescribeGroupsRequest(groups=["between"])).groups
    assert (row.group_state, row.members[0].member_metadata) == ("CompletingRebalance", b"")
    api.run(member.sync)
    assert api.run(lambda: member.commit(1)) == ""
    assert api.run(member.leave) == ""


def test_offsets_are_deleted(cluster: GroupCluster, api: GroupApi) -> None:
    def delete(group: str, *rows: tuple[str, int], where: GroupApi = api) -> tuple[str, list[str]]:
        request = messages.OffsetDeleteRequest(
            group_id=group,
            topics=[
                messages.OffsetDeleteRequestTopic(
                    name=name, partitions=[messages.OffsetDeleteRequestPartition(partition_index=number)]
                )
                for name, number in rows
            ],
        )
        response = where.ask(request)
        return name_of(response.error_code), codes(response)

    cluster.commit("old", {("orders", 0): 1, ("orders", 1): 2, ("others", 0): 3})
    unknown = "UNKNOWN_TOPIC_OR_PARTITION"
    assert delete("old", ("orders", 0), ("nothing", 0), ("orders", 9), ("orders", 0)) == (
        "",
        ["", unknown, unknown, ""],
    )
    assert cluster.committed("old") == {("orders", 1): 2, ("others", 0): 3}
    assert delete("nowhere", ("orders", 0)) == ("GROUP_ID_NOT_FOUND", [])
    assert delete("", ("orders", 0)) == ("INVALID_GROUP_ID", [])
    # What the members of a classic group read is known from their subscriptions.
    member = Classic(api, "old")
    api.run(lambda: round_of(member))
    assert delete("old", ("orders", 1), ("others", 0)) == ("", ["GROUP_SUBSCRIBED_TO_TOPIC", ""])
    assert cluster.committed("old") == {("orders", 1): 2}
    assert api.run(member.leave) == ""
    opaque = Classic(api, "opaque")
    some = messages.JoinGroupRequestProtocol(name="range", metadata=b"?")

    async def opaque_round() -> None:
        await opaque.join(protocols=[some])
        await opaque.sync()

    api.run(opaque_round)
    assert delete("opaque", ("orders", 1)) == ("NON_EMPTY_GROUP", [])
    assert api.run(opaque.leave) == ""


# Groups.


def test_many_groups_are_listed_in_turns_and_in_order(
    cluster: GroupCluster, api: GroupApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MEMBERS_PER_SLICE", 4)
    names = [f"m-{number:02}" for number in range(18)]
    for name in reversed(names):
        cluster.commit(name, {("orders", 0): 1})

    async def listed() -> tuple[list[str], int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        found, _ = await api.groups.list_groups(INTERNAL, kinds=["simple"])
        counting.cancel()
        return [one.group for one in found if one.group.startswith("m-")], turns

    found, turns = api.run(listed)
    assert found == names
    assert turns >= len(names) // 4, "the others had their turn after each four"


def test_groups_are_listed_by_state_and_type(cluster: GroupCluster, api: GroupApi) -> None:
    cluster.commit("l-simple", {("orders", 0): 1})
    consumer = cluster.member("l-consumer", "orders")
    cluster.until(lambda: len(consumer.owned) == 4)
    classic, waiting = Classic(api, "l-classic"), Classic(api, "l-waiting")
    api.run(lambda: round_of(classic))
    api.run(waiting.join)

    def listed(version: int = 5, **filters: list[str]) -> dict[str, tuple[str, str, str]]:
        response = api.ask(messages.ListGroupsRequest(**filters), version)
        assert response.error_code == 0
        return {
            row.group_id: (row.protocol_type, row.group_state, row.group_type)
            for row in response.groups
            if row.group_id.startswith("l-")
        }

    everything = {
        "l-simple": ("", "Empty", "classic"),
        "l-consumer": ("consumer", "Stable", "consumer"),
        "l-classic": ("consumer", "Stable", "classic"),
        "l-waiting": ("consumer", "CompletingRebalance", "classic"),
    }
    assert listed() == everything
    assert listed(4) == {name: (row[0], row[1], "") for name, row in everything.items()}
    assert listed(0) == {name: (row[0], "", "") for name, row in everything.items()}
    assert listed(states_filter=["stable"]).keys() == {"l-consumer", "l-classic"}
    assert listed(states_filter=["Empty", "CompletingRebalance"]).keys() == {"l-simple", "l-waiting"}
    assert listed(types_filter=["Consumer"]).keys() == {"l-consumer"}
    assert listed(types_filter=["classic"], states_filter=["STABLE"]).keys() == {"l-classic"}
    assert listed(states_filter=["Sleeping"]) == listed(types_filter=["share"]) == {}
    assert [api.run(member.leave) for member in (classic, waiting)] == ["", ""]
    consumer.leave()


def test_groups_are_described_by_the_api_of_their_kind(cluster: GroupCluster, api: GroupApi) -> None:
    cluster.commit("d-simple", {("orders", 0): 1})
    consumer = cluster.member("d-consumer", "orders", instance_id="slot-1")
    cluster.until(lambda: len(consumer.owned) == 4)
    classic = Classic(api, "d-classic", instance_id="slot-2")
    api.run(lambda: round_of(classic))
    names = ["d-simple", "d-consumer", "d-classic", "d-nowhere", ""]

    old = api.ask(messages.DescribeGroupsRequest(groups=names), 3).groups
    assert [(row.group_id, row.group_state) for row in old] == list(
        zip(names, ["Empty", "Dead", "Stable", "Dead", ""], strict=True)
    )
    assert [name_of(row.error_code) for row in old] == ["", "", "", "", "INVALID_GROUP_ID"]
    assert {row.authorized_operations for row in old} == {NO_OPERATIONS}
    new = api.ask(messages.DescribeGroupsRequest(groups=names, include_authorized_operations=True), 6).groups
    missing = "GROUP_ID_NOT_FOUND"
    assert [name_of(row.error_code) for row in new] == ["", missing, "", missing, "INVALID_GROUP_ID"]
    assert "not a classic group" in new[1].error_message
    assert (new[2].authorized_operations, new[2].error_message) == (OPERATIONS, None)
    (member,) = new[2].members
    assert (member.member_id, member.group_instance_id) == (classic.member_id, "slot-2")
    assert member.member_assignment == classic.assignment

    for version in (0, 1):
        request = messages.ConsumerGroupDescribeRequest(group_ids=names, include_authorized_operations=True)
        rows = api.ask(request, version).groups
        assert [name_of(row.error_code) for row in rows] == [missing, "", missing, missing, "INVALID_GROUP_ID"]
        assert "not a consumer group" in rows[0].error_message
        row = rows[1]
        assert (row.group_id, row.group_state, row.assignor_name) == ("d-consumer", "Stable", "uniform")
        assert (row.group_epoch, row.assignment_epoch) == (consumer.epoch, consumer.epoch)
        assert row.authorized_operations == OPERATIONS
        (one,) = row.members
        assert (one.member_id, one.instance_id, one.rack_id) == (consumer.member_id, "slot-1", None)
        assert (one.subscribed_topic_names, one.subscribed_topic_regex) == (["orders"], None)
        assert one.member_epoch == consumer.epoch
        assert one.member_type == (1 if version else -1)
        assert one.assignment == one.target_assignment
        (topic,) = one.assignment.topic_partitions
        assert (topic.topic_name, topic.partitions) == ("orders", [0, 1, 2, 3])
        assert topic.topic_id == cluster.image().topic_ids["orders"].bytes
    assert api.run(classic.leave) == ""
    consumer.leave()
    (row,) = api.ask(messages.ConsumerGroupDescribeRequest(group_ids=["d-consumer"])).groups
    assert (row.group_state, row.members) == ("Empty", [])


def test_groups_are_deleted(cluster: GroupCluster, api: GroupApi) -> None:
    for name in ("gone-1", "gone-2"):
        cluster.commit(name, {("orders", 0): 1})
    classic = Classic(api, "stays")
    api.run(lambda: round_of(classic))
    consumer = cluster.member("stays-too", "orders")
    names = ["gone-1", "stays", "gone-2", "nowhere", "", "stays-too"]
    for version in range(4):
        rows = api.ask(messages.DeleteGroupsRequest(groups_names=names), version).results
        assert bool(rows[1].error_message) == (version >= 3)
        assert [row.group_id for row in rows] == names
        first = "GROUP_ID_NOT_FOUND" if version else ""
        assert [name_of(row.error_code) for row in rows] == [
            first,
            "NON_EMPTY_GROUP",
            first,
            "GROUP_ID_NOT_FOUND",
            "INVALID_GROUP_ID",
            "NON_EMPTY_GROUP",
        ]
    assert cluster.committed("gone-1") == {}
    assert api.run(classic.leave) == ""
    consumer.leave()


def test_group_whose_last_offset_was_deleted_is_empty_and_can_be_deleted(cluster: GroupCluster, api: GroupApi) -> None:
    cluster.commit("emptied", {("orders", 0): 1})
    topics = [messages.OffsetDeleteRequestTopic(name="orders", partitions=[messages.OffsetDeleteRequestPartition()])]
    response = api.ask(messages.OffsetDeleteRequest(group_id="emptied", topics=topics))
    assert (response.error_code, codes(response)) == (0, [""])
    (row,) = api.ask(messages.DescribeGroupsRequest(groups=["emptied"])).groups
    assert (row.group_state, row.error_code) == ("Empty", 0)
    for wanted in ("", "GROUP_ID_NOT_FOUND"):
        (row,) = api.ask(messages.DeleteGroupsRequest(groups_names=["emptied"])).results
        assert name_of(row.error_code) == wanted


# Bounds and trouble.


def test_answer_that_has_become_large_refuses_the_other_groups(
    cluster: GroupCluster, api: GroupApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.commit("large", {("orders", 0): 1, ("orders", 1): 2})
    wanted = messages.OffsetFetchRequestGroup(group_id="large", topics=None)
    monkeypatch.setattr(limits, "RESPONSE_BYTES_MAX", 40)
    first, second = api.ask(fetches_of(wanted, wanted), 9).groups
    assert len(found(first.topics)) == 2, "the first one is returned however large it is"
    assert (name_of(second.error_code), second.topics) == ("INVALID_REQUEST", [])


def every_answer(api: GroupApi, group: str) -> dict[str, str]:
    """The error of each api that asks the coordinator of a group."""
    names = [group]
    fetch = fetches_of(messages.OffsetFetchRequestGroup(group_id=group, topics=None))
    delete = messages.OffsetDeleteRequest(
        group_id=group,
        topics=[
            messages.OffsetDeleteRequestTopic(name="orders", partitions=[messages.OffsetDeleteRequestPartition()]),
        ],
    )
    return {
        "commit": codes(api.ask(commit_of(group, {("orders", 0): 1}), 9))[0],
        "fetch": name_of(api.ask(fetch, 9).groups[0].error_code),
        "old fetch": name_of(api.ask(fetch_of(group, ("orders", [0])), 3).error_code),
        "oldest fetch": name_of(api.ask(fetch_of(group, ("orders", [0])), 1).topics[0].partitions[0].error_code),
        "delete": name_of(api.ask(delete).error_code),
        "describe": name_of(api.ask(messages.DescribeGroupsRequest(groups=names)).groups[0].error_code),
        "consumer": name_of(api.ask(messages.ConsumerGroupDescribeRequest(group_ids=names)).groups[0].error_code),
        "end": name_of(api.ask(messages.DeleteGroupsRequest(groups_names=names)).results[0].error_code),
    }


def test_a_broker_that_does_not_coordinate_says_so(other: GroupApi) -> None:
    assert set(every_answer(other, "any").values()) == {"NOT_COORDINATOR"}
    assert other.ask(messages.ListGroupsRequest()).groups == [], "it lists its own"


def test_a_coordinator_that_reads_its_groups_or_cannot(cluster: GroupCluster, api: GroupApi) -> None:
    shard = cluster.shard("any")
    shard.phase = Phase.LOADING
    try:
        assert set(every_answer(api, "any").values()) == {"COORDINATOR_LOAD_IN_PROGRESS"}
        listed = api.ask(messages.ListGroupsRequest())
        assert (name_of(listed.error_code), listed.groups) == ("COORDINATOR_LOAD_IN_PROGRESS", [])
        shard.phase = Phase.BROKEN
        answers = every_answer(api, "any")
        fetches = {answers.pop(name) for name in ("fetch", "old fetch", "oldest fetch")}
        assert fetches == {"NOT_COORDINATOR"}, "what old clients repeat a fetch after"
        assert set(answers.values()) == {"COORDINATOR_NOT_AVAILABLE"}
    finally:
        shard.phase = Phase.LEADING


def test_a_commit_that_is_not_replicated_in_time() -> None:
    """Of three replicas two are away: nobody can say that it is done."""
    with GroupCluster(seed=14, offsets_partitions=1) as cluster:
        cluster.topic("orders")
        cluster.shard("slow")
        api = GroupApi(cluster, cluster.coordinator("slow"))
        for broker in BROKERS:
            if broker != api.broker:
                cluster.kill(NodeId(broker))
        assert codes(api.ask(commit_of("slow", {("orders", 0): 1}), 9)) == ["COORDINATOR_NOT_AVAILABLE"]
