"""A transport between nodes of one process on one event loop, for embedded clusters, benchmarks and tests.

Implements the contract of `world.transport` without a network: each direction of a stream is a bounded queue. A node
that is not started refuses connections; closing a node breaks its streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    RemoteError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    UnreachableError,
)
from tidelog.model.ids import NodeId
from tidelog.world.transport import CallHandler, Stream, StreamHandler, decode_error, encode_error

LOGGER = logging.getLogger(__name__)

WINDOW_BYTES = 8 << 20


class _Direction:
    """One direction of a stream."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.size = 0
        self.is_closed = False
        self.is_broken = False
        self.changed = asyncio.Event()

    def end(self, *, broken: bool) -> None:
        self.is_closed = True
        self.is_broken = self.is_broken or broken
        self.changed.set()

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class LocalStream:
    """One end of a stream; `incoming` of one end is `outgoing` of the other."""

    def __init__(self, peer: NodeId, outgoing: _Direction, incoming: _Direction) -> None:
        self._peer = peer
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def peer(self) -> NodeId:
        return self._peer

    async def send(self, data: bytes) -> None:
        assert data, "frames are not empty"
        queue = self._outgoing
        while queue.size and queue.size + len(data) > WINDOW_BYTES and not queue.is_closed:
            await queue.wait()
        if queue.is_closed or self._incoming.is_broken:
            raise StreamBrokenError(f"the stream with node {self._peer} is broken", node=self._peer)
        queue.frames.append(data)
        queue.size += len(data)
        queue.changed.set()

    async def receive(self) -> bytes:
        queue = self._incoming
        while not queue.frames:
            if queue.is_broken:
                raise StreamBrokenError(f"the stream with node {self._peer} is broken", node=self._peer)
            if queue.is_closed:
                raise StreamClosedError(f"node {self._peer} has closed the stream", node=self._peer)
            await queue.wait()
        data = queue.frames.popleft()
        queue.size -= len(data)
        queue.changed.set()
        return data

    def close(self) -> None:
        """Delivers what was sent. The other direction breaks, since nothing reads it any more."""
        self._outgoing.end(broken=False)
        self._incoming.frames.clear()
        self._incoming.end(broken=True)

    def break_off(self) -> None:
        for queue in (self._outgoing, self._incoming):
            queue.frames.clear()
            queue.end(broken=True)


class LocalNetwork:
    """The nodes of one process."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, LocalTransport] = {}

    def join(self, node: NodeId) -> LocalTransport:
        return LocalTransport(self, node)


class LocalTransport:
    """Implements `world.transport.Transport`. Ignores addresses."""

    def __init__(self, network: LocalNetwork, me: NodeId) -> None:
        self._network = network
        self._me = me
        self._calls: dict[str, CallHandler] = {}
        self._services: dict[str, StreamHandler] = {}
        self._tasks: dict[asyncio.Task[None], LocalStream] = {}
        self._opened: list[LocalStream] = []

    @property
    def me(self) -> NodeId:
        return self._me

    def serve(self, method: str, handler: CallHandler) -> None:
        assert method not in self._calls, f"{method} has a handler"
        self._calls[method] = handler

    def serve_stream(self, service: str, handler: StreamHandler) -> None:
        assert service not in self._services, f"{service} has a handler"
        self._services[service] = handler

    def set_address(self, node: NodeId, address: str) -> None:
        """Does nothing: nodes are found by id."""

    async def start(self) -> None:
        self._network.nodes[self._me] = self

    async def close(self) -> None:
        if self._network.nodes.get(self._me) is self:
            del self._network.nodes[self._me]
        for stream in self._opened:
            stream.break_off()
        tasks = list(self._tasks)
        for task in tasks:
            self._tasks[task].break_off()
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _find(self, node: NodeId) -> LocalTransport:
        transport = self._network.nodes.get(node)
        if transport is None:
            raise UnreachableError(f"node {node} is not running", node=node, is_refused=True)
        return transport

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        handler = self._find(node)._calls.get(method)
        if handler is None:
            raise RemoteError(f"node {node} does not serve {method}", code=ErrorCode.INVALID_REQUEST)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await handler(self._me, request)
        except TimeoutError as error:
            raise CallTimeoutError(f"node {node} did not respond to {method} in {timeout_ms} ms", node=node) from error
        except TidelogError as error:
            raise decode_error(encode_error(error)) from error

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        return await self.call(node, method, request, timeout_ms=timeout_ms)

    async def open_stream(self, node: NodeId, service: str) -> Stream:
        target = self._find(node)
        handler = target._services.get(service)
        if handler is None:
            raise RemoteError(f"node {node} does not serve {service}", code=ErrorCode.INVALID_REQUEST)
        outgoing, incoming = _Direction(), _Direction()
        stream = LocalStream(node, outgoing, incoming)
        target._accept(handler, LocalStream(self._me, incoming, outgoing), service)
        self._opened = [known for known in self._opened if not known._outgoing.is_closed]
        self._opened.append(stream)
        return stream

    def _accept(self, handler: StreamHandler, stream: LocalStream, service: str) -> None:
        task = asyncio.get_running_loop().create_task(self._handle(handler, stream, service))
        self._tasks[task] = stream
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _handle(self, handler: StreamHandler, stream: LocalStream, service: str) -> None:
        try:
            await handler(stream)
        except TidelogError as error:
            LOGGER.info("node=%d service=%s peer=%d ends: %s", self._me, service, stream.peer, error)
            stream.break_off()
        except Exception:
            LOGGER.exception("node=%d service=%s peer=%d failed", self._me, service, stream.peer)
            stream.break_off()
        else:
            stream.close()
