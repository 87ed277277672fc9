"""Classic groups at work on a simulated cluster: rounds over a real log, by the calls that the Kafka API makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from support.async_tests import inside
from support.brokers.cluster import RunningBroker
from support.groups.cluster import GroupCluster

from tidelog.coordinator.classic_requests import JoinReply, SyncReply
from tidelog.coordinator.requests import OffsetToCommit
from tidelog.coordinator.state import validate
from tidelog.model.errors import PolicyViolationError, TidelogError
from tidelog.model.group_errors import (
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    MemberIdRequiredError,
    NonEmptyGroupError,
    NotCoordinatorError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.services.context import INTERNAL
from tidelog.services.groups import GroupService, GroupServiceConfig, JoinGroup, SyncGroup

GROUP = "legacy"


async def join(service: GroupService, member_id: str = "", **more: Any) -> JoinReply:
    """As a client does: once more with the id that it is given."""
    fields: dict[str, Any] = {
        "protocol_type": "consumer",
        "protocols": (("range", b"orders"),),
        "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 20_000,
        **more,
    }
    try:
        return await service.join_group(INTERNAL, GROUP, JoinGroup(member_id=member_id, **fields))
    except MemberIdRequiredError as raised:
        return await service.join_group(INTERNAL, GROUP, JoinGroup(member_id=raised.member_id, **fields))


async def sync(service: GroupService, reply: JoinReply) -> SyncReply:
    dealt = tuple((member.member_id, f"part of {member.member_id}".encode()) for member in reply.members)
    return await service.sync_group(
        INTERNAL, GROUP, SyncGroup(member_id=reply.member_id, generation=reply.generation, assignments=dealt)
    )


def run(seed: int, job: Callable[[GroupCluster, int], None], **more: Any) -> None:
    with GroupCluster(seed=seed, offsets_partitions=1, **more, orders=2) as cluster:
        cluster.shard(GROUP)
        job(cluster, cluster.coordinator(GROUP))


def on(cluster: GroupCluster, broker: int, job: Callable[[GroupService], Coroutine[Any, Any, Any]]) -> Any:
    async def work(found: RunningBroker) -> Any:
        return await job(found.groups)

    return cluster.on_broker(broker, work, timeout=120)


async def round_of(service: GroupService, *members: str) -> list[tuple[JoinReply, SyncReply]]:
    """All of them join and sync; new ones are empty names."""
    joined = await asyncio.gather(*(join(service, member) for member in members))
    synced = await asyncio.gather(*(sync(service, reply) for reply in joined))
    return list(zip(joined, synced, strict=True))


@inside(partial(run, 1))
def test_two_members_go_through_their_rounds(cluster: GroupCluster, leader: int) -> None:
    async def work(service: GroupService) -> None:
        rows = await round_of(service, "", "")
        assert len({reply.generation for reply, _ in rows}) == 1
        assert len({reply.leader for reply, _ in rows}) == 1
        (first,) = [reply for reply, _ in rows if reply.members]
        assert first.member_id == first.leader
        assert all(synced.assignment == f"part of {reply.member_id}".encode() for reply, synced in rows)
        one, two = (reply for reply, _ in rows)
        await service.classic_heartbeat(INTERNAL, GROUP, member_id=one.member_id, generation=one.generation)
        with pytest.raises(IllegalGenerationError):
            await service.classic_heartbeat(INTERNAL, GROUP, member_id=one.member_id, generation=one.generation + 1)
        details = service.describe_group(INTERNAL, GROUP)
        assert (details.kind, details.state, len(details.members)) == ("classic", "stable", 2)
        assert [summary.state for summary in (await service.list_groups(INTERNAL, ("stable",)))[0]] == ["stable"]
        # A third: everybody joins again.
        third = asyncio.ensure_future(join(service))
        await asyncio.sleep(0.1)
        for reply in (one, two):
            with pytest.raises(RebalanceInProgressError):
                await service.classic_heartbeat(INTERNAL, GROUP, member_id=reply.member_id, generation=reply.generation)
        again = await asyncio.gather(*(join(service, reply.member_id) for reply in (one, two)))
        assert {reply.generation for reply in (*again, await third)} == {one.generation + 1}
        await asyncio.gather(*(sync(service, reply) for reply in (*again, third.result())))
        with pytest.raises(NonEmptyGroupError):
            await service.delete_group(INTERNAL, GROUP)
        left = await service.leave_group(INTERNAL, GROUP, [(one.member_id, ""), ("nobody", "")])
        assert left[0] is None
        assert isinstance(left[1], UnknownMemberIdError)
        removed = await service.remove_members(INTERNAL, GROUP, (), ())
        assert set(removed.values()) == {None}
        assert len(removed) == 2
        for _ in range(20):
            await asyncio.sleep(0.05)
        assert service.describe_group(INTERNAL, GROUP).state == "empty"
        await service.delete_group(INTERNAL, GROUP)

    on(cluster, leader, work)
    validate(cluster.shard(GROUP).state)


@inside(partial(run, 2))
def test_a_generation_survives_its_coordinator(cluster: GroupCluster, leader: int) -> None:
    rows = on(cluster, leader, lambda service: round_of(service, "", ""))
    state = cluster.shard(GROUP).state
    cluster.kill(NodeId(leader))
    cluster.until(lambda: cluster.image().partition(*_partition(cluster)).leader != leader, timeout=30)  # type: ignore[union-attr]
    assert cluster.shard(GROUP).state == state
    heir = cluster.coordinator(GROUP)

    async def go_on(service: GroupService) -> None:
        for reply, synced in rows:
            await service.classic_heartbeat(INTERNAL, GROUP, member_id=reply.member_id, generation=reply.generation)
            again = await service.sync_group(
                INTERNAL, GROUP, SyncGroup(member_id=reply.member_id, generation=reply.generation)
            )
            assert again.assignment == synced.assignment

    on(cluster, heir, go_on)


def _partition(cluster: GroupCluster) -> tuple[Any, int]:
    return cluster.image().topic_ids["__consumer_offsets"], 0


@inside(partial(run, 3))
def test_a_silent_member_is_out_after_its_session_and_the_last_one_leaves_an_empty_group(
    cluster: GroupCluster, leader: int
) -> None:
    on(cluster, leader, lambda service: round_of(service, "", ""))
    cluster.world.run_for(9)
    assert cluster.describe(GROUP).state == "stable"
    cluster.world.run_for(3)
    assert cluster.describe(GROUP).state == "empty"
    shard = cluster.shard(GROUP)
    assert shard.rounds.get(GROUP) is None, "nothing is held for it"
    assert len(shard.rounds) == 0
    assert len(shard.timers) == 0


@inside(partial(run, 4))
def test_waiters_for_a_round_learn_that_the_coordinator_has_gone(cluster: GroupCluster, leader: int) -> None:
    shard = cluster.shard(GROUP)

    async def work(found: RunningBroker) -> None:
        waiting = asyncio.ensure_future(join(found.groups))
        await asyncio.sleep(0.5)
        assert not waiting.done(), "the first round of an empty group waits for more members"
        shard.leader.replica.end_role()
        with pytest.raises(NotCoordinatorError):
            await waiting

    cluster.on_broker(leader, work)
    assert len(shard.timers) == 0


@inside(partial(run, 11))
def test_a_member_whose_caller_was_cancelled_keeps_its_ticket_until_the_round_is_over(
    cluster: GroupCluster, leader: int
) -> None:
    """Seed 600006 (brokers): a connection was cut, and its join taken for a ticket that nobody will ever answer."""
    rounds = cluster.shard(GROUP).rounds

    async def work(service: GroupService) -> None:
        gone = asyncio.ensure_future(join(service))
        await asyncio.sleep(0.5)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        group = rounds.get(GROUP)
        assert group is not None
        assert [member.join_ticket in rounds._abandoned for member in group.members.values()] == [True]
        rounds.validate()
        assert len(rounds) == 0, "it takes no room of others"
        reply = await join(service)
        assert len(group.members) == 2, "it counts as joined, and has its session"
        assert not rounds._abandoned

        lost = asyncio.ensure_future(join(service, reply.member_id, protocols=(("range", b"more orders"),)))
        await asyncio.sleep(0.5)
        (future,) = rounds._waiting.values()
        rounds._waiting.clear()
        with pytest.raises(AssertionError, match="nobody waits for ticket"):
            rounds.validate()
        lost.cancel()
        future.cancel()
        await asyncio.gather(lost, return_exceptions=True)

    on(cluster, leader, work)


@inside(partial(run, 5))
def test_a_group_whose_members_cannot_be_understood_has_one_kind_at_a_time(cluster: GroupCluster, leader: int) -> None:
    """Neither their subscriptions nor their assignments can be read here."""
    one = cluster.member(GROUP, "orders")
    with pytest.raises(InconsistentGroupProtocolError):
        on(cluster, leader, join)
    one.leave()
    on(cluster, leader, lambda service: round_of(service, ""))
    two = cluster.member(GROUP, "orders", comes_back=False)
    assert two.error == "INCONSISTENT_GROUP_PROTOCOL"
    assert cluster.describe(GROUP).type == "classic"


@inside(partial(run, 6))
def test_members_of_a_classic_group_commit_with_their_generation(cluster: GroupCluster, leader: int) -> None:
    async def work(service: GroupService) -> None:
        ((reply, _),) = await round_of(service, "")
        made = cluster.image().topic_ids["orders"]
        offsets = {PartitionId(TopicId(made), 0): OffsetToCommit(5)}

        async def commit(member_id: str, generation: int) -> TidelogError | None:
            done = await service.commit_offsets(INTERNAL, GROUP, offsets, member_id=member_id, member_epoch=generation)
            return next(iter(done.values()))

        assert await commit(reply.member_id, reply.generation) is None
        with pytest.raises(IllegalGenerationError):
            await commit(reply.member_id, reply.generation - 1)
        with pytest.raises(UnknownMemberIdError):
            await commit("somebody", reply.generation)

    on(cluster, leader, work)
    assert cluster.committed(GROUP) == {("orders", 0): 5}


@inside(partial(run, 7))
def test_while_a_first_round_is_under_way_only_its_members_commit(cluster: GroupCluster, leader: int) -> None:
    async def work(service: GroupService) -> None:
        joining = asyncio.ensure_future(join(service))
        await asyncio.sleep(1)
        offsets = {PartitionId(TopicId(cluster.image().topic_ids["orders"]), 0): OffsetToCommit(5)}
        with pytest.raises(UnknownMemberIdError):
            await service.commit_offsets(INTERNAL, GROUP, offsets, member_id="", member_epoch=-1)
        await joining

    on(cluster, leader, work)


@inside(partial(run, 8))
def test_groups_of_which_nothing_is_stored_yet_are_bounded_too(cluster: GroupCluster, leader: int) -> None:
    async def work(service: GroupService) -> None:
        service.config = GroupServiceConfig(groups_max=3)
        fields: dict[str, Any] = {
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": (("range", b""),),
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 20_000,
        }
        for number in range(3):
            with pytest.raises(MemberIdRequiredError):
                await service.join_group(INTERNAL, f"group-{number}", JoinGroup(**fields))
        with pytest.raises(PolicyViolationError):
            await service.join_group(INTERNAL, "group-3", JoinGroup(**fields))
        with pytest.raises(MemberIdRequiredError):
            await service.join_group(INTERNAL, "group-2", JoinGroup(**fields))
        await asyncio.sleep(11)
        with pytest.raises(MemberIdRequiredError):
            await service.join_group(INTERNAL, "group-3", JoinGroup(**fields))

    on(cluster, leader, work)


@inside(partial(run, 9))
def test_a_round_that_another_protocol_has_overtaken_ends(cluster: GroupCluster, leader: int) -> None:
    """A classic member joins and falls silent; meanwhile others of the consumer protocol have come, and have gone."""
    shard = cluster.shard(GROUP)

    async def begin(service: GroupService) -> None:
        await join(service, session_timeout_ms=6_000, rebalance_timeout_ms=1_000)

    on(cluster, leader, begin)
    one = cluster.member(GROUP, "orders")
    cluster.until(lambda: len(one.owned) == 2)
    cluster.world.run_for(20)
    assert shard.rounds.get(GROUP) is None, "it does not try to store for ever that it is empty"
    assert one.owned == {("orders", 0), ("orders", 1)}
    one.leave()
    ((reply, _),) = on(cluster, leader, lambda service: round_of(service, ""))
    group = shard.state.group(GROUP)
    assert group is not None
    assert (group.kind, group.epoch) == ("classic", reply.generation)


@inside(partial(run, 10))
def test_the_time_a_group_became_empty_is_wall_clock_time(cluster: GroupCluster, leader: int) -> None:
    """A broker whose clock was set right after its start must not let go of offsets years too early."""
    coordinator = cluster.brokers[NodeId(leader)].coordinator

    async def work(service: GroupService) -> None:
        ((reply, _),) = await round_of(service, "")
        began_ms, began_s = coordinator._began
        coordinator._began = began_ms - 30 * 365 * 24 * 3_600_000, began_s
        service.coordinator.shards[0].rounds.limits_changed()
        await service.leave_group(INTERNAL, GROUP, [(reply.member_id, "")])

    on(cluster, leader, work)
    group = cluster.shard(GROUP).state.group(GROUP)
    assert group is not None
    assert abs(group.empty_since_ms - coordinator.now_ms()) < 60_000
