"""Rot under a running node, and observers: directed runs, and that the checks on observers can fail."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from simulation.checkers import RaftChecker
from simulation.cluster import Station
from simulation.machine import ChainMachine, link
from simulation.more_faults import ROT, draw_more_steps
from simulation.nemesis import draw_plan
from simulation.observers import OBSERVER_NODES, ObserverMachine
from simulation.raft_sim import RaftSimulation
from simulation.run_result import draw_shape
from simulation.stacks import make_stack
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.effects import SnapshotPiece
from tidelog.raft.messages import Entry, EntryKind, SnapshotId
from tidelog.world.simulated import SimWorld

SEED = 5
STACKS = ("core", "driver")


def make(world: SimWorld, stack: str, *, snapshot_every: int) -> RaftSimulation:
    """Three voters that start, without any fault; nothing is kept behind a snapshot."""
    drawn = draw_shape(SEED, stack)
    raft = replace(drawn.raft, kept_behind_snapshot_bytes=0)
    shape = replace(drawn, voters=3, spares=0, snapshot_every=snapshot_every, raft=raft)
    simulation = RaftSimulation(world, SEED, shape, make_stack(stack), only=[])
    for station in simulation.cluster.stations.values():
        station.start()
    world.run_until(simulation.is_whole, timeout=20)
    world.run_until(lambda: len(simulation.checker.history) > 20, timeout=60)
    return simulation


def a_follower(simulation: RaftSimulation) -> NodeId:
    leader = simulation.checker.leader_now()
    assert leader is not None
    return next(station.node_id for station in simulation.stations if station.node_id != leader[0])


def _recovering_until(station: Station) -> Offset | None:
    until: Offset | None = station.app.core.recovering_until
    return until


@pytest.mark.parametrize("stack", STACKS)
def test_a_log_that_rots_under_a_running_node_shows_at_its_next_start_and_nothing_is_lost(stack: str) -> None:
    with SimWorld(SEED) as world:
        simulation = make(world, stack, snapshot_every=1000)
        station, draw = simulation.cluster.station(a_follower(simulation)), Random(1)
        end = simulation.stack.rot(station, draw, "log") and len(simulation.checker.history)
        assert end
        assert simulation.stack.is_rotten(station)
        assert not simulation.is_whole(), "no other voter's data may be harmed meanwhile"
        assert simulation.nemesis.victim(draw) is None
        world.run_until(lambda: station.app.machine.offset > end + 5, timeout=60)
        assert _recovering_until(station) is None, "memory serves it"
        station.kill()
        station.start()
        world.run_until(lambda: station.app is not None, timeout=10)
        assert not simulation.stack.is_rotten(station)
        until = _recovering_until(station)
        assert until is not None
        assert until > end
        world.run_until(simulation.is_whole, timeout=60)
        world.run_until(lambda: station.app.machine.offset >= until, timeout=60)


@pytest.mark.parametrize("stack", STACKS)
def test_a_snapshot_that_has_rotted_is_not_sent_and_another_one_is(stack: str) -> None:
    with SimWorld(SEED) as world:
        simulation = make(world, stack, snapshot_every=3)
        leader = simulation.checker.leader_now()
        assert leader is not None
        lagging = simulation.cluster.station(a_follower(simulation))
        source = simulation.cluster.station(leader[0])
        lagging.kill()
        end = len(simulation.checker.history)
        world.run_until(lambda: leader[1].log.start > end, timeout=60)
        for clients in simulation.clients:
            clients.is_stopping = True  # nothing new commits: no newer snapshot takes the spoilt one's place by itself
        world.run_for(3)
        spoilt = leader[1].log.snapshot
        assert simulation.stack.rot(source, Random(1), "newest snapshot")
        lagging.start()
        end = len(simulation.checker.history)
        world.run_until(lambda: lagging.app is not None and lagging.app.machine.offset == end, timeout=60)
        assert leader[1].log.snapshot >= spoilt
        if stack == "driver":
            assert [path for path, _ in source.machine.disk().files() if path.endswith(".snapshot.corrupt")]
        else:
            assert not simulation.stack.is_rotten(source), "it was read, set aside and replaced"


def test_a_source_whose_newest_snapshot_is_spoilt_goes_on_and_its_observers_find_another() -> None:
    """A tail that needs a snapshot which was set aside must not keep the node from taking another one."""
    with SimWorld(SEED) as world:
        simulation = make(world, "driver", snapshot_every=3)
        observer = simulation.observers[0]
        observer.kill()
        observer.durable.clear()
        end = len(simulation.checker.history)
        for station in simulation.stations:
            driver = station.app.driver
            snapshot = driver.core.log.snapshot
            assert driver.core.log.start > 0
            assert simulation.stack.rot(station, Random(1), "newest snapshot")
            assert station.context is not None
            # As a transfer to a peer begins: the whole is read, found to be spoilt and set aside.
            station.context.node.spawn(driver._snapshotter.read(SnapshotPiece(NodeId(9), snapshot, 0)))
            station.machine.disk().begin_stall()
        observer.start()
        world.run_for(2)
        simulation.cluster.heal()
        world.run_until(lambda: observer.app.observer.offset >= end, timeout=30)


def test_rot_is_never_planned_together_with_a_storm_of_changes() -> None:
    planned = 0
    for seed in range(300):
        plan = draw_plan(Random(f"{seed}/a"), until_s=12.0)
        more = draw_more_steps(Random(f"{seed}/b"), plan, until_s=12.0, observers=seed % 3)
        assert [step.number for step in (*plan, *more)] == list(range(len(plan) + len(more)))
        rot = [step for step in more if step.fault in ROT]
        assert not rot or all(step.fault != "storm_of_changes" for step in plan)
        assert seed % 3 or more == rot, "no faults of observers where there are none"
        planned += len(rot)
    assert planned > 300


HISTORY = [Entry(Epoch(1), EntryKind.DATA, b"%d" % number) for number in range(6)]
OTHER = Entry(Epoch(1), EntryKind.DATA, b"other")


def committed(failures: list[str]) -> RaftChecker:
    """A checker that has seen these entries commit."""
    checker = RaftChecker(lambda who, what: failures.append(f"{who} {what}"), lambda _who, _what: None)
    for entry in HISTORY:
        checker.history.append(entry)
        checker.chains.append(link(checker.chains[-1], entry))
    return checker


def _snapshot_of(checker: RaftChecker, offset: int) -> bytes:
    machine = ChainMachine("n1", checker)
    machine.offset, machine.chain = Offset(offset), checker.chains[offset]
    return machine.take_snapshot()


@pytest.mark.parametrize(
    ("deliver", "failure"),
    [
        (lambda m, _c: m.apply(Offset(2), HISTORY[2:4]), None),
        (lambda m, _c: m.apply(Offset(2), [OTHER]), "where"),
        (lambda m, _c: m.apply(Offset(2), [*HISTORY[2:], OTHER]), "only 6 entries are committed"),
        (lambda m, _c: m.apply(Offset(3), HISTORY[3:]), "after those up to 2"),
        (lambda m, _c: m.apply(Offset(1), HISTORY[1:]), "after those up to 2"),
        (lambda m, c: m.load_snapshot(SnapshotId(Offset(4), Epoch(1)), _snapshot_of(c, 4)), None),
        (lambda m, c: m.load_snapshot(SnapshotId(Offset(1), Epoch(1)), _snapshot_of(c, 1)), "after entries up to 2"),
        (lambda m, c: m.load_snapshot(SnapshotId(Offset(4), Epoch(2)), _snapshot_of(c, 4)), "not committed so"),
    ],
)
def test_an_observer_is_given_what_is_committed_in_order_and_nothing_twice(
    deliver: Callable[[ObserverMachine, RaftChecker], None], failure: str | None
) -> None:
    failures: list[str] = []
    checker = committed(failures)

    def fail(who: str, what: str) -> None:
        failures.append(f"{who} {what}")

    machine = ObserverMachine(f"o{OBSERVER_NODES[0]}", checker, fail, Offset(2), checker.chains[2])
    try:
        deliver(machine, checker)
    except AssertionError as error:
        failures.append(str(error))
    assert (failure is None) == (not failures), failures
    assert failure is None or failure in failures[0]
