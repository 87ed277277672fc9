"""The network as the code sees it: calls and streams to a node by its id.

Contract, for the real one (`rpc.transport`), the one inside of a process (`world.local_transport`) and the simulated
one alike:

- A stream is bidirectional, framed and ordered, and breaks as a whole: what was sent and not yet received may be lost,
  and only a suffix of it. Streams are not ordered among each other. Frames are not empty.
- `send` waits while the bounded window is full; a peer that does not read holds up its sender, nobody else. Cancelling
  a `send` or `receive` breaks the stream.
- A break is noticed when it happens: `receive` raises at once when the peer's process is gone. A peer that falls silent
  without breaking is noticed by the transport after some seconds; who needs to know sooner has its own timeout.
- One task receives and one task sends on a stream at a time.
- A handler's stream lives as long as the handler: returning closes it in order, raising breaks it.
- Who calls is who it says it is: the transport gives `node` and `stream.peer` from what the connection proves, and
  refuses a caller of another cluster (`WrongClusterError`), or an answerer that is not the node that was meant.
- An error of the catalogue that a handler raises reaches the caller as a `RemoteError` with the same code, message and
  facts (`encode_error`, `decode_error`); any other exception of a handler is our own error: it is logged there, and the
  caller sees UNKNOWN_SERVER_ERROR.
- Messages and frames are at most `FRAME_BYTES_MAX` bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgpack

from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.ids import NodeId

FRAME_BYTES_MAX = 64 << 20

Fact = int | str | bytes | bool | None


class Stream(Protocol):
    """One stream; closing is idempotent, and what was sent before is still delivered."""

    @property
    def peer(self) -> NodeId: ...

    async def send(self, data: bytes) -> None:
        """Raises `StreamBrokenError`, also when it is closed on this side."""
        ...

    async def receive(self) -> bytes:
        """The next frame; raises `StreamBrokenError`, or `StreamClosedError` when the peer has closed in order."""
        ...

    def close(self) -> None: ...


CallHandler = Callable[[NodeId, bytes], Awaitable[bytes]]
StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    @property
    def me(self) -> NodeId: ...

    async def call(self, node: NodeId, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        """Raises `TransportError` (unreachable, timed out, broken: the call may have happened) or `RemoteError`."""
        ...

    async def call_at(self, node: NodeId, address: str, method: str, request: bytes, *, timeout_ms: int) -> bytes:
        """As `call`, over a new connection to this address, which is used for nothing else and not remembered. Raises
        `WrongClusterError` if another node answers there."""
        ...

    async def open_stream(self, node: NodeId, service: str) -> Stream:
        """Returns when the peer has accepted it; raises `TransportError` or `RemoteError`."""
        ...

    def serve(self, method: str, handler: CallHandler) -> None:
        """Before or after `start`; a method has one handler."""
        ...

    def serve_stream(self, service: str, handler: StreamHandler) -> None: ...

    def set_address(self, node: NodeId, address: str) -> None:
        """Where to reach a node from now on, as `host:port`. Open streams to an old address are left alone."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Break what is open, end the handlers."""
        ...


def encode_error(error: TidelogError) -> bytes:
    """An error of the catalogue for the way back: `["error", 1, {name, message, facts}]`."""
    facts: dict[str, Fact] = {
        name: value
        for name, value in sorted(getattr(error, "__dict__", {}).items())
        if not name.startswith("_") and isinstance(value, int | str | bytes | bool | None)
    }
    if isinstance(error, RemoteError):
        facts = dict(error.facts)
    return bytes(msgpack.packb(["error", 1, {"name": error.code.name, "message": str(error), "facts": facts}]))


def decode_error(data: bytes) -> RemoteError:
    """What `encode_error` wrote; a code that this node does not know is UNKNOWN_SERVER_ERROR."""
    try:
        _kind, _version, fields = msgpack.unpackb(data)
        name, message, facts = str(fields["name"]), str(fields["message"]), dict(fields["facts"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        return RemoteError(f"an answer that cannot be read: {error}", code=ErrorCode.UNKNOWN_SERVER_ERROR)
    code = ErrorCode.__members__.get(name, ErrorCode.UNKNOWN_SERVER_ERROR)
    return RemoteError(message, code=code, facts=facts)
