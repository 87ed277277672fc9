"""Consumers as processes of their own, and what they are given to read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tidelog
from tidelog.testing import LocalCluster

PROGRAM = Path(__file__).with_name("consumer_process.py")


def make_topic(cluster: LocalCluster, name: str, partitions: int) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=partitions, replication_factor=3)


def fill(cluster: LocalCluster, topic: str, count: int, *, first: int = 0) -> None:
    """Numbered records, spread by key."""
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in range(first, first + count):
            producer.send(topic, str(number), key=f"key{number}")


class Process:
    """A consumer's process, and what it has said."""

    def __init__(self, cluster: LocalCluster, group: str, topic: str, **options: Any) -> None:
        self.lines: list[tuple[float, str, Any]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), cluster.bootstrap, group, topic, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(tuple(json.loads(line)))

    def said(self, what: str) -> list[Any]:
        return [details for _, kind, details in list(self.lines) if kind == what]

    @property
    def held(self) -> set[int]:
        found: set[int] = set()
        for _, what, details in list(self.lines):
            if what == "assigned":
                found |= set(details)
            elif what in ("revoked", "lost"):
                found -= set(details)
        return found

    @property
    def records(self) -> list[tuple[int, int]]:
        return [(partition, offset) for partition, offset, _ in self.said("record")]

    def kill(self) -> float:
        """kill -9; when it was."""
        self._process.kill()
        at_s = time.monotonic()
        self._process.wait(10)
        return at_s

    def close(self) -> None:
        """In order."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.wait(30) == 0
        self._reader.join(5)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                self._reader.join(5)
                pipe.close()


@contextmanager
def trickle(cluster: LocalCluster, topic: str, partitions: int, *, every_s: float) -> Iterator[None]:
    """A record to each partition every now and then, for the length of the block; all of them are stored after it."""
    is_over = threading.Event()
    with tidelog.Producer(cluster.bootstrap) as producer:

        def produce() -> None:
            number = 0
            while not is_over.wait(every_s):
                for partition in range(partitions):
                    producer.send(topic, b"%d" % number, partition=partition)
                number += 1

        thread = threading.Thread(target=produce)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def is_shared(processes: list[Process], count: int) -> bool:
    held = [number for process in processes for number in process.held]
    return sorted(held) == list(range(count))
