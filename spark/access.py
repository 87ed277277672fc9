"""The cluster as this process reaches it: one IO thread, and one client for each set of options, kept between tasks.

Spark's workers are reused, so a task finds the channels of the one before open. Nothing is opened by an import, nor in
what Spark pickles.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidelog.client import io_thread
from tidelog.client.cluster import ClusterClient
from tidelog.client.names import ConsumerOptions, read_options
from tidelog.client.new_cluster import new_cluster
from tidelog.spark.options import SourceOptions

T = TypeVar("T")

OPEN_MAX = 8
"""Clients in one process; of more of them the one that was made first is closed."""
_CLOSE_S = 2.0


def client_options(options: SourceOptions) -> ConsumerOptions:
    """Raises OptionError for what the client does not take."""
    given: dict[str, object] = {"bootstrap.servers": options.bootstrap, **dict(options.client)}
    return read_options(ConsumerOptions, given, {})


class Access:
    """Implements `io_thread.Owner`."""

    def __init__(self, options: ConsumerOptions) -> None:
        self.options = options
        self._thread = io_thread.acquire(self)
        self.is_open = True
        self.cluster: ClusterClient = self._thread.run(self._made())

    async def _made(self) -> ClusterClient:
        return new_cluster(self._thread, self.options)

    def run(self, job: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """The coroutine's result, from a thread that may wait."""
        return self._thread.run(job, timeout_s=timeout_s)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            try:
                self._thread.run(self.cluster.close(), timeout_s=_CLOSE_S)
            finally:
                self._thread.release(self)

    def at_exit(self, deadline_s: float) -> None:
        self.close()

    def forked(self) -> None:
        self.is_open = False


_open: dict[ConsumerOptions, Access] = {}
_lock = threading.Lock()


def access(options: SourceOptions) -> Access:
    """The client of this process for these options. Shared: who is done with it leaves it open."""
    wanted = client_options(options)
    with _lock:
        found = _open.pop(wanted, None)
        if found is None or not found.is_open:
            while len(_open) >= OPEN_MAX:
                _open.pop(next(iter(_open))).close()
            found = Access(wanted)
        _open[wanted] = found
        return found
