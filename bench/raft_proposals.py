"""Proposals per second of three Raft members in one process, each with its own directory on the real disk.

Everything that a proposal costs is in it but the network: the core, both syncs (log, then state store) on all three,
the messages encoded and decoded. The anchor is one sync of one file on the same disk in the same run: a proposal alone
waits for two syncs on a leader and, side by side, on two followers.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

from bench.harness import Result, at_most
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import RoleChange
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, SnapshotId
from tidelog.raft.storage import RaftStorage
from tidelog.world.local_transport import LocalNetwork
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork

ROOT = Path(__file__).resolve().parent.parent
NODES = (NodeId(1), NodeId(2), NodeId(3))
VALUE = b"v" * 100
SECONDS = 2.0
WAITING = (1, 16, 256)
SYNCS_PER_ROUND = 2
SYNCS_PER_PROPOSAL_MAX = 1 / 16


class Count:
    """A state machine that does nothing: it is not what is measured."""

    def __init__(self) -> None:
        self.applied = 0

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        self.applied += len(entries)

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        self.applied = snapshot.offset

    def take_snapshot(self) -> bytes:
        return b"%d" % self.applied

    def role_changed(self, change: RoleChange) -> None:
        """Nobody asks."""


def directory(node: NodeId) -> bytes:
    return bytes([node]) * 16


async def start(network: LocalNetwork, node: NodeId, path: Path, stack: AsyncExitStack) -> RaftDriver:
    disk, store = RealDisk(path, create=True), LmdbStore(path / "state")
    stack.callback(disk.close)
    stack.callback(store.close)
    work, clock = InlineWork(), SystemClock()
    storage = RaftStorage(disk=disk, store=store, work=work, clock=clock, cluster_id="bench", node=node)
    voters = Membership(tuple(Member(one, directory(one)) for one in NODES))
    await storage.format(directory=directory(node), membership=voters)
    boot = await storage.open()
    transport = network.join(node)
    driver = RaftDriver(storage.me, storage, boot, transport, Count(), DriverConfig(), Random(node), work=work)
    await transport.start()
    await driver.start()
    stack.push_async_callback(storage.close)
    stack.push_async_callback(transport.close)
    stack.push_async_callback(driver.close)
    return driver


async def measure(driver: RaftDriver, waiting: int) -> tuple[float, float]:
    """Proposals per second, and syncs per proposal, with so many that wait at a time.

    A round of persisting is two syncs: of the log, then of the state store.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS
    rounds, done = driver.metrics.persist_rounds, 0

    async def propose() -> None:
        nonlocal done
        while loop.time() < end:
            await driver.propose(VALUE)
            done += 1

    began = loop.time()
    await asyncio.gather(*(propose() for _ in range(waiting)))
    return done / (loop.time() - began), SYNCS_PER_ROUND * (driver.metrics.persist_rounds - rounds) / done


async def sync_seconds(path: Path) -> float:
    """One append and sync of one file, alone: the middle of many."""
    disk = RealDisk(path)
    file = disk.open("anchor", create=True)
    times: list[float] = []
    try:
        for _ in range(200):
            file.append(VALUE)
            began = time.perf_counter()
            await disk.sync_many([file])
            times.append(time.perf_counter() - began)
    finally:
        file.close()
        disk.close()
    return sorted(times)[len(times) // 2]


async def run_all(path: Path) -> list[Result]:
    results: list[Result] = []
    async with AsyncExitStack() as stack:
        network = LocalNetwork()
        drivers = {node: await start(network, node, path / str(node), stack) for node in NODES}
        first = drivers[NODES[0]]
        while (leading := first.core.leader) is None:
            await first.wait_for_role_change()
        leader = drivers[leading]
        await leader.propose(VALUE)
        before: float | None = None
        for waiting in WAITING:
            one_sync = await sync_seconds(path)
            rate, syncs = await measure(leader, waiting)
            results.append(
                Result(
                    f"raft proposals of 100 bytes, {waiting} waiting",
                    rate,
                    "proposals/s",
                    rate * one_sync,
                    "syncs/s of one file",
                )
            )
            name = f"raft syncs per proposal, {waiting} waiting"
            if waiting == WAITING[-1]:
                results.append(at_most(name, syncs, "syncs", target=SYNCS_PER_PROPOSAL_MAX))
            elif before is not None:
                results.append(at_most(name, syncs, "syncs", target=before))
            else:
                results.append(Result(name, syncs, "syncs"))
            before = syncs
    return results


def run() -> list[Result]:
    # Under the repository: the system's directory for temporary files is often kept in memory.
    (ROOT / "build").mkdir(exist_ok=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # as a server does: a thread that ends a sync does not wait long for its turn
    try:
        with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="raft-bench-") as path:
            return asyncio.run(run_all(Path(path)))
    finally:
        sys.setswitchinterval(interval)
