"""Raft storage: snapshots that were taken and received, and what becomes of spoilt ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.raft.storage import (
    ALONE,
    OTHER,
    THREE,
    Parts,
    RealHost,
    SimHost,
    Steps,
    boot_state,
    install,
    run_of,
    simulated_host,
    snapshot_id,
    store_some,
)

from tidelog.model.errors import CorruptStateError, StorageError
from tidelog.model.ids import Epoch, Offset
from tidelog.raft.config import BootState
from tidelog.raft.messages import Entry, SnapshotChunk, SnapshotId
from tidelog.raft.snapshots import TRANSFER_BYTES, Snapshot, encode_file
from tidelog.raft.storage import METADATA_LOG_PATH
from tidelog.world.simulated import Loss


@pytest.fixture(params=["simulated", "real"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimHost | RealHost]:
    yield from simulated_host() if request.param == "simulated" else [RealHost(tmp_path)]


@pytest.fixture
def sim() -> Iterator[SimHost]:
    yield from simulated_host()


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
    state = b"s" * (3 * TRANSFER_BYTES)

    async def receive(parts: Parts) -> None:
        storage, _ = await parts.opened()
        outcome = await install(storage, snapshot_id(100, 8), THREE, state)
        assert isinstance(outcome, Snapshot)
        assert outcome.data == state
        await storage.persist([Steps(end=20, epoch=9)(run_of(9, 100, 2), reset_to=100)])

    host.run(receive)

    boot = host.run(boot_state)
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


def test_a_snapshot_whose_name_could_not_be_synced_is_named_again_before_the_log_restarts_after_it(
    sim: SimHost,
) -> None:
    """The next start sees the name, in memory only. It relied on it, and the next loss of power took all it had."""
    snapshot = snapshot_id(400, 7)
    sim.run(store_some)

    async def receive(parts: Parts) -> None:
        storage, _ = await parts.opened()
        snapshots = storage.snapshots
        name = snapshots._name

        async def name_without_sync(source: str, named: SnapshotId) -> None:
            sim.machine.disk().fail("sync")
            await name(source, named)

        snapshots._name = name_without_sync  # type: ignore[assignment, method-assign]
        with pytest.raises(StorageError):
            await install(storage, snapshot, THREE, b"state")

    async def look(parts: Parts) -> BootState:
        _, boot = await parts.opened()
        return boot

    sim.run(receive)
    assert sim.run(look).snapshot == snapshot
    sim.machine.lose_power(Loss.ALL)
    boot = sim.run(look)
    assert (boot.snapshot, boot.recovering_until) == (snapshot, None)


def test_rot_in_front_of_the_start_that_hides_what_follows_makes_the_voter_recover(sim: SimHost) -> None:
    """The file still holds entries below the snapshots; the log is walked through them to where it begins."""

    async def fill(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        step = Steps()
        for first in range(0, 12, 4):
            await storage.persist([step(run_of(1, first, 4), epoch=1)])
        for offset in (8, 10):
            await storage.write_snapshot(snapshot_id(offset, 1), THREE, b"state")
            await storage.drop_before(Offset(offset))
        await storage.close()

    sim.run(fill)
    device = sim.machine.disk()
    device.flip_bit(f"raft/{10:020d}-{1:010d}.snapshot", 40)  # the log begins where the older one ends
    device.flip_bit(
        f"{METADATA_LOG_PATH}/{0:020d}.log", 8
    )  # the length of the first batch: from there on nothing can be found

    async def look(parts: Parts) -> tuple[BootState, BootState, tuple[Entry, ...]]:
        first = (await parts.opened())[1]
        storage, again = await parts.opened()
        await storage.persist([Steps(end=8, epoch=2)(run_of(2, 8, 3), epoch=2)])
        await storage.close()
        return first, again, (await parts.opened())[1].entries

    first, again, restored = sim.run(look)
    for boot in (first, again):
        assert (boot.start, boot.entries, boot.recovering_until) == (8, (), 12)
    assert restored == run_of(2, 8, 3)


@pytest.mark.case("R19")
def test_a_received_snapshot_with_a_flipped_bit_is_refused_and_nothing_else_changes(sim: SimHost) -> None:
    sim.run(store_some)

    async def receive(parts: Parts) -> list[SnapshotId]:
        storage, _ = await parts.opened()
        raw = bytearray(b"".join(encode_file(snapshot_id(100, 8), THREE, b"state" * 1000)))
        raw[2000] ^= 1
        with pytest.raises(CorruptStateError):
            await storage.write_chunk(SnapshotChunk(Epoch(9), OTHER.node, snapshot_id(100, 8), 0, bytes(raw), len(raw)))
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

    for _ in range(2):
        boot = sim.run(boot_state)
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
    boot = sim.run(boot_state)
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

    boot = sim.run(boot_state)
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
