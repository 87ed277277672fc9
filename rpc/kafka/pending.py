"""A request of a connection, from its arrival to its response."""

from __future__ import annotations

import asyncio
from typing import Any

from tidelog.rpc.kafka.entries import Served
from tidelog.rpc.kafka.framing import Request
from tidelog.rpc.kafka.services import DeferredResponse
from tidelog.rpc.kafka.slices import SLICED_FROM_BYTES
from tidelog.rpc.kafka.wire import Buffer
from tidelog.services.context import RequestContext


class Pending:
    __slots__ = (
        "correlation_id",
        "data",
        "deferred",
        "encoding",
        "frame",
        "is_dropped",
        "is_sliced",
        "is_stopped",
        "key",
        "object_bytes",
        "request",
        "response_bytes",
        "served",
        "since_s",
        "size",
        "task",
        "version",
    )

    def __init__(self, data: Request, size: int, since_s: float) -> None:
        self.data = data
        """Empty once decoded."""
        self.size = size
        self.is_sliced = size >= SLICED_FROM_BYTES
        """A large request is decoded, and its response encoded, in slices."""
        self.object_bytes = 0
        """Bytes of its decoded objects, counted in `Shared.objects` until the response."""
        self.encoding: asyncio.Task[None] | None = None
        self.since_s = since_s
        self.served: Served | None = None
        self.request: RequestContext | None = None
        """Set once decoded; services set its throttle."""
        self.key = self.version = self.correlation_id = 0
        self.frame: list[Buffer] | None = None
        """The encoded response, when the request is done; empty where the protocol has none."""
        self.response_bytes = 0
        self.task: asyncio.Task[Any] | None = None
        """Runs `DeferredResponse.respond`."""
        self.deferred: DeferredResponse | None = None
        """Set while it waits for a callback instead of a task."""
        self.is_stopped = False
        """Whether the stop of the node cancelled it."""
        self.is_dropped = False
        """Whether nobody waits for its response."""

    @property
    def name(self) -> str:
        return "?" if self.served is None else self.served.api.name
