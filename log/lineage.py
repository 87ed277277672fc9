"""What a log takes over from the leader that it is copied from, and which deletes it no longer has.

Batches do not tell this where compaction has removed some of them, so the leader says it and the follower stores it.

    leader_epoch, entries    the epoch history of the leader of that epoch, as it stood when this log was subscribed
    deletes_end              every tombstone and transaction marker at or past this offset is still in the log

Invariants:
- A log with gaps stores the leader's history and `deletes_end` before it takes a batch from that leader. So for every
  offset below its end the log names the same epoch as the leader, after a crash too.
- `deletes_end` is raised and stored before the cleaner removes a tombstone or marker below it. It never goes down,
  except where a leader's log ends below it: a log lacks nothing past its own end.

A replica whose log ends below the `deletes_end` of its leader may hold a value that was deleted meanwhile and would
never see the delete: the leader has it copied from the start (`replication.deletes`, decision 0019).

Stored as the value `lineage`. A log that has none is from before there was one: `guess` says what to believe then.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidelog.log import checkpoint as stored
from tidelog.log.epochs import EpochHistory
from tidelog.model.ids import NO_EPOCH, Offset

if TYPE_CHECKING:
    from tidelog.log.log import Log

NOTHING_DELETED = Offset(0)


@dataclass(frozen=True, slots=True)
class Lineage:
    deletes_end: Offset = NOTHING_DELETED
    leader_epoch: int = NO_EPOCH
    entries: tuple[tuple[int, int], ...] = ()

    def covers(self, leader: "Lineage", *, log_end: int) -> bool:
        """Whether a log that has stored this, and ends there, needs to store nothing more to take batches of `leader`.
        The history below the end was taken over when this was stored."""
        if self.leader_epoch != leader.leader_epoch or self.deletes_end < leader.deletes_end:
            return False
        known = set(self.entries)
        return all(entry in known for entry in leader.entries if entry[1] >= log_end)

    def complete(self, epochs: EpochHistory, *, log_start: int, log_end: int) -> EpochHistory:
        """`epochs` as recovery has put it together, with what compaction had erased from the batches.

        Where an epoch is newer than the leader that said this, the log went on without that leader, and its history
        says nothing.
        """
        end = min((start for epoch, start in epochs if epoch > self.leader_epoch), default=log_end)
        completed = EpochHistory(list(epochs))
        completed.learn(self.entries, log_start=log_start, log_end=end)
        return completed


def guess(*, sealed_to: int, has_gaps: bool) -> Lineage:
    """For a log without a stored lineage: in a log with gaps the cleaner may have removed any delete from the sealed
    segments, which end at `sealed_to`."""
    return Lineage(Offset(sealed_to)) if has_gaps else Lineage()


def gaps_writes(log: "Log") -> stored.Writes:
    """What a log stores when it becomes one with gaps: until now it has every delete."""
    return {
        log.prefix + stored.GAPS: stored.encode_number("gaps", 1),
        log.prefix + stored.LINEAGE: encode(log.lineage),
    }


async def take_over(log: "Log", leader: Lineage) -> None:
    """Store what the leader says of its log, which this log is a prefix of. Nobody appends meanwhile."""
    async with log.lock:
        if log.is_closed or log.damaged is not None:
            return
        epochs = EpochHistory(list(log.epochs))
        epochs.learn(leader.entries, log_start=log.start_offset, log_end=log.end_offset)
        new = replace(leader, deletes_end=max(leader.deletes_end, log.lineage.deletes_end))
        await log.store.commit(
            {
                log.prefix + stored.LINEAGE: encode(new),
                log.prefix + stored.EPOCHS: stored.encode_epochs(epochs),
            }
        )
        log.epochs = epochs
        # The cleaner may have raised it meanwhile, and stores that when it has the lock.
        log.lineage = replace(new, deletes_end=max(new.deletes_end, log.lineage.deletes_end))


async def forget_leader(log: "Log") -> None:
    """The log follows another leader from here on: what the last one said is void. The epochs that the log has by it
    are vouched for by a recovery point first."""
    async with log.lock:
        if log.is_closed or log.damaged is not None or log.lineage.leader_epoch == NO_EPOCH:
            return
        await log.store_mark()
        await log.store.commit({log.prefix + stored.LINEAGE: encode(Lineage(log.lineage.deletes_end))})
        log.lineage = Lineage(log.lineage.deletes_end)


async def raise_deletes_end(log: "Log", offset: Offset) -> None:
    """Deletes below `offset` are about to be removed. In memory at once, so that nobody decides by the old value; on
    the device when this returns."""
    if offset <= log.lineage.deletes_end:
        return
    log.lineage = replace(log.lineage, deletes_end=offset)
    async with log.lock:
        if not log.is_closed:
            await store(log)


async def store(log: "Log") -> None:
    """Store it as it stands."""
    await log.store.commit({log.prefix + stored.LINEAGE: encode(log.lineage)})


def limit_to_end(log: "Log") -> None:
    """The log is about to be led: it lacks nothing past its own end."""
    if log.lineage.deletes_end > log.end_offset:
        log.lineage = replace(log.lineage, deletes_end=log.end_offset)


def encode(lineage: Lineage) -> bytes:
    return stored.encode_lineage(lineage.deletes_end, lineage.leader_epoch, lineage.entries)
