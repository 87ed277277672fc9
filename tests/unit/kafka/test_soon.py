"""Answers that are waited for without a task, and partitions that are remembered by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.async_tests import uvloop_test
from support.brokers import data_requests
from support.brokers.cluster import ReplicationCluster, RunningBroker, batch
from support.kafka.data_api import BROKERS, DataWorld, produce_request
from support.kafka.server import kafka_server, nothing_produced, number_of, produce, soon

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.topics import DeleteTopics
from tidelog.model.errors import ErrorCode, OverloadedError, RecordsTruncatedError
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import PRODUCE
from tidelog.rpc.kafka.messages.data import ProduceRequest
from tidelog.rpc.kafka.produce import code_of_failure, handle
from tidelog.rpc.kafka.services import Context, DeferredResponse, TasklessResponse
from tidelog.services.authorization import AllowAll
from tidelog.services.data import DataServices
from tidelog.services.partition_lookup import PartitionLookup
from tidelog.services.produce import ProduceItem
from tidelog.services.services import BrokerServices


class Waits:
    """A handler whose answers are made when a test says so; no task may be needed for them."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], None]] = {}
        self.left: list[int] = []
        self.failing: dict[int, Exception] = {}

    async def produce(self, request: ProduceRequest, _context: Context) -> DeferredResponse:
        number = number_of(request)

        async def answer() -> object:
            raise AssertionError("it is waited for without a task")

        def make() -> object:
            if number in self.failing:
                raise self.failing[number]
            return nothing_produced()

        def on_done(call: Callable[[], None]) -> None:
            self.calls[number] = call

        return DeferredResponse(answer, lambda: self.left.append(number), TasklessResponse(on_done, make))

    @property
    def entries(self) -> dict[int, Entry]:
        return {PRODUCE.key: Entry(self.produce)}


async def numbers(client: Any, count: int) -> list[int]:
    return [int.from_bytes((await client.answer())[:4], "big", signed=True) for _ in range(count)]


@uvloop_test
async def test_answers_without_a_task_leave_in_order_and_each_is_left_once() -> None:
    waits = Waits()
    async with kafka_server(waits.entries) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1) + produce(2) + produce(3))
        await soon(lambda: len(waits.calls) == 3, "all are begun while the first one waits")
        for number in (3, 1, 2):
            waits.calls[number]()
        assert await numbers(client, 3) == [1, 2, 3]
    assert waits.left == [3, 1, 2]


@uvloop_test
async def test_what_is_not_answered_is_left_when_its_connection_ends() -> None:
    waits = Waits()
    async with kafka_server(waits.entries) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1) + produce(2))
        await soon(lambda: len(waits.calls) == 2, "both are begun")
        waits.calls[2]()
        client.writer.transport.abort()
        await soon(lambda: sorted(waits.left) == [1, 2], "both are left")
        waits.calls[1]()  # too late: nobody is answered, nothing is left twice
    assert sorted(waits.left) == [1, 2]


@uvloop_test
async def test_an_error_of_encoding_the_answer_closes_the_connection() -> None:
    waits = Waits()
    waits.failing[1] = OverloadedError("no room")
    async with kafka_server(waits.entries) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1))
        await soon(lambda: len(waits.calls) == 1, "it is begun")
        waits.calls[1]()
        assert await client.reader.read() == b""
    assert waits.left == [1]


# Whole brokers.


@pytest.fixture(scope="module")
def world() -> Iterator[DataWorld]:
    with ReplicationCluster(703, brokers=BROKERS) as cluster:
        yield DataWorld(cluster)


def test_a_produce_that_is_left_calls_nobody(world: DataWorld) -> None:
    where = world.topic("left")

    async def job(broker: RunningBroker) -> list[str]:
        reported: list[str] = []
        items = [ProduceItem(where, batch(b"x"))]
        first = await data_requests.start_produce(broker.service, items, acks=-1, timeout_ms=5_000)
        assert not first.is_done, "two followers have to store it"
        first.on_done(lambda: reported.append("first"))
        first.abandon()
        second = await data_requests.start_produce(broker.service, items, acks=-1, timeout_ms=5_000)
        is_over = asyncio.Event()

        def over() -> None:
            reported.append("second")
            is_over.set()

        second.on_done(over)
        assert reported == [], "never in the same turn"
        await is_over.wait()
        (result,) = second.results()
        assert (result.error, result.base_offset) == (None, 1)
        return reported

    assert world.cluster.on_broker(11, job) == ["second"]
    assert world.is_idle()


async def answer_late(
    world: DataWorld, broker: RunningBroker, request: ProduceRequest, version: int, image: ClusterImage
) -> Any:
    """With the metadata of a while ago."""
    context = world.context(broker, version)
    data = DataServices(broker.replicas)
    data.produce._lookup = PartitionLookup(lambda: image, AllowAll())
    context.services = cast(BrokerServices, SimpleNamespace(data=data, image=image))
    return await handle(request, context)


def test_what_was_cut_is_to_be_written_to_who_leads_now() -> None:
    """Kafka's brokers never fence a produce, and clients give a record up for it."""
    error = RecordsTruncatedError("the log was cut to offset 3")
    assert code_of_failure(error, 12) == ErrorCode.NOT_LEADER_OR_FOLLOWER.value.code


def test_a_topic_created_again_is_not_taken_for_the_remembered_one(world: DataWorld) -> None:
    former = world.topic("renewed")
    assert world.produce("renewed", batch(b"x")).error_code == 0
    broker = next(one for one in world.cluster.brokers.values())
    image = broker.tail.image

    async def delete(running: RunningBroker) -> None:
        await running.agent.ask(DeleteTopics(names=("renewed",)))

    world.cluster.on_broker(11, delete)
    world.cluster.until(lambda: all("renewed" not in b.tail.image.topic_ids for b in world.cluster.brokers.values()))
    for version, code in ((12, 3), (13, 100)):
        # A request that was under way: it has found the topic, whose replicas are gone by now.
        topic = "renewed" if version < 13 else former.topic_id.bytes
        request = produce_request((topic, 0, batch(b"x")))
        late = world.cluster.on_broker(11, partial(answer_late, world, request=request, version=version, image=image))
        assert late.responses[0].partition_responses[0].error_code == code
    gone = world.ask(PRODUCE, produce_request(("renewed", 0, batch(b"x"))), version=12)
    assert gone.responses[0].partition_responses[0].error_code == 3
    later = world.topic("renewed")
    assert later != former
    assert world.produce("renewed", batch(b"y")).base_offset == 0
