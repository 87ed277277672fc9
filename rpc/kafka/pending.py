"""A request of a connection, from its arrival to its answer."""

from __future__ import annotations

import asyncio
from typing import Any

from tidelog.rpc.kafka.entries import Served
from tidelog.rpc.kafka.framing import Request
from tidelog.rpc.kafka.services import Later
from tidelog.rpc.kafka.slices import SLICED_FROM_BYTES
from tidelog.rpc.kafka.wire import Buffer


class Pending:
    """A request from its arrival to its answer."""

    __slots__ = (
        "answer",
        "answer_bytes",
        "correlation_id",
        "data",
        "encoding",
        "is_dropped",
        "is_sliced",
        "is_stopped",
        "key",
        "later",
        "object_bytes",
        "served",
        "since_s",
        "size",
        "task",
        "version",
    )

    def __init__(self, data: Request, size: int, since_s: float) -> None:
        self.data = data
        """Until it is decoded."""
        self.size = size
        self.is_sliced = size >= SLICED_FROM_BYTES
        """So large that it is decoded, and its answer encoded, in slices."""
        self.object_bytes = 0
        """That count in `Shared.objects`, until it is answered."""
        self.encoding: asyncio.Task[None] | None = None
        self.since_s = since_s
        self.served: Served | None = None
        self.key = self.version = self.correlation_id = 0
        self.answer: list[Buffer] | None = None
        """Set when it is done; empty where the protocol has no answer."""
        self.answer_bytes = 0
        self.task: asyncio.Task[Any] | None = None
        """Of its `Later`."""
        self.later: Later | None = None
        """The one that waits without a task."""
        self.is_stopped = False
        """Cancelled since the node stops."""
        self.is_dropped = False
        """Nobody waits for its answer."""

    @property
    def name(self) -> str:
        return "?" if self.served is None else self.served.api.name
