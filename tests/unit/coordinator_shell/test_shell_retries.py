"""What the coordinator cannot store at first it stores later, and the older of two streams of a member ends."""

from __future__ import annotations

import asyncio

import pytest
from support.brokers.cluster import RunningBroker
from support.groups.cluster import BROKERS, GroupCluster

from tidelog.coordinator.shard import Shard
from tidelog.model.ids import NodeId
from tidelog.services.context import INTERNAL
from tidelog.services.groups import MemberHeartbeat

GROUP = "billing"


def is_member(shard: Shard, member_id: str) -> bool:
    group = shard.state.group(GROUP)
    return group is not None and member_id in group.members


def test_a_member_that_cannot_be_removed_while_replicas_are_missing_is_removed_later() -> None:
    """Its removal is rejected before it is in the log, so only another attempt removes it."""
    with GroupCluster(seed=31, orders=2) as cluster:
        cluster.set_cluster("group.consumer.stream.reconnect.ms", "8000")
        member = cluster.member(GROUP, "orders")
        cluster.until(lambda: len(member.owned) == 2)
        shard = cluster.shard(GROUP)
        others = [broker for broker in BROKERS if broker != cluster.coordinator(GROUP)]
        for broker in others:
            cluster.kill(NodeId(broker))
        cluster.until(lambda: len(shard.leader.replica.partition.isr) == 1)
        member.kill()
        cluster.world.run_for(30)
        assert is_member(shard, member.member_id)
        cluster.start_brokers(*others)
        cluster.until(lambda: not is_member(shard, member.member_id))


@pytest.mark.parametrize("timeout_ms", [200, 1_000])
def test_a_change_that_is_stored_after_its_time_still_reaches_the_member(timeout_ms: int) -> None:
    """The answer is given up when the offsets' log stalls, and the decision commits all the same."""
    with GroupCluster(seed=33, orders=2) as cluster:
        cluster.set_cluster("offsets.commit.timeout.ms", str(timeout_ms))
        one = cluster.member(GROUP, "orders")
        cluster.until(lambda: len(one.owned) == 2)
        two = cluster.member(GROUP, "orders")
        shard = cluster.shard(GROUP)
        cluster.until(lambda: (GROUP, two.member_id) in shard.streams)
        stream = shard.streams[GROUP, two.member_id]
        network, me = cluster.network, NodeId(cluster.coordinator(GROUP))
        others = [NodeId(broker) for broker in BROKERS if broker != me]
        stalled: list[bool] = []

        def notify_while_replicas_are_cut_off() -> None:
            if not stalled:
                for other in others:
                    network.block(me, other)
            stalled.append(True)
            type(stream).notify(stream)

        stream.notify = notify_while_replicas_are_cut_off  # type: ignore[method-assign]
        cluster.until(lambda: bool(stalled))
        cluster.world.run_for(2 * timeout_ms / 1000)
        for other in others:
            network.unblock(me, other)
        assert not two.owned, "nothing was given to it yet"
        cluster.until(lambda: len(two.owned) == 1)
        assert shard.streams[GROUP, two.member_id] is stream, "on the stream that it had"


def test_a_second_stream_of_a_member_ends_the_first() -> None:
    with GroupCluster(seed=32, orders=2) as cluster:
        shard = cluster.shard(GROUP)

        async def join(found: RunningBroker) -> None:
            first, second = [asyncio.Queue[MemberHeartbeat]() for _ in range(2)]
            answers = asyncio.Queue[object]()
            calls = [
                asyncio.ensure_future(found.groups.membership(INTERNAL, asked.get, answers.put))
                for asked in (first, second)
            ]
            first.put_nowait(MemberHeartbeat(group=GROUP, member_id="m", member_epoch=0, topics=("orders",)))
            joined = await answers.get()
            epoch = getattr(joined, "member_epoch", 0)
            assert epoch > 0, joined
            stream = shard.streams[GROUP, "m"]
            second.put_nowait(MemberHeartbeat(group=GROUP, member_id="m", member_epoch=epoch))
            async with asyncio.timeout(10):
                await asyncio.wait([calls[0]])
            assert shard.streams[GROUP, "m"] is not stream
            assert not calls[1].done()
            assert is_member(shard, "m"), "it has not left"
            calls[1].cancel()
            await asyncio.wait([calls[1]])

        cluster.on_broker(cluster.coordinator(GROUP), join)
