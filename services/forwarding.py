"""Sends requests of services to the node that carries them out.

    request                                    goes to                    between nodes
    a request or question of the metadata      the active controller      "services/metadata"
    a call of a service to the controllers     the active controller      "services/<name>"
    a call of a service to a broker            that broker, at the address that it has registered
    a stream of a service                      any controller

A forwarded request acts for the client of its `RequestContext`, which travels with it:

    request    size of the context: 4 bytes | `ForwardedContext` | request       msgpack (`metadata.requests`)
    reply      throttle in ms: 4 bytes      | reply

The receiving node accepts such a context from another node only: clients do not reach this transport. The node must be
authorized for ClusterAction. Then the client of the context is authorized (metadata requests: by the first node, which
knows the resources) and charged for the work of this node; the delay travels back. The controller of the same node gets
the request itself, after the same checks of its values.

A change whose outcome is not known is not repeated: the caller gets REQUEST_TIMED_OUT or NETWORK_EXCEPTION. A question
is repeated. A caller that accepts an old answer gets that of this node's copy when this node does not hear from an
active controller and none has answered within STALE_AFTER_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tidelog.metadata.acls import CreateAcls, DeleteAcls
from tidelog.metadata.brokers import Drain, Unregister
from tidelog.metadata.config_changes import AlterConfigs
from tidelog.metadata.controller import QUERIES
from tidelog.metadata.controller_client import ControllerClient
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.features import UpdateFeatures
from tidelog.metadata.partitions import ElectLeaders
from tidelog.metadata.reassignments import AlterReassignments
from tidelog.metadata.requests import (
    REQUEST_BYTES_MAX,
    check_request,
    decode_message,
    decode_reply,
    decode_request,
    encode_message,
    encode_reply,
    encode_request,
)
from tidelog.metadata.state_machine import is_query
from tidelog.metadata.topics import AddPartitions, CreateTopics, DeleteTopics
from tidelog.model.errors import InvalidRequestError, RequestTimedOutError, TidelogError, TransportError
from tidelog.model.ids import NodeId
from tidelog.model.principals import Principal
from tidelog.services.authorization import CLUSTER, Operation
from tidelog.services.context import Api, RequestContext
from tidelog.services.deadline import deadline_after
from tidelog.services.guard import Guard
from tidelog.services.metadata_cache import MetadataCache
from tidelog.world.transport import Stream, Transport

STALE_AFTER_S = 0.7
"""Time to wait for an active controller before a stale reply is returned, where the request allows one."""
STALE_POLL_S = 0.1
DECISION_WAIT_S = 300
"""A decision whose caller is gone is awaited this long for the audit: the longest timeout of an admin request. After it
the audit says REQUEST_TIMED_OUT."""
PREFIX = "services/"
METADATA = PREFIX + "metadata"
CONTEXT_BYTES_MAX = 1 << 20
CHANGES = frozenset(
    {
        CreateTopics,
        DeleteTopics,
        AddPartitions,
        AlterConfigs,
        AlterReassignments,
        ElectLeaders,
        Drain,
        Unregister,
        UpdateFeatures,
        CreateAcls,
        DeleteAcls,
    }
)
"""The changes that clients ask for. A broker sends its own requests through the `ControllerClient`."""
_SIZE_BYTES = 4

Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ServiceCall(Generic[Q, R]):
    """A call between the services of two nodes, and what the client needs to be allowed for the cluster."""

    name: str
    operation: Operation
    request: type[Q]
    reply: type[R]


@dataclass(frozen=True, slots=True)
class ForwardedContext:
    """The part of a `RequestContext` that travels. New fields are added at the end, with a default."""

    api: str
    principal_kind: str
    principal_name: str
    listener: str
    client_id: str
    client_host: str
    timeout_ms: int
    """0: no deadline."""


def encode_forwarded(context: RequestContext, body: bytes, *, timeout_ms: int) -> bytes:
    head = encode_message(
        ForwardedContext(
            context.api.value,
            context.principal.kind,
            context.principal.name,
            context.listener,
            context.client_id,
            context.client_host,
            timeout_ms,
        )
    )
    return len(head).to_bytes(_SIZE_BYTES, "big") + head + body


def decode_forwarded(sender: NodeId, data: bytes) -> tuple[RequestContext, bytes]:
    """Return the context and the body of what `encode_forwarded` wrote; raises `InvalidRequestError`."""
    end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
    if len(data) < end:
        raise InvalidRequestError(f"a forwarded request of {len(data)} bytes lacks a part of its context")
    head = decode_message(ForwardedContext, data[_SIZE_BYTES:end], bytes_max=CONTEXT_BYTES_MAX)
    if head.api not in {api.value for api in Api}:
        raise InvalidRequestError(f"this version knows no API {head.api[:100]!r}")
    context = RequestContext(
        Api(head.api),
        Principal(head.principal_kind, head.principal_name),
        head.listener,
        head.client_id,
        head.client_host,
        f"node {sender}",
        deadline_after(head.timeout_ms),
    )
    return context, data[end:]


class Forwarder:
    """One for each node."""

    def __init__(
        self,
        cache: MetadataCache,
        client: ControllerClient,
        transport: Transport,
        guard: Guard,
        *,
        brokers: Transport | None = None,
    ) -> None:
        """`transport` knows controllers; `brokers` knows brokers by their registrations."""
        self._cache = cache
        self._client = client
        self._transport = transport
        self._guard = guard
        self._brokers = brokers
        self._decisions: set[asyncio.Task[Any]] = set()
        """Changes that the controller of this node decides; the controller limits how many."""
        if cache.controller is not None:
            transport.serve(METADATA, self._serve_metadata)

    # Requests and questions of the metadata.

    async def ask(self, context: RequestContext, request: object, *, timeout_ms: int) -> Any:
        """Return the active controller's reply; raise its error."""
        check_request(request)

        async def send(target: NodeId, call_ms: int) -> Any:
            reply = await self._call(context, self._transport, target, METADATA, encode_request(request), call_ms)
            return decode_reply(reply)

        return await self._client.retry(
            send,
            is_repeatable=is_query(request),
            timeout_ms=timeout_ms,
            own=self._cache.controller,
            run=lambda controller: self._decide(context, controller, request),
        )

    async def _serve_metadata(self, sender: NodeId, data: bytes) -> bytes:
        controller = self._cache.own_active()
        context, body = self._receive(sender, data)
        request = decode_request(body)
        if not is_query(request) and type(request) not in CHANGES:
            raise InvalidRequestError(f"{type(request).__name__} is not a request of clients")
        return _reply(context, encode_reply(await self._decide(context, controller, request)))

    async def _decide(self, context: RequestContext, controller: ControllerNode, request: object) -> Any:
        if is_query(request):
            return await controller.ask(request)
        task = asyncio.get_running_loop().create_task(self._decide_and_audit(context, controller, request))
        self._decisions.add(task)
        task.add_done_callback(self._decisions.discard)
        return await asyncio.shield(task)

    async def _decide_and_audit(self, context: RequestContext, controller: ControllerNode, request: object) -> Any:
        """Goes on when its caller is gone: the decision is committed all the same, and the audit has its outcome."""
        try:
            async with asyncio.timeout(DECISION_WAIT_S):
                reply = await controller.submit(request)
        except (TimeoutError, TidelogError) as error:
            if not isinstance(error, TidelogError):
                error = RequestTimedOutError(f"not decided in {DECISION_WAIT_S} s; it may be done yet")
            self._guard.auditor.decided(context, request, error)
            raise error from None
        self._guard.auditor.decided(context, request, reply)
        return reply

    def read_cache(self, question: object) -> Any:
        """Return the reply of this node's copy, which may be old."""
        return QUERIES[type(question)](self._cache.image, question)

    async def prefer_active(self, asking: Coroutine[Any, Any, R]) -> tuple[R | None, int | None]:
        """Return (the answer of an active controller, None), or (None, age of this node's copy in ms)."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        task = loop.create_task(asking)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=STALE_POLL_S)
                if not task.done() and loop.time() - begun_s >= STALE_AFTER_S:
                    stale_ms = self._cache.stale_ms()
                    if stale_ms is not None:
                        return None, stale_ms
            return task.result(), None
        except TransportError:
            return None, self._cache.stale_ms() or 0
        finally:
            task.cancel()

    # Calls of services.

    def serve(self, call: ServiceCall[Q, R], handle: Callable[[RequestContext, Q], Awaitable[R]]) -> None:
        """Answer calls that other nodes forward to this one."""

        async def answer(sender: NodeId, data: bytes) -> bytes:
            context, request = self.accept(call, sender, data)
            return _reply(context, encode_message(await handle(context, request)))

        self._transport.serve(PREFIX + call.name, answer)

    def accept(self, call: ServiceCall[Q, Any], sender: NodeId, data: bytes) -> tuple[RequestContext, Q]:
        """Return a request that another node has forwarded, if that node and the client are allowed to send it."""
        context, body = self._receive(sender, data)
        self._guard.authorize(context, call.operation, CLUSTER)
        return context, decode_message(call.request, body, bytes_max=REQUEST_BYTES_MAX)

    def _receive(self, sender: NodeId, data: bytes) -> tuple[RequestContext, bytes]:
        """Authorize the node, and charge the client whose request it forwards."""
        node = RequestContext(Api.INTERNAL, Principal("Node", str(sender)), peer=f"node {sender}")
        self._guard.authorize(node, Operation.CLUSTER_ACTION, CLUSTER)
        context, body = decode_forwarded(sender, data)
        self._guard.charge(context)
        return context, body

    async def to_active(
        self,
        context: RequestContext,
        call: ServiceCall[Q, R],
        request: Q,
        run: Callable[[ControllerNode], Awaitable[R]],
        *,
        is_repeatable: bool,
        timeout_ms: int,
    ) -> R:
        """Return the active controller's answer: `run`, if that is this node."""
        name, body = PREFIX + call.name, encode_message(request)

        async def send(target: NodeId, call_ms: int) -> R:
            return decode_message(call.reply, await self._call(context, self._transport, target, name, body, call_ms))

        return await self._client.retry(
            send, is_repeatable=is_repeatable, timeout_ms=timeout_ms, own=self._cache.controller, run=run
        )

    async def to_broker(
        self,
        context: RequestContext,
        broker: NodeId,
        call: ServiceCall[Q, R],
        request: Q,
        *,
        timeout_ms: int,
        slack_ms: int = 0,
    ) -> R:
        """Return the answer of a broker, at the address that it has registered. The broker has `timeout_ms`, and the
        answer `slack_ms` more to arrive."""
        registration, controller = self._cache.image.brokers.get(broker), self._cache.controller
        address: str | None = None
        if self._brokers is None and controller is not None and registration is not None:
            address = controller.broker_address(registration)
        transport, body = self._brokers or self._transport, encode_message(request)
        name = PREFIX + call.name
        reply = await self._call(context, transport, broker, name, body, timeout_ms, address, slack_ms=slack_ms)
        return decode_message(call.reply, reply)

    async def _call(
        self,
        context: RequestContext,
        transport: Transport,
        node: NodeId,
        name: str,
        body: bytes,
        timeout_ms: int,
        address: str | None = None,
        *,
        slack_ms: int = 0,
    ) -> bytes:
        """Return the body of the reply; the other node's throttle adds to that of the request."""
        data = encode_forwarded(context, body, timeout_ms=timeout_ms)
        if address is None:
            reply = await transport.call(node, name, data, timeout_ms=timeout_ms + slack_ms)
        else:
            reply = await transport.call_at(node, address, name, data, timeout_ms=timeout_ms + slack_ms)
        context.throttle(int.from_bytes(reply[:_SIZE_BYTES], "big"))
        return reply[_SIZE_BYTES:]

    # Streams of services.

    def serve_stream(self, call: ServiceCall[Any, Any], handle: Callable[[Stream], Awaitable[None]]) -> None:
        """The handler passes the first frame of a stream to `accept`."""
        self._transport.serve_stream(PREFIX + call.name, handle)

    async def open_stream(
        self, context: RequestContext, call: ServiceCall[Q, Any], request: Q, *, timeout_ms: int
    ) -> Stream:
        """Open a stream to any controller and send the request; `timeout_ms` is for finding a controller."""

        async def send(target: NodeId, _call_ms: int) -> Stream:
            stream = await self._transport.open_stream(target, PREFIX + call.name)
            await stream.send(encode_forwarded(context, encode_message(request), timeout_ms=0))
            return stream

        return await self._client.retry(send, is_repeatable=True, timeout_ms=timeout_ms, own=self._cache.controller)


def _reply(context: RequestContext, body: bytes) -> bytes:
    return context.throttle_ms.to_bytes(_SIZE_BYTES, "big") + body
