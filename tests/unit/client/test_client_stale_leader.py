"""Sequence errors of a leader that has been succeeded: the newer one is asked, and no record is failed for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message
from support.clients.cluster import BOOTSTRAP, ClientWorld, SimConnections, batch_of

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.config import ClientConfig
from tidelog.client.connections import Encodable, Exchange
from tidelog.client.metadata import LeaderInfo
from tidelog.client.producer.writer import Writer
from tidelog.model.errors import ErrorCode, OutOfOrderSequenceError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.errors import as_message
from tidelog.rpc.grpc.methods import Method
from tidelog.rpc.v1 import log_pb2 as pb

Answers = list[Callable[[pb.ProducedPartition], None]]


@pytest.fixture
def world() -> Iterator[ClientWorld]:
    with ClientWorld(7) as made:
        yield made


class _Tampered:
    """An exchange of which the next answers are changed on their way: the log has taken what they refuse."""

    def __init__(self, inner: Exchange, changes: Answers) -> None:
        self._inner = inner
        self._changes = changes

    async def send(self, request: Encodable) -> None:
        await self._inner.send(request)

    async def receive(self) -> Any:
        answer = await self._inner.receive()
        if isinstance(answer, pb.ProduceResponse) and self._changes:
            change = self._changes.pop(0)
            for row in answer.partitions:
                change(row)
        return answer

    def close(self) -> None:
        self._inner.close()


class _Connections(SimConnections):
    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.changes: Answers = []

    async def open(self, address: str, method: Method, request: Message | None = None) -> Exchange:
        return _Tampered(await super().open(address, method, request), self.changes)


def out_of_order(leader: int, epoch: int) -> Callable[[pb.ProducedPartition], None]:
    """What a broker says that leads, or believes to, in this epoch."""

    def change(row: pb.ProducedPartition) -> None:
        row.error.CopyFrom(as_message(OutOfOrderSequenceError("a gap before sequence 1")))
        row.base_offset, row.leader, row.leader_epoch = -1, leader, epoch

    return change


class _Run:
    """A topic with one record, and another leader elected after that."""

    def __init__(self, world: ClientWorld) -> None:
        self.connections = _Connections(world.transport)
        self.client = ClusterClient(
            BOOTSTRAP,
            self.connections,
            random=world.machine.random,
            clock=world.machine.clock,
            config=ClientConfig(),
        )
        self.writer = Writer(self.client)
        self.world = world

    def leader(self) -> LeaderInfo:
        found = self.client.leader(self.client.view.topics["orders"].partitions[0])
        assert found is not None
        return found

    async def begin(self) -> LeaderInfo:
        """Who leads first."""
        await AdminCore(self.client).create_topic("orders", partitions=1, replication_factor=3)
        await (await self.writer.send("orders", 0, batch_of(b"0")))
        return self.leader()

    async def end(self) -> None:
        await self.writer.close()
        await self.client.close()

    @property
    def resets(self) -> int:
        (queue,) = self.writer.sender.queues.values()
        return queue.resets


def failed_over(world: ClientWorld, check: Callable[[_Run, LeaderInfo], Any]) -> None:
    """`check` runs when another broker leads, in a newer epoch than the client knows."""
    run = _Run(world)
    first: list[LeaderInfo] = []

    async def before(_: Any) -> None:
        first.append(await run.begin())

    async def after(_: Any) -> None:
        await check(run, first[0])
        await run.end()

    world.world.run(world.machine, before, timeout=60)
    world.kill(NodeId(first[0].node))
    world.world.run_for(2.0)
    world.world.run(world.machine, after, timeout=120)


def test_a_leader_of_an_older_epoch_than_the_client_knows_is_not_believed(world: ClientWorld) -> None:
    async def check(run: _Run, old: LeaderInfo) -> None:
        await run.client.refresh("orders")
        assert run.leader().epoch > old.epoch
        run.connections.changes += [out_of_order(run.leader().node, old.epoch)] * 3
        done = await (await run.writer.send("orders", 0, batch_of(b"1")))
        assert not run.connections.changes, "all three were met"
        assert (done.base_offset, run.resets) == (1, 0), "stored once, under its first number"
        assert (await (await run.writer.send("orders", 0, batch_of(b"2")))).base_offset == 2

    failed_over(world, check)


def test_a_leader_that_was_succeeded_while_the_answer_was_on_its_way_is_not_believed(world: ClientWorld) -> None:
    run = _Run(world)

    async def job(_: Any) -> None:
        old = await run.begin()

        def overtaken(row: pb.ProducedPartition) -> None:
            out_of_order(old.node, old.epoch)(row)
            place = run.client.view.topics["orders"].partitions[0]
            # It has learned meanwhile: the same broker, elected again, leads in the next epoch.
            assert run.client.learn_leader(place, old.node, old.epoch + 1)

        run.connections.changes.append(overtaken)
        done = await (await run.writer.send("orders", 0, batch_of(b"1")))
        assert (done.base_offset, run.resets) == (1, 0)
        await run.end()

    world.world.run(world.machine, job, timeout=60)


def test_the_writer_asks_for_a_newer_leader_before_it_restarts_sequences(world: ClientWorld) -> None:
    async def check(run: _Run, old: LeaderInfo) -> None:
        now = run.leader()
        if now.epoch == old.epoch:  # the client does not know yet
            await run.client.refresh("orders")
            now = run.leader()
        # The answer is of the newest leader that the client knows; its view is set back, as if it had not asked.
        place = run.client.view.topics["orders"].partitions[0]

        def unaware(row: pb.ProducedPartition) -> None:
            out_of_order(now.node, now.epoch - 1)(row)
            run.client.view._leaders[place] = LeaderInfo(now.node, now.epoch - 1)

        run.connections.changes.append(unaware)
        done = await (await run.writer.send("orders", 0, batch_of(b"1")))
        assert (done.base_offset, run.resets) == (1, 0)

    failed_over(world, check)


def test_the_newest_leader_is_believed_and_the_partition_queue_renumbered(world: ClientWorld) -> None:
    run = _Run(world)

    async def job(_: Any) -> None:
        old = await run.begin()
        run.connections.changes.append(out_of_order(old.node, old.epoch))
        result = await run.writer.send("orders", 0, batch_of(b"1"))
        await result
        assert run.resets == 1
        assert run.writer.sender.last_error is not None
        assert run.writer.sender.last_error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        await run.end()

    world.world.run(world.machine, job, timeout=60)
