"""The Kafka door: its listeners, and all connections that came through them.

    start --> accepts; a timer looks at every connection (`LOOK_S`) --> close: accepts no more, what has begun is
    answered within the grace, what waits for news is told to go elsewhere, then what is left is cut off

A connection past `max.connections` or `max.connections.per.ip` is closed at once, with a line in the log. While others
wait for room, whoever has room for a request and sends it slower than `BYTES_PER_SECOND_MIN` is cut off: the slowest at
each look.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.model.errors import TransportError
from tidelog.rpc.kafka.connection import Connection
from tidelog.rpc.kafka.patience import BYTES_PER_SECOND_MIN
from tidelog.rpc.kafka.shared import Shared

LOGGER = logging.getLogger(__name__)

LOOK_S = 1.0
CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    name: str
    """Whose advertised endpoints its clients are told, such as `KAFKA`."""
    host: str
    """Empty for every interface."""
    port: int
    """0 takes a free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class KafkaServer:
    """`start`, then `close`. Used on one event loop."""

    def __init__(self, shared: Shared, listeners: Sequence[Listener]) -> None:
        self.shared = shared
        self.ports: dict[str, int] = {}
        """Of each listener by name, after `start`."""
        self._listeners = tuple(listeners)
        self._servers: list[asyncio.Server] = []
        self._connections: dict[Connection, None] = {}
        self._of_host: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        """From `close` on nobody is let in; done when no connection is left."""

    # Life.

    async def start(self) -> None:
        """Raises `TransportError` if an address is taken or not ours."""
        try:
            for listener in self._listeners:
                await self._listen(listener)
        except BaseException:
            await self.close(grace_s=0)
            raise
        self._look_later()

    async def _listen(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        try:
            for one in self._sockets(listener):
                server = await loop.create_server(
                    lambda: Connection(self.shared, listener.name, self), sock=one, backlog=self.shared.sockets.backlog
                )
                self._servers.append(server)
                self.ports[listener.name] = one.getsockname()[1]
        except OSError as error:
            raise TransportError(f"cannot listen on {listener}: {error.strerror or error}") from error

    def _sockets(self, listener: Listener) -> list[socket.socket]:
        """Bound, one for each address of the name; what is set here holds for accepted connections."""
        limits = self.shared.sockets
        found: list[socket.socket] = []
        rows = socket.getaddrinfo(
            listener.host or None, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, protocol, _, place in dict.fromkeys(rows):
                try:
                    one = socket.socket(family, kind, protocol)
                except OSError:
                    if family == socket.AF_INET6:
                        continue  # no IPv6 here
                    raise
                found.append(one)
                one.setblocking(False)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if limits.send_buffer_bytes > 0:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
                if limits.receive_buffer_bytes > 0:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limits.receive_buffer_bytes)
                try:
                    one.bind(place)
                except OSError:
                    if family == socket.AF_INET6 and len(rows) > 1 and not _has_ipv6():
                        found.remove(one)
                        one.close()
                        continue
                    raise
        except BaseException:
            for one in found:
                one.close()
            raise
        return found

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """New connections are refused at once; requests under way have `grace_s` seconds."""
        for server in self._servers:
            server.close()
        self._servers.clear()
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
        shared.counts.refused += 1
        shared.seldom.warn("refused", "peer=%s is not let in: %s", host, what)
        return False

    def leave(self, connection: Connection) -> None:
        """Also of one that was not let in."""
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

    # Time.

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in list(self._connections):
            connection.look(now_s)
        if self.shared.requests.waiting and not self.shared.requests.has_room:
            self._cut_off_slowest(now_s)
        self._look_later()

    def _cut_off_slowest(self, now_s: float) -> None:
        """Of those that hold room for what does not come."""
        rates = {
            connection: rate
            for connection in self._connections
            if (rate := connection.rate(now_s)) is not None and rate < BYTES_PER_SECOND_MIN
        }
        if rates:
            slowest = min(rates, key=lambda connection: rates[connection])
            slowest.end_slow(f"sends {rates[slowest]:.0f} bytes/s of a request while others wait for room")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True
