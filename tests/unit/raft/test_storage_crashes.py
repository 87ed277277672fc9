"""Raft storage that finds no room now and then, with and without a crash meanwhile.

`tests/support/crashes/raft_stories.py` has a crash and an error at each of its calls.
"""

import errno
from random import Random

from support.crashes.raft_stories import check_boot, expected_states, story
from support.raft.storage import Parts, SimHost, install

from tidelog.model.errors import DiskFullError
from tidelog.raft.config import BootState
from tidelog.raft.effects import Persist
from tidelog.raft.storage import RaftStorage
from tidelog.world.simulated import Loss


class FullNowAndThen:
    """A disk with room for some appends and some commits. `persist` is given the same effects until they are stored."""

    def __init__(self, host: SimHost, seed: int) -> None:
        self.device, self.store = host.machine.disk(), host.machine.store()
        self.rejected = 0
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
                self.rejected += 1
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
    rejected = 0
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
            rejected += disk.rejected
            host.machine.lose_power(Loss.ALL)
            boot, last = boot_of(host), expected_states()[-1]
            assert (boot.hard_state, boot.start, boot.entries) == (last.hard_state, last.start, last.entries)
            assert boot.recovering_until is None
    assert rejected > 60


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
