"""The driver: members that come and go, and the links to them."""

from collections.abc import Iterator

import pytest
from support.raft.members import (
    SMALL_SNAPSHOTS,
    A,
    B,
    C,
    D,
    Group,
    describe,
    directory,
    error_of,
    explain_missing_leader,
    member,
)

from tidelog.model.errors import MembershipChangeError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.driver import DriverConfig
from tidelog.raft.effects import Role
from tidelog.raft.messages import SnapshotId
from tidelog.raft.peers import LinkConfig
from tidelog.raft.status import MemberStatus, RaftStatus
from tidelog.raft.status import explain_missing_leader as describe_waiting

pytestmark = pytest.mark.sim


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(seed=11).running() as found:
        yield found


# Membership.


def test_a_voter_is_added_catches_up_and_votes() -> None:
    group = Group(seed=7, config=SMALL_SNAPSHOTS)
    with group.world:
        group.start(A, B, C)
        leader = group.leader()
        wanted = [b"%050d" % number for number in range(100)]
        group.propose(leader, *wanted)
        group.start(D)
        group.on(leader, lambda driver: driver.change_membership(add=member(D)))
        assert group.members[leader].driver.core.log.membership.voter(D) is not None
        group.until_equal(wanted)
        error = group.on(leader, lambda driver: error_of(driver.change_membership(add=member(D))))
        assert isinstance(error, MembershipChangeError)
        rows = group.on(leader, describe).members
        assert [row.node for row in rows if row.is_voter] == [A, B, C, D]


def test_a_removed_leader_hands_over_and_the_rest_goes_on(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.on(leader, lambda driver: driver.change_membership(remove=leader))
    others = [node for node in (A, B, C) if node != leader]
    successor = group.leader(among=others)
    group.propose(successor, b"b")
    assert group.members[successor].driver.core.log.membership.voter(leader) is None
    group.until_equal([b"a", b"b"], among=others)


# Bounds.


def test_a_peer_that_does_not_read_is_cut_off_and_catches_up_later() -> None:
    config = DriverConfig(link=LinkConfig(queue_messages_max=50, frame_bytes=1))
    group = Group(seed=8, config=config)
    with group.world:
        group.network.window_bytes = 4_000
        group.start(A, B, C)
        leader = group.leader()
        slow = next(node for node in (A, B, C) if node != leader)
        group.propose(leader, b"first")
        group.world.machine(f"m{slow}").pause()
        wanted = [b"first", *(b"%0200d" % number for number in range(300))]
        group.propose(leader, *wanted[1:])
        link = group.members[leader].driver._peers.links[slow]
        assert len(link._queue) <= 50
        group.world.machine(f"m{slow}").resume()
        group.until_equal(wanted)


def links(group: Group, node: NodeId) -> list[NodeId]:
    return sorted(group.members[node].driver._peers.links)


def test_links_to_a_leader_that_removed_itself_end_when_there_is_nothing_more_to_say(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    others = [node for node in (A, B, C) if node != leader]
    group.on(leader, lambda driver: driver.change_membership(remove=leader))
    assert group.members[leader].driver.core.commit > 2, "its followers' acks reached it"
    successor = group.leader(among=others)
    assert leader in links(group, successor), "kept for a while"
    sent = group.members[successor].driver.metrics.messages_sent
    group.world.run_until(lambda: all(leader not in links(group, node) for node in others), timeout=20)
    assert group.members[leader].driver.core.log.membership.voter(leader) is None, "it knows"
    assert group.members[leader].transport is not None
    assert all(links(group, node) == [other for other in others if other != node] for node in others)
    assert group.members[successor].driver.metrics.messages_sent >= sent, "what was counted stays counted"


def test_a_voter_that_did_not_hear_of_its_removal_is_answered_and_then_forgotten(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.until_equal([b"a"])
    gone = next(node for node in (A, B, C) if node != leader)
    others = [node for node in (A, B, C) if node != gone]
    for other in others:
        group.network.block(gone, other)
        group.network.block(other, gone)
    group.on(leader, lambda driver: driver.change_membership(remove=gone))
    group.world.run_until(lambda: all(gone not in links(group, node) for node in others), timeout=20)
    group.network.heal()
    candidate = group.members[gone].driver.core
    group.world.run_until(lambda: candidate.elections.rejecting_voters == set(others), timeout=10)
    assert candidate.log.membership.voter(gone) is not None, "it does not know"
    assert group.leader() == leader, "and disturbs nobody"
    said = group.on(gone, explain_missing_leader)
    assert all(f"node {node}" in said for node in others), said
    assert "this node may have been removed from the quorum" in said
    group.kill(gone)
    group.world.run_until(lambda: all(gone not in links(group, node) for node in others), timeout=20)


def test_a_member_that_was_forgotten_is_found_when_it_is_added_again(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    gone = next(node for node in (A, B, C) if node != leader)
    group.kill(gone)
    group.on(leader, lambda driver: driver.change_membership(remove=gone))
    group.world.run_until(lambda: gone not in links(group, leader), timeout=20)
    group.propose(leader, b"b")
    group.start(gone)
    group.on(leader, lambda driver: driver.change_membership(add=member(gone)))
    group.until_equal([b"a", b"b"])
    group.world.run_for(20)
    assert gone in links(group, leader), "a member's link is kept"


def test_a_voter_that_heard_of_its_removal_says_so(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    group.start(A, B, C)
    gone = group.leader()
    group.propose(gone, b"a")
    group.on(gone, lambda driver: driver.change_membership(remove=gone))
    leader = group.leader(among=[node for node in (A, B, C) if node != gone])
    others = ", ".join(str(node) for node in (A, B, C) if node != gone)
    wanted = (
        f"not among the voters that it knows of ({others}): it was removed, or was never added. "
        "Add it with `tidelog quorum add`"
    )
    said = f"node={gone} no leader for "

    def has_said_it() -> bool:
        return any(row.getMessage().startswith(said) and wanted in row.getMessage() for row in caplog.records)

    group.world.run_until(has_said_it, timeout=20)
    report = group.on(gone, describe)
    assert report.without_leader_ms >= 2_000
    assert not [row for row in caplog.records if row.getMessage().startswith(f"node={leader} no leader")]


def test_a_node_that_learns_is_not_said_to_be_removed() -> None:
    report = RaftStatus(
        *(D, directory(D), Epoch(3), Role.FOLLOWER, None, Offset(0), Offset(0), Offset(0), Offset(0), Offset(0)),
        snapshot=SnapshotId(Offset(0), Epoch(0)),
        recovering_until=None,
        without_leader_ms=4_000,
        members=(
            MemberStatus(A, directory(A), (), is_voter=True, is_connected=True, error=None),
            MemberStatus(D, directory(D), (), is_voter=False, is_connected=True, error=None),
        ),
    )
    said = describe_waiting(report, lambda _: "")
    assert (
        said == "no leader for 4.0 s; not among the voters that it knows of (1): it learns, and a leader must find it"
    )


def test_missing_voter_is_named_once_although_it_has_two_addresses() -> None:
    report = RaftStatus(
        *(A, directory(A), Epoch(3), Role.FOLLOWER, None, Offset(0), Offset(0), Offset(0), Offset(0), Offset(0)),
        snapshot=SnapshotId(Offset(0), Epoch(0)),
        recovering_until=None,
        without_leader_ms=4_000,
        members=(
            MemberStatus(A, directory(A), (), is_voter=True, is_connected=True, error=None),
            MemberStatus(B, directory(B), (), is_voter=True, is_connected=False, error="node 2 at vm:9192: refused"),
        ),
    )
    assert describe_waiting(report, lambda _: "localhost:9192").endswith(": node 2 at localhost:9192 (refused)")


def test_peer_is_worth_a_warning_only_if_it_stays_unreachable(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    def levels() -> set[str]:
        return {row.levelname for row in caplog.records if "peer=2 is unreachable" in row.getMessage()}

    caplog.set_level("INFO")
    group.start(A)
    group.world.run_for(1)
    assert levels() == {"INFO"}
    group.world.run_for(5)
    warnings = [
        row for row in caplog.records if "peer=2 is unreachable" in row.getMessage() and row.levelname == "WARNING"
    ]
    assert len(warnings) == 1
