"""Requests out of bytes: however they are cut, in whatever order room is found for them."""

from __future__ import annotations

import random

import pytest
from support.async_tests import uvloop_test
from support.kafka.server import KafkaClient, api_versions, heartbeat, kafka_server

from tidelog.rpc.kafka import framing
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.framing import FIRST_BYTES, Framing
from tidelog.rpc.kafka.messages import HEARTBEAT
from tidelog.rpc.kafka.messages.groups import HeartbeatResponse
from tidelog.rpc.kafka.services import Context


def feed(machine: Framing, data: bytes, most: int) -> list[bytes]:
    """The requests that these bytes complete; a read takes what it is given, as a socket does."""
    found = []
    while data:
        place = machine.buffer(most)
        count = min(len(place), len(data))
        place[:count] = data[:count]
        data = data[count:]
        whole = machine.received(count)
        if whole is not None:
            found.append(bytes(whole))
        while (size := machine.next_size()) is not None:
            whole = machine.accept(size)
            if whole is None:
                break
            found.append(bytes(whole))
        machine.keep()
    return found


def framed(requests: list[bytes]) -> bytes:
    return b"".join(len(request).to_bytes(4, "big") + request for request in requests)


def test_requests_are_found_whatever_the_sizes_of_reads() -> None:
    draw = random.Random(7)
    requests = [draw.randbytes(draw.choice((0, 1, 9, 200, 5_000))) for _ in range(200)]
    data = framed(requests)
    for most in (1, 2, 3, 4, 5, 7, 64, 4_096, 1 << 16):
        assert feed(Framing(memoryview(bytearray(1 << 16))), data, most) == requests


def test_two_requests_cut_at_every_pair_of_places() -> None:
    requests = [b"first", b"the second"]
    data = framed(requests)
    for one in range(len(data) + 1):
        for two in range(one, len(data) + 1):
            machine = Framing(memoryview(bytearray(64)))
            found = [whole for part in (data[:one], data[one:two], data[two:]) for whole in feed(machine, part, 64)]
            assert found == requests
            assert not machine.is_incomplete


def test_the_memory_of_a_request_grows_with_what_has_come_of_it() -> None:
    size = 5 * FIRST_BYTES + 3
    shared = memoryview(bytearray(1 << 16))
    machine = Framing(shared)
    assert feed(machine, size.to_bytes(4, "big") + b"begin", 1 << 16) == []
    assert (machine.missing, machine.arrived) == (size - 5, 5)
    assert len(machine.buffer(1)) == FIRST_BYTES - 5, "not what its sender says, but what has come"
    content = random.Random(3).randbytes(size - 5)
    assert feed(machine, content, 1 << 16) == [b"begin" + content]
    assert not machine.is_incomplete


def test_what_has_no_room_is_kept_apart_from_what_others_read() -> None:
    shared = memoryview(bytearray(64))
    one, other = Framing(shared), Framing(shared)
    data = framed([b"one has to wait"])
    one.buffer(64)[: len(data)] = data
    one.received(len(data))
    one.keep()
    assert feed(other, framed([b"x" * 40]), 64) == [b"x" * 40]
    size = one.next_size()
    assert size is not None
    assert one.accept(size) == b"one has to wait"


def test_a_small_request_is_bytes_of_its_own_and_a_large_one_a_view() -> None:
    machine = Framing(memoryview(bytearray(1 << 20)))
    machine.buffer(1 << 20)[:104] = framed([bytes(100)])
    machine.received(104)
    assert type(machine.accept(100)) is bytes
    size = framing.SMALL_BYTES + 1
    machine.keep()
    place = machine.buffer(1 << 20)
    place[:4] = size.to_bytes(4, "big")
    machine.received(4)
    assert machine.accept(size) is None
    whole = machine.received(len(machine.buffer(1)))
    assert isinstance(whole, memoryview)
    assert whole.readonly


def test_a_request_that_is_whole_is_nobodys_but_its_takers() -> None:
    """What is answered is counted no longer: the connection must not hold it until its next request."""
    machine = Framing(memoryview(bytearray(64)))
    size = framing.SMALL_BYTES + 1
    (whole,) = _views(machine, size.to_bytes(4, "big") + bytes(size))
    frame = whole.obj
    assert isinstance(frame, bytearray)
    whole.release()
    frame.clear()  # BufferError while anybody points into it


def test_what_is_given_up_is_let_go() -> None:
    machine = Framing(memoryview(bytearray(64)))
    assert feed(machine, (3 * FIRST_BYTES).to_bytes(4, "big") + bytes(FIRST_BYTES + 1), 64) == []
    assert machine.arrived == FIRST_BYTES + 1
    machine.clear()
    assert (machine.is_incomplete, machine.arrived, machine.left) == (False, 0, 0)
    machine.buffer(64)[:3] = b"abc"
    machine.received(3)
    machine.keep()
    machine.clear()
    assert (machine.is_incomplete, machine.left) == (False, 0)


def _views(machine: Framing, data: bytes) -> list[memoryview]:
    """As `feed`, of large requests: as they are given."""
    found: list[memoryview] = []
    while data:
        place = machine.buffer(64)
        count = min(len(place), len(data))
        place[:count] = data[:count]
        data = data[count:]
        del place
        whole = machine.received(count)
        if whole is not None:
            assert isinstance(whole, memoryview)
            found.append(whole)
        elif (size := machine.next_size()) is not None:
            assert machine.accept(size) is None
        machine.keep()
    return found


@pytest.mark.requirement("a:C-01")
@uvloop_test
async def test_a_connection_answers_requests_that_are_cut_at_every_byte() -> None:
    async def handle(_request: object, context: Context) -> HeartbeatResponse:
        return HeartbeatResponse(throttle_time_ms=context.correlation_id)

    async def one(client: KafkaClient, data: bytes, at: int, number: int) -> None:
        client.writer.write(data[:at])
        await client.writer.drain()
        client.writer.write(data[at:])
        assert (await client.response(HEARTBEAT, 4))[1].throttle_time_ms == number
        assert (await client.response(HEARTBEAT, 4))[1].throttle_time_ms == number + 1

    async with kafka_server({HEARTBEAT.key: Entry(handle)}) as kafka:
        client = await kafka.client()
        client.writer.write(api_versions(1))
        assert (await client.answer())[:4] == (1).to_bytes(4, "big")
        length = len(heartbeat(0) + heartbeat(1))
        for at in range(length + 1):
            number = 1_000 + 2 * at
            await one(client, heartbeat(number) + heartbeat(number + 1), min(at, length), number)
