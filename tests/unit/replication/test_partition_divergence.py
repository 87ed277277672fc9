"""Where two logs part: every answer of the leader, and the known failures of peers as rounds of question and answer.

A log is written as epochs with their counts of records: `log("1:10 3:0 4:5")` has 10 records of epoch 1, led epoch 3
without writing, and has 5 records of epoch 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tidelog.log.epochs import EpochHistory
from tidelog.model.errors import InvalidRequestError
from tidelog.model.ids import Epoch, Offset
from tidelog.replication.divergence import (
    Continue,
    TooFarBehind,
    Truncate,
    Unknown,
    divergence,
    epoch_query,
    truncation_point,
)

ROUNDS_MAX = 20


@dataclass
class Replica:
    epochs: EpochHistory
    start: Offset
    end: Offset

    def asked(self, last_epoch: int, next_offset: int) -> object:
        return divergence(self.epochs, self.start, self.end, last_epoch=last_epoch, next_offset=next_offset)

    def records(self) -> list[tuple[int, int]]:
        return [(offset, self.epochs.epoch_for(offset)) for offset in range(self.start, self.end)]

    def reconcile(self, leader: Replica) -> list[object]:
        """Ask until the answer is Continue (or Unknown); the answers."""
        answers: list[object] = []
        for _ in range(ROUNDS_MAX):
            last_epoch, next_offset = epoch_query(self.epochs, log_start=self.start, log_end=self.end)
            answer = leader.asked(last_epoch, next_offset)
            answers.append(answer)
            if isinstance(answer, Truncate):
                before = self.end
                self.end = truncation_point(self.epochs, answer, log_start=self.start, log_end=self.end)
                assert self.end < before, f"{answer} cuts nothing"
                self.epochs.truncate_from_end(self.end)
            elif isinstance(answer, TooFarBehind):
                self.start = self.end = answer.start
                self.epochs.clear()
            else:
                return answers
        raise AssertionError(f"no end of it: {answers}")

    def is_prefix_of(self, leader: Replica) -> bool:
        theirs = dict(leader.records())
        return all(theirs.get(offset) == epoch for offset, epoch in self.records() if offset >= leader.start)


def log(text: str, *, start: int = 0) -> Replica:
    epochs, end = EpochHistory(), start
    for part in text.split():
        epoch, count = (int(word) for word in part.split(":"))
        epochs.assign(epoch, end)
        end += count
    return Replica(epochs, Offset(start), Offset(end))


def parted(epoch: int, end: int) -> Truncate:
    return Truncate(Epoch(epoch), Offset(end))


def behind(start: int) -> TooFarBehind:
    return TooFarBehind(Offset(start))


LEADER = "1:10 3:10 6:10 7:0"


@pytest.mark.parametrize(
    ("last_epoch", "next_offset", "answer"),
    [
        (1, 10, Continue()),
        (1, 4, Continue()),
        (3, 15, Continue()),
        (6, 30, Continue()),
        (6, 25, Continue()),
        (-1, 0, Continue()),
        (-1, 30, Continue()),
        (1, 11, parted(1, 10)),
        (3, 25, parted(3, 20)),
        (6, 31, parted(6, 30)),
        (2, 5, parted(1, 10)),
        (2, 12, parted(1, 10)),
        (5, 40, parted(3, 20)),
        (7, 31, parted(7, 30)),
        (8, 5, Unknown()),
        (8, 50, Unknown()),
        (-1, 31, behind(0)),
        (0, 5, behind(0)),
    ],
    ids=str,
)
def test_the_leader_answers_from_its_epochs(last_epoch: int, next_offset: int, answer: object) -> None:
    assert log(LEADER).asked(last_epoch, next_offset) == answer


@pytest.mark.parametrize(("last_epoch", "next_offset"), [(-2, 0), (0, -1)])
def test_numbers_that_cannot_be_are_refused(last_epoch: int, next_offset: int) -> None:
    with pytest.raises(InvalidRequestError):
        log(LEADER).asked(last_epoch, next_offset)


def test_two_empty_logs_agree() -> None:
    follower = log("")
    assert follower.reconcile(log("0:0")) == [Continue()]
    assert follower.reconcile(log("")) == [Continue()]


def test_a_leader_without_epochs_knows_nothing_about_records() -> None:
    assert log("").asked(0, 5) == Unknown()


def test_everything_is_dropped_for_a_leader_with_an_empty_log() -> None:
    follower = log("1:10 2:5")
    follower.reconcile(log("3:0"))
    assert (follower.start, follower.end) == (0, 0)


@pytest.mark.case("T1")
def test_a_record_that_both_have_stays_whatever_the_high_watermark_was() -> None:
    """The question has no high watermark in it: the follower has offset 9, the leader has it too."""
    follower = log("1:10")
    assert follower.reconcile(log("1:10 2:0")) == [Continue()]
    assert follower.end == 10


@pytest.mark.case("T2")
def test_different_records_at_one_offset_are_found_by_their_epochs() -> None:
    """Both ended at 5 when they failed; one wrote on in epoch 2, the other in epoch 1: the ends are equal, and lie."""
    leader, follower = log("1:5 2:3 3:0"), log("1:8")
    assert follower.reconcile(leader) == [parted(1, 5), Continue()]
    assert follower.end == 5


@pytest.mark.case("T3")
def test_a_leader_that_does_not_know_the_epoch_does_not_answer_with_a_wrong_end() -> None:
    """Two failovers in a row: A led 1, B led 2 and wrote alone, A leads 3 and never saw epoch 2.

    A's end for "epoch 2" must not be its log end: B would keep its own records under A's.
    """
    a, b = log("1:10 3:10"), log("1:8 2:6")
    assert b.reconcile(a) == [parted(1, 10), Continue()]
    assert (b.end, b.is_prefix_of(a)) == (8, True), "cut to where B's own epoch 1 ends"


@pytest.mark.case("T3")
def test_interleaved_epochs_take_a_round_for_each_one() -> None:
    """Each led epochs that the other never saw."""
    a, b = log("1:5 3:5 5:5 8:0"), log("1:4 2:4 4:4 6:4")
    answers = b.reconcile(a)
    assert answers == [parted(5, 15), parted(3, 10), parted(1, 5), Continue()]
    assert b.end == 4


@pytest.mark.case("T3")
def test_an_old_tail_goes_on_after_an_epoch_that_was_led_in_vain() -> None:
    """B was elected in 3 at offset 10 and wrote nothing; A, which leads again, still has records of epoch 2 there."""
    a, b = log("1:10 2:10 4:0"), log("1:10 3:0")
    assert b.reconcile(a) == [Continue()]
    assert b.end == 10


@pytest.mark.case("T5")
def test_a_follower_that_missed_epochs_of_the_same_leader_is_cut() -> None:
    """A led 1, lost its unsynced end, and leads 2 and 4: the follower never heard of those."""
    leader, follower = log("1:6 2:3 4:1"), log("1:9")
    assert follower.reconcile(leader) == [parted(1, 6), Continue()]
    assert follower.end == 6


@pytest.mark.case("T6")
@pytest.mark.parametrize("leader", ["1:10 4:5", "1:10 4:0", "1:10 3:0 4:5", "1:10 2:0 3:0 4:0 5:0"])
def test_epochs_without_records_do_not_make_a_follower_ask_for_ever(leader: str) -> None:
    follower = log("1:10 3:0")
    assert follower.reconcile(log(leader)) == [Continue()], "asked about epoch 1, where its last record is"


@pytest.mark.case("T6")
def test_a_leader_that_has_lost_epochs_without_records_answers_the_same() -> None:
    follower = log("1:10 2:0 3:4")
    with_them, without = log("1:10 2:0 3:2 5:1 7:0"), log("1:10 3:2 5:1")
    for last_epoch, next_offset in [(1, 10), (3, 12), (3, 14)]:
        assert with_them.asked(last_epoch, next_offset) == without.asked(last_epoch, next_offset)
    follower.reconcile(without)
    assert follower.end == 12


@pytest.mark.case("T9")
def test_a_follower_that_ends_before_the_leaders_log_starts_begins_there() -> None:
    follower = log("1:10")
    assert follower.reconcile(log("1:10 2:90 3:5", start=50)) == [behind(50), Continue()]
    assert (follower.start, follower.end) == (50, 50)


@pytest.mark.case("T9")
def test_a_follower_whose_log_starts_past_the_leaders_end_resets_its_log() -> None:
    follower = log("3:50", start=250)
    follower.reconcile(log("1:100 2:100 4:0"))
    assert (follower.start, follower.end) == (0, 0)


@pytest.mark.case("T9")
def test_an_empty_log_that_starts_past_the_leaders_end_is_reset() -> None:
    follower = log("", start=250)
    assert follower.reconcile(log("1:200")) == [behind(0), Continue()]


@pytest.mark.case("T9")
def test_a_follower_whose_epochs_are_all_gone_at_the_leader_begins_at_its_start() -> None:
    """Retention took the leader's records of old epochs; what the follower has there cannot be checked."""
    for end in (50, 70):
        follower = log(f"1:{end}")
        assert follower.reconcile(log("4:30", start=50)) == [behind(50), Continue()]


def test_an_in_sync_log_that_retention_emptied_stays_where_it_is() -> None:
    """Its end is committed: a leader that still has the old records does not send them again."""
    follower = log("", start=100)
    assert follower.reconcile(log("1:100 2:0")) == [Continue()]
    assert (follower.start, follower.end) == (100, 100)


def test_a_follower_that_starts_later_than_the_leader_keeps_what_they_share() -> None:
    follower = log("1:10 2:5", start=90)
    leader = log("1:100 2:20 3:0")
    assert follower.reconcile(leader) == [Continue()]
    assert (follower.start, follower.end) == (90, 105)


def test_a_log_of_nothing_but_what_is_not_shared_is_emptied() -> None:
    follower = log("3:20", start=100)
    leader = log("1:80 4:50")
    assert follower.reconcile(leader) == [parted(1, 80), Continue()]
    assert (follower.start, follower.end) == (100, 100)


def test_a_history_that_was_rebuilt_from_a_compacted_log_cuts_nothing_that_was_committed() -> None:
    """Offsets 0 to 49, of epoch 1, were compacted away; then the stored history was lost."""
    leader = Replica(EpochHistory([(4, 50)]), Offset(0), Offset(60))
    assert leader.asked(1, 50) == Continue()
    assert leader.asked(1, 30) == Continue()
    assert leader.asked(1, 55) == parted(1, 50)


@pytest.mark.case("T8")
def test_a_leader_that_is_out_of_date_makes_nobody_cut() -> None:
    follower = log("1:10 2:10 5:3")
    assert follower.reconcile(log("1:10 2:5 4:0")) == [Unknown()]
    assert follower.end == 23


def test_a_late_answer_about_an_epoch_that_is_not_there_cuts_no_more_than_its_end() -> None:
    follower = log("1:10")
    assert truncation_point(follower.epochs, parted(4, 30), log_start=Offset(0), log_end=Offset(10)) == 10


def test_records_without_epochs_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="without epochs"):
        epoch_query(EpochHistory(), log_start=Offset(0), log_end=Offset(5))
