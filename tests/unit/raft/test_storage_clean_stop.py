"""A voter that was stopped cleanly, and whose log has lost synced entries since: its recovery point covers them."""

from collections.abc import Iterator

import pytest
from support.raft.storage import (
    THREE,
    Job,
    Parts,
    SimHost,
    boot_state,
    install,
    run_of,
    simulated_host,
    snapshot_id,
    store_some,
)

from tidelog.raft.config import BootState
from tidelog.raft.messages import SnapshotId
from tidelog.raft.storage import METADATA_LOG_PATH
from tidelog.world.simulated import Loss

PATH = f"{METADATA_LOG_PATH}/{0:020d}.log"


@pytest.fixture
def sim() -> Iterator[SimHost]:
    yield from simulated_host()


async def store_and_stop(parts: Parts) -> None:
    await store_some(parts)
    storage, _ = await parts.opened()
    await storage.close()


@pytest.mark.parametrize(
    ("how", "good", "note"),
    [
        ("shorter", 12, "the log is damaged at 12"),
        ("flipped", 12, "the log is not sound: offset 12"),
        ("first flipped", 0, "the log is not sound: offset 0"),
        ("gone", 0, "the log is damaged at 0"),
    ],
)
def test_a_voter_that_lost_entries_below_its_recovery_point_is_recovering(
    sim: SimHost, how: str, good: int, note: str
) -> None:
    sim.run(store_and_stop)
    device = sim.machine.disk()
    size = len(device.raw(PATH))
    if how == "shorter":
        device.cut(PATH, size - 3)
    elif how == "flipped":
        device.flip_bit(PATH, size - 20)
    elif how == "first flipped":
        device.flip_bit(PATH, 80)
    else:
        device.cut(PATH, 0)

    async def open_again(parts: Parts) -> tuple[BootState, list[str]]:
        storage, boot = await parts.opened()
        assert storage.synced_end == good
        return boot, storage.notes

    boot, notes = sim.run(open_again)
    assert boot.recovering_until == 20
    assert boot.entries == run_of(1, 0, 12)[:good]
    assert any(line.startswith(note) for line in notes), notes
    sim.machine.lose_power(Loss.ALL)
    boot = sim.run(boot_state)
    assert boot.recovering_until == 20
    assert boot.entries == run_of(1, 0, 12)[:good]


def starts_after_a_crash(prepare: Job[None], *, cut: int = 0, is_commit: bool) -> Iterator[tuple[int, BootState]]:
    """After `prepare`, and without the last `cut` bytes of the log, the power goes at each operation of the disk, or
    each commit, of a start. Gives what the next start finds."""
    for step in range(1, 60):
        sim = SimHost(seed=step)
        with sim.world:
            sim.run(prepare)
            device, store = sim.machine.disk(), sim.machine.store()
            device.cut(PATH, len(device.raw(PATH)) - cut)
            if is_commit:
                store.crash_at_commit = step
            else:
                device.crash_at_operation = device.operations + step
            has_crashed = sim.run_to_crash(boot_state)
            device.crash_at_operation = store.crash_at_commit = None
            sim.machine.lose_power(Loss.SOME)
            yield step, sim.run(boot_state)
        if not has_crashed:
            assert step > 1, "the start changes something"
            return
    raise AssertionError("the start never came to its end")


@pytest.mark.parametrize("is_commit", [False, True], ids=["operation of the disk", "commit"])
def test_a_loss_is_stored_before_any_file_changes(is_commit: bool) -> None:
    """The power goes in the start that finds the loss: the next start knows of it, too."""
    for step, boot in starts_after_a_crash(store_and_stop, cut=3, is_commit=is_commit):
        assert boot.recovering_until == 20, f"after a crash at step {step}"
        assert boot.entries == run_of(1, 0, 12)


@pytest.mark.parametrize("is_commit", [False, True], ids=["operation of the disk", "commit"])
@pytest.mark.parametrize("snapshot", [snapshot_id(15, 4), snapshot_id(400, 7)], ids=["contradicts", "is ahead"])
def test_a_crash_while_a_log_is_reset_to_a_snapshot_is_no_loss(snapshot: SnapshotId, is_commit: bool) -> None:
    """Entries that a received snapshot replaces were synced, but never committed."""

    async def receive(parts: Parts) -> None:
        await store_some(parts)
        storage, _ = await parts.opened()
        await install(storage, snapshot, THREE, b"state")

    for step, boot in starts_after_a_crash(receive, is_commit=is_commit):
        assert (boot.snapshot, boot.entries) == (snapshot, ())
        assert boot.recovering_until is None, f"after a crash at step {step}"
