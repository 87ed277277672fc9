"""Raft storage: the power goes at every operation of the disk and before every commit, or there is no room for them."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from random import Random

import pytest
from raft_disks import (
    OTHER,
    THREE,
    Parts,
    SimHost,
    Steps,
    install,
    run_of,
    snapshot_id,
)

from tidelog.model.errors import DiskFullError, UnformattedDirectoryError
from tidelog.model.ids import Epoch
from tidelog.raft.config import BootState
from tidelog.raft.effects import HardState, Persist
from tidelog.raft.messages import Entry
from tidelog.raft.snapshots import Snapshot
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import Loss


@dataclass(frozen=True)
class Expected:
    """What a node may hold: snapshot offset and the log from there on."""

    hard_state: HardState
    start: int
    entries: tuple[Entry, ...]

    @property
    def epoch(self) -> int:
        return self.hard_state.epoch

    @property
    def end(self) -> int:
        return self.start + len(self.entries)


def apply_step(before: Expected, persist: Persist) -> Expected:
    start, entries = before.start, before.entries
    if persist.reset_to is not None:
        start, entries = persist.reset_to, ()
    if persist.truncate_to is not None:
        entries = entries[: persist.truncate_to - start]
    return Expected(persist.hard_state, start, entries + persist.entries)


def check_boot(boot: BootState, before: Expected, after: Expected) -> None:
    """The power went while the change from `before` to `after` was under way."""
    assert boot.recovering_until is None, "a crash alone never looks like a loss of synced data"
    assert before.epoch <= boot.hard_state.epoch <= after.epoch
    if boot.hard_state not in (before.hard_state, after.hard_state):
        # Raised by entries or a snapshot of that epoch, in which nothing was said yet.
        assert boot.hard_state.epoch > before.epoch
        assert boot.hard_state.voted_for is None
    if boot.hard_state.epoch == before.epoch < after.epoch:
        # Seed 5492 (driver): a cut that a new epoch demanded was kept, and the epoch was not.
        assert boot.start + len(boot.entries) >= before.end, "what was acknowledged in an epoch is not taken back in it"
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
    """Appends, votes, cuts at and between batches, in the same epoch and together with a later one, a snapshot taken
    and one received, a reset."""
    step = Steps()
    return [
        ([step(run_of(1, 0, 6), epoch=1)], None),
        ([step((), epoch=2, vote=OTHER)], None),
        ([step(run_of(2, 6, 4)), step(run_of(2, 10, 3))], None),
        ([step(run_of(3, 9, 2), epoch=3, truncate_to=9)], None),  # inside of a batch
        ([step(run_of(4, 6, 5), epoch=4, truncate_to=6)], None),  # between two
        ([step((), epoch=5, vote=OTHER)], None),
        ([step(run_of(5, 9, 3), truncate_to=9)], None),  # by the leader that it has voted for
        ([step(run_of(6, 10, 2), epoch=6, truncate_to=10), step((), epoch=7, vote=OTHER)], None),
        ([step(run_of(7, 12, 1))], Snapshot(snapshot_id(200, 8), THREE, b"s" * 5000)),
        ([step(run_of(9, 200, 2), epoch=9, reset_to=200)], None),
        # A snapshot inside of the log that contradicts it.
        ([step(run_of(9, 202, 3))], Snapshot(snapshot_id(203, 11), THREE, b"t" * 5000)),
        ([step(run_of(12, 203, 1), epoch=12, reset_to=203)], None),
    ]


async def live_through(parts: Parts, done: list[int]) -> None:
    storage, _ = await parts.opened()
    for number, (persists, snapshot) in enumerate(story()):
        await storage.persist(persists)
        done[0] = number + 1
        if snapshot is not None:
            await install(storage, snapshot.id, snapshot.membership, snapshot.data)


def expected_states() -> list[Expected]:
    states = [Expected(HardState(Epoch(0), None), 0, ())]
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


class FullNowAndThen:
    """A disk with room for some appends and some commits. `persist` is given the same effects until they are stored."""

    def __init__(self, host: SimHost, seed: int) -> None:
        self.device, self.store = host.machine.disk(), host.machine.store()
        self.refused = 0
        self._draw = Random(seed)

    async def persist(self, storage: RaftStorage, persists: list[Persist], *, tries_max: int | None = None) -> bool:
        """Whether they were stored."""
        tries = 0
        while tries != tries_max:
            tries += 1
            self.device.faults.clear()
            if self._draw.random() < 0.3:
                self.device.fail("append", number=errno.ENOSPC, times=self._draw.randrange(1, 3))
            self.store.fill(self._draw.choice((0.0, 0.3, 0.7)))
            try:
                await storage.persist(persists)
                return True
            except DiskFullError:
                self.refused += 1
            finally:
                self.device.faults.clear()
                self.store.fill(0.0)
        return False


def boot_of(host: SimHost) -> BootState:
    async def look(parts: Parts) -> BootState:
        storage, boot = await parts.opened()
        storage.log.validate()
        return boot

    return host.run(look)


def test_effects_that_find_no_room_are_stored_as_they_are_when_there_is_some() -> None:
    """At whatever point: with room the outcome is the one of a disk that never was full, also after a loss of power."""
    refused = 0
    for seed in range(60):
        host = SimHost(seed)
        with host.world:
            disk = FullNowAndThen(host, seed)

            async def live(parts: Parts, disk: FullNowAndThen = disk) -> None:
                await parts.formatted()
                storage, _ = await parts.opened()
                for persists, snapshot in story():
                    await disk.persist(storage, persists)
                    storage.log.validate()
                    if snapshot is not None:
                        await install(storage, snapshot.id, snapshot.membership, snapshot.data)

            host.run(live)
            refused += disk.refused
            host.machine.lose_power(Loss.ALL)
            boot, last = boot_of(host), expected_states()[-1]
            assert (boot.hard_state, boot.start, boot.entries) == (last.hard_state, last.start, last.entries)
            assert boot.recovering_until is None
    assert refused > 60


def test_a_crash_while_effects_wait_for_room_leaves_a_state_that_boots() -> None:
    crashed = 0
    for seed in range(120):
        host = SimHost(seed)
        with host.world:
            disk = FullNowAndThen(host, seed)
            done = [0]

            async def live(parts: Parts, disk: FullNowAndThen = disk, done: list[int] = done) -> None:
                await parts.formatted()
                storage, _ = await parts.opened()
                for number, (persists, snapshot) in enumerate(story()):
                    if not await disk.persist(storage, persists, tries_max=2):
                        return
                    done[0] = number + 1
                    if snapshot is not None:
                        await install(storage, snapshot.id, snapshot.membership, snapshot.data)

            host.run(live)
            host.machine.lose_power(list(Loss)[seed % len(Loss)])
            states = expected_states()
            before, after = states[done[0]], states[min(done[0] + 1, len(states) - 1)]
            crashed += done[0] < len(states) - 1
            boot = boot_of(host)
            check_boot(boot, before, after)
            again = boot_of(host)
            assert (again.entries, again.start) == (boot.entries, boot.start)
    assert crashed > 20
