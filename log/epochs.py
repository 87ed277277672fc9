"""The leader epochs of a log: which epoch began at which offset. Pure.

    epoch   0     2     3        5         latest
            |-----|-----|--------|------>
    start   0     40    40       97        log end

A replica that comes back asks the leader where its last epoch ends there, cuts its log to that and goes on: epochs
tell divergent tails apart where offsets and high watermarks cannot. Rules:

- Epochs are strictly ascending and start offsets never go down. Epochs without records are kept (epoch 2 above has
  its records at 40..39): a leader must know every epoch that it led, written in or not.
- An epoch ends where the next known one starts; the latest ends at the log end.
- For every offset below the log end that the log ever held, `epoch_for` names the epoch that the offset was written
  in, whether compaction has kept the record or not. A copy of a log with gaps therefore has its history from its leader
  (`lineage`), not from the batches.
- A history lost or unreadable is rebuilt from the batches, which all carry their epoch; epochs without records cannot
  be found again. In a log with gaps that may be an epoch that had records, until a leader tells it again.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from tidelog.model.ids import NO_EPOCH, NO_OFFSET, Epoch, Offset


class EpochHistory:
    """Epochs with their start offsets.

    Invariants (`validate`): epochs strictly ascending, starts ascending or equal, none negative.
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
        """The next offset written in `epoch` is `offset`. True if the epoch is new; an old one is no news.

        An epoch below the latest cannot begin any more: the caller has checked that.
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
        """Add what the history of another replica says about offsets below `log_end`, where the two logs are one.
        True if that was news.

        Each of the two may lack an epoch, or know it from a later offset on, where compaction had removed records
        before it was put together from batches. What both say is the truth. Entries that contradict ours are ignored,
        all of them.
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

        (-1, -1) if `epoch` is newer than all we know: then this replica has nothing to say about it, and a guess
        could make the asker cut what it must keep. For an epoch before all that are known the answer is (epoch, start
        of the first known): all that the asker holds from it lies before our history.
        """
        if not self._epochs or epoch > self._epochs[-1] or epoch < 0:
            return NO_EPOCH, NO_OFFSET
        after = bisect_right(self._epochs, epoch)
        if after == 0:
            return Epoch(epoch), Offset(self._starts[0])
        end = self._starts[after] if after < len(self._starts) else log_end
        return Epoch(self._epochs[after - 1]), Offset(end)

    def epoch_for(self, offset: int) -> Epoch:
        """The epoch in which `offset` was (or would be) written; -1 before the first."""
        after = bisect_right(self._starts, offset)
        return Epoch(self._epochs[after - 1]) if after else NO_EPOCH

    def truncate_from_end(self, offset: int) -> bool:
        """Records at and past `offset` were cut away: forget epochs that start there. True if any did.

        Only for a real cut. An epoch without records at the log end has nothing to be cut and stays: the caller does
        not call this when `offset` is the log end.
        """
        keep = bisect_left(self._starts, offset)
        changed = keep < len(self._starts)
        del self._epochs[keep:]
        del self._starts[keep:]
        return changed

    def clip(self, log_end: int) -> bool:
        """The log turned out to end at `log_end`: forget epochs that would start past it. True if any did."""
        return self.truncate_from_end(log_end + 1)

    def truncate_from_start(self, offset: int) -> bool:
        """The log starts at `offset` now: the epoch at that offset starts there, earlier ones go. True if changed."""
        after = bisect_right(self._starts, offset)
        if after == 0 or (after == 1 and self._starts[0] == offset):
            return False
        # Epochs that start exactly at `offset` are kept as they are, the one that reaches over it is moved up.
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

    def validate(self) -> None:
        epochs, starts = list(self._epochs), list(self._starts)
        assert len(epochs) == len(starts), "epochs and starts differ in number"
        assert all(a < b for a, b in pairwise(epochs)), f"epochs not ascending: {self!r}"
        assert all(a <= b for a, b in pairwise(starts)), f"starts go down: {self!r}"
        assert not epochs or (epochs[0] >= 0 and starts[0] >= 0), f"negative: {self!r}"


def sound_entries(entries: Iterable[tuple[int, int]]) -> bool:
    """Whether entries from outside (a stored value) make a history."""
    last_epoch, last_start = -1, 0
    for epoch, start in entries:
        if epoch <= last_epoch or start < last_start:
            return False
        last_epoch, last_start = epoch, start
    return True
