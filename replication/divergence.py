"""Finds where two logs of a partition diverge, by leader epochs and never by high watermarks. Pure.

An offset and its leader epoch identify one record, and the record identifies everything before it: an epoch has one
leader, and a leader only appends. A follower sends the epoch of its last record and its log end; the leader answers
from its own epoch history:

    query (last epoch, next offset)             answer
    epoch newer than the leader's latest        Unknown         this leader is out of date; nothing is truncated
    ends before the leader's log start          TooFarBehind    nothing is shared: restart at the leader's log start
    no record, ends inside the leader's log     Continue        nothing can diverge
    no record, ends past the leader's log       TooFarBehind    (only after an unclean election)
    epoch older than the leader's first         TooFarBehind    nothing is shared: all records of the leader are newer
    epoch known, ends in it or before its end   Continue
    epoch known, ends past its end              Truncate        (epoch, its end in the leader's log)
    epoch unknown, newer epochs known           Truncate        (the largest known epoch below it, its end)

The follower truncates to the lower of that end and its own end of the epochs up to that one (`truncation_point`), and
queries again until the answer is Continue. This terminates and is correct:
- In the leader's log everything from `end` on has a newer epoch than the follower's last; in the follower's log
  everything from its own end of that epoch on has epochs that the leader lacks. Nothing past that point is shared.
- An `epoch_query` that is answered with Truncate always removes at least one record, and the next query names an epoch
  not larger than the one answered.

A query names only epochs of *records*. An epoch that a replica led without writing says nothing about its records: the
leader could only answer with a truncation that removes nothing, for ever.

Required of the histories: a log knows the epoch of every offset from its start to its end, and a leader has noted its
own epoch before it answers. Where compaction removed records the batches do not show their epochs: a follower stores
the history that its leader sends (`log.lineage`). A lost history is rebuilt from the remaining batches, until a leader
sends it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidelog.log.epochs import EpochHistory
from tidelog.model.errors import InvalidRequestError
from tidelog.model.ids import NO_EPOCH, Epoch, Offset


@dataclass(frozen=True, slots=True)
class Continue:
    """The follower's log is a prefix of the leader's: continue at its end."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The logs diverge: truncate the follower's log at `truncation_point`, then query again."""

    epoch: Epoch
    end: Offset


@dataclass(frozen=True, slots=True)
class TooFarBehind:
    """Nothing is shared: reset the log to empty at `start`, then query again."""

    start: Offset


@dataclass(frozen=True, slots=True)
class Unknown:
    """The follower has records of a newer epoch than the leader's: this leader is out of date. Truncate nothing."""


Answer = Continue | Truncate | TooFarBehind | Unknown


def divergence(
    epochs: EpochHistory, log_start: Offset, log_end: Offset, *, last_epoch: int, next_offset: int
) -> Answer:
    """Return the leader's answer to a follower whose log ends at `next_offset`, in `last_epoch` (-1: empty).

    The caller has checked that both name the same leader epoch. Raises InvalidRequestError for impossible numbers.
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
    # A history rebuilt from a compacted log does not reach down to its start. Compacted records were committed: an
    # in-sync replica may end in that part and must not drop it.
    return Continue() if next_offset <= first_start else Truncate(Epoch(last_epoch), first_start)


def epoch_query(epochs: EpochHistory, *, log_start: Offset, log_end: Offset) -> tuple[Epoch, Offset]:
    """Return a follower's query: the epoch of its last record (-1: none) and its log end."""
    if log_start == log_end:
        return NO_EPOCH, log_end
    last_epoch = epochs.epoch_for(log_end - 1)
    assert last_epoch != NO_EPOCH, f"a log of {log_start}..{log_end} without epochs: {epochs!r}"
    return last_epoch, log_end


def truncation_point(epochs: EpochHistory, answer: Truncate, *, log_start: Offset, log_end: Offset) -> Offset:
    """Return where a follower truncates its log. At the log start it is empty, and so is the next query."""
    end = log_end
    if answer.epoch < epochs.latest:
        end = epochs.end_offset_for(answer.epoch, log_end=log_end)[1]
    return max(log_start, min(end, answer.end, log_end))
