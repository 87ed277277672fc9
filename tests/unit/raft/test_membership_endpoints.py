"""New endpoints of a member: only of one that is there, with the directory that it has (R18)."""

import pytest

from tidelog.model.ids import NodeId
from tidelog.raft.membership import Member, Membership

VOTER = Member(NodeId(1), b"a" * 16, (("CONTROLLER", "old:1"),))
OTHER = Member(NodeId(2), b"b" * 16)
LEARNER = Member(NodeId(3), b"c" * 16)
MEMBERSHIP = Membership((VOTER, OTHER), (LEARNER,))


@pytest.mark.case("R18")
def test_a_voter_stays_a_voter_and_a_learner_a_learner() -> None:
    moved = Member(NodeId(1), b"a" * 16, (("CONTROLLER", "new:1"),))
    after = MEMBERSHIP.with_endpoints(moved)
    assert after == Membership((moved, OTHER), (LEARNER,))
    assert after.is_one_step_from(MEMBERSHIP)
    assert Membership.decode(after.encode()) == after
    learner = Member(NodeId(3), b"c" * 16, (("CONTROLLER", "new:3"),))
    assert MEMBERSHIP.with_endpoints(learner) == Membership((VOTER, OTHER), (learner,))


@pytest.mark.parametrize(
    "unknown",
    [
        Member(NodeId(9), b"a" * 16, (("CONTROLLER", "x:1"),)),
        Member(NodeId(1), b"z" * 16, (("CONTROLLER", "x:1"),)),
        Member(NodeId(3), b"z" * 16, (("CONTROLLER", "x:1"),)),
    ],
    ids=["no such node", "a voter's other directory", "a learner's other directory"],
)
def test_an_unknown_voter_does_not_become_a_member_by_its_endpoints(unknown: Member) -> None:
    assert MEMBERSHIP.with_endpoints(unknown) is None
