"""Those who follow the committed log: observers by stream, and tails inside of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from raft_group import SMALL_SNAPSHOTS, A, B, C, Group, describe, error_of

from tidelog.model.errors import RaftStoppedError, TidelogError
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import RaftDriver
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.raft.observer import ObserverConfig, RaftObserver
from tidelog.world.simulated import SimNode

pytestmark = pytest.mark.sim


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(seed=11).running() as found:
        yield found


class Follower:
    """What an observer keeps; it checks that it never moves back."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.next = 0
        self.loaded = 0

    def apply(self, first: Offset, entries: Sequence[Entry]) -> None:
        assert first == self.next
        self.next += len(entries)
        self.values += [entry.data for entry in entries if entry.kind is EntryKind.DATA]

    def load_snapshot(self, snapshot: SnapshotId, data: bytes) -> None:
        assert snapshot.offset > self.next
        self.loaded += 1
        self.next = snapshot.offset
        self.values = data.split(b"\n") if data else []


def observe(group: Group, sources: Sequence[NodeId]) -> tuple[Follower, RaftObserver]:
    process = group.world.machine("broker").boot()
    transport = group.network.join(process, NodeId(100))
    follower = Follower()
    made: list[RaftObserver] = []

    async def main(_: SimNode) -> None:
        await transport.start()
        made.append(RaftObserver(transport, lambda: sources, follower, process.work, ObserverConfig(), process.random))
        process.spawn(made[0].run())

    group.world.run(process, main)
    return follower, made[0]


def has_heard(follower: Follower, observer: RaftObserver) -> bool:
    return follower.values[:1] == [b"a"] and observer.state is not None


def test_an_observer_follows_from_any_member(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    for source in (A, B, C):
        follower, observer = observe(group, [source])
        group.world.run_until(partial(has_heard, follower, observer), timeout=5)
        assert observer.state is not None
        assert observer.state.leader == leader
        described = group.on(source, describe)
        assert [row[0] for row in described.observers] == [100]
        group.world.machine("broker").kill()
        group.world.run_for(8)


@pytest.mark.source("b:E-31")
def test_an_observer_changes_its_source_and_never_moves_back(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    follower, observer = observe(group, [A, B, C])
    wanted: list[bytes] = []
    for number in range(6):
        value = b"%d" % number
        leader = group.leader()
        group.propose(leader, value)
        wanted.append(value)
        group.world.run_until(lambda: follower.values == wanted, timeout=20)
        source = observer.source
        assert source is not None
        group.kill(source)
        group.start(source)
    assert observer.changes > 3


def test_an_observer_leaves_a_source_that_is_cut_off_from_the_group(group: Group) -> None:
    group.start(A, B, C)
    group.propose(group.leader(), b"a")
    follower, observer = observe(group, [A, B, C])
    group.world.run_until(lambda: follower.values == [b"a"], timeout=5)
    source = observer.source
    assert source is not None
    others = [node for node in (A, B, C) if node != source]
    for other in others:
        group.network.block(source, other)
        group.network.block(other, source)
    group.world.run_until(lambda: observer.source in others, timeout=30)
    group.propose(group.leader(among=others), b"b")
    group.world.run_until(lambda: follower.values == [b"a", b"b"], timeout=20)


def test_an_observer_begins_with_a_snapshot_when_the_entries_are_gone() -> None:
    group = Group(seed=9, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(group.leader(), *wanted)
        group.world.run_for(2)
        follower, _ = observe(group, [A, B, C])
        group.world.run_until(lambda: follower.values == wanted, timeout=10)
        assert follower.loaded == 1


def test_a_tail_inside_of_the_process_gives_the_same(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a", b"b")

    async def follow(driver: RaftDriver) -> list[bytes]:
        tail = driver.tail(Offset(0), driver.core.log.start_epoch)
        found: list[bytes] = []
        while len(found) < 2:
            item = await tail.next()
            assert not isinstance(item, SnapshotId)
            found += [entry.data for entry in item.entries if entry.kind is EntryKind.DATA]
        return found

    assert group.on(leader, follow) == [b"a", b"b"]


def test_a_tail_that_waits_is_told_when_its_member_stops(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")

    async def stop(driver: RaftDriver) -> TidelogError | None:
        tail = driver.tail(driver.core.commit, driver.core.epoch)
        waiting = asyncio.ensure_future(error_of(tail.next()))
        await asyncio.sleep(0.01)
        await driver.close()
        assert isinstance(await error_of(tail.next()), RaftStoppedError), "also one that asks later"
        assert driver.describe().observers == ()
        return await waiting

    assert isinstance(group.on(leader, stop, timeout=5), RaftStoppedError)


def test_a_tail_that_is_closed_is_forgotten(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")

    async def close(driver: RaftDriver) -> TidelogError | None:
        kept = driver.tail(driver.core.commit, driver.core.epoch)
        closed = driver.tail(driver.core.commit, driver.core.epoch)
        waiting = asyncio.ensure_future(error_of(closed.next()))
        await asyncio.sleep(0.01)
        assert len(driver.describe().observers) == 2
        closed.close()
        closed.close()
        assert len(driver.describe().observers) == 1
        await driver.propose(b"b")
        found = await kept.next()
        assert not isinstance(found, SnapshotId)
        assert [entry.data for entry in found.entries] == [b"b"], "the other one goes on"
        kept.close()
        assert driver.describe().observers == ()
        return await waiting

    assert isinstance(group.on(leader, close, timeout=5), RaftStoppedError)


def test_an_observer_that_goes_leaves_no_tail_behind(group: Group) -> None:
    group.start(A, B, C)
    group.propose(group.leader(), b"a")
    follower, _ = observe(group, [A])
    group.world.run_until(lambda: follower.values == [b"a"], timeout=10)
    assert len(group.on(A, describe).observers) == 1
    group.world.machine("broker").kill()
    group.world.run_until(lambda: group.members[A].driver._tails.describe() == (), timeout=30)
