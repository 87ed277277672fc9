"""The Kafka API server: its listeners and their connections.

    start --> accepts; a timer checks every connection (`CHECK_S`) --> close: accepts no more, answers begun requests
    within the grace, ends long polls with an error, then aborts the rest

A connection over `max.connections` or `max.connections.per.ip` is closed at once and logged. While others wait for
memory, each check closes the slowest connection that has memory and sends less than `BYTES_PER_SECOND_MIN`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidelog.rpc.kafka.connection import Connection
from tidelog.rpc.kafka.shared import Shared
from tidelog.rpc.kafka.timeouts import BYTES_PER_SECOND_MIN

LOGGER = logging.getLogger(__name__)

CHECK_S = 1.0
CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    name: str
    """Clients get the advertised endpoints of this name, such as `KAFKA`."""
    host: str
    """Empty for every interface."""
    port: int
    """0 takes a free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Acceptor(Protocol):
    """Accepts connections for a server: on sockets (`sockets.Sockets`), or from the simulated network."""

    async def listen(self, listener: Listener, new_protocol: Callable[[], asyncio.BufferedProtocol]) -> int:
        """Connects each accepted transport to a new protocol, as asyncio's servers do. Returns the port. Raises
        `TransportError` if it cannot listen there."""
        ...

    def close(self) -> None:
        """Accepts no more; open connections stay. Idempotent."""
        ...


class KafkaServer:
    """`start`, then `close`. Used on one event loop."""

    def __init__(self, shared: Shared, listeners: Sequence[Listener], acceptor: Acceptor) -> None:
        self.shared = shared
        self.ports: dict[str, int] = {}
        """Ports by listener, after `start`."""
        self._listeners = tuple(listeners)
        self._acceptor = acceptor
        self._connections: dict[Connection, None] = {}
        self._of_host: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        """Set from `close` on, which rejects new connections; done when no connection is left."""

    # Start and stop.

    async def start(self) -> None:
        """Raises `TransportError` if an address is in use or not local."""
        try:
            for listener in self._listeners:
                await self._listen(listener)
        except BaseException:
            await self.close(grace_s=0)
            raise
        self._schedule_check()

    async def _listen(self, listener: Listener) -> None:
        port = await self._acceptor.listen(listener, lambda: Connection(self.shared, listener.name, self))
        self.ports[listener.name] = port

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """Rejects new connections at once; requests in progress have `grace_s` seconds."""
        self._acceptor.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._empty is None:
            self._empty = asyncio.get_running_loop().create_future()
        if not self._connections:
            return
        for connection in list(self._connections):
            connection.stop()
        await asyncio.wait([self._empty], timeout=grace_s)
        if self._connections:
            LOGGER.warning("%d Kafka connections had requests after %.0f s", len(self._connections), grace_s)
            for connection in list(self._connections):
                connection.abort()
            await asyncio.wait([self._empty], timeout=1)

    # Connections.

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, connection: Connection) -> bool:
        shared, limits = self.shared, self.shared.sockets
        host = connection.host
        if len(self._connections) >= limits.connections_max or self._empty is not None:
            what = f"there are {len(self._connections)} connections, max.connections={limits.connections_max}"
        elif self._of_host[host] >= limits.connections_per_ip_max:
            what = (
                f"there are {self._of_host[host]} of its host, max.connections.per.ip={limits.connections_per_ip_max}"
            )
        else:
            self._connections[connection] = None
            self._of_host[host] += 1
            shared.counts.accepted += 1
            return True
        shared.counts.rejected += 1
        shared.rate_limited_log.warn("refused", "peer=%s is rejected: %s", host, what)
        return False

    def leave(self, connection: Connection) -> None:
        """Also called for a rejected connection."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._of_host[connection.host] -= 1
        if not self._of_host[connection.host]:
            del self._of_host[connection.host]
        if self._empty is not None and not self._connections and not self._empty.done():
            self._empty.set_result(None)

    def port_of(self, listener: str) -> int:
        return self.ports.get(listener, 0)

    # Timeouts.

    def _schedule_check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check_timeouts)

    def _check_timeouts(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in list(self._connections):
            connection.check_timeouts(now_s)
        if self.shared.requests.waiting and not self.shared.requests.has_room:
            self._close_slowest(now_s)
        self._schedule_check()

    def _close_slowest(self, now_s: float) -> None:
        """Closes the slowest of those whose request has memory and does not arrive."""
        rates = {
            connection: rate
            for connection in self._connections
            if (rate := connection.rate(now_s)) is not None and rate < BYTES_PER_SECOND_MIN
        }
        if rates:
            slowest = min(rates, key=lambda connection: rates[connection])
            slowest.end_slow(f"sends {rates[slowest]:.0f} bytes/s of a request while others wait for memory")
