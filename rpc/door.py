"""The table of the public API, and the doors behind it: one set of handlers, whatever carries the bytes.

    gRPC (`rpc.grpc_server`) ----.
                                  +--> METHODS --> Doors --> LogDoor, GroupsDoor, ClusterDoor, AdminDoor
    world.Transport (`serve`) ---'

`METHODS` is read from the compiled .proto files, so that it cannot differ from them. A handler is a method of a door:

    unary            async def name(self, request, caller) -> response
    server stream    async def name(self, request, caller, send) -> None       `await send(response)` for each of them
    both ways        async def name(self, receive, caller, send) -> None       `await receive()`: None at the end

It raises an error of the catalogue for the whole call. `send` waits while the client does not read.

Over a `Transport` a unary method is the call "v1/<Service>/<Method>" with protobuf bytes. A stream is the service of
that name, and its frames are

    0, message      a request or a response
    1, error        the call has failed (`encode_error`); the stream ends
    2               no more requests from this side

Nodes forward to each other under "forwarded/v1/...": there a handler answers for its own node or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from tidelog.model.errors import (
    InvalidRequestError,
    StreamBrokenError,
    StreamClosedError,
    TidelogError,
    UnsupportedVersionError,
)
from tidelog.model.ids import NodeId
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, groups_pb2, log_pb2
from tidelog.world.transport import Stream, Transport, decode_error, encode_error

if TYPE_CHECKING:
    from tidelog.rpc.admin_door import AdminDoor
    from tidelog.rpc.cluster_door import ClusterDoor
    from tidelog.rpc.groups_door import GroupsDoor
    from tidelog.rpc.log_door import LogDoor

LOGGER = logging.getLogger(__name__)

PACKAGE = "tidelog.v1"
FORWARDED = "forwarded/"
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


class Kind(Enum):
    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BOTH_WAYS = "both ways"


@dataclass(frozen=True, slots=True)
class Method:
    service: str
    name: str
    kind: Kind
    request: type[Message]
    response: type[Message]
    handler: str
    """The name of the door's method."""

    @property
    def full_name(self) -> str:
        return f"{PACKAGE}.{self.service}/{self.name}"

    @property
    def path(self) -> str:
        """Of gRPC."""
        return f"/{self.full_name}"

    @property
    def wire_name(self) -> str:
        """Over a `Transport`."""
        return f"v1/{self.service}/{self.name}"

    def parse(self, data: bytes) -> Any:
        """A request; `InvalidRequestError` for bytes that are none."""
        try:
            return self.request.FromString(data)
        except DecodeError as error:
            raise InvalidRequestError(f"{self.service}.{self.name}: not a {self.request.DESCRIPTOR.name}") from error


def _method(found: MethodDescriptor) -> Method:
    assert not found.client_streaming or found.server_streaming, "no method streams requests only"
    kind = Kind.BOTH_WAYS if found.client_streaming else Kind.SERVER_STREAM if found.server_streaming else Kind.UNARY
    return Method(
        found.containing_service.name,
        found.name,
        kind,
        message_factory.GetMessageClass(found.input_type),
        message_factory.GetMessageClass(found.output_type),
        _WORD.sub("_", found.name).lower(),
    )


SERVICES = tuple(
    service
    for file in (log_pb2.DESCRIPTOR, groups_pb2.DESCRIPTOR, cluster_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
)
METHODS: dict[str, Method] = {
    method.full_name: method for service in SERVICES for method in map(_method, service.methods)
}
"""By full name: `tidelog.v1.Log/Produce`."""


def method_named(service: str, name: str) -> Method:
    return METHODS[f"{PACKAGE}.{service}/{name}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and through which listener."""

    listener: str = ""
    peer: str = ""
    is_node: bool = False
    """Another node has forwarded this: answer for this node, and do not forward it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What a node serves; a node without the role `broker` has no log and no groups."""

    cluster: ClusterDoor
    admin: AdminDoor
    log: LogDoor | None = None
    groups: GroupsDoor | None = None

    def handler(self, method: Method) -> Callable[..., Awaitable[Any]]:
        """Raises `UnsupportedVersionError` if this node does not serve it."""
        door = self.of(method.service)
        if door is None:
            where = self.cluster.brokers_told()
            raise UnsupportedVersionError(
                f"{method.service}.{method.name} is served by brokers, this node is a controller only; {where}"
            )
        found: Callable[..., Awaitable[Any]] = getattr(door, method.handler)
        return found

    def of(self, service: str) -> object | None:
        """None: not here."""
        return {"Log": self.log, "Groups": self.groups, "Cluster": self.cluster, "Admin": self.admin}[service]


# Over a `Transport`.

_MESSAGE, _ERROR, _END = b"\0", b"\1", b"\2"


def encode_message(message: Message) -> bytes:
    return _MESSAGE + message.SerializeToString()


def encode_failure(error: TidelogError) -> bytes:
    return _ERROR + encode_error(error)


END_OF_REQUESTS = _END


def decode_request_frame(method: Method, frame: bytes) -> Any:
    """The request, or None at the end of them."""
    if frame[:1] == _MESSAGE:
        return method.parse(frame[1:])
    if frame == _END:
        return None
    raise InvalidRequestError(f"{method.wire_name}: a frame that is no request")


def decode_response_frame(method: Method, frame: bytes) -> Any:
    """The response; raises the error that it holds."""
    if frame[:1] == _MESSAGE:
        return method.response.FromString(frame[1:])
    if frame[:1] == _ERROR:
        raise decode_error(frame[1:])
    raise InvalidRequestError(f"{method.wire_name}: a frame that is no response")


def serve(transport: Transport, doors: Doors, *, listener: str) -> None:
    """The whole API over a transport, for clients of the simulator. `listener` is what its callers came through."""
    for method in METHODS.values():
        _serve(transport, doors, method, method.wire_name, lambda node: Caller(listener=listener, peer=f"node {node}"))


def serve_forwarded(transport: Transport, doors: Doors) -> None:
    """What other nodes ask on behalf of their clients. Every node serves it on its inter-node transport."""
    for method in METHODS.values():
        if method.service not in ("Log", "Groups"):
            name = FORWARDED + method.wire_name
            _serve(transport, doors, method, name, lambda node: Caller(peer=f"node {node}", is_node=True))


def _serve(
    transport: Transport, doors: Doors, method: Method, name: str, caller_of: Callable[[NodeId], Caller]
) -> None:
    if method.kind is Kind.UNARY:

        async def answer(node: NodeId, data: bytes) -> bytes:
            handler = doors.handler(method)
            response: Message = await handler(method.parse(data), caller_of(node))
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
            handler, caller = doors.handler(method), caller_of(stream.peer)
            if method.kind is Kind.BOTH_WAYS:
                await handler(receive, caller, send)
            elif (request := await receive()) is not None:
                running = asyncio.ensure_future(handler(request, caller, send))
                watching = asyncio.get_running_loop().create_task(_end_with(stream, running))
                await asyncio.wait([running])
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
                stream.close()  # in order, and it ends `watching`; to cancel that would break the stream

    transport.serve_stream(name, answer_stream)


async def _end_with(stream: Stream, running: asyncio.Future[None]) -> None:
    """End what only sends when its peer is gone: it may have nothing to send for a long time."""
    try:
        while True:
            await stream.receive()  # the end of its requests; there is nothing else for it to say
    except (StreamBrokenError, StreamClosedError):
        running.cancel()


async def _fail(stream: Stream, error: TidelogError) -> None:
    try:
        await stream.send(encode_failure(error))
    except StreamBrokenError:
        LOGGER.info("peer=%d was gone before it heard: %s", stream.peer, error)
