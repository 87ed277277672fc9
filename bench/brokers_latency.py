"""Time to acknowledge one small batch without other load: 3 replicas, acks=all, synced.

A client in its own process sends a batch of one 100-byte record every 20 ms to a cluster of three. The anchor is a
synced write of the same bytes to a file on the same disk, one per batch and between batches: an acknowledgement needs
two of those in sequence, the leader's and a follower's in parallel with it, and four hops.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.brokers_load import ROOT, client_of, local_cluster, made_batch, make_topic, run_loop
from bench.harness import Result, at_most
from tidelog.client.producer.writer import Writer
from tidelog.testing import LocalCluster

BATCHES, WARM_UP, PAUSE_S = 300, 50, 0.02
TARGET_MS = 5.0


@dataclass
class Times:
    acks_s: list[float] = field(default_factory=list)
    syncs_s: list[float] = field(default_factory=list)


async def measure(cluster: LocalCluster) -> Times:
    batch = made_batch(1, record_bytes=100)
    times = Times()
    async with client_of(cluster) as client:
        topic = await make_topic(client, "light", partitions=1)
        writer = Writer(client)
        with tempfile.TemporaryFile(dir=ROOT / "build") as file:
            try:
                for number in range(WARM_UP + BATCHES):
                    await asyncio.sleep(PAUSE_S / 2)
                    began_s = time.perf_counter()
                    await (await writer.send(topic.name, 0, batch))
                    acked_s = time.perf_counter()
                    await asyncio.sleep(PAUSE_S / 2)
                    wrote_s = time.perf_counter()
                    os.write(file.fileno(), batch)
                    os.fdatasync(file.fileno())
                    if number >= WARM_UP:
                        times.acks_s.append(acked_s - began_s)
                        times.syncs_s.append(time.perf_counter() - wrote_s)
            finally:
                await writer.close()
    return times


def run() -> Iterator[Result]:
    with local_cluster(3) as cluster:
        times = run_loop(measure(cluster))
    acks, syncs = sorted(times.acks_s), sorted(times.syncs_s)
    middle_ms, sync_ms = (values[len(values) // 2] * 1000 for values in (acks, syncs))
    yield at_most("brokers, ack of one small batch: the middle one", middle_ms, "ms", target=TARGET_MS)
    yield Result("brokers, ack of one small batch: 95 of 100", acks[len(acks) * 95 // 100] * 1000, "ms")
    yield Result("brokers, ack of one small batch: 99 of 100", acks[len(acks) * 99 // 100] * 1000, "ms")
    yield Result(
        "brokers, a synced write beside it", sync_ms, "ms", middle_ms / sync_ms, "ack against one write and fdatasync"
    )
