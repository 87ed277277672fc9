"""A member whose disk is full takes no part, and does not stop: with room it is one of the group again."""

import errno

import pytest
from support.raft.members import SMALL_SNAPSHOTS, A, B, C, Group

from tidelog.model.ids import NodeId
from tidelog.raft import persister
from tidelog.raft.effects import Role

pytestmark = pytest.mark.sim

VALUES = [b"%050d" % number for number in range(100)]


def set_full(group: Group, node: NodeId, *, store: bool = True) -> None:
    machine = group.world.machine(f"m{node}")
    machine.disk().fill()
    if store:
        machine.store().fill()


def make_room(group: Group, node: NodeId) -> None:
    group.world.machine(f"m{node}").heal()


def nobody_has_stopped(group: Group) -> bool:
    return all(one.driver.failed is None and one.failure is None for one in group.members.values())


@pytest.mark.parametrize("store", [True, False])
def test_a_follower_without_room_acknowledges_nothing_and_catches_up_with_room(
    store: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    group = Group(seed=4)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        set_full(group, away, store=store)
        durable_end = group.members[away].driver.core.durable_end
        group.propose(leader, *VALUES)
        group.world.run_for(5)
        assert group.members[away].driver.core.durable_end == durable_end
        assert nobody_has_stopped(group)
        make_room(group, away)
        group.until_equal(VALUES)
        assert group.members[away].driver.core.durable_end > durable_end
        assert nobody_has_stopped(group)
    lines = [row.getMessage() for row in caplog.records if row.name == "tidelog.raft.persister"]
    assert lines[0].startswith("this member does not take part until there is space: ")
    assert lines[-1].startswith("this member takes part again")


def test_a_leader_without_room_is_outvoted_by_nobody_and_the_others_store_for_it() -> None:
    group = Group(seed=5)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        set_full(group, leader)
        group.propose(leader, *VALUES[:10])
        make_room(group, leader)
        group.propose(group.leader(), *VALUES[10:])
        group.until_equal(VALUES)
        assert nobody_has_stopped(group)


def test_a_voter_that_cannot_store_its_vote_gives_none() -> None:
    """Two of three are left, and one of them has no room: nobody is elected until it has."""
    group = Group(seed=6)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        one, other = (node for node in (A, B, C) if node != leader)
        group.propose(leader, b"first")
        group.until_equal([b"first"])
        set_full(group, one)
        group.kill(leader)
        group.world.run_for(20)
        assert not any(found.driver.core.role is Role.LEADER for found in group.members.values())
        assert nobody_has_stopped(group)
        make_room(group, one)
        group.propose(group.leader(among=[one, other]), b"last")
        group.until_equal([b"first", b"last"], among=[one, other])


def test_a_snapshot_that_finds_no_room_is_taken_later() -> None:
    group = Group(seed=7, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        found = group.members[away]
        for operation in ("append", "create"):
            group.world.machine(f"m{away}").disk().fail(operation, number=errno.ENOSPC, times=1_000)
        group.propose(leader, *VALUES)
        group.world.run_for(3)
        assert nobody_has_stopped(group)
        group.world.machine(f"m{away}").heal()
        group.propose(group.leader(), b"last")
        group.until_equal([*VALUES, b"last"])
        group.world.run_until(
            lambda: found.driver.metrics.snapshots_taken + found.driver.metrics.snapshots_installed > 0, timeout=60
        )


def test_what_waits_for_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persister, "WAITING_BYTES_MAX", 2_000)
    group = Group(seed=8)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        away = next(node for node in (A, B, C) if node != leader)
        set_full(group, away)
        group.propose(leader, *VALUES)
        group.world.run_until(lambda: group.members[away].failure is not None, timeout=30)
        assert "free space" in str(group.members[away].failure)
