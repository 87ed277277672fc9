"""The driver: proposals, reads and what members do when something fails."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.raft.members import SMALL_SNAPSHOTS, A, B, C, D, Group, describe, error_of, explain_missing_leader, member

from tidelog.model.errors import (
    NotLeaderError,
    OverloadedError,
    RaftStoppedError,
    RecordTooLargeError,
    UnknownOutcomeError,
)
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import Role
from tidelog.raft.status import RaftStatus
from tidelog.raft.storage import METADATA_LOG_PATH
from tidelog.world.simulated import Loss

pytestmark = pytest.mark.sim


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(seed=11).running() as found:
        yield found


# Proposals.


def test_proposals_are_applied_everywhere_in_one_order(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    offsets = group.propose(leader, b"a", b"b", b"c")
    assert offsets == [1, 2, 3], "offset 0 is the no-op of the epoch"
    assert group.members[leader].values.values == [b"a", b"b", b"c"], "answered when applied"
    group.until_equal([b"a", b"b", b"c"])


def test_a_group_of_one_commits_alone() -> None:
    group = Group(seed=2, voters=[A])
    with group.world:
        group.start(A)
        assert group.leader() == A
        group.propose(A, b"a")
        group.until_equal([b"a"])


def test_who_does_not_lead_says_who_does(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    follower = next(node for node in (A, B, C) if node != leader)
    error = group.on(follower, lambda driver: error_of(driver.propose(b"b")))
    assert isinstance(error, NotLeaderError)
    assert error.leader == leader
    assert error.retriable
    error = group.on(follower, lambda driver: error_of(driver.read_index()))
    assert isinstance(error, NotLeaderError)


def test_proposals_that_wait_together_share_a_sync(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"first")
    before = group.members[leader].driver.metrics.persist_rounds

    async def many(driver: RaftDriver) -> int:
        await asyncio.gather(*(driver.propose(b"%d" % number) for number in range(256)))
        return driver.metrics.persist_rounds

    assert group.on(leader, many) - before <= 256 / 16
    assert group.members[leader].values.values[1:] == [b"%d" % number for number in range(256)]


def test_too_many_proposals_are_refused_and_not_queued() -> None:
    group = Group(seed=3, config=DriverConfig(waiting_max=10))
    with group.world:
        group.start(A, B, C)
        leader = group.leader()

        async def flood(driver: RaftDriver) -> list[Any]:
            return await asyncio.gather(*(driver.propose(b"x") for _ in range(15)), return_exceptions=True)

        answers = group.on(leader, flood)
        assert sum(isinstance(answer, OverloadedError) for answer in answers) == 5
        assert sum(isinstance(answer, int) for answer in answers) == 10


def test_a_proposal_over_the_limit_is_refused(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    large = bytes(group.config.entry_bytes_max + 1)
    assert isinstance(group.on(leader, lambda driver: error_of(driver.propose(large))), RecordTooLargeError)
    group.propose(leader, large[:-1])
    group.until_equal([large[:-1]])


def test_a_proposal_of_a_leader_that_is_cut_off_has_an_unknown_outcome(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    others = [node for node in (A, B, C) if node != leader]
    for other in others:
        group.network.block(leader, other)
        group.network.block(other, leader)
    error = group.on(leader, lambda driver: error_of(driver.propose(b"lost")))
    assert isinstance(error, UnknownOutcomeError)
    successor = group.leader(among=others)
    group.propose(successor, b"b")
    group.network.heal()
    group.until_equal([b"a", b"b"])


def test_a_read_index_covers_what_was_answered_before(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    (offset,) = group.propose(leader, b"a")

    async def read(driver: RaftDriver) -> Offset:
        found = await driver.read_index()
        await driver.wait_applied(found)
        return found

    assert group.on(leader, read) > offset


@pytest.mark.case("R6")
def test_a_leader_that_is_cut_off_does_not_answer_reads(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    others = [node for node in (A, B, C) if node != leader]
    for other in others:
        group.network.block(leader, other)
        group.network.block(other, leader)
    error = group.on(leader, lambda driver: error_of(driver.read_index()))
    assert isinstance(error, NotLeaderError)
    assert group.members[leader].driver.core.role is not Role.LEADER


# Failure.


def test_a_killed_leader_is_replaced_at_once_because_its_streams_break(group: Group) -> None:
    group.network.silent_death_probability = 0.0
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    began = group.world.scheduler.now_ns
    group.kill(leader)
    group.leader(timeout=0.49)
    passed_s = (group.world.scheduler.now_ns - began) / 1e9
    assert passed_s < 0.49, "no election timeout was waited for"


@pytest.mark.requirement("a:B-62", "a:B-63")
def test_a_standby_takes_over_with_the_state_that_it_has(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a", b"b")
    group.until_equal([b"a", b"b"])
    standby = {node: one.values for node, one in group.members.items() if node != leader}
    group.kill(leader)
    successor = group.leader()
    assert standby[successor].values == [b"a", b"b"], "it had applied everything before it led"
    assert standby[successor].loaded == [], "nothing was loaded again"
    group.propose(successor, b"c")


@pytest.mark.requirement("a:B-70", "b:EX-02")
@pytest.mark.parametrize("voters", [(A, B, C), (A, B, C, D, NodeId(5))])
def test_a_minority_may_be_down_and_a_majority_may_not(voters: tuple[NodeId, ...]) -> None:
    group = Group(seed=3, voters=voters)
    with group.world:
        group.start(*voters)
        group.propose(group.leader(), b"all")
        assert sum(one.driver.core.role is Role.LEADER for one in group.members.values()) == 1
        for _ in range(len(voters) // 2):
            group.kill(next(node for node in voters if node in group.members))
        group.propose(group.leader(), b"a majority")
        leader = group.leader()
        group.kill(next(node for node in voters if node in group.members and node != leader))
        error = group.on(leader, lambda driver: error_of(driver.propose(b"a minority")))
        assert isinstance(error, UnknownOutcomeError), "it resigned: nothing commits without a majority"
        group.world.run_for(5)
        assert all(one.values.values == [b"all", b"a majority"] for one in group.members.values())


@pytest.mark.requirement("b:E-34", "b:O-06")
def test_a_member_describes_itself_and_the_leader_describes_the_others(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.until_equal([b"a"])
    group.world.run_for(1)
    reports: dict[NodeId, RaftStatus] = {node: group.on(node, describe) for node in (A, B, C)}
    assert [report.role is Role.LEADER for node, report in reports.items()] == [node == leader for node in reports]
    assert {(report.leader, report.commit, report.log_end) for report in reports.values()} == {(leader, 2, 2)}
    others = [member for member in reports[leader].members if member.node != leader]
    assert [(member.is_connected, member.lag, member.counts) for member in others] == [(True, 0, True)] * 2
    assert [member.stuck_ms for member in reports[leader].members] == [0, 0, 0], "they have all that is committed"
    metrics = group.members[leader].driver.metrics
    assert (metrics.proposals, metrics.proposals_committed) == (1, 1)
    assert metrics.messages_received > 0 < metrics.messages_sent


def test_metrics_count_elections_and_the_time_without_a_leader(group: Group) -> None:
    group.start(A, B, C)
    first = group.leader()
    group.propose(first, b"a")
    group.until_equal([b"a"])
    assert group.members[first].driver.metrics.elections >= 1
    group.kill(first)
    others = [node for node in (A, B, C) if node != first]
    second = group.leader(among=others)
    assert group.members[second].driver.metrics.elections >= 1

    async def without_leader_ms(driver: RaftDriver) -> int:
        return driver.without_leader_total_ms()

    group.world.run_for(1)
    had = {node: group.on(node, without_leader_ms) for node in others}
    changes = {node: group.members[node].driver.metrics.leader_changes for node in others}
    assert all(count >= 2 for count in changes.values()), changes
    group.world.run_for(5)
    assert {node: group.on(node, without_leader_ms) for node in others} == had, "a leader is there"
    group.kill(next(node for node in others if node != second))
    group.world.run_for(10)
    lasts = group.on(second, without_leader_ms) - had[second]
    assert 5_000 < lasts < 11_000, "an outage counts while it lasts"


@pytest.mark.requirement("b:E-04")
def test_after_an_outage_of_the_quorum_leadership_is_handed_over_as_ever(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"before")
    for node in (A, B, C):
        if node != leader:
            group.kill(node)
    group.world.run_for(10)
    group.start(*(node for node in (A, B, C) if node not in group.members))
    leader = group.leader()
    group.propose(leader, b"after")
    assert group.on(leader, lambda driver: driver.step_down(timeout_ms=5000)) is True
    successor = group.leader(among=[node for node in (A, B, C) if node != leader])
    group.propose(successor, b"handed over")
    group.until_equal([b"before", b"after", b"handed over"])


def test_members_come_back_with_all_that_was_answered(group: Group) -> None:
    group.start(A, B, C)
    wanted = [b"%d" % number for number in range(30)]
    for number in range(0, 30, 10):
        leader = group.leader()
        group.propose(leader, *wanted[number : number + 10])
        for node in (A, B, C):
            group.members.pop(node)
            group.world.machine(f"m{node}").lose_power(Loss.SOME)
        group.start(A, B, C)
    group.leader()
    group.until_equal(wanted)


@pytest.mark.case("R12")
def test_a_leader_with_a_stalled_disk_gives_up_its_leadership(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.world.machine(f"m{leader}").disk().begin_stall()
    group.world.machine(f"m{leader}").store().begin_stall()
    others = [node for node in (A, B, C) if node != leader]
    proposal = group.members[leader].node.spawn(error_of(group.members[leader].driver.propose(b"b")))
    successor = group.leader(among=others, timeout=10)
    assert successor != leader
    group.propose(successor, b"c")
    group.world.machine(f"m{leader}").heal()
    group.world.run_until(lambda: proposal.done() and group.members[leader].driver.core.leader == successor, timeout=10)
    values = group.members[successor].values.values
    assert values[0] == b"a"
    assert values[-1] == b"c"
    group.until_equal(values)


def test_a_failed_sync_stops_the_member_and_the_others_go_on(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    group.world.machine(f"m{leader}").disk().fail("sync")
    error = group.on(leader, lambda driver: error_of(driver.propose(b"b")))
    assert isinstance(error, UnknownOutcomeError | RaftStoppedError)
    group.world.run_until(lambda: group.members[leader].failure is not None, timeout=5)
    error = group.on(leader, lambda driver: error_of(driver.propose(b"c")))
    assert isinstance(error, RaftStoppedError)
    others = [node for node in (A, B, C) if node != leader]
    successor = group.leader(among=others)
    group.propose(successor, b"d")
    assert group.members[successor].values.values[-1] == b"d"


def test_closing_answers_everybody_who_waits(group: Group) -> None:
    group.start(A, B)
    leader = group.leader()
    other = B if leader == A else A
    group.kill(other)

    async def job(driver: RaftDriver) -> list[Any]:
        waiting = [
            asyncio.ensure_future(error_of(driver.propose(b"a"))),
            asyncio.ensure_future(error_of(driver.wait_applied(Offset(1000)))),
            asyncio.ensure_future(error_of(driver.wait_for_role_change())),
        ]
        await asyncio.sleep(0.01)
        await driver.close()
        return await asyncio.gather(*waiting)

    answers = group.on(leader, job)
    assert isinstance(answers[0], RaftStoppedError | UnknownOutcomeError)
    assert isinstance(answers[1], RaftStoppedError)


def test_a_leader_that_stops_does_not_know_whether_the_voter_that_it_adds_will_vote(group: Group) -> None:
    group.start(A, B)
    leader = group.leader()
    group.propose(leader, b"a")

    async def job(driver: RaftDriver) -> Any:
        adding = asyncio.ensure_future(error_of(driver.change_membership(add=member(D))))
        await asyncio.sleep(0.1)
        assert driver.core.log.membership.learner(D) is not None, "the next leader may promote it"
        await driver.close()
        return await adding

    assert isinstance(group.on(leader, job), UnknownOutcomeError)


def test_leadership_is_handed_over_before_an_orderly_stop(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    group.propose(leader, b"a")
    assert group.on(leader, lambda driver: driver.step_down(timeout_ms=2_000)) is True
    successor = group.leader(among=[node for node in (A, B, C) if node != leader])
    group.propose(successor, b"b")
    group.until_equal([b"a", b"b"])


def test_a_leader_that_nobody_can_relieve_says_so(group: Group) -> None:
    group.start(A, B, C)
    leader = group.leader()
    others = [node for node in (A, B, C) if node != leader]
    group.propose(leader, b"a")
    for other in others:
        group.world.machine(f"m{other}").disk().begin_stall()
        group.world.machine(f"m{other}").store().begin_stall()

    async def step_down(driver: RaftDriver) -> tuple[bool, bool]:
        waiting = asyncio.ensure_future(error_of(driver.propose(b"nobody has it")))
        await asyncio.sleep(0.01)
        gave_up = await driver.step_down(timeout_ms=600)
        waiting.cancel()
        return gave_up, driver.core.role is Role.LEADER

    gave_up, still_leads = group.on(leader, step_down)
    assert gave_up is not still_leads


def test_a_member_alone_says_whom_it_waits_for(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    group.start(A)
    group.world.run_for(5)
    text = group.on(A, explain_missing_leader)
    assert "waits for 1 more of 3 voters (2 are needed)" in text
    assert "node 2 at host2:9192" in text
    assert "node 3 at host3:9192" in text
    assert any("node 2 at host2:9192" in record.getMessage() for record in caplog.records), "it is in the log"


def test_of_two_voters_a_recovering_one_and_the_other_say_that_they_wait_for_an_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Group(seed=12, voters=[A, B])
    with group.world:
        group.start(A, B)
        group.propose(group.leader(), b"a", b"b")
        group.until_equal([b"a", b"b"])
        group.kill(A)
        group.kill(B)
        group.world.machine(f"m{B}").disk().cut(f"{METADATA_LOG_PATH}/{0:020d}.log", 0)
        group.start(A, B)
        group.world.run_for(30)
        assert all(one.driver.core.leader is None for one in group.members.values()), "nobody can have two votes"
        assert group.on(B, describe).recovering_until == 3
        recovering, sound = group.on(B, explain_missing_leader), group.on(A, explain_missing_leader)
        assert "node 1 cannot be elected without the vote of this node (2 of 2 are needed)" in recovering
        assert "docs/operations.md" in recovering
        assert "votes are refused by node 2" in sound
        assert "an election is under way" not in sound, "nobody can win it"
        assert any("an operator has to decide" in record.getMessage() for record in caplog.records), "it is in the log"


def test_a_recovering_voter_of_three_is_restored_without_an_operator() -> None:
    group = Group(seed=13)
    with group.world:
        group.start(A, B, C)
        group.propose(group.leader(), b"a", b"b")
        group.until_equal([b"a", b"b"])
        for node in (A, B, C):
            group.kill(node)
        group.world.machine(f"m{B}").disk().cut(f"{METADATA_LOG_PATH}/{0:020d}.log", 0)
        group.start(A, B, C)
        group.until_equal([b"a", b"b"])
        group.world.run_until(lambda: group.members[B].driver.core.recovering_until is None, timeout=10)
        assert group.on(group.leader(), describe).rejecting_voters == (), (
            "what was rejected before there was a leader is past"
        )


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> str:
        group = Group(seed=21, config=SMALL_SNAPSHOTS)
        with group.world:
            group.start(A, B, C)
            leader = group.leader()
            group.propose(leader, *(b"%050d" % number for number in range(60)))
            group.kill(leader)
            group.propose(group.leader(), b"last")
            return group.world.digest

    assert run() == run()
