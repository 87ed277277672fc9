"""Raft storage on a simulated machine and on the real disk, and persist effects as a core makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import Entry, EntryKind, SnapshotChunk, SnapshotId
from tidelog.raft.snapshots import TRANSFER_BYTES, Snapshot, encode_file
from tidelog.raft.storage import RaftStorage
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork
from tidelog.world.simulated import SimMachine, SimNode, SimWorld
from tidelog.world.simulated.scheduler import NodeDiedError
from tidelog.world.store import StateStore
from tidelog.world.work import Work

T = TypeVar("T")

CLUSTER = "cluster"
ME = VoterKey(NodeId(1), b"\x01" * 16)
OTHER = VoterKey(NodeId(2), b"\x02" * 16)
THREE = Membership(tuple(Member(NodeId(n), bytes([n]) * 16, (("CONTROLLER", f"host{n}:9192"),)) for n in (1, 2, 3)))
ALONE = Membership((Member(ME.node, ME.directory),))


def entry(epoch: int, data: bytes | int = b"", kind: EntryKind = EntryKind.DATA) -> Entry:
    return Entry(Epoch(epoch), kind, data if isinstance(data, bytes) else b"value %d" % data)


def run_of(epoch: int, first: int, count: int) -> tuple[Entry, ...]:
    return tuple(entry(epoch, offset) for offset in range(first, first + count))


class Steps:
    """Builds persist effects as a core would: each continues where the one before ended."""

    def __init__(self, end: int = 0, epoch: int = 0, vote: VoterKey | None = None) -> None:
        self.end, self.number = end, 0
        self.state = HardState(Epoch(epoch), vote)

    def __call__(
        self,
        entries: Sequence[Entry] = (),
        *,
        epoch: int | None = None,
        vote: VoterKey | None = None,
        truncate_to: int | None = None,
        reset_to: int | None = None,
        recovered: bool = False,
    ) -> Persist:
        if epoch is not None:
            self.state = HardState(Epoch(epoch), vote)
        self.number += 1
        cut = reset_to if reset_to is not None else truncate_to
        first = self.end if cut is None else cut
        self.end = first + len(entries)
        return Persist(
            self.number,
            self.state,
            None if reset_to is None else Offset(reset_to),
            None if truncate_to is None else Offset(truncate_to),
            Offset(first),
            tuple(entries),
            recovered,
        )


@dataclass
class Parts:
    """What a storage stands on."""

    disk: Disk
    store: StateStore
    work: Work
    clock: Clock

    def storage(self, *, cluster: str = CLUSTER, node: NodeId = ME.node) -> RaftStorage:
        return RaftStorage(
            disk=self.disk, store=self.store, work=self.work, clock=self.clock, cluster_id=cluster, node=node
        )

    async def formatted(self, membership: Membership = THREE) -> RaftStorage:
        storage = self.storage()
        await storage.format(directory=ME.directory, membership=membership)
        return storage

    async def opened(self) -> tuple[RaftStorage, BootState]:
        storage = self.storage()
        return storage, await storage.open()


Job = Callable[[Parts], Coroutine[Any, Any, T]]


class SimHost:
    """Runs each job as a process of its own on one simulated machine."""

    def __init__(self, seed: int = 1) -> None:
        self.world = SimWorld(seed)
        self.machine: SimMachine = self.world.machine("a")

    def run(self, job: Job[T]) -> T:
        async def main(node: SimNode) -> T:
            return await job(parts_of(node))

        node = self.machine.boot()
        try:
            return self.world.run(node, main, timeout=60)
        finally:
            if self.machine.node is not None:
                self.machine.kill()

    def run_to_crash(self, job: Job[Any]) -> bool:
        """Whether the power went before it was done."""
        try:
            self.run(job)
        except NodeDiedError:
            return True
        return False


def parts_of(node: SimNode) -> Parts:
    return Parts(node.disk(), node.store(), node.work, node.clock)


class RealHost:
    """The same in a directory of the real file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, job: Job[T]) -> T:
        async def main() -> T:
            disk, store = RealDisk(self.path), LmdbStore(self.path / "state")
            try:
                return await job(Parts(disk, store, InlineWork(), SystemClock()))
            finally:
                store.close()
                disk.close()

        return asyncio.run(main())


def simulated_host() -> Iterator[SimHost]:
    """For a fixture."""
    found = SimHost()
    with found.world:
        yield found


async def boot_state(parts: Parts) -> BootState:
    return (await parts.opened())[1]


async def store_some(parts: Parts) -> None:
    """Format; epoch 3 with a vote; twenty entries."""
    await parts.formatted()
    storage, _ = await parts.opened()
    step = Steps()
    await storage.persist([step(run_of(1, 0, 12), epoch=1)])
    await storage.persist([step(run_of(3, 12, 8), epoch=3, vote=OTHER)])


async def install(storage: RaftStorage, snapshot: SnapshotId, membership: Membership, data: bytes) -> Snapshot | int:
    """Receive a snapshot piece by piece, as a leader sends it."""
    raw = b"".join(encode_file(snapshot, membership, data))
    outcome: Snapshot | int = 0
    for position in range(0, len(raw), TRANSFER_BYTES):
        piece = raw[position : position + TRANSFER_BYTES]
        chunk = SnapshotChunk(Epoch(9), OTHER.node, snapshot, position, piece, len(raw))
        outcome = await storage.write_chunk(chunk)
    return outcome


def snapshot_id(offset: int, epoch: int) -> SnapshotId:
    return SnapshotId(Offset(offset), Epoch(epoch))
