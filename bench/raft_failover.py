"""How long a group of three real processes is without service when its leader dies or freezes.

From the signal to the first proposal that another leader has acknowledged, seen by a client on the same machine. Twenty
times kill -9, then SIGSTOP; the processes and the client are those of the cluster tests.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from bench.harness import Result, at_least, at_most

ROOT = Path(__file__).resolve().parent.parent
KILLS, FREEZES = 20, 5
KILL_S_MAX, FREEZE_S_MAX = 1.0, 2.0
LIMIT_S = 30.0


async def measure(path: Path) -> tuple[list[float], list[float]]:
    # The node's program and the client live with the tests, which are no package.
    sys.path.insert(0, str(ROOT / "tests" / "cluster"))
    from raft_cluster import RaftCluster

    kills: list[float] = []
    freezes: list[float] = []
    async with RaftCluster(path) as cluster:
        cluster.start()
        await cluster.propose(b"first", timeout_s=LIMIT_S)
        for number in range(KILLS):
            victim = cluster.leader
            assert victim is not None
            kills.append(await cluster.fail_over(b"kill %d" % number, cluster.kill, timeout_s=LIMIT_S))
            cluster.start(victim)
            await cluster.until_all_have_all(timeout_s=LIMIT_S)
        for number in range(FREEZES):
            victim = cluster.leader
            assert victim is not None
            freezes.append(await cluster.fail_over(b"freeze %d" % number, cluster.freeze, timeout_s=LIMIT_S))
            cluster.thaw(victim)
            await cluster.until_all_have_all(timeout_s=LIMIT_S)
    return kills, freezes


def run() -> list[Result]:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="raft-failover-") as path:
        kills, freezes = asyncio.run(measure(Path(path)))
    in_time = sum(seconds < KILL_S_MAX for seconds in kills)
    return [
        at_least(f"raft, leader killed: a commit within {KILL_S_MAX:.0f} s", in_time, f"of {KILLS}", target=KILLS),
        Result("raft, leader killed: the middle one", sorted(kills)[KILLS // 2] * 1000, "ms"),
        at_most("raft, leader killed: the slowest", max(kills) * 1000, "ms", target=KILL_S_MAX * 1000),
        at_most("raft, leader frozen: the slowest", max(freezes) * 1000, "ms", target=FREEZE_S_MAX * 1000),
    ]
