"""Checks that an address is free before a node listens on it.

A name such as localhost has two addresses. gRPC accepts if one of them is free, and half of the callers would reach
another process.
"""

from __future__ import annotations

import errno
import socket

from tidelog.model.errors import TransportError
from tidelog.server.listeners import Address


def check_free(address: Address) -> None:
    """Raises `TransportError` if another process listens there, or if the address is not local."""
    for family, socket_address in _resolve(address):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(socket_address)
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and family == socket.AF_INET6:
                continue  # no IPv6 here
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error


def _resolve(address: Address) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    host = None if address.is_any_host else address.host
    try:
        rows = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise TransportError(f"cannot listen on {address}: {error.strerror}") from error
    return [(socket.AddressFamily(row[0]), (str(row[4][0]), int(row[4][1]))) for row in rows]
