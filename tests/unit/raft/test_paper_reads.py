"""Section 8 of the Raft paper: reads that see every write before them, without writing."""

import pytest
from support.raft.core_cluster import Cluster, member

from tidelog.raft.effects import Rejection, Role
from tidelog.raft.messages import AppendRequest, AppendResponse, ReadIndex


def led(voters: int = 3) -> Cluster:
    cluster = Cluster(voters)
    cluster.elect(1)
    cluster.run(200)
    return cluster


def test_a_read_waits_until_the_leader_has_committed_an_entry_of_its_epoch() -> None:
    cluster = Cluster(3)
    cluster.wait(1000)
    cluster.tick(1)
    cluster.deliver_all(lambda e: not isinstance(e.message, AppendRequest))
    assert cluster.leader == 1
    token = cluster.read(1)
    held = cluster.take(lambda e: isinstance(e.message, AppendRequest) and bool(e.message.entries))
    cluster.deliver_all()
    assert token not in cluster.reads
    for envelope in held:
        cluster.deliver(envelope)
    cluster.run(200)
    assert cluster.reads[token] == 1


@pytest.mark.requirement("b:E-32")
def test_a_read_is_answered_after_a_majority_has_answered_a_heartbeat_that_left_after_it() -> None:
    cluster = led(5)
    cluster.wait(cluster.config.heartbeat_interval_ms)
    cluster.tick(1)
    early = cluster.take(lambda _: True)
    token = cluster.read(1)
    probes = cluster.take(lambda _: True)
    assert {e.message.probe for e in probes if isinstance(e.message, AppendRequest)} == {1}
    for envelope in early:
        cluster.deliver(envelope)
    cluster.deliver_all(lambda e: e.to == 1)
    assert token not in cluster.reads, "answers to heartbeats that left before prove nothing"
    cluster.deliver(probes[0])
    cluster.deliver_all(lambda e: e.to == 1)
    assert token not in cluster.reads, "two of five"
    cluster.deliver(probes[1])
    cluster.deliver_all(lambda e: e.to == 1)
    assert cluster.reads[token] == 1


def test_a_leader_that_was_replaced_without_noticing_answers_no_read() -> None:
    cluster = led()
    cluster.cut(1)
    cluster.frozen = {1}
    cluster.run_until(lambda: cluster.leader in (2, 3), 3000)
    written = cluster.propose(cluster.leader or 0, b"new")
    cluster.deliver_all()
    assert cluster.is_committed(written)
    assert cluster.core(1).role is Role.LEADER, "it has not noticed yet"
    token = cluster.read(1)
    cluster.deliver_all()
    assert token not in cluster.reads
    cluster.heal()
    cluster.frozen.clear()
    cluster.run(500)
    assert cluster.rejected[token] is Rejection.NOT_LEADER


def test_a_read_that_waits_for_a_voter_is_answered_when_that_voter_is_removed() -> None:
    cluster = led(2)
    cluster.crash(2)
    token = cluster.read(1)
    cluster.deliver_all()
    assert token not in cluster.reads, "one of two voters is no majority"
    assert cluster.change(1, remove=2) in cluster.accepted
    cluster.deliver_all()
    assert token in cluster.reads


def test_a_follower_refuses_a_read() -> None:
    cluster = led()
    assert cluster.rejected[cluster.read(2)] is Rejection.NOT_LEADER


def test_reads_that_come_together_share_one_round() -> None:
    cluster = led()
    core = cluster.core(1)
    for token in (901, 902, 903):
        cluster.check.on_read_asked(token)
        core.step(ReadIndex(token), cluster.now_ms)
    cluster.tick(1)
    assert len([e for e in cluster.network if isinstance(e.message, AppendRequest)]) == 2
    cluster.deliver_all()
    assert {cluster.reads[token] for token in (901, 902, 903)} == {1}


def test_a_single_voter_answers_at_once() -> None:
    cluster = Cluster(1)
    cluster.elect(1)
    cluster.propose(1, b"x")
    assert cluster.reads[cluster.read(1)] == 2


def test_a_lost_round_is_repeated_by_heartbeats() -> None:
    cluster = led()
    token = cluster.read(1)
    assert cluster.take(lambda e: isinstance(e.message, AppendRequest | AppendResponse))
    cluster.run(300)
    assert cluster.reads[token] == 1


def test_a_read_is_confirmed_by_voters_only() -> None:
    cluster = Cluster(3, others=(4,))
    cluster.elect(1)
    cluster.run(200)
    cluster.slow_disks = {4}
    cluster.change(1, add=member(4))
    cluster.run(100)
    cluster.cut(1, 2, 3)
    token = cluster.read(1)
    cluster.deliver_all()
    assert token not in cluster.reads, "a learner and the leader are no majority"


def test_a_rejection_confirms_leadership_as_well_as_an_ack_does() -> None:
    cluster = led()
    cluster.cut(1, 2)
    cluster.crash(3)
    for _ in range(3):
        cluster.propose(1, b"x")
    cluster.network.clear()
    cluster.start(3)
    token = cluster.read(1)
    cluster.deliver_all(lambda e: isinstance(e.message, AppendRequest) and not e.message.entries)
    answers = [e.message for e in cluster.network if isinstance(e.message, AppendResponse)]
    assert [answer.rejected for answer in answers] == [True]
    cluster.deliver_all()
    assert cluster.reads[token] == 1
