"""The transport between the nodes of a cluster, over gRPC. The contract is in `world.transport`.

    /tidelog.node.Call/<method>       unary: request and response are raw bytes
    /tidelog.node.Stream/<service>    bidirectional: a message of the stream is a frame; an empty one is the order to
                                      close, so that a stream that just ends is known to be broken

    metadata of a request       tidelog-cluster, tidelog-node (the caller), tidelog-target (the node that is meant:
                                another one refuses, and carries nothing out)
    initial metadata back       tidelog-cluster, tidelog-node (the answerer): a wrong address is noticed, not believed
    trailing metadata           tidelog-error-bin: an error of the catalogue, as `encode_error` writes it

A killed peer's sockets are closed by its kernel: its streams break at once. A peer that is silent, or a wire that is
cut, is noticed by HTTP/2 pings after `KEEPALIVE_MS` plus `KEEPALIVE_TIMEOUT_MS`. After a refusal the next call connects
anew, at once: who calls decides how long to wait. Each transport has its own connections: nothing is shared inside of
the process.

Peers are believed by what they say in the metadata; proof by certificate comes with TLS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from grpc import aio

from tidelog.model.errors import (
    CallTimeoutError,
    ErrorCode,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    TransportError,
    UnreachableError,
    WrongClusterError,
)
from tidelog.model.ids import NodeId
from tidelog.rpc.interruption import InterruptedWaitError, Interruption, OperationCancelledError
from tidelog.world.transport import FRAME_BYTES_MAX, CallHandler, Stream, StreamHandler, decode_error, encode_error

LOGGER = logging.getLogger(__name__)

CALL_PREFIX = "/tidelog.node.Call/"
STREAM_PREFIX = "/tidelog.node.Stream/"
CLUSTER_KEY = "tidelog-cluster"
NODE_KEY = "tidelog-node"
TARGET_KEY = "tidelog-target"
ERROR_KEY = "tidelog-error-bin"

KEEPALIVE_MS = 1_500
KEEPALIVE_TIMEOUT_MS = 3_000
CONNECT_TIMEOUT_MS = 1_000
CLOSE_GRACE_S = 0.2
REFUSAL_WAIT_S = 5.0
"""Between the empty head of a refused call and its status."""
OLD_ADDRESS_GRACE_S = 60.0

_MESSAGE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", FRAME_BYTES_MAX + 1024),
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX + 1024),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # The ping of a keep-alive has a timeout of its own, a minute by default, and that one breaks the connection.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # A taken port is an error, not shared with whoever has it.
    ("grpc.so_reuseport", 0),
]

_CLOSE = b""
# A write that finds the connection gone before anybody has told the call fails with `InternalError`.
_CALL_IS_OVER = (aio.AioRpcError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError)
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class GrpcTransport:
    """Implements `world.transport.Transport`. Made and used on one event loop."""

    def __init__(self, me: NodeId, cluster_id: str, listen: str, more: Sequence[str] = ()) -> None:
        """`listen` is `host:port`; port 0 takes a free one, which `port` tells after `start`. On the addresses of
        `more` it listens too."""
        self.port = 0
        self._me = me
        self._cluster_id = cluster_id
        self._listen = (listen, *more)
        self._calls: dict[str, CallHandler] = {}
        self._services: dict[str, StreamHandler] = {}
        self._addresses: dict[NodeId, str] = {}
        self._channels: dict[NodeId, tuple[str, aio.Channel]] = {}
        self._old_channels: list[asyncio.Task[None]] = []
        self._streams: dict[int, _GrpcStream] = {}
        self._server: aio.Server | None = None
        self._metadata = ((CLUSTER_KEY, cluster_id), (NODE_KEY, str(me)))

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
        self._addresses[node] = address
        known = self._channels.get(node)
        if known is not None and known[0] != address:
            # Streams on the old channel end by themselves, or when the peer is gone; new ones use the new address.
            self._discard(node, known[1], grace_s=OLD_ADDRESS_GRACE_S)

    async def start(self) -> None:
        server = aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_Handlers(self),))
        ports = [self._open(server, address) for address in self._listen]
        self.port = ports[0]
        await server.start()
        self._server = server

    def _open(self, server: aio.Server, address: str) -> int:
        try:
            port = int(server.add_insecure_port(address))
        except RuntimeError as error:
            raise TransportError(f"cannot listen on {address}: {error}", node=self._me) from error
        if port == 0:
            raise TransportError(f"cannot listen on {address}: the address is taken or not ours", node=self._me)
        return port

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.break_off("this node stops")
        if self._server is not None:
            await self._server.stop(grace=CLOSE_GRACE_S)
        for _, channel in self._channels.values():
            await channel.close()
        for task in self._old_channels:
            task.cancel()
        if self._old_channels:
            await asyncio.wait(self._old_channels)
        self._channels.clear()

    def _channel(self, node: NodeId) -> aio.Channel:
        known = self._channels.get(node)
        if known is not None:
            return known[1]
        address = self._addresses.get(node)
        if not address:
            raise UnreachableError(f"no address of node {node} is known", node=node)
        channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._channels[node] = (address, channel)
        return channel

    def _discard(self, node: NodeId, channel: aio.Channel, *, grace_s: float) -> None:
        """The next call makes a new channel; calls on this one have `grace_s` seconds to end, streams all the time."""
        if self._channels.get(node, ("", None))[1] is channel:
            del self._channels[node]
        self._old_channels = [task for task in self._old_channels if not task.done()]
        self._old_channels.append(asyncio.get_running_loop().create_task(self._retire(channel, grace_s)))

    async def _retire(self, channel: aio.Channel, grace_s: float) -> None:
        try:
            while running := [stream for stream in self._streams.values() if stream.channel is channel]:
                await asyncio.wait([stream.end for stream in running])
            await channel.close(grace=grace_s)
        except asyncio.CancelledError:
            await channel.close()
            raise

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        channel, metadata = self._channel(node), self._metadata_for(node)
        running = channel.unary_unary(CALL_PREFIX + method)(request, metadata=metadata, timeout=timeout_ms / 1000)
        try:
            response = await running
        except aio.AioRpcError as error:
            raise self._error(node, channel, method, error) from error
        return bytes(response)

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            metadata, timeout_s = self._metadata_for(node), timeout_ms / 1000
            try:
                response = await channel.unary_unary(CALL_PREFIX + method)(
                    request, metadata=metadata, timeout=timeout_s
                )
            except aio.AioRpcError as error:
                raise self._error(node, channel, method, error, address) from error
            return bytes(response)

    def _metadata_for(self, node: NodeId) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, (TARGET_KEY, str(node)))

    async def open_stream(self, node: NodeId, service: str) -> Stream:
        channel = self._channel(node)
        call = channel.stream_stream(STREAM_PREFIX + service)(metadata=self._metadata_for(node))
        try:
            is_accepted = self._check_answerer(node, await call.initial_metadata())
            if not is_accepted or call.done():
                # Refused: the server ends the call instead of accepting it. Its status may be on the way yet.
                async with asyncio.timeout(REFUSAL_WAIT_S):
                    outcome = await _outcome(call)
                raise self._error(node, channel, service, outcome)
        except TimeoutError:
            call.cancel()
            raise TransportError(f"node {node} has neither accepted nor refused {service}", node=node) from None
        except aio.AioRpcError as error:
            raise self._error(node, channel, service, error) from error
        except BaseException:
            call.cancel()
            raise
        if self._channels.get(node, ("", None))[1] is not channel:
            call.cancel()  # the channel is about to be closed: nothing may begin on it
            raise TransportError(f"node {node} has another address now", node=node)
        return _ClientStream(node, call, self._streams, channel)

    def _check_answerer(self, node: NodeId, metadata: Any) -> bool:
        """Whether it was accepted, by the node that was meant; if it was not, its status says why."""
        told = {str(key): value for key, value in metadata or ()}
        if told.get(CLUSTER_KEY) == self._cluster_id and told.get(NODE_KEY) == str(node):
            return True
        if CLUSTER_KEY not in told:
            return False
        raise WrongClusterError(
            f"{self._addresses.get(node)} is node {told.get(NODE_KEY)} of cluster {told.get(CLUSTER_KEY)}, "
            f"not node {node} of cluster {self._cluster_id}",
            node=node,
        )

    def _error(
        self, node: NodeId, channel: aio.Channel, what: str, error: aio.AioRpcError, at: str | None = None
    ) -> TidelogError:
        """`at`: the address of a channel that its caller closes."""
        address = at or self._addresses.get(node, "no address")
        for key, value in error.trailing_metadata() or ():
            if key == ERROR_KEY:
                remote = decode_error(value if isinstance(value, bytes) else value.encode())
                if remote.code is ErrorCode.INCONSISTENT_CLUSTER_ID:
                    return WrongClusterError(f"{address} answers: {remote}", node=node)
                return remote
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(f"node {node} at {address} did not answer {what} in time", node=node)
        if error.code() in _UNREACHABLE:
            # A channel that was refused waits before it connects again; whoever asks next has waited long enough.
            if at is None:
                self._discard(node, channel, grace_s=CLOSE_GRACE_S)
            message = f"node {node} at {address}: {_reason(error)}"
            if _never_left(error):
                return UnreachableError(message, node=node, is_refused=_is_refused(error))
            return TransportError(message, node=node)
        return TransportError(f"node {node} at {address}: {error.code().name}: {error.details()}", node=node)

    # Serving.

    def find_call(self, method: str) -> grpc.RpcMethodHandler | None:
        handler = self._calls.get(method)
        if handler is None:
            return None

        async def answer(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
            peer = await self._admit(context)
            try:
                return await handler(peer, request)
            except TidelogError as error:
                await _abort(context, error)
            except Exception as error:
                LOGGER.exception("node=%d method=%s peer=%d failed", self._me, method, peer)
                await _abort(context, TidelogError(f"{method} failed: {error}"))
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(answer)

    def find_stream(self, service: str) -> grpc.RpcMethodHandler | None:
        handler = self._services.get(service)
        if handler is None:
            return None

        async def answer(_requests: object, context: aio.ServicerContext[bytes, bytes]) -> None:
            peer = await self._admit(context)
            await context.send_initial_metadata(self._metadata)
            stream = _ServerStream(peer, context, self._streams)
            await self._run_handler(handler, stream, service)

        return grpc.stream_stream_rpc_method_handler(answer)

    async def _run_handler(self, handler: StreamHandler, stream: _ServerStream, service: str) -> None:
        """The handler has a task of its own: gRPC cancels ours when the peer is gone, the handler hears it from the
        stream."""
        running = asyncio.get_running_loop().create_task(_as_coroutine(handler(stream)), name=f"serve-{service}")
        try:
            await asyncio.shield(running)
            await stream.finish()
        except asyncio.CancelledError:
            stream.break_off("the peer is gone")
            await asyncio.wait([running], timeout=CLOSE_GRACE_S)
            running.cancel()
            raise
        except TidelogError as error:
            LOGGER.info("node=%d service=%s peer=%d ends: %s", self._me, service, stream.peer, error)
            stream.break_off(str(error))
            await _abort(stream.context, error)
        except Exception as error:
            LOGGER.exception("node=%d service=%s peer=%d failed", self._me, service, stream.peer)
            stream.break_off(str(error))
            await _abort(stream.context, TidelogError(f"{service} failed: {error}"))

    async def _admit(self, context: aio.ServicerContext[bytes, bytes]) -> NodeId:
        told = {str(key): value for key, value in context.invocation_metadata() or ()}
        cluster, node = told.get(CLUSTER_KEY), str(told.get(NODE_KEY, ""))
        if cluster != self._cluster_id or not node.isdecimal():
            error = WrongClusterError(f"this is node {self._me} of cluster {self._cluster_id}, you are of {cluster}")
            await _abort(context, error)
        target = str(told.get(TARGET_KEY, self._me))
        if target != str(self._me):
            message = f"this is node {self._me} of cluster {self._cluster_id}, not node {target}"
            await _abort(context, WrongClusterError(message))
        return NodeId(int(node))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks handlers up by path at each call: they may be added while the server runs."""

    def __init__(self, transport: GrpcTransport) -> None:
        self._transport = transport

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = details.method
        if path.startswith(CALL_PREFIX):
            return self._transport.find_call(path.removeprefix(CALL_PREFIX))
        if path.startswith(STREAM_PREFIX):
            return self._transport.find_stream(path.removeprefix(STREAM_PREFIX))
        return None


class _GrpcStream:
    """What both ends share. `_read` gives a frame, or anything else at the end of the stream."""

    def __init__(self, peer: NodeId, registry: dict[int, _GrpcStream]) -> None:
        self._peer = peer
        self._broken: str | None = None
        self._is_closed = False
        self._registry = registry
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits = Interruption()
        self.channel: aio.Channel | None = None
        """That it runs on, of a stream that was opened here."""
        registry[id(self)] = self

    @property
    def peer(self) -> NodeId:
        return self._peer

    async def send(self, data: bytes) -> None:
        assert data, "frames are not empty"
        assert len(data) <= FRAME_BYTES_MAX, f"a frame of {len(data)} bytes"
        if self._broken is not None or self._is_closed:
            raise self._error()
        await self._guard(self._write, data)

    async def receive(self) -> bytes:
        if self._broken is not None:
            raise self._error()
        data = await self._guard(self._read)
        if not isinstance(data, bytes):
            self.break_off("the connection is gone")
            raise self._error()
        if data == _CLOSE:
            self._forget()
            raise StreamClosedError(f"node {self._peer} has closed the stream", node=self._peer)
        return data

    async def _guard(self, operation: Callable[..., Awaitable[Any]], *values: object) -> Any:
        """Run it, but not longer than the stream lives."""
        try:
            return await self._waits.guard(operation, *values)
        except asyncio.CancelledError:
            self.break_off("cancelled")
            raise
        except InterruptedWaitError:
            raise self._error() from None
        except (*_CALL_IS_OVER, OperationCancelledError) as error:
            self.break_off(_reason(error) if isinstance(error, aio.AioRpcError) else str(error) or "it ended")
            raise self._error() from error

    def _error(self) -> StreamBrokenError:
        why = self._broken or "closed on this side"
        return StreamBrokenError(f"the stream with node {self._peer} is broken: {why}", node=self._peer)

    def break_off(self, why: str) -> None:
        """From now on it is broken; whoever waits is told."""
        if self._broken is None:
            self._broken = why
            self._forget()
            self._tear()

    def _forget(self) -> None:
        self._registry.pop(id(self), None)
        if not self.end.done():
            self.end.set_result(None)
        self._waits.interrupt()

    async def _write(self, data: bytes) -> None:
        raise NotImplementedError

    async def _read(self) -> object:
        raise NotImplementedError

    def _tear(self) -> None:
        """End the call underneath, without ceremony."""
        raise NotImplementedError


class _ClientStream(_GrpcStream):
    def __init__(self, peer: NodeId, call: Any, registry: dict[int, _GrpcStream], channel: aio.Channel) -> None:
        super().__init__(peer, registry)
        self.channel = channel
        self._call = call
        self._closing: asyncio.Task[None] | None = None

    async def _write(self, data: bytes) -> None:
        await self._call.write(data)

    async def _read(self) -> object:
        return await self._call.read()

    def _tear(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        if self._is_closed or self._broken is not None:
            self._is_closed = True
            return
        self._is_closed = True
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        """Say so, and leave the peer a moment to read what was sent before."""
        try:
            async with asyncio.timeout(CLOSE_GRACE_S * 5):
                await self._call.write(_CLOSE)
                await self._call.done_writing()
                await self._call.wait_for_connection()
                await self._call.code()
        except (TimeoutError, aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            LOGGER.debug("peer=%d a stream did not close in order: %s", self._peer, error)
        self.break_off("closed on this side")


class _ServerStream(_GrpcStream):
    def __init__(
        self, peer: NodeId, context: aio.ServicerContext[bytes, bytes], registry: dict[int, _GrpcStream]
    ) -> None:
        super().__init__(peer, registry)
        self.context = context

    async def _write(self, data: bytes) -> None:
        await self.context.write(data)

    async def _read(self) -> object:
        return await self.context.read()

    def _tear(self) -> None:
        """The call ends with its handler, which hears of the break."""

    def close(self) -> None:
        """The handler returns soon, or is told that the stream is closed; then `finish` says so to the peer."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()

    async def finish(self) -> None:
        """The handler has returned: the order to close is the last frame."""
        if self._broken is None:
            try:
                await self.context.write(_CLOSE)
            except _CALL_IS_OVER as error:
                LOGGER.debug("peer=%d was gone before the stream closed: %s", self._peer, error)
            self.break_off("closed on this side")


async def _as_coroutine(running: Awaitable[None]) -> None:
    await running


async def _abort(context: aio.ServicerContext[bytes, bytes], error: TidelogError) -> None:
    trailing = ((ERROR_KEY, encode_error(error)),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:512], trailing)


async def _outcome(call: Any) -> aio.AioRpcError:
    return aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _never_left(error: aio.AioRpcError) -> bool:
    """Whether the request certainly was not carried out, because there was no connection.

    gRPC tells a refused connection from one that broke under a running request only by its words. Words that are not
    known count as "it may have arrived", which is the safe side; a test notices when they change.
    """
    details = (error.details() or "").lower()
    return details.startswith(("failed to connect", "dns resolution failed"))


def _is_refused(error: aio.AioRpcError) -> bool:
    """Whether the machine at that address said that nothing listens there; of several addresses gRPC tells the last."""
    return "connection refused" in (error.details() or "").lower()


def _reason(error: aio.AioRpcError) -> str:
    """The last part of gRPC's chain of reasons: `Connection refused`, not the story of how it came to it."""
    details: str = error.details() or error.code().name
    return details.rpartition(": ")[2] or details
