"""Connections over gRPC: one channel per address, created on first use.

A channel belongs to the event loop that created it; use one `GrpcConnections` on one loop. HTTP/2 pings detect dead
nodes during calls. A channel reconnects after 50 ms to 1 s; until then calls fail at once with `UnreachableError`, and
the caller decides how long to retry. If something other than gRPC answers, the error names it (`protocol_probe`).

gRPC must be shut down completely before a fork, and it lives as long as any of its objects. So nothing here keeps one
after its end, and neither do errors: a traceback holds frames, so errors are raised outside `except`, after the call
object is released.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message
from grpc import aio

from tidelog.client.connections import Encodable, Exchange
from tidelog.client.errors import WrongApiError
from tidelog.client.protocol_probe import CLOSED, USUAL, ProtocolProbe
from tidelog.model.errors import (
    CallTimeoutError,
    OverloadedError,
    RecordTooLargeError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    TransportError,
    UnreachableError,
    UnsupportedVersionError,
)
from tidelog.rpc.grpc.errors import ERROR_KEY
from tidelog.rpc.grpc.methods import Kind, Method
from tidelog.rpc.protocol_sniffing import hint_in
from tidelog.world.transport import decode_error

MESSAGE_BYTES_MAX = 128 << 20
CHANNELS_MAX = 1_024
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # timeout of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]
_HANGS_UP = "socket closed"
_TOO_LARGE = "larger than max"
_TOO_LARGE_HERE = "received message larger than max"
_UNSENT = ("failed to connect", "dns resolution failed", "errors resolving", "name resolution failure")
_CODE = grpc.StatusCode


class GrpcConnections:
    """Implements `Connections`."""

    def __init__(self) -> None:
        self._channels: dict[str, aio.Channel] = {}
        self._open: set[_GrpcExchange] = set()
        self._probe = ProtocolProbe()
        self._held: asyncio.Event | None = None
        self._is_closed = False

    def _channel(self, address: str) -> aio.Channel:
        if self._is_closed:
            raise UnreachableError(f"{address}: these connections are closed")
        channel = self._channels.get(address)
        if channel is None:
            if len(self._channels) >= CHANNELS_MAX:
                raise UnreachableError(f"{address}: connected to {CHANNELS_MAX} addresses already")
            channel = self._channels[address] = aio.insecure_channel(address, options=_OPTIONS)
        return channel

    async def call(self, address: str, method: Method, request: Message, *, timeout_ms: int) -> Any:
        assert method.kind is Kind.UNARY, f"{method.full_name} streams"
        await self._wait_while_held()
        calling = self._channel(address).unary_unary(method.path, request_serializer=_bytes_of)
        failed: TidelogError | None = None
        try:
            data = await calling(request, timeout=timeout_ms / 1000)
        except aio.AioRpcError as error:
            failed = await self._explained(error, address, method)
        except (aio.UsageError, asyncio.InvalidStateError) as error:
            failed = TransportError(f"{address}: {error}")
        except asyncio.CancelledError:
            # grpc also raises this if its channel was closed and nobody cancelled this task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failed = StreamBrokenError(f"{address}, {method.name}: disconnected here")
        finally:
            del calling
        if failed is not None:
            raise failed
        return _parsed(data, address, method)

    async def _explained(self, error: aio.AioRpcError, address: str, method: Method) -> TidelogError:
        """Convert the error. If the peer hung up while gRPC connected, probe which protocol it speaks."""
        converted = error_of(error, address, method)
        details = (error.details() or "").lower()
        if isinstance(converted, UnreachableError) and details.startswith(_UNSENT) and _HANGS_UP in details:
            protocol = await self._probe.probe(address)
            if protocol is not None:
                # A stopping node may hang up too; that is transient.
                return (UnreachableError if protocol == CLOSED else WrongApiError)(f"{address} {protocol}")
        return converted

    async def open(self, address: str, method: Method, request: Message | None = None) -> Exchange:
        await self._wait_while_held()
        channel = self._channel(address)
        if method.kind is Kind.SERVER_STREAM:
            assert request is not None, f"{method.full_name} takes one request"
            calling = channel.unary_stream(method.path, request_serializer=_bytes_of)(request)
        else:
            assert method.kind is Kind.BIDIRECTIONAL, f"{method.full_name} does not stream"
            assert request is None, f"{method.full_name} takes its requests one by one"
            calling = channel.stream_stream(method.path, request_serializer=_bytes_of)()
        exchange = _GrpcExchange(calling, address, method, self._open)
        self._open.add(exchange)
        return exchange

    def pause(self) -> None:
        """Block new calls until `release`."""
        if self._held is None:
            self._held = asyncio.Event()

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.set()

    async def _wait_while_held(self) -> None:
        while self._held is not None:
            await self._held.wait()

    async def disconnect(self) -> None:
        """Close all channels and streams; the next call connects again."""
        for exchange in list(self._open):
            exchange.close()
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
            del channel

    async def close(self) -> None:
        self._is_closed = True
        self.release()
        await self.disconnect()


class _GrpcExchange:
    def __init__(self, calling: Any, address: str, method: Method, all_open: set[_GrpcExchange]) -> None:
        self._calling = calling
        self._address = address
        self._method = method
        self._all = all_open
        self._is_closed = False

    async def send(self, request: Encodable) -> None:
        failed = self._broken()
        if self._is_closed:
            raise failed
        try:
            await self._calling.write(request)
            return
        except aio.AioRpcError as error:
            failed = error_of(error, self._address, self._method)
        except asyncio.InvalidStateError:  # grpc raises this for a call that has ended
            failed = await self._ended()
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
        raise failed

    async def receive(self) -> Any:
        failed = self._broken()
        if self._is_closed:
            raise failed
        data: Any = aio.EOF
        try:
            data = await self._calling.read()
            if data is aio.EOF:
                failed = await self._ended()
        except aio.AioRpcError as error:
            failed = error_of(error, self._address, self._method)
        except asyncio.CancelledError:
            # grpc raises this in the reader if the call, not the reader, was cancelled.
            if not self._is_closed:
                raise
        if data is aio.EOF:
            raise failed
        return _parsed(data, self._address, self._method)

    async def _ended(self) -> TidelogError:
        if self._is_closed:
            return self._broken()
        calling = self._calling
        try:
            code = await calling.code()
            if code is _CODE.OK:
                return StreamClosedError(f"{self._address} has ended {self._method.name}")
            details, trailing = await calling.details(), await calling.trailing_metadata()
        finally:
            del calling
        return _error(code, details or "", trailing, self._address, self._method)

    def _broken(self) -> TidelogError:
        return StreamBrokenError(f"{self._method.name} to {self._address} was closed here")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._all.discard(self)
            self._calling.cancel()
            self._calling = None


def _bytes_of(message: Encodable) -> bytes:
    return message.SerializeToString()


def _parsed(data: bytes, address: str, method: Method) -> Any:
    try:
        return method.response.FromString(data)
    except DecodeError as error:
        raise TransportError(f"{address} answered {method.name} with something else: {error}") from error


def error_of(error: aio.AioRpcError, address: str, method: Method) -> TidelogError:
    """Convert a failed call to an error of the catalogue: the node's own, or one for the connection."""
    return _error(error.code(), error.details() or "", error.trailing_metadata(), address, method)


def _error(code: Any, details: str, trailing: Any, address: str, method: Method) -> TidelogError:
    for key, value in trailing or ():
        if key == ERROR_KEY:
            return decode_error(value if isinstance(value, bytes) else value.encode("latin-1"))
    what = f"{address}, {method.name}"
    if code is _CODE.DEADLINE_EXCEEDED:
        return CallTimeoutError(f"{what}: no answer in time")
    if code is _CODE.RESOURCE_EXHAUSTED:
        return _exhausted(details, what)
    if code is _CODE.UNIMPLEMENTED:
        return UnsupportedVersionError(
            f"{what}: it speaks gRPC but not this call; 9292 is the usual port for clients, 9192 is for controllers"
        )
    if (protocol := hint_in(details)) is not None:
        return WrongApiError(f"{address} is {protocol}")
    if (protocol := _other_protocol(details)) is not None:
        return WrongApiError(f"{address} {protocol}; {USUAL}")
    if code is _CODE.UNAVAILABLE and details.lower().startswith(_UNSENT):
        return UnreachableError(f"{address}: {_last_reason(details)}")
    return StreamBrokenError(f"{what}: {code.name}: {details}")


def _exhausted(details: str, what: str) -> TidelogError:
    """Distinguish gRPC's own limits by its text: message size or concurrent calls."""
    text = details.lower()
    if f"client: {_TOO_LARGE_HERE}" in text:
        return TransportError(f"{what}: the answer is too large for this client: {details}")
    if _TOO_LARGE in text:
        return RecordTooLargeError(f"{what}: {details}")
    return OverloadedError(f"{what}: {details}")


def _last_reason(details: str) -> str:
    """Return the last part of gRPC's text, which is the cause; strip the bracket of an enclosing list."""
    reason = details.rpartition(": ")[2] or details
    return reason if "[" in reason else reason.rstrip("]")


def _other_protocol(details: str) -> str | None:
    """Return which other protocol answers, by gRPC's description of its first bytes."""
    text = details.lower()
    if "http1" in text or "http/1" in text:
        return "speaks HTTP, not gRPC (the metrics port?)"
    if "ssl" in text or "tls" in text or "handshake" in text:
        return "speaks TLS"
    return None
