"""Consumer groups: joining, giving up first, taking over what is free, fencing, static members, topics that change."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups.machine import Groups, Member, Topics, run_until_stable, topic_id

from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import describe_group, members_to_notify, summary_of
from tidelog.coordinator.records import Kind
from tidelog.coordinator.requests import ExpireMember, GroupSummary, Heartbeat, RemoveMembers, TopicShape
from tidelog.coordinator.state import EMPTY
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupFullError,
    GroupIdNotFoundError,
    InvalidGroupIdError,
    InvalidPatternError,
    InvalidSessionTimeoutError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)
from tidelog.model.ids import Offset


def world(**sizes: int) -> Groups:
    return Groups(view=Topics.of(**(sizes or {"t": 6})))


# ---- Joining and moving


@pytest.mark.requirement("a:F-01", "b:H-01", "b:H-12")
def test_the_first_member_gets_everything_at_once() -> None:
    groups = world(t=4)
    reply = groups.join("a", "t")
    assert frozenset(reply.assignment or ()) == groups.view.all()
    assert reply.member_epoch == groups.group().epoch == 1
    assert not reply.is_revoking
    assert reply.session_timeout_ms == 45_000


@pytest.mark.requirement("a:F-02", "b:H-03")
def test_groups_are_independent_of_each_other() -> None:
    groups = world(t=4)
    one, two = Member(groups, "a", "t", group="one"), Member(groups, "a", "t", group="two")
    assert one.owned == two.owned == groups.view.all()


@pytest.mark.requirement("a:F-05", "b:H-05")
def test_a_second_member_waits_until_the_first_has_given_up() -> None:
    groups = world(t=4)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    assert b.owned == frozenset()
    reported = groups.heartbeat("a", a.epoch)
    assert reported.is_revoking
    assert reported.rebalance_timeout_ms == 300_000
    assert len(reported.assignment or ()) == 2
    assert b.report().assignment is None, "nothing is free yet"
    held = a.owned
    a.hear(reported)
    still = groups.heartbeat("a", a.epoch, owned=held)
    assert still.is_revoking, "it has said that it still holds them"
    assert b.report().assignment is None
    assert a.report().is_revoking is False
    b.beat()
    assert a.owned | b.owned == groups.view.all()
    assert len(a.owned) == len(b.owned) == 2
    assert run_until_stable([a, b]) == 0


@pytest.mark.requirement("a:F-05")
def test_what_does_not_move_is_never_revoked() -> None:
    groups = world(t=12)
    members = [Member(groups, "m0", "t")]
    for number in range(1, 4):
        members.append(Member(groups, f"m{number}", "t"))
        run_until_stable(members)
    assert sorted(len(member.owned) for member in members) == [3, 3, 3, 3]
    assert sum(len(member.lost) for member in members) == 6 + 4 + 3, "only what the new ones got"


def test_a_heartbeat_that_changes_nothing_writes_nothing() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    run_until_stable([a, b])
    for fields in ({}, {"owned": a.owned}, {"topics": ("t",)}, {"session_timeout_ms": 45_000}):
        reply = a.beat(**fields)
        assert groups.last == ()
        assert reply.assignment is None


def test_a_change_leaves_members_alone_whose_part_is_the_same() -> None:
    groups = world(x=4, y=4)
    x, y = Member(groups, "x", "x"), Member(groups, "y", "y")
    run_until_stable([x, y])
    epoch = x.epoch
    other = Member(groups, "z", "y")
    run_until_stable([x, y, other])
    assert x.epoch == epoch
    assert groups.group().epoch > epoch


@pytest.mark.requirement("a:F-03", "b:H-04", "a:F-07", "b:H-06")
def test_a_clean_leave_frees_its_partitions_at_once() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    run_until_stable([a, b])
    before, lost = groups.state, list(a.lost)
    reply = groups.heartbeat("b", -1)
    assert (reply.member_epoch, reply.assignment) == (-1, None)
    assert members_to_notify(before, groups.state, "g") == ("a",)
    a.beat()
    assert a.owned == groups.view.all()
    assert a.lost == lost, "of what it had nothing moved"


@pytest.mark.requirement("a:F-07", "b:H-06")
def test_a_member_whose_time_is_over_is_put_out_unless_it_has_moved_on() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    run_until_stable([a, b])
    groups.expire("b", b.epoch - 1)
    assert groups.last == ()
    groups.expire("nobody", 1)
    groups.expire("b", 1, group="nothing")
    assert groups.last == ()
    groups.expire("b", b.epoch)
    a.beat()
    assert a.owned == groups.view.all()
    with pytest.raises(UnknownMemberIdError):
        b.beat()


def test_the_last_one_out_leaves_an_empty_group() -> None:
    groups = world()
    groups.join("a", "t")
    groups.heartbeat("a", -1)
    info = groups.group().info
    assert info is not None
    assert info.empty_since_ms == groups.now_ms
    assert summary_of("g", groups.group()) == GroupSummary("g", "consumer", "empty", 0, "consumer")
    groups.join("b", "t")
    info = groups.group().info
    assert info is not None
    assert (info.epoch, info.empty_since_ms) == (3, -1)


def test_news_names_who_can_go_on_and_nobody_else() -> None:
    groups = world(t=4)
    a = Member(groups, "a", "t")
    before = groups.state
    b = Member(groups, "b", "t")
    assert members_to_notify(before, groups.state, "g") == ("a",), "it has to give up"
    a.beat()
    assert members_to_notify(before, groups.state, "g") == (), "b waits for a"
    before = groups.state
    a.report()
    assert members_to_notify(before, groups.state, "g") == ("b",)
    assert members_to_notify(groups.state, groups.state, "g") == ()
    assert members_to_notify(EMPTY, groups.state, "other") == ()
    b.beat()
    assert members_to_notify(before, groups.state, "g") == ()


# ---- Answers that are lost, late, or cross


def test_a_lost_answer_is_returned_again_to_the_previous_epoch() -> None:
    groups = world(t=4)
    a = Member(groups, "a", "t")
    Member(groups, "b", "t")
    reported = groups.heartbeat("a", a.epoch)  # lost
    again = groups.heartbeat("a", a.epoch, owned=a.owned)
    assert groups.last == ()
    assert (again.member_epoch, again.assignment, again.is_revoking) == (
        reported.member_epoch,
        reported.assignment,
        True,
    )
    plain = groups.heartbeat("a", a.epoch)
    assert plain.assignment == reported.assignment


def test_a_report_that_crosses_a_revocation_gives_nothing_away() -> None:
    """It was sent before the member knew: it may take over, from an answer under way, what the report lacks."""
    groups = world(t=4)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    leaving = frozenset(groups.heartbeat("a", a.epoch).assignment or ())
    crossing = groups.heartbeat("a", a.epoch, owned=leaving)
    assert crossing.is_revoking
    assert b.report().assignment is None


def test_a_member_is_never_led_two_epochs_on() -> None:
    groups = world(t=6)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    reported = groups.heartbeat("a", a.epoch)
    c = Member(groups, "c", "t")
    again = groups.heartbeat("a", a.epoch)
    assert again.member_epoch == reported.member_epoch, "it has not shown that it knows the first"
    a.hear(again)
    further = a.report()
    assert further.member_epoch > reported.member_epoch
    run_until_stable([a, b, c])
    assert sorted(len(member.owned) for member in (a, b, c)) == [2, 2, 2]


def test_other_epochs_are_fenced() -> None:
    groups = world(t=6)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    run_until_stable([a, b])
    with pytest.raises(FencedMemberEpochError):
        groups.heartbeat("a", a.epoch + 1)
    current = groups.group().currents["a"]
    with pytest.raises(FencedMemberEpochError, match="its epoch is"):
        groups.heartbeat("a", current.previous_epoch, owned=groups.view.all())
    c = Member(groups, "c", "t")
    run_until_stable([a, b, c])
    with pytest.raises(FencedMemberEpochError):
        groups.heartbeat("a", current.previous_epoch)
    with pytest.raises(UnknownMemberIdError, match="join"):
        groups.heartbeat("x", 1)


def test_a_lost_join_is_joined_again_without_a_change() -> None:
    groups = world()
    first = groups.join("a", "t")
    again = groups.join("a", "t")
    assert groups.last == ()
    assert again == first


@pytest.mark.parametrize("owned", [None, "assigned"])
def test_a_fenced_member_that_joins_again_has_let_go_of_everything_with_its_next_heartbeat(owned: str | None) -> None:
    groups = world(t=4)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    groups.heartbeat("a", a.epoch)
    again = groups.join("a", "t")
    assert again.member_epoch > a.epoch
    assert len(again.assignment or ()) == 2
    assert groups.join("a", "t").member_epoch == again.member_epoch, "a lost answer is returned again"
    assert b.report().assignment is None, "a join may be late: its member may have joined again and own partitions"
    groups.heartbeat("a", again.member_epoch, is_on_behalf=True)
    assert b.report().assignment is None, "nobody has heard from the member"
    confirmed = groups.heartbeat(
        "a", again.member_epoch, owned=None if owned is None else frozenset(again.assignment or ())
    )
    assert not confirmed.is_revoking
    b.beat()
    assert len(b.owned) == 2


def test_a_late_join_frees_nothing_of_a_living_member() -> None:
    groups = world(t=4)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    owned = a.owned
    a.hear(groups.heartbeat("a", a.epoch))  # it has to revoke two of four, and has not done so
    groups.join("a", "t")  # of an earlier connection; nobody has the answer
    assert b.report().assignment is None
    for report in ({}, {"owned": owned}, {}):
        assert a.beat(**report).is_revoking
        assert b.report().assignment is None, "it still owns them"
    assert not a.report().is_revoking
    b.beat()
    assert len(a.owned) == len(b.owned) == 2


def test_what_is_wanted_back_before_it_was_given_up_stays() -> None:
    groups = world(t=4)
    a = Member(groups, "a", "t")
    b = Member(groups, "b", "t")
    reported = a.hear(groups.heartbeat("a", a.epoch))
    assert reported.is_revoking
    groups.heartbeat("b", -1)
    back = a.beat()
    assert not back.is_revoking
    assert frozenset(back.assignment or ()) == groups.view.all()
    assert b.owned == frozenset()


# ---- Subscriptions


@pytest.mark.requirement("a:F-03", "b:H-04")
def test_a_changed_subscription_assigns_again() -> None:
    groups = world(x=2, y=2)
    a = Member(groups, "a", "x")
    a.beat(topics=("x", "y"))
    assert a.owned == groups.view.all()
    a.beat(topics=("y",))
    a.report()
    assert a.owned == groups.view.all("y")
    assert set(groups.group().owners) == groups.view.all("y")


@pytest.mark.requirement("a:F-03", "b:H-04")
def test_added_partitions_and_topics_that_match_a_pattern_are_dealt() -> None:
    groups = world(orders=2)
    a = Member(groups, "a", pattern="ord.*")
    groups.refresh()
    assert groups.last == (), "nothing has changed"
    wider = Topics([TopicShape(topic_id(1), "orders", 5), TopicShape(topic_id(9), "ordinary", 1)])
    before = groups.state
    groups.refresh(Topics([*wider.shapes.values(), TopicShape(topic_id(7), "other", 3)]))
    assert members_to_notify(before, groups.state, "g") == ("a",)
    a.beat()
    assert a.owned == wider.all()
    assert a.lost == []
    groups.refresh(group="nothing")
    assert groups.last == ()


def test_a_topic_created_again_is_another_topic() -> None:
    groups = world(x=2)
    a = Member(groups, "a", "x")
    groups.refresh(Topics())
    a.beat()
    a.report()
    assert a.owned == frozenset()
    groups.refresh(Topics([TopicShape(topic_id(50), "x", 2)]))
    a.beat()
    assert {partition.topic_id for partition in a.owned} == {topic_id(50)}


def test_racks_matter_only_to_members_that_have_one() -> None:
    groups = Groups(view=Topics.of({"x": (frozenset("1"), frozenset("2"))}, x=2))
    a, b = Member(groups, "a", "x"), Member(groups, "b", "x")
    run_until_stable([a, b])
    turned = Topics.of({"x": (frozenset("2"), frozenset("1"))}, x=2)
    groups.refresh(turned)
    assert groups.last == ()
    a.beat(rack="2")
    epoch = groups.group().epoch
    groups.refresh(Topics.of({"x": (frozenset("3"), frozenset("1"))}, x=2))
    assert groups.group().epoch == epoch + 1


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "*a", "a**", r"(a)\1", "(?=a)", "a)", "x" * 1_025, "(a{40}){40}"])
def test_patterns_that_are_none_are_refused(pattern: str) -> None:
    groups = world()
    with pytest.raises(InvalidPatternError):
        groups.join("a", pattern=pattern)


def test_most_votes_choose_the_assignor() -> None:
    groups = world(x=3, y=3)
    a = Member(groups, "a", "x", "y", assignor="range")
    assert describe_group(groups.state, "g").assignor == "range"
    b = Member(groups, "b", "x", "y", assignor="roundrobin")
    c = Member(groups, "c", "x", "y", assignor="roundrobin")
    run_until_stable([a, b, c])
    assert describe_group(groups.state, "g").assignor == "roundrobin"
    epoch = groups.group().epoch
    c.beat(assignor="range")
    assert describe_group(groups.state, "g").assignor == "range"
    assert groups.group().epoch == epoch + 1
    with pytest.raises(UnsupportedAssignorError, match="uniform"):
        groups.join("d", "x", assignor="magic")


# ---- Static members


@pytest.mark.requirement("a:F-08")
def test_a_static_member_that_leaves_for_a_while_gets_the_same_partitions_back() -> None:
    groups = world()
    a, b = Member(groups, "a", "t", instance_id="one"), Member(groups, "b", "t", instance_id="two")
    run_until_stable([a, b])
    epoch = groups.group().epoch
    groups.heartbeat("b", -2, instance_id="two")
    groups.heartbeat("b", -2, instance_id="two")
    assert groups.last == ()
    assert a.beat().assignment is None, "nobody moves"
    back = groups.join("b2", "t", instance_id="two")
    assert frozenset(back.assignment or ()) == b.owned
    assert groups.group().epoch == epoch
    assert set(groups.group().members) == {"a", "b2"}
    with pytest.raises(FencedInstanceIdError):
        groups.heartbeat("b", b.epoch, instance_id="two")
    with pytest.raises(FencedInstanceIdError):
        groups.heartbeat("b", -1, instance_id="two")


@pytest.mark.requirement("a:F-08")
def test_a_second_member_under_a_living_instance_id_is_refused() -> None:
    groups = world()
    a = Member(groups, "a", "t", instance_id="one")
    with pytest.raises(UnreleasedInstanceIdError):
        groups.join("x", "t", instance_id="one")
    groups.expire("a", a.epoch)
    assert groups.join("x", "t", instance_id="one").assignment


def test_a_static_member_that_stays_away_is_put_out_by_its_session() -> None:
    groups = world()
    a, b = Member(groups, "a", "t", instance_id="one"), Member(groups, "b", "t")
    run_until_stable([a, b])
    groups.heartbeat("a", -2, instance_id="one")
    assert {name: each.epoch for name, each in groups.group().currents.items()} == {"a": -2, "b": b.epoch}
    groups.expire("a", -2)
    b.beat()
    assert b.owned == groups.view.all()


def test_what_a_new_target_takes_from_one_that_is_away_is_free_at_once() -> None:
    groups = world()
    a = Member(groups, "a", "t", instance_id="one")
    groups.heartbeat("a", -2, instance_id="one")
    b = Member(groups, "b", "t")
    assert len(b.owned) == 3
    back = groups.join("a2", "t", instance_id="one")
    assert len(back.assignment or ()) == 3
    assert not frozenset(back.assignment or ()) & b.owned
    assert a.owned > frozenset(back.assignment or ())


def test_a_static_member_may_come_back_under_its_old_id_or_with_other_wishes() -> None:
    groups = world(x=2, y=2)
    a = Member(groups, "a", "x", instance_id="one")
    groups.heartbeat("a", -2, instance_id="one")
    with pytest.raises(FencedMemberEpochError):
        groups.heartbeat("a", a.epoch, instance_id="one")
    again = groups.join("a", "x", instance_id="one")
    assert frozenset(again.assignment or ()) == groups.view.all("x")
    groups.heartbeat("a", -2, instance_id="one")
    other = groups.join("b", "y", instance_id="one")
    assert frozenset(other.assignment or ()) == groups.view.all("y")


def test_a_member_that_takes_a_place_leaves_its_own() -> None:
    groups = world()
    Member(groups, "a", "t", instance_id="one")
    b = Member(groups, "b", "t")
    groups.heartbeat("a", -2, instance_id="one")
    b.beat()
    both = groups.join("b", "t", instance_id="one")
    assert frozenset(both.assignment or ()) == groups.view.all()
    assert set(groups.group().members) == {"b"}


def test_a_static_leave_is_for_static_members() -> None:
    groups = world()
    groups.join("a", "t")
    with pytest.raises(InvalidRequestError, match="instance id"):
        groups.heartbeat("a", -2)
    with pytest.raises(UnknownMemberIdError):
        groups.heartbeat("a", 1, instance_id="other")


# ---- Limits and refusals


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"group": ""}, InvalidGroupIdError),
        ({"group": "g" * 1_025}, InvalidGroupIdError),
        ({"member_id": ""}, InvalidRequestError),
        ({"rack": "r" * 1_025}, InvalidRequestError),
        ({"member_epoch": -3}, InvalidRequestError),
        ({"owned": Topics.of(t=1).all()}, InvalidRequestError),
        ({"topics": tuple("t" * 1_000 + str(number) for number in range(600))}, InvalidRequestError),
        ({"session_timeout_ms": 5_999}, InvalidSessionTimeoutError),
        ({"session_timeout_ms": 1_800_001}, InvalidSessionTimeoutError),
        ({"rebalance_timeout_ms": -1}, InvalidRequestError),
        ({"member_epoch": 5}, UnknownMemberIdError),
        ({"member_epoch": -1}, UnknownMemberIdError),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], error: type[TidelogError]) -> None:
    groups = world()
    plain: dict[str, Any] = {"group": "g", "member_id": "a", "member_epoch": 0, "view": groups.view, "now_ms": 1}
    with pytest.raises(error):
        groups.machine.decide(EMPTY, Heartbeat(**(plain | fields)), offset=Offset(0))


def test_a_group_has_a_size() -> None:
    groups = Groups(view=Topics.of(t=2), limits=GroupLimits(members_max=2))
    groups.join("a", "t")
    groups.join("b", "t")
    with pytest.raises(GroupFullError):
        groups.join("c", "t")
    groups.join("b", "t")


def test_a_join_that_no_batch_could_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = world(t=500)
    monkeypatch.setattr("tidelog.coordinator.records.DECISION_BYTES_MAX", 300)
    with pytest.raises(GroupFullError, match="cannot take another member"):
        groups.join("a", "t", client_id="".join(chr(97 + number * number % 26) for number in range(1_000)))


def test_an_operator_takes_members_out() -> None:
    groups = world()
    members = [Member(groups, "a", "t"), Member(groups, "b", "t", instance_id="one"), Member(groups, "c", "t")]
    run_until_stable(members)

    def remove(**fields: Any) -> dict[str, TidelogError | None]:
        reply = groups.submit(RemoveMembers(group="g", view=groups.view, now_ms=1, **fields))
        assert isinstance(reply, dict)
        return reply

    reply = remove(member_ids=("a", "nobody"), instance_ids=("one", "none"))
    assert reply["a"] is None
    assert reply["one"] is None
    assert isinstance(reply["nobody"], UnknownMemberIdError)
    assert isinstance(reply["none"], UnknownMemberIdError)
    assert set(groups.group().members) == {"c"}
    assert remove() == {"c": None}
    assert groups.group().member_count == 0
    assert remove() == {}
    assert groups.last == ()
    with pytest.raises(GroupIdNotFoundError):
        groups.submit(RemoveMembers(group="none", view=groups.view, now_ms=1))


def test_a_group_is_described() -> None:
    groups = world(t=3)
    a = Member(groups, "a", "t", client_id="app", client_host="10.0.0.1", rack="r")
    b = Member(groups, "b", "t")
    assert describe_group(groups.state, "g").state == "reconciling"
    run_until_stable([a, b])
    details = describe_group(groups.state, "g")
    assert (details.kind, details.state, details.assignor) == ("consumer", "stable", "uniform")
    first = details.members[0]
    assert (first.client_id, first.client_host, first.rack, first.topics) == ("app", "10.0.0.1", "r", ("t",))
    assert frozenset(first.assignment) == frozenset(first.target) == a.owned
    assert summary_of("g", groups.group()) == GroupSummary("g", "consumer", "stable", 2, "consumer")
    with pytest.raises(GroupIdNotFoundError):
        describe_group(groups.state, "none")


def test_a_report_and_the_timer_that_waits_for_it_may_cross() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    reported = groups.heartbeat("a", a.epoch)
    assert reported.is_revoking
    assert reported.assignment is not None
    expiry = ExpireMember(
        group="g", member_id="a", member_epoch=reported.member_epoch, view=groups.view, now_ms=1, is_rebalance=True
    )
    before = groups.state
    groups.heartbeat("a", reported.member_epoch, owned=frozenset(reported.assignment))
    groups.submit(expiry)
    assert groups.last == ()
    assert "a" in groups.group().members
    groups.state = before
    groups.submit(expiry)
    assert "a" not in groups.group().members, "it has not given up in time"
    b.beat()
    assert b.owned == groups.view.all("t")


def test_it_is_kept_whether_a_member_has_a_stream() -> None:
    groups = world()
    groups.join("a", "t", is_streamed=True)
    epoch = groups.group().currents["a"].epoch
    assert groups.group().members["a"].is_streamed
    groups.heartbeat("a", epoch)
    assert groups.last == (), "in its name: as before"
    groups.heartbeat("a", epoch, is_streamed=False)
    kinds = [int(record.key.kind) for record in list(groups.records)[-len(groups.last) :]]
    assert kinds == [Kind.MEMBER], "nobody gets a new assignment"
    assert not groups.group().members["a"].is_streamed
