"""The handlers behind the public API: the same ones for gRPC and for the transport of simulations.

    gRPC (`rpc.grpc.server`) ----.
                                  +--> METHODS --> Handlers --> LogHandlers, GroupsHandlers, ClusterHandlers, ...
    world.Transport (`serve`) ---'

A handler of a method of `methods.METHODS` is one of these:

    unary            async def name(self, request, context) -> response
    server stream    async def name(self, request, context, send) -> None      `await send(response)` for each
    both ways        async def name(self, receive, context, send) -> None      `await receive()`: None at the end

It raises an error of the catalogue for the whole call. `send` waits while the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from tidelog.model.errors import StreamBrokenError, StreamClosedError, TidelogError, UnsupportedVersionError
from tidelog.model.ids import NodeId
from tidelog.rpc.grpc.admin import AdminHandlers
from tidelog.rpc.grpc.cluster import ClusterHandlers
from tidelog.rpc.grpc.groups import GroupsHandlers
from tidelog.rpc.grpc.log import LogHandlers
from tidelog.rpc.grpc.methods import METHODS, Kind, Method, decode_request_frame, encode_failure, encode_message
from tidelog.rpc.grpc.transactions import TransactionsHandlers
from tidelog.services.cancellation import foreign_cancellation
from tidelog.services.context import Api, RequestContext
from tidelog.services.deadline import deadline_after
from tidelog.world.transport import Stream, Transport

LOGGER = logging.getLogger(__name__)


def grpc_context(*, listener: str = "", peer: str = "") -> RequestContext:
    """The context of a request that arrives through the gRPC API."""
    return RequestContext(api=Api.GRPC, listener=listener, peer=peer, client_host=peer)


def _with_deadline(context: RequestContext, request: Message) -> RequestContext:
    """Ends with the timeout of a request that has one."""
    context.deadline_s = deadline_after(getattr(request, "timeout_ms", 0))
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """Handlers of a node; a node without the role `broker` has the first two."""

    cluster: ClusterHandlers
    admin: AdminHandlers
    log: LogHandlers | None = None
    groups: GroupsHandlers | None = None
    transactions: TransactionsHandlers | None = None

    def handler(self, method: Method) -> Callable[..., Awaitable[Any]]:
        """Raises `UnsupportedVersionError` if this node does not serve it."""
        handlers = self.of(method.service)
        if handlers is None:
            where = self.cluster.broker_addresses
            raise UnsupportedVersionError(
                f"{method.service}.{method.name} is served by brokers, this node is a controller only; {where}"
            )
        handler: Callable[..., Awaitable[Any]] = getattr(handlers, method.handler)
        return handler

    def of(self, service: str) -> object | None:
        """Returns None for a service that this node does not have."""
        return {
            "Log": self.log,
            "Groups": self.groups,
            "Transactions": self.transactions,
            "Cluster": self.cluster,
            "Admin": self.admin,
        }[service]


def serve(transport: Transport, handlers: Handlers, *, listener: str) -> None:
    """Serve the whole API over a transport, for clients of the simulator; `listener` is that of their requests."""

    def context_of(node: NodeId) -> RequestContext:
        return grpc_context(listener=listener, peer=f"node {node}")

    for method in METHODS.values():
        _serve(transport, handlers, method, method.wire_name, context_of)


def _serve(
    transport: Transport, handlers: Handlers, method: Method, name: str, context_of: Callable[[NodeId], RequestContext]
) -> None:
    if method.kind is Kind.UNARY:

        async def answer(node: NodeId, data: bytes) -> bytes:
            handler = handlers.handler(method)
            request = method.parse(data)
            try:
                response: Message = await handler(request, _with_deadline(context_of(node), request))
            except asyncio.CancelledError as error:
                raise foreign_cancellation(error) from error
            return response.SerializeToString()

        transport.serve(name, answer)
        return

    async def answer_stream(stream: Stream) -> None:
        async def send(response: Message) -> None:
            await stream.send(encode_message(response))

        async def receive() -> Any:
            try:
                return decode_request_frame(method, await stream.receive())
            except StreamClosedError:
                return None

        running: asyncio.Future[None] | None = None
        watching: asyncio.Task[None] | None = None
        try:
            handler, context = handlers.handler(method), context_of(stream.peer)
            if method.kind is Kind.BIDIRECTIONAL:
                await handler(receive, context, send)
            elif (request := await receive()) is not None:
                running = asyncio.ensure_future(handler(request, context, send))
                watching = asyncio.get_running_loop().create_task(_end_with(stream, running))
                await asyncio.wait([running])
                if running.cancelled() and not watching.done():
                    raise RuntimeError("cancelled by what it waited for")
                if not running.cancelled():
                    running.result()
        except (StreamBrokenError, StreamClosedError):
            return
        except TidelogError as error:
            await _fail(stream, error)
        except Exception as error:
            LOGGER.exception("method=%s peer=%d failed", name, stream.peer)
            await _fail(stream, TidelogError(f"{name} failed: {error}"))
        finally:
            if running is not None and watching is not None:
                running.cancel()
                stream.close()  # ends `watching`; cancelling it would break the stream

    transport.serve_stream(name, answer_stream)


async def _end_with(stream: Stream, running: asyncio.Future[None]) -> None:
    """Ends a handler that only sends when its peer is gone: it may have nothing to send for long."""
    try:
        while True:
            await stream.receive()  # the peer sends nothing but the end of its requests
    except (StreamBrokenError, StreamClosedError):
        running.cancel()


async def _fail(stream: Stream, error: TidelogError) -> None:
    try:
        await stream.send(encode_failure(error))
    except StreamBrokenError:
        LOGGER.info("peer=%d closed the stream before this error: %s", stream.peer, error)
