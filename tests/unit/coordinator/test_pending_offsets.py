"""Offsets that transactions commit: visible with their marker, fenced by members and producers, never left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.groups.machine import Groups, Member, Topics, run_until_stable

from tidelog.coordinator import state as group_state
from tidelog.coordinator.classic_requests import StoreGeneration
from tidelog.coordinator.limits import GroupLimits
from tidelog.coordinator.machine import fetch_offsets
from tidelog.coordinator.pending_offsets import UnverifiedTransactionError
from tidelog.coordinator.queries import unstable_partitions
from tidelog.coordinator.records import ClassicMember, ClassicValue, FenceValue, Kind, OffsetValue, decision
from tidelog.coordinator.requests import (
    Committed,
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    ForgetFences,
    OffsetToCommit,
)
from tidelog.coordinator.state import EMPTY, PENDING_BYTES_MAX, validate, validate_group
from tidelog.model.errors import (
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    PolicyViolationError,
    TransactionCoordinatorFencedError,
)
from tidelog.model.group_errors import (
    IllegalGenerationError,
    InvalidGroupIdError,
    OffsetMetadataTooLargeError,
    StaleMemberEpochError,
    UnknownMemberIdError,
)
from tidelog.model.ids import PartitionId
from tidelog.model.maps import Map
from tidelog.model.transaction_errors import ConcurrentTransactionsError

DAY_MS = 24 * 3_600_000


def world() -> Groups:
    return Groups(view=Topics.of(t=4, u=2))


def offset(groups: Groups, number: int = 0, group: str = "g") -> int:
    part = groups.view.part("t", number)
    return fetch_offsets(groups.state, group, [part])[part].offset


def is_unstable(groups: Groups, number: int = 0) -> bool:
    return bool(unstable_partitions(groups.state, "g", [groups.view.part("t", number)]))


# ---- Markers


@pytest.mark.requirement("a:H-14")
def test_an_offset_of_a_transaction_shows_with_its_marker() -> None:
    groups = world()
    part, other = groups.view.part("t", 0), groups.view.part("t", 1)
    groups.commit({part: 3, other: 4})
    pended = groups.now_ms
    assert groups.pend({part: OffsetToCommit(9, leader_epoch=2, metadata="m")}) == {part: None}
    assert offset(groups) == 3
    assert unstable_partitions(groups.state, "g") == [part]
    assert unstable_partitions(groups.state, "g", [other, part]) == [part]
    assert unstable_partitions(groups.state, "nothing") == []
    groups.now_ms += 5
    groups.mark()
    assert fetch_offsets(groups.state, "g", [part])[part] == Committed(9, 2, "m", pended)
    assert not unstable_partitions(groups.state, "g")
    assert groups.replayed() == groups.compacted() == groups.state


def test_an_aborted_offset_leaves_what_was_committed() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.commit({part: 3})
    groups.pend({part: 9, groups.view.part("t", 1): 9})
    groups.mark(is_commit=False)
    assert offset(groups) == 3
    assert offset(groups, 1) == -1
    assert not unstable_partitions(groups.state, "g")
    assert groups.replayed() == groups.compacted() == groups.state


def test_a_group_of_aborted_offsets_alone_is_gone() -> None:
    groups = world()
    groups.pend({groups.view.part("t", 0): 9})
    assert groups.group().kind == "simple"
    groups.mark(is_commit=False)
    assert groups.state.group("g") is None
    assert groups.compacted() == groups.state


def test_one_marker_ends_the_offsets_of_all_groups_and_of_its_producer_only() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    for name in ("g", "h"):
        groups.pend({part: 9}, group=name)
    groups.pend({part: 5}, group="h", producer=8)
    groups.pend({groups.view.part("t", 1): 6}, group="h", producer=8)
    groups.mark()
    assert len([record for record in groups.last if record.key.kind == Kind.OFFSET]) == 2, "in one decision"
    assert (offset(groups), offset(groups, group="h")) == (9, 9)
    assert dict(groups.state.open) == {8: ("h",)}
    groups.mark(producer=8)
    assert (offset(groups), offset(groups, group="h"), offset(groups, 1, "h")) == (9, 5, 6)
    assert not groups.state.open


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_repeated_marker_changes_nothing(is_commit: bool) -> None:
    groups = world()
    groups.pend({groups.view.part("t", 0): 9})
    groups.mark(is_commit=is_commit)
    before = groups.state
    groups.now_ms += 1_000
    for again in (is_commit, not is_commit):
        groups.mark(is_commit=again)
        assert not groups.last
    assert groups.state is before


def test_a_marker_without_offsets_fences_all_the_same() -> None:
    groups = world()
    groups.mark(epoch=4, number=2)
    assert dict(groups.state.fences) == {
        7: FenceValue(epoch=4, number=2, coordinator_epoch=1, updated_ms=groups.now_ms)
    }
    with pytest.raises(InvalidProducerEpochError):
        groups.pend({groups.view.part("t", 0): 9}, epoch=3, number=2)


@pytest.mark.parametrize("fields", [{"coordinator_epoch": 2}, {"number": 2}, {"epoch": 2}])
def test_what_a_later_marker_knows_better_is_stored(fields: dict[str, int]) -> None:
    groups = world()
    groups.mark()
    groups.mark(**fields)  # type: ignore[arg-type]
    fence = groups.state.fences[7]
    assert {name: getattr(fence, name) for name in fields} == fields
    groups.mark(epoch=fence.epoch, number=0, coordinator_epoch=fence.coordinator_epoch)
    assert groups.state.fences[7] == fence


# ---- The newest write wins


def test_a_marker_does_not_replace_a_newer_commit() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 9})
    groups.commit({part: 3})
    assert is_unstable(groups)
    groups.mark()
    assert offset(groups) == 3
    assert groups.replayed() == groups.compacted() == groups.state


@pytest.mark.parametrize("first", [7, 8])
def test_of_two_transactions_the_one_that_wrote_last_wins(first: int) -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 70})
    groups.pend({part: 80}, producer=8)
    groups.mark(producer=first)
    assert offset(groups) == first * 10
    assert is_unstable(groups)
    groups.mark(producer=15 - first)
    assert offset(groups) == 80
    groups.pend({part: 71}, epoch=1, number=2)
    groups.mark(epoch=2, number=2)
    assert offset(groups) == 71


def test_a_transaction_that_writes_again_is_the_newest() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 70})
    groups.pend({part: 80}, producer=8)
    groups.pend({part: 71})
    groups.mark(producer=8)
    groups.mark()
    assert offset(groups) == 71


def test_an_older_offset_wins_when_the_newer_one_aborts() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 70})
    groups.pend({part: 80}, producer=8)
    groups.mark(producer=8, is_commit=False)
    groups.mark()
    assert offset(groups) == 70


# ---- Fencing by the producer


def test_commits_of_an_earlier_epoch_are_rejected_also_after_a_restart() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 9})
    groups.mark()
    groups.state = groups.compacted()
    for number in (1, 2, None):
        with pytest.raises(InvalidProducerEpochError):
            groups.pend({part: 10}, epoch=0, number=number)
    groups.pend({part: 10}, epoch=1, number=2)
    groups.state = groups.compacted()
    with pytest.raises(InvalidProducerEpochError):
        groups.pend({part: 11}, epoch=0, number=None)
    groups.mark(epoch=2, number=2)
    assert offset(groups) == 10


def test_an_answer_that_a_marker_has_overtaken_is_void() -> None:
    """A client of version 1 keeps its epoch: only the number tells the transactions apart."""
    groups = world()
    part = groups.view.part("t", 0)
    groups.mark(epoch=0, is_strict=False)
    with pytest.raises(InvalidTransactionStateError):
        groups.pend({part: 9}, number=1)
    groups.pend({part: 9}, number=2)
    with pytest.raises(InvalidTransactionStateError):
        groups.pend({part: 9}, number=1)
    groups.mark(epoch=0, number=2, is_strict=False)
    assert offset(groups) == 9


def test_a_producer_without_pending_offsets_has_to_be_verified() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    with pytest.raises(UnverifiedTransactionError):
        groups.pend({part: 9}, number=None)
    groups.pend({part: 9})
    groups.pend({groups.view.part("t", 1): 9}, number=None)
    groups.mark()
    assert offset(groups, 1) == 9
    with pytest.raises(UnverifiedTransactionError):
        groups.pend({part: 10}, epoch=1, number=None)


def test_a_transaction_waits_for_the_marker_of_the_one_before() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 9})
    for epoch, number in ((1, 2), (0, 2), (1, None)):
        with pytest.raises(ConcurrentTransactionsError):
            groups.pend({part: 10}, epoch=epoch, number=number)
    groups.mark(is_commit=False)
    groups.pend({part: 10}, epoch=1, number=2)


def test_late_markers_are_rejected() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.pend({part: 9})
    groups.mark()
    groups.pend({part: 10}, epoch=1, number=2)
    with pytest.raises(InvalidProducerEpochError):
        groups.mark(epoch=1, number=1)
    with pytest.raises(InvalidProducerEpochError):
        groups.mark(epoch=0, number=2)
    with pytest.raises(InvalidProducerEpochError):
        groups.mark(epoch=1, number=2)  # the epoch of a strict marker is above that of the commits
    with pytest.raises(InvalidProducerEpochError):
        groups.mark(epoch=1, number=1, is_strict=False)
    assert is_unstable(groups)
    groups.mark(epoch=1, number=2, is_strict=False)
    assert offset(groups) == 10
    with pytest.raises(InvalidProducerEpochError):
        groups.mark(epoch=0, number=2)


def test_markers_of_a_replaced_coordinator_are_rejected() -> None:
    groups = world()
    groups.mark(coordinator_epoch=5)
    groups.pend({groups.view.part("t", 0): 9}, epoch=1, number=2)
    with pytest.raises(TransactionCoordinatorFencedError):
        groups.mark(epoch=2, number=2, is_commit=False, coordinator_epoch=4)
    groups.mark(epoch=2, number=2, coordinator_epoch=5)
    assert offset(groups) == 9


# ---- Fencing by the group


def test_a_member_commits_in_a_transaction_as_otherwise() -> None:
    groups = world()
    a, b = Member(groups, "a", "t"), Member(groups, "b", "t")
    before, old = a.owned, a.epoch
    run_until_stable([a, b])
    with pytest.raises(UnknownMemberIdError):
        groups.pend(dict.fromkeys(a.owned, 9), "x", a.epoch)
    with pytest.raises(StaleMemberEpochError):
        groups.pend(dict.fromkeys(a.owned, 9), "a", a.epoch + 1)
    with pytest.raises(StaleMemberEpochError):
        groups.pend(dict.fromkeys(a.owned, 9), "a", -1)
    reply = groups.pend(dict.fromkeys(before, 9), "a", a.epoch)
    assert {part for part, error in reply.items() if error is None} == a.owned
    assert all(isinstance(reply[part], StaleMemberEpochError) for part in b.owned)
    with pytest.raises(StaleMemberEpochError):
        groups.pend(dict.fromkeys(a.owned, 10), "a", old - 1)
    groups.mark()
    assert {part for part, held in fetch_offsets(groups.state, "g").items() if held.offset == 9} == a.owned


@pytest.mark.requirement("a:F-34")
def test_a_member_of_a_classic_group_commits_in_its_generation() -> None:
    groups = world()
    members = (ClassicMember("m"),)
    value = ClassicValue(generation=3, protocol_type="consumer", protocol="range", leader="m", members=members)
    groups.submit(StoreGeneration(group="g", value=value, now_ms=groups.now_ms))
    part = groups.view.part("t", 0)
    with pytest.raises(IllegalGenerationError):
        groups.pend({part: 9}, "m", 2)
    with pytest.raises(UnknownMemberIdError):
        groups.pend({part: 9}, "n", 3)
    groups.pend({part: 9}, "m", 3)
    groups.mark()
    assert offset(groups) == 9


def test_a_client_that_names_no_member_is_not_fenced_by_the_group() -> None:
    """Older clients send only the group."""
    groups = world()
    Member(groups, "a", "t")
    groups.pend({groups.view.part("t", 0): 9})
    groups.mark()
    assert offset(groups) == 9
    with pytest.raises(UnknownMemberIdError):
        groups.pend({groups.view.part("t", 0): 9}, "", 0, epoch=1, number=2)
    with pytest.raises(UnknownMemberIdError):
        groups.pend({groups.view.part("t", 0): 9}, "", -1, epoch=1, number=2, instance_id="i")


# ---- Limits


def test_what_is_too_much_is_refused() -> None:
    groups = Groups(view=Topics.of(t=4))
    first, second = (groups.view.part("t", number) for number in range(2))
    reply = groups.pend({first: OffsetToCommit(1, metadata="é" * 2_049), second: 1})
    assert isinstance(reply[first], OffsetMetadataTooLargeError)
    assert reply[second] is None
    for name in ("", "x" * 1_025):
        with pytest.raises(InvalidGroupIdError):
            groups.pend({first: 1}, group=name)


def test_the_offsets_of_one_transaction_fit_the_decision_that_ends_them() -> None:
    groups = Groups(view=Topics.of(t=1_000))
    metadata = "x" * 4_096

    def fill() -> None:
        for name in ("g", "é" * 1_024):
            for number in range(1_000):
                groups.pend({groups.view.part("t", number): OffsetToCommit(number, 1, metadata)}, group=name)

    with pytest.raises(PolicyViolationError):
        fill()
    full = sum(pending.size for group in groups.state.groups.values() for pending in group.pending.values())
    assert PENDING_BYTES_MAX - 9_000 < full <= PENDING_BYTES_MAX
    part = groups.view.part("t", 0)
    groups.pend({part: OffsetToCommit(5, 1, metadata)})  # takes the place of the one before
    groups.commit({part: 1})
    groups.mark()
    assert decision(groups.last).size <= full + 200
    assert not groups.state.open


# ---- Forgetting


def test_pending_offsets_hold_up_expiry() -> None:
    groups = world()
    part, other = groups.view.part("t", 0), groups.view.part("t", 1)
    groups.commit({part: 3, other: 4})
    groups.pend({part: 9})
    groups.now_ms += DAY_MS
    expire = ExpireOffsets(now_ms=groups.now_ms, retention_ms=1)
    assert groups.submit(expire) is False
    assert (offset(groups), offset(groups, 1)) == (3, -1)
    groups.mark(is_commit=False)
    groups.submit(expire)
    assert groups.state.group("g") is None


def test_pending_offsets_alone_hold_up_the_expiry_of_their_group() -> None:
    groups = world()
    empty = ClassicValue(generation=1, empty_since_ms=groups.now_ms)
    groups.submit(StoreGeneration(group="g", value=empty, now_ms=groups.now_ms))
    groups.pend({groups.view.part("t", 0): 9})
    groups.now_ms += DAY_MS
    expire = ExpireOffsets(now_ms=groups.now_ms, retention_ms=1)
    groups.submit(expire)
    assert groups.group().kind == "classic"
    groups.mark()
    groups.submit(expire)
    assert groups.state.group("g") is None


def test_offsets_of_deleted_topics_are_not_pending_any_more() -> None:
    groups = world()
    kept, gone, both = groups.view.part("u", 0), groups.view.part("t", 0), groups.view.part("t", 1)
    groups.commit({both: 1})
    groups.pend({kept: 1, gone: 2, both: 3})
    groups.submit(ExpireOffsets(now_ms=groups.now_ms, retention_ms=DAY_MS, gone=frozenset([gone.topic_id])))
    assert unstable_partitions(groups.state, "g") == [kept]
    groups.mark()
    assert fetch_offsets(groups.state, "g") == {kept: Committed(1, commit_ms=groups.now_ms)}


def test_a_deleted_group_loses_its_pending_offsets_and_the_transaction_goes_on() -> None:
    groups = world()
    part = groups.view.part("t", 0)
    groups.commit({groups.view.part("t", 1): 1})
    groups.pend({part: 9})
    groups.submit(DeleteGroup(group="g"))
    assert groups.state == EMPTY
    groups.pend({part: 10})
    groups.mark()
    assert fetch_offsets(groups.state, "g") == {part: Committed(10, commit_ms=groups.now_ms)}
    assert groups.replayed() == groups.compacted() == groups.state


def test_a_deleted_offset_is_not_pending_any_more() -> None:
    groups = world()
    part, other = groups.view.part("t", 0), groups.view.part("t", 1)
    groups.pend({part: 9, other: 8})
    groups.pend({part: 7}, producer=8)
    delete = DeleteOffsets(group="g", partitions=(part,), view=groups.view, now_ms=groups.now_ms)
    assert groups.submit(delete) == {part: None}
    assert groups.group().kind == "simple", "it has a pending offset"
    groups.mark()
    groups.mark(producer=8)
    assert (offset(groups), offset(groups, 1)) == (-1, 8)
    groups.submit(replace(delete, partitions=(other,)))
    assert groups.group().kind == "classic", "the group stays, empty"


def test_fences_are_forgotten_some_at_a_time() -> None:
    groups = Groups(view=Topics.of(t=1), limits=GroupLimits(expired_per_decision_max=2))
    for producer in range(4):
        groups.mark(producer=producer)
    groups.pend({groups.view.part("t", 0): 1}, producer=0, epoch=1, number=2)
    groups.now_ms += 1
    groups.mark(producer=9)
    forget = ForgetFences(now_ms=groups.now_ms, retention_ms=1)
    assert groups.submit(forget) is True
    assert groups.submit(forget) is False
    assert sorted(groups.state.fences) == [0, 9], "one has a pending offset, one is new"
    assert groups.compacted() == groups.state


def test_a_full_table_of_fences_forgets_the_oldest() -> None:
    groups = Groups(view=Topics.of(t=1), limits=GroupLimits(fences_max=3, expired_per_decision_max=1))
    for producer in (5, 3, 4, 3, 8):
        groups.now_ms += 1
        groups.mark(producer=producer, epoch=groups.now_ms)
    assert sorted(groups.state.fences) == [3, 4, 8]
    groups.mark(producer=3, epoch=groups.now_ms + 1)
    assert sorted(groups.state.fences) == [3, 4, 8]


# ---- Invariants


EMPTY_GROUP = group_state.Group("h")


def group_offsets() -> Map[PartitionId, OffsetValue]:
    groups = world()
    groups.commit({groups.view.part("t", 0): 1})
    return groups.group().offsets


def pending_world() -> Groups:
    groups = world()
    groups.mark(epoch=0, number=0, is_strict=False)
    groups.pend({groups.view.part("t", 0): 9, groups.view.part("t", 1): 9})
    groups.pend({groups.view.part("t", 0): 9}, group="h")
    return groups


def test_broken_pending_offsets_are_named() -> None:
    state = pending_world().state
    group = state.groups["g"]
    held = group.pending[7]
    first = next(iter(held.offsets))
    with pytest.raises(AssertionError, match="not of 3"):
        validate_group(replace(group, pending=group.pending.set(7, replace(held, size=3))))
    with pytest.raises(AssertionError, match="unstable partitions"):
        validate_group(replace(group, unstable=group.unstable.delete(first)))
    with pytest.raises(AssertionError, match="of nothing"):
        validate_group(replace(group, pending=group.pending.set(8, group_state.PendingOffsets())))
    for wrong in (replace(held.offsets[first], epoch=5), replace(held.offsets[first], number=5)):
        other = replace(held, offsets=held.offsets.set(first, wrong))
        broken = replace(group, pending=group.pending.set(7, other))
        with pytest.raises(AssertionError, match="two transactions"):
            validate(replace(state, groups=state.groups.set("g", broken)))
    with pytest.raises(AssertionError, match="has pending offsets"):
        validate(replace(state, open=state.open.set(7, ("h",))))
    nothing = replace(
        state.groups["h"], pending=EMPTY_GROUP.pending, unstable=EMPTY_GROUP.unstable, offsets=group_offsets()
    )
    with pytest.raises(AssertionError, match="nothing pending"):
        validate(replace(state, groups=state.groups.set("h", nothing)))
    for fence, message in (
        (FenceValue(epoch=1), "a fenced epoch"),
        (FenceValue(epoch=0, number=1), "an ended transaction"),
    ):
        with pytest.raises(AssertionError, match=message):
            validate(replace(state, fences=state.fences.set(7, fence)), since=state)
