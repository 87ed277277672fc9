"""Connects clients to a `MemoryCluster`: `Connections` between a client's event loop and the world's thread.

The world's thread runs each call and each step of a stream and reports the result to the client's loop. A cancelled
wait is cancelled there. When the cluster closes, all waits end with StreamBrokenError; later calls raise
UnreachableError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from tidelog.client.connections import Encodable, Exchange
from tidelog.model.errors import StreamBrokenError, TransportError, UnreachableError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.methods import END_OF_REQUESTS, Kind, Method, decode_response_frame, encode_message
from tidelog.world.simulated import SimLoop
from tidelog.world.transport import Stream, Transport

T = TypeVar("T")


class ClusterGateway(Protocol):
    """The cluster as clients see it. Any thread may call `post`; the other methods run on the world's thread."""

    def post(self, work: Callable[[], None]) -> None:
        """Run the work on the world's thread, in order. Raises UnreachableError if the world has ended."""
        ...

    def node_at(self, address: str) -> NodeId | None: ...

    def join(self, client: MemoryConnections) -> tuple[SimLoop, Transport]: ...

    def leave(self, client: MemoryConnections) -> None: ...


class MemoryConnections:
    """Implements `Connections` on one event loop."""

    def __init__(self, gateway: ClusterGateway) -> None:
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._open: set[_MemoryExchange] = set()
        self._is_closed = False
        self._there: tuple[SimLoop, Transport] | None = None
        """Belongs to the world's thread."""

    async def call(self, address: str, method: Method, request: Message, *, timeout_ms: int) -> Any:
        assert method.kind is Kind.UNARY, f"{method.full_name} streams"
        node, data = self._node(address), request.SerializeToString()
        answer = await self.across(
            lambda transport: transport.call(node, method.wire_name, data, timeout_ms=timeout_ms)
        )
        return _parsed(method, lambda: method.response.FromString(answer))

    async def open(self, address: str, method: Method, request: Message | None = None) -> Exchange:
        assert (method.kind is Kind.SERVER_STREAM) == (request is not None), f"{method.full_name} and its request"
        node = self._node(address)

        async def begin(transport: Transport) -> Stream:
            stream = await transport.open_stream(node, method.wire_name)
            if request is not None:
                await stream.send(encode_message(request))
                await stream.send(END_OF_REQUESTS)
            return stream

        exchange = _MemoryExchange(self, await self.across(begin), method, self._open)
        self._open.add(exchange)
        return exchange

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for exchange in list(self._open):
            exchange.close()
        self._break("disconnected here")
        self.post(lambda: self._gateway.leave(self))

    @property
    def transport(self) -> Transport | None:
        """Return the transport; on the world's thread. None before the first call."""
        return None if self._there is None else self._there[1]

    def _node(self, address: str) -> NodeId:
        node = self._gateway.node_at(address)
        if node is None:
            raise UnreachableError(f"{address} is not a broker of this cluster in memory")
        return node

    # Between client and world.

    def post(self, work: Callable[[], None]) -> None:
        """Run work without a result; does nothing if the world has ended."""
        with suppress(UnreachableError):
            self._gateway.post(work)

    async def across(self, job: Callable[[Transport], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the world as this client, and wait for its result."""
        if self._is_closed:
            raise UnreachableError("these connections are closed")
        loop = self._loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            if self._there is None:
                self._there = self._gateway.join(self)
            world_loop, transport = self._there
            task: asyncio.Task[T] = world_loop.create_task(job(transport))
            tasks.append(task)
            task.add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                error = StreamBrokenError("the call was ended in the cluster")
            with suppress(RuntimeError):  # the client's loop is closed: nobody waits
                loop.call_soon_threadsafe(_resolve, ended, None if error else task.result(), error)

        def give_up() -> None:
            for task in tasks:
                task.cancel()

        self._waiting.add(ended)
        try:
            self._gateway.post(begin)
            return await ended
        except asyncio.CancelledError:
            self.post(give_up)
            raise
        finally:
            self._waiting.discard(ended)

    def break_off(self) -> None:
        """Break all calls; on the world's thread, at its end."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._break, "the cluster in memory was closed")

    def _break(self, why: str) -> None:
        for ended in list(self._waiting):
            _resolve(ended, None, StreamBrokenError(why))


class _MemoryExchange:
    def __init__(
        self, connections: MemoryConnections, stream: Stream, method: Method, all_open: set[_MemoryExchange]
    ) -> None:
        self._connections = connections
        self._stream = stream
        self._method = method
        self._all = all_open
        self._is_closed = False

    async def send(self, request: Encodable) -> None:
        self._check()
        frame = encode_message(request)  # type: ignore[arg-type]  # it has the bytes of one
        await self._connections.across(lambda _: self._stream.send(frame))

    async def receive(self) -> Any:
        self._check()
        frame = await self._connections.across(lambda _: self._stream.receive())
        return _parsed(self._method, lambda: decode_response_frame(self._method, frame))

    def _check(self) -> None:
        if self._is_closed:
            raise StreamBrokenError(f"{self._method.name} was closed here")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._all.discard(self)
            self._connections.post(self._stream.close)


def _parsed(method: Method, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except DecodeError as error:
        raise TransportError(f"{method.name} was answered with something else: {error}") from error


def _resolve(ended: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(value)
    else:
        ended.set_exception(error)
