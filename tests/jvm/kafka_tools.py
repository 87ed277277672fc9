"""Kafka's own command-line tools, each call a JVM of its own, as its shell scripts start them.

`KAFKA_TOOLS` names the directory with their jars; `make interop-jvm` fetches them and sets it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

JARS = os.environ.get("KAFKA_TOOLS")
needs_tools = pytest.mark.skipif(
    not JARS or shutil.which("java") is None,
    reason="KAFKA_TOOLS names no directory with Kafka's jars, or there is no java; `make interop-jvm` sees to both",
)

TIMEOUT_S = 90.0
_OF_TOOLS = "org.apache.kafka.tools."
_CLASSES = {
    "kafka-acls": "AclCommand",
    "kafka-broker-api-versions": "BrokerApiVersionsCommand",
    "kafka-client-metrics": "ClientMetricsCommand",
    "kafka-cluster": "ClusterTool",
    "kafka-console-consumer": "consumer.ConsoleConsumer",
    "kafka-console-producer": "ConsoleProducer",
    "kafka-consumer-groups": "consumer.group.ConsumerGroupCommand",
    "kafka-consumer-perf-test": "ConsumerPerformance",
    "kafka-delete-records": "DeleteRecordsCommand",
    "kafka-dump-log": "DumpLogSegments",
    "kafka-e2e-latency": "EndToEndLatency",
    "kafka-features": "FeatureCommand",
    "kafka-get-offsets": "GetOffsetShell",
    "kafka-groups": "GroupsCommand",
    "kafka-leader-election": "LeaderElectionCommand",
    "kafka-log-dirs": "LogDirsCommand",
    "kafka-metadata-quorum": "MetadataQuorumCommand",
    "kafka-producer-perf-test": "ProducerPerformance",
    "kafka-reassign-partitions": "reassign.ReassignPartitionsCommand",
    "kafka-topics": "TopicCommand",
    "kafka-transactions": "TransactionsCommand",
    "kafka-verifiable-consumer": "VerifiableConsumer",
    "kafka-verifiable-producer": "VerifiableProducer",
}
_COMMAND_FIRST = frozenset({"kafka-cluster"})
"""Tools that want `--bootstrap-server` behind their command."""
_OFFLINE = frozenset({"kafka-dump-log"})


@dataclass(frozen=True, slots=True)
class Ran:
    """What a tool has printed."""

    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.out.splitlines() if line.strip()]

    def table(self) -> list[list[str]]:
        """The words of every line but the first, which are headings."""
        return [line.split() for line in self.lines[1:]]


def java_command(main: str) -> list[str]:
    """Starts a class of the jars, or a source file that uses them."""
    assert JARS is not None
    return [
        "java",
        *("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Duser.timezone=UTC"),
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        *("-cp", f"{JARS}/*", main),
    ]


@contextmanager
def running(command: list[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes into a file; it gets SIGTERM at the end of the block."""
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Tools:
    bootstrap: str

    def _command(self, tool: str, arguments: tuple[str, ...]) -> list[str]:
        java = java_command("kafka.admin.ConfigCommand" if tool == "kafka-configs" else _OF_TOOLS + _CLASSES[tool])
        where = [] if tool in _OFFLINE else ["--bootstrap-server", self.bootstrap]
        at = 1 if tool in _COMMAND_FIRST else 0
        return [*java, *arguments[:at], *where, *arguments[at:]]

    def run(self, tool: str, *arguments: str, stdin: str = "", exit_code: int = 0, timeout_s: float = TIMEOUT_S) -> Ran:
        """What it printed; an error unless it ends by itself and with this code."""
        command = self._command(tool, arguments)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == exit_code, (
            f"{tool} {' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return Ran(done.stdout, done.stderr)

    @contextmanager
    def started(self, tool: str, *arguments: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
        """One that runs beside others and writes into a file; it gets SIGTERM at the end of the block."""
        with running(self._command(tool, arguments), out) as process:
            yield process

    # What several tests ask.

    def create(self, topic: str, *, partitions: int = 1, replicas: int = 3, **settings: str) -> None:
        configs = [word for key, value in settings.items() for word in ("--config", f"{key.replace('_', '.')}={value}")]
        sizes = ("--partitions", str(partitions), "--replication-factor", str(replicas))
        made = self.run("kafka-topics", "--create", "--topic", topic, *sizes, *configs)
        assert made.lines == [f"Created topic {topic}."]

    def describe(self, topic: str) -> list[dict[str, str]]:
        """A row for each partition: Partition, Leader, Replicas, Isr."""
        found = self.run("kafka-topics", "--describe", "--topic", topic)
        return [dict(re.findall(r"(\w+): (\S*)", line)) for line in found.lines[1:]]

    def end_offsets(self, topic: str) -> dict[int, int]:
        rows = [line.split(":") for line in self.run("kafka-get-offsets", "--topic", topic).lines]
        return {int(partition): int(offset) for _, partition, offset in rows}
