"""Shared by the broker benchmarks: a cluster of real processes, a client, load, and the cost of each process.

Not a benchmark: it has no `run()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: a killed broker is expected here

import uvloop

from tidelog.client.admin.core import AdminCore
from tidelog.client.cluster import ClusterClient
from tidelog.client.grpc_connections import GrpcConnections
from tidelog.client.metadata import TopicInfo
from tidelog.client.offsets import LATEST, list_offsets
from tidelog.client.producer.writer import Writer
from tidelog.log.batch import encode_columns
from tidelog.testing import LocalCluster
from tidelog.world.real.clock import SystemClock

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
# An installed package has its bytecode; nodes that are started here have theirs, wherever the sources come from.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "bytecode"))
LIMIT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def local_cluster(nodes: int, **settings: object) -> Iterator[LocalCluster]:
    """Start a cluster on the disk of the working tree: a temporary directory may be in memory."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-brokers-") as path,
        LocalCluster(nodes, data=path, settings=settings) as cluster,
    ):
        yield cluster


@contextlib.asynccontextmanager
async def client_of(cluster: LocalCluster) -> AsyncIterator[ClusterClient]:
    client = ClusterClient(
        cluster.bootstrap.split(","), GrpcConnections(), random=random.Random(1), clock=SystemClock()
    )
    try:
        yield client
    finally:
        await client.close()


async def make_topic(client: ClusterClient, name: str, *, partitions: int, replicas: int = 3) -> TopicInfo:
    """Create a topic; return when every partition has a leader that has answered."""
    await AdminCore(client).create_topic(name, partitions=partitions, replication_factor=replicas)
    topic = await client.topic(name)
    await list_offsets(client, topic, LATEST)
    return topic


def run_loop(job: Coroutine[Any, Any, T]) -> T:
    """Run the job on the event loop that nodes use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(job)


def made_batch(size: int, *, record_bytes: int = 100) -> bytes:
    """Return a batch of at most `size` bytes with incompressible records; at least one record."""
    source = random.Random(size)
    count = max(1, size // (record_bytes + 8))
    values: list[bytes | None] = [source.randbytes(record_bytes) for _ in range(count)]
    while True:
        batch = encode_columns([SystemClock().now_ms()] * count, [None] * count, values[:count])
        if len(batch) <= size or count == 1:
            return batch
        count = max(1, count - 1 - (len(batch) - size) // (record_bytes + 8))


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, all threads."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


@dataclass
class Cost:
    """Wall time, and processor time of each process, from creation to `stop`."""

    pids: Sequence[int]
    wall_s: float = 0.0
    each_s: list[float] = field(default_factory=list)
    _began_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._before = [cpu_s(pid) for pid in self.pids]

    def stop(self) -> Self:
        self.wall_s = time.perf_counter() - self._began_s
        self.each_s = [cpu_s(pid) - before for pid, before in zip(self.pids, self._before, strict=True)]
        return self

    @property
    def all_s(self) -> float:
        return sum(self.each_s)


async def write_all(writer: Writer, topic: TopicInfo, batch: bytes, count: int) -> None:
    """Write `count` batches to the partitions in turn; return when all are acknowledged, raise if one is not."""
    results = [await writer.send(topic.name, number % len(topic.partitions), batch) for number in range(count)]
    await asyncio.gather(*results)
