"""The public gRPC door: `tidelog.v1` on its listeners, with reflection and the standard health service.

    listener (name, host:port)                one grpc.aio server for each: what is advertised depends on the listener
      -> METHODS                              looked up by path; anything else is told which door this is
      -> RequestMemory                        room is found before a message is read
      -> Doors                                the handler; cancelled when its client is gone or its deadline has passed

A call that fails has a status, a sentence, and the error itself in the trailing metadata `tidelog-error-bin`. The
status is coarse (`rpc.errors`); UNKNOWN_SERVER_ERROR means an error of our own, and a traceback in this node's log.

Every method is registered as one that streams its requests, unary ones too: on the wire there is no difference, but
only so the handler decides when a message is read. What nobody has read yet stays with its client.

Limits: a message over `message_bytes_max` is refused with MESSAGE_TOO_LARGE if it is not more than `SLACK_BYTES` over;
beyond that gRPC itself ends the call with RESOURCE_EXHAUSTED and the two numbers. Calls at once: `calls_max`, then
RESOURCE_EXHAUSTED. Dead peers are noticed by HTTP/2 pings.

Not here: who does not speak HTTP/2 at all (a Kafka client on this port, TLS on a plain listener) is disconnected by
gRPC before any of our code sees its bytes (decision 13).
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
from tidelog.rpc.door import METHODS, PACKAGE, SERVICES, Caller, Doors, Kind, Method
from tidelog.rpc.errors import DETAILS_LENGTH_MAX, ERROR_KEY, status_name
from tidelog.rpc.interruption import InterruptedWaitError, Interruption, OperationCancelledError
from tidelog.rpc.limits import DoorLimits, Held, RequestMemory, ResponseMemory
from tidelog.world.transport import encode_error

LOGGER = logging.getLogger(__name__)

SLACK_BYTES = 1 << 20
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
PING_INTERVAL_MIN_MS = 1_000
CLOSE_GRACE_S = 5.0
_WAITING = frozenset({"Fetch", "FetchStream", "WatchOffsets", "MetadataRecords", "Membership"})
"""Methods that wait for what may never come: they end at once when the node stops."""

Context = Any
"""grpc.aio's `ServicerContext`; it has no types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    name: str
    """Whose advertised endpoints its clients are told, such as `GRPC`."""
    address: str
    """host:port; port 0 takes a free one."""


class GrpcServer:
    """`start`, then `set_serving` as the node's health changes, then `close`. Used on one event loop."""

    def __init__(
        self,
        doors: Doors,
        listeners: Sequence[Listener],
        limits: DoorLimits,
        responses: ResponseMemory | None = None,
    ) -> None:
        """`responses` is the one that the log door asks, if there is one."""
        self.ports: dict[str, int] = {}
        """Of each listener by name, after `start`."""
        self.memory = RequestMemory(limits)
        self.responses = responses or ResponseMemory(limits)
        self.requests: Counter[tuple[str, str]] = Counter()
        """Messages of clients that were read, by service and method."""
        self.doors = doors
        self._listeners = tuple(listeners)
        self._limits = limits
        self._servers: list[aio.Server] = []
        self._health = health.HealthServicer()
        self._waiting: set[asyncio.Task[Any]] = set()
        """Calls of `_WAITING`."""
        self._stopping = Interruption()

    # Life.

    async def start(self, *, is_serving: bool = True) -> None:
        """Raises `TransportError` if an address is taken or not ours."""
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
        # Behind the others: it answers whatever nobody else knows.
        server.add_generic_rpc_handlers((_Handlers(self, listener.name),))
        try:
            port = server.add_insecure_port(listener.address)
        except RuntimeError as error:
            raise TransportError(f"cannot listen on {listener.address}: {error}") from error
        if port == 0:
            raise TransportError(f"cannot listen on {listener.address}: the address is taken or not ours")
        await server.start()
        self.ports[listener.name] = port
        self._servers.append(server)

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service says, of the whole node ("") and of each service that it has."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)
        for service in SERVICES:
            is_here = self.doors.of(service.name) is not None
            told = status if is_here else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(service.full_name, told)

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """New calls are refused at once; those under way have `grace_s` seconds to end. Who only waits for news is told
        to go elsewhere (NETWORK_EXCEPTION), a stream that produces gets its last answers. The health service tells
        first."""
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
            return grpc.stream_unary_rpc_method_handler(_refusing(_unknown(path)))
        if method.kind is Kind.UNARY:
            return grpc.stream_unary_rpc_method_handler(self._unary(method, listener))
        return grpc.stream_stream_rpc_method_handler(self._stream(method, listener))

    def _unary(self, method: Method, listener: str) -> Callable[..., Awaitable[bytes]]:
        async def answer(_requests: object, context: Context) -> bytes:
            held: Held | None = None
            leave = self._enter(method)
            try:
                handler = self.doors.handler(method)
                held = await self.memory.enter(context.peer())
                data = await held.read(context.read(), self._limits.read_timeout_ms)
                request = self._parse(method, data, held)
                if request is None:
                    raise InvalidRequestError(f"{method.service}.{method.name}: the call has no request")
                response = await handler(request, _caller(context, listener))
                answered: bytes = response.SerializeToString()
                if method.service == "Log":
                    self._count_response(context, len(answered))
                return answered
            except asyncio.CancelledError:
                return await self._cancelled(context)
            except TidelogError as error:
                return await _abort(context, error)
            except Exception as error:
                return await _abort_broken(context, method, error)
            finally:
                leave()
                if held is not None:
                    held.leave()

        return answer

    def _stream(self, method: Method, listener: str) -> Callable[..., Awaitable[None]]:
        async def answer(_requests: object, context: Context) -> None:
            under_way: deque[Held] = deque()
            is_reading = True
            leave = self._enter(method)

            async def receive() -> Any:
                nonlocal is_reading
                held = await self.memory.enter_stream()
                try:
                    data = await self._unless_stopping(context.read) if is_reading else None
                    request = self._parse(method, data, held)
                except BaseException:
                    held.leave()
                    raise
                if request is None:
                    is_reading = False
                    held.leave()
                else:
                    under_way.append(held)
                return request

            async def send(response: Any) -> None:
                data = response.SerializeToString()
                self.responses.used += len(data)
                try:
                    await context.write(data)
                finally:
                    self.responses.used -= len(data)
                if method.kind is Kind.BOTH_WAYS and under_way:
                    under_way.popleft().leave()  # answers come in the order of the requests

            try:
                handler = self.doors.handler(method)
                first = receive if method.kind is Kind.BOTH_WAYS else await receive()
                if first is None:
                    raise InvalidRequestError(f"{method.service}.{method.name}: the call has no request")
                await handler(first, _caller(context, listener), send)
            except asyncio.CancelledError:
                await self._cancelled(context)
            except TidelogError as error:
                await _abort(context, error)
            except Exception as error:
                await _abort_broken(context, method, error)
            finally:
                leave()
                for held in under_way:
                    held.leave()

        return answer

    def _enter(self, method: Method) -> Callable[[], None]:
        """Note a call that may wait for long; returns how it is forgotten."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        if method.name not in _WAITING:
            return _nothing
        self._waiting.add(task)
        return lambda: self._waiting.discard(task)

    async def _cancelled(self, context: Context) -> bytes:
        """Cancelled by its client or its deadline, which needs no answer; or by us."""
        if not self._stopping.is_set or context.cancelled() or context.done():
            raise asyncio.CancelledError
        return await _abort(context, TransportError("this node stops; ask another one"))

    async def _unless_stopping(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """What is read; None if the node stops first."""
        try:
            return await self._stopping.guard(read)
        except InterruptedWaitError:
            return None
        except OperationCancelledError:
            raise asyncio.CancelledError from None

    def _parse(self, method: Method, data: object, held: Held) -> Any:
        """The request that was read, or None if there is none; it counts from now on."""
        if not isinstance(data, bytes):
            return None
        held.count(len(data))
        self.requests[method.service, method.name] += 1
        self._limits.check_message(len(data))
        return method.parse(data)

    def _count_response(self, context: Context, size: int) -> None:
        """Until the call has ended: the client has taken it then, or is gone."""
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


def _options(limits: DoorLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max + SLACK_BYTES),
        ("grpc.max_send_message_length", -1),  # what is sent is limited where it is made
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own name says nothing of receiving, but that is what it is for a server.
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
        # New calls are taken one by one; of more than 1,000 that have come at once gRPC would cancel some, by chance.
        ("grpc.server.max_pending_requests", limits.calls_max),
        ("grpc.server.max_pending_requests_hard_limit", limits.calls_max),
        # A taken port is an error, not shared with whoever has it.
        ("grpc.so_reuseport", 0),
    ]


def _caller(context: Context, listener: str) -> Caller:
    return Caller(listener=listener, peer=context.peer())


def _unknown(path: str) -> TidelogError:
    service, _, name = path.removeprefix("/").partition("/")
    if service.startswith("tidelog.node."):
        return InvalidRequestError(
            "this is the door for clients; nodes talk to each other on the controllers' or the internal listener"
        )
    if service.startswith(f"{PACKAGE}."):
        return UnsupportedVersionError(f"this version has no method {service[:100]}/{name[:100]}")
    return UnsupportedVersionError(f"this is the gRPC door of Tidelog ({PACKAGE}); it has no {service[:100]!r}")


def _refusing(error: TidelogError) -> Callable[..., Awaitable[bytes]]:
    async def answer(_requests: object, context: Context) -> bytes:
        return await _abort(context, error)

    return answer


async def _abort(context: Context, error: TidelogError) -> bytes:
    trailing = ((ERROR_KEY, encode_error(error)),)
    await context.abort(grpc.StatusCode[status_name(error)], str(error)[:DETAILS_LENGTH_MAX], trailing)
    raise AssertionError("abort raises")


async def _abort_broken(context: Context, method: Method, error: Exception) -> bytes:
    """An error of our own, unless gRPC only tells us that the call is over."""
    if isinstance(error, aio.AbortError):
        raise error
    if context.cancelled() or context.done() or isinstance(error, aio.UsageError | aio.InternalError):
        LOGGER.info("method=%s peer=%s ended by its client: %s", method.full_name, context.peer(), error)
        raise asyncio.CancelledError
    LOGGER.error("method=%s peer=%s failed", method.full_name, context.peer(), exc_info=error)
    failure = TidelogError(f"{method.service}.{method.name} failed: {type(error).__name__}: {error}")
    return await _abort(context, failure)
