"""Bad requests against a whole node over real sockets: an error answer or a closed connection, never an unexpected
exception in the log, memory bounded.

3,000 requests in all; `FUZZ_MUTATIONS` raises the number. Half of them are well-formed and strange, half have broken
bytes (`support.kafka.invalid_requests`); `support.kafka.request_storm` says what may come of them. One seed is fixed,
one is drawn from the sources.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
from simulation.seeds import fresh_seeds
from support.async_tests import uvloop_test
from support.kafka.node import prepare, running
from support.kafka.request_storm import Assault
from support.kafka.server import soon

from tidelog.rpc.kafka.messages import APIS
from tidelog.server.config import NodeConfig

MUTATIONS = max(3_000, int(os.environ.get("FUZZ_MUTATIONS", "0")))
SEEDS = {"fixed": 7, "fresh": next(fresh_seeds("kafka requests"))}
MANY = 10_000
MIB = 1 << 20
GROWTH_MAX = 96 * MIB
"""Of resident memory, after the first quarter of the requests: logs and groups that they made are among it."""


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return prepare(tmp_path)


@pytest.mark.parametrize("which", SEEDS)
@uvloop_test
async def test_mutated_requests_are_answered_or_end_the_connection(which: str, config: NodeConfig) -> None:
    seed, count = SEEDS[which], MUTATIONS // len(SEEDS)
    async with running(config) as node:
        begun_s = time.monotonic()
        assault = Assault(node, seed)
        await assault.run(count // 4)
        gc.collect()
        before = resident()
        await assault.run(count - count // 4)
        await soon(node.is_idle, f"all is given back: {node.held()}", timeout_s=30)
        gc.collect()
        grown = resident() - before
        print(
            f"seed {seed}: {count} requests in {time.monotonic() - begun_s:.0f} s, {grown / MIB:.1f} MiB more:"
            f" {dict(sorted(assault.seen.items()))}"
        )
        assert grown < GROWTH_MAX, f"{grown / MIB:.0f} MiB more after {count} requests"
        # A few hundred requests may have none of what is rare.
        met = ("answered", "closed", "silent", "left") if count >= MANY else ("answered", "closed")
        assert min(assault.seen[one] for one in met) > 0, assault.seen
        print({APIS[key].name: f"{assault.done[key]} of {sent}" for key, sent in sorted(assault.of_key.items())})
        assert set(assault.of_key) == set(node.shared.table), "every api was asked"
