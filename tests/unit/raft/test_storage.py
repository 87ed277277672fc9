"""Raft storage: what survives, what is refused, what is repaired. On the simulated machine, and on the real disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tidelog.model.errors import (
    CorruptStateError,
    LostStateError,
    StorageError,
    UnformattedDirectoryError,
    WrongDirectoryError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.core import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.membership import Member, Membership, VoterKey
from tidelog.raft.messages import Entry, EntryKind, SnapshotChunk, SnapshotId
from tidelog.raft.snapshots import PIECE_BYTES, Snapshot, encode_file
from tidelog.raft.storage import METADATA_LOG_PATH, STATE_KEY, RaftStorage
from tidelog.raft.stored import merge
from tidelog.world.clock import Clock
from tidelog.world.disk import Disk
from tidelog.world.real.clock import SystemClock
from tidelog.world.real.disk import RealDisk
from tidelog.world.real.store import LmdbStore
from tidelog.world.real.work import InlineWork
from tidelog.world.simulated import Loss, SimMachine, SimNode, SimWorld
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


@pytest.fixture(params=["simulated", "real"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "real":
        yield RealHost(tmp_path)
        return
    found = SimHost()
    with found.world:
        yield found


@pytest.fixture
def sim() -> Any:
    found = SimHost()
    with found.world:
        yield found


async def store_some(parts: Parts) -> None:
    """Format; epoch 3 with a vote; twenty entries."""
    await parts.formatted()
    storage, _ = await parts.opened()
    step = Steps()
    await storage.persist([step(run_of(1, 0, 12), epoch=1)])
    await storage.persist([step(run_of(3, 12, 8), epoch=3, vote=OTHER)])


# What survives.


def test_what_was_persisted_is_there_after_a_restart(host: Any) -> None:
    host.run(store_some)

    async def look(parts: Parts) -> BootState:
        storage, boot = await parts.opened()
        assert storage.me == ME
        return boot

    boot = host.run(look)
    assert boot.hard_state == HardState(Epoch(3), OTHER)
    assert boot.snapshot == SnapshotId(Offset(0), Epoch(0))
    assert boot.membership == THREE
    assert boot.entries == run_of(1, 0, 12) + run_of(3, 12, 8)
    assert boot.recovering_until is None


def test_a_clean_stop_loses_nothing_either(host: Any) -> None:
    async def store(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        await storage.persist([Steps()(run_of(1, 0, 3), epoch=1)])
        await storage.close()

    host.run(store)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    assert host.run(look).entries == run_of(1, 0, 3)


def test_all_kinds_of_entries_come_back_as_they_were(host: Any) -> None:
    rows = (entry(1, b"", EntryKind.NO_OP), entry(1, THREE.encode(), EntryKind.MEMBERSHIP), entry(1, b"x" * 300_000))

    async def store(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        await storage.persist([Steps()(rows, epoch=1)])

    host.run(store)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    assert host.run(look).entries == rows


def test_a_vote_is_durable_when_persist_returns(sim: SimHost) -> None:
    async def vote(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        await storage.persist([Steps()(epoch=7, vote=OTHER)])

    sim.run(vote)
    sim.machine.lose_power(Loss.ALL)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    assert sim.run(look).hard_state == HardState(Epoch(7), OTHER)


@pytest.mark.parametrize("loss", list(Loss))
def test_acknowledged_entries_survive_a_loss_of_power(loss: Loss) -> None:
    host = SimHost(seed=5)
    with host.world:
        host.run(store_some)
        host.machine.lose_power(loss)

        async def look(parts: Parts) -> BootState:
            return (await parts.opened())[1]

        boot = host.run(look)
        assert boot.entries == run_of(1, 0, 12) + run_of(3, 12, 8)
        assert boot.recovering_until is None


def test_a_torn_tail_is_cut_and_is_no_loss(sim: SimHost) -> None:
    sim.run(store_some)

    async def write_without_sync(parts: Parts) -> None:
        storage, _ = await parts.opened()
        storage._append(Offset(20), run_of(3, 20, 5))  # as a persist that the power interrupts

    sim.run(write_without_sync)
    device = sim.machine.disk()
    path = f"{METADATA_LOG_PATH}/{0:020d}.log"
    device.cut(path, len(device.raw(path)) - 7)

    async def look(parts: Parts) -> BootState:
        storage, boot = await parts.opened()
        await storage.persist([Steps(end=20, epoch=4)(run_of(4, 20, 1))])
        return boot

    boot = sim.run(look)
    assert boot.entries == run_of(1, 0, 12) + run_of(3, 12, 8)
    assert boot.recovering_until is None

    async def look_again(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    assert sim.run(look_again).entries[20:] == run_of(4, 20, 1)


def test_what_lies_past_the_synced_end_is_cut_at_the_start(sim: SimHost) -> None:
    """It was never acknowledged; after a failed sync it may read well and still be lost with the power."""
    sim.run(store_some)

    async def write_without_commit(parts: Parts) -> None:
        storage, _ = await parts.opened()
        storage._append(Offset(20), run_of(9, 20, 1))
        await storage.log.flush()

    sim.run(write_without_commit)

    async def look(parts: Parts) -> tuple[BootState, BootState]:
        first = (await parts.opened())[1]
        return first, (await parts.opened())[1]

    for boot in sim.run(look):
        assert boot.hard_state.epoch < 9
        assert len(boot.entries) == 20
        assert boot.recovering_until is None


# Cutting.


def test_truncation_cuts_and_goes_on(host: Any) -> None:
    async def cut(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        step = Steps()
        await storage.persist([step(run_of(1, 0, 5), epoch=1)])
        await storage.persist([step(run_of(2, 5, 5), epoch=2)])
        await storage.persist([step(run_of(4, 5, 2), epoch=4, truncate_to=5)])

    host.run(cut)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    assert host.run(look).entries == run_of(1, 0, 5) + run_of(4, 5, 2)


def test_truncation_in_the_middle_of_what_was_written_together_keeps_the_rest(host: Any) -> None:
    async def cut(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        step = Steps()
        await storage.persist([step(run_of(1, 0, 10), epoch=1)])
        await storage.persist([step(run_of(2, 4, 1), epoch=2, truncate_to=4)])

    host.run(cut)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    assert host.run(look).entries == run_of(1, 0, 4) + run_of(2, 4, 1)


def test_the_synced_end_is_lowered_before_the_file_is_cut(sim: SimHost) -> None:
    """Else a crash in between would make a sound log look like one that lost what it acknowledged."""
    sim.run(store_some)
    device, store = sim.machine.disk(), sim.machine.store()
    seen: list[str] = []

    async def cut(parts: Parts) -> None:
        storage, _ = await parts.opened()
        log_truncate, commit = storage.log.truncate, parts.store.commit

        async def note_commit(writes: Any) -> None:
            if STATE_KEY in writes:
                seen.append("state")
            await commit(writes)

        parts.store.commit = note_commit  # type: ignore[method-assign]
        before = device.operations
        await storage.persist([Steps(end=20, epoch=4)(run_of(4, 15, 1), truncate_to=15)])
        assert log_truncate is not None
        assert device.operations > before

    sim.run(cut)
    assert seen == ["state", "state"], "one commit before the cut, one after the sync"
    assert store.transactions > 0


def test_several_effects_become_one() -> None:
    step = Steps(end=10)
    change = merge(
        [
            step(run_of(1, 10, 5), epoch=1),
            step(run_of(2, 12, 3), epoch=2, truncate_to=12),
            step((), epoch=3, vote=ME),
            step(run_of(3, 8, 2), epoch=3, truncate_to=8, recovered=True),
        ]
    )
    assert change.hard_state == HardState(Epoch(3), None)
    assert (change.truncate_to, change.first) == (8, 8)
    assert change.entries == run_of(3, 8, 2)
    assert change.recovered
    assert change.reset_to is None


def test_a_reset_swallows_what_came_before_it() -> None:
    step = Steps(end=10)
    change = merge(
        [step(run_of(1, 10, 5), epoch=1), step(run_of(4, 50, 2), epoch=4, reset_to=50), step(run_of(4, 52, 1))]
    )
    assert (change.reset_to, change.truncate_to, change.first) == (50, None, 50)
    assert change.entries == run_of(4, 50, 3)


def test_a_group_of_effects_costs_one_sync_of_the_log_and_one_commit(sim: SimHost) -> None:
    async def persist_many(parts: Parts) -> tuple[int, int]:
        await parts.formatted()
        storage, _ = await parts.opened()
        step = Steps()
        await storage.persist([step(run_of(1, 0, 1), epoch=1)])  # makes the segment's file
        syncs, commits = sim.machine.disk().syncs, sim.machine.store().transactions
        await storage.persist([step(run_of(1, offset, 1)) for offset in range(1, 100)])
        return sim.machine.disk().syncs - syncs, sim.machine.store().transactions - commits

    assert sim.run(persist_many) == (1, 1)


# Refusals.


def test_an_unformatted_directory_is_refused(host: Any) -> None:
    async def look(parts: Parts) -> None:
        with pytest.raises(UnformattedDirectoryError, match="storage format"):
            await parts.storage().open()

    host.run(look)


def test_formatting_twice_is_refused(host: Any) -> None:
    async def format_twice(parts: Parts) -> None:
        await parts.formatted()
        with pytest.raises(StorageError, match="formatted already"):
            await parts.storage().format(directory=OTHER.directory, membership=THREE)

    host.run(format_twice)


@pytest.mark.case("R10")
def test_a_wiped_directory_comes_back_as_another_voter(sim: SimHost) -> None:
    sim.run(store_some)
    sim.machine.disk().wipe()
    sim.machine.store().wipe()

    async def refuse(parts: Parts) -> None:
        with pytest.raises(UnformattedDirectoryError):
            await parts.storage().open()

    sim.run(refuse)

    async def format_anew(parts: Parts) -> tuple[VoterKey, BootState]:
        storage = parts.storage()
        await storage.format(directory=b"\x09" * 16, membership=Membership())
        boot = await storage.open()
        return storage.me, boot

    me, boot = sim.run(format_anew)
    assert me == VoterKey(ME.node, b"\x09" * 16)
    assert not THREE.has_voter(me), "it is not the voter that it was"
    assert boot.membership == Membership()


@pytest.mark.case("R11")
def test_a_lost_state_store_is_refused_also_by_format(sim: SimHost) -> None:
    sim.run(store_some)
    sim.machine.store().wipe()

    async def refuse(parts: Parts) -> None:
        with pytest.raises(LostStateError, match="must not vote again"):
            await parts.storage().open()
        with pytest.raises(LostStateError, match="Remove this voter"):
            await parts.storage().format(directory=ME.directory, membership=THREE)

    sim.run(refuse)


@pytest.mark.case("R11")
def test_a_vote_that_is_gone_or_unreadable_is_refused(sim: SimHost) -> None:
    sim.run(store_some)
    store = sim.machine.store()
    kept = store.stored[STATE_KEY]

    async def refuse(parts: Parts) -> None:
        with pytest.raises(LostStateError, match="must not vote again"):
            await parts.storage().open()

    store.flip_bit(STATE_KEY, 9)
    sim.run(refuse)
    del store.stored[STATE_KEY]
    sim.run(refuse)
    store.stored[STATE_KEY] = kept

    async def accept(parts: Parts) -> None:
        await parts.opened()

    sim.run(accept)


def test_a_directory_of_another_cluster_or_node_is_refused(host: Any) -> None:
    host.run(store_some)

    async def refuse(parts: Parts) -> None:
        with pytest.raises(WrongDirectoryError, match="node 1 of cluster cluster"):
            await parts.storage(cluster="another").open()
        with pytest.raises(WrongDirectoryError, match="this is node 2"):
            await parts.storage(node=NodeId(2)).open()

    host.run(refuse)


def test_files_and_state_of_two_directories_are_refused(sim: SimHost) -> None:
    async def format_other(parts: Parts) -> None:
        await parts.storage().format(directory=OTHER.directory, membership=THREE)

    sim.run(store_some)
    strange = dict(sim.machine.store().stored)
    sim.machine.disk().wipe()
    sim.machine.store().wipe()
    sim.run(format_other)
    sim.machine.store().stored = strange

    async def refuse(parts: Parts) -> None:
        with pytest.raises(WrongDirectoryError, match="not of one directory"):
            await parts.storage().open()

    sim.run(refuse)


# Loss of what was synced.


@pytest.mark.parametrize("how", ["shorter", "flipped", "epoch flipped", "gone"])
def test_a_voter_that_lost_synced_entries_is_recovering(sim: SimHost, how: str) -> None:
    sim.run(store_some)
    device = sim.machine.disk()
    path = f"{METADATA_LOG_PATH}/{0:020d}.log"
    size = len(device.raw(path))
    good = {"shorter": 12, "flipped": 12, "epoch flipped": 0, "gone": 0}[how]
    if how == "shorter":
        device.cut(path, size - 3)
    elif how == "flipped":
        device.flip_bit(path, size - 20)
    elif how == "epoch flipped":
        device.flip_bit(path, 15)  # the leader epoch of the first batch, which its CRC does not cover
    else:
        device.cut(path, 0)

    async def look(parts: Parts) -> tuple[BootState, list[str]]:
        storage, boot = await parts.opened()
        assert storage.synced_end == good
        return boot, storage.notes

    boot, notes = sim.run(look)
    assert boot.recovering_until == 20
    assert boot.loss_epoch == 3
    assert boot.entries == run_of(1, 0, 12)[:good]
    assert any("recovering until 20" in note for note in notes)
    # The mark is durable: the next start knows it too, though the log now ends where it should.
    sim.machine.lose_power(Loss.ALL)
    boot, _ = sim.run(look)
    assert boot.recovering_until == 20


def test_the_mark_goes_when_a_leader_has_restored_what_was_lost(sim: SimHost) -> None:
    sim.run(store_some)
    sim.machine.disk().cut(f"{METADATA_LOG_PATH}/{0:020d}.log", 0)

    async def recover(parts: Parts) -> None:
        storage, boot = await parts.opened()
        assert boot.recovering_until == 20
        step = Steps(end=0, epoch=5)
        await storage.persist([step(run_of(1, 0, 10)), step(run_of(5, 10, 11)), step((), recovered=True)])

    sim.run(recover)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    boot = sim.run(look)
    assert boot.recovering_until is None
    assert boot.entries == run_of(1, 0, 10) + run_of(5, 10, 11)


# Snapshots.


async def install(storage: RaftStorage, snapshot: SnapshotId, membership: Membership, data: bytes) -> Snapshot | int:
    """Receive a snapshot piece by piece, as a leader sends it."""
    raw = b"".join(encode_file(snapshot, membership, data))
    outcome: Snapshot | int = 0
    for position in range(0, len(raw), PIECE_BYTES):
        piece = raw[position : position + PIECE_BYTES]
        chunk = SnapshotChunk(Epoch(9), OTHER.node, snapshot, position, piece, len(raw))
        outcome = await storage.write_piece(chunk)
    return outcome


def snapshot_id(offset: int, epoch: int) -> SnapshotId:
    return SnapshotId(Offset(offset), Epoch(epoch))


def test_a_snapshot_that_was_taken_is_what_the_next_start_begins_with(host: Any) -> None:
    host.run(store_some)
    state = bytes(range(256)) * 3000

    async def take(parts: Parts) -> None:
        storage, _ = await parts.opened()
        await storage.write_snapshot(snapshot_id(15, 3), ALONE, state)
        await storage.drop_before(Offset(10))

    host.run(take)

    async def look(parts: Parts) -> tuple[BootState, bytes, Offset]:
        storage, boot = await parts.opened()
        return boot, storage.boot_data, storage.log_start

    boot, data, log_start = host.run(look)
    assert boot.snapshot == snapshot_id(15, 3)
    assert (boot.start, boot.start_epoch) == (15, 3)
    assert boot.membership == ALONE
    assert boot.entries == run_of(3, 15, 5)
    assert data == state
    assert log_start == 0, "the log is kept back to the snapshot before"


def test_the_log_goes_up_to_the_snapshot_before_the_last(host: Any) -> None:
    host.run(store_some)

    async def take(parts: Parts) -> tuple[Offset, list[SnapshotId]]:
        storage, _ = await parts.opened()
        for offset, epoch in ((5, 1), (12, 1), (18, 3)):
            await storage.write_snapshot(snapshot_id(offset, epoch), THREE, b"state")
            await storage.drop_before(Offset(offset))
        return storage.log_start, storage.snapshots.ids

    assert host.run(take) == (12, [snapshot_id(12, 1), snapshot_id(18, 3)])


def test_a_received_snapshot_replaces_a_log_that_it_contradicts(host: Any) -> None:
    host.run(store_some)
    state = b"s" * (3 * PIECE_BYTES)

    async def receive(parts: Parts) -> None:
        storage, _ = await parts.opened()
        outcome = await install(storage, snapshot_id(100, 8), THREE, state)
        assert isinstance(outcome, Snapshot)
        assert outcome.data == state
        await storage.persist([Steps(end=20, epoch=9)(run_of(9, 100, 2), reset_to=100)])

    host.run(receive)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    boot = host.run(look)
    assert boot.snapshot == snapshot_id(100, 8)
    assert boot.entries == run_of(9, 100, 2)
    assert boot.recovering_until is None


@pytest.mark.parametrize(
    ("snapshot", "entries"),
    [
        (snapshot_id(15, 3), run_of(3, 15, 5)),  # agrees with the log: the rest of it stays
        (snapshot_id(15, 4), ()),  # contradicts it
        (snapshot_id(400, 7), ()),  # is ahead of it
    ],
)
def test_a_crash_between_installation_and_reset_is_finished_by_the_next_start(
    host: Any, snapshot: SnapshotId, entries: tuple[Entry, ...]
) -> None:
    host.run(store_some)

    async def receive(parts: Parts) -> None:
        storage, _ = await parts.opened()
        await install(storage, snapshot, THREE, b"state")

    host.run(receive)

    async def look(parts: Parts) -> BootState:
        storage, boot = await parts.opened()
        end = boot.start + len(boot.entries)
        await storage.persist([Steps(end=end, epoch=9)(run_of(9, end, 1))])
        return boot

    boot = host.run(look)
    assert boot.snapshot == snapshot
    assert boot.entries == entries
    assert boot.recovering_until is None
    assert host.run(look).entries[: len(entries) + 1] == entries + run_of(9, boot.start + len(entries), 1)


@pytest.mark.case("R19")
def test_a_received_snapshot_with_a_flipped_bit_is_refused_and_nothing_else_changes(sim: SimHost) -> None:
    sim.run(store_some)

    async def receive(parts: Parts) -> list[SnapshotId]:
        storage, _ = await parts.opened()
        raw = bytearray(b"".join(encode_file(snapshot_id(100, 8), THREE, b"state" * 1000)))
        raw[2000] ^= 1
        with pytest.raises(CorruptStateError):
            await storage.write_piece(SnapshotChunk(Epoch(9), OTHER.node, snapshot_id(100, 8), 0, bytes(raw), len(raw)))
        # It starts again from the beginning, and is taken when it is sound.
        assert isinstance(await install(storage, snapshot_id(100, 8), THREE, b"state" * 1000), Snapshot)
        return storage.snapshots.ids

    assert sim.run(receive) == [snapshot_id(0, 0), snapshot_id(100, 8)]


@pytest.mark.case("R19")
def test_a_corrupt_snapshot_is_set_aside_and_an_older_one_with_the_log_takes_its_place(sim: SimHost) -> None:
    sim.run(store_some)

    async def take(parts: Parts) -> None:
        storage, _ = await parts.opened()
        for offset, epoch in ((5, 1), (12, 1)):
            await storage.write_snapshot(snapshot_id(offset, epoch), THREE, b"state at %d" % offset)
            await storage.drop_before(Offset(offset))

    sim.run(take)
    device = sim.machine.disk()
    newest = f"raft/{12:020d}-{1:010d}.snapshot"
    spoilt = bytearray(device.raw(newest))
    device.flip_bit(newest, 60)
    spoilt[60] ^= 1

    async def look(parts: Parts) -> tuple[BootState, bytes, list[str]]:
        storage, boot = await parts.opened()
        return boot, storage.boot_data, storage.notes

    boot, data, notes = sim.run(look)
    assert boot.snapshot == snapshot_id(5, 1)
    assert data == b"state at 5"
    assert boot.entries == run_of(1, 5, 7) + run_of(3, 12, 8), "nothing that was acknowledged is missing"
    assert boot.recovering_until is None
    assert any(".corrupt" in note for note in notes)
    assert device.raw(newest + ".corrupt") == spoilt, "the bytes are kept"


@pytest.mark.case("R19")
def test_without_a_sound_snapshot_a_voter_of_three_waits_for_a_leader_and_removes_nothing(sim: SimHost) -> None:
    sim.run(store_some)

    async def take(parts: Parts) -> None:
        storage, _ = await parts.opened()
        await install(storage, snapshot_id(100, 8), THREE, b"state")
        await storage.persist([Steps(end=20, epoch=9)(run_of(9, 100, 5), reset_to=100)])

    sim.run(take)
    device = sim.machine.disk()
    device.flip_bit(f"raft/{100:020d}-{8:010d}.snapshot", 70)
    before = {path for path, _ in device.files() if path.endswith(".log")}

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    for _ in range(2):
        boot = sim.run(look)
        assert boot.recovering_until == 105
        assert boot.loss_epoch == 9
        assert boot.snapshot == snapshot_id(0, 0)
        assert boot.entries == ()
        assert boot.membership == THREE
        assert {path for path, _ in device.files() if path.endswith(".log")} == before

    async def restore(parts: Parts) -> None:
        storage, _ = await parts.opened()
        await install(storage, snapshot_id(120, 9), THREE, b"state of the leader")
        step = Steps(end=0, epoch=10)
        await storage.persist([step(run_of(10, 120, 1), reset_to=120), step((), recovered=True)])

    sim.run(restore)
    boot = sim.run(look)
    assert boot.recovering_until is None
    assert (boot.snapshot, boot.entries) == (snapshot_id(120, 9), run_of(10, 120, 1))


@pytest.mark.case("R19")
def test_a_leader_may_restore_a_lost_state_from_the_first_entry_on(sim: SimHost) -> None:
    async def store(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        await install(storage, snapshot_id(100, 8), THREE, b"state")
        await storage.persist([Steps(epoch=9)(run_of(9, 100, 5), reset_to=100)])

    sim.run(store)
    sim.machine.disk().flip_bit(f"raft/{100:020d}-{8:010d}.snapshot", 70)

    async def restore(parts: Parts) -> None:
        storage, boot = await parts.opened()
        assert boot.recovering_until == 105
        await storage.persist([Steps(end=0, epoch=10)(run_of(9, 0, 110))])

    sim.run(restore)

    async def look(parts: Parts) -> BootState:
        return (await parts.opened())[1]

    boot = sim.run(look)
    assert (boot.start, boot.entries, boot.membership) == (0, run_of(9, 0, 110), THREE)
    assert boot.recovering_until == 105, "the core says when it is over"


@pytest.mark.case("R19")
def test_without_a_sound_snapshot_and_without_other_voters_it_refuses(sim: SimHost) -> None:
    async def store(parts: Parts) -> None:
        await parts.formatted(ALONE)
        storage, _ = await parts.opened()
        await storage.persist([Steps()(run_of(1, 0, 20), epoch=1)])
        for offset in (5, 10, 15):
            await storage.write_snapshot(snapshot_id(offset, 1), ALONE, b"state")
            await storage.drop_before(Offset(offset))

    sim.run(store)
    device = sim.machine.disk()
    for offset in (10, 15):
        device.flip_bit(f"raft/{offset:020d}-{1:010d}.snapshot", 40)

    async def refuse(parts: Parts) -> None:
        with pytest.raises(CorruptStateError, match="Nothing was removed"):
            await parts.storage().open()

    sim.run(refuse)
    names = [path for path, _ in device.files()]
    assert sum(name.endswith(".corrupt") for name in names) == 2
    assert any(name.endswith(".log") for name in names)


# Crashes at every point.


@dataclass(frozen=True)
class Expected:
    """What a node may hold: snapshot offset and the log from there on."""

    epoch: int
    start: int
    entries: tuple[Entry, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.entries)


def apply_step(before: Expected, persist: Persist) -> Expected:
    start, entries = before.start, before.entries
    if persist.reset_to is not None:
        start, entries = persist.reset_to, ()
    if persist.truncate_to is not None:
        entries = entries[: persist.truncate_to - start]
    return Expected(persist.hard_state.epoch, start, entries + persist.entries)


def check_boot(boot: BootState, before: Expected, after: Expected) -> None:
    """The power went while the change from `before` to `after` was under way."""
    assert boot.recovering_until is None, "a crash alone never looks like a loss of synced data"
    assert before.epoch <= boot.hard_state.epoch <= after.epoch
    assert boot.start in (before.start, after.start)
    common = 0
    if boot.start == before.start:
        if after.start == before.start:
            pairs = zip(before.entries, after.entries, strict=False)
            shorter = min(len(before.entries), len(after.entries))
            common = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
        assert boot.entries[:common] == before.entries[:common], "what stays is never lost"
    rest = boot.entries[common:]
    candidates = [x.entries[common:] for x in (before, after) if x.start == boot.start]
    assert any(rest == candidate[: len(rest)] for candidate in candidates), "nothing else is found there"


def story() -> list[tuple[list[Persist], Snapshot | None]]:
    """Appends, a vote, cuts at and between batches, a snapshot taken and one received, a reset."""
    step = Steps()
    return [
        ([step(run_of(1, 0, 6), epoch=1)], None),
        ([step((), epoch=2, vote=OTHER)], None),
        ([step(run_of(2, 6, 4)), step(run_of(2, 10, 3))], None),
        ([step(run_of(3, 9, 2), epoch=3, truncate_to=9)], None),  # inside of a batch
        ([step(run_of(4, 6, 5), epoch=4, truncate_to=6)], None),  # between two
        ([step(run_of(4, 11, 1))], Snapshot(snapshot_id(200, 5), THREE, b"s" * 5000)),
        ([step(run_of(6, 200, 2), epoch=6, reset_to=200)], None),
        # A snapshot inside of the log that contradicts it.
        ([step(run_of(6, 202, 3))], Snapshot(snapshot_id(203, 8), THREE, b"t" * 5000)),
        ([step(run_of(9, 203, 1), epoch=9, reset_to=203)], None),
    ]


async def live_through(parts: Parts, done: list[int]) -> None:
    storage, _ = await parts.opened()
    for number, (persists, snapshot) in enumerate(story()):
        await storage.persist(persists)
        done[0] = number + 1
        if snapshot is not None:
            await install(storage, snapshot.id, snapshot.membership, snapshot.data)


def expected_states() -> list[Expected]:
    states = [Expected(0, 0, ())]
    for persists, _ in story():
        state = states[-1]
        for persist in persists:
            state = apply_step(state, persist)
        states.append(state)
    return states


def crash_and_boot(seed: int, loss: Loss, *, at_operation: int | None = None, at_commit: int | None = None) -> bool:
    """Whether there was such a point. Boots twice: what the first start repaired stays repaired."""
    host = SimHost(seed)
    with host.world:

        async def prepare(parts: Parts) -> None:
            await parts.formatted()

        host.run(prepare)
        device, store = host.machine.disk(), host.machine.store()
        host.machine.crash_loss = loss
        done = [0]
        if at_operation is not None:
            device.crash_at_operation = device.operations + at_operation
        if at_commit is not None:
            store.crash_at_commit = at_commit

        async def live(parts: Parts) -> None:
            await live_through(parts, done)

        if not host.run_to_crash(live):
            return False
        states = expected_states()
        before, after = states[done[0]], states[min(done[0] + 1, len(states) - 1)]

        async def look(parts: Parts) -> BootState:
            storage, boot = await parts.opened()
            storage.log.validate()
            return boot

        boot = host.run(look)
        check_boot(boot, before, after)
        again = host.run(look)
        assert (again.entries, again.start) == (boot.entries, boot.start)
        return True


@pytest.mark.parametrize("loss", list(Loss))
def test_a_crash_at_any_operation_of_the_disk_leaves_a_state_that_boots(loss: Loss) -> None:
    points = 0
    while all(crash_and_boot(points * 10 + draw, loss, at_operation=points + 1) for draw in range(3)):
        points += 1
    assert points > 25, "the story has that many operations"


@pytest.mark.parametrize("loss", list(Loss))
def test_a_crash_before_any_commit_leaves_a_state_that_boots(loss: Loss) -> None:
    points = 0
    while all(crash_and_boot(points * 10 + draw, loss, at_commit=points + 1) for draw in range(3)):
        points += 1
    assert points > 12, "the story has that many commits"


@pytest.mark.parametrize("loss", list(Loss))
def test_a_crash_while_formatting_can_be_formatted_again_or_is_done(loss: Loss) -> None:
    for point in range(1, 60):
        host = SimHost(point)
        with host.world:
            host.machine.crash_loss = loss
            host.machine.disk().crash_at_operation = point

            async def prepare(parts: Parts) -> None:
                await parts.formatted()

            crashed = host.run_to_crash(prepare)

            async def finish(parts: Parts) -> BootState:
                try:
                    return (await parts.opened())[1]
                except UnformattedDirectoryError:
                    await parts.formatted()
                    return (await parts.opened())[1]

            host.machine.disk().crash_at_operation = None
            assert host.run(finish).membership == THREE
        if not crashed:
            assert point > 5
            return
    raise AssertionError("formatting has an end")
