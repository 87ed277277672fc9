"""The log of the core: entries since the snapshot, in memory, with their epochs and memberships. Pure.

    snapshot.offset <= ... start ............................ end
         |                 |   entries[0] ... entries[-1]      |
    state is durable   first entry held                next to be written

Invariants: epochs never fall along the log; `start <= snapshot.offset` once a snapshot exists (some entries before it
are kept for followers that lag a little); `memberships` holds, oldest first, the one at `start` and every one in a held
entry, with the offset of that entry.
"""

from bisect import bisect_right
from collections.abc import Iterable

from tidelog.model.ids import Epoch, Offset
from tidelog.raft.membership import Membership, VoterKey
from tidelog.raft.messages import ENTRY_OVERHEAD_BYTES, Entry, EntryKind, SnapshotId, entry_bytes

_MEMBERSHIP = EntryKind.MEMBERSHIP


class RaftLog:
    def __init__(
        self,
        snapshot: SnapshotId,
        membership: Membership,
        start: Offset | None = None,
        start_epoch: Epoch | None = None,
    ) -> None:
        """`membership` is in force at `start`, by default the snapshot's offset."""
        self.snapshot = snapshot
        self.start = snapshot.offset if start is None else start
        self.start_epoch = snapshot.epoch if start_epoch is None else start_epoch
        self.entries: list[Entry] = []
        self.end = self.start
        """start + len(entries), cached: used several times per message."""
        self.bytes = 0
        # Parallel lists: the epochs of the held entries and the offset where each begins.
        self._epochs: list[Epoch] = []
        self._epoch_starts: list[Offset] = []
        self.memberships: list[tuple[Offset, Membership]] = [(self.start, membership)]

    @property
    def last_epoch(self) -> Epoch:
        return self._epochs[-1] if self._epochs else self.start_epoch

    @property
    def membership(self) -> Membership:
        return self.memberships[-1][1]

    @property
    def membership_offset(self) -> Offset:
        """Offset of the entry with the membership in force (`start` if no held entry has one)."""
        return self.memberships[-1][0]

    def may_have_voter(self, key: VoterKey, commit: Offset) -> bool:
        """Whether `key` is a voter of the last committed membership, or of a later one."""
        for at, membership in reversed(self.memberships):
            if membership.has_voter(key):
                return True
            if at < commit:
                break
        return False

    def epoch_before(self, offset: Offset) -> Epoch | None:
        """Returns the epoch of the entry before `offset`, or None if unknown here."""
        index = offset - self.start
        if index == 0:
            return self.start_epoch
        if 0 < index <= len(self.entries):
            return self.entries[index - 1].epoch
        return None

    def end_of_epoch(self, epoch: Epoch) -> tuple[Epoch, Offset]:
        """Returns the largest epoch here that is at most `epoch`, and the offset where it ends.

        Returns (start_epoch, start) for an epoch below all that are held: there the logs agree, because everything
        below `start` is in a snapshot and so committed.
        """
        index = bisect_right(self._epochs, epoch)
        if index == 0:
            return self.start_epoch, self.start
        end = self._epoch_starts[index] if index < len(self._epochs) else self.end
        return self._epochs[index - 1], end

    def slice(self, offset: Offset, bytes_max: int) -> tuple[Entry, ...]:
        """Returns entries from `offset` up to a size, at least one if there is one."""
        return self.sized_slice(offset, bytes_max)[0]

    def sized_slice(self, offset: Offset, bytes_max: int) -> tuple[tuple[Entry, ...], int]:
        """Like `slice`; returns also their size."""
        first = offset - self.start
        assert first >= 0, "entries before the start are gone"
        entries = self.entries
        size, last, end = 0, first, len(entries)
        while last < end:
            more = len(entries[last].data) + ENTRY_OVERHEAD_BYTES
            if size + more > bytes_max and last > first:
                break
            size += more
            last += 1
        return tuple(entries[first:last]), size

    def append(self, entries: Iterable[Entry]) -> None:
        held, size = self.entries, 0
        end: int = self.end
        newest = self._epochs[-1] if self._epochs else None
        for entry in entries:
            epoch, kind, data = entry
            if epoch != newest:
                assert epoch >= (self.start_epoch if newest is None else newest), "epochs never fall along a log"
                newest = epoch
                self._epochs.append(epoch)
                self._epoch_starts.append(Offset(end))
            if kind == _MEMBERSHIP:
                self.memberships.append((Offset(end), Membership.decode(data)))
            held.append(entry)
            size += len(data) + ENTRY_OVERHEAD_BYTES
            end += 1
        self.end = Offset(end)
        self.bytes += size

    def truncate(self, end: Offset) -> None:
        """Removes everything from `end` on; the membership before is in force again."""
        assert self.start <= end <= self.end, "truncation stays inside of the log"
        removed = self.entries[end - self.start :]
        del self.entries[end - self.start :]
        self.end = end
        self.bytes -= sum(map(entry_bytes, removed))
        while self._epoch_starts and self._epoch_starts[-1] >= end:
            self._epoch_starts.pop()
            self._epochs.pop()
        while len(self.memberships) > 1 and self.memberships[-1][0] >= end:
            self.memberships.pop()

    def membership_at(self, offset: Offset) -> Membership:
        """Returns the membership in force for a state that has applied everything below `offset`."""
        result = self.memberships[0][1]
        for at, membership in self.memberships[1:]:
            if at >= offset:
                break
            result = membership
        return result

    def drop_before(self, start: Offset) -> None:
        """Drops entries below `start`, which a snapshot covers."""
        assert self.start <= start <= self.snapshot.offset, "only what a snapshot covers is dropped"
        if start == self.start:
            return
        epoch = self.epoch_before(start)
        assert epoch is not None
        membership = self.membership_at(start)
        gone = self.entries[: start - self.start]
        del self.entries[: start - self.start]
        self.bytes -= sum(map(entry_bytes, gone))
        kept = [(at, value) for at, value in self.memberships if at >= start]
        self.memberships = [(start, membership), *kept]
        self.start, self.start_epoch = start, epoch
        keep = bisect_right(self._epoch_starts, start) - 1
        if keep > 0:
            del self._epochs[:keep], self._epoch_starts[:keep]
        if self._epochs and not self.entries:
            self._epochs.clear()
            self._epoch_starts.clear()
        if self._epoch_starts and self._epoch_starts[0] < start:
            self._epoch_starts[0] = start

    def drop_behind(self, bytes_kept: int) -> Offset:
        """Drops entries below the snapshot except the last `bytes_kept` of them; returns the new start."""
        start, size = self.snapshot.offset, 0
        while start > self.start:
            size += entry_bytes(self.entries[start - 1 - self.start])
            if size > bytes_kept:
                break
            start = Offset(start - 1)
        self.drop_before(start)
        return start

    def reset(self, snapshot: SnapshotId, membership: Membership) -> None:
        """Restarts the log after an installed snapshot."""
        self.__init__(snapshot, membership)  # type: ignore[misc]

    def validate(self, *, thorough: bool = True) -> None:
        assert self.end == self.start + len(self.entries), "the end is where the entries end"
        assert not self.entries or self.entries[-1].epoch == self.last_epoch, "the last epoch is that of the last entry"
        assert self.start <= self.membership_offset <= self.end, "the membership in force is that of a held entry"
        assert len(self.memberships) == 1 or self._holds_membership(self.membership_offset), (
            f"the membership in force is from {self.membership_offset}, and no entry there has one"
        )
        if not thorough:
            return
        epochs = [entry.epoch for entry in self.entries]
        assert epochs == sorted(epochs), "epochs never fall"
        assert not epochs or epochs[0] >= self.start_epoch, "the first entry is not older than what came before it"
        assert self._epochs == sorted(set(epochs)), "one start for each epoch held"
        assert all(
            self.entries[s - self.start].epoch == e for e, s in zip(self._epochs, self._epoch_starts, strict=True)
        ), "an epoch starts elsewhere"
        assert self.bytes == sum(map(entry_bytes, self.entries)), "bytes are counted"
        held = [self.start + i for i, entry in enumerate(self.entries) if entry.kind == EntryKind.MEMBERSHIP]
        assert [at for at, _ in self.memberships[1:]] == held, "memberships are those of the entries held"

    def _holds_membership(self, offset: Offset) -> bool:
        held = offset - self.start
        return held < len(self.entries) and self.entries[held].kind == EntryKind.MEMBERSHIP
