"""Describes who sends a request and how: API servers build it, services read it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tidelog.model.principals import ANONYMOUS, Principal


class Api(Enum):
    """The API through which a request arrived."""

    GRPC = "grpc"
    KAFKA = "kafka"
    HTTP = "http"
    INTERNAL = "internal"
    """Another node forwarded the request, or this node sends it to itself."""


THROTTLE_MS_MAX = 10_000
"""One request delays its client for at most this long: well below the request timeouts of clients."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request: its origin, its deadline, and how long quotas delay its client.

    Only `throttle_ms` changes. Frozen dataclasses are slow to create, and each request has one.
    """

    api: Api
    principal: Principal = ANONYMOUS
    listener: str = ""
    client_id: str = ""
    client_host: str = ""
    peer: str = ""
    """Address of the connection, for log lines."""
    deadline_s: float | None = None
    """Services stop waiting then, with REQUEST_TIMED_OUT; in the event loop's time. None: their own limits apply."""
    throttle_ms: int = 0
    """What was charged so far delays the client for this time. The API server applies and reports it."""

    def throttle(self, delay_ms: int) -> None:
        if delay_ms > self.throttle_ms:
            self.throttle_ms = min(delay_ms, THROTTLE_MS_MAX)


INTERNAL = RequestContext(api=Api.INTERNAL)
"""Requests of this node to itself."""
