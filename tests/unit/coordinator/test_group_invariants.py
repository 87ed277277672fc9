"""Broken groups are named: assignments of consumer groups, members and rounds of classic ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.groups.machine import Groups, Topics

from tidelog.coordinator.classic_group import ClassicGroup, ClassicState
from tidelog.coordinator.classic_invariants import validate_classic
from tidelog.coordinator.classic_requests import JoinGroup
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.state import CoordinatorState, Group, validate, validate_group


def stable() -> Groups:
    """Two members share four partitions."""
    groups = Groups(Topics.of(orders=4))
    for member in ("a", "b"):
        groups.heartbeat(member, 0, topics=("orders",), owned=frozenset())
    for _ in range(3):
        for member in ("a", "b"):
            current = groups.group().currents[member]
            groups.heartbeat(member, current.epoch, owned=current.assigned)
    group = groups.group()
    assert all(len(group.currents[member].assigned) == 2 for member in ("a", "b"))
    validate_group(group)
    return groups


def keep_what_was_revoked(group: Group) -> Group:
    mine = replace(group.currents["a"], assigned=group.currents["a"].assigned | group.currents["b"].assigned)
    return replace(group, currents=group.currents.set("a", mine))


def hold_and_give_up(group: Group) -> Group:
    mine = replace(group.currents["a"], revoking=group.currents["a"].assigned)
    return replace(group, currents=group.currents.set("a", mine))


def be_ahead(group: Group) -> Group:
    return replace(group, currents=group.currents.set("a", replace(group.currents["a"], epoch=group.epoch + 1)))


def forget_target(group: Group) -> Group:
    return replace(group, targets=group.targets.delete("a"))


def share_target(group: Group) -> Group:
    everything = group.targets["a"].partitions | group.targets["b"].partitions
    return replace(group, targets=group.targets.set("a", replace(group.targets["a"], partitions=everything)))


def forget_owner(group: Group) -> Group:
    return replace(group, owners=group.owners.delete(next(iter(group.owners))))


BROKEN: tuple[tuple[Callable[[Group], Group], str], ...] = (
    (keep_what_was_revoked, "g/a: in the newest epoch it keeps what its target lacks"),
    (hold_and_give_up, "g/a: holds and gives up"),
    (be_ahead, "g/a: ahead of its group"),
    (forget_target, "g: half a member"),
    (share_target, "g/b: a partition in two targets"),
    (forget_owner, "g: owners are not those of its members"),
)


@pytest.mark.parametrize(("break_group", "message"), BROKEN, ids=[each.__name__ for each, _ in BROKEN])
def test_a_broken_consumer_group_is_named(break_group: Callable[[Group], Group], message: str) -> None:
    before = stable().state
    broken = CoordinatorState(before.groups.set("g", break_group(before.groups["g"])))
    with pytest.raises(AssertionError, match=message):
        validate(broken, since=before)
    validate(broken, since=broken)


def joined() -> ClassicGroup:
    group = ClassicGroup("g", GroupLimits(), stored=None, now_ms=0)
    for ticket, member in enumerate(("a", "b")):
        group.join(
            JoinGroup(
                member_id="",
                new_member_id=member,
                protocol_type="consumer",
                protocols=(("range", b""),),
                session_timeout_ms=10_000,
                rebalance_timeout_ms=10_000,
                needs_known_id=False,
                now_ms=0,
                ticket=ticket,
            )
        )
    validate_classic(group)
    return group


def lose_leader(group: ClassicGroup) -> None:
    group.state, group.leader = ClassicState.STABLE, "c"
    for member in group.members.values():
        member.join_ticket = None


def wait_twice(group: ClassicGroup) -> None:
    group.members["a"].join_ticket = group.members["b"].join_ticket


def wait_without_round(group: ClassicGroup) -> None:
    group.state = ClassicState.STABLE


def be_empty(group: ClassicGroup) -> None:
    group.state = ClassicState.EMPTY


def sync_in_a_round(group: ClassicGroup) -> None:
    group.members["a"].sync_ticket = 7


def share_instance(group: ClassicGroup) -> None:
    for member in group.members.values():
        member.instance_id = "i"


BROKEN_CLASSIC: tuple[tuple[Callable[[ClassicGroup], None], str], ...] = (
    (lose_leader, "its leader 'c' is no member"),
    (wait_twice, "a ticket waits twice"),
    (wait_without_round, "a join waits without a round"),
    (be_empty, "empty, and has members"),
    (sync_in_a_round, "a sync waits in preparing"),
    (share_instance, "two members of one instance id"),
)


@pytest.mark.parametrize(("break_group", "message"), BROKEN_CLASSIC, ids=[each.__name__ for each, _ in BROKEN_CLASSIC])
def test_a_broken_classic_group_is_named(break_group: Callable[[ClassicGroup], None], message: str) -> None:
    group = joined()
    break_group(group)
    with pytest.raises(AssertionError, match=message):
        validate_classic(group)
