"""The transport between the nodes of a cluster, over gRPC. `world.transport` has the contract.

    /tidelog.node.Call/<method>       unary: request and response are raw bytes
    /tidelog.node.Stream/<service>    bidirectional: each message is a frame; an empty one closes the stream, so a
                                      stream that ends without it is known to be broken

    request metadata            tidelog-cluster, tidelog-node (the caller), tidelog-target (the callee: any other node
                                rejects the call without executing it)
    initial response metadata   tidelog-cluster, tidelog-node (the callee): the caller detects a wrong address
    trailing metadata           tidelog-error-bin: an error of the catalogue, as `encode_error` writes it

The kernel closes a killed peer's sockets: its streams break at once. HTTP/2 pings detect a silent peer or a network
partition after `KEEPALIVE_MS` plus `KEEPALIVE_TIMEOUT_MS`. After a refused connection the next call connects again at
once: the caller decides how long to wait. Each transport has its own connections; nothing is shared in the process.

Peers are identified by their metadata; TLS will add proof by certificate.
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
from tidelog.services.cancellation import foreign_cancellation
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
"""Timeout between the initial metadata of a rejected call and its status, in seconds."""
OLD_ADDRESS_GRACE_S = 60.0

_MESSAGE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", FRAME_BYTES_MAX + 1024),
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX + 1024),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # The keepalive ping has its own timeout, one minute by default, and that one breaks the connection.
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
    # A port in use is an error; SO_REUSEPORT would share it with another process.
    ("grpc.so_reuseport", 0),
]

_CLOSE = b""
# A write on a lost connection, before the call learns of the loss, fails with `InternalError`.
_CALL_IS_OVER = (aio.AioRpcError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError)
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


async def call_unknown(me: NodeId, cluster_id: str, address: str, method: str, *, timeout_ms: int) -> bytes:
    """Call the node at an address without knowing which it is. Raises `aio.AioRpcError`."""
    metadata = ((CLUSTER_KEY, cluster_id), (NODE_KEY, str(me)))
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return bytes(
            await channel.unary_unary(CALL_PREFIX + method)(b"?", metadata=metadata, timeout=timeout_ms / 1000)
        )


class GrpcTransport:
    """Implements `world.transport.Transport`. Created and used on one event loop."""

    def __init__(self, me: NodeId, cluster_id: str, listen: str, more: Sequence[str] = ()) -> None:
        """`listen` is `host:port`; port 0 takes a free one, which is `port` after `start`. It also listens on the
        addresses of `more`."""
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
            # Streams on the old channel end on their own, or when the peer is gone; new ones use the new address.
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
            stream.abort("this node stops")
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
        """Drop the channel; the next call creates a new one. Calls on this one have `grace_s` seconds to end, streams
        no limit."""
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
                # Rejected: the server ended the call instead of accepting it. Its status may still be in transit.
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
            call.cancel()  # the channel is about to be closed: start nothing on it
            raise TransportError(f"node {node} has another address now", node=node)
        return _ClientStream(node, call, self._streams, channel)

    def _check_answerer(self, node: NodeId, metadata: Any) -> bool:
        """Return whether the intended node accepted the call; if not, its status says why."""
        received = {str(key): value for key, value in metadata or ()}
        if received.get(CLUSTER_KEY) == self._cluster_id and received.get(NODE_KEY) == str(node):
            return True
        if CLUSTER_KEY not in received:
            return False
        raise WrongClusterError(
            f"{self._addresses.get(node)} is node {received.get(NODE_KEY)} of cluster {received.get(CLUSTER_KEY)}, "
            f"not node {node} of cluster {self._cluster_id}",
            node=node,
        )

    def _error(
        self, node: NodeId, channel: aio.Channel, what: str, error: aio.AioRpcError, at: str | None = None
    ) -> TidelogError:
        """`at`: the address of a channel that the caller closes."""
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
            # A refused channel delays its next attempt, but the next caller has waited long enough.
            if at is None:
                self._discard(node, channel, grace_s=CLOSE_GRACE_S)
            message = f"node {node} at {address}: {_reason(error)}"
            if _was_not_sent(error):
                return UnreachableError(message, node=node, is_refused=_is_refused(error))
            return TransportError(message, node=node)
        return TransportError(f"node {node} at {address}: {error.code().name}: {error.details()}", node=node)

    # Server side.

    def find_call(self, method: str) -> grpc.RpcMethodHandler | None:
        handler = self._calls.get(method)
        if handler is None:
            return None

        async def answer(request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
            peer = await self._admit(context)
            try:
                try:
                    return await handler(peer, request)
                except asyncio.CancelledError as error:
                    raise foreign_cancellation(error) from error
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
        """Run the handler in its own task: gRPC cancels this one when the peer is gone, and the stream notifies the
        handler."""
        running = asyncio.get_running_loop().create_task(_as_coroutine(handler(stream)), name=f"serve-{service}")
        try:
            await asyncio.shield(running)
            await stream.finish()
        except asyncio.CancelledError:
            stream.abort("the peer is gone")
            await asyncio.wait([running], timeout=CLOSE_GRACE_S)
            running.cancel()
            raise
        except TidelogError as error:
            LOGGER.info("node=%d service=%s peer=%d ends: %s", self._me, service, stream.peer, error)
            stream.abort(str(error))
            await _abort(stream.context, error)
        except Exception as error:
            LOGGER.exception("node=%d service=%s peer=%d failed", self._me, service, stream.peer)
            stream.abort(str(error))
            await _abort(stream.context, TidelogError(f"{service} failed: {error}"))

    async def _admit(self, context: aio.ServicerContext[bytes, bytes]) -> NodeId:
        received = {str(key): value for key, value in context.invocation_metadata() or ()}
        cluster, node = received.get(CLUSTER_KEY), str(received.get(NODE_KEY, ""))
        if cluster != self._cluster_id or not node.isdecimal():
            error = WrongClusterError(f"this is node {self._me} of cluster {self._cluster_id}, you are of {cluster}")
            await _abort(context, error)
        target = str(received.get(TARGET_KEY, self._me))
        if target != str(self._me):
            message = f"this is node {self._me} of cluster {self._cluster_id}, not node {target}"
            await _abort(context, WrongClusterError(message))
        return NodeId(int(node))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks up handlers by path for each call: they may be added while the server runs."""

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
    """Shared by both ends. `_read` returns a frame, or anything else at the end of the stream."""

    def __init__(self, peer: NodeId, registry: dict[int, _GrpcStream]) -> None:
        self._peer = peer
        self._broken: str | None = None
        self._is_closed = False
        self._registry = registry
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits = Interruption()
        self.channel: aio.Channel | None = None
        """The channel of a stream that was opened here."""
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
            self.abort("the connection is gone")
            raise self._error()
        if data == _CLOSE:
            self._forget()
            raise StreamClosedError(f"node {self._peer} has closed the stream", node=self._peer)
        return data

    async def _guard(self, operation: Callable[..., Awaitable[Any]], *values: object) -> Any:
        """Run the operation, but not longer than the stream exists."""
        try:
            return await self._waits.guard(operation, *values)
        except asyncio.CancelledError:
            self.abort("cancelled")
            raise
        except InterruptedWaitError:
            raise self._error() from None
        except (*_CALL_IS_OVER, OperationCancelledError) as error:
            self.abort(_reason(error) if isinstance(error, aio.AioRpcError) else str(error) or "it ended")
            raise self._error() from error

    def _error(self) -> StreamBrokenError:
        why = self._broken or "closed on this side"
        return StreamBrokenError(f"the stream with node {self._peer} is broken: {why}", node=self._peer)

    def abort(self, why: str) -> None:
        """Break the stream and notify its waiters."""
        if self._broken is None:
            self._broken = why
            self._forget()
            self._break()

    def _forget(self) -> None:
        self._registry.pop(id(self), None)
        if not self.end.done():
            self.end.set_result(None)
        self._waits.interrupt()

    async def _write(self, data: bytes) -> None:
        raise NotImplementedError

    async def _read(self) -> object:
        raise NotImplementedError

    def _break(self) -> None:
        """End the underlying call immediately."""
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

    def _break(self) -> None:
        self._call.cancel()

    def close(self) -> None:
        if self._is_closed or self._broken is not None:
            self._is_closed = True
            return
        self._is_closed = True
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        """Send the close frame, and give the peer time to read what was sent before."""
        try:
            async with asyncio.timeout(CLOSE_GRACE_S * 5):
                await self._call.write(_CLOSE)
                await self._call.done_writing()
                await self._call.wait_for_connection()
                await self._call.code()
        except (TimeoutError, aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            LOGGER.debug("peer=%d a stream did not close in order: %s", self._peer, error)
        self.abort("closed on this side")


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

    def _break(self) -> None:
        """End the call with its handler, which is notified of the break."""

    def close(self) -> None:
        """The handler returns soon, or sees that the stream is closed; then `finish` sends the close frame."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()

    async def finish(self) -> None:
        """The handler has returned: send the close frame."""
        if self._broken is None:
            try:
                await self.context.write(_CLOSE)
            except _CALL_IS_OVER as error:
                LOGGER.debug("peer=%d was gone before the stream closed: %s", self._peer, error)
            self.abort("closed on this side")


async def _as_coroutine(running: Awaitable[None]) -> None:
    await running


async def _abort(context: aio.ServicerContext[bytes, bytes], error: TidelogError) -> None:
    trailing = ((ERROR_KEY, encode_error(error)),)
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:512], trailing)


async def _outcome(call: Any) -> aio.AioRpcError:
    return aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _was_not_sent(error: aio.AioRpcError) -> bool:
    """Return whether the request was certainly not executed, because there was no connection.

    Only gRPC's text distinguishes a refused connection from one that broke during a request. Unknown text counts as "it
    may have arrived", which is safe; a test detects changes of the text.
    """
    details = (error.details() or "").lower()
    return details.startswith(("failed to connect", "dns resolution failed"))


def _is_refused(error: aio.AioRpcError) -> bool:
    """Return whether the host refused the connection; of several addresses gRPC reports the last."""
    return "connection refused" in (error.details() or "").lower()


def _reason(error: aio.AioRpcError) -> str:
    """Return the last part of gRPC's chain of reasons, as `Connection refused`."""
    details: str = error.details() or error.code().name
    return details.rpartition(": ")[2] or details
