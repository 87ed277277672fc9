"""`LocalCluster`: a real cluster of processes, for the length of a `with` block.

    with LocalCluster(nodes=3) as cluster:
        ...                       # a client of cluster.bootstrap
        cluster.kill(2)           # kill -9; start(2) brings it back
        cluster.freeze(1)         # SIGSTOP; thaw(1)
        cluster.stop(3)           # SIGTERM, in order

Ports are free ones, data is in a temporary directory unless one is given. When the block ends by an error, the end of
each node's log is printed to stderr.
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
    """Nodes are numbered from 1 on."""

    def __init__(
        self,
        nodes: int = 1,
        *,
        data: str | Path | None = None,
        settings: Mapping[str, object] | None = None,
        is_started: bool = True,
    ) -> None:
        """`settings` are more keys of every node's file; `is_started=False` leaves starting to the caller."""
        assert nodes >= 1, "at least one node"
        self._temporary = tempfile.TemporaryDirectory(prefix="tidelog-test-") if data is None else None
        path = Path(self._temporary.name if self._temporary is not None else str(data))
        ports = free_ports(4 * nodes)
        layout = Layout.read(path) if path.is_dir() else None
        assert layout is None or len(layout.ports) == nodes, f"{path} is a cluster of another size"
        rows = [Ports(*ports[4 * index : 4 * index + 4]) for index in range(nodes)]
        self._nodes = LocalNodes(path, layout or Layout.fresh(rows), {**SETTINGS, **(settings or {})})
        self._is_started = is_started

    def __enter__(self) -> Self:
        try:
            self._nodes.prepare()
            if self._is_started:
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

    # Where it is.

    @property
    def bootstrap(self) -> str:
        """host:port of every node's gRPC door, with commas between them."""
        return self._nodes.bootstrap

    @property
    def kafka_bootstrap(self) -> str:
        """host:port of every node's Kafka door, for Kafka clients."""
        return self._nodes.kafka_bootstrap

    @property
    def cluster_id(self) -> str:
        return self._nodes.layout.cluster_id

    @property
    def data(self) -> Path:
        return self._nodes.data

    def path(self, number: int) -> Path:
        """The node's directory: `node.toml`, `data`, `node.log`."""
        return self._nodes.path(number)

    def ports(self, number: int) -> Ports:
        return self._nodes.ports(number)

    def log(self, number: int) -> str:
        return self._nodes.log(number)

    def pid(self, number: int) -> int:
        return self._nodes.pid(number)

    # What happens to it.

    def start_all(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Those that do not run; returns when all are ready."""
        for number in self._nodes.numbers:
            if number not in self._nodes.processes:
                self._nodes.start(number)
        self._nodes.wait_ready(timeout_s=timeout_s)

    def start(self, number: int, *, is_awaited: bool = True, timeout_s: float = READY_TIMEOUT_S) -> None:
        self._nodes.start(number)
        if is_awaited:
            self._nodes.wait_ready([number], timeout_s=timeout_s)

    def kill(self, number: int) -> None:
        """kill -9."""
        self._nodes.kill(number)

    def stop(self, number: int, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM: leaderships move, everything closes. The exit code."""
        return self._nodes.stop(number, timeout_s=timeout_s)

    def ended(self) -> dict[int, int]:
        """Nodes whose process has ended by itself, with the exit code."""
        return self._nodes.ended()

    def forget(self, number: int) -> int:
        """A node that has ended by itself may be started again; its exit code."""
        return self._nodes.stop(number)

    def freeze(self, number: int) -> None:
        self._nodes.freeze(number)

    def thaw(self, number: int) -> None:
        self._nodes.thaw(number)

    def wait_ready(self, number: int, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        self._nodes.wait_ready([number], timeout_s=timeout_s)

    def health(self, number: int) -> tuple[bool, str]:
        """(whether it is ready, what it says)."""
        return self._nodes.health(number)
