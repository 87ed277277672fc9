"""Is an address free? Asked before a node listens: gRPC is content with one of the addresses that a name has.

A name such as localhost has two addresses. If one of them is taken, half of the callers would reach somebody else.
"""

from __future__ import annotations

import errno
import socket

from tidelog.model.errors import TransportError
from tidelog.server.listeners import Address


def check_free(address: Address) -> None:
    """Raises `TransportError` if somebody listens there already, or if it is none of ours."""
    for family, place in _places(address):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind(place)
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and family == socket.AF_INET6:
                continue  # no IPv6 here
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error


def _places(address: Address) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    host = None if address.is_any_host else address.host
    try:
        rows = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise TransportError(f"cannot listen on {address}: {error.strerror}") from error
    return [(socket.AddressFamily(row[0]), (str(row[4][0]), int(row[4][1]))) for row in rows]
