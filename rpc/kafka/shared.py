"""State that all connections of the Kafka API share: limits, memory, counters, the table of handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.rpc.kafka import slices
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.dispatch import Table
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.rpc.kafka.pending import Pending
from tidelog.rpc.kafka.slices import ObjectMemory
from tidelog.rpc.kafka.wire import Buffer
from tidelog.rpc.protocol_sniffing import WireProtocol
from tidelog.services.limits import RequestLimits, RequestMemory, ResponseMemory
from tidelog.services.services import BrokerServices

LOGGER = logging.getLogger("tidelog.rpc.kafka")

READ_BYTES = 256 << 10
"""Size of the read buffer that all connections share."""
LOG_EVERY_S = 10.0
LINE_LENGTH_MAX = 1_000


@dataclass(slots=True)
class ApiCounts:
    requests: int = 0
    errors: int = 0
    """Requests with an error of the whole response; errors of partitions or groups do not count."""
    seconds: float = 0.0
    """From arrival to response."""


@dataclass(slots=True)
class Counts:
    """For metrics."""

    accepted: int = 0
    rejected: int = 0
    """Connections over `max.connections` or `max.connections.per.ip`."""
    ended_slow: int = 0
    """Connections closed because a request did not arrive, or a response was not read."""
    ended_idle: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    malformed: int = 0
    """Malformed requests, and requests of an API or version that is not served."""
    other_protocols: dict[str, int] = field(default_factory=dict)
    """Connections by their other protocol."""
    apis: dict[str, ApiCounts] = field(default_factory=dict)

    def of(self, name: str) -> ApiCounts:
        found = self.apis.get(name)
        if found is None:
            found = self.apis[name] = ApiCounts()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketLimits:
    idle_ms: int = 600_000
    """`connections.max.idle.ms`."""
    connections_max: int = 10_000
    """`max.connections`, over all listeners."""
    connections_per_ip_max: int = 10_000
    """`max.connections.per.ip`."""
    requests_max: int = 128
    """Unanswered requests of one connection."""
    response_bytes_max: int = 1 << 20
    """Bytes of a connection's responses that wait behind an older request."""
    response_stall_ms: int = 60_000
    backlog: int = 1_024
    """`socket.listen.backlog.size`."""
    send_buffer_bytes: int = -1
    """`socket.send.buffer.bytes`; -1: the kernel adapts it."""
    receive_buffer_bytes: int = -1
    """`socket.receive.buffer.bytes`."""


class RateLimitedLog:
    """Limits log lines that clients cause: one of each kind every `LOG_EVERY_S`, with the count. Kinds are few."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged_s: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        """Lines of each kind, logged or suppressed."""

    def warn(self, kind: str, message: str, *values: object) -> None:
        self.counts[kind] = count = self.counts.get(kind, 0) + 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_s[kind] = now_s
            # Clients cannot break out of their line.
            text = "".join(char if char.isprintable() else "?" for char in (message % values)[:LINE_LENGTH_MAX])
            self._logger.warning("%s (%d so far)", text, count)


@dataclass(slots=True, eq=False, kw_only=True)
class Shared:
    services: BrokerServices
    fetch_sessions: FetchSessions
    table: Table
    requests: RequestMemory
    responses: ResponseMemory
    limits: RequestLimits
    sockets: SocketLimits
    counts: Counts
    other_ports: Mapping[WireProtocol, str]
    """Says where clients of another protocol connect."""
    objects: ObjectMemory = field(default_factory=ObjectMemory)
    rate_limited_log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(LOGGER))
    read: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))

    def is_single(self, request: bytes | memoryview) -> bool:
        """Whether a connection handles one request of this API at a time; False for what is no request."""
        served = self.table.get(int.from_bytes(request[:2], "big", signed=True))
        return served is not None and served.is_single

    def count_malformed(self, kind: str, peer: str, why: str) -> None:
        self.counts.malformed += 1
        self.rate_limited_log.warn(kind, "peer=%s %s: closing it", peer, why)

    async def decode_in_slices(self, api: Api[Any, Any], pending: Pending, data: Buffer, offset: int) -> Any | None:
        """Returns the request, whose objects count until `give_back`; None if it was dropped meanwhile."""
        request, object_bytes = await slices.decode(api, pending.version, data, offset, self.objects)
        if pending.is_dropped:
            self.objects.give_back(object_bytes)
            return None
        pending.object_bytes = object_bytes
        pending.size += self.requests.add(object_bytes)
        return request

    def give_back(self, pending: Pending) -> None:
        """Frees the memory of a request that is answered or dropped."""
        self.requests.give_back(pending.size)
        if pending.object_bytes:
            self.objects.give_back(pending.object_bytes)
