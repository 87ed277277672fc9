"""The history of leader epochs: where epochs end, and where a replica that rejoins must truncate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.log.epochs import EpochHistory, sound_entries
from tidelog.log.recovery_files import merge_epochs


def history(*entries: tuple[int, int]) -> EpochHistory:
    made = EpochHistory(entries)
    made.validate()
    return made


def test_an_epoch_ends_where_the_next_one_starts_and_the_latest_at_the_log_end() -> None:
    epochs = history((0, 0), (2, 40), (5, 97))
    assert epochs.end_offset_for(0, log_end=120) == (0, 40)
    assert epochs.end_offset_for(2, log_end=120) == (2, 97)
    assert epochs.end_offset_for(5, log_end=120) == (5, 120)


@pytest.mark.requirement("a:B-15")
def test_an_unknown_epoch_is_answered_with_the_largest_before_it() -> None:
    epochs = history((0, 0), (2, 40), (5, 97))
    assert epochs.end_offset_for(1, log_end=120) == (0, 40)
    assert epochs.end_offset_for(4, log_end=120) == (2, 97)


@pytest.mark.case("T3")
def test_an_epoch_newer_than_all_known_has_no_answer() -> None:
    assert history((0, 0), (2, 40)).end_offset_for(3, log_end=60) == (-1, -1)
    assert history().end_offset_for(0, log_end=0) == (-1, -1)


def test_an_epoch_before_all_known_ends_where_the_history_begins() -> None:
    assert history((4, 100), (5, 150)).end_offset_for(2, log_end=200) == (2, 100)


@pytest.mark.case("T5")
def test_a_follower_that_missed_epochs_of_its_leader_still_truncates_its_tail() -> None:
    """The leader was elected several times (epochs 3, 4, 5); the follower stopped in epoch 2 with a longer tail."""
    leader = history((1, 0), (2, 50), (4, 60), (5, 80))
    follower, follower_end = history((1, 0), (2, 50)), 75
    epoch, end = leader.end_offset_for(follower.latest, log_end=100)
    assert (epoch, end) == (2, 60)
    assert min(end, follower_end) == 60  # 60 to 74 of the follower were never the leader's
    # A follower with epochs that the leader does not know uses the epoch in the response.
    diverged = history((1, 0), (3, 55))
    epoch, end = leader.end_offset_for(diverged.latest, log_end=100)
    assert (epoch, end) == (2, 60)
    assert diverged.end_offset_for(epoch, log_end=70) == (1, 55)


@pytest.mark.case("T6")
def test_an_epoch_without_records_is_kept() -> None:
    epochs = history((0, 0), (1, 40))
    epochs.assign(2, 40)
    epochs.assign(3, 40)
    assert list(epochs) == [(0, 0), (1, 40), (2, 40), (3, 40)]
    assert epochs.end_offset_for(2, log_end=50) == (2, 40)
    assert epochs.end_offset_for(3, log_end=40) == (3, 40)
    epochs.clip(40)
    assert epochs.latest == 3


def test_an_epoch_is_assigned_once() -> None:
    epochs = EpochHistory()
    assert epochs.assign(3, 10)
    assert not epochs.assign(3, 20)
    assert list(epochs) == [(3, 10)]
    with pytest.raises(AssertionError):
        epochs.assign(2, 30)
    with pytest.raises(AssertionError):
        epochs.assign(4, 5)


def test_truncation_forgets_epochs_that_begin_at_or_past_the_end() -> None:
    epochs = history((0, 0), (1, 40), (2, 60))
    assert not epochs.truncate_from_end(61)
    assert epochs.truncate_from_end(60)
    assert list(epochs) == [(0, 0), (1, 40)]
    assert epochs.truncate_from_end(0)
    assert len(epochs) == 0


def test_advancing_the_start_moves_the_epoch_that_spans_it() -> None:
    epochs = history((0, 0), (1, 40), (2, 60))
    assert not epochs.truncate_from_start(0)
    assert epochs.truncate_from_start(50)
    assert list(epochs) == [(1, 50), (2, 60)]
    assert epochs.truncate_from_start(60)
    assert list(epochs) == [(2, 60)]


def test_epochs_without_records_at_the_new_beginning_stay() -> None:
    epochs = history((0, 0), (1, 40), (2, 40), (3, 40))
    epochs.truncate_from_start(40)
    assert list(epochs) == [(1, 40), (2, 40), (3, 40)]


def test_the_epoch_of_an_offset_is_the_last_that_began_at_or_before_it() -> None:
    epochs = history((1, 10), (3, 20))
    assert [epochs.epoch_for(offset) for offset in (9, 10, 19, 20, 99)] == [-1, 1, 1, 3, 3]


class TestMerging:
    """Recovery merges a stored history with the epochs of the batches."""

    def test_the_batches_are_facts_and_stored_epochs_without_records_are_kept(self) -> None:
        merged = merge_epochs(history((0, 0), (1, 40), (2, 60)), [(0, 0), (2, 60)], log_end=80)
        assert list(merged) == [(0, 0), (1, 40), (2, 60)]

    @pytest.mark.case("T6")
    def test_an_epoch_without_records_at_the_end_is_kept(self) -> None:
        merged = merge_epochs(history((0, 0), (7, 80)), [(0, 0)], log_end=80)
        assert list(merged) == [(0, 0), (7, 80)]

    def test_a_stored_epoch_past_the_end_is_dropped(self) -> None:
        assert list(merge_epochs(history((0, 0), (7, 81)), [(0, 0)], log_end=80)) == [(0, 0)]

    def test_where_every_batch_was_read_an_epoch_without_records_begins_where_another_does(self) -> None:
        known = history((0, 0), (1, 40), (2, 60), (3, 70), (7, 80))
        merged = merge_epochs(known, [(0, 0), (5, 70)], log_end=80, read_from=60)
        assert list(merged) == [(0, 0), (1, 40), (3, 70), (5, 70), (7, 80)], (
            "2 would end epoch 0 in front of its records"
        )

    def test_a_stored_epoch_that_contradicts_the_batches_is_dropped(self) -> None:
        merged = merge_epochs(history((0, 0), (7, 100)), [(0, 0), (8, 95)], log_end=120)
        assert list(merged) == [(0, 0), (8, 95)]

    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=6),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=6),
    )
    def test_the_result_is_a_history_that_holds_every_epoch_found(
        self, known: list[tuple[int, int]], found: list[tuple[int, int]]
    ) -> None:
        def ordered(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
            epochs = sorted({epoch for epoch, _ in entries})
            starts = sorted(start for _, start in entries)
            return list(zip(epochs, starts, strict=False))

        batch_epochs = ordered(found)
        merged = merge_epochs(history(*ordered(known)), batch_epochs, log_end=50)
        merged.validate()
        assert {epoch for epoch, _ in batch_epochs} <= {int(epoch) for epoch, _ in merged}


@given(st.lists(st.tuples(st.integers(-2, 5), st.integers(-2, 5)), max_size=4))
def test_entries_from_outside_are_sound_exactly_if_they_make_a_history(entries: list[tuple[int, int]]) -> None:
    made = EpochHistory(entries)
    try:
        made.validate()
    except AssertionError:
        assert not sound_entries(entries)
    else:
        assert sound_entries(entries)
