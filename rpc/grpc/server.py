"""The gRPC API server: `tidelog.v1` on its listeners, with reflection and the standard health service.

    listener (name, host:port)                one grpc.aio server for each: endpoints depend on the listener
      -> METHODS                              found by path; another path is rejected
      -> RequestMemory                        reserves memory before a message is read
      -> Handlers                             cancelled when the client is gone or its deadline has passed
      -> DelayedCalls                         throttled clients wait (`rpc.grpc.throttling`)

A failed call has a status, a message, and the error itself in the trailing metadata `tidelog-error-bin`. The status is
coarse (`rpc.grpc.errors`); UNKNOWN_SERVER_ERROR is an internal error, with a traceback in this node's log.

Every method is registered as one that streams its requests, unary ones too: the wire is the same, but the handler
decides when a message is read. An unread message stays with its client.

Limits: a message over `message_bytes_max` is rejected with MESSAGE_TOO_LARGE if it is at most `SLACK_BYTES` over;
beyond that gRPC itself ends the call with RESOURCE_EXHAUSTED and the two numbers. Concurrent calls: `calls_max`, then
RESOURCE_EXHAUSTED. HTTP/2 pings find dead peers.

gRPC closes non-HTTP/2 connections (a Kafka client on this port, TLS on a plain listener) before our code sees their
bytes (decision 13).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from tidelog.model.errors import InvalidRequestError, TidelogError, TransportError, UnsupportedVersionError
from tidelog.rpc.grpc.dispatch import Handlers
from tidelog.rpc.grpc.errors import DETAILS_LENGTH_MAX, ERROR_KEY, status_name
from tidelog.rpc.grpc.methods import METHODS, PACKAGE, SERVICES, Kind, Method
from tidelog.rpc.grpc.throttling import DelayedCalls, throttle_metadata
from tidelog.rpc.interruption import InterruptedWaitError, Interruption, OperationCancelledError
from tidelog.services.cancellation import foreign_cancellation
from tidelog.services.context import Api, RequestContext
from tidelog.services.deadline import deadline_after
from tidelog.services.limits import RequestLimits, RequestMemory, ResponseMemory, Slot
from tidelog.world.transport import encode_error

LOGGER = logging.getLogger(__name__)

SLACK_BYTES = 1 << 20
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
PING_INTERVAL_MIN_MS = 1_000
CLOSE_GRACE_S = 5.0
_WAITING = frozenset({"Fetch", "FetchStream", "WatchOffsets", "MetadataRecords", "Membership"})
"""Methods that may wait for ever: they end at once when the node stops."""

Context = Any
"""grpc.aio's `ServicerContext`; it has no types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    name: str
    """Clients get the advertised endpoints of this name, such as `GRPC`."""
    address: str
    """host:port; port 0 takes a free one."""


class GrpcServer:
    """`start`, then `set_serving` as the node's health changes, then `close`. Used on one event loop."""

    def __init__(
        self,
        handlers: Handlers,
        listeners: Sequence[Listener],
        limits: RequestLimits,
        responses: ResponseMemory | None = None,
    ) -> None:
        """`responses` is shared with the handlers of the log."""
        self.ports: dict[str, int] = {}
        """Ports by listener, after `start`."""
        self.memory = RequestMemory(limits)
        self.responses = responses or ResponseMemory(limits)
        self.requests: Counter[tuple[str, str]] = Counter()
        """Messages read, by service and method."""
        self.handlers = handlers
        self._listeners = tuple(listeners)
        self._limits = limits
        self._servers: list[aio.Server] = []
        self._health = health.HealthServicer()
        self._waiting: set[asyncio.Task[Any]] = set()
        """Calls of `_WAITING`."""
        self._stopping = Interruption()
        self.delayed = DelayedCalls(limits, self._stopping)

    # Start and stop.

    async def start(self, *, is_serving: bool = True) -> None:
        """Raises `TransportError` if an address is in use or not local."""
        await self.set_serving(is_serving)
        try:
            for listener in self._listeners:
                await self._listen(listener)
        except BaseException:
            await self.close(grace_s=0)
            raise

    async def _listen(self, listener: Listener) -> None:
        server = aio.server(options=_options(self._limits), maximum_concurrent_rpcs=self._limits.calls_max)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.full_name for service in SERVICES]
        names += [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        # The last one: it handles every other path.
        server.add_generic_rpc_handlers((_Handlers(self, listener.name),))
        try:
            port = server.add_insecure_port(listener.address)
        except RuntimeError as error:
            raise TransportError(f"cannot listen on {listener.address}: {error}") from error
        if port == 0:
            raise TransportError(f"cannot listen on {listener.address}: the address is in use or not local")
        await server.start()
        self.ports[listener.name] = port
        self._servers.append(server)

    async def set_serving(self, is_serving: bool) -> None:
        """Sets the health of the whole node ("") and of each service that it has."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        for service in SERVICES:
            is_here = self.handlers.of(service.name) is not None
            await self._health.set(service.full_name, status if is_here else health_pb2.HealthCheckResponse.NOT_SERVING)

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """Rejects new calls at once; calls in progress have `grace_s` seconds. Long polls end with NETWORK_EXCEPTION, a
        produce stream gets its last responses. The health service reports it first."""
        await self._health.enter_graceful_shutdown()
        self._stopping.interrupt()
        for task in list(self._waiting):
            task.cancel()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        self._servers.clear()

    # Calls.

    def find(self, path: str, listener: str) -> grpc.RpcMethodHandler:
        method = METHODS.get(path.removeprefix("/"))
        if method is None:
            return grpc.stream_unary_rpc_method_handler(_rejecting(_unknown(path)))
        if method.kind is Kind.UNARY:
            return grpc.stream_unary_rpc_method_handler(self._unary(method, listener))
        return grpc.stream_stream_rpc_method_handler(self._stream(method, listener))

    def _unary(self, method: Method, listener: str) -> Callable[..., Awaitable[bytes]]:
        async def answer(_requests: object, context: Context) -> bytes:
            held: Slot | None = None
            caller: RequestContext | None = None
            leave = self._enter(method)
            try:
                handler = self.handlers.handler(method)
                held = await self.memory.enter(context.peer())
                data = await held.read(context.read(), self._limits.read_timeout_ms)
                request = self._parse(method, data, held)
                if request is None:
                    raise InvalidRequestError(f"{method.service}.{method.name}: the call has no request")
                caller = _request_context(context, listener, getattr(request, "timeout_ms", 0))
                try:
                    response = await handler(request, caller)
                except asyncio.CancelledError as error:
                    raise foreign_cancellation(error) from error
                answered: bytes = response.SerializeToString()
                self._count_response(context, len(answered))
                if caller.throttle_ms:
                    held.leave()
                    context.set_trailing_metadata(throttle_metadata(caller))
                    await self.delayed.respond_later(caller, len(answered))
                return answered
            except asyncio.CancelledError:
                return await self._cancelled(context)
            except TidelogError as error:
                if caller is not None and caller.throttle_ms:
                    await self.delayed.respond_later(caller, 0)
                return await _abort(context, error, caller)
            except Exception as error:
                return await _abort_broken(context, method, error)
            finally:
                leave()
                if held is not None:
                    held.leave()

        return answer

    def _stream(self, method: Method, listener: str) -> Callable[..., Awaitable[None]]:
        async def answer(_requests: object, context: Context) -> None:
            in_progress: deque[Slot] = deque()
            is_reading, is_open, is_over = True, True, False
            caller = _request_context(context, listener)
            leave = self._enter(method)

            async def receive() -> Any:
                nonlocal is_reading, is_over
                if caller.throttle_ms:
                    await self.delayed.hold_stream(caller)
                held = await self.memory.enter_stream()
                try:
                    data = await self._unless_stopping(context.read) if is_reading else None
                    request = self._parse(method, data, held)
                except BaseException as error:
                    held.leave()
                    is_over |= isinstance(error, asyncio.CancelledError)
                    raise
                if request is None:
                    is_reading = False
                if request is None or not is_open:  # a reader may go on after its handler has returned
                    held.leave()
                else:
                    in_progress.append(held)
                return request

            async def send(response: Any) -> None:
                nonlocal is_over
                data = response.SerializeToString()
                self.responses.used += len(data)
                try:
                    await context.write(data)
                except asyncio.CancelledError:
                    is_over = True  # gRPC raises it in its own calls too, when the client is gone
                    raise
                finally:
                    self.responses.used -= len(data)
                if method.kind is not Kind.BIDIRECTIONAL:
                    await self.delayed.hold_stream(caller)
                elif in_progress:
                    in_progress.popleft().leave()  # responses come in the order of the requests

            try:
                handler = self.handlers.handler(method)
                first = receive if method.kind is Kind.BIDIRECTIONAL else await receive()
                if first is None:
                    raise InvalidRequestError(f"{method.service}.{method.name}: the call has no request")
                try:
                    await handler(first, caller, send)
                except asyncio.CancelledError as error:
                    raise error if is_over else foreign_cancellation(error) from error
            except (asyncio.CancelledError, Exception) as error:
                await self._end_stream(context, method, error)
            finally:
                is_open = False
                for leave_one in (leave, *(held.leave for held in in_progress)):
                    leave_one()

        return answer

    async def _end_stream(self, context: Context, method: Method, error: asyncio.CancelledError | Exception) -> None:
        if isinstance(error, asyncio.CancelledError):
            await self._cancelled(context)
        elif isinstance(error, TidelogError):
            await _abort(context, error)
        else:
            await _abort_broken(context, method, error)

    def _enter(self, method: Method) -> Callable[[], None]:
        """Registers a call that may wait long; returns how to unregister it."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        if method.name not in _WAITING:
            return _nothing
        self._waiting.add(task)
        return lambda: self._waiting.discard(task)

    async def _cancelled(self, context: Context) -> bytes:
        """Handles a cancelled call: only one that the stop of this node cancelled gets an error."""
        if not self._stopping.is_set or context.cancelled() or context.done():
            raise asyncio.CancelledError
        return await _abort(context, TransportError("this node is stopping; ask another one"))

    async def _unless_stopping(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Returns what is read; None if the node stops first."""
        try:
            return await self._stopping.guard(read)
        except InterruptedWaitError:
            return None
        except OperationCancelledError:
            raise asyncio.CancelledError from None

    def _parse(self, method: Method, data: object, held: Slot) -> Any:
        """Returns the request, or None if there is none; its bytes count from now on."""
        if not isinstance(data, bytes):
            return None
        held.count(len(data))
        self.requests[method.service, method.name] += 1
        self._limits.check_message(len(data))
        return method.parse(data)

    def _count_response(self, context: Context, size: int) -> None:
        """Counts the response until the call ends: the client has read it then, or is gone."""
        self.responses.used += size

        def ended(_context: object) -> None:
            self.responses.used -= size

        context.add_done_callback(ended)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, server: GrpcServer, listener: str) -> None:
        self._server = server
        self._listener = listener

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._server.find(details.method, self._listener)


def _nothing() -> None:
    pass


def _options(limits: RequestLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max + SLACK_BYTES),
        ("grpc.max_send_message_length", -1),  # responses are limited where they are made
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # For a server this is the interval of received pings.
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
        # gRPC accepts calls one by one and would cancel some of more than 1,000 pending ones.
        ("grpc.server.max_pending_requests", limits.calls_max),
        ("grpc.server.max_pending_requests_hard_limit", limits.calls_max),
        # A port in use is an error, not shared.
        ("grpc.so_reuseport", 0),
    ]


def _request_context(context: Context, listener: str, timeout_ms: int = 0) -> RequestContext:
    peer, left_s = context.peer(), context.time_remaining()
    deadline_s = None if left_s is None else asyncio.get_running_loop().time() + left_s
    return RequestContext(
        api=Api.GRPC,
        listener=listener,
        client_host=_host(peer),
        peer=peer,
        deadline_s=deadline_after(timeout_ms, deadline_s),
    )


def _host(peer: str) -> str:
    """The host of a gRPC peer (`ipv4:10.0.0.1:41000`, `ipv6:%5B::1%5D:41000`); any other form unchanged."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer[:100]
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")[:100]


def _unknown(path: str) -> TidelogError:
    service, _, name = path.removeprefix("/").partition("/")
    if service.startswith("tidelog.node."):
        return InvalidRequestError("this listener is for clients; nodes use the controllers' or the internal listener")
    if service.startswith(f"{PACKAGE}."):
        return UnsupportedVersionError(f"this version has no method {service[:100]}/{name[:100]}")
    return UnsupportedVersionError(f"this is the gRPC API of Tidelog ({PACKAGE}); it has no service {service[:100]!r}")


def _rejecting(error: TidelogError) -> Callable[..., Awaitable[bytes]]:
    async def answer(_requests: object, context: Context) -> bytes:
        return await _abort(context, error)

    return answer


async def _abort(context: Context, error: TidelogError, caller: RequestContext | None = None) -> bytes:
    trailing = ((ERROR_KEY, encode_error(error)), *throttle_metadata(caller))
    await context.abort(grpc.StatusCode[status_name(error)], str(error)[:DETAILS_LENGTH_MAX], trailing)
    raise AssertionError("abort raises")


async def _abort_broken(context: Context, method: Method, error: Exception) -> bytes:
    """Log an internal error and abort the call with it, unless gRPC raised it only because the call has ended."""
    if isinstance(error, aio.AbortError):
        raise error
    if context.cancelled() or context.done() or isinstance(error, aio.UsageError | aio.InternalError):
        LOGGER.info("method=%s peer=%s ended by its client: %s", method.full_name, context.peer(), error)
        raise asyncio.CancelledError
    LOGGER.error("method=%s peer=%s failed", method.full_name, context.peer(), exc_info=error)
    failure = TidelogError(f"{method.service}.{method.name} failed: {type(error).__name__}: {error}")
    return await _abort(context, failure)
