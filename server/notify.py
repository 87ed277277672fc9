"""Notifies the service manager (`sd_notify`): sends each message as a datagram to the socket NOTIFY_SOCKET.

Without that variable it sends nothing. A message that cannot be delivered does not fail the node.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

LOGGER = logging.getLogger(__name__)


class ServiceManager:
    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket: socket.socket | None = None
        watchdog_us, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(os.getpid()))
        is_for_us = watchdog_us.isdecimal() and pid == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1_000_000 if is_for_us else None
        """Longest time between two keep-alives of systemd's watchdog; None: it is off."""
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError as error:
            LOGGER.warning("could not notify the service manager of %s: %s", message.partition("\n")[0], error)
