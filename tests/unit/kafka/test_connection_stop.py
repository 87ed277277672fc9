"""The clean stop of a Kafka listener: what has begun is answered, within its grace."""

from __future__ import annotations

import asyncio

import pytest
from support.async_tests import uvloop_test
from support.kafka.server import Held, heartbeat, kafka_server, produce, soon

from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.connection_state import State
from tidelog.rpc.kafka.entries import Entry
from tidelog.rpc.kafka.messages import HEARTBEAT, JOIN_GROUP
from tidelog.rpc.kafka.messages.groups import HeartbeatResponse, JoinGroupRequest, JoinGroupResponse
from tidelog.rpc.kafka.services import Context, DeferredResponse


async def waits_for_ever() -> object:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


@uvloop_test
async def test_a_clean_stop_answers_what_has_begun_and_sends_away_who_waits() -> None:
    async def join(_request: object, _context: Context) -> DeferredResponse:
        return DeferredResponse(waits_for_ever)

    held = Held()
    entries = {**held.entries, JOIN_GROUP.key: Entry(join, on_stop=ErrorCode.NOT_COORDINATOR)}
    async with kafka_server(entries) as kafka:
        waiting, writing, idle = [await kafka.client() for _ in range(3)]
        waiting.send(JOIN_GROUP, 5, 1, JoinGroupRequest(group_id="g"))
        writing.writer.write(produce(1) + produce(2))
        idle.writer.write(heartbeat(1))
        await idle.answer()
        await soon(lambda: held.begun == [1, 2], "both are begun")
        closing = asyncio.ensure_future(kafka.server.close(grace_s=10))
        response: JoinGroupResponse
        number, response = await waiting.response(JOIN_GROUP, 5)
        assert (number, response.error_code) == (1, ErrorCode.NOT_COORDINATOR.value.code)
        assert await waiting.rest() == b""
        assert await idle.rest() == b""
        writing.writer.write(heartbeat(3))
        with pytest.raises(ConnectionRefusedError):
            await kafka.client()
        assert not closing.done()
        held.go.set()
        assert [int.from_bytes((await writing.answer())[:4], "big") for _ in range(2)] == [1, 2]
        assert await writing.rest() == b"", "what came after is not begun"
        await closing


@uvloop_test
async def test_a_stop_does_not_wait_longer_than_its_grace() -> None:
    held = Held()
    async with kafka_server(held.entries) as kafka:
        client = await kafka.client()
        client.writer.write(produce(1))
        await soon(lambda: held.begun == [1], "it is begun")
        async with asyncio.timeout(2):
            await kafka.server.close(grace_s=0.05)
        assert await client.rest() == b""
        assert kafka.holds_nothing()


@uvloop_test
async def test_a_stop_while_a_handler_runs_and_others_stand_in_line() -> None:
    begun: list[int] = []
    go = asyncio.Event()

    async def handle(_request: object, context: Context) -> HeartbeatResponse:
        begun.append(context.correlation_id)
        await go.wait()
        return HeartbeatResponse()

    async with kafka_server({HEARTBEAT.key: Entry(handle)}) as kafka:
        client = await kafka.client()
        client.writer.write(heartbeat(1) + heartbeat(2) + heartbeat(3))
        await soon(lambda: begun == [1], "the first is begun")
        (connection,) = kafka.server._connections
        closing = asyncio.ensure_future(kafka.server.close(grace_s=10))
        await soon(lambda: connection.state is State.DRAINING, "it drains")
        go.set()
        assert int.from_bytes((await client.answer())[:4], "big") == 1
        assert await client.rest() == b""
        await closing
        assert begun == [1]
