"""The driver: when snapshots are taken, and who gets them."""

import asyncio

import pytest
from support.raft.members import SMALL_SNAPSHOTS, A, B, C, Group

from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.snapshots import file_name
from tidelog.world.simulated.faults import Latency

pytestmark = pytest.mark.sim


def test_snapshots_are_taken_and_a_restart_begins_with_one() -> None:
    group = Group(seed=4, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(leader, *wanted)
        group.world.run_until(
            lambda: all(m.driver.metrics.snapshots_taken > 1 for m in group.members.values()), timeout=20
        )
        assert group.members[leader].driver.core.log.start > 0, "the log behind it is gone"
        for node in (A, B, C):
            group.kill(node)
        group.start(A, B, C)
        assert all(one.values.loaded for one in group.members.values())
        group.leader()
        group.until_equal(wanted)


def test_an_old_state_is_put_into_a_snapshot_though_it_is_small() -> None:
    group = Group(seed=4, config=DriverConfig(snapshot_age_ms=5_000))
    with group.world:
        group.start(A, B, C)
        group.propose(group.leader(), b"a")
        group.world.run_for(7)
        assert [one.driver.metrics.snapshots_taken for one in group.members.values()] == [1, 1, 1]


def test_a_member_that_was_away_too_long_gets_a_snapshot() -> None:
    group = Group(seed=5, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        group.propose(leader, b"first")
        group.kill(away)
        wanted = [b"first", *(b"%050d" % number for number in range(100))]
        group.propose(leader, *wanted[1:])
        group.start(away)
        group.until_equal(wanted)
        assert group.members[away].driver.metrics.snapshots_installed >= 1


@pytest.mark.case("R19")
def test_a_spoilt_snapshot_is_never_sent_and_a_new_one_is_taken() -> None:
    group = Group(seed=6, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        group.kill(away)
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(leader, *wanted)
        group.world.run_for(1)
        device = group.world.machine(f"m{leader}").disk()
        newest = group.members[leader].driver.core.log.snapshot
        device.flip_bit(f"raft/{file_name(newest)}", 100)
        group.world.run_for(3)  # what was read before is too old to be sent
        group.start(away)
        group.until_equal(wanted)
        assert group.members[away].driver.metrics.snapshots_rejected == 0
        assert f"raft/{file_name(newest)}.corrupt" in dict(device.files())


def test_a_snapshot_is_taken_between_two_applies_though_more_waits_to_be_applied() -> None:
    group = Group(seed=5, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        group.kill(away)
        wanted = [b"%050d" % number for number in range(200)]
        group.propose(leader, *wanted[:100])
        group.world.run_for(1)
        group.start(away)
        values, core = group.members[away].values, group.members[away].driver.core
        group.members[away].node.work.latency = Latency(2.0, 3.0)  # the received state takes long to decode
        group.world.run_until(lambda: core.log.snapshot.offset > 0, timeout=20)
        group.propose(leader, *wanted[100:])
        assert values.loaded == [], "all that was committed since waits behind the state"
        group.until_equal(wanted)
        group.world.run_until(lambda: bool(values.taken), timeout=1)
        assert values.loaded[0].offset < values.taken[0] < values.next - 20, "and was not waited for"


def test_under_a_steady_load_the_log_stays_short() -> None:
    group = Group(seed=10, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()

        async def load(driver: RaftDriver) -> int:
            longest = 0
            for number in range(40):
                await asyncio.gather(*(driver.propose(b"%050d" % (100 * number + one)) for one in range(100)))
                longest = max(longest, driver.core.log.end - driver.core.log.start)
            return longest

        assert group.on(leader, load) < 2_000, "of 4,000 entries that were never waited for"
