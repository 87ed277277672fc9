"""A coordinator that loads offsets of a topic which its own metadata does not show: the topic may be new or deleted."""

from __future__ import annotations

import asyncio

from support.brokers.cluster import RunningBroker
from support.groups.cluster import BROKERS, GroupCluster
from support.metadata.quorum import CONTROLLERS
from test_shell_shards import eventually, others, release_all

from tidelog.coordinator.hashing import partition_for
from tidelog.coordinator.partition_shard import Phase
from tidelog.coordinator.records import GroupRecord, OffsetValue, decision, encode_batch, offset_key
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.rpc.v1 import admin_pb2


def block_controllers(cluster: GroupCluster, broker: int) -> None:
    for controller in CONTROLLERS:
        cluster.network.block(controller, NodeId(broker))
        cluster.network.block(NodeId(broker), controller)


def test_coordinator_keeps_offsets_of_a_topic_that_it_does_not_know_yet() -> None:
    """A coordinator that has lost its partition may see newer metadata before it stops: it commits an offset of a topic
    that the next coordinator has not heard of when it loads. Here that record is written by hand."""
    with GroupCluster(seed=31, orders=2) as cluster:
        cluster.commit("billing", {("orders", 0): 5})
        former = cluster.coordinator("billing")
        held = [cluster.brokers[NodeId(broker)].coordinator for broker in others(former)]
        for coordinator in held:
            coordinator.load_slots = asyncio.Semaphore(0)
        cluster.kill(NodeId(former))
        eventually(cluster, lambda: cluster.coordinator("billing") != former)
        leader = cluster.coordinator("billing")
        number = partition_for("billing", 3)
        shard = cluster.brokers[NodeId(leader)].coordinator.shards[number]
        assert shard.phase is Phase.LOADING
        cluster.until(lambda: shard.leader.state.is_confirmed)
        block_controllers(cluster, leader)
        (other,) = {*BROKERS} - {former, leader}
        request = admin_pb2.CreateTopicsRequest(topics=[admin_pb2.NewTopic(name="late", partitions=1)])
        cluster.api(other, "Admin", "CreateTopics", request)
        cluster.until(lambda: "late" in cluster.brokers[NodeId(other)].tail.image.topic_ids)
        late = TopicId(cluster.brokers[NodeId(other)].tail.image.topic_ids["late"])
        assert late not in cluster.brokers[NodeId(leader)].tail.image.topics
        value = OffsetValue(offset=7, commit_ms=cluster.brokers[NodeId(leader)].node.clock.now_ms())
        record = GroupRecord(offset_key("billing", PartitionId(late, 0)), value)

        async def append(_: RunningBroker) -> None:
            shard.leader.append(encode_batch([decision([record], now_ms=1)]), is_coordinator=True)

        cluster.on_broker(leader, append)
        release_all(cluster, [coordinator for coordinator in held if coordinator.me == leader])
        cluster.until(lambda: shard.phase is Phase.LEADING)

        def offset_of_late() -> int | None:
            group = shard.state.group("billing")
            found = None if group is None else group.offsets.get(PartitionId(late, 0))
            return None if found is None else found.offset

        cluster.world.run_for(1)
        assert offset_of_late() == 7, "its metadata is behind: nothing is known of that topic"
        cluster.network.heal()
        cluster.until(lambda: late in cluster.brokers[NodeId(leader)].tail.image.topics)
        cluster.world.run_for(5)
        release_all(cluster, held)
        assert cluster.committed("billing") == {("orders", 0): 5, ("late", 0): 7}
        cluster.api(leader, "Admin", "DeleteTopics", admin_pb2.DeleteTopicsRequest(topics=["late"]))
        eventually(cluster, lambda: cluster.committed("billing") == {("orders", 0): 5})


def test_offsets_of_a_deleted_topic_go_once_a_controller_can_be_asked() -> None:
    with GroupCluster(seed=32, orders=2) as cluster:
        cluster.topic("others", (11, 12, 13))
        cluster.commit("billing", {("orders", 0): 5, ("others", 0): 7})
        former = cluster.coordinator("billing")
        held = [cluster.brokers[NodeId(broker)].coordinator for broker in others(former)]
        for coordinator in held:
            coordinator.load_slots = asyncio.Semaphore(0)
        cluster.kill(NodeId(former))
        eventually(cluster, lambda: cluster.coordinator("billing") != former)
        leader = cluster.coordinator("billing")
        cluster.api(leader, "Admin", "DeleteTopics", admin_pb2.DeleteTopicsRequest(topics=["others"]))
        cluster.until(lambda: all("others" not in found.tail.image.topic_ids for found in cluster.brokers.values()))
        block_controllers(cluster, leader)
        shard = cluster.brokers[NodeId(leader)].coordinator.shards[partition_for("billing", 3)]
        release_all(cluster, [coordinator for coordinator in held if coordinator.me == leader])
        cluster.until(lambda: shard.phase is Phase.LEADING)
        cluster.world.run_for(1)
        group = shard.state.group("billing")
        assert group is not None
        assert len(group.offsets) == 2, "no controller has said that the topic is deleted"
        cluster.network.heal()
        release_all(cluster, held)
        eventually(cluster, lambda: cluster.committed("billing") == {("orders", 0): 5})
