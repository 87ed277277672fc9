"""One suite for the transports that run on a real loop: gRPC, and the one inside of a process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from grpc import aio  # type: ignore[import-untyped]
from support.async_tests import asyncio_test, inside

from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    NotLeaderError,
    RemoteError,
    StreamBrokenError,
    StreamClosedError,
    TransportError,
    UnreachableError,
    WrongClusterError,
)
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc import transport
from tidelog.rpc.grpc.transport import GrpcTransport, _ServerStream
from tidelog.world.local_transport import LocalNetwork
from tidelog.world.transport import Stream, decode_error, encode_error

A, B = NodeId(1), NodeId(2)
LIMIT_S = 20


class Pair:
    """Two transports that know each other, and a third party where gRPC is meant."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = LocalNetwork()
        self.a: Any = self.make(A)
        self.b: Any = self.make(B)

    def make(self, node: NodeId, cluster: str = "c") -> Any:
        return self.network.join(node) if self.kind == "local" else GrpcTransport(node, cluster, "127.0.0.1:0")

    async def __aenter__(self) -> Pair:
        await self.a.start()
        await self.b.start()
        self.introduce()
        return self

    def introduce(self) -> None:
        if self.kind == "grpc":
            self.a.set_address(B, f"127.0.0.1:{self.b.port}")
            self.b.set_address(A, f"127.0.0.1:{self.a.port}")

    async def __aexit__(self, *_: object) -> None:
        await self.a.close()
        await self.b.close()


def run(kind: str, job: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), Pair(kind) as pair:
            await job(pair)

    asyncio.run(main())


both = pytest.mark.parametrize("kind", ["local", "grpc"])


@both
@inside(run, "kind")
async def test_a_call_is_answered_and_the_caller_is_known(pair: Pair) -> None:
    async def double(caller: NodeId, request: bytes) -> bytes:
        return b"%d " % caller + request * 2

    pair.b.serve("double", double)
    assert await pair.a.call(B, "double", b"xy", timeout_ms=5_000) == b"1 xyxy"
    assert await pair.a.call(B, "double", b"", timeout_ms=5_000) == b"1 "


@both
@inside(run, "kind")
async def test_an_error_of_the_catalogue_reaches_the_caller_with_its_facts(pair: Pair) -> None:
    async def refuse(_caller: NodeId, _request: bytes) -> bytes:
        raise NotLeaderError("node 3 leads", leader=3)

    pair.b.serve("refuse", refuse)
    with pytest.raises(RemoteError, match="node 3 leads") as caught:
        await pair.a.call(B, "refuse", b"", timeout_ms=5_000)
    assert caught.value.code is ErrorCode.NOT_CONTROLLER
    assert caught.value.facts["leader"] == 3
    assert caught.value.retriable


@inside(partial(run, "grpc"))
async def test_our_own_error_in_a_handler_is_an_unknown_server_error(pair: Pair) -> None:
    async def fail(_caller: NodeId, _request: bytes) -> bytes:
        raise KeyError("ours")

    pair.b.serve("fail", fail)
    with pytest.raises(RemoteError) as caught:
        await pair.a.call(B, "fail", b"", timeout_ms=5_000)
    assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR


@both
@inside(run, "kind")
async def test_a_call_that_is_not_answered_times_out(pair: Pair) -> None:
    async def sleep(_caller: NodeId, _request: bytes) -> bytes:
        await asyncio.sleep(3600)
        return b""

    pair.b.serve("sleep", sleep)
    with pytest.raises(CallTimeoutError):
        await pair.a.call(B, "sleep", b"", timeout_ms=100)


@inside(partial(run, "grpc"))
async def test_a_peer_that_dies_with_the_request_in_its_hands_is_not_called_unreachable(pair: Pair) -> None:
    """Unreachable means that nothing was carried out; here it may have been."""
    begun = asyncio.Event()

    async def never(_peer: NodeId, _request: bytes) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    pair.b.serve("never", never)
    calling = asyncio.get_running_loop().create_task(pair.a.call(B, "never", b"", timeout_ms=10_000))
    await begun.wait()
    await pair.b.close()
    with pytest.raises(TransportError) as raised:
        await calling
    assert not isinstance(raised.value, UnreachableError)


@both
def test_a_node_that_does_not_run_or_is_not_known_is_unreachable(kind: str) -> None:
    async def job(pair: Pair) -> None:
        await pair.b.close()
        with pytest.raises(UnreachableError) as refused:
            await pair.a.call(B, "x", b"", timeout_ms=5_000)
        assert refused.value.is_refused
        with pytest.raises(UnreachableError) as refused:
            await pair.a.open_stream(B, "x")
        assert refused.value.is_refused
        with pytest.raises(UnreachableError) as unknown:
            await pair.a.call(NodeId(77), "x", b"", timeout_ms=5_000)
        assert unknown.value.is_refused == (kind == "local"), "who has no address has not refused"

    run(kind, job)


@both
@inside(run, "kind")
async def test_frames_arrive_in_order_both_ways(pair: Pair) -> None:
    async def echo(stream: Stream) -> None:
        assert stream.peer == A
        while True:
            try:
                await stream.send(await stream.receive())
            except StreamClosedError:
                return

    pair.b.serve_stream("echo", echo)
    stream = await pair.a.open_stream(B, "echo")
    assert stream.peer == B
    for number in range(200):
        await stream.send(b"%d" % number)
    assert [await stream.receive() for _ in range(200)] == [b"%d" % number for number in range(200)]
    await stream.send(b"z" * (3 << 20))
    assert len(await stream.receive()) == 3 << 20
    stream.close()
    with pytest.raises(StreamBrokenError):
        await stream.send(b"x")


@both
@inside(run, "kind")
async def test_what_was_sent_before_an_orderly_close_arrives(pair: Pair) -> None:
    got: list[bytes] = []
    ended = asyncio.Event()

    async def collect(stream: Stream) -> None:
        try:
            while True:
                got.append(await stream.receive())
        except StreamClosedError:
            ended.set()

    pair.b.serve_stream("collect", collect)
    stream = await pair.a.open_stream(B, "collect")
    for number in range(50):
        await stream.send(b"%d" % number)
    stream.close()
    await ended.wait()
    assert got == [b"%d" % number for number in range(50)]


@both
@inside(run, "kind")
async def test_a_handler_that_returns_closes_and_one_that_raises_breaks(pair: Pair) -> None:
    async def leave(stream: Stream) -> None:
        await stream.send(b"bye")

    async def fall(stream: Stream) -> None:
        raise NotLeaderError("no")

    pair.b.serve_stream("leave", leave)
    pair.b.serve_stream("fall", fall)
    stream = await pair.a.open_stream(B, "leave")
    assert await stream.receive() == b"bye"
    with pytest.raises(StreamClosedError):
        await stream.receive()
    with pytest.raises((StreamBrokenError, RemoteError)):
        await (await pair.a.open_stream(B, "fall")).receive()


@both
@inside(run, "kind")
async def test_a_peer_that_goes_away_breaks_its_streams_at_both_ends(pair: Pair) -> None:
    outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def wait(stream: Stream) -> None:
        try:
            await stream.receive()
        except TransportError as error:
            outcome.set_result(error)

    pair.b.serve_stream("wait", wait)
    stream = await pair.a.open_stream(B, "wait")
    waiting = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0)
    await pair.a.close()
    assert isinstance(await outcome, StreamBrokenError)
    with pytest.raises(StreamBrokenError):
        await waiting


@both
@inside(run, "kind")
async def test_a_peer_that_does_not_read_holds_up_its_sender(pair: Pair) -> None:
    go = asyncio.Event()
    count = 0

    async def slow(stream: Stream) -> None:
        nonlocal count
        await go.wait()
        while count < 100:
            await stream.receive()
            count += 1

    pair.b.serve_stream("slow", slow)
    stream = await pair.a.open_stream(B, "slow")
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(100):
            await stream.send(b"x" * (1 << 20))
            sent += 1

    sending = asyncio.ensure_future(send_all())
    last = -1
    while sent != last:  # until nothing moves
        last = sent
        await asyncio.sleep(0.2)
    assert sent < 100
    go.set()
    await sending
    assert sent == 100


@both
@inside(run, "kind")
async def test_an_unknown_service_is_refused(pair: Pair) -> None:
    async def open_and_receive() -> None:
        await (await pair.a.open_stream(B, "nothing")).receive()

    with pytest.raises((RemoteError, TransportError)):
        await open_and_receive()


@inside(partial(run, "grpc"))
async def test_a_node_of_another_cluster_is_refused_with_a_clear_error(pair: Pair) -> None:
    outsider = pair.make(NodeId(9), cluster="another")
    await outsider.start()
    try:
        outsider.set_address(B, f"127.0.0.1:{pair.b.port}")

        async def echo(_caller: NodeId, request: bytes) -> bytes:
            return request

        pair.b.serve("echo", echo)
        with pytest.raises(WrongClusterError, match="node 2 of cluster c, you are of another"):
            await outsider.call(B, "echo", b"", timeout_ms=5_000)

        async def hold(stream: Stream) -> None:
            await stream.receive()

        pair.b.serve_stream("hold", hold)
        with pytest.raises(WrongClusterError, match="node 2 of cluster c, you are of another"):
            await outsider.open_stream(B, "hold")
    finally:
        await outsider.close()


@inside(partial(run, "grpc"))
async def test_an_address_of_another_node_is_noticed(pair: Pair) -> None:
    async def hold(stream: Stream) -> None:
        await stream.receive()

    pair.b.serve_stream("hold", hold)
    pair.a.set_address(NodeId(3), f"127.0.0.1:{pair.b.port}")
    with pytest.raises(WrongClusterError, match="is node 2 of cluster c, not node 3"):
        await pair.a.open_stream(NodeId(3), "hold")


@inside(partial(run, "grpc"))
async def test_a_call_that_arrives_at_another_node_is_refused_and_not_carried_out(pair: Pair) -> None:
    carried_out: list[bytes] = []

    async def note(_caller: NodeId, request: bytes) -> bytes:
        carried_out.append(request)
        return b"done"

    pair.b.serve("note", note)
    address = f"127.0.0.1:{pair.b.port}"
    pair.a.set_address(NodeId(3), address)
    with pytest.raises(WrongClusterError, match=f"{address} answers: this is node 2 of cluster c, not node 3"):
        await pair.a.call(NodeId(3), "note", b"1", timeout_ms=5_000)
    with pytest.raises(WrongClusterError, match="this is node 2 of cluster c, not node 4"):
        await pair.a.call_at(NodeId(4), address, "note", b"2", timeout_ms=5_000)
    assert carried_out == []
    assert await pair.a.call_at(B, address, "note", b"3", timeout_ms=5_000) == b"done"
    assert carried_out == [b"3"]


@inside(partial(run, "grpc"))
async def test_a_call_at_an_address_changes_nothing_for_other_calls(pair: Pair) -> None:
    async def name(_caller: NodeId, _request: bytes) -> bytes:
        return b"here"

    pair.b.serve("name", name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"node 2 at 127.0.0.1:{nobody}") as refusal:
        await pair.a.call_at(B, f"127.0.0.1:{nobody}", "name", b"?", timeout_ms=5_000)
    assert refusal.value.is_refused
    assert await pair.a.call(B, "name", b"?", timeout_ms=5_000) == b"here"


@inside(partial(run, "grpc"))
async def test_a_new_address_is_used_for_what_comes_next(pair: Pair) -> None:
    async def name(_caller: NodeId, _request: bytes) -> bytes:
        return b"old"

    async def new_name(_caller: NodeId, _request: bytes) -> bytes:
        return b"new"

    pair.b.serve("name", name)
    assert await pair.a.call(B, "name", b"", timeout_ms=5_000) == b"old"
    moved = pair.make(B)
    moved.serve("name", new_name)
    await moved.start()
    try:
        pair.a.set_address(B, f"127.0.0.1:{moved.port}")
        assert await pair.a.call(B, "name", b"", timeout_ms=5_000) == b"new"
    finally:
        await moved.close()


def test_a_stream_outlives_the_address_that_it_was_opened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "OLD_ADDRESS_GRACE_S", 0.05)

    async def job(pair: Pair) -> None:
        async def echo(stream: Stream) -> None:
            while True:
                await stream.send(await stream.receive())

        pair.b.serve_stream("echo", echo)
        stream = await pair.a.open_stream(B, "echo")
        pair.a.set_address(B, f"localhost:{pair.b.port}")
        (old,) = pair.a._old_channels
        for number in range(10):
            await asyncio.sleep(0.05)
            await stream.send(b"%d" % number)
            assert await stream.receive() == b"%d" % number
        assert not old.done()
        stream.close()
        await asyncio.wait([old], timeout=5)
        assert old.done(), "its channel is closed when its last stream has ended"

    run("grpc", job)


@inside(partial(run, "grpc"))
async def test_a_taken_port_is_an_error_that_names_it(pair: Pair) -> None:
    taken = GrpcTransport(NodeId(5), "c", f"127.0.0.1:{pair.b.port}")
    with pytest.raises(TransportError, match=str(pair.b.port)):
        await taken.start()


@inside(partial(run, "grpc"))
async def test_a_peer_that_comes_back_is_reached_without_a_long_wait(pair: Pair) -> None:
    async def echo(_caller: NodeId, request: bytes) -> bytes:
        return request

    port = pair.b.port
    await pair.b.close()
    for _ in range(10):
        with pytest.raises(UnreachableError):
            await pair.a.call(B, "echo", b"", timeout_ms=5_000)
    back = GrpcTransport(B, "c", f"127.0.0.1:{port}")
    back.serve("echo", echo)
    await back.start()
    try:
        began = time.monotonic()
        while True:
            try:
                await pair.a.call(B, "echo", b"x", timeout_ms=5_000)
                break
            except UnreachableError:
                await asyncio.sleep(0.01)
        print(f"reached after {(time.monotonic() - began) * 1000:.0f} ms")
    finally:
        await back.close()


def test_errors_survive_their_encoding_and_rubbish_is_an_error_too() -> None:
    found = decode_error(encode_error(NotLeaderError("no", leader=None)))
    assert (found.code, str(found), found.facts) == (ErrorCode.NOT_CONTROLLER, "no", {"leader": None})
    assert decode_error(encode_error(found)).facts == found.facts
    assert decode_error(b"\xc1rubbish").code is ErrorCode.UNKNOWN_SERVER_ERROR


@pytest.mark.parametrize(
    "error", [aio.UsageError("the call is over"), aio.InternalError("execute_batch"), asyncio.InvalidStateError()]
)
@asyncio_test
async def test_a_write_that_grpc_cannot_carry_out_is_a_broken_stream(error: Exception) -> None:
    """A connection that dies under a write shows as an error of gRPC's own, sooner than by the end of the call."""

    class DeadContext:
        async def write(self, _data: bytes) -> None:
            raise error

    registry: dict[int, Any] = {}
    stream = _ServerStream(B, DeadContext(), registry)
    with pytest.raises(StreamBrokenError):
        await stream.send(b"frame")
    assert not registry
    await stream.finish()
