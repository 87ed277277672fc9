"""What the handlers of the Kafka API use: services, and the connection of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tidelog.model.principals import ANONYMOUS, Principal
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.services.context import Api, RequestContext
from tidelog.services.limits import RequestLimits, ResponseMemory
from tidelog.services.services import BrokerServices


class ConnectionMemory:
    """One connection's part of the `ResponseMemory`; a `ReadMemory` for its fetches.

    `queued` counts the bytes of responses that the client has not read, `reading` those of fetches in progress. Their
    sum stays below `fetch_bytes_max`, except for `fetch_bytes_min` (or one batch) of each fetch: a client that requests
    much and reads nothing takes no more of the node than one that requests once.
    """

    __slots__ = ("_limits", "_responses", "queued", "reading")

    def __init__(self, responses: ResponseMemory, limits: RequestLimits) -> None:
        self._responses = responses
        self._limits = limits
        self.queued = 0
        self.reading = 0

    def take(self, asked: int) -> int:
        limits = self._limits
        left = limits.fetch_bytes_max - self.queued - self.reading
        taken = self._responses.take(min(asked, max(limits.fetch_bytes_min, left)))
        self.reading += taken
        return taken

    def give_back(self, size: int) -> None:
        self.reading -= size
        self._responses.give_back(size)

    def set_queued(self, size: int) -> None:
        self._responses.give_back(self.queued - size)
        self.queued = size


@dataclass(slots=True, eq=False, kw_only=True)
class Origin:
    """The connection of a request."""

    listener: str
    """Name of the listener, whose endpoints the client gets."""
    peer: str
    """host:port."""
    host: str
    memory: ConnectionMemory
    """For `FetchService.fetch`."""
    fetch_sessions: FetchSessions
    """Of the broker."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that handlers keep for the connection; each handler bounds its own."""
    principal: Principal = ANONYMOUS


class Context:
    """One request of a connection. No dataclass: each request has one, and this is faster to create."""

    __slots__ = ("connection", "correlation_id", "request", "services", "version")

    def __init__(
        self,
        services: BrokerServices,
        origin: Origin,
        version: int,
        correlation_id: int,
        client_id: str | None,
        deadline_s: float | None = None,
    ) -> None:
        self.services = services
        self.connection = origin
        self.version = version
        self.correlation_id = correlation_id
        self.request = RequestContext(
            Api.KAFKA, origin.principal, origin.listener, client_id or "", origin.host, origin.peer, deadline_s
        )
        """For the services."""

    @property
    def listener(self) -> str:
        return self.connection.listener

    @property
    def memory(self) -> ConnectionMemory:
        return self.connection.memory


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class DeferredResponse:
    """A handler returns it to let the next request of its connection begin: `respond` makes the response meanwhile.

    `abandon` is called once in every case, also if `respond` did not begin or was cancelled. `taskless` replaces
    `respond` if the response only waits for a callback.
    """

    respond: Callable[[], Coroutine[Any, Any, Any]]
    abandon: Callable[[], None] = _nothing
    taskless: TasklessResponse | None = None


@dataclass(slots=True, eq=False)
class TasklessResponse:
    """A response that needs no task to wait in.

    `on_done` registers a callback that runs once, in a later turn of the loop, and never after `abandon`; then `make`
    returns the response. Not for an API with `on_stop`: it cannot be cancelled.
    """

    on_done: Callable[[Callable[[], None]], None]
    make: Callable[[], Any]


Handle = Callable[[Any, Context], Awaitable[Any]]
"""(request, context) -> a response, a `DeferredResponse`, or None where the protocol has no response (Produce with
acks=0)."""
