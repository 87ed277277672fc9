"""The table of the public API's methods, and their messages over a `Transport`.

`METHODS` is read from the compiled .proto files, so that it cannot differ from them.

Over a `Transport` a unary method is the call "v1/<Service>/<Method>" with protobuf bytes. A stream is the service of
that name, and its frames are

    0, message      a request or a response
    1, error        the call has failed (`encode_error`); the stream ends
    2               no more requests from this side
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message

from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.rpc.v1 import admin_pb2, cluster_pb2, groups_pb2, log_pb2, transactions_pb2
from tidelog.world.transport import decode_error, encode_error

PACKAGE = "tidelog.v1"
PARTITIONS_MAX = 10_000
"""Partitions that one request names. Clients split larger ones (`Method.parts`)."""
_COUNTED = ("partitions", "offsets", "replicas")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]


class Kind(Enum):
    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDIRECTIONAL = "both ways"


@dataclass(frozen=True, slots=True)
class Method:
    service: str
    name: str
    kind: Kind
    request: type[Message]
    response: type[Message]
    handler: str
    """Name of the method that handles it."""
    counted: str
    """The field of the request that has a row for each partition; empty if there is none."""

    @property
    def full_name(self) -> str:
        return f"{PACKAGE}.{self.service}/{self.name}"

    @property
    def path(self) -> str:
        """The path in gRPC."""
        return f"/{self.full_name}"

    @property
    def wire_name(self) -> str:
        """The name over a `Transport`."""
        return f"v1/{self.service}/{self.name}"

    def parse(self, data: bytes) -> Any:
        """Returns the request; raises `InvalidRequestError` for other bytes."""
        try:
            request = self.request.FromString(data)
        except DecodeError as error:
            raise InvalidRequestError(f"{self.service}.{self.name}: not a {self.request.DESCRIPTOR.name}") from error
        if self.counted and len(getattr(request, self.counted)) > PARTITIONS_MAX:
            count = len(getattr(request, self.counted))
            raise InvalidRequestError(
                f"{self.service}.{self.name}: {count} {self.counted} in one request; at most {PARTITIONS_MAX}: split it"
            )
        return request

    def parts(self, request: Message) -> Iterator[Message]:
        """Yields requests with at most `PARTITIONS_MAX` partitions; `MergeFrom` makes one response of theirs."""
        rows = getattr(request, self.counted) if self.counted else ()
        if len(rows) <= PARTITIONS_MAX:
            yield request
            return
        for start in range(0, len(rows), PARTITIONS_MAX):
            part = self.request()
            part.CopyFrom(request)
            part.ClearField(self.counted)
            getattr(part, self.counted).extend(rows[start : start + PARTITIONS_MAX])
            yield part


def _method(descriptor: MethodDescriptor) -> Method:
    assert not descriptor.client_streaming or descriptor.server_streaming, "no method streams requests only"
    kind = (
        Kind.BIDIRECTIONAL
        if descriptor.client_streaming
        else Kind.SERVER_STREAM
        if descriptor.server_streaming
        else Kind.UNARY
    )
    return Method(
        descriptor.containing_service.name,
        descriptor.name,
        kind,
        message_factory.GetMessageClass(descriptor.input_type),
        message_factory.GetMessageClass(descriptor.output_type),
        _WORD.sub("_", descriptor.name).lower(),
        next((field.name for field in descriptor.input_type.fields if _has_row_for_partition(field)), ""),
    )


def _has_row_for_partition(field: FieldDescriptor) -> bool:
    return field.name in _COUNTED and field.is_repeated and field.message_type is not None


SERVICES = tuple(
    service
    for file in (log_pb2, groups_pb2, transactions_pb2, cluster_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
METHODS: dict[str, Method] = {
    method.full_name: method for service in SERVICES for method in map(_method, service.methods)
}
"""By full name: `tidelog.v1.Log/Produce`."""


def method_named(service: str, name: str) -> Method:
    return METHODS[f"{PACKAGE}.{service}/{name}"]


# Frames.

_MESSAGE, _ERROR, _END = b"\0", b"\1", b"\2"


def encode_message(message: Message) -> bytes:
    return _MESSAGE + message.SerializeToString()


def encode_failure(error: TidelogError) -> bytes:
    return _ERROR + encode_error(error)


END_OF_REQUESTS = _END


def decode_request_frame(method: Method, frame: bytes) -> Any:
    """Returns the request, or None at their end."""
    if frame[:1] == _MESSAGE:
        return method.parse(frame[1:])
    if frame == _END:
        return None
    raise InvalidRequestError(f"{method.wire_name}: the frame is no request")


def decode_response_frame(method: Method, frame: bytes) -> Any:
    """Returns the response, or raises the error in it."""
    if frame[:1] == _MESSAGE:
        return method.response.FromString(frame[1:])
    if frame[:1] == _ERROR:
        raise decode_error(frame[1:])
    raise InvalidRequestError(f"{method.wire_name}: the frame is no response")
