"""Consumers as processes of their own, and what they are given to read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exercises import Program

import tidelog
from tidelog.testing import LocalCluster


def make_topic(cluster: LocalCluster, name: str, partitions: int) -> None:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=partitions, replication_factor=3)


def fill(cluster: LocalCluster, topic: str, count: int, *, first: int = 0) -> None:
    """Numbered records, spread by key."""
    with tidelog.Producer(cluster.bootstrap) as producer:
        for number in range(first, first + count):
            producer.send(topic, str(number), key=f"key{number}")


class Process(Program):
    """A consumer's process. Each line that it writes begins with the time."""

    def __init__(self, cluster: LocalCluster, group: str, topic: str, **options: Any) -> None:
        super().__init__("consumer_process.py", cluster.bootstrap, group, topic, json.dumps(options))

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
