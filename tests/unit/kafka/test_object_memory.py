"""The objects that large requests become are bounded over all connections, not only their bytes."""

from __future__ import annotations

import asyncio

import pytest
from support.async_tests import uvloop_test
from support.kafka.server import HEARTBEATS, heartbeat, kafka_server, soon

from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import OFFSET_FETCH
from tidelog.rpc.kafka.messages.groups import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from tidelog.rpc.kafka.services import Context
from tidelog.rpc.kafka.slices import ObjectMemory

CLIENTS = 5


def large_request() -> OffsetFetchRequest:
    topics = [OffsetFetchRequestTopics(name=f"topic-{number}", partition_indexes=[0]) for number in range(3_000)]
    return OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=topics)])


@uvloop_test
async def test_requests_of_many_objects_wait_for_each_other_and_small_ones_do_not() -> None:
    begun: list[int] = []
    go = asyncio.Event()

    async def handle(_request: object, context: Context) -> OffsetFetchResponse:
        begun.append(context.correlation_id)
        await go.wait()
        return OffsetFetchResponse(groups=[])

    async with kafka_server({OFFSET_FETCH.key: Entry(handle), **HEARTBEATS}) as kafka:
        kafka.shared.objects = ObjectMemory(1 << 20)
        clients = [await kafka.client() for _ in range(CLIENTS)]
        for number, client in enumerate(clients, start=1):
            client.send(OFFSET_FETCH, 9, number, large_request())
        await soon(lambda: len(begun) == 1, "one is begun")
        other = await kafka.client()
        for number in range(20):
            other.writer.write(heartbeat(number))
            await other.answer()
        assert len(begun) == 1, "the objects of the others would be over the bound"
        assert kafka.shared.objects.used < 2 << 20
        clients[-1].writer.transport.abort()  # one that waits is gone
        go.set()
        for client in clients[:-1]:
            await client.answer()
        assert len(begun) == CLIENTS - 1
        await soon(lambda: kafka.shared.objects.used == 0, "all objects are given back")


@uvloop_test
async def test_object_memory_admits_in_order_and_forgets_a_waiter_that_is_cancelled() -> None:
    memory = ObjectMemory(10)
    await memory.reserve(50)  # one always has room
    waiting = [asyncio.ensure_future(memory.reserve(size)) for size in (6, 9, 4)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    waiting[1].cancel()
    memory.give_back(50)
    await asyncio.gather(waiting[0], waiting[2])
    assert memory.used == 10
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    late = asyncio.ensure_future(memory.reserve(3))
    await asyncio.sleep(0)
    memory.give_back(6)
    late.cancel()  # after it was admitted
    with pytest.raises(asyncio.CancelledError):
        await late
    assert memory.used == 4
    memory.give_back(4)
    assert memory.used == 0
