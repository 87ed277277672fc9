"""Caches cluster clients in this process: one IO thread, and one client for each set of options.

Spark reuses its workers, so a task finds the channels of the previous one open. Imports and pickled objects open
nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidelog.client import io_thread
from tidelog.client.cluster import ClusterClient
from tidelog.client.new_cluster import new_cluster
from tidelog.client.option_table import ConsumerConfig, read_options
from tidelog.spark.options import SourceOptions

T = TypeVar("T")

OPEN_MAX = 8
"""Clients per process; beyond that the least recently used one is closed."""
_CLOSE_S = 2.0


def client_options(options: SourceOptions) -> ConsumerConfig:
    """Return the client's options. Raises OptionError for options that the client rejects."""
    given: dict[str, object] = {"bootstrap.servers": options.bootstrap, **dict(options.client)}
    return read_options(ConsumerConfig, given, {})


class CachedClient:
    """A cluster client shared by the tasks of this process. Implements `io_thread.Owner`."""

    def __init__(self, options: ConsumerConfig) -> None:
        self.options = options
        self._thread = io_thread.acquire(self)
        self.is_open = True
        try:
            self.cluster: ClusterClient = self._thread.run(self._made())
        except BaseException:
            self._thread.release(self)
            raise

    async def _made(self) -> ClusterClient:
        return new_cluster(self._thread, self.options)

    def run(self, job: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run the coroutine on the IO thread and return its result; blocks the caller."""
        return self._thread.run(job, timeout=timeout_s)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            try:
                self._thread.run(self.cluster.close(), timeout=_CLOSE_S)
            finally:
                self._thread.release(self)

    def at_exit(self, deadline_s: float) -> None:
        self.close()

    def forked(self) -> None:
        self.is_open = False


_open: dict[ConsumerConfig, CachedClient] = {}
_lock = threading.Lock()


def _after_in_child() -> None:
    """Another thread of the parent may have held the lock; the clients are the parent's."""
    global _lock
    _lock = threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_after_in_child)


def cached_client(options: SourceOptions) -> CachedClient:
    """Return the client of this process for these options. It is shared: callers do not close it."""
    config = client_options(options)
    with _lock:
        client = _open.pop(config, None)
        if client is None or not client.is_open:
            while len(_open) >= OPEN_MAX:
                _open.pop(next(iter(_open))).close()
            client = CachedClient(config)
        _open[config] = client
        return client
