"""The cost of an idle cluster: processor time, memory, and the start time of a node.

Idle partitions: 1,000 with 3 replicas on three nodes, so each broker has all of them and leads a third. The figure is
the processor time of each node without clients; the anchor is the same cluster before they were created. A start is
measured from the process start to the first successful health response; the anchor is an interpreter that imports what
a node imports and exits.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.brokers_load import ROOT, Cost, client_of, local_cluster, make_topic, resident_bytes, run_loop
from bench.harness import Result, at_most
from tidelog.testing import LocalCluster

PARTITIONS = 1_000
IDLE_AFTER_S, WATCH_S = 5.0, 20.0
STARTS = 5
CORE_SHARE_MAX, READY_S_MAX, RESIDENT_MB_MAX = 5.0, 2.0, 150.0


@dataclass
class Idle:
    empty: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    """Percent of a core, per node."""
    resident_mb: list[float] = field(default_factory=list)


async def shares(pids: list[int]) -> list[float]:
    await asyncio.sleep(IDLE_AFTER_S)
    cost = Cost(pids)
    await asyncio.sleep(WATCH_S)
    cost.stop()
    return [100 * each_s / cost.wall_s for each_s in cost.each_s]


async def measure_idle(cluster: LocalCluster) -> Idle:
    pids = [cluster.pid(number) for number in (1, 2, 3)]
    found = Idle(empty=await shares(pids))
    async with client_of(cluster) as client:
        await make_topic(client, "idle", partitions=PARTITIONS)
    found.full = await shares(pids)
    found.resident_mb = [resident_bytes(pid) / 1e6 for pid in pids]
    return found


def import_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tidelog.server.run"], cwd=ROOT, check=True)
    return time.perf_counter() - began_s


def measure_starts() -> tuple[list[float], list[float], float]:
    """Return (seconds of first and later starts until ready, seconds of interpreters, resident MB) of a one-node
    cluster."""
    ready: list[float] = []
    with local_cluster(1) as cluster:
        resident_mb = resident_bytes(cluster.pid(1)) / 1e6
        for _ in range(STARTS):
            cluster.stop(1)
            began_s = time.perf_counter()
            cluster.start(1)
            ready.append(time.perf_counter() - began_s)
        return ready, [import_s() for _ in range(STARTS)], resident_mb


def run() -> Iterator[Result]:
    with local_cluster(3) as cluster:
        idle = run_loop(measure_idle(cluster))
    name = f"brokers, {PARTITIONS:,} idle partitions on each of three"
    worst, empty = max(idle.full), max(idle.empty)
    yield at_most(f"{name}: the busiest", worst, "% of a core", target=CORE_SHARE_MAX)
    yield Result("brokers, the same without them", empty, "% of a core", worst / empty, "with against without")
    yield Result(f"{name}: the largest", max(idle.resident_mb), "MB resident")
    ready, imports, resident_mb = measure_starts()
    yield at_most("brokers, one node from start to ready", min(ready), "s", target=READY_S_MAX)
    yield Result(
        "brokers, its slowest start", max(ready), "s", min(ready) / min(imports), "the best against its imports alone"
    )
    yield at_most("brokers, one node after start", resident_mb, "MB resident", target=RESIDENT_MB_MAX)
