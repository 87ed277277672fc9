"""Whose time is counted, from when, and what does not renew it: every member that the log shows has a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.brokers.cluster import RunningBroker
from support.groups.cluster import BROKERS, GroupCluster, Member

from tidelog.coordinator import partition_shard as shard_module
from tidelog.coordinator.loading import load as read_log
from tidelog.coordinator.requests import ExpireMember, OffsetToCommit
from tidelog.coordinator.shard import Shard
from tidelog.coordinator.state import EMPTY
from tidelog.coordinator.streams import Answer
from tidelog.model.errors import RequestTimedOutError, StorageError
from tidelog.model.group_errors import StaleMemberEpochError
from tidelog.model.ids import NodeId, PartitionId
from tidelog.services.context import INTERNAL
from tidelog.services.groups import MemberHeartbeat

GROUP = "billing"


def is_out(shard: Shard, member: Member) -> bool:
    """By what is committed."""
    group = shard.state.group(GROUP)
    return group is not None and member.member_id not in group.members


def cut_off(cluster: GroupCluster, leader: int) -> None:
    """Its log does not commit any more; it does not hear that."""
    for other in BROKERS:
        if other != leader:
            cluster.network.block(NodeId(leader), NodeId(other))


def heartbeat(broker: RunningBroker, member_id: str, epoch: int, **more: Any) -> MemberHeartbeat:
    return MemberHeartbeat(
        group=GROUP,
        member_id=member_id,
        member_epoch=epoch,
        **more,
    )


def session(shard: Shard, member_id: str) -> float | None:
    return shard.timers.at(("session", GROUP, member_id))


@pytest.mark.parametrize(
    ("instance_id", "reconnect_ms", "out_s"), [("", 8_000, 8), ("", 90_000, 45), ("one", 8_000, 45)]
)
def test_a_new_coordinator_waits_for_members_with_streams_as_long_as_they_need_to_find_it(
    instance_id: str, reconnect_ms: int, out_s: int
) -> None:
    with GroupCluster(seed=21, orders=4) as cluster:
        cluster.set_cluster("group.consumer.stream.reconnect.ms", str(reconnect_ms))
        lives = cluster.member(GROUP, "orders")
        dies = cluster.member(GROUP, "orders", instance_id=instance_id)
        cluster.until(lambda: len(lives.owned) == len(dies.owned) == 2)
        cluster.kill(NodeId(cluster.coordinator(GROUP)))
        dies.kill()
        shard = cluster.shard(GROUP)
        before_s = cluster.now_s()
        cluster.until(lambda: is_out(shard, dies), timeout=60)
        assert out_s - 2 < cluster.now_s() - before_s < out_s + 2
        cluster.until(lambda: len(lives.owned) == 4)
        assert "UNKNOWN_MEMBER_ID" not in lives.errors, "who lives has found it in time"


def test_a_member_without_a_stream_keeps_its_session_when_the_coordinator_moves() -> None:
    with GroupCluster(seed=22, orders=2) as cluster:
        cluster.shard(GROUP)

        async def join(found: RunningBroker) -> None:
            await found.groups.heartbeat(INTERNAL, heartbeat(found, "unary", 0, topics=("orders",)))

        leader = cluster.coordinator(GROUP)
        cluster.on_broker(leader, join)
        cluster.kill(NodeId(leader))
        shard = cluster.shard(GROUP)
        cluster.world.run_for(40)
        assert cluster.describe(GROUP).members[0].member_id == "unary"
        cluster.world.run_for(10)
        assert not cluster.describe(GROUP).members
        assert len(shard.timers) == 0


def test_a_join_that_commits_when_nobody_waits_for_it_any_more_has_a_deadline() -> None:
    with GroupCluster(seed=23, orders=2) as cluster:
        cluster.set_cluster("offsets.commit.timeout.ms", "1000")
        shard = cluster.shard(GROUP)
        leader = cluster.coordinator(GROUP)
        cut_off(cluster, leader)

        async def join(found: RunningBroker) -> None:
            with pytest.raises(RequestTimedOutError):
                await found.groups.heartbeat(
                    INTERNAL, heartbeat(found, "gone", 0, topics=("orders",), session_timeout_ms=6_000)
                )

        cluster.on_broker(leader, join)
        assert shard.state.group(GROUP) is None
        cluster.network.heal()
        cluster.until(lambda: shard.state.group(GROUP) is not None, timeout=10)
        assert session(shard, "gone") is not None
        cluster.world.run_for(8)
        group = shard.state.group(GROUP)
        assert group is not None
        assert not group.members, "it holds nothing for ever"


def test_what_a_broken_stream_has_left_on_the_way_renews_nothing() -> None:
    """A member that is killed while its heartbeat waits for the log is gone after its grace, not after its session."""
    with GroupCluster(seed=24, orders=4) as cluster:
        cluster.set_cluster("offsets.commit.timeout.ms", "60000")
        shard = cluster.shard(GROUP)
        leader = cluster.coordinator(GROUP)

        async def work(found: RunningBroker) -> None:
            loop = asyncio.get_running_loop()
            asked: asyncio.Queue[MemberHeartbeat] = asyncio.Queue()
            reported: asyncio.Queue[Answer] = asyncio.Queue()
            call = loop.create_task(found.groups.membership(INTERNAL, asked.get, reported.put))
            asked.put_nowait(heartbeat(found, "dies", 0, topics=("orders",)))
            joined = await reported.get()
            assert not isinstance(joined, Exception)
            cut_off(cluster, leader)
            # Something new to be stored, which waits.
            asked.put_nowait(heartbeat(found, "dies", joined.member_epoch, topics=("orders", "more")))
            await asyncio.sleep(0.1)
            assert shard.leader.log.end_offset > shard.leader.high_watermark
            call.cancel()
            await asyncio.wait([call])
            before_s = loop.time()
            await asyncio.sleep(0.5)
            cluster.network.heal()
            await shard.leader.acks.wait(shard.leader.log.end_offset)
            await asyncio.sleep(0.01)
            due_s = session(shard, "dies")
            assert due_s is not None
            assert due_s <= before_s + 2
            await asyncio.sleep(4)
            group = shard.state.group(GROUP)
            assert group is not None
            assert not group.members

        cluster.on_broker(leader, work, timeout=60)


def test_a_stream_that_takes_the_place_of_a_broken_one_renews_the_session() -> None:
    with GroupCluster(seed=25, orders=4) as cluster:
        one = cluster.member(GROUP, "orders")
        cluster.until(lambda: len(one.owned) == 4)
        shard = cluster.shard(GROUP)
        for _ in range(5):
            one.cut()
            cluster.until(lambda: (GROUP, one.member_id) in shard.streams and not shard._broken, timeout=5)
            due_s = session(shard, one.member_id)
            assert due_s is not None
            assert due_s > cluster.now_s() + 40
        assert "UNKNOWN_MEMBER_ID" not in one.errors


def test_a_timer_and_the_report_that_it_waited_for_may_cross() -> None:
    """The member has given up what it had to when the timer of that is acted on: it stays."""
    with GroupCluster(seed=26, orders=4) as cluster:
        one = cluster.member(GROUP, "orders", gives_up=False, rebalance_timeout_ms=60_000)
        cluster.until(lambda: len(one.owned) == 4)
        two = cluster.member(GROUP, "orders")
        shard = cluster.shard(GROUP)

        def revoking() -> bool:
            group = shard.state.group(GROUP)
            return group is not None and bool(group.currents[one.member_id].revoking)

        cluster.until(revoking)
        leader = cluster.coordinator(GROUP)

        async def work(found: RunningBroker) -> None:
            group = shard.state.group(GROUP)
            assert group is not None
            current = group.currents[one.member_id]
            request = heartbeat(found, one.member_id, current.epoch)
            plain = found.groups._heartbeat(INTERNAL, request, is_streamed=True)
            report = replace(plain, owned=current.assigned)
            expiry = ExpireMember(
                view=found.groups.coordinator.view,
                now_ms=found.groups.coordinator.now_ms(),
                group=GROUP,
                member_id=one.member_id,
                member_epoch=current.epoch,
                is_rebalance=True,
            )
            await asyncio.gather(shard.heartbeat(report), shard.submit(expiry, is_own=True))
            group = shard.state.group(GROUP)
            assert group is not None
            assert one.member_id in group.members

        cluster.on_broker(leader, work)
        cluster.until(lambda: len(two.owned) == 2)


def test_a_commit_that_a_later_one_has_overtaken_is_refused() -> None:
    with GroupCluster(seed=27) as cluster:
        made = cluster.topic("orders", partitions=2)
        one = cluster.member(GROUP, "orders")
        cluster.until(lambda: len(one.owned) == 2)
        shard = cluster.shard(GROUP)

        async def work(found: RunningBroker) -> None:
            async def commit(offset: int, sequence: int) -> None:
                offsets = {PartitionId(made.topic_id, 0): OffsetToCommit(offset)}
                done = await found.groups.commit_offsets(
                    INTERNAL, GROUP, offsets, member_id=one.member_id, member_epoch=one.epoch, sequence=sequence
                )
                assert set(done.values()) == {None}

            await commit(5, 1)
            await commit(9, 3)
            with pytest.raises(StaleMemberEpochError):
                await commit(5, 2)
            await commit(7, 4)  # the program has gone back by itself
            await commit(8, 0)  # who does not count is not refused

        cluster.on_broker(cluster.coordinator(GROUP), work)
        assert cluster.committed(GROUP, ("orders", 0)) == {("orders", 0): 8}
        one.leave()
        assert not shard._sequences, "nothing is kept of who is gone"


def test_logs_that_cannot_be_read_do_not_keep_others_from_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken in turn, however many partitions try again and again."""
    tries: dict[int, int] = {}

    async def load(leading: Any, progress: Any, log_format: Any) -> Any:
        number = leading.replica.partition_id.partition
        if number != 5 and tries.setdefault(number, 0) < 20:
            tries[number] += 1
            raise StorageError("the disk does not answer")
        await asyncio.sleep(0.1)
        return await read_log(leading, progress, log_format)

    monkeypatch.setattr(shard_module, "load", load)
    with GroupCluster(seed=28, offsets_partitions=6) as cluster:
        for broker in cluster.brokers.values():
            broker.coordinator.load_slots = asyncio.Semaphore(1)
        cluster.coordinator(GROUP)

        def leading() -> set[int]:
            return {
                shard.number for broker in cluster.brokers.values() for shard in broker.coordinator.leading_shards()
            }

        cluster.until(lambda: 5 in leading(), timeout=5)
        assert leading() == {5}
        cluster.until(lambda: len(leading()) == 6, timeout=30)


def test_nothing_large_hangs_on_a_shard_that_is_over() -> None:
    with GroupCluster(seed=29, orders=2) as cluster:
        one = cluster.member(GROUP, "orders")
        cluster.until(lambda: len(one.owned) == 2)
        shard = cluster.shard(GROUP)
        leader = cluster.coordinator(GROUP)

        async def over(found: RunningBroker) -> None:
            shard.leader.replica.end_role()

        cluster.on_broker(leader, over)
        assert shard.state is EMPTY
        assert not list(shard.subscriptions)
        assert len(shard.timers) == 0
