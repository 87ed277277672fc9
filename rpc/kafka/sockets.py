"""Accepts the connections of the Kafka API on TCP sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from tidelog.model.errors import TransportError
from tidelog.rpc.kafka.listener import Listener
from tidelog.rpc.kafka.shared import SocketLimits


class Sockets:
    """Implements `listener.Acceptor`."""

    def __init__(self, limits: SocketLimits) -> None:
        self._limits = limits
        self._servers: list[asyncio.Server] = []

    async def listen(self, listener: Listener, new_protocol: Callable[[], asyncio.BufferedProtocol]) -> int:
        loop = asyncio.get_running_loop()
        port = 0
        try:
            for bound in self._sockets(listener):
                server = await loop.create_server(new_protocol, sock=bound, backlog=self._limits.backlog)
                self._servers.append(server)
                port = bound.getsockname()[1]
        except OSError as error:
            raise TransportError(f"cannot listen on {listener}: {error.strerror or error}") from error
        return port

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _sockets(self, listener: Listener) -> list[socket.socket]:
        """Returns bound sockets, one for each address of the name. Accepted connections inherit the options."""
        limits = self._limits
        sockets: list[socket.socket] = []
        rows = socket.getaddrinfo(
            listener.host or None, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, protocol, _, address in dict.fromkeys(rows):
                try:
                    bound = socket.socket(family, kind, protocol)
                except OSError:
                    if family == socket.AF_INET6:
                        continue  # no IPv6 here
                    raise
                sockets.append(bound)
                bound.setblocking(False)
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if limits.send_buffer_bytes > 0:
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
                if limits.receive_buffer_bytes > 0:
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limits.receive_buffer_bytes)
                try:
                    bound.bind(address)
                except OSError:
                    if family == socket.AF_INET6 and len(rows) > 1 and not _has_ipv6():
                        sockets.remove(bound)
                        bound.close()
                        continue
                    raise
        except BaseException:
            for bound in sockets:
                bound.close()
            raise
        return sockets


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
