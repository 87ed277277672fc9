"""Runs a cluster of real Kafka nodes: processes of the Java virtual machine on loopback, each broker and controller.

The jars come from `make build/jvm/.stamp` (Maven). Nodes run with Kafka's own defaults: the heap and collector of
`kafka-server-start.sh`, and only the settings that a cluster of three nodes on one machine needs.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tidelog.model.uuids import random_uuid, to_text
from tidelog.server.local_nodes import free_ports

ROOT = Path(__file__).resolve().parent.parent
JARS = ROOT / "build" / "jvm" / "tools"
READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
JVM = (
    "-Xms1G",
    "-Xmx1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
"""As `kafka-run-class.sh` and `kafka-server-start.sh` set them."""


class KafkaCluster:
    """Nodes are numbered from 1. `with` starts them and removes their data at the end."""

    def __init__(self, nodes: int = 3) -> None:
        self._ports = free_ports(2 * nodes)
        self._numbers = range(1, nodes + 1)
        self._cluster_id = to_text(random_uuid(Random()))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        if shutil.which("java") is None or not JARS.is_dir():
            raise SystemExit("bench-kafka needs java and Kafka's jars: make build/jvm/.stamp")
        self._directory = tempfile.TemporaryDirectory(prefix="kafka-bench-")
        try:
            for number in self._numbers:
                self._prepare(number)
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert self._directory is not None, "entered"
        self._directory.cleanup()

    @property
    def kafka_bootstrap(self) -> str:
        return ",".join(f"localhost:{self._broker_port(number)}" for number in self._numbers)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def start_all(self) -> None:
        """Start the nodes that do not run, and return when a client sees all of them."""
        for number in self._numbers:
            if number not in self._processes:
                self._start(number)
        client = AdminClient({"bootstrap.servers": self.kafka_bootstrap, "log_level": 0})
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for number, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"Kafka node {number} exited: {self._log(number).read_text()[-2000:]}")
            try:
                if len(client.list_topics(timeout=1).brokers) == len(self._numbers):
                    return
            except KafkaException:
                pass
            time.sleep(0.02)
        raise TimeoutError(f"Kafka was not ready in {READY_TIMEOUT_S:.0f} s")

    def kill(self, number: int) -> None:
        """Send SIGKILL to a node and reap it."""
        process = self._processes.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def start(self, number: int) -> None:
        """Start a node again, and return when all are ready."""
        self.start_all()

    def _broker_port(self, number: int) -> int:
        return self._ports[2 * (number - 1)]

    def _path(self, number: int) -> Path:
        assert self._directory is not None, "entered"
        return Path(self._directory.name) / f"node-{number}"

    def _log(self, number: int) -> Path:
        return self._path(number) / "node.log"

    def _prepare(self, number: int) -> None:
        path = self._path(number)
        path.mkdir()
        voters = ",".join(f"{each}@localhost:{self._ports[2 * (each - 1) + 1]}" for each in self._numbers)
        replicas = len(self._numbers)
        settings = {
            "process.roles": "broker,controller",
            "node.id": number,
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://localhost:{self._broker_port(number)},"
            f"CONTROLLER://localhost:{self._ports[2 * (number - 1) + 1]}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": path / "data",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "group.initial.rebalance.delay.ms": 0,
        }
        config = path / "server.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
        self._java("kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", str(config))

    def _java(self, program: str, *arguments: str) -> None:
        run = subprocess.run(
            ["java", "-cp", f"{JARS}/*", program, *arguments], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {run.stdout}{run.stderr}")

    def _start(self, number: int) -> None:
        path = self._path(number)
        with self._log(number).open("ab") as log:
            self._processes[number] = subprocess.Popen(
                ["java", *JVM, "-cp", f"{JARS}/*", "kafka.Kafka", str(path / "server.properties")],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=path,
            )
