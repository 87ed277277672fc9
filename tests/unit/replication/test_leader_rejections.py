"""What a leader rejects: subscriptions of a former incarnation of a broker or of a newer epoch, and records of clients
for a topic that only coordinators write."""

from __future__ import annotations

import asyncio

import pytest
from support.brokers.cluster import ReplicationCluster, RunningBroker, batch

from tidelog.model.errors import InvalidTopicError, StreamClosedError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication.leader_stream import LeaderStream
from tidelog.replication.messages import Ended, Reason, Subscribe
from tidelog.replication.wire import decode_from_leader, encode
from tidelog.services.context import INTERNAL


class RecordingStream:
    """Implements `world.transport.Stream`: the follower sends a frame, and waits until it is closed."""

    def __init__(self, frame: bytes) -> None:
        self.peer = NodeId(12)
        self.received: list[bytes] = []
        self._frames = [frame]
        self._closed = asyncio.Event()

    async def send(self, data: bytes) -> None:
        self.received.append(bytes(data))

    async def receive(self) -> bytes:
        if self._frames:
            return self._frames.pop()
        await self._closed.wait()
        raise StreamClosedError("it was closed")

    def close(self) -> None:
        self._closed.set()


@pytest.mark.parametrize(
    ("broker_epochs_behind", "last_epoch_ahead", "reason"),
    [(0, 0, None), (1, 0, Reason.NOT_LEADER), (0, 5, Reason.NOT_LEADER)],
    ids=["of now", "of a former incarnation", "of a newer epoch"],
)
def test_a_leader_serves_only_the_incarnation_of_now_that_knows_no_newer_epoch(
    broker_epochs_behind: int, last_epoch_ahead: int, reason: Reason | None
) -> None:
    with ReplicationCluster(713, brokers=(11, 12)) as cluster:
        orders = cluster.topic("orders", [11, 12], configs={"min.insync.replicas": "1"})
        cluster.write(orders, b"0")
        cluster.until_equal(orders, 11, 12)
        cluster.kill(NodeId(12))
        cluster.until_in_sync(orders, 11)
        leader = cluster.leading(orders)
        assert not leader.subscriptions

        running = cluster.brokers[NodeId(11)]
        frame = encode(
            Subscribe(
                partition=orders,
                number=1,
                leader_epoch=leader.leader_epoch,
                broker_epoch=running.tail.image.brokers[12].broker_epoch - broker_epochs_behind,
                next_offset=1,
                last_epoch=leader.log.epochs.latest + last_epoch_ahead,
                durable_end=1,
                takes_gaps=True,
            )
        )
        stream = RecordingStream(frame)

        async def serve(found: RunningBroker) -> None:
            await LeaderStream(found.replicas.leader_streams, stream).run()

        running.node.spawn(serve(running))
        cluster.until(lambda: bool(stream.received) or 12 in leader.subscriptions)
        assert (12 in leader.subscriptions) == (reason is None)
        answers = [decode_from_leader(frame) for frame in stream.received]
        rejected = [] if reason is None else [Ended(number=1, reason=reason)]
        assert [answer for answer in answers if isinstance(answer, Ended)] == rejected


def test_only_coordinators_write_to_the_topic_of_their_offsets() -> None:
    with ReplicationCluster(714, brokers=(11,)) as cluster:
        cluster.on_broker(11, lambda found: found.groups.find_coordinators(INTERNAL, ["g"]))
        cluster.until(lambda: cluster.image().topic_named("__consumer_offsets") is not None)
        topic = cluster.image().topic_named("__consumer_offsets")
        assert topic is not None
        offsets = PartitionId(TopicId(topic.topic_id), 0)
        cluster.leader(offsets)
        end = cluster.log(11, offsets).end_offset
        assert isinstance(cluster.produce(11, offsets, batch(b"forged")).error, InvalidTopicError)
        assert cluster.log(11, offsets).end_offset == end
