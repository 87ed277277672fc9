"""Subscriptions that wait at a leader: what they cost, counted in lines of code that run, not in time."""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType
from typing import Any
from uuid import UUID

import pytest
from support.brokers.cluster import ReplicationCluster, RunningBroker

from tidelog.model.errors import InvalidRequestError, StreamClosedError
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.replication import leader_stream
from tidelog.replication.leader_stream import LeaderStream
from tidelog.replication.messages import Subscribe, Unsubscribe
from tidelog.replication.wire import encode


class FrameStream:
    """Implements `world.transport.Stream`: the follower sends these frames and closes."""

    def __init__(self, frames: list[bytes]) -> None:
        self.peer = NodeId(12)
        self._frames = deque(frames)

    async def send(self, data: bytes) -> None:
        del data

    async def receive(self) -> bytes:
        if not self._frames:
            raise StreamClosedError("all frames are sent")
        return self._frames.popleft()

    def close(self) -> None:
        self._frames.clear()


def subscribe(partition: int, number: int) -> Subscribe:
    """Of a topic that the leader has not heard of: the subscription waits."""
    return Subscribe(
        partition=PartitionId(TopicId(UUID(int=77)), partition),
        number=number,
        leader_epoch=1,
        broker_epoch=1,
        next_offset=0,
        last_epoch=-1,
        durable_end=0,
        takes_gaps=False,
    )


class LineCounter:
    """Counts the lines of `leader_stream` that run, comprehensions and loops with each of their turns."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == leader_stream.__file__ else None

    def _line(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        self.lines += event == "line"
        return self._line


def run_stream(frames: list[bytes]) -> int:
    """Lines that run in a leader that receives these frames."""
    counter = LineCounter()

    async def serve(found: RunningBroker) -> None:
        stream = LeaderStream(found.replicas.leader_streams, FrameStream(frames))
        before = sys.gettrace()
        sys.settrace(counter)
        try:
            await stream.run()
        finally:
            sys.settrace(before)

    with ReplicationCluster(711, brokers=(11,)) as cluster:
        cluster.on_broker(11, serve)
    return counter.lines


def test_unsubscribing_costs_the_same_however_many_subscriptions_wait() -> None:
    def lines_of(count: int) -> int:
        frames = [encode(subscribe(partition, partition + 1)) for partition in range(count)]
        frames += [encode(Unsubscribe(number=partition + 1)) for partition in reversed(range(count))]
        return run_stream(frames)

    few, many = lines_of(250), lines_of(1_000)
    assert few > 0
    assert many < 5 * few, "four times as many cost four times as much"


def test_a_later_subscription_of_a_partition_replaces_the_one_that_waits() -> None:
    """The older number unsubscribes nothing then."""
    stream = FrameStream(
        [
            encode(subscribe(0, 1)),
            encode(subscribe(0, 2)),
            encode(Unsubscribe(number=1)),
            encode(subscribe(1, 3)),
            encode(Unsubscribe(number=3)),
        ]
    )

    async def serve(found: RunningBroker) -> None:
        leader = LeaderStream(found.replicas.leader_streams, stream)
        await leader._receive_all()
        assert {partition.partition: asked.number for partition, asked in leader._parked.items()} == {0: 2}
        assert leader._parked_numbers == {2: subscribe(0, 2).partition}
        await leader.run()

    with ReplicationCluster(712, brokers=(11,)) as cluster:
        cluster.on_broker(11, serve)


def test_a_parked_subscription_is_decided_again_however_many_are_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is the metadata task, whose crash stops the node."""
    monkeypatch.setattr(leader_stream, "PARKED_MAX", 2)
    stream = FrameStream([encode(subscribe(0, 1)), encode(subscribe(1, 2))])

    async def serve(found: RunningBroker) -> None:
        leader = LeaderStream(found.replicas.leader_streams, stream)
        await leader._receive_all()
        for number in (0, 1):
            leader.retry(subscribe(number, 0).partition)
        assert len(leader._parked) == 2
        await leader.run()

    with ReplicationCluster(713, brokers=(11,)) as cluster:
        cluster.on_broker(11, serve)


def test_a_number_of_two_partitions_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="subscription 1 names two partitions"):
        run_stream([encode(subscribe(0, 1)), encode(subscribe(1, 1))])
