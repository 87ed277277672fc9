"""What a client may cost: requests and bytes at once, time, connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
from support.async_tests import uvloop_test
from support.kafka.server import (
    HEARTBEATS,
    Held,
    KafkaClient,
    RunningKafkaServer,
    frame,
    heartbeat,
    kafka_server,
    on_uvloop,
    produce,
    soon,
)

from tidelog.model.errors import TransportError
from tidelog.rpc.kafka import listener
from tidelog.rpc.kafka.connection import READ_BYTES_FULL, WRITE_HIGH_BYTES, Connection
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.listener import KafkaServer, Listener
from tidelog.rpc.kafka.messages import FETCH
from tidelog.rpc.kafka.messages.data import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from tidelog.rpc.kafka.services import ConnectionMemory, Context, DeferredResponse
from tidelog.rpc.kafka.shared import SocketLimits
from tidelog.rpc.kafka.sockets import Sockets
from tidelog.services.limits import RequestLimits, RequestMemory, ResponseMemory

MIB = 1 << 20


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CHECK_S", 0.01)


async def send_all(client: KafkaClient, data: bytes) -> None:
    client.writer.write(data)
    await client.writer.drain()


# Requests.


@pytest.mark.requirement("a:C-19")
@uvloop_test
async def test_a_connection_with_many_unanswered_requests_is_not_read() -> None:
    held = Held()
    async with kafka_server(held.entries, sockets=SocketLimits(requests_max=4)) as kafka:
        client = await kafka.client()
        # Each is larger than what is read at once, so that none comes along with another one.
        count, size = 40, 300_000
        sending = asyncio.ensure_future(send_all(client, b"".join(produce(number, size) for number in range(count))))
        await soon(lambda: len(held.begun) >= 4, "four are begun")
        await asyncio.sleep(0.1)
        assert held.begun == [0, 1, 2, 3]
        assert kafka.shared.requests.used < 6 * size, "the rest is with its sender"
        assert not sending.done()
        held.go.set()
        for number in range(count):
            assert int.from_bytes((await client.answer())[:4], "big") == number
        await sending
        assert held.begun == list(range(count))


@pytest.mark.requirement("a:C-19")
@uvloop_test
async def test_bytes_of_requests_are_limited_over_all_connections() -> None:
    held = Held()
    limits = RequestLimits(request_bytes_max=2 * MIB)
    async with kafka_server(held.entries, limits=limits) as kafka:
        clients = [await kafka.client() for _ in range(20)]
        sending = [
            asyncio.ensure_future(send_all(client, b"".join(produce(at, 200_000) for at in range(5))))
            for client in clients
        ]
        memory = kafka.shared.requests
        await soon(lambda: not memory.has_room and memory.waiting > 0, "it is full")
        most = 0
        for _ in range(20):
            await asyncio.sleep(0.005)
            most = max(most, memory.used)
        assert most < 2 * MIB + 210_000, "at most one request past the limit"
        held.go.set()
        for client in clients:
            for number in range(5):
                assert int.from_bytes((await client.answer())[:4], "big") == number
        await asyncio.gather(*sending)
        assert memory.used == 0


@uvloop_test
async def test_without_room_little_is_read_ahead() -> None:
    held = Held()
    async with kafka_server(held.entries, limits=RequestLimits(request_bytes_max=MIB)) as kafka:
        first = await kafka.client()
        await send_all(first, produce(0, 2 * MIB))
        await soon(lambda: held.begun == [0], "the memory is full")
        others = [await kafka.client() for _ in range(10)]
        for client in others:
            await send_all(client, heartbeat(7) * 2_000)
        await soon(lambda: kafka.shared.requests.waiting == 10, "all of them wait")
        read = [one._framing.left for one in kafka.server._connections]
        assert max(read) <= READ_BYTES_FULL
        held.go.set()
        await first.answer()
        for client in others:
            for _ in range(2_000):
                await client.answer()


@pytest.mark.parametrize("size", [-1, 0, 7, 100_001, 0x7FFFFFFF, -0x80000000])
def test_a_size_that_cannot_be_ends_the_connection(size: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with kafka_server(HEARTBEATS, limits=RequestLimits(message_bytes_max=100_000)) as kafka:
            client = await kafka.client()
            client.writer.write(heartbeat(1) + size.to_bytes(4, "big", signed=True) + bytes(16) + heartbeat(2))
            assert int.from_bytes((await client.answer())[:4], "big") == 1
            assert await client.rest() == b""
            assert kafka.counts.malformed == 1

    with caplog.at_level(logging.WARNING):
        on_uvloop(main)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"a request of {size} bytes" in line
    assert "socket.request.max.bytes" in line


@uvloop_test
async def test_both_apis_share_the_request_memory() -> None:
    memory = RequestMemory(RequestLimits(request_bytes_max=100))
    calls: list[int] = []
    assert memory.take(70)
    assert memory.take(70), "one past the limit"
    assert not memory.take(1)
    memory.on_room(lambda: calls.append(memory.used) if memory.take(95) else None)
    memory.on_room(lambda: calls.append(-1) if memory.take(1) else None)
    over_grpc = asyncio.ensure_future(memory.enter("peer"))
    await asyncio.sleep(0)
    assert (memory.waiting, over_grpc.done(), calls) == (3, False, [])
    memory.give_back(70)
    held = await over_grpc
    assert calls == [165], "the next in line was called, and took the rest"
    held.count(50)
    assert memory.waiting == 1
    memory.give_back(95 + 70)
    assert calls == [165, -1]
    held.leave()
    assert memory.used == 1


# Time.


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("first", [b"\0", b"\0\0\0", (64 * 1024).to_bytes(4, "big") + b"\0\x0c\0\4" + bytes(100)])
@uvloop_test
async def test_a_request_that_does_not_arrive_ends_the_connection(first: bytes) -> None:
    async with kafka_server(HEARTBEATS, limits=RequestLimits(read_timeout_ms=300)) as kafka:
        fast, slow = await kafka.client(), await kafka.client()
        began = asyncio.get_running_loop().time()
        slow.writer.write(first)
        ended = asyncio.ensure_future(slow.rest())
        while not ended.done():
            fast.writer.write(heartbeat(1))
            await fast.answer()
            if not slow.writer.transport.is_closing() and len(first) > 4:
                slow.writer.write(b"x")  # a byte now and then does not help
            await asyncio.sleep(0.02)
        assert await ended == b""
        assert 0.25 < asyncio.get_running_loop().time() - began < 3
        assert kafka.counts.ended_slow == 1
        assert kafka.shared.requests.used == 0


@pytest.mark.usefixtures("looks_often")
def test_who_holds_room_and_sends_nothing_is_cut_off_when_others_wait(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        limits = RequestLimits(request_bytes_max=MIB, message_bytes_max=64 * MIB, slow_read_ms=100)
        async with kafka_server(HEARTBEATS, limits=limits) as kafka:
            liar, honest = await kafka.client(), await kafka.client()
            liar.writer.write((60 * MIB).to_bytes(4, "big") + b"\0\x0c\0\4" + bytes(100))
            await soon(lambda: not kafka.shared.requests.has_room, "it has taken all the room")
            honest.writer.write(heartbeat(5))
            assert int.from_bytes((await honest.answer())[:4], "big") == 5
            assert await liar.rest() == b""

    with caplog.at_level(logging.WARNING):
        on_uvloop(main)
    assert "of a request while others wait for memory" in caplog.text


@pytest.mark.usefixtures("looks_often")
@uvloop_test
async def test_an_idle_connection_is_closed_and_one_that_waits_for_an_answer_is_not() -> None:
    held = Held()
    async with kafka_server(held.entries, sockets=SocketLimits(idle_ms=200)) as kafka:
        idle, waiting = await kafka.client(), await kafka.client()
        idle.writer.write(heartbeat(1))
        await idle.answer()
        waiting.writer.write(produce(2))
        assert await idle.rest() == b""
        await asyncio.sleep(0.3)
        held.go.set()
        await waiting.answer()
        assert await waiting.rest() == b""
        assert (kafka.counts.ended_idle, kafka.counts.ended_slow) == (2, 0)


# Answers.


def fetching(size: int, asked: list[int] | None = None) -> Entry:
    """Answers of as many bytes as the connection may have, up to `size`, as a fetch has them."""
    stored = memoryview(bytes(size))

    async def handle(_request: FetchRequest, context: Context) -> FetchResponse:
        taken = context.memory.take(size)
        if asked is not None:
            asked.append(taken)
        try:
            row = PartitionData(partition_index=0, records=stored[:taken])
            return FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[row])])
        finally:
            context.memory.give_back(taken)

    return Entry(handle)


@pytest.mark.requirement("a:C-19")
@uvloop_test
async def test_answers_to_a_client_that_does_not_read_are_bounded() -> None:
    asked: list[int] = []
    size = 4 * MIB
    async with kafka_server({FETCH.key: fetching(size, asked), **HEARTBEATS}) as kafka:
        client = await kafka.client(limit=1 << 16)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        count = 100
        client.writer.write(b"".join(frame(FETCH, 11, number, FetchRequest()) for number in range(count)))
        await soon(lambda: kafka.shared.responses.used > WRITE_HIGH_BYTES, "answers wait to be written")
        most = begun = 0
        for _ in range(30):
            await asyncio.sleep(0.01)
            most, begun = max(most, kafka.shared.responses.used), len(asked)
        assert most <= size + WRITE_HIGH_BYTES, f"{most} bytes of {begun} answers"
        assert begun < 10, "no more are begun than the kernel has taken, and one"
        healthy = await kafka.client()
        healthy.writer.write(heartbeat(1))
        await healthy.answer()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number in range(count):
            assert int.from_bytes((await client.answer())[:4], "big") == number
        await soon(lambda: kafka.shared.responses.used == 0, "all is given back")


@uvloop_test
async def test_a_connection_has_one_fetch_at_a_time() -> None:
    """Each may bring a batch of any size: the next is begun when the one before was written."""
    held, begun, go = Held(), [], asyncio.Event()

    async def handle(_request: FetchRequest, context: Context) -> DeferredResponse:
        async def answer() -> FetchResponse:
            begun.append(context.correlation_id)
            await go.wait()
            return FetchResponse()

        return DeferredResponse(answer)

    entries = {**held.entries, FETCH.key: Entry(handle, is_single=True)}
    async with kafka_server(entries) as kafka:
        client, other = await kafka.client(), await kafka.client()
        client.writer.write(frame(FETCH, 11, 1, FetchRequest()) + produce(2))
        client.writer.write(b"".join(frame(FETCH, 11, at, FetchRequest()) for at in range(3, 60)))
        other.writer.write(frame(FETCH, 11, 100, FetchRequest()))
        await soon(lambda: sorted(begun) == [1, 100] and held.begun == [2], "one of each, and the write between")
        held.go.set()
        await asyncio.sleep(0.05)
        assert sorted(begun) == [1, 100]
        go.set()
        for number in range(1, 60):
            assert int.from_bytes((await client.answer())[:4], "big") == number
        assert [at for at in begun if at != 100] == [1, *range(3, 60)]


@uvloop_test
async def test_what_a_fetch_has_read_is_counted_at_every_moment() -> None:
    """From the fetch to the connection: others that read in the same turn of the loop must know of it."""
    size = MIB
    used: list[int] = []

    async def handle(_request: FetchRequest, context: Context) -> DeferredResponse:
        taken = context.memory.take(size)

        async def answer() -> FetchResponse:
            row = PartitionData(partition_index=0, records=bytes(taken))
            return FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[row])])

        def leave() -> None:
            context.memory.give_back(taken)
            asyncio.get_running_loop().call_soon(lambda: used.append(kafka.shared.responses.used))

        return DeferredResponse(answer, leave)

    async with kafka_server({FETCH.key: Entry(handle, is_single=True)}) as kafka:
        client = await kafka.client()
        client.writer.write(frame(FETCH, 11, 1, FetchRequest()))
        await client.answer()
    assert used[0] >= size


@uvloop_test
async def test_a_request_that_is_given_up_is_not_kept_for_those_before_it() -> None:
    """What is not read any more is not counted either, so nobody may hold it."""
    held = Held()
    async with kafka_server(held.entries) as kafka:
        client = await kafka.client()
        whole = produce(3, 3 * MIB)
        client.writer.write(produce(1) + whole[: len(whole) // 2])
        await soon(lambda: kafka.shared.requests.used > 3 * MIB, "the second one arrives")
        (connection,) = kafka.server._connections
        closing = asyncio.create_task(kafka.server.close(grace_s=5))
        await soon(lambda: kafka.shared.requests.used < MIB, "it is given up")
        assert not connection._framing.is_incomplete
        held.go.set()
        await client.answer()
        await closing


@uvloop_test
async def test_nobody_comes_in_after_the_end() -> None:
    """One that the kernel had accepted before."""
    async with kafka_server(HEARTBEATS) as kafka:
        await kafka.server.close()
        late = Connection(kafka.shared, "KAFKA", kafka.server)
        late.host = "127.0.0.1"
        assert not kafka.server.enter(late)


@uvloop_test
async def test_answers_behind_a_slow_one_are_bounded() -> None:
    asked: list[int] = []
    held = Held()
    entries = {**held.entries, FETCH.key: fetching(MIB // 2, asked)}
    async with kafka_server(entries, sockets=SocketLimits(response_bytes_max=2 * MIB)) as kafka:
        client = await kafka.client()
        client.writer.write(produce(0) + b"".join(frame(FETCH, 11, at, FetchRequest()) for at in range(1, 50)))
        await soon(lambda: len(asked) >= 4, "some are ready")
        await asyncio.sleep(0.05)
        assert len(asked) == 4, "until more than 2 MiB wait"
        assert 2 * MIB < kafka.shared.responses.used < 3 * MIB
        held.go.set()
        for number in range(50):
            assert int.from_bytes((await client.answer())[:4], "big") == number


def test_a_connection_gets_less_to_fetch_as_its_answers_pile_up() -> None:
    limits = RequestLimits(fetch_bytes_max=1_000, fetch_bytes_min=100, response_bytes_max=10_000)
    responses = ResponseMemory(limits)
    memory, other = ConnectionMemory(responses, limits), ConnectionMemory(responses, limits)
    assert memory.take(700) == 700
    assert memory.take(700) == 300
    assert memory.take(700) == 100, "never nothing"
    assert other.take(5_000) == 1_000, "another connection has its own part"
    memory.give_back(1_100)
    memory.set_queued(950)
    assert memory.take(700) == 100
    memory.give_back(100)
    memory.set_queued(0)
    other.give_back(1_000)
    assert responses.used == 0


@pytest.mark.usefixtures("looks_often")
@uvloop_test
async def test_a_client_that_never_takes_its_answers_is_cut_off() -> None:
    sockets = SocketLimits(response_stall_ms=300)
    async with kafka_server({FETCH.key: fetching(8 * MIB)}, sockets=sockets) as kafka:
        client = await kafka.client(limit=1 << 16)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(frame(FETCH, 11, 1, FetchRequest()) * 3)
        await soon(lambda: kafka.counts.ended_slow == 1, "it is ended")
        await soon(kafka.holds_nothing, "and nothing of it is held")


# Connections.


def test_connections_are_limited_in_all_and_for_each_address(caplog: pytest.LogCaptureFixture) -> None:
    async def main(sockets: SocketLimits, why: str) -> None:
        async with kafka_server(HEARTBEATS, sockets=sockets) as kafka:
            inside = [await kafka.client() for _ in range(3)]
            await soon(lambda: len(kafka.server) == 3, "three are in")
            for _ in range(4):
                outside = await kafka.client()
                assert await outside.rest() == b""
            assert kafka.counts.rejected == 4
            for client in inside:
                client.writer.write(heartbeat(1))
                await client.answer()
            inside[0].writer.close()
            await soon(lambda: len(kafka.server) == 2, "one has left")
            again = await kafka.client()
            again.writer.write(heartbeat(2))
            await again.answer()
        assert [why in record.getMessage() for record in caplog.records] == [True], "one line"
        caplog.clear()

    with caplog.at_level(logging.WARNING):
        on_uvloop(lambda: main(SocketLimits(connections_max=3), "max.connections=3"))
        on_uvloop(lambda: main(SocketLimits(connections_per_ip_max=3), "max.connections.per.ip=3"))


@uvloop_test
async def test_sockets_have_the_options_that_were_asked_for() -> None:
    sockets = SocketLimits(send_buffer_bytes=50_000, receive_buffer_bytes=60_000)
    async with kafka_server(HEARTBEATS, sockets=sockets) as kafka:
        client = await kafka.client()
        client.writer.write(heartbeat(1))
        await client.answer()
        (connection,) = kafka.server._connections
        one = socket.socket(fileno=connection._transport.get_extra_info("socket").dup().detach())
        with one:
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 100_000, "Linux doubles it"
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 120_000


@uvloop_test
async def test_a_taken_port_is_named() -> None:
    async with kafka_server(HEARTBEATS) as kafka:
        listener = Listener(name="KAFKA", host="127.0.0.1", port=kafka.port)
        second = KafkaServer(kafka.shared, [listener], Sockets(kafka.shared.sockets))
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{kafka.port}: "):
            await second.start()


@uvloop_test
async def test_connections_that_come_and_go_leave_no_count_behind() -> None:
    async def one(kafka: RunningKafkaServer, at: int) -> None:
        client = await kafka.client()
        data = produce(at, 5_000) + heartbeat(at)
        client.writer.write(data[: len(data) - at % 3_000])
        if at % 2:
            await client.writer.drain()
            client.writer.transport.abort()
        else:
            client.writer.close()

    held: Any = Held()
    async with kafka_server(held.entries) as kafka:
        for start in range(0, 200, 20):
            await asyncio.gather(*(one(kafka, start + at) for at in range(20)))
        await soon(kafka.holds_nothing, "nothing is held")
        assert kafka.counts.accepted == 200
