"""Known failures of peers, as far as a core alone can show them (R7 to R10, R15 and R19 are with the paper's tests)."""

import pytest
from support.raft.core_cluster import Cluster, Stored, data, directory, member, membership_of

from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.config import RaftConfig
from tidelog.raft.effects import HardState, Rejection, Role
from tidelog.raft.messages import (
    AppendRequest,
    AppendResponse,
    PreVoteRequest,
    PreVoteResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)


def led(voters: int = 3, *, config: RaftConfig | None = None, seed: int = 1) -> Cluster:
    cluster = Cluster(voters, config=config, seed=seed)
    cluster.elect(1)
    cluster.run(200)
    return cluster


def pre_vote(epoch: int, sender: int, to: int, *, end: int = 9, last_epoch: int = 9) -> PreVoteRequest:
    return PreVoteRequest(
        Epoch(epoch), NodeId(sender), directory(sender), directory(to), Offset(end), Epoch(last_epoch)
    )


@pytest.mark.case("R1")
def test_R1_a_partitioned_follower_that_rejoins_does_not_depose_a_healthy_leader() -> None:
    cluster = led()
    cluster.cut(3)
    cluster.run(30_000)
    assert cluster.core(3).role is not Role.LEADER
    assert cluster.core(3).epoch == 1, "asking for pre-votes raises no epoch"
    cluster.heal()
    token = cluster.propose(1, b"x")
    cluster.run(2000)
    assert cluster.core(1).role is Role.LEADER
    assert cluster.core(1).epoch == 1
    assert cluster.is_committed(token)
    cluster.assert_all_equal()


@pytest.mark.case("R1")
def test_R1_a_follower_that_hears_the_leader_only_one_way_does_not_depose_it() -> None:
    cluster = led()
    cluster.cuts = {(1, 3)}
    cluster.run(30_000)
    assert cluster.core(1).role is Role.LEADER
    assert cluster.core(1).epoch == 1


@pytest.mark.case("R2")
def test_R2_a_node_grants_a_pre_vote_to_the_one_that_it_believes_to_be_leader() -> None:
    cluster = led()
    core = cluster.core(2)
    assert core.leader == 1
    cluster.step(2, pre_vote(1, 1, 2))
    cluster.step(2, pre_vote(1, 3, 2))
    answers = [(e.to, e.message.granted) for e in cluster.network if isinstance(e.message, PreVoteResponse)]
    assert answers == [(1, True), (3, False)]


@pytest.mark.case("R2")
def test_R2_two_of_three_elect_the_restarted_leader_at_once() -> None:
    """The third is dead, the second still trusts the leader that has just restarted: it must not refuse it."""
    cluster = led()
    cluster.crash(3)
    cluster.restart(1)
    cluster.now_ms = cluster.core(1).deadline_ms
    cluster.core(2).elections.contact_ms = cluster.now_ms
    cluster.tick(1)
    cluster.deliver_all()
    assert cluster.leader == 1


@pytest.mark.case("R3")
def test_R3_granting_a_pre_vote_changes_nothing_at_the_one_who_grants() -> None:
    cluster = Cluster(3)
    core = cluster.core(2)
    before = (core.role, core.epoch, core.voted_for, core.leader, core.deadline_ms, core.elections.contact_ms)
    persists = core._persist_number
    cluster.wait(100)
    cluster.step(2, pre_vote(0, 1, 2))
    assert [e.message.granted for e in cluster.network if isinstance(e.message, PreVoteResponse)] == [True]
    after = (core.role, core.epoch, core.voted_for, core.leader, core.deadline_ms, core.elections.contact_ms)
    assert (after, core._persist_number) == (before, persists)


@pytest.mark.case("R4")
def test_R4_a_node_that_returns_with_an_older_epoch_joins_and_completes_a_quorum() -> None:
    disks = {}
    for node, epoch in ((1, 8), (2, 3), (3, 8)):
        disks[node] = Stored(membership_of(1, 2, 3))
        disks[node].hard_state = HardState(Epoch(epoch), None)
    disks[2].entries = [data(3, "more up to date")]
    cluster = Cluster(3, disks=disks)
    cluster.crash(3)
    cluster.run_until(lambda: cluster.leader is not None, 5000)
    assert cluster.leader == 2, "only its log will do"
    assert cluster.core(2).epoch > 8


@pytest.mark.case("R4")
def test_R4_a_node_with_an_older_epoch_is_brought_along_by_the_leader() -> None:
    cluster = led()
    cluster.crash(3)
    cluster.crash(2)
    cluster.nodes[1].disk.hard_state = HardState(Epoch(9), None)
    cluster.restart(1)
    cluster.start(2)
    cluster.run_until(lambda: cluster.leader is not None, 5000)
    token = cluster.propose(cluster.leader or 0, b"x")
    cluster.run(300)
    assert cluster.is_committed(token)


@pytest.mark.case("R5")
def test_R5_a_lagging_node_that_is_refused_pre_votes_catches_up_and_does_not_spin() -> None:
    cluster = led()
    cluster.cut(3)
    for number in range(100):
        cluster.propose(1, b"%d" % number)
    cluster.run(5000)
    # It hears everybody but its leader: all its pre-votes are rejected, one after the other.
    cluster.cuts = {(1, 3)}
    before = len(cluster.check.committed)
    cluster.trace.on = True
    cluster.run(10_000)
    rounds = sum("3 pre-candidate" in line for line in cluster.trace.take())
    assert rounds <= 40, "the wait between two tries grows"
    cluster.heal()
    cluster.run(500)
    assert cluster.core(1).role is Role.LEADER
    assert len(cluster.check.committed) == before
    cluster.assert_all_equal()


@pytest.mark.case("R5")
def test_R5_being_refused_does_not_keep_a_node_from_taking_appends() -> None:
    cluster = led()
    cluster.crash(2)
    cluster.cut(3)
    token = cluster.propose(1, b"x")
    cluster.run(700)
    cluster.heal()
    cluster.wait(1500)
    cluster.tick(3)
    assert cluster.core(3).role is Role.PRE_CANDIDATE
    cluster.core(1).elections.contact_ms = cluster.now_ms
    cluster.run(300)
    assert cluster.is_committed(token)


@pytest.mark.case("R6")
@pytest.mark.requirement("b:D-27", "a:T-08", "b:D-28")
def test_R6_a_leader_that_is_cut_from_the_majority_resigns_and_the_rest_elect_another() -> None:
    cluster = led(5)
    cluster.cut(1, 3, 4, 5)
    cluster.cut(2, 3, 4, 5)
    waiting = cluster.propose(1, b"in vain")
    read = cluster.read(1)
    cluster.run(2 * cluster.config.election_timeout_max_ms + 100)
    assert cluster.core(1).role is not Role.LEADER
    assert cluster.rejected[read] is Rejection.NOT_LEADER
    assert cluster.leader in (3, 4, 5)
    assert not cluster.is_committed(waiting)
    cluster.heal()
    cluster.run(1000)
    assert {core.leader for core in cluster.cores().values()} == {cluster.leader}
    cluster.assert_all_equal()


@pytest.mark.case("R6")
def test_R6_reads_and_proposals_that_keep_coming_do_not_keep_a_cut_leader_in_office() -> None:
    """Each read sends a heartbeat, and so puts off the next one: the look for a majority must not depend on it."""
    cluster = led()
    cluster.cut(1)
    for _ in range(60):
        if cluster.core(1).role is Role.LEADER:
            cluster.read(1)
            cluster.propose(1, b"x")
        cluster.run(50)
    assert cluster.core(1).role is not Role.LEADER


@pytest.mark.case("R6")
def test_R6_a_learner_finds_the_new_leader_too() -> None:
    cluster = Cluster(3, others=(4,))
    cluster.elect(1)
    cluster.run(200)
    cluster.slow_disks = {4}
    cluster.change(1, add=member(4))
    cluster.run(300)
    cluster.persist(4)
    assert cluster.core(4).leader == 1
    cluster.slow_disks.clear()
    cluster.cut(1)
    cluster.run_until(lambda: cluster.leader in (2, 3), 5000)
    cluster.run(1000)
    assert cluster.core(4).leader == cluster.leader


@pytest.mark.case("R12")
@pytest.mark.requirement("b:E-35")
def test_R12_a_leader_whose_disk_hangs_steps_down_although_its_heartbeats_are_answered() -> None:
    cluster = led()
    cluster.slow_disks = {1}
    cluster.propose(1, b"x")
    cluster.run(cluster.config.disk_stall_timeout_ms - 100)
    assert cluster.core(1).role is Role.LEADER
    cluster.run(200)
    assert cluster.core(1).role is not Role.LEADER
    cluster.run_until(lambda: cluster.leader in (2, 3), 3000)
    token = cluster.propose(cluster.leader or 0, b"goes on")
    cluster.deliver_all()
    assert cluster.is_committed(token)
    cluster.run(10_000)
    assert cluster.core(1).role is Role.FOLLOWER, "a node with a hanging disk does not campaign either"
    cluster.persist(1)
    cluster.slow_disks.clear()
    cluster.run(1000)
    cluster.assert_all_equal()


@pytest.mark.case("R12")
def test_R12_a_follower_whose_disk_hangs_asks_nobody_for_votes() -> None:
    cluster = led()
    cluster.slow_disks = {2}
    cluster.propose(1, b"x")
    cluster.deliver_all()
    cluster.crash(1)
    cluster.crash(3)
    cluster.network.clear()
    cluster.run(cluster.config.election_timeout_max_ms)
    cluster.start(1)
    cluster.start(3)
    cluster.cut(1, 3)
    cluster.trace.on = True
    cluster.run(10_000)
    assert cluster.core(2).epoch == 1
    assert not any(line.startswith(("2 -> 1 pre-vote?", "2 -> 3 pre-vote?")) for line in cluster.trace.take())


@pytest.mark.case("R16")
def test_R16_a_transfer_with_writes_in_flight_loses_none_of_them() -> None:
    cluster = led()
    tokens = [cluster.propose(1, b"%d" % number) for number in range(20)]
    cluster.transfer(1, 2)
    assert not any(isinstance(e.message, TimeoutNow) for e in cluster.network), "not before it has everything"
    late = cluster.propose(1, b"late")
    assert cluster.rejected[late] is Rejection.TRANSFERRING
    cluster.deliver_all()
    assert cluster.leader == 2
    assert cluster.core(2).epoch == 2
    cluster.run(300)
    assert all(map(cluster.is_committed, tokens))
    cluster.assert_all_equal()


@pytest.mark.case("R16")
@pytest.mark.parametrize("lost", [TimeoutNow, VoteRequest, VoteResponse])
def test_R16_a_transfer_that_fails_leaves_a_leader_that_takes_proposals(lost: type) -> None:
    cluster = led()
    cluster.transfer(1, 2)
    for _ in range(20):
        cluster.take(lambda e: isinstance(e.message, lost))
        if not cluster.network:
            break
        cluster.deliver(cluster.network[0])
    cluster.run(3000)
    assert cluster.leader is not None
    token = cluster.propose(cluster.leader, b"x")
    cluster.run(300)
    assert cluster.is_committed(token)


@pytest.mark.case("R16")
def test_R16_a_transfer_to_a_dead_or_unknown_node_ends_by_itself() -> None:
    cluster = led()
    cluster.crash(3)
    cluster.propose(1, b"3 lacks this")
    cluster.transfer(1, 3)
    assert cluster.rejected[cluster.propose(1, b"x")] is Rejection.TRANSFERRING
    cluster.run(cluster.config.election_timeout_max_ms + 200)
    assert cluster.core(1).role is Role.LEADER
    assert cluster.is_committed(_proposed(cluster))
    cluster.transfer(1, 9)
    assert cluster.is_committed(_proposed(cluster)), "no such node: nothing to wait for"


def _proposed(cluster: Cluster) -> int:
    token = cluster.propose(1, b"x")
    cluster.deliver_all()
    return token


def test_a_transfer_without_a_target_goes_to_the_most_advanced_voter() -> None:
    cluster = led()
    cluster.cut(2)
    cluster.propose(1, b"x")
    cluster.deliver_all()
    cluster.heal()
    cluster.transfer(1)
    cluster.deliver_all()
    assert cluster.leader == 3


def test_a_campaign_order_of_an_old_epoch_or_of_a_non_member_is_ignored() -> None:
    cluster = led()
    cluster.step(2, TimeoutNow(Epoch(0), NodeId(1)))
    cluster.step(2, TimeoutNow(Epoch(1), NodeId(3)))
    assert cluster.core(2).role is Role.FOLLOWER
    assert cluster.core(2).epoch == 1


# A voter that lost synced data (design 6.6).


def with_loss(lost_from: int = 2, *, config: RaftConfig | None = None) -> Cluster:
    """Nodes 1 (leader) and 3 have committed five entries; node 3 has lost its own from `lost_from` on."""
    cluster = led(config=config)
    cluster.cut(2)
    for number in range(5):
        cluster.propose(1, b"%d" % number)
    cluster.deliver_all()
    assert len(cluster.check.committed) == 6
    cluster.crash(3)
    cluster.network.clear()
    cluster.nodes[3].disk.lose_after(Offset(lost_from))
    cluster.heal()
    cluster.start(3)
    return cluster


def test_a_voter_that_lost_synced_entries_neither_votes_nor_campaigns() -> None:
    cluster = with_loss()
    cluster.crash(1)
    cluster.run(30_000)
    assert cluster.leader is None, "2 lacks what 1 and 3 committed; with the vote of 3 it would be lost"
    assert cluster.core(3).role is Role.FOLLOWER
    cluster.start(1)
    cluster.run_until(lambda: cluster.leader == 1)
    cluster.run(500)
    cluster.assert_all_equal()


def test_a_recovering_voter_refuses_a_vote_that_is_asked_for_without_a_pre_vote() -> None:
    cluster = with_loss()
    cluster.step(3, VoteRequest(Epoch(2), NodeId(2), directory(2), directory(3), Offset(9), Epoch(1)))
    answers = [e.message for e in cluster.network if isinstance(e.message, VoteResponse)]
    assert answers == [VoteResponse(Epoch(2), NodeId(3), directory(3), False)]
    assert cluster.nodes[3].disk.hard_state == HardState(Epoch(2), None)


def test_a_recovering_voter_says_that_it_does_not_count_until_it_has_everything_again() -> None:
    cluster = with_loss(config=RaftConfig(append_bytes_max=1))
    seen = []
    cluster.wait(cluster.config.heartbeat_interval_ms)
    cluster.tick(1)
    leader_state = cluster.core(1).leader_state
    assert leader_state is not None
    while cluster.network:
        envelope = cluster.network[0]
        cluster.deliver(envelope)
        if envelope.sender == 3 and isinstance(envelope.message, AppendResponse) and not envelope.message.rejected:
            seen.append((envelope.message.match, envelope.message.counts))
            counted = leader_state._synced_by(member(3))
            assert counted == (envelope.message.match if envelope.message.counts else 0)
    assert seen == [(3, False), (4, False), (5, False), (6, True)]


def test_a_recovering_voter_counts_again_when_a_leader_has_brought_it_past_the_loss() -> None:
    cluster = with_loss()
    cluster.cut(2)
    assert cluster.core(3).recovering_until == 6
    core = cluster.core(3)
    cluster.slow_disks = {3}
    token = cluster.propose(1, b"x")
    cluster.run(300)
    assert core.log.end == 7
    assert not cluster.is_committed(token), "in its memory is not enough"
    cluster.persist(3)
    cluster.deliver_all()
    assert core.recovering_until is None
    assert cluster.nodes[3].disk.recovering_until is None
    assert cluster.is_committed(token)
    cluster.restart(3)
    assert cluster.core(3).recovering_until is None


def test_a_leader_counts_a_recovering_voter_for_nothing_whatever_it_acknowledged_before() -> None:
    cluster = with_loss()
    cluster.cut(2)
    cluster.held = {(1, 3)}
    token = cluster.propose(1, b"x")
    cluster.deliver_all(lambda e: e.to == 1)
    cluster.step(
        1,
        AppendResponse(Epoch(1), NodeId(3), directory(3), Offset(6), True, Epoch(1), Offset(2), 0, False),
    )
    leader_state = cluster.core(1).leader_state
    assert leader_state is not None
    assert leader_state.peers[NodeId(3)].match == 0
    assert not cluster.is_committed(token)
    cluster.held.clear()
    cluster.run(500)
    assert cluster.is_committed(token)


def test_a_recovering_voter_is_well_again_in_an_epoch_that_began_after_its_loss() -> None:
    """The leader of the newer epoch was elected without it: its log holds all that this voter ever helped to commit."""
    cluster = led()
    cluster.cut(2)
    for _ in range(5):
        cluster.propose(1, b"x")
    cluster.deliver_all(lambda e: e.to != 1)
    cluster.crash(3)
    cluster.crash(1)
    cluster.network.clear()
    cluster.nodes[3].disk.lose_after(Offset(1))
    disk = cluster.nodes[1].disk
    del disk.entries[1:]
    cluster.heal()
    cluster.start(1)
    cluster.start(3)
    assert cluster.core(3).recovering_until == 6, "it had synced what nobody committed"
    cluster.run_until(lambda: cluster.leader in (1, 2), 10_000)
    cluster.run(500)
    assert cluster.core(3).recovering_until is None
    assert cluster.core(3).log.end < 6
    cluster.assert_all_equal()


def test_a_stale_answer_of_a_recovering_voter_does_not_hold_up_commits_for_ever() -> None:
    cluster = led()
    cluster.cut(2)
    token = cluster.propose(1, b"x")
    append = cluster.take(lambda e: e.to == 3)
    # An answer from the time when it recovered arrives late, and then the true one with nothing new in it.
    leader_state = cluster.core(1).leader_state
    assert leader_state is not None
    stale = AppendResponse(Epoch(1), NodeId(3), directory(3), Offset(1), False, Epoch(0), Offset(0), 0, False)
    for envelope in append:
        cluster.deliver(envelope)
    (ack,) = cluster.take(lambda e: e.to == 1)
    cluster.step(1, stale)
    leader_state.peers[NodeId(3)].acked(Offset(2))
    assert not cluster.is_committed(token)
    cluster.deliver(ack)
    assert cluster.is_committed(token)


# Liveness: the loss, repetition or lateness of any single message is made good.


def eventful(disturb: int, how: str) -> int:
    """An election, writes, a lagging follower with a snapshot, a new voter, a transfer; message `disturb` suffers."""
    config = RaftConfig(kept_behind_snapshot_bytes=0, append_bytes_max=60, inflight_messages_max=3)
    cluster = Cluster(3, others=(4,), config=config, seed=3)
    count = 0
    late: list[object] = []

    def pump() -> None:
        nonlocal count
        while cluster.network:
            envelope = cluster.network.pop(0)
            count += 1
            if count == disturb:
                if how == "lost":
                    continue
                if how == "repeated":
                    cluster.network.append(envelope)
                else:
                    late.append(envelope)
                    continue
            cluster.deliver(envelope)
        if late:
            cluster.network.append(late.pop())  # type: ignore[arg-type]

    def run(ms: int) -> None:
        end = cluster.now_ms + ms
        while True:
            pump()
            due = min((core.deadline_ms for core in cluster.cores().values()), default=end + 1)
            if due > end:
                break
            cluster.now_ms = max(cluster.now_ms, due)
            for node, core in cluster.cores().items():
                if core.deadline_ms <= cluster.now_ms:
                    cluster.tick(node)
        cluster.now_ms = end

    run(3000)
    assert cluster.leader is not None, "no leader after three seconds"
    first = cluster.leader
    down = next(node for node in (1, 2, 3) if node != first)
    cluster.crash(down)
    tokens = [cluster.propose(first, b"%d" % number) for number in range(6)]
    run(1200)
    assert all(map(cluster.is_committed, tokens))
    cluster.take_snapshot(first)
    cluster.start(down)
    run(2500)
    assert cluster.core(down).log.end == cluster.core(first).log.end
    added = cluster.change(first, add=member(4))
    run(3000)
    assert cluster.is_committed(added)
    cluster.transfer(first, down)
    run(4000)
    assert cluster.leader is not None
    token = cluster.propose(cluster.leader, b"last")
    run(1500)
    assert cluster.is_committed(token)
    cluster.assert_all_equal()
    return count


@pytest.mark.parametrize("how", ["lost", "repeated", "late"])
def test_the_loss_repetition_or_delay_of_any_single_message_is_made_good(how: str) -> None:
    total = eventful(0, how)
    # Heartbeats of the idle time are all alike: everything of the beginning, then every few.
    for number in [*range(1, 40), *range(40, total, 17)]:
        eventful(number, how)


def test_an_append_of_a_leader_reaches_who_still_asks_for_votes() -> None:
    cluster = led()
    cluster.wait(5000)
    cluster.tick(3)
    assert cluster.core(3).role is Role.PRE_CANDIDATE
    cluster.step(3, AppendRequest(Epoch(1), NodeId(1), Offset(1), Epoch(1), (), Offset(1), 0))
    assert (cluster.core(3).role, cluster.core(3).leader) == (Role.FOLLOWER, 1)
