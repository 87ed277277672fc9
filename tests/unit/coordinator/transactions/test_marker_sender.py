"""The sender of markers while the metadata changes under it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any
from uuid import UUID

from support.async_tests import asyncio_test

from tidelog.coordinator.transactions.marker_sender import EndingTransaction, MarkerSender
from tidelog.coordinator.transactions.queries import markers_count, markers_to_write
from tidelog.coordinator.transactions.records import Member, Status, Transaction
from tidelog.metadata.image import ClusterImage, Partition, Topic
from tidelog.model.ids import NodeId, PartitionId, TopicId
from tidelog.model.maps import Map
from tidelog.replication.tasks import ReplicaTasks
from tidelog.replication.transaction_messages import MarkedPartition, Marker, MarkersWritten, WriteMarkers

ME = NodeId(11)
TURN_S = 0.02


def image_of(topics: dict[int, int], *, leader: int = ME) -> ClusterImage:
    """Topics by the number of their id, with that many partitions, all led by one broker."""
    one = Partition(replicas=(11,), directories=(), isr=(11,), leader=leader, leader_epoch=0, partition_epoch=0)
    return ClusterImage(
        topics=Map(
            {
                UUID(int=topic): Topic(UUID(int=topic), f"t{topic}", Map(dict.fromkeys(range(count), one)))
                for topic, count in topics.items()
            }
        )
    )


class OwnTransport:
    me = ME


class Marked:
    """A sender on a broker that leads every partition, and the controller's word on deleted topics."""

    def __init__(self, topics: dict[int, int], *, transport: OwnTransport | None = None) -> None:
        self.image = image_of(topics)
        self.crashes: list[BaseException] = []
        self.requests: list[WriteMarkers] = []
        self.written: list[EndingTransaction] = []
        self.changed = asyncio.Event()
        self.spawned: list[asyncio.Task[None]] = []
        self.tasks = ReplicaTasks(ME, self.crashed)
        self.sender = MarkerSender(
            transport=transport or OwnTransport(),  # type: ignore[arg-type]
            receiver=self,
            image=lambda: self.image,
            spawn=self.spawn,
            deleted_topics=self.deleted_topics,
            random=Random(1),
        )

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        self.spawned.append(self.tasks.spawn(work, name=name))
        return self.spawned[-1]

    def crashed(self, error: BaseException) -> None:
        self.crashes.append(error)
        self.changed.set()

    def end_written(self, ending: EndingTransaction) -> None:
        self.written.append(ending)
        self.changed.set()

    async def write_markers(self, request: WriteMarkers) -> MarkersWritten:
        self.requests.append(request)
        return MarkersWritten(errors=tuple((None,) * len(marker.partitions) for marker in request.markers))

    async def deleted_topics(self, topics: Sequence[TopicId]) -> list[TopicId]:
        return [topic for topic in topics if UUID(int=topic.int) not in self.image.topics]

    def end(self, topic: int, partitions: range) -> EndingTransaction:
        ending = EndingTransaction("app", 1, self.end_written, begun_s=0.0)
        marker = Marker(
            transactional_id="app",
            producer_id=7,
            epoch=1,
            coordinator_epoch=0,
            is_commit=True,
            is_strict=True,
            number=1,
            partitions=tuple(MarkedPartition(UUID(int=topic), number, -1) for number in partitions),
        )
        self.sender.begin(ending, [marker], len(partitions))
        return ending

    async def until_written(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.written) < count and not self.crashes:
                self.changed.clear()
                await self.changed.wait()
            await asyncio.wait(self.spawned)  # nothing is left to send
        assert self.crashes == []


@asyncio_test
async def test_a_topic_that_is_deleted_right_before_its_markers_are_sent_ends_its_transaction() -> None:
    marked = Marked({1: 3, 2: 3})
    ending = marked.end(1, range(3))
    await asyncio.sleep(0)
    assert len(marked.tasks) == 1, "the entries of a call are taken, and the call has not begun"
    assert marked.requests == []
    marked.image = image_of({2: 3})
    marked.sender.metadata_changed()
    await marked.until_written(1)
    assert marked.written == [ending]


@asyncio_test
async def test_a_deleted_topic_of_thousands_of_partitions_ends_its_transactions() -> None:
    marked = Marked({})
    endings = [marked.end(1, range(first, first + 2_500)) for first in range(0, 10_000, 2_500)]
    await marked.until_written(len(endings))
    assert marked.requests == []


@asyncio_test
async def test_markers_of_10_000_members_are_made_in_short_turns() -> None:
    marked = Marked({1: 10_000})
    members = tuple(
        Member(100 + number, f"task-{number}", frozenset([PartitionId(TopicId(UUID(int=1)), number)]))
        for number in range(10_000)
    )
    transaction = Transaction(producer_id=7, status=int(Status.PREPARE_COMMIT), number=1, members=members)
    ending = EndingTransaction("app", 1, marked.end_written, begun_s=0.0)
    markers = markers_to_write("app", transaction, coordinator_epoch=0)
    began = time.thread_time()
    marked.sender.begin(ending, markers, markers_count(transaction))
    assert time.thread_time() - began < TURN_S
    turns: list[float] = []
    while len(marked.spawned) == 1:
        began = time.thread_time()
        await asyncio.sleep(0)
        turns.append(time.thread_time() - began)
    assert max(turns) < TURN_S
    await marked.until_written(1)
    assert sum(len(marker.partitions) for request in marked.requests for marker in request.markers) == 10_000
    assert marked.sender.waiting == 0


class SilentTransport(OwnTransport):
    """Brokers do not answer, and a call takes some turns of the event loop to end."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        self.called.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
        return b""


@asyncio_test
async def test_metadata_changes_while_a_call_to_a_fenced_broker_ends() -> None:
    silent = SilentTransport()
    marked = Marked({1: 3}, transport=silent)
    mine = marked.image
    marked.image = image_of({1: 3}, leader=12)
    ending = marked.end(1, range(3))
    await silent.called.wait()
    for _ in range(4):  # broker 12 is not in the image
        marked.sender.metadata_changed()
        await asyncio.sleep(0)
    marked.image = mine
    marked.sender.metadata_changed()
    await marked.until_written(1)
    assert marked.written == [ending]
