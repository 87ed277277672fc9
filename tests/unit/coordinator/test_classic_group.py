"""Classic groups: rounds of join and sync, who leads, who is out, what a new coordinator finds."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups.classic_group import Rounds
from support.groups.machine import Groups, Topics

from tidelog.coordinator.classic_group import ClassicGroup, ClassicState
from tidelog.coordinator.classic_requests import GroupMigratedError
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import describe_group, summary_of
from tidelog.coordinator.migration import check_kind
from tidelog.coordinator.requests import ExpireOffsets, GroupSummary, RemoveMembers
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    CoordinatorNotAvailableError,
    FencedInstanceIdError,
    GroupFullError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    MemberIdRequiredError,
    NotCoordinatorError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)


@pytest.mark.requirement("b:H-08", "a:F-06")
def test_the_first_to_join_leads_and_alone_sees_who_takes_part() -> None:
    rounds = Rounds()
    first, second = rounds.join(name="one", metadata=b"1"), rounds.join(name="two", metadata=b"2")
    rounds.wait(2_999)
    assert rounds.answers == {}, "an empty group waits a little for more"
    rounds.wait(3_000)
    leader, follower = rounds.joined(first), rounds.joined(second)
    assert leader.leader == follower.leader == "one"
    assert [(each.member_id, each.metadata) for each in leader.members] == [("one", b"1"), ("two", b"2")]
    assert follower.members == ()
    assert leader.generation == follower.generation == 1
    assert leader.protocol == "range"


@pytest.mark.requirement("b:H-08")
def test_each_member_gets_its_own_assignment_and_not_before_it_is_stored() -> None:
    rounds = Rounds()
    rounds.join(name="one")
    rounds.join(name="two")
    rounds.wait(6_000)
    rounds.holds_stores = True
    two = rounds.sync("two")
    one = rounds.sync("one", dealt={"one": b"A", "two": b"B"})
    assert two not in rounds.answers
    assert one not in rounds.answers
    rounds.store()
    assert (rounds.synced(one).assignment, rounds.synced(two).assignment) == (b"A", b"B")
    assert rounds.group.state is ClassicState.STABLE
    late = rounds.sync("two")
    assert rounds.synced(late).assignment == b"B"
    assert rounds.beat("one") is None
    assert summary_of("g", rounds.groups.group()) == GroupSummary("g", "classic", "stable", 2, "consumer")
    assert [member.member_id for member in describe_group(rounds.groups.state, "g").members] == ["one", "two"]


def test_more_members_make_the_first_round_longer_but_not_endless() -> None:
    rounds = Rounds()
    first = rounds.join(name="m0", rebalance_timeout_ms=8_000)
    for number in range(1, 10):
        rounds.wait(2_000)
        if first in rounds.answers:
            break
        rounds.join(name=f"m{number}", rebalance_timeout_ms=8_000)
    assert number == 4
    assert len(rounds.joined(first).members) == 4


@pytest.mark.requirement("a:F-04")
def test_a_new_member_makes_everybody_join_again() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    third = rounds.join(name="three")
    assert isinstance(rounds.beat("one"), RebalanceInProgressError)
    assert isinstance(rounds.answers[rounds.sync("two")], RebalanceInProgressError)
    rounds.group.check_commit("one", 1, rounds.now_ms)
    one = rounds.join("one")
    assert third not in rounds.answers
    two = rounds.join("two")
    assert rounds.joined(one).generation == rounds.joined(two).generation == rounds.joined(third).generation == 2
    assert rounds.joined(third).leader == "one", "who led leads on"
    with pytest.raises(IllegalGenerationError):
        rounds.group.check_commit("one", 1, rounds.now_ms)
    with pytest.raises(RebalanceInProgressError):
        rounds.group.check_commit("one", 2, rounds.now_ms)
    rounds.deal("one", "two", "three")
    rounds.group.check_commit("three", 2, rounds.now_ms)


def test_who_does_not_join_again_in_time_is_out() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    third = rounds.join(name="three")
    for _ in range(12):
        rounds.wait(5_000)
        rounds.beat("one")
        rounds.beat("two")
    rounds.wait(5_000)
    reply = rounds.joined(third)
    assert (reply.leader, len(reply.members)) == ("three", 1)
    assert isinstance(rounds.beat("one"), UnknownMemberIdError)


@pytest.mark.requirement("a:F-07", "b:H-06")
def test_a_member_without_heartbeats_is_out_after_its_session() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    rounds.wait(9_000)
    assert rounds.beat("one") is None
    rounds.wait(1_500)
    assert isinstance(rounds.beat("one"), RebalanceInProgressError)
    alone = rounds.join("one")
    assert len(rounds.joined(alone).members) == 1
    assert isinstance(rounds.beat("two"), UnknownMemberIdError)


@pytest.mark.requirement("a:F-07", "b:H-06")
def test_a_leave_starts_the_next_round_at_once() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    assert rounds.leave(("one", "")) == (None,)
    again = rounds.join("two")
    assert rounds.joined(again).leader == "two"
    rounds.deal("two")
    assert rounds.leave(("two", "")) == (None,)
    assert rounds.group.state is ClassicState.EMPTY
    stored = rounds.groups.group().classic
    assert stored is not None
    assert (stored.members, stored.empty_since_ms, stored.generation) == ((), rounds.now_ms, 3)
    (error,) = rounds.leave(("two", ""))
    assert isinstance(error, UnknownMemberIdError)


def test_who_waits_is_answered_when_it_is_taken_out() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    waiting = rounds.join("one")
    rounds.leave(("one", ""))
    assert isinstance(rounds.answers[waiting], UnknownMemberIdError)


def test_a_new_member_is_given_an_id_first() -> None:
    rounds = Rounds()
    asked = rounds.join(name="made-up", needs_known_id=True)
    error = rounds.answers[asked]
    assert isinstance(error, MemberIdRequiredError)
    assert error.member_id == "made-up"
    assert rounds.group.state is ClassicState.EMPTY
    known = rounds.join("made-up", needs_known_id=True)
    rounds.wait(3_000)
    assert rounds.joined(known).member_id == "made-up"
    assert isinstance(rounds.answers[rounds.join("never-made")], UnknownMemberIdError)
    rounds.join(name="forgotten", needs_known_id=True)
    rounds.wait(10_000)
    assert isinstance(rounds.answers[rounds.join("forgotten")], UnknownMemberIdError), "ids are kept for a session"


def test_a_round_waits_for_those_who_were_given_an_id() -> None:
    rounds = Rounds()
    rounds.stable("one")
    rounds.join(name="two", needs_known_id=True)
    again = rounds.join("one")
    assert again not in rounds.answers
    two = rounds.join("two")
    assert rounds.joined(again).generation == rounds.joined(two).generation
    rounds.deal("one", "two")
    rounds.join(name="three", needs_known_id=True)
    assert rounds.leave(("three", "")) == (None,)


def test_a_protocol_is_chosen_that_all_know_by_most_votes() -> None:
    rounds = Rounds()

    def join(name: str, *protocols: str) -> int:
        return rounds.join(name=name, protocols=tuple((each, each.encode()) for each in protocols))

    join("one", "sticky", "range", "old")
    join("two", "range", "sticky")
    ticket = join("three", "range", "sticky", "new")
    rounds.wait(10_000)
    assert rounds.joined(ticket).protocol == "range"
    refused = join("four", "new")
    assert isinstance(rounds.answers[refused], InconsistentGroupProtocolError)
    other = rounds.join(name="five", protocol_type="connect")
    assert isinstance(rounds.answers[other], InconsistentGroupProtocolError)
    nothing = rounds.join(name="six", protocols=())
    assert isinstance(rounds.answers[nothing], InconsistentGroupProtocolError)


def test_a_lost_answer_to_a_join_or_a_sync_is_given_again() -> None:
    rounds = Rounds()
    rounds.join(name="one")
    rounds.join(name="two")
    rounds.wait(6_000)
    again = rounds.join("two")
    assert rounds.joined(again).generation == 1, "nothing has changed: the same round"
    first = rounds.sync("two")
    second = rounds.sync("two")
    assert isinstance(rounds.answers[first], RebalanceInProgressError)
    rounds.sync("one", dealt={"two": b"B"})
    assert rounds.synced(second).assignment == b"B"
    follower = rounds.join("two")
    assert rounds.joined(follower).generation == 1
    changed = rounds.join("two", metadata=b"other topics")
    assert changed not in rounds.answers
    assert rounds.group.state is ClassicState.PREPARING


def test_the_leader_that_joins_again_asks_for_a_new_round() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    ticket = rounds.join("one")
    assert ticket not in rounds.answers
    assert isinstance(rounds.beat("two"), RebalanceInProgressError)


def test_a_leader_that_never_deals_is_out() -> None:
    rounds = Rounds()
    rounds.join(name="one")
    rounds.join(name="two")
    rounds.wait(6_000)
    follower = rounds.sync("two")
    for _ in range(13):
        rounds.wait(5_000)
        rounds.beat("one")
    assert isinstance(rounds.answers[follower], RebalanceInProgressError)
    again = rounds.join("two")
    assert rounds.joined(again).leader == "two"


def test_a_generation_that_cannot_be_stored_makes_a_new_round() -> None:
    rounds = Rounds()
    rounds.join(name="one")
    rounds.wait(3_000)
    rounds.holds_stores = True
    ticket = rounds.sync("one", dealt={"one": b"A"})
    rounds.store(NotCoordinatorError("not here"))
    assert isinstance(rounds.answers[ticket], NotCoordinatorError)
    assert rounds.group.state is ClassicState.PREPARING
    again = rounds.join("one")
    assert rounds.joined(again).generation == 2


def test_a_store_that_was_overtaken_answers_nobody() -> None:
    rounds = Rounds()
    rounds.join(name="one")
    rounds.join(name="two")
    rounds.wait(6_000)
    rounds.holds_stores = True
    ticket = rounds.sync("one", dealt={"one": b"A"})
    rounds.leave(("two", ""))
    assert isinstance(rounds.answers[ticket], RebalanceInProgressError)
    rounds.store()
    assert rounds.group.state is ClassicState.PREPARING
    again = rounds.join("one")
    assert rounds.joined(again).generation == 2


# ---- Static members


@pytest.mark.requirement("a:F-08")
def test_a_static_member_that_comes_back_changes_nothing_for_the_others() -> None:
    rounds = Rounds()
    rounds.join(name="one", instance_id="i1")
    rounds.join(name="two", instance_id="i2")
    rounds.wait(6_000)
    rounds.deal("one", "two")
    back = rounds.join(name="two-again", instance_id="i2")
    reply = rounds.joined(back)
    assert (reply.generation, reply.leader, reply.skip_assignment) == (1, "one", False)
    assert rounds.synced(rounds.sync("two-again", instance_id="i2")).assignment == b"two"
    assert rounds.beat("one") is None
    assert isinstance(rounds.beat("two", instance_id="i2"), FencedInstanceIdError)
    stored = rounds.groups.group().classic
    assert stored is not None
    assert [member.member_id for member in stored.members] == ["one", "two-again"]
    leader = rounds.joined(rounds.join(name="one-again", instance_id="i1"))
    assert (leader.leader, leader.skip_assignment) == ("one-again", True)
    assert len(leader.members) == 2


def test_a_static_member_with_other_wishes_makes_a_round() -> None:
    rounds = Rounds()
    rounds.join(name="one", instance_id="i1")
    rounds.wait(3_000)
    rounds.deal("one")
    back = rounds.join(name="again", instance_id="i1", metadata=b"other")
    assert rounds.joined(back).generation == 2


def test_a_static_member_is_out_by_its_session_alone() -> None:
    rounds = Rounds()
    rounds.join(name="one", instance_id="i1", session_timeout_ms=100_000)
    rounds.join(name="two", session_timeout_ms=100_000)
    rounds.wait(6_000)
    rounds.deal("one", "two")
    third = rounds.join(name="three", session_timeout_ms=100_000)
    rounds.wait(60_000)
    reply = rounds.joined(third)
    assert reply.leader == "three"
    assert {member.member_id for member in reply.members} == {"one", "three"}, "the dynamic one is out"


def test_a_waiting_request_of_the_former_one_is_fenced() -> None:
    rounds = Rounds()
    waiting = rounds.join(name="one", instance_id="i1")
    taken = rounds.join(name="again", instance_id="i1")
    assert isinstance(rounds.answers[waiting], FencedInstanceIdError)
    rounds.wait(3_000)
    assert rounds.joined(taken).member_id == "again"
    assert isinstance(rounds.answers[rounds.join("one", instance_id="i1")], FencedInstanceIdError)
    errors = rounds.leave(("one", "i1"), ("", "i9"), ("", "i1"))
    assert isinstance(errors[0], FencedInstanceIdError)
    assert isinstance(errors[1], UnknownMemberIdError)
    assert errors[2] is None


# ---- Coordinators come and go


@pytest.mark.case("C6")
def test_a_new_coordinator_takes_the_last_generation_as_stable() -> None:
    rounds = Rounds()
    rounds.stable("one", "two")
    rounds.groups.state = rounds.groups.replayed()
    after = Rounds(rounds.groups)
    assert after.group.state is ClassicState.STABLE
    assert after.group.leader == "one"
    assert after.beat("two", 1) is None
    assert after.synced(after.sync("two", 1)).assignment == b"two"
    assert after.joined(after.join("two")).generation == 1, "it is what it was"
    after.wait(11_000)
    assert after.group.members == {}, "nobody has come within a session"
    assert after.groups.group().epoch == 2


def test_offsets_do_not_expire_while_a_group_restarts() -> None:
    groups = Groups(view=Topics.of(t=1))
    groups.commit({groups.view.part("t", 0): 5})
    rounds = Rounds(groups)
    week_ms = 7 * 24 * 3_600_000
    rounds.now_ms = groups.now_ms + 2 * week_ms
    rounds.join(name="one")
    groups.submit(ExpireOffsets(now_ms=rounds.now_ms + 1_000, retention_ms=week_ms))
    assert len(groups.group().offsets) == 1


def test_an_overtaken_coordinator_tells_everybody() -> None:
    rounds = Rounds()
    join = rounds.join(name="one")
    rounds.take(rounds.group.close(NotCoordinatorError("moved")))
    assert isinstance(rounds.answers[join], NotCoordinatorError)
    assert rounds.group.deadline_ms is None
    assert isinstance(rounds.answers[rounds.join(name="two")], CoordinatorNotAvailableError)
    assert isinstance(rounds.beat("one", 0), CoordinatorNotAvailableError)


# ---- One kind at a time


def test_a_group_that_must_not_be_converted_has_one_kind_at_a_time_and_its_offsets_are_the_same() -> None:
    groups = Groups(view=Topics.of(t=2), limits=GroupLimits(migration_policy="disabled"))
    part = groups.view.part("t", 0)
    groups.commit({part: 7})
    rounds = Rounds(groups)
    rounds.stable("one")
    with pytest.raises(InconsistentGroupProtocolError, match="classic"):
        groups.join("a", "t")
    with pytest.raises(GroupMigratedError):
        groups.submit(RemoveMembers(group="g", view=groups.view, now_ms=1))
    rounds.leave(("one", ""))
    generation = groups.group().epoch
    reply = groups.join("a", "t")
    assert reply.member_epoch == generation + 1
    assert groups.group().kind == "consumer"
    with pytest.raises(GroupMigratedError, match="consumer"):
        check_kind(groups.state, "g")
    groups.heartbeat("a", -1)
    check_kind(groups.state, "g")
    back = Rounds(groups)
    back.stable("two")
    assert back.group.generation == generation + 3
    assert groups.group().kind == "classic"
    assert groups.group().offsets[part].offset == 7
    assert groups.replayed() == groups.state == groups.compacted()


def test_rounds_that_a_consumer_member_has_overtaken_are_over() -> None:
    groups = Groups(view=Topics.of(t=2))
    rounds = Rounds(groups)
    rounds.join(name="one")
    rounds.wait(3_000)
    groups.join("a", "t")
    ticket = rounds.sync("one", dealt={"one": b"A"})
    assert isinstance(rounds.answers[ticket], GroupMigratedError)
    assert rounds.group.state is ClassicState.DEAD


def test_an_older_generation_is_not_stored_over_a_newer_one() -> None:
    rounds = Rounds()
    rounds.holds_stores = True
    rounds.join(name="one")
    rounds.wait(3_000)
    rounds.store()
    rounds.sync("one", dealt={"one": b"A"})
    old = rounds.stores[0]
    rounds.store()
    rounds.leave(("one", ""))
    rounds.store()
    with pytest.raises(IllegalGenerationError):
        rounds.groups.submit(old)


# ---- Refusals


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"session_timeout_ms": 5_999}, InvalidSessionTimeoutError),
        ({"session_timeout_ms": 1_800_001}, InvalidSessionTimeoutError),
        ({"protocols": (("range", b"x" * (257 << 10)),)}, InvalidRequestError),
        ({"protocol_type": ""}, InconsistentGroupProtocolError),
    ],
)
def test_joins_that_make_no_sense_are_refused(fields: dict[str, Any], error: type[TidelogError]) -> None:
    rounds = Rounds()
    assert isinstance(rounds.answers[rounds.join(**fields)], error)
    assert rounds.group.state is ClassicState.EMPTY


def test_a_classic_group_has_a_size() -> None:
    rounds = Rounds(members_max=2)
    rounds.join(name="one")
    rounds.join(name="two", needs_known_id=True)
    assert isinstance(rounds.answers[rounds.join(name="three")], GroupFullError)
    rounds.join("two")
    rounds.wait(6_000)
    assert len(rounds.group.members) == 2


def test_syncs_and_heartbeats_of_others_are_refused() -> None:
    rounds = Rounds()
    assert isinstance(rounds.beat("nobody", 0), UnknownMemberIdError)
    rounds.stable("one")
    assert isinstance(rounds.answers[rounds.sync("one", 7)], IllegalGenerationError)
    assert isinstance(rounds.beat("one", 7), IllegalGenerationError)
    assert isinstance(rounds.answers[rounds.sync("two")], UnknownMemberIdError)
    wrong = rounds.sync("one", protocol="sticky")
    assert isinstance(rounds.answers[wrong], InconsistentGroupProtocolError)
    wrong = rounds.sync("one", protocol_type="connect")
    assert isinstance(rounds.answers[wrong], InconsistentGroupProtocolError)
    large = rounds.sync("one", dealt={"one": b"x" * (2 << 20)})
    assert isinstance(rounds.answers[large], InvalidRequestError)
    with pytest.raises(UnknownMemberIdError):
        rounds.group.check_commit("two", 1, rounds.now_ms)


def test_an_empty_group_wants_no_ticks() -> None:
    assert ClassicGroup("g", GroupLimits(), stored=None, now_ms=0).deadline_ms is None


@pytest.mark.parametrize(
    "fields",
    [
        {"client_id": "c" * 1_025},
        {"instance_id": "i" * 1_025},
        {"protocol_type": "t" * 1_025},
        {"protocols": (("p" * 1_025, b""),)},
        {"protocols": tuple((f"p{number}", b"") for number in range(101))},
        {"rebalance_timeout_ms": -1},
    ],
)
def test_a_join_that_would_keep_too_much_is_refused(fields: dict[str, Any]) -> None:
    rounds = Rounds()
    ticket = rounds.join(**fields)
    assert isinstance(rounds.answers[ticket], InvalidRequestError)
    assert not rounds.group.members
    assert not rounds.group.pending


def test_generations_go_on_from_the_epoch_that_the_group_has_had_meanwhile() -> None:
    rounds = Rounds()
    rounds.join(needs_known_id=True)
    assert rounds.group.pending
    rounds.group.catch_up(50)
    assert rounds.group.generation == 50
    rounds.group.catch_up(3)
    assert rounds.group.generation == 50
