"""Request memory of the API servers: which requests enter, which wait, and that nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.async_tests import inside

from tidelog.model.errors import CallTimeoutError, OverloadedError, RecordTooLargeError
from tidelog.rpc.grpc.methods import method_named
from tidelog.rpc.grpc.server import GrpcServer
from tidelog.services.limits import RequestLimits, RequestMemory, ResponseMemory


def limits(bytes_max: int, *, wait_ms: int = 10_000, **more: int) -> RequestLimits:
    return RequestLimits(request_bytes_max=bytes_max, request_wait_ms=wait_ms, **more)


def run(job: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await job()

    asyncio.run(main())


@inside(run)
async def test_requests_wait_while_the_memory_is_full_and_enter_in_order() -> None:
    memory = RequestMemory(limits(100))
    first = await memory.enter()
    first.count(150)  # one message may be larger than what is left: its size is known only when it is read
    entered: list[int] = []

    async def enter(number: int) -> None:
        held = await memory.enter()
        entered.append(number)
        held.count(60)
        await asyncio.sleep(0)
        held.leave()

    tasks = [asyncio.create_task(enter(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert memory.waiting == 5
    assert entered == []
    first.leave()
    first.leave()
    await asyncio.gather(*tasks)
    assert entered == [0, 1, 2, 3, 4]
    assert (memory.used, memory.waiting) == (0, 0)


@inside(run)
async def test_who_waits_too_long_is_refused_and_the_patient_one_is_not() -> None:
    memory = RequestMemory(limits(100, wait_ms=20))
    first = await memory.enter()
    first.count(100)
    patient = asyncio.create_task(memory.enter_stream())
    with pytest.raises(OverloadedError, match=r"queued\.max\.request\.bytes is 100"):
        await memory.enter()
    assert (memory.rejected, memory.waiting) == (1, 0)
    assert not patient.done()
    first.leave()
    (await patient).leave()
    assert (memory.used, memory.waiting) == (0, 0)


@inside(run)
async def test_one_that_is_cancelled_in_line_or_at_its_turn_holds_up_nobody() -> None:
    memory = RequestMemory(limits(10))
    first = await memory.enter()
    first.count(10)
    in_line, at_turn, last = (asyncio.create_task(memory.enter()) for _ in range(3))
    await asyncio.sleep(0)
    in_line.cancel()
    await asyncio.sleep(0)
    assert memory.waiting == 2
    first.leave()  # the turn of `at_turn` has come, and it is cancelled before it runs
    at_turn.cancel()
    (await last).leave()
    assert at_turn.cancelled()
    assert (memory.used, memory.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_memory_is_empty_in_the_end_and_was_never_far_over(seed: int) -> None:
    async def job() -> None:
        random = Random(seed)
        memory = RequestMemory(limits(1_000, wait_ms=50, reading_max=4))
        most = refused = 0

        async def request() -> None:
            nonlocal most, refused
            try:
                held = await memory.enter()
            except OverloadedError:
                refused += 1
                return
            try:
                await held.read(asyncio.sleep(random.random() * 0.01), 1_000)
                assert memory.reading <= 4
                held.count(random.randrange(1, 300))
                most = max(most, memory.used)
                await asyncio.sleep(random.random() * 0.01)
            finally:
                held.leave()

        tasks = [asyncio.create_task(request()) for _ in range(300)]
        for task in tasks[::7]:
            await asyncio.sleep(0)
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
        assert (memory.used, memory.waiting, memory.reading, memory.rejected) == (0, 0, 0, refused)
        assert 300 < most < 1_000 + 4 * 300

    run(job)


@inside(run)
async def test_only_so_many_are_read_at_once_and_a_slow_sender_gives_way_to_those_who_wait() -> None:
    memory = RequestMemory(limits(1_000, reading_max=2, slow_read_ms=50))
    slow = [await memory.enter(), await memory.enter()]
    reads = [asyncio.create_task(held.read(asyncio.sleep(99, b""), 10_000)) for held in slow]
    await asyncio.sleep(0.2)
    assert not any(read.done() for read in reads), "while nobody waits it may take its time"

    async def quick() -> None:
        held = await memory.enter()
        assert await held.read(asyncio.sleep(0, b"x"), 1_000) == b"x"
        held.leave()

    waiting = asyncio.create_task(quick())
    with pytest.raises(OverloadedError, match="too slowly"):
        await reads[0]
    slow[0].leave()
    await waiting
    assert not reads[1].done()
    reads[1].cancel()
    slow[1].leave()
    assert (memory.reading, memory.waiting) == (0, 0)


@inside(run)
async def test_a_message_that_never_comes_is_given_up() -> None:
    memory = RequestMemory(limits(1_000))
    held = await memory.enter()
    never: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    with pytest.raises(CallTimeoutError, match="did not arrive in 20 ms"):
        await held.read(never, 20)
    held.leave()
    assert memory.reading == 0


def test_fetches_shrink_as_responses_pile_up_but_never_to_nothing() -> None:
    memory = ResponseMemory(RequestLimits(response_bytes_max=1_000, fetch_bytes_min=50))
    assert [memory.take(asked) for asked in (600, 300, 10_000)] == [600, 300, 100]
    assert memory.used == 1_000
    assert [memory.take(asked) for asked in (20, 10_000)] == [20, 50]
    memory.give_back(800)
    assert memory.used == 270
    memory.give_back(-900)
    assert memory.take(300) == 50, "a batch was larger than what was taken for it"


def test_a_fetch_asks_for_no_more_than_the_server_gives() -> None:
    limits = RequestLimits(fetch_bytes_max=800)
    assert [limits.fetch_bytes(asked) for asked in (0, -1, 300, 10_000)] == [800, 800, 300, 800]


def test_a_message_is_at_most_as_large_as_the_limit() -> None:
    bounds = RequestLimits(message_bytes_max=7)
    bounds.check_message(7)
    with pytest.raises(RecordTooLargeError, match="8 bytes is over this node's limit of 7"):
        bounds.check_message(8)


@inside(run)
async def test_a_message_that_arrives_after_its_stream_has_ended_is_not_counted() -> None:
    """The reader of a member's stream goes on reading until the connection is gone."""
    sent = asyncio.Event()
    reading: list[asyncio.Task[object]] = []

    async def read() -> bytes:
        await sent.wait()
        return method.request(group="g").SerializeToString()

    async def membership(receive: Callable[[], Awaitable[object]], _context: object, _send: object) -> None:
        reading.append(asyncio.ensure_future(receive()))
        await asyncio.sleep(0)

    method = method_named("Groups", "Membership")
    handlers = SimpleNamespace(handler=lambda _method: membership)
    server = GrpcServer(cast("Any", handlers), [], RequestLimits())
    context = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1", time_remaining=lambda: None, read=read)
    await server._stream(method, "GRPC")(None, context)
    sent.set()
    await reading[0]
    assert server.memory.used == 0


@inside(run)
async def test_a_message_whose_time_is_over_is_not_evicted_as_well() -> None:
    memory = RequestMemory(limits(100, wait_ms=10_000, reading_max=1, slow_read_ms=1, slow_read_min_ms=1))
    slow = await memory.enter()
    is_ending = asyncio.Event()

    async def message() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            is_ending.set()
            await asyncio.sleep(0.01)  # the connection is closed

    reading = asyncio.create_task(slow.read(message(), 1))
    await is_ending.wait()
    slow.evict(asyncio.get_running_loop().time(), 0)
    with pytest.raises(CallTimeoutError):
        await reading
    slow.leave()
    assert (memory.used, memory.reading) == (0, 0)
