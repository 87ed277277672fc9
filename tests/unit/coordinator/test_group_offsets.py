"""Committed offsets: who may commit and ask, what is refused, what is forgotten and when."""

from __future__ import annotations

import pytest
from support.groups.machine import Groups, Member, Topics, run_until_stable, topic_id

from tidelog.coordinator.classic_requests import StoreGeneration
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import fetch_offsets, summary_of
from tidelog.coordinator.records import ClassicMember, ClassicValue
from tidelog.coordinator.requests import (
    Committed,
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    GroupSummary,
    OffsetToCommit,
)
from tidelog.coordinator.state import EMPTY
from tidelog.model.group_errors import (
    FencedInstanceIdError,
    GroupIdNotFoundError,
    GroupSubscribedError,
    IllegalGenerationError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    OffsetMetadataTooLargeError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)

WEEK_MS = 7 * 24 * 3_600_000


def world() -> Groups:
    return Groups(view=Topics.of(t=4, u=2))


def classic(groups: Groups, generation: int = 1, *names: str, topics: tuple[str, ...] = ("t",)) -> None:
    value = ClassicValue(
        generation=generation,
        protocol_type="consumer",
        protocol="range",
        members=tuple(ClassicMember(name, instance_id=f"i-{name}") for name in names),
        empty_since_ms=-1 if names else groups.now_ms,
        topics=topics,
    )
    groups.submit(StoreGeneration(group="g", value=value, now_ms=groups.now_ms))


# ---- Committing and asking


@pytest.mark.requirement("a:F-20", "b:H-20")
def test_an_offset_is_kept_with_its_metadata_and_leader_epoch() -> None:
    groups = world()
    part = groups.view.part("t", 1)
    assert groups.commit({part: OffsetToCommit(42, leader_epoch=7, metadata="half way")}) == {part: None}
    other = groups.view.part("t", 2)
    found = fetch_offsets(groups.state, "g", [part, other])
    assert found == {part: Committed(42, 7, "half way", groups.now_ms), other: Committed(-1)}
    assert fetch_offsets(groups.state, "g") == {part: found[part]}
    assert fetch_offsets(groups.state, "nothing") == {}
    assert groups.replayed() == groups.state
    assert summary_of("g", groups.group()) == GroupSummary("g", "simple", "empty", 0)


def test_a_commit_replaces_the_one_before_even_by_less() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.commit({part: 10})
    groups.commit({part: 3})
    assert fetch_offsets(groups.state, "g")[part].offset == 3


def test_a_topic_created_again_has_no_offsets() -> None:
    groups = world()
    groups.commit({groups.view.part("t", 0): 10})
    again = Topics.of(other=1, t=4)
    assert fetch_offsets(groups.state, "g", [again.part("t", 0)])[again.part("t", 0)].offset == -1


@pytest.mark.requirement("a:F-23")
def test_while_a_group_has_members_only_they_commit() -> None:
    groups = world()
    a = Member(groups, "a", "t")
    part = groups.view.part("t", 0)
    with pytest.raises(UnknownMemberIdError):
        groups.commit({part: 1})
    with pytest.raises(UnknownMemberIdError):
        groups.commit({part: 1}, "b", a.epoch)
    assert groups.commit({part: 1}, "a", a.epoch) == {part: None}
    groups.heartbeat("a", -1)
    with pytest.raises(UnknownMemberIdError):
        groups.commit({part: 1}, "a", a.epoch)
    assert groups.commit({part: 2}) == {part: None}


def test_commits_and_questions_of_other_epochs_are_refused() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    run_until_stable([a, b])
    part = next(iter(a.owned))
    for epoch in (a.epoch + 1, 0, -1):
        with pytest.raises(StaleMemberEpochError):
            groups.commit({part: 1}, "a", epoch)
    assert fetch_offsets(groups.state, "g", [part], member_id="a", member_epoch=a.epoch)[part].offset == -1
    with pytest.raises(StaleMemberEpochError):
        fetch_offsets(groups.state, "g", [part], member_id="a", member_epoch=a.epoch + 1)
    with pytest.raises(UnknownMemberIdError):
        fetch_offsets(groups.state, "g", [part], member_id="x", member_epoch=1)
    with pytest.raises(UnknownMemberIdError):
        fetch_offsets(EMPTY, "g", [part], member_id="a", member_epoch=a.epoch)
    assert fetch_offsets(EMPTY, "g", [part], member_epoch=-1)[part].offset == -1


def test_a_commit_may_cross_an_answer_with_a_new_epoch() -> None:
    groups = world()
    a = Member(groups, "a", "t")
    Member(groups, "b", "t")
    old = a.epoch
    reported = groups.heartbeat("a", old)
    assert reported.member_epoch > old
    assert set(groups.commit(dict.fromkeys(a.owned, 5), "a", old).values()) == {None}, "kept and given up alike"


def test_what_another_member_holds_is_not_committed_any_more() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    before, epoch = a.owned, a.epoch
    run_until_stable([a, b])
    for sent in (a.epoch, epoch):
        reply = groups.commit(dict.fromkeys(before, 9), "a", sent)
        assert {part for part, error in reply.items() if error is None} == a.owned
        assert all(isinstance(reply[part], StaleMemberEpochError) for part in b.owned)


def test_what_came_back_is_not_committed_with_the_epoch_of_before() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    run_until_stable([a, b])
    old = a.epoch
    groups.heartbeat("b", -1)
    a.beat()
    moved = next(iter(b.owned))
    kept = next(iter(a.owned - b.owned))
    reply = groups.commit({moved: 1, kept: 1}, "a", old)
    assert isinstance(reply[moved], StaleMemberEpochError)
    assert reply[kept] is None


def test_a_static_member_whose_place_is_taken_cannot_commit() -> None:
    groups = world()
    a = Member(groups, "a", "t", instance_id="one")
    groups.heartbeat("a", -2, instance_id="one")
    with pytest.raises(StaleMemberEpochError):
        groups.commit({groups.view.part("t", 0): 1}, "a", a.epoch)
    groups.join("a2", "t", instance_id="one")
    with pytest.raises(FencedInstanceIdError):
        groups.commit({groups.view.part("t", 0): 1}, "a", a.epoch, instance_id="one")


def test_members_of_a_classic_group_commit_with_its_generation() -> None:
    groups = world()
    classic(groups, 3, "m", "n")
    part = groups.view.part("t", 0)
    assert groups.commit({part: 4}, "m", 3) == {part: None}
    with pytest.raises(IllegalGenerationError):
        groups.commit({part: 4}, "m", 2)
    with pytest.raises(UnknownMemberIdError):
        groups.commit({part: 4}, "x", 3)
    with pytest.raises(UnknownMemberIdError):
        groups.commit({part: 4})
    with pytest.raises(FencedInstanceIdError):
        groups.commit({part: 4}, "m", 3, instance_id="i-n")
    assert fetch_offsets(groups.state, "g", [part], member_id="m", member_epoch=3)[part].offset == 4
    with pytest.raises(IllegalGenerationError):
        fetch_offsets(groups.state, "g", [part], member_id="m", member_epoch=4)


def test_negative_offset_is_stored_as_it_came() -> None:
    groups = Groups(view=Topics.of(t=1))
    part = groups.view.part("t", 0)
    assert groups.commit({part: -2}) == {part: None}
    assert fetch_offsets(groups.state, "g", [part])[part].offset == -2


def test_offsets_that_are_too_much_are_refused() -> None:
    groups = Groups(view=Topics.of(t=4))
    first, second = (groups.view.part("t", number) for number in range(2))
    reply = groups.commit({first: OffsetToCommit(1, metadata="é" * 2_049), second: 1})
    assert isinstance(reply[first], OffsetMetadataTooLargeError)
    assert reply[second] is None
    assert groups.commit({first: OffsetToCommit(1, metadata="é" * 2_048)}) == {first: None}
    with pytest.raises(InvalidGroupIdError):
        groups.commit({first: 1}, group="")


# ---- Forgetting


def test_offsets_are_deleted_unless_members_read_the_topic() -> None:
    groups = world()
    t, u, nothing = groups.view.part("t", 0), groups.view.part("u", 0), groups.view.part("u", 1)
    groups.commit({t: 1, u: 2})
    Member(groups, "a", "t")
    reply = groups.submit(DeleteOffsets(group="g", partitions=(t, u, nothing), view=groups.view, now_ms=groups.now_ms))
    assert isinstance(reply[t], GroupSubscribedError)
    assert reply[u] is reply[nothing] is None
    assert set(groups.group().offsets) == {t}
    with pytest.raises(GroupIdNotFoundError):
        groups.submit(DeleteOffsets(group="none", partitions=(t,), view=groups.view, now_ms=groups.now_ms))


def test_group_whose_last_offset_was_deleted_stays_until_it_is_deleted_or_expires() -> None:
    groups = world()
    t, u = groups.view.part("t", 0), groups.view.part("u", 0)
    groups.commit({t: 1, u: 2})
    for partition in (t, u):
        request = DeleteOffsets(group="g", partitions=(partition,), view=groups.view, now_ms=groups.now_ms)
        assert groups.submit(request) == {partition: None}
    assert (dict(groups.group().offsets), groups.group().member_count) == ({}, 0)
    assert groups.submit(DeleteGroup(group="g")) is None
    with pytest.raises(GroupIdNotFoundError):
        groups.submit(DeleteGroup(group="g"))
    groups.commit({t: 1})
    groups.submit(DeleteOffsets(group="g", partitions=(t,), view=groups.view, now_ms=groups.now_ms))
    retention_ms = 1_000
    groups.submit(ExpireOffsets(now_ms=groups.now_ms + retention_ms, retention_ms=retention_ms))
    assert groups.state.group("g") is None


def test_offsets_of_a_classic_group_are_deleted_if_it_is_known_what_it_reads() -> None:
    groups = world()
    t, u = groups.view.part("t", 0), groups.view.part("u", 0)
    groups.commit({t: 1, u: 2})
    classic(groups, 1, "m")
    reply = groups.submit(DeleteOffsets(group="g", partitions=(t, u), view=groups.view, now_ms=groups.now_ms))
    assert isinstance(reply[t], GroupSubscribedError)
    assert reply[u] is None
    classic(groups, 2, "m", topics=())
    with pytest.raises(NonEmptyGroupError):
        groups.submit(DeleteOffsets(group="g", partitions=(t,), view=groups.view, now_ms=groups.now_ms))
    classic(groups, 3)
    assert groups.submit(DeleteOffsets(group="g", partitions=(t,), view=groups.view, now_ms=groups.now_ms)) == {t: None}


def test_a_group_without_members_is_deleted_as_a_whole() -> None:
    groups = world()
    a = Member(groups, "a", "t")
    groups.commit({groups.view.part("t", 0): 1}, "a", a.epoch)
    with pytest.raises(NonEmptyGroupError):
        groups.submit(DeleteGroup(group="g"))
    groups.heartbeat("a", -1)
    groups.submit(DeleteGroup(group="g"))
    assert groups.state == EMPTY == groups.replayed() == groups.compacted()
    with pytest.raises(GroupIdNotFoundError):
        groups.submit(DeleteGroup(group="g"))
    classic(groups, 1)
    groups.submit(DeleteGroup(group="g"))
    assert groups.state == EMPTY


def expire(groups: Groups, *gone: int) -> bool:
    wanted = frozenset(topic_id(number) for number in gone)
    more = groups.submit(ExpireOffsets(now_ms=groups.now_ms, retention_ms=WEEK_MS, gone=wanted))
    assert isinstance(more, bool)
    return more


@pytest.mark.requirement("a:F-21")
def test_offsets_expire_a_week_after_the_group_became_empty() -> None:
    groups = world()
    a = Member(groups, "a", "t")
    groups.commit({groups.view.part("t", 0): 1}, "a", a.epoch)
    groups.now_ms += 2 * WEEK_MS
    assert expire(groups) is False
    assert groups.last == (), "it has a member"
    groups.heartbeat("a", -1)
    groups.now_ms += WEEK_MS - 1
    expire(groups)
    assert groups.last == ()
    groups.now_ms += 1
    assert expire(groups) is False
    assert groups.state == EMPTY


def test_offsets_of_a_group_that_never_had_members_expire_one_by_one() -> None:
    groups = world()
    groups.commit({groups.view.part("t", 0): 1})
    groups.now_ms += WEEK_MS
    groups.commit({groups.view.part("t", 1): 1})
    expire(groups)
    assert set(groups.group().offsets) == {groups.view.part("t", 1)}


def test_an_empty_group_without_offsets_expires_too() -> None:
    groups = world()
    Member(groups, "a", "t")
    groups.heartbeat("a", -1)
    groups.commit({groups.view.part("t", 0): 1})
    groups.now_ms += WEEK_MS
    expire(groups)
    assert groups.state == EMPTY


def test_offsets_of_topics_that_are_gone_expire_at_once() -> None:
    groups = world()
    a = Member(groups, "a", "t", "u")
    t, u = groups.view.part("t", 0), groups.view.part("u", 0)
    groups.commit({t: 1, u: 1}, "a", a.epoch)
    expire(groups, 2)
    assert set(groups.group().offsets) == {t}


def test_expiry_is_done_in_bounded_parts() -> None:
    groups = Groups(view=Topics.of(t=10), limits=GroupLimits(expired_per_decision_max=4))
    groups.commit({groups.view.part("t", number): 1 for number in range(10)})
    groups.now_ms += WEEK_MS
    assert expire(groups) is True
    assert len(groups.last) == 4
    assert expire(groups) is True
    assert expire(groups) is False
    assert groups.state == EMPTY


def test_offsets_of_some_groups_are_looked_at() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    for name in ("a", "b", "c"):
        groups.commit({part: 1}, group=name)
    groups.now_ms += WEEK_MS
    request = ExpireOffsets(now_ms=groups.now_ms, retention_ms=WEEK_MS, groups=("b", "nothing"))
    assert groups.submit(request) is False
    assert sorted(groups.state.groups) == ["a", "c"]


def test_what_is_on_its_way_to_its_next_owner_is_not_taken_back_by_a_late_commit() -> None:
    """a gives up, b commits and leaves; a's commit of before comes while nobody has the partition."""
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    run_until_stable([a, b])
    moved = next(iter(b.owned))
    groups.commit({moved: 200}, "b", b.epoch)
    groups.heartbeat("b", -1)
    assert moved not in groups.group().owners
    late = groups.commit({moved: 100}, "a", a.epoch)
    assert isinstance(late[moved], StaleMemberEpochError)
    assert groups.group().offsets[moved].offset == 200
    a.beat()
    assert groups.commit({moved: 201}, "a", a.epoch) == {moved: None}


def test_a_member_commits_what_its_group_does_not_read() -> None:
    groups = world()
    a = Member(groups, "a", "t")
    other = groups.view.part("u", 0)
    assert groups.commit({other: 3}, "a", a.epoch) == {other: None}


def test_a_clock_that_goes_back_expires_nothing_early() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.now_ms = 10 * WEEK_MS
    groups.commit({part: 1})
    groups.now_ms = 5 * WEEK_MS
    assert expire(groups) is False
    groups.commit({part: 2})
    groups.now_ms = 6 * WEEK_MS - 1
    assert expire(groups) is False
    assert groups.group().offsets[part].offset == 2
    groups.now_ms += 1
    expire(groups)
    assert groups.state == EMPTY


def test_a_commit_of_offsets_leaves_the_rest_of_a_group_the_very_same() -> None:
    """Who looks for news compares with `is`: a thousand members that commit are not looked through a thousand times."""
    groups = world()
    a = Member(groups, "a", "t", instance_id="one")
    before = groups.group()
    groups.commit(dict.fromkeys(a.owned, 5), "a", a.epoch)
    after = groups.group()
    assert after.offsets is not before.offsets
    for part in ("members", "targets", "currents", "owners", "instances", "info"):
        assert getattr(after, part) is getattr(before, part), part
