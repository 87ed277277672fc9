"""Three real processes on loopback: real disk, gRPC, real signals. They serve all tests; each leaves all three running.

`bench/raft_failover.py` measures the same processes. Leaders that die, freeze and restart: `test_fault_procedures.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from raft_cluster import NODES, RaftCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

START_S = 40.0
CATCH_UP_S = 40.0

Job = Callable[[RaftCluster], Awaitable[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Job], None]]:
    """Runs a job with the cluster, on one event loop for all of them."""
    cluster = RaftCluster(tmp_path_factory.mktemp("raft"))

    async def whole(job: Job) -> None:
        try:
            await cluster.propose(b"first", timeout_s=START_S)
            await job(cluster)
            await cluster.until_all_have_all(timeout_s=CATCH_UP_S)
        except BaseException:
            for node in NODES:
                print(f"--- node {node}\n{cluster.output(node)[-4000:]}")
            raise

    with asyncio.Runner() as runner:
        runner.run(cluster.__aenter__())
        try:
            cluster.start()
            yield lambda job: runner.run(whole(job))
        finally:
            runner.run(cluster.__aexit__())


def test_all_killed_at_once_come_back_with_everything(run: Callable[[Job], None]) -> None:
    async def job(cluster: RaftCluster) -> None:
        # Enough for snapshots to be taken (256 KiB), so that the restart begins with one.
        big = b"x" * 8_000
        for _ in range(8):
            await asyncio.gather(*(cluster.propose(big + b"%d" % n, timeout_s=CATCH_UP_S) for n in range(8)))
        for node in NODES:
            cluster.kill(node)
        cluster.start()
        await cluster.propose(b"last", timeout_s=START_S)
        assert any("snapshot taken" in cluster.output(node) for node in NODES)

    run(job)


@pytest.mark.case("R18")
def test_a_voter_that_moved_to_another_address_is_found_again(run: Callable[[Job], None]) -> None:
    async def job(cluster: RaftCluster) -> None:
        moved, away, _ = NODES
        cluster.kill(moved)
        cluster.kill(away)
        cluster.move(moved)
        cluster.start(moved)
        # Without the one that moved there is no majority.
        await cluster.propose(b"second", timeout_s=START_S)
        cluster.start(away)

    run(job)
