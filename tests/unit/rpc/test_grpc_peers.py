"""Calls whose message does not come: they keep out nobody else, however many there are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from grpc import aio  # type: ignore[import-untyped]
from support.async_tests import asyncio_test
from support.grpc_api.nodes import GrpcCluster, until

from tidelog.model.errors import OverloadedError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.v1 import cluster_pb2
from tidelog.services.limits import RequestLimits, RequestMemory

LIMITS = RequestLimits(reading_max=4, peer_reading_max=2, request_wait_ms=10_000, slow_read_ms=200, slow_read_min_ms=20)


async def never(memory: RequestMemory, peer: str) -> None:
    """One half-open call after the other."""
    while True:
        try:
            held = await memory.enter(peer)
        except OverloadedError:
            continue
        try:
            await held.read(asyncio.get_running_loop().create_future(), 30_000)
        except OverloadedError:
            pass
        finally:
            held.leave()


@asyncio_test
async def test_a_connection_has_only_so_many_places_and_others_enter_at_once() -> None:
    memory = RequestMemory(LIMITS)
    half_open = [asyncio.create_task(never(memory, "a")) for _ in range(50)]
    await asyncio.sleep(0)
    assert (memory.reading, memory.waiting) == (2, 48)
    for _ in range(20):
        async with asyncio.timeout(0.1):
            held = await memory.enter("b")
        held.count(10)
        held.leave()
    for task in half_open:
        task.cancel()
    await asyncio.wait(half_open)
    assert (memory.reading, memory.waiting, memory.used) == (0, 0, 0)


@asyncio_test
async def test_connections_take_turns_and_the_line_moves_faster_the_longer_it_is() -> None:
    memory = RequestMemory(LIMITS)
    half_open = [asyncio.create_task(never(memory, f"a{number % 20}")) for number in range(200)]
    await asyncio.sleep(0)
    assert memory.reading == 4
    began = asyncio.get_running_loop().time()
    held = await memory.enter("b")
    took = asyncio.get_running_loop().time() - began
    held.leave()
    # 20 connections are before it, 4 places, each free again after some 20 ms: with 200 ms it would be a second.
    assert took < 0.6
    for task in half_open:
        task.cancel()
    await asyncio.wait(half_open)
    assert (memory.reading, memory.waiting, memory.used) == (0, 0, 0)


@asyncio_test
async def test_who_waits_for_a_place_of_its_own_connection_evicts_nobody_else() -> None:
    memory = RequestMemory(LIMITS)
    other = await memory.enter("b")
    reading = asyncio.create_task(other.read(asyncio.sleep(99, b""), 60_000))
    own = [await memory.enter("a") for _ in range(2)]
    reads = [asyncio.create_task(held.read(asyncio.sleep(99, b""), 60_000)) for held in own]
    waiting = asyncio.create_task(memory.enter("a"))
    with pytest.raises(OverloadedError, match="too slowly"):
        await reads[0]
    own[0].leave()
    (await waiting).leave()
    assert not reading.done()
    for task in (reading, reads[1]):
        task.cancel()
    for held in (other, own[1]):
        held.leave()
    assert (memory.reading, memory.waiting) == (0, 0)


@asyncio_test
async def test_half_open_calls_of_one_client_delay_no_other_client(tmp_path: Path) -> None:
    async with asyncio.timeout(60), GrpcCluster(tmp_path) as cluster:
        await cluster.start_controllers(1)
        node = await cluster.start_broker(11)
        path = method_named("Cluster", "Metadata").path
        async with aio.insecure_channel(f"127.0.0.1:{node.port()}") as channel:
            idle = [channel.stream_stream(path)() for _ in range(100)]
            reads = [asyncio.ensure_future(call.read()) for call in idle]
            memory = node.grpc_server.memory
            await until(lambda: memory.reading >= 4 and memory.waiting > 0)
            for _ in range(10):
                await cluster.call(11, "Cluster", "Metadata", cluster_pb2.MetadataRequest(), timeout_s=1)
            assert memory.reading <= 4
            for call in idle:
                call.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            await until(lambda: (memory.reading, memory.waiting) == (0, 0))
