"""The transport protocol: calls and streams to a node by its id.

Contract of the gRPC one (`rpc.grpc.transport`), the one inside of a process (`world.local_transport`) and the simulated
one:

- A stream is bidirectional, framed and ordered, and breaks as a whole: what was sent and not yet received may be lost,
  and only a suffix of it. Streams are not ordered among each other. Frames are not empty.
- `send` waits while the bounded window is full: a peer that does not read blocks only its sender. Cancelling a `send`
  or `receive` breaks the stream.
- `receive` raises at once when the peer's process dies. The transport detects a silent peer after some seconds; callers
  that need to know sooner use a timeout of their own.
- One task receives and one task sends on a stream at a time.
- A handler's stream lives as long as the handler: returning closes it in order, raising breaks it.
- The transport authenticates peers: `node` and `stream.peer` are what the connection proves. It rejects peers of
  another cluster, and a peer that is not the intended node (`WrongClusterError`).
- A catalogue error that a handler raises reaches the caller as a `RemoteError` with the same code, message and facts
  (`encode_error`, `decode_error`). Any other exception of a handler is a bug: the handler's node logs it, and the
  caller gets UNKNOWN_SERVER_ERROR.
- Messages and frames have at most `FRAME_BYTES_MAX` bytes.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgpack

from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.ids import NodeId

FRAME_BYTES_MAX = 64 << 20

Fact = int | str | bytes | bool | None


class Stream(Protocol):
    """One stream. Closing is idempotent and delivers what was sent before."""

    @property
    def peer(self) -> NodeId: ...

    async def send(self, data: bytes) -> None:
        """Sends a frame. Raises `StreamBrokenError`, also if this side has closed the stream."""
        ...

    async def receive(self) -> bytes:
        """Returns the next frame. Raises `StreamBrokenError`, or `StreamClosedError` if the peer has closed the
        stream."""
        ...

    def close(self) -> None: ...


CallHandler = Callable[[NodeId, bytes], Awaitable[bytes]]
StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    @property
    def me(self) -> NodeId: ...

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        """Returns the response. Raises `TransportError` (unreachable, timed out, broken: the call may have executed) or
        `RemoteError`."""
        ...

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        """Like `call`, over a new connection to this address, which is closed afterwards. Raises `WrongClusterError` if
        another node listens there."""
        ...

    async def open_stream(self, node: NodeId, service: str) -> Stream:
        """Opens a stream; returns when the peer has accepted it. Raises `TransportError` or `RemoteError`."""
        ...

    def serve(self, method: str, handler: CallHandler) -> None:
        """Registers the handler of a method, before or after `start`. A method has one handler."""
        ...

    def serve_stream(self, service: str, handler: StreamHandler) -> None: ...

    def set_address(self, node: NodeId, address: str) -> None:
        """Sets the address (`host:port`) of a node for new connections. Open streams stay."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Breaks open streams and cancels the handlers."""
        ...


def encode_error(error: TidelogError) -> bytes:
    """Encodes a catalogue error as `["error", 1, {name, message, facts}]`."""
    facts: dict[str, Fact] = {
        name: value
        for name, value in sorted(getattr(error, "__dict__", {}).items())
        if not name.startswith("_") and isinstance(value, int | str | bytes | bool | None)
    }
    if isinstance(error, RemoteError):
        facts = dict(error.facts)
    return bytes(msgpack.packb(["error", 1, {"name": error.code.name, "message": str(error), "facts": facts}]))


def decode_error(data: bytes) -> RemoteError:
    """Decodes what `encode_error` wrote; an unknown code becomes UNKNOWN_SERVER_ERROR."""
    try:
        _kind, _version, fields = msgpack.unpackb(data)
        name, message, facts = str(fields["name"]), str(fields["message"]), dict(fields["facts"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        return RemoteError(f"the response of a peer is unreadable: {error}", code=ErrorCode.UNKNOWN_SERVER_ERROR)
    code = ErrorCode.__members__.get(name, ErrorCode.UNKNOWN_SERVER_ERROR)
    return RemoteError(message, code=code, facts=facts)
