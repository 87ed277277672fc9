"""Members of consumer groups on a simulated cluster, through the public gRPC API: joining, moving, leaving, being
lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.brokers.cluster import RunningBroker
from support.groups.cluster import GroupCluster, Member

from tidelog.coordinator.consumer_group import has_changes
from tidelog.coordinator.requests import HeartbeatReply
from tidelog.coordinator.state import validate
from tidelog.coordinator.streams import ANSWERS_MAX
from tidelog.model.errors import InvalidRequestError
from tidelog.rpc.v1 import admin_pb2
from tidelog.rpc.v1 import groups_pb2 as pb
from tidelog.services.context import INTERNAL
from tidelog.services.groups import OWNED_MAX, MemberHeartbeat


def all_of(topic: str, partitions: int) -> set[tuple[str, int]]:
    return {(topic, number) for number in range(partitions)}


def are_dealt(wanted: set[tuple[str, int]], *members: Member) -> bool:
    """Everything has exactly one owner, and each of these has its part."""
    held = [partition for member in members for partition in sorted(member.owned)]
    return len(held) == len(wanted) and set(held) == wanted and all(member.owned for member in members)


def check(world: GroupCluster, group: str) -> None:
    validate(world.shard(group).state)
    world.check()


@pytest.mark.requirement("a:F-01", "a:F-07", "a:U-08")
def test_members_join_share_and_leave() -> None:
    with GroupCluster(seed=1, orders=6) as world:
        everything = all_of("orders", 6)
        one = world.member("billing", "orders")
        world.until(lambda: are_dealt(everything, one))
        two, three = world.member("billing", "orders"), world.member("billing", "orders")
        three_of = (one, two, three)
        world.until(lambda: [len(member.owned) for member in three_of] == [2, 2, 2], timeout=5)
        assert are_dealt(everything, *three_of)
        kept = one.owned, three.owned
        before_s = world.now_s()
        two.leave()
        world.until(lambda: are_dealt(everything, one, three), timeout=5)
        assert world.now_s() - before_s < 1, "a goodbye is acted on at once, not at the next heartbeat"
        assert kept[0] <= one.owned
        assert kept[1] <= three.owned, "what does not move is not touched"
        check(world, "billing")
        details = world.describe("billing")
        assert (details.type, details.state, len(details.members)) == ("consumer", "stable", 2)


def test_members_whose_joins_share_a_commit_are_notified_of_each_other() -> None:
    """The first of them has no stream yet when the commit of both changes its assignment."""
    with GroupCluster(seed=17, orders=6) as world:
        shard = world.shard("billing")
        answers: dict[str, list[object]] = {"a": [], "b": [], "c": []}

        async def join(found: RunningBroker, member: str) -> None:
            has_joined = False

            async def receive() -> MemberHeartbeat:
                nonlocal has_joined
                if has_joined:
                    await asyncio.Event().wait()  # no further heartbeat
                has_joined = True
                return MemberHeartbeat(group="billing", member_id=member, member_epoch=0, topics=("orders",))

            async def send(answer: object) -> None:
                answers[member].append(answer)

            await found.groups.membership(INTERNAL, receive, send)

        async def work(found: RunningBroker) -> None:
            streams = [asyncio.ensure_future(join(found, member)) for member in sorted(answers)]
            await asyncio.sleep(1)
            group = shard.state.group("billing")
            assert group is not None
            assert sorted(group.members) == sorted(answers)
            waiting = [member for member in sorted(answers) if has_changes(group, member)]
            assert waiting == [], f"not notified: {answers}"
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)

        world.on_broker(world.coordinator("billing"), work)


def test_a_killed_member_is_gone_after_its_grace() -> None:
    with GroupCluster(seed=2, orders=4) as world:
        everything = all_of("orders", 4)
        one, two = world.member("billing", "orders"), world.member("billing", "orders")
        world.until(lambda: are_dealt(everything, one, two))
        before_s = world.now_s()
        two.kill()
        world.until(lambda: are_dealt(everything, one), timeout=10)
        assert 2.0 <= world.now_s() - before_s < 3.0
        check(world, "billing")


def test_a_member_that_comes_back_in_its_grace_goes_on_as_it_was() -> None:
    with GroupCluster(seed=3, orders=4) as world:
        one, two = world.member("billing", "orders"), world.member("billing", "orders")
        world.until(lambda: are_dealt(all_of("orders", 4), one, two))
        epochs, held = (one.epoch, two.epoch), (one.owned, two.owned)
        two.cut()
        world.until(lambda: two.streams == 2 and two.answers > 0)
        world.world.run_for(6)
        assert (one.epoch, two.epoch) == epochs
        assert (one.owned, two.owned) == held
        assert not two.revoked
        check(world, "billing")


def test_a_member_that_is_silent_on_an_open_stream_is_gone_after_its_session() -> None:
    with GroupCluster(seed=4, orders=4) as world:
        one = world.member("billing", "orders")
        two = world.member("billing", "orders", session_timeout_ms=8_000, comes_back=False)
        world.until(lambda: are_dealt(all_of("orders", 4), one, two))
        two.beats = False
        before_s = world.now_s()
        world.until(lambda: are_dealt(all_of("orders", 4), one), timeout=30)
        assert 2.0 < world.now_s() - before_s < 9.0
        world.until(lambda: two.error == "UNKNOWN_MEMBER_ID")
        check(world, "billing")


@pytest.mark.requirement("a:F-08", "a:F-09")
def test_a_static_member_keeps_its_session_and_its_place() -> None:
    with GroupCluster(seed=5, orders=4) as world:
        one = world.member("billing", "orders")
        two = world.member("billing", "orders", instance_id="two", session_timeout_ms=20_000)
        world.until(lambda: are_dealt(all_of("orders", 4), one, two))
        held = two.owned
        two.kill()
        world.world.run_for(10)
        assert len(one.owned) == 2, "a static member has no grace, it has its session"
        world.until(lambda: are_dealt(all_of("orders", 4), one), timeout=15)
        # Away in order, and back as another process.
        three = world.member("billing", "orders", instance_id="three", session_timeout_ms=20_000)
        world.until(lambda: are_dealt(all_of("orders", 4), one, three))
        held, epoch = three.owned, one.epoch
        second = world.member("billing", "orders", instance_id="three", comes_back=False)
        assert second.error == "UNRELEASED_INSTANCE_ID", "another one lives under it"
        three.leave(-2)
        world.world.run_for(5)
        four = world.member("billing", "orders", instance_id="three", session_timeout_ms=20_000)
        world.until(lambda: four.owned == held)
        assert one.epoch == epoch, "the others have not noticed"
        check(world, "billing")


def test_a_member_that_does_not_give_up_what_it_has_to_is_put_out() -> None:
    with GroupCluster(seed=6, orders=4) as world:
        one = world.member("billing", "orders", rebalance_timeout_ms=3_000, gives_up=False, comes_back=False)
        world.until(lambda: len(one.owned) == 4)
        two = world.member("billing", "orders")
        before_s = world.now_s()
        world.until(lambda: len(two.owned) == 4, timeout=30)
        assert 2.5 < world.now_s() - before_s < 5
        world.until(lambda: one.error == "UNKNOWN_MEMBER_ID")
        check(world, "billing")


def test_new_partitions_and_new_topics_are_dealt_at_once() -> None:
    with GroupCluster(seed=7, orders=2) as world:
        one, two = world.member("billing", "orders"), world.member("billing", "orders")
        seer = world.member("audit", pattern="o.*")
        world.until(lambda: are_dealt(all_of("orders", 2), one, two) and are_dealt(all_of("orders", 2), seer))
        bystander = world.shard("billing").runtime.appends
        world.topic("unrelated", partitions=2)
        assert world.shard("billing").runtime.appends == bystander
        more = admin_pb2.AddPartitionsRequest(topics=[admin_pb2.MorePartitions(topic="orders", total=6)])
        world.api(11, "Admin", "AddPartitions", more)
        world.until(lambda: are_dealt(all_of("orders", 6), one, two), timeout=3)
        world.topic("others", partitions=2)
        wanted = all_of("orders", 6) | all_of("others", 2)
        world.until(lambda: are_dealt(wanted, seer), timeout=3)
        world.api(11, "Admin", "DeleteTopics", admin_pb2.DeleteTopicsRequest(topics=["others"]))
        world.until(lambda: are_dealt(all_of("orders", 6), seer), timeout=3)
        check(world, "billing")


def test_an_operator_takes_members_out() -> None:
    with GroupCluster(seed=8, orders=4) as world:
        one = world.member("billing", "orders")
        two = world.member("billing", "orders", comes_back=False)
        world.until(lambda: are_dealt(all_of("orders", 4), one, two))
        request = pb.RemoveMembersRequest(group="billing", member_ids=[two.member_id, "nobody"])
        rows = world.ask_groups("billing", "RemoveMembers", request).members
        assert [(row.name, row.error.name) for row in rows] == [(two.member_id, ""), ("nobody", "UNKNOWN_MEMBER_ID")]
        world.until(lambda: two.error == "UNKNOWN_MEMBER_ID" and are_dealt(all_of("orders", 4), one))
        check(world, "billing")


def test_a_member_without_a_stream_hears_the_news_with_its_next_heartbeat() -> None:
    with GroupCluster(seed=9, orders=4) as world:

        def beat(epoch: int, **more: Any) -> pb.HeartbeatResponse:
            request = pb.HeartbeatRequest(group="billing", member_id="unary", member_epoch=epoch, **more)
            response = world.ask_groups("billing", "Heartbeat", request)
            assert isinstance(response, pb.HeartbeatResponse)
            return response

        first = beat(0, subscription={"topics": ["orders"]}, owned={}, session_timeout_ms=10_000)
        assert sorted(first.assignment.topics[0].partitions) == [0, 1, 2, 3]
        assert first.heartbeat_interval_ms == 5_000
        assert not beat(first.member_epoch).HasField("assignment"), "nothing has changed"
        one = world.member("billing", "orders")
        assert one.owned == frozenset()
        reported = beat(first.member_epoch)
        kept = sorted(reported.assignment.topics[0].partitions)
        assert len(kept) == 2
        owned = {"topics": [{"topic": "orders", "partitions": kept}]}
        beat(reported.member_epoch, owned=owned)
        world.until(lambda: len(one.owned) == 2, timeout=3)
        # It says nothing more: its session decides.
        before_s = world.now_s()
        world.until(lambda: len(one.owned) == 4, timeout=30)
        assert 9 < world.now_s() - before_s < 11
        check(world, "billing")


def test_a_member_that_is_gone_before_it_is_let_in_has_its_grace_only() -> None:
    with GroupCluster(seed=10, orders=4) as world:
        shard = world.shard("billing")
        one = world.member("billing", "orders", join=False)
        one.begin()
        world.until(lambda: shard.leader.log.end_offset > shard.leader.high_watermark, timeout=10)
        one.kill()  # its joining is on its way to the replicas

        def members() -> int:
            group = shard.state.group("billing")
            return -1 if group is None else group.member_count

        world.until(lambda: members() == 1)
        before_s = world.now_s()
        world.until(lambda: members() == 0, timeout=10)
        assert world.now_s() - before_s < 3
        assert len(shard.timers) == 0
        assert not shard.streams
        check(world, "billing")


def test_answers_that_a_member_does_not_read_do_not_pile_up() -> None:
    with GroupCluster(seed=11, orders=4) as world:
        world.shard("billing")
        leader = world.coordinator("billing")

        async def work(found: RunningBroker) -> None:
            service = found.groups
            heard, epoch = 0, 0
            reads = asyncio.Event()

            async def receive() -> MemberHeartbeat:
                nonlocal heard
                await asyncio.sleep(0.01)
                heard += 1
                return MemberHeartbeat(
                    group="billing",
                    member_id="deaf",
                    member_epoch=epoch,
                    topics=("orders",) if epoch == 0 else None,
                )

            async def send(answer: object) -> None:
                nonlocal epoch
                assert isinstance(answer, HeartbeatReply)
                epoch = answer.member_epoch
                await reads.wait()

            stream = asyncio.ensure_future(service.membership(INTERNAL, receive, send))
            await asyncio.sleep(20)
            assert heard <= ANSWERS_MAX + 2
            reads.set()
            await asyncio.sleep(1)
            assert heard > 2 * ANSWERS_MAX, "it goes on when it reads"
            stream.cancel()
            await asyncio.wait([stream])
            assert service.streams == 0

        world.on_broker(leader, work)


def test_a_heartbeat_reports_a_limited_number_of_partitions() -> None:
    with GroupCluster(seed=99, orders=1) as world:
        beat = MemberHeartbeat(group="g", member_id="m", member_epoch=1, owned=(("orders", range(OWNED_MAX + 1)),))
        with pytest.raises(InvalidRequestError, match=f"{OWNED_MAX + 1} owned partitions, at most {OWNED_MAX}"):
            world.on_broker(11, lambda broker: broker.groups.heartbeat(INTERNAL, beat))
