"""How much a cluster of three takes in, 3 replicas, acks=all, synced; and what a batch and a byte cost.

Batches of 1 MiB from a client in a process of its own to three brokers in theirs, three partitions, five batches of
each in flight. Beside it:

- the anchor: one process writes the same bytes to three files and syncs each after every batch; no copy, no network;
- the reference: the three nodes in one process without a network (`brokers_embedded`), called directly;
- batches of one record, which have next to no bytes: what a batch costs by itself.

Memory that a virtual machine has not used since its start, or has given back to its host, is slow at first touch (here
2 ms a megabyte, against 0.25 later), and every stored byte needs a page of the cache. A broker that has run for some
time has used all of it. So each round first writes a file of the size that it needs and removes it; the row "as the
memory comes" are two rounds before that.

Processor time counts all processes, and hardly depends on what else the machine does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.brokers_embedded import embedded_cluster, node_configs
from bench.brokers_load import ROOT, Cost, client_of, local_cluster, made_batch, make_topic, run_loop, write_all
from bench.harness import Result, at_least
from tidelog.client.producer.partition_queue import IN_FLIGHT_MAX
from tidelog.client.producer.writer import Writer
from tidelog.server.config import NodeConfig
from tidelog.testing import LocalCluster

BATCH_BYTES = 1 << 20
PARTITIONS = 3
BATCHES, SMALL_BATCHES, ROUNDS = 150, 3_000, 4
TARGET_MB_PER_S = 60.0


@dataclass
class Figures:
    """Of the best round: wall time; processor time of the client and of each broker."""

    wall_s: float
    cpu_s: list[float]

    @property
    def all_s(self) -> float:
        return sum(self.cpu_s)


def touch_memory(size: int) -> None:
    """So many bytes of the page cache are used, and free again."""
    path = ROOT / "build" / "bench-touch.tmp"
    data = bytes(BATCH_BYTES)
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(0, size, len(data)):
                file.write(data)
    finally:
        path.unlink(missing_ok=True)


def best(rounds: list[Cost]) -> Figures:
    found = min(rounds, key=lambda cost: cost.wall_s)
    return Figures(found.wall_s, min(rounds, key=lambda cost: cost.all_s).each_s)


async def measure_cluster(cluster: LocalCluster) -> tuple[Figures, Figures, Figures]:
    """(1 MiB on used memory, 1 MiB as the memory comes, one record)"""
    large, small = made_batch(BATCH_BYTES), made_batch(1)
    pids = [os.getpid(), *(cluster.pid(number) for number in (1, 2, 3))]
    used: list[Cost] = []
    fresh: list[Cost] = []
    tiny: list[Cost] = []
    async with client_of(cluster) as client:
        topic = await make_topic(client, "throughput", partitions=PARTITIONS)
        writer = Writer(client)
        try:
            await write_all(writer, topic, large, 4 * PARTITIONS)
            for costs, batch, count in [
                *[(fresh, large, BATCHES)] * 2,
                *[(used, large, BATCHES), (tiny, small, SMALL_BATCHES)] * ROUNDS,
            ]:
                if costs is used:
                    touch_memory(4 * BATCHES * BATCH_BYTES)
                cost = Cost(pids)
                await write_all(writer, topic, batch, count)
                costs.append(cost.stop())
        finally:
            await writer.close()
    return best(used), best(fresh), best(tiny)


async def measure_embedded(configs: Sequence[NodeConfig]) -> tuple[Figures, Figures]:
    """(1 MiB on used memory, one record)"""
    large, small = made_batch(BATCH_BYTES), made_batch(1)
    used: list[Cost] = []
    tiny: list[Cost] = []
    async with embedded_cluster(configs) as cluster:
        partitions = await cluster.make_topic("throughput", PARTITIONS)
        await cluster.write_all(partitions, large, 4 * PARTITIONS, in_flight_max=IN_FLIGHT_MAX)
        for _ in range(ROUNDS):
            touch_memory(4 * BATCHES * BATCH_BYTES)
            for costs, batch, count in ((used, large, BATCHES), (tiny, small, SMALL_BATCHES)):
                cost = Cost([os.getpid()])
                await cluster.write_all(partitions, batch, count, in_flight_max=IN_FLIGHT_MAX)
                costs.append(cost.stop())
    return best(used), best(tiny)


def bare_s() -> float:
    """The same bytes to three files, each synced after every batch."""
    batch = made_batch(BATCH_BYTES)
    paths = [ROOT / "build" / f"bench-bare-{number}.tmp" for number in range(3)]
    fastest_s = float("inf")
    for _ in range(ROUNDS):
        touch_memory(4 * BATCHES * BATCH_BYTES)
        try:
            files = [path.open("wb", buffering=0) for path in paths]
            began_s = time.perf_counter()
            for _ in range(BATCHES):
                for file in files:
                    file.write(batch)
                    os.fdatasync(file.fileno())
            fastest_s = min(fastest_s, time.perf_counter() - began_s)
            for file in files:
                file.close()
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
    return fastest_s


def run() -> Iterator[Result]:
    megabytes = BATCHES * len(made_batch(BATCH_BYTES)) / 1e6
    with local_cluster(3) as cluster:
        used, fresh, tiny = run_loop(measure_cluster(cluster))
    with node_configs() as configs:
        embedded, embedded_tiny = run_loop(measure_embedded(configs))
    bare = megabytes / bare_s()
    speed, reference = megabytes / used.wall_s, megabytes / embedded.wall_s
    yield at_least("brokers, 1 MiB batches acknowledged", speed, "MB/s", target=TARGET_MB_PER_S)
    yield Result("brokers, the same as the memory comes", megabytes / fresh.wall_s, "MB/s")
    yield Result("brokers, three files written and synced", bare, "MB/s", speed / bare, "acknowledged against this")
    yield Result("brokers, in one process", reference, "MB/s", speed / reference, "acknowledged against this")
    each = used.all_s * 1000 / megabytes
    alone = embedded.all_s * 1000 / megabytes
    yield Result("brokers, processor time of it", each, "ms/MB", each / alone, "in one process without the network")
    yield Result("brokers, the client's part", used.cpu_s[0] * 1000 / megabytes, "ms/MB")
    yield Result("brokers, processor time of it, in one process", alone, "ms/MB")
    small = tiny.all_s * 1000 / SMALL_BATCHES
    small_alone = embedded_tiny.all_s * 1000 / SMALL_BATCHES
    yield Result("brokers, batches of one record", SMALL_BATCHES / tiny.wall_s, "batches/s")
    yield Result("brokers, processor time of one", small, "ms/batch", small / small_alone, "in one process")
    yield Result("brokers, processor time of one, in one process", small_alone, "ms/batch")
