"""What one group commit costs with 1, 10, 100 and 1,000 dirty logs: from the last append until all of them are durable.

Each log has one 4 KiB batch more than at its last sync. The anchor is the group with one log, in the same run; a group
of 1,000 may cost at most 100 times as much.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from bench.harness import Result, at_most
from tidelog.log.batch import Record, encode
from tidelog.log.config import LogConfig
from tidelog.log.log import Log
from tidelog.log.logs import Logs, LogsConfig
from tidelog.model.ids import DirectoryId, PartitionId, TopicId
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

COUNTS = (1, 10, 100, 1_000)
ROUNDS = {1: 15, 10: 15, 100: 9, 1_000: 5}
BATCH = encode([Record(0, 1, None, bytes(4000), ())])
TARGET = 100.0
NO_CHECKPOINTS = LogsConfig(checkpoint_interval_ms=3_600_000, open_files_max=2 * max(COUNTS))
# Below the working directory, since a temporary directory of the system may be in memory.
DATA = Path("build")


def run() -> Iterator[Result]:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-sync-", dir=DATA) as root:
        medians = asyncio.run(_measure(root))
    one = medians[1]
    for count, seconds in medians.items():
        name = f"one group commit, {count} dirty log{'s' if count > 1 else ''}"
        if count == max(COUNTS):
            yield at_most(name, seconds * 1e3, "ms", target=TARGET, ratio=seconds / one, anchor="1 log")
        else:
            yield Result(name, seconds * 1e3, "ms", seconds / one, "1 log")


async def _measure(root: str) -> dict[int, float]:
    """Median seconds of a group by its number of logs."""
    disk, store = RealDisk(root), LmdbStore(f"{root}/state")
    logs = await Logs.open(
        [(disk, store, DirectoryId(UUID(int=1)))],
        work=InlineWork(),
        clock=SystemClock(),
        config_of=lambda _: LogConfig(),
        config=NO_CHECKPOINTS,
    )
    try:
        topic = TopicId(UUID(int=9))
        opened = [
            await logs.create(PartitionId(topic, number), label="bench", config=LogConfig())
            for number in range(max(COUNTS))
        ]
        await _one_group(opened)  # the files are made, and their names synced
        medians = {}
        for count in COUNTS:
            # The first group of a size starts threads; it is not counted.
            await _one_group(opened[:count])
            medians[count] = statistics.median([await _one_group(opened[:count]) for _ in range(ROUNDS[count])])
        return medians
    finally:
        await logs.close()
        store.close()
        disk.close()


async def _one_group(logs: list[Log]) -> float:
    offsets = [log.append(BATCH, leader_epoch=0).last_offset for log in logs]
    began = time.perf_counter()
    await asyncio.gather(*(log.wait_durable(offset) for log, offset in zip(logs, offsets, strict=True)))
    return time.perf_counter() - began
