"""How the client reaches a node: one call, or one exchange of many messages, to an address.

Contract, for gRPC (`grpc_connections`) and for the simulator alike:

- An error of the catalogue that the node has answered is a `RemoteError`, and a fact about the call.
- `UnreachableError`: there was no connection, and nothing was carried out. Any other `TransportError`: the call was
  sent, and may have been carried out.
- Messages of one exchange arrive in order. An exchange that breaks has lost some suffix of what was sent, both ways.
- One task sends and one receives on an exchange at a time. `close` may be called by anybody, more than once, and ends
  both with `StreamBrokenError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from google.protobuf.message import Message

from tidelog.rpc.grpc.methods import Method


class Encodable(Protocol):
    """A message, or what has a message's bytes."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802 - as messages have it


class Exchange(Protocol):
    """A call that streams responses, and perhaps requests."""

    async def send(self, request: Encodable) -> None:
        """Only of a method that streams both ways; waits while the node does not read."""
        ...

    async def receive(self) -> Any:
        """The next response; raises `StreamClosedError` when the node has ended the call in order."""
        ...

    def close(self) -> None: ...


class Connections(Protocol):
    async def call(self, address: str, method: Method, request: Message, *, timeout_ms: int) -> Any:
        """The response."""
        ...

    async def open(self, address: str, method: Method, request: Message | None = None) -> Exchange:
        """`request` is the one request of a method that streams responses only."""
        ...

    async def close(self) -> None:
        """Ends everything that is open."""
        ...


async def call_in_parts(method: Method, request: Message, call: Callable[[Message], Awaitable[Any]]) -> Any:
    """Return one response of all parts of a request that names more partitions than a node accepts at once. They are
    sent one after the other; an error of one is raised, and those before it are done."""
    response: Any = None
    for part in method.parts(request):
        answer = await call(part)
        if response is None:
            response = answer
        else:
            response.MergeFrom(answer)
    return response
