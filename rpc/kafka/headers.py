"""Frames and headers of Kafka's protocol. Pure.

    frame             size int32, then so many bytes
    request header    key int16, version int16, correlation id int32, client id nullable string (int16 length),
                      tagged fields when the version is flexible (header version 2, else 1)
    response header   correlation id int32, tagged fields when the version is flexible (header version 1, else 0)

The response to ApiVersions always has header version 0: a client reads it before it knows the broker's versions.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.messages import API_VERSIONS, APIS
from tidelog.rpc.kafka.wire import Buffer, MalformedError, skip_tags

_FIXED = Struct(">hhih")
_SIZE = Struct(">i")
_SIZE_CORRELATION = Struct(">ii")
_SIZE_CORRELATION_TAGS = Struct(">iix")
_CORRELATION = Struct(">i")
_JOINED_BYTES_MAX = 4096
"""A first buffer up to this size is copied behind the header: that is cheaper than one more buffer."""


class RequestHeader(NamedTuple):
    """`body` is the position of the message behind the header."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body: int


def read_request_header(data: Buffer, offset: int = 0) -> RequestHeader:
    """Reads the header of a request. An unknown key is read without tagged fields: its body cannot be read anyway."""
    end = len(data)
    if end - offset < _FIXED.size:
        raise MalformedError(f"a request of {end - offset} bytes has no header")
    key, version, correlation_id, length = _FIXED.unpack_from(data, offset)
    position = offset + _FIXED.size
    client_id: str | None
    if length == -1:
        client_id = None
    elif length < 0 or length > end - position:
        raise MalformedError(f"a client id of {length} bytes where {end - position} are left")
    else:
        try:
            client_id = str(data[position : position + length], "utf-8")
        except UnicodeDecodeError as problem:
            raise MalformedError(f"the client id is not UTF-8: {problem.reason}") from None
        position += length
    api = APIS.get(key)
    if api is not None and version >= api.flexible_since:
        if position == end:
            raise MalformedError("the header ends before its tagged fields")
        if data[position]:
            try:
                position = skip_tags(data, position, end)
            except IndexError:
                raise MalformedError("the header ends within its tagged fields") from None
        else:
            position += 1
    return RequestHeader(key, version, correlation_id, client_id, position)


def request_frame(
    api: Api[Any, Any], version: int, correlation_id: int, client_id: str | None, body: list[Buffer]
) -> list[Buffer]:
    """Returns a whole request; for test clients and benchmarks."""
    name = b"" if client_id is None else client_id.encode()
    header = _FIXED.pack(api.key, version, correlation_id, -1 if client_id is None else len(name)) + name
    if api.flexible(version):
        header += b"\0"
    return [_SIZE.pack(len(header) + sum(map(len, body))) + header, *body]


def response_frame(api: Api[Any, Any], version: int, correlation_id: int, body: list[Buffer]) -> list[Buffer]:
    """Returns a whole response: size, header and the buffers of `body`."""
    size = sum(map(len, body))
    if version >= api.flexible_since and api is not API_VERSIONS:
        head = _SIZE_CORRELATION_TAGS.pack(size + 5, correlation_id)
    else:
        head = _SIZE_CORRELATION.pack(size + 4, correlation_id)
    if body and len(body[0]) <= _JOINED_BYTES_MAX:
        return [head + body[0], *body[1:]]
    return [head, *body]


def read_response_header(api: Api[Any, Any], version: int, data: Buffer, offset: int = 0) -> tuple[int, int]:
    """Returns the correlation id and the position of the message; for test clients."""
    end = len(data)
    if end - offset < _CORRELATION.size:
        raise MalformedError(f"a response of {end - offset} bytes has no header")
    (correlation_id,) = _CORRELATION.unpack_from(data, offset)
    position = offset + _CORRELATION.size
    if version >= api.flexible_since and api is not API_VERSIONS:
        try:
            position = skip_tags(data, position, end)
        except IndexError:
            raise MalformedError("the header ends within its tagged fields") from None
    return correlation_id, position
