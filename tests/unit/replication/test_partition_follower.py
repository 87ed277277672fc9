"""A follower of a partition: its high watermark, and what it takes for late."""

from __future__ import annotations

import pytest

from tidelog.model.ids import Offset
from tidelog.replication.partition import FollowerState


def follower(*, end: int = 10, durable: int | None = None, high_watermark: int = 4) -> FollowerState:
    return FollowerState(
        leader=1,
        leader_epoch=5,
        log_end=Offset(end),
        durable_end=Offset(end if durable is None else durable),
        high_watermark=Offset(high_watermark),
    )


def following(**more: int) -> FollowerState:
    state = follower(**more)
    state.subscribed(1)
    return state


def test_the_high_watermark_is_the_lesser_of_the_leaders_and_the_own_durable_end() -> None:
    state = following()
    assert state.pushed(Offset(8), Offset(20))
    assert state.high_watermark == 8
    assert state.pushed(Offset(15), Offset(20))
    assert state.high_watermark == 10, "what came is not synced yet"
    assert state.durable(Offset(12))
    assert state.high_watermark == 12
    assert state.durable(Offset(20))
    assert state.high_watermark == 15
    state.validate()


def test_the_high_watermark_does_not_move_back_with_a_new_leader_that_knows_less() -> None:
    state = following(high_watermark=9)
    assert not state.pushed(Offset(3), Offset(10))
    assert (state.high_watermark, state.leader_high_watermark) == (9, 9)


def test_what_a_former_leader_said_beyond_the_own_log_is_not_carried_over() -> None:
    former = following()
    former.pushed(Offset(50), Offset(10))
    assert (former.high_watermark, former.leader_high_watermark) == (10, 50)
    state = FollowerState(
        leader=2,
        leader_epoch=6,
        log_end=Offset(10),
        durable_end=Offset(10),
        high_watermark=former.high_watermark,
    )
    state.subscribed(1)
    state.pushed(Offset(0), Offset(40))
    state.durable(Offset(40))
    assert state.high_watermark == 10


def test_a_cut_above_the_high_watermark_leaves_it() -> None:
    state = following(high_watermark=4)
    assert not state.truncated(Offset(6), Offset(6))
    assert (state.high_watermark, state.known_end, state.durable_end) == (4, 6, 6)


@pytest.mark.case("T1")
def test_a_restart_with_an_old_high_watermark_keeps_the_whole_log() -> None:
    """The record at 9 is committed, and only the word of it was lost: nothing in this state asks for a cut."""
    state = following(end=10, high_watermark=9)
    assert (state.known_end, state.high_watermark) == (10, 9)
    assert state.pushed(Offset(10), Offset(10))
    assert (state.known_end, state.high_watermark) == (10, 10)


def test_a_cut_below_the_high_watermark_takes_it_along_and_says_so() -> None:
    state = following(high_watermark=9)
    state.pushed(Offset(30), Offset(10))
    assert state.truncated(Offset(5), Offset(5))
    assert state.high_watermark == 5
    state.subscribed(2)
    state.pushed(Offset(2), Offset(40))
    state.durable(Offset(40))
    assert state.high_watermark == 5, "the leader has to say again what is committed"
    state.validate()


def test_a_log_reset_to_a_later_offset_has_everything_before_committed() -> None:
    state = following(end=10, high_watermark=4)
    assert not state.truncated(Offset(100), Offset(100))
    assert (state.high_watermark, state.known_end) == (100, 100)
    state.validate()


def test_a_log_reset_to_an_offset_inside_it_has_everything_before_committed() -> None:
    state = following(end=150, high_watermark=50)
    assert not state.truncated(Offset(100), Offset(100), log_start=Offset(100))
    assert state.high_watermark == 100
    state.validate()


@pytest.mark.case("T8")
def test_what_is_of_another_epoch_or_subscription_is_late() -> None:
    state = follower()
    assert not state.is_current(leader_epoch=5, subscription=-1), "nothing was asked yet"
    state.subscribed(3)
    assert state.is_current(leader_epoch=5, subscription=3)
    assert not state.is_current(leader_epoch=4, subscription=3)
    assert not state.is_current(leader_epoch=6, subscription=3)
    state.subscribed(4)
    assert not state.is_current(leader_epoch=5, subscription=3)


def test_subscription_numbers_only_rise() -> None:
    state = following()
    with pytest.raises(AssertionError, match="subscription 1 after 1"):
        state.subscribed(1)


def test_nothing_is_pushed_to_who_has_not_asked() -> None:
    with pytest.raises(AssertionError, match="a push has a subscription"):
        follower().pushed(Offset(0), Offset(10))


def test_a_push_does_not_shorten_the_log() -> None:
    with pytest.raises(AssertionError, match="from 10 to 9"):
        following().pushed(Offset(0), Offset(9))
