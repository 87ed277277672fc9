"""A transport between nodes of one process, on one event loop: for an embedded cluster, for benchmarks and tests.

The contract of `world.transport`, without a wire: frames wait in a bounded queue for each direction. A node that is not
started refuses; closing one breaks its streams.
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


class _Pipe:
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
    """One end; `incoming` of one is `outgoing` of the other."""

    def __init__(self, peer: NodeId, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._peer = peer
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def peer(self) -> NodeId:
        return self._peer

    async def send(self, data: bytes) -> None:
        assert data, "frames are not empty"
        pipe = self._outgoing
        while pipe.size and pipe.size + len(data) > WINDOW_BYTES and not pipe.is_closed:
            await pipe.wait()
        if pipe.is_closed or self._incoming.is_broken:
            raise StreamBrokenError(f"the stream with node {self._peer} is broken", node=self._peer)
        pipe.frames.append(data)
        pipe.size += len(data)
        pipe.changed.set()

    async def receive(self) -> bytes:
        pipe = self._incoming
        while not pipe.frames:
            if pipe.is_broken:
                raise StreamBrokenError(f"the stream with node {self._peer} is broken", node=self._peer)
            if pipe.is_closed:
                raise StreamClosedError(f"node {self._peer} has closed the stream", node=self._peer)
            await pipe.wait()
        data = pipe.frames.popleft()
        pipe.size -= len(data)
        pipe.changed.set()
        return data

    def close(self) -> None:
        """What was sent is delivered; the other direction breaks, since nobody reads it any more."""
        self._outgoing.end(broken=False)
        self._incoming.frames.clear()
        self._incoming.end(broken=True)

    def break_off(self) -> None:
        for pipe in (self._outgoing, self._incoming):
            pipe.frames.clear()
            pipe.end(broken=True)


class LocalNetwork:
    """The nodes of one process."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, LocalTransport] = {}

    def join(self, node: NodeId) -> LocalTransport:
        return LocalTransport(self, node)


class LocalTransport:
    """Implements `world.transport.Transport`. Addresses mean nothing here."""

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
        """Nodes are found by their id."""

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
        found = self._network.nodes.get(node)
        if found is None:
            raise UnreachableError(f"node {node} does not run", node=node, is_refused=True)
        return found

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        handler = self._find(node)._calls.get(method)
        if handler is None:
            raise RemoteError(f"node {node} does not serve {method}", code=ErrorCode.INVALID_REQUEST)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await handler(self._me, request)
        except TimeoutError as error:
            raise CallTimeoutError(f"node {node} did not answer {method} in {timeout_ms} ms", node=node) from error
        except TidelogError as error:
            raise decode_error(encode_error(error)) from error

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        return await self.call(node, method, request, timeout_ms=timeout_ms)

    async def open_stream(self, node: NodeId, service: str) -> Stream:
        found = self._find(node)
        handler = found._services.get(service)
        if handler is None:
            raise RemoteError(f"node {node} does not serve {service}", code=ErrorCode.INVALID_REQUEST)
        there, back = _Pipe(), _Pipe()
        stream = LocalStream(node, there, back)
        found._accept(handler, LocalStream(self._me, back, there), service)
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
