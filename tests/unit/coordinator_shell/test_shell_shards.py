"""The coordinator moves: what it has acknowledged survives, the rest ends; and what it holds in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.brokers.cluster import RunningBroker
from support.groups.cluster import BROKERS, OFFSETS_TOPIC, GroupCluster, Member

from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.loading import Progress, load
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.requests import CommitOffsets, OffsetToCommit
from tidelog.coordinator.shard import GROUPS
from tidelog.coordinator.state import CoordinatorState, validate
from tidelog.log.batch import encode_columns
from tidelog.metadata.brokers import Drain
from tidelog.model.errors import ErrorCode, NotLeaderError, RemoteError, UnknownOutcomeError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.rpc.v1 import admin_pb2, log_pb2
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.server.group_metrics import group_samples, lag_samples
from tidelog.services.groups import GroupServiceConfig


def others(broker: int) -> list[int]:
    return [one for one in BROKERS if one != broker]


def replayed(cluster: GroupCluster, group: str) -> CoordinatorState:
    """What the log of the group's partition makes."""
    shard = cluster.shard(group)

    async def read(_: RunningBroker) -> CoordinatorState:
        return (await load(shard.leader, Progress(), GROUPS))[0]

    return cluster.on_broker(shard.leader.replica.partition.leader, read)


def eventually(cluster: GroupCluster, condition: Callable[[], bool], timeout: float = 30) -> None:
    """As `until`, for what calls the cluster."""
    end_s = cluster.now_s() + timeout
    while not condition():
        assert cluster.now_s() < end_s, f"not in {timeout} s"
        cluster.world.run_for(0.05)


def move_coordinator(cluster: GroupCluster, group: str) -> int:
    """The coordinator is killed; who is it then?"""
    former = cluster.coordinator(group)
    cluster.kill(NodeId(former))
    eventually(cluster, lambda: cluster.coordinator(group) != former)
    return former


def test_a_search_for_a_coordinator_fails_at_once_when_the_offsets_topic_cannot_be_created() -> None:
    with GroupCluster(seed=32) as cluster:
        for broker in BROKERS:
            cluster.ask(Drain(broker=broker, on=True))
        began_s = cluster.now_s()
        with pytest.raises(RemoteError, match="no broker can take new replicas") as failure:
            cluster.groups("FindCoordinator", pb.FindCoordinatorRequest(groups=["billing"]), node=11)
        assert failure.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert cluster.now_s() - began_s < 1
        for broker in BROKERS:
            cluster.ask(Drain(broker=broker, on=False))
        assert cluster.coordinator("billing") in BROKERS


def test_a_broker_that_stops_slowly_removes_no_member_whose_stream_it_has_ended() -> None:
    with GroupCluster(seed=33, orders=2) as cluster:
        member = cluster.member("billing", "orders")
        former = cluster.coordinator("billing")
        log = cluster.shard("billing").leader.log
        stopping = cluster.brokers[NodeId(former)].coordinator
        end = log.end_offset
        stopping.stop()
        member.cut()
        cluster.world.run_for(5)
        assert log.end_offset == end, "nobody is removed"
        cluster.kill(NodeId(former))
        cluster.until(lambda: member.streams >= 2 and member.error == "", timeout=30)
        assert len(member.owned) == 2
        assert cluster.describe("billing").members[0].member_id == member.member_id


def test_nothing_that_an_operator_asks_for_takes_the_offsets_of_a_group_away() -> None:
    with GroupCluster(seed=31) as cluster:
        cluster.topic("orders")
        assert cluster.commit("billing", {("orders", 0): 42}) == [""]
        coordinator = cluster.coordinator("billing")
        leader = cluster.shard("billing").leader
        assert leader.high_watermark > 0
        deletion = log_pb2.DeleteRecordsRequest(
            partitions=[
                log_pb2.DeleteRecordsPartition(
                    topic=OFFSETS_TOPIC, partition=leader.replica.partition_id.partition, before_offset=-1
                )
            ]
        )
        (deleted,) = cluster.api(coordinator, "Log", "DeleteRecords", deletion).partitions
        assert deleted.error.code == ErrorCode.INVALID_TOPIC.value.code
        growth = admin_pb2.AddPartitionsRequest(topics=[admin_pb2.MorePartitions(topic=OFFSETS_TOPIC, total=7)])
        (grown,) = cluster.api(coordinator, "Admin", "AddPartitions", growth).topics
        assert grown.error.code == ErrorCode.INVALID_TOPIC.value.code
        move_coordinator(cluster, "billing")
        assert cluster.committed("billing", ("orders", 0)) == {("orders", 0): 42}


@pytest.mark.requirement("a:F-20", "a:U-09")
def test_a_new_coordinator_knows_members_assignments_and_offsets() -> None:
    with GroupCluster(seed=1, orders=6) as cluster:
        members = [cluster.member("billing", "orders") for _ in range(3)]
        cluster.until(lambda: all(len(member.owned) == 2 for member in members))
        ((topic, number), *_) = sorted(members[0].owned)
        assert cluster.commit("billing", {(topic, number): 42}, member=members[0], metadata="half") == [""]
        state = cluster.shard("billing").state
        held = [(member.epoch, member.owned) for member in members]
        for member in members:
            member.revoked.clear()
        move_coordinator(cluster, "billing")
        cluster.until(lambda: all(member.streams >= 2 and member.error == "" for member in members), timeout=30)
        assert cluster.shard("billing").state == state, "a replay gives what was lived (C6)"
        assert cluster.committed("billing", (topic, number)) == {(topic, number): 42}
        cluster.world.run_for(12)
        assert [(member.epoch, member.owned) for member in members] == held, "nobody has noticed"
        assert not any(member.revoked for member in members)
        assert cluster.shard("billing").state == state == replayed(cluster, "billing")
        validate(state)


def test_streams_end_when_the_coordinator_loses_its_partition() -> None:
    with GroupCluster(seed=2, orders=2) as cluster:
        one = cluster.member("billing", "orders")
        cluster.until(lambda: len(one.owned) == 2)
        former = cluster.coordinator("billing")
        shard = cluster.shard("billing")
        cluster.stop(former)  # in order: its leaderships are moved away first
        cluster.until(lambda: one.streams >= 2 and one.error == "", timeout=30)
        assert shard.phase is Phase.OVER
        assert "NOT_COORDINATOR" in one.errors
        assert len(shard.timers) == 0
        assert not shard.streams
        assert cluster.describe("billing").coordinator != former


def test_only_offsets_below_the_high_watermark_are_reported_and_waiters_learn_of_a_loss() -> None:
    with GroupCluster(seed=3) as cluster:
        made = cluster.topic("orders", partitions=2)
        cluster.commit("billing", {("orders", 0): 1})
        shard = cluster.shard("billing")
        leader = shard.leader.replica.partition.leader
        for other in others(leader):
            cluster.network.block(NodeId(leader), NodeId(other))
            cluster.network.block(NodeId(other), NodeId(leader))
        request = CommitOffsets(
            group="billing", member_id="", member_epoch=-1, offsets={made: OffsetToCommit(2)}, now_ms=1
        )
        outcome: list[BaseException] = []

        async def submit() -> None:
            try:
                await shard.submit(request)
            except (UnknownOutcomeError, NotLeaderError) as error:
                outcome.append(error)

        cluster.brokers[NodeId(leader)].node.spawn(submit())
        cluster.world.run_for(0.5)
        assert shard.leader.log.end_offset > shard.leader.high_watermark
        group = shard.state.group("billing")
        assert group is not None
        assert [value.offset for value in group.offsets.values()] == [1], "what is not replicated is not returned"
        cluster.kill(NodeId(leader))
        cluster.network.heal()
        eventually(cluster, lambda: cluster.coordinator("billing") != leader)
        assert cluster.committed("billing", ("orders", 0)) == {("orders", 0): 1}


def test_waiters_learn_that_the_outcome_is_not_known() -> None:
    with GroupCluster(seed=4) as cluster:
        made = cluster.topic("orders", partitions=2)
        cluster.commit("billing", {("orders", 0): 1})
        shard = cluster.shard("billing")
        leader = shard.leader.replica.partition.leader
        request = CommitOffsets(
            group="billing", member_id="", member_epoch=-1, offsets={made: OffsetToCommit(2)}, now_ms=1
        )

        async def submit(found: RunningBroker) -> None:
            waiting = asyncio.ensure_future(shard.submit(request))
            for _ in range(5):
                await asyncio.sleep(0)
            assert shard.leader.log.end_offset > shard.leader.high_watermark
            later = asyncio.ensure_future(shard.submit(request))
            await asyncio.sleep(0)
            shard.leader.replica.end_role()
            with pytest.raises(UnknownOutcomeError):
                await waiting
            with pytest.raises(NotLeaderError):
                await later
            with pytest.raises(Exception, match="does not coordinate"):
                await shard.submit(request)

        cluster.on_broker(leader, submit)
        assert shard.phase is Phase.OVER


def test_requests_hear_that_the_coordinator_is_loading() -> None:
    with GroupCluster(seed=5, offsets_partitions=1, orders=2) as cluster:
        for number in range(50):
            assert cluster.commit(f"group-{number}", {("orders", 0): number}) == [""]
        state = cluster.shard("billing").state
        former = cluster.coordinator("billing")
        held: dict[int, asyncio.Semaphore] = {}
        for broker in others(former):
            # No place to read in: as if there were very much to read.
            held[broker] = cluster.brokers[NodeId(broker)].coordinator.load_slots
            cluster.brokers[NodeId(broker)].coordinator.load_slots = asyncio.Semaphore(0)
        cluster.kill(NodeId(former))
        eventually(cluster, lambda: cluster.coordinator("billing") != former)
        leader = cluster.coordinator("billing")
        request = pb.FetchOffsetsRequest(group="group-7")

        def refusal() -> ErrorCode:
            with pytest.raises(RemoteError) as refused:
                cluster.groups("FetchOffsets", request, node=leader)
            return refused.value.code

        cluster.until(lambda: bool(cluster.brokers[NodeId(leader)].coordinator.shards))
        assert refusal() is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        listed = cluster.groups("ListGroups", pb.ListGroupsRequest(), node=leader)
        assert (len(listed.groups), listed.loading) == (0, 1)

        async def let_in(found: RunningBroker) -> None:
            found.coordinator.load_slots.release()

        cluster.on_broker(leader, let_in)
        assert cluster.shard("billing").state == state
        listed = cluster.groups("ListGroups", pb.ListGroupsRequest(), node=leader)
        assert (len(listed.groups), listed.loading) == (50, 0)
        counts = cluster.brokers[NodeId(leader)].coordinator.counts
        assert (counts.loads, counts.loaded_records) == (1, 50)
        assert cluster.committed("group-7") == {("orders", 0): 7}


def test_a_load_lets_others_run() -> None:
    """A thousand records at a time at the most, however large a batch is."""
    with GroupCluster(seed=6, offsets_partitions=1) as cluster:
        made = cluster.topic("orders", partitions=1)
        offsets = {PartitionId(made.topic_id, number): OffsetToCommit(number) for number in range(9_000)}
        cluster.coordinator("billing")
        shard = cluster.shard("billing")

        async def work(_: RunningBroker) -> int:
            request = CommitOffsets(group="billing", member_id="", member_epoch=-1, offsets=offsets, now_ms=1)
            assert set((await shard.submit(request)).values()) == {None}
            turns = 0
            done = asyncio.ensure_future(load(shard.leader, Progress(), GROUPS))
            while not done.done():
                turns += 1
                await asyncio.sleep(0)
            assert done.result()[0] == shard.state
            return turns

        turns = cluster.on_broker(shard.leader.replica.partition.leader, work)
        assert turns > 2, "others had their turn while it was read"


def test_a_member_whose_heartbeat_waits_for_replication_is_not_put_out() -> None:
    with GroupCluster(seed=7, orders=2) as cluster:
        cluster.set_cluster("offsets.commit.timeout.ms", "60000")
        one = cluster.member("billing", "orders", session_timeout_ms=6_000)
        cluster.until(lambda: len(one.owned) == 2)
        shard = cluster.shard("billing")
        leader = shard.leader.replica.partition.leader
        for other in others(leader):
            cluster.network.block(NodeId(leader), NodeId(other))
        cluster.world.run_for(1)
        two = cluster.member("billing", "orders", join=False)
        two.begin()
        cluster.world.run_for(15)
        cluster.network.heal()
        cluster.until(lambda: len(one.owned) == 1 and len(two.owned) == 1, timeout=60)
        assert "UNKNOWN_MEMBER_ID" not in one.errors


@pytest.mark.requirement("a:F-21")
def test_offsets_of_an_empty_group_expire() -> None:
    with GroupCluster(seed=8, orders=2) as cluster:
        cluster.set_cluster("offsets.retention.minutes", "1")
        cluster.set_cluster("offsets.retention.check.interval.ms", "5000")
        one = cluster.member("billing", "orders")
        cluster.until(lambda: len(one.owned) == 2)
        cluster.commit("billing", {("orders", 0): 5}, member=one)
        cluster.world.run_for(75)
        assert cluster.committed("billing") == {("orders", 0): 5}, "as long as it has members"
        one.leave()
        cluster.world.run_for(50)
        assert cluster.committed("billing") == {("orders", 0): 5}
        cluster.world.run_for(20)
        assert cluster.committed("billing") == {}
        assert cluster.describe("billing").error.name == "GROUP_ID_NOT_FOUND"
        assert replayed(cluster, "billing") == cluster.shard("billing").state


def test_offsets_of_a_deleted_topic_go_with_it() -> None:
    with GroupCluster(seed=9, orders=2) as cluster:
        cluster.topic("others", partitions=2)
        cluster.commit("billing", {("orders", 0): 5, ("others", 1): 7})
        cluster.api(11, "Admin", "DeleteTopics", admin_pb2.DeleteTopicsRequest(topics=["others"]))
        eventually(cluster, lambda: len(cluster.committed("billing")) == 1)
        assert cluster.committed("billing") == {("orders", 0): 5}


def test_offsets_of_a_topic_that_was_deleted_while_nobody_coordinated_go_too() -> None:
    with GroupCluster(seed=10, orders=2) as cluster:
        cluster.topic("others", (11, 12, 13))
        cluster.commit("billing", {("orders", 0): 5, ("others", 0): 7})
        former = cluster.coordinator("billing")
        slots = [cluster.brokers[NodeId(broker)].coordinator for broker in others(former)]
        for coordinator in slots:
            coordinator.load_slots = asyncio.Semaphore(0)
        cluster.kill(NodeId(former))
        eventually(cluster, lambda: cluster.coordinator("billing") != former)
        leader = cluster.coordinator("billing")
        cluster.api(leader, "Admin", "DeleteTopics", admin_pb2.DeleteTopicsRequest(topics=["others"]))
        cluster.until(lambda: all("others" not in found.tail.image.topic_ids for found in cluster.brokers.values()))
        release_all(cluster, slots)
        eventually(cluster, lambda: len(cluster.committed("billing")) == 1)


def release_all(cluster: GroupCluster, coordinators: list[GroupCoordinator]) -> None:
    async def release(found: RunningBroker) -> None:
        for _ in range(10):
            found.coordinator.load_slots.release()

    for coordinator in coordinators:
        cluster.on_broker(coordinator.me, release)


def test_too_few_replicas_make_the_coordinator_unavailable_not_the_group_lost() -> None:
    with GroupCluster(seed=11, orders=2) as cluster:
        cluster.commit("billing", {("orders", 0): 5})
        leader = cluster.coordinator("billing")
        for other in others(leader):
            cluster.kill(NodeId(other))
        partition = PartitionId(TopicId(cluster.image().topic_ids[OFFSETS_TOPIC]), partition_for("billing", 3))
        cluster.until(lambda: len(cluster.partition(partition).isr) == 1, timeout=60)
        request = pb.CommitOffsetsRequest(
            group="billing", member_epoch=-1, offsets=[pb.OffsetToCommit(topic="orders", offset=6)]
        )
        with pytest.raises(RemoteError) as refused:
            cluster.groups("CommitOffsets", request, node=leader)
        assert refused.value.code in (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT)
        assert cluster.committed("billing") == {("orders", 0): 5}
        cluster.start_brokers(*others(leader))
        assert cluster.commit("billing", {("orders", 0): 7}) == [""]
        assert cluster.committed("billing") == {("orders", 0): 7}


def test_groups_streams_and_waiting_requests_are_bounded() -> None:
    with GroupCluster(seed=12, offsets_partitions=1, orders=2) as cluster:
        cluster.commit("first", {("orders", 0): 1})
        leader = cluster.coordinator("first")
        service = cluster.brokers[NodeId(leader)].groups
        service.config = GroupServiceConfig(groups_max=1, streams_max=0)
        assert cluster.commit("first", {("orders", 0): 2}) == [""]
        request = pb.CommitOffsetsRequest(
            group="second", member_epoch=-1, offsets=[pb.OffsetToCommit(topic="orders", offset=6)]
        )
        with pytest.raises(RemoteError) as refused:
            cluster.groups("CommitOffsets", request, node=leader)
        assert refused.value.code is ErrorCode.POLICY_VIOLATION
        one = cluster.member("first", "orders", join=False, comes_back=False)
        one.begin()
        cluster.until(lambda: one.is_over)
        assert one.errors[-1] == "THROTTLING_QUOTA_EXCEEDED"


def test_a_member_that_is_moved_twice_in_a_row_ends_where_it_shall() -> None:
    """Many come and go at once, on streams: each that stays ends with its part, and nothing has two owners."""
    with GroupCluster(seed=13, orders=12) as cluster:
        members: list[Member] = []
        for round_ in range(4):
            members += [cluster.member("billing", "orders", join=False) for _ in range(3)]
            for member in members[-3:]:
                member.begin()
            cluster.world.run_for(0.3)
            members.pop(round_).kill()

        def are_stable() -> bool:
            held = [one for member in members for one in sorted(member.owned)]
            return len(held) == len(set(held)) == 12 and {len(member.owned) for member in members} <= {1, 2}

        cluster.until(are_stable, timeout=15)
        shard = cluster.shard("billing")
        validate(shard.state)
        assert replayed(cluster, "billing") == shard.state


def test_settings_act_on_groups_that_are_there() -> None:
    with GroupCluster(seed=14, orders=2) as cluster:
        one = cluster.member("billing", "orders")
        cluster.until(lambda: len(one.owned) == 2)
        cluster.set_cluster("group.consumer.max.size", "1")
        cluster.set_cluster("group.consumer.heartbeat.interval.ms", "1000")
        two: Any = cluster.member("billing", "orders", comes_back=False)
        assert two.error == "GROUP_MAX_SIZE_REACHED"
        before = one.answers
        cluster.world.run_for(20)
        assert one.answers - before >= 8, "every answer has the interval"


def test_a_log_that_cannot_be_read_makes_its_groups_unavailable_and_says_where() -> None:
    with GroupCluster(seed=15, offsets_partitions=1, orders=2) as cluster:
        cluster.commit("billing", {("orders", 0): 1})
        shard = cluster.shard("billing")
        leader = shard.leader.replica.partition.leader

        async def spoil(_: RunningBroker) -> None:
            appended = shard.leader.append(encode_columns([1], [b"no key of ours"], [b"?"]), is_coordinator=True)
            await shard.leader.acks.wait(appended.last_offset + 1)

        cluster.on_broker(leader, spoil)
        cluster.kill(NodeId(leader))
        eventually(cluster, lambda: cluster.coordinator("billing") != leader)
        heir = cluster.coordinator("billing")
        found = cluster.brokers[NodeId(heir)].coordinator
        cluster.until(lambda: any(one.phase is Phase.BROKEN for one in found.shards.values()), timeout=30)
        with pytest.raises(RemoteError, match="offset 1") as refused:
            cluster.groups("FetchOffsets", pb.FetchOffsetsRequest(group="billing"), node=heir)
        assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert found.loading == 1


def test_a_topic_that_changes_during_an_assignment_is_not_missed() -> None:
    with GroupCluster(seed=16, orders=1) as cluster:
        one = cluster.member("billing", "orders")
        cluster.until(lambda: len(one.owned) == 1)
        for total in range(2, 12):
            more = admin_pb2.AddPartitionsRequest(topics=[admin_pb2.MorePartitions(topic="orders", total=total)])
            cluster.api(11, "Admin", "AddPartitions", more)
        cluster.until(lambda: len(one.owned) == 11, timeout=5)


def test_the_coordinator_counts_what_it_does() -> None:
    with GroupCluster(seed=17, offsets_partitions=1, orders=2) as cluster:
        one = cluster.member("billing", "orders")
        cluster.until(lambda: len(one.owned) == 2)
        cluster.commit("billing", {("orders", 0): 1}, member=one)
        cluster.commit("simple", {("orders", 0): 1, ("orders", 1): 1})
        leader = cluster.coordinator("billing")

        async def samples(found: RunningBroker) -> dict[tuple[str, str], float]:
            return {(one.name, one.labels.get("kind", "")): one.value for one in group_samples(found.groups)}

        counted = cluster.on_broker(leader, samples)
        expected = {
            ("groups", "consumer"): 1,
            ("groups", "simple"): 1,
            ("groups", "classic"): 0,
            ("group_members", "consumer"): 1,
            ("group_partitions", ""): 1,
            ("group_partitions_loading", ""): 0,
            ("group_streams", ""): 1,
            ("group_deadlines", ""): 1,
            ("group_loads_total", ""): 1,
            ("group_commits_total", ""): 2,
            ("group_committed_offsets_total", ""): 3,
            ("group_rebalances_total", ""): 1,
        }
        assert {key: counted[key] for key in expected} == expected


def test_lag_is_what_the_leaders_of_a_topic_have_less_what_the_coordinator_knows() -> None:
    with GroupCluster(seed=18) as cluster:
        orders = cluster.topic("orders", partitions=3)
        for partition, count in enumerate((5, 7, 9)):
            cluster.write(PartitionId(orders.topic_id, partition), *[b"x"] * count)
        cluster.commit("simple", {("orders", 0): 5, ("orders", 1): 3})

        async def samples(found: RunningBroker) -> list[tuple[str, str, str, float]]:
            rows = lag_samples(found.groups, found.replicas)
            return [(one.name, one.labels.get("group", ""), one.labels["topic"], one.value) for one in rows]

        rows = [row for broker in BROKERS for row in cluster.on_broker(broker, samples)]
        assert [row[1:] for row in rows if row[0] == "group_committed_offset"] == [("simple", "orders", 8)]
        ends = [(topic, value) for name, _, topic, value in rows if name == "topic_end_offset"]
        assert {topic for topic, _ in ends} == {"orders"}, "nothing of internal topics"
        assert sum(value for _, value in ends) == 21
