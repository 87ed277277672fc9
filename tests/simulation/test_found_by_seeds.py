"""What seeds have found, each as the smallest test that shows it. The seed is that of the day: draws move on."""

import asyncio

import pytest

from tidelog.model.errors import RaftStoppedError, StorageError, UnknownOutcomeError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.pending_requests import PendingRequests
from tidelog.raft.persistent_state import merge
from tidelog.raft.persister import ENTRIES_AT_ONCE_MAX, Persister
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import Loss, SimNode, SimWorld


def persist(number: int, first: int, count: int, *, truncate_to: int | None = None) -> Persist:
    entries = tuple(Entry(Epoch(number), EntryKind.DATA, b"x") for _ in range(count))
    cut = None if truncate_to is None else Offset(truncate_to)
    return Persist(number, HardState(Epoch(number), None), None, cut, Offset(first), entries, False)


def test_the_first_of_several_persists_may_cut_what_is_stored() -> None:
    """Seed 33 (driver): the cut of a batch's first effect was dropped, and its entries did not fit the stored log."""
    change = merge([persist(1, 5, 2, truncate_to=5), persist(2, 7, 1)])
    assert (change.truncate_to, change.first, len(change.entries)) == (5, 5, 3)


def test_a_later_persist_cuts_only_what_is_not_stored_yet() -> None:
    change = merge([persist(1, 5, 4), persist(2, 6, 1, truncate_to=6)])
    assert (change.truncate_to, change.first, len(change.entries)) == (None, 5, 2)


def test_a_later_persist_cuts_what_is_stored_too() -> None:
    change = merge([persist(1, 5, 4), persist(2, 3, 1, truncate_to=3)])
    assert (change.truncate_to, change.first, len(change.entries)) == (3, 3, 1)


def test_a_node_that_stops_does_not_know_what_becomes_of_what_it_accepted() -> None:
    """Seed 2 (driver): a client was answered that nothing was done; the next leader committed it."""

    async def stop(_node: SimNode) -> None:
        waiting = PendingRequests()
        token, accepted = waiting.add()
        waiting.accepted(token, Offset(3), Epoch(1))
        _, asked = waiting.add()
        waiting.end(RaftStoppedError("node 1 stops"))
        with pytest.raises(UnknownOutcomeError):
            await accepted
        with pytest.raises(RaftStoppedError):
            await asked
        await asyncio.sleep(0)

    with SimWorld(seed=1) as world:
        world.run(world.machine("a").boot(), stop)


DIRECTORY = bytes(range(16))
MEMBERSHIP = Membership(tuple(Member(NodeId(node), bytes([node]) * 16) for node in (2, 3)))


def storage_of(node: SimNode) -> RaftStorage:
    return RaftStorage(
        disk=node.disk(), store=node.store(), work=node.work, clock=node.clock, cluster_id="c", node=NodeId(1)
    )


async def write_three(node: SimNode) -> None:
    storage = storage_of(node)
    await storage.format(directory=DIRECTORY, membership=MEMBERSHIP)
    await storage.open()
    for number in range(3):
        await storage.persist([persist(number + 1, number, 1)])


async def look(node: SimNode) -> BootState:
    return await storage_of(node).open()


def test_what_a_failed_sync_left_in_the_cache_is_not_trusted_by_the_next_process() -> None:
    """Seed 191 (driver): it read well after a restart, entries followed it, and the power took it from between them."""

    async def fail(node: SimNode) -> None:
        storage = storage_of(node)
        await storage.open()
        node.machine.disk().fail("sync", times=1)
        with pytest.raises(StorageError):
            await storage.persist([persist(4, 3, 1)])

    async def go_on(node: SimNode) -> int:
        storage = storage_of(node)
        boot = await storage.open()
        await storage.persist([persist(5, len(boot.entries), 1)])
        return len(boot.entries)

    with SimWorld(seed=5) as world:
        machine = world.machine("a")
        world.run(machine.boot(), write_three)
        machine.kill()
        world.run(machine.boot(), fail)
        machine.kill()
        assert world.run(machine.boot(), go_on) == 3
        machine.lose_power(Loss.ALL)
        boot = world.run(machine.boot(), look)
    assert [entry.epoch for entry in boot.entries] == [1, 2, 3, 5]
    assert boot.recovering_until is None


def test_a_log_is_cut_right_in_front_of_a_batch_that_cannot_be_read() -> None:
    """Seed 191 (driver): the cut looked for where to cut by reading just what it was to remove."""
    with SimWorld(seed=6) as world:
        machine = world.machine("a")
        world.run(machine.boot(), write_three)
        machine.kill()
        device = machine.disk()
        path, size = next((path, size) for path, size in device.files() if path.endswith(".log"))
        device.overwrite(path, size - size // 3, bytes(size // 3))
        boot = world.run(machine.boot(), look)
        machine.kill()
        again = world.run(machine.boot(), look)
    assert len(boot.entries) == len(again.entries) == 2
    assert boot.recovering_until == again.recovering_until == 3


def test_entries_are_forgotten_only_after_what_was_to_be_written_before_them() -> None:
    """Seed 425506080 (core): a snapshot covered an entry that was still to take the place of another one."""
    written: list[int] = []

    async def forget(node: SimNode) -> None:
        storage = storage_of(node)
        await storage.format(directory=DIRECTORY, membership=MEMBERSHIP)
        await storage.open()
        persister = Persister(storage, written.append)
        persister.put(persist(1, 0, 1))
        persister.put(persist(2, 1, ENTRIES_AT_ONCE_MAX))
        persister.put(persist(3, 1 + ENTRIES_AT_ONCE_MAX, 2))
        end = Offset(ENTRIES_AT_ONCE_MAX + 3)
        persister.drop_before(end)
        for offset in (Offset(end - 1), end):
            await storage.write_snapshot(SnapshotId(offset, Epoch(3)), MEMBERSHIP, b"state")
        running = asyncio.get_running_loop().create_task(persister.run())
        while storage.log.start_offset != end - 1 and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not running.done(), running.exception()
        running.cancel()

    with SimWorld(seed=7) as world:
        world.run(world.machine("a").boot(), forget)
    assert written == [2, 3]


def test_a_snapshot_counts_as_acknowledged_as_soon_as_it_is_in_the_catalogue() -> None:
    """Seed 3483 (driver): one that a leader had sent was acknowledged and rotted before the log was reset to it;
    the next life fell back on the one before, and took itself for a sound voter."""

    async def install(node: SimNode) -> None:
        await write_three(node)
        storage = storage_of(node)
        await storage.open()
        await storage.write_snapshot(SnapshotId(Offset(9), Epoch(4)), MEMBERSHIP, b"state of nine")

    with SimWorld(seed=8) as world:
        machine = world.machine("a")
        world.run(machine.boot(), install)
        machine.kill()
        device = machine.disk()
        path, size = next((path, size) for path, size in device.files() if "0009-" in path)
        device.overwrite(path, size // 2, b"\xff" * 4)
        boot = world.run(machine.boot(), look)
    assert len(boot.entries) == 3
    assert boot.recovering_until == 9
