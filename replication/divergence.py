"""Where two logs of a partition part, found by leader epochs and never by high watermarks. Pure.

An offset and the epoch that it was written in name one record, and the record names everything before it: an epoch has
one leader, and a leader only appends. So a follower says which epoch its last record is of and where its log ends, and
the leader answers from its own history:

    asked (last epoch, next offset)             answer
    epoch newer than all we know                Unknown         we are not the one to follow; nothing is cut
    ends before our log starts                  TooFarBehind    start over at our start: nothing is shared
    no record, ends inside our log              Continue        nothing to diverge
    no record, ends past our log                TooFarBehind    (only after an unclean election)
    epoch older than all we know                TooFarBehind    all that we have is newer: nothing is shared
    epoch known, ends in it or before its end   Continue
    epoch known, ends past its end here         Truncate        (epoch, where it ends here)
    epoch not known, but newer ones are         Truncate        (the largest known epoch below it, where it ends here)

The follower cuts to the lower of that end and the end, in its own log, of the epochs up to that one (`cut`), and asks
again until the answer is Continue. Why this ends, and is right:
- Here, everything from `end` on is of a newer epoch than the follower's last; there, everything from the follower's own
  end of that epoch on is of epochs that the leader does not have. Neither side of the cut is shared.
- A question by `asks` that is answered with Truncate always cuts at least one record, and the next question is of an
  epoch not larger than the one answered.

Only epochs of *records* are asked about. An epoch that a replica led without writing says nothing about its records:
asked about it, the leader could only answer with a cut that cuts nothing, for ever.

Needed of the histories: for every offset from its start to its end a log names the epoch that the offset was written
in, and a leader has noted its own epoch before it answers. Where compaction took records away the batches do not tell:
a copy has its history from its leader (`log.lineage`). One that was lost is rebuilt from the batches that are left,
until a leader tells it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.log.epochs import EpochHistory
from tidelog.model.errors import InvalidRequestError
from tidelog.model.ids import NO_EPOCH, Epoch, Offset


@dataclass(frozen=True, slots=True)
class Continue:
    """The follower's log is a prefix of the leader's: go on from its end."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The logs part: `cut` says where, in the follower's log. Then ask again."""

    epoch: Epoch
    end: Offset


@dataclass(frozen=True, slots=True)
class TooFarBehind:
    """Nothing is shared: drop the whole log, begin an empty one at `start`. Then ask again."""

    start: Offset


@dataclass(frozen=True, slots=True)
class Unknown:
    """The follower has records of a newer epoch than the leader's: this leader is out of date. Cut nothing."""


Answer = Continue | Truncate | TooFarBehind | Unknown


def divergence(
    epochs: EpochHistory, log_start: Offset, log_end: Offset, *, last_epoch: int, next_offset: int
) -> Answer:
    """The leader's answer to a follower whose last record is of `last_epoch` (-1: it has none), ends at `next_offset`.

    The caller has checked that both speak of the same leader epoch. InvalidRequestError for numbers that cannot be.
    """
    if next_offset < 0 or last_epoch < NO_EPOCH:
        raise InvalidRequestError(f"a log that ends at {next_offset} in epoch {last_epoch}")
    if last_epoch > epochs.latest:
        return Unknown()
    if next_offset < log_start:
        return TooFarBehind(log_start)
    if last_epoch == NO_EPOCH:
        return Continue() if next_offset <= log_end else TooFarBehind(log_start)
    first_epoch, first_start = next(iter(epochs))
    if last_epoch < first_epoch:
        return _before_all(first_start, log_start, last_epoch=last_epoch, next_offset=next_offset)
    known, end = epochs.end_offset_for(last_epoch, log_end=log_end)
    if known == last_epoch and next_offset <= end:
        return Continue()
    return Truncate(known, end)


def _before_all(first_start: Offset, log_start: Offset, *, last_epoch: int, next_offset: int) -> Answer:
    if first_start <= log_start:
        return TooFarBehind(log_start)
    # A history rebuilt from a compacted log does not reach down to its start. What was compacted was committed: a
    # replica in sync may end in that part, and must not be told to drop it.
    return Continue() if next_offset <= first_start else Truncate(Epoch(last_epoch), first_start)


def asks(epochs: EpochHistory, *, log_start: Offset, log_end: Offset) -> tuple[Epoch, Offset]:
    """What a follower asks: the epoch of its last record (-1: it has none), and where its log ends."""
    if log_start == log_end:
        return NO_EPOCH, log_end
    last_epoch = epochs.epoch_for(log_end - 1)
    assert last_epoch != NO_EPOCH, f"a log of {log_start}..{log_end} without epochs: {epochs!r}"
    return last_epoch, log_end


def cut(epochs: EpochHistory, answer: Truncate, *, log_start: Offset, log_end: Offset) -> Offset:
    """Where a follower cuts its log; at its start nothing is left, and the next question is that of an empty log."""
    end = log_end
    if answer.epoch < epochs.latest:
        end = epochs.end_offset_for(answer.epoch, log_end=log_end)[1]
    return max(log_start, min(end, answer.end, log_end))
