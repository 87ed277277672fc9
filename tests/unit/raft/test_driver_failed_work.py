"""A helper process that dies over a snapshot, as one does that runs out of memory: nobody stops, it is done later."""

import pytest
from support.raft.members import SMALL_SNAPSHOTS, A, B, C, Group

from tidelog.model.ids import NodeId
from tidelog.world.simulated.faults import Latency

pytestmark = pytest.mark.sim

VALUES = [b"%050d" % number for number in range(100)]


def away_from(leader: NodeId) -> NodeId:
    return next(node for node in (A, B, C) if node != leader)


def nobody_has_stopped(group: Group) -> bool:
    return all(one.driver.failed is None and one.failure is None for one in group.members.values())


def test_a_snapshot_that_cannot_be_taken_stops_no_member_and_is_taken_later() -> None:
    group = Group(seed=4, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        for one in group.members.values():
            one.node.work.dying.add("encode_values")
        group.propose(leader, *VALUES)
        group.world.run_for(20)
        assert nobody_has_stopped(group)
        metrics = [one.driver.metrics for one in group.members.values()]
        assert [one.snapshots_taken for one in metrics] == [0, 0, 0]
        # After waits of 1, 2, 4 and 8 s, though each of the 100 entries could have brought a try.
        assert all(3 <= one.snapshots_failed <= 6 for one in metrics), metrics
        for one in group.members.values():
            one.node.work.dying.clear()
        group.world.run_until(
            lambda: all(one.driver.metrics.snapshots_taken for one in group.members.values()), timeout=60
        )
        # And the log behind it goes.
        group.world.run_until(lambda: group.members[leader].driver.core.log.start > 0, timeout=5)
        group.propose(group.leader(), b"last")
        group.until_equal([*VALUES, b"last"])


def test_a_received_snapshot_that_cannot_be_checked_is_asked_for_again() -> None:
    group = Group(seed=5, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = away_from(leader)
        group.kill(away)
        group.propose(leader, *VALUES)
        group.world.run_for(1)
        group.start(away)
        found = group.members[away]
        found.node.work.dying.add("read_file")
        group.world.run_until(lambda: found.driver.metrics.snapshots_failed > 1, timeout=20)
        assert found.driver.metrics.snapshots_installed == 0
        found.node.work.dying.clear()
        group.until_equal(VALUES)
        assert nobody_has_stopped(group)
        assert found.driver.metrics.snapshots_installed == 1


def test_an_installed_snapshot_that_cannot_be_read_is_read_again() -> None:
    group = Group(seed=5, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = away_from(leader)
        group.kill(away)
        group.propose(leader, *VALUES)
        group.world.run_for(1)
        group.start(away)
        found = group.members[away]
        found.node.work.latency = Latency(2.0, 3.0)
        group.world.run_until(lambda: found.driver.core.log.snapshot.offset > 0, timeout=20)
        found.node.work.dying.add("read_file")
        group.propose(leader, b"more")
        group.world.run_for(10)
        assert nobody_has_stopped(group)
        assert found.values.loaded == [], "what was committed since waits behind it"
        found.node.work.dying.clear()
        group.until_equal([*VALUES, b"more"])


def test_a_snapshot_that_cannot_be_checked_is_not_sent_and_not_set_aside() -> None:
    group = Group(seed=6, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = away_from(leader)
        group.kill(away)
        group.propose(leader, *VALUES)
        group.world.run_for(1)
        sender = group.members[leader]
        sender.node.work.dying.add("check_file")
        group.world.run_for(3)  # what was read before is too old to be sent
        group.start(away)
        group.world.run_until(lambda: sender.driver.metrics.snapshots_failed > 1, timeout=20)
        assert group.members[away].values.values == []
        sender.node.work.dying.clear()
        group.until_equal(VALUES)
        assert nobody_has_stopped(group)
        files = dict(group.world.machine(f"m{leader}").disk().files())
        assert not [path for path in files if path.endswith(".corrupt")]


def test_voters_take_their_snapshots_at_different_moments() -> None:
    group = Group(seed=7, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        group.propose(group.leader(), *VALUES)
        group.world.run_until(lambda: all(one.values.taken for one in group.members.values()), timeout=20)
        first = [one.values.taken[0] for one in group.members.values()]
        assert len(set(first)) == 3, first
