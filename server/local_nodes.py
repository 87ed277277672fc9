"""A cluster of node processes on one machine: for `tidelog dev` and for tests.

    <data>/cluster.json         its layout: cluster id, nodes, ports
    <data>/node-1/node.toml     written again at each start
    <data>/node-1/data/         its directory
    <data>/node-1/node.log      what it writes

All nodes are broker and controller; the first voters are the first three (all of them in a smaller cluster). Nodes end
when the process that started them does, however it ends (`--ends-with-stdin`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from uuid import UUID

from tidelog.model.errors import StorageError, TransportError
from tidelog.model.ids import NodeId
from tidelog.model.uuids import from_text, random_uuid, to_text
from tidelog.server.config import NodeConfig, load
from tidelog.server.listeners import Address, ListenerKind
from tidelog.server.ports import check_free
from tidelog.server.storage import Voters, format_node, read_meta

HOST = "localhost"
VOTERS_MAX = 3
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
LOG_TAIL_BYTES = 4_000
PORT_ORDER = (ListenerKind.NODE, ListenerKind.GRPC, ListenerKind.HTTP, ListenerKind.KAFKA)


class NodeEndedError(TransportError):
    """A node's process ended unexpectedly; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Ports:
    node: int
    grpc: int
    http: int
    kafka: int

    @classmethod
    def usual(cls, number: int, offset: int) -> Ports:
        """Return the default ports of node `number`, from 1 on."""
        node, grpc, http, kafka = (kind.value + number - 1 + offset for kind in PORT_ORDER)
        return cls(node, grpc, http, kafka)

    @classmethod
    def read(cls, row: Sequence[int]) -> Ports:
        """Read a stored row. A cluster from before the Kafka port gets it at the default distance."""
        node, grpc, http, *more = row
        (kafka,) = more or (grpc + ListenerKind.KAFKA.value - ListenerKind.GRPC.value,)
        return cls(node, grpc, http, kafka)

    def row(self) -> list[int]:
        return [self.node, self.grpc, self.http, self.kafka]

    def named(self) -> dict[str, int]:
        return {"nodes": self.node, "gRPC": self.grpc, "HTTP": self.http, "Kafka": self.kafka}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a cluster; it never changes."""

    cluster_id: str
    ports: tuple[Ports, ...]
    directories: tuple[str, ...]
    """Directory ids, in Kafka's form."""

    @classmethod
    def fresh(cls, ports: Sequence[Ports]) -> Layout:
        random = SystemRandom()
        ids = [to_text(random_uuid(random)) for _ in range(len(ports) + 1)]
        return cls(ids[0], tuple(ports), tuple(ids[1:]))

    @classmethod
    def read(cls, data: Path) -> Layout | None:
        path = data / "cluster.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            ports = tuple(Ports.read(row) for row in found["ports"])
            return cls(found["cluster_id"], ports, tuple(found["directories"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is not what made a cluster here: {error}", path=str(path)) from error

    def write(self, data: Path) -> None:
        ports = [one.row() for one in self.ports]
        fields = {"cluster_id": self.cluster_id, "ports": ports, "directories": list(self.directories)}
        new = data / "cluster.json.new"
        new.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        new.rename(data / "cluster.json")


def health(host: str, http_port: int) -> tuple[bool, str]:
    """Return (whether the node that serves HTTP there is ready, its health text)."""
    try:
        with urllib.request.urlopen(f"http://{host}:{http_port}/healthz", timeout=2) as answer:
            return True, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return False, error.read().decode()
    except OSError as error:
        return False, str(error)


@dataclass(slots=True)
class LocalNodes:
    """`prepare` once, then start, kill, freeze and stop nodes by their numbers, from 1 on."""

    data: Path
    layout: Layout
    settings: Mapping[str, object] = field(default_factory=dict)
    """More keys for every node's file."""
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def numbers(self) -> range:
        return range(1, len(self.layout.ports) + 1)

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{HOST}:{ports.grpc}" for ports in self.layout.ports)

    @property
    def kafka_bootstrap(self) -> str:
        return ",".join(f"{HOST}:{ports.kafka}" for ports in self.layout.ports)

    def ports(self, number: int) -> Ports:
        return self.layout.ports[number - 1]

    def path(self, number: int) -> Path:
        return self.data / f"node-{number}"

    def log(self, number: int) -> str:
        """Return the log of the node, of all its incarnations."""
        path = self.path(number) / "node.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    # Preparation.

    def prepare(self) -> None:
        """Write the files of every node, and format directories that are not formatted yet."""
        self.data.mkdir(parents=True, exist_ok=True)
        self.layout.write(self.data)
        for number in self.numbers:
            self.path(number).mkdir(exist_ok=True)
            (self.path(number) / "node.toml").write_text(self._config(number), encoding="utf-8")
            config = load(str(self.path(number) / "node.toml"), {})
            self._check_not_lost(number, config)
            asyncio.run(
                format_node(
                    config,
                    self.layout.cluster_id,
                    self._voters() if config.is_controller else None,
                    ignore_formatted=True,
                    random=SystemRandom(),
                )
            )

    def _check_not_lost(self, number: int, config: NodeConfig) -> None:
        """A voter that has run must not be formatted again under its old directory id."""
        has_run = (self.path(number) / "node.log").exists()
        is_formatted = os.path.isdir(config.metadata_dir) and read_meta(config.metadata_dir) is not None
        if config.is_controller and has_run and not is_formatted:
            raise StorageError(
                f"{config.metadata_dir} is gone, and node {number} has run before: it has forgotten its votes and must "
                f"not vote again. Put the directory back, or remove {self.data} to begin with an empty cluster",
                path=config.metadata_dir,
            )

    def _voters(self) -> Voters:
        def row(number: int) -> tuple[NodeId, str, UUID | None]:
            return NodeId(number), f"{HOST}:{self.ports(number).node}", from_text(self.layout.directories[number - 1])

        return Voters(tuple(row(number) for number in self.numbers if number <= VOTERS_MAX))

    def _config(self, number: int) -> str:
        ports = self.ports(number)
        is_voter = number <= VOTERS_MAX
        voters = [f"{n}@{HOST}:{self.ports(n).node}" for n in self.numbers if n <= VOTERS_MAX]
        fields: dict[str, object] = {
            "node.id": number,
            "process.roles": ["broker", "controller"] if is_voter else ["broker"],
            "log.dirs": ["data"],
            "listeners": [
                f"{'CONTROLLER' if is_voter else 'INTERNAL'}://{HOST}:{ports.node}",
                f"GRPC://{HOST}:{ports.grpc}",
                f"KAFKA://{HOST}:{ports.kafka}",
            ],
            "http.listener": f"{HOST}:{ports.http}",
            "controller.quorum.voters": voters,
            "default.replication.factor": min(VOTERS_MAX, len(self.numbers)),
            **self.settings,
        }
        return "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in fields.items())

    def taken_port(self) -> tuple[int, str, int] | None:
        """Return (port, purpose, node) of the first port that another process listens on."""
        for number in self.numbers:
            for what, port in self.ports(number).named().items():
                if not is_free(port):
                    return port, what, number
        return None

    # Running.

    def start(self, number: int) -> None:
        assert number not in self.processes, f"node {number} runs"
        command = [sys.executable, "-m", "tidelog", "server", "--ends-with-stdin", "--config", "node.toml"]
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        with (self.path(number) / "node.log").open("ab") as log:
            # A separate session: Ctrl-C reaches only the process that started the nodes.
            self.processes[number] = subprocess.Popen(
                command,
                cwd=self.path(number),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pid(self, number: int) -> int:
        return self.processes[number].pid

    def kill(self, number: int) -> None:
        """kill -9."""
        process = self.processes.pop(number)
        process.kill()
        self._reap(process)

    def freeze(self, number: int) -> None:
        os.kill(self.pid(number), signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        os.kill(self.pid(number), signal.SIGCONT)

    def stop(self, number: int, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM and return the exit code; kill a node that does not end in time."""
        self.processes[number].terminate()
        return self._wait(number, timeout_s)

    def stop_all(self, *, timeout_s: float = STOP_TIMEOUT_S) -> dict[int, int]:
        """Stop all nodes at once; return exit codes by node."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        return {number: self._wait(number, timeout_s) for number in list(self.processes)}

    def _wait(self, number: int, timeout_s: float) -> int:
        process = self.processes.pop(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
        return self._reap(process)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdin is not None, "a pipe was asked for"
        process.stdin.close()
        return process.wait()

    def ended(self) -> dict[int, int]:
        """Return exit codes of nodes whose process ended unexpectedly."""
        return {n: code for n, process in self.processes.items() if (code := process.poll()) is not None}

    # Waiting.

    def health(self, number: int) -> tuple[bool, str]:
        """Return (whether the node is ready, its health text)."""
        return health(HOST, self.ports(number).http)

    def wait_ready(self, numbers: Sequence[int] | None = None, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until the nodes are ready and, without `numbers`, until each of them knows that all others are live.
        Raises `NodeEndedError` if one ends, `TransportError` on timeout."""
        waiting = list(self.processes if numbers is None else numbers)
        live = set(waiting) if numbers is None else set()
        deadline = time.monotonic() + timeout_s
        said = ""
        while waiting:
            for number in list(waiting):
                code = self.processes[number].poll()
                if code is not None:
                    raise NodeEndedError(f"node {number} ended with code {code}:\n{self.log(number)[-LOG_TAIL_BYTES:]}")
                is_ready, said = self.health(number)
                if is_ready and live <= set(json.loads(said)["live_brokers"]):
                    waiting.remove(number)
            if waiting and time.monotonic() > deadline:
                raise TransportError(f"nodes {waiting} are not ready after {timeout_s:.0f} s: {said.strip()}")
            time.sleep(POLL_S)


def is_free(port: int) -> bool:
    """Return whether no process listens on the port, on any loopback address."""
    try:
        check_free(Address(HOST, port))
    except TransportError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
