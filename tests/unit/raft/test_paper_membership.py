"""Section 6 of the Raft paper (and chapter 4 of the thesis): the voters change one at a time, without a gap."""

import pytest
from support.raft.core_cluster import Cluster, Stored, data, directory, member, membership_of

from tidelog.model.errors import CorruptStateError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import Rejection, Role
from tidelog.raft.leader import LeaderState
from tidelog.raft.membership import VOTERS_MAX, Member, Membership, VoterKey
from tidelog.raft.messages import AppendRequest, Entry, EntryKind, PreVoteRequest, VoteRequest


def voters(cluster: Cluster, node: int) -> list[int]:
    return [m.node for m in cluster.core(node).log.membership.voters]


def learners(cluster: Cluster, node: int) -> list[int]:
    return [m.node for m in cluster.core(node).log.membership.learners]


def leadership(cluster: Cluster, node: int) -> LeaderState:
    leader_state = cluster.core(node).leader_state
    assert leader_state is not None
    return leader_state


def led(voter_count: int = 3, *, others: tuple[int, ...] = (), config: RaftConfig | None = None) -> Cluster:
    cluster = Cluster(voter_count, others=others, config=config)
    cluster.elect(1)
    cluster.run(200)
    return cluster


@pytest.mark.requirement("b:E-27")
def test_a_new_server_joins_as_a_learner_catches_up_and_becomes_a_voter_by_itself() -> None:
    cluster = led(others=(4,))
    for number in range(50):
        cluster.propose(1, b"%d" % number)
    token = cluster.change(1, add=member(4))
    assert learners(cluster, 1) == [4]
    assert token not in cluster.accepted, "answered when it votes, not when it learns"
    cluster.run(1000)
    assert voters(cluster, 1) == [1, 2, 3, 4]
    assert learners(cluster, 1) == []
    assert cluster.is_committed(token)
    cluster.assert_all_equal()


def test_a_learner_counts_for_no_majority() -> None:
    cluster = led(others=(4,))
    cluster.slow_disks = {4}
    cluster.change(1, add=member(4))
    cluster.run(300)
    assert learners(cluster, 1) == [4]
    cluster.slow_disks = set()
    cluster.cut(2)
    cluster.cut(3)
    token = cluster.propose(1, b"x")
    cluster.persist(4)
    cluster.deliver_all()
    assert cluster.core(4).log.end == cluster.core(1).log.end
    assert not cluster.is_committed(token)


def test_a_learner_neither_campaigns_nor_is_asked_for_a_vote() -> None:
    cluster = led(others=(4,))
    cluster.slow_disks = {4}
    cluster.change(1, add=member(4))
    cluster.run(300)
    cluster.crash(1)
    cluster.network.clear()
    cluster.wait(5000)
    for node in (2, 3, 4):
        cluster.tick(node)
    assert cluster.core(4).role is Role.FOLLOWER
    assert all(e.to != 4 for e in cluster.network if isinstance(e.message, PreVoteRequest | VoteRequest))


def test_a_learner_that_cannot_keep_up_is_not_promoted() -> None:
    cluster = led(others=(4,))
    cluster.change(1, add=member(4))
    cluster.cut(4)
    cluster.run(5000)
    assert learners(cluster, 1) == [4]
    cluster.heal()
    cluster.run(1000)
    assert voters(cluster, 1) == [1, 2, 3, 4]


def test_two_learners_are_promoted_one_after_the_other_under_load() -> None:
    cluster = led(others=(4, 5))
    cluster.cut(4)
    cluster.cut(5)
    first = cluster.change(1, add=member(4))
    cluster.run(200)
    assert cluster.rejected[cluster.change(1, add=member(5))] is Rejection.CHANGE_IN_PROGRESS
    cluster.crash(1)
    cluster.run_until(lambda: cluster.leader is not None)
    leader = cluster.leader or 0
    cluster.run(200)
    second = cluster.change(leader, add=member(5))
    cluster.heal()
    for number in range(200):
        cluster.propose(leader, b"%d" % number)
        cluster.run(10)
    assert voters(cluster, leader) == [1, 2, 3, 4, 5]
    assert first not in cluster.accepted
    assert cluster.is_committed(second)


def test_a_server_uses_the_latest_membership_in_its_log_committed_or_not() -> None:
    cluster = led()
    cluster.cut(1)
    cluster.change(1, remove=3)
    assert voters(cluster, 1) == [1, 2]
    assert cluster.core(1).commit < cluster.core(1).log.end
    assert set(leadership(cluster, 1).peers) == {2}


def test_truncation_brings_back_the_membership_before() -> None:
    cluster = led()
    cluster.cut(1)
    cluster.change(1, remove=3)
    cluster.propose(1, b"lost")
    cluster.run_until(lambda: cluster.leader in (2, 3))
    cluster.heal()
    cluster.run(500)
    assert voters(cluster, 1) == [1, 2, 3]
    cluster.restart(1)
    assert voters(cluster, 1) == [1, 2, 3], "on disk too"
    cluster.run(500)
    cluster.assert_all_equal()


@pytest.mark.case("R9")
def test_a_leader_that_is_removed_does_not_count_itself_and_goes_when_it_has_committed() -> None:
    cluster = led()
    cluster.held = {(2, 1), (3, 1)}
    token = cluster.change(1, remove=1)
    assert cluster.core(1).role is Role.LEADER
    cluster.deliver_all(lambda e: e.to in (2, 3))
    cluster.held = {(3, 1)}
    cluster.deliver_all()
    assert not cluster.is_committed(token), "one of two remaining voters is no majority, whatever the leader has"
    cluster.held.clear()
    cluster.deliver_all()
    assert cluster.is_committed(token)
    assert cluster.core(1).role is Role.FOLLOWER
    cluster.run_until(lambda: cluster.leader in (2, 3))
    cluster.run(10_000)
    assert cluster.core(1).role is Role.FOLLOWER
    assert len(cluster.check.leaders) == 2, "who is removed disturbs nobody"


@pytest.mark.case("R9")
def test_commit_never_falls_when_the_voters_change() -> None:
    """The checker compares after every step; here the majority grows and shrinks around the leader, and without it."""
    cluster = led(others=(4, 5))
    for added, removed in ((4, None), (5, None), (None, 2), (None, 3), (None, 1)):
        leader = cluster.leader
        assert leader is not None
        cluster.change(leader, add=None if added is None else member(added), remove=removed)
        cluster.run(300)
        cluster.run_until(lambda: cluster.leader is not None)
        cluster.propose(cluster.leader or 0, b"x")
        cluster.run(500)
    assert voters(cluster, cluster.leader or 0) == [4, 5]


def test_the_last_two_voters_become_one_and_the_last_one_stays() -> None:
    cluster = led(2)
    token = cluster.change(1, remove=2)
    cluster.run(100)
    assert cluster.is_committed(token)
    cluster.crash(2)
    assert cluster.rejected[cluster.change(1, remove=1)] is Rejection.LAST_VOTER
    later = cluster.propose(1, b"alone")
    assert cluster.is_committed(later)


def test_no_voter_is_removed_while_too_few_of_the_others_are_up() -> None:
    cluster = led(3)
    cluster.crash(2)
    cluster.run(1500)
    assert cluster.leader == 1
    assert cluster.rejected[cluster.change(1, remove=3)] is Rejection.NO_QUORUM_LEFT, "1 alone would be half of 1 and 2"
    assert cluster.change(1, remove=2) in cluster.accepted, "the one that is down may go"


def test_a_leader_that_removed_itself_and_crashed_can_still_finish_it() -> None:
    """Thesis, figure 4.6: of two voters, the one that is being removed holds the longer log; nobody else can win."""
    cluster = led(2)
    cluster.cut(1)
    cluster.change(1, remove=1)
    cluster.restart(1)
    assert voters(cluster, 1) == [2]
    cluster.heal()
    cluster.run_until(lambda: cluster.leader == 2, 10_000)
    cluster.run(500)
    assert voters(cluster, 2) == [2]
    assert cluster.core(1).role is Role.FOLLOWER
    assert cluster.core(2).commit == cluster.core(2).log.end


def test_servers_that_are_removed_cannot_depose_a_leader() -> None:
    cluster = led()
    cluster.cut(3)
    cluster.change(1, remove=3)
    cluster.run(1000)
    cluster.heal()
    cluster.run(20_000)
    assert voters(cluster, 3) == [1, 2, 3], "it did not learn"
    assert set(cluster.check.leaders.values()) == {1}
    assert cluster.core(1).epoch == 1


@pytest.mark.case("R7")
def test_no_membership_is_appended_before_an_entry_of_the_own_epoch_has_committed() -> None:
    cluster = Cluster(3, others=(4,))
    cluster.wait(1000)
    cluster.tick(1)
    cluster.deliver_all(lambda e: not isinstance(e.message, AppendRequest))
    assert cluster.leader == 1
    for token in (cluster.change(1, add=member(4)), cluster.change(1, remove=3)):
        assert cluster.rejected[token] is Rejection.NOT_READY
    assert voters(cluster, 1) == [1, 2, 3]
    cluster.deliver_all()
    assert cluster.change(1, remove=3) in cluster.accepted


@pytest.mark.case("R7")
def test_the_bug_of_single_server_changes_cannot_be_played() -> None:
    """Ongaro's schedule: S1 appends a change and is cut off, S2 leads and makes another, S1 comes back and leads again.

    Without the rule S1 would commit its old change with a majority that does not overlap the one of S2.
    """
    cluster = Cluster(4, others=(5,))
    cluster.elect(1)
    cluster.run(200)
    cluster.cut(1)
    cluster.change(1, add=member(5))
    assert learners(cluster, 1) == [5]
    cluster.run_until(lambda: cluster.leader in (2, 3, 4), 10_000)
    second = cluster.leader or 0
    cluster.run(200)
    removed = cluster.change(second, remove=1)
    cluster.run(300)
    assert cluster.is_committed(removed)
    cluster.heal()
    cluster.crash(second)
    cluster.run_until(lambda: cluster.leader not in (None, second), 10_000)
    cluster.run(500)
    leader = cluster.leader or 0
    assert voters(cluster, leader) == [2, 3, 4]
    assert leader != 1


@pytest.mark.case("R8")
def test_two_changes_are_never_in_flight_and_any_two_majorities_in_a_row_overlap() -> None:
    cluster = led(others=(4, 5))
    cluster.cut(1)
    first = cluster.change(1, remove=3)
    second = cluster.change(1, remove=2)
    assert first in cluster.accepted
    assert cluster.rejected[second] is Rejection.CHANGE_IN_PROGRESS
    three, four, five = membership_of(1, 2, 3), membership_of(1, 2, 3, 4), membership_of(1, 2, 3, 4, 5)
    assert four.is_one_step_from(three)
    assert three.is_one_step_from(four)
    assert not five.is_one_step_from(three)
    assert not membership_of(1, 2, 4).is_one_step_from(three), "a swap is two steps"
    wiped = Membership((member(1), member(2), member(3, life=1)))
    assert not wiped.is_one_step_from(three), "another directory is another voter"


def test_changes_that_make_no_sense_are_refused() -> None:
    cluster = led(others=(4,))
    assert cluster.rejected[cluster.change(2, remove=3)] is Rejection.NOT_LEADER
    assert cluster.rejected[cluster.change(1, remove=9)] is Rejection.UNKNOWN_MEMBER
    assert cluster.rejected[cluster.change(1)] is Rejection.UNKNOWN_MEMBER
    assert cluster.rejected[cluster.change(1, add=member(2))] is Rejection.ALREADY_MEMBER
    assert cluster.rejected[cluster.change(1, add=member(2, life=1))] is Rejection.ALREADY_MEMBER


def test_endpoints_change_without_a_change_of_voters() -> None:
    cluster = led()
    moved = Member(NodeId(2), directory(2), (("controller", "host-b:9192"),))
    token = cluster.change(1, add=moved)
    cluster.run(200)
    assert cluster.is_committed(token)
    assert cluster.core(3).log.membership.voter(NodeId(2)) == moved


def test_the_removal_of_a_learner_fails_its_waiter_and_the_next_can_be_added() -> None:
    cluster = led(others=(4, 5))
    cluster.cut(4)
    waiting = cluster.change(1, add=member(4))
    cluster.run(200)
    cluster.change(1, remove=4)
    assert cluster.rejected[waiting] is Rejection.UNKNOWN_MEMBER
    cluster.run(200)
    token = cluster.change(1, add=member(5))
    cluster.run(1000)
    assert cluster.is_committed(token)


def test_there_is_a_limit_on_members() -> None:
    most = Membership(tuple(member(node) for node in range(1, VOTERS_MAX + 1)))
    cluster = Cluster(VOTERS_MAX, others=(VOTERS_MAX + 1,))
    cluster.elect(1)
    cluster.run(200)
    assert cluster.rejected[cluster.change(1, add=member(VOTERS_MAX + 1))] is Rejection.TOO_MANY_MEMBERS
    assert Membership.decode(most.encode()) == most
    with pytest.raises(CorruptStateError):
        Membership.decode(Membership((*most.voters, member(99))).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x90",
        Membership((member(1), member(1))).encode(),
        Membership((member(1),), (member(1),)).encode(),
        Membership((Member(NodeId(1), b"short"),)).encode(),
        Membership((Member(NodeId(-1), directory(1)),)).encode(),
        b"\x93\xa1x\x01\x82\xa6voters\x90\xa8learners\x90",
    ],
)
def test_a_membership_that_is_not_sound_is_not_read(raw: bytes) -> None:
    with pytest.raises(CorruptStateError):
        Membership.decode(raw)


@pytest.mark.case("R10")
def test_a_voter_that_comes_back_with_an_empty_disk_is_not_the_voter_it_was() -> None:
    """Directory id mismatch: it grants no vote, none of its answers counts, and it does not campaign."""
    cluster = led()
    token = cluster.propose(1, b"kept")
    cluster.cut(3)
    cluster.deliver_all()
    assert cluster.is_committed(token)
    cluster.crash(2)
    cluster.crash(1)
    del cluster.nodes[2]
    cluster.network.clear()
    cluster.heal()
    cluster.add_node(2, Stored(membership_of(1, 2, 3)), life=1)
    cluster.run(20_000)
    assert cluster.leader is None, "3 lacks a committed entry; a wiped 2 must not help it to win"
    assert cluster.core(2).role is Role.FOLLOWER
    assert cluster.core(3).epoch == 1, "not even a pre-vote"
    cluster.start(1)
    cluster.run_until(lambda: cluster.leader == 1)
    cluster.run(500)
    assert cluster.core(3).log.end == cluster.core(1).log.end
    # It is brought back as what it is: a new voter.
    cluster.change(1, remove=2)
    cluster.run(500)
    again = cluster.change(1, add=member(2, life=1))
    cluster.run(1000)
    assert cluster.is_committed(again)
    cluster.assert_all_equal()


@pytest.mark.case("R10")
def test_a_vote_request_for_another_directory_is_not_answered_and_an_answer_from_one_not_counted() -> None:
    cluster = Cluster(3)
    wrong = directory(2, 1)
    cluster.step(2, VoteRequest(Epoch(1), NodeId(1), directory(1), wrong, Offset(0), Epoch(0)))
    assert cluster.network == []
    assert cluster.core(2).epoch == 0
    cluster.step(2, PreVoteRequest(Epoch(0), NodeId(1), directory(1), wrong, Offset(0), Epoch(0)))
    assert [getattr(e.message, "granted", None) for e in cluster.network] == [False]
    cluster.network.clear()
    cluster.wait(1000)
    cluster.tick(1)
    cluster.deliver_all(lambda e: not isinstance(e.message, VoteRequest))
    (ask, *_) = cluster.network
    cluster.network.clear()
    cluster.nodes[2].me = VoterKey(NodeId(2), wrong)
    cluster.core(2).me = VoterKey(NodeId(2), wrong)
    assert isinstance(ask.message, VoteRequest)
    cluster.step(2, ask.message._replace(to_directory=wrong))
    cluster.deliver_all()
    assert cluster.core(1).role is Role.CANDIDATE, "granted by a disk that is no voter"


@pytest.mark.case("R11")
def test_a_voter_that_lost_its_vote_with_its_directory_cannot_vote_twice_in_an_epoch() -> None:
    """A lost quorum state comes with a new directory id (storage's part): the second vote is for nobody's count."""
    cluster = Cluster(3)
    cluster.step(3, VoteRequest(Epoch(1), NodeId(1), directory(1), directory(3), Offset(0), Epoch(0)))
    cluster.network.clear()
    cluster.crash(3)
    del cluster.nodes[3]
    cluster.add_node(3, Stored(membership_of(1, 2, 3)), life=1)
    cluster.step(3, VoteRequest(Epoch(1), NodeId(2), directory(2), directory(3), Offset(0), Epoch(0)))
    assert cluster.network == []


def test_a_membership_of_the_log_is_in_force_from_the_moment_a_follower_takes_it() -> None:
    cluster = led()
    changed = Entry(Epoch(1), EntryKind.MEMBERSHIP, membership_of(1, 2).encode())
    core = cluster.core(2)
    end = core.log.end
    cluster.step(2, AppendRequest(Epoch(1), NodeId(1), end, Epoch(1), (changed, data(1, "x")), Offset(0), 0))
    assert voters(cluster, 2) == [1, 2]
    assert core.commit <= end
    assert [m.node for m in core.log.membership_at(end).voters] == [1, 2, 3]
    assert [m.node for m in core.log.membership_at(Offset(end + 1)).voters] == [1, 2]
