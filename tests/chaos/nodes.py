"""The node processes of a run: controllers and brokers apart from each other, or combined; each on its host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from uuid import UUID

from chaos.lossy_disk import LossyDisk
from tidelog.model.ids import NodeId
from tidelog.model.uuids import random_uuid, to_text
from tidelog.server.config import load
from tidelog.server.local_nodes import health
from tidelog.server.storage import Voters, format_node

READY_S = 180.0
"""Generous: the machine may have other work."""
STOP_S = 60.0
LOOK_S = 0.1
FAILURES_MAX = 10
"""In one recovery; then it gives up."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node runs."""

    host: str
    node_port: int
    grpc_port: int
    http_port: int
    kafka_port: int
    wrapper: Sequence[str] = ()


@dataclass(slots=True)
class Node:
    number: int
    roles: tuple[str, ...]
    place: Place
    path: Path
    disk: LossyDisk | None = None
    directory_id: UUID = field(default_factory=lambda: random_uuid(SystemRandom()))
    is_first_voter: bool = False
    is_next_version: bool = False
    """It runs the version that has one more feature level."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def is_controller(self) -> bool:
        return "controller" in self.roles

    @property
    def is_broker(self) -> bool:
        return "broker" in self.roles

    @property
    def endpoint(self) -> str:
        return f"{self.place.host}:{self.place.node_port}"

    @property
    def listener(self) -> str:
        return "CONTROLLER" if self.is_controller else "INTERNAL"

    @property
    def clock(self) -> Path:
        return self.path / "clock"

    def log(self) -> str:
        path = self.path / "node.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def health(self) -> tuple[bool, str]:
        return health(self.place.host, self.place.http_port)


class Nodes:
    """`format_all` once, then start, kill and stop by number."""

    def __init__(self, nodes: Sequence[Node], *, preload: Path | None) -> None:
        self.by_number: Mapping[int, Node] = {node.number: node for node in nodes}
        self.cluster_id = to_text(random_uuid(SystemRandom()))
        self._preload = preload

    def __getitem__(self, number: int) -> Node:
        return self.by_number[number]

    def running(self) -> list[Node]:
        return [node for node in self.by_number.values() if node.process is not None]

    def format_all(self) -> None:
        first = [node for node in self.by_number.values() if node.is_first_voter]
        voters = Voters(tuple((NodeId(node.number), node.endpoint, node.directory_id) for node in first))
        for node in self.by_number.values():
            node.path.mkdir(parents=True, exist_ok=True)
            node.clock.write_bytes(struct.pack("q", 0))
            (node.path / "node.toml").write_text(self._config(node, first), encoding="utf-8")
            own = (voters if node.is_first_voter else Voters(())) if node.is_controller else None
            config = load(str(node.path / "node.toml"), {})
            made = asyncio.run(format_node(config, self.cluster_id, own, ignore_formatted=False, random=SystemRandom()))
            node.directory_id = next(row.meta.directory for row in made if row.path == config.metadata_dir)

    def _config(self, node: Node, first: Sequence[Node]) -> str:
        place = node.place
        listeners = [f"{node.listener}://{node.endpoint}", f"GRPC://{place.host}:{place.grpc_port}"]
        if node.is_broker:
            listeners.append(f"KAFKA://{place.host}:{place.kafka_port}")
        fields: dict[str, object] = {
            "node.id": node.number,
            "process.roles": list(node.roles),
            "log.dirs": ["disk/logs"] if node.is_broker else ["disk/metadata"],
            "metadata.log.dir": "disk/metadata",
            "listeners": listeners,
            "http.listener": f"{place.host}:{place.http_port}",
            "controller.quorum.bootstrap.servers": [one.endpoint for one in first],
            "controlled.shutdown.timeout.ms": 3_000,
            "metadata.log.max.record.bytes.between.snapshots": 65_536,
        }
        if node.is_controller:
            fields["default.replication.factor"] = 3
        return "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in fields.items())

    # Processes.

    def start(self, number: int) -> None:
        node = self[number]
        assert node.process is None, f"node {number} runs"
        module = "chaos.next_version" if node.is_next_version else "tidelog"
        command = [*node.place.wrapper, sys.executable, "-m", module, "server", "--ends-with-stdin"]
        command += ["--config", "node.toml"]
        with (node.path / "node.log").open("ab") as log:
            node.process = subprocess.Popen(
                command,
                cwd=node.path,
                env=self._environment(node),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self, node: Node) -> dict[str, str]:
        found = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        if node.is_controller:
            found.pop("CHAOS_UNSYNCED", None)  # a defect of brokers
        if self._preload is not None:
            found["LD_PRELOAD"] = str(self._preload)
            found["CHAOS_CLOCK"] = str(node.clock.resolve())
            if node.disk is not None:
                found["CHAOS_SYNC"] = str(node.disk.sync_file.resolve())
        return found

    def kill(self, number: int) -> None:
        """SIGKILL. A node that has ended before is reaped."""
        process = self._process(number)
        process.kill()
        self._reap(self[number])

    def stop(self, number: int) -> int:
        """SIGTERM; the exit code, -9 if it did not end in time."""
        process = self._process(number)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return self._reap(self[number])

    def pause(self, number: int) -> None:
        self._process(number).send_signal(signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._process(number).send_signal(signal.SIGCONT)

    def stop_all(self) -> None:
        for node in self.running():
            if node.process is not None:
                node.process.send_signal(signal.SIGCONT)
                node.process.terminate()
        for node in self.running():
            self.stop(node.number)

    def set_clock(self, number: int, ahead_s: float) -> None:
        """The node's wall clock is so much ahead of this machine's, from now on."""
        with self[number].clock.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", int(ahead_s * 1e9)))

    def _process(self, number: int) -> subprocess.Popen[bytes]:
        process = self[number].process
        assert process is not None, f"node {number} does not run"
        return process

    def _reap(self, node: Node) -> int:
        process = node.process
        assert process is not None, f"node {node.number} does not run"
        assert process.stdin is not None, "a pipe was asked for"
        process.stdin.close()
        node.process = None
        return process.wait()

    # Waiting.

    def recover(self, *, may_end: int | None) -> list[str]:
        """Start nodes again that have ended by themselves, and wait until all that run are ready. Returns what went
        wrong; `may_end` may have ended."""
        failures = self._start_ended(may_end)
        end_s = time.monotonic() + READY_S
        waiting = self.running()
        while waiting:
            waiting = [node for node in waiting if not node.health()[0]]
            if waiting and (time.monotonic() > end_s or len(failures) > FAILURES_MAX):
                failures += [
                    f"node-not-ready: node {node.number} after {READY_S:.0f} s: {node.health()[1].strip()}"
                    for node in waiting
                ]
                return failures
            failures += self._start_ended(None)
            time.sleep(LOOK_S)
        return failures

    def _start_ended(self, may_end: int | None) -> list[str]:
        failures = []
        for node in self.running():
            code = None if node.process is None else node.process.poll()
            if code is None:
                continue
            self._reap(node)
            if node.number != may_end:
                words = node.log().strip().splitlines()[-1:]
                failures.append(
                    f"node-ended: node {node.number} ended by itself with code {code}: {' '.join(words)[:300]}"
                )
            self.start(node.number)
        return failures
