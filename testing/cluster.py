"""`LocalCluster`: a real cluster of processes, for the duration of a `with` block.

    with LocalCluster(nodes=3) as cluster:
        ...                       # a client of cluster.bootstrap
        cluster.kill(2)           # kill -9; start(2) restarts it
        cluster.pause(1)          # SIGSTOP; resume(1)
        cluster.stop(3)           # SIGTERM, clean shutdown

It uses free ports, and a temporary directory unless you pass `data`. If the block raises, it prints the end of each
node's log to stderr.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tidelog.server.local_nodes import READY_TIMEOUT_S, STOP_TIMEOUT_S, Layout, LocalNodes, Ports, free_ports

LOG_LINES = 40
SETTINGS: dict[str, object] = {"controlled.shutdown.timeout.ms": 3_000}


class LocalCluster:
    """Nodes are numbered from 1."""

    def __init__(
        self,
        nodes: int = 1,
        *,
        data: str | Path | None = None,
        settings: Mapping[str, object] | None = None,
        start: bool = True,
    ) -> None:
        """`settings` are further keys of every node's file. With `start=False` you start the nodes yourself."""
        if nodes < 1:
            raise ValueError(f"nodes={nodes}: use 1 or more")
        self._temporary = tempfile.TemporaryDirectory(prefix="tidelog-test-") if data is None else None
        path = Path(self._temporary.name if self._temporary is not None else str(data))
        ports = free_ports(4 * nodes)
        layout = Layout.read(path) if path.is_dir() else None
        if layout is not None and len(layout.ports) != nodes:
            raise ValueError(f"{path} has a cluster of {len(layout.ports)} nodes, not {nodes}")
        rows = [Ports(*ports[4 * index : 4 * index + 4]) for index in range(nodes)]
        self._nodes = LocalNodes(path, layout or Layout.fresh(rows), {**SETTINGS, **(settings or {})})
        self._starts_nodes = start

    def __enter__(self) -> Self:
        try:
            self._nodes.prepare()
            if self._starts_nodes:
                self.start_all()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for number in self._nodes.numbers:
                lines = self._nodes.log(number).splitlines()[-LOG_LINES:]
                sys.stderr.write("\n".join([f"--- node {number}", *lines, ""]))
        self._nodes.stop_all()
        if self._temporary is not None:
            self._temporary.cleanup()

    # Addresses and paths.

    @property
    def bootstrap(self) -> str:
        """host:port of every node's gRPC listener, separated by commas."""
        return self._nodes.bootstrap

    @property
    def kafka_bootstrap(self) -> str:
        """host:port of every node's Kafka listener, separated by commas."""
        return self._nodes.kafka_bootstrap

    @property
    def cluster_id(self) -> str:
        return self._nodes.layout.cluster_id

    @property
    def data(self) -> Path:
        return self._nodes.data

    def path(self, number: int) -> Path:
        """Return the node's directory: `node.toml`, `data`, `node.log`."""
        return self._nodes.path(number)

    def ports(self, number: int) -> Ports:
        return self._nodes.ports(number)

    def log(self, number: int) -> str:
        return self._nodes.log(number)

    def pid(self, number: int) -> int:
        return self._nodes.pid(number)

    # Processes.

    def start_all(self, *, timeout: float = READY_TIMEOUT_S) -> None:
        """Start the nodes that do not run; return when all are ready and each knows that all others are live."""
        for number in self._nodes.numbers:
            if number not in self._nodes.processes:
                self._nodes.start(number)
        self._nodes.wait_ready(timeout_s=timeout)

    def start(self, number: int, *, wait: bool = True, timeout: float = READY_TIMEOUT_S) -> None:
        self._nodes.start(number)
        if wait:
            self._nodes.wait_ready([number], timeout_s=timeout)

    def kill(self, number: int) -> None:
        """Send SIGKILL."""
        self._nodes.kill(number)

    def stop(self, number: int, *, timeout: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM: leaderships move, everything closes. Returns the exit code."""
        return self._nodes.stop(number, timeout_s=timeout)

    def ended(self) -> dict[int, int]:
        """Return the nodes whose process has exited unexpectedly, with the exit codes."""
        return self._nodes.ended()

    def reap(self, number: int) -> int:
        """Forget a node that has exited unexpectedly, so that it can be started again. Returns its exit code."""
        return self._nodes.stop(number)

    def pause(self, number: int) -> None:
        self._nodes.freeze(number)

    def resume(self, number: int) -> None:
        self._nodes.thaw(number)

    def wait_ready(self, number: int, *, timeout: float = READY_TIMEOUT_S) -> None:
        self._nodes.wait_ready([number], timeout_s=timeout)

    def health(self, number: int) -> tuple[bool, str]:
        """Return whether the node is ready, and its health report."""
        return self._nodes.health(number)
