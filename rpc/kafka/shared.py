"""What the connections of the Kafka door have in common: limits, memory, counters, the table of handlers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidelog.rpc.first_bytes import Speech
from tidelog.rpc.kafka import slices
from tidelog.rpc.kafka.api import Api
from tidelog.rpc.kafka.dispatch import Table
from tidelog.rpc.kafka.pending import Pending
from tidelog.rpc.kafka.seldom import Seldom
from tidelog.rpc.kafka.services import KafkaServices
from tidelog.rpc.kafka.slices import ObjectMemory
from tidelog.rpc.kafka.wire import Buffer
from tidelog.rpc.limits import DoorLimits, RequestMemory, ResponseMemory

LOGGER = logging.getLogger("tidelog.rpc.kafka")

READ_BYTES = 256 << 10
"""Read at once, over all connections in the same place."""


@dataclass(slots=True)
class ApiCounts:
    requests: int = 0
    errors: int = 0
    """Requests that were answered with an error as a whole; errors of single partitions or groups are not here."""
    seconds: float = 0.0
    """From their arrival until their answer was made."""


@dataclass(slots=True)
class Counts:
    """For metrics."""

    accepted: int = 0
    refused: int = 0
    """Connections past `max.connections` or `max.connections.per.ip`."""
    ended_slow: int = 0
    """Connections ended since a request did not arrive, or an answer was not taken."""
    ended_idle: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    malformed: int = 0
    """Requests that were none, or of an api or version that is not served."""
    strangers: dict[str, int] = field(default_factory=dict)
    """Connections that spoke something else, by what it was."""
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
    """Of one connection, without an answer."""
    answer_bytes_max: int = 1 << 20
    """Of one connection, ready and behind an older request that is not."""
    answer_stall_ms: int = 60_000
    backlog: int = 1_024
    """`socket.listen.backlog.size`."""
    send_buffer_bytes: int = -1
    """`socket.send.buffer.bytes`; -1 leaves it to the kernel, which adapts it."""
    receive_buffer_bytes: int = -1
    """`socket.receive.buffer.bytes`."""


@dataclass(slots=True, eq=False, kw_only=True)
class Shared:
    """What all connections of a broker have in common."""

    services: KafkaServices
    table: Table
    requests: RequestMemory
    responses: ResponseMemory
    limits: DoorLimits
    sockets: SocketLimits
    counts: Counts
    doors: Mapping[Speech, str]
    """Where clients belong that speak something else, in words."""
    objects: ObjectMemory = field(default_factory=ObjectMemory)
    seldom: Seldom = field(default_factory=lambda: Seldom(LOGGER))
    read: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))

    def is_single(self, request: bytes | memoryview) -> bool:
        """Whether its api is one of which a connection has one at a time; of what is no request, no."""
        served = self.table.get(int.from_bytes(request[:2], "big", signed=True))
        return served is not None and served.is_single

    async def decode_in_slices(self, api: Api[Any, Any], pending: Pending, data: Buffer, offset: int) -> Any | None:
        """The request, whose objects count until `give_back`; None if it was dropped meanwhile."""
        request, object_bytes = await slices.decode(api, pending.version, data, offset, self.objects)
        if pending.is_dropped:
            self.objects.give_back(object_bytes)
            return None
        pending.object_bytes = object_bytes
        pending.size += self.requests.add(object_bytes)
        return request

    def give_back(self, pending: Pending) -> None:
        """The request is answered or dropped: its memory is free."""
        self.requests.give_back(pending.size)
        if pending.object_bytes:
            self.objects.give_back(pending.object_bytes)
