"""Raft storage: what survives, what is cut, what is rejected. On the simulated machine, and on the real disk."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.raft.storage import (
    ALONE,
    ME,
    OTHER,
    THREE,
    Parts,
    RealHost,
    SimHost,
    Steps,
    boot_state,
    entry,
    run_of,
    simulated_host,
    store_some,
)

from tidelog.model.errors import (
    CorruptStateError,
    LostStateError,
    StorageError,
    UnformattedDirectoryError,
    WrongDirectoryError,
)
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState
from tidelog.raft.membership import Membership, VoterKey
from tidelog.raft.messages import EntryKind, SnapshotId
from tidelog.raft.persistent_state import merge, pack_state, unpack_state
from tidelog.raft.storage import METADATA_LOG_PATH, STATE_KEY
from tidelog.world.simulated import Loss


@pytest.fixture(params=["simulated", "real"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimHost | RealHost]:
    yield from simulated_host() if request.param == "simulated" else [RealHost(tmp_path)]


@pytest.fixture
def sim() -> Iterator[SimHost]:
    yield from simulated_host()


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

    assert host.run(boot_state).entries == run_of(1, 0, 3)


def test_all_kinds_of_entries_come_back_as_they_were(host: Any) -> None:
    rows = (entry(1, b"", EntryKind.NO_OP), entry(1, THREE.encode(), EntryKind.MEMBERSHIP), entry(1, b"x" * 300_000))

    async def store(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        await storage.persist([Steps()(rows, epoch=1)])

    host.run(store)

    assert host.run(boot_state).entries == rows


def test_a_vote_is_durable_when_persist_returns(sim: SimHost) -> None:
    async def vote(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        await storage.persist([Steps()(epoch=7, vote=OTHER)])

    sim.run(vote)
    sim.machine.lose_power(Loss.ALL)

    assert sim.run(boot_state).hard_state == HardState(Epoch(7), OTHER)


@pytest.mark.parametrize("loss", list(Loss))
def test_acknowledged_entries_survive_a_loss_of_power(loss: Loss) -> None:
    host = SimHost(seed=5)
    with host.world:
        host.run(store_some)
        host.machine.lose_power(loss)

        boot = host.run(boot_state)
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

    assert sim.run(boot_state).entries[20:] == run_of(4, 20, 1)


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

    assert host.run(boot_state).entries == run_of(1, 0, 5) + run_of(4, 5, 2)


def test_truncation_in_the_middle_of_what_was_written_together_keeps_the_rest(host: Any) -> None:
    async def cut(parts: Parts) -> None:
        await parts.formatted()
        storage, _ = await parts.opened()
        step = Steps()
        await storage.persist([step(run_of(1, 0, 10), epoch=1)])
        await storage.persist([step(run_of(2, 4, 1), epoch=2, truncate_to=4)])

    host.run(cut)

    assert host.run(boot_state).entries == run_of(1, 0, 4) + run_of(2, 4, 1)


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

    async def format_again(parts: Parts) -> tuple[VoterKey, BootState]:
        storage = parts.storage()
        await storage.format(directory=b"\x09" * 16, membership=Membership())
        boot = await storage.open()
        return storage.me, boot

    me, boot = sim.run(format_again)
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
        with pytest.raises(WrongDirectoryError, match="belong to different directories"):
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

    boot = sim.run(boot_state)
    assert boot.recovering_until is None
    assert boot.entries == run_of(1, 0, 10) + run_of(5, 10, 11)


@pytest.mark.parametrize("is_marked", [False, True])
def test_the_only_voter_refuses_to_start_without_what_it_had_synced(sim: SimHost, is_marked: bool) -> None:
    """Also when the loss was noted by an earlier start."""

    async def store(parts: Parts) -> None:
        await parts.formatted(ALONE)
        storage, _ = await parts.opened()
        step = Steps()
        await storage.persist([step(run_of(1, 0, 12), epoch=1)])
        await storage.persist([step(run_of(3, 12, 8), epoch=3, vote=ME)])
        if is_marked:
            lost = unpack_state(parts.store.get(STATE_KEY) or b"")
            await parts.store.commit({STATE_KEY: pack_state(replace(lost, recovering_until=Offset(20)))})

    sim.run(store)
    device = sim.machine.disk()
    path = f"{METADATA_LOG_PATH}/{0:020d}.log"
    if not is_marked:
        device.cut(path, len(device.raw(path)) - 3)
    good = 20 if is_marked else 12

    async def refuse(parts: Parts) -> bytes | None:
        with pytest.raises(CorruptStateError) as rejected:
            await parts.storage().open()
        text = str(rejected.value)
        assert f"synced entries from {good} to 20 are lost" in text
        assert "node 1 is the only voter" in text
        assert "Put back a copy of the whole directory" in text
        return parts.store.get(STATE_KEY)

    before = sim.run(refuse)
    assert sim.run(refuse) == before, "what is stored stays as it is: every start rejects alike"


def test_who_is_not_the_only_voter_any_more_recovers(sim: SimHost) -> None:
    """The membership in force is the last one that is left, in the log or in the snapshot."""

    async def store(parts: Parts) -> None:
        await parts.formatted(ALONE)
        storage, _ = await parts.opened()
        step = Steps()
        grown = entry(1, THREE.encode(), EntryKind.MEMBERSHIP)
        await storage.persist([step((*run_of(1, 0, 11), grown), epoch=1)])
        await storage.persist([step(run_of(3, 12, 8), epoch=3, vote=OTHER)])

    sim.run(store)
    device = sim.machine.disk()
    path = f"{METADATA_LOG_PATH}/{0:020d}.log"
    device.cut(path, len(device.raw(path)) - 3)

    assert sim.run(boot_state).recovering_until == 20
