"""The leader of a partition, rule by rule: high watermark, in-sync set, lag, proposals and their answers."""

from __future__ import annotations

import pytest
from support.brokers.leader_states import (
    LAG_MS,
    ack,
    answer,
    changed,
    leader,
    live,
    members,
    partition,
    propose,
    wanted,
    write,
)

from tidelog.model.errors import ErrorCode, InvalidRequestError, NotEnoughReplicasError
from tidelog.model.ids import Offset
from tidelog.replication.partition import IsrProposal, LeaderState


class TestHighWatermark:
    @pytest.mark.requirement("a:B-09", "a:U-02", "b:C-08", "b:C-09")
    def test_it_is_the_least_durable_end_of_those_in_sync(self) -> None:
        state = leader()
        assert not write(state, 10)
        assert not ack(state, 2, 8)
        assert ack(state, 3, 6)
        assert state.high_watermark == 6
        assert ack(state, 3, 10)
        assert state.high_watermark == 8

    def test_the_leaders_own_durable_end_counts_like_the_others(self) -> None:
        state = leader()
        state.appended(Offset(10), 0)
        ack(state, 2, 10)
        ack(state, 3, 10)
        assert state.high_watermark == 0, "on two devices, but not on the leader's"
        assert state.durable(Offset(7), 0)
        assert state.high_watermark == 7

    def test_what_is_only_in_a_followers_page_cache_does_not_count(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10)
        ack(state, 3, 4)  # it has received 10, and synced 4
        assert state.high_watermark == 4

    def test_a_follower_that_has_said_nothing_in_this_epoch_holds_it(self) -> None:
        state = leader()
        write(state, 10)
        assert not ack(state, 2, 10)
        known = state.progress(3)
        assert known is not None
        assert known.durable_end is None
        assert state.high_watermark == 0

    def test_it_never_moves_back(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        assert not ack(state, 3, 2), "a log that was damaged and cut"
        assert state.high_watermark == 10

    def test_a_follower_outside_the_in_sync_set_does_not_hold_it(self) -> None:
        state = leader((1, 2))
        write(state, 10)
        assert ack(state, 2, 10)
        ack(state, 3, 1)
        assert state.high_watermark == 10

    def test_a_single_replica_is_its_own_in_sync_set(self) -> None:
        state = leader((1,), replicas=(1,), min_isr=1, end=10)
        assert state.high_watermark == 10
        assert state.is_confirmed

    @pytest.mark.requirement("a:B-40", "a:T-04")
    def test_it_stands_still_while_fewer_than_min_isr_are_in_sync(self) -> None:
        state = leader((1,))
        assert not write(state, 10)
        ack(state, 2, 10)
        assert state.high_watermark == 0
        propose(state)
        assert state.high_watermark == 0, "a pending addition does not make the committed set larger"
        assert answer(state, (1, 2), epoch=1)
        assert state.high_watermark == 10

    def test_it_stands_still_while_somebody_outside_is_eligible_to_lead(self) -> None:
        state = leader((1,), min_isr=1, eligible=(2,))
        assert not write(state, 10)
        assert changed(state, partition((1,), epoch=1), min_isr=1)

    def test_a_pending_addition_counts(self) -> None:
        state = leader((1, 2), end=10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        assert members(propose(state)) == {1, 2, 3}
        write(state, 20)
        assert not ack(state, 2, 20)
        assert state.high_watermark == 10, "the controller may have 3 in sync already"
        assert state.isr == {1, 2}
        assert state.maximal_isr == {1, 2, 3}

    def test_a_pending_removal_still_counts(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10, 5 * LAG_MS)
        assert members(propose(state, 5 * LAG_MS)) == {1, 2}
        assert state.high_watermark == 0
        assert answer(state, (1, 2), epoch=1), "now that it is out, nothing waits for it"
        assert state.high_watermark == 10

    def test_a_known_high_watermark_past_the_own_log_is_cut_to_it(self) -> None:
        state = leader(end=5, high_watermark=Offset(9))
        assert state.high_watermark == 5


class TestConfirming:
    def test_the_epoch_is_confirmed_when_the_high_watermark_reaches_the_log_end_at_election(self) -> None:
        state = leader(end=10, high_watermark=Offset(4))
        assert not state.is_confirmed
        write(state, 15)
        assert state.epoch_start == 10
        ack(state, 2, 12)
        ack(state, 3, 9)
        assert (state.high_watermark, state.is_confirmed) == (9, False)
        ack(state, 3, 10)
        assert (state.high_watermark, state.is_confirmed) == (10, True)

    def test_a_leader_that_knew_everything_as_committed_is_confirmed_at_once(self) -> None:
        assert leader(end=10, high_watermark=Offset(10)).is_confirmed


class TestAcks:
    def test_an_ack_of_a_former_incarnation_is_ignored(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10)
        ack(state, 3, 3, broker_epoch=20)
        assert not ack(state, 3, 10, broker_epoch=13), "sent before it restarted"
        assert state.high_watermark == 3

    def test_a_new_incarnation_starts_from_what_it_says(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        ack(state, 3, 4, broker_epoch=20)
        known = state.progress(3)
        assert known is not None
        assert (known.durable_end, known.broker_epoch) == (4, 20)

    def test_an_ack_of_a_broker_without_a_replica_is_ignored(self) -> None:
        state = leader()
        write(state, 10)
        assert not ack(state, 4, 10)
        assert state.progress(4) is None

    @pytest.mark.parametrize("end", [11, -1])
    def test_an_ack_that_cannot_be_is_refused(self, end: int) -> None:
        state = leader()
        write(state, 10)
        with pytest.raises(InvalidRequestError, match=str(end)):
            ack(state, 2, end)

    @pytest.mark.requirement("a:B-40", "a:C-07")
    def test_acks_all_needs_min_isr_and_other_acks_do_not(self) -> None:
        state = leader((1,))
        with pytest.raises(NotEnoughReplicasError, match=r"min\.insync\.replicas is 2"):
            state.check_acks(-1)
        state.check_acks(1)
        state.check_acks(0)
        leader((1, 2)).check_acks(-1)


class TestJoining:
    def test_who_reaches_the_high_watermark_and_the_epoch_start_joins(self) -> None:
        state = leader((1, 2), end=10)
        ack(state, 2, 10)
        ack(state, 3, 9)
        assert wanted(state) is None
        ack(state, 3, 10)
        assert wanted(state) == IsrProposal(5, 0, ((1, 11), (2, 12), (3, 13)))

    def test_who_has_the_high_watermark_but_not_the_epoch_start_does_not_join(self) -> None:
        state = leader((1, 2), end=10, high_watermark=Offset(4))
        ack(state, 3, 6)
        assert state.high_watermark == 4
        assert wanted(state) is None, "it may lack what the leader before has committed and we do not know of"
        ack(state, 3, 10)
        assert members(wanted(state)) == {1, 2, 3}

    def test_who_has_the_epoch_start_but_not_the_high_watermark_does_not_join(self) -> None:
        state = leader((1, 2), end=10)
        write(state, 20)
        ack(state, 2, 20)
        ack(state, 3, 15)
        assert wanted(state) is None

    def test_who_has_not_acked_in_this_epoch_does_not_join(self) -> None:
        state = leader((1, 2), min_isr=1)
        assert wanted(state) is None, "an empty log, and still: it has said nothing"

    def test_who_is_not_live_does_not_join(self) -> None:
        state = leader((1, 2))
        ack(state, 3, 0)
        assert wanted(state, by=live(3)) is None

    def test_who_acked_in_a_former_life_does_not_join(self) -> None:
        state = leader((1, 2))
        ack(state, 3, 0)
        assert wanted(state, by=live(_3=99)) is None
        ack(state, 3, 0, broker_epoch=99)
        proposal = wanted(state, by=live(_3=99))
        assert proposal is not None
        assert proposal.isr == ((1, 11), (2, 12), (3, 99))

    def test_who_joins_far_behind_the_log_end_has_the_whole_lag_time_to_reach_it(self) -> None:
        state = leader((1,), end=10)
        write(state, 1000)
        ack(state, 2, 10, 5 * LAG_MS)
        propose(state, 5 * LAG_MS)
        answer(state, (1, 2), epoch=1, now_ms=5 * LAG_MS)
        assert wanted(state, 6 * LAG_MS) is None
        assert members(wanted(state, 6 * LAG_MS + 1)) == {1}


class TestLag:
    @pytest.mark.requirement("a:B-04", "a:B-05", "a:B-08")
    def test_who_has_not_reached_the_log_end_for_too_long_leaves(self) -> None:
        state = leader()
        ack(state, 2, 0, 0)
        ack(state, 3, 0, 0)
        write(state, 10, 100)
        ack(state, 2, 10, 100)
        state.check_lag(100 + LAG_MS)
        assert wanted(state, 100 + LAG_MS) is None
        state.check_lag(101 + LAG_MS)
        assert members(wanted(state, 101 + LAG_MS)) == {1, 2}

    def test_who_has_the_whole_log_does_not_lag_however_long_nothing_is_said(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        assert wanted(state, 1000 * LAG_MS) is None

    def test_after_a_quiet_time_lag_begins_with_the_first_write(self) -> None:
        state = leader()
        ack(state, 2, 0)
        ack(state, 3, 0)
        write(state, 10, 1000 * LAG_MS)
        assert wanted(state, 1001 * LAG_MS) is None
        assert members(wanted(state, 1001 * LAG_MS + 1)) == {1}

    def test_who_says_nothing_from_the_start_of_the_epoch_leaves(self) -> None:
        state = leader()
        ack(state, 2, 0)
        assert wanted(state, LAG_MS) is None
        assert members(wanted(state, LAG_MS + 1)) == {1, 2}

    def test_who_is_always_a_little_behind_stays(self) -> None:
        """Never at the log end under steady load, a quarter of the allowed lag behind it."""
        state = leader()
        ack(state, 2, 0)
        ack(state, 3, 0)
        for step in range(1, 100):
            now_ms = step * 50
            write(state, step * 10, now_ms)
            ack(state, 2, step * 10, now_ms)
            ack(state, 3, max(0, step - 5) * 10, now_ms)
            assert wanted(state, now_ms) is None

    def test_who_acks_but_falls_further_and_further_behind_leaves(self) -> None:
        state = leader()
        ack(state, 2, 0)
        ack(state, 3, 0)
        left_at = None
        for step in range(1, 200):
            now_ms = step * 50
            write(state, step * 10, now_ms)
            ack(state, 2, step * 10, now_ms)
            ack(state, 3, step, now_ms)
            if left_at is None and wanted(state, now_ms) is not None:
                left_at = now_ms
        assert left_at is not None
        assert left_at <= 2 * LAG_MS

    def test_an_old_sample_that_is_reached_proves_no_more_than_its_own_time(self) -> None:
        state = leader()
        ack(state, 3, 0, 0)
        ack(state, 2, 0, 0)
        write(state, 10, 0)
        write(state, 20, 900)
        ack(state, 2, 20, 900)
        ack(state, 3, 10, 900)  # the log end of time 0
        assert members(wanted(state, LAG_MS + 1)) == {1, 2}


class TestLeaving:
    def test_a_member_that_says_it_has_less_than_is_committed_leaves_at_once(self) -> None:
        state = leader()
        write(state, 10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        ack(state, 3, 5)
        assert members(wanted(state)) == {1, 2}

    def test_a_member_whose_incarnation_is_gone_leaves(self) -> None:
        state = leader()
        ack(state, 2, 0)
        ack(state, 3, 0)
        assert members(wanted(state, by=live(3))) == {1, 2}
        assert members(wanted(state, by=live(_3=99))) == {1, 2}

    def test_a_member_that_has_not_spoken_yet_is_proposed_with_the_incarnation_that_lives(self) -> None:
        state = leader((1, 2, 3), replicas=(1, 2, 3, 4))
        ack(state, 4, 0)
        proposal = wanted(state)
        assert proposal is not None
        assert proposal.isr == ((1, 11), (2, 12), (3, 13), (4, 14))


class TestProposals:
    def joining(self) -> LeaderState:
        """2 is in sync, 3 is about to be: all have 10."""
        state = leader((1, 2), end=10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        return state

    def advanced(self, state: LeaderState) -> bool:
        """Whether the high watermark goes on with 1 and 2 alone."""
        end = state.log_end + 10
        write(state, end)
        ack(state, 2, end)
        return state.high_watermark == end

    def test_one_is_in_flight_at_a_time(self) -> None:
        state = self.joining()
        proposal = propose(state)
        assert wanted(state) is None
        with pytest.raises(AssertionError, match="one proposal at a time"):
            state.sent(proposal)

    def test_when_it_is_done_the_set_is_committed(self) -> None:
        state = self.joining()
        propose(state)
        assert not answer(state, (1, 2, 3), epoch=1)
        assert (set(state.isr), state.partition_epoch) == ({1, 2, 3}, 1)
        assert wanted(state) is None
        assert not self.advanced(state)

    @pytest.mark.parametrize(
        "error", [ErrorCode.INELIGIBLE_REPLICA, ErrorCode.INVALID_REQUEST, ErrorCode.UNKNOWN_TOPIC_ID], ids=str
    )
    def test_when_it_is_refused_the_addition_no_longer_counts(self, error: ErrorCode) -> None:
        state = self.joining()
        propose(state)
        assert not self.advanced(state)
        assert answer(state, (1, 2), epoch=0, error=error)
        assert (set(state.isr), set(state.maximal_isr)) == ({1, 2}, {1, 2})
        assert self.advanced(state)

    def test_an_answer_that_the_partition_has_changed_brings_the_state_that_it_has(self) -> None:
        state = self.joining()
        propose(state)
        answer(state, (1,), epoch=3, error=ErrorCode.INVALID_UPDATE_VERSION)
        assert (set(state.isr), state.partition_epoch) == ({1}, 3)
        assert not self.advanced(state), "1 alone is less than min ISR"

    @pytest.mark.parametrize(
        ("error", "epoch"),
        [(ErrorCode.FENCED_LEADER_EPOCH, 6), (ErrorCode.NEW_LEADER_ELECTED, 6), (None, 6)],
        ids=["fenced", "new leader", "new epoch of ours"],
    )
    def test_an_answer_of_a_newer_leader_epoch_ends_this_one(self, error: ErrorCode | None, epoch: int) -> None:
        state = self.joining()
        propose(state)
        answer(state, (1, 2), epoch=1, error=error, leader_epoch=epoch)
        assert state.is_superseded
        assert not self.advanced(state)
        assert wanted(state, 10 * LAG_MS) is None

    def test_what_was_certainly_not_done_may_be_forgotten(self) -> None:
        state = self.joining()
        propose(state)
        assert not self.advanced(state)
        assert state.failed(may_be_done=False), "nothing else may happen for long: the high watermark moves here"
        assert self.advanced(state)
        assert not state.has_unresolved_proposal

    def test_a_proposal_of_unknown_outcome_counts_until_it_is_resolved(self) -> None:
        state = self.joining()
        propose(state)
        state.failed(may_be_done=True)
        assert not self.advanced(state)
        assert state.isr == {1, 2}

    def test_a_newer_partition_epoch_in_the_metadata_resolves_a_proposal_of_unknown_outcome(self) -> None:
        state = self.joining()
        propose(state)
        state.failed(may_be_done=True)
        changed(state, partition((1, 2, 3), epoch=1))
        assert (set(state.isr), state.has_unresolved_proposal) == ({1, 2, 3}, False)

    def test_the_answer_to_the_next_proposal_resolves_one_of_unknown_outcome(self) -> None:
        state = self.joining()
        propose(state)
        state.failed(may_be_done=True)
        assert members(propose(state)) == {1, 2, 3}, "the same again"
        answer(state, (1, 2, 3), epoch=1, error=ErrorCode.INVALID_UPDATE_VERSION)
        assert (set(state.isr), state.has_unresolved_proposal) == ({1, 2, 3}, False)

    def test_a_rejection_does_not_resolve_an_earlier_unanswered_proposal(self) -> None:
        """The first may still be on its way, and 3 may be live again when it arrives."""
        state = self.joining()
        propose(state)
        state.failed(may_be_done=True)
        propose(state)
        answer(state, (1, 2), epoch=0, error=ErrorCode.INELIGIBLE_REPLICA)
        assert state.maximal_isr == {1, 2, 3}
        assert not self.advanced(state)

    def test_a_barrier_ends_the_doubt_when_nothing_else_is_wanted(self) -> None:
        state = self.joining()
        propose(state)
        state.failed(may_be_done=True)
        proposal = propose(state, by=live(3))
        assert proposal == IsrProposal(5, 0, ((1, 11), (2, 12)), is_barrier=True)
        assert not self.advanced(state), "not before the answer"
        assert answer(state, (1, 2), epoch=1)
        assert self.advanced(state)
        assert wanted(state, by=live(3)) is None

    def test_a_barrier_that_raised_nothing_settles_nothing(self) -> None:
        state = self.joining()
        propose(state)
        state.failed(may_be_done=True)
        propose(state, by=live(3))
        answer(state, (1, 2), epoch=0)
        assert not self.advanced(state)

    def test_doubt_about_a_removal_alone_needs_no_barrier(self) -> None:
        state = leader()
        ack(state, 2, 0)
        propose(state, LAG_MS + 1)
        state.failed(may_be_done=True)
        ack(state, 3, 0)
        assert wanted(state, LAG_MS + 1) is None

    def test_a_controller_that_is_behind_us_cannot_refuse(self) -> None:
        state = self.joining()
        propose(state)
        answer(state, (1,), epoch=-1, error=ErrorCode.NOT_CONTROLLER)
        assert state.has_unresolved_proposal
        assert not self.advanced(state)

    def test_metadata_that_comes_before_the_answer_settles_it(self) -> None:
        state = self.joining()
        propose(state)
        changed(state, partition((1, 2), epoch=1))
        assert state.maximal_isr == {1, 2}, "it named partition epoch 0: it can no longer be done"
        assert state._inflight is not None
        assert wanted(state) is None, "the call is still out"
        state.failed(may_be_done=True)
        assert not state.has_unresolved_proposal

    def test_an_answer_that_comes_after_newer_metadata_changes_nothing(self) -> None:
        state = self.joining()
        propose(state)
        changed(state, partition((1, 2), epoch=2))
        answer(state, (1, 2, 3), epoch=1)
        assert (set(state.isr), state.partition_epoch, state.has_unresolved_proposal) == ({1, 2}, 2, False)

    def test_min_isr_of_an_answer_holds_together_with_its_in_sync_set(self) -> None:
        """The tail of the metadata is behind: min ISR was raised to 2 before 2 left, so 2 is eligible to lead."""
        state = leader((1, 2), min_isr=1, end=10)
        ack(state, 2, 10)
        write(state, 20, 0)
        propose(state, LAG_MS + 1)
        assert not answer(state, (1,), epoch=1, min_isr=2)
        assert state.high_watermark == 10
        with pytest.raises(NotEnoughReplicasError):
            state.check_acks(-1)


class TestMetadata:
    def test_a_partition_epoch_older_than_an_answers_is_ignored(self) -> None:
        state = leader((1, 2), end=10)
        ack(state, 3, 10)
        propose(state)
        answer(state, (1, 2, 3), epoch=1)
        changed(state, partition((1, 2), epoch=0), min_isr=1)
        assert (set(state.isr), state.min_isr) == ({1, 2, 3}, 2)

    def test_other_settings_come_with_the_same_partition_epoch(self) -> None:
        state = leader((1,))
        write(state, 10)
        assert changed(state, partition((1,)), min_isr=1)
        assert state.high_watermark == 10

    def test_a_newer_leader_epoch_ends_this_one(self) -> None:
        state = leader((1, 2))
        write(state, 10)
        changed(state, partition((2,), epoch=1, leader=2, leader_epoch=6))
        assert state.is_superseded
        assert not ack(state, 2, 10)

    def test_an_older_leader_epoch_is_ignored(self) -> None:
        state = leader((1, 2))
        changed(state, partition((1,), epoch=9, leader_epoch=4))
        assert state.isr == {1, 2}

    def test_a_replica_that_is_added_starts_with_nothing_known(self) -> None:
        state = leader()
        changed(state, partition((1, 2, 3), replicas=(1, 2, 3, 4), epoch=1))
        known = state.progress(4)
        assert known is not None
        assert known.durable_end is None
        ack(state, 4, 0)
        assert members(wanted(state)) == {1, 2, 3, 4}

    def test_a_replica_that_was_reassigned_away_leaves_the_progress(self) -> None:
        state = leader((1, 2), end=10)
        ack(state, 3, 10)
        changed(state, partition((1, 2), replicas=(1, 2), epoch=1))
        assert state.progress(3) is None
        assert not ack(state, 3, 10)
        assert wanted(state) is None

    def test_a_replica_reassigned_away_while_it_was_proposed_no_longer_counts(self) -> None:
        """An answer had partition epoch 1 first, a proposal went out on top of it, then the metadata came."""
        state = leader((1, 2), end=10)
        ack(state, 2, 10)
        ack(state, 3, 10)
        propose(state)
        answer(state, (1, 2), epoch=1, error=ErrorCode.INVALID_UPDATE_VERSION)
        propose(state)
        changed(state, partition((1, 2), replicas=(1, 2), epoch=1))
        assert state.maximal_isr == {1, 2}
        write(state, 20)
        assert ack(state, 2, 20)

    def test_two_in_sync_sets_in_one_partition_epoch_are_an_error_of_ours(self) -> None:
        with pytest.raises(AssertionError, match="two in-sync sets"):
            changed(leader(), partition((1, 2)))


class TestOwnErrors:
    def test_a_leaders_log_does_not_go_back(self) -> None:
        state = leader(end=10)
        with pytest.raises(AssertionError, match="log shrank"):
            state.appended(Offset(9), 0)

    def test_nothing_is_durable_that_was_not_written(self) -> None:
        with pytest.raises(AssertionError, match="durable to 11 of 10"):
            leader(end=10).durable(Offset(11), 0)

    def test_an_older_sync_that_ends_late_changes_nothing(self) -> None:
        state = leader((1,), replicas=(1,), min_isr=1, end=10)
        assert not state.durable(Offset(5), 0)
        assert state.durable_end == 10
