"""The leader epochs of a log: which epoch begins at which offset. Pure.

    epoch   0     2     3        5         latest
            |-----|-----|--------|------>
    start   0     40    40       97        log end

A replica that rejoins asks the leader where its last epoch ends there, truncates its log to that offset and goes on:
epochs separate divergent tails where offsets and high watermarks cannot. Rules:

- Epochs are strictly ascending and start offsets never go down. Epochs without records are kept (epoch 2 above has
  offsets 40..39): a leader must know every epoch that it led, with records or without.
- An epoch ends where the next known one starts; the latest ends at the log end.
- For every offset below the log end that the log ever held, `epoch_for` returns the epoch of the offset, even if
  compaction has removed the record. A copy of a log with gaps therefore gets its history from its leader (`lineage`),
  not from the batches.
- A lost or unreadable history is rebuilt from the batches, which all have their epoch. Epochs without records cannot be
  rebuilt. In a log with gaps that may be an epoch that had records, until a leader sends its history.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from tidelog.model.ids import NO_EPOCH, NO_OFFSET, Epoch, Offset


class EpochHistory:
    """Epochs with their start offsets.

    Invariants (`validate`): epochs strictly ascending, starts ascending or equal, none negative; none past the log end.
    """

    __slots__ = ("_epochs", "_starts")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs = array("q")
        self._starts = array("q")
        for epoch, start in entries:
            self._epochs.append(epoch)
            self._starts.append(start)

    @property
    def latest(self) -> Epoch:
        """The latest epoch, or -1."""
        return Epoch(self._epochs[-1]) if self._epochs else NO_EPOCH

    @property
    def latest_start(self) -> Offset:
        """Where the latest epoch starts, or -1."""
        return Offset(self._starts[-1]) if self._starts else NO_OFFSET

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[tuple[Epoch, Offset]]:
        for epoch, start in zip(self._epochs, self._starts, strict=True):
            yield Epoch(epoch), Offset(start)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpochHistory):
            return NotImplemented
        return self._epochs == other._epochs and self._starts == other._starts

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EpochHistory({list(zip(self._epochs, self._starts, strict=True))})"

    def assign(self, epoch: int, offset: int) -> bool:
        """The next offset of `epoch` is `offset`. Returns True if the epoch is new.

        The caller has checked that the epoch is not older than the latest.
        """
        if self._epochs and epoch <= self._epochs[-1]:
            assert epoch == self._epochs[-1], f"epoch {epoch} after {self._epochs[-1]}"
            return False
        assert epoch >= 0, f"epoch {epoch}"
        assert not self._starts or offset >= self._starts[-1], f"epoch {epoch} starts at {offset}, in the past"
        self._epochs.append(epoch)
        self._starts.append(offset)
        return True

    def learn(self, entries: Iterable[tuple[int, int]], *, log_start: int, log_end: int) -> bool:
        """Add what the history of another replica has about offsets below `log_end`, where both logs are equal. Returns
        True if something changed.

        Each of the two may lack an epoch, or know it from a later offset on, if compaction removed records before it
        was rebuilt from batches. The earlier start of an epoch is kept. If entries contradict ours, all are ignored.
        """
        starts = {int(epoch): int(start) for epoch, start in self}
        for epoch, start in entries:
            if start < log_end:
                starts[epoch] = min(start, starts.get(epoch, start))
        pairs = sorted(starts.items())
        learned = EpochHistory(pairs)
        learned.truncate_from_start(log_start)
        if not sound_entries(pairs) or learned == self:
            return False
        self._epochs, self._starts = learned._epochs, learned._starts
        return True

    def end_offset_for(self, epoch: int, *, log_end: int) -> tuple[Epoch, Offset]:
        """The largest known epoch at or below `epoch`, and where it ends here.

        (-1, -1) if `epoch` is newer than all known ones: this replica knows nothing about it, and a guess could make
        the other replica truncate records that it must keep. For an epoch before all known ones the result is (epoch,
        start of the first known): all records of it are before this history.
        """
        if not self._epochs or epoch > self._epochs[-1] or epoch < 0:
            return NO_EPOCH, NO_OFFSET
        after = bisect_right(self._epochs, epoch)
        if after == 0:
            return Epoch(epoch), Offset(self._starts[0])
        end = self._starts[after] if after < len(self._starts) else log_end
        return Epoch(self._epochs[after - 1]), Offset(end)

    def epoch_for(self, offset: int) -> Epoch:
        """The epoch in which `offset` was or would be written; -1 before the first."""
        after = bisect_right(self._starts, offset)
        return Epoch(self._epochs[after - 1]) if after else NO_EPOCH

    def truncate_from_end(self, offset: int) -> bool:
        """Forget epochs that start at or past `offset`: their records were truncated. Returns True if any did.

        With the log end as `offset`, epochs at the end without records are forgotten. A leader keeps such an epoch, its
        own; a follower forgets it, since the next leader may go on with records of an older one.
        """
        keep = bisect_left(self._starts, offset)
        changed = keep < len(self._starts)
        del self._epochs[keep:]
        del self._starts[keep:]
        return changed

    def clip(self, log_end: int) -> bool:
        """The log ends at `log_end`: forget epochs that would start past it. Returns True if any did."""
        return self.truncate_from_end(log_end + 1)

    def truncate_from_start(self, offset: int) -> bool:
        """The log starts at `offset`: earlier epochs go, the one that spans it starts there. Returns True if
        changed."""
        after = bisect_right(self._starts, offset)
        if after == 0 or (after == 1 and self._starts[0] == offset):
            return False
        # Epochs that start exactly at `offset` stay; the one that spans it is moved up.
        exact = bisect_left(self._starts, offset)
        first = exact if exact < after else after - 1
        del self._epochs[:first]
        del self._starts[:first]
        if self._starts[0] < offset:
            self._starts[0] = offset
        return True

    def clear(self) -> None:
        del self._epochs[:]
        del self._starts[:]

    def validate(self, *, log_end: int | None = None, thorough: bool = True) -> None:
        """Assert the invariants, in a log that ends at `log_end`; without `thorough` only of the newest two epochs."""
        first = 0 if thorough else -2
        epochs, starts = list(self._epochs[first:]), list(self._starts[first:])
        assert log_end is None or self.latest_start <= log_end, f"past the log end {log_end}: {self!r}"
        assert len(self._epochs) == len(self._starts), "epochs and starts differ in number"
        assert all(a < b for a, b in pairwise(epochs)), f"epochs not ascending: {self!r}"
        assert all(a <= b for a, b in pairwise(starts)), f"starts go down: {self!r}"
        assert not epochs or (epochs[0] >= 0 and starts[0] >= 0), f"negative: {self!r}"


class LeaderEpochs:
    """Owns the epoch history of an open log, and whether the state store lags behind it (`is_unsaved`)."""

    __slots__ = ("history", "is_unsaved")

    def __init__(self, history: EpochHistory) -> None:
        self.history = history
        self.is_unsaved = False

    def assign(self, epoch: int, offset: int) -> bool:
        """See `EpochHistory.assign`."""
        is_new = self.history.assign(epoch, offset)
        self.is_unsaved |= is_new
        return is_new

    def truncate_from_end(self, offset: int) -> bool:
        """See `EpochHistory.truncate_from_end`."""
        is_changed = self.history.truncate_from_end(offset)
        self.is_unsaved |= is_changed
        return is_changed

    def truncate_from_start(self, offset: int) -> None:
        """See `EpochHistory.truncate_from_start`. The caller has stored the result."""
        self.history.truncate_from_start(offset)

    def copy(self) -> EpochHistory:
        return EpochHistory(list(self.history))

    def replace(self, history: EpochHistory) -> None:
        self.history = history

    def saved(self) -> None:
        """The history as it is now is stored, or is about to be."""
        self.is_unsaved = False

    def unsaved(self) -> None:
        """Storing has failed, or the history was replaced by one that is not stored."""
        self.is_unsaved = True


def sound_entries(entries: Iterable[tuple[int, int]]) -> bool:
    """Whether entries from outside (a stored value, a message) are a valid history."""
    last_epoch, last_start = -1, 0
    for epoch, start in entries:
        if epoch <= last_epoch or start < last_start:
            return False
        last_epoch, last_start = epoch, start
    return True
