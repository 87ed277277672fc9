"""What the exercises share: topics, all records of one, and programs of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from support.clusters.waiting import until

import tidelog
from tidelog.testing import LocalCluster

HERE = Path(__file__).parent


def make(admin: tidelog.Admin, name: str, partitions: int = 1, **configs: object) -> str:
    """A topic on all brokers whose leaders serve already."""
    named = {key.replace("_", "."): value for key, value in configs.items()}
    admin.create_topic(name, partitions=partitions, replication_factor=3, configs=named)
    until(lambda: all(row.leader is not None for row in admin.describe_topic(name).partitions), f"{name} is led")
    admin.list_offsets([name])  # Asks every leader, until it has confirmed its epoch and answers.
    return name


def records_of(cluster: LocalCluster, topic: str) -> list[tidelog.ConsumerRecord[Any, Any]]:
    """All that is there now, in the order of each partition."""
    with tidelog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        names = consumer.partitions_for(topic)
        consumer.assign(names)
        wanted = sum(consumer.end_offsets(*names).values())
        found: list[tidelog.ConsumerRecord[Any, Any]] = []

        def is_read() -> bool:
            found.extend(consumer.poll(1.0))
            return len(found) >= wanted

        until(is_read, f"{topic} is read")
    return found


class Program:
    """A process of its own that writes lines; a line to it ends it."""

    def __init__(self, file: str, *arguments: str) -> None:
        self.lines: list[Any] = []
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / file), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self.lines.append(json.loads(line))

    def said(self, what: str) -> list[Any]:
        """Details of the lines of this kind: a line ends with its kind and its details."""
        return [details for *_, kind, details in list(self.lines) if kind == what]

    def kill(self) -> None:
        """kill -9; all it has said is read."""
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.wait(60) == 0
        self._reader.join(10)

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
