"""Lineage of a replica's log: the leader's epoch history, and the offset below which deletes may be compacted away.

The batches do not show this where compaction has removed some, so the leader sends it and the follower stores it.

    leader_epoch, entries    the epoch history of the leader of that epoch, when this log subscribed
    deletes_end              every tombstone and transaction marker at or past this offset is still in the log

Invariants: - A log with gaps stores the leader's history and `deletes_end` before it appends a batch of that leader. So
for every offset below its end the log has the same epoch as the leader, after a crash too. - `deletes_end` is raised
and stored before the cleaner removes a tombstone or marker below it. It never goes down, except where a leader's log
ends below it: a log lacks nothing past its own end.

A replica whose log ends below the `deletes_end` of its leader may hold a value that was deleted meanwhile and would
never see the delete: the leader has it copied from the start (`replication.deletes`, decision 0019).

Stored as `lineage`. A log without it is from an older version: see `assume_lineage`.
"""

from dataclasses import dataclass, replace

from tidelog.log import stored_state as stored
from tidelog.log.damage import DamageState
from tidelog.log.epochs import EpochHistory, LeaderEpochs, sound_entries
from tidelog.log.log_context import LogContext
from tidelog.log.log_offsets import LogOffsets
from tidelog.log.recovery_checkpoint import RecoveryCheckpoint
from tidelog.log.segments import Segments
from tidelog.model.ids import NO_EPOCH, Offset

NOTHING_DELETED = Offset(0)


@dataclass(frozen=True, slots=True)
class Lineage:
    deletes_end: Offset = NOTHING_DELETED
    leader_epoch: int = NO_EPOCH
    entries: tuple[tuple[int, int], ...] = ()

    def covers(self, leader: "Lineage", *, log_end: int) -> bool:
        """Whether a log that has stored this and ends at `log_end` can append batches of `leader` without storing more.
        The history below the end was taken over when this was stored."""
        if self.leader_epoch != leader.leader_epoch or self.deletes_end < leader.deletes_end:
            return False
        known = set(self.entries)
        return all(entry in known for entry in leader.entries if entry[1] >= log_end)

    def complete(self, epochs: EpochHistory, *, log_start: int, log_end: int) -> EpochHistory:
        """The epochs that recovery found, completed by those that compaction erased from the batches.

        Where an epoch is newer than that leader, the log went on without it, and its history says nothing.
        """
        end = min((start for epoch, start in epochs if epoch > self.leader_epoch), default=log_end)
        completed = EpochHistory(list(epochs))
        completed.learn(self.entries, log_start=log_start, log_end=end)
        return completed


def assume_lineage(*, sealed_to: int, has_gaps: bool) -> Lineage:
    """For a log without a stored lineage: if it has gaps, the cleaner may have removed any delete from the sealed
    segments, which end at `sealed_to`."""
    return Lineage(Offset(sealed_to)) if has_gaps else Lineage()


@dataclass(slots=True, eq=False)
class LineageState:
    """Owns the lineage of an open log (`current`), and whether offsets may be missing between batches (`has_gaps`)."""

    _context: LogContext
    _segments: Segments
    _offsets: LogOffsets
    _epochs: LeaderEpochs
    _damage: DamageState
    _checkpoint: RecoveryCheckpoint
    current: Lineage
    has_gaps: bool

    def validate(self) -> None:
        """Assert that the history of the leader is a valid one."""
        assert sound_entries(self.current.entries), f"no history: {self.current}"
        assert self.current.deletes_end >= 0, f"no offset: {self.current}"
        assert self.current.leader_epoch >= 0 or not self.current.entries, f"a history of no leader: {self.current}"

    @property
    def _is_usable(self) -> bool:
        return not self._context.is_closed and self._damage.current is None

    async def allow_gaps(self) -> None:
        """Store that offsets may be missing between batches, before the first gap is written.

        Recovery would take a gap for a torn end otherwise. Until now the log has every delete.
        """
        if not self.has_gaps:
            await self._context.commit(
                {stored.GAPS: stored.encode_number("gaps", 1), stored.LINEAGE: encode(self.current)}
            )
            self.has_gaps = True

    def gaps_stored(self) -> None:
        """A swap of cleaned segments has stored that the log has gaps."""
        self.has_gaps = True

    async def take_over(self, leader: Lineage) -> None:
        """Store what the leader says of its log, which this log is a prefix of. Nobody appends meanwhile."""
        async with self._context.lock:
            if not self._is_usable:
                return
            epochs = self._epochs.copy()
            epochs.learn(leader.entries, log_start=self._offsets.start_offset, log_end=self._segments.end_offset)
            taken_over = replace(leader, deletes_end=max(leader.deletes_end, self.current.deletes_end))
            await self._context.commit(
                {stored.LINEAGE: encode(taken_over), stored.EPOCHS: stored.encode_epochs(epochs)}
            )
            self._epochs.replace(epochs)
            # The cleaner may have raised it meanwhile, and stores that when it has the lock.
            self.current = replace(taken_over, deletes_end=max(taken_over.deletes_end, self.current.deletes_end))

    async def forget_leader(self) -> None:
        """Void what the last leader said: the log follows another one from here on.

        First a recovery point is stored that covers the epochs which the log has from the last leader.
        """
        async with self._context.lock:
            if not self._is_usable or self.current.leader_epoch == NO_EPOCH:
                return
            await self._checkpoint.store()
            await self._context.commit({stored.LINEAGE: encode(Lineage(self.current.deletes_end))})
            self.current = Lineage(self.current.deletes_end)

    async def raise_deletes_end(self, offset: Offset) -> None:
        """Deletes below `offset` are about to be removed: at once in memory, on the device when this returns."""
        if offset <= self.current.deletes_end:
            return
        self.current = replace(self.current, deletes_end=offset)
        async with self._context.lock:
            if not self._context.is_closed:
                await self._store()

    async def copy_from(self, source: "LineageState") -> None:
        """This log is a copy of the source, in another directory. Offsets may be missing in it."""
        self.has_gaps = True
        self.current = source.current
        await self._store()

    def limit_to_end(self) -> None:
        """The log is about to be led: it lacks nothing past its own end."""
        end = Offset(self._segments.end_offset)
        if self.current.deletes_end > end:
            self.current = replace(self.current, deletes_end=end)

    async def _store(self) -> None:
        await self._context.commit({stored.LINEAGE: encode(self.current)})


def encode(lineage: Lineage) -> bytes:
    return stored.encode_lineage(lineage.deletes_end, lineage.leader_epoch, lineage.entries)
